//! One export: sends bytes to a collector and reads its answer.
//!
//! Uses its own connection, HTTP/1.1 or HTTP/2, which is opened when needed and kept between exports.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use grpc::Code;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header, uri::PathAndQuery};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use process::error::chain;
use prost::Message as _;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::settings::{Collector, Error, Protocol};

const GRPC: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
const HTTP: &str = "/v1/traces";
/// Maximum size of an answer in bytes: it consists of a few numbers and a sentence.
const MAX_ANSWER: usize = 64 * 1024;

/// Why spans were not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The collector cannot be reached now, or asks to retry later.
    #[error("{0}")]
    Later(String),
    /// The collector refuses them permanently.
    #[error("{0}")]
    Refused(String),
}

/// The answer of a collector.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Number of spans that it did not accept.
    pub(crate) rejected: u64,
    /// The reason.
    pub(crate) why: String,
}

/// A connection of either kind. It is boxed because a copy of HTTP/1 and HTTP/2 for each kind would be larger
/// than the rest of this crate.
trait Stream: hyper::rt::Read + hyper::rt::Write + Unpin + Send {}

impl<S: hyper::rt::Read + hyper::rt::Write + Unpin + Send> Stream for S {}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Sender {
    async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<http::Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
            Self::Http2(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }

    fn is_open(&self) -> bool {
        match self {
            Self::Http1(sender) => !sender.is_closed(),
            Self::Http2(sender) => !sender.is_closed(),
        }
    }
}

/// The connection to the collector.
pub(crate) struct Wire {
    endpoint: Uri,
    path: PathAndQuery,
    protocol: Protocol,
    tls: Option<Arc<rustls::ClientConfig>>,
    sender: Option<Sender>,
}

impl Wire {
    pub(crate) fn new(collector: &Collector) -> Result<Self, Error> {
        let tls = (collector.endpoint.scheme_str() == Some("https"))
            .then(|| net::tls::client(collector.ca_file.as_deref()))
            .transpose()?
            .map(|tls| match collector.protocol {
                Protocol::Http => net::tls::http1_only(&tls),
                Protocol::Grpc => tls,
            });
        Ok(Self {
            path: path(&collector.endpoint, collector.protocol),
            endpoint: collector.endpoint.clone(),
            protocol: collector.protocol,
            tls,
            sender: None,
        })
    }

    /// Sends spans within `timeout`.
    pub(crate) async fn send(
        &mut self,
        spans: &ExportTraceServiceRequest,
        headers: &[(HeaderName, HeaderValue)],
        timeout: Duration,
    ) -> Result<Taken, Failure> {
        let result = match tokio::time::timeout(timeout, self.exchange(spans, headers)).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Later(format!("no answer within {timeout:?}"))),
        };
        if matches!(result, Err(Failure::Later(_))) {
            self.sender = None;
        }
        result
    }

    async fn exchange(
        &mut self,
        spans: &ExportTraceServiceRequest,
        headers: &[(HeaderName, HeaderValue)],
    ) -> Result<Taken, Failure> {
        let request = self.request(spans, headers);
        let sender = match self.sender.take().filter(Sender::is_open) {
            Some(sender) => self.sender.insert(sender),
            None => {
                let sender = self.dial().await.map_err(|error| Failure::Later(chain(&*error)))?;
                self.sender.insert(sender)
            }
        };
        let response = sender.send(request).await.map_err(|error| Failure::Later(chain(&error)))?;
        let status = response.status();
        let headers = response.headers().clone();
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let body = body.map_err(|error| Failure::Later(chain(&*error)))?;
        let trailers = body.trailers().cloned();
        judge(self.protocol, status, &headers, trailers.as_ref(), body.to_bytes())
    }

    fn request(
        &self,
        spans: &ExportTraceServiceRequest,
        further: &[(HeaderName, HeaderValue)],
    ) -> Request<Full<Bytes>> {
        let (body, content_type) = match self.protocol {
            Protocol::Http => (spans.encode_to_vec().into(), "application/x-protobuf"),
            Protocol::Grpc => {
                let mut body = BytesMut::new();
                grpc::encode_into(spans, &mut body);
                (body.freeze(), "application/grpc")
            }
        };
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        let authority = self.endpoint.authority().map(|authority| authority.as_str()).unwrap_or_default();
        match self.protocol {
            Protocol::Http => {
                *request.uri_mut() = Uri::from(self.path.clone());
                if let Ok(host) = HeaderValue::try_from(authority) {
                    request.headers_mut().insert(header::HOST, host);
                }
            }
            Protocol::Grpc => {
                let mut parts = self.endpoint.clone().into_parts();
                parts.path_and_query = Some(self.path.clone());
                // Scheme and authority are those of the endpoint, which has both.
                *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
                request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
            }
        }
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        let agent = HeaderValue::from_static(concat!("kas-otlp/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(header::USER_AGENT, agent);
        request.headers_mut().extend(further.iter().cloned());
        request
    }

    async fn dial(&self) -> Result<Sender, grpc::BoxError> {
        let host = self.endpoint.host().unwrap_or_default();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let default = match (self.protocol, &self.tls) {
            (Protocol::Http, None) => 80,
            (Protocol::Grpc, None) => 4317,
            (_, Some(_)) => 443,
        };
        let stream = TcpStream::connect((bare, self.endpoint.port_u16().unwrap_or(default))).await?;
        stream.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(TokioIo::new(stream)),
            Some(tls) => {
                let name = ServerName::try_from(bare.to_owned())?;
                Box::new(TokioIo::new(TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?))
            }
        };
        // The connection ends when its sender is dropped.
        Ok(match self.protocol {
            Protocol::Http => {
                let (sender, connection) = http1::handshake(stream).await?;
                tokio::spawn(connection);
                Sender::Http1(sender)
            }
            Protocol::Grpc => {
                let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .handshake(stream)
                    .await?;
                tokio::spawn(connection);
                Sender::Http2(sender)
            }
        })
    }
}

/// Returns the path at the endpoint to which spans are sent.
fn path(endpoint: &Uri, protocol: Protocol) -> PathAndQuery {
    let base = endpoint.path().trim_end_matches('/');
    let path = match protocol {
        Protocol::Grpc => GRPC.to_owned(),
        // The configured URL is already that of the traces service.
        Protocol::Http if base.ends_with(HTTP) => base.to_owned(),
        Protocol::Http => format!("{base}{HTTP}"),
    };
    path.parse().unwrap_or(PathAndQuery::from_static(HTTP))
}

fn judge(
    protocol: Protocol,
    status: StatusCode,
    headers: &HeaderMap,
    trailers: Option<&HeaderMap>,
    body: Bytes,
) -> Result<Taken, Failure> {
    let message = match protocol {
        Protocol::Http => {
            if !status.is_success() {
                let text = format!("the collector answered {status}");
                // The list of retryable statuses in the specification.
                return Err(match status.as_u16() {
                    429 | 502 | 503 | 504 => Failure::Later(text),
                    _ => Failure::Refused(text),
                });
            }
            body
        }
        Protocol::Grpc => {
            let said =
                trailers.and_then(grpc::Status::from_headers).or_else(|| grpc::Status::from_headers(headers));
            let Some(said) = said else {
                return Err(Failure::Later(format!("the collector answered {status} without a gRPC status")));
            };
            let text = format!("the collector answered {}: {}", said.code(), said.message());
            match said.code() {
                Code::Ok => {}
                Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Aborted
                | Code::OutOfRange
                | Code::Unavailable
                | Code::ResourceExhausted
                | Code::DataLoss => return Err(Failure::Later(text)),
                _ => return Err(Failure::Refused(text)),
            }
            body.slice(body.len().min(grpc::PREFIX_LEN)..)
        }
    };
    // The spans were accepted, whatever the body contains.
    let partial =
        ExportTraceServiceResponse::decode(message).ok().and_then(|response| response.partial_success);
    Ok(partial.map_or_else(Taken::default, |partial| Taken {
        rejected: u64::try_from(partial.rejected_spans).unwrap_or(0),
        why: partial.error_message.chars().take(256).collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_export_path_depends_on_the_protocol() {
        let to = |uri: &str, protocol| path(&uri.parse().unwrap(), protocol).to_string();
        assert_eq!(to("http://c:4318", Protocol::Http), "/v1/traces");
        assert_eq!(to("http://c:4318/otlp/", Protocol::Http), "/otlp/v1/traces");
        assert_eq!(to("http://c:4318/v1/traces", Protocol::Http), "/v1/traces");
        assert_eq!(to("http://c:4317/x", Protocol::Grpc), GRPC);
    }

    #[test]
    fn answers_are_classified_as_temporary_or_permanent() {
        let http = |status: u16| {
            judge(
                Protocol::Http,
                StatusCode::from_u16(status).unwrap(),
                &HeaderMap::new(),
                None,
                Bytes::new(),
            )
        };
        assert_eq!(http(200).unwrap(), Taken::default());
        assert!(matches!(http(503), Err(Failure::Later(_))) && matches!(http(429), Err(Failure::Later(_))));
        assert!(
            matches!(http(400), Err(Failure::Refused(_))) && matches!(http(401), Err(Failure::Refused(_)))
        );
        let grpc = |code: Code| {
            let mut trailers = HeaderMap::new();
            grpc::Status::new(code, "said").write_to(&mut trailers);
            judge(Protocol::Grpc, StatusCode::OK, &HeaderMap::new(), Some(&trailers), Bytes::new())
        };
        assert!(grpc(Code::Ok).is_ok() && matches!(grpc(Code::Unavailable), Err(Failure::Later(_))));
        assert!(matches!(grpc(Code::Unauthenticated), Err(Failure::Refused(_))));
        let partial = ExportTraceServiceResponse {
            partial_success: Some(
                opentelemetry_proto::tonic::collector::trace::v1::ExportTracePartialSuccess {
                    rejected_spans: 3,
                    error_message: "too old".into(),
                },
            ),
        };
        let body = partial.encode_to_vec().into();
        let taken = judge(Protocol::Http, StatusCode::OK, &HeaderMap::new(), None, body).unwrap();
        assert_eq!((taken.rejected, taken.why.as_str()), (3, "too old"));
    }
}
