//! Turns of connections that have not shown yet who they are: few at a time, and those first that had the fewest.
//!
//! A thread serves whatever is ready in the order in which it became ready. A thousand connections that always have
//! something to say are a thousand turns before anybody else's. Here all of them together are as much in the way as a
//! few connections would be, and a newcomer passes those that have used turns and shown nothing.
//!
//! A turn that is passed on begins only after its thread has done what else is ready, and has looked at what has come
//! meanwhile: woken at once, the next would go before all of that, since a thread prefers whom it has just woken; and
//! as long as it has something to do, it looks at its sockets only once in 61 steps.

use std::{
    collections::BTreeMap,
    future::{Future as _, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

/// The turns of a listener.
#[derive(Debug)]
pub(super) struct Turns {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Turns that are under way, or granted and not begun.
    taken: usize,
    /// By turns had before, then by when they began to wait.
    waiting: BTreeMap<(u32, u64), Waker>,
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
        Ticket { of: Arc::clone(self), had: 0, waits: None }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a turn that is over to the next.
    fn pass_on(&self) {
        let mut state = self.state();
        match state.waiting.pop_first() {
            Some(((_, number), waker)) => {
                state.granted.push(number);
                drop(state);
                wake_after_others(&waker);
            }
            None => state.taken -= 1,
        }
    }
}

/// Wakes once this thread has nothing else to do. Outside of a runtime: at once.
fn wake_after_others(waker: &Waker) {
    // The first poll hands the waker to the runtime; nobody waits for the rest.
    let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(waker));
}

/// What one connection has had.
#[derive(Debug)]
pub(super) struct Ticket {
    of: Arc<Turns>,
    had: u32,
    /// Where it stands among those who wait.
    waits: Option<(u32, u64)>,
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
        if let Some(place @ (_, number)) = self.waits {
            if let Some(at) = state.granted.iter().position(|granted| *granted == number) {
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
        let place = (self.had, state.next);
        state.next += 1;
        state.waiting.insert(place, cx.waker().clone());
        self.waits = Some(place);
        false
    }

    /// Waits no longer: it needs no turns any more.
    pub(super) fn leave(&mut self) {
        let Some(place @ (_, number)) = self.waits.take() else { return };
        let mut state = self.of.state();
        if state.waiting.remove(&place).is_none()
            && let Some(at) = state.granted.iter().position(|granted| *granted == number)
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
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::Wake,
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
    fn who_has_had_fewer_turns_comes_first() {
        let turns = Turns::new(1);
        let [mut holder, mut greedy, mut early, mut late] = std::array::from_fn(|_| Peer::new(&turns));
        for _ in 0..3 {
            assert!(greedy.asks(|| {}));
        }
        assert!(holder.asks(|| {
            assert!(!greedy.asks(|| {}));
            assert!(!early.asks(|| {}));
            assert!(!late.asks(|| {}));
        }));
        assert_eq!([greedy.woken(), early.woken(), late.woken()], [0, 1, 0]);
        // It is not taken from who was woken by who happens to come first.
        assert!(!holder.asks(|| {}));
        assert!(early.asks(|| {}));
        assert_eq!([greedy.woken(), late.woken()], [0, 1]);
        assert!(late.asks(|| {}));
        assert_eq!([greedy.woken(), holder.woken()], [0, 1]);
        assert!(holder.asks(|| {}));
        assert_eq!(greedy.woken(), 1);
        assert!(greedy.asks(|| {}));
        assert_eq!(turns.state().taken, 0);
    }

    #[test]
    fn who_leaves_takes_no_turn_along() {
        let turns = Turns::new(2);
        let [mut one, mut two, mut gone, mut known, mut last] = std::array::from_fn(|_| Peer::new(&turns));
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
