//! A question to the Prometheus servers of many agents.
//!
//! kas and a Prometheus are processes. The agents are in this process, each with the library of agentk from
//! its supervisor down. In the place of their API servers is one server: it asks the Prometheus when it gets
//! a question for the first time, and answers with the recorded bytes from then on, as what is measured is
//! kas.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use agentk::{
    cluster::ClusterAccess,
    dial::{Dialer, KasAddresses, KasHeaders},
    metrics::Metrics,
    module::{Context, Module, Modules, Pushed, kubernetes_api::KubernetesApi},
    session::SessionContext,
    supervisor,
    token::TokenFile,
};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use proto::gitlab::agent::modshared::AgentMeta;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    endpoint::{Endpoint, JANE},
    kas::{AgentEntry, eventually, token, write_private},
    prometheus::Prometheus,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Part,
    client::Client,
    promql::{Question, data, result},
};
use crate::{report::FLEET_1000, times::Times};

/// Agents. The key is for 1,000.
const AGENTS: i64 = 1_000;
/// Agents that connect at the same time: few enough that kas refuses none.
const AT_ONCE: usize = 64;
/// Tunnels of an agent.
const TUNNELS: usize = 10;
/// The proxy of the API server for the Service that `kas.yaml` names.
const PROXY: &str = "/api/v1/namespaces/monitoring/services/http:prometheus:9090/proxy";
/// Time limit of a step.
const STEP: Duration = Duration::from_secs(120);

/// Answers with what a Prometheus has answered before.
struct Recorder {
    prometheus: SocketAddr,
    answers: Mutex<HashMap<String, Bytes>>,
}

impl Recorder {
    async fn answer(&self, target: &str) -> Result<Bytes> {
        let target = target.strip_prefix(PROXY).with_context(|| format!("nobody should ask for {target}"))?;
        if let Some(answer) = self.answers.lock().get(target) {
            return Ok(answer.clone());
        }
        let answer = Client::connect(self.prometheus, None).await?.get(target).await?;
        self.answers.lock().insert(target.to_owned(), answer.clone());
        Ok(answer)
    }

    async fn respond(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let target = request.uri().path_and_query().map_or("", |target| target.as_str());
        let (status, body) = match self.answer(target).await {
            Ok(answer) => (StatusCode::OK, answer),
            Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}").into()),
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    async fn serve(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(Arc::clone(&self).connection(stream));
            while connections.try_join_next().is_some() {}
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        // A delayed acknowledgement would be measured as an answer of kas. An error ends the connection.
        let _ = stream.set_nodelay(true);
        let service = service_fn(|request| self.respond(request));
        let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
    }
}

/// Agents with the library of agentk. Dropping it ends them.
struct Swarm {
    leave: CancellationToken,
    tasks: TaskTracker,
    agents: JoinSet<()>,
    dialer: Arc<Dialer>,
    kas: KasAddresses,
    api_server: SocketAddr,
    folder: TempDir,
}

impl Drop for Swarm {
    fn drop(&mut self) {
        self.leave.cancel();
    }
}

impl Swarm {
    async fn start(kas: SocketAddr, api_server: SocketAddr, count: i64) -> Result<Self> {
        let kas: KasAddresses = format!("grpc://{kas}").parse()?;
        let headers = KasHeaders::new(Vec::new(), kas.as_slice())?;
        // No proxy: kas is on this host.
        let dialer = Dialer::new(net::tls::client(None)?, None, headers, net::proxy::Proxies::default())?;
        let mut swarm = Self {
            leave: CancellationToken::new(),
            tasks: TaskTracker::new(),
            agents: JoinSet::new(),
            dialer: Arc::new(dialer),
            kas,
            api_server,
            folder: TempDir::with_prefix("kas-bench-swarm-")?,
        };
        let all: Vec<i64> = (1..=count).collect();
        for some in all.chunks(AT_ONCE) {
            let mut metrics = Vec::new();
            for agent in some {
                metrics.push(swarm.connect(*agent).await?);
            }
            let connected = async {
                while metrics.iter().any(|one| one.tunnels_idle.get() + one.tunnels_busy.get() == 0) {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(STEP, connected).await.with_context(|| format!("agents {some:?} do not connect"))?;
        }
        Ok(swarm)
    }

    async fn connect(&mut self, agent: i64) -> Result<Arc<Metrics>> {
        let file = self.folder.path().join(format!("token-{agent}"));
        write_private(&file, &token(agent))?;
        let access =
            ClusterAccess { kube_server: Some(format!("http://{}", self.api_server)), ..Default::default() };
        let module: Arc<dyn Module> = Arc::new(KubernetesApi::new(access.connect().await?, "bench", "none"));
        let modules = Modules::new(vec![module]);
        let pushed = watch::Sender::new(Pushed::default());
        modules.start(&Context::new(pushed.subscribe(), self.leave.clone()), &self.tasks);
        let metrics = Arc::new(Metrics::new(&mut Registry::default()));
        let context = Arc::new(SessionContext {
            descriptor: modules.descriptor(),
            handler: Arc::new(modules),
            token: TokenFile::new(file),
            instance: HeaderValue::try_from(format!("{:032x}", rand::random::<u128>()))?,
            meta: AgentMeta { version: "bench".to_owned(), ..AgentMeta::default() },
            metrics: Arc::clone(&metrics),
            max_tunnels: TUNNELS,
            pushed,
            calls: Arc::default(),
        });
        self.agents.spawn(supervisor::run(
            context,
            self.kas.clone(),
            Arc::clone(&self.dialer),
            1,
            self.leave.clone(),
            self.tasks.clone(),
        ));
        Ok(metrics)
    }
}

fn configure(folder: &TempDir) -> Result<()> {
    let kas_yaml = json!({ "prometheus": { "service": "monitoring/prometheus:9090" } }).to_string();
    for agent in 1..=AGENTS {
        let files = folder.path().join(format!("agents/agent-{agent}"));
        std::fs::create_dir_all(&files)?;
        std::fs::write(files.join("config.yaml"), "")?;
        std::fs::write(files.join("kas.yaml"), &kas_yaml)?;
    }
    Ok(())
}

/// Measures everything; `count`: how often each question is asked.
pub(super) async fn measure(count: u32) -> Result<Part> {
    let folder = TempDir::with_prefix("kas-bench-swarm-")?;
    configure(&folder)?;
    let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
    let data = data();
    let (prometheus, endpoint) = tokio::try_join!(
        Prometheus::start("prometheus", IpAddr::V4(Ipv4Addr::LOCALHOST), &data),
        Endpoint::start(config)
    )?;
    endpoint.kas.set_agents(&(1..=AGENTS).map(AgentEntry::new).collect::<Vec<_>>())?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let api_server = listener.local_addr()?;
    let recorder = Arc::new(Recorder { prometheus: prometheus.address, answers: Mutex::default() });
    let mut server = JoinSet::new();
    server.spawn(Arc::clone(&recorder).serve(listener));
    let _swarm = Swarm::start(endpoint.kas.agent, api_server, AGENTS).await?;

    let mut kas = Client::connect(endpoint.address, Some(JANE)).await?;
    let mut direct = Client::connect(prometheus.address, None).await?;
    let mut part = Part::default();
    for question in [
        Question::hour("a sum over an hour", "sum(rate(requests[5m]))"),
        Question::instant("a sum", "sum(load)"),
    ] {
        let one = values(&result(&direct.get(&question.target("")).await?)?)?;
        let target = question.target("/fleet/prometheus/select/all");
        // Agents are known after their configuration streams.
        eventually("all agents answer", async || {
            Ok(kas
                .get(&target)
                .await
                .and_then(|body| result(&body))
                .map(drop)
                .map_err(|error| format!("{error:#}")))
        })
        .await?;
        let mut times = Times::default();
        for _ in 0..count {
            let begun = Instant::now();
            let told = kas.get(&target).await?;
            times.push(begun.elapsed());
            is_sum(&values(&result(&told)?)?, &one, AGENTS)?;
        }
        if part.rows.is_empty() {
            part.values.extend(times.at(0.5).map(|ms| (FLEET_1000, ms / 1e3)));
        }
        let query = question.form.first().map_or("", |(_, query)| query);
        let how = format!("`{query}` over {AGENTS} agents, until the end of the answer of kas");
        part.row(question.name, &times, &how);
    }
    part.notes.push(format!(
        "The key is the median of the first row. Each answer was compared: it is {AGENTS} times that of the Prometheus. \
         The API servers of the agents are one server in the process of the benchmark, which answers with recorded \
         bytes."
    ));
    Ok(part)
}

/// Returns the values of the only series of a result.
fn values(result: &Value) -> Result<Vec<f64>> {
    let series = result.as_array().filter(|all| all.len() == 1).and_then(|all| all.first());
    let series = series.with_context(|| format!("not one series: {result}"))?;
    let samples: Vec<&Value> = match series["values"].as_array() {
        Some(samples) => samples.iter().collect(),
        None => vec![&series["value"]],
    };
    let number = |sample: &Value| sample[1].as_str()?.parse().ok();
    samples.into_iter().map(|sample| number(sample).with_context(|| format!("no sample: {sample}"))).collect()
}

/// Whether each value is so many times that of one.
fn is_sum(all: &[f64], one: &[f64], agents: i64) -> Result<()> {
    let close = |(all, one): (&f64, &f64)| (all - one * agents as f64).abs() <= all.abs() * 1e-9;
    let is_right = all.len() == one.len() && all.iter().zip(one).all(close);
    ensure!(is_right, "not the sum over all agents: {all:?} instead of {agents} times {one:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_compared_value_by_value() {
        let range = json!([{ "metric": {}, "values": [[1, "2"], [2, "4.5"]] }]);
        let one = values(&range).unwrap();
        assert_eq!(one, [2.0, 4.5]);
        assert_eq!(values(&json!([{ "metric": {}, "value": [1, "7"] }])).unwrap(), [7.0]);
        is_sum(&[20.0, 45.0], &one, 10).unwrap();
        is_sum(&[20.0, 44.0], &one, 10).unwrap_err();
        is_sum(&[20.0], &one, 10).unwrap_err();
        values(&json!([])).unwrap_err();
    }
}
