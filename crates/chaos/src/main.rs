//! `cargo xtask chaos`: kills, pauses and cuts off real replicas under load, and checks what happened.
//!
//! Replicas run in network namespaces behind a bridge, agents in processes of this program (`chaos swarm`).
//! Everything is recorded in one history, which the crate `history` checks.

mod abuse;
mod arguments;
mod auditing;
mod client;
mod clock;
mod cluster_server;
mod faults;
mod fleet;
mod frames;
mod hash;
mod hooks;
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
mod table;
mod timeline;
mod viewer;
mod written;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;

use crate::{
    arguments::{Arguments, ChaosArgs, Command, Output},
    report::{Form, Verdict},
    run::Run,
    table::{ALL, Scenario, Tracker},
};

/// Names folders of programs, for the crate `testkit`.
const PROGRAMS: &str = "KAS_PROGRAMS";
/// A scenario could not run.
const SKIPPED: u8 = 3;
/// The folder with a kas that writes records of other versions, beside this program: `cargo xtask chaos`
/// makes it.
const RECORDS: &str = "records";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Swarm(arguments)) => swarm::run(&arguments).map(|()| ExitCode::SUCCESS),
        Some(Command::Abuse(arguments)) => abuse::run(&arguments).map(|()| ExitCode::SUCCESS),
        Some(Command::Check { history }) => check(&history),
        Some(Command::Report { output }) => write(&output).map(|()| ExitCode::SUCCESS),
        None if arguments.chaos.list => list(&arguments.chaos),
        None => chaos(&arguments.chaos),
    };
    result.unwrap_or_else(|error: anyhow::Error| {
        // There is nothing left to do when standard error is closed.
        let _ = devkit::report::error(&error);
        ExitCode::FAILURE
    })
}

fn list(arguments: &ChaosArgs) -> Result<ExitCode> {
    let list = table::list(arguments.tracker, other(arguments)?.is_some());
    // A reader that has seen enough is no error.
    let _ = std::io::stdout().write_all(list.as_bytes());
    Ok(ExitCode::SUCCESS)
}

/// Where results are kept.
fn folder(output: &Output) -> PathBuf {
    output.report.clone().unwrap_or_else(|| devkit::workspace::root().join("target/chaos"))
}

/// Writes the report of all results in the folder.
fn write(output: &Output) -> Result<()> {
    let folder = folder(output);
    report::write(&folder, &folder)?;
    if output.write_docs {
        report::write(&folder, &devkit::workspace::root().join("docs"))?;
    }
    Ok(())
}

fn check(path: &Path) -> Result<ExitCode> {
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let report = history::check(&history::read(std::io::BufReader::new(file))?);
    print!("{report}");
    Ok(if report.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chaos(arguments: &ChaosArgs) -> Result<ExitCode> {
    if std::env::var_os(PROGRAMS).is_none() {
        return with_programs(arguments);
    }
    let other = other(arguments)?.is_some();
    // The first of its trackers, if none is asked for.
    let with = |scenario: &'static Scenario| (scenario, arguments.tracker.unwrap_or(scenario.trackers[0]));
    let chosen: Vec<(&Scenario, Tracker)> = if arguments.scenario.is_empty() {
        // What does not run here is no part of the set, and said at the end.
        let asked = |scenario: &Scenario, tracker| {
            left_out(scenario, tracker, arguments, other).is_none() && (scenario.quick || !arguments.quick)
        };
        ALL.iter().map(with).filter(|(scenario, tracker)| asked(scenario, *tracker)).collect()
    } else {
        let found = arguments.scenario.iter().map(|id| table::find(id).map_err(anyhow::Error::msg));
        found.map(|scenario| scenario.map(with)).collect::<Result<_>>()?
    };
    let out = folder(&arguments.output);
    let seed = arguments.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let (mut verdicts, mut skipped) = (Vec::new(), Vec::new());
    for (scenario, tracker) in chosen {
        if let Some(why) = scenario.missing(tracker, other) {
            skipped.push(format!("{}: {why}", scenario.name(tracker)));
            continue;
        }
        eprintln!("{}: {}; {}, seed {seed}", scenario.id, scenario.what, tracker.as_str());
        // A runtime of its own for each: its thread moves to the bridge of the run.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        verdicts.push(runtime.block_on(one(scenario, tracker, seed, arguments, &out))?);
    }
    if !verdicts.is_empty() {
        write(&arguments.output)?;
    }
    for verdict in &verdicts {
        let words = if verdict.failures.is_empty() { "passes" } else { "FAILS" };
        println!("{}  {words}", verdict.name);
        for failure in &verdict.failures {
            println!("     {failure}");
        }
    }
    for skipped in &skipped {
        println!("SKIPPED  {skipped}");
    }
    if arguments.scenario.is_empty() && !arguments.quick {
        for (scenario, tracker) in ALL.iter().map(with) {
            if let Some(why) = left_out(scenario, tracker, arguments, other) {
                println!("NOT RUN  {}: {why}", scenario.id);
            }
        }
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

/// Why a scenario is no part of the set of all that can run.
fn left_out(scenario: &Scenario, tracker: Tracker, arguments: &ChaosArgs, other: bool) -> Option<String> {
    if let Some(elsewhere) = scenario.elsewhere {
        return Some(elsewhere.to_owned());
    }
    if !scenario.trackers.contains(&tracker) {
        return Some(format!("not with --tracker {}", tracker.as_str()));
    }
    if scenario.slow && !arguments.slow {
        return Some("with --slow, or by its name".to_owned());
    }
    (scenario.two_builds && !other).then(|| "with --other-programs, the folder of another build".to_owned())
}

/// The folder with another build: the one that was asked for, or the one that writes records of other
/// versions.
fn other(arguments: &ChaosArgs) -> Result<Option<PathBuf>> {
    let records = std::env::current_exe()?.with_file_name(RECORDS);
    let records = records.join("kas").is_file().then_some(records);
    Ok(arguments.other_programs.clone().or(records))
}

/// The folders with the programs under test.
fn programs(arguments: &ChaosArgs) -> Result<Vec<PathBuf>> {
    let own = std::env::current_exe()?;
    let own = own.parent().context("a program is in a folder")?;
    let folder = arguments.programs.as_deref().unwrap_or(own);
    let folders = [Some(folder.to_owned()), other(arguments)?].into_iter().flatten();
    Ok(folders.map(std::path::absolute).collect::<std::io::Result<_>>()?)
}

/// Starts this program again, with the folders of kas and agentk where `testkit` looks for them.
fn with_programs(arguments: &ChaosArgs) -> Result<ExitCode> {
    let folders = programs(arguments)?;
    for folder in &folders {
        ensure!(folder.join("kas").is_file(), "there is no kas in {}", folder.display());
    }
    let status = std::process::Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(PROGRAMS, std::env::join_paths(&folders)?)
        .status()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// The build of the replicas: its commit, as kas tells it, and whether it is not optimized, which the name
/// that cargo gives to its folder tells.
fn build(folder: &Path) -> Result<(String, bool)> {
    let kas = folder.join("kas");
    let output = std::process::Command::new(&kas).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", kas.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let commit = text.trim().rsplit_once("commit: ").map(|(_, commit)| commit.to_owned());
    let commit = commit.with_context(|| format!("{} --version tells no commit: {text:?}", kas.display()))?;
    Ok((commit, folder.file_name().is_some_and(|name| name == "debug")))
}

async fn one(
    scenario: &Scenario,
    tracker: Tracker,
    seed: u64,
    arguments: &ChaosArgs,
    out: &Path,
) -> Result<Verdict> {
    let name = scenario.name(tracker);
    let quick = arguments.quick;
    let (commit, debug) = build(programs(arguments)?.first().context("there are programs")?)?;
    let agents = arguments.agents;
    let form = Form { quick, tracker, agents, debug, no_gates: arguments.no_gates };
    let mut setup = scenarios::setup(scenario.id, quick);
    if arguments.other_programs.is_none() {
        // Without being asked, a replica runs the other build only where the scenario says so.
        setup.one_build = true;
        setup.written = scenarios::written(scenario.id);
    }
    if let Some(agents) = agents {
        setup.scale(scenario.id, agents)?;
    }
    if let Some(replicas) = arguments.replicas {
        setup.replicas = setup.replicas.max(replicas.into());
    }
    let default = match scenario.id {
        "S48" => 60,
        "S30" => 20,
        _ => 10,
    };
    let length = Duration::from_secs(60 * arguments.minutes.unwrap_or(default));
    let lengths = (length, arguments.restarts);
    let started = Box::pin(Run::start(&name, tracker, seed, setup, quick, lengths, &commit)).await;
    let mut run = match started {
        Ok(run) => run,
        Err(error) => {
            let failures = vec![format!("it did not start: {error:#}")];
            return report::keep_failure(scenario, form, (seed, &commit), failures, out);
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
            return report::keep_failure(scenario, form, (seed, &commit), failures.collect(), out);
        }
    };
    eprintln!("  the faults took {:.0} s, all {:.0} s", took.as_secs_f64(), finished.took.as_secs_f64());
    report::keep(scenario, form, &finished, performed.as_ref().err(), out)
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
