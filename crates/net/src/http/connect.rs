//! Streams of HTTP/2 that become something else, by extended CONNECT (RFC 8441).
//!
//! hyper gives the sending direction of such a stream to the stream's
//! [`Executor`](super::executor::Executor), as a future of its own. It is kept for the
//! [`StreamTask`](super::slot::StreamTask) that has answered the request, which then polls it beside what the
//! service does with the stream, see [`Taken`]. So it stays one stream of its connection, which is counted
//! and reset as one.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::FutureExt as _;
use http::{Method, Request};
use hyper::{ext::Protocol, upgrade::OnUpgrade};
use parking_lot::Mutex;

use crate::io::{Http2Stream, Stream, StreamEnd};

/// What a connection or stream that was taken over does until its end.
pub(super) type Handler = Box<dyn FnOnce(Stream) -> Task + Send>;
pub(super) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A request that may take its stream over.
#[derive(Default)]
pub(super) struct Connect(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    /// Until the service has agreed.
    on: Option<OnUpgrade>,
    agreed: Option<(OnUpgrade, Handler)>,
    sending: Option<Task>,
}

impl Connect {
    /// Returns what a request can take its stream over with, if it is one by extended CONNECT.
    pub(super) fn of<B>(request: &mut Request<B>) -> Option<Arc<Self>> {
        if request.method() != Method::CONNECT || request.extensions().get::<Protocol>().is_none() {
            return None;
        }
        let on = Some(hyper::upgrade::on(request));
        Some(Arc::new(Self(Mutex::new(Parts { on, ..Parts::default() }))))
    }

    /// The service takes the stream over once its answer was sent.
    pub(super) fn agree(&self, handler: Handler) {
        let mut parts = self.0.lock();
        parts.agreed = parts.on.take().map(|on| (on, handler));
    }

    /// Keeps the sending direction, once the answer was sent.
    pub(super) fn sends(&self, sending: Task) {
        self.0.lock().sending = Some(sending);
    }

    /// Returns what follows the answer, if the service has agreed.
    pub(super) fn taken(&self) -> Option<Taken> {
        let mut parts = self.0.lock();
        let (agreed, sending) = (parts.agreed.take(), parts.sending.take());
        drop(parts);
        let ((on, handler), sending) = (agreed?, sending?);
        // hyper hands the stream over before it starts the sending direction.
        let (stream, end) = Http2Stream::new(on.now_or_never()?.ok()?);
        let session = handler(Stream::Http2(Box::new(stream)));
        Some(Taken { sending: Some(sending), session: Some(session), end })
    }
}

/// A stream that was taken over: its sending direction, and what the service does with it.
pub(super) struct Taken {
    sending: Option<Task>,
    session: Option<Task>,
    end: Arc<StreamEnd>,
}

impl Future for Taken {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { sending, session, end } = &mut *self;
        // First, so that the session sees at once that the stream was reset.
        if let Some(task) = sending
            && end.poll_sending(cx, |cx| task.as_mut().poll(cx)).is_ready()
        {
            *sending = None;
        }
        if let Some(task) = session {
            // A panic must not look like a regular end. The panic hook has reported it.
            let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(cx)));
            if polled.is_err() {
                return Poll::Ready(());
            }
            if polled.is_ok_and(|polled| polled.is_ready()) {
                *session = None;
            }
        }
        // What was written is still to be sent, and the end of it. If the stream is to be reset, dropping the
        // sending direction does that.
        if session.is_none() && (sending.is_none() || end.resets()) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // Before the session: its end must not look like that of the stream.
        self.sending = None;
        self.session = None;
        self.end.sending_ended();
    }
}
