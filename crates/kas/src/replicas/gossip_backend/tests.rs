//! One replica alone, and several replicas in one process, each with its own runtime, so that it can crash.

use std::time::Duration;

use base64::Engine as _;
use cluster::{
    Doors, Tracker,
    contract::{self, Member},
};
use gossip::{KeyRing, Timing};
use identity::jwt::JwtVerifier;
use net::{
    http::{Limits, PEER, Protocols, Server},
    io::{Address, Listener},
};
use process::lifecycle::Lifecycle;
use prometheus_client::registry::Registry;
use settings::secret::ApiSecret;
use tokio::runtime::Runtime;

use super::*;
use crate::listener::private::PrivateListener;
use kas_config::Attempts;
use observe::refusals::Refusals;
use routing::{metrics::RequestMetrics, peer::Credential, registry};

/// How long tables count after the last proof of life; short for tests.
const TTL: Duration = Duration::from_secs(3);
const ROUND: Duration = Duration::from_millis(100);

/// Returns a replica that is alone, with its gossip on loopback.
async fn alone() -> (Arc<GossipBackend>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret");
    std::fs::write(&path, base64::prelude::BASE64_STANDARD.encode([7; 32])).unwrap();
    let secret = ApiSecret::read(&path).unwrap();
    let ring = KeyRing::derive(&[secret.expose()]).unwrap();
    let gossip = Gossip::builder("alone").keys(watch::channel(Arc::new(ring)).1).start().await.unwrap();
    let address = gossip.local_addr().to_string();
    let me = Replica { id: ReplicaId::new(&address), address: address.into() };
    let credential = Arc::new(Credential::new(me.id.clone(), &secret));
    let peers = Peers::new(me.id.clone(), credential, None);
    let metrics = Arc::new(ReplicaMetrics::new(&mut Registry::default()));
    let backend = GossipBackend::new(Parts {
        me,
        cluster: "default".to_owned(),
        doors: Doors::default(),
        peers,
        metrics,
        gossip,
        seeds: watch::channel(HashSet::new()).1,
        ttl: Duration::from_secs(10),
        interval: Duration::from_millis(200),
    });
    tokio::spawn(Arc::clone(&backend).run());
    (backend, dir)
}

#[tokio::test]
async fn keeps_the_contract() {
    cluster::contract::check(|| async {
        let (backend, dir) = alone().await;
        (backend as Arc<dyn Tracker>, dir)
    })
    .await;
}

#[tokio::test]
async fn a_replica_alone_becomes_ready() {
    let (backend, _dir) = alone().await;
    let mut ready = backend.ready().0;
    tokio::time::timeout(Duration::from_secs(10), ready.wait_for(|ready| *ready)).await.unwrap().unwrap();
    assert_eq!(*backend.live().borrow(), 1);
    let replicas = backend.replicas().await;
    assert_eq!(replicas.replicas.len(), 1);
    assert_eq!((replicas.replicas[0].standing(), replicas.alarms.len()), ("self", 0));
}

/// What replicas share: a secret and the seeds.
struct World {
    path: std::path::PathBuf,
    seeds: watch::Sender<HashSet<SocketAddr>>,
    _dir: tempfile::TempDir,
}

/// A replica with its sockets.
struct Running {
    backend: Arc<GossipBackend>,
    runtime: Option<Runtime>,
}

impl Running {
    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

#[async_trait]
impl Member for Running {
    fn tracker(&self) -> Arc<dyn Tracker> {
        Arc::clone(&self.backend) as _
    }

    async fn crash(mut self: Box<Self>) {
        self.end();
    }

    async fn leave(self: Box<Self>) {
        self.backend.leave().await;
    }
}

/// Binds the ports of a replica and runs it until its runtime ends.
async fn run(
    name: String,
    cluster: &str,
    secret: ApiSecret,
    seeds: watch::Sender<HashSet<SocketAddr>>,
) -> Arc<GossipBackend> {
    let ring = KeyRing::derive(&[secret.expose()]).unwrap();
    // A port that is free for TCP may be in use for UDP.
    let (listener, bound, gossip) = loop {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".to_owned())).await.unwrap();
        let bound = listener.local_addr().unwrap();
        let gossip = Gossip::builder(&name)
            .cluster(cluster)
            .listen(bound)
            .keys(watch::channel(Arc::new(ring.clone())).1)
            .seeds(seeds.subscribe())
            .timing(Timing { interval: ROUND, initial_interval: ROUND * 3 / 2, ..Timing::default() })
            .start()
            .await;
        match gossip {
            Ok(gossip) => break (listener, bound, gossip),
            Err(error) if format!("{error:?}").contains("AddrInUse") => {}
            Err(error) => panic!("{error}"),
        }
    };
    let me = Replica { id: ReplicaId::new(&name), address: bound.to_string().into() };
    let credential = Arc::new(Credential::new(me.id.clone(), &secret));
    let peers = Peers::new(me.id.clone(), credential, None);
    let metrics = Arc::new(ReplicaMetrics::new(&mut Registry::default()));
    let backend = GossipBackend::new(Parts {
        me: me.clone(),
        cluster: cluster.to_owned(),
        doors: Doors { api: Some(bound), http: None },
        peers,
        metrics,
        gossip,
        seeds: seeds.subscribe(),
        ttl: TTL,
        interval: ROUND,
    });
    let requests = Arc::new(RequestMetrics::new(&mut Registry::default()));
    let refusals = Arc::new(Refusals::new(&mut Registry::default()));
    let limits =
        registry::Limits { waiters_per_agent: 1, waiters: 1, tunnels_per_agent: 1, endless_per_old_agent: 1 };
    let registry = TunnelRegistry::new(Arc::clone(&backend) as _, requests, limits);
    let services = Arc::clone(&backend).services(Arc::clone(&registry), Arc::clone(&refusals));
    let verifier = JwtVerifier::for_replicas(std::slice::from_ref(&secret));
    let service =
        PrivateListener::new(verifier, me.id, registry, refusals, services, None, Attempts::default());
    let server = Server {
        listener,
        tls: None,
        protocols: Protocols::Http2,
        settings: PEER,
        limits: Limits::default(),
        age: None,
        service,
    };
    tokio::spawn(server.run(Lifecycle::default()));
    tokio::spawn(Arc::clone(&backend).run());
    seeds.send_modify(|seeds| {
        seeds.insert(bound);
    });
    backend
}

#[async_trait]
impl contract::Cluster for World {
    async fn join(&self, name: &str) -> Box<dyn Member> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let secret = ApiSecret::read(&self.path).unwrap();
        let running = run(name.to_owned(), "kas", secret, self.seeds.clone());
        let backend = runtime.spawn(running).await.unwrap();
        let mut ready = backend.ready().0;
        ready.wait_for(|ready| *ready).await.unwrap();
        Box::new(Running { backend, runtime: Some(runtime) })
    }

    fn expiry(&self) -> Duration {
        TTL + Duration::from_secs(2)
    }
}

#[tokio::test]
async fn several_replicas_satisfy_the_contract() {
    contract::check_cluster(|| async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, base64::prelude::BASE64_STANDARD.encode([7; 32])).unwrap();
        let seeds = watch::Sender::new(HashSet::new());
        Arc::new(World { path, seeds, _dir: dir }) as Arc<dyn contract::Cluster>
    })
    .await;
}

/// Groups of replicas share a secret and know each other's addresses: gossip and table streams keep them
/// apart.
#[tokio::test]
async fn groups_with_different_names_never_mix() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret");
    std::fs::write(&path, base64::prelude::BASE64_STANDARD.encode([7; 32])).unwrap();
    let secret = || ApiSecret::read(&path).unwrap();
    let seeds = watch::Sender::new(HashSet::new());
    let one = run("one".to_owned(), "kas", secret(), seeds.clone()).await;
    let other = run("other".to_owned(), "another", secret(), seeds.clone()).await;
    let refused = async |backend: &GossipBackend| {
        while !backend.alarms().iter().any(|alarm| alarm.contains("gossip.cluster differs")) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let both = async { tokio::join!(refused(&one), refused(&other)) };
    tokio::time::timeout(Duration::from_secs(20), both).await.expect("both are told why they get no table");
    for backend in [&one, &other] {
        let known: Vec<_> = backend.replicas().await.replicas.into_iter().map(|row| row.replica.id).collect();
        assert_eq!(known, std::slice::from_ref(&backend.me.id));
        assert_eq!(*backend.live.borrow(), 1);
    }
}
