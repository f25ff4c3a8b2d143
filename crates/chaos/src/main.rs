//! `cargo xtask chaos`: kills, pauses and cuts off real replicas under load, and checks what happened.
//!
//! Replicas run in network namespaces behind a bridge, agents in processes of this program (`chaos swarm`).
//! Everything is recorded in one history, which the crate `history` checks.

mod abuse;
mod auditing;
mod client;
mod clock;
mod cluster_server;
mod faults;
mod frames;
mod hash;
mod judge;
mod load;
mod measure;
mod observer;
mod outsiders;
mod recorder;
mod report;
mod run;
mod scenarios;
mod sizes;
mod slope;
mod swarm;
mod timeline;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use testkit::process::find;

use crate::{
    report::Verdict,
    run::Run,
    scenarios::{ALL, Scenario},
};

const HELP: &str = "\
Exit codes: 0, every scenario passed; 1, one failed; 3, nothing failed, but a scenario that was asked for cannot run here.";

/// Names folders of programs, for the crate `testkit`.
const PROGRAMS: &str = "KAS_PROGRAMS";
/// A scenario could not run.
const SKIPPED: u8 = 3;

/// Kill, pause and cut off real replicas under load, and check that nobody notices
#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask chaos", bin_name = "cargo xtask chaos", max_term_width = 110)]
#[command(after_help = HELP, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    chaos: ChaosArgs,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Run agents; the other commands start this
    #[command(hide = true)]
    Swarm(swarm::SwarmArgs),
    /// Abuse HTTP/2; S46 starts this
    #[command(hide = true)]
    Abuse(abuse::AbuseArgs),
    /// Check a history that was kept
    Check {
        /// A file of JSON lines
        history: PathBuf,
    },
    /// Write the report of all results that are kept, and run nothing
    Report {
        #[command(flatten)]
        output: Output,
    },
}

/// Where results and their report are.
#[derive(Debug, clap::Args)]
struct Output {
    /// Keep the result of each run in this folder, as JSON and a picture, with the histories of runs that
    /// failed, and write chaos.md there from all results in it. Default: target/chaos
    #[arg(long, value_name = "DIR", alias = "out")]
    report: Option<PathBuf>,
    /// Also write that report to docs/chaos.md, and its pictures to docs/images/chaos
    #[arg(long)]
    write_docs: bool,
}

impl Output {
    fn folder(&self) -> PathBuf {
        self.report.clone().unwrap_or_else(|| devkit::workspace::root().join("target/chaos"))
    }

    /// Writes the report of all results in the folder.
    fn write(&self) -> Result<()> {
        let folder = self.folder();
        report::write(&folder, &folder)?;
        if self.write_docs {
            report::write(&folder, &devkit::workspace::root().join("docs"))?;
        }
        Ok(())
    }
}

#[derive(Debug, clap::Args)]
struct ChaosArgs {
    /// List all scenarios
    #[arg(long)]
    list: bool,
    /// Run this scenario; may be given several times. Default: all that can run
    #[arg(long, value_name = "ID")]
    scenario: Vec<String>,
    /// Run the quick set, each scenario in its short form: less than four minutes
    #[arg(long)]
    quick: bool,
    /// Choices of the nemesis. Default: random, and printed
    #[arg(long)]
    seed: Option<u64>,
    /// Also run the slow set: S09G and S48, which take longer than all others
    #[arg(long, conflicts_with = "quick")]
    slow: bool,
    /// How long faults go on in S02 and S30 (default: 10) and S48 (default: 60)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: Option<u64>,
    /// How often all replicas are restarted in turn in S09. Default: 20; in the quick form: 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    restarts: Option<u32>,
    /// Number of replicas, where the scenario allows another one than its own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(3..=7))]
    replicas: Option<u8>,
    #[command(flatten)]
    output: Output,
    /// Use the programs kas and agentk in this folder. Default: that of this program
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
    /// Every second replica runs the programs in this folder: another build
    #[arg(long, value_name = "DIR")]
    other_programs: Option<PathBuf>,
    /// Do not build the programs; read by xtask
    #[arg(long)]
    no_build: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Swarm(arguments)) => swarm::run(&arguments).map(|()| ExitCode::SUCCESS),
        Some(Command::Abuse(arguments)) => abuse::run(&arguments).map(|()| ExitCode::SUCCESS),
        Some(Command::Check { history }) => check(&history),
        Some(Command::Report { output }) => output.write().map(|()| ExitCode::SUCCESS),
        None if arguments.chaos.list => list(),
        None => chaos(&arguments.chaos),
    };
    result.unwrap_or_else(|error: anyhow::Error| {
        // There is nothing left to do when standard error is closed.
        let _ = devkit::report::error(&error);
        ExitCode::FAILURE
    })
}

fn list() -> Result<ExitCode> {
    for Scenario { id, what, asserted, quick, elsewhere } in ALL {
        let quick = if *quick { "quick" } else { "" };
        match elsewhere {
            None => println!("{id}  {quick:<5}  {what}: {asserted}"),
            Some(why) => println!("{id}  -      {what}: does not run here: {why}"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(path: &Path) -> Result<ExitCode> {
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let report = history::check(&history::read(std::io::BufReader::new(file))?);
    print!("{report}");
    Ok(if report.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns why no scenario can run on this machine.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    ["ip", "nft", "nsenter", "unshare"].into_iter().find(|program| find(program).is_none()).map(|program| {
        format!("{program} is not installed: on Debian, apt-get install iproute2 nftables util-linux")
    })
}

fn chaos(arguments: &ChaosArgs) -> Result<ExitCode> {
    if std::env::var_os(PROGRAMS).is_none() {
        return with_programs(arguments);
    }
    let chosen: Vec<&Scenario> = if arguments.scenario.is_empty() {
        let all = ALL.iter().filter(|scenario| scenario.elsewhere.is_none());
        // Two builds are needed for S36 and S37.
        let asked = |scenario: &&Scenario| {
            if arguments.quick {
                scenario.quick
            } else {
                let two = matches!(scenario.id, "S36" | "S37");
                (arguments.slow || !scenarios::SLOW.contains(&scenario.id))
                    && (!two || arguments.other_programs.is_some())
            }
        };
        all.filter(asked).collect()
    } else {
        arguments.scenario.iter().map(|id| scenarios::find(id)).collect::<Result<_>>()?
    };
    if let Some(why) = missing() {
        eprintln!("nothing can run here: {why}");
        return Ok(ExitCode::from(SKIPPED));
    }
    let out = arguments.output.folder();
    let seed = arguments.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let (mut verdicts, mut skipped) = (Vec::new(), Vec::new());
    for scenario in chosen {
        let why = match scenario.id {
            "S36" | "S37" if arguments.other_programs.is_none() => {
                Some("it needs --other-programs".to_owned())
            }
            id => scenario.elsewhere.map(str::to_owned).or_else(|| scenarios::missing(id)),
        };
        if let Some(why) = why {
            skipped.push(format!("{}: {why}", scenario.id));
            continue;
        }
        eprintln!("{}: {}; seed {seed}", scenario.id, scenario.what);
        // A runtime of its own for each: its thread moves to the bridge of the run.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        verdicts.push(runtime.block_on(one(scenario, seed, arguments, &out))?);
    }
    if !verdicts.is_empty() {
        arguments.output.write()?;
    }
    for verdict in &verdicts {
        let words = if verdict.failures.is_empty() { "passes" } else { "FAILS" };
        println!("{}  {words}", verdict.id);
        for failure in &verdict.failures {
            println!("     {failure}");
        }
    }
    for skipped in &skipped {
        println!("SKIPPED  {skipped}");
    }
    Ok(if verdicts.iter().any(|verdict| !verdict.failures.is_empty()) {
        println!("replay with --seed {seed}");
        ExitCode::FAILURE
    } else if skipped.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(SKIPPED)
    })
}

/// Starts this program again, with the folders of kas and agentk where `testkit` looks for them.
fn with_programs(arguments: &ChaosArgs) -> Result<ExitCode> {
    let own = std::env::current_exe()?;
    let own = own.parent().context("a program is in a folder")?;
    let folder = arguments.programs.as_deref().unwrap_or(own);
    let folders = [Some(folder), arguments.other_programs.as_deref()].into_iter().flatten();
    let folders: Vec<PathBuf> = folders.map(std::path::absolute).collect::<std::io::Result<_>>()?;
    for folder in &folders {
        ensure!(folder.join("kas").is_file(), "there is no kas in {}", folder.display());
    }
    let status = std::process::Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(PROGRAMS, std::env::join_paths(&folders)?)
        .status()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

async fn one(scenario: &Scenario, seed: u64, arguments: &ChaosArgs, out: &Path) -> Result<Verdict> {
    let quick = arguments.quick;
    let form = if quick { "quick" } else { "full" };
    let mut setup = scenarios::setup(scenario.id, quick);
    if let Some(replicas) = arguments.replicas {
        setup.replicas = setup.replicas.max(replicas.into());
    }
    let default = if scenario.id == "S48" { 60 } else { 10 };
    let length = Duration::from_secs(60 * arguments.minutes.unwrap_or(default));
    let commit = process::version::COMMIT;
    let lengths = (length, arguments.restarts);
    let started = Run::start(scenario.id, seed, setup, quick, lengths, commit).await;
    let mut run = match started {
        Ok(run) => run,
        Err(error) => {
            let failures = vec![format!("it did not start: {error:#}")];
            return report::keep_failure(scenario, (seed, commit), form, failures, out);
        }
    };
    let performed = Box::pin(scenarios::perform(scenario.id, &mut run)).await;
    if let Err(error) = &performed {
        run.say(&format!("the scenario failed: {error:#}"));
    }
    let took = run.elapsed();
    let finished = match Box::pin(run.finish()).await {
        Ok(finished) => finished,
        Err(error) => {
            let failures = performed.err().into_iter().chain([error]).map(|error| format!("{error:#}"));
            return report::keep_failure(scenario, (seed, commit), form, failures.collect(), out);
        }
    };
    eprintln!("  the faults took {:.0} s, all {:.0} s", took.as_secs_f64(), finished.took.as_secs_f64());
    report::keep(scenario, &finished, performed.as_ref().err(), form, out)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
