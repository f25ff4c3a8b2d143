//! What a required claim must be.

use std::str::FromStr;

/// The longest pattern, in bytes.
const LONGEST_PATTERN: usize = 256;
/// The longest value that is compared, in bytes. A longer one does not match.
const LONGEST_VALUE: usize = 1024;

/// A text in which `*` stands for any characters but `/`, and `**` for any characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimPattern(Box<[Token]>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Char(char),
    /// Any characters but `/`.
    Segment,
    /// Any characters.
    All,
}

/// A text that is not a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected 1 to 256 bytes, in which `*` stands for anything but `/` and `**` for anything")]
pub struct InvalidClaimPattern;

impl FromStr for ClaimPattern {
    type Err = InvalidClaimPattern;

    fn from_str(text: &str) -> Result<Self, InvalidClaimPattern> {
        if text.is_empty() || text.len() > LONGEST_PATTERN || text.contains("***") {
            return Err(InvalidClaimPattern);
        }
        let mut tokens = Vec::with_capacity(text.len());
        for char in text.chars() {
            match (char, tokens.last_mut()) {
                ('*', Some(last @ Token::Segment)) => *last = Token::All,
                ('*', _) => tokens.push(Token::Segment),
                (char, _) => tokens.push(Token::Char(char)),
            }
        }
        Ok(Self(tokens.into()))
    }
}

impl ClaimPattern {
    /// Whether a value matches. The time is bounded by the product of both lengths, whatever the value is.
    pub fn matches(&self, value: &str) -> bool {
        if value.len() > LONGEST_VALUE {
            return false;
        }
        let Self(tokens) = self;
        // `reached[i]`: the tokens before `i` match what has been read.
        let mut reached = vec![false; tokens.len() + 1];
        reached[0] = true;
        self.skip_stars(&mut reached);
        for char in value.chars() {
            let mut next = vec![false; tokens.len() + 1];
            for (i, token) in tokens.iter().enumerate().filter(|(i, _)| reached[*i]) {
                match token {
                    Token::Char(expected) => next[i + 1] |= *expected == char,
                    Token::Segment => next[i] |= char != '/',
                    Token::All => next[i] = true,
                }
            }
            self.skip_stars(&mut next);
            reached = next;
        }
        reached[tokens.len()]
    }

    /// A star may stand for nothing.
    fn skip_stars(&self, reached: &mut [bool]) {
        for (i, token) in self.0.iter().enumerate() {
            if reached[i] && !matches!(token, Token::Char(_)) {
                reached[i + 1] = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_characters() {
        for (pattern, matching, others) in [
            ("true", &["true"][..], &["", "True", "true ", "tru"][..]),
            ("acme/**", &["acme/", "acme/a", "acme/a/b"], &["acme", "acme-x", "x/acme/a"]),
            ("acme/*", &["acme/", "acme/a"], &["acme/a/b", "acme"]),
            ("*", &["", "a"], &["a/b", "/"]),
            ("**", &["", "a/b/c"], &[]),
            ("a*/b", &["a/b", "axx/b"], &["a/x/b", "ab"]),
            ("**/x", &["/x", "a/b/x"], &["x", "a/xy"]),
            ("refs/*/v1.*", &["refs/tags/v1.2"], &["refs/tags/v1", "refs/a/b/v1.2"]),
            ("ä*", &["ä", "äö"], &["a"]),
        ] {
            let parsed: ClaimPattern = pattern.parse().unwrap();
            assert!(matching.iter().all(|value| parsed.matches(value)), "{pattern}");
            assert!(!others.iter().any(|value| parsed.matches(value)), "{pattern}");
        }
        for bad in ["", "a***", &*"x".repeat(257)] {
            assert_eq!(bad.parse::<ClaimPattern>(), Err(InvalidClaimPattern), "{bad}");
        }
    }

    #[test]
    fn long_values_take_little_time_and_too_long_ones_do_not_match() {
        let pattern: ClaimPattern = "*a".repeat(120).parse().unwrap();
        assert!(pattern.matches(&"a".repeat(1024)));
        assert!(!pattern.matches(&format!("{}b", "a".repeat(1023))));
        assert!(!"**".parse::<ClaimPattern>().unwrap().matches(&"a".repeat(1025)));
    }
}
