//! Rows of views, and webhooks: I16, I17.

use std::collections::{BTreeMap, BTreeSet};

use super::{Checker, Invariant};
use crate::{Delivery, History, Hook, Rows};

/// The state of rows that are those of the API server.
const LIVE: &str = "live";
/// How many rows that differ are told of one comparison.
const TOLD: usize = 3;

pub(super) fn check(history: &History, checker: &mut Checker) {
    for rows in &history.rows {
        checker.check(Invariant::I16, Some(rows.at), differs(rows));
    }
    hooks(history, checker);
}

/// What is wrong with the rows of a viewer.
fn differs(rows: &Rows) -> Option<String> {
    let Rows { viewer, view, agent, state, seen, truth, .. } = rows;
    let of = format!("the rows of {view} of agent {agent} that {viewer} has");
    let Some(truth) = truth else {
        return (state == LIVE)
            .then(|| format!("{of} are called live, although the API server could not be asked"));
    };
    if state != LIVE {
        return Some(format!("{of} are called {state}, although nothing is wrong any more"));
    }
    let names: BTreeSet<&String> = seen.keys().chain(truth.keys()).collect();
    let wrong: Vec<String> = names
        .into_iter()
        .filter_map(|name| match (seen.get(name), truth.get(name)) {
            (Some(seen), Some(truth)) if seen == truth => None,
            (Some(seen), Some(truth)) => Some(format!("{name} is `{seen}` instead of `{truth}`")),
            (Some(_), None) => Some(format!("{name} does not exist")),
            (None, _) => Some(format!("{name} is missing")),
        })
        .collect();
    let told = wrong.iter().take(TOLD).cloned().collect::<Vec<_>>().join(", ");
    match wrong.len() {
        0 => None,
        1..=TOLD => Some(format!("{of} are not those of the API server: {told}")),
        more => Some(format!("{of} are not those of the API server: {told}, and {} more", more - TOLD)),
    }
}

fn hooks(history: &History, checker: &mut Checker) {
    let mut sent: BTreeMap<&str, Vec<&Hook>> = BTreeMap::new();
    for hook in &history.hooks {
        sent.entry(&hook.name).or_default().push(hook);
    }
    let mut delivered: BTreeMap<&str, Vec<&Delivery>> = BTreeMap::new();
    for delivery in &history.deliveries {
        delivered.entry(&delivery.name).or_default().push(delivery);
        let breach = match sent.get(delivery.name.as_str()).and_then(|tries| tries.first()) {
            None => Some(format!(
                "a receiver of agent {} got {}, which nobody sent",
                delivery.agent, delivery.name
            )),
            Some(hook) if hook.agent != delivery.agent => Some(format!(
                "hook {} for agent {} was delivered to agent {}",
                hook.name, hook.agent, delivery.agent
            )),
            Some(_) => None,
        };
        checker.check(Invariant::I17, Some(delivery.at), breach);
    }
    let kept: BTreeSet<(&str, i64)> =
        history.kept.iter().map(|kept| (kept.id.as_str(), kept.agent)).collect();
    for (name, tries) in &sent {
        let deliveries = delivered.get(name).map(Vec::as_slice).unwrap_or_default();
        for hook in tries.iter().filter(|hook| hook.is_accepted()) {
            checker.check(Invariant::I17, Some(hook.sent), lost(hook, deliveries, &kept));
        }
        checker.check(Invariant::I17, tries.first().map(|hook| hook.sent), ids(name, tries, deliveries));
    }
}

/// What is wrong with the end of an accepted hook.
fn lost(hook: &Hook, deliveries: &[&Delivery], kept: &BTreeSet<(&str, i64)>) -> Option<String> {
    let Hook { name, agent, id, .. } = hook;
    let Some(id) = id else {
        return Some(format!("hook {name} for agent {agent} was accepted without an id"));
    };
    let ours = || deliveries.iter().filter(|delivery| delivery.id == *id);
    let is_taken = ours().any(|delivery| delivery.status.is_some_and(|status| (200..300).contains(&status)));
    if is_taken || kept.contains(&(id.as_str(), *agent)) {
        return None;
    }
    let others: BTreeSet<&str> = deliveries.iter().map(|delivery| delivery.id.as_str()).collect();
    Some(match (ours().count(), others.is_empty()) {
        (0, true) => format!("hook {name} for agent {agent} was accepted as {id} and is nowhere"),
        (0, false) => format!(
            "hook {name} for agent {agent} was accepted as {id} and was delivered as {} only",
            others.into_iter().collect::<Vec<_>>().join(" and ")
        ),
        (times, _) => format!(
            "hook {name} for agent {agent} was accepted as {id} and is nowhere: its receiver refused it {times} times"
        ),
    })
}

/// What is wrong with the ids of one hook. A try that was not answered may have been kept with an id that
/// its sender does not know, so each such try allows one more.
fn ids(name: &str, tries: &[&Hook], deliveries: &[&Delivery]) -> Option<String> {
    let told: BTreeSet<&str> =
        tries.iter().filter(|hook| hook.is_accepted()).filter_map(|hook| hook.id.as_deref()).collect();
    if told.len() > 1 {
        let told: Vec<&str> = told.into_iter().collect();
        return Some(format!("repetitions of hook {name} were accepted as {}", told.join(" and ")));
    }
    let unknown = tries.iter().filter(|hook| !hook.is_accepted()).count();
    let all: BTreeSet<&str> =
        deliveries.iter().map(|delivery| delivery.id.as_str()).chain(told.iter().copied()).collect();
    let allowed = told.len() + unknown;
    (all.len() > allowed).then(|| {
        let all: Vec<&str> = all.into_iter().collect();
        format!("hook {name} has the ids {}, and at most {allowed} were given", all.join(" and "))
    })
}
