//! `cargo xtask sim`: several replicas of kas with agents, over a simulated network and clock.
//!
//! What runs is the code of the product, from the router to gossip; what is simulated is the network, time,
//! entropy, agents' dialling, and clients. A seed decides everything that happens, see `process.c`. Each seed
//! runs in a process of its own, which this program starts.

mod agent;
mod bodies;
mod client;
mod flaw;
mod host;
mod listener;
mod nemesis;
mod network;
mod record;
mod replica;
mod runner;
mod simulation;
mod starved;

use std::process::ExitCode;

use clap::Parser as _;

use crate::runner::Cli;

fn main() -> ExitCode {
    match runner::run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
