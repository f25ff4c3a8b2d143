//! One replica: each kind of news reaches each kind of sink, and a sink that takes nothing loses only what
//! does not fit.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use testkit::{kas::eventually, process::soon, raw_agent::Kind, redis::Redis};

use crate::setup::{AGENT, PROJECT, Receiver, Setup, name};

#[tokio::test]
async fn news_reaches_each_kind_of_sink() -> Result<()> {
    let redis = Redis::run().await?;
    let more = json!({
        "redis": { "server": { "address": redis.address() }, "key_prefix": "test" },
    });
    let mut it = Setup::start(1, more, |receiver| {
        let (agents, news) = ("id=1", ["events", "agents", "syncs"]);
        json!([
            { "name": "hook", "agents": agents, "news": news, "webhook": { "url": format!("http://{receiver}/a?b=c") } },
            { "name": "rails", "agents": agents, "news": news, "redis": "publish" },
            { "name": "queue", "agents": agents, "news": ["events"], "redis": "stream" },
            { "name": "log", "agents": agents, "news": ["events"], "log": true },
            { "name": "labelled", "agents": "id=1,env=test", "news": news,
              "webhook": { "url": format!("http://{receiver}/labelled") } },
            { "name": "other", "agents": "env=prod", "news": news,
              "webhook": { "url": format!("http://{receiver}/other") } },
            { "name": "nobody", "agents": "id=3", "news": news, "log": true },
            // Nothing of this host is allowed but one address.
            { "name": "closed", "agents": agents, "news": ["events"],
              "webhook": { "url": format!("http://[::1]:{}", receiver.port()) } },
            { "name": "local", "agents": agents, "news": ["events"],
              "webhook": { "url": format!("http://127.0.0.2:{}", receiver.port()) } },
        ])
    })
    .await?;
    let client = redis::Client::open(format!("redis://{}", redis.address()))?;
    let mut subscriber = client.get_async_pubsub().await?;
    subscriber.subscribe(format!("test:kas:agent:{AGENT}")).await?;
    let mut published = subscriber.on_message();
    // Nobody selects this one.
    let _other = it.mesh.agent(0, 2, Kind::Ours, 1).await?;

    it.happen([1]).await?;
    let event = it.receiver.got("the event", |event| name(event) == "e-1").await?;
    assert_eq!((&event["specversion"], &event["type"]), (&json!("1.0"), &json!("kas.kubernetes.event")));
    assert_eq!((&event["source"], &event["agentid"]), (&json!("/kas/agents/1"), &json!("1")));
    assert_eq!(event["subject"], "Pod default/web-1");
    assert_eq!(event["data"]["message"], "number 1");
    let head = eventually("the sink without labels has it", async || {
        let taken = it.receiver.taken().into_iter().map(|(head, _)| head);
        Ok(taken.into_iter().find(|head| !head.line.contains("labelled")).ok_or("only others"))
    })
    .await?;
    assert_eq!(head.line, "POST /a?b=c HTTP/1.1");
    assert_eq!(head.get("content-type"), Some("application/cloudevents+json; charset=UTF-8"));
    assert_eq!(head.get("host"), Some(&*it.receiver.address.to_string()));
    loop {
        let message = soon("a message", published.next()).await.context("it was closed")?;
        let message: Value = serde_json::from_slice(message.get_payload_bytes())?;
        if name(&message) == "e-1" {
            assert_eq!(message, event, "each sink gets the same");
            break;
        }
    }
    let id = event["id"].as_str().context("an id")?.to_owned();
    eventually("the stream has it", async || {
        let entries = redis.ask("XRANGE test:kas:sink:queue - +").await?;
        Ok(if entries.contains(&id) && entries.contains("kas.kubernetes.event") {
            Ok(())
        } else {
            Err(entries)
        })
    })
    .await?;
    let kas = it.mesh.kas(0);
    kas.process
        .logged("the event", |line| {
            (line["message"] == "news" && line["sink"] == "log" && line["event"].as_str()?.contains(&id))
                .then_some(())
        })
        .await?;
    for sink in ["closed", "local"] {
        let why = kas
            .process
            .logged("why nothing is sent", |line| {
                (line["sink"] == sink).then(|| line["why"].as_str().map(str::to_owned)).flatten()
            })
            .await?;
        ensure!(why.contains("is not dialled: it is an address of this host"), "{why}");
        assert_eq!(it.metric(0, &format!("kas_sink_sent_total{{sink=\"{sink}\"}}")).await?, 0.0);
    }
    assert_eq!(it.metric(0, "kas_sink_watches").await?, 1.0, "one for the agent that is selected");

    // A sync fails, and recovers.
    std::fs::write(it.manifest("app.yaml"), "{")?;
    let failed = it.receiver.got("a failed sync", |event| event["type"] == "kas.sync.failed").await?;
    assert_eq!((&failed["subject"], &failed["data"]["phase"]), (&json!(PROJECT), &json!("failed")));
    let app = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "app" } });
    std::fs::write(it.manifest("app.yaml"), app.to_string())?;
    it.receiver.got("the sync recovered", |event| event["type"] == "kas.sync.recovered").await?;

    // The agent leaves, and comes back.
    it.agentk = None;
    it.receiver.got("it has left", |event| event["type"] == "kas.agent.disconnected").await?;
    it.connect().await?;
    it.receiver.got("it is back", |event| event["type"] == "kas.agent.connected").await?;
    // Its events are read from where it was left.
    it.happen([2]).await?;
    it.receiver.got("another event", |event| name(event) == "e-2").await?;
    // What is selected by labels gets all of it, too. They are known a moment later.
    let all = ["agent.connected", "agent.disconnected", "kubernetes.event", "sync.failed", "sync.recovered"];
    let all: BTreeSet<String> = all.map(|kind| format!("kas.{kind}")).into();
    eventually("the sink with labels gets all kinds", async || {
        let told = it.receiver.types_at("/labelled");
        Ok(if told.is_superset(&all) { Ok(()) } else { Err(told) })
    })
    .await?;
    assert_eq!(it.receiver.types_at("/other"), BTreeSet::new());
    Ok(())
}

#[tokio::test]
async fn a_full_buffer_is_counted_and_told() -> Result<()> {
    const EVENTS: usize = 30;
    let it = Setup::start(1, json!({}), |receiver| {
        json!([{ "name": "hook", "agents": "all", "news": ["events"], "buffer": { "items": 5 },
                 "webhook": { "url": format!("http://{receiver}") } }])
    })
    .await?;
    it.receiver.answer(503);
    it.happen([0]).await?;
    it.metric_is_at_least(0, "kas_sink_failures_total{sink=\"hook\"}", 1.0).await?;
    it.happen(1..EVENTS).await?;
    let dropped = "kas_sink_dropped_total{sink=\"hook\",reason=\"full\"}";
    it.metric_is_at_least(0, dropped, 10.0).await?;
    it.receiver.answer(200);
    let all: BTreeSet<String> = (0..EVENTS).map(|n| format!("e-{n}")).collect();
    eventually("each event is sent, or told to be dropped", async || {
        let got: BTreeSet<String> = it
            .receiver
            .of("kas.kubernetes.event")
            .iter()
            .map(name)
            .filter(|name| all.contains(name))
            .collect();
        let told: u64 = it
            .receiver
            .of("kas.sink.dropped")
            .iter()
            .map(|event| event["data"]["items"].as_u64().unwrap_or_default())
            .sum();
        let counted = it.metric(0, dropped).await?;
        let fits = counted == told as f64 && got.len() + usize::try_from(told)? >= EVENTS && !got.is_empty();
        Ok(if fits { Ok(()) } else { Err((got.len(), told, counted)) })
    })
    .await?;
    let record = it.receiver.of("kas.sink.dropped").remove(0);
    assert_eq!((&record["source"], &record["agentid"]), (&json!("/kas/sinks/hook"), &Value::Null));
    // It works again.
    it.happen([EVENTS]).await?;
    it.receiver.got("a later event", |event| name(event) == format!("e-{EVENTS}")).await?;
    Ok(())
}

#[tokio::test]
async fn a_sink_that_refuses_everything_holds_up_no_other() -> Result<()> {
    const EVENTS: usize = 40;
    let bad = Receiver::start().await?;
    bad.answer(404);
    let it = Setup::start(1, json!({}), |receiver| {
        json!([
            { "name": "bad", "agents": "all", "news": ["events"], "buffer": { "items": 10 },
              "webhook": { "url": format!("http://{}", bad.address) } },
            { "name": "good", "agents": "all", "news": ["events"],
              "webhook": { "url": format!("http://{receiver}") } },
        ])
    })
    .await?;
    it.happen(0..EVENTS / 2).await?;
    it.happen(EVENTS / 2..EVENTS).await?;
    let all: BTreeSet<String> = (0..EVENTS).map(|n| format!("e-{n}")).collect();
    eventually("the good one gets all", async || {
        let got: BTreeSet<String> = it.receiver.of("kas.kubernetes.event").iter().map(name).collect();
        Ok(if got.is_superset(&all) { Ok(()) } else { Err(all.difference(&got).count()) })
    })
    .await?;
    let dropped = |sink: &str| format!("kas_sink_dropped_total{{sink=\"{sink}\",reason=\"full\"}}");
    it.metric_is_at_least(0, &dropped("bad"), (EVENTS - 20) as f64).await?;
    assert_eq!(it.metric(0, &dropped("good")).await?, 0.0);
    // It is told what it missed.
    bad.answer(204);
    bad.got("what was dropped", |event| event["type"] == "kas.sink.dropped").await?;
    Ok(())
}
