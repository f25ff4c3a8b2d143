use super::{super::outcome::Tried, *};

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Agents 1 and 2, 20 requests a second: each is asked every 100 ms, and 300 ms are a gap.
fn two() -> Tally {
    Tally::new(&[agent(1), agent(2)], 20, ms(1000))
}

fn tried(place: &str, is_missed: bool) -> Tried {
    Tried { entered: place.into(), is_missed }
}

fn answered(number: u64, id: i64) -> Done {
    let tries = vec![tried("a", false)];
    Done { number, agent: agent(id), tries, served: Some("kas-0".to_owned()), miss: None }
}

fn missed(number: u64, id: i64, miss: Miss) -> Done {
    Done { number, agent: agent(id), tries: vec![tried("a", true)], served: None, miss: Some(miss) }
}

/// Sends a request, which is answered at once.
fn ok(tally: &mut Tally, number: u64, id: i64, at: u64) {
    tally.sent(number, agent(id), ms(at), Duration::ZERO);
    tally.ended(ms(at), answered(number, id));
}

#[test]
fn a_gap_is_from_the_last_answer_to_the_next_one_of_the_same_agent() {
    let mut tally = two();
    ok(&mut tally, 0, 1, 0);
    ok(&mut tally, 1, 2, 50);
    tally.sent(2, agent(1), ms(100), Duration::ZERO);
    tally.ended(ms(110), missed(2, 1, Miss::unknown("lost")));
    // The other agent is answered meanwhile.
    for at in [150, 250, 350, 450] {
        ok(&mut tally, at, 2, at);
    }
    ok(&mut tally, 3, 1, 400);
    let gap = Gap { agent: agent(1), at: ms(0), duration: ms(400), failed: 1, is_open: false };
    assert_eq!(tally.gaps, std::slice::from_ref(&gap));
    assert_eq!(tally.longest_gap, Some(gap));
    // 300 ms are three turns.
    ok(&mut tally, 4, 1, 700);
    assert_eq!(tally.gaps.len(), 1);
    ok(&mut tally, 5, 1, 1001);
    assert_eq!(tally.gaps.len(), 2);
    assert_eq!(tally.gaps[1].failed, 0, "failures before the last answer do not count");
}

#[test]
fn a_gap_that_has_not_ended_is_open() {
    let mut tally = two();
    for at in [0, 100, 200] {
        ok(&mut tally, at, 1, at);
    }
    tally.finish(ms(500));
    let open = |id, at, duration| Gap { agent: agent(id), at, duration, failed: 0, is_open: true };
    assert_eq!(tally.gaps, [open(2, ms(0), ms(500))], "300 ms are no gap for agent 1");
}

#[test]
fn slow_agents_of_many_are_not_taken_for_gaps() {
    let agents: Vec<AgentId> = (1..=1000).map(agent).collect();
    let mut tally = Tally::new(&agents, 100, ms(1000));
    ok(&mut tally, 0, 1, 0);
    ok(&mut tally, 1, 1, 10_000);
    tally.finish(ms(10_010));
    assert_eq!(tally.gaps, [], "each of them is asked every 10 s");
}

#[test]
fn gaps_and_failures_are_bounded_and_counted() {
    let mut tally = two();
    for number in 0..=1001_u64 {
        ok(&mut tally, number, 1, (number + 1) * 400);
    }
    assert_eq!((tally.gaps.len(), tally.gaps_more), (MAX_GAPS, 2));
    for letter in 0..60_u32 {
        let text = format!("reason {}", char::from_u32(0x100 + letter).unwrap());
        tally.not_sent(agent(1), ms(0), text);
    }
    assert_eq!((tally.failures.len(), tally.failures_more), (MAX_FAILURES, 10));
    assert_eq!(tally.all_failed(), 60);
}

#[test]
fn failures_that_differ_in_numbers_are_one() {
    let mut tally = two();
    for (number, text) in [(0, "waited 1.5 s at 10.0.0.1:81"), (1, "waited 20.25 s at 10.0.0.12:8153")] {
        tally.sent(number, agent(1), ms(number * 10), Duration::ZERO);
        tally.ended(ms(100), missed(number, 1, Miss::not_started(text)));
    }
    // Of another kind.
    tally.sent(2, agent(2), ms(20), Duration::ZERO);
    tally.ended(ms(100), missed(2, 2, Miss::unknown("waited 1.5 s at 10.0.0.1:81")));
    let counts: Vec<_> = tally.failures.iter().map(|failure| (failure.miss.kind, failure.count)).collect();
    assert_eq!(counts, [(MissKind::NotStarted, 2), (MissKind::Unknown, 1)]);
    assert_eq!(tally.failures[0].miss.text, "waited 1.5 s at 10.0.0.1:81", "the first is shown");
}

#[test]
fn a_second_try_is_counted_where_it_entered() {
    let mut tally = two();
    tally.sent(0, agent(1), ms(0), ms(3));
    let tries = vec![tried("a", true), tried("b", false)];
    tally.ended(ms(1500), Done { tries, ..answered(0, 1) });
    assert_eq!((tally.retried, tally.answered, tally.late, tally.all_failed()), (1, 1, 1, 0));
    assert_eq!(tally.entered["a"], Entered { requests: 1, failed: 1 });
    assert_eq!(tally.entered["b"], Entered { requests: 1, failed: 0 });
    assert_eq!(tally.probe_late, ms(3));
    let slowest = &tally.slowest[0];
    assert_eq!((slowest.duration, slowest.attempts, &*slowest.entered), (ms(1500), 2, "b"));
}

#[test]
fn the_slowest_are_kept_in_order() {
    let mut tally = two();
    for number in 0..30_u64 {
        tally.sent(number, agent(1), ms(0), Duration::ZERO);
        tally.ended(ms(number * 7 % 30), answered(number, 1));
    }
    let kept: Vec<u128> = tally.slowest.iter().map(|slow| slow.duration.as_millis()).collect();
    assert_eq!(kept, [29, 28, 27, 26, 25, 24, 23, 22, 21, 20]);
}

#[test]
fn a_second_is_taken_once() {
    let mut tally = two();
    ok(&mut tally, 0, 1, 0);
    tally.sent(1, agent(2), ms(50), Duration::ZERO);
    let second = tally.take_second();
    assert_eq!((second.due, second.answered, second.failed), (2, 1, 0));
    assert_eq!(second.served.get("kas-0"), Some(&1));
    tally.ended(ms(1200), missed(1, 2, Miss::unknown("lost")));
    let second = tally.take_second();
    assert_eq!((second.due, second.answered, second.failed), (0, 0, 1));
    assert_eq!(second.miss.unwrap().text, "lost");
    assert_eq!(tally.take_second().failed, 0);
}

#[test]
fn open_requests_are_late_after_the_patience_of_a_user() {
    let mut tally = two();
    tally.sent(0, agent(1), ms(0), Duration::ZERO);
    tally.sent(1, agent(2), ms(50), Duration::ZERO);
    assert_eq!(tally.unfinished(ms(1000)), (2, 0));
    assert_eq!(tally.unfinished(ms(1040)), (2, 1));
    assert_eq!(tally.oldest_open(), Some(ms(0)));
    tally.ended(ms(1041), answered(0, 1));
    assert_eq!(tally.unfinished(ms(1041)), (1, 0));
}
