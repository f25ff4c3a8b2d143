//! Views over HTTP: rows are those of `kubectl get`, the API server says who sees them, and events go on
//! where a client was.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    demo_api::DemoApi,
    endpoint::{self, Endpoint, JANE},
    http_agent::HttpAgent,
    kas::{eventually, token},
    kubernetes::{Access, Kubernetes},
    process::soon,
    raw_agent::Kind,
};
use tokio::{net::TcpStream, task::JoinHandle};

use crate::{
    setup::{AGENT, exclusive},
    views::{Row, delete, truth},
};

/// Are impersonated: one may read the pods of all namespaces, one those of one namespace, one nothing.
const ALL: &str = "kasu_allallallallallallallallallallallallallalla";
const ONE: &str = "kasu_oneoneoneoneoneoneoneoneoneoneoneoneoneoneo";
const NONE: &str = "kasu_nonenonenonenonenonenonenonenonenonenonenon";

/// A kas with these users. Jane's requests run as agentk.
async fn endpoint(files: &TempDir) -> Result<Endpoint> {
    let users = files.path().join("users.yaml");
    endpoint::write_users(&users, &[("jane", JANE), ("all", ALL), ("one", ONE), ("none", NONE)])?;
    Endpoint::start_audited(json!({
        "agent": { "kubernetes_api": {
            "users": { "file": users },
            "access": [
                { "agents": "all", "users": ["kas:jane"], "as": "agent" },
                { "agents": "all", "users": ["kas:*"], "as": "user" },
            ],
        } },
        "views": { "rights_period": "1s" },
    }))
    .await
}

/// An answer whose body may go on.
struct Answer {
    status: u16,
    body: Incoming,
    /// Read, and not taken yet.
    read: String,
    connection: JoinHandle<()>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

async fn ask(address: SocketAddr, token: &str, target: &str, last: Option<&str>) -> Result<Answer> {
    let mut request = http::Request::get(format!("/fleet/views/{target}"))
        .header("host", "localhost")
        .header("authorization", format!("Bearer {token}"));
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let request = request.body(Empty::<Bytes>::new())?;
    soon("an answer", async {
        let stream = TcpStream::connect(address).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(async move {
            // The test drops it, or judges what it has read.
            let _ = connection.await;
        });
        let (head, body) = sender.send_request(request).await?.into_parts();
        Ok(Answer { status: head.status.as_u16(), body, read: String::new(), connection })
    })
    .await
}

impl Answer {
    /// Reads all of it.
    async fn json(mut self) -> Result<(u16, Value)> {
        let read = async { anyhow::Ok((&mut self.body).collect().await?.to_bytes()) };
        let bytes = soon("the body", read).await?;
        let text = String::from_utf8_lossy(&bytes);
        Ok((self.status, serde_json::from_slice(&bytes).with_context(|| format!("{}: {text}", self.status))?))
    }

    /// Reads up to the next event with this name.
    async fn event(&mut self, name: &str) -> Result<Event> {
        soon(name, async {
            loop {
                while let Some((event, rest)) = self.read.split_once("\n\n") {
                    let (event, rest) = (Event::read(event)?, rest.to_owned());
                    self.read = rest;
                    if event.name == name {
                        return Ok(event);
                    }
                    ensure!(event.name != "ended", "{event:?} instead of {name}");
                }
                let frame = self.body.frame().await.with_context(|| format!("no {name}"))??;
                let bytes = frame.into_data().ok().context("no data")?;
                self.read.push_str(std::str::from_utf8(&bytes)?);
            }
        })
        .await
    }

    /// Reads rows until one has this name.
    async fn row(&mut self, event: &str, name: &str) -> Result<Value> {
        loop {
            let rows = self.event(event).await?.data["rows"].take();
            let found = rows.as_array().context("rows")?.iter().find(|row| row["name"] == name);
            if let Some(row) = found {
                return Ok(row.clone());
            }
        }
    }
}

#[derive(Debug, Default)]
struct Event {
    name: String,
    id: String,
    data: Value,
}

impl Event {
    fn read(text: &str) -> Result<Self> {
        let mut event = Self::default();
        for line in text.lines() {
            match line.split_once(": ") {
                Some(("event", name)) => event.name = name.to_owned(),
                Some(("id", id)) => event.id = id.to_owned(),
                Some(("data", data)) => event.data = serde_json::from_str(data)?,
                Some(("retry", _)) | None => {}
                Some(other) => anyhow::bail!("{other:?}"),
            }
        }
        Ok(event)
    }
}

/// Returns the rows of a document, without their ages.
fn rows(document: &Value) -> Result<BTreeSet<Row>> {
    let rows = document["rows"].as_array().with_context(|| format!("no rows: {document}"))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let row = |row: &Value| {
        let cells = ["Ready", "Status", "Restarts"].map(|title| text(&row["cells"][title]));
        (text(&row["namespace"]), text(&row["name"]), cells.to_vec())
    };
    Ok(rows.iter().map(row).collect())
}

async fn refused(address: SocketAddr, token: &str, target: &str) -> Result<(u16, String)> {
    let (status, answer) = ask(address, token, target, None).await?.json().await?;
    Ok((status, answer["message"].as_str().unwrap_or_default().to_owned()))
}

/// Lets a user read pods: of a namespace, or of all.
async fn let_read(kubernetes: &Kubernetes, user: &str, namespace: Option<&str>) -> Result<()> {
    let (name, user) = (format!("views-http-{user}"), format!("--user=kas:{user}"));
    let role = "--clusterrole=views-http";
    match namespace {
        Some(namespace) => {
            kubernetes.kubectl(&["create", "rolebinding", &name, role, &user, "-n", namespace]).await?
        }
        None => kubernetes.kubectl(&["create", "clusterrolebinding", &name, role, &user]).await?,
    };
    Ok(())
}

#[tokio::test]
async fn users_see_by_http_what_the_api_server_lets_them_read() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let (shop, bank) = ("views-http-shop", "views-http-bank");
    kubernetes.create_pods(shop, "web", 12).await?;
    kubernetes.create_pods(bank, "db", 3).await?;
    let role = ["create", "clusterrole", "views-http", "--verb=list,watch", "--resource=pods"];
    kubernetes.kubectl(&role).await?;
    let_read(kubernetes, "all", None).await?;
    let_read(kubernetes, "one", Some(shop)).await?;
    let bearer = kubernetes.service_account(shop, "agentk", Access::Admin).await?;
    let kubeconfig = kubernetes.kubeconfig_with_token(shop, &bearer)?;
    let files = TempDir::with_prefix("views-http-")?;
    let endpoint = endpoint(&files).await?;
    let agentk = Agentk::start_with_kubeconfig(endpoint.kas.agent, &token(AGENT), &kubeconfig).await?;
    agentk.connected().await?;
    let address = endpoint.address;

    // A rule takes effect after a moment.
    let target = format!("pods?agents=id%3D1&namespaces={shop}");
    for user in [ALL, ONE] {
        let seen = eventually("the user may read pods", async || {
            let (status, answer) = ask(address, user, &target, None).await?.json().await?;
            Ok(if status == 200 { Ok(answer) } else { Err(answer) })
        })
        .await?;
        assert_eq!(rows(&seen)?, truth(kubernetes, shop).await?);
        assert_eq!(seen["unanswered"], json!([]));
    }
    // Jane's run as agentk, which may read everything.
    let (status, all) = ask(address, JANE, "pods?agents=id%3D1", None).await?.json().await?;
    let mut known = truth(kubernetes, shop).await?;
    known.extend(truth(kubernetes, bank).await?);
    ensure!(status == 200 && rows(&all)?.is_superset(&known), "{all}");
    assert_eq!(all["rows"][0]["agent"], "agent-1");

    // Without a rule, or with one for another namespace.
    let (status, text) = refused(address, NONE, "pods?agents=id%3D1").await?;
    ensure!(status == 403 && text.contains("may not list and watch pods in all namespaces"), "{text}");
    let (status, text) = refused(address, ONE, "pods?agents=id%3D1").await?;
    ensure!(status == 403 && text.contains("pods in all namespaces"), "{text}");
    let both = format!("pods?agents=id%3D1&namespaces={shop},{bank}");
    let (status, some) = ask(address, ONE, &both, None).await?.json().await?;
    assert_eq!((status, rows(&some)?), (200, truth(kubernetes, shop).await?));
    let reason = some["unanswered"][0]["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains(&format!("may not list and watch pods in namespace {bank}")), "{some}");
    assert_eq!(refused(address, "kasu_nobody", "pods?agents=all").await?.0, 401);
    assert_eq!(refused(address, ONE, "cats?agents=all").await?.0, 404);

    // Changes, and where the client was.
    let watch = format!("{target}&watch=1");
    let mut events = ask(address, ONE, &watch, None).await?;
    events.event("synced").await?;
    kubernetes.create_pods(shop, "new", 1).await?;
    let new = truth(kubernetes, shop).await?.into_iter().find(|row| row.1.starts_with("new"));
    let new = new.context("the new pod")?.1;
    let row = events.row("upserted", &new).await?;
    assert_eq!((&row["namespace"], &row["cells"]["Ready"]), (&json!(shop), &json!("0/1")));
    let last = events.event("synced").await?.id;
    drop(events);
    delete(kubernetes, shop, &[&new]).await?;
    let mut again = ask(address, ONE, &watch, Some(&last)).await?;
    let removed = again.row("removed", &new).await?;
    assert_eq!(removed["agent_id"], AGENT);
    again.event("synced").await?;
    // Each stream counts, until its client has left.
    endpoint.kas.metric_is("kas_view_subscriptions", 1.0).await?;
    drop(again);
    endpoint.kas.metric_is("kas_view_subscriptions", 0.0).await?;
    rights_are_withdrawn(kubernetes, &endpoint, shop, &watch).await
}

/// A RoleBinding is deleted while its user looks: its stream ends, and nobody else's.
async fn rights_are_withdrawn(
    kubernetes: &Kubernetes,
    endpoint: &Endpoint,
    namespace: &str,
    watch: &str,
) -> Result<()> {
    let mut one = ask(endpoint.address, ONE, watch, None).await?;
    let mut all = ask(endpoint.address, ALL, watch, None).await?;
    one.event("synced").await?;
    all.event("synced").await?;
    kubernetes.kubectl(&["delete", "rolebinding", "views-http-one", "-n", namespace]).await?;
    let ended = one.event("ended").await?.data;
    assert_eq!(ended["code"], 403, "{ended}");
    let text = ended["message"].as_str().unwrap_or_default();
    ensure!(text.contains("may not list and watch pods"), "{ended}");
    // It was the last event.
    soon("the end", async { anyhow::Ok((&mut one.body).collect().await?) }).await?;
    let (status, text) = refused(endpoint.address, ONE, watch).await?;
    ensure!(status == 403 && text.contains("may not list and watch pods"), "{status} {text}");
    // Whose rights are in another binding goes on looking.
    kubernetes.create_pods(namespace, "later", 1).await?;
    all.row("upserted", "later-00000").await?;
    let line = eventually("the end is in the audit log", async || {
        let lines = endpoint.audited()?;
        let ended = lines.into_iter().find(|line| line["ended_by"] == "revoked");
        Ok(ended.ok_or("no such line"))
    })
    .await?;
    for (key, value) in [
        ("event", json!("end")),
        ("actor", json!("file")),
        ("subject", json!("kas:one")),
        ("verb", json!("get")),
        ("resource", json!("fleet/views/{view}")),
        ("kind", json!("watch")),
        ("decision", json!("allow")),
        ("http_status", json!(200)),
    ] {
        assert_eq!(line[key], value, "{key} of {line}");
    }
    Ok(())
}

#[tokio::test]
async fn an_agent_of_14_1_has_views_for_those_who_see_what_it_sees() -> Result<()> {
    let files = TempDir::with_prefix("views-http-")?;
    let endpoint = endpoint(&files).await?;
    let api = DemoApi::start(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    let agent = HttpAgent::start(endpoint.kas.agent, &token(AGENT), Kind::Old, api.address()).await?;
    // It is connected as long as it has this stream.
    let _configuration = agent.raw().configuration("").await?;
    let target = "pods?agents=id%3D1";
    let seen = eventually("the agent has rows", async || {
        let (status, answer) = ask(endpoint.address, JANE, target, None).await?.json().await?;
        let has_rows = status == 200 && answer["rows"].as_array().is_some_and(|rows| !rows.is_empty());
        Ok(if has_rows { Ok(answer) } else { Err(answer) })
    })
    .await?;
    assert_eq!(seen["agents"][0]["state"], "live", "{seen}");
    assert!(seen["columns"].as_array().is_some_and(|columns| columns.len() > 2), "{seen}");
    // It cannot impersonate anybody, so it cannot be asked what a user may see.
    let (status, text) = refused(endpoint.address, ALL, target).await?;
    ensure!(status == 501 && text.contains("cannot impersonate a user"), "{status} {text}");
    Ok(())
}
