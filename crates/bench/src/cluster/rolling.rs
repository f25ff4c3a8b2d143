//! Rolling restarts under load.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep},
};

use super::{
    api::Api,
    balancer::Balancer,
    deployment::{Deployment, Options},
    failover::held,
};
use crate::{environment::Environment, times::Times};

/// `drain.delay` of the replicas: a fifth of the default, and ten times the probe interval of the load
/// balancer.
pub(super) const DRAIN_DELAY: &str = "1s";
/// The agents. Each is one agentk.
const AGENTS: std::ops::RangeInclusive<i64> = 41..=43;
/// Interval of the calls of each of the two kinds; together they are 200 per second.
const EVERY: Duration = Duration::from_millis(10);

/// The results of the restarts.
#[derive(Default)]
pub(super) struct Restarts {
    pub(super) restarts: usize,
    pub(super) calls: u64,
    pub(super) failed: u64,
    pub(super) why: Vec<String>,
    /// From SIGTERM until the process has exited.
    pub(super) leaving: Times,
    /// From the start of a process until all replicas know each other.
    pub(super) joining: Times,
    /// Latency of the calls.
    pub(super) times: Times,
}

#[derive(Default)]
struct Shared {
    calls: AtomicU64,
    failed: AtomicU64,
    why: Mutex<Vec<String>>,
    times: Mutex<Vec<Duration>>,
    stop: AtomicBool,
    /// The replica that is being restarted.
    victim: AtomicUsize,
}

/// Calls in turn each replica that `pick` accepts, until it is stopped.
async fn load(shared: Arc<Shared>, name: &'static str, apis: Vec<Api>, pick: impl Fn(usize) -> bool) {
    let begin = Instant::now();
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut open = JoinSet::new();
    let mut turn = 0_usize;
    let mut agents = AGENTS.cycle();
    while !shared.stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        let Some(next) = (0..apis.len()).map(|step| (turn + step) % apis.len()).find(|index| pick(*index))
        else {
            shared.failed.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        turn = next + 1;
        let (shared, api, agent) = (Arc::clone(&shared), apis[next].clone(), agents.next().unwrap_or(1));
        open.spawn(async move {
            shared.calls.fetch_add(1, Ordering::Relaxed);
            let called = Instant::now();
            match api.echo(agent).await {
                Ok(()) => {
                    let mut times = shared.times.lock();
                    times.push(called.elapsed());
                }
                Err(error) => {
                    shared.failed.fetch_add(1, Ordering::Relaxed);
                    let mut why = shared.why.lock();
                    if why.len() < 10 {
                        let at = called - begin;
                        why.push(format!("{name}, replica {next}, agent {agent}, at {at:.1?}: {error:#}"));
                    }
                }
            }
        });
        while open.try_join_next().is_some() {}
    }
    while open.join_next().await.is_some() {}
}

/// Restarts one replica after another.
pub(super) async fn restarts(environment: &Environment, count: usize) -> anyhow::Result<Restarts> {
    let options = Options { drain_delay: DRAIN_DELAY, ..Options::default() };
    let mut deployment = Deployment::new(environment, "rolling", 3, options)?.start().await?;
    let balancer = Arc::new(Balancer::start(&deployment).await?);
    let agents = AGENTS
        .map(|number| environment.agentk_at(balancer.address, number, 2))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for number in AGENTS {
        held(&deployment.replicas[0].api, number, 2).await?;
    }
    let shared = Arc::new(Shared::default());
    shared.victim.store(usize::MAX, Ordering::Relaxed);
    let apis = || deployment.replicas.iter().map(|replica| replica.api.apart()).collect::<Vec<_>>();
    let state = Arc::clone(&shared);
    let others_only = load(Arc::clone(&shared), "to the other replicas", apis(), move |index| {
        index != state.victim.load(Ordering::Relaxed)
    });
    let probe = Arc::clone(&balancer);
    let round_robin = load(Arc::clone(&shared), "round robin", apis(), move |index| probe.is_ready(index));
    let tasks = [tokio::spawn(others_only), tokio::spawn(round_robin)];
    let mut rolled = Restarts::default();
    for turn in 0..count {
        let victim = turn % 3;
        sleep(Duration::from_millis(300)).await;
        shared.victim.store(victim, Ordering::Relaxed);
        sleep(Duration::from_millis(100)).await;
        rolled.leaving.push(deployment.shut_down(victim).await?);
        let begin = Instant::now();
        deployment.spawn(victim)?;
        deployment.ready(victim).await?;
        deployment.meshed().await?;
        rolled.joining.push(begin.elapsed());
        shared.victim.store(usize::MAX, Ordering::Relaxed);
        // Kubernetes waits for readiness; the agents then look for a second replica by themselves.
        for number in AGENTS {
            held(&deployment.replicas[victim].api, number, 2).await.with_context(|| agents[0].tail())?;
        }
        rolled.restarts += 1;
    }
    sleep(Duration::from_secs(1)).await;
    shared.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await?;
    }
    rolled.calls = shared.calls.load(Ordering::Relaxed);
    rolled.failed = shared.failed.load(Ordering::Relaxed);
    rolled.why = std::mem::take(&mut *shared.why.lock());
    rolled.times.extend(std::mem::take(&mut *shared.times.lock()));
    Ok(rolled)
}
