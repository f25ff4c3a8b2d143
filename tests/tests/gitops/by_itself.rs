//! agentk that applies by itself: for a kas that only serves manifests, as GitLab's before 17.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    kas::token,
    kubernetes::{Kubernetes, deletions},
    mesh::{Mesh, Options},
    process::SOON,
};
use tokio::time::{Instant, sleep};

use crate::setup::{AGENT, INVENTORY, Repository, config_map, sync, value};

const ENTRY: &str = "    default_namespace: default\n";
/// Objects of a commit that takes seconds to apply.
const MANY: usize = 400;
/// A pod takes over at most 15 s and some attempts after another one was killed.
const TAKEN_OVER: Duration = Duration::from_secs(60);
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// A repository, a kas that serves it and does not apply, and a cluster.
struct Setup {
    repository: Repository,
    mesh: Mesh,
    kubernetes: Kubernetes,
}

impl Setup {
    async fn start() -> Result<Self> {
        let repository = Repository::new(ENTRY, "").await?;
        let mut config = repository.kas_config();
        config["agent"]["gitops"] = json!({ "applier": "agent", "poll_period": "1s" });
        let options = Options { replicas: 1, agents: 1, config, ..Options::default() };
        let (kubernetes, mesh) = tokio::try_join!(Kubernetes::start_audited(), Mesh::start_with(options))?;
        Ok(Self { repository, mesh, kubernetes })
    }

    /// Starts a pod of the agent.
    async fn pod(&self, name: &str) -> Result<Agentk> {
        let kubeconfig = self.kubernetes.admin_kubeconfig();
        let kubeconfig = kubeconfig.to_str().context("a path in UTF-8")?;
        let url = format!("grpc://{}", self.mesh.agents(0));
        let audit = self.audit_log(name);
        let audit = audit.to_str().context("a path in UTF-8")?;
        let arguments = [
            ["--kubeconfig", kubeconfig],
            ["--pod-namespace", "default"],
            ["--pod-name", name],
            ["--audit-log", audit],
        ]
        .concat();
        let agentk = Agentk::start_at_urls(&url, &token(AGENT), &arguments).await?;
        agentk.connected().await?;
        Ok(agentk)
    }

    /// The audit log of a pod.
    fn audit_log(&self, pod: &str) -> PathBuf {
        self.repository.root().join(format!("{pod}.jsonl"))
    }

    async fn lease(&self) -> Result<Value> {
        let lease = ["get", "lease", "agent-1-lock", "--namespace", "default", "-o", "json"];
        Ok(serde_json::from_str(&self.kubernetes.kubectl(&lease).await?)?)
    }

    /// Waits until an object has this value; `None`: until it is gone.
    async fn becomes(&self, name: &str, expected: Option<&str>, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let now = value(&self.kubernetes, name).await?;
            if now.as_deref() == expected {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{name} is {now:?} and not {expected:?} after {within:?}");
            sleep(LOOK).await;
        }
    }

    /// Checks every deletion of every pod against the audit log of the API server.
    fn deletions(&self) -> Result<deletions::Deletions> {
        self.repository.deletions_by(&self.kubernetes, "agentk/gitops", INVENTORY)
    }
}

/// Waits until a pod applies.
async fn leads(pod: &Agentk, within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    while pod.metric("agentk_gitops_leads").await? < 1.0 {
        ensure!(Instant::now() < deadline, "the pod does not apply after {within:?}");
        sleep(LOOK).await;
    }
    Ok(())
}

#[tokio::test]
async fn agentk_applies_by_itself_where_kas_only_serves_manifests() -> Result<()> {
    let it = Setup::start().await?;
    // What the engine of 14.1 has left: an inventory, and an object that is not in the repository any more.
    let own = json!({ "config.k8s.io/owning-inventory": INVENTORY });
    let labels = json!({ "cli-utils.sigs.k8s.io/inventory-id": INVENTORY });
    for object in [
        json!({ "metadata": { "name": "old", "annotations": own }, "data": { "v": "0" } }),
        json!({ "metadata": { "name": "a", "annotations": own }, "data": { "v": "0" } }),
        json!({
            "metadata": { "name": "inventory-1-42", "labels": labels },
            "data": { "default_old__ConfigMap": "", "default_a__ConfigMap": "" },
        }),
    ] {
        let mut object = object;
        object["apiVersion"] = json!("v1");
        object["kind"] = json!("ConfigMap");
        object["metadata"]["namespace"] = json!("default");
        it.kubernetes.apply(&object.to_string()).await?;
    }
    let files = [("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))];
    let first = it.repository.push(&files).await?;
    let pod = it.pod("pod-a").await?;
    it.becomes("b", Some("1"), SOON).await?;
    it.becomes("a", Some("1"), SOON).await?;
    it.becomes("old", None, SOON).await?;
    let inventory = ["get", "configmap", "inventory-1-42", "--namespace", "default", "-o", "json"];
    let deadline = Instant::now() + SOON;
    loop {
        let inventory: Value = serde_json::from_str(&it.kubernetes.kubectl(&inventory).await?)?;
        if inventory["metadata"]["annotations"]["kas/commit"] == first.as_str() {
            let keys: Vec<&String> = inventory["data"].as_object().context("data")?.keys().collect();
            assert_eq!(keys, ["default_a__ConfigMap", "default_b__ConfigMap"]);
            break;
        }
        ensure!(Instant::now() < deadline, "{inventory}");
        sleep(LOOK).await;
    }

    // kas knows that it is not the one.
    let seen = sync(&it.mesh, 0).await;
    ensure!(
        seen.as_ref().is_ok_and(|seen| seen.projects.is_empty()) || seen.is_err(),
        "kas applies, too: {seen:?}"
    );

    // A bad manifest changes nothing, although a file is gone.
    let bad = [("a.json", config_map("a", "2")), ("bad.yaml", "kind: [x".to_owned())];
    it.repository.push(&bad).await?;
    pod.process
        .logged("a manifest that is wrong", |line| {
            let error = line["error"].as_str().unwrap_or_default();
            error.contains("bad.yaml:1").then_some(())
        })
        .await?;
    assert_eq!(value(&it.kubernetes, "a").await?.as_deref(), Some("1"));
    assert_eq!(value(&it.kubernetes, "b").await?.as_deref(), Some("1"));

    // What is removed is pruned, and nothing else.
    it.repository.push(&[("a.json", config_map("a", "3"))]).await?;
    it.becomes("b", None, SOON).await?;
    assert_eq!(value(&it.kubernetes, "a").await?.as_deref(), Some("3"));
    assert_eq!(it.deletions()?, deletions::Deletions { deleted: 2, violations: Vec::new() });

    // agentk's own audit log has it, so it has passed the policy.
    let deadline = Instant::now() + SOON;
    loop {
        let log = std::fs::read_to_string(it.audit_log("pod-a"))?;
        let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if lines.any(|line| line["verb"] == "delete" && line["name"] == "b" && line["status"] == 200) {
            break;
        }
        ensure!(Instant::now() < deadline, "{log}");
        sleep(LOOK).await;
    }
    ensure!(pod.metric("agentk_gitops_pruned_total").await? >= 2.0, "two objects were deleted");
    Ok(())
}

#[tokio::test]
async fn a_pod_that_is_killed_in_the_middle_of_an_apply_is_replaced() -> Result<()> {
    let it = Setup::start().await?;
    it.repository.push(&[("old.json", config_map("old", "1"))]).await?;
    let (first, second) = (it.pod("pod-a").await?, it.pod("pod-b").await?);
    it.becomes("old", Some("1"), SOON).await?;
    let holder = it.lease().await?["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned();
    let (leader, other, name) =
        if holder.starts_with("pod-a_") { (first, second, "pod-b_") } else { (second, first, "pod-a_") };
    ensure!(leader.metric("agentk_gitops_leads").await? == 1.0, "{holder} leads");
    ensure!(other.metric("agentk_gitops_leads").await? == 0.0, "one pod leads");

    let all: Vec<String> = (0..MANY).map(|n| config_map(&format!("many-{n:03}"), "2")).collect();
    it.repository.push(&[("many.yaml", all.join("\n---\n"))]).await?;
    it.becomes("many-030", Some("2"), SOON).await?;
    leader.process.kill();
    ensure!(value(&it.kubernetes, "many-399").await?.is_none(), "it was killed too late");
    ensure!(value(&it.kubernetes, "old").await?.is_some(), "it was killed too late");
    leads(&other, TAKEN_OVER).await?;
    it.becomes("old", None, TAKEN_OVER).await?;
    assert_eq!(value(&it.kubernetes, "many-399").await?.as_deref(), Some("2"));
    let lease = it.lease().await?;
    ensure!(lease["spec"]["holderIdentity"].as_str().is_some_and(|it| it.starts_with(name)), "{lease}");
    assert_eq!(lease["spec"]["leaseTransitions"], 1);

    // A pod that is told to end gives its Lease up, and the next one need not wait.
    let third = it.pod("pod-c").await?;
    other.process.terminate();
    other
        .process
        .logged("the release", |line| {
            (line["message"] == "this pod applies no manifests any more").then_some(())
        })
        .await?;
    leads(&third, SOON).await?;
    assert_eq!(it.lease().await?["spec"]["leaseTransitions"], 2);
    let files = [("many.yaml", all.join("\n---\n")), ("new.json", config_map("new", "3"))];
    it.repository.push(&files).await?;
    it.becomes("new", Some("3"), SOON).await?;
    assert_eq!(it.deletions()?, deletions::Deletions { deleted: 1, violations: Vec::new() });
    Ok(())
}
