//! The page without a browser: its responses, the limit of viewers, and its cost.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    endpoint::{self, JANE},
    kas::{Kas, eventually, token},
    process::soon,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// A viewer.
pub(crate) struct Stream {
    socket: TcpStream,
    text: String,
}

impl Stream {
    /// Requests events and reads until the response head is complete.
    pub(crate) async fn open(kas: &Kas, path: &str) -> Result<Self> {
        let mut socket = TcpStream::connect(kas.observability).await?;
        socket.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await?;
        let mut stream = Self { socket, text: String::new() };
        stream.until("\r\n\r\n").await?;
        Ok(stream)
    }

    /// Reads until a text has arrived.
    async fn until(&mut self, text: &str) -> Result<()> {
        soon("something of a stream", async {
            while !self.text.contains(text) {
                let mut bytes = vec![0; 16 << 10];
                let n = self.socket.read(&mut bytes).await?;
                ensure!(n > 0, "it ended: {}", self.text);
                self.text.push_str(&String::from_utf8_lossy(&bytes[..n]));
            }
            Ok(())
        })
        .await
    }

    /// Returns what has arrived and was not taken.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    fn status(&self) -> &str {
        self.text.get(9..12).unwrap_or_default()
    }

    /// Returns the data of the first event of this name.
    pub(crate) async fn event(&mut self, name: &str) -> Result<Value> {
        let begin = format!("event: {name}\ndata: ");
        self.until(&begin).await?;
        let at = self.text.find(&begin).context("it is there")?;
        self.text.drain(..at + begin.len());
        self.until("\n\n").await?;
        let (data, _) = self.text.split_once("\n\n").context("it is complete")?;
        Ok(serde_json::from_str(data)?)
    }
}

async fn kas(page: Value) -> Result<Kas> {
    Kas::start_with_config(json!({ "observability": { "page": page } })).await
}

#[tokio::test]
async fn page_is_disabled_by_default() -> Result<()> {
    let kas = kas(json!({})).await?;
    for path in ["/page", "/page/", "/page/events", "/page/page.js"] {
        let (status, text) = kas.get(path).await?;
        ensure!(status == 404 && !text.contains("page"), "{path}: {status} {text}");
    }
    Ok(())
}

#[tokio::test]
async fn viewers_are_limited_and_cost_nothing_after_they_disconnect() -> Result<()> {
    let kas = kas(json!({ "enabled": true, "viewers": 2 })).await?;
    let mut first = Stream::open(&kas, "/page/events").await?;
    let second = Stream::open(&kas, "/page/events?agent=1").await?;
    ensure!(first.status() == "200" && second.status() == "200");
    let overview = first.event("overview").await?;
    ensure!(overview["replicas"][0]["standing"] == "self", "{overview}");
    ensure!(overview["replicas"][0]["open"] == 0, "{overview}");
    kas.metric_is("kas_page_viewers", 2.0).await?;
    // Some seconds after its start, kas runs all tasks that it needs without viewers, plus three: the
    // connections of the two streams and what they share. The task of a probe ends a moment after its
    // response, so the minimum counts.
    for _ in 0..5 {
        first.event("overview").await?;
    }
    let mut with_viewers = f64::INFINITY;
    for _ in 0..20 {
        with_viewers = with_viewers.min(kas.metric("kas_tasks").await?);
    }
    let refused = Stream::open(&kas, "/page/events").await?;
    ensure!(refused.status() == "503" && refused.text.contains("retry-after: 5"), "{}", refused.text);
    kas.metric_is("kas_page_viewers_refused_total", 1.0).await?;
    // Probes are not affected.
    ensure!(kas.get("/liveness").await?.0 == 200);
    drop((first, second, refused));
    kas.metric_is("kas_page_viewers", 0.0).await?;
    ensure!(Stream::open(&kas, "/page/events").await?.status() == "200");
    eventually("no tasks are left without viewers", async || {
        let now = kas.metric("kas_tasks").await?;
        Ok(if now <= with_viewers - 3.0 { Ok(()) } else { Err((with_viewers, now)) })
    })
    .await
}

#[tokio::test]
async fn page_of_an_agent_has_the_data_of_kasctl_why() -> Result<()> {
    let kas = kas(json!({ "enabled": true })).await?;
    let mut stream = Stream::open(&kas, "/page/events?agent=7").await?;
    let why = stream.event("why").await?;
    ensure!(why["agent"] == "7", "{why}");
    let route = why["route"].as_array().context("a way")?;
    ensure!(route[0] == "no tunnel of agent 7 is here", "{why}");
    Ok(())
}

#[tokio::test]
async fn page_shows_no_secret_and_no_address_of_agents() -> Result<()> {
    let kas = kas(json!({ "enabled": true })).await?;
    let agentk = testkit::agentk::Agentk::start(kas.agent, &testkit::kas::token(1)).await?;
    agentk.connected().await?;
    let mut stream = Stream::open(&kas, "/page/events?agent=1").await?;
    stream.event("why").await?;
    let mut stream = Stream::open(&kas, "/page/events").await?;
    let text = eventually("the agent is listed", async || {
        let agents = stream.event("agents").await?;
        let listed = agents["connections"].as_array().is_some_and(|all| !all.is_empty());
        Ok(if listed { Ok(agents.to_string()) } else { Err(agents) })
    })
    .await?;
    let agent: Value = serde_json::from_str(&text)?;
    let keys: Vec<&String> = agent["connections"][0].as_object().context("an object")?.keys().collect();
    ensure!(
        keys == ["agent", "name", "project", "pod", "version", "since", "replica", "unconfirmed", "holders"],
        "what is shown has changed: {keys:?}"
    );
    ensure!(!text.contains(&testkit::kas::token(1)));
    Ok(())
}

/// A kas with the page and the endpoint for kubectl, and an agentk whose API server is the test.
struct Endpoint {
    served: endpoint::Endpoint,
    api_server: TcpListener,
    _agentk: Agentk,
}

impl Endpoint {
    async fn start(page: Value) -> Result<Self> {
        let served = endpoint::Endpoint::start(json!({ "observability": { "page": page } })).await?;
        let api_server = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", api_server.local_addr()?);
        let agentk = Agentk::start_with(served.kas.agent, &token(1), &url).await?;
        agentk.connected().await?;
        Ok(Self { served, api_server, _agentk: agentk })
    }

    /// Begins a watch. Returns its end at the client, and that at the API server.
    async fn watch(&self) -> Result<(TcpStream, TcpStream)> {
        let mut client = TcpStream::connect(self.served.address).await?;
        let request = format!(
            "GET /agents/1/api/v1/pods?watch=1 HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {JANE}\r\n\r\n"
        );
        client.write_all(request.as_bytes()).await?;
        let (mut api, _) = soon("the watch comes", self.api_server.accept()).await?;
        read_head(&mut api).await?;
        let answer =
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        api.write_all(answer.as_bytes()).await?;
        let head = read_head(&mut client).await?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
        Ok((client, api))
    }
}

/// Reads the head of a message of HTTP.
async fn read_head(stream: &mut TcpStream) -> Result<String> {
    soon("a head", async {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        Ok(String::from_utf8(head)?)
    })
    .await
}

/// Waits for an event `long` with this number of open watches of users of the users file, and returns it.
async fn watches(stream: &mut Stream, open: u64) -> Result<Value> {
    let counts =
        if open == 0 { json!([]) } else { json!([{ "kind": "watch", "source": "file", "open": open }]) };
    eventually("the watches are counted", async || {
        let long = stream.event("long").await?;
        Ok(if long["counts"] == counts { Ok(long) } else { Err(long) })
    })
    .await
}

#[tokio::test]
async fn long_requests_are_counted_without_the_names_of_their_callers() -> Result<()> {
    let endpoint = Endpoint::start(json!({ "enabled": true })).await?;
    let mut stream = Stream::open(&endpoint.served.kas, "/page/events").await?;
    watches(&mut stream, 0).await?;
    let (client, api) = endpoint.watch().await?;
    let long = watches(&mut stream, 1).await?;
    ensure!(long["callers"].is_null() && long["omitted"] == 0, "{long}");
    // A viewer that comes later has it, too.
    let mut later = Stream::open(&endpoint.served.kas, "/page/events").await?;
    let long = watches(&mut later, 1).await?;
    ensure!(!long.to_string().contains("jane"), "{long}");
    drop((client, api));
    watches(&mut stream, 0).await?;
    Ok(())
}

#[tokio::test]
async fn callers_of_long_requests_are_named_if_the_configuration_says_so() -> Result<()> {
    let endpoint = Endpoint::start(json!({ "enabled": true, "callers": true })).await?;
    let mut stream = Stream::open(&endpoint.served.kas, "/page/events").await?;
    let _watch = endpoint.watch().await?;
    let long = watches(&mut stream, 1).await?;
    let caller = json!({ "name": "kas:jane", "source": "file", "kind": "watch", "agent": "1", "open": 1 });
    ensure!(long["callers"] == json!([caller]), "{long}");
    Ok(())
}

#[tokio::test]
async fn a_kas_without_the_endpoint_has_no_long_requests() -> Result<()> {
    let kas = kas(json!({ "enabled": true })).await?;
    let mut stream = Stream::open(&kas, "/page/events").await?;
    let long = stream.event("long").await?;
    ensure!(long.is_null(), "{long}");
    Ok(())
}

#[tokio::test]
async fn unknown_host_names_are_refused_until_they_are_configured() -> Result<()> {
    let kas = kas(json!({ "enabled": true, "hosts": ["kas.example.com"] })).await?;
    for (host, status) in [("evil.example", "421"), ("kas.example.com", "200"), ("127.0.0.1:1", "200")] {
        let mut socket = TcpStream::connect(kas.observability).await?;
        let request = format!("GET /page/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        soon("an answer", socket.read_to_string(&mut text)).await?;
        ensure!(text.get(9..12) == Some(status), "{host}: {text:.300}");
        if status == "421" {
            ensure!(text.contains("observability.page.hosts"), "{text}");
        }
    }
    Ok(())
}
