//! The command line, and the processes of the seeds.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::Write as _,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Parser, ValueEnum as _};
use history::{Micros, SECOND};
use serde::Serialize;
use tokio::time::Instant;

use crate::{
    flaw::Flaw,
    simulation::{Options, Simulation, Summary},
};

/// Tells a process that it simulates, and its entropy; see `process.c`.
const SEED: &str = "KAS_SIM_SEED";
/// An option of xtask, which starts this program.
const RELEASE: &str = "With --release, it is built with the release profile: several times as fast";
/// How many failing seeds are described.
const DESCRIBED: usize = 5;
/// How many of the breaches of one seed are printed.
const PRINTED: usize = 12;

/// Simulates replicas with agents, and checks what happened
#[derive(Clone, Debug, Parser)]
#[command(name = "cargo xtask sim", max_term_width = 110, after_help = RELEASE)]
pub(crate) struct Cli {
    /// How many seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Replicas: a number, or a range from which each seed takes one
    #[arg(long, default_value = "3-5", value_parser = range)]
    replicas: RangeInclusive<u64>,
    /// Agents: a number, or a range from which each seed takes one
    #[arg(long, default_value = "20-50", value_parser = range)]
    agents: RangeInclusive<u64>,
    /// Minutes with faults; the time before and after them is added
    #[arg(long, default_value_t = 0.5, value_parser = minutes)]
    minutes: f64,
    /// Requests in a second
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    rate: u64,
    /// Begin further seeds until this many seconds have passed
    #[arg(long, default_value_t = 0)]
    within: u64,
    /// Seeds that run at the same time; default: one for each core
    #[arg(long)]
    jobs: Option<usize>,
    /// Break a rule, to see that it is found
    #[arg(long)]
    flaw: Option<Flaw>,
    /// Print what happens, and the log; RUST_LOG sets its level
    #[arg(long)]
    trace: bool,
    /// Keep the sums and the seeds that failed in this folder, for the report of `cargo xtask chaos`
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Write the history of the seed to this file, as lines of JSON
    #[arg(long)]
    history: Option<PathBuf>,
}

fn range(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|error| error.to_string());
    let range = match text.split_once('-') {
        Some((from, to)) => number(from)?..=number(to)?,
        None => number(text)?..=number(text)?,
    };
    let is_valid = !range.is_empty() && *range.start() >= 2 && *range.end() <= 10_000;
    if is_valid { Ok(range) } else { Err("expected a number from 2, or two like 3-5".to_owned()) }
}

fn minutes(text: &str) -> Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.05..=60.0).contains(&minutes) { Ok(minutes) } else { Err("expected 0.05 to 60".to_owned()) }
}

/// Takes one of the range by the seed.
fn one(range: &RangeInclusive<u64>, seed: u64) -> u64 {
    let mixed = (seed ^ 0x5eed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    range.start() + mixed % (range.end() - range.start() + 1)
}

/// Runs what the command line says.
pub(crate) fn run(cli: &Cli) -> Result<ExitCode> {
    if std::env::var_os(SEED).is_some() {
        return simulate(cli);
    }
    let began = Instant::now();
    let next = AtomicU64::new(cli.seed);
    let last = cli.seed.saturating_add(cli.seeds);
    let summaries = Mutex::new(Vec::new());
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let jobs = cli.jobs.unwrap_or_else(cores).max(1);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let goes_on = seed < last || began.elapsed() < Duration::from_secs(cli.within);
                    if !goes_on {
                        break;
                    }
                    let summary = child(cli, seed);
                    summaries.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((seed, summary));
                }
            });
        }
    });
    let mut summaries = summaries.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    summaries.sort_by_key(|(seed, _)| *seed);
    report(cli, &summaries, began.elapsed())
}

/// Runs one seed in a process of its own.
fn child(cli: &Cli, seed: u64) -> Result<Summary> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(SEED, seed.to_string()).args(arguments(cli, seed)).stdin(Stdio::null());
    if cli.trace {
        command.arg("--trace").stderr(Stdio::inherit());
    }
    if let Some(path) = &cli.history {
        command.arg("--history").arg(path);
    }
    let output = command.stdout(Stdio::piped()).output().context("cannot start a simulation")?;
    if !output.status.success() {
        bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("the simulation printed no summary")
}

/// Returns the arguments that repeat a seed.
fn arguments(cli: &Cli, seed: u64) -> Vec<String> {
    let [replicas, agents] = [&cli.replicas, &cli.agents].map(|range| one(range, seed).to_string());
    let mut arguments = vec!["--seed".to_owned(), seed.to_string()];
    for (key, value) in [("--replicas", replicas), ("--agents", agents)] {
        arguments.extend([key.to_owned(), value]);
    }
    for (key, value) in [("--minutes", cli.minutes.to_string()), ("--rate", cli.rate.to_string())] {
        arguments.extend([key.to_owned(), value]);
    }
    if let Some(flaw) = cli.flaw.and_then(|flaw| flaw.to_possible_value()) {
        arguments.extend(["--flaw".to_owned(), flaw.get_name().to_owned()]);
    }
    arguments
}

/// Simulates one seed in this process, and prints the summary.
fn simulate(cli: &Cli) -> Result<ExitCode> {
    // The hash maps of a thread take their first seed from the entropy, and count from there. The simulation
    // has a thread of its own, so that a trace does not count, and the seed of this thread comes before it.
    let _ = std::hash::RandomState::new();
    if cli.trace {
        let filter = tracing_subscriber::EnvFilter::try_from_default_env()
            .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
    }
    let options = Options {
        seed: cli.seed,
        faults: (cli.minutes * 60.0) as Micros * SECOND,
        replicas: usize::try_from(one(&cli.replicas, cli.seed))?,
        agents: usize::try_from(one(&cli.agents, cli.seed))?,
        rate: cli.rate,
        flaw: cli.flaw,
        trace: cli.trace,
    };
    let simulation = thread::spawn(move || Simulation::new(options)?.run());
    let (summary, history) = simulation.join().map_err(|_| anyhow!("the simulation panicked"))??;
    if let Some(path) = &cli.history {
        let mut file = std::fs::File::create(path)
            .map(std::io::BufWriter::new)
            .with_context(|| format!("cannot write {}", path.display()))?;
        history::write(&history, &mut file).map_err(|error| anyhow!("cannot write the history: {error}"))?;
        file.flush()?;
    }
    println!("{}", serde_json::to_string(&summary)?);
    Ok(ExitCode::SUCCESS)
}

/// Adds up counts.
fn add(sums: &mut BTreeMap<String, u64>, counts: &BTreeMap<String, u64>) {
    for (name, count) in counts {
        *sums.entry(name.clone()).or_default() += count;
    }
}

fn words(counts: &BTreeMap<String, u64>) -> String {
    let words: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    words.join(", ")
}

/// What is kept of a run of many seeds. The program `chaos` reads it.
#[derive(Debug, Serialize)]
struct Kept<'a> {
    /// Seconds since 1970: only shown, and for the order of runs.
    started: u64,
    commit: &'a str,
    command: String,
    /// The first seed. The others follow it.
    first: u64,
    /// The options of the command that say what a seed means. Runs whose seeds follow each other, and that
    /// agree in the commit and in this, are parts of one.
    options: String,
    seeds: usize,
    failed: Vec<u64>,
    /// Simulated seconds.
    simulated: u64,
    faults: u64,
    requests: u64,
    /// Of real time.
    seconds: u64,
}

impl Kept<'_> {
    fn save(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join(format!("simulation-{}-{}.json", self.started, self.first));
        std::fs::write(&path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The options that say what a seed means, as far as they are not the usual ones. Each begins with a space.
fn options(cli: &Cli) -> String {
    let mut words = String::new();
    let default = Cli::parse_from(["sim"]);
    let mut differs = |name: &str, value: String, usual: String| {
        if value != usual {
            words.extend([" --", name, " ", &value]);
        }
    };
    let range = |range: &RangeInclusive<u64>| match (range.start(), range.end()) {
        (from, to) if from == to => from.to_string(),
        (from, to) => format!("{from}-{to}"),
    };
    let flaw = |flaw: Option<Flaw>| {
        let value = flaw.and_then(|flaw| flaw.to_possible_value());
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    };
    differs("replicas", range(&cli.replicas), range(&default.replicas));
    differs("agents", range(&cli.agents), range(&default.agents));
    differs("minutes", cli.minutes.to_string(), default.minutes.to_string());
    differs("rate", cli.rate.to_string(), default.rate.to_string());
    differs("flaw", flaw(cli.flaw), flaw(default.flaw));
    words
}

/// The command that was given, without where its result is kept.
fn command(cli: &Cli) -> String {
    let mut command = format!("cargo xtask sim --seeds {}", cli.seeds);
    if cli.seed != 1 {
        let _ = write!(command, " --seed {}", cli.seed);
    }
    command.push_str(&options(cli));
    if cli.within != 0 {
        let _ = write!(command, " --within {}", cli.within);
    }
    command
}

/// Prints the sums and the seeds that failed.
fn report(cli: &Cli, summaries: &[(u64, Result<Summary>)], took: Duration) -> Result<ExitCode> {
    let mut sums = Summary::default();
    let mut failed = Vec::new();
    for (seed, summary) in summaries {
        match summary {
            Ok(summary) => {
                sums.micros += summary.micros;
                sums.runs += summary.runs;
                sums.remote += summary.remote;
                sums.views += summary.views;
                sums.datagrams += summary.datagrams;
                sums.datagrams_lost += summary.datagrams_lost;
                sums.connections += summary.connections;
                sums.bytes += summary.bytes;
                add(&mut sums.faults, &summary.faults);
                add(&mut sums.requests, &summary.requests);
                add(&mut sums.checked, &summary.checked);
                if !summary.breaches.is_empty() {
                    failed.push((*seed, summary.breaches.clone()));
                }
            }
            Err(error) => failed.push((*seed, vec![format!("{error:#}")])),
        }
    }
    let mut out = std::io::stdout().lock();
    for (seed, breaches) in failed.iter().take(DESCRIBED) {
        writeln!(out, "seed {seed} failed:")?;
        for breach in breaches.iter().take(PRINTED) {
            writeln!(out, "  {breach}")?;
        }
        if breaches.len() > PRINTED {
            writeln!(out, "  and {} more", breaches.len() - PRINTED)?;
        }
        writeln!(out, "  replay: cargo xtask sim {} --trace", arguments(cli, *seed).join(" "))?;
    }
    if failed.len() > DESCRIBED {
        let others: Vec<String> = failed.iter().skip(DESCRIBED).map(|(seed, _)| seed.to_string()).collect();
        writeln!(out, "seeds that failed too: {}", others.join(" "))?;
    }
    let (faults, requests): (u64, u64) = (sums.faults.values().sum(), sums.requests.values().sum());
    let simulated = sums.micros as f64 / SECOND as f64;
    let speed = simulated / took.as_secs_f64().max(0.001);
    writeln!(out, "faults: {}", words(&sums.faults))?;
    writeln!(
        out,
        "requests: {}; run {}, through two replicas {}",
        words(&sums.requests),
        sums.runs,
        sums.remote
    )?;
    writeln!(
        out,
        "network: {} datagrams, {} lost; {} connections, {} bytes",
        sums.datagrams, sums.datagrams_lost, sums.connections, sums.bytes
    )?;
    writeln!(out, "checks: {}", words(&sums.checked))?;
    if let [(seed, Ok(summary))] = summaries {
        writeln!(out, "digest of seed {seed}: {:016x}", summary.digest)?;
    }
    writeln!(
        out,
        "{} seeds, {} failed; {simulated:.0} s simulated, {faults} faults, {requests} requests, in {:.1} s: {:.2} \
         seeds/s, {speed:.0} times real time",
        summaries.len(),
        failed.len(),
        took.as_secs_f64(),
        summaries.len() as f64 / took.as_secs_f64().max(0.001),
    )?;
    if let Some(folder) = &cli.report {
        // Shown to people; nothing is decided by it.
        let started = process::clock::wall().saturating_sub(took).as_secs();
        let kept = Kept {
            started,
            commit: process::version::COMMIT,
            command: command(cli),
            first: cli.seed,
            options: options(cli),
            seeds: summaries.len(),
            failed: failed.iter().map(|(seed, _)| *seed).collect(),
            simulated: sums.micros / SECOND,
            faults,
            requests,
            seconds: took.as_secs(),
        };
        kept.save(folder)?;
    }
    if failed.is_empty() && (sums.micros == 0 || faults == 0 || requests == 0) {
        bail!("nothing was simulated: the time, the faults or the requests are 0");
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_names_what_differs_from_the_defaults() {
        let cli = |arguments: &[&str]| Cli::parse_from([&["sim"][..], arguments].concat());
        assert_eq!(command(&cli(&[])), "cargo xtask sim --seeds 1");
        let arguments = ["--seeds", "100", "--replicas", "7", "--agents", "100-200", "--report", "x"];
        assert_eq!(command(&cli(&arguments)), "cargo xtask sim --seeds 100 --replicas 7 --agents 100-200");
        assert_eq!(options(&cli(&arguments)), " --replicas 7 --agents 100-200");
        let arguments = ["--seed", "501", "--within", "90", "--flaw", "repeat"];
        assert_eq!(
            command(&cli(&arguments)),
            "cargo xtask sim --seeds 1 --seed 501 --flaw repeat --within 90"
        );
        assert_eq!(options(&cli(&arguments)), " --flaw repeat", "parts of one run differ in the rest");
    }
}
