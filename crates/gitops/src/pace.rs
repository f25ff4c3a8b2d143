//! The pace of calls: how many are in flight, and how many begin each second.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

/// The longest pause that an answer may ask for. An API server asks for 1 s; a proxy may ask for hours.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Admits calls.
#[derive(Debug)]
pub(crate) struct Pace {
    state: Mutex<State>,
    /// Wakes one waiter: a slot may be free.
    free: Notify,
}

#[derive(Debug)]
struct State {
    concurrent: usize,
    in_flight: usize,
    /// Between the beginnings of two calls.
    gap: Duration,
    /// How many calls may begin at once after a silence, as a duration.
    burst: Duration,
    /// When the next call may begin at an even pace. It is in the past after a silence.
    next: Option<Instant>,
    paused_until: Option<Instant>,
}

/// A call that has been admitted; dropping it frees its slot.
#[derive(Debug)]
pub(crate) struct Permit<'a>(&'a Pace);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.state.lock().in_flight -= 1;
        self.0.free.notify_one();
    }
}

impl Pace {
    pub(crate) fn new(concurrent: usize, per_second: u32) -> Self {
        let gap = Duration::from_secs(1) / per_second.max(1);
        Self {
            state: Mutex::new(State {
                concurrent: concurrent.max(1),
                in_flight: 0,
                gap,
                // A third of a second: enough for a small project to be applied without any wait.
                burst: Duration::from_millis(330),
                next: None,
                paused_until: None,
            }),
            free: Notify::new(),
        }
    }

    pub(crate) fn set_concurrent(&self, concurrent: usize) {
        self.state.lock().concurrent = concurrent.max(1);
        self.free.notify_one();
    }

    pub(crate) fn pause(&self, pause: Duration) {
        let until = Instant::now() + pause.min(LONGEST_PAUSE);
        let mut state = self.state.lock();
        if state.paused_until.is_none_or(|present| present < until) {
            state.paused_until = Some(until);
        }
    }

    /// Waits until a call may begin.
    ///
    /// # Cancel safety
    /// Safe: a waiter that is dropped takes nothing with it.
    pub(crate) async fn admit(&self) -> Permit<'_> {
        let permit = loop {
            let freed = self.free.notified();
            {
                let mut state = self.state.lock();
                if state.in_flight < state.concurrent {
                    state.in_flight += 1;
                    if state.in_flight < state.concurrent {
                        // A notification wakes one waiter only, and the limit may have been raised by more.
                        self.free.notify_one();
                    }
                    break Permit(self);
                }
            }
            freed.await;
        };
        loop {
            let until = {
                let mut state = self.state.lock();
                let now = Instant::now();
                match state.paused_until {
                    Some(until) if until > now => until,
                    _ => {
                        let earliest = now.checked_sub(state.burst).unwrap_or(now);
                        let next = state.next.map_or(earliest, |next| next.max(earliest));
                        if next <= now {
                            state.next = Some(next + state.gap);
                            return permit;
                        }
                        next
                    }
                }
            };
            sleep_until(until).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_begin_at_the_rate_after_a_burst() {
        let pace = Pace::new(1_000, 100);
        let begin = Instant::now();
        for _ in 0..133 {
            drop(pace.admit().await);
        }
        let took = begin.elapsed();
        assert!((Duration::from_millis(950)..Duration::from_millis(1_100)).contains(&took), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_are_in_flight_than_allowed() {
        let pace = Pace::new(2, 1_000_000);
        let (first, _second) = (pace.admit().await, pace.admit().await);
        let third = pace.admit();
        tokio::pin!(third);
        let waits = tokio::time::timeout(Duration::from_secs(1), third.as_mut()).await;
        assert!(waits.is_err());
        drop(first);
        let _third = third.await;
        pace.set_concurrent(3);
        let _fourth = pace.admit().await;
        pace.set_concurrent(1);
        assert!(tokio::time::timeout(Duration::from_secs(1), pace.admit()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_holds_all_calls_and_is_bounded() {
        let pace = Pace::new(10, 1_000_000);
        pace.pause(Duration::from_secs(5));
        pace.pause(Duration::from_secs(1));
        let begin = Instant::now();
        drop(pace.admit().await);
        assert_eq!(begin.elapsed().as_secs(), 5);
        pace.pause(Duration::from_secs(100_000));
        let begin = Instant::now();
        drop(pace.admit().await);
        assert_eq!(begin.elapsed().as_secs(), LONGEST_PAUSE.as_secs());
    }
}
