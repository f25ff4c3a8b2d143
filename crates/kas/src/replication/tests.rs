//! Alone, and several in one process: each with a runtime of its own, so that it can crash.

use std::time::Duration;

use base64::Engine as _;
use cluster::contract::{self, Member};
use gossip::{KeyRing, Timing};
use prometheus_client::registry::Registry;
use runtime::{
    http2::{self, Server},
    io::{Address, Listener},
    lifecycle::Lifecycle,
};
use tokio::runtime::Runtime;

use super::*;
use crate::{
    config::secret::ApiSecret,
    listener::{Attempts, private::PrivateListener},
    mesh,
    peer::Credential,
    tunnel_registry,
};

/// How long entries count after the last proof of life, short for tests.
const TTL: Duration = Duration::from_secs(3);
const ROUND: Duration = Duration::from_millis(100);

/// A replica that is alone, with its gossip on loopback.
async fn alone() -> (Arc<Replication>, tempfile::TempDir) {
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
    let metrics = Arc::new(Metrics::new(&mut Registry::default()));
    let replication =
        Replication::new(me, peers, metrics, Duration::from_secs(10), Duration::from_millis(200));
    let seeds = watch::channel(HashSet::new()).1;
    tokio::spawn(Arc::clone(&replication).run(gossip, seeds));
    (replication, dir)
}

#[tokio::test]
async fn keeps_the_contract() {
    cluster::contract::check(|| async { alone().await.0 as Arc<dyn Tracker> }).await;
}

#[tokio::test]
async fn being_alone_never_keeps_a_replica_from_serving() {
    let (replication, _dir) = alone().await;
    let mut ready = replication.ready();
    tokio::time::timeout(Duration::from_secs(10), ready.wait_for(|ready| *ready)).await.unwrap().unwrap();
    assert_eq!(*replication.live().borrow(), 1);
    let replicas = replication.replicas().await;
    assert_eq!(replicas.replicas.len(), 1);
    assert_eq!((replicas.replicas[0].standing.as_str(), replicas.alarms.len()), ("self", 0));
}

/// What replicas share: a secret, and where others may be.
struct World {
    path: std::path::PathBuf,
    seeds: watch::Sender<HashSet<SocketAddr>>,
    _dir: tempfile::TempDir,
}

/// A replica with its sockets.
struct Running {
    replication: Arc<Replication>,
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
        Arc::clone(&self.replication) as _
    }

    async fn crash(mut self: Box<Self>) {
        self.end();
    }

    async fn leave(self: Box<Self>) {
        self.replication.leave().await;
    }
}

/// Takes its ports and runs until its runtime ends.
async fn run(name: String, secret: ApiSecret, seeds: watch::Sender<HashSet<SocketAddr>>) -> Arc<Replication> {
    let ring = KeyRing::derive(&[secret.expose()]).unwrap();
    // The port that is free for TCP may be taken for UDP.
    let (listener, bound, gossip) = loop {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".to_owned())).await.unwrap();
        let bound = listener.local_addr().unwrap();
        let gossip = Gossip::builder(&name)
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
    let metrics = Arc::new(Metrics::new(&mut Registry::default()));
    let replication = Replication::new(me.clone(), peers, Arc::clone(&metrics), TTL, ROUND);
    let limits = tunnel_registry::Limits { waiters_per_agent: 1, waiters: 1, tunnels_per_agent: 1 };
    let registry = TunnelRegistry::new(Arc::clone(&replication) as _, Arc::clone(&metrics), limits);
    replication.serve(Arc::clone(&registry));
    let verifier = mesh::verifier(std::slice::from_ref(&secret));
    let service = PrivateListener::new(
        verifier,
        me.id,
        registry,
        metrics,
        services(&replication),
        None,
        Attempts::default(),
    );
    let server = Server {
        listener,
        tls: None,
        websocket: false,
        settings: http2::PEER,
        limits: http2::Limits::default(),
        age: None,
        service,
    };
    tokio::spawn(server.run(Lifecycle::default()));
    tokio::spawn(Arc::clone(&replication).run(gossip, seeds.subscribe()));
    seeds.send_modify(|seeds| {
        seeds.insert(bound);
    });
    replication
}

#[async_trait]
impl contract::Cluster for World {
    async fn join(&self, name: &str) -> Box<dyn Member> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let secret = ApiSecret::read(&self.path).unwrap();
        let running = run(name.to_owned(), secret, self.seeds.clone());
        let replication = runtime.spawn(running).await.unwrap();
        let mut ready = replication.ready();
        ready.wait_for(|ready| *ready).await.unwrap();
        Box::new(Running { replication, runtime: Some(runtime) })
    }

    fn expiry(&self) -> Duration {
        TTL + Duration::from_secs(2)
    }
}

#[tokio::test]
async fn several_replicas_keep_the_contract() {
    contract::check_cluster(|| async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, base64::prelude::BASE64_STANDARD.encode([7; 32])).unwrap();
        let seeds = watch::Sender::new(HashSet::new());
        Arc::new(World { path, seeds, _dir: dir }) as Arc<dyn contract::Cluster>
    })
    .await;
}
