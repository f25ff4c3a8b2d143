//! The contract suite of trackers with a real Redis, and with a real Valkey.

use std::{io::Write as _, path::Path, sync::Arc};

use cluster::{Tracker, contract};
use testkit::{pypi, redis::Redis};

use crate::world::{Kind, World};

#[tokio::test]
async fn a_single_replica_satisfies_the_contract() {
    contract::check(|| async { alone(World::new(Kind::Socket).await).await }).await;
}

/// Returns the tracker of a replica that is alone, and what keeps it running.
async fn alone(world: World) -> (Arc<dyn Tracker>, (World, Box<dyn contract::Member>)) {
    let member = contract::Cluster::join(&world, "a").await;
    (member.tracker(), (world, member))
}

#[tokio::test]
async fn several_replicas_satisfy_the_contract() {
    contract::check_cluster(|| async {
        Arc::new(World::new(Kind::Server).await) as Arc<dyn contract::Cluster>
    })
    .await;
}

#[tokio::test]
async fn the_contract_holds_while_the_store_fails() {
    contract::check_store(|| async { Arc::new(World::new(Kind::Server).await) as Arc<dyn contract::Store> })
        .await;
}

/// Starts a Valkey.
async fn valkey(server: &Path, kind: Kind) -> World {
    World::of(Redis::run_by(server, &[]).await.expect("a Valkey runs"), kind).await
}

#[tokio::test]
async fn the_whole_contract_holds_with_valkey() {
    let server = match tokio::task::spawn_blocking(|| pypi::VALKEY.fetch()).await.unwrap() {
        Ok(server) => server,
        Err(error) => {
            // Written directly, because the test harness captures the output of macros.
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
