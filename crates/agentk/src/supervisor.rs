//! Maintains the sessions with kas.
//!
//! `plan` decides which sessions there should be. This module dials, starts the sessions, sends them commands
//! and logs. When kas rejects the token, the pauses grow to minutes, and the log says what to do.

mod plan;

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use http::HeaderValue;
use tokio::{sync::Notify, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::plan::{Action, Change, CloseReason, Plan, SessionId};
use crate::{
    address_selector::AddressSelector,
    dial::{Avoid, DialError, Dialer, KasAddress, KasAddresses, Link},
    session::{self, Reachability, Session, SessionContext, Stage},
};

/// For this long, an address whose connection was lost is tried after the others.
const LOST: Duration = Duration::from_secs(30);
/// The most lost addresses that are remembered.
const MAX_LOST: usize = 16;

type Pending<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Maintains sessions with `wanted` replicas of kas until `leave`. Open requests may finish after that.
pub async fn run(
    context: Arc<SessionContext>,
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
        token_replaced: None,
        context,
        selector: AddressSelector::new(&addresses),
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
    sessions: BTreeMap<SessionId, Tracked>,
    /// Addresses whose connection was lost, and when.
    lost: VecDeque<(SocketAddr, Instant)>,
    /// Notified when the status of a session changes.
    changed: Arc<Notify>,
    dial: Pending<Dialled>,
    /// Waits for another token after kas rejected one.
    token_replaced: Pending<()>,
    context: Arc<SessionContext>,
    selector: AddressSelector,
    dialer: Arc<Dialer>,
    leave: CancellationToken,
    tasks: TaskTracker,
}

/// The address that was dialled, and the result.
type Dialled = (KasAddress, Result<Link, DialError>);

struct Tracked {
    session: Session,
    address: KasAddress,
    /// The token that was in the file when the session started.
    used: Option<HeaderValue>,
}

impl Tracked {
    /// Whether the session is open, and kas does not want the agent to connect to another replica.
    fn is_alive(&self) -> bool {
        let status = &self.session.status;
        status.has_changed().is_ok() && !matches!(status.borrow().stage, Stage::Retiring | Stage::Ended(_))
    }
}

impl Supervisor {
    async fn keep(&mut self) {
        loop {
            self.observe();
            let now = Instant::now();
            for action in self.plan.next_actions(now) {
                self.act(action);
            }
            self.context.metrics.replicas_served.set(gauge(self.plan.served(now)));
            self.context.metrics.replicas_wanted.set(gauge(self.plan.target(now)));
            if self.dial.is_none() && self.plan.dial_at(now).is_some_and(|at| at <= now) {
                self.plan.dial_started();
                self.dial = Some(self.attempt(now));
            }
            let wake = self.plan.wake_at(now);
            tokio::select! {
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(wake.unwrap_or(now)), if wake.is_some() => {}
                (address, link) = ready(&mut self.dial) => self.dialled(address, link),
                () = ready(&mut self.token_replaced) => self.plan.token_replaced(Instant::now()),
            }
        }
    }

    /// Dials, preferably an address that has no session and did not just lose one.
    fn attempt(&mut self, now: Instant) -> Pin<Box<dyn Future<Output = Dialled> + Send>> {
        self.lost.retain(|(_, since)| now < *since + LOST);
        let avoid = Avoid {
            used: self.sessions.values().filter_map(|tracked| tracked.session.peer).collect(),
            lost: self.lost.iter().map(|(address, _)| *address).collect(),
            has_other_endpoints: self.selector.has_several_endpoints(),
        };
        let used = self.used();
        let (address, dialer) = (self.selector.choose(&used), Arc::clone(&self.dialer));
        Box::pin(async move {
            let link = dialer.dial(&address, &avoid).await;
            (address, link)
        })
    }

    /// Returns the addresses of open sessions.
    fn used(&self) -> Vec<KasAddress> {
        let alive = self.sessions.values().filter(|tracked| tracked.is_alive());
        alive.map(|tracked| tracked.address.clone()).collect()
    }

    /// Records a failure that a proxy may have caused, and logs when another route is next.
    fn blocked(&mut self, address: &KasAddress, error: &str) {
        if let Some(next) = self.selector.mark_blocked(address) {
            tracing::warn!(
                error,
                address = %address,
                next = %next,
                "kas cannot be reached at this address, possibly because of a proxy: trying the next address"
            );
        }
    }

    fn dialled(&mut self, address: KasAddress, link: Result<Link, DialError>) {
        let now = Instant::now();
        match link {
            Err(error) => {
                self.context.metrics.connect_failures.inc();
                let chain = process::error::chain(&error);
                if error.may_be_proxy() {
                    self.blocked(&address, &chain);
                }
                let next = self.selector.untried(&self.used()).map(ToString::to_string);
                let pause =
                    if next.is_some() { self.plan.dial_failed_here(now) } else { self.plan.dial_failed(now) };
                tracing::warn!(error = chain, next, retry_in = ?pause, "cannot reach kas");
            }
            Ok(link) => {
                let (id, begin) = self.plan.connected(now);
                let used = self.context.token.authorization().ok();
                let session = session::start(
                    Arc::clone(&self.context),
                    link,
                    begin,
                    self.selector.is_trial(&address),
                    Arc::clone(&self.changed),
                    self.leave.clone(),
                    &self.tasks,
                );
                self.sessions.insert(id, Tracked { session, address, used });
            }
        }
    }

    /// Passes changes of the sessions on to the plan.
    fn observe(&mut self) {
        let mut news = Vec::new();
        for (id, tracked) in &mut self.sessions {
            // A session that has ended, or is retiring, says nothing about what answers there now.
            let reachable =
                tracked.session.reachability.get() == Some(&Reachability::Reachable) && tracked.is_alive();
            if reachable && self.selector.confirm(&tracked.address) {
                tracing::debug!(address = %tracked.address, "kas answers at this address");
            }
            let status = &mut tracked.session.status;
            // A session whose task ended without a final status has ended too.
            let vanished = status.has_changed().is_err();
            if vanished || status.has_changed().unwrap_or(true) {
                let mut status = status.borrow_and_update().clone();
                if vanished && !matches!(status.stage, Stage::Ended(_)) {
                    status.stage = Stage::Ended(None);
                }
                news.push((*id, status));
            }
        }
        for (id, status) in news {
            self.changed(id, status);
        }
    }

    fn changed(&mut self, id: SessionId, status: session::SessionStatus) {
        let now = Instant::now();
        let stage = status.stage.clone();
        let change = self.plan.changed(id, status, now);
        let ended = matches!(stage, Stage::Ended(_));
        let peer = self.sessions.get(&id).and_then(|tracked| tracked.session.peer);
        let used = self.sessions.get(&id).and_then(|tracked| tracked.used.clone());
        let address = self.sessions.get(&id).map(|tracked| tracked.address.clone());
        if ended && let Some(Tracked { session, address, .. }) = self.sessions.remove(&id) {
            match session.reachability.get() {
                // It was confirmed before it was lost.
                Some(Reachability::Blocked(error)) => self.blocked(&address, error),
                Some(Reachability::Reachable) | None => {}
            }
        }
        match change {
            Change::Quiet => {}
            Change::Lost { retiring, retry_in } => {
                if let Some(address) = address {
                    self.selector.mark_lost(&address);
                }
                let untried = self.selector.untried(&self.used()).is_some();
                let retry_in = if untried { self.plan.hasten(now) } else { retry_in };
                if let Some(peer) = peer {
                    self.lost.truncate(MAX_LOST - 1);
                    self.lost.push_front((peer, now));
                }
                if retiring {
                    tracing::info!(retry_in = ?retry_in, "this connection to kas takes no new requests: opening another");
                } else {
                    tracing::info!(retry_in = ?retry_in, "the connection to kas was lost");
                }
            }
            Change::Rejected { alone, retry_in } => {
                self.context.metrics.connect_failures.inc();
                let Stage::Ended(Some(status)) = stage else { return };
                if self.context.token.authorization().ok() != used {
                    // The token was replaced meanwhile: kas has not rejected the new one.
                    self.plan.token_replaced(now);
                    return;
                }
                if session::is_wrong_port(&status) {
                    tracing::error!(
                        error = %status,
                        retry_in = ?retry_in,
                        address = address.map(|address| address.to_string()),
                        "this port of kas is for callers or replicas, not for agents: --kas-address must have the port of kas' \
                         agent.listen, by default 8150"
                    );
                } else if alone {
                    tracing::error!(
                        error = %status,
                        retry_in = ?retry_in,
                        "kas rejects this agent: check that --token-file holds the token that is registered for it"
                    );
                } else {
                    tracing::warn!(
                        error = %status,
                        retry_in = ?retry_in,
                        "one kas replica rejects this agent and another accepts it"
                    );
                }
                self.token_replaced = Some(Box::pin(token_replacement(Arc::clone(&self.context), used)));
            }
        }
    }

    fn act(&mut self, action: Action) {
        let session = |id| self.sessions.get(&id).map(|tracked: &Tracked| &tracked.session);
        match action {
            Action::Admit(id) => {
                if let Some(session) = session(id) {
                    session.commands.admit.cancel();
                }
            }
            Action::Close(id, reason) => {
                let Some(session) = session(id) else { return };
                session.commands.close.cancel();
                let replica = name(session);
                match reason {
                    CloseReason::AlreadyServed => {
                        tracing::debug!(replica.id = replica, "already connected to this kas replica")
                    }
                    CloseReason::Leaving => tracing::debug!(
                        replica.id = replica,
                        "this kas replica has asked the agent to connect elsewhere"
                    ),
                    CloseReason::Unnamed => {
                        tracing::debug!("this kas does not name itself: one connection is enough")
                    }
                    CloseReason::Spare => {
                        tracing::info!(replica.id = replica, "connected to enough other kas replicas")
                    }
                }
            }
            Action::Announce(id) => {
                let Some(session) = session(id) else { return };
                self.token_replaced = None;
                let address = self.sessions.get(&id).map(|tracked| tracing::field::display(&tracked.address));
                tracing::info!(
                    replica.id = name(session),
                    address,
                    kas = session.peer.map(tracing::field::display),
                    "connected to kas"
                );
            }
            Action::Replaced(id) => {
                if let Some(session) = session(id) {
                    session.commands.replaced.cancel();
                }
            }
            Action::Ask(id) => {
                if let Some(session) = session(id) {
                    session.commands.ask.notify_one();
                }
            }
            Action::WarnShort => {
                let now = Instant::now();
                tracing::warn!(
                    served = self.plan.served(now),
                    wanted = self.plan.target(now),
                    "connected to fewer kas replicas than wanted: if one fails, this agent may be unreachable for a moment. \
                     Check whether the load balancer sends every connection to the same replica"
                );
            }
            Action::Recovered => tracing::info!("connected to as many kas replicas as wanted"),
        }
    }
}

/// Returns the replicas of a session, for the log.
fn name(session: &Session) -> String {
    let status = session.status.borrow();
    let said = status.answer.as_ref().and_then(|answer| answer.replica.as_ref());
    let replicas = if status.replicas.is_empty() {
        said.into_iter().collect()
    } else {
        status.replicas.iter().collect::<Vec<_>>()
    };
    if replicas.is_empty() {
        return "unnamed".to_owned();
    }
    replicas.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Waits for a future, if there is one, and removes it when it is ready.
///
/// # Cancel safety
/// Cancel safe: the future stays where it is.
async fn ready<T>(pending: &mut Pending<T>) -> T {
    let Some(future) = pending else { return std::future::pending().await };
    let value = future.await;
    *pending = None;
    value
}

/// Waits until the token file holds a token other than `used`.
async fn token_replacement(context: Arc<SessionContext>, used: Option<HeaderValue>) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = context.token.authorization().ok();
        if now.is_some() && now != used {
            return;
        }
    }
}
