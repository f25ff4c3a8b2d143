//! An HTTP/2 connection to kas, for the generated clients of tonic.
//! tonic's `Channel` is not used for two reasons. It ends a call by its own timer, just before kas can
//! respond with DEADLINE_EXCEEDED and the outcome of the request. And it connects implicitly, so a failed
//! connection and a lost one cannot be distinguished.

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
use process::error::chain;
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    task::JoinHandle,
};
use tonic::body::Body;

use crate::{address::Address, file_error::reason};

/// Time limit for name resolution, TCP and TLS together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of pings. kas 14.1 closes connections that ping more often than every 20 s.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time limit for the response to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns the user agent for kas and for API servers.
pub(crate) fn user_agent() -> String {
    format!("kasctl/{}", process::version::VERSION)
}

/// The TLS flags.
#[derive(Debug, Clone, Default)]
pub(crate) struct TlsOptions {
    /// PEM file with certificate authorities to trust in addition to those of the system.
    pub(crate) ca_file: Option<PathBuf>,
    /// The name that the certificate must have; `None` for the host of the address.
    pub(crate) server_name: Option<String>,
}

/// The reason why there is no connection. Nothing was sent to kas.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The host has no address.
    #[error("cannot resolve the name: {}", reason(.0))]
    Resolve(#[source] io::Error),
    /// No process listens, or the network does not permit the connection.
    #[error("{}", reason(.0))]
    Connect(#[source] io::Error),
    /// The server does not use TLS, or is not trusted.
    #[error("TLS handshake failed: {0}")]
    Tls(#[source] io::Error),
    /// No connection in time.
    #[error("no connection within {}", crate::duration::humane(*.0))]
    Timeout(Duration),
    /// The HTTP/2 handshake failed.
    #[error("{}", chain(.0))]
    Http(#[source] hyper::Error),
    /// `--ca-file` cannot be used.
    #[error("{}", chain(.0))]
    CaFile(#[source] net::tls::Error),
    /// `--server-name` or the host is not a name.
    #[error("{0} is not a valid name for a certificate")]
    ServerName(String),
}

/// The protocol that the server speaks, judged by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerProtocol {
    /// It sent nothing: it accepted the connection, and closed it or did not respond.
    Silent,
    /// HTTP/2.
    Http2,
    /// HTTP/1: another port of kas, or another server.
    Http1,
    /// TLS, although a plain connection was requested.
    Tls,
    /// Something else.
    Other,
}

impl ServerProtocol {
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

/// A call that ended without a response, because the connection was lost or the call was reset.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Lost {
    /// The causes, joined. They are not returned by `source()`, because tonic would mistake them for a
    /// response of kas.
    pub(crate) text: String,
    /// Whether the server did not process the call: it was not sent, or the server refused it.
    pub(crate) is_unsent: bool,
    /// The HTTP status of a response that is not gRPC.
    pub(crate) http: Option<http::StatusCode>,
}

impl From<hyper::Error> for Lost {
    fn from(error: hyper::Error) -> Self {
        let is_refused = causes(&error).filter_map(|cause| cause.downcast_ref::<h2::Error>()).any(|cause| {
            // GOAWAY without an error ends only the streams that its sender did not process.
            cause.reason() == Some(h2::Reason::REFUSED_STREAM)
                || (cause.is_go_away() && cause.is_remote() && cause.reason() == Some(h2::Reason::NO_ERROR))
        });
        // Canceled: it was still in the queue of the connection.
        Self { text: chain(&error), is_unsent: is_refused || error.is_canceled(), http: None }
    }
}

/// Rejects a response that is not from a gRPC server. tonic would convert its HTTP status to a code, as if it
/// were from kas.
fn check_grpc<T>(answer: &http::Response<T>) -> Result<(), Lost> {
    let headers = answer.headers();
    let is_grpc = headers
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    if headers.contains_key("grpc-status") || (is_grpc && answer.status() == http::StatusCode::OK) {
        return Ok(());
    }
    let text = format!("it responds with HTTP {} instead of gRPC", answer.status());
    Err(Lost { text, is_unsent: false, http: Some(answer.status()) })
}

/// Returns the causes of an error, nearest first.
fn causes<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}

/// The sending half of a connection. Clones share the connection.
#[derive(Clone)]
pub(crate) struct Link {
    sender: SendRequest<Body>,
    protocol: Arc<OnceLock<ServerProtocol>>,
}

impl Link {
    /// Returns the protocol that the server has shown so far.
    pub(crate) fn protocol(&self) -> ServerProtocol {
        self.protocol.get().copied().unwrap_or(ServerProtocol::Silent)
    }

    /// Whether the connection takes no further calls: it was lost, or the server is closing it.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
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

/// Opens a connection. Its task ends when every [`Link`] and every call is dropped.
///
/// # Errors
/// See [`Error`].
pub(crate) async fn connect(address: &Address, tls: &TlsOptions) -> Result<(Link, JoinHandle<()>), Error> {
    tokio::time::timeout(CONNECT_TIMEOUT, dial(address, tls))
        .await
        .unwrap_or(Err(Error::Timeout(CONNECT_TIMEOUT)))
}

async fn dial(address: &Address, tls: &TlsOptions) -> Result<(Link, JoinHandle<()>), Error> {
    match address {
        Address::Unix(path) => start_http2(UnixStream::connect(path).await.map_err(Error::Connect)?).await,
        Address::Tcp { tls: encrypted, host, port } => {
            let addresses: Vec<_> =
                tokio::net::lookup_host((host.as_str(), *port)).await.map_err(Error::Resolve)?.collect();
            let tcp = TcpStream::connect(&addresses[..]).await.map_err(Error::Connect)?;
            // Without this, small messages would wait for the acknowledgement of the previous one.
            tcp.set_nodelay(true).map_err(Error::Connect)?;
            if !encrypted {
                return start_http2(tcp).await;
            }
            let name = tls.server_name.as_deref().unwrap_or(host);
            let name =
                ServerName::try_from(name.to_owned()).map_err(|_| Error::ServerName(name.to_owned()))?;
            let connector = tokio_rustls::TlsConnector::from(
                net::tls::client(tls.ca_file.as_deref()).map_err(Error::CaFile)?,
            );
            start_http2(connector.connect(name, tcp).await.map_err(Error::Tls)?).await
        }
    }
}

async fn start_http2(
    io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<(Link, JoinHandle<()>), Error> {
    let protocol = Arc::new(OnceLock::new());
    let io = TokioIo::new(ObservedIo { io, protocol: Arc::clone(&protocol) });
    let (sender, connection) = Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .handshake(io)
        .await
        .map_err(Error::Http)?;
    let driver = tokio::spawn(async move {
        // Every call gets the error of the connection itself.
        let _ = connection.await;
    });
    Ok((Link { sender, protocol }, driver))
}

/// Records the protocol of the first bytes that the server sends.
struct ObservedIo<T> {
    io: T,
    protocol: Arc<OnceLock<ServerProtocol>>,
}

impl<T: AsyncRead + Unpin> AsyncRead for ObservedIo<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if self.protocol.get().is_none() && buf.filled().len() > before {
            let _ = self.protocol.set(ServerProtocol::of(&buf.filled()[before..]));
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for ObservedIo<T> {
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
    fn responses_that_are_not_grpc_are_rejected() {
        let answer = |status: u16, name: &str, value: &str| {
            let answer = http::Response::builder().status(status).header(name, value).body(()).unwrap();
            check_grpc(&answer).map_err(|lost| lost.to_string())
        };
        assert_eq!(answer(200, "content-type", "application/grpc+proto"), Ok(()));
        assert_eq!(answer(400, "grpc-status", "3"), Ok(()));
        assert_eq!(
            answer(200, "content-type", "text/html").unwrap_err(),
            "it responds with HTTP 200 OK instead of gRPC"
        );
        assert_eq!(
            answer(502, "content-type", "application/grpc").unwrap_err(),
            "it responds with HTTP 502 Bad Gateway instead of gRPC"
        );
    }

    #[test]
    fn the_protocol_is_known_by_the_first_bytes() {
        assert_eq!(ServerProtocol::of(&[0, 0, 18, 4, 0, 0, 0, 0, 0]), ServerProtocol::Http2);
        assert_eq!(ServerProtocol::of(b"HTTP/1.1 400 Bad Request\r\n"), ServerProtocol::Http1);
        assert_eq!(ServerProtocol::of(&[0x15, 3, 3, 0, 2, 2, 40]), ServerProtocol::Tls);
        assert_eq!(ServerProtocol::of(b"-ERR unknown command"), ServerProtocol::Other);
    }
}
