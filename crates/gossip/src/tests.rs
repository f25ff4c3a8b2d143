//! Several processes of a mesh in one test process, over loopback, or a simulated network. All ports are 0,
//! all waits have a deadline.

mod health;
mod mesh;
mod partitions;
mod restarts;
mod security;
mod simulated;

use std::{
    collections::{BTreeSet, HashSet},
    future::Future,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::UdpSocket,
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    Builder, Gossip, KeyRing, MAX_KEYS, MAX_VALUE, Members, PublishError, Reason, Restart, StartError,
    Status, Timing,
    flaw::{self, Flaw, must_fail_with},
    node,
    seal::{Accepted, Identity, Opener, Sealer},
};

const DEADLINE: Duration = Duration::from_secs(30);
const OLD: &str = "the old secret, of more than 32 bytes";
const NEW: &str = "the new secret, of more than 32 bytes";

/// Runs a test without and with a flaw, with which it must fail.
fn exhibit<F: Future<Output = ()>>(flaw: Flaw, test: impl Fn() -> F) {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    };
    run();
    must_fail_with(flaw, run);
}

/// As [`exhibit`], with the clock of the test, for processes on a simulated network.
fn exhibit_paused<F: Future<Output = ()>>(flaw: Flaw, test: impl Fn() -> F) {
    let run = || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(test());
    };
    run();
    must_fail_with(flaw, run);
}

/// How long anything may take. With a flaw it will not happen.
fn deadline() -> Duration {
    if flaw::active().is_some() { Duration::from_secs(2) } else { DEADLINE }
}

/// Fast, but with a phi that tolerates a busy machine.
fn timing() -> Timing {
    Timing {
        interval: Duration::from_millis(50),
        phi: 20.0,
        initial_interval: Duration::from_millis(50),
        ..Timing::default()
    }
}

fn ring(secrets: &[&str]) -> Arc<KeyRing> {
    Arc::new(KeyRing::derive(secrets).unwrap())
}

/// Returns a watch that stays open.
fn fixed<T: Send + Sync + 'static>(value: T) -> watch::Receiver<T> {
    let (keep, watch) = watch::channel(value);
    std::mem::forget(keep);
    watch
}

fn seeds(addresses: &[SocketAddr]) -> watch::Receiver<HashSet<SocketAddr>> {
    fixed(addresses.iter().copied().collect())
}

fn builder(id: &str) -> Builder {
    Gossip::builder(id).cluster("test").keys(fixed(ring(&[OLD]))).timing(timing())
}

async fn start(id: &str, peers: &[&Gossip]) -> Gossip {
    let addresses: Vec<_> = peers.iter().map(|peer| peer.local_addr()).collect();
    builder(id).seeds(seeds(&addresses)).start().await.unwrap()
}

/// Waits until the watched value meets the condition.
async fn until<T: Clone>(mut watch: watch::Receiver<T>, what: &str, wanted: impl Fn(&T) -> bool) -> T {
    let most = deadline();
    match timeout(most, watch.wait_for(|value| wanted(value))).await {
        Ok(value) => value.unwrap().clone(),
        Err(_) => panic!("not within {most:?}: {what}"),
    }
}

/// Waits until a condition without a watch is met, such as the value of a counter.
async fn eventually(what: &str, wanted: impl Fn() -> bool) {
    let until = Instant::now() + deadline();
    while !wanted() {
        assert!(Instant::now() < until, "not in time: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until each process sees all others.
async fn meshed(nodes: &[&Gossip]) {
    for node in nodes {
        until(node.members(), "meshed", |members| members.len() == nodes.len() - 1).await;
    }
}

/// Waits until `node` has sent this many more datagrams. This gives the mesh time to act, without a clock.
async fn traffic(node: &Gossip, datagrams: u64) {
    let counters = node.counters();
    let goal = counters.sent.count() + datagrams;
    eventually("traffic", || counters.sent.count() >= goal).await;
}

async fn sees(node: &Gossip, peer: &str, key: &str, value: &str) -> Arc<Members> {
    let what = format!("{peer} has {key}={value}");
    until(node.members(), &what, |m| m.member(peer).is_some_and(|m| m.value(key) == Some(value))).await
}

/// Records every list of members that a watch shows, until dropped.
struct Recording {
    lists: Arc<Mutex<Vec<Arc<Members>>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Recording {
    fn of(node: &Gossip) -> Self {
        let mut members = node.members();
        let lists = Arc::new(Mutex::new(vec![Arc::clone(&members.borrow_and_update())]));
        let take = Arc::clone(&lists);
        let task = tokio::spawn(async move {
            while members.changed().await.is_ok() {
                take.lock().push(Arc::clone(&members.borrow_and_update()));
            }
        });
        Self { lists, task }
    }

    fn all(&self, holds: impl Fn(&Members) -> bool) -> bool {
        self.lists.lock().iter().all(|list| holds(list))
    }

    fn generations(&self, id: &str) -> Vec<u64> {
        let lists = self.lists.lock();
        lists.iter().filter_map(|list| list.member(id).map(|m| m.generation())).collect()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A proxy in front of a process: it passes on the datagrams that are sent to the process, or drops them.
struct Proxy {
    address: SocketAddr,
    target: watch::Sender<Option<SocketAddr>>,
    refused: Arc<Mutex<HashSet<SocketAddr>>>,
    is_shut: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    async fn open() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let (target, to) = watch::channel(None);
        let (refused, is_shut) = (Arc::new(Mutex::new(HashSet::new())), Arc::new(AtomicBool::new(false)));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let task = {
            let (refused, is_shut) = (Arc::clone(&refused), Arc::clone(&is_shut));
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                let mut buffer = vec![0; 65_536];
                loop {
                    let Ok((len, from)) = socket.recv_from(&mut buffer).await else { continue };
                    let target = *to.borrow();
                    if is_shut.load(Ordering::Relaxed) || refused.lock().contains(&from) {
                        continue;
                    }
                    if let Some(target) = target {
                        seen.lock().push(buffer[..len].to_vec());
                        let _ = socket.send_to(&buffer[..len], target).await;
                    }
                }
            })
        };
        Self { address, target, refused, is_shut, seen, task }
    }

    async fn start(&self, id: &str, peers: &[SocketAddr]) -> Gossip {
        let gossip = builder(id).advertise(self.address).seeds(seeds(peers)).start().await.unwrap();
        self.target.send_replace(Some(gossip.local_addr()));
        gossip
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn boxed<T>(future: impl Future<Output = T>) -> impl Future<Output = T> {
    // On the heap, because clippy's `large_futures` applies to tests too.
    Box::pin(future)
}
