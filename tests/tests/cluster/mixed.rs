//! Replicas of this project and of GitLab's kas 14.1 that share a real Redis, as during a migration. The
//! latter are simulated: see [`Replica14`].

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use grpc::{Code, Outcome};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest, common::v1::any_value::Value as Attribute,
    trace::v1::Span,
};
use parking_lot::Mutex;
use prost::Message as _;
use proto::{
    gitlab::agent::kas::gateway_kas_response::Msg,
    kas::api::v1::{
        ExplainAgentRequest, ExplainAgentResponse, WatchConnectedAgentsRequest, WatchConnectedAgentsResponse,
        watch_connected_agents_response::Event,
    },
};
use serde_json::{Value, json};
use testkit::{
    caller::{Caller, answer, frame},
    handler::path,
    kas::within,
    link::Next,
    mesh::{Mesh, Options},
    process::{SOON, soon},
    raw_agent::Kind,
    redis::Redis,
};
use tokio::{net::TcpListener, task::JoinSet, time::Instant};

use crate::{
    mtls::{Authority, ROLE},
    needs::{Needs, make_request},
    replica14::Replica14,
};

/// Secrets of callers, which must reach no other party.
const SECRET: &str = "callers-own-secret";

async fn start(redis: &Redis, replicas: usize) -> Result<Mesh> {
    let config = json!({
        "tracker": "redis",
        "redis": { "server": { "address": redis.address().to_string() } },
        "table": { "ttl": "2s" },
    });
    let discovery = Some(Value::Null);
    Mesh::start_with(Options { replicas, config, discovery, ..Options::default() }).await
}

/// Returns how many borrow requests replica 0 has counted.
async fn asks(mesh: &Mesh, side: &str, answer: &str) -> Result<f64> {
    let name = format!("kas_gitlab_peer_asks_total{{side=\"{side}\",answer=\"{answer}\"}}");
    mesh.kas(0).metric(&name).await
}

/// Waits until replica 0 has announced `agent` so that 14.1 can read it.
async fn announced(theirs: &Replica14, agent: i64) -> Result<()> {
    within(SOON, "the agent's entry is in Redis", async || {
        let found = theirs.urls(agent).await?;
        Ok(if found.is_empty() { Err(found) } else { Ok(()) })
    })
    .await
}

#[tokio::test]
async fn a_request_at_14_1_reaches_agents_of_every_kind_at_our_replica() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    for (agent, kind) in [(1, Kind::Ours), (2, Kind::Old), (3, Kind::Recent)] {
        let connected = mesh.agent(0, agent, kind, 2).await?;
        announced(&theirs, agent).await?;
        let headers = [("app", "1"), ("app", "2"), ("x-gitlab-correlation-id", "from-14-1")];
        let got = theirs.call(agent, &path("Echo"), &headers, &[b"one", b"", b"two"]).await?;
        ensure!(got.messages == ["one", "", "two"], "{kind:?}: {got:?}");
        ensure!(got.header["echo"].value == ["yes"] && got.trailer["echo"].value == ["yes"], "{got:?}");
        ensure!(got.error.is_none() && got.status.as_ref().is_some_and(|s| s.code() == Code::Ok), "{got:?}");
        // The agent receives the metadata of the caller, and none of that between replicas.
        let requests = connected.raw.requests().list();
        let meta = &requests[0].meta;
        ensure!(meta["app"].value == ["1", "2"], "{meta:?}");
        ensure!(meta["x-gitlab-correlation-id"].value == ["from-14-1"], "{meta:?}");
        ensure!(!connected.raw.record().contains("Bearer ey"), "the token between replicas reached an agent");
        ensure!(meta.keys().all(|key| !key.starts_with("kas-hop-") && key != "authorization"), "{meta:?}");
        // One error of each kind, in the order of 14.1, which the simulation checks.
        for (method, messages) in [("FailFirst", 0), ("FailLater", 2)] {
            let got = theirs.call(agent, &path(method), &[], &[b"x"]).await?;
            let error = got.error.context("an error")?;
            ensure!((error.code, got.messages.len()) == (5, messages), "{kind:?} {method}: {error:?}");
            ensure!(error.message == "nothing here: 100 % ünknown\n", "{error:?}");
            ensure!(got.status.is_some_and(|status| status.code() == Code::Ok));
        }
    }
    ensure!(asks(&mesh, "Answered", "Ready").await? == 9.0);
    Ok(())
}

#[tokio::test]
async fn a_stream_from_14_1_flows_both_ways_and_its_cancel_reaches_the_agent() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    let _agent = mesh.agent(0, 1, Kind::Ours, 1).await?;
    announced(&theirs, 1).await?;
    let mut chat = theirs.route(1, &path("Chat"), &[]).await?;
    chat.start().await?;
    ensure!(matches!(soon("a header", chat.next()).await?, Ok(Msg::Header(_))));
    let large = vec![7; 1 << 20];
    for message in [&b"a"[..], &large, b"b"] {
        chat.send(message).await?;
        let Ok(Msg::Message(got)) = soon("an answer", chat.next()).await? else { bail!("no message") };
        ensure!(got.data == message);
    }
    mesh.kas(0).metric_is("kas_requests_open", 1.0).await?;
    drop(chat);
    mesh.kas(0).metric_is("kas_requests_open", 0.0).await?;
    // The only tunnel is free again.
    let got = soon("the next answer", theirs.call(1, &path("Echo"), &[], &[b"x"])).await?;
    ensure!(got.messages == ["x"], "{got:?}");
    // A client that no longer needs the tunnel half-closes or resets the stream.
    for by_reset in [false, true] {
        let mut unused = theirs.route(1, &path("Echo"), &[]).await?;
        if !by_reset {
            unused.half_close();
            let ended = soon("the end", unused.stream().next_unbounded()).await;
            ensure!(matches!(&ended, Next::Trailers(t) if t["grpc-status"] == "0"), "{ended:?}");
        }
        drop(unused);
        let got = soon("the next answer", theirs.call(1, &path("Echo"), &[], &[b"x"])).await?;
        ensure!(got.messages == ["x"], "{got:?}");
    }
    Ok(())
}

#[tokio::test]
async fn unsuccessful_requests_of_14_1_get_the_responses_that_it_expects() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    let url = format!("grpc://{}", mesh.private(0));
    // Not here: the stream ends with OK at once, and 14.1 tries its next record.
    let begun = Instant::now();
    ensure!(theirs.ask(&url, 4, &path("Echo"), &[]).await?.is_none());
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // Busy: it ends after 3 s.
    let _agent = mesh.agent(0, 1, Kind::Old, 1).await?;
    announced(&theirs, 1).await?;
    let mut hangs = theirs.route(1, &path("Hang"), &[]).await?;
    hangs.start().await?;
    ensure!(theirs.ask(&url, 1, &path("Echo"), &[]).await?.is_none());
    let refused = theirs.ask(&url, 1, &path("Echo"), &[("grpc-timeout", "50m")]).await;
    ensure!(refused.as_ref().is_err_and(|e| e.to_string().contains("deadline")), "{:?}", refused.err());
    drop(hangs);
    // Another secret is refused.
    let other_secret = Replica14::start(&redis, b"another secret of thirty-two byte").await?;
    let refused = other_secret.ask(&url, 1, &path("Echo"), &[]).await;
    ensure!(
        refused.as_ref().is_err_and(|e| e.to_string().contains("JWT validation failed")),
        "{:?}",
        refused.err()
    );
    ensure!(asks(&mesh, "Answered", "NotHere").await? == 1.0);
    Ok(())
}

async fn echo(caller: &Caller, agent: i64) -> Result<()> {
    let request = caller
        .to_agent(agent, &path("Echo"))
        .header("cookie", SECRET)
        .header("proxy-authorization", SECRET)
        .header("app", "1")
        .header("grpc-timeout", "15S");
    let got = caller.call(request, &[b"one", b"", b"two"]).await?;
    ensure!(got.status.code() == Code::Ok && got.messages == ["one", "", "two"], "{got:?}");
    ensure!(got.headers["echo"] == "yes" && got.trailers["echo"] == "yes", "{got:?}");
    Ok(())
}

#[tokio::test]
async fn a_request_at_our_replica_reaches_an_agent_at_14_1_without_credentials() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 2).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    theirs.agent(1, 2).await?;
    let caller = mesh.caller(0).await?;
    // More requests than tunnels: each tunnel is reopened.
    for _ in 0..5 {
        echo(&caller, 1).await?;
    }
    let told = caller.call(
        caller
            .to_agent(1, &path("Echo"))
            .header("app", "1")
            .header("grpc-timeout", "15S")
            .header("kas-explain", "1"),
        &[b"x"],
    );
    let told = format!("{:?}", told.await?.headers);
    ensure!(told.contains(&format!("a tunnel of replica {}", theirs.url)), "{told}");
    for headers in theirs.seen.headers() {
        ensure!(!format!("{headers:?}").contains(SECRET), "{headers:?}");
        ensure!(!headers.contains_key("kas-agent-id") && headers["app"] == "1", "{headers:?}");
        ensure!(headers.contains_key("grpc-timeout"), "{headers:?}");
        // The token has the format of 14.1, which the simulation checked.
        let token = headers["authorization"].to_str()?.split('.').nth(1).context("a JWT")?.to_owned();
        let claims: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(token)?)?;
        ensure!(claims["iss"] == "gitlab-kas" && claims["aud"] == json!(["gitlab-kas"]), "{claims}");
        let life = claims["exp"].as_f64().context("exp")? - claims["iat"].as_f64().context("iat")?;
        ensure!((life - 5.0).abs() < 0.01 && claims.get("sub").is_none(), "{claims}");
    }
    for (method, messages) in [("FailFirst", 0), ("FailLater", 2)] {
        let got = caller.call(caller.to_agent(1, &path(method)), &[b"x"]).await?;
        ensure!(got.status.code() == Code::NotFound && got.messages.len() == messages, "{method}: {got:?}");
        ensure!(got.status.outcome().is_none(), "an agent cannot speak in kas' name: {got:?}");
    }
    // A response that is complete before the request: 14.1 delays its end until the request ends.
    let mut stream = caller.open(caller.to_agent(1, &path("Count"))).await?;
    stream.send(frame(b"2")).await.map_err(|reason| anyhow::anyhow!("{reason:?}"))?;
    let got = soon("the answer", answer(&mut stream)).await?;
    ensure!(got.status.code() == Code::Ok && got.messages == ["0", "1"], "{got:?}");
    ensure!(asks(&mesh, "Asked", "Ready").await? >= 8.0);
    Ok(())
}

#[tokio::test]
async fn cancellation_and_deadline_at_our_replica_reach_14_1() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    theirs.agent(1, 1).await?;
    let caller = mesh.caller(0).await?;
    let got =
        caller.call(caller.to_agent(1, &path("HangLater")).header("grpc-timeout", "700m"), &[b"x"]).await?;
    ensure!(got.status.code() == Code::DeadlineExceeded, "{got:?}");
    ensure!(got.status.outcome() == Some(Outcome::Unknown) && got.messages == ["first"], "{got:?}");
    let cancelled = |count: usize| {
        let seen = &theirs.seen;
        within(SOON, "the request was cancelled", async move || {
            let now = seen.cancelled.load(Ordering::SeqCst);
            Ok(if now >= count { Ok(()) } else { Err(now) })
        })
    };
    cancelled(1).await?;
    // Its only tunnel is idle again.
    echo(&caller, 1).await?;
    let mut stream = caller.open(caller.to_agent(1, &path("HangLater"))).await?;
    ensure!(matches!(soon("a message", stream.next_unbounded()).await, Next::Message(_)));
    drop(stream);
    cancelled(2).await?;
    echo(&caller, 1).await
}

#[tokio::test]
async fn a_request_waits_for_an_agent_that_connects_to_14_1() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    // This replica has seen that there are 14.1 replicas.
    theirs.agent(2, 1).await?;
    let caller = mesh.caller(0).await?;
    echo(&caller, 2).await?;
    let waiting = {
        let caller = caller.clone();
        tokio::spawn(async move { echo(&caller, 1).await })
    };
    mesh.kas(0).metric_is("kas_requests_waiting", 1.0).await?;
    let begun = Instant::now();
    theirs.agent(1, 1).await?;
    soon("the answer", waiting).await??;
    println!("a request that waited was served {:?} after the agent came to 14.1", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    Ok(())
}

/// Returns the list of all agents as `kasctl agents` requests it: each agent, and whether it is unconfirmed.
async fn all_agents(mesh: &Mesh) -> Result<Vec<(i64, bool)>> {
    let caller = mesh.caller(0).await?;
    let mut stream = caller.open(caller.request("/kas.api.v1.KasApi/WatchConnectedAgents")).await?;
    let request = WatchConnectedAgentsRequest::default().encode_to_vec();
    stream.send(frame(&request)).await.map_err(|reason| anyhow::anyhow!("{reason:?}"))?;
    stream.half_close().map_err(|reason| anyhow::anyhow!("{reason:?}"))?;
    let mut all = Vec::new();
    loop {
        let Next::Message(message) = soon("an event", stream.next_unbounded()).await else {
            bail!("no event");
        };
        match WatchConnectedAgentsResponse::decode(message)?.event.context("an event")? {
            Event::Connected(agent) => all.push((agent.id, agent.unconfirmed)),
            Event::Disconnected(gone) => bail!("{gone:?}"),
            Event::SnapshotComplete(complete) => {
                ensure!(complete.unanswered.is_empty(), "{complete:?}");
                all.sort_unstable();
                return Ok(all);
            }
        }
    }
}

#[tokio::test]
async fn lists_show_the_agents_of_both() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    theirs.agent(1, 1).await?;
    let listed = mesh.connections(0, 1).await?;
    ensure!(listed.unanswered.is_empty() && listed.agents.len() == 1, "{listed:?}");
    let ours = mesh.agent(0, 2, Kind::Ours, 1).await?;
    let _connection = ours.raw.configuration("abc").await?;
    within(SOON, "14.1 sees the agent of ours", async || {
        let found = theirs.connected(2).await?;
        let seen = found.len() == 1 && found[0].agent_id == 2 && found[0].agent_meta.is_some();
        Ok(if seen { Ok(()) } else { Err(found) })
    })
    .await?;
    ensure!(all_agents(&mesh).await? == [(1, true), (2, false)]);
    // The agent of a killed 14.1 replica connects here. The old row is still listed, and can be told apart.
    drop(theirs);
    let moved = mesh.agent(0, 1, Kind::Old, 1).await?;
    let _connection = moved.raw.configuration("abc").await?;
    let all = all_agents(&mesh).await?;
    ensure!(all == [(1, false), (1, true), (2, false)], "{all:?}");
    Ok(())
}

/// 14.1 does not tell what its agentk supports.
#[tokio::test]
async fn a_replica_of_14_1_is_not_asked_for_a_request_with_needs() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 1).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    theirs.agent(1, 1).await?;
    let caller = mesh.caller(0).await?;
    for needs in [Needs::Impersonation, Needs::Target] {
        let status = make_request(&caller, needs).await?.status;
        ensure!(status.code() == Code::FailedPrecondition, "{status}");
        ensure!(status.outcome() == Some(Outcome::NotStarted), "{status}");
        ensure!(status.message().contains("a replica of GitLab's kas, which does not tell"), "{status}");
    }
    ensure!(theirs.seen.headers().is_empty(), "it was asked");
    Ok(())
}

#[tokio::test]
async fn an_explanation_says_that_a_replica_of_14_1_is_asked_and_cannot_report() -> Result<()> {
    // No replica has looked it up before, so what they know of it is current.
    const AGENT: i64 = 9;
    let redis = Redis::run().await?;
    let mesh = start(&redis, 2).await?;
    mesh.converged(&[]).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    theirs.agent(AGENT, 1).await?;
    for replica in 0..2 {
        let request = ExplainAgentRequest { agent_id: AGENT };
        let answer: ExplainAgentResponse =
            mesh.caller(replica).await?.unary("/kas.api.v1.KasApi/ExplainAgent", &request).await?;
        ensure!(answer.unanswered.is_empty() && answer.replicas.len() == 2, "{answer:?}");
        for speaker in &answer.replicas {
            let of = |name: &str| speaker.beliefs.iter().find(|belief| belief.name == name);
            let belief = of(&theirs.url).with_context(|| format!("{speaker:?}"))?;
            ensure!(belief.holds && belief.gitlab, "{belief:?}");
            ensure!(speaker.beliefs.iter().filter(|belief| belief.gitlab).count() == 1, "{speaker:?}");
        }
        let step = format!("and replica {} (of GitLab's kas) is asked", theirs.url);
        ensure!(answer.route.contains(&step), "{:?}", answer.route);
    }
    ensure!(theirs.seen.headers().is_empty(), "it was called, and knows no call that could explain");
    Ok(())
}

#[tokio::test]
async fn a_killed_replica_of_either_kind_fails_only_started_requests() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 2).await?;
    let (first, second) = (
        Replica14::start(&redis, mesh.private_secret()).await?,
        Replica14::start(&redis, mesh.private_secret()).await?,
    );
    first.agent(1, 2).await?;
    let caller = mesh.caller(0).await?;
    let mut open = caller.open(caller.to_agent(1, &path("HangLater"))).await?;
    ensure!(matches!(soon("a message", open.next_unbounded()).await, Next::Message(_)));
    second.agent(1, 2).await?;
    drop(first);
    // Requests that were started at the killed replica have an unknown outcome.
    let Next::Trailers(trailers) = soon("the end", open.next_unbounded()).await else { bail!("no trailers") };
    let status = grpc::Status::from_headers(&trailers).context("a status")?;
    ensure!(status.code() == Code::Unavailable && status.outcome() == Some(Outcome::Unknown), "{status}");
    // Its entries stay for five more minutes; the other replica serves.
    for _ in 0..5 {
        echo(&caller, 1).await?;
    }
    // One of our replicas is killed: 14.1 uses the other one, despite the entry of the killed one.
    let _agents = [mesh.agent(0, 2, Kind::Ours, 1).await?, mesh.agent(1, 2, Kind::Ours, 1).await?];
    within(SOON, "both replicas have announced the agent", async || {
        let found = second.urls(2).await?;
        Ok(if found.len() == 2 { Ok(()) } else { Err(found) })
    })
    .await?;
    mesh.kill(0).await?;
    for _ in 0..3 {
        let got = soon("an answer", second.call(2, &path("Echo"), &[], &[b"x"])).await?;
        ensure!(got.messages == ["x"], "{got:?}");
    }
    Ok(())
}

/// A collector of spans, over HTTP.
struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    _connections: JoinSet<()>,
}

impl Collector {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let spans = Arc::<Mutex<Vec<Span>>>::default();
        let (kept, mut connections) = (Arc::clone(&spans), JoinSet::new());
        connections.spawn(async move {
            let mut served = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let kept = Arc::clone(&kept);
                let service = service_fn(move |request: Request<Incoming>| {
                    let kept = Arc::clone(&kept);
                    async move {
                        // An aborted export is sent again.
                        if let Ok(body) = request.into_body().collect().await
                            && let Ok(export) = ExportTraceServiceRequest::decode(body.to_bytes())
                        {
                            let scopes =
                                export.resource_spans.into_iter().flat_map(|spans| spans.scope_spans);
                            let mut kept = kept.lock();
                            kept.extend(scopes.flat_map(|scope| scope.spans));
                        }
                        Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
                    }
                });
                served.spawn(async move {
                    let server = hyper::server::conn::http1::Builder::new();
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Ok(Self { address, spans, _connections: connections })
    }

    /// Waits for the one span of a trace.
    async fn span(&self, trace: &str) -> Result<Span> {
        within(SOON, "a span", async || {
            let spans = self.spans.lock().clone();
            let found: Vec<Span> =
                spans.into_iter().filter(|span| hex::encode(&span.trace_id) == trace).collect();
            Ok(match <[Span; 1]>::try_from(found) {
                Ok([span]) => Ok(span),
                Err(others) => Err(others),
            })
        })
        .await
    }
}

fn says(span: &Span, key: &str, text: &str) -> bool {
    let value = |value: Option<&Attribute>| matches!(value, Some(Attribute::StringValue(v)) if v == text);
    span.attributes
        .iter()
        .any(|a| a.key == key && value(a.value.as_ref().and_then(|value| value.value.as_ref())))
}

#[tokio::test]
async fn trace_and_correlation_id_cross_between_the_kinds_in_both_directions() -> Result<()> {
    const CALLER: &str = "00f067aa0ba902b7";
    let redis = Redis::run().await?;
    let collector = Collector::start().await?;
    let config = json!({
        "tracker": "redis",
        "redis": { "server": { "address": redis.address().to_string() } },
        "table": { "ttl": "2s" },
        "observability": { "tracing": { "otlp_endpoint": format!("http://{}", collector.address) } },
    });
    let options = Options { replicas: 1, config, discovery: Some(Value::Null), ..Options::default() };
    let mesh = Mesh::start_with(options).await?;
    let theirs = Replica14::start(&redis, mesh.private_secret()).await?;
    theirs.agent(1, 1).await?;
    let ours = mesh.agent(0, 2, Kind::Ours, 1).await?;
    announced(&theirs, 2).await?;

    // From ours to theirs: they and their agent receive the context of the span here.
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let caller = mesh.caller(0).await?;
    let request = caller
        .to_agent(1, &path("Echo"))
        .header("traceparent", format!("00-{trace}-{CALLER}-01"))
        .header("tracestate", "vendor=opaque")
        .header("x-gitlab-correlation-id", "to-14-1");
    let got = caller.call(request, &[b"x"]).await?;
    ensure!(got.status.code() == Code::Ok, "{}", got.status);
    let span = collector.span(trace).await?;
    ensure!(hex::encode(&span.parent_span_id) == CALLER, "{span:?}");
    ensure!(says(&span, "gitlab.correlation_id", "to-14-1"), "{span:?}");
    ensure!(says(&span, "kas.route", "peer") && says(&span, "kas.route.replica", &theirs.url), "{span:?}");
    let context = format!("00-{trace}-{}-01", hex::encode(&span.span_id));
    let headers = theirs.seen.headers();
    let told = headers.first().context("it was asked")?;
    ensure!(told["traceparent"] == context.as_str() && told["tracestate"] == "vendor=opaque", "{told:?}");
    ensure!(told["x-gitlab-correlation-id"] == "to-14-1", "{told:?}");
    let requests = theirs.seen.requests.list();
    let meta = &requests[0].meta;
    ensure!(meta["traceparent"].value == [context], "{meta:?}");
    ensure!(meta["x-gitlab-correlation-id"].value == ["to-14-1"], "{meta:?}");

    // From theirs to ours: the span here belongs to the incoming trace.
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let context = format!("00-{trace}-{CALLER}-01");
    let headers = [
        ("traceparent", context.as_str()),
        ("x-gitlab-correlation-id", "from-14-1"),
        ("x-gitlab-client-name", "gitlab-kas"),
    ];
    let got = theirs.call(2, &path("Echo"), &headers, &[b"x"]).await?;
    ensure!(got.messages == ["x"], "{got:?}");
    let span = collector.span(trace).await?;
    ensure!(hex::encode(&span.parent_span_id) == CALLER, "{span:?}");
    ensure!(says(&span, "gitlab.correlation_id", "from-14-1"), "{span:?}");
    ensure!(says(&span, "kas.from.replica", "gitlab-kas at 127.0.0.1"), "{span:?}");
    let requests = ours.raw.requests().list();
    let meta = &requests[0].meta;
    ensure!(meta["traceparent"].value == [context.as_str()], "{meta:?}");
    ensure!(meta["x-gitlab-correlation-id"].value == ["from-14-1"], "{meta:?}");
    Ok(())
}

/// 14.1 dials in plain text only, but may listen with a certificate. Then our replicas with certificates use
/// it, and no other 14.1 replica.
#[tokio::test]
async fn with_certificates_only_14_1_replicas_with_the_role_are_used() -> Result<()> {
    net::tls::install();
    let redis = Redis::run().await?;
    let (folder, authority) = (tempfile::tempdir()?, Authority::new()?);
    let config = json!({
        "tracker": "redis",
        "redis": { "server": { "address": redis.address().to_string() } },
        "table": { "ttl": "2s" },
    });
    let options = Options {
        replicas: 1,
        agents: 8,
        config,
        discovery: Some(Value::Null),
        start: false,
        ..Options::default()
    };
    let mut mesh = Mesh::start_with(options).await?;
    let listen = authority.issue(&authority, folder.path(), "ours", mesh.private(0).ip(), ROLE)?;
    mesh.add_config(json!({ "private_api": { "listen": listen } }));
    mesh.start_unready(0).await?;
    mesh.ready(0).await?;
    let at = IpAddr::from([127, 0, 0, 1]);
    let server = |authority: &Authority, name: &str, role: &str| -> Result<_> {
        authority.issue(authority, folder.path(), name, at, role)?;
        let file = |end: &str| folder.path().join(format!("{name}.{end}"));
        Ok(net::tls::server(&file("cert"), &file("key"))?)
    };
    let good = server(&authority, "good", ROLE)?;
    let theirs = Replica14::start_with(&redis, mesh.private_secret(), Some(good)).await?;
    ensure!(theirs.url.starts_with("grpcs://"));
    theirs.agent(1, 2).await?;
    let caller = mesh.caller(0).await?;
    for _ in 0..3 {
        echo(&caller, 1).await?;
    }
    ensure!(asks(&mesh, "Asked", "Ready").await? >= 3.0);

    // Another role, another CA, or no certificate: no credential is sent there.
    let others = [
        (2, Some(server(&authority, "agent", "kas://agent")?), "role"),
        (3, Some(server(&Authority::new()?, "other-ca", ROLE)?), "certificate"),
        (4, None, "plain text"),
    ];
    for (agent, tls, why) in others {
        let other = Replica14::start_with(&redis, mesh.private_secret(), tls).await?;
        other.agent(agent, 1).await?;
        let request =
            caller.to_agent(agent, &path("Echo")).header("grpc-timeout", "1S").header("kas-explain", "1");
        let got = caller.call(request, &[b"x"]).await?;
        ensure!(got.status.outcome() == Some(Outcome::NotStarted), "{agent}: {got:?}");
        let told = format!("{:?} {:?}", got.headers, got.trailers);
        ensure!(told.contains(why), "{agent}: {told}");
        ensure!(other.seen.headers().is_empty(), "{agent}: {:?}", other.seen.headers());
    }

    // Nor can they connect: our entries contain no URL.
    let _agent = mesh.agent(0, 5, Kind::Ours, 1).await?;
    echo(&caller, 5).await?;
    within(SOON, "the agent's entry is in Redis", async || {
        let unwritten = mesh.kas(0).metric("kas_redis_unwritten").await?;
        Ok(if unwritten == 0.0 { Ok(()) } else { Err(unwritten) })
    })
    .await?;
    ensure!(theirs.urls(5).await?.is_empty());
    Ok(())
}
