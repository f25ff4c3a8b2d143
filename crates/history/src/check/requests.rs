//! Requests beside what agents ran: I1 to I4, I6, I11, I12, I14, I20, I21.

use std::collections::{BTreeMap, BTreeSet};

use super::{Checker, Invariant, seconds};
use crate::{Audit, Bytes, Effect, Fault, History, Kind, Micros, Outcome, Presence, Request, Run, SECOND};

/// How long what was lost during a fault may take to arrive after it: TCP waits longer each time.
const RESENT: Micros = 4 * SECOND;

pub(super) fn check(history: &History, checker: &mut Checker) {
    let mut runs: BTreeMap<u64, Vec<&Run>> = BTreeMap::new();
    for run in &history.runs {
        runs.entry(run.request).or_default().push(run);
    }
    let mut requests: BTreeMap<u64, &Request> = BTreeMap::new();
    for request in &history.requests {
        let earlier = requests.insert(request.id, request);
        if earlier.is_some() {
            let what = format!("request {} has two outcomes in the history", request.id);
            checker.check(Invariant::I2, request.ended, Some(what));
        }
    }
    at_most_once(&runs, &requests, checker);
    right_agent(history, &requests, checker);
    let presences = by_agent(&history.presences);
    let audits = by_request(&history.audits);
    let killed = killed_while(history);
    for request in requests.values() {
        let ran = runs.get(&request.id).map_or(&[][..], Vec::as_slice);
        retries(request, checker);
        outcome(history, request, ran, checker);
        path(request, checker);
        for run in ran {
            bytes(request, run, checker);
        }
        credential(history, request, ran, checker);
        rule(history, request, ran, checker);
        waiting(history, request, ran, presences.get(&request.agent).map(Vec::as_slice), checker);
        if !history.audits.is_empty() {
            audit(request, ran, audits.get(&request.id).map(Vec::as_slice), &killed, checker);
        }
    }
    for presence in &history.presences {
        tunnel_credential(history, presence, checker);
    }
}

fn by_agent(presences: &[Presence]) -> BTreeMap<i64, Vec<&Presence>> {
    let mut map: BTreeMap<i64, Vec<&Presence>> = BTreeMap::new();
    for presence in presences {
        map.entry(presence.agent).or_default().push(presence);
    }
    map
}

fn by_request(audits: &[Audit]) -> BTreeMap<u64, Vec<&Audit>> {
    let mut map: BTreeMap<u64, Vec<&Audit>> = BTreeMap::new();
    for audit in audits {
        map.entry(audit.request).or_default().push(audit);
    }
    map
}

/// When a process of a replica was killed. One that ended in order has written everything.
fn killed_while(history: &History) -> Vec<Micros> {
    history.lives.iter().filter(|life| life.killed).filter_map(|life| life.to).collect()
}

fn place(run: &Run) -> String {
    let mut words = format!("at {}", seconds(run.started));
    if let Some(replica) = &run.replica {
        words += &format!(" through replica {replica}");
    }
    if let Some(connection) = run.connection {
        words += &format!(" on connection {connection}");
    }
    words
}

fn at_most_once(runs: &BTreeMap<u64, Vec<&Run>>, requests: &BTreeMap<u64, &Request>, checker: &mut Checker) {
    for (id, runs) in runs {
        let breach = (runs.len() > 1).then(|| {
            let agent = requests.get(id).map_or(runs[0].agent, |request| request.agent);
            let times = match runs.len() {
                2 => "twice".to_owned(),
                more => format!("{more} times"),
            };
            let places: Vec<_> = runs.iter().map(|run| place(run)).collect();
            format!("request {id} for agent {agent} was started {times}: {}", places.join(", and "))
        });
        checker.check(Invariant::I1, Some(runs[0].started), breach);
    }
}

/// Only an attempt that certainly did not run may be followed by another one.
fn retries(request: &Request, checker: &mut Checker) {
    for pair in request.attempts.windows(2) {
        let breach = (!pair[0].outcome.certainly_not_run()).then(|| {
            format!(
                "request {} for agent {} was tried again at {} although the attempt at {} ended as {}",
                request.id,
                request.agent,
                pair[1].replica,
                pair[0].replica,
                pair[0].outcome.as_str()
            )
        });
        checker.check(Invariant::I1, Some(pair[1].begun), breach);
    }
}

fn outcome(history: &History, request: &Request, ran: &[&Run], checker: &mut Checker) {
    let late = request.deadline.map(|deadline| deadline.saturating_add(history.header.bounds.late));
    let who = || format!("request {} for agent {}", request.id, request.agent);
    let breach = match (request.ended, request.outcome) {
        (Some(ended), Some(outcome)) => {
            if late.is_some_and(|late| ended > late) {
                let deadline = request.deadline.unwrap_or_default();
                Some(format!("{} ended {} after its deadline", who(), seconds(ended - deadline)))
            } else if outcome.certainly_not_run() && !ran.is_empty() {
                let place = place(ran[0]);
                Some(format!("{} ended as {}, but its agent ran it {place}", who(), outcome.as_str()))
            } else if matches!(outcome, Outcome::Ok | Outcome::Error)
                && ran.is_empty()
                && history.header.runs_complete
            {
                Some(format!("{} was answered ({}), but no agent ran it", who(), outcome.as_str()))
            } else {
                None
            }
        }
        // Still open: judged only if it should have ended before recording did.
        (None, None) if late.is_none_or(|late| late > history.header.end) => return,
        (None, None) => Some(format!("{} never ended", who())),
        _ => Some(format!("{} has a time of its end without an outcome, or the reverse", who())),
    };
    checker.check(Invariant::I2, request.ended.or(Some(request.begun)), breach);
    if request.phases.windows(2).any(|pair| pair[0].1 > pair[1].1) {
        let what = format!("{} went through its phases out of order: {:?}", who(), request.phases);
        checker.check(Invariant::I2, Some(request.begun), Some(what));
    }
}

fn path(request: &Request, checker: &mut Checker) {
    if request.path.is_empty() {
        return;
    }
    let distinct: BTreeSet<_> = request.path.iter().collect();
    let breach = (request.path.len() > 2 || distinct.len() < request.path.len()).then(|| {
        let path = request.path.join(" to ");
        format!("request {} for agent {} passed {path}", request.id, request.agent)
    });
    checker.check(Invariant::I3, Some(request.begun), breach);
}

fn right_agent(history: &History, requests: &BTreeMap<u64, &Request>, checker: &mut Checker) {
    let mut owners: BTreeMap<i64, BTreeSet<i64>> = BTreeMap::new();
    for presence in &history.presences {
        if let Some(connection) = presence.connection {
            owners.entry(connection).or_default().insert(presence.agent);
        }
    }
    for run in &history.runs {
        if let Some(request) = requests.get(&run.request) {
            let breach = (request.agent != run.agent).then(|| {
                let (id, meant, ran) = (request.id, request.agent, run.agent);
                format!("request {id} for agent {meant} ran on agent {ran} {}", place(run))
            });
            checker.check(Invariant::I4, Some(run.started), breach);
        }
        let owner = run.connection.and_then(|connection| owners.get(&connection));
        if let Some(owner) = owner {
            let breach = (!owner.contains(&run.agent)).then(|| {
                let (id, agent) = (run.request, run.agent);
                format!(
                    "request {id} reached agent {agent} {}, which belongs to agents {owner:?}",
                    place(run)
                )
            });
            checker.check(Invariant::I4, Some(run.started), breach);
        }
    }
}

fn bytes(request: &Request, run: &Run, checker: &mut Checker) {
    let invariant = if request.kind == Kind::Upgrade { Invariant::I21 } else { Invariant::I6 };
    let directions =
        [("the request", request.sent, run.received), ("the response", run.sent, request.received)];
    for (what, sent, received) in directions {
        let (Some(sent), Some(received)) = (sent, received) else { continue };
        let breach = differ(sent, received)
            .map(|how| format!("{what} of request {} for agent {}: {how}", request.id, request.agent));
        checker.check(invariant, request.ended.or(Some(request.begun)), breach);
    }
}

/// How what was received is not what was sent.
fn differ(sent: Bytes, received: Bytes) -> Option<String> {
    let (of, got) = (sent.count, received.count);
    if let Some(at) = received.wrong_at {
        Some(format!("the byte at {at} was not the one that was sent"))
    } else if got > of {
        Some(format!("{got} bytes were received, but only {of} were sent"))
    } else if received.clean && !sent.clean {
        Some(format!("it ended cleanly after {got} bytes, but the sender had reset it"))
    } else if received.clean && got < of {
        Some(format!("it ended cleanly after {got} of {of} bytes"))
    } else if got == of && received.hash != sent.hash {
        Some(format!("all {of} bytes were received, but they were others"))
    } else {
        None
    }
}

fn credential(history: &History, request: &Request, ran: &[&Run], checker: &mut Checker) {
    let Some(since) = request.invalid_since else { return };
    let limit = since.saturating_add(history.header.bounds.revoke);
    let late = ran.iter().find(|run| run.started > limit);
    let admitted = request.begun > limit && matches!(request.outcome, Some(Outcome::Ok | Outcome::Error));
    let breach = (late.is_some() || admitted).then(|| {
        let after = late.map_or(request.begun, |run| run.started) - since;
        let (id, agent) = (request.id, request.agent);
        format!("request {id} for agent {agent} was admitted {} after its credential ended", seconds(after))
    });
    checker.check(Invariant::I11, Some(request.begun), breach);
}

fn tunnel_credential(history: &History, presence: &Presence, checker: &mut Checker) {
    let Some(since) = presence.invalid_since else { return };
    let limit = since.saturating_add(history.header.bounds.revoke);
    let until = presence.to.unwrap_or(history.header.end);
    let breach = (until > limit).then(|| {
        let (agent, replica) = (presence.agent, &presence.replica);
        let after = seconds(until - since);
        format!("agent {agent} had a tunnel on replica {replica} until {after} after its credential ended")
    });
    checker.check(Invariant::I11, Some(until), breach);
}

fn rule(history: &History, request: &Request, ran: &[&Run], checker: &mut Checker) {
    let Some(until) = request.allowed_until else { return };
    let limit = until.saturating_add(history.header.bounds.expire);
    let end = |run: &&Run| run.ended.or(request.ended).unwrap_or(history.header.end);
    let late = ran.iter().map(end).chain(request.ended).max().filter(|end| *end > limit);
    let breach = late.map(|end| {
        let (id, agent, after) = (request.id, request.agent, seconds(end - until));
        format!("request {id} for agent {agent} ran until {after} after the end of the rule that allowed it")
    });
    checker.check(Invariant::I20, Some(until), breach);
}

/// Whether a fault has delayed the cancellation of a request on its way from the replica of its client to the
/// agent. TCP delivers it after everything that was sent before, which was perhaps lost several times.
fn may_be_on_its_way(history: &History, request: &Request, run: &Run, ended: Micros) -> bool {
    let (Some(attempt), Some(owner)) = (request.attempts.last(), &run.replica) else { return false };
    let agent = format!("agent {}", run.agent);
    let is_passed = |(a, b): &(String, String)| {
        [(&attempt.replica, owner), (&agent, owner)].iter().any(|pair| *pair == (a, b) || *pair == (b, a))
    };
    let delays = |fault: &&Fault| match &fault.effect {
        Effect::None => false,
        Effect::Disabled(replicas) => [&attempt.replica, owner].iter().any(|place| replicas.contains(*place)),
        Effect::Cut(pairs) | Effect::Slow(pairs) => pairs.iter().any(is_passed),
        Effect::All => true,
    };
    let lasts = |fault: &&Fault| {
        fault.from <= run.started && fault.to.is_none_or(|to| to.saturating_add(RESENT) >= ended)
    };
    history.faults.iter().filter(lasts).any(|fault| delays(&fault))
}

fn waiting(
    history: &History,
    request: &Request,
    ran: &[&Run],
    presences: Option<&[&Presence]>,
    checker: &mut Checker,
) {
    let (id, agent) = (request.id, request.agent);
    if let (Some(Outcome::Cancelled), Some(ended)) = (request.outcome, request.ended) {
        let limit = ended.saturating_add(history.header.bounds.cancel);
        let is_late = |run: &Run| run.started > limit && !may_be_on_its_way(history, request, run, ended);
        let breach = ran.iter().find(|run| is_late(run)).map(|run| {
            let after = seconds(run.started - ended);
            format!("request {id} for agent {agent} was started {after} after it had been cancelled")
        });
        checker.check(Invariant::I14, Some(ended), breach);
    }
    if request.kind != Kind::Waiter || history.presences.is_empty() {
        return;
    }
    for run in ran {
        let there = presences.unwrap_or_default().iter().any(|presence| {
            presence.from.saturating_sub(history.header.bounds.early) <= run.started
                && presence.to.is_none_or(|to| to >= request.begun)
        });
        let breach = (!there).then(|| {
            format!(
                "request {id} waited for agent {agent} and was released {}, but that agent had no tunnel",
                place(run)
            )
        });
        checker.check(Invariant::I14, Some(run.started), breach);
    }
}

fn audit(
    request: &Request,
    ran: &[&Run],
    audits: Option<&[&Audit]>,
    killed: &[Micros],
    checker: &mut Checker,
) {
    let Some(run) = ran.first() else { return };
    let audits = audits.unwrap_or_default();
    let (id, agent) = (request.id, request.agent);
    let ends = request.ended.unwrap_or(Micros::MAX);
    // A process that is killed cannot write what it still holds.
    let excused = killed.iter().any(|at| (request.begun..=ends.saturating_add(crate::SECOND)).contains(at));
    // Two replicas may each record it: what is counted is each replica's own records.
    let mut counts: BTreeMap<&str, [u32; 2]> = BTreeMap::new();
    for audit in audits {
        counts.entry(&audit.replica).or_default()[usize::from(audit.end)] += 1;
    }
    let breach = counts
        .iter()
        .find(|(_, [starts, ends])| *starts > 1 || *ends > 1 || (!excused && (*starts, *ends) != (1, 1)))
        .map(|(replica, [starts, ends])| {
            format!("request {id} for agent {agent} has {starts} records of its start and {ends} of its end on {replica}")
        })
        .or_else(|| {
            (counts.is_empty() && !excused)
                .then(|| format!("request {id} for agent {agent} ran {} and is in no audit log", place(run)))
        });
    if request.ended.is_some() {
        checker.check(Invariant::I12, request.ended, breach);
    }
}
