//! When something is sent: [`Pace`], and the [`pause`] after a failure.

use std::time::Duration;

/// The first pause after a failure is at most this long, and each further one at most twice as long…
const FIRST: Duration = Duration::from_secs(1);
/// …up to this.
const LONGEST: Duration = Duration::from_secs(300);

/// Returns the pause after a number of failures in a row, of which there is at least one. `random` is from 0
/// to 1: senders that failed together do not come back together.
pub fn pause(failures: u32, random: f64) -> Duration {
    let most = FIRST.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST);
    most.mul_f64(random.clamp(0.0, 1.0))
}

/// Items per second, of which as many may come at once.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    per_second: u32,
    /// When the next item would be due if none had ever come early.
    next: Duration,
}

impl Pace {
    /// Returns a pace of so many items per second, at least one.
    pub fn new(per_second: u32) -> Self {
        Self { per_second: per_second.max(1), next: Duration::ZERO }
    }

    /// Changes the number of items per second, at least one.
    pub fn set(&mut self, per_second: u32) {
        self.per_second = per_second.max(1);
    }

    /// Takes an item. Returns how long to wait before it is sent.
    pub fn take(&mut self, now: Duration) -> Duration {
        let one = Duration::from_secs(1) / self.per_second;
        // What was not used within the last second is lost.
        let begin = self.next.max(now.saturating_sub(Duration::from_secs(1)));
        self.next = begin + one;
        self.next.saturating_sub(now)
    }

    /// Returns how many of `most` items may be sent now, and takes them.
    pub fn take_now(&mut self, now: Duration, most: usize) -> usize {
        let one = Duration::from_secs(1) / self.per_second;
        let begin = self.next.max(now.saturating_sub(Duration::from_secs(1)));
        let free = now.saturating_sub(begin).as_nanos() / one.as_nanos().max(1);
        let taken = usize::try_from(free).unwrap_or(usize::MAX).min(most);
        self.next = begin + one.saturating_mul(u32::try_from(taken).unwrap_or(u32::MAX));
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_five_minutes() {
        let pauses: Vec<u64> = (1..=11).map(|failures| pause(failures, 1.0).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(pause(u32::MAX, 0.5), Duration::from_secs(150));
        assert_eq!(pause(3, 0.0), Duration::ZERO);
    }

    #[test]
    fn a_second_is_taken_at_once_and_the_rest_waits() {
        let mut pace = Pace::new(10);
        let now = Duration::from_secs(100);
        for _ in 0..10 {
            assert_eq!(pace.take(now), Duration::ZERO);
        }
        assert_eq!(pace.take(now), Duration::from_millis(100));
        assert_eq!(pace.take(now), Duration::from_millis(200));
        // A long rest saves up no more than a second.
        let later = now + Duration::from_secs(1_000);
        assert_eq!(pace.take_now(later, 100), 10);
        assert_eq!(pace.take_now(later, 100), 0);
        assert_eq!(pace.take_now(later + Duration::from_millis(350), 100), 3);
        assert_eq!(pace.take_now(later + Duration::from_secs(5), 2), 2);
        pace.set(2);
        assert_eq!(pace.take_now(later + Duration::from_secs(10), 100), 2);
    }
}
