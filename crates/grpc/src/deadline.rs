//! Deadlines: read from `grpc-timeout`, reduced at every hop, and written for the next one.

use std::time::Duration;

use tokio::time::Instant;

/// The instant by which a call must have ended. `None`: the caller set no deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline.
    pub const NONE: Self = Self(None);

    /// Returns the deadline that `grpc-timeout` in `headers` sets, counted from now.
    ///
    /// # Errors
    /// [`InvalidTimeout`] for a value that is not 1 to 8 digits and a unit.
    pub fn from_headers(headers: &http::HeaderMap) -> Result<Self, InvalidTimeout> {
        match headers.get("grpc-timeout") {
            None => Ok(Self::NONE),
            Some(value) => Ok(Self(Instant::now().checked_add(parse_timeout(value.as_bytes())?))),
        }
    }

    /// Returns the deadline `timeout` from now.
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    /// Returns the instant, if there is a deadline.
    pub fn instant(self) -> Option<Instant> {
        self.0
    }

    /// Returns the remaining time, if there is a deadline. Zero if it has passed.
    pub fn remaining(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }
}

/// Why a `grpc-timeout` could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid grpc-timeout: expected 1 to 8 digits and one of H, M, S, m, u, n")]
pub struct InvalidTimeout;

/// Parses a `grpc-timeout` value.
///
/// # Errors
/// [`InvalidTimeout`] for a value that is not 1 to 8 digits and a unit.
pub fn parse_timeout(value: &[u8]) -> Result<Duration, InvalidTimeout> {
    let (unit, digits) = value.split_last().ok_or(InvalidTimeout)?;
    if digits.is_empty() || digits.len() > 8 {
        return Err(InvalidTimeout);
    }
    let mut n = 0u64;
    for d in digits {
        if !d.is_ascii_digit() {
            return Err(InvalidTimeout);
        }
        n = n * 10 + u64::from(d - b'0');
    }
    Ok(match unit {
        b'H' => Duration::from_secs(n * 3600),
        b'M' => Duration::from_secs(n * 60),
        b'S' => Duration::from_secs(n),
        b'm' => Duration::from_millis(n),
        b'u' => Duration::from_micros(n),
        b'n' => Duration::from_nanos(n),
        _ => return Err(InvalidTimeout),
    })
}

/// Formats a `grpc-timeout` value in the finest unit that fits 8 digits. It is rounded down, since a hop must
/// not give the next one more time than it has.
pub fn format_timeout(timeout: Duration) -> String {
    const LIMIT: u128 = 99_999_999;
    for (unit, per) in [('n', 1), ('u', 1_000), ('m', 1_000_000), ('S', 1_000_000_000), ('M', 60_000_000_000)]
    {
        let n = timeout.as_nanos() / per;
        if n <= LIMIT {
            return format!("{n}{unit}");
        }
    }
    format!("{}H", (timeout.as_secs() / 3600).min(99_999_999))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_every_unit_are_read() {
        for (text, expected) in [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("3S", Duration::from_secs(3)),
            ("4m", Duration::from_millis(4)),
            ("5u", Duration::from_micros(5)),
            ("99999999n", Duration::from_nanos(99_999_999)),
        ] {
            assert_eq!(parse_timeout(text.as_bytes()), Ok(expected));
        }
        for bad in ["", "1", "S", "123456789S", "-1S", "1s", "1 S", "+1S"] {
            assert_eq!(parse_timeout(bad.as_bytes()), Err(InvalidTimeout), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn formatted_timeouts_are_never_longer_and_at_most_a_thousandth_shorter(ms in 1u64..10_000_000_000) {
            let timeout = Duration::from_millis(ms);
            let read = parse_timeout(format_timeout(timeout).as_bytes()).unwrap();
            assert!(read <= timeout && timeout - read <= timeout / 1000 + Duration::from_nanos(1) || ms > 90_000_000_000);
        }
    }
}
