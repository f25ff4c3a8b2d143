//! Opens connections to the API server.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, anyhow};
use grpc::BoxError;
use http::{Uri, uri};
use http_tunnel::agent_end::Upstream;
use hyper_util::client::legacy::connect::HttpConnector;
use kube::{client::ConfigExt as _, config::Config};
use process::error::chain;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tower_service::Service as _;
use websocket::Rewind;

/// TCP keepalive: the idle time before the first probe, the interval of the probes, and their number. A watch
/// may be idle for hours, and nothing else would notice that its node is gone.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(20), Duration::from_secs(10), 3);

/// How long sent bytes may remain unacknowledged.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(45);

/// The only protocol that is spoken. An API server that chose HTTP/2 could not upgrade a connection.
const ALPN: &[u8] = b"http/1.1";

/// Opens connections to one API server.
pub(super) struct Dialer {
    tcp: HttpConnector,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    url: Uri,
}

impl Dialer {
    /// Prepares connections to the host of `authority`. `source` is where the configuration is from.
    pub(super) fn new(
        config: &Config,
        scheme: &uri::Scheme,
        authority: &uri::Authority,
        source: &str,
    ) -> anyhow::Result<Self> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEPALIVE.0));
        tcp.set_keepalive_interval(Some(KEEPALIVE.1));
        tcp.set_keepalive_retries(Some(KEEPALIVE.2));
        #[cfg(target_os = "linux")]
        tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
        let tls = if *scheme == uri::Scheme::HTTPS {
            let mut tls = config.rustls_client_config().map_err(|error| {
                anyhow!("cannot prepare TLS for the API server ({source}): {}", chain(&error))
            })?;
            tls.alpn_protocols = vec![ALPN.to_vec()];
            let name = server_name(config.tls_server_name.as_deref(), authority).with_context(|| {
                format!("the certificate of the API server ({source}) cannot be checked for its host")
            })?;
            Some((TlsConnector::from(Arc::new(tls)), name))
        } else {
            None
        };
        let url = Uri::builder().scheme(scheme.clone()).authority(authority.clone()).path_and_query("/");
        let url = url.build().with_context(|| format!("the URL of the API server ({source}) is invalid"))?;
        Ok(Self { tcp, tls, url })
    }

    /// Opens a connection. The caller bounds the time.
    pub(super) async fn connect(&self) -> Result<ApiStream, BoxError> {
        let mut tcp = self.tcp.clone();
        std::future::poll_fn(|cx| tcp.poll_ready(cx)).await?;
        let stream = tcp.call(self.url.clone()).await?.into_inner();
        Ok(match &self.tls {
            None => ApiStream::Tcp(stream),
            Some((tls, name)) => ApiStream::Tls(Box::new(tls.connect(name.clone(), stream).await?)),
        })
    }
}

/// Returns the name that the certificate must have.
fn server_name(configured: Option<&str>, authority: &uri::Authority) -> anyhow::Result<ServerName<'static>> {
    let host = configured.unwrap_or_else(|| authority.host());
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match host.parse::<IpAddr>() {
        Ok(address) => Ok(address.into()),
        Err(_) => Ok(ServerName::try_from(host.to_owned())?),
    }
}

/// A connection to the API server.
#[derive(Debug)]
pub(super) enum ApiStream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

websocket::read_through!([] ApiStream, stream in Self::Tcp(stream), Self::Tls(stream));
websocket::write_through!([] ApiStream, stream in Self::Tcp(stream), Self::Tls(stream));

/// A connection to the API server that was upgraded.
#[derive(Debug)]
pub struct UpgradedConnection(Rewind<ApiStream>);

impl UpgradedConnection {
    /// `first`: what was read of the connection with the head of the answer.
    pub(super) fn new(stream: ApiStream, first: bytes::Bytes) -> Self {
        Self(Rewind::new(stream, first))
    }
}

websocket::read_through!([] UpgradedConnection, stream in Self(stream));
websocket::write_through!([] UpgradedConnection, stream in Self(stream));

impl Upstream for UpgradedConnection {
    fn reset_on_close(&self) {
        let tcp = match self.0.get_ref() {
            ApiStream::Tcp(stream) => stream,
            ApiStream::Tls(stream) => stream.get_ref().0,
        };
        let reset: io::Result<()> = tcp.set_zero_linger();
        if let Err(error) = reset {
            tracing::debug!(error = %error, "a connection to the Kubernetes API server cannot be made to end with a reset");
        }
    }
}
