//! [`Builder`]: checks the settings, binds the port and starts the gossip thread.

use std::{collections::HashSet, io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    counters::Counters,
    handle::Gossip,
    members::Status,
    node,
    publish::{self, PublishError},
    seal::{self, KeyRing},
    state::State,
    timing::{HealthGate, Timing},
    transport::{self, Outer},
};

/// The receive buffer that is requested, in bytes; the kernel grants at most `net.core.rmem_max`. The usual
/// 208 KiB hold only a few messages when many peers answer at once.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Why the mesh did not start. Nothing keeps running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The caller's fault: see [`Gossip::builder`].
    #[error("the node id is not 1 to {} printable ASCII bytes", seal::MAX_NODE_ID)]
    NodeId,
    /// The caller's fault: the cluster name is empty or longer than 256 bytes.
    #[error("the cluster name is not 1 to 256 bytes")]
    Cluster,
    /// The caller's fault: [`Builder::keys`] was not called.
    #[error("no key ring was given")]
    Keys,
    /// The caller's fault: a time is zero or too long (interval 60 s, initial interval 10 min, grace 30
    /// days), or phi is not above 1.
    #[error("the timing is invalid")]
    Timing,
    /// The caller's fault: key or value of the health gate cannot be published.
    #[error("the health gate is invalid")]
    HealthGate(#[source] PublishError),
    /// The process listens on all addresses, which does not tell how peers reach it: call
    /// [`Builder::advertise`].
    #[error("no address to advertise")]
    Advertise,
    /// The UDP port could not be bound.
    #[error("cannot listen on {address}")]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system gave no thread, random bytes or loopback sockets.
    #[error("cannot start the gossip thread")]
    Thread(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The settings of a process of the mesh; made by [`Gossip::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    node_id: String,
    cluster: String,
    listen: SocketAddr,
    advertise: Option<SocketAddr>,
    keys: Option<watch::Receiver<Arc<KeyRing>>>,
    seeds: Option<watch::Receiver<HashSet<SocketAddr>>>,
    timing: Timing,
    health_gate: Option<HealthGate>,
    deaf_after: Option<Duration>,
    #[cfg(any(test, feature = "simulation"))]
    network: Option<crate::simulation::Network>,
    #[cfg(test)]
    generation: Option<u64>,
}

impl Gossip {
    /// Returns the builder of a process with this node id: 1 to 128 printable ASCII bytes, unique in the
    /// cluster and the same after a restart (a pod's uid, or host:port). It is sent in the clear.
    pub fn builder(node_id: impl Into<String>) -> Builder {
        Builder {
            node_id: node_id.into(),
            cluster: "default".to_owned(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            keys: None,
            seeds: None,
            timing: Timing::default(),
            health_gate: None,
            deaf_after: None,
            #[cfg(any(test, feature = "simulation"))]
            network: None,
            #[cfg(test)]
            generation: None,
        }
    }
}

impl Builder {
    /// Sets the name of the cluster. It is bound into every datagram: processes of another cluster are not
    /// heard, whatever the seeds are. Default: `default`.
    #[must_use]
    pub fn cluster(mut self, name: impl Into<String>) -> Self {
        self.cluster = name.into();
        self
    }

    /// Binds this UDP address; port 0 takes a free one. Default: a free port of 127.0.0.1.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = address;
        self
    }

    /// Sets the address that peers send to. Default: the bound address.
    #[must_use]
    pub fn advertise(mut self, address: SocketAddr) -> Self {
        self.advertise = Some(address);
        self
    }

    /// Seals and opens with the current key ring. A changed ring is used from the next datagram on.
    #[must_use]
    pub fn keys(mut self, keys: watch::Receiver<Arc<KeyRing>>) -> Self {
        self.keys = Some(keys);
        self
    }

    /// Looks for others at these addresses. A changed set is used at once. An empty set is ignored, because a
    /// mesh without seeds never recovers from a partition. The own address is ignored. Default: none.
    #[must_use]
    pub fn seeds(mut self, seeds: watch::Receiver<HashSet<SocketAddr>>) -> Self {
        self.seeds = Some(seeds);
        self
    }

    /// Sets the timing.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Publishes `value` under `key` in place of the published value while
    /// [`Heartbeat::beat`](crate::Heartbeat::beat) was not called for `after`. Does nothing if nothing is
    /// published under `key`. The time counts from the start, and does not advance while the whole process is
    /// paused.
    #[must_use]
    pub fn health_gate(mut self, key: impl Into<String>, value: impl Into<String>, after: Duration) -> Self {
        self.health_gate = Some(HealthGate { key: key.into(), value: value.into(), after });
        self
    }

    /// Makes this process silent when no other process has reached it for `after` (at least 10 intervals), if
    /// one ever did: no datagram was accepted, [`Gossip::reached`] was not called, and there is no
    /// [`Hold`](crate::Hold). To the others it then looks dead, and for them it is: otherwise they would send
    /// requests to it for as long as they hear it. A silent process still probes its peers, and speaks again
    /// with the first answer. The time does not advance while the whole process is paused. Default: never.
    #[must_use]
    pub fn silence_if_deaf(mut self, after: Duration) -> Self {
        self.deaf_after = Some(after);
        self
    }

    /// Uses these datagrams and not a port of UDP, and runs on the runtime of the caller and not on a thread
    /// of its own.
    #[cfg(any(test, feature = "simulation"))]
    #[must_use]
    pub fn simulated(
        mut self,
        datagrams: Arc<dyn crate::simulation::Datagrams>,
        envelopes: crate::simulation::Envelopes,
    ) -> Self {
        self.network = Some(crate::simulation::Network { datagrams, envelopes });
        self
    }

    /// Where datagrams go: returns the port, and its address.
    fn bind(&self) -> io::Result<(Port, SocketAddr)> {
        #[cfg(any(test, feature = "simulation"))]
        if let Some(network) = &self.network {
            return Ok((Port::Simulated(network.clone()), network.datagrams.local_addr()));
        }
        let socket = bind_udp(self.listen)?;
        let local = socket.local_addr()?;
        Ok((Port::Udp(socket), local))
    }

    /// Starts with this generation, as if the clock had returned it.
    #[cfg(test)]
    pub(crate) fn generation(mut self, generation: u64) -> Self {
        self.generation = Some(generation);
        self
    }

    fn check(&self) -> Result<(), StartError> {
        if !seal::valid_node_id(&self.node_id) {
            return Err(StartError::NodeId);
        }
        if !(1..=256).contains(&self.cluster.len()) {
            return Err(StartError::Cluster);
        }
        if !self.timing.is_valid() {
            return Err(StartError::Timing);
        }
        match &self.health_gate {
            Some(gate) => publish::is_fit(&gate.key, &gate.value).map_err(StartError::HealthGate),
            None => Ok(()),
        }
    }

    /// Binds the port and starts the thread.
    ///
    /// # Errors
    /// [`StartError`] if the settings are invalid or the system refuses.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing keeps running.
    pub async fn start(self) -> Result<Gossip, StartError> {
        self.check()?;
        let mut keys = self.keys.clone().ok_or(StartError::Keys)?;
        let bind = |source| StartError::Bind { address: self.listen, source };
        let (port, local) = self.bind().map_err(bind)?;
        // Without seeds: a closed watch of an empty set.
        let seeds = self.seeds.unwrap_or_else(|| watch::channel(HashSet::new()).1);
        let advertise = self.advertise.unwrap_or(local);
        if advertise.ip().is_unspecified() || advertise.port() == 0 {
            return Err(StartError::Advertise);
        }
        // In the form of the frame, so that a mapped IPv4 address does not look like a second address.
        let advertise = SocketAddr::new(advertise.ip().to_canonical(), advertise.port());

        let thread = |error: Box<dyn std::error::Error + Send + Sync>| StartError::Thread(error);
        let mut salt = seal::Salt::default();
        aws_lc_rs::rand::fill(&mut salt).map_err(|error| thread(Box::new(error)))?;
        #[cfg(test)]
        let generation = self.generation.unwrap_or_else(node::wall);
        #[cfg(not(test))]
        let generation = node::wall();

        let node_id: Arc<str> = self.node_id.into();
        let ring = Arc::clone(&keys.borrow_and_update());
        let identity = seal::Identity { node_id: Arc::clone(&node_id), generation, address: advertise, salt };
        let sealer = seal::Sealer::new(&ring, &self.cluster, identity);
        let opener = seal::Opener::new(&ring, &self.cluster, salt);

        let counters = Arc::new(Counters::default());
        let state = Arc::new(State::default());
        let (members, members_rx) = watch::channel(Arc::default());
        let (status, status_rx) = watch::channel(Status::Alone);
        let (hello, hellos) = mpsc::channel(64);
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = oneshot::channel();
        #[cfg(test)]
        let flaw = crate::flaw::active();
        #[cfg(test)]
        let (link_out, link_in) = std::sync::mpsc::sync_channel(1);
        let serve = {
            let (counters, state) = (Arc::clone(&counters), Arc::clone(&state));
            let (cluster, timing) = (self.cluster, self.timing);
            let (health_gate, deaf_after) = (self.health_gate, self.deaf_after);
            move |outer: io::Result<Outer>, ready: oneshot::Sender<anyhow::Result<()>>| async move {
                let link = outer.and_then(|outer| {
                    let reachability = Arc::clone(&state.reachability);
                    transport::Link::new(outer, sealer, opener, counters.clone(), hello, reachability)
                });
                let link = match link {
                    Ok(link) => Arc::new(link),
                    Err(error) => return drop(ready.send(Err(error.into()))),
                };
                #[cfg(test)]
                let _ = link_out.send(Arc::clone(&link));
                let node = node::Node {
                    node_id,
                    cluster,
                    advertise,
                    local,
                    timing,
                    health_gate,
                    deaf_after,
                    link,
                    state,
                    counters,
                    keys,
                    seeds,
                    hellos,
                    stop: stopped,
                    members,
                    status,
                };
                node.run(generation, ready).await;
            }
        };
        match port {
            Port::Udp(socket) => {
                let run = move || {
                    #[cfg(test)]
                    crate::flaw::inherit(flaw);
                    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                        Ok(runtime) => runtime.block_on(async move {
                            // Sockets belong to the runtime that drives them.
                            serve(tokio::net::UdpSocket::from_std(socket).map(Outer::Udp), ready).await;
                        }),
                        Err(error) => drop(ready.send(Err(error.into()))),
                    }
                };
                std::thread::Builder::new()
                    .name("gossip".to_owned())
                    .spawn(run)
                    .map_err(|error| thread(Box::new(error)))?;
            }
            #[cfg(any(test, feature = "simulation"))]
            Port::Simulated(network) => drop(tokio::spawn(serve(Ok(Outer::Simulated(network)), ready))),
        }
        match started.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(thread(error.into())),
            Err(error) => return Err(thread(Box::new(error))),
        }
        Ok(Gossip {
            local,
            state,
            counters,
            members: members_rx,
            status: status_rx,
            stop: Some(stop),
            #[cfg(test)]
            link: link_in.recv().expect("sent before it was ready"),
        })
    }
}

/// Where datagrams go.
enum Port {
    Udp(std::net::UdpSocket),
    #[cfg(any(test, feature = "simulation"))]
    Simulated(crate::simulation::Network),
}

fn bind_udp(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        // Both families, whatever the system's default is.
        socket.set_only_v6(false)?;
    }
    // The kernel grants less if its limit is lower, which is not an error.
    let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
