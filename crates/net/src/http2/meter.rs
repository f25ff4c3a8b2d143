//! Counts what a peer can send for nothing: frames that HTTP/2 libraries answer or drop without an end.
//!
//! It looks at frame heads as the bytes pass, holds nothing of them, and changes none. It also sees what
//! HTTP/2 answers by itself and tells nobody of: that a header list is too large.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{Limits, Refusal};

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
/// What HTTP/2 says of a stream beyond those that may be open. Nothing of ours says it.
const REFUSED_STREAM: u32 = 7;
/// The end of what the library says with GOAWAY about each of its limits to resets. Its error does not repeat
/// it.
const RESETS_SAID: u32 = u32::from_be_bytes(*b"sets");
/// The block of an answer that is a status alone is no longer; with an HPACK table that changes its size,
/// too.
const STATUS_ALONE: u32 = 16;

const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Settings, priorities, acknowledgements, empty data and frames of unknown types that may come at once, and
/// in each second. Clients send a handful of them in a connection's life.
const IDLE_FRAMES: f64 = 100.0;
const IDLE_FRAMES_PER_SECOND: f64 = 10.0;
/// Windows opened and GOAWAYs, for each stream that a connection may begin before it is known. Clients open
/// the window of each stream once or twice, and who is not known is sent nothing for which they would do so
/// again.
const WINDOWS_PER_STREAM: u32 = 4;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    len: u32,
    kind: u8,
    flags: u8,
    stream: u32,
}

/// Goes from one frame's head to the next in one direction of a connection.
#[derive(Debug)]
struct Walk {
    head: [u8; HEAD],
    have: usize,
    /// Bytes until the next head.
    skip: u32,
    /// Whose payload is passing.
    frame: Option<Head>,
    /// The last four bytes of a reset or a GOAWAY, as far as they have passed.
    last: u32,
}

/// What a walk has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begins(Head),
    Ends(Head),
    /// A stream was reset, with this code.
    Resets(u32, u32),
    /// GOAWAY, which ends with these bytes.
    Leaves(u32),
}

impl Walk {
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

/// What is known of a connection by its frames; shared with the connection's own task.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// The first frame has begun.
    spoken: AtomicBool,
    /// A stream of it was authenticated.
    known: AtomicBool,
    /// Since when a header block is open.
    block: Mutex<Option<Instant>>,
    verdict: AtomicU8,
    /// Header lists that HTTP/2 has refused, and nobody has counted.
    too_large: AtomicU32,
    /// Streams beyond those that may be open, which nobody has counted either.
    refused: AtomicU32,
    /// HTTP/2 has said that there were too many resets.
    too_many_resets: AtomicBool,
}

const PINGS: u8 = 1;
const IDLE: u8 = 2;
const RESETS: u8 = 3;

impl Meter {
    /// Whether it is known who this is.
    pub(super) fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// It is known now; returns whether that is news.
    pub(super) fn knows(&self) -> bool {
        !self.known.swap(true, Ordering::Relaxed)
    }

    /// Whether a frame has come.
    pub(super) fn has_spoken(&self) -> bool {
        self.spoken.load(Ordering::Relaxed)
    }

    /// For how long the header block that is coming has not come to its end.
    pub(super) fn block_age(&self) -> Option<Duration> {
        self.block.lock().map(|since| since.elapsed())
    }

    /// Whether HTTP/2 has left because of resets.
    pub(super) fn says_resets(&self) -> bool {
        self.too_many_resets.load(Ordering::Relaxed)
    }

    /// Returns how many header lists HTTP/2 has refused since the last call.
    pub(super) fn take_too_large(&self) -> u32 {
        self.too_large.swap(0, Ordering::Relaxed)
    }

    /// Returns how many streams HTTP/2 has refused since the last call, because too many were open.
    pub(super) fn take_refused(&self) -> u32 {
        self.refused.swap(0, Ordering::Relaxed)
    }

    /// Why the connection was ended.
    pub(super) fn verdict(&self) -> Option<Refusal> {
        match self.verdict.load(Ordering::Relaxed) {
            PINGS => Some(Refusal::Pings),
            IDLE => Some(Refusal::IdleFrames),
            RESETS => Some(Refusal::Resets),
            _ => None,
        }
    }
}

/// A connection whose frames are looked at, from the side of the server.
#[derive(Debug)]
pub(super) struct Metered<S> {
    inner: S,
    inbound: Walk,
    outbound: Walk,
    pings: Bucket,
    idle: Bucket,
    unknown: Unknown,
    meter: Arc<Meter>,
    in_block: bool,
    /// The stream whose answer, or what came after it, was short and its end.
    answered: u32,
}

/// What a connection has done before it was known.
#[derive(Debug)]
struct Unknown {
    /// Streams that it may begin, and resets of either side.
    most: u32,
    begun: u32,
    /// Of the latest stream that was begun.
    latest: u32,
    resets: u32,
    windows: u32,
}

impl Unknown {
    fn new(most: u32) -> Self {
        Self { most, begun: 0, latest: 0, resets: 0, windows: 0 }
    }

    /// Takes note of a frame that came. An error is the verdict: it is one too many.
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

impl<S> Metered<S> {
    pub(super) fn new(inner: S, limits: &Limits) -> (Self, Arc<Meter>) {
        let meter = Arc::<Meter>::default();
        let metered = Self {
            inner,
            inbound: Walk::after(PREFACE),
            outbound: Walk::after(0),
            pings: Bucket::new(f64::from(limits.pings), limits.ping_interval.as_secs_f64().recip()),
            idle: Bucket::new(IDLE_FRAMES, IDLE_FRAMES_PER_SECOND),
            unknown: Unknown::new(limits.streams_before_authentication),
            meter: Arc::clone(&meter),
            in_block: false,
            answered: 0,
        };
        (metered, meter)
    }

    fn read(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Self { inbound, pings, idle, unknown, meter, in_block, .. } = self;
        let was_in_block = *in_block;
        let is_known = meter.is_known();
        inbound.feed(bytes, |step| match step {
            Step::Begins(head) => {
                // A plain store costs less than to ask first.
                meter.spoken.store(true, Ordering::Relaxed);
                if !is_known && let Err(verdict) = unknown.came(head) {
                    meter.verdict.store(verdict, Ordering::Relaxed);
                }
                let (bucket, verdict) = match head.kind {
                    HEADERS | CONTINUATION => {
                        *in_block = true;
                        return;
                    }
                    RST_STREAM | GOAWAY | WINDOW_UPDATE => return,
                    DATA if head.len > 0 || head.flags & END_STREAM != 0 => return,
                    PING if head.flags & ACK == 0 => (&mut *pings, PINGS),
                    // Settings are answered, and the rest is dropped.
                    _ => (&mut *idle, IDLE),
                };
                if !bucket.take() {
                    meter.verdict.store(verdict, Ordering::Relaxed);
                }
            }
            Step::Ends(head) if matches!(head.kind, HEADERS | CONTINUATION) => {
                *in_block = head.flags & END_HEADERS == 0;
            }
            Step::Ends(_) | Step::Resets(..) | Step::Leaves(_) => {}
        });
        if was_in_block || *in_block {
            let mut block = meter.block.lock();
            if !*in_block {
                *block = None;
            } else if block.is_none() {
                *block = Some(Instant::now());
            }
        }
        self.judge()
    }

    fn judge(&self) -> io::Result<()> {
        match self.meter.verdict() {
            None => Ok(()),
            Some(why) => Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.as_str())),
        }
    }

    /// Whether nothing is read before it is known who this is: it has begun one stream more than it may. What
    /// it sends on stays with the system, and with the peer.
    fn is_held(&self) -> bool {
        self.unknown.begun > self.unknown.most && !self.meter.is_known()
    }

    fn written(&mut self, bytes: &[u8]) {
        let Self { outbound, pings, unknown, meter, answered, .. } = self;
        let is_known = meter.is_known();
        outbound.feed(bytes, |step| match step {
            Step::Begins(head @ Head { kind: DATA | HEADERS, .. }) => {
                // Who measures bandwidth answers what it receives with a ping, as gRPC's libraries do.
                pings.level = pings.size;
                if head.kind == HEADERS && head.flags & END_STREAM != 0 && head.len <= STATUS_ALONE {
                    *answered = head.stream;
                }
            }
            // Only a header list that is too large is answered and then called an error: no answer of ours is
            // a status alone, and a request that is given up after its end is no error.
            Step::Resets(stream, code) => {
                if code == PROTOCOL_ERROR && stream == *answered {
                    meter.too_large.fetch_add(1, Ordering::Relaxed);
                } else if code == REFUSED_STREAM {
                    meter.refused.fetch_add(1, Ordering::Relaxed);
                }
                // An answer that did not wait for its request's end is followed by a reset without an error:
                // that stream was counted when it began.
                if !is_known
                    && code != NO_ERROR
                    && let Err(verdict) = unknown.reset()
                {
                    meter.verdict.store(verdict, Ordering::Relaxed);
                }
            }
            Step::Leaves(RESETS_SAID) => meter.too_many_resets.store(true, Ordering::Relaxed),
            _ => {}
        });
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // It may have been earned by what was written.
        self.judge()?;
        if self.is_held() {
            // Who notes that it is known wakes the connection's task.
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        Poll::Ready(self.read(&buf.filled()[before..]))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
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
    use super::*;

    const SETTINGS: u8 = 4;

    fn frame(kind: u8, flags: u8, len: u32) -> Vec<u8> {
        let [_, a, b, c] = len.to_be_bytes();
        let mut bytes = vec![a, b, c, kind, flags, 0, 0, 0, 1];
        bytes.resize(HEAD + len as usize, 7);
        bytes
    }

    fn metered() -> (Metered<()>, Arc<Meter>) {
        let (mut metered, meter) = Metered::new((), &Limits::default());
        metered.read(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        assert!(!meter.has_spoken());
        metered.read(&frame(SETTINGS, 0, 6)).unwrap();
        assert!(meter.has_spoken());
        (metered, meter)
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
            let (mut walk, mut steps) = (Walk::after(0), Vec::new());
            bytes.chunks(size).for_each(|piece| walk.feed(piece, |step| steps.push(step)));
            assert_eq!(steps, expected, "pieces of {size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pings_beyond_a_burst_come_once_in_an_interval() {
        let (mut metered, meter) = metered();
        let ping = frame(PING, 0, 8);
        for _ in 0..5 {
            metered.read(&ping).unwrap();
        }
        for _ in 0..20 {
            tokio::time::advance(Duration::from_secs(10)).await;
            metered.read(&ping).unwrap();
        }
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(metered.read(&ping).is_err());
        assert_eq!(meter.verdict(), Some(Refusal::Pings));
    }

    #[tokio::test(start_paused = true)]
    async fn pings_that_answer_data_or_headers_are_free() {
        let (mut metered, _meter) = metered();
        for kind in [DATA, HEADERS] {
            for _ in 0..1_000 {
                metered.written(&frame(kind, 0, 5));
                metered.read(&frame(PING, 0, 8)).unwrap();
            }
        }
        // What else is sent, such as the answers to pings, frees none.
        let refused = (0..10).any(|_| {
            metered.written(&frame(PING, ACK, 8));
            metered.written(&frame(WINDOW_UPDATE, 0, 4));
            metered.read(&frame(PING, 0, 8)).is_err()
        });
        assert!(refused);
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_carry_nothing_are_few() {
        for (kind, flags, len) in
            [(SETTINGS, 0, 0), (SETTINGS, ACK, 0), (2, 0, 5), (PING, ACK, 8), (DATA, 0, 0), (200, 0, 64)]
        {
            let (mut metered, meter) = metered();
            let taken = (0..1_000).take_while(|_| metered.read(&frame(kind, flags, len)).is_ok()).count();
            assert!((90..=100).contains(&taken), "{kind}: {taken}");
            assert_eq!(meter.verdict(), Some(Refusal::IdleFrames));
        }
        let (mut metered, meter) = metered();
        assert!(meter.knows());
        for (kind, flags, len) in [
            (DATA, 0, 1),
            (DATA, END_STREAM, 0),
            (WINDOW_UPDATE, 0, 4),
            (RST_STREAM, 0, 4),
            (HEADERS, END_HEADERS, 3),
        ] {
            for _ in 0..1_000 {
                metered.read(&frame(kind, flags, len)).unwrap();
            }
        }
    }

    fn on(stream: u32, mut frame: Vec<u8>) -> Vec<u8> {
        frame[5..HEAD].copy_from_slice(&stream.to_be_bytes());
        frame
    }

    #[tokio::test]
    async fn who_is_not_known_is_not_read_beyond_its_streams_until_it_is() {
        let (mut metered, meter) = metered();
        let most = Limits::default().streams_before_authentication;
        for n in 0..most {
            assert!(!metered.is_held(), "{n} streams");
            metered.read(&on(2 * n + 1, frame(HEADERS, END_HEADERS, 5))).unwrap();
            // Data and trailers begin none.
            metered.read(&on(2 * n + 1, frame(DATA, 0, 5))).unwrap();
            metered.read(&on(2 * n + 1, frame(HEADERS, END_HEADERS | END_STREAM, 5))).unwrap();
        }
        assert!(!metered.is_held());
        metered.read(&on(2 * most + 1, frame(HEADERS, END_HEADERS, 5))).unwrap();
        assert!(metered.is_held());
        assert_eq!(meter.verdict(), None);
        assert!(meter.knows());
        assert!(!meter.knows(), "that is no news");
        assert!(!metered.is_held());
    }

    #[tokio::test]
    async fn resets_of_either_side_are_few_until_it_is_known_who_this_is() {
        let most = Limits::default().streams_before_authentication as usize;
        let reset = frame(RST_STREAM, 0, 4);
        let (mut metered, meter) = metered();
        for _ in 0..most / 2 {
            metered.read(&reset).unwrap();
            metered.written(&reset);
        }
        assert_eq!(meter.verdict(), Some(Refusal::Resets));
        assert!(metered.judge().is_err());

        // What follows an early answer is kas' own doing.
        let (mut metered, meter) = self::metered();
        let after_answer = [&frame(RST_STREAM, 0, 4)[..HEAD], &NO_ERROR.to_be_bytes()].concat();
        (0..10 * most).for_each(|_| metered.written(&after_answer));
        assert_eq!(meter.verdict(), None);

        let (mut metered, meter) = self::metered();
        let windows = (0..10_000).take_while(|_| metered.read(&frame(WINDOW_UPDATE, 0, 4)).is_ok()).count();
        assert_eq!(windows, most * WINDOWS_PER_STREAM as usize);
        assert_eq!(meter.verdict(), Some(Refusal::IdleFrames));

        let (mut metered, meter) = self::metered();
        assert!(meter.knows());
        for _ in 0..10 * most {
            metered.read(&reset).unwrap();
            metered.written(&reset);
        }
        metered.judge().unwrap();
    }

    #[tokio::test]
    async fn only_an_answer_that_is_then_called_an_error_tells_of_headers_too_large() {
        let code = |code: u32| [&frame(RST_STREAM, 0, 4)[..HEAD], &code.to_be_bytes()].concat();
        let status = frame(HEADERS, END_HEADERS | END_STREAM, 5);
        let (mut metered, meter) = metered();
        for (bytes, counts) in [
            ([status.clone(), code(PROTOCOL_ERROR)].concat(), 1),
            // A request whose rest nobody wants after its answer.
            ([status.clone(), code(0)].concat(), 0),
            // A bad request.
            (on(3, code(PROTOCOL_ERROR)), 0),
            // An answer with something in it.
            ([on(5, frame(HEADERS, END_HEADERS | END_STREAM, 60)), on(5, code(PROTOCOL_ERROR))].concat(), 0),
            ([on(7, status), frame(DATA, 0, 4), on(7, code(PROTOCOL_ERROR))].concat(), 1),
        ] {
            // However the writes fall.
            bytes.chunks(3).for_each(|piece| metered.written(piece));
            assert_eq!(meter.take_too_large(), counts, "{bytes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_block_is_open_until_its_last_byte() {
        let (mut metered, meter) = metered();
        let block =
            [frame(HEADERS, 0, 10), frame(CONTINUATION, 0, 0), frame(CONTINUATION, END_HEADERS, 5)].concat();
        metered.read(&block).unwrap();
        assert_eq!(meter.block_age(), None, "one read, no time");
        for byte in &block[..block.len() - 1] {
            metered.read(std::slice::from_ref(byte)).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        // The head of its first frame has nine bytes.
        let age = Duration::from_secs(block.len() as u64 - HEAD as u64);
        assert_eq!(meter.block_age(), Some(age));
        metered.read(&block[block.len() - 1..]).unwrap();
        assert_eq!(meter.block_age(), None);
    }
}
