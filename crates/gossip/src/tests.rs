//! Several processes in one, over loopback. Ports are 0, waiting is on watches with a deadline.

use std::{
    collections::{BTreeSet, HashSet},
    future::Future,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::UdpSocket,
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    Builder, Gossip, KeyRing, MAX_KEYS, MAX_VALUE, Members, PublishError, Reason, Restart, StartError,
    Status, Timing, node,
    seal::{Accepted, Identity, Opener, Sealer},
};

const DEADLINE: Duration = Duration::from_secs(30);
const OLD: &str = "the old secret, of more than 32 bytes";
const NEW: &str = "the new secret, of more than 32 bytes";

/// Fast, and patient enough for a box that compiles meanwhile.
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

/// A watch that stays open.
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

/// Waits until the watched value is as wanted.
async fn until<T: Clone>(mut watch: watch::Receiver<T>, what: &str, wanted: impl Fn(&T) -> bool) -> T {
    match timeout(DEADLINE, watch.wait_for(|value| wanted(value))).await {
        Ok(value) => value.unwrap().clone(),
        Err(_) => panic!("not within {DEADLINE:?}: {what}"),
    }
}

/// Waits until a number that no watch carries (a counter) is as wanted.
async fn eventually(what: &str, wanted: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !wanted() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until each sees all the others.
async fn meshed(nodes: &[&Gossip]) {
    for node in nodes {
        until(node.members(), "meshed", |members| members.len() == nodes.len() - 1).await;
    }
}

/// Waits until `node` sent this many more datagrams: time for the mesh to act, without a clock.
async fn traffic(node: &Gossip, datagrams: u64) {
    let counters = node.counters();
    let goal = counters.sent.count() + datagrams;
    eventually("traffic", || counters.sent.count() >= goal).await;
}

async fn sees(node: &Gossip, peer: &str, key: &str, value: &str) -> Arc<Members> {
    let what = format!("{peer} has {key}={value}");
    until(node.members(), &what, |m| m.member(peer).is_some_and(|m| m.value(key) == Some(value))).await
}

/// Notes every list that a watch shows, until dropped.
struct Film {
    scenes: Arc<Mutex<Vec<Arc<Members>>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Film {
    fn of(node: &Gossip) -> Self {
        let mut members = node.members();
        let scenes = Arc::new(Mutex::new(vec![Arc::clone(&members.borrow_and_update())]));
        let take = Arc::clone(&scenes);
        let task = tokio::spawn(async move {
            while members.changed().await.is_ok() {
                take.lock().unwrap().push(Arc::clone(&members.borrow_and_update()));
            }
        });
        Self { scenes, task }
    }

    fn all(&self, holds: impl Fn(&Members) -> bool) -> bool {
        self.scenes.lock().unwrap().iter().all(|scene| holds(scene))
    }

    fn generations(&self, id: &str) -> Vec<u64> {
        let scenes = self.scenes.lock().unwrap();
        scenes.iter().filter_map(|scene| scene.member(id).map(|m| m.generation())).collect()
    }
}

impl Drop for Film {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Stands in front of a process: what is sent to the process comes by here, and may get lost.
struct Front {
    address: SocketAddr,
    target: watch::Sender<Option<SocketAddr>>,
    refused: Arc<Mutex<HashSet<SocketAddr>>>,
    is_shut: Arc<AtomicBool>,
    /// Percent of the datagrams that get lost.
    loss: Arc<AtomicU32>,
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Front {
    async fn open() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let (target, to) = watch::channel(None);
        let (refused, is_shut) = (Arc::new(Mutex::new(HashSet::new())), Arc::new(AtomicBool::new(false)));
        let (loss, seen) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(Vec::new())));
        let task = {
            let (refused, is_shut) = (Arc::clone(&refused), Arc::clone(&is_shut));
            let (loss, seen) = (Arc::clone(&loss), Arc::clone(&seen));
            tokio::spawn(async move {
                let mut buffer = vec![0; 65_536];
                loop {
                    let Ok((len, from)) = socket.recv_from(&mut buffer).await else { continue };
                    let target = *to.borrow();
                    if is_shut.load(Ordering::Relaxed) || refused.lock().unwrap().contains(&from) {
                        continue;
                    }
                    if rand::random_range(0..100) < loss.load(Ordering::Relaxed) {
                        continue;
                    }
                    if let Some(target) = target {
                        seen.lock().unwrap().push(buffer[..len].to_vec());
                        let _ = socket.send_to(&buffer[..len], target).await;
                    }
                }
            })
        };
        Self { address, target, refused, is_shut, loss, seen, task }
    }

    async fn start(&self, id: &str, peers: &[SocketAddr]) -> Gossip {
        let gossip = builder(id).advertise(self.address).seeds(seeds(peers)).start().await.unwrap();
        self.target.send_replace(Some(gossip.local_addr()));
        gossip
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A member that speaks the seal but not chitchat.
struct Puppet {
    socket: UdpSocket,
    sealer: Sealer,
    opener: Opener,
}

impl Puppet {
    async fn new(id: &str, secret: &str, cluster: &str, generation: u64) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let salt = rand::random();
        let address = socket.local_addr().unwrap();
        let identity = Identity { node_id: id.into(), generation, address, salt };
        Self {
            socket,
            sealer: Sealer::new(&ring(&[secret]), cluster, identity),
            opener: Opener::new(&ring(&[secret]), cluster, salt),
        }
    }

    async fn say(&mut self, to: &Gossip, message: &[u8]) {
        let echo = self.opener.echo(to.local_addr());
        for frame in self.sealer.seal(message, echo) {
            self.socket.send_to(&frame, to.local_addr()).await.unwrap();
        }
    }

    /// Sends what the other cannot prove, and takes its hello.
    async fn meet(&mut self, to: &Gossip) {
        self.say(to, b"who are you?").await;
        let mut buffer = [0; 2_000];
        let (len, _) = timeout(DEADLINE, self.socket.recv_from(&mut buffer)).await.unwrap().unwrap();
        let hello = self.opener.accept(&mut buffer[..len], Instant::now());
        assert_eq!(hello, Ok(Accepted::Hello { from: to.local_addr() }));
    }
}

fn keeps<T>(future: impl Future<Output = T>) -> impl Future<Output = T> {
    // Large test futures on the heap: clippy's `large_futures` holds for tests as well.
    Box::pin(future)
}

#[tokio::test]
async fn three_form_a_mesh_and_values_reach_all() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    let c = start("c", &[&a]).await;
    for (node, id) in [(&a, "a"), (&b, "b"), (&c, "c")] {
        node.publish("id", id).unwrap();
        node.publish("st", "ready").unwrap();
    }
    meshed(&[&a, &b, &c]).await;
    for (node, peers) in [(&a, ["b", "c"]), (&b, ["a", "c"]), (&c, ["a", "b"])] {
        for peer in peers {
            sees(node, peer, "id", peer).await;
            sees(node, peer, "st", "ready").await;
        }
        // The status follows the list a moment later.
        until(node.status(), "meshed", |status| *status == Status::Meshed { peers: 2 }).await;
        assert!(node.members().borrow().member("a").is_none_or(|m| m.address() == a.local_addr()));
    }
    a.publish("st", "draining").unwrap();
    sees(&b, "a", "st", "draining").await;
    sees(&c, "a", "st", "draining").await;

    c.publish("st", "left").unwrap();
    c.leave().await;
    sees(&a, "c", "st", "left").await;
    until(a.members(), "c is gone", |m| m.len() == 1).await;
    drop(b);
    until(a.members(), "b is gone", |m| m.is_empty()).await;
}

#[tokio::test]
async fn heard_moves_without_waking_anybody() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    meshed(&[&a, &b]).await;
    traffic(&a, 20).await;
    let mut members = a.members();
    let member = Arc::clone(members.borrow_and_update().member("b").unwrap());
    let before = member.heard();
    eventually("heard moves", || member.heard() > before).await;
    assert!(!members.has_changed().unwrap());
    drop(b);
    until(a.members(), "b is gone", |m| m.is_empty()).await;
    let last = member.heard();
    traffic(&a, 5).await;
    assert_eq!(member.heard(), last, "nobody lives there any more");
}

#[tokio::test]
async fn other_clusters_and_other_keys_never_merge() {
    let a = start("a", &[]).await;
    let other = builder("b").cluster("other").seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    let wrong = builder("c").keys(fixed(ring(&[NEW]))).seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    let counters = a.counters();
    eventually("both were refused", || {
        counters.dropped(Reason::Foreign) >= 10 && counters.dropped(Reason::UnknownKey) >= 10
    })
    .await;
    for node in [&a, &other, &wrong] {
        assert!(node.members().borrow().is_empty());
    }
    // Nothing was said to them either.
    assert_eq!(counters.sent.count(), 0);
    assert_eq!(other.counters().received.count() + wrong.counters().received.count(), 0);
}

#[tokio::test]
async fn rotating_the_keys_loses_nobody() {
    let mut nodes: Vec<Gossip> = Vec::new();
    let mut turn = Vec::new();
    for id in ["a", "b", "c"] {
        let (keys, watch) = watch::channel(ring(&[OLD]));
        let known: Vec<_> = nodes.iter().map(Gossip::local_addr).collect();
        nodes.push(builder(id).keys(watch).seeds(seeds(&known)).start().await.unwrap());
        turn.push(keys);
    }
    let [a, b, c] = &nodes[..] else { unreachable!() };
    meshed(&[a, b, c]).await;
    let films: Vec<_> = nodes.iter().map(Film::of).collect();
    for (step, secrets) in [&[OLD, NEW][..], &[NEW, OLD], &[NEW]].into_iter().enumerate() {
        for keys in &turn {
            // One at a time, with traffic between: the mixed states matter.
            keys.send_replace(ring(secrets));
            traffic(a, 10).await;
        }
        let step = step.to_string();
        b.publish("step", &step).unwrap();
        sees(a, "b", "step", &step).await;
        sees(c, "b", "step", &step).await;
    }
    for (node, film) in nodes.iter().zip(&films) {
        assert!(film.all(|members| members.len() == 2), "somebody was lost");
        assert_eq!(node.counters().dropped(Reason::UnknownKey), 0);
        assert_eq!(node.counters().dropped(Reason::Forged), 0);
    }
    // The old key is worthless now.
    let late = start("late", &[a]).await;
    eventually("refused", || a.counters().dropped(Reason::UnknownKey) >= 3).await;
    assert!(late.members().borrow().is_empty());
}

#[tokio::test]
async fn restart_replaces_incarnation() {
    // With this phi nobody dies before the deadline: only the newer generation can take the place.
    let patient = Timing { phi: 5_000.0, ..timing() };
    let a = builder("a").timing(patient).start().await.unwrap();
    let b = start("b", &[&a]).await;
    b.publish("run", "1").unwrap();
    sees(&a, "b", "run", "1").await;
    let film = Film::of(&a);
    let first = b.generation();
    drop(b);
    let b = start("b", &[&a]).await;
    b.publish("run", "2").unwrap();
    let members = sees(&a, "b", "run", "2").await;
    assert_eq!(members.len(), 1);
    let member = members.member("b").unwrap();
    assert!(member.generation() > first);
    assert_eq!(member.generation(), b.generation());
    assert_eq!(member.address(), b.local_addr());
    traffic(&a, 50).await;
    assert!(film.generations("b").is_sorted(), "a generation went back");
    assert_eq!(b.counters().restarts(Restart::Overtaken), 0);
}

#[tokio::test]
async fn a_clock_set_back_mends_itself() {
    let a = start("a", &[]).await;
    let ahead = node::wall() + 3_600_000_000;
    let b = builder("b").generation(ahead).seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    until(a.members(), "b ahead", |m| m.member("b").is_some_and(|b| b.generation() == ahead)).await;
    drop(b);
    let b = start("b", &[&a]).await;
    assert!(b.generation() < ahead);
    until(a.members(), "b beyond", |m| m.member("b").is_some_and(|b| b.generation() == ahead + 1)).await;
    assert_eq!(b.generation(), ahead + 1);
    assert_eq!(b.counters().restarts(Restart::Overtaken), 1);
    until(b.members(), "b hears a", |m| m.len() == 1).await;
}

#[tokio::test]
async fn a_generation_far_in_the_future_is_refused() {
    let a = start("a", &[]).await;
    let ahead = node::wall() + 2 * 86_400_000_000;
    let b = builder("b").generation(ahead).seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    eventually("refused", || a.counters().dropped(Reason::Future) >= 5).await;
    assert!(a.members().borrow().is_empty() && b.members().borrow().is_empty());
    // The id itself is not taken.
    drop(b);
    let b = start("b", &[&a]).await;
    meshed(&[&a, &b]).await;
    assert_eq!(b.counters().restarts(Restart::Overtaken), 0);
}

#[tokio::test]
async fn two_processes_of_one_id_do_not_chase_each_other() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    let twin = start("b", &[&a]).await;
    let restarts =
        |node: &Gossip| Restart::ALL.iter().map(|cause| node.counters().restarts(*cause)).sum::<u64>();
    eventually("they met", || restarts(&b) + restarts(&twin) >= 3).await;
    traffic(&a, 100).await;
    // The delays double: 0, 250, 500, 1000 ms and so on, for each.
    let most = restarts(&b) + restarts(&twin);
    assert!(most < 14, "{most} restarts");
}

#[tokio::test]
async fn seeds_change_at_run_time() {
    let a = start("a", &[]).await;
    let c = start("c", &[]).await;
    let (found, watch) = watch::channel(HashSet::new());
    let b = builder("b").seeds(watch).start().await.unwrap();
    assert_eq!(*b.status().borrow(), Status::Alone);
    // Nobody but ourselves.
    found.send_replace(HashSet::from([b.local_addr()]));
    traffic_free(&b).await;
    found.send_replace(HashSet::from([a.local_addr(), b.local_addr()]));
    meshed(&[&a, &b]).await;
    // A lookup that failed, and then one that found more.
    found.send_replace(HashSet::new());
    traffic(&b, 10).await;
    assert_eq!(b.members().borrow().len(), 1);
    found.send_replace(HashSet::from([c.local_addr()]));
    meshed(&[&a, &b, &c]).await;
}

/// Checks that a process that knows nobody sends nothing for some rounds.
async fn traffic_free(node: &Gossip) {
    sleep(timing().interval * 3).await;
    assert_eq!(node.counters().sent.count(), 0);
    assert_eq!(*node.status().borrow(), Status::Alone);
}

#[tokio::test]
async fn an_empty_set_keeps_the_last_seeds() {
    let front = Front::open().await;
    let (found, watch) = watch::channel(HashSet::from([front.address]));
    let b = builder("b").seeds(watch).start().await.unwrap();
    found.send_replace(HashSet::new());
    traffic(&b, 3).await;
    assert_ne!(*b.status().borrow(), Status::Alone);
    let a = front.start("a", &[]).await;
    meshed(&[&a, &b]).await;
}

#[tokio::test]
async fn junk_is_counted_by_reason_and_leaves_no_trace() {
    let front = Front::open().await;
    let a = front.start("a", &[]).await;
    let b = builder("b").seeds(seeds(&[front.address])).start().await.unwrap();
    meshed(&[&a, &b]).await;
    a.publish("st", "ready").unwrap();
    b.publish("st", "ready").unwrap();
    sees(&a, "b", "st", "ready").await;
    sees(&b, "a", "st", "ready").await;
    let film = Film::of(&a);
    let senders = a.link.seals().opener.senders();
    let counters = a.counters();
    let to = a.local_addr();
    let attacker = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let throw = async |junk: &[u8]| assert_eq!(attacker.send_to(junk, to).await.unwrap(), junk.len());

    // What an eavesdropper has.
    let recorded = front.seen.lock().unwrap().clone();
    let good = recorded.iter().max_by_key(|datagram| datagram.len()).unwrap().clone();
    for datagram in &recorded {
        throw(datagram).await;
    }
    for len in (0..good.len()).step_by(7) {
        throw(&good[..len]).await;
    }
    for at in (26..good.len()).step_by(3) {
        let mut altered = good.clone();
        altered[at] ^= 0x40;
        throw(&altered).await;
    }
    throw(&[good.as_slice(), &[0; 1_400]].concat()).await;
    throw(&vec![0x55; 65_000]).await;
    for _ in 0..500 {
        let random: [u8; 700] = std::array::from_fn(|_| rand::random());
        throw(&random).await;
    }
    eventually("the junk was looked at", || {
        [Reason::Truncated, Reason::Oversize, Reason::Foreign, Reason::Forged, Reason::Replayed]
            .iter()
            .all(|reason| counters.dropped(*reason) > 0)
    })
    .await;

    // Ten thousand nodes that do not have the key, in steps that the receive buffer can hold.
    let mut fakes = 0;
    let before = counters.dropped(Reason::UnknownKey);
    for _ in 0..20 {
        for _ in 0..500 {
            fakes += 1;
            let identity = Identity {
                node_id: format!("fake-{fakes}").into(),
                generation: node::wall(),
                address: attacker.local_addr().unwrap(),
                salt: rand::random(),
            };
            let mut sealer = Sealer::new(&ring(&[NEW]), "test", identity);
            throw(&sealer.seal(b"let me in", [0; 8])[0]).await;
        }
        tokio::task::yield_now().await;
    }
    eventually("the fakes were refused", || counters.dropped(Reason::UnknownKey) - before > 5_000).await;

    traffic(&a, 20).await;
    assert!(film.all(|members| members.len() == 1 && members.member("b").is_some()));
    assert_eq!(a.link.seals().opener.senders(), senders, "junk became a sender");
    assert_eq!(Restart::ALL.iter().map(|cause| counters.restarts(*cause)).sum::<u64>(), 0);
    b.publish("st", "draining").unwrap();
    sees(&a, "b", "st", "draining").await;
}

#[tokio::test]
async fn recordings_are_worthless_after_a_restart() {
    let front = Front::open().await;
    let a = front.start("a", &[]).await;
    let b = builder("b").seeds(seeds(&[front.address])).start().await.unwrap();
    meshed(&[&a, &b]).await;
    traffic(&b, 50).await;
    let recorded = front.seen.lock().unwrap().clone();
    drop(b);
    drop(a);
    // The same process again, which remembers nothing.
    let a = front.start("a", &[]).await;
    let attacker = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for datagram in &recorded {
        attacker.send_to(datagram, a.local_addr()).await.unwrap();
    }
    let counters = a.counters();
    eventually("all were refused", || counters.dropped(Reason::Unproven) >= recorded.len() as u64).await;
    assert_eq!(a.link.seals().opener.senders(), 0);
    assert!(a.members().borrow().is_empty());
    // What it sent were hellos only, fewer bytes than came, and none to the attacker.
    assert!(counters.sent_bytes.count() <= counters.received_bytes.count());
    assert_eq!(counters.sent.count(), counters.greeted.count());
    let mut buffer = [0; 10];
    assert!(attacker.try_recv_from(&mut buffer).is_err());
}

#[tokio::test]
async fn a_member_that_talks_nonsense_is_counted_and_stops_nobody() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    meshed(&[&a, &b]).await;
    let film = Film::of(&a);
    let mut puppet = Puppet::new("p", OLD, "test", node::wall()).await;
    puppet.meet(&a).await;
    for _ in 0..5 {
        puppet.say(&a, &[7; 3_000]).await;
    }
    puppet.say(&a, b"").await;
    eventually("counted", || a.counters().dropped(Reason::Undecodable) >= 6).await;
    b.publish("st", "ready").unwrap();
    sees(&a, "b", "st", "ready").await;
    assert!(film.all(|members| members.len() == 1));
}

#[tokio::test]
async fn a_panic_restarts_with_a_new_generation_and_nobody_blinks() {
    keeps(restarts_after(1, Restart::Ended)).await;
}

#[tokio::test]
async fn a_freeze_restarts_with_a_new_generation_and_nobody_blinks() {
    keeps(restarts_after(2, Restart::Frozen)).await;
}

/// Seen to fail when silence counts that this process could not hear: the others were lost for a moment each time.
#[tokio::test]
async fn who_stood_still_takes_nobody_for_dead_but_the_dead() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    let c = start("c", &[&a]).await;
    meshed(&[&a, &b, &c]).await;
    traffic(&a, 200).await;
    let film = Film::of(&a);
    for _ in 0..2 {
        a.link.fault.store(3, Ordering::Relaxed);
        until(b.members(), "the one that stands still is gone", |m| m.member("a").is_none()).await;
        meshed(&[&b, &c, &a]).await;
        // Until a second pause counts as one of its own.
        traffic(&a, 60).await;
    }
    assert!(film.all(|members| members.len() == 2), "somebody was taken for dead");
    a.link.fault.store(3, Ordering::Relaxed);
    drop(c);
    until(a.members(), "c is gone", |m| m.member("c").is_none()).await;
    meshed(&[&a, &b]).await;
    assert!(film.all(|members| members.member("b").is_some()), "somebody was taken for dead");
}

/// Seen to fail when each pause begins the patience anew: the dead one stayed a member for as long as this ran.
#[tokio::test]
async fn who_is_always_late_drops_the_dead_nonetheless() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    meshed(&[&a, &b]).await;
    traffic(&a, 100).await;
    drop(b);
    let gone = until(a.members(), "b is gone", |members| members.is_empty());
    let late = async {
        loop {
            a.link.fault.store(3, Ordering::Relaxed);
            eventually("it stands still", || a.link.fault.load(Ordering::Relaxed) == 0).await;
            traffic(&a, 1).await;
            // Two looks between one pause and the next: fewer than a patience is long.
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        _ = gone => {}
        () = late => {}
    }
}

async fn restarts_after(fault: u8, cause: Restart) {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    a.publish("st", "ready").unwrap();
    b.publish("st", "ready").unwrap();
    meshed(&[&a, &b]).await;
    let first = a.generation();
    let film = Film::of(&a);
    a.link.fault.store(fault, Ordering::Relaxed);
    until(b.members(), "a again", |m| m.member("a").is_some_and(|a| a.generation() > first)).await;
    sees(&b, "a", "st", "ready").await;
    assert!(a.generation() > first);
    assert_eq!(a.counters().restarts(cause), 1);
    // What is published later arrives as well, both ways.
    a.publish("st", "draining").unwrap();
    b.publish("st", "draining").unwrap();
    sees(&b, "a", "st", "draining").await;
    sees(&a, "b", "st", "draining").await;
    assert!(film.all(|members| members.len() == 1), "members blinked");
}

#[tokio::test]
async fn the_gate_shows_a_hung_main_runtime() {
    let a = start("a", &[]).await;
    let b = builder("b")
        .seeds(seeds(&[a.local_addr()]))
        .gate("st", "hung", Duration::from_millis(300))
        .start()
        .await
        .unwrap();
    b.publish("st", "ready").unwrap();
    b.publish("api", "here").unwrap();
    let pulse = b.pulse();
    let beat = || {
        let pulse = pulse.clone();
        tokio::spawn(async move {
            loop {
                pulse.beat();
                sleep(Duration::from_millis(20)).await;
            }
        })
    };
    let beating = beat();
    sees(&a, "b", "st", "ready").await;
    beating.abort();
    let members = sees(&a, "b", "st", "hung").await;
    assert_eq!(members.member("b").unwrap().value("api"), Some("here"));
    // What is published meanwhile waits behind the front.
    b.publish("st", "draining").unwrap();
    b.publish("api", "there").unwrap();
    let members = sees(&a, "b", "api", "there").await;
    assert_eq!(members.member("b").unwrap().value("st"), Some("hung"));
    let beating = beat();
    sees(&a, "b", "st", "draining").await;
    beating.abort();
}

/// A process whose datagrams arrive while none comes back, between two that hear it and each other.
struct Deaf {
    deaf: Gossip,
    front: Front,
    others: [Gossip; 2],
}

impl Deaf {
    async fn meshed(hush: Option<Duration>) -> Self {
        let others = [start("b", &[]).await, start("c", &[]).await];
        let front = Front::open().await;
        let known: Vec<_> = others.iter().map(Gossip::local_addr).collect();
        let mut builder = builder("a").advertise(front.address).seeds(seeds(&known));
        builder.hush = hush;
        let deaf = builder.start().await.unwrap();
        front.target.send_replace(Some(deaf.local_addr()));
        deaf.publish("st", "ready").unwrap();
        let [b, c] = &others;
        meshed(&[&deaf, b, c]).await;
        Self { deaf, front, others }
    }

    fn shut(&self, is_shut: bool) {
        self.front.is_shut.store(is_shut, Ordering::Relaxed);
    }

    /// Waits until each of the others has heard this many more of its rounds, or has lost it.
    async fn believed(&self, rounds: u64) -> bool {
        let goal = self.deaf.counters().sent.count() + rounds;
        let lost = || self.others.iter().all(|other| other.members().borrow().member("a").is_none());
        eventually("rounds", || self.deaf.counters().sent.count() >= goal || lost()).await;
        !lost()
    }
}

const HUSH: Duration = Duration::from_millis(500);

/// Seen to fail without the rule: those who hear it believed in it for as long as it spoke.
#[tokio::test]
async fn a_process_that_hears_nobody_falls_silent_and_speaks_again_when_it_does() {
    let mesh = keeps(Deaf::meshed(Some(HUSH))).await;
    for round in 1..=2 {
        mesh.shut(true);
        for other in &mesh.others {
            until(other.members(), "the deaf one is gone", |m| m.member("a").is_none()).await;
        }
        // It goes on knocking, which nobody takes for life.
        let withheld = mesh.deaf.counters().withheld.count();
        eventually("it knocks", || mesh.deaf.counters().withheld.count() > withheld + 20).await;
        for other in &mesh.others {
            assert!(other.members().borrow().member("a").is_none(), "round {round}");
        }
        mesh.shut(false);
        let [b, c] = &mesh.others;
        meshed(&[&mesh.deaf, b, c]).await;
        let word = format!("back {round}");
        mesh.deaf.publish("st", &word).unwrap();
        for other in &mesh.others {
            sees(other, "a", "st", &word).await;
        }
    }
}

/// With datagrams cut and connections open, each word on a connection is as good as a datagram.
#[tokio::test]
async fn a_process_that_is_reached_in_another_way_does_not_fall_silent() {
    let mesh = keeps(Deaf::meshed(Some(HUSH))).await;
    let hold = mesh.deaf.hold();
    mesh.shut(true);
    until(mesh.deaf.members(), "it hears nobody", |members| members.is_empty()).await;
    assert!(mesh.believed(40).await, "a connection is open");
    let (begun, sent) = (Instant::now(), mesh.deaf.counters().sent.count());
    drop(hold);
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    while begun.elapsed() < 3 * HUSH || mesh.deaf.counters().sent.count() < sent + 20 {
        mesh.deaf.reached();
        longest = longest.max(last.elapsed());
        last = Instant::now();
        sleep(Duration::from_millis(20)).await;
    }
    // Unless this test itself stood still.
    let withheld = mesh.deaf.counters().withheld.count();
    assert!(withheld == 0 || longest > HUSH / 2, "it was reached all the time: {withheld}, {longest:?}");
    for other in &mesh.others {
        until(other.members(), "the deaf one is gone", |m| m.member("a").is_none()).await;
    }
}

/// Both fall silent, so neither would hear the other if silence were complete.
#[tokio::test]
async fn two_that_are_both_silent_find_each_other_when_the_cut_heals() {
    let (front, back) = (Front::open().await, Front::open().await);
    let behind = async |front: &Front, id, other: &Front| {
        let builder = builder(id).advertise(front.address).seeds(seeds(&[other.address])).hush(HUSH);
        let gossip = builder.start().await.unwrap();
        front.target.send_replace(Some(gossip.local_addr()));
        gossip
    };
    let (b, c) = (behind(&front, "b", &back).await, behind(&back, "c", &front).await);
    keeps(meshed(&[&b, &c])).await;
    for shut in [&front.is_shut, &back.is_shut] {
        shut.store(true, Ordering::Relaxed);
    }
    eventually("both are silent", || b.counters().withheld.count() > 5 && c.counters().withheld.count() > 5)
        .await;
    for shut in [&front.is_shut, &back.is_shut] {
        shut.store(false, Ordering::Relaxed);
    }
    keeps(meshed(&[&b, &c])).await;
    b.publish("st", "back").unwrap();
    sees(&c, "b", "st", "back").await;
}

#[tokio::test]
async fn lonely_until_somebody_is_heard() {
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (found, watch) = watch::channel(HashSet::from([silent.local_addr().unwrap()]));
    let a = builder("a").seeds(watch).start().await.unwrap();
    assert_eq!(*a.status().borrow(), Status::Seeking);
    until(a.status(), "lonely", |status| matches!(status, Status::Lonely { .. })).await;
    let b = start("b", &[]).await;
    found.send_replace(HashSet::from([b.local_addr()]));
    until(a.status(), "meshed", |status| *status == Status::Meshed { peers: 1 }).await;
    drop(b);
    until(a.status(), "seeking", |status| *status == Status::Seeking).await;
    found.send_replace(HashSet::from([a.local_addr()]));
    until(a.status(), "alone", |status| *status == Status::Alone).await;
}

/// Without [`Builder::hush`], which is why there is one: those who hear it believe in it.
#[tokio::test]
async fn deaf_replica_is_lonely_and_stays_a_member_elsewhere() {
    let front = Front::open().await;
    let b = start("b", &[]).await;
    let c = start("c", &[&b]).await;
    let a = front.start("a", &[b.local_addr(), c.local_addr()]).await;
    meshed(&[&a, &b, &c]).await;
    let films = [Film::of(&b), Film::of(&c)];
    front.is_shut.store(true, Ordering::Relaxed);
    until(a.status(), "lonely", |status| matches!(status, Status::Lonely { .. })).await;
    assert!(a.members().borrow().is_empty());
    // Its gossip still arrives: it is alive, and says so itself.
    a.publish("st", "lonely").unwrap();
    assert!(films.iter().all(|film| film.all(|members| members.len() == 2)));
    front.is_shut.store(false, Ordering::Relaxed);
    meshed(&[&a, &b, &c]).await;
    sees(&b, "a", "st", "lonely").await;
}

#[tokio::test]
async fn asymmetric_partition_no_mass_removal() {
    // Between a and b nothing passes; both reach c.
    let (front_a, front_b) = (Front::open().await, Front::open().await);
    let c = start("c", &[]).await;
    let a = front_a.start("a", &[c.local_addr()]).await;
    let b = front_b.start("b", &[c.local_addr()]).await;
    meshed(&[&a, &b, &c]).await;
    let films = [Film::of(&a), Film::of(&b), Film::of(&c)];
    front_a.refused.lock().unwrap().insert(b.local_addr());
    front_b.refused.lock().unwrap().insert(a.local_addr());
    for round in 0..5 {
        let round = round.to_string();
        a.publish("round", &round).unwrap();
        sees(&b, "a", "round", &round).await;
        traffic(&c, 40).await;
    }
    for film in &films {
        assert!(film.all(|members| members.len() == 2), "somebody was removed");
    }
}

#[tokio::test]
async fn a_partition_heals_by_seeds() {
    let fronts = [Front::open().await, Front::open().await];
    let addresses: Vec<_> = fronts.iter().map(|front| front.address).collect();
    let a = fronts[0].start("a", &addresses).await;
    let b = fronts[1].start("b", &addresses).await;
    meshed(&[&a, &b]).await;
    for front in &fronts {
        front.is_shut.store(true, Ordering::Relaxed);
    }
    until(a.members(), "b is gone", |m| m.is_empty()).await;
    until(b.members(), "a is gone", |m| m.is_empty()).await;
    a.publish("st", "changed").unwrap();
    for front in &fronts {
        front.is_shut.store(false, Ordering::Relaxed);
    }
    meshed(&[&a, &b]).await;
    sees(&b, "a", "st", "changed").await;
}

#[tokio::test]
async fn a_crash_is_seen_within_three_seconds() {
    // With the timing that ships, and after a while: early samples make the detector patient.
    let shipped = |id: &str| builder(id).timing(Timing::default());
    let a = shipped("a").start().await.unwrap();
    let b = shipped("b").seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    // The best of three: the machine may stand still meanwhile.
    for attempt in 1..=3 {
        let c = shipped(&format!("c{attempt}")).seeds(seeds(&[a.local_addr()])).start().await.unwrap();
        meshed(&[&a, &b, &c]).await;
        traffic(&a, 200).await;
        let crash = Instant::now();
        drop(c);
        until(a.members(), "c is gone", |m| m.len() == 1).await;
        until(b.members(), "c is gone", |m| m.len() == 1).await;
        let took = crash.elapsed();
        println!("seen after {took:?}");
        if took < Duration::from_secs(3) {
            return;
        }
    }
    panic!("never seen within three seconds");
}

#[tokio::test]
async fn losing_every_third_datagram_kills_nobody() {
    let shipped = |front: &Front, id| builder(id).timing(Timing::default()).advertise(front.address);
    let fronts = [Front::open().await, Front::open().await, Front::open().await];
    let known: Vec<_> = fronts.iter().map(|front| front.address).collect();
    let mut nodes = Vec::new();
    for (front, id) in fronts.iter().zip(["a", "b", "c"]) {
        front.loss.store(33, Ordering::Relaxed);
        nodes.push(shipped(front, id).seeds(seeds(&known)).start().await.unwrap());
        front.target.send_replace(Some(nodes[nodes.len() - 1].local_addr()));
    }
    let [a, b, c] = &nodes[..] else { unreachable!() };
    meshed(&[a, b, c]).await;
    let films: Vec<_> = nodes.iter().map(Film::of).collect();
    for turn in 0..5 {
        let turn = turn.to_string();
        a.publish("turn", &turn).unwrap();
        sees(b, "a", "turn", &turn).await;
        sees(c, "a", "turn", &turn).await;
        traffic(a, 40).await;
    }
    assert!(films.iter().all(|film| film.all(|members| members.len() == 2)), "somebody was declared dead");
}

#[tokio::test]
async fn no_resurrection_after_gc() {
    // Everybody forgets the dead after a second; a newcomer is told by whoever forgets last.
    let quick = Timing { dead_grace: Duration::from_secs(1), ..timing() };
    let a = builder("a").timing(quick).start().await.unwrap();
    let known = [a.local_addr()];
    let b = builder("b").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    let c = builder("c").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    b.publish("st", "ready").unwrap();
    meshed(&[&a, &b, &c]).await;
    drop(b);
    until(a.members(), "b is gone", |m| m.len() == 1).await;
    until(c.members(), "b is gone", |m| m.len() == 1).await;
    let films = [Film::of(&a), Film::of(&c)];
    let d = builder("d").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    let film = Film::of(&d);
    meshed(&[&a, &c, &d]).await;
    traffic(&d, 150).await;
    assert!(film.all(|members| members.member("b").is_none()));
    assert!(films.iter().all(|film| film.all(|members| members.member("b").is_none())));
}

/// Waits until each remembers exactly this many others, living or dead.
async fn remember(nodes: &[&Gossip], incarnations: u64) {
    for node in nodes {
        let what = format!("{} remembers {incarnations} incarnations", node.local_addr());
        eventually(&what, || node.counters().incarnations() == incarnations).await;
    }
}

/// chitchat 161: a dead incarnation was gossiped for ever. Whoever had forgotten it was told again by somebody who had
/// not, and each newcomer was told too.
///
/// Seen to fail when the dead are remembered for ten minutes (another `dead_node_grace_period` in `node`), and with a
/// chitchat without its two guards: `scheduled_for_deletion_nodes` without members, so that the dead are gossiped until
/// they are collected, and `last_heartbeat_if_deleted` without memory, so that what was collected is taken back.
#[tokio::test]
async fn dead_incarnation_not_regossiped() {
    let quick = Timing { dead_grace: Duration::from_secs(1), ..timing() };
    // This one forgets later than the others: it could bring the dead one back.
    let slow = Timing { dead_grace: Duration::from_secs(3), ..timing() };
    let a = builder("a").timing(quick).start().await.unwrap();
    let known = [a.local_addr()];
    let b = builder("b").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    let c = builder("c").timing(slow).seeds(seeds(&known)).start().await.unwrap();
    b.publish("st", "ready").unwrap();
    meshed(&[&a, &b, &c]).await;
    remember(&[&a, &b, &c], 2).await;
    drop(b);
    until(a.members(), "b is gone", |m| m.len() == 1).await;
    remember(&[&a], 1).await;
    // The other still gossips it, or has stopped to; nobody takes it back.
    let most = Arc::new(AtomicU32::new(0));
    let watched = {
        let (most, counters) = (Arc::clone(&most), a.counters());
        tokio::spawn(async move {
            loop {
                most.fetch_max(counters.incarnations() as u32, Ordering::Relaxed);
                sleep(Duration::from_millis(5)).await;
            }
        })
    };
    remember(&[&c], 1).await;
    traffic(&c, 40).await;
    watched.abort();
    assert_eq!(most.load(Ordering::Relaxed), 1, "what was forgotten came back");
    // And a newcomer never hears of it.
    let d = builder("d").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    meshed(&[&a, &c, &d]).await;
    traffic(&d, 60).await;
    remember(&[&a, &c, &d], 2).await;
}

#[tokio::test]
async fn states_larger_than_a_datagram_cross_in_parts() {
    // 16 values of 4 KiB that do not compress: 64 KiB per node, more than any one message carries.
    let fill = |node: &Gossip| {
        for key in 0..MAX_KEYS {
            let value: String = (0..MAX_VALUE).map(|_| char::from(rand::random_range(b' '..=b'~'))).collect();
            node.publish(&format!("k{key}"), &value).unwrap();
        }
    };
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    fill(&a);
    fill(&b);
    let c = start("c", &[&b]).await;
    let whole =
        |id: &'static str| move |m: &Arc<Members>| m.member(id).is_some_and(|m| m.values().len() == MAX_KEYS);
    until(b.members(), "a's values", whole("a")).await;
    until(a.members(), "b's values", whole("b")).await;
    until(c.members(), "a's values", whole("a")).await;
    until(c.members(), "b's values", whole("b")).await;
    let (here, there) = (c.members().borrow().clone(), b.members().borrow().clone());
    assert_eq!(here.member("a").unwrap().values(), there.member("a").unwrap().values());
}

#[tokio::test]
async fn what_does_not_fit_is_refused() {
    let a = start("a", &[]).await;
    assert_eq!(a.publish("", "v"), Err(PublishError::Key));
    assert_eq!(a.publish("a key of 17 byte", "v"), Err(PublishError::Key));
    assert_eq!(a.publish("12345678901234567", "v"), Err(PublishError::Key));
    assert_eq!(a.publish("é", "v"), Err(PublishError::Key));
    assert_eq!(a.publish("k", "é"), Err(PublishError::Value));
    assert_eq!(a.publish("k", &"v".repeat(MAX_VALUE + 1)), Err(PublishError::Value));
    for key in 0..MAX_KEYS {
        a.publish(&key.to_string(), &"v".repeat(MAX_VALUE)).unwrap();
    }
    assert_eq!(a.publish("more", "v"), Err(PublishError::Full));
    a.publish("0", "").unwrap();
    let failed = |builder: Builder| async move { builder.start().await.unwrap_err() };
    assert!(matches!(failed(builder("")).await, StartError::NodeId));
    assert!(matches!(failed(builder("a b")).await, StartError::NodeId));
    assert!(matches!(failed(builder("a").cluster("")).await, StartError::Cluster));
    assert!(matches!(failed(Gossip::builder("a")).await, StartError::Keys));
    assert!(matches!(failed(builder("a").listen("0.0.0.0:0".parse().unwrap())).await, StartError::Advertise));
    assert!(matches!(failed(builder("a").listen(a.local_addr())).await, StartError::Bind { .. }));
    let no_time = Timing { interval: Duration::ZERO, ..timing() };
    assert!(matches!(failed(builder("a").timing(no_time)).await, StartError::Timing));
    assert!(matches!(failed(builder("a").gate("", "", DEADLINE)).await, StartError::Gate(PublishError::Key)));
}

#[tokio::test]
async fn the_thread_stops_with_the_handle() {
    let a = start("a", &[]).await;
    let address = a.local_addr();
    let mut members = a.members();
    drop(a);
    assert!(timeout(DEADLINE, members.changed()).await.unwrap().is_err());
    let again = builder("a").listen(address);
    let started = timeout(DEADLINE, async {
        loop {
            // The watch closes a moment before the socket does.
            if let Ok(gossip) = again.clone().start().await {
                return gossip;
            }
        }
    });
    started.await.unwrap().leave().await;
}

#[test]
fn names_of_reasons_are_distinct_and_in_place() {
    let names: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(names.len(), Reason::ALL.len());
    let places: BTreeSet<_> = Reason::ALL.iter().map(|reason| *reason as usize).collect();
    assert_eq!(places, (0..Reason::ALL.len()).collect());
}
