//! The audit log of real processes: pairs of records, outputs that fail, and shutdown.

use std::{
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use h2::Reason;
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{self, http_request},
        kubernetes_api::rpc::{HeaderExtra, ImpersonationConfig},
        prototool::{self, Values},
    },
    kas::{
        api::v1::{ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse, GetPodsRequest, GetPodsResponse},
        bench::v1::Payload,
    },
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    bench::{ECHO, HOLD},
    caller::{Answer, Caller, Jwt, frame},
    demo_api::DemoApi,
    kas::{Kas, eventually, token},
    link::Next,
    scenario::Scenario,
};

const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";
const LOST: &str = "kas_audit_records_lost_total";

fn audit_to(output: &Path) -> Value {
    json!({ "observability": { "audit": { "output": output } } })
}

fn payload(data: &str) -> Vec<u8> {
    Payload { data: data.to_owned().into() }.encode_to_vec()
}

/// The two messages of a GET.
fn get(path: &str, header: &[(&str, &str)]) -> [Vec<u8>; 2] {
    get_as(path, header, None)
}

/// The same, with the user in GitLab's `HeaderExtra`.
fn get_as(path: &str, header: &[(&str, &str)], user: Option<&str>) -> [Vec<u8>; 2] {
    let extra = user.map(|user| {
        let config = ImpersonationConfig { username: user.to_owned(), ..ImpersonationConfig::default() };
        prost_types::Any {
            type_url: "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra".to_owned(),
            value: HeaderExtra { imp_config: Some(config) }.encode_to_vec(),
        }
    });
    let values = |value: &str| Values { value: vec![value.to_owned()] };
    let request = prototool::HttpRequest {
        method: "GET".into(),
        header: header.iter().map(|(name, value)| ((*name).to_owned(), values(value))).collect(),
        url_path: path.into(),
        query: std::collections::BTreeMap::default(),
    };
    let header = http_request::Header { request: Some(request), extra, ..Default::default() };
    [http_request::Message::Header(header), http_request::Message::Trailer(http_request::Trailer {})]
        .map(|message| grpctool::HttpRequest { message: Some(message) }.encode_to_vec())
}

async fn call(caller: &Caller, id: &str, method: &str, messages: &[&[u8]]) -> Result<Answer> {
    let request = caller.to_agent(1, method).header("x-gitlab-correlation-id", id);
    caller.call(request, messages).await
}

/// Reads the records of a file; the last line may be incomplete.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// Waits for both lines of a request.
async fn pair(path: &Path, id: &str) -> Result<[Value; 2]> {
    eventually(&format!("both lines of {id}"), async || {
        let found: Vec<Value> = lines(path).into_iter().filter(|line| line["request_id"] == id).collect();
        Ok(<[Value; 2]>::try_from(found))
    })
    .await
}

/// Starts kas and returns the path of its audit log.
async fn start() -> Result<(Kas, tempfile::TempDir, PathBuf)> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("audit.log");
    let kas = Kas::start_with_config(audit_to(&path)).await?;
    Ok((kas, dir, path))
}

#[tokio::test]
async fn each_request_has_a_start_and_an_end_record() -> Result<()> {
    let (kas, _dir, path) = start().await?;
    let api = DemoApi::start("127.0.0.1:0".parse()?).await?;
    let agentk = Agentk::start_with(kas.agent, &token(1), &api.url()).await?;
    agentk.connected().await?;
    let jwt = Jwt::new(&kas.secrets[0]).claim("sub", json!("jane")).encode();
    let caller = Caller::connect(kas.api, Some(jwt.clone())).await?;

    // Any method, answered with OK.
    let message = payload("a very private payload");
    ensure!(call(&caller, "echo", ECHO, &[&message]).await?.status.code() == Code::Ok);
    let [start, end] = pair(&path, "echo").await?;
    assert_eq!((&start["event"], &end["event"]), (&json!("start"), &json!("end")));
    for line in [&start, &end] {
        assert_eq!(line["actor"], "gitlab");
        assert_eq!(line["subject"], "jane");
        assert_eq!(line["agent_id"], 1);
        assert_eq!(line["project_id"], 1);
        assert_eq!(line["method"], ECHO);
        assert_eq!(line["decision"], "allow");
        assert_eq!(line["rule"], "jwt");
        assert_eq!(line["peer"].as_str().map(|peer| peer.starts_with("127.0.0.1:")), Some(true));
        assert!(line["replica"].is_string() && line["time"].as_str().is_some_and(|time| time.ends_with('Z')));
    }
    assert!(start.get("status").is_none(), "{start}");
    let bytes = message.len() + grpc::PREFIX_LEN;
    assert_eq!((&end["status"], &end["route"]), (&json!("OK"), &json!("local")));
    assert_eq!((&end["bytes_in"], &end["bytes_out"]), (&json!(bytes), &json!(bytes)));
    assert!(end["duration_us"].as_u64().is_some_and(|micros| micros > 0), "{end}");

    // The action on the API server, from the first message.
    let messages = get("/api/v1/namespaces/garden/pods", &[("Impersonate-User", "joe")]);
    let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    ensure!(call(&caller, "pods", MAKE_REQUEST, &messages).await?.status.code() == Code::Ok);
    for line in pair(&path, "pods").await? {
        assert_eq!((&line["verb"], &line["resource"]), (&json!("list"), &json!("pods")));
        assert_eq!(line["on_behalf_of"], "joe");
        assert_eq!(line["path_hash"].as_str().map(str::len), Some(64));
    }

    let messages = get_as("/api/v1/namespaces/garden/pods", &[], Some("gitlab:ci_job:1"));
    let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    ensure!(call(&caller, "job", MAKE_REQUEST, &messages).await?.status.code() == Code::Ok);
    for line in pair(&path, "job").await? {
        assert_eq!((&line["on_behalf_of"], &line["verb"]), (&json!("gitlab:ci_job:1"), &json!("list")));
    }

    // A method of kas that uses the agent.
    let request = caller.request("/kas.api.v1.KasApi/GetPods").header("x-gitlab-correlation-id", "own");
    let query = GetPodsRequest { agent_id: 1, namespace: "garden".into(), ..GetPodsRequest::default() };
    let pods: GetPodsResponse = caller.call(request, &[&query.encode_to_vec()]).await?.one()?;
    ensure!(!pods.pods.is_empty());
    let [start, end] = pair(&path, "own").await?;
    assert!(
        start.get("agent_id").is_none(),
        "the agent id is in the message, which had not arrived: {start}"
    );
    assert_eq!((&end["agent_id"], &end["route"], &end["status"]), (&json!(1), &json!("local"), &json!("OK")));

    // An error status of the agent.
    let refused = get("/api/v1/namespaces/../secrets", &[]);
    let refused: Vec<&[u8]> = refused.iter().map(Vec::as_slice).collect();
    let code = call(&caller, "error", MAKE_REQUEST, &refused).await?.status.code();
    let [_, end] = pair(&path, "error").await?;
    assert_eq!((&end["status"], &end["decision"]), (&json!(code.name()), &json!("allow")));
    assert_ne!(code, Code::Ok);

    // The caller cancels.
    let request = caller.to_agent(1, HOLD).header("x-gitlab-correlation-id", "cancel");
    let mut stream = caller.open(request).await?;
    stream.send(frame(b"")).await.ok().context("sent")?;
    ensure!(matches!(stream.next().await, Next::Message(_)));
    stream.reset(Reason::CANCEL);
    let [_, end] = pair(&path, "cancel").await?;
    assert_eq!((&end["status"], &end["outcome"]), (&json!("CANCELLED"), &json!("cancelled")));

    // Records contain no payload and no credential.
    let text = std::fs::read_to_string(&path)?;
    for secret in ["private payload", "garden", "Bearer", &jwt, &token(1)] {
        assert!(!text.contains(secret), "{secret} is in the audit log");
    }
    assert_eq!(std::fs::metadata(&path)?.permissions().mode() & 0o777, 0o600);
    assert_eq!(kas.metric("kas_audit_records_total").await?, lines(&path).len() as f64);
    Ok(())
}

#[tokio::test]
async fn refused_requests_are_in_the_log_with_the_rule_that_refused_them() -> Result<()> {
    let (kas, _dir, path) = start().await?;
    let caller = kas.caller().await?;
    let unauthenticated = Caller::connect(kas.api, Some(Jwt::new(&[7; 32]).encode())).await?;
    for (id, rule, request) in [
        ("token", "jwt", unauthenticated.to_agent(1, ECHO)),
        ("key", "metadata", caller.to_agent(1, ECHO).header("kas-hop-x", "1")),
        ("time", "grpc-timeout", caller.to_agent(1, ECHO).header("grpc-timeout", "soon")),
        ("encoding", "grpc-encoding", caller.to_agent(1, ECHO).header("grpc-encoding", "br")),
        ("method", "method", caller.request("/no.Such/Method")),
    ] {
        let got = caller_of(&caller, &unauthenticated, id)
            .call(request.header("x-gitlab-correlation-id", id), &[b""])
            .await?;
        let [start, end] = pair(&path, id).await?;
        for line in [&start, &end] {
            assert_eq!((&line["decision"], &line["rule"]), (&json!("deny"), &json!(rule)), "{line}");
        }
        assert_eq!(end["status"], got.status.code().name(), "{id}");
        assert_eq!(end["outcome"], "refused", "{id}");
        assert_eq!(start.get("actor").is_some(), id != "token", "{start}");
    }
    // A request that is not gRPC may have any path.
    let plain = caller.link().address();
    let request = http::Request::get(format!("http://{plain}/a-secret/path"))
        .header("x-gitlab-correlation-id", "plain");
    let (status, _) = caller.open(request).await?.head().await.map_err(|r| anyhow::anyhow!("{r:?}"))?.clone();
    ensure!(status == http::StatusCode::METHOD_NOT_ALLOWED);
    let [_, end] = pair(&path, "plain").await?;
    assert_eq!((&end["rule"], &end["method"]), (&json!("not-grpc"), &json!("")), "{end}");
    // Health checks are not recorded.
    let health = caller.request("/grpc.health.v1.Health/Check").header("x-gitlab-correlation-id", "health");
    ensure!(caller.call(health, &[b""]).await?.status.code() == Code::Ok);
    ensure!(
        caller
            .call(caller.request("/no.Such/Method").header("x-gitlab-correlation-id", "last"), &[])
            .await
            .is_ok()
    );
    pair(&path, "last").await?;
    assert!(!lines(&path).iter().any(|line| line["request_id"] == "health"));
    Ok(())
}

fn caller_of<'a>(caller: &'a Caller, unauthenticated: &'a Caller, id: &str) -> &'a Caller {
    if id == "token" { unauthenticated } else { caller }
}

#[tokio::test]
async fn requests_that_are_open_at_process_exit_have_an_end_record() -> Result<()> {
    let (kas, _dir, path) = start().await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    let caller = kas.caller().await?;
    let request = caller.to_agent(1, HOLD).header("x-gitlab-correlation-id", "open");
    let mut stream = caller.open(request).await?;
    stream.send(frame(b"")).await.ok().context("sent")?;
    ensure!(matches!(stream.next().await, Next::Message(_)));
    for n in 0..200 {
        call(&caller, &format!("many-{n}"), ECHO, &[&payload("x")]).await?;
    }
    kas.process.terminate();
    // The second signal does not wait for requests.
    kas.process
        .logged("that it leaves", |line| line["message"].as_str()?.starts_with("leaving").then_some(()))
        .await?;
    kas.process.terminate();
    let status = kas.process.exited(Duration::from_secs(10)).await?;
    ensure!(status.success(), "{status}");
    let all = lines(&path);
    assert_eq!(all.len(), 2 * 201, "a start and an end of each");
    let end = all.iter().find(|line| line["request_id"] == "open" && line["event"] == "end");
    assert_eq!(end.context("an end")?["outcome"], "unknown");
    Ok(())
}

#[tokio::test]
async fn a_rotated_file_is_reopened_after_it_moved_and_after_sighup() -> Result<()> {
    let (kas, dir, path) = start().await?;
    let caller = kas.caller().await?;
    let ask = async |id: &str| {
        let request =
            caller.request("/kas.api.v1.KasApi/ConnectedAgentsById").header("x-gitlab-correlation-id", id);
        let query = ConnectedAgentsByIdRequest { agent_id: 1 }.encode_to_vec();
        caller.call(request, &[&query]).await?.one::<ConnectedAgentsByIdResponse>()
    };
    ask("first").await?;
    pair(&path, "first").await?;
    let old = dir.path().join("audit.log.1");
    std::fs::rename(&path, &old)?;
    // Without a signal, kas checks the path at most once a second.
    eventually("a new file", async || {
        ask("second").await?;
        Ok(if lines(&path).is_empty() { Err("none") } else { Ok(()) })
    })
    .await?;
    assert_eq!(std::fs::metadata(&path)?.permissions().mode() & 0o777, 0o600);
    // After SIGHUP, it reopens the file without waiting for a request.
    std::fs::rename(&path, dir.path().join("audit.log.2"))?;
    kill_process(Pid::from_raw(kas.process.id()).context("an id")?, Signal::HUP)?;
    eventually("a new file", async || Ok(if path.exists() { Ok(()) } else { Err("none") })).await?;
    ask("third").await?;
    pair(&path, "third").await?;
    assert!(!lines(&old).iter().any(|line| line["request_id"] == "third"));
    assert!(kas.process.is_running());
    Ok(())
}

#[tokio::test]
async fn a_full_disk_stops_no_request_and_is_counted_and_logged_once() -> Result<()> {
    let Scenario { kas, caller, agent: _agentk } =
        Scenario::start_with_config(audit_to(Path::new("/dev/full"))).await?.agentk().await?;
    for n in 0..20 {
        let got = call(&caller, &format!("n-{n}"), ECHO, &[&payload("x")]).await?;
        ensure!(got.status.code() == Code::Ok, "{}", got.status);
    }
    kas.metric_is(&format!("{LOST}{{reason=\"WriteFailed\"}}"), 40.0).await?;
    ensure!(kas.metric("kas_audit_write_errors_total").await? >= 1.0);
    ensure!(kas.metric("kas_audit_records_total").await? == 0.0);
    let told = kas.process.log().matches("audit records cannot be written and are lost").count();
    assert_eq!(told, 1);
    assert!(kas.leave(Duration::from_secs(10)).await?.success());
    Ok(())
}

#[tokio::test]
async fn an_unread_pipe_stops_no_request_and_lost_records_are_counted() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0)?;
    let mut config = audit_to(&path);
    config["observability"]["audit"]["queue"] = json!(50);
    let Scenario { kas, caller, agent: _agentk } =
        Scenario::start_with_config(config).await?.agentk().await?;
    // A pipe holds 64 KiB: some 200 lines.
    for n in 0..400 {
        let got = call(&caller, &format!("n-{n}"), ECHO, &[&payload("x")]).await?;
        ensure!(got.status.code() == Code::Ok, "{}", got.status);
    }
    let lost = kas.metric(&format!("{LOST}{{reason=\"QueueFull\"}}")).await?;
    assert!(lost > 100.0, "{lost} of 800 lines");
    // Shutdown waits for the pipe for a limited time.
    let begun = tokio::time::Instant::now();
    assert!(kas.leave(Duration::from_secs(15)).await?.success());
    println!("left after {:?}, {lost} lines lost", begun.elapsed());
    assert!(kas.process.log().contains("audit records were not written in time and are lost"));
    Ok(())
}

#[tokio::test]
async fn a_pipe_receives_whole_lines() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0)?;
    let Scenario { kas: _kas, caller, .. } = Scenario::start_with_config(audit_to(&path)).await?;
    caller.call(caller.request("/no.Such/Method").header("x-gitlab-correlation-id", "one"), &[]).await?;
    let text = tokio::task::spawn_blocking(move || {
        let mut pipe = std::fs::File::open(path)?;
        let mut text = Vec::new();
        let mut piece = [0; 4096];
        while text.iter().filter(|byte| **byte == b'\n').count() < 2 {
            let n = pipe.read(&mut piece)?;
            ensure!(n > 0, "the pipe ended");
            text.extend_from_slice(&piece[..n]);
        }
        Ok(String::from_utf8(text)?)
    });
    let text = testkit::process::soon("two lines", text).await??;
    for line in text.lines() {
        assert_eq!(serde_json::from_str::<Value>(line)?["request_id"], "one");
    }
    Ok(())
}

#[tokio::test]
async fn an_output_that_cannot_be_opened_fails_the_start() -> Result<()> {
    let error = Kas::start_with_config(audit_to(Path::new("/no/such/folder/audit.log"))).await.unwrap_err();
    let text = format!("{error:#}");
    assert!(
        text.contains("observability.audit.output: found a file in /no/such/folder, which is not a folder"),
        "{text}"
    );
    Ok(())
}
