//! Durations in the command line and in the output.

use std::time::Duration;

/// The text is not a duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a duration such as 500ms, 30s, 5m, 1h30m, or 0")]
pub(crate) struct Invalid;

/// Parses the sum of numbers with units (`ms`, `s`, `m`, `h`, `d`) in any order, such as `1h30m`.
///
/// `0` needs no unit. Other numbers do, because seconds and milliseconds are easily confused.
///
/// # Errors
/// [`Invalid`] for other texts, and for more than 10 years.
pub(crate) fn parse(text: &str) -> Result<Duration, Invalid> {
    const TEN_YEARS: u64 = 10 * 365 * 24 * 3600 * 1000;
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let mut rest = text;
    let mut millis: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or(Invalid)?;
        let number: u64 = rest[..digits].parse().map_err(|_| Invalid)?;
        rest = &rest[digits..];
        let unit_len = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let unit = match &rest[..unit_len] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60 * 1000,
            "h" => 3600 * 1000,
            "d" => 24 * 3600 * 1000,
            _ => return Err(Invalid),
        };
        rest = &rest[unit_len..];
        millis = number.checked_mul(unit).and_then(|n| millis.checked_add(n)).ok_or(Invalid)?;
    }
    if text.is_empty() || millis > TEN_YEARS { Err(Invalid) } else { Ok(Duration::from_millis(millis)) }
}

/// Formats a duration with at most two units: `45s`, `3m20s`, `59m`, `5h3m`, `2d4h`, `40d`.
pub(crate) fn humane(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / (24 * 3600));
    let two = |big: u64, big_unit: &str, small: u64, small_unit: &str| {
        if small == 0 { format!("{big}{big_unit}") } else { format!("{big}{big_unit}{small}{small_unit}") }
    };
    if minutes == 0 {
        format!("{seconds}s")
    } else if minutes < 10 {
        two(minutes, "m", seconds % 60, "s")
    } else if hours == 0 {
        format!("{minutes}m")
    } else if days == 0 {
        two(hours, "h", minutes % 60, "m")
    } else if days < 10 {
        two(days, "d", hours % 24, "h")
    } else {
        format!("{days}d")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_added_and_required() {
        assert_eq!(parse("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(parse("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse("0"), Ok(Duration::ZERO));
        for bad in
            ["", "30", "s", "1x", "-1s", "1 s", "1.5s", "99999999999999999999s", "4000d", "1s5", "5 µs"]
        {
            assert_eq!(parse(bad), Err(Invalid), "{bad:?}");
        }
    }

    #[test]
    fn humane_keeps_at_most_two_units() {
        for (seconds, shown) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (200, "3m20s"),
            (600, "10m"),
            (3599, "59m"),
            (3600, "1h"),
            (18_180, "5h3m"),
            (86_399, "23h59m"),
            (86_400, "1d"),
            (187_200, "2d4h"),
            (3_456_000, "40d"),
        ] {
            assert_eq!(humane(Duration::from_secs(seconds)), shown, "{seconds}");
        }
    }
}
