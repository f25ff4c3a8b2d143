//! The end of a run: what is true then, and what everybody has recorded.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::{History, Invariant, Kind, Metric, Micros, Presence, SECOND, Truth, Version, View};
use testkit::caller::Caller;
use tokio::time::{Instant, sleep, timeout};

use super::{LONG, Run, Setup, Swarm};
use crate::{
    auditing::{self, Audited},
    clock::{self, millis},
    hooks,
    measure::{DISAGREED, Measured},
    observer::look,
    outsiders,
    recorder::NAMES,
    sizes::metrics,
    slope::Slope,
    table::Tracker,
};

/// That an agent has come or left is taken for recorded at most this late. A replica that cannot be asked for
/// longer is paused or cut off, which the history tells.
const LATEST: Micros = 15 * SECOND;

/// The metric of the agents that a replica takes for connected: each has one stream there, whose tunnels it
/// holds.
const CONNECTED: &str = "kas_connected_agents";

/// What a run leaves.
pub(crate) struct Finished {
    pub(crate) history: History,
    pub(crate) measured: Vec<Measured>,
    pub(crate) slopes: Vec<Slope>,
    pub(crate) notes: Vec<String>,
    /// What must have been observed: an invariant that was never checked does not hold.
    pub(crate) required: Vec<Invariant>,
    pub(crate) took: Duration,
}

/// What is recorded at the end of an agent's process.
pub(super) struct Recorded {
    history: History,
    /// The numbers of requests by the names that kas gave them.
    names: HashMap<String, u64>,
}

impl Run {
    /// Ends the run: a guest loses access, the load stops, all views and metrics are compared with the truth,
    /// the swarms end, and what their agents and the replicas recorded is read. Returns the whole history.
    pub(crate) async fn finish(mut self) -> Result<Finished> {
        self.mesh.network().cut(&[])?;
        self.guest_leaves().await?;
        self.unload().await;
        let settled = self.settled(LONG).await;
        if let Err(error) = &settled {
            self.notes.push(format!("The views did not become equal: {error:#}"));
        }
        // What ends with the last requests, such as tunnels that were lent.
        sleep(Duration::from_millis(1500)).await;
        self.agreed().await?;
        self.seen_long_enough().await;
        self.observer.stop().await;
        self.compare().await?;
        if self.outside.hooks.is_some() {
            let running = self.mesh.running();
            let caller = self.mesh.caller(*running.first().context("a replica runs")?).await?;
            let kept = hooks::kept(&caller, 1..=self.setup.agents + self.setup.more_agents).await?;
            self.history.lock().kept.extend(kept);
        }
        let mut recorded = Vec::new();
        for swarm in self.swarms.iter_mut().filter_map(Option::take) {
            recorded.push(ended(swarm).await?);
        }
        let mut history = std::mem::take(&mut *self.history.lock());
        let mut names = std::mem::take(&mut self.names);
        for recorded in recorded {
            add(&mut history, &mut names, recorded);
        }
        if let Some(manifests) = &self.outside.manifests {
            history.planned.extend(manifests.judged()?.planned);
        }
        ensure!(!history.views.is_empty(), "no replica answered");
        let (early, late) = (&mut history.header.bounds.early, self.observer.late());
        if late > *early {
            self.notes.push(format!(
                "Two looks for agents were up to {:.1} s apart. I8 and I9 are that much less strict, up to {:.0} s.",
                millis(late) / 1000.0,
                millis(LATEST) / 1000.0
            ));
        }
        *early = late.clamp(*early, LATEST.max(*early));
        if self.dropped > 0 {
            self.notes.push(format!("Cuts of the network dropped {} packets.", self.dropped));
        }
        if self.setup.audits {
            self.audited(&names, &mut history)?;
        }
        history.header.end = clock::now();
        // Each swarm ended in order, or the run has failed above.
        history.header.runs_complete = true;
        let required = required(&self.setup, self.tracker, &history);
        let Self { measured, slopes, notes, begun, .. } = self;
        Ok(Finished { history, measured, slopes, notes, required, took: begun.elapsed() })
    }

    /// A guest watches, and loses access: the watch must end.
    async fn guest_leaves(&mut self) -> Result<()> {
        if self.setup.clusters == 0 {
            return Ok(());
        }
        let users = self.folder.path().join(outsiders::USERS);
        let end = Instant::now() + LONG;
        // What was struck last may not serve yet.
        loop {
            for replica in self.mesh.running() {
                let id = self.ids.next();
                if let Some(watched) = outsiders::guest(&self.guest, id, replica, &users).await? {
                    self.history.lock().requests.push(watched);
                    return Ok(());
                }
            }
            ensure!(Instant::now() < end, "the guest had no watch, so that nothing could end it");
            let [chaos, guest] = ["chaos-", "guest-"].map(outsiders::token);
            outsiders::write_users(&users, &[("chaos", &chaos), ("guest", &guest)])?;
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Waits until each agent serves as many replicas, as it knows, as hold it, as they know: two ends of the
    /// same connections, of which neither tells the other. What differs in the end is measured.
    async fn agreed(&mut self) -> Result<()> {
        let end = Instant::now() + LONG;
        let wrong = loop {
            sleep(Duration::from_millis(500)).await;
            let served = self.served()?;
            let agents: Vec<i64> = served.keys().copied().collect();
            let mut held: BTreeMap<i64, usize> = BTreeMap::new();
            for n in self.mesh.running() {
                let caller = Caller::connect(self.mesh.api(n), Some(self.client.token())).await?;
                let asked = timeout(3 * LONG, look(&caller, &agents)).await;
                let (_, seen) = asked.context("a replica did not answer")??;
                for agent in seen.own {
                    *held.entry(agent).or_default() += 1;
                }
            }
            let wrong: Vec<String> = served
                .iter()
                .map(|(agent, served)| (agent, served.replicas, held.get(agent).copied().unwrap_or_default()))
                .filter(|(_, served, held)| served != held)
                .map(|(agent, served, held)| format!("{agent} serves {served} and is held by {held}"))
                .collect();
            if wrong.is_empty() || Instant::now() > end {
                break wrong;
            }
        };
        if !wrong.is_empty() {
            let some: Vec<&str> = wrong.iter().take(5).map(String::as_str).collect();
            self.notes.push(format!("Agents and replicas disagree: {}.", some.join("; ")));
        }
        self.measure(&DISAGREED, [f64::from(u32::try_from(wrong.len())?)]);
        Ok(())
    }

    /// Waits until an agent has been at its replica for so long that every view must have it (I9), for runs
    /// that leave none alone for that long.
    async fn seen_long_enough(&self) {
        let wait = {
            let history = self.history.lock();
            let there = |it: &&Presence| it.to.is_none() && !it.replica.is_empty();
            let since = history.presences.iter().filter(there).map(|it| it.from).min();
            let old = since.map(|since| since.saturating_add(history.header.bounds.missing));
            old.map_or(0, |old| old.saturating_sub(clock::now()))
        };
        sleep(Duration::from_micros(wait)).await;
    }

    /// Asks every replica for every agent and for its metrics, and records what is true beside it.
    async fn compare(&mut self) -> Result<()> {
        let all: Vec<i64> = (1..=self.setup.agents + self.setup.more_agents).collect();
        let running = self.mesh.running();
        let mut truth = Truth::default();
        let mut holders: BTreeMap<i64, BTreeSet<String>> =
            all.iter().map(|agent| (*agent, BTreeSet::new())).collect();
        let mut held = BTreeMap::new();
        let mut views = Vec::new();
        let begun = clock::now();
        for n in &running {
            let name = self.name(*n);
            let at = clock::now();
            let asked = async {
                let caller = Caller::connect(self.mesh.api(*n), Some(self.client.token())).await?;
                look(&caller, &all).await
            };
            let (process, seen) = timeout(3 * LONG, asked).await.context("a replica did not answer")??;
            truth.live.insert(name.clone());
            held.insert(*n, seen.own.len());
            for agent in &seen.own {
                holders.entry(*agent).or_default().insert(name.clone());
                // The observer has told where the others are, unless one has come since its last look.
                let mut history = self.history.lock();
                let is_known = |it: &Presence| it.agent == *agent && it.replica == name && it.to.is_none();
                if !history.presences.iter().any(is_known) {
                    history.presences.push(Presence {
                        agent: *agent,
                        replica: name.clone(),
                        connection: None,
                        from: begun,
                        to: None,
                        invalid_since: None,
                    });
                }
            }
            let live = seen.live.iter().map(|name| (name.clone(), Version { epoch: None, version: None }));
            let (live, agents) = (live.collect(), Some(seen.agents));
            let view = View { observer: name, process, at, until: at, live, agents, connections: None };
            views.push((*n, view));
        }
        let somewhere = holders.iter().filter(|(_, holders)| !holders.is_empty()).map(|(agent, _)| *agent);
        let mut listed = self.listed(&somewhere.collect()).await?;
        for (n, mut view) in views {
            view.connections = listed.by.remove(&n);
            self.history.lock().views.push(view);
        }
        truth.connections = Some(listed.truth);
        truth.agents = Some(holders);
        truth.at = clock::now();
        for n in &running {
            #[expect(clippy::cast_precision_loss, reason = "thousands of agents")]
            let truth = held[n] as f64;
            let value = self.counted(*n, CONNECTED, truth).await?;
            let (replica, name) = (self.name(*n), CONNECTED.to_owned());
            self.history.lock().metrics.push(Metric { at: clock::now(), replica, name, value, truth });
            let said = metrics(self.mesh.observability(*n)).await?;
            #[expect(clippy::cast_precision_loss, reason = "a few replicas and thousands of agents")]
            let true_ones = [
                ("kas_replicas_live", running.len() as f64),
                ("kas_table_agents", held[n] as f64),
                ("kas_requests_waiting", 0.0),
                ("kas_requests_long", 0.0),
                ("kas_replicas_unsynced", 0.0),
            ];
            for (name, truth) in true_ones {
                let value = *said.get(name).with_context(|| format!("kas tells {name}"))?;
                let (replica, name) = (self.name(*n), name.to_owned());
                self.history.lock().metrics.push(Metric { at: clock::now(), replica, name, value, truth });
            }
        }
        self.history.lock().truths.push(truth);
        Ok(())
    }

    /// Reads the audit logs of all replicas. What ended has been written: the swarms have ended since.
    fn audited(&self, names: &HashMap<String, u64>, history: &mut History) -> Result<()> {
        let mut audited = Audited::default();
        for n in 0..self.setup.replicas {
            let path = auditing::file(self.folder.path(), n);
            let name = self.name(n);
            if history.lives.iter().any(|life| life.replica == name) {
                let killed = history.lives.iter().filter(|life| life.replica == name && life.killed).count();
                auditing::read(&path, names, killed, &mut audited)?;
            }
        }
        // Many agents are looked at so seldom that a tunnel may come and go in between.
        let all = self.watched.len() >= usize::try_from(self.setup.agents).unwrap_or(usize::MAX);
        let watched = if all { self.watched.iter().copied().collect() } else { BTreeSet::new() };
        audited.add_to(history, &watched);
        Ok(())
    }
}

/// What a run with this setup and history must have observed.
fn required(setup: &Setup, tracker: Tracker, history: &History) -> Vec<Invariant> {
    use Invariant::{I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I12, I13, I14, I15, I19, I20, I21};
    let asked = |kinds: &[Kind]| history.requests.iter().any(|request| kinds.contains(&request.kind));
    // Agents are watched in every run.
    let mut required = vec![I7, I8, I9, I10, I13];
    if tracker == Tracker::Gossip {
        required.extend([I5, I15]);
    }
    if asked(&[Kind::Unary, Kind::Http]) {
        required.extend([I1, I2, I4, I6]);
        if setup.audits {
            required.extend([I3, I12]);
        }
    }
    if asked(&[Kind::Waiter]) {
        required.push(I14);
    }
    // What agents receive is searched, and nothing else.
    if !history.runs.is_empty() {
        required.push(I19);
    }
    if asked(&[Kind::Upgrade]) {
        required.push(I21);
    }
    if setup.clusters > 0 {
        required.push(I20);
    }
    required
}

/// Ends a swarm and returns what its agents recorded.
pub(super) async fn ended(swarm: Swarm) -> Result<Recorded> {
    swarm.process.terminate();
    let status = swarm.process.exited(LONG).await?;
    ensure!(status.success(), "a swarm failed, so that its records are incomplete: {status}");
    let file = std::fs::File::open(&swarm.history)?;
    let history = history::read(std::io::BufReader::new(file)).context("what a swarm recorded")?;
    let mut names = HashMap::new();
    for line in std::fs::read_to_string(swarm.history.with_extension(NAMES))?.lines() {
        let (name, number) = line.split_once(' ').context("a name and a number")?;
        names.insert(name.to_owned(), number.parse()?);
    }
    Ok(Recorded { history, names })
}

pub(super) fn add(history: &mut History, names: &mut HashMap<String, u64>, more: Recorded) {
    history.runs.extend(more.history.runs);
    history.presences.extend(more.history.presences);
    history.searches.extend(more.history.searches);
    history.deliveries.extend(more.history.deliveries);
    names.extend(more.names);
}

#[cfg(test)]
mod tests {
    use history::{Outcome, Request};

    use super::*;

    #[test]
    fn what_a_run_can_show_it_must_have_observed() {
        let setup = Setup { clusters: 0, audits: false, ..Setup::default() };
        let mut history = History::default();
        let needs = |history: &History| required(&setup, Tracker::Redis, history);
        assert_eq!(needs(&history), [7, 8, 9, 10, 13].map(|n: usize| Invariant::ALL[n - 1]));
        history.requests.push(Request::new(1, 1, Kind::Waiter, 0).ended(1, Outcome::Ok));
        assert!(needs(&history).contains(&Invariant::I14));
        assert!(!needs(&history).contains(&Invariant::I19), "nothing has reached an agent");
        history.runs.push(history::Run::new(1, 1, 0));
        assert!(needs(&history).contains(&Invariant::I19));
        let gossips = required(&Setup::default(), Tracker::Gossip, &history);
        assert!([Invariant::I5, Invariant::I15, Invariant::I20].iter().all(|it| gossips.contains(it)));
    }
}
