//! Load: requests at a fixed rate, and watches and upgraded connections that stay open.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use history::{History, Kind, Outcome, Request};
use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::client::{Client, Upgrade};

/// What goes through a stream: messages, and the time between them.
const MESSAGES: (u64, Duration) = (20, Duration::from_millis(100));
/// Requests that are open at most. More are not begun, and counted.
const OPEN: usize = 4_000;
/// How many watches share a connection to each replica, which has 250 streams.
const WATCHES: usize = 100;
/// A request that may have run is repeated with a new id at most this often.
const AGAIN: usize = 3;

/// The history of the process that controls a run.
pub(crate) type Shared = Arc<Mutex<History>>;

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Requests in a second.
    pub(crate) rate: u32,
    /// The agents: from, and below.
    pub(crate) agents: (i64, i64),
    /// Agents below this have a Kubernetes API server; each second request to them is HTTP.
    pub(crate) clusters: i64,
    /// Watches that stay open.
    pub(crate) watches: usize,
    /// Upgraded connections that stay open, SPDY and WebSocket in turns.
    pub(crate) execs: usize,
    /// gRPC streams of two seconds, one after the other.
    pub(crate) streams: usize,
    /// How long a request may take.
    pub(crate) deadline: Duration,
}

/// A load that runs.
#[derive(Debug)]
pub(crate) struct Load {
    stop: CancellationToken,
    tasks: JoinSet<()>,
    skipped: Arc<AtomicU64>,
}

/// Ids of requests, unique in a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ids(Arc<AtomicU64>);

impl Ids {
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Load {
    pub(crate) fn start(
        client: &Arc<Client>,
        history: &Shared,
        ids: &Ids,
        plan: Plan,
        replicas: usize,
    ) -> Self {
        let stop = CancellationToken::new();
        let skipped = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let context = Sending { client: Arc::clone(client), history: Arc::clone(history), ids: ids.clone() };
        if plan.rate > 0 {
            tasks.spawn(requests(context.clone(), plan, replicas, stop.clone(), Arc::clone(&skipped)));
        }
        let mut watching = context.clone();
        for number in 0..plan.watches {
            // As clients do: a full connection would hold other requests back until one of its streams ends.
            if number % WATCHES == 0 {
                watching.client = client.again();
            }
            tasks.spawn(open(watching.clone(), plan, Kind::Watch, number, replicas, stop.clone()));
        }
        for number in 0..plan.execs {
            tasks.spawn(open(context.clone(), plan, Kind::Upgrade, number, replicas, stop.clone()));
        }
        for number in 0..plan.streams {
            tasks.spawn(open(context.clone(), plan, Kind::Stream, number, replicas, stop.clone()));
        }
        Self { stop, tasks, skipped }
    }

    /// Begins nothing more, waits until what is open has ended, and returns how many requests were not begun
    /// because too many were open.
    pub(crate) async fn stop(mut self) -> u64 {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
        self.skipped.load(Ordering::Relaxed)
    }
}

#[derive(Clone)]
struct Sending {
    client: Arc<Client>,
    history: Shared,
    ids: Ids,
}

impl Sending {
    fn record(&self, request: Request) {
        self.history.lock().requests.push(request);
    }

    /// Sends a request, and repeats it like a client whose requests are idempotent.
    async fn logical(self, agent: i64, kind: Kind, replica: usize, deadline: Duration) {
        let mut first = None;
        for attempt in 0..=AGAIN {
            let id = self.ids.next();
            let mut request = self.client.send(id, agent, kind, replica + attempt, deadline).await;
            request.retry_of = first;
            first = first.or(Some(id));
            let again = request.outcome == Some(Outcome::Unknown);
            self.record(request);
            if !again {
                break;
            }
        }
    }
}

async fn requests(
    sending: Sending,
    plan: Plan,
    replicas: usize,
    stop: CancellationToken,
    skipped: Arc<AtomicU64>,
) {
    let mut tick = interval(Duration::from_secs(1) / plan.rate);
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let open = Arc::new(Semaphore::new(OPEN));
    let mut sent = JoinSet::new();
    let agents = plan.agents.1 - plan.agents.0;
    for number in 0_i64.. {
        tokio::select! {
            _ = tick.tick() => {}
            () = stop.cancelled() => break,
        }
        while sent.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&open).try_acquire_owned() else {
            skipped.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        let agent = plan.agents.0 + number % agents;
        let round = usize::try_from(number / agents).unwrap_or(0);
        let kind = if agent < plan.clusters && round % 2 == 1 { Kind::Http } else { Kind::Unary };
        // Every agent is asked through every replica in turn.
        let replica = (usize::try_from(number).unwrap_or(0) + round) % replicas;
        let sending = sending.clone();
        sent.spawn(async move {
            sending.logical(agent, kind, replica, plan.deadline).await;
            drop(permit);
        });
    }
    while sent.join_next().await.is_some() {}
}

/// Keeps one watch or upgraded connection open: a new one when it ends.
async fn open(
    sending: Sending,
    plan: Plan,
    kind: Kind,
    number: usize,
    replicas: usize,
    stop: CancellationToken,
) {
    let below = if kind == Kind::Stream { plan.agents.1 } else { plan.clusters.min(plan.agents.1) };
    let agents = (below - plan.agents.0).max(1);
    let agent = plan.agents.0 + i64::try_from(number).unwrap_or(0) % agents;
    let mut replica = number % replicas;
    while !stop.is_cancelled() {
        let id = sending.ids.next();
        let request = match kind {
            Kind::Watch => sending.client.watch(id, agent, replica, stop.clone()).await,
            Kind::Stream => sending.client.stream(id, agent, replica, MESSAGES, plan.deadline).await,
            _ => {
                let upgrade = if number.is_multiple_of(2) { Upgrade::WebSocket } else { Upgrade::Spdy };
                sending.client.exec(id, agent, replica, upgrade, stop.clone()).await
            }
        };
        let refused = match kind {
            Kind::Stream => request.outcome != Some(Outcome::Ok),
            _ => request.phases.is_empty(),
        };
        sending.record(request);
        replica = (replica + 1) % replicas;
        if refused {
            tokio::select! {
                () = sleep(Duration::from_millis(200)) => {}
                () = stop.cancelled() => {}
            }
        }
    }
}
