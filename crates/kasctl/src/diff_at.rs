//! A diff by the Kubernetes API endpoint of kas, for callers without the secret of the API listener: CI jobs.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use ids::AgentId;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proto::kas::api::v1::{DiffChange, DiffResponse, diff_request::Files};
use serde::{Deserialize, Serialize};

use crate::{
    endpoint::{Endpoint, Error, said},
    failure::Failure,
    kas_url::KasUrl,
    link::TlsOptions,
    user_token::Token,
};

/// The largest answer, in bytes.
const MAX_ANSWER: usize = 64 << 20;

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
/// There is no diff.
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
) -> Result<DiffResponse, Failure> {
    let project = utf8_percent_encode(project, NON_ALPHANUMERIC);
    let target = url.fleet(&format!("diff?agent={agent}&project={project}"));
    let endpoint = Endpoint { url, what: "made no diff" };
    let request = Request::post(target).header(header::CONTENT_TYPE, "application/json");
    let response = endpoint.send(options, token, request, body(files)?, (limit, MAX_ANSWER)).await?;
    Ok(read(endpoint, &response)?)
}

fn body(files: &Files) -> Result<Bytes, Failure> {
    let mut listed = Vec::with_capacity(files.files.len());
    for file in &files.files {
        let content = std::str::from_utf8(&file.content).map_err(|_| Failure::NotText(file.path.clone()))?;
        listed.push(FileJson { path: &file.path, content });
    }
    // Texts can always be written.
    Ok(serde_json::to_vec(&Body { files: listed }).unwrap_or_default().into())
}

fn read(endpoint: Endpoint<'_>, response: &Response<Bytes>) -> Result<DiffResponse, Error> {
    let status = response.status();
    if status != StatusCode::OK {
        return Err(endpoint.failed(said(status, response.body())));
    }
    let made: DiffJson =
        serde_json::from_slice(response.body()).map_err(|error| endpoint.not_json(&error))?;
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
