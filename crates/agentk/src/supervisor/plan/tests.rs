use grpc::{Code, Status};

use super::*;
use crate::{flaw::must_fail_with, replica::ReplicaInfo};

/// A plan, and a clock that the test controls.
struct World {
    plan: Plan,
    now: Instant,
}

impl World {
    fn new(wanted: usize) -> Self {
        let now = Instant::now();
        Self { plan: Plan::new(wanted, now), now }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// Lets time pass until the plan dial_started, and returns how long that took. Its actions meanwhile are
    /// ignored.
    fn dials_after(&mut self) -> Duration {
        let begun = self.now;
        loop {
            self.next_actions();
            match self.plan.dial_at(self.now) {
                Some(at) if at <= self.now => break,
                _ => self.now = self.plan.wake_at(self.now).expect("it dial_started eventually"),
            }
        }
        self.plan.dial_started();
        self.now - begun
    }

    /// Lets an hour pass, in which it must not dial.
    fn stays(&mut self) {
        let until = self.now + Duration::from_secs(3600);
        loop {
            self.next_actions();
            assert_eq!(self.plan.dial_at(self.now), None);
            match self.plan.wake_at(self.now) {
                Some(at) if at < until => self.now = at,
                _ => break,
            }
        }
        self.now = until;
    }

    /// Returns the actions of now, without those that only log.
    fn next_actions(&mut self) -> Vec<Action> {
        let mut actions = self.plan.next_actions(self.now);
        actions.retain(|action| !matches!(action, Action::Announce(_)));
        actions
    }

    fn connected(&mut self) -> (SessionId, Begin) {
        self.plan.connected(self.now)
    }

    fn status(&self, id: SessionId) -> SessionStatus {
        self.plan.sessions[&id].status.clone()
    }

    fn change(&mut self, id: SessionId, change: impl FnOnce(&mut SessionStatus)) -> Change {
        let mut status = self.status(id);
        change(&mut status);
        self.plan.changed(id, status, self.now)
    }

    /// The first headers of the session say this.
    fn answers(&mut self, id: SessionId, replica: &str, replicas: usize) -> Vec<Action> {
        let answer =
            ReplicaInfo { replica: Some(Replica::new(replica)), replicas: Some(replicas), at: self.now };
        assert_eq!(self.change(id, |status| status.answer = Some(answer)), Change::Quiet);
        self.next_actions()
    }

    /// The tunnels of the session end at these replicas.
    fn serves(&mut self, id: SessionId, at: &[&str]) {
        let replicas = at.iter().map(|name| Replica::new(name)).collect();
        self.change(id, |status| {
            status.stage = Stage::Serving;
            status.replicas = replicas;
        });
    }

    /// Creates a session that serves a replica. The plan must dial it within `within`.
    fn session(&mut self, replica: &str, replicas: usize, within: Duration) -> SessionId {
        let after = self.dials_after();
        assert!(after <= within, "{after:?}");
        let (id, begin) = self.connected();
        let actions = self.answers(id, replica, replicas);
        assert_eq!(actions.contains(&Action::Admit(id)), begin == Begin::Asking);
        self.serves(id, &[replica]);
        id
    }

    /// Creates two sessions that have served for a while.
    fn pair(&mut self) -> [SessionId; 2] {
        let pair = [self.session("a", 2, Duration::ZERO), self.session("b", 2, PAUSE.0)];
        self.stays();
        assert_eq!(self.plan.served(self.now), 2);
        pair
    }

    fn lost(&mut self, id: SessionId) -> Change {
        self.change(id, |status| status.stage = Stage::Ended(None))
    }

    /// A connection reaches `replica` and is closed again.
    fn reaches_again(&mut self, replica: &str, replicas: usize) -> CloseReason {
        let (id, begin) = self.connected();
        assert_eq!(begin, Begin::Asking);
        let actions = self.answers(id, replica, replicas);
        let closed = actions.iter().find_map(|action| match action {
            Action::Close(closed, reason) => Some((*closed, *reason)),
            _ => None,
        });
        let Some((closed, reason)) = closed else { panic!("{actions:?}") };
        assert_eq!(closed, id);
        assert_eq!(self.lost(id), Change::Quiet, "the agent closed it");
        reason
    }
}

fn is_again(pause: Duration) -> bool {
    (PAUSE_NO_NEW_REPLICA.0..=PAUSE_NO_NEW_REPLICA.1).contains(&pause)
}

#[test]
fn first_session_opens_its_tunnels_at_once_and_the_second_asks_first() {
    let mut world = World::new(2);
    assert_eq!(world.dials_after(), Duration::ZERO);
    assert_eq!(world.plan.dial_at(world.now), None, "one attempt at a time");
    let (first, begin) = world.connected();
    assert_eq!(begin, Begin::Tunnels);
    assert_eq!(world.plan.dial_at(world.now), None, "not before the replica is known");
    assert_eq!(world.answers(first, "a", 2), []);
    world.serves(first, &["a"]);
    assert!(world.dials_after() <= PAUSE.0);
    let (second, begin) = world.connected();
    assert_eq!(begin, Begin::Asking);
    assert_eq!(world.next_actions(), []);
    assert_eq!(world.answers(second, "b", 2), [Action::Admit(second)]);
    // A status that was sent before the admission arrived changes nothing.
    let stale = SessionStatus { stage: Stage::Asking, ..world.status(second) };
    world.plan.changed(second, stale, world.now);
    assert_eq!(world.next_actions(), []);
    world.serves(second, &["b"]);
    assert_eq!(world.plan.served(world.now), 2);
    world.stays();
}

#[test]
fn second_connection_to_a_replica_is_closed_and_another_tried_10_to_20_s_later_without_limit() {
    let mut world = World::new(2);
    world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let mut pauses = Vec::new();
    for _ in 0..100 {
        assert_eq!(world.reaches_again("a", 2), CloseReason::AlreadyServed);
        pauses.push(world.dials_after());
    }
    assert!(pauses.iter().all(|pause| is_again(*pause)), "{pauses:?}");
    assert!(pauses.iter().max().unwrap().abs_diff(*pauses.iter().min().unwrap()) > Duration::from_secs(5));
    let (id, _) = world.connected();
    assert!(world.answers(id, "b", 2).contains(&Action::Admit(id)));
    world.serves(id, &["b"]);
    world.stays();
}

#[test]
fn only_replica_gets_one_session_and_is_asked_from_time_to_time_whether_there_are_more() {
    let mut world = World::new(2);
    let id = world.session("a", 1, Duration::ZERO);
    assert_eq!(world.plan.target(world.now), 1);
    let begun = world.now;
    for n in 1..10 {
        while world.next_actions() != [Action::Ask(id)] {
            assert_eq!(world.plan.dial_at(world.now), None);
            world.now = world.plan.wake_at(world.now).unwrap();
        }
        assert_eq!(world.now - begun, ASK_AFTER * n);
        world.answers(id, "a", 1);
    }
    world.answers(id, "a", 2);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn more_replicas_than_are_wanted_change_nothing() {
    let mut world = World::new(2);
    for (name, within) in [("a", Duration::ZERO), ("b", PAUSE.0)] {
        world.session(name, 8, within);
    }
    world.stays();
    // An agent that wants one replica does not dial a second one.
    let mut world = World::new(1);
    world.session("a", 8, Duration::ZERO);
    world.stays();
}

#[test]
fn kas_that_does_not_name_itself_gets_one_session() {
    for answers in [true, false] {
        let mut world = World::new(2);
        world.dials_after();
        let (id, begin) = world.connected();
        assert_eq!(begin, Begin::Tunnels);
        assert_eq!(world.plan.served(world.now), 0);
        if answers {
            world.change(id, |status| status.answer = Some(ReplicaInfo::unnamed()));
            assert_eq!(world.plan.served(world.now), 1);
        }
        world.stays();
        assert_eq!(world.plan.served(world.now), 1, "its tunnels are answered with the first request only");
        let Change::Lost { retry_in, .. } = world.lost(id) else { panic!() };
        assert!(retry_in <= PAUSE.0);
        world.dials_after();
        assert_eq!(world.connected().1, Begin::Tunnels);
    }
}

#[test]
fn second_connection_that_reaches_a_kas_without_a_name_is_closed() {
    let mut world = World::new(2);
    world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let (id, _) = world.connected();
    world.change(id, |status| status.answer = Some(ReplicaInfo::unnamed()));
    assert_eq!(world.next_actions(), [Action::Close(id, CloseReason::Unnamed)]);
    assert!(is_again(world.dials_after()));
}

#[test]
fn lost_replica_is_replaced_immediately_and_the_other_session_is_not_affected() {
    let mut world = World::new(2);
    let [_, b] = world.pair();
    assert!(matches!(world.lost(b), Change::Lost { retiring: false, .. }));
    assert_eq!(world.next_actions(), []);
    assert_eq!(world.plan.served(world.now), 1);
    world.session("c", 2, PAUSE.0);
    assert_eq!(world.plan.served(world.now), 2);
    world.stays();
}

#[test]
fn lost_session_cuts_a_long_pause_short() {
    let mut world = World::new(3);
    let [_, b] = {
        let pair = [world.session("a", 3, Duration::ZERO), world.session("b", 3, PAUSE.0)];
        world.dials_after();
        pair
    };
    world.reaches_again("a", 3);
    assert!(world.dials_after() >= PAUSE_NO_NEW_REPLICA.0);
    world.reaches_again("a", 3);
    world.lost(b);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn asking_session_is_admitted_when_there_is_no_other() {
    let mut world = World::new(2);
    let a = world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let (id, begin) = world.connected();
    assert_eq!(begin, Begin::Asking);
    world.lost(a);
    assert_eq!(world.next_actions(), [Action::Admit(id)]);
}

#[test]
fn higher_count_stays_in_effect_for_five_minutes() {
    let mut world = World::new(2);
    let [a, b] = world.pair();
    world.lost(b);
    let begun = world.now;
    world.dials_after();
    while world.now - begun < COUNT_VALID {
        // The remaining replica already knows that it is the only one.
        assert_eq!(world.reaches_again("a", 1), CloseReason::AlreadyServed);
        assert_eq!(world.plan.target(world.now), if world.now - begun < COUNT_VALID { 2 } else { 1 });
        if world.plan.target(world.now + PAUSE_NO_NEW_REPLICA.1) == 1 {
            break;
        }
        world.dials_after();
    }
    world.pass(PAUSE_NO_NEW_REPLICA.1);
    assert_eq!(world.plan.target(world.now), 1);
    world.stays();
    world.answers(a, "a", 2);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn pauses_grow_while_kas_cannot_be_reached_and_are_reset_by_a_good_session() {
    let mut world = World::new(2);
    for n in 0..20 {
        world.dials_after();
        let pause = world.plan.dial_failed(world.now);
        assert!(pause <= (PAUSE.0 * 2u32.pow(n.min(10))).min(PAUSE.1), "{pause:?}");
    }
    let id = world.session("a", 1, PAUSE.1);
    world.pass(GOOD_AFTER);
    let Change::Lost { retry_in, .. } = world.lost(id) else { panic!() };
    assert!(retry_in <= PAUSE.0);
}

#[test]
fn replica_that_shuts_down_is_avoided_while_another_serves() {
    let mut world = World::new(2);
    let [a, _] = world.pair();
    let change = world.change(a, |status| status.stage = Stage::Retiring);
    assert!(matches!(change, Change::Lost { retiring: true, .. }));
    // The notice arrives after GOAWAY.
    world.change(a, |status| status.drained_by = Some(Replica::new("a")));
    let begun = world.now;
    let mut first = true;
    while world.now - begun < AVOID {
        let pause = world.dials_after();
        assert!(pause <= if first { PAUSE.0 } else { PAUSE.1 }, "{pause:?}");
        first = false;
        if world.now - begun < AVOID {
            assert_eq!(world.reaches_again("a", 2), CloseReason::Leaving);
        }
    }
    // It is still running: the connection had only reached its maximum age.
    let (id, _) = world.connected();
    assert!(world.answers(id, "a", 2).contains(&Action::Admit(id)));
}

/// This failed when replicas were avoided by their names alone: after a rolling restart in place, the agent
/// stayed on one replica for more than half a minute.
#[test]
fn replica_that_has_restarted_is_not_avoided() {
    let mut world = World::new(2);
    let [a, _] = world.pair();
    world.change(a, |status| {
        status.stage = Stage::Retiring;
        status.drained_by = Some(Replica::new("a").run("1"));
    });
    world.dials_after();
    let mut answer = |run: &str| {
        let (id, _) = world.connected();
        let replica = Some(Replica::new("a").run(run));
        let answer = ReplicaInfo { replica, replicas: Some(2), at: world.now };
        world.change(id, |status| status.answer = Some(answer));
        (id, world.next_actions())
    };
    let (id, actions) = answer("1");
    assert!(actions.contains(&Action::Close(id, CloseReason::Leaving)), "{actions:?}");
    let (id, actions) = answer("2");
    assert!(actions.contains(&Action::Admit(id)), "{actions:?}");
}

#[test]
fn session_with_another_replica_releases_the_retiring_one() {
    let mut world = World::new(2);
    let [a, _] = world.pair();
    world.change(a, |status| {
        status.stage = Stage::Retiring;
        status.drained_by = Some(Replica::new("a"));
    });
    world.dials_after();
    assert_eq!(world.reaches_again("b", 3), CloseReason::AlreadyServed);
    assert!(is_again(world.dials_after()));
    let (c, _) = world.connected();
    assert_eq!(world.answers(c, "c", 3), [Action::Admit(c)]);
    world.pass(Duration::from_millis(1));
    world.serves(c, &["c"]);
    assert_eq!(world.next_actions(), [Action::Replaced(a)]);
    assert_eq!(world.next_actions(), []);
    world.lost(a);
    world.stays();
}

#[test]
fn replica_that_shuts_down_is_used_when_there_is_no_other_and_dropped_when_there_are_enough() {
    let mut world = World::new(2);
    let [a, b] = world.pair();
    world.lost(b);
    world.change(a, |status| {
        status.stage = Stage::Retiring;
        status.drained_by = Some(Replica::new("a"));
    });
    world.dials_after();
    let (again, begin) = world.connected();
    assert_eq!(begin, Begin::Tunnels);
    world.answers(again, "a", 3);
    world.serves(again, &["a"]);
    assert_eq!(world.next_actions(), [Action::Replaced(a)]);
    assert_eq!(world.plan.served(world.now), 1);
    world.pass(SETTLE_AFTER);
    assert_eq!(world.next_actions(), [], "there is no other");
    world.session("b", 3, PAUSE.1);
    world.pass(SETTLE_AFTER);
    assert_eq!(world.next_actions(), [], "two serve");
    world.session("c", 3, PAUSE.1);
    world.pass(SETTLE_AFTER);
    assert_eq!(world.next_actions(), [Action::Close(again, CloseReason::Spare)]);
    world.lost(again);
    world.stays();
}

#[test]
fn only_replica_that_retires_a_connection_is_dialled_again() {
    let mut world = World::new(2);
    let a = world.session("a", 1, Duration::ZERO);
    world.stays();
    world.change(a, |status| {
        status.stage = Stage::Retiring;
        status.drained_by = Some(Replica::new("a"));
    });
    let again = world.session("a", 1, PAUSE.0);
    assert_eq!(world.next_actions(), [Action::Replaced(a)]);
    world.lost(a);
    world.stays();
    assert!(world.plan.sessions.contains_key(&again));
}

#[test]
fn two_sessions_with_one_replica_become_one() {
    let mut world = World::new(2);
    let a = world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let (b, _) = world.connected();
    world.answers(b, "b", 2);
    // Its first stream ended at b, but its tunnels end at a: a load balancer distributes streams.
    world.serves(b, &["a"]);
    assert_eq!(world.next_actions(), []);
    world.pass(SETTLE_AFTER);
    assert_eq!(world.next_actions(), [Action::Close(b, CloseReason::AlreadyServed)]);
    world.lost(b);
    assert!(is_again(world.dials_after()));
    assert!(world.plan.sessions.contains_key(&a));
}

#[test]
fn replicas_of_streams_are_counted_and_not_connections() {
    let mut world = World::new(2);
    let a = world.session("a", 2, Duration::ZERO);
    world.serves(a, &["a", "b"]);
    assert_eq!(world.plan.served(world.now), 2);
    world.stays();
    world.serves(a, &["a"]);
    assert!(world.dials_after() <= PAUSE.0);
    let (second, _) = world.connected();
    world.answers(second, "b", 2);
    world.serves(second, &["a", "b"]);
    world.stays();
    // Each of them is connected to both replicas now, which does no harm.
    world.serves(a, &["a", "b"]);
    world.stays();
    assert_eq!(world.plan.sessions.len(), 2);
}

#[test]
fn sessions_beyond_those_that_are_wanted_are_closed() {
    let mut world = World::new(3);
    for (name, within) in [("a", Duration::ZERO), ("b", PAUSE.0), ("c", PAUSE.0)] {
        world.session(name, 3, within);
    }
    world.plan.wanted = 2;
    world.pass(SETTLE_AFTER);
    assert_eq!(world.next_actions(), [Action::Close(2, CloseReason::Spare)]);
}

#[test]
fn silent_replica_is_not_waited_for_when_others_live() {
    let mut world = World::new(2);
    let [a, b] = world.pair();
    world.lost(a);
    world.lost(b);
    world.dials_after();
    let (hangs, begin) = world.connected();
    assert_eq!(begin, Begin::Tunnels);
    assert_eq!(world.dials_after(), ANSWER_TIMEOUT);
    let (c, begin) = world.connected();
    assert_eq!(begin, Begin::Asking);
    assert_eq!(world.answers(c, "c", 2), [Action::Admit(c)]);
    assert!(world.plan.sessions.contains_key(&hangs));
}

#[test]
fn rejected_token_is_tried_again_rarely_unless_it_is_replaced() {
    let rejected = || Stage::Ended(Some(Status::new(Code::Unauthenticated, "unauthenticated")));
    let mut world = World::new(2);
    let mut longest = PAUSE_REJECTED.0;
    for _ in 0..10 {
        world.dials_after();
        let (id, _) = world.connected();
        let Change::Rejected { alone: true, retry_in } = world.change(id, |s| s.stage = rejected()) else {
            panic!();
        };
        assert!(retry_in <= longest);
        longest = (longest * 2).min(PAUSE_REJECTED.1);
        let mut patient = World { plan: Plan::new(2, world.now), now: world.now };
        std::mem::swap(&mut patient.plan.rejected, &mut world.plan.rejected);
        assert_eq!(patient.dials_after(), retry_in);
        world.plan.rejected = Some(world.now + retry_in);
    }
    world.plan.token_replaced(world.now);
    assert_eq!(world.dials_after(), Duration::ZERO);
    let (id, _) = world.connected();
    world.answers(id, "a", 2);
    world.serves(id, &["a"]);
    // A replica that does not know the agent yet must not delay a reconnect.
    world.dials_after();
    let (second, _) = world.connected();
    let change = world.change(second, |s| s.stage = rejected());
    assert!(matches!(change, Change::Rejected { alone: false, .. }), "{change:?}");
    world.pass(GOOD_AFTER);
    world.lost(id);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn shortage_and_its_end_are_logged_once() {
    let mut world = World::new(2);
    world.session("a", 2, Duration::ZERO);
    let begun = world.now;
    let mut logged = 0;
    world.dials_after();
    while world.now - begun < WARN_AFTER * 3 {
        world.reaches_again("a", 2);
        loop {
            logged += world.next_actions().iter().filter(|action| **action == Action::WarnShort).count();
            if world.plan.dial_at(world.now).is_some_and(|at| at <= world.now) {
                break;
            }
            world.now = world.plan.wake_at(world.now).unwrap();
        }
        world.plan.dial_started();
        assert_eq!(logged, usize::from(world.now - begun >= WARN_AFTER));
    }
    let (id, _) = world.connected();
    let actions = world.answers(id, "b", 2);
    assert!(actions.contains(&Action::Recovered), "{actions:?}");
    assert_eq!(world.next_actions(), []);
}

/// k3s 11329: an agent that had been offline for a day never reconnected.
///
/// A day is simulated, in which every attempt fails. Then kas is back, and the next attempt is near. The
/// bound on the work: no more attempts than one in five seconds on average, with some to spare.
#[test]
fn agent_reconnects_after_24h_sim() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    fn run() {
        let mut world = World::new(2);
        let (begun, mut attempts) = (world.now, 0_u64);
        while world.now < begun + DAY {
            world.dials_after();
            attempts += 1;
            world.plan.dial_failed(world.now);
        }
        let late = world.now - (begun + DAY);
        assert!(late <= PAUSE.1, "the first attempt after a day came {late:?} late");
        let expected = DAY.as_secs() / (PAUSE.1.as_secs() / 2);
        assert!((expected * 9 / 10..=expected * 11 / 10).contains(&attempts), "{attempts} attempts");
        assert!(world.dials_after() <= PAUSE.1);
        let (_, begin) = world.connected();
        assert_eq!(begin, Begin::Tunnels);
    }
    run();
    must_fail_with(Flaw::EndlessBackoff, run);
}
