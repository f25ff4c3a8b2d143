//! What people see: environments, and diffs for callers of the Kubernetes API endpoint.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use proto::kas::api::v1::{EnvironmentAgent, ListEnvironmentsRequest, ListEnvironmentsResponse};
use serde_json::{Value, json};
use testkit::{
    endpoint::{self, JANE},
    process::SOON,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::setup::{AGENT, PROJECT, Setup, config_map};

const ENTRY: &str = "    default_namespace: default\n";
/// The token of a user with rights of its own in the cluster: none.
const JOE: &str = "kasu_joejoejoejoejoejoejoejoejoejoejoejoejoejoej";

async fn environments(it: &Setup, replica: usize, name: &str) -> Result<ListEnvironmentsResponse> {
    let request = ListEnvironmentsRequest { environment: name.to_owned(), project_id: 0 };
    it.mesh.caller(replica).await?.unary("/kas.api.v1.KasApi/ListEnvironments", &request).await
}

async fn until(
    it: &Setup,
    replica: usize,
    what: &str,
    condition: impl Fn(&ListEnvironmentsResponse) -> bool,
) -> Result<ListEnvironmentsResponse> {
    let deadline = Instant::now() + SOON;
    loop {
        let answer = environments(it, replica, "").await?;
        if condition(&answer) {
            return Ok(answer);
        }
        ensure!(Instant::now() < deadline, "{what}: {answer:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

fn agent(answer: &ListEnvironmentsResponse, id: i64) -> EnvironmentAgent {
    answer.agents.iter().find(|agent| agent.id == id).cloned().unwrap_or_default()
}

#[tokio::test]
async fn environments_are_known_at_every_replica() -> Result<()> {
    let kas_yaml = "environments: [production, 'review/*']\nnamespaces: [default]\n";
    let it = Setup::start(2, ENTRY, kas_yaml).await?;
    it.repository.write_kas_yaml(2, "environments: [production]")?;
    let commit = it.repository.push(&[("a.json", config_map("a", "1"))]).await?;
    it.synced(0, &commit).await?;
    for replica in 0..2 {
        let answer = until(&it, replica, "synced", |answer| agent(answer, AGENT).sync == "synced").await?;
        let named: Vec<(&str, &[i64])> = answer
            .environments
            .iter()
            .map(|environment| (environment.name.as_str(), environment.agent_ids.as_slice()))
            .collect();
        assert_eq!(named, [("production", &[1, 2][..]), ("review/*", &[1][..])]);
        let first = agent(&answer, AGENT);
        assert_eq!((first.connections, first.projects, first.synced), (1, 1, 1), "{first:?}");
        assert_eq!((first.name.as_str(), first.namespaces), ("agent-1", vec!["default".to_owned()]));
        // The other agent was never connected.
        let second = agent(&answer, 2);
        assert_eq!((second.connections, second.sync.as_str()), (0, ""), "{second:?}");
        ensure!(answer.unanswered.is_empty(), "{answer:?}");
        let review = environments(&it, replica, "review/branch").await?;
        assert_eq!(review.environments.len(), 1, "{review:?}");
        assert_eq!(review.environments[0].name, "review/*");
    }

    // A failure is told with its project, and a wrong file with its reason. The last good file stays.
    it.repository.push(&[("bad.yaml", "kind: [x".to_owned())]).await?;
    let failed = until(&it, 1, "failed", |answer| agent(answer, AGENT).sync == "failed").await?;
    let message = agent(&failed, AGENT).message;
    ensure!(message.starts_with(&format!("{PROJECT}: ")) && message.contains("bad.yaml:1"), "{message}");
    it.repository.write_kas_yaml(AGENT, "environment: [x]")?;
    let wrong = until(&it, 1, "wrong", |answer| !agent(answer, AGENT).flaw.is_empty()).await?;
    ensure!(agent(&wrong, AGENT).flaw.contains("environment"), "{wrong:?}");
    assert_eq!(wrong.environments.len(), 2, "{wrong:?}");
    Ok(())
}

/// Sends files to the endpoint, and returns the status and the answer.
async fn post(address: SocketAddr, token: &str, files: &Value) -> Result<(u16, Value)> {
    let body = json!({ "files": files }).to_string();
    let request = format!(
        "POST /fleet/diff?agent=1&project=group%2Fmanifests HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut answer)).await??;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, serde_json::from_str(body).with_context(|| answer.clone())?))
}

#[tokio::test]
async fn a_job_gets_a_diff_of_its_files_with_its_own_rights() -> Result<()> {
    let files = tempfile::tempdir()?;
    let users = files.path().join("users.yaml");
    endpoint::write_users(&users, &[("jane", JANE), ("joe", JOE)])?;
    let over = json!({ "agent": { "kubernetes_api": {
        "listen": { "address": "127.0.0.1:0" },
        "users": { "file": users },
        "access": [
            { "agents": "all", "users": ["kas:jane"], "as": "agent" },
            { "agents": "all", "users": ["kas:joe"], "as": "user" },
        ],
    } } });
    let it = Setup::start_with(2, ENTRY, "", over).await?;
    let commit =
        it.repository.push(&[("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))]).await?;
    it.synced(0, &commit).await?;
    let sent = json!([
        { "path": "a.json", "content": config_map("a", "2") },
        { "path": "c.json", "content": config_map("c", "1") },
    ]);
    for replica in 0..2 {
        let address = endpoint::address(it.mesh.kas(replica)).await?;
        let (status, made) = post(address, JANE, &sent).await?;
        assert_eq!(status, 200, "{made}");
        let changes = made["changes"].as_array().context("changes")?;
        let mut actions: Vec<(&str, &str)> = changes
            .iter()
            .filter_map(|change| Some((change["object"]["name"].as_str()?, change["action"].as_str()?)))
            .collect();
        actions.sort_unstable();
        assert_eq!(actions, [("a", "update"), ("b", "prune"), ("c", "create")], "{made}");
        // Joe may do nothing in the cluster, so kas shows nothing of it.
        let (status, refused) = post(address, JOE, &sent).await?;
        ensure!(status != 200 || shows_nothing(&refused), "{status} {refused}");
        ensure!(refused.to_string().contains("forbidden"), "{status} {refused}");
        let (status, wrong) =
            post(address, JANE, &json!([{ "path": "x.yaml", "content": "kind: [x" }])).await?;
        ensure!(status == 422 && wrong["message"].to_string().contains("x.yaml:1"), "{status} {wrong}");
    }
    assert_eq!(it.value("a").await?.as_deref(), Some("1"), "a diff writes nothing");
    Ok(())
}

fn shows_nothing(diff: &Value) -> bool {
    diff["changes"].as_array().is_some_and(|changes| {
        changes.iter().all(|change| change["action"] == "error" && change["diff"].as_str() == Some(""))
    })
}
