//! The label selector of a request: `app=web,tier!=cache,env in (a,b),!legacy`.

use std::{collections::BTreeSet, str::FromStr};

/// The longest selector, in bytes.
const LONGEST: usize = 4 * 1024;
/// The most terms of a selector. Each is looked for among the labels of each row.
const MOST_TERMS: usize = 32;

/// A label selector, as kubectl writes it. The empty text selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels(Vec<Term>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    key: String,
    test: Test,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    Exists,
    Missing,
    In(BTreeSet<String>),
    /// Also without the label, as in Kubernetes.
    NotIn(BTreeSet<String>),
}

/// Why a text is not a label selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0}: expected terms such as app=web, tier!=cache, env in (a,b), env notin (c), app and !app, joined by commas"
)]
pub struct InvalidLabels(String);

impl Labels {
    /// Whether it selects everything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it selects an object with these labels: `key=value`, joined by commas.
    pub fn matches(&self, labels: &str) -> bool {
        let value = |key: &str| {
            let all = labels.split(',').filter_map(|label| label.split_once('='));
            all.into_iter().find_map(|(name, value)| (name == key).then_some(value))
        };
        self.0.iter().all(|term| match (&term.test, value(&term.key)) {
            (Test::Exists, value) => value.is_some(),
            (Test::Missing, value) => value.is_none(),
            (Test::In(values), Some(value)) => values.contains(value),
            (Test::In(_), None) => false,
            (Test::NotIn(values), Some(value)) => !values.contains(value),
            (Test::NotIn(_), None) => true,
        })
    }
}

/// Splits at commas that are not in parentheses.
fn terms(text: &str) -> Vec<&str> {
    let (mut terms, mut start, mut depth) = (Vec::new(), 0, 0_i32);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            b',' if depth <= 0 => {
                terms.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    terms.push(&text[start..]);
    terms
}

fn is_key(key: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/');
    !key.is_empty() && key.len() <= 317 && key.bytes().all(legal)
}

fn is_value(value: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    value.len() <= 63 && value.bytes().all(legal)
}

fn term(text: &str) -> Option<Term> {
    let text = text.trim();
    let (key, test) = if let Some((key, value)) = text.split_once("!=") {
        (key, Test::NotIn([value.trim().to_owned()].into()))
    } else if let Some((key, value)) = text.split_once('=') {
        (key, Test::In([value.strip_prefix('=').unwrap_or(value).trim().to_owned()].into()))
    } else if let Some(key) = text.strip_prefix('!') {
        (key, Test::Missing)
    } else if let Some((head, values)) = text.split_once('(') {
        let values = values.strip_suffix(')')?;
        let values: BTreeSet<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        match head.trim().split_once(char::is_whitespace) {
            Some((key, word)) if word.trim() == "in" => (key, Test::In(values)),
            Some((key, word)) if word.trim() == "notin" => (key, Test::NotIn(values)),
            _ => return None,
        }
    } else {
        (text, Test::Exists)
    };
    let key = key.trim();
    let values_are_legal = match &test {
        Test::In(values) | Test::NotIn(values) => values.iter().all(|value| is_value(value)),
        Test::Exists | Test::Missing => true,
    };
    (is_key(key) && values_are_legal).then(|| Term { key: key.to_owned(), test })
}

impl FromStr for Labels {
    type Err = InvalidLabels;

    fn from_str(text: &str) -> Result<Self, InvalidLabels> {
        if text.len() > LONGEST {
            return Err(InvalidLabels(format!("{} bytes, and {LONGEST} are allowed", text.len())));
        }
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let terms = terms(text);
        if terms.len() > MOST_TERMS {
            return Err(InvalidLabels(format!("{} terms, and {MOST_TERMS} are allowed", terms.len())));
        }
        let all = terms.into_iter().map(|part| term(part).ok_or_else(|| InvalidLabels(format!("{part:?}"))));
        Ok(Self(all.collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_select_as_those_of_kubernetes() {
        let labels = "app=web,app.kubernetes.io/name=x,env=a";
        for (selector, selects) in [
            ("", true),
            ("app=web", true),
            ("app == web, env=a", true),
            ("app=", false),
            ("app!=web", false),
            ("tier!=cache", true),
            ("app", true),
            ("!app", false),
            ("!tier", true),
            ("env in (a, b),app", true),
            ("env in (b)", false),
            ("env notin (a,b)", false),
            ("tier notin (a)", true),
            ("app.kubernetes.io/name=x", true),
        ] {
            assert_eq!(selector.parse::<Labels>().unwrap().matches(labels), selects, "{selector}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let long = format!("a={}", "x".repeat(LONGEST));
        for wrong in [",", "a=b,", "a in b", "a in (b", "a of (b)", "=b", "a=b c", "a>1", "!", "ä", &long] {
            assert!(wrong.parse::<Labels>().is_err(), "{wrong}");
        }
        let many = |count: usize| vec!["!a"; count].join(",").parse::<Labels>();
        assert!(many(32).unwrap().matches("b=c"));
        let error = many(33).unwrap_err().to_string();
        assert!(error.starts_with("33 terms, and 32 are allowed: expected terms"), "{error}");
    }
}
