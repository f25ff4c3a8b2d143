//! The agents that a credential reaches, from the Kubernetes API endpoint of kas.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use ids::AgentId;
use serde::Deserialize;

use crate::{
    https::{self, send_within},
    kas_url::KasUrl,
    link::TlsOptions,
    table::excerpt,
    user_token::Token,
};

/// The largest list: more than 100,000 agents.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

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
    #[error("{0}; set a PEM file with certificates with --ca-file")]
    CaFile(#[source] https::Error),
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

/// Asks kas for the agents that a token reaches, within a time; zero for no limit.
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
    limit: Duration,
) -> Result<Vec<ReachableAgent>, Error> {
    let url_text = || url.to_string();
    let request = request(url, token);
    let request = request.map_err(|error| Error::Answer { url: url_text(), why: error.to_string() })?;
    let sent = send_within(limit, options, request, MAX_ANSWER).await;
    let response = sent.map_err(|error| match error {
        https::Error::Connect(why) => Error::Connect { url: url_text(), why },
        https::Error::Response(why) => Error::Answer { url: url_text(), why },
        error @ https::Error::CaFile(_) => Error::CaFile(error),
    })?;
    read(url, &response)
}

fn read(url: &KasUrl, response: &Response<Bytes>) -> Result<Vec<ReachableAgent>, Error> {
    let failed = |why: String| Error::Answer { url: url.to_string(), why };
    let body = response.body();
    match response.status() {
        StatusCode::OK => {
            let list: ListJson = serde_json::from_slice(body).map_err(|error| {
                failed(format!(
                    "it answered with something else ({error}); is --url the endpoint for kubectl?"
                ))
            })?;
            Ok(list.agents)
        }
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            Err(Error::Refused { url: url.to_string(), why: said(status, body) })
        }
        status => Err(failed(said(status, body))),
    }
}

fn request(url: &KasUrl, token: &Token) -> Result<Request<Full<Bytes>>, http::Error> {
    let mut bearer = HeaderValue::try_from(format!("Bearer {}", token.expose()))?;
    bearer.set_sensitive(true);
    Request::get(url.list())
        .header(header::ACCEPT, "application/json")
        .header(header::AUTHORIZATION, bearer)
        .body(Full::default())
}

/// Returns what an answer says: its message if it is a Kubernetes `Status`, and the HTTP status.
pub(crate) fn said(status: StatusCode, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct StatusJson {
        message: String,
    }
    let message = serde_json::from_slice(body).map(|StatusJson { message }| message).unwrap_or_default();
    let message = excerpt(&message);
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
