//! Callers of the HTTP endpoint: what they may see, and how they are answered.

use std::sync::{Arc, atomic::Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use callers::{Authorized, Caller, Grant, Hold, KnownAgent, Mode, RunAs, SourceKind};
use http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt as _;
use ids::{Actor, AgentId, Impersonation};
use kube_request::Target;
use kubernetes_api::{
    Fleet as _, FleetAnswer, FleetBody, FleetCaller, FleetQuestion, FleetRefusal, FleetRoute, ListedAgent,
    NotReached, Reachable, StreamEnd,
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::{Duration, Instant, advance, timeout};

use super::{
    super::HttpViews,
    world::{Lab, agent},
};

/// A caller that is impersonated.
#[derive(Clone)]
struct Jane {
    /// Agents that it may use.
    agents: Arc<Mutex<Vec<i64>>>,
    /// Agents of which that cannot be said.
    unsaid: Vec<i64>,
    is_impersonated: bool,
    is_guess: bool,
}

impl Jane {
    fn new(agents: &[i64]) -> Self {
        let agents = Arc::new(Mutex::new(agents.to_vec()));
        Self { agents, unsaid: Vec::new(), is_impersonated: true, is_guess: false }
    }
}

#[async_trait]
impl FleetCaller for Jane {
    fn name(&self) -> Arc<str> {
        "kas:jane".into()
    }

    fn actor(&self) -> Arc<Actor> {
        Arc::new(Actor { issuer: "file".to_owned(), subject: None })
    }

    fn agent(&self) -> Option<&Authorized> {
        None
    }

    async fn reachable(&self) -> Result<Reachable, NotReached> {
        let listed = |number| ListedAgent { agent: KnownAgent::unknown(agent(number)), connected: true };
        Ok(Reachable { agents: (1..=60).map(listed).collect(), is_guess: self.is_guess })
    }

    async fn authorize(&self, agent: AgentId) -> Result<Authorized, NotReached> {
        if self.unsaid.contains(&agent.get()) {
            return Err(NotReached::Unavailable("GitLab does not answer".to_owned()));
        }
        if !self.agents.lock().contains(&agent.get()) {
            return Err(NotReached::Forbidden);
        }
        let identity = Arc::new(Impersonation { username: "jane".to_owned(), ..Impersonation::default() });
        let run_as = match self.is_impersonated {
            true => RunAs::Identity { mode: Mode::User, identity },
            false => RunAs::Agent { allows_impersonate_headers: false },
        };
        let caller = Caller {
            source: SourceKind::File,
            name: "kas:jane".into(),
            uid: None,
            groups: Arc::from([]),
            extra: Arc::from([]),
            gitlab_user: None,
            grant: Grant::Decided(run_as.clone()),
            recheck_at: None,
            hold: Hold::default(),
        };
        Ok(Authorized { caller, run_as, rule: None, agent })
    }
}

async fn ask(lab: &Lab, jane: &Jane, target: &str, last: &str) -> Result<FleetAnswer, FleetRefusal> {
    let target = Target::parse(format!("/fleet/views/{target}")).unwrap();
    let view = target.path().rsplit('/').next().unwrap().to_owned();
    let mut headers = HeaderMap::new();
    if !last.is_empty() {
        headers.insert("last-event-id", last.parse().unwrap());
    }
    let question = FleetQuestion {
        route: FleetRoute::View,
        places: vec![view],
        method: Method::GET,
        target,
        headers,
        body: Bytes::new(),
        request: "1".to_owned(),
        caller: Arc::new(jane.clone()),
        end: StreamEnd::default(),
    };
    HttpViews::new(Arc::clone(&lab.hub)).answer(question).await
}

async fn json(answer: FleetAnswer) -> Value {
    assert_eq!(answer.headers["content-type"], "application/json");
    let bytes = match answer.body {
        FleetBody::Whole(bytes) => bytes,
        FleetBody::Stream(body) => body.collect().await.unwrap().to_bytes(),
    };
    serde_json::from_slice(&bytes).unwrap()
}

async fn refused(lab: &Lab, jane: &Jane, target: &str) -> (u16, String) {
    let refusal = ask(lab, jane, target, "").await.err().unwrap();
    (refusal.status.as_u16(), refusal.text)
}

/// A stream of events.
struct Events {
    body: net::http::Body,
    read: String,
}

impl Events {
    fn of(answer: FleetAnswer) -> Self {
        assert_eq!(answer.headers["content-type"], "text/event-stream");
        let FleetBody::Stream(body) = answer.body else { panic!("no stream") };
        Self { body, read: String::new() }
    }

    /// Reads up to the next event with this name. Returns its fields.
    async fn next(&mut self, name: &str) -> String {
        loop {
            while let Some((event, rest)) = self.read.split_once("\n\n") {
                let (event, rest) = (event.to_owned(), rest.to_owned());
                self.read = rest;
                if event.contains(&format!("event: {name}\n")) {
                    return event;
                }
            }
            let frame = timeout(Duration::from_secs(3_600), self.body.frame()).await.expect(name);
            let bytes = frame.expect("the stream has ended").unwrap().into_data().unwrap();
            self.read.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }

    /// Reads up to `synced`. Returns its id.
    async fn synced(&mut self) -> String {
        let event = self.next("synced").await;
        event.lines().next().unwrap().strip_prefix("id: ").unwrap().to_owned()
    }
}

#[tokio::test(start_paused = true)]
async fn callers_see_what_the_api_server_says_that_they_may() {
    let lab = Lab::new(2);
    let (world, jane) = (lab.world(), Jane::new(&[1]));
    for (namespace, name) in [("shop", "a"), ("shop", "b"), ("bank", "c")] {
        world.put(namespace, name, "Running", 0);
    }
    lab.worlds[&2].put("shop", "hidden", "Running", 0);
    let all = json(ask(&lab, &jane, "pods?agents=all", "").await.unwrap()).await;
    assert_eq!(all["rows"].as_array().unwrap().len(), 3, "agent 2 is out of reach: {all}");
    assert_eq!(all["rows"][0]["agent"], "agent-1");
    assert_eq!(all["rows"][0]["cells"]["Status"], "Running");
    assert_eq!(all["unanswered"], serde_json::json!([]));
    assert_eq!(*world.reviews.lock(), ["list pods ", "watch pods "]);

    // What may be listed but not watched is not seen.
    advance(Duration::from_secs(60)).await;
    *world.denied.lock() = vec!["watch pods ".to_owned(), "list pods bank".to_owned()];
    let (status, text) = refused(&lab, &jane, "pods?agents=all").await;
    assert_eq!(status, 403);
    assert_eq!(text, "agent 1 (agent-1): the caller may not watch pods in all namespaces");
    let shop = json(ask(&lab, &jane, "pods?agents=all&namespaces=bank,shop", "").await.unwrap()).await;
    assert!(shop["rows"].as_array().unwrap().iter().all(|row| row["namespace"] == "shop"));
    assert_eq!(shop["rows"].as_array().unwrap().len(), 2);
    assert_eq!(shop["unanswered"][0]["reason"], "forbidden: the caller may not list pods in namespace bank");
    let (status, text) = refused(&lab, &jane, "pods?agents=all&namespaces=bank").await;
    assert!(status == 403 && text.contains("may not list pods in namespace bank"), "{text}");

    // Agents that it does not reach look like those that there are not.
    let gaps = json(ask(&lab, &jane, "pods?agents=id%3D2%7C99&namespaces=shop", "").await.unwrap()).await;
    assert_eq!(gaps["rows"], serde_json::json!([]));
    let reasons: Vec<&Value> =
        gaps["unanswered"].as_array().unwrap().iter().map(|gap| &gap["reason"]).collect();
    assert!(reasons.len() == 2 && reasons[0] == reasons[1], "{gaps}");

    // A request that runs as agentk sees what agentk sees, and nobody is asked.
    world.reviews.lock().clear();
    let agent = Jane { is_impersonated: false, ..jane.clone() };
    let all = json(ask(&lab, &agent, "pods?agents=id=1", "").await.unwrap()).await;
    assert_eq!(all["rows"].as_array().unwrap().len(), 3);
    assert!(world.reviews.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_agent_of_which_nothing_can_be_said_does_not_fail_the_others() {
    let lab = Lab::new(3);
    lab.world().put("shop", "a", "Running", 0);
    let jane = Jane { unsaid: vec![2], ..Jane::new(&[1]) };
    let all = json(ask(&lab, &jane, "pods?agents=all", "").await.unwrap()).await;
    assert_eq!(all["rows"].as_array().unwrap().len(), 1);
    let gap = serde_json::json!([{"id": 2, "name": "", "reason": "absent: GitLab does not answer"}]);
    assert_eq!(all["unanswered"], gap);
    let (status, text) = refused(&lab, &jane, "pods?agents=id%3D2").await;
    assert!(status == 503 && text.contains("GitLab does not answer"), "{status} {text}");
}

#[tokio::test(start_paused = true)]
async fn wrong_questions_and_too_many_are_refused() {
    let lab = Lab::new(1);
    lab.world().put("shop", "a", "Running", 0);
    let jane = Jane::new(&[1]);
    for (target, status, text) in [
        ("pods", 400, "agents is needed"),
        ("cats?agents=all", 404, "there is no view"),
        ("pods?agents=all&filter=colour=red", 400, "no column colour"),
        ("pods?agents=all&x=1", 400, "no parameter"),
        ("pods?agents=all&maxRows=100001", 400, "at most 100000"),
    ] {
        let (got, told) = refused(&lab, &jane, target).await;
        assert!(got == status && told.contains(text), "{target}: {got} {told}");
    }
    let guess = Jane { is_guess: true, ..jane.clone() };
    let (status, text) = refused(&Lab::new(51), &guess, "pods?agents=all").await;
    assert!(status == 400 && text.contains("at most 50"), "{text}");
    let mut open = Vec::new();
    for _ in 0..64 {
        open.push(ask(&lab, &jane, "pods?agents=all&watch=1", "").await.unwrap());
    }
    let refusal = ask(&lab, &jane, "pods?agents=all", "").await.err().unwrap();
    assert_eq!(refusal.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(refusal.retry_after.is_some());
    drop(open);
    ask(&lab, &jane, "pods?agents=all", "").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn events_follow_changes_and_go_on_where_the_client_was() {
    let lab = Lab::new(1);
    let (world, jane) = (lab.world(), Jane::new(&[1]));
    world.put("shop", "a", "Running", 0);
    let target = "pods?agents=all&watch=1";
    let mut events = Events::of(ask(&lab, &jane, target, "").await.unwrap());
    events.synced().await;
    world.put("shop", "b", "Running", 0);
    assert!(events.next("upserted").await.contains(r#""name":"b""#));
    let last = events.synced().await;
    drop(events);
    world.put("shop", "c", "Running", 0);
    world.delete("shop", "a");
    let mut again = Events::of(ask(&lab, &jane, target, &last).await.unwrap());
    assert!(again.next("removed").await.contains(r#""name":"a""#));
    let upserted = again.next("upserted").await;
    assert!(upserted.contains(r#""name":"c""#) && !upserted.contains(r#""name":"b""#), "{upserted}");
    // Somebody else cannot go on with it.
    let mut begun = Events::of(ask(&lab, &jane, "pods?agents=id=1&watch=1", &last).await.unwrap());
    begun.next("reset").await;
    assert!(begun.next("upserted").await.contains(r#""name":"b""#));
    // Also by the parameter.
    let mut third = Events::of(ask(&lab, &jane, &format!("{target}&resume={last}"), "").await.unwrap());
    assert!(third.next("removed").await.contains(r#""name":"a""#));
}

#[tokio::test(start_paused = true)]
async fn a_no_ends_the_events_within_a_minute() {
    let lab = Lab::new(1);
    let (world, jane) = (lab.world(), Jane::new(&[1]));
    world.put("shop", "a", "Running", 0);
    let target = "pods?agents=all&watch=1";
    let mut events = Events::of(ask(&lab, &jane, target, "").await.unwrap());
    events.synced().await;
    let from = Instant::now();
    world.denied.lock().push("list pods ".to_owned());
    let ended = events.next("ended").await;
    assert!(from.elapsed() <= Duration::from_secs(61), "{:?}", from.elapsed());
    assert!(ended.contains(r#""code":403"#) && ended.contains("list pods in all namespaces"), "{ended}");
    assert!(events.body.frame().await.is_none());

    // So does kas, when it does not let the caller use the agent any more.
    world.denied.lock().clear();
    advance(Duration::from_secs(3)).await;
    let mut events = Events::of(ask(&lab, &jane, target, "").await.unwrap());
    events.synced().await;
    jane.agents.lock().clear();
    assert!(events.next("ended").await.contains(r#""code":403"#));

    // And an API server that says nothing.
    jane.agents.lock().push(1);
    let mut events = Events::of(ask(&lab, &jane, target, "").await.unwrap());
    events.synced().await;
    let from = Instant::now();
    world.silent.store(true, Ordering::SeqCst);
    assert!(events.next("ended").await.contains(r#""code":503"#));
    let minutes = from.elapsed().as_secs() / 60;
    assert!((5..=6).contains(&minutes), "{:?}", from.elapsed());
}

#[tokio::test(start_paused = true)]
async fn all_who_look_as_one_user_cost_one_review_in_a_minute() {
    let lab = Lab::new(1);
    let (world, jane) = (lab.world(), Jane::new(&[1]));
    world.put("shop", "a", "Running", 0);
    let mut open = Vec::new();
    for _ in 0..25 {
        let mut events = Events::of(ask(&lab, &jane, "pods?agents=all&watch=1", "").await.unwrap());
        events.synced().await;
        open.push(events);
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(*world.reviews.lock(), ["list pods ", "watch pods "]);
    // All of them are asked about at the same time, and that is a minute after the first one.
    tokio::time::sleep(Duration::from_secs(62 - 25)).await;
    assert_eq!(world.reviews.lock().len(), 4);
    // A no ends them all.
    world.denied.lock().push("watch pods ".to_owned());
    let from = Instant::now();
    for events in &mut open {
        assert!(events.next("ended").await.contains("watch pods in all namespaces"));
    }
    assert!(from.elapsed() < Duration::from_secs(61), "{:?}", from.elapsed());
    assert_eq!(world.reviews.lock().len(), 6);
}

#[tokio::test(start_paused = true)]
async fn a_document_of_many_rows_is_sent_in_parts() {
    let lab = Lab::new(1);
    for n in 0..8_000 {
        lab.world().put("shop", &format!("web-{n}"), "Running", 0);
    }
    let answer = ask(&lab, &Jane::new(&[1]), "pods?agents=all", "").await.unwrap();
    assert!(matches!(answer.body, FleetBody::Stream(_)));
    let all = json(answer).await;
    assert_eq!(all["rows"].as_array().unwrap().len(), 8_000);
    assert_eq!(all["truncated"], false);
}
