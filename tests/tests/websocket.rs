//! gRPC inside WebSocket: real kas and agentk, the libraries of 14.1 agents, and byte sequences of 14.1 and
//! later agents.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    bench::{self, echo, hold, payload},
    caller::frame,
    handler::path,
    kas::{AgentEntry, Kas, Options, eventually, token},
    process::{Process, find, soon},
    raw_agent::{Kind, RawAgent},
    scenario::{Scenario, requests_while_the_agent_moves},
    websocket_agent::WebSocketAgent,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// The upgrade request of an agent.
const UPGRADE: &str = "GET /-/kubernetes-agent/ HTTP/1.1\r\nHost: kas\r\nConnection: Upgrade\r\n\
     Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
const SUBPROTOCOL: &str = "Sec-WebSocket-Protocol: ws-tunnel\r\n";
/// A stalled handshake is closed after 5 s.
const CUT: Duration = Duration::from_secs(9);

fn with_websocket(listen: Value) -> Value {
    let mut listen = listen;
    listen["websocket"] = json!(true);
    json!({ "agent": { "listen": listen } })
}

#[tokio::test]
async fn agents_of_gitlab_are_served_with_any_authority() -> Result<()> {
    let authorities = [
        "ws://127.0.0.1:8150",
        "wss://gitlab.example.com/-/kubernetes-agent",
        "wss:%2F%2Fkas.example.com",
        "wss:%2F%2F%5B::1%5D:443%2F-%2Fkubernetes-agent",
        "kas.example.com:443",
    ];
    let agents = (1..=authorities.len() as i64).map(AgentEntry::new).collect();
    let config = with_websocket(json!({}));
    let Scenario { kas, caller, .. } =
        Scenario::start_with(Options { agents, config, ..Options::default() }).await?;
    for (agent, authority) in (1..).zip(authorities) {
        let (address, token) = (kas.agent, token(agent));
        let serving = tokio::task::spawn_blocking(move || {
            let mut agent = WebSocketAgent::connect(address, &token, authority)?;
            agent.configuration()?;
            agent.tunnel()?;
            agent.tunnel()?;
            agent.serve_one()?;
            agent.serve_one()?;
            agent.close()
        });
        let calls = async {
            for _ in 0..2 {
                let got = caller.call(caller.to_agent(agent, &path("Echo")), &[b"one", b"two"]).await?;
                ensure!(got.status.code() == Code::Ok, "{authority}: {}", got.status);
                assert_eq!(got.messages, ["one", "two"], "{authority}");
            }
            Ok(())
        };
        let serving =
            async { soon("the agent leaves", serving).await?.with_context(|| authority.to_owned()) };
        tokio::try_join!(serving, calls)?;
    }
    kas.metric_is("kas_tunnels_open", 0.0).await?;
    kas.metric_is("kas_connected_agents", 0.0).await?;
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

/// Builds a test program with the libraries of GitLab's agentk 14.1.
fn grpc_go(folder: &Path) -> Result<PathBuf> {
    let program = folder.join("agent");
    let output = Command::new("go")
        .args(["build", "-mod=readonly", "-trimpath", "-o"])
        .arg(&program)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("grpc-go"))
        .envs([("CGO_ENABLED", "0"), ("GOWORK", "off")])
        .output()
        .context("could not run go")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

#[tokio::test]
async fn agent_of_grpc_go_is_served() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let folder = dir.path().to_owned();
    let program = tokio::task::spawn_blocking(move || grpc_go(&folder)).await??;
    let Scenario { kas, caller, .. } = Scenario::start_with_config(with_websocket(json!({}))).await?;
    for (agent, at) in [(1, ""), (2, "/-/kubernetes-agent/")] {
        let url = format!("ws://{}{at}", kas.agent);
        let token = token(agent);
        let process = Process::start("grpc-go", &program, &[&url], &[("AGENT_TOKEN", &token)]).await?;
        // More requests than tunnels, each of which carries one.
        for size in [0, 1, 1_000, 100_000, 1_000_000].repeat(5) {
            let message = vec![b'x'; size];
            let got = caller.call(caller.to_agent(agent, &path("Echo")), &[b"one", &message]).await?;
            ensure!(got.status.code() == Code::Ok, "{url}, {size}: {}\n{}", got.status, process.log());
            assert_eq!(got.messages, [&b"one"[..], &message[..]]);
        }
        assert!(process.is_running());
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn websocket_and_plain_grpc_share_a_port() -> Result<()> {
    let kas = Kas::start_with_config(with_websocket(json!({}))).await?;
    let inside = Agentk::start_url(&format!("ws://{}/any/path", kas.agent), &token(1), None).await?;
    let beside = Agentk::start(kas.agent, &token(2)).await?;
    inside.connected().await?;
    beside.connected().await?;
    let caller = kas.caller().await?;
    for size in [0, 1, 100_000, 3_000_000] {
        echo(&caller, 1, vec![b'x'; size]).await?;
        echo(&caller, 2, vec![b'x'; size]).await?;
    }
    // A port without WebSocket says so in its response, and agentk logs it.
    let plain = Kas::start().await?;
    let agentk = Agentk::start_url(&format!("ws://{}", plain.agent), &token(1), None).await?;
    eventually("agentk says why", async || {
        let log = agentk.process.log();
        let told = log.contains("WebSocket");
        Ok(if told { Ok(()) } else { Err(log) })
    })
    .await?;
    Ok(())
}

/// Writes a CA and a certificate of it for loopback.
fn certificates(dir: &Path) -> Result<()> {
    let mut ca = rcgen::CertificateParams::new(vec![])?;
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate()?;
    let ca_certificate = ca.self_signed(&ca_key)?;
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate()?;
    let certificate =
        rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()])?.signed_by(&key, &issuer)?;
    std::fs::write(dir.join("ca.pem"), ca_certificate.pem())?;
    std::fs::write(dir.join("cert.pem"), certificate.pem())?;
    testkit::kas::write_private(&dir.join("key.pem"), &key.serialize_pem())?;
    Ok(())
}

#[tokio::test]
async fn websocket_and_plain_grpc_share_a_port_with_tls() -> Result<()> {
    let dir = tempfile::tempdir()?;
    certificates(dir.path())?;
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let listen = json!({ "certificate_file": file("cert.pem"), "key_file": file("key.pem") });
    let kas = Kas::start_with_config(with_websocket(listen)).await?;
    let ca = dir.path().join("ca.pem");
    let inside = Agentk::start_url(&format!("wss://{}", kas.agent), &token(1), Some(&ca)).await?;
    let beside = Agentk::start_url(&format!("grpcs://{}", kas.agent), &token(2), Some(&ca)).await?;
    inside.connected().await?;
    beside.connected().await?;
    let caller = kas.caller().await?;
    echo(&caller, 1, vec![b'x'; 1_000_000]).await?;
    echo(&caller, 2, vec![b'x'; 1_000_000]).await?;
    // Without the CA nothing is trusted.
    let stranger = Agentk::start_url(&format!("wss://{}", kas.agent), &token(1), None).await?;
    eventually("agentk says why", async || {
        let log = stranger.process.log();
        Ok(if log.contains("TLS with wss://") { Ok(()) } else { Err(log) })
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn connection_age_and_drain_fail_no_request_inside_websocket() -> Result<()> {
    // GOAWAY is sent at 0.35 of this, about every 0.7 s.
    let mut config = with_websocket(json!({ "max_connection_age": "2s" }));
    config["limits"] = json!({ "handshake_timeout": "1m" });
    let kas = Kas::start_with_config(config).await?;
    let agentk = Agentk::start_url(&format!("ws://{}", kas.agent), &token(1), None).await?;
    agentk.connected().await?;
    let caller = kas.caller().await?;
    let mut upload = bench::upload(&caller, 1, "one").await?;
    agentk.metric_is("agentk_tunnels_busy", 1.0).await?;
    let connections = || kas.process.log().matches("\"agent connected\"").count();
    requests_while_the_agent_moves(&caller, connections).await?;

    kas.process.terminate();
    eventually("it is not ready any more", async || {
        let status = kas.get("/readiness").await?.0;
        Ok(if status == http::StatusCode::SERVICE_UNAVAILABLE { Ok(()) } else { Err(status) })
    })
    .await?;
    echo(&kas.caller().await?, 1, vec![b'x'; 1_000]).await?;
    upload.send(frame(&payload("two"))).await.ok().context("sent")?;
    // Neither half a handshake nor an idle agent delays the exit.
    let _silent = socket(kas.agent, b"GET / HTTP/1.1\r\n").await?;
    assert_eq!(bench::uploaded(&mut upload).await?, 2);
    // Draining may take 30 s, and the handshake a minute.
    assert!(kas.process.exited(Duration::from_secs(12)).await?.success());
    Ok(())
}

/// As in GitLab's documentation: a separate location. Its timer is shorter than nginx's own 60 s, so that a
/// silence of half a minute shows that PINGs, each 15 s, are frequent enough.
#[tokio::test]
async fn idle_agent_outlasts_the_timers_of_nginx() -> Result<()> {
    let kas = Kas::start_with_config(with_websocket(json!({}))).await?;
    let dir = tempfile::tempdir()?;
    let at = dir.path().to_str().unwrap();
    // The port that the system chose for kas, on another address.
    let nginx = SocketAddr::from(([127, 0, 0, 2], kas.agent.port()));
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let paths: String = paths.iter().map(|path| format!("{path}_temp_path {at}/{path};\n")).collect();
    let config = format!(
        "daemon off; master_process off; pid {at}/pid; error_log stderr info;
        events {{ worker_connections 64; }}
        http {{
            access_log off;
            {paths}
            server {{
                listen {nginx};
                location /-/kubernetes-agent/ {{
                    proxy_pass http://{};
                    proxy_http_version 1.1;
                    proxy_read_timeout 25s;
                    proxy_send_timeout 25s;
                    proxy_set_header Upgrade $http_upgrade;
                    proxy_set_header Connection upgrade;
                    proxy_set_header Host $host;
                    proxy_set_header X-Forwarded-For $remote_addr;
                }}
            }}
        }}",
        kas.agent,
    );
    let file = dir.path().join("nginx.conf");
    std::fs::write(&file, config)?;
    let program = find("nginx").context("nginx is not installed")?;
    let _nginx =
        Process::start("nginx", &program, &["-e", "stderr", "-c", file.to_str().unwrap()], &[]).await?;
    eventually("nginx listens", async || Ok(TcpStream::connect(nginx).await.map(drop))).await?;
    let agentk = Agentk::start_url(&format!("ws://{nginx}/-/kubernetes-agent/"), &token(1), None).await?;
    agentk.connected().await?;
    let caller = kas.caller().await?;
    echo(&caller, 1, vec![b'x'; 1_000_000]).await?;
    let mut open = hold(&caller, 1).await?;

    // Only pings are sent: nginx cuts a connection that is silent for 25 s.
    let silence = tokio::time::timeout(Duration::from_secs(29), open.next_unbounded()).await;
    ensure!(silence.is_err(), "{silence:?}");
    // Another caller: the token of the first is half a minute old.
    echo(&kas.caller().await?, 1, vec![b'x'; 1_000]).await?;
    assert_eq!(kas.process.log().matches("\"agent connected\"").count(), 1);

    // A refusal of nginx is logged with the reason.
    let elsewhere = Agentk::start_url(&format!("ws://{nginx}/elsewhere"), &token(2), None).await?;
    eventually("agentk says why", async || {
        let log = elsewhere.process.log();
        Ok(if log.contains("the answer was HTTP 404 Not Found") { Ok(()) } else { Err(log) })
    })
    .await?;
    Ok(())
}

/// A socket on which `bytes` were sent.
async fn socket(address: SocketAddr, bytes: &[u8]) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(bytes).await?;
    Ok(stream)
}

/// An upgraded connection.
async fn upgraded(address: SocketAddr, headers: &str) -> Result<TcpStream> {
    let mut stream = socket(address, format!("{UPGRADE}{headers}\r\n").as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon("the upgrade is answered", stream.read_u8()).await?);
    }
    let head = String::from_utf8(head)?.to_ascii_lowercase();
    ensure!(head.starts_with("http/1.1 101 "), "{head}");
    ensure!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    ensure!(!head.contains("extensions"), "{head}");
    ensure!(head.contains("connection: upgrade\r\n") && !head.contains("close"), "{head}");
    Ok(stream)
}

/// Reads everything until kas closes the connection.
async fn rest(mut stream: TcpStream) -> Result<Vec<u8>> {
    let mut got = Vec::new();
    // A reset is an end too: kas does not read data after a violation.
    let _ = tokio::time::timeout(CUT, stream.read_to_end(&mut got)).await.context("it stays open")?;
    Ok(got)
}

#[tokio::test]
async fn invalid_websocket_clients_are_closed_and_leave_nothing_behind() -> Result<()> {
    let kas = Kas::start_with_config(with_websocket(json!({}))).await?;
    let agentk = Agentk::start_url(&format!("ws://{}", kas.agent), &token(1), None).await?;
    agentk.connected().await?;
    let mask = [0; 4];
    let masked =
        |first: u8, payload: &[u8]| [&[first, 0x80 | payload.len() as u8][..], &mask, payload].concat();

    // Invalid frames, closed with the reason.
    let too_long = [&[0x82, 0xff][..], &(11_u64 << 20).to_be_bytes(), &mask].concat();
    for (bytes, code) in [
        (masked(0x81, b"text"), 1003_u16),
        (b"\x82\x03abc".to_vec(), 1002),
        (too_long, 1009),
        (masked(0xc2, b"compressed"), 1002),
    ] {
        let mut stream = upgraded(kas.agent, SUBPROTOCOL).await?;
        stream.write_all(&bytes).await?;
        let got = rest(stream).await?;
        let close = got.windows(4).any(|w| w[0] == 0x88 && w[2..] == code.to_be_bytes());
        assert!(close, "{code}: {got:?}");
    }

    // Garbage instead of HTTP/2, at once and byte by byte.
    let mut stream = upgraded(kas.agent, SUBPROTOCOL).await?;
    stream.write_all(&masked(0x82, b"GET / HTTP/1.1\r\n\r\nwhat is this?\r\n")).await?;
    rest(stream).await?;
    let mut stream = upgraded(kas.agent, SUBPROTOCOL).await?;
    for _ in 0..100 {
        if stream.write_all(&masked(0x82, b"x")).await.is_err() {
            break;
        }
    }
    rest(stream).await?;

    // A close frame is answered.
    let mut stream = upgraded(kas.agent, SUBPROTOCOL).await?;
    stream.write_all(&masked(0x88, &1000_u16.to_be_bytes())).await?;
    let got = rest(stream).await?;
    assert!(got.windows(4).any(|w| w == [0x88, 2, 0x03, 0xe8]), "{got:?}");

    // No subprotocol: the message of 14.1.
    let got = rest(upgraded(kas.agent, "").await?).await?;
    assert_eq!(got[..4], [0x88, got.len() as u8 - 2, 0x03, 0xea]);
    assert_eq!(&got[4..], br#"Expecting "ws-tunnel" subprotocol, got """#);

    // Other HTTP requests.
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: kas\r\n\r\n".to_owned(), "426"),
        (format!("{UPGRADE}{SUBPROTOCOL}Origin: https://evil.example\r\n\r\n"), "403"),
        (format!("{UPGRADE}\r\n").replace("Version: 13", "Version: 8"), "400"),
        (format!("GET / HTTP/1.1\r\nHost: kas\r\n{}\r\n", "A: b\r\n".repeat(1000)), "431"),
        (format!("GET /{} HTTP/1.1\r\nHost: kas\r\n\r\n", "a".repeat(100_000)), "4"),
    ] {
        let got = rest(socket(kas.agent, request.as_bytes()).await?).await?;
        let got = String::from_utf8_lossy(&got).into_owned();
        assert!(got.is_empty() || got.starts_with(&format!("HTTP/1.1 {status}")), "{got}");
    }

    // Connections that stall: nothing at all, half a preface, half a request, half of TLS, and a silent
    // upgrade.
    let (nothing, preface, request, tls) = tokio::try_join!(
        socket(kas.agent, b""),
        socket(kas.agent, b"PR"),
        socket(kas.agent, b"GET / HTTP/1.1\r\nHo"),
        socket(kas.agent, b"\x16\x03\x01"),
    )?;
    for ended in futures_util::future::join_all([nothing, preface, request, tls].map(rest)).await {
        ended?;
    }

    // One connection is left and works, and so does one without WebSocket.
    eventually("only agentk is connected", async || {
        let open = kas.metric("kas_agent_transports").await?;
        Ok(if open <= 1.0 { Ok(()) } else { Err(open) })
    })
    .await?;
    echo(&kas.caller().await?, 1, vec![b'x'; 1_000]).await?;
    let plain = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let _serving = plain.serve(1).await?;
    let caller = kas.caller().await?;
    assert_eq!(caller.call(caller.to_agent(2, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    Ok(())
}
