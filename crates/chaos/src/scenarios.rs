//! The scenarios: what each does and asserts, and why some cannot run here.

mod clock;
mod kills;
mod limits;
mod network;
mod packets;
mod phases;
mod process;
mod registry;
mod restarts;
mod soak;
mod strangers;
mod upgrade;

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;

use crate::{
    faults,
    run::{Drain, Run, Setup},
};

/// A row of the table of scenarios.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) id: &'static str,
    /// The fault.
    pub(crate) what: &'static str,
    /// What is asserted besides the invariants.
    pub(crate) asserted: &'static str,
    /// Whether it is in the quick set.
    pub(crate) quick: bool,
    /// Why it does not run as real processes, and where it is covered instead.
    pub(crate) elsewhere: Option<&'static str>,
}

const fn row(id: &'static str, what: &'static str, asserted: &'static str, quick: bool) -> Scenario {
    Scenario { id, what, asserted, quick, elsewhere: None }
}

const fn not_here(id: &'static str, what: &'static str, why: &'static str) -> Scenario {
    Scenario { id, what, asserted: "", quick: false, elsewhere: Some(why) }
}

/// Scenarios that take longer than all others: they run when they are asked for.
pub(crate) const SLOW: &[&str] = &["S09G", "S48"];

/// Every scenario, in order.
pub(crate) const ALL: &[Scenario] = &[
    row("S01", "SIGKILL one of three replicas, idle", "T_kill, T_purge", false),
    row(
        "S02",
        "SIGKILL one of three replicas every 30 s (quick: 10 s) under 200 requests/s to agents with one connection, 40 to agents with two",
        "success, T_kill, T_purge, T_failover, T_failover_2c; failures are unknown only",
        true,
    ),
    row(
        "S03",
        "SIGKILL the replicas that route, all agents on the third",
        "no request through another replica fails",
        false,
    ),
    row(
        "S04",
        "SIGKILL of the owner in each phase that both ends can see: mid-request, after start, mid-response, before the end (before start: simulation and museum)",
        "each ends as unknown within 2 s; no truncated end is clean",
        false,
    ),
    row("S05", "SIGKILL two of three replicas", "the last one serves; T_failover", false),
    row("S06", "SIGKILL all replicas, staggered restart", "agents return; no state on disk is needed", false),
    row("S07", "one replica is killed every 2 s", "versions do not go back, nothing is resurrected", false),
    row(
        "S08",
        "SIGSTOP for 0.5, 5 and 60 s (quick: 0.5 and 5 s)",
        "0.5 s: no death; else back within 1 s; no stale route",
        true,
    ),
    row(
        "S09",
        "20 rolling restarts (--restarts; quick: 1) of all replicas under load with streams, watches and upgraded connections, two connections per agent",
        "0 failed requests, T_drain, watches end in order, upgraded connections live to their grace",
        true,
    ),
    row(
        "S09G",
        "one restart with the default grace of 10 minutes under upgraded connections",
        "as S09; the exit waits for the grace",
        false,
    ),
    row("S10", "one pair of replicas is cut, both see the third", "no false death, T_heal", true),
    row(
        "S11",
        "one replica is isolated from the others, not from agents and clients",
        "both sides serve, T_heal",
        true,
    ),
    row(
        "S12",
        "one replica hears no UDP, then nothing, and the others hear it",
        "it stays ready and serves its agents; no false death; T_heal",
        false,
    ),
    row("S13", "five replicas split 3/2, agents move meanwhile", "T_heal", false),
    row("S14", "a link that is down and up each second", "T_heal", false),
    row("S15", "a ring of four replicas", "no false death, T_heal", false),
    row("S16", "a replica joins during a partition", "T_heal", false),
    row("S17", "two groups that only one replica sees", "no false death, T_heal", false),
    row(
        "S18",
        "UDP: 30 % lost, 20 % twice, 200 ± 100 ms late and out of order",
        "no false death, all requests succeed, T_unblock_remote",
        false,
    ),
    row("S19", "all UDP dropped, TCP passes", "no false death, all requests succeed", true),
    row(
        "S20",
        "UDP packets above 1,400 bytes and fragments dropped, a replica restarts",
        "no replica sends one; no false death, T_heal",
        false,
    ),
    row(
        "S21",
        "TCP: 100 ± 20 ms late and out of order; 1 Mbit/s; reset at random; segments of 60 bytes",
        "no request fails but while connections are reset, bytes are equal, T_heal",
        false,
    ),
    row(
        "S22",
        "agents whose packets are all dropped, without FIN",
        "T_halfopen; other agents are served",
        true,
    ),
    not_here(
        "S23",
        "discovery fails, or answers with another cluster",
        "crate discovery has the contract; tests/tests/cluster/join.rs joins by it",
    ),
    not_here(
        "S24",
        "balancers that close idle connections",
        "tests/tests/proxies runs HAProxy, nginx and Envoy",
    ),
    row(
        "S25",
        "requests wait for absent agents, then the agents connect",
        "T_unblock_local, T_unblock_remote; each is released once",
        true,
    ),
    row(
        "S26",
        "10,000 requests wait for an absent agent, half are cancelled, the agent connects",
        "the others run once; 32 KiB each; memory and descriptors return to within 5 %",
        false,
    ),
    row("S27", "agents that disconnect and connect again all the time", "no lost registration", false),
    row(
        "S28",
        "an agent moves from replica to replica and back within one gossip interval",
        "T_prop, T_heal",
        false,
    ),
    row(
        "S29",
        "agents on all replicas; replicas are killed one by one",
        "failures are unknown only, until the last one",
        false,
    ),
    row(
        "S30",
        "elastic: every 10 s a random replica is stopped, killed or started",
        "equal views after each step; sizes of the replica that stays are back within 5 %",
        false,
    ),
    row(
        "S31",
        "reconnect storm: 300 agents of a killed replica (two cores have no room for 10,000)",
        "T_storm",
        false,
    ),
    not_here("S32", "cold join with 100,000 entries", "cargo xtask bench cluster measures T_join"),
    row(
        "S33",
        "a replica that hears 1 KB/s of TCP, while agents come and go",
        "requests through the others succeed, sizes return to within 5 %, T_heal",
        false,
    ),
    not_here("S34", "slow agent (slow clients: S60)", "tests/tests/fidelity.rs"),
    row(
        "S35",
        "the wall clock of one replica is an hour off, jumps, and goes back between two processes",
        "no false death, no request fails, tokens by its clock only, T_heal",
        false,
    ),
    row("S36", "two builds side by side (--other-programs)", "full function, rolling restart", false),
    row(
        "S37",
        "rolling upgrade of all to another build (--other-programs), then the downgrade",
        "0 failed requests, watches end in order",
        false,
    ),
    row(
        "S38",
        "full disk of the audit log, no descriptors, little memory, none at all",
        "open connections are served, refusals in words, sizes return to within 5 %, T_recover",
        false,
    ),
    row(
        "S39",
        "CPU starvation: four busy processes per core, then a fifth of a core for one replica",
        "no false death, no request fails with the latter",
        false,
    ),
    not_here("S40", "GitLab is down for 10 minutes", "tests/tests/gitlab.rs"),
    not_here(
        "S41",
        "Redis is down, slow, flushed, failed over",
        "crate redis-tracker's contract tests with a real Redis; tests/tests/cluster/shared.rs",
    ),
    not_here("S42", "an agent's token is revoked", "tests/tests/cluster/credentials.rs"),
    not_here("S43", "secrets are rotated under load", "tests/tests/cluster/credentials.rs"),
    row(
        "S44",
        "forged, changed and old datagrams, also of a replica that was killed and restarted",
        "they are dropped, no false death, no resurrection, sizes return to within 5 %",
        false,
    ),
    row(
        "S45",
        "a replica without the secret, and an agent without a token (certificates: tests/tests/cluster/mtls.rs)",
        "nobody takes it for a replica, its agents are nowhere else",
        false,
    ),
    row(
        "S46",
        "1,000 connections abuse HTTP/2 on every listener",
        "no request fails, p99 beside that before, sizes return to within 5 %",
        false,
    ),
    not_here("S47", "header smuggling, paths", "tests/tests/hostile, kube-request"),
    row(
        "S48",
        "soak: random faults for --minutes (default: 60) with 2,000 agents (quick: 200)",
        "no slope of memory, descriptors and tasks above 1 % an hour",
        false,
    ),
    row(
        "S57",
        "SIGKILL of the replica that clients watch and exec through",
        "other requests succeed; bytes are equal",
        false,
    ),
    row(
        "S58",
        "the replica that holds the agents drains under upgraded connections",
        "exit within the grace, bytes are equal",
        false,
    ),
    not_here("S59", "GitLab and issuers are away for callers", "tests/tests/oidc.rs, crate callers"),
    row(
        "S60",
        "60 clients follow logs without an end and read slowly, or nothing",
        "512 KiB each, no other request fails, sizes return to within 5 %",
        false,
    ),
];

/// Returns the scenario with this id.
pub(crate) fn find(id: &str) -> Result<&'static Scenario> {
    match ALL.iter().find(|scenario| scenario.id.eq_ignore_ascii_case(id)) {
        Some(scenario) => Ok(scenario),
        None => bail!("there is no scenario {id}; --list shows all"),
    }
}

/// Returns what this machine lacks for a scenario.
pub(crate) fn missing(id: &str) -> Option<String> {
    let program = |name: &str, package: &str| {
        let there = testkit::process::find(name).is_some();
        (!there).then(|| format!("{name} is not installed: on Debian, apt-get install {package}"))
    };
    match id {
        "S33" => program("tc", "iproute2"),
        "S18" | "S44" => program("iptables", "iptables"),
        "S21" => program("iptables", "iptables").or_else(|| program("tc", "iproute2")),
        "S35" => faults::clock::library()
            .is_none()
            .then(|| "libfaketime is not installed: on Debian, apt-get install faketime".to_owned()),
        "S38" | "S39" => faults::resources::missing(),
        _ => None,
    }
}

/// A drain with another grace for upgraded connections, in seconds.
fn grace(seconds: u64) -> Drain {
    Drain { grace: Duration::from_secs(seconds), ..Drain::default() }
}
}

/// Returns how a scenario is set up.
pub(crate) fn setup(id: &str, quick: bool) -> Setup {
    let setup = Setup::default();
    match id {
        "S02" => Setup { agents: 48, double: 24, connections: 1, ..setup },
        "S03" => Setup { connections: 1, only: Some(0), ..setup },
        "S01" | "S05" | "S57" => Setup { connections: 1, ..setup },
        "S04" => Setup { connections: 1, only: Some(phases::OWNER), ..setup },
        "S09" | "S58" | "S36" if !quick => Setup { drain: grace(10), ..setup },
        "S09G" => Setup { drain: grace(600), ..setup },
        "S18" => Setup { more_agents: 40, ..setup },
        "S20" => Setup { replicas: 5, ..setup },
        "S26" | "S28" | "S45" => Setup { more_agents: 1, ..setup },
        "S37" => Setup { one_build: true, drain: grace(if quick { 3 } else { 10 }), ..setup },
        "S33" => Setup { connections: 1, only: Some(0), more_agents: 60, ..setup },
        "S35" => Setup { clock: Some(clock::STEPPED), ..setup },
        "S38" => Setup {
            more_agents: 1,
            audits: false,
            audit_disk: Some(512),
            config: json!({ "limits": { "waiters_per_agent": limits::WAITERS, "waiters": 4 * limits::WAITERS } }),
            ..setup
        },
        "S13" => Setup { replicas: 5, ..setup },
        "S30" => Setup { replicas: 4, pinned: 12, ..setup },
        "S48" if quick => Setup { replicas: 4, agents: 200, pinned: 100, ..setup },
        "S48" => Setup { replicas: 4, agents: 2_000, pinned: 1_000, ..setup },
        "S14" | "S15" | "S17" => Setup { replicas: 4, ..setup },
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
        "S02" => kills::killed_under_load(run).await,
        "S03" => process::router_killed(run).await,
        "S04" => phases::in_each_phase(run).await,
        "S05" => process::two_killed(run).await,
        "S06" => process::all_killed(run).await,
        "S07" => process::crash_loop(run).await,
        "S08" => process::paused(run).await,
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
        "S22" => network::half_open(run).await,
        "S25" => registry::waiters(run).await,
        "S26" => limits::waiter_storm(run).await,
        "S27" => registry::churn(run).await,
        "S28" => registry::moves(run).await,
        "S29" => process::one_by_one(run).await,
        "S30" => soak::elastic(run).await,
        "S31" => soak::storm(run).await,
        "S33" => packets::slow_peer(run).await,
        "S35" => clock::stepped(run).await,
        "S37" => upgrade::and_back(run).await,
        "S38" => limits::exhausted(run).await,
        "S39" => {
            process::starved(run).await?;
            limits::throttled(run).await
        }
        "S44" => packets::poisoned(run).await,
        "S45" => strangers::without_secret(run).await,
        "S46" => limits::abused(run).await,
        "S48" => soak::soak(run).await,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_in_order() {
        assert!(ALL.windows(2).all(|pair| pair[0].id < pair[1].id));
    }

    #[test]
    fn each_says_what_it_asserts_or_why_it_does_not_run() {
        for scenario in ALL {
            assert_eq!(scenario.elsewhere.is_some(), scenario.asserted.is_empty(), "{}", scenario.id);
            assert!(!(scenario.quick && scenario.elsewhere.is_some()), "{}", scenario.id);
        }
        assert!(find("s02").is_ok() && find("S99").is_err());
    }
}
