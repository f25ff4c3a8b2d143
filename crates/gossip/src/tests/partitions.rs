//! Blocked datagrams, in both directions or in one.

use super::{simulated::Network, *};

/// A process whose datagrams reach two others, while theirs do not reach it.
struct Deaf {
    deaf: Gossip,
    network: Network,
    others: [Gossip; 2],
}

impl Deaf {
    async fn meshed() -> Self {
        let network = Network::new();
        let others = [network.start("b", &[]).await, network.start("c", &[]).await];
        let known: Vec<_> = others.iter().map(Gossip::local_addr).collect();
        let builder = network.builder("a").seeds(seeds(&known));
        let deaf = builder.silence_if_deaf(DEAF_AFTER).start().await.unwrap();
        deaf.publish("st", "ready").unwrap();
        let [b, c] = &others;
        meshed(&[&deaf, b, c]).await;
        Self { deaf, network, others }
    }

    fn shut(&self, is_shut: bool) {
        self.network.shut(self.deaf.local_addr(), is_shut);
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
    exhibit_paused(Flaw::NeverSilent, || boxed(deaf()));
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
#[tokio::test(start_paused = true)]
async fn a_process_that_is_reached_by_other_means_is_not_silent() {
    let mesh = boxed(Deaf::meshed()).await;
    let hold = mesh.deaf.hold();
    mesh.shut(true);
    until(mesh.deaf.members(), "it hears no member", |members| members.is_empty()).await;
    assert!(mesh.is_member_after(40).await, "a connection is open");
    let (begun, sent) = (Instant::now(), mesh.deaf.counters().sent.count());
    drop(hold);
    while begun.elapsed() < 3 * DEAF_AFTER || mesh.deaf.counters().sent.count() < sent + 20 {
        mesh.deaf.reached();
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(mesh.deaf.counters().withheld.count(), 0, "it was reached all the time");
    for other in &mesh.others {
        until(other.members(), "the deaf process is gone", |m| m.member("a").is_none()).await;
    }
}

/// Both are silent, so neither would hear the other without the probes.
#[tokio::test(start_paused = true)]
async fn two_silent_processes_find_each_other_after_a_partition() {
    let network = Network::new();
    let addresses = [network.address(), network.address()];
    let behind = async |id, own: SocketAddr, other| {
        let builder = network.builder_at(id, own).seeds(seeds(&[other])).silence_if_deaf(DEAF_AFTER);
        builder.start().await.unwrap()
    };
    let b = behind("b", addresses[0], addresses[1]).await;
    let c = behind("c", addresses[1], addresses[0]).await;
    boxed(meshed(&[&b, &c])).await;
    addresses.iter().for_each(|address| network.shut(*address, true));
    eventually("both are silent", || b.counters().withheld.count() > 5 && c.counters().withheld.count() > 5)
        .await;
    addresses.iter().for_each(|address| network.shut(*address, false));
    boxed(meshed(&[&b, &c])).await;
    b.publish("st", "back").unwrap();
    sees(&c, "b", "st", "back").await;
}

#[tokio::test(start_paused = true)]
async fn a_process_is_lonely_until_it_hears_another() {
    let network = Network::new();
    let (found, watch) = watch::channel(HashSet::from([network.address()]));
    let a = network.builder("a").seeds(watch).start().await.unwrap();
    assert_eq!(*a.status().borrow(), Status::Seeking);
    until(a.status(), "lonely", |status| matches!(status, Status::Lonely { .. })).await;
    let b = network.start("b", &[]).await;
    found.send_replace(HashSet::from([b.local_addr()]));
    until(a.status(), "meshed", |status| *status == Status::Meshed { peers: 1 }).await;
    drop(b);
    until(a.status(), "seeking", |status| *status == Status::Seeking).await;
    found.send_replace(HashSet::from([a.local_addr()]));
    until(a.status(), "alone", |status| *status == Status::Alone).await;
}

/// Without [`Builder::silence_if_deaf`], the processes that hear the deaf one keep it as a member.
#[tokio::test(start_paused = true)]
async fn deaf_replica_is_lonely_and_stays_a_member_elsewhere() {
    let network = Network::new();
    let b = network.start("b", &[]).await;
    let c = network.start("c", &[&b]).await;
    let a = network.start("a", &[&b, &c]).await;
    meshed(&[&a, &b, &c]).await;
    let recordings = [Recording::of(&b), Recording::of(&c)];
    network.shut(a.local_addr(), true);
    until(a.status(), "lonely", |status| matches!(status, Status::Lonely { .. })).await;
    assert!(a.members().borrow().is_empty());
    // Its gossip still arrives: it is alive, and publishes so itself.
    a.publish("st", "lonely").unwrap();
    assert!(recordings.iter().all(|recording| recording.all(|members| members.len() == 2)));
    network.shut(a.local_addr(), false);
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
