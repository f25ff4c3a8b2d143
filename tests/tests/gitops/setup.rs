//! A repository, replicas that read it, an agentk and an API server.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use proto::kas::api::v1::{
    ControlSyncRequest, ControlSyncResponse, DiffRequest, DiffResponse, GetSyncRequest, GetSyncResponse,
    ProjectSync, control_sync_request::Action, diff_request::Of,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    kas::{merge, token},
    kubernetes::{
        Kubernetes,
        deletions::{self, Deletions, HeadSpan},
    },
    mesh::{Mesh, Options},
    process::SOON,
};
use tokio::{
    process::Command,
    time::{Instant, sleep},
};

pub(crate) const AGENT: i64 = 1;
pub(crate) const PROJECT: &str = "group/manifests";
/// The inventory of agent 1 and of the repository, whose number is 42.
pub(crate) const INVENTORY: &str = "1-42";
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// A bare repository, its files, and what it said when.
pub(crate) struct Repository {
    dir: TempDir,
    bare: PathBuf,
    heads: Mutex<Vec<HeadSpan>>,
}

fn now() -> i128 {
    #[allow(clippy::disallowed_methods)] // compared with the API server's own times
    let now = SystemTime::now();
    i128::try_from(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()).unwrap_or(i128::MAX)
}

/// Runs Git in a folder, and returns what it says.
pub(crate) async fn git(folder: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .current_dir(folder)
        .args(["-c", "user.name=T", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"])
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .stdin(Stdio::null())
        .output()
        .await
        .context("cannot run git")?;
    ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

impl Repository {
    /// Creates an empty one, and the configuration of the agent beside it.
    pub(crate) async fn new(entry: &str, kas_yaml: &str) -> Result<Self> {
        let repository = Self::at("bare.git").await?;
        repository.configure(entry)?;
        repository.write_kas_yaml(AGENT, kas_yaml)?;
        Ok(repository)
    }

    /// Writes `kas.yaml` of an agent.
    pub(crate) fn write_kas_yaml(&self, agent: i64, content: &str) -> Result<()> {
        let folder = self.config().join(format!("agents/agent-{agent}"));
        std::fs::create_dir_all(&folder)?;
        let new = folder.join("new-kas");
        std::fs::write(&new, content)?;
        Ok(std::fs::rename(new, folder.join("kas.yaml"))?)
    }

    /// Creates an empty one at this place in its folder, without a configuration.
    pub(crate) async fn at(bare: &str) -> Result<Self> {
        let dir = TempDir::with_prefix("gitops-test-")?;
        let root = dir.path();
        let place = root.join(bare);
        std::fs::create_dir_all(&place)?;
        git(root, &["init", "--quiet", "--bare", "--initial-branch=main", bare]).await?;
        git(root, &["init", "--quiet", "--initial-branch=main", "work"]).await?;
        Ok(Self { bare: place, dir, heads: Mutex::default() })
    }

    /// Returns the folder of everything.
    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    /// Writes the entry of the manifest project into the configuration of the agent; empty: without one.
    pub(crate) fn configure(&self, entry: &str) -> Result<()> {
        let folder = self.config().join("agents/agent-1");
        std::fs::create_dir_all(&folder)?;
        let config = match entry {
            "" => String::new(),
            // Nothing collects garbage beside this API server, so a deletion in the foreground would not end.
            entry => format!(
                "gitops:\n  manifest_projects:\n  - id: {PROJECT}\n    prune_propagation_policy: background\n{entry}"
            ),
        };
        let (new, path) = (folder.join("new"), folder.join("config.yaml"));
        std::fs::write(&new, config)?;
        Ok(std::fs::rename(new, path)?)
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("config")
    }

    pub(crate) fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// Returns what kas needs to know of it.
    pub(crate) fn kas_config(&self) -> Value {
        json!({
            "agent": { "configuration": { "folder": self.config() } },
            "repositories": [
                { "name": PROJECT, "id": 42, "path": self.bare, "agents": "all" },
            ],
        })
    }

    /// Makes the files of the head these, pushes, and returns the commit. A file whose content is JSON counts
    /// for the checker of deletions.
    pub(crate) async fn push(&self, files: &[(&str, String)]) -> Result<String> {
        let work = self.work();
        for entry in std::fs::read_dir(&work)? {
            let path = entry?.path();
            if path.is_file() {
                std::fs::remove_file(path)?;
            }
        }
        let mut objects = BTreeSet::new();
        for (name, content) in files {
            std::fs::write(work.join(name), content)?;
            for document in content.split("\n---\n") {
                let Ok(object) = serde_json::from_str::<Value>(document) else { continue };
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let namespace = match object["metadata"]["namespace"].as_str() {
                    Some(namespace) => namespace.to_owned(),
                    None if object["kind"] == "Namespace" => String::new(),
                    None => "default".to_owned(),
                };
                objects.insert((text(&object["kind"]), namespace, text(&object["metadata"]["name"])));
            }
        }
        git(&work, &["add", "--all"]).await?;
        git(&work, &["commit", "--quiet", "--allow-empty", "--message", "x"]).await?;
        let from = now();
        let bare = self.bare.to_str().context("a path in UTF-8")?;
        git(&work, &["push", "--quiet", "--force", bare, "main"]).await?;
        let pushed = now();
        {
            let mut heads = self.heads.lock();
            if let Some(last) = heads.last_mut() {
                last.until = pushed;
            }
            heads.push(HeadSpan { from, until: i128::MAX, objects });
        }
        git(&work, &["rev-parse", "HEAD"]).await
    }
}

impl Repository {
    /// Checks every deletion of every planner against the audit log. `inventory` is the id.
    pub(crate) fn deletions(&self, kubernetes: &Kubernetes, inventory: &str) -> Result<Deletions> {
        self.deletions_by(kubernetes, "kas/gitops", inventory)
    }

    /// As [`deletions`](Self::deletions), of clients whose `User-Agent` begins with `planner`.
    pub(crate) fn deletions_by(
        &self,
        kubernetes: &Kubernetes,
        planner: &str,
        inventory: &str,
    ) -> Result<Deletions> {
        let log = std::fs::read_to_string(kubernetes.audit_log()).context("no audit log")?;
        Ok(deletions::check(&log, planner, inventory, &self.heads.lock()))
    }
}

/// A `ConfigMap` as a file.
pub(crate) fn config_map(name: &str, value: &str) -> String {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "v": value } })
        .to_string()
}

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
