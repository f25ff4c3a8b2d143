//! Rate limits of all replicas together: a token bucket for each token of an agent, and for each caller of
//! the HTTP endpoint if those are limited.
//!
//! Of agents: 14.1 counts every stream, which limits an agent to 100 requests per minute. Here only what an
//! agent does without need is charged: transport connections, and tunnels that it ends before they carried a
//! request. Attempts with an invalid token are charged separately. What kas ended or asked to move is not
//! charged.
//!
//! The limit applies to all replicas together. Replicas that share a Redis add their counts there, and charge
//! themselves the counts of the others ([`RateLimit::shared`]). A token can exceed the limit by what is not
//! shared yet: a hundredth of the burst for each further replica, and what is charged within a fifth of a
//! second. When a new [window](RateLimit::window) begins, replicas that have not seen the token allow the
//! burst once more. Other replicas each apply a part of the limit ([`RateLimit::parted`]). A token that does
//! not spread over the replicas may then use less than the limit. It never uses more, except for the minimum
//! part of 10 per minute and 50 at once.

use std::{collections::HashMap, time::Duration};

use ids::TokenHash;
use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::watch, time::Instant};

/// The maximum number of buckets. Full ones are removed first.
const MAX_BUCKETS: usize = 100_000;

/// The minimum part of a limit (per minute, at once). With many replicas, an agent would otherwise be refused
/// in normal operation. A set of replicas therefore allows at most this much for each of them, or the limit
/// if that is more.
const LEAST: (f64, f64) = (10.0, 50.0);
/// The count of a bucket is shared with other replicas in steps of the burst divided by this.
const TOLD_BY: f64 = 100.0;

/// The buckets of all tokens.
#[derive(Debug)]
pub struct RateLimit {
    per_second: f64,
    /// How much may be charged at once.
    burst: f64,
    among: Among,
    /// Whether tokens are used all the time, see [`RateLimit::steady`].
    is_steady: bool,
    state: Mutex<State>,
}

/// How replicas share the limit.
#[derive(Debug)]
enum Among {
    /// Each applies its part. The value is the number of replicas.
    Parted(watch::Receiver<usize>),
    /// Each shares its counts with the others.
    Shared,
    /// There is one replica.
    Alone,
}

#[derive(Debug, Default)]
struct State {
    buckets: HashMap<TokenHash, Bucket>,
    /// Tokens with a count that should be shared.
    to_tell: Vec<TokenHash>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    at: Instant,
    /// The count that was not shared yet.
    unshared: u32,
    /// The last known window, and the count of all replicas in it.
    seen: Option<(u64, u64)>,
}

/// The count of all replicas for one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// The number of the window, see [`RateLimit::window`].
    pub window: u64,
    /// The count in this window.
    pub count: u64,
    /// How long ago the window began.
    pub elapsed: Duration,
}

impl RateLimit {
    /// Creates a limit that refills each bucket by `per_minute`, up to `burst`.
    pub fn new(per_minute: u32, burst: u32) -> Self {
        let (per_second, burst) = (f64::from(per_minute) / 60.0, f64::from(burst));
        Self { per_second, burst, among: Among::Alone, is_steady: false, state: Mutex::default() }
    }

    /// Tokens are used all the time, and below the limit. If a replica learns of one that others have charged
    /// for a while, its bucket was refilled meanwhile. So a token that rested for most of a
    /// [window](Self::window) can spend the burst once more at such a replica.
    pub fn steady(self) -> Self {
        Self { is_steady: true, ..self }
    }

    /// Applies only the part of this replica. `live`: the number of replicas.
    pub fn parted(self, live: watch::Receiver<usize>) -> Self {
        Self { among: Among::Parted(live), ..self }
    }

    /// Shares the limit with other replicas. The caller sends them [`unshared`](Self::unshared), and passes
    /// the totals to [`learn`](Self::learn).
    pub fn shared(self) -> Self {
        Self { among: Among::Shared, ..self }
    }

    /// Returns the length of the windows in which totals are counted. A bucket fills within one window.
    pub fn window(&self) -> Duration {
        let fills = Duration::try_from_secs_f64(self.burst / self.per_second).unwrap_or(Duration::MAX);
        fills.clamp(Duration::from_secs(60), Duration::from_secs(3_600))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the refill per second and the burst of this replica.
    fn bounds(&self) -> (f64, f64) {
        match &self.among {
            Among::Parted(live) => {
                let parts = *live.borrow() as f64;
                let least = (LEAST.0 / 60.0).min(self.per_second);
                ((self.per_second / parts).max(least), (self.burst / parts).max(LEAST.1.min(self.burst)))
            }
            Among::Shared | Among::Alone => (self.per_second, self.burst),
        }
    }

    fn shares_at(&self) -> u32 {
        (self.burst / TOLD_BY).max(1.0) as u32
    }

    /// Takes the counts that should be shared, of at most `most` tokens.
    pub fn unshared(&self, most: usize) -> Vec<(TokenHash, u32)> {
        let mut state = self.state();
        let from = state.to_tell.len().saturating_sub(most);
        let tokens = state.to_tell.split_off(from);
        tokens
            .into_iter()
            .filter_map(|token| {
                let unshared = std::mem::take(&mut state.buckets.get_mut(&token)?.unshared);
                (unshared > 0).then_some((token, unshared))
            })
            .collect()
    }

    /// Takes back counts that could not be shared.
    pub fn restore_unshared(&self, unshared: Vec<(TokenHash, u32)>) {
        let mut state = self.state();
        for (token, count) in unshared {
            if let Some(bucket) = state.buckets.get_mut(&token) {
                bucket.unshared = bucket.unshared.saturating_add(count);
                state.to_tell.push(token);
            }
        }
    }

    /// Charges the counts of other replicas. `total`: the count of all, after `sent` of this replica was
    /// added.
    pub fn learn(&self, token: TokenHash, sent: u32, total: Total) {
        let now = Instant::now();
        let mut state = self.state();
        let Some(bucket) = state.buckets.get_mut(&token) else { return };
        let level = self.level(bucket, now);
        bucket.level = match bucket.seen {
            Some((window, before)) if window == total.window => {
                level - total.count.saturating_sub(before).saturating_sub(sent.into()) as f64
            }
            // This replica does not know when the earlier counts were charged, and assumes that it was now. A
            // token whose burst is used up therefore gets nothing from a replica that has not seen it before.
            _ => {
                let refilled =
                    if self.is_steady { self.per_second * total.elapsed.as_secs_f64() } else { 0.0 };
                level.min(self.burst - (total.count as f64 - refilled).max(0.0))
            }
        }
        .max(0.0);
        bucket.at = now;
        bucket.seen = Some((total.window, total.count));
    }

    /// Charges `token` once.
    pub fn charge(&self, token: TokenHash) {
        self.charge_in(&mut self.state(), token, Instant::now());
    }

    /// Charges `token` once if it allows that. Otherwise returns after how long it will.
    pub fn take(&self, token: TokenHash) -> Result<(), Duration> {
        let now = Instant::now();
        let mut state = self.state();
        if let Some(bucket) = state.buckets.get(&token) {
            let missing = 1.0 - self.level(bucket, now);
            if missing > 0.0 {
                let (per_second, _) = self.bounds();
                return Err(Duration::try_from_secs_f64(missing / per_second).unwrap_or(Duration::MAX));
            }
        }
        self.charge_in(&mut state, token, now);
        Ok(())
    }

    fn charge_in(&self, state: &mut State, token: TokenHash, now: Instant) {
        let State { buckets, to_tell } = state;
        let (_, burst) = self.bounds();
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&token) {
            buckets.retain(|_, bucket| self.level(bucket, now) < burst);
            to_tell.retain(|token| buckets.contains_key(token));
            if buckets.len() >= MAX_BUCKETS {
                return;
            }
        }
        let bucket =
            buckets.entry(token).or_insert(Bucket { level: burst, at: now, unshared: 0, seen: None });
        // Not below zero, so that an agent which stops is soon accepted again.
        bucket.level = (self.level(bucket, now) - 1.0).max(0.0);
        bucket.at = now;
        if matches!(self.among, Among::Shared) {
            bucket.unshared = bucket.unshared.saturating_add(1);
            if bucket.unshared == self.shares_at() {
                to_tell.push(token);
            }
        }
    }

    /// Whether `token` may open another stream.
    pub fn allows(&self, token: TokenHash) -> bool {
        self.state().buckets.get(&token).is_none_or(|bucket| self.level(bucket, Instant::now()) >= 1.0)
    }

    fn level(&self, bucket: &Bucket, now: Instant) -> f64 {
        let (per_second, burst) = self.bounds();
        (bucket.level + per_second * now.saturating_duration_since(bucket.at).as_secs_f64()).min(burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does what Redis would do.
    fn share(from: &RateLimit, count: &mut u64, window: u64) {
        for (token, sent) in from.unshared(100) {
            *count += u64::from(sent);
            from.learn(token, sent, Total { window, count: *count, elapsed: Duration::from_secs(20) });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn replicas_that_share_counts_allow_the_limit_once_and_a_hundredth_of_it_more() {
        let (a, b) = (RateLimit::new(60, 1_000).shared(), RateLimit::new(60, 1_000).shared());
        let token = TokenHash::of(b"greedy");
        let (mut count, mut allowed) = (0, 0);
        for turn in 0..4_000 {
            let (one, _) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
            if one.allows(token) {
                allowed += 1;
                one.charge(token);
            }
            share(one, &mut count, 7);
        }
        assert!((1_000..=1_020).contains(&allowed), "{allowed}");
        // A replica that has not seen the token yet learns the total when it first shares a count.
        let c = RateLimit::new(60, 1_000).shared();
        for _ in 0..10 {
            c.charge(token);
        }
        share(&c, &mut count, 7);
        assert!(!c.allows(token));
        // A new window begins with a full bucket at a replica that has charged nothing.
        let d = RateLimit::new(60, 1_000).shared();
        for _ in 0..10 {
            d.charge(token);
        }
        let mut count = 0;
        share(&d, &mut count, 8);
        assert!(d.allows(token));
    }

    #[tokio::test(start_paused = true)]
    async fn a_steady_token_below_its_limit_is_allowed_at_a_replica_that_has_not_seen_it() {
        let token = TokenHash::of(b"steady");
        // 10 a second, 100 at once; half of that for 20 s, and then all of it.
        for (count, is_allowed) in [(100, true), (200, true), (299, true), (300, false)] {
            let limit = RateLimit::new(600, 100).shared().steady();
            limit.charge(token);
            limit.learn(token, 1, Total { window: 7, count, elapsed: Duration::from_secs(20) });
            assert_eq!(limit.allows(token), is_allowed, "{count}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_is_told_when_it_is_allowed_and_costs_nothing() {
        let limit = RateLimit::new(240, 3);
        let (greedy, other) = (TokenHash::of(b"greedy"), TokenHash::of(b"other"));
        assert_eq!([(); 3].map(|()| limit.take(greedy)), [Ok(()); 3]);
        let wait = Duration::from_millis(250);
        assert_eq!([(); 3].map(|()| limit.take(greedy)), [Err(wait); 3]);
        assert_eq!(limit.take(other), Ok(()));
        tokio::time::advance(wait).await;
        assert_eq!((limit.take(greedy), limit.take(greedy)), (Ok(()), Err(wait)));
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!([(); 4].map(|()| limit.take(greedy).is_ok()), [true, true, true, false]);
        // Each replica has a part.
        let (_live, parts) = watch::channel(4);
        let parted = RateLimit::new(240, 800).parted(parts);
        let spent = (0..1_000).take_while(|_| parted.take(greedy).is_ok()).count();
        assert_eq!((spent, parted.take(greedy)), (200, Err(Duration::from_secs(1))));
    }

    #[tokio::test(start_paused = true)]
    async fn counts_that_could_not_be_shared_are_shared_later_and_those_of_random_tokens_never() {
        let limit = RateLimit::new(60, 1_000).shared();
        for id in 0..10_000_u32 {
            limit.charge(TokenHash::of(&id.to_le_bytes()));
        }
        assert_eq!(limit.unshared(10_000).len(), 0);
        let token = TokenHash::of(b"one");
        for _ in 0..10 {
            limit.charge(token);
        }
        let unshared = limit.unshared(10);
        assert_eq!(unshared.len(), 1);
        limit.restore_unshared(unshared);
        limit.charge(token);
        assert_eq!(limit.unshared(10), [(token, 11)]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_part_of_a_replica_follows_the_number_of_replicas() {
        let (live, parts) = watch::channel(4);
        let limit = RateLimit::new(600, 1_000).parted(parts);
        let token = TokenHash::of(b"one");
        let spend =
            || (0..2_000).take_while(|_| limit.allows(token).then(|| limit.charge(token)).is_some()).count();
        assert_eq!(spend(), 250);
        tokio::time::advance(Duration::from_millis(4_001)).await;
        assert_eq!(spend(), 10, "a fourth of ten in a second");
        live.send_replace(1_000);
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(spend(), LEAST.1 as usize);
    }

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
