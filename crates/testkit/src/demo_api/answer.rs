//! Responses, and why there is none.

use std::convert::Infallible;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use serde_json::{Value, json};

pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) code: StatusCode,
    reason: &'static str,
    message: String,
}

impl Problem {
    pub(super) fn new(code: StatusCode, reason: &'static str, message: &str) -> Self {
        Self { code, reason, message: message.to_owned() }
    }

    pub(super) fn bad(message: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(super) fn no_such(resource: &str, name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", &format!("{resource} {name:?} not found"))
    }

    pub(super) fn status(&self) -> Value {
        json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code.as_u16(),
        })
    }

    pub(super) fn response(&self) -> Response<Body> {
        let mut response = object(&self.status());
        *response.status_mut() = self.code;
        response
    }
}

pub(super) fn respond(status: StatusCode, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub(super) fn object(value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("{value}\n"))).boxed_unsync();
    respond(StatusCode::OK, "application/json", body)
}

pub(super) fn text(text: String) -> Response<Body> {
    respond(StatusCode::OK, "text/plain; charset=utf-8", Full::new(Bytes::from(text)).boxed_unsync())
}
