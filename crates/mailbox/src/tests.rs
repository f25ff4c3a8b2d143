mod sim;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ids::{AgentId, ReplicaId};

use super::*;

const NOW: Time = Time(1_000);

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

fn replica(name: &str) -> ReplicaId {
    ReplicaId::new(name)
}

fn members(names: &[&str]) -> Vec<Member> {
    names.iter().map(|name| Member { id: replica(name), epoch: 1 }).collect()
}

fn hook(id: u128, of: i64, dedup: Option<u8>) -> NewHook {
    NewHook {
        id: MessageId(id),
        agent: agent(of),
        hook: "push".into(),
        dedup: dedup.map(|byte| [byte; 32]),
        headers: Arc::new([("x-github-event".into(), Bytes::from_static(b"push"))]),
        body: Bytes::from_static(b"{}"),
    }
}

fn alone() -> Mailbox {
    let mut mailbox = Mailbox::new(replica("a"), 1, Limits::default(), NOW);
    mailbox.set_members(members(&["a"]), NOW);
    mailbox
}

/// Replicas `a`, `b`, `c` that see each other.
fn three() -> [Mailbox; 3] {
    ["a", "b", "c"].map(|name| {
        let mut mailbox = Mailbox::new(replica(name), 1, Limits::default(), NOW);
        mailbox.set_members(members(&["a", "b", "c"]), NOW);
        mailbox
    })
}

/// Lets them talk until nothing is left to say now.
fn settle(mailboxes: &mut [Mailbox], now: Time) {
    for _ in 0..100 {
        let mut is_quiet = true;
        for n in 0..mailboxes.len() {
            while let Some((to, batch)) = mailboxes[n].next_exchange(now) {
                is_quiet = false;
                let from = mailboxes[n].me.clone();
                let answer = mailboxes.iter_mut().find(|it| it.me == to).map(|it| {
                    let (answer, _) = it.receive(&from, batch, now);
                    answer
                });
                mailboxes[n].answered(&to, answer.as_ref().ok_or(Failure), now);
            }
        }
        if is_quiet {
            return;
        }
    }
    panic!("they never stop talking");
}

fn index_of(mailboxes: &[Mailbox], id: &ReplicaId) -> usize {
    mailboxes.iter().position(|it| it.me == *id).unwrap()
}

#[test]
fn a_hook_is_kept_by_the_two_holders_and_delivered_by_the_home() {
    let mut all = three();
    let order = all[0].order(agent(7));
    let (home, second, third) =
        (index_of(&all, &order[0]), index_of(&all, &order[1]), index_of(&all, &order[2]));
    let accepted = all[home].accept(hook(1, 7, None), NOW).unwrap();
    assert!(!all[home].copies(accepted.id).enough);
    settle(&mut all, NOW);
    assert_eq!(all[home].copies(accepted.id), Copies { held: 2, enough: true });
    assert_eq!([home, second, third].map(|n| all[n].entries.len()), [1, 1, 0]);
    for mailbox in &mut all {
        mailbox.set_present(agent(7), true);
    }
    assert!(all[second].next_delivery(NOW).is_none(), "it is not the home");
    let delivery = all[home].next_delivery(NOW).unwrap();
    assert_eq!((delivery.message.id, delivery.attempt), (accepted.id, 1));
    assert!(all[home].next_delivery(NOW).is_none(), "it is being delivered");
    all[home].delivered(accepted.id, Outcome::Done, 0.5, NOW);
    settle(&mut all, NOW);
    for n in [home, second] {
        let entry = &all[n].entries[&accepted.id];
        assert_eq!((entry.message.state, entry.message.body.len()), (State::Over, 0));
        assert_eq!(all[n].totals(NOW).bytes, 0);
    }
}

#[test]
fn whoever_does_not_belong_hands_over_and_forgets() {
    let mut all = three();
    let order = all[0].order(agent(7));
    let third = index_of(&all, &order[2]);
    let id = all[third].accept(hook(1, 7, None), NOW).unwrap().id;
    settle(&mut all, NOW);
    assert!(!all[third].entries.contains_key(&id), "it is handed over");
    // The home leaves: it is no member any more, and gives to the two that are left.
    let home = index_of(&all, &order[0]);
    let left: Vec<&str> = order[1..].iter().map(ReplicaId::as_str).collect();
    for mailbox in &mut all {
        mailbox.set_members(members(&left), NOW);
    }
    settle(&mut all, NOW);
    assert!(all[home].entries.is_empty());
    assert!(left.iter().all(|name| all[index_of(&all, &replica(name))].entries.contains_key(&id)));
    assert_eq!(all[home].accept(hook(2, 7, None), NOW), Err(Refused::NotReady));
}

#[test]
fn what_is_delivered_while_its_home_leaves_is_not_lost_if_another_holder_has_it() {
    let mut all = three();
    let order = all[0].order(agent(7));
    let home = index_of(&all, &order[0]);
    all[home].set_present(agent(7), true);
    let id = all[home].accept(hook(1, 7, None), NOW).unwrap().id;
    all[home].set_present(agent(7), true);
    assert_eq!(all[home].next_delivery(NOW).unwrap().message.id, id);
    assert_eq!(all[home].only_here(), 1, "nobody else has it yet");
    let left: Vec<&str> = order[1..].iter().map(ReplicaId::as_str).collect();
    for mailbox in &mut all {
        mailbox.set_members(members(&left), NOW);
    }
    settle(&mut all, NOW);
    let mailbox = &all[home];
    assert_eq!((mailbox.totals(NOW).waiting, mailbox.only_here()), (1, 0), "its receiver takes long");
}

#[test]
fn the_last_replica_keeps_what_it_has_when_it_leaves() {
    let mut mailbox = alone();
    let id = mailbox.accept(hook(1, 7, None), NOW).unwrap().id;
    assert!(mailbox.copies(id).enough, "there is no other");
    mailbox.set_members(Vec::new(), NOW);
    assert!(mailbox.next_exchange(NOW).is_none());
    assert!(mailbox.entries.contains_key(&id));
    assert_eq!(mailbox.only_here(), 1);
}

#[test]
fn another_process_of_the_same_name_gets_everything_again() {
    let mut all = three();
    let order = all[0].order(agent(7));
    let (home, second) = (index_of(&all, &order[0]), index_of(&all, &order[1]));
    let id = all[home].accept(hook(1, 7, None), NOW).unwrap().id;
    settle(&mut all, NOW);
    all[second] = Mailbox::new(order[1].clone(), 2, Limits::default(), NOW);
    all[second].set_members(members(&["a", "b", "c"]), NOW);
    // The home learns it from the next answer, here to another message.
    let next = (2..).find(|n| all[0].order(agent(*n))[..2] == order[..2]).unwrap();
    all[home].accept(hook(2, next, None), NOW).unwrap();
    settle(&mut all, NOW);
    assert!(all[second].entries.contains_key(&id));
}

#[test]
fn a_repetition_by_the_sender_is_kept_once() {
    let mut mailbox = alone();
    let first = mailbox.accept(hook(1, 7, Some(1)), NOW).unwrap();
    assert!(!first.is_repetition);
    let again = mailbox.accept(hook(2, 7, Some(1)), NOW).unwrap();
    assert_eq!(again, Accepted { id: first.id, is_repetition: true });
    assert!(!mailbox.accept(hook(3, 8, Some(1)), NOW).unwrap().is_repetition, "of another agent");
    mailbox.set_present(agent(7), true);
    mailbox.next_delivery(NOW).unwrap();
    mailbox.delivered(first.id, Outcome::Done, 0.0, NOW);
    let day = NOW.after(Duration::from_secs(24 * 3_600));
    mailbox.tick(Time(day.0 - 1));
    assert!(mailbox.accept(hook(4, 7, Some(1)), day).unwrap().is_repetition);
    mailbox.tick(day);
    assert!(!mailbox.accept(hook(5, 7, Some(1)), day).unwrap().is_repetition);
}

#[test]
fn a_repetition_of_a_delivered_hook_is_known_while_one_of_its_two_holders_lives() {
    for both_crash in [false, true] {
        let mut all = three();
        let order = all[0].order(agent(7));
        let home = index_of(&all, &order[0]);
        let id = all[home].accept(hook(1, 7, Some(1)), NOW).unwrap().id;
        all[home].set_present(agent(7), true);
        all[home].next_delivery(NOW).unwrap();
        settle(&mut all, NOW);
        all[home].delivered(id, Outcome::Done, 0.0, NOW);
        settle(&mut all, NOW);
        let crashed = if both_crash { &order[..2] } else { &order[..1] };
        let mut left: Vec<Mailbox> = all.into_iter().filter(|it| !crashed.contains(&it.me)).collect();
        let names: Vec<String> = left.iter().map(|it| it.me.as_str().to_owned()).collect();
        for mailbox in &mut left {
            mailbox.set_members(members(&names.iter().map(String::as_str).collect::<Vec<_>>()), NOW);
        }
        let home = index_of(&left, &order[crashed.len()]);
        let again = left[home].accept(hook(2, 7, Some(1)), NOW).unwrap();
        // What was only in the memory of those that crashed is not known any more.
        let expected = if both_crash { MessageId(2) } else { id };
        assert_eq!(again, Accepted { id: expected, is_repetition: !both_crash });
        left[home].set_present(agent(7), true);
        assert_eq!(left[home].next_delivery(NOW).is_some(), both_crash);
    }
}

#[test]
fn a_repetition_of_a_dead_letter_is_delivered_again() {
    let limits = Limits { agent_messages: 1, ..Limits::default() };
    let mut mailbox = Mailbox::new(replica("a"), 1, limits, NOW);
    mailbox.set_members(members(&["a"]), NOW);
    let id = mailbox.accept(hook(1, 7, Some(1)), NOW).unwrap().id;
    mailbox.set_present(agent(7), true);
    mailbox.next_delivery(NOW).unwrap();
    mailbox.delivered(id, Outcome::Dead("404"), 0.0, NOW);
    // Only if there is room for it.
    let other = mailbox.accept(hook(2, 7, Some(2)), NOW).unwrap().id;
    assert_eq!(mailbox.accept(hook(3, 7, Some(1)), NOW), Err(Refused::Agent));
    mailbox.next_delivery(NOW).unwrap();
    mailbox.delivered(other, Outcome::Done, 0.0, NOW);
    let again = mailbox.accept(hook(4, 7, Some(1)), NOW).unwrap();
    assert_eq!(again, Accepted { id, is_repetition: true });
    let delivery = mailbox.next_delivery(NOW).unwrap();
    assert_eq!((delivery.message.id, delivery.attempt), (id, 1));
    // While it is delivered, it is kept once.
    assert_eq!(mailbox.accept(hook(5, 7, Some(1)), NOW), Ok(again));
    mailbox.delivered(id, Outcome::Done, 0.0, NOW);
    assert_eq!(mailbox.accept(hook(6, 7, Some(1)), NOW), Ok(again));
    assert!(mailbox.next_delivery(NOW).is_none(), "it was delivered");
}

#[test]
fn a_repetition_of_a_dropped_hook_is_a_new_one_at_both_holders() {
    let limits = Limits { dead_bytes: 0, ..Limits::default() };
    let mut all = ["a", "b"].map(|name| {
        let mut mailbox = Mailbox::new(replica(name), 1, limits, NOW);
        mailbox.set_members(members(&["a", "b"]), NOW);
        mailbox
    });
    let home = index_of(&all, &all[0].order(agent(7))[0]);
    let id = all[home].accept(hook(1, 7, Some(1)), NOW).unwrap().id;
    all[home].set_present(agent(7), true);
    all[home].next_delivery(NOW).unwrap();
    all[home].delivered(id, Outcome::Dead("404"), 0.0, NOW);
    assert_eq!(all[home].tick(NOW), (Vec::new(), 1));
    settle(&mut all, NOW);
    let new = all[home].accept(hook(2, 7, Some(1)), NOW).unwrap();
    assert_eq!(new, Accepted { id: MessageId(2), is_repetition: false });
    settle(&mut all, NOW);
    for mailbox in &mut all {
        let again = mailbox.accept(hook(3, 7, Some(1)), NOW).unwrap();
        assert_eq!(again, Accepted { id: new.id, is_repetition: true });
    }
    assert_eq!(all[home].next_delivery(NOW).unwrap().message.id, new.id);
}

#[test]
fn a_hook_that_is_larger_than_the_room_of_its_agent_waits_alone() {
    let limits = Limits { agent_bytes: 1024, ..Limits::default() };
    let mut mailbox = Mailbox::new(replica("a"), 1, limits, NOW);
    mailbox.set_members(members(&["a"]), NOW);
    let large = |id| NewHook { body: Bytes::from(vec![b'x'; 2048]), ..hook(id, 7, None) };
    let id = mailbox.accept(large(1), NOW).unwrap().id;
    assert_eq!(mailbox.accept(hook(2, 7, None), NOW), Err(Refused::Agent));
    mailbox.set_present(agent(7), true);
    mailbox.next_delivery(NOW).unwrap();
    mailbox.delivered(id, Outcome::Done, 0.0, NOW);
    mailbox.accept(hook(3, 7, None), NOW).unwrap();
    assert_eq!(mailbox.accept(large(4), NOW), Err(Refused::Agent));
}

#[test]
fn too_many_are_refused_and_nothing_is_dropped_for_them() {
    let limits = Limits { agent_messages: 2, bytes: 5 * 1024, over: 3, ..Limits::default() };
    let mut mailbox = Mailbox::new(replica("a"), 1, limits, NOW);
    mailbox.set_members(members(&["a"]), NOW);
    mailbox.accept(hook(1, 1, None), NOW).unwrap();
    mailbox.accept(hook(2, 1, None), NOW).unwrap();
    assert_eq!(mailbox.accept(hook(3, 1, None), NOW), Err(Refused::Agent));
    let refused = (2..100).find_map(|n| mailbox.accept(hook(100 + n as u128, n, None), NOW).err());
    assert_eq!(refused, Some(Refused::Replica));
    assert!(mailbox.totals(NOW).bytes <= 5 * 1024);
    // What another replica has promised is taken.
    let copy = Message { agent: agent(99), ..mailbox.entries[&MessageId(1)].message(NOW, true) };
    let batch = Batch { messages: vec![Message { id: MessageId(999), ..copy }], ..Batch::default() };
    assert_eq!(mailbox.receive(&replica("b"), batch, NOW).0.messages, [Reply::Held]);
    for n in 1..=9 {
        mailbox.set_present(agent(n), true);
    }
    while let Some(delivery) = mailbox.next_delivery(NOW) {
        mailbox.delivered(delivery.message.id, Outcome::Done, 0.0, NOW);
    }
    mailbox.tick(NOW);
    assert_eq!(mailbox.over.len(), 3, "records of what is over are bounded");
}

#[test]
fn failures_are_repeated_with_longer_pauses_and_then_it_is_a_dead_letter() {
    let mut mailbox = alone();
    let id = mailbox.accept(hook(1, 7, None), NOW).unwrap().id;
    assert_eq!(mailbox.absent().collect::<Vec<_>>(), [agent(7)]);
    mailbox.set_present(agent(7), true);
    assert_eq!(mailbox.absent().count(), 0);
    let mut now = NOW;
    let mut pauses = Vec::new();
    for attempt in 1..=12 {
        assert_eq!(mailbox.next_delivery(now).unwrap().attempt, attempt);
        mailbox.delivered(id, Outcome::Again("503"), 1.0, now);
        let due = mailbox.next_wake(now, Duration::from_secs(3_600));
        pauses.push(due.since(now).as_secs());
        assert!(mailbox.next_delivery(Time(due.0 - 1)).is_none());
        now = due;
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
    // An agent that is away costs no attempt.
    mailbox.next_delivery(now).unwrap();
    mailbox.delivered(id, Outcome::Absent, 1.0, now);
    assert!(mailbox.next_delivery(now).is_none());
    mailbox.set_present(agent(7), true);
    assert_eq!(mailbox.next_delivery(now).unwrap().attempt, 13);
    mailbox.delivered(id, Outcome::Again("503"), 0.0, now);

    let day = NOW.after(Duration::from_secs(24 * 3_600));
    assert_eq!(mailbox.tick(Time(day.0 - 1)), (Vec::new(), 0));
    let late = Late { id, agent: agent(7), hook: "push".into(), is_home: true };
    assert_eq!(mailbox.tick(day), (vec![late], 0));
    let listed = mailbox.list(agent(7), 10, day);
    assert_eq!((listed[0].message.state, &*listed[0].message.reason), (State::Dead, "503"));
    assert!(mailbox.next_delivery(day).is_none());
    assert!(mailbox.replay(id, day));
    assert!(!mailbox.replay(id, day), "it waits already");
    assert_eq!(mailbox.next_delivery(day).unwrap().attempt, 1);
    mailbox.delivered(id, Outcome::Dead("404"), 0.0, day);
    assert_eq!(mailbox.totals(day).dead, 1);
    let week = day.after(Duration::from_secs(7 * 24 * 3_600));
    assert_eq!(mailbox.tick(Time(week.0 - 1)), (Vec::new(), 0));
    assert_eq!(mailbox.tick(week), (Vec::new(), 1));
    assert_eq!(mailbox.totals(week), Totals::default());
}

#[test]
fn the_oldest_dead_letters_go_when_there_are_too_many() {
    let limits = Limits { dead_bytes: 1_200, ..Limits::default() };
    let mut mailbox = Mailbox::new(replica("a"), 1, limits, NOW);
    mailbox.set_members(members(&["a"]), NOW);
    for n in 1..=3 {
        let id = mailbox.accept(hook(n, 7, None), NOW).unwrap().id;
        mailbox.set_present(agent(7), true);
        mailbox.next_delivery(NOW).unwrap();
        let now = NOW.after(Duration::from_secs(u64::try_from(n).unwrap()));
        mailbox.delivered(id, Outcome::Dead("404"), 0.0, now);
    }
    assert_eq!(mailbox.tick(NOW), (Vec::new(), 1));
    let left: Vec<u128> = mailbox.list(agent(7), 9, NOW).iter().map(|it| it.message.id.0).collect();
    assert_eq!(left, [2, 3]);
}

#[test]
fn four_are_delivered_at_once() {
    let mut mailbox = alone();
    for n in 1..=6 {
        mailbox.accept(hook(n, 7, None), NOW).unwrap();
    }
    mailbox.set_present(agent(7), true);
    let begun: Vec<MessageId> =
        std::iter::from_fn(|| mailbox.next_delivery(NOW)).map(|it| it.message.id).collect();
    assert_eq!(begun.len(), 4);
    mailbox.delivered(begun[0], Outcome::Done, 0.0, NOW);
    assert_eq!(std::iter::from_fn(|| mailbox.next_delivery(NOW)).count(), 1);
}

#[test]
fn definitions_are_handed_over_and_the_newest_wins() {
    let mut all = three();
    let order = all[0].order(agent(7));
    let [home, second, third] = [0, 1, 2].map(|n| index_of(&all, &order[n]));
    let hooks = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
    assert_eq!(all[home].confirm(agent(7), [1; 32], None, NOW), Confirmed::Wanted);
    assert_eq!(all[home].confirm(agent(7), [1; 32], hooks("one"), NOW), Confirmed::Kept);
    assert_eq!(all[home].confirm(agent(7), [1; 32], None, NOW), Confirmed::Kept);
    assert_eq!(all[home].confirm(agent(8), [9; 32], hooks(""), NOW), Confirmed::Kept);
    assert!(all[home].definition(agent(8), NOW).is_none(), "none is not kept");
    settle(&mut all, NOW);
    assert_eq!(all[second].definition(agent(7), NOW).unwrap().hooks, "one");
    let later = NOW.after(Duration::from_secs(60));
    all[second].confirm(agent(7), [2; 32], hooks("two"), later);
    // The home dies.
    let left: Vec<&str> = order[1..].iter().map(ReplicaId::as_str).collect();
    for n in [second, third] {
        all[n].set_members(members(&left), later);
    }
    settle(&mut all, later);
    assert_eq!(all[third].definition(agent(7), later).unwrap().hooks, "two");
    // It comes back with what it had.
    all[home].set_members(members(&["a", "b", "c"]), later);
    for n in [second, third] {
        all[n].set_members(members(&["a", "b", "c"]), later);
    }
    settle(&mut all, later);
    assert_eq!(all[home].definition(agent(7), later).unwrap().hooks, "two");
    assert!(all[third].definition(agent(7), later).is_none(), "it holds them no longer");
    let week = later.after(Duration::from_secs(7 * 24 * 3_600));
    all[home].tick(week);
    assert!(all[home].definition(agent(7), week).is_some());
    all[home].tick(Time(week.0 + 1));
    assert!(all[home].definition(agent(7), week).is_none());
}

#[test]
fn it_is_known_how_long_a_replica_has_been_the_home() {
    let ten = Duration::from_secs(600);
    let of = (1..).find(|n| three()[0].order(agent(*n))[0] == replica("a")).unwrap();
    let mut mailbox = alone();
    let at = |seconds| NOW.after(Duration::from_secs(seconds));
    assert!(!mailbox.was_home_for(agent(of), ten, at(599)));
    assert!(mailbox.was_home_for(agent(of), ten, at(600)));
    // Others come, and it stays the home of this agent.
    mailbox.set_members(members(&["a", "b", "c"]), at(300));
    assert!(mailbox.was_home_for(agent(of), ten, at(600)));
    let theirs = (1..).find(|n| mailbox.order(agent(*n))[0] == replica("b")).unwrap();
    assert!(!mailbox.was_home_for(agent(theirs), Duration::ZERO, at(600)));
    mailbox.set_members(members(&["a"]), at(700));
    assert!(!mailbox.was_home_for(agent(theirs), ten, at(1_299)));
    assert!(mailbox.was_home_for(agent(theirs), ten, at(1_300)));
}

#[test]
fn a_large_message_goes_alone_and_a_lost_answer_is_asked_for_again() {
    let mut all = three();
    let order = all[0].order(agent(7));
    let home = index_of(&all, &order[0]);
    for n in 1..=3 {
        let large = NewHook { body: Bytes::from(vec![0; 700_000]), ..hook(n, 7, None) };
        all[home].accept(large, NOW).unwrap();
    }
    let (to, batch) = all[home].next_exchange(NOW).unwrap();
    assert_eq!((to.clone(), batch.messages.len()), (order[1].clone(), 1));
    assert!(all[home].next_exchange(NOW).is_none(), "it waits for the answer");
    all[home].answered(&to, Err(Failure), NOW);
    assert!(all[home].next_exchange(NOW).is_none(), "it waits a moment");
    settle(&mut all, NOW.after(Duration::from_millis(200)));
    assert!((1..=3).all(|n| all[home].copies(MessageId(n)).enough));
}

#[test]
fn what_another_replica_tells_cannot_exceed_the_limits() {
    let limits = Limits { bytes: 4 << 10, dead_bytes: 4 << 10, over: 2, ..Limits::default() };
    let mut mailbox = Mailbox::new(replica("a"), 1, limits, NOW);
    mailbox.set_members(members(&["a"]), NOW);
    let first = mailbox.accept(hook(1, 7, None), NOW).unwrap().id;
    let known = mailbox.entries[&first].message(NOW, true);
    let mut tell = |message: Message| {
        let batch = Batch { messages: vec![message], ..Batch::default() };
        let reply = mailbox.receive(&replica("b"), batch, NOW).0.messages[0];
        (reply, mailbox.totals(NOW))
    };
    // A later version that is larger, and the same id for another agent.
    let body = Bytes::from(vec![0; 10 << 10]);
    let (reply, totals) = tell(Message { version: 2, body, ..known.clone() });
    assert_eq!((reply, totals.waiting), (Reply::Later, 1));
    assert_eq!(tell(Message { version: 3, agent: agent(8), ..known.clone() }).0, Reply::Later);
    for n in 10..40 {
        tell(Message { id: MessageId(n), state: State::Dead, ..known.clone() });
        tell(Message { id: MessageId(100 + n), state: State::Over, ..known.clone() });
        tell(Message { id: MessageId(200 + n), ..known.clone() });
    }
    assert_eq!(mailbox.over.len(), 4);
    assert!(mailbox.waiting_bytes <= 8 << 10 && mailbox.dead_bytes <= 8 << 10);
}

#[test]
fn ids_are_read_as_they_are_shown() {
    let id = MessageId(0xab);
    assert_eq!(id.to_string(), format!("{:0>32}", "ab"));
    assert_eq!(id.to_string().parse(), Ok(id));
    assert!("ab".parse::<MessageId>().is_err());
    assert!("+00000000000000000000000000000ab".parse::<MessageId>().is_err());
}
