//! `cargo xtask bench cluster`: measures several replicas: how soon they know of agents, and what happens
//! when a replica joins, leaves, is killed or becomes unreachable.
//!
//! Replicas and agentk are processes of the release profile. Idle agents, callers, the load balancer and the
//! owners of large tables run in this process. Measurements that drop packets run in network namespaces.

mod api;
mod balancer;
mod deployment;
mod failover;
mod large_tables;
mod latency;
mod network;
mod owner;
mod rolling;
mod scale;
pub(super) mod tracker;

use std::fmt::Write as _;

use anyhow::{anyhow, bail};

use self::{
    deployment::{Deployment, Options},
    latency::{Hops, per_second},
    network::Network,
};
use crate::{
    environment::Environment,
    only,
    report::{self, Output, Values, median, short},
    runtime,
    times::{self, Times},
};

#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    /// Number of rounds that compare calls through two replicas with direct calls; the other parts have their
    /// own counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure how traffic and memory grow with replicas and agents instead, for docs/scale.md
    #[arg(long, conflicts_with_all = ["only", "json", "markdown"])]
    scale: bool,
    /// Measure only these keys, by name or by the first words of a name: `t_kill`, `t`, `two_hop`
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    only: Vec<String>,
    #[command(flatten)]
    output: Output,
}

/// The results.
#[derive(Default)]
struct Report {
    values: Values,
    rows: Vec<(String, Times, &'static str)>,
    hops: Vec<Hops>,
    notes: Vec<String>,
    missing: Vec<String>,
}

impl Report {
    /// Adds a row of times, whose 99th percentile is the value of `key`.
    fn times(&mut self, key: &'static str, name: &str, times: Times, how: &'static str) {
        if let Some(p99) = times.at(0.99) {
            self.values.insert(key, p99);
        }
        self.row(name, times, how);
    }

    fn row(&mut self, name: &str, times: Times, how: &'static str) {
        self.rows.push((name.to_owned(), times, how));
    }

    fn tables(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("writing to a string does not fail");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        if !self.rows.is_empty() {
            let rows = self.rows.iter().map(|(name, times, how)| (&**name, times, *how));
            writeln!(out, "### Times\n\n{}", times::table(rows))?;
        }
        if !self.hops.is_empty() {
            writeln!(
                out,
                "### A second replica in the path\n\n100 B, 64 callers, 4 connections; medians of {} rounds.\n",
                self.hops.len()
            )?;
            writeln!(out, "| path | req/s | ratio to direct | p50 / p99 µs |\n| --- | --- | --- | --- |")?;
            type Select = fn(&Hops) -> &crate::protocol::Loaded;
            let paths: [(&str, Select); 3] = [
                ("direct", |hops| &hops.direct),
                ("through the replica that holds the agent", |hops| &hops.one),
                ("through another replica", |hops| &hops.two),
            ];
            for (name, select) in paths {
                let of = |value: &dyn Fn(&Hops) -> f64| {
                    short(median(self.hops.iter().map(value)).unwrap_or(f64::NAN))
                };
                writeln!(
                    out,
                    "| {name} | {} | {} | {} / {} |",
                    of(&|hops| per_second(select(hops))),
                    of(&|hops| per_second(select(hops)) / per_second(&hops.direct)),
                    of(&|hops| select(hops).p50_us),
                    of(&|hops| select(hops).p99_us),
                )?;
            }
            writeln!(out)?;
        }
        for note in &self.notes {
            writeln!(out, "{note}\n")?;
        }
        for missing in &self.missing {
            writeln!(out, "Not measured: {missing}\n")?;
        }
        Ok(())
    }
}

pub(super) fn run(args: &ClusterArgs) -> anyhow::Result<()> {
    let keys: Vec<_> = PARTS.iter().flat_map(|(_, _, keys)| keys.iter().copied()).collect();
    only::check(&args.only, "key", &keys)?;
    let tokio = runtime()?;
    let environment = Environment::new()?;
    if args.scale {
        return tokio.block_on(scale(&environment, args.output.write_docs));
    }
    let report = tokio.block_on(measure(args, &environment));
    report::finish(&report.values, &report.tables(), "cluster", &command_line(args), &args.output)?;
    if !report.missing.is_empty() {
        bail!("incomplete: {}", report.missing.join("; "));
    }
    Ok(())
}

/// A group of measurements with one set-up.
#[derive(Clone, Copy)]
enum Part {
    Speed,
    Hops,
    Gossip,
    Kills,
    Blackholes,
    Join,
    Memory,
    Rolling,
}

const PARTS: [(Part, &str, &[&str]); 8] = [
    (
        Part::Speed,
        "agents that connect to another replica than the one that receives the call",
        &["t_prop_p99_ms", "t_unblock_remote_p99_ms"],
    ),
    (
        Part::Kills,
        "replicas that are killed",
        &["t_kill_p99_ms", "t_purge_p99_ms", "t_failover_p99_ms", "t_failover_2c_p99_ms"],
    ),
    (Part::Rolling, "rolling restarts under load", &["rolling_failed"]),
    (Part::Hops, "calls through two replicas", &["two_hop_c64_ratio"]),
    (Part::Gossip, "agents that connect while all table streams are cut", &["t_prop_gossip_p99_ms"]),
    (Part::Blackholes, "replicas whose packets are dropped", &["t_blackhole_p99_ms"]),
    (Part::Join, "a replica that joins a cluster with 100,000 agents", &["t_join_100k_ms"]),
    (Part::Memory, "memory of 1,000,000 entries", &["mb_per_replica_1m_entries"]),
];

async fn measure(args: &ClusterArgs, environment: &Environment) -> Report {
    let begin = tokio::time::Instant::now();
    let mut report = Report::default();
    for (part, title, keys) in PARTS {
        if !only::wants(&args.only, keys) {
            continue;
        }
        eprintln!("[{:>4.0} s] {title}", begin.elapsed().as_secs_f64());
        let missing = match part {
            Part::Gossip | Part::Blackholes => Network::missing(),
            _ => None,
        };
        let result = match missing {
            Some(why) => Err(anyhow!(why)),
            None => Box::pin(report.measure(part, args, environment)).await,
        };
        if let Err(error) = result {
            // The other measurements are still useful.
            eprintln!("{title}: {error:#}");
            let first = format!("{error:#}").lines().next().unwrap_or_default().to_owned();
            report.missing.push(format!("{}: {first}", keys.join(", ")));
        }
    }
    report
}

impl Report {
    async fn measure(
        &mut self,
        part: Part,
        args: &ClusterArgs,
        environment: &Environment,
    ) -> anyhow::Result<()> {
        match part {
            Part::Speed => {
                let deployment =
                    Deployment::new(environment, "latency", 3, Options::default())?.start().await?;
                let times = latency::propagation(&deployment, 200).await?;
                let how = "the first tunnel is accepted; calls that wait on both other replicas have arrived in tunnels";
                self.times(
                    "t_prop_p99_ms",
                    "agent registered → routable from both other replicas",
                    times,
                    how,
                );
                let times = latency::unblocking(&deployment, 200).await?;
                let how = "the agent starts to connect; the call that waits on another replica has arrived in its tunnel";
                self.times(
                    "t_unblock_remote_p99_ms",
                    "agent connects elsewhere → waiting call starts",
                    times,
                    how,
                );
            }
            Part::Hops => {
                self.hops = latency::hops(environment, args.rounds).await?;
                let ratio = |hops: &Hops| per_second(&hops.two) / per_second(&hops.direct);
                let ratio = median(self.hops.iter().map(ratio));
                self.values.extend(ratio.map(|value| ("two_hop_c64_ratio", value)));
            }
            Part::Gossip => {
                let deployment = Deployment::apart(environment, "gossip", 3)?.start().await?;
                let times = latency::gossip_only(&deployment, 100).await?;
                let how = "the first tunnel is accepted; ExplainAgent of both other replicas, every 10 ms, names its replica";
                self.times(
                    "t_prop_gossip_p99_ms",
                    "the same by gossip only, TCP between replicas dropped",
                    times,
                    how,
                );
            }
            Part::Kills => {
                let kills = failover::kills(environment, 20).await?;
                let how = "SIGKILL; ListReplicas of both other replicas, every 5 ms, has it neither live nor suspect";
                self.times("t_kill_p99_ms", "killed → no longer routed to", kills.unrouted, how);
                let how = "the same; it is suspect, or neither live nor suspect";
                self.row("killed → last choice for requests", kills.suspected, how);
                let how = "SIGKILL; the lists of both other replicas are complete without its agent";
                self.times("t_purge_p99_ms", "killed → gone from the lists", kills.purged, how);
                let how = "SIGKILL; first response, through another replica, of an agentk whose only connection was to it";
                self.times("t_failover_p99_ms", "failover, one connection", kills.failover, how);
                let how = "SIGKILL; first response, through another replica, of an agentk with a second connection elsewhere";
                self.times("t_failover_2c_p99_ms", "failover, two connections", kills.failover_two, how);
                self.notes.push(format!(
                    "{} kills; {} calls failed before the first successful one.",
                    kills.kills, kills.failed
                ));
            }
            Part::Blackholes => {
                let results = failover::blackholes(environment, 12).await?;
                // A suspect replica is used only if no other holds the agent: it may still be connected to
                // it.
                let how = "all packets of a replica are dropped; ListReplicas of both other replicas, every 5 ms, has it suspect: \
                           requests go to it only for agents that no other replica holds";
                self.times(
                    "t_blackhole_p99_ms",
                    "packets dropped → no longer routed to",
                    results.suspected,
                    how,
                );
                self.row(
                    "packets dropped → not used at all",
                    results.unrouted,
                    "the same; no request goes to it",
                );
                let how =
                    "a call every 20 ms for 4 s after the drop, to an agent that another replica holds too";
                self.row("calls during it", results.calls, how);
                self.row(
                    "packets pass again → recovered",
                    results.healed,
                    "the packets pass again; all replicas know each other",
                );
                self.notes.push(format!("{} calls failed while packets were dropped.", results.failed));
            }
            Part::Join => {
                let joins = large_tables::joins(environment, 20, 100_000).await?;
                let how = "the process starts; /readiness is 200 and ListReplicas has all entries";
                self.times("t_join_100k_ms", "join with 100,000 agents", joins.whole, how);
                self.row("… ready", joins.ready, "the process starts; /readiness is 200");
                self.row("… all entries", joins.known, "the process starts; ListReplicas has all entries");
            }
            Part::Memory => {
                let mut growth = Vec::new();
                for _ in 0..3 {
                    let memory = large_tables::memory(environment, 1_000_000).await?;
                    growth.push(memory.after - memory.before);
                    self.notes.push(format!(
                        "Resident memory of a replica that copies 1,000,000 entries of five owners: {} MB before, \
                         {} MB after, {} MB peak.",
                        short(memory.before),
                        short(memory.after),
                        short(memory.peak)
                    ));
                }
                self.values.extend(median(growth).map(|mb| ("mb_per_replica_1m_entries", mb)));
            }
            Part::Rolling => {
                let restarts = rolling::restarts(environment, 20).await?;
                self.values.insert("rolling_failed", restarts.failed as f64);
                self.notes.push(format!(
                    "Rolling restarts: {} (drain.delay {}, the default is 5s), {} calls at 200/s, {} failed.{}",
                    restarts.restarts,
                    rolling::DRAIN_DELAY,
                    restarts.calls,
                    restarts.failed,
                    restarts.why.iter().fold(String::new(), |text, why| text + "\n- " + why)
                ));
                self.row("calls during rolling restarts", restarts.times, "call; response");
                self.row("… leaving", restarts.leaving, "SIGTERM; the process has exited");
                self.row("… joining", restarts.joining, "the process starts; all replicas know each other");
            }
        }
        Ok(())
    }
}

/// Writes docs/scale.md.
async fn scale(environment: &Environment, write: bool) -> anyhow::Result<()> {
    let begin = tokio::time::Instant::now();
    let progress = |what: &str| eprintln!("[{:>4.0} s] {what}", begin.elapsed().as_secs_f64());
    let scale = scale::measure(environment, progress).await?;
    let head = report::origin("cargo xtask bench cluster --scale --write-docs")?;
    let text = format!("{SCALE}\n{head}\n{}", scale.text());
    println!("{text}");
    if write {
        std::fs::write(devkit::workspace::root().join("docs/scale.md"), text)?;
    }
    Ok(())
}

const SCALE: &str = "\
# Traffic between replicas

For planning a cluster that is larger than those that were measured. Written by
`cargo xtask bench cluster --scale --write-docs`; do not edit.
";

/// Returns the command line that repeats the benchmark.
fn command_line(args: &ClusterArgs) -> String {
    format!("cargo xtask bench cluster --rounds {}{}", args.rounds, only::argument(&args.only))
}
