//! The scenarios: how each is set up, and its steps. What each asserts is in the table.

mod clock;
mod failures;
mod fleet;
mod hooks;
mod kills;
mod limits;
mod network;
mod outside;
mod packets;
mod phases;
mod planner;
mod poison;
mod process;
mod processor;
mod proxies;
mod recovery;
mod registry;
mod restarts;
mod soak;
mod strangers;
mod upgrade;
mod views;
mod wires;

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;

use crate::{
    faults::outside::Wanted,
    run::{Drain, Run, Setup, Tls},
};

pub(crate) use self::upgrade::written;

/// A drain with another grace for upgraded connections, in seconds.
fn grace(seconds: u64) -> Drain {
    Drain { grace: Duration::from_secs(seconds), ..Drain::default() }
}

/// A setup whose replicas look for a tunnel so shortly that a client can try all of them.
fn finds(setup: Setup) -> Setup {
    Setup { config: json!({ "limits": { "find_timeout": network::FIND } }), ..setup }
}

/// Which replicas serve agents over TLS: every second one, unless a scenario has agents of its own that speak
/// plain HTTP/2, or something between agents and replicas that is about the bytes of it.
fn tls(id: &str) -> Tls {
    match id {
        "S21b" | "S24" | "S27" | "S28" | "S46" | "S49" | "S50" | "S52" | "S55" | "S56" => Tls::No,
        "S31" => Tls::All,
        _ => Tls::Odd,
    }
}

/// Returns how a scenario is set up.
pub(crate) fn setup(id: &str, quick: bool) -> Setup {
    let setup = Setup { tls: tls(id), ..Setup::default() };
    match id {
        "S02" => Setup { agents: 48, double: 24, connections: 1, ..setup },
        "S03" => Setup { connections: 1, only: Some(0), ..setup },
        "S01" | "S05" | "S57" => Setup { connections: 1, ..setup },
        "S04" => Setup { connections: 1, only: Some(phases::OWNER), ..setup },
        "S36" => {
            Setup { more_agents: upgrade::ONE_REPLICA, drain: grace(if quick { 3 } else { 10 }), ..setup }
        }
        "S09" | "S58" if !quick => Setup { drain: grace(10), ..setup },
        "S09G" => Setup { drain: grace(600), ..setup },
        "S18" => Setup { more_agents: 40, ..setup },
        "S20" => Setup { replicas: 5, ..setup },
        "S21b" => Setup { wanted: Wanted { wires: true, ..Wanted::default() }, ..setup },
        "S23" => Setup { wanted: Wanted { dns: true, ..Wanted::default() }, ..setup },
        "S24" => Setup { more_agents: 8, wanted: Wanted { wires: true, ..Wanted::default() }, ..setup },
        "S26" | "S28" | "S45" => Setup { more_agents: 1, ..setup },
        "S33" => Setup { connections: 1, only: Some(0), more_agents: 60, ..setup },
        "S34" | "S41" => Setup { more_agents: 4, ..setup },
        "S35" => Setup { clock: Some(clock::STEPPED), ..setup },
        "S37" => Setup {
            more_agents: upgrade::ONE_REPLICA,
            one_build: true,
            drain: grace(if quick { 3 } else { 10 }),
            ..setup
        },
        "S40" => Setup {
            more_agents: 8,
            config: json!({ "agent": {
                "info_cache_ttl": if quick { "5s" } else { "60s" }, "info_cache_error_ttl": "1s",
            } }),
            wanted: Wanted { gitlab: true, ..Wanted::default() },
            ..setup
        },
        "S49" | "S50" => {
            Setup { more_agents: 1, wanted: Wanted { cluster: true, ..Wanted::default() }, ..setup }
        }
        "S51" => {
            Setup { more_agents: hooks::AWAY, wanted: Wanted { hooks: true, ..Wanted::default() }, ..setup }
        }
        "S54" => Setup { wanted: Wanted { proxies: true, ..Wanted::default() }, ..setup },
        "S53" => {
            let patience = Duration::from_secs(fleet::PATIENCE[usize::from(!quick)]);
            Setup {
                agents: fleet::AGENTS,
                clusters: fleet::AGENTS,
                wanted: Wanted { fleet: Some(patience), ..Wanted::default() },
                ..setup
            }
        }
        "S52" | "S55" | "S56" => {
            Setup { more_agents: 1, wanted: Wanted { manifests: true, ..Wanted::default() }, ..setup }
        }
        "S41b" => Setup { wanted: Wanted { sentinels: true, ..Wanted::default() }, ..setup },
        "S42" => Setup { more_agents: 5, ..setup },
        "S43" => Setup { wanted: Wanted { secrets: true, ..Wanted::default() }, ..setup },
        "S38" => Setup {
            more_agents: 1,
            audits: false,
            audit_disk: Some(512),
            config: json!({ "limits": { "waiters_per_agent": limits::WAITERS, "waiters": 4 * limits::WAITERS } }),
            ..setup
        },
        "S11" | "S12" => Setup { connections: 1, double: 12, ..finds(setup) },
        "S13" => Setup { replicas: 5, more_agents: 8, connections: 1, double: 12, ..finds(setup) },
        "S30" if quick => Setup { replicas: 4, pinned: 12, ..setup },
        "S30" => Setup { replicas: 7, pinned: 12, ..setup },
        "S48" if quick => Setup { replicas: 4, agents: 200, pinned: 100, ..setup },
        "S48" => Setup { replicas: 4, agents: 2_000, pinned: 1_000, ..setup },
        "S14" | "S15" => Setup { replicas: 4, ..setup },
        "S16" => Setup { replicas: 4, started: 3, ..finds(setup) },
        "S17" => Setup { replicas: 4, ..finds(setup) },
        "S25" => Setup { more_agents: 40, work: 0, ..setup },
        "S22" => Setup { more_agents: 8, ..setup },
        "S27" => Setup { more_agents: 40, ..setup },
        "S29" => Setup { connections: 3, ..setup },
        "S31" => Setup { agents: 300, connections: 1, ..setup },
        _ => setup,
    }
}

/// Performs a scenario.
pub(crate) async fn perform(id: &str, run: &mut Run) -> Result<()> {
    match id {
        "S00" => processor::idle(run).await,
        "S01" => process::killed_idle(run).await,
        "S02" => kills::killed_under_load(run).await,
        "S03" => process::router_killed(run).await,
        "S04" => phases::in_each_phase(run).await,
        "S05" => process::two_killed(run).await,
        "S06" => process::all_killed(run).await,
        "S07" => process::crash_loop(run).await,
        "S08" => process::paused(run).await,
        "S36" if !run.setup.written.is_empty() => upgrade::side_by_side(run).await,
        "S09" | "S36" => restarts::rolling(run).await,
        "S09G" => restarts::default_grace(run).await,
        "S10" => network::pair(run).await,
        "S11" => network::isolated(run).await,
        "S12" => {
            network::deaf(run).await?;
            packets::one_way(run).await
        }
        "S13" => network::split(run).await,
        "S14" => network::flapping(run).await,
        "S15" => network::ring(run).await,
        "S16" => network::join(run).await,
        "S17" => network::bridge(run).await,
        "S18" => packets::lossy(run).await,
        "S19" => network::without_udp(run).await,
        "S20" => packets::fragments(run).await,
        "S21" => packets::tcp(run).await,
        "S21b" => wires::toxics(run).await,
        "S22" => network::half_open(run).await,
        "S23" => outside::names(run).await,
        "S24" => wires::balancers(run).await,
        "S25" => registry::block_then_connect(run).await,
        "S26" => limits::waiter_storm(run).await,
        "S27" => registry::churn(run).await,
        "S28" => registry::moves(run).await,
        "S29" => process::one_by_one(run).await,
        "S30" => soak::elastic(run).await,
        "S31" => soak::storm(run).await,
        "S33" => packets::slow_peer(run).await,
        "S34" => wires::narrow(run).await,
        "S35" => clock::stepped(run).await,
        "S37" if !run.setup.written.is_empty() => upgrade::through_versions(run).await,
        "S37" => upgrade::and_back(run).await,
        "S38" => limits::exhausted(run).await,
        "S39" => processor::starved(run).await,
        "S40" => outside::identity(run).await,
        "S41" => outside::redis(run).await,
        "S41b" => outside::failover(run).await,
        "S42" => outside::revoked(run).await,
        "S43" => outside::rotated(run).await,
        "S44" => poison::poisoned(run).await,
        "S45" => strangers::without_secret(run).await,
        "S46" => limits::abused(run).await,
        "S48" => soak::soak(run).await,
        "S49" => views::edge_killed(run).await,
        "S50" => views::watch_broken(run).await,
        "S51" => hooks::in_each_step(run).await,
        "S52" => planner::home_paused(run).await,
        "S53" => fleet::fifth_hangs(run).await,
        "S54" => proxies::wrong_owner(run).await,
        "S55" => planner::home_killed(run).await,
        "S56" => planner::two_homes(run).await,
        "S57" => process::edge_killed(run).await,
        "S58" => restarts::owner_drains(run).await,
        "S60" => limits::slow_readers(run).await,
        _ => bail!("{id} is in the table and has no steps"),
    }
}

/// A shorter time in the quick set.
pub(crate) fn time(run: &Run, quick: u64, full: u64) -> Duration {
    Duration::from_secs(if run.quick { quick } else { full })
}
