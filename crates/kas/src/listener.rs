//! The listeners: for agents, for GitLab and operators, and for other replicas.

pub mod agent;
pub mod api;
pub mod flux;
pub mod gitlab_access;
pub mod manifests;
pub mod private;
pub mod registration;

use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use net::http::Body;
use tokio::sync::watch;

use kas_config::Attempts;

/// What this replica reports about itself to agents.
#[derive(Debug, Clone)]
pub struct Naming {
    /// Value of `kas-replica`.
    pub replica: HeaderValue,
    /// Value of `kas-replica-run`, which differs in each process.
    pub run: HeaderValue,
    /// Value of `kas-replicas`: the number of live replicas.
    pub replicas: watch::Receiver<usize>,
}

/// Refuses requests that are not gRPC, with a status of HTTP.
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

/// Refuses headers with more fields than agents and replicas send. Callers have another limit.
fn too_many_fields(headers: &HeaderMap, attempts: Attempts) -> Option<Status> {
    let (fields, most) = (headers.len(), attempts.fields);
    (fields > most as usize).then(|| {
        Status::new(
            Code::ResourceExhausted,
            format!("the request has {fields} header fields; at most {most} are accepted here"),
        )
    })
}

/// Refuses headers that are too large, with a message. HTTP/2 itself refuses larger ones without one.
fn too_large(request: &Request<Incoming>, attempts: Attempts) -> Option<Status> {
    let (size, most) = (header_list(request), attempts.header_list);
    (size > most as usize).then(|| {
        Status::new(
            Code::ResourceExhausted,
            format!(
                "the headers of the request have {size} bytes, including 32 for each field; at most {most} are accepted here"
            ),
        )
    })
}

/// Returns the size of a request's headers as RFC 9113 counts them.
fn header_list<B>(request: &Request<B>) -> usize {
    /// Bytes that each field counts besides its name and its value.
    const FIELD: usize = 32;
    let field = |name: &str, len: usize| name.len() + len + FIELD;
    let uri = request.uri();
    let path = uri.path_and_query().map_or(0, |path| path.as_str().len());
    field(":method", request.method().as_str().len())
        + field(":path", path)
        + uri.scheme_str().map_or(0, |scheme| field(":scheme", scheme.len()))
        + uri.authority().map_or(0, |authority| field(":authority", authority.as_str().len()))
        + request.headers().iter().map(|(name, value)| field(name.as_str(), value.len())).sum::<usize>()
}

/// Returns an answer that has only a status and the request id.
fn failed(status: &Status, correlation: &HeaderValue) -> Response<Body> {
    let mut response: Response<http_body_util::Empty<bytes::Bytes>> = status.into_response();
    response.headers_mut().insert(grpc::CORRELATION_ID, correlation.clone());
    response.map(grpc::boxed)
}
