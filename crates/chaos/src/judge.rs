//! Rates and counts of a whole history that scenarios assert.

use std::collections::{BTreeMap, BTreeSet};

use history::{History, Kind, Micros, Outcome, Request};

use crate::{
    clock::millis,
    measure::{
        Measured, NOT_UNKNOWN, Row, SUCCESS, SUCCESS_ALL, SUCCESS_IDEMPOTENT, T_UNBLOCK_LOCAL,
        T_UNBLOCK_REMOTE, UNCLEAN_WATCHES,
    },
};

/// Measures what only the whole history shows.
pub(crate) fn whole(id: &str, quick: bool, history: &History) -> Vec<Measured> {
    let totals = Totals::of(history);
    let one = |row: &Row, value: Option<f64>| {
        let mut measured = Measured::new(row);
        measured.values.extend(value);
        measured
    };
    let failed = f64::from(totals.not_started + totals.other);
    let idempotent = one(&SUCCESS_IDEMPOTENT, totals.success_idempotent());
    match id {
        // The share depends on how often a replica is killed: it is asserted for every 30 s.
        "S02" if !quick => {
            vec![one(&SUCCESS, totals.success()), one(&NOT_UNKNOWN, Some(failed)), idempotent]
        }
        "S02" | "S03" | "S21b" | "S24" | "S29" | "S57" => vec![one(&NOT_UNKNOWN, Some(failed)), idempotent],
        "S09" | "S36" | "S58" => vec![
            one(&SUCCESS_ALL, totals.success()),
            one(&UNCLEAN_WATCHES, Some(f64::from(unclean_watches(history)))),
        ],
        "S18" | "S19" | "S22" | "S23" | "S34" | "S40" | "S41" | "S41b" | "S42" | "S43" => {
            vec![one(&SUCCESS_ALL, totals.success())]
        }
        "S25" => {
            let (mut local, mut remote) = (Measured::new(&T_UNBLOCK_LOCAL), Measured::new(&T_UNBLOCK_REMOTE));
            for (is_local, time) in unblocked(history) {
                if is_local { &mut local } else { &mut remote }.values.push(millis(time));
            }
            vec![local, remote]
        }
        _ => Vec::new(),
    }
}

/// For each request that waited: whether the agent connected to the replica that it waited on, which is the
/// first in the order of names, and the time from the agent's first tunnel to its start.
fn unblocked(history: &History) -> Vec<(bool, Micros)> {
    let first = history.lives.iter().map(|life| &life.replica).min();
    let since: BTreeMap<i64, Micros> =
        history.presences.iter().filter(|p| p.replica.is_empty()).map(|p| (p.agent, p.from)).collect();
    let started: BTreeMap<u64, Micros> = history.runs.iter().map(|run| (run.request, run.started)).collect();
    let waiters = history.requests.iter().filter(|request| request.kind == Kind::Waiter);
    waiters
        .filter_map(|request| {
            let (started, since) = (started.get(&request.id)?, since.get(&request.agent)?);
            let replica = request.attempts.last().map(|attempt| &attempt.replica);
            Some((replica == first, started.saturating_sub(*since)))
        })
        .collect()
}

/// What became of the requests of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// Requests, without the repetitions of what may have run.
    pub(crate) requests: u32,
    /// Of those, with a response.
    pub(crate) ok: u32,
    /// With a response after repetitions, too.
    pub(crate) ok_idempotent: u32,
    /// Tried once more elsewhere, because the first attempt certainly did not run.
    pub(crate) retried: u32,
    /// It is not known whether they ran.
    pub(crate) unknown: u32,
    /// Certainly did not run.
    pub(crate) not_started: u32,
    /// Other failures.
    pub(crate) other: u32,
}

/// Whether the request has one response, as opposed to watches and upgraded connections.
fn short(request: &Request) -> bool {
    matches!(request.kind, Kind::Unary | Kind::Http)
}

impl Totals {
    pub(crate) fn of(history: &History) -> Self {
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
                Some(Outcome::Unknown) => totals.unknown += 1,
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
        if request.detail.is_empty() || request.outcome == Some(Outcome::Cancelled) {
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

/// Fits a line by least squares: returns its slope and the standard error of the slope; `None` for fewer than
/// three points or a single moment.
pub(crate) fn slope(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    if points.len() < 3 {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "thousands of points")]
    let n = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / n;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / n;
    let squares: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    if squares == 0.0 {
        return None;
    }
    let slope = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / squares;
    let rest: f64 = points.iter().map(|(x, y)| (y - mean_y - slope * (x - mean_x)).powi(2)).sum();
    Some((slope, (rest / (n - 2.0) / squares).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repetition_repairs_its_first_request_and_is_none_itself() {
        let request = |id, outcome| Request::new(id, 1, Kind::Unary, 0).ended(1, outcome);
        let requests = vec![
            request(1, Outcome::Ok),
            request(2, Outcome::Unknown),
            Request { retry_of: Some(2), ..request(3, Outcome::Ok) },
            request(4, Outcome::NotStarted),
        ];
        let history = History { requests, ..History::default() };
        let totals = Totals::of(&history);
        assert_eq!((totals.requests, totals.ok, totals.ok_idempotent), (3, 1, 2));
        assert_eq!((totals.unknown, totals.not_started, totals.other), (1, 1, 0));
        assert_eq!(Totals::default().success(), None);
    }

    #[test]
    fn a_line_has_its_slope_and_no_error() {
        let line: Vec<_> = (0..10).map(|x| (f64::from(x), 3.0 + 2.0 * f64::from(x))).collect();
        let (slope, error) = slope(&line).expect("ten points");
        assert!((slope - 2.0).abs() < 1e-9 && error < 1e-9);
        let noisy: Vec<_> = (0..10).map(|x| (f64::from(x), f64::from(x % 2))).collect();
        assert!(super::slope(&noisy).expect("ten points").1 > 0.01);
        assert_eq!(super::slope(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
    }
}
