//! One request over HTTPS, directly or through the proxy that the environment names.
//!
//! The connection is used once: a command sends few requests, and mostly to different hosts. Redirects are
//! not followed.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header, uri::Scheme};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use net::{proxy::Proxies, tls};
use process::error::chain;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    address::host_port,
    file_error::reason,
    link::{TlsOptions, user_agent},
};

const DEFAULT_PORT: u16 = 443;

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No connection. Nothing was sent.
    #[error("{0}")]
    Connect(String),
    /// The request was sent, at least in part, and has no complete response.
    #[error("{0}")]
    Response(String),
    /// The file with certificate authorities cannot be used.
    #[error("{}", chain(.0))]
    CaFile(#[source] tls::Error),
}

/// Sends a request to its absolute https URI. Returns the response with its body, which has at most `largest`
/// bytes.
///
/// # Errors
/// See [`Error`]. A response with any status is not one.
///
/// # Cancel safety
/// Cancel safe: the connection is closed.
pub(crate) async fn send(
    options: &TlsOptions,
    mut request: Request<Full<Bytes>>,
    largest: usize,
) -> Result<Response<Bytes>, Error> {
    let config = tls::client(options.ca_file.as_deref()).map_err(Error::CaFile)?;
    let config = tls::http1_only(&config);
    let failed = |why: String| Error::Connect(why);
    let Target { host, port } = Target::of(request.uri()).ok_or_else(|| failed("no https URL".to_owned()))?;
    let authority = if port == DEFAULT_PORT { bracketed(&host) } else { host_port(&host, port) };
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
    *request.uri_mut() = path.parse().map_err(|error: http::uri::InvalidUri| failed(error.to_string()))?;
    let value = |text: &str| HeaderValue::from_str(text).map_err(|error| failed(error.to_string()));
    let agent = value(&user_agent())?;
    request.headers_mut().insert(header::HOST, value(&authority)?);
    request.headers_mut().insert(header::USER_AGENT, agent.clone());

    let name = options.server_name.as_deref().unwrap_or(&host);
    let proxies = Proxies::from_env();
    let proxy = proxies.of(true, &host, port).map_err(|error| failed(chain(&error)))?;
    let secure = |error: io::Error| {
        failed(format!("TLS handshake failed: {error}; the authority of the server is set with --ca-file"))
    };
    let Some(proxy) = proxy else {
        let tcp = dial(&host, port).await.map_err(|error| failed(reason(&error)))?;
        return exchange(encrypt(&config, name, tcp).await.map_err(secure)?, request, largest).await;
    };
    let at_proxy = |error: io::Error| failed(format!("cannot reach the proxy {proxy}: {}", reason(&error)));
    let target = format!("{}:{port}", bracketed(&host));
    let tcp = dial(proxy.host(), proxy.port()).await.map_err(at_proxy)?;
    if proxy.is_tls() {
        let tls = encrypt(&config, proxy.host(), tcp).await.map_err(at_proxy)?;
        let tunnel = proxy.connect(tls, &target, agent).await.map_err(|error| failed(chain(&error)))?;
        exchange(encrypt(&config, name, tunnel).await.map_err(secure)?, request, largest).await
    } else {
        let tunnel = proxy.connect(tcp, &target, agent).await.map_err(|error| failed(chain(&error)))?;
        exchange(encrypt(&config, name, tunnel).await.map_err(secure)?, request, largest).await
    }
}

/// As [`send`], within a time for everything. Zero: without a limit.
///
/// # Errors
/// See [`Error`].
pub(crate) async fn send_within(
    limit: Duration,
    options: &TlsOptions,
    request: Request<Full<Bytes>>,
    largest: usize,
) -> Result<Response<Bytes>, Error> {
    let sending = send(options, request, largest);
    if limit.is_zero() {
        return sending.await;
    }
    let late = |_| Error::Response(format!("no answer within {}", crate::duration::humane(limit)));
    tokio::time::timeout(limit, sending).await.map_err(late)?
}

/// Where an https URI leads.
struct Target {
    /// Without brackets around an IPv6 address.
    host: String,
    port: u16,
}

impl Target {
    fn of(uri: &Uri) -> Option<Self> {
        if uri.scheme() != Some(&Scheme::HTTPS) {
            return None;
        }
        let host = uri.host()?.trim_start_matches('[').trim_end_matches(']').to_owned();
        Some(Self { host, port: uri.port_u16().unwrap_or(DEFAULT_PORT) })
    }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    TcpStream::connect((host, port)).await
}

async fn encrypt<S>(config: &Arc<ClientConfig>, name: &str, io: S) -> io::Result<TlsStream<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    TlsConnector::from(Arc::clone(config)).connect(name, io).await
}

async fn exchange<S>(io: S, request: Request<Full<Bytes>>, largest: usize) -> Result<Response<Bytes>, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let failed = |error: hyper::Error| Error::Response(chain(&error));
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(failed)?;
    // Ends with this function.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let (head, body) = sender.send_request(request).await.map_err(failed)?.into_parts();
    let body = Limited::new(body, largest).collect().await;
    let body = body.map_err(|error| Error::Response(chain(&*error)))?.to_bytes();
    Ok(Response::from_parts(head, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_that_of_the_uri() {
        let of = |text: &str| Target::of(&text.parse().unwrap()).map(|target| (target.host, target.port));
        assert_eq!(of("https://kas.test/a?b"), Some(("kas.test".to_owned(), 443)));
        assert_eq!(of("https://[::1]:8154/"), Some(("::1".to_owned(), 8154)));
        assert_eq!(of("http://kas.test/"), None);
        assert_eq!(of("/path"), None);
    }
}
