//! `cargo xtask bench watches`: what open watches of one agent cost, and whether `kubectl exec` still opens
//! beside them.
//!
//! The client speaks HTTP/2 to the Kubernetes API endpoint, and agentk uses TLS to the API server, as in a
//! cluster. Each watch gets one event and is then silent.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use h2::{RecvStream, client::SendRequest};
use http::{Request, StatusCode};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use super::{
    child::Process,
    environment::{AgentOptions, ApiServer, Environment, KasOptions, KubernetesOptions, user_token},
    report::{EXEC_BESIDE_WATCHES, Output, Values, WATCH_AGENTK, WATCH_KAS, finish, median, short},
    static_server::{TERMINAL, WATCH, exec},
};

#[derive(Debug, clap::Args)]
pub(crate) struct WatchesArgs {
    /// Number of watches; four fifths of the most tunnels of an agent can be used by them
    #[arg(long, default_value_t = 1_500, value_parser = clap::value_parser!(u32).range(1..=1_590))]
    watches: u32,
    #[command(flatten)]
    output: Output,
}

/// Tunnels that the agent may hold: the most that can be configured.
const TUNNELS: u32 = 2_000;
/// Watches of one connection. kas allows 250 streams.
const STREAMS: usize = 200;
/// Upgraded connections that are opened beside the watches, one after the other.
const EXECS: usize = 20;
/// Time limit of each step.
const STEP: Duration = Duration::from_secs(30);
/// The time in which memory that is used only while watches open is freed.
const SETTLE: Duration = Duration::from_secs(3);
const AGENT: i64 = 1;

/// The memory of both programs, in KiB.
#[derive(Clone, Copy, Debug)]
struct Memory {
    kas: u64,
    agentk: u64,
}

impl Memory {
    fn of(kas: &Process, agentk: &Process) -> anyhow::Result<Self> {
        Ok(Self { kas: kas.rss()?, agentk: agentk.rss()? })
    }
}

/// The client of the endpoint.
struct Client {
    address: SocketAddr,
    token: String,
}

impl Client {
    fn request(&self, target: &str) -> anyhow::Result<Request<()>> {
        Ok(Request::get(format!("http://{}/agents/{AGENT}{target}", self.address))
            .header("authorization", format!("Bearer {}", self.token))
            .header("user-agent", "bench")
            .body(())?)
    }

    async fn connect(&self) -> anyhow::Result<SendRequest<Bytes>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = h2::client::handshake(stream).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                eprintln!("a connection of the client ended: {error}");
            }
        });
        Ok(sender)
    }

    /// Opens a watch, and waits for its event.
    async fn watch(&self, sender: &SendRequest<Bytes>) -> anyhow::Result<RecvStream> {
        let mut sender = sender.clone().ready().await?;
        let (response, _) = sender.send_request(self.request(WATCH)?, true)?;
        let response = response.await?;
        let status = response.status();
        let mut body = response.into_body();
        let first = body.data().await.context("it ended before its first event")??;
        ensure!(status == StatusCode::OK, "status {status}: {}", String::from_utf8_lossy(&first));
        body.flow_control().release_capacity(first.len())?;
        Ok(body)
    }

    /// Opens an upgraded connection, and sends a byte to the API server and back.
    async fn exec(&self) -> anyhow::Result<()> {
        let mut stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /agents/{AGENT}{} HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {}\r\n\
             Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n",
            exec(TERMINAL),
            self.token
        );
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer
                .push(stream.read_u8().await.with_context(|| String::from_utf8_lossy(&answer).into_owned())?);
        }
        ensure!(answer.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&answer));
        stream.write_all(b"x").await?;
        ensure!(stream.read_u8().await? == b'x', "another byte came back");
        Ok(())
    }
}

pub(super) fn run(args: &WatchesArgs) -> anyhow::Result<()> {
    process::open_files::raise_limit();
    let environment = Environment::new()?;
    let server = environment.static_server()?;
    let kubernetes = KubernetesOptions { tls: false, tunnels: Some(TUNNELS) };
    let kas =
        environment.kas("kas", &KasOptions { kubernetes: Some(kubernetes), ..KasOptions::default() })?;
    let client =
        Client { address: kas.kubernetes.context("the endpoint is on")?, token: user_token().to_owned() };
    let options = AgentOptions {
        max_tunnels: Some(TUNNELS as usize),
        api_server: Some(ApiServer { address: server.tls, ca_file: Some(environment.certificate()) }),
        ..AgentOptions::default()
    };
    let agentk = environment.agentk(&kas, AGENT, &options)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(&client, args.watches, &kas.process, &agentk));
    let measured = measured.with_context(|| format!("logs:\n{}\n\n{}", kas.process.tail(), agentk.tail()))?;
    let command = format!("cargo xtask bench watches --watches {}", args.watches);
    finish(&measured.values(), &measured.table(), "watches", &command, &args.output)
}

/// The results.
#[derive(Debug)]
struct Measured {
    watches: u32,
    before: Memory,
    after: Memory,
    /// The time to open all watches.
    opened: Duration,
    /// The median time to open an upgraded connection, without watches and beside them.
    exec: [Duration; 2],
}

async fn measure(client: &Client, watches: u32, kas: &Process, agentk: &Process) -> anyhow::Result<Measured> {
    let first = client.connect().await?;
    let deadline = Instant::now() + STEP;
    loop {
        match timeout(STEP, client.watch(&first)).await? {
            Ok(_) => break,
            Err(error) if Instant::now() >= deadline => {
                return Err(error.context("the agent does not connect"));
            }
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
    let alone = execs(client).await?;
    sleep(SETTLE).await;
    let before = Memory::of(kas, agentk)?;
    let begin = Instant::now();
    let mut open = Vec::with_capacity(watches as usize);
    let mut sender = first;
    while open.len() < watches as usize {
        if open.len() % STREAMS == 0 {
            sender = client.connect().await?;
        }
        let number = open.len() + 1;
        let watch = timeout(STEP, client.watch(&sender)).await;
        open.push(watch.map_err(anyhow::Error::from).flatten().with_context(|| format!("watch {number}"))?);
    }
    let opened = begin.elapsed();
    sleep(SETTLE).await;
    let after = Memory::of(kas, agentk)?;
    let beside = execs(client).await?;
    ensure!(!open.iter().any(RecvStream::is_end_stream), "a watch has ended");
    Ok(Measured { watches, before, after, opened, exec: [alone, beside] })
}

/// Opens upgraded connections, and returns the median of the times that this took.
async fn execs(client: &Client) -> anyhow::Result<Duration> {
    let mut times = Vec::with_capacity(EXECS);
    for _ in 0..EXECS {
        let begin = Instant::now();
        timeout(STEP, client.exec()).await.context("no upgraded connection opens")??;
        times.push(begin.elapsed().as_secs_f64());
    }
    Ok(Duration::from_secs_f64(median(times).unwrap_or_default()))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Measured {
    /// Returns the memory for each watch, in KiB.
    fn each(&self, of: impl Fn(&Memory) -> u64) -> f64 {
        of(&self.after).saturating_sub(of(&self.before)) as f64 / f64::from(self.watches)
    }

    fn values(&self) -> Values {
        Values::from([
            (WATCH_KAS, self.each(|memory| memory.kas)),
            (WATCH_AGENTK, self.each(|memory| memory.agentk)),
            (EXEC_BESIDE_WATCHES, millis(self.exec[1])),
        ])
    }

    fn table(&self) -> String {
        let Self { watches, before, after, opened, exec: [alone, beside] } = self;
        let row = |name: &str, before: u64, after: u64, each: f64| {
            format!("| {name} | {before} KiB | {after} KiB | {} KiB |\n", short(each))
        };
        format!(
            "{watches} watches of one agent, opened one after the other in {} s. An upgraded connection (`kubectl exec`) \
             opens in {} ms without them, and in {} ms beside them.\n\n\
             | memory | before | with all watches | for each |\n| --- | --- | --- | --- |\n{}{}",
            short(opened.as_secs_f64()),
            short(millis(*alone)),
            short(millis(*beside)),
            row("kas", before.kas, after.kas, self.each(|memory| memory.kas)),
            row("agentk", before.agentk, after.agentk, self.each(|memory| memory.agentk)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_watch_is_the_growth_divided_by_their_number() {
        let memory = |kas, agentk| Memory { kas, agentk };
        let (before, after) = (memory(20_000, 10_000), memory(50_000, 9_000));
        let time = Duration::from_millis(2);
        let measured = Measured { watches: 1_500, before, after, opened: time, exec: [time, 3 * time] };
        let values = measured.values();
        assert_eq!([values[WATCH_KAS], values[WATCH_AGENTK], values[EXEC_BESIDE_WATCHES]], [20.0, 0.0, 6.0]);
        assert!(measured.table().contains("| kas | 20000 KiB | 50000 KiB | 20.0 KiB |\n"));
    }
}
