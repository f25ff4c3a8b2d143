//! Manifest projects of GitLab: a simulated GitLab, and a Gitaly with their repositories.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use proto::{
    gitlab::agent::{
        event::{GitPushEvent, Project},
        notifications::rpc::{GitPushEventRequest, GitPushEventResponse},
    },
    kas::api::v1::{ProjectSync, control_sync_request::Action},
};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    gitaly::{Real, Small},
    gitlab::{GitLab, relative_path},
    kas::{eventually, merge, token},
    kubernetes::Kubernetes,
    mesh::{Mesh, Options},
};
use tokio::time::sleep;

use crate::setup::{AGENT, PROJECT, Repository, Setup, config_map, control, git, sync, until, value};

const PUSHED: &str = "/gitlab.agent.notifications.rpc.Notifications/GitPushEvent";
const SECRET: &str = "gitaly-token";
/// The configuration project of the agent.
const CONFIGURATION: i64 = 7;
/// The manifest project.
const MANIFESTS: i64 = 9;
const INVENTORY: &str = "1-9";
const REPOSITORIES: &str = "repositories";

/// GitLab, its Gitaly, a kas that knows nothing else, an agentk and an API server.
struct World<G> {
    repository: Repository,
    gitlab: GitLab,
    gitaly: G,
    mesh: Mesh,
    kubernetes: Kubernetes,
    _agentk: Agentk,
}

/// Which Gitaly.
trait Gitaly: Sized {
    async fn serve(folder: &Path, repositories: &Path) -> Result<(Self, String)>;
}

impl Gitaly for Small {
    async fn serve(_: &Path, repositories: &Path) -> Result<(Self, String)> {
        let small = Self::start(repositories, Some(SECRET)).await?;
        let address = small.address().to_owned();
        Ok((small, address))
    }
}

impl Gitaly for Real {
    async fn serve(folder: &Path, repositories: &Path) -> Result<(Self, String)> {
        let real = Self::start(folder, repositories, SECRET).await?;
        let address = real.address();
        Ok((real, address))
    }
}

impl<G: Gitaly> World<G> {
    /// Starts all of it. The agent may use only the namespace `default`. No check comes unasked.
    async fn start(replicas: usize) -> Result<Self> {
        let repository = Repository::at(&format!("{REPOSITORIES}/{}", relative_path(MANIFESTS))).await?;
        let root = repository.root();
        let configuration = root.join(REPOSITORIES).join(relative_path(CONFIGURATION));
        std::fs::create_dir_all(&configuration)?;
        git(&configuration, &["init", "--quiet", "--bare", "--initial-branch=main"]).await?;
        git(root, &["init", "--quiet", "--initial-branch=main", "configuration"]).await?;
        let (gitaly, address) = G::serve(root, &root.join(REPOSITORIES)).await?;
        let gitlab = GitLab::start().await?;
        gitlab.know(&token(AGENT), AGENT, "agent-1", CONFIGURATION);
        gitlab.have_gitaly(&address, SECRET);
        gitlab.have_project(PROJECT, MANIFESTS);
        configure(&repository, "gitops: {check: 1s}\nnamespaces: [default]\n").await?;

        let mut config = gitlab.config();
        merge(&mut config, asks_rarely());
        let options = Options { replicas, agents: 1, start: false, ..Options::default() };
        let (kubernetes, mut mesh) =
            tokio::try_join!(Kubernetes::start_audited(), Mesh::start_with(options))?;
        mesh.add_config(config);
        mesh.start_replicas(&(0..replicas).collect::<Vec<_>>()).await?;
        let agentk = Setup::agentk(&mesh, &kubernetes, replicas.min(2)).await?;
        Ok(Self { repository, gitlab, gitaly, mesh, kubernetes, _agentk: agentk })
    }

    /// Tells a replica of a push to the manifest project, as GitLab does.
    async fn told(&self, replica: usize) -> Result<()> {
        let project = Project { id: MANIFESTS, full_path: PROJECT.to_owned() };
        let request = GitPushEventRequest { event: Some(GitPushEvent { project: Some(project) }) };
        let _: GitPushEventResponse = self.mesh.caller(replica).await?.unary(PUSHED, &request).await?;
        Ok(())
    }

    async fn pushed(&self, files: &[(&str, String)]) -> Result<String> {
        let commit = self.repository.push(files).await?;
        self.told(0).await?;
        Ok(commit)
    }

    async fn until(&self, what: &str, condition: impl Fn(&ProjectSync) -> bool) -> Result<ProjectSync> {
        until(&self.mesh, 0, what, condition).await
    }

    async fn synced(&self, commit: &str) -> Result<ProjectSync> {
        self.until("synced", |it| it.phase == "synced" && it.applied_commit == commit).await
    }

    async fn value(&self, name: &str) -> Result<Option<String>> {
        value(&self.kubernetes, name).await
    }

    fn check(&self, deleted: usize) -> Result<()> {
        let deletions = self.repository.deletions(&self.kubernetes, INVENTORY)?;
        ensure!(deletions.violations.is_empty() && deletions.deleted == deleted, "{deletions:#?}");
        Ok(())
    }
}

/// Repositories are checked only because of pushes; permissions every second.
fn asks_rarely() -> Value {
    json!({ "agent": {
        "configuration": { "poll_period": "3600s" },
        "gitops": {
            "poll_period": "3600s", "project_info_cache_ttl": "1s", "project_info_cache_error_ttl": "1s",
        },
    } })
}

/// Commits the configuration of the agent.
async fn configure(repository: &Repository, kas_yaml: &str) -> Result<()> {
    let work = repository.root().join("configuration");
    let folder = work.join(".gitlab/agents/agent-1");
    std::fs::create_dir_all(&folder)?;
    let entry = format!(
        "gitops: {{manifest_projects: [{{id: {PROJECT}, default_namespace: default, prune_propagation_policy: background}}]}}\n"
    );
    std::fs::write(folder.join("config.yaml"), entry)?;
    std::fs::write(folder.join("kas.yaml"), kas_yaml)?;
    git(&work, &["add", "--all"]).await?;
    git(&work, &["commit", "--quiet", "--message", "x"]).await?;
    let bare = repository.root().join(REPOSITORIES).join(relative_path(CONFIGURATION));
    git(&work, &["push", "--quiet", bare.to_str().context("a path in UTF-8")?, "main"]).await?;
    Ok(())
}

/// What must be true of every Gitaly.
async fn follows<G: Gitaly>() -> Result<()> {
    let it = World::<G>::start(2).await?;
    let first = it.pushed(&[("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))]).await?;
    it.synced(&first).await?;
    assert_eq!(it.value("a").await?.as_deref(), Some("1"));
    // Told to either replica, each push is found.
    let second = it.repository.push(&[("a.json", config_map("a", "2"))]).await?;
    it.told(1).await?;
    it.synced(&second).await?;
    assert_eq!((it.value("a").await?.as_deref(), it.value("b").await?), (Some("2"), None));
    it.check(1)
}

#[tokio::test]
async fn a_push_to_a_project_of_gitlab_becomes_objects() -> Result<()> {
    follows::<Small>().await
}

#[tokio::test]
async fn a_push_reaches_the_cluster_through_gitlabs_own_gitaly() -> Result<()> {
    follows::<Real>().await
}

#[tokio::test]
async fn a_project_that_may_not_be_read_any_more_keeps_its_objects() -> Result<()> {
    let it = World::<Small>::start(1).await?;
    let first = it.pushed(&[("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))]).await?;
    it.synced(&first).await?;

    it.gitlab.hide_project(PROJECT);
    let denied = |project: &ProjectSync| project.phase == "failed" && project.message.contains("may");
    it.until("denied", denied).await?;
    let second = it.pushed(&[("a.json", config_map("a", "2"))]).await?;
    // A planner that went on would have pruned within this time: it takes a tenth of it.
    sleep(Duration::from_secs(3)).await;
    it.until("still denied", denied).await?;
    assert_eq!((it.value("a").await?.as_deref(), it.value("b").await?.as_deref()), (Some("1"), Some("1")));
    let prune = control(&it.mesh, 0, Action::Prune).await;
    ensure!(prune.is_err(), "{prune:?}");
    it.check(0)?;

    // It may be read again, and a person does not wait for the next try. GitLab's refusal is known for a
    // second.
    it.gitlab.have_project(PROJECT, MANIFESTS);
    eventually("the project is opened again", async || {
        let answer = control(&it.mesh, 0, Action::Sync).await;
        let known = sync(&it.mesh, 0).await?;
        let is_opened = known.projects.first().is_some_and(|project| !denied(project));
        Ok(if is_opened { Ok(()) } else { Err((answer, known)) })
    })
    .await?;
    it.synced(&second).await?;
    assert_eq!((it.value("a").await?.as_deref(), it.value("b").await?), (Some("2"), None));
    it.check(1)
}

#[tokio::test]
async fn a_gitaly_that_is_away_changes_nothing_and_is_said() -> Result<()> {
    let it = World::<Small>::start(1).await?;
    let first = it.pushed(&[("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))]).await?;
    it.synced(&first).await?;
    it.gitaly.stop();
    let second = it.pushed(&[("a.json", config_map("a", "2"))]).await?;
    let away = |it: &ProjectSync| it.message.starts_with("repository cannot be read: UNAVAILABLE for ");
    let said = it.until("away", away).await?;
    assert_eq!(said.applied_commit, first);
    it.gitaly.restart().await?;
    it.synced(&second).await?;
    assert_eq!((it.value("a").await?.as_deref(), it.value("b").await?), (Some("2"), None));
    it.check(1)
}

#[tokio::test]
async fn the_bounds_of_an_agent_are_those_of_its_configuration_project() -> Result<()> {
    let it = World::<Small>::start(1).await?;
    let elsewhere = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x", "namespace": "kube-public" },
    });
    let first = it.pushed(&[("a.json", config_map("a", "1")), ("x.json", elsewhere.to_string())]).await?;
    let refused = |project: &ProjectSync| project.message.contains("outside the agent's namespaces");
    let failed = it.until("refused", |project| project.wanted_commit == first && refused(project)).await?;
    ensure!(failed.applied_commit.is_empty(), "{failed:?}");

    // Another commit of the configuration, which GitLab tells of.
    configure(&it.repository, "namespaces: [default, kube-public]\n").await?;
    let project = Project { id: CONFIGURATION, full_path: "group/project".to_owned() };
    let request = GitPushEventRequest { event: Some(GitPushEvent { project: Some(project) }) };
    let _: GitPushEventResponse = it.mesh.caller(0).await?.unary(PUSHED, &request).await?;
    it.synced(&first).await?;
    it.check(0)
}
