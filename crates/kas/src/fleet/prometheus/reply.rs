//! Answers as Prometheus gives them.

use std::any::Any;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use kubernetes_api::{FleetAnswer, FleetBody};
use serde_json::json;

/// The longest text of an error, in characters.
const LONGEST: usize = 2_000;

/// An answer to a client of Prometheus.
#[derive(Debug)]
pub(super) struct Reply {
    status: StatusCode,
    /// Boxed, as a reply is the error of many functions.
    headers: Box<HeaderMap>,
    body: Bytes,
    is_partial: bool,
}

impl Reply {
    /// An answer of a server, as it is.
    pub(super) fn as_it_is(status: StatusCode, headers: HeaderMap, body: Bytes) -> Self {
        Self { status, headers: Box::new(headers), body, is_partial: false }
    }

    /// A result: `data` is JSON.
    pub(super) fn success(data: String, warnings: Vec<String>) -> Self {
        // It may be large: it is not copied.
        let mut body = data;
        body.insert_str(0, r#"{"status":"success","data":"#);
        if !warnings.is_empty() {
            body.push_str(r#","warnings":"#);
            body.push_str(&json!(warnings).to_string());
        }
        body.push('}');
        Self { status: StatusCode::OK, headers: Box::default(), body: body.into(), is_partial: false }
    }

    /// Says whether agents are missing in it.
    pub(super) fn partial(self, is_partial: bool) -> Self {
        Self { is_partial, ..self }
    }

    /// Returns the body as text.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// An error, in the form of Prometheus.
    pub(super) fn error(status: StatusCode, text: &str) -> Self {
        let kind = match status.as_u16() {
            400 => "bad_data",
            404 => "not_found",
            403 => "forbidden",
            422 => "execution",
            504 => "timeout",
            _ => "unavailable",
        };
        let text: String = text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect();
        let body = json!({ "status": "error", "errorType": kind, "error": text }).to_string();
        Self { status, headers: Box::default(), body: body.into(), is_partial: false }
    }

    /// A limit is reached; the same question may be asked again soon.
    pub(super) fn too_many(text: impl AsRef<str>) -> Self {
        let mut reply = Self::error(StatusCode::TOO_MANY_REQUESTS, text.as_ref());
        reply.headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        reply
    }

    /// A path that is not served.
    pub(super) fn not_found(path: &str) -> Self {
        let path: String = path.chars().take(100).collect();
        let text = format!("/api/v1/{path} is not served here; see the guide of the fleet");
        Self::error(StatusCode::NOT_FOUND, &text)
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// Whether agents are missing in it.
    pub(super) fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Returns how many bytes the body has.
    pub(super) fn size(&self) -> usize {
        self.body.len()
    }

    /// Returns the answer. `held` is held until the client has taken it.
    pub(super) fn into_answer(self, held: Option<Box<dyn Any + Send>>) -> FleetAnswer {
        let mut headers = *self.headers;
        headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        FleetAnswer { status: self.status, headers, body: FleetBody::Whole(self.body), held }
    }
}
