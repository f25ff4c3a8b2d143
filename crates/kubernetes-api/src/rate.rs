//! How many requests each caller may begin in a second, on this replica.
//!
//! A caller has a token bucket, which is one instant: when the bucket is full again. So callers that are not
//! at work cost nothing, and no task fills buckets.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc, time::Duration};

use tokio::time::Instant;

/// Beyond so many callers that have begun requests lately, further ones are not limited.
const MOST: usize = 100_000;

/// The rate of requests that one caller may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRate {
    /// Requests in each second, on average.
    pub per_second: NonZeroU32,
    /// Requests at once.
    pub burst: NonZeroU32,
}

impl RequestRate {
    /// The time after which a bucket has one token more.
    fn interval(self) -> Duration {
        Duration::from_secs(1) / self.per_second.get()
    }
}

/// The buckets of all callers.
#[derive(Debug)]
pub(crate) struct Rates {
    /// `None`: there is no limit.
    rate: Option<RequestRate>,
    /// When the bucket of each caller is full again. Callers that are not here have a full one.
    full_at: HashMap<Arc<str>, Instant>,
}

impl Rates {
    pub(crate) fn new(rate: Option<RequestRate>) -> Self {
        Self { rate, full_at: HashMap::new() }
    }

    /// Takes a token of a caller. Otherwise, returns how long the next one takes.
    pub(crate) fn take(&mut self, caller: &Arc<str>) -> Result<(), Duration> {
        let Some(rate) = self.rate else { return Ok(()) };
        let now = Instant::now();
        let full_at = self.full_at.get(caller).map_or(now, |at| (*at).max(now));
        let room = rate.interval() * (rate.burst.get() - 1);
        if let Some(wait) = full_at.duration_since(now).checked_sub(room).filter(|wait| !wait.is_zero()) {
            return Err(wait);
        }
        if self.full_at.len() < MOST || self.full_at.contains_key(caller) {
            self.full_at.insert(Arc::clone(caller), full_at + rate.interval());
        }
        Ok(())
    }

    /// Forgets the callers whose buckets are full.
    pub(crate) fn forget(&mut self) {
        let now = Instant::now();
        self.full_at.retain(|_, at| *at > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(per_second: u32, burst: u32) -> Rates {
        let number = |number| NonZeroU32::new(number).unwrap();
        Rates::new(Some(RequestRate { per_second: number(per_second), burst: number(burst) }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_spent_its_burst_waits_for_a_token_and_others_do_not() {
        let mut rates = rates(4, 3);
        let (greedy, other): (Arc<str>, Arc<str>) = ("greedy".into(), "other".into());
        assert_eq!([(); 3].map(|()| rates.take(&greedy)), [Ok(()); 3]);
        let wait = Duration::from_millis(250);
        // What is refused costs no token.
        assert_eq!([(); 3].map(|()| rates.take(&greedy)), [Err(wait); 3]);
        assert_eq!(rates.take(&other), Ok(()));
        tokio::time::advance(wait).await;
        assert_eq!((rates.take(&greedy), rates.take(&greedy)), (Ok(()), Err(wait)));
        // Its bucket is never fuller than the burst.
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!([(); 4].map(|()| rates.take(&greedy).is_ok()), [true, true, true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn callers_with_a_full_bucket_are_forgotten_and_the_others_bounded() {
        let mut rates = rates(1, 1);
        for number in 0..MOST + 5 {
            assert_eq!(rates.take(&number.to_string().into()), Ok(()));
        }
        assert_eq!(rates.full_at.len(), MOST);
        rates.forget();
        assert_eq!(rates.full_at.len(), MOST);
        assert_eq!(rates.take(&"0".into()), Err(Duration::from_secs(1)), "it is still limited");
        tokio::time::advance(Duration::from_secs(1)).await;
        rates.forget();
        assert!(rates.full_at.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_rate_nobody_is_limited_or_remembered() {
        let mut rates = Rates::new(None);
        assert!((0..10_000).all(|_| rates.take(&"a".into()).is_ok()));
        assert!(rates.full_at.is_empty());
    }
}
