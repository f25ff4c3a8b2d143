//! The agents that a credential reaches, from the Kubernetes API endpoint of kas.

use std::{io, sync::Arc};

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use ids::AgentId;
use net::{proxy::Proxies, tls};
use process::error::chain;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde::Deserialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    file_error::reason,
    kas_url::KasUrl,
    link::{TlsOptions, user_agent},
    table::printable,
    user_token::Token,
};

/// The largest list: more than 100,000 agents.
const MAX_ANSWER: usize = 64 * 1024 * 1024;
/// The longest part of an answer that an error contains, in characters.
const MAX_SHOWN: usize = 300;

/// Why there is no list.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No connection. Nothing was sent.
    #[error("cannot reach kas at {url}: {why}")]
    Connect {
        /// The URL of kas.
        url: String,
        /// The cause, and what to do.
        why: String,
    },
    /// kas refused the credential.
    #[error("kas at {url} refused the credential: {why}")]
    Refused {
        /// The URL of kas.
        url: String,
        /// What kas said.
        why: String,
    },
    /// kas did not return a list.
    #[error("kas at {url} did not list the agents: {why}; --agent needs no list")]
    Answer {
        /// The URL of kas.
        url: String,
        /// What it answered.
        why: String,
    },
    /// `--ca-file` cannot be used.
    #[error("{}; set a PEM file with certificates with --ca-file", chain(.0))]
    CaFile(#[source] tls::Error),
}

/// An agent within reach.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ReachableAgent {
    /// Its id.
    pub(crate) id: AgentId,
    /// Its name, if a replica knows it.
    pub(crate) name: Option<String>,
    /// Its configuration project, likewise.
    pub(crate) project_id: Option<i64>,
}

/// The answer of kas. Other fields are ignored.
#[derive(Deserialize)]
struct ListJson {
    agents: Vec<ReachableAgent>,
}

/// Asks kas for the agents that a token reaches.
///
/// # Errors
/// See [`Error`].
///
/// # Cancel safety
/// Cancel safe: the connection is closed.
pub(crate) async fn fetch(
    url: &KasUrl,
    options: &TlsOptions,
    token: &Token,
) -> Result<Vec<ReachableAgent>, Error> {
    let config = tls::client(options.ca_file.as_deref()).map_err(Error::CaFile)?;
    let config = tls::http1_only(&config);
    let failed = |why: String| Error::Connect { url: url.to_string(), why };
    let name = options.server_name.as_deref().unwrap_or(url.host());
    let proxies = Proxies::from_env();
    let proxy = proxies.of(true, url.host(), url.port()).map_err(|error| failed(chain(&error)))?;
    let secure = |error: io::Error| failed(format!("TLS handshake failed: {error}; is --ca-file right?"));
    let Some(proxy) = proxy else {
        let tcp = dial(url.host(), url.port()).await.map_err(|error| failed(reason(&error)))?;
        return exchange(encrypt(&config, name, tcp).await.map_err(secure)?, url, token).await;
    };
    let at_proxy = |error: io::Error| failed(format!("cannot reach the proxy {proxy}: {}", reason(&error)));
    let target = format!("{}:{}", bracketed(url.host()), url.port());
    let agent = HeaderValue::from_str(&user_agent()).map_err(|error| failed(error.to_string()))?;
    let tcp = dial(proxy.host(), proxy.port()).await.map_err(at_proxy)?;
    if proxy.is_tls() {
        let tls = encrypt(&config, proxy.host(), tcp).await.map_err(at_proxy)?;
        let tunnel = proxy.connect(tls, &target, agent).await.map_err(|error| failed(chain(&error)))?;
        exchange(encrypt(&config, name, tunnel).await.map_err(secure)?, url, token).await
    } else {
        let tunnel = proxy.connect(tcp, &target, agent).await.map_err(|error| failed(chain(&error)))?;
        exchange(encrypt(&config, name, tunnel).await.map_err(secure)?, url, token).await
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

async fn exchange<S>(io: S, url: &KasUrl, token: &Token) -> Result<Vec<ReachableAgent>, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let failed = |why: String| Error::Answer { url: url.to_string(), why };
    let http = |error: hyper::Error| failed(chain(&error));
    let request = request(url, token).map_err(|error| failed(error.to_string()))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(http)?;
    // Ends with this function.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let response = sender.send_request(request).await.map_err(http)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER);
    let body = body.collect().await.map_err(|error| failed(chain(&*error)))?.to_bytes();
    match status {
        StatusCode::OK => {
            let list: ListJson = serde_json::from_slice(&body).map_err(|error| {
                failed(format!(
                    "it answered with something else ({error}); is --url the endpoint for kubectl?"
                ))
            })?;
            Ok(list.agents)
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            Err(Error::Refused { url: url.to_string(), why: said(status, &body) })
        }
        status => Err(failed(said(status, &body))),
    }
}

fn request(url: &KasUrl, token: &Token) -> Result<Request<Empty<Bytes>>, http::Error> {
    let mut bearer = HeaderValue::try_from(format!("Bearer {}", token.expose()))?;
    bearer.set_sensitive(true);
    Request::get(url.list_path())
        .header(header::HOST, url.authority())
        .header(header::USER_AGENT, user_agent())
        .header(header::ACCEPT, "application/json")
        .header(header::AUTHORIZATION, bearer)
        .body(Empty::new())
}

/// Returns what an answer says: its message if it is a Kubernetes `Status`, and the HTTP status.
fn said(status: StatusCode, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct StatusJson {
        message: String,
    }
    let message = serde_json::from_slice(body).map(|StatusJson { message }| message).unwrap_or_default();
    let message: String = printable(&message).chars().take(MAX_SHOWN).collect();
    if message.is_empty() { format!("HTTP {status}") } else { format!("{message} (HTTP {status})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_contain_the_message_of_kas_on_one_line() {
        let body = br#"{"kind":"Status","message":"kas: no\nsuch (request 1)","code":401}"#;
        assert_eq!(
            said(StatusCode::UNAUTHORIZED, body),
            "kas: no\\nsuch (request 1) (HTTP 401 Unauthorized)"
        );
        assert_eq!(said(StatusCode::BAD_GATEWAY, b"<html>"), "HTTP 502 Bad Gateway");
    }
}
