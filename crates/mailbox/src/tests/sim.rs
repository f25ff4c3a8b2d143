//! Three to five replicas in virtual time, driven by a seed: slow links, views that differ for seconds,
//! agents that come and go, one crash or drain at a time. After every step each accepted hook is delivered,
//! waiting or a dead letter somewhere.
//!
//! `MAILBOX_SEED=n` replays one seed, `MAILBOX_SEEDS=n` runs more.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::flaw::{Flaw, ON};

const AGENTS: i64 = 6;
const STEP: i64 = 25;
/// Until this, hooks come and replicas crash.
const CHAOS: i64 = 60_000;
/// After a fault, the next one waits this long: views agree by then, and every message has two copies.
const RECOVERY: i64 = 12_000;
/// Views learn of a change within this time, each replica at another moment.
const VIEW: u64 = 2_500;

struct Rng(u64);

impl Rng {
    fn next(&mut self, below: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.next(100) < chance
    }

    fn time(&mut self, below: u64) -> i64 {
        i64::try_from(self.next(below)).unwrap()
    }
}

struct Node {
    name: ReplicaId,
    epoch: u64,
    /// `None`: it is down.
    mailbox: Option<Mailbox>,
    is_draining: bool,
}

enum Event {
    /// A replica sees these members from now on.
    View(usize, u64, Vec<Member>),
    Question {
        from: usize,
        from_epoch: u64,
        to: usize,
        batch: Batch,
    },
    Answer {
        to: usize,
        to_epoch: u64,
        from: usize,
        answer: Option<Answer>,
    },
    /// A hook reaches the replica that keeps it.
    Arrives {
        at: usize,
        hook: NewHook,
    },
    /// What came of a delivery.
    Delivered {
        at: usize,
        epoch: u64,
        id: MessageId,
        outcome: u64,
    },
    Up(usize),
    Gone(usize),
}

struct Sim {
    rng: Rng,
    now: i64,
    nodes: Vec<Node>,
    queue: BTreeMap<(i64, u64), Event>,
    sequence: u64,
    present: BTreeSet<AgentId>,
    epochs: u64,
    next_fault: i64,
    hooks: u128,
    /// Accepted and not answered yet: where, since when.
    pending: BTreeMap<MessageId, (usize, u64, i64)>,
    accepted: BTreeSet<MessageId>,
    delivered: BTreeSet<MessageId>,
}

impl Sim {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x1234_5678_9abc_def1));
        let count = 3 + rng.next(3);
        let mut sim = Self {
            rng,
            now: 0,
            nodes: Vec::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            present: (1..=AGENTS).map(agent).collect(),
            epochs: 0,
            next_fault: 5_000,
            hooks: 0,
            pending: BTreeMap::new(),
            accepted: BTreeSet::new(),
            delivered: BTreeSet::new(),
        };
        for n in 0..count {
            let name = replica(&format!("{seed}-{n}"));
            sim.nodes.push(Node { name, epoch: 0, mailbox: None, is_draining: false });
        }
        for n in 0..sim.nodes.len() {
            sim.start(n);
        }
        sim
    }

    fn push(&mut self, after: i64, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), event);
    }

    fn start(&mut self, n: usize) {
        self.epochs += 1;
        let run = self.epochs;
        let node = &mut self.nodes[n];
        node.epoch = run;
        node.is_draining = false;
        node.mailbox = Some(Mailbox::new(node.name.clone(), run, Limits::default(), Time(self.now)));
        self.views();
    }

    /// Tells everybody who is ready now, each at another time.
    fn views(&mut self) {
        let ready = self.nodes.iter().filter(|node| node.mailbox.is_some() && !node.is_draining);
        let ready: Vec<Member> =
            ready.map(|node| Member { id: node.name.clone(), epoch: node.epoch }).collect();
        for n in 0..self.nodes.len() {
            let epoch = self.nodes[n].epoch;
            let after = self.rng.time(VIEW);
            self.push(after, Event::View(n, epoch, ready.clone()));
        }
    }

    fn mailbox(&mut self, n: usize, epoch: u64) -> Option<&mut Mailbox> {
        let node = &mut self.nodes[n];
        if node.epoch == epoch { node.mailbox.as_mut() } else { None }
    }

    fn fault(&mut self) {
        let up: Vec<usize> = (0..self.nodes.len()).filter(|n| self.nodes[*n].mailbox.is_some()).collect();
        let n = up[usize::try_from(self.rng.next(up.len() as u64)).unwrap()];
        let down = 300 + self.rng.time(8_000);
        if self.rng.percent(60) {
            self.nodes[n].mailbox = None;
            self.views();
            self.push(down, Event::Up(n));
            self.next_fault = self.now + down + RECOVERY;
        } else {
            self.nodes[n].is_draining = true;
            self.views();
            self.push(10_000, Event::Gone(n));
            self.push(10_000 + down, Event::Up(n));
            self.next_fault = self.now + 10_000 + down + RECOVERY;
        }
    }

    /// A sender posts a hook to any replica, which asks the home by its view, and then the next.
    fn post(&mut self) {
        let up: Vec<usize> = (0..self.nodes.len()).filter(|n| self.nodes[*n].mailbox.is_some()).collect();
        let edge = up[usize::try_from(self.rng.next(up.len() as u64)).unwrap()];
        self.hooks += 1;
        let of = 1 + self.rng.time(AGENTS as u64);
        let order = self.nodes[edge].mailbox.as_ref().unwrap().order(agent(of));
        let hook = hook(self.hooks, of, None);
        let mut after = self.rng.time(20);
        for name in order.iter().take(3) {
            let at = self.nodes.iter().position(|node| node.name == *name).unwrap();
            if self.nodes[at].mailbox.is_some() {
                self.push(after, Event::Arrives { at, hook });
                return;
            }
            after += 1_000;
        }
    }

    fn event(&mut self, event: Event) {
        let now = Time(self.now);
        match event {
            Event::View(n, epoch, members) => {
                if let Some(mailbox) = self.mailbox(n, epoch) {
                    mailbox.set_members(members, now);
                }
            }
            Event::Question { from, from_epoch, to, batch } => {
                let name = self.nodes[from].name.clone();
                let answer = self.nodes[to].mailbox.as_mut().map(|it| it.receive(&name, batch, now).0);
                // The answer may be lost.
                let answer = answer.filter(|_| !self.rng.percent(3));
                let after = self.rng.time(60);
                let event = Event::Answer { to: from, to_epoch: from_epoch, from: to, answer };
                self.push(after, event);
            }
            Event::Answer { to, to_epoch, from, answer } => {
                let name = self.nodes[from].name.clone();
                if let Some(mailbox) = self.mailbox(to, to_epoch) {
                    mailbox.answered(&name, answer.as_ref().ok_or(Failure), now);
                }
            }
            Event::Arrives { at, hook } => {
                let id = hook.id;
                let epoch = self.nodes[at].epoch;
                if let Some(mailbox) = &mut self.nodes[at].mailbox
                    && mailbox.accept(hook, now).is_ok()
                {
                    self.pending.insert(id, (at, epoch, self.now));
                }
            }
            Event::Delivered { at, epoch, id, outcome } => {
                let jitter = self.rng.next(100) as f64 / 100.0;
                if let Some(mailbox) = self.mailbox(at, epoch) {
                    let outcome = match outcome {
                        0 => Outcome::Absent,
                        1..=10 => Outcome::Again("unavailable"),
                        11 => Outcome::Dead("refused"),
                        _ => Outcome::Done,
                    };
                    mailbox.delivered(id, outcome, jitter, now);
                }
            }
            Event::Up(n) => self.start(n),
            Event::Gone(n) => self.nodes[n].mailbox = None,
        }
    }

    fn drive(&mut self, n: usize) {
        let now = Time(self.now);
        let epoch = self.nodes[n].epoch;
        let Some(mut mailbox) = self.nodes[n].mailbox.take() else { return };
        mailbox.tick(now);
        let absent: Vec<AgentId> = mailbox.absent().filter(|it| self.present.contains(it)).collect();
        absent.into_iter().for_each(|agent| mailbox.set_present(agent, true));
        while let Some((to, batch)) = mailbox.next_exchange(now) {
            let to = self.nodes.iter().position(|node| node.name == to).unwrap();
            let after = self.rng.time(60);
            self.push(after, Event::Question { from: n, from_epoch: epoch, to, batch });
        }
        while let Some(delivery) = mailbox.next_delivery(now) {
            let id = delivery.message.id;
            assert_eq!(delivery.message.body, "{}", "a body is lost");
            let is_present = self.present.contains(&delivery.message.agent);
            let mut outcome = if is_present { self.rng.next(60) } else { 0 };
            if self.now > CHAOS && is_present {
                outcome = 20;
            }
            // With the first of the failures it has arrived all the same.
            if outcome == 1 || outcome >= 12 {
                self.delivered.insert(id);
            }
            let after = self.rng.time(200);
            self.push(after, Event::Delivered { at: n, epoch, id, outcome });
        }
        self.nodes[n].mailbox = Some(mailbox);
    }

    /// Answers senders: with 202 once there are two copies, or after 5 s.
    fn answer(&mut self) {
        let (nodes, now) = (&self.nodes, self.now);
        let accepted = &mut self.accepted;
        self.pending.retain(|id, (at, epoch, since)| {
            let node = &nodes[*at];
            let Some(mailbox) = node.mailbox.as_ref().filter(|_| node.epoch == *epoch) else { return false };
            let is_over = mailbox.copies(*id).enough || now - *since >= 5_000;
            if is_over {
                accepted.insert(*id);
            }
            !is_over
        });
    }

    /// Returns an accepted hook that is neither delivered, nor waiting, nor a dead letter.
    fn lost(&self) -> Option<MessageId> {
        let is_kept = |id: &MessageId| {
            let mut mailboxes = self.nodes.iter().filter_map(|node| node.mailbox.as_ref());
            mailboxes.any(|it| it.entries.get(id).is_some_and(|entry| entry.message.state != State::Over))
        };
        self.accepted.difference(&self.delivered).find(|id| !is_kept(id)).copied()
    }

    fn run(&mut self) -> Result<(), String> {
        while self.now < CHAOS + 30_000 {
            self.now += STEP;
            while let Some(first) = self.queue.first_entry()
                && first.key().0 <= self.now
            {
                let event = first.remove();
                self.event(event);
            }
            if self.now < CHAOS {
                if self.rng.percent(25) {
                    self.post();
                }
                if self.now >= self.next_fault {
                    self.fault();
                }
                if self.rng.percent(3) {
                    let of = agent(1 + self.rng.time(AGENTS as u64));
                    if !self.present.remove(&of) {
                        self.present.insert(of);
                    }
                }
            } else {
                self.present = (1..=AGENTS).map(agent).collect();
            }
            (0..self.nodes.len()).for_each(|n| self.drive(n));
            self.answer();
            if self.now % 100 == 0
                && let Some(id) = self.lost()
            {
                return Err(format!("{id} is lost at {} ms", self.now));
            }
        }
        for node in &self.nodes {
            let mailbox = node.mailbox.as_ref().ok_or("a replica is still down")?;
            let totals = mailbox.totals(Time(self.now));
            if totals.waiting > 0 || totals.foreign > 0 {
                return Err(format!("{} does not come to rest: {totals:?}", node.name));
            }
        }
        if self.accepted.len() < 200 || self.delivered.len() < 200 {
            return Err(format!("too little happened: {} accepted", self.accepted.len()));
        }
        Ok(())
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn an_accepted_hook_is_delivered_waiting_or_a_dead_letter() {
    let seeds = match number("MAILBOX_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("MAILBOX_SEEDS").unwrap_or(4),
    };
    for seed in seeds {
        if let Err(why) = Sim::new(seed).run() {
            panic!("seed {seed}: {why}");
        }
    }
}

#[test]
fn the_simulation_notices_broken_rules() {
    for flaw in [Flaw::AnyReplyIsHeld, Flaw::StaleAnswers] {
        ON.set(Some(flaw));
        let found = (0..60).find(|seed| Sim::new(*seed).run().is_err());
        ON.set(None);
        assert!(found.is_some(), "{flaw:?} is not noticed");
    }
}
