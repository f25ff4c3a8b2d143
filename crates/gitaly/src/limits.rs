//! How often and how many at once Gitaly is called.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

/// Calls per second, and how many may come at once after a pause.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Calls per second. 0: none after the first `burst`.
    pub per_second: f64,
    /// The size of the bucket. 0 is as 1.
    pub burst: u32,
}

impl Rate {
    fn half(self) -> Self {
        Self { per_second: self.per_second / 2.0, burst: self.burst / 2 }
    }
}

/// The limits of calls to Gitaly. Polls get half of each at most, so that they do not delay what somebody
/// waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// For all servers together.
    pub all: Rate,
    /// For each server.
    pub per_server: Rate,
    /// Calls to one server that have not ended. 0 is as 1.
    pub in_flight_per_server: u32,
}

impl Default for Limits {
    /// Half of what was measured to use a core of Gitaly.
    fn default() -> Self {
        Self {
            all: Rate { per_second: 200.0, burst: 400 },
            per_server: Rate { per_second: 100.0, burst: 200 },
            in_flight_per_server: 16,
        }
    }
}

/// What a call is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Somebody waits for it, or something has changed.
    #[default]
    Request,
    /// It only looks whether something has changed.
    Poll,
}

/// A call would have to wait beyond its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limited;

/// A bucket of calls, refilled at a rate.
#[derive(Debug)]
struct Bucket {
    /// Seconds between two calls.
    interval: f64,
    /// What may be taken ahead, in seconds.
    ahead: f64,
    /// When the next call is due if all were evenly spaced, in seconds since the epoch of its owner.
    next: f64,
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        // A rate of nothing is one call in an age.
        let interval = rate.per_second.max(1e-9).recip();
        Self { interval, ahead: interval * f64::from(rate.burst.max(1) - 1), next: 0.0 }
    }

    /// Returns how long a call has to wait, in seconds.
    fn wait(&self, now: f64) -> f64 {
        (self.next.max(now) - self.ahead - now).max(0.0)
    }

    fn take(&mut self, now: f64) {
        self.next = self.next.max(now) + self.interval;
    }
}

/// Two buckets: one for all calls, and one for polls, which also count for the first.
#[derive(Debug)]
pub(crate) struct Buckets {
    epoch: Instant,
    /// All calls, polls.
    buckets: Mutex<[Bucket; 2]>,
}

impl Buckets {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { epoch: Instant::now(), buckets: Mutex::new([Bucket::new(rate), Bucket::new(rate.half())]) }
    }

    /// Takes one call. It may begin after the returned time, which is at most `patience`.
    ///
    /// # Errors
    /// If it would have to wait longer: nothing was taken.
    fn take(&self, priority: Priority, patience: Duration) -> Result<Duration, Limited> {
        let now = self.epoch.elapsed().as_secs_f64();
        let mut buckets = self.buckets.lock();
        let used = match priority {
            Priority::Request => 1,
            Priority::Poll => 2,
        };
        let used = &mut buckets[..used];
        let wait = used.iter().map(|bucket| bucket.wait(now)).fold(0.0, f64::max);
        let wait = Duration::try_from_secs_f64(wait).map_err(|_| Limited)?;
        if wait > patience {
            return Err(Limited);
        }
        used.iter_mut().for_each(|bucket| bucket.take(now));
        Ok(wait)
    }

    /// Takes one call and waits until it may begin, at `deadline` at the latest.
    ///
    /// # Cancel safety
    /// A call that gives up counts all the same.
    pub(crate) async fn wait(&self, priority: Priority, deadline: Instant) -> Result<(), Limited> {
        let wait = self.take(priority, deadline.saturating_duration_since(Instant::now()))?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        Ok(())
    }
}

/// How many calls of one server are in flight.
#[derive(Debug)]
pub(crate) struct InFlight {
    all: Arc<Semaphore>,
    polls: Arc<Semaphore>,
}

/// A call in flight.
#[derive(Debug)]
pub(crate) struct Permit {
    _all: OwnedSemaphorePermit,
    _poll: Option<OwnedSemaphorePermit>,
}

impl InFlight {
    pub(crate) fn new(most: u32) -> Self {
        let most = most.max(1) as usize;
        Self { all: Arc::new(Semaphore::new(most)), polls: Arc::new(Semaphore::new((most / 2).max(1))) }
    }

    /// Waits until a call may begin, at `deadline` at the latest.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn wait(&self, priority: Priority, deadline: Instant) -> Result<Permit, Limited> {
        let enter = async {
            let poll = match priority {
                Priority::Request => None,
                Priority::Poll => Some(Arc::clone(&self.polls).acquire_owned().await.map_err(|_| Limited)?),
            };
            let all = Arc::clone(&self.all).acquire_owned().await.map_err(|_| Limited)?;
            Ok(Permit { _all: all, _poll: poll })
        };
        tokio::time::timeout_at(deadline, enter).await.unwrap_or(Err(Limited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets(per_second: f64, burst: u32) -> Buckets {
        Buckets::new(Rate { per_second, burst })
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_limited_to_the_burst_and_then_the_rate() {
        let buckets = buckets(10.0, 3);
        let take = || buckets.take(Priority::Request, Duration::from_secs(1));
        for _ in 0..3 {
            assert_eq!(take(), Ok(Duration::ZERO));
        }
        let waits: Vec<_> = std::iter::from_fn(|| take().ok()).map(|wait| wait.as_millis()).collect();
        assert_eq!(waits, [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]);
        assert_eq!(take(), Err(Limited));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(take(), Ok(Duration::ZERO));
    }

    /// Fails if polls can use up what requests need.
    #[tokio::test(start_paused = true)]
    async fn polls_get_half() {
        let buckets = buckets(10.0, 10);
        let at_once = |priority| {
            std::iter::repeat_with(|| buckets.take(priority, Duration::ZERO))
                .take_while(Result::is_ok)
                .count()
        };
        assert_eq!(at_once(Priority::Poll), 5);
        assert_eq!(at_once(Priority::Request), 5);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(at_once(Priority::Request), 10);
        assert_eq!(at_once(Priority::Poll), 0);

        let in_flight = InFlight::new(4);
        let now = Instant::now();
        let polls = [
            in_flight.wait(Priority::Poll, now).await.unwrap(),
            in_flight.wait(Priority::Poll, now).await.unwrap(),
        ];
        assert_eq!(in_flight.wait(Priority::Poll, now).await.unwrap_err(), Limited);
        let _requests = [
            in_flight.wait(Priority::Request, now).await.unwrap(),
            in_flight.wait(Priority::Request, now).await.unwrap(),
        ];
        assert_eq!(in_flight.wait(Priority::Request, now).await.unwrap_err(), Limited);
        drop(polls);
        in_flight.wait(Priority::Poll, now).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn rates_of_nothing_permit_the_burst() {
        let buckets = buckets(0.0, 0);
        assert_eq!(buckets.take(Priority::Poll, Duration::MAX), Ok(Duration::ZERO));
        assert_eq!(buckets.take(Priority::Poll, Duration::from_secs(60)), Err(Limited));
    }
}
