//! Automation: `cargo xtask quickstart`, `test`, `ci`, `fuzz`, `images`, `layers`, `man` and `bench`.
//!
//! The alias `cargo xtask` builds this without the feature `full`, that is without the workspace's own crates, TLS and
//! gRPC: it is there within seconds on a fresh machine, and `ci` works when kas itself does not compile. Commands that
//! need more build the rest together with the binaries and run that, see [`workspace`].

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[cfg(feature = "full")]
mod bench;
mod checks;
#[cfg(feature = "full")]
mod full;
mod images;
mod layers;
mod man;
mod process;
mod quickstart;
mod report;
mod tools;
mod workspace;

/// kas' automation. Begin with quickstart, or test.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build and start three replicas of kas with their agents, ask one, and kill another in the middle of traffic
    Quickstart(quickstart::QuickstartArgs),
    /// Run the tests of the workspace
    Test(checks::TestArgs),
    /// Run what CI runs: formatting, lints, documentation, layers, licences, tests
    Ci(checks::CiArgs),
    /// Build what ships: static programs, their bills of materials, and images from scratch
    Images(images::ImagesArgs),
    /// Fuzz each parser of what peers send, shortly; needs a nightly toolchain and cargo-fuzz
    Fuzz(checks::FuzzArgs),
    /// Check which crate of the workspace depends on which
    Layers,
    /// Write the pages of the manual of kas, agentk and kasctl
    Man(man::ManArgs),
    /// Measure what a call through kas costs
    #[cfg(not(feature = "full"))]
    #[command(disable_help_flag = true)]
    Bench(workspace::Passed),
    #[cfg(feature = "full")]
    #[command(flatten)]
    Full(full::Command),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Quickstart(args) => quickstart::run(args),
        Command::Test(args) => checks::test(&args),
        Command::Ci(args) => checks::ci(&args),
        Command::Images(args) => images::run(&args),
        Command::Fuzz(args) => checks::fuzz(&args),
        Command::Layers => layers::run(),
        Command::Man(args) => man::run(&args),
        #[cfg(not(feature = "full"))]
        Command::Bench(arguments) => workspace::bench(&arguments),
        #[cfg(feature = "full")]
        Command::Full(command) => full::run(command),
    };
    result.unwrap_or_else(|error: anyhow::Error| {
        // Whoever closed standard error does not want to know.
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
