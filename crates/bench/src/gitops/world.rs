//! GitLab, Gitaly, kas, agents and an API server.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use proto::{
    gitlab::agent::{
        event::{GitPushEvent, Project},
        notifications::rpc::{GitPushEventRequest, GitPushEventResponse},
    },
    kas::api::v1::{GetSyncRequest, GetSyncResponse, ProjectSync},
};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agent14::{Agent14, Version},
    agentk::Agentk,
    bench::echo,
    gitaly::Small,
    gitlab::{GitLab, relative_path},
    kas::{Kas, Options, merge, token},
    kubernetes::{Kubernetes, Reader},
};
use tokio::time::{Instant, sleep, timeout};

use crate::times::Times;

const PUSHED: &str = "/gitlab.agent.notifications.rpc.Notifications/GitPushEvent";
const GET_SYNC: &str = "/kas.api.v1.KasApi/GetSync";
const SECRET: &str = "gitaly-token";

/// A project of GitLab.
#[derive(Clone, Copy)]
struct Place {
    id: i64,
    path: &'static str,
}

const CONFIGURATION: Place = Place { id: 7, path: "group/configuration" };
const SMALL: Place = Place { id: 9, path: "group/small" };
const LARGE: Place = Place { id: 10, path: "group/large" };
const MANY: Place = Place { id: 11, path: "group/many" };

/// The agent with ten objects, which also echoes.
const SMALL_AGENT: i64 = 1;
/// The agent with the large project.
pub(super) const LARGE_AGENT: i64 = 2;
/// An agent that only gets its configuration.
const CONFIGURED_AGENT: i64 = 3;
/// The first of those whose memory is measured.
const MANY_FROM: i64 = 100;

/// The time between two checks for drift in the large project.
const CHECK: Duration = Duration::from_secs(5);
/// Objects of a small commit.
const OBJECTS: u32 = 10;
/// Objects of each agent whose memory is measured.
const OBJECTS_OF_MANY: u32 = 100;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(3);
/// Time limit of a step.
const STEP: Duration = Duration::from_secs(600);
/// The time in which memory that is used only while objects are applied is freed.
const SETTLE: Duration = Duration::from_secs(5);

/// All of it. Dropping it ends it.
pub(super) struct World {
    dir: TempDir,
    gitlab: GitLab,
    _gitaly: Small,
    kubernetes: Kubernetes,
    reader: Reader,
    kas: Kas,
    agents: Vec<Agentk>,
    configured: Agent14,
}

fn git(at: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(at)
        .args(["-c", "user.name=b", "-c", "user.email=b@example.com", "-c", "commit.gpgsign=false"])
        .args(arguments)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .context("cannot run git")?;
    ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// ConfigMaps as a file.
fn config_maps(count: u32, value: &str) -> String {
    let padding = "x".repeat(200);
    let object = |n: u32| {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": { "name": format!("bench-{n:05}"), "labels": { "bench": "yes" } },
            "data": { "value": value, "padding": padding },
        })
        .to_string()
    };
    (0..count).map(object).collect::<Vec<_>>().join("\n---\n")
}

fn entry(place: Place, namespace: &str) -> String {
    format!(
        "gitops: {{manifest_projects: [{{id: {}, default_namespace: {namespace}, prune_propagation_policy: background}}]}}\n",
        place.path
    )
}

impl World {
    pub(super) async fn start() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("kas-bench-gitops-").tempdir()?;
        for place in [CONFIGURATION, SMALL, LARGE, MANY] {
            let bare = relative_path(place.id);
            fs::create_dir_all(dir.path().join(&bare))?;
            git(dir.path(), &["init", "-q", "--bare", "-b", "main", &bare])?;
            git(dir.path(), &["clone", "-q", &bare, &format!("tree-{}", place.id)])?;
        }
        let gitaly = Small::start(dir.path(), Some(SECRET)).await?;
        let gitlab = GitLab::start().await?;
        gitlab.have_gitaly(gitaly.address(), SECRET);
        for place in [SMALL, LARGE, MANY] {
            gitlab.have_project(place.path, place.id);
        }
        for agent in [SMALL_AGENT, LARGE_AGENT, CONFIGURED_AGENT] {
            gitlab.know(&token(agent), agent, &format!("agent-{agent}"), CONFIGURATION.id);
        }
        let kubernetes = Kubernetes::start().await?;
        kubernetes.ensure_namespace("small").await?;
        kubernetes.ensure_namespace("large").await?;
        let reader = kubernetes.reader().await?;
        let tree = dir.path().join(format!("tree-{}", CONFIGURATION.id));
        let check = format!("gitops: {{check: {}s}}\n", CHECK.as_secs());
        write(&tree, ".gitlab/agents/agent-1/config.yaml", &entry(SMALL, "small"))?;
        write(&tree, ".gitlab/agents/agent-2/config.yaml", &entry(LARGE, "large"))?;
        write(&tree, ".gitlab/agents/agent-2/kas.yaml", &check)?;
        commit(&tree)?;

        let mut config = gitlab.config();
        merge(&mut config, json!({ "agent": { "gitops": { "max_number_of_files": 1000 } } }));
        let kas = Kas::start_with(Options { config, ..Options::default() }).await?;
        let mut configured = Agent14::start(kas.agent, &token(CONFIGURED_AGENT), Version::Recent).await?;
        configured.next_configuration().await?.context("the stream ended")?;
        let agents = Vec::new();
        let mut world = Self { dir, gitlab, _gitaly: gitaly, kubernetes, reader, kas, agents, configured };
        for agent in [SMALL_AGENT, LARGE_AGENT] {
            world.agentk(agent).await?;
        }
        Ok(world)
    }

    async fn agentk(&mut self, agent: i64) -> Result<()> {
        let kubeconfig = self.kubernetes.admin_kubeconfig();
        let kubeconfig = kubeconfig.to_str().context("a path in UTF-8")?;
        let url = format!("grpc://{}", self.kas.agent);
        let agentk = Agentk::start_at_urls(&url, &token(agent), &["--kubeconfig", kubeconfig]).await?;
        agentk.connected().await?;
        self.agents.push(agentk);
        Ok(())
    }

    fn tree(&self, place: Place) -> PathBuf {
        self.dir.path().join(format!("tree-{}", place.id))
    }

    /// Tells kas of a push, as GitLab does.
    async fn told(&self, place: Place) -> Result<()> {
        let project = Project { id: place.id, full_path: place.path.to_owned() };
        let request = GitPushEventRequest { event: Some(GitPushEvent { project: Some(project) }) };
        let _: GitPushEventResponse = self.kas.caller().await?.unary(PUSHED, &request).await?;
        Ok(())
    }

    /// Pushes ten objects. Returns the time until all of them have their new value.
    pub(super) async fn push_small(&self, round: u32) -> Result<Duration> {
        let (tree, value) = (self.tree(SMALL), format!("round-{round}"));
        write(&tree, "all.yaml", &config_maps(OBJECTS, &value))?;
        git(&tree, &["add", "-A"])?;
        git(&tree, &["commit", "-q", "-m", "x"])?;
        let begun = Instant::now();
        git(&tree, &["push", "-q", "origin", "HEAD:main"])?;
        self.told(SMALL).await?;
        let path = "/api/v1/namespaces/small/configmaps?labelSelector=bench%3Dyes&resourceVersion=0";
        loop {
            let list = self.reader.get(path).await?;
            let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
            let new = items.iter().filter(|item| item["data"]["value"] == value.as_str()).count();
            if new == OBJECTS as usize {
                return Ok(begun.elapsed());
            }
            ensure!(
                begun.elapsed() < STEP,
                "{new} of {OBJECTS} objects are new: {:?}",
                self.state(SMALL_AGENT).await
            );
            sleep(LOOK).await;
        }
    }

    /// Pushes a configuration. Returns the time from the event until an agent has it.
    pub(super) async fn configure(&mut self, round: u32) -> Result<Duration> {
        let tree = self.tree(CONFIGURATION);
        let content = format!("# {round}\nobservability: {{logging: {{level: info}}}}\n");
        write(&tree, &format!(".gitlab/agents/agent-{CONFIGURED_AGENT}/config.yaml"), &content)?;
        let commit = commit(&tree)?;
        let begun = Instant::now();
        self.told(CONFIGURATION).await?;
        loop {
            let next = timeout(STEP, self.configured.next_configuration()).await;
            if next.context("no configuration")??.context("the stream ended")?.commit_id == commit {
                return Ok(begun.elapsed());
            }
        }
    }

    /// Pushes the large project. Returns the commit.
    pub(super) async fn push_large(&self, objects: u32) -> Result<String> {
        let tree = self.tree(LARGE);
        write(&tree, "all.yaml", &config_maps(objects, "1"))?;
        let commit = commit(&tree)?;
        self.told(LARGE).await?;
        Ok(commit)
    }

    async fn state(&self, agent: i64) -> Result<Option<ProjectSync>> {
        let request = GetSyncRequest { agent_id: agent, ..GetSyncRequest::default() };
        let answer: GetSyncResponse = self.kas.caller().await?.unary(GET_SYNC, &request).await?;
        Ok(answer.projects.into_iter().next())
    }

    /// Waits until a commit is applied for an agent.
    pub(super) async fn synced(&self, agent: i64, commit: &str) -> Result<()> {
        let deadline = Instant::now() + STEP;
        loop {
            let state = self.state(agent).await?;
            if state.as_ref().is_some_and(|it| it.phase == "synced" && it.applied_commit == commit) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "agent {agent} is not synced: {state:?}");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Measures calls through kas, one after the other, while something happens.
    pub(super) async fn calls(&self, during: impl Future<Output = Result<()>>) -> Result<Times> {
        let (mut caller, mut since) = (self.kas.caller().await?, Instant::now());
        let mut all = Vec::new();
        let mut during = std::pin::pin!(during);
        loop {
            // A token is valid for a minute.
            if since.elapsed() > Duration::from_secs(30) {
                (caller, since) = (self.kas.caller().await?, Instant::now());
            }
            let call = async {
                let begun = Instant::now();
                echo(&caller, SMALL_AGENT, vec![b'x'; 100]).await?;
                anyhow::Ok(begun.elapsed())
            };
            tokio::select! {
                done = &mut during => {
                    done?;
                    let mut times = Times::default();
                    times.extend(all);
                    return Ok(times);
                }
                time = call => all.push(time?),
            }
        }
    }

    /// Measures a check for drift of the large project: from the moment when it is due until the next one is
    /// planned.
    pub(super) async fn check(&self) -> Result<Duration> {
        let mut longest = Duration::ZERO;
        for _ in 0..3 {
            let (due, left) = loop {
                let left = self.next(LARGE_AGENT).await?;
                if left > CHECK / 2 {
                    break (Instant::now() + left, left);
                }
                sleep(LOOK).await;
            };
            sleep(left).await;
            let deadline = Instant::now() + STEP;
            while self.next(LARGE_AGENT).await? < CHECK / 4 {
                ensure!(Instant::now() < deadline, "a check does not end");
                sleep(LOOK).await;
            }
            longest = longest.max(due.elapsed());
        }
        let state = self.state(LARGE_AGENT).await?;
        ensure!(state.as_ref().is_some_and(|it| it.drift == 0), "nobody has changed anything: {state:?}");
        Ok(longest)
    }

    /// The time until the project is checked again; zero while it is being checked.
    async fn next(&self, agent: i64) -> Result<Duration> {
        let state = self.state(agent).await?.context("the project is known")?;
        Ok(Duration::from_millis(state.next_ms.unwrap_or_default()))
    }

    /// Measures the memory of kas in KiB, with this many more agents and with their objects applied.
    pub(super) async fn memory(&mut self, count: u32) -> Result<[u64; 2]> {
        let all: Vec<i64> = (MANY_FROM..).take(count as usize).collect();
        for agent in &all {
            self.gitlab.know(&token(*agent), *agent, &format!("agent-{agent}"), CONFIGURATION.id);
            self.kubernetes.ensure_namespace(&format!("many-{agent}")).await?;
        }
        let tree = self.tree(MANY);
        write(&tree, "all.yaml", &config_maps(OBJECTS_OF_MANY, "1"))?;
        let wanted = commit(&tree)?;
        for agent in &all {
            self.agentk(*agent).await?;
        }
        sleep(SETTLE).await;
        let before = self.kas.process.usage()?.resident_kib;
        let tree = self.tree(CONFIGURATION);
        for agent in &all {
            let path = format!(".gitlab/agents/agent-{agent}/config.yaml");
            write(&tree, &path, &entry(MANY, &format!("many-{agent}")))?;
        }
        commit(&tree)?;
        self.told(CONFIGURATION).await?;
        for agent in &all {
            self.synced(*agent, &wanted).await?;
        }
        sleep(SETTLE).await;
        Ok([before, self.kas.process.usage()?.resident_kib])
    }
}

fn write(tree: &Path, path: &str, content: &str) -> Result<()> {
    let path = tree.join(path);
    fs::create_dir_all(path.parent().context("a folder")?)?;
    Ok(fs::write(path, content)?)
}

/// Commits everything, pushes, and returns the commit.
fn commit(tree: &Path) -> Result<String> {
    git(tree, &["add", "-A"])?;
    git(tree, &["commit", "-q", "--allow-empty", "-m", "x"])?;
    git(tree, &["push", "-q", "origin", "HEAD:main"])?;
    git(tree, &["rev-parse", "HEAD"])
}
