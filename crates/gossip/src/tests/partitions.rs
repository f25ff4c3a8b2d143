//! Blocked datagrams, in both directions or in one.

use super::*;

/// A process whose datagrams reach two others, while theirs do not reach it.
struct Deaf {
    deaf: Gossip,
    proxy: Proxy,
    others: [Gossip; 2],
}

impl Deaf {
    async fn meshed() -> Self {
        let others = [start("b", &[]).await, start("c", &[]).await];
        let proxy = Proxy::open().await;
        let known: Vec<_> = others.iter().map(Gossip::local_addr).collect();
        let builder = builder("a").advertise(proxy.address).seeds(seeds(&known));
        let deaf = builder.silence_if_deaf(DEAF_AFTER).start().await.unwrap();
        proxy.target.send_replace(Some(deaf.local_addr()));
        deaf.publish("st", "ready").unwrap();
        let [b, c] = &others;
        meshed(&[&deaf, b, c]).await;
        Self { deaf, proxy, others }
    }

    fn shut(&self, is_shut: bool) {
        self.proxy.is_shut.store(is_shut, Ordering::Relaxed);
    }

    /// Waits until the deaf process has sent this many more datagrams, or until the others have lost it.
    /// Returns whether it still is a member.
    async fn is_member_after(&self, rounds: u64) -> bool {
        let goal = self.deaf.counters().sent.count() + rounds;
        let lost = || self.others.iter().all(|other| other.members().borrow().member("a").is_none());
        eventually("rounds", || self.deaf.counters().sent.count() >= goal || lost()).await;
        !lost()
    }
}

const DEAF_AFTER: Duration = Duration::from_millis(500);

/// Restate: a node that can send and not receive must declare itself dead. Here it becomes silent until it
/// hears others again: otherwise they would keep it as a member, and send requests to it, as long as they
/// hear it.
#[test]
fn deaf_replica_is_lonely_and_its_slots_expire_elsewhere() {
    exhibit(Flaw::NeverSilent, || boxed(deaf()));
}

async fn deaf() {
    let mesh = boxed(Deaf::meshed()).await;
    for round in 1..=2 {
        mesh.shut(true);
        for other in &mesh.others {
            until(other.members(), "the deaf process is gone", |m| m.member("a").is_none()).await;
        }
        until(mesh.deaf.status(), "it hears none", |status| !matches!(status, Status::Meshed { .. })).await;
        // It still sends probes, which do not count as a sign of life.
        let withheld = mesh.deaf.counters().withheld.count();
        eventually("it sends probes", || mesh.deaf.counters().withheld.count() > withheld + 20).await;
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

/// If datagrams are blocked and connections are open, a message on a connection counts like a datagram.
#[tokio::test]
async fn a_process_that_is_reached_by_other_means_is_not_silent() {
    let mesh = boxed(Deaf::meshed()).await;
    let hold = mesh.deaf.hold();
    mesh.shut(true);
    until(mesh.deaf.members(), "it hears no member", |members| members.is_empty()).await;
    assert!(mesh.is_member_after(40).await, "a connection is open");
    let (begun, sent) = (Instant::now(), mesh.deaf.counters().sent.count());
    drop(hold);
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    while begun.elapsed() < 3 * DEAF_AFTER || mesh.deaf.counters().sent.count() < sent + 20 {
        mesh.deaf.reached();
        longest = longest.max(last.elapsed());
        last = Instant::now();
        sleep(Duration::from_millis(20)).await;
    }
    // Unless this test itself was stalled.
    let withheld = mesh.deaf.counters().withheld.count();
    assert!(
        withheld == 0 || longest > DEAF_AFTER / 2,
        "it was reached all the time: {withheld}, {longest:?}"
    );
    for other in &mesh.others {
        until(other.members(), "the deaf process is gone", |m| m.member("a").is_none()).await;
    }
}

/// Both are silent, so neither would hear the other without the probes.
#[tokio::test]
async fn two_silent_processes_find_each_other_after_a_partition() {
    let (proxy, back) = (Proxy::open().await, Proxy::open().await);
    let behind = async |proxy: &Proxy, id, other: &Proxy| {
        let builder =
            builder(id).advertise(proxy.address).seeds(seeds(&[other.address])).silence_if_deaf(DEAF_AFTER);
        let gossip = builder.start().await.unwrap();
        proxy.target.send_replace(Some(gossip.local_addr()));
        gossip
    };
    let (b, c) = (behind(&proxy, "b", &back).await, behind(&back, "c", &proxy).await);
    boxed(meshed(&[&b, &c])).await;
    for shut in [&proxy.is_shut, &back.is_shut] {
        shut.store(true, Ordering::Relaxed);
    }
    eventually("both are silent", || b.counters().withheld.count() > 5 && c.counters().withheld.count() > 5)
        .await;
    for shut in [&proxy.is_shut, &back.is_shut] {
        shut.store(false, Ordering::Relaxed);
    }
    boxed(meshed(&[&b, &c])).await;
    b.publish("st", "back").unwrap();
    sees(&c, "b", "st", "back").await;
}

#[tokio::test]
async fn a_process_is_lonely_until_it_hears_another() {
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

/// Without [`Builder::silence_if_deaf`], the processes that hear the deaf one keep it as a member.
#[tokio::test]
async fn deaf_replica_is_lonely_and_stays_a_member_elsewhere() {
    let proxy = Proxy::open().await;
    let b = start("b", &[]).await;
    let c = start("c", &[&b]).await;
    let a = proxy.start("a", &[b.local_addr(), c.local_addr()]).await;
    meshed(&[&a, &b, &c]).await;
    let recordings = [Recording::of(&b), Recording::of(&c)];
    proxy.is_shut.store(true, Ordering::Relaxed);
    until(a.status(), "lonely", |status| matches!(status, Status::Lonely { .. })).await;
    assert!(a.members().borrow().is_empty());
    // Its gossip still arrives: it is alive, and publishes so itself.
    a.publish("st", "lonely").unwrap();
    assert!(recordings.iter().all(|recording| recording.all(|members| members.len() == 2)));
    proxy.is_shut.store(false, Ordering::Relaxed);
    meshed(&[&a, &b, &c]).await;
    sees(&b, "a", "st", "lonely").await;
}

#[tokio::test]
async fn asymmetric_partition_no_mass_removal() {
    // a and b cannot reach each other; both reach c.
    let (proxy_a, proxy_b) = (Proxy::open().await, Proxy::open().await);
    let c = start("c", &[]).await;
    let a = proxy_a.start("a", &[c.local_addr()]).await;
    let b = proxy_b.start("b", &[c.local_addr()]).await;
    meshed(&[&a, &b, &c]).await;
    let recordings = [Recording::of(&a), Recording::of(&b), Recording::of(&c)];
    proxy_a.refused.lock().insert(b.local_addr());
    proxy_b.refused.lock().insert(a.local_addr());
    for round in 0..5 {
        let round = round.to_string();
        a.publish("round", &round).unwrap();
        sees(&b, "a", "round", &round).await;
        traffic(&c, 40).await;
    }
    for recording in &recordings {
        assert!(recording.all(|members| members.len() == 2), "a member was removed");
    }
}

#[tokio::test]
async fn a_partition_heals_by_seeds() {
    let proxies = [Proxy::open().await, Proxy::open().await];
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.address).collect();
    let a = proxies[0].start("a", &addresses).await;
    let b = proxies[1].start("b", &addresses).await;
    meshed(&[&a, &b]).await;
    for proxy in &proxies {
        proxy.is_shut.store(true, Ordering::Relaxed);
    }
    until(a.members(), "b is gone", |m| m.is_empty()).await;
    until(b.members(), "a is gone", |m| m.is_empty()).await;
    a.publish("st", "changed").unwrap();
    for proxy in &proxies {
        proxy.is_shut.store(false, Ordering::Relaxed);
    }
    meshed(&[&a, &b]).await;
    sees(&b, "a", "st", "changed").await;
}
