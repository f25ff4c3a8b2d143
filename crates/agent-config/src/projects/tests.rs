//! Configuration projects in bare repositories on disk.

use std::{future::poll_fn, path::PathBuf, pin::Pin, process::Command};

use git_sources::{Opened, Projects as Places, Repositories};
use http_body::Body as _;
use ids::Agent;
use kas_config::{ConfigurationSource, Source as Configured};
use prost::Message as _;
use proto::gitlab::agent::agent_configuration::rpc::ConfigurationResponse;
use repository::{Repository, bare::Bare};
use tempfile::TempDir;
use tokio::{sync::watch, task::JoinHandle};

use super::*;
use crate::{ConfigBody, NotKnown, Shown};

/// Project 7 is at this path.
#[derive(Debug)]
struct Disk(PathBuf, watch::Sender<u64>);

impl Places for Disk {
    fn open(&self, project: i64, _: Option<&Opened>) -> Result<Opened, Error> {
        assert_eq!(project, 7);
        Ok((Arc::new(Bare::new(&self.0, None)) as Arc<dyn Repository>).into())
    }

    fn moved(&self) -> watch::Receiver<u64> {
        self.1.subscribe()
    }

    fn ask_again(&self, _: i64) {}
}

struct Setup {
    dir: TempDir,
    repositories: Arc<Repositories>,
    configs: Arc<AgentConfigs>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn git(at: &std::path::Path, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .arg("-C")
        .arg(at)
        .args(["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"])
        .args(arguments)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl Setup {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        git(dir.path(), &["init", "-q", "--bare", "-b", "main", "bare.git"]);
        git(dir.path(), &["clone", "-q", "bare.git", "tree"]);
        let disk = Disk(dir.path().join("bare.git"), watch::Sender::new(0));
        let repositories = Repositories::new(Some(Arc::new(disk)), &[], 200.0);
        let source = ConfigurationSource {
            source: Configured::None,
            // Nothing is found by a regular check in these tests.
            poll_period: Duration::from_secs(3600),
            max_file_size: 1000,
        };
        let configs = AgentConfigs::new(&source, &repositories, None);
        let tasks = [tokio::spawn(Arc::clone(&repositories).run()), tokio::spawn(Arc::clone(&configs).run())];
        Self { dir, repositories, configs, tasks }
    }

    /// Pushes a commit in which the agents have these files.
    fn push(&self, files: &[(&str, &str)]) -> String {
        let tree = self.dir.path().join("tree");
        for (name, content) in files {
            let folder = tree.join(PREFIX).join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("config.yaml"), content).unwrap();
        }
        git(&tree, &["add", "-A"]);
        git(&tree, &["commit", "-q", "--allow-empty", "-m", "x"]);
        git(&tree, &["push", "-q", "origin", "HEAD:main"]);
        git(&tree, &["rev-parse", "HEAD"])
    }

    fn subscribe(&self, id: i64, commit: &str) -> ConfigBody<()> {
        let agent = Agent { id: AgentId::new(id).unwrap(), name: format!("a{id}").into(), project_id: 7 };
        ConfigBody::new(self.configs.subscribe(&Arc::new(agent), commit, Shown::All), ())
    }

    fn told(&self) {
        self.repositories.pushed(7, "group/project");
    }
}

/// Returns the next configuration, or the message of the status that ends the stream.
async fn next(body: &mut ConfigBody<()>) -> Result<ConfigurationResponse, String> {
    let frame =
        tokio::time::timeout(Duration::from_secs(20), poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)));
    let frame = frame.await.expect("in time").unwrap().unwrap();
    match frame.into_data() {
        Ok(data) => Ok(ConfigurationResponse::decode(&data[grpc::PREFIX_LEN..]).unwrap()),
        Err(frame) => {
            Err(grpc::Status::from_headers(frame.trailers_ref().unwrap()).unwrap().message().to_owned())
        }
    }
}

#[tokio::test]
async fn each_agent_gets_its_file_and_a_push_brings_the_next_commit() {
    let s = Setup::new();
    let first = s.push(&[("a1", "observability: {logging: {level: debug}}"), ("a2", "")]);
    let (mut one, mut two, mut three) = (s.subscribe(1, ""), s.subscribe(2, ""), s.subscribe(3, ""));
    let got = next(&mut one).await.unwrap();
    assert_eq!(got.commit_id, first);
    let configuration = got.configuration.unwrap();
    assert_eq!((configuration.agent_id, configuration.project_id), (1, 7));
    assert!(configuration.observability.is_some());
    for body in [&mut two, &mut three] {
        let got = next(body).await.unwrap();
        assert_eq!((got.commit_id, got.configuration.unwrap().observability), (first.clone(), None));
    }
    let second = s.push(&[("a2", "x: 1")]);
    s.told();
    assert_eq!(next(&mut one).await.unwrap().commit_id, second);
    let refused = next(&mut two).await.unwrap_err();
    assert!(refused.starts_with("Config: failed to parse agent configuration: x: "), "{refused}");
}

#[tokio::test]
async fn kas_yaml_is_read_at_the_same_commit_and_the_last_good_one_stays() {
    let s = Setup::new();
    let kas_yaml = |content: &str| {
        let folder = s.dir.path().join("tree").join(PREFIX).join("a1");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("kas.yaml"), content).unwrap();
    };
    let agent =
        |id: i64| Agent { id: AgentId::new(id).unwrap(), name: format!("a{id}").into(), project_id: 7 };
    kas_yaml("environments: [production]");
    s.push(&[("a1", "")]);
    let (mut one, mut two) = (s.subscribe(1, ""), s.subscribe(2, ""));
    next(&mut one).await.unwrap();
    next(&mut two).await.unwrap();
    let environments = |id| {
        let state = s.configs.kas_yaml(&agent(id)).unwrap();
        let names = state.good.unwrap().environments.iter().map(ToString::to_string).collect::<Vec<_>>();
        (names, state.flaw)
    };
    assert_eq!(environments(1), (vec!["production".to_owned()], None));
    assert_eq!(environments(2), (Vec::new(), None), "without a file, the defaults");
    assert_eq!(s.configs.kas_yaml(&agent(3)).err(), Some(NotKnown::NotHere));
    kas_yaml("environment: [staging]");
    s.push(&[]);
    s.told();
    next(&mut one).await.unwrap();
    let (names, flaw) = environments(1);
    assert_eq!(names, ["production"]);
    assert!(flaw.unwrap().starts_with("environment"), "the key is named");
    kas_yaml("environments: ['review/*']");
    s.push(&[]);
    s.told();
    next(&mut one).await.unwrap();
    assert_eq!(environments(1), (vec!["review/*".to_owned()], None));

    // A key that names no project of the configuration is told, and is no error.
    let warning = || s.configs.kas_yaml(&agent(1)).unwrap().warning;
    assert_eq!(warning(), None);
    let as_x = "{as: system:serviceaccount:shop:x}";
    kas_yaml(&format!("gitops: {{projects: {{group/a: {as_x}, group/b: {as_x}}}}}"));
    s.push(&[("a1", "gitops: {manifest_projects: [{id: group/a}]}")]);
    s.told();
    next(&mut one).await.unwrap();
    let said = warning().unwrap();
    assert!(said.starts_with("gitops.projects.group/b: no manifest project"), "{said}");
    s.push(&[("a1", "gitops: {manifest_projects: [{id: group/a}, {id: group/b}]}")]);
    s.told();
    next(&mut one).await.unwrap();
    assert_eq!(warning(), None);
}

#[tokio::test]
async fn an_agent_gets_its_configuration_again_when_somebody_else_is_to_apply() {
    let s = Setup::new();
    let commit = s.push(&[("a1", "gitops: {manifest_projects: [{id: group/a}]}"), ("a2", "")]);
    let subscribe = |id, commit: &str, shown| {
        let agent = Agent { id: AgentId::new(id).unwrap(), name: format!("a{id}").into(), project_id: 7 };
        ConfigBody::new(s.configs.subscribe(&Arc::new(agent), commit, shown), ())
    };
    let mut stream = subscribe(1, "", Shown::WithoutGitops);
    let cut = next(&mut stream).await.unwrap();
    assert!(cut.configuration.unwrap().gitops.is_none());
    assert!(cut.commit_id.starts_with(&commit), "{}", cut.commit_id);
    // kas is started again with another applier.
    let whole = next(&mut subscribe(1, &cut.commit_id, Shown::All)).await.unwrap();
    assert!(whole.configuration.unwrap().gitops.is_some());
    assert_eq!(whole.commit_id, commit);
    let again = next(&mut subscribe(1, &commit, Shown::WithoutGitops)).await.unwrap();
    assert_eq!(again.commit_id, cut.commit_id);
    // Nothing is sent to those that have it, or where it makes no difference.
    next(&mut subscribe(2, "", Shown::WithoutGitops)).await.unwrap();
    let mut same = subscribe(1, &cut.commit_id, Shown::WithoutGitops);
    let mut other = subscribe(2, &commit, Shown::WithoutGitops);
    s.push(&[("a2", "observability: {logging: {level: debug}}")]);
    s.told();
    let next_same = next(&mut same).await.unwrap();
    let next_other = next(&mut other).await.unwrap();
    assert_ne!(next_same.commit_id, cut.commit_id);
    assert!(next_other.configuration.unwrap().observability.is_some());
}

#[tokio::test]
async fn a_project_that_came_with_a_wrong_kas_yaml_is_not_applied() {
    let s = Setup::new();
    let kas_yaml = |content: &str| {
        let folder = s.dir.path().join("tree").join(PREFIX).join("a1");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("kas.yaml"), content).unwrap();
    };
    let agent = Agent { id: AgentId::new(1).unwrap(), name: "a1".into(), project_id: 7 };
    let of = |projects: &str| format!("gitops: {{manifest_projects: [{projects}]}}");
    let applied = || {
        let (projects, _) = s.configs.manifests(&agent).unwrap();
        projects.into_iter().map(|project| project.id).collect::<Vec<_>>()
    };
    kas_yaml("namespaces: [shop]");
    s.push(&[("a1", &of("{id: g/old}"))]);
    let mut one = s.subscribe(1, "");
    next(&mut one).await.unwrap();
    assert_eq!(applied(), ["g/old"]);
    // Its author meant to bind the new project, too.
    kas_yaml("namespaces: [shop]\ngitops: {project: {}}");
    s.push(&[("a1", &of("{id: g/old}, {id: g/new}"))]);
    s.told();
    next(&mut one).await.unwrap();
    assert_eq!(applied(), ["g/old"]);
    s.push(&[("a1", &of("{id: g/new}"))]);
    s.told();
    next(&mut one).await.unwrap();
    assert_eq!(applied(), [""; 0]);
    kas_yaml("namespaces: [shop]");
    s.push(&[]);
    s.told();
    next(&mut one).await.unwrap();
    assert_eq!(applied(), ["g/new"]);
}

#[tokio::test]
async fn an_agent_is_never_sent_back_to_an_older_commit() {
    let s = Setup::new();
    let first = s.push(&[("a1", "")]);
    let mut one = s.subscribe(1, "");
    assert_eq!(next(&mut one).await.unwrap().commit_id, first);
    // Another replica has sent the second commit to agent 1, and this one does not know of it.
    let second = s.push(&[]);
    drop(one);
    let mut again = s.subscribe(1, &second);
    let mut other = s.subscribe(1, "");
    // What an agent without a commit gets first may be old. The check that agent 1 causes serves it too.
    if next(&mut other).await.unwrap().commit_id == first {
        assert_eq!(next(&mut other).await.unwrap().commit_id, second);
    }
    let third = s.push(&[]);
    s.told();
    assert_eq!(next(&mut again).await.unwrap().commit_id, third);
}

#[tokio::test]
async fn an_empty_repository_gives_defaults_and_files_have_a_limit() {
    let s = Setup::new();
    let mut one = s.subscribe(1, "");
    assert_eq!(next(&mut one).await.unwrap().commit_id, crate::NO_COMMIT);
    let large = format!("# {}", "x".repeat(1000));
    s.push(&[("a1", &large)]);
    s.told();
    assert_eq!(
        next(&mut one).await.unwrap_err(),
        "Config: agent configuration file: FileTooBig: TreeEntry: file is too big: .gitlab/agents/a1/config.yaml: the \
         limit is 1000 bytes"
    );
}

#[tokio::test]
async fn a_project_without_agents_is_forgotten() {
    let s = Setup::new();
    s.push(&[]);
    let Source::Projects(projects) = &s.configs.source else { panic!("projects") };
    let mut one = s.subscribe(1, "");
    next(&mut one).await.unwrap();
    assert_eq!(projects.state.lock().projects.len(), 1);
    drop(one);
    let forgotten = async {
        while !projects.state.lock().projects.is_empty() || !s.configs.watched().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), forgotten).await.expect("it is forgotten");
    // And it is there again for the next agent.
    next(&mut s.subscribe(1, "")).await.unwrap();
}
