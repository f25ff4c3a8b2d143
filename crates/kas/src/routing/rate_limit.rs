//! What one agent token may cost: a bucket for each, refilled by the minute.
//!
//! 14.1 counts every stream, which makes 100 requests a minute a ceiling. Here only what an agent
//! causes without need is counted: transport connections, and tunnels that it ends without having
//! carried a request; and, apart, attempts with a token that is not right. What kas ended or asked to move is
//! free.
//!
//! The limit is that of all replicas together. Those that share a Redis add what they counted there, and
//! charge themselves what the others did ([`RateLimit::told`]): beyond the limit gets what is not told yet, a
//! hundredth of the burst for each further replica and what comes within a fifth of a second; and, where one
//! [window](RateLimit::window) follows another, once more the burst at replicas that have not seen the token.
//! Others take their part each ([`RateLimit::parted`]): a token may use less than the limit where it does not
//! spread over the replicas, never more, but for the least part, 10 a minute and 50 at once.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ids::TokenHash;
use tokio::{sync::watch, time::Instant};

/// Tokens that are remembered; full buckets are forgotten first.
const MAX_BUCKETS: usize = 100_000;

/// A part of a limit is not below this (a minute, at once): with many replicas an agent would otherwise be
/// kept out for what every agent does. So a set of replicas allows at most this much for each of them, or the
/// limit if that is more.
const LEAST: (f64, f64) = (10.0, 50.0);
/// What one bucket counts is told to other replicas by hundredths of the burst.
const TOLD_BY: f64 = 100.0;

/// The buckets of all tokens.
#[derive(Debug)]
pub struct RateLimit {
    per_second: f64,
    /// What may come at once.
    burst: f64,
    among: Among,
    state: Mutex<State>,
}

/// How replicas keep one limit together.
#[derive(Debug)]
enum Among {
    /// Each takes its part; so many there are.
    Parted(watch::Receiver<usize>),
    /// Each tells the others what it has counted.
    Told,
    /// There is one.
    Alone,
}

#[derive(Debug, Default)]
struct State {
    buckets: HashMap<TokenHash, Bucket>,
    /// Tokens of which there is enough to tell.
    to_tell: Vec<TokenHash>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    at: Instant,
    /// What the others were not told.
    untold: u32,
    /// What all had counted, in which window.
    seen: Option<(u64, u64)>,
}

/// What all replicas have counted of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// Which window of [`RateLimit::window`].
    pub window: u64,
    /// In it.
    pub count: u64,
}

impl RateLimit {
    /// Refills each bucket by `per_minute` up to `burst`.
    pub fn new(per_minute: u32, burst: u32) -> Self {
        let (per_second, burst) = (f64::from(per_minute) / 60.0, f64::from(burst));
        Self { per_second, burst, among: Among::Alone, state: Mutex::default() }
    }

    /// Takes this replica's part of the limit only; `live`: how many replicas there are.
    pub fn parted(self, live: watch::Receiver<usize>) -> Self {
        Self { among: Among::Parted(live), ..self }
    }

    /// Keeps the limit with others, to which somebody carries [`untold`](Self::untold), and back what
    /// [`learn`](Self::learn) wants.
    pub fn told(self) -> Self {
        Self { among: Among::Told, ..self }
    }

    /// Returns in what windows totals are counted: in one of them a bucket fills.
    pub fn window(&self) -> Duration {
        let fills = Duration::try_from_secs_f64(self.burst / self.per_second).unwrap_or(Duration::MAX);
        fills.clamp(Duration::from_secs(60), Duration::from_secs(3_600))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one of numbers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns refill per second and burst of this replica.
    fn bounds(&self) -> (f64, f64) {
        match &self.among {
            Among::Parted(live) => {
                let parts = *live.borrow() as f64;
                let least = (LEAST.0 / 60.0).min(self.per_second);
                ((self.per_second / parts).max(least), (self.burst / parts).max(LEAST.1.min(self.burst)))
            }
            Among::Told | Among::Alone => (self.per_second, self.burst),
        }
    }

    fn tells_at(&self) -> u32 {
        (self.burst / TOLD_BY).max(1.0) as u32
    }

    /// Takes what the others are to be told, of at most `most` tokens.
    pub fn untold(&self, most: usize) -> Vec<(TokenHash, u32)> {
        let mut state = self.state();
        let from = state.to_tell.len().saturating_sub(most);
        let tokens = state.to_tell.split_off(from);
        tokens
            .into_iter()
            .filter_map(|token| {
                let untold = std::mem::take(&mut state.buckets.get_mut(&token)?.untold);
                (untold > 0).then_some((token, untold))
            })
            .collect()
    }

    /// Takes back what could not be told.
    pub fn not_told(&self, untold: Vec<(TokenHash, u32)>) {
        let mut state = self.state();
        for (token, count) in untold {
            if let Some(bucket) = state.buckets.get_mut(&token) {
                bucket.untold = bucket.untold.saturating_add(count);
                state.to_tell.push(token);
            }
        }
    }

    /// Charges what the others have counted: all had counted `total` when `told` of this replica were added.
    pub fn learn(&self, token: TokenHash, told: u32, total: Total) {
        let now = Instant::now();
        let mut state = self.state();
        let Some(bucket) = state.buckets.get_mut(&token) else { return };
        let level = self.level(bucket, now);
        bucket.level = match bucket.seen {
            Some((window, before)) if window == total.window => {
                level - total.count.saturating_sub(before).saturating_sub(told.into()) as f64
            }
            // What was counted before this replica looked, as if it had all been just now: who spends as much
            // as is refilled finds less at a replica that it is new to, and who has spent its burst nothing.
            _ => level.min(self.burst - total.count as f64),
        }
        .max(0.0);
        bucket.at = now;
        bucket.seen = Some((total.window, total.count));
    }

    /// Takes one from the bucket of `token`.
    pub fn charge(&self, token: TokenHash) {
        let now = Instant::now();
        let mut state = self.state();
        let State { buckets, to_tell } = &mut *state;
        let (_, burst) = self.bounds();
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&token) {
            buckets.retain(|_, bucket| self.level(bucket, now) < burst);
            to_tell.retain(|token| buckets.contains_key(token));
            if buckets.len() >= MAX_BUCKETS {
                return;
            }
        }
        let bucket = buckets.entry(token).or_insert(Bucket { level: burst, at: now, untold: 0, seen: None });
        // Not below empty: whoever stops is soon welcome again.
        bucket.level = (self.level(bucket, now) - 1.0).max(0.0);
        bucket.at = now;
        if matches!(self.among, Among::Told) {
            bucket.untold = bucket.untold.saturating_add(1);
            if bucket.untold == self.tells_at() {
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

    /// What Redis would answer.
    fn tell(from: &RateLimit, count: &mut u64, window: u64) {
        for (token, told) in from.untold(100) {
            *count += u64::from(told);
            from.learn(token, told, Total { window, count: *count });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn replicas_that_tell_each_other_allow_the_limit_once_and_a_hundredth_of_it_more() {
        let (a, b) = (RateLimit::new(60, 1_000).told(), RateLimit::new(60, 1_000).told());
        let token = TokenHash::of(b"greedy");
        let (mut count, mut allowed) = (0, 0);
        for turn in 0..4_000 {
            let (one, _) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
            if one.allows(token) {
                allowed += 1;
                one.charge(token);
            }
            tell(one, &mut count, 7);
        }
        assert!((1_000..=1_020).contains(&allowed), "{allowed}");
        // Who has not seen the token yet learns it with the first that it tells.
        let c = RateLimit::new(60, 1_000).told();
        for _ in 0..10 {
            c.charge(token);
        }
        tell(&c, &mut count, 7);
        assert!(!c.allows(token));
        // A new window begins with a full bucket for who has spent nothing.
        let d = RateLimit::new(60, 1_000).told();
        for _ in 0..10 {
            d.charge(token);
        }
        let mut count = 0;
        tell(&d, &mut count, 8);
        assert!(d.allows(token));
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_told_is_told_later_and_random_tokens_are_not_told_at_all() {
        let limit = RateLimit::new(60, 1_000).told();
        for id in 0..10_000_u32 {
            limit.charge(TokenHash::of(&id.to_le_bytes()));
        }
        assert_eq!(limit.untold(10_000).len(), 0);
        let token = TokenHash::of(b"one");
        for _ in 0..10 {
            limit.charge(token);
        }
        let untold = limit.untold(10);
        assert_eq!(untold.len(), 1);
        limit.not_told(untold);
        limit.charge(token);
        assert_eq!(limit.untold(10), [(token, 11)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_is_a_share_of_the_limit_that_follows_how_many_replicas_there_are() {
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
