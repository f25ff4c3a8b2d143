//! Tests of what is tried again after failures, and when.

use std::{sync::atomic::Ordering, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use grpc::Status;
use tokio::time::{Instant, sleep};

use super::world::Lab;
use crate::views::{Watched, refusal, tries::SOON};

#[tokio::test(start_paused = true)]
async fn who_looks_anew_is_answered_by_a_new_try() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    world.refuses.store(503, Ordering::SeqCst);
    let mut first = lab.ask(|_| {});
    let synced = first.synced().await.unwrap();
    assert_eq!(synced.unanswered[0].reason, "absent: the API server answered 503: played");
    // It is tried less and less often.
    sleep(Duration::from_secs(300)).await;
    world.refuses.store(0, Ordering::SeqCst);
    let begun = Instant::now();
    let mut second = lab.ask(|_| {});
    assert_eq!(second.synced().await.unwrap().unanswered.len(), 0);
    assert!(begun.elapsed() <= SOON, "{:?}", begun.elapsed());
    assert_eq!(second.pods(), world.truth());
    first.until("it is live", |client| client.agents[&1].state == "live").await;
    // The same for rows of before.
    world.refuses.store(503, Ordering::SeqCst);
    world.compact();
    first.until("it is stale", |client| client.agents[&1].state == "stale").await;
    sleep(Duration::from_secs(300)).await;
    world.put("shop", "b", "Running", 0);
    world.refuses.store(0, Ordering::SeqCst);
    let begun = Instant::now();
    let mut third = lab.ask(|_| {});
    assert_eq!(third.synced().await.unwrap().unanswered.len(), 0);
    assert!(begun.elapsed() <= SOON, "{:?}", begun.elapsed());
    assert_eq!(third.pods(), world.truth());
}

#[tokio::test(start_paused = true)]
async fn who_asks_again_and_again_causes_a_try_a_second() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.refuses.store(503, Ordering::SeqCst);
    let begun = Instant::now();
    let mut asked = 0;
    while begun.elapsed() < Duration::from_secs(60) {
        let mut clients: Vec<_> = (0..10).map(|_| lab.ask(|_| {})).collect();
        for client in &mut clients {
            assert_eq!(client.synced().await.unwrap().unanswered.len(), 1);
            asked += 1;
        }
    }
    let lists = world.lists.load(Ordering::SeqCst);
    assert!((50..=63).contains(&lists), "{lists} lists for {asked} questions in 60 s");
}

#[tokio::test(start_paused = true)]
async fn a_try_that_began_before_somebody_looked_is_no_answer() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    world.hangs.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    let mut first = lab.ask(|_| {});
    assert_eq!(first.synced().await.unwrap().unanswered.len(), 1);
    assert_eq!(begun.elapsed().as_secs(), 20);
    // The second try has begun, and will not be answered.
    sleep(Duration::from_secs(5)).await;
    assert_eq!(world.lists.load(Ordering::SeqCst), 2);
    // Who looks now is told that it still is so, after 30 s.
    let begun = Instant::now();
    let mut second = lab.ask(|_| {});
    let synced = second.synced().await.unwrap();
    assert_eq!(synced.unanswered[0].reason, "absent: no answer within 20s");
    assert_eq!(begun.elapsed().as_secs(), 30);
    let lists = world.lists.load(Ordering::SeqCst);
    world.hangs.store(false, Ordering::SeqCst);
    let begun = Instant::now();
    let mut third = lab.ask(|_| {});
    assert_eq!(third.synced().await.unwrap().unanswered.len(), 0);
    assert!(begun.elapsed() < Duration::from_secs(21), "{:?}", begun.elapsed());
    assert_eq!((world.lists.load(Ordering::SeqCst), third.rows.len()), (lists + 1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_summary_that_failed_is_counted_again_for_who_looks_anew() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.refuses.store(503, Ordering::SeqCst);
    let ask = || lab.ask(|request| request.view = "summary".to_owned());
    assert_eq!(ask().synced().await.unwrap().unanswered.len(), 1);
    sleep(Duration::from_secs(5)).await;
    world.refuses.store(0, Ordering::SeqCst);
    let begun = Instant::now();
    let mut client = ask();
    assert_eq!(client.synced().await.unwrap().unanswered.len(), 0);
    assert!(begun.elapsed() <= SOON, "{:?}", begun.elapsed());
    assert_eq!(client.rows.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_falls_silent_under_a_watch_is_noticed() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    let mut client = lab.ask(|_| {});
    client.synced().await.unwrap();
    sleep(Duration::from_secs(30)).await;
    let begun = Instant::now();
    world.hangs.store(true, Ordering::SeqCst);
    client.until("it is stale", |client| client.agents[&1].state == "stale").await;
    assert_eq!(client.agents[&1].reason, "no answer within 20s");
    assert!(begun.elapsed() <= Duration::from_secs(121), "{:?}", begun.elapsed());
    assert_eq!(client.rows.len(), 1, "the rows of before stay");
    world.hangs.store(false, Ordering::SeqCst);
    world.put("shop", "b", "Running", 0);
    client.until("the changes", |client| client.pods() == world.truth()).await;
    client.until("it is live", |client| client.agents[&1].state == "live").await;
    assert_eq!((world.lists.load(Ordering::SeqCst), client.resets), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn where_nothing_happens_rows_stay_live_with_bookmarks_and_without() {
    // How many watches there are in half an hour, if agentk can cancel them, and if not.
    for (bookmarks, cancels, most) in [(true, true, 7), (false, true, 19), (false, false, 16)] {
        let lab = Lab::new(1);
        let world = lab.world();
        world.put("shop", "a", "Running", 0);
        world.bookmarks.store(bookmarks, Ordering::SeqCst);
        world.cancels.store(cancels, Ordering::SeqCst);
        let mut client = lab.ask(|_| {});
        client.synced().await.unwrap();
        assert_eq!(client.agents[&1].state, "live");
        let quiet = tokio::time::timeout(Duration::from_secs(1_800), client.subscription.next()).await;
        assert!(quiet.is_err(), "{quiet:?}");
        let watches = world.watches.load(Ordering::SeqCst);
        assert!((6..=most).contains(&watches), "{watches} watches");
        assert_eq!(world.open.load(Ordering::SeqCst), 1);
        world.put("shop", "b", "Running", 0);
        client.until("the change", |client| client.pods() == world.truth()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_summary_that_nobody_looked_at_is_counted_anew() {
    let lab = Lab::new(1);
    let world = lab.world();
    world.put("shop", "a", "Running", 0);
    let ask = || lab.ask(|request| request.view = "summary".to_owned());
    ask().synced().await.unwrap();
    sleep(Duration::from_secs(200)).await;
    let lists = world.lists.load(Ordering::SeqCst);
    world.put("shop", "b", "Running", 0);
    let mut client = ask();
    assert_eq!(client.synced().await.unwrap().unanswered.len(), 0);
    assert_eq!(client.rows.values().next().unwrap()[2], "2");
    assert_eq!(world.lists.load(Ordering::SeqCst), lists + 4, "one of each resource");
}

/// An answer that refuses a watch, and has no end.
struct Endless(Option<&'static [u8]>);

#[async_trait]
impl Watched for Endless {
    fn status(&self) -> i32 {
        500
    }

    fn is_cancellable(&self) -> bool {
        true
    }

    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        match self.0.take() {
            Some(words) => Ok(Some(Bytes::from_static(words))),
            None => std::future::pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_words_that_refuse_a_watch_need_no_end() {
    let begun = Instant::now();
    assert_eq!(refusal(&mut Endless(Some(b"overloaded"))).await, "overloaded");
    assert_eq!(begun.elapsed().as_secs(), 10);
}
