//! A write is committed only after all of it was sent.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use grpc::Code;
use h2::Reason;
use proto::gitlab::agent::grpctool::http_request;
use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::{
    caller::answer,
    kubernetes::{Access, Kubernetes},
    link::Stream,
    process::SOON,
};
use tokio::{io::AsyncWriteExt as _, time::sleep};

use crate::setup::{AT_ONCE, Chain, Kasctl, NEVER, exclusive, send};

const PATH: &str = "/api/v1/namespaces/written/configmaps";
/// Fills many messages, and stays below the API server's limit for an object.
const BYTES: usize = 500_000;

fn object(name: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name },
        "data": { "text": "x".repeat(BYTES) },
    })
    .to_string()
}

/// Returns the names of the existing ConfigMaps.
async fn committed(kubernetes: &Kubernetes) -> Result<Vec<String>> {
    let names = kubernetes.kubectl(&["get", "configmaps", "-n", "written", "--output=name"]).await?;
    Ok(names.lines().map(|name| name.trim_start_matches("configmap/").to_owned()).collect())
}

/// Waits until the upload has reached the API server as far as possible: agentk has it, and nothing moves.
async fn is_under_way(chain: &Chain) -> Result<()> {
    chain.agentk.metric_is("agentk_tunnels_busy", 1.0).await?;
    sleep(NEVER).await;
    Ok(())
}

/// Starts an upload through kasctl, and writes `body` without an end.
async fn upload(chain: &Chain, body: &str, sized: Option<usize>) -> Result<Kasctl> {
    let length = sized.map(|length| format!("Content-Length: {length}"));
    let mut arguments = vec!["request", "1", "POST", PATH, "-d", "@-"];
    arguments.extend(length.as_deref().map(|length| ["-H", length]).into_iter().flatten());
    let mut kasctl = chain.kasctl(&arguments).await?;
    kasctl.stdin.as_mut().context("its input is a pipe")?.write_all(body.as_bytes()).await?;
    Ok(kasctl)
}

/// Like [`upload`] without kasctl: the head and the body, without the trailer.
async fn upload_by_hand(chain: &Chain, body: &str) -> Result<Stream> {
    let mut stream = chain.request("POST", PATH, &[]).await?;
    for piece in body.as_bytes().chunks(32 * 1024) {
        let data = http_request::Data { data: piece.to_vec().into() };
        send(&mut stream, http_request::Message::Data(data)).await?;
    }
    Ok(stream)
}

#[tokio::test]
async fn a_posted_object_is_created_and_can_be_changed() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "written", Access::Admin).await?;

    for (name, sized) in [("whole", false), ("whole-sized", true)] {
        let body = object(name);
        let created = upload(&chain, &body, sized.then_some(body.len())).await?.finish().await?;
        assert_eq!(created.code(), Some(0), "{created:?}");
        let created: Value = serde_json::from_str(&created.stdout)?;
        let there = kubernetes.kubectl(&["get", "--raw", &format!("{PATH}/{name}")]).await?;
        assert_eq!(created, serde_json::from_str::<Value>(&there)?);
        assert_eq!(created["data"]["text"].as_str().map(str::len), Some(BYTES));
    }
    // Small ones from the command line, and the response to a duplicate.
    let small = json!({ "metadata": { "name": "small" } }).to_string();
    chain.output(&["request", "1", "POST", PATH, "-d", &small, "--fail"]).await?;
    let again = chain.run(&["request", "1", "POST", PATH, "-d", &small, "-i"]).await?;
    assert!(again.stdout.starts_with("HTTP 409 Conflict\n"), "{again:?}");

    let small = format!("{PATH}/small");
    let merge = "Content-Type: application/merge-patch+json";
    let patched = chain
        .json(&["request", "1", "PATCH", &small, "-H", merge, "-d", r#"{"data":{"a":"1"}}"#, "--fail"])
        .await?;
    assert_eq!(patched["data"], json!({ "a": "1" }));
    chain.output(&["request", "1", "DELETE", &small, "--fail"]).await?;
    let gone = chain.run(&["request", "1", "GET", &small, "-i"]).await?;
    assert!(gone.stdout.starts_with("HTTP 404 Not Found\n"), "{gone:?}");
    chain.is_quiet(AT_ONCE).await?;
    Ok(())
}

/// In each case the API server has received all bytes of a valid object, or all but the last.
#[tokio::test]
async fn a_truncated_upload_commits_nothing() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.ensure_namespace("written").await?;
    let mut chain = Chain::start(kubernetes, "cut", Access::Admin).await?;

    // The caller is killed, or interrupted.
    for (name, sized, whole, signal) in [
        ("cut-killed", false, false, Signal::KILL),
        ("cut-killed-whole", false, true, Signal::KILL),
        ("cut-killed-sized", true, false, Signal::KILL),
        ("cut-interrupted", false, false, Signal::INT),
        ("cut-interrupted-whole", false, true, Signal::INT),
        ("cut-interrupted-sized", true, false, Signal::INT),
    ] {
        let body = object(name);
        let sent = if whole { &*body } else { &body[..body.len() - 1] };
        let mut kasctl = upload(&chain, sent, sized.then_some(body.len())).await?;
        is_under_way(&chain).await?;
        kasctl.signal(signal)?;
        let quiet = chain.is_quiet(AT_ONCE).await?;
        println!("{name}: over after {quiet:?}");
        kasctl.child.wait().await?;
    }

    // The caller's input ends early: kasctl sends all that it has.
    let body = object("cut-short");
    let short = upload(&chain, &body[..body.len() - 1], Some(body.len())).await?.finish().await?;
    println!("cut-short: {:?}: {}", short.code(), short.stderr.trim());
    assert_ne!(short.code(), Some(0), "{short:?}");

    // Ends without kasctl.
    let mut stream = upload_by_hand(&chain, &object("cut-reset")).await?;
    is_under_way(&chain).await?;
    stream.reset(Reason::CANCEL);
    chain.is_quiet(AT_ONCE).await?;
    let mut stream = upload_by_hand(&chain, &object("cut-half-closed")).await?;
    is_under_way(&chain).await?;
    stream.half_close().map_err(|reason| anyhow!("the stream was reset: {reason:?}"))?;
    let status = answer(&mut stream).await?.status;
    println!("cut-half-closed: {status}");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    chain.is_quiet(AT_ONCE).await?;

    // Processes between the caller and the API server are killed.
    let kasctl = upload(&chain, &object("cut-kas"), None).await?;
    is_under_way(&chain).await?;
    chain.kas.process.kill();
    chain.kas.process.exited(SOON).await?;
    chain.agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
    let lost = kasctl.finish().await?;
    println!("cut-kas: {:?}: {}", lost.code(), lost.stderr.trim());
    assert_eq!(lost.code(), Some(7), "{lost:?}");
    chain.kas.restart().await?;
    chain.agentk.connected().await?;

    let kasctl = upload(&chain, &object("cut-agentk"), None).await?;
    is_under_way(&chain).await?;
    chain.agentk.process.kill();
    chain.agentk.process.exited(SOON).await?;
    let lost = kasctl.finish().await?;
    println!("cut-agentk: {:?}: {}", lost.code(), lost.stderr.trim());
    assert_eq!(lost.code(), Some(7), "{lost:?}");
    chain.kas.metric_is("kas_requests_open", 0.0).await?;

    // Long enough for the API server to commit a truncated upload, if it would.
    sleep(Duration::from_secs(1)).await;
    let there = committed(kubernetes).await?;
    assert!(!there.iter().any(|name| name.starts_with("cut")), "{there:?}");
    Ok(())
}
