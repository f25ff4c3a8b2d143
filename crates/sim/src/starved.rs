//! A request that waits for an agent starts soon after the agent has come.

use std::{collections::BTreeSet, fmt::Display};

use history::{Effect, History, Micros, Outcome, Presence, SECOND};

/// How soon, if nothing disturbs the two replicas.
const WITHIN: Micros = 4 * SECOND;
/// How long a disturbance may have effects after its end: T_heal is 5 s.
const AFTER: Micros = 6 * SECOND;

/// Returns which requests were not started although their agent was there.
pub(crate) fn check(history: &History) -> Vec<String> {
    let mut breaches = Vec::new();
    let waited = history.requests.iter().filter(|request| request.outcome == Some(Outcome::NotStarted));
    for request in waited {
        let (Some(ended), Some(attempt)) = (request.ended, request.attempts.last()) else { continue };
        if request.deadline.is_some_and(|deadline| ended < deadline) {
            // It was refused: its client may try again.
            continue;
        }
        for presence in history.presences.iter().filter(|presence| presence.agent == request.agent) {
            let since = presence.from.max(attempt.begun);
            let stayed = presence.to.is_none_or(|to| to > ended);
            if !stayed || since + WITHIN > ended {
                continue;
            }
            let places = BTreeSet::from([&attempt.replica, &presence.replica]);
            let from = since.saturating_sub(AFTER);
            if is_disturbed(history, &places, from, ended) || is_cut_off(history, presence, from, ended) {
                continue;
            }
            let seconds = (ended - since) as f64 / SECOND as f64;
            breaches.push(format!(
                "request {} for agent {} through {} was not started, although the agent was on {} for the last \
                 {seconds:.1} s of it: {}",
                request.id, request.agent, attempt.replica, presence.replica, request.detail
            ));
            break;
        }
    }
    breaches
}

/// What a fault is called that cuts an agent off from a replica. Neither notices at once, and the requests
/// that it never answers keep its tunnels.
pub(crate) fn cut_off(agent: impl Display, replica: &str) -> String {
    format!("agent {agent} and {replica} are cut")
}

/// Whether the agent was cut off from the replica that believes to hold it.
fn is_cut_off(history: &History, presence: &Presence, from: Micros, to: Micros) -> bool {
    let what = cut_off(presence.agent, &presence.replica);
    history
        .faults
        .iter()
        .any(|fault| fault.what == what && fault.from <= to && fault.to.is_none_or(|end| end >= from))
}

/// Whether a fault concerns one of these replicas in this time, or all of them.
fn is_disturbed(history: &History, places: &BTreeSet<&String>, from: Micros, to: Micros) -> bool {
    let lived = |replica: &&String| {
        let mut lives = history.lives.iter().filter(|life| life.replica == **replica);
        lives.any(|life| life.from <= from && life.to.is_none_or(|ended| ended > to))
    };
    if !places.iter().all(lived) {
        return true;
    }
    history.faults.iter().filter(|fault| fault.from <= to && fault.to.is_none_or(|end| end >= from)).any(
        |fault| {
            match &fault.effect {
                // Whatever concerns the links of all, and nothing that concerns agents.
                Effect::None | Effect::Slow(_) => !fault.what.starts_with("agent "),
                Effect::Disabled(replicas) => places.iter().any(|place| replicas.contains(*place)),
                Effect::Cut(pairs) => pairs.iter().any(|(a, b)| places.contains(a) && places.contains(b)),
                Effect::All => true,
            }
        },
    )
}
