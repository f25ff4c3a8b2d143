//! What replicas say to each other: one question at a time to each other replica, with everything that is to
//! be said.

use std::{sync::Arc, time::Duration};

use ids::{AgentId, ReplicaId};

use crate::{
    Definition, Mailbox, Message, MessageId, State, Time,
    definitions::Kept,
    entry::{Entry, There},
    peer::{Asked, Key, Peer, Urgency},
};

/// Bytes of messages and definitions in one question, except if a single one has more.
const MOST_BYTES: usize = 1 << 20;
/// Items of one question.
const MOST_ITEMS: usize = 4_000;
/// The pause after a question that got no answer; twice as long after each further one…
const PAUSE: Duration = Duration::from_millis(200);
/// …up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The pause before what another replica did not take is offered again: until both see the same members.
const LATER: Duration = Duration::from_secs(1);

/// A message that the sender has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Which message.
    pub id: MessageId,
    /// For which agent it is.
    pub agent: AgentId,
    /// Its version at the sender.
    pub version: u32,
    /// Its state there.
    pub state: State,
}

/// What one replica tells another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The process that sends it.
    pub run: u64,
    /// Messages that the other one may have.
    pub offers: Vec<Offer>,
    /// Messages that it does not have.
    pub messages: Vec<Message>,
    /// Definitions.
    pub definitions: Vec<Definition>,
}

/// What the other replica says to one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It holds it, or something newer.
    Held,
    /// It does not have it: send it.
    Wanted,
    /// It is no holder by its own view, or has no room: ask again later.
    Later,
}

/// The replies to a batch, in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The process that answers.
    pub run: u64,
    /// To the offers.
    pub offers: Vec<Reply>,
    /// To the messages.
    pub messages: Vec<Reply>,
    /// To the definitions.
    pub definitions: Vec<Reply>,
}

/// There is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure;

impl Mailbox {
    /// Queues something for each other holder that does not have it.
    pub(crate) fn enqueue(&mut self, key: Key) {
        let targets = match key {
            Key::Message(id) => self.entries.get(&id).map(|entry| &entry.targets),
            Key::Definition(agent) => self.definitions.get(agent).map(|kept| &kept.targets),
        };
        for target in targets.into_iter().flatten() {
            let urgency = match target.there {
                There::Held => continue,
                There::Copy => Urgency::Copy,
                There::Ask => Urgency::Ask,
            };
            self.peers.entry(target.replica.clone()).or_default().queue.insert((urgency, key));
        }
    }

    /// Nothing that others said counts any more: asks everything again.
    pub(crate) fn ask_again(&mut self, now: Time, with_definitions: bool) {
        self.checked = now;
        self.generation = self.generation.wrapping_add(1);
        let members = self.view.members();
        self.peers.retain(|id, peer| {
            peer.queue.clear();
            peer.later.clear();
            peer.later_at = None;
            // One that is asked now is kept, so that its answer does not look like one to a later question.
            peer.asked.is_some() || members.iter().any(|member| member.id == *id)
        });
        let messages: Vec<(MessageId, AgentId)> =
            self.entries.iter().map(|(id, entry)| (*id, entry.message.agent)).collect();
        for (id, agent) in messages {
            let targets = self.targets(agent, There::Ask);
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.targets = targets;
            }
            self.enqueue(Key::Message(id));
        }
        for agent in self.definitions.agents() {
            if with_definitions {
                let targets = self.targets(agent, There::Copy);
                if let Some(kept) = self.definitions.get_mut(agent) {
                    kept.targets = targets;
                }
            }
            self.enqueue(Key::Definition(agent));
        }
    }

    /// Returns something to ask another replica. Report the answer with [`answered`](Self::answered).
    pub fn next_exchange(&mut self, now: Time) -> Option<(ReplicaId, Batch)> {
        let due = |peer: &Peer| peer.wake().is_some_and(|wake| wake <= now);
        let to = self.peers.iter().find(|(_, peer)| due(peer)).map(|(id, _)| id.clone())?;
        let mut peer = self.peers.remove(&to)?;
        if peer.later_at.is_some_and(|at| at <= now) {
            peer.later_at = None;
            peer.queue.extend(std::mem::take(&mut peer.later).into_iter().map(|key| (Urgency::Ask, key)));
        }
        let mut batch = Batch { run: self.run, ..Batch::default() };
        let mut asked = Asked {
            generation: self.generation,
            offers: Vec::new(),
            messages: Vec::new(),
            definitions: Vec::new(),
        };
        let (mut bytes, mut items) = (0, 0);
        while let Some((urgency, key)) = peer.queue.pop_first() {
            let size = self.add(&to, key, &mut batch, &mut asked, now, MOST_BYTES.saturating_sub(bytes));
            match size {
                // It belongs there no longer, or is there already.
                None => continue,
                Some(size) if items > 0 && bytes + size > MOST_BYTES => {
                    // It was not added.
                    peer.queue.insert((urgency, key));
                    break;
                }
                Some(size) => bytes += size,
            }
            items += 1;
            if items == MOST_ITEMS {
                break;
            }
        }
        peer.retry_at = None;
        let is_something = items > 0;
        if is_something {
            peer.asked = Some(asked);
        }
        self.peers.insert(to.clone(), peer);
        is_something.then_some((to, batch))
    }

    /// Adds an item to a batch, unless it is larger than `room` and not the first. Returns its size; `None`:
    /// there is nothing to say.
    fn add(
        &self,
        to: &ReplicaId,
        key: Key,
        batch: &mut Batch,
        asked: &mut Asked,
        now: Time,
        room: usize,
    ) -> Option<usize> {
        let is_first = asked.offers.is_empty() && asked.messages.is_empty() && asked.definitions.is_empty();
        match key {
            Key::Definition(agent) => {
                let kept = self.definitions.get(agent)?;
                let target = kept.targets.iter().find(|target| target.replica == *to)?;
                if target.there == There::Held {
                    return None;
                }
                let size = kept.hooks.len() + 64;
                if is_first || size <= room {
                    batch.definitions.push(self.definition(agent, now)?);
                    asked.definitions.push((agent, kept.hash));
                }
                Some(size)
            }
            Key::Message(id) => {
                let entry = self.entries.get(&id)?;
                let target = entry.targets.iter().find(|target| target.replica == *to)?;
                let agent = entry.message.agent;
                match target.there {
                    There::Held => None,
                    There::Ask => {
                        let (version, state) = entry.rank();
                        batch.offers.push(Offer { id, agent, version, state });
                        asked.offers.push((id, entry.rank()));
                        // It is small: it never has to wait for the next batch.
                        Some(0)
                    }
                    There::Copy => {
                        let size = entry.size();
                        if is_first || size <= room {
                            batch.messages.push(entry.message(now, self.is_holder(agent)));
                            asked.messages.push((id, entry.rank()));
                        }
                        Some(size)
                    }
                }
            }
        }
    }

    /// Notes the answer of another replica to the last question. Returns the messages of which more is known.
    pub fn answered(
        &mut self,
        from: &ReplicaId,
        answer: Result<&Answer, Failure>,
        now: Time,
    ) -> Vec<MessageId> {
        let Some(peer) = self.peers.get_mut(from) else { return Vec::new() };
        let Some(asked) = peer.asked.take() else { return Vec::new() };
        let answer = match answer {
            Ok(answer) => answer,
            Err(Failure) => {
                let pause = PAUSE.saturating_mul(1 << peer.failures.min(5)).min(LONGEST_PAUSE);
                peer.failures = peer.failures.saturating_add(1);
                peer.retry_at = Some(now.after(pause));
                if asked.generation == self.generation {
                    let messages = asked.offers.into_iter().chain(asked.messages).map(|(id, _)| id);
                    let keys = messages.map(Key::Message);
                    let keys = keys.chain(asked.definitions.into_iter().map(|it| Key::Definition(it.0)));
                    keys.for_each(|key| self.enqueue(key));
                }
                return Vec::new();
            }
        };
        (peer.failures, peer.retry_at) = (0, None);
        let before = peer.run.replace(answer.run);
        let is_another = before.is_some_and(|before| before != answer.run);
        if is_another && asked.generation == self.generation {
            // What the process before it said does not count for this one.
            self.ask_again(now, true);
        }
        let is_stale = asked.generation != self.generation;
        if is_stale && !crate::flaw::is_on(crate::flaw::Flaw::StaleAnswers) {
            return Vec::new();
        }
        let mut known = Vec::new();
        let replies = answer.offers.iter().chain(std::iter::repeat(&Reply::Later));
        for ((id, rank), reply) in asked.offers.iter().zip(replies) {
            self.replied(from, *id, *rank, *reply, now);
            known.push(*id);
        }
        let replies = answer.messages.iter().chain(std::iter::repeat(&Reply::Later));
        for ((id, rank), reply) in asked.messages.iter().zip(replies) {
            self.replied(from, *id, *rank, *reply, now);
            known.push(*id);
        }
        let replies = answer.definitions.iter().chain(std::iter::repeat(&Reply::Later));
        for ((agent, hash), reply) in asked.definitions.iter().zip(replies) {
            self.replied_definition(from, *agent, *hash, *reply, now);
        }
        known
    }

    /// Notes that something is offered again later.
    fn later(&mut self, to: &ReplicaId, key: Key, now: Time) {
        if let Some(peer) = self.peers.get_mut(to) {
            peer.later.insert(key);
            peer.later_at.get_or_insert(now.after(LATER));
        }
    }

    fn replied(&mut self, from: &ReplicaId, id: MessageId, rank: (u32, State), reply: Reply, now: Time) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let is_current = entry.rank() == rank;
        let Some(target) = entry.targets.iter_mut().find(|target| target.replica == *from) else { return };
        let reply = if crate::flaw::is_on(crate::flaw::Flaw::AnyReplyIsHeld) { Reply::Held } else { reply };
        match reply {
            Reply::Held if is_current => target.there = There::Held,
            // It has changed meanwhile, and is queued.
            Reply::Held => {}
            Reply::Wanted => {
                target.there = There::Copy;
                self.enqueue(Key::Message(id));
            }
            Reply::Later => {
                if is_current {
                    target.there = There::Ask;
                }
                self.later(from, Key::Message(id), now);
            }
        }
        self.settle(id);
    }

    fn replied_definition(
        &mut self,
        from: &ReplicaId,
        agent: AgentId,
        hash: [u8; 32],
        reply: Reply,
        now: Time,
    ) {
        let Some(kept) = self.definitions.get_mut(agent) else { return };
        if kept.hash != hash {
            return;
        }
        let Some(target) = kept.targets.iter_mut().find(|target| target.replica == *from) else { return };
        if reply == Reply::Held {
            target.there = There::Held;
        } else {
            self.later(from, Key::Definition(agent), now);
        }
        let Some(kept) = self.definitions.get(agent) else { return };
        let all = !kept.targets.is_empty() && kept.targets.iter().all(|target| target.there == There::Held);
        if all && !self.is_holder(agent) {
            self.definitions.remove(agent);
        }
    }

    /// Forgets a message that all holders have, unless this replica is one.
    pub(crate) fn settle(&mut self, id: MessageId) {
        let Some(entry) = self.entries.get(&id) else { return };
        let all = !entry.targets.is_empty() && entry.targets.iter().all(|it| it.there == There::Held);
        if all && !entry.in_flight && !self.is_holder(entry.message.agent) {
            self.remove(id);
        }
    }

    /// Takes what another replica tells, and answers. `from` is its name. Also returns the messages of which
    /// more is known.
    pub fn receive(&mut self, from: &ReplicaId, batch: Batch, now: Time) -> (Answer, Vec<MessageId>) {
        let mut answer = Answer { run: self.run, ..Answer::default() };
        let mut known = Vec::new();
        for offer in &batch.offers {
            let is_holder = self.is_holder(offer.agent);
            let has = self.entries.get(&offer.id).is_some_and(|it| it.rank() >= (offer.version, offer.state));
            answer.offers.push(match (is_holder, has) {
                (true, true) => Reply::Held,
                (true, false) => Reply::Wanted,
                (false, _) => Reply::Later,
            });
        }
        for message in batch.messages {
            known.push(message.id);
            answer.messages.push(self.take(from, message, now));
        }
        for definition in batch.definitions {
            answer.definitions.push(self.take_definition(definition, now));
        }
        (answer, known)
    }

    /// Takes a message of another replica. One that does not belong here is kept too, and handed over.
    fn take(&mut self, from: &ReplicaId, message: Message, now: Time) -> Reply {
        let (id, agent, steady) = (message.id, message.agent, message.steady);
        let reply = if self.is_holder(agent) { Reply::Held } else { Reply::Later };
        let mut targets = self.targets(agent, There::Ask);
        if let Some(sender) = targets.iter_mut().find(|target| target.replica == *from && steady) {
            sender.there = There::Held;
        }
        let mut entry = Entry {
            accepted: now.before(message.age),
            changed: now.before(message.state_age),
            due: now,
            in_flight: false,
            targets,
            message: Message { steady: false, ..message },
        };
        if let Some(known) = self.entries.get(&id) {
            if known.message.agent != agent {
                // Two messages never have the same id: somebody errs.
                return Reply::Later;
            }
            if known.rank() >= entry.rank() {
                return reply;
            }
            // What never changes stays what it is.
            entry.in_flight = known.in_flight;
            entry.message.hook = Arc::clone(&known.message.hook);
            entry.message.dedup = known.message.dedup;
        }
        if !self.has_room_for(&entry) {
            return Reply::Later;
        }
        if self.entries.contains_key(&id) {
            self.change(id, |known| *known = entry);
            self.enqueue(Key::Message(id));
        } else {
            self.insert(entry);
        }
        reply
    }

    /// Whether there is room for a message that another replica has accepted: twice as much as for new ones.
    fn has_room_for(&self, entry: &Entry) -> bool {
        let before = self.entries.get(&entry.message.id);
        let before = before.filter(|known| known.message.state == entry.message.state).map_or(0, Entry::size);
        let fits = |now: usize, most: usize| {
            now.saturating_sub(before).saturating_add(entry.size()) <= most.saturating_mul(2)
        };
        match entry.message.state {
            State::Waiting => fits(self.waiting_bytes, self.limits.bytes),
            State::Dead => fits(self.dead_bytes, self.limits.dead_bytes),
            State::Over => self.over.len() < self.limits.over.saturating_mul(2),
        }
    }

    fn take_definition(&mut self, definition: Definition, now: Time) -> Reply {
        let Definition { agent, hash, hooks, age } = definition;
        let confirmed = now.before(age);
        let reply = if self.is_holder(agent) { Reply::Held } else { Reply::Later };
        if let Some(kept) = self.definitions.get_mut(agent) {
            if kept.hash == hash {
                kept.confirmed = kept.confirmed.max(confirmed);
                return reply;
            }
            if kept.confirmed >= confirmed {
                // What is here is newer, and goes there by the same rule.
                return reply;
            }
        }
        let targets = self.targets(agent, There::Copy);
        if !self.definitions.put(agent, Kept { hash, hooks, confirmed, targets }, &self.limits) {
            return Reply::Later;
        }
        self.enqueue(Key::Definition(agent));
        reply
    }
}
