//! Large tables: the time to join, and the memory of a copy.

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, sleep};

use super::{
    api::{Api, first},
    deployment::{Deployment, Options, is_ready},
    owner::FakeOwner,
};
use crate::{environment::Environment, times::Times};

const LONGEST: Duration = Duration::from_secs(60);

/// Returns distinct random ids below ten million.
pub(super) fn random_agents(count: usize) -> Vec<i64> {
    let mut agents = HashSet::with_capacity(count);
    while agents.len() < count {
        agents.insert(1 + i64::from(rand::random::<u32>() % 10_000_000));
    }
    agents.into_iter().collect()
}

/// Starts owners that hold `total` agents together.
async fn owners(count: usize, total: usize) -> anyhow::Result<Vec<FakeOwner>> {
    let agents = random_agents(total);
    let mut owners = Vec::new();
    for part in agents.chunks(total.div_ceil(count)) {
        let owner = FakeOwner::start().await?;
        owner.set(part.iter().copied());
        owners.push(owner);
    }
    Ok(owners)
}

/// Returns how many agents of other replicas are in the complete tables of a replica.
async fn known(api: Api) -> anyhow::Result<u64> {
    let view = api.replicas().await?;
    let whole = |row: &&proto::kas::api::v1::KasInstanceInfo| row.standing != "self" && row.table_synced;
    Ok(view.replicas.iter().filter(whole).map(|row| row.agents).sum())
}

/// The time that a replica takes to join.
#[derive(Default)]
pub(super) struct Joins {
    /// From the start of the process until both of the following.
    pub(super) whole: Times,
    pub(super) ready: Times,
    pub(super) known: Times,
}

/// Measures a third replica that joins two others, while owners hold `total` agents.
pub(super) async fn joins(environment: &Environment, count: usize, total: usize) -> anyhow::Result<Joins> {
    let owners = owners(2, total).await?;
    let seeds: Vec<SocketAddr> = owners.iter().map(FakeOwner::address).collect();
    let mut deployment =
        Deployment::new(environment, "join", 3, Options { seeds, ..Options::default() })?.start().await?;
    let mut joins = Joins::default();
    const JOINER: usize = 2;
    for _ in 0..count {
        deployment.shut_down(JOINER).await?;
        sleep(Duration::from_millis(500)).await;
        let begin = Instant::now();
        deployment.spawn(JOINER)?;
        let replica = &deployment.replicas[JOINER];
        let (observability, api) = (replica.at.observability, replica.api.apart());
        let ready = async {
            while !is_ready(observability).await {
                ensure!(begin.elapsed() < LONGEST, "the joining replica does not become ready");
                sleep(Duration::from_millis(2)).await;
            }
            Ok(Instant::now())
        };
        let whole = async {
            // First until it listens.
            while tokio::net::TcpStream::connect(api.address).await.is_err() {
                ensure!(begin.elapsed() < LONGEST, "the joining replica does not listen");
                sleep(Duration::from_millis(2)).await;
            }
            let ask = || known(api.clone());
            first(Duration::from_millis(5), LONGEST, ask, |known| *known >= total as u64).await
        };
        let (ready, whole) = tokio::join!(ready, whole);
        let (ready, whole) = (ready? - begin, whole.context("the table is not complete")?.1 - begin);
        joins.ready.push(ready);
        joins.known.push(whole);
        joins.whole.push(ready.max(whole));
        deployment.meshed().await?;
    }
    Ok(joins)
}

/// Resident memory of a replica with the tables of five owners, in MB.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) before: f64,
    pub(super) after: f64,
    pub(super) peak: f64,
}

/// Returns the memory of a replica before and after it has copied `total` agents of five owners.
pub(super) async fn memory(environment: &Environment, total: usize) -> anyhow::Result<Memory> {
    let mut empty = Vec::new();
    for _ in 0..5 {
        empty.push(FakeOwner::start().await?);
    }
    let seeds: Vec<SocketAddr> = empty.iter().map(FakeOwner::address).collect();
    let deployment =
        Deployment::new(environment, "memory", 1, Options { seeds, ..Options::default() })?.start().await?;
    let replica = &deployment.replicas[0];
    // So that memory which is allocated once is not counted.
    for _ in 0..50 {
        replica.api.replicas().await?;
    }
    sleep(Duration::from_secs(2)).await;
    let megabytes = |kib: u64| kib as f64 * 1024.0 / 1e6;
    let before = megabytes(replica.process()?.rss()?);
    let agents = random_agents(total);
    for (owner, part) in empty.iter().zip(agents.chunks(total.div_ceil(empty.len()))) {
        owner.set(part.iter().copied());
    }
    let api = replica.api.clone();
    let ask = || known(api.clone());
    first(Duration::from_millis(200), LONGEST, ask, |known| *known >= total as u64).await?;
    // Until the allocator has returned the memory of the snapshots.
    sleep(Duration::from_secs(15)).await;
    let after = megabytes(replica.process()?.rss()?);
    let peak = megabytes(replica.process()?.peak_rss()?);
    Ok(Memory { before, after, peak })
}
