//! Views: the rows that kas has are those of the API server, whatever happens to watches, agents and
//! replicas.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use prost::Message as _;
use proto::kas::api::v1::{
    ViewColumns, ViewRow, ViewSynced, WatchViewRequest, WatchViewResponse, watch_view_response::Event,
};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    caller::Caller,
    kas::{eventually, token},
    kubernetes::{Access, Kubernetes},
    link::{Next, Stream},
    mesh::{Mesh, Options},
    process::SOON,
};
use tokio::time::timeout;

use crate::setup::{AGENT, Chain, event, exclusive};

const WATCH_VIEW: &str = "/kas.api.v1.KasApi/WatchView";

/// A row of a table: namespace, name, and the cells that do not depend on the time.
pub(crate) type Row = (String, String, Vec<String>);

/// Returns the pods of a namespace as the API server prints them, without their ages.
pub(crate) async fn truth(kubernetes: &Kubernetes, namespace: &str) -> Result<BTreeSet<Row>> {
    let columns = r"custom-columns=NAME:.metadata.name,STATUS:.status.phase";
    let names = kubernetes.kubectl(&["get", "pods", "-n", namespace, "--no-headers", "-o", columns]).await?;
    let printed = kubernetes.kubectl(&["get", "pods", "-n", namespace, "--no-headers"]).await?;
    let row = |line: &str| -> Option<Row> {
        let mut cells = line.split_whitespace().map(str::to_owned);
        let name = cells.next()?;
        // Ready, status and restarts; the age is last.
        Some((namespace.to_owned(), name, cells.take(3).collect()))
    };
    let rows: BTreeSet<Row> = printed.lines().filter_map(row).collect();
    ensure!(rows.len() == names.lines().filter(|line| !line.starts_with("No ")).count(), "{printed} {names}");
    Ok(rows)
}

/// A client that looks at a view.
struct Viewer {
    stream: Stream,
    rows: BTreeMap<(i64, String, String), ViewRow>,
    columns: ViewColumns,
    states: BTreeMap<i64, String>,
    resets: usize,
    received: usize,
}

impl Viewer {
    async fn open(caller: &Caller, request: WatchViewRequest) -> Result<Self> {
        let mut stream = caller.open(caller.request(WATCH_VIEW)).await?;
        stream.send_message(&request).await.map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        stream.half_close().map_err(|reason| anyhow::anyhow!("reset: {reason:?}"))?;
        Ok(Self {
            stream,
            rows: BTreeMap::new(),
            columns: ViewColumns::default(),
            states: BTreeMap::new(),
            resets: 0,
            received: 0,
        })
    }

    /// Takes the next message; returns `synced` if it is that.
    async fn next(&mut self) -> Result<Option<ViewSynced>> {
        let next = timeout(SOON, self.stream.next()).await.context("nothing comes")?;
        let Next::Message(message) = next else { anyhow::bail!("the view has ended: {next:?}") };
        match WatchViewResponse::decode(message)?.event.context("an empty event")? {
            Event::Columns(columns) => self.columns = columns,
            Event::Upserted(rows) => {
                for row in rows.rows {
                    self.received += 1;
                    self.rows.insert((row.agent_id, row.namespace.clone(), row.name.clone()), row);
                }
            }
            Event::Removed(keys) => {
                for key in keys.keys {
                    self.rows.remove(&(key.agent_id, key.namespace, key.name));
                }
            }
            Event::Reset(_) => {
                self.resets += 1;
                self.rows.clear();
            }
            Event::Agent(agent) => {
                self.states.insert(agent.id, agent.state);
            }
            Event::Synced(synced) => return Ok(Some(synced)),
        }
        Ok(None)
    }

    async fn synced(&mut self) -> Result<ViewSynced> {
        loop {
            if let Some(synced) = self.next().await? {
                return Ok(synced);
            }
        }
    }

    fn pods(&self, namespace: &str) -> BTreeSet<Row> {
        let pods = self.rows.values().filter(|row| row.namespace == namespace);
        pods.map(|row| {
            let cells = (0..3).map(|at| row.cells.get(at).cloned().unwrap_or_default());
            (row.namespace.clone(), row.name.clone(), cells.collect())
        })
        .collect()
    }

    /// Waits until the pods of a namespace are these.
    async fn has(&mut self, namespace: &str, pods: &BTreeSet<Row>) -> Result<()> {
        timeout(SOON, async {
            // Counted first: thousands of rows are not compared after each change.
            let count = |it: &Self| it.rows.keys().filter(|key| key.1 == namespace).count();
            while count(self) != pods.len() || self.pods(namespace) != *pods {
                self.next().await?;
            }
            anyhow::Ok(())
        })
        .await
        .with_context(|| format!("{:?}\ninstead of {pods:?}", self.pods(namespace)))?
    }
}

fn pods(namespace: &str) -> WatchViewRequest {
    WatchViewRequest {
        agents: format!("id={AGENT}"),
        view: "pods".to_owned(),
        namespaces: vec![namespace.to_owned()],
        ..WatchViewRequest::default()
    }
}

async fn set_phase(kubernetes: &Kubernetes, namespace: &str, pod: &str, phase: &str) -> Result<()> {
    let patch = format!(r#"{{"status":{{"phase":"{phase}"}}}}"#);
    let arguments = ["patch", "pod", pod, "-n", namespace, "--subresource=status", "-p", &patch];
    kubernetes.kubectl(&arguments).await.map(drop)
}

pub(crate) async fn delete(kubernetes: &Kubernetes, namespace: &str, pods: &[&str]) -> Result<()> {
    let fixed = ["delete", "pod", "-n", namespace, "--grace-period=0", "--force"];
    kubernetes.kubectl(&[&fixed[..], pods].concat()).await.map(drop)
}

#[tokio::test]
async fn rows_are_those_of_kubectl_get_and_follow_changes() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let namespace = "views-walk";
    kubernetes.create_pods(namespace, "web", 40).await?;
    let chain = Chain::start(kubernetes, namespace, Access::PodsReadOnly).await?;

    let table = chain.output(&["get", "pods", "--agents", "id=1", "-n", namespace]).await?;
    let mut lines = table.lines();
    let titles: Vec<&str> = lines.next().context("titles")?.split_whitespace().collect();
    assert_eq!(titles, ["AGENT", "NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE"]);
    let shown: BTreeSet<Row> = lines
        .map(|line| {
            let cells: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            (cells[1].clone(), cells[2].clone(), cells[3..6].to_vec())
        })
        .collect();
    let expected = truth(kubernetes, namespace).await?;
    assert_eq!(expected.len(), 40);
    assert_eq!(shown, expected);

    // JSON, a filter, labels, columns.
    let arguments = [
        "get",
        "pods",
        "--agents",
        "all",
        "-n",
        namespace,
        "-l",
        "app=web",
        "--filter",
        "phase=Pending",
        "-o",
        "json",
    ];
    let json = chain.run(&arguments).await?;
    // The second agent of this kas is not connected.
    assert_eq!(json.code(), Some(6), "{json:?}");
    let json: Value = serde_json::from_str(&json.stdout)?;
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(40));
    assert_eq!(json["rows"][0]["cells"]["Status"], "Pending");
    assert_eq!(json["unanswered"][0]["id"], 2);
    let wrong =
        chain.run(&["get", "pods", "--agents", "id=1", "-n", namespace, "--filter", "colour=red"]).await?;
    assert!(
        wrong.code() == Some(2) || wrong.code() == Some(1) || wrong.stderr.contains("no column colour"),
        "{wrong:?}"
    );
    assert!(wrong.stderr.contains("no column colour"), "{wrong:?}");
    let forbidden = chain.run(&["get", "nodes", "--agents", "id=1"]).await?;
    assert!(forbidden.code() == Some(6) && forbidden.stderr.contains("forbidden"), "{forbidden:?}");

    // Changes, by two who look at once.
    let watch = ["get", "pods", "--agents", "id=1", "-n", namespace, "--watch", "-o", "json"];
    let (mut lines, _kasctl) = chain.kasctl(&watch).await?.lines();
    while event(&mut lines).await?["event"] != "synced" {}
    let caller = chain.kas.caller().await?;
    let mut viewer = Viewer::open(&caller, pods(namespace)).await?;
    viewer.synced().await?;
    kubernetes.create_pods(namespace, "new", 1).await?;
    let added = loop {
        let event = event(&mut lines).await?;
        if event["event"] == "upserted" {
            break event;
        }
    };
    assert!(added["row"]["name"].as_str().is_some_and(|name| name.starts_with("new")), "{added}");
    let name = expected.iter().next().context("a pod")?.1.clone();
    set_phase(kubernetes, namespace, &name, "Failed").await?;
    delete(kubernetes, namespace, &[&expected.iter().nth(1).context("a pod")?.1]).await?;
    viewer.has(namespace, &truth(kubernetes, namespace).await?).await?;
    // One watch for both of them, and the forbidden nodes have none.
    chain.kas.metric_is("kas_view_watches", 1.0).await?;
    chain.kas.metric_is("kas_view_subscriptions", 2.0).await
}

/// Changes of pods in a fixed pseudo-random order.
async fn churn(kubernetes: &Kubernetes, namespace: &str, rounds: Range<usize>) -> Result<()> {
    for round in rounds {
        kubernetes.create_pods(namespace, &format!("round-{round}"), 3).await?;
        let names: Vec<String> = truth(kubernetes, namespace).await?.into_iter().map(|row| row.1).collect();
        let pick =
            |salt: usize| names.get((round * 7 + salt * 13) % names.len()).cloned().unwrap_or_default();
        let (gone, also) = (pick(1), pick(5));
        delete(kubernetes, namespace, &[&gone]).await?;
        if also != gone {
            set_phase(kubernetes, namespace, &also, if round % 2 == 0 { "Running" } else { "Failed" })
                .await?;
        }
    }
    Ok(())
}

/// Requests to the API server at once: it takes 100 of a connection.
const AT_ONCE: usize = 64;

#[tokio::test]
async fn rows_of_5000_pods_are_those_of_kubectl_get_after_churn() -> Result<()> {
    const PODS: usize = 5_000;
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let namespace = "views-many";
    kubernetes.create_pods(namespace, "web", PODS).await?;
    let chain = Chain::start(kubernetes, namespace, Access::PodsReadOnly).await?;
    let caller = chain.kas.caller().await?;
    let mut viewers = Vec::new();
    for _ in 0..4 {
        let mut viewer = Viewer::open(&caller, pods(namespace)).await?;
        viewer.synced().await?;
        assert_eq!(viewer.rows.len(), PODS);
        viewers.push(viewer);
    }
    println!("{} bytes for each row", chain.kas.metric("kas_view_bytes").await? / 5_000.0);

    // Without kubectl, which takes most of a second each time.
    let writer = kubernetes.writer().await?;
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    for round in 0..40 {
        kubernetes.create_pods(namespace, &format!("round-{round}"), 3).await?;
        writer.delete(&format!("{path}/web-{:05}", round * 97)).await?;
        writer.delete(&format!("{path}/round-{round}-00001")).await?;
        let phase = if round % 2 == 0 { "Running" } else { "Failed" };
        let phase = json!({ "status": { "phase": phase } });
        writer.merge(&format!("{path}/web-{:05}/status", round * 101 + 1), &phase).await?;
    }
    let expected = truth(kubernetes, namespace).await?;
    assert_eq!(expected.len(), PODS + 40);
    for viewer in &mut viewers {
        viewer.has(namespace, &expected).await?;
    }
    chain.kas.metric_is("kas_view_watches", 1.0).await?;
    chain.kas.metric_is("kas_view_lists_total", 1.0).await?;

    // The next tests have the same API server.
    let gone = expected.iter().map(|(_, name, _)| {
        let path = format!("{path}/{name}");
        let writer = &writer;
        async move { writer.delete(&path).await }
    });
    stream::iter(gone).buffer_unordered(AT_ONCE).try_collect::<()>().await
}

#[tokio::test]
async fn a_killed_agentk_or_edge_loses_no_change() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let namespace = "views-kill";
    kubernetes.create_pods(namespace, "web", 30).await?;
    let bearer = kubernetes.service_account(namespace, "agentk", Access::PodsReadOnly).await?;
    let kubeconfig = kubernetes.kubeconfig_with_token(namespace, &bearer)?;
    let mesh = Mesh::start_with(Options { replicas: 2, agents: 1, ..Options::default() }).await?;
    let dial = mesh.agents(1);
    let agentk = Agentk::start_with_kubeconfig(dial, &token(AGENT), &kubeconfig).await?;
    agentk.connected().await?;
    // The edge is the replica without the agent.
    let caller = mesh.caller(0).await?;
    eventually("the edge knows the agent", async || {
        let mut viewer = Viewer::open(&caller, pods(namespace)).await?;
        viewer.synced().await?;
        Ok(if viewer.rows.len() == 30 { Ok(()) } else { Err(viewer.states) })
    })
    .await?;
    let mut viewer = Viewer::open(&caller, pods(namespace)).await?;
    let mut resume = viewer.synced().await?.resume;
    churn(kubernetes, namespace, 0..2).await?;
    viewer.has(namespace, &truth(kubernetes, namespace).await?).await?;
    while let Ok(next) = timeout(std::time::Duration::from_millis(300), viewer.next()).await {
        if let Some(synced) = next? {
            resume = synced.resume;
        }
    }

    // The same replica goes on: only what has changed meanwhile is sent.
    let rows = std::mem::take(&mut viewer.rows);
    drop(viewer);
    kubernetes.create_pods(namespace, "meanwhile", 1).await?;
    let mut again =
        Viewer::open(&caller, WatchViewRequest { resume: resume.clone(), ..pods(namespace) }).await?;
    again.rows = rows.clone();
    again.has(namespace, &truth(kubernetes, namespace).await?).await?;
    assert_eq!((again.resets, again.received), (0, 1));

    // agentk is killed under the watch, and another one takes its place.
    drop(agentk);
    again.next().await?;
    churn(kubernetes, namespace, 2..3).await?;
    let agentk = Agentk::start_with_kubeconfig(dial, &token(AGENT), &kubeconfig).await?;
    agentk.connected().await?;
    again.has(namespace, &truth(kubernetes, namespace).await?).await?;
    assert_eq!(again.resets, 0, "the rows of before stay");

    // The edge is killed. The other replica knows nothing of its changes, and says so.
    mesh.kill(0).await?;
    churn(kubernetes, namespace, 3..4).await?;
    let caller = mesh.caller(1).await?;
    let mut elsewhere = Viewer::open(&caller, WatchViewRequest { resume, ..pods(namespace) }).await?;
    elsewhere.rows = rows;
    elsewhere.synced().await?;
    assert_eq!(elsewhere.resets, 1);
    assert_eq!(elsewhere.pods(namespace), truth(kubernetes, namespace).await?);

    // A replica that is shut down tells its callers to go on elsewhere, and then its own watches end.
    mesh.leave(1, SOON).await?;
    let log = mesh.kas(1).process.log();
    ensure!(!log.contains("drain timeout exceeded"), "{log}");
    Ok(())
}
