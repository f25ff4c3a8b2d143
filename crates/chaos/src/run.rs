//! One run of a scenario: replicas, agents, load, faults, and the history of all of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::{Bounds, Effect, Fault, History, Kind, Life, Micros, Outcome, SECOND, Truth};
use rand::{SeedableRng as _, rngs::StdRng};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    caller::Caller,
    kas::{merge, within},
    mesh::{self, Mesh},
    network::{Cut, Traffic},
    process::Process,
};
use tokio::time::{Instant, sleep};

use crate::{
    client::{Client, Door},
    clock::{self, millis},
    faults::outside::{HOSTS, Outside, Wanted},
    load::{Ids, Load, Plan, Shared},
    measure::{Measured, Row},
    observer::{Observed, Observer, look},
    table::Tracker,
};

/// The port of the Kubernetes endpoint.
pub(crate) const KUBERNETES: u16 = 8154;
/// Agents that are asked for at every replica.
const WATCHED: i64 = 8;
/// Hosts for agents, after those of the replicas.
pub(crate) const AGENT_HOSTS: usize = 2;
/// Everything that a run waits for takes at most this long.
const LONG: Duration = Duration::from_secs(40);

/// How a replica is there in the view of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// In its list of replicas, live or suspect.
    Listed,
    /// In its list, and not suspect.
    Trusted,
    /// It holds agents.
    Holding,
}

/// How a scenario is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) replicas: usize,
    /// Agents that the first swarm connects.
    pub(crate) agents: i64,
    /// Agents that identities exist for, beyond those.
    pub(crate) more_agents: i64,
    /// Of the first agents, how many have an API server.
    pub(crate) clusters: i64,
    /// Connections of each agent.
    pub(crate) connections: usize,
    /// How long a request takes, in milliseconds.
    pub(crate) work: u64,
    /// Configuration of kas over that of every run.
    pub(crate) config: serde_json::Value,
    /// The only replica that the first agents connect to; `None`: any.
    pub(crate) only: Option<usize>,
    /// Replicas that are started at first; the others when the scenario says so.
    pub(crate) started: usize,
    /// What is there beside replicas and agents.
    pub(crate) wanted: Wanted,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            replicas: 3,
            agents: 24,
            more_agents: 0,
            clusters: 12,
            connections: 2,
            work: 20,
            config: json!({}),
            only: None,
            started: usize::MAX,
            wanted: Wanted::default(),
        }
    }
}

/// A process with agents.
#[derive(Debug)]
struct Swarm {
    process: Process,
    history: PathBuf,
}

/// A run.
pub(crate) struct Run {
    // Before the network of the mesh, on which it is.
    pub(crate) outside: Outside,
    pub(crate) mesh: Mesh,
    pub(crate) tracker: Tracker,
    pub(crate) history: Shared,
    pub(crate) client: Arc<Client>,
    /// The token of the user of the Kubernetes endpoint.
    pub(crate) user: String,
    pub(crate) ids: Ids,
    pub(crate) rng: StdRng,
    pub(crate) quick: bool,
    /// How long scenarios whose length can be chosen strike.
    pub(crate) length: Duration,
    pub(crate) setup: Setup,
    pub(crate) measured: Vec<Measured>,
    pub(crate) notes: Vec<String>,
    observer: Observer,
    load: Option<Load>,
    swarms: Vec<Option<Swarm>>,
    folder: TempDir,
    begun: Instant,
}

impl Run {
    /// Starts the replicas and the first swarm, and waits until all replicas see all agents.
    pub(crate) async fn start(
        name: &str,
        tracker: Tracker,
        seed: u64,
        setup: Setup,
        quick: bool,
        length: Duration,
        commit: &str,
    ) -> Result<Self> {
        let folder = TempDir::with_prefix("chaos-")?;
        let user = format!("kasu_{}", &"chaos-".repeat(8)[..43]);
        let hash = ids::TokenHash::of(user.as_bytes()).to_hex();
        let users = folder.path().join("users.yaml");
        testkit::kas::write_private(
            &users,
            &format!("users: [{{name: chaos, tokens: [\"sha256:{hash}\"]}}]\n"),
        )?;
        let mut config = json!({
            "agent": {
                "listen": { "connections_per_token_per_minute": 100_000 },
                "kubernetes_api": {
                    "listen": { "address": format!("0.0.0.0:{KUBERNETES}") },
                    "users": { "file": users },
                    "access": [{ "agents": "all", "users": ["kas:chaos"], "as": "agent" }],
                    "limits": { "per_caller": { "open": 10_000, "upgrades": 10_000 } },
                },
            },
            "drain": { "delay": "1s", "timeout": "10s", "upgrade_grace": "3s" },
        });
        merge(&mut config, setup.config.clone());
        let mut mesh = Mesh::start_with(mesh::Options {
            replicas: setup.replicas,
            agents: setup.agents + setup.more_agents,
            config,
            hosts: true,
            more_hosts: AGENT_HOSTS + HOSTS,
            start: false,
            ..mesh::Options::default()
        })
        .await?;
        let hosts = setup.replicas + AGENT_HOSTS;
        let sizes = (setup.replicas, setup.agents + setup.more_agents, hosts);
        let outside = Outside::start(&mut mesh, tracker, setup.wanted, sizes, KUBERNETES, seed).await?;
        let all: Vec<usize> = (0..setup.replicas).collect();
        let doors = all.iter().map(|n| {
            let wires = outside.doorways.get(*n);
            let straight = (mesh.api(*n).ip(), KUBERNETES).into();
            Door {
                name: mesh.private(*n).to_string(),
                api: wires.map_or(mesh.api(*n), |wires| wires.api.address()),
                kubernetes: wires.map_or(straight, |wires| wires.kubernetes.address()),
            }
        });
        let client = Client::new(doors.collect(), mesh.api_secret().to_vec(), user.clone());
        std::fs::write(folder.path().join("forbidden"), [user.as_str(), &client.token()].join("\n"))?;
        let history = Shared::default();
        history.lock().header = history::Header {
            scenario: name.to_owned(),
            seed,
            commit: commit.to_owned(),
            bounds: Bounds { early: 3 * SECOND, ..Bounds::default() },
            ..history::Header::default()
        };
        let observed: Vec<Observed> =
            all.iter().map(|n| Observed { name: mesh.private(*n).to_string(), api: mesh.api(*n) }).collect();
        let watched: Vec<i64> = (1..=setup.agents.min(WATCHED)).collect();
        let observer = Observer::start(&observed, &watched, &client, &history);
        let mut run = Self {
            outside,
            mesh,
            tracker,
            history,
            client,
            user,
            ids: Ids::default(),
            rng: StdRng::seed_from_u64(seed),
            quick,
            length,
            setup,
            measured: Vec::new(),
            notes: Vec::new(),
            observer,
            load: None,
            swarms: Vec::new(),
            folder,
            begun: Instant::now(),
        };
        let first: Vec<usize> = all.into_iter().take(run.setup.started).collect();
        run.mesh.start_replicas(&first).await?;
        for n in first {
            run.lives(n);
        }
        let plan = (1, run.setup.agents, run.setup.clusters, run.setup.connections);
        let only = run.setup.only;
        run.swarm(plan, only, 0).await?;
        run.settled(LONG).await.context("before the first fault")?;
        Ok(run)
    }

    /// How long the run has lasted.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(crate) fn name(&self, n: usize) -> String {
        self.mesh.private(n).to_string()
    }

    /// The row of a time in which replicas learn of another one: with Redis, it is the life of its key.
    pub(crate) fn learns(&self, gossip: &'static Row, redis: &'static Row) -> &'static Row {
        match self.tracker {
            Tracker::Gossip => gossip,
            Tracker::Redis => redis,
        }
    }

    /// Prints what happens, and when.
    pub(crate) fn say(&self, what: &str) {
        eprintln!("  [{:>6.1} s] {what}", self.begun.elapsed().as_secs_f64());
    }

    fn lives(&mut self, n: usize) {
        let life = Life { replica: self.name(n), epoch: None, from: clock::now(), to: None };
        self.history.lock().lives.push(life);
    }

    fn died(&mut self, n: usize) {
        let name = self.name(n);
        if let Some(life) = self.history.lock().lives.iter_mut().rfind(|life| life.replica == name) {
            life.to = life.to.or(Some(clock::now()));
        }
    }

    // Agents.

    /// Starts a swarm: agents (first, count, those with an API server, connections), only at this replica, on
    /// this host for agents. Returns its number, and does not wait until it is connected.
    pub(crate) async fn swarm(
        &mut self,
        plan: (i64, i64, i64, usize),
        only: Option<usize>,
        host: usize,
    ) -> Result<usize> {
        let replicas = only.map_or_else(|| (0..self.setup.replicas).collect(), |only| vec![only]);
        let addresses = replicas.into_iter().map(|n| {
            let wire = self.outside.doorways.get(n).map(|wires| wires.agents.address());
            wire.unwrap_or_else(|| self.mesh.agents(n))
        });
        self.swarm_at(plan, addresses.collect(), host).await
    }

    /// As [`swarm`](Self::swarm), at these listeners for agents.
    pub(crate) async fn swarm_at(
        &mut self,
        (first, count, clusters, connections): (i64, i64, i64, usize),
        addresses: Vec<SocketAddr>,
        host: usize,
    ) -> Result<usize> {
        let addresses: Vec<String> = addresses.iter().map(|at| format!("grpc://{at}")).collect();
        let number = self.swarms.len();
        let history = self.folder.path().join(format!("swarm-{number}.jsonl"));
        let arguments = [
            "swarm".to_owned(),
            format!("--kas={}", addresses.join(",")),
            format!("--first={first}"),
            format!("--count={count}"),
            format!("--clusters={}", first + clusters),
            format!("--connections={connections}"),
            format!("--work={}", self.setup.work),
            format!("--forbidden={}", self.folder.path().join("forbidden").display()),
            format!("--history={}", history.display()),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let program = std::env::current_exe()?;
        let host = self.mesh.network().host(self.setup.replicas + host);
        let process = Process::start_in(Some(host), "swarm", &program, &arguments, &[]).await?;
        process
            .logged("that it has started", |line| (line["message"] == "the swarm has started").then_some(()))
            .await?;
        self.swarms.push(Some(Swarm { process, history }));
        Ok(number)
    }

    /// Waits until each agent of a swarm has a tunnel.
    pub(crate) async fn connected(&self, swarm: usize) -> Result<()> {
        let swarm = self.swarms[swarm].as_ref().context("the swarm runs")?;
        let connected =
            |line: &serde_json::Value| (line["message"] == "the swarm is connected").then_some(());
        swarm.process.logged("that it is connected", connected).await
    }

    /// Shuts a swarm down, and takes what its agents recorded.
    pub(crate) async fn end_swarm(&mut self, swarm: usize) -> Result<()> {
        let swarm = self.swarms[swarm].take().context("the swarm runs")?;
        let recorded = ended(swarm).await?;
        add(&mut self.history.lock(), recorded);
        Ok(())
    }

    /// Returns the agents among the watched ones whose only replica is this one, and those that have another
    /// one too.
    pub(crate) fn held_by(&self, n: usize) -> (BTreeSet<i64>, BTreeSet<i64>) {
        let last = self.observer.last.lock();
        let name = self.name(n);
        let own = last.get(&name).map(|(_, seen)| seen.own.clone()).unwrap_or_default();
        let elsewhere: BTreeSet<i64> = last
            .iter()
            .filter(|(other, _)| **other != name)
            .flat_map(|(_, (_, seen))| &seen.own)
            .copied()
            .collect();
        (own.difference(&elsewhere).copied().collect(), own.intersection(&elsewhere).copied().collect())
    }

    // Load.

    /// Begins the load.
    pub(crate) fn load(&mut self, rate: u32, watches: usize, execs: usize) {
        let plan = Plan {
            rate,
            agents: (1, self.setup.agents + 1),
            clusters: self.setup.clusters + 1,
            watches,
            execs,
            deadline: Duration::from_secs(10),
        };
        self.load_with(plan);
    }

    pub(crate) fn load_with(&mut self, plan: Plan) {
        self.load = Some(Load::start(&self.client, &self.history, &self.ids, plan, self.setup.replicas));
    }

    /// Ends the load: what is open is awaited.
    pub(crate) async fn unload(&mut self) {
        if let Some(load) = self.load.take() {
            let skipped = load.stop().await;
            if skipped > 0 {
                self.notes.push(format!("{skipped} requests were not sent, because too many were open."));
            }
        }
    }

    // Faults.

    /// Records a fault that begins now, and returns its number.
    pub(crate) fn fault(&mut self, what: impl Into<String>, effect: Effect) -> usize {
        let what = what.into();
        self.say(&what);
        let mut history = self.history.lock();
        history.faults.push(Fault { from: clock::now(), to: None, what, effect });
        history.faults.len() - 1
    }

    pub(crate) fn fault_ends(&mut self, fault: usize) {
        self.history.lock().faults[fault].to = Some(clock::now());
    }

    fn struck(&mut self, n: usize, what: &str) {
        let effect = Effect::Disabled(BTreeSet::from([self.name(n)]));
        let fault = self.fault(format!("{what} {n}"), effect);
        self.fault_ends(fault);
    }

    /// Kills a replica, and returns when.
    pub(crate) async fn kill(&mut self, n: usize) -> Result<Micros> {
        self.struck(n, "SIGKILL replica");
        let at = clock::now();
        self.mesh.kill(n).await?;
        self.died(n);
        Ok(at)
    }

    /// Starts a replica again, and waits until it is ready.
    pub(crate) async fn restart(&mut self, n: usize) -> Result<()> {
        self.mesh.restart(n).await?;
        self.lives(n);
        self.say(&format!("replica {n} is back"));
        Ok(())
    }

    /// Starts a replica for the first time.
    pub(crate) async fn join(&mut self, n: usize) -> Result<()> {
        self.mesh.start_replicas(&[n]).await?;
        self.lives(n);
        self.say(&format!("replica {n} has joined"));
        Ok(())
    }

    /// Shuts a replica down cleanly, and returns how long that took.
    pub(crate) async fn leave(&mut self, n: usize) -> Result<Duration> {
        // Until it has ended, what it holds is on its way to others.
        let effect = Effect::Disabled(BTreeSet::from([self.name(n)]));
        let fault = self.fault(format!("SIGTERM replica {n}"), effect);
        let begun = Instant::now();
        self.mesh.leave(n, LONG).await?;
        self.fault_ends(fault);
        self.died(n);
        Ok(begun.elapsed())
    }

    /// Pauses a replica for this long, and returns when it went on.
    pub(crate) async fn pause(&mut self, n: usize, time: Duration) -> Micros {
        let effect = Effect::Disabled(BTreeSet::from([self.name(n)]));
        let fault = self.fault(format!("SIGSTOP replica {n} for {time:?}"), effect);
        self.mesh.kas(n).process.pause();
        sleep(time).await;
        self.mesh.kas(n).process.resume();
        self.fault_ends(fault);
        clock::now()
    }

    /// Drops these packets from now on, and nothing else.
    pub(crate) fn cut(&mut self, what: &str, cuts: &[Cut]) -> Result<usize> {
        let replicas = self.setup.replicas;
        let between = cuts.iter().filter(|cut| cut.from < replicas && cut.to < replicas);
        let pairs = between.map(|cut| (self.name(cut.from), self.name(cut.to))).collect();
        let fault = self.fault(what, Effect::Cut(pairs));
        self.mesh.network().cut(cuts)?;
        Ok(fault)
    }

    /// Lets everything pass again, and returns when.
    pub(crate) fn heal(&mut self, fault: usize) -> Result<Micros> {
        self.mesh.network().cut(&[])?;
        self.fault_ends(fault);
        self.say("the network is whole again");
        Ok(clock::now())
    }

    // Measurements.

    pub(crate) fn measure(&mut self, row: &Row, values: impl IntoIterator<Item = f64>) {
        let index = self.measured.iter().position(|measured| measured.name == row.name);
        let index = index.unwrap_or_else(|| {
            self.measured.push(Measured::new(row));
            self.measured.len() - 1
        });
        self.measured[index].values.extend(values);
    }

    /// Measures, for each other running replica, the time from `since` to its first look at which the replica
    /// is there in this way, or is not.
    pub(crate) async fn seen_by_others(
        &mut self,
        row: &Row,
        n: usize,
        since: Micros,
        way: Way,
        present: bool,
    ) -> Result<()> {
        let name = self.name(n);
        let others: Vec<String> =
            self.mesh.running().into_iter().filter(|other| *other != n).map(|n| self.name(n)).collect();
        let shared = Arc::clone(&self.history);
        let trusted = Arc::clone(&self.observer.trusted);
        let times = within(LONG, &format!("the others see that {name} is there: {present}"), async || {
            if way == Way::Trusted {
                let trusted = trusted.lock();
                let first = |observer: &String| {
                    let mut looks = trusted.iter().filter(|(of, at, _)| of == observer && *at >= since);
                    looks.find(|(.., trusts)| trusts.contains(&name) == present).map(|(_, at, _)| *at)
                };
                let times: Option<Vec<Micros>> = others.iter().map(first).collect();
                return Ok(times.ok_or("not all"));
            }
            let history = shared.lock();
            let first = |observer: &String| {
                let looks = history.views.iter().filter(|view| {
                    let kind = view.agents.is_some() == (way != Way::Listed);
                    view.observer == *observer && kind && view.until >= since
                });
                let there = |view: &history::View| match (way, &view.agents) {
                    (Way::Holding, Some(agents)) => agents.values().any(|holders| holders.contains(&name)),
                    _ => view.live.contains_key(&name),
                };
                looks.filter(|view| there(view) == present).map(|view| view.at.max(since)).min()
            };
            let times: Option<Vec<Micros>> = others.iter().map(first).collect();
            Ok(times.ok_or("not all"))
        })
        .await?;
        self.measure(row, times.into_iter().map(|at| millis(at - since)));
        Ok(())
    }

    /// Counts replicas that lived and were neither live nor suspect in a list of these observers in this
    /// time.
    pub(crate) fn false_deaths(&self, from: Micros, to: Micros, observers: &[usize]) -> u32 {
        let observers: BTreeSet<String> = observers.iter().map(|n| self.name(*n)).collect();
        let history = self.history.lock();
        let all: BTreeSet<&str> = history
            .lives
            .iter()
            .filter(|life| life.from < from && life.to.is_none_or(|end| end > to))
            .map(|life| life.replica.as_str())
            .collect();
        let mut deaths = 0;
        for view in &history.views {
            let lists = view.agents.is_none() && observers.contains(&view.observer);
            if lists && view.until >= from && view.at <= to {
                let missing = all.iter().filter(|name| !view.live.contains_key(**name)).count();
                deaths += u32::try_from(missing).unwrap_or(u32::MAX);
            }
        }
        deaths
    }

    /// The times from `since` to the first response to each of these agents.
    pub(crate) fn first_responses(&self, agents: &BTreeSet<i64>, since: Micros) -> Vec<f64> {
        let history = self.history.lock();
        let mut first: BTreeMap<i64, Micros> = BTreeMap::new();
        for request in &history.requests {
            if request.outcome == Some(Outcome::Ok)
                && matches!(request.kind, Kind::Unary | Kind::Http)
                && let Some(ended) = request.ended
                && ended > since
            {
                let earliest = first.entry(request.agent).or_insert(ended);
                *earliest = ended.min(*earliest);
            }
        }
        // None until now counts as what was waited for it.
        agents
            .iter()
            .map(|agent| millis(first.get(agent).copied().unwrap_or_else(clock::now) - since))
            .collect()
    }

    // Convergence.

    /// Waits until every running replica sees what is true, and returns how long that took.
    pub(crate) async fn settled(&self, time: Duration) -> Result<Duration> {
        let begun = Instant::now();
        let running: BTreeSet<String> = self.mesh.running().into_iter().map(|n| self.name(n)).collect();
        let agents = self.setup.agents.min(WATCHED);
        let since = clock::now();
        within(time, "all replicas see the same", async || {
            let last = self.observer.last.lock();
            let mut own: BTreeMap<i64, BTreeSet<String>> =
                (1..=agents).map(|n| (n, BTreeSet::new())).collect();
            for name in &running {
                let Some((at, seen)) = last.get(name) else {
                    return Ok(Err(format!("{name} was not asked")));
                };
                if *at < since {
                    return Ok(Err(format!("{name} has not answered since")));
                }
                for agent in &seen.own {
                    own.entry(*agent).or_default().insert(name.clone());
                }
            }
            for name in &running {
                let seen = &last[name].1;
                if seen.live != running {
                    return Ok(Err(format!("{name} takes {:?} for alive", seen.live)));
                }
                if seen.agents != own {
                    return Ok(Err(format!("{name} sees {:?} and {own:?} is true", seen.agents)));
                }
            }
            if own.values().any(BTreeSet::is_empty) {
                return Ok(Err("an agent is nowhere".to_owned()));
            }
            Ok(Ok(()))
        })
        .await?;
        Ok(begun.elapsed())
    }

    /// Measures how long it takes until all views are equal, from now on.
    pub(crate) async fn heals(&mut self, row: &Row) -> Result<()> {
        let took = self.settled(LONG).await?;
        self.measure(row, [took.as_secs_f64() * 1000.0]);
        Ok(())
    }

    /// Ends the run: stops the load, compares all views with the truth, ends the swarms and reads what their
    /// agents recorded. Returns the whole history.
    pub(crate) async fn finish(mut self) -> Result<Finished> {
        self.unload().await;
        self.mesh.network().cut(&[])?;
        let settled = self.settled(LONG).await;
        if let Err(error) = &settled {
            self.notes.push(format!("The views did not become equal: {error:#}"));
        }
        // The looks that the truth is compared with.
        let mut truth = Truth::default();
        let watched: Vec<i64> = (1..=self.setup.agents.min(WATCHED)).collect();
        let mut holders: BTreeMap<i64, BTreeSet<String>> = BTreeMap::new();
        for n in self.mesh.running() {
            let caller = Caller::connect(self.mesh.api(n), Some(self.client.token())).await?;
            let (_, seen) = look(&caller, &watched).await?;
            truth.live.insert(self.name(n));
            for agent in seen.own {
                holders.entry(agent).or_default().insert(self.name(n));
            }
        }
        truth.agents = Some(holders);
        sleep(Duration::from_millis(1500)).await;
        self.observer.stop().await;
        truth.at = clock::now();
        let mut recorded = Vec::new();
        for swarm in self.swarms.iter_mut().filter_map(Option::take) {
            recorded.push(ended(swarm).await?);
        }
        let mut history = std::mem::take(&mut *self.history.lock());
        recorded.into_iter().for_each(|recorded| add(&mut history, recorded));
        ensure!(!history.views.is_empty(), "no replica answered");
        history.truths.push(truth);
        history.header.end = clock::now();
        // Each swarm ended in order, or the run has failed above.
        history.header.runs_complete = true;
        Ok(Finished { history, measured: self.measured, notes: self.notes, took: self.begun.elapsed() })
    }
}

/// Ends a swarm and returns what its agents recorded.
async fn ended(swarm: Swarm) -> Result<History> {
    swarm.process.terminate();
    let status = swarm.process.exited(LONG).await?;
    ensure!(status.success(), "a swarm failed, so that its records are incomplete: {status}");
    let file = std::fs::File::open(&swarm.history)?;
    history::read(std::io::BufReader::new(file)).context("what a swarm recorded")
}

fn add(history: &mut History, more: History) {
    history.runs.extend(more.runs);
    history.presences.extend(more.presences);
    history.searches.extend(more.searches);
}

/// What a run leaves.
pub(crate) struct Finished {
    pub(crate) history: History,
    pub(crate) measured: Vec<Measured>,
    pub(crate) notes: Vec<String>,
    pub(crate) took: Duration,
}

/// Cuts in both directions between each of two groups.
pub(crate) fn between(one: &[usize], other: &[usize], what: Traffic) -> Vec<Cut> {
    one.iter()
        .flat_map(|from| other.iter().map(move |to| (*from, *to)))
        .filter(|(from, to)| from != to)
        .flat_map(|(from, to)| [Cut { from, to, what }, Cut { from: to, to: from, what }])
        .collect()
}
