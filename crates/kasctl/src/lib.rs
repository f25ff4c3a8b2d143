//! `kasctl`: the operator's tool for kas. What others may use of it is the description of its command line, of which the
//! manual's pages are made.

mod address;
mod agents;
mod agents_file;
mod api;
mod app;
mod cli;
mod duration;
mod explain;
mod failure;
mod jwt;
mod link;
mod output;
mod pods;
mod replicas;
mod request;
mod secret;
mod table;
mod target;
mod timeline;
mod token;
mod tracker;
mod why;

use clap::CommandFactory as _;

/// Runs the command of the process' arguments. The exit codes are those that `--help` lists.
pub fn main() -> std::process::ExitCode {
    runtime::tls::install();
    app::main()
}

/// Returns what the command line is.
pub fn command() -> clap::Command {
    cli::Cli::command()
}
