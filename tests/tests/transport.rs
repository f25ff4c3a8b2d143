//! TLS on both listeners, the maximum connection age, and proxies: real kas, real agentk, real kasctl.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    net::SocketAddr,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use serde_json::json;
use testkit::{
    agentk::Agentk,
    bench::echo,
    caller::frame,
    kas::{Kas, token, within},
    link::Next,
    process::program,
    raw_agent::{GET_CONFIGURATION, Kind, RawAgent},
    scenario::{Scenario, requests_while_the_agent_moves},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::Instant,
};

#[tokio::test]
async fn connections_at_their_maximum_age_are_replaced_without_failed_requests() -> Result<()> {
    // GOAWAY is sent at 0.35 of this, about every 0.7 s.
    let config = json!({ "agent": { "listen": { "max_connection_age": "2s" } } });
    let Scenario { kas: _kas, caller, agent: agentk } =
        Scenario::start_with_config(config).await?.agentk().await?;
    let connections = || agentk.process.log().matches("\"connected to kas\"").count();
    requests_while_the_agent_moves(&caller, connections).await
}

/// Forwards connections, like a TCP load balancer, and counts the streams that the agent opens.
struct Forwarder {
    address: SocketAddr,
    streams: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Forwarder {
    async fn start(to: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let streams = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&streams);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((agent, _)) = listener.accept().await {
                let count = Arc::clone(&count);
                connections.spawn(async move {
                    let Ok(kas) = TcpStream::connect(to).await else { return };
                    let (mut from_agent, mut to_agent) = agent.into_split();
                    let (mut from_kas, mut to_kas) = kas.into_split();
                    tokio::select! {
                        _ = tokio::io::copy(&mut from_kas, &mut to_agent) => {}
                        _ = frames(&mut from_agent, &mut to_kas, &count) => {}
                    }
                });
            }
        });
        Ok(Self { address, streams, _tasks: tasks })
    }

    fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }
}

/// Copies HTTP/2 frames and counts new header blocks: each one of a client opens a stream.
async fn frames(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    streams: &AtomicUsize,
) -> std::io::Result<()> {
    const HEADERS: u8 = 1;
    let mut preface = [0; 24];
    from.read_exact(&mut preface).await?;
    to.write_all(&preface).await?;
    loop {
        let mut head = [0; 9];
        from.read_exact(&mut head).await?;
        let mut frame = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        from.read_exact(&mut frame).await?;
        streams.fetch_add(usize::from(head[3] == HEADERS), Ordering::Relaxed);
        to.write_all(&head).await?;
        to.write_all(&frame).await?;
    }
}

/// The rule for proxies that cut idle streams, with a short time: kas ends idle one-shot tunnels and silent
/// configuration streams with OK. Older streams of an agent without a proxy stay open.
#[tokio::test]
async fn idle_streams_behind_a_proxy_end_with_ok_and_no_others() -> Result<()> {
    let config = json!({ "agent": { "listen": { "proxied_idle_timeout": "2s" } } });
    let kas = Kas::start_with_config(config).await?;
    let direct = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let (stays, _listens) = (direct.tunnel().await?, direct.configuration("").await?);
    kas.metric_is("kas_tunnels_open", 1.0).await?;
    for kind in [Kind::Old, Kind::Recent] {
        let proxied = RawAgent::connect(kas.agent, &token(2), kind).await?;
        let begun = Instant::now();
        let mut idle = proxied.tunnel().await?;
        let request = proxied.request(GET_CONFIGURATION).header("via", "2.0 proxy").body(())?;
        let mut configuration = proxied.link().open(request).await?;
        configuration.send(frame(b"")).await.ok().context("sent")?;
        configuration.half_close().ok().context("sent")?;
        configuration.head().await.ok().context("it is accepted")?;
        assert_eq!(idle.ended().await.code(), Code::Ok, "{kind:?}");
        assert!(begun.elapsed() > Duration::from_secs(1), "not before its time: {:?}", begun.elapsed());
        loop {
            match configuration.next().await {
                // A configuration may arrive first.
                Next::Message(_) => {}
                Next::Trailers(trailers) => {
                    assert_eq!(trailers["grpc-status"], "0", "{kind:?}");
                    break;
                }
                other => anyhow::bail!("{kind:?}: {other:?}"),
            }
        }
    }
    // The first one has been idle and silent for longer.
    kas.metric_is("kas_tunnels_open", 1.0).await?;
    assert!(kas.metric("kas_connected_agents").await? >= 1.0);
    drop(stays);
    Ok(())
}

/// A proxy that neither a header nor an address reveals: silent streams of the agent are cut before the usual
/// timers of proxies. The detection needs more than 20 s, because an agent may have its own reasons before
/// that.
#[tokio::test]
async fn an_early_cut_of_a_silent_stream_marks_the_agent_as_proxied() -> Result<()> {
    let config = json!({ "agent": { "listen": { "proxied_idle_timeout": "2s" } } });
    let kas = Kas::start_with_config(config).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let bystander = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let (cut, _listens) = (agent.configuration("").await?, bystander.configuration("").await?);
    let (mut idle, _stays) = (agent.tunnel().await?, bystander.tunnel().await?);
    kas.metric_is("kas_connected_agents", 2.0).await?;
    // The age of the stream matters.
    tokio::time::sleep(Duration::from_secs(21)).await;
    assert_eq!(kas.metric("kas_tunnels_open").await?, 2.0, "nothing was known of a proxy");
    drop(cut);
    assert_eq!(idle.ended().await.code(), Code::Ok);
    // It is remembered for all connections of this agent, and only for this agent.
    let again = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let begun = Instant::now();
    assert_eq!(again.tunnel().await?.ended().await.code(), Code::Ok);
    assert!(begun.elapsed() > Duration::from_secs(1), "not before its time: {:?}", begun.elapsed());
    assert_eq!(kas.metric("kas_tunnels_open").await?, 1.0);
    Ok(())
}

/// Failed when kas announced 45 s regardless of its configuration.
#[tokio::test]
async fn agentk_behind_a_proxy_replaces_its_idle_tunnels_without_a_gap() -> Result<()> {
    let config = json!({ "agent": { "listen": { "proxied_idle_timeout": "2s" } } });
    let kas = Kas::start_with_config(config).await?;
    // The agent reports another socket address than the one that kas sees, which reveals a TCP proxy.
    let forwarder = Forwarder::start(kas.agent).await?;
    let agentk = Agentk::start(forwarder.address, &token(1)).await?;
    agentk.connected().await?;
    kas.metric_is("kas_tunnels_open", 2.0).await?;
    // The configuration stream is reopened too, and logged each time.
    let tunnels = || {
        let configurations = kas.process.log().matches("\"agent connected\"").count();
        forwarder.streams().saturating_sub(configurations)
    };
    // Two tunnels, replaced twice.
    let mut looks = 0;
    within(Duration::from_secs(40), "idle tunnels are replaced", async || {
        let open = kas.metric("kas_tunnels_open").await?;
        ensure!(open >= 2.0, "a gap: {open} tunnels");
        looks += 1;
        let now = tunnels();
        Ok(if now >= 6 { Ok(()) } else { Err(now) })
    })
    .await?;
    println!("{} tunnels, {looks} looks", tunnels());
    echo(&kas.caller().await?, 1, "x").await?;
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
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
    testkit::kas::write_private(&dir.join("key.pem"), &key.serialize_pem())?;
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
