//! The scenarios: how each is set up, and its steps. What each asserts is in the table.

mod network;
mod outside;
mod process;
mod registry;
mod wires;

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;

use crate::{
    faults::outside::Wanted,
    run::{Run, Setup},
};

/// Returns how a scenario is set up.
pub(crate) fn setup(id: &str, quick: bool) -> Setup {
    let setup = Setup::default();
    match id {
        "S03" => Setup { connections: 1, only: Some(0), ..setup },
        "S01" | "S02" | "S05" | "S57" => Setup { connections: 1, ..setup },
        "S21b" => Setup { wanted: Wanted { wires: true, ..Wanted::default() }, ..setup },
        "S23" => Setup { wanted: Wanted { dns: true, ..Wanted::default() }, ..setup },
        "S24" => Setup { more_agents: 8, wanted: Wanted { wires: true, ..Wanted::default() }, ..setup },
        "S34" => Setup { more_agents: 4, ..setup },
        "S40" => Setup {
            more_agents: 8,
            config: json!({ "agent": {
                "info_cache_ttl": if quick { "5s" } else { "60s" }, "info_cache_error_ttl": "1s",
            } }),
            wanted: Wanted { gitlab: true, ..Wanted::default() },
            ..setup
        },
        "S41" => Setup { more_agents: 4, ..setup },
        "S41b" => Setup { wanted: Wanted { sentinels: true, ..Wanted::default() }, ..setup },
        "S42" => Setup { more_agents: 5, ..setup },
        "S43" => Setup { wanted: Wanted { secrets: true, ..Wanted::default() }, ..setup },
        "S09" | "S58" | "S36" => Setup {
            config: if quick { json!({}) } else { json!({ "drain": { "upgrade_grace": "10s" } }) },
            ..setup
        },
        "S13" => Setup { replicas: 5, ..setup },
        "S14" | "S15" | "S17" | "S30" | "S48" => Setup { replicas: 4, ..setup },
        "S16" => Setup { replicas: 4, started: 3, ..setup },
        "S25" => Setup { more_agents: 40, work: 0, ..setup },
        "S22" | "S27" => Setup { more_agents: 8, ..setup },
        "S29" => Setup { connections: 3, ..setup },
        "S31" => Setup { agents: 300, connections: 1, ..setup },
        _ => setup,
    }
}

/// Performs a scenario.
pub(crate) async fn perform(id: &str, run: &mut Run) -> Result<()> {
    match id {
        "S01" => process::killed_idle(run).await,
        "S02" => process::killed_under_load(run).await,
        "S03" => process::router_killed(run).await,
        "S05" => process::two_killed(run).await,
        "S06" => process::all_killed(run).await,
        "S07" => process::crash_loop(run).await,
        "S08" => process::paused(run).await,
        "S09" | "S36" => process::rolling(run).await,
        "S10" => network::pair(run).await,
        "S11" => network::isolated(run).await,
        "S12" => network::deaf(run).await,
        "S13" => network::split(run).await,
        "S14" => network::flapping(run).await,
        "S15" => network::ring(run).await,
        "S16" => network::join(run).await,
        "S17" => network::bridge(run).await,
        "S18" => network::lossy(run).await,
        "S19" => network::without_udp(run).await,
        "S21b" => wires::toxics(run).await,
        "S22" => network::half_open(run).await,
        "S23" => outside::names(run).await,
        "S24" => wires::balancers(run).await,
        "S25" => registry::waiters(run).await,
        "S27" => registry::churn(run).await,
        "S29" => process::one_by_one(run).await,
        "S30" => process::elastic(run).await,
        "S31" => process::storm(run).await,
        "S34" => wires::narrow(run).await,
        "S39" => process::starved(run).await,
        "S40" => outside::identity(run).await,
        "S41" => outside::redis(run).await,
        "S41b" => outside::failover(run).await,
        "S42" => outside::revoked(run).await,
        "S43" => outside::rotated(run).await,
        "S48" => process::soak(run).await,
        "S57" => process::edge_killed(run).await,
        "S58" => process::owner_drains(run).await,
        _ => bail!("{id} is in the table and has no steps"),
    }
}

/// A shorter time in the quick set.
pub(crate) fn time(run: &Run, quick: u64, full: u64) -> Duration {
    Duration::from_secs(if run.quick { quick } else { full })
}
