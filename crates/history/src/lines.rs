//! A history as JSON lines, one record in each.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::{
    Audit, Delivery, Fault, Gauge, Header, History, Hook, Kept, Life, Metric, Planned, Presence, Recovery,
    Request, Rows, Run, Search, Truth, View,
};

/// Why a history cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The stream failed; what was written so far is incomplete.
    #[error("cannot read or write the history")]
    Io(#[from] std::io::Error),
    /// A line is not a record.
    #[error("line {line} is not a record of a history")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A record cannot be written as JSON.
    #[error("a record cannot be written as JSON")]
    Record(#[source] serde_json::Error),
}

/// One line. The names are those of the fields of [`History`], in the singular where there is one.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Record {
    Header(Header),
    Request(Request),
    Run(Run),
    Presence(Presence),
    Life(Life),
    View(View),
    Truth(Truth),
    Fault(Fault),
    Gauge(Gauge),
    Recovery(Recovery),
    Metric(Metric),
    Audit(Audit),
    Search(Search),
    Planned(Planned),
    Rows(Rows),
    Hook(Hook),
    Delivery(Delivery),
    Kept(Kept),
}

/// Reads a history. Several files of one run may be read one after the other: the last header counts.
///
/// # Errors
/// The stream's error, or the first line that is not a record.
pub fn read(lines: impl BufRead) -> Result<History, Error> {
    let mut history = History::default();
    for (index, line) in lines.lines().enumerate() {
        let line = line?;
        if line.is_empty() {
            continue;
        }
        match serde_json::from_str(&line).map_err(|source| Error::Line { line: index + 1, source })? {
            Record::Header(header) => history.header = header,
            Record::Request(request) => history.requests.push(request),
            Record::Run(run) => history.runs.push(run),
            Record::Presence(presence) => history.presences.push(presence),
            Record::Life(life) => history.lives.push(life),
            Record::View(view) => history.views.push(view),
            Record::Truth(truth) => history.truths.push(truth),
            Record::Fault(fault) => history.faults.push(fault),
            Record::Gauge(gauge) => history.gauges.push(gauge),
            Record::Recovery(recovery) => history.recoveries.push(recovery),
            Record::Metric(metric) => history.metrics.push(metric),
            Record::Audit(audit) => history.audits.push(audit),
            Record::Search(search) => history.searches.push(search),
            Record::Planned(planned) => history.planned.push(planned),
            Record::Rows(rows) => history.rows.push(rows),
            Record::Hook(hook) => history.hooks.push(hook),
            Record::Delivery(delivery) => history.deliveries.push(delivery),
            Record::Kept(kept) => history.kept.push(kept),
        }
    }
    Ok(history)
}

/// Writes a history, in the order of its fields.
///
/// # Errors
/// The stream's error, or a record that JSON cannot express.
pub fn write(history: &History, mut to: impl Write) -> Result<(), Error> {
    line(&mut to, "header", &history.header)?;
    list(&mut to, "request", &history.requests)?;
    list(&mut to, "run", &history.runs)?;
    list(&mut to, "presence", &history.presences)?;
    list(&mut to, "life", &history.lives)?;
    list(&mut to, "view", &history.views)?;
    list(&mut to, "truth", &history.truths)?;
    list(&mut to, "fault", &history.faults)?;
    list(&mut to, "gauge", &history.gauges)?;
    list(&mut to, "recovery", &history.recoveries)?;
    list(&mut to, "metric", &history.metrics)?;
    list(&mut to, "audit", &history.audits)?;
    list(&mut to, "search", &history.searches)?;
    list(&mut to, "planned", &history.planned)?;
    list(&mut to, "rows", &history.rows)?;
    list(&mut to, "hook", &history.hooks)?;
    list(&mut to, "delivery", &history.deliveries)?;
    list(&mut to, "kept", &history.kept)?;
    to.flush()?;
    Ok(())
}

fn list<T: Serialize>(to: &mut impl Write, name: &str, records: &[T]) -> Result<(), Error> {
    records.iter().try_for_each(|record| line(to, name, record))
}

fn line<T: Serialize>(to: &mut impl Write, name: &str, record: &T) -> Result<(), Error> {
    let json = serde_json::to_string(record).map_err(Error::Record)?;
    writeln!(to, "{{\"{name}\":{json}}}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::{Attempt, Bytes, Effect, Kind, Outcome, Version};

    fn whole() -> History {
        let mut request = Request::new(1, 17, Kind::Unary, 5).ended(9, Outcome::Ok);
        request.attempts.push(Attempt { replica: "a".to_owned(), begun: 5, ended: 9, outcome: Outcome::Ok });
        request.sent = Some(Bytes { count: 3, hash: 4, clean: true, wrong_at: None });
        let holders = BTreeMap::from([(17, BTreeSet::from(["a".to_owned()]))]);
        History {
            header: Header { scenario: "S02".to_owned(), seed: 7, end: 10, ..Header::default() },
            requests: vec![request],
            runs: vec![Run::new(1, 17, 6)],
            presences: vec![Presence {
                agent: 17,
                replica: "a".to_owned(),
                connection: Some(3),
                from: 0,
                to: None,
                invalid_since: None,
            }],
            lives: vec![Life {
                replica: "a".to_owned(),
                epoch: Some(1),
                later: Vec::new(),
                from: 0,
                to: Some(9),
                killed: true,
            }],
            views: vec![View {
                observer: "a".to_owned(),
                process: 1,
                at: 1,
                until: 2,
                live: BTreeMap::from([("a".to_owned(), Version { epoch: Some(1), version: Some(2) })]),
                agents: Some(holders.clone()),
                connections: None,
            }],
            truths: vec![Truth { at: 2, agents: Some(holders), ..Truth::default() }],
            faults: vec![Fault {
                from: 1,
                to: Some(2),
                what: "one-way partition".to_owned(),
                effect: Effect::Cut(BTreeSet::from([("a".to_owned(), "b".to_owned())])),
            }],
            gauges: vec![Gauge {
                at: 1,
                process: "a".to_owned(),
                name: "waiters".to_owned(),
                value: 1.5,
                cap: 2.0,
            }],
            recoveries: vec![Recovery {
                process: "a".to_owned(),
                name: "fds".to_owned(),
                before: 1.0,
                after: 1.0,
                slack: 0.0,
            }],
            metrics: vec![Metric {
                at: 1,
                replica: "a".to_owned(),
                name: "peers_alive".to_owned(),
                value: 2.0,
                truth: 2.0,
            }],
            audits: vec![Audit { request: 1, replica: "a".to_owned(), end: true }],
            searches: vec![Search { place: "agent 17".to_owned(), bytes: 5, found: Vec::new() }],
            planned: vec![Planned { rule: "deletions".to_owned(), checked: 3, wrong: vec!["x".to_owned()] }],
            rows: vec![Rows {
                viewer: "viewer 1".to_owned(),
                view: "pods".to_owned(),
                agent: 17,
                at: 8,
                state: "live".to_owned(),
                seen: BTreeMap::from([("pods shop/web".to_owned(), "1/1 Running".to_owned())]),
                truth: Some(BTreeMap::new()),
            }],
            hooks: vec![Hook {
                name: "h-1".to_owned(),
                agent: 17,
                sent: 1,
                status: Some(202),
                id: Some("1f".to_owned()),
                copies: Some(2),
            }],
            deliveries: vec![Delivery {
                name: "h-1".to_owned(),
                agent: 17,
                at: 2,
                id: "1f".to_owned(),
                attempt: 1,
                status: Some(200),
            }],
            kept: vec![Kept { id: "1f".to_owned(), agent: 17, dead: true, at: 9 }],
        }
    }

    #[test]
    fn a_history_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        write(&whole(), &mut bytes).expect("a vector takes all");
        assert_eq!(read(bytes.as_slice()).expect("it was written so"), whole());
        assert_eq!(bytes.iter().filter(|byte| **byte == b'\n').count(), 18);
    }

    #[test]
    fn equal_histories_have_equal_digests_and_others_do_not() {
        let mut other = whole();
        assert_eq!(whole().digest().expect("digest"), other.digest().expect("digest"));
        other.runs[0].started += 1;
        assert_ne!(whole().digest().expect("digest"), other.digest().expect("digest"));
    }

    #[test]
    fn a_broken_line_is_named() {
        let error = read(&b"\n{\"run\":{\"request\":1}}\n"[..]).expect_err("the agent is missing");
        assert_eq!(error.to_string(), "line 2 is not a record of a history");
    }
}
