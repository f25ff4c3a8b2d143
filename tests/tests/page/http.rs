//! The page without a browser: its responses, the limit of viewers, and its cost.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    kas::{Kas, eventually},
    process::soon,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// A viewer.
struct Stream {
    socket: TcpStream,
    text: String,
}

impl Stream {
    /// Requests events and reads until the response head is complete.
    async fn open(kas: &Kas, path: &str) -> Result<Self> {
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

    fn status(&self) -> &str {
        self.text.get(9..12).unwrap_or_default()
    }

    /// Returns the data of the first event of this name.
    async fn event(&mut self, name: &str) -> Result<Value> {
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
