//! One system call for the frames of several streams.
//!
//! An HTTP/2 connection is polled as soon as one of its streams has written a frame. It then flushes, even
//! several times: its codec flushes after each frame of data. When many streams are ready at the same time,
//! each small frame therefore costs a system call of its own, and wakes the peer.
//!
//! [`BatchedWrites`] keeps small writes until the task that polls the connection says that its turn has ended
//! ([`Turns::end`]). While this joins the writes of several turns, they also wait until the other tasks that
//! are ready now have run.

use std::{
    io::{self, IoSlice},
    mem,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker, ready},
};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A batch has at most this many bytes. More is written at once, without a copy.
const CAPACITY: usize = 16 * 1024;
/// What is allocated for a batch at first.
const SMALL: usize = 2 * 1024;
/// The pieces of the caller that are written together with a batch: HTTP/2 has two, the head of a frame and
/// its payload.
const PIECES: usize = 4;
/// Batches wait for other tasks while they join at least this many turns. A wait costs about as much as a
/// system call, because it may wake another thread.
const WORTH: Mean = Mean(3 * Mean::ONE / 2);
/// Otherwise, one of so many batches waits, to see what it joins.
const TRIAL: u32 = 32;

/// A stream that joins small writes which follow closely.
///
/// A flush returns at once. The bytes are written when the turn of the task ends, or later. So a flush that
/// returned says nothing about the socket, and an error of the socket is returned by a later call. What was
/// flushed is also written, as far as the socket accepts it without waiting, when the stream is dropped.
///
/// At most 16 KiB are kept, and nothing is added while the socket is full. Nothing is allocated while the
/// stream is idle.
#[derive(Debug)]
pub struct BatchedWrites<S: AsyncWrite + Unpin>(Arc<Mutex<Option<Writes<S>>>>);

/// Tells [`BatchedWrites`] when a turn of its task ends.
#[derive(Debug)]
pub struct Turns<S>(Arc<Mutex<Option<Writes<S>>>>);

impl<S> Clone for Turns<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: AsyncWrite + Unpin> BatchedWrites<S> {
    /// Wraps a stream. [`Turns::end`] must be called after each poll of what writes to it.
    pub fn new(stream: S) -> (Self, Turns<S>) {
        let shared = Arc::new(Mutex::new(Some(Writes::new(stream))));
        (Self(Arc::clone(&shared)), Turns(shared))
    }

    fn with<T>(&self, call: impl FnOnce(&mut Writes<S>) -> T) -> T {
        call(self.0.lock().as_mut().expect("only `drop` takes the stream"))
    }
}

impl<S: AsyncWrite + Unpin> Turns<S> {
    /// Writes what was flushed, now or after the other tasks that are ready. Does nothing if the stream was
    /// dropped, or if nothing was flushed since the last call.
    pub fn end(&self) {
        if let Some(writes) = &mut *self.0.lock() {
            writes.end_turn();
        }
    }
}

#[derive(Debug)]
struct Writes<S> {
    stream: S,
    batch: Vec<u8>,
    /// The bytes of `batch` that were written.
    written: usize,
    /// Whether the batch was flushed in this turn.
    is_flushed: bool,
    state: State,
    /// The waker of the task that flushed last.
    task: Waker,
    next: Arc<NextTurn>,
    /// `next`, as a waker.
    next_waker: Waker,
    /// An error that nobody was told of.
    error: Option<io::Error>,
    /// Turns that added to this batch.
    joined: u32,
    /// How long the batch was at the end of the last one.
    counted: usize,
    mean: Mean,
    /// Batches since the last one that waited.
    prompt: u32,
}

/// What happens to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It grows until the end of the turn.
    Open,
    /// It waits until the other tasks have run.
    Waiting,
    /// It is being written. The socket was full.
    Writing,
}

/// How many turns a batch that waited has joined, recently, in sixteenths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Mean(u32);

impl Mean {
    const ONE: u32 = 16;

    /// Adds a batch of so many turns. It counts a quarter.
    fn add(&mut self, joined: u32) {
        self.0 = (3 * self.0 + joined.min(1_000) * Self::ONE) / 4;
    }
}

/// Wakes a task after the other tasks that are ready have run.
#[derive(Debug, Default)]
struct NextTurn {
    has_come: AtomicBool,
    task: AtomicWaker,
}

impl Wake for NextTurn {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.has_come.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl<S: AsyncWrite + Unpin> Writes<S> {
    fn new(stream: S) -> Self {
        let next = Arc::<NextTurn>::default();
        Self {
            stream,
            batch: Vec::new(),
            written: 0,
            is_flushed: false,
            state: State::Open,
            task: Waker::noop().clone(),
            next_waker: Waker::from(Arc::clone(&next)),
            next,
            error: None,
            joined: 0,
            counted: 0,
            mean: Mean(Mean::ONE),
            prompt: 0,
        }
    }

    /// Adds small pieces to the batch. Returns false if they do not fit.
    fn add(&mut self, pieces: &[IoSlice<'_>]) -> bool {
        let len = pieces.iter().map(|piece| piece.len()).fold(0, usize::saturating_add);
        if self.batch.len().saturating_add(len) > CAPACITY {
            return false;
        }
        if self.batch.capacity() == 0 {
            self.batch.reserve(SMALL.max(len));
        }
        for piece in pieces {
            self.batch.extend_from_slice(piece);
        }
        true
    }

    /// The batch is written.
    fn clear(&mut self) {
        if self.state == State::Waiting {
            self.mean.add(self.joined);
        }
        self.batch = Vec::new();
        self.written = 0;
        self.state = State::Open;
        self.joined = 0;
        self.counted = 0;
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if let Some(error) = self.error.take() {
            return Poll::Ready(Err(error));
        }
        // What is added while the socket is full would stand before a keystroke that comes later.
        if self.state != State::Writing && self.add(pieces) {
            return Poll::Ready(Ok(pieces.iter().map(|piece| piece.len()).sum()));
        }
        self.poll_through(cx, pieces)
    }

    /// Writes the batch and, in the same calls, the beginning of `pieces`. Returns how many bytes of `pieces`
    /// were written: at least one, unless they are empty.
    fn poll_through(&mut self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let pieces = &pieces[..pieces.len().min(PIECES)];
        loop {
            let rest = self.batch.len() - self.written;
            if rest == 0 {
                self.clear();
                return match pieces.iter().all(|piece| piece.is_empty()) {
                    true => Poll::Ready(Ok(0)),
                    false => Pin::new(&mut self.stream).poll_write_vectored(cx, pieces),
                };
            }
            let mut all = [IoSlice::new(&[]); PIECES + 1];
            all[0] = IoSlice::new(&self.batch[self.written..]);
            all[1..=pieces.len()].copy_from_slice(pieces);
            let all = &all[..=pieces.len()];
            let wrote = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, all))?;
            if wrote == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += wrote.min(rest);
            if let Some(more) = wrote.checked_sub(rest).filter(|more| *more > 0) {
                self.clear();
                return Poll::Ready(Ok(more));
            }
        }
    }

    /// Writes the batch to the socket.
    fn poll_batch(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_through(cx, &[]))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.error.take() {
            return Poll::Ready(Err(error));
        }
        if self.batch.is_empty() || self.state == State::Writing {
            return self.poll_batch(cx);
        }
        self.task.clone_from(cx.waker());
        self.is_flushed = true;
        Poll::Ready(Ok(()))
    }

    fn end_turn(&mut self) {
        if !mem::take(&mut self.is_flushed) || self.batch.is_empty() {
            return;
        }
        if self.counted < self.batch.len() {
            self.counted = self.batch.len();
            self.joined = self.joined.saturating_add(1);
        }
        match self.state {
            State::Open => {
                if self.is_worth_a_wait() {
                    return self.wait();
                }
            }
            State::Writing => {}
            State::Waiting => {
                // Another task may poll the connection now than the one that polled it before.
                self.next.task.register(&self.task);
                if !self.next.has_come.load(Ordering::Acquire) {
                    return;
                }
                self.mean.add(self.joined);
            }
        }
        self.state = State::Writing;
        let task = self.task.clone();
        if let Poll::Ready(Err(error)) = self.poll_batch(&mut Context::from_waker(&task)) {
            self.error = Some(error);
            task.wake();
        }
    }

    /// Whether a batch should wait for other tasks.
    fn is_worth_a_wait(&mut self) -> bool {
        self.prompt += 1;
        if self.mean < WORTH && self.prompt < TRIAL {
            return false;
        }
        self.prompt = 0;
        true
    }

    /// Asks for a turn after the tasks that are ready now.
    fn wait(&mut self) {
        self.state = State::Waiting;
        self.next.has_come.store(false, Ordering::Relaxed);
        self.next.task.register(&self.task);
        // Polled once, it wakes `next` later.
        let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&self.next_waker));
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BatchedWrites<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.with(|writes| writes.poll_write(cx, &[IoSlice::new(bytes)]))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.with(|writes| writes.poll_write(cx, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|writes| writes.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|writes| {
            ready!(writes.poll_through(cx, &[]))?;
            Pin::new(&mut writes.stream).poll_shutdown(cx)
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for BatchedWrites<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.with(|writes| Pin::new(&mut writes.stream).poll_read(cx, buffer))
    }
}

impl<S: AsyncWrite + Unpin> Drop for BatchedWrites<S> {
    fn drop(&mut self) {
        // The socket closes now, although `Turns` may stay.
        let Some(mut writes) = self.0.lock().take() else { return };
        if writes.is_flushed || writes.state != State::Open {
            // Nobody is left who could be told of an error.
            let _ = writes.poll_batch(&mut Context::from_waker(Waker::noop()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// What a socket got: the bytes, and the length of each write.
    #[derive(Debug, Default)]
    struct Got {
        bytes: Vec<u8>,
        writes: Vec<usize>,
    }

    /// A socket that accepts as many bytes at a time as `accepts` says, in turn; 0: none now.
    #[derive(Debug, Default)]
    struct Socket {
        got: Arc<Mutex<Got>>,
        accepts: Vec<usize>,
        turn: usize,
    }

    impl AsyncWrite for Socket {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            pieces: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let turn = self.turn;
            self.turn += 1;
            let accepted = match self.accepts.len() {
                0 => usize::MAX,
                len => self.accepts[turn % len],
            };
            if accepted == 0 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let mut got = self.got.lock();
            let mut left = accepted;
            for piece in pieces {
                let len = piece.len().min(left);
                got.bytes.extend_from_slice(&piece[..len]);
                left -= len;
            }
            got.writes.push(accepted - left);
            Poll::Ready(Ok(accepted - left))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A connection that writes, and its socket.
    struct Connection {
        stream: BatchedWrites<Socket>,
        turns: Turns<Socket>,
        got: Arc<Mutex<Got>>,
    }

    impl Connection {
        fn new(accepts: &[usize]) -> Self {
            let got = Arc::<Mutex<Got>>::default();
            let socket = Socket { got: Arc::clone(&got), accepts: accepts.to_vec(), turn: 0 };
            let (stream, turns) = BatchedWrites::new(socket);
            Self { stream, turns, got }
        }

        /// Batches wait for other tasks.
        fn waiting(self) -> Self {
            self.stream.with(|writes| writes.mean = WORTH);
            self
        }

        /// Writes and flushes a piece.
        async fn write(&mut self, piece: &[u8]) {
            self.stream.write_all(piece).await.unwrap();
            self.stream.flush().await.unwrap();
        }

        fn is_empty(&self) -> bool {
            self.stream.with(|writes| writes.batch.is_empty())
        }

        /// Takes a turn at each wake-up, until the batch is written.
        async fn drain(&mut self) {
            poll_fn(|cx| {
                ready!(Pin::new(&mut self.stream).poll_flush(cx)).unwrap();
                self.turns.end();
                if self.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }

        fn writes(&self) -> Vec<usize> {
            self.got.lock().writes.clone()
        }
    }

    #[tokio::test]
    async fn flushes_of_a_turn_are_one_write() {
        let mut connection = Connection::new(&[]);
        for piece in [b"one", b"two", b"six"] {
            connection.write(piece).await;
            assert!(connection.writes().is_empty());
        }
        connection.turns.end();
        assert_eq!(connection.writes(), [9]);
        assert_eq!(connection.stream.with(|writes| writes.batch.capacity()), 0);
    }

    #[tokio::test]
    async fn batch_that_waits_joins_turns_until_other_tasks_have_run() {
        let mut connection = Connection::new(&[]).waiting();
        let other = tokio::spawn({
            let got = Arc::clone(&connection.got);
            async move { got.lock().writes.len() }
        });
        for piece in [b"one", b"two", b"six"] {
            connection.write(piece).await;
            connection.turns.end();
        }
        assert!(connection.writes().is_empty());
        connection.drain().await;
        assert_eq!(other.await.unwrap(), 0);
        assert_eq!(connection.writes(), [9]);
    }

    #[tokio::test]
    async fn batches_wait_only_while_that_joins_several_turns() {
        let mut connection = Connection::new(&[]);
        let mut waited = Vec::new();
        for round in 0..150 {
            // One turn each round at first, then three.
            for _ in 0..if round < 100 { 1 } else { 3 } {
                connection.write(b"x").await;
                connection.turns.end();
            }
            if !connection.is_empty() {
                waited.push(round);
                connection.drain().await;
            }
        }
        let (few, many): (Vec<_>, Vec<_>) = waited.into_iter().partition(|round| *round < 100);
        assert_eq!(few, [31, 63, 95]);
        // Another trial, and then each.
        assert!(many.len() >= 35 && many.ends_with(&[147, 148, 149]), "{many:?}");
        assert_eq!(connection.got.lock().bytes.len(), 100 + 3 * 50);
    }

    #[tokio::test]
    async fn nothing_is_added_to_a_batch_while_the_socket_is_full() {
        // It takes three bytes, then none for a long time.
        let mut connection = Connection::new(&[&[3][..], &[0; 100]].concat());
        connection.write(b"begun").await;
        connection.turns.end();
        assert_eq!(connection.writes(), [3]);
        for _ in 0..3 {
            let added =
                poll_fn(|cx| Poll::Ready(Pin::new(&mut connection.stream).poll_write(cx, b"more"))).await;
            assert!(added.is_pending());
        }
        assert_eq!(connection.stream.with(|writes| writes.batch.len()), 5);
    }

    #[tokio::test]
    async fn large_piece_leaves_with_the_batch_before_it() {
        let mut connection = Connection::new(&[]);
        connection.write(b"head").await;
        connection.write(&vec![7; CAPACITY]).await;
        assert_eq!(connection.writes(), [4 + CAPACITY]);
        assert!(connection.is_empty());
    }

    #[tokio::test]
    async fn batch_is_bounded() {
        let mut connection = Connection::new(&[0]);
        let piece = [7; 1000];
        let mut taken = 0;
        poll_fn(|cx| {
            while let Poll::Ready(wrote) = Pin::new(&mut connection.stream).poll_write(cx, &piece) {
                taken += wrote.unwrap();
            }
            Poll::Ready(())
        })
        .await;
        assert_eq!(taken, CAPACITY / 1000 * 1000);
    }

    #[tokio::test]
    async fn flushed_bytes_are_written_when_the_stream_is_dropped() {
        let mut connection = Connection::new(&[]);
        connection.write(b"goodbye").await;
        let Connection { stream, turns, got } = connection;
        drop(stream);
        assert_eq!(got.lock().bytes, b"goodbye");
        assert_eq!(Arc::strong_count(&got), 1, "the socket was dropped, too");
        turns.end();
    }

    #[tokio::test]
    async fn shutdown_writes_the_batch_at_once() {
        let mut connection = Connection::new(&[3, 0]);
        connection.stream.write_all(b"goodbye").await.unwrap();
        connection.stream.shutdown().await.unwrap();
        assert_eq!(connection.got.lock().bytes, b"goodbye");
    }

    #[tokio::test]
    async fn error_after_a_flush_is_returned_by_the_next_one() {
        let (mut stream, turns) = BatchedWrites::new(Broken);
        stream.write_all(b"lost").await.unwrap();
        stream.flush().await.unwrap();
        turns.end();
        assert_eq!(stream.flush().await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    /// A socket whose peer is gone.
    struct Broken;

    impl AsyncWrite for Broken {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    proptest! {
        #[test]
        fn all_bytes_arrive_in_order(
            pieces in proptest::collection::vec((0_usize..40_000, 0_usize..3, any::<bool>()), 1..20),
            accepts in proptest::collection::vec(0_usize..9_000, 1..6),
            waits: bool,
        ) {
            prop_assume!(accepts.iter().any(|accepts| *accepts > 0));
            let mut connection = Connection::new(&accepts);
            if waits {
                connection = connection.waiting();
            }
            let expected = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
                let mut expected = Vec::new();
                for (number, (len, heads, flush)) in pieces.into_iter().enumerate() {
                    let bytes: Vec<u8> = (0..len).map(|at| (at + number) as u8).collect();
                    let (head, payload) = bytes.split_at(len.min(9 * heads));
                    let mut left = [head, payload];
                    while left.iter().any(|piece| !piece.is_empty()) {
                        let pieces = left.map(IoSlice::new);
                        let wrote = poll_fn(|cx| {
                            let wrote = Pin::new(&mut connection.stream).poll_write_vectored(cx, &pieces);
                            connection.turns.end();
                            wrote
                        });
                        let mut wrote = wrote.await.unwrap();
                        assert!(wrote > 0);
                        for piece in &mut left {
                            let len = wrote.min(piece.len());
                            *piece = &piece[len..];
                            wrote -= len;
                        }
                    }
                    if flush {
                        connection.stream.flush().await.unwrap();
                        connection.turns.end();
                    }
                    expected.extend(bytes);
                }
                connection.drain().await;
                expected
            });
            prop_assert!(connection.got.lock().bytes == expected);
        }
    }
}
