//! Tests of the whole crate: known bugs of other projects, single rules, a seeded simulation, a small model.

mod known_bugs;
mod model;
mod rules;
mod sim;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use cluster::{ReplicaHealth, ReplicaState};
use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

use crate::{Action, Epoch, Feed, Identity, Limits, Member, Message, Next, Owner, StreamId, Table, Version};

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

fn replica(name: &str) -> ReplicaId {
    ReplicaId::new(name)
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Digest and count of an owner's set at each version of each epoch, which a copy may have.
#[derive(Debug, Clone, Default)]
struct History(BTreeMap<(Epoch, Version), (u64, u64)>);

impl History {
    fn note(&mut self, owner: &Owner) {
        let summary = owner.summary();
        self.0.insert((summary.epoch, summary.version), (summary.digest, summary.count));
    }

    /// Single writer: whatever a table shows of a replica, its owner once had at exactly that version.
    fn check(&self, table: &Table, name: &ReplicaId, now: Instant) {
        for view in table.replicas(now).iter().filter(|view| view.replica == *name) {
            if let (Some(epoch), Some(version)) = (view.epoch, view.version) {
                let had = self.0.get(&(epoch, version)).copied();
                // Version 0 is the empty set, even if it was not noted.
                let had = if version == Version(0) { Some((0, 0)) } else { had };
                assert_eq!(
                    had,
                    Some((view.digest, view.count as u64)),
                    "single writer: {name} at {epoch}:{version}"
                );
            }
        }
    }
}

/// One subscriber and one owner, `a`. The test controls everything between them.
struct Lab {
    now: Instant,
    table: Table,
    owner: Owner,
    state: ReplicaState,
    feed: Option<(StreamId, Feed)>,
    dialled: Option<(StreamId, Option<(Epoch, Version)>)>,
    actions: Vec<Action>,
    history: History,
    generation: u64,
}

impl Lab {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        let now = Instant::now();
        Self {
            now,
            table: Table::new(replica("me"), limits, now),
            owner: Owner::with_sizes(Epoch(10), 64, 2),
            state: ReplicaState::Ready,
            feed: None,
            dialled: None,
            actions: Vec::new(),
            history: History::default(),
            generation: 1,
        }
    }

    /// Returns a lab whose table has the agents `1..=count` and an open stream.
    fn synced(count: i64) -> Self {
        let mut lab = Self::new();
        for id in 1..=count {
            lab.insert(id);
        }
        lab.gossip();
        lab.connect();
        lab.pump();
        assert!(lab.table.unsynced(lab.now).is_empty());
        lab.actions.clear();
        lab
    }

    fn insert(&mut self, id: i64) {
        self.owner.insert(agent(id));
        self.history.note(&self.owner);
    }

    fn remove(&mut self, id: i64) {
        self.owner.remove(agent(id));
        self.history.note(&self.owner);
    }

    fn member(&self) -> Member {
        Member {
            replica: replica("a"),
            generation: self.generation,
            address: Arc::from("a:1"),
            state: self.state,
            summary: Some(self.owner.summary()),
            changes: None,
            heard: self.now,
        }
    }

    fn identity(&self) -> Identity {
        Identity {
            replica: replica("a"),
            epoch: self.owner.epoch(),
            state: self.state,
            address: Arc::from("a:1"),
        }
    }

    /// Gossip hears `a` now.
    fn gossip(&mut self) {
        let member = self.member();
        self.table.gossip(&[member], self.now);
        self.obey();
    }

    /// Gossip hears `a` now, with its newest changes.
    fn gossip_changes(&mut self) {
        let member = Member { changes: Some(self.owner.recent()), ..self.member() };
        self.table.gossip(&[member], self.now);
        self.obey();
    }

    fn obey(&mut self) {
        for action in self.table.actions() {
            match &action {
                Action::Dial { stream, resume, .. } => self.dialled = Some((*stream, *resume)),
                Action::Close { stream } => {
                    self.feed.take_if(|(open, _)| open == stream);
                    self.dialled.take_if(|(open, _)| open == stream);
                }
                _ => {}
            }
            self.actions.push(action);
        }
        self.history.check(&self.table, &replica("a"), self.now);
    }

    /// The owner accepts the dial. Nothing is sent yet.
    fn connect(&mut self) -> Option<(Epoch, Version)> {
        let (stream, resume) = self.dialled.take().expect("the table dialled");
        self.feed = Some((stream, self.owner.feed(resume)));
        resume
    }

    /// Takes one message from the feed without delivering it.
    fn emit(&mut self) -> Option<Message> {
        let (_, feed) = self.feed.as_mut()?;
        match feed.next(&mut self.owner, self.now) {
            Next::Message(message) => Some(message),
            Next::WaitUntil(_) => None,
        }
    }

    fn deliver(&mut self, message: Message) {
        let Some((stream, _)) = self.feed else { return };
        let from = matches!(message, Message::Hello { .. } | Message::Beat(_)).then(|| self.identity());
        self.table.message(stream, from, message, self.now);
        self.obey();
    }

    /// Delivers all messages of the feed.
    fn pump(&mut self) {
        while let Some(message) = self.emit() {
            self.deliver(message);
        }
    }

    fn stream(&self) -> StreamId {
        self.feed.as_ref().expect("a stream is open").0
    }

    /// Lets time pass in ticks. An open stream continues.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += ms(50).min(end - self.now);
            self.pump();
            self.table.tick(self.now);
            self.obey();
        }
    }

    fn restart(&mut self, epoch: u64) {
        self.owner = Owner::with_sizes(Epoch(epoch), 64, 2);
        self.history.note(&self.owner);
        self.feed = None;
        self.generation += 1;
        self.state = ReplicaState::Ready;
    }

    fn holds(&self, id: i64) -> bool {
        self.table.locate(agent(id), self.now).iter().any(|found| found.replica == replica("a"))
    }

    fn health(&self) -> ReplicaHealth {
        let views = self.table.replicas(self.now);
        views.iter().find(|view| view.replica == replica("a")).map_or(ReplicaHealth::Gone, |view| view.health)
    }

    fn dials(&self) -> usize {
        self.actions.iter().filter(|action| matches!(action, Action::Dial { .. })).count()
    }
}

/// Whether the table dials for a snapshot.
fn asks_snapshot(action: &Action) -> bool {
    let Action::Dial { resume, .. } = action else { return false };
    resume.is_none_or(|(_, version)| version == Version::NONE)
}
