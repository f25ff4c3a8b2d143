//! What the two directions of an upgraded connection share.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use http_tunnel::halves::Half;
use net::io::Stream;
use parking_lot::Mutex;

/// Tells the body of the request what to do, and the other direction when the client has finished.
#[derive(Clone, Debug, Default)]
pub(crate) struct Link(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    phase: Phase,
    /// The client writes nothing more.
    has_client_finished: bool,
    /// The body of the request.
    input: Option<Waker>,
    /// The other direction, which waits for the client to finish.
    session: Option<Waker>,
}

/// What the body of the request does.
#[derive(Debug, Default)]
pub(crate) enum Phase {
    /// There is no answer yet, or nothing more is read: the body is pending.
    #[default]
    Held,
    /// It reads from the client.
    Open(Half<Stream>),
    /// It ends.
    Ended,
}

impl Link {
    /// Reads from the client from now on.
    pub(crate) fn open(&self, client: Half<Stream>) {
        self.set(Phase::Open(client));
    }

    /// Reads nothing more, and does not end the request: it will be cancelled.
    pub(crate) fn hold(&self) {
        self.set(Phase::Held);
    }

    /// Ends the request regularly.
    pub(crate) fn end(&self) {
        self.set(Phase::Ended);
    }

    fn set(&self, phase: Phase) {
        let mut state = self.0.lock();
        let before = std::mem::replace(&mut state.phase, phase);
        let waker = state.input.take();
        drop(state);
        drop(before);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// For the body of the request: calls `read` with the phase, and wakes the task when it has changed.
    /// `true` with what is returned: the client writes nothing more.
    pub(super) fn read<T>(
        &self,
        cx: &mut Context<'_>,
        read: impl FnOnce(&mut Phase, &mut Context<'_>) -> (T, bool),
    ) -> T {
        let mut state = self.0.lock();
        match &mut state.input {
            Some(waker) => waker.clone_from(cx.waker()),
            None => state.input = Some(cx.waker().clone()),
        }
        let (result, has_finished) = read(&mut state.phase, cx);
        if has_finished {
            state.has_client_finished = true;
            if let Some(session) = state.session.take() {
                session.wake();
            }
        }
        result
    }

    /// For the other direction: ready once the client writes nothing more.
    pub(super) fn poll_client_finished(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.has_client_finished {
            return Poll::Ready(());
        }
        match &mut state.session {
            Some(waker) => waker.clone_from(cx.waker()),
            None => state.session = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}
