//! An agent whose envelopes the test sends itself, as any of the three kinds that kas knows.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use grpc::Status;
use h2::Reason;
use http::{HeaderMap, Request, request::Builder};
use prost::Message as _;
use proto::gitlab::agent::{
    agent_configuration::rpc::{ConfigurationRequest, ConfigurationResponse},
    modshared::AgentMeta,
    reverse_tunnel::{
        info::AgentDescriptor,
        rpc::{ConnectResponse, Descriptor, RequestInfo, connect_request, connect_response},
    },
};

use crate::{
    handler::{self, Requests, Wire, to_kas},
    link::{Link, Next, Record, Stream},
};

/// The method that opens tunnels.
pub const CONNECT: &str = "/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect";
/// The method that opens configuration streams.
pub const GET_CONFIGURATION: &str =
    "/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration";

/// The kind of agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of this project: reusable tunnels.
    Ours,
    /// GitLab's 14.1.
    Old,
    /// GitLab's 16.5.
    Recent,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ours, Self::Old, Self::Recent];

    /// Returns its user agent.
    pub fn user_agent(self) -> &'static str {
        match self {
            Self::Ours => "agentk/0.1.0/abc",
            Self::Old => "agentk/v14.1.1/abc grpc-go/1.38.0",
            Self::Recent => "gitlab-agent/v16.5.0/abc grpc-go/1.58.2",
        }
    }

    /// Whether its tunnels are reusable.
    pub fn is_reusable(self) -> bool {
        self == Self::Ours
    }
}

/// One agentk process, with one connection.
#[derive(Clone, Debug)]
pub struct RawAgent {
    link: Link,
    token: Arc<str>,
    kind: Kind,
    instance: String,
    requests: Requests,
}

impl RawAgent {
    /// Connects.
    ///
    /// # Errors
    /// When kas cannot be reached.
    pub async fn connect(address: SocketAddr, token: &str, kind: Kind) -> Result<Self> {
        Ok(Self::over(Link::connect(address).await?, token, kind))
    }

    /// Connects to an agent listener from this local address.
    ///
    /// # Errors
    /// If there is no HTTP/2 connection.
    pub async fn connect_from(from: Ipv4Addr, address: SocketAddr, token: &str, kind: Kind) -> Result<Self> {
        Ok(Self::over(Link::connect_from(from, address).await?, token, kind))
    }

    fn over(link: Link, token: &str, kind: Kind) -> Self {
        let instance = format!("{:032x}", rand::random::<u128>());
        Self { link, token: token.into(), kind, instance, requests: Requests::default() }
    }

    /// Returns its connection.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Returns everything that it received.
    pub fn record(&self) -> &Record {
        self.link.record()
    }

    /// Returns the requests that it [served](Self::serve).
    pub fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Begins the headers of a stream.
    pub fn request(&self, method: &str) -> Builder {
        let request = Request::post(format!("http://{}{method}", self.link.address()))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {}", self.token))
            .header("user-agent", self.kind.user_agent());
        match self.kind {
            Kind::Ours => request
                .header("kas-agentk-instance", &self.instance)
                .header("kas-agentk-socket", self.link.local().to_string()),
            Kind::Old | Kind::Recent => request,
        }
    }

    /// Opens a tunnel that serves [`handler::descriptor`], and waits until kas accepted it.
    ///
    /// # Errors
    /// The status with which kas refused it.
    pub async fn tunnel(&self) -> Result<RawTunnel> {
        self.tunnel_with(handler::descriptor()).await
    }

    /// Opens a tunnel that serves `descriptor`, and waits until kas accepted it.
    ///
    /// # Errors
    /// The status with which kas refused it.
    pub async fn tunnel_with(&self, descriptor: AgentDescriptor) -> Result<RawTunnel> {
        self.tunnel_offering(&[], descriptor).await
    }

    /// As [`tunnel_with`](Self::tunnel_with), of an agentk that says it supports these features: it sends
    /// `kas-agentk-<feature>: 1`.
    ///
    /// # Errors
    /// The status with which kas refused it.
    pub async fn tunnel_offering(&self, features: &[&str], descriptor: AgentDescriptor) -> Result<RawTunnel> {
        let mut request = self.request(CONNECT);
        if self.kind.is_reusable() {
            request = request.header("kas-tunnel", "reuse");
        }
        for feature in features {
            request = request.header(format!("kas-agentk-{feature}"), "1");
        }
        self.tunnel_of(request, descriptor).await
    }

    /// Opens a tunnel whose stream begins with these headers, which offer reuse for an agent that does, and
    /// that serves [`handler::descriptor`].
    ///
    /// # Errors
    /// The status with which kas refused it.
    pub async fn tunnel_as(&self, request: Builder) -> Result<RawTunnel> {
        self.tunnel_of(request, handler::descriptor()).await
    }

    async fn tunnel_of(&self, request: Builder, descriptor: AgentDescriptor) -> Result<RawTunnel> {
        let stream = self.link.open(request.body(())?).await?;
        let mut tunnel = RawTunnel { stream, kind: self.kind };
        let descriptor = connect_request::Msg::Descriptor(Descriptor { agent_descriptor: Some(descriptor) });
        tunnel.send(descriptor).await;
        let (_, headers) =
            tunnel.stream.head().await.map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        if let Some(status) = Status::from_headers(headers) {
            return Err(status.into());
        }
        if self.kind.is_reusable() {
            let accepted = headers.get("kas-tunnel").context("kas accepts reuse in headers")?;
            anyhow::ensure!(accepted == "reuse", "{accepted:?}");
        }
        Ok(tunnel)
    }

    /// Opens a configuration stream and waits for kas' headers: from then on the agent counts as connected.
    ///
    /// # Errors
    /// When the stream cannot be opened, or kas resets it.
    pub async fn configuration(&self, commit: &str) -> Result<Configuration> {
        self.open_configuration(commit, "test-pod", false).await
    }

    /// As [`configuration`](Self::configuration), of a process in the pod `pod` that registers.
    ///
    /// # Errors
    /// When the stream cannot be opened, or kas resets it.
    pub async fn registering_configuration(&self, pod: &str) -> Result<Configuration> {
        self.open_configuration("", pod, true).await
    }

    async fn open_configuration(
        &self,
        commit: &str,
        pod: &str,
        skip_register: bool,
    ) -> Result<Configuration> {
        let mut stream = self.link.open(self.request(GET_CONFIGURATION).body(())?).await?;
        let request = ConfigurationRequest {
            commit_id: commit.to_owned(),
            agent_meta: Some(AgentMeta {
                version: "v14.1.1".to_owned(),
                commit_id: "abc".to_owned(),
                pod_namespace: "test-ns".to_owned(),
                pod_name: pod.to_owned(),
            }),
            skip_register,
        };
        stream.send_message(&request).await.ok().context("the request was sent")?;
        stream.half_close().ok().context("the request was sent")?;
        stream.head().await.map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        Ok(Configuration { stream })
    }

    /// Keeps `tunnels` open and serves their requests with [`handler::serve`], until the result is dropped.
    /// Waits until they are all open.
    ///
    /// # Errors
    /// When a tunnel cannot be opened.
    pub async fn serve(&self, tunnels: usize) -> Result<tokio::task::JoinSet<()>> {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..tunnels {
            let mut tunnel = self.tunnel().await?;
            let agent = self.clone();
            tasks.spawn(async move {
                loop {
                    let again = match tunnel.recv().await {
                        FromKas::Request(info) => {
                            agent.requests.push(info.clone());
                            let again = handler::serve(&mut tunnel, &info, agent.kind.is_reusable()).await;
                            if !again {
                                let _ = tunnel.stream.half_close();
                            }
                            again
                        }
                        _ => false,
                    };
                    if !again {
                        // kas ends a one-shot tunnel.
                        while !matches!(
                            tunnel.next().await,
                            FromKas::Ended(_) | FromKas::Reset(_) | FromKas::Cut
                        ) {}
                        match agent.tunnel().await {
                            Ok(next) => tunnel = next,
                            Err(_) => return,
                        }
                    }
                }
            });
        }
        Ok(tasks)
    }
}

/// An agent of the test that serves requests until this is dropped, which closes its connection.
#[derive(Debug)]
pub struct ServingAgent {
    /// The agent.
    pub raw: RawAgent,
    serving: tokio::task::JoinSet<()>,
}

impl ServingAgent {
    /// Connects, and opens this many tunnels that [serve](handler::serve).
    ///
    /// # Errors
    /// When kas cannot be reached, or refuses it.
    pub async fn connect(address: SocketAddr, token: &str, kind: Kind, tunnels: usize) -> Result<Self> {
        let raw = RawAgent::connect(address, token, kind).await?;
        let serving = raw.serve(tunnels).await?;
        Ok(Self { raw, serving })
    }

    /// Closes its connection without ending its streams.
    pub fn cut(mut self) {
        self.serving.abort_all();
        self.raw.link().cut();
    }

    /// Returns the ids of the requests that it received, in order.
    pub fn ids(&self) -> Vec<String> {
        let id = |info: &RequestInfo| {
            info.meta.get("x-gitlab-correlation-id").and_then(|values| values.value.first().cloned())
        };
        self.raw.requests().list().iter().filter_map(id).collect()
    }
}

impl Drop for ServingAgent {
    fn drop(&mut self) {
        self.serving.abort_all();
        self.raw.link().cut();
    }
}

/// What kas sends in a tunnel.
#[derive(Clone, Debug, PartialEq)]
pub enum FromKas {
    /// A request begins.
    Request(RequestInfo),
    /// A message of it.
    Message(Bytes),
    /// The request is complete or, if the tunnel is idle, kas drains.
    CloseSend,
    /// The stream ended with this status.
    Ended(Status),
    /// The stream was reset.
    Reset(Reason),
    /// The stream ended without a status.
    Cut,
}

/// A tunnel: a stream of envelopes.
#[derive(Debug)]
pub struct RawTunnel {
    stream: Stream,
    kind: Kind,
}

impl RawTunnel {
    /// Returns the stream.
    pub fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Returns kas' response headers.
    ///
    /// # Panics
    /// When there are none.
    pub async fn headers(&mut self) -> HeaderMap {
        self.stream.head().await.expect("the tunnel is open").1.clone()
    }

    /// Sends an envelope; returns whether that was possible.
    pub async fn send(&mut self, msg: connect_request::Msg) -> bool {
        self.stream.send_message(&to_kas(msg)).await.is_ok()
    }

    /// Sends several envelopes.
    ///
    /// # Panics
    /// When kas does not take them.
    pub async fn send_all(&mut self, msgs: impl IntoIterator<Item = connect_request::Msg>) {
        for msg in msgs {
            assert!(self.send(msg.clone()).await, "kas does not take {msg:?}");
        }
    }

    /// Half-closes the tunnel.
    ///
    /// # Panics
    /// When it is over.
    pub fn half_close(&mut self) {
        self.stream.half_close().expect("the tunnel is open");
    }

    /// Waits for what kas sends next, however long that takes.
    pub async fn recv(&mut self) -> FromKas {
        // The wait for a request has no timeout; later waits have one.
        self.next_inner().await
    }

    /// Waits for what kas sends next.
    ///
    /// # Panics
    /// When nothing comes soon.
    pub async fn next(&mut self) -> FromKas {
        crate::process::soon("kas writes to the tunnel", self.next_inner()).await
    }

    async fn next_inner(&mut self) -> FromKas {
        match self.stream.next_unbounded().await {
            Next::Message(bytes) => match ConnectResponse::decode(bytes).expect("kas sends envelopes").msg {
                Some(connect_response::Msg::RequestInfo(info)) => FromKas::Request(info),
                Some(connect_response::Msg::Message(message)) => FromKas::Message(message.data),
                Some(connect_response::Msg::CloseSend(_)) => FromKas::CloseSend,
                None => panic!("an envelope without a message"),
            },
            Next::Trailers(trailers) => {
                FromKas::Ended(Status::from_headers(&trailers).expect("trailers have a status"))
            }
            Next::End => FromKas::Cut,
            Next::Reset(reason) => FromKas::Reset(reason),
        }
    }

    /// Waits for a request.
    ///
    /// # Panics
    /// When something else comes, or nothing.
    pub async fn request(&mut self) -> RequestInfo {
        match self.next().await {
            FromKas::Request(info) => info,
            other => panic!("{:?}: {other:?} instead of a request", self.kind),
        }
    }

    /// Waits for the stream's end.
    ///
    /// # Panics
    /// When something else comes, or nothing.
    pub async fn ended(&mut self) -> Status {
        match self.next().await {
            FromKas::Ended(status) => status,
            other => panic!("{:?}: {other:?} instead of an end", self.kind),
        }
    }
}

impl Wire for RawTunnel {
    async fn recv(&mut self) -> Option<connect_response::Msg> {
        match self.next_inner().await {
            FromKas::Request(info) => Some(connect_response::Msg::RequestInfo(info)),
            FromKas::Message(data) => {
                Some(connect_response::Msg::Message(proto::gitlab::agent::reverse_tunnel::rpc::Message {
                    data,
                }))
            }
            FromKas::CloseSend => Some(connect_response::Msg::CloseSend(Default::default())),
            FromKas::Ended(_) | FromKas::Reset(_) | FromKas::Cut => None,
        }
    }

    async fn send(&mut self, msg: connect_request::Msg) -> bool {
        Self::send(self, msg).await
    }
}

/// A configuration stream.
#[derive(Debug)]
pub struct Configuration {
    stream: Stream,
}

impl Configuration {
    /// Returns the stream.
    pub fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Waits for the next configuration.
    ///
    /// # Errors
    /// The status with which the stream ended instead.
    ///
    /// # Panics
    /// When nothing comes, or the stream is reset.
    pub async fn next(&mut self) -> Result<ConfigurationResponse, Status> {
        let (_, headers) = self.stream.head().await.expect("the stream is answered");
        if let Some(status) = Status::from_headers(headers) {
            return Err(status);
        }
        match self.stream.next().await {
            Next::Message(bytes) => Ok(ConfigurationResponse::decode(bytes).expect("a configuration")),
            Next::Trailers(trailers) => Err(Status::from_headers(&trailers).expect("trailers have a status")),
            other => panic!("{other:?} instead of a configuration"),
        }
    }
}
