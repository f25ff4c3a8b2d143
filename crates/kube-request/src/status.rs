//! Errors in the form that Kubernetes clients expect.

use std::time::Duration;

use http::StatusCode;
use serde::Serialize;

/// An error that kas or agentk returns instead of an answer of the API server: a `Status` of Kubernetes.
///
/// client-go repeats a request on 429 or at least 500, if there is `Retry-After`. So only an error of a
/// request that was not started, or that only reads, may have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    code: StatusCode,
    text: String,
    retry_after: Option<u64>,
}

impl Status {
    /// Returns an error without `Retry-After`. `text` says what happened, without a full stop, such as
    /// `agent 7 is not connected`.
    pub fn new(code: StatusCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), retry_after: None }
    }

    /// Tells the client to repeat the request after `wait`, rounded up to whole seconds, at least 1.
    #[must_use]
    pub fn with_retry_after(mut self, wait: Duration) -> Self {
        let seconds = wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0));
        self.retry_after = Some(seconds.max(1));
        self
    }

    /// The status code of the answer.
    pub fn code(&self) -> StatusCode {
        self.code
    }

    /// What happened.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The reason, see [`reason`].
    pub fn reason(&self) -> &'static str {
        reason(self.code)
    }

    /// The value of the header `Retry-After`, in seconds. `None`: the answer must not have this header.
    pub fn retry_after(&self) -> Option<u64> {
        self.retry_after
    }

    /// Returns the body of the answer: one line of JSON, which ends with a newline. Its `Content-Type` is
    /// `application/json`.
    pub fn to_json(&self, request_id: &str) -> Vec<u8> {
        self.to_json_of("kas", request_id)
    }

    /// Returns the body of an answer with `Content-Type: text/plain`: the message alone, and a newline.
    pub fn to_text(&self, request_id: &str) -> Vec<u8> {
        format!("{}\n", self.message("kas", request_id)).into_bytes()
    }

    fn message(&self, program: &str, request_id: &str) -> String {
        format!("{program}: {} (request {request_id})", self.text)
    }

    /// As [`Self::to_json`], for an answer of another program. Its name begins the message.
    pub fn to_json_of(&self, program: &str, request_id: &str) -> Vec<u8> {
        let body = Body {
            kind: "Status",
            api_version: "v1",
            metadata: Empty {},
            status: "Failure",
            message: self.message(program, request_id),
            reason: self.reason(),
            details: self.retry_after.map(|retry_after_seconds| Details { retry_after_seconds }),
            code: self.code.as_u16(),
        };
        let mut json = serde_json::to_vec(&body).unwrap_or_default();
        json.push(b'\n');
        json
    }
}

/// Returns the reason in a `Status` that has this code, which clients use to distinguish errors.
pub fn reason(code: StatusCode) -> &'static str {
    match code.as_u16() {
        401 => "Unauthorized",
        403 => "Forbidden",
        405 => "MethodNotAllowed",
        408 | 504 => "Timeout",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        ..500 => "BadRequest",
        _ => "InternalError",
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    kind: &'static str,
    api_version: &'static str,
    metadata: Empty,
    status: &'static str,
    message: String,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
    code: u16,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Details {
    retry_after_seconds: u64,
}
