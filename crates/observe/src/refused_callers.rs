//! The last refused requests of the Kubernetes API endpoint, for operators.
//!
//! A client learns only that it was refused. Operators see here what kas knows about the reason.

use std::collections::VecDeque;

use ids::AgentId;
use parking_lot::Mutex;
use tokio::time::Instant;

/// The most refusals that are remembered of callers that are known, and of those that are not.
const MOST: usize = 500;
/// The most refusals that are shown of an agent.
const MOST_SHOWN: usize = 10;

/// A refused request. It contains no part of a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedCaller {
    /// The agent that it was for, which may not exist.
    pub agent: AgentId,
    /// The source that its credential belongs to, such as `ci`.
    pub source: &'static str,
    /// The name of the caller, if its source has accepted the credential.
    pub caller: Option<Box<str>>,
    /// Which rule refused it, as in the audit log.
    pub rule: &'static str,
    /// Why, for a person.
    pub why: String,
    /// The id of the request, which the client was told.
    pub request: String,
    /// When.
    pub at: Instant,
}

/// Remembers refused requests.
#[derive(Debug, Default)]
pub struct RefusedCallers {
    /// Kept apart, so that nobody can hide the refusals of others with made-up credentials.
    known: Mutex<VecDeque<RefusedCaller>>,
    unknown: Mutex<VecDeque<RefusedCaller>>,
}

impl RefusedCallers {
    /// Remembers a refused request, and forgets the oldest one if there are too many.
    pub fn add(&self, refused: RefusedCaller) {
        let list = if refused.caller.is_some() { &self.known } else { &self.unknown };
        let mut list = list.lock();
        if list.len() >= MOST {
            list.pop_front();
        }
        list.push_back(refused);
    }

    /// Returns the last refused requests to an agent, the newest first: at most ten of callers that are
    /// known, and ten of others.
    pub fn of(&self, agent: AgentId) -> Vec<RefusedCaller> {
        let last = |list: &Mutex<VecDeque<RefusedCaller>>| -> Vec<_> {
            let list = list.lock();
            list.iter().rev().filter(|refused| refused.agent == agent).take(MOST_SHOWN).cloned().collect()
        };
        let mut all = last(&self.known);
        all.extend(last(&self.unknown));
        all.sort_by_key(|refused| std::cmp::Reverse(refused.at));
        all
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_refusals_of_an_agent_are_remembered_and_strangers_displace_nobody() {
        let all = RefusedCallers::default();
        let start = Instant::now();
        let refused = |agent, caller: Option<&str>, n: u64| RefusedCaller {
            agent: AgentId::new(agent).unwrap(),
            source: "ci",
            caller: caller.map(Into::into),
            rule: "access",
            why: String::new(),
            request: n.to_string(),
            at: start + Duration::from_secs(n),
        };
        all.add(refused(7, Some("jane"), 0));
        for n in 1..=MOST as u64 + 5 {
            all.add(refused(if n % 2 == 0 { 7 } else { 8 }, None, n));
        }
        all.add(refused(9, None, 1000));
        assert_eq!(all.unknown.lock().len(), MOST);
        let of = |agent| -> Vec<String> {
            all.of(AgentId::new(agent).unwrap()).into_iter().map(|refused| refused.request).collect()
        };
        assert_eq!(of(7), ["504", "502", "500", "498", "496", "494", "492", "490", "488", "486", "0"]);
        assert_eq!(of(9), ["1000"]);
        assert!(of(10).is_empty());
    }
}
