//! Asks replicas what they believe, again and again, and records it.
//!
//! Which agent is where is asked of the replica that holds it: its own registry is the truth.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use history::{History, Micros, Presence, Version, View};
use parking_lot::Mutex;
use proto::kas::api::v1::{
    ExplainAgentRequest, ExplainAgentResponse, ListReplicasRequest, ListReplicasResponse,
};
use testkit::{
    caller::Caller,
    mesh::{EXPLAIN_AGENT, LIST_REPLICAS},
};
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, timeout},
};

use crate::{client::Client, clock, load::Shared};

/// How often a replica is asked for the replicas that it takes for alive: the error of times that are taken
/// from views.
pub(crate) const LOOK: Duration = Duration::from_millis(50);
/// How often it is asked for each watched agent, unless there are many.
const AGENTS: Duration = Duration::from_millis(500);
/// With many watched agents, the questions for one of them are this far apart: each makes the other replicas
/// answer, too.
const EACH: Duration = Duration::from_millis(20);
/// Questions for agents that are open at once.
const AT_ONCE: usize = 8;
/// An answer that takes longer is not waited for: by the list, and by each question for an agent.
const ANSWER: Duration = Duration::from_secs(3);

/// Returns how often a replica is asked for this many agents.
pub(crate) fn period(agents: usize) -> Duration {
    AGENTS.max(EACH * u32::try_from(agents).unwrap_or(u32::MAX))
}

/// How many questions to a replica may be open.
const ASKING: usize = 100;

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

/// Whom each replica trusted since when, in order of time: those in its list that were not suspect.
pub(crate) type Trusted = Arc<Mutex<Vec<(String, Micros, BTreeSet<String>)>>>;

/// Watches all replicas until it is dropped.
#[derive(Debug)]
pub(crate) struct Observer {
    pub(crate) last: Last,
    pub(crate) trusted: Trusted,
    /// The longest time between two looks for agents, in microseconds.
    late: Arc<AtomicU64>,
    tasks: JoinSet<()>,
}

impl Observer {
    /// Begins to watch: agents of `watched`.
    pub(crate) fn start(
        replicas: &[Observed],
        watched: &[i64],
        client: &Arc<Client>,
        history: &Shared,
    ) -> Self {
        let (last, trusted) = (Last::default(), Trusted::default());
        let late = Arc::<AtomicU64>::default();
        let mut tasks = JoinSet::new();
        for replica in replicas {
            let (one, asking, kept) = (replica.clone(), Arc::clone(client), Arc::clone(history));
            let trusts = Arc::clone(&trusted);
            tasks.spawn(async move { membership(&one, &asking, &kept, &trusts).await });
            let (one, asking, kept) = (replica.clone(), Arc::clone(client), Arc::clone(history));
            let (last, watched, late) = (Arc::clone(&last), watched.to_vec(), Arc::clone(&late));
            tasks.spawn(async move { agents(&one, &asking, &kept, &watched, (&last, &late)).await });
        }
        Self { last, trusted, late, tasks }
    }

    /// How late it may be recorded that an agent has come to a replica, or left it: a replica answers after
    /// it has asked the others, which takes seconds when one of them does not answer.
    pub(crate) fn late(&self) -> Micros {
        self.late.load(Ordering::Relaxed)
    }

    /// Stops: what is seen from now on is seen while the run ends.
    pub(crate) async fn stop(&mut self) {
        self.tasks.shutdown().await;
    }
}

/// A connection to a replica, which is made anew after a failure.
struct Asking<'a> {
    replica: &'a Observed,
    client: &'a Client,
    caller: Option<Caller>,
}

impl Asking<'_> {
    async fn caller(&mut self) -> Result<Caller> {
        if let Some(caller) = &self.caller {
            return Ok(caller.clone());
        }
        let caller = Caller::connect(self.replica.api, Some(self.client.token())).await?;
        self.caller = Some(caller.clone());
        Ok(caller)
    }

    /// Asks for agents; `None`: there is no answer.
    async fn look(&mut self, watched: &[i64]) -> Option<(u64, Seen)> {
        // Many questions take seconds on a busy machine.
        let time = ANSWER.max(5 * period(watched.len()));
        let asked = timeout(time, async { look(&self.caller().await?, watched).await }).await;
        self.answered(asked)
    }

    fn answered<T, E>(&mut self, asked: Result<Result<T>, E>) -> Option<T> {
        let answer = asked.ok().and_then(Result::ok);
        if answer.is_none() {
            self.caller = None;
        }
        answer
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
        // Nor is its version known before it has been copied, and while it leaves.
        let version = epoch.is_some().then_some(row.table_version).filter(|version| *version > 0);
        (row.name.clone(), Version { epoch, version })
    })
    .collect()
}

async fn membership(replica: &Observed, client: &Client, history: &Shared, trusted: &Trusted) {
    let mut connection: Option<Caller> = None;
    let mut asking = FuturesUnordered::new();
    let mut latest = 0;
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick(), if asking.len() < ASKING => {
                let at = clock::now();
                if connection.is_none() {
                    let connecting = timeout(ANSWER, Caller::connect(replica.api, Some(client.token()))).await;
                    connection = connecting.ok().and_then(Result::ok);
                }
                let Some(caller) = connection.clone() else { continue };
                asking.push(async move { (at, timeout(ANSWER, list(&caller)).await) });
            }
            // A view is taken when its question arrives. The answer may be delayed by replicas that do not
            // answer, so questions do not wait for each other.
            Some((at, answer)) = asking.next(), if !asking.is_empty() => match answer {
                Ok(Ok(list)) if at >= latest => {
                    latest = at;
                    listed(replica, &list, at, &mut history.lock());
                    let trusts: BTreeSet<String> = live(&list, false).into_keys().collect();
                    let mut trusted = trusted.lock();
                    let before = trusted.iter().rfind(|(observer, ..)| *observer == replica.name);
                    if before.is_none_or(|(_, _, before)| *before != trusts) {
                        trusted.push((replica.name.clone(), at, trusts));
                    }
                }
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => connection = None,
            },
        }
    }
}

fn listed(replica: &Observed, list: &ListReplicasResponse, at: Micros, history: &mut History) {
    let own = list.replicas.first().map_or(0, |row| row.generation);
    if own > 0
        && let Some(life) = history.lives.iter_mut().rfind(|life| life.replica == replica.name)
        && life.to.is_none()
    {
        match life.epoch {
            None => life.epoch = Some(own),
            // Its gossip has started anew. What it says of itself is not held against it.
            Some(_) if !life.had(own) => life.later.push(own),
            Some(_) => {}
        }
    }
    let view = View {
        observer: replica.name.clone(),
        process: own,
        at,
        until: at,
        live: live(list, true),
        agents: None,
        connections: None,
    };
    push(&mut history.views, view);
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
    let mut answers = futures_util::stream::iter(watched.iter().copied())
        .map(|agent| async move {
            let question = ExplainAgentRequest { agent_id: agent };
            let answer: ExplainAgentResponse = timeout(ANSWER, caller.unary(EXPLAIN_AGENT, &question))
                .await
                .context("no answer in time")??;
            anyhow::Ok((agent, answer))
        })
        .buffer_unordered(AT_ONCE);
    while let Some(answer) = answers.next().await {
        let (agent, answer) = answer?;
        let own = answer.replicas.into_iter().next().context("the replica speaks first")?;
        let mut holders: BTreeSet<String> =
            own.beliefs.into_iter().filter(|belief| belief.holds).map(|belief| belief.name).collect();
        if own.idle_tunnels + own.busy_tunnels > 0 {
            seen.own.insert(agent);
            holders.insert(own.name);
        }
        seen.agents.insert(agent, holders);
    }
    Ok((generation, seen))
}

async fn agents(
    replica: &Observed,
    client: &Client,
    history: &Shared,
    watched: &[i64],
    (last, late): (&Last, &AtomicU64),
) {
    let mut asking = Asking { replica, client, caller: None };
    // By agent: the index of its presence in the history.
    let mut present: BTreeMap<i64, usize> = BTreeMap::new();
    let mut before = 0;
    // When the last looks began: the one that was answered, and the one that was not.
    let (mut earlier, mut failed) = (None, 0);
    loop {
        let at = clock::now();
        if let Some((process, seen)) = asking.look(watched).await {
            let ended = began(&replica.name, at, &history.lock());
            let (since, is_new) = match earlier {
                Some(last) if last >= ended => (last, false),
                // A process that did not answer yet held no agent.
                _ => (ended.max(failed), true),
            };
            earlier = Some(at);
            late.fetch_max(clock::now().saturating_sub(since), Ordering::Relaxed);
            // The tunnels of the process before have ended with it.
            let restarted = is_new || before != process;
            before = process;
            held(replica, &seen, restarted, &mut present, &mut history.lock());
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
            push(&mut history.lock().views, view);
            last.lock().insert(replica.name.clone(), (at, seen));
        } else {
            failed = at;
        }
        tokio::time::sleep(period(watched.len())).await;
    }
}

/// Before this, the process of a replica that answers at `at` held no agent: the end of the process before
/// it, or, for the first one, the time at which it was known to be ready.
fn began(name: &str, at: Micros, history: &History) -> Micros {
    let lives = || history.lives.iter().filter(|life| life.replica == name);
    let ended = lives().filter_map(|life| life.to).filter(|to| *to <= at).max();
    ended.or_else(|| lives().map(|life| life.from).min()).map_or(at, |since| since.min(at))
}

/// Records which agents the replica holds itself.
fn held(
    replica: &Observed,
    seen: &Seen,
    restarted: bool,
    present: &mut BTreeMap<i64, usize>,
    history: &mut History,
) {
    let now = clock::now();
    let lost = |agent: &&i64| restarted || !seen.own.contains(agent);
    let gone: Vec<_> = present.keys().filter(lost).copied().collect();
    for agent in gone {
        if let Some(index) = present.remove(&agent) {
            history.presences[index].to = Some(now);
        }
    }
    for agent in &seen.own {
        present.entry(*agent).or_insert_with(|| {
            history.presences.push(Presence {
                agent: *agent,
                replica: replica.name.clone(),
                connection: None,
                from: now,
                to: None,
                invalid_since: None,
            });
            history.presences.len() - 1
        });
    }
}

#[cfg(test)]
mod tests {
    use history::{Life, SECOND};

    use super::*;

    #[test]
    fn a_process_begins_after_the_one_before_it() {
        let life = |replica: &str, from, to: Option<Micros>| Life {
            replica: replica.to_owned(),
            epoch: None,
            later: Vec::new(),
            from: from * SECOND,
            to: to.map(|to| to * SECOND),
            killed: to.is_some(),
        };
        let mut history = History::default();
        assert_eq!(began("a", 5 * SECOND, &history), 5 * SECOND, "not known to be ready yet");
        history.lives = vec![life("a", 1, None), life("b", 2, Some(30))];
        assert_eq!(began("a", 5 * SECOND, &history), SECOND);
        history.lives = vec![life("a", 1, Some(10)), life("b", 2, Some(12)), life("a", 14, None)];
        assert_eq!(began("a", 16 * SECOND, &history), 10 * SECOND);
    }
}
