//! Keys, invalid datagrams, recordings, and members that misbehave.

use super::*;

/// A member that can seal datagrams but does not speak chitchat.
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

    /// Sends an unproven datagram and accepts the hello in answer.
    async fn handshake(&mut self, to: &Gossip) {
        self.say(to, b"who are you?").await;
        let mut buffer = [0; 2_000];
        let (len, _) = timeout(DEADLINE, self.socket.recv_from(&mut buffer)).await.unwrap().unwrap();
        let hello = self.opener.accept(&mut buffer[..len], Instant::now());
        assert_eq!(hello, Ok(Accepted::Hello { from: to.local_addr() }));
    }
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
    // Nothing was sent to them either.
    assert_eq!(counters.sent.count(), 0);
    assert_eq!(other.counters().received.count() + wrong.counters().received.count(), 0);
}

#[tokio::test]
async fn rotating_the_keys_loses_no_member() {
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
    let recordings: Vec<_> = nodes.iter().map(Recording::of).collect();
    for (step, secrets) in [&[OLD, NEW][..], &[NEW, OLD], &[NEW]].into_iter().enumerate() {
        for keys in &turn {
            // One process at a time, with traffic in between, to test the mixed states.
            keys.send_replace(ring(secrets));
            traffic(a, 10).await;
        }
        let step = step.to_string();
        b.publish("step", &step).unwrap();
        sees(a, "b", "step", &step).await;
        sees(c, "b", "step", &step).await;
    }
    for (node, recording) in nodes.iter().zip(&recordings) {
        assert!(recording.all(|members| members.len() == 2), "a member was lost");
        assert_eq!(node.counters().dropped(Reason::UnknownKey), 0);
        assert_eq!(node.counters().dropped(Reason::Forged), 0);
    }
    // The old key is not accepted any more.
    let late = start("late", &[a]).await;
    eventually("refused", || a.counters().dropped(Reason::UnknownKey) >= 3).await;
    assert!(late.members().borrow().is_empty());
}

#[tokio::test]
async fn invalid_datagrams_are_counted_by_reason_and_change_nothing() {
    let proxy = Proxy::open().await;
    let a = proxy.start("a", &[]).await;
    let b = builder("b").seeds(seeds(&[proxy.address])).start().await.unwrap();
    meshed(&[&a, &b]).await;
    a.publish("st", "ready").unwrap();
    b.publish("st", "ready").unwrap();
    sees(&a, "b", "st", "ready").await;
    sees(&b, "a", "st", "ready").await;
    let recording = Recording::of(&a);
    let senders = a.link.seals().opener.senders();
    let counters = a.counters();
    let to = a.local_addr();
    let attacker = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let throw = async |junk: &[u8]| assert_eq!(attacker.send_to(junk, to).await.unwrap(), junk.len());

    // Datagrams that an eavesdropper has.
    let recorded = proxy.seen.lock().clone();
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
    eventually("the invalid datagrams were processed", || {
        [Reason::Truncated, Reason::Oversize, Reason::Foreign, Reason::Forged, Reason::Replayed]
            .iter()
            .all(|reason| counters.dropped(*reason) > 0)
    })
    .await;

    // Ten thousand nodes without the key, in batches that fit into the receive buffer.
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
    assert!(recording.all(|members| members.len() == 1 && members.member("b").is_some()));
    assert_eq!(a.link.seals().opener.senders(), senders, "an invalid datagram became a sender");
    assert_eq!(Restart::ALL.iter().map(|cause| counters.restarts(*cause)).sum::<u64>(), 0);
    b.publish("st", "draining").unwrap();
    sees(&a, "b", "st", "draining").await;
}

#[tokio::test]
async fn recordings_are_refused_after_a_restart() {
    let proxy = Proxy::open().await;
    let a = proxy.start("a", &[]).await;
    let b = builder("b").seeds(seeds(&[proxy.address])).start().await.unwrap();
    meshed(&[&a, &b]).await;
    traffic(&b, 50).await;
    let recorded = proxy.seen.lock().clone();
    drop(b);
    drop(a);
    // The same process again, after a restart that cleared its memory.
    let a = proxy.start("a", &[]).await;
    let attacker = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for datagram in &recorded {
        attacker.send_to(datagram, a.local_addr()).await.unwrap();
    }
    let counters = a.counters();
    eventually("all were refused", || counters.dropped(Reason::Unproven) >= recorded.len() as u64).await;
    assert_eq!(a.link.seals().opener.senders(), 0);
    assert!(a.members().borrow().is_empty());
    // It sent only hellos, fewer bytes than it received, and none to the attacker.
    assert!(counters.sent_bytes.count() <= counters.received_bytes.count());
    assert_eq!(counters.sent.count(), counters.greeted.count());
    let mut buffer = [0; 10];
    assert!(attacker.try_recv_from(&mut buffer).is_err());
}

#[tokio::test]
async fn undecodable_messages_of_a_member_are_counted_and_stop_no_other() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    meshed(&[&a, &b]).await;
    let recording = Recording::of(&a);
    let mut puppet = Puppet::new("p", OLD, "test", node::wall()).await;
    puppet.handshake(&a).await;
    for _ in 0..5 {
        puppet.say(&a, &[7; 3_000]).await;
    }
    puppet.say(&a, b"").await;
    eventually("counted", || a.counters().dropped(Reason::Undecodable) >= 6).await;
    b.publish("st", "ready").unwrap();
    sees(&a, "b", "st", "ready").await;
    assert!(recording.all(|members| members.len() == 1));
}
