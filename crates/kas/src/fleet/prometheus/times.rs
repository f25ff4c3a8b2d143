//! The times of a question.

use std::time::Duration;

use promql::Times;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::form::Form;

/// The most points of one series.
const POINTS: i64 = 11_000;
/// The longest range, in milliseconds.
const RANGE: i64 = 31 * 24 * 3_600_000;

/// Fixes the time of a question about one moment: without one it would be another at each server. `now` is
/// the time since 1970.
///
/// # Errors
/// A text for people.
pub(super) fn instant(form: &mut Form, now: Duration) -> Result<Times, String> {
    let time = match form.get("time").filter(|time| !time.is_empty()) {
        None => {
            let now = format!("{}.{:03}", now.as_secs(), now.subsec_millis());
            let time = moment("time", &now)?;
            form.set("time", now);
            time
        }
        Some(time) => moment("time", time)?,
    };
    Ok(Times::instant(time))
}

/// Reads the times of a question about a range.
///
/// # Errors
/// A text for people.
pub(super) fn range(form: &Form) -> Result<Times, String> {
    let given = |key: &'static str| form.get(key).ok_or_else(|| format!("{key} is missing"));
    let (start, end) = (moment("start", given("start")?)?, moment("end", given("end")?)?);
    let step = step(given("step")?)?;
    if end < start {
        return Err("end is before start".to_owned());
    }
    if end - start > RANGE {
        return Err(format!("the range is longer than {} days", RANGE / (24 * 3_600_000)));
    }
    if (end - start) / step > POINTS {
        return Err(format!(
            "more than {POINTS} points for each series: use a larger step, or a shorter range"
        ));
    }
    Ok(Times::range(start, end, step))
}

/// Reads a time as Prometheus does: seconds since 1970, or as in RFC 3339. Returns milliseconds, which it
/// makes of a number in two steps, so that some are a millisecond less than one would think.
fn moment(key: &str, text: &str) -> Result<i64, String> {
    let wrong = || format!("{key}: expected seconds since 1970, or a time such as 2026-01-31T12:00:00Z");
    let nanoseconds = match text.parse::<f64>() {
        Ok(seconds) if seconds.abs() < 1e12 => {
            let fraction = (seconds.fract() * 1_000.0).round() / 1_000.0;
            #[allow(clippy::cast_possible_truncation)] // they are in range
            let (seconds, rest) = (seconds.trunc() as i128, (fraction * 1e9) as i128);
            seconds * 1_000_000_000 + rest
        }
        Ok(_) => return Err(wrong()),
        Err(_) => OffsetDateTime::parse(text, &Rfc3339).map_err(|_| wrong())?.unix_timestamp_nanos(),
    };
    i64::try_from(nanoseconds.div_euclid(1_000_000)).map_err(|_| wrong())
}

/// Reads a step: a number of seconds, or a duration such as `1m30s`. Returns milliseconds, as Prometheus
/// rounds them.
fn step(text: &str) -> Result<i64, String> {
    let wrong = || "step: expected seconds above 0, or a duration such as 30s or 1m30s".to_owned();
    let milliseconds = match text.parse::<f64>() {
        #[allow(clippy::cast_possible_truncation)] // it is in range
        Ok(seconds) if seconds.abs() < 9e9 => (seconds * 1e9) as i64 / 1_000_000,
        Ok(_) => return Err(wrong()),
        Err(_) => duration(text).ok_or_else(wrong)?,
    };
    Some(milliseconds).filter(|milliseconds| *milliseconds > 0).ok_or_else(wrong)
}

/// Returns the milliseconds of a duration.
fn duration(text: &str) -> Option<i64> {
    let mut rest = text;
    let mut sum = 0_i64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let count: u32 = rest.get(..digits)?.parse().ok()?;
        let unit = rest.get(digits..)?;
        let (milliseconds, length) = match unit.as_bytes() {
            [b'm', b's', ..] => (1, 2),
            [b's', ..] => (1_000, 1),
            [b'm', ..] => (60_000, 1),
            [b'h', ..] => (3_600_000, 1),
            [b'd', ..] => (86_400_000, 1),
            [b'w', ..] => (604_800_000, 1),
            [b'y', ..] => (31_536_000_000, 1),
            _ => return None,
        };
        sum = sum.checked_add(i64::from(count).checked_mul(milliseconds)?)?;
        rest = unit.get(length..)?;
    }
    Some(sum)
}

/// For fuzzing: a time, and a step. No panic; a time is the same when it is written as seconds, and a step is
/// above 0 and counts each part of a duration.
#[cfg(feature = "fuzzing")]
pub(super) fn fuzz(text: &str) {
    if let Ok(time) = moment("time", text) {
        assert!(time.abs() <= 1_000_000_000_000_000, "{time}");
        let seconds =
            format!("{}{}.{:03}", if time < 0 { "-" } else { "" }, time.abs() / 1_000, time.abs() % 1_000);
        let again = moment("time", &seconds);
        assert!(again.as_ref().is_ok_and(|again| time.abs_diff(*again) <= 1), "{text}: {time}, {again:?}");
    }
    if let Ok(step) = step(text) {
        assert!(step > 0, "{text}");
    }
    if let Some(milliseconds) = duration(text)
        && let Some(longer) = duration(&format!("{text}1s"))
    {
        assert_eq!(longer, milliseconds + 1_000, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(pairs: &[(&str, &str)]) -> Form {
        let mut form = Form::default();
        pairs.iter().for_each(|(key, value)| form.add(key, (*value).to_owned()));
        form
    }

    #[test]
    fn a_moment_is_fixed_once() {
        let mut without = form(&[]);
        instant(&mut without, Duration::from_millis(1_500_000_000_007)).unwrap();
        assert_eq!(without.get("time"), Some("1500000000.007"));
        for (text, milliseconds) in [
            ("1500000000", 1_500_000_000_000),
            ("1500000000.5", 1_500_000_000_500),
            ("1500000000.0004", 1_500_000_000_000),
            ("-1.5", -1_500),
            ("2017-07-14T02:40:00.0019Z", 1_500_000_000_001),
            ("2017-07-14T04:40:00+02:00", 1_500_000_000_000),
        ] {
            let read = instant(&mut form(&[("time", text)]), Duration::ZERO);
            assert_eq!(read, Ok(Times::instant(milliseconds)), "{text}");
        }
        for good in ["1500000000", "1500000000.5", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00.5+01:00"] {
            let mut given = form(&[("time", good)]);
            instant(&mut given, Duration::ZERO).unwrap();
            assert_eq!(given.get("time"), Some(good));
        }
        for wrong in ["now", "NaN", "inf", "1e13"] {
            assert!(instant(&mut form(&[("time", wrong)]), Duration::ZERO).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_range_is_bounded() {
        let of = |start: &str, end: &str, step: &str| {
            range(&form(&[("start", start), ("end", end), ("step", step)]))
        };
        for (start, end, step) in
            [("0", "3600", "15"), ("0", "3600", "1m30s"), ("0", "11000", "1"), ("5", "5", "500ms")]
        {
            assert!(of(start, end, step).is_ok(), "{start} {end} {step}");
        }
        for (start, end, step, part) in [
            ("5", "4", "1", "before"),
            ("0", "11001", "1", "points"),
            ("0", "10", "0.0009", "step"),
            ("0", "10", "1e300", "step"),
            ("0", "10", "9999999999y", "step"),
            ("0", "2678401", "1h", "days"),
            ("0", "10", "0", "step"),
            ("0", "10", "-1", "step"),
            ("0", "10", "1x", "step"),
            ("0", "10", "5", ""),
        ] {
            match of(start, end, step) {
                Err(text) => assert!(text.contains(part) && !part.is_empty(), "{text}"),
                Ok(_) => assert_eq!(part, ""),
            }
        }
        for (text, milliseconds) in [("0.5", 500), ("1m30s", 90_000), ("1.0009", 1_000), ("7ms", 7)] {
            assert_eq!(of("1", "2", text), Ok(Times::range(1_000, 2_000, milliseconds)), "{text}");
        }
        assert!(range(&form(&[("start", "1"), ("end", "2")])).unwrap_err().contains("step is missing"));
    }
}
