//! [`Mailbox`]: everything that a replica keeps, and its indexes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ids::{AgentId, ReplicaId};

use crate::{
    Confirmed, Definition, Header, Limits, Member, Message, MessageId, State, Time,
    definitions::{Definitions, Kept},
    entry::{self, Entry, Target, There},
    home::View,
    peer::{Key, Peer},
};

/// The reason of a dead letter that was dropped because there were too many.
const DROPPED: &str = "dropped: there were too many dead letters";

/// A hook that has arrived and was verified.
#[derive(Clone, Debug)]
pub struct NewHook {
    /// Drawn by the replica to which it came.
    pub id: MessageId,
    /// The agent.
    pub agent: AgentId,
    /// The name of the hook.
    pub hook: Arc<str>,
    /// A hash of what tells a repetition by the sender; `None`: it says nothing of the kind.
    pub dedup: Option<[u8; 32]>,
    /// Headers to pass on.
    pub headers: Arc<[Header]>,
    /// The body.
    pub body: Bytes,
}

/// A hook that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its id; of a repetition, that of the first one.
    pub id: MessageId,
    /// Whether it was kept before.
    pub is_repetition: bool,
}

/// Why a hook is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// This replica is not ready, or leaves.
    #[error("this replica does not keep hooks at the moment")]
    NotReady,
    /// Too many wait for the agent.
    #[error("too many hooks wait for this agent")]
    Agent,
    /// Too many wait at this replica.
    #[error("too many hooks wait at this replica")]
    Replica,
}

/// A message that has become a dead letter because of its age.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Late {
    /// Its id.
    pub id: MessageId,
    /// The agent.
    pub agent: AgentId,
    /// The name of the hook.
    pub hook: Arc<str>,
    /// Whether this replica is the home of the agent: the other holder has a copy, of which it says the same.
    pub is_home: bool,
}

/// On how many replicas a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// Replicas that hold it, this one included.
    pub held: usize,
    /// Whether that is enough: two, all if there are fewer, or the message is over.
    pub enough: bool,
}

/// The messages of one agent.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(crate) ids: BTreeSet<MessageId>,
    /// Those that wait: their number and bytes.
    pub(crate) waiting: usize,
    pub(crate) bytes: usize,
    /// Those that wait and are not being delivered, by when they are due.
    pub(crate) due: BTreeSet<(Time, MessageId)>,
    pub(crate) in_flight: usize,
    /// The agent is connected.
    pub(crate) present: bool,
    /// The place of the lane in [`Mailbox::ready`].
    ready: Option<Time>,
}

/// The mailbox of one replica.
#[derive(Debug)]
pub struct Mailbox {
    pub(crate) me: ReplicaId,
    pub(crate) run: u64,
    pub(crate) limits: Limits,
    pub(crate) view: View,
    pub(crate) entries: BTreeMap<MessageId, Entry>,
    pub(crate) lanes: BTreeMap<AgentId, Lane>,
    dedup: HashMap<(AgentId, [u8; 32]), MessageId>,
    /// By when they were accepted.
    pub(crate) waiting: BTreeSet<(Time, MessageId)>,
    /// By when they changed, as are those that are over.
    pub(crate) dead: BTreeSet<(Time, MessageId)>,
    pub(crate) over: BTreeSet<(Time, MessageId)>,
    pub(crate) waiting_bytes: usize,
    pub(crate) dead_bytes: usize,
    pub(crate) definitions: Definitions,
    pub(crate) peers: BTreeMap<ReplicaId, Peer>,
    /// Raised when what others said does not count any more.
    pub(crate) generation: u64,
    /// Agents with something to deliver, by when it is due.
    pub(crate) ready: BTreeSet<(Time, AgentId)>,
    /// Agents for which something waits here until they are connected.
    pub(crate) absent: BTreeSet<AgentId>,
    pub(crate) checked: Time,
}

impl Mailbox {
    /// Returns an empty mailbox without members. `run` is drawn at random by each process.
    pub fn new(me: ReplicaId, run: u64, limits: Limits, now: Time) -> Self {
        Self {
            me,
            run,
            limits,
            view: View::new(now),
            entries: BTreeMap::new(),
            lanes: BTreeMap::new(),
            dedup: HashMap::new(),
            waiting: BTreeSet::new(),
            dead: BTreeSet::new(),
            over: BTreeSet::new(),
            waiting_bytes: 0,
            dead_bytes: 0,
            definitions: Definitions::default(),
            peers: BTreeMap::new(),
            generation: 0,
            ready: BTreeSet::new(),
            absent: BTreeSet::new(),
            checked: now,
        }
    }

    /// Sets the replicas that are ready, this one included if it is.
    pub fn set_members(&mut self, members: Vec<Member>, now: Time) {
        if self.view.set(members, now) {
            self.ask_again(now, true);
            let agents: Vec<AgentId> = self.lanes.keys().copied().collect();
            agents.into_iter().for_each(|agent| self.reindex(agent));
        }
    }

    /// Returns the members by their rank for an agent, its home first.
    pub fn order(&self, agent: AgentId) -> Vec<ReplicaId> {
        self.view.order(agent).into_iter().cloned().collect()
    }

    /// Whether this replica is the home of an agent.
    pub fn is_home(&self, agent: AgentId) -> bool {
        self.view.holders(agent).0 == Some(&self.me)
    }

    /// Whether it has been that for so long.
    pub fn was_home_for(&self, agent: AgentId, long: Duration, now: Time) -> bool {
        self.view.was_home_for(&self.me, agent, long, now)
    }

    /// Whether this replica is one of the members.
    pub fn is_member(&self) -> bool {
        self.view.members().iter().any(|member| member.id == self.me)
    }

    pub(crate) fn is_holder(&self, agent: AgentId) -> bool {
        let (first, second) = self.view.holders(agent);
        first == Some(&self.me) || second == Some(&self.me)
    }

    /// Returns the other holders of an agent's messages.
    pub(crate) fn targets(&self, agent: AgentId, there: There) -> Vec<Target> {
        let (first, second) = self.view.holders(agent);
        let others = first.into_iter().chain(second).filter(|holder| **holder != self.me);
        others.map(|replica| Target { replica: replica.clone(), there }).collect()
    }

    /// Keeps a hook. A repetition by its sender is the hook that is kept already: if that one is a dead
    /// letter, it is delivered again, and if it was dropped as one, this one is kept as a new hook.
    ///
    /// # Errors
    /// See [`Refused`]. Nothing is kept then.
    pub fn accept(&mut self, new: NewHook, now: Time) -> Result<Accepted, Refused> {
        if !self.is_member() {
            return Err(Refused::NotReady);
        }
        let NewHook { id, agent, hook, dedup, headers, body } = new;
        if let Some(id) = dedup.and_then(|dedup| self.repeated(agent, dedup)) {
            if let Some(entry) = self.entries.get(&id)
                && entry.message.state == State::Dead
            {
                self.check_room(agent, entry.size())?;
                self.replay(id, now);
            }
            return Ok(Accepted { id, is_repetition: true });
        }
        if self.entries.contains_key(&id) {
            return Ok(Accepted { id, is_repetition: true });
        }
        let size = entry::size(&headers, &body);
        self.check_room(agent, size)?;
        let message = Message {
            id,
            agent,
            hook,
            dedup,
            headers,
            body,
            version: 1,
            state: State::Waiting,
            attempts: 0,
            age: Duration::ZERO,
            state_age: Duration::ZERO,
            reason: Arc::from(""),
            steady: true,
        };
        let targets = self.targets(agent, There::Copy);
        self.insert(Entry { message, accepted: now, changed: now, due: now, in_flight: false, targets });
        Ok(Accepted { id, is_repetition: false })
    }

    /// Returns the message that one with this hash repeats. One that was dropped is never delivered, so
    /// nothing repeats it.
    fn repeated(&self, agent: AgentId, dedup: [u8; 32]) -> Option<MessageId> {
        let id = *self.dedup.get(&(agent, dedup))?;
        let message = &self.entries.get(&id)?.message;
        let is_dropped = message.state == State::Over && &*message.reason == DROPPED;
        (!is_dropped).then_some(id)
    }

    /// Whether a message of this size may wait.
    pub(crate) fn check_room(&self, agent: AgentId, size: usize) -> Result<(), Refused> {
        let (waiting, bytes) = self.lanes.get(&agent).map_or((0, 0), |lane| (lane.waiting, lane.bytes));
        // The largest body that may be configured does not fit: alone, it is taken, or it never would be.
        let is_full = waiting > 0 && bytes.saturating_add(size) > self.limits.agent_bytes;
        if waiting >= self.limits.agent_messages || is_full {
            return Err(Refused::Agent);
        }
        if self.waiting_bytes.saturating_add(size) > self.limits.bytes {
            return Err(Refused::Replica);
        }
        Ok(())
    }

    /// Returns on how many replicas a message is. One that is not here is over.
    pub fn copies(&self, id: MessageId) -> Copies {
        let Some(entry) = self.entries.get(&id) else { return Copies { held: 0, enough: true } };
        let others = entry.targets.iter().filter(|target| target.there == There::Held).count();
        let held = 1 + others;
        let wanted = self.view.members().len().min(2);
        Copies { held, enough: held >= wanted || entry.message.state == State::Over }
    }

    /// A reader of an agent's configuration confirms its hooks. They are given if they were wanted.
    pub fn confirm(&mut self, agent: AgentId, hash: [u8; 32], hooks: Option<Bytes>, now: Time) -> Confirmed {
        if let Some(kept) = self.definitions.get_mut(agent)
            && kept.hash == hash
        {
            kept.confirmed = kept.confirmed.max(now);
            return Confirmed::Kept;
        }
        let Some(hooks) = hooks else { return Confirmed::Wanted };
        if hooks.is_empty() && self.definitions.get(agent).is_none() {
            return Confirmed::Kept;
        }
        let targets = self.targets(agent, There::Copy);
        let kept = Kept { hash, hooks, confirmed: now, targets };
        if !self.definitions.put(agent, kept, &self.limits) {
            return Confirmed::Full;
        }
        self.enqueue(Key::Definition(agent));
        Confirmed::Kept
    }

    /// Returns the hooks of an agent; `None`: nobody has told them.
    pub fn definition(&self, agent: AgentId, now: Time) -> Option<Definition> {
        let kept = self.definitions.get(agent)?;
        Some(Definition { agent, hash: kept.hash, hooks: kept.hooks.clone(), age: now.since(kept.confirmed) })
    }

    /// Adds an entry and sends it to the other holders.
    pub(crate) fn insert(&mut self, entry: Entry) {
        let (id, agent) = (entry.message.id, entry.message.agent);
        if let Some(dedup) = entry.message.dedup
            && self.repeated(agent, dedup).is_none()
        {
            self.dedup.insert((agent, dedup), id);
        }
        self.entries.insert(id, entry);
        self.lanes.entry(agent).or_default().ids.insert(id);
        self.index(id);
        self.reindex(agent);
        self.enqueue(Key::Message(id));
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, id: MessageId) {
        self.unindex(id);
        let Some(entry) = self.entries.remove(&id) else { return };
        let agent = entry.message.agent;
        if let Some(dedup) = entry.message.dedup
            && self.dedup.get(&(agent, dedup)) == Some(&id)
        {
            self.dedup.remove(&(agent, dedup));
        }
        if let Some(lane) = self.lanes.get_mut(&agent) {
            lane.ids.remove(&id);
        }
        self.reindex(agent);
        if self.lanes.get(&agent).is_some_and(|lane| lane.ids.is_empty() && lane.in_flight == 0) {
            self.lanes.remove(&agent);
        }
    }

    /// Changes an entry, with its places in the indexes.
    pub(crate) fn change(&mut self, id: MessageId, change: impl FnOnce(&mut Entry)) {
        self.unindex(id);
        let Some(entry) = self.entries.get_mut(&id) else { return };
        change(entry);
        let agent = entry.message.agent;
        self.index(id);
        self.reindex(agent);
    }

    /// Moves an entry to another state, and tells the other holders.
    pub(crate) fn move_to(&mut self, id: MessageId, state: State, reason: &str, now: Time) {
        let Some(agent) = self.entries.get(&id).map(|entry| entry.message.agent) else { return };
        let targets = self.targets(agent, There::Copy);
        self.change(id, |entry| {
            entry.message.version = entry.message.version.saturating_add(1);
            entry.message.state = state;
            entry.message.reason = reason.into();
            entry.changed = now;
            entry.targets = targets;
            if state == State::Over {
                entry.message.headers = Arc::new([]);
                entry.message.body = Bytes::new();
            }
        });
        self.enqueue(Key::Message(id));
    }

    fn index(&mut self, id: MessageId) {
        let Some(entry) = self.entries.get(&id) else { return };
        let (size, accepted, changed) = (entry.size(), entry.accepted, entry.changed);
        match entry.message.state {
            State::Waiting => {
                self.waiting.insert((accepted, id));
                self.waiting_bytes += size;
                if let Some(lane) = self.lanes.get_mut(&entry.message.agent) {
                    lane.waiting += 1;
                    lane.bytes += size;
                    if entry.in_flight {
                        lane.in_flight += 1;
                    } else {
                        lane.due.insert((entry.due, id));
                    }
                }
            }
            State::Dead => {
                self.dead.insert((changed, id));
                self.dead_bytes += size;
            }
            State::Over => {
                self.over.insert((changed, id));
            }
        }
    }

    fn unindex(&mut self, id: MessageId) {
        let Some(entry) = self.entries.get(&id) else { return };
        let (size, accepted, changed) = (entry.size(), entry.accepted, entry.changed);
        match entry.message.state {
            State::Waiting => {
                self.waiting.remove(&(accepted, id));
                self.waiting_bytes -= size;
                if let Some(lane) = self.lanes.get_mut(&entry.message.agent) {
                    lane.waiting -= 1;
                    lane.bytes -= size;
                    if entry.in_flight {
                        lane.in_flight -= 1;
                    } else {
                        lane.due.remove(&(entry.due, id));
                    }
                }
            }
            State::Dead => {
                self.dead.remove(&(changed, id));
                self.dead_bytes -= size;
            }
            State::Over => {
                self.over.remove(&(changed, id));
            }
        }
    }

    /// Finds out again whether something of an agent can be delivered, and when.
    pub(crate) fn reindex(&mut self, agent: AgentId) {
        let is_home = self.is_home(agent);
        let Some(lane) = self.lanes.get_mut(&agent) else {
            self.absent.remove(&agent);
            return;
        };
        if let Some(ready) = lane.ready.take() {
            self.ready.remove(&(ready, agent));
        }
        let first = lane.due.first().map(|(due, _)| *due);
        if let Some(first) = first
            && is_home
            && lane.present
            && lane.in_flight < self.limits.deliveries
        {
            lane.ready = Some(first);
            self.ready.insert((first, agent));
        }
        if is_home && !lane.present && !lane.due.is_empty() {
            self.absent.insert(agent);
        } else {
            self.absent.remove(&agent);
        }
    }

    /// Does what is due by age: messages become dead letters, dead letters and records go, and every now and
    /// then everything is asked again. Returns the new dead letters, and how many have gone.
    pub fn tick(&mut self, now: Time) -> (Vec<Late>, usize) {
        let (mut died, mut dropped) = (Vec::new(), 0);
        let limits = self.limits;
        let late: Vec<MessageId> = self
            .waiting
            .iter()
            .take_while(|(accepted, _)| now.since(*accepted) >= limits.wait)
            .filter(|(_, id)| self.entries.get(id).is_some_and(|entry| !entry.in_flight))
            .map(|(_, id)| *id)
            .collect();
        for id in late {
            let Some(message) = self.entries.get(&id).map(|entry| &entry.message) else { continue };
            let (agent, hook) = (message.agent, Arc::clone(&message.hook));
            let reason = Some(Arc::clone(&message.reason)).filter(|reason| !reason.is_empty());
            died.push(Late { id, agent, hook, is_home: self.is_home(agent) });
            self.move_to(id, State::Dead, reason.as_deref().unwrap_or("the agent was not connected"), now);
        }
        while let Some((changed, id)) = self.dead.first().copied() {
            if now.since(changed) >= limits.dead {
                self.remove(id);
            } else if self.dead_bytes > limits.dead_bytes {
                self.move_to(id, State::Over, DROPPED, now);
            } else {
                break;
            }
            dropped += 1;
        }
        while let Some((changed, id)) = self.over.first().copied() {
            if now.since(changed) < limits.remembered && self.over.len() <= limits.over {
                break;
            }
            self.remove(id);
        }
        self.definitions.forget_before(now.before(limits.definitions));
        if now.since(self.checked) >= limits.check {
            self.ask_again(now, false);
        }
        (died, dropped)
    }
}
