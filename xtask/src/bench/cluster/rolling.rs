//! Rolling restarts under load.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep},
};

use super::{
    super::processes::Ground,
    api::Api,
    loss::held,
    stage::{Balancer, Options, Stage},
    times::Times,
};

/// `drain.delay` of the replicas: a fifth of the default, and ten times what the load balancer needs to learn.
pub(super) const DRAIN_DELAY: &str = "1s";
/// Agents, each an agentk of its own.
const AGENTS: std::ops::RangeInclusive<i64> = 41..=43;
/// Between two calls of each of the two kinds: together 200 per second.
const EVERY: Duration = Duration::from_millis(10);

/// What the restarts showed.
#[derive(Default)]
pub(super) struct Rolled {
    pub(super) restarts: usize,
    pub(super) calls: u64,
    pub(super) failed: u64,
    pub(super) why: Vec<String>,
    /// From SIGTERM to the end of the process.
    pub(super) leaving: Times,
    /// From the start of a process until all know each other.
    pub(super) joining: Times,
    /// Of the calls.
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

/// Calls in turn whom `pick` names, until it is over.
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
                    let mut times = shared.times.lock().unwrap_or_else(PoisonError::into_inner);
                    times.push(called.elapsed());
                }
                Err(error) => {
                    shared.failed.fetch_add(1, Ordering::Relaxed);
                    let mut why = shared.why.lock().unwrap_or_else(PoisonError::into_inner);
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

/// Restarts one replica after the other.
pub(super) async fn restarts(ground: &Ground, count: usize) -> anyhow::Result<Rolled> {
    let options = Options { drain_delay: DRAIN_DELAY, ..Options::default() };
    let mut stage = Stage::new(ground, "rolling", 3, options)?.start().await?;
    let balancer = Arc::new(Balancer::start(&stage).await?);
    let agents = AGENTS
        .map(|number| ground.agentk_at(balancer.address, number, 2))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for number in AGENTS {
        held(&stage.replicas[0].api, number, 2).await?;
    }
    let shared = Arc::new(Shared::default());
    shared.victim.store(usize::MAX, Ordering::Relaxed);
    let apis = || stage.replicas.iter().map(|replica| replica.api.apart()).collect::<Vec<_>>();
    let of = Arc::clone(&shared);
    let others = load(Arc::clone(&shared), "through the others", apis(), move |index| {
        index != of.victim.load(Ordering::Relaxed)
    });
    let turn = Arc::clone(&balancer);
    let robin = load(Arc::clone(&shared), "round robin", apis(), move |index| turn.is_ready(index));
    let tasks = [tokio::spawn(others), tokio::spawn(robin)];
    let mut rolled = Rolled::default();
    for turn in 0..count {
        let victim = turn % 3;
        sleep(Duration::from_millis(300)).await;
        shared.victim.store(victim, Ordering::Relaxed);
        sleep(Duration::from_millis(100)).await;
        rolled.leaving.push(stage.leave(victim).await?);
        let begin = Instant::now();
        stage.spawn(victim)?;
        stage.ready(victim).await?;
        stage.meshed().await?;
        rolled.joining.push(begin.elapsed());
        shared.victim.store(usize::MAX, Ordering::Relaxed);
        // What an operator's rollout waits for is readiness; agents look for a second replica by themselves.
        for number in AGENTS {
            held(&stage.replicas[victim].api, number, 2).await.with_context(|| agents[0].tail())?;
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
    rolled.why = std::mem::take(&mut *shared.why.lock().unwrap_or_else(PoisonError::into_inner));
    rolled.times.extend(std::mem::take(&mut *shared.times.lock().unwrap_or_else(PoisonError::into_inner)));
    Ok(rolled)
}
