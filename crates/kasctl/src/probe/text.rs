//! Short texts for numbers.

use std::time::Duration;

/// Formats a duration with about two digits: `0.3 ms`, `4.1 ms`, `140 ms`, `2.3 s`, `75 s`.
pub(super) fn short(duration: Duration) -> String {
    let micros = duration.as_micros();
    match micros {
        0..10_000 => format!("{}.{} ms", micros / 1_000, micros % 1_000 / 100),
        10_000..1_000_000 => format!("{} ms", micros / 1_000),
        1_000_000..60_000_000 => format!("{}.{} s", micros / 1_000_000, micros % 1_000_000 / 100_000),
        _ => format!("{} s", micros / 1_000_000),
    }
}

/// Formats a time since the start of the probe: `62.4 s`.
pub(super) fn since_start(at: Duration) -> String {
    let tenths = at.as_millis() / 100;
    format!("{}.{} s", tenths / 10, tenths % 10)
}

/// Returns a number of things.
pub(super) fn count(number: u64, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_about_two_digits() {
        let texts = [250, 4_190, 10_000, 140_900, 1_000_000, 2_390_000, 75_900_000];
        let texts = texts.map(|micros| short(Duration::from_micros(micros)));
        assert_eq!(texts, ["0.2 ms", "4.1 ms", "10 ms", "140 ms", "1.0 s", "2.3 s", "75 s"]);
        assert_eq!(since_start(Duration::from_millis(62_449)), "62.4 s");
        assert_eq!([1, 2].map(|n| count(n, "request")), ["1 request", "2 requests"]);
    }
}
