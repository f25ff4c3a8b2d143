//! `cargo xtask bench`: measures what a call through kas costs in comparison with a direct call.
//!
//! The servers and the load client are processes on loopback, built with the release profile.
//! `http` measures HTTP requests to an API server. `path` measures latency, throughput, processor time and
//! memory with a method of the benchmark. `instructions` counts the instructions of kas and agentk per call,
//! a number that other load on the machine does not change. `cluster` measures several replicas, and
//! `tracker` the table of agents that they share. `watches` measures what open watches cost, and `gitops` the
//! way from a commit to a cluster. `fleet` measures what kas builds
//! on its tunnels: views, webhooks, PromQL, direct routes.

mod agents;
mod call;
mod child;
mod client;
mod cluster;
mod environment;
mod fleet;
mod gitops;
mod http_load;
mod http_path;
mod instructions;
mod leaving_load;
mod load;
mod load_client;
mod only;
mod path;
mod protocol;
mod report;
mod static_server;
mod times;
mod upgrade_load;
mod watches;

use std::process::ExitCode;

use clap::Parser as _;

/// Measure what a call through kas costs
#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench", max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Compare HTTP requests through kas and agentk with direct requests, by calls and by the Kubernetes API
    /// endpoint (rows k8s_…); about seven minutes on two cores
    Http(http_path::HttpArgs),
    /// Compare calls through kas with direct calls; about ten minutes on two cores
    Path(path::PathArgs),
    /// Count the instructions of kas and agentk per call with valgrind; about four minutes
    Instructions(instructions::InstructionsArgs),
    /// Measure several replicas: propagation of agents, failover, joining; about fifteen minutes
    Cluster(cluster::ClusterArgs),
    /// Measure each implementation of the table of agents: propagation and cost; about twenty minutes
    Tracker(cluster::tracker::TrackerArgs),
    /// Measure the memory of open watches, and whether kubectl exec opens beside them; about half a minute
    Watches(watches::WatchesArgs),
    /// Measure the way from a commit to a cluster, with a real Kubernetes API server; about six minutes
    Gitops(gitops::GitopsArgs),
    /// Measure views, webhooks, PromQL of one and of 1,000 agents, and direct routes, with real API servers,
    /// Prometheus and nginx; about eight minutes
    Fleet(fleet::FleetArgs),
    /// Generate load; the other commands start this and control it over standard input
    #[command(hide = true)]
    Client,
    /// Serve files and events, and read uploads; the other commands start this
    #[command(hide = true)]
    StaticServer(static_server::ServerArgs),
}

/// Makes what a benchmark runs in that takes part in its own measurements.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    net::tls::install();
    process::open_files::raise_limit();
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Runs a benchmark. A missed gate is a result, not an error.
fn main() -> ExitCode {
    let result = match Arguments::parse().what {
        What::Http(args) => http_path::run(&args),
        What::Path(args) => path::run(&args),
        What::Instructions(args) => instructions::run(&args),
        What::Cluster(args) => cluster::run(&args),
        What::Tracker(args) => cluster::tracker::run(&args),
        What::Watches(args) => watches::run(&args),
        What::Gitops(args) => gitops::run(&args),
        What::Fleet(args) => fleet::run(&args),
        What::Client => client::run(),
        What::StaticServer(args) => static_server::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // There is nothing left to do when standard error is closed.
            let _ = devkit::report::error(&error);
            ExitCode::FAILURE
        }
    }
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
