//! Queries, parsed as by Go's `url.ParseQuery`.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use crate::selector;

/// The most parameters of a query. Go 1.26 ignores the whole query if there are more.
pub(crate) const MAX_PARAMETERS: usize = 10_000;

/// The parameters of a query that say what a request does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    pub(crate) watch: bool,
    pub(crate) follow: bool,
    /// The value that `fieldSelector` requires of `metadata.name`.
    pub(crate) name: Option<String>,
}

impl Parameters {
    /// Reads them from a query as it was sent, without `?`. A parameter is ignored if it is malformed or
    /// contains a semicolon, as in Go.
    pub fn from_query(query: &str) -> Self {
        let mut first = First::default();
        for (key, value) in pairs(query) {
            first.add(&key, &lossy(value));
        }
        first.parameters()
    }

    /// Reads them from decoded parameters. If a key is repeated, its first value counts.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut first = First::default();
        for (key, value) in pairs {
            first.add(key.as_bytes(), value);
        }
        first.parameters()
    }
}

/// The first value of each parameter.
#[derive(Default)]
struct First {
    watch: Option<bool>,
    follow: Option<bool>,
    selector: Option<String>,
}

impl First {
    fn add(&mut self, key: &[u8], value: &str) {
        match key {
            b"watch" => _ = self.watch.get_or_insert_with(|| is_true(value)),
            b"follow" => _ = self.follow.get_or_insert_with(|| is_true(value)),
            b"fieldSelector" => _ = self.selector.get_or_insert_with(|| value.to_owned()),
            _ => {}
        }
    }

    fn parameters(self) -> Parameters {
        Parameters {
            watch: self.watch.unwrap_or(false),
            follow: self.follow.unwrap_or(false),
            name: self.selector.as_deref().and_then(selector::name),
        }
    }
}

/// A boolean parameter, as the API server reads it: true, unless it is `0` or `false` in any case. An empty
/// value is true.
fn is_true(value: &str) -> bool {
    // Go's `EqualFold` also folds the long s.
    let folded = value.chars().map(|c| if c == 'ſ' { 's' } else { c.to_ascii_lowercase() });
    value != "0" && !folded.eq("false".chars())
}

/// The number of parameters, as Go counts them: also empty and malformed ones.
pub(crate) fn count(query: &str) -> usize {
    query.bytes().filter(|byte| *byte == b'&').count() + 1
}

/// The parameters that are not malformed, decoded.
pub(crate) fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, [u8]>, Cow<'_, [u8]>)> {
    sent_pairs(query).filter(|pair| is_well_formed(pair)).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key), decode(value))
    })
}

/// Whether the query has a parameter that Go ignores.
pub(crate) fn has_malformed(query: &str) -> bool {
    sent_pairs(query).any(|pair| !is_well_formed(pair))
}

fn sent_pairs(query: &str) -> impl Iterator<Item = &str> {
    query.split('&').filter(|pair| !pair.is_empty())
}

fn is_well_formed(pair: &str) -> bool {
    !pair.contains(';') && malformed(pair.as_bytes()).is_none()
}

/// Decodes a key or value; `+` is a space.
fn decode(text: &str) -> Cow<'_, [u8]> {
    if text.contains('+') {
        let spaced = text.replace('+', " ");
        return Cow::Owned(percent_decode(spaced.as_bytes()).collect());
    }
    percent_decode(text.as_bytes()).into()
}

pub(crate) fn lossy(bytes: Cow<'_, [u8]>) -> Cow<'_, str> {
    match bytes {
        Cow::Borrowed(bytes) => String::from_utf8_lossy(bytes),
        Cow::Owned(bytes) => Cow::Owned(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }),
    }
}

/// Returns the position of a percent sign that two hexadecimal digits do not follow.
pub(crate) fn malformed(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = text[at..].iter().position(|byte| *byte == b'%') {
        at += found;
        match text.get(at + 1..at + 3) {
            Some(digits) if digits.iter().all(u8::is_ascii_hexdigit) => at += 3,
            _ => return Some(at),
        }
    }
    None
}
