//! Limits how often GitLab is asked about tokens: a token bucket, and a fair queue for the lookups that have
//! to wait.

use std::{net::IpAddr, sync::Arc, time::Duration};

use net::admission::FairQueue;
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use crate::{LookupPriority, Urgency};

/// The most waiting lookups, whatever the rate.
const MOST_WAITING: usize = 10_000;
/// The task that serves the queue checks it at least this often, since all waiting lookups may have given up.
const LOOK: Duration = Duration::from_secs(1);

/// Of four lookups that waited, at least one is from each lane that is not empty.
const SCHEDULE: &[&[LookupPriority]] = {
    use LookupPriority::{KnownSource, KnownToken, UnknownSource};
    &[
        &[KnownToken, KnownSource, UnknownSource],
        &[KnownToken, KnownSource, UnknownSource],
        &[KnownSource, UnknownSource, KnownToken],
        &[UnknownSource, KnownSource, KnownToken],
    ]
};

/// A bucket of `burst` lookups that is refilled with `per_second`.
///
/// Renewals, which are about connected agents, do not queue behind other lookups: otherwise a client that
/// sends made-up tokens could delay them until the connected agents are no longer known. They count for the
/// bucket of all lookups, so the others wait for them.
///
/// All others wait in a [`FairQueue`] with a lane for each [`LookupPriority`]. A source network that sends
/// thousands of tokens delays itself, and a lookup from elsewhere by one or two. If too many wait, then the
/// newest of the largest source is refused.
#[derive(Debug)]
pub(super) struct LookupRateLimiter {
    /// Seconds between two lookups.
    interval: f64,
    /// What may be taken ahead, in seconds.
    ahead: f64,
    epoch: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When the next lookup is due if all were evenly spaced, in seconds since `epoch`: for renewals, and for
    /// all lookups.
    next: [f64; 2],
    /// The lookups that wait, by source network if it is known.
    queue: FairQueue<LookupPriority, Option<IpAddr>, oneshot::Sender<()>>,
    /// The key of the next entry of `queue`.
    next_key: u64,
    /// Whether a task serves the queue.
    is_served: bool,
}

/// Why a lookup was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy {
    /// How many lookups wait.
    pub(super) waiting: usize,
    /// The source network of most of them, and how many it has.
    pub(super) most: Option<(IpAddr, usize)>,
}

impl LookupRateLimiter {
    pub(super) fn new(per_second: f64, burst: u32) -> Arc<Self> {
        let interval = per_second.max(f64::MIN_POSITIVE).recip();
        let ahead = interval * f64::from(burst.saturating_sub(1));
        let state = State { next: [0.0; 2], queue: FairQueue::new(SCHEDULE), next_key: 0, is_served: false };
        Arc::new(Self { interval, ahead, epoch: Instant::now(), state: Mutex::new(state) })
    }

    /// Waits until a lookup may begin, for `patience` at most. No more lookups wait than the rate allows in
    /// that time. One more causes a refusal at once, of this one or another.
    ///
    /// # Errors
    /// [`Busy`]: the lookup must not begin.
    ///
    /// # Cancel safety
    /// Cancel safe: a lookup that gives up leaves the queue.
    pub(super) async fn wait(self: &Arc<Self>, urgency: Urgency, patience: Duration) -> Result<(), Busy> {
        let waiter = match urgency {
            Urgency::Renewal => {
                let wait = self.reserve(patience)?;
                tokio::time::sleep(wait).await;
                return Ok(());
            }
            Urgency::New { from, priority } => self.line_up(priority, from, patience)?,
        };
        let Some(mut waiter) = waiter else { return Ok(()) };
        if let Ok(Ok(())) = tokio::time::timeout(patience, &mut waiter.turn).await {
            return Ok(());
        }
        drop(waiter);
        Err(self.state.lock().busy())
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// Takes one from the bucket for a renewal, and returns how long it has to wait.
    fn reserve(&self, patience: Duration) -> Result<Duration, Busy> {
        let now = self.now();
        let mut state = self.state.lock();
        let [renewals, all] = state.next.map(|next| next.max(now));
        let wait = Duration::try_from_secs_f64((renewals - self.ahead - now).max(0.0));
        match wait {
            Ok(wait) if wait <= patience => {
                state.next = [renewals + self.interval, all + self.interval];
                Ok(wait)
            }
            _ => Err(state.busy()),
        }
    }

    /// Takes one from the bucket if it has one now, else returns a place in the queue.
    fn line_up(
        self: &Arc<Self>,
        priority: LookupPriority,
        from: Option<IpAddr>,
        patience: Duration,
    ) -> Result<Option<Waiter>, Busy> {
        let mut state = self.state.lock();
        if state.queue.is_empty() && self.take(&mut state).is_none() {
            return Ok(None);
        }
        let most = ((patience.as_secs_f64() / self.interval) as usize).clamp(1, MOST_WAITING);
        let (sender, turn) = oneshot::channel();
        let key = state.next_key;
        state.next_key += 1;
        // A lookup that is shed ends when its sender is dropped.
        if state.queue.push_or_shed(most, priority, from, key, sender).is_err() {
            return Err(state.busy());
        }
        if !state.is_served {
            state.is_served = true;
            tokio::spawn(Arc::clone(self).serve());
        }
        Ok(Some(Waiter { limiter: Arc::clone(self), key, turn }))
    }

    /// Takes one from the bucket. If it has none, returns when it may have one, in seconds.
    fn take(&self, state: &mut State) -> Option<f64> {
        let now = self.now();
        let all = state.next[1].max(now);
        let wait = all - self.ahead - now;
        // A timer is less exact than the numbers.
        if wait > 1e-6 {
            return Some(wait);
        }
        state.next[1] = all + self.interval;
        None
    }

    /// Starts waiting lookups as the bucket is refilled, until none waits.
    async fn serve(self: Arc<Self>) {
        loop {
            let wait = {
                let mut state = self.state.lock();
                loop {
                    if state.queue.is_empty() {
                        state.is_served = false;
                        return;
                    }
                    if let Some(wait) = self.take(&mut state) {
                        break wait;
                    }
                    if let Some((_, turn)) = state.queue.pop() {
                        // A waiter leaves the queue before its receiver is dropped.
                        let _ = turn.send(());
                    }
                }
            };
            tokio::time::sleep(Duration::try_from_secs_f64(wait).map_or(LOOK, |wait| wait.min(LOOK))).await;
        }
    }
}

impl State {
    fn busy(&self) -> Busy {
        let most = self.queue.largest().and_then(|(from, size)| Some((from?, size)));
        Busy { waiting: self.queue.len(), most }
    }
}

/// A place in the queue. A lookup that gives up drops it, and leaves the queue by that.
struct Waiter {
    limiter: Arc<LookupRateLimiter>,
    key: u64,
    /// Resolves when the lookup may begin, or with an error when it is shed.
    turn: oneshot::Receiver<()>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.limiter.state.lock().queue.remove(self.key);
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    const NEW: Urgency = Urgency::UNKNOWN_SOURCE;

    fn new(priority: LookupPriority, from: &str) -> Urgency {
        Urgency::New { from: Some(from.parse().unwrap()), priority }
    }

    async fn time(limiter: &Arc<LookupRateLimiter>, urgency: Urgency) -> Option<f64> {
        let begun = Instant::now();
        limiter.wait(urgency, PATIENCE).await.ok().map(|()| begun.elapsed().as_secs_f64())
    }

    /// Starts a lookup for each; returns how long it waited, its number, and whether it may begin.
    fn all(
        limiter: &Arc<LookupRateLimiter>,
        who: impl Iterator<Item = Urgency>,
    ) -> JoinSet<(f64, usize, bool)> {
        let mut all = JoinSet::new();
        for (n, urgency) in who.enumerate() {
            let limiter = Arc::clone(limiter);
            all.spawn(async move {
                let begun = Instant::now();
                let passed = limiter.wait(urgency, PATIENCE).await.is_ok();
                (begun.elapsed().as_secs_f64(), n, passed)
            });
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_then_one_per_interval() {
        let limiter = LookupRateLimiter::new(10.0, 50);
        for _ in 0..50 {
            assert_eq!(time(&limiter, NEW).await, Some(0.0));
        }
        for _ in 0..20 {
            let waited = time(&limiter, NEW).await.unwrap();
            assert!((0.09..0.11).contains(&waited), "{waited}");
        }
        // The bucket is refilled up to its size.
        tokio::time::advance(Duration::from_secs(1000)).await;
        for _ in 0..50 {
            assert_eq!(time(&limiter, NEW).await, Some(0.0));
        }
        assert!(time(&limiter, NEW).await.unwrap() > 0.09);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_lookups_wait_than_the_rate_allows_in_time() {
        let limiter = LookupRateLimiter::new(10.0, 50);
        let passed = all(&limiter, (0..1000).map(|_| NEW)).join_all().await;
        let (passed, refused): (Vec<_>, Vec<_>) = passed.into_iter().partition(|(.., passed)| *passed);
        assert!((249..=251).contains(&passed.len()), "{}", passed.len());
        // Except the last, which may begin exactly when its patience ends.
        assert!(refused.iter().filter(|(waited, ..)| *waited > 0.0).count() <= 1);
        // All of them are over.
        tokio::time::sleep(LOOK).await;
        let state = limiter.state.lock();
        assert!(!state.is_served && state.queue.is_empty() && state.queue.largest().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn renewals_pass_a_queue_of_other_lookups_which_wait_for_them() {
        let limiter = LookupRateLimiter::new(10.0, 5);
        let others = all(&limiter, (0..1000).map(|_| NEW));
        tokio::task::yield_now().await;
        for _ in 0..5 {
            assert_eq!(time(&limiter, Urgency::Renewal).await, Some(0.0));
        }
        assert!(time(&limiter, Urgency::Renewal).await.unwrap() > 0.09);
        let others = others.join_all().await;
        let last = others.iter().filter(|(.., passed)| *passed).map(|(waited, ..)| *waited);
        assert!(last.fold(0.0, f64::max) > 19.5);
        assert!((194..=200).contains(&others.iter().filter(|(.., passed)| *passed).count()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_with_many_lookups_delays_none_from_elsewhere() {
        let limiter = LookupRateLimiter::new(10.0, 5);
        let many = all(&limiter, (0..1000).map(|_| new(LookupPriority::UnknownSource, "192.0.2.1")));
        tokio::time::sleep(Duration::from_secs(1)).await;
        // The queue is full, and still a lookup from elsewhere is let in.
        for from in ["198.51.100.1", "198.51.100.2"] {
            let waited = time(&limiter, new(LookupPriority::UnknownSource, from)).await.unwrap();
            assert!(waited <= 0.31, "{waited}");
        }
        let more = all(&limiter, (0..100).map(|_| new(LookupPriority::UnknownSource, "192.0.2.1")));
        tokio::task::yield_now().await;
        let busy = limiter.wait(new(LookupPriority::UnknownSource, "192.0.2.1"), PATIENCE).await.unwrap_err();
        assert_eq!(busy.most.unwrap().0, "192.0.2.1".parse::<IpAddr>().unwrap());
        assert!(busy.most.unwrap().1 == busy.waiting && busy.waiting == 200, "{busy:?}");
        drop((many, more));
    }

    #[tokio::test(start_paused = true)]
    async fn known_tokens_and_sources_come_before_unknown_sources() {
        let limiter = LookupRateLimiter::new(10.0, 1);
        let address = |n: usize| format!("192.0.2.{}", n % 200);
        let many = all(&limiter, (0..1000).map(|n| new(LookupPriority::UnknownSource, &address(n))));
        tokio::time::sleep(Duration::from_secs(1)).await;
        for priority in [LookupPriority::KnownToken, LookupPriority::KnownSource] {
            for _ in 0..10 {
                let waited = time(&limiter, new(priority, "192.0.2.1")).await.unwrap();
                assert!(waited <= 0.41, "{priority:?} {waited}");
            }
        }
        // Unknown sources do not wait forever.
        drop(many);
        let known = all(&limiter, (0..1000).map(|_| new(LookupPriority::KnownToken, "192.0.2.1")));
        tokio::time::sleep(Duration::from_secs(1)).await;
        for priority in [LookupPriority::UnknownSource, LookupPriority::KnownSource] {
            let waited = time(&limiter, new(priority, "198.51.100.1")).await.unwrap();
            assert!(waited <= 0.41, "{priority:?} {waited}");
        }
        drop(known);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_that_gives_up_takes_nothing() {
        let limiter = LookupRateLimiter::new(1.0, 1);
        assert_eq!(time(&limiter, NEW).await, Some(0.0));
        let gone = all(&limiter, (0..15).map(|_| NEW));
        tokio::task::yield_now().await;
        assert_eq!(limiter.state.lock().queue.len(), 15);
        drop(gone);
        let waited = time(&limiter, NEW).await.unwrap();
        assert!((0.9..=1.1).contains(&waited), "{waited}");
    }

    #[tokio::test(start_paused = true)]
    async fn extreme_settings_neither_panic_nor_wait_for_ever() {
        for (rate, burst) in [(f64::MIN_POSITIVE, u32::MAX), (f64::MAX, 1), (1e-300, 1), (1.0, 0)] {
            let limiter = LookupRateLimiter::new(rate, burst);
            for _ in 0..3 {
                time(&limiter, NEW).await;
            }
        }
    }
}
