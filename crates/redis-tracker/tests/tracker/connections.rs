//! Each way to reach Redis: TLS and who shows what, users and databases, Sentinel and Cluster with a failover in the
//! middle.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cluster::{
    Tracker,
    contract::{self, Member},
};
use ids::AgentId;
use redis::cmd;
use redis_tracker::{Address, Connect, Options, Target, Tls};
use testkit::{
    process::{Process, SOON, soon},
    redis::{Redis, free_port, program},
};

use crate::world::{Running, TTL};

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

fn tcp(port: u16) -> Address {
    Address::Tcp("127.0.0.1".to_owned(), port)
}

/// Two replicas that reach Redis in this way see each other, and leave nothing behind.
async fn works(connect: Connect) {
    let options = |run| Options { ttl: TTL, ..Options::new(connect.clone(), run) };
    let (a, b) = (Running::start("a", options(1)), Running::start("b", options(2)));
    let lease = a.tracker.route(agent(1), Arc::from([]));
    located(&b, 1, 1).await;
    drop(lease);
    located(&b, 1, 0).await;
    Box::new(a).leave().await;
    Box::new(b).leave().await;
}

async fn located(on: &Running, id: i64, count: usize) {
    let mut changes = on.tracker.changes(agent(id));
    let wait = async {
        while on.tracker.locate(agent(id)).await.map_or(usize::MAX, |found| found.len()) != count {
            changes.changed().await.unwrap();
        }
    };
    let located = tokio::time::timeout(SOON, wait).await;
    let health = on.tracker.health().borrow().clone();
    assert!(located.is_ok(), "agent {id} is not on {count} replicas: {health:?}");
}

/// A replica that reaches Redis in this way says why it cannot use it.
async fn is_refused(connect: Connect, why: &str) {
    let options = Options { ttl: TTL, ..Options::new(connect, 1) };
    let a = Running::start("a", options);
    let mut health = a.tracker.health();
    let said =
        health.wait_for(|health| health.last_error.as_ref().is_some_and(|(text, _)| text.contains(why)));
    let said = tokio::time::timeout(SOON, said).await.is_ok();
    let health = a.tracker.health().borrow().clone();
    assert!(said, "{health:?}");
    assert!(!health.reachable);
}

#[tokio::test]
async fn a_password_is_shown_and_a_wrong_one_is_said() {
    let redis = Redis::run_with(&["--requirepass", "hunter2"]).await.unwrap();
    let connect = Connect::to(Target::Server(tcp(redis.address().port())));
    works(Connect { password: Some("hunter2".to_owned().into()), ..connect.clone() }).await;
    is_refused(connect.clone(), "NOAUTH").await;
    is_refused(Connect { password: Some("hunter3".to_owned().into()), ..connect }, "authentication failed")
        .await;
}

#[tokio::test]
async fn a_user_needs_the_keys_and_the_channel_of_the_prefix_only() {
    let user = "user kas on >hunter2 ~kas-1:* &kas-1:* -@all +@hash +@set +@string +@keyspace +@transaction +@connection \
                +@pubsub +time -@dangerous";
    let mut arguments = vec!["--user"];
    arguments.extend(user.strip_prefix("user ").unwrap().split(' '));
    let redis = Redis::run_with(&arguments).await.unwrap();
    let connect = Connect {
        username: Some("kas".to_owned()),
        password: Some("hunter2".to_owned().into()),
        ..Connect::to(Target::Server(tcp(redis.address().port())))
    };
    let options = |run, prefix: &str| Options {
        ttl: TTL,
        key_prefix: prefix.to_owned(),
        ..Options::new(connect.clone(), run)
    };
    let (a, b) = (Running::start("a", options(1, "kas-1")), Running::start("b", options(2, "kas-1")));
    let _lease = a.tracker.route(agent(1), Arc::from([]));
    located(&b, 1, 1).await;
    let other = Running::start("c", options(3, "kas-2"));
    let mut health = other.tracker.health();
    soon("the refusal is said", health.wait_for(|health| health.last_error.is_some())).await.unwrap();
    let (said, _) = health.borrow().last_error.clone().unwrap();
    assert!(said.to_lowercase().contains("permission"), "{said}");
}

#[tokio::test]
async fn databases_are_apart() {
    let redis = Redis::run().await.unwrap();
    let connect = Connect::to(Target::Server(Address::Unix(redis.socket())));
    works(Connect { database: 3, ..connect.clone() }).await;
    let options =
        |run, database| Options { ttl: TTL, ..Options::new(Connect { database, ..connect.clone() }, run) };
    let (a, b) = (Running::start("a", options(1, 3)), Running::start("b", options(2, 4)));
    let _lease = a.tracker.route(agent(1), Arc::from([]));
    let mut ready = a.tracker.ready();
    soon("it is written", ready.wait_for(|ready| *ready)).await.unwrap();
    located(&b, 1, 0).await;
}

#[tokio::test]
async fn one_connection_is_enough_and_idle_ones_are_closed() {
    let redis = Redis::run().await.unwrap();
    let connect = Connect {
        idle_timeout: Duration::from_millis(500),
        ..Connect::to(Target::Server(tcp(redis.address().port())))
    };
    works(Connect { pool_size: 1, ..connect.clone() }).await;
    let a = Running::start("a", Options { ttl: TTL, ..Options::new(connect, 1) });
    for id in 1..50 {
        located(&a, id, 0).await;
    }
    let client = redis::Client::open(format!("unix://{}", redis.socket().display())).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    soon("the writer's, the listener's and this one are left", async {
        loop {
            let list: String = cmd("CLIENT").arg("LIST").query_async(&mut connection).await.unwrap();
            if list.lines().count() == 3 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    located(&a, 1_000, 0).await;
}

/// A CA, and what it has signed: PEM.
struct Certificates {
    ca: String,
    server: (String, String),
    client: (String, String),
}

fn certificates() -> Certificates {
    let mut parameters = rcgen::CertificateParams::new(Vec::<String>::new()).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let ca = rcgen::CertifiedIssuer::self_signed(parameters, key).unwrap();
    let signed = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut parameters = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        // The name of the CA would make it look self-signed.
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
        (parameters.signed_by(&key, &ca).unwrap().pem(), key.serialize_pem())
    };
    Certificates { ca: ca.pem(), server: signed("127.0.0.1"), client: signed("kas") }
}

#[tokio::test]
async fn tls_trusts_the_ca_it_was_given_and_shows_its_certificate() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let pem = certificates();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let port = free_port().await.unwrap();
    let redis = Redis::run_with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &file("server.pem", &pem.server.0),
        "--tls-key-file",
        &file("server.key", &pem.server.1),
        "--tls-ca-cert-file",
        &file("ca.pem", &pem.ca),
    ])
    .await
    .unwrap();
    let connect = Connect::to(Target::Server(tcp(port)));
    let tls = |ca: &str, identity: Option<&(String, String)>| {
        let identity =
            identity.map(|(certificate, key)| (certificate.clone().into_bytes(), key.clone().into()));
        Some(Tls { ca: Some(ca.as_bytes().to_vec()), identity })
    };
    works(Connect { tls: tls(&pem.ca, Some(&pem.client)), ..connect.clone() }).await;
    // Nobody else's signature, and not without a certificate of its own.
    is_refused(
        Connect { tls: tls(&certificates().ca, Some(&pem.client)), ..connect.clone() },
        "invalid peer certificate",
    )
    .await;
    is_refused(Connect { tls: tls(&pem.ca, None), ..connect }, "writing this replica's sign of life").await;
    drop(redis);
}

/// Runs a program of Redis with a configuration file, which it may write.
async fn run(name: &str, folder: &Path, port: u16, lines: &str) -> Process {
    let file = folder.join(format!("{name}-{port}.conf"));
    std::fs::write(&file, lines).unwrap();
    let file = file.display().to_string();
    Process::start(name, &program(name).unwrap(), &[&file], &[]).await.unwrap()
}

async fn answers(port: u16, command: &redis::Cmd, expected: impl Fn(&str) -> bool) {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
    soon("it answers as expected", async {
        loop {
            if let Ok(mut connection) = client.get_multiplexed_async_connection().await
                && let Ok(value) = command.query_async::<redis::Value>(&mut connection).await
                && expected(&format!("{value:?}"))
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// A primary, a replica of it, and three sentinels that know all of that; each asks for a password.
struct Sentinels {
    primary: Redis,
    addresses: Vec<Address>,
    _second: Redis,
    _sentinels: Vec<Process>,
    _folder: tempfile::TempDir,
}

impl Sentinels {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let primary =
            Redis::run_with(&["--requirepass", "p", "--masterauth", "p", "--repl-diskless-sync-delay", "0"])
                .await
                .unwrap();
        let port = primary.address().port();
        let of = ["--replicaof", "127.0.0.1", &port.to_string(), "--requirepass", "p", "--masterauth", "p"];
        let second = Redis::run_with(&of).await.unwrap();
        let mut sentinels = Vec::new();
        let mut addresses = Vec::new();
        for _ in 0..3 {
            let own = free_port().await.unwrap();
            let lines = format!(
                "port {own}\nbind 127.0.0.1\nrequirepass s\nsentinel sentinel-pass s\nsentinel monitor kas 127.0.0.1 {port} 2\n\
                 sentinel auth-pass kas p\nsentinel down-after-milliseconds kas 500\nsentinel failover-timeout kas 2000\n"
            );
            sentinels.push(run("redis-sentinel", folder.path(), own, &lines).await);
            addresses.push(tcp(own));
        }
        // A failover needs sentinels that know each other and the second server.
        for address in &addresses {
            let Address::Tcp(_, port) = address else { unreachable!() };
            let client = redis::Client::open(format!("redis://:s@127.0.0.1:{port}/")).unwrap();
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
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            })
            .await;
        }
        // One that nobody answers at comes first.
        addresses.insert(0, tcp(free_port().await.unwrap()));
        Self { primary, addresses, _second: second, _sentinels: sentinels, _folder: folder }
    }

    fn connect(&self, password: &str) -> Connect {
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

#[tokio::test]
async fn sentinel_names_the_primary_before_and_after_a_failover() {
    let sentinels = Sentinels::start().await;
    let options = |run| Options { ttl: TTL, ..Options::new(sentinels.connect("s"), run) };
    let (a, b) = (Running::start("a", options(1)), Running::start("b", options(2)));
    let _lease = a.tracker.route(agent(1), Arc::from([]));
    located(&b, 1, 1).await;
    is_refused(sentinels.connect("wrong"), "").await;
    sentinels.primary.stop().await;
    let mut health = b.tracker.health();
    soon("the loss is noticed", health.wait_for(|health| !health.reachable)).await.unwrap();
    assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1, "known routes go on");
    let _second = a.tracker.route(agent(2), Arc::from([]));
    soon("the new primary is found", health.wait_for(|health| health.reachable)).await.unwrap();
    located(&b, 2, 1).await;
    located(&b, 1, 1).await;
}

/// Three primaries with a replica each.
struct Nodes {
    nodes: Vec<(u16, Process)>,
    _folder: tempfile::TempDir,
}

impl Nodes {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut nodes = Vec::new();
        for _ in 0..6 {
            // The bus is 10,000 above.
            let port = loop {
                let port = free_port().await.unwrap();
                if port < 55_000 {
                    break port;
                }
            };
            let lines = format!(
                "port {port}\nbind 127.0.0.1\nsave \"\"\nappendonly no\ndir {}\ncluster-enabled yes\ncluster-config-file nodes-{port}.conf\n\
                 cluster-node-timeout 1000\nrepl-diskless-sync-delay 0\n",
                folder.path().display()
            );
            nodes.push((port, run("redis-server", folder.path(), port, &lines).await));
            answers(port, &cmd("PING"), |text| text.contains("PONG")).await;
        }
        let addresses: Vec<String> = nodes.iter().map(|(port, _)| format!("127.0.0.1:{port}")).collect();
        let mut arguments = vec!["--cluster", "create"];
        arguments.extend(addresses.iter().map(String::as_str));
        arguments.extend(["--cluster-replicas", "1", "--cluster-yes"]);
        let create =
            Process::start("redis-cli", &program("redis-cli").unwrap(), &arguments, &[]).await.unwrap();
        assert!(create.exited(SOON).await.unwrap().success());
        for (port, _) in &nodes {
            let info = cmd("CLUSTER").arg("INFO").take();
            answers(*port, &info, |text| text.contains("cluster_state:ok")).await;
        }
        Self { nodes, _folder: folder }
    }

    fn connect(&self) -> Connect {
        Connect::to(Target::Cluster(self.nodes.iter().map(|(port, _)| tcp(*port)).collect()))
    }
}

#[tokio::test]
async fn a_cluster_serves_before_and_after_a_failover() {
    let nodes = Nodes::start().await;
    let connect = nodes.connect();
    works(connect.clone()).await;
    let options = |run| Options { ttl: TTL, ..Options::new(connect.clone(), run) };
    let (a, b) = (Running::start("a", options(11)), Running::start("b", options(12)));
    let leases: Vec<_> = (1..=100).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=100 {
        located(&b, id, 1).await;
    }
    // Of the three that were made primaries.
    nodes.nodes[0].1.kill();
    let port = nodes.nodes[1].0;
    let info = cmd("CLUSTER").arg("NODES").take();
    answers(port, &info, |text| text.contains("master,fail")).await;
    let info = cmd("CLUSTER").arg("INFO").take();
    answers(port, &info, |text| text.contains("cluster_state:ok")).await;
    let more: Vec<_> = (101..=200).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=200 {
        located(&b, id, 1).await;
    }
    drop(leases);
    for id in 1..=100 {
        located(&b, id, 0).await;
    }
    drop(more);
}

/// Replicas that share one group of servers with those of other scenarios, below a prefix of their own.
struct Group {
    connect: Connect,
    prefix: String,
    runs: AtomicU64,
}

#[async_trait::async_trait]
impl contract::Cluster for Group {
    async fn join(&self, name: &str) -> Box<dyn Member> {
        let options = Options {
            ttl: TTL,
            key_prefix: self.prefix.clone(),
            ..Options::new(self.connect.clone(), self.runs.fetch_add(1, Ordering::Relaxed))
        };
        let running = Running::start(name, options);
        let (mut ready, mut health) = (running.tracker.ready(), running.tracker.health());
        soon("the replica is ready", ready.wait_for(|ready| *ready)).await.unwrap();
        soon("news come in", health.wait_for(|health| health.listening)).await.unwrap();
        Box::new(running)
    }

    fn expiry(&self) -> Duration {
        TTL + Duration::from_millis(500)
    }
}

/// Keeps the contract for several replicas, with `fail_over` before its fifth scenario: replicas start while it happens.
async fn keeps_the_contract(connect: Connect, fail_over: impl AsyncFn()) {
    let made = AtomicU64::new(0);
    contract::check_cluster(|| async {
        let number = made.fetch_add(1, Ordering::Relaxed);
        if number == 4 {
            fail_over().await;
        }
        let prefix = format!("scenario-{number}");
        Arc::new(Group { connect: connect.clone(), prefix, runs: AtomicU64::new(1) })
            as Arc<dyn contract::Cluster>
    })
    .await;
    assert!(made.into_inner() > 5, "there are scenarios after the failover");
}

#[tokio::test]
async fn the_contract_is_kept_through_sentinel_with_a_failover_in_the_middle() {
    let sentinels = Sentinels::start().await;
    keeps_the_contract(sentinels.connect("s"), async || sentinels.primary.stop().await).await;
}

#[tokio::test]
async fn the_contract_is_kept_on_a_cluster_with_a_failover_in_the_middle() {
    let nodes = Nodes::start().await;
    keeps_the_contract(nodes.connect(), async || nodes.nodes[0].1.kill()).await;
}
