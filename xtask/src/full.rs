//! Commands that build on the workspace's own crates.

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    process::ExitCode,
};

use anyhow::Result;
use clap::Subcommand;

use crate::bench;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure what a call through kas costs
    Bench(bench::BenchArgs),
    /// Be the load client of a benchmark
    #[command(hide = true)]
    BenchClient,
    /// Serve the quickstart's made-up Kubernetes API until standard input ends
    #[command(hide = true)]
    DemoApi {
        /// Where to listen; port 0 is any free one
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// Find the servers that tests run as their Kubernetes API, and build them when there are none
    #[command(hide = true)]
    KubernetesBinaries,
}

pub(crate) fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Bench(args) => bench::run(args)?,
        Command::BenchClient => bench::client()?,
        Command::DemoApi { listen } => demo_api(listen)?,
        Command::KubernetesBinaries => {
            let found = testkit::kubernetes::binaries()?;
            writeln!(io::stdout(), "{}\n{}", found.etcd.display(), found.kube_apiserver.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the URL, as the only line on standard output, once it is served.
fn demo_api(listen: SocketAddr) -> Result<()> {
    anyhow::bail!("the demo API is not built in yet: {listen}");
}
