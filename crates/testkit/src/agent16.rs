//! An agent that behaves like GitLab's 16.5, with a gRPC library: it registers separately from its
//! configuration stream, and has its own rules for its pool of tunnels.
//!
//! * `Register` first, without waiting for it; what it is answered is kept.
//! * Two idle tunnels; ten more, up to 500, whenever fewer than two are idle after one became busy.
//! * A tunnel that ends with OK, CANCELLED or DEADLINE_EXCEEDED is opened again at once, any other after a
//!   back-off of 1 s and more.
//!
//! Not simulated: the shrinking of the pool, which takes minutes and is not visible to kas.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use proto::gitlab::agent::{
    agent_configuration::rpc::{
        ConfigurationRequest, ConfigurationResponse, agent_configuration_client::AgentConfigurationClient,
    },
    agent_registrar::rpc::{
        RegisterRequest, UnregisterRequest, agent_registrar_client::AgentRegistrarClient,
    },
    entity::{self, KubernetesVersion},
    modshared,
    reverse_tunnel::{
        info::{AgentDescriptor, Method, Service},
        rpc::{
            ConnectRequest, Descriptor, connect_request, connect_response,
            reverse_tunnel_client::ReverseTunnelClient,
        },
    },
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tonic::{Code, Status, Streaming, codec::CompressionEncoding, transport::Channel};

use crate::{
    agent14::{TonicWire, authorized, dial},
    handler::{self, Requests, Wire as _, to_kas},
    link::Record,
    process::soon,
};

/// Its user agent.
pub const USER_AGENT: &str = "gitlab-agent/v16.5.0/abc grpc-go/1.58.3";
/// Minimum number of idle tunnels.
const IDLE: usize = 2;
/// How many it opens if there are fewer.
const STEP: usize = 10;
/// Maximum number of tunnels.
pub const MOST: usize = 500;
/// The backoff after any other end.
const BACK_OFF: Duration = Duration::from_secs(1);

/// Returns its descriptor: the service of the tests, and services and methods that 14.1 lacks.
pub fn descriptor() -> AgentDescriptor {
    let service = |name: &str, methods: &[&str]| Service {
        name: name.to_owned(),
        methods: methods.iter().map(|name| Method { name: (*name).to_owned() }).collect(),
    };
    let mut descriptor = handler::descriptor();
    let kubernetes = service(
        "gitlab.agent.kubernetes_api.rpc.KubernetesApi",
        &["MakeRequest", "WatchGraph", "WatchGraphWithRoots"],
    );
    let health = service("grpc.health.v1.Health", &["Check", "Watch"]);
    descriptor.services.extend([kubernetes, health]);
    descriptor
}

/// A running agent. Dropping it closes its connection.
#[derive(Debug)]
pub struct Agent16 {
    shared: Arc<Shared>,
    configuration: Streaming<ConfigurationResponse>,
    registered: Result<(), Status>,
    _pool: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    channel: Channel,
    /// The connection for its registration.
    registrar: Channel,
    token: Arc<str>,
    pod: String,
    pod_id: i64,
    record: Record,
    requests: Requests,
    ends: watch::Sender<Vec<Code>>,
    /// Tunnels that are open.
    open: watch::Sender<usize>,
    /// Idle tunnels, including those that are being opened.
    idle: AtomicUsize,
    /// All of them.
    all: AtomicUsize,
    more: mpsc::Sender<usize>,
}

impl Agent16 {
    /// Connects, and returns when it has registered, its configuration stream is open and two tunnels are.
    /// `pod` is the name of its pod, `pod_id` what it calls its process.
    ///
    /// # Errors
    /// When kas cannot be reached, or refuses anything but the registration.
    pub async fn start(address: SocketAddr, token: &str, pod: &str, pod_id: i64) -> Result<Self> {
        Self::start_behind([address, address], token, pod, pod_id).await
    }

    /// Like [`start`](Self::start), behind a load balancer for single calls: its streams go to the first
    /// address, its registration to the second.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_behind(
        [streams, registrar]: [SocketAddr; 2],
        token: &str,
        pod: &str,
        pod_id: i64,
    ) -> Result<Self> {
        let record = Record::default();
        let channel = dial(streams, USER_AGENT, &record).await?;
        let registrar =
            if registrar == streams { channel.clone() } else { dial(registrar, USER_AGENT, &record).await? };
        let (more, mut wanted) = mpsc::channel(MOST);
        let shared = Arc::new(Shared {
            channel,
            registrar,
            token: token.into(),
            pod: pod.to_owned(),
            pod_id,
            record,
            requests: Requests::default(),
            ends: watch::channel(Vec::new()).0,
            open: watch::channel(0).0,
            idle: AtomicUsize::new(0),
            all: AtomicUsize::new(0),
            more,
        });
        let (configuration, registered) = tokio::join!(shared.configuration(), shared.register());
        let configuration = configuration.context("the configuration stream is refused")?;
        let mut pool = JoinSet::new();
        let of_pool = Arc::clone(&shared);
        pool.spawn(async move {
            let mut tunnels = JoinSet::new();
            while let Some(count) = wanted.recv().await {
                for _ in 0..count {
                    tunnels.spawn(Arc::clone(&of_pool).tunnel());
                }
            }
        });
        shared.grow(IDLE).await;
        let mut open = shared.open.subscribe();
        soon("its tunnels open", open.wait_for(|open| *open >= IDLE)).await?;
        Ok(Self { shared, configuration, registered, _pool: pool })
    }

    /// Returns the response to its registration.
    pub fn registered(&self) -> &Result<(), Status> {
        &self.registered
    }

    /// Registers once more, as it does every 5 minutes.
    ///
    /// # Errors
    /// How kas refuses it.
    pub async fn register(&self) -> Result<(), Status> {
        self.shared.register().await
    }

    /// Unregisters, as later versions do.
    ///
    /// # Errors
    /// How kas refuses it.
    pub async fn unregister(&self) -> Result<(), Status> {
        let mut client = AgentRegistrarClient::new(self.shared.registrar.clone());
        let request = UnregisterRequest { agent_meta: Some(self.shared.meta()), pod_id: self.shared.pod_id };
        client.unregister(authorized(request, &self.shared.token)).await.map(drop)
    }

    /// Returns everything that it received.
    pub fn record(&self) -> &Record {
        &self.shared.record
    }

    /// Returns the requests that it received.
    pub fn requests(&self) -> &Requests {
        &self.shared.requests
    }

    /// Returns how its tunnels ended so far.
    pub fn ends(&self) -> watch::Receiver<Vec<Code>> {
        self.shared.ends.subscribe()
    }

    /// Returns how many tunnels it has.
    pub fn tunnels(&self) -> watch::Receiver<usize> {
        self.shared.open.subscribe()
    }

    /// Waits for the next configuration.
    ///
    /// # Errors
    /// The status with which the stream ended instead.
    pub async fn next_configuration(&mut self) -> Result<Option<ConfigurationResponse>, Status> {
        soon("a configuration comes", self.configuration.message()).await
    }
}

impl Shared {
    fn meta(&self) -> entity::AgentMeta {
        entity::AgentMeta {
            version: "v16.5.0".to_owned(),
            commit_id: "abc".to_owned(),
            pod_namespace: "test-ns".to_owned(),
            pod_name: self.pod.clone(),
            kubernetes_version: Some(KubernetesVersion {
                major: "1".to_owned(),
                minor: "28".to_owned(),
                git_version: "v1.28.2".to_owned(),
                platform: "linux/amd64".to_owned(),
            }),
        }
    }

    async fn register(&self) -> Result<(), Status> {
        let mut client =
            AgentRegistrarClient::new(self.registrar.clone()).send_compressed(CompressionEncoding::Gzip);
        let request = RegisterRequest { agent_meta: Some(self.meta()), pod_id: self.pod_id };
        client.register(authorized(request, &self.token)).await.map(drop)
    }

    async fn configuration(&self) -> Result<Streaming<ConfigurationResponse>, Status> {
        let mut client =
            AgentConfigurationClient::new(self.channel.clone()).send_compressed(CompressionEncoding::Gzip);
        let request = ConfigurationRequest {
            commit_id: String::new(),
            // The fifth field is not part of this message: an older kas skips it, and so do tests of this
            // one.
            agent_meta: Some(modshared::AgentMeta {
                version: "v16.5.0".to_owned(),
                commit_id: "abc".to_owned(),
                pod_namespace: "test-ns".to_owned(),
                pod_name: self.pod.clone(),
            }),
            skip_register: true,
        };
        Ok(client.get_configuration(authorized(request, &self.token)).await?.into_inner())
    }

    /// Opens `count` tunnels more, as far as that is allowed.
    async fn grow(&self, count: usize) {
        let before = self.all.fetch_add(count, Ordering::SeqCst);
        let more = count.min(MOST.saturating_sub(before));
        self.all.fetch_sub(count - more, Ordering::SeqCst);
        self.idle.fetch_add(more, Ordering::SeqCst);
        // The pool is gone when the agent is.
        let _ = self.more.send(more).await;
    }

    async fn tunnel(self: Arc<Self>) {
        loop {
            let code = self.attempt().await.err().unwrap_or(Code::Ok);
            self.ends.send_modify(|ends| ends.push(code));
            if !matches!(code, Code::Ok | Code::Cancelled | Code::DeadlineExceeded) {
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }

    /// Opens one tunnel and serves its requests; returns how it ended.
    async fn attempt(&self) -> Result<(), Code> {
        let (sender, mut outgoing) = mpsc::channel::<ConnectRequest>(1);
        let outgoing = futures_util::stream::poll_fn(move |cx| outgoing.poll_recv(cx));
        let first = Descriptor { agent_descriptor: Some(descriptor()) };
        let _ = sender.send(to_kas(connect_request::Msg::Descriptor(first))).await;
        let mut client = ReverseTunnelClient::new(self.channel.clone())
            .send_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Gzip);
        let response =
            client.connect(authorized(outgoing, &self.token)).await.map_err(|status| status.code())?;
        self.record.push_headers(&response.metadata().clone().into_headers());
        self.open.send_modify(|open| *open += 1);
        let mut wire = TonicWire {
            sender: Some(sender),
            stream: response.into_inner(),
            record: self.record.clone(),
            end: None,
        };
        if let Some(connect_response::Msg::RequestInfo(info)) = wire.recv().await {
            if self.idle.fetch_sub(1, Ordering::SeqCst) <= IDLE {
                self.grow(STEP).await;
            }
            self.requests.push(info.clone());
            handler::serve(&mut wire, &info, false).await;
            wire.sender = None;
            while wire.recv().await.is_some() {}
            self.idle.fetch_add(1, Ordering::SeqCst);
        }
        self.open.send_modify(|open| *open -= 1);
        match wire.end {
            Some(code) if code != Code::Ok => Err(code),
            _ => Ok(()),
        }
    }
}
