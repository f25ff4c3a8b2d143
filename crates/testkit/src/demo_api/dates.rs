//! Dates as Kubernetes writes them.

use std::{
    fmt::Write as _,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::Value;

/// Seconds since 1970.
#[allow(clippy::disallowed_methods)] // a stamp that leaves the process; nothing is decided by it
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(super) fn age(object: &Value) -> String {
    let since = object["metadata"]["creationTimestamp"].as_str().and_then(seconds_of).unwrap_or_default();
    let seconds = now().saturating_sub(since);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3600),
    }
}

/// Howard Hinnant's `civil_from_days`, for days after 1970.
pub(super) fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let mut text = String::new();
    let _ = write!(
        text,
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    );
    text
}

/// Reads what [`rfc3339`] writes.
fn seconds_of(text: &str) -> Option<u64> {
    let part = |range: std::ops::Range<usize>| text.get(range)?.parse::<u64>().ok();
    let (year, month, day) = (part(0..4)?, part(5..7)?, part(8..10)?);
    let year = if month <= 2 { year.checked_sub(1)? } else { year };
    let shifted = if month > 2 { month.checked_sub(3)? } else { month + 9 };
    let day_of_year = (153 * shifted + 2) / 5 + day.checked_sub(1)?;
    let days = year / 400 * 146_097 + year % 400 * 365 + year % 400 / 4 - year % 400 / 100 + day_of_year;
    Some(days.checked_sub(719_468)? * 86_400 + part(11..13)? * 3600 + part(14..16)? * 60 + part(17..19)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_round_trip() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(rfc3339(1_709_210_096), "2024-02-29T12:34:56Z");
        for seconds in (0..4_000_000_000).step_by(7_654_321) {
            assert_eq!(seconds_of(&rfc3339(seconds)), Some(seconds));
        }
    }
}
