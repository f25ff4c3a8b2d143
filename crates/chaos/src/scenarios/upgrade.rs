//! All replicas change to another build, and back.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};

use super::{process::RATE, restarts};
use crate::run::Run;

/// The views of all replicas, and the builds in them, are true within this.
const SETTLES: Duration = Duration::from_secs(10);

/// The version and commit that replica 0 has in its own list.
async fn builds(run: &Run) -> Result<BTreeSet<String>> {
    let list = run.mesh.list(0).await?;
    Ok(list.replicas.into_iter().map(|row| format!("{} {}", row.version, row.commit)).collect())
}

pub(super) async fn and_back(run: &mut Run) -> Result<()> {
    run.load(RATE, 12, 6);
    sleep(Duration::from_secs(3)).await;
    let before = builds(run).await?;
    ensure!(before.len() == 1, "the replicas do not begin with one build: {before:?}");
    for build in [1, 0] {
        for n in 0..run.setup.replicas {
            restarts::leave(run, n).await?;
            run.mesh.set_build(n, build);
            restarts::back(run, n).await?;
        }
        // Replica 0 may still list the process that the last one was before.
        run.settled(SETTLES).await?;
        let end = Instant::now() + SETTLES;
        let mut now = builds(run).await?;
        while now.len() > 1 && Instant::now() < end {
            sleep(Duration::from_millis(100)).await;
            now = builds(run).await?;
        }
        run.notes.push(format!("All replicas run {now:?}."));
        ensure!(now.len() == 1, "all replicas were restarted, and run several builds: {now:?}");
        ensure!((build == 0) == (now == before), "the other programs are the same build: {now:?}");
    }
    restarts::ended(run).await;
    Ok(())
}
