//! The streams of a connection: counted, started, and reset from outside.

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use futures_util::{FutureExt as _, stream::FuturesUnordered, task::AtomicWaker};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use super::{connect::Connect, observed::Observed};

/// Resets a stream with CANCEL, whatever it waits for. With HTTP/1.1 it closes the connection.
#[derive(Debug, Default)]
pub struct StreamReset {
    done: AtomicBool,
    waker: AtomicWaker,
}

impl StreamReset {
    /// Resets the stream. Its bodies are dropped by its own task.
    pub fn reset(&self) {
        self.done.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Ready once the stream is to be reset. For the one task that writes it.
    pub fn poll_reset(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.done.load(Ordering::Acquire) {
            self.waker.register(cx.waker());
        }
        if self.done.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Hands a [`StreamReset`] from the service to the task of the stream.
///
/// HTTP/2 begins the stream right after the service has been called for it, in the same poll of the
/// connection, so what the service leaves here belongs to the next stream. HTTP/1.1 has one request at a
/// time, served by the connection's own task.
#[derive(Clone, Debug)]
pub struct StreamSlot(Arc<Slot>);

#[derive(Debug)]
struct Slot {
    /// Of the connection.
    observed: Arc<Observed>,
    next: Mutex<Next>,
    /// Streams that are open.
    open: AtomicUsize,
    /// Streams that were ever opened.
    opened: AtomicU64,
    /// See [`StreamSlot::reset_connection`].
    resets: AtomicBool,
    /// Streams of HTTP/2 that the connection's task is to run and does not yet.
    begun: Mutex<Begun>,
    /// Wakes that task for its streams.
    task: OnceLock<Waker>,
}

#[derive(Debug, Default)]
struct Begun {
    streams: Vec<StreamTask>,
    /// The connection has ended.
    is_closed: bool,
}

/// What the service has left for the stream that begins next.
#[derive(Default)]
struct Next {
    arm: Option<Arm>,
    /// Set if its request may take it over.
    connect: Option<Arc<Connect>>,
}

impl fmt::Debug for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Next").field("arm", &self.arm).finish_non_exhaustive()
    }
}

/// A stream that is open; until this is dropped.
#[derive(Debug)]
pub(super) struct OpenStream(Arc<Slot>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
enum Arm {
    Reset(Arc<StreamReset>),
    Until(Instant),
}

impl StreamSlot {
    pub(super) fn new(observed: Arc<Observed>) -> Self {
        let (next, open, opened, resets, begun, task) = Default::default();
        Self(Arc::new(Slot { observed, next, open, opened, resets, begun, task }))
    }

    /// Makes a connection of HTTP/1.1 end with RST instead of FIN. Call it before the body of an answer fails
    /// whose end is that of the connection, as with HTTP/1.0: a FIN would look like its regular end. It has
    /// no effect on HTTP/2.
    pub fn reset_connection(&self) {
        self.0.resets.store(true, Ordering::Relaxed);
    }

    /// Whether the connection is to end with RST.
    pub(super) fn resets_connection(&self) -> bool {
        self.0.resets.load(Ordering::Relaxed)
    }

    /// Runs a stream as part of its connection's task.
    ///
    /// Until the connection is admitted, only the first step of a stream is. It is usually the only one: that
    /// there is no token, or a wrong one, is known at once. A stream that waits then, for GitLab for example,
    /// has a task of its own, so that its answer does not wait for admission again. If its request takes it
    /// over, it comes back to the connection's task.
    fn start(&self, mut stream: StreamTask) {
        let observed = &self.0.observed;
        if !observed.is_admitted() {
            // What polls it next registers the right waker.
            if Pin::new(&mut stream).poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                return;
            }
            if !observed.is_admitted() {
                drop(tokio::spawn(OwnTask { stream: Some(stream), slot: self.clone() }));
                return;
            }
        }
        self.0.begun.lock().streams.push(stream);
    }

    /// Sets what wakes the connection's task for its streams.
    pub(super) fn set_task(&self, waker: Waker) {
        // There is one task.
        let _ = self.0.task.set(waker);
    }

    /// Gives a stream to the connection's task, or back if that has ended.
    fn hand_over(&self, stream: StreamTask) -> Option<StreamTask> {
        let mut begun = self.0.begun.lock();
        if begun.is_closed {
            return Some(stream);
        }
        begun.streams.push(stream);
        drop(begun);
        if let Some(task) = self.0.task.get() {
            task.wake_by_ref();
        }
        None
    }

    /// Drops the streams that have begun, and begins no others: the connection has ended.
    pub(super) fn close(&self) {
        let mut begun = self.0.begun.lock();
        begun.is_closed = true;
        let streams = mem::take(&mut begun.streams);
        drop(begun);
        drop(streams);
    }

    /// Moves the streams that have begun to those that are open. Returns whether there were any.
    pub(super) fn take_begun(&self, open: &mut FuturesUnordered<StreamTask>) -> bool {
        let begun = mem::take(&mut self.0.begun.lock().streams);
        let any = !begun.is_empty();
        open.extend(begun);
        any
    }

    /// Makes the stream that is being opened resettable.
    pub fn arm(&self) -> Arc<StreamReset> {
        let reset = Arc::<StreamReset>::default();
        self.put(Arm::Reset(Arc::clone(&reset)));
        reset
    }

    /// Resets the stream that is being opened at `deadline`, if it still is: a peer that does not
    /// read gets nothing else.
    pub fn arm_until(&self, deadline: Instant) {
        self.put(Arm::Until(deadline));
    }

    fn put(&self, arm: Arm) {
        self.0.next.lock().arm = Some(arm);
    }

    /// Lets the request of the stream that is being opened take it over.
    pub(super) fn connect(&self, connect: Arc<Connect>) {
        self.0.next.lock().connect = Some(connect);
    }

    /// Returns what was left by [`StreamSlot::connect`], if the stream has not begun yet.
    pub(super) fn connecting(&self) -> Option<Arc<Connect>> {
        self.0.next.lock().connect.clone()
    }

    /// Counts a stream that is being opened.
    pub(super) fn enter(&self) -> OpenStream {
        self.0.opened.fetch_add(1, Ordering::Relaxed);
        self.0.open.fetch_add(1, Ordering::Relaxed);
        OpenStream(Arc::clone(&self.0))
    }

    /// Forgets what was armed for an earlier stream.
    pub(super) fn disarm(&self) {
        self.0.next.lock().arm = None;
    }

    /// Ready when the open request of HTTP/1.1 is to be reset. `timer` is the caller's, for one connection.
    pub(super) fn poll_armed(&self, cx: &mut Context<'_>, timer: &mut Option<Pin<Box<Sleep>>>) -> Poll<()> {
        if self.is_idle() {
            return Poll::Pending;
        }
        match &self.0.next.lock().arm {
            None => Poll::Pending,
            Some(Arm::Reset(reset)) => reset.poll_reset(cx),
            Some(Arm::Until(deadline)) => {
                let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(*deadline)));
                if timer.deadline() != *deadline {
                    timer.as_mut().reset(*deadline);
                }
                timer.as_mut().poll(cx)
            }
        }
    }

    /// Whether no stream is open.
    pub(super) fn is_idle(&self) -> bool {
        self.0.open.load(Ordering::Relaxed) == 0
    }

    /// Returns how many streams were ever opened.
    pub(super) fn opened(&self) -> u64 {
        self.0.opened.load(Ordering::Relaxed)
    }
}

impl<F> hyper::rt::Executor<F> for StreamSlot
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let Next { arm, connect } = mem::take(&mut *self.0.next.lock());
        let (future, reset): (Pin<Box<dyn Future<Output = ()> + Send>>, _) = match arm {
            None => (Box::pin(future), None),
            Some(Arm::Reset(reset)) => (Box::pin(future), Some(reset)),
            Some(Arm::Until(deadline)) => {
                let until = tokio::time::timeout_at(deadline, future);
                // Dropping the stream's parts resets it.
                (Box::pin(until.map(drop)), None)
            }
        };
        self.start(StreamTask { future, reset, connect, is_taken: false, _open: self.enter() });
    }
}

/// A stream under way, until it is over or reset.
pub(super) struct StreamTask {
    /// Dropping its parts makes HTTP/2 discard what it still holds for the stream, and send
    /// RST_STREAM(CANCEL) if it is not over.
    future: Pin<Box<dyn Future<Output = ()> + Send>>,
    reset: Option<Arc<StreamReset>>,
    /// Until the request has been answered, if it may take the stream over.
    connect: Option<Arc<Connect>>,
    /// It was taken over.
    is_taken: bool,
    _open: OpenStream,
}

impl fmt::Debug for StreamTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamTask").field("reset", &self.reset).finish_non_exhaustive()
    }
}

impl Future for StreamTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.reset.as_ref().is_some_and(|reset| reset.poll_reset(cx).is_ready()) {
            return Poll::Ready(());
        }
        loop {
            // The other streams of the connection go on. The panic hook has reported it.
            let polled = catch_unwind(AssertUnwindSafe(|| self.future.as_mut().poll(cx)));
            match polled.unwrap_or(Poll::Ready(())) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) => match self.connect.take().and_then(|connect| connect.taken()) {
                    Some(taken) => {
                        self.is_taken = true;
                        self.future = Box::pin(taken);
                    }
                    None => return Poll::Ready(()),
                },
            }
        }
    }
}

/// A stream whose connection was not admitted when it began.
struct OwnTask {
    /// `None`: the connection's task has it.
    stream: Option<StreamTask>,
    slot: StreamSlot,
}

impl Future for OwnTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(()) };
        if Pin::new(&mut *stream).poll(cx).is_ready() {
            return Poll::Ready(());
        }
        // Once: a connection that has ended takes none.
        if mem::take(&mut stream.is_taken)
            && let Some(stream) = self.stream.take()
        {
            self.stream = self.slot.hand_over(stream);
        }
        if self.stream.is_some() { Poll::Pending } else { Poll::Ready(()) }
    }
}
