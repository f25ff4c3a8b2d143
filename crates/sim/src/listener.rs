//! The agent listener of a simulated replica, and the streams that it accepts.
//!
//! An agent opens one control stream, in place of its configuration stream, and one stream for each tunnel.
//! Both begin with [`Hello`]. In a tunnel, the bytes are those of `Connect`: without HTTP/2, a connection of
//! the network takes the place of a stream.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use cluster::{AgentMeta, Connection, Connections as _, Lease};
use http_body_util::BodyExt as _;
use ids::{AgentId, ConnectionId, TokenHash};
use kas::replicas::gossip_backend::GossipBackend;
use parking_lot::Mutex;
use routing::{
    rate_limit::RateLimit,
    registry::{RegistryPool, TunnelRegistry},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{Notify, watch},
    time::{Instant, sleep_until},
};
use tunnel::{
    features::Features,
    kas_end::{AgentKind, Info, Opening, Retire, Tunnel, read_descriptor},
};

use crate::{
    bodies::ReadBody,
    network::{self, Stream},
    record::{Present, Recorder},
};

/// On a control stream: the agent is accepted; a ping, and its answer; the replica leaves.
pub(crate) const ACCEPTED: u8 = b'a';
pub(crate) const PING: u8 = b'p';
pub(crate) const LEAVES: u8 = b'l';

/// The keepalive of the agent listener.
const INTERVAL: Duration = Duration::from_secs(15);
const WITHIN: Duration = Duration::from_secs(10);

/// The beginning of a stream of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) is_tunnel: bool,
    pub(crate) agent: i64,
    /// A connection of the agent: unique.
    pub(crate) connection: u64,
}

impl Hello {
    pub(crate) fn encode(self) -> [u8; 17] {
        let mut bytes = [0; 17];
        bytes[0] = self.is_tunnel.into();
        bytes[1..9].copy_from_slice(&self.agent.to_be_bytes());
        bytes[9..].copy_from_slice(&self.connection.to_be_bytes());
        bytes
    }

    async fn read(stream: &mut Stream) -> std::io::Result<Self> {
        let is_tunnel = stream.read_u8().await? == 1;
        Ok(Self { is_tunnel, agent: stream.read_i64().await?, connection: stream.read_u64().await? })
    }
}

/// One connection of an agent.
struct Open {
    /// True once it has ended.
    over: watch::Sender<bool>,
    tunnels: Mutex<Vec<Weak<Tunnel>>>,
}

/// Waits until a flag is set, or its sender is gone.
async fn is_set(flag: &mut watch::Receiver<bool>) {
    drop(flag.wait_for(|flag| *flag).await);
}

/// Pings an agent until it does not answer.
async fn keep(stream: &mut Stream) {
    let (mut due, mut asked) = (Instant::now() + INTERVAL, false);
    loop {
        tokio::select! {
            biased;
            answer = stream.read_u8() => match answer {
                Ok(_) => (due, asked) = (Instant::now() + INTERVAL, false),
                Err(_) => return,
            },
            () = sleep_until(due) => {
                if asked || stream.write_all(&[PING]).await.is_err() {
                    return;
                }
                (due, asked) = (Instant::now() + WITHIN, true);
            }
        }
    }
}

/// The agent listener of one replica.
pub(crate) struct AgentListener {
    pub(crate) replica: String,
    pub(crate) registry: Arc<TunnelRegistry>,
    pub(crate) backend: Arc<GossipBackend>,
    pub(crate) recorder: Recorder,
    pool: Arc<RegistryPool>,
    open: Mutex<BTreeMap<(i64, u64), Arc<Open>>>,
    leaving: watch::Sender<bool>,
}

impl AgentListener {
    pub(crate) fn new(
        replica: &str,
        registry: Arc<TunnelRegistry>,
        backend: Arc<GossipBackend>,
        recorder: Recorder,
    ) -> Arc<Self> {
        let rate_limit = Arc::new(RateLimit::new(6_000, 100_000));
        let pool = Arc::new(RegistryPool { registry: Arc::clone(&registry), rate_limit });
        let (open, leaving) = (Mutex::default(), watch::Sender::new(false));
        Arc::new(Self { replica: replica.to_owned(), registry, backend, recorder, pool, open, leaving })
    }

    /// Accepts streams until it is dropped.
    pub(crate) async fn run(self: Arc<Self>, listener: network::Listener) {
        loop {
            let (mut stream, _) = listener.accept().await;
            let this = Arc::clone(&self);
            tokio::spawn(async move {
                let Ok(hello) = Hello::read(&mut stream).await else { return };
                let Ok(agent) = AgentId::new(hello.agent) else { return };
                if hello.is_tunnel {
                    this.tunnel(stream, hello, agent).await;
                } else {
                    this.control(stream, hello, agent).await;
                }
            });
        }
    }

    /// Asks all agents to leave: their control streams end, and idle tunnels get a drain notice.
    pub(crate) fn leave(&self) {
        self.leaving.send_replace(true);
        let open: Vec<Arc<Open>> = self.open.lock().values().cloned().collect();
        for open in open {
            let tunnels: Vec<Arc<Tunnel>> = open.tunnels.lock().iter().filter_map(Weak::upgrade).collect();
            for tunnel in tunnels {
                self.registry.retire(&tunnel, Retire::Notice);
            }
        }
    }

    fn connection_id(hello: Hello, agent: AgentId) -> ConnectionId {
        ConnectionId::of_instance(agent, &hello.connection.to_be_bytes())
    }

    fn lease(&self, hello: Hello, agent: AgentId) -> Lease {
        self.backend.connection(Connection {
            agent,
            name: format!("agent-{agent}").into(),
            project_id: 1,
            id: Self::connection_id(hello, agent),
            meta: AgentMeta::default(),
            connected_at: process::clock::wall(),
        })
    }

    async fn control(&self, mut stream: Stream, hello: Hello, agent: AgentId) {
        let key = (hello.agent, hello.connection);
        let open = Arc::new(Open { over: watch::Sender::new(false), tunnels: Mutex::default() });
        self.registry.transport_opened(agent);
        self.open.lock().insert(key, Arc::clone(&open));
        let lease = self.lease(hello, agent);
        let mut leaving = self.leaving.subscribe();
        if stream.write_all(&[ACCEPTED]).await.is_ok() {
            tokio::select! {
                biased;
                () = is_set(&mut leaving) => {}
                () = keep(&mut stream) => {}
            }
        }
        drop(lease);
        if *self.leaving.borrow() {
            // The configuration stream has ended, and the connection stays for its requests.
            if stream.write_all(&[LEAVES]).await.is_ok() {
                keep(&mut stream).await;
            }
        }
        self.open.lock().remove(&key);
        open.over.send_replace(true);
        self.registry.transport_closed(agent, hello.connection);
    }

    async fn tunnel(&self, stream: Stream, hello: Hello, agent: AgentId) {
        let Some(open) = self.open.lock().get(&(hello.agent, hello.connection)).cloned() else { return };
        let mut over = open.over.subscribe();
        let serve = self.serve(stream, hello, agent, &open);
        tokio::select! {
            biased;
            () = is_set(&mut over) => {}
            () = serve => {}
        }
    }

    async fn serve(&self, stream: Stream, hello: Hello, agent: AgentId, open: &Open) {
        stream.reset_on_drop();
        let (read, mut write) = tokio::io::split(stream);
        let mut opening = Opening::new(grpc::boxed(ReadBody::new(read)), false);
        let Ok(descriptor) = read_descriptor(&mut opening).await else { return };
        let info = Info {
            agent,
            instance: hello.connection,
            token: TokenHash::of(&hello.agent.to_be_bytes()),
            kind: AgentKind::Ours,
            features: Features::NONE,
            version: None,
            descriptor: Arc::new(descriptor),
        };
        let cancelled = Arc::new(Notify::new());
        let cancel = Arc::clone(&cancelled);
        let pool = Arc::clone(&self.pool);
        let (tunnel, mut body) = Tunnel::new(info, opening, pool, Box::new(move || cancel.notify_one()));
        let connection = Self::connection_id(hello, agent);
        {
            let mut tunnels = open.tunnels.lock();
            tunnels.retain(|tunnel| tunnel.strong_count() > 0);
            tunnels.push(Arc::downgrade(&tunnel));
        }
        self.registry.insert(&tunnel, Some(connection));
        let _present = Present::new(&self.recorder, hello.agent, &self.replica, connection.get());
        if *self.leaving.borrow() {
            self.registry.retire(&tunnel, Retire::Ok);
        }
        drop(tunnel);
        let pump = async {
            while let Some(frame) = body.frame().await {
                match frame.map(http_body::Frame::into_data) {
                    Ok(Ok(data)) => write.write_all(&data).await?,
                    // The status. There is no place for it without HTTP/2.
                    Ok(Err(_)) => break,
                    Err(error) => return Err(std::io::Error::other(error)),
                }
            }
            write.shutdown().await
        };
        tokio::select! {
            biased;
            () = cancelled.notified() => {}
            // An error is one of the connection, which is reset then.
            _ = pump => {}
        }
    }
}
