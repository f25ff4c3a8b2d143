//! Sizes of replicas before a fault, and after it.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;

use crate::{run::Run, sizes::Size};

/// How long sizes may take to return: an allocator gives memory back after a while.
const RETURN: Duration = Duration::from_secs(40);

/// Sizes of the replicas that run.
pub(super) type Sizes = BTreeMap<usize, Size>;

pub(super) async fn sizes(run: &Run) -> Result<Sizes> {
    let mut sizes = Sizes::new();
    for n in run.mesh.running() {
        sizes.insert(n, run.size(n).await?);
    }
    Ok(sizes)
}

/// Compares sizes with those before, when they have returned or had long enough for it. Replicas that were
/// started since are left out.
pub(super) async fn recovered(run: &mut Run, before: &Sizes, except: &[usize]) -> Result<()> {
    for (n, before) in before.iter().filter(|(n, _)| !except.contains(n)) {
        run.recovers(*n, before, RETURN).await?;
    }
    Ok(())
}
