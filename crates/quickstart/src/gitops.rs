//! `cargo xtask quickstart --gitops`: from a commit to an object in the cluster of an agent.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use devkit::{
    report::{human, line},
    workspace::{Programs, find_program},
};
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::{
    Processes, QuickstartArgs, READY_WITHIN,
    agents::{self, AGENTS, NAMESPACE},
    deployment::Deployment,
    kasctl::Kasctl,
    kubernetes,
    replicas::{self, MANIFESTS, ReplicaSetup},
    report::Report,
    service::{Service, child_command},
    steps::{self, Shown},
};

/// How long something may take that kas does within a second on an idle machine.
const WITHIN: Duration = Duration::from_secs(60);
/// The time between two looks at the cluster.
const LOOK: Duration = Duration::from_millis(30);
/// The objects of the commit during which a replica is killed.
const MANY: usize = 400;
/// After this many of them, the replica is killed.
const KILL_AFTER: usize = 60;

/// The agent whose cluster follows the repository.
const AGENT: (&str, &str) = AGENTS[0];

// Nothing collects garbage beside the API server of the demonstration, so a deletion in the foreground would
// not end.
const CONFIG: &str = "gitops:
  manifest_projects:
  - id: demo/manifests
    default_namespace: default
    prune_propagation_policy: background
";
const KAS_YAML: &str =
    "# An edit by hand is noticed after this time. The default is 5m.\ngitops:\n  check: 2s\n";

/// The bare repository, and a folder with its files.
struct Repository {
    git: PathBuf,
    bare: PathBuf,
    work: PathBuf,
}

impl Repository {
    async fn create(dir: &Path) -> Result<Self> {
        let git = find_program("git").context("git is not in PATH")?;
        let repository = Self { git, bare: dir.join("manifests.git"), work: dir.join("manifests") };
        repository.git(dir, &["init", "--quiet", "--bare", "--initial-branch=main", "manifests.git"]).await?;
        repository.git(dir, &["init", "--quiet", "--initial-branch=main", "manifests"]).await?;
        Ok(repository)
    }

    async fn git(&self, folder: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = child_command(&self.git);
        command
            .current_dir(folder)
            .args(["-c", "user.name=Demo", "-c", "user.email=demo@example.com", "-c", "commit.gpgsign=false"])
            .args(arguments)
            // The person's own settings and hooks do not matter here.
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let done = command.output().await.context("cannot run git")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "git {}: {}", arguments.join(" "), said.trim());
        Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned())
    }

    fn write(&self, name: &str, content: &str) -> Result<()> {
        fs::write(self.work.join(name), content).with_context(|| format!("cannot write {name}"))
    }

    /// Commits everything and pushes it. Returns the commit, and when it was pushed.
    async fn push(&self, subject: &str) -> Result<(String, Instant)> {
        self.git(&self.work, &["add", "--all"]).await?;
        self.git(&self.work, &["commit", "--quiet", "--message", subject]).await?;
        let bare = self.bare.to_str().context("the temporary folder is not UTF-8")?;
        self.git(&self.work, &["push", "--quiet", bare, "main"]).await?;
        let pushed = Instant::now();
        Ok((self.git(&self.work, &["rev-parse", "HEAD"]).await?, pushed))
    }
}

/// What `kasctl gitops -o json` prints.
#[derive(Debug, Deserialize)]
struct Sync {
    replica: String,
    waits: String,
    projects: Vec<Project>,
}

#[derive(Debug, Deserialize)]
struct Project {
    phase: String,
    message: String,
    applied_commit: String,
    wanted_commit: String,
    objects: u64,
    drift: u64,
}

async fn state(kasctl: &Kasctl) -> Result<Sync> {
    let text = kasctl.answer(&["gitops", AGENT.0, "-o", "json"]).await?;
    serde_json::from_str(&text).context("kasctl gitops printed no state")
}

/// Looks at the project until `condition` holds.
async fn until(kasctl: &Kasctl, what: &str, condition: impl Fn(&Project) -> bool) -> Result<(Sync, Instant)> {
    let deadline = Instant::now() + WITHIN;
    loop {
        let last = match state(kasctl).await {
            Ok(sync) if sync.projects.first().is_some_and(&condition) => return Ok((sync, Instant::now())),
            Ok(sync) => format!("{sync:?}"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(Instant::now() < deadline, "{what} did not happen within {WITHIN:?}: {last}");
        sleep(LOOK).await;
    }
}

/// Returns the value of a key of a ConfigMap, through kas. `None`: there is no such object.
async fn config_map(kasctl: &Kasctl, name: &str) -> Result<Option<String>> {
    let path = format!("/api/v1/namespaces/default/configmaps/{name}");
    let text = kasctl.answer(&["request", AGENT.0, "GET", &path]).await?;
    let object: serde_json::Value = serde_json::from_str(&text).context("no object")?;
    match object["kind"].as_str() {
        Some("ConfigMap") => Ok(Some(object["data"]["colour"].as_str().unwrap_or_default().to_owned())),
        _ if object["code"] == 404 => Ok(None),
        _ => bail!("the API server answered {text}"),
    }
}

/// Looks at a ConfigMap until it is as expected. Returns when it was.
async fn until_is(kasctl: &Kasctl, name: &str, expected: Option<&str>) -> Result<Instant> {
    let deadline = Instant::now() + WITHIN;
    loop {
        let now = config_map(kasctl, name).await;
        if now.as_ref().is_ok_and(|now| now.as_deref() == expected) {
            return Ok(Instant::now());
        }
        ensure!(Instant::now() < deadline, "{name} did not become {expected:?} within {WITHIN:?}: {now:?}");
        sleep(LOOK).await;
    }
}

fn manifest(name: &str, colour: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  colour: {colour}\n")
}

/// Runs all steps.
pub(super) async fn show(args: &QuickstartArgs, processes: &mut Processes) -> Result<Shown> {
    let mut report = Report::new(11);
    let style = report.style();
    line(style.bold("kas quickstart: from a commit to an object in a cluster behind a tunnel"));
    line("kas reads a bare repository and applies it through agentk to a real Kubernetes API server.\n");
    kubernetes::check()?;

    let (programs, _) = steps::build(&mut report, args).await?;
    let dir = processes.make_dir()?;

    let mut step = report.step("Start kube-apiserver and etcd");
    let kubeconfig = kubernetes::start(&programs, &dir, None, processes).await?;
    step.took();
    step.fact("cluster", "an API server without controllers and nodes");

    let mut step = report.step("Create a bare repository, an agent and its configuration");
    let repository = Repository::create(&dir).await?;
    let setup =
        ReplicaSetup::make(programs.path("kas")?, &dir, args.tracker)?.with_manifests(&repository.bare);
    let kasctl = agents::register(&programs, &setup, &dir, AGENTS).await?;
    let folder = dir.join("config/agents").join(AGENT.1);
    fs::create_dir_all(&folder).context("cannot create the folder of the configuration")?;
    fs::write(folder.join("config.yaml"), CONFIG).context("cannot write config.yaml")?;
    fs::write(folder.join("kas.yaml"), KAS_YAML).context("cannot write kas.yaml")?;
    step.took();
    step.fact("repository", repository.bare.display());
    step.fact("agent", format_args!("{} ({})", AGENT.0, AGENT.1));
    step.text(CONFIG);

    let mut step = report.step("Start three replicas of kas, and agentk");
    replicas::start(&setup, &mut processes.replicas).await?;
    let deployment = Deployment::new(setup, &kasctl, &processes.replicas);
    processes.agents.push(start_agent(&programs, &dir, &kubeconfig, &processes.replicas)?);
    let home = processes.guard(home(&deployment.kasctl[0])).await?;
    step.took();
    step.fact(
        "home",
        format_args!("{} plans for the agent", deployment.with_numbers(&format!("replica {home}"))),
    );
    let front = deployment.kasctl[0].clone();
    let mut problems = Vec::new();

    let mut step = report.step("Commit a manifest");
    repository.write("blue.yaml", &manifest("blue", "blue"))?;
    repository.write("green.yaml", &manifest("green", "green"))?;
    let (commit, pushed) = repository.push("Add blue and green").await?;
    let there = processes.guard(until_is(&front, "blue", Some("blue"))).await?;
    let (_, synced) = processes
        .guard(until(&front, "the first sync", |project| {
            project.applied_commit == commit && project.phase == "synced"
        }))
        .await?;
    step.took();
    step.fact("commit", &commit[..12]);
    step.fact("in cluster", format_args!("{} after the push, as kasctl sees it", human(there - pushed)));
    step.fact("synced", format_args!("{} after the push", human(synced - pushed)));

    let mut step = report.step("Change it by another commit");
    repository.write("blue.yaml", &manifest("blue", "navy"))?;
    let (_, pushed) = repository.push("Make blue darker").await?;
    let there = processes.guard(until_is(&front, "blue", Some("navy"))).await?;
    step.took();
    step.fact("in cluster", format_args!("{} after the push", human(there - pushed)));
    if there - pushed > Duration::from_secs(2) {
        problems.push(format!("a commit took {} to reach the cluster", human(there - pushed)));
    }

    let mut step = report.step("Edit the object by hand");
    processes.guard(until(&front, "the sync", |project| project.phase == "synced")).await?;
    let path = "/api/v1/namespaces/default/configmaps/blue";
    let patch = r#"{"data":{"colour":"red"}}"#;
    let content = "Content-Type: application/merge-patch+json";
    front.answer(&["request", "--fail", AGENT.0, "PATCH", path, "-H", content, "-d", patch]).await?;
    let edited = Instant::now();
    let back = processes.guard(until_is(&front, "blue", Some("navy"))).await?;
    let (seen, _) = processes.guard(until(&front, "the drift", |project| project.drift > 0)).await?;
    step.took();
    step.fact(
        "put back",
        format_args!("{} after the edit; kas.yaml says: check each 2s", human(back - edited)),
    );
    step.fact("drift", format_args!("{} object counted", seen.projects[0].drift));

    let mut step = report.step("Commit a manifest that cannot be read, and remove another one");
    repository.write("bad.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: [bad\n")?;
    fs::remove_file(repository.work.join("green.yaml")).context("cannot remove green.yaml")?;
    let (bad, _) = repository.push("Add a bad manifest").await?;
    let (failed, _) = processes
        .guard(until(&front, "the refusal", |project| {
            project.wanted_commit == bad && project.phase == "failed"
        }))
        .await?;
    let stays = config_map(&front, "green").await?;
    step.took();
    step.fact("refused", failed.projects[0].message.lines().next().unwrap_or_default());
    match stays.as_deref() {
        Some("green") => step.fact("unchanged", "green is not in the commit, and still in the cluster"),
        other => problems.push(format!("the bad commit changed green: {other:?}")),
    }

    let mut step = report.step("Correct it: what was removed is pruned");
    fs::remove_file(repository.work.join("bad.yaml")).context("cannot remove bad.yaml")?;
    let (_, pushed) = repository.push("Remove the bad manifest").await?;
    let gone = processes.guard(until_is(&front, "green", None)).await?;
    step.took();
    step.fact("pruned", format_args!("green is gone {} after the push", human(gone - pushed)));

    let mut step = report.step("Kill the replica that plans, in the middle of a sync");
    let killed = Box::pin(kill(&repository, &deployment, processes)).await?;
    step.took();
    step.text(&killed);

    let mut step = report.step("Ask what is there");
    let table =
        deployment.kasctl.iter().zip(&processes.replicas).find(|(_, replica)| replica.service.is_some());
    let (alive, _) = table.context("no replica runs")?;
    let text = alive.answer(&["gitops", AGENT.0]).await?;
    step.took();
    step.text(&text);
    if !args.once {
        line(format_args!(
            "\nThe repository is {}. Clone it, push to it, and look with\n  {} --address {} --secret-file {} gitops {} {MANIFESTS}\nPress Ctrl-C to stop.",
            repository.bare.display(),
            programs.path("kasctl")?.display(),
            alive.address(),
            alive.secret().display(),
            AGENT.0,
        ));
    }
    Ok(Shown { deployment, style, problems, teams: None })
}

/// Starts agentk, which connects to two of the replicas.
fn start_agent(
    programs: &Programs,
    dir: &Path,
    kubeconfig: &Path,
    replicas: &[replicas::Replica],
) -> Result<Service> {
    let kas = agents::addresses(replicas);
    let mut command = agents::agentk(programs.path("agentk")?, &kas, dir, AGENT.0, (NAMESPACE, "pod-1"));
    command.arg("--kubeconfig").arg(kubeconfig);
    Service::start("agentk", command, dir.join("agentk.log"))
}

/// Waits until a replica plans for the agent, and returns its name.
async fn home(kasctl: &Kasctl) -> Result<String> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        let last = match state(kasctl).await {
            Ok(sync) if !sync.replica.is_empty() && sync.waits.is_empty() && !sync.projects.is_empty() => {
                return Ok(sync.replica);
            }
            Ok(sync) => sync.waits,
            Err(error) => format!("{error:#}"),
        };
        ensure!(Instant::now() < deadline, "no replica plans after {READY_WITHIN:?}: {last}");
        sleep(LOOK).await;
    }
}

/// Commits many objects, kills the home of the agent while it applies them, and waits until all are there.
async fn kill(repository: &Repository, deployment: &Deployment, processes: &mut Processes) -> Result<String> {
    let all: Vec<String> = (0..MANY).map(|n| manifest(&format!("many-{n:03}"), "grey")).collect();
    repository.write("many.yaml", &all.join("---\n"))?;
    let before = state(&deployment.kasctl[0]).await?.replica;
    let home = deployment.names.iter().position(|name| *name == before);
    let home = home.with_context(|| format!("{before} is none of the replicas"))?;
    let (commit, pushed) = repository.push("Add many objects").await?;
    // Another replica is asked, since the home will not answer any more.
    let other = deployment.kasctl[usize::from(home == 0)].clone();
    let marker = format!("many-{KILL_AFTER:03}");
    processes.guard(until_is(&other, &marker, Some("grey"))).await?;
    let mut victim = processes.replicas[home].service.take().context("the home does not run")?;
    victim.kill()?;
    let killed = Instant::now();
    let _ = victim.ended().await;
    let last = format!("many-{:03}", MANY - 1);
    let was_there = config_map(&other, &last).await.ok().flatten().is_some();
    let (sync, synced) = processes
        .guard_all_but_replicas(until(&other, "the sync by another replica", |project| {
            project.applied_commit == commit && project.phase == "synced"
        }))
        .await?;
    ensure!(config_map(&other, &last).await?.is_some(), "{last} is missing");
    let names = |text: String| deployment.with_numbers(&text);
    Ok(format!(
        "{}\n{}\n{}",
        names(format!(
            "{} killed replica {before}, with {KILL_AFTER} of {MANY} objects applied{}",
            human(killed - pushed),
            if was_there { " (the last one, too: it was faster)" } else { "" }
        )),
        names(format!("{} replica {} has applied all of it", human(synced - pushed), sync.replica)),
        format_args!("{} objects in the inventory", sync.projects[0].objects),
    ))
}
