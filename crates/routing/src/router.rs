//! Finds a tunnel for a request: in the registry of this replica, else at the replicas that the tracker
//! names, else it waits for one until the deadline.
//!
//! **Subscribe, look up, wait.** What the tracker returns is a hint, and only the answer of an owner is
//! certain. The first owner is asked immediately and the next one after a short time. Suspect replicas are
//! asked last. The first tunnel is used, and the other borrow requests are cancelled.
//!
//! The retry rule: a request may go to another tunnel as long as nothing of it was written to an agent, and
//! never after that.

mod search;
mod trace;
mod whereabouts;

use std::{
    collections::HashMap,
    fmt::Write as _,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use cluster::{Abandoned, Replica, ReplicaHealth, ReplicaState, ReplicaStatus, Tracker, TrackerError};
use grpc::{Code, Deadline, Outcome, Status};
use http::{HeaderMap, HeaderValue};
use ids::{AgentId, ConnectionId, ReplicaId};
use tokio::time::Instant;
use tunnel::{
    features::Features,
    frame,
    kas_end::{AgentKind, Exchange, Failure, Head, Info, Job, Tunnel},
    meta::Binary,
};

pub use self::trace::RouteTrace;
use self::{
    search::{Found, Search},
    whereabouts::Whereabouts,
};
use crate::{
    long::LongRequest,
    metadata,
    metrics::{self, RequestMetrics, Route},
    peer::{self, Peers, lease_pool::LeasePool},
    refusal,
    registry::{Lack, Needs, TunnelRegistry},
};
use observe::RequestRecord;
use observe::audit;
use observe::refusals::{ListenerName, Refusals};

/// Routes requests to agents.
pub struct Router {
    registry: Arc<TunnelRegistry>,
    tracker: Arc<dyn Tracker>,
    metrics: Arc<RequestMetrics>,
    refusals: Arc<Refusals>,
    find_timeout: Duration,
    /// This replica, which is not asked as a peer.
    me: ReplicaId,
    /// `None`: there are no other replicas.
    peers: Option<Arc<Peers>>,
    /// The tunnels that this replica leases from them.
    leases: Arc<LeasePool>,
    whereabouts: Whereabouts,
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("registry", &self.registry).finish_non_exhaustive()
    }
}

/// A request for an agent.
pub struct AgentRequest {
    /// The agent.
    pub agent: AgentId,
    /// One connection of it, or any.
    pub connection: Option<ConnectionId>,
    /// The full path.
    pub method: Arc<str>,
    /// The headers of the caller. Those that must not be passed on are omitted later.
    pub headers: HeaderMap,
    /// The request id.
    pub correlation: HeaderValue,
    /// When the response must be complete.
    pub deadline: Deadline,
    /// Until when the request waits for a tunnel; `None`: until the deadline, or for the configured time if
    /// there is none.
    pub wait_until: Option<Instant>,
    /// gRPC frames that are not compressed.
    pub body: grpc::Body,
    /// What agentk must support. Only tunnels of one that does get the request.
    pub needs: Features,
    /// The request is an upgraded connection: it may outlast the time in which replicas that drain end other
    /// requests. It gets no tunnel that is leased for several requests.
    pub is_long: bool,
    /// The request has no end of its own, as a watch. An agentk that cannot cancel it gets few of these.
    pub is_endless: bool,
    /// Set before the body is read: what the agentk that gets the request supports.
    pub chosen: ChosenAgentk,
    /// The steps of the request, for its caller.
    pub trace: RouteTrace,
    /// The record of the request, for the audit log and for spans.
    pub record: RequestRecord,
}

impl std::fmt::Debug for AgentRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AgentRequest({:?}, {})", self.agent, self.method)
    }
}

/// The agentk that gets a request, for a body that is written accordingly.
///
/// The router sets it before it reads the first byte of the body. Until that, another agentk may be chosen.
#[derive(Clone, Debug, Default)]
pub struct ChosenAgentk(Arc<AtomicU8>);

impl ChosenAgentk {
    /// Sets what it supports.
    fn set(&self, features: Features) {
        self.0.store(features.bits(), Ordering::Relaxed);
    }

    /// Returns what it supports; nothing if it is not known yet.
    pub fn features(&self) -> Features {
        Features::from_bits(self.0.load(Ordering::Relaxed))
    }
}

/// The beginning of a response, and its body.
#[derive(Debug)]
pub struct AgentAnswer {
    /// The beginning, or the whole response.
    pub head: Head,
    /// The rest, after [`Head::Headers`].
    pub body: Answering,
}

/// The rest of a response. The request is counted when it ends.
#[derive(Debug)]
pub struct Answering {
    exchange: Exchange,
    open: Open,
    _long: Option<LongRequest>,
}

impl http_body::Body for Answering {
    type Data = bytes::Bytes;
    type Error = grpc::BoxError;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>>> {
        let polled = std::pin::Pin::new(&mut self.exchange).poll_frame(cx);
        if let std::task::Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            self.open.outcome = match Status::from_headers(trailers).and_then(|status| status.outcome()) {
                Some(_) => metrics::Outcome::Unknown,
                None => metrics::Outcome::Answered,
            };
        }
        polled
    }
}

/// Counts a request as open until it drops.
#[derive(Debug)]
struct Open {
    metrics: Arc<RequestMetrics>,
    outcome: metrics::Outcome,
}

impl Open {
    fn new(metrics: &Arc<RequestMetrics>) -> Self {
        metrics.requests_open.inc();
        // The outcome if the caller leaves and everything is dropped.
        Self { metrics: Arc::clone(metrics), outcome: metrics::Outcome::Cancelled }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.metrics.requests_open.dec();
        self.metrics.ended(self.outcome);
    }
}

impl Router {
    /// Routes over the tunnels of `registry` and of `peers`. A request without a deadline waits at most
    /// `find_timeout` for a tunnel.
    pub fn new(
        registry: Arc<TunnelRegistry>,
        tracker: Arc<dyn Tracker>,
        refusals: Arc<Refusals>,
        find_timeout: Duration,
        me: ReplicaId,
        peers: Option<Arc<Peers>>,
    ) -> Self {
        let leases = LeasePool::new(Arc::clone(&tracker));
        let metrics = Arc::clone(registry.metrics());
        Self {
            registry,
            tracker,
            metrics,
            refusals,
            find_timeout,
            me,
            peers,
            leases,
            whereabouts: Whereabouts::default(),
        }
    }

    /// Returns how many tunnels this replica holds.
    pub fn tunnels(&self) -> u64 {
        u64::try_from(self.metrics.tunnels.get()).unwrap_or(0)
    }

    /// Returns what was refused at this replica.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Returns the tunnels that this replica leases from others between two requests.
    pub fn leases(&self) -> &Arc<LeasePool> {
        &self.leases
    }

    /// Whether a replica is known to hold the agent: this one, or another one that may be asked for a tunnel.
    ///
    /// # Errors
    /// [`TrackerError`] if another replica may hold it, and the tracker cannot say so.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn finds(&self, agent: AgentId) -> Result<bool, TrackerError> {
        if self.registry.holds(agent) {
            return Ok(true);
        }
        let candidates = self.tracker.locate(agent).await?;
        Ok(self.peers.is_some() && candidates.iter().any(|candidate| candidate.replica.id != self.me))
    }

    /// Whether the agent is connected, with or without a tunnel, as far as replicas answer. It asks all of
    /// them, so it is for requests that have failed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn is_connected(&self, agent: AgentId) -> bool {
        self.registry.occupancy(agent).transports > 0
            || self.finds(agent).await.unwrap_or(false)
            || !self.elsewhere_without_tunnel(agent).await.is_empty()
    }

    /// Returns the other replicas to which the agent is connected without a tunnel.
    async fn elsewhere_without_tunnel(&self, agent: AgentId) -> Arc<[Replica]> {
        match self.peers {
            Some(_) => self.whereabouts.without_tunnel(&*self.tracker, agent).await,
            None => Arc::default(),
        }
    }

    /// Returns the registry of the tunnels of this replica.
    pub fn registry(&self) -> &Arc<TunnelRegistry> {
        &self.registry
    }

    /// Sends a request to its agent and returns the beginning of the response.
    ///
    /// # Errors
    /// A status whose [`Status::outcome`] is "not started" or "unknown", and whose message names the agent
    /// and what to do.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the request.
    pub async fn route(&self, request: AgentRequest) -> Result<AgentAnswer, Status> {
        let mut open = Open::new(&self.metrics);
        let result = self.attempt(request).await;
        open.outcome = match &result {
            // This changes when its trailers are passed on.
            Ok((Head::Headers(_), ..)) => metrics::Outcome::Cancelled,
            Ok(_) => metrics::Outcome::Answered,
            Err(status) => match status.outcome() {
                Some(Outcome::NotStarted) => metrics::Outcome::NotStarted,
                Some(Outcome::Unknown) => metrics::Outcome::Unknown,
                None => metrics::Outcome::Refused,
            },
        };
        let (head, exchange, long) = result?;
        Ok(AgentAnswer { head, body: Answering { exchange, open, _long: long } })
    }

    async fn attempt(&self, request: AgentRequest) -> Result<(Head, Exchange, Option<LongRequest>), Status> {
        let AgentRequest {
            agent,
            connection,
            method,
            headers,
            correlation,
            deadline,
            wait_until,
            body,
            needs,
            is_long,
            is_endless,
            chosen,
            trace,
            record,
        } = request;
        let arrived = Instant::now();
        let mut body = body;
        let info = |binary| {
            metadata::request_info(&method, &headers, deadline, &correlation, binary)
                .map_err(|error| metadata::untransferable(&error, &self.refusals, ListenerName::Api))
        };
        let search = Search {
            router: self,
            agent,
            connection,
            method: &method,
            headers: &headers,
            needs: Needs { features: needs, is_endless },
            is_long,
            deadline,
            wait_until,
            correlation: &correlation,
            arrived,
            trace: &trace,
        };
        loop {
            let found = match search.own() {
                Some(grant) => Found::Own(grant),
                None => match search.leased().await {
                    Some(leased) => Found::Leased(leased),
                    None => {
                        // A request that no agent could be sent must not wait.
                        info(Binary::Base64)?;
                        Box::pin(search.anywhere()).await?
                    }
                },
            };
            let (kind, features, version) = match &found {
                Found::Own(grant) => {
                    let Info { kind, features, version, .. } = *grant.tunnel().info();
                    (kind, features, version)
                }
                // Tunnels of other kinds are lent for one request only.
                Found::Leased(leased) => (AgentKind::Ours, leased.features(), None),
                Found::Lent(lent, _) => (lent.kind, lent.features, None),
            };
            // A replica of GitLab's kas received the metadata with the borrow request, and writes it itself.
            let start = match &found {
                Found::Lent(lent, _) => lent.start(),
                Found::Own(_) | Found::Leased(_) => None,
            };
            // The search finds no such tunnel. A mistake there would give a caller the rights of agentk.
            if !features.contains(needs) {
                return Err(refusal::unsupported(agent, Lack { missing: needs.without(features), version }));
            }
            chosen.set(features);
            let request_info = match start {
                Some(start) => start,
                None => {
                    let writer = info(kind.binary())?;
                    let mut info = bytes::BytesMut::with_capacity(512);
                    writer.put_control(frame::response::REQUEST_INFO, &mut info);
                    info.freeze()
                }
            };
            let job = Job::new(request_info, body);
            let mut long = None;
            let mut begin = |tunnel: &Arc<Tunnel>, job| {
                long = is_long.then(|| LongRequest::begin(tunnel, &self.metrics));
                tunnel.begin(job, deadline)
            };
            let begun = match found {
                Found::Own(grant) => {
                    self.metrics.routed(Route::Local);
                    record.routed(|| audit::Route::Local);
                    trace.note(|| format!("started through a tunnel of this replica, {}", self.me));
                    begin(&grant.take(), job)
                }
                Found::Lent(lent, owner) => {
                    self.metrics.routed(Route::Remote);
                    record.routed(|| audit::Route::Peer(owner.clone()));
                    trace.note(|| format!("started through a tunnel of replica {owner}"));
                    let pool = lent.again.then(|| self.leases.pool_of(agent, &method, &owner));
                    let leased = pool.is_some();
                    let (tunnel, pump) = lent.into_tunnel(agent, pool);
                    let begun = begin(&tunnel, job);
                    if begun.is_ok() {
                        if leased {
                            tokio::spawn(peer::write(pump));
                        } else {
                            run(pump).await;
                        }
                    }
                    begun
                }
                Found::Leased(leased) => {
                    let owner = leased.owner().clone();
                    let begun = match leased.take() {
                        Some(tunnel) => begin(&tunnel, job),
                        None => Err(job),
                    };
                    if begun.is_ok() {
                        self.metrics.routed(Route::Remote);
                        self.metrics.borrows_reused.inc();
                        record.routed(|| audit::Route::Peer(owner.clone()));
                        trace.note(|| {
                            format!("started through a tunnel of replica {owner} that was leased to this one")
                        });
                    }
                    begun
                }
            };
            let mut exchange = match begun {
                Ok(exchange) => exchange,
                // The tunnel ended in the meantime.
                Err(job) => {
                    body = job.into_body();
                    continue;
                }
            };
            self.metrics.find_seconds.observe(arrived.elapsed().as_secs_f64());
            match exchange.head().await {
                Ok(head) => {
                    trace.note(|| "the answer began".to_owned());
                    return Ok((head, exchange, long));
                }
                // Nothing was written, so any other tunnel may serve the request.
                Err(Failure::NotStarted(job)) => body = job.into_body(),
                Err(Failure::Refused) => {
                    return Err(Status::new(
                        Code::Unavailable,
                        format!("agent {agent} closed its tunnel before it started the request: repeat it"),
                    )
                    .with_outcome(Outcome::NotStarted));
                }
                Err(failure) => return Err(exchange.late_status(&failure)),
            }
        }
    }

    /// Explains why no tunnel was found. `abandoned`: what other replicas answered about abandoned requests.
    async fn not_found(
        &self,
        agent: AgentId,
        deadline: Deadline,
        arrived: Instant,
        abandoned: &HashMap<ReplicaId, Abandoned>,
    ) -> Status {
        // Only for the text of the status.
        let known = self.tracker.replicas().await;
        let views = self.tracker.views(agent);
        let holds = |id: &ReplicaId| views.iter().any(|view| view.holds && view.replica.id == *id);
        let (mut lend, mut silent, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let own = self.registry.occupancy(agent);
        if own.idle + own.busy > 0 {
            lend.push(Holder { name: "this replica".to_owned(), abandoned: own.all_abandoned() });
        }
        for status in known.replicas.iter().filter(|status| status.replica.id != self.me) {
            let ReplicaStatus { replica, state, health, .. } = status;
            let answers = matches!(health, Some(ReplicaHealth::Live | ReplicaHealth::Draining));
            match (holds(&replica.id), answers) {
                (true, true) => lend.push(Holder {
                    name: whereabouts(replica),
                    abandoned: abandoned.get(&replica.id).copied(),
                }),
                (true, false) => silent.push(whereabouts(replica)),
                // A replica that has shut down cleanly holds no agent.
                (false, false) if *state != ReplicaState::Left => others.push(whereabouts(replica)),
                (false, _) => {}
            }
        }
        // Replicas of GitLab's kas are known only by their entries, and do not answer that they are busy.
        let of_gitlab = views.iter().filter(|view| {
            view.holds && known.replicas.iter().all(|status| status.replica.id != view.replica.id)
        });
        silent.extend(of_gitlab.map(|view| whereabouts(&view.replica)));
        let nowhere = lend.is_empty() && silent.is_empty();
        let text = if nowhere && own.transports > 0 {
            without_tunnel(agent, arrived.elapsed(), "this replica")
        } else if nowhere && let Err(error) = self.tracker.locate(agent).await {
            // The owner may be known to a store that does not answer.
            format!(
                "could not look up for {:.1} s where agent {agent} is connected: {}: repeat the request later",
                arrived.elapsed().as_secs_f64(),
                process::error::chain(&error)
            )
        } else if nowhere
            && let there = self.elsewhere_without_tunnel(agent).await
            && !there.is_empty()
        {
            let there: Vec<String> = there.iter().map(whereabouts).collect();
            without_tunnel(agent, arrived.elapsed(), &list(&there))
        } else {
            absence(agent, arrived.elapsed(), &lend, &silent, &others)
        };
        let code = if deadline.instant().is_some() { Code::DeadlineExceeded } else { Code::Unavailable };
        Status::new(code, text).with_outcome(Outcome::NotStarted)
    }
}

/// Returns the name of a replica, and its address if that differs.
fn whereabouts(replica: &Replica) -> String {
    if replica.id.as_str() == &*replica.address {
        format!("replica {}", replica.id)
    } else {
        format!("replica {} ({})", replica.id, replica.address)
    }
}

/// Explains that an agent has a transport connection to replicas and no tunnel, neither idle nor busy.
fn without_tunnel(agent: AgentId, waited: Duration, place: &str) -> String {
    format!(
        "agent {agent} is connected to {place}, but has no tunnel; waited {:.1} s: repeat the request later; \
         GitLab's agentk opens tunnels that were reset again after 10 s to 5 min, and the log of agentk has the reason",
        waited.as_secs_f64()
    )
}

/// Returns names as a list. If there are many, the last ones are counted.
fn list(names: &[String]) -> String {
    const NAMES: usize = 5;
    let mut text = names[..names.len().min(NAMES)].join(", ");
    if names.len() > NAMES {
        let _ = write!(text, " and {} more", names.len() - NAMES);
    }
    text
}

/// A replica that holds an agent and lent no tunnel.
struct Holder {
    /// It, with its address.
    name: String,
    /// All its tunnels of the agent are occupied by requests whose callers have left.
    abandoned: Option<Abandoned>,
}

/// Explains why no tunnel of an agent was found. `lend`: the replicas that hold the agent and lent no tunnel.
/// `silent`: those that hold it and did not answer. `others`: other replicas that could not be asked.
fn absence(
    agent: AgentId,
    waited: Duration,
    lend: &[Holder],
    silent: &[String],
    others: &[String],
) -> String {
    let waited = waited.as_secs_f64();
    let occupied: Vec<Abandoned> = lend.iter().filter_map(|holder| holder.abandoned).collect();
    let all_occupied = !lend.is_empty() && occupied.len() == lend.len();
    let tunnels = occupied.iter().fold(0, |sum: u32, abandoned| sum.saturating_add(abandoned.tunnels));
    // The last caller of all.
    let since = occupied.iter().map(|abandoned| abandoned.since).min().unwrap_or_default();
    let occupied_for = format!(
        "all its tunnels ({tunnels}) have been occupied by abandoned requests for {:.1} s",
        since.as_secs_f64()
    );
    let names = |holders: &mut dyn Iterator<Item = &Holder>| {
        list(&holders.map(|holder| holder.name.clone()).collect::<Vec<_>>())
    };
    let mut text = match (lend, silent) {
        ([], []) if others.is_empty() => format!("agent {agent} is not connected; waited {waited:.1} s"),
        ([], []) => {
            format!("agent {agent} is not connected to a replica that answers; waited {waited:.1} s")
        }
        ([], silent) => {
            format!("agent {agent} is connected to {}, which did not answer for {waited:.1} s", list(silent))
        }
        (lend, _) if all_occupied => format!(
            "agent {agent} is connected to {}, but {occupied_for}; waited {waited:.1} s",
            names(&mut lend.iter())
        ),
        (lend, _) => format!(
            "agent {agent} is connected to {}, but had no idle tunnel for {waited:.1} s",
            names(&mut lend.iter())
        ),
    };
    if !all_occupied && !occupied.is_empty() {
        let there = names(&mut lend.iter().filter(|holder| holder.abandoned.is_some()));
        let _ = write!(text, "; at {there}, {occupied_for}");
    }
    if !lend.is_empty() && !silent.is_empty() {
        let _ = write!(text, "; it is connected to {} too, which did not answer", list(silent));
    }
    if !others.is_empty() {
        let (count, s) = (others.len(), if others.len() == 1 { "" } else { "s" });
        let _ = write!(text, "; {count} other replica{s} could not be asked: {}", list(others));
    }
    text.push_str(match (lend, silent) {
        ([], []) => ": check that agentk runs in its cluster, reaches this kas and has a valid token",
        ([], _) => ": repeat the request when it answers, or when the agent has connected to another",
        _ if !occupied.is_empty() => {
            ": its agentk cannot cancel the requests of callers that have left, and its API server has not ended them: \
             restart agentk, or update it (GitLab's to 16 or later)"
        }
        _ => ": repeat the request later",
    });
    text
}

/// Polls the writer of a request to another replica once, which is enough for a small request. If that was
/// not all, a task of its own continues.
async fn run(pump: impl Future<Output = ()> + Send + Unpin + 'static) {
    let mut pump = Some(pump);
    std::future::poll_fn(|cx: &mut Context<'_>| {
        if let Some(running) = &mut pump
            && Pin::new(running).poll(cx).is_ready()
        {
            pump = None;
        }
        Poll::Ready(())
    })
    .await;
    if let Some(pump) = pump {
        tokio::spawn(pump);
    }
}

#[cfg(test)]
mod component;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_that_hold_the_agent_and_do_not_answer_are_named_and_others_are_counted() {
        let agent = AgentId::new(3).unwrap();
        let names = |names: &[&str]| names.iter().map(|name| format!("replica {name}")).collect::<Vec<_>>();
        let said = |lend: &[&str], silent: &[&str], others: &[&str]| {
            let lend: Vec<Holder> =
                names(lend).into_iter().map(|name| Holder { name, abandoned: None }).collect();
            absence(agent, Duration::from_millis(1500), &lend, &names(silent), &names(others))
        };
        let check = "check that agentk runs in its cluster, reaches this kas and has a valid token";
        assert_eq!(said(&[], &[], &[]), format!("agent 3 is not connected; waited 1.5 s: {check}"));
        assert_eq!(
            said(&[], &[], &["a", "b"]),
            format!(
                "agent 3 is not connected to a replica that answers; waited 1.5 s; 2 other replicas could not be asked: \
                 replica a, replica b: {check}"
            )
        );
        assert_eq!(
            said(&[], &["a"], &["b"]),
            "agent 3 is connected to replica a, which did not answer for 1.5 s; 1 other replica could not be asked: \
             replica b: repeat the request when it answers, or when the agent has connected to another"
        );
        assert_eq!(
            said(&["a"], &["b"], &[]),
            "agent 3 is connected to replica a, but had no idle tunnel for 1.5 s; it is connected to replica b too, \
             which did not answer: repeat the request later"
        );
        let many: Vec<String> = (0..9).map(|n| n.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(said(&[], &many, &[]).contains("replica 4 and 4 more, which did not answer"));
    }

    #[test]
    fn tunnels_that_abandoned_requests_occupy_are_named_with_what_to_do() {
        let agent = AgentId::new(3).unwrap();
        let holder = |name: &str, abandoned: Option<(u32, u64)>| Holder {
            name: format!("replica {name}"),
            abandoned: abandoned
                .map(|(tunnels, seconds)| Abandoned { tunnels, since: Duration::from_secs(seconds) }),
        };
        let said = |lend: &[Holder]| absence(agent, Duration::from_millis(1500), lend, &[], &[]);
        let advice = ": its agentk cannot cancel the requests of callers that have left, and its API server has not \
                      ended them: restart agentk, or update it (GitLab's to 16 or later)";
        assert_eq!(
            said(&[holder("a", Some((10, 35))), holder("b", Some((2, 60)))]),
            format!(
                "agent 3 is connected to replica a, replica b, but all its tunnels (12) have been occupied by abandoned \
                 requests for 35.0 s; waited 1.5 s{advice}"
            )
        );
        assert_eq!(
            said(&[holder("a", None), holder("b", Some((2, 60)))]),
            format!(
                "agent 3 is connected to replica a, replica b, but had no idle tunnel for 1.5 s; at replica b, all its \
                 tunnels (2) have been occupied by abandoned requests for 60.0 s{advice}"
            )
        );
    }
}
