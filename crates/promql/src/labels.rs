//! The labels that tell agents apart, and labels of the same names that series already have.

use std::collections::BTreeMap;

/// Labels of a series.
pub(crate) type Labels = BTreeMap<String, String>;

/// The label with the id of the agent.
pub const AGENT: &str = "agent";
/// The label with the name of the agent.
pub const AGENT_NAME: &str = "agent_name";
/// What stands before a label of a series that has a name of the fleet, as Prometheus does it with labels of
/// targets.
const EXPORTED: &str = "exported_";

/// The agent that series come from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentLabels {
    /// Its id.
    pub id: String,
    /// Its name; empty: not known. Then its series have no label `agent_name`.
    pub name: String,
}

/// Which labels of the fleet the series of a result have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) agent: bool,
    pub(crate) name: bool,
}

impl Kept {
    pub(crate) const BOTH: Self = Self { agent: true, name: true };
}

/// Whether a label is one of the fleet.
pub(crate) fn is_of_fleet(label: &str) -> bool {
    label == AGENT || label == AGENT_NAME
}

fn is_reserved(label: &str) -> bool {
    let mut rest = label;
    while let Some(inner) = rest.strip_prefix(EXPORTED) {
        rest = inner;
    }
    is_of_fleet(rest)
}

/// Returns the name that a label has at the server of an agent; `None`: it is one of the fleet.
pub fn own(shown: &str) -> Option<&str> {
    match shown.strip_prefix(EXPORTED) {
        _ if is_of_fleet(shown) => None,
        Some(inner) if is_reserved(inner) => Some(inner),
        _ => Some(shown),
    }
}

/// Returns the name under which a label of a server is shown.
pub fn shown(own: String) -> String {
    if is_reserved(&own) { format!("{EXPORTED}{own}") } else { own }
}

/// Returns labels of a server's series as they are shown.
pub(crate) fn attach(labels: Labels, agent: &AgentLabels, kept: Kept) -> Labels {
    let mut labels: Labels = if labels.keys().any(|label| is_reserved(label)) {
        labels.into_iter().map(|(label, value)| (shown(label), value)).collect()
    } else {
        labels
    };
    if kept.agent {
        labels.insert(AGENT.to_owned(), agent.id.clone());
    }
    if kept.name && !agent.name.is_empty() {
        labels.insert(AGENT_NAME.to_owned(), agent.name.clone());
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_the_same_name_are_shown_as_exported() {
        for (at_server, here) in [
            ("job", "job"),
            ("agent", "exported_agent"),
            ("agent_name", "exported_agent_name"),
            ("exported_agent", "exported_exported_agent"),
            ("exported_job", "exported_job"),
            ("agents", "agents"),
        ] {
            assert_eq!(shown(at_server.to_owned()), here);
            assert_eq!(own(here), Some(at_server));
        }
        assert_eq!((own("agent"), own("agent_name")), (None, None));
        let labels = Labels::from([("agent".to_owned(), "x".to_owned()), ("job".to_owned(), "j".to_owned())]);
        let agent = AgentLabels { id: "7".to_owned(), name: "berlin".to_owned() };
        let attached = attach(labels.clone(), &agent, Kept::BOTH);
        let text: Vec<_> = attached.iter().map(|(label, value)| format!("{label}={value}")).collect();
        assert_eq!(text, ["agent=7", "agent_name=berlin", "exported_agent=x", "job=j"]);
        let nameless = AgentLabels { id: "7".to_owned(), name: String::new() };
        assert!(!attach(labels, &nameless, Kept::BOTH).contains_key(AGENT_NAME));
    }
}
