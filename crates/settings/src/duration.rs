//! Durations as written in configuration files.
//!
//! There are two forms: protobuf JSON (`20s`, `1.5s`), the only one that GitLab agent 14.1 reads, and the
//! common one (`5m`, `1h30m`, `200ms`). Only the first form may be negative, as in 14.1; the error message
//! then names the rule that the value breaks.

use std::{fmt, time::Duration};

/// The largest number of whole seconds of a protobuf duration: about 10,000 years.
const MAX_SECONDS: u64 = 315_576_000_000;

/// A duration in protobuf's range, with its sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signed {
    /// Whether the text began with a minus sign and the value is not zero.
    pub negative: bool,
    /// The value without its sign.
    pub size: Duration,
}

/// Parses protobuf JSON's form: decimal seconds with at most nine fraction digits, then `s`.
pub fn parse_proto(text: &str) -> Option<Signed> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let size = decimal(digits.strip_suffix('s')?, 1_000_000_000)?;
    in_range(size).then_some(Signed { negative: negative && !size.is_zero(), size })
}

/// Parses either form.
pub fn parse(text: &str) -> Option<Signed> {
    if let Some(duration) = parse_proto(text) {
        return Some(duration);
    }
    let mut rest = text;
    let mut size = Duration::ZERO;
    // Units go from large to small and occur once each: `5s5s` is a typing error and not 10 s.
    let mut largest = u64::MAX;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let end = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let nanos = match unit {
            "d" => 86_400_000_000_000,
            "h" => 3_600_000_000_000,
            "m" => 60_000_000_000,
            "s" => 1_000_000_000,
            "ms" => 1_000_000,
            _ => return None,
        };
        if nanos >= largest {
            return None;
        }
        largest = nanos;
        size = size.checked_add(decimal(number, nanos)?)?;
        rest = tail;
    }
    (!text.is_empty() && in_range(size)).then_some(Signed { negative: false, size })
}

fn in_range(size: Duration) -> bool {
    size <= Duration::from_secs(MAX_SECONDS)
}

/// Parses a number such as `12` or `1.5` in units of `unit` nanoseconds, exactly (no floating point).
fn decimal(text: &str, unit: u64) -> Option<Duration> {
    let (whole, fraction) = match text.split_once('.') {
        Some((whole, fraction)) if (1..=9).contains(&fraction.len()) => (whole, fraction),
        Some(_) => return None,
        None => (text, ""),
    };
    if whole.is_empty() || !text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return None;
    }
    let mut nanos = u128::from(whole.parse::<u64>().ok()?).checked_mul(u128::from(unit))?;
    if !fraction.is_empty() {
        let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
        nanos += u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit) / scale;
    }
    let seconds = u64::try_from(nanos / 1_000_000_000).ok()?;
    Some(Duration::new(seconds, u32::try_from(nanos % 1_000_000_000).ok()?))
}

/// Formats a duration in the shortest form that [`parse`] reads back to the same value.
pub struct Human(pub Duration);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.0.as_secs(), self.0.subsec_nanos());
        if nanos == 0 {
            let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
            if hours > 0 {
                write!(f, "{hours}h")?;
            }
            if minutes > 0 {
                write!(f, "{minutes}m")?;
            }
            if rest > 0 || seconds == 0 {
                write!(f, "{rest}s")?;
            }
            return Ok(());
        }
        if seconds == 0 && nanos % 1_000_000 == 0 {
            return write!(f, "{}ms", nanos / 1_000_000);
        }
        write!(f, "{seconds}.{}s", format!("{nanos:09}").trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size(text: &str) -> Option<Duration> {
        parse(text).filter(|d| !d.negative).map(|d| d.size)
    }

    #[test]
    fn both_forms_are_parsed_exactly() {
        for (text, millis) in [
            ("20s", 20_000),
            ("0s", 0),
            ("1.5s", 1_500),
            ("0.001s", 1),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("200ms", 200),
            ("1m0.5s", 60_500),
            ("1d", 86_400_000),
            ("1.5h", 5_400_000),
        ] {
            assert_eq!(size(text), Some(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(size("0.000000001s"), Some(Duration::from_nanos(1)));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "s",
            "20",
            "20 s",
            " 20s",
            "20S",
            "5s5s",
            "30m1h",
            "1e3s",
            ".5s",
            "1.s",
            "1.0000000001s",
            "-5m",
            "+5s",
            "5x",
            "1..5s",
            "315576000001s",
            "99999999999999999999s",
            "٣s",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_protobuf_form_keeps_its_sign_and_has_no_minutes() {
        assert_eq!(parse_proto("-5s"), Some(Signed { negative: true, size: Duration::from_secs(5) }));
        assert_eq!(parse_proto("-0s"), Some(Signed { negative: false, size: Duration::ZERO }));
        assert_eq!(parse_proto("5m"), None);
    }

    proptest! {
        #[test]
        fn formatting_and_parsing_round_trip(seconds in 0..=MAX_SECONDS - 1, nanos in 0..1_000_000_000_u32) {
            for duration in [Duration::new(seconds, nanos), Duration::from_secs(seconds), Duration::new(0, nanos)] {
                prop_assert_eq!(size(&Human(duration).to_string()), Some(duration));
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text in "\\PC*") {
            let _ = parse(&text);
        }
    }
}
