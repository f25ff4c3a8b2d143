//! Both sides of a cut network: what they serve, and what they cannot.

use std::collections::BTreeSet;

use history::{Attempt, Effect, Fault, History, Kind, Micros, Outcome, Presence, Request};

use crate::clock::millis;

/// Attempts that were begun while the network was cut.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sides {
    /// Those at a replica that held the agent all the time.
    pub(crate) own: u32,
    /// Of those, without a response.
    pub(crate) own_failed: u32,
    /// How long each took from whose replica none that held the agent could be reached, in milliseconds.
    pub(crate) across: Vec<f64>,
    /// Of those, which ended otherwise than as not started.
    pub(crate) across_wrong: u32,
    /// Some of the attempts that were counted as failed or wrong, in words.
    pub(crate) examples: Vec<String>,
}

/// How many examples there are.
const EXAMPLES: usize = 5;
/// Characters of the message of each.
const TOLD: usize = 160;

impl Sides {
    /// Looks at the attempts of a cut, which is a fault of the history that has ended. The requests of the
    /// load must be there, so it must have ended, too.
    pub(crate) fn of(history: &History, cut: usize) -> Self {
        let mut sides = Self::default();
        let Some(fault) = history.faults.get(cut) else { return sides };
        let (Effect::Cut(pairs), Some(to)) = (&fault.effect, fault.to) else { return sides };
        for request in history.requests.iter().filter(|request| counts(request)) {
            for attempt in request.attempts.iter().filter(|it| (fault.from..=to).contains(&it.begun)) {
                let holders = holders(history, fault, request.agent);
                if holders.always.contains(attempt.replica.as_str()) {
                    sides.own += 1;
                    if attempt.outcome != Outcome::Ok {
                        sides.own_failed += 1;
                        sides.example(request, attempt);
                    }
                    continue;
                }
                // One that ended after the cut may have been served after it.
                let out_of_reach = |holder: &&str| {
                    let (own, other) = (attempt.replica.clone(), (*holder).to_owned());
                    pairs.contains(&(own.clone(), other.clone())) || pairs.contains(&(other, own))
                };
                let held = !holders.ever.is_empty();
                if held && attempt.ended <= to && holders.ever.iter().all(out_of_reach) {
                    sides.across.push(millis(attempt.ended.saturating_sub(attempt.begun)));
                    if attempt.outcome != Outcome::NotStarted {
                        sides.across_wrong += 1;
                        sides.example(request, attempt);
                    }
                }
            }
        }
        sides
    }

    fn example(&mut self, request: &Request, attempt: &Attempt) {
        if self.examples.len() < EXAMPLES {
            let detail: String = request.detail.trim().chars().take(TOLD).collect();
            self.examples.push(format!(
                "request {} for agent {} at {} ended as {} after {:.0} ms ({detail})",
                request.id,
                request.agent,
                attempt.replica,
                attempt.outcome.as_str(),
                millis(attempt.ended.saturating_sub(attempt.begun))
            ));
        }
    }
}

/// Whether it is of the load: one response, and a credential.
fn counts(request: &Request) -> bool {
    matches!(request.kind, Kind::Unary | Kind::Http) && request.invalid_since.is_none()
}

/// The replicas that held an agent while a fault lasted: all the time, and at any time.
struct Holders<'a> {
    always: BTreeSet<&'a str>,
    ever: BTreeSet<&'a str>,
}

fn holders<'a>(history: &'a History, fault: &Fault, agent: i64) -> Holders<'a> {
    let (from, to) = (fault.from, fault.to.unwrap_or(Micros::MAX));
    let of = |it: &&Presence| it.agent == agent && !it.replica.is_empty();
    let until = |it: &Presence| it.to.unwrap_or(Micros::MAX);
    let there = || history.presences.iter().filter(of).filter(|it| it.from <= to && until(it) >= from);
    let always = there().filter(|it| it.from <= from && until(it) >= to);
    Holders {
        always: always.map(|it| it.replica.as_str()).collect(),
        ever: there().map(|it| it.replica.as_str()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use history::SECOND;

    use super::*;

    fn presence(agent: i64, replica: &str) -> Presence {
        Presence {
            agent,
            replica: replica.to_owned(),
            connection: None,
            from: 0,
            to: None,
            invalid_since: None,
        }
    }

    fn tried(agent: i64, replica: &str, (begun, ended): (Micros, Micros), outcome: Outcome) -> Request {
        let mut request = Request::new(begun, agent, Kind::Unary, begun * SECOND);
        let (begun, ended) = (begun * SECOND, ended * SECOND);
        request.attempts.push(Attempt { replica: replica.to_owned(), begun, ended, outcome });
        request.ended(ended, outcome)
    }

    /// a and b are cut from c; agent 1 is on a, agent 2 on c, agent 3 on both.
    fn split() -> History {
        let pairs = [("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")];
        let pairs = pairs.map(|(from, to)| (from.to_owned(), to.to_owned()));
        let fault = Fault {
            from: 10 * SECOND,
            to: Some(30 * SECOND),
            what: "c is cut".to_owned(),
            effect: Effect::Cut(pairs.into()),
        };
        let presences = vec![presence(1, "a"), presence(2, "c"), presence(3, "a"), presence(3, "c")];
        History { faults: vec![fault], presences, ..History::default() }
    }

    #[test]
    fn a_side_that_does_not_serve_its_own_agents_is_told() {
        let mut history = split();
        history.requests = vec![
            tried(1, "a", (11, 12), Outcome::Ok),
            tried(3, "c", (12, 13), Outcome::Ok),
            // Through another replica of the same side: neither its own, nor out of reach.
            tried(1, "b", (13, 14), Outcome::Unknown),
        ];
        let sides = Sides::of(&history, 0);
        assert_eq!((sides.own, sides.own_failed, sides.across.len()), (2, 0, 0));
        history.requests.push(tried(2, "c", (14, 15), Outcome::NotStarted));
        let sides = Sides::of(&history, 0);
        assert_eq!((sides.own, sides.own_failed, sides.examples.len()), (3, 1, 1), "{sides:?}");
        history.requests.push(tried(2, "c", (1, 2), Outcome::Unknown));
        assert_eq!(Sides::of(&history, 0), sides, "before the cut");
    }

    #[test]
    fn what_is_out_of_reach_ends_as_not_started() {
        let mut history = split();
        history.requests = vec![
            tried(2, "a", (11, 13), Outcome::NotStarted),
            tried(1, "c", (12, 15), Outcome::NotStarted),
            // It was served after the cut.
            tried(2, "b", (29, 31), Outcome::Ok),
        ];
        let sides = Sides::of(&history, 0);
        assert_eq!((sides.own, sides.across_wrong), (0, 0));
        assert_eq!(sides.across, [2_000.0, 3_000.0]);
        history.requests.push(tried(1, "c", (16, 18), Outcome::Unknown));
        assert_eq!(Sides::of(&history, 0).across_wrong, 1);
    }
}
