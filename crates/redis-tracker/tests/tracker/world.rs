//! Replicas in this process that share a real Redis.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use cluster::{
    Replica, Tracker,
    contract::{Cluster, Member, Store},
};
use ids::ReplicaId;
use redis_tracker::{Address, Connect, Options, RedisTracker, Target};
use testkit::{
    process::{SOON, soon},
    redis::{Redis, Wire},
};
use tokio::task::JoinHandle;

/// A ttl that is short for tests.
pub(crate) const TTL: Duration = Duration::from_secs(1);
/// A ttl that does not end when a machine stalls for some seconds, for tests that could not recover.
pub(crate) const LONG: Duration = Duration::from_secs(8);

/// Waits until there is no alarm: a stall of the machine raises one for a moment.
pub(crate) async fn calm(tracker: &RedisTracker) {
    let mut last = Vec::new();
    let none = async {
        loop {
            last = tracker.alarms();
            if last.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let is_calm = tokio::time::timeout(SOON, none).await.is_ok();
    assert!(is_calm, "{last:?}");
}

/// How replicas connect to Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Through a proxy that can delay or cut connections.
    Server,
    /// By its Unix domain socket.
    Socket,
}

/// A Redis and the settings of its replicas.
pub(crate) struct World {
    pub(crate) redis: Redis,
    pub(crate) wire: Wire,
    kind: Kind,
    runs: AtomicU64,
}

impl World {
    pub(crate) async fn new(kind: Kind) -> Self {
        Self::with(kind, &[]).await
    }

    pub(crate) async fn with(kind: Kind, arguments: &[&str]) -> Self {
        Self::of(Redis::run_with(arguments).await.expect("a Redis runs"), kind).await
    }

    pub(crate) async fn of(redis: Redis, kind: Kind) -> Self {
        let wire = Wire::to(redis.address()).await.expect("there is a port");
        Self { redis, wire, kind, runs: AtomicU64::new(1) }
    }

    /// Returns how replicas connect to Redis.
    pub(crate) fn connect(&self) -> Connect {
        let address = match self.kind {
            Kind::Server => Address::Tcp(self.wire.address().ip().to_string(), self.wire.address().port()),
            Kind::Socket => Address::Unix(self.redis.socket()),
        };
        Connect::to(Target::Server(address))
    }

    pub(crate) fn options(&self) -> Options {
        Options { ttl: TTL, ..Options::new(self.connect(), self.runs.fetch_add(1, Ordering::Relaxed)) }
    }

    /// As [`options`](Self::options), for tests that count commands: entries that expire or are answered late
    /// would be written again.
    pub(crate) fn patient(&self) -> Options {
        let connect = Connect { read_timeout: LONG, ..self.connect() };
        Options { ttl: LONG, connect, ..self.options() }
    }

    /// Starts a replica and waits until it is ready.
    pub(crate) async fn start(&self, name: &str, options: Options) -> Running {
        let running = Running::start(name, options);
        let mut ready = running.tracker.ready();
        soon("the replica is ready", ready.wait_for(|ready| *ready)).await.expect("the tracker lives");
        let mut health = running.tracker.health();
        soon("news come in", health.wait_for(|health| health.listening)).await.expect("the tracker lives");
        running
    }

    /// Runs a command on it as an operator would, without the proxy.
    pub(crate) async fn ask<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> T {
        let address = format!("unix://{}", self.redis.socket().display());
        let client = redis::Client::open(address).expect("it is an address");
        let mut connection = client.get_multiplexed_async_connection().await.expect("it runs");
        command.query_async(&mut connection).await.expect("it answers")
    }
}

/// A running replica.
pub(crate) struct Running {
    pub(crate) tracker: Arc<RedisTracker>,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(name: &str, options: Options) -> Self {
        let me = Replica { id: ReplicaId::new(name), address: format!("{name}:8155").into() };
        let tracker = RedisTracker::new(me, options).expect("the options can be used");
        let task = tokio::spawn(Arc::clone(&tracker).run());
        Self { tracker, task }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Member for Running {
    fn tracker(&self) -> Arc<dyn Tracker> {
        Arc::clone(&self.tracker) as _
    }

    async fn crash(mut self: Box<Self>) {
        self.task.abort();
        // Nothing is written from here on.
        let _ = (&mut self.task).await;
    }

    async fn leave(self: Box<Self>) {
        self.tracker.leave(SOON).await;
    }
}

#[async_trait]
impl Cluster for World {
    async fn join(&self, name: &str) -> Box<dyn Member> {
        Box::new(self.start(name, self.options()).await)
    }

    fn expiry(&self) -> Duration {
        TTL + Duration::from_millis(500)
    }
}

#[async_trait]
impl Store for World {
    async fn stop(&self) {
        self.redis.stop().await;
    }

    async fn start(&self) {
        self.redis.start().await.expect("it runs again");
    }

    async fn flush(&self) {
        let () = self.ask(&redis::cmd("FLUSHALL")).await;
    }

    async fn slow(&self, delay: Duration) {
        self.wire.slow(delay / 2);
    }

    async fn cut(&self) {
        self.wire.cut();
        self.wire.mend();
    }
}
