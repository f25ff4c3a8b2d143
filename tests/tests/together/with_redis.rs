//! Two replicas that share a Redis, with agentk at one of them: every feature works through both, and is in
//! the audit log.

use anyhow::{Context as _, Result, ensure};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    kas::{eventually, token},
    kubernetes::{Access, Kubernetes, exclusive_audited},
    process::soon,
    redis::Redis,
};

use crate::{
    audited::{DEAD, MAKE_REQUEST, POST, delivered, is_joined, joined},
    setup::{AGENT, API, HTTP, PROXIES, Setup, known},
};

const NAMESPACE: &str = "together-redis";

/// Starts an agentk that is connected to the first replica only.
async fn connect(it: &Setup, kubernetes: &Kubernetes, bearer: &str) -> Result<Agentk> {
    let kubeconfig = kubernetes.kubeconfig_with_token(NAMESPACE, bearer)?;
    let agentk = Agentk::start_with_kubeconfig(it.mesh.agents(0), &token(AGENT), &kubeconfig).await?;
    agentk.connected().await?;
    it.mesh.converged(&[(AGENT, 0)]).await?;
    Ok(agentk)
}

#[tokio::test]
async fn with_redis_every_feature_works_through_both_replicas_and_is_audited() -> Result<()> {
    let exclusive = exclusive_audited().await?;
    let kubernetes = &*exclusive.kubernetes;
    let server = Redis::run().await?;
    let news = json!(["events", "agents"]);
    let sink = |name: &str, way: &str| json!({ "name": name, "agents": "id=1", "news": news, "redis": way });
    let config = json!({
        "tracker": "redis",
        "redis": { "server": { "address": server.address() }, "key_prefix": "test" },
        "sinks": { "targets": [sink("rails", "publish"), sink("queue", "stream")] },
    });
    let it = Setup::start(kubernetes, NAMESPACE, Some(Value::Null), config).await?;
    let bearer = kubernetes.service_account(NAMESPACE, "agentk", Access::Admin).await?;
    let agentk = connect(&it, kubernetes, &bearer).await?;

    known(&it).await?;
    let agentk = webhooks(&it, kubernetes, agentk, &bearer).await?;
    for n in [0, 1] {
        it.pods_are_followed(kubernetes, n).await?;
        it.prometheus_answers(n).await?;
        it.components_are_found(n).await?;
    }
    looks_are_audited(&it).await?;
    owners(&it).await?;
    sinks(&it, kubernetes, &server).await?;
    joined(&it, kubernetes).await?;
    drop(agentk);
    Ok(())
}

/// Webhooks are kept by two replicas while the agent is away, then delivered by its home. What a receiver
/// refuses is a dead letter.
async fn webhooks(it: &Setup, kubernetes: &Kubernetes, agentk: Agentk, bearer: &str) -> Result<Agentk> {
    let [first, second] = [it.hooks(0, "listed", |_| true).await?, it.hooks(1, "listed", |_| true).await?];
    ensure!(first.replica == second.replica, "two homes: {} and {}", first.replica, second.replica);
    drop(agentk);
    it.mesh.converged(&[]).await?;
    let mut ids = Vec::new();
    for n in [0, 1] {
        let (id, copies) = it.accepted(n, &format!("away-{n}")).await?;
        assert_eq!(copies, "2");
        ids.push(id);
    }
    for n in [0, 1] {
        let kept = it.hooks(n, "both are kept", |list| list.kept.len() == 2).await?;
        ensure!(kept.kept.iter().all(|hook| hook.copies == 2 && hook.attempts == 0), "{kept:?}");
    }
    ensure!(it.receiver.received().is_empty(), "its agent is away");
    let agentk = connect(it, kubernetes, bearer).await?;
    it.receiver.got(2).await?;
    for id in &ids {
        delivered(it, id).await?;
    }
    it.hooks(1, "nothing is kept", |list| list.kept.is_empty()).await?;
    ensure!(it.receiver.bodies().values().all(|times| *times == 1), "{:?}", it.receiver.bodies());

    it.receiver.answer(404);
    let (id, _) = it.accepted(1, "dead").await?;
    it.hooks(0, "a dead letter", |list| list.kept.len() == 1 && list.kept[0].dead).await?;
    let proxied = it
        .pair(json!({
            "method": MAKE_REQUEST, "actor": "kas", "subject": format!("hook:push/{id}"), "source": "hooks",
            "resource": "services/proxy", "http_status": 404,
        }))
        .await?;
    is_joined(&proxied)?;
    it.pair(json!({
        "method": DEAD, "request_id": id, "actor": "kas", "subject": format!("hook:push/{id}"),
        "agent_id": AGENT, "decision": "allow", "status": "ABORTED", "outcome": "dead",
    }))
    .await?;
    it.receiver.answer(200);

    let head = it.push(1, "wrong", "not the secret").await?;
    assert_eq!(head.status()?, 401);
    let refused = it
        .pair(json!({
            "method": POST, "actor": "hook", "subject": "push", "agent_id": AGENT, "decision": "deny",
            "rule": "credential", "status": "UNAUTHENTICATED", "outcome": "refused",
        }))
        .await?;
    ensure!(refused["peer"].as_str().is_some_and(|peer| peer.starts_with("127.")), "{refused}");
    Ok(agentk)
}

/// Checks the audit lines of views: the caller, what it asked for, and how that ended.
async fn looks_are_audited(it: &Setup) -> Result<()> {
    // The view was left. Those who call the API see everything.
    it.pair(json!({
        "method": "/kas.api.v1.KasApi/WatchView", "actor": "gitlab", "decision": "allow", "rule": "jwt",
        "status": "CANCELLED", "outcome": "cancelled",
    }))
    .await?;
    // Its watch goes on, as somebody may look again.
    let watch = json!({
        "event": "start", "method": MAKE_REQUEST, "agent_id": AGENT, "source": "views", "verb": "watch",
        "resource": "pods", "kind": "watch", "mode": "agent", "actor": "kas",
    });
    is_joined(&it.line(watch).await?)?;
    it.pair(json!({
        "method": "/kas.api.v1.KasApi/ListComponents", "actor": "gitlab", "decision": "allow", "status": "OK",
    }))
    .await?;
    for path in ["agent/{id}", "select/{selector}"] {
        it.pair(json!({
            "actor": "file", "subject": "kas:jane", "source": "file", "decision": "allow", "rule": "access",
            "verb": "post", "resource": format!("fleet/prometheus/{path}/api/v1/{{*}}"), "kind": "short",
            "http_status": 200, "ended_by": "upstream",
        }))
        .await?;
    }
    // Each of the two asked the agent, for the same caller.
    let question = json!({
        "method": MAKE_REQUEST, "actor": "file", "subject": "kas:jane", "agent_id": AGENT, "source": "fleet",
        "verb": "get", "resource": "services/proxy", "mode": "agent", "http_status": 200,
    });
    is_joined(&it.pair(question).await?)
}

/// Each replica names the door of the one that holds the agent.
async fn owners(it: &Setup) -> Result<()> {
    for (door, port) in [("api", API), ("http", HTTP)] {
        let expected = it.at(0, port).to_string();
        for n in [0, 1] {
            eventually("the owner", async || {
                let told = it.owner(n, door, PROXIES).await?;
                Ok(if told == (200, Some(expected.clone())) { Ok(()) } else { Err(told) })
            })
            .await?;
        }
    }
    let before = it.audited()?.len();
    assert_eq!(it.owner(1, "api", "not-the-secret-of-the-proxies").await?, (401, None));
    it.owner(1, "api", PROXIES).await?;
    // There is one for each request of a proxy, so these are counted only.
    it.mesh
        .kas(1)
        .metric_is("kas_refusals_total{listener=\"Direct\",reason=\"Unauthenticated\"}", 1.0)
        .await?;
    let told = it.mesh.kas(1).metric("kas_direct_told_total{by=\"Lookup\",owner=\"Other\"}").await?;
    ensure!(told >= 3.0, "{told}");
    let all = it.audited()?;
    ensure!(all[before..].iter().all(|line| !line.to_string().contains("owner")), "{:?}", &all[before..]);
    Ok(())
}

/// Both kinds of news reach both ways through Redis.
async fn sinks(it: &Setup, kubernetes: &Kubernetes, server: &Redis) -> Result<()> {
    let client = redis::Client::open(format!("redis://{}", server.address()))?;
    let mut subscriber = client.get_async_pubsub().await?;
    subscriber.subscribe(format!("test:kas:agent:{AGENT}")).await?;
    let mut published = subscriber.on_message();
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "namespace": NAMESPACE, "name": "happened" },
        "involvedObject": { "kind": "Pod", "namespace": NAMESPACE, "name": "receiver" },
        "reason": "Tested", "message": "it has happened", "type": "Normal",
    });
    kubernetes.apply(&event.to_string()).await?;
    soon("the event", async {
        loop {
            let message = published.next().await.context("it was closed")?;
            let news: Value = serde_json::from_slice(message.get_payload_bytes())?;
            if news["data"]["metadata"]["name"] == "happened" {
                assert_eq!(news["type"], "kas.kubernetes.event");
                return anyhow::Ok(());
            }
        }
    })
    .await?;
    // That the agent was away for a moment is no news.
    for part in ["it has happened", "kas.agent.connected"] {
        eventually("the stream has it", async || {
            let entries = server.ask("XRANGE test:kas:sink:queue - +").await?;
            Ok(if entries.contains(part) { Ok(()) } else { Err(entries) })
        })
        .await?;
    }
    let watch = json!({
        "event": "start", "method": MAKE_REQUEST, "agent_id": AGENT, "source": "sinks", "verb": "watch",
        "resource": "events", "mode": "agent", "actor": "kas",
    });
    is_joined(&it.line(watch).await?)
}
