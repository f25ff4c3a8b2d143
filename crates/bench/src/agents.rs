//! Agents inside the load client, in any number. They speak the protocol of agentk, and serve nothing else.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::{HeaderValue, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use proto::{
    gitlab::agent::{
        agent_configuration::rpc::ConfigurationRequest,
        modshared::AgentMeta,
        reverse_tunnel::{
            info::{AgentDescriptor, Method, Service},
            rpc::{ConnectRequest, Descriptor, Header, Message, Trailer, connect_request::Msg},
        },
    },
    kas::bench::v1::Payload,
};
use rustls_pki_types::ServerName;
use tokio::{
    net::TcpStream,
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    call::{ECHO, Outgoing, Sender, Signer, dial, handshake, head},
    protocol::{Agents, Tokens, Waiters, Woken, token},
    times::Times,
};

/// How many agents connect at the same time: few enough that kas refuses none.
const AT_ONCE: usize = 64;
/// Time limit of each step.
const STEP: Duration = Duration::from_secs(20);
/// Time until calls have arrived at kas and wait there.
const SETTLE: Duration = Duration::from_millis(300);
/// Streams per connection to the API listener: fewer than it allows.
const CALLS_PER_CONNECTION: i64 = 100;

/// The connection of an agent and its streams. Dropping it closes all of them.
pub(super) struct Agent {
    sender: Sender,
    address: SocketAddr,
    number: i64,
    instance: HeaderValue,
    /// Whether its tunnels offer the benchmark service instead of the Kubernetes API.
    bench: bool,
    streams: Vec<(Option<mpsc::Sender<Bytes>>, Incoming)>,
    /// The configuration stream. kas may respond only when there is a configuration.
    configuration: tokio::task::JoinHandle<()>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.configuration.abort();
    }
}

impl Agent {
    /// Connects an agent whose tunnels offer the benchmark service.
    pub(super) async fn for_calls(address: SocketAddr, number: i64) -> anyhow::Result<Self> {
        let mut agent = timeout(STEP, Self::connect(address, None, number)).await??;
        agent.bench = true;
        Ok(agent)
    }

    /// Waits until the first byte of a call has arrived in each tunnel, and responds to all calls.
    pub(super) async fn serve_one_each(&mut self) -> anyhow::Result<Instant> {
        for (_, body) in &mut self.streams {
            let first = timeout(STEP, body.frame()).await.context("no call arrived in the tunnel")?;
            ensure!(first.context("the tunnel ended")??.is_data(), "the tunnel ended");
        }
        let last = Instant::now();
        for (frames, _) in &self.streams {
            answer(frames.as_ref()).await?;
        }
        Ok(last)
    }

    /// Connects and opens the configuration stream.
    async fn connect(
        address: SocketAddr,
        tls: Option<Arc<rustls::ClientConfig>>,
        number: i64,
    ) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let sender = match tls {
            None => handshake(stream).await?,
            Some(tls) => {
                let name = ServerName::from(address.ip());
                let stream = tokio_rustls::TlsConnector::from(tls).connect(name, stream).await?;
                handshake(stream).await?
            }
        };
        let instance = HeaderValue::try_from(hex::encode(rand::random::<[u8; 16]>()))?;
        let configuration = tokio::spawn(std::future::ready(()));
        let mut agent =
            Self { sender, address, number, instance, bench: false, streams: Vec::new(), configuration };
        let meta = AgentMeta {
            version: "v14.1.0".into(),
            commit_id: "0123abcd".into(),
            pod_namespace: "bench".into(),
            pod_name: format!("agentk-{number}"),
        };
        let message =
            ConfigurationRequest { commit_id: String::new(), agent_meta: Some(meta), skip_register: false };
        let request = agent
            .head("/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration")?
            .body(Outgoing::Once(Some(grpc::encode(&message))))?;
        let answer = agent.sender.send_request(request);
        agent.configuration = tokio::spawn(async move {
            if let Ok(mut answer) = answer.await {
                while let Some(Ok(_)) = answer.body_mut().frame().await {}
            }
        });
        Ok(agent)
    }

    fn head(&self, method: &str) -> anyhow::Result<http::request::Builder> {
        Ok(head(self.address, method)?
            .header(header::AUTHORIZATION, format!("Bearer {}", token(self.number)))
            .header(tunnel_header::INSTANCE, self.instance.clone()))
    }

    /// Opens a tunnel, and waits until kas has accepted it.
    pub(super) async fn open(&mut self) -> anyhow::Result<()> {
        let (name, method) = if self.bench {
            ("kas.bench.v1.Bench", "Echo")
        } else {
            ("gitlab.agent.kubernetes_api.rpc.KubernetesApi", "MakeRequest")
        };
        let service = Service { name: name.into(), methods: vec![Method { name: method.into() }] };
        let descriptor = Descriptor { agent_descriptor: Some(AgentDescriptor { services: vec![service] }) };
        let (frames, body) = mpsc::channel(4);
        frames.send(envelope(Msg::Descriptor(descriptor))).await?;
        let request = self
            .head("/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect")?
            .header(tunnel_header::TUNNEL, "reuse")
            .body(Outgoing::Channel(body))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        if let Some(status) = grpc::Status::from_headers(response.headers()) {
            bail!("kas refused a tunnel: {status}");
        }
        ensure!(
            response.headers().get(tunnel_header::TUNNEL).is_some_and(|v| v == "reuse"),
            "kas did not accept the reuse of the tunnel"
        );
        self.streams.push((Some(frames), response.into_body()));
        Ok(())
    }
}

/// Header keys of a tunnel.
mod tunnel_header {
    pub(super) const TUNNEL: &str = "kas-tunnel";
    pub(super) const INSTANCE: &str = "kas-agentk-instance";
}

fn envelope(msg: Msg) -> Bytes {
    grpc::encode(&ConnectRequest { msg: Some(msg) })
}

/// Returns the configuration of a client that trusts this certificate authority; `None`: without TLS.
pub(super) fn tls(
    ca_file: Option<&Path>,
    protocol: &[u8],
) -> anyhow::Result<Option<Arc<rustls::ClientConfig>>> {
    use rustls_pki_types::{CertificateDer, pem::PemObject as _};
    let Some(path) = ca_file else { return Ok(None) };
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(path)?)?;
    let mut config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    // Agents run on different machines, so none resumes the session of another.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Some(Arc::new(config)))
}

/// Responds to a call with one small message.
async fn answer(frames: Option<&mpsc::Sender<Bytes>>) -> anyhow::Result<()> {
    let data = Bytes::from_static(b"\x0a\x01x");
    let answer =
        [Msg::Header(Header::default()), Msg::Message(Message { data }), Msg::Trailer(Trailer::default())];
    if let Some(frames) = frames {
        for msg in answer {
            frames.send(envelope(msg)).await?;
        }
    }
    Ok(())
}

/// Connects agents with their tunnels, and waits until every tunnel is accepted.
pub(super) async fn connect_all(plan: &Agents) -> anyhow::Result<Vec<Agent>> {
    let tls = tls(plan.ca_file.as_deref(), b"h2")?;
    let at_once = Arc::new(Semaphore::new(AT_ONCE));
    let mut connecting: JoinSet<anyhow::Result<Agent>> = (plan.first..plan.first + plan.count)
        .map(|number| {
            let (plan, tls, at_once) = (plan.clone(), tls.clone(), Arc::clone(&at_once));
            async move {
                let _permit = at_once.acquire().await?;
                let mut agent = timeout(STEP, Agent::connect(plan.address, tls, number)).await??;
                for _ in 0..plan.tunnels {
                    timeout(STEP, agent.open()).await.context("kas did not accept a tunnel")??;
                }
                Ok(agent)
            }
        })
        .collect();
    let mut agents = Vec::new();
    while let Some(agent) = connecting.join_next().await {
        agents.push(agent??);
    }
    Ok(agents)
}

/// Makes one call that waits for each agent, then opens the tunnels of the agents one after another. Measures
/// the time from the opening of a tunnel to the first byte of the call in it.
pub(super) async fn wake(plan: &Waiters) -> anyhow::Result<Woken> {
    let signer = Signer::start(&plan.secret_file, Tokens::EachSecond)?;
    let mut agents = Vec::new();
    for number in plan.first..plan.first + plan.count {
        let mut agent = timeout(STEP, Agent::connect(plan.agents, None, number)).await??;
        agent.bench = true;
        agents.push(agent);
    }
    let mut callers = Vec::new();
    for _ in 0..(plan.count + CALLS_PER_CONNECTION - 1) / CALLS_PER_CONNECTION {
        callers.push(dial(plan.api).await?);
    }
    let message = grpc::encode(&Payload { data: vec![b'x'; 100].into() });
    let mut waiting = Vec::new();
    for (index, agent) in agents.iter().enumerate() {
        let request = head(plan.api, ECHO)?
            .header(header::AUTHORIZATION, signer.header())
            .header("kas-agent-id", agent.number)
            .body(Outgoing::Once(Some(message.clone())))?;
        let at = index % callers.len();
        callers[at].ready().await?;
        waiting.push(tokio::spawn(callers[at].send_request(request)));
    }
    sleep(SETTLE).await;
    let mut times = Times::default();
    for (agent, waiter) in agents.iter_mut().zip(waiting) {
        ensure!(
            !waiter.is_finished(),
            "a call did not wait for its agent: {:?}",
            waiter.await?.map(|r| r.into_parts().0)
        );
        let begin = Instant::now();
        timeout(STEP, agent.open()).await??;
        let Some((frames, body)) = agent.streams.last_mut() else { bail!("no tunnel") };
        let first = timeout(STEP, body.frame()).await.context("no call arrived in the tunnel")?;
        ensure!(first.context("the tunnel ended")??.is_data(), "the tunnel ended");
        times.push(begin.elapsed());
        // The call is answered, so that no errors occur during the next measurement.
        answer(frames.as_ref()).await?;
        let mut answer = timeout(STEP, waiter).await???.into_body();
        while let Some(frame) = timeout(STEP, answer.frame()).await? {
            frame?;
        }
    }
    let at = |quantile| times.at(quantile).context("no call waited");
    Ok(Woken { p50_ms: at(0.5)?, p99_ms: at(0.99)?, max_ms: at(1.0)? })
}
