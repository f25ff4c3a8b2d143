//! Requests with ids and their outcomes. A check needs only these and the requests that agents received.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Outcome};
use parking_lot::Mutex;
use testkit::{
    caller::{Answer, Caller},
    handler::path,
    kas::within,
    mesh::Mesh,
    raw_agent::ServingAgent,
};
use tokio::{task::JoinSet, time::Instant};

/// A request that takes longer than its deadline plus this has no outcome.
const GRACE: Duration = Duration::from_secs(15);

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    /// With the right response.
    Answered,
    /// It certainly never reached an agent.
    NotStarted,
    /// It may have run.
    Unknown,
    /// The connection to the replica that was asked was lost.
    Lost,
}

/// The outcome of each request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<BTreeMap<String, (End, String)>>>);

impl Ledger {
    fn put(&self, id: String, end: End, text: String) {
        let earlier = self.0.lock().insert(id, (end, text));
        assert_eq!(earlier, None, "a request has one outcome");
    }

    /// Returns how many ended in this way.
    pub(crate) fn count(&self, end: End) -> usize {
        let ends = self.0.lock();
        ends.values().filter(|(other, _)| *other == end).count()
    }

    /// Returns how many ended.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Returns the messages of those that ended in this way.
    pub(crate) fn texts(&self, end: End) -> Vec<String> {
        let ends = self.0.lock();
        ends.values().filter(|(other, _)| *other == end).map(|(_, text)| text.clone()).collect()
    }

    /// Sends one request and records its outcome.
    pub(crate) async fn echo(&self, caller: &Caller, agent: i64, timeout: Duration) -> End {
        let id = format!("{:032x}", rand::random::<u128>());
        let begun = Instant::now();
        let request = caller
            .to_agent(agent, &path("Echo"))
            .header("x-gitlab-correlation-id", &id)
            .header("grpc-timeout", format!("{}m", timeout.as_millis()));
        let got = caller.call(request, &[id.as_bytes()]).await;
        assert!(begun.elapsed() < timeout + GRACE, "{id} took {:?}: {got:?}", begun.elapsed());
        let (end, text) = match &got {
            Err(error) => (End::Lost, format!("{error:#}")),
            Ok(answer) => judge(answer, &id),
        };
        self.put(id, end, text);
        end
    }

    /// Checks that no request ran twice, that answered ones ran, and that those that were not started did
    /// not.
    pub(crate) fn check(&self, agents: &[&ServingAgent]) -> Result<()> {
        let mut ran: BTreeMap<String, usize> = BTreeMap::new();
        for id in agents.iter().flat_map(|agent| agent.ids()) {
            *ran.entry(id).or_default() += 1;
        }
        for (id, times) in &ran {
            ensure!(*times == 1, "request {id} ran {times} times");
        }
        for (id, (end, text)) in &*self.0.lock() {
            match end {
                End::Answered => ensure!(ran.contains_key(id), "{id} was answered and never ran"),
                End::NotStarted => {
                    ensure!(!ran.contains_key(id), "{id} ran although it was not started: {text}")
                }
                End::Unknown | End::Lost => {}
            }
        }
        Ok(())
    }
}

fn judge(answer: &Answer, id: &str) -> (End, String) {
    let end = match (answer.status.code(), answer.status.outcome()) {
        (Code::Ok, _) => {
            assert_eq!(answer.messages, [id.to_owned()], "the answer of another request");
            End::Answered
        }
        (Code::Unavailable | Code::DeadlineExceeded, Some(Outcome::NotStarted)) => End::NotStarted,
        (Code::Unavailable | Code::DeadlineExceeded, Some(Outcome::Unknown)) => End::Unknown,
        _ => panic!("{id}: neither an answer nor an outcome: {}", answer.status),
    };
    (end, answer.status.to_string())
}

/// Sends one echo request that must succeed.
pub(crate) async fn echo(mesh: &Mesh, replica: usize, agent: i64) -> Result<()> {
    let ledger = Ledger::default();
    let end = ledger.echo(&mesh.caller(replica).await?, agent, Duration::from_secs(15)).await;
    ensure!(end == End::Answered, "agent {agent} by replica {replica}: {:?}", ledger.texts(end));
    Ok(())
}

/// A load of requests until it is stopped.
pub(crate) struct Load {
    /// Their outcomes.
    pub(crate) ledger: Ledger,
    stop: Arc<AtomicBool>,
    workers: JoinSet<()>,
}

impl Load {
    /// Starts `workers` for each of `replicas` that send requests to `agent`. A worker whose replica is gone
    /// continues with the next one.
    pub(crate) async fn start(mesh: &Mesh, replicas: &[usize], agent: i64, workers: usize) -> Result<Self> {
        let mut load = Self { ledger: Ledger::default(), stop: Arc::default(), workers: JoinSet::new() };
        let mut callers = Vec::new();
        for replica in replicas {
            callers.push(mesh.caller(*replica).await?);
        }
        for first in 0..callers.len() {
            for _ in 0..workers {
                let (callers, ledger, stop) = (callers.clone(), load.ledger.clone(), Arc::clone(&load.stop));
                let next = AtomicUsize::new(first);
                load.workers.spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let caller = &callers[next.load(Ordering::Relaxed) % callers.len()];
                        if ledger.echo(caller, agent, Duration::from_secs(15)).await == End::Lost {
                            next.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        }
        Ok(load)
    }

    /// Waits until this many more requests have ended.
    pub(crate) async fn more(&self, requests: usize) -> Result<()> {
        let goal = self.ledger.len() + requests;
        within(Duration::from_secs(40), &format!("{goal} requests have ended"), async || {
            let now = self.ledger.len();
            Ok(if now >= goal { Ok(()) } else { Err(now) })
        })
        .await
    }

    /// Stops after the open requests have ended.
    pub(crate) async fn stop(mut self) -> Result<Ledger> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(worker) = self.workers.join_next().await {
            worker.context("a worker panicked")?;
        }
        Ok(self.ledger)
    }
}
