use grpc::{Code, Status};

use super::*;
use crate::replica::Answer;

/// A plan, and a clock that the test turns.
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

    /// Lets time pass until the plan dials, and returns how long that took. Whatever it does meanwhile is thrown away.
    fn dials_after(&mut self) -> Duration {
        let begun = self.now;
        loop {
            self.settle();
            match self.plan.dial_at(self.now) {
                Some(at) if at <= self.now => break,
                _ => self.now = self.plan.wake_at(self.now).expect("it dials at some time"),
            }
        }
        self.plan.dials();
        self.now - begun
    }

    /// Lets an hour pass, in which it must not dial.
    fn stays(&mut self) {
        let until = self.now + Duration::from_secs(3600);
        loop {
            self.settle();
            assert_eq!(self.plan.dial_at(self.now), None);
            match self.plan.wake_at(self.now) {
                Some(at) if at < until => self.now = at,
                _ => break,
            }
        }
        self.now = until;
    }

    /// What is to be done now, apart from words to the operator.
    fn settle(&mut self) -> Vec<Action> {
        let mut actions = self.plan.settle(self.now);
        actions.retain(|action| !matches!(action, Action::Announce(_)));
        actions
    }

    fn connected(&mut self) -> (SessionId, Begin) {
        self.plan.connected(self.now)
    }

    fn standing(&self, id: SessionId) -> Standing {
        self.plan.sessions[&id].standing.clone()
    }

    fn change(&mut self, id: SessionId, change: impl FnOnce(&mut Standing)) -> Change {
        let mut standing = self.standing(id);
        change(&mut standing);
        self.plan.changed(id, standing, self.now)
    }

    /// The session's first headers say this.
    fn answers(&mut self, id: SessionId, replica: &str, replicas: usize) -> Vec<Action> {
        let answer = Answer { replica: Some(Replica::new(replica)), replicas: Some(replicas), at: self.now };
        assert_eq!(self.change(id, |standing| standing.answer = Some(answer)), Change::Quiet);
        self.settle()
    }

    /// The session's tunnels are at these replicas.
    fn serves(&mut self, id: SessionId, at: &[&str]) {
        let replicas = at.iter().map(|name| Replica::new(name)).collect();
        self.change(id, |standing| {
            standing.stage = Stage::Serving;
            standing.replicas = replicas;
        });
    }

    /// Makes a session that serves a replica, which must be dialled now or within `within`.
    fn session(&mut self, replica: &str, replicas: usize, within: Duration) -> SessionId {
        let after = self.dials_after();
        assert!(after <= within, "{after:?}");
        let (id, begin) = self.connected();
        let actions = self.answers(id, replica, replicas);
        assert_eq!(actions.contains(&Action::Admit(id)), begin == Begin::Asking);
        self.serves(id, &[replica]);
        id
    }

    /// Makes two sessions, which have served for a while.
    fn pair(&mut self) -> [SessionId; 2] {
        let pair = [self.session("a", 2, Duration::ZERO), self.session("b", 2, PAUSE.0)];
        self.stays();
        assert_eq!(self.plan.served(self.now), 2);
        pair
    }

    fn lost(&mut self, id: SessionId) -> Change {
        self.change(id, |standing| standing.stage = Stage::Over(None))
    }

    /// A connection reaches `replica` and is let go again.
    fn in_vain(&mut self, replica: &str, replicas: usize) -> Why {
        let (id, begin) = self.connected();
        assert_eq!(begin, Begin::Asking);
        let actions = self.answers(id, replica, replicas);
        let closed = actions.iter().find_map(|action| match action {
            Action::Close(closed, why) => Some((*closed, *why)),
            _ => None,
        });
        let Some((closed, why)) = closed else { panic!("{actions:?}") };
        assert_eq!(closed, id);
        assert_eq!(self.lost(id), Change::Quiet, "an end that this side made");
        why
    }
}

fn is_again(pause: Duration) -> bool {
    (AGAIN.0..=AGAIN.1).contains(&pause)
}

#[test]
fn first_session_opens_its_tunnels_at_once_and_the_second_asks_first() {
    let mut world = World::new(2);
    assert_eq!(world.dials_after(), Duration::ZERO);
    assert_eq!(world.plan.dial_at(world.now), None, "one attempt at a time");
    let (first, begin) = world.connected();
    assert_eq!(begin, Begin::Tunnels);
    assert_eq!(world.plan.dial_at(world.now), None, "not before it is known who answers");
    assert_eq!(world.answers(first, "a", 2), []);
    world.serves(first, &["a"]);
    assert!(world.dials_after() <= PAUSE.0);
    let (second, begin) = world.connected();
    assert_eq!(begin, Begin::Asking);
    assert_eq!(world.settle(), []);
    assert_eq!(world.answers(second, "b", 2), [Action::Admit(second)]);
    // A standing that left before the order came changes nothing.
    let stale = Standing { stage: Stage::Asking, ..world.standing(second) };
    world.plan.changed(second, stale, world.now);
    assert_eq!(world.settle(), []);
    world.serves(second, &["b"]);
    assert_eq!(world.plan.served(world.now), 2);
    world.stays();
}

#[test]
fn served_replica_that_answers_again_is_let_go_and_another_tried_10_to_20_s_later_without_end() {
    let mut world = World::new(2);
    world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let mut pauses = Vec::new();
    for _ in 0..100 {
        assert_eq!(world.in_vain("a", 2), Why::Served);
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
fn lone_replica_gets_one_session_and_is_asked_now_and_then_whether_it_is_still_alone() {
    let mut world = World::new(2);
    let id = world.session("a", 1, Duration::ZERO);
    assert_eq!(world.plan.target(world.now), 1);
    let begun = world.now;
    for n in 1..10 {
        while world.settle() != [Action::Ask(id)] {
            assert_eq!(world.plan.dial_at(world.now), None);
            world.now = world.plan.wake_at(world.now).unwrap();
        }
        assert_eq!(world.now - begun, ASK * n);
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
    // Nor is a second one wanted by who wants one.
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
            world.change(id, |standing| standing.answer = Some(Answer::unnamed()));
            assert_eq!(world.plan.served(world.now), 1);
        }
        world.stays();
        assert_eq!(world.plan.served(world.now), 1, "its tunnels answer with the first request only");
        let Change::Lost { retry_in, .. } = world.lost(id) else { panic!() };
        assert!(retry_in <= PAUSE.0);
        world.dials_after();
        assert_eq!(world.connected().1, Begin::Tunnels);
    }
}

#[test]
fn second_connection_that_reaches_a_kas_without_a_name_is_let_go() {
    let mut world = World::new(2);
    world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let (id, _) = world.connected();
    world.change(id, |standing| standing.answer = Some(Answer::unnamed()));
    assert_eq!(world.settle(), [Action::Close(id, Why::Unnamed)]);
    assert!(is_again(world.dials_after()));
}

#[test]
fn lost_replica_is_replaced_at_once_and_the_other_is_left_alone() {
    let mut world = World::new(2);
    let [_, b] = world.pair();
    assert!(matches!(world.lost(b), Change::Lost { retiring: false, .. }));
    assert_eq!(world.settle(), []);
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
    world.in_vain("a", 3);
    assert!(world.dials_after() >= AGAIN.0);
    world.in_vain("a", 3);
    world.lost(b);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn without_any_session_the_one_that_asks_is_let_in_unseen() {
    let mut world = World::new(2);
    let a = world.session("a", 2, Duration::ZERO);
    world.dials_after();
    let (id, begin) = world.connected();
    assert_eq!(begin, Begin::Asking);
    world.lost(a);
    assert_eq!(world.settle(), [Action::Admit(id)]);
}

#[test]
fn higher_count_is_believed_for_five_minutes() {
    let mut world = World::new(2);
    let [a, b] = world.pair();
    world.lost(b);
    let begun = world.now;
    world.dials_after();
    while world.now - begun < SEEN {
        // The one that is left knows already that it is alone.
        assert_eq!(world.in_vain("a", 1), Why::Served);
        assert_eq!(world.plan.target(world.now), if world.now - begun < SEEN { 2 } else { 1 });
        if world.plan.target(world.now + AGAIN.1) == 1 {
            break;
        }
        world.dials_after();
    }
    world.pass(AGAIN.1);
    assert_eq!(world.plan.target(world.now), 1);
    world.stays();
    world.answers(a, "a", 2);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn pauses_grow_while_kas_cannot_be_reached_and_begin_anew_after_a_good_session() {
    let mut world = World::new(2);
    for n in 0..20 {
        world.dials_after();
        let pause = world.plan.dial_failed(world.now);
        assert!(pause <= (PAUSE.0 * 2u32.pow(n.min(10))).min(PAUSE.1), "{pause:?}");
    }
    let id = world.session("a", 1, PAUSE.1);
    world.pass(GOOD);
    let Change::Lost { retry_in, .. } = world.lost(id) else { panic!() };
    assert!(retry_in <= PAUSE.0);
}

#[test]
fn replica_that_leaves_is_kept_away_from_while_another_serves() {
    let mut world = World::new(2);
    let [a, _] = world.pair();
    let change = world.change(a, |standing| standing.stage = Stage::Retiring);
    assert!(matches!(change, Change::Lost { retiring: true, .. }));
    // The notice comes after GOAWAY.
    world.change(a, |standing| standing.drained_by = Some(Replica::new("a")));
    let begun = world.now;
    let mut first = true;
    while world.now - begun < AVOID {
        let pause = world.dials_after();
        assert!(pause <= if first { PAUSE.0 } else { PAUSE.1 }, "{pause:?}");
        first = false;
        if world.now - begun < AVOID {
            assert_eq!(world.in_vain("a", 2), Why::Leaving);
        }
    }
    // It is still there: the connection had only reached its age.
    let (id, _) = world.connected();
    assert!(world.answers(id, "a", 2).contains(&Action::Admit(id)));
}

/// Seen to fail while replicas were avoided by their names alone: after a rolling restart in place the agent stayed on
/// one replica for half a minute and more.
#[test]
fn replica_that_has_restarted_is_gone_back_to_at_once() {
    let mut world = World::new(2);
    let [a, _] = world.pair();
    world.change(a, |standing| {
        standing.stage = Stage::Retiring;
        standing.drained_by = Some(Replica::new("a").run("1"));
    });
    world.dials_after();
    let mut answer = |run: &str| {
        let (id, _) = world.connected();
        let replica = Some(Replica::new("a").run(run));
        let answer = Answer { replica, replicas: Some(2), at: world.now };
        world.change(id, |standing| standing.answer = Some(answer));
        (id, world.settle())
    };
    let (id, actions) = answer("1");
    assert!(actions.contains(&Action::Close(id, Why::Leaving)), "{actions:?}");
    let (id, actions) = answer("2");
    assert!(actions.contains(&Action::Admit(id)), "{actions:?}");
}

#[test]
fn successor_on_another_replica_releases_the_one_that_retires() {
    let mut world = World::new(2);
    let [a, _] = world.pair();
    world.change(a, |standing| {
        standing.stage = Stage::Retiring;
        standing.drained_by = Some(Replica::new("a"));
    });
    world.dials_after();
    assert_eq!(world.in_vain("b", 3), Why::Served);
    assert!(is_again(world.dials_after()));
    let (c, _) = world.connected();
    assert_eq!(world.answers(c, "c", 3), [Action::Admit(c)]);
    world.pass(Duration::from_millis(1));
    world.serves(c, &["c"]);
    assert_eq!(world.settle(), [Action::Replaced(a)]);
    assert_eq!(world.settle(), []);
    world.lost(a);
    world.stays();
}

#[test]
fn replica_that_leaves_is_used_when_there_is_no_other_and_dropped_when_there_are_enough() {
    let mut world = World::new(2);
    let [a, b] = world.pair();
    world.lost(b);
    world.change(a, |standing| {
        standing.stage = Stage::Retiring;
        standing.drained_by = Some(Replica::new("a"));
    });
    world.dials_after();
    let (again, begin) = world.connected();
    assert_eq!(begin, Begin::Tunnels);
    world.answers(again, "a", 3);
    world.serves(again, &["a"]);
    assert_eq!(world.settle(), [Action::Replaced(a)]);
    assert_eq!(world.plan.served(world.now), 1);
    world.pass(SETTLE);
    assert_eq!(world.settle(), [], "it is all there is");
    world.session("b", 3, PAUSE.1);
    world.pass(SETTLE);
    assert_eq!(world.settle(), [], "two serve");
    world.session("c", 3, PAUSE.1);
    world.pass(SETTLE);
    assert_eq!(world.settle(), [Action::Close(again, Why::Spare)]);
    world.lost(again);
    world.stays();
}

#[test]
fn lone_replica_that_retires_a_connection_is_gone_back_to() {
    let mut world = World::new(2);
    let a = world.session("a", 1, Duration::ZERO);
    world.stays();
    world.change(a, |standing| {
        standing.stage = Stage::Retiring;
        standing.drained_by = Some(Replica::new("a"));
    });
    let again = world.session("a", 1, PAUSE.0);
    assert_eq!(world.settle(), [Action::Replaced(a)]);
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
    // What it asked was at b, but its tunnels came to a: a balancer spreads streams.
    world.serves(b, &["a"]);
    assert_eq!(world.settle(), []);
    world.pass(SETTLE);
    assert_eq!(world.settle(), [Action::Close(b, Why::Served)]);
    world.lost(b);
    assert!(is_again(world.dials_after()));
    assert!(world.plan.sessions.contains_key(&a));
}

#[test]
fn streams_count_and_not_connections() {
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
    // One of them alone is at both now: that harms nobody.
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
    world.pass(SETTLE);
    assert_eq!(world.settle(), [Action::Close(2, Why::Spare)]);
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
    assert_eq!(world.dials_after(), ANSWER);
    let (c, begin) = world.connected();
    assert_eq!(begin, Begin::Asking);
    assert_eq!(world.answers(c, "c", 2), [Action::Admit(c)]);
    assert!(world.plan.sessions.contains_key(&hangs));
}

#[test]
fn refused_token_is_tried_again_rarely_unless_it_is_exchanged() {
    let refused = || Stage::Over(Some(Status::new(Code::Unauthenticated, "unauthenticated")));
    let mut world = World::new(2);
    let mut longest = REFUSED.0;
    for _ in 0..10 {
        world.dials_after();
        let (id, _) = world.connected();
        let Change::Refused { alone: true, retry_in } = world.change(id, |s| s.stage = refused()) else {
            panic!();
        };
        assert!(retry_in <= longest);
        longest = (longest * 2).min(REFUSED.1);
        let mut patient = World { plan: Plan::new(2, world.now), now: world.now };
        std::mem::swap(&mut patient.plan.refused, &mut world.plan.refused);
        assert_eq!(patient.dials_after(), retry_in);
        world.plan.refused = Some(world.now + retry_in);
    }
    world.plan.exchanged(world.now);
    assert_eq!(world.dials_after(), Duration::ZERO);
    let (id, _) = world.connected();
    world.answers(id, "a", 2);
    world.serves(id, &["a"]);
    // One replica that knows less than the other must not keep the agent from coming back.
    world.dials_after();
    let (second, _) = world.connected();
    let change = world.change(second, |s| s.stage = refused());
    assert!(matches!(change, Change::Refused { alone: false, .. }), "{change:?}");
    world.pass(GOOD);
    world.lost(id);
    assert!(world.dials_after() <= PAUSE.0);
}

#[test]
fn shortage_is_told_once_and_so_is_its_end() {
    let mut world = World::new(2);
    world.session("a", 2, Duration::ZERO);
    let begun = world.now;
    let mut told = 0;
    world.dials_after();
    while world.now - begun < SHORT * 3 {
        world.in_vain("a", 2);
        loop {
            told += world.settle().iter().filter(|action| **action == Action::WarnShort).count();
            if world.plan.dial_at(world.now).is_some_and(|at| at <= world.now) {
                break;
            }
            world.now = world.plan.wake_at(world.now).unwrap();
        }
        world.plan.dials();
        assert_eq!(told, usize::from(world.now - begun >= SHORT));
    }
    let (id, _) = world.connected();
    let actions = world.answers(id, "b", 2);
    assert!(actions.contains(&Action::Recovered), "{actions:?}");
    assert_eq!(world.settle(), []);
}
