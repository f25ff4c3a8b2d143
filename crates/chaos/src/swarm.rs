//! `chaos swarm`: agents with the library of agentk, in one process.
//!
//! Each agent is the real one, from the supervisor down; only its module records what it runs. Agents below
//! `--clusters` also have a Kubernetes API server of their own, which records too. A run is written when it
//! ends, with the times of both ends; what is left at the end of the process is written then.

use std::{collections::BTreeMap, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use agentk::{
    cluster::ClusterAccess,
    dial::{Dialer, KasAddresses, KasHeaders},
    metrics::Metrics,
    module::{self, Answer, Module, Modules, Pushed, Service, kubernetes_api::KubernetesApi},
    session::SessionContext,
    supervisor,
    token::TokenFile,
};
use anyhow::{Context as _, Result};
use bytes::Bytes;
use history::Presence;
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use ids::{AgentId, ConnectionId};
use process::lifecycle::Signals;
use prometheus_client::registry::Registry;
use proto::gitlab::agent::modshared::AgentMeta;
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    arguments::SwarmArgs,
    clock, cluster_server,
    hash::Counted,
    recorder::{Recorder, Running},
};

/// How often it is looked whether an agent has its first tunnel: the error of the time that is recorded.
const LOOK: Duration = Duration::from_millis(1);
/// How often records are handed to the system. A killed swarm loses that much.
const FLUSH: Duration = Duration::from_millis(200);
/// The ending of the file with the number of replicas that each agent serves, and its connection.
const SERVED: &str = "served";
/// Open requests may end within this after the signal.
const LEAVE: Duration = Duration::from_secs(5);

/// Serves the methods of the benchmark's service, and records.
#[derive(Debug)]
struct Recording {
    agent: i64,
    work: Duration,
    recorder: Recorder,
}

impl Module for Recording {
    fn services(&self) -> &'static [Service] {
        &[Service { name: "kas.bench.v1.Bench", methods: &["Echo", "Stream"] }]
    }

    fn call(&self, request: http::Request<grpc::Body>) -> Answer {
        self.recorder.search_headers(request.headers());
        let id = request.headers().get("x-gitlab-correlation-id").and_then(|id| id.to_str().ok());
        let id = id.and_then(|id| u64::from_str_radix(id.trim_start_matches('0'), 16).ok()).unwrap_or(0);
        let running = self.recorder.begin(id, self.agent);
        let (work, recorder) = (self.work, self.recorder.clone());
        if request.uri().path().ends_with("/Stream") {
            return Box::pin(std::future::ready(stream(request.into_body(), running, recorder)));
        }
        let mut body = request.into_body();
        Box::pin(async move {
            // The whole of it: its record is written when this future ends or is dropped.
            let mut running = running;
            let mut received = Vec::new();
            let mut counted = Counted::default();
            let clean = loop {
                match body.frame().await {
                    Some(Ok(frame)) => {
                        if let Ok(data) = frame.into_data() {
                            counted.push(&data);
                            received.extend_from_slice(&data);
                        }
                    }
                    Some(Err(_)) => break false,
                    None => break http_body::Body::is_end_stream(&body),
                }
            };
            recorder.search(&received);
            running.run.received = Some(counted.bytes(clean));
            if !clean {
                return grpc::Status::new(grpc::Code::Aborted, "the request was cut").into_response();
            }
            sleep(work).await;
            running.run.sent = Some(counted.bytes(true));
            let mut trailers = HeaderMap::new();
            grpc::Status::write_ok(&mut trailers);
            let body = Full::new(Bytes::from(received)).with_trailers(std::future::ready(Some(Ok::<
                _,
                std::convert::Infallible,
            >(
                trailers
            ))));
            let mut response = http::Response::new(grpc::boxed(body));
            response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
            response
        })
    }
}

/// Returns each piece of a request as it comes, and trailers after its end.
fn stream(mut body: grpc::Body, running: Running, recorder: Recorder) -> http::Response<grpc::Body> {
    let (frames, receiver) = mpsc::channel::<Frame<Bytes>>(1);
    tokio::spawn(async move {
        let mut running = running;
        let (mut received, mut sent) = (Counted::default(), Counted::default());
        let clean = loop {
            tokio::select! {
                frame = body.frame() => match frame {
                    Some(Ok(frame)) => {
                        let Ok(data) = frame.into_data() else { continue };
                        recorder.search(&data);
                        received.push(&data);
                        let length = data.clone();
                        if frames.send(Frame::data(data)).await.is_err() {
                            break false;
                        }
                        sent.push(&length);
                    }
                    Some(Err(_)) => break false,
                    None => break http_body::Body::is_end_stream(&body),
                },
                () = frames.closed() => break false,
            }
        };
        running.run.received = Some(received.bytes(clean));
        let mut ended = false;
        if clean {
            let mut trailers = HeaderMap::new();
            grpc::Status::write_ok(&mut trailers);
            ended = frames.send(Frame::trailers(trailers)).await.is_ok();
        }
        running.run.sent = Some(sent.bytes(ended));
    });
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let frame = receiver.recv().await?;
        Some((Ok::<_, std::convert::Infallible>(frame), receiver))
    });
    let mut response = http::Response::new(grpc::boxed(StreamBody::new(frames)));
    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    response
}

/// Runs agents until a signal.
pub(crate) fn run(arguments: &SwarmArgs) -> Result<()> {
    net::tls::install();
    process::open_files::raise_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(swarm(arguments))
}

async fn swarm(arguments: &SwarmArgs) -> Result<()> {
    let mut signals = Signals::new()?;
    let recorder = Recorder::new(&arguments.history, arguments.forbidden.as_deref())?;
    let folder = TempDir::with_prefix("chaos-swarm-")?;
    let mut kas: Vec<&str> = arguments.kas.split(',').collect();
    let addresses: KasAddresses = arguments.kas.parse()?;
    let headers = KasHeaders::new(Vec::new(), addresses.as_slice())?;
    // No proxy: kas is on a host of the run.
    let dialer = Arc::new(Dialer::new(
        net::tls::client(arguments.ca.as_deref())?,
        None,
        headers,
        net::proxy::Proxies::default(),
    )?);
    let leave = CancellationToken::new();
    let tasks = TaskTracker::new();
    let mut agents = JoinSet::new();
    let mut servers = JoinSet::new();
    let (mut metrics, mut connections) = (Vec::new(), Vec::new());
    let hangs = watch::Sender::default();
    let hanging = hangs.subscribe();
    if let Some(file) = arguments.hangs.clone() {
        servers.spawn(async move { match cluster_server::follow(file, hangs).await {} });
    }
    for agent in arguments.first..arguments.first + arguments.count {
        let token = folder.path().join(format!("token-{agent}"));
        testkit::kas::write_private(&token, &testkit::kas::token(agent))?;
        let work = Duration::from_millis(arguments.work);
        let mut modules: Vec<Arc<dyn Module>> =
            vec![Arc::new(Recording { agent, work, recorder: recorder.clone() })];
        if agent < arguments.clusters {
            let server = cluster_server::listen().await?;
            let address: SocketAddr = server.local_addr()?;
            let (recorder, hanging) = (recorder.clone(), hanging.clone());
            servers.spawn(cluster_server::serve(server, agent, work, recorder, hanging));
            let access =
                ClusterAccess { kube_server: Some(format!("http://{address}")), ..Default::default() };
            modules.push(Arc::new(KubernetesApi::new(access.connect().await?, "chaos", "none")));
        }
        let modules = Modules::new(modules);
        let pushed = watch::Sender::new(Pushed::default());
        modules.start(&module::Context::new(pushed.subscribe(), leave.clone()), &tasks);
        let measured = Arc::new(Metrics::new(&mut Registry::default()));
        let instance = format!("{:032x}", rand::random::<u128>());
        let connection = ConnectionId::of_instance(AgentId::new(agent)?, instance.as_bytes());
        connections.push((agent, connection, Arc::clone(&measured)));
        metrics.push((agent, Arc::clone(&measured)));
        let context = Arc::new(SessionContext {
            descriptor: modules.descriptor(),
            handler: Arc::new(modules),
            token: TokenFile::new(token),
            instance: HeaderValue::try_from(instance)?,
            meta: AgentMeta { version: "chaos".to_owned(), ..AgentMeta::default() },
            metrics: measured,
            max_tunnels: 500,
            pushed,
            calls: Arc::default(),
        });
        agents.spawn(supervisor::run(
            context,
            kas.join(",").parse()?,
            Arc::clone(&dialer),
            arguments.connections,
            leave.clone(),
            tasks.clone(),
        ));
        // Each begins at another replica, as behind a balancer.
        kas.rotate_left(1);
    }
    say("the swarm has started");
    let first_tunnels = first_tunnels(metrics, recorder.clone());
    let flushing = async {
        loop {
            sleep(FLUSH).await;
            recorder.flush()?;
            write_served(&arguments.history, &connections)?;
        }
    };
    let flushed: Result<()> = tokio::select! {
        _ = signals.next() => Ok(()),
        ended = flushing => ended,
        never = first_tunnels => match never {},
    };
    flushed?;
    leave.cancel();
    tasks.close();
    let _ = tokio::time::timeout(LEAVE, tasks.wait()).await;
    agents.shutdown().await;
    servers.shutdown().await;
    recorder.finish()
}

/// What an agent knows of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    /// How many replicas can send it requests.
    pub(crate) replicas: usize,
    /// The id that its connections have at every replica: it follows from the name that the process gives
    /// itself.
    pub(crate) connection: i64,
}

/// Writes how many replicas each agent serves, by its own knowledge, and under which id.
fn write_served(history: &Path, agents: &[(i64, ConnectionId, Arc<Metrics>)]) -> Result<()> {
    let lines = agents.iter().map(|(agent, connection, metrics)| {
        format!("{agent} {} {connection}\n", metrics.replicas_served.get())
    });
    let (path, partial) = (history.with_extension(SERVED), history.with_extension("partial"));
    std::fs::write(&partial, lines.collect::<String>())?;
    // At once, for a process that reads it.
    Ok(std::fs::rename(partial, path)?)
}

/// Reads what [`write_served`] wrote last, by agent.
pub(crate) fn read_served(history: &Path) -> Result<BTreeMap<i64, Served>> {
    let path = history.with_extension(SERVED);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().map(|line| {
        let mut words = line.split(' ');
        let mut next = || words.next().context("an agent, a number and a connection");
        let agent = next()?.parse()?;
        Ok((agent, Served { replicas: next()?.parse()?, connection: next()?.parse()? }))
    });
    lines.collect()
}

/// Records when each agent has its first tunnel.
async fn first_tunnels(
    mut without: Vec<(i64, Arc<Metrics>)>,
    recorder: Recorder,
) -> std::convert::Infallible {
    while !without.is_empty() {
        without.retain(|(agent, metrics)| {
            let has = metrics.tunnels_idle.get() + metrics.tunnels_busy.get() > 0;
            if has {
                let at = clock::now();
                let presence = Presence {
                    agent: *agent,
                    // Which replica it is, only the replica itself tells.
                    replica: String::new(),
                    connection: None,
                    from: at,
                    to: None,
                    invalid_since: None,
                };
                if let Ok(presence) = serde_json::to_value(&presence) {
                    recorder.line("presence", &presence);
                }
            }
            !has
        });
        sleep(LOOK).await;
    }
    say("the swarm is connected");
    std::future::pending().await
}

/// Tells the process that started this one.
fn say(message: &str) {
    eprintln!("{}", json!({ "message": message }));
}
