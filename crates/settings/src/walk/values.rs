//! Declarations of keys with a value, by type.

use std::{ops::RangeInclusive, path::PathBuf, time::Duration};

use serde_json::Value;

use super::{Off, Rule, Section, join, page::quoted};
use crate::{
    Kind,
    duration::{self, Human},
    show::{plain_key, shown},
};

impl<'v> Section<'v, '_> {
    /// Declares a text; absent or empty means `default`.
    pub fn text(&mut self, key: &'static str, default: &str, doc: &str) -> String {
        self.takes("text");
        self.print_key(key, Some(&quoted(default)), doc);
        self.any_text(key).unwrap_or_else(|| default.to_owned())
    }

    /// Declares a text that is required if its section is present; `example` is shown in the default file.
    pub fn required(&mut self, key: &'static str, example: &str, expected: &str, doc: &str) -> String {
        self.takes_example("text");
        self.print_key(key, Some(&quoted(example)), doc);
        match self.any_text(key) {
            Some(text) => text,
            None => {
                // A value of another type already has its problem.
                if self.is_present() && self.peek(key).is_none_or(Value::is_string) {
                    self.refuse(key, expected);
                }
                String::new()
            }
        }
    }

    /// Declares a text for which absent or empty is `None`; `example` is shown in the default file.
    pub fn optional_text(&mut self, key: &'static str, example: &str, doc: &str) -> Option<String> {
        self.takes_example("text");
        self.print_key(key, Some(&quoted(example)), doc);
        self.any_text(key)
    }

    /// Declares a text or a number and returns either as text; absent or empty is `None`.
    pub fn text_or_number(&mut self, key: &'static str, example: &str, doc: &str) -> Option<String> {
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
    pub fn path(&mut self, key: &'static str, doc: &str) -> Option<PathBuf> {
        self.takes_example("path");
        self.optional_text(key, "", doc).map(PathBuf::from)
    }

    /// Declares a path that is required if its section is present.
    pub fn required_path(&mut self, key: &'static str, example: &str, doc: &str) -> PathBuf {
        self.takes_example("path");
        self.required(key, example, "the path of a file", doc).into()
    }

    /// Declares a list of non-empty texts; absent or empty means `default`.
    pub fn texts(&mut self, key: &'static str, default: &[&str], doc: &str) -> Vec<String> {
        self.takes("list of texts");
        self.print_key(key, Some(&format!("[{}]", default.join(", "))), doc);
        let texts = self.any_texts(key);
        if texts.is_empty() { default.iter().map(|&text| text.to_owned()).collect() } else { texts }
    }

    /// Declares a list that needs at least one text if its section is present; `example` is shown in the
    /// default file.
    pub fn required_texts(
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

    /// Declares a text or a list of texts; absent or empty means none.
    pub fn text_or_texts(&mut self, key: &'static str, doc: &str) -> Vec<String> {
        self.takes("text, or list of texts");
        self.print_key(key, Some("[]"), doc);
        match self.peek(key) {
            Some(Value::String(_)) => self.any_text(key).into_iter().collect(),
            _ => self.any_texts(key),
        }
    }

    /// Declares a section whose keys the author chooses. Each has a text or a list of texts; a switch or a
    /// whole number counts as its text. Returns the keys in the order of the file.
    pub fn named_texts(&mut self, key: &'static str, doc: &str) -> Vec<(String, Vec<String>)> {
        self.takes("section with any keys");
        self.print_key(key, None, doc);
        let found = match self.take(key) {
            None => return Vec::new(),
            Some(Value::Object(found)) => found,
            Some(_) => {
                self.wrong(key, "a section: indented keys with their values");
                return Vec::new();
            }
        };
        let section = join(&self.path, key);
        let mut named = Vec::with_capacity(found.len());
        for (name, value) in found {
            let list = match value {
                Value::Array(list) if !list.is_empty() => list.as_slice(),
                value => std::slice::from_ref(value),
            };
            let mut texts = Vec::with_capacity(list.len());
            for item in list {
                match item {
                    Value::String(text) if !text.is_empty() => texts.push(text.clone()),
                    Value::Bool(_) => texts.push(item.to_string()),
                    Value::Number(number) if number.is_i64() || number.is_u64() => {
                        texts.push(number.to_string());
                    }
                    other => {
                        let path = join(&section, &plain_key(name));
                        let expected = "a text that is not empty, or a list of such texts";
                        self.report.problem(Kind::Shape, path, shown(name, other), expected);
                    }
                }
            }
            named.push((name.clone(), texts));
        }
        named
    }

    /// Declares an unsigned whole number; absent or 0 means `default`, as in 14.1.
    pub fn number(&mut self, key: &'static str, default: u32, doc: &str) -> u32 {
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
    pub fn number_within(
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
    pub fn id(&mut self, key: &'static str, range: RangeInclusive<i64>) -> Option<i64> {
        let number = self.take(key).and_then(whole).filter(|n| range.contains(n));
        if number.is_none() {
            self.refuse(key, format!("a whole number from {} to {}", range.start(), range.end()));
        }
        number
    }

    /// Declares a number that is not negative; absent or 0 means `default`, as in 14.1.
    pub fn real(&mut self, key: &'static str, default: f64, doc: &str) -> f64 {
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
    pub fn flag(&mut self, key: &'static str, doc: &str) -> bool {
        self.takes("true or false");
        self.print_key(key, Some("false"), doc);
        self.optional_flag(key).unwrap_or_default()
    }

    /// Declares a switch for which absent is a third value. It is not in the default file.
    pub fn optional_flag(&mut self, key: &'static str) -> Option<bool> {
        match self.take(key)? {
            Value::Bool(flag) => Some(*flag),
            _ => {
                self.wrong(key, "true or false");
                None
            }
        }
    }

    /// Declares a duration; only absent means `default` (0 does not), as in 14.1.
    pub fn duration(&mut self, key: &'static str, default: Duration, rule: Rule, doc: &str) -> Duration {
        self.takes(format!("duration {rule}"));
        self.print_key(key, Some(&Human(default).to_string()), doc);
        self.any_duration(key, default, rule).unwrap_or(default)
    }

    /// Declares a duration for which absent is `None`; `example` is shown in the default file.
    pub fn optional_duration(
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

    /// Declares a duration in protobuf's form only, without a rule. It is not in the default file.
    pub fn proto_duration(&mut self, key: &'static str) -> Option<duration::Signed> {
        let value = self.take(key)?;
        let parsed = value.as_str().and_then(duration::parse_proto);
        if parsed.is_none() {
            self.wrong(key, "seconds with the unit `s`, such as 20s or 1.5s");
        }
        parsed
    }

    /// Declares a protobuf enum, given by name or number; absent means the first one.
    pub fn one_of<T: Copy + Default>(&mut self, key: &'static str, names: &[(&str, T)], doc: &str) -> T {
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

    /// Returns a text that is not empty; empty and absent are the same in proto3.
    fn any_text(&mut self, key: &'static str) -> Option<String> {
        match self.take(key)? {
            Value::String(text) => (!text.is_empty()).then(|| text.clone()),
            _ => {
                self.wrong(key, "a text (put it in quotes if it looks like a number)");
                None
            }
        }
    }
}

/// Returns a whole number, which protobuf JSON also reads from `1e2`, `100.0` and `"100"`.
fn whole(value: &Value) -> Option<i64> {
    // Doubles represent whole numbers exactly up to this bound, which also keeps the conversion below
    // defined.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) => number.as_i64().or_else(|| {
            let real = number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() <= EXACT)?;
            #[expect(clippy::cast_possible_truncation, reason = "whole and within the exact range")]
            let whole = real as i64;
            Some(whole)
        }),
        // `parse` would accept a leading plus.
        Value::String(text) if text.starts_with(|c: char| c.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
