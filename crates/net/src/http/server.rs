//! A listener: accepting, handshakes, and the choice of the protocol.

use std::{future::poll_fn, io, pin::pin, sync::Arc, time::Duration};

use process::lifecycle::{Lifecycle, Phase};
use tokio::{net::TcpStream, time::Instant};
use tokio_rustls::TlsAcceptor;

use super::{
    connection::Serve,
    refusal::Refusal,
    service::Service,
    settings::{Age, Limits, Protocols, Settings},
    version::{Version, sniff},
    websocket,
};
use crate::{
    admission::{
        half_open::{HalfOpen, Place, Stage},
        scheduler::{AdmissionScheduler, Permit},
    },
    flaw::{Flaw, flawed},
    io::{AcceptFailures, Listener, Stream},
    tls,
};

/// Connections that are accepted from [`Phase::Closing`] on: at least as many as the queue of the system
/// holds.
const QUEUED: usize = 4_096;
/// Connections that are accepted before the thread's other tasks run: accepting as many takes about as long
/// as a step of one of them.
const ACCEPTED_AT_ONCE: u32 = 8;
/// The first byte of a TLS connection: the type of a handshake record. No version of HTTP begins with it.
pub(super) const TLS_HANDSHAKE: u8 = 0x16;

/// One listener with what it serves.
pub struct Server {
    /// Where connections come from.
    pub listener: Listener,
    /// TLS, unless plain; each handshake uses the configuration of that moment.
    pub tls: Option<tls::Live<rustls::ServerConfig>>,
    /// The protocols.
    pub protocols: Protocols,
    /// The limits of a connection.
    pub settings: Settings,
    /// The limits of unauthenticated, silent and idle connections.
    pub limits: Limits,
    /// Age limit of connections, if any.
    pub age: Option<Age>,
    /// The service that answers.
    pub service: Arc<dyn Service>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl Server {
    /// Serves until the lifecycle is [`Phase::Stopped`] and the connections have ended, those that were
    /// upgraded too. From [`Phase::Closing`] on, only connections are accepted that were in the queue of the
    /// system: without that, a client could have sent a request on one of them and not know what became of
    /// it.
    pub async fn run(self, lifecycle: Lifecycle) {
        let tasks = tokio_util::task::TaskTracker::new();
        let admission = AdmissionScheduler::of_this_runtime();
        let Limits { half_open, half_open_most, half_open_patience, .. } = self.limits;
        let half_open = HalfOpen::new(half_open, half_open_most, half_open_patience, Arc::clone(&admission));
        let mut failures = AcceptFailures::default();
        let mut accepted_at_once = 0;
        let mut queued = QUEUED;
        loop {
            if accepted_at_once == ACCEPTED_AT_ONCE {
                accepted_at_once = 0;
                tokio::task::yield_now().await;
            }
            accepted_at_once += 1;
            let accepted = tokio::select! {
                biased;
                accepted = self.listener.accept() => accepted,
                () = lifecycle.reached(Phase::Closing) => break,
            };
            if lifecycle.phase() >= Phase::Closing {
                if queued == 0 {
                    break;
                }
                queued -= 1;
            }
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(_) if flawed(Flaw::AcceptErrorEnds) => break,
                Err(error) => {
                    if failures.take(&self.listener, &error).await {
                        self.service.refused(Refusal::Accept);
                    }
                    continue;
                }
            };
            // Those that come meanwhile wait in the kernel's queue.
            let address = peer.map(|peer| peer.ip());
            let place = tokio::select! {
                place = half_open.enter(address, || self.service.refused(Refusal::HalfOpen)) => place,
                () = lifecycle.reached(Phase::Stopped) => break,
            };
            let service = Arc::clone(&self.service);
            let (settings, limits, age) = (self.settings, self.limits, self.age);
            let lifecycle = lifecycle.clone();
            let serve = Serve { peer, settings, limits, age, service, lifecycle, since: Instant::now() };
            let permit = admission.join(address);
            let tls = self.tls.as_ref().map(|tls| TlsAcceptor::from(tls.current()));
            tasks.spawn(run(serve, stream, tls, self.protocols, place, permit));
        }
        drop(self.listener);
        tasks.close();
        tasks.wait().await;
    }
}

fn late(_: tokio::time::error::Elapsed) -> io::Error {
    io::ErrorKind::TimedOut.into()
}

/// Whether a client begins a TLS handshake. Nothing is read. `false` if it has closed the connection.
async fn begins_tls(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let len = stream.peek(&mut first).await?;
    Ok(first[..len] == [TLS_HANDSHAKE])
}

/// Does what comes before HTTP: TLS, the choice of the protocol, WebSocket. The first of them that waits for
/// the peer must be over at `by`, and the next `within` a time.
async fn open(
    stream: Stream,
    mut tls: Option<TlsAcceptor>,
    protocols: Protocols,
    mut by: Instant,
    within: Duration,
) -> io::Result<(Version, Stream)> {
    let mut is_http2 = false;
    if let (Protocols::Http1And2MaybeTls, Stream::Tcp(stream)) = (protocols, &stream)
        && !tokio::time::timeout_at(by, begins_tls(stream)).await.map_err(late)??
    {
        tls = None;
    }
    // TLS is for TCP; a Unix socket is protected by the system.
    let stream = match (tls, stream) {
        (Some(tls), Stream::Tcp(stream)) => {
            let stream = tokio::time::timeout_at(by, tls.accept(stream)).await.map_err(late)??;
            by = Instant::now() + within;
            is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            Stream::Tls(Box::new(stream))
        }
        (_, stream) => stream,
    };
    Ok(match protocols {
        Protocols::Http2 => (Version::Http2, stream),
        Protocols::Http1 => (Version::Http1, stream),
        Protocols::Http1And2 | Protocols::Http1And2MaybeTls | Protocols::WebSocket if is_http2 => {
            (Version::Http2, stream)
        }
        Protocols::Http1And2 | Protocols::Http1And2MaybeTls => {
            tokio::time::timeout_at(by, sniff(stream)).await.map_err(late)??
        }
        Protocols::WebSocket => {
            let entered = tokio::time::timeout_at(by, websocket::enter(stream));
            (Version::Http2, entered.await.map_err(late)??)
        }
    })
}

/// Serves one connection from its first byte to its end.
async fn run(
    mut serve: Serve,
    stream: Stream,
    tls: Option<TlsAcceptor>,
    protocols: Protocols,
    place: Place,
    mut permit: Permit,
) {
    let limits = serve.limits;
    let is_opened = tls.is_some() || !matches!(protocols, Protocols::Http1 | Protocols::Http2);
    let silence = if is_opened { limits.handshake } else { limits.first_frame.min(limits.authentication) };
    let (by, service) = (serve.since + silence, Arc::clone(&serve.service));
    // Boxed: the state of handshakes is large and short-lived.
    let opened = Box::pin(async {
        // A connection that has sent nothing is not scheduled.
        match tokio::time::timeout_at(by, stream.speaks()).await {
            Err(_) if !is_opened => {
                service.refused(Refusal::Silent);
                return Err(io::ErrorKind::TimedOut.into());
            }
            spoken => spoken.map_err(late)??,
        }
        let mut opening = pin!(open(stream, tls, protocols, by, limits.handshake));
        if is_opened {
            place.reached(Stage::Opening);
            poll_fn(|cx| {
                let polled = permit.poll(cx, |cx| opening.as_mut().poll(cx));
                if permit.is_late() {
                    place.reached(Stage::Busy);
                }
                polled
            })
            .await
        } else {
            // Nothing is read.
            opening.await
        }
    });
    let opened = tokio::select! {
        opened = opened => opened,
        () = place.lost() => return,
        // An unauthenticated connection does not delay the exit.
        () = serve.lifecycle.reached(Phase::Stopped) => return,
    };
    match opened {
        Ok((version, stream)) => {
            place.reached(Stage::Speaking);
            if is_opened {
                serve.since = Instant::now();
            }
            // Boxed: a connection that has not come as far holds no memory for its state.
            Box::pin(serve.connection(version, stream, place, permit)).await;
        }
        Err(error) if is_opened => {
            serve.service.not_opened(serve.peer, &error);
            serve.service.refused(Refusal::Handshake);
        }
        Err(error) => {
            tracing::debug!(peer = serve.peer.map(tracing::field::display), error = %error, "connection ended");
        }
    }
}
