//! An agent that behaves like GitLab's: a client with a gRPC library, gzip on everything that it sends, and
//! ten tunnels that carry one request each.
//!
//! Unlike [`raw_agent`](crate::raw_agent), it does not encode envelopes itself: it shows that an independent
//! gRPC implementation works with kas.

use std::{io, net::SocketAddr, sync::Arc};

use anyhow::Result;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use proto::gitlab::agent::{
    agent_configuration::rpc::{
        ConfigurationRequest, ConfigurationResponse, agent_configuration_client::AgentConfigurationClient,
    },
    flux::rpc::{
        Project, ReconcileProjectsRequest, ReconcileProjectsResponse, git_lab_flux_client::GitLabFluxClient,
    },
    gitlab_access::rpc::gitlab_access_client::GitlabAccessClient,
    gitops::rpc::{ObjectsToSynchronizeRequest, ObjectsToSynchronizeResponse, gitops_client::GitopsClient},
    grpctool,
    modshared::AgentMeta,
    reverse_tunnel::rpc::{
        ConnectRequest, ConnectResponse, Descriptor, connect_request, connect_response,
        reverse_tunnel_client::ReverseTunnelClient,
    },
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tonic::{
    Streaming,
    codec::CompressionEncoding,
    metadata::MetadataValue,
    transport::{Channel, Endpoint, Uri},
};

use crate::{
    handler::{self, Requests, Wire, to_kas},
    link::{Record, Recorded},
    process::soon,
};

/// How many tunnels an agent of GitLab keeps.
const TUNNELS: usize = 10;

/// The version of GitLab's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// 14.1.
    Old,
    /// 16.5, which its user agent names.
    Recent,
}

/// A running agent. Dropping it closes its connection.
#[derive(Debug)]
pub struct Agent14 {
    record: Record,
    requests: Requests,
    ends: watch::Receiver<Vec<tonic::Code>>,
    configuration: ConfigurationStream,
    channel: Channel,
    token: Arc<str>,
    _tunnels: JoinSet<()>,
}

/// The stream of configurations, which marks the agent as connected.
type ConfigurationStream = Streaming<ConfigurationResponse>;

impl Agent14 {
    /// Connects, and returns when the configuration stream and all tunnels are open.
    ///
    /// # Errors
    /// When kas cannot be reached or refuses the token.
    pub async fn start(address: SocketAddr, token: &str, version: Version) -> Result<Self> {
        let record = Record::default();
        let user_agent = match version {
            Version::Old => "agentk/v14.1.1/abc",
            Version::Recent => "gitlab-agent/v16.5.0/abc",
        };
        let channel = dial(address, user_agent, &record).await?;
        let token: Arc<str> = token.into();
        let configuration = configuration(&channel, &token, "", &record).await?;
        let requests = Requests::default();
        let (ended, ends) = watch::channel(Vec::new());
        let mut tunnels = JoinSet::new();
        let (opened, mut open) = mpsc::channel(TUNNELS);
        for _ in 0..TUNNELS {
            let tunnel = Tunnel {
                channel: channel.clone(),
                token: Arc::clone(&token),
                record: record.clone(),
                requests: requests.clone(),
            };
            let (opened, ended) = (opened.clone(), ended.clone());
            tunnels.spawn(async move {
                let mut opened = Some(opened);
                loop {
                    // Like 14.1 after an end with OK; where 14.1 backs off, a test must not wait.
                    let end = tunnel.attempt(&mut opened).await;
                    let refused = end.is_err();
                    ended.send_modify(|ends| ends.push(end.err().unwrap_or(tonic::Code::Ok)));
                    if refused && opened.is_some() {
                        return;
                    }
                }
            });
        }
        drop(opened);
        for _ in 0..TUNNELS {
            soon("the tunnels open", open.recv())
                .await
                .ok_or_else(|| anyhow::anyhow!("a tunnel was refused"))?;
        }
        Ok(Self { record, requests, ends, configuration, channel, token, _tunnels: tunnels })
    }

    /// Returns everything that it received.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the requests that it received.
    pub fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Returns how its tunnels ended so far.
    pub fn ends(&self) -> watch::Receiver<Vec<tonic::Code>> {
        self.ends.clone()
    }

    /// Waits for the next configuration.
    ///
    /// # Errors
    /// The status with which the stream ended instead.
    pub async fn next_configuration(&mut self) -> Result<Option<ConfigurationResponse>, tonic::Status> {
        soon("a configuration comes", self.configuration.message()).await
    }

    /// As [`next_configuration`](Self::next_configuration), however long that takes.
    ///
    /// # Errors
    /// The status with which the stream ended instead.
    pub async fn next_configuration_unbounded(
        &mut self,
    ) -> Result<Option<ConfigurationResponse>, tonic::Status> {
        self.configuration.message().await
    }

    /// Asks for manifests. 14.1 asks again after each end.
    ///
    /// # Errors
    /// When kas refuses that.
    pub async fn objects(
        &self,
        request: ObjectsToSynchronizeRequest,
    ) -> Result<Streaming<ObjectsToSynchronizeResponse>, tonic::Status> {
        let mut client = GitopsClient::new(self.channel.clone())
            .accept_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Gzip);
        let answer = client.get_objects_to_synchronize(authorized(request, &self.token)).await?;
        Ok(answer.into_inner())
    }

    /// Follows projects, as agents of 16.1 and later with Flux do.
    ///
    /// # Errors
    /// When kas refuses that.
    pub async fn reconcile(
        &self,
        projects: &[&str],
    ) -> Result<Streaming<ReconcileProjectsResponse>, tonic::Status> {
        let project = projects.iter().map(|path| Project { id: (*path).to_owned() }).collect();
        let mut client = GitLabFluxClient::new(self.channel.clone());
        let request = authorized(ReconcileProjectsRequest { project }, &self.token);
        Ok(client.reconcile_projects(request).await?.into_inner())
    }

    /// Sends a request of a module to GitLab.
    ///
    /// # Errors
    /// When kas refuses that.
    pub async fn module(
        &self,
        messages: Vec<grpctool::HttpRequest>,
    ) -> Result<Streaming<grpctool::HttpResponse>, tonic::Status> {
        let mut client =
            GitlabAccessClient::new(self.channel.clone()).send_compressed(CompressionEncoding::Gzip);
        let messages = authorized(futures_util::stream::iter(messages), &self.token);
        Ok(client.make_request(messages).await?.into_inner())
    }

    /// Reopens the configuration stream with the known `commit`.
    ///
    /// # Errors
    /// When kas refuses it.
    pub async fn reopen_configuration(&mut self, commit: &str) -> Result<(), tonic::Status> {
        self.configuration = configuration(&self.channel, &self.token, commit, &self.record).await?;
        Ok(())
    }
}

/// Connects; everything that is received is recorded.
pub(crate) async fn dial(address: SocketAddr, user_agent: &'static str, record: &Record) -> Result<Channel> {
    let to = record.clone();
    let connector = tower_service_fn(move |_: Uri| {
        let record = to.clone();
        Box::pin(async move { Ok::<_, io::Error>(TokioIo::new(Recorded::connect(address, record).await?)) })
    });
    let endpoint = Endpoint::try_from(format!("http://{address}"))?.user_agent(user_agent)?;
    Ok(endpoint.connect_with_connector(connector).await?)
}

async fn configuration(
    channel: &Channel,
    token: &str,
    commit: &str,
    record: &Record,
) -> Result<ConfigurationStream, tonic::Status> {
    let mut client =
        AgentConfigurationClient::new(channel.clone()).send_compressed(CompressionEncoding::Gzip);
    let request = ConfigurationRequest {
        commit_id: commit.to_owned(),
        agent_meta: Some(AgentMeta {
            version: "v14.1.1".to_owned(),
            commit_id: "abc".to_owned(),
            pod_namespace: "test-ns".to_owned(),
            pod_name: "test-pod".to_owned(),
        }),
        skip_register: false,
    };
    let response = client.get_configuration(authorized(request, token)).await?;
    record.push_headers(&response.metadata().clone().into_headers());
    Ok(response.into_inner())
}

pub(crate) fn authorized<T>(message: T, token: &str) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let value: MetadataValue<_> = format!("Bearer {token}").parse().expect("tokens of tests are ASCII");
    request.metadata_mut().insert("authorization", value);
    request
}

struct Tunnel {
    channel: Channel,
    token: Arc<str>,
    record: Record,
    requests: Requests,
}

impl Tunnel {
    /// Opens one tunnel and serves its requests; returns how it ended.
    async fn attempt(&self, opened: &mut Option<mpsc::Sender<()>>) -> Result<(), tonic::Code> {
        let (sender, mut outgoing) = mpsc::channel(1);
        let outgoing = futures_util::stream::poll_fn(move |cx| outgoing.poll_recv(cx));
        let descriptor = Descriptor { agent_descriptor: Some(handler::descriptor()) };
        let _ = sender.send(to_kas(connect_request::Msg::Descriptor(descriptor))).await;
        let mut client = ReverseTunnelClient::new(self.channel.clone())
            .send_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Gzip);
        let response =
            client.connect(authorized(outgoing, &self.token)).await.map_err(|status| status.code())?;
        self.record.push_headers(&response.metadata().clone().into_headers());
        if let Some(opened) = opened.take() {
            let _ = opened.send(()).await;
        }
        let mut wire = TonicWire {
            sender: Some(sender),
            stream: response.into_inner(),
            record: self.record.clone(),
            end: None,
        };
        if let Some(connect_response::Msg::RequestInfo(info)) = wire.recv().await {
            self.requests.push(info.clone());
            handler::serve(&mut wire, &info, false).await;
            wire.sender = None;
            while wire.recv().await.is_some() {}
        }
        match wire.end {
            Some(code) if code != tonic::Code::Ok => Err(code),
            _ => Ok(()),
        }
    }
}

/// A tunnel over a gRPC library.
pub(crate) struct TonicWire {
    pub(crate) sender: Option<mpsc::Sender<ConnectRequest>>,
    pub(crate) stream: Streaming<ConnectResponse>,
    pub(crate) record: Record,
    pub(crate) end: Option<tonic::Code>,
}

impl Wire for TonicWire {
    async fn recv(&mut self) -> Option<connect_response::Msg> {
        if self.end.is_some() {
            return None;
        }
        match self.stream.message().await {
            Ok(Some(message)) => {
                self.record.push(&message.encode_to_vec());
                message.msg
            }
            Ok(None) => {
                if let Ok(Some(trailers)) = self.stream.trailers().await {
                    self.record.push_headers(&trailers.into_headers());
                }
                self.end = Some(tonic::Code::Ok);
                None
            }
            Err(status) => {
                self.record.push_headers(&status.metadata().clone().into_headers());
                self.record.push(status.message().as_bytes());
                self.record.push(status.details());
                self.end = Some(status.code());
                None
            }
        }
    }

    async fn send(&mut self, msg: connect_request::Msg) -> bool {
        match &self.sender {
            Some(sender) => sender.send(to_kas(msg)).await.is_ok(),
            None => false,
        }
    }
}

/// A service from a function, as tonic wants its connectors.
fn tower_service_fn<F>(function: F) -> ServiceFn<F> {
    ServiceFn(function)
}

#[derive(Clone)]
struct ServiceFn<F>(F);

impl<F, Fut, T> tower_service::Service<Uri> for ServiceFn<F>
where
    F: FnMut(Uri) -> Fut,
    Fut: Future<Output = io::Result<T>>,
{
    type Response = T;
    type Error = io::Error;
    type Future = Fut;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Fut {
        (self.0)(uri)
    }
}
