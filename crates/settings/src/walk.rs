//! A typed walk over a parsed file. One declaration per key serves to read the value, to detect unknown keys
//! and to write the commented default file.
//!
//! The walk does not stop at a problem: it records it and continues with the default, so the caller gets all
//! problems at once.

mod page;
mod values;

use std::{fmt, time::Duration};

use serde_json::{Map, Value};

use crate::{
    Kind, Problem, Warning,
    duration::Human,
    show::{plain_key, shown},
};

/// A declared key, for the reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The dotted path.
    pub path: String,
    /// The type of its value; `section` for a section.
    pub takes: String,
    /// The default; `None` if there is none in particular.
    pub default: Option<String>,
    /// The description.
    pub doc: String,
    /// Why the key has no effect in this version; `None` if it has one.
    pub inert: Option<&'static str>,
}

/// What a key takes.
#[derive(Debug, Clone)]
struct Takes {
    text: String,
    /// The default file shows an example, because there is no default.
    is_example: bool,
}

/// How an undeclared key is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// As a warning: the file may have been written for another version.
    Warns,
    /// As a problem.
    Fails,
}

/// What a walk returns besides the values.
pub struct Report {
    /// All problems, in the order in which keys are declared.
    pub problems: Vec<Problem>,
    /// All warnings.
    pub warnings: Vec<Warning>,
    /// The default file: every declared key with its default and description.
    pub page: String,
    /// Every declared key outside lists, in order, for the reference.
    pub entries: Vec<Entry>,
    /// What the next declared key takes.
    takes: Option<Takes>,
    unknown: Unknown,
    /// Set inside list items: they are not in the default file, and there may be very many.
    in_items: bool,
    /// The path of every declared key outside lists.
    declared: Vec<String>,
    /// Unknown keys (section path, key, most similar key of the section). They are reported once all declared
    /// paths are known.
    undeclared: Vec<(String, String, Option<&'static str>)>,
}

/// Walks `root` with `read`, which declares every key, and returns what `read` returned.
pub fn walk<'v, T>(
    root: &'v Value,
    unknown: Unknown,
    read: impl FnOnce(&mut Section<'v, '_>) -> T,
) -> (T, Report) {
    let mut report = Report {
        problems: Vec::new(),
        warnings: Vec::new(),
        page: String::new(),
        entries: Vec::new(),
        takes: None,
        unknown,
        in_items: false,
        declared: Vec::new(),
        undeclared: Vec::new(),
    };
    let found = match root {
        Value::Object(map) => Some(map),
        Value::Null => None,
        other => {
            report.problem(Kind::Shape, "file".to_owned(), shown("", other), "a mapping of sections");
            None
        }
    };
    let mut section = Section {
        report: &mut report,
        path: String::new(),
        found,
        known: Vec::new(),
        depth: 0,
        off: Off::No,
    };
    let value = read(&mut section);
    section.finish();
    report.report_undeclared();
    (value, report)
}

impl Report {
    fn problem(&mut self, kind: Kind, path: String, found: String, expected: impl Into<String>) {
        self.problems.push(Problem::new(kind, path, found, expected));
    }

    fn report_undeclared(&mut self) {
        for (section, key, sibling) in std::mem::take(&mut self.undeclared) {
            let path = join(&section, &plain_key(&key));
            // A key in the wrong section is the other common mistake.
            let elsewhere = || {
                let end = format!(".{key}");
                let mut same = self.declared.iter().filter(|d| d.ends_with(&end) || **d == key);
                same.next().filter(|_| same.next().is_none()).cloned()
            };
            let near = sibling.map(|s| join(&section, s)).or_else(elsewhere);
            match (self.unknown, near) {
                (Unknown::Warns, Some(near)) => self
                    .warnings
                    .push(Warning { path, text: format!("unknown key, ignored; did you mean `{near}`?") }),
                (Unknown::Warns, None) => {
                    self.warnings.push(Warning { path, text: "unknown key, ignored".to_owned() });
                }
                (Unknown::Fails, Some(near)) => {
                    self.problem(Kind::Shape, path, "an unknown key".to_owned(), format!("`{near}`"));
                }
                (Unknown::Fails, None) => {
                    self.problem(Kind::Shape, path, "an unknown key".to_owned(), "no such key: remove it");
                }
            }
        }
    }
}

/// Whether a declared key has an effect in this version, for warnings and for the default file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Off {
    /// It has an effect.
    No,
    /// It is read and checked but has no effect, for this reason. If it is present, there is a warning.
    Because(&'static str),
    /// Another key of this file disables it, for this reason. If it is present, there is a warning. The
    /// default file shows it commented out.
    Idle(&'static str),
    /// The default file shows it commented out, or a section above it has no effect, which is already
    /// reported.
    Above,
}

/// Which durations a key accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Above zero.
    Positive,
    /// Zero or above.
    NotNegative,
    /// From zero to this.
    UpTo(Duration),
    /// From the first to the second, both included.
    Within(Duration, Duration),
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Positive => f.write_str("above 0s"),
            Self::NotNegative => f.write_str("of 0s or more"),
            Self::UpTo(most) => write!(f, "from 0s to {}", Human(*most)),
            Self::Within(least, most) => write!(f, "from {} to {}", Human(*least), Human(*most)),
        }
    }
}

/// One mapping of the file, present or not.
pub struct Section<'v, 'r> {
    report: &'r mut Report,
    path: String,
    found: Option<&'v Map<String, Value>>,
    known: Vec<&'static str>,
    depth: usize,
    off: Off,
}

impl<'v> Section<'v, '_> {
    /// Whether the file has this section.
    pub fn is_present(&self) -> bool {
        self.found.is_some()
    }

    /// Whether the section has a value for `key`, of any type.
    pub fn has(&self, key: &str) -> bool {
        self.peek(key).is_some()
    }

    /// Whether the section has a section `key` that has a value for `inner`, of any type.
    pub fn has_in(&self, key: &str, inner: &str) -> bool {
        self.peek(key).and_then(|section| section.get(inner)).is_some_and(|value| !value.is_null())
    }

    /// Like [`Section::has_in`], but the empty text does not count.
    pub fn given_in(&self, key: &str, inner: &str) -> bool {
        self.has_in(key, inner)
            && self
                .peek(key)
                .and_then(|section| section.get(inner)?.as_str())
                .is_none_or(|text| !text.is_empty())
    }

    /// Returns the text of a key that is declared later, if it has one.
    pub fn peek_text(&self, key: &str) -> Option<&'v str> {
        self.peek(key).and_then(Value::as_str)
    }

    /// Whether the section contains `key`, with or without a value.
    pub fn is_declared(&self, key: &str) -> bool {
        self.found.is_some_and(|found| found.contains_key(key))
    }

    /// Whether the section has a value for `key` other than the empty text.
    pub fn given(&self, key: &str) -> bool {
        self.peek(key).is_some_and(|value| value.as_str() != Some(""))
    }

    /// Whether `key`, or a key below it, already has a problem: one mistake is reported once.
    pub fn is_refused(&self, key: &str) -> bool {
        let path = join(&self.path, key);
        let inside = |p: &Problem| {
            p.path().strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('['))
        };
        self.report.problems.iter().any(inside)
    }

    /// Records that the value of `key` breaks a rule.
    pub fn refuse(&mut self, key: &str, expected: impl Into<String>) {
        let found = self.peek(key).map_or_else(|| "nothing".to_owned(), |value| shown(key, value));
        self.refuse_as(key, found, expected);
    }

    /// Like [`Section::refuse`], with a text for what was found.
    pub fn refuse_as(&mut self, key: &str, found: impl Into<String>, expected: impl Into<String>) {
        self.report.problem(Kind::Rule, join(&self.path, key), found.into(), expected);
    }

    /// Records a warning about `key`.
    pub fn warn(&mut self, key: &str, text: impl Into<String>) {
        let path = join(&self.path, key);
        self.report.warnings.push(Warning { path, text: text.into() });
    }

    /// Declares with `read` keys that have no effect in this version. They are checked all the same, and if
    /// one is present, there is a warning with `reason`.
    pub fn inert<T>(&mut self, reason: &'static str, read: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.off;
        if before == Off::No {
            self.off = Off::Because(reason);
        }
        let value = read(self);
        self.off = before;
        value
    }

    /// Declares with `read` keys that the default file shows commented out. If `idle` gives a reason, they
    /// have no effect in this file: they are checked all the same, and if one is present, there is a warning.
    pub fn optional<T>(&mut self, idle: Option<&'static str>, read: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.off;
        if before == Off::No {
            self.off = idle.map_or(Off::Above, Off::Idle);
        }
        let value = read(self);
        self.off = before;
        value
    }

    /// Declares a section. `read` declares its keys; it also runs if the file does not have the section.
    pub fn section<T>(
        &mut self,
        key: &'static str,
        doc: &str,
        read: impl FnOnce(&mut Section<'v, '_>) -> T,
    ) -> T {
        let found = match self.take(key) {
            None => None,
            Some(Value::Object(map)) => Some(map),
            Some(_) => {
                self.wrong(key, "a section: indented keys with their values");
                None
            }
        };
        if self.depth == 0 {
            self.blank();
        }
        self.takes("section");
        let off = if self.off == Off::No { Off::No } else { Off::Above };
        self.print_key(key, None, doc);
        let mut child = Section {
            path: join(&self.path, key),
            report: self.report,
            found,
            known: Vec::new(),
            depth: self.depth + 1,
            off,
        };
        let value = read(&mut child);
        child.finish();
        value
    }

    /// Declares a list of sections. Each is read by `read`, which gets its index.
    pub fn items<T>(
        &mut self,
        key: &'static str,
        doc: &str,
        mut read: impl FnMut(&mut Section<'v, '_>, usize) -> T,
    ) -> Vec<T> {
        let list = match self.take(key) {
            None => &[],
            Some(Value::Array(list)) => list.as_slice(),
            Some(_) => {
                self.wrong(key, "a list of sections, each beginning with `- `");
                &[]
            }
        };
        self.takes("list of sections");
        self.print_key(key, Some("[]"), doc);
        let before = std::mem::replace(&mut self.report.in_items, true);
        let path = join(&self.path, key);
        let mut values = Vec::with_capacity(list.len());
        for (i, item) in list.iter().enumerate() {
            let path = format!("{path}[{i}]");
            let found = match item {
                Value::Object(map) => Some(map),
                other => {
                    let expected = "a section: indented keys with their values";
                    self.report.problem(Kind::Shape, path, shown(key, other), expected);
                    continue;
                }
            };
            let mut child = Section {
                path,
                report: self.report,
                found,
                known: Vec::new(),
                depth: self.depth + 1,
                off: Off::Above,
            };
            values.push(read(&mut child, i));
            child.finish();
        }
        self.report.in_items = before;
        values
    }

    /// Records a value of the wrong type.
    fn wrong(&mut self, key: &str, expected: impl Into<String>) {
        let found = self.peek(key).map_or_else(|| "nothing".to_owned(), |value| shown(key, value));
        self.report.problem(Kind::Shape, join(&self.path, key), found, expected);
    }

    fn peek(&self, key: &str) -> Option<&'v Value> {
        // The protobuf JSON parser also treats `null` as "not set".
        self.found?.get(key).filter(|value| !value.is_null())
    }

    /// Marks `key` as known, warns if it has no effect, and returns its value.
    fn take(&mut self, key: &'static str) -> Option<&'v Value> {
        self.known.push(key);
        if !self.report.in_items {
            self.report.declared.push(join(&self.path, key));
        }
        let value = self.peek(key)?;
        match self.off {
            Off::Because(reason) => self.warn(key, format!("has no effect in this version: {reason}")),
            Off::Idle(reason) => self.warn(key, format!("has no effect: {reason}")),
            Off::No | Off::Above => {}
        }
        Some(value)
    }

    /// Collects the undeclared keys.
    fn finish(self) {
        let Some(found) = self.found else { return };
        for key in found.keys().filter(|key| !self.known.contains(&key.as_str())) {
            let near = nearest(key, &self.known);
            self.report.undeclared.push((self.path.clone(), key.clone(), near));
        }
    }
}

/// Joins the path of a section and a key.
pub fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// Returns the known name that `key` is most likely meant to be.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    if key.len() > 64 {
        return None;
    }
    // The names of 14.1 are in snake case; other tools use other cases.
    let mut plain = String::new();
    for c in key.chars() {
        if c.is_uppercase() && !plain.is_empty() && !plain.ends_with('_') {
            plain.push('_');
        }
        plain.extend(if c == '-' { '_' } else { c }.to_lowercase());
    }
    known
        .iter()
        .map(|&name| (strsim::osa_distance(&plain, name), name))
        .filter(|(distance, name)| *distance <= (name.len() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_name_is_found_despite_case_and_typing_errors() {
        let known = ["max_connection_age", "address", "network"];
        assert_eq!(nearest("maxConnectionAge", &known), Some("max_connection_age"));
        assert_eq!(nearest("max-connection-age", &known), Some("max_connection_age"));
        assert_eq!(nearest("adress", &known), Some("address"));
        assert_eq!(nearest("netwrok", &known), Some("network"));
        assert_eq!(nearest("color", &known), None);
    }
}
