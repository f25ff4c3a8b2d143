//! AdmissionScheduler of connections that have not shown yet who they are: few at a time, and first those of which there
//! are few.
//!
//! A thread serves whatever is ready in the order in which it became ready. A thousand connections that
//! always have something to say are a thousand turns before anybody else's. Here all of them together are as
//! much in the way as a few connections would be, and a newcomer passes those that have used the turns of a
//! newcomer and shown nothing.
//!
//! Two orders take turns, since each has an attack that is made for it:
//!
//! - Who has had the fewest turns, and of those the last that came. A newcomer needs one or two; a thousand
//!   connections that were made before it and are flooding have had theirs. If all that come can be served,
//!   then it makes no difference who of them is first; if not, then the last is served as if nobody else were
//!   there, where first come, first served would let each of them wait until it is too late for it. But a
//!   thousand that come at once are all newer than who came just before.
//! - Who comes from where the fewest newcomers are, and of those the first that came. Whoever sends a
//!   thousand from one address is in the way of those who come from there, and keeps nobody else waiting for
//!   more than a turn or two each time. Of equal crowds the past tells: one from where somebody was let in
//!   comes before those from where nobody was. But a crowd behind one proxy may mean well, and those with
//!   many addresses may not.
//!
//! Who has said nothing yet asks for no turn ([`Stream::speaks`]).
//!
//! A turn is over, for the next, only after its thread has done what else is ready, and has looked at what
//! has come meanwhile. If it were over at once, then all who are ready on one thread would find it free, one
//! after the other, and as long as a thread has something to do, it looks at its sockets only once in 61
//! steps. One that took long, such as a step of a TLS handshake, is followed by about as much time for
//! others, in rounds of what they have to do: a request passes through several tasks, one in each round, and
//! would meet a turn before each of them. So is each of one that goes on and on.
//!
//! [`Stream::speaks`]: crate::io::Stream::speaks

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    future::{Future as _, poll_fn},
    mem,
    net::IpAddr,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use tokio::time::Instant;

use crate::peers::{Recent, network};

/// Who has had this many turns and has not shown who it is comes after those that have had fewer; and so on.
/// Above what an agent needs for TLS, WebSocket and its first request.
const OF_A_NEWCOMER: u32 = 16;

/// A crowd of fewer than this is none: one who means well has several connections.
const CROWD: u32 = 8;

/// After a turn others have a round, and one more for each of these that it took, and for each
/// [`OF_A_NEWCOMER`] turns that the same one had before; until all of them together are over, and at most
/// [`MOST_ROUNDS`] more.
const ROUND: Duration = Duration::from_micros(20);
/// A millisecond and a bit.
const MOST_ROUNDS: u32 = 64;

/// The turns of a listener.
#[derive(Debug)]
pub(crate) struct AdmissionScheduler {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    joined: u64,
    /// AdmissionScheduler that are under way, or not over for others, or granted and not begun.
    taken: usize,
    /// Those who wait, with the fewest turns first.
    fewest: BTreeMap<Fewest, (Rarest, Waker)>,
    /// The same, those of the smallest crowd first.
    rarest: BTreeSet<Rarest>,
    /// Whether the last turn that somebody had waited for was for the rarest.
    was_for_rarest: bool,
    /// Those whose wait is over; at most as many as there are turns at a time.
    granted: Vec<u64>,
    /// How many from where have joined and are not known. No more than may be half-open at a time.
    crowds: HashMap<Option<IpAddr>, u32>,
    /// Where those have come from who have shown who they are.
    friends: Recent<IpAddr>,
}

/// AdmissionScheduler had before, then who is newer.
type Fewest = (u32, Reverse<u64>);
/// AdmissionScheduler had before in units of [`OF_A_NEWCOMER`]; then the rank of the crowd when the wait began; then who
/// is older. And the same one's place by turns.
type Rarest = (u32, Rank, u64, Fewest);
/// Of a crowd, as [`State::rank`] says: the smaller, the sooner.
type Rank = (u32, bool);

impl AdmissionScheduler {
    /// At most `most` turns at a time; above zero.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), state: Mutex::default() })
    }

    /// Half of the runtime's threads: the others are free for who is known.
    pub(crate) fn of_this_runtime() -> Arc<Self> {
        Self::new(tokio::runtime::Handle::current().metrics().num_workers().div_ceil(2))
    }

    /// Joins, with no turn had. `from`: where it comes from, if that is told.
    pub(crate) fn join(self: &Arc<Self>, from: Option<IpAddr>) -> Permit {
        let crowd = from.map(network);
        let number = {
            let mut state = self.state();
            *state.crowds.entry(crowd).or_default() += 1;
            state.joined += 1;
            state.joined
        };
        Permit { of: Arc::clone(self), number, crowd: Some(crowd), had: 0, waits: None, holds: false }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a turn that is over for others to the next.
    fn pass_on(&self) {
        let mut state = self.state();
        match state.next() {
            Some((number, waker)) => {
                state.granted.push(number);
                drop(state);
                waker.wake();
            }
            None => state.taken -= 1,
        }
    }
}

impl State {
    /// Takes out who comes next among those who wait.
    fn next(&mut self) -> Option<(u64, Waker)> {
        let place = if self.was_for_rarest {
            self.fewest.first_key_value().map(|(place, _)| *place)
        } else {
            self.rarest.first().map(|(.., place)| *place)
        }?;
        self.was_for_rarest = !self.was_for_rarest;
        Some((place.1.0, self.leave(place)?))
    }

    /// How much of a crowd it is that comes from there, in powers of two so that within one it is the order
    /// that counts; then whether nobody was let in from there before.
    fn rank(&self, crowd: Option<IpAddr>) -> Rank {
        let size = self.crowds.get(&crowd).and_then(|size| (size / CROWD).checked_ilog2());
        (size.map_or(0, |size| size + 1), crowd.is_some_and(|address| !self.friends.has(&address)))
    }

    /// Takes out who waits at `place`.
    fn leave(&mut self, place: Fewest) -> Option<Waker> {
        let (rarest, waker) = self.fewest.remove(&place)?;
        self.rarest.remove(&rarest);
        Some(waker)
    }
}

/// The end of one turn. Of its own for each: of wakers that are the same, a thread that comes round wakes
/// one.
struct Over(Arc<AdmissionScheduler>);

impl Wake for Over {
    /// A thread has come round since the end of the turn.
    fn wake(self: Arc<Self>) {
        self.0.pass_on();
    }
}

/// What one connection has had.
#[derive(Debug)]
pub(crate) struct Permit {
    of: Arc<AdmissionScheduler>,
    /// Larger for who came later.
    number: u64,
    /// Among whom it is counted, until it is known.
    crowd: Option<Option<IpAddr>>,
    had: u32,
    /// Where it stands among those who wait.
    waits: Option<Fewest>,
    /// A turn has begun that ends with the next call.
    holds: bool,
}

impl Permit {
    /// Calls `act` in a turn, as soon as there is one; a turn ends when `act` returns.
    pub(crate) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if !mem::take(&mut self.holds) && !self.begins(cx) {
            return Poll::Pending;
        }
        self.had = self.had.saturating_add(1);
        let level = self.had / OF_A_NEWCOMER;
        let _turn = Turn { of: &self.of, begun: Instant::now(), level };
        act(cx)
    }

    /// Waits for a turn. What comes after it until the next call of [`Permit::poll`], and that call, are the
    /// turn: nothing that waits may come between.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn begin(&mut self) {
        poll_fn(|cx| {
            self.holds = self.holds || self.begins(cx);
            if self.holds { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn begins(&mut self, cx: &Context<'_>) -> bool {
        let mut state = self.of.state();
        if let Some(place) = self.waits {
            if let Some(at) = state.granted.iter().position(|granted| *granted == self.number) {
                state.granted.swap_remove(at);
                self.waits = None;
                return true;
            }
            if let Some((_, waker)) = state.fewest.get_mut(&place) {
                waker.clone_from(cx.waker());
            }
            return false;
        }
        if state.taken < self.of.most {
            state.taken += 1;
            return true;
        }
        let level = self.had / OF_A_NEWCOMER;
        let crowd = self.crowd.map_or_else(Rank::default, |crowd| state.rank(crowd));
        let place = (self.had, Reverse(self.number));
        let rarest = (level, crowd, self.number, place);
        state.fewest.insert(place, (rarest, cx.waker().clone()));
        state.rarest.insert(rarest);
        self.waits = Some(place);
        false
    }

    /// It has shown who it is: it needs no turns any more, and where it comes from is remembered.
    pub(crate) fn known(&mut self) {
        if let Some(Some(address)) = self.crowd {
            self.of.state().friends.add(address);
        }
        self.leave();
    }

    /// Waits no longer.
    pub(crate) fn leave(&mut self) {
        if mem::take(&mut self.holds) {
            self.of.pass_on();
        }
        let (crowd, waits) = (self.crowd.take(), self.waits.take());
        if crowd.is_none() && waits.is_none() {
            return;
        }
        let mut state = self.of.state();
        if let Some(crowd) = crowd
            && let Some(size) = state.crowds.get_mut(&crowd)
        {
            *size -= 1;
            if *size == 0 {
                state.crowds.remove(&crowd);
            }
        }
        let Some(place) = waits else { return };
        if state.leave(place).is_none()
            && let Some(at) = state.granted.iter().position(|granted| *granted == self.number)
        {
            state.granted.swap_remove(at);
            drop(state);
            self.of.pass_on();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A turn under way; over when dropped, by a panic too.
struct Turn<'a> {
    of: &'a Arc<AdmissionScheduler>,
    begun: Instant,
    /// Of who has it: how often it has had more than a newcomer needs.
    level: u32,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let took = u32::try_from(self.begun.elapsed().as_micros() / ROUND.as_micros());
        let rounds = took.unwrap_or(MOST_ROUNDS).saturating_add(self.level).min(MOST_ROUNDS);
        if rounds > 0
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let of = Arc::clone(self.of);
            runtime.spawn(async move {
                let until = Instant::now() + ROUND * rounds;
                for _ in 0..=rounds {
                    tokio::task::yield_now().await;
                    // Where there is much to do, one round takes longer.
                    if Instant::now() >= until {
                        break;
                    }
                }
                of.pass_on();
            });
            return;
        }
        // Passed on once this thread has nothing else to do; outside of a runtime at once. The first poll
        // hands the waker to the runtime; nobody waits for the rest.
        let waker = Waker::from(Arc::new(Over(Arc::clone(self.of))));
        let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        rc::Rc,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A connection, and how often it was woken.
    struct Peer {
        ticket: Permit,
        woken: Arc<Woken>,
    }

    impl Peer {
        fn new(turns: &Arc<AdmissionScheduler>) -> Self {
            Self::from(turns, "192.0.2.1")
        }

        fn from(turns: &Arc<AdmissionScheduler>, address: &str) -> Self {
            Self { ticket: turns.join(Some(address.parse().unwrap())), woken: Arc::default() }
        }

        fn asks(&mut self, act: impl FnOnce()) -> bool {
            let waker = Waker::from(Arc::clone(&self.woken));
            let polled = self.ticket.poll(&mut Context::from_waker(&waker), |_| {
                act();
                Poll::Ready(())
            });
            polled.is_ready()
        }

        fn woken(&self) -> usize {
            self.woken.0.load(Ordering::Relaxed)
        }
    }

    /// Who of those that wait gets the turns, one after the other, when a turn is over.
    fn order(holder: &mut Peer, waiting: &mut [Peer]) -> Vec<usize> {
        assert!(holder.asks(|| {
            for peer in &mut *waiting {
                assert!(!peer.asks(|| {}));
            }
        }));
        let mut order = Vec::new();
        while let Some(next) = (0..waiting.len()).find(|i| !order.contains(i) && waiting[*i].woken() > 0) {
            order.push(next);
            // It is not taken from who was woken by who happens to come first.
            if let Some(other) = (0..waiting.len()).find(|i| !order.contains(i)) {
                assert!(!waiting[other].asks(|| {}));
            }
            assert!(waiting[next].asks(|| {}));
        }
        assert_eq!(holder.ticket.of.state().taken, 0);
        order
    }

    #[test]
    fn every_other_turn_is_for_who_has_had_the_fewest_and_came_last() {
        let turns = AdmissionScheduler::new(1);
        let mut holder = Peer::new(&turns);
        let mut waiting: [_; 5] = std::array::from_fn(|_| Peer::new(&turns));
        // The last of them has had one and the one before it two.
        for (peer, had) in [(4, 1), (3, 2)] {
            (0..had).for_each(|_| assert!(waiting[peer].asks(|| {})));
        }
        assert_eq!(order(&mut holder, &mut waiting), [0, 2, 1, 4, 3]);
    }

    #[test]
    fn who_has_had_more_turns_than_a_newcomer_needs_is_no_longer_the_rarest() {
        let turns = AdmissionScheduler::new(1);
        let mut holder = Peer::new(&turns);
        let mut waiting: [_; 4] = std::array::from_fn(|_| Peer::new(&turns));
        for (peer, had) in [(0, OF_A_NEWCOMER), (1, OF_A_NEWCOMER - 1)] {
            (0..had).for_each(|_| assert!(waiting[peer].asks(|| {})));
        }
        assert_eq!(order(&mut holder, &mut waiting), [1, 3, 2, 0]);
    }

    #[test]
    fn every_other_turn_is_for_who_comes_from_where_few_are() {
        const MANY: usize = 2 * CROWD as usize;
        let turns = AdmissionScheduler::new(1);
        let mut holder = Peer::from(&turns, "198.51.100.1");
        // One from elsewhere in the middle of a crowd.
        let address =
            |i| if i == MANY / 2 { "198.51.100.7" } else { ["192.0.2.1", "::ffff:192.0.2.1"][i % 2] };
        let mut waiting: Vec<_> = (0..=MANY).map(|i| Peer::from(&turns, address(i))).collect();
        assert_eq!(order(&mut holder, &mut waiting)[..4], [MANY / 2, MANY, 0, MANY - 1]);
        // A handful is not a crowd, and a crowd is not kept out by many that come from many places.
        let turns = AdmissionScheduler::new(1);
        let mut holder = Peer::new(&turns);
        let addresses =
            ["198.51.100.1", "198.51.100.2", "198.51.100.3", "192.0.2.1", "192.0.2.1", "192.0.2.1"];
        let mut waiting = addresses.map(|address| Peer::from(&turns, address));
        assert_eq!(order(&mut holder, &mut waiting), [0, 5, 1, 4, 2, 3]);
    }

    #[test]
    fn who_comes_from_where_somebody_was_let_in_is_before_strangers() {
        let turns = AdmissionScheduler::new(1);
        let mut holder = Peer::from(&turns, "198.51.100.1");
        let mut friend = Peer::from(&turns, "192.0.2.9");
        friend.ticket.known();
        let mut waiting: Vec<_> =
            (0..8).map(|i| Peer::from(&turns, &format!("192.0.2.{}", if i == 4 { 9 } else { i }))).collect();
        assert_eq!(order(&mut holder, &mut waiting)[..4], [4, 7, 0, 6]);
        // But not as a crowd. Who leaves without being known is not remembered.
        drop((waiting, friend));
        let mut crowd: Vec<_> = (0..CROWD).map(|_| Peer::from(&turns, "192.0.2.9")).collect();
        crowd.push(Peer::from(&turns, "192.0.2.1"));
        crowd.push(Peer::from(&turns, "192.0.2.9"));
        assert_eq!(order(&mut holder, &mut crowd)[..3], [8, 9, 0]);
    }

    #[test]
    fn crowd_is_who_is_not_known_yet_and_shares_a_network() {
        let turns = AdmissionScheduler::new(1);
        let size = |address: &str| {
            turns.state().crowds.get(&Some(address.parse().unwrap())).copied().unwrap_or_default()
        };
        let mut six = ["2001:db8::1", "2001:db8::ffff:0:2", "2001:db8:0:1::1"].map(|a| Peer::from(&turns, a));
        let four = ["192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"].map(|a| Peer::from(&turns, a));
        let socket = turns.join(None);
        assert_eq!([size("2001:db8::"), size("2001:db8:0:1::")], [2, 1]);
        assert_eq!([size("192.0.2.1"), size("192.0.2.2")], [2, 1]);
        // Known, and later gone: it counts once.
        six[0].ticket.leave();
        six[0].ticket.leave();
        assert_eq!(size("2001:db8::"), 1);
        drop((six, four, socket));
        assert!(turns.state().crowds.is_empty());
    }

    #[test]
    fn who_leaves_takes_no_turn_along() {
        let turns = AdmissionScheduler::new(2);
        let [mut one, mut two, mut gone, mut last, mut known] = std::array::from_fn(|_| Peer::new(&turns));
        assert!(one.asks(|| {
            assert!(two.asks(|| {
                for peer in [&mut gone, &mut known, &mut last] {
                    assert!(!peer.asks(|| {}));
                }
            }));
            assert_eq!(gone.woken(), 1);
        }));
        assert_eq!(known.woken(), 1);
        // Woken, and over before its turn; known, and in need of none.
        drop(gone);
        assert_eq!(last.woken(), 1);
        known.ticket.leave();
        assert!(last.asks(|| {}));
        assert_eq!(turns.state().taken, 0);
        assert!(
            turns.state().granted.is_empty()
                && turns.state().fewest.is_empty()
                && turns.state().rarest.is_empty()
        );
    }

    async fn turn(ticket: &mut Permit) {
        poll_fn(|cx| ticket.poll(cx, |_| Poll::Ready(()))).await;
    }

    #[tokio::test]
    async fn one_turn_at_most_between_two_steps_of_who_is_known() {
        let turns = AdmissionScheduler::new(1);
        let had = Rc::new(Cell::new(0));
        let local = tokio::task::LocalSet::new();
        let all: Vec<_> = (0..100)
            .map(|_| {
                let (mut ticket, had) = (turns.join(None), Rc::clone(&had));
                local.spawn_local(async move {
                    for _ in 0..3 {
                        turn(&mut ticket).await;
                        had.set(had.get() + 1);
                    }
                })
            })
            .collect();
        let known = async {
            let mut most = 0;
            while had.get() < 300 {
                let before = had.get();
                tokio::task::yield_now().await;
                most = most.max(had.get() - before);
            }
            most
        };
        assert_eq!(local.run_until(known).await, 1);
        for one in all {
            local.run_until(one).await.unwrap();
        }
        assert_eq!(turns.state().taken, 0);
    }

    /// Seen to fail when all turns ended with the same waker: of two that ended before their thread came
    /// round, one never did.
    #[tokio::test]
    async fn each_of_two_turns_of_one_thread_ends() {
        let turns = AdmissionScheduler::new(2);
        for _ in 0..3 {
            let two = [turns.join(None), turns.join(None)]
                .map(|mut ticket| tokio::spawn(async move { turn(&mut ticket).await }));
            for one in two {
                one.await.unwrap();
            }
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert_eq!(turns.state().taken, 0);
        }
    }

    /// Has a turn that takes so long.
    async fn long_turn(ticket: &mut Permit, takes: Duration) {
        poll_fn(|cx| {
            ticket.poll(cx, |cx| {
                // The clock moves at the first poll.
                let _ = pin!(tokio::time::advance(takes)).poll(cx);
                Poll::Ready(())
            })
        })
        .await;
    }

    /// How many rounds it takes, of so long each, until nobody has a turn.
    async fn rounds(turns: &AdmissionScheduler, takes: Duration) -> u32 {
        let mut rounds = 0;
        while turns.state().taken > 0 {
            tokio::time::advance(takes).await;
            rounds += 1;
            assert!(rounds < 1_000, "a turn that does not end");
        }
        rounds
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_took_long_is_followed_by_as_much_time_for_others() {
        let turns = AdmissionScheduler::new(1);
        let mut ticket = turns.join(None);
        let mut after = Vec::new();
        for took in [Duration::ZERO, 10 * ROUND, 1_000 * ROUND] {
            for round in [Duration::ZERO, ROUND / 2, ROUND * 5] {
                long_turn(&mut ticket, took).await;
                after.push(rounds(&turns, round).await);
            }
        }
        // In rounds that take no time, half of what one is taken for, and five times as long: a turn of no
        // length, of ten rounds and of more than there may be.
        assert_eq!(after[..3], [1, 1, 1]);
        assert!(
            (11..=13).contains(&after[3]) && after[4] == after[3] && (2..=4).contains(&after[5]),
            "{after:?}"
        );
        let most = MOST_ROUNDS + 1..=MOST_ROUNDS + 3;
        assert!(most.contains(&after[6]) && (13..=16).contains(&after[8]), "{after:?}");
        // Who has had many makes room for others, too.
        for _ in 0..10 * OF_A_NEWCOMER {
            long_turn(&mut ticket, Duration::ZERO).await;
            rounds(&turns, Duration::ZERO).await;
        }
        long_turn(&mut ticket, Duration::ZERO).await;
        assert!(rounds(&turns, Duration::ZERO).await > 10);
    }

    #[tokio::test]
    async fn a_turn_that_was_waited_for_ends_with_the_next_call_or_with_the_connection() {
        let turns = AdmissionScheduler::new(1);
        let (mut ticket, mut other) = (turns.join(None), Peer::new(&turns));
        ticket.begin().await;
        assert!(!other.asks(|| {}));
        turn(&mut ticket).await;
        for times in 1..=2 {
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(other.woken(), times);
            assert!(other.asks(|| {}));
            if times == 1 {
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
                ticket.begin().await;
                assert!(!other.asks(|| {}));
                ticket.leave();
            }
        }
    }

    #[test]
    fn a_panic_in_a_turn_ends_the_turn() {
        let turns = AdmissionScheduler::new(1);
        let (mut bad, mut good) = (Peer::new(&turns), Peer::new(&turns));
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bad.asks(|| panic!("as meant"))));
        assert!(panicked.is_err());
        assert!(good.asks(|| {}));
    }
}
