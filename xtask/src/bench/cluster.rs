//! `cargo xtask bench cluster`: what several replicas do for an agent, and how soon, when one of them comes, leaves,
//! is killed or vanishes.
//!
//! Replicas and agentk are processes of the release profile; agents that only have to be there, callers, the load
//! balancer and owners of large tables are this process. What needs packets to be dropped runs in network namespaces.

mod api;
mod loss;
mod owner;
mod rolling;
mod scale;
mod size;
mod speed;
mod stage;
mod times;
pub(super) mod tracker;

use std::fmt::Write as _;

use anyhow::{anyhow, bail, ensure};

use self::{
    speed::{Hops, per_second},
    stage::{Net, Options, Stage},
    times::Times,
};
use super::{
    ClusterArgs,
    path::is_meant,
    processes::{Binaries, Ground},
    report::{self, Values, median, short},
};

/// What has been measured.
#[derive(Default)]
struct Report {
    values: Values,
    rows: Vec<(String, Times, &'static str)>,
    hops: Vec<Hops>,
    notes: Vec<String>,
    missing: Vec<String>,
}

impl Report {
    /// Adds times, whose 99th percentile is the value of `key`.
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
            writeln!(out, "### Times\n\nMilliseconds.\n")?;
            writeln!(out, "| | N | p50 | p99 | max | from, to |\n| --- | --- | --- | --- | --- | --- |")?;
            for (name, times, how) in &self.rows {
                writeln!(out, "| {name} | {} | {how} |", times.cells())?;
            }
            writeln!(out)?;
        }
        if !self.hops.is_empty() {
            writeln!(
                out,
                "### A second replica on the way\n\n100 B, 64 callers, 4 connections; medians of {} rounds.\n",
                self.hops.len()
            )?;
            writeln!(out, "| way | req/s | ratio to direct | p50 / p99 µs |\n| --- | --- | --- | --- |")?;
            type Way = fn(&Hops) -> &super::orders::Loaded;
            let ways: [(&str, Way); 3] = [
                ("direct", |hops| &hops.direct),
                ("through the replica that holds the agent", |hops| &hops.one),
                ("through another replica", |hops| &hops.two),
            ];
            for (name, way) in ways {
                let of = |value: &dyn Fn(&Hops) -> f64| {
                    short(median(self.hops.iter().map(value)).unwrap_or(f64::NAN))
                };
                writeln!(
                    out,
                    "| {name} | {} | {} | {} / {} |",
                    of(&|hops| per_second(way(hops))),
                    of(&|hops| per_second(way(hops)) / per_second(&hops.direct)),
                    of(&|hops| way(hops).p50_us),
                    of(&|hops| way(hops).p99_us),
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
    runtime::tls::install();
    runtime::io::raise_file_limit();
    let keys: Vec<_> = PARTS.iter().flat_map(|(_, _, keys)| keys.iter().copied()).collect();
    for only in &args.only {
        ensure!(
            keys.iter().any(|key| is_meant(key, only)),
            "--only {only}: there is no such key; there are {}",
            keys.join(", ")
        );
    }
    let ground = Ground::new(Binaries::build(args.output.no_build)?)?;
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if args.scale {
        return tokio.block_on(scale(&ground, args.output.write_docs));
    }
    let report = tokio.block_on(measure(args, &ground));
    report::finish(&report.values, &report.tables(), "cluster", &command_line(args), &args.output)?;
    if !report.missing.is_empty() {
        bail!("incomplete: {}", report.missing.join("; "));
    }
    Ok(())
}

/// What is measured together, and the keys that come of it.
#[derive(Clone, Copy)]
enum Part {
    Speed,
    Hops,
    Gossip,
    Kills,
    Holes,
    Join,
    Memory,
    Rolling,
}

const PARTS: [(Part, &str, &[&str]); 8] = [
    (
        Part::Speed,
        "agents that connect to another replica than the one that is asked",
        &["t_prop_p99_ms", "t_unblock_remote_p99_ms"],
    ),
    (
        Part::Kills,
        "replicas are killed",
        &["t_kill_p99_ms", "t_purge_p99_ms", "t_failover_p99_ms", "t_failover_2c_p99_ms"],
    ),
    (Part::Rolling, "rolling restarts under load", &["rolling_failed"]),
    (Part::Hops, "calls through two replicas", &["two_hop_c64_ratio"]),
    (Part::Gossip, "agents that connect while all table streams are cut", &["t_prop_gossip_p99_ms"]),
    (Part::Holes, "replicas vanish: packets are dropped", &["t_blackhole_p99_ms"]),
    (Part::Join, "a replica joins where 100,000 agents are", &["t_join_100k_ms"]),
    (Part::Memory, "memory of 1,000,000 entries", &["mb_per_replica_1m_entries"]),
];

async fn measure(args: &ClusterArgs, ground: &Ground) -> Report {
    let begin = tokio::time::Instant::now();
    let mut report = Report::default();
    for (part, title, keys) in PARTS {
        if !args.only.is_empty() && !args.only.iter().any(|only| keys.iter().any(|key| is_meant(key, only))) {
            continue;
        }
        eprintln!("[{:>4.0} s] {title}", begin.elapsed().as_secs_f64());
        let missing = match part {
            Part::Gossip | Part::Holes => Net::missing(),
            _ => None,
        };
        let result = match missing {
            Some(why) => Err(anyhow!(why)),
            None => Box::pin(report.measure(part, args, ground)).await,
        };
        if let Err(error) = result {
            // The others are worth having all the same.
            eprintln!("{title}: {error:#}");
            let first = format!("{error:#}").lines().next().unwrap_or_default().to_owned();
            report.missing.push(format!("{}: {first}", keys.join(", ")));
        }
    }
    report
}

impl Report {
    async fn measure(&mut self, part: Part, args: &ClusterArgs, ground: &Ground) -> anyhow::Result<()> {
        match part {
            Part::Speed => {
                let stage = Stage::new(ground, "speed", 3, Options::default())?.start().await?;
                let times = speed::propagation(&stage, 200).await?;
                let how =
                    "the first tunnel is accepted; calls that wait on both others have arrived in tunnels";
                self.times("t_prop_p99_ms", "agent registered → routable from both others", times, how);
                let times = speed::unblocking(&stage, 200).await?;
                let how = "the agent begins to dial; the call that waits on another replica has arrived in its tunnel";
                self.times(
                    "t_unblock_remote_p99_ms",
                    "agent connects elsewhere → waiting call starts",
                    times,
                    how,
                );
            }
            Part::Hops => {
                self.hops = speed::hops(ground, args.rounds).await?;
                let ratio = |hops: &Hops| per_second(&hops.two) / per_second(&hops.direct);
                let ratio = median(self.hops.iter().map(ratio));
                self.values.extend(ratio.map(|value| ("two_hop_c64_ratio", value)));
            }
            Part::Gossip => {
                let stage = Stage::apart(ground, "gossip", 3)?.start().await?;
                let times = speed::gossip_only(&stage, 100).await?;
                let how = "the first tunnel is accepted; ExplainAgent of both others, every 10 ms, names the holder";
                self.times(
                    "t_prop_gossip_p99_ms",
                    "the same by gossip alone, TCP between replicas dropped",
                    times,
                    how,
                );
            }
            Part::Kills => {
                let kills = loss::kills(ground, 20).await?;
                let how =
                    "SIGKILL; ListReplicas of both survivors, every 5 ms, has it neither live nor suspect";
                self.times("t_kill_p99_ms", "killed → no longer routed to", kills.unrouted, how);
                let how = "the same; it is suspect or less";
                self.row("killed → asked only last", kills.suspected, how);
                let how = "SIGKILL; lists of both survivors are without its agent and complete";
                self.times("t_purge_p99_ms", "killed → gone from the lists", kills.purged, how);
                let how =
                    "SIGKILL; first answer, over a survivor, of an agentk with its only connection there";
                self.times("t_failover_p99_ms", "failover, one connection", kills.failover, how);
                let how =
                    "SIGKILL; first answer, over a survivor, of an agentk with a second connection elsewhere";
                self.times("t_failover_2c_p99_ms", "failover, two connections", kills.failover_two, how);
                self.notes.push(format!(
                    "{} kills; within the failovers {} calls failed before the first success.",
                    kills.kills, kills.failed
                ));
            }
            Part::Holes => {
                let holes = loss::blackholes(ground, 12).await?;
                // Who is suspect is only asked when nobody else can serve: its agents may still be behind it.
                let how = "all packets of a replica are dropped; ListReplicas of both others, every 5 ms, has it suspect: \
                           it is asked only for agents that nobody else holds";
                self.times(
                    "t_blackhole_p99_ms",
                    "packets dropped → no longer routed to",
                    holes.suspected,
                    how,
                );
                self.row(
                    "packets dropped → given up",
                    holes.unrouted,
                    "the same; it is asked for nothing at all",
                );
                let how =
                    "a call every 20 ms for 4 s from the drop on, to an agent that a survivor holds too";
                self.row("calls meanwhile", holes.calls, how);
                self.row(
                    "black hole healed",
                    holes.healed,
                    "the drop ends; all replicas know each other again",
                );
                self.notes.push(format!("Beside black holes {} calls failed.", holes.failed));
            }
            Part::Join => {
                let joins = size::joins(ground, 20, 100_000).await?;
                let how = "the process starts; /readiness is 200 and ListReplicas has all entries";
                self.times("t_join_100k_ms", "join beside 100,000 agents", joins.whole, how);
                self.row("… ready", joins.ready, "the process starts; /readiness is 200");
                self.row("… all entries", joins.known, "the process starts; ListReplicas has all entries");
            }
            Part::Memory => {
                let mut growth = Vec::new();
                for _ in 0..3 {
                    let memory = size::memory(ground, 1_000_000).await?;
                    growth.push(memory.after - memory.before);
                    self.notes.push(format!(
                        "Resident memory of a replica that copies 1,000,000 entries of five owners: {} MB before, \
                         {} MB after, {} MB at most.",
                        short(memory.before),
                        short(memory.after),
                        short(memory.peak)
                    ));
                }
                self.values.extend(median(growth).map(|mb| ("mb_per_replica_1m_entries", mb)));
            }
            Part::Rolling => {
                let rolled = rolling::restarts(ground, 20).await?;
                self.values.insert("rolling_failed", rolled.failed as f64);
                self.notes.push(format!(
                    "Rolling: {} restarts (drain.delay {}, the default is 5s), {} calls at 200/s, {} failed.{}",
                    rolled.restarts,
                    rolling::DRAIN_DELAY,
                    rolled.calls,
                    rolled.failed,
                    rolled.why.iter().fold(String::new(), |text, why| text + "\n- " + why)
                ));
                self.row("calls during rolling restarts", rolled.times, "call; answer");
                self.row("… leaving", rolled.leaving, "SIGTERM; the process has ended");
                self.row("… joining", rolled.joining, "the process starts; all replicas know each other");
            }
        }
        Ok(())
    }
}

/// Writes docs/scale.md.
async fn scale(ground: &Ground, write: bool) -> anyhow::Result<()> {
    let begin = tokio::time::Instant::now();
    let progress = |what: &str| eprintln!("[{:>4.0} s] {what}", begin.elapsed().as_secs_f64());
    let scale = scale::measure(ground, progress).await?;
    let head = report::origin("cargo xtask bench cluster --scale --write-docs")?;
    let text = format!("{SCALE}\n{head}\n{}", scale.text());
    println!("{text}");
    if write {
        std::fs::write(super::processes::root().join("docs/scale.md"), text)?;
    }
    Ok(())
}

const SCALE: &str = "\
# What replicas say to each other, and how much

So that a cluster can be planned that is larger than what was measured. Written by
`cargo xtask bench cluster --scale --write-docs`; do not edit.
";

/// What a person types to repeat it.
fn command_line(args: &ClusterArgs) -> String {
    let mut command = format!("cargo xtask bench cluster --rounds {}", args.rounds);
    if !args.only.is_empty() {
        let _ = write!(command, " --only {}", args.only.join(","));
    }
    command
}
