//! The service of a listener: one [`Service`] for it, and a [`Connection`] for each connection.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use rustls_pki_types::CertificateDer;

use super::{refusal::Refusal, slot::StreamSlot};

/// A response's body.
pub type Body = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;
/// What a connection returns for a request.
pub type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Serves one listener.
pub trait Service: Send + Sync + 'static {
    /// Called for each new connection.
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection>;
    /// As [`Service::connected`], for a client whose certificates, its own first, were verified in the TLS
    /// handshake.
    fn connected_with(
        self: Arc<Self>,
        peer: Option<SocketAddr>,
        _certificates: Arc<[CertificateDer<'static>]>,
    ) -> Arc<dyn Connection> {
        self.connected(peer)
    }
    /// A connection could not be served; for a counter.
    fn refused(&self, _why: Refusal) {}
    /// A handshake failed. Called beside [`Service::refused`], with the reason.
    fn not_opened(&self, peer: Option<SocketAddr>, error: &io::Error) {
        tracing::debug!(peer = peer.map(tracing::field::display), error = %error, "the handshake of a connection failed");
    }
}

/// One connection, of any version of HTTP.
pub trait Connection: Send + Sync + 'static {
    /// Answers a request. Call [`StreamSlot::arm`] before returning if it must be possible to reset the
    /// request from outside. To take over the connection, or the stream of
    /// HTTP/2, answer with [`upgrade`](super::upgrade()).
    fn call(self: Arc<Self>, request: Request<Incoming>, slot: &StreamSlot) -> Answer;
    /// Whether the connection may stay.
    fn auth_state(&self) -> AuthState;
    /// The peer was asked to end the connection, by GOAWAY or, with HTTP/1.1, by `Connection: close` in the
    /// next answer. End what need not continue, also upgrades, which get no other notice.
    fn going_away(&self, reason: GoAway);
    /// Called every few seconds.
    fn tick(&self) {}
    /// The connection has ended.
    fn closed(&self) {}
}

/// Whether a connection may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthState {
    /// No authenticated request yet.
    New,
    /// The listener does not authenticate. The connection is served at once and without a deadline, but it
    /// keeps its place among the half-open ones, and may lose it: see
    /// [`Limits::half_open`](super::Limits::half_open).
    Anonymous,
    /// It has had an authenticated request.
    Authenticated,
    /// Too many requests failed: the connection is closed.
    Expelled,
}

/// Keeps the [`AuthState`] of a connection whose requests authenticate.
#[derive(Debug)]
pub struct Trust {
    authenticated: AtomicBool,
    failures: AtomicU32,
    most: u32,
}

impl Trust {
    /// Creates the state of a new connection. It is expelled after `failures` requests without a valid
    /// credential, unless one had a valid one before.
    pub fn new(failures: u32) -> Self {
        Self { authenticated: AtomicBool::new(false), failures: AtomicU32::new(0), most: failures }
    }

    /// Records an authenticated request. Returns whether it is the first.
    pub fn passed(&self) -> bool {
        !self.authenticated.swap(true, Ordering::Relaxed)
    }

    /// Records a request that was not authenticated.
    pub fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the state.
    pub fn auth_state(&self) -> AuthState {
        if self.authenticated.load(Ordering::Relaxed) {
            AuthState::Authenticated
        } else if self.failures.load(Ordering::Relaxed) >= self.most {
            AuthState::Expelled
        } else {
            AuthState::New
        }
    }
}

/// Why a connection was asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoAway {
    /// The connection has reached its maximum age.
    Age,
    /// It has been idle for too long.
    Idle,
    /// The process is shutting down.
    Leaving,
}
