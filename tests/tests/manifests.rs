//! Manifests of a repository on this host, for agents that apply them themselves: a real kas, and an agent
//! like GitLab's.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use proto::gitlab::agent::{
    agentcfg::{GitRefCf, git_ref_cf::Ref},
    gitops::rpc::{
        ObjectsToSynchronizeRequest, ObjectsToSynchronizeResponse, PathCf,
        objects_to_synchronize_response::{Header, Message},
        path_cf,
    },
};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agent14::{Agent14, Version},
    kas::{Kas, token},
    process::soon,
};
use tonic::{Code, Streaming};

/// A bare repository, and a clone of it to change it.
struct Repository(TempDir);

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

impl Repository {
    fn new() -> Result<Self> {
        let dir = TempDir::with_prefix("repository-")?;
        git(dir.path(), &["init", "-q", "--bare", "-b", "main", "bare.git"])?;
        git(dir.path(), &["clone", "-q", "bare.git", "tree"])?;
        Ok(Self(dir))
    }

    /// Pushes a commit with these files to a branch, and returns it.
    fn push(&self, branch: &str, files: &[(&str, &str)]) -> Result<String> {
        let tree = self.0.path().join("tree");
        for (path, content) in files {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().context("a folder")?)?;
            fs::write(path, content)?;
        }
        git(&tree, &["add", "-A"])?;
        git(&tree, &["commit", "-q", "--allow-empty", "-m", "x"])?;
        git(&tree, &["push", "-q", "-f", "origin", &format!("HEAD:refs/heads/{branch}")])?;
        git(&tree, &["rev-parse", "HEAD"])
    }

    /// Returns the configuration of a kas that has this repository for agent 1.
    fn config(&self) -> Value {
        let path = self.0.path().join("bare.git");
        json!({ "repositories": [{ "name": "group/local", "id": 77, "path": path, "agents": "id=1" }] })
    }
}

fn request(commit: &str, globs: &[&str]) -> ObjectsToSynchronizeRequest {
    let path = |glob: &&str| PathCf { path: Some(path_cf::Path::Glob((*glob).to_owned())) };
    ObjectsToSynchronizeRequest {
        project_id: "group/local".to_owned(),
        commit_id: commit.to_owned(),
        paths: globs.iter().map(path).collect(),
        r#ref: None,
    }
}

/// A whole set.
#[derive(Debug, Default, PartialEq)]
struct Set {
    header: Header,
    /// Path and content of each file, and the number of its messages.
    files: Vec<(String, Vec<u8>, usize)>,
}

async fn message(
    stream: &mut Streaming<ObjectsToSynchronizeResponse>,
) -> Result<Option<Message>, tonic::Status> {
    let message = soon("a message comes", stream.message()).await?;
    Ok(message.map(|message| message.message.expect("a member")))
}

/// Reads a set, which must be complete.
async fn set(stream: &mut Streaming<ObjectsToSynchronizeResponse>) -> Result<Set> {
    let mut set = Set::default();
    match message(stream).await? {
        Some(Message::Header(header)) => set.header = header,
        other => anyhow::bail!("no header: {other:?}"),
    }
    loop {
        match message(stream).await?.context("no trailer")? {
            Message::Object(object) => match set.files.last_mut() {
                Some((path, data, parts)) if *path == object.source => {
                    data.extend_from_slice(&object.data);
                    *parts += 1;
                }
                _ => set.files.push((object.source, object.data.to_vec(), 1)),
            },
            Message::Trailer(_) => break,
            Message::Header(_) => anyhow::bail!("a second header"),
        }
    }
    ensure!(message(stream).await?.is_none(), "a message after the trailer");
    Ok(set)
}

async fn status(agent: &Agent14, request: ObjectsToSynchronizeRequest) -> tonic::Status {
    let mut stream = match agent.objects(request).await {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    loop {
        match message(&mut stream).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended with OK"),
            Err(status) => return status,
        }
    }
}

#[tokio::test]
async fn an_agent_gets_the_whole_set_and_again_after_each_commit() -> Result<()> {
    let repository = Repository::new()?;
    let large = "x".repeat(300 * 1024);
    let first = repository.push(
        "main",
        &[("m/a.yaml", "a: 1"), ("m/sub/b.yaml", &large), ("m/empty.yaml", ""), ("other", "no")],
    )?;
    let kas = Kas::start_with_config(repository.config()).await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let mut stream = agent.objects(request("", &["/m/**/*.yaml"])).await?;
    let got = set(&mut stream).await?;
    assert_eq!(got.header, Header { commit_id: first.clone(), project_id: 77 });
    let files: Vec<_> = got.files.iter().map(|(path, data, parts)| (&**path, data.len(), *parts)).collect();
    // In parts of at most 128 KiB.
    assert_eq!(files, [("m/a.yaml", 4, 1), ("m/empty.yaml", 0, 1), ("m/sub/b.yaml", 300 * 1024, 3)]);
    assert_eq!(got.files[2].1, large.as_bytes());

    // Nothing is sent for a commit that the agent has.
    let mut stream = agent.objects(request(&first, &["/m/**/*.yaml"])).await?;
    let second = repository.push("main", &[("m/a.yaml", "a: 2")])?;
    let got = set(&mut stream).await?;
    assert_eq!(got.header.commit_id, second);
    assert_eq!(got.files[0], ("m/a.yaml".to_owned(), b"a: 2".to_vec(), 1));
    Ok(())
}

#[tokio::test]
async fn refs_name_branches_tags_and_commits() -> Result<()> {
    let repository = Repository::new()?;
    let main = repository.push("main", &[("a", "main")])?;
    let review = repository.push("review/1", &[("a", "review")])?;
    let tree = repository.0.path().join("tree");
    git(&tree, &["tag", "-a", "-m", "x", "v1", &main])?;
    git(&tree, &["push", "-q", "origin", "v1"])?;
    let kas = Kas::start_with_config(repository.config()).await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Recent).await?;
    for (reference, expected) in [
        (Ref::Branch("review/1".to_owned()), &review),
        (Ref::Tag("v1".to_owned()), &main),
        (Ref::Commit(review.clone()), &review),
    ] {
        let of = ObjectsToSynchronizeRequest {
            r#ref: Some(GitRefCf { r#ref: Some(reference.clone()) }),
            ..request("", &["*"])
        };
        let got = set(&mut agent.objects(of).await?).await?;
        assert_eq!(&got.header.commit_id, expected, "{reference:?}");
    }
    let wrong = ObjectsToSynchronizeRequest {
        r#ref: Some(GitRefCf { r#ref: Some(Ref::Branch("a~1".to_owned())) }),
        ..request("", &["*"])
    };
    assert_eq!(status(&agent, wrong).await.code(), Code::InvalidArgument);
    Ok(())
}

#[tokio::test]
async fn statuses_and_texts_are_those_of_14_1() -> Result<()> {
    const FAILED: &str = "GitOps: failed to get objects to synchronize: manifest file: ";
    let repository = Repository::new()?;
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    repository.push("main", &[("a", "12345678901"), ("b", "1"), ("lfs/p", lfs)])?;
    let mut config = repository.config();
    config["agent"]["gitops"] = json!({
        "max_manifest_file_size": 200, "max_total_manifest_file_size": 200,
        "max_number_of_paths": 2, "max_number_of_files": 2,
    });
    let kas = Kas::start_with_config(config).await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    for (globs, code, text) in [
        (
            &["a", "b", "c"][..],
            Code::InvalidArgument,
            "maximum number of GitOps paths per manifest project is 2, but 3 was requested".to_owned(),
        ),
        (
            &["*", "lfs/*"],
            Code::FailedPrecondition,
            format!("{FAILED}maximum number of files limit reached: 2"),
        ),
        (&["lfs/*"], Code::FailedPrecondition, format!("{FAILED}FileIsLfsPointer: lfs/p")),
    ] {
        let status = status(&agent, request("", globs)).await;
        assert_eq!((status.code(), status.message()), (code, &*text), "{globs:?}");
    }
    let malformed = status(&agent, request("", &["[a"])).await;
    assert_eq!(malformed.code(), Code::FailedPrecondition);
    assert!(malformed.message().starts_with(&format!("{FAILED}glob [a match failed: ")), "{malformed}");

    // Agent 2 is not listed, and nobody has the other project.
    let second = Agent14::start(kas.agent, &token(2), Version::Old).await?;
    let other = ObjectsToSynchronizeRequest { project_id: "group/other".to_owned(), ..request("", &["a"]) };
    for status in [status(&second, request("", &["a"])).await, status(&agent, other).await] {
        assert_eq!((status.code(), status.message()), (Code::PermissionDenied, "forbidden"));
    }
    Ok(())
}

#[tokio::test]
async fn a_waiting_call_ends_with_its_token() -> Result<()> {
    let repository = Repository::new()?;
    let commit = repository.push("main", &[("a", "1")])?;
    let kas = Kas::start_with_config(repository.config()).await?;
    let agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let mut stream = agent.objects(request(&commit, &["*"])).await?;
    kas.set_agents(&[testkit::kas::AgentEntry::new(2)])?;
    let ended = message(&mut stream).await.expect_err("it has no token any more");
    assert_eq!(ended.code(), Code::Unauthenticated);
    Ok(())
}

#[tokio::test]
async fn an_agent_for_which_somebody_else_applies_sees_no_projects_and_gets_no_manifests() -> Result<()> {
    let repository = Repository::new()?;
    let config =
        "gitops: {manifest_projects: [{id: group/manifests}]}\nobservability: {logging: {level: debug}}";
    let first =
        repository.push("main", &[(".gitlab/agents/agent-1/config.yaml", config), ("a.yaml", "a: 1")])?;
    for (applier, refused) in [
        ("auto", None),
        ("agent", None),
        ("kas", Some("GitOps: kas applies for this agent")),
        ("none", Some("GitOps: nobody applies: agent.gitops.applier of kas is none")),
    ] {
        let bare = repository.0.path().join("bare.git");
        let kas = Kas::start_with_config(json!({
            "agent": { "gitops": { "applier": applier }, "configuration": { "git": bare } },
            "repositories": [{ "name": "group/manifests", "id": 42, "path": bare, "agents": "all" }],
        }))
        .await?;
        let mut agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
        let got = agent.next_configuration().await?.context("the stream ended")?;
        let configuration = got.configuration.context("a configuration")?;
        assert_eq!(configuration.gitops.is_some(), refused.is_none(), "{applier}");
        assert!(configuration.observability.is_some() && configuration.agent_id == 1, "{configuration:?}");
        // With and without that section it is another version.
        assert!(got.commit_id.starts_with(&first), "{}", got.commit_id);
        assert_eq!(got.commit_id == first, refused.is_none());

        let request = ObjectsToSynchronizeRequest {
            project_id: "group/manifests".to_owned(),
            paths: vec![PathCf { path: Some(path_cf::Path::Glob("/*.yaml".to_owned())) }],
            ..ObjectsToSynchronizeRequest::default()
        };
        let mut stream = match agent.objects(request).await {
            Ok(stream) => stream,
            Err(status) => {
                assert_eq!((status.code(), Some(status.message())), (Code::FailedPrecondition, refused));
                continue;
            }
        };
        match (soon("an answer", stream.message()).await, refused) {
            (Ok(first), None) => assert!(first.is_some(), "{applier}"),
            (Err(status), Some(refused)) => {
                assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, refused));
            }
            (answer, _) => anyhow::bail!("{applier}: {answer:?}"),
        }
    }
    Ok(())
}
