//! Requests to the Kubernetes API endpoint of kas, by the credential of a user.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header, request};
use http_body_util::Full;
use serde::Deserialize;

use crate::{
    https::{self, send_within},
    kas_url::KasUrl,
    link::TlsOptions,
    table::excerpt,
    user_token::Token,
};

/// Why there is no answer.
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
    /// kas did not do it.
    #[error("kas at {url} {what}: {why}")]
    Answer {
        /// The URL of kas.
        url: String,
        /// What it did not do: `made no diff`.
        what: &'static str,
        /// What it answered.
        why: String,
    },
    /// `--ca-file` cannot be used.
    #[error("{0}; set a PEM file with certificates with --ca-file")]
    CaFile(#[source] https::Error),
}

/// The endpoint, and what is asked of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint<'a> {
    /// Its URL.
    pub(crate) url: &'a KasUrl,
    /// For [`Error::Answer`].
    pub(crate) what: &'static str,
}

impl Endpoint<'_> {
    /// Returns the error of an answer that is not as expected.
    pub(crate) fn failed(&self, why: impl Into<String>) -> Error {
        Error::Answer { url: self.url.to_string(), what: self.what, why: why.into() }
    }

    /// Returns the error of an answer that is no JSON, or another one.
    pub(crate) fn not_json(&self, error: &serde_json::Error) -> Error {
        self.failed(format!("it answered with something else ({error}); is --url the endpoint for kubectl?"))
    }

    /// Sends a request with a token, and returns the answer, within a time; zero for no limit. The largest
    /// answer is in bytes.
    ///
    /// # Errors
    /// If there is no answer, or the credential is refused.
    ///
    /// # Cancel safety
    /// Cancel safe: the connection is closed.
    pub(crate) async fn send(
        &self,
        options: &TlsOptions,
        token: &Token,
        request: request::Builder,
        body: Bytes,
        (limit, max_answer): (Duration, usize),
    ) -> Result<Response<Bytes>, Error> {
        let url = || self.url.to_string();
        let bearer = HeaderValue::try_from(format!("Bearer {}", token.expose()));
        let mut bearer = bearer.map_err(|error| self.failed(error.to_string()))?;
        bearer.set_sensitive(true);
        let request: Request<Full<Bytes>> = request
            .header(header::ACCEPT, "application/json")
            .header(header::AUTHORIZATION, bearer)
            .body(Full::from(body))
            .map_err(|error| self.failed(error.to_string()))?;
        let sent = send_within(limit, options, request, max_answer).await;
        let response = sent.map_err(|error| match error {
            https::Error::Connect(why) => Error::Connect { url: url(), why },
            https::Error::Response(why) => self.failed(why),
            error @ https::Error::CaFile(_) => Error::CaFile(error),
        })?;
        self.admitted(response)
    }

    fn admitted(&self, response: Response<Bytes>) -> Result<Response<Bytes>, Error> {
        match response.status() {
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                Err(Error::Refused { url: self.url.to_string(), why: said(status, response.body()) })
            }
            _ => Ok(response),
        }
    }
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

    #[test]
    fn a_refused_credential_is_told_apart() {
        let url: KasUrl = "https://kas.test/".parse().unwrap();
        let endpoint = Endpoint { url: &url, what: "did not answer" };
        let answer = |status: u16| {
            let body = Bytes::from_static(br#"{"kind":"Status","message":"no","code":401}"#);
            endpoint.admitted(Response::builder().status(status).body(body).unwrap())
        };
        for status in [401, 403] {
            assert!(answer(status).unwrap_err().to_string().contains("refused the credential: no (HTTP 40"));
        }
        assert!(answer(200).is_ok() && answer(422).is_ok());
        let other = endpoint.failed("no").to_string();
        assert!(other.ends_with("did not answer: no"), "{other}");
    }
}
