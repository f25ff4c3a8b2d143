//! Forming a mesh, publishing values, and settings.

use super::*;

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
async fn heard_advances_without_waking_watchers() {
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
    assert_eq!(member.heard(), last, "the process has ended");
}

#[tokio::test]
async fn seeds_change_at_run_time() {
    let a = start("a", &[]).await;
    let c = start("c", &[]).await;
    let (found, watch) = watch::channel(HashSet::new());
    let b = builder("b").seeds(watch).start().await.unwrap();
    assert_eq!(*b.status().borrow(), Status::Alone);
    // Only our own address.
    found.send_replace(HashSet::from([b.local_addr()]));
    sends_nothing(&b).await;
    found.send_replace(HashSet::from([a.local_addr(), b.local_addr()]));
    meshed(&[&a, &b]).await;
    // A failed lookup, and then one that finds more.
    found.send_replace(HashSet::new());
    traffic(&b, 10).await;
    assert_eq!(b.members().borrow().len(), 1);
    found.send_replace(HashSet::from([c.local_addr()]));
    meshed(&[&a, &b, &c]).await;
}

/// Checks that a process without other seeds sends nothing for some rounds.
async fn sends_nothing(node: &Gossip) {
    sleep(timing().interval * 3).await;
    assert_eq!(node.counters().sent.count(), 0);
    assert_eq!(*node.status().borrow(), Status::Alone);
}

#[tokio::test]
async fn an_empty_set_keeps_the_last_seeds() {
    let proxy = Proxy::open().await;
    let (found, watch) = watch::channel(HashSet::from([proxy.address]));
    let b = builder("b").seeds(watch).start().await.unwrap();
    found.send_replace(HashSet::new());
    traffic(&b, 3).await;
    assert_ne!(*b.status().borrow(), Status::Alone);
    let a = proxy.start("a", &[]).await;
    meshed(&[&a, &b]).await;
}

#[tokio::test]
async fn states_larger_than_a_datagram_cross_in_parts() {
    // 16 values of 4 KiB that do not compress: 64 KiB per node, more than one message can carry.
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
async fn invalid_values_and_settings_are_refused() {
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
    assert!(matches!(
        failed(builder("a").health_gate("", "", DEADLINE)).await,
        StartError::HealthGate(PublishError::Key)
    ));
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
