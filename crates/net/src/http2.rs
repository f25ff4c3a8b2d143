//! HTTP/2 listeners: every limit set explicitly, age and leaving, and streams that can be reset
//! from outside.
//!
//! Rule behind the windows: the connection's window is at least the number of streams times the
//! stream's window, else one reader that stalls freezes all others. Measured with the library's
//! defaults (both 1 MiB): one caller that stopped reading stopped its agent for everybody.
//!
//! `admission` bounds connections that are not authenticated yet, and how many of them are served at once;
//! `meter` bounds what a connection sends for nothing.

mod meter;

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::{body::Incoming, server::conn::http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use process::lifecycle::{Lifecycle, Phase};
use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior},
};
use tokio_rustls::TlsAcceptor;

use self::meter::{Meter, Metered};
use crate::{
    admission::{
        half_open::{HalfOpen, Place},
        scheduler::{AdmissionScheduler, Permit},
    },
    io::{AcceptFailures, FIRST_TURNS, Fair, Listener, Stream, TURN},
    tls, websocket_door,
};

/// A response's body.
pub type Body = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;
/// What a connection returns for a request.
pub type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Largest frame: 64 KiB needs a quarter of the writes that the default of 16 KiB does, and
/// larger ones let one stream hold up the others.
pub const FRAME: u32 = 64 * 1024;
/// Header list of a request or answer, unless a listener is told otherwise.
pub const HEADER_LIST: u32 = 16 * 1024;
/// HTTP/2 itself takes header lists of this many times what is allowed.
pub const HEADER_LIST_ROOM: u32 = 2;
/// What a peer may send on one stream before we read it.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest window of HTTP/2: "not limited here".
pub const UNLIMITED_WINDOW: u32 = (1 << 31) - 1;
/// After the last phase, time for the last frames to be written.
const FLUSH: Duration = Duration::from_millis(500);
/// Connections that are accepted before others have their turn: as many take about as long as a turn of one
/// of them.
const ACCEPTED_AT_ONCE: u32 = 8;

/// The limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Open streams of one connection.
    pub streams: u32,
    /// Header list of a request, in bytes as RFC 9113 counts them. Who answers refuses larger ones, in words;
    /// from [`HEADER_LIST_ROOM`] times as much it is HTTP/2 itself that does, with 431 and nothing else.
    pub header_list: u32,
    /// What a peer may send on one connection before we read it, in bytes.
    pub connection_window: u32,
    /// Streams that a peer opened and reset before we saw them.
    pub pending_accept_resets: usize,
    /// Streams that we reset, or whose frames came after our reset, over the connection's life.
    pub local_error_resets: usize,
    /// A PING after this time…
    pub keepalive_interval: Duration,
    /// …and the connection ends when it is not answered within this one.
    pub keepalive_timeout: Duration,
}

/// Agents: many long streams, cancelled at will by callers that the agent does not know.
///
/// The window is that of all streams together, and no larger: half of it is also what HTTP/2 lets a peer
/// spend on DATA frames of a few bytes that nobody reads, each of which holds half a kilobyte. With the
/// largest window of all that were 2 GiB for one connection.
pub const AGENT: Settings = Settings {
    streams: 1_000,
    header_list: HEADER_LIST,
    connection_window: 1_000 * STREAM_WINDOW,
    pending_accept_resets: 1_000,
    local_error_resets: 100_000,
    keepalive_interval: Duration::from_secs(15),
    keepalive_timeout: Duration::from_secs(10),
};

/// GitLab and operators.
pub const API: Settings = Settings {
    streams: 200,
    header_list: HEADER_LIST,
    connection_window: 64 << 20,
    pending_accept_resets: 200,
    local_error_resets: 1_024,
    keepalive_interval: Duration::from_secs(15),
    keepalive_timeout: Duration::from_secs(10),
};

/// Other replicas, both ends. Resets are not limited: a replica cancels as often as its callers do.
pub const PEER: Settings = Settings {
    streams: 8_000,
    header_list: HEADER_LIST,
    connection_window: UNLIMITED_WINDOW,
    pending_accept_resets: 1 << 20,
    local_error_resets: usize::MAX,
    keepalive_interval: Duration::from_secs(3),
    keepalive_timeout: Duration::from_secs(2),
};

impl Settings {
    /// Returns these with other numbers of streams, and of resets by us. The window still holds all streams:
    /// `streams` may be at most 8,191, of which it is the largest.
    #[must_use]
    pub fn with_streams(self, streams: u32, resets: u32) -> Self {
        Self {
            streams,
            connection_window: self
                .connection_window
                .max(streams.saturating_mul(STREAM_WINDOW))
                .min(UNLIMITED_WINDOW),
            pending_accept_resets: streams as usize,
            local_error_resets: resets as usize,
            ..self
        }
    }
}

/// What a peer that is unknown, silent or idle may take up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Connections of the listener without an authenticated stream, handshakes included. When there are so
    /// many, the next waits until one of them is known, or takes the place of the oldest after a second.
    pub half_open: usize,
    /// A TLS handshake must be over within this time, and so must what may follow it: an upgrade to
    /// WebSocket.
    pub handshake: Duration,
    /// The first frame of HTTP/2 must come within this time after that.
    pub first_frame: Duration,
    /// A header block that has begun must be complete within about this time.
    pub headers: Duration,
    /// Without one authenticated stream a connection is closed after this time.
    pub authentication: Duration,
    /// Until then it is read as far as this many of its streams, and closed after as many resets of either
    /// side; above zero. What a proxy joins waits until the first of it is known.
    pub streams_before_authentication: u32,
    /// A connection without an open stream gets GOAWAY after about this time.
    pub idle: Duration,
    /// Pings that may come at once; data or headers that are sent to the peer make them as many again…
    pub pings: u32,
    /// …and one more after each of these; above zero.
    pub ping_interval: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            half_open: 1_024,
            handshake: Duration::from_secs(5),
            first_frame: Duration::from_secs(5),
            headers: Duration::from_secs(10),
            authentication: Duration::from_secs(10),
            streams_before_authentication: 100,
            idle: Duration::from_secs(300),
            pings: 5,
            ping_interval: Duration::from_secs(10),
        }
    }
}

/// Answers what comes in on one listener.
pub trait Service: Send + Sync + 'static {
    /// A connection was made.
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection>;
    /// A connection could not be served; for a counter.
    fn refused(&self, _why: Refusal) {}
    /// A handshake failed: beside [`Service::refused`], for who has to know why.
    fn not_opened(&self, peer: Option<SocketAddr>, error: &io::Error) {
        tracing::debug!(peer = peer.map(tracing::field::display), error = %error, "a connection did not get past its handshake");
    }
}

/// Why a connection was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// There were too many that had shown nothing yet, and this was the oldest.
    HalfOpen,
    /// No frame came in time.
    Silent,
    /// A header block was not complete in time, or a header list was too large; for the latter the connection
    /// stays, unless it was too large for any peer that means well.
    Headers,
    /// Too many pings.
    Pings,
    /// Too many frames that carry nothing.
    IdleFrames,
    /// Too many streams were reset.
    Resets,
    /// One stream more than may be open; the connection stays.
    Streams,
    /// It had no stream for long: it was asked to end.
    Idle,
    /// The TLS handshake or the upgrade to WebSocket failed or took too long.
    Handshake,
    /// Accepting failed: usually out of file descriptors.
    Accept,
    /// It had no authenticated stream in time, or too many that were not.
    Unauthenticated,
}

impl Refusal {
    /// Returns why, in words for a log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HalfOpen => "it had shown nothing yet when others waited",
            Self::Silent => "no frame came in time",
            Self::Headers => "a header block was not complete in time, or too large",
            Self::Pings => "too many pings",
            Self::IdleFrames => "too many frames that carry nothing",
            Self::Resets => "too many streams were reset",
            Self::Streams => "too many streams were open",
            Self::Idle => "no stream for a long time",
            Self::Handshake => "the handshake failed",
            Self::Accept => "it could not be accepted",
            Self::Unauthenticated => "no stream was authenticated in time, or too many were not",
        }
    }

    /// Why HTTP/2 itself has ended a connection, if that was a limit: its words are those of the library.
    fn of(error: &hyper::Error) -> Option<Self> {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        let http2 = loop {
            let error = cause?;
            match error.downcast_ref::<h2::Error>() {
                Some(found) => break found,
                None => cause = error.source(),
            }
        };
        if !http2.is_go_away() || !http2.is_library() || http2.reason() != Some(h2::Reason::ENHANCE_YOUR_CALM)
        {
            return None;
        }
        let text = http2.to_string();
        let says = |word| text.contains(word);
        Some(match () {
            () if says("resets") => Self::Resets,
            () if says("header") || says("continuations") => Self::Headers,
            () => Self::IdleFrames,
        })
    }
}

/// One connection.
pub trait Connection: Send + Sync + 'static {
    /// A stream was opened. Call [`StreamSlot::arm`] before returning when it must be possible to
    /// reset it from outside.
    fn call(self: Arc<Self>, request: Request<Incoming>, slot: &StreamSlot) -> Answer;
    /// Whether the connection may stay.
    fn standing(&self) -> Standing;
    /// GOAWAY was sent because of age or because this process leaves: end what need not go on.
    fn going_away(&self, reason: GoAway);
    /// Called every few seconds.
    fn tick(&self) {}
    /// The connection is over.
    fn closed(&self) {}
}

/// Whether a connection may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No authenticated stream yet.
    New,
    /// It has had one.
    Authenticated,
    /// Too many failed: it is closed.
    Expelled,
}

/// Why GOAWAY was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoAway {
    /// The connection has its age.
    Age,
    /// It has had no stream for long.
    Idle,
    /// The process leaves.
    Leaving,
}

/// Resets a stream with CANCEL, whatever it waits for.
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
/// HTTP/2 spawns the stream's task right after the service has been called for it, in the same
/// poll of the connection, so what the service leaves here belongs to the next task.
#[derive(Clone, Debug)]
pub struct StreamSlot(Arc<Slot>);

#[derive(Debug)]
struct Slot {
    /// Of the connection.
    meter: Arc<Meter>,
    arm: Mutex<Option<Arm>>,
    /// Streams whose tasks run.
    open: AtomicUsize,
    /// Streams that were ever opened.
    opened: AtomicU64,
}

/// A stream whose task runs.
struct OpenStream(Arc<Slot>);

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
    fn of(meter: Arc<Meter>) -> Self {
        let (arm, open, opened) = Default::default();
        Self(Arc::new(Slot { meter, arm, open, opened }))
    }

    /// Runs a stream in a task of its own.
    ///
    /// As long as it is unknown who this is, its first step is part of the connection's turn. It is usually
    /// the only one: that there is no token, or a wrong one, is known at once. Tasks of such streams would be
    /// out of turn, and there are as many as a connection has streams.
    fn start(&self, stream: impl Future<Output = ()> + Send + 'static) {
        if self.0.meter.is_known() {
            drop(tokio::spawn(stream));
            return;
        }
        let mut stream = Box::pin(stream);
        // Whatever it waits for is told of the right waker by the first step of the task.
        if stream.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            drop(tokio::spawn(stream));
        }
    }

    /// Makes the stream that is being opened resettable.
    pub fn arm(&self) -> Arc<StreamReset> {
        let reset = Arc::<StreamReset>::default();
        self.put(Arm::Reset(Arc::clone(&reset)));
        reset
    }

    /// Resets the stream that is being opened at `deadline`, if it still is: a peer that does not
    /// read cannot be told anything else.
    pub fn arm_until(&self, deadline: Instant) {
        self.put(Arm::Until(deadline));
    }

    fn put(&self, arm: Arm) {
        *self.0.arm.lock().unwrap_or_else(PoisonError::into_inner) = Some(arm);
    }

    fn enter(&self) -> OpenStream {
        self.0.opened.fetch_add(1, Ordering::Relaxed);
        self.0.open.fetch_add(1, Ordering::Relaxed);
        OpenStream(Arc::clone(&self.0))
    }

    /// Returns how many streams were ever opened, when none is open.
    fn idle_after(&self) -> Option<u64> {
        (self.0.open.load(Ordering::Relaxed) == 0).then(|| self.0.opened.load(Ordering::Relaxed))
    }
}

impl<F> hyper::rt::Executor<F> for StreamSlot
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let arm = self.0.arm.lock().unwrap_or_else(PoisonError::into_inner).take();
        let open = self.enter();
        match arm {
            None => self.start(async move {
                let _open = open;
                future.await;
            }),
            Some(Arm::Reset(reset)) => {
                self.start(Resettable { future: Some(Box::pin(future)), reset, _open: open });
            }
            Some(Arm::Until(deadline)) => self.start(async move {
                let _open = open;
                // Dropping the stream's parts resets it.
                let _ = tokio::time::timeout_at(deadline, future).await;
            }),
        }
    }
}

/// A stream's task that ends when its stream is reset. Dropping the stream's parts makes HTTP/2
/// discard what it still holds for it and send RST_STREAM(CANCEL).
struct Resettable<F> {
    future: Option<Pin<Box<F>>>,
    reset: Arc<StreamReset>,
    _open: OpenStream,
}

impl<F: Future<Output = ()>> Future for Resettable<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.reset.poll_reset(cx).is_ready() {
            self.future = None;
            return Poll::Ready(());
        }
        match &mut self.future {
            Some(future) => future.as_mut().poll(cx),
            None => Poll::Ready(()),
        }
    }
}

/// When connections get GOAWAY because of their age.
#[derive(Clone, Copy, Debug)]
pub struct Age {
    /// Mean age; each connection's own is up to a tenth off, so that they do not move together.
    pub age: Duration,
    /// Streams that are still busy this long after GOAWAY are cut; `None`: never.
    pub grace: Option<Duration>,
}

/// One listener with what it serves.
pub struct Server {
    /// Where connections come from.
    pub listener: Listener,
    /// TLS, unless plain; each handshake is by what it is then.
    pub tls: Option<tls::Live<rustls::ServerConfig>>,
    /// Whether HTTP/2 may come inside WebSocket too.
    pub websocket: bool,
    /// What a connection may use.
    pub settings: Settings,
    /// What one that is unknown, silent or idle may.
    pub limits: Limits,
    /// Age limit of connections, if any.
    pub age: Option<Age>,
    /// Who answers.
    pub service: Arc<dyn Service>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl Server {
    /// Serves until the lifecycle is [`Phase::Stopped`] and the connections have ended.
    pub async fn run(self, lifecycle: Lifecycle) {
        let tasks = tokio_util::task::TaskTracker::new();
        let half_open = HalfOpen::new(self.limits.half_open);
        let admission = AdmissionScheduler::of_this_runtime();
        let mut failures = AcceptFailures::default();
        let mut accepted_at_once = 0;
        loop {
            if accepted_at_once == ACCEPTED_AT_ONCE {
                accepted_at_once = 0;
                tokio::task::yield_now().await;
            }
            accepted_at_once += 1;
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = lifecycle.reached(Phase::Stopped) => break,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if failures.take(&self.listener, &error).await {
                        self.service.refused(Refusal::Accept);
                    }
                    continue;
                }
            };
            // Those that come meanwhile wait in the system's queue.
            let place = tokio::select! {
                place = half_open.enter(|| self.service.refused(Refusal::HalfOpen)) => place,
                () = lifecycle.reached(Phase::Stopped) => break,
            };
            let service = Arc::clone(&self.service);
            let (settings, limits, age) = (self.settings, self.limits, self.age);
            let lifecycle = lifecycle.clone();
            let serve = Serve { peer, settings, limits, age, service, lifecycle, since: Instant::now() };
            let ticket = admission.join(peer.map(|peer| peer.ip()));
            let tls = self.tls.as_ref().map(|tls| TlsAcceptor::from(tls.current()));
            tasks.spawn(serve.run(stream, tls, self.websocket, place, ticket));
        }
        tasks.close();
        tasks.wait().await;
    }
}

fn late(_: tokio::time::error::Elapsed) -> io::Error {
    io::ErrorKind::TimedOut.into()
}

/// Does what comes before HTTP/2: TLS, WebSocket, or both. The first must be over at `by`, and the other
/// `within` a time.
async fn open(
    stream: Stream,
    tls: Option<TlsAcceptor>,
    websocket: bool,
    mut by: Instant,
    within: Duration,
) -> io::Result<Stream> {
    let mut is_http2 = false;
    // TLS is for TCP; a Unix socket is the system's business.
    let mut stream = match (tls, stream) {
        (Some(tls), Stream::Tcp(stream)) => {
            let stream = tokio::time::timeout_at(by, tls.accept(stream)).await.map_err(late)??;
            by = Instant::now() + within;
            is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            Stream::Tls(Box::new(stream))
        }
        (_, stream) => stream,
    };
    if websocket && !is_http2 {
        stream = tokio::time::timeout_at(by, websocket_door::enter(stream, within)).await.map_err(late)??;
    }
    Ok(stream)
}

/// What a connection is served by.
struct Serve {
    peer: Option<SocketAddr>,
    settings: Settings,
    limits: Limits,
    age: Option<Age>,
    service: Arc<dyn Service>,
    lifecycle: Lifecycle,
    /// When what is served began: the connection, or HTTP/2 inside of what had to be opened first.
    since: Instant,
}

impl Serve {
    /// Serves one connection from its first byte to its end.
    async fn run(
        mut self,
        stream: Stream,
        tls: Option<TlsAcceptor>,
        websocket: bool,
        place: Place,
        mut ticket: Permit,
    ) {
        let limits = self.limits;
        let is_opened = tls.is_some() || websocket;
        let silence =
            if is_opened { limits.handshake } else { limits.first_frame.min(limits.authentication) };
        let (by, service) = (self.since + silence, Arc::clone(&self.service));
        // Boxed: the handshakes' state is large and short-lived.
        let opened = Box::pin(async {
            // A connection that has sent nothing is not scheduled.
            match tokio::time::timeout_at(by, stream.speaks()).await {
                Err(_) if !is_opened => {
                    service.refused(Refusal::Silent);
                    return Err(io::ErrorKind::TimedOut.into());
                }
                spoken => spoken.map_err(late)??,
            }
            if !is_opened {
                return Ok(stream);
            }
            let mut opening = pin!(open(stream, tls, websocket, by, limits.handshake));
            poll_fn(|cx| ticket.poll(cx, |cx| opening.as_mut().poll(cx))).await
        });
        let opened = tokio::select! {
            opened = opened => opened,
            () = place.lost() => return,
            // Who has not shown anything yet does not delay the exit.
            () = self.lifecycle.reached(Phase::Stopped) => return,
        };
        match opened {
            Ok(stream) => {
                if is_opened {
                    self.since = Instant::now();
                }
                self.connection(stream, place, ticket).await;
            }
            Err(error) if is_opened => {
                self.service.not_opened(self.peer, &error);
                self.service.refused(Refusal::Handshake);
            }
            Err(error) => {
                tracing::debug!(peer = self.peer.map(tracing::field::display), error = %error, "connection ended");
            }
        }
    }

    /// Serves one connection to its end. It keeps its place among the half-open ones until it is known.
    async fn connection(self, stream: Stream, place: Place, mut ticket: Permit) {
        let Self { peer, settings, limits, age, service, lifecycle, since } = self;
        let asked = Instant::now();
        // What is made here for one is little; for a thousand at once it is not.
        tokio::select! {
            biased;
            () = ticket.begin() => {}
            () = place.lost() => return,
            () = lifecycle.reached(Phase::Stopped) => return,
        }
        // That it had to wait for its turn is not its fault.
        let born = since + asked.elapsed();
        let mut place = Some(place);
        let state = Arc::clone(&service).connected(peer);
        let (stream, meter) = Metered::new(stream, &limits);
        let slot = StreamSlot::of(Arc::clone(&meter));
        let mut builder = http2::Builder::new(slot.clone());
        builder
            .timer(TokioTimer::new())
            .auto_date_header(false)
            .adaptive_window(false)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(settings.connection_window)
            .max_frame_size(FRAME)
            .max_header_list_size(settings.header_list.saturating_mul(HEADER_LIST_ROOM))
            .max_concurrent_streams(settings.streams)
            .max_pending_accept_reset_streams(settings.pending_accept_resets)
            .max_local_error_reset_streams(settings.local_error_resets)
            .keep_alive_interval(settings.keepalive_interval)
            .keep_alive_timeout(settings.keepalive_timeout);
        let judged = Arc::new(Notify::new());
        let answer = {
            let (state, judged, slot) = (Arc::clone(&state), Arc::clone(&judged), slot.clone());
            let meter = Arc::clone(&meter);
            hyper::service::service_fn(move |request| {
                // A stream may fail only after its first message: the next one finds out.
                if state.standing() == Standing::Expelled {
                    judged.notify_one();
                }
                let mut answer = Arc::clone(&state).call(request, &slot);
                // Until it is known who this is, each step of an answer may have shown it.
                let mut asks = (!meter.is_known())
                    .then(|| (Arc::clone(&state), Arc::clone(&judged), Arc::clone(&meter)));
                poll_fn(move |cx| {
                    let polled = answer.as_mut().poll(cx);
                    if let Some((state, judged, meter)) = &asks
                        && state.standing() == Standing::Authenticated
                    {
                        if meter.knows() {
                            judged.notify_one();
                        }
                        asks = None;
                    }
                    polled.map(Ok::<_, Infallible>)
                })
            })
        };
        let (stream, allowance) = Fair::new(stream);
        let stream = TokioIo::new(stream);
        let mut driver = pin!(builder.serve_connection(stream, answer));
        let begin_turn = || allowance.begin(if meter.is_known() { TURN } else { FIRST_TURNS });
        let mut phase = lifecycle.watch();
        // Within a tenth of the mean, from the connection's own address: no clock, no lock.
        let age_at = age.map(|age| born + age.age.mul_f64(0.9 + 0.2 * fraction(peer)));
        let mut cut_at = None;
        // From its turn on: what it said before is still to be read, also after a pause of this process.
        // Moved on once the first frame has come.
        let mut deadline = pin!(tokio::time::sleep(limits.first_frame.min(limits.authentication)));
        let mut idle = None;
        let shortest = age.map_or(limits.idle, |age| age.age.min(limits.idle)).min(limits.headers);
        let period = (shortest / 8).clamp(Duration::from_millis(50), Duration::from_secs(5));
        let mut ticks = tokio::time::interval_at(born + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leaving = false;
        // A connection that came just before the end has missed the change; one that came while the
        // process leaves is served.
        let mut stopped = lifecycle.phase() == Phase::Stopped;
        // Nobody of ours sees these requests.
        let count_unseen = || {
            (0..meter.take_too_large()).for_each(|_| service.refused(Refusal::Headers));
            (0..meter.take_refused()).for_each(|_| service.refused(Refusal::Streams));
        };
        loop {
            if stopped {
                ticket.leave();
                driver.as_mut().graceful_shutdown();
                // What ends now has its last frames written before the socket closes.
                let end = poll_fn(|cx| {
                    begin_turn();
                    driver.as_mut().poll(cx)
                });
                let _ = tokio::time::timeout(FLUSH, end).await;
                break;
            }
            tokio::select! {
                result = poll_fn(|cx| {
                    let mut turn = |cx: &mut Context<'_>| {
                        begin_turn();
                        driver.as_mut().poll(cx)
                    };
                    if meter.is_known() {
                        ticket.known();
                        turn(cx)
                    } else {
                        ticket.poll(cx, turn)
                    }
                }) => {
                    if let Err(error) = result {
                        let refusal = meter.verdict().or_else(|| {
                            let why = Refusal::of(&error)?;
                            Some(if meter.says_resets() { Refusal::Resets } else { why })
                        });
                        if let Some(why) = refusal {
                            service.refused(why);
                        }
                        let why = refusal.map(Refusal::as_str);
                        tracing::debug!(peer = peer.map(tracing::field::display), why, error = %error, "connection ended");
                    }
                    break;
                }
                () = judged.notified() => {
                    match state.standing() {
                        Standing::Expelled => {
                            service.refused(Refusal::Unauthenticated);
                            break;
                        }
                        Standing::Authenticated => place = None,
                        Standing::New => {}
                    }
                }
                () = lost(place.as_ref()) => match state.standing() {
                    // Its first answer is still under way.
                    Standing::Authenticated => place = None,
                    Standing::New | Standing::Expelled => break,
                },
                () = deadline.as_mut(), if place.is_some() => {
                    match state.standing() {
                        Standing::Authenticated => place = None,
                        _ if !meter.has_spoken() => {
                            service.refused(Refusal::Silent);
                            break;
                        }
                        Standing::New if Instant::now() < born + limits.authentication => {
                            deadline.as_mut().reset(born + limits.authentication);
                        }
                        _ => {
                            service.refused(Refusal::Unauthenticated);
                            break;
                        }
                    }
                }
                _ = ticks.tick() => {
                    let now = Instant::now();
                    count_unseen();
                    if state.standing() == Standing::Expelled {
                        service.refused(Refusal::Unauthenticated);
                        break;
                    }
                    if meter.block_age().is_some_and(|age| age >= limits.headers) {
                        service.refused(Refusal::Headers);
                        break;
                    }
                    // The same number of streams as at an earlier look: none has come between.
                    idle = match (slot.idle_after(), idle) {
                        (Some(opened), Some((before, since))) if opened == before => Some((before, since)),
                        (Some(opened), _) => Some((opened, now)),
                        (None, _) => None,
                    };
                    if !leaving && idle.is_some_and(|(_, since)| now >= since + limits.idle) {
                        service.refused(Refusal::Idle);
                        leaving = true;
                        driver.as_mut().graceful_shutdown();
                        state.going_away(GoAway::Idle);
                    }
                    if !leaving && age_at.is_some_and(|at| now >= at) {
                        leaving = true;
                        driver.as_mut().graceful_shutdown();
                        state.going_away(GoAway::Age);
                        cut_at = age.and_then(|age| age.grace).map(|grace| now + grace);
                    }
                    if cut_at.is_some_and(|at| now >= at) {
                        break;
                    }
                    state.tick();
                }
                // The sender lives as long as the lifecycle this task holds.
                _ = phase.changed() => {
                    let now = *phase.borrow_and_update();
                    if now == Phase::Leaving && !leaving {
                        leaving = true;
                        driver.as_mut().graceful_shutdown();
                        state.going_away(GoAway::Leaving);
                    }
                    stopped = now == Phase::Stopped;
                }
            }
        }
        count_unseen();
        state.closed();
    }
}

/// Resolves when a place among the half-open connections is lost; never without one.
async fn lost(place: Option<&Place>) {
    match place {
        Some(place) => place.lost().await,
        None => std::future::pending().await,
    }
}

/// Returns a number from 0 to 1 that differs between connections.
fn fraction(peer: Option<SocketAddr>) -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    (RandomState::new().hash_one(peer) % 1024) as f64 / 1023.0
}
