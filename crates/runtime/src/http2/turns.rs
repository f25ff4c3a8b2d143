//! Turns of connections that have not shown yet who they are: few at a time, and first those of which there are few.
//!
//! A thread serves whatever is ready in the order in which it became ready. A thousand connections that always have
//! something to say are a thousand turns before anybody else's. Here all of them together are as much in the way as a
//! few connections would be, and a newcomer passes those that have used the turns of a newcomer and shown nothing.
//!
//! Among newcomers every second turn goes to the last that came: if all that come can be served, then it makes no
//! difference; if not, then first come, first served would let each of them wait until it is too late for it, where the
//! newest is served as if nobody else were there. But a thousand that come at once are all newer than who came just before.
//! So every other turn goes to who comes from where the fewest newcomers are: whoever sends a thousand from one address is in
//! the way of those who come from there, and keeps nobody else waiting for more than a turn or two each time. Not every
//! turn, since a crowd behind one proxy may mean well, and those with many addresses may not.
//!
//! A turn is over, for the next, only after its thread has done what else is ready, and has looked at what has come
//! meanwhile. If it were over at once, then all who are ready on one thread would find it free, one after the other, and as
//! long as a thread has something to do, it looks at its sockets only once in 61 steps.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    future::{Future as _, poll_fn},
    net::{IpAddr, Ipv6Addr},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Wake, Waker},
};

/// Who has had this many turns and has not shown who it is comes after those that have had fewer; and so on. Above what
/// an agent needs for TLS, WebSocket and its first request.
const OF_A_NEWCOMER: u32 = 16;

/// The turns of a listener.
#[derive(Debug)]
pub(super) struct Turns {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    joined: u64,
    /// Turns that are under way, or not over for others, or granted and not begun.
    taken: usize,
    /// Those who wait, the newest first.
    newest: BTreeMap<Newest, (Rarest, Waker)>,
    /// The same, those of the smallest crowd first.
    rarest: BTreeSet<Rarest>,
    /// Whether the next turn is for the rarest.
    is_for_rarest: bool,
    /// Those whose wait is over; at most as many as there are turns at a time.
    granted: Vec<u64>,
    /// How many from where have joined and are not known. No more than may be half-open at a time.
    crowds: HashMap<Option<IpAddr>, u32>,
}

/// Turns had before in units of [`OF_A_NEWCOMER`], then who is newer.
type Newest = (u32, Reverse<u64>);
/// The same; between the two the size of the crowd when the wait began, in powers of two, so that of those of a large crowd,
/// too, the newest come first.
type Rarest = (u32, u32, Reverse<u64>);

impl Turns {
    /// At most `most` turns at a time; above zero.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), state: Mutex::default() })
    }

    /// Half of the runtime's threads: the others are free for who is known.
    pub(super) fn of_this_runtime() -> Arc<Self> {
        Self::new(tokio::runtime::Handle::current().metrics().num_workers().div_ceil(2))
    }

    /// Joins, with no turn had. `from`: where it comes from, if that is told.
    pub(super) fn join(self: &Arc<Self>, from: Option<IpAddr>) -> Ticket {
        let crowd = from.map(whose);
        let number = {
            let mut state = self.state();
            *state.crowds.entry(crowd).or_default() += 1;
            state.joined += 1;
            state.joined
        };
        Ticket { of: Arc::clone(self), number, crowd: Some(crowd), had: 0, waits: None }
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
        self.is_for_rarest = !self.is_for_rarest;
        let place = if self.is_for_rarest {
            self.rarest.first().map(|(level, _, number)| (*level, *number))
        } else {
            self.newest.first_key_value().map(|(place, _)| *place)
        }?;
        Some((place.1.0, self.leave(place)?))
    }

    /// Takes out who waits at `place`.
    fn leave(&mut self, place: Newest) -> Option<Waker> {
        let (rarest, waker) = self.newest.remove(&place)?;
        self.rarest.remove(&rarest);
        Some(waker)
    }
}

/// Returns the address that one customer of a provider has: of IPv6 that is a whole network.
fn whose(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

/// The end of one turn. Of its own for each: of wakers that are the same, a thread that comes round wakes one.
struct Over(Arc<Turns>);

impl Wake for Over {
    /// A thread has come round since the end of the turn.
    fn wake(self: Arc<Self>) {
        self.0.pass_on();
    }
}

/// What one connection has had.
#[derive(Debug)]
pub(super) struct Ticket {
    of: Arc<Turns>,
    /// Larger for who came later.
    number: u64,
    /// Among whom it is counted, until it is known.
    crowd: Option<Option<IpAddr>>,
    had: u32,
    /// Where it stands among those who wait.
    waits: Option<Newest>,
}

impl Ticket {
    /// Calls `act` in a turn, as soon as there is one; a turn ends when `act` returns.
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if !self.begins(cx) {
            return Poll::Pending;
        }
        self.had = self.had.saturating_add(1);
        let _turn = Turn(&self.of);
        act(cx)
    }

    /// Waits for a turn, and ends it.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn turn(&mut self) {
        poll_fn(|cx| self.poll(cx, |_| Poll::Ready(()))).await;
    }

    fn begins(&mut self, cx: &Context<'_>) -> bool {
        let mut state = self.of.state();
        if let Some(place) = self.waits {
            if let Some(at) = state.granted.iter().position(|granted| *granted == self.number) {
                state.granted.swap_remove(at);
                self.waits = None;
                return true;
            }
            if let Some((_, waker)) = state.newest.get_mut(&place) {
                waker.clone_from(cx.waker());
            }
            return false;
        }
        if state.taken < self.of.most {
            state.taken += 1;
            return true;
        }
        let level = self.had / OF_A_NEWCOMER;
        let crowd = self.crowd.and_then(|crowd| state.crowds.get(&crowd)).map_or(0, |size| size.ilog2());
        let (newest, rarest) = ((level, Reverse(self.number)), (level, crowd, Reverse(self.number)));
        state.newest.insert(newest, (rarest, cx.waker().clone()));
        state.rarest.insert(rarest);
        self.waits = Some(newest);
        false
    }

    /// Waits no longer: it needs no turns any more.
    pub(super) fn leave(&mut self) {
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

impl Drop for Ticket {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A turn under way; over when dropped, by a panic too.
struct Turn<'a>(&'a Arc<Turns>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Passed on once this thread has nothing else to do; outside of a runtime at once. The first poll hands the waker
        // to the runtime; nobody waits for the rest.
        let waker = Waker::from(Arc::new(Over(Arc::clone(self.0))));
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
        ticket: Ticket,
        woken: Arc<Woken>,
    }

    impl Peer {
        fn new(turns: &Arc<Turns>) -> Self {
            Self::from(turns, "192.0.2.1")
        }

        fn from(turns: &Arc<Turns>, address: &str) -> Self {
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

    #[test]
    fn the_newest_comes_first_and_who_has_had_many_turns_last() {
        let turns = Turns::new(1);
        let [mut holder, mut early, mut late, mut greedy] = std::array::from_fn(|_| Peer::new(&turns));
        for _ in 0..OF_A_NEWCOMER {
            assert!(greedy.asks(|| {}));
        }
        // What a newcomer needs does not put it behind others.
        for _ in 1..OF_A_NEWCOMER {
            assert!(late.asks(|| {}));
        }
        assert!(holder.asks(|| {
            for peer in [&mut greedy, &mut late, &mut early] {
                assert!(!peer.asks(|| {}));
            }
        }));
        assert_eq!([greedy.woken(), early.woken(), late.woken()], [0, 0, 1]);
        // It is not taken from who was woken by who happens to come first.
        assert!(!holder.asks(|| {}));
        assert!(late.asks(|| {}));
        assert_eq!([greedy.woken(), early.woken(), holder.woken()], [0, 1, 0]);
        assert!(early.asks(|| {}));
        assert_eq!([greedy.woken(), holder.woken()], [0, 1]);
        assert!(holder.asks(|| {}));
        assert_eq!(greedy.woken(), 1);
        assert!(greedy.asks(|| {}));
        assert_eq!(turns.state().taken, 0);
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
            assert!(waiting[next].asks(|| {}));
        }
        order
    }

    #[test]
    fn every_other_turn_is_for_who_comes_from_where_few_are() {
        let turns = Turns::new(1);
        let mut holder = Peer::new(&turns);
        // One from elsewhere and, newer, a crowd.
        let addresses = ["198.51.100.7", "192.0.2.1", "192.0.2.1", "::ffff:192.0.2.1", "192.0.2.1"];
        let mut waiting = addresses.map(|address| Peer::from(&turns, address));
        assert_eq!(order(&mut holder, &mut waiting), [0, 4, 3, 2, 1]);
        assert_eq!(turns.state().taken, 0);
        // A crowd is not kept out by many that come from many places.
        let turns = Turns::new(1);
        let mut holder = Peer::new(&turns);
        let addresses =
            ["198.51.100.1", "198.51.100.2", "198.51.100.3", "192.0.2.1", "192.0.2.1", "192.0.2.1"];
        let mut waiting = addresses.map(|address| Peer::from(&turns, address));
        assert_eq!(order(&mut holder, &mut waiting), [2, 5, 1, 4, 0, 3]);
    }

    #[test]
    fn crowd_is_who_is_not_known_yet_and_shares_a_network() {
        let turns = Turns::new(1);
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
        let turns = Turns::new(2);
        let [mut one, mut two, mut last, mut known, mut gone] = std::array::from_fn(|_| Peer::new(&turns));
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
                && turns.state().newest.is_empty()
                && turns.state().rarest.is_empty()
        );
    }

    #[tokio::test]
    async fn one_turn_at_most_between_two_steps_of_who_is_known() {
        let turns = Turns::new(1);
        let had = Rc::new(Cell::new(0));
        let local = tokio::task::LocalSet::new();
        let all: Vec<_> = (0..100)
            .map(|_| {
                let (mut ticket, had) = (turns.join(None), Rc::clone(&had));
                local.spawn_local(async move {
                    for _ in 0..3 {
                        ticket.turn().await;
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

    /// Seen to fail when all turns ended with the same waker: of two that ended before their thread came round, one never did.
    #[tokio::test]
    async fn each_of_two_turns_of_one_thread_ends() {
        let turns = Turns::new(2);
        for _ in 0..3 {
            let two = [turns.join(None), turns.join(None)]
                .map(|mut ticket| tokio::spawn(async move { ticket.turn().await }));
            for one in two {
                one.await.unwrap();
            }
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert_eq!(turns.state().taken, 0);
        }
    }

    #[test]
    fn a_panic_in_a_turn_ends_the_turn() {
        let turns = Turns::new(1);
        let (mut bad, mut good) = (Peer::new(&turns), Peer::new(&turns));
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bad.asks(|| panic!("as meant"))));
        assert!(panicked.is_err());
        assert!(good.asks(|| {}));
    }
}
