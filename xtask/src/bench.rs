//! `cargo xtask bench`: what a call through kas costs beside the same call made directly.
//!
//! Every server that is measured is a process of the release profile on loopback, and so is the load client.
//! `path` measures time, throughput, processor time and memory; `instructions` counts what kas executes per call,
//! which neighbours on the machine do not change. `cluster` measures several replicas, `tracker` what they know
//! each other's agents by.

mod agents;
mod client;
mod cluster;
mod instructions;
mod orders;
mod path;
mod processes;
mod report;

use std::path::PathBuf;

/// Measures the way of a call.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Direct calls against calls through kas; about ten minutes on two cores.
    Path(PathArgs),
    /// Instructions of kas per call, under valgrind; about two minutes.
    Instructions(InstructionsArgs),
    /// Several replicas: how soon they know of agents and of each other's end; about fifteen minutes.
    Cluster(ClusterArgs),
    /// Each version of the table of agents: how soon others see a change, and what it costs; about twenty minutes.
    Tracker(TrackerArgs),
}

#[derive(Debug, clap::Args)]
struct PathArgs {
    /// How often everything is measured; results are medians over the rounds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// One short round, to see that everything works; its numbers mean little.
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Measures only these rows, by name or by a name's first words: `unary_100b_c64`, `unary`, `memory`.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Direct calls without the metadata (token and agent) that calls through kas have.
    #[arg(long)]
    bare_direct: bool,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct InstructionsArgs {
    /// Calls that are counted.
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    requests: i64,
    /// Calls before that.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    warm: i64,
    /// Each call has a new token, so that kas checks a signature for each. Has tables of its own and no key.
    #[arg(long, conflicts_with = "json")]
    new_tokens: bool,
    /// How many functions are listed.
    #[arg(long, default_value_t = 40)]
    top: usize,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct ClusterArgs {
    /// How often calls through two replicas are compared with direct ones; the other parts have counts of their own.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measures traffic and memory against numbers of replicas and agents instead, for docs/scale.md.
    #[arg(long, conflicts_with_all = ["only", "json", "markdown"])]
    scale: bool,
    /// Measures only these keys, whole or their first words: `t_kill`, `t`, `two_hop`.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    only: Vec<String>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct TrackerArgs {
    /// Leaves out replicas at rest, which take sixteen minutes.
    #[arg(long)]
    no_rest: bool,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct Output {
    /// Writes the keys that gates are about as one flat object; keys of the other command that the file has stay.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the tables; those of the other command that the file has stay.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Writes the tables to docs/benchmarks.md.
    #[arg(long)]
    write_docs: bool,
    /// Uses binaries that were built before.
    #[arg(long)]
    no_build: bool,
}

/// Runs a bench.
///
/// # Errors
/// When something cannot be built, started or measured. A missed gate is a result, not an error.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    match args.what {
        What::Path(args) => path::run(&args),
        What::Instructions(args) => instructions::run(&args),
        What::Cluster(args) => cluster::run(&args),
        What::Tracker(args) => cluster::tracker::run(&args),
    }
}

/// Is the load client (`cargo xtask bench-client`, hidden): started by [`run`], and of no use to a person.
///
/// # Errors
/// When the runtime cannot start or standard output is gone.
pub(crate) fn client() -> anyhow::Result<()> {
    client::run()
}
