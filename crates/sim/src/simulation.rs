//! [`Simulation`]: runs the processes and agents tick by tick, with requests and faults, and checks what
//! happened.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use gossip::simulation::Envelopes;
use history::{Effect, History, Kind, Metric, Micros, Outcome, Request, SECOND, Truth};
use ids::AgentId;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, task::JoinHandle};

use crate::{
    agent::{Agent, Order, Work},
    bodies::Sent,
    client::{self, Plan, Results},
    flaw::Flaw,
    host::Host,
    nemesis::{self, Fault, Lasting},
    network::{Network, Rule, Rules},
    record::{Ended, Recorder},
    replica::{self, Process, SecretFile, World},
    starved,
};

/// The step of the simulation.
const TICK: Micros = 1_000;
/// Before the first fault.
const START: Micros = 5 * SECOND;
/// After the last fault of a replica, until nothing may change any more.
const SETTLE: Micros = 36 * SECOND;
/// Agents move and requests are sent for this long after the last fault of a replica. The longest request
/// takes 20 s.
const BUSY: Micros = 14 * SECOND;
/// At the end each agent is asked once through each replica.
const PROBES: Micros = 6 * SECOND;
/// How often the beliefs of replicas are recorded.
const LOOK: Micros = 500_000;
/// A client gives a request up this long after its deadline if its replica was paused meanwhile.
const PATIENCE: Micros = SECOND / 2;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// Time with faults.
    pub(crate) faults: Micros,
    pub(crate) replicas: usize,
    pub(crate) agents: usize,
    /// Requests in a second.
    pub(crate) rate: u64,
    /// A rule to break.
    pub(crate) flaw: Option<Flaw>,
    /// Print what happens.
    pub(crate) trace: bool,
}

/// What happened.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) seed: u64,
    /// Of the history.
    pub(crate) digest: u64,
    pub(crate) micros: Micros,
    pub(crate) faults: BTreeMap<String, u64>,
    pub(crate) requests: BTreeMap<String, u64>,
    pub(crate) runs: u64,
    pub(crate) remote: u64,
    pub(crate) views: u64,
    pub(crate) datagrams: u64,
    pub(crate) datagrams_lost: u64,
    pub(crate) connections: u64,
    pub(crate) bytes: u64,
    /// How often each invariant was checked.
    pub(crate) checked: BTreeMap<String, u64>,
    /// What is wrong.
    pub(crate) breaches: Vec<String>,
}

/// A request that has not ended.
struct Open {
    plan: Plan,
    replica: usize,
    /// The number of the process.
    process: u64,
    /// When this attempt began.
    begun: Micros,
    deadline: Micros,
    cancel: Option<Micros>,
    /// May be tried again elsewhere if it was not started.
    again: bool,
    sent: Sent,
    task: JoinHandle<()>,
    is_probe: bool,
}

pub(crate) struct Simulation {
    options: Options,
    random: StdRng,
    world: World,
    now: Micros,
    /// No replica or link has a fault any more.
    is_calm: bool,
    /// One for each replica; `None`: it does not run.
    processes: Vec<Option<Process>>,
    started: u64,
    /// When processes start, and the fault that this mends.
    starts: BTreeMap<usize, (Micros, Option<usize>)>,
    /// Until when processes are paused, and the number of the fault.
    paused: BTreeMap<usize, (Micros, usize)>,
    /// When replicas were last paused no longer.
    resumed: BTreeMap<usize, Micros>,
    /// How long a replica that leaves stays away, and the number of the fault.
    leaving: BTreeMap<usize, (Micros, usize)>,
    lasting: Vec<Lasting>,
    /// Replicas that may miss all others now, with the number of that in the history.
    blind: BTreeMap<usize, usize>,
    /// The agents run here.
    outside: Host,
    agents: Vec<AgentId>,
    orders: Vec<mpsc::Sender<Order>>,
    requests: u64,
    open: BTreeMap<u64, Open>,
    results: Results,
    probed: BTreeMap<u64, String>,
    breaches: Vec<String>,
    faults: BTreeMap<String, u64>,
}

fn agent_host(agent: usize) -> IpAddr {
    let [high, low] = u16::try_from(agent + 1).unwrap_or(u16::MAX).to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(10, 1, high, low))
}

impl Simulation {
    pub(crate) fn new(options: Options) -> Result<Self> {
        let network = Network::new(options.seed ^ 0x6e65_7477);
        let recorder = Recorder::new(network.clone());
        let world = World {
            network: network.clone(),
            envelopes: Envelopes::default(),
            recorder: recorder.clone(),
            secret: Arc::new(SecretFile::write()?),
            flaw: options.flaw,
        };
        let outside = Host::new(0)?;
        let mut random = StdRng::seed_from_u64(options.seed);
        let addresses: Arc<[SocketAddr]> = (0..options.replicas).map(replica::agent_address).collect();
        let (mut agents, mut orders) = (Vec::new(), Vec::new());
        for number in 0..options.agents {
            let id = AgentId::new(i64::try_from(number + 1)?)?;
            let agent = Agent {
                id,
                host: agent_host(number),
                wanted: if random.random_bool(0.7) { 2 } else { 1 },
                replicas: Arc::clone(&addresses),
                network: network.clone(),
                recorder: recorder.clone(),
                ends_cleanly: options.flaw == Some(Flaw::CleanEnd),
            };
            let (order, ordered) = mpsc::channel(4);
            outside.spawn(Arc::new(agent).run(ordered));
            agents.push(id);
            orders.push(order);
        }
        let starts = (0..options.replicas)
            .map(|replica| (replica, (random.random_range(TICK..SECOND), None)))
            .collect();
        Ok(Self {
            options,
            random,
            world,
            now: 0,
            is_calm: false,
            processes: (0..options.replicas).map(|_| None).collect(),
            started: 0,
            starts,
            paused: BTreeMap::new(),
            resumed: BTreeMap::new(),
            leaving: BTreeMap::new(),
            lasting: Vec::new(),
            blind: BTreeMap::new(),
            outside,
            agents,
            orders,
            requests: 0,
            open: BTreeMap::new(),
            results: Results::default(),
            probed: BTreeMap::new(),
            breaches: Vec::new(),
            faults: BTreeMap::new(),
        })
    }

    fn trace(&self, text: impl FnOnce() -> String) {
        if self.options.trace {
            eprintln!("{:>10.3} s  {}", self.now as f64 / SECOND as f64, text());
        }
    }

    /// Runs everything, and returns what happened.
    pub(crate) fn run(mut self) -> Result<(Summary, History)> {
        let calm = START + self.options.faults;
        let (mut next_fault, mut next_agent) = (START, START);
        let mut next_request = START / 2;
        let mut next_look = LOOK;
        while self.now < calm {
            self.tick()?;
            if self.now >= next_fault {
                let fault = nemesis::choose(&mut self.random, self.options.replicas);
                self.inject(fault);
                next_fault = self.now + self.random.random_range(SECOND..5 * SECOND);
            }
            self.be_busy(&mut next_agent, &mut next_request);
            self.look(&mut next_look);
        }
        self.mend();
        while self.now < calm + SETTLE {
            self.tick()?;
            if self.now < calm + BUSY {
                self.be_busy(&mut next_agent, &mut next_request);
            }
            self.look(&mut next_look);
        }
        next_look = self.now;
        self.look(&mut next_look);
        self.state_truth();
        self.probe();
        while self.now < calm + SETTLE + PROBES {
            self.tick()?;
            self.look(&mut next_look);
        }
        self.finish()
    }

    /// Moves agents and sends requests, when it is time.
    fn be_busy(&mut self, next_agent: &mut Micros, next_request: &mut Micros) {
        if self.now >= *next_agent {
            let (replicas, agents) = (self.options.replicas, self.options.agents);
            let fault = nemesis::choose_agent(&mut self.random, replicas, agents);
            // What is cut off is noticed late.
            if !self.is_calm || !matches!(fault, Fault::Vanish { .. }) {
                self.inject(fault);
            }
            *next_agent = self.now + self.random.random_range(SECOND / 5..2 * SECOND);
        }
        while self.now >= *next_request {
            self.send_any();
            *next_request += self.random.random_range(1..=2 * SECOND / self.options.rate.max(1));
        }
    }

    /// Advances everything by one step.
    fn tick(&mut self) -> Result<()> {
        self.now += TICK;
        // The clock of this process, see `process.c`.
        std::thread::sleep(Duration::from_micros(TICK));
        self.world.network.advance(self.now);
        let due: Vec<usize> =
            self.starts.iter().filter(|(_, (at, _))| *at <= self.now).map(|(replica, _)| *replica).collect();
        for replica in due {
            self.start(replica)?;
        }
        let mut woken = self.world.network.take_woken();
        for (replica, process) in self.processes.iter_mut().enumerate() {
            let is_woken = woken.remove(&replica::host(replica));
            if let Some(process) = process
                && !self.paused.contains_key(&replica)
            {
                process.runs().run(self.now, is_woken);
            }
        }
        // The other hosts are those of agents.
        self.outside.run(self.now, !woken.is_empty());
        self.observe();
        self.collect();
        self.expire();
        Ok(())
    }

    /// Something is about to happen to a replica.
    fn touch(&mut self, replica: usize) {
        if let Some(process) = &mut self.processes[replica]
            && !self.paused.contains_key(&replica)
        {
            process.runs().touch(self.now);
        }
    }

    fn seeds(&self) -> HashSet<SocketAddr> {
        (0..self.options.replicas).map(replica::private_address).collect()
    }

    fn start(&mut self, replica: usize) -> Result<()> {
        let fault = self.starts.remove(&replica).and_then(|(_, fault)| fault);
        if let Some(fault) = fault {
            self.end_fault(fault);
        }
        self.started += 1;
        let process = Process::start(&self.world, replica, self.started, self.seeds())
            .with_context(|| format!("replica {replica} does not start"))?;
        self.world.recorder.born(&process.name, process.epoch());
        self.trace(|| format!("{} starts", process.name));
        self.processes[replica] = Some(process);
        Ok(())
    }

    /// Notes which processes are ready, and removes those that have left.
    fn observe(&mut self) {
        for replica in 0..self.processes.len() {
            let Some(process) = &mut self.processes[replica] else { continue };
            if !process.is_ready && process.looks_ready() {
                process.is_ready = true;
            }
            if process.has_left() {
                self.remove(replica, true);
                if let Some((time, fault)) = self.leaving.remove(&replica) {
                    self.starts.insert(replica, (self.now + time, Some(fault)));
                }
            }
        }
    }

    /// The process of a replica ends.
    fn remove(&mut self, replica: usize, noticed: bool) {
        let Some(process) = self.processes[replica].take() else { return };
        self.world.network.kill(process.host, noticed);
        self.world.recorder.died(&process.name);
        let (name, number) = (process.name.clone(), process.number);
        self.trace(|| format!("{name} has ended"));
        // Its tasks are dropped, and nothing that they do then is seen.
        drop(process);
        // What it had finished in this tick counts.
        self.collect();
        let lost: Vec<u64> =
            self.open.iter().filter(|(_, open)| open.process == number).map(|(id, _)| *id).collect();
        for id in lost {
            self.end(id, Ended::of(Outcome::Unknown, format!("replica {name} ended")));
        }
    }

    /// Takes the results of attempts.
    fn collect(&mut self) {
        let results = std::mem::take(&mut *self.results.lock());
        for (id, ended) in results {
            self.end(id, ended);
        }
    }

    /// An attempt has ended.
    fn end(&mut self, id: u64, ended: Ended) {
        let Some(open) = self.open.remove(&id) else { return };
        let replica = replica::name(replica::host(open.replica));
        self.world.recorder.attempted(id, &replica, open.begun, ended.outcome);
        if ended.outcome != Outcome::Ok {
            self.trace(|| {
                let (agent, outcome) = (open.plan.agent, ended.outcome.as_str());
                format!("request {id} for agent {agent} through {replica}: {outcome}: {}", ended.detail)
            });
        }
        let may_again = match ended.outcome {
            Outcome::NotStarted => true,
            Outcome::Unknown => self.options.flaw == Some(Flaw::Repeat),
            _ => false,
        };
        let again = open.again && may_again && self.now + TICK < open.deadline;
        if again && let Some(other) = self.choose_replica(Some(open.replica)) {
            return self.attempt(other, Open { again: false, ..open });
        }
        if open.is_probe && ended.outcome != Outcome::Ok {
            let what = self.probed.get(&id).cloned().unwrap_or_default();
            self.breaches.push(format!("{what}: {}: {}", ended.outcome.as_str(), ended.detail));
        }
        let sent = *open.sent.lock();
        self.world.recorder.ended(id, ended, sent);
    }

    /// Ends what is due: cancelled requests, requests of paused processes, faults.
    fn expire(&mut self) {
        let due: Vec<(u64, bool)> = self
            .open
            .iter()
            .filter_map(|(id, open)| {
                let cancelled = open.cancel.is_some_and(|at| at <= self.now);
                // The replica got the request, or its timeout, late.
                let resumed = self.resumed.get(&open.replica).is_some_and(|at| *at >= open.begun);
                let silent = resumed || self.paused.contains_key(&open.replica);
                let given_up = silent && open.deadline + PATIENCE <= self.now;
                (cancelled || given_up).then_some((*id, cancelled))
            })
            .collect();
        for (id, cancelled) in due {
            if let Some(replica) = self.open.get(&id).map(|open| open.replica) {
                self.touch(replica);
            }
            if let Some(open) = self.open.get_mut(&id) {
                open.task.abort();
                open.again = false;
            }
            let outcome = if cancelled { Outcome::Cancelled } else { Outcome::Unknown };
            self.end(id, Ended::of(outcome, "the client gave it up"));
        }
        let resumed: Vec<usize> =
            self.paused.iter().filter(|(_, (until, _))| *until <= self.now).map(|(at, _)| *at).collect();
        for replica in resumed {
            self.resume(replica);
        }
        if self.lasting.iter().any(|fault| fault.until <= self.now) {
            let (over, lasting): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.lasting).into_iter().partition(|fault| fault.until <= self.now);
            self.lasting = lasting;
            self.end_lasting(over);
        }
        if self.lasting.iter().any(|fault| fault.holds(self.now) != fault.holds(self.now - TICK)) {
            self.apply_rules();
        }
    }

    fn resume(&mut self, replica: usize) {
        if let Some((_, fault)) = self.paused.remove(&replica) {
            self.resumed.insert(replica, self.now);
            self.end_fault(fault);
            if let Some(process) = &mut self.processes[replica] {
                process.runs().resume(self.now);
            }
        }
    }

    fn end_fault(&self, fault: usize) {
        self.world.recorder.mended(fault);
        self.trace(|| format!("fault {fault} is over"));
    }

    fn end_lasting(&mut self, over: Vec<Lasting>) {
        for fault in over {
            self.end_fault(fault.number);
            if let Some(replica) = fault.discovery {
                self.touch(replica);
                if let Some(process) = &self.processes[replica] {
                    process.discover(self.seeds());
                }
            }
        }
        self.apply_rules();
    }

    /// Notes who may miss other replicas because gossip is lost and something else too. Without discovery,
    /// nothing finds a replica again. If connections lose packets, a link and its redial may be too late,
    /// and then gossip and stream both say that the replica is gone.
    fn note_blind(&mut self) {
        let any = |is: fn(&Rule) -> bool| {
            self.lasting.iter().flat_map(|fault| &fault.links).any(|(.., rule)| is(rule))
        };
        let (is_udp_cut, is_lossy) = (any(|rule| rule.udp_cut), any(|rule| rule.loss > 0.0));
        let lost = self.lasting.iter().filter_map(|fault| fault.discovery);
        let late = (0..self.options.replicas).filter(|_| is_lossy);
        let blind: BTreeSet<usize> = lost.chain(late).filter(|_| is_udp_cut).collect();
        let name = |replica: usize| replica::name(replica::host(replica));
        let seen: Vec<usize> =
            self.blind.keys().copied().filter(|replica| !blind.contains(replica)).collect();
        for number in seen.iter().filter_map(|replica| self.blind.remove(replica)) {
            self.world.recorder.mended(number);
        }
        for replica in blind {
            let pairs = (0..self.options.replicas).map(|other| (name(other), name(replica))).collect();
            let what = format!("{} may miss every other replica", name(replica));
            let fault = history::Fault { from: self.now, to: None, what, effect: Effect::Cut(pairs) };
            self.blind.entry(replica).or_insert_with(|| self.world.recorder.fault(fault));
        }
    }

    fn apply_rules(&mut self) {
        self.note_blind();
        let mut rules = Rules::default();
        let held = self.lasting.iter().filter(|fault| fault.holds(self.now));
        for (from, to, rule) in held.flat_map(|fault| &fault.links) {
            rules.add(*from, *to, *rule);
        }
        self.world.network.set_rules(rules);
    }

    /// Notes a fault; returns its number.
    fn note(&mut self, kind: &str, what: String, momentary: bool, effect: Effect) -> usize {
        *self.faults.entry(kind.to_owned()).or_default() += 1;
        let to = momentary.then_some(self.now);
        let number =
            self.world.recorder.fault(history::Fault { from: self.now, to, what: what.clone(), effect });
        self.trace(|| format!("fault {number}: {what}"));
        number
    }

    /// Whether this process could be missed: another one is ready.
    fn can_miss(&self, replica: usize) -> bool {
        let others = self.processes.iter().enumerate().filter(|(other, _)| *other != replica);
        others.filter_map(|(_, process)| process.as_ref()).any(|other| other.is_ready && !other.is_leaving)
    }

    fn inject(&mut self, fault: Fault) {
        let name = |replica: usize| replica::name(replica::host(replica));
        let disabled = |replica: usize| Effect::Disabled(BTreeSet::from([name(replica)]));
        let seconds = |time: Micros| format!("{:.1} s", time as f64 / SECOND as f64);
        match fault {
            Fault::Kill { replica, noticed, time } => {
                if self.processes[replica].is_none() || !self.can_miss(replica) {
                    return;
                }
                let how = if noticed { "killed" } else { "lost with its host" };
                let what = format!("{} is {how} for {}", name(replica), seconds(time));
                let number = self.note(how, what, false, disabled(replica));
                self.resume(replica);
                if let Some((_, leave)) = self.leaving.remove(&replica) {
                    self.end_fault(leave);
                }
                if !noticed {
                    let cut = Rule { cut: true, ..Rule::default() };
                    let host = replica::host(replica);
                    let others = (0..self.options.replicas).filter(|other| *other != replica);
                    let others = others.map(replica::host).chain((0..self.options.agents).map(agent_host));
                    let links = others.flat_map(|other| [(host, other, cut), (other, host, cut)]).collect();
                    let until = self.now + time;
                    self.lasting.push(Lasting { until, flaps: None, number, links, discovery: None });
                    self.apply_rules();
                }
                self.remove(replica, noticed);
                self.starts.insert(replica, (self.now + time, Some(number)));
            }
            Fault::Pause { replica, time } => {
                if self.processes[replica].is_none() || self.paused.contains_key(&replica) {
                    return;
                }
                let what = format!("{} is paused for {}", name(replica), seconds(time));
                let number = self.note("paused", what, false, disabled(replica));
                self.touch(replica);
                self.paused.insert(replica, (self.now + time, number));
            }
            Fault::Leave { replica, time } => {
                let can_leave = self.can_miss(replica) && !self.paused.contains_key(&replica);
                let Some(process) = &mut self.processes[replica] else { return };
                if !can_leave || process.is_leaving || !process.is_ready {
                    return;
                }
                process.runs().touch(self.now);
                process.leave();
                let number = self.note("leaves", format!("{} leaves", name(replica)), false, Effect::None);
                self.leaving.insert(replica, (time, number));
            }
            Fault::Links { what, pairs, rule, time, flaps } => {
                if pairs.is_empty() {
                    return;
                }
                let shown: Vec<String> = pairs.iter().map(|(a, b)| format!("{a}>{b}")).collect();
                let text = format!("{what} for {}: {}", seconds(time), shown.join(" "));
                let named = pairs.iter().map(|(a, b)| (name(*a), name(*b))).collect();
                let effect = if rule.cut { Effect::Cut(named) } else { Effect::Slow(named) };
                let number = self.note(what, text, false, effect);
                let host = replica::host;
                let links = pairs.iter().map(|(a, b)| (host(*a), host(*b), rule)).collect();
                let (until, flaps) = (self.now + time, flaps.map(|time| (self.now, time)));
                self.lasting.push(Lasting { until, flaps, number, links, discovery: None });
                self.apply_rules();
            }
            Fault::Reset { pair: (a, b) } => {
                let (from, to) = (replica::host(a), replica::host(b));
                let count = self.world.network.reset_between(from, to, 0.7);
                if count > 0 {
                    let what = format!("{count} connections between {} and {} are reset", name(a), name(b));
                    self.note("connections reset", what, true, Effect::None);
                }
            }
            Fault::Discovery { replica, strangers, time } => {
                self.touch(replica);
                let Some(process) = &self.processes[replica] else { return };
                let strange = SocketAddr::from(([10, 9, 9, 9], 8155));
                process.discover(if strangers { HashSet::from([strange]) } else { HashSet::new() });
                let found = if strangers { "only a stranger" } else { "nothing" };
                let what = format!("{} discovers {found} for {}", name(replica), seconds(time));
                let number = self.note("discovery lost", what, false, Effect::None);
                let (until, discovery) = (self.now + time, Some(replica));
                self.lasting.push(Lasting { until, flaps: None, number, links: Vec::new(), discovery });
                self.apply_rules();
            }
            Fault::Move { agent } => {
                // A full queue: it has enough to do.
                self.outside.touch(self.now);
                if self.orders[agent].try_send(Order::Move).is_ok() {
                    let what = format!("agent {} moves", self.agents[agent]);
                    self.note("agent moves", what, true, Effect::None);
                }
            }
            Fault::Away { agent, time } => {
                self.outside.touch(self.now);
                if self.orders[agent].try_send(Order::Away(Duration::from_micros(time))).is_ok() {
                    let what = format!("agent {} is away for {}", self.agents[agent], seconds(time));
                    self.note("agent away", what, true, Effect::None);
                }
            }
            Fault::Vanish { agent, replica, time } => {
                let (a, b) = (agent_host(agent), replica::host(replica));
                let cut = Rule { cut: true, ..Rule::default() };
                let what = starved::cut_off(self.agents[agent], &name(replica));
                let pair = (format!("agent {}", self.agents[agent]), name(replica));
                let number = self.note("agent cut", what, false, Effect::Slow(BTreeSet::from([pair])));
                let links = vec![(a, b, cut), (b, a, cut)];
                let until = self.now + time;
                self.lasting.push(Lasting { until, flaps: None, number, links, discovery: None });
                self.apply_rules();
            }
        }
    }

    /// Ends all faults.
    fn mend(&mut self) {
        self.is_calm = true;
        self.trace(|| "all faults end".to_owned());
        let over = std::mem::take(&mut self.lasting);
        self.end_lasting(over);
        for replica in 0..self.options.replicas {
            self.resume(replica);
        }
        for (at, _) in self.starts.values_mut() {
            *at = self.now;
        }
        for (time, _) in self.leaving.values_mut() {
            *time = 0;
        }
    }

    /// Returns a replica that takes requests, and not this one.
    fn choose_replica(&mut self, but: Option<usize>) -> Option<usize> {
        let fit: Vec<usize> = (0..self.processes.len())
            .filter(|replica| but != Some(*replica))
            .filter(|at| self.processes[*at].as_ref().is_some_and(|it| it.is_ready && !it.is_leaving))
            .collect();
        fit.choose(&mut self.random).copied()
    }

    fn send_any(&mut self) {
        let Some(replica) = self.choose_replica(None) else { return };
        let random = &mut self.random;
        let agent = self.agents[random.random_range(0..self.agents.len())];
        let (kind, messages, answers) = match random.random_range(0..100) {
            0..70 => (Kind::Unary, 1, 1),
            70..85 => (Kind::Stream, random.random_range(1..10), random.random_range(1..10)),
            _ => (Kind::Waiter, 1, 1),
        };
        let longest = if random.random_bool(0.03) { 200_000 } else { 4_000 };
        let mut lengths =
            |count: u64| -> Vec<usize> { (0..count).map(|_| random.random_range(0..longest)).collect() };
        let (lengths, answers) = (lengths(messages), lengths(answers));
        let gap = random.random_range(0..80);
        let seconds = if kind == Kind::Waiter { 3..=20 } else { 1..=10 };
        let timeout = random.random_range(seconds) * SECOND;
        let work = Work { millis: random.random_range(0..60), gap, lengths: answers };
        let cancel = random.random_bool(0.1).then(|| self.now + random.random_range(0..2 * SECOND));
        let again = random.random_bool(0.5);
        self.send(replica, agent, kind, timeout, lengths, work, cancel, again);
    }

    #[expect(clippy::too_many_arguments, reason = "each of them is an independent choice")]
    fn send(
        &mut self,
        replica: usize,
        agent: AgentId,
        kind: Kind,
        timeout: Micros,
        lengths: Vec<usize>,
        work: Work,
        cancel: Option<Micros>,
        again: bool,
    ) -> u64 {
        self.requests += 1;
        let id = self.requests;
        let gap = Duration::from_millis(work.gap);
        let timeout_of = Duration::from_micros(timeout);
        let plan = Plan { id, agent, timeout: timeout_of, lengths, gap, work };
        let deadline = self.now + timeout;
        let mut request = Request::new(id, agent.get(), kind, self.now);
        request.deadline = Some(deadline);
        self.world.recorder.request(request);
        // The task of the first attempt replaces this one.
        let task = self.outside.spawn(async {});
        let (begun, sent) = (self.now, Sent::default());
        let is_probe = self.probed.contains_key(&id);
        let open = Open { plan, replica, process: 0, begun, deadline, cancel, again, sent, task, is_probe };
        self.attempt(replica, open);
        id
    }

    fn attempt(&mut self, replica: usize, mut open: Open) {
        self.touch(replica);
        let Some(process) = &self.processes[replica] else { return };
        open.plan.timeout = Duration::from_micros(open.deadline - self.now);
        (open.replica, open.process, open.begun, open.sent) =
            (replica, process.number, self.now, Sent::default());
        let router = Arc::clone(process.router());
        let (sent, results) = (Arc::clone(&open.sent), Arc::clone(&self.results));
        open.task =
            process.spawn(client::send(router, process.name.clone(), open.plan.clone(), sent, results));
        self.open.insert(open.plan.id, open);
    }

    /// Records the beliefs of the replicas that run.
    fn look(&mut self, next: &mut Micros) {
        if self.now < *next {
            return;
        }
        *next = self.now + LOOK;
        for (replica, process) in self.processes.iter().enumerate() {
            if let Some(process) = process
                && process.is_ready
                && !self.paused.contains_key(&replica)
            {
                self.world.recorder.view(process.view(&self.agents, self.now));
            }
        }
    }

    /// Nothing changes any more: records what is true, and metrics.
    fn state_truth(&mut self) {
        let mut truth = Truth { at: self.now, ..Truth::default() };
        let mut agents = BTreeMap::<i64, BTreeSet<String>>::new();
        let running: Vec<&Process> = self.processes.iter().flatten().collect();
        if running.len() < self.options.replicas {
            self.breaches.push(format!("only {} replicas run at the end", running.len()));
        }
        for process in &running {
            truth.live.insert(process.name.clone());
            for agent in process.holds(&self.agents) {
                agents.entry(agent).or_default().insert(process.name.clone());
            }
            let requests = self.open.values().filter(|open| open.process == process.number).count();
            for (name, value) in process.metrics() {
                let true_value = match name {
                    "tunnels" => self.world.recorder.tunnels(&process.name),
                    "replicas_live" => i64::try_from(running.len()).unwrap_or(i64::MAX),
                    "requests_open" => i64::try_from(requests).unwrap_or(i64::MAX),
                    _ => 0,
                };
                let metric = Metric {
                    at: self.now,
                    replica: process.name.clone(),
                    name: name.to_owned(),
                    value: value as f64,
                    truth: true_value as f64,
                };
                self.world.recorder.edit(|history| history.metrics.push(metric));
            }
            for alarm in process.alarms() {
                self.trace(|| format!("{}: {alarm}", process.name));
            }
        }
        for agent in &self.agents {
            if !agents.contains_key(&agent.get()) {
                self.breaches.push(format!("agent {agent} has no tunnel at the end"));
            }
        }
        truth.agents = Some(agents);
        self.world.recorder.edit(|history| history.truths.push(truth));
    }

    /// Asks each agent through each replica.
    fn probe(&mut self) {
        for replica in 0..self.options.replicas {
            let Some(process) = &self.processes[replica] else { continue };
            let name = process.name.clone();
            for agent in self.agents.clone() {
                let text = format!("at the end, a request for agent {agent} through {name}");
                self.probed.insert(self.requests + 1, text);
                let work = Work { lengths: vec![10], ..Work::default() };
                self.send(replica, agent, Kind::Unary, 5 * SECOND, vec![10], work, None, false);
            }
        }
    }

    fn finish(mut self) -> Result<(Summary, History)> {
        for (id, open) in &self.open {
            self.breaches.push(format!("request {id} for agent {} is still open", open.plan.agent));
        }
        let mut history = self.world.recorder.history();
        history.header = history::Header {
            scenario: "simulation".to_owned(),
            seed: self.options.seed,
            end: self.now,
            runs_complete: true,
            ..history.header
        };
        self.breaches.extend(starved::check(&history));
        let report = history::check(&history);
        for (invariant, verdict) in &report.verdicts {
            self.breaches.extend(verdict.breaches.iter().map(ToString::to_string));
            let more = verdict.broken.saturating_sub(verdict.breaches.len() as u64);
            if more > 0 {
                self.breaches.push(format!("{invariant}: and {more} more"));
            }
        }
        let mut requests = BTreeMap::<String, u64>::new();
        for request in &history.requests {
            let outcome = request.outcome.map_or("open", Outcome::as_str);
            *requests.entry(outcome.to_owned()).or_default() += 1;
        }
        let sums = self.world.network.sums();
        let digest = history.digest().map_err(|error| anyhow!("the history has no digest: {error}"))?;
        let summary = Summary {
            seed: self.options.seed,
            digest,
            micros: self.now,
            faults: self.faults.clone(),
            requests,
            runs: history.runs.len() as u64,
            remote: history.requests.iter().filter(|request| request.path.len() > 1).count() as u64,
            views: history.views.len() as u64,
            datagrams: sums.datagrams,
            datagrams_lost: sums.datagrams_lost,
            connections: sums.connections,
            bytes: sums.bytes,
            checked: report
                .verdicts
                .iter()
                .filter(|(_, verdict)| verdict.checked > 0)
                .map(|(invariant, verdict)| (invariant.to_string(), verdict.checked))
                .collect(),
            breaches: self.breaches,
        };
        Ok((summary, history))
    }
}
