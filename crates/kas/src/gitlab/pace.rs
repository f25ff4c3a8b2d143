//! How often GitLab is asked: a bucket that refills evenly, with a way past the queue for those already let in.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::identity::gitlab::Urgency;

/// A bucket of `burst` that gets `per_second` back.
///
/// Who asks again about an agent that is connected does not queue behind strangers: otherwise whoever can reach the
/// agent listener could, with made-up tokens, keep every connected agent from being known any longer. What it takes
/// counts for both, so that strangers pay.
#[derive(Debug)]
pub(super) struct Pace {
    /// Seconds between two.
    interval: f64,
    /// What may be taken ahead, in seconds.
    ahead: f64,
    epoch: Instant,
    /// When the next one is due if all were evenly spaced, in seconds since `epoch`: for renewals, and for all.
    next: Mutex<[f64; 2]>,
}

impl Pace {
    pub(super) fn new(per_second: f64, burst: u32) -> Self {
        let interval = per_second.max(f64::MIN_POSITIVE).recip();
        let ahead = interval * f64::from(burst.saturating_sub(1));
        Self { interval, ahead, epoch: Instant::now(), next: Mutex::default() }
    }

    /// Waits for its turn, unless that is more than `patience` away: then it returns false at once, having taken
    /// nothing. So no more wait than the rate lets through in that time.
    pub(super) async fn wait(&self, urgency: Urgency, patience: Duration) -> bool {
        let Some(wait) = self.take(urgency, patience) else { return false };
        tokio::time::sleep(wait).await;
        true
    }

    fn take(&self, urgency: Urgency, patience: Duration) -> Option<Duration> {
        let now = self.epoch.elapsed().as_secs_f64();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let [renewals, all] = next.map(|next| next.max(now));
        let mine = if urgency == Urgency::Renewal { renewals } else { all };
        let wait = Duration::try_from_secs_f64((mine - self.ahead - now).max(0.0)).ok()?;
        if wait > patience {
            return None;
        }
        let renewals = if urgency == Urgency::Renewal { renewals + self.interval } else { renewals };
        *next = [renewals, all + self.interval];
        Some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    async fn time(pace: &Pace, urgency: Urgency) -> Option<f64> {
        let begun = Instant::now();
        pace.wait(urgency, PATIENCE).await.then(|| begun.elapsed().as_secs_f64())
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_then_one_per_interval() {
        let pace = Pace::new(10.0, 50);
        for _ in 0..50 {
            assert_eq!(time(&pace, Urgency::New).await, Some(0.0));
        }
        for _ in 0..20 {
            let waited = time(&pace, Urgency::New).await.unwrap();
            assert!((0.09..0.11).contains(&waited), "{waited}");
        }
        // Refilled, and not beyond its size.
        tokio::time::advance(Duration::from_secs(1000)).await;
        for _ in 0..50 {
            assert_eq!(time(&pace, Urgency::New).await, Some(0.0));
        }
        assert!(time(&pace, Urgency::New).await.unwrap() > 0.09);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_wait_than_pass_in_the_time_that_one_may_wait() {
        let pace = Pace::new(10.0, 50);
        let passed = (0..1000).filter(|_| pace.take(Urgency::New, PATIENCE).is_some()).count();
        assert!((249..=251).contains(&passed), "{passed}");
    }

    #[tokio::test(start_paused = true)]
    async fn renewals_pass_a_queue_of_strangers_who_pay_for_them() {
        let pace = Pace::new(10.0, 5);
        while pace.take(Urgency::New, PATIENCE).is_some() {}
        for _ in 0..5 {
            assert_eq!(time(&pace, Urgency::Renewal).await, Some(0.0));
        }
        assert!(time(&pace, Urgency::Renewal).await.unwrap() > 0.09);
        assert_eq!(pace.take(Urgency::New, PATIENCE), None);
    }

    #[tokio::test(start_paused = true)]
    async fn extreme_settings_neither_panic_nor_wait_for_ever() {
        for (rate, burst) in [(f64::MIN_POSITIVE, u32::MAX), (f64::MAX, 1), (1e-300, 1), (1.0, 0)] {
            let pace = Pace::new(rate, burst);
            for _ in 0..3 {
                time(&pace, Urgency::New).await;
            }
        }
    }
}
