//! Durations of requests, counted in buckets, so that a run of any length needs the same memory.

use std::time::Duration;

/// Buckets for each power of two: the relative error is at most 1/32.
const PER_OCTAVE: u64 = 32;

/// Counted durations.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    /// By [`bucket`]; as long as needed, at most 2,000.
    counts: Vec<u64>,
    total: u64,
    longest: Duration,
}

/// Returns the bucket of a number of microseconds.
fn bucket(micros: u64) -> usize {
    let octave = u64::from((micros / PER_OCTAVE).checked_ilog2().unwrap_or(0));
    // Below twice `PER_OCTAVE`, each number has its own bucket.
    usize::try_from(octave * PER_OCTAVE + (micros >> octave)).unwrap_or(usize::MAX)
}

/// Returns the largest number of a bucket.
fn largest(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let octave = (bucket / PER_OCTAVE).saturating_sub(1);
    ((bucket - octave * PER_OCTAVE + 1) << octave) - 1
}

impl Latencies {
    /// Counts a duration.
    pub(super) fn add(&mut self, duration: Duration) {
        // Longer ones than the longest run do not occur.
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).min(1 << 48);
        let bucket = bucket(micros);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
        self.longest = self.longest.max(duration);
    }

    /// Returns the duration that this share of all does not exceed, to 1/32; `None` if there are none.
    /// `per_mille`: 0 to 1,000.
    pub(super) fn quantile(&self, per_mille: u64) -> Option<Duration> {
        let rank = (self.total * per_mille).div_ceil(1000).max(1);
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return Some(Duration::from_micros(largest(bucket)).min(self.longest));
            }
        }
        None
    }

    /// Returns the longest duration; `None` if there are none.
    pub(super) fn max(&self) -> Option<Duration> {
        (self.total > 0).then_some(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_in_a_bucket_that_is_hardly_larger() {
        let mut before = 0;
        for micros in
            (0..5_000).chain((0..40).map(|n| 1_u64 << n)).chain((0..40).map(|n| (1_u64 << n) * 3 + 1))
        {
            let top = largest(bucket(micros));
            assert!(top >= micros && top - micros <= micros / PER_OCTAVE, "{micros}: {top}");
            if micros > 0 && bucket(micros - 1) != bucket(micros) {
                assert_eq!(largest(bucket(micros - 1)), micros - 1);
                assert_eq!(bucket(micros), bucket(micros - 1) + 1);
            }
            before = before.max(bucket(micros));
        }
        assert!(before < 2_000, "{before}");
    }

    #[test]
    fn quantiles_are_ranks() {
        let mut latencies = Latencies::default();
        assert_eq!((latencies.quantile(500), latencies.max()), (None, None));
        for millis in 1..=100 {
            latencies.add(Duration::from_millis(millis));
        }
        let near = |per_mille, millis: u64| {
            let found = latencies.quantile(per_mille).unwrap();
            let exact = Duration::from_millis(millis);
            assert!(found >= exact && found <= exact + exact / 32, "{per_mille}: {found:?}");
        };
        near(500, 50);
        near(990, 99);
        assert_eq!(latencies.quantile(1000), Some(Duration::from_millis(100)));
        assert_eq!(latencies.max(), Some(Duration::from_millis(100)));
        latencies.add(Duration::MAX);
        assert_eq!(latencies.max(), Some(Duration::MAX));
    }
}
