//! Key `tracker`, and the settings of several replicas.

use std::time::Duration;

use settings::{
    duration::Human,
    walk::{Rule, Section},
};

use super::{
    agent::Entries,
    discovery::{self, Discovery},
    gossip::{self, Gossip},
    minutes,
    private_api::{self, Advertise, PrivateApi},
    redis::{self, Redis},
    seconds,
};
use crate::Environment;

const NOT_REDIS: &str = "tracker is gossip, which does not use Redis";
const NOT_GOSSIP: &str = "tracker is redis: replicas find each other there";
const ONE_REPLICA: &str = "tracker is memory, which is for one replica";

/// How replicas find out which of them holds which agent, with the settings for that.
#[derive(Debug, Clone, PartialEq)]
pub enum Tracker {
    /// There is one replica; its table is in memory.
    Memory,
    /// Replicas send each other their tables.
    Gossip(Box<Replication>),
    /// Replicas write their tables to Redis.
    Redis(Box<Shared>),
}

impl Tracker {
    /// Returns the private API, at which replicas call each other; `None`: there is one replica.
    pub fn private_api(&self) -> Option<&PrivateApi> {
        match self {
            Self::Memory => None,
            Self::Gossip(replication) => Some(&replication.private_api),
            Self::Redis(shared) => Some(&shared.private_api),
        }
    }
}

/// The settings of several replicas that share a Redis.
#[derive(Debug, Clone, PartialEq)]
pub struct Shared {
    /// Section `private_api`.
    pub private_api: PrivateApi,
    /// Section `redis`.
    pub redis: Redis,
    /// How long the entries of a replica count after its last heartbeat: key `table.ttl`, at most 30 s.
    pub ttl: Duration,
    /// Key `agent.redis_conn_info_ttl`.
    pub entry_ttl: Duration,
    /// Key `agent.redis_conn_info_refresh`; less than `entry_ttl`.
    pub entry_refresh: Duration,
    /// Key `agent.redis_conn_info_gc`.
    pub entry_gc: Duration,
}

/// The settings of several replicas that use gossip.
#[derive(Debug, Clone, PartialEq)]
pub struct Replication {
    /// Section `private_api`.
    pub private_api: PrivateApi,
    /// Section `discovery`.
    pub discovery: Discovery,
    /// Section `gossip`.
    pub gossip: Gossip,
    /// How long the entries of a replica count after its last sign of life: key `table.ttl`.
    pub table_ttl: Duration,
}

/// The value of the key `tracker`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Memory,
    Gossip,
    Redis,
}

impl Kind {
    /// Returns why the settings for other replicas have no effect, if so.
    fn idle(self) -> Option<&'static str> {
        (self == Self::Memory).then_some(ONE_REPLICA)
    }

    fn not_gossip(self) -> Option<&'static str> {
        match self {
            Self::Memory => Some(ONE_REPLICA),
            Self::Gossip => None,
            Self::Redis => Some(NOT_GOSSIP),
        }
    }

    /// Returns why the settings for Redis have no effect, if so.
    pub(super) fn not_redis(self) -> Option<&'static str> {
        match self {
            Self::Memory => Some(ONE_REPLICA),
            Self::Gossip => Some(NOT_REDIS),
            Self::Redis => None,
        }
    }
}

/// Declares `tracker` and returns its value.
pub(super) fn kind(root: &mut Section<'_, '_>) -> Kind {
    let given = root.optional(None, |s| {
        s.optional_text(
            "tracker",
            "memory",
            "How replicas find out which of them holds which agent's tunnels: memory (one replica), gossip (several \
             replicas; needs private_api and usually discovery), or redis (several replicas; needs private_api and \
             redis). Absent: redis if redis and private_api.listen are given, as in a file of GitLab agent 14.1, and \
             discovery is not; else gossip if discovery or private_api.listen is given; else memory.",
        )
    });
    let listens = root.has_in("private_api", "listen");
    let found = match (root.has("discovery"), root.has("redis")) {
        (false, true) if listens => Kind::Redis,
        (discovers, _) if discovers || listens => Kind::Gossip,
        _ => Kind::Memory,
    };
    match given.as_deref() {
        Some("memory") => Kind::Memory,
        Some("gossip") => Kind::Gossip,
        Some("redis") => Kind::Redis,
        None => found,
        Some(_) => {
            root.refuse("tracker", "memory (one replica), gossip or redis (several)");
            found
        }
    }
}

/// Declares the sections for several replicas. `for_sinks`: a sink needs Redis, which is returned then.
pub(super) fn read(
    root: &mut Section<'_, '_>,
    env: &Environment,
    kind: Kind,
    entries: Entries,
    for_sinks: bool,
) -> (Tracker, Option<Box<Redis>>) {
    let private_api = private_api::read(root, kind != Kind::Memory, kind.idle());
    // Without these keys, only the listener can have made `tracker` gossip, so it cannot be missing.
    if (kind != Kind::Memory || root.has("private_api"))
        && !root.has_in("private_api", "listen")
        && !root.is_refused("private_api")
    {
        let because = match kind {
            Kind::Memory => "",
            Kind::Gossip => ", because tracker is gossip: replicas reach each other there",
            Kind::Redis => ", because tracker is redis: replicas reach each other there",
        };
        root.refuse(
            "private_api.listen",
            format!("a section `listen` with authentication_secret_file{because}"),
        );
    }
    // An address without a port already has a problem, which would cause another one here.
    let port = private_api.listen.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let discovery = discovery::read(root, port.unwrap_or(8155), kind.not_gossip());
    let gossip = gossip::read(root, kind.not_gossip());
    let table_ttl = table_ttl(root, kind);
    let redis = redis::read(root, if for_sinks { None } else { kind.not_redis() });
    let because = match kind {
        Kind::Redis => Some("tracker is redis"),
        _ if for_sinks => Some("a sink of the section sinks needs it"),
        _ => None,
    };
    if let Some(because) = because
        && !root.has("redis")
        && !root.is_refused("redis")
    {
        root.refuse(
            "redis",
            format!(
                "where Redis is, because {because}:\nredis:\n  server:\n    address: redis.example.com:6379"
            ),
        );
    }
    let shared = for_sinks.then(|| Box::new(redis.clone()));
    if kind == Kind::Memory {
        return (Tracker::Memory, shared);
    }
    let tls = private_api.listen.tls.is_some();
    let advertise = private_api::advertised(root, env, private_api.advertise.clone(), tls);
    let private_api = PrivateApi { advertise, ..private_api };
    if kind == Kind::Redis {
        let Entries { ttl, refresh, gc } = entries;
        let tracker = Tracker::Redis(Box::new(Shared {
            private_api,
            redis,
            ttl: table_ttl,
            entry_ttl: ttl,
            entry_refresh: refresh,
            entry_gc: gc,
        }));
        return (tracker, shared);
    }
    if discovery == Discovery::None && !root.is_refused("discovery") {
        alone(root, &private_api);
    }
    (Tracker::Gossip(Box::new(Replication { private_api, discovery, gossip, table_ttl })), shared)
}

/// Declares the section `table`.
fn table_ttl(root: &mut Section<'_, '_>, kind: Kind) -> Duration {
    let ttl = root.optional(kind.idle(), |s| {
        s.section("table", "The table of which replica holds which agent's tunnels.", |s| {
            s.duration(
                "ttl",
                seconds(10),
                Rule::Within(seconds(1), minutes(60)),
                "How long the entries of a replica count after its last sign of life. Shorter: fewer requests go to \
                 a dead replica. Longer: a stalled replica is not forgotten. With tracker redis at most 30s.",
            )
        })
    });
    if kind == Kind::Redis && ttl > seconds(30) && !root.is_refused("table") {
        root.refuse_as(
            "table.ttl",
            Human(ttl).to_string(),
            "at most 30s with tracker redis: until then requests are sent to a replica that has crashed",
        );
    }
    ttl
}

/// Warns that this replica contacts no others, and about what that requires.
fn alone(root: &mut Section<'_, '_>, private_api: &PrivateApi) {
    let mut text = "not given, so this replica contacts no others and waits to be contacted".to_owned();
    let host = private_api.listen.address.rsplit_once(':').map_or("", |(host, _)| host);
    let everywhere = matches!(host, "" | "0.0.0.0" | "[::]");
    if everywhere && private_api.advertise == Advertise::default() {
        text.push_str(
            "; they need its address: set private_api.advertise, OWN_PRIVATE_API_URL or POD_IP, since \
             private_api.listen.address names no interface",
        );
    }
    root.warn("discovery", text);
}
