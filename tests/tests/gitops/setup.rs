//! A repository, replicas that read it, an agentk and an API server.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proto::kas::api::v1::{
    ControlSyncRequest, ControlSyncResponse, DiffRequest, DiffResponse, GetSyncRequest, GetSyncResponse,
    ProjectSync, control_sync_request::Action, diff_request::Of,
};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    kas::{merge, token},
    kubernetes::{Kubernetes, deletions::Deletions},
    mesh::{Mesh, Options},
    process::SOON,
};
use tokio::time::{Instant, sleep};

pub(crate) use testkit::manifests::{AGENT, PROJECT, Repository, config_map, git};

/// The inventory of agent 1 and of the repository, whose number is 42.
pub(crate) const INVENTORY: &str = "1-42";
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Everything that a test needs.
pub(crate) struct Setup {
    pub(crate) repository: Repository,
    pub(crate) mesh: Mesh,
    /// It ends with this.
    pub(crate) _agentk: Agentk,
    pub(crate) kubernetes: Kubernetes,
}

impl Setup {
    /// Starts replicas, and an agentk that is connected to the first two of them.
    pub(crate) async fn start(replicas: usize, entry: &str, kas_yaml: &str) -> Result<Self> {
        Self::start_with(replicas, entry, kas_yaml, json!({})).await
    }

    /// As [`start`](Self::start); `over` is merged into the configuration of the replicas. They know a second
    /// agent, which is not connected.
    pub(crate) async fn start_with(
        replicas: usize,
        entry: &str,
        kas_yaml: &str,
        over: Value,
    ) -> Result<Self> {
        let repository = Repository::new(entry, kas_yaml).await?;
        let mut config = repository.kas_config();
        merge(&mut config, over);
        let options = Options { replicas, agents: 2, config, ..Options::default() };
        let (kubernetes, mesh) = tokio::try_join!(Kubernetes::start_audited(), Mesh::start_with(options))?;
        let agentk = Self::agentk(&mesh, &kubernetes, replicas.min(2)).await?;
        Ok(Self { repository, mesh, _agentk: agentk, kubernetes })
    }

    /// Starts an agentk of the agent that connects to the first replicas.
    pub(crate) async fn agentk(mesh: &Mesh, kubernetes: &Kubernetes, replicas: usize) -> Result<Agentk> {
        let urls: Vec<String> = (0..replicas).map(|n| format!("grpc://{}", mesh.agents(n))).collect();
        let kubeconfig = kubernetes.admin_kubeconfig();
        let kubeconfig = kubeconfig.to_str().context("a path in UTF-8")?;
        let agentk =
            Agentk::start_at_urls(&urls.join(","), &token(AGENT), &["--kubeconfig", kubeconfig]).await?;
        agentk.connected().await?;
        Ok(agentk)
    }

    /// Returns what a replica says about the project.
    pub(crate) async fn sync(&self, replica: usize) -> Result<GetSyncResponse> {
        sync(&self.mesh, replica).await
    }

    /// Waits until a replica says something about the project.
    pub(crate) async fn until(
        &self,
        replica: usize,
        what: &str,
        condition: impl Fn(&ProjectSync) -> bool,
    ) -> Result<ProjectSync> {
        until(&self.mesh, replica, what, condition).await
    }

    /// Waits until a commit is applied and everything is current.
    pub(crate) async fn synced(&self, replica: usize, commit: &str) -> Result<ProjectSync> {
        self.until(replica, "synced", |it| it.phase == "synced" && it.applied_commit == commit).await
    }

    /// Asks a replica to do something.
    pub(crate) async fn control(&self, replica: usize, action: Action) -> Result<ControlSyncResponse> {
        control(&self.mesh, replica, action).await
    }

    /// Asks a replica for a diff.
    pub(crate) async fn diff(&self, replica: usize, of: Of) -> Result<DiffResponse> {
        let request = DiffRequest { agent_id: AGENT, project: PROJECT.to_owned(), of: Some(of) };
        self.mesh.caller(replica).await?.unary("/kas.api.v1.KasApi/Diff", &request).await
    }

    /// Returns the value of a `ConfigMap`; `None`: there is none.
    pub(crate) async fn value(&self, name: &str) -> Result<Option<String>> {
        value(&self.kubernetes, name).await
    }

    /// Checks every deletion of every planner against the audit log.
    pub(crate) fn deletions(&self) -> Result<Deletions> {
        self.repository.deletions(&self.kubernetes, INVENTORY)
    }

    /// Returns the replica that plans.
    pub(crate) async fn home(&self, asked: usize) -> Result<usize> {
        let name = self.sync(asked).await?.replica;
        let home = (0..2).find(|n| self.mesh.private(*n).to_string() == name);
        home.with_context(|| format!("{name:?} is no replica"))
    }
}

/// Returns the value of a `ConfigMap`; `None`: there is none.
pub(crate) async fn value(kubernetes: &Kubernetes, name: &str) -> Result<Option<String>> {
    let output = "jsonpath={.data.v}";
    let arguments = ["get", "configmap", name, "--namespace", "default", "--ignore-not-found", "-o", output];
    let found = kubernetes.kubectl(&arguments).await?;
    Ok(Some(found).filter(|found| !found.is_empty()))
}

/// Asks a replica to do something.
pub(crate) async fn control(mesh: &Mesh, replica: usize, action: Action) -> Result<ControlSyncResponse> {
    let request = ControlSyncRequest {
        agent_id: AGENT,
        project: PROJECT.to_owned(),
        action: action.into(),
        namespace: String::new(),
    };
    mesh.caller(replica).await?.unary("/kas.api.v1.KasApi/ControlSync", &request).await
}

/// Returns what a replica says about the project.
pub(crate) async fn sync(mesh: &Mesh, replica: usize) -> Result<GetSyncResponse> {
    let request = GetSyncRequest { agent_id: AGENT, project: PROJECT.to_owned(), with_objects: true };
    mesh.caller(replica).await?.unary("/kas.api.v1.KasApi/GetSync", &request).await
}

/// Waits until a replica says something about the project.
pub(crate) async fn until(
    mesh: &Mesh,
    replica: usize,
    what: &str,
    condition: impl Fn(&ProjectSync) -> bool,
) -> Result<ProjectSync> {
    let deadline = Instant::now() + SOON;
    loop {
        let last = match sync(mesh, replica).await {
            Ok(answer) => match answer.projects.iter().find(|project| condition(project)) {
                Some(project) => return Ok(project.clone()),
                None => format!("{answer:?}"),
            },
            Err(error) => format!("{error:#}"),
        };
        ensure!(Instant::now() < deadline, "not {what} within {SOON:?}: {last}");
        sleep(LOOK).await;
    }
}
