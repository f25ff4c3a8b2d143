//! Upgrades in HTTP/2, by extended CONNECT (RFC 8441): no kubectl does that, but balancers do. The client
//! here is that of the HTTP/2 library.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
    ext::Protocol,
};
use http::{Method, Request, StatusCode, header};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    kas::{Kas, token},
    process::SOON,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

use crate::{
    clients::{Files, JANE, POD, Workload},
    exec::found_tools,
    setup::{AGENT, exclusive},
    upgrades,
};

/// A connection of HTTP/2.
struct Client {
    send: SendRequest<Bytes>,
    _connection: JoinSet<Result<(), h2::Error>>,
}

impl Client {
    /// Connects with TLS.
    async fn connect(address: SocketAddr, ca: &Path) -> Result<Self> {
        let name = ServerName::from(address.ip());
        let connector = TlsConnector::from(net::tls::client(Some(ca))?);
        Self::start(connector.connect(name, TcpStream::connect(address).await?).await?).await
    }

    /// Waits for the settings of the server, which announce extended CONNECT.
    async fn start<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(stream: S) -> Result<Self> {
        let (mut send, connection) = h2::client::handshake(stream).await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        send = send.ready().await?;
        let (ready, _) = send.send_request(Request::get("https://kas/-/ready").body(())?, true)?;
        ensure!(timeout(SOON, ready).await.context("no answer")??.status() == StatusCode::OK);
        ensure!(send.is_extended_connect_protocol_enabled(), "extended CONNECT is not announced");
        Ok(Self { send, _connection: tasks })
    }

    /// Sends a request for an upgrade to a path of the agent.
    async fn ask(
        &mut self,
        protocol: &'static str,
        target: &str,
    ) -> Result<(ResponseFuture, SendStream<Bytes>)> {
        let mut request = Request::builder()
            .method(Method::CONNECT)
            .uri(format!("https://kas/agents/{AGENT}{target}"))
            .header(header::AUTHORIZATION, format!("Bearer {}", JANE.token))
            .header(header::SEC_WEBSOCKET_PROTOCOL, "v5.channel.k8s.io")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .body(())?;
        request.extensions_mut().insert(Protocol::from_static(protocol));
        Ok(self.send.clone().ready().await?.send_request(request, false)?)
    }
}

/// A stream that was taken over.
struct Stream {
    send: SendStream<Bytes>,
    receive: RecvStream,
    read: Vec<u8>,
}

impl Stream {
    async fn open(answer: ResponseFuture, send: SendStream<Bytes>) -> Result<Self> {
        let answer = timeout(SOON, answer).await.context("no answer")??;
        ensure!(answer.status() == StatusCode::OK, "{answer:?}");
        for name in [header::CONNECTION, header::UPGRADE, header::SEC_WEBSOCKET_ACCEPT] {
            ensure!(!answer.headers().contains_key(&name), "{answer:?}");
        }
        Ok(Self { send, receive: answer.into_body(), read: Vec::new() })
    }

    fn write(&mut self, bytes: impl Into<Bytes>) -> Result<()> {
        Ok(self.send.send_data(bytes.into(), false)?)
    }

    /// Reads more. `false`: the stream has ended.
    async fn more(&mut self) -> Result<bool> {
        let Some(data) = timeout(SOON, self.receive.data()).await.context("nothing came")? else {
            return Ok(false);
        };
        let data = data?;
        self.receive.flow_control().release_capacity(data.len())?;
        self.read.extend_from_slice(&data);
        Ok(true)
    }

    async fn exactly(&mut self, count: usize) -> Result<Vec<u8>> {
        while self.read.len() < count {
            ensure!(self.more().await?, "the stream has ended: {:?}", self.read);
        }
        let rest = self.read.split_off(count);
        Ok(std::mem::replace(&mut self.read, rest))
    }

    /// Reads to the regular end.
    async fn rest(mut self) -> Result<Vec<u8>> {
        while self.more().await? {}
        Ok(self.read)
    }

    /// Writes a binary message of WebSocket; shorter than 126 bytes.
    fn message(&mut self, channel: u8, data: &[u8]) -> Result<()> {
        let length = u8::try_from(data.len() + 1)?;
        // A client masks; this mask changes nothing.
        let mut frame = vec![0x82, 0x80 | length, 0, 0, 0, 0, channel];
        frame.extend_from_slice(data);
        self.write(frame)
    }

    /// Reads a frame of WebSocket: its opcode and payload.
    async fn frame(&mut self) -> Result<(u8, Vec<u8>)> {
        let head = self.exactly(2).await?;
        let length = match head[1] {
            126 => {
                let length = self.exactly(2).await?;
                usize::from(u16::from_be_bytes([length[0], length[1]]))
            }
            length @ 0..126 => usize::from(length),
            length => anyhow::bail!("an unexpected length: {length}"),
        };
        Ok((head[0] & 0x0f, self.exactly(length).await?))
    }
}

/// `kubectl exec` as a balancer with HTTP/2 passes it on, to a real API server and a kubelet.
#[tokio::test]
async fn exec_works_by_extended_connect_with_a_real_api_server() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let tools = found_tools().await?;
    let files = Files::new()?;
    let kas = Kas::start_with_config(files.config()).await?;
    let address = testkit::endpoint::address(&kas).await?;
    let workload = Workload::start(kubernetes, &tools, "connect").await?;
    let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &workload.kubeconfig).await?;
    agentk.connected().await?;

    let mut client = Client::connect(address, files.ca()).await?;
    let exec = |script: &str| {
        format!(
            "/api/v1/namespaces/connect/pods/{POD}/exec?command=sh&command=-c&command={script}&stdin=true&stdout=true\
             &stderr=true"
        )
    };
    // Two at once, on one connection.
    let script = exec("cat%3Becho%20err%20%3E%262%3Bexit%207");
    let mut open = Vec::new();
    for _ in 0..2 {
        let (answer, send) = client.ask("websocket", &script).await?;
        open.push(Stream::open(answer, send).await?);
    }
    for round in 0..3 {
        for (at, stream) in open.iter_mut().enumerate() {
            let line = format!("line {round} of {at}\n");
            stream.message(0, line.as_bytes())?;
            let mut output = Vec::new();
            while output.len() < line.len() {
                let (opcode, payload) = stream.frame().await?;
                let (channel, data) = payload.split_first().context("a message has a channel")?;
                // Empty messages announce the channels.
                ensure!(opcode == 2 && (*channel == 1 || data.is_empty()), "{opcode} {payload:?}");
                output.extend_from_slice(data);
            }
            ensure!(output == line.as_bytes(), "{output:?}");
        }
    }
    for mut stream in open {
        // The end of the standard input, in the protocol's version 5.
        stream.message(255, &[0])?;
        let (mut errors, mut status) = (Vec::new(), Vec::new());
        loop {
            let (opcode, payload) = stream.frame().await?;
            match (opcode, payload.split_first()) {
                (8, _) => break,
                (_, Some((2, data))) => errors.extend_from_slice(data),
                (_, Some((3, data))) => status.extend_from_slice(data),
                _ => {}
            }
        }
        ensure!(errors == b"err\n", "{:?}", String::from_utf8_lossy(&errors));
        let status: Value = serde_json::from_slice(&status)?;
        ensure!(status["details"]["causes"][0]["message"] == "7", "{status}");
        stream.send.send_data(Bytes::new(), true)?;
        stream.rest().await?;
    }
    let lines = files.audited_since("end", "upgrade", 0, 2).await?;
    for line in &lines {
        ensure!(
            line["upgrade"] == "websocket"
                && line["http_status"] == 200
                && line["resource"] == "pods/exec"
                && line["subject"] == JANE.name,
            "{line}"
        );
    }

    // What the API server refuses is an answer like any other.
    let (answer, _send) =
        client.ask("websocket", "/api/v1/namespaces/connect/pods/missing/exec?command=x").await?;
    let answer = timeout(SOON, answer).await.context("no answer")??;
    ensure!(answer.status() == StatusCode::NOT_FOUND, "{answer:?}");
    let (answer, _send) = client.ask("connect-udp", &script).await?;
    let answer = timeout(SOON, answer).await.context("no answer")??;
    ensure!(answer.status() == StatusCode::NOT_IMPLEMENTED, "{answer:?}");
    kas.metric_is("kas_kubernetes_open{kind=\"upgrade\"}", 0.0).await
}

#[tokio::test]
async fn a_stream_that_was_taken_over_outlasts_the_drain_and_is_told_the_end_of_its_grace() -> Result<()> {
    let drain = json!({ "delay": "0s", "timeout": "100ms", "upgrade_grace": "3s" });
    let endpoint = upgrades::Endpoint::start(drain).await?;
    let mut client = Client::start(TcpStream::connect(endpoint.served.address).await?).await?;
    let target = "/api/v1/namespaces/a/pods/b/exec?command=sh";
    let (answer, send) = client.ask("websocket", target).await?;
    let mut api = endpoint.switches("GET", target, "websocket").await?;
    let mut stream = Stream::open(answer, send).await?;
    let (answer, send) = client.ask("spdy/3.1", target).await?;
    let mut other = endpoint.switches("POST", target, "SPDY/3.1").await?;
    let spdy = Stream::open(answer, send).await?;

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
    stream.write(&b"after"[..])?;
    let mut got = [0; 5];
    timeout(SOON, api.read_exact(&mut got)).await.context("the bytes did not come")??;
    ensure!(&got == b"after", "{got:?}");
    api.write_all(b"\x82\x02ok").await?;
    ensure!(stream.exactly(4).await? == b"\x82\x02ok");
    // Close, 1001. There is nothing like it in SPDY.
    assert_eq!(stream.rest().await?, [0x88, 2, 3, 233]);
    let error = spdy.rest().await.err().context("a reset")?;
    let reason = error.downcast_ref::<h2::Error>().and_then(h2::Error::reason);
    ensure!(reason == Some(Reason::CANCEL), "{error:?}");
    for api in [&mut api, &mut other] {
        let read = timeout(SOON, api.read_to_end(&mut Vec::new())).await.context("no end came")?;
        ensure!(read.is_err(), "the API server sees a reset");
    }
    let status = endpoint.served.kas.process.exited(Duration::from_secs(20)).await?;
    ensure!(status.success(), "{status}");
    let line = endpoint.ended()?;
    assert_eq!((&line["ended_by"], &line["http_status"]), (&"drain".into(), &200.into()), "{line}");
    Ok(())
}
