//! For each invariant a history that breaks it and one that holds.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::{
    Attempt, Audit, Bounds, Bytes, Delivery, Effect, Fault, Gauge, Header, Hook, Kept, Kind, Life, Metric,
    Outcome, Planned, Presence, Recovery, Request, Rows, Run, SECOND, Search, Truth, Version, View,
};

const S: Micros = SECOND;

fn history() -> History {
    let bounds = Bounds { stale: 2 * S, stale_unreachable: 20 * S, missing: S, ..Bounds::default() };
    History {
        header: Header { end: 100 * S, bounds, runs_complete: true, ..Header::default() },
        ..History::default()
    }
}

/// Asserts that the invariant was checked and holds.
fn holds(history: &History, invariant: Invariant) {
    let report = check(history);
    assert!(report.of(invariant).checked > 0, "not observed:\n{report}");
    assert!(report.holds(), "{report}");
}

/// Asserts that only this invariant is broken, and how it is explained.
fn breaks(history: &History, invariant: Invariant, what: &str) {
    let report = check(history);
    let broken: Vec<_> = report.breaches().map(|breach| (breach.invariant, breach.what.clone())).collect();
    assert_eq!(broken, [(invariant, what.to_owned())], "{report}");
}

fn served(id: u64, agent: i64) -> (Request, Run) {
    let mut run = Run::new(id, agent, 11 * S);
    run.ended = Some(12 * S);
    (Request::new(id, agent, Kind::Unary, 10 * S).ended(13 * S, Outcome::Ok), run)
}

/// A history with one request that agent 17 served.
fn one() -> History {
    let (request, run) = served(8123, 17);
    History { requests: vec![request], runs: vec![run], ..history() }
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn life(replica: &str, epoch: u64, from: Micros, to: Option<Micros>) -> Life {
    Life { replica: replica.to_owned(), epoch: Some(epoch), later: Vec::new(), from, to, killed: true }
}

fn presence(agent: i64, replica: &str, from: Micros, to: Option<Micros>) -> Presence {
    Presence { agent, replica: replica.to_owned(), connection: None, from, to, invalid_since: None }
}

/// What `a` saw of `b`, which holds `agents`.
fn view(at: Micros, until: Micros, epoch: u64, version: u64, agents: &[i64]) -> View {
    View {
        observer: "a".to_owned(),
        process: 1,
        at,
        until,
        live: BTreeMap::from([("b".to_owned(), Version { epoch: Some(epoch), version: Some(version) })]),
        agents: Some(agents.iter().map(|agent| (*agent, set(&["b"]))).collect()),
        connections: None,
    }
}

#[test]
fn i1_a_request_that_ran_twice_is_explained() {
    holds(&one(), Invariant::I1);
    let mut twice = one();
    let mut again = twice.runs[0].clone();
    (again.started, again.replica, again.connection) = (12 * S, Some("b".to_owned()), Some(5));
    twice.runs.push(again);
    breaks(
        &twice,
        Invariant::I1,
        "request 8123 for agent 17 was started twice: at 11.000 s, and at 12.000 s through replica b on \
         connection 5",
    );
}

#[test]
fn i1_only_what_did_not_run_is_tried_again() {
    let attempt =
        |replica: &str, outcome| Attempt { replica: replica.to_owned(), begun: S, ended: S, outcome };
    let mut history = one();
    history.requests[0].attempts = vec![attempt("a", Outcome::NotStarted), attempt("b", Outcome::Ok)];
    holds(&history, Invariant::I1);
    history.requests[0].attempts[0].outcome = Outcome::Unknown;
    breaks(
        &history,
        Invariant::I1,
        "request 8123 for agent 17 was tried again at b although the attempt at a ended as unknown",
    );
}

#[test]
fn i2_a_request_ends_in_time_and_once() {
    let mut late = one();
    late.requests[0].deadline = Some(12 * S);
    holds(&late, Invariant::I2);
    late.requests[0].deadline = Some(11 * S);
    breaks(&late, Invariant::I2, "request 8123 for agent 17 ended 2.000 s after its deadline");

    let mut open = one();
    (open.requests[0].ended, open.requests[0].outcome) = (None, None);
    assert_eq!(check(&open).of(Invariant::I2).checked, 0, "it may still end");
    open.requests[0].deadline = Some(50 * S);
    breaks(&open, Invariant::I2, "request 8123 for agent 17 never ended");

    let mut twice = one();
    twice.requests.push(twice.requests[0].clone());
    breaks(&twice, Invariant::I2, "request 8123 has two outcomes in the history");

    let mut backwards = one();
    backwards.requests[0].phases = vec![("sent".to_owned(), 12), ("headers".to_owned(), 11)];
    assert!(!check(&backwards).holds());
}

#[test]
fn i2_outcomes_agree_with_what_agents_recorded() {
    let mut history = one();
    history.requests[0].outcome = Some(Outcome::Unknown);
    holds(&history, Invariant::I2);
    history.requests[0].outcome = Some(Outcome::NotStarted);
    breaks(
        &history,
        Invariant::I2,
        "request 8123 for agent 17 ended as not started, but its agent ran it at 11.000 s",
    );
    let mut invented = one();
    invented.runs.clear();
    breaks(&invented, Invariant::I2, "request 8123 for agent 17 was answered (ok), but no agent ran it");
    invented.header.runs_complete = false;
    holds(&invented, Invariant::I2);
}

#[test]
fn i3_a_third_replica_and_a_loop_are_found() {
    let mut history = one();
    history.requests[0].path = vec!["a".to_owned(), "b".to_owned()];
    holds(&history, Invariant::I3);
    history.requests[0].path.push("c".to_owned());
    breaks(&history, Invariant::I3, "request 8123 for agent 17 passed a to b to c");
    history.requests[0].path = vec!["a".to_owned(), "a".to_owned()];
    breaks(&history, Invariant::I3, "request 8123 for agent 17 passed a to a");
}

#[test]
fn i4_another_agent_and_the_connection_of_another_agent_are_found() {
    let mut history = one();
    history.runs[0].connection = Some(5);
    history.presences = vec![Presence { connection: Some(5), ..presence(17, "b", 0, None) }];
    holds(&history, Invariant::I4);
    history.presences[0].agent = 18;
    breaks(
        &history,
        Invariant::I4,
        "request 8123 reached agent 17 at 11.000 s on connection 5, which belongs to agents {18}",
    );
    let mut other = one();
    other.runs[0].agent = 18;
    breaks(&other, Invariant::I4, "request 8123 for agent 17 ran on agent 18 at 11.000 s");
}

#[test]
fn i5_epochs_do_not_go_back_and_one_version_has_one_content() {
    let mut history = History { views: vec![view(0, 0, 1, 5, &[17]), view(S, S, 2, 1, &[18])], ..history() };
    holds(&history, Invariant::I5);
    history.views[1].live.insert("b".to_owned(), Version { epoch: Some(0), version: Some(9) });
    breaks(&history, Invariant::I5, "a saw epoch 0 of b after epoch 1 of it");

    let mut other = view(S, S, 1, 5, &[17, 18]);
    "c".clone_into(&mut other.observer);
    let split = History { views: vec![view(0, 0, 1, 5, &[17]), other], ..history };
    breaks(&split, Invariant::I5, "c and a saw other agents in version 5 of b (epoch 1); c saw 2");
}

#[test]
fn i5_an_epoch_that_no_process_had_is_forged() {
    let mut history =
        History { views: vec![view(0, 0, 3, 5, &[])], lives: vec![life("b", 3, 0, None)], ..history() };
    holds(&history, Invariant::I5);
    history.views[0].live.insert("b".to_owned(), Version { epoch: Some(u64::MAX), version: Some(5) });
    breaks(&history, Invariant::I5, "a saw epoch 18446744073709551615 of b, and no process ever had it");
    // One that its process took later, when others knew a higher one.
    history.lives[0].later = vec![7];
    history.views[0].live.insert("b".to_owned(), Version { epoch: Some(7), version: Some(5) });
    holds(&history, Invariant::I5);
    history.lives[0].to = Some(S);
    history.views[0].until = 14 * S;
    breaks(&history, Invariant::I8, "a takes b for alive 2.000 s after its process ended");
}

fn bytes(count: u64, hash: u64, clean: bool) -> Option<Bytes> {
    Some(Bytes { count, hash, clean, wrong_at: None })
}

#[test]
fn i6_truncation_that_looks_clean_is_found() {
    let mut history = one();
    (history.requests[0].sent, history.runs[0].received) = (bytes(10, 1, true), bytes(10, 1, true));
    (history.runs[0].sent, history.requests[0].received) = (bytes(10, 1, true), bytes(4, 9, false));
    holds(&history, Invariant::I6);
    history.requests[0].received = bytes(4, 9, true);
    let of = "the response of request 8123 for agent 17: ";
    breaks(&history, Invariant::I6, &format!("{of}it ended cleanly after 4 of 10 bytes"));
    history.requests[0].received = bytes(10, 9, true);
    breaks(&history, Invariant::I6, &format!("{of}all 10 bytes were received, but they were others"));
    history.requests[0].received = bytes(11, 9, false);
    breaks(&history, Invariant::I6, &format!("{of}11 bytes were received, but only 10 were sent"));
    history.runs[0].sent = bytes(10, 1, false);
    history.requests[0].received = bytes(10, 1, true);
    breaks(
        &history,
        Invariant::I6,
        &format!("{of}it ended cleanly after 10 bytes, but the sender had reset it"),
    );
}

#[test]
fn i21_bytes_of_an_upgraded_connection_are_equal() {
    let mut history = one();
    history.requests[0].kind = Kind::Upgrade;
    (history.requests[0].sent, history.runs[0].received) = (bytes(10, 1, true), bytes(10, 1, true));
    holds(&history, Invariant::I21);
    history.runs[0].received = Some(Bytes { count: 5, hash: 0, clean: false, wrong_at: Some(3) });
    breaks(
        &history,
        Invariant::I21,
        "the request of request 8123 for agent 17: the byte at 3 was not the one that was sent",
    );
}

#[test]
fn i7_views_equal_the_truth_when_nothing_changes() {
    let truth = Truth {
        at: 10 * S,
        live: set(&["a", "b"]),
        agents: Some(BTreeMap::from([(17, set(&["b"]))])),
        connections: Some(BTreeMap::from([(17, BTreeSet::from([5]))])),
    };
    let mut seen = view(9 * S, 9 * S, 1, 1, &[17]);
    seen.connections.clone_from(&truth.connections);
    let mut history = History { truths: vec![truth], views: vec![seen], ..history() };
    holds(&history, Invariant::I7);
    history.views[0].agents = Some(BTreeMap::new());
    breaks(
        &history,
        Invariant::I7,
        "the agents that a sees: 1 differ; agent 17 is at {\"b\"} and seen at {}",
    );
    history.views[0].agents = None;
    history.views[0].connections = Some(BTreeMap::from([(17, BTreeSet::from([5, 6]))]));
    breaks(
        &history,
        Invariant::I7,
        "the connections that a lists: 1 differ; agent 17 is at {5} and seen at {5, 6}",
    );
    history.views[0].connections = None;
    history.views[0].live.clear();
    breaks(&history, Invariant::I7, "a takes {\"a\"} for alive, and {\"a\", \"b\"} live");
}

#[test]
fn i8_an_agent_without_a_tunnel_leaves_every_view() {
    let mut history = History {
        presences: vec![presence(17, "b", 0, Some(10 * S))],
        views: vec![view(5 * S, 11 * S, 1, 1, &[17])],
        ..history()
    };
    holds(&history, Invariant::I8);
    history.views[0].until = 13 * S;
    breaks(&history, Invariant::I8, "a sees agent 17 on b 3.000 s after its last tunnel there ended");
    // It came back, but for too long it was not there.
    history.presences.push(presence(17, "b", 15 * S, None));
    history.views[0].until = 16 * S;
    breaks(&history, Invariant::I8, "a sees agent 17 on b 3.999 s after its last tunnel there ended");
    // While the owner cannot be reached, it may take longer, but not for ever.
    let pair = ("b".to_owned(), "a".to_owned());
    let effect = Effect::Cut(BTreeSet::from([pair]));
    history.faults = vec![Fault { from: 9 * S, to: None, what: "partition".to_owned(), effect }];
    holds(&history, Invariant::I8);
    history.presences[1].from = 40 * S;
    history.views[0].until = 41 * S;
    breaks(&history, Invariant::I8, "a sees agent 17 on b 28.999 s after its last tunnel there ended");
}

#[test]
fn i8_an_agent_that_never_was_there_is_found_at_once() {
    let mut history = History {
        presences: vec![presence(17, "b", 0, None), presence(18, "c", 0, None)],
        views: vec![view(0, 0, 1, 1, &[17])],
        ..history()
    };
    holds(&history, Invariant::I8);
    history.views[0] = view(0, 0, 1, 1, &[17, 18]);
    breaks(&history, Invariant::I8, "a sees agent 18 on b, where it had never been");
}

#[test]
fn i8_an_agent_may_come_unrecorded_just_before_a_process_ends() {
    let mut history = History {
        presences: vec![presence(17, "b", 0, Some(2 * S))],
        lives: vec![life("b", 1, 0, Some(10 * S)), life("b", 2, 11 * S, None)],
        views: vec![view(10 * S - 1, 12 * S, 2, 1, &[17])],
        ..history()
    };
    history.header.bounds.early = S;
    holds(&history, Invariant::I8);
    history.views[0].until = 13 * S;
    breaks(&history, Invariant::I8, "a sees agent 17 on b 3.000 s after its last tunnel there ended");
    // Earlier, a look would have shown it.
    history.views[0] = view(8 * S, 8 * S, 2, 1, &[17]);
    breaks(&history, Invariant::I8, "a sees agent 17 on b 6.000 s after its last tunnel there ended");
}

#[test]
fn i8_a_dead_process_leaves_every_view() {
    let mut history = History {
        lives: vec![life("b", 1, 0, Some(10 * S)), life("b", 2, 11 * S, None)],
        views: vec![view(5 * S, 11 * S, 1, 1, &[])],
        ..history()
    };
    holds(&history, Invariant::I8);
    history.views[0].until = 14 * S;
    breaks(&history, Invariant::I8, "a takes b for alive 2.000 s after its process ended");
    history.views[0] = view(5 * S, 60 * S, 2, 1, &[]);
    holds(&history, Invariant::I8);
}

#[test]
fn i8_a_tunnel_ends_with_the_process_of_its_replica() {
    let mut history = History {
        // It was seen just before the second process was known to be ready.
        presences: vec![presence(17, "b", 0, None), presence(17, "b", 20 * S, None)],
        lives: vec![life("b", 1, 0, Some(10 * S)), life("b", 2, 21 * S, None)],
        views: vec![view(20 * S, 60 * S, 2, 1, &[17])],
        ..history()
    };
    history.header.bounds.missing = 50 * S;
    holds(&history, Invariant::I8);
    history.views = vec![view(5 * S, 13 * S, 2, 1, &[17])];
    breaks(&history, Invariant::I8, "a sees agent 17 on b 3.000 s after its last tunnel there ended");
}

#[test]
fn i9_a_present_agent_is_in_every_view() {
    let mut history = History {
        presences: vec![presence(17, "b", 10 * S, None), presence(18, "b", 0, None)],
        views: vec![view(0, 10 * S + S / 2, 1, 1, &[18]), view(10 * S + S / 2, 60 * S, 1, 2, &[17, 18])],
        ..history()
    };
    holds(&history, Invariant::I9);
    history.views[0].until = 12 * S;
    breaks(&history, Invariant::I9, "a does not see agent 17 on b, where it had been for 1.000 s");
    // The observer was paused, or had just been started.
    let effect = Effect::Disabled(set(&["a"]));
    history.faults = vec![Fault { from: 9 * S, to: Some(12 * S), what: "pause".to_owned(), effect }];
    holds(&history, Invariant::I9);
    history.faults.clear();
    history.lives = vec![life("a", 1, 11 * S + S / 2, None)];
    history.views.remove(0);
    history.views[0].at = 11 * S + S / 2;
    holds(&history, Invariant::I9);
}

#[test]
fn i10_caps_and_recovery() {
    let gauge = Gauge { at: S, process: "a".to_owned(), name: "waiters".to_owned(), value: 9.0, cap: 10.0 };
    let recovery = Recovery {
        process: "a".to_owned(),
        name: "descriptors".to_owned(),
        before: 100.0,
        after: 104.0,
        slack: 0.0,
    };
    let mut history = History { gauges: vec![gauge], recoveries: vec![recovery], ..history() };
    holds(&history, Invariant::I10);
    history.recoveries[0].after = 106.0;
    breaks(
        &history,
        Invariant::I10,
        "descriptors of a was 100 before the fault and is 106 after recovery, more than 5 above",
    );
    history.recoveries[0].slack = 2.0;
    history.gauges[0].value = 11.0;
    breaks(&history, Invariant::I10, "waiters of a is 11, more than its cap of 10");
}

#[test]
fn i11_an_ended_credential_admits_nothing() {
    let mut history = one();
    history.header.bounds.revoke = 2 * S;
    history.requests[0].invalid_since = Some(9 * S);
    history.presences = vec![presence(17, "b", 0, Some(13 * S))];
    history.presences[0].invalid_since = Some(12 * S);
    holds(&history, Invariant::I11);
    history.requests[0].invalid_since = Some(5 * S);
    breaks(
        &history,
        Invariant::I11,
        "request 8123 for agent 17 was admitted 6.000 s after its credential ended",
    );
    history.requests[0].invalid_since = None;
    history.presences[0].to = Some(15 * S);
    breaks(
        &history,
        Invariant::I11,
        "agent 17 had a tunnel on replica b until 3.000 s after its credential ended",
    );
}

#[test]
fn i12_start_and_end_are_recorded_once() {
    let record = |end| Audit { request: 8123, replica: "a".to_owned(), end };
    let mut history = one();
    history.audits = vec![record(false), record(true)];
    holds(&history, Invariant::I12);
    history.audits.pop();
    breaks(
        &history,
        Invariant::I12,
        "request 8123 for agent 17 has 1 records of its start and 0 of its end on a",
    );
    // A killed process cannot write the end.
    history.lives = vec![life("a", 1, 0, Some(12 * S))];
    holds(&history, Invariant::I12);
    // One that ends in order has written all.
    history.lives[0].killed = false;
    breaks(
        &history,
        Invariant::I12,
        "request 8123 for agent 17 has 1 records of its start and 0 of its end on a",
    );
    history.lives.clear();
    history.audits[0].request = 1;
    breaks(&history, Invariant::I12, "request 8123 for agent 17 ran at 11.000 s and is in no audit log");
}

#[test]
fn i13_metrics_are_compared_with_the_truth() {
    let metric =
        Metric { at: S, replica: "a".to_owned(), name: "peers_alive".to_owned(), value: 2.0, truth: 2.0 };
    let mut history = History { metrics: vec![metric], ..history() };
    holds(&history, Invariant::I13);
    history.metrics[0].value = 3.0;
    breaks(&history, Invariant::I13, "peers_alive of a says 3, and 2 is true");
}

#[test]
fn i14_a_cancelled_request_takes_no_tunnel() {
    let mut history = one();
    history.requests[0].outcome = Some(Outcome::Cancelled);
    history.requests[0].ended = Some(10 * S + S / 2);
    holds(&history, Invariant::I14);
    history.requests[0].ended = Some(10 * S);
    history.runs[0].started = 12 * S;
    breaks(
        &history,
        Invariant::I14,
        "request 8123 for agent 17 was started 2.000 s after it had been cancelled",
    );
}

#[test]
fn i14_a_cancellation_may_be_late_if_its_way_is() {
    let mut history = one();
    let request = &mut history.requests[0];
    (request.outcome, request.ended) = (Some(Outcome::Cancelled), Some(10 * S));
    request.attempts =
        vec![Attempt { replica: "a".to_owned(), begun: 9 * S, ended: 10 * S, outcome: Outcome::Cancelled }];
    (history.runs[0].started, history.runs[0].replica) = (12 * S, Some("b".to_owned()));
    let pair = |a: &str, b: &str| BTreeSet::from([(a.to_owned(), b.to_owned())]);
    let fault = |from, to, effect| Fault { from, to: Some(to), what: "loss".to_owned(), effect };
    for (fault, excuses) in [
        (fault(8 * S, 11 * S, Effect::Slow(pair("b", "a"))), true),
        (fault(8 * S, 11 * S, Effect::Cut(pair("a", "b"))), true),
        (fault(8 * S, 11 * S, Effect::Slow(pair("agent 17", "b"))), true),
        (fault(8 * S, 11 * S, Effect::Disabled(BTreeSet::from(["b".to_owned()]))), true),
        // What was lost before is sent again.
        (fault(S, 7 * S, Effect::Slow(pair("a", "b"))), true),
        (fault(S, 5 * S, Effect::Slow(pair("a", "b"))), false),
        (fault(13 * S, 14 * S, Effect::Slow(pair("a", "b"))), false),
        (fault(8 * S, 11 * S, Effect::Slow(pair("a", "c"))), false),
        (fault(8 * S, 11 * S, Effect::Slow(pair("agent 18", "b"))), false),
        (fault(8 * S, 11 * S, Effect::None), false),
    ] {
        history.faults = vec![fault];
        assert_eq!(check(&history).of(Invariant::I14).broken, u64::from(!excuses), "{:?}", history.faults);
    }
}

#[test]
fn i14_a_waiter_is_released_by_its_own_agent() {
    let mut history = one();
    history.requests[0].kind = Kind::Waiter;
    history.presences = vec![presence(17, "", 11 * S, None)];
    holds(&history, Invariant::I14);
    history.presences[0].agent = 18;
    breaks(
        &history,
        Invariant::I14,
        "request 8123 waited for agent 17 and was released at 11.000 s, but that agent had no tunnel",
    );
}

#[test]
fn i15_versions_do_not_go_back_within_a_process() {
    let mut history = History { views: vec![view(0, 0, 1, 5, &[]), view(S, S, 1, 6, &[])], ..history() };
    holds(&history, Invariant::I15);
    history.views[1].live.insert("b".to_owned(), Version { epoch: Some(1), version: Some(4) });
    breaks(&history, Invariant::I15, "a saw version 4 of b (epoch 1) after version 5");
    history.views[1].process = 2;
    assert!(check(&history).holds(), "the observer was restarted");
}

#[test]
fn i18_a_write_of_a_planner_that_breaks_a_rule_is_a_breach() {
    let mut history = history();
    history.planned = vec![Planned { rule: "deletions".to_owned(), checked: 0, wrong: Vec::new() }];
    assert_eq!(check(&history).of(Invariant::I18).checked, 0, "nothing was written");
    history.planned[0].checked = 3;
    holds(&history, Invariant::I18);
    history.planned[0].wrong = vec!["configmaps default/a: it is not marked".to_owned()];
    breaks(&history, Invariant::I18, "deletions: configmaps default/a: it is not marked");
    let verdict = check(&history).of(Invariant::I18);
    assert_eq!((verdict.checked, verdict.broken), (3, 1));
}

#[test]
fn i19_a_search_that_finds_a_credential_is_a_breach() {
    let mut history = history();
    history.searches = vec![Search { place: "agent 17".to_owned(), bytes: 0, found: Vec::new() }];
    assert_eq!(check(&history).of(Invariant::I19).checked, 0, "nothing was searched");
    history.searches[0].bytes = 100;
    holds(&history, Invariant::I19);
    history.searches[0].found = vec!["the token of user 1".to_owned()];
    breaks(&history, Invariant::I19, "agent 17 contains the token of user 1");
}

#[test]
fn i20_what_runs_ends_with_its_rule() {
    let mut history = one();
    history.requests[0].allowed_until = Some(9 * S);
    holds(&history, Invariant::I20);
    history.requests[0].allowed_until = Some(7 * S);
    breaks(
        &history,
        Invariant::I20,
        "request 8123 for agent 17 ran until 6.000 s after the end of the rule that allowed it",
    );
}

#[test]
fn nothing_observed_is_not_the_same_as_kept() {
    let report = check(&History::default());
    assert!(report.holds());
    for invariant in Invariant::ALL {
        assert!(report.words(invariant).starts_with("not observed: "), "{report}");
    }
}

#[test]
fn many_breaches_are_counted_and_the_first_are_explained() {
    let mut history = history();
    for id in 0..100 {
        history.requests.push(Request::new(id, 1, Kind::Unary, 0).ended(S, Outcome::Ok));
    }
    let report = check(&history);
    let verdict = report.of(Invariant::I2);
    assert_eq!((verdict.checked, verdict.broken, verdict.breaches.len()), (100, 100, EXPLAINED));
    assert!(report.to_string().contains("and 80 more"), "{report}");
}

fn rows(state: &str, seen: &[(&str, &str)], truth: Option<&[(&str, &str)]>) -> Rows {
    let map = |rows: &[(&str, &str)]| -> BTreeMap<String, String> {
        rows.iter().map(|(name, cells)| ((*name).to_owned(), (*cells).to_owned())).collect()
    };
    Rows {
        viewer: "viewer 3".to_owned(),
        view: "pods".to_owned(),
        agent: 17,
        at: 50 * S,
        state: state.to_owned(),
        seen: map(seen),
        truth: truth.map(map),
    }
}

#[test]
fn i16_rows_equal_those_of_the_api_server() {
    let of = |rows| History { rows: vec![rows], ..history() };
    let two = [("pods a/x", "1/1 Running"), ("pods a/y", "0/1 Pending")];
    holds(&of(rows("live", &two, Some(&two))), Invariant::I16);
    let begin = "the rows of pods of agent 17 that viewer 3 has are not those of the API server: ";
    let wrong = |seen: &[(&str, &str)], what: &str| {
        breaks(&of(rows("live", seen, Some(&two))), Invariant::I16, &format!("{begin}{what}"));
    };
    wrong(&two[..1], "pods a/y is missing");
    wrong(&[two[0], two[1], ("pods a/z", "")], "pods a/z does not exist");
    wrong(&[two[0], ("pods a/y", "1/1 Running")], "pods a/y is `1/1 Running` instead of `0/1 Pending`");
    wrong(
        &[("pods a/1", ""), ("pods a/2", ""), ("pods a/3", "")],
        "pods a/1 does not exist, pods a/2 does not exist, pods a/3 does not exist, and 2 more",
    );
}

#[test]
fn i16_rows_are_called_live_only_while_they_are() {
    let of = |rows| History { rows: vec![rows], ..history() };
    let one = [("pods a/x", "1/1 Running")];
    breaks(
        &of(rows("stale", &one, Some(&one))),
        Invariant::I16,
        "the rows of pods of agent 17 that viewer 3 has are called stale, although nothing is wrong any more",
    );
    holds(&of(rows("stale", &one, None)), Invariant::I16);
    holds(&of(rows("absent", &[], None)), Invariant::I16);
    breaks(
        &of(rows("live", &one, None)),
        Invariant::I16,
        "the rows of pods of agent 17 that viewer 3 has are called live, although the API server could not be \
         asked",
    );
}

fn hook(name: &str, id: Option<&str>) -> Hook {
    Hook {
        name: name.to_owned(),
        agent: 17,
        sent: 10 * S,
        status: id.map(|_| 202),
        id: id.map(str::to_owned),
        copies: id.map(|_| 2),
    }
}

fn delivery(name: &str, id: &str, status: Option<u16>) -> Delivery {
    Delivery { name: name.to_owned(), agent: 17, at: 11 * S, id: id.to_owned(), attempt: 1, status }
}

#[test]
fn i17_an_accepted_hook_is_delivered_or_kept() {
    let mut taken = History {
        hooks: vec![hook("h", Some("1f"))],
        deliveries: vec![
            delivery("h", "1f", None),
            delivery("h", "1f", Some(503)),
            delivery("h", "1f", Some(200)),
        ],
        ..history()
    };
    holds(&taken, Invariant::I17);
    taken.deliveries.push(delivery("h", "1f", Some(200)));
    holds(&taken, Invariant::I17);
    taken.deliveries.truncate(2);
    breaks(
        &taken,
        Invariant::I17,
        "hook h for agent 17 was accepted as 1f and is nowhere: its receiver refused it 2 times",
    );
    taken.kept = vec![Kept { id: "1f".to_owned(), agent: 17, dead: true, at: 99 * S }];
    holds(&taken, Invariant::I17);
    taken.deliveries.clear();
    holds(&taken, Invariant::I17);
    taken.kept[0].agent = 18;
    breaks(&taken, Invariant::I17, "hook h for agent 17 was accepted as 1f and is nowhere");
    taken.hooks[0].id = None;
    breaks(&taken, Invariant::I17, "hook h for agent 17 was accepted without an id");

    let refused = History { hooks: vec![hook("h", None)], ..history() };
    holds(&refused, Invariant::I17);
}

#[test]
fn i17_a_hook_reaches_its_own_agent() {
    let mut astray = History {
        hooks: vec![hook("h", Some("1f"))],
        deliveries: vec![delivery("h", "1f", Some(200)), delivery("h", "1f", Some(200))],
        ..history()
    };
    astray.deliveries[1].agent = 18;
    breaks(&astray, Invariant::I17, "hook h for agent 17 was delivered to agent 18");
    astray.deliveries[1] = delivery("other", "2f", Some(200));
    breaks(&astray, Invariant::I17, "a receiver of agent 17 got other, which nobody sent");
}

#[test]
fn i17_a_hook_keeps_its_id() {
    let mut ids = History {
        hooks: vec![hook("h", Some("1f"))],
        deliveries: vec![delivery("h", "1f", Some(200)), delivery("h", "2f", Some(200))],
        ..history()
    };
    breaks(&ids, Invariant::I17, "hook h has the ids 1f and 2f, and at most 1 were given");
    // A try that was not answered may have been kept.
    ids.hooks.insert(0, hook("h", None));
    holds(&ids, Invariant::I17);
    ids.deliveries.push(delivery("h", "3f", Some(200)));
    breaks(&ids, Invariant::I17, "hook h has the ids 1f and 2f and 3f, and at most 2 were given");
    ids.deliveries.truncate(1);
    ids.hooks.push(hook("h", Some("4f")));
    ids.kept = vec![Kept { id: "4f".to_owned(), agent: 17, dead: false, at: 99 * S }];
    breaks(&ids, Invariant::I17, "repetitions of hook h were accepted as 1f and 4f");
    ids.hooks.pop();
    ids.deliveries[0].id = "2f".to_owned();
    breaks(&ids, Invariant::I17, "hook h for agent 17 was accepted as 1f and was delivered as 2f only");
}
