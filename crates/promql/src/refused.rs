//! [`Refused`]: an expression that is not asked.

/// Why an expression is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is no PromQL: status 400.
    Malformed,
    /// It cannot be answered exactly from several servers, or not yet: status 422.
    Unsupported,
}

/// An expression that is refused, with a text for its author.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refused {
    /// Why.
    pub kind: Kind,
    /// Which part it is, and what to write instead.
    pub text: String,
}

/// The longest part of an expression in a text, in characters.
const LONGEST_PART: usize = 200;

impl Refused {
    pub(crate) fn malformed(text: impl Into<String>) -> Self {
        Self { kind: Kind::Malformed, text: text.into() }
    }

    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self { kind: Kind::Unsupported, text: text.into() }
    }

    /// A part that is refused, and what to do about it.
    pub(crate) fn part(part: &impl std::fmt::Display, why: &str) -> Self {
        let part = part.to_string();
        let mut shown: String = part.chars().take(LONGEST_PART).collect();
        if shown.len() < part.len() {
            shown.push('…');
        }
        Self::unsupported(format!("{shown}: {why}"))
    }
}
