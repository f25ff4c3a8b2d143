//! What one agent token may cost: a bucket for each, refilled by the minute.
//!
//! 14.1 counts every stream, which makes 100 requests a minute a ceiling. Here only what an agent
//! causes without need is counted: transport connections, and tunnels that it ends without having
//! carried a request; and, apart, attempts with a token that is not right. What kas ended or asked to move is free.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use ids::TokenHash;
use tokio::time::Instant;

/// Tokens that are remembered; full buckets are forgotten first.
const MAX_BUCKETS: usize = 100_000;

/// The buckets of all tokens.
#[derive(Debug)]
pub struct RateLimit {
    per_second: f64,
    /// What may come at once.
    burst: f64,
    buckets: Mutex<HashMap<TokenHash, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    at: Instant,
}

impl RateLimit {
    /// Refills each bucket by `per_minute` up to `burst`.
    pub fn new(per_minute: u32, burst: u32) -> Self {
        let (per_second, burst) = (f64::from(per_minute) / 60.0, f64::from(burst));
        Self { per_second, burst, buckets: Mutex::default() }
    }

    /// Takes one from the bucket of `token`.
    pub fn charge(&self, token: TokenHash) {
        let now = Instant::now();
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&token) {
            buckets.retain(|_, bucket| self.level(bucket, now) < self.burst);
            if buckets.len() >= MAX_BUCKETS {
                return;
            }
        }
        let bucket = buckets.entry(token).or_insert(Bucket { level: self.burst, at: now });
        // Not below empty: whoever stops is soon welcome again.
        bucket.level = (self.level(bucket, now) - 1.0).max(0.0);
        bucket.at = now;
    }

    /// Whether `token` may open another stream.
    pub fn allows(&self, token: TokenHash) -> bool {
        let buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        buckets.get(&token).is_none_or(|bucket| self.level(bucket, Instant::now()) >= 1.0)
    }

    fn level(&self, bucket: &Bucket, now: Instant) -> f64 {
        (bucket.level + self.per_second * now.saturating_duration_since(bucket.at).as_secs_f64())
            .min(self.burst)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_token_that_spent_its_burst_waits_for_the_refill_and_others_do_not() {
        let limit = RateLimit::new(60, 1_000);
        let (greedy, other) = (TokenHash::of(b"greedy"), TokenHash::of(b"other"));
        for _ in 0..2_000 {
            limit.charge(greedy);
        }
        assert!(!limit.allows(greedy) && limit.allows(other));
        tokio::time::advance(Duration::from_millis(1_001)).await;
        assert!(limit.allows(greedy));
    }
}
