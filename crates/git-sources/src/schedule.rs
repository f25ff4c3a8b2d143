//! When a repository is checked next; without a clock or I/O.

use std::time::Duration;

use tokio::time::Instant;

/// The time between two checks of a repository whose pushes are reported.
const TOLD_PERIOD: Duration = Duration::from_secs(300);
/// How long a report of a push shows that pushes are reported, and an unreported change that they are not.
const MEMORY: Duration = Duration::from_secs(3600);
/// The longest wait after failures.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// The shortest time between two checks of a repository.
pub(crate) const SHORTEST: Duration = Duration::from_secs(1);

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The commit is the same, or it is the first check.
    Same,
    /// There is another commit.
    Changed,
    /// The repository could not be read.
    Failed,
}

/// What is known of a repository.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Schedule {
    /// When a push was reported last.
    pushed: Option<Instant>,
    /// When it changed last without a report.
    untold: Option<Instant>,
    /// Failures since the last success.
    failures: u32,
}

impl Schedule {
    /// A push was reported.
    pub(crate) fn pushed(&mut self, now: Instant) {
        self.pushed = Some(now);
    }

    /// A check has ended. `told`: a push was reported since the check before began.
    pub(crate) fn checked(&mut self, now: Instant, outcome: Outcome, told: bool) {
        match outcome {
            Outcome::Failed => self.failures = self.failures.saturating_add(1),
            Outcome::Same | Outcome::Changed => self.failures = 0,
        }
        if outcome == Outcome::Changed && !told {
            self.untold = Some(now);
        }
    }

    /// Returns how long to wait until the next check. `period`: what is configured. `least`: what the rate of
    /// all checks permits. `random`: from 0 to 1.
    pub(crate) fn wait(&self, now: Instant, period: Duration, least: Duration, random: f64) -> Duration {
        if self.failures > 0 {
            let longest = SHORTEST.saturating_mul(1 << self.failures.min(10)).min(LONGEST_BACKOFF);
            return longest.mul_f64(random).max(SHORTEST);
        }
        let is_recent = |at: Option<Instant>| at.is_some_and(|at| now.saturating_duration_since(at) < MEMORY);
        let is_told = is_recent(self.pushed) && !is_recent(self.untold);
        let period = if is_told { period.max(TOLD_PERIOD) } else { period };
        period.max(least).mul_f64(1.0 + random / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(20);

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[tokio::test(start_paused = true)]
    async fn reported_pushes_make_checks_rare_and_an_unreported_change_frequent() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        let wait = |schedule: &Schedule, at| schedule.wait(at, PERIOD, Duration::ZERO, 0.0);
        schedule.checked(now, Outcome::Same, false);
        assert_eq!(wait(&schedule, now), PERIOD);
        assert_eq!(schedule.wait(now, PERIOD, Duration::ZERO, 1.0), secs(30));
        schedule.pushed(now);
        schedule.checked(now, Outcome::Changed, true);
        assert_eq!(wait(&schedule, now), secs(300));
        assert_eq!(wait(&schedule, now + secs(3599)), secs(300));
        assert_eq!(wait(&schedule, now + secs(3600)), PERIOD);
        schedule.checked(now + secs(10), Outcome::Changed, false);
        assert_eq!(wait(&schedule, now + secs(20)), PERIOD, "somebody pushes and GitLab says nothing");
        schedule.pushed(now + secs(3600));
        assert_eq!(wait(&schedule, now + secs(3610)), secs(300));
    }

    #[tokio::test(start_paused = true)]
    async fn many_repositories_share_the_rate() {
        let now = Instant::now();
        let schedule = Schedule::default();
        assert_eq!(schedule.wait(now, PERIOD, secs(100), 0.0), secs(100));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_repeated_with_growing_waits() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        let mut waits = Vec::new();
        for _ in 0..8 {
            schedule.checked(now, Outcome::Failed, false);
            waits.push(schedule.wait(now, PERIOD, Duration::ZERO, 1.0).as_secs());
        }
        assert_eq!(waits, [2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(schedule.wait(now, PERIOD, Duration::ZERO, 0.0), SHORTEST);
        schedule.checked(now, Outcome::Same, false);
        assert_eq!(schedule.wait(now, PERIOD, Duration::ZERO, 0.0), PERIOD);
    }
}
