//! What kas answers, by listener: agents, and GitLab with operators.

pub mod agent;
pub mod api;

use std::sync::Arc;

use grpc::Status;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use runtime::http2::{Body, Refusal};

use crate::metrics::{ListenerName, Metrics, Reason};

/// Streams that fail to authenticate before a connection is closed.
const MAX_FAILURES: u32 = 20;

/// How this replica names itself to agents.
#[derive(Debug, Clone)]
pub struct Naming {
    /// Value of `kas-replica`.
    pub replica: HeaderValue,
    /// Value of `kas-replicas`: how many live.
    pub replicas: HeaderValue,
}

/// Refuses what is not gRPC over HTTP/2 in the way that HTTP clients understand.
fn not_grpc(method: &Method, headers: &HeaderMap) -> Option<Response<Body>> {
    let status = if *method != Method::POST {
        StatusCode::METHOD_NOT_ALLOWED
    } else if !grpc::is_grpc(headers) {
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    } else {
        return None;
    };
    let mut response = Response::new(grpc::full(bytes::Bytes::from_static(b"this port speaks gRPC\n")));
    *response.status_mut() = status;
    Some(response)
}

/// Returns an answer that is only a status, with the request id.
fn failed(status: &Status, correlation: &HeaderValue) -> Response<Body> {
    let mut response: Response<http_body_util::Empty<bytes::Bytes>> = status.into_response();
    response.headers_mut().insert(grpc::CORRELATION_ID, correlation.clone());
    response.map(grpc::boxed)
}

fn count_refusal(metrics: &Arc<Metrics>, listener: ListenerName, why: Refusal) {
    let reason = match why {
        Refusal::TooManyHandshakes => Reason::TooManyHandshakes,
        Refusal::Handshake => Reason::Handshake,
        Refusal::Accept => Reason::Accept,
        Refusal::Unauthenticated => Reason::Unauthenticated,
    };
    metrics.refused(listener, reason);
}
