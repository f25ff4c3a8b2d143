//! Every metric family of kas, registered once.
//!
//! Labels are enums; an agent's id is never one, since a replica may hold a hundred thousand.

use std::{path::Path, sync::atomic::AtomicU64, time::Duration};

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

/// Which listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum ListenerName {
    Agent,
    Api,
    Private,
}

/// Why something was refused or ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Reason {
    Unauthenticated,
    /// Whether it may come in could not be checked.
    Unchecked,
    /// It was the oldest of too many connections that had shown nothing yet.
    HalfOpen,
    Handshake,
    Accept,
    /// No frame came in time.
    Silent,
    /// Headers were not complete in time, or there were too many.
    Headers,
    Pings,
    /// Frames that carry nothing.
    IdleFrames,
    Resets,
    /// A stream more than one connection may have open.
    Streams,
    /// A message was too large, compressed beyond measure, or, of an agent that begins a stream, wrong or late.
    Message,
    /// No request for a long time.
    Idle,
    WaitersFull,
    TunnelsFull,
    RateLimit,
    Revoked,
    Violation,
}

/// How a lookup in GitLab ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum LookupOutcome {
    Found,
    Unauthenticated,
    Forbidden,
    Unavailable,
    /// The rate limit, or the bound on lookups, did not let it through.
    Limited,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LookupLabel {
    outcome: LookupOutcome,
}

/// What was known of a token when an agent showed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum CacheAnswer {
    Agent,
    Error,
    /// A lookup was under way already.
    Joined,
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabel {
    answer: CacheAnswer,
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

/// What another replica tells of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum PeerRecord {
    Summary,
    Changes,
    Snapshot,
    Message,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RecordLabel {
    record: PeerRecord,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AskLabels {
    side: Side,
    answer: AskAnswer,
}

/// Why a record of the audit log was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum AuditLoss {
    QueueFull,
    WriteFailed,
    /// It was not written before the process ended.
    NotFlushed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AuditLossLabel {
    reason: AuditLoss,
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DropLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrafficLabel {
    what: &'static str,
}

/// Of what a certificate's end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum CertificatePart {
    /// The certificate that is shown.
    Leaf,
    /// What ends first of all in its file.
    Chain,
    /// What ends last of the authorities in a file.
    Authority,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateLabels {
    section: &'static str,
    part: CertificatePart,
    file: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    listener: ListenerName,
    reason: Reason,
}

/// The families.
#[derive(Debug)]
pub struct Metrics {
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
    /// Open configuration streams.
    pub agent_connections: Gauge,
    /// Open transport connections of agents.
    pub agent_transports: Gauge,
    /// Tunnels whose agent did what the protocol does not allow.
    pub tunnel_violations: Counter,
    /// Values of agents' answers that were dropped as illegal.
    pub answer_values_dropped: Counter,
    refusals: Family<RefusalLabels, Counter>,
    lookups: Family<LookupLabel, Counter>,
    cache: Family<CacheLabel, Counter>,
    /// Until GitLab answered a lookup, in seconds.
    pub gitlab_seconds: Histogram,
    /// Connected agents that were asked for after their time was over.
    pub late_renewals: Counter,
    asks: Family<AskLabels, Counter>,
    gitlab_asks: Family<AskLabels, Counter>,
    routed_local: Counter,
    routed_remote: Counter,
    /// Asks that went out because an earlier one was not answered at once.
    pub hedges: Counter,
    /// Requests that went through a tunnel which another replica had lent for an earlier one.
    pub borrows_reused: Counter,
    /// Requests of other replicas that had another tunnel than the one they were lent, which had ended before them.
    pub borrows_moved: Counter,
    /// Replicas that live, this one included.
    pub replicas_live: Gauge,
    /// Live replicas whose table is not known completely.
    pub replicas_unsynced: Gauge,
    /// Agents that this replica announces.
    pub table_agents: Gauge,
    /// 1 while gossip hears nobody although discovery names others.
    pub gossip_lonely: Gauge,
    /// How often gossip was started anew.
    pub gossip_restarts: Counter,
    gossip_incarnations: Gauge,
    peer_records_unread: Family<RecordLabel, Counter>,
    gossip_datagrams_dropped: Family<DropLabel, Gauge>,
    gossip_traffic: Family<TrafficLabel, Gauge>,
    certificates: Family<CertificateLabels, Gauge>,
    redis_up: Gauge,
    redis_listening: Gauge,
    redis_latency: Gauge<f64, AtomicU64>,
    redis_entries: Gauge,
    redis_unwritten: Gauge,
    redis_remembered: Gauge,
    /// Files this process may open.
    pub file_limit: Gauge<u64, AtomicU64>,
    /// Records of the audit log that were written.
    pub audit_records: Counter,
    /// Writes of the audit log that failed.
    pub audit_write_errors: Counter,
    audit_lost: Family<AuditLossLabel, Counter>,
    /// Tasks that run or wait now; read when metrics are asked for.
    pub tasks: Gauge,
    /// Who looks at the page now.
    pub page_viewers: Gauge,
    /// Viewers of the page who found no room.
    pub page_viewers_refused: Counter,
}

impl Metrics {
    /// Makes the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let requests = Family::<OutcomeLabel, Counter>::default();
        let answered = requests.get_or_create(&OutcomeLabel { outcome: Outcome::Answered }).clone();
        for outcome in OTHERS {
            // A series that begins above 0 has not grown, for Prometheus: the first requests that break would be missed.
            drop(requests.get_or_create(&OutcomeLabel { outcome }));
        }
        let routes = Family::<RouteLabel, Counter>::default();
        let route = |route| routes.get_or_create(&RouteLabel { route }).clone();
        let (routed_local, routed_remote) = (route(Route::Local), route(Route::Remote));
        let metrics = Self {
            asks: Family::default(),
            gitlab_asks: Family::default(),
            routed_local,
            routed_remote,
            hedges: Counter::default(),
            borrows_reused: Counter::default(),
            borrows_moved: Counter::default(),
            requests_open: Gauge::default(),
            requests,
            answered,
            find_seconds: Histogram::new([0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0]),
            waiters: Gauge::default(),
            tunnels: Gauge::default(),
            agent_connections: Gauge::default(),
            agent_transports: Gauge::default(),
            tunnel_violations: Counter::default(),
            answer_values_dropped: Counter::default(),
            refusals: Family::default(),
            lookups: Family::default(),
            cache: Family::default(),
            late_renewals: Counter::default(),
            gitlab_seconds: Histogram::new([0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0]),
            replicas_live: Gauge::default(),
            replicas_unsynced: Gauge::default(),
            table_agents: Gauge::default(),
            gossip_lonely: Gauge::default(),
            gossip_restarts: Counter::default(),
            gossip_incarnations: Gauge::default(),
            peer_records_unread: Family::default(),
            gossip_datagrams_dropped: Family::default(),
            gossip_traffic: Family::default(),
            certificates: Family::default(),
            redis_up: Gauge::default(),
            redis_listening: Gauge::default(),
            redis_latency: Gauge::default(),
            redis_entries: Gauge::default(),
            redis_unwritten: Gauge::default(),
            redis_remembered: Gauge::default(),
            file_limit: Gauge::default(),
            audit_records: Counter::default(),
            audit_write_errors: Counter::default(),
            audit_lost: Family::default(),
            tasks: Gauge::default(),
            page_viewers: Gauge::default(),
            page_viewers_refused: Counter::default(),
        };
        for reason in [AuditLoss::QueueFull, AuditLoss::WriteFailed, AuditLoss::NotFlushed] {
            // Alarms look for a change from 0.
            metrics.audit_lost(reason, 0);
        }
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
            "connected_agents",
            "Open configuration streams",
            metrics.agent_connections.clone(),
        );
        registry.register(
            "agent_transports",
            "Open transport connections of agents",
            metrics.agent_transports.clone(),
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
            "refusals",
            "Connections and streams that were refused or ended early",
            metrics.refusals.clone(),
        );
        registry.register(
            "gitlab_lookups",
            "Lookups of agents in GitLab by how they ended",
            metrics.lookups.clone(),
        );
        registry.register_with_unit(
            "gitlab_lookup",
            "Time until GitLab answered a lookup",
            Unit::Seconds,
            metrics.gitlab_seconds.clone(),
        );
        registry.register(
            "identity_late_renewals",
            "Checks of connected agents in GitLab that began after agent.info_cache_ttl was over",
            metrics.late_renewals.clone(),
        );
        registry.register(
            "identity_cache",
            "Tokens shown by agents, by what was known of them from earlier lookups in GitLab",
            metrics.cache.clone(),
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
        registry.register("routed_requests", "Requests by where their tunnel was found", routes);
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
        metrics.replicas_live.set(1);
        registry.register(
            "replicas_live",
            "Replicas that live, this one included",
            metrics.replicas_live.clone(),
        );
        registry.register(
            "replicas_unsynced",
            "Live replicas whose table is not known completely here",
            metrics.replicas_unsynced.clone(),
        );
        registry.register(
            "table_agents",
            "Agents that this replica announces to the others",
            metrics.table_agents.clone(),
        );
        registry.register(
            "gossip_lonely",
            "1 while gossip hears nobody although discovery names other replicas",
            metrics.gossip_lonely.clone(),
        );
        registry.register(
            "gossip_restarts",
            "How often gossip was started anew within this process",
            metrics.gossip_restarts.clone(),
        );
        registry.register(
            "gossip_incarnations",
            "Processes of other replicas that gossip remembers, those that died in the last minutes among them",
            metrics.gossip_incarnations.clone(),
        );
        registry.register(
            "peer_records_unread",
            "What other replicas told in a form that this version does not read, as a later version may",
            metrics.peer_records_unread.clone(),
        );
        registry.register(
            "gossip_datagrams_dropped",
            "Datagrams of gossip that were not taken, since the start, by reason",
            metrics.gossip_datagrams_dropped.clone(),
        );
        registry.register(
            "gossip_traffic",
            "Datagrams and bytes of gossip since the start",
            metrics.gossip_traffic.clone(),
        );
        registry.register_with_unit(
            "certificate_not_after_timestamp",
            "When certificates end, since 1970, by the section of the configuration that names their file",
            Unit::Seconds,
            metrics.certificates.clone(),
        );
        registry.register(
            "tasks",
            "Tasks of this process: connections, streams and what it does itself",
            metrics.tasks.clone(),
        );
        registry.register(
            "redis_up",
            "1 while this replica's sign of life can be written to Redis (tracker redis)",
            metrics.redis_up.clone(),
        );
        registry.register(
            "redis_listening",
            "1 while what other replicas publish in Redis comes in (tracker redis)",
            metrics.redis_listening.clone(),
        );
        registry.register_with_unit(
            "redis_latency",
            "How long the last sign of life took to be written to Redis (tracker redis)",
            Unit::Seconds,
            metrics.redis_latency.clone(),
        );
        registry.register(
            "redis_entries",
            "Entries of this replica in Redis, or on their way (tracker redis)",
            metrics.redis_entries.clone(),
        );
        registry.register(
            "redis_unwritten",
            "Changes of this replica that are not in Redis yet (tracker redis)",
            metrics.redis_unwritten.clone(),
        );
        registry.register(
            "redis_remembered_agents",
            "Agents of which it is remembered who holds them (tracker redis)",
            metrics.redis_remembered.clone(),
        );
        registry.register("page_viewers", "Streams of the page that are open", metrics.page_viewers.clone());
        registry.register(
            "page_viewers_refused",
            "Streams of the page beyond observability.page.viewers",
            metrics.page_viewers_refused.clone(),
        );
        registry.register("open_files_limit", "Files this process may open", metrics.file_limit.clone());
        registry.register(
            "audit_records",
            "Records of the audit log that were written",
            metrics.audit_records.clone(),
        );
        registry.register(
            "audit_records_lost",
            "Records of the audit log that were lost",
            metrics.audit_lost.clone(),
        );
        registry.register(
            "audit_write_errors",
            "Writes of the audit log that failed",
            metrics.audit_write_errors.clone(),
        );
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

    /// Counts records of the audit log that are lost.
    pub fn audit_lost(&self, reason: AuditLoss, records: u64) {
        self.audit_lost.get_or_create(&AuditLossLabel { reason }).inc_by(records);
    }

    /// Counts a lookup in GitLab.
    pub fn looked_up(&self, outcome: LookupOutcome) {
        self.lookups.get_or_create(&LookupLabel { outcome }).inc();
    }

    /// Counts what was known of a token.
    pub fn cached(&self, answer: CacheAnswer) {
        self.cache.get_or_create(&CacheLabel { answer }).inc();
    }

    /// Counts an ask of a replica of GitLab's kas, or to one.
    pub fn asked_gitlab(&self, side: Side, answer: AskAnswer) {
        self.gitlab_asks.get_or_create(&AskLabels { side, answer }).inc();
    }

    /// Counts an ask between replicas.
    pub fn asked(&self, side: Side, answer: AskAnswer) {
        self.asks.get_or_create(&AskLabels { side, answer }).inc();
    }

    /// Copies what gossip counts itself.
    pub fn gossip(&self, counters: &gossip::Counters) {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.gossip_incarnations.set(number(counters.incarnations()));
        for reason in gossip::Reason::ALL {
            let label = DropLabel { reason: reason.name() };
            self.gossip_datagrams_dropped.get_or_create(&label).set(number(counters.dropped(reason)));
        }
        for (what, n) in [
            ("datagrams_sent", counters.sent.count()),
            ("datagrams_received", counters.received.count()),
            ("bytes_sent", counters.sent_bytes.count()),
            ("bytes_received", counters.received_bytes.count()),
            ("messages_withheld", counters.withheld.count()),
        ] {
            self.gossip_traffic.get_or_create(&TrafficLabel { what }).set(number(n));
        }
    }

    /// Counts what other replicas told and this one could not read.
    pub fn unread(&self, record: PeerRecord, times: u64) {
        if times > 0 {
            self.peer_records_unread.get_or_create(&RecordLabel { record }).inc_by(times);
        }
    }

    /// Shows how Redis fares, and how many replicas live.
    pub fn redis(&self, health: &redis_tracker::Health, counts: redis_tracker::Counts, live: usize) {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.redis_up.set(health.reachable.into());
        self.redis_listening.set(health.listening.into());
        if let Some(latency) = health.latency {
            self.redis_latency.set(latency.as_secs_f64());
        }
        self.redis_entries.set(number(counts.entries));
        self.redis_unwritten.set(number(counts.unwritten));
        self.redis_remembered.set(number(counts.remembered));
        self.table_agents.set(number(counts.agents));
        self.replicas_live.set(number(live));
    }

    /// Counts a request that has found its tunnel.
    pub fn routed(&self, route: Route) {
        match route {
            Route::Local => self.routed_local.inc(),
            Route::Remote => self.routed_remote.inc(),
        };
    }

    /// Says when a certificate ends.
    pub fn certificate_ends(
        &self,
        section: &'static str,
        part: CertificatePart,
        file: &Path,
        since_1970: Duration,
    ) {
        let labels = CertificateLabels { section, part, file: file.display().to_string() };
        let seconds = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
        self.certificates.get_or_create(&labels).set(seconds);
    }

    /// Counts something refused.
    pub fn refused(&self, listener: ListenerName, reason: Reason) {
        self.refusals.get_or_create(&RefusalLabels { listener, reason }).inc();
    }
}
