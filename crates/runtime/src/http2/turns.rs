//! Turns of connections that have not shown yet who they are: few at a time, and the newest first.
//!
//! A thread serves whatever is ready in the order in which it became ready. A thousand connections that always have
//! something to say are a thousand turns before anybody else's. Here all of them together are as much in the way as a
//! few connections would be, and a newcomer passes those that have used the turns of a newcomer and shown nothing.
//!
//! Among newcomers the last that came is the first: if all that come can be served, then it makes no difference; if not,
//! then first come, first served would let each of them wait until it is too late for it, where the newest is served as
//! if nobody else were there.
//!
//! A turn is over, for the next, only after its thread has done what else is ready, and has looked at what has come
//! meanwhile. If it were over at once, then all who are ready on one thread would find it free, one after the other, and as
//! long as a thread has something to do, it looks at its sockets only once in 61 steps.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    future::{Future as _, poll_fn},
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
    /// By turns had before, then the newest first.
    waiting: BTreeMap<(u32, Reverse<u64>), Waker>,
    /// Those whose wait is over; at most as many as there are turns at a time.
    granted: Vec<u64>,
}

impl Turns {
    /// At most `most` turns at a time; above zero.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), state: Mutex::default() })
    }

    /// Half of the runtime's threads: the others are free for who is known.
    pub(super) fn of_this_runtime() -> Arc<Self> {
        Self::new(tokio::runtime::Handle::current().metrics().num_workers().div_ceil(2))
    }

    /// Joins, with no turn had.
    pub(super) fn join(self: &Arc<Self>) -> Ticket {
        let number = {
            let mut state = self.state();
            state.joined += 1;
            state.joined
        };
        Ticket { of: Arc::clone(self), number, had: 0, waits: None }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a turn that is over for others to the next.
    fn pass_on(&self) {
        let mut state = self.state();
        match state.waiting.pop_first() {
            Some(((_, Reverse(number)), waker)) => {
                state.granted.push(number);
                drop(state);
                waker.wake();
            }
            None => state.taken -= 1,
        }
    }
}

impl Wake for Turns {
    /// A thread has come round since the end of a turn.
    fn wake(self: Arc<Self>) {
        self.pass_on();
    }
}

/// What one connection has had.
#[derive(Debug)]
pub(super) struct Ticket {
    of: Arc<Turns>,
    /// Larger for who came later.
    number: u64,
    had: u32,
    /// Where it stands among those who wait.
    waits: Option<(u32, Reverse<u64>)>,
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
            state.waiting.insert(place, cx.waker().clone());
            return false;
        }
        if state.taken < self.of.most {
            state.taken += 1;
            return true;
        }
        let place = (self.had / OF_A_NEWCOMER, Reverse(self.number));
        state.waiting.insert(place, cx.waker().clone());
        self.waits = Some(place);
        false
    }

    /// Waits no longer: it needs no turns any more.
    pub(super) fn leave(&mut self) {
        let Some(place) = self.waits.take() else { return };
        let mut state = self.of.state();
        if state.waiting.remove(&place).is_none()
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
        let waker = Waker::from(Arc::clone(self.0));
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
            Self { ticket: turns.join(), woken: Arc::default() }
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
        assert!(turns.state().granted.is_empty() && turns.state().waiting.is_empty());
    }

    #[tokio::test]
    async fn one_turn_at_most_between_two_steps_of_who_is_known() {
        let turns = Turns::new(1);
        let had = Rc::new(Cell::new(0));
        let local = tokio::task::LocalSet::new();
        let all: Vec<_> = (0..100)
            .map(|_| {
                let (mut ticket, had) = (turns.join(), Rc::clone(&had));
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
