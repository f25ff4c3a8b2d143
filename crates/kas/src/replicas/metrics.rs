//! The metrics of the replicas: live replicas, gossip, the table, and Redis.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// A record that another replica sends.
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
struct DropLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrafficLabel {
    what: &'static str,
}

/// The metrics of the replicas.
#[derive(Debug)]
pub struct ReplicaMetrics {
    /// Live replicas, including this one.
    pub replicas_live: Gauge,
    /// Live replicas whose table is not completely known.
    pub replicas_unsynced: Gauge,
    /// Agents that this replica announces.
    pub table_agents: Gauge,
    /// 1 while gossip hears no other replica although discovery names some.
    pub gossip_lonely: Gauge,
    /// How often gossip was restarted.
    pub gossip_restarts: Counter,
    gossip_incarnations: Gauge,
    peer_records_unread: Family<RecordLabel, Counter>,
    gossip_datagrams_dropped: Family<DropLabel, Gauge>,
    gossip_traffic: Family<TrafficLabel, Gauge>,
    redis_up: Gauge,
    redis_listening: Gauge,
    redis_latency: Gauge<f64, AtomicU64>,
    redis_entries: Gauge,
    redis_unwritten: Gauge,
    redis_remembered: Gauge,
}

impl ReplicaMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            replicas_live: Gauge::default(),
            replicas_unsynced: Gauge::default(),
            table_agents: Gauge::default(),
            gossip_lonely: Gauge::default(),
            gossip_restarts: Counter::default(),
            gossip_incarnations: Gauge::default(),
            peer_records_unread: Family::default(),
            gossip_datagrams_dropped: Family::default(),
            gossip_traffic: Family::default(),
            redis_up: Gauge::default(),
            redis_listening: Gauge::default(),
            redis_latency: Gauge::default(),
            redis_entries: Gauge::default(),
            redis_unwritten: Gauge::default(),
            redis_remembered: Gauge::default(),
        };
        metrics.replicas_live.set(1);
        registry.register(
            "replicas_live",
            "Live replicas, including this one",
            metrics.replicas_live.clone(),
        );
        registry.register(
            "replicas_unsynced",
            "Live replicas whose table is not completely known here",
            metrics.replicas_unsynced.clone(),
        );
        registry.register(
            "table_agents",
            "Agents that this replica announces to the others",
            metrics.table_agents.clone(),
        );
        registry.register(
            "gossip_lonely",
            "1 while gossip hears no other replica although discovery names some",
            metrics.gossip_lonely.clone(),
        );
        registry.register(
            "gossip_restarts",
            "How often gossip was restarted within this process",
            metrics.gossip_restarts.clone(),
        );
        registry.register(
            "gossip_incarnations",
            "Processes of other replicas that gossip remembers, including those that died in the last minutes",
            metrics.gossip_incarnations.clone(),
        );
        registry.register(
            "peer_records_unread",
            "Records of other replicas in a format that this version cannot read, such as that of a later version",
            metrics.peer_records_unread.clone(),
        );
        registry.register(
            "gossip_datagrams_dropped",
            "Gossip datagrams that were dropped since the start, by reason",
            metrics.gossip_datagrams_dropped.clone(),
        );
        registry.register(
            "gossip_traffic",
            "Gossip datagrams and bytes since the start",
            metrics.gossip_traffic.clone(),
        );
        registry.register(
            "redis_up",
            "1 while the heartbeat of this replica reaches Redis (tracker redis)",
            metrics.redis_up.clone(),
        );
        registry.register(
            "redis_listening",
            "1 while the Redis subscription is up (tracker redis)",
            metrics.redis_listening.clone(),
        );
        registry.register_with_unit(
            "redis_latency",
            "How long the last heartbeat to Redis took (tracker redis)",
            Unit::Seconds,
            metrics.redis_latency.clone(),
        );
        registry.register(
            "redis_entries",
            "Entries of this replica that are in Redis or are being written (tracker redis)",
            metrics.redis_entries.clone(),
        );
        registry.register(
            "redis_unwritten",
            "Changes of this replica that are not in Redis yet (tracker redis)",
            metrics.redis_unwritten.clone(),
        );
        registry.register(
            "redis_remembered_agents",
            "Agents whose holders are cached (tracker redis)",
            metrics.redis_remembered.clone(),
        );
        metrics
    }

    /// Copies the counters of gossip.
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

    /// Counts records of other replicas that this one could not read.
    pub fn unread(&self, record: PeerRecord, times: u64) {
        if times > 0 {
            self.peer_records_unread.get_or_create(&RecordLabel { record }).inc_by(times);
        }
    }

    /// Sets the health of Redis and the number of live replicas.
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
}
