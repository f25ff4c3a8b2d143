//! Large tables: joining, and what a copy of them takes.

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, sleep};

use super::{
    super::processes::Ground,
    api::{Api, first},
    owner::FakeOwner,
    stage::{Options, Stage, is_ready},
    times::Times,
};

const LONGEST: Duration = Duration::from_secs(60);

/// Distinct numbers at random among ten million, as ids of agents are spread.
pub(super) fn random_agents(count: usize) -> Vec<i64> {
    let mut agents = HashSet::with_capacity(count);
    while agents.len() < count {
        agents.insert(1 + i64::from(rand::random::<u32>() % 10_000_000));
    }
    agents.into_iter().collect()
}

/// Starts owners that share `total` agents.
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

/// Returns how many agents of others a replica knows, as far as the copies are complete.
async fn known(api: Api) -> anyhow::Result<u64> {
    let view = api.replicas().await?;
    let whole = |row: &&proto::kas::api::v1::KasInstanceInfo| row.standing != "self" && row.table_synced;
    Ok(view.replicas.iter().filter(whole).map(|row| row.agents).sum())
}

/// What joining took.
#[derive(Default)]
pub(super) struct Joins {
    /// From the start of the process to both of these.
    pub(super) whole: Times,
    pub(super) ready: Times,
    pub(super) known: Times,
}

/// Lets a third replica join two others, where owners hold `total` agents.
pub(super) async fn joins(ground: &Ground, count: usize, total: usize) -> anyhow::Result<Joins> {
    let owners = owners(2, total).await?;
    let seeds: Vec<SocketAddr> = owners.iter().map(FakeOwner::address).collect();
    let mut stage = Stage::new(ground, "join", 3, Options { seeds, ..Options::default() })?.start().await?;
    let mut joins = Joins::default();
    const JOINER: usize = 2;
    for _ in 0..count {
        stage.leave(JOINER).await?;
        sleep(Duration::from_millis(500)).await;
        let begin = Instant::now();
        stage.spawn(JOINER)?;
        let replica = &stage.replicas[JOINER];
        let (observability, api) = (replica.at.observability, replica.api.apart());
        let ready = async {
            while !is_ready(observability).await {
                ensure!(begin.elapsed() < LONGEST, "the joining replica does not become ready");
                sleep(Duration::from_millis(2)).await;
            }
            Ok(Instant::now())
        };
        let whole = async {
            // Its listeners first.
            while tokio::net::TcpStream::connect(api.address).await.is_err() {
                ensure!(begin.elapsed() < LONGEST, "the joining replica does not listen");
                sleep(Duration::from_millis(2)).await;
            }
            let ask = || known(api.clone());
            first(Duration::from_millis(5), LONGEST, ask, |known| *known >= total as u64).await
        };
        let (ready, whole) = tokio::join!(ready, whole);
        let (ready, whole) = (ready? - begin, whole.context("the whole table")?.1 - begin);
        joins.ready.push(ready);
        joins.known.push(whole);
        joins.whole.push(ready.max(whole));
        stage.meshed().await?;
    }
    Ok(joins)
}

/// Resident memory of a replica, in MB, beside tables of five owners.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) before: f64,
    pub(super) after: f64,
    pub(super) peak: f64,
}

/// Returns what a replica takes before and after it knows `total` agents of five owners.
pub(super) async fn memory(ground: &Ground, total: usize) -> anyhow::Result<Memory> {
    let mut empty = Vec::new();
    for _ in 0..5 {
        empty.push(FakeOwner::start().await?);
    }
    let seeds: Vec<SocketAddr> = empty.iter().map(FakeOwner::address).collect();
    let stage = Stage::new(ground, "memory", 1, Options { seeds, ..Options::default() })?.start().await?;
    let replica = &stage.replicas[0];
    // Whatever is there only once is there.
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
    // The allocator gives back what the snapshots took.
    sleep(Duration::from_secs(15)).await;
    let after = megabytes(replica.process()?.rss()?);
    let peak = megabytes(replica.process()?.peak_rss()?);
    Ok(Memory { before, after, peak })
}
