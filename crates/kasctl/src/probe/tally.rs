//! What the probe saw. Times are since its start, and given by the caller.

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
    time::Duration,
};

use ids::AgentId;

use super::{
    latency::Latencies,
    outcome::{Done, Miss, MissKind},
};

/// Shorter gaps are not kept: answers do not come at exact intervals.
const SHORTEST_GAP: Duration = Duration::from_millis(200);
/// Maximum number of gaps that are kept. The longest is always known.
const MAX_GAPS: usize = 1_000;
/// How many of the slowest requests are kept.
const SLOWEST: usize = 10;
/// Maximum number of different failures that are kept.
const MAX_FAILURES: usize = 50;
/// Maximum number of names of replicas that are kept. Each restart of a pod is a new name.
const MAX_NAMES: usize = 1_000;

/// A time without an answer of an agent, although requests for it were due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gap {
    /// The agent.
    pub(super) agent: AgentId,
    /// When its last answer before came.
    pub(super) at: Duration,
    /// Until the next answer, or until the end.
    pub(super) duration: Duration,
    /// How many of its requests failed meanwhile.
    pub(super) failed: u64,
    /// Whether it was still going on at the end.
    pub(super) is_open: bool,
}

/// One of the slowest requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slow {
    /// The agent.
    pub(super) agent: AgentId,
    /// When it was sent.
    pub(super) at: Duration,
    /// How long it took.
    pub(super) duration: Duration,
    /// How often it was sent.
    pub(super) attempts: usize,
    /// Where it entered last.
    pub(super) entered: Rc<str>,
    /// Which replica's tunnel served it.
    pub(super) served: Option<String>,
}

/// Equal failures. Those that differ only in numbers are equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    /// The text with each number replaced.
    pattern: String,
    /// The first of them.
    pub(super) miss: Miss,
    /// How many there were.
    pub(super) count: u64,
    /// When the first was sent.
    pub(super) at: Duration,
    /// The agent of the first.
    pub(super) agent: AgentId,
    /// Where the first entered; `None`: it was not sent.
    pub(super) entered: Option<Rc<str>>,
}

/// The requests of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AgentTally {
    /// The agent.
    pub(super) id: AgentId,
    /// Requests that were due.
    pub(super) due: u64,
    /// Requests that were answered.
    pub(super) answered: u64,
    /// Requests that were not.
    pub(super) failed: u64,
    last_answer: Duration,
    failed_since: u64,
}

/// The requests that entered at an address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Entered {
    /// Tries, the second ones among them.
    pub(super) requests: u64,
    /// Tries that were not answered.
    pub(super) failed: u64,
}

/// What was seen since the last line.
#[derive(Debug, Default)]
pub(super) struct Second {
    /// Requests that were due.
    pub(super) due: u64,
    /// Requests that were answered.
    pub(super) answered: u64,
    /// Requests that were sent twice.
    pub(super) retried: u64,
    /// Requests that were not answered.
    pub(super) failed: u64,
    /// The longest that one of them took.
    pub(super) slowest: Duration,
    /// Where they entered.
    pub(super) entered: BTreeMap<Rc<str>, u64>,
    /// Which replicas served them.
    pub(super) served: BTreeMap<String, u64>,
    /// The first failure.
    pub(super) miss: Option<Miss>,
    /// Gaps that ended, the longest of them.
    pub(super) gap: Option<Gap>,
}

/// Everything that was seen.
#[derive(Debug)]
pub(super) struct Tally {
    noticed_after: Duration,
    gap_after: Duration,
    /// In the order in which they are asked.
    pub(super) agents: Vec<AgentTally>,
    index: HashMap<AgentId, usize>,
    /// When the open requests were sent, by number.
    open: BTreeMap<u64, Duration>,
    /// Requests that were due.
    pub(super) due: u64,
    /// Requests that were answered.
    pub(super) answered: u64,
    /// Requests that were sent twice.
    pub(super) retried: u64,
    /// Requests that were answered later than `noticed_after`.
    pub(super) late: u64,
    /// Requests that were not answered, by kind.
    pub(super) failed: BTreeMap<MissKind, u64>,
    /// How long the answered ones took.
    pub(super) latencies: Latencies,
    /// In the order in which they ended.
    pub(super) gaps: Vec<Gap>,
    /// How many more there were.
    pub(super) gaps_more: u64,
    /// The longest of all.
    pub(super) longest_gap: Option<Gap>,
    /// The slowest first; answered ones only.
    pub(super) slowest: Vec<Slow>,
    /// In the order in which they first occurred.
    pub(super) failures: Vec<Failure>,
    /// How many failures are not in them.
    pub(super) failures_more: u64,
    /// By address.
    pub(super) entered: BTreeMap<Rc<str>, Entered>,
    /// Answers, by the name of the replica whose tunnel they came through; empty: kas did not say.
    pub(super) served: BTreeMap<String, u64>,
    /// How late the probe itself sent a request at worst.
    pub(super) probe_late: Duration,
    second: Second,
}

impl Tally {
    /// Starts with nothing. `rate`: requests per second, in turn to each of these agents.
    pub(super) fn new(agents: &[AgentId], rate: u32, noticed_after: Duration) -> Self {
        let turn = Duration::from_secs(1) / rate * u32::try_from(agents.len()).unwrap_or(u32::MAX);
        let tally = |id: &AgentId| AgentTally {
            id: *id,
            due: 0,
            answered: 0,
            failed: 0,
            last_answer: Duration::ZERO,
            failed_since: 0,
        };
        Self {
            noticed_after,
            gap_after: SHORTEST_GAP.max(turn * 3),
            agents: agents.iter().map(tally).collect(),
            index: agents.iter().enumerate().map(|(index, id)| (*id, index)).collect(),
            open: BTreeMap::new(),
            due: 0,
            answered: 0,
            retried: 0,
            late: 0,
            failed: BTreeMap::new(),
            latencies: Latencies::default(),
            gaps: Vec::new(),
            gaps_more: 0,
            longest_gap: None,
            slowest: Vec::new(),
            failures: Vec::new(),
            failures_more: 0,
            entered: BTreeMap::new(),
            served: BTreeMap::new(),
            probe_late: Duration::ZERO,
            second: Second::default(),
        }
    }

    /// A request was due, and is sent now: `late` after it was due.
    pub(super) fn sent(&mut self, number: u64, agent: AgentId, at: Duration, late: Duration) {
        self.probe_late = self.probe_late.max(late);
        self.open.insert(number, at);
        self.due(agent);
    }

    /// A request was due, and is not sent.
    pub(super) fn not_sent(&mut self, agent: AgentId, at: Duration, text: String) {
        self.due(agent);
        self.missed(agent, at, None, Miss { kind: MissKind::NotSent, text });
    }

    fn due(&mut self, agent: AgentId) {
        self.due += 1;
        self.second.due += 1;
        if let Some(agent) = self.agent(agent) {
            agent.due += 1;
        }
    }

    fn agent(&mut self, id: AgentId) -> Option<&mut AgentTally> {
        self.agents.get_mut(*self.index.get(&id)?)
    }

    /// A request has ended.
    pub(super) fn ended(&mut self, at: Duration, done: Done) {
        let Done { number, agent, tries, served, miss } = done;
        let sent = self.open.remove(&number).unwrap_or(at);
        let attempts = tries.len();
        if attempts > 1 {
            self.retried += 1;
            self.second.retried += 1;
        }
        for tried in &tries {
            let entered = self.entered.entry(Rc::clone(&tried.entered)).or_default();
            entered.requests += 1;
            entered.failed += u64::from(tried.is_missed);
            *self.second.entered.entry(Rc::clone(&tried.entered)).or_default() += 1;
        }
        let entered = tries.into_iter().next_back().map(|tried| tried.entered);
        match (miss, entered) {
            (Some(miss), entered) => self.missed(agent, sent, entered, miss),
            (None, None) => {}
            (None, Some(entered)) => {
                let slow =
                    Slow { agent, at: sent, duration: at.saturating_sub(sent), attempts, entered, served };
                self.answered(at, slow);
            }
        }
    }

    fn answered(&mut self, at: Duration, answer: Slow) {
        self.answered += 1;
        self.second.answered += 1;
        self.second.slowest = self.second.slowest.max(answer.duration);
        self.latencies.add(answer.duration);
        self.late += u64::from(answer.duration > self.noticed_after);
        let name = answer.served.clone().unwrap_or_default();
        if self.served.len() < MAX_NAMES || self.served.contains_key(&name) {
            *self.served.entry(name.clone()).or_default() += 1;
        }
        *self.second.served.entry(name).or_default() += 1;
        let gap_after = self.gap_after;
        let gap = self.agent(answer.agent).and_then(|agent| {
            agent.answered += 1;
            let gap = agent.gap(at, false);
            (agent.last_answer, agent.failed_since) = (at, 0);
            (gap.duration > gap_after).then_some(gap)
        });
        if let Some(gap) = gap {
            if self.second.gap.as_ref().is_none_or(|longest| longest.duration < gap.duration) {
                self.second.gap = Some(gap.clone());
            }
            self.keep_gap(gap);
        }
        let place = self.slowest.partition_point(|slow| slow.duration >= answer.duration);
        if place < SLOWEST {
            self.slowest.insert(place, answer);
            self.slowest.truncate(SLOWEST);
        }
    }

    fn keep_gap(&mut self, gap: Gap) {
        if self.longest_gap.as_ref().is_none_or(|longest| longest.duration < gap.duration) {
            self.longest_gap = Some(gap.clone());
        }
        if self.gaps.len() < MAX_GAPS {
            self.gaps.push(gap);
        } else {
            self.gaps_more += 1;
        }
    }

    fn missed(&mut self, agent: AgentId, at: Duration, entered: Option<Rc<str>>, miss: Miss) {
        *self.failed.entry(miss.kind).or_default() += 1;
        self.second.failed += 1;
        self.second.miss.get_or_insert_with(|| miss.clone());
        if let Some(agent) = self.agent(agent) {
            agent.failed += 1;
            agent.failed_since += 1;
        }
        let pattern = without_numbers(&miss.text);
        let equal = |failure: &Failure| failure.miss.kind == miss.kind && failure.pattern == pattern;
        match self.failures.iter().position(equal) {
            Some(index) => self.failures[index].count += 1,
            None if self.failures.len() < MAX_FAILURES => {
                self.failures.push(Failure { pattern, miss, count: 1, at, agent, entered });
            }
            None => self.failures_more += 1,
        }
    }

    /// Nothing more is sent from now on: gaps that have not ended are kept as open ones.
    pub(super) fn finish(&mut self, at: Duration) {
        let open = self.agents.iter().map(|agent| agent.gap(at, true));
        let open: Vec<Gap> = open.filter(|gap| gap.duration > self.gap_after).collect();
        for gap in open {
            self.keep_gap(gap);
        }
    }

    /// Returns how many requests failed.
    pub(super) fn all_failed(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Returns how many requests have no outcome yet, and how many of these are open for longer than a user
    /// would wait.
    pub(super) fn unfinished(&self, now: Duration) -> (usize, usize) {
        let is_late = |sent: &&Duration| now.saturating_sub(**sent) > self.noticed_after;
        (self.open.len(), self.open.values().filter(is_late).count())
    }

    /// Returns when the oldest open request was sent.
    pub(super) fn oldest_open(&self) -> Option<Duration> {
        self.open.values().next().copied()
    }

    /// Returns what was seen since the last call.
    pub(super) fn take_second(&mut self) -> Second {
        std::mem::take(&mut self.second)
    }
}

impl AgentTally {
    fn gap(&self, at: Duration, is_open: bool) -> Gap {
        Gap {
            agent: self.id,
            at: self.last_answer,
            duration: at.saturating_sub(self.last_answer),
            failed: self.failed_since,
            is_open,
        }
    }
}

/// Replaces each number in a text by one sign: messages contain times and ports.
fn without_numbers(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if !c.is_ascii_digit() {
            pattern.push(c);
        } else if !pattern.ends_with('#') {
            pattern.push('#');
        }
    }
    pattern
}

#[cfg(test)]
mod tests;
