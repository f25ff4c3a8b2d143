//! Upgraded connections through real processes, to an API server that the test plays. So each end of a
//! connection can be checked, which kubectl and a kubelet do not show.
//!
//! kubectl itself is in [`exec`](crate::exec).

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    endpoint::{self, JANE},
    kas::token,
    process::SOON,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tungstenite::handshake::derive_accept_key;

use crate::setup::AGENT;

/// A kas with the endpoint, and an agentk whose API server is this test.
pub(crate) struct Endpoint {
    pub(crate) served: endpoint::Endpoint,
    api_server: TcpListener,
    _agentk: Agentk,
}

impl Endpoint {
    pub(crate) async fn start(drain: Value) -> Result<Self> {
        let served = endpoint::Endpoint::start_audited(json!({ "drain": drain })).await?;
        let api_server = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", api_server.local_addr()?);
        let agentk = Agentk::start_with(served.kas.agent, &token(AGENT), &url).await?;
        agentk.connected().await?;
        Ok(Self { served, api_server, _agentk: agentk })
    }

    /// Opens an upgraded connection. Returns its end at the client, and that at the API server.
    async fn upgrade(&self, method: &str, protocol: &str) -> Result<(TcpStream, TcpStream)> {
        let mut client = TcpStream::connect(self.served.address).await?;
        let request = format!(
            "{method} /agents/{AGENT}/api/v1/namespaces/a/pods/b/exec?command=sh HTTP/1.1\r\nHost: kas\r\nAuthorization: \
             Bearer {JANE}\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\nX-Stream-Protocol-Version: v4\r\n\r\n"
        );
        client.write_all(request.as_bytes()).await?;
        let target = "/api/v1/namespaces/a/pods/b/exec?command=sh";
        let api = self.switches(method, target, protocol).await?;
        let head = self::head(&mut client).await?;
        ensure!(head.starts_with("HTTP/1.1 101 "), "{head}");
        ensure!(head.contains("x-stream-protocol-version: v4\r\n"), "{head}");
        Ok((client, api))
    }

    /// The API server upgrades the next connection, for which there must be this request.
    pub(crate) async fn switches(&self, method: &str, target: &str, protocol: &str) -> Result<TcpStream> {
        let (mut api, _) = timeout(SOON, self.api_server.accept()).await.context("no request came")??;
        let head = head(&mut api).await?;
        ensure!(head.starts_with(&format!("{method} {target} ")), "{head}");
        ensure!(head.contains(&format!("upgrade: {protocol}\r\n")), "{head}");
        ensure!(!head.contains(JANE) && !head.contains("transfer-encoding"), "{head}");
        let mut answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\nX-Stream-Protocol-Version: \
             v4\r\n"
        );
        if let Some((_, rest)) = head.split_once("sec-websocket-key: ") {
            let (key, _) = rest.split_once("\r\n").context("a header has an end")?;
            answer += &format!("Sec-WebSocket-Accept: {}\r\n", derive_accept_key(key.as_bytes()));
        }
        api.write_all(format!("{answer}\r\n").as_bytes()).await?;
        Ok(api)
    }

    /// Returns the line of the audit log about the end of the upgrade.
    pub(crate) fn ended(&self) -> Result<Value> {
        let mut lines = self.served.audited()?;
        let is_it = |line: &Value| line["event"] == "end" && line["kind"] == "upgrade";
        let at = lines.iter().position(is_it).with_context(|| format!("no upgrade has ended: {lines:?}"))?;
        Ok(lines.swap_remove(at))
    }
}

/// Reads the head of a message of HTTP.
async fn head(stream: &mut TcpStream) -> Result<String> {
    let mut head = Vec::new();
    let read = async {
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        anyhow::Ok(())
    };
    timeout(SOON, read).await.context("no head came")??;
    Ok(String::from_utf8(head)?)
}

/// Sends this from one end to the other.
async fn passes(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let mut got = vec![0; bytes.len()];
    let both = async { tokio::try_join!(from.write_all(bytes), to.read_exact(&mut got)) };
    timeout(SOON, both).await.context("the bytes did not come")??;
    ensure!(got == bytes, "{} bytes are not equal", bytes.len());
    Ok(())
}

/// Reads to the regular end of a connection.
async fn rest(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut got = Vec::new();
    timeout(SOON, stream.read_to_end(&mut got)).await.context("no end came")??;
    Ok(got)
}

#[tokio::test]
async fn bytes_pass_unchanged_and_ends_are_passed_on() -> Result<()> {
    let endpoint = Endpoint::start(json!({})).await?;
    let large: Vec<u8> = (0..16_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (method, protocol) in [("GET", "websocket"), ("POST", "SPDY/3.1")] {
        let (mut client, mut api) = endpoint.upgrade(method, protocol).await?;
        passes(&mut client, &mut api, &large).await?;
        passes(&mut api, &mut client, &large).await?;
        for n in 0..100 {
            passes(&mut client, &mut api, &large[n..2 * n + 1]).await?;
            passes(&mut api, &mut client, &large[n..3 * n + 1]).await?;
        }
        // The client finishes first, and then the API server.
        client.shutdown().await?;
        ensure!(rest(&mut api).await?.is_empty());
        api.write_all(b"last").await?;
        api.shutdown().await?;
        assert_eq!(rest(&mut client).await?, b"last");
    }
    // A client that is gone ends what it has begun.
    let (client, mut api) = endpoint.upgrade("POST", "SPDY/3.1").await?;
    client.set_zero_linger()?;
    drop(client);
    ensure!(rest(&mut api).await.is_err(), "the API server sees a reset");
    // An API server that breaks is not taken for one that has finished.
    let (mut client, api) = endpoint.upgrade("POST", "SPDY/3.1").await?;
    api.set_zero_linger()?;
    drop(api);
    ensure!(rest(&mut client).await.is_err(), "the client sees a reset");
    endpoint.served.kas.metric_is("kas_kubernetes_open{kind=\"upgrade\"}", 0.0).await?;
    Ok(())
}

#[tokio::test]
async fn an_upgraded_connection_outlasts_the_drain_and_is_told_the_end_of_its_grace() -> Result<()> {
    let drain = json!({ "delay": "0s", "timeout": "100ms", "upgrade_grace": "3s" });
    let endpoint = Endpoint::start(drain).await?;
    let (mut client, mut api) = endpoint.upgrade("GET", "websocket").await?;
    passes(&mut client, &mut api, b"before").await?;
    endpoint.served.kas.process.terminate();
    endpoint
        .served
        .kas
        .process
        .logged("that it waits", |line| {
            let message = line["message"].as_str().unwrap_or_default();
            message.starts_with("drain timeout exceeded: upgraded connections go on").then_some(())
        })
        .await?;
    passes(&mut client, &mut api, b"after").await?;
    passes(&mut api, &mut client, b"\x82\x02ok").await?;
    // Close, 1001.
    assert_eq!(rest(&mut client).await?, [0x88, 2, 3, 233]);
    ensure!(rest(&mut api).await.is_err(), "the API server sees a reset");
    let status = endpoint.served.kas.process.exited(Duration::from_secs(20)).await?;
    ensure!(status.success(), "{status}");
    let line = endpoint.ended()?;
    assert_eq!(
        (&line["ended_by"], &line["http_status"], &line["upgrade"]),
        (&"drain".into(), &101.into(), &"websocket".into()),
        "{line}"
    );
    assert_eq!((&line["verb"], &line["resource"]), (&"get".into(), &"pods/exec".into()), "{line}");
    Ok(())
}
