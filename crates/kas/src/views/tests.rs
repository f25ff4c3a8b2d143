//! Tests of the hub against a played API server. Time is that of tokio, and stands still.

mod callers;
mod tries;
mod world;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use grpc::Code;
use process::lifecycle::Phase;
use proto::kas::api::v1::{ViewAgent, WatchViewRequest, watch_view_response::Event};
use tokio::time::{Instant, sleep};

use self::world::{Client, Lab, Played};
use super::messages::Messages;

#[tokio::test(start_paused = true)]
async fn rows_are_those_of_the_api_server_and_one_watch_serves_all_callers() {
    let lab = Lab::new(1);
    let world = lab.world();
    for n in 0..1_200 {
        world.put("shop", &format!("web-{n:04}"), "Running", n % 5);
    }
    let mut first = lab.ask(|_| {});
    let synced = first.synced().await.unwrap();
    assert_eq!((synced.unanswered.len(), synced.truncated), (0, false));
    assert_eq!(first.columns, ["Ready", "Status", "Restarts", "Age"]);
    assert_eq!(first.pods(), world.truth());
    assert_eq!(world.lists.load(Ordering::SeqCst), 3, "three pages");
    let mut others: Vec<_> = (0..50).map(|_| lab.ask(|_| {})).collect();
    for other in &mut others {
        other.synced().await.unwrap();
        assert_eq!(other.rows, first.rows);
    }
    world.put("shop", "new", "Pending", 0);
    world.put("shop", "web-0007", "Failed", 9);
    world.delete("shop", "web-0008");
    for client in others.iter_mut().chain([&mut first]) {
        client.until("the changes", |client| client.pods() == world.truth()).await;
    }
    assert_eq!((first.received, first.removed), (1_202, 1));
    assert_eq!((world.lists.load(Ordering::SeqCst), world.watches.load(Ordering::SeqCst)), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_breaks_goes_on_where_it_was() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    let lists = world.lists.load(Ordering::SeqCst);
    world.cut();
    client.until("it is stale", |client| client.agents[&1].state == "stale").await;
    world.put("shop", "b", "Running", 0);
    world.delete("shop", "a");
    client.until("it is live", |client| client.agents[&1].state == "live").await;
    client.until("the changes", |client| client.pods() == world.truth()).await;
    assert_eq!((world.lists.load(Ordering::SeqCst), client.resets), (lists, 0));
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_too_old_lists_again_and_only_differences_go_out() {
    let lab = Lab::new(1);
    let world = lab.world();
    for n in 0..700 {
        world.put("shop", &format!("web-{n}"), "Running", 0);
    }
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    let received = client.received;
    world.cut();
    world.put("shop", "web-3", "Failed", 1);
    world.put("shop", "new", "Running", 0);
    world.delete("shop", "web-5");
    world.compact();
    client.until("the changes", |client| client.pods() == world.truth()).await;
    assert_eq!((client.received - received, client.removed, client.resets), (2, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_gets_what_has_changed_or_everything() {
    let lab = Lab::new(2);
    let world = lab.world();
    for n in 0..300 {
        world.put("shop", &format!("web-{n}"), "Running", 0);
        lab.worlds[&2].put("shop", &format!("db-{n}"), "Running", 0);
    }
    let mut client = lab.ask(|_| {});
    let token = client.synced().await.unwrap().resume;
    let mut rows = std::mem::take(&mut client.rows);
    drop(client);
    world.put("shop", "web-3", "Failed", 1);
    world.delete("shop", "web-5");
    sleep(Duration::from_secs(1)).await;
    let mut again = lab.ask(|request| request.resume = token.clone());
    again.rows = rows.clone();
    let second = again.synced().await.unwrap().resume;
    assert_eq!((again.received, again.removed, again.resets), (1, 1, 0));
    assert_eq!(again.pods(), world.truth());
    rows.clone_from(&again.rows);
    drop(again);
    // More changes than are remembered.
    for n in 0..5_000 {
        world.put("shop", "web-3", "Failed", n);
    }
    world.delete("shop", "web-9");
    sleep(Duration::from_secs(1)).await;
    let mut late = lab.ask(|request| request.resume = second.clone());
    late.rows = rows;
    late.synced().await.unwrap();
    assert_eq!((late.resets, late.rows.len()), (1, 598));
    assert_eq!(late.pods(), world.truth());
    // Another question, another replica, another text.
    let mut other = lab.ask(|request| {
        request.resume = second.clone();
        request.filter = "status=Failed".to_owned();
    });
    other.synced().await.unwrap();
    assert_eq!((other.resets, other.rows.len()), (1, 1));
    let elsewhere = Lab::new(2);
    let mut other = elsewhere.ask(|request| request.resume = second);
    other.synced().await.unwrap();
    assert_eq!(other.resets, 1);
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_when_an_agent_is_gone_begins_anew() {
    let lab = Lab::new(2);
    lab.world().put("shop", "a", "Running", 0);
    lab.worlds[&2].put("shop", "b", "Running", 0);
    let mut client = lab.ask(|_| {});
    let token = client.synced().await.unwrap().resume;
    drop(client);
    lab.disconnect(2);
    let mut again = lab.ask(|request| request.resume = token);
    let synced = again.synced().await.unwrap();
    assert_eq!((again.resets, again.rows.len()), (1, 1));
    assert_eq!(synced.unanswered[0].id, 2);
    assert_eq!(again.agents[&2].state, "absent");
    // It is looked at as soon as it is there.
    lab.connect(2);
    again.until("the agent is back", |client| client.rows.len() == 2).await;
    assert_eq!(again.agents[&2].state, "live");
}

#[tokio::test(start_paused = true)]
async fn an_agent_whose_watches_end_at_once_is_asked_less_and_less_often() {
    for (ends, state) in [(true, "stale"), (false, "listing")] {
        let lab = Lab::new(1);
        let world = lab.world();
        world.put("shop", "a", "Running", 0);
        let broken = if ends { &world.ends } else { &world.forgets };
        broken.store(true, Ordering::SeqCst);
        let mut client = lab.ask(|_| {});
        client
            .until("it is not live", |client| client.agents.get(&1).is_some_and(|it| it.state == state))
            .await;
        sleep(Duration::from_secs(300)).await;
        let watches = world.watches.load(Ordering::SeqCst);
        assert!((8..=40).contains(&watches), "{watches} watches in 300 s");
        broken.store(false, Ordering::SeqCst);
        client.until("it is live", |client| client.agents[&1].state == "live").await;
        assert_eq!(client.pods(), world.truth());
    }
}

#[tokio::test(start_paused = true)]
async fn lists_of_an_agent_that_hang_leave_room_for_those_of_others() {
    let lab = Lab::new(2);
    lab.worlds[&2].put("shop", "a", "Running", 0);
    lab.world().slow.store(15, Ordering::SeqCst);
    lab.world().endless.store(true, Ordering::SeqCst);
    // More lists than there may be at once.
    let mut slow: Vec<_> = (0..4)
        .map(|part| {
            lab.ask(|request| {
                request.agents = "id=1".to_owned();
                request.namespaces = (0..20).map(|n| format!("ns-{part}-{n}")).collect();
            })
        })
        .collect();
    for client in &mut slow {
        let synced = client.synced().await.unwrap();
        assert_eq!(synced.unanswered[0].reason, "it is still being listed");
    }
    assert_eq!(lab.world().most_listing.load(Ordering::SeqCst), 4);
    let mut client = lab.ask(|request| request.agents = "id=2".to_owned());
    assert_eq!(client.synced().await.unwrap().unanswered.len(), 0);
    assert_eq!(client.rows.len(), 1);
    let late = "was not complete within 300s";
    slow[0].until("a list ends", |client| client.agents[&1].reason.contains(late)).await;
    assert_eq!(slow[0].agents[&1].state, "absent");
    // One that is quick and has no end.
    lab.worlds[&2].endless.store(true, Ordering::SeqCst);
    let mut endless = lab.ask(|request| {
        request.agents = "id=2".to_owned();
        request.namespaces = vec!["other".to_owned()];
    });
    let pages = "has more than 4000 pages";
    let ended = |agent: &ViewAgent| agent.reason.contains(pages);
    endless.until("the pages end", |client| client.agents.get(&2).is_some_and(ended)).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_caller_gets_the_newest_state() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    let received = client.received;
    for n in 0..20_000 {
        world.put("shop", "a", "Running", n);
        if n % 1_000 == 0 {
            sleep(Duration::from_millis(100)).await;
        }
    }
    sleep(Duration::from_secs(1)).await;
    client.until("the last change", |client| client.rows.values().all(|row| row[2] == "19999")).await;
    assert_eq!(client.received - received, 1);
}

#[tokio::test(start_paused = true)]
async fn callers_see_only_what_they_may() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    world.put("bank", "b", "Running", 0);
    let mut all = lab.ask_as(Played::new(&[""]), |_| {});
    all.synced().await.unwrap();
    assert_eq!(all.rows.len(), 2);
    let mut none = lab.ask_as(Played::new(&[]), |_| {});
    let refused = none.synced().await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert_eq!(refused.message(), "agent 1 (agent-1): the caller may not list pods in all");
    assert!(none.agents.is_empty(), "nothing is told before the refusal");
    // Without a namespace, nothing is guessed.
    let mut unnamed = lab.ask_as(Played::new(&["shop"]), |_| {});
    assert_eq!(unnamed.synced().await.unwrap_err().code(), Code::PermissionDenied);
    let both = vec!["shop".to_owned(), "bank".to_owned()];
    let mut some = lab.ask_as(Played::new(&["shop"]), |request| request.namespaces = both);
    let synced = some.synced().await.unwrap();
    assert_eq!(synced.unanswered[0].reason, "forbidden: the caller may not list pods in bank");
    assert_eq!(some.rows.keys().map(|key| &*key.2).collect::<Vec<_>>(), ["a"]);
    world.put("bank", "c", "Running", 0);
    world.put("shop", "d", "Running", 0);
    some.until("the change", |client| client.rows.len() == 2).await;
    assert!(some.rows.keys().all(|key| key.1 == "shop"));
}

#[tokio::test(start_paused = true)]
async fn labels_choose_agents_and_those_whose_labels_are_not_known_are_told() {
    let lab = Lab::new(4);
    for world in lab.worlds.values() {
        world.put("shop", "a", "Running", 0);
    }
    let mut client = lab.ask(|request| request.agents = "env=prod".to_owned());
    let synced = client.synced().await.unwrap();
    assert_eq!(client.rows.keys().map(|key| key.0).collect::<Vec<_>>(), [1]);
    let gaps: Vec<_> = synced.unanswered.iter().map(|gap| (gap.id, &*gap.reason)).collect();
    assert_eq!(gaps, [(3, "absent: its kas.yaml is not known")]);
    // Also one that there is not.
    let mut client = lab.ask(|request| request.agents = "id=2|99".to_owned());
    let synced = client.synced().await.unwrap();
    assert_eq!(client.rows.len(), 1);
    assert_eq!(synced.unanswered.iter().map(|gap| gap.id).collect::<Vec<_>>(), [99]);
}

#[tokio::test(start_paused = true)]
async fn lines_that_never_end_are_counted_and_harm_no_other_agent() {
    let lab = Lab::new(2);
    for world in lab.worlds.values() {
        world.put("n0", "a", "Running", 0);
    }
    lab.world().junk.store(3 << 20, Ordering::SeqCst);
    lab.world().bookmarks.store(false, Ordering::SeqCst);
    let mut client = lab.ask(|request| request.namespaces = (0..8).map(|n| format!("n{n}")).collect());
    client
        .until("some watches fail", |client| client.agents.get(&1).is_some_and(|it| it.state == "stale"))
        .await;
    let reason = &client.agents[&1].reason;
    assert_eq!(reason, "the answers of this agent that are being read have more than 16777216 bytes");
    assert!((4 << 20..=16 << 20).contains(&lab.hub.buffers.used()), "{}", lab.hub.buffers.used());
    assert!(lab.hub.metrics.bytes.get() >= i64::try_from(lab.hub.buffers.used()).unwrap());
    lab.worlds[&2].put("n1", "b", "Running", 0);
    client
        .until("the other agent", |client| client.rows.contains_key(&(2, "n1".to_owned(), "b".to_owned())))
        .await;
    assert_eq!(client.agents[&2].state, "live");
    drop(client);
    sleep(Duration::from_secs(400)).await;
    assert_eq!((lab.hub.buffers.used(), lab.hub.metrics.bytes.get()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_large_page_is_read_when_there_is_room_for_what_is_made_of_it() {
    let lab = Lab::new(2);
    for n in 0..500 {
        lab.world().put(&"x".repeat(200), &format!("web-{n}"), "Running", 0);
    }
    lab.worlds[&2].put("shop", "small", "Running", 0);
    let others = lab.hub.buffers.parse_nothing_else().await;
    let mut client = lab.ask(|_| {});
    let synced = client.synced().await.unwrap();
    assert_eq!((synced.unanswered.len(), client.rows.len()), (1, 1), "{synced:?}");
    drop(others);
    client.until("the large one", |client| client.rows.len() == 501).await;
}

#[tokio::test(start_paused = true)]
async fn rows_of_an_agent_that_is_gone_for_long_go() {
    let lab = Lab::new(2);
    for world in lab.worlds.values() {
        world.put("shop", "a", "Running", 0);
    }
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    assert_eq!(client.rows.len(), 2);
    // One that is only away may come back.
    lab.disconnect(1);
    lab.forget(2);
    let from = Instant::now();
    client.until("the rows go", |client| client.rows.len() == 1).await;
    assert!(from.elapsed() >= Duration::from_secs(500), "{:?}", from.elapsed());
    assert!(client.rows.keys().all(|key| key.0 == 1));
    let gone = &client.agents[&2];
    assert_eq!((&*gone.state, &*gone.reason), ("absent", "there is no such agent any more"));
    lab.connect(2);
    client.until("it is back", |client| client.rows.len() == 2 && client.agents[&2].state == "live").await;
}

#[tokio::test(start_paused = true)]
async fn agents_that_are_gone_do_not_count_among_those_of_a_view() {
    let lab = Lab::new(2_001);
    lab.worlds[&2_001].put("shop", "late", "Running", 0);
    lab.forget(2_001);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    lab.forget(1);
    lab.connect(2_001);
    client.until("the other one is there", |client| client.rows.len() == 1).await;
}

#[tokio::test(start_paused = true)]
async fn only_the_namespaces_of_the_file_are_read_unless_others_are_named() {
    let lab = Lab::new(4);
    lab.worlds[&4].put("shop", "a", "Running", 0);
    lab.worlds[&4].put("bank", "b", "Running", 0);
    let names = |client: &Client| client.rows.keys().map(|key| key.2.clone()).collect::<Vec<_>>();
    let of_agent = |request: &mut WatchViewRequest| request.agents = "id=4".to_owned();
    let mut all = lab.ask(of_agent);
    all.synced().await.unwrap();
    assert_eq!(names(&all), ["a"]);
    // A caller that may see only these need not name them.
    let mut some = lab.ask_as(Played::new(&["shop"]), of_agent);
    some.synced().await.unwrap();
    assert_eq!(names(&some), ["a"]);
    let mut named = lab.ask(|request| {
        of_agent(request);
        request.namespaces = vec!["bank".to_owned()];
    });
    named.synced().await.unwrap();
    assert_eq!(names(&named), ["b"]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_read_before_the_namespaces_are_known_unless_some_are_named() {
    let lab = Lab::new(3);
    lab.worlds[&3].put("shop", "a", "Running", 0);
    let mut all = lab.ask(|request| request.agents = "id=3".to_owned());
    let synced = all.synced().await.unwrap();
    let gaps: Vec<_> = synced.unanswered.iter().map(|gap| (gap.id, &*gap.reason)).collect();
    assert_eq!(gaps, [(3, "absent: its kas.yaml is not known")]);
    assert!(all.rows.is_empty());
    let mut named = lab.ask(|request| {
        request.agents = "id=3".to_owned();
        request.namespaces = vec!["shop".to_owned()];
    });
    named.synced().await.unwrap();
    assert_eq!(named.rows.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn rights_that_are_withdrawn_end_the_subscription() {
    let lab = Lab::new(1);
    lab.world().put("shop", "a", "Running", 0);
    let rights = Played::new(&[""]);
    let mut client = lab.ask_as(rights.clone(), |_| {});
    client.synced().await.unwrap();
    let from = Instant::now();
    rights.namespaces.lock().clear();
    let status = client.synced().await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(from.elapsed() <= Duration::from_secs(61), "{:?}", from.elapsed());
    assert!(client.subscription.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_about_rights_the_subscription_ends_after_minutes() {
    let lab = Lab::new(1);
    lab.world().put("shop", "a", "Running", 0);
    let rights = Played::new(&[""]);
    let mut client = lab.ask_as(rights.clone(), |_| {});
    client.synced().await.unwrap();
    let from = Instant::now();
    rights.silent.store(true, Ordering::SeqCst);
    let status = client.synced().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let minutes = from.elapsed().as_secs() / 60;
    assert!((5..=6).contains(&minutes), "{:?}", from.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_reads_slowly_gets_no_rows_that_it_may_not_see_any_more() {
    // The director waits for the caller, so it does not ask again.
    let lab = Lab::new(70);
    for world in lab.worlds.values() {
        world.put("shop", "a", "Running", 0);
    }
    let rights = Played::new(&[""]);
    let mut client = lab.ask_as(rights.clone(), |_| {});
    sleep(Duration::from_secs(30)).await;
    rights.namespaces.lock().clear();
    sleep(Duration::from_secs(400)).await;
    let status = client.synced().await.unwrap_err();
    assert_eq!((status.code(), client.received), (Code::Unavailable, 0));
    assert!(status.message().contains("it was not known for 360s"), "{status:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_nobody_reads_ends_and_one_without_news_does_not() {
    let lab = Lab::new(1);
    lab.world().put("shop", "a", "Running", 0);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    let mut waits = Messages::of(client.subscription);
    let mut stalled = Messages::of(lab.ask(|_| {}).subscription);
    assert!(stalled.next().await.unwrap().is_ok());
    // One message comes after an hour.
    let world = Arc::clone(&lab.worlds[&1]);
    tokio::spawn(async move {
        sleep(Duration::from_secs(3_600)).await;
        world.put("shop", "b", "Running", 0);
    });
    while !matches!(waits.next().await.unwrap().unwrap().event, Some(Event::Upserted(_))) {}
    assert_eq!(lab.hub.callers.lock().values().sum::<usize>(), 1, "the other one is gone");
    let status = stalled.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("nothing of the answer was read"), "{status:?}");
    assert!(stalled.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn rows_that_do_not_fit_into_the_memory_end_the_subscription() {
    let lab = Lab::with(2, 70_000);
    for n in 0..200 {
        lab.world().put("shop", &format!("web-{n}"), "Running", 0);
    }
    for n in 0..300 {
        lab.worlds[&2].put("shop", &format!("db-{n}"), "Running", 0);
    }
    let mut first = lab.ask(|request| request.agents = "id=1".to_owned());
    first.synced().await.unwrap();
    let mut second = lab.ask(|request| request.agents = "id=2".to_owned());
    let status = second.synced().await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("views.memory"), "{status:?}");
    // Once nobody looks at the others, they make room.
    drop((first, second));
    sleep(Duration::from_secs(1)).await;
    let mut third = lab.ask(|request| request.agents = "id=2".to_owned());
    third.synced().await.unwrap();
    assert_eq!(third.rows.len(), 300);
    assert_eq!(lab.hub.feeds.lock().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_feeds_of_an_agent_are_bounded_and_each_takes_memory() {
    let lab = Lab::new(2);
    let namespaces = |part: usize| (0..25).map(|n| format!("ns-{part}-{n}")).collect();
    let mut clients: Vec<_> =
        (0..8).map(|part| lab.ask(|request| request.namespaces = namespaces(part))).collect();
    for client in &mut clients {
        assert_eq!(client.synced().await.unwrap().unanswered.len(), 0);
    }
    assert!(lab.hub.bytes.load(Ordering::SeqCst) >= 400 * super::feed::COST);
    lab.world().put("ns-9-0", "a", "Running", 0);
    let mut late = lab.ask(|request| request.namespaces = namespaces(9));
    late.synced().await.unwrap();
    let agent = &late.agents[&1];
    assert_eq!(agent.state, "absent");
    assert!(agent.reason.contains("200 resources and namespaces of this agent"), "{agent:?}");
    // Others look at what there is already, and what nobody looks at makes room.
    let mut other = lab.ask(|request| request.namespaces = namespaces(0));
    assert_eq!(other.synced().await.unwrap().unanswered.len(), 0);
    drop(other);
    clients.truncate(7);
    let is_there = |client: &Client| client.rows.len() == 1 && client.agents[&1].state == "live";
    late.until("there is room", is_there).await;
    assert_eq!(lab.hub.feeds.lock()[&world::agent(1)].len(), 200);

    let small = Lab::with(1, 20 * super::feed::COST);
    let status = small.ask(|request| request.namespaces = namespaces(0)).synced().await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("views.memory"), "{status:?}");
    assert_eq!(small.hub.bytes.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn feeds_are_read_until_a_while_after_the_last_caller() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    drop(client);
    sleep(Duration::from_secs(299)).await;
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    assert_eq!(world.lists.load(Ordering::SeqCst), 1, "it was still read");
    drop(client);
    sleep(Duration::from_secs(301)).await;
    assert_eq!((lab.hub.feeds.lock().len(), world.open.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(lab.hub.bytes.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn large_pages_are_asked_for_in_halves_and_a_server_without_tables_sends_names() {
    let lab = Lab::new(2);
    lab.world().fits.store(40, Ordering::SeqCst);
    lab.worlds[&2].prints.store(false, Ordering::SeqCst);
    for n in 0..100 {
        lab.world().put("shop", &format!("web-{n}"), "Running", 0);
        lab.worlds[&2].put("shop", &format!("db-{n}"), "Running", 0);
    }
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    assert_eq!(client.rows.len(), 200);
    assert_eq!(client.pods(), lab.world().truth());
    assert!(client.rows.iter().filter(|(key, _)| key.0 == 2).all(|(_, cells)| cells.is_empty()));
    lab.worlds[&2].delete("shop", "db-7");
    client.until("the change", |client| client.rows.len() == 199).await;
}

#[tokio::test(start_paused = true)]
async fn an_agentk_that_cannot_cancel_has_four_watches_and_they_are_read_to_their_end() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.cancels.store(false, Ordering::SeqCst);
    let names: Vec<String> = (0..6).map(|n| format!("ns-{n}")).collect();
    for name in &names {
        world.put(name, "a", "Running", 0);
    }
    let mut client = lab.ask(|request| request.namespaces.clone_from(&names));
    client.until("all rows", |client| client.rows.len() == 6).await;
    sleep(Duration::from_secs(1)).await;
    assert!(world.open.load(Ordering::SeqCst) <= 4, "{} watches", world.open.load(Ordering::SeqCst));
    for name in &names {
        world.put(name, "b", "Running", 0);
    }
    // Those without a watch are listed again.
    client.until("all changes", |client| client.rows.len() == 12).await;
    drop(client);
    // Nothing cancels them, so that their tunnels stay counted.
    sleep(Duration::from_secs(310)).await;
    assert_eq!(lab.hub.feeds.lock().len(), 0);
    let kind = lab.hub.kind_of(world::agent(1));
    assert!(kind.left() < 4);
    sleep(Duration::from_secs(200)).await;
    assert_eq!((kind.left(), world.open.load(Ordering::SeqCst)), (4, 0));
}

#[tokio::test(start_paused = true)]
async fn refusals_of_the_api_server_are_told_and_tried_again() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    world.refuses.store(403, Ordering::SeqCst);
    let mut client = lab.ask(|_| {});
    let synced = client.synced().await.unwrap();
    assert_eq!(synced.unanswered[0].reason, "forbidden: played");
    world.refuses.store(0, Ordering::SeqCst);
    client.until("the rows", |client| client.pods() == world.truth()).await;
    client.until("it is live", |client| client.agents[&1].state == "live").await;
    world.refuses.store(503, Ordering::SeqCst);
    world.compact();
    client.until("it is stale", |client| client.agents[&1].state == "stale").await;
    assert_eq!(client.rows.len(), 1, "the rows of before stay");
}

#[tokio::test(start_paused = true)]
async fn filters_labels_and_columns_choose_and_wrong_ones_are_told() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "web-1", "Running", 5);
    world.put("shop", "web-2", "Pending", 0);
    world.put("shop", "db-1", "Running", 4);
    let mut client = lab.ask(|request| {
        request.filter = "restarts>3,phase=Running".to_owned();
        request.label_selector = "app=web".to_owned();
        request.columns = vec!["ip".to_owned(), "STATUS".to_owned()];
    });
    client.synced().await.unwrap();
    assert_eq!(client.columns, ["IP", "Status"]);
    let rows: Vec<_> = client.rows.iter().map(|(key, cells)| (&*key.2, cells.join(" "))).collect();
    assert_eq!(rows, [("web-1", "10.0.0.1 Running".to_owned())]);
    world.put("shop", "web-1", "Running", 1);
    world.put("shop", "web-2", "Running", 7);
    client.until("another row", |client| client.rows.len() == 1 && client.removed == 1).await;
    client.until("another row", |client| client.rows.keys().any(|key| key.2 == "web-2")).await;
    for change in [
        |request: &mut proto::kas::api::v1::WatchViewRequest| request.filter = "colour=red".to_owned(),
        |request: &mut proto::kas::api::v1::WatchViewRequest| request.columns = vec!["Colour".to_owned()],
    ] {
        let status = lab.ask(change).synced().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("Restarts"), "{status:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn rows_that_do_not_pass_are_looked_at_in_parts() {
    let lab = Lab::new(1);
    for n in 0..12_000 {
        lab.world().put("shop", &format!("web-{n:05}"), "Running", 0);
    }
    lab.ask(|_| {}).synced().await.unwrap();
    let of_feed = lab.hub.bytes.load(Ordering::SeqCst);
    let mut client = lab.ask(|request| request.filter = "name=web-11999".to_owned());
    // Others have their turn while nothing passes.
    let turns = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = Arc::clone(&turns);
    let others = tokio::spawn(async move {
        loop {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
        }
    });
    client.until("the agent", |client| client.agents.contains_key(&1)).await;
    // What the caller is to get is counted, too.
    let of_client = lab.hub.bytes.load(Ordering::SeqCst) - of_feed;
    assert!((12_000 * 16..12_000 * 64).contains(&of_client), "{of_client}");
    let before = turns.load(Ordering::SeqCst);
    client.until("the row", |client| client.rows.len() == 1).await;
    assert!(turns.load(Ordering::SeqCst) > before, "they were looked at in parts");
    others.abort();
    client.synced().await.unwrap();
    assert!(lab.hub.bytes.load(Ordering::SeqCst) < of_feed + 4_096);
}

#[tokio::test(start_paused = true)]
async fn more_rows_than_asked_for_are_left_out_and_told() {
    let lab = Lab::new(1);
    for n in 0..20 {
        lab.world().put("shop", &format!("web-{n}"), "Running", 0);
    }
    let mut client = lab.ask(|request| request.max_rows = 7);
    let synced = client.synced().await.unwrap();
    assert_eq!((client.rows.len(), synced.truncated, synced.resume.is_empty()), (7, true, true));
}

#[tokio::test(start_paused = true)]
async fn a_caller_has_64_subscriptions_and_a_shutdown_ends_them() {
    let lab = Lab::new(1);
    let all: Vec<_> = (0..64).map(|_| lab.ask(|_| {})).collect();
    let status = lab.try_ask(Arc::new(super::ApiCaller), |_| {}).err().unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
    drop(all);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    lab.lifecycle.advance(Phase::Leaving);
    let status = client.synced().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_the_watches_of_rows_that_nobody_asks_for_any_more() {
    let lab = Lab::new(2);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    // The rows are kept fresh after the client has left, and the status page counts those of one agent.
    drop(client);
    let mut tally = super::Tally::new(&lab.hub, world::agent(1)).await;
    while tally.counts().state != views::AgentState::Live {
        tally.changed().await;
    }
    let open = || lab.worlds.values().map(|world| world.open.load(Ordering::SeqCst)).sum::<usize>();
    assert!(open() > 2, "{}", open());
    lab.lifecycle.advance(Phase::Leaving);
    while tally.counts().state != views::AgentState::Absent {
        tally.changed().await;
    }
    assert_eq!(tally.counts().reason, "this kas is shutting down");
    // Of paused time: much less than rows are kept fresh.
    sleep(Duration::from_millis(10)).await;
    assert_eq!((open(), lab.hub.feeds.lock().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_summary_counts_objects_of_each_agent() {
    let lab = Lab::new(2);
    for n in 0..30 {
        lab.world().put("shop", &format!("web-{n}"), "Running", 0);
    }
    let mut client = lab.ask(|request| request.view = "summary".to_owned());
    client.synced().await.unwrap();
    assert_eq!(client.columns, ["Nodes", "Namespaces", "Pods", "Deployments"]);
    let row = client.rows.get(&(1, String::new(), "1".to_owned())).unwrap();
    assert_eq!(row[2], "30");
    assert_eq!(client.rows.len(), 2);
    lab.world().delete("shop", "web-0");
    client
        .until("the next count", |client| {
            client.rows.get(&(1, String::new(), "1".to_owned())).is_some_and(|row| row[2] == "29")
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_tally_follows_the_objects_of_a_cluster() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    world.put("bank", "b", "Pending", 0);
    let mut tally = super::Tally::new(&lab.hub, world::agent(1)).await;
    let mut until = async |running: usize, pending: usize| loop {
        tally.changed().await;
        let counts = tally.counts();
        let pods = counts.resources.iter().find(|(name, _)| name == "pods").unwrap();
        let of = |state: &str| pods.1.get(state).copied().unwrap_or_default();
        if (of("Running"), of("Pending"), counts.state) == (running, pending, views::AgentState::Live) {
            break counts;
        }
    };
    assert_eq!(until(1, 1).await.namespaces, 2);
    world.put("bank", "b", "Running", 0);
    until(2, 0).await;
    world.delete("bank", "b");
    assert_eq!(until(1, 0).await.namespaces, 1);
    drop(tally);
    sleep(Duration::from_secs(301)).await;
    assert_eq!(lab.hub.feeds.lock().len(), 0);
}
