//! Connects to GitLab directly, or through the proxy that the environment names.

use std::{
    future::Future,
    io,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Uri, uri::Scheme};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::connect::{Connected, Connection, HttpConnector, proxy::Tunnel},
    rt::TokioIo,
};
use tokio::net::TcpStream;
use tower_service::Service;

use super::{Error, Proxies};

/// The timeout of a TCP connection, for all addresses of a name together.
const CONNECT: Duration = Duration::from_secs(10);
/// The interval of TCP keepalives, as in 14.1.
const KEEPALIVE: Duration = Duration::from_secs(30);

type Plain = HttpsConnector<HttpConnector>;

/// How GitLab is reached.
#[derive(Clone)]
pub(super) enum Connector {
    Direct(Plain),
    /// The proxy forwards requests, for http.
    Forward(Plain, Uri),
    /// The proxy opens a tunnel, for https.
    Tunnel(HttpsConnector<Tunnel<Plain>>),
}

impl Connector {
    /// Selects how to reach `target`, whose scheme is http or https. Also returns the credentials for a proxy
    /// that forwards requests.
    pub(super) fn new(
        target: &Uri,
        ca_certificate: Option<&Path>,
        proxies: &Proxies,
    ) -> Result<(Self, Option<HeaderValue>), Error> {
        let mut tls = (*net::tls::client(ca_certificate)?).clone();
        // HTTP/1.1, as in 14.1. The connector adds the ALPN.
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
            return Ok((Self::Direct(plain), None));
        };
        tracing::info!(
            proxy.host = proxy.host(),
            proxy.port = proxy.port(),
            "GitLab is reached through a proxy"
        );
        if target.scheme() == Some(&Scheme::HTTP) {
            return Ok((Self::Forward(plain, proxy.url()), proxy.authorization().cloned()));
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
        Ok((Self::Tunnel(https), None))
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = grpc::BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, grpc::BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            Self::Direct(plain) | Self::Forward(plain, _) => plain.poll_ready(cx),
            Self::Tunnel(tunnel) => tunnel.poll_ready(cx),
        }
    }

    fn call(&mut self, target: Uri) -> Self::Future {
        let (connecting, is_proxied) = match self {
            Self::Direct(plain) => (plain.call(target), false),
            Self::Forward(plain, proxy) => (plain.call(proxy.clone()), true),
            Self::Tunnel(tunnel) => {
                let connecting = tunnel.call(target);
                return Box::pin(async move { Ok(Stream { inner: connecting.await?, is_proxied: false }) });
            }
        };
        Box::pin(async move { Ok(Stream { inner: MaybeHttpsStream::Http(connecting.await?), is_proxied }) })
    }
}

/// A connection to GitLab. The inner TLS is that of a proxy, the outer that of GitLab.
pub(super) struct Stream {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn way(target: &str, proxies: &Proxies) -> &'static str {
        net::tls::install();
        match Connector::new(&target.parse().unwrap(), None, proxies) {
            Ok((Connector::Direct(_), None)) => "direct",
            Ok((Connector::Forward(..), None)) => "forward",
            Ok((Connector::Forward(..), Some(_))) => "forward with credentials",
            Ok((Connector::Tunnel(_), None)) => "tunnel",
            Ok(_) => "credentials for the wrong one",
            Err(Error::Proxy(_)) => "refused",
            Err(Error::Tls(_)) => "tls",
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
}
