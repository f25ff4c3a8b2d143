//! Key `tracker`, and what several replicas need.

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

const NOT_REDIS: &str = "tracker is gossip, which needs no Redis";
const NOT_GOSSIP: &str = "tracker is redis: replicas find each other there";
const ONE_REPLICA: &str = "tracker is memory, which is for one replica";

/// Which table of replicas is used.
#[derive(Debug, Clone, PartialEq)]
pub enum Tracker {
    /// The table of one replica, in its memory.
    Memory,
    /// A table that replicas tell each other.
    Gossip(Box<Replication>),
    /// A table that replicas keep in Redis.
    Redis(Box<Shared>),
}

impl Tracker {
    /// Returns where replicas call each other; `None`: there is one replica.
    pub fn private_api(&self) -> Option<&PrivateApi> {
        match self {
            Self::Memory => None,
            Self::Gossip(replication) => Some(&replication.private_api),
            Self::Redis(shared) => Some(&shared.private_api),
        }
    }
}

/// What several replicas need that share a Redis.
#[derive(Debug, Clone, PartialEq)]
pub struct Shared {
    /// Section `private_api`.
    pub private_api: PrivateApi,
    /// Section `redis`.
    pub redis: Redis,
    /// How long the entries of a replica count after its last sign of life: key `table.ttl`, at most 30 s.
    pub ttl: Duration,
    /// Key `agent.redis_conn_info_ttl`.
    pub entry_ttl: Duration,
    /// Key `agent.redis_conn_info_refresh`; less than `entry_ttl`.
    pub entry_refresh: Duration,
    /// Key `agent.redis_conn_info_gc`.
    pub entry_gc: Duration,
}

/// What several replicas need.
#[derive(Debug, Clone, PartialEq)]
pub struct Replication {
    /// Section `private_api`.
    pub private_api: PrivateApi,
    /// Section `discovery`.
    pub discovery: Discovery,
    /// Section `gossip`.
    pub gossip: Gossip,
    /// How long the entries of a replica stay after its last proof of life: key `table.ttl`.
    pub table_ttl: Duration,
}

/// Which table of replicas is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Memory,
    Gossip,
    Redis,
}

impl Kind {
    /// Returns why nothing about other replicas has an effect.
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

    /// Returns why what Redis needs has no effect.
    pub(super) fn not_redis(self) -> Option<&'static str> {
        match self {
            Self::Memory => Some(ONE_REPLICA),
            Self::Gossip => Some(NOT_REDIS),
            Self::Redis => None,
        }
    }
}

/// Declares `tracker` and returns what it is.
pub(super) fn kind(root: &mut Section<'_, '_>) -> Kind {
    let given = root.optional(None, |s| {
        s.optional_text(
            "tracker",
            "memory",
            "Where replicas learn who holds which agent's tunnels: memory (one replica), gossip (several, which \
             need private_api and mostly discovery), or redis (several, which need private_api and redis). Absent: \
             redis if redis and private_api.listen are given, as in a file of GitLab agent 14.1, and discovery is \
             not; else gossip if discovery or private_api.listen is given; else memory.",
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

/// Declares the sections about other replicas.
pub(super) fn read(root: &mut Section<'_, '_>, env: &Environment, kind: Kind, entries: Entries) -> Tracker {
    let private_api = private_api::read(root, kind != Kind::Memory, kind.idle());
    // The listener alone makes `tracker` gossip, so that only what else does can lack it.
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
    // Without a port the address has a problem already; another one would follow from it.
    let port = private_api.listen.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let discovery = discovery::read(root, port.unwrap_or(8155), kind.not_gossip());
    let gossip = gossip::read(root, kind.not_gossip());
    let table_ttl = table_ttl(root, kind);
    let redis = redis::read(root, kind.not_redis());
    if kind == Kind::Redis && !root.has("redis") && !root.is_refused("redis") {
        root.refuse(
            "redis",
            "where Redis is, because tracker is redis:\nredis:\n  server:\n    address: redis.example.com:6379",
        );
    }
    if kind == Kind::Memory {
        return Tracker::Memory;
    }
    let tls = private_api.listen.tls.is_some();
    let advertise = private_api::advertised(root, env, private_api.advertise.clone(), tls);
    let private_api = PrivateApi { advertise, ..private_api };
    if kind == Kind::Redis {
        let Entries { ttl, refresh, gc } = entries;
        return Tracker::Redis(Box::new(Shared {
            private_api,
            redis,
            ttl: table_ttl,
            entry_ttl: ttl,
            entry_refresh: refresh,
            entry_gc: gc,
        }));
    }
    if discovery == Discovery::None && !root.is_refused("discovery") {
        alone(root, &private_api);
    }
    Tracker::Gossip(Box::new(Replication { private_api, discovery, gossip, table_ttl }))
}

/// Declares the section `table`.
fn table_ttl(root: &mut Section<'_, '_>, kind: Kind) -> Duration {
    let ttl = root.optional(kind.idle(), |s| {
        s.section("table", "The table of who holds which agent's tunnels.", |s| {
            s.duration(
                "ttl",
                seconds(10),
                Rule::Within(seconds(1), minutes(60)),
                "How long the entries of a replica stay after its last proof of life. Shorter: fewer requests go to \
                 a replica that is gone. Longer: a busy replica is not forgotten. With tracker redis at most 30s.",
            )
        })
    });
    if kind == Kind::Redis && ttl > seconds(30) && !root.is_refused("table") {
        root.refuse_as(
            "table.ttl",
            Human(ttl).to_string(),
            "at most 30s with tracker redis: until then requests go to a replica that has crashed",
        );
    }
    ttl
}

/// Warns that nobody is looked for, and about what that takes.
fn alone(root: &mut Section<'_, '_>, private_api: &PrivateApi) {
    let mut text = "not given, so this replica knows of nobody and waits for others to join it".to_owned();
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
