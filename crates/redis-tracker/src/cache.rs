//! What is known of the agents that somebody asked for. No I/O.
//!
//! An agent has a slot from the moment that somebody looks it up or waits for it until nobody does any more. A slot is
//! filled by a read, kept by what replicas publish, and mended by further reads. News that come while a read is on its way
//! are applied to its result again, since it may be older than they are.

use std::{collections::HashMap, time::Duration};

use cluster::{Mark, Replica};
use ids::{AgentId, ReplicaId};
use tokio::{sync::watch, time::Instant};

use crate::value::Owner;

/// Slots that nobody uses any more are swept when this many have come.
const SWEEP: usize = 1024;
/// A slot that nobody waits at and nobody asked for during this time is not kept.
const UNUSED: Duration = Duration::from_secs(60);
/// Agents that are remembered at most; then those that nobody waits for go, half of them, those first that nobody asked for
/// longest. Some 300 bytes each. Fewer: large installations are read again and again.
const MOST: usize = 200_000;
/// Agents that wait to be read at most: twice the requests that may wait. More than these come only while Redis answers
/// less quickly than others ask.
const MOST_WANTED: usize = 40_000;

/// Replicas of 14.1 publish nothing: what depends on them is read again as often as they read it themselves.
const UNPUBLISHED: Duration = Duration::from_secs(3);
/// A set is taken for mixed for this long after an entry of 14.1 was last seen.
const MIXED: Duration = Duration::from_secs(600);
/// Replicas of 14.1 that are remembered of an agent.
const MOST_GITLAB: usize = 64;

/// How long what was read is good for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ages {
    /// From then on it is read again, while it still counts.
    pub(crate) again: Duration,
    /// From then on who asks waits for a read.
    pub(crate) most: Duration,
}

/// What replicas said of an agent.
#[derive(Clone, Debug)]
pub(crate) enum News {
    Announced(Owner),
    Withdrawn(ReplicaId, u64),
}

/// How good the answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// It counts.
    Known,
    /// It counts, and is to be read again.
    Aging,
    /// It is too old, or there is none.
    Unknown,
}

#[derive(Debug)]
struct Slot {
    watch: watch::Sender<()>,
    holders: Vec<Owner>,
    /// Replicas of 14.1 that held it when it was read, and whether they denied it since.
    gitlab: Vec<(Replica, bool)>,
    read_at: Option<Instant>,
    /// A read is wanted or on its way.
    reading: Option<Reading>,
    masks: Vec<(ReplicaId, Mark)>,
    touched: Instant,
}

#[derive(Debug)]
struct Reading {
    done: watch::Sender<bool>,
    /// `None`: it has not been sent yet.
    news: Option<Vec<News>>,
    /// News may have been lost since it was sent.
    doubtful: bool,
}

impl Slot {
    fn new(now: Instant) -> Self {
        Self {
            watch: watch::Sender::new(()),
            holders: Vec::new(),
            gitlab: Vec::new(),
            read_at: None,
            reading: None,
            masks: Vec::new(),
            touched: now,
        }
    }

    /// From which age on it is read again.
    fn again(&self, ages: Ages, mixed: bool) -> Duration {
        let unpublished = !self.gitlab.is_empty() || (mixed && self.holders.is_empty());
        if unpublished { ages.again.min(UNPUBLISHED) } else { ages.again }
    }

    fn apply(&mut self, news: &News) -> bool {
        match news {
            News::Announced(owner) => {
                match self.holders.iter_mut().find(|known| known.replica == owner.replica) {
                    // A later process of the replica, or a later coming of the agent.
                    Some(known) if (known.run, known.version) < (owner.run, owner.version) => {
                        *known = owner.clone();
                        true
                    }
                    Some(_) => false,
                    None => {
                        self.holders.push(owner.clone());
                        true
                    }
                }
            }
            News::Withdrawn(replica, run) => {
                let before = self.holders.len();
                self.holders.retain(|known| known.replica != *replica || known.run > *run);
                self.holders.len() != before
            }
        }
    }
}

fn masked(masks: &[(ReplicaId, Mark)], holder: &Owner) -> bool {
    masks.iter().any(|(replica, mark)| {
        *replica == holder.replica && (holder.run, holder.version) <= (mark.epoch, mark.version)
    })
}

/// What is known of agents.
#[derive(Debug)]
pub(crate) struct Cache {
    slots: HashMap<AgentId, Slot>,
    sweep_at: usize,
    wanted: Vec<AgentId>,
    /// Until then, replicas of 14.1 may be in the set.
    mixed_until: Option<Instant>,
    /// When an entry of one was last seen.
    seen_gitlab: Option<Instant>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self {
            slots: HashMap::new(),
            sweep_at: SWEEP,
            wanted: Vec::new(),
            mixed_until: None,
            seen_gitlab: None,
        }
    }

    /// There may be replicas of 14.1 in the set, as far as is known.
    pub(crate) fn mixed(&mut self, now: Instant) {
        self.mixed_until = Some(now + MIXED);
    }

    /// An entry of a replica of 14.1 was seen.
    pub(crate) fn see_gitlab(&mut self, now: Instant) {
        self.mixed(now);
        self.seen_gitlab = Some(now);
    }

    /// Whether one was seen here lately.
    pub(crate) fn has_seen_gitlab(&self, now: Instant) -> bool {
        self.seen_gitlab.is_some_and(|at| now.duration_since(at) < MIXED)
    }

    fn is_mixed(&self, now: Instant) -> bool {
        self.mixed_until.is_some_and(|until| now < until)
    }

    fn slot(&mut self, agent: AgentId, now: Instant) -> &mut Slot {
        if self.slots.len() >= self.sweep_at && !self.slots.contains_key(&agent) {
            self.slots.retain(|_, slot| {
                slot.watch.receiver_count() > 0
                    || slot.reading.is_some()
                    || now.duration_since(slot.touched) < UNUSED
            });
            if self.slots.len() >= MOST {
                self.forget_half();
            }
            self.sweep_at = (2 * self.slots.len()).clamp(SWEEP, MOST.max(self.slots.len() + SWEEP));
        }
        self.slots.entry(agent).or_insert_with(|| Slot::new(now))
    }

    fn forget_half(&mut self) {
        let is_idle = |slot: &Slot| slot.watch.receiver_count() == 0 && slot.reading.is_none();
        let mut touched: Vec<Instant> =
            self.slots.values().filter(|slot| is_idle(slot)).map(|slot| slot.touched).collect();
        if touched.is_empty() {
            return;
        }
        let middle = touched.len() / 2;
        let (_, last, _) = touched.select_nth_unstable(middle);
        let last = *last;
        self.slots.retain(|_, slot| !is_idle(slot) || slot.touched > last);
    }

    /// Agents that are remembered.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn subscribe(&mut self, agent: AgentId, now: Instant) -> watch::Receiver<()> {
        let slot = self.slot(agent, now);
        slot.touched = now;
        slot.watch.subscribe()
    }

    pub(crate) fn wake(&mut self, agent: AgentId) {
        if let Some(slot) = self.slots.get(&agent) {
            slot.watch.send_replace(());
        }
    }

    /// Wakes who waits for an agent that this replica is said to hold.
    pub(crate) fn wake_holders(&mut self, which: impl Fn(&ReplicaId) -> bool) {
        for slot in self.slots.values() {
            if slot.holders.iter().any(|holder| which(&holder.replica)) {
                slot.watch.send_replace(());
            }
        }
    }

    /// Forgets what processes of a replica with a higher run than `run` announced and denied: they lived before it. What
    /// depends on that is read again.
    pub(crate) fn forget_later(&mut self, replica: &ReplicaId, run: u64, again: Duration, now: Instant) {
        for slot in self.slots.values_mut() {
            let before = (slot.holders.len(), slot.masks.len());
            slot.holders.retain(|holder| holder.replica != *replica || holder.run <= run);
            slot.masks.retain(|(known, mark)| known != replica || mark.epoch <= run);
            if before != (slot.holders.len(), slot.masks.len()) {
                let aged = now.checked_sub(again).unwrap_or(now);
                slot.read_at = slot.read_at.map(|at| at.min(aged));
                slot.watch.send_replace(());
            }
        }
    }

    pub(crate) fn wake_all(&mut self) {
        for slot in self.slots.values() {
            slot.watch.send_replace(());
        }
    }

    pub(crate) fn look(&mut self, agent: AgentId, ages: Ages, now: Instant) -> Look {
        let mixed = self.is_mixed(now);
        let Some(slot) = self.slots.get_mut(&agent) else { return Look::Unknown };
        slot.touched = now;
        let again = slot.again(ages, mixed);
        match slot.read_at.map(|at| now.duration_since(at)) {
            Some(age) if age < again => Look::Known,
            Some(age) if age < ages.most => Look::Aging,
            _ => Look::Unknown,
        }
    }

    /// Whether the agent was ever read.
    pub(crate) fn was_read(&self, agent: AgentId) -> bool {
        self.slots.get(&agent).is_some_and(|slot| slot.read_at.is_some())
    }

    /// Who is said to hold the agent and did not deny it.
    pub(crate) fn holders(&self, agent: AgentId) -> impl Iterator<Item = &Owner> {
        let slot = self.slots.get(&agent);
        slot.into_iter().flat_map(|slot| slot.holders.iter().filter(|holder| !masked(&slot.masks, holder)))
    }

    /// Replicas of 14.1 that hold the agent and did not deny it.
    pub(crate) fn gitlab(&self, agent: AgentId) -> impl Iterator<Item = &Replica> {
        let slot = self.slots.get(&agent);
        let held = slot.into_iter().flat_map(|slot| slot.gitlab.iter());
        held.filter(|(_, denied)| !denied).map(|(replica, _)| replica)
    }

    /// Who is said to hold the agent, and whether it denied it.
    pub(crate) fn claims(&self, agent: AgentId) -> Vec<(Owner, bool)> {
        let Some(slot) = self.slots.get(&agent) else { return Vec::new() };
        slot.holders.iter().map(|holder| (holder.clone(), masked(&slot.masks, holder))).collect()
    }

    pub(crate) fn mask(&mut self, agent: AgentId, replica: &ReplicaId, mark: Mark) {
        let Some(slot) = self.slots.get_mut(&agent) else { return };
        // They count nothing: what they said stands until the agent is read again.
        for (_, denied) in slot.gitlab.iter_mut().filter(|(known, _)| known.id == *replica) {
            *denied = true;
        }
        // Only of who holds the agent by what is known: so there are no more of them than of those.
        slot.masks.retain(|(known, _)| known != replica && slot.holders.iter().any(|h| h.replica == *known));
        if slot.holders.iter().any(|holder| holder.replica == *replica) {
            slot.masks.push((replica.clone(), mark));
        }
    }

    /// Asks for a read; returns what says when it is over, and whether it succeeded.
    pub(crate) fn want(&mut self, agent: AgentId, now: Instant) -> watch::Receiver<bool> {
        let is_full = self.wanted.len() >= MOST_WANTED;
        let slot = self.slot(agent, now);
        slot.touched = now;
        if let Some(reading) = &slot.reading {
            return reading.done.subscribe();
        }
        let (done, receiver) = watch::channel(false);
        if is_full {
            // As if the read had failed.
            return receiver;
        }
        slot.reading = Some(Reading { done, news: None, doubtful: false });
        self.wanted.push(agent);
        receiver
    }

    pub(crate) fn wants(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Takes agents to read now. Each must be answered by [`read`](Self::read) or [`not_read`](Self::not_read).
    pub(crate) fn take_wanted(&mut self, most: usize) -> Vec<AgentId> {
        let from = self.wanted.len().saturating_sub(most);
        let agents = self.wanted.split_off(from);
        for agent in &agents {
            if let Some(reading) = self.slots.get_mut(agent).and_then(|slot| slot.reading.as_mut()) {
                reading.news = Some(Vec::new());
            }
        }
        agents
    }

    /// An agent was read: these hold it, replicas of 14.1 by their URLs. Wakes who waits if that is different from what was
    /// known.
    pub(crate) fn read(
        &mut self,
        agent: AgentId,
        holders: Vec<Owner>,
        gitlab: Vec<Replica>,
        ages: Ages,
        now: Instant,
    ) {
        let Some(slot) = self.slots.get_mut(&agent) else { return };
        let mut gitlab: Vec<(Replica, bool)> = gitlab.into_iter().map(|replica| (replica, false)).collect();
        gitlab.sort_by(|(a, _), (b, _)| a.id.cmp(&b.id));
        // An entry for each tunnel.
        gitlab.dedup();
        gitlab.truncate(MOST_GITLAB);
        let other_gitlab = gitlab != slot.gitlab;
        slot.gitlab = gitlab;
        let mut before = std::mem::replace(&mut slot.holders, holders);
        let reading = slot.reading.take();
        for news in reading.iter().filter_map(|reading| reading.news.as_ref()).flatten() {
            slot.apply(news);
        }
        let order = |a: &Owner, b: &Owner| a.replica.cmp(&b.replica);
        slot.holders.sort_by(order);
        before.sort_by(order);
        let first = slot.read_at.is_none();
        let doubtful = reading.as_ref().is_some_and(|reading| reading.doubtful);
        slot.read_at = Some(if doubtful { now.checked_sub(ages.again).unwrap_or(now) } else { now });
        // Whether there is nothing, or nothing is known, makes no difference to who waits.
        if before != slot.holders || other_gitlab || (first && !slot.holders.is_empty()) {
            slot.watch.send_replace(());
        }
        if let Some(reading) = reading {
            reading.done.send_replace(true);
        }
    }

    /// An agent could not be read: who waits for that goes on with what was known.
    pub(crate) fn not_read(&mut self, agent: AgentId) {
        if let Some(slot) = self.slots.get_mut(&agent) {
            slot.reading = None;
        }
    }

    pub(crate) fn news(&mut self, agent: AgentId, news: &News) {
        let Some(slot) = self.slots.get_mut(&agent) else { return };
        if let Some(Reading { news: Some(during), .. }) = &mut slot.reading {
            during.push(news.clone());
        }
        // A slot that was never read is not made by news: others may hold the agent too.
        if slot.apply(news) {
            slot.watch.send_replace(());
        }
    }

    /// Messages may have been lost: everything is to be read again; what is waited for now.
    pub(crate) fn doubt(&mut self, now: Instant, again: Duration) {
        let mut waited = Vec::new();
        for (agent, slot) in &mut self.slots {
            // As old as it can be while it still counts.
            if let Some(at) = &mut slot.read_at {
                *at = (*at).min(now.checked_sub(again).unwrap_or(now));
            }
            match &mut slot.reading {
                Some(reading) => reading.doubtful = reading.news.is_some(),
                None if slot.watch.receiver_count() > 0 => waited.push(*agent),
                None => {}
            }
        }
        for agent in waited {
            drop(self.want(agent, now));
        }
    }

    /// Asks for reads of what is waited for and was read longest ago, at most `most`.
    pub(crate) fn want_aging(&mut self, ages: Ages, most: usize, now: Instant) {
        let mixed = self.is_mixed(now);
        let due: Vec<AgentId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.reading.is_none() && slot.watch.receiver_count() > 0)
            // By chance within a quarter, so that what was read together is not read together again.
            .filter(|(_, slot)| {
                let age = slot.again(ages, mixed).mul_f64(0.75 + rand::random::<f64>() / 4.0);
                slot.read_at.is_none_or(|at| now.duration_since(at) >= age)
            })
            .map(|(agent, _)| *agent)
            .take(most)
            .collect();
        for agent in due {
            drop(self.want(agent, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGES: Ages = Ages { again: Duration::from_secs(30), most: Duration::from_secs(60) };

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    fn owner(replica: &str, run: u64, version: u64) -> Owner {
        Owner { replica: ReplicaId::new(replica), run, version }
    }

    fn names(cache: &Cache, id: i64) -> Vec<String> {
        cache.holders(agent(id)).map(|holder| holder.replica.to_string()).collect()
    }

    #[tokio::test]
    async fn what_others_ask_for_is_bounded_and_who_waits_is_kept() {
        let mut cache = Cache::new();
        let begun = Instant::now();
        let waited = cache.subscribe(agent(1), begun);
        let id = |n: usize| agent(i64::try_from(n).unwrap());
        for n in 2..2 * MOST {
            // All within the time in which nothing counts as unused.
            let now = begun + Duration::from_micros(n as u64);
            cache.subscribe(id(n), now);
            assert!(cache.len() <= MOST, "{} agents", cache.len());
        }
        assert!(cache.len() >= MOST / 2, "{} agents", cache.len());
        assert!(cache.slots.contains_key(&agent(1)) && waited.has_changed().is_ok());
        assert!(cache.slots.contains_key(&id(2 * MOST - 1)) && !cache.slots.contains_key(&id(2)));
    }

    #[tokio::test]
    async fn what_waits_to_be_read_is_bounded_and_more_counts_as_failed() {
        let mut cache = Cache::new();
        let now = Instant::now();
        let id = |n: usize| agent(i64::try_from(n).unwrap());
        for n in 1..=MOST_WANTED {
            assert!(cache.want(id(n), now).has_changed().is_ok());
        }
        let mut beyond = cache.want(id(MOST_WANTED + 1), now);
        assert!(beyond.wait_for(|done| *done).await.is_err());
        // Who is asked for already is waited for all the same.
        assert!(cache.want(id(1), now).has_changed().is_ok());
        let taken = cache.take_wanted(10);
        assert_eq!(taken.len(), 10);
        assert!(cache.want(id(MOST_WANTED + 1), now).has_changed().is_ok());
    }

    #[tokio::test]
    async fn a_lower_run_counts_once_the_higher_one_is_gone() {
        let mut cache = Cache::new();
        let now = Instant::now() + AGES.again;
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), vec![owner("a", 9, 1), owner("b", 9, 1)], Vec::new(), AGES, now);
        cache.mask(agent(1), &ReplicaId::new("a"), Mark { epoch: 9, version: 5 });
        cache.news(agent(1), &News::Announced(owner("a", 3, 1)));
        assert_eq!(names(&cache, 1), ["b"]);
        let mut changes = cache.subscribe(agent(1), now);
        cache.forget_later(&ReplicaId::new("a"), 3, AGES.again, now);
        assert!(changes.has_changed().unwrap());
        assert_eq!(cache.look(agent(1), AGES, now), Look::Aging);
        changes.mark_unchanged();
        cache.news(agent(1), &News::Announced(owner("a", 3, 1)));
        assert_eq!((names(&cache, 1).len(), changes.has_changed().unwrap()), (2, true));
        cache.forget_later(&ReplicaId::new("b"), 9, AGES.again, now);
        assert_eq!(names(&cache, 1).len(), 2, "the same run is the same process");
    }

    #[tokio::test]
    async fn news_during_a_read_outlive_its_answer() {
        let mut cache = Cache::new();
        let now = Instant::now();
        drop(cache.want(agent(1), now));
        assert_eq!(cache.take_wanted(10), [agent(1)]);
        cache.news(agent(1), &News::Announced(owner("a", 1, 1)));
        // Read before the agent came.
        cache.read(agent(1), Vec::new(), Vec::new(), AGES, now);
        assert_eq!(names(&cache, 1), ["a"]);
        drop(cache.want(agent(1), now));
        cache.take_wanted(10);
        cache.news(agent(1), &News::Withdrawn(ReplicaId::new("a"), 1));
        cache.read(agent(1), vec![owner("a", 1, 1)], Vec::new(), AGES, now);
        assert_eq!(names(&cache, 1), [""; 0]);
    }

    #[tokio::test]
    async fn many_who_ask_are_one_read() {
        let mut cache = Cache::new();
        let now = Instant::now();
        let mut waiting: Vec<_> = (0..10_000).map(|_| cache.want(agent(1), now)).collect();
        assert_eq!(cache.take_wanted(100), [agent(1)]);
        assert!(!cache.wants());
        cache.read(agent(1), vec![owner("a", 1, 1)], Vec::new(), AGES, now);
        for receiver in &mut waiting {
            receiver.changed().await.unwrap();
            assert!(*receiver.borrow());
        }
        assert_eq!(cache.look(agent(1), AGES, now), Look::Known);
        assert_eq!(cache.look(agent(1), AGES, now + AGES.again), Look::Aging);
        assert_eq!(cache.look(agent(1), AGES, now + AGES.most), Look::Unknown);
    }

    #[tokio::test]
    async fn who_denied_is_left_out_until_it_says_something_newer() {
        let mut cache = Cache::new();
        let now = Instant::now();
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), vec![owner("a", 2, 5)], Vec::new(), AGES, now);
        let mut changes = cache.subscribe(agent(1), now);
        cache.mask(agent(1), &ReplicaId::new("a"), Mark { epoch: 2, version: 7 });
        assert_eq!(names(&cache, 1), [""; 0]);
        // The same entry, read again.
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), vec![owner("a", 2, 5)], Vec::new(), AGES, now);
        assert_eq!(names(&cache, 1), [""; 0]);
        assert!(!changes.has_changed().unwrap());
        cache.news(agent(1), &News::Announced(owner("a", 2, 8)));
        assert!(changes.has_changed().unwrap());
        changes.borrow_and_update();
        assert_eq!(names(&cache, 1), ["a"]);
        // A later process is not meant.
        cache.mask(agent(1), &ReplicaId::new("a"), Mark { epoch: 2, version: 9 });
        cache.news(agent(1), &News::Announced(owner("a", 3, 1)));
        assert_eq!(names(&cache, 1), ["a"]);
    }

    #[tokio::test]
    async fn what_14_1_holds_is_read_again_soon_and_a_denial_lasts_until_then() {
        let mut cache = Cache::new();
        let now = Instant::now();
        let soon = now + UNPUBLISHED;
        let gitlab = || Replica { id: ReplicaId::new("grpc://k:1"), address: "grpc://k:1".into() };
        let mut changes = cache.subscribe(agent(1), now);
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), Vec::new(), vec![gitlab(), gitlab()], AGES, now);
        assert!(changes.has_changed().unwrap());
        changes.borrow_and_update();
        assert_eq!(cache.gitlab(agent(1)).count(), 1, "one for many tunnels");
        assert_eq!(cache.look(agent(1), AGES, soon), Look::Aging);
        cache.mask(agent(1), &gitlab().id, Mark::default());
        assert_eq!(cache.gitlab(agent(1)).count(), 0);
        cache.want_aging(AGES, 10, soon);
        assert_eq!(cache.take_wanted(1), [agent(1)]);
        cache.read(agent(1), Vec::new(), vec![gitlab()], AGES, soon);
        assert!(changes.has_changed().unwrap());
        assert_eq!(cache.gitlab(agent(1)).count(), 1);
        // An agent that nobody holds may come to one of 14.1 as long as there are any.
        drop(cache.want(agent(2), now));
        cache.take_wanted(1);
        cache.read(agent(2), Vec::new(), Vec::new(), AGES, now);
        assert_eq!(cache.look(agent(2), AGES, soon), Look::Known);
        cache.mixed(now);
        assert_eq!(cache.look(agent(2), AGES, soon), Look::Aging);
        assert_eq!(cache.look(agent(2), AGES, now + AGES.again - Duration::from_secs(1)), Look::Aging);
    }

    #[tokio::test]
    async fn slots_that_nobody_uses_are_swept() {
        let mut cache = Cache::new();
        let now = Instant::now();
        let kept = cache.subscribe(agent(i64::MAX), now);
        for id in 1..=20 * SWEEP as i64 {
            // One a second: the last minute's are kept.
            drop(cache.subscribe(agent(id), now + Duration::from_secs(u64::try_from(id).unwrap())));
        }
        assert!(cache.len() <= 2 * SWEEP, "{}", cache.len());
        assert!(cache.slots.contains_key(&agent(i64::MAX)));
        drop(kept);
    }
}
