//! Automation: `cargo xtask quickstart`, `test`, `ci`, `fuzz`, `images`, `layers`, `man`, `bench`,
//! `chaos`, `sim` and `museum`.
//!
//! It is built before anything else, within seconds: it depends on none of the crates that kas and agentk
//! consist of, so `ci` works when kas does not compile. Commands that need more build it with cargo and start
//! it.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use devkit::report;

mod bench;
mod chaos;
mod checks;
mod fuzz;
mod images;
mod layers;
mod man;
mod museum;
mod sim;
mod suite;
mod tools;
mod width;

/// Automation for kas. Start with quickstart or test.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run three replicas of kas with agents, and kill one replica under load
    Quickstart(quickstart::QuickstartArgs),
    /// Run the tests of the workspace
    Test(suite::TestArgs),
    /// Run all checks: formatting, lints, documentation, layers, licences, tests
    Ci(checks::CiArgs),
    /// Show that the test of each public bug of other systems passes, and fails with the bug
    Museum(museum::MuseumArgs),
    /// Build a release: static programs, bills of materials, and images
    Images(images::ImagesArgs),
    /// Fuzz each parser of input from peers; needs a C++ compiler
    Fuzz(fuzz::FuzzArgs),
    /// Check the dependencies between crates, and that the modules of a crate have no import cycle
    Layers(layers::LayersArgs),
    /// Write the manual pages of kas, agentk and kasctl
    Man(man::ManArgs),
    /// Measure what a call through kas costs
    #[command(disable_help_flag = true)]
    Bench(bench::BenchArgs),
    /// Kill, pause and cut off real replicas under load, and check what happened
    #[command(disable_help_flag = true)]
    Chaos(chaos::ChaosArgs),
    /// Simulate replicas with agents under faults, by seeds
    #[command(disable_help_flag = true)]
    Sim(sim::SimArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Quickstart(args) => quickstart::run(args),
        Command::Test(args) => suite::run(&args),
        Command::Ci(args) => checks::ci(&args),
        Command::Museum(args) => museum::run(&args),
        Command::Images(args) => images::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Layers(args) => layers::run(&args),
        Command::Man(args) => man::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Chaos(args) => chaos::run(&args),
        Command::Sim(args) => sim::run(&args),
    };
    result.unwrap_or_else(|error: anyhow::Error| {
        // There is nothing left to do when standard error is closed.
        let _ = report::error(&error);
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
