//! When something is done next for a project.

use std::time::Duration;

use tokio::time::Instant;

use crate::progress::Outcome;

/// The pauses after failures, one after the other; the last one is repeated.
pub const BACKOFF: [Duration; 5] = [
    Duration::from_secs(10),
    Duration::from_secs(20),
    Duration::from_secs(40),
    Duration::from_secs(60),
    Duration::from_secs(300),
];
/// The pauses after another writer of the inventory was noticed, one after the other; the last one is
/// repeated. It is usually a replica that has just stopped, or somebody's edit, and is noticed once. Two
/// planners that go on get far enough apart for one of them to complete its sync.
const FENCED: [Duration; 6] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(16),
    Duration::from_secs(30),
];
/// How often in a row a sync begins anew at once because the head has moved or a commit is gone.
const MOVES: u32 = 3;

/// How often something is done unasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period {
    /// The time between two checks for drift, ± 10 %.
    pub check: Duration,
    /// After this time all of a project is applied again, ± 10 %.
    pub full: Duration,
}

/// What is due for a project, and how often in a row something went wrong.
#[derive(Debug, Default)]
pub struct Schedule {
    failures: usize,
    /// How often in a row another planner was noticed.
    fenced: usize,
    moves: u32,
    retry: Option<Instant>,
    check: Option<Instant>,
    full: Option<Instant>,
}

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// A sync of everything.
    Sync,
    /// A check for drift.
    Check,
}

impl Schedule {
    /// Returns when something is due; `None`: nothing is.
    pub fn next(&self) -> Option<Instant> {
        [self.retry, self.check, self.full].into_iter().flatten().min()
    }

    /// Notes a failure, and when to try again.
    pub fn failed(&mut self) {
        let pause = BACKOFF[self.failures.min(BACKOFF.len() - 1)];
        self.failures += 1;
        self.retry = Some(Instant::now() + varied(pause));
    }

    /// Forgets earlier failures: there is another commit.
    pub fn begin_anew(&mut self) {
        self.failures = 0;
        self.retry = None;
    }

    /// Tries nothing again before there is another commit.
    pub fn give_up(&mut self) {
        self.retry = None;
    }

    /// Syncs after a pause, although nothing has failed.
    pub fn sync_after(&mut self, pause: Duration) {
        self.retry = Some(Instant::now() + pause);
    }

    /// Notes that the commit is not the head any more, or is gone. Returns whether the head may be asked for
    /// again at once; if not, a failure is noted.
    pub fn moved(&mut self) -> bool {
        if self.moves < MOVES {
            self.moves += 1;
            return true;
        }
        self.moves = 0;
        self.failed();
        false
    }

    /// Returns what to do at [`next`](Self::next), and when to do it again.
    pub fn due(&mut self, period: &Period) -> Due {
        let now = Instant::now();
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.retry) || is_due(self.full) {
            if is_due(self.full) {
                self.full = Some(now + varied(period.full));
            }
            self.retry = None;
            return Due::Sync;
        }
        self.check = Some(now + varied(period.check));
        Due::Check
    }

    /// Notes how a sync ended. `is_all`: it was one of everything. Returns whether the head has to be asked
    /// for again at once.
    pub fn ended(&mut self, outcome: &Outcome, is_all: bool, period: &Period) -> bool {
        let now = Instant::now();
        self.check = Some(now + varied(period.check));
        if *outcome != Outcome::Fenced {
            self.fenced = 0;
        }
        match outcome {
            Outcome::Synced => {
                (self.failures, self.moves, self.retry) = (0, 0, None);
                if is_all {
                    self.full = Some(now + varied(period.full));
                }
            }
            Outcome::Degraded | Outcome::Incomplete => {
                self.moves = 0;
                self.failed();
            }
            Outcome::Refused(_) | Outcome::Interrupted(_) => self.failed(),
            Outcome::Fenced => {
                let pause = FENCED[self.fenced.min(FENCED.len() - 1)];
                self.fenced += 1;
                self.retry = Some(now + pause + pause.mul_f64(rand::random::<f64>() / 2.0));
            }
            Outcome::HeadMoved(_) => return self.moved(),
            Outcome::Stopped(crate::progress::Stop::NewCommit) => {}
            Outcome::Stopped(_) => self.failed(),
        }
        false
    }
}

/// Returns a time within a tenth of this one.
pub fn varied(time: Duration) -> Duration {
    time.mul_f64(0.9 + rand::random::<f64>() / 5.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Period = Period { check: Duration::from_secs(300), full: Duration::from_secs(21_600) };

    #[tokio::test(start_paused = true)]
    async fn another_planner_is_given_more_time_each_time_it_is_noticed() {
        let mut schedule = Schedule::default();
        let begun = Instant::now();
        for expected in [1, 2, 4, 8, 16, 30, 30] {
            assert!(!schedule.ended(&Outcome::Fenced, true, &PERIOD));
            let pause = schedule.next().unwrap().duration_since(begun).as_secs_f64();
            assert!((f64::from(expected)..=1.5 * f64::from(expected)).contains(&pause), "{pause}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_five_minutes() {
        let mut schedule = Schedule::default();
        let begun = Instant::now();
        for expected in [10, 20, 40, 60, 300, 300, 300] {
            schedule.failed();
            let pause = schedule.next().unwrap().duration_since(begun).as_secs();
            assert!((expected * 8 / 10..=expected * 12 / 10).contains(&pause), "{pause} for {expected}");
        }
        schedule.begin_anew();
        assert_eq!(schedule.next(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_moves_all_the_time_is_not_followed_all_the_time() {
        let mut schedule = Schedule::default();
        let moved = Outcome::HeadMoved(None);
        for _ in 0..MOVES {
            assert!(schedule.ended(&moved, true, &PERIOD));
        }
        assert!(!schedule.ended(&moved, true, &PERIOD));
        assert!(schedule.ended(&moved, true, &PERIOD));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_applied_is_checked_often_and_applied_again_seldom() {
        let mut schedule = Schedule::default();
        assert!(!schedule.ended(&Outcome::Synced, true, &PERIOD));
        let begun = Instant::now();
        let mut checks = 0;
        loop {
            tokio::time::sleep_until(schedule.next().unwrap()).await;
            match schedule.due(&PERIOD) {
                Due::Check => checks += 1,
                Due::Sync => break,
            }
        }
        assert!((60..=90).contains(&checks), "{checks}");
        assert!((19_440..=23_760).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    }
}
