//! Methods that kas itself serves: configuration for agents; lists, watches, pods, health and reflection for
//! callers.

use std::{path::Path, process::Command, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Outcome};
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use proto::{
    gitlab::agent::{
        agent_tracker::rpc::{
            GetConnectedAgentsRequest, GetConnectedAgentsResponse,
            get_connected_agents_request::Request as By,
        },
        agentcfg::{AgentConfiguration, LoggingLevelEnum},
    },
    kas::api::v1::{
        ConnectedAgentInfo, ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse,
        ConnectedAgentsForProjectRequest, ConnectedAgentsForProjectResponse, GetPodsRequest, GetPodsResponse,
        WatchConnectedAgentsRequest, WatchConnectedAgentsResponse, watch_connected_agents_response::Event,
    },
};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agent14::{Agent14, Version},
    agentk::Agentk,
    caller::{Caller, frame},
    handler::path,
    kas::{AgentEntry, Kas, Options, replace, token},
    link::{Next, Stream},
    raw_agent::{Configuration, GET_CONFIGURATION, Kind, RawAgent},
    scenario::Scenario,
};
use tokio::time::Instant;

/// A changed file must reach the agent within this time.
const AT_ONCE: Duration = Duration::from_secs(12);

const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";
const FOR_PROJECT: &str = "/kas.api.v1.KasApi/ConnectedAgentsForProject";
const WATCH: &str = "/kas.api.v1.KasApi/WatchConnectedAgents";
const GET_PODS: &str = "/kas.api.v1.KasApi/GetPods";
const TRACKER: &str = "/gitlab.agent.agent_tracker.rpc.AgentTracker/GetConnectedAgents";

fn level(configuration: Option<AgentConfiguration>) -> LoggingLevelEnum {
    let logging = configuration.and_then(|c| c.observability).and_then(|o| o.logging);
    logging.map_or(LoggingLevelEnum::Info, |logging| logging.level())
}

fn yaml(level: &str) -> String {
    format!("observability:\n  logging:\n    level: {level}\n")
}

fn put(folder: &Path, agent: i64, content: &str) -> Result<()> {
    let file = folder.join(format!("agents/agent-{agent}/config.yaml"));
    std::fs::create_dir_all(file.parent().context("a file has a folder")?)?;
    replace(&file, content.as_bytes())
}

/// Waits for the next configuration, which must come within [`AT_ONCE`] and have this level. Returns its
/// commit.
async fn pushed(configuration: &mut Configuration, expected: LoggingLevelEnum) -> Result<String> {
    let begun = Instant::now();
    let got = configuration.next().await?;
    ensure!(begun.elapsed() < AT_ONCE, "it took {:?}", begun.elapsed());
    ensure!(level(got.configuration.clone()) == expected, "{got:?}");
    Ok(got.commit_id)
}

#[tokio::test]
async fn configuration_of_a_folder_is_pushed_at_the_start_and_at_each_change() -> Result<()> {
    let folder = TempDir::new()?;
    put(folder.path(), 1, &yaml("debug"))?;
    let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
    let kas = Kas::start_with_config(config).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let other = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let mut configuration = agent.configuration("").await?;
    let first = configuration.next().await?;
    let content = first.configuration.context("a configuration")?;
    assert_eq!((content.agent_id, content.project_id), (1, 1));
    assert_eq!(level(Some(content)), LoggingLevelEnum::Debug);
    assert!(!first.commit_id.is_empty());
    // Without a file: the defaults.
    let mut defaults = other.configuration("").await?;
    assert_eq!(level(defaults.next().await?.configuration), LoggingLevelEnum::Info);

    put(folder.path(), 1, &yaml("warn"))?;
    let second = pushed(&mut configuration, LoggingLevelEnum::Warn).await?;
    assert_ne!(second, first.commit_id);
    put(folder.path(), 2, &yaml("error"))?;
    pushed(&mut defaults, LoggingLevelEnum::Error).await?;
    std::fs::remove_file(folder.path().join("agents/agent-1/config.yaml"))?;
    pushed(&mut configuration, LoggingLevelEnum::Info).await?;
    put(folder.path(), 1, &yaml("debug"))?;
    let again = pushed(&mut configuration, LoggingLevelEnum::Debug).await?;
    assert_eq!(again, first.commit_id, "the same content is the same version");
    // The log names the missing file each time: for one agent at the start, for the other when it was
    // removed.
    for agent in [1, 2] {
        let (name, file) = (format!("agent-{agent}"), format!("agents/agent-{agent}/config.yaml"));
        let path = folder.path().join(file).display().to_string();
        kas.process
            .logged("where a file was looked for", |line| {
                let told = line["message"] == "agent has no configuration file: it gets the defaults";
                (told && line["agent.name"] == *name && line["path"] == *path).then_some(())
            })
            .await?;
    }
    assert_eq!(kas.process.log().matches("agent has no configuration file").count(), 2);
    Ok(())
}

#[tokio::test]
async fn an_agent_with_the_current_commit_receives_only_later_changes() -> Result<()> {
    let folder = TempDir::new()?;
    put(folder.path(), 1, &yaml("debug"))?;
    let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
    let kas = Kas::start_with_config(config).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let commit = agent.configuration("").await?.next().await?.commit_id;
    let mut has_it = agent.configuration(&commit).await?;
    // If the first stream had been sent anything, it would have arrived before this later one.
    assert_eq!(agent.configuration("older").await?.next().await?.commit_id, commit);
    put(folder.path(), 1, &yaml("warn"))?;
    pushed(&mut has_it, LoggingLevelEnum::Warn).await?;
    // Rewriting the file without a change sends nothing: the next message is the next change.
    put(folder.path(), 1, &yaml("warn"))?;
    tokio::time::sleep(Duration::from_millis(700)).await;
    put(folder.path(), 1, &yaml("error"))?;
    pushed(&mut has_it, LoggingLevelEnum::Error).await?;
    Ok(())
}

#[tokio::test]
async fn invalid_configuration_ends_the_stream_with_failed_precondition_until_it_is_fixed() -> Result<()> {
    let folder = TempDir::new()?;
    put(folder.path(), 1, &yaml("debug"))?;
    let config = json!({ "agent": { "configuration": {
        "folder": folder.path(),
        "max_configuration_file_size": 1000,
    } } });
    let kas = Kas::start_with_config(config).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let too_big = format!("{}#{}", yaml("debug"), "x".repeat(1000));
    for (wrong, part) in [
        ("observability: [", ""),
        ("observability:\n  logging:\n    level: loud\n", "level"),
        (too_big.as_str(), "FileTooBig"),
    ] {
        let mut configuration = agent.configuration("").await?;
        configuration.next().await?;
        put(folder.path(), 1, wrong)?;
        let begun = Instant::now();
        let status = configuration.next().await.unwrap_err();
        assert!(begun.elapsed() < AT_ONCE);
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
        assert!(status.message().starts_with("Config: "), "{status}");
        assert!(status.message().contains(part), "{status}");
        // New streams fail in the same way; tunnels are not affected.
        let status = agent.configuration("").await?.next().await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
        agent.tunnel().await?;
        put(folder.path(), 1, &yaml("debug"))?;
        testkit::kas::eventually("the mended file is served", async || {
            Ok(agent.configuration("").await?.next().await)
        })
        .await?;
    }
    Ok(())
}

fn git(folder: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .args(["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main"])
        .args(arguments)
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .context("git is needed")?;
    ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Commits a configuration of agent 1, or its removal, and pushes it. Returns the commit.
fn commit(work: &Path, content: Option<&str>) -> Result<String> {
    let file = work.join(".gitlab/agents/agent-1/config.yaml");
    std::fs::create_dir_all(file.parent().context("a file has a folder")?)?;
    match content {
        Some(content) => std::fs::write(&file, content)?,
        None => std::fs::remove_file(&file)?,
    }
    git(work, &["add", "-A"])?;
    git(work, &["commit", "-q", "--allow-empty", "-m", "change"])?;
    git(work, &["push", "-q", "origin", "HEAD:main"])?;
    git(work, &["rev-parse", "HEAD"])
}

#[tokio::test]
async fn configuration_of_a_repository_is_pushed_with_its_commit() -> Result<()> {
    let folder = TempDir::new()?;
    let (bare, work) = (folder.path().join("bare.git"), folder.path().join("work"));
    git(folder.path(), &["init", "-q", "--bare", "bare.git"])?;
    git(folder.path(), &["clone", "-q", "bare.git", "work"])?;
    let config = json!({ "agent": { "configuration": { "git": bare } } });
    let kas = Kas::start_with_config(config).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    // A repository without a commit is like one without the file: the agent gets the defaults.
    let mut configuration = agent.configuration("").await?;
    assert_eq!(pushed(&mut configuration, LoggingLevelEnum::Info).await?, "0".repeat(40));
    let first = commit(&work, Some(&yaml("debug")))?;
    assert_eq!(pushed(&mut configuration, LoggingLevelEnum::Debug).await?, first);
    let second = commit(&work, Some(&yaml("warn")))?;
    assert_eq!(pushed(&mut configuration, LoggingLevelEnum::Warn).await?, second);
    // Every commit is a new version, whatever it contains.
    let third = commit(&work, Some(&yaml("warn")))?;
    assert_eq!(pushed(&mut configuration, LoggingLevelEnum::Warn).await?, third);
    // Maintenance of the repository has no effect.
    git(&bare, &["gc", "-q"])?;
    let mut has_it = agent.configuration(&third).await?;
    let fourth = commit(&work, Some(&yaml("error")))?;
    assert_eq!(pushed(&mut configuration, LoggingLevelEnum::Error).await?, fourth);
    assert_eq!(pushed(&mut has_it, LoggingLevelEnum::Error).await?, fourth);
    let fifth = commit(&work, None)?;
    assert_eq!(pushed(&mut configuration, LoggingLevelEnum::Info).await?, fifth);
    let _ = commit(&work, Some("observability: 1"))?;
    let status = configuration.next().await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    Ok(())
}

#[tokio::test]
async fn gitlabs_agent_reads_what_is_pushed() -> Result<()> {
    let folder = TempDir::new()?;
    put(folder.path(), 1, &yaml("debug"))?;
    let config = json!({ "agent": { "configuration": { "folder": folder.path() } } });
    let kas = Kas::start_with_config(config).await?;
    let mut agent = Agent14::start(kas.agent, &token(1), Version::Old).await?;
    let first = agent.next_configuration().await?.context("a configuration")?;
    assert_eq!(level(first.configuration), LoggingLevelEnum::Debug);
    agent.reopen_configuration(&first.commit_id).await?;
    put(folder.path(), 1, &yaml("warn"))?;
    let second = agent.next_configuration().await?.context("a configuration")?;
    assert_eq!(level(second.configuration), LoggingLevelEnum::Warn);
    Ok(())
}

async fn by_id(caller: &Caller, agent_id: i64) -> Result<Vec<ConnectedAgentInfo>> {
    let answer: ConnectedAgentsByIdResponse =
        caller.unary(BY_ID, &ConnectedAgentsByIdRequest { agent_id }).await?;
    Ok(answer.agents)
}

async fn for_project(caller: &Caller, project_id: i64) -> Result<Vec<ConnectedAgentInfo>> {
    let request = ConnectedAgentsForProjectRequest { project_id };
    let answer: ConnectedAgentsForProjectResponse = caller.unary(FOR_PROJECT, &request).await?;
    Ok(answer.agents)
}

fn in_projects() -> Options {
    let agents = [(1, 10), (2, 10), (3, 20)]
        .map(|(id, project)| AgentEntry { project, ..AgentEntry::new(id) })
        .into_iter()
        .collect();
    Options { agents, ..Options::default() }
}

#[tokio::test]
async fn connected_agents_are_listed_by_project_by_id_and_with_the_request_of_14_1() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start_with(in_projects()).await?;
    assert_eq!(for_project(&caller, 10).await?, []);
    let one = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _one = one.configuration("").await?;
    let one_again = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let one_again_stream = one_again.configuration("").await?;
    let _two = Agent14::start(kas.agent, &token(2), Version::Old).await?;
    let three = RawAgent::connect(kas.agent, &token(3), Kind::Recent).await?;
    let _three = three.configuration("").await?;

    let listed = for_project(&caller, 10).await?;
    let mut ids: Vec<i64> = listed.iter().map(|info| info.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 1, 2]);
    let info = listed.iter().find(|info| info.id == 2).context("agent 2")?;
    assert_eq!((info.version.as_str(), info.commit.as_str()), ("v14.1.1", "abc"));
    assert_eq!((info.pod_namespace.as_str(), info.pod_name.as_str()), ("test-ns", "test-pod"));
    assert_eq!((info.project_id, info.name.as_str()), (10, "agent-2"));
    assert!(info.connection_id > 0);
    let since = testkit::caller::now() - info.connected_at.context("a time")?.seconds;
    assert!((0..60).contains(&since), "{since}");
    let address = info.kas_address.clone().context("an address")?;
    assert_eq!(format!("{}:{}", address.ip, address.port), kas.api.to_string());

    let of_one = by_id(&caller, 1).await?;
    assert_eq!(of_one.len(), 2);
    assert_ne!(of_one[0].connection_id, of_one[1].connection_id);
    assert_eq!(by_id(&caller, 3).await?.len(), 1);
    assert_eq!(by_id(&caller, 4).await?, []);
    assert_eq!(for_project(&caller, 30).await?, []);
    for (what, request) in [
        (BY_ID, ConnectedAgentsByIdRequest { agent_id: 0 }.encode_to_vec()),
        (BY_ID, ConnectedAgentsByIdRequest { agent_id: -1 }.encode_to_vec()),
        (FOR_PROJECT, ConnectedAgentsForProjectRequest { project_id: 0 }.encode_to_vec()),
        (TRACKER, Vec::new()),
    ] {
        let got = caller.call(caller.request(what), &[&request]).await?;
        assert_eq!(got.status.code(), Code::InvalidArgument, "{what}");
    }

    for (by, count) in
        [(By::ProjectId(10), 3), (By::AgentId(1), 2), (By::AgentId(0), 0), (By::ProjectId(30), 0)]
    {
        let request = GetConnectedAgentsRequest { request: Some(by) };
        let answer: GetConnectedAgentsResponse = caller.unary(TRACKER, &request).await?;
        assert_eq!(answer.agents.len(), count, "{by:?}");
        for agent in &answer.agents {
            let same = listed
                .iter()
                .find(|info| info.connection_id == agent.connection_id)
                .context("listed, too")?;
            assert_eq!((agent.agent_id, agent.project_id), (same.id, same.project_id));
            assert_eq!(agent.connected_at, same.connected_at);
            assert_eq!(agent.agent_meta.clone().context("meta")?.pod_name, same.pod_name);
        }
    }
    drop(one_again_stream);
    kas.metric_is("kas_connected_agents", 3.0).await?;
    assert_eq!(by_id(&caller, 1).await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn connection_id_of_our_agents_is_the_same_on_each_of_their_streams() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let stream = agent.configuration("").await?;
    let first = by_id(&caller, 1).await?[0].connection_id;
    drop(stream);
    kas.metric_is("kas_connected_agents", 0.0).await?;
    let _stream = agent.configuration("").await?;
    assert_eq!(by_id(&caller, 1).await?[0].connection_id, first);
    let other = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _other = other.configuration("").await?;
    assert!(by_id(&caller, 1).await?.iter().any(|info| info.connection_id != first));
    Ok(())
}

async fn watch(caller: &Caller, request: WatchConnectedAgentsRequest) -> Result<Stream> {
    let mut stream = caller.open(caller.request(WATCH)).await?;
    stream.send_message(&request).await.ok().context("sent")?;
    stream.half_close().ok().context("sent")?;
    Ok(stream)
}

async fn event(stream: &mut Stream) -> Event {
    match stream.next().await {
        Next::Message(message) => WatchConnectedAgentsResponse::decode(message)
            .expect("a response")
            .event
            .expect("an event is one of three"),
        other => panic!("{other:?} instead of an event"),
    }
}

#[tokio::test]
async fn watchers_receive_a_snapshot_then_every_change() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start_with(in_projects()).await?;
    let connect = async |agent: i64| -> Result<(RawAgent, Configuration)> {
        let agent = RawAgent::connect(kas.agent, &token(agent), Kind::Ours).await?;
        let stream = agent.configuration("").await?;
        Ok((agent, stream))
    };
    let one = connect(1).await?;
    let mut of_project = watch(&caller, WatchConnectedAgentsRequest { project_id: 10, agent_id: 0 }).await?;
    let mut of_agent = watch(&caller, WatchConnectedAgentsRequest { project_id: 0, agent_id: 3 }).await?;
    let mut of_all = watch(&caller, WatchConnectedAgentsRequest::default()).await?;
    let Event::Connected(first) = event(&mut of_project).await else { panic!("the snapshot comes first") };
    assert_eq!((first.id, first.project_id), (1, 10));
    assert!(matches!(event(&mut of_project).await, Event::SnapshotComplete(_)));
    assert!(matches!(event(&mut of_agent).await, Event::SnapshotComplete(_)));
    assert!(matches!(event(&mut of_all).await, Event::Connected(info) if info.id == 1));
    assert!(matches!(event(&mut of_all).await, Event::SnapshotComplete(_)));

    let three = connect(3).await?;
    let Event::Connected(third) = event(&mut of_agent).await else { panic!("a connection") };
    assert_eq!(third.id, 3);
    assert!(matches!(event(&mut of_all).await, Event::Connected(info) if info == third));
    let _two = connect(2).await?;
    // An agent of another project: the next event of this watcher is agent 2.
    assert!(matches!(event(&mut of_project).await, Event::Connected(info) if info.id == 2));
    assert!(matches!(event(&mut of_all).await, Event::Connected(info) if info.id == 2));

    // A stream that ends, and a connection that is aborted.
    drop(one);
    let Event::Disconnected(gone) = event(&mut of_project).await else { panic!("an end") };
    assert_eq!((gone.id, gone.connection_id), (1, first.connection_id));
    assert!(matches!(event(&mut of_all).await, Event::Disconnected(gone) if gone.id == 1));
    three.0.link().cut();
    let Event::Disconnected(gone) = event(&mut of_agent).await else { panic!("an end") };
    assert_eq!((gone.id, gone.connection_id), (3, third.connection_id));

    let both = WatchConnectedAgentsRequest { project_id: 1, agent_id: 1 };
    let got = caller.call(caller.request(WATCH), &[&both.encode_to_vec()]).await?;
    assert_eq!(got.status.code(), Code::InvalidArgument);
    let request = caller.request(WATCH).header("grpc-timeout", "200m");
    let got = caller.call(request, &[b""]).await?;
    assert_eq!(got.status.code(), Code::DeadlineExceeded, "a watch has a deadline, too: {}", got.status);
    Ok(())
}

#[tokio::test]
async fn requests_with_a_connection_id_use_only_that_connection() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    let mut agents = Vec::new();
    for kind in [Kind::Ours, Kind::Old, Kind::Ours] {
        let before: Vec<i64> = by_id(&caller, 1).await?.iter().map(|info| info.connection_id).collect();
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let configuration = agent.configuration("").await?;
        let serving = agent.serve(2).await?;
        let id = by_id(&caller, 1)
            .await?
            .iter()
            .map(|info| info.connection_id)
            .find(|id| !before.contains(id))
            .context("a new connection")?;
        agents.push((agent, id, configuration, serving));
    }
    for (agent, id, ..) in &agents {
        let before = agent.requests().list().len();
        for _ in 0..10 {
            let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", *id);
            assert_eq!(caller.call(request, &[b"x"]).await?.messages, ["x"]);
        }
        assert_eq!(agent.requests().list().len() - before, 10);
    }
    for wrong in [1, i64::MAX] {
        let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", wrong);
        let got = caller.call(request, &[b"x"]).await?;
        assert_eq!(
            (got.status.code(), got.status.outcome()),
            (Code::FailedPrecondition, Some(Outcome::NotStarted))
        );
        assert!(got.status.message().contains(&wrong.to_string()), "{}", got.status);
    }
    let request = caller.to_agent(1, &path("Echo")).header("kas-connection-id", "nonsense");
    assert_eq!(caller.call(request, &[b"x"]).await?.status.code(), Code::InvalidArgument);
    Ok(())
}

#[tokio::test]
async fn tunnels_of_gitlabs_agents_are_bound_to_a_connection_only_if_it_is_unambiguous() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.serving_agent(Kind::Old, 2).await?;
    let _one = agent.raw.configuration("").await?;
    let id = by_id(&caller, 1).await?[0].connection_id;
    let request = || caller.to_agent(1, &path("Echo")).header("kas-connection-id", id);
    assert_eq!(caller.call(request(), &[b"x"]).await?.messages, ["x"]);
    // Two streams on one transport connection may come from two processes behind a proxy.
    let two = agent.raw.configuration("").await?;
    assert_eq!(caller.call(request(), &[b"x"]).await?.status.code(), Code::FailedPrecondition);
    assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    drop(two);
    kas.metric_is("kas_connected_agents", 1.0).await?;
    assert_eq!(caller.call(request(), &[b"x"]).await?.messages, ["x"]);
    // A proxy that adds a header.
    let proxied = agent.raw.request(GET_CONFIGURATION).header("via", "2.0 proxy");
    let mut stream = agent.raw.link().open(proxied.body(())?).await?;
    stream.send(frame(b"")).await.unwrap();
    stream.half_close().unwrap();
    stream.head().await.unwrap();
    drop(stream);
    kas.metric_is("kas_connected_agents", 1.0).await?;
    assert_eq!(caller.call(request(), &[b"x"]).await?.status.code(), Code::FailedPrecondition);
    Ok(())
}

/// An API server with two pods and nothing else.
async fn api_server() -> Result<(std::net::SocketAddr, tokio::task::JoinSet<()>)> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let pods: Arc<str> = json!({
        "kind": "PartialObjectMetadataList",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": { "resourceVersion": "1" },
        "items": [
            { "metadata": { "namespace": "shop", "name": "web-1" } },
            { "metadata": { "namespace": "shop", "name": "web-2" } },
        ],
    })
    .to_string()
    .into();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let pods = Arc::clone(&pods);
            let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let found = request.uri().path() == "/api/v1/pods";
                let body =
                    if found { pods.to_string() } else { json!({ "message": "not here" }).to_string() };
                let response = http::Response::builder()
                    .status(if found { 200 } else { 404 })
                    .header("content-type", "application/json")
                    .body(Full::new(bytes::Bytes::from(body)));
                std::future::ready(response)
            });
            connections.spawn(async move {
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    Ok((address, tasks))
}

#[tokio::test]
async fn get_pods_uses_the_requested_connection() -> Result<()> {
    let (server, _server) = api_server().await?;
    let kas = Kas::start().await?;
    let agentk = Agentk::start_with(kas.agent, &token(1), &format!("http://{server}")).await?;
    agentk.connected().await?;
    let caller = kas.caller().await?;
    let id = by_id(&caller, 1).await?.first().context("connected")?.connection_id;
    for connection_id in [0, id] {
        let request = GetPodsRequest { agent_id: 1, connection_id, ..Default::default() };
        let answer: GetPodsResponse = caller.unary(GET_PODS, &request).await?;
        let names: Vec<&str> = answer.pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!(names, ["web-1", "web-2"]);
        assert_eq!((answer.pods[0].namespace.as_str(), answer.next_page_token.as_str()), ("shop", ""));
    }
    for (request, code) in [
        (
            GetPodsRequest { agent_id: 1, connection_id: id ^ 1, ..Default::default() },
            Code::FailedPrecondition,
        ),
        (GetPodsRequest { agent_id: 1, connection_id: -1, ..Default::default() }, Code::InvalidArgument),
        (GetPodsRequest::default(), Code::InvalidArgument),
        (
            GetPodsRequest { agent_id: 1, namespace: "../secrets".into(), ..Default::default() },
            Code::InvalidArgument,
        ),
        (GetPodsRequest { agent_id: 1, page_size: 50_001, ..Default::default() }, Code::InvalidArgument),
    ] {
        let got = caller.call(caller.request(GET_PODS), &[&request.encode_to_vec()]).await?;
        assert_eq!(got.status.code(), code, "{request:?}: {}", got.status);
    }
    // For an absent agent it fails like any other request.
    let request = GetPodsRequest { agent_id: 2, ..Default::default() };
    let headers = caller.request(GET_PODS).header("grpc-timeout", "100m");
    let got = caller.call(headers, &[&request.encode_to_vec()]).await?;
    assert_eq!(
        (got.status.code(), got.status.outcome()),
        (Code::DeadlineExceeded, Some(Outcome::NotStarted))
    );
    Ok(())
}

#[tokio::test]
async fn reflection_lists_what_kas_serves() -> Result<()> {
    let Scenario { kas: _kas, caller, .. } = Scenario::start().await?;
    for version in ["v1", "v1alpha"] {
        let method = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        // `list_services: ""`.
        let got = caller.call(caller.request(&method), &[&[0x3a, 0]]).await?;
        assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
        let text = String::from_utf8_lossy(&got.messages[0]).into_owned();
        for service in
            ["kas.api.v1.KasApi", "gitlab.agent.agent_tracker.rpc.AgentTracker", "grpc.health.v1.Health"]
        {
            assert!(text.contains(service), "{text}");
        }
        // `file_containing_symbol: "kas.api.v1.KasApi"`: what a client needs to call it.
        let mut request = vec![0x22, 17];
        request.extend_from_slice(b"kas.api.v1.KasApi");
        let got = caller.call(caller.request(&method), &[&request]).await?;
        assert!(String::from_utf8_lossy(&got.messages[0]).contains("ConnectedAgentsForProject"));
    }
    Ok(())
}
