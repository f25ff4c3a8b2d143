//! [`Selector`]: which agents are meant.

use std::{collections::BTreeMap, fmt, str::FromStr};

use ids::{AgentId, Pattern};

/// The longest text of a selector, in bytes.
const LONGEST: usize = 16 << 10;
/// The most values of all terms together.
const MOST_VALUES: usize = 2_000;

/// Which agents are meant: `all`, or terms joined by `,` of which each must hold. The values of a term are
/// joined by `|`, and one of them must hold.
///
/// | term | holds for |
/// | --- | --- |
/// | `id=7` | the agent with this id |
/// | `project=3` | agents of this configuration project |
/// | `name=prod-*` | agents with this name, or with names that begin so |
/// | `key=value` | agents with this label in `kas.yaml`; `value*`: one that begins so |
///
/// Labels are the word of whoever writes `kas.yaml`. They prove nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    terms: Vec<Term>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    Id(Vec<AgentId>),
    Project(Vec<i64>),
    Name(Vec<Pattern>),
    Label(String, Vec<Pattern>),
}

/// What is known of an agent.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its id.
    pub id: AgentId,
    /// Its name, if known.
    pub name: Option<&'a str>,
    /// Its configuration project, if known.
    pub project: Option<i64>,
}

/// A text that is no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSelector {
    /// It is empty.
    #[error(
        "the selector of agents is empty; expected all, or terms such as id=7|9, project=3, name=prod-*, env=prod"
    )]
    Empty,
    /// It is too long.
    #[error("the selector of agents has {0} bytes; at most {LONGEST}")]
    Long(usize),
    /// It has too many values.
    #[error("the selector of agents has more than {MOST_VALUES} values")]
    Many,
    /// A term is wrong.
    #[error("the selector of agents has {term:?}: expected {expected}")]
    Term {
        /// The term.
        term: String,
        /// What would be right.
        expected: &'static str,
    },
    /// Two terms have the same key, and no agent could have both.
    #[error("the selector of agents has {0} twice; join its values by |")]
    Twice(String),
}

impl Selector {
    /// Returns the selector of all agents.
    pub fn all() -> Self {
        Self { terms: Vec::new() }
    }

    /// Whether it needs the labels of agents.
    pub fn needs_labels(&self) -> bool {
        self.terms.iter().any(|term| matches!(term, Term::Label(..)))
    }

    /// Returns the agents that it names by their ids; `None`: it names none so.
    pub fn ids(&self) -> Option<&[AgentId]> {
        self.terms.iter().find_map(|term| match term {
            Term::Id(ids) => Some(ids.as_slice()),
            _ => None,
        })
    }

    /// Whether something else than ids is asked for.
    pub fn has_other_terms_than_ids(&self) -> bool {
        self.terms.iter().any(|term| !matches!(term, Term::Id(_)))
    }

    /// Whether an agent is selected as far as its id, project and name say.
    pub fn matches(&self, agent: Candidate<'_>) -> bool {
        self.terms.iter().all(|term| match term {
            Term::Id(ids) => ids.contains(&agent.id),
            Term::Project(projects) => agent.project.is_some_and(|project| projects.contains(&project)),
            Term::Name(names) => agent.name.is_some_and(|name| names.iter().any(|it| it.matches(name))),
            Term::Label(..) => true,
        })
    }

    /// Whether an agent with these labels is selected as far as labels say.
    pub fn matches_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        self.terms.iter().all(|term| match term {
            Term::Label(key, values) => {
                labels.get(key).is_some_and(|value| values.iter().any(|it| it.matches(value)))
            }
            _ => true,
        })
    }
}

impl FromStr for Selector {
    type Err = InvalidSelector;

    fn from_str(text: &str) -> Result<Self, InvalidSelector> {
        if text.len() > LONGEST {
            return Err(InvalidSelector::Long(text.len()));
        }
        if text.is_empty() {
            return Err(InvalidSelector::Empty);
        }
        if text == "all" {
            return Ok(Self::all());
        }
        let mut terms: Vec<Term> = Vec::new();
        let mut keys: Vec<&str> = Vec::new();
        let mut count = 0;
        for part in text.split(',') {
            let wrong = |expected| InvalidSelector::Term { term: part.chars().take(80).collect(), expected };
            let (key, values) =
                part.split_once('=').ok_or_else(|| wrong("all alone, or key=value such as name=prod-*"))?;
            count += values.split('|').count();
            if count > MOST_VALUES {
                return Err(InvalidSelector::Many);
            }
            if keys.contains(&key) {
                return Err(InvalidSelector::Twice(key.chars().take(80).collect()));
            }
            keys.push(key);
            terms.push(match key {
                "id" => Term::Id(
                    read(values, plain_number).ok_or_else(|| wrong("numbers of agents, such as id=7|9"))?,
                ),
                "project" => Term::Project(
                    read(values, plain_number)
                        .ok_or_else(|| wrong("numbers of projects, such as project=3"))?,
                ),
                "name" => {
                    let expected = "names, with * only at their ends, such as name=prod-*|berlin";
                    Term::Name(read(values, |value| value.parse().ok()).ok_or_else(|| wrong(expected))?)
                }
                key if is_label_key(key) => {
                    let value = |value: &str| {
                        let pattern: Pattern = value.parse().ok()?;
                        (pattern.literal().is_empty() || is_label_value_part(pattern.literal()))
                            .then_some(pattern)
                    };
                    let expected = "values of a label, with * only at their ends, such as env=prod|test";
                    Term::Label(key.to_owned(), read(values, value).ok_or_else(|| wrong(expected))?)
                }
                _ => return Err(wrong("id, project, name, or the key of a label")),
            });
        }
        Ok(Self { terms })
    }
}

/// Reads a positive number without a sign or a leading zero.
fn plain_number<T: FromStr>(text: &str) -> Option<T> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    is_plain.then(|| text.parse().ok())?
}

fn read<T>(values: &str, of: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
    values.split('|').map(of).collect()
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("all");
        }
        for (n, term) in self.terms.iter().enumerate() {
            if n > 0 {
                f.write_str(",")?;
            }
            match term {
                Term::Id(ids) => write_values(f, "id", ids)?,
                Term::Project(projects) => write_values(f, "project", projects)?,
                Term::Name(names) => write_values(f, "name", names)?,
                Term::Label(key, values) => write_values(f, key, values)?,
            }
        }
        Ok(())
    }
}

fn write_values(f: &mut fmt::Formatter<'_>, key: &str, values: &[impl fmt::Display]) -> fmt::Result {
    write!(f, "{key}=")?;
    for (n, value) in values.iter().enumerate() {
        write!(f, "{}{value}", if n > 0 { "|" } else { "" })?;
    }
    Ok(())
}

/// Whether a text can be the key of a label: as in Kubernetes without a prefix, and none that a selector uses
/// for something else.
pub fn is_label_key(key: &str) -> bool {
    !matches!(key, "id" | "project" | "name" | "all") && is_label_value(key) && !key.is_empty()
}

/// Whether a text can be the value of a label, as in Kubernetes: at most 63 letters, digits, `-`, `_` and
/// `.`, with a letter or digit at both ends. It may be empty.
pub fn is_label_value(value: &str) -> bool {
    let is_outer = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = value.as_bytes();
    is_label_value_part(value) && is_outer(bytes.first()) && is_outer(bytes.last())
}

fn is_label_value_part(text: &str) -> bool {
    text.len() <= 63
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn selects(selector: &str, id: i64, name: &str, project: i64, labels: &[(&str, &str)]) -> bool {
        let selector: Selector = selector.parse().unwrap();
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let candidate = Candidate { id: AgentId::new(id).unwrap(), name: Some(name), project: Some(project) };
        selector.matches(candidate) && selector.matches_labels(&labels)
    }

    #[test]
    fn each_term_must_hold_and_one_of_its_values() {
        let labels = [("env", "prod"), ("region", "eu-west")];
        for (selector, expected) in [
            ("all", true),
            ("id=7", true),
            ("id=8|7", true),
            ("id=8", false),
            ("project=3", true),
            ("project=4|5", false),
            ("name=prod-*", true),
            ("name=prod-1", true),
            ("name=prod", false),
            ("name=test-*|*", true),
            ("env=prod", true),
            ("env=test|prod", true),
            ("env=test", false),
            ("region=eu-*", true),
            ("region=*", true),
            ("tier=*", false),
            ("id=7,project=3,name=prod-*,env=prod", true),
            ("id=7,env=test", false),
        ] {
            assert_eq!(selects(selector, 7, "prod-1", 3, &labels), expected, "{selector}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_selected() {
        let candidate = Candidate { id: AgentId::new(7).unwrap(), name: None, project: None };
        for (selector, expected) in [("all", true), ("id=7", true), ("name=*", false), ("project=3", false)] {
            assert_eq!(selector.parse::<Selector>().unwrap().matches(candidate), expected, "{selector}");
        }
        let by_id: Selector = "env=a,id=7|9".parse().unwrap();
        assert!(
            by_id.needs_labels()
                && by_id.has_other_terms_than_ids()
                && by_id.ids().is_some_and(|ids| ids.len() == 2)
        );
        let by_name: Selector = "name=a".parse().unwrap();
        assert!(!by_name.needs_labels() && by_name.ids().is_none());
    }

    #[test]
    fn a_wrong_selector_is_refused_with_its_place() {
        for (text, place) in [
            ("", "empty"),
            ("prod", "\"prod\""),
            ("all,id=7", "\"all\""),
            ("id=", "\"id=\""),
            ("id=0", "\"id=0\""),
            ("id=07", "\"id=07\""),
            ("id=+7", "\"id=+7\""),
            ("id=7|", "\"id=7|\""),
            ("project=x", "\"project=x\""),
            ("name=a*b", "\"name=a*b\""),
            ("name=", "\"name=\""),
            ("env=a b", "\"env=a b\""),
            ("env!=a", "env!"),
            ("=a", "\"=a\""),
            ("env=a,,id=7", "\"\""),
            ("env=a,env=b", "env twice"),
        ] {
            let error = text.parse::<Selector>().unwrap_err().to_string();
            assert!(error.contains(place), "{text}: {error}");
        }
        assert!("x".repeat(20_000).parse::<Selector>().is_err());
        assert_eq!(format!("id={}1", "1|".repeat(2_000)).parse::<Selector>(), Err(InvalidSelector::Many));
    }

    #[test]
    fn labels_are_as_in_kubernetes() {
        for good in ["a", "A-1", "a.b_c", &"x".repeat(63)] {
            assert!(is_label_value(good) && is_label_key(good), "{good}");
        }
        for bad in ["-a", "a-", "a b", "ä", &"x".repeat(64)] {
            assert!(!is_label_value(bad) && !is_label_key(bad), "{bad}");
        }
        assert!(is_label_value("") && !is_label_key("") && !is_label_key("id"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_and_a_selector_is_written_as_it_was(text in "[a-z0-9=|,*. -]{0,40}", any in ".{0,60}") {
            if let Ok(selector) = text.parse::<Selector>() {
                prop_assert_eq!(selector.to_string(), text);
            }
            let _ = any.parse::<Selector>();
        }
    }
}
