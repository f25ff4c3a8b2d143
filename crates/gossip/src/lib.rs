//! Who is alive: a small mesh of processes over sealed datagrams.
//!
//! Each process names itself, publishes a few short values, and sees the live others with theirs. There is no
//! leader, no store and no quorum: [chitchat](https://docs.rs/chitchat) gossips everything to everybody (up
//! to some hundred processes), and this crate seals its datagrams, runs it on a thread of its own, and
//! starts it again when it breaks.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::{collections::HashSet, sync::Arc};
//! let keys = gossip::KeyRing::derive(&["a secret of at least 32 bytes, please"])?;
//! let (_rotate, keys) = tokio::sync::watch::channel(Arc::new(keys));
//! let (_found, seeds) = tokio::sync::watch::channel(HashSet::from(["10.0.0.7:8155".parse()?]));
//! let gossip = gossip::Gossip::builder("pod-1")
//!     .cluster("production")
//!     .listen("10.0.0.8:8155".parse()?)
//!     .keys(keys)
//!     .seeds(seeds)
//!     .start()
//!     .await?;
//! gossip.publish("st", "ready")?;
//! let mut members = gossip.members();
//! while members.changed().await.is_ok() {
//!     println!("{:?}", members.borrow_and_update());
//! }
//! # Ok(()) }
//! ```
//!
//! # What it promises
//!
//! With the default [`Timing`] and a network that carries datagrams both ways:
//!
//! - A value reaches every live member within a few intervals; of each key the last value wins.
//! - A crash is seen by all in about 1 to 1.5 s; being busy is not taken for death, since gossip has its own
//!   thread (give [`Gossip::pulse`] a beat, so that a hung main runtime does show).
//! - A process that stood still itself takes nobody for dead because of that: for five intervals afterwards the members are
//!   those of before.
//! - Of each node id only the newest incarnation is a member, and its generation never goes back.
//! - A process that is heard but hears nobody falls silent and is forgotten, if it is told to ([`Builder::hush`]).
//! - Without a key, nothing gets in and nothing is decoded: junk is counted by [`Reason`] and forgotten.
//! - A gossip task that panics or freezes is replaced within seconds, and members do not blink meanwhile.
//!
//! # What it does not
//!
//! - Agree. Two processes may see different members for a moment, or for as long as a partition lasts. Take
//!   [`Members`] as a hint and ask the member itself.
//! - Tell a dead process from an unreachable one, or a planned stop from a crash: publish that first.
//! - Protect from its members: whoever has the key may claim anything, a flood and a crash of chitchat included
//!   (it is restarted). See [`seal`] for what recorded datagrams are good for.
//! - Work between clocks that are more than a day apart: a generation from the future is refused, because it
//!   would claim its node id for good. Nothing else uses the wall clock.
//! - Carry bulk: [`MAX_KEYS`] keys of [`MAX_VALUE`] bytes, and no way to take a key back.

mod counters;
mod members;
mod node;
mod publish;
pub mod seal;
#[cfg(test)]
mod tests;
mod transport;

use std::{
    collections::HashSet,
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};

pub use counters::{Counter, Counters, Reason, Restart};
pub use members::{Member, Members, Status};
pub use publish::{MAX_KEY, MAX_KEYS, MAX_VALUE, PublishError};
pub use seal::{KeyError, KeyRing};

/// Receive buffer asked for, in bytes; the kernel gives what `net.core.rmem_max` allows. The usual 208 KiB is
/// a few messages at a time when many peers answer at once.
const RECEIVE_BUFFER: usize = 4 << 20;

/// How fast the mesh beats, and how soon a silent member counts as dead.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Between gossip rounds. Each sends to at most five others. Shorter finds deaths sooner and costs more
    /// datagrams; 200 ms was measured at 11 KB/s with 30 processes.
    pub interval: Duration,
    /// A member is dead after this many of its mean heartbeat intervals. 8 had no false deaths with 30 % of
    /// the datagrams lost.
    pub phi: f64,
    /// What is taken for the mean interval of a newcomer. More than twice `interval` makes the mesh slow to
    /// see a second death of the same process.
    pub initial_interval: Duration,
    /// How long a dead incarnation is remembered, so that nobody brings it back. It is gossiped for half of
    /// that: 24 h and rolling restarts of 100 processes overflow chitchat's digest. Who hears of it in that time
    /// remembers it for a grace of its own: where processes come more often than every half grace, and live longer
    /// than that, it is passed on for as long as they do. [`Counters::incarnations`] shows how many there are.
    pub dead_grace: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(200),
            phi: 8.0,
            initial_interval: Duration::from_millis(300),
            dead_grace: Duration::from_secs(600),
        }
    }
}

/// Why the mesh did not start. Nothing is left behind.
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
    /// The caller's fault: a time that is zero or too long (interval 60 s, initial interval 10 min, grace 30
    /// days), or a phi that is not above 1.
    #[error("the timing cannot work")]
    Timing,
    /// The caller's fault: the gate's key or value could not be published.
    #[error("the gate does not fit")]
    Gate(#[source] PublishError),
    /// Listening on all addresses does not say which one peers reach: call [`Builder::advertise`].
    #[error("no address to advertise")]
    Advertise,
    /// The UDP port could not be bound.
    #[error("cannot listen on {address}")]
    Bind {
        /// What was asked for.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system gave no thread, random bytes or loopback sockets.
    #[error("cannot start the gossip thread")]
    Thread(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// What is published while the main runtime hangs.
#[derive(Debug, Clone)]
struct Gate {
    key: String,
    value: String,
    after: Duration,
}

/// What to start; made by [`Gossip::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    node_id: String,
    cluster: String,
    listen: SocketAddr,
    advertise: Option<SocketAddr>,
    keys: Option<watch::Receiver<Arc<KeyRing>>>,
    seeds: Option<watch::Receiver<HashSet<SocketAddr>>>,
    timing: Timing,
    gate: Option<Gate>,
    hush: Option<Duration>,
    #[cfg(test)]
    generation: Option<u64>,
}

impl Builder {
    /// Names the cluster. It is bound into every datagram: processes of another one are not heard, whatever
    /// seeds say. Default: `default`.
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

    /// Tells peers to send here. Default: the bound address.
    #[must_use]
    pub fn advertise(mut self, address: SocketAddr) -> Self {
        self.advertise = Some(address);
        self
    }

    /// Seals and opens with the current key ring; a changed one is used from the next datagram on.
    #[must_use]
    pub fn keys(mut self, keys: watch::Receiver<Arc<KeyRing>>) -> Self {
        self.keys = Some(keys);
        self
    }

    /// Looks for others here. A changed set is used at once; an empty one keeps the last, because a mesh
    /// without seeds never heals from a partition. Our own address in it is ignored. Default: none.
    #[must_use]
    pub fn seeds(mut self, seeds: watch::Receiver<HashSet<SocketAddr>>) -> Self {
        self.seeds = Some(seeds);
        self
    }

    /// Sets the pace.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// While [`Pulse::beat`] was not called for `after`, publishes `value` in place of what was published under
    /// `key`; nothing when nothing was. The time runs from the start, and stands still while the whole
    /// process is paused.
    #[must_use]
    pub fn gate(mut self, key: impl Into<String>, value: impl Into<String>, after: Duration) -> Self {
        self.gate = Some(Gate { key: key.into(), value: value.into(), after });
        self
    }

    /// Falls silent when nobody has reached this process for `after` (at least 10 intervals), after somebody once
    /// did: no datagram of another was accepted, [`Gossip::reached`] was not called, and there is no [`Hold`]. To
    /// the others it then looks dead, which for them it is; without this they would believe in it for as long as
    /// they hear it. It goes on knocking where it would gossip, and speaks again with the first answer. The time
    /// stands still while the whole process is paused. Default: never.
    #[must_use]
    pub fn hush(mut self, after: Duration) -> Self {
        self.hush = Some(after);
        self
    }

    /// Starts with this generation, as if the clock said so.
    #[cfg(test)]
    fn generation(mut self, generation: u64) -> Self {
        self.generation = Some(generation);
        self
    }

    /// Binds the port and starts the thread.
    ///
    /// # Errors
    /// [`StartError`] when the settings cannot work or the system refuses.
    ///
    /// # Cancel safety
    /// A start that is dropped leaves nothing running.
    pub async fn start(self) -> Result<Gossip, StartError> {
        if !seal::valid_node_id(&self.node_id) {
            return Err(StartError::NodeId);
        }
        if !(1..=256).contains(&self.cluster.len()) {
            return Err(StartError::Cluster);
        }
        let Timing { interval, phi, initial_interval, dead_grace } = self.timing;
        let fits = |time: Duration, most: u64| !time.is_zero() && time <= Duration::from_secs(most);
        let works = fits(interval, 60) && fits(initial_interval, 600) && fits(dead_grace, 30 * 86_400);
        if !works || !phi.is_finite() || phi <= 1.0 {
            return Err(StartError::Timing);
        }
        if let Some(gate) = &self.gate {
            publish::is_fit(&gate.key, &gate.value).map_err(StartError::Gate)?;
        }
        let mut keys = self.keys.ok_or(StartError::Keys)?;
        // A closed watch of an empty set: seeds that never come.
        let seeds = self.seeds.unwrap_or_else(|| watch::channel(HashSet::new()).1);

        let bind = |source| StartError::Bind { address: self.listen, source };
        let socket = bind_udp(self.listen).map_err(bind)?;
        let local = socket.local_addr().map_err(bind)?;
        let advertise = self.advertise.unwrap_or(local);
        if advertise.ip().is_unspecified() || advertise.port() == 0 {
            return Err(StartError::Advertise);
        }
        // As the frame writes it, so that a mapped IPv4 address does not look like a second one.
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
        let shared = Arc::new(node::Shared::default());
        let (members, members_rx) = watch::channel(Arc::default());
        let (status, status_rx) = watch::channel(Status::Alone);
        let (hello, hellos) = mpsc::channel(64);
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = oneshot::channel();
        #[cfg(test)]
        let (link_out, link_in) = std::sync::mpsc::sync_channel(1);
        let run = {
            let (counters, shared) = (Arc::clone(&counters), Arc::clone(&shared));
            let (cluster, timing, gate, hush) = (self.cluster, self.timing, self.gate, self.hush);
            move || {
                let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(ready.send(Err(error.into()))),
                };
                runtime.block_on(async move {
                    // Sockets belong to the runtime that drives them.
                    let link = tokio::net::UdpSocket::from_std(socket).and_then(|outer| {
                        let company = Arc::clone(&shared.company);
                        transport::Link::new(outer, sealer, opener, counters.clone(), hello, company)
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
                        gate,
                        hush,
                        link,
                        shared,
                        counters,
                        keys,
                        seeds,
                        hellos,
                        stop: stopped,
                        members,
                        status,
                    };
                    node.run(generation, ready).await;
                });
            }
        };
        std::thread::Builder::new()
            .name("gossip".to_owned())
            .spawn(run)
            .map_err(|error| thread(Box::new(error)))?;
        match started.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(thread(error.into())),
            Err(error) => return Err(thread(Box::new(error))),
        }
        Ok(Gossip {
            local,
            shared,
            counters,
            members: members_rx,
            status: status_rx,
            stop: Some(stop),
            #[cfg(test)]
            link: link_in.recv().expect("sent before it was ready"),
        })
    }
}

fn bind_udp(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        // Both families, whatever the system's default is.
        socket.set_only_v6(false)?;
    }
    // As much as the kernel allows; less is not an error.
    let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// One process of the mesh. Dropping it stops its thread without a word to the others.
pub struct Gossip {
    local: SocketAddr,
    shared: Arc<node::Shared>,
    counters: Arc<Counters>,
    members: watch::Receiver<Arc<Members>>,
    status: watch::Receiver<Status>,
    stop: Option<oneshot::Sender<oneshot::Sender<()>>>,
    #[cfg(test)]
    link: Arc<transport::Link>,
}

impl Gossip {
    /// Begins to build a process with this node id: 1 to 128 printable ASCII bytes, unique in the cluster and
    /// the same after a restart (a pod's uid, or host:port). It travels in the clear.
    pub fn builder(node_id: impl Into<String>) -> Builder {
        Builder {
            node_id: node_id.into(),
            cluster: "default".to_owned(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            keys: None,
            seeds: None,
            timing: Timing::default(),
            gate: None,
            hush: None,
            #[cfg(test)]
            generation: None,
        }
    }

    /// Returns the bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns the generation of the current incarnation, in microseconds since 1970. It grows when the gossip
    /// task is restarted.
    pub fn generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Relaxed)
    }

    /// Publishes a value, in place of an earlier one of the same key. It leaves with the next gossip round and
    /// survives restarts of the gossip task. Never blocks; may be called from any thread.
    ///
    /// # Errors
    /// [`PublishError`] when it does not fit.
    pub fn publish(&self, key: &str, value: &str) -> Result<(), PublishError> {
        publish::is_fit(key, value)?;
        {
            let mut published = self.shared.published();
            let before = published.values.get(key);
            if before.is_some_and(|before| **before == *value) {
                return Ok(());
            }
            if before.is_none() && published.values.len() >= MAX_KEYS {
                return Err(PublishError::Full);
            }
            published.values.insert(key.into(), value.into());
            published.revision += 1;
        }
        self.shared.news.notify_one();
        Ok(())
    }

    /// Returns the live others. It changes when one comes, goes or restarts, at most once per interval, and as soon
    /// as published values arrive; not when only [`Member::heard`] moves. The watch closes when the thread stops.
    pub fn members(&self) -> watch::Receiver<Arc<Members>> {
        self.members.clone()
    }

    /// Returns whether anybody is heard.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Returns the pulse that the main runtime must beat when there is a [`Builder::gate`].
    pub fn pulse(&self) -> Pulse {
        Pulse(Arc::clone(&self.shared))
    }

    /// Says that another process has just answered this one, in another way than by gossip; see
    /// [`Builder::hush`]. Never blocks; may be called from any thread.
    pub fn reached(&self) {
        self.shared.company.sign();
    }

    /// Says the same for as long as the value lives: for a connection that ends when nobody answers on it.
    pub fn hold(&self) -> Hold {
        self.shared.company.hold();
        Hold(Arc::clone(&self.shared.company))
    }

    /// Returns the counters.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Passes on what was published last, for one interval, and stops the thread. To the others it then looks
    /// like a crash: publish the intent first.
    ///
    /// # Cancel safety
    /// Once polled, the thread stops in any case.
    pub async fn leave(mut self) {
        let (done, left) = oneshot::channel();
        if let Some(stop) = self.stop.take()
            && stop.send(done).is_ok()
        {
            // An error says that the thread is gone already.
            let _ = left.await;
        }
    }
}

impl std::fmt::Debug for Gossip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gossip").field("local", &self.local).finish_non_exhaustive()
    }
}

/// Somebody reaches this process while this lives; see [`Gossip::hold`].
#[derive(Debug)]
pub struct Hold(Arc<node::Company>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Shows the gossip thread that the main runtime turns. Cheap to clone and to beat.
#[derive(Clone)]
pub struct Pulse(Arc<node::Shared>);

impl Pulse {
    /// Says "I run". Call it from a task of the main runtime, at least three times per gate duration.
    pub fn beat(&self) {
        self.0.beats.fetch_add(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Pulse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pulse")
    }
}
