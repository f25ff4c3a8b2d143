//! Spans of real processes: one trace from the caller through two replicas and agentk to the API server,
//! exported by OTLP over HTTP and gRPC to a collector that decodes the official messages.

use std::{
    collections::BTreeMap, convert::Infallible, net::SocketAddr, os::unix::fs::PermissionsExt as _,
    sync::Arc, time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use grpc::Code;
use h2::Reason;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse},
    common::v1::{KeyValue, any_value},
    trace::v1::{Span, status::StatusCode},
};
use parking_lot::Mutex;
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{self, http_request},
        prototool,
    },
    kas::bench::v1::Payload,
};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    bench::{ECHO, HOLD},
    caller::{Caller, frame},
    kas::{Kas, eventually, token},
    link::Next,
    mesh::{Mesh, Options},
    scenario::Scenario,
};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_rustls::TlsAcceptor;

const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";
const BORROW: &str = "kas.internal.v1.Tunnels/Borrow";
const CREDENTIAL: &str = "Bearer of-the-collector";
/// The start of every JWT of a caller: `{"typ":"JWT","alg":"HS256"}`.
const JWT: &str = "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9";

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A span with the attributes of its process.
#[derive(Clone, Debug)]
struct Received {
    service: String,
    instance: String,
    span: Span,
}

impl Received {
    fn id(&self) -> String {
        hex::encode(&self.span.span_id)
    }

    fn parent(&self) -> String {
        hex::encode(&self.span.parent_span_id)
    }

    fn attribute(&self, key: &str) -> Option<Value> {
        attribute(&self.span.attributes, key)
    }

    fn is_error(&self) -> bool {
        self.span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error)
    }
}

fn attribute(attributes: &[KeyValue], key: &str) -> Option<Value> {
    let value = attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()?;
    Some(match value {
        any_value::Value::StringValue(text) => json!(text),
        any_value::Value::IntValue(number) => json!(number),
        other => json!(format!("{other:?}")),
    })
}

#[derive(Default)]
struct Got {
    spans: Vec<Received>,
    bytes: Vec<u8>,
    headers: Vec<HeaderMap>,
}

/// A collector that stores what it receives.
struct Collector {
    address: SocketAddr,
    got: Arc<Mutex<Got>>,
    _tasks: JoinSet<()>,
}

/// Serves one connection of a collector.
async fn serve<S>(stream: S, got: Arc<Mutex<Got>>, is_grpc: bool)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| take(Arc::clone(&got), request, is_grpc));
    let stream = TokioIo::new(stream);
    if is_grpc {
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _ = server.serve_connection(stream, service).await;
    } else {
        let server = hyper::server::conn::http1::Builder::new();
        let _ = server.serve_connection(stream, service).await;
    }
}

impl Collector {
    async fn start(is_grpc: bool) -> Result<Self> {
        Self::start_with(is_grpc, None).await
    }

    /// Starts one, with TLS if given.
    async fn start_with(is_grpc: bool, tls: Option<TlsAcceptor>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let got = Arc::<Mutex<Got>>::default();
        let mut tasks = JoinSet::new();
        let all = Arc::clone(&got);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (got, tls) = (Arc::clone(&all), tls.clone());
                connections.spawn(async move {
                    match tls {
                        None => serve(stream, got, is_grpc).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(stream, got, is_grpc).await;
                            }
                        }
                    }
                });
            }
        });
        Ok(Self { address, got, _tasks: tasks })
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn got(&self) -> parking_lot::MutexGuard<'_, Got> {
        self.got.lock()
    }

    fn spans(&self, trace: &str) -> Vec<Received> {
        self.got().spans.iter().filter(|got| hex::encode(&got.span.trace_id) == trace).cloned().collect()
    }
}

async fn take(
    got: Arc<Mutex<Got>>,
    request: Request<Incoming>,
    is_grpc: bool,
) -> Result<Response<Body>, Infallible> {
    let (path, content_type) = if is_grpc {
        ("/opentelemetry.proto.collector.trace.v1.TraceService/Export", "application/grpc")
    } else {
        ("/v1/traces", "application/x-protobuf")
    };
    let (head, body) = request.into_parts();
    assert_eq!(
        (head.uri.path(), &head.headers["content-type"]),
        (path, &HeaderValue::from_static(content_type))
    );
    let mut bytes = body.collect().await.expect("it is complete").to_bytes();
    if is_grpc {
        let prefix = bytes.split_to(grpc::PREFIX_LEN);
        assert_eq!(prefix[..], grpc::prefix(u32::try_from(bytes.len()).expect("it is small")));
    }
    let message = ExportTraceServiceRequest::decode(bytes.clone()).expect("an official message");
    let mut got = got.lock();
    got.bytes.extend_from_slice(&bytes);
    got.headers.push(head.headers);
    for resource in message.resource_spans {
        let about = resource.resource.map(|resource| resource.attributes).unwrap_or_default();
        let text =
            |key| attribute(&about, key).and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        let (service, instance) = (text("service.name"), text("service.instance.id"));
        for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            got.spans.push(Received { service: service.clone(), instance: instance.clone(), span });
        }
    }
    let answer = ExportTraceServiceResponse { partial_success: None };
    let mut response = if is_grpc {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let frames = [Ok(Frame::data(grpc::encode(&answer))), Ok(Frame::trailers(trailers))];
        Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync())
    } else {
        Response::new(Full::new(Bytes::from(answer.encode_to_vec())).boxed_unsync())
    };
    response.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
    Ok(response)
}

/// An API server that answers every request and stores its headers.
struct ApiServer {
    address: SocketAddr,
    headers: Arc<Mutex<Vec<HeaderMap>>>,
    _tasks: JoinSet<()>,
}

impl ApiServer {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let headers = Arc::<Mutex<Vec<HeaderMap>>>::default();
        let mut tasks = JoinSet::new();
        let all = Arc::clone(&headers);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let all = Arc::clone(&all);
                let service = service_fn(move |request: Request<Incoming>| {
                    all.lock().push(request.headers().clone());
                    async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"{}")))) }
                });
                connections.spawn(async move {
                    let server = hyper::server::conn::http1::Builder::new();
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Ok(Self { address, headers, _tasks: tasks })
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the headers of the request with this id header.
    fn of(&self, id: &str) -> Option<HeaderMap> {
        let headers = self.headers.lock();
        headers.iter().find(|headers| headers.get("x-test").is_some_and(|value| value == id)).cloned()
    }
}

/// The two messages of a GET with an id header.
fn get(id: &str) -> [Vec<u8>; 2] {
    let request = prototool::HttpRequest {
        method: "GET".into(),
        header: [("X-Test".to_owned(), prototool::Values { value: vec![id.to_owned()] })].into(),
        url_path: "/api/v1/namespaces/very-private-place/pods".into(),
        query: BTreeMap::new(),
    };
    let header = http_request::Header { request: Some(request), ..Default::default() };
    [http_request::Message::Header(header), http_request::Message::Trailer(http_request::Trailer {})]
        .map(|message| grpctool::HttpRequest { message: Some(message) }.encode_to_vec())
}

/// Creates a trace of a caller: its id and that of the caller's span.
fn trace() -> (String, String) {
    (hex::encode(rand::random::<[u8; 16]>()), hex::encode(rand::random::<[u8; 8]>()))
}

async fn make_request(
    caller: &Caller,
    (trace, span): &(String, String),
    id: &str,
    flags: &str,
) -> Result<()> {
    let request = caller
        .to_agent(1, MAKE_REQUEST)
        .header("traceparent", format!("00-{trace}-{span}-{flags}"))
        .header("tracestate", "vendor=opaque")
        .header("x-gitlab-correlation-id", id);
    let messages = get(id);
    let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    let got = caller.call(request, &messages).await?;
    ensure!(got.status.code() == Code::Ok, "{}", got.status);
    ensure!(got.headers.get("x-gitlab-correlation-id").is_some_and(|value| value == id));
    Ok(())
}

fn tracing(collector: &Collector) -> Value {
    json!({ "observability": { "tracing": { "otlp_endpoint": collector.url() } } })
}

/// Waits for this many spans of a trace.
async fn spans(collectors: &[&Collector], trace: &str, count: usize) -> Result<Vec<Received>> {
    eventually(&format!("{count} spans"), async || {
        let found: Vec<_> = collectors.iter().flat_map(|collector| collector.spans(trace)).collect();
        Ok(if found.len() >= count { Ok(found) } else { Err(found.len()) })
    })
    .await
}

fn one<'a>(spans: &'a [Received], service: &str, name: &str) -> &'a Received {
    let found: Vec<_> = spans.iter().filter(|got| got.service == service && got.span.name == name).collect();
    assert_eq!(found.len(), 1, "{service} {name}: {spans:#?}");
    found[0]
}

#[tokio::test]
async fn one_trace_spans_the_caller_both_replicas_agentk_and_the_api_server() -> Result<()> {
    let (over_http, over_grpc) = (Collector::start(false).await?, Collector::start(true).await?);
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("headers");
    std::fs::write(&file, format!("authorization: {CREDENTIAL}\n"))?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
    let mut config = tracing(&over_http);
    config["observability"]["tracing"]["otlp_headers_file"] = json!(file);
    let mesh = Mesh::start_with(Options { replicas: 2, config, ..Options::default() }).await?;
    let api = ApiServer::start().await?;
    let endpoint = over_grpc.url();
    let arguments = ["--replicas", "1", "--otlp-endpoint", &endpoint, "--otlp-protocol", "grpc"];
    let agentk = Agentk::start_with_arguments(mesh.agents(1), &token(1), &api.url(), &arguments).await?;
    agentk.connected().await?;
    mesh.converged(&[(1, 1)]).await?;
    let caller = mesh.caller(0).await?;

    // Several sequential requests: the tunnel stays leased, and they share one stream between the replicas.
    let mut sent = Vec::new();
    for n in 0..12 {
        let (id, context) = (format!("request-{n}"), trace());
        make_request(&caller, &context, &id, "01").await?;
        sent.push((id, context));
    }
    assert!(mesh.kas(0).metric("kas_borrows_reused_total").await? >= 1.0, "the tunnel stayed leased");
    for (id, (trace, from)) in &sent {
        let all = spans(&[&over_http, &over_grpc], trace, 4).await?;
        assert_eq!(all.len(), 4, "{all:#?}");
        let method = MAKE_REQUEST.trim_start_matches('/');
        let routing = one(&all, "gitlab-kas", method);
        let gateway = one(&all, "gitlab-kas", BORROW);
        let served = one(&all, "gitlab-agent", method);
        let called = one(&all, "gitlab-agent", "GET");

        assert_eq!(&routing.parent(), from);
        // The owner forwards what the routing replica wrote: both have the same parent span.
        assert_eq!((gateway.parent(), served.parent()), (routing.id(), routing.id()));
        assert_eq!(called.parent(), served.id());
        let headers = api.of(id).context("the API server was asked")?;
        assert_eq!(headers["traceparent"], format!("00-{trace}-{}-01", called.id()));
        assert_eq!(headers["tracestate"], "vendor=opaque");

        let (first, second) = (mesh.private(0).to_string(), mesh.private(1).to_string());
        assert_eq!((&routing.instance, &gateway.instance), (&first, &second));
        for (span, key, value) in [
            (routing, "kas.route", json!("peer")),
            (routing, "kas.route.replica", json!(second)),
            (routing, "kas.agent.id", json!(1)),
            (routing, "rpc.method", json!("MakeRequest")),
            (routing, "rpc.grpc.status_code", json!(0)),
            (gateway, "kas.agent.id", json!(1)),
            (gateway, "kas.from.replica", json!(first)),
            (gateway, "rpc.grpc.status_code", json!(0)),
            (served, "rpc.grpc.status_code", json!(0)),
            (called, "http.request.method", json!("GET")),
            (called, "http.response.status_code", json!(200)),
        ] {
            assert_eq!(span.attribute(key), Some(value), "{key} of {span:?}");
        }
        for span in [routing, gateway, served] {
            assert_eq!(span.attribute("gitlab.correlation_id"), Some(json!(id)), "{span:?}");
        }
        for span in &all {
            assert!(!span.is_error(), "{span:?}");
            assert!(span.span.end_time_unix_nano > span.span.start_time_unix_nano, "{span:?}");
        }
    }

    // One that is served by the owner itself.
    let context = trace();
    make_request(&mesh.caller(1).await?, &context, "local", "01").await?;
    let all = spans(&[&over_http, &over_grpc], &context.0, 3).await?;
    let routing = one(&all, "gitlab-kas", MAKE_REQUEST.trim_start_matches('/'));
    assert_eq!((routing.attribute("kas.route"), all.len()), (Some(json!("local")), 3));

    // The collector receives its credential and no other secret.
    assert!(over_http.got().headers.iter().all(|headers| headers["authorization"] == CREDENTIAL));
    for collector in [&over_http, &over_grpc] {
        let bytes = String::from_utf8_lossy(&collector.got().bytes).into_owned();
        for secret in ["Bearer", &token(1), "very-private-place", JWT] {
            assert!(!bytes.contains(secret), "{secret} was exported");
        }
    }
    assert!(mesh.kas(0).metric("kas_spans_exported_total").await? >= 7.0);
    Ok(())
}

#[tokio::test]
async fn errors_and_cancellations_are_in_spans_and_unsampled_traces_have_none() -> Result<()> {
    let collector = Collector::start(false).await?;
    let kas = Kas::start_with_config(tracing(&collector)).await?;
    let api = ApiServer::start().await?;
    let endpoint = collector.url();
    let agentk =
        Agentk::start_with_arguments(kas.agent, &token(1), &api.url(), &["--otlp-endpoint", &endpoint])
            .await?;
    agentk.connected().await?;
    let caller = kas.caller().await?;

    // A trace that is not sampled: its context is forwarded, and nothing is exported.
    let unsampled = trace();
    make_request(&caller, &unsampled, "unsampled", "00").await?;
    let headers = api.of("unsampled").context("the API server was asked")?;
    let parent = headers["traceparent"].to_str()?;
    assert!(parent.starts_with(&format!("00-{}-", unsampled.0)) && parent.ends_with("-00"), "{parent}");

    // A method that the agent does not serve.
    let (id, from) = trace();
    let request = caller.to_agent(1, "/no.Such/Method").header("traceparent", format!("00-{id}-{from}-01"));
    ensure!(caller.call(request, &[b""]).await?.status.code() == Code::Unimplemented);
    let all = spans(&[&collector], &id, 1).await?;
    let failed = one(&all, "gitlab-kas", "no.Such/Method");
    assert!(failed.is_error());
    assert_eq!(failed.attribute("rpc.grpc.status_code"), Some(json!(12)));

    // A cancelled call.
    let (id, from) = trace();
    let mut stream =
        caller.open(caller.to_agent(1, HOLD).header("traceparent", format!("00-{id}-{from}-01"))).await?;
    stream.send(frame(b"")).await.ok().context("sent")?;
    ensure!(matches!(stream.next().await, Next::Message(_)));
    stream.reset(Reason::CANCEL);
    let all = spans(&[&collector], &id, 2).await?;
    let left = one(&all, "gitlab-kas", HOLD.trim_start_matches('/'));
    assert_eq!(left.attribute("kas.outcome"), Some(json!("cancelled")));
    assert_eq!(one(&all, "gitlab-agent", HOLD.trim_start_matches('/')).parent(), left.id());

    // Without a context, a trace begins here. A refused request has no span.
    ensure!(
        caller.call(caller.to_agent(1, ECHO), &[&Payload::default().encode_to_vec()]).await?.status.code()
            == Code::Ok
    );
    let stranger = Caller::connect(kas.api, Some("x.y.z".into())).await?;
    ensure!(stranger.call(stranger.to_agent(1, ECHO), &[b""]).await?.status.code() == Code::Unauthenticated);
    let root = eventually("a trace that began in kas", async || {
        let got = collector.got();
        let found =
            got.spans.iter().find(|got| got.service == "gitlab-kas" && got.span.name == ECHO[1..]).cloned();
        Ok(found.ok_or(got.spans.len()))
    })
    .await?;
    assert_eq!(root.parent(), "");
    assert!(collector.spans(&unsampled.0).is_empty());
    assert!(kas.leave(Duration::from_secs(10)).await?.success());
    let echoes = collector
        .got()
        .spans
        .iter()
        .filter(|got| got.service == "gitlab-kas" && got.span.name == ECHO[1..])
        .count();
    assert_eq!(echoes, 1, "the refused one has none");
    Ok(())
}

#[tokio::test]
async fn without_a_collector_the_trace_context_is_forwarded_unchanged() -> Result<()> {
    let kas = Kas::start().await?;
    let api = ApiServer::start().await?;
    let agentk = Agentk::start_with(kas.agent, &token(1), &api.url()).await?;
    agentk.connected().await?;
    let (id, from) = trace();
    make_request(&kas.caller().await?, &(id.clone(), from.clone()), "passed", "01").await?;
    let headers = api.of("passed").context("the API server was asked")?;
    assert_eq!(headers["traceparent"], format!("00-{id}-{from}-01"));
    assert_eq!(headers["tracestate"], "vendor=opaque");
    Ok(())
}

#[tokio::test]
async fn a_tls_collector_is_trusted_only_by_its_ca() -> Result<()> {
    net::tls::install();
    let dir = tempfile::tempdir()?;
    let (certificate, key) = (dir.path().join("cert"), dir.path().join("key"));
    let pair = rcgen::KeyPair::generate()?;
    let signed = rcgen::CertificateParams::new(vec!["localhost".to_owned()])?.self_signed(&pair)?;
    std::fs::write(&certificate, signed.pem())?;
    std::fs::write(&key, pair.serialize_pem())?;
    for protocol in ["grpc", "http/protobuf"] {
        let server = net::tls::server(&certificate, &key)?;
        let server = if protocol == "grpc" { server } else { net::tls::or_http1(&server) };
        let collector = Collector::start_with(protocol == "grpc", Some(server.into())).await?;
        let mut config = json!({ "observability": { "tracing": {
            "otlp_endpoint": format!("https://localhost:{}", collector.address.port()),
            "otlp_protocol": protocol,
            "otlp_ca_certificate_file": &certificate,
        } } });
        let Scenario { kas, caller, .. } = Scenario::start_with_config(config.clone()).await?;
        caller.call(caller.to_agent(1, ECHO).header("grpc-timeout", "10m"), &[b""]).await?;
        kas.metric_is("kas_spans_exported_total", 1.0).await?;
        assert_eq!(collector.got().spans.len(), 1, "{protocol}");
        // Without its CA it is not trusted.
        config["observability"]["tracing"]["otlp_ca_certificate_file"] = json!("");
        let Scenario { kas, caller, .. } = Scenario::start_with_config(config).await?;
        caller.call(caller.to_agent(1, ECHO).header("grpc-timeout", "10m"), &[b""]).await?;
        kas.metric_is("kas_spans_lost_total{reason=\"Failed\"}", 1.0).await?;
        assert_eq!(collector.got().spans.len(), 1, "{protocol}");
    }
    Ok(())
}

#[tokio::test]
async fn pending_spans_are_exported_at_shutdown() -> Result<()> {
    let collector = Collector::start(false).await?;
    let Scenario { kas, caller, agent: _agentk } =
        Scenario::start_with_config(tracing(&collector)).await?.agentk().await?;
    for _ in 0..100 {
        caller.call(caller.to_agent(1, ECHO), &[&Payload::default().encode_to_vec()]).await?;
    }
    assert!(kas.leave(Duration::from_secs(10)).await?.success());
    assert_eq!(collector.got().spans.len(), 100);
    Ok(())
}

#[tokio::test]
async fn a_hanging_collector_stops_no_request_and_lost_spans_are_counted() -> Result<()> {
    // It accepts connections and never responds.
    let silent = TcpListener::bind("127.0.0.1:0").await?;
    let config = json!({ "observability": { "tracing": {
        "otlp_endpoint": format!("http://{}", silent.local_addr()?),
        "queue": 20,
    } } });
    let Scenario { kas, caller, agent: _agentk } =
        Scenario::start_with_config(config).await?.agentk().await?;
    for _ in 0..600 {
        let got = caller.call(caller.to_agent(1, ECHO), &[&Payload::default().encode_to_vec()]).await?;
        ensure!(got.status.code() == Code::Ok, "{}", got.status);
    }
    let lost = |reason: &str| format!("kas_spans_lost_total{{reason=\"{reason}\"}}");
    testkit::kas::metric_is_at_least(kas.observability, &lost("QueueFull"), 1.0).await?;
    let begun = tokio::time::Instant::now();
    assert!(kas.leave(Duration::from_secs(10)).await?.success());
    println!("left after {:?}", begun.elapsed());
    assert!(kas.process.log().contains("spans were not exported in time and are lost"));
    Ok(())
}

#[tokio::test]
async fn an_unreachable_collector_is_logged_and_counted() -> Result<()> {
    let config = json!({ "observability": { "tracing": { "otlp_endpoint": "http://127.0.0.1:1" } } });
    let Scenario { kas, caller, .. } = Scenario::start_with_config(config).await?;
    caller.call(caller.to_agent(1, ECHO).header("grpc-timeout", "10m"), &[b""]).await?;
    kas.metric_is("kas_spans_lost_total{reason=\"Failed\"}", 1.0).await?;
    kas.process
        .logged("that spans are lost", |line| {
            (line["message"] == "spans cannot be exported and are lost").then_some(())
        })
        .await
}
