//! Which agents or names a rule means: [`Selector`] and [`Pattern`].

use std::{fmt, str::FromStr};

use crate::{AgentId, is_agent_name};

/// The longest text of a selector, in bytes.
const LONGEST_SELECTOR: usize = 4 * 1024;

/// A text that is compared as a whole, or by its beginning if it ends with `*`.
#[derive(Clone, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    is_prefix: bool,
}

/// A text that is not a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a text that is not empty, with `*` only at its end")]
pub struct InvalidPattern;

impl Pattern {
    /// Whether `text` is the text of this pattern, or begins with it if the pattern ends with `*`.
    pub fn matches(&self, text: &str) -> bool {
        if self.is_prefix { text.starts_with(&*self.text) } else { *self.text == *text }
    }

    /// Whether some text that begins with `prefix` matches.
    pub fn may_begin_with(&self, prefix: &str) -> bool {
        self.text.starts_with(prefix) || self.is_prefix && prefix.starts_with(&*self.text)
    }

    /// Returns the text without the `*`.
    pub fn literal(&self) -> &str {
        &self.text
    }
}

impl FromStr for Pattern {
    type Err = InvalidPattern;

    fn from_str(pattern: &str) -> Result<Self, InvalidPattern> {
        let (text, is_prefix) = match pattern.strip_suffix('*') {
            Some(text) => (text, true),
            None => (pattern, false),
        };
        if pattern.is_empty() || text.contains('*') {
            return Err(InvalidPattern);
        }
        Ok(Self { text: text.into(), is_prefix })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.text, if self.is_prefix { "*" } else { "" })
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

/// Which agents a rule means: `all`, or terms that are joined by `,` and must all match.
///
/// The terms are `id=7|9`, `project=3|4` and `name=prod-*|demo`. A term matches if one of its values does,
/// which are joined by `|`. Only a name may end with `*`.
#[derive(Clone, PartialEq, Eq)]
pub struct Selector {
    // An empty list matches every agent.
    ids: Vec<AgentId>,
    projects: Vec<i64>,
    names: Vec<Pattern>,
}

/// Whether a [`Selector`] means an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Match {
    /// It does.
    Yes,
    /// It does not, whatever else may be learned of the agent.
    No,
    /// That depends on a project or a name that is not known. A rule with this selector must be neither
    /// applied nor passed over.
    Unknown,
}

/// Why a text is not a [`Selector`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSelector {
    /// It is empty, or a part of it is.
    #[error("expected `all`, or terms such as id=7|9, project=3 and name=prod-*, joined by commas")]
    Syntax,
    /// It is longer than 4 KiB.
    #[error("expected at most 4096 bytes")]
    TooLong,
    /// A term has another key.
    #[error("expected the keys id, project and name: labels of agents cannot be used here")]
    Key,
    /// A key occurs twice.
    #[error("expected each key once: its values are joined by `|`")]
    Twice,
    /// A value of `id` or `project` is not a positive number.
    #[error("expected whole numbers from 1 to 9223372036854775807")]
    Number,
    /// A value of `name` is not the name of an agent.
    #[error("expected names of a-z, 0-9 and inner `-`, with `*` only at the end")]
    Name,
}

impl Selector {
    /// Returns the selector `all`.
    pub const fn all() -> Self {
        Self { ids: Vec::new(), projects: Vec::new(), names: Vec::new() }
    }

    /// Whether it matches an agent. `None`: the project or the name is not known.
    pub fn matches(&self, id: AgentId, project: Option<i64>, name: Option<&str>) -> Match {
        let by_id = self.ids.is_empty() || self.ids.contains(&id);
        let by_project = match project {
            _ if self.projects.is_empty() => Some(true),
            project => project.map(|project| self.projects.contains(&project)),
        };
        let by_name = match name {
            _ if self.names.is_empty() => Some(true),
            name => name.map(|name| self.names.iter().any(|pattern| pattern.matches(name))),
        };
        match (by_id, by_project, by_name) {
            (true, Some(true), Some(true)) => Match::Yes,
            (false, ..) | (_, Some(false), _) | (.., Some(false)) => Match::No,
            _ => Match::Unknown,
        }
    }
}

impl FromStr for Selector {
    type Err = InvalidSelector;

    fn from_str(text: &str) -> Result<Self, InvalidSelector> {
        if text.len() > LONGEST_SELECTOR {
            return Err(InvalidSelector::TooLong);
        }
        let mut selector = Self::all();
        if text == "all" {
            return Ok(selector);
        }
        for term in text.split(',') {
            let (key, values) = term.split_once('=').ok_or(InvalidSelector::Syntax)?;
            let is_second = match key {
                "id" => !selector.ids.is_empty(),
                "project" => !selector.projects.is_empty(),
                "name" => !selector.names.is_empty(),
                "" => return Err(InvalidSelector::Syntax),
                _ => return Err(InvalidSelector::Key),
            };
            if is_second {
                return Err(InvalidSelector::Twice);
            }
            for value in values.split('|') {
                let number = || value.parse::<AgentId>().map_err(|_| InvalidSelector::Number);
                match key {
                    "id" => selector.ids.push(number()?),
                    "project" => selector.projects.push(number()?.get()),
                    _ => selector.names.push(name(value)?),
                }
            }
        }
        Ok(selector)
    }
}

/// Parses the name of an agent, or the beginning of one followed by `*`.
fn name(text: &str) -> Result<Pattern, InvalidSelector> {
    let pattern: Pattern = text.parse().map_err(|_| InvalidSelector::Name)?;
    let literal = pattern.literal();
    // A beginning may end where the name has inner hyphens.
    let checked = if pattern.is_prefix { literal.trim_end_matches('-') } else { literal };
    let is_name = is_agent_name(checked) && !literal.starts_with('-');
    if is_name { Ok(pattern) } else { Err(InvalidSelector::Name) }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn term(
            f: &mut fmt::Formatter<'_>,
            separator: &mut &str,
            key: &str,
            values: &[String],
        ) -> fmt::Result {
            if values.is_empty() {
                return Ok(());
            }
            write!(f, "{separator}{key}={}", values.join("|"))?;
            *separator = ",";
            Ok(())
        }
        let texts = |numbers: &[i64]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>();
        if self == &Self::all() {
            return f.write_str("all");
        }
        let mut separator = "";
        let ids: Vec<_> = self.ids.iter().map(|id| id.get()).collect();
        let names: Vec<_> = self.names.iter().map(ToString::to_string).collect();
        term(f, &mut separator, "id", &texts(&ids))?;
        term(f, &mut separator, "project", &texts(&self.projects))?;
        term(f, &mut separator, "name", &names)
    }
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    fn selector(text: &str) -> Selector {
        text.parse().unwrap()
    }

    #[test]
    fn a_pattern_has_a_star_only_at_its_end() {
        let pattern = |text: &str| text.parse::<Pattern>();
        assert!(pattern("kas:robot-*").unwrap().matches("kas:robot-"));
        assert!(pattern("kas:robot-*").unwrap().matches("kas:robot-1"));
        assert!(!pattern("kas:robot-*").unwrap().matches("kas:robot"));
        assert!(!pattern("kas:jane").unwrap().matches("kas:jane2"));
        assert!(pattern("*").unwrap().matches("any"));
        for bad in ["", "a*b", "*a", "**"] {
            assert_eq!(pattern(bad), Err(InvalidPattern), "{bad}");
        }
    }

    #[test]
    fn a_pattern_knows_whether_a_prefix_can_match() {
        for (pattern, fits) in
            [("*", true), ("k*", true), ("kas:*", true), ("kas:a", true), ("kas", false), ("corp:*", false)]
        {
            assert_eq!(pattern.parse::<Pattern>().unwrap().may_begin_with("kas:"), fits, "{pattern}");
        }
    }

    #[test]
    fn every_term_must_match_and_any_of_its_values() {
        let one = selector("id=7|9,project=3,name=prod-*|demo");
        for (id, project, name, expected) in [
            (7, 3, "prod-eu", Match::Yes),
            (9, 3, "demo", Match::Yes),
            (8, 3, "demo", Match::No),
            (7, 4, "demo", Match::No),
            (7, 3, "demo-2", Match::No),
            (7, 3, "prod", Match::No),
        ] {
            assert_eq!(one.matches(agent(id), Some(project), Some(name)), expected, "{id} {project} {name}");
        }
        assert_eq!(selector("all").matches(agent(1), None, None), Match::Yes);
    }

    #[test]
    fn what_depends_on_an_unknown_name_or_project_is_unknown() {
        for (text, project, name, expected) in [
            ("name=*", Some(1), None, Match::Unknown),
            ("project=1", None, Some("a"), Match::Unknown),
            ("project=1,name=a", Some(1), None, Match::Unknown),
            ("id=1", None, None, Match::Yes),
            // One term that does not match is enough.
            ("id=2,name=a", None, None, Match::No),
            ("project=1,name=a", Some(2), None, Match::No),
            ("project=1,name=a", None, Some("b"), Match::No),
        ] {
            assert_eq!(selector(text).matches(agent(1), project, name), expected, "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        use InvalidSelector::{Key, Name, Number, Syntax, Twice};
        for (text, error) in [
            ("", Syntax),
            ("any", Syntax),
            ("all,id=1", Syntax),
            ("id=1,", Syntax),
            ("=1", Syntax),
            ("id=", Number),
            ("id=0", Number),
            ("id=+1", Number),
            ("id=1|", Number),
            ("id=1 ", Number),
            ("project=a", Number),
            ("env=prod", Key),
            ("ID=1", Key),
            ("id=1,id=2", Twice),
            ("name=", Name),
            ("name=A", Name),
            ("name=-a*", Name),
            ("name=a-", Name),
            ("name=a*b", Name),
            ("name=-*", Name),
        ] {
            assert_eq!(text.parse::<Selector>(), Err(error), "{text:?}");
        }
        let long = format!("id=1{}", "|1".repeat(2048));
        assert_eq!(long.parse::<Selector>(), Err(InvalidSelector::TooLong));
    }

    #[test]
    fn a_selector_is_displayed_as_it_is_parsed() {
        for text in ["all", "id=7|9", "project=3,name=prod-*", "name=*"] {
            assert_eq!(selector(text).to_string(), text);
        }
    }
}
