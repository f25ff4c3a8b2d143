//! Rates and counts of a whole history that scenarios assert.

pub(crate) mod sides;

use std::collections::{BTreeMap, BTreeSet};

use history::{History, Kind, Micros, Outcome, Request, SECOND};
use serde::{Deserialize, Serialize};

use crate::{
    clock::millis,
    measure::{
        CALM_FAILED, Measured, NOT_UNKNOWN, Row, SUCCESS_ALL, SUCCESS_IDEMPOTENT, T_UNBLOCK_EACH,
        T_UNBLOCK_LOCAL, T_UNBLOCK_REMOTE, UNTOLD,
    },
};

/// How long requests may fail after a fault has ended.
const RECOVERS: Micros = 10 * SECOND;

/// Measures what only the whole history shows.
pub(crate) fn whole(id: &str, history: &History) -> Vec<Measured> {
    let mut all = of_scenario(id, history);
    let totals = Totals::of(history);
    if totals.requests > 0 {
        for (row, count) in [(&UNTOLD, totals.other), (&CALM_FAILED, calm(history))] {
            let mut measured = Measured::new(row);
            measured.values.push(f64::from(count));
            all.push(measured);
        }
    }
    all
}

/// How many requests failed although no fault lasted while they did, nor had ended just before, and all
/// replicas that had been started were running.
fn calm(history: &History) -> u32 {
    let faults = history.faults.iter().map(|fault| (fault.from, fault.to));
    let down = history.lives.iter().filter_map(|life| {
        let to = life.to?;
        let back = history.lives.iter().filter(|next| next.replica == life.replica && next.from >= to);
        Some((to, back.map(|next| next.from).min()))
    });
    let times: Vec<(Micros, Micros)> = faults
        .chain(down)
        .map(|(from, to)| (from, to.map_or(Micros::MAX, |to| to.saturating_add(RECOVERS))))
        .collect();
    let struck = |request: &Request| {
        let ended = request.ended.unwrap_or(Micros::MAX);
        times.iter().any(|(from, until)| *from <= ended && request.begun <= *until)
    };
    let failed = |request: &&Request| short(request) && request.outcome != Some(Outcome::Ok);
    let count = history.requests.iter().filter(failed).filter(|request| !struck(request)).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn of_scenario(id: &str, history: &History) -> Vec<Measured> {
    let totals = Totals::of(history);
    let one = |row: &Row, value: Option<f64>| {
        let mut measured = Measured::new(row);
        measured.values.extend(value);
        measured
    };
    let failed = f64::from(totals.not_started + totals.other);
    let idempotent = one(&SUCCESS_IDEMPOTENT, totals.success_idempotent());
    match id {
        "S03" | "S05" | "S07" | "S10" | "S11" | "S12" | "S13" | "S14" | "S15" | "S16" | "S17" | "S21"
        | "S21b" | "S24" | "S29" | "S44" | "S49" | "S51" | "S55" | "S57" => {
            vec![one(&NOT_UNKNOWN, Some(failed)), idempotent]
        }
        "S18" => {
            let mut remote = Measured::new(&T_UNBLOCK_REMOTE);
            let times = unblocked(history).into_iter().filter(|(is_local, _)| !is_local);
            remote.values.extend(times.flat_map(|(_, times)| times).map(millis));
            vec![one(&SUCCESS_ALL, totals.success()), remote]
        }
        "S19" | "S20" | "S22" | "S23" | "S28" | "S34" | "S40" | "S41" | "S41b" | "S42" | "S43" | "S45"
        | "S50" | "S53" | "S54" => {
            vec![one(&SUCCESS_ALL, totals.success())]
        }
        "S25" => {
            let (mut local, mut remote) = (Measured::new(&T_UNBLOCK_LOCAL), Measured::new(&T_UNBLOCK_REMOTE));
            let mut each = Measured::new(&T_UNBLOCK_EACH);
            for (is_local, times) in unblocked(history) {
                // One that waited alone was released as soon as that is possible.
                let row = match (times.len(), is_local) {
                    (1, true) => &mut local,
                    (1, false) => &mut remote,
                    _ => &mut each,
                };
                row.values.extend(times.into_iter().map(millis));
            }
            vec![local, remote, each]
        }
        _ => Vec::new(),
    }
}

/// For each agent that requests waited for, each replica that they waited at, and each time that the agent
/// came: whether it connected to that replica, which is the first in the order of names, and the times from
/// its first tunnel to their starts, the shortest first.
fn unblocked(history: &History) -> Vec<(bool, Vec<Micros>)> {
    let first = history.lives.iter().map(|life| &life.replica).min();
    let mut came: BTreeMap<i64, BTreeSet<Micros>> = BTreeMap::new();
    for presence in history.presences.iter().filter(|presence| presence.replica.is_empty()) {
        came.entry(presence.agent).or_default().insert(presence.from);
    }
    let started: BTreeMap<u64, Micros> = history.runs.iter().map(|run| (run.request, run.started)).collect();
    let mut times: BTreeMap<(i64, &String, Micros), Vec<Micros>> = BTreeMap::new();
    for request in history.requests.iter().filter(|request| request.kind == Kind::Waiter) {
        let since = came.get(&request.agent).and_then(|came| came.range(request.begun..).next());
        if let (Some(started), Some(since), Some(attempt)) =
            (started.get(&request.id), since, request.attempts.last())
        {
            let times = times.entry((request.agent, &attempt.replica, *since)).or_default();
            times.push(started.saturating_sub(*since));
        }
    }
    let sorted = times.into_iter().map(|((_, replica, _), mut times)| {
        times.sort_unstable();
        (Some(replica) == first, times)
    });
    sorted.collect()
}

/// What became of the requests of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Totals {
    /// Requests, without the repetitions of what may have run.
    pub(crate) requests: u32,
    /// Of those, with a response.
    pub(crate) ok: u32,
    /// With a response after repetitions, too.
    pub(crate) ok_idempotent: u32,
    /// Tried once more elsewhere, because the first attempt certainly did not run.
    pub(crate) retried: u32,
    /// It is not known to the client whether they ran.
    pub(crate) unknown: u32,
    /// Of those, which agents recorded.
    pub(crate) unknown_ran: u32,
    /// Certainly did not run.
    pub(crate) not_started: u32,
    /// Other failures.
    pub(crate) other: u32,
}

/// Whether the request has one response, as opposed to watches and upgraded connections, and was to get it.
fn short(request: &Request) -> bool {
    matches!(request.kind, Kind::Unary | Kind::Http) && request.invalid_since.is_none()
}

impl Totals {
    pub(crate) fn of(history: &History) -> Self {
        Self::among(history, |_| true)
    }

    /// As [`of`](Self::of), of the requests for some agents.
    pub(crate) fn among(history: &History, agents: impl Fn(i64) -> bool) -> Self {
        let ran: BTreeSet<u64> = history.runs.iter().map(|run| run.request).collect();
        let short = |request: &Request| short(request) && agents(request.agent);
        let mut totals = Self::default();
        let mut repaired = BTreeSet::new();
        for request in history.requests.iter().filter(|request| short(request)) {
            if let (Some(first), Some(Outcome::Ok)) = (request.retry_of, request.outcome) {
                repaired.insert(first);
            }
        }
        for request in history.requests.iter().filter(|request| short(request) && request.retry_of.is_none())
        {
            totals.requests += 1;
            totals.retried += u32::from(request.attempts.len() > 1);
            match request.outcome {
                Some(Outcome::Ok) => totals.ok += 1,
                Some(Outcome::Unknown) => {
                    totals.unknown += 1;
                    totals.unknown_ran += u32::from(ran.contains(&request.id));
                }
                Some(Outcome::NotStarted) => totals.not_started += 1,
                _ => totals.other += 1,
            }
            totals.ok_idempotent +=
                u32::from(request.outcome == Some(Outcome::Ok) || repaired.contains(&request.id));
        }
        totals
    }

    /// The share with a response, in percent; `None`: there were no requests.
    pub(crate) fn success(&self) -> Option<f64> {
        (self.requests > 0).then(|| f64::from(self.ok) * 100.0 / f64::from(self.requests))
    }

    pub(crate) fn success_idempotent(&self) -> Option<f64> {
        (self.requests > 0).then(|| f64::from(self.ok_idempotent) * 100.0 / f64::from(self.requests))
    }
}

/// Watches that were open and did not end in order, or because the client closed them.
pub(crate) fn unclean_watches(history: &History) -> u32 {
    let unclean = history.requests.iter().filter(|request| {
        request.kind == Kind::Watch && !request.phases.is_empty() && request.outcome == Some(Outcome::Unknown)
    });
    u32::try_from(unclean.count()).unwrap_or(u32::MAX)
}

/// How often each message of a failure came, the most frequent first. Numbers in them are left out.
pub(crate) fn failures(history: &History) -> Vec<(u32, String)> {
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for request in &history.requests {
        let expected = request.outcome == Some(Outcome::Cancelled) || request.invalid_since.is_some();
        if request.detail.is_empty() || expected {
            continue;
        }
        let text: String =
            request.detail.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).take(160).collect();
        let outcome = request.outcome.map_or("open", Outcome::as_str);
        *counts.entry(format!("{:?} {outcome}: {text}", request.kind)).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().map(|(text, count)| (count, text)).collect();
    counts.sort_by(|a, b| b.cmp(a));
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_excused_by_faults_only() {
        let request = |id, begun: Micros, outcome| {
            Request { begun: begun * SECOND, ..Request::new(id, 1, Kind::Unary, 0) }
                .ended((begun + 1) * SECOND, outcome)
        };
        let fault = history::Fault {
            from: 20 * SECOND,
            to: Some(30 * SECOND),
            what: "SIGKILL".to_owned(),
            effect: history::Effect::None,
        };
        let mut history = History {
            requests: vec![request(1, 19, Outcome::Unknown), request(2, 40, Outcome::NotStarted)],
            faults: vec![fault],
            ..History::default()
        };
        assert_eq!(calm(&history), 0);
        history.requests.push(request(3, 18, Outcome::Unknown));
        history.requests.push(request(4, 41, Outcome::NotStarted));
        history.requests.push(Request { invalid_since: Some(0), ..request(5, 50, Outcome::Refused) });
        assert_eq!(calm(&history), 2);
        assert_eq!(whole("S06", &history).last().unwrap().values, [2.0]);
        let life = |from: Micros, to: Option<Micros>| history::Life {
            replica: "a".to_owned(),
            epoch: None,
            later: Vec::new(),
            from: from * SECOND,
            to: to.map(|to| to * SECOND),
            killed: true,
        };
        history.lives = vec![life(0, Some(41)), life(45, None)];
        assert_eq!(calm(&history), 1, "one of them was down until 45 s, and is forgiven until 55 s");
    }

    #[test]
    fn those_that_waited_alone_and_together_are_told_apart() {
        let waited = |id, replica: &str| {
            let mut request = Request::new(id, 7, Kind::Waiter, 0).ended(SECOND, Outcome::Ok);
            let outcome = Outcome::Ok;
            let replica = replica.to_owned();
            request.attempts.push(history::Attempt { replica, begun: 0, ended: SECOND, outcome });
            request
        };
        let life = |replica: &str| history::Life {
            replica: replica.to_owned(),
            epoch: None,
            later: Vec::new(),
            from: 0,
            to: None,
            killed: false,
        };
        let tunnel = history::Presence {
            agent: 7,
            replica: String::new(),
            connection: None,
            from: 1_000,
            to: None,
            invalid_since: None,
        };
        let runs = [(1, 5_000), (2, 3_000), (3, 9_000)].map(|(id, at)| history::Run::new(id, 7, at));
        let history = History {
            requests: vec![waited(1, "a"), waited(2, "a"), waited(3, "b"), waited(4, "b")],
            runs: runs.into(),
            lives: vec![life("b"), life("a")],
            presences: vec![tunnel],
            ..History::default()
        };
        assert_eq!(unblocked(&history), [(true, vec![2_000, 4_000]), (false, vec![8_000])]);
        let [local, remote, each] = of_scenario("S25", &history).try_into().unwrap();
        assert_eq!((local.values, remote.values), (Vec::new(), vec![8.0]));
        assert_eq!(each.values, [2.0, 4.0]);
    }

    #[test]
    fn a_repetition_repairs_its_first_request_and_is_none_itself() {
        let request = |id, outcome| Request::new(id, 1, Kind::Unary, 0).ended(1, outcome);
        let requests = vec![
            request(1, Outcome::Ok),
            Request { invalid_since: Some(0), ..request(5, Outcome::Refused) },
            request(2, Outcome::Unknown),
            Request { retry_of: Some(2), ..request(3, Outcome::Ok) },
            request(4, Outcome::NotStarted),
        ];
        let runs = vec![history::Run::new(2, 1, 0), history::Run::new(1, 1, 0)];
        let history = History { requests, runs, ..History::default() };
        let totals = Totals::of(&history);
        assert_eq!((totals.requests, totals.ok, totals.ok_idempotent), (3, 1, 2));
        assert_eq!((totals.unknown, totals.unknown_ran, totals.not_started, totals.other), (1, 1, 1, 0));
        assert_eq!(Totals::among(&history, |agent| agent != 1), Totals::default());
        assert_eq!(Totals::default().success(), None);
    }
}
