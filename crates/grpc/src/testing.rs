//! A scripted stream for tests.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http_body::Frame;
use parking_lot::{Mutex, MutexGuard};

use crate::{Body, BoxError, boxed};

/// One direction of a stream, written by a test. Its reader sees it as HTTP/2 libraries show a stream.
#[derive(Clone, Debug, Default)]
pub struct Pipe(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Result<Frame<Bytes>, BoxError>>,
    ended: bool,
    reset: bool,
    dropped: bool,
    waker: Option<Waker>,
}

impl Pipe {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    fn act(&self, act: impl FnOnce(&mut State)) {
        let mut state = self.state();
        act(&mut state);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }

    /// Writes data.
    pub fn write(&self, bytes: impl Into<Bytes>) {
        self.push(Frame::data(bytes.into()));
    }

    /// Writes a frame of any kind. Trailers do not end the stream.
    pub fn push(&self, frame: Frame<Bytes>) {
        self.act(|state| state.frames.push_back(Ok(frame)));
    }

    /// Gives the reader an error.
    pub fn fail(&self, error: impl Into<BoxError>) {
        self.act(|state| state.frames.push_back(Err(error.into())));
    }

    /// Ends the stream after the frames that were written.
    pub fn end(&self) {
        self.act(|state| state.ended = true);
    }

    /// Resets the stream with CANCEL, as HTTP/2 libraries show that: no more frames, but no end of stream.
    pub fn reset(&self) {
        self.act(|state| state.reset = true);
    }

    /// Whether the reader was dropped.
    pub fn is_dropped(&self) -> bool {
        self.state().dropped
    }

    /// Returns the reader. Call it once.
    pub fn body(&self) -> Body {
        boxed(PipeBody(self.clone()))
    }
}

struct PipeBody(Pipe);

impl Drop for PipeBody {
    fn drop(&mut self) {
        self.0.state().dropped = true;
    }
}

impl http_body::Body for PipeBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut state = self.0.state();
        if let Some(frame) = state.frames.pop_front() {
            return Poll::Ready(Some(frame));
        }
        if state.ended || state.reset {
            return Poll::Ready(None);
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        let state = self.0.state();
        state.ended && state.frames.is_empty()
    }
}
