//! Tests of single rules of the table.

use proptest::prelude::*;

use super::*;
use crate::{ChunkHeader, Failure, GossipVote, LinkState, Op, Record, Summary, codec};

fn member(name: &str, now: Instant) -> Member {
    Member {
        replica: replica(name),
        generation: 1,
        address: Arc::from(format!("{name}:1")),
        state: ReplicaState::Ready,
        summary: Some(Summary { epoch: Epoch(1), version: Version(0), count: 0, digest: 0 }),
        changes: None,
        heard: now,
    }
}

fn identity(name: &str, epoch: u64) -> Identity {
    Identity {
        replica: replica(name),
        epoch: Epoch(epoch),
        state: ReplicaState::Ready,
        address: Arc::from(format!("{name}:1")),
    }
}

fn hello(epoch: u64, version: u64, resumed: bool) -> Message {
    Message::Hello { epoch: Epoch(epoch), version: Version(version), resumed }
}

fn chunk(epoch: u64, to: u64, chunk: u32, last: bool, ids: &[i64]) -> Message {
    let ids: Vec<_> = ids.iter().map(|&id| agent(id)).collect();
    let mut bytes = Vec::new();
    codec::encode_ids(&ids, &mut bytes);
    let header = ChunkHeader { epoch: Epoch(epoch), to: Version(to), chunk, last, count: ids.len() as u32 };
    Message::Chunk { header, ids: bytes }
}

fn dials(actions: &[Action]) -> Vec<(StreamId, Option<ReplicaId>)> {
    let dial = |action: &Action| match action {
        Action::Dial { stream, replica, .. } => Some((*stream, replica.clone())),
        _ => None,
    };
    actions.iter().filter_map(dial).collect()
}

/// A replica restarts quickly: its new table arrives over TCP while gossip still tells of the process before,
/// or gossip hears it before its table is published.
#[test]
fn a_generation_is_told_only_with_the_table_of_its_process() {
    let told = |lab: &Lab| {
        let view = lab.table.replicas(lab.now).into_iter().find(|view| view.replica == replica("a"));
        view.and_then(|view| Some((view.epoch?.0, view.generation))).unwrap()
    };
    for gossip_is_first in [false, true] {
        let mut lab = Lab::synced(3);
        assert_eq!(told(&lab), (10, Some(1)));
        let (stream, before) = (lab.stream(), lab.member());
        lab.restart(20);
        lab.table.failed(stream, Failure::Ended, lab.now);
        lab.obey();
        if gossip_is_first {
            lab.table.gossip(&[Member { summary: None, ..lab.member() }], lab.now);
            lab.obey();
            assert_eq!(told(&lab), (10, Some(1)), "the table is still that of the process before");
        }
        while lab.dialled.is_none() {
            lab.pass(ms(50));
        }
        lab.connect();
        lab.pump();
        assert_eq!(told(&lab), (20, None));
        lab.table.gossip(&[Member { heard: lab.now, ..before }], lab.now);
        lab.obey();
        assert_eq!(told(&lab), (20, None), "gossip repeats what it knew");
        lab.gossip();
        assert_eq!(told(&lab), (20, Some(2)));
    }
}

/// An unreadable message, such as a snapshot in the format of a later version.
#[test]
fn unreadable_snapshots_are_requested_again_with_growing_delays() {
    let mut lab = Lab::synced(3);
    for _ in 0..600 {
        lab.pass(ms(100));
        lab.gossip();
        if lab.dialled.is_some() {
            lab.connect();
            let hello = lab.emit().unwrap();
            lab.deliver(hello);
        }
        if let Some((stream, _)) = lab.feed {
            lab.table.unreadable(stream, lab.now);
            lab.obey();
        }
        assert_eq!(lab.health(), ReplicaHealth::Live);
        // It is asked directly for agents that are in its copy and for others.
        assert!(lab.holds(1) && !lab.table.unsynced(lab.now).is_empty());
    }
    assert!((3..=12).contains(&lab.dials()), "{} snapshots were asked for in a minute", lab.dials());
    // Then the owner sends a format that this version reads.
    lab.restart(20);
    lab.insert(7);
    for _ in 0..300 {
        lab.gossip();
        lab.pass(ms(100));
        if lab.dialled.is_some() {
            lab.connect();
        }
    }
    assert!(lab.holds(7) && lab.table.unsynced(lab.now).is_empty());
}

#[test]
fn end_of_stream_makes_suspect_until_a_resume() {
    let mut lab = Lab::synced(2);
    lab.now += ms(5_000 - 3_000);
    lab.pump();
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.feed = None;
    lab.obey();
    assert_eq!(lab.health(), ReplicaHealth::Suspect);
    assert!(lab.holds(1), "still asked, last");
    assert!(lab.actions.iter().any(|action| matches!(action, Action::Wake(woken) if woken.len() == 2)));
    lab.insert(3);
    assert_eq!(lab.connect(), Some((Epoch(10), Version(2))), "dialled again at once, by version");
    lab.pump();
    assert_eq!(lab.health(), ReplicaHealth::Live);
    assert!(lab.holds(3));
    let snapshots = lab.actions.iter().filter(|action| asks_snapshot(action));
    assert_eq!(snapshots.count(), 0);
}

#[test]
fn a_short_pause_of_an_owner_needs_no_snapshot() {
    let mut lab = Lab::synced(2);
    let (stream, feed) = lab.feed.take().unwrap();
    lab.table.gossip(&[], lab.now);
    lab.obey();
    lab.pass(ms(5_000));
    assert_eq!(lab.health(), ReplicaHealth::Suspect);
    assert!(lab.holds(1));
    // The owner resumes before the stream is cut, and the stream continues.
    lab.feed = Some((stream, feed));
    lab.insert(3);
    lab.pump();
    lab.gossip();
    assert_eq!(lab.health(), ReplicaHealth::Live);
    assert!(lab.holds(3));
    assert_eq!(lab.dials(), 0);
}

#[test]
fn no_proof_of_life_for_the_ttl_drops() {
    let mut lab = Lab::synced(2);
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.feed = None;
    lab.obey();
    lab.pass(ms(9_900));
    assert!(lab.holds(1));
    lab.pass(ms(150));
    assert_eq!(lab.health(), ReplicaHealth::Gone);
    assert!(lab.table.agents(&replica("a")).unwrap().is_empty());
    assert!(lab.table.unsynced(lab.now).is_empty(), "it is not live, so it is not asked");
    // The same process is heard again, and its copy is restored.
    lab.gossip();
    assert_eq!(lab.health(), ReplicaHealth::Suspect, "its stream has not answered yet");
    lab.pass(ms(100));
    lab.connect();
    lab.pump();
    assert!(lab.holds(1));
    assert_eq!(lab.health(), ReplicaHealth::Live);
}

#[test]
fn order_is_live_draining_suspect() {
    let now = Instant::now();
    let mut table = Table::new(replica("me"), Limits::default(), now);
    let members: Vec<_> = ["a", "b", "c"].map(|name| member(name, now)).into();
    table.gossip(&members, now);
    for (stream, name) in dials(&table.actions()) {
        let name = name.unwrap();
        let mut from = identity(name.as_str(), 1);
        if name.as_str() == "b" {
            from.state = ReplicaState::Draining;
        }
        table.message(stream, Some(from), hello(1, 1, false), now);
        table.message(stream, None, chunk(1, 1, 0, true, &[7]), now);
        if name.as_str() == "a" {
            table.failed(stream, Failure::Ended, now);
        }
    }
    let found: Vec<_> =
        table.locate(agent(7), now).into_iter().map(|found| (found.replica, found.health)).collect();
    assert_eq!(
        found,
        [
            (replica("c"), ReplicaHealth::Live),
            (replica("b"), ReplicaHealth::Draining),
            (replica("a"), ReplicaHealth::Suspect)
        ]
    );
    assert_eq!(table.live(now), 2);
    let why: Vec<_> = table.explain(agent(7), now).iter().map(ToString::to_string).collect();
    assert_eq!(why[2], "c is live, has the agent at version 1: asked");
    assert_eq!(why[0], "a is suspect, has the agent at version 1, not synced: asked");
}

#[test]
fn a_replica_that_left_is_dropped_for_good() {
    let mut lab = Lab::synced(2);
    lab.state = ReplicaState::Draining;
    lab.gossip();
    assert_eq!(lab.health(), ReplicaHealth::Draining);
    // An old state that arrives late changes nothing.
    lab.state = ReplicaState::Ready;
    lab.gossip();
    assert_eq!(lab.health(), ReplicaHealth::Draining);
    lab.state = ReplicaState::Left;
    lab.gossip();
    assert!(!lab.holds(1) && lab.feed.is_none());
    lab.state = ReplicaState::Ready;
    lab.gossip();
    lab.pass(ms(3_000));
    assert_eq!((lab.health(), lab.dials()), (ReplicaHealth::Gone, 0));
    lab.restart(11);
    lab.insert(9);
    lab.gossip();
    lab.connect();
    lab.pump();
    assert!(lab.holds(9), "the next life does");
}

#[test]
fn a_replica_that_refused_is_not_asked_until_a_stream_opens() {
    let mut lab = Lab::new();
    lab.insert(1);
    lab.gossip();
    let (stream, _) = lab.dialled.take().unwrap();
    lab.table.failed(stream, Failure::Refused, lab.now);
    lab.obey();
    assert_eq!(lab.health(), ReplicaHealth::Unreachable);
    assert!(lab.table.unsynced(lab.now).is_empty());
    lab.pass(ms(200));
    lab.connect();
    lab.pump();
    assert!(lab.holds(1) && lab.health() == ReplicaHealth::Live);
}

#[test]
fn changes_by_gossip_alone_keep_a_copy_current() {
    let mut lab = Lab::synced(2);
    // The stream is half-open: open and silent.
    let (stream, feed) = lab.feed.take().unwrap();
    lab.insert(3);
    lab.remove(1);
    lab.gossip_changes();
    assert!(lab.holds(3) && !lab.holds(1));
    // A gap in gossip has no immediate effect.
    lab.feed = None;
    for id in 10..300 {
        lab.insert(id);
    }
    lab.gossip_changes();
    assert!(!lab.holds(299));
    assert_eq!(lab.dials(), 0);
    assert_eq!(lab.table.unsynced(lab.now).len(), 1, "but absence proves nothing meanwhile");
    lab.pass(ms(3_050));
    assert_eq!(lab.dials(), 1, "after 3 s it is");
    assert!(lab.actions.contains(&Action::Close { stream }));
    drop(feed);
    assert_eq!(lab.connect(), Some((Epoch(10), Version(4))));
    lab.pump();
    assert!(lab.holds(299) && lab.table.unsynced(lab.now).is_empty());
}

#[test]
fn a_gap_on_a_stream_asks_for_a_snapshot() {
    let mut lab = Lab::synced(2);
    lab.insert(3);
    lab.emit().unwrap();
    lab.insert(4);
    lab.now += ms(20);
    lab.pump();
    assert!(!lab.holds(4), "an operation behind a gap is not applied");
    assert!(lab.actions.iter().any(asks_snapshot));
    lab.connect();
    lab.pump();
    assert!(lab.holds(3) && lab.holds(4));
}

#[test]
fn a_new_replica_is_usable_through_gossip_before_its_stream() {
    let mut lab = Lab::new();
    lab.insert(1);
    lab.gossip_changes();
    assert!(lab.holds(1), "version 0 is the empty set");
    assert_eq!(lab.table.unsynced(lab.now).len(), 1);
}

#[test]
fn snapshots_are_staggered() {
    let now = Instant::now();
    let mut table = Table::new(replica("me"), Limits::default(), now);
    let members: Vec<_> = (0..20).map(|i| member(&format!("r{i:02}"), now)).collect();
    table.gossip(&members, now);
    let mut open = dials(&table.actions());
    let mut done = 0;
    while let Some((stream, name)) = open.pop() {
        assert!(open.len() < 8, "{} at a time", open.len() + 1);
        let name = name.unwrap();
        table.message(stream, Some(identity(name.as_str(), 1)), hello(1, 5, false), now);
        table.message(stream, None, chunk(1, 5, 0, true, &[1, 2]), now);
        open.extend(dials(&table.actions()));
        done += 1;
    }
    assert_eq!(done, 20);
    assert!(table.unsynced(now).is_empty());
    assert_eq!(table.locate(agent(2), now).len(), 20);
}

#[test]
fn seeds_are_enough_when_udp_is_blocked() {
    let now = Instant::now();
    let mut table = Table::new(replica("me"), Limits::default(), now);
    table.seeds(["me:1", "a:1", "b:1"].map(Arc::from), now);
    assert!(!table.is_settled(now));
    let open = dials(&table.actions());
    assert_eq!(open.len(), 3);
    for ((stream, _), name) in open.iter().zip(["a", "b", "me"]) {
        table.message(*stream, Some(identity(name, 1)), hello(1, 1, false), now);
        table.message(*stream, None, chunk(1, 1, 0, true, &[3]), now);
    }
    assert_eq!(table.locate(agent(3), now).len(), 2, "our own stream is closed");
    assert!(table.is_settled(now));
    let closed: Vec<_> =
        table.actions().into_iter().filter(|action| matches!(action, Action::Close { .. })).collect();
    assert_eq!(closed, [Action::Close { stream: open[2].0 }]);
    let views = table.replicas(now);
    assert!(views.iter().all(|view| view.gossip == GossipVote::Unheard && view.link == LinkState::Open));
    // A heartbeat carries the same state as gossip.
    let mut from = identity("a", 1);
    from.state = ReplicaState::Draining;
    let summary =
        Summary { epoch: Epoch(1), version: Version(1), count: 1, digest: codec::digest([agent(3)]) };
    table.message(open[0].0, Some(from), Message::Beat(summary), now);
    assert_eq!(table.locate(agent(3), now)[1].health, ReplicaHealth::Draining);
}

#[test]
fn another_process_at_the_address_is_a_refusal_of_the_old_one() {
    let mut lab = Lab::synced(2);
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.feed = None;
    lab.obey();
    lab.pass(ms(200));
    let (stream, _) = lab.dialled.take().unwrap();
    let mut from = identity("z", 50);
    from.address = Arc::from("a:1");
    lab.table.message(stream, Some(from), hello(50, 0, false), lab.now);
    lab.table.message(stream, None, chunk(50, 0, 0, true, &[]), lab.now);
    assert_eq!(lab.health(), ReplicaHealth::Unreachable);
    assert!(!lab.holds(1));
    assert!(lab.table.replicas(lab.now).iter().any(|view| view.replica == replica("z") && view.synced));
}

#[test]
fn gossip_votes_only_on_replicas_that_it_has_heard() {
    let mut lab = Lab::synced(2);
    lab.table.gossip_restarted(lab.now);
    // The new gossip task has heard no replica yet. The stream is refused for a moment.
    lab.table.gossip(&[], lab.now);
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.feed = None;
    lab.obey();
    lab.pass(ms(200));
    let (stream, _) = lab.dialled.take().unwrap();
    lab.table.failed(stream, Failure::Refused, lab.now);
    lab.obey();
    assert_eq!(lab.table.agents(&replica("a")).unwrap().len(), 2, "one vote");
}

#[test]
fn everything_that_a_peer_can_grow_is_bounded() {
    let now = Instant::now();
    let limits = Limits { replicas: 4, ids: 3, kept: 2, masks: 2, ..Limits::default() };
    let mut table = Table::new(replica("me"), limits, now);
    let members: Vec<_> = (0..10).map(|i| member(&format!("r{i}"), now)).collect();
    table.gossip(&members, now);
    assert_eq!((table.replicas(now).len(), table.refused()), (4, 6));
    let (stream, name) = dials(&table.actions())[0].clone();
    let name = name.unwrap();
    table.message(stream, Some(identity(name.as_str(), 1)), hello(1, 4, false), now);
    // Four ids are one too many.
    table.message(stream, None, chunk(1, 4, 0, true, &[1, 2, 3, 4]), now);
    assert!(table.agents(&name).unwrap().is_empty());
    assert!(table.unsynced(now).iter().any(|found| found.replica == name), "so it is asked directly");
    for id in 1..100 {
        table.not_here(&name, Epoch(1), Version(9), agent(id), now);
    }
    assert!(table.replicas(now).iter().all(|view| view.masked <= 2));
    table.seeds((0..10).map(|i| Arc::from(format!("s{i}:1"))), now);
    assert_eq!(table.refused(), 12);
}

#[test]
fn operations_during_a_snapshot_are_kept_to_a_bound() {
    let mut lab = Lab::with(Limits { kept: 2, ..Limits::default() });
    for id in 1..=3 {
        lab.insert(id);
    }
    lab.gossip();
    lab.connect();
    for _ in 0..2 {
        let message = lab.emit().unwrap();
        lab.deliver(message);
    }
    // Gossip delivers three operations while half of the snapshot has arrived: one too many.
    for id in 4..=6 {
        lab.insert(id);
    }
    lab.gossip_changes();
    assert!(lab.feed.is_none(), "it starts again");
    lab.connect();
    lab.pump();
    assert!((1..=6).all(|id| lab.holds(id)));
    assert!(lab.table.unsynced(lab.now).is_empty());
}

#[test]
fn an_own_pause_drops_no_replica() {
    let mut lab = Lab::synced(2);
    lab.now += ms(2_000);
    lab.pump();
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.feed = None;
    lab.obey();
    // The replica is dialled, and then this process is paused. When it continues, gossip's detector reports
    // all as gone.
    lab.now += ms(30_000);
    lab.table.gossip(&[], lab.now);
    lab.table.tick(lab.now);
    lab.obey();
    assert!(!lab.holds(1), "no proof, no answer");
    assert_eq!(lab.table.agents(&replica("a")).unwrap().len(), 2, "but nothing is dropped yet");
    assert!(lab.connect().is_some());
    lab.pump();
    assert!(lab.holds(1));
}

#[test]
fn gossip_does_not_vote_on_a_process_that_it_has_not_heard() {
    let mut lab = Lab::synced(1);
    lab.table.gossip(&[], lab.now);
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.obey();
    lab.restart(20);
    lab.insert(4);
    lab.pass(ms(200));
    lab.connect();
    lab.pump();
    assert!(lab.holds(4));
    assert_eq!(lab.health(), ReplicaHealth::Live, "the vote was about the life before");
}

#[test]
fn resumes_that_become_snapshots_queue() {
    let now = Instant::now();
    let mut table = Table::new(replica("me"), Limits { snapshots: 3, ..Limits::default() }, now);
    let members: Vec<_> = (0..10).map(|i| member(&format!("r{i}"), now)).collect();
    table.gossip(&members, now);
    let (mut open, mut streams) = (dials(&table.actions()), Vec::new());
    while let Some((stream, name)) = open.pop() {
        let name = name.unwrap();
        table.message(stream, Some(identity(name.as_str(), 1)), hello(1, 5, false), now);
        table.message(stream, None, chunk(1, 5, 0, true, &[1]), now);
        streams.push(stream);
        open.extend(dials(&table.actions()));
    }
    // A short failure cuts all streams, and no owner can resume them.
    let now = now + ms(2_000);
    for stream in streams {
        table.failed(stream, Failure::Ended, now);
    }
    for (stream, name) in dials(&table.actions()) {
        let from = identity(name.unwrap().as_str(), 1);
        table.message(stream, Some(from), hello(1, 500, false), now);
    }
    let syncing = table.replicas(now).iter().filter(|view| view.link == LinkState::Syncing).count();
    assert_eq!(syncing, 3);
}

#[test]
fn a_clock_set_back_does_not_hide_the_next_process() {
    let mut lab = Lab::synced(2);
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.obey();
    lab.restart(5);
    lab.insert(8);
    lab.pass(ms(200));
    let (stream, resume) = lab.dialled.take().unwrap();
    let (seen, _) = resume.unwrap();
    assert!(lab.owner.raise_epoch(seen), "the subscriber's request says which epoch it has seen");
    lab.history.note(&lab.owner);
    lab.feed = Some((stream, lab.owner.feed(resume)));
    lab.pump();
    assert!(lab.holds(8) && !lab.holds(1));
}

/// Found by S35 of chaos: the process before had begun with a clock that was an hour ahead, and nothing of
/// its table was left when the next one came.
#[test]
fn a_clock_set_back_does_not_hide_a_process_whose_predecessor_was_dropped() {
    let mut lab = Lab::synced(2);
    lab.table.failed(lab.stream(), Failure::Ended, lab.now);
    lab.feed = None;
    lab.obey();
    lab.table.gossip(&[], lab.now);
    lab.pass(Duration::from_secs(11));
    assert_eq!((lab.holds(1), lab.health()), (false, ReplicaHealth::Gone));
    lab.restart(5);
    lab.insert(8);
    // Discovery names it still.
    lab.table.seeds([Arc::from("a:1")], lab.now);
    lab.gossip();
    let (stream, resume) = lab.dialled.take().expect("it is dialled");
    let (seen, version) = resume.expect("which epoch is known");
    assert_eq!((seen, version), (Epoch(10), Version::NONE));
    assert!(lab.owner.raise_epoch(seen));
    lab.history.note(&lab.owner);
    lab.feed = Some((stream, lab.owner.feed(resume)));
    lab.pump();
    assert!(lab.holds(8) && !lab.holds(1));
}

#[test]
fn a_snapshot_wakes_only_waiters_of_changed_agents() {
    let mut lab = Lab::synced(3);
    lab.feed = Some((lab.stream(), lab.owner.feed(None)));
    lab.remove(2);
    lab.insert(9);
    lab.now += ms(50);
    lab.pump();
    let woken: Vec<_> = lab
        .actions
        .iter()
        .filter_map(|action| match action {
            Action::Wake(woken) => Some(woken.clone()),
            Action::WakeAll => panic!("only these waiters"),
            _ => None,
        })
        .flatten()
        .collect();
    assert_eq!(woken, [agent(2), agent(9)]);
}

#[test]
fn parts_of_a_snapshot_must_follow_each_other() {
    for bad in [
        chunk(10, 3, 0, false, &[]),
        chunk(10, 3, 1, true, &[5]),
        chunk(9, 3, 0, true, &[5]),
        Message::Chunk {
            header: ChunkHeader { epoch: Epoch(10), to: Version(3), chunk: 0, last: true, count: 2 },
            ids: vec![1, 0],
        },
        Message::Delta { from: Version(3), to: Version(5), ops: vec![Op::Add(agent(5))] },
    ] {
        let mut lab = Lab::synced(3);
        lab.feed = Some((lab.stream(), lab.owner.feed(None)));
        let greeting = lab.emit().unwrap();
        lab.deliver(greeting);
        lab.deliver(bad.clone());
        assert!(lab.feed.is_none(), "the stream is closed: {bad:?}");
        assert!(lab.holds(1) && !lab.holds(5), "and the copy stays");
    }
    // The second part is not in ascending order.
    let mut lab = Lab::synced(3);
    lab.feed = Some((lab.stream(), lab.owner.feed(None)));
    let greeting = lab.emit().unwrap();
    lab.deliver(greeting);
    lab.deliver(chunk(10, 3, 0, false, &[5]));
    lab.deliver(chunk(10, 3, 1, true, &[5]));
    assert!(lab.feed.is_none() && !lab.holds(5));
}

#[test]
fn silent_streams_and_unanswered_dials_time_out() {
    let mut lab = Lab::synced(1);
    let (stream, _) = lab.feed.take().unwrap();
    lab.pass(ms(5_900));
    assert!(!lab.actions.contains(&Action::Close { stream }));
    assert!(lab.table.deadline(lab.now) <= lab.now + ms(100));
    lab.pass(ms(150));
    assert!(lab.actions.contains(&Action::Close { stream }));
    assert_eq!(lab.health(), ReplicaHealth::Suspect);
    // The redial is not answered either, and gossip agrees: the copy is dropped before the ttl.
    lab.table.gossip(&[], lab.now);
    lab.obey();
    lab.pass(ms(2_200));
    assert_eq!(lab.health(), ReplicaHealth::Gone);
}

#[derive(Debug, Clone)]
enum Event {
    Message(u64, bool, Message),
    Failed(u64, Failure),
    Gossip(Vec<(u8, u64, Option<Summary>, Option<Record>)>),
    NotHere(u8, u64, u64, i64),
    Pass(u64),
}

fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..6, Just(u64::MAX), Just(u64::MAX - 1), any::<u64>()]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (1i64..6, any::<bool>());
    prop::collection::vec(
        op.prop_map(|(id, add)| if add { Op::Add(agent(id)) } else { Op::Remove(agent(id)) }),
        0..5,
    )
}

fn events() -> impl Strategy<Value = Event> {
    let summary = || {
        (numbers(), numbers(), 0u64..4, numbers()).prop_map(|(epoch, version, count, digest)| Summary {
            epoch: Epoch(epoch),
            version: Version(version),
            count,
            digest,
        })
    };
    let message = prop_oneof![
        (numbers(), numbers(), any::<bool>())
            .prop_map(|(epoch, version, resumed)| hello(epoch, version, resumed)),
        (numbers(), numbers(), ops()).prop_map(|(from, to, ops)| Message::Delta {
            from: Version(from),
            to: Version(if to == 0 { from.wrapping_add(ops.len() as u64) } else { to }),
            ops,
        }),
        (numbers(), numbers(), 0u32..3, any::<bool>(), prop::collection::vec(any::<u8>(), 0..4), 0u32..4)
            .prop_map(|(epoch, to, chunk, last, ids, count)| Message::Chunk {
                header: ChunkHeader { epoch: Epoch(epoch), to: Version(to), chunk, last, count },
                ids,
            }),
        summary().prop_map(Message::Beat),
    ];
    let record = (numbers(), numbers(), ops()).prop_map(|(epoch, first, ops)| Record {
        epoch: Epoch(epoch),
        first: Version(first),
        ops,
    });
    let member = (0u8..3, numbers(), prop::option::of(summary()), prop::option::of(record));
    prop_oneof![
        6 => (0u64..12, any::<bool>(), message).prop_map(|(stream, from, message)| Event::Message(stream, from, message)),
        1 => (0u64..12, 0u8..3).prop_map(|(stream, how)| Event::Failed(stream, match how {
            0 => Failure::Refused,
            1 => Failure::Unanswered,
            _ => Failure::Ended,
        })),
        3 => prop::collection::vec(member, 0..3).prop_map(Event::Gossip),
        1 => (0u8..3, numbers(), numbers(), 1i64..6).prop_map(|(at, epoch, version, id)| Event::NotHere(at, epoch, version, id)),
        2 => (0u64..12_000).prop_map(Event::Pass),
    ]
}

proptest! {
    /// Peers may send anything in any order: there is no panic and no unbounded growth, and versions and
    /// epochs never decrease.
    #[test]
    fn hostile_peers_break_nothing(events in prop::collection::vec(events(), 0..60)) {
        let mut now = Instant::now();
        let mut table = Table::new(replica("me"), Limits { replicas: 3, kept: 8, masks: 4, ..Limits::default() }, now);
        table.seeds(["r0:1", "r9:1"].map(Arc::from), now);
        let mut seen: BTreeMap<ReplicaId, Epoch> = BTreeMap::new();
        for event in events {
            match event {
                Event::Message(stream, from, message) => {
                    let epoch = match &message {
                        Message::Hello { epoch, .. } => epoch.0,
                        Message::Beat(summary) => summary.epoch.0,
                        _ => 1,
                    };
                    let from = from.then(|| identity(&format!("r{}", stream % 3), epoch));
                    table.message(StreamId(stream), from, message, now);
                }
                Event::Failed(stream, failure) => table.failed(StreamId(stream), failure, now),
                Event::Gossip(members) => {
                    let members: Vec<_> = members.into_iter().map(|(at, generation, summary, changes)| Member {
                        generation,
                        summary,
                        changes,
                        ..member(&format!("r{at}"), now)
                    }).collect();
                    table.gossip(&members, now);
                }
                Event::NotHere(at, epoch, version, id) => {
                    table.not_here(&replica(&format!("r{at}")), Epoch(epoch), Version(version), agent(id), now);
                }
                Event::Pass(time) => {
                    now += ms(time);
                    table.tick(now);
                }
            }
            table.actions();
            prop_assert!(table.deadline(now) > now);
            table.unsynced(now);
            for view in table.replicas(now) {
                prop_assert!(view.masked <= 4);
                if let Some(epoch) = view.epoch {
                    let before = seen.insert(view.replica.clone(), epoch);
                    prop_assert!(before.is_none_or(|before| before <= epoch));
                }
            }
        }
    }
}
