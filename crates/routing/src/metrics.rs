//! The metrics of requests for agents, of their tunnels, and of borrow requests between replicas.
//!
//! Labels are enums. The id of an agent is never a label, since a replica may hold a hundred thousand agents.

use cluster::Load;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// How a request for an agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Outcome {
    Answered,
    NotStarted,
    Unknown,
    Refused,
    Cancelled,
}

/// All outcomes except the one of nearly every request.
const OTHERS: [Outcome; 4] = [Outcome::NotStarted, Outcome::Unknown, Outcome::Refused, Outcome::Cancelled];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: Outcome,
}

/// The side of this replica in a borrow request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Side {
    Asked,
    Answered,
}

/// The result of a borrow request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum AskAnswer {
    Ready,
    NotHere,
    Refused,
    Unavailable,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AskLabels {
    side: Side,
    answer: AskAnswer,
}

/// Where a request found its tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Route {
    Local,
    Remote,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabel {
    route: Route,
}

/// Requests for agents, and their tunnels.
#[derive(Debug)]
pub struct RequestMetrics {
    /// Requests for agents that are open now.
    pub requests_open: Gauge,
    /// Those of them that may outlast the time in which kas ends other requests.
    pub requests_long: Gauge,
    requests: Family<OutcomeLabel, Counter>,
    // Resolved once, since the map of a family is behind a lock.
    answered: Counter,
    /// The time from the arrival of a request until it has a tunnel, in seconds.
    pub find_seconds: Histogram,
    /// Requests that wait for a tunnel now.
    pub waiters: Gauge,
    /// Open tunnels, idle and busy.
    pub tunnels: Gauge,
    /// Open tunnels that are occupied by requests whose callers have left.
    pub tunnels_abandoned: Gauge,
    /// Tunnels whose agent broke the protocol.
    pub tunnel_violations: Counter,
    /// Illegal metadata values in responses of agents, which were dropped.
    pub answer_values_dropped: Counter,
    asks: Family<AskLabels, Counter>,
    gitlab_asks: Family<AskLabels, Counter>,
    routed_local: Counter,
    routed_remote: Counter,
    /// Borrow requests that were sent because an earlier one was not answered soon enough.
    pub hedges: Counter,
    /// Requests on a tunnel that was leased from another replica for an earlier request.
    pub borrows_reused: Counter,
    /// Requests of other replicas that went to another tunnel, since the one that was lent had ended.
    pub borrows_moved: Counter,
}

impl RequestMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let requests = Family::<OutcomeLabel, Counter>::default();
        let answered = requests.get_or_create(&OutcomeLabel { outcome: Outcome::Answered }).clone();
        for outcome in OTHERS {
            // For Prometheus, a series that begins above 0 has not grown, so the first failures would be
            // missed.
            drop(requests.get_or_create(&OutcomeLabel { outcome }));
        }
        let routes = Family::<RouteLabel, Counter>::default();
        let route = |route| routes.get_or_create(&RouteLabel { route }).clone();
        let (routed_local, routed_remote) = (route(Route::Local), route(Route::Remote));
        let metrics = Self {
            requests_open: Gauge::default(),
            requests_long: Gauge::default(),
            requests,
            answered,
            find_seconds: Histogram::new([0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0]),
            waiters: Gauge::default(),
            tunnels: Gauge::default(),
            tunnels_abandoned: Gauge::default(),
            tunnel_violations: Counter::default(),
            answer_values_dropped: Counter::default(),
            asks: Family::default(),
            gitlab_asks: Family::default(),
            routed_local,
            routed_remote,
            hedges: Counter::default(),
            borrows_reused: Counter::default(),
            borrows_moved: Counter::default(),
        };
        registry.register(
            "requests_open",
            "Requests for agents that are open",
            metrics.requests_open.clone(),
        );
        registry.register(
            "requests_long",
            "Open upgraded connections to agents, which may outlast the drain timeout",
            metrics.requests_long.clone(),
        );
        registry.register("requests", "Requests for agents by how they ended", metrics.requests.clone());
        registry.register_with_unit(
            "request_find",
            "Time until a request has a tunnel",
            Unit::Seconds,
            metrics.find_seconds.clone(),
        );
        registry.register("requests_waiting", "Requests that wait for a tunnel", metrics.waiters.clone());
        registry.register("tunnels_open", "Open tunnels, idle and busy", metrics.tunnels.clone());
        registry.register(
            "tunnels_abandoned",
            "Open tunnels that are occupied by requests whose callers have left",
            metrics.tunnels_abandoned.clone(),
        );
        registry.register(
            "tunnel_violations",
            "Tunnels reset because their agent broke the protocol or vanished",
            metrics.tunnel_violations.clone(),
        );
        registry.register(
            "answer_values_dropped",
            "Metadata values in answers of agents that are illegal and were dropped",
            metrics.answer_values_dropped.clone(),
        );
        registry.register(
            "peer_asks",
            "Asks for tunnels between replicas, by side and by what became of them",
            metrics.asks.clone(),
        );
        registry.register(
            "gitlab_peer_asks",
            "Asks for tunnels between this replica and replicas of GitLab's kas, by side and by what became of them",
            metrics.gitlab_asks.clone(),
        );
        registry.register(
            "peer_hedges",
            "Further replicas asked because an earlier one did not answer at once",
            metrics.hedges.clone(),
        );
        registry.register(
            "borrows_reused",
            "Requests that went through a tunnel which another replica had lent for an earlier one",
            metrics.borrows_reused.clone(),
        );
        registry.register(
            "borrows_moved",
            "Requests of other replicas that went to another tunnel, since the one they were lent ended before them",
            metrics.borrows_moved.clone(),
        );
        registry.register("routed_requests", "Requests by where their tunnel was found", routes);
        metrics
    }

    /// Counts the end of a request.
    pub fn ended(&self, outcome: Outcome) {
        match outcome {
            Outcome::Answered => self.answered.inc(),
            outcome => self.requests.get_or_create(&OutcomeLabel { outcome }).inc(),
        };
    }

    /// Returns the load of this replica.
    pub fn load(&self) -> Load {
        let count =
            |outcome| self.requests.get(&OutcomeLabel { outcome }).map_or(0, |requests| requests.get());
        let number = |gauge: &Gauge| u64::try_from(gauge.get()).unwrap_or(0);
        Load {
            ended: OTHERS.into_iter().map(count).fold(self.answered.get(), u64::saturating_add),
            open: number(&self.requests_open),
            waiting: number(&self.waiters),
        }
    }

    /// Counts a borrow request between this replica and a replica of GitLab's kas.
    pub fn asked_gitlab(&self, side: Side, answer: AskAnswer) {
        self.gitlab_asks.get_or_create(&AskLabels { side, answer }).inc();
    }

    /// Counts a borrow request between replicas.
    pub fn asked(&self, side: Side, answer: AskAnswer) {
        self.asks.get_or_create(&AskLabels { side, answer }).inc();
    }

    /// Counts a request that has found its tunnel.
    pub fn routed(&self, route: Route) {
        match route {
            Route::Local => self.routed_local.inc(),
            Route::Remote => self.routed_remote.inc(),
        };
    }
}
