//! Requests to a Service of the cluster, by the API server's proxy.

use bytes::Bytes;
use fleet::ServiceAddress;
use grpc::{Code, Status};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use kube_request::{
    Target,
    headers::{AnswerHeaders, canonical, is_hop_by_hop, is_impersonation, of_connection},
};
use serde::Deserialize;

use crate::{Cluster, Request, Response};

/// The most values of one header of a response.
const MOST_VALUES: usize = 100;

/// A request to a Service. The API server connects to it, so RBAC must allow `get` (for `GET`) or `create`
/// (for `POST`) of `services/proxy` with the resource name [`ServiceAddress::proxied`].
#[derive(Clone, Debug)]
pub struct ServiceRequest<'a> {
    /// The Service.
    pub service: &'a ServiceAddress,
    /// The method.
    pub method: Method,
    /// Path and query; it begins with a slash.
    pub path: &'a str,
    /// Headers. Those of one connection, `Authorization`, and those by which requests impersonate are left
    /// out.
    pub headers: &'a HeaderMap,
    /// The body; it may be empty.
    pub body: Bytes,
}

/// A complete response of a Service, or of the API server in its place.
#[derive(Clone, Debug)]
pub struct ServiceResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers that may be passed on, see [`AnswerHeaders`].
    pub headers: HeaderMap,
    /// The body, as the Service has encoded it.
    pub body: Bytes,
    /// What the API server says if it did not pass the request on: that its caller may not, or that the
    /// Service is not there. A Service that answers with a `Status` of Kubernetes looks the same.
    pub refused: Option<String>,
}

/// The parts of Kubernetes' `Status` that are read.
#[derive(Deserialize)]
struct KubeStatus {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(default)]
    message: String,
}

impl Cluster {
    /// Sends a request to a Service, and reads its complete response.
    ///
    /// # Errors
    /// As of [`send`](crate::send); `INVALID_ARGUMENT` if path or headers cannot be sent.
    ///
    /// # Cancel safety
    /// As of [`send`](crate::send).
    pub async fn call_service(&self, request: ServiceRequest<'_>) -> Result<ServiceResponse, Status> {
        let request = proxied(request)?;
        answered(&self.send(request).await?)
    }
}

/// Returns the request to the API server.
fn proxied(request: ServiceRequest<'_>) -> Result<Request, Status> {
    let ServiceRequest { service, method, path, headers, body } = request;
    let invalid = |text: String| Status::new(Code::InvalidArgument, text);
    if !path.starts_with('/') {
        return Err(invalid("the path of a request to a Service must begin with a slash".to_owned()));
    }
    let (namespace, name) = (service.namespace(), service.proxied());
    let target = Target::parse(format!("/api/v1/namespaces/{namespace}/services/{name}/proxy{path}"))
        .map_err(|error| invalid(format!("the request to the Service {service}: {error}")))?;
    if !target.fits_url_path(true) {
        let text = "the path or query of the request to a Service has bytes that not every agent can request";
        return Err(invalid(text.to_owned()));
    }
    let is_of_connection = of_connection(headers);
    let mut passed = Vec::new();
    for (name, value) in headers {
        let name = name.as_str();
        if is_of_connection(name)
            || is_impersonation(name)
            || matches!(name, "authorization" | "host" | "content-length" | "audit-id" | "x-request-id")
        {
            continue;
        }
        let value = value.to_str().map_err(|_| invalid(format!("the header {name} is not text")))?;
        passed.push((canonical(name), value.to_owned()));
    }
    Ok(Request { method, target, headers: passed, body })
}

fn answered(response: &Response) -> Result<ServiceResponse, Status> {
    let status = u16::try_from(response.status).ok().and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.filter(|status| !status.is_informational()).ok_or_else(|| {
        Status::new(Code::Internal, format!("the API server answered with status {}", response.status))
    })?;
    let allowed = AnswerHeaders::default();
    let mut headers = HeaderMap::new();
    for (name, values) in &response.head.header {
        let Ok(name) = HeaderName::try_from(name.to_ascii_lowercase()) else { continue };
        // The body is whole. A place is one in the cluster.
        if !allowed.forwards(&name, false)
            || is_hop_by_hop(name.as_str())
            || matches!(name.as_str(), "content-length" | "location")
        {
            continue;
        }
        for value in values.value.iter().take(MOST_VALUES) {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.append(name.clone(), value);
            }
        }
    }
    let refused = if status.is_success() { None } else { refusal(&response.body) };
    Ok(ServiceResponse { status, headers, body: response.body.clone(), refused })
}

/// Returns the message of a `Status` of Kubernetes.
fn refusal(body: &[u8]) -> Option<String> {
    const LONGEST: usize = 64 << 10;
    let status: KubeStatus = serde_json::from_slice(body.get(..body.len().min(LONGEST))?).ok()?;
    (status.kind == "Status" && status.api_version == "v1").then_some(status.message)
}

/// For fuzzing: headers and body of an answer, by an empty line between them, as a refusal and as a success.
/// No panic, nothing of the connection goes on, and the API server's refusal is not longer than the answer.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    use proto::gitlab::agent::prototool::{HttpResponse, Values};

    let (head, body) = match bytes.windows(2).position(|pair| pair == b"\n\n") {
        Some(at) => bytes.split_at(at),
        None => (&b""[..], bytes),
    };
    let body = Bytes::copy_from_slice(body);
    let mut answer = HttpResponse::default();
    for line in String::from_utf8_lossy(head).lines().take(200) {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let values: &mut Values = answer.header.entry(name.to_owned()).or_default();
        values.value.push(value.trim().to_owned());
    }
    for code in [200, 403, 503, 99, -1] {
        let response = Response { status: code, head: answer.clone(), body: body.clone() };
        let Ok(read) = answered(&response) else {
            assert!(code < 200, "{code} is a status");
            continue;
        };
        assert!(read.headers.keys().all(|name| !is_hop_by_hop(name.as_str())), "{:?}", read.headers);
        for name in ["location", "set-cookie", "content-length"] {
            assert!(!read.headers.contains_key(name), "{:?}", read.headers);
        }
        assert!(read.refused.is_none() || code >= 400);
        assert!(read.refused.is_none_or(|text| text.len() <= body.len() * 3));
    }
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::prototool::{HttpResponse, Values};

    use super::*;

    fn request(service: &str, path: &str, headers: &[(&str, &str)]) -> Result<Request, Status> {
        let map = headers.iter().map(|(name, value)| {
            (HeaderName::try_from(*name).unwrap(), HeaderValue::from_str(value).unwrap())
        });
        let (service, headers) = (service.parse().unwrap(), map.collect());
        let request = ServiceRequest {
            service: &service,
            method: Method::POST,
            path,
            headers: &headers,
            body: Bytes::new(),
        };
        proxied(request)
    }

    #[test]
    fn a_request_goes_to_the_proxy_of_the_api_server() {
        let headers = [
            ("content-type", "a/b"),
            ("kas-hook-id", "1"),
            ("authorization", "Bearer x"),
            ("impersonate-user", "root"),
            ("connection", "x-gone"),
            ("x-gone", "1"),
            ("audit-id", "1"),
        ];
        let sent = request("ns/https:web:443", "/a/b?c=d%2Fe", &headers).unwrap();
        let target = sent.target.as_sent().as_str().to_owned();
        assert_eq!(target, "/api/v1/namespaces/ns/services/https:web:443/proxy/a/b?c=d%2Fe");
        let mut names: Vec<_> = sent.headers.into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(names, ["Content-Type", "Kas-Hook-Id"]);
    }

    #[test]
    fn a_path_cannot_leave_the_service() {
        for path in ["a", "/../../pods", "/%2e%2e/x", "/a%2Fb", "/a?b=%zz", "/a#b", "/a b"] {
            let refused = request("ns/web:80", path, &[]).unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{path}");
        }
    }

    fn response(status: i32, headers: &[(&str, &str)], body: &'static str) -> Response {
        let header = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Values { value: vec![(*value).to_owned()] }));
        let head = HttpResponse { status_code: status, header: header.collect(), ..HttpResponse::default() };
        Response { status, head, body: Bytes::from_static(body.as_bytes()) }
    }

    #[test]
    fn headers_that_concern_a_browser_or_a_connection_are_left_out() {
        let headers = [
            ("Content-Type", "application/json"),
            ("Content-Encoding", "gzip"),
            ("Set-Cookie", "a=b"),
            ("Location", "/x"),
            ("Connection", "close"),
            ("X-Frame-Options", "DENY"),
        ];
        let read = answered(&response(200, &headers, "{}")).unwrap();
        let mut names: Vec<_> = read.headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-encoding", "content-type"]);
        assert_eq!((read.status, read.refused), (StatusCode::OK, None));
        assert!(answered(&response(99, &[], "")).is_err() && answered(&response(-1, &[], "")).is_err());
    }

    #[test]
    fn a_refusal_of_the_api_server_is_told_from_an_answer() {
        let status = r#"{"kind":"Status","apiVersion":"v1","message":"no endpoints available","code":503}"#;
        let read = answered(&response(503, &[], status)).unwrap();
        assert_eq!(read.refused.as_deref(), Some("no endpoints available"));
        for other in ["", "{}", "[", r#"{"kind":"Status","apiVersion":"v2"}"#, r#"{"status":"error"}"#] {
            assert_eq!(answered(&response(503, &[], other)).unwrap().refused, None, "{other}");
        }
    }
}
