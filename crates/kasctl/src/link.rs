//! One HTTP/2 connection to kas, below tonic's generated clients.
//!
//! Not tonic's `Channel`: it ends a call by its own timer, a moment before kas can answer
//! "deadline exceeded" with what became of the request; and it connects behind the scenes, so that
//! "kas is not there" and "kas went away in the middle" look the same. An operator must tell them apart.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, combinators::UnsyncBoxBody};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    task::JoinHandle,
};
use tonic::body::Body;

use crate::{address::Address, failure::reason};

/// How long name resolution, TCP and TLS may take together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a waiting call checks that kas is still there. A 14.1 kas ends connections that ping more often
/// than every 20 s.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long kas may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns how kasctl names itself to kas and to API servers.
pub(crate) fn user_agent() -> String {
    format!("kasctl/{}", runtime::version::VERSION)
}

/// What the operator said about TLS.
#[derive(Debug, Clone, Default)]
pub(crate) struct TlsOptions {
    /// PEM file with authorities to trust besides those of the system.
    pub(crate) ca_file: Option<PathBuf>,
    /// The name that the certificate must have; `None`: the host of the address.
    pub(crate) server_name: Option<String>,
}

/// Why there is no connection. Nothing was sent to kas.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The host has no address.
    #[error("cannot resolve the name: {}", reason(.0))]
    Resolve(#[source] io::Error),
    /// Nobody listens, or the network is in the way.
    #[error("{}", reason(.0))]
    Connect(#[source] io::Error),
    /// The other end is not a TLS server, or not one to trust.
    #[error("TLS handshake failed: {0}")]
    Tls(#[source] io::Error),
    /// No answer to the attempt.
    #[error("no connection within {}", crate::duration::humane(*.0))]
    Timeout(Duration),
    /// HTTP/2 could not begin.
    #[error("{}", chain(.0))]
    Http(#[source] hyper::Error),
    /// `--ca-file` cannot be used.
    #[error("{}", chain(.0))]
    CaFile(#[source] runtime::tls::Error),
    /// `--server-name` or the host is not a name.
    #[error("{0} is not a name that a certificate can have")]
    ServerName(String),
}

/// What the other end showed of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Nothing: it took the connection, and closed it or kept silent.
    Silent,
    /// HTTP/2.
    Http2,
    /// HTTP/1: another port of kas, or another server.
    Http1,
    /// TLS, where plain text was asked for.
    Tls,
    /// Something else.
    Other,
}

impl Peer {
    fn of(first_bytes: &[u8]) -> Self {
        match first_bytes {
            // The first frame of an HTTP/2 server is SETTINGS (type 4) on stream 0.
            [_, _, _, 4, ..] => Self::Http2,
            [b'H', b'T', b'T', b'P', ..] => Self::Http1,
            // An alert or a handshake record.
            [0x15 | 0x16, 3, ..] => Self::Tls,
            _ => Self::Other,
        }
    }
}

/// A call ended without an answer, because of the connection or of a reset.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Lost {
    /// The causes, joined. They are not `source()`: tonic would take them for an answer of kas.
    pub(crate) text: String,
    /// Whether the call surely did not begin: it was not sent, or the other end said that it did not take it.
    pub(crate) is_unsent: bool,
    /// The status of an answer that is not gRPC.
    pub(crate) http: Option<http::StatusCode>,
}

impl From<hyper::Error> for Lost {
    fn from(error: hyper::Error) -> Self {
        let is_refused = causes(&error).filter_map(|cause| cause.downcast_ref::<h2::Error>()).any(|cause| {
            // A farewell without a fault ends only the streams that its sender did not take.
            cause.reason() == Some(h2::Reason::REFUSED_STREAM)
                || (cause.is_go_away() && cause.is_remote() && cause.reason() == Some(h2::Reason::NO_ERROR))
        });
        // Canceled: it had not left the queue of the connection.
        Self { text: chain(&error), is_unsent: is_refused || error.is_canceled(), http: None }
    }
}

/// Refuses an answer that no gRPC server gives: tonic would make a code of its HTTP status, as if kas had said it.
fn check_grpc<T>(answer: &http::Response<T>) -> Result<(), Lost> {
    let headers = answer.headers();
    let is_grpc = headers
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    if headers.contains_key("grpc-status") || (is_grpc && answer.status() == http::StatusCode::OK) {
        return Ok(());
    }
    let text = format!("it answers HTTP {} instead of gRPC", answer.status());
    Err(Lost { text, is_unsent: false, http: Some(answer.status()) })
}

/// Returns what is behind an error, the nearest cause first.
fn causes<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}

/// Returns an error and its causes, joined; a cause that its effect has shown already is left out.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in causes(error) {
        let cause = cause.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// The sending half of a connection; a clone sends on the same one.
#[derive(Clone)]
pub(crate) struct Link {
    sender: SendRequest<Body>,
    peer: Arc<OnceLock<Peer>>,
}

impl Link {
    /// Returns what the other end has shown of itself so far.
    pub(crate) fn peer(&self) -> Peer {
        self.peer.get().copied().unwrap_or(Peer::Silent)
    }
}

impl tower_service::Service<http::Request<Body>> for Link {
    type Response = http::Response<UnsyncBoxBody<Bytes, Lost>>;
    type Error = Lost;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Lost>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Lost>> {
        self.sender.poll_ready(cx).map_err(Lost::from)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        if let Ok(agent) = user_agent().try_into() {
            request.headers_mut().insert(http::header::USER_AGENT, agent);
        }
        let answer = self.sender.send_request(request);
        Box::pin(async move {
            let answer = answer.await?;
            check_grpc(&answer)?;
            Ok(answer.map(|body| body.map_err(Lost::from).boxed_unsync()))
        })
    }
}

/// Opens a connection. The task that drives it ends when every [`Link`] and every call is dropped.
///
/// # Errors
/// [`Error`]; nothing is left behind.
pub(crate) async fn connect(address: &Address, tls: &TlsOptions) -> Result<(Link, JoinHandle<()>), Error> {
    tokio::time::timeout(CONNECT_TIMEOUT, dial(address, tls))
        .await
        .unwrap_or(Err(Error::Timeout(CONNECT_TIMEOUT)))
}

async fn dial(address: &Address, tls: &TlsOptions) -> Result<(Link, JoinHandle<()>), Error> {
    match address {
        Address::Unix(path) => speak(UnixStream::connect(path).await.map_err(Error::Connect)?).await,
        Address::Tcp { tls: encrypted, host, port } => {
            let addresses: Vec<_> =
                tokio::net::lookup_host((host.as_str(), *port)).await.map_err(Error::Resolve)?.collect();
            let tcp = TcpStream::connect(&addresses[..]).await.map_err(Error::Connect)?;
            // Small messages go both ways; without this, each waits for the one before.
            tcp.set_nodelay(true).map_err(Error::Connect)?;
            if !encrypted {
                return speak(tcp).await;
            }
            let name = tls.server_name.as_deref().unwrap_or(host);
            let name =
                ServerName::try_from(name.to_owned()).map_err(|_| Error::ServerName(name.to_owned()))?;
            let connector = tokio_rustls::TlsConnector::from(
                runtime::tls::client(tls.ca_file.as_deref()).map_err(Error::CaFile)?,
            );
            speak(connector.connect(name, tcp).await.map_err(Error::Tls)?).await
        }
    }
}

async fn speak(
    io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<(Link, JoinHandle<()>), Error> {
    let peer = Arc::new(OnceLock::new());
    let io = TokioIo::new(Observed { io, peer: Arc::clone(&peer) });
    let (sender, connection) = Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .handshake(io)
        .await
        .map_err(Error::Http)?;
    let driver = tokio::spawn(async move {
        // Each call learns by itself that the connection is gone.
        let _ = connection.await;
    });
    Ok((Link { sender, peer }, driver))
}

/// Notes what the first bytes from the other end are.
struct Observed<T> {
    io: T,
    peer: Arc<OnceLock<Peer>>,
}

impl<T: AsyncRead + Unpin> AsyncRead for Observed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if self.peer.get().is_none() && buf.filled().len() > before {
            let _ = self.peer.set(Peer::of(&buf.filled()[before..]));
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Observed<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_are_not_grpc_are_told_by_their_head() {
        let answer = |status: u16, name: &str, value: &str| {
            let answer = http::Response::builder().status(status).header(name, value).body(()).unwrap();
            check_grpc(&answer).map_err(|lost| lost.to_string())
        };
        assert_eq!(answer(200, "content-type", "application/grpc+proto"), Ok(()));
        assert_eq!(answer(400, "grpc-status", "3"), Ok(()));
        assert_eq!(
            answer(200, "content-type", "text/html").unwrap_err(),
            "it answers HTTP 200 OK instead of gRPC"
        );
        assert_eq!(
            answer(502, "content-type", "application/grpc").unwrap_err(),
            "it answers HTTP 502 Bad Gateway instead of gRPC"
        );
    }

    #[test]
    fn first_bytes_tell_what_the_other_end_speaks() {
        assert_eq!(Peer::of(&[0, 0, 18, 4, 0, 0, 0, 0, 0]), Peer::Http2);
        assert_eq!(Peer::of(b"HTTP/1.1 400 Bad Request\r\n"), Peer::Http1);
        assert_eq!(Peer::of(&[0x15, 3, 3, 0, 2, 2, 40]), Peer::Tls);
        assert_eq!(Peer::of(b"-ERR unknown command"), Peer::Other);
    }
}
