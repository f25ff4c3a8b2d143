//! `cargo xtask quickstart`: runs kas and agentk as processes on loopback, and kills one replica under load.
//!
//! Its processes and its temporary folder are gone when it exits. The module `steps` is the sequence that is
//! shown, and `outage` is the step that kills a replica.

mod agents;
mod balancer;
mod deployment;
mod fleet;
mod gitops;
mod http;
mod kasctl;
mod kubectl;
mod kubernetes;
mod outage;
mod processes;
mod redis;
mod replicas;
mod report;
mod service;
mod steps;
mod teams;
mod traffic;

use std::{path::PathBuf, pin::pin, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::{processes::Processes, steps::Shown};

const HELP: &str = "\
Examples:
  cargo xtask quickstart                               with a simulated Kubernetes API
  cargo xtask quickstart --kubeconfig ~/.kube/config   with the cluster of a kubeconfig
  cargo xtask quickstart --once                        exit afterwards; fails if a check failed
  cargo xtask quickstart --tracker redis               with a shared Redis instead of gossip
  cargo xtask quickstart --gitops                      from a commit to an object in a real API server
  cargo xtask quickstart --fleet                       twenty agents: a live view, PromQL, a webhook

Starts three replicas of kas and four agentk processes, kills one replica while requests run, and prints how \
long each part took to recover. Runs kubectl through kas if it is in PATH; with --kubeconfig, also kubectl exec (of \
hostname) and port-forward, in the first pod that permits it. Listens only on free ports of 127.0.0.1, writes only to a temporary folder, and \
removes that folder at the end.

--fleet starts a real kube-apiserver (from KUBEBUILDER_ASSETS, or built once by Go) with twenty namespaces, three \
replicas and twenty agentk processes. Each agentk impersonates a service account that sees its own namespace only. It \
shows pods that come and go in one view, asks all agents by PromQL, and sends a webhook to an agent that is away while \
a replica is killed. The metrics are a recording. An API server proxies to no loopback address, so the server of \
that recording, which also takes the webhook, listens on another address of this machine, and answers this machine \
only.";

/// Arguments of `quickstart`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct QuickstartArgs {
    /// Connect the agents to the cluster of this kubeconfig instead of the simulated API
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: its current context]
    #[arg(long, value_name = "NAME", requires = "kubeconfig")]
    context: Option<String>,
    /// How a replica learns which other replicas hold an agent
    #[arg(long, value_enum, default_value_t = Tracker::Gossip)]
    tracker: Tracker,
    /// Show GitOps instead: a commit in a bare repository becomes an object in the cluster of an agent; with
    /// a real kube-apiserver from KUBEBUILDER_ASSETS, or built by Go
    #[arg(long, conflicts_with = "kubeconfig")]
    gitops: bool,
    /// Show a fleet instead: twenty agents, each with a namespace of a real kube-apiserver, in a live view,
    /// asked by PromQL, and with a webhook that comes while its agent is away
    #[arg(long, conflicts_with_all = ["kubeconfig", "gitops"])]
    fleet: bool,
    /// Build with optimizations: the build takes longer, and the programs are as fast as a release
    #[arg(long)]
    release: bool,
    /// Exit after the demonstration instead of waiting for Ctrl-C
    #[arg(long)]
    once: bool,
    /// Use the programs in the folder of this one instead of building them
    #[arg(long, hide = true)]
    no_build: bool,
}

/// The values of kas' key `tracker` that work with several replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tracker {
    /// The replicas tell each other
    Gossip,
    /// The replicas share a Redis, which is started too; needs redis-server or valkey-server
    Redis,
}

impl Tracker {
    fn as_str(self) -> &'static str {
        match self {
            Self::Gossip => "gossip",
            Self::Redis => "redis",
        }
    }

    /// Describes how the replicas find each other.
    fn how(self) -> &'static str {
        match self {
            Self::Gossip => "each is configured with three addresses, and gossips over UDP",
            Self::Redis => "each is configured with the same Redis, and finds the others there",
        }
    }

    /// Describes how the other replicas know that a killed one is gone.
    fn gone(self) -> &'static str {
        match self {
            Self::Gossip => "the other replicas agree by gossip: replica 2 is gone",
            Self::Redis => "its key in Redis has expired: replica 2 is gone",
        }
    }
}

/// Time limit for a program to become ready, or to recover. Either takes about a second on an idle machine.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Time limit for a list of pods: a real cluster may be far away and large.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Time limit for a program to exit. kas itself gives open requests two seconds.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Interval of polling.
const POLL: Duration = Duration::from_millis(10);
/// Time until a replica that the user killed is restarted.
const RESTART_AFTER: Duration = Duration::from_secs(10);

/// Runs the demonstration.
///
/// # Errors
/// A program cannot be built or started, or does not recover in time; with `--once`, any failed check.
pub fn run(args: QuickstartArgs) -> Result<ExitCode> {
    // One thread: the kernel kills child processes when the thread that started them ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let mut processes = Processes::default();
        let shown = {
            let mut show = pin!(async {
                match (args.gitops, args.fleet) {
                    (true, _) => Box::pin(gitops::show(&args, &mut processes)).await,
                    (_, true) => Box::pin(fleet::show(&args, &mut processes)).await,
                    _ => steps::show(&args, &mut processes).await,
                }
            });
            tokio::select! {
                shown = &mut show => shown.map(Some),
                () = signals.next() => Ok(None),
            }
        };
        let shown = match shown {
            Ok(Some(shown)) if !args.once => tokio::select! {
                error = steps::keep_running(&mut processes, &shown) => Err(error),
                () = signals.next() => Ok(Some(shown)),
            },
            shown => shown,
        };
        // Before the error is printed: the error should be the last line of the output.
        processes.stop().await?;
        match shown? {
            // Without `--once`, the user has read the problems already.
            Some(Shown { problems, .. }) if args.once && !problems.is_empty() => {
                bail!("the demonstration had problems: {}", problems.join("; "))
            }
            Some(_) => Ok(ExitCode::SUCCESS),
            None => Ok(ExitCode::from(130)),
        }
    })
}

/// The signals that end a program.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> Result<Self> {
        let watch = |kind| signal(kind).context("cannot watch signals");
        Ok(Self([
            watch(SignalKind::interrupt())?,
            watch(SignalKind::terminate())?,
            watch(SignalKind::hangup())?,
        ]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
