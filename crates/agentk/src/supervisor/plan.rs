//! Decides which sessions there should be, without I/O: events go in, actions come out.
//!
//! The agent wants sessions with several replicas of kas. Replicas are counted by the names in their response
//! headers and not by connections, because all of them may be behind one address. A client cannot dial a
//! particular replica there. So the agent connects, learns which replica answered, and closes the connection
//! if it has a session with that replica already.
//!
//! * While no session carries requests, a new connection opens its tunnels immediately. Otherwise it learns
//!   its replica first.
//! * When a session is lost, or kas asks the agent to connect elsewhere, the next one is dialled immediately,
//!   with full jitter.
//! * While the agent has sessions with too few replicas and more are running, it dials again 10 to 20 s after
//!   each connection that reached no new replica, without a limit.
//! * A kas that does not name itself gets one session.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    flaw::{Flaw, flawed},
    replica::Replica,
    session::{ANSWER_TIMEOUT, Begin, SessionStatus, Stage},
};

/// The first and the longest pause after a lost session or a failed attempt, with full jitter. The agents of
/// a lost replica neither overload the next one nor wait long.
pub(super) const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// The first and the longest pause after a rejected token.
pub(super) const PAUSE_REJECTED: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));
/// The pause after a connection that reached no new replica. kas allows each token 100 connections per
/// minute.
const PAUSE_NO_NEW_REPLICA: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));
/// A session that lasted this long resets the backoff. The time is short so that an agent that loses two
/// replicas in a row does not wait for seconds. It still slows down reconnects to a kas that accepts
/// connections and drops them immediately.
const GOOD_AFTER: Duration = Duration::from_secs(1);
/// A replica count stays in effect for this long after a lower one was reported: a replica that restarts is
/// back within this time.
const COUNT_VALID: Duration = Duration::from_secs(300);
/// A replica that asked the agent to connect elsewhere is avoided for this long, unless there is no other: it
/// is about to exit. (Or the connection had only reached its maximum age: nothing on the wire distinguishes
/// the two.) After a restart it is another process, which is not avoided.
const AVOID: Duration = Duration::from_secs(30);
/// When fewer replicas than wanted are known, their count is requested again after this time. The count is
/// only in response headers, and an idle agent receives none. If the time is short, streams are opened
/// without need; if it is long, a new replica is found late.
const ASK_AFTER: Duration = Duration::from_secs(120);
/// The time after which the replicas of a serving session's tunnels are known.
const SETTLE_AFTER: Duration = Duration::from_secs(1);
/// A warning is logged when there were too few replicas for this long.
const WARN_AFTER: Duration = Duration::from_secs(120);

/// Identifies a session within a plan. Later sessions have larger ids.
pub(super) type SessionId = u64;

/// What the supervisor must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Let the session open its tunnels.
    Admit(SessionId),
    /// Close the session.
    Close(SessionId, CloseReason),
    /// Log that requests can arrive through the session.
    Announce(SessionId),
    /// Tell the retiring session that another one serves.
    Replaced(SessionId),
    /// Let the session find out how many replicas there are.
    Ask(SessionId),
    /// Log that there are sessions with fewer replicas than wanted.
    WarnShort,
    /// Log that this is no longer so.
    Recovered,
}

/// Why a session is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// Another session serves its replica.
    AlreadyServed,
    /// Its replica has asked the agent to connect elsewhere.
    Leaving,
    /// Its kas does not name itself, so it cannot be distinguished from the others.
    Unnamed,
    /// There are enough sessions without it.
    Spare,
}

/// What a change of a session means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing that needs to be logged.
    Quiet,
    /// kas asked the agent to connect elsewhere, or the connection broke. The next attempt is made after this
    /// pause.
    Lost { retiring: bool, retry_in: Duration },
    /// kas rejected the agent. `alone`: no other replica accepts it.
    Rejected { alone: bool, retry_in: Duration },
}

/// A pause that grows exponentially.
#[derive(Debug, Clone, Copy)]
struct Backoff {
    bounds: (Duration, Duration),
    next: Duration,
}

impl Backoff {
    fn new(bounds: (Duration, Duration)) -> Self {
        Self { bounds, next: bounds.0 }
    }

    /// Returns a random pause up to the current bound, and doubles the bound.
    fn pause(&mut self) -> Duration {
        let bound = self.next;
        let longest = if flawed(Flaw::EndlessBackoff) { Duration::MAX } else { self.bounds.1 };
        self.next = bound.saturating_mul(2).min(longest);
        bound.mul_f64(rand::random())
    }

    fn reset(&mut self) {
        self.next = self.bounds.0;
    }
}

/// The number of running replicas, as kas has reported it.
#[derive(Debug, Default)]
struct ReplicaCount {
    now: usize,
    reported_at: Option<Instant>,
    /// Higher counts, and when a lower one was reported.
    past: Vec<(usize, Instant)>,
}

impl ReplicaCount {
    fn record(&mut self, count: usize, at: Instant) {
        if self.reported_at.is_some_and(|last| at < last) {
            return;
        }
        if count < self.now {
            self.past.push((self.now, at));
        }
        // There is at most one entry for each count.
        self.past.retain(|(past, _)| *past > count);
        self.now = count;
        self.reported_at = Some(at);
    }

    /// The highest count that is in effect; 0 if no kas has reported one.
    fn highest(&self, now: Instant) -> usize {
        let past = self.past.iter().filter(|(_, until)| now < *until + COUNT_VALID).map(|(count, _)| *count);
        past.chain([self.now]).max().unwrap_or_default()
    }
}

#[derive(Debug)]
struct Entry {
    status: SessionStatus,
    begun: Instant,
    serves_since: Option<Instant>,
    retired: Option<Instant>,
    /// The agent closes it, or it was replaced. Its end needs no reaction.
    closing: bool,
    replaced: bool,
    /// [`Action::Announce`] was returned.
    announced: bool,
}

impl Entry {
    /// Whether it has tunnels, or opens them.
    fn carries(&self) -> bool {
        !self.closing && matches!(self.status.stage, Stage::Opening | Stage::Serving)
    }

    fn asks(&self) -> bool {
        !self.closing && self.status.stage == Stage::Asking
    }

    /// Whether requests can arrive. A kas that does not name itself, like GitLab's, answers a tunnel only
    /// with its first request.
    fn serves(&self, now: Instant) -> bool {
        let opening = match &self.status.answer {
            Some(answer) => answer.replica.is_none(),
            None => now >= self.begun + ANSWER_TIMEOUT,
        };
        self.carries() && (self.status.stage == Stage::Serving || opening)
    }

    /// The replicas it is connected to: those of its tunnels, or else the one that its last stream named.
    /// Empty: not known.
    fn replicas(&self) -> &[Replica] {
        match &self.status.answer {
            _ if !self.status.replicas.is_empty() => &self.status.replicas,
            Some(answer) => answer.replica.as_slice(),
            None => &[],
        }
    }
}

/// The sessions, and what is known about the replicas.
#[derive(Debug)]
pub(super) struct Plan {
    wanted: usize,
    sessions: BTreeMap<SessionId, Entry>,
    next: SessionId,
    counted: ReplicaCount,
    /// The replicas that asked the agent to connect elsewhere, and when.
    leaving: Vec<(Replica, Instant)>,
    dialing: bool,
    /// The earliest time of the next attempt.
    not_before: Instant,
    /// No replica accepts the token: there is no attempt before this time.
    rejected: Option<Instant>,
    pauses: Backoff,
    rejections: Backoff,
    asked: Instant,
    /// The time since which there are too few replicas.
    short: Option<Instant>,
    warned: bool,
}

impl Plan {
    /// Creates the plan of an agent that wants sessions with this many replicas.
    pub(super) fn new(wanted: usize, now: Instant) -> Self {
        Self {
            wanted: wanted.max(1),
            sessions: BTreeMap::new(),
            next: 0,
            counted: ReplicaCount::default(),
            leaving: Vec::new(),
            dialing: false,
            not_before: now,
            rejected: None,
            pauses: Backoff::new(PAUSE),
            rejections: Backoff::new(PAUSE_REJECTED),
            asked: now,
            short: None,
            warned: false,
        }
    }

    /// Returns how many replicas there should be sessions with: the wanted number, or the number that is
    /// running if that is lower.
    pub(super) fn target(&self, now: Instant) -> usize {
        self.counted.highest(now).clamp(1, self.wanted)
    }

    /// Returns the number of replicas that can send requests.
    pub(super) fn served(&self, now: Instant) -> usize {
        count(self.sessions.values().filter(|entry| entry.serves(now)))
    }

    /// Whether the replica is about to exit and there may be another one.
    fn is_avoided(&self, replica: &Replica, now: Instant) -> bool {
        self.counted.highest(now) > 1
            && self.leaving.iter().any(|(leaving, since)| leaving.is_process(replica) && now < *since + AVOID)
    }

    /// Whether all replicas of the session are avoided.
    fn is_to_be_left(&self, entry: &Entry, now: Instant) -> bool {
        !entry.replicas().is_empty() && entry.replicas().iter().all(|replica| self.is_avoided(replica, now))
    }

    /// Returns the number of replicas that have a session, or will have one soon.
    fn covered(&self, now: Instant) -> usize {
        // A replica that does not answer may hang. It counts only if there is no other.
        let hangs = |entry: &Entry| {
            entry.status.answer.is_none() && now >= entry.begun + ANSWER_TIMEOUT && self.target(now) > 1
        };
        count(
            self.sessions
                .values()
                .filter(|entry| entry.carries() && !hangs(entry) && !self.is_to_be_left(entry, now)),
        )
    }

    fn is_short(&self, now: Instant) -> bool {
        self.covered(now) < self.target(now)
    }

    /// Whether an attempt or a session is about to show more.
    fn is_pending(&self, now: Instant) -> bool {
        let unanswered = |entry: &Entry| {
            entry.status.stage == Stage::Opening
                && entry.status.answer.is_none()
                && now < entry.begun + ANSWER_TIMEOUT
        };
        self.dialing
            || self.sessions.values().any(|entry| !entry.closing && (entry.asks() || unanswered(entry)))
    }

    /// Returns when to dial; `None`: there is no need.
    pub(super) fn dial_at(&self, now: Instant) -> Option<Instant> {
        (!self.is_pending(now) && self.is_short(now))
            .then(|| self.rejected.unwrap_or(self.not_before).max(self.not_before))
    }

    /// Records that an attempt has started.
    pub(super) fn dial_started(&mut self) {
        self.dialing = true;
    }

    /// Records that an attempt has failed. Returns the pause before the next one.
    pub(super) fn dial_failed(&mut self, now: Instant) -> Duration {
        self.dialing = false;
        self.soon(now)
    }

    /// Records that an attempt has failed and that there is an address that was not tried yet. Returns the
    /// pause before that one is dialled. It is short but random, so that the agents of a lost replica do not
    /// all connect in the same moment.
    pub(super) fn dial_failed_here(&mut self, now: Instant) -> Duration {
        self.dialing = false;
        self.hasten(now)
    }

    /// Schedules the next attempt after the shortest pause, regardless of earlier failures: there is an
    /// address that was not tried yet. Returns that pause.
    pub(super) fn hasten(&mut self, now: Instant) -> Duration {
        let pause = PAUSE.0.mul_f64(rand::random());
        self.not_before = now + pause;
        pause
    }

    /// Records that an attempt has led to a connection. Returns how its session starts.
    pub(super) fn connected(&mut self, now: Instant) -> (SessionId, Begin) {
        self.dialing = false;
        let id = self.next;
        self.next += 1;
        let begin = if self.sessions.values().any(Entry::carries) { Begin::Asking } else { Begin::Tunnels };
        let stage = match begin {
            Begin::Tunnels => Stage::Opening,
            Begin::Asking => Stage::Asking,
        };
        let status = SessionStatus { stage, answer: None, replicas: Vec::new(), drained_by: None };
        self.sessions.insert(
            id,
            Entry {
                status,
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

    /// Records the status of a session.
    pub(super) fn changed(&mut self, id: SessionId, status: SessionStatus, now: Instant) -> Change {
        let Some(entry) = self.sessions.get_mut(&id) else { return Change::Quiet };
        let mut status = status;
        if status.stage == Stage::Asking {
            // Its admission may not have reached it yet.
            status.stage = entry.status.stage.clone();
        }
        let before = std::mem::replace(&mut entry.status, status);
        if let Some(answer) = &entry.status.answer
            && before.answer.as_ref() != Some(answer)
            && let Some(replicas) = answer.replicas
        {
            self.counted.record(replicas, answer.at);
        }
        if entry.status.stage == Stage::Serving && entry.serves_since.is_none() {
            entry.serves_since = Some(now);
            self.rejections.reset();
        }
        if let Some(replica) = &entry.status.drained_by
            && before.drained_by.is_none()
        {
            self.leaving.retain(|(leaving, since)| leaving != replica && now < *since + AVOID);
            self.leaving.push((replica.clone(), now));
        }
        let lived = matches!(before.stage, Stage::Asking | Stage::Opening | Stage::Serving);
        let (closing, good) = (entry.closing, entry.begun + GOOD_AFTER <= now);
        let retiring = match &entry.status.stage {
            Stage::Retiring => {
                entry.retired.get_or_insert(now);
                true
            }
            Stage::Ended(_) => false,
            _ => return Change::Quiet,
        };
        let rejected = matches!(entry.status.stage, Stage::Ended(Some(_)));
        if !retiring {
            self.sessions.remove(&id);
        }
        if !lived || closing {
            return Change::Quiet;
        }
        if good {
            self.pauses.reset();
        }
        if rejected {
            let alone = !self.sessions.values().any(Entry::carries);
            let retry_in = self.rejections.pause();
            if alone {
                self.rejected = Some(now + retry_in);
            } else {
                // Another replica accepts the agent. If its session is lost, the reconnect must not wait for
                // this pause.
                self.not_before = now + retry_in;
            }
            return Change::Rejected { alone, retry_in };
        }
        Change::Lost { retiring, retry_in: self.soon(now) }
    }

    /// Records that the token was replaced: kas has not rejected the new one.
    pub(super) fn token_replaced(&mut self, now: Instant) {
        self.rejected = None;
        self.not_before = now;
        self.pauses.reset();
        self.rejections.reset();
    }

    fn soon(&mut self, now: Instant) -> Duration {
        let pause = self.pauses.pause();
        self.not_before = now + pause;
        pause
    }

    fn later(&mut self, now: Instant) {
        self.not_before = now
            + PAUSE_NO_NEW_REPLICA.0
            + (PAUSE_NO_NEW_REPLICA.1 - PAUSE_NO_NEW_REPLICA.0).mul_f64(rand::random());
    }

    /// Returns what must be done now. Call it again after each change, and at [`wake_at`](Self::wake_at).
    pub(super) fn next_actions(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.rejected.is_some_and(|until| until <= now) {
            self.rejected = None;
        }
        self.leaving.retain(|(_, since)| now < *since + AVOID);
        while let Some((id, verdict)) = self.next_verdict(now) {
            let entry = self.sessions.get_mut(&id);
            match verdict {
                None => {
                    if let Some(entry) = entry {
                        entry.status.stage = Stage::Opening;
                    }
                    actions.push(Action::Admit(id));
                }
                Some(reason) => {
                    if let Some(entry) = entry {
                        entry.closing = true;
                    }
                    match reason {
                        CloseReason::Leaving => drop(self.soon(now)),
                        CloseReason::AlreadyServed | CloseReason::Unnamed => self.later(now),
                        CloseReason::Spare => {}
                    }
                    actions.push(Action::Close(id, reason));
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

    /// Finds a session to admit (`None`) or to close, with the reason.
    fn next_verdict(&self, now: Instant) -> Option<(SessionId, Option<CloseReason>)> {
        let has_carrier = self.sessions.values().any(Entry::carries);
        for (id, entry) in self.sessions.iter().filter(|(_, entry)| entry.asks()) {
            if !has_carrier {
                return Some((*id, None));
            }
            let Some(answer) = &entry.status.answer else { continue };
            let verdict = match &answer.replica {
                None => Some(CloseReason::Unnamed),
                Some(replica) if self.is_avoided(replica, now) => Some(CloseReason::Leaving),
                Some(replica) if self.is_at(replica) => Some(CloseReason::AlreadyServed),
                Some(_) => None,
            };
            return Some((*id, verdict));
        }
        // Two connections may have been admitted at the same moment, or tunnels may end at another replica
        // than the stream that named the replica.
        let mut settled: Vec<(&SessionId, &Entry)> = self
            .sessions
            .iter()
            .filter(|(_, entry)| entry.carries())
            .filter(|(_, entry)| entry.serves_since.is_some_and(|since| since + SETTLE_AFTER <= now))
            .collect();
        settled.sort_by_key(|(id, entry)| (self.is_to_be_left(entry, now), **id));
        let carrying = self.sessions.values().filter(|entry| entry.carries()).count();
        let (target, covered) = (self.target(now), self.covered(now));
        let mut kept = BTreeSet::new();
        let mut spare = None;
        for (id, entry) in settled {
            let replicas = entry.replicas();
            let adds = replicas.is_empty() || replicas.iter().any(|replica| !kept.contains(replica));
            if self.is_to_be_left(entry, now) && kept.len() >= target {
                spare = Some((*id, Some(CloseReason::Spare)));
            } else if !adds && (covered < target || carrying > target) {
                spare = Some((*id, Some(CloseReason::AlreadyServed)));
            } else if adds && kept.len() >= self.wanted {
                spare = Some((*id, Some(CloseReason::Spare)));
            } else {
                kept.extend(replicas.iter().cloned());
            }
        }
        spare
    }

    /// Whether a session carries requests of this replica.
    fn is_at(&self, replica: &Replica) -> bool {
        self.sessions.values().any(|entry| entry.carries() && entry.replicas().contains(replica))
    }

    /// Returns when to request the number of replicas; `None`: there are enough sessions, or no kas reports
    /// the number.
    fn ask_at(&self, now: Instant) -> Option<Instant> {
        let said = self.counted.reported_at?;
        // While there are too few sessions, each attempt reports the number.
        let idle = !self.is_short(now) && self.served(now) < self.wanted;
        (idle && self.sessions.values().any(Entry::can_ask)).then(|| said.max(self.asked) + ASK_AFTER)
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
                    // The cause probably affects many agents at this moment.
                    let spread = PAUSE.0.mul_f64(rand::random());
                    self.not_before = self.not_before.max(now + spread);
                }
            }
            Some(since) if since + WARN_AFTER <= now && !self.warned && self.served(now) > 0 => {
                self.warned = true;
                actions.push(Action::WarnShort);
            }
            Some(_) => {}
        }
    }

    /// Returns the next time, later than `now`, at which [`next_actions`](Self::next_actions) or
    /// [`dial_at`](Self::dial_at) may return something else without an event.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        let mut times = vec![];
        times.extend(self.dial_at(now));
        times.extend(self.ask_at(now));
        times.extend(self.rejected);
        times.extend(self.short.map(|since| since + WARN_AFTER));
        times.extend(self.leaving.iter().map(|(_, since)| *since + AVOID));
        times.extend(self.counted.past.iter().map(|(_, until)| *until + COUNT_VALID));
        for entry in self.sessions.values() {
            times.push(entry.begun + ANSWER_TIMEOUT);
            times.extend(entry.serves_since.map(|since| since + SETTLE_AFTER));
        }
        times.into_iter().filter(|at| *at > now).min()
    }
}

impl Entry {
    fn can_ask(&self) -> bool {
        self.carries()
            && self.status.stage == Stage::Serving
            && self.status.answer.as_ref().is_some_and(|answer| answer.replica.is_some())
    }
}

/// Counts different replicas. A session whose replica is not known counts as one.
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
