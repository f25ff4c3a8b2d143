//! Decides which sessions there should be: what happened in, what to do out, without I/O.
//!
//! The agent wants sessions with several replicas of kas, counted by the names in their response headers and not by
//! connections: all of them stand behind one address. Nobody can dial a certain replica, so it dials, asks, and lets
//! go of what it has already.
//!
//! * While no session carries requests, a connection opens its tunnels at once. A further one asks first.
//! * When a session is lost, or kas asks it to go elsewhere, the next is dialled at once, with full jitter.
//! * While too few replicas are served although more live, the next is dialled 10 to 20 s after one that was reached
//!   in vain, without end.
//! * A kas that does not name itself gets one session.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    replica::Replica,
    session::{ANSWER, Begin, Stage, Standing},
};

/// First and longest pause after a lost session or a failed attempt: full jitter, so that a fleet that lost its replica
/// neither storms the next one nor waits long.
pub(super) const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// First and longest pause after a refused token.
pub(super) const REFUSED: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));
/// Pause after a connection that reached nobody new. kas counts connections: 100 a minute for each token.
const AGAIN: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));
/// A session that lasted this long was good: the next attempt begins anew. Short, because whoever loses a replica twice
/// in a row must not wait for seconds; a kas that accepts and breaks at once is still slowed down.
const GOOD: Duration = Duration::from_secs(1);
/// A count of replicas is believed for this long after a lower one has come: one that restarts is back within it.
const SEEN: Duration = Duration::from_secs(300);
/// A replica that asked the agent to go elsewhere is not gone back to within this time, unless there is no other: it
/// is about to exit. (Or the connection had only reached its age: nothing on the wire tells the two apart.) Once it
/// has restarted it is another process, and gone back to at once.
const AVOID: Duration = Duration::from_secs(30);
/// Where fewer replicas than wanted are known, their count is asked for again after this time: it travels in response
/// headers only, and an idle agent gets none. Shorter: more streams for nothing; longer: a replica that is added is
/// found later.
const ASK: Duration = Duration::from_secs(120);
/// A session that serves shows where its tunnels are within this time.
const SETTLE: Duration = Duration::from_secs(1);
/// Too few replicas for this long are worth a line in the log.
const SHORT: Duration = Duration::from_secs(120);

/// Names a session within a plan; later ones are larger.
pub(super) type SessionId = u64;

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Let the session, which asks, open its tunnels.
    Admit(SessionId),
    /// Close the session.
    Close(SessionId, Why),
    /// Tell the operator that requests can come through the session.
    Announce(SessionId),
    /// Tell the session, which retires, that another serves.
    Replaced(SessionId),
    /// Let the session ask how many replicas there are.
    Ask(SessionId),
    /// Tell the operator that fewer replicas than wanted answer.
    WarnShort,
    /// Tell the operator that this is over.
    Recovered,
}

/// Why a session is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// Its replica is served by another session.
    Served,
    /// Its replica has asked the agent to go elsewhere.
    Leaving,
    /// It does not name itself: it cannot be told from the others.
    Unnamed,
    /// There are enough without it.
    Spare,
}

/// What the change of a session means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing that needs a word.
    Quiet,
    /// kas wants the agent elsewhere, or the connection broke: the next attempt is after this pause.
    Lost { retiring: bool, retry_in: Duration },
    /// kas refused the agent. `alone`: nobody else accepts it either.
    Refused { alone: bool, retry_in: Duration },
}

/// A pause that grows.
#[derive(Debug, Clone, Copy)]
struct Backoff {
    bounds: (Duration, Duration),
    next: Duration,
}

impl Backoff {
    fn new(bounds: (Duration, Duration)) -> Self {
        Self { bounds, next: bounds.0 }
    }

    /// Returns a random pause up to the present bound, which doubles.
    fn pause(&mut self) -> Duration {
        let bound = self.next;
        self.next = (bound * 2).min(self.bounds.1);
        bound.mul_f64(rand::random())
    }

    fn reset(&mut self) {
        self.next = self.bounds.0;
    }
}

/// How many replicas live, as kas has said lately.
#[derive(Debug, Default)]
struct Seen {
    now: usize,
    said_at: Option<Instant>,
    /// Higher counts, and when a lower one came.
    past: Vec<(usize, Instant)>,
}

impl Seen {
    fn hear(&mut self, count: usize, at: Instant) {
        if self.said_at.is_some_and(|last| at < last) {
            return;
        }
        if count < self.now {
            self.past.push((self.now, at));
        }
        // As many entries at most as there are counts.
        self.past.retain(|(past, _)| *past > count);
        self.now = count;
        self.said_at = Some(at);
    }

    /// The most that were said to live, now or lately; 0 when none ever named a count.
    fn most(&self, now: Instant) -> usize {
        let past = self.past.iter().filter(|(_, until)| now < *until + SEEN).map(|(count, _)| *count);
        past.chain([self.now]).max().unwrap_or_default()
    }
}

#[derive(Debug)]
struct Entry {
    standing: Standing,
    begun: Instant,
    serves_since: Option<Instant>,
    retired: Option<Instant>,
    /// It is closed by this side, or told that it is replaced: what becomes of it is of no interest.
    closing: bool,
    replaced: bool,
    /// [`Action::Announce`] was returned.
    announced: bool,
}

impl Entry {
    /// Whether it has tunnels, or soon will.
    fn carries(&self) -> bool {
        !self.closing && matches!(self.standing.stage, Stage::Opening | Stage::Serving)
    }

    fn asks(&self) -> bool {
        !self.closing && self.standing.stage == Stage::Asking
    }

    /// Whether requests can come. A kas that does not name itself, as GitLab's, answers a tunnel with the first
    /// request only.
    fn serves(&self, now: Instant) -> bool {
        let opening = match &self.standing.answer {
            Some(answer) => answer.replica.is_none(),
            None => now >= self.begun + ANSWER,
        };
        self.carries() && (self.standing.stage == Stage::Serving || opening)
    }

    /// The replicas it is at: where its tunnels are, or what its last stream said. None: it is not known.
    fn replicas(&self) -> &[Replica] {
        match &self.standing.answer {
            _ if !self.standing.replicas.is_empty() => &self.standing.replicas,
            Some(answer) => answer.replica.as_slice(),
            None => &[],
        }
    }
}

/// The sessions, and what is known of the replicas.
#[derive(Debug)]
pub(super) struct Plan {
    wanted: usize,
    sessions: BTreeMap<SessionId, Entry>,
    next: SessionId,
    seen: Seen,
    /// Replicas that asked the agent to go elsewhere, and when.
    leaving: Vec<(Replica, Instant)>,
    dialing: bool,
    /// The next attempt is not before this.
    not_before: Instant,
    /// Nobody accepts the token: no attempt before this.
    refused: Option<Instant>,
    pauses: Backoff,
    refusals: Backoff,
    asked: Instant,
    /// Since when fewer replicas than wanted are served.
    short: Option<Instant>,
    warned: bool,
}

impl Plan {
    /// Makes the plan of an agent that wants sessions with this many replicas.
    pub(super) fn new(wanted: usize, now: Instant) -> Self {
        Self {
            wanted: wanted.max(1),
            sessions: BTreeMap::new(),
            next: 0,
            seen: Seen::default(),
            leaving: Vec::new(),
            dialing: false,
            not_before: now,
            refused: None,
            pauses: Backoff::new(PAUSE),
            refusals: Backoff::new(REFUSED),
            asked: now,
            short: None,
            warned: false,
        }
    }

    /// Returns how many replicas should be served: as many as are wanted, or as there are.
    pub(super) fn target(&self, now: Instant) -> usize {
        self.seen.most(now).clamp(1, self.wanted)
    }

    /// Returns how many replicas requests can come from.
    pub(super) fn served(&self, now: Instant) -> usize {
        count(self.sessions.values().filter(|entry| entry.serves(now)))
    }

    /// Whether the replica is about to exit, and there may be another.
    fn is_avoided(&self, replica: &Replica, now: Instant) -> bool {
        self.seen.most(now) > 1
            && self.leaving.iter().any(|(leaving, since)| leaving.is_process(replica) && now < *since + AVOID)
    }

    /// Whether the session is only at replicas that are avoided.
    fn leads_away(&self, entry: &Entry, now: Instant) -> bool {
        !entry.replicas().is_empty() && entry.replicas().iter().all(|replica| self.is_avoided(replica, now))
    }

    /// Returns how many replicas are taken care of.
    fn covered(&self, now: Instant) -> usize {
        // One that answers nothing may hang: it counts as long as there is no other.
        let hangs = |entry: &Entry| {
            entry.standing.answer.is_none() && now >= entry.begun + ANSWER && self.target(now) > 1
        };
        count(
            self.sessions
                .values()
                .filter(|entry| entry.carries() && !hangs(entry) && !self.leads_away(entry, now)),
        )
    }

    fn is_short(&self, now: Instant) -> bool {
        self.covered(now) < self.target(now)
    }

    /// Whether something that was begun will soon tell more.
    fn is_pending(&self, now: Instant) -> bool {
        let unanswered = |entry: &Entry| {
            entry.standing.stage == Stage::Opening
                && entry.standing.answer.is_none()
                && now < entry.begun + ANSWER
        };
        self.dialing
            || self.sessions.values().any(|entry| !entry.closing && (entry.asks() || unanswered(entry)))
    }

    /// Returns when to dial; `None` while there is no need.
    pub(super) fn dial_at(&self, now: Instant) -> Option<Instant> {
        (!self.is_pending(now) && self.is_short(now))
            .then(|| self.refused.unwrap_or(self.not_before).max(self.not_before))
    }

    /// Notes that an attempt has begun.
    pub(super) fn dials(&mut self) {
        self.dialing = true;
    }

    /// Notes that an attempt has failed; returns the pause before the next.
    pub(super) fn dial_failed(&mut self, now: Instant) -> Duration {
        self.dialing = false;
        self.soon(now)
    }

    /// Notes that an attempt has failed where another address has not been tried; returns the pause before that: a
    /// fleet that lost its replica goes elsewhere at once, and not in the same moment.
    pub(super) fn dial_failed_here(&mut self, now: Instant) -> Duration {
        self.dialing = false;
        self.hasten(now)
    }

    /// Notes that there is an address without a past: it is dialled after the shortest pause, whatever has become of
    /// others. Returns that pause.
    pub(super) fn hasten(&mut self, now: Instant) -> Duration {
        let pause = PAUSE.0.mul_f64(rand::random());
        self.not_before = now + pause;
        pause
    }

    /// Notes that an attempt has led to a connection; returns how its session begins.
    pub(super) fn connected(&mut self, now: Instant) -> (SessionId, Begin) {
        self.dialing = false;
        let id = self.next;
        self.next += 1;
        let begin = if self.sessions.values().any(Entry::carries) { Begin::Asking } else { Begin::Tunnels };
        let stage = match begin {
            Begin::Tunnels => Stage::Opening,
            Begin::Asking => Stage::Asking,
        };
        let standing = Standing { stage, answer: None, replicas: Vec::new(), drained_by: None };
        self.sessions.insert(
            id,
            Entry {
                standing,
                begun: now,
                serves_since: None,
                retired: None,
                closing: false,
                replaced: false,
                announced: false,
            },
        );
        (id, begin)
    }

    /// Notes how a session stands now.
    pub(super) fn changed(&mut self, id: SessionId, standing: Standing, now: Instant) -> Change {
        let Some(entry) = self.sessions.get_mut(&id) else { return Change::Quiet };
        let mut standing = standing;
        if standing.stage == Stage::Asking {
            // What it was told may not have reached it.
            standing.stage = entry.standing.stage.clone();
        }
        let before = std::mem::replace(&mut entry.standing, standing);
        if let Some(answer) = &entry.standing.answer
            && before.answer.as_ref() != Some(answer)
            && let Some(replicas) = answer.replicas
        {
            self.seen.hear(replicas, answer.at);
        }
        if entry.standing.stage == Stage::Serving && entry.serves_since.is_none() {
            entry.serves_since = Some(now);
            self.refusals.reset();
        }
        if let Some(replica) = &entry.standing.drained_by
            && before.drained_by.is_none()
        {
            self.leaving.retain(|(leaving, since)| leaving != replica && now < *since + AVOID);
            self.leaving.push((replica.clone(), now));
        }
        let lived = matches!(before.stage, Stage::Asking | Stage::Opening | Stage::Serving);
        let (closing, good) = (entry.closing, entry.begun + GOOD <= now);
        let retiring = match &entry.standing.stage {
            Stage::Retiring => {
                entry.retired.get_or_insert(now);
                true
            }
            Stage::Over(_) => false,
            _ => return Change::Quiet,
        };
        let refused = matches!(entry.standing.stage, Stage::Over(Some(_)));
        if !retiring {
            self.sessions.remove(&id);
        }
        if !lived || closing {
            return Change::Quiet;
        }
        if good {
            self.pauses.reset();
        }
        if refused {
            let alone = !self.sessions.values().any(Entry::carries);
            let retry_in = self.refusals.pause();
            if alone {
                self.refused = Some(now + retry_in);
            } else {
                // One that knows better serves: its loss must not wait for this pause.
                self.not_before = now + retry_in;
            }
            return Change::Refused { alone, retry_in };
        }
        Change::Lost { retiring, retry_in: self.soon(now) }
    }

    /// Notes that the token was exchanged: the new one has not been refused.
    pub(super) fn exchanged(&mut self, now: Instant) {
        self.refused = None;
        self.not_before = now;
        self.pauses.reset();
        self.refusals.reset();
    }

    fn soon(&mut self, now: Instant) -> Duration {
        let pause = self.pauses.pause();
        self.not_before = now + pause;
        pause
    }

    fn later(&mut self, now: Instant) {
        self.not_before = now + AGAIN.0 + (AGAIN.1 - AGAIN.0).mul_f64(rand::random());
    }

    /// Returns what is to be done now; call it again after each change, and at [`wake_at`](Self::wake_at).
    pub(super) fn settle(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.refused.is_some_and(|until| until <= now) {
            self.refused = None;
        }
        self.leaving.retain(|(_, since)| now < *since + AVOID);
        while let Some((id, verdict)) = self.judge(now) {
            let entry = self.sessions.get_mut(&id);
            match verdict {
                None => {
                    if let Some(entry) = entry {
                        entry.standing.stage = Stage::Opening;
                    }
                    actions.push(Action::Admit(id));
                }
                Some(why) => {
                    if let Some(entry) = entry {
                        entry.closing = true;
                    }
                    match why {
                        Why::Leaving => drop(self.soon(now)),
                        Why::Served | Why::Unnamed => self.later(now),
                        Why::Spare => {}
                    }
                    actions.push(Action::Close(id, why));
                }
            }
        }
        for (id, entry) in &mut self.sessions {
            if !entry.announced && entry.serves(now) {
                entry.announced = true;
                actions.push(Action::Announce(*id));
            }
        }
        let newest = self.sessions.values().filter(|e| e.carries()).filter_map(|e| e.serves_since).max();
        for (id, entry) in &mut self.sessions {
            if !entry.replaced && entry.retired.is_some_and(|retired| newest >= Some(retired)) {
                entry.replaced = true;
                actions.push(Action::Replaced(*id));
            }
        }
        if self.ask_at(now).is_some_and(|at| at <= now)
            && let Some((id, _)) = self.sessions.iter().find(|(_, entry)| entry.can_ask())
        {
            self.asked = now;
            actions.push(Action::Ask(*id));
        }
        self.watch_shortage(now, &mut actions);
        actions
    }

    /// Finds a session to admit (`None`) or to close.
    fn judge(&self, now: Instant) -> Option<(SessionId, Option<Why>)> {
        let carried = self.sessions.values().any(Entry::carries);
        for (id, entry) in self.sessions.iter().filter(|(_, entry)| entry.asks()) {
            if !carried {
                return Some((*id, None));
            }
            let Some(answer) = &entry.standing.answer else { continue };
            let verdict = match &answer.replica {
                None => Some(Why::Unnamed),
                Some(replica) if self.is_avoided(replica, now) => Some(Why::Leaving),
                Some(replica) if self.is_at(replica) => Some(Why::Served),
                Some(_) => None,
            };
            return Some((*id, verdict));
        }
        // Two connections may have been admitted at the same moment, and tunnels may have come to end elsewhere.
        let mut settled: Vec<(&SessionId, &Entry)> = self
            .sessions
            .iter()
            .filter(|(_, entry)| entry.carries())
            .filter(|(_, entry)| entry.serves_since.is_some_and(|since| since + SETTLE <= now))
            .collect();
        settled.sort_by_key(|(id, entry)| (self.leads_away(entry, now), **id));
        let carrying = self.sessions.values().filter(|entry| entry.carries()).count();
        let (target, covered) = (self.target(now), self.covered(now));
        let mut kept = BTreeSet::new();
        let mut spare = None;
        for (id, entry) in settled {
            let replicas = entry.replicas();
            let adds = replicas.is_empty() || replicas.iter().any(|replica| !kept.contains(replica));
            if self.leads_away(entry, now) && kept.len() >= target {
                spare = Some((*id, Some(Why::Spare)));
            } else if !adds && (covered < target || carrying > target) {
                spare = Some((*id, Some(Why::Served)));
            } else if adds && kept.len() >= self.wanted {
                spare = Some((*id, Some(Why::Spare)));
            } else {
                kept.extend(replicas.iter().cloned());
            }
        }
        spare
    }

    /// Whether a session carries requests from this replica.
    fn is_at(&self, replica: &Replica) -> bool {
        self.sessions.values().any(|entry| entry.carries() && entry.replicas().contains(replica))
    }

    /// Returns when to ask how many replicas there are; `None`: enough are served, or nobody counts.
    fn ask_at(&self, now: Instant) -> Option<Instant> {
        let said = self.seen.said_at?;
        // While it is short, each attempt tells.
        let idle = !self.is_short(now) && self.served(now) < self.wanted;
        (idle && self.sessions.values().any(Entry::can_ask)).then(|| said.max(self.asked) + ASK)
    }

    fn watch_shortage(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if !self.is_short(now) {
            if std::mem::take(&mut self.warned) {
                actions.push(Action::Recovered);
            }
            self.short = None;
            return;
        }
        match self.short {
            None => {
                self.short = Some(now);
                if !self.sessions.is_empty() {
                    // Whatever made it short happened to many agents at this moment.
                    let spread = PAUSE.0.mul_f64(rand::random());
                    self.not_before = self.not_before.max(now + spread);
                }
            }
            Some(since) if since + SHORT <= now && !self.warned && self.served(now) > 0 => {
                self.warned = true;
                actions.push(Action::WarnShort);
            }
            Some(_) => {}
        }
    }

    /// Returns when [`settle`](Self::settle) or [`dial_at`](Self::dial_at) may answer differently by the passing of
    /// time alone; always later than `now`.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        let mut times = vec![];
        times.extend(self.dial_at(now));
        times.extend(self.ask_at(now));
        times.extend(self.refused);
        times.extend(self.short.map(|since| since + SHORT));
        times.extend(self.leaving.iter().map(|(_, since)| *since + AVOID));
        times.extend(self.seen.past.iter().map(|(_, until)| *until + SEEN));
        for entry in self.sessions.values() {
            times.push(entry.begun + ANSWER);
            times.extend(entry.serves_since.map(|since| since + SETTLE));
        }
        times.into_iter().filter(|at| *at > now).min()
    }
}

impl Entry {
    fn can_ask(&self) -> bool {
        self.carries()
            && self.standing.stage == Stage::Serving
            && self.standing.answer.as_ref().is_some_and(|answer| answer.replica.is_some())
    }
}

/// Counts different replicas; a session whose replica is not known is one of its own.
fn count<'a>(sessions: impl Iterator<Item = &'a Entry>) -> usize {
    let mut replicas = BTreeSet::new();
    let mut unknown = 0;
    for entry in sessions {
        if entry.replicas().is_empty() {
            unknown += 1;
        }
        replicas.extend(entry.replicas());
    }
    replicas.len() + unknown
}

#[cfg(test)]
mod tests;
