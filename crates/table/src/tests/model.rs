//! Every order of events of a small world: one owner, one subscriber, two agents.
//!
//! Copies of different owners share only snapshot slots and wake-ups, so one pair represents all; the
//! simulation covers slots and larger numbers of replicas. The exploration is breadth first, and states
//! differ in everything but time. The events are: register, unregister, dial, each message of the feed and
//! its delivery, every gossip value ever published (late, twice, out of order), stream cut, gossip gone,
//! crash, restart with a new epoch, and time passing.
//!
//! In every state, *single writer* and *order* hold. From every state, without further events, *convergence*,
//! *no zombies* and *no lost registration* are reached.

use std::collections::{HashSet, VecDeque};

use super::*;
use crate::{
    Failure, Record,
    flaw::{Flaw, must_fail_with},
};

#[derive(Clone)]
struct World {
    now: Instant,
    /// The clock of the feed. It advances so that each operation may be a delta of its own.
    feed_clock: Instant,
    up: bool,
    owner: Owner,
    generation: u64,
    table: Table,
    dial: Option<(StreamId, Option<(Epoch, Version)>)>,
    feed: Option<(StreamId, Feed)>,
    /// Messages that are sent and not yet delivered. The stream may be cut after them.
    channel: VecDeque<Message>,
    cut: bool,
    published: Vec<(u64, crate::Summary, Record)>,
    history: History,
    seen: (Epoch, Version),
    /// Remaining budget: operations, cuts, crashes, waits, gossip values.
    left: [u8; 5],
    trace: Vec<Step>,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Insert(i64),
    Remove(i64),
    Publish,
    Hear(usize),
    GossipGone,
    Connect,
    Send,
    Deliver,
    Cut,
    End,
    Crash,
    Restart,
    Wait,
}

const CHUNK: usize = 1;

impl World {
    fn new(left: [u8; 5]) -> Self {
        let now = Instant::now();
        let owner = Owner::with_sizes(Epoch(1), 2, CHUNK);
        let mut history = History::default();
        history.note(&owner);
        Self {
            now,
            feed_clock: now,
            up: true,
            owner,
            generation: 1,
            table: Table::new(replica("me"), Limits::default(), now),
            dial: None,
            feed: None,
            channel: VecDeque::new(),
            cut: false,
            published: Vec::new(),
            history,
            seen: (Epoch(0), Version(0)),
            left,
            trace: Vec::new(),
        }
    }

    /// Everything that determines what can still happen.
    fn fingerprint(&self) -> u128 {
        let feed = self.feed.as_ref().map(|(stream, feed)| (stream, feed.position()));
        let text = format!(
            "{} {:?} {} {:?} {:?} {:?} {:?} {} {:?} {:?} {:?}",
            self.up,
            (self.owner.summary(), self.owner.recent().ops),
            self.generation,
            self.dial,
            feed,
            self.channel,
            self.published,
            self.cut,
            self.left,
            self.seen,
            self.table,
        );
        use std::hash::{DefaultHasher, Hash, Hasher};
        let hash = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, &text).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        hash(0) << 64 | hash(1)
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.up && self.left[0] > 0 {
            for id in 1..=2 {
                let held = self.owner.contains(agent(id));
                steps.push(if held { Step::Remove(id) } else { Step::Insert(id) });
            }
        }
        let current = (self.generation, self.owner.summary(), self.owner.recent());
        if self.up && self.left[4] > 0 && !self.published.contains(&current) {
            steps.push(Step::Publish);
        }
        steps.extend((0..self.published.len()).map(Step::Hear));
        if !self.published.is_empty() {
            steps.push(Step::GossipGone);
        }
        if self.dial.is_some() {
            steps.push(Step::Connect);
        }
        if self.up && !self.cut && self.feed.is_some() && self.channel.len() < 3 {
            steps.push(Step::Send);
        }
        if !self.channel.is_empty() {
            steps.push(Step::Deliver);
        }
        if self.cut {
            steps.push(Step::End);
        } else if self.feed.is_some() && self.left[1] > 0 {
            steps.push(Step::Cut);
        }
        if self.left[2] > 0 {
            steps.push(if self.up { Step::Crash } else { Step::Restart });
        }
        if self.left[3] > 0 {
            steps.push(Step::Wait);
        }
        steps
    }

    fn take(&mut self, step: Step) {
        self.trace.push(step);
        match step {
            Step::Insert(id) => {
                self.left[0] -= 1;
                self.owner.insert(agent(id));
                self.history.note(&self.owner);
            }
            Step::Remove(id) => {
                self.left[0] -= 1;
                self.owner.remove(agent(id));
                self.history.note(&self.owner);
            }
            Step::Publish => {
                self.left[4] -= 1;
                self.published.push((self.generation, self.owner.summary(), self.owner.recent()));
            }
            Step::Hear(at) => {
                let (generation, summary, changes) = self.published[at].clone();
                let member = Member {
                    replica: replica("a"),
                    generation,
                    address: Arc::from("a:1"),
                    state: ReplicaState::Ready,
                    summary: Some(summary),
                    changes: Some(changes),
                    heard: self.now,
                };
                self.table.gossip(&[member], self.now);
            }
            Step::GossipGone => self.table.gossip(&[], self.now),
            Step::Connect => {
                let Some((stream, resume)) = self.dial.take() else { return };
                if self.up {
                    self.feed = Some((stream, self.owner.feed(resume)));
                    self.channel.clear();
                    self.cut = false;
                } else {
                    self.table.failed(stream, Failure::Refused, self.now);
                }
            }
            Step::Send => {
                self.feed_clock += ms(100);
                let Some((_, feed)) = &mut self.feed else { return };
                if let Next::Message(message) = feed.next(&mut self.owner, self.feed_clock) {
                    self.channel.push_back(message);
                }
            }
            Step::Deliver => {
                let (Some(message), Some((stream, _))) = (self.channel.pop_front(), &self.feed) else {
                    return;
                };
                let epoch = match &message {
                    Message::Hello { epoch, .. } => Some(*epoch),
                    Message::Beat(summary) => Some(summary.epoch),
                    _ => None,
                };
                let from = epoch.map(|epoch| Identity {
                    replica: replica("a"),
                    epoch,
                    state: ReplicaState::Ready,
                    address: Arc::from("a:1"),
                });
                self.table.message(*stream, from, message, self.now);
            }
            Step::Cut => {
                self.left[1] -= 1;
                self.cut = true;
            }
            Step::End => {
                self.cut = false;
                self.channel.clear();
                if let Some((stream, _)) = self.feed.take() {
                    self.table.failed(stream, Failure::Ended, self.now);
                }
            }
            Step::Crash => {
                self.up = false;
                self.cut = self.feed.is_some();
            }
            Step::Restart => {
                self.left[2] -= 1;
                self.up = true;
                self.generation += 1;
                self.owner = Owner::with_sizes(Epoch(self.generation), 2, CHUNK);
                self.history.note(&self.owner);
            }
            Step::Wait => {
                self.left[3] -= 1;
                for _ in 0..4 {
                    self.now += ms(1000);
                    self.table.tick(self.now);
                }
            }
        }
        self.obey();
    }

    fn obey(&mut self) {
        for action in self.table.actions() {
            match action {
                Action::Dial { stream, resume, .. } => self.dial = Some((stream, resume)),
                Action::Close { stream } => {
                    self.dial.take_if(|(open, _)| *open == stream);
                    if self.feed.take_if(|(open, _)| *open == stream).is_some() {
                        self.channel.clear();
                        self.cut = false;
                    }
                }
                _ => {}
            }
        }
        self.history.check(&self.table, &replica("a"), self.now);
        for view in self.table.replicas(self.now) {
            let (Some(epoch), Some(version)) = (view.epoch, view.version) else { continue };
            assert!(
                (epoch, version) >= self.seen,
                "single writer, order: {:?} after {:?}",
                (epoch, version),
                self.seen
            );
            self.seen = (epoch, version);
        }
    }

    /// Without further events, the table is exact within 40 s.
    fn settle(mut self) {
        for _ in 0..400 {
            while self.dial.is_some() || !self.channel.is_empty() || self.cut {
                let step = if self.cut {
                    Step::End
                } else if self.dial.is_some() {
                    Step::Connect
                } else {
                    Step::Deliver
                };
                self.take(step);
            }
            self.now += ms(100);
            self.feed_clock = self.feed_clock.max(self.now);
            let views = self.table.replicas(self.now);
            let copy = self.table.agents(&replica("a")).cloned().unwrap_or_default();
            if self.up {
                let synced =
                    views.first().is_some_and(|view| view.synced && view.health <= ReplicaHealth::Draining);
                if synced && copy == *self.owner.agents() && self.table.unsynced(self.now).is_empty() {
                    return;
                }
                self.left[4] = 1;
                self.published.clear();
                self.take(Step::Publish);
                self.take(Step::Hear(0));
                for _ in 0..3 {
                    if self.feed.is_some() {
                        self.take(Step::Send);
                    }
                }
            } else {
                if copy.is_empty() && views.iter().all(|view| view.health == ReplicaHealth::Gone) {
                    return;
                }
                self.take(Step::GossipGone);
            }
            self.table.tick(self.now);
            self.obey();
        }
        panic!("does not settle: {:#?}", self.table.replicas(self.now));
    }
}

fn explore(left: [u8; 5], bound: usize) -> usize {
    let mut known = HashSet::new();
    let mut queue = VecDeque::from([World::new(left)]);
    while let Some(world) = queue.pop_front() {
        for step in world.steps() {
            let mut next = world.clone();
            let trace = |world: &World| format!("{:?}, {step:?}", world.trace);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                next.take(step);
                if known.insert(next.fingerprint()) {
                    next.clone().settle();
                    Some(next)
                } else {
                    None
                }
            }));
            match outcome {
                Ok(Some(next)) => queue.push_back(next),
                Ok(None) => {}
                Err(panic) => {
                    eprintln!("after {}", trace(&world));
                    std::panic::resume_unwind(panic);
                }
            }
        }
        assert!(known.len() <= bound, "more than {bound} states: the budgets are too large for a test");
    }
    known.len()
}

/// Budgets: operations, cuts, crashes, waits, gossip values.
#[test]
fn every_order_of_events_converges() {
    let mut states = 0;
    for left in [[4, 0, 0, 0, 2], [2, 1, 0, 1, 1], [3, 1, 0, 0, 1], [3, 0, 1, 0, 1], [2, 1, 1, 0, 1]] {
        let found = explore(left, 200_000);
        println!("{left:?}: {found} states");
        states += found;
    }
    assert!(states > 1_000, "only {states} states: the model does not move");
}

#[test]
fn exploration_finds_broken_rules() {
    must_fail_with(Flaw::AnyVersion, || {
        explore([3, 0, 0, 0, 2], 200_000);
    });
    must_fail_with(Flaw::AnyEpoch, || {
        explore([1, 0, 1, 0, 2], 200_000);
    });
    must_fail_with(Flaw::OldSnapshotWins, || {
        explore([3, 0, 0, 0, 2], 200_000);
    });
}
