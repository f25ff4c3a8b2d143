//! One run of a scenario: replicas, agents, load, faults, and the history of all of it.

mod agents;
mod end;
mod listed;
mod routes;
mod setup;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::{Bounds, Effect, Fault, Kind, Life, Micros, Outcome, SECOND};
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
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

pub(crate) use self::{
    end::Finished,
    setup::{Drain, Setup, Tls},
};
use crate::{
    client::{Client, Door},
    clock::{self, millis},
    faults::{
        clock::WallClock,
        outside::{HOSTS, Outside},
        resources::SmallDisk,
        teller::Told,
    },
    load::{Ids, Load, Plan, Shared},
    measure::{Measured, Row},
    observer::{self, Observed, Observer},
    outsiders::{self, Outsiders},
    sizes::{Size, Sized, Sizes},
    slope::Slope,
    table::Tracker,
    written::Written,
};

/// The port of the Kubernetes endpoint.
pub(crate) const KUBERNETES: u16 = 8154;
/// Agents that are asked for at every replica again and again: all, unless there are more. At the end, every
/// replica is asked for all in any case.
const WATCHED: i64 = 200;
/// gRPC streams of every load.
const STREAMS: usize = 3;
/// Hosts for agents, after those of the replicas.
pub(crate) const AGENT_HOSTS: usize = 2;
/// Agents that are asked through one client at the same time.
const ONE_CLIENT: usize = 100;
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
    /// How often a rolling restart is repeated; `None`: as the scenario says.
    pub(crate) restarts: Option<u32>,
    pub(crate) setup: Setup,
    pub(crate) measured: Vec<Measured>,
    pub(crate) notes: Vec<String>,
    pub(crate) slopes: Vec<Slope>,
    /// The wall clock of the replica that the setup names.
    pub(crate) wall: Option<WallClock>,
    /// The disk of the audit logs.
    pub(crate) disk: Option<SmallDisk>,
    observer: Observer,
    /// The agents that the observer asks for.
    watched: Vec<i64>,
    sizes: Sizes,
    loads: Vec<Load>,
    outsiders: Option<Outsiders>,
    guest: Arc<Client>,
    swarms: Vec<Option<Swarm>>,
    /// The numbers of requests by the names that kas gave them, of swarms that have ended.
    names: HashMap<String, u64>,
    /// How many packets cuts of the network have dropped.
    dropped: u64,
    /// The authority that has signed the certificates of listeners for agents.
    certificates: Option<PathBuf>,
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
        (length, restarts): (Duration, Option<u32>),
        commit: &str,
    ) -> Result<Self> {
        let folder = TempDir::with_prefix("chaos-")?;
        let [user, guest] = ["chaos-", "guest-"].map(outsiders::token);
        let users = folder.path().join(outsiders::USERS);
        outsiders::write_users(&users, &[("chaos", &user), ("guest", &guest)])?;
        let mut config = json!({
            "agent": {
                "listen": { "connections_per_token_per_minute": 100_000 },
                "kubernetes_api": {
                    "listen": { "address": format!("0.0.0.0:{KUBERNETES}") },
                    "users": { "file": users },
                    "access": [{ "agents": "all", "users": ["kas:*"], "as": "agent" }],
                    "limits": { "per_caller": { "open": 10_000, "upgrades": 10_000 } },
                },
            },
            "drain": {
                "delay": seconds(setup.drain.delay),
                "timeout": seconds(setup.drain.timeout),
                "upgrade_grace": seconds(setup.drain.grace),
            },
        });
        let disk = match setup.audit_disk {
            None => None,
            Some(kib) => {
                let at = folder.path().join("audit");
                let output = at.join("audit.log");
                merge(&mut config, json!({ "observability": { "audit": { "output": output } } }));
                Some(SmallDisk::new(&at, kib)?)
            }
        };
        merge(&mut config, setup.config.clone());
        let wall = setup.clock.map(|_| WallClock::new(folder.path())).transpose()?;
        let mut env: BTreeMap<usize, Vec<(String, String)>> = match (setup.clock, &wall) {
            (Some(n), Some(wall)) => [(n, wall.environment()?)].into(),
            _ => BTreeMap::new(),
        };
        for (n, written) in setup.written.iter().enumerate() {
            let (name, value) = written.variable();
            env.entry(n).or_default().push((name.to_owned(), value.to_owned()));
        }
        let mut mesh = Mesh::start_with(mesh::Options {
            env,
            build: setup.one_build.then_some(0),
            builds: setup.written.iter().map(|written| written.build()).enumerate().collect(),
            replicas: setup.replicas,
            agents: setup.agents + setup.more_agents,
            config,
            hosts: true,
            more_hosts: AGENT_HOSTS + HOSTS,
            start: false,
            audits: setup.audits.then(|| folder.path().to_owned()),
            ..mesh::Options::default()
        })
        .await?;
        let certificates = agents::certified(&mut mesh, &setup, folder.path())?;
        let hosts = setup.replicas + AGENT_HOSTS;
        let sizes = (setup.replicas, setup.agents + setup.more_agents, hosts);
        let outside = Outside::start(&mut mesh, tracker, setup.wanted, sizes, KUBERNETES, seed).await?;
        let all: Vec<usize> = (0..setup.replicas).collect();
        let doors = all.iter().map(|n| {
            let wires = outside.doorways.get(*n);
            let straight = [mesh.api(*n), (mesh.api(*n).ip(), KUBERNETES).into()];
            let through = wires.map(|wires| [wires.api.address(), wires.kubernetes.address()]);
            let proxies = outside.told.as_ref().map(Told::doors);
            let [api, kubernetes] = proxies.or(through).unwrap_or(straight);
            Door { name: mesh.private(*n).to_string(), api, kubernetes }
        });
        let client = Client::new(doors.collect(), mesh.api_secret().to_vec(), user.clone());
        let guest = client.other(mesh.api_secret().to_vec(), guest);
        let mut forbidden = vec![user.clone(), client.token()];
        forbidden.extend(outside.hooks.as_ref().map(|hooks| hooks.key().to_owned()));
        std::fs::write(folder.path().join("forbidden"), forbidden.join("\n"))?;
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
        let watched = spread(setup.agents);
        let observer = Observer::start(&observed, &watched, &client, &history);
        let sized = |n: &usize| Sized { name: mesh.private(*n).to_string(), metrics: mesh.observability(*n) };
        let sizes = Sizes::start(&all.iter().map(sized).collect::<Vec<_>>(), &history);
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
            restarts,
            setup,
            measured: Vec::new(),
            notes: Vec::new(),
            slopes: Vec::new(),
            wall,
            disk,
            observer,
            watched,
            sizes,
            loads: Vec::new(),
            outsiders: None,
            guest,
            swarms: Vec::new(),
            names: HashMap::new(),
            dropped: 0,
            certificates,
            folder,
            begun: Instant::now(),
        };
        let first: Vec<usize> = all.into_iter().take(run.setup.started).collect();
        run.mesh.start_replicas(&first).await?;
        for n in first {
            run.lives(n);
        }
        let Setup { replicas, agents, double, pinned, clusters, connections, only, .. } = run.setup;
        if pinned > 0 {
            run.swarm_among((1, pinned, clusters, 1), &[0], 0).await?;
            let others: Vec<usize> = (1..replicas).collect();
            run.swarm_among((pinned + 1, agents - pinned, 0, connections), &others, 1).await?;
        } else {
            run.swarm((1, agents - double, clusters, connections), only, 0).await?;
        }
        if double > 0 {
            run.swarm((agents - double + 1, double, 0, 2), only, 0).await?;
        }
        run.settled(LONG).await.context("before the first fault")?;
        Ok(run)
    }

    /// How long the run has lasted.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Asks a replica which agents it holds, of all.
    pub(crate) async fn holds(&self, n: usize) -> Result<BTreeSet<i64>> {
        let all: Vec<i64> = (1..=self.setup.agents).collect();
        let caller = Caller::connect(self.mesh.api(n), Some(self.client.token())).await?;
        Ok(observer::look(&caller, &all).await?.1.own)
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
        let (replica, from) = (self.name(n), clock::now());
        self.sizes.processes.lock().insert(replica.clone(), self.mesh.kas(n).process.id());
        self.history.lock().lives.push(Life {
            replica,
            epoch: None,
            later: Vec::new(),
            from,
            to: None,
            killed: false,
        });
    }

    /// Records that a process has ended.
    pub(crate) fn died(&mut self, n: usize, killed: bool) {
        let name = self.name(n);
        self.sizes.processes.lock().remove(&name);
        if let Some(life) = self.history.lock().lives.iter_mut().rfind(|life| life.replica == name) {
            life.to = life.to.or(Some(clock::now()));
            life.killed = killed;
        }
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
            streams: STREAMS,
            deadline: Duration::from_secs(10),
        };
        self.load_with(plan);
    }

    /// As [`load`](Self::load), through the first replicas only.
    pub(crate) fn load_through(&mut self, replicas: usize, rate: u32) {
        let (agents, clusters) = ((1, self.setup.agents + 1), self.setup.clusters + 1);
        let deadline = Duration::from_secs(10);
        let plan = Plan { rate, agents, clusters, watches: 0, execs: 0, streams: 0, deadline };
        self.begin(plan, replicas);
    }

    /// Begins this load, beside those that have begun.
    pub(crate) fn load_with(&mut self, plan: Plan) {
        self.begin(plan, self.setup.replicas);
    }

    fn begin(&mut self, plan: Plan, replicas: usize) {
        self.loads.push(Load::start(&self.client, &self.history, &self.ids, plan, replicas));
        if self.outsiders.is_none() {
            let outsiders = Outsiders::start(&self.client, &self.history, &self.ids, self.setup.agents);
            self.outsiders = Some(outsiders);
        }
    }

    /// Ends the load: what is open is awaited.
    pub(crate) async fn unload(&mut self) {
        if let Some(outsiders) = self.outsiders.take() {
            outsiders.stop().await;
        }
        for load in std::mem::take(&mut self.loads) {
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
        self.died(n, true);
        Ok(at)
    }

    /// Starts a replica again, and waits until it is ready.
    pub(crate) async fn restart(&mut self, n: usize) -> Result<()> {
        self.mesh.restart(n).await?;
        self.lives(n);
        self.say(&format!("replica {n} is back"));
        Ok(())
    }

    /// Lets a replica write these records from its next start on.
    pub(crate) fn write(&mut self, n: usize, written: Written) {
        let (name, value) = written.variable();
        self.mesh.set_build(n, written.build());
        self.mesh.set_env(n, name, value);
        self.setup.written[n] = written;
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
        self.leave_within(n, LONG).await
    }

    /// As [`leave`](Self::leave), with the longest time that it may take.
    pub(crate) async fn leave_within(&mut self, n: usize, most: Duration) -> Result<Duration> {
        // Until it has ended, what it holds is on its way to others.
        let effect = Effect::Disabled(BTreeSet::from([self.name(n)]));
        let fault = self.fault(format!("SIGTERM replica {n}"), effect);
        let begun = Instant::now();
        self.mesh.leave(n, most).await?;
        self.fault_ends(fault);
        self.died(n, false);
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
    ///
    /// # Errors
    /// If no packet was dropped: then there was no fault.
    pub(crate) fn heal(&mut self, fault: usize) -> Result<Micros> {
        let dropped = self.mesh.network().dropped()?;
        self.mesh.network().cut(&[])?;
        self.dropped += dropped;
        self.fault_ends(fault);
        self.say(&format!("the network is whole again; {dropped} packets were dropped"));
        ensure!(dropped > 0, "no packet was dropped: the fault did not happen");
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

    /// Asks each of these agents through the replicas other than `n`, again and again, until it has answered.
    /// The returned tasks give the time from `since` to that: the work of a request is part of it.
    pub(crate) fn first_answers(
        &self,
        agents: &BTreeSet<i64>,
        n: usize,
        since: Micros,
    ) -> JoinSet<Result<f64>> {
        let others: Vec<usize> = self.mesh.running().into_iter().filter(|other| *other != n).collect();
        let mut asking = JoinSet::new();
        // Many would fill the connections of the load with requests that wait.
        let mut client = Arc::clone(&self.client);
        for (number, agent) in agents.iter().copied().enumerate() {
            if number > 0 && number % ONE_CLIENT == 0 {
                client = self.client.again();
            }
            let (client, history) = (Arc::clone(&client), Arc::clone(&self.history));
            let (ids, others) = (self.ids.clone(), others.clone());
            asking.spawn(async move {
                let end = Instant::now() + LONG;
                for round in number.. {
                    let replica = others[round % others.len().max(1)];
                    let deadline = Duration::from_secs(10);
                    let request = client.send(ids.next(), agent, Kind::Unary, replica, deadline).await;
                    let answered = request.outcome == Some(Outcome::Ok);
                    history.lock().requests.push(request);
                    if answered {
                        break;
                    }
                    ensure!(Instant::now() < end, "agent {agent} has not answered within {LONG:?}");
                    sleep(Duration::from_millis(5)).await;
                }
                Ok(millis(clock::now() - since))
            });
        }
        asking
    }

    // Sizes.

    /// Reads the sizes of a replica.
    pub(crate) async fn size(&self, n: usize) -> Result<Size> {
        let sized = Sized { name: self.name(n), metrics: self.mesh.observability(n) };
        self.sizes.of(&sized).await
    }

    /// Waits until a replica's sizes are what they were before, or for `most`, and records them beside that.
    pub(crate) async fn recovers(&mut self, n: usize, before: &Size, most: Duration) -> Result<()> {
        let name = self.name(n);
        let end = Instant::now() + most;
        let share = self.history.lock().header.bounds.recovery;
        let recoveries = loop {
            let recoveries = self.size(n).await?.recovered(&name, before);
            let is_back =
                recoveries.iter().all(|r| r.after - r.before <= r.before.abs().mul_add(share, r.slack));
            if is_back || Instant::now() >= end {
                break recoveries;
            }
            sleep(Duration::from_secs(1)).await;
        };
        for recovery in &recoveries {
            let history::Recovery { name, before, after, .. } = recovery;
            self.notes.push(format!("{name} of replica {n}: {before:.0} before, {after:.0} after."));
        }
        self.history.lock().recoveries.extend(recoveries);
        Ok(())
    }

    // Convergence.

    /// Waits until every running replica sees what is true, and returns how long that took.
    pub(crate) async fn settled(&self, time: Duration) -> Result<Duration> {
        let begun = Instant::now();
        let running: BTreeSet<String> = self.mesh.running().into_iter().map(|n| self.name(n)).collect();
        let since = clock::now();
        within(time, "all replicas see the same", async || {
            let last = self.observer.last.lock();
            let mut own: BTreeMap<i64, BTreeSet<String>> =
                self.watched.iter().map(|agent| (*agent, BTreeSet::new())).collect();
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
            // While only replica 0 runs, agents that do not know it are nowhere.
            let pinned = self.setup.pinned;
            let alone = pinned > 0 && running.len() == 1;
            let nowhere =
                |(agent, holders): (&i64, &BTreeSet<_>)| holders.is_empty() && !(alone && *agent > pinned);
            if let Some((agent, _)) = own.iter().find(|of| nowhere(*of)) {
                return Ok(Err(format!("agent {agent} is nowhere")));
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
}

/// A duration of whole seconds, as configuration has it.
fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs())
}

/// Returns the agents that are watched, of 1 to `count`: all, or some that are evenly spread.
fn spread(count: i64) -> Vec<i64> {
    /// Agents spread over replicas by their ids: with equal steps, all agents of one replica may be left out.
    const STEP: i64 = 7_919;
    let watched: BTreeSet<i64> = (0..count.min(WATCHED)).map(|n| 1 + n * STEP % count).collect();
    watched.into_iter().collect()
}

/// Cuts in both directions between each of two groups.
pub(crate) fn between(one: &[usize], other: &[usize], what: Traffic) -> Vec<Cut> {
    one.iter()
        .flat_map(|from| other.iter().map(move |to| (*from, *to)))
        .filter(|(from, to)| from != to)
        .flat_map(|(from, to)| [Cut { from, to, what }, Cut { from: to, to: from, what }])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watched_agents_are_all_or_evenly_spread() {
        assert_eq!(spread(24), (1..=24).collect::<Vec<_>>());
        for count in [300, 2_000] {
            let many = spread(count);
            assert_eq!(many.len(), 200);
            assert!(many.iter().all(|agent| (1..=count).contains(agent)), "{many:?}");
            for replicas in 2..=7 {
                for replica in 0..replicas {
                    let watched = many.iter().filter(|agent| *agent % replicas == replica).count() as i64;
                    assert!(watched > 200 / replicas / 2, "{watched} of replica {replica} of {replicas}");
                }
            }
        }
    }
}
