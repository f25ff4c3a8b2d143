//! How often GitLab is asked: a bucket that refills evenly, with a way past the queue for those already let
//! in, and a queue in which nobody is kept waiting by how many others send.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};

use crate::{Standing, Urgency};

/// No more wait at a time, whatever the rate.
const MOST_WAITING: usize = 10_000;
/// The queue is looked at again after this time at the latest: who waits may have given up.
const LOOK: Duration = Duration::from_secs(1);

/// A bucket of `burst` that gets `per_second` back.
///
/// Who asks again about an agent that is connected does not queue behind strangers: otherwise whoever can
/// reach the agent listener could, with made-up tokens, keep every connected agent from being known any
/// longer. What it takes counts for both, so that strangers pay.
///
/// All others wait in lanes by their [`Standing`]: each may be passed by, and none for ever. In a lane those
/// addresses follow each other of which somebody waits, and of each address the oldest. So whoever sends
/// thousands from one address waits for himself, and who comes from elsewhere for a turn or two. When too
/// many wait, then it is one of the largest crowd who does not any longer.
#[derive(Debug)]
pub(super) struct Pace(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Seconds between two.
    interval: f64,
    /// What may be taken ahead, in seconds.
    ahead: f64,
    epoch: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When the next one is due if all were evenly spaced, in seconds since `epoch`: for renewals, and for
    /// all.
    next: [f64; 2],
    queue: Queue,
    /// Whether somebody hands out what comes back.
    is_served: bool,
}

/// Why nobody may be asked for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy {
    /// How many wait.
    pub(super) waiting: usize,
    /// Where most of them come from, and how many.
    pub(super) most: Option<(IpAddr, usize)>,
}

impl Pace {
    pub(super) fn new(per_second: f64, burst: u32) -> Self {
        let interval = per_second.max(f64::MIN_POSITIVE).recip();
        let ahead = interval * f64::from(burst.saturating_sub(1));
        Self(Arc::new(Shared { interval, ahead, epoch: Instant::now(), state: Mutex::default() }))
    }

    /// Waits for its turn for as long as `patience` at most. No more wait than the rate lets through in that
    /// time: beyond it somebody is refused at once, this one or another.
    ///
    /// # Errors
    /// [`Busy`]: nothing was taken.
    pub(super) async fn wait(&self, urgency: Urgency, patience: Duration) -> Result<(), Busy> {
        let turn = match urgency {
            Urgency::Renewal => {
                let wait = self.0.reserve(patience)?;
                tokio::time::sleep(wait).await;
                return Ok(());
            }
            Urgency::New { from, standing } => self.0.line_up((standing, from), patience)?,
        };
        let Some(turn) = turn else { return Ok(()) };
        if let Ok(Ok(())) = tokio::time::timeout(patience, turn).await {
            return Ok(());
        }
        let mut state = self.0.state();
        state.queue.forget_gone();
        Err(state.queue.busy())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// Takes one for a renewal, and returns how long it has to wait.
    fn reserve(&self, patience: Duration) -> Result<Duration, Busy> {
        let now = self.now();
        let mut state = self.state();
        let [renewals, all] = state.next.map(|next| next.max(now));
        let wait = Duration::try_from_secs_f64((renewals - self.ahead - now).max(0.0));
        match wait {
            Ok(wait) if wait <= patience => {
                state.next = [renewals + self.interval, all + self.interval];
                Ok(wait)
            }
            _ => Err(state.queue.busy()),
        }
    }

    /// Takes one if it can be had now; else returns what tells when.
    fn line_up(
        self: &Arc<Self>,
        crowd: Crowd,
        patience: Duration,
    ) -> Result<Option<oneshot::Receiver<()>>, Busy> {
        let mut state = self.state();
        if state.queue.waiting == 0 && self.take(&mut state).is_none() {
            return Ok(None);
        }
        let most = (patience.as_secs_f64() / self.interval) as usize;
        let turn = state.queue.push(crowd, most.clamp(1, MOST_WAITING))?;
        if !state.is_served {
            state.is_served = true;
            tokio::spawn(Arc::clone(self).serve());
        }
        Ok(Some(turn))
    }

    /// Takes one; if there is none, returns when there may be, in seconds.
    fn take(&self, state: &mut State) -> Option<f64> {
        let now = self.now();
        let all = state.next[1].max(now);
        let wait = all - self.ahead - now;
        // No timer is as exact as numbers are.
        if wait > 1e-6 {
            return Some(wait);
        }
        state.next[1] = all + self.interval;
        None
    }

    /// Hands out what comes back as long as somebody waits.
    async fn serve(self: Arc<Self>) {
        loop {
            let wait = {
                let mut state = self.state();
                state.queue.forget_gone();
                loop {
                    if state.queue.waiting == 0 {
                        state.is_served = false;
                        return;
                    }
                    if let Some(wait) = self.take(&mut state) {
                        break wait;
                    }
                    // Who was there a moment ago: nobody leaves while the state is held, but by giving up.
                    while let Some(next) = state.queue.pop() {
                        if next.send(()).is_ok() {
                            break;
                        }
                    }
                }
            };
            tokio::time::sleep(Duration::try_from_secs_f64(wait).map_or(LOOK, |wait| wait.min(LOOK))).await;
        }
    }
}

/// Those of one standing who come from one address.
type Crowd = (Standing, Option<IpAddr>);

/// Who waits.
#[derive(Debug, Default)]
struct Queue {
    crowds: HashMap<Crowd, VecDeque<oneshot::Sender<()>>>,
    /// Of each standing, the addresses in the order in which they have their turns.
    lanes: [VecDeque<Option<IpAddr>>; Standing::ALL.len()],
    /// The same crowds by size.
    sizes: BTreeSet<(usize, Crowd)>,
    waiting: usize,
    /// How many have had their turn.
    served: usize,
}

impl Queue {
    /// Adds one of this crowd. When `most` wait already, the last that came of the largest crowd leaves
    /// instead, or this one does not come in: of equal crowds those stay that are there.
    fn push(&mut self, crowd: Crowd, most: usize) -> Result<oneshot::Receiver<()>, Busy> {
        if self.waiting >= most {
            self.forget_gone();
        }
        if self.waiting >= most {
            let size = self.crowds.get(&crowd).map_or(0, VecDeque::len);
            let largest = self.sizes.last().copied();
            match largest {
                Some((other_size, other)) if (other_size, other.0) > (size + 1, crowd.0) => {
                    self.change(other, VecDeque::pop_back);
                }
                _ => return Err(self.busy()),
            }
        }
        let (turn, receiver) = oneshot::channel();
        if !self.crowds.contains_key(&crowd) {
            self.lanes[crowd.0 as usize].push_back(crowd.1);
        }
        self.change(crowd, |waiting| waiting.push_back(turn));
        Ok(receiver)
    }

    /// Changes one crowd; one of which nobody waits is no crowd.
    fn change<T>(&mut self, crowd: Crowd, change: impl FnOnce(&mut VecDeque<oneshot::Sender<()>>) -> T) -> T {
        let waiting = self.crowds.entry(crowd).or_default();
        let before = waiting.len();
        let changed = change(waiting);
        let after = waiting.len();
        self.sizes.remove(&(before, crowd));
        if after > 0 {
            self.sizes.insert((after, crowd));
        } else {
            self.crowds.remove(&crowd);
            self.lanes[crowd.0 as usize].retain(|from| *from != crowd.1);
        }
        self.waiting = self.waiting + after - before;
        changed
    }

    /// Takes out who comes next.
    fn pop(&mut self) -> Option<oneshot::Sender<()>> {
        use Standing::{Befriended, Returning, Stranger};
        let order = match self.served % 4 {
            0 | 1 => [Returning, Befriended, Stranger],
            2 => [Befriended, Stranger, Returning],
            _ => [Stranger, Befriended, Returning],
        };
        let standing = order.into_iter().find(|standing| !self.lanes[*standing as usize].is_empty())?;
        let lane = &mut self.lanes[standing as usize];
        // Its next one comes after all others of its lane.
        lane.rotate_left(1);
        let from = *lane.back()?;
        self.served = self.served.wrapping_add(1);
        self.change((standing, from), VecDeque::pop_front)
    }

    /// Forgets who waits no longer.
    fn forget_gone(&mut self) {
        let with_gone: Vec<_> = self
            .crowds
            .iter()
            .filter(|(_, waiting)| waiting.iter().any(oneshot::Sender::is_closed))
            .map(|(crowd, _)| *crowd)
            .collect();
        for crowd in with_gone {
            self.change(crowd, |waiting| waiting.retain(|turn| !turn.is_closed()));
        }
    }

    fn busy(&self) -> Busy {
        let most = self.sizes.last().and_then(|(size, (_, from))| Some(((*from)?, *size)));
        Busy { waiting: self.waiting, most }
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    const NEW: Urgency = Urgency::SOMEBODY;

    fn new(standing: Standing, from: &str) -> Urgency {
        Urgency::New { from: Some(from.parse().unwrap()), standing }
    }

    async fn time(pace: &Pace, urgency: Urgency) -> Option<f64> {
        let begun = Instant::now();
        pace.wait(urgency, PATIENCE).await.ok().map(|()| begun.elapsed().as_secs_f64())
    }

    /// As many as can wait, and who they are when their turn comes.
    fn all(pace: &Arc<Pace>, who: impl Iterator<Item = Urgency>) -> JoinSet<(f64, usize, bool)> {
        let mut all = JoinSet::new();
        for (n, urgency) in who.enumerate() {
            let pace = Arc::clone(pace);
            all.spawn(async move {
                let begun = Instant::now();
                let passed = pace.wait(urgency, PATIENCE).await.is_ok();
                (begun.elapsed().as_secs_f64(), n, passed)
            });
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_then_one_per_interval() {
        let pace = Pace::new(10.0, 50);
        for _ in 0..50 {
            assert_eq!(time(&pace, NEW).await, Some(0.0));
        }
        for _ in 0..20 {
            let waited = time(&pace, NEW).await.unwrap();
            assert!((0.09..0.11).contains(&waited), "{waited}");
        }
        // Refilled, and not beyond its size.
        tokio::time::advance(Duration::from_secs(1000)).await;
        for _ in 0..50 {
            assert_eq!(time(&pace, NEW).await, Some(0.0));
        }
        assert!(time(&pace, NEW).await.unwrap() > 0.09);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_wait_than_pass_in_the_time_that_one_may_wait() {
        let pace = Arc::new(Pace::new(10.0, 50));
        let passed = all(&pace, (0..1000).map(|_| NEW)).join_all().await;
        let (passed, refused): (Vec<_>, Vec<_>) = passed.into_iter().partition(|(.., passed)| *passed);
        assert!((249..=251).contains(&passed.len()), "{}", passed.len());
        // But for the last, whose turn comes when its patience ends.
        assert!(refused.iter().filter(|(waited, ..)| *waited > 0.0).count() <= 1);
        // All of them are over.
        tokio::time::sleep(LOOK).await;
        let state = pace.0.state();
        assert!(!state.is_served && state.queue.waiting == 0);
        assert!(state.queue.crowds.is_empty() && state.queue.sizes.is_empty());
        assert!(state.queue.lanes.iter().all(VecDeque::is_empty));
    }

    #[tokio::test(start_paused = true)]
    async fn renewals_pass_a_queue_of_strangers_who_pay_for_them() {
        let pace = Arc::new(Pace::new(10.0, 5));
        let strangers = all(&pace, (0..1000).map(|_| NEW));
        tokio::task::yield_now().await;
        for _ in 0..5 {
            assert_eq!(time(&pace, Urgency::Renewal).await, Some(0.0));
        }
        assert!(time(&pace, Urgency::Renewal).await.unwrap() > 0.09);
        let strangers = strangers.join_all().await;
        let last = strangers.iter().filter(|(.., passed)| *passed).map(|(waited, ..)| *waited);
        assert!(last.fold(0.0, f64::max) > 19.5);
        assert!((194..=200).contains(&strangers.iter().filter(|(.., passed)| *passed).count()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_keeps_nobody_from_elsewhere_waiting() {
        let pace = Arc::new(Pace::new(10.0, 5));
        let crowd = all(&pace, (0..1000).map(|_| new(Standing::Stranger, "192.0.2.1")));
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Full, and still somebody comes in.
        for from in ["198.51.100.1", "198.51.100.2"] {
            let waited = time(&pace, new(Standing::Stranger, from)).await.unwrap();
            assert!(waited <= 0.31, "{waited}");
        }
        let more = all(&pace, (0..100).map(|_| new(Standing::Stranger, "192.0.2.1")));
        tokio::task::yield_now().await;
        let busy = pace.wait(new(Standing::Stranger, "192.0.2.1"), PATIENCE).await.unwrap_err();
        assert_eq!(busy.most.unwrap().0, "192.0.2.1".parse::<IpAddr>().unwrap());
        assert!(busy.most.unwrap().1 == busy.waiting && busy.waiting == 200, "{busy:?}");
        drop((crowd, more));
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_let_in_before_comes_before_strangers_wherever_these_come_from() {
        let pace = Arc::new(Pace::new(10.0, 1));
        let address = |n: usize| format!("192.0.2.{}", n % 200);
        let crowd = all(&pace, (0..1000).map(|n| new(Standing::Stranger, &address(n))));
        tokio::time::sleep(Duration::from_secs(1)).await;
        for standing in [Standing::Returning, Standing::Befriended] {
            for _ in 0..10 {
                let waited = time(&pace, new(standing, "192.0.2.1")).await.unwrap();
                assert!(waited <= 0.41, "{standing:?} {waited}");
            }
        }
        // And strangers are not kept waiting for ever by those.
        drop(crowd);
        let returning = all(&pace, (0..1000).map(|_| new(Standing::Returning, "192.0.2.1")));
        tokio::time::sleep(Duration::from_secs(1)).await;
        for standing in [Standing::Stranger, Standing::Befriended] {
            let waited = time(&pace, new(standing, "198.51.100.1")).await.unwrap();
            assert!(waited <= 0.41, "{standing:?} {waited}");
        }
        drop(returning);
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_takes_nothing() {
        let pace = Arc::new(Pace::new(1.0, 1));
        assert_eq!(time(&pace, NEW).await, Some(0.0));
        let gone = all(&pace, (0..15).map(|_| NEW));
        tokio::task::yield_now().await;
        assert_eq!(pace.0.state().queue.waiting, 15);
        drop(gone);
        let waited = time(&pace, NEW).await.unwrap();
        assert!((0.9..=1.1).contains(&waited), "{waited}");
    }

    #[tokio::test(start_paused = true)]
    async fn extreme_settings_neither_panic_nor_wait_for_ever() {
        for (rate, burst) in [(f64::MIN_POSITIVE, u32::MAX), (f64::MAX, 1), (1e-300, 1), (1.0, 0)] {
            let pace = Pace::new(rate, burst);
            for _ in 0..3 {
                time(&pace, NEW).await;
            }
        }
    }
}
