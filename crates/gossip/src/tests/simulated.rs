//! A simulated network, for tests that would take long with the clock of the machine.

use std::{
    collections::{HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddrV4},
    sync::Weak,
    task::{Context, Poll, Waker},
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::*;
use crate::simulation::{Datagrams, Envelopes};

/// A network on which datagrams arrive at once, or are lost. All processes run on the runtime of the test, so
/// the clock is that of the test.
#[derive(Clone)]
pub(super) struct Network {
    envelopes: Envelopes,
    hosts: Arc<Mutex<Hosts>>,
}

struct Hosts {
    /// Those that have started.
    ports: HashMap<SocketAddr, Weak<Port>>,
    /// How many addresses have been given out.
    addresses: u32,
    /// No datagram reaches these.
    shut: HashSet<SocketAddr>,
    /// Percentage of the datagrams that are lost.
    loss: u32,
    random: StdRng,
}

impl Network {
    pub(super) fn new() -> Self {
        let hosts = Hosts {
            ports: HashMap::new(),
            addresses: 0,
            shut: HashSet::new(),
            loss: 0,
            random: StdRng::seed_from_u64(1),
        };
        Self { envelopes: Envelopes::default(), hosts: Arc::new(Mutex::new(hosts)) }
    }

    /// Returns an address that no other process has.
    pub(super) fn address(&self) -> SocketAddr {
        let mut hosts = self.hosts.lock();
        hosts.addresses += 1;
        SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::from_bits(0x0a00_0000 + hosts.addresses), 8155))
    }

    /// Whether all datagrams to this address are lost.
    pub(super) fn shut(&self, address: SocketAddr, is_shut: bool) {
        let mut hosts = self.hosts.lock();
        if is_shut {
            hosts.shut.insert(address);
        } else {
            hosts.shut.remove(&address);
        }
    }

    fn lose(&self, percentage: u32) {
        self.hosts.lock().loss = percentage;
    }

    /// Returns a process with the timing of tests.
    pub(super) fn builder(&self, id: &str) -> Builder {
        self.builder_at(id, self.address())
    }

    /// As [`Network::builder`], with an address of [`Network::address`].
    pub(super) fn builder_at(&self, id: &str, address: SocketAddr) -> Builder {
        let port = Arc::new(Port { address, hosts: Arc::clone(&self.hosts), arrived: Mutex::default() });
        self.hosts.lock().ports.insert(address, Arc::downgrade(&port));
        builder(id).simulated(port, self.envelopes.clone())
    }

    pub(super) async fn start(&self, id: &str, peers: &[&Gossip]) -> Gossip {
        self.builder(id).seeds(known(peers)).start().await.unwrap()
    }

    /// Starts a process with the timing that is shipped.
    async fn shipped(&self, id: &str, peers: &[&Gossip]) -> Gossip {
        self.builder(id).timing(Timing::default()).seeds(known(peers)).start().await.unwrap()
    }
}

fn known(peers: &[&Gossip]) -> watch::Receiver<HashSet<SocketAddr>> {
    seeds(&peers.iter().map(|peer| peer.local_addr()).collect::<Vec<_>>())
}

/// The datagrams of a process.
struct Port {
    address: SocketAddr,
    hosts: Arc<Mutex<Hosts>>,
    arrived: Mutex<(VecDeque<Vec<u8>>, Option<Waker>)>,
}

impl Datagrams for Port {
    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn send(&self, to: SocketAddr, datagram: &[u8]) {
        let port = {
            let mut hosts = self.hosts.lock();
            let loss = hosts.loss;
            let is_lost = hosts.random.random_range(0..100) < loss || hosts.shut.contains(&to);
            hosts.ports.get(&to).and_then(Weak::upgrade).filter(|_| !is_lost)
        };
        let Some(port) = port else { return };
        let mut arrived = port.arrived.lock();
        arrived.0.push_back(datagram.to_vec());
        if let Some(waker) = arrived.1.take() {
            waker.wake();
        }
    }

    fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<usize> {
        let mut arrived = self.arrived.lock();
        let Some(datagram) = arrived.0.pop_front() else {
            arrived.1 = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let len = datagram.len().min(buffer.len());
        buffer[..len].copy_from_slice(&datagram[..len]);
        Poll::Ready(len)
    }
}

#[tokio::test(start_paused = true)]
async fn a_crash_is_seen_within_three_seconds() {
    let network = Network::new();
    let a = network.shipped("a", &[]).await;
    let b = network.shipped("b", &[&a]).await;
    let c = network.shipped("c", &[&a]).await;
    meshed(&[&a, &b, &c]).await;
    // Early samples raise the threshold of the detector.
    traffic(&a, 200).await;
    let crash = Instant::now();
    drop(c);
    until(a.members(), "c is gone", |m| m.len() == 1).await;
    until(b.members(), "c is gone", |m| m.len() == 1).await;
    let took = crash.elapsed();
    assert!(took > Timing::default().interval && took < Duration::from_secs(3), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn losing_every_third_datagram_drops_no_member() {
    let network = Network::new();
    network.lose(33);
    let a = network.shipped("a", &[]).await;
    let b = network.shipped("b", &[&a]).await;
    let c = network.shipped("c", &[&a]).await;
    let nodes = [&a, &b, &c];
    meshed(&nodes).await;
    let recordings = nodes.map(Recording::of);
    for turn in 0..20 {
        let turn = turn.to_string();
        a.publish("turn", &turn).unwrap();
        sees(&b, "a", "turn", &turn).await;
        sees(&c, "a", "turn", &turn).await;
        traffic(&a, 40).await;
    }
    assert!(
        recordings.iter().all(|recording| recording.all(|members| members.len() == 2)),
        "a live member was dropped"
    );
    // The detector sees them: all datagrams are lost, and so are the members.
    network.lose(100);
    until(a.members(), "all are gone", |m| m.is_empty()).await;
}
