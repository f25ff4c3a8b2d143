//! What kas does with the repositories of GitLab: a real kas, the simulated GitLab, and a small Gitaly of
//! testkit over real repositories.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use prost::Message as _;
use proto::gitlab::agent::{
    configuration_project::rpc::{ListAgentConfigFilesRequest, ListAgentConfigFilesResponse},
    event::{GitPushEvent, Project},
    gitlab_access::rpc::HeaderExtra,
    gitops::rpc::{ObjectsToSynchronizeRequest, PathCf, objects_to_synchronize_response::Message, path_cf},
    grpctool::{HttpRequest, http_request, http_response},
    modserver::{GitalyAddress, Repository},
    notifications::rpc::{GitPushEventRequest, GitPushEventResponse},
    prototool,
};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agent14::{Agent14, Version},
    caller::Caller,
    gitaly::Small,
    gitlab::{GitLab, relative_path},
    kas::{Kas, Options, eventually, merge, token},
    mesh::{self, Mesh},
    process::soon,
};
use tonic::Code;

const PUSHED: &str = "/gitlab.agent.notifications.rpc.Notifications/GitPushEvent";
const LIST: &str = "/gitlab.agent.configuration_project.rpc.ConfigurationProject/ListAgentConfigFiles";
const SECRET: &str = "gitaly-token";
/// The configuration project of the agents.
const CONFIGURATION: i64 = 7;
/// A project with manifests.
const MANIFESTS: i64 = 9;

/// A GitLab with agents 1 and 2, and its Gitaly.
struct Setup {
    dir: TempDir,
    gitaly: Small,
    gitlab: GitLab,
}

fn git(at: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(at)
        .args(["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"])
        .args(arguments)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

impl Setup {
    async fn new() -> Result<Self> {
        let dir = TempDir::with_prefix("gitaly-")?;
        for project in [CONFIGURATION, MANIFESTS] {
            let bare = relative_path(project);
            fs::create_dir_all(dir.path().join(&bare))?;
            git(dir.path(), &["init", "-q", "--bare", "-b", "main", &bare])?;
            git(dir.path(), &["clone", "-q", &bare, &format!("tree-{project}")])?;
        }
        let gitaly = Small::start(dir.path(), Some(SECRET)).await?;
        let gitlab = GitLab::start().await?;
        for id in [1, 2] {
            gitlab.know(&token(id), id, &format!("agent-{id}"), CONFIGURATION);
        }
        gitlab.have_gitaly(gitaly.address(), SECRET);
        gitlab.have_project("group/manifests", MANIFESTS);
        Ok(Self { dir, gitaly, gitlab })
    }

    async fn kas(&self, over: serde_json::Value) -> Result<Kas> {
        let mut config = self.gitlab.config();
        merge(&mut config, over);
        Kas::start_with(Options { config, ..Options::default() }).await
    }

    /// Pushes a commit with these files, and returns it.
    fn push(&self, project: i64, files: &[(&str, &str)]) -> Result<String> {
        let tree = self.dir.path().join(format!("tree-{project}"));
        for (path, content) in files {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().context("a folder")?)?;
            fs::write(path, content)?;
        }
        git(&tree, &["add", "-A"])?;
        git(&tree, &["commit", "-q", "--allow-empty", "-m", "x"])?;
        git(&tree, &["push", "-q", "-f", "origin", "HEAD:main"])?;
        git(&tree, &["rev-parse", "HEAD"])
    }
}

/// Tells kas of a push, as GitLab does.
async fn told(caller: &Caller, id: i64, full_path: &str) -> Result<()> {
    let project = Project { id, full_path: full_path.to_owned() };
    let event = GitPushEvent { project: Some(project) };
    let _: GitPushEventResponse = caller.unary(PUSHED, &GitPushEventRequest { event: Some(event) }).await?;
    Ok(())
}

/// Returns the commit of the next configuration.
async fn commit(agent: &mut Agent14) -> Result<String> {
    Ok(agent.next_configuration().await?.context("the stream ended")?.commit_id)
}

fn manifests(commit: &str) -> ObjectsToSynchronizeRequest {
    ObjectsToSynchronizeRequest {
        project_id: "group/manifests".to_owned(),
        commit_id: commit.to_owned(),
        paths: vec![PathCf { path: Some(path_cf::Path::Glob("/**/*.yaml".to_owned())) }],
        r#ref: None,
    }
}

#[tokio::test]
async fn the_configuration_comes_from_the_project_and_a_push_event_brings_the_next() -> Result<()> {
    let setup = Setup::new().await?;
    let file = ".gitlab/agents/agent-1/config.yaml";
    let first = setup.push(CONFIGURATION, &[(file, "observability: {logging: {level: debug}}")])?;
    let kas = setup.kas(json!({ "agent": { "configuration": { "poll_period": "3600s" } } })).await?;
    let mut agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let got = agent.next_configuration().await?.context("the stream ended")?;
    assert_eq!(got.commit_id, first);
    let configuration = got.configuration.context("a configuration")?;
    assert_eq!((configuration.agent_id, configuration.project_id), (1, CONFIGURATION));
    assert!(configuration.observability.is_some());
    let seen = setup.gitaly.seen();
    for call in &seen {
        assert_eq!(call.headers["gitaly-feature-a"], "true", "{call:?}");
        assert_eq!(call.headers["x-gitlab-client-name"], "gitlab-kas");
        let repository = call.repository.as_ref().context("a repository")?;
        assert_eq!(repository.relative_path, relative_path(CONFIGURATION));
    }

    let second = setup.push(CONFIGURATION, &[(file, "x: 1")])?;
    told(&kas.caller().await?, CONFIGURATION, "group/project").await?;
    let status = agent.next_configuration().await.expect_err("the file is invalid");
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().starts_with("Config: failed to parse agent configuration: x: "), "{status}");
    // The agent has the first commit, and the next good one is another.
    let third = setup.push(CONFIGURATION, &[(file, "")])?;
    assert_ne!(second, third);
    agent.reopen_configuration(&first).await?;
    assert_eq!(commit(&mut agent).await?, third);
    Ok(())
}

#[tokio::test]
async fn many_agents_of_a_project_cost_one_check_and_one_read() -> Result<()> {
    let setup = Setup::new().await?;
    // Of a file that is not there, Gitaly is asked whether the commit is.
    let paths: Vec<_> = (1..20).map(|id| format!(".gitlab/agents/agent-{id}/config.yaml")).collect();
    let files: Vec<_> = paths.iter().map(|path| (&**path, "")).collect();
    setup.push(CONFIGURATION, &files)?;
    for id in 3..20 {
        setup.gitlab.know(&token(id), id, &format!("agent-{id}"), CONFIGURATION);
    }
    let kas = setup.kas(json!({ "agent": { "configuration": { "poll_period": "3600s" } } })).await?;
    let mut agents = Vec::new();
    for id in 1..20 {
        let mut agent = Agent14::start(kas.agent, &token(id), Version::Old).await?;
        commit(&mut agent).await?;
        agents.push(agent);
    }
    let calls = |method: &str| setup.gitaly.seen().iter().filter(|call| call.method == method).count();
    assert_eq!(calls("FindCommit"), 1);
    let before = calls("GetBlobs");
    let second = setup.push(CONFIGURATION, &files)?;
    told(&kas.caller().await?, CONFIGURATION, "group/project").await?;
    for agent in &mut agents {
        assert_eq!(commit(agent).await?, second);
    }
    assert_eq!((calls("FindCommit"), calls("GetBlobs")), (2, before + 1));
    Ok(())
}

#[tokio::test]
async fn another_token_of_gitaly_is_learned_from_gitlab_at_once() -> Result<()> {
    let setup = Setup::new().await?;
    let first = setup.push(CONFIGURATION, &[])?;
    setup.gitlab.have_gitaly(setup.gitaly.address(), "an old token");
    let kas = setup.kas(json!({ "agent": { "configuration": { "poll_period": "1s" } } })).await?;
    let mut agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    eventually("the token is refused", async || {
        let log = kas.process.log();
        Ok(if log.contains("gitaly refuses the token") { Ok(()) } else { Err(log) })
    })
    .await?;
    assert!(!kas.process.log().contains("an old token"));
    // GitLab's answer about the agent is valid for five minutes, but not for this.
    setup.gitlab.have_gitaly(setup.gitaly.address(), SECRET);
    assert_eq!(commit(&mut agent).await?, first);
    Ok(())
}

#[tokio::test]
async fn streams_stay_while_gitaly_is_away() -> Result<()> {
    let setup = Setup::new().await?;
    let first = setup.push(CONFIGURATION, &[])?;
    let kas = setup.kas(json!({ "agent": { "configuration": { "poll_period": "200ms" } } })).await?;
    let mut agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    assert_eq!(commit(&mut agent).await?, first);
    setup.gitaly.stop();
    let second = setup.push(CONFIGURATION, &[])?;
    eventually("kas notices", async || {
        let log = kas.process.log();
        Ok(if log.contains("a repository cannot be read") { Ok(()) } else { Err(log) })
    })
    .await?;
    setup.gitaly.restart().await?;
    assert_eq!(commit(&mut agent).await?, second);
    Ok(())
}

#[tokio::test]
async fn a_push_event_reaches_every_replica() -> Result<()> {
    let setup = Setup::new().await?;
    let first = setup.push(CONFIGURATION, &[])?;
    let options = mesh::Options { replicas: 2, start: false, ..mesh::Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    let mut config = setup.gitlab.config();
    merge(&mut config, json!({ "agent": { "configuration": { "poll_period": "3600s" } } }));
    mesh.add_config(config);
    mesh.start_replicas(&[0, 1]).await?;
    let mut agents = Vec::new();
    for (replica, id) in [(0, 1), (1, 2)] {
        let mut agent = Agent14::start(mesh.agents(replica), &token(id), Version::Old).await?;
        assert_eq!(commit(&mut agent).await?, first);
        agents.push(agent);
    }
    let second = setup.push(CONFIGURATION, &[])?;
    told(&mesh.caller(0).await?, CONFIGURATION, "group/project").await?;
    for agent in &mut agents {
        assert_eq!(commit(agent).await?, second);
    }
    Ok(())
}

#[tokio::test]
async fn the_files_of_a_project_are_listed() -> Result<()> {
    let setup = Setup::new().await?;
    setup.push(
        CONFIGURATION,
        &[
            (".gitlab/agents/b/config.yaml", ""),
            (".gitlab/agents/a/config.yaml", ""),
            (".gitlab/agents/a/other.yaml", ""),
            (".gitlab/agents/-a/config.yaml", ""),
            ("a/config.yaml", ""),
        ],
    )?;
    let kas = setup.kas(json!({})).await?;
    let caller = kas.caller().await?;
    let request = |project: i64, token: &str| ListAgentConfigFilesRequest {
        repository: Some(Repository {
            storage_name: "default".to_owned(),
            relative_path: relative_path(project),
            gl_repository: format!("project-{project}"),
            gl_project_path: "group/project".to_owned(),
            ..Repository::default()
        }),
        gitaly_address: Some(GitalyAddress {
            address: setup.gitaly.address().to_owned(),
            token: token.to_owned(),
            ..GitalyAddress::default()
        }),
        default_branch: String::new(),
    };
    let listed: ListAgentConfigFilesResponse = caller.unary(LIST, &request(CONFIGURATION, SECRET)).await?;
    let names: Vec<_> = listed.config_files.iter().map(|file| (&*file.agent_name, &*file.name)).collect();
    assert_eq!(names, [("a", ".gitlab/agents/a/config.yaml"), ("b", ".gitlab/agents/b/config.yaml")]);
    // Without commits.
    let listed: ListAgentConfigFilesResponse = caller.unary(LIST, &request(MANIFESTS, SECRET)).await?;
    assert_eq!(listed.config_files, []);
    let error = caller.unary::<ListAgentConfigFilesResponse>(LIST, &request(CONFIGURATION, "wrong")).await;
    let error = error.expect_err("the token is wrong");
    assert_eq!(error.to_string(), "UNAVAILABLE: Unavailable");
    Ok(())
}

#[tokio::test]
async fn manifests_of_a_project_end_with_the_permission() -> Result<()> {
    let setup = Setup::new().await?;
    let first = setup.push(MANIFESTS, &[("a.yaml", "a: 1"), ("b/c.yaml", "c: 1")])?;
    let over = json!({ "agent": { "gitops": {
        "poll_period": "3600s", "project_info_cache_ttl": "1s", "project_info_cache_error_ttl": "1s",
    } } });
    let kas = setup.kas(over).await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let set = async |commit: &str| -> Result<(String, i64, Vec<String>)> {
        let mut stream = agent.objects(manifests(commit)).await?;
        let (mut header, mut files) = (None, Vec::new());
        while let Some(message) = soon("a message", stream.message()).await? {
            match message.message.context("a member")? {
                Message::Header(found) => header = Some(found),
                Message::Object(object) => files.push(object.source),
                Message::Trailer(_) => {
                    let header = header.context("a header")?;
                    return Ok((header.commit_id, header.project_id, files));
                }
            }
        }
        anyhow::bail!("no trailer")
    };
    let files = vec!["a.yaml".to_owned(), "b/c.yaml".to_owned()];
    assert_eq!(set("").await?, (first.clone(), MANIFESTS, files.clone()));
    let blobs = |gitaly: &Small| gitaly.seen().iter().filter(|call| call.method == "GetBlobs").count();
    let before = blobs(&setup.gitaly);
    assert_eq!(set("").await?.0, first);
    assert_eq!(blobs(&setup.gitaly), before, "the files are known");
    let (second, waiting) = {
        let waiting = set(&first);
        let second = setup.push(MANIFESTS, &[("a.yaml", "a: 2")])?;
        told(&kas.caller().await?, MANIFESTS, "group/manifests").await?;
        (second, waiting.await?)
    };
    assert_eq!(waiting, (second.clone(), MANIFESTS, files));

    let mut stream = agent.objects(manifests(&second)).await?;
    setup.gitlab.hide_project("group/manifests");
    let ended = soon("it ends", stream.message()).await.expect_err("no permission");
    assert_eq!((ended.code(), ended.message()), (Code::PermissionDenied, "forbidden"));
    Ok(())
}

#[tokio::test]
async fn flux_is_told_of_pushes_to_its_projects() -> Result<()> {
    let setup = Setup::new().await?;
    setup.gitlab.have_project("group/other", 10);
    let kas = setup.kas(json!({})).await?;
    let caller = kas.caller().await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Recent).await?;
    let mut stream = agent.reconcile(&["group/manifests", "group/hidden"]).await?;
    for (id, path) in [(10, "group/other"), (11, "group/hidden"), (MANIFESTS, "group/manifests")] {
        told(&caller, id, path).await?;
    }
    let got = soon("a message", stream.message()).await?.context("the stream ended")?;
    assert_eq!(got.project.context("a project")?.id, "group/manifests");
    let asked: Vec<_> = setup.gitlab.requests().iter().map(|seen| seen.target.clone()).collect();
    let about = |path: &str| asked.iter().filter(|target| target.ends_with(path)).count();
    assert_eq!((about("id=group%2Fmanifests"), about("id=group%2Fother")), (1, 0), "{asked:?}");
    Ok(())
}

/// Returns the messages of a request of a module.
fn module(name: &str, path: &str, body: &[u8]) -> Vec<HttpRequest> {
    let extra = HeaderExtra { module_name: name.to_owned() };
    let values = |value: &str| prototool::Values { value: vec![value.to_owned()] };
    let header = http_request::Header {
        request: Some(prototool::HttpRequest {
            method: "POST".to_owned(),
            url_path: path.to_owned(),
            header: [
                ("Content-Type".to_owned(), values("application/json")),
                ("Gitlab-Kas-Api-Request".to_owned(), values("forged")),
                ("Cookie".to_owned(), values("a=b")),
            ]
            .into(),
            query: [("q".to_owned(), values("a b"))].into(),
        }),
        extra: Some(prost_types::Any {
            type_url: "type.googleapis.com/gitlab.agent.gitlab_access.rpc.HeaderExtra".to_owned(),
            value: extra.encode_to_vec(),
        }),
        content_length: Some(body.len() as i64),
        ..http_request::Header::default()
    };
    let data = body
        .chunks(32 * 1024)
        .map(|chunk| http_request::Message::Data(http_request::Data { data: chunk.to_vec().into() }));
    std::iter::once(http_request::Message::Header(header))
        .chain(data)
        .chain([http_request::Message::Trailer(http_request::Trailer {})])
        .map(|message| HttpRequest { message: Some(message) })
        .collect()
}

#[tokio::test]
async fn requests_of_modules_reach_gitlab_in_the_name_of_the_agent() -> Result<()> {
    let setup = Setup::new().await?;
    let kas = setup.kas(json!({})).await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let body = "x".repeat(100_000);
    let mut stream = agent.module(module("cilium_alert", "/a b", body.as_bytes())).await?;
    let (mut status, mut got, mut is_complete) = (0, Vec::new(), false);
    while let Some(message) = soon("a message", stream.message()).await? {
        match message.message.context("a member")? {
            http_response::Message::Header(header) => {
                status = header.response.context("a response")?.status_code;
            }
            http_response::Message::Data(data) => {
                ensure!(data.data.len() <= 32 * 1024);
                got.extend_from_slice(&data.data);
            }
            http_response::Message::Trailer(_) => is_complete = true,
            http_response::Message::UpgradeData(_) => anyhow::bail!("no upgrade"),
        }
    }
    assert_eq!((status, got.len(), is_complete), (201, body.len(), true));
    let seen = setup.gitlab.requests();
    let seen = seen.iter().find(|seen| seen.target.contains("/modules/")).context("a request")?;
    assert_eq!((&*seen.method, seen.body.len()), ("POST", body.len()));
    assert_eq!(seen.target, "/api/v4/internal/kubernetes/modules/cilium_alert/a%20b?q=a+b");
    assert_eq!(seen.header("authorization"), Some(&*format!("Bearer {}", token(1))));
    assert_eq!((seen.header("cookie"), seen.header("content-type")), (None, Some("application/json")));
    assert!(seen.header("user-agent").is_some_and(|agent| agent.starts_with("gitlab-kas/")));
    seen.check_signature(setup.gitlab.secret())?;

    for (messages, code) in [
        (module("../x", "/", b""), Code::InvalidArgument),
        (module("a", "/../b", b""), Code::InvalidArgument),
        (module("a", "/b", b"x")[1..].to_vec(), Code::Unavailable),
    ] {
        let refused = match agent.module(messages).await {
            Err(status) => status,
            Ok(mut stream) => stream.message().await.expect_err("it is refused"),
        };
        assert_eq!(refused.code(), code, "{refused}");
    }
    Ok(())
}
