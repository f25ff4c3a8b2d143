//! The metrics of requests for agents, of their tunnels, and of what replicas ask each other for them.
//!
//! Labels are enums; an agent's id is never one, since a replica may hold a hundred thousand.

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

/// All but the one that nearly every request has.
const OTHERS: [Outcome; 4] = [Outcome::NotStarted, Outcome::Unknown, Outcome::Refused, Outcome::Cancelled];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: Outcome,
}

/// Which side of an ask between replicas this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Side {
    Asked,
    Answered,
}

/// What became of an ask for a tunnel.
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
    requests: Family<OutcomeLabel, Counter>,
    // Resolved once: a family's map is behind a lock.
    answered: Counter,
    /// From the request's arrival until it has a tunnel, in seconds.
    pub find_seconds: Histogram,
    /// Requests that wait for a tunnel now.
    pub waiters: Gauge,
    /// Open tunnels, idle and busy.
    pub tunnels: Gauge,
    /// Tunnels whose agent did what the protocol does not allow.
    pub tunnel_violations: Counter,
    /// Values of agents' answers that were dropped as illegal.
    pub answer_values_dropped: Counter,
    asks: Family<AskLabels, Counter>,
    gitlab_asks: Family<AskLabels, Counter>,
    routed_local: Counter,
    routed_remote: Counter,
    /// Asks that went out because an earlier one was not answered at once.
    pub hedges: Counter,
    /// Requests that went through a tunnel which another replica had lent for an earlier one.
    pub borrows_reused: Counter,
    /// Requests of other replicas that had another tunnel than the one they were lent, which had ended before
    /// them.
    pub borrows_moved: Counter,
}

impl RequestMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let requests = Family::<OutcomeLabel, Counter>::default();
        let answered = requests.get_or_create(&OutcomeLabel { outcome: Outcome::Answered }).clone();
        for outcome in OTHERS {
            // A series that begins above 0 has not grown, for Prometheus: the first requests that break would
            // be missed.
            drop(requests.get_or_create(&OutcomeLabel { outcome }));
        }
        let routes = Family::<RouteLabel, Counter>::default();
        let route = |route| routes.get_or_create(&RouteLabel { route }).clone();
        let (routed_local, routed_remote) = (route(Route::Local), route(Route::Remote));
        let metrics = Self {
            requests_open: Gauge::default(),
            requests,
            answered,
            find_seconds: Histogram::new([0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0]),
            waiters: Gauge::default(),
            tunnels: Gauge::default(),
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

    /// Returns what this replica has to do.
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

    /// Counts an ask of a replica of GitLab's kas, or to one.
    pub fn asked_gitlab(&self, side: Side, answer: AskAnswer) {
        self.gitlab_asks.get_or_create(&AskLabels { side, answer }).inc();
    }

    /// Counts an ask between replicas.
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
