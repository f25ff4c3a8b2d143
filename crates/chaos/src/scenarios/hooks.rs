//! Replicas are killed in each step of a webhook: S51.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use history::{Hook, Micros};
use ids::{AgentId, ReplicaId};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use testkit::{kas::within, network::Traffic};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{interval, sleep},
};
use tokio_util::sync::CancellationToken;

use super::process::RATE;
use crate::{
    clock::{self, millis},
    cluster_server::Letter,
    hooks::{self, Senders},
    load::Shared,
    measure::T_HOOK,
    run::{Run, between},
};

/// Agents that are known and then away, until the end.
pub(super) const AWAY: i64 = 3;
/// The host of their processes, and their connections.
const HOST: usize = 1;
const CONNECTIONS: usize = 2;
/// Everything that is waited for takes at most this long.
const LONG: Duration = Duration::from_secs(60);
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// The time between two of the hooks that come all the time.
const EVERY: Duration = Duration::from_millis(60);
/// A hook that is older than this, in milliseconds, has been copied, unless something is wrong.
const OLD: u64 = 1_000;

/// What has happened to a hook when a replica is killed.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The replica that the sender asked has it, and cannot pass it on.
    Edge,
    /// Its home has it, and the other holder does not.
    Home,
    /// Both have it, and its agent is away.
    Copied,
    /// Its receiver has it, and has not answered.
    Delivering,
    /// Its receiver has taken it, and the other holder does not know that.
    Told,
}

impl Step {
    const ALL: [Self; 5] = [Self::Edge, Self::Home, Self::Copied, Self::Delivering, Self::Told];
}

/// Hooks that come all the time, for every agent and through every replica.
struct Stream {
    stop: CancellationToken,
    task: JoinHandle<Result<()>>,
}

impl Stream {
    fn start(senders: Arc<Senders>, history: Shared, agents: Vec<i64>, doors: usize, seed: u64) -> Self {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut tick, mut sent) = (interval(EVERY), JoinSet::new());
            loop {
                tokio::select! {
                    _ = tick.tick() => {}
                    () = stopped.cancelled() => break,
                }
                let mut letter = Letter { name: senders.name(), ..Letter::default() };
                match rng.random_range(0..20) {
                    0 => letter.status = 404,
                    1..4 => letter.busy = rng.random_range(1..3),
                    4..7 => letter.hold = rng.random_range(1..500),
                    _ => {}
                }
                let agent = agents[rng.random_range(0..agents.len())];
                let door = rng.random_range(0..doors);
                let (senders, history) = (Arc::clone(&senders), Arc::clone(&history));
                sent.spawn(async move { senders.insist(&history, &letter, agent, door).await });
            }
            while let Some(insisted) = sent.join_next().await {
                insisted??;
            }
            Ok(())
        });
        Self { stop, task }
    }

    /// Begins no more, and waits until every hook is accepted.
    async fn stop(self) -> Result<()> {
        self.stop.cancel();
        self.task.await?
    }
}

/// The replicas that run, in the order in which they keep hooks of an agent: its home, the other holder, and
/// the rest.
fn order(run: &Run, agent: i64) -> Result<Vec<usize>> {
    let agent = AgentId::new(agent).context("an agent has an id")?;
    let mut running = run.mesh.running();
    running.sort_by_cached_key(|n| Reverse(ids::home_rank(agent, &ReplicaId::new(&run.name(*n)))));
    Ok(running)
}

/// Waits until each replica knows the hooks of all agents, and what came a while ago is on two replicas.
async fn steady(run: &Run, agents: &[i64]) -> Result<()> {
    for n in run.mesh.running() {
        let caller = run.mesh.caller(n).await?;
        for agent in agents {
            within(LONG, "hooks are known, and on two replicas", async || {
                let listed = hooks::list(&caller, *agent).await;
                let is_steady = listed.as_ref().is_ok_and(|listed| {
                    listed.known && listed.kept.iter().all(|hook| hook.age_ms < OLD || hook.copies == 2)
                });
                if !is_steady {
                    sleep(LOOK).await;
                }
                Ok(if is_steady { Ok(()) } else { Err(format!("agent {agent} at {n}: {listed:?}")) })
            })
            .await?;
        }
    }
    Ok(())
}

/// Waits until a hook of an agent is delivered, as its home says, and returns when a look began that saw
/// that.
async fn delivered(run: &Run, agent: i64, id: &str) -> Result<Micros> {
    within(LONG, &format!("hook {id} of agent {agent} is delivered"), async || {
        let home = *order(run, agent)?.first().context("a replica runs")?;
        let at = clock::now();
        let listed = match run.mesh.caller(home).await {
            Ok(caller) => hooks::list(&caller, agent).await,
            Err(error) => Err(error),
        };
        let is_delivered = listed.as_ref().is_ok_and(|listed| {
            listed.replica == run.name(home) && listed.kept.iter().all(|hook| hook.id != id)
        });
        if !is_delivered {
            sleep(LOOK).await;
        }
        Ok(if is_delivered { Ok(at) } else { Err(format!("{listed:?}")) })
    })
    .await
}

/// Sends a hook, and does not wait for the answer.
fn sending(run: &Run, letter: &Letter, agent: i64, door: usize) -> Result<JoinHandle<Hook>> {
    let (senders, letter) = (run.outside.hooks()?, letter.clone());
    Ok(tokio::spawn(async move { senders.send(&letter, agent, door).await }))
}

async fn pause(run: &mut Run, milliseconds: std::ops::Range<u64>) {
    sleep(Duration::from_millis(run.rng.random_range(milliseconds))).await;
}

/// Kills a replica when a hook has got so far, and returns which.
async fn strike(run: &mut Run, step: Step, agent: i64) -> Result<usize> {
    let senders = run.outside.hooks()?;
    let [home, second, third] = order(run, agent)?[..] else { anyhow::bail!("not three replicas run") };
    let mut letter = Letter { name: senders.name(), ..Letter::default() };
    run.say(&format!("{step:?}: {} for agent {agent}", letter.name));
    match step {
        Step::Edge | Step::Home => {
            let (victim, other) = if matches!(step, Step::Edge) { (third, home) } else { (home, second) };
            let what = format!("replica {victim} is cut from {other}");
            let cut = run.cut(&what, &between(&[victim], &[other], Traffic::All))?;
            let sent = sending(run, &letter, agent, victim)?;
            pause(run, 100..800).await;
            run.kill(victim).await?;
            run.heal(cut)?;
            let hook = sent.await?;
            run.history.lock().hooks.push(hook.clone());
            // Else the cut was noticed, and a third replica has it.
            if !hook.is_accepted() {
                run.say("its sender has no answer, and repeats it");
                senders.insist(&run.history, &letter, agent, second).await?;
            }
            Ok(victim)
        }
        Step::Copied => {
            let door = run.rng.random_range(0..3);
            senders.insist(&run.history, &letter, agent, door).await?;
            let victim = if run.rng.random() { home } else { second };
            run.kill(victim).await?;
            Ok(victim)
        }
        Step::Delivering | Step::Told => {
            letter.hold = if matches!(step, Step::Told) { 1_200 } else { 4_000 };
            let hook = senders.insist(&run.history, &letter, agent, home).await?;
            let id = hook.id.context("an accepted hook has an id")?;
            if matches!(step, Step::Told) {
                let what = format!("replica {home} is cut from {second}");
                let cut = run.cut(&what, &between(&[home], &[second], Traffic::All))?;
                sleep(Duration::from_millis(letter.hold)).await;
                pause(run, 100..500).await;
                run.kill(home).await?;
                run.heal(cut)?;
            } else {
                pause(run, 100..800).await;
                let at = run.kill(home).await?;
                let seen = delivered(run, agent, &id).await?;
                run.measure(&T_HOOK, [millis(seen.saturating_sub(at))]);
            }
            Ok(home)
        }
    }
}

/// Kills a replica in each step, one after the other, with everything on two replicas in between.
async fn strikes(run: &mut Run, agents: &[i64]) -> Result<()> {
    let (present, away) = (run.setup.clusters, run.setup.agents + 1);
    for _ in 0..if run.quick { 1 } else { 8 } {
        for step in Step::ALL {
            let agent = match step {
                // Else it is delivered before it is copied, which is an answer, too.
                Step::Home | Step::Copied => away + run.rng.random_range(0..AWAY),
                _ => run.rng.random_range(1..=present),
            };
            let victim = strike(run, step, agent).await?;
            run.restart(victim).await?;
            run.settled(LONG).await?;
            steady(run, agents).await?;
        }
    }
    Ok(())
}

/// S51.
pub(super) async fn in_each_step(run: &mut Run) -> Result<()> {
    let senders = run.outside.hooks()?;
    let (first, present) = (run.setup.agents + 1, run.setup.clusters);
    let away = (first, AWAY, AWAY, CONNECTIONS);
    let swarm = run.swarm(away, None, HOST).await?;
    run.connected(swarm).await?;
    let agents: Vec<i64> = (1..=present).chain(first..first + AWAY).collect();
    steady(run, &agents).await?;
    run.end_swarm(swarm).await?;
    run.load(RATE / 4, 0, 0);
    let (history, replicas) = (Arc::clone(&run.history), run.setup.replicas);
    let stream = Stream::start(senders, history, agents.clone(), replicas, run.rng.random());
    let struck = strikes(run, &agents).await;
    // What is on its way is recorded in any case.
    stream.stop().await?;
    struck?;
    let swarm = run.swarm(away, None, HOST).await?;
    run.connected(swarm).await?;
    let caller = run.mesh.caller(0).await?;
    within(LONG, "no hook waits", async || {
        let waiting = hooks::kept(&caller, agents.iter().copied()).await;
        let waiting = waiting.map(|kept| kept.into_iter().filter(|kept| !kept.dead).count());
        sleep(LOOK).await;
        Ok(if matches!(waiting, Ok(0)) { Ok(()) } else { Err(format!("{waiting:?}")) })
    })
    .await?;
    let (names, accepted): (BTreeSet<String>, usize) = {
        let history = run.history.lock();
        let names = history.hooks.iter().map(|hook| hook.name.clone()).collect();
        (names, history.hooks.iter().filter(|hook| hook.is_accepted()).count())
    };
    let tries = run.history.lock().hooks.len();
    run.notes.push(format!("{} hooks were sent, {tries} times, and {accepted} times accepted.", names.len()));
    Ok(())
}
