//! Connects an HTTP/1.1 client to another host, directly or through the proxy that the environment names, and
//! fetches small documents from hosts that must have a certificate.

use std::{
    error::Error,
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header, uri::Scheme};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::{
        self,
        connect::{Connected, Connection, HttpConnector, proxy::Tunnel},
    },
    rt::{TokioExecutor, TokioIo},
};
use process::version;
pub use rustls::ClientConfig;
use tokio::net::TcpStream;
use tower_service::Service;

use crate::proxy::{self, Proxies};

/// The timeout of a TCP connection, for all addresses of a name together.
const CONNECT: Duration = Duration::from_secs(10);
/// The interval of TCP keepalives, as in 14.1.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// The largest headers of an answer, in bytes.
const LARGEST_HEAD: usize = 64 * 1024;

type BoxError = Box<dyn Error + Send + Sync>;

type Plain = HttpsConnector<HttpConnector>;

/// How another host is reached.
#[derive(Clone)]
pub struct Connector(Way);

#[derive(Clone)]
enum Way {
    Direct(Plain),
    /// The proxy forwards requests, for http.
    Forward(Plain, Uri),
    /// The proxy opens a tunnel, for https.
    Tunnel(HttpsConnector<Tunnel<Plain>>),
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0 {
            Way::Direct(_) => "Connector(direct)",
            Way::Forward(..) => "Connector(forwarded by a proxy)",
            Way::Tunnel(_) => "Connector(through a proxy)",
        })
    }
}

impl Connector {
    /// Selects how to reach `target`, whose scheme is http or https, by HTTP/1.1. Also returns the
    /// credentials for a proxy that forwards requests.
    ///
    /// # Errors
    /// If the environment names a proxy for `target` that cannot be used.
    pub fn new(
        target: &Uri,
        tls: &ClientConfig,
        proxies: &Proxies,
    ) -> Result<(Self, Option<HeaderValue>), proxy::Error> {
        let mut tls = tls.clone();
        // The connector adds the ALPN.
        tls.alpn_protocols.clear();
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEPALIVE));
        tcp.set_connect_timeout(Some(CONNECT));
        let plain = HttpsConnectorBuilder::new()
            .with_tls_config(tls.clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let Some(proxy) = proxies.of_url(target)? else {
            return Ok((Self(Way::Direct(plain)), None));
        };
        if target.scheme() == Some(&Scheme::HTTP) {
            return Ok((Self(Way::Forward(plain, proxy.url())), proxy.authorization().cloned()));
        }
        let mut tunnel = Tunnel::new(proxy.url(), plain);
        if let Some(value) = proxy.authorization() {
            tunnel = tunnel.with_auth(value.clone());
        }
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_only()
            .enable_http1()
            .wrap_connector(tunnel);
        Ok((Self(Way::Tunnel(https)), None))
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match &mut self.0 {
            Way::Direct(plain) | Way::Forward(plain, _) => plain.poll_ready(cx),
            Way::Tunnel(tunnel) => tunnel.poll_ready(cx),
        }
    }

    fn call(&mut self, target: Uri) -> Self::Future {
        let (connecting, is_proxied) = match &mut self.0 {
            Way::Direct(plain) => (plain.call(target), false),
            Way::Forward(plain, proxy) => (plain.call(proxy.clone()), true),
            Way::Tunnel(tunnel) => {
                let connecting = tunnel.call(target);
                return Box::pin(async move { Ok(Stream { inner: connecting.await?, is_proxied: false }) });
            }
        };
        Box::pin(async move { Ok(Stream { inner: MaybeHttpsStream::Http(connecting.await?), is_proxied }) })
    }
}

/// A connection to another host. The inner TLS is that of a proxy, the outer that of the host.
#[derive(Debug)]
pub struct Stream {
    inner: MaybeHttpsStream<MaybeHttpsStream<TokioIo<TcpStream>>>,
    is_proxied: bool,
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        // Requests through such a proxy name the whole URL.
        self.inner.connected().proxy(self.is_proxied)
    }
}

impl Read for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_read(cx, buf)
    }
}

impl Write for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

/// Why a document could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL is not of the scheme https. Nothing was sent.
    #[error("{0} is no https URL")]
    NotHttps(Uri),
    /// The environment names a proxy for the host that cannot be used. Nothing was sent.
    #[error("the proxy for {uri} cannot be used")]
    Proxy {
        /// The URL.
        uri: Uri,
        /// Why.
        source: proxy::Error,
    },
    /// There was no complete answer in time.
    #[error("{uri} gave no complete answer within {timeout:?}")]
    Timeout {
        /// The URL.
        uri: Uri,
        /// The time.
        timeout: Duration,
    },
    /// The host cannot be reached, or its certificate is not trusted.
    #[error("{uri} cannot be reached")]
    Unreachable {
        /// The URL.
        uri: Uri,
        /// Why.
        source: legacy::Error,
    },
    /// The status is not 200.
    #[error("{uri} answered with status {status}, not 200; redirects are not followed")]
    Status {
        /// The URL.
        uri: Uri,
        /// The status.
        status: StatusCode,
    },
    /// The body broke off, or is too large.
    #[error("the answer of {uri} broke off, or has more than {largest} bytes")]
    Body {
        /// The URL.
        uri: Uri,
        /// The limit.
        largest: usize,
        /// Why.
        source: BoxError,
    },
}

/// Limits of [`fetch`].
#[derive(Debug, Clone, Copy)]
pub struct FetchLimits {
    /// The time for all of it, from the name lookup to the last byte.
    pub timeout: Duration,
    /// The largest body, in bytes.
    pub largest: usize,
}

/// Fetches a small JSON document with https, on a connection of its own. Follows no redirect, sends no
/// credential.
///
/// # Errors
/// [`FetchError`].
///
/// # Cancel safety
/// Cancel safe: the connection is closed.
pub async fn fetch(
    uri: &Uri,
    tls: &ClientConfig,
    proxies: &Proxies,
    limits: FetchLimits,
) -> Result<Bytes, FetchError> {
    if uri.scheme() != Some(&Scheme::HTTPS) {
        return Err(FetchError::NotHttps(uri.clone()));
    }
    let proxy = |source| FetchError::Proxy { uri: uri.clone(), source };
    // A proxy gets its credentials with CONNECT: it cannot read a request with https.
    let (connector, _) = Connector::new(uri, tls, proxies).map_err(proxy)?;
    let client: legacy::Client<_, Empty<Bytes>> = legacy::Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .http1_max_buf_size(LARGEST_HEAD)
        .build(connector);
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = uri.clone();
    let headers = request.headers_mut();
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
    let agent = format!("gitlab-kas/{}/{}", version::VERSION, version::COMMIT);
    headers.insert(
        header::USER_AGENT,
        HeaderValue::try_from(agent).unwrap_or(HeaderValue::from_static("gitlab-kas")),
    );
    let FetchLimits { timeout, largest } = limits;
    let exchange = async {
        let unreachable = |source| FetchError::Unreachable { uri: uri.clone(), source };
        let answer = client.request(request).await.map_err(unreachable)?;
        if answer.status() != StatusCode::OK {
            return Err(FetchError::Status { uri: uri.clone(), status: answer.status() });
        }
        let body = Limited::new(answer.into_body(), largest).collect().await;
        match body {
            Ok(body) => Ok(body.to_bytes()),
            Err(source) => Err(FetchError::Body { uri: uri.clone(), largest, source }),
        }
    };
    let timed_out = || FetchError::Timeout { uri: uri.clone(), timeout };
    tokio::time::timeout(timeout, exchange).await.map_err(|_| timed_out())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(target: &str, proxies: &Proxies) -> &'static str {
        crate::tls::install();
        let tls = crate::tls::client(None).unwrap();
        match Connector::new(&target.parse().unwrap(), &tls, proxies) {
            Ok((Connector(Way::Direct(_)), None)) => "direct",
            Ok((Connector(Way::Forward(..)), None)) => "forward",
            Ok((Connector(Way::Forward(..)), Some(_))) => "forward with credentials",
            Ok((Connector(Way::Tunnel(_)), None)) => "tunnel",
            Ok(_) => "credentials for the wrong one",
            Err(_) => "refused",
        }
    }

    #[test]
    fn the_variables_decide_on_the_way() {
        let proxies = Proxies::new("http://proxy:3128", "https://proxy", "direct.test,10.0.0.0/8");
        for (target, expected) in [
            ("http://gitlab.test/x", "forward"),
            ("https://gitlab.test/x", "tunnel"),
            ("https://direct.test/x", "direct"),
            ("https://sub.direct.test/x", "direct"),
            ("http://10.1.2.3/x", "direct"),
            ("http://localhost:80/x", "direct"),
            ("http://127.1.2.3:80/x", "direct"),
            ("http://[::1]:80/x", "direct"),
        ] {
            assert_eq!(way(target, &proxies), expected, "{target}");
        }
        let url = "http://user:word@proxy:3128";
        let credentials = Proxies::new(url, url, "");
        assert_eq!(way("http://gitlab.test/x", &credentials), "forward with credentials");
        assert_eq!(way("https://gitlab.test/x", &credentials), "tunnel");
        let socks = Proxies::new("", "socks5://proxy:1080", "");
        assert_eq!(way("https://gitlab.test/x", &socks), "refused");
        assert_eq!(way("https://gitlab.test/x", &Proxies::default()), "direct");
    }

    #[tokio::test]
    async fn documents_are_fetched_with_https_only() {
        crate::tls::install();
        let tls = crate::tls::client(None).unwrap();
        let limits = FetchLimits { timeout: Duration::from_secs(1), largest: 1 };
        for uri in ["http://127.0.0.1:1/a", "/a"] {
            let fetched = fetch(&uri.parse().unwrap(), &tls, &Proxies::default(), limits).await;
            assert_eq!(fetched.unwrap_err().to_string(), format!("{uri} is no https URL"));
        }
    }
}
