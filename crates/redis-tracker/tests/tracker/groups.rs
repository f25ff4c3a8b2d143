//! Groups of real servers: a primary and a replica with Sentinels, and a Cluster. Each server is behind a
//! proxy that can delay or cut connections, and is known to the others by the address of the proxy.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use cluster::contract::{Cluster, Member, Store};
use redis::{Cmd, FromRedisValue, aio::MultiplexedConnection, cmd};
use redis_tracker::{Address, Connect, Options, Target};
use testkit::{
    process::{Process, SOON, soon},
    redis::{Redis, Wire, free_port, program},
};
use tokio::time::{Instant, timeout};

use crate::world::{Running, TTL};

/// A Sentinel fails over after this long without a server: late, because a server may be slow, or the machine
/// may stall.
const PATIENT: Duration = Duration::from_secs(10);
/// The same before a server is ended.
const QUICK: Duration = Duration::from_millis(500);
/// As [`PATIENT`], in milliseconds, for nodes.
const NODE_PATIENT: &str = "6000";
/// As [`QUICK`], in milliseconds, for nodes.
const NODE_QUICK: &str = "1000";

/// The time between two checks.
const AGAIN: Duration = Duration::from_millis(20);
const SENTINELS: usize = 3;

pub(crate) fn tcp(port: u16) -> Address {
    Address::Tcp("127.0.0.1".to_owned(), port)
}

/// One server of a group.
pub(crate) struct Server {
    pub(crate) redis: Redis,
    pub(crate) wire: Wire,
    password: &'static str,
}

impl Server {
    async fn start(password: &'static str, arguments: &[&str]) -> Self {
        let redis = Redis::run_with(arguments).await.expect("a Redis runs");
        let wire = Wire::to(redis.address()).await.expect("there is a port");
        Self { redis, wire, password }
    }

    fn port(&self) -> String {
        self.wire.address().port().to_string()
    }

    async fn try_ask<T: FromRedisValue>(&self, command: &Cmd) -> redis::RedisResult<T> {
        let mut at = format!("unix://{}", self.redis.socket().display());
        if !self.password.is_empty() {
            at = format!("{at}?pass={}", self.password);
        }
        let mut connection = redis::Client::open(at)?.get_multiplexed_async_connection().await?;
        command.query_async(&mut connection).await
    }

    /// Runs a command on it as an operator would, without the proxy.
    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        self.try_ask(command).await.expect("it answers")
    }

    /// Waits until it gives the expected answer.
    pub(crate) async fn answers(&self, command: &Cmd, expected: impl Fn(&str) -> bool) {
        soon("it answers as expected", async {
            while !self
                .try_ask(command)
                .await
                .is_ok_and(|value: redis::Value| expected(&format!("{value:?}")))
            {
                tokio::time::sleep(AGAIN).await;
            }
        })
        .await;
    }
}

/// A group of servers that can fail.
#[async_trait]
pub(crate) trait Group: Send + Sync {
    fn servers(&self) -> &[Server];

    fn connect(&self) -> Connect;

    /// Starts all servers after all were ended, and waits until the group serves.
    async fn start_again(&self);
}

/// A primary, its replica, and three Sentinels, all with passwords.
pub(crate) struct Sentinels {
    /// The first is the primary at the start.
    pub(crate) servers: [Server; 2],
    addresses: Vec<Address>,
    _sentinels: Vec<Process>,
    _folder: tempfile::TempDir,
}

impl Sentinels {
    /// Starts the servers. Failovers are late until [`fail_soon`](Self::fail_soon).
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["--requirepass", "p", "--masterauth", "p", "--repl-diskless-sync-delay", "0"];
        let servers = [Server::start("p", &arguments).await, Server::start("p", &arguments).await];
        Self::replicate(&servers).await;
        let (port, down_after) = (servers[0].port(), PATIENT.as_millis());
        let mut sentinels = Vec::new();
        let mut addresses = Vec::new();
        for _ in 0..SENTINELS {
            let own = free_port().await.unwrap();
            let lines = format!(
                "port {own}\nbind 127.0.0.1\nrequirepass s\nsentinel sentinel-pass s\nsentinel monitor kas 127.0.0.1 {port} 2\n\
                 sentinel auth-pass kas p\nsentinel down-after-milliseconds kas {down_after}\n\
                 sentinel failover-timeout kas 2000\n"
            );
            // A Sentinel writes its own configuration file.
            let file = folder.path().join(format!("{own}.conf"));
            std::fs::write(&file, lines).unwrap();
            let (name, file) = ("redis-sentinel", file.display().to_string());
            sentinels.push(Process::start(name, &program(name).unwrap(), &[&file], &[]).await.unwrap());
            addresses.push(tcp(own));
        }
        let this = Self { servers, addresses, _sentinels: sentinels, _folder: folder };
        this.agree().await;
        // A Sentinel that stalled for 2 s would do nothing for the next 30 s; before 7.0 this cannot be
        // changed.
        let tilt = ["tilt-trigger", "60000", "tilt-period", "1000"];
        for mut sentinel in this.sentinels().await {
            let _: redis::RedisResult<()> =
                cmd("SENTINEL").arg("DEBUG").arg(&tilt).query_async(&mut sentinel).await;
        }
        // An address without a server comes first.
        let nobody = tcp(free_port().await.unwrap());
        Self { addresses: [vec![nobody], this.addresses].concat(), ..this }
    }

    /// Makes the second server a replica of the first, each known by its proxy.
    async fn replicate(servers: &[Server; 2]) {
        for server in servers {
            let port = server.port();
            let () = server.ask(cmd("CONFIG").arg("SET").arg("replica-announce-port").arg(port)).await;
        }
        let () = servers[1].ask(cmd("REPLICAOF").arg("127.0.0.1").arg(servers[0].port())).await;
        servers[1]
            .answers(cmd("INFO").arg("replication"), |text| text.contains("master_link_status:up"))
            .await;
    }

    fn clients(&self) -> impl Iterator<Item = redis::Client> {
        // An address without a server may come first.
        self.addresses[self.addresses.len() - SENTINELS..].iter().map(|address| {
            let Address::Tcp(_, port) = address else { unreachable!() };
            redis::Client::open(format!("redis://:s@127.0.0.1:{port}/")).unwrap()
        })
    }

    /// Connects to each Sentinel.
    async fn sentinels(&self) -> Vec<MultiplexedConnection> {
        let mut connections = Vec::new();
        for client in self.clients() {
            connections.push(client.get_multiplexed_async_connection().await.unwrap());
        }
        connections
    }

    /// From now on, a primary that does not answer is replaced soon.
    pub(crate) async fn fail_soon(&self) {
        let set = ["down-after-milliseconds", &QUICK.as_millis().to_string()];
        for mut sentinel in self.sentinels().await {
            let () =
                cmd("SENTINEL").arg("SET").arg("kas").arg(&set).query_async(&mut sentinel).await.unwrap();
        }
    }

    /// Waits until Sentinels know each other and the second server, which a failover needs.
    async fn agree(&self) {
        for client in self.clients() {
            soon("sentinels know each other", async {
                loop {
                    if let Ok(mut connection) = client.get_multiplexed_async_connection().await {
                        let quorum: Result<String, _> =
                            cmd("SENTINEL").arg("CKQUORUM").arg("kas").query_async(&mut connection).await;
                        let replicas: Result<Vec<redis::Value>, _> =
                            cmd("SENTINEL").arg("REPLICAS").arg("kas").query_async(&mut connection).await;
                        if quorum.is_ok_and(|text| text.starts_with("OK 3"))
                            && replicas.is_ok_and(|all| all.len() == 1)
                        {
                            return;
                        }
                    }
                    tokio::time::sleep(AGAIN).await;
                }
            })
            .await;
        }
    }

    /// Has a Sentinel make the other server the primary, while both run.
    pub(crate) async fn fail_over(&self) {
        let mut connection = self.sentinels().await.remove(0);
        soon("a Sentinel fails over", async {
            loop {
                // It may not have heard of the second server recently.
                let begun: redis::RedisResult<()> =
                    cmd("SENTINEL").arg("FAILOVER").arg("kas").query_async(&mut connection).await;
                if begun.is_ok() {
                    return;
                }
                tokio::time::sleep(AGAIN).await;
            }
        })
        .await;
    }

    /// As [`Group::connect`], with another password for Sentinels.
    pub(crate) fn connect_with(&self, password: &str) -> Connect {
        let target = Target::Sentinel {
            master: "kas".to_owned(),
            addresses: self.addresses.clone(),
            username: None,
            password: Some(password.to_owned().into()),
            tls: None,
        };
        Connect { password: Some("p".to_owned().into()), ..Connect::to(target) }
    }
}

#[async_trait]
impl Group for Sentinels {
    fn servers(&self) -> &[Server] {
        &self.servers
    }

    fn connect(&self) -> Connect {
        self.connect_with("s")
    }

    async fn start_again(&self) {
        for server in &self.servers {
            server.redis.start().await.expect("it runs again");
        }
        Self::replicate(&self.servers).await;
    }
}

/// Three primaries with a replica each.
pub(crate) struct Nodes {
    /// The first three are the primaries at the start.
    pub(crate) servers: Vec<Server>,
}

/// The offset of the bus port of a node.
const BUS: u16 = 10_000;

impl Nodes {
    pub(crate) async fn start() -> Self {
        let arguments = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            NODE_PATIENT,
            "--repl-diskless-sync-delay",
            "0",
        ];
        let mut servers = Vec::new();
        for _ in 0..6 {
            // A node without a free bus port does not start. Then another port is tried.
            servers.push(Server::start("", &arguments).await);
        }
        let addresses: Vec<String> =
            servers.iter().map(|server| server.redis.address().to_string()).collect();
        let mut arguments = vec!["--cluster", "create"];
        arguments.extend(addresses.iter().map(String::as_str));
        arguments.extend(["--cluster-replicas", "1", "--cluster-yes"]);
        let create =
            Process::start("redis-cli", &program("redis-cli").unwrap(), &arguments, &[]).await.unwrap();
        assert!(create.exited(SOON).await.unwrap().success(), "{}", create.log());
        let this = Self { servers };
        this.agree().await;
        this
    }

    /// From now on, a primary that does not answer is replaced soon.
    pub(crate) async fn fail_soon(&self) {
        for server in &self.servers {
            let set = cmd("CONFIG").arg("SET").arg("cluster-node-timeout").arg(NODE_QUICK).take();
            let () = server.ask(&set).await;
        }
    }

    /// Makes each replica the primary of its part, while all run.
    pub(crate) async fn fail_over(&self) {
        let replicas = &self.servers[3..];
        for server in replicas {
            server
                .answers(cmd("INFO").arg("replication"), |text| text.contains("master_link_status:up"))
                .await;
        }
        // A lost election is soon repeated.
        self.fail_soon().await;
        let takes_over = async |server: &Server| {
            let mut asked: Option<Instant> = None;
            loop {
                let role: redis::RedisResult<redis::Value> = server.try_ask(&cmd("ROLE")).await;
                if role.is_ok_and(|role| format!("{role:?}").contains("master")) {
                    return;
                }
                // Nodes abandon a failover after 5 s, and refuse while they have lost the primary for a
                // moment.
                if asked.is_none_or(|at| at.elapsed() > Duration::from_secs(6)) {
                    let begun: redis::RedisResult<()> = server.try_ask(cmd("CLUSTER").arg("FAILOVER")).await;
                    asked = begun.is_ok().then(Instant::now);
                }
                tokio::time::sleep(AGAIN).await;
            }
        };
        // One after the other, so that all nodes learn the new slots in between.
        for replica in replicas {
            timeout(SOON * 2, takes_over(replica)).await.expect("the replica takes over");
        }
    }

    /// Makes each node known by its proxy, and waits until all nodes know that and serve.
    async fn agree(&self) {
        for server in &self.servers {
            let bus = server.redis.address().port() + BUS;
            let set = |key: &str, value: String| cmd("CONFIG").arg("SET").arg(key).arg(value).take();
            let () = server.ask(&set("cluster-announce-bus-port", bus.to_string())).await;
            let () = server.ask(&set("cluster-announce-port", server.port())).await;
        }
        let wires: Vec<String> = self.servers.iter().map(|server| format!(":{}@", server.port())).collect();
        for server in &self.servers {
            let all = |text: &str| wires.iter().all(|wire| text.contains(wire));
            server.answers(cmd("CLUSTER").arg("NODES"), all).await;
            server.answers(cmd("CLUSTER").arg("INFO"), |text| text.contains("cluster_state:ok")).await;
        }
    }
}

#[async_trait]
impl Group for Nodes {
    fn servers(&self) -> &[Server] {
        &self.servers
    }

    fn connect(&self) -> Connect {
        let nodes = self.servers.iter().map(|server| tcp(server.wire.address().port()));
        Connect::to(Target::Cluster(nodes.collect()))
    }

    async fn start_again(&self) {
        for server in &self.servers {
            server.redis.start().await.expect("it runs again");
        }
        self.agree().await;
    }
}

/// Replicas that share a group with other scenarios, with their own prefix.
pub(crate) struct Sharers {
    group: Arc<dyn Group>,
    connect: Connect,
    prefix: String,
    runs: AtomicU64,
}

impl Sharers {
    pub(crate) fn on(group: &Arc<dyn Group>, prefix: &str) -> Self {
        Self {
            connect: group.connect(),
            group: Arc::clone(group),
            prefix: prefix.to_owned(),
            runs: AtomicU64::new(1),
        }
    }

    /// Runs a command on each server.
    pub(crate) async fn ask_each(&self, command: &Cmd) {
        for server in self.group.servers() {
            let _: redis::Value = server.ask(command).await;
        }
    }

    pub(crate) fn options(&self) -> Options {
        Options {
            ttl: TTL,
            key_prefix: self.prefix.clone(),
            ..Options::new(self.connect.clone(), self.runs.fetch_add(1, Ordering::Relaxed))
        }
    }

    /// Starts a replica and waits until it is ready.
    pub(crate) async fn start(&self, name: &str, options: Options) -> Running {
        let running = Running::start(name, options);
        let (mut ready, mut health) = (running.tracker.ready(), running.tracker.health());
        soon("the replica is ready", ready.wait_for(|ready| *ready)).await.unwrap();
        soon("news come in", health.wait_for(|health| health.listening)).await.unwrap();
        running
    }
}

#[async_trait]
impl Cluster for Sharers {
    async fn join(&self, name: &str) -> Box<dyn Member> {
        Box::new(self.start(name, self.options()).await)
    }

    fn expiry(&self) -> Duration {
        TTL + Duration::from_millis(500)
    }
}

#[async_trait]
impl Store for Sharers {
    async fn stop(&self) {
        for server in self.group.servers() {
            server.redis.stop().await;
        }
    }

    async fn start(&self) {
        self.group.start_again().await;
    }

    async fn flush(&self) {
        for server in self.group.servers() {
            // The replicas of the primaries follow.
            let _: redis::RedisResult<redis::Value> = server.try_ask(&cmd("FLUSHALL")).await;
        }
    }

    async fn slow(&self, delay: Duration) {
        for server in self.group.servers() {
            server.wire.slow(delay / 2);
        }
    }

    async fn cut(&self) {
        for server in self.group.servers() {
            server.wire.cut();
        }
        for server in self.group.servers() {
            server.wire.mend();
        }
    }
}
