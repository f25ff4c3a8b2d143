//! A cache of the holders of agents that were looked up. No I/O.
//!
//! An agent has a slot as long as it is looked up or waited for. A slot is filled by a read, updated by the
//! events that replicas publish, and refreshed by further reads. Updates that arrive during a read are also
//! applied to its result, because the result may be older.

use std::{collections::HashMap, time::Duration};

use cluster::{Mark, Replica};
use ids::{AgentId, ReplicaId};
use tokio::{sync::watch, time::Instant};

use crate::value::Owner;

/// Unused slots are removed once there are this many.
const SWEEP: usize = 1024;
/// A slot without waiters that was not looked up for this long is removed.
const UNUSED: Duration = Duration::from_secs(60);
/// The largest number of cached agents, of about 300 bytes each. At the limit, half of the slots without
/// waiters are removed, the least recently used first. With a lower limit, large installations would be read
/// again and again.
const MAX_AGENTS: usize = 200_000;
/// The largest number of agents that wait to be read: twice the number of requests that may wait. It is
/// reached only if Redis answers more slowly than requests arrive.
const MAX_WANTED: usize = 40_000;

/// Replicas of 14.1 publish no events. Their entries are read again as often as 14.1 reads them.
const UNPUBLISHED: Duration = Duration::from_secs(3);
/// A cluster counts as mixed for this long after an entry of 14.1 was last seen.
const MIXED: Duration = Duration::from_secs(600);
/// The largest number of replicas of 14.1 that are cached for an agent.
const MAX_GITLAB: usize = 64;

/// How long a read result is valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ages {
    /// From this age on it is read again, but still used.
    pub(crate) again: Duration,
    /// From this age on a lookup waits for a read.
    pub(crate) most: Duration,
}

/// What a replica published about an agent.
#[derive(Clone, Debug)]
pub(crate) enum Update {
    Announced(Owner),
    Withdrawn(ReplicaId, u64),
}

/// How current a cached result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// It is current.
    Known,
    /// It is used, and must be read again.
    Aging,
    /// It is too old, or there is none.
    Unknown,
}

#[derive(Debug)]
struct Slot {
    watch: watch::Sender<()>,
    holders: Vec<Owner>,
    /// Replicas of 14.1 that held the agent when it was read, and whether they have denied it since.
    gitlab: Vec<(Replica, bool)>,
    read_at: Option<Instant>,
    /// A read that is requested or in progress.
    reading: Option<Reading>,
    masks: Vec<(ReplicaId, Mark)>,
    touched: Instant,
}

#[derive(Debug)]
struct Reading {
    done: watch::Sender<bool>,
    /// Updates since the read was sent; `None` if it was not sent yet.
    news: Option<Vec<Update>>,
    /// Updates may have been lost since it was sent.
    outdated: bool,
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

    /// Returns the age from which it is read again.
    fn again(&self, ages: Ages, mixed: bool) -> Duration {
        let unpublished = !self.gitlab.is_empty() || (mixed && self.holders.is_empty());
        if unpublished { ages.again.min(UNPUBLISHED) } else { ages.again }
    }

    fn apply(&mut self, news: &Update) -> bool {
        match news {
            Update::Announced(owner) => {
                match self.holders.iter_mut().find(|known| known.replica == owner.replica) {
                    // A later process of the replica, or a later connection of the agent.
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
            Update::Withdrawn(replica, run) => {
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

/// The cached holders of agents.
#[derive(Debug)]
pub(crate) struct Cache {
    slots: HashMap<AgentId, Slot>,
    sweep_at: usize,
    wanted: Vec<AgentId>,
    /// Until then, there may be replicas of 14.1.
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

    /// Notes that there may be replicas of 14.1.
    pub(crate) fn mixed(&mut self, now: Instant) {
        self.mixed_until = Some(now + MIXED);
    }

    /// Notes that an entry of a replica of 14.1 was seen.
    pub(crate) fn see_gitlab(&mut self, now: Instant) {
        self.mixed(now);
        self.seen_gitlab = Some(now);
    }

    /// Whether an entry of 14.1 was seen here recently.
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
            if self.slots.len() >= MAX_AGENTS {
                self.forget_half();
            }
            self.sweep_at = (2 * self.slots.len()).clamp(SWEEP, MAX_AGENTS.max(self.slots.len() + SWEEP));
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

    /// Returns how many agents are cached.
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

    /// Wakes the waiters for agents that are held by a replica for which `which` is true.
    pub(crate) fn wake_holders(&mut self, which: impl Fn(&ReplicaId) -> bool) {
        for slot in self.slots.values() {
            if slot.holders.iter().any(|holder| which(&holder.replica)) {
                slot.watch.send_replace(());
            }
        }
    }

    /// Drops the announcements and denials of processes of a replica with a higher run than `run`: they are
    /// earlier processes, from before the clock was set back. The affected agents are read again.
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

    pub(crate) fn freshness(&mut self, agent: AgentId, ages: Ages, now: Instant) -> Freshness {
        let mixed = self.is_mixed(now);
        let Some(slot) = self.slots.get_mut(&agent) else { return Freshness::Unknown };
        slot.touched = now;
        let again = slot.again(ages, mixed);
        match slot.read_at.map(|at| now.duration_since(at)) {
            Some(age) if age < again => Freshness::Known,
            Some(age) if age < ages.most => Freshness::Aging,
            _ => Freshness::Unknown,
        }
    }

    /// Whether the agent was ever read.
    pub(crate) fn was_read(&self, agent: AgentId) -> bool {
        self.slots.get(&agent).is_some_and(|slot| slot.read_at.is_some())
    }

    /// Returns the known holders of the agent that have not denied it.
    pub(crate) fn holders(&self, agent: AgentId) -> impl Iterator<Item = &Owner> {
        let slot = self.slots.get(&agent);
        slot.into_iter().flat_map(|slot| slot.holders.iter().filter(|holder| !masked(&slot.masks, holder)))
    }

    /// Returns the replicas of 14.1 that hold the agent and have not denied it.
    pub(crate) fn gitlab(&self, agent: AgentId) -> impl Iterator<Item = &Replica> {
        let slot = self.slots.get(&agent);
        let held = slot.into_iter().flat_map(|slot| slot.gitlab.iter());
        held.filter(|(_, denied)| !denied).map(|(replica, _)| replica)
    }

    /// Returns the known holders of the agent, and whether they have denied it.
    pub(crate) fn claims(&self, agent: AgentId) -> Vec<(Owner, bool)> {
        let Some(slot) = self.slots.get(&agent) else { return Vec::new() };
        slot.holders.iter().map(|holder| (holder.clone(), masked(&slot.masks, holder))).collect()
    }

    pub(crate) fn mask(&mut self, agent: AgentId, replica: &ReplicaId, mark: Mark) {
        let Some(slot) = self.slots.get_mut(&agent) else { return };
        // Replicas of 14.1 have no versions: the denial is valid until the agent is read again.
        for (_, denied) in slot.gitlab.iter_mut().filter(|(known, _)| known.id == *replica) {
            *denied = true;
        }
        // Only masks of known holders are kept, so there are no more masks than holders.
        slot.masks.retain(|(known, _)| known != replica && slot.holders.iter().any(|h| h.replica == *known));
        if slot.holders.iter().any(|holder| holder.replica == *replica) {
            slot.masks.push((replica.clone(), mark));
        }
    }

    /// Requests a read. The returned watch becomes true when it succeeds, and closes when it fails.
    pub(crate) fn want(&mut self, agent: AgentId, now: Instant) -> watch::Receiver<bool> {
        let is_full = self.wanted.len() >= MAX_WANTED;
        let slot = self.slot(agent, now);
        slot.touched = now;
        if let Some(reading) = &slot.reading {
            return reading.done.subscribe();
        }
        let (done, receiver) = watch::channel(false);
        if is_full {
            // The same as a failed read.
            return receiver;
        }
        slot.reading = Some(Reading { done, news: None, outdated: false });
        self.wanted.push(agent);
        receiver
    }

    pub(crate) fn wants(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Takes agents to read now. Report each of them by [`read`](Self::read) or [`not_read`](Self::not_read).
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

    /// Stores a read result: the holders, and replicas of 14.1 by their URLs. Wakes the waiters if it differs
    /// from the cached one.
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
        // 14.1 has an entry for each tunnel.
        gitlab.dedup();
        gitlab.truncate(MAX_GITLAB);
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
        let outdated = reading.as_ref().is_some_and(|reading| reading.outdated);
        slot.read_at = Some(if outdated { now.checked_sub(ages.again).unwrap_or(now) } else { now });
        // A first result without holders makes no difference to the waiters.
        if before != slot.holders || other_gitlab || (first && !slot.holders.is_empty()) {
            slot.watch.send_replace(());
        }
        if let Some(reading) = reading {
            reading.done.send_replace(true);
        }
    }

    /// Notes that an agent could not be read. The waiters continue with the cached result.
    pub(crate) fn not_read(&mut self, agent: AgentId) {
        if let Some(slot) = self.slots.get_mut(&agent) {
            slot.reading = None;
        }
    }

    pub(crate) fn apply(&mut self, agent: AgentId, news: &Update) {
        let Some(slot) = self.slots.get_mut(&agent) else { return };
        if let Some(Reading { news: Some(during), .. }) = &mut slot.reading {
            during.push(news.clone());
        }
        // An update alone does not make a slot count as read, because other replicas may hold the agent too.
        if slot.apply(news) {
            slot.watch.send_replace(());
        }
    }

    /// Marks everything to be read again because messages may have been lost. Agents with waiters are read
    /// now.
    pub(crate) fn invalidate(&mut self, now: Instant, again: Duration) {
        let mut waited = Vec::new();
        for (agent, slot) in &mut self.slots {
            // The age from which it is read again but still used.
            if let Some(at) = &mut slot.read_at {
                *at = (*at).min(now.checked_sub(again).unwrap_or(now));
            }
            match &mut slot.reading {
                Some(reading) => reading.outdated = reading.news.is_some(),
                None if slot.watch.receiver_count() > 0 => waited.push(*agent),
                None => {}
            }
        }
        for agent in waited {
            drop(self.want(agent, now));
        }
    }

    /// Requests reads of agents with waiters whose results are old, at most `most`.
    pub(crate) fn want_aging(&mut self, ages: Ages, most: usize, now: Instant) {
        let mixed = self.is_mixed(now);
        let due: Vec<AgentId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.reading.is_none() && slot.watch.receiver_count() > 0)
            // Randomized by a quarter, so that agents that were read together are not read together again.
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
    async fn slots_are_bounded_and_those_with_waiters_are_kept() {
        let mut cache = Cache::new();
        let begun = Instant::now();
        let waited = cache.subscribe(agent(1), begun);
        let id = |n: usize| agent(i64::try_from(n).unwrap());
        for n in 2..2 * MAX_AGENTS {
            // All within the time after which a slot counts as unused.
            let now = begun + Duration::from_micros(n as u64);
            cache.subscribe(id(n), now);
            assert!(cache.len() <= MAX_AGENTS, "{} agents", cache.len());
        }
        assert!(cache.len() >= MAX_AGENTS / 2, "{} agents", cache.len());
        assert!(cache.slots.contains_key(&agent(1)) && waited.has_changed().is_ok());
        assert!(cache.slots.contains_key(&id(2 * MAX_AGENTS - 1)) && !cache.slots.contains_key(&id(2)));
    }

    #[tokio::test]
    async fn wanted_reads_are_bounded_and_more_count_as_failed() {
        let mut cache = Cache::new();
        let now = Instant::now();
        let id = |n: usize| agent(i64::try_from(n).unwrap());
        for n in 1..=MAX_WANTED {
            assert!(cache.want(id(n), now).has_changed().is_ok());
        }
        let mut beyond = cache.want(id(MAX_WANTED + 1), now);
        assert!(beyond.wait_for(|done| *done).await.is_err());
        // An agent that is already in the queue can still be waited for.
        assert!(cache.want(id(1), now).has_changed().is_ok());
        let taken = cache.take_wanted(10);
        assert_eq!(taken.len(), 10);
        assert!(cache.want(id(MAX_WANTED + 1), now).has_changed().is_ok());
    }

    #[tokio::test]
    async fn a_lower_run_counts_once_the_higher_one_is_gone() {
        let mut cache = Cache::new();
        let now = Instant::now() + AGES.again;
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), vec![owner("a", 9, 1), owner("b", 9, 1)], Vec::new(), AGES, now);
        cache.mask(agent(1), &ReplicaId::new("a"), Mark { epoch: 9, version: 5 });
        cache.apply(agent(1), &Update::Announced(owner("a", 3, 1)));
        assert_eq!(names(&cache, 1), ["b"]);
        let mut changes = cache.subscribe(agent(1), now);
        cache.forget_later(&ReplicaId::new("a"), 3, AGES.again, now);
        assert!(changes.has_changed().unwrap());
        assert_eq!(cache.freshness(agent(1), AGES, now), Freshness::Aging);
        changes.mark_unchanged();
        cache.apply(agent(1), &Update::Announced(owner("a", 3, 1)));
        assert_eq!((names(&cache, 1).len(), changes.has_changed().unwrap()), (2, true));
        cache.forget_later(&ReplicaId::new("b"), 9, AGES.again, now);
        assert_eq!(names(&cache, 1).len(), 2, "the same run is the same process");
    }

    #[tokio::test]
    async fn updates_during_a_read_are_applied_to_its_result() {
        let mut cache = Cache::new();
        let now = Instant::now();
        drop(cache.want(agent(1), now));
        assert_eq!(cache.take_wanted(10), [agent(1)]);
        cache.apply(agent(1), &Update::Announced(owner("a", 1, 1)));
        // Read before the agent connected.
        cache.read(agent(1), Vec::new(), Vec::new(), AGES, now);
        assert_eq!(names(&cache, 1), ["a"]);
        drop(cache.want(agent(1), now));
        cache.take_wanted(10);
        cache.apply(agent(1), &Update::Withdrawn(ReplicaId::new("a"), 1));
        cache.read(agent(1), vec![owner("a", 1, 1)], Vec::new(), AGES, now);
        assert_eq!(names(&cache, 1), [""; 0]);
    }

    #[tokio::test]
    async fn many_lookups_are_one_read() {
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
        assert_eq!(cache.freshness(agent(1), AGES, now), Freshness::Known);
        assert_eq!(cache.freshness(agent(1), AGES, now + AGES.again), Freshness::Aging);
        assert_eq!(cache.freshness(agent(1), AGES, now + AGES.most), Freshness::Unknown);
    }

    #[tokio::test]
    async fn a_replica_that_denied_is_left_out_until_a_newer_announcement() {
        let mut cache = Cache::new();
        let now = Instant::now();
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), vec![owner("a", 2, 5)], Vec::new(), AGES, now);
        let mut changes = cache.subscribe(agent(1), now);
        cache.mask(agent(1), &ReplicaId::new("a"), Mark { epoch: 2, version: 7 });
        assert_eq!(names(&cache, 1), [""; 0]);
        // The same entry is read again.
        drop(cache.want(agent(1), now));
        cache.take_wanted(1);
        cache.read(agent(1), vec![owner("a", 2, 5)], Vec::new(), AGES, now);
        assert_eq!(names(&cache, 1), [""; 0]);
        assert!(!changes.has_changed().unwrap());
        cache.apply(agent(1), &Update::Announced(owner("a", 2, 8)));
        assert!(changes.has_changed().unwrap());
        changes.borrow_and_update();
        assert_eq!(names(&cache, 1), ["a"]);
        // The denial does not apply to a later process.
        cache.mask(agent(1), &ReplicaId::new("a"), Mark { epoch: 2, version: 9 });
        cache.apply(agent(1), &Update::Announced(owner("a", 3, 1)));
        assert_eq!(names(&cache, 1), ["a"]);
    }

    #[tokio::test]
    async fn entries_of_14_1_are_read_again_soon_and_a_denial_is_valid_until_then() {
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
        assert_eq!(cache.gitlab(agent(1)).count(), 1, "one replica for many tunnels");
        assert_eq!(cache.freshness(agent(1), AGES, soon), Freshness::Aging);
        cache.mask(agent(1), &gitlab().id, Mark::default());
        assert_eq!(cache.gitlab(agent(1)).count(), 0);
        cache.want_aging(AGES, 10, soon);
        assert_eq!(cache.take_wanted(1), [agent(1)]);
        cache.read(agent(1), Vec::new(), vec![gitlab()], AGES, soon);
        assert!(changes.has_changed().unwrap());
        assert_eq!(cache.gitlab(agent(1)).count(), 1);
        // An agent without holders may connect to a replica of 14.1 as long as there are any.
        drop(cache.want(agent(2), now));
        cache.take_wanted(1);
        cache.read(agent(2), Vec::new(), Vec::new(), AGES, now);
        assert_eq!(cache.freshness(agent(2), AGES, soon), Freshness::Known);
        cache.mixed(now);
        assert_eq!(cache.freshness(agent(2), AGES, soon), Freshness::Aging);
        assert_eq!(
            cache.freshness(agent(2), AGES, now + AGES.again - Duration::from_secs(1)),
            Freshness::Aging
        );
    }

    #[tokio::test]
    async fn unused_slots_are_removed() {
        let mut cache = Cache::new();
        let now = Instant::now();
        let kept = cache.subscribe(agent(i64::MAX), now);
        for id in 1..=20 * SWEEP as i64 {
            // One per second: those of the last minute are kept.
            drop(cache.subscribe(agent(id), now + Duration::from_secs(u64::try_from(id).unwrap())));
        }
        assert!(cache.len() <= 2 * SWEEP, "{}", cache.len());
        assert!(cache.slots.contains_key(&agent(i64::MAX)));
        drop(kept);
    }
}
