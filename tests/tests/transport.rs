//! TLS on both listeners, and connections that reach their age: real kas, real agentk, real kasctl.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use prost::Message as _;
use proto::kas::bench::v1::Payload;
use serde_json::json;
use testkit::{
    agentk::Agentk,
    caller::frame,
    kas::{Kas, token},
    link::Next,
    process::program,
};
use tokio::time::Instant;

const ECHO: &str = "/kas.bench.v1.Bench/Echo";
const HOLD: &str = "/kas.bench.v1.Bench/Hold";

#[tokio::test]
async fn connections_that_reach_their_age_move_and_no_request_notices() -> Result<()> {
    // GOAWAY comes at 0.35 of this, so about each 0.7 s.
    let kas =
        Kas::start_with_config(json!({ "agent": { "listen": { "max_connection_age": "2s" } } })).await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    let caller = kas.caller().await?;
    let mut open = caller.open(caller.to_agent(1, HOLD)).await?;
    open.send(frame(b"")).await.ok().context("sent")?;
    open.half_close().ok().context("sent")?;
    ensure!(matches!(open.next().await, Next::Message(_)));

    let message = Payload { data: "x".into() }.encode_to_vec();
    let begun = Instant::now();
    let mut served = 0;
    while begun.elapsed() < Duration::from_secs(4) {
        let got = caller.call(caller.to_agent(1, ECHO), &[&message]).await?;
        ensure!(got.status.code() == Code::Ok, "after {:?}: {}", begun.elapsed(), got.status);
        served += 1;
    }
    let moves = kas.process.log().matches("\"agent connected\"").count();
    println!("{served} requests, {moves} connections");
    assert!(moves >= 3, "the agent moved {moves} times");
    let still_open = tokio::time::timeout(Duration::from_millis(50), open.next()).await.is_err();
    assert!(still_open, "age must not cut a stream that is busy");
    Ok(())
}

/// Writes a CA and a certificate of it for loopback.
fn certificates(dir: &Path) -> Result<()> {
    let mut ca = rcgen::CertificateParams::new(vec![])?;
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    ca.distinguished_name.push(rcgen::DnType::CommonName, "test CA");
    let ca_key = rcgen::KeyPair::generate()?;
    let ca_certificate = ca.self_signed(&ca_key)?;
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate()?;
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let certificate = rcgen::CertificateParams::new(names)?.signed_by(&key, &issuer)?;
    std::fs::write(dir.join("ca.pem"), ca_certificate.pem())?;
    std::fs::write(dir.join("cert.pem"), certificate.pem())?;
    std::fs::write(dir.join("key.pem"), key.serialize_pem())?;
    Ok(())
}

#[tokio::test]
async fn both_listeners_speak_tls_and_clients_verify_it() -> Result<()> {
    let dir = tempfile::tempdir()?;
    certificates(dir.path())?;
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let listen = json!({ "certificate_file": file("cert.pem"), "key_file": file("key.pem") });
    let kas =
        Kas::start_with_config(json!({ "agent": { "listen": listen }, "api": { "listen": listen } })).await?;
    let agentk = Agentk::start_tls(kas.agent, &token(1), &dir.path().join("ca.pem")).await?;
    agentk.connected().await?;

    std::fs::write(dir.path().join("secret"), base64_of(&kas.secrets[0]))?;
    let kasctl = program("kasctl")?;
    let run = |ca: &[&str]| {
        Command::new(&kasctl)
            .args([
                "--address",
                &format!("grpcs://{}", kas.api),
                "--secret-file",
                &file("secret"),
                "--timeout",
                "10s",
            ])
            .args(ca)
            .args(["-o", "json", "agents"])
            .output()
    };
    let listed = run(&["--ca-file", &file("ca.pem")])?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    ensure!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let agents: serde_json::Value = serde_json::from_str(&text)?;
    assert_eq!(agents["agents"][0]["id"], 1);
    // Without the CA nothing is trusted.
    let refused = run(&[])?;
    assert_eq!(refused.status.code(), Some(3), "{}", String::from_utf8_lossy(&refused.stderr));
    Ok(())
}

fn base64_of(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
