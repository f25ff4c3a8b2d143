//! A diff by the Kubernetes API endpoint of kas, for callers without the secret of the API listener: CI jobs.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use ids::AgentId;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proto::kas::api::v1::{DiffChange, DiffResponse, diff_request::Files};
use serde::{Deserialize, Serialize};

use crate::{
    agent_list::said,
    https::{self, send_within},
    kas_url::KasUrl,
    link::TlsOptions,
    user_token::Token,
};

/// The largest answer, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Why there is no diff.
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
    /// kas made no diff.
    #[error("kas at {url} made no diff: {why}")]
    Answer {
        /// The URL of kas.
        url: String,
        /// What it answered.
        why: String,
    },
    /// A file that is not UTF-8.
    #[error("{0} is not UTF-8: manifests are text")]
    NotText(String),
    /// `--ca-file` cannot be used.
    #[error("{0}; set a PEM file with certificates with --ca-file")]
    CaFile(#[source] https::Error),
}

#[derive(Serialize)]
struct Body<'a> {
    files: Vec<FileJson<'a>>,
}

#[derive(Serialize)]
struct FileJson<'a> {
    path: &'a str,
    content: &'a str,
}

/// The answer of kas. Other fields are ignored.
#[derive(Deserialize)]
struct DiffJson {
    changes: Vec<ChangeJson>,
    unchanged: u64,
    warnings: Vec<String>,
}

#[derive(Deserialize)]
struct ChangeJson {
    action: String,
    object: ObjectJson,
    file: Option<String>,
    diff: String,
    error: String,
}

#[derive(Deserialize)]
struct ObjectJson {
    group: String,
    kind: String,
    namespace: String,
    name: String,
}

/// Asks for a diff of the files of a manifest project, within a time; zero for no limit.
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
    (agent, project): (AgentId, &str),
    files: &Files,
    limit: Duration,
) -> Result<DiffResponse, Error> {
    let url_text = || url.to_string();
    let project = utf8_percent_encode(project, NON_ALPHANUMERIC);
    let target = url.fleet(&format!("diff?agent={agent}&project={project}"));
    let wrong = |error: http::Error| Error::Answer { url: url_text(), why: error.to_string() };
    let bearer = HeaderValue::try_from(format!("Bearer {}", token.expose()));
    let mut bearer = bearer.map_err(|error| wrong(error.into()))?;
    bearer.set_sensitive(true);
    let request = Request::post(target)
        .header(header::ACCEPT, "application/json")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::AUTHORIZATION, bearer)
        .body(Full::from(body(files)?))
        .map_err(wrong)?;
    let sent = send_within(limit, options, request, MAX_ANSWER).await;
    let response = sent.map_err(|error| match error {
        https::Error::Connect(why) => Error::Connect { url: url_text(), why },
        https::Error::Response(why) => Error::Answer { url: url_text(), why },
        error @ https::Error::CaFile(_) => Error::CaFile(error),
    })?;
    read(url, &response)
}

fn body(files: &Files) -> Result<Bytes, Error> {
    let mut listed = Vec::with_capacity(files.files.len());
    for file in &files.files {
        let content = std::str::from_utf8(&file.content).map_err(|_| Error::NotText(file.path.clone()))?;
        listed.push(FileJson { path: &file.path, content });
    }
    // Texts can always be written.
    Ok(serde_json::to_vec(&Body { files: listed }).unwrap_or_default().into())
}

fn read(url: &KasUrl, response: &Response<Bytes>) -> Result<DiffResponse, Error> {
    let failed = |why: String| Error::Answer { url: url.to_string(), why };
    match response.status() {
        StatusCode::OK => {}
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            return Err(Error::Refused { url: url.to_string(), why: said(status, response.body()) });
        }
        status => return Err(failed(said(status, response.body()))),
    }
    let made: DiffJson = serde_json::from_slice(response.body()).map_err(|error| {
        failed(format!("it answered with something else ({error}); is --url the endpoint for kubectl?"))
    })?;
    let change = |change: ChangeJson| {
        let ObjectJson { group, kind, namespace, name } = change.object;
        let ChangeJson { action, file, diff, error, .. } = change;
        DiffChange { action, group, kind, namespace, name, file: file.unwrap_or_default(), diff, error }
    };
    Ok(DiffResponse {
        changes: made.changes.into_iter().map(change).collect(),
        unchanged: made.unchanged,
        warnings: made.warnings,
    })
}
