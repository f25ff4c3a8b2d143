//! The times of a question.

use std::time::Duration;

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::form::Form;

/// The most points of one series.
const POINTS: f64 = 11_000.0;
/// The longest range.
const RANGE: Duration = Duration::from_secs(31 * 24 * 3_600);

/// Fixes the time of a question about one moment: without one it would be another at each server. `now` is
/// the time since 1970.
///
/// # Errors
/// A text for people.
pub(super) fn instant(form: &mut Form, now: Duration) -> Result<(), String> {
    match form.get("time").filter(|time| !time.is_empty()) {
        None => form.set("time", format!("{}.{:03}", now.as_secs(), now.subsec_millis())),
        Some(time) => {
            moment("time", time)?;
        }
    }
    Ok(())
}

/// Checks the times of a question about a range.
///
/// # Errors
/// A text for people.
pub(super) fn range(form: &Form) -> Result<(), String> {
    let given = |key: &'static str| form.get(key).ok_or_else(|| format!("{key} is missing"));
    let (start, end) = (moment("start", given("start")?)?, moment("end", given("end")?)?);
    let step = step(given("step")?)?;
    if end < start {
        return Err("end is before start".to_owned());
    }
    if end - start > RANGE.as_secs_f64() {
        return Err(format!("the range is longer than {} days", RANGE.as_secs() / (24 * 3_600)));
    }
    if (end - start) / step > POINTS {
        return Err(format!(
            "more than {POINTS} points for each series: use a larger step, or a shorter range"
        ));
    }
    Ok(())
}

/// Reads a time as Prometheus does: seconds since 1970, or as in RFC 3339.
fn moment(key: &str, text: &str) -> Result<f64, String> {
    let wrong = || format!("{key}: expected seconds since 1970, or a time such as 2026-01-31T12:00:00Z");
    let seconds = match text.parse::<f64>() {
        Ok(seconds) => seconds,
        #[allow(clippy::cast_precision_loss)] // a second more or less does not matter here
        Err(_) => OffsetDateTime::parse(text, &Rfc3339).map_err(|_| wrong())?.unix_timestamp() as f64,
    };
    Some(seconds).filter(|seconds| seconds.abs() < 1e12).ok_or_else(wrong)
}

/// Reads a step in seconds: a number, or a duration such as `1m30s`.
fn step(text: &str) -> Result<f64, String> {
    let wrong = || "step: expected seconds above 0, or a duration such as 30s or 1m30s".to_owned();
    let seconds = match text.parse::<f64>() {
        Ok(seconds) => seconds,
        Err(_) => duration(text).ok_or_else(wrong)?,
    };
    Some(seconds).filter(|seconds| (1e-3..1e12).contains(seconds)).ok_or_else(wrong)
}

fn duration(text: &str) -> Option<f64> {
    let mut rest = text;
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let count: u32 = rest.get(..digits)?.parse().ok()?;
        let unit = rest.get(digits..)?;
        let (seconds, length) = match unit.as_bytes() {
            [b'm', b's', ..] => (1e-3, 2),
            [b's', ..] => (1.0, 1),
            [b'm', ..] => (60.0, 1),
            [b'h', ..] => (3_600.0, 1),
            [b'd', ..] => (86_400.0, 1),
            [b'w', ..] => (604_800.0, 1),
            [b'y', ..] => (31_536_000.0, 1),
            _ => return None,
        };
        sum += f64::from(count) * seconds;
        rest = unit.get(length..)?;
    }
    Some(sum)
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
            assert_eq!(of(start, end, step), Ok(()), "{start} {end} {step}");
        }
        for (start, end, step, part) in [
            ("5", "4", "1", "before"),
            ("0", "11001", "1", "points"),
            ("0", "2678401", "1h", "days"),
            ("0", "10", "0", "step"),
            ("0", "10", "-1", "step"),
            ("0", "10", "1x", "step"),
            ("0", "10", "5", ""),
        ] {
            match of(start, end, step) {
                Err(text) => assert!(text.contains(part) && !part.is_empty(), "{text}"),
                Ok(()) => assert_eq!(part, ""),
            }
        }
        assert!(range(&form(&[("start", "1"), ("end", "2")])).unwrap_err().contains("step is missing"));
    }
}
