//! A bare repository of manifests, the configuration of an agent that names it, and what its head was when.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Stdio,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::kubernetes::{
    Kubernetes,
    applies::{self, Applies},
    deletions::{self, Deletions, HeadSpan},
};

/// The agent whose configuration names the repository, unless a test says another one.
pub const AGENT: i64 = 1;
/// The name of the repository as a manifest project.
pub const PROJECT: &str = "group/manifests";
/// Its number.
const NUMBER: i64 = 42;

/// A bare repository, its files, and what it said when.
#[derive(Debug)]
pub struct Repository {
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
///
/// # Errors
/// If there is no Git, or it fails: with what it says.
pub async fn git(folder: &Path, arguments: &[&str]) -> Result<String> {
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
    /// Creates an empty one, and the configuration of [`AGENT`] beside it.
    ///
    /// # Errors
    /// Those of the system, and of Git.
    pub async fn new(entry: &str, kas_yaml: &str) -> Result<Self> {
        Self::of_agent(AGENT, entry, kas_yaml).await
    }

    /// Creates an empty one, and the configuration of an agent beside it.
    ///
    /// # Errors
    /// Those of the system, and of Git.
    pub async fn of_agent(agent: i64, entry: &str, kas_yaml: &str) -> Result<Self> {
        let repository = Self::at("bare.git").await?;
        repository.configure_agent(agent, entry)?;
        repository.write_kas_yaml(agent, kas_yaml)?;
        Ok(repository)
    }

    /// Writes `kas.yaml` of an agent.
    ///
    /// # Errors
    /// Those of the system.
    pub fn write_kas_yaml(&self, agent: i64, content: &str) -> Result<()> {
        let folder = self.config().join(format!("agents/agent-{agent}"));
        std::fs::create_dir_all(&folder)?;
        let new = folder.join("new-kas");
        std::fs::write(&new, content)?;
        Ok(std::fs::rename(new, folder.join("kas.yaml"))?)
    }

    /// Creates an empty one at this place in its folder, without a configuration.
    ///
    /// # Errors
    /// Those of the system, and of Git.
    pub async fn at(bare: &str) -> Result<Self> {
        let dir = TempDir::with_prefix("gitops-test-")?;
        let root = dir.path();
        let place = root.join(bare);
        std::fs::create_dir_all(&place)?;
        git(root, &["init", "--quiet", "--bare", "--initial-branch=main", bare]).await?;
        git(root, &["init", "--quiet", "--initial-branch=main", "work"]).await?;
        Ok(Self { bare: place, dir, heads: Mutex::default() })
    }

    /// Returns the folder of everything.
    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    /// Writes the entry of the manifest project into the configuration of [`AGENT`]; empty: without one.
    ///
    /// # Errors
    /// Those of the system.
    pub fn configure(&self, entry: &str) -> Result<()> {
        self.configure_agent(AGENT, entry)
    }

    /// As [`configure`](Self::configure), for an agent.
    ///
    /// # Errors
    /// Those of the system.
    pub fn configure_agent(&self, agent: i64, entry: &str) -> Result<()> {
        let folder = self.config().join(format!("agents/agent-{agent}"));
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

    /// Returns the folder of the files of the head.
    pub fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// Returns what kas needs to know of it.
    pub fn kas_config(&self) -> Value {
        json!({
            "agent": { "configuration": { "folder": self.config() } },
            "repositories": [
                { "name": PROJECT, "id": NUMBER, "path": self.bare, "agents": "all" },
            ],
        })
    }

    /// Makes the files of the head these, pushes, and returns the commit. A file whose content is JSON counts
    /// for the checkers.
    ///
    /// # Errors
    /// Those of the system, and of Git.
    pub async fn push(&self, files: &[(&str, String)]) -> Result<String> {
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

    /// Returns how many commits were pushed: the number of the next one, for the annotation
    /// [`COMMIT`](applies::COMMIT) of its objects.
    pub fn commits(&self) -> usize {
        self.heads.lock().len()
    }
}

impl Repository {
    /// Checks every deletion of every planner against the audit log. `inventory` is the id.
    ///
    /// # Errors
    /// There is no audit log.
    pub fn deletions(&self, kubernetes: &Kubernetes, inventory: &str) -> Result<Deletions> {
        self.deletions_by(kubernetes, "kas/gitops", inventory)
    }

    /// As [`deletions`](Self::deletions), of clients whose `User-Agent` begins with `planner`.
    ///
    /// # Errors
    /// There is no audit log.
    pub fn deletions_by(&self, kubernetes: &Kubernetes, planner: &str, inventory: &str) -> Result<Deletions> {
        let log = std::fs::read_to_string(kubernetes.audit_log()).context("no audit log")?;
        Ok(deletions::check(&log, planner, inventory, &self.heads.lock()))
    }

    /// Checks every apply of every planner against the audit log. `inventory` is the id.
    ///
    /// # Errors
    /// There is no audit log.
    pub fn applies(&self, kubernetes: &Kubernetes, inventory: &str) -> Result<Applies> {
        let log = std::fs::read_to_string(kubernetes.audit_log()).context("no audit log")?;
        Ok(applies::check(&log, "kas/gitops", inventory, &self.heads.lock()))
    }

    /// Returns the id of the inventory of an agent and the repository.
    pub fn inventory(agent: i64) -> String {
        format!("{agent}-{NUMBER}")
    }
}

/// A `ConfigMap` as a file.
pub fn config_map(name: &str, value: &str) -> String {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "v": value } })
        .to_string()
}
