//! Bugs of other projects. Each test must also fail with the corresponding flaw.

use super::*;
use crate::{
    Failure, Op,
    flaw::{Flaw, must_fail_with},
};

/// Syn: an unregistration queued behind a snapshot left a zombie on a peer.
#[test]
fn zombie_after_snapshot_race() {
    fn run() {
        let mut lab = Lab::new();
        for id in 1..=3 {
            lab.insert(id);
        }
        lab.gossip();
        lab.connect();
        let hello = lab.emit().unwrap();
        lab.deliver(hello);
        let first = lab.emit().unwrap();
        lab.deliver(first);
        // The agent is unregistered while the snapshot that contains it is half sent. Gossip delivers this
        // first.
        lab.remove(1);
        lab.gossip_changes();
        let second = lab.emit().unwrap();
        lab.deliver(second);
        assert!(!lab.holds(1), "gossip reported it during the snapshot");
        lab.pump();
        assert!(!lab.holds(1) && lab.holds(2) && lab.holds(3));
        assert!(lab.table.unsynced(lab.now).is_empty());
    }
    run();
    must_fail_with(Flaw::OpsLostBySwap, run);
}

/// The same race if the copy is newer than the snapshot: the snapshot must not replace it.
#[test]
fn snapshot_never_replaces_a_newer_copy() {
    fn run() {
        let mut lab = Lab::synced(3);
        // The owner sends a new snapshot, as to a slow reader. Gossip is faster.
        lab.feed = Some((lab.stream(), lab.owner.feed(None)));
        let hello = lab.emit().unwrap();
        lab.remove(2);
        lab.gossip_changes();
        assert!(!lab.holds(2));
        lab.deliver(hello);
        while let Some(message) = lab.emit() {
            lab.deliver(message);
            assert!(!lab.holds(2), "order");
        }
        assert!(lab.table.unsynced(lab.now).is_empty());
    }
    run();
    must_fail_with(Flaw::OldSnapshotWins, run);
}

/// NATS 8233: subscribe and unsubscribe raced on a route, and a live subscriber was lost.
#[test]
fn reregister_race_never_loses_live_agent() {
    fn run() {
        let mut lab = Lab::synced(0);
        for wave in 0..10 {
            for connection in 0..100 {
                lab.insert(7);
                if connection % 3 == wave % 3 {
                    lab.pump();
                }
                // The new connection is opened before the old one is closed.
                if connection > 0 || wave > 0 {
                    lab.remove(7);
                }
                lab.now += ms(1);
                if connection % 7 == 0 {
                    lab.gossip_changes();
                }
            }
            lab.pass(ms(100));
            assert!(lab.holds(7), "wave {wave}");
        }
        lab.remove(7);
        lab.pass(ms(100));
        assert!(!lab.holds(7));
        assert!(lab.owner.version() == Version(2), "only the first and the last are published");
    }
    run();
    must_fail_with(Flaw::NoCount, run);
}

/// quickwit 4845: a permanent difference made every node fetch everything without end.
#[test]
fn no_snapshot_storm() {
    fn run() {
        let mut lab = Lab::synced(3);
        // A minute of heartbeats that never match, each followed by a correct snapshot.
        for _ in 0..600 {
            lab.pass(ms(100));
            if lab.dialled.is_some() {
                lab.connect();
                lab.pump();
            }
            if lab.feed.is_some() {
                let mut lie = lab.owner.summary();
                lie.digest ^= 1;
                lab.deliver(Message::Beat(lie));
            }
        }
        assert!(lab.dials() >= 5, "it is repaired");
        assert!(lab.dials() <= 12, "{} snapshots in a minute", lab.dials());
        // The doubted copy is still used for answers, and its owner is asked directly for other agents.
        assert!(lab.holds(1) && !lab.table.unsynced(lab.now).is_empty());
    }
    run();
    must_fail_with(Flaw::NoBackoff, run);
}

/// konnectivity 2025: a stale view overwrote a newer one.
#[test]
fn old_view_never_overwrites_new() {
    fn run() {
        let mut lab = Lab::synced(2);
        let old = Member { changes: Some(lab.owner.recent()), ..lab.member() };
        lab.restart(20);
        lab.insert(5);
        lab.gossip();
        assert!(!lab.holds(1), "a newer epoch drops the older copy at once");
        lab.connect();
        lab.pump();
        assert!(lab.holds(5));
        // The report on the earlier process arrives late: first unchanged, then as if it was just heard.
        for heard in [old.heard, lab.now + ms(1)] {
            lab.table.gossip(&[Member { heard, generation: 99, ..old.clone() }], lab.now);
            lab.obey();
            assert!(lab.holds(5) && !lab.holds(1), "single writer");
        }
        lab.pass(ms(500));
        assert!(lab.holds(5) && lab.table.unsynced(lab.now).is_empty());
    }
    run();
    must_fail_with(Flaw::AnyEpoch, run);
}

/// Akka: an asymmetric partition can down everything.
#[test]
fn asymmetric_partition_no_mass_removal() {
    fn run() {
        let mut lab = Lab::synced(2);
        // This replica hears no replica over UDP, and all streams continue.
        lab.table.gossip(&[], lab.now);
        lab.obey();
        lab.pass(ms(60_000));
        assert_eq!(lab.health(), ReplicaHealth::Suspect);
        assert!(lab.holds(1) && lab.holds(2));
        // The opposite: gossip continues, and no stream can be opened.
        let mut lab = Lab::synced(2);
        lab.table.failed(lab.stream(), Failure::Ended, lab.now);
        lab.feed = None;
        lab.obey();
        for _ in 0..300 {
            lab.pass(ms(200));
            lab.gossip();
        }
        assert_eq!(lab.table.agents(&replica("a")).unwrap().len(), 2);
        assert!(lab.holds(1));
    }
    run();
    must_fail_with(Flaw::OneVoteKills, run);
}

/// etcd 20418: stale data was served after the process had been paused.
#[test]
fn paused_replica_does_not_serve_stale_routes() {
    fn run() {
        let mut lab = Lab::synced(2);
        let buffered = lab.owner.summary();
        // The process is paused for a minute. The first query comes before any timer has run.
        lab.now += ms(60_000);
        assert!(!lab.holds(1), "no proof of life for longer than the ttl");
        assert!(!lab.table.unsynced(lab.now).is_empty(), "so nothing is absent either");
        // The sockets have buffered messages from before the pause, which prove nothing.
        lab.deliver(Message::Beat(buffered));
        assert!(!lab.holds(1));
        // The owner is alive and has continued. The copy still exists, so it can resume by version.
        lab.insert(3);
        lab.remove(1);
        assert_eq!(lab.connect(), Some((Epoch(10), Version(2))));
        lab.pump();
        assert!(!lab.holds(1) && lab.holds(2) && lab.holds(3));
    }
    run();
    must_fail_with(Flaw::NoExpiry, run);
}

/// Phoenix: a crash leaves presences for 30 s.
#[test]
fn sigkill_purges_fast() {
    fn run() {
        let mut lab = Lab::synced(2);
        let killed = lab.now;
        lab.table.failed(lab.stream(), Failure::Ended, lab.now);
        lab.feed = None;
        lab.obey();
        assert_eq!(lab.health(), ReplicaHealth::Suspect, "tried last at once");
        lab.pass(ms(1100));
        assert_eq!(lab.health(), ReplicaHealth::Suspect, "the redial has no result yet");
        let (stream, _) = lab.dialled.take().unwrap();
        lab.table.failed(stream, Failure::Refused, lab.now);
        lab.obey();
        assert!(!lab.holds(1), "not routed to");
        assert_eq!(lab.table.agents(&replica("a")).unwrap().len(), 2, "gossip has not agreed");
        lab.table.gossip(&[], lab.now);
        assert!(lab.table.agents(&replica("a")).unwrap().is_empty(), "dropped by both votes");
        assert!(lab.now < killed + ms(5000));
    }
    run();
    must_fail_with(Flaw::RefusedIsNoVote, run);
}

/// konnectivity 2025: the graceful shutdown was reverted, since a server that was told to leave did not leave
/// cleanly. Here a replica that drains is killed before it has left: it is purged like any other.
#[test]
fn sigterm_then_sigkill_still_clean() {
    fn run() {
        let mut lab = Lab::synced(2);
        lab.state = ReplicaState::Draining;
        lab.gossip();
        lab.pass(ms(500));
        assert_eq!(lab.health(), ReplicaHealth::Draining);
        assert!(lab.holds(1), "it serves until it has left");
        // SIGKILL: the system resets the stream, refuses the next one, and gossip falls silent.
        lab.table.failed(lab.stream(), Failure::Ended, lab.now);
        lab.feed = None;
        lab.obey();
        while lab.dialled.is_none() {
            lab.pass(ms(50));
        }
        let (stream, _) = lab.dialled.take().unwrap();
        lab.table.failed(stream, Failure::Refused, lab.now);
        lab.table.gossip(&[], lab.now);
        lab.obey();
        assert!(!lab.holds(1) && lab.table.agents(&replica("a")).unwrap().is_empty(), "it is purged");
        // Its successor starts with a new epoch, and is not draining.
        lab.restart(20);
        lab.insert(1);
        lab.gossip();
        lab.connect();
        lab.pump();
        assert_eq!(lab.health(), ReplicaHealth::Live);
        assert!(lab.holds(1));
    }
    run();
    must_fail_with(Flaw::DrainingNeverDies, run);
}

/// Teleport RFD 69: route updates applied out of order.
#[test]
fn nonce_orders_route_updates() {
    fn run() {
        let mut lab = Lab::synced(0);
        lab.insert(1);
        let add = lab.emit().unwrap();
        lab.remove(1);
        lab.now += ms(20);
        let remove = lab.emit().unwrap();
        // Gossip delivers both, then the stream delivers them again one by one.
        lab.gossip_changes();
        assert!(!lab.holds(1));
        lab.deliver(add);
        assert!(!lab.holds(1), "a lower version is skipped");
        lab.deliver(remove);
        assert!(!lab.holds(1));
        assert_eq!(lab.table.replicas(lab.now)[0].version, Some(Version(2)));
        // An operation with a version that is too high is not applied either.
        lab.deliver(Message::Delta { from: Version(8), to: Version(9), ops: vec![Op::Add(agent(9))] });
        assert!(!lab.holds(9));
    }
    run();
    must_fail_with(Flaw::AnyVersion, run);
}

/// A wrong copy is detected by its digest and replaced.
#[test]
fn digest_detects_a_wrong_copy() {
    fn run() {
        let mut lab = Lab::synced(3);
        let mut other = Owner::with_sizes(Epoch(10), 64, 2);
        for id in [1, 2, 4] {
            other.insert(agent(id));
        }
        // As after a bit flip: the same version and count, but another set.
        lab.owner = other;
        lab.history.note(&lab.owner);
        let beat = Message::Beat(lab.owner.summary());
        let stream = lab.stream();
        let from = lab.identity();
        lab.table.message(stream, Some(from), beat, lab.now);
        lab.actions.extend(lab.table.actions());
        assert!(lab.actions.iter().any(asks_snapshot), "{:?}", lab.actions);
    }
    run();
    must_fail_with(Flaw::NoDigest, run);
}

/// A mask is valid until a higher version, and never for a newer copy.
#[test]
fn masks_end_with_a_higher_version_or_another_epoch() {
    fn run() {
        let mut lab = Lab::synced(2);
        lab.table.not_here(&replica("a"), Epoch(10), Version(2), agent(1), lab.now);
        lab.obey();
        assert!(!lab.holds(1) && lab.holds(2));
        lab.insert(3);
        lab.pump();
        assert!(lab.holds(1), "a higher version voids it");
        assert!(
            lab.actions
                .iter()
                .any(|action| matches!(action, Action::Wake(woken) if woken.contains(&agent(1))))
        );
        lab.table.not_here(&replica("a"), Epoch(10), Version(2), agent(2), lab.now);
        assert!(lab.holds(2), "an answer older than the copy masks nothing");
        lab.table.not_here(&replica("a"), Epoch(9), Version(99), agent(2), lab.now);
        assert!(lab.holds(2), "nor does one of another life");
    }
    run();
    must_fail_with(Flaw::StickyMask, run);
}

/// The messages that a subscriber gets, and what is in them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Work {
    messages: usize,
    entries: usize,
    operations: usize,
    bytes: usize,
}

impl Work {
    /// Delivers all messages of a feed.
    fn of(lab: &mut Lab) -> Self {
        let mut work = Self::default();
        while let Some(message) = lab.emit() {
            work.messages += 1;
            match &message {
                Message::Chunk { header, ids } => {
                    work.entries += header.count as usize;
                    work.bytes += ids.len();
                }
                Message::Delta { ops, .. } => work.operations += ops.len(),
                Message::Hello { .. } | Message::Beat(_) => {}
            }
            lab.deliver(message);
        }
        work
    }
}

/// quickwit 4561: with ten megabytes of state, a node took more than ten seconds to start.
///
/// The bound is in work, not in time: each entry crosses once, in few messages and bytes, and a stream that
/// is opened again costs only what has changed. It does not hold without resuming.
#[test]
fn cold_join_100k_entries() {
    const ENTRIES: i64 = 100_000;
    fn run() {
        let mut lab = Lab::new();
        lab.owner = Owner::new(Epoch(10));
        for id in 1..=ENTRIES {
            lab.owner.insert(agent(id * 1_000));
        }
        lab.history.note(&lab.owner);
        lab.gossip();
        lab.connect();
        let work = Work::of(&mut lab);
        assert!(lab.holds(1_000) && lab.holds(ENTRIES * 1_000) && !lab.holds(1_001));
        assert!(lab.table.unsynced(lab.now).is_empty());
        assert_eq!((work.entries, work.operations), (ENTRIES as usize, 0), "{work:?}");
        // A hello, the parts, and a heartbeat.
        assert!(work.messages <= 2 + work.entries.div_ceil(crate::CHUNK_IDS), "{work:?}");
        assert!(work.bytes <= 3 * work.entries, "{work:?}");
        // The stream is lost, and ten agents come meanwhile.
        lab.table.failed(lab.stream(), Failure::Ended, lab.now);
        lab.feed = None;
        lab.obey();
        for id in 1..=10 {
            lab.insert(id);
        }
        while lab.dialled.is_none() {
            lab.pass(ms(50));
        }
        lab.connect();
        let work = Work::of(&mut lab);
        assert!(lab.holds(10));
        assert_eq!((work.entries, work.operations), (0, 10), "{work:?}");
    }
    run();
    must_fail_with(Flaw::NoResume, run);
}

/// chitchat 119: the nodes with the most stale values were gossiped first, and small nodes starved.
#[test]
fn small_replica_visible_while_big_one_syncs() {
    fn run() {
        let now = Instant::now();
        let mut table = Table::new(replica("me"), Limits::default(), now);
        let mut owners = BTreeMap::new();
        for (name, first, count) in [("big", 1_000, 10_000), ("small", 1, 3)] {
            let mut owner = Owner::with_sizes(Epoch(10), 64, 64);
            for id in first..first + count {
                owner.insert(agent(id));
            }
            owners.insert(replica(name), owner);
        }
        let members: Vec<_> = owners
            .iter()
            .map(|(name, owner)| Member {
                replica: name.clone(),
                generation: 1,
                address: Arc::from(format!("{name}:1")),
                state: ReplicaState::Ready,
                summary: Some(owner.summary()),
                changes: None,
                heard: now,
            })
            .collect();
        table.gossip(&members, now);
        let mut streams = BTreeMap::new();
        for action in table.actions() {
            if let Action::Dial { stream, replica: Some(name), resume, .. } = action {
                let feed = owners.get_mut(&name).unwrap().feed(resume);
                streams.insert(name, (stream, feed));
            }
        }
        // The next messages of one stream, at most so many of them.
        let mut deliver = |table: &mut Table, name: &str, most: usize| {
            let name = replica(name);
            let owner = owners.get_mut(&name).unwrap();
            let (stream, feed) = streams.get_mut(&name).expect("it is dialled");
            for _ in 0..most {
                let Next::Message(message) = feed.next(owner, now) else { break };
                let from = Identity {
                    replica: name.clone(),
                    epoch: owner.epoch(),
                    state: ReplicaState::Ready,
                    address: Arc::from(format!("{name}:1")),
                };
                table.message(*stream, Some(from), message, now);
            }
        };
        let holder = |table: &Table, id| {
            table.locate(agent(id), now).first().map(|found| found.replica.as_str().to_owned())
        };
        deliver(&mut table, "big", 3);
        deliver(&mut table, "small", 10);
        assert_eq!(holder(&table, 1).as_deref(), Some("small"));
        let unsynced = table.unsynced(now);
        assert!(unsynced.iter().any(|found| found.replica == replica("big")), "it is still being sent");
        deliver(&mut table, "big", usize::MAX);
        assert_eq!(holder(&table, 10_999).as_deref(), Some("big"));
    }
    run();
    must_fail_with(Flaw::OneSnapshot, run);
}
