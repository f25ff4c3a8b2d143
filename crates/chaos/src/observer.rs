//! Asks replicas what they believe, again and again, and records it.
//!
//! Which agent is where is asked of the replica that holds it: its own registry is the truth.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use futures_util::{FutureExt as _, future::BoxFuture};
use history::{Micros, Presence, Version, View};
use parking_lot::Mutex;
use proto::kas::api::v1::{
    ExplainAgentRequest, ExplainAgentResponse, ListReplicasRequest, ListReplicasResponse,
};
use testkit::{
    caller::Caller,
    mesh::{EXPLAIN_AGENT, LIST_REPLICAS},
};
use tokio::{task::JoinSet, time::timeout};

use crate::{client::Client, clock, load::Shared};

/// How often a replica is asked for the replicas that it takes for alive: the error of times that are taken
/// from views.
pub(crate) const LOOK: Duration = Duration::from_millis(50);
/// How often it is asked for each watched agent.
const AGENTS: Duration = Duration::from_millis(500);
/// An answer that takes longer is not waited for.
const ANSWER: Duration = Duration::from_secs(3);

/// One replica to be asked.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// Its name.
    pub(crate) name: String,
    /// Its API.
    pub(crate) api: SocketAddr,
}

/// What a replica answered about the watched agents.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    /// The replicas that it trusts: those that it takes for alive, without suspect ones.
    pub(crate) live: BTreeSet<String>,
    /// Which replicas hold each agent, as it sees it.
    pub(crate) agents: BTreeMap<i64, BTreeSet<String>>,
    /// Which agents it holds itself.
    pub(crate) own: BTreeSet<i64>,
}

/// What has been seen last, by replica.
pub(crate) type Last = Arc<Mutex<BTreeMap<String, (Micros, Seen)>>>;

/// Watches all replicas until it is dropped.
#[derive(Debug)]
pub(crate) struct Observer {
    pub(crate) last: Last,
    _tasks: JoinSet<()>,
}

impl Observer {
    /// Begins to watch: agents of `watched`.
    pub(crate) fn start(
        replicas: &[Observed],
        watched: &[i64],
        client: &Arc<Client>,
        history: &Shared,
    ) -> Self {
        let last = Last::default();
        let mut tasks = JoinSet::new();
        for replica in replicas {
            let (one, asking, kept) = (replica.clone(), Arc::clone(client), Arc::clone(history));
            tasks.spawn(async move { membership(&one, &asking, &kept).await });
            let (one, asking, kept) = (replica.clone(), Arc::clone(client), Arc::clone(history));
            let (last, watched) = (Arc::clone(&last), watched.to_vec());
            tasks.spawn(async move { agents(&one, &asking, &kept, &watched, &last).await });
        }
        Self { last, _tasks: tasks }
    }
}

/// Calls `ask` again and again over one connection, which is made anew after a failure.
async fn again<T>(
    replica: &Observed,
    client: &Client,
    each: Duration,
    ask: impl for<'a> Fn(&'a Caller) -> BoxFuture<'a, Result<T>>,
    mut take: impl FnMut(Micros, Option<T>),
) {
    let mut caller = None;
    loop {
        let at = clock::now();
        let asked = timeout(ANSWER, async {
            let caller = match &mut caller {
                Some(caller) => caller,
                none => none.insert(Caller::connect(replica.api, Some(client.token())).await?),
            };
            ask(caller).await
        });
        match asked.await {
            Ok(Ok(answer)) => take(at, Some(answer)),
            _ => {
                caller = None;
                take(at, None);
            }
        }
        tokio::time::sleep(each).await;
    }
}

async fn list(caller: &Caller) -> Result<ListReplicasResponse> {
    caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await
}

/// Returns the replicas that the one that was asked takes for alive, with the versions of their tables:
/// suspect ones too, or only those that it trusts.
fn live(list: &ListReplicasResponse, suspect: bool) -> BTreeMap<String, Version> {
    let alive =
        |standing: &str| matches!(standing, "self" | "live" | "draining") || suspect && standing == "suspect";
    let live = list.replicas.iter().filter(|row| alive(&row.standing));
    live.map(|row| {
        // Before gossip has told the generation, the table may already be there.
        let epoch = (row.generation > 0).then_some(row.generation);
        (row.name.clone(), Version { epoch, version: epoch.is_some().then_some(row.table_version) })
    })
    .collect()
}

async fn membership(replica: &Observed, client: &Client, history: &Shared) {
    again(replica, client, LOOK, |caller| list(caller).boxed(), |at, list| {
        let Some(list) = list else { return };
        let mut history = history.lock();
        let own = list.replicas.first().map_or(0, |row| row.generation);
        if own > 0
            && let Some(life) = history.lives.iter_mut().rfind(|life| life.replica == replica.name)
            && life.to.is_none()
        {
            life.epoch = life.epoch.or(Some(own));
        }
        let view = View {
            observer: replica.name.clone(),
            process: own,
            at,
            until: at,
            live: live(&list, true),
            agents: None,
            connections: None,
        };
        push(&mut history.views, view);
    })
    .await;
}

/// Adds a view, or extends the last one of its kind.
fn push(views: &mut Vec<View>, view: View) {
    let of_kind = |other: &&mut View| {
        other.observer == view.observer && other.agents.is_some() == view.agents.is_some()
    };
    if let Some(last) = views.iter_mut().rev().find(of_kind)
        && last.process == view.process
        && (&last.live, &last.agents) == (&view.live, &view.agents)
    {
        last.until = view.until;
    } else {
        views.push(view);
    }
}

/// Asks a replica about agents.
pub(crate) async fn look(caller: &Caller, watched: &[i64]) -> Result<(u64, Seen)> {
    let list = list(caller).await?;
    let generation = list.replicas.first().map_or(0, |row| row.generation);
    let mut seen = Seen { live: live(&list, false).into_keys().collect(), ..Seen::default() };
    for agent in watched {
        let answer: ExplainAgentResponse =
            caller.unary(EXPLAIN_AGENT, &ExplainAgentRequest { agent_id: *agent }).await?;
        let own = answer.replicas.into_iter().next().context("the replica speaks first")?;
        let mut holders: BTreeSet<String> =
            own.beliefs.into_iter().filter(|belief| belief.holds).map(|belief| belief.name).collect();
        if own.idle_tunnels + own.busy_tunnels > 0 {
            seen.own.insert(*agent);
            holders.insert(own.name);
        }
        seen.agents.insert(*agent, holders);
    }
    Ok((generation, seen))
}

async fn agents(replica: &Observed, client: &Client, history: &Shared, watched: &[i64], last: &Last) {
    // By agent: the index of its presence in the history.
    let mut present: BTreeMap<i64, usize> = BTreeMap::new();
    let mut before = 0;
    again(
        replica,
        client,
        AGENTS,
        |caller| {
            let watched = watched.to_vec();
            async move { look(caller, &watched).await }.boxed()
        },
        |at, answer| {
            let Some((process, seen)) = answer else { return };
            let now = clock::now();
            let mut history = history.lock();
            // The tunnels of the process before have ended with it.
            let restarted = before != process;
            before = process;
            let lost = |agent: &&i64| restarted || !seen.own.contains(agent);
            let gone: Vec<_> = present.keys().filter(lost).copied().collect();
            for agent in gone {
                if let Some(index) = present.remove(&agent) {
                    history.presences[index].to = Some(now);
                }
            }
            for agent in &seen.own {
                if !present.contains_key(agent) {
                    present.insert(*agent, history.presences.len());
                    history.presences.push(Presence {
                        agent: *agent,
                        replica: replica.name.clone(),
                        connection: None,
                        from: now,
                        to: None,
                        invalid_since: None,
                    });
                }
            }
            let live = seen.live.iter().map(|name| (name.clone(), Version { epoch: None, version: None }));
            let view = View {
                observer: replica.name.clone(),
                process,
                at,
                until: at,
                live: live.collect(),
                agents: Some(seen.agents.clone()),
                connections: None,
            };
            push(&mut history.views, view);
            last.lock().insert(replica.name.clone(), (at, seen));
        },
    )
    .await;
}
