//! Each way to connect to Redis: TLS with and without client certificates, users and databases, and Sentinel
//! and Cluster with a failover.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cluster::{
    Connections as _, Locator as _, Query,
    contract::{self, Member},
};
use ids::AgentId;
use redis::cmd;
use redis_tracker::{Address, Connect, Options, Target, Tls};
use testkit::{
    process::{Process, SOON, soon},
    redis::{Redis, free_port, program},
};

use crate::{
    groups::{Group, Nodes, Sentinels, Sharers, tcp},
    world::{Kind, Running, TTL, World, calm},
};

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

/// Checks that two replicas that connect in this way see each other, and leave no keys behind.
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

/// Checks that a replica that connects in this way reports why it is refused.
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
async fn a_wrong_password_is_reported() {
    let redis = Redis::run_with(&["--requirepass", "hunter2"]).await.unwrap();
    let connect = Connect::to(Target::Server(tcp(redis.address().port())));
    works(Connect { password: Some("hunter2".to_owned().into()), ..connect.clone() }).await;
    is_refused(connect.clone(), "NOAUTH").await;
    is_refused(Connect { password: Some("hunter3".to_owned().into()), ..connect }, "authentication failed")
        .await;
}

#[tokio::test]
async fn a_user_needs_only_the_keys_and_the_channel_of_the_prefix() {
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
    let all = b.tracker.connected(Query::All).await.unwrap();
    assert_eq!(all.unanswered, [], "it may search the keys");
    let other = Running::start("c", options(3, "kas-2"));
    let mut health = other.tracker.health();
    soon("the refusal is reported", health.wait_for(|health| health.last_error.is_some())).await.unwrap();
    let (said, _) = health.borrow().last_error.clone().unwrap();
    assert!(said.to_lowercase().contains("permission"), "{said}");
}

#[tokio::test]
async fn a_list_of_all_agents_is_partial_if_the_keys_may_not_be_searched() {
    let redis =
        Redis::run_with(&["--user", "default", "on", "nopass", "~*", "&*", "+@all", "-scan"]).await.unwrap();
    let connect = Connect::to(Target::Server(tcp(redis.address().port())));
    let a = Running::start("a", Options { ttl: TTL, ..Options::new(connect, 1) });
    located(&a, 1, 0).await;
    let all = a.tracker.connected(Query::All).await.unwrap();
    assert_eq!(all.unanswered.len(), 1, "{all:?}");
    let reason = all.unanswered[0].reason.to_lowercase();
    assert!(reason.contains("could not be searched") && reason.contains("permission"), "{reason}");
    // Nothing has to be searched for the list of an agent.
    let one = a.tracker.connected(Query::Agent(agent(1))).await.unwrap();
    assert_eq!(one.unanswered, []);
}

#[tokio::test]
async fn databases_are_separate() {
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

/// A CA and certificates that it has signed, as PEM.
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
        // With the name of the CA it would look self-signed.
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
        (parameters.signed_by(&key, &ca).unwrap().pem(), key.serialize_pem())
    };
    Certificates { ca: ca.pem(), server: signed("127.0.0.1"), client: signed("kas") }
}

#[tokio::test]
async fn tls_uses_the_given_ca_and_client_certificate() {
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
    // Neither with another CA nor without a client certificate.
    is_refused(
        Connect { tls: tls(&certificates().ca, Some(&pem.client)), ..connect.clone() },
        "invalid peer certificate",
    )
    .await;
    is_refused(Connect { tls: tls(&pem.ca, None), ..connect }, "writing the liveness key of this replica")
        .await;
    drop(redis);
}

/// Sets the passwords of an ACL user.
fn user(passwords: &[&str]) -> redis::Cmd {
    let mut set = cmd("ACL").arg("SETUSER").arg("kas").arg("resetpass").arg("on").take();
    for password in passwords {
        set.arg(format!(">{password}"));
    }
    set.arg("~*").arg("&*").arg("+@all").take()
}

fn with_password(connect: &Connect, password: &str) -> Connect {
    Connect {
        username: Some("kas".to_owned()),
        password: Some(password.to_owned().into()),
        ..connect.clone()
    }
}

/// Waits until a replica reports that Redis refuses the new settings, or no longer does. The report must not
/// contain the secret.
async fn refusal(on: &Running, is_refused: bool) {
    soon("the refusal of Redis is reported", async {
        loop {
            let alarms = on.tracker.alarms();
            assert!(!format!("{alarms:?}").contains("hunter"), "{alarms:?}");
            if alarms.iter().any(|alarm| alarm.contains("refuses the current password")) == is_refused {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// Closes all connections of kas, so that it dials again.
fn kill() -> redis::Cmd {
    cmd("CLIENT").arg("KILL").arg("USER").arg("kas").take()
}

#[tokio::test]
async fn a_password_changes_in_either_order_without_losing_redis() {
    let world = World::new(Kind::Server).await;
    let connect = world.connect();
    let () = world.ask(&user(&["hunter1"])).await;
    let options = |run| Options { ttl: TTL, ..Options::new(with_password(&connect, "hunter1"), run) };
    let (a, b) = (Running::start("a", options(1)), Running::start("b", options(2)));
    let mut leases = vec![a.tracker.route(agent(1), Arc::from([]))];
    located(&b, 1, 1).await;
    let mut works_again = async |id: i64| {
        // The number of closed connections is not checked: some may have just been dialled again.
        let _: u64 = world.ask(&kill()).await;
        leases.push(a.tracker.route(agent(id), Arc::from([])));
        located(&b, id, 1).await;
        located(&b, 1, 1).await;
    };
    let reconfigure = |password: &str| {
        for running in [&a, &b] {
            running.tracker.reconfigure(with_password(&connect, password)).unwrap();
        }
    };
    // First changed in kas: until Redis knows the new password, the old one is used.
    reconfigure("hunter2");
    for running in [&a, &b] {
        refusal(running, true).await;
    }
    works_again(2).await;
    // A second wrong password does not replace the one that works.
    reconfigure("hunter3");
    works_again(3).await;
    reconfigure("hunter2");
    let () = world.ask(&user(&["hunter2"])).await;
    for running in [&a, &b] {
        refusal(running, false).await;
    }
    works_again(4).await;
    // First changed in Redis: connections stay. When they break, the new password may be known in kas or not.
    let () = world.ask(&user(&["hunter4"])).await;
    reconfigure("hunter4");
    works_again(5).await;
    // The old password is not tried any more: it would be refused, and look like an attack.
    let () = world.ask(&user(&["hunter1", "hunter2"])).await;
    let _: u64 = world.ask(&kill()).await;
    let mut health = b.tracker.health();
    let said = health.wait_for(|h| {
        !h.reachable && h.last_error.as_ref().is_some_and(|(text, _)| text.contains("authentication failed"))
    });
    soon("forgotten credentials are refused", said).await.unwrap();
    let () = world.ask(&user(&["hunter4"])).await;
    works_again(6).await;
}

#[tokio::test]
async fn a_cluster_is_dialled_with_the_new_password_after_a_failover() {
    let nodes = Nodes::start().await;
    for server in &nodes.servers {
        let () = server.ask(&user(&["hunter1"])).await;
    }
    let connect = nodes.connect();
    let options = |run| Options { ttl: TTL, ..Options::new(with_password(&connect, "hunter1"), run) };
    let (a, b) = (Running::start("a", options(1)), Running::start("b", options(2)));
    let _leases: Vec<_> = (1..=20).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=20 {
        located(&b, id, 1).await;
    }
    for server in &nodes.servers {
        let () = server.ask(&user(&["hunter1", "hunter2"])).await;
    }
    for running in [&a, &b] {
        running.tracker.reconfigure(with_password(&connect, "hunter2")).unwrap();
    }
    // Connections with the old password are closed. New connections use the new one.
    for server in &nodes.servers {
        let () = server.ask(&user(&["hunter2"])).await;
        let _: u64 = server.ask(&kill()).await;
    }
    let _more: Vec<_> = (21..=40).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=40 {
        located(&b, id, 1).await;
    }
    for running in [&a, &b] {
        refusal(running, false).await;
    }
    nodes.fail_soon().await;
    nodes.servers[0].redis.stop().await;
    let info = cmd("CLUSTER").arg("NODES").take();
    nodes.servers[1].answers(&info, |text| text.contains("master,fail")).await;
    let _last: Vec<_> = (41..=60).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=60 {
        located(&b, id, 1).await;
    }
}

#[tokio::test]
async fn certificates_change_while_connections_stay() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let (old, new) = (certificates(), certificates());
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
        &file("server.pem", &old.server.0),
        "--tls-key-file",
        &file("server.key", &old.server.1),
        "--tls-ca-cert-file",
        &file("ca.pem", &old.ca),
    ])
    .await
    .unwrap();
    let connect = |ca: &str, shown: &Certificates| Connect {
        tls: Some(Tls {
            ca: Some(ca.as_bytes().to_vec()),
            identity: Some((shown.client.0.clone().into_bytes(), shown.client.1.clone().into())),
        }),
        ..Connect::to(Target::Server(tcp(port)))
    };
    let options = |run| Options { ttl: TTL, ..Options::new(connect(&old.ca, &old), run) };
    let (a, b) = (Running::start("a", options(1)), Running::start("b", options(2)));
    let _lease = a.tracker.route(agent(1), Arc::from([]));
    located(&b, 1, 1).await;
    // Only the new CA is trusted, and Redis still presents a certificate of the old one.
    for running in [&a, &b] {
        running.tracker.reconfigure(connect(&new.ca, &new)).unwrap();
        refusal(running, true).await;
    }
    assert!(a.tracker.alarms()[0].contains("certificate"), "{:?}", a.tracker.alarms());
    let client = redis::Client::open(format!("unix://{}", redis.socket().display())).unwrap();
    let mut operator = client.get_multiplexed_async_connection().await.unwrap();
    let set: redis::RedisResult<()> = cmd("CONFIG")
        .arg("SET")
        .arg("tls-cert-file")
        .arg(file("server-new.pem", &new.server.0))
        .arg("tls-key-file")
        .arg(file("server-new.key", &new.server.1))
        .arg("tls-ca-cert-file")
        .arg(file("ca-new.pem", &new.ca))
        .query_async(&mut operator)
        .await;
    set.unwrap();
    for running in [&a, &b] {
        refusal(running, false).await;
    }
    let killed: u64 =
        cmd("CLIENT").arg("KILL").arg("SKIPME").arg("yes").query_async(&mut operator).await.unwrap();
    assert!(killed > 0);
    let _more = a.tracker.route(agent(2), Arc::from([]));
    located(&b, 2, 1).await;
    // The error of a killed connection is reported until the next command succeeds.
    calm(&b.tracker).await;
}

/// Arguments of a server, or lines of a Sentinel's file, for TLS on its port and to other servers.
struct Secure {
    pem: Certificates,
    folder: tempfile::TempDir,
    port: u16,
}

impl Secure {
    async fn new() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let (pem, folder) = (certificates(), tempfile::tempdir().unwrap());
        for (name, content) in
            [("server.pem", &pem.server.0), ("server.key", &pem.server.1), ("ca.pem", &pem.ca)]
        {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        Self { pem, folder, port: free_port().await.unwrap() }
    }

    fn options(&self) -> Vec<(&'static str, String)> {
        let file = |name: &str| self.folder.path().join(name).display().to_string();
        vec![
            ("tls-port", self.port.to_string()),
            ("tls-cert-file", file("server.pem")),
            ("tls-key-file", file("server.key")),
            ("tls-ca-cert-file", file("ca.pem")),
            ("tls-replication", "yes".to_owned()),
        ]
    }

    async fn server(&self, more: &[&str]) -> Redis {
        let options = self.options();
        let keys: Vec<String> = options.iter().map(|(key, _)| format!("--{key}")).collect();
        let mut arguments: Vec<&str> = Vec::new();
        for (key, (_, value)) in keys.iter().zip(&options) {
            arguments.extend([key.as_str(), value.as_str()]);
        }
        Redis::run_with(&[&arguments, more].concat()).await.unwrap()
    }

    fn tls(&self) -> Tls {
        Tls {
            ca: Some(self.pem.ca.clone().into_bytes()),
            identity: Some((self.pem.client.0.clone().into_bytes(), self.pem.client.1.clone().into())),
        }
    }
}

#[tokio::test]
async fn sentinels_and_primary_have_users_and_tls() {
    let secure = Secure::new().await;
    let _redis = secure.server(&["--requirepass", "p"]).await;
    let (port, own) = (secure.port, free_port().await.unwrap());
    let options: String =
        secure.options().iter().skip(1).map(|(key, value)| format!("{key} {value}\n")).collect();
    let file = secure.folder.path().join("sentinel.conf");
    let lines = format!(
        "{options}port 0\ntls-port {own}\nbind 127.0.0.1\nuser default off\nuser watcher on >w ~* &* +@all\n\
         sentinel monitor kas 127.0.0.1 {port} 1\nsentinel auth-pass kas p\n"
    );
    std::fs::write(&file, lines).unwrap();
    let name = "redis-sentinel";
    let file = file.display().to_string();
    let _sentinel = Process::start(name, &program(name).unwrap(), &[&file], &[]).await.unwrap();
    let connect = |username: &str, password: &str, tls: Option<Tls>| {
        let target = Target::Sentinel {
            master: "kas".to_owned(),
            addresses: vec![tcp(own)],
            username: Some(username.to_owned()),
            password: Some(password.to_owned().into()),
            tls,
        };
        Connect { password: Some("p".to_owned().into()), tls: Some(secure.tls()), ..Connect::to(target) }
    };
    works(connect("watcher", "w", Some(secure.tls()))).await;
    is_refused(connect("watcher", "wrong", Some(secure.tls())), "").await;
    is_refused(connect("watcher", "w", None), "").await;
}

#[tokio::test]
async fn a_cluster_has_users_and_tls() {
    let secure = Secure::new().await;
    let redis = secure.server(&["--cluster-enabled", "yes", "--tls-cluster", "yes"]).await;
    let client = redis::Client::open(format!("unix://{}", redis.socket().display())).unwrap();
    let mut operator = client.get_multiplexed_async_connection().await.unwrap();
    let mut ask = async |command: &redis::Cmd| {
        let () = command.query_async(&mut operator).await.unwrap();
    };
    ask(&user(&["hunter1"])).await;
    ask(cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383)).await;
    let connect = Connect { tls: Some(secure.tls()), ..Connect::to(Target::Cluster(vec![tcp(secure.port)])) };
    works(with_password(&connect, "hunter1")).await;
    is_refused(with_password(&connect, "hunter2"), "").await;
    is_refused(Connect { tls: None, ..with_password(&connect, "hunter1") }, "").await;
}

#[tokio::test]
async fn sentinel_names_the_primary_before_and_after_a_failover() {
    let sentinels = Sentinels::start().await;
    let options = |run| Options { ttl: TTL, ..Options::new(sentinels.connect(), run) };
    let (a, b) = (Running::start("a", options(1)), Running::start("b", options(2)));
    let _lease = a.tracker.route(agent(1), Arc::from([]));
    located(&b, 1, 1).await;
    is_refused(sentinels.connect_with("wrong"), "").await;
    sentinels.fail_soon().await;
    sentinels.servers[0].redis.stop().await;
    let mut health = b.tracker.health();
    soon("the loss is noticed", health.wait_for(|health| !health.reachable)).await.unwrap();
    assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1, "cached routes stay available");
    let _second = a.tracker.route(agent(2), Arc::from([]));
    soon("the new primary is found", health.wait_for(|health| health.reachable)).await.unwrap();
    located(&b, 2, 1).await;
    located(&b, 1, 1).await;
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
    // One of the three new primaries.
    nodes.fail_soon().await;
    nodes.servers[0].redis.stop().await;
    let info = cmd("CLUSTER").arg("NODES").take();
    nodes.servers[1].answers(&info, |text| text.contains("master,fail")).await;
    let info = cmd("CLUSTER").arg("INFO").take();
    nodes.servers[1].answers(&info, |text| text.contains("cluster_state:ok")).await;
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

/// Runs the contract suite for several replicas, with `fail_over` before its fifth scenario, so that replicas
/// start during the failover.
async fn keeps_the_contract(group: Arc<dyn Group>, fail_over: impl AsyncFn()) {
    let made = AtomicU64::new(0);
    contract::check_cluster(|| async {
        let number = made.fetch_add(1, Ordering::Relaxed);
        if number == 4 {
            fail_over().await;
        }
        Arc::new(Sharers::on(&group, &format!("scenario-{number}"))) as Arc<dyn contract::Cluster>
    })
    .await;
    assert!(made.into_inner() > 5, "there are scenarios after the failover");
}

#[tokio::test]
async fn the_contract_is_kept_through_sentinel_with_a_failover_in_the_middle() {
    let sentinels = Arc::new(Sentinels::start().await);
    keeps_the_contract(Arc::clone(&sentinels) as _, async || {
        sentinels.fail_soon().await;
        sentinels.servers[0].redis.stop().await;
    })
    .await;
}

#[tokio::test]
async fn the_contract_is_kept_on_a_cluster_with_a_failover_in_the_middle() {
    let nodes = Arc::new(Nodes::start().await);
    keeps_the_contract(Arc::clone(&nodes) as _, async || {
        nodes.fail_soon().await;
        nodes.servers[0].redis.stop().await;
    })
    .await;
}
