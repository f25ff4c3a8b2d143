//! A typed walk over a parsed file: one declaration per key serves for reading the value, for
//! spotting unknown keys and for writing the commented default file.
//!
//! The walk never stops at a problem: it notes it, goes on with the default, and the caller gets all
//! problems at once.

use std::{fmt, ops::RangeInclusive, path::PathBuf, time::Duration};

use serde_json::{Map, Value};

use super::duration::{self, Human};

/// What is wrong with a file, complete; displays one problem per line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    problems: Vec<Problem>,
    warnings: Vec<Warning>,
}

impl Problems {
    /// Returns `problems` if there are any.
    pub(crate) fn new(problems: Vec<Problem>) -> Option<Self> {
        (!problems.is_empty()).then_some(Self { problems, warnings: Vec::new() })
    }

    /// Adds `more` behind these.
    pub(crate) fn and(mut self, more: Self) -> Self {
        self.problems.extend(more.problems);
        self.warnings.extend(more.warnings);
        self
    }

    /// Adds warnings about the same file.
    pub(crate) fn beside(mut self, warnings: Vec<Warning>) -> Self {
        self.warnings.extend(warnings);
        self
    }

    /// What else the author of the file should know: a misspelt key is often why another one is missing.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Iterates over the problems in the order of the declared keys.
    pub fn iter(&self) -> std::slice::Iter<'_, Problem> {
        self.problems.iter()
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self { problems: vec![problem], warnings: Vec::new() }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            write!(f, "{}{problem}", if i > 0 { "\n" } else { "" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// One thing that is wrong: where, what was found and what would be right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub(crate) kind: Kind,
    pub(crate) path: String,
    pub(crate) found: String,
    pub(crate) expected: String,
}

impl Problem {
    /// Returns the dotted path of the key, or `line 3, column 1` when the file is not YAML.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: found {}; expected {}", self.path, self.found, self.expected)
    }
}

/// Which stage of 14.1's loading a problem belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Not YAML, an unknown key or another type: the protobuf JSON parser refuses it.
    Shape,
    /// A value of the right type that breaks a declared rule.
    Rule,
}

/// Something in a file that does not do what its author may think; loading goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The dotted path of the key, or the path of a file.
    pub path: String,
    /// What to know about it, in one phrase.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.text)
    }
}

/// A declared key, for the reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The dotted path.
    pub(crate) path: String,
    /// What it takes; `section` for one of those.
    pub(crate) takes: String,
    /// What it is when it is absent; `None`: nothing in particular.
    pub(crate) default: Option<String>,
    /// What it means.
    pub(crate) doc: String,
    /// Why it does nothing in this version, if it does not.
    pub(crate) inert: Option<&'static str>,
}

/// What a key takes.
#[derive(Debug, Clone)]
struct Takes {
    text: String,
    /// The default file shows an example where there is no default.
    is_example: bool,
}

/// What happens to a key that nobody declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unknown {
    /// A warning: the file may have been written for another version.
    Warns,
    /// A problem.
    Fails,
}

/// What a walk brought to light besides the values.
pub(crate) struct Report {
    /// Everything wrong, in the order in which keys are declared.
    pub(crate) problems: Vec<Problem>,
    /// Everything odd.
    pub(crate) warnings: Vec<Warning>,
    /// The default file: every declared key with its default and its description.
    pub(crate) page: String,
    /// Every declared key outside lists, in order: what the reference is made of.
    pub(crate) entries: Vec<Entry>,
    /// What the key that is declared next takes.
    takes: Option<Takes>,
    unknown: Unknown,
    /// Set inside list items: they are no part of the page, and there may be very many.
    in_items: bool,
    /// The path of every declared key outside lists.
    declared: Vec<String>,
    /// Unknown keys (section path, key), answered once all declared paths are known.
    strangers: Vec<(String, String, Option<&'static str>)>,
}

/// Walks `root` with `read`, which declares every key, and returns what it read.
pub(crate) fn walk<'v, T>(
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
        strangers: Vec::new(),
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
    report.answer_strangers();
    (value, report)
}

impl Report {
    fn problem(&mut self, kind: Kind, path: String, found: String, expected: impl Into<String>) {
        self.problems.push(Problem { kind, path, found, expected: expected.into() });
    }

    fn answer_strangers(&mut self) {
        for (section, key, sibling) in std::mem::take(&mut self.strangers) {
            let path = join(&section, &plain_key(&key));
            // A key in the wrong section is the other common slip.
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

/// How a declared key stands in this version, for warnings and for the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Off {
    /// It works.
    No,
    /// It is read and checked and does nothing, for this reason; its presence is a warning.
    Because(&'static str),
    /// Something else in this file keeps it from working, namely this; its presence is a warning. The
    /// default file shows it switched off.
    Idle(&'static str),
    /// The default file shows it switched off; or a section above it does nothing, which has been said.
    Above,
}

/// Which durations a key accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Above zero.
    Positive,
    /// Zero or above.
    NotNegative,
    /// From zero to this.
    UpTo(Duration),
    /// From one to the other, both included.
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
pub(crate) struct Section<'v, 'r> {
    report: &'r mut Report,
    path: String,
    found: Option<&'v Map<String, Value>>,
    known: Vec<&'static str>,
    depth: usize,
    off: Off,
}

impl<'v> Section<'v, '_> {
    /// Whether the file has this section.
    pub(crate) fn is_present(&self) -> bool {
        self.found.is_some()
    }

    /// Whether the section has a value for `key`; says nothing about its type.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.peek(key).is_some()
    }

    /// Whether the section has a section `key` that has a value for `inner`; says nothing about types.
    pub(crate) fn has_in(&self, key: &str, inner: &str) -> bool {
        self.peek(key).and_then(|section| section.get(inner)).is_some_and(|value| !value.is_null())
    }

    /// Like [`Section::has_in`], but for something else than the empty text.
    pub(crate) fn given_in(&self, key: &str, inner: &str) -> bool {
        self.has_in(key, inner)
            && self
                .peek(key)
                .and_then(|section| section.get(inner)?.as_str())
                .is_none_or(|text| !text.is_empty())
    }

    /// Returns the text of a key that is declared later; `None`: it has none.
    pub(crate) fn peek_text(&self, key: &str) -> Option<&'v str> {
        self.peek(key).and_then(Value::as_str)
    }

    /// Whether `key` stands in the section, also without a value.
    pub(crate) fn is_declared(&self, key: &str) -> bool {
        self.found.is_some_and(|found| found.contains_key(key))
    }

    /// Whether the section gives `key` as something else than the empty text.
    pub(crate) fn given(&self, key: &str) -> bool {
        self.peek(key).is_some_and(|value| value.as_str() != Some(""))
    }

    /// Whether `key`, or something in it, has a problem already: one slip is told once.
    pub(crate) fn is_refused(&self, key: &str) -> bool {
        let path = join(&self.path, key);
        let inside = |p: &Problem| {
            p.path.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('['))
        };
        self.report.problems.iter().any(inside)
    }

    /// Notes that the value of `key` breaks a rule.
    pub(crate) fn refuse(&mut self, key: &str, expected: impl Into<String>) {
        let found = self.peek(key).map_or_else(|| "nothing".to_owned(), |value| shown(key, value));
        self.refuse_as(key, found, expected);
    }

    /// Like [`Section::refuse`], with words for what was found.
    pub(crate) fn refuse_as(&mut self, key: &str, found: impl Into<String>, expected: impl Into<String>) {
        self.report.problem(Kind::Rule, join(&self.path, key), found.into(), expected);
    }

    /// Notes something odd about `key`.
    pub(crate) fn warn(&mut self, key: &str, text: impl Into<String>) {
        let path = join(&self.path, key);
        self.report.warnings.push(Warning { path, text: text.into() });
    }

    /// Declares by `read` one key that does nothing in this version: it is checked all the same, and
    /// its presence is a warning that gives `reason`.
    pub(crate) fn inert<T>(&mut self, reason: &'static str, read: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.off;
        if before == Off::No {
            self.off = Off::Because(reason);
        }
        let value = read(self);
        self.off = before;
        value
    }

    /// Declares by `read` what the default file shows switched off. With a reason in `idle` it does
    /// nothing in this file: it is checked all the same, and its presence is a warning.
    pub(crate) fn optional<T>(&mut self, idle: Option<&'static str>, read: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.off;
        if before == Off::No {
            self.off = idle.map_or(Off::Above, Off::Idle);
        }
        let value = read(self);
        self.off = before;
        value
    }

    /// Declares a section; `read` declares its keys, and runs also when the file has none.
    pub(crate) fn section<T>(
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

    /// Declares a list of sections; each is read by `read`, which gets its position.
    pub(crate) fn items<T>(
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

    /// Declares a text; absent or empty means `default`.
    pub(crate) fn text(&mut self, key: &'static str, default: &str, doc: &str) -> String {
        self.takes("text");
        self.print_key(key, Some(&quoted(default)), doc);
        self.any_text(key).unwrap_or_else(|| default.to_owned())
    }

    /// Declares a text that must be given whenever its section is; `example` is for the page.
    pub(crate) fn required(&mut self, key: &'static str, example: &str, expected: &str, doc: &str) -> String {
        self.takes_example("text");
        self.print_key(key, Some(&quoted(example)), doc);
        match self.any_text(key) {
            Some(text) => text,
            None => {
                // A value of another type has its problem already.
                if self.is_present() && self.peek(key).is_none_or(Value::is_string) {
                    self.refuse(key, expected);
                }
                String::new()
            }
        }
    }

    /// Declares a text for which absent or empty is `None`; `example` is for the page.
    pub(crate) fn optional_text(&mut self, key: &'static str, example: &str, doc: &str) -> Option<String> {
        self.takes_example("text");
        self.print_key(key, Some(&quoted(example)), doc);
        self.any_text(key)
    }

    /// Declares a text or a number, and returns either as a text; absent or empty is `None`.
    pub(crate) fn text_or_number(&mut self, key: &'static str, example: &str, doc: &str) -> Option<String> {
        self.takes_example("text or number");
        self.print_key(key, Some(example), doc);
        match self.take(key)? {
            Value::String(text) => (!text.is_empty()).then(|| text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => {
                self.wrong(key, "a text or a number");
                None
            }
        }
    }

    /// Declares the path of a file or folder; absent or empty is `None`.
    pub(crate) fn path(&mut self, key: &'static str, doc: &str) -> Option<PathBuf> {
        self.takes_example("path");
        self.optional_text(key, "", doc).map(PathBuf::from)
    }

    /// Declares a path that must be given whenever its section is.
    pub(crate) fn required_path(&mut self, key: &'static str, example: &str, doc: &str) -> PathBuf {
        self.takes_example("path");
        self.required(key, example, "the path of a file", doc).into()
    }

    /// Declares a list of texts, none of them empty; absent or empty means `default`.
    pub(crate) fn texts(&mut self, key: &'static str, default: &[&str], doc: &str) -> Vec<String> {
        self.takes("list of texts");
        self.print_key(key, Some(&format!("[{}]", default.join(", "))), doc);
        let texts = self.any_texts(key);
        if texts.is_empty() { default.iter().map(|&text| text.to_owned()).collect() } else { texts }
    }

    /// Declares a list of at least one text whenever its section is there; `example` is for the page.
    pub(crate) fn required_texts(
        &mut self,
        key: &'static str,
        example: &[&str],
        expected: &str,
        doc: &str,
    ) -> Vec<String> {
        self.takes_example("list of texts");
        self.print_key(key, Some(&format!("[{}]", example.join(", "))), doc);
        let texts = self.any_texts(key);
        if texts.is_empty() && self.is_present() && !self.is_refused(key) {
            self.refuse(key, expected);
        }
        texts
    }

    fn any_texts(&mut self, key: &'static str) -> Vec<String> {
        let mut texts = Vec::new();
        match self.take(key) {
            None => {}
            Some(Value::Array(list)) => {
                for (i, item) in list.iter().enumerate() {
                    match item {
                        Value::String(text) if !text.is_empty() => texts.push(text.clone()),
                        other => {
                            let path = format!("{}[{i}]", join(&self.path, key));
                            self.report.problem(
                                Kind::Shape,
                                path,
                                shown(key, other),
                                "a text that is not empty",
                            );
                        }
                    }
                }
            }
            Some(_) => self.wrong(key, "a list of texts"),
        }
        texts
    }

    /// Declares a whole number without sign; absent or 0 means `default`, as in 14.1.
    pub(crate) fn number(&mut self, key: &'static str, default: u32, doc: &str) -> u32 {
        self.takes("whole number");
        self.print_key(key, Some(&default.to_string()), doc);
        match self.take(key) {
            None => default,
            Some(value) => match whole(value).and_then(|n| u32::try_from(n).ok()) {
                Some(0) => default,
                Some(number) => number,
                None => {
                    self.wrong(key, "a whole number from 0 to 4294967295 (0 means the default)");
                    default
                }
            },
        }
    }

    /// Declares a whole number within `range`; absent or 0 means `default`.
    pub(crate) fn number_within(
        &mut self,
        key: &'static str,
        default: u32,
        range: RangeInclusive<u32>,
        doc: &str,
    ) -> u32 {
        let (least, most) = (*range.start(), *range.end());
        let takes = format!("whole number from {least} to {most}");
        self.takes(takes.clone());
        self.print_key(key, Some(&default.to_string()), doc);
        match self.take(key) {
            None => default,
            Some(value) => match whole(value) {
                Some(0) => default,
                Some(number) => match u32::try_from(number).ok().filter(|number| range.contains(number)) {
                    Some(number) => number,
                    None => {
                        self.refuse(key, format!("a {takes} (0 means the default)"));
                        default
                    }
                },
                None => {
                    self.wrong(key, format!("a {takes} (0 means the default)"));
                    default
                }
            },
        }
    }

    /// Declares a whole number within `range` that has no default.
    pub(crate) fn id(&mut self, key: &'static str, range: RangeInclusive<i64>) -> Option<i64> {
        let number = self.take(key).and_then(whole).filter(|n| range.contains(n));
        if number.is_none() {
            self.refuse(key, format!("a whole number from {} to {}", range.start(), range.end()));
        }
        number
    }

    /// Declares a number that is not negative; absent or 0 means `default`, as in 14.1.
    pub(crate) fn real(&mut self, key: &'static str, default: f64, doc: &str) -> f64 {
        self.takes("number");
        self.print_key(key, Some(&format!("{default:?}")), doc);
        match self.take(key) {
            None => default,
            Some(Value::Number(number)) => match number.as_f64() {
                Some(0.0) => default,
                Some(number) if number > 0.0 => number,
                _ => {
                    self.refuse(key, "a number that is not negative (0 means the default)");
                    default
                }
            },
            Some(_) => {
                self.wrong(key, "a number that is not negative (0 means the default)");
                default
            }
        }
    }

    /// Declares a switch that is off when absent.
    pub(crate) fn flag(&mut self, key: &'static str, doc: &str) -> bool {
        self.takes("true or false");
        self.print_key(key, Some("false"), doc);
        self.optional_flag(key).unwrap_or_default()
    }

    /// Declares a switch for which absent is a third value; no part of the page.
    pub(crate) fn optional_flag(&mut self, key: &'static str) -> Option<bool> {
        match self.take(key)? {
            Value::Bool(flag) => Some(*flag),
            _ => {
                self.wrong(key, "true or false");
                None
            }
        }
    }

    /// Declares a duration; only absent means `default`, as in 14.1.
    pub(crate) fn duration(
        &mut self,
        key: &'static str,
        default: Duration,
        rule: Rule,
        doc: &str,
    ) -> Duration {
        self.takes(format!("duration {rule}"));
        self.print_key(key, Some(&Human(default).to_string()), doc);
        self.any_duration(key, default, rule).unwrap_or(default)
    }

    /// Declares a duration for which absent is a value of its own; `example` is for the page.
    pub(crate) fn optional_duration(
        &mut self,
        key: &'static str,
        example: Duration,
        rule: Rule,
        doc: &str,
    ) -> Option<Duration> {
        let before = std::mem::replace(&mut self.off, Off::Above);
        self.takes_example(format!("duration {rule}"));
        self.print_key(key, Some(&Human(example).to_string()), doc);
        self.off = before;
        self.any_duration(key, example, rule)
    }

    /// Declares a duration in protobuf's form alone, without a rule; no part of the page.
    pub(crate) fn proto_duration(&mut self, key: &'static str) -> Option<duration::Signed> {
        let value = self.take(key)?;
        let parsed = value.as_str().and_then(duration::parse_proto);
        if parsed.is_none() {
            self.wrong(key, "seconds with the unit `s`, such as 20s or 1.5s");
        }
        parsed
    }

    /// Declares a protobuf enum, given by name or number; absent is the first, which is the default.
    pub(crate) fn one_of<T: Copy + Default>(
        &mut self,
        key: &'static str,
        names: &[(&str, T)],
        doc: &str,
    ) -> T {
        let list = names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        self.takes(names.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", "));
        self.print_key(key, names.first().map(|(name, _)| *name), &format!("{doc} One of {list}."));
        let Some(value) = self.take(key) else { return T::default() };
        let chosen = match value {
            Value::String(text) => names.iter().find(|(name, _)| name == text),
            other => whole(other).and_then(|n| usize::try_from(n).ok()).and_then(|n| names.get(n)),
        };
        if chosen.is_none() {
            self.wrong(key, format!("one of {list}"));
        }
        chosen.map(|(_, value)| *value).unwrap_or_default()
    }

    /// Writes lines of prose into the page.
    pub(crate) fn prose(&mut self, text: &str) {
        for line in text.lines() {
            self.print(format!("# {line}").trim_end());
        }
    }

    /// Writes an empty line into the page.
    pub(crate) fn blank(&mut self) {
        self.print("");
    }

    fn any_duration(&mut self, key: &'static str, example: Duration, rule: Rule) -> Option<Duration> {
        let value = self.take(key)?;
        let example = Human(example);
        let Some(parsed) = value.as_str().and_then(duration::parse) else {
            self.wrong(key, format!("a duration with its unit, such as {example}"));
            return None;
        };
        let (holds, expected) = match rule {
            Rule::Positive => (
                !parsed.negative && !parsed.size.is_zero(),
                format!("a duration above zero, such as {example}"),
            ),
            Rule::NotNegative => (!parsed.negative, format!("a duration of zero or more, such as {example}")),
            Rule::UpTo(most) => {
                (!parsed.negative && parsed.size <= most, format!("a duration from 0s to {}", Human(most)))
            }
            Rule::Within(least, most) => (
                !parsed.negative && (least..=most).contains(&parsed.size),
                format!("a duration from {} to {}", Human(least), Human(most)),
            ),
        };
        if !holds {
            self.refuse(key, expected);
        }
        holds.then_some(parsed.size)
    }

    /// Returns a text that is not empty; empty and absent are one in proto3.
    fn any_text(&mut self, key: &'static str) -> Option<String> {
        match self.take(key)? {
            Value::String(text) => (!text.is_empty()).then(|| text.clone()),
            _ => {
                self.wrong(key, "a text (put it in quotes if it looks like a number)");
                None
            }
        }
    }

    /// Notes a value of the wrong type.
    fn wrong(&mut self, key: &str, expected: impl Into<String>) {
        let found = self.peek(key).map_or_else(|| "nothing".to_owned(), |value| shown(key, value));
        self.report.problem(Kind::Shape, join(&self.path, key), found, expected);
    }

    fn peek(&self, key: &str) -> Option<&'v Value> {
        // `null` is "not set" to the protobuf JSON parser too.
        self.found?.get(key).filter(|value| !value.is_null())
    }

    /// Marks `key` as known, warns if it does nothing, and returns its value.
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

    /// Collects the keys that nobody declared.
    fn finish(self) {
        let Some(found) = self.found else { return };
        for key in found.keys().filter(|key| !self.known.contains(&key.as_str())) {
            let near = nearest(key, &self.known);
            self.report.strangers.push((self.path.clone(), key.clone(), near));
        }
    }

    /// Says what the key that is declared next takes, for the reference, unless that has been said more exactly.
    fn takes(&mut self, text: impl Into<String>) {
        let takes = Takes { text: text.into(), is_example: false };
        self.report.takes.get_or_insert(takes);
    }

    /// As [`takes`](Self::takes), when what the default file shows is an example and no default.
    fn takes_example(&mut self, text: impl Into<String>) {
        let takes = Takes { text: text.into(), is_example: true };
        self.report.takes.get_or_insert(takes);
    }

    fn print_key(&mut self, key: &str, default: Option<&str>, doc: &str) {
        let takes = self.report.takes.take();
        if self.report.in_items {
            return;
        }
        self.report.entries.push(Entry {
            path: join(&self.path, key),
            default: default
                .filter(|default| !default.is_empty() && *default != "\"\"" && *default != "[]")
                .filter(|_| takes.as_ref().is_none_or(|takes| !takes.is_example))
                .map(str::to_owned),
            takes: takes.map_or_else(|| "a value".to_owned(), |takes| takes.text),
            doc: doc.trim().to_owned(),
            inert: match self.off {
                Off::Because(reason) => Some(reason),
                Off::No | Off::Idle(_) | Off::Above => None,
            },
        });
        let doc = match self.off {
            Off::Because(reason) => format!("{doc} No effect in this version: {reason}."),
            _ => doc.to_owned(),
        };
        for line in wrapped(doc.trim(), 96 - 2 * self.depth) {
            self.print(&format!("# {line}"));
        }
        // `#key` is a setting, `# text` is prose: removing one `#` switches the setting on.
        let mark = if self.off == Off::No { "" } else { "#" };
        self.print(&match default {
            Some(default) => format!("{mark}{key}: {default}"),
            None => format!("{mark}{key}:"),
        });
    }

    fn print(&mut self, line: &str) {
        if self.report.in_items {
            return;
        }
        if !line.is_empty() {
            self.report.page.push_str(&"  ".repeat(self.depth));
        }
        self.report.page.push_str(line);
        self.report.page.push('\n');
    }
}

/// Returns a whole number, which protobuf JSON also reads from `1e2`, `100.0` and `"100"`.
fn whole(value: &Value) -> Option<i64> {
    // The bound of exact whole numbers in a double; also keeps the conversion below defined.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) => number.as_i64().or_else(|| {
            let real = number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() <= EXACT)?;
            #[expect(clippy::cast_possible_truncation, reason = "whole and within the exact range")]
            let whole = real as i64;
            Some(whole)
        }),
        // No sign and no spaces, which `parse` would partly accept.
        Value::String(text) if text.starts_with(|c: char| c.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    }
}

/// Joins a section's path and a key.
pub(crate) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// Shows a value in a message: short, on one line, and never one that could be a secret.
pub(crate) fn shown(key: &str, value: &Value) -> String {
    match value {
        Value::Object(_) => "a section".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Null => "nothing".to_owned(),
        _ if is_secret(key) => "a value (not shown)".to_owned(),
        Value::String(text) if text.contains("://") && text.contains('@') => "a value (not shown)".to_owned(),
        Value::String(text) if text.contains("PRIVATE KEY") => "a value (not shown)".to_owned(),
        Value::String(text) => format!("\"{}\"", shortened(text)),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

/// Shows a key of the file in a message.
pub(crate) fn plain_key(key: &str) -> String {
    if !key.is_empty()
        && key.len() <= 64
        && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-/$".contains(c))
    {
        key.to_owned()
    } else {
        format!("\"{}\"", shortened(key))
    }
}

fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    shown
}

/// Whether a key's name says that its value, or a slip of the pen in it, is a secret.
fn is_secret(key: &str) -> bool {
    const WORDS: [&str; 9] =
        ["secret", "secrets", "password", "token", "tokens", "credential", "credentials", "dsn", "key"];
    // Limits are numbers "per token", and a key prefix is part of a name.
    key == "connection_string"
        || (!key.contains("per_token")
            && key != "key_prefix"
            && key.split('_').any(|word| WORDS.contains(&word)))
}

/// Returns the known name that `key` is most likely a slip of.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    if key.len() > 64 {
        return None;
    }
    // 14.1's names are snake case; newer tools and people write other cases.
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

/// Writes a text as a YAML scalar.
fn quoted(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_/.".contains(c));
    if plain { text.to_owned() } else { format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")) }
}

/// Breaks a text into lines of at most `width` characters where words allow.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn secrets_and_containers_are_never_shown() {
        for key in
            ["authentication_secret_file", "password_file", "tokens", "dsn", "key_file", "connection_string"]
        {
            assert_eq!(shown(key, &json!("hunter2")), "a value (not shown)", "{key}");
            assert_eq!(shown(key, &json!(12345)), "a value (not shown)", "{key}");
        }
        assert_eq!(shown("address", &json!("https://user:hunter2@host")), "a value (not shown)");
        assert_eq!(shown("address", &json!({"password": "hunter2"})), "a section");
        assert_eq!(shown("address", &json!(["hunter2"])), "a list");
        assert_eq!(shown("connections_per_token_per_minute", &json!("many")), "\"many\"");
        assert_eq!(shown("max_connection_age", &json!("soon")), "\"soon\"");
    }

    #[test]
    fn long_and_odd_values_are_shown_short_and_on_one_line() {
        assert_eq!(shown("a", &json!("x\ny")), "\"x\\ny\"");
        assert_eq!(shown("a", &json!("é".repeat(100))).chars().count(), 60 + 3);
        assert_eq!(plain_key("a\u{1b}[31m"), "\"a\\u{1b}[31m\"");
    }

    #[test]
    fn the_nearest_name_is_found_in_other_cases_and_after_typing_errors() {
        let known = ["max_connection_age", "address", "network"];
        assert_eq!(nearest("maxConnectionAge", &known), Some("max_connection_age"));
        assert_eq!(nearest("max-connection-age", &known), Some("max_connection_age"));
        assert_eq!(nearest("adress", &known), Some("address"));
        assert_eq!(nearest("netwrok", &known), Some("network"));
        assert_eq!(nearest("color", &known), None);
    }

    #[test]
    fn whole_numbers_are_read_as_protobuf_json_does() {
        for (value, number) in [
            (json!(5), Some(5)),
            (json!(5.0), Some(5)),
            (json!(1e2), Some(100)),
            (json!("7"), Some(7)),
            (json!(5.5), None),
            (json!("+7"), None),
            (json!(""), None),
            (json!(1e300), None),
            (json!(true), None),
        ] {
            assert_eq!(whole(&value), number, "{value}");
        }
    }
}
