//! HTTP/2 listeners: every limit set explicitly, age and leaving, and streams that can be reset
//! from outside.
//!
//! Rule behind the windows: the connection's window is at least the number of streams times the
//! stream's window, else one reader that stalls freezes all others. Measured with the library's
//! defaults (both 1 MiB): one caller that stopped reading stopped its agent for everybody.

use std::{
    convert::Infallible,
    future::Future,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::{body::Incoming, server::conn::http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior},
};
use tokio_rustls::TlsAcceptor;

use crate::{
    io::{Listener, Stream},
    lifecycle::{Lifecycle, Phase},
    websocket_door,
};

/// A response's body.
pub type Body = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;
/// What a connection returns for a request.
pub type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Largest frame: 64 KiB needs a quarter of the writes that the default of 16 KiB does, and
/// larger ones let one stream hold up the others.
pub const FRAME: u32 = 64 * 1024;
/// Header list of a request or answer.
pub const HEADER_LIST: u32 = 16 * 1024;
/// What a peer may send on one stream before we read it.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest window of HTTP/2: "not limited here".
pub const UNLIMITED_WINDOW: u32 = (1 << 31) - 1;
/// A TLS handshake must be over within this time, and so must what may follow it: an upgrade to WebSocket.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Without one authenticated stream a connection is closed after this time.
const UNAUTHENTICATED: Duration = Duration::from_secs(10);
/// Connections that may be in a handshake at once, in all.
const HALF_OPEN: usize = 1024;
/// After the last phase, time for the last frames to be written.
const FLUSH: Duration = Duration::from_millis(500);

/// The limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Open streams of one connection.
    pub streams: u32,
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
pub const AGENT: Settings = Settings {
    streams: 1_000,
    connection_window: UNLIMITED_WINDOW,
    pending_accept_resets: 1_000,
    local_error_resets: 100_000,
    keepalive_interval: Duration::from_secs(15),
    keepalive_timeout: Duration::from_secs(10),
};

/// GitLab and operators.
pub const API: Settings = Settings {
    streams: 200,
    connection_window: 64 << 20,
    pending_accept_resets: 200,
    local_error_resets: 1_024,
    keepalive_interval: Duration::from_secs(15),
    keepalive_timeout: Duration::from_secs(10),
};

/// Other replicas, both ends. Resets are not limited: a replica cancels as often as its callers do.
pub const PEER: Settings = Settings {
    streams: 8_000,
    connection_window: UNLIMITED_WINDOW,
    pending_accept_resets: 1 << 20,
    local_error_resets: usize::MAX,
    keepalive_interval: Duration::from_secs(3),
    keepalive_timeout: Duration::from_secs(2),
};

/// Answers what comes in on one listener.
pub trait Service: Send + Sync + 'static {
    /// A connection was made.
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection>;
    /// A connection could not be served; for a counter.
    fn refused(&self, _why: Refusal) {}
}

/// Why a connection was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Too many were in a handshake.
    TooManyHandshakes,
    /// The TLS handshake or the upgrade to WebSocket failed or took too long.
    Handshake,
    /// Accepting failed: usually out of file descriptors.
    Accept,
    /// It had no authenticated stream in time, or too many that were not.
    Unauthenticated,
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
#[derive(Clone, Debug, Default)]
pub struct StreamSlot(Arc<Mutex<Option<Arm>>>);

#[derive(Debug)]
enum Arm {
    Reset(Arc<StreamReset>),
    Until(Instant),
}

impl StreamSlot {
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
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(arm);
    }
}

impl<F> hyper::rt::Executor<F> for StreamSlot
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let arm = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match arm {
            None => drop(tokio::spawn(future)),
            Some(Arm::Reset(reset)) => {
                drop(tokio::spawn(Resettable { future: Some(Box::pin(future)), reset }))
            }
            Some(Arm::Until(deadline)) => drop(tokio::spawn(async move {
                // Dropping the stream's parts resets it.
                let _ = tokio::time::timeout_at(deadline, future).await;
            })),
        }
    }
}

/// A stream's task that ends when its stream is reset. Dropping the stream's parts makes HTTP/2
/// discard what it still holds for it and send RST_STREAM(CANCEL).
struct Resettable<F> {
    future: Option<Pin<Box<F>>>,
    reset: Arc<StreamReset>,
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
    /// TLS, unless plain.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// Whether HTTP/2 may come inside WebSocket too.
    pub websocket: bool,
    /// The limits.
    pub settings: Settings,
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
        let half_open = Arc::new(AtomicUsize::new(0));
        let tls = self.tls.map(TlsAcceptor::from);
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = lifecycle.reached(Phase::Stopped) => break,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, or a peer that left: the loop itself must never end.
                    self.service.refused(Refusal::Accept);
                    tracing::warn!(error = %error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            let service = Arc::clone(&self.service);
            let (settings, age, lifecycle) = (self.settings, self.age, lifecycle.clone());
            if tls.is_none() && !self.websocket {
                tasks.spawn(connection(stream, peer, settings, age, service, lifecycle));
                continue;
            }
            let Some(half_open) = HalfOpen::enter(&half_open) else {
                service.refused(Refusal::TooManyHandshakes);
                continue;
            };
            let (tls, websocket) = (tls.clone(), self.websocket);
            tasks.spawn(async move {
                // Boxed: the handshakes' state is large and short-lived.
                let opened = tokio::select! {
                    opened = Box::pin(open(stream, tls, websocket)) => opened,
                    // Who has not shown anything yet does not delay the exit.
                    () = lifecycle.reached(Phase::Stopped) => return,
                };
                match opened {
                    Ok(stream) => {
                        drop(half_open);
                        connection(stream, peer, settings, age, service, lifecycle).await;
                    }
                    Err(error) => {
                        tracing::debug!(error = %error, "a connection did not get past its handshake");
                        service.refused(Refusal::Handshake);
                    }
                }
            });
        }
        tasks.close();
        tasks.wait().await;
    }
}

/// A connection that is counted as in its handshake.
struct HalfOpen(Arc<AtomicUsize>);

impl HalfOpen {
    /// Counts one more, unless there are too many.
    fn enter(count: &Arc<AtomicUsize>) -> Option<Self> {
        let entered = Self(Arc::clone(count));
        (count.fetch_add(1, Ordering::Relaxed) < HALF_OPEN).then_some(entered)
    }
}

impl Drop for HalfOpen {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Does what comes before HTTP/2: TLS, WebSocket, or both.
async fn open(stream: Stream, tls: Option<TlsAcceptor>, websocket: bool) -> io::Result<Stream> {
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut is_http2 = false;
    // TLS is for TCP; a Unix socket is the system's business.
    let mut stream = match (tls, stream) {
        (Some(tls), Stream::Tcp(stream)) => {
            let stream = tokio::time::timeout(HANDSHAKE, tls.accept(stream)).await.map_err(late)??;
            is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            Stream::Tls(Box::new(stream))
        }
        (_, stream) => stream,
    };
    if websocket && !is_http2 {
        stream = tokio::time::timeout(HANDSHAKE, websocket_door::enter(stream)).await.map_err(late)??;
    }
    Ok(stream)
}

/// Serves one connection to its end.
async fn connection(
    stream: Stream,
    peer: Option<SocketAddr>,
    settings: Settings,
    age: Option<Age>,
    service: Arc<dyn Service>,
    lifecycle: Lifecycle,
) {
    let state = Arc::clone(&service).connected(peer);
    let slot = StreamSlot::default();
    let mut builder = http2::Builder::new(slot.clone());
    builder
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(settings.connection_window)
        .max_frame_size(FRAME)
        .max_header_list_size(HEADER_LIST)
        .max_concurrent_streams(settings.streams)
        .max_pending_accept_reset_streams(settings.pending_accept_resets)
        .max_local_error_reset_streams(settings.local_error_resets)
        .keep_alive_interval(settings.keepalive_interval)
        .keep_alive_timeout(settings.keepalive_timeout);
    let expelled = Arc::new(Notify::new());
    let answer = {
        let (state, expelled) = (Arc::clone(&state), Arc::clone(&expelled));
        hyper::service::service_fn(move |request| {
            // A stream may fail only after its first message: the next one finds out.
            if state.standing() == Standing::Expelled {
                expelled.notify_one();
            }
            let answer = Arc::clone(&state).call(request, &slot);
            async move { Ok::<_, Infallible>(answer.await) }
        })
    };
    let mut driver = pin!(builder.serve_connection(TokioIo::new(stream), answer));
    let mut phase = lifecycle.watch();
    let born = Instant::now();
    // Within a tenth of the mean, from the connection's own address: no clock, no lock.
    let age_at = age.map(|age| born + age.age.mul_f64(0.9 + 0.2 * fraction(peer)));
    let mut cut_at = None;
    let period = age.map_or(Duration::from_secs(5), |age| {
        (age.age / 8).clamp(Duration::from_millis(50), Duration::from_secs(5))
    });
    let mut ticks = tokio::time::interval_at(born + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut leaving = false;
    // A connection that came just before the end has missed the change; one that came while the
    // process leaves is served.
    let mut stopped = lifecycle.phase() == Phase::Stopped;
    loop {
        if stopped {
            driver.as_mut().graceful_shutdown();
            // What ends now has its last frames written before the socket closes.
            let _ = tokio::time::timeout(FLUSH, driver.as_mut()).await;
            break;
        }
        tokio::select! {
            result = driver.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(error = %error, "connection ended");
                }
                break;
            }
            () = expelled.notified() => {
                service.refused(Refusal::Unauthenticated);
                break;
            }
            _ = ticks.tick() => {
                let now = Instant::now();
                match state.standing() {
                    Standing::Expelled => { service.refused(Refusal::Unauthenticated); break; }
                    Standing::New if now >= born + UNAUTHENTICATED => {
                        service.refused(Refusal::Unauthenticated);
                        break;
                    }
                    _ => {}
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
    state.closed();
}

/// Returns a number from 0 to 1 that differs between connections.
fn fraction(peer: Option<SocketAddr>) -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    (RandomState::new().hash_one(peer) % 1024) as f64 / 1023.0
}
