//! The field selector of a list or watch.

use std::borrow::Cow;

/// Returns the name of the one object that a field selector can match: the value that it requires of
/// `metadata.name`. `None`: it requires none, or is malformed, or no object can have this name.
pub(crate) fn name(selector: &str) -> Option<String> {
    let mut terms = terms(selector);
    // The API server sorts the terms, which decides if there are two names.
    terms.sort_unstable();
    let mut found = None;
    for term in terms.into_iter().filter(|term| !term.is_empty()) {
        let Term { field, is_equal, value } = Term::parse(term)?;
        if found.is_none() && is_equal && field == "metadata.name" {
            found = Some(value.into_owned());
        }
    }
    found.filter(|name| !matches!(name.as_str(), "." | "..") && !name.contains(['/', '%']))
}

/// Splits at commas, unless they follow a backslash.
fn terms(selector: &str) -> Vec<&str> {
    let mut terms = Vec::new();
    let (mut start, mut is_escaped) = (0, false);
    for (at, byte) in selector.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b',' => {
                terms.push(&selector[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    terms.push(&selector[start..]);
    terms
}

struct Term<'a> {
    field: &'a str,
    is_equal: bool,
    value: Cow<'a, str>,
}

impl<'a> Term<'a> {
    /// Splits a term at its first operator: `!=`, `==` or `=`.
    fn parse(term: &'a str) -> Option<Self> {
        let equals = term.find('=')?;
        let (field, is_equal, value) = if term[..equals].ends_with('!') {
            (&term[..equals - 1], false, &term[equals + 1..])
        } else {
            let value = &term[equals + 1..];
            (&term[..equals], true, value.strip_prefix('=').unwrap_or(value))
        };
        Some(Self { field, is_equal, value: unescaped(value)? })
    }
}

/// Removes the backslashes before `\`, `,` and `=`. `None`: another character is escaped, or one of these is
/// not.
fn unescaped(value: &str) -> Option<Cow<'_, str>> {
    if !value.contains(['\\', ',', '=']) {
        return Some(Cow::Borrowed(value));
    }
    let mut out = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => out.push(chars.next().filter(|next| matches!(next, '\\' | ',' | '='))?),
            ',' | '=' => return None,
            c => out.push(c),
        }
    }
    Some(Cow::Owned(out))
}
