//! Which objects a list or a watch shows.

use serde_json::Value;

use super::{answer::Problem, query::Query, shape::Kind};

/// Which objects a list or a watch shows.
pub(super) struct Filter {
    pub(super) kind: Kind,
    namespace: Option<String>,
    labels: Selector,
    fields: Selector,
}

impl Filter {
    pub(super) fn new(kind: Kind, namespace: Option<&str>, query: &Query) -> Result<Self, Problem> {
        let selector = |name: &str| {
            let text = query.get(name).map_or("", String::as_str);
            Selector::parse(text)
                .map_err(|error| Problem::bad(&format!("unable to parse {name} {text:?}: {error}")))
        };
        let fields = selector("fieldSelector")?;
        for requirement in &fields.0 {
            if !FIELDS.iter().any(|(name, _)| *name == requirement.key) {
                return Err(Problem::bad(&format!("field label not supported: {}", requirement.key)));
            }
        }
        Ok(Self { kind, namespace: namespace.map(str::to_owned), labels: selector("labelSelector")?, fields })
    }

    pub(super) fn is_everything(&self) -> bool {
        self.labels.0.is_empty() && self.fields.0.is_empty()
    }

    pub(super) fn takes(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        self.namespace.as_ref().is_none_or(|namespace| metadata["namespace"] == *namespace.as_str())
            && self.labels.takes(|key| metadata["labels"][key].as_str())
            && self.fields.takes(|key| {
                FIELDS
                    .iter()
                    .find(|(name, _)| *name == key)
                    .and_then(|(_, path)| object.pointer(path)?.as_str())
            })
    }
}

/// Fields that a `fieldSelector` may name, and where they are.
const FIELDS: [(&str, &str); 4] = [
    ("metadata.name", "/metadata/name"),
    ("metadata.namespace", "/metadata/namespace"),
    ("spec.nodeName", "/spec/nodeName"),
    ("status.phase", "/status/phase"),
];

/// Requirements that all have to hold.
#[derive(Debug, PartialEq, Eq)]
struct Selector(Vec<Requirement>);

#[derive(Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Debug, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    /// Also holds where there is no value.
    NotIn(Vec<String>),
    Exists,
    Missing,
}

impl Selector {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let mut requirements = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            // Commas within parentheses separate values.
            let mut depth = 0usize;
            let end = rest.find(|c| {
                match c {
                    '(' => depth += 1,
                    ')' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                c == ',' && depth == 0
            });
            let (part, next) = match end {
                Some(at) if rest[at + 1..].trim().is_empty() => return Err("it ends with a comma"),
                Some(at) => (&rest[..at], &rest[at + 1..]),
                None => (rest, ""),
            };
            requirements.push(Requirement::parse(part.trim())?);
            rest = next.trim();
        }
        Ok(Self(requirements))
    }

    fn takes<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|requirement| {
            let value = value(&requirement.key);
            let is_any = |values: &[String]| value.is_some_and(|value| values.iter().any(|one| one == value));
            match &requirement.test {
                Test::In(values) => is_any(values),
                Test::NotIn(values) => !is_any(values),
                Test::Exists => value.is_some(),
                Test::Missing => value.is_none(),
            }
        })
    }
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let one = |value: &str| vec![value.trim().to_owned()];
        let (key, test) = if let Some((words, values)) = text.split_once('(') {
            let values = values.strip_suffix(')').ok_or("a parenthesis is not closed")?;
            let values = values.split(',').map(|value| value.trim().to_owned()).collect();
            match words.split_whitespace().collect::<Vec<_>>()[..] {
                [key, "in"] => (key, Test::In(values)),
                [key, "notin"] => (key, Test::NotIn(values)),
                _ => return Err("expected a key and in or notin before the parenthesis"),
            }
        } else if let Some((key, value)) = text.split_once("!=") {
            (key, Test::NotIn(one(value)))
        } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (key, Test::In(one(value)))
        } else if let Some(key) = text.strip_prefix('!') {
            (key, Test::Missing)
        } else {
            (text, Test::Exists)
        };
        let key = key.trim();
        let is_key = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if key.is_empty() || !key.chars().all(is_key) {
            return Err("a key has letters, digits and -_./");
        }
        Ok(Self { key: key.to_owned(), test })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn selectors_are_read_as_kubernetes_reads_them() {
        let labels: BTreeMap<&str, &str> = [("app", "web"), ("tier", "front"), ("empty", "")].into();
        let takes = |text: &str| Selector::parse(text).unwrap().takes(|key| labels.get(key).copied());
        for (text, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web", true),
            ("app = web , tier=front", true),
            ("app=db", false),
            ("app!=db", true),
            ("missing!=db", true),
            ("app!=web", false),
            ("app in (web, db)", true),
            ("app in(db)", false),
            ("app notin (web,db),tier", false),
            ("missing notin (a),tier=front", true),
            ("app", true),
            ("missing", false),
            ("!missing", true),
            ("!app", false),
            ("empty=", true),
            ("app=", false),
        ] {
            assert_eq!(takes(text), expected, "{text}");
        }
        for text in ["app in (web", "=x", "app,", ",app", "a b", "app like (x)", "(x)", "!"] {
            assert!(Selector::parse(text).is_err(), "{text}");
        }
    }
}
