//! `cargo xtask quickstart`: real processes of kas and agentk on loopback, and a crash among them.
//!
//! Everything it makes is in one temporary folder and in processes of its own; both are gone when it ends. [`story`] is
//! what a person reads, [`outage`] its climax; the other modules are who plays.

mod agents;
mod balancer;
mod kasctl;
mod outage;
mod redis;
mod replicas;
mod story;
mod traffic;

use std::{
    future::poll_fn,
    path::PathBuf,
    pin::{Pin, pin},
    process::ExitCode,
    task::Poll,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use tempfile::TempDir;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::JoinSet,
    time::{Instant, sleep},
};

use self::{balancer::Balancer, replicas::Replica, story::Shown};
use crate::{
    process::Service,
    report::{human, line},
};

const HELP: &str = "\
Examples:
  cargo xtask quickstart                               a made-up Kubernetes API, no cluster needed
  cargo xtask quickstart --kubeconfig ~/.kube/config   your cluster, as the kubeconfig's current context
  cargo xtask quickstart --once                        show it and end; fails unless all went as it should
  cargo xtask quickstart --tracker redis               replicas that share a Redis rather than gossip

It starts three replicas of kas and four agentk, kills a replica in the middle of traffic, and shows how long each thing
took to recover. It listens on free ports of 127.0.0.1 only, keeps everything in a temporary folder, and leaves nothing
behind.";

/// Arguments of `quickstart`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct QuickstartArgs {
    /// Let the agents serve the cluster of this kubeconfig rather than the demo API
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME", requires = "kubeconfig")]
    context: Option<String>,
    /// How replicas learn who holds which agent
    #[arg(long, value_enum, default_value_t = Tracker::Gossip)]
    tracker: Tracker,
    /// Build optimised programs: slower to build, as fast as what ships
    #[arg(long)]
    release: bool,
    /// End after the demonstration rather than at Ctrl-C
    #[arg(long)]
    once: bool,
    /// Use the programs beside this one, rather than to build them
    #[arg(long, hide = true)]
    no_build: bool,
}

/// The key `tracker` of kas, as far as it is for several replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tracker {
    /// They tell each other
    Gossip,
    /// They share a Redis, which is started too: redis-server or valkey-server must be installed
    Redis,
}

impl Tracker {
    fn as_str(self) -> &'static str {
        match self {
            Self::Gossip => "gossip",
            Self::Redis => "redis",
        }
    }

    /// Says how replicas find each other here.
    fn how(self) -> &'static str {
        match self {
            Self::Gossip => "each was given three addresses; gossip over UDP does the rest",
            Self::Redis => "each was given a Redis, where it finds the others",
        }
    }

    /// Says by what a dead replica is known to be gone.
    fn gone(self) -> &'static str {
        match self {
            Self::Gossip => "gossip agrees: replica 2 is gone",
            Self::Redis => "its key in Redis has expired: replica 2 is gone",
        }
    }
}

/// How long a program may take to be ready, or to recover. It takes about a second; the rest is for a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long the answer may take: a real cluster may be far away and large.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How long a program may take to end. kas itself gives open requests two seconds.
const END_WITHIN: Duration = Duration::from_secs(5);
/// How long to wait between two looks at something that is not there yet.
const POLL: Duration = Duration::from_millis(10);
/// How long a replica that a person killed stays dead: time to look around.
const RESTART_AFTER: Duration = Duration::from_secs(10);

/// Shows it.
pub(crate) fn run(args: QuickstartArgs) -> Result<ExitCode> {
    // One thread: the kernel ends the children with the thread that started them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let mut stage = Stage::default();
        let shown = {
            let mut show = pin!(story::show(&args, &mut stage));
            tokio::select! {
                shown = &mut show => shown.map(Some),
                () = signals.next() => Ok(None),
            }
        };
        let shown = match shown {
            Ok(Some(shown)) if !args.once => tokio::select! {
                error = story::stand(&mut stage, &shown) => Err(error),
                () = signals.next() => Ok(Some(shown)),
            },
            shown => shown,
        };
        // In any case, and before the error is told: it is the last thing that a person reads.
        stage.clear().await?;
        match shown? {
            // Who stayed has read it.
            Some(Shown { problems, .. }) if args.once && !problems.is_empty() => {
                bail!("not all went as it should: {}", problems.join("; "))
            }
            Some(_) => Ok(ExitCode::SUCCESS),
            None => Ok(ExitCode::from(130)),
        }
    })
}

/// What a person or a supervisor ends a program with.
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

/// Everything that must go again.
#[derive(Default)]
struct Stage {
    dir: Option<TempDir>,
    demo: Option<Service>,
    redis: Option<Service>,
    replicas: Vec<Replica>,
    balancer: Balancer,
    agents: Vec<Service>,
}

/// Waits until a process ends that should not; says which replica it was, if it was one.
///
/// # Cancel safety
/// Cancel safe.
async fn ended(
    replicas: &mut [Replica],
    agents: &mut [Service],
    demo: &mut Option<Service>,
    redis: &mut Option<Service>,
) -> (Option<usize>, anyhow::Error) {
    type Ended<'a> = Pin<Box<dyn Future<Output = (Option<usize>, anyhow::Error)> + 'a>>;
    async fn one(replica: Option<usize>, service: &mut Service) -> (Option<usize>, anyhow::Error) {
        (replica, service.ended().await)
    }
    let replicas = replicas.iter_mut().enumerate();
    let replicas = replicas.filter_map(|(index, replica)| Some((Some(index), replica.service.as_mut()?)));
    let others = agents.iter_mut().chain(demo).chain(redis).map(|service| (None, service));
    let mut all: Vec<Ended<'_>> =
        replicas.chain(others).map(|(index, service)| Box::pin(one(index, service)) as Ended<'_>).collect();
    poll_fn(|context| {
        let mut ready = all.iter_mut().filter_map(|ended| match ended.as_mut().poll(context) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        });
        ready.next().map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Stage {
    /// Waits until a process ends that should not; says which replica it was, if it was one.
    async fn ended(&mut self) -> (Option<usize>, anyhow::Error) {
        ended(&mut self.replicas, &mut self.agents, &mut self.demo, &mut self.redis).await
    }

    /// Does something, as long as every process runs.
    async fn guard<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            (_, error) = self.ended() => Err(error),
            done = work => done,
        }
    }

    /// Lets time pass, as long as every process runs.
    async fn pause(&mut self, time: Duration) -> Result<()> {
        self.guard(async {
            sleep(time).await;
            Ok(())
        })
        .await
    }

    /// Does something, as long as every process runs but replicas.
    async fn tolerant<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            (_, error) = ended(&mut [], &mut self.agents, &mut self.demo, &mut self.redis) => Err(error),
            done = work => done,
        }
    }

    /// Ends the processes in the order in which that is least noticed, and removes the folder.
    async fn clear(&mut self) -> Result<()> {
        let style = crate::report::Style::of_stdout();
        let agents = std::mem::take(&mut self.agents);
        let replicas: Vec<Service> = self.replicas.drain(..).filter_map(|replica| replica.service).collect();
        let demo: Vec<Service> = self.demo.take().into_iter().collect();
        let redis: Vec<Service> = self.redis.take().into_iter().collect();
        let mut told = false;
        for (name, services) in [("agentk", agents), ("kas", replicas), ("Redis", redis), ("demo API", demo)]
        {
            if services.is_empty() {
                continue;
            }
            if !std::mem::replace(&mut told, true) {
                line(format_args!("\n{}", style.bold("Stopping")));
            }
            let (count, began) = (services.len(), Instant::now());
            let mut late = Vec::new();
            let mut stops = JoinSet::new();
            for service in services {
                stops.spawn(async { (service.name(), service.stop(END_WITHIN).await) });
            }
            while let Some(stopped) = stops.join_next().await {
                let (name, how) = stopped.map_err(|error| anyhow!(error))?;
                let how = how?;
                if how != "ended" {
                    late.push(format!("; {name} {how}"));
                }
            }
            let count = if count == 1 { String::new() } else { format!("{count} ") };
            let took = style.dim(human(began.elapsed()));
            line(format_args!("     {} {count}ended {took}{}", pad(name), late.concat()));
        }
        self.balancer = Balancer::default();
        if let Some(dir) = self.dir.take() {
            let path = dir.path().to_owned();
            dir.close().with_context(|| format!("cannot remove {}", path.display()))?;
            line(format_args!("     {} removed {}", pad("folder"), style.dim(path.display())));
        }
        Ok(())
    }
}

fn pad(name: &str) -> String {
    format!("{name:<10}")
}
