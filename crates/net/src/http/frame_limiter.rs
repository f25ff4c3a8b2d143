//! Limits the frames that cost a peer nothing, and that HTTP/2 libraries answer or drop without an end.
//!
//! It reads the heads of frames as the bytes pass; it neither buffers nor changes them. It also sees what the
//! HTTP/2 library answers by itself without a notice, such as a header list that is too large.

use std::{
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{
    observed::{IDLE, Observed, PINGS, RESETS},
    settings::Limits,
};

/// What a client sends before its first frame.
const PREFACE: u32 = 24;
const HEAD: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const NO_ERROR: u32 = 0;
const PROTOCOL_ERROR: u32 = 1;
/// The HTTP/2 library's code for a stream beyond those that may be open. Our own code never uses it.
const REFUSED_STREAM: u32 = 7;
/// The end of the library's debug data in GOAWAY for each of its limits of resets. Its error does not contain
/// it.
const RESETS_SAID: u32 = u32::from_be_bytes(*b"sets");
/// The header block of an answer that is a status alone is at most this long, also when the HPACK table
/// changes its size.
const STATUS_ALONE: u32 = 16;

const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Settings, priorities, acknowledgements, empty data and frames of unknown types that may come at once, and
/// in each second. Clients send a handful of them in a connection's life.
const IDLE_FRAMES: f64 = 100.0;
const IDLE_FRAMES_PER_SECOND: f64 = 10.0;
/// Frames that open windows, and GOAWAYs, for each stream that a connection may begin before it is admitted.
/// Clients open the window of each stream once or twice. Before it is admitted, a connection is sent nothing
/// for which a client would do so again.
const WINDOWS_PER_STREAM: u32 = 4;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    len: u32,
    kind: u8,
    flags: u8,
    stream: u32,
}

/// Finds the heads of the frames in one direction of a connection.
#[derive(Debug)]
struct FrameScanner {
    head: [u8; HEAD],
    have: usize,
    /// Bytes until the next head.
    skip: u32,
    /// The frame whose payload is passing.
    frame: Option<Head>,
    /// The last four bytes of a reset or a GOAWAY, as far as they have passed.
    last: u32,
}

/// What a scanner has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begins(Head),
    Ends(Head),
    /// A stream was reset, with this code.
    Resets(u32, u32),
    /// GOAWAY, which ends with these bytes.
    Leaves(u32),
}

impl FrameScanner {
    fn after(skip: u32) -> Self {
        Self { head: [0; HEAD], have: 0, skip, frame: None, last: 0 }
    }

    fn feed(&mut self, mut bytes: &[u8], mut step: impl FnMut(Step)) {
        while !bytes.is_empty() {
            if self.skip > 0 {
                let n = bytes.len().min(self.skip as usize);
                if let Some(Head { kind: RST_STREAM | GOAWAY, .. }) = self.frame {
                    self.last = bytes[..n].iter().fold(self.last, |last, byte| last << 8 | u32::from(*byte));
                }
                bytes = &bytes[n..];
                // Not more than `skip`, which is one.
                self.skip -= n as u32;
                if self.skip == 0
                    && let Some(frame) = self.frame.take()
                {
                    step(Step::Ends(frame));
                    let last = std::mem::take(&mut self.last);
                    match frame.kind {
                        RST_STREAM => step(Step::Resets(frame.stream, last)),
                        GOAWAY => step(Step::Leaves(last)),
                        _ => {}
                    }
                }
                continue;
            }
            let n = bytes.len().min(HEAD - self.have);
            self.head[self.have..self.have + n].copy_from_slice(&bytes[..n]);
            self.have += n;
            bytes = &bytes[n..];
            if self.have == HEAD {
                self.have = 0;
                let [a, b, c, kind, flags, w, x, y, z] = self.head;
                // The highest bit of a stream's number is reserved, and ignored.
                let stream = u32::from_be_bytes([w & 0x7f, x, y, z]);
                let head = Head { len: u32::from_be_bytes([0, a, b, c]), kind, flags, stream };
                step(Step::Begins(head));
                if head.len == 0 {
                    step(Step::Ends(head));
                } else {
                    self.skip = head.len;
                    self.frame = Some(head);
                }
            }
        }
    }
}

/// Fills by time up to its size.
#[derive(Debug)]
struct Bucket {
    size: f64,
    per_second: f64,
    level: f64,
    at: Instant,
}

impl Bucket {
    fn new(size: f64, per_second: f64) -> Self {
        Self { size, per_second, level: size, at: Instant::now() }
    }

    /// Takes one out; false: it was empty.
    fn take(&mut self) -> bool {
        let now = Instant::now();
        let fresh = self.per_second * now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + fresh).min(self.size);
        self.at = now;
        let left = self.level >= 1.0;
        if left {
            self.level -= 1.0;
        }
        left
    }
}

/// A connection whose frames are limited, seen from the server.
#[derive(Debug)]
pub(super) struct FrameLimiter<S> {
    inner: S,
    inbound: FrameScanner,
    outbound: FrameScanner,
    pings: Bucket,
    idle: Bucket,
    unadmitted: Unadmitted,
    observed: Arc<Observed>,
    in_block: bool,
    /// The stream that ended last with a header block of at most [`STATUS_ALONE`] bytes.
    answered: u32,
}

/// What a connection has done before it was admitted.
#[derive(Debug)]
struct Unadmitted {
    /// Streams that it may begin, and resets of either side.
    most: u32,
    begun: u32,
    /// Of the latest stream that was begun.
    latest: u32,
    resets: u32,
    windows: u32,
}

impl Unadmitted {
    fn new(most: u32) -> Self {
        Self { most, begun: 0, latest: 0, resets: 0, windows: 0 }
    }

    /// Counts a frame that came. An error is the verdict, if it is one too many.
    fn came(&mut self, head: Head) -> Result<(), u8> {
        match head.kind {
            // Trailers begin no stream.
            HEADERS if head.stream > self.latest => {
                self.latest = head.stream;
                self.begun = self.begun.saturating_add(1);
                Ok(())
            }
            RST_STREAM => self.reset(),
            WINDOW_UPDATE | GOAWAY => {
                self.windows = self.windows.saturating_add(1);
                if self.windows > self.most.saturating_mul(WINDOWS_PER_STREAM) { Err(IDLE) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    fn reset(&mut self) -> Result<(), u8> {
        self.resets = self.resets.saturating_add(1);
        if self.resets >= self.most { Err(RESETS) } else { Ok(()) }
    }
}

impl<S> FrameLimiter<S> {
    pub(super) fn new(inner: S, limits: &Limits, observed: Arc<Observed>) -> Self {
        Self {
            inner,
            inbound: FrameScanner::after(PREFACE),
            outbound: FrameScanner::after(0),
            pings: Bucket::new(f64::from(limits.pings), limits.ping_interval.as_secs_f64().recip()),
            idle: Bucket::new(IDLE_FRAMES, IDLE_FRAMES_PER_SECOND),
            unadmitted: Unadmitted::new(limits.streams_before_authentication),
            observed,
            in_block: false,
            answered: 0,
        }
    }

    fn read(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Self { inbound, pings, idle, unadmitted, observed, in_block, .. } = self;
        let was_in_block = *in_block;
        let is_admitted = observed.is_admitted();
        inbound.feed(bytes, |step| match step {
            Step::Begins(head) => {
                // A plain store costs less than to ask first.
                observed.spoken.store(true, Ordering::Relaxed);
                if !is_admitted && let Err(verdict) = unadmitted.came(head) {
                    observed.verdict.store(verdict, Ordering::Relaxed);
                }
                let (bucket, verdict) = match head.kind {
                    HEADERS | CONTINUATION => {
                        *in_block = true;
                        return;
                    }
                    RST_STREAM | GOAWAY | WINDOW_UPDATE => return,
                    DATA if head.len > 0 || head.flags & END_STREAM != 0 => return,
                    PING if head.flags & ACK == 0 => (&mut *pings, PINGS),
                    // The library answers settings and drops the rest.
                    _ => (&mut *idle, IDLE),
                };
                if !bucket.take() {
                    observed.verdict.store(verdict, Ordering::Relaxed);
                }
            }
            Step::Ends(head) if matches!(head.kind, HEADERS | CONTINUATION) => {
                *in_block = head.flags & END_HEADERS == 0;
            }
            Step::Ends(_) | Step::Resets(..) | Step::Leaves(_) => {}
        });
        if was_in_block || *in_block {
            observed.set_in_head(*in_block);
        }
        self.judge()
    }

    fn judge(&self) -> io::Result<()> {
        match self.observed.verdict() {
            None => Ok(()),
            Some(why) => Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.as_str())),
        }
    }

    /// Whether nothing is read until the connection is admitted, because it has begun one stream more than it
    /// may. What it sends meanwhile stays in the kernel's buffers, and with the peer.
    fn is_held(&self) -> bool {
        self.unadmitted.begun > self.unadmitted.most && !self.observed.is_admitted()
    }

    fn written(&mut self, bytes: &[u8]) {
        let Self { outbound, pings, unadmitted, observed, answered, .. } = self;
        let is_admitted = observed.is_admitted();
        outbound.feed(bytes, |step| match step {
            Step::Begins(head @ Head { kind: DATA | HEADERS, .. }) => {
                // A client that measures bandwidth answers what it receives with a ping, as the libraries of
                // gRPC do.
                pings.level = pings.size;
                if head.kind == HEADERS && head.flags & END_STREAM != 0 && head.len <= STATUS_ALONE {
                    *answered = head.stream;
                }
            }
            // Only a header list that is too large is answered with a status alone and then reset with an
            // error: no answer of ours is a status alone, and a reset after a complete answer is no error.
            Step::Resets(stream, code) => {
                if code == PROTOCOL_ERROR && stream == *answered {
                    observed.too_large.fetch_add(1, Ordering::Relaxed);
                } else if code == REFUSED_STREAM {
                    observed.refused.fetch_add(1, Ordering::Relaxed);
                }
                // An answer sent before its request's end is followed by a reset without an error; that
                // stream was counted when it began.
                if !is_admitted
                    && code != NO_ERROR
                    && let Err(verdict) = unadmitted.reset()
                {
                    observed.verdict.store(verdict, Ordering::Relaxed);
                }
            }
            Step::Leaves(RESETS_SAID) => observed.too_many_resets.store(true, Ordering::Relaxed),
            _ => {}
        });
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FrameLimiter<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // What was written may have led to a verdict.
        self.judge()?;
        if self.is_held() {
            // Admitting the connection wakes its task.
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        Poll::Ready(self.read(&buf.filled()[before..]))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FrameLimiter<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(&mut self.inner).poll_write(cx, buf))?;
        self.written(&buf[..n]);
        Poll::Ready(Ok(n))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, bufs))?;
        let mut left = n;
        for buf in bufs {
            let taken = left.min(buf.len());
            self.written(&buf[..taken]);
            left -= taken;
        }
        Poll::Ready(Ok(n))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::http::Refusal;

    const SETTINGS: u8 = 4;

    fn frame(kind: u8, flags: u8, len: u32) -> Vec<u8> {
        let [_, a, b, c] = len.to_be_bytes();
        let mut bytes = vec![a, b, c, kind, flags, 0, 0, 0, 1];
        bytes.resize(HEAD + len as usize, 7);
        bytes
    }

    fn limiter() -> (FrameLimiter<()>, Arc<Observed>) {
        let observed = Arc::<Observed>::default();
        let mut limiter = FrameLimiter::new((), &Limits::default(), Arc::clone(&observed));
        limiter.read(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        assert!(!observed.has_spoken());
        limiter.read(&frame(SETTINGS, 0, 6)).unwrap();
        assert!(observed.has_spoken());
        (limiter, observed)
    }

    #[test]
    fn frames_are_seen_at_every_split_of_the_bytes() {
        let frames = [(HEADERS, END_HEADERS, 40), (DATA, 0, 300), (PING, 0, 8), (DATA, END_STREAM, 0)];
        let bytes: Vec<u8> =
            frames.iter().flat_map(|(kind, flags, len)| frame(*kind, *flags, *len)).collect();
        let expected: Vec<Step> = frames
            .iter()
            .map(|(kind, flags, len)| Head { len: *len, kind: *kind, flags: *flags, stream: 1 })
            .flat_map(|head| [Step::Begins(head), Step::Ends(head)])
            .collect();
        for size in 1..=bytes.len() {
            let (mut scanner, mut steps) = (FrameScanner::after(0), Vec::new());
            bytes.chunks(size).for_each(|piece| scanner.feed(piece, |step| steps.push(step)));
            assert_eq!(steps, expected, "pieces of {size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pings_beyond_a_burst_come_once_in_an_interval() {
        let (mut limiter, observed) = limiter();
        let ping = frame(PING, 0, 8);
        for _ in 0..5 {
            limiter.read(&ping).unwrap();
        }
        for _ in 0..20 {
            tokio::time::advance(Duration::from_secs(10)).await;
            limiter.read(&ping).unwrap();
        }
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(limiter.read(&ping).is_err());
        assert_eq!(observed.verdict(), Some(Refusal::Pings));
    }

    #[tokio::test(start_paused = true)]
    async fn pings_that_answer_data_or_headers_are_free() {
        let (mut limiter, _meter) = limiter();
        for kind in [DATA, HEADERS] {
            for _ in 0..1_000 {
                limiter.written(&frame(kind, 0, 5));
                limiter.read(&frame(PING, 0, 8)).unwrap();
            }
        }
        // What else is sent, such as the answers to pings, frees none.
        let refused = (0..10).any(|_| {
            limiter.written(&frame(PING, ACK, 8));
            limiter.written(&frame(WINDOW_UPDATE, 0, 4));
            limiter.read(&frame(PING, 0, 8)).is_err()
        });
        assert!(refused);
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_carry_nothing_are_few() {
        for (kind, flags, len) in
            [(SETTINGS, 0, 0), (SETTINGS, ACK, 0), (2, 0, 5), (PING, ACK, 8), (DATA, 0, 0), (200, 0, 64)]
        {
            let (mut limiter, observed) = limiter();
            let taken = (0..1_000).take_while(|_| limiter.read(&frame(kind, flags, len)).is_ok()).count();
            assert!((90..=100).contains(&taken), "{kind}: {taken}");
            assert_eq!(observed.verdict(), Some(Refusal::IdleFrames));
        }
        let (mut limiter, observed) = limiter();
        assert!(observed.admit());
        for (kind, flags, len) in [
            (DATA, 0, 1),
            (DATA, END_STREAM, 0),
            (WINDOW_UPDATE, 0, 4),
            (RST_STREAM, 0, 4),
            (HEADERS, END_HEADERS, 3),
        ] {
            for _ in 0..1_000 {
                limiter.read(&frame(kind, flags, len)).unwrap();
            }
        }
    }

    fn on(stream: u32, mut frame: Vec<u8>) -> Vec<u8> {
        frame[5..HEAD].copy_from_slice(&stream.to_be_bytes());
        frame
    }

    #[tokio::test]
    async fn unadmitted_connection_is_not_read_beyond_its_streams() {
        let (mut limiter, observed) = limiter();
        let most = Limits::default().streams_before_authentication;
        for n in 0..most {
            assert!(!limiter.is_held(), "{n} streams");
            limiter.read(&on(2 * n + 1, frame(HEADERS, END_HEADERS, 5))).unwrap();
            // Data and trailers begin none.
            limiter.read(&on(2 * n + 1, frame(DATA, 0, 5))).unwrap();
            limiter.read(&on(2 * n + 1, frame(HEADERS, END_HEADERS | END_STREAM, 5))).unwrap();
        }
        assert!(!limiter.is_held());
        limiter.read(&on(2 * most + 1, frame(HEADERS, END_HEADERS, 5))).unwrap();
        assert!(limiter.is_held());
        assert_eq!(observed.verdict(), None);
        assert!(observed.admit());
        assert!(!observed.admit(), "it was admitted before");
        assert!(!limiter.is_held());
    }

    #[tokio::test]
    async fn resets_of_either_side_are_few_until_the_connection_is_admitted() {
        let most = Limits::default().streams_before_authentication as usize;
        let reset = frame(RST_STREAM, 0, 4);
        let (mut limiter, observed) = limiter();
        for _ in 0..most / 2 {
            limiter.read(&reset).unwrap();
            limiter.written(&reset);
        }
        assert_eq!(observed.verdict(), Some(Refusal::Resets));
        assert!(limiter.judge().is_err());

        // What follows an early answer is kas' own doing.
        let (mut limiter, observed) = self::limiter();
        let after_answer = [&frame(RST_STREAM, 0, 4)[..HEAD], &NO_ERROR.to_be_bytes()].concat();
        (0..10 * most).for_each(|_| limiter.written(&after_answer));
        assert_eq!(observed.verdict(), None);

        let (mut limiter, observed) = self::limiter();
        let windows = (0..10_000).take_while(|_| limiter.read(&frame(WINDOW_UPDATE, 0, 4)).is_ok()).count();
        assert_eq!(windows, most * WINDOWS_PER_STREAM as usize);
        assert_eq!(observed.verdict(), Some(Refusal::IdleFrames));

        let (mut limiter, observed) = self::limiter();
        assert!(observed.admit());
        for _ in 0..10 * most {
            limiter.read(&reset).unwrap();
            limiter.written(&reset);
        }
        limiter.judge().unwrap();
    }

    #[tokio::test]
    async fn only_a_status_followed_by_an_error_counts_as_headers_too_large() {
        let code = |code: u32| [&frame(RST_STREAM, 0, 4)[..HEAD], &code.to_be_bytes()].concat();
        let status = frame(HEADERS, END_HEADERS | END_STREAM, 5);
        let (mut limiter, observed) = limiter();
        for (bytes, counts) in [
            ([status.clone(), code(PROTOCOL_ERROR)].concat(), 1),
            // The rest of a request is not needed after its answer.
            ([status.clone(), code(0)].concat(), 0),
            // A bad request.
            (on(3, code(PROTOCOL_ERROR)), 0),
            // An answer with something in it.
            ([on(5, frame(HEADERS, END_HEADERS | END_STREAM, 60)), on(5, code(PROTOCOL_ERROR))].concat(), 0),
            ([on(7, status), frame(DATA, 0, 4), on(7, code(PROTOCOL_ERROR))].concat(), 1),
        ] {
            // However the writes fall.
            bytes.chunks(3).for_each(|piece| limiter.written(piece));
            assert_eq!(observed.take_too_large(), counts, "{bytes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_block_is_open_until_its_last_byte() {
        let (mut limiter, observed) = limiter();
        let block =
            [frame(HEADERS, 0, 10), frame(CONTINUATION, 0, 0), frame(CONTINUATION, END_HEADERS, 5)].concat();
        limiter.read(&block).unwrap();
        assert_eq!(observed.head_age(), None, "one read, no time");
        for byte in &block[..block.len() - 1] {
            limiter.read(std::slice::from_ref(byte)).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        // The head of its first frame has nine bytes.
        let age = Duration::from_secs(block.len() as u64 - HEAD as u64);
        assert_eq!(observed.head_age(), Some(age));
        limiter.read(&block[block.len() - 1..]).unwrap();
        assert_eq!(observed.head_age(), None);
    }
}
