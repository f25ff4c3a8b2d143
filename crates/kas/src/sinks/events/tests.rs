//! Tests against a played API server. Time is that of tokio, and stands still.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use ::sinks::Verdict;
use async_trait::async_trait;
use ids::AgentId;
use kas_config::{Sink, SinkTarget};
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::time::sleep;

use super::*;
use crate::{
    agent_files::{AgentFile, Unknown},
    sinks::metrics::SinkMetrics,
    views::Answer,
};

struct NoFiles;

#[async_trait]
impl Files for NoFiles {
    async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>> {
        agents.iter().map(|agent| (*agent, Ok(Arc::default()))).collect()
    }
}

/// The namespaces of all agents; `None`: not known.
#[derive(Default)]
struct Switched(Mutex<Option<Vec<&'static str>>>);

#[async_trait]
impl Files for Switched {
    async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>> {
        let namespaces = self.0.lock().clone();
        let file = || match &namespaces {
            None => Err("its kas.yaml is not known".into()),
            Some(namespaces) => Ok(Arc::new(AgentFile {
                namespaces: namespaces.iter().map(|name| (*name).to_owned()).collect(),
                ..AgentFile::default()
            })),
        };
        agents.iter().map(|agent| (*agent, file())).collect()
    }
}

/// An API server with this many events on a page.
struct Played {
    events: usize,
    lists: AtomicUsize,
    /// The paths of the lists.
    paths: Mutex<Vec<String>>,
    watches: AtomicUsize,
    /// Whether watches end at once, or their version is always too old.
    ends: bool,
    forgets: bool,
}

struct Ended(i32, bool);

#[async_trait]
impl Watched for Ended {
    fn status(&self) -> i32 {
        self.0
    }

    fn is_cancellable(&self) -> bool {
        true
    }

    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        if !self.1 {
            sleep(Duration::from_secs(WATCH)).await;
        }
        Ok(None)
    }
}

#[async_trait]
impl Source for Arc<Played> {
    async fn get(&self, target: &str, _: &str) -> Result<Answer, Status> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        self.paths.lock().push(target.split('?').next().unwrap().to_owned());
        let event = |n: usize| {
            json!({
                "metadata": {"namespace": "shop", "name": format!("e{n}"), "uid": format!("u{n}"),
                    "resourceVersion": n.to_string(), "creationTimestamp": "2026-01-01T00:00:00Z"},
                "involvedObject": {"kind": "Pod", "namespace": "shop", "name": "web-1"},
                "reason": "BackOff", "message": "Back-off", "type": "Warning",
            })
        };
        let items: Vec<_> = (1..=self.events).map(event).collect();
        let page = json!({"metadata": {"resourceVersion": "900"}, "items": items});
        Ok(Answer::new(200, page.to_string().into()))
    }

    async fn watch(&self, _: &str, _: &str, _: &str) -> Result<Box<dyn Watched>, Status> {
        self.watches.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Ended(if self.forgets { 410 } else { 200 }, self.ends || self.forgets)))
    }

    async fn post(&self, _: &str, _: Bytes) -> Result<Answer, Status> {
        Err(Status::new(Code::Unimplemented, "nothing is sent"))
    }
}

fn played(events: usize) -> Arc<Played> {
    Arc::new(Played {
        events,
        lists: AtomicUsize::new(0),
        paths: Mutex::default(),
        watches: AtomicUsize::new(0),
        ends: false,
        forgets: false,
    })
}

/// Sinks of which one has room for this many items, and the readers share one page.
fn shared(items: u32) -> Arc<Shared> {
    shared_of(items, Arc::new(NoFiles))
}

fn shared_of(items: u32, files: Arc<dyn Files>) -> Arc<Shared> {
    let sink = Sink {
        name: "log".to_owned(),
        agents: "all".parse().unwrap(),
        news: vec![Kind::Events],
        target: SinkTarget::Log,
        items,
        bytes: 64 << 20,
    };
    let config = kas_config::Sinks { targets: vec![sink], ..kas_config::Sinks::default() };
    let sinks = Sinks::new(&config, Arc::new(SinkMetrics::new(&mut Registry::default())));
    Arc::new(Shared { sinks, files, lists: Semaphore::new(1) })
}

/// Reads the events of an agent until the test ends.
fn read(shared: &Arc<Shared>, agent: i64, source: &Arc<Played>) {
    let id = AgentId::new(agent).unwrap();
    let (sender, changes) = watch::channel(());
    let events = AgentEvents {
        shared: Arc::clone(shared),
        agent: Known { id, project: None, name: "".into(), labels: None },
        source: Arc::new(Arc::clone(source)),
        kind: Arc::default(),
        changes,
    };
    tokio::spawn(async move {
        events.run().await;
        drop(sender);
    });
}

fn waiting(shared: &Shared) -> usize {
    shared.sinks.all[0].queue.lock().len()
}

#[tokio::test(start_paused = true)]
async fn a_page_is_requested_when_the_one_before_was_told() {
    let shared = shared(10_000);
    let (one, two) = (played(400), played(50));
    // What may come at once is what a second without any has left.
    sleep(Duration::from_secs(1)).await;
    read(&shared, 1, &one);
    sleep(Duration::from_millis(10)).await;
    read(&shared, 2, &two);
    // 100 at once, and 100 a second.
    sleep(Duration::from_secs(2)).await;
    let lists = |source: &Played| source.lists.load(Ordering::SeqCst);
    assert_eq!((lists(&one), lists(&two)), (1, 0), "there is room for one page");
    assert!((250..=350).contains(&waiting(&shared)), "{}", waiting(&shared));
    sleep(Duration::from_secs(2)).await;
    assert_eq!((lists(&two), waiting(&shared)), (1, 450));
}

#[tokio::test(start_paused = true)]
async fn a_sink_without_room_does_not_keep_the_place_of_a_page() {
    let shared = shared(100);
    let (one, two) = (played(90), played(1));
    read(&shared, 1, &one);
    sleep(Duration::from_millis(10)).await;
    read(&shared, 2, &two);
    sleep(TOLD + Duration::from_secs(1)).await;
    assert_eq!((waiting(&shared), two.lists.load(Ordering::SeqCst)), (50, 1));
    // There is room again: what was told is not told twice.
    {
        let mut queue = shared.sinks.all[0].queue.lock();
        for taken in queue.take(shared.sinks.now(), 100) {
            queue.settle(taken, Verdict::Done, shared.sinks.now());
        }
    }
    sleep(Duration::from_secs(120)).await;
    assert_eq!(waiting(&shared), 40 + 1);
}

#[tokio::test(start_paused = true)]
async fn an_agent_whose_watches_end_at_once_is_asked_less_and_less_often() {
    for (ends, forgets) in [(true, false), (false, true)] {
        let shared = shared(100);
        let source = Arc::new(Played { ends, forgets, ..Arc::into_inner(played(1)).unwrap() });
        read(&shared, 1, &source);
        sleep(Duration::from_secs(300)).await;
        let lists = source.lists.load(Ordering::SeqCst);
        assert!((8..=40).contains(&lists), "{lists} lists in 300 s");
        assert_eq!(waiting(&shared), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn namespaces_that_are_not_known_are_waited_for_and_the_last_known_stay() {
    let files = Arc::new(Switched::default());
    let (shared, source) = (shared_of(10_000, Arc::clone(&files) as _), played(0));
    read(&shared, 1, &source);
    let lists = async |namespaces: Option<Vec<&'static str>>| {
        *files.0.lock() = namespaces;
        sleep(2 * AGAIN).await;
        source.paths.lock().clone()
    };
    assert!(lists(None).await.is_empty(), "it could be too much");
    let shop = "/api/v1/namespaces/shop/events";
    assert_eq!(lists(Some(vec!["shop"])).await, [shop]);
    // The agent is away for longer than its file is kept, and comes back.
    assert_eq!(lists(None).await, [shop]);
    assert_eq!(lists(Some(vec!["shop"])).await, [shop]);
    // What is read already is not read again.
    assert_eq!(lists(Some(vec!["bank", "shop"])).await, [shop, "/api/v1/namespaces/bank/events"]);
    assert_eq!(lists(Some(Vec::new())).await.last().unwrap(), "/api/v1/events");
}
