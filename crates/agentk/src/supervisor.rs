//! Keeps sessions with kas, whatever happens.
//!
//! `plan` decides which there should be; this dials, starts them, tells them, and writes the log. When kas refuses
//! the token the pauses grow to minutes, and the log says what to do.

mod plan;

use std::{
    collections::{BTreeMap, VecDeque},
    error::Error as _,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use http::HeaderValue;
use tokio::{sync::Notify, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::plan::{Action, Change, Plan, SessionId, Why};
use crate::{
    dial::{Avoid, DialError, Dialer, KasAddress, KasAddresses, Link},
    ladder::Ladder,
    session::{self, Passage, Session, Shared, Stage},
};

/// An address whose connection was lost comes after others for this long.
const LOST: Duration = Duration::from_secs(30);
/// So many lost addresses are remembered.
const MAX_LOST: usize = 16;

type Pending<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Keeps sessions with `wanted` replicas of kas until `leave`, then lets open requests finish.
pub async fn run(
    shared: Arc<Shared>,
    addresses: KasAddresses,
    dialer: Arc<Dialer>,
    wanted: usize,
    leave: CancellationToken,
    tasks: TaskTracker,
) {
    let mut supervisor = Supervisor {
        plan: Plan::new(wanted, Instant::now()),
        sessions: BTreeMap::new(),
        lost: VecDeque::new(),
        changed: Arc::new(Notify::new()),
        dial: None,
        exchange: None,
        shared,
        ladder: Ladder::new(&addresses),
        dialer,
        leave: leave.clone(),
        tasks,
    };
    tokio::select! {
        biased;
        () = leave.cancelled() => {}
        () = supervisor.keep() => {}
    }
}

struct Supervisor {
    plan: Plan,
    sessions: BTreeMap<SessionId, Kept>,
    /// Addresses whose connection was lost, and when.
    lost: VecDeque<(SocketAddr, Instant)>,
    /// A session stands differently.
    changed: Arc<Notify>,
    dial: Pending<Dialled>,
    /// Waits for another token after one was refused.
    exchange: Pending<()>,
    shared: Arc<Shared>,
    ladder: Ladder,
    dialer: Arc<Dialer>,
    leave: CancellationToken,
    tasks: TaskTracker,
}

/// Where was dialled, and what became of it.
type Dialled = (KasAddress, Result<Link, DialError>);

struct Kept {
    session: Session,
    address: KasAddress,
    /// The token in the file when it began.
    used: Option<HeaderValue>,
}

impl Kept {
    /// Whether kas is there, and does not want the agent elsewhere.
    fn is_alive(&self) -> bool {
        let standing = &self.session.standing;
        standing.has_changed().is_ok() && !matches!(standing.borrow().stage, Stage::Retiring | Stage::Over(_))
    }
}

impl Supervisor {
    async fn keep(&mut self) {
        loop {
            self.look();
            let now = Instant::now();
            for action in self.plan.settle(now) {
                self.act(action);
            }
            self.shared.metrics.replicas_served.set(gauge(self.plan.served(now)));
            self.shared.metrics.replicas_wanted.set(gauge(self.plan.target(now)));
            if self.dial.is_none() && self.plan.dial_at(now).is_some_and(|at| at <= now) {
                self.plan.dials();
                self.dial = Some(self.attempt(now));
            }
            let wake = self.plan.wake_at(now);
            tokio::select! {
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(wake.unwrap_or(now)), if wake.is_some() => {}
                (address, link) = ready(&mut self.dial) => self.dialled(address, link),
                () = ready(&mut self.exchange) => self.plan.exchanged(Instant::now()),
            }
        }
    }

    /// Dials, preferably where no session is and none was just lost.
    fn attempt(&mut self, now: Instant) -> Pin<Box<dyn Future<Output = Dialled> + Send>> {
        self.lost.retain(|(_, since)| now < *since + LOST);
        let avoid = Avoid {
            used: self.sessions.values().filter_map(|kept| kept.session.peer).collect(),
            lost: self.lost.iter().map(|(address, _)| *address).collect(),
            elsewhere: self.ladder.has_several_places(),
        };
        let used = self.used();
        let (address, dialer) = (self.ladder.choose(&used), Arc::clone(&self.dialer));
        Box::pin(async move {
            let link = dialer.dial(&address, &avoid).await;
            (address, link)
        })
    }

    /// Returns where a session lives.
    fn used(&self) -> Vec<KasAddress> {
        let alive = self.sessions.values().filter(|kept| kept.is_alive());
        alive.map(|kept| kept.address.clone()).collect()
    }

    /// Notes that an address was met with what a proxy causes, and tells when another way is next.
    fn blocked(&mut self, address: &KasAddress, error: &str) {
        if let Some(next) = self.ladder.failed(address) {
            tracing::warn!(
                error,
                address = %address,
                next = %next,
                "this address does not lead to kas, perhaps because of a proxy: trying the next"
            );
        }
    }

    fn dialled(&mut self, address: KasAddress, link: Result<Link, DialError>) {
        let now = Instant::now();
        match link {
            Err(error) => {
                self.shared.metrics.connect_failures.inc();
                let mut chain = error.to_string();
                let mut cause = error.source();
                while let Some(next) = cause {
                    chain = format!("{chain}: {next}");
                    cause = next.source();
                }
                if error.is_passage() {
                    self.blocked(&address, &chain);
                }
                let next = self.ladder.fresh(&self.used()).map(ToString::to_string);
                let pause =
                    if next.is_some() { self.plan.dial_failed_here(now) } else { self.plan.dial_failed(now) };
                tracing::warn!(error = chain, next, retry_in = ?pause, "cannot reach kas");
            }
            Ok(link) => {
                let (id, begin) = self.plan.connected(now);
                let used = self.shared.token.authorization().ok();
                let session = session::start(
                    Arc::clone(&self.shared),
                    link,
                    begin,
                    self.ladder.is_trial(&address),
                    Arc::clone(&self.changed),
                    self.leave.clone(),
                    &self.tasks,
                );
                self.sessions.insert(id, Kept { session, address, used });
            }
        }
    }

    /// Tells the plan how the sessions stand.
    fn look(&mut self) {
        let mut news = Vec::new();
        for (id, kept) in &mut self.sessions {
            // One that ended, or that kas wants elsewhere, says nothing of what is there now.
            let passes = kept.session.passage.get() == Some(&Passage::Passes) && kept.is_alive();
            if passes && self.ladder.passed(&kept.address) {
                tracing::debug!(address = %kept.address, "this address leads to kas");
            }
            let standing = &mut kept.session.standing;
            // One that ended without a word ended all the same.
            let vanished = standing.has_changed().is_err();
            if vanished || standing.has_changed().unwrap_or(true) {
                let mut standing = standing.borrow_and_update().clone();
                if vanished && !matches!(standing.stage, Stage::Over(_)) {
                    standing.stage = Stage::Over(None);
                }
                news.push((*id, standing));
            }
        }
        for (id, standing) in news {
            self.changed(id, standing);
        }
    }

    fn changed(&mut self, id: SessionId, standing: session::Standing) {
        let now = Instant::now();
        let stage = standing.stage.clone();
        let change = self.plan.changed(id, standing, now);
        let over = matches!(stage, Stage::Over(_));
        let peer = self.sessions.get(&id).and_then(|kept| kept.session.peer);
        let used = self.sessions.get(&id).and_then(|kept| kept.used.clone());
        let address = self.sessions.get(&id).map(|kept| kept.address.clone());
        if over && let Some(Kept { session, address, .. }) = self.sessions.remove(&id) {
            match session.passage.get() {
                // One that is lost was once reached.
                Some(Passage::Blocked(error)) => self.blocked(&address, error),
                Some(Passage::Passes) | None => {}
            }
        }
        match change {
            Change::Quiet => {}
            Change::Lost { retiring, retry_in } => {
                if let Some(address) = address {
                    self.ladder.lost(&address);
                }
                let elsewhere = self.ladder.fresh(&self.used()).is_some();
                let retry_in = if elsewhere { self.plan.hasten(now) } else { retry_in };
                if let Some(peer) = peer {
                    self.lost.truncate(MAX_LOST - 1);
                    self.lost.push_front((peer, now));
                }
                if retiring {
                    tracing::info!(retry_in = ?retry_in, "this connection to kas takes nothing new: making another");
                } else {
                    tracing::info!(retry_in = ?retry_in, "the connection to kas was lost");
                }
            }
            Change::Refused { alone, retry_in } => {
                self.shared.metrics.connect_failures.inc();
                let Stage::Over(Some(status)) = stage else { return };
                if self.shared.token.authorization().ok() != used {
                    // The token was exchanged meanwhile: the new one has not been refused.
                    self.plan.exchanged(now);
                    return;
                }
                if session::is_wrong_port(&status) {
                    tracing::error!(
                        error = %status,
                        retry_in = ?retry_in,
                        address = address.map(|address| address.to_string()),
                        "this is a port of kas for callers or replicas, not for agents: --kas-address must name the port of \
                         agent.listen of kas, 8150 unless configured"
                    );
                } else if alone {
                    tracing::error!(
                        error = %status,
                        retry_in = ?retry_in,
                        "kas refuses this agent: check that --token-file holds the token that was registered for it"
                    );
                } else {
                    tracing::warn!(
                        error = %status,
                        retry_in = ?retry_in,
                        "a replica of kas refuses the agent that another one serves"
                    );
                }
                self.exchange = Some(Box::pin(exchanged(Arc::clone(&self.shared), used)));
            }
        }
    }

    fn act(&mut self, action: Action) {
        let session = |id| self.sessions.get(&id).map(|kept: &Kept| &kept.session);
        match action {
            Action::Admit(id) => {
                if let Some(session) = session(id) {
                    session.orders.admit.cancel();
                }
            }
            Action::Close(id, why) => {
                let Some(session) = session(id) else { return };
                session.orders.close.cancel();
                let replica = name(session);
                match why {
                    Why::Served => {
                        tracing::debug!(replica.id = replica, "this replica of kas is served already")
                    }
                    Why::Leaving => tracing::debug!(replica.id = replica, "this replica of kas is leaving"),
                    Why::Unnamed => {
                        tracing::debug!("this kas does not name itself: one connection is enough")
                    }
                    Why::Spare => {
                        tracing::info!(replica.id = replica, "enough other replicas of kas are served")
                    }
                }
            }
            Action::Announce(id) => {
                let Some(session) = session(id) else { return };
                self.exchange = None;
                let address = self.sessions.get(&id).map(|kept| tracing::field::display(&kept.address));
                tracing::info!(
                    replica.id = name(session),
                    address,
                    kas = session.peer.map(tracing::field::display),
                    "connected to kas"
                );
            }
            Action::Replaced(id) => {
                if let Some(session) = session(id) {
                    session.orders.replaced.cancel();
                }
            }
            Action::Ask(id) => {
                if let Some(session) = session(id) {
                    session.orders.ask.notify_one();
                }
            }
            Action::WarnShort => {
                let now = Instant::now();
                tracing::warn!(
                    served = self.plan.served(now),
                    wanted = self.plan.target(now),
                    "fewer replicas of kas answer than there should be: the loss of one would cut this agent off for a \
                     moment. Does the balancer bring every connection to the same one?"
                );
            }
            Action::Recovered => tracing::info!("as many replicas of kas answer as there should be"),
        }
    }
}

/// Returns the replicas that a session is at, for the log.
fn name(session: &Session) -> String {
    let standing = session.standing.borrow();
    let said = standing.answer.as_ref().and_then(|answer| answer.replica.as_ref());
    let replicas = if standing.replicas.is_empty() {
        said.into_iter().collect()
    } else {
        standing.replicas.iter().collect::<Vec<_>>()
    };
    if replicas.is_empty() {
        return "unnamed".to_owned();
    }
    replicas.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Waits for a future that may be there, and takes it away once it is ready.
///
/// # Cancel safety
/// Cancel safe: the future stays.
async fn ready<T>(pending: &mut Pending<T>) -> T {
    let Some(future) = pending else { return std::future::pending().await };
    let value = future.await;
    *pending = None;
    value
}

/// Waits until the token file holds another token than `used`.
async fn exchanged(shared: Arc<Shared>, used: Option<HeaderValue>) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = shared.token.authorization().ok();
        if now.is_some() && now != used {
            return;
        }
    }
}
