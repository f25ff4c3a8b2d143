//! Agents that are missing in an answer.

use std::fmt;

use ids::AgentId;
use serde::Serialize;

/// The longest reason, in characters.
const LONGEST_REASON: usize = 512;
/// The longest name of an agent in a text, in characters.
const LONGEST_NAME: usize = 128;

/// An agent that was selected and gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unanswered {
    /// Its id.
    pub agent: AgentId,
    /// Its name; empty if it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Why, for people. An agent or its cluster may have written a part of it.
    pub reason: String,
}

impl Unanswered {
    /// Returns an entry. Control characters of the texts are replaced, and long texts are cut.
    pub fn new(agent: AgentId, name: Option<&str>, reason: &str) -> Self {
        Self {
            agent,
            name: plain(name.unwrap_or_default(), LONGEST_NAME),
            reason: plain(reason, LONGEST_REASON),
        }
    }

    /// Returns the name of the agent as it is. `None`: it is not known, or something of it may have been
    /// replaced or cut.
    pub fn whole_name(&self) -> Option<&str> {
        let may_differ = self.name.contains(' ') || self.name.chars().count() >= LONGEST_NAME;
        Some(&*self.name).filter(|name| !name.is_empty() && !may_differ)
    }
}

/// `agent 7 (berlin): no answer in 10 s`.
impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "agent {}", self.agent)?;
        if !self.name.is_empty() {
            write!(f, " ({})", self.name)?;
        }
        write!(f, ": {}", self.reason)
    }
}

fn plain(text: &str, longest: usize) -> String {
    text.chars().take(longest).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_told_in_one_line_and_as_json() {
        let agent = AgentId::new(7).unwrap();
        let gap = Unanswered::new(agent, Some("berlin"), "no answer\nin 10 s");
        assert_eq!(gap.to_string(), "agent 7 (berlin): no answer in 10 s");
        let json = serde_json::to_string(&gap).unwrap();
        assert_eq!(json, r#"{"agent":7,"name":"berlin","reason":"no answer in 10 s"}"#);
        let nameless = Unanswered::new(agent, None, &"x".repeat(10_000));
        assert_eq!(nameless.reason.len(), LONGEST_REASON);
        assert!(nameless.to_string().starts_with("agent 7: xxx"));
        assert!(!serde_json::to_string(&nameless).unwrap().contains("name"));
        assert_eq!((gap.whole_name(), nameless.whole_name()), (Some("berlin"), None));
        for replaced in ["ber\nlin".to_owned(), "x".repeat(200)] {
            assert_eq!(Unanswered::new(agent, Some(&replaced), "").whole_name(), None);
        }
    }
}
