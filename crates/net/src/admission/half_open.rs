//! Bounds the number of unauthenticated connections, so that none of them blocks others for long.
//!
//! Each connection holds a place until it is authenticated or ends. A listener has a number of places that is
//! enough in quiet times. If all of them are taken, a newcomer gets the place of a connection that has held
//! its own for long enough ([`Patience`]), and there are more places as long as no connection has.
//! Connections that say nothing are thereby held for less time the quicker they come, while a handshake that
//! has begun keeps the time that it needs over a slow link.
//!
//! More places are given out only while the processor keeps up with the connections that have something to
//! say. A thousand agents that reconnect at once all send the start of a handshake: if all were let in at
//! once, each handshake would take as long as all of them.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::scheduler::AdmissionScheduler;
use crate::{
    flaw::{Flaw, flawed},
    sync::{Mutex, Notify},
};

/// While the processor does not keep up, a newcomer without a place looks again after this time, or as soon
/// as a place is free.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long a connection holds its place before another one may take it.
///
/// Silent connections lose theirs first, then those that speak HTTP, then those from known networks, then
/// handshakes; in each of these groups the oldest one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// One that has sent nothing. The first bytes of a client follow the connection at once, unless they are
    /// lost.
    pub silent: Duration,
    /// A TLS or WebSocket handshake, from its first byte on. When all places are taken and there are fewer
    /// of them than this time needs, the time is shorter: see `HalfOpen::new`.
    pub opening: Duration,
    /// One that speaks HTTP, from then on, or whose handshake took many steps of the scheduler. If this were
    /// shorter, then in a storm of reconnects connections would lose their places while their requests wait
    /// for the processor, for at worst a millisecond each.
    pub speaking: Duration,
    /// One from a network from which a client was authenticated before, unless it does a handshake. While
    /// there are no more places, the time is `speaking`: behind a proxy, all connections may be known.
    pub known: Duration,
}

impl Patience {
    /// For a listener that authenticates its clients.
    pub const USUAL: Self = Self {
        silent: Duration::from_secs(1),
        // Ten round trips of half a second.
        opening: Duration::from_secs(5),
        speaking: Duration::from_secs(1),
        known: Duration::from_secs(5),
    };

    /// The same for all.
    pub const fn same(time: Duration) -> Self {
        Self { silent: time, opening: time, speaking: time, known: time }
    }
}

/// Whether a listener gives out more places than the usual ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum More {
    Yes,
    /// The processor does not keep up.
    NotNow,
    /// All places are taken.
    No,
}

/// What the owner of a place does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It has sent nothing.
    Silent,
    /// It has begun a handshake.
    Opening,
    /// It has begun a handshake that keeps the processor busy.
    Busy,
    /// It speaks HTTP.
    Speaking,
}

/// The connections that have the same time, in the order in which they lose their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    Silent,
    Speaking,
    Known,
    Opening,
}

const GROUPS: usize = 4;

impl Group {
    fn of(stage: Stage, is_known: bool) -> Self {
        match stage {
            Stage::Opening => Self::Opening,
            _ if is_known => Self::Known,
            Stage::Silent => Self::Silent,
            Stage::Busy | Stage::Speaking => Self::Speaking,
        }
    }
}

/// The places of a listener.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    /// In quiet times.
    usual: usize,
    /// While connections come quickly.
    most: usize,
    patience: Patience,
    /// [`Patience::opening`] when all places are taken.
    opening_at_most: Duration,
    scheduler: Arc<AdmissionScheduler>,
    places: Mutex<Places>,
    /// A place is free, or its time has become shorter. Only the listener waits for it.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Places {
    next: u64,
    /// At most [`HalfOpen::most`].
    taken: HashMap<u64, Held>,
    /// The same places by age.
    groups: [BTreeSet<(Instant, u64)>; GROUPS],
}

#[derive(Debug)]
struct Held {
    group: Group,
    since: Instant,
    is_known: bool,
    lost: Arc<Notify>,
}

impl Places {
    fn add(&mut self, number: u64, held: Held) {
        self.groups[held.group as usize].insert((held.since, number));
        self.taken.insert(number, held);
    }

    fn remove(&mut self, number: u64) -> Option<Held> {
        let held = self.taken.remove(&number)?;
        self.groups[held.group as usize].remove(&(held.since, number));
        Some(held)
    }

    /// Returns the place that is lost first at `now`.
    ///
    /// # Errors
    /// When the first one may be lost, if none may yet; `None`: none is taken.
    fn replaceable(&self, times: [Duration; GROUPS], now: Instant) -> Result<u64, Option<Instant>> {
        let mut next: Option<Instant> = None;
        for (group, time) in self.groups.iter().zip(times) {
            if let Some((since, number)) = group.first() {
                let at = *since + time;
                if at <= now {
                    return Ok(*number);
                }
                next = Some(next.map_or(at, |next| next.min(at)));
            }
        }
        Err(next)
    }
}

/// A place; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    number: u64,
    lost: Arc<Notify>,
    of: Arc<HalfOpen>,
}

impl HalfOpen {
    /// With `usual` places, and up to `most` while connections come quickly. `scheduler` knows which networks
    /// are known, and whether the processor keeps up.
    ///
    /// If `most` is not as many times `usual` as handshakes have more time than connections that speak, then
    /// stalled handshakes could take all places for so long that fewer connections were let in than without
    /// any additional places. Handshakes have less time then.
    pub(crate) fn new(
        usual: usize,
        most: usize,
        patience: Patience,
        scheduler: Arc<AdmissionScheduler>,
    ) -> Arc<Self> {
        let most = most.max(usual);
        let growth = u32::try_from(most / usual.max(1)).unwrap_or(u32::MAX);
        Arc::new(Self {
            usual,
            most,
            patience,
            opening_at_most: patience.speaking.saturating_mul(growth).min(patience.opening),
            scheduler,
            places: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Returns the time of each [`Group`], in their order.
    fn times(&self, more: More) -> [Duration; GROUPS] {
        let Patience { silent, opening, speaking, known } = self.patience;
        match more {
            More::Yes => [silent, speaking, known, opening],
            More::NotNow => [silent, speaking, known.min(speaking), opening],
            More::No => [silent, speaking, known.min(speaking), self.opening_at_most],
        }
    }

    /// Takes a place for a connection that has sent nothing yet. Waits while there is none. Calls `evicted`
    /// for a connection that loses its place to this one. `address` is the peer's, if it has one.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn enter(self: &Arc<Self>, address: Option<IpAddr>, evicted: impl Fn()) -> Place {
        let is_known = self.scheduler.trusts(address);
        loop {
            let again = match self.try_enter(is_known, &evicted) {
                Ok(place) => return place,
                Err(again) => again,
            };
            // Then a place is free, or one may be lost, or the processor may keep up again.
            let _ = tokio::time::timeout_at(again, self.changed.notified()).await;
        }
    }

    /// # Errors
    /// When to look again.
    fn try_enter(self: &Arc<Self>, is_known: bool, evicted: impl Fn()) -> Result<Place, Instant> {
        let now = Instant::now();
        let mut places = self.places.lock();
        let taken = places.taken.len();
        let loser = if taken < self.usual {
            None
        } else {
            let more = match taken < self.most {
                true if self.scheduler.is_behind() => More::NotNow,
                true => More::Yes,
                false => More::No,
            };
            match (places.replaceable(self.times(more), now), more) {
                (Ok(loser), _) => Some(loser),
                // If there is no place at all, there is none to wait for.
                (Err(_), More::Yes) | (Err(None), _) => None,
                (Err(Some(at)), More::NotNow) => return Err(at.min(now + LOOK_AGAIN)),
                (Err(Some(at)), More::No) => return Err(at),
            }
        };
        if let Some(loser) = loser.and_then(|number| places.remove(number)) {
            loser.lost.notify_one();
            evicted();
        }
        let (number, lost) = (places.next, Arc::<Notify>::default());
        places.next += 1;
        let group = Group::of(Stage::Silent, is_known);
        places.add(number, Held { group, since: now, is_known, lost: Arc::clone(&lost) });
        Ok(Place { number, lost, of: Arc::clone(self) })
    }
}

impl Place {
    /// The connection has reached a later stage. Its time begins again, except in [`Stage::Busy`]. Has no
    /// effect if the place is lost.
    pub(crate) fn reached(&self, stage: Stage) {
        let mut places = self.of.places.lock();
        let Some(held) = places.taken.get(&self.number) else { return };
        let group = Group::of(stage, held.is_known);
        if stage == Stage::Busy && held.group == group {
            return;
        }
        if let Some(held) = places.remove(self.number) {
            let since = if stage == Stage::Busy { held.since } else { Instant::now() };
            places.add(self.number, Held { group, since, ..held });
        }
        drop(places);
        self.of.changed.notify_one();
    }

    /// Resolves when the place has gone to another connection.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn lost(&self) {
        self.lost.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.places.lock().remove(self.number);
        if flawed(Flaw::NotifyOnlyWaiting) {
            return self.of.changed.notify_waiters();
        }
        self.of.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::{Context, Poll, Waker},
    };

    use tokio::{sync::mpsc, task::JoinSet};

    use super::*;

    const USUAL: Patience = Patience::USUAL;
    const KNOWN: &str = "192.0.2.1";
    const UNKNOWN: &str = "198.51.100.1";

    /// Places, and how many connections have lost theirs.
    struct Counted(Arc<HalfOpen>, AtomicUsize);

    impl Counted {
        fn new(usual: usize, most: usize, patience: Patience) -> Self {
            let scheduler = AdmissionScheduler::new(1);
            scheduler.join(Some(KNOWN.parse().unwrap())).known();
            Self(HalfOpen::new(usual, most, patience, scheduler), AtomicUsize::new(0))
        }

        async fn enter(&self, address: &str) -> Place {
            let evicted = || {
                self.1.fetch_add(1, Ordering::Relaxed);
            };
            self.0.enter(Some(address.parse().unwrap()), evicted).await
        }

        fn evicted(&self) -> usize {
            self.1.load(Ordering::Relaxed)
        }

        fn taken(&self) -> usize {
            let places = self.0.places.lock();
            assert_eq!(places.groups.iter().map(BTreeSet::len).sum::<usize>(), places.taken.len());
            places.taken.len()
        }
    }

    fn is_lost(place: &Place) -> bool {
        futures_util::FutureExt::now_or_never(place.lost()).is_some()
    }

    async fn after(time: Duration) {
        tokio::time::sleep(time).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_waits_for_a_free_place_or_takes_the_oldest() {
        let time = Duration::from_secs(1);
        let places = Counted::new(2, 2, Patience::same(time));
        let enter = || places.enter(UNKNOWN);
        let begun = Instant::now();
        let (first, second) = (enter().await, enter().await);
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // A connection ends: none is evicted.
        let (third, ()) = tokio::join!(enter(), async {
            after(time / 2).await;
            drop(second);
        });
        assert_eq!((begun.elapsed(), places.evicted()), (time / 2, 0));
        // None ends: the oldest loses its place once it has had it for long enough.
        let fourth = enter().await;
        assert_eq!((begun.elapsed(), places.evicted()), (time, 1));
        first.lost().await;
        // Dropping a place that was lost frees no other.
        drop(first);
        let fifth = enter().await;
        assert_eq!(begun.elapsed(), time + time / 2);
        third.lost().await;
        drop((third, fourth, fifth));
        assert_eq!(places.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn without_patience_a_newcomer_takes_the_oldest_place_at_once() {
        let places = Counted::new(1, 1, Patience::same(Duration::ZERO));
        let begun = Instant::now();
        let first = places.enter(UNKNOWN).await;
        let _second = places.enter(KNOWN).await;
        assert!(is_lost(&first) && begun.elapsed() == Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn places_grow_only_until_the_oldest_has_had_its_time() {
        let places = Counted::new(2, 4, USUAL);
        let first = places.enter(UNKNOWN).await;
        let _more = [places.enter(UNKNOWN).await, places.enter(UNKNOWN).await];
        assert_eq!((places.taken(), places.evicted()), (3, 0));
        after(USUAL.silent).await;
        let _next = places.enter(UNKNOWN).await;
        assert_eq!((places.taken(), places.evicted()), (3, 1));
        assert!(is_lost(&first));
    }

    #[tokio::test(start_paused = true)]
    async fn handshakes_and_known_networks_keep_their_places_for_five_seconds() {
        let places = Counted::new(1, 8, USUAL);
        let begun = Instant::now();
        let handshake = places.enter(UNKNOWN).await;
        handshake.reached(Stage::Opening);
        let known = places.enter(KNOWN).await;
        let speaking = places.enter(UNKNOWN).await;
        speaking.reached(Stage::Speaking);
        let silent = places.enter(UNKNOWN).await;
        after(USUAL.silent).await;
        // Silent ones first, then those that speak.
        let _newer = places.enter(UNKNOWN).await;
        assert!(is_lost(&silent) && !is_lost(&speaking));
        let _newer = places.enter(UNKNOWN).await;
        assert!(is_lost(&speaking));
        // From then on each newcomer is the one that the next replaces, or gets a place of its own.
        while begun.elapsed() < USUAL.opening {
            assert!(!is_lost(&handshake) && !is_lost(&known), "after {:?}", begun.elapsed());
            drop(places.enter(UNKNOWN).await);
            after(USUAL.silent / 2).await;
        }
        let _newer = [places.enter(UNKNOWN).await, places.enter(UNKNOWN).await];
        assert!(is_lost(&known) && is_lost(&handshake));
    }

    #[tokio::test(start_paused = true)]
    async fn a_handshake_is_safe_for_five_seconds_even_if_there_are_no_more_places() {
        let places = Counted::new(1, 6, USUAL);
        let begun = Instant::now();
        let mut handshakes = Vec::new();
        for _ in 0..5 {
            let place = places.enter(UNKNOWN).await;
            place.reached(Stage::Opening);
            handshakes.push(place);
        }
        // The sixth place goes from one silent connection to the next.
        let mut silent = places.enter(UNKNOWN).await;
        for n in 1..=3 {
            let next = places.enter(UNKNOWN).await;
            assert_eq!(begun.elapsed(), USUAL.silent * n);
            assert!(is_lost(&silent));
            silent = next;
        }
        silent.reached(Stage::Opening);
        // All are handshakes: newcomers wait for the oldest, from known networks too.
        let mut newer = Vec::new();
        for address in [KNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN] {
            let place = places.enter(address).await;
            assert_eq!(begun.elapsed(), USUAL.opening);
            place.reached(Stage::Opening);
            newer.push(place);
        }
        assert!(handshakes.iter().all(is_lost) && !is_lost(&silent));
        // A handshake that keeps the processor busy has less time, also if a newcomer waits already.
        let half = USUAL.silent / 2;
        let (_next, ()) = tokio::join!(places.enter(UNKNOWN), async {
            after(half).await;
            silent.reached(Stage::Busy);
        });
        assert_eq!(begun.elapsed(), USUAL.opening + half);
        assert!(is_lost(&silent) && !newer.iter().any(is_lost));
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_handshakes_let_in_no_fewer_connections_than_there_are_usual_places_a_second() {
        for (most, expected) in [(2, 1), (5, 2), (8, 4), (10, 5), (16, 5)] {
            let places = Counted::new(2, most, USUAL);
            let begun = Instant::now();
            let mut handshakes = Vec::new();
            while begun.elapsed() == Duration::ZERO {
                let place = places.enter(UNKNOWN).await;
                place.reached(Stage::Opening);
                handshakes.push(place);
            }
            assert_eq!(handshakes.len(), most + 1);
            assert_eq!(begun.elapsed(), Duration::from_secs(expected), "{most} places");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn there_are_no_more_places_while_the_processor_does_not_keep_up() {
        let places = Counted::new(2, 100, USUAL);
        let begun = Instant::now();
        // One has the slot, and a hundred wait for it.
        let scheduler = &places.0.scheduler;
        let mut served = scheduler.join(None);
        served.begin().await;
        let mut waiting: Vec<_> = (0..100).map(|_| scheduler.join(None)).collect();
        for permit in &mut waiting {
            assert!(permit.poll(&mut Context::from_waker(Waker::noop()), |_| Poll::Ready(())).is_pending());
        }
        let first = [places.enter(UNKNOWN).await, places.enter(UNKNOWN).await];
        first.iter().for_each(|place| place.reached(Stage::Opening));
        let (_third, ()) = tokio::join!(places.enter(UNKNOWN), async {
            after(Duration::from_secs(2)).await;
            waiting.clear();
        });
        let waited = begun.elapsed();
        assert!(waited >= Duration::from_secs(2) && waited <= Duration::from_secs(2) + LOOK_AGAIN);
        assert_eq!(places.taken(), 3);
    }

    /// A connection that comes in.
    enum Comes {
        Silent,
        Good,
    }

    /// 1,500 silent connections a second, and clients that need 500 ms for a round trip: one for TLS, one for
    /// the first request.
    #[tokio::test(start_paused = true)]
    async fn silent_connections_do_not_keep_clients_over_slow_links_waiting() {
        const ROUND_TRIP: Duration = Duration::from_millis(500);
        let places = Arc::new(Counted::new(1_024, 8 * 1_024, USUAL));
        // What has connected and is not accepted yet.
        let (connect, mut accept) = mpsc::channel::<(Comes, Instant)>(16 * 1_024);
        let flood = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(2));
            for n in 0..5_000 {
                ticks.tick().await;
                // Three in each 2 ms; and five good ones in each second.
                for _ in 0..3 {
                    connect.send((Comes::Silent, Instant::now())).await.unwrap();
                }
                if n % 100 == 0 {
                    connect.send((Comes::Good, Instant::now())).await.unwrap();
                }
            }
        });
        let (mut good, mut most, mut slowest) = (JoinSet::new(), 0, Duration::ZERO);
        while let Some((comes, since)) = accept.recv().await {
            let place = places.enter(UNKNOWN).await;
            slowest = slowest.max(since.elapsed());
            most = most.max(places.taken());
            match comes {
                Comes::Silent => {
                    tokio::spawn(async move {
                        tokio::time::timeout(Duration::from_secs(5), place.lost()).await.is_ok()
                    });
                }
                Comes::Good => {
                    good.spawn(async move {
                        let opened = async {
                            place.reached(Stage::Opening);
                            after(ROUND_TRIP).await;
                            place.reached(Stage::Speaking);
                            after(ROUND_TRIP).await;
                        };
                        tokio::select! {
                            biased;
                            () = opened => true,
                            () = place.lost() => false,
                        }
                    });
                }
            }
        }
        flood.await.unwrap();
        let opened = good.join_all().await;
        assert!(opened.len() == 50 && opened.iter().all(|opened| *opened), "{opened:?}");
        assert_eq!(slowest, Duration::ZERO);
        // Each is held for a second.
        assert!((1_500..1_600).contains(&most), "{most}");
        assert!(places.evicted() > 12_000, "{}", places.evicted());
    }
}
