//! A real API server whose objects change, and the real agentk in front of it: what views show.
//!
//! All of it is on the bridge. agentk reaches the API server and the replicas through wires.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    kas::token,
    kubernetes::{Kubernetes, Writer},
    mesh::Mesh,
};
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::wire::{Toxics, Wire};
use crate::viewer;

/// Namespaces of the objects.
const NAMESPACES: [&str; 2] = ["views-a", "views-b"];
/// Pods and deployments at the beginning; there are as many at least.
const PODS: usize = 40;
const DEPLOYMENTS: usize = 8;
/// The time between two changes.
const EVERY: Duration = Duration::from_millis(25);
/// The pause after the API server was not reached.
const PAUSE: Duration = Duration::from_millis(200);
/// The path of API groups.
const APPS: &str = "/apis/apps/v1";

/// The resources of each view, and their paths.
fn resources(view: &str) -> &'static [(&'static str, &'static str)] {
    match view {
        "workloads" => &[
            ("deployments.apps", "/apis/apps/v1/deployments"),
            ("statefulsets.apps", "/apis/apps/v1/statefulsets"),
            ("daemonsets.apps", "/apis/apps/v1/daemonsets"),
            ("jobs.batch", "/apis/batch/v1/jobs"),
        ],
        _ => &[("pods", "/api/v1/pods")],
    }
}

/// Objects that exist: whether each is a pod, its namespace and its name.
#[derive(Debug, Default)]
struct Objects {
    all: BTreeSet<(bool, &'static str, String)>,
    number: usize,
}

/// All of it. Dropping it ends the processes.
pub(crate) struct Cluster {
    // Ends before what it serves.
    agentk: Option<Agentk>,
    /// Between agentk and the API server.
    wire: Wire,
    /// Between agentk and each replica.
    doors: Vec<Wire>,
    kubernetes: Arc<Kubernetes>,
    objects: Arc<Mutex<Objects>>,
    changes: Arc<AtomicU64>,
    agent: i64,
}

/// Changes of objects, until it is stopped.
pub(crate) struct Churn {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Churn {
    /// Waits until the last change is made.
    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        Ok(self.task.await?)
    }
}

impl Cluster {
    /// Starts the API server of this agent, and wires to replicas, which need not run.
    pub(crate) async fn start(mesh: &Mesh, replicas: usize, agent: i64, seed: u64) -> Result<Self> {
        let kubernetes = Kubernetes::start_audited_in(mesh.network().outside()).await?;
        let server = kubernetes.server();
        let server = server.trim_start_matches("https://").parse().context("an address")?;
        // The certificate is for loopback.
        let wire = Wire::at(([127, 0, 0, 1], 0).into(), server, seed).await?;
        let mut doors = Vec::new();
        for n in 0..replicas {
            doors.push(Wire::to(mesh.agents(n), seed.wrapping_add(1 + n as u64)).await?);
        }
        for namespace in NAMESPACES {
            kubernetes.ensure_namespace(namespace).await?;
        }
        let (objects, changes) = <(Arc<Mutex<Objects>>, Arc<AtomicU64>)>::default();
        let writer = kubernetes.writer().await?;
        for n in 0..PODS + DEPLOYMENTS {
            create(&writer, &objects, n < PODS, NAMESPACES[n % NAMESPACES.len()]).await?;
        }
        Ok(Self { agentk: None, wire, doors, kubernetes: Arc::new(kubernetes), objects, changes, agent })
    }

    pub(crate) fn agent(&self) -> i64 {
        self.agent
    }

    /// Starts the agentk, which knows all replicas.
    pub(crate) async fn connect(&mut self, mesh: &Mesh) -> Result<()> {
        let urls: Vec<String> = self.doors.iter().map(|door| format!("grpc://{}", door.address())).collect();
        let kubeconfig = self.kubernetes.kubeconfig_at(self.wire.address())?;
        let cluster = ["--kubeconfig", kubeconfig.to_str().context("a path in UTF-8")?];
        let outside = mesh.network().outside();
        let agentk = Agentk::start_at_urls_in(outside, &urls.join(","), &token(self.agent), &cluster).await?;
        agentk.connected().await?;
        self.agentk = Some(agentk);
        Ok(())
    }

    /// What is done to connections of agentk to the API server, from now on.
    pub(crate) fn set_wire(&self, toxics: Toxics) {
        self.wire.set(toxics);
    }

    /// What is done to connections of agentk to replicas, from now on.
    pub(crate) fn set_doors(&self, toxics: Toxics) {
        for door in &self.doors {
            door.set(toxics);
        }
    }

    /// The rows of a view, as the API server prints them.
    pub(crate) async fn truth(&self, view: &str) -> Result<BTreeMap<String, String>> {
        let reader = self.kubernetes.reader().await?;
        let mut rows = BTreeMap::new();
        for (resource, path) in resources(view) {
            rows.extend(viewer::table(resource, &reader.table(path).await?)?);
        }
        Ok(rows)
    }

    /// How many objects were created, changed and deleted.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    pub(crate) async fn stop_api_server(&self) -> Result<()> {
        self.kubernetes.stop_api_server().await
    }

    pub(crate) async fn start_api_server(&self) -> Result<()> {
        self.kubernetes.start_api_server().await
    }

    /// Makes the store forget all changes.
    pub(crate) async fn forget_history(&self) -> Result<()> {
        self.kubernetes.forget_history().await
    }

    /// Begins to change objects. Nothing is changed while the API server is away.
    pub(crate) fn churn(&self, seed: u64) -> Churn {
        let stop = CancellationToken::new();
        let (kubernetes, objects) = (Arc::clone(&self.kubernetes), Arc::clone(&self.objects));
        let (changes, stopped) = (Arc::clone(&self.changes), stop.clone());
        let task = tokio::spawn(async move {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut writer: Option<Writer> = None;
            while !stopped.is_cancelled() {
                if writer.is_none() {
                    writer = kubernetes.writer().await.ok();
                }
                let changed = match &writer {
                    Some(writer) => change(writer, &objects, &mut rng).await.is_ok(),
                    None => false,
                };
                let pause = if changed {
                    changes.fetch_add(1, Ordering::Relaxed);
                    EVERY
                } else {
                    // The next change is on another connection.
                    writer = None;
                    PAUSE
                };
                sleep(pause).await;
            }
        });
        Churn { stop, task }
    }
}

fn path(is_pod: bool, namespace: &str) -> String {
    if is_pod {
        format!("/api/v1/namespaces/{namespace}/pods")
    } else {
        format!("{APPS}/namespaces/{namespace}/deployments")
    }
}

async fn create(
    writer: &Writer,
    objects: &Mutex<Objects>,
    is_pod: bool,
    namespace: &'static str,
) -> Result<()> {
    let name = {
        let mut objects = objects.lock();
        objects.number += 1;
        format!("object-{}", objects.number)
    };
    let labels = json!({ "app": name });
    let spec = json!({
        "automountServiceAccountToken": false,
        "containers": [{ "name": "main", "image": "none.invalid/none" }],
    });
    let object = if is_pod {
        json!({ "metadata": { "name": name, "labels": labels }, "spec": spec })
    } else {
        let template =
            json!({ "metadata": { "labels": labels }, "spec": { "containers": spec["containers"] } });
        let spec = json!({ "replicas": 1, "selector": { "matchLabels": labels }, "template": template });
        json!({ "metadata": { "name": name }, "spec": spec })
    };
    writer.create(&path(is_pod, namespace), &object).await?;
    objects.lock().all.insert((is_pod, namespace, name));
    Ok(())
}

/// Creates, changes or deletes one object.
async fn change(writer: &Writer, objects: &Mutex<Objects>, rng: &mut StdRng) -> Result<()> {
    let (is_pod, namespace) = (rng.random_ratio(3, 4), NAMESPACES[rng.random_range(0..NAMESPACES.len())]);
    let (picked, count) = {
        let objects = objects.lock();
        let of_kind: Vec<_> = objects.all.iter().filter(|(of, ..)| *of == is_pod).collect();
        let picked = of_kind.get(rng.random_range(0..of_kind.len().max(1))).map(|found| (*found).clone());
        (picked, of_kind.len())
    };
    let least = if is_pod { PODS } else { DEPLOYMENTS };
    let Some(picked) = picked.filter(|_| rng.random_ratio(3, 4)) else {
        return create(writer, objects, is_pod, namespace).await;
    };
    let at = format!("{}/{}", path(is_pod, picked.1), picked.2);
    if count > least && rng.random_ratio(1, 2) {
        writer.delete(&at).await?;
        objects.lock().all.remove(&picked);
        return Ok(());
    }
    let (at, fields) = if is_pod {
        let phase = ["Pending", "Running", "Succeeded", "Failed"][rng.random_range(0..4)];
        (format!("{at}/status"), json!({ "status": { "phase": phase } }))
    } else {
        (at, json!({ "spec": { "replicas": rng.random_range(0..9) } }))
    };
    writer.merge(&at, &fields).await
}
