//! The command line. xtask includes this file too: a bad argument is told before anything is built.

use std::{net::SocketAddr, path::PathBuf};

use super::table::{self, Tracker};

const HELP: &str = "\
Exit codes: 0, every scenario passed; 1, one failed; 3, nothing failed, but a scenario that was asked for cannot run here.";

/// Kill, pause and cut off real replicas under load, and check that nobody notices
#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask chaos", bin_name = "cargo xtask chaos", max_term_width = 110)]
#[command(after_help = HELP, args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) chaos: ChaosArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Run agents; the other commands start this
    #[command(hide = true)]
    Swarm(SwarmArgs),
    /// Abuse HTTP/2; S46 starts this
    #[command(hide = true)]
    Abuse(AbuseArgs),
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
pub(crate) struct Output {
    /// Keep the result of each run in this folder, as JSON and a picture, with the histories of runs that
    /// failed, and write chaos.md there from all results in it. Default: target/chaos
    #[arg(long, value_name = "DIR", alias = "out")]
    pub(crate) report: Option<PathBuf>,
    /// Also write that report to docs/chaos.md, and its pictures to docs/images/chaos
    #[arg(long)]
    pub(crate) write_docs: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ChaosArgs {
    /// List all scenarios, and why one does not run here
    #[arg(long)]
    pub(crate) list: bool,
    /// Run this scenario; may be given several times. Default: all that can run
    #[arg(long, value_name = "ID", value_parser = id)]
    pub(crate) scenario: Vec<String>,
    /// How replicas find each other's agents: gossip, or redis, with a real redis-server. Default: gossip,
    /// and redis for scenarios that are about it
    #[arg(long, value_name = "NAME", value_parser = str::parse::<Tracker>)]
    pub(crate) tracker: Option<Tracker>,
    /// Run the quick set, each scenario in its short form: less than four minutes
    #[arg(long)]
    pub(crate) quick: bool,
    /// Choices of the nemesis. Default: random, and printed
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Also run the slow set: S09G and S48, which take longer than all others
    #[arg(long, conflicts_with = "quick")]
    pub(crate) slow: bool,
    /// Report times beside their limits without failing on them: for programs without optimizations, or a
    /// busy machine
    #[arg(long)]
    pub(crate) no_gates: bool,
    /// How long faults go on in S02 (default: 10), S30 (default: 20) and S48 (default: 60)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub(crate) minutes: Option<u64>,
    /// How often all replicas are restarted in turn in S09. Default: 20; in the quick form: 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) restarts: Option<u32>,
    /// Number of agents in S31 (default: 300) and S48 (default: 2000; quick: 200)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(100..=10_000))]
    pub(crate) agents: Option<i64>,
    /// Number of replicas, where the scenario allows another one than its own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(3..=7))]
    pub(crate) replicas: Option<u8>,
    #[command(flatten)]
    pub(crate) output: Output,
    /// Use the programs kas and agentk in this folder. Default: that of this program
    #[arg(long, value_name = "DIR")]
    pub(crate) programs: Option<PathBuf>,
    /// Every second replica runs the programs in this folder: another build. Default: none; in S36 and S37, a
    /// build that writes records of other versions
    #[arg(long, value_name = "DIR")]
    pub(crate) other_programs: Option<PathBuf>,
    /// Do not build the programs; read by xtask
    #[arg(long)]
    pub(crate) no_build: bool,
}

/// Agents in one process, for a run of chaos
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SwarmArgs {
    /// Addresses of kas, as of `--kas-address` of agentk
    #[arg(long)]
    pub(crate) kas: String,
    /// The authority that has signed the certificates of those with grpcs://
    #[arg(long)]
    pub(crate) ca: Option<PathBuf>,
    /// The first agent
    #[arg(long)]
    pub(crate) first: i64,
    /// How many agents
    #[arg(long)]
    pub(crate) count: i64,
    /// Agents below this id have a Kubernetes API server
    #[arg(long, default_value_t = 0)]
    pub(crate) clusters: i64,
    /// Connections of each agent, to different replicas
    #[arg(long, default_value_t = 2)]
    pub(crate) connections: usize,
    /// How long a request takes, in milliseconds
    #[arg(long, default_value_t = 20)]
    pub(crate) work: u64,
    /// File with texts that must not reach an agent, one per line
    #[arg(long)]
    pub(crate) forbidden: Option<PathBuf>,
    /// File that says which clusters answer nothing; without it, or while there is none, none does
    #[arg(long)]
    pub(crate) hangs: Option<PathBuf>,
    /// Where the history is written
    #[arg(long)]
    pub(crate) history: PathBuf,
}

/// Connections that abuse HTTP/2, for a run of chaos
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AbuseArgs {
    /// Addresses, separated by commas
    #[arg(long, value_delimiter = ',')]
    pub(crate) targets: Vec<SocketAddr>,
    /// How many at once
    #[arg(long)]
    pub(crate) connections: usize,
    /// Choices
    #[arg(long)]
    pub(crate) seed: u64,
}

/// Returns the id as the table spells it.
fn id(text: &str) -> Result<String, String> {
    Ok(table::find(text)?.id.to_owned())
}
