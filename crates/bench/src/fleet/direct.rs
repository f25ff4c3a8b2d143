//! Direct routes: which requests take one hop when nginx asks for the owner, and what streams gain.
//!
//! Ten replicas, agentk, nginx and the server behind agentk are processes. Each agent is connected to two
//! replicas. Both configurations of nginx are that of docs/direct.md for kubectl, for ten replicas; one does
//! not ask. Their rounds alternate.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use http_body_util::BodyExt as _;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    endpoint::{JANE, write_users},
    kas::{token, write_private},
    mesh::{Mesh, Options},
    proxy::{Proxy, direct_block},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{Part, client::Client};
use crate::{
    environment::{Environment, StaticServer},
    protocol::HttpWork,
    report::{DIRECT_GAIN, ONE_HOP, median, short},
    static_server,
};

const REPLICAS: usize = 10;
const AGENTS: i64 = 20;
const HTTP: u16 = 8154;
const DIRECT: u16 = 8157;
const SECRET: &str = "the-secret-of-the-proxies";
const ASKING: &str = "kubectl: ask first";
/// Clients at once, each with one request.
const CLIENTS: u64 = 8;
/// Small requests of which it is counted how many hops they take.
const REQUESTS: u64 = 4_000;
/// Bytes of a small answer, and of a long one.
const SMALL: u64 = 1_024;
const LONG: u64 = 256 << 20;
/// Time limit of a step.
const STEP: Duration = Duration::from_secs(120);

struct World {
    mesh: Mesh,
    _agents: Vec<Agentk>,
    _server: StaticServer,
    _environment: Environment,
    /// nginx, which asks for the owner, and one that does not.
    asking: Proxy,
    any: Proxy,
    _files: TempDir,
}

impl World {
    async fn start() -> Result<Self> {
        let files = TempDir::with_prefix("kas-bench-direct-")?;
        let (users, secret) = (files.path().join("users.yaml"), files.path().join("secret"));
        write_users(&users, &[("jane", JANE)])?;
        write_private(&secret, SECRET)?;
        let config = json!({
            "agent": { "kubernetes_api": {
                "users": { "file": users },
                "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
            } },
            "direct": { "authentication_secret_file": secret },
        });
        let options =
            Options { replicas: REPLICAS, agents: AGENTS, config, start: false, ..Options::default() };
        let mut mesh = Mesh::start_with(options).await?;
        let all: Vec<usize> = (0..REPLICAS).collect();
        for n in &all {
            let at = |port| SocketAddr::new(mesh.private(*n).ip(), port);
            let own = json!({
                "agent": { "kubernetes_api": { "listen": { "address": at(HTTP) } } },
                "direct": { "listen": { "address": at(DIRECT) } },
            });
            mesh.add_config_of(*n, own);
        }
        mesh.start_replicas(&all).await?;
        mesh.meshed().await?;
        let environment = Environment::new()?;
        let server = environment.static_server()?;
        let url = format!("http://{}", server.http1);
        let mut agents = Vec::new();
        for agent in 1..=AGENTS {
            // Each at two replicas: the n-th and the one after it, so that all have as many.
            let first = usize::try_from(agent)? % REPLICAS;
            let urls = [first, (first + 1) % REPLICAS].map(|n| format!("grpc://{}", mesh.agents(n)));
            let agentk =
                Agentk::start_at_urls(&urls.join(","), &token(agent), &["--kube-server", &url]).await?;
            agentk.connected().await?;
            agents.push(agentk);
        }
        let ips: Vec<IpAddr> = all.iter().map(|n| mesh.private(*n).ip()).collect();
        let direct: Vec<SocketAddr> = ips.iter().map(|ip| SocketAddr::new(*ip, DIRECT)).collect();
        let block = direct_block(ASKING, REPLICAS)?;
        let plain = without_asking(&block)?;
        let (asking, any) = tokio::try_join!(
            Proxy::direct_with(&block, false, &ips, &direct, SECRET),
            Proxy::direct_with(&plain, false, &ips, &direct, SECRET)
        )?;
        let it = Self {
            mesh,
            _agents: agents,
            _server: server,
            _environment: environment,
            asking,
            any,
            _files: files,
        };
        it.known().await?;
        Ok(it)
    }

    /// Waits until all replicas know the owners of all agents and where these are reached.
    async fn known(&self) -> Result<()> {
        let known = async {
            loop {
                let before = self.hops().await?;
                self.requests(&self.asking, 10 * AGENTS as u64).await?;
                if self.hops().await?.since(before).remote == 0.0 {
                    return anyhow::Ok(());
                }
                sleep(Duration::from_millis(200)).await;
            }
        };
        timeout(STEP, known).await.context("owners are not told")?
    }

    /// Requests so far, by whether another replica had the tunnel.
    async fn hops(&self) -> Result<Hops> {
        let mut hops = Hops::default();
        for n in 0..REPLICAS {
            let kas = self.mesh.kas(n);
            hops.local += kas.metric("kas_routed_requests_total{route=\"Local\"}").await?;
            hops.remote += kas.metric("kas_routed_requests_total{route=\"Remote\"}").await?;
        }
        Ok(hops)
    }

    /// Sends small requests to all agents.
    async fn requests(&self, proxy: &Proxy, count: u64) -> Result<()> {
        let mut clients = JoinSet::new();
        for n in 0..CLIENTS {
            let (address, mut agents) = (proxy.address, StdRng::seed_from_u64(n));
            clients.spawn(async move {
                let mut client = Client::connect(address, Some(JANE)).await?;
                for _ in 0..count.div_ceil(CLIENTS) {
                    let agent = agents.random_range(1..=AGENTS);
                    let body = client.get(&target(agent, SMALL)).await?;
                    ensure!(body.len() as u64 == SMALL, "an answer of {} bytes", body.len());
                }
                anyhow::Ok(())
            });
        }
        while let Some(done) = clients.join_next().await {
            done??;
        }
        Ok(())
    }

    /// Reads long answers of all agents for a while. Returns the bytes a second.
    async fn streams(&self, proxy: &Proxy, round: u64, span: Duration) -> Result<f64> {
        let read = Arc::new(AtomicU64::new(0));
        let mut clients = JoinSet::<Result<()>>::new();
        for n in 0..CLIENTS {
            let (address, read) = (proxy.address, Arc::clone(&read));
            // The same agents with and without asking.
            let mut agents = StdRng::seed_from_u64(1_000 + CLIENTS * round + n);
            clients.spawn(async move {
                loop {
                    let mut client = Client::connect(address, Some(JANE)).await?;
                    let mut body = client.begin(&target(agents.random_range(1..=AGENTS), LONG)).await?;
                    let mut left = LONG;
                    while let Some(frame) = body.frame().await {
                        let length = frame?.data_ref().map_or(0, |data| data.len() as u64);
                        read.fetch_add(length, Ordering::Relaxed);
                        left = left.saturating_sub(length);
                    }
                    ensure!(left == 0, "an answer ended {left} bytes early");
                }
            });
        }
        // All streams have begun.
        sleep(span / 4).await;
        let (before, begun) = (read.load(Ordering::Relaxed), Instant::now());
        tokio::select! {
            () = sleep(span) => {}
            ended = clients.join_next() => bail!("a stream failed: {ended:?}"),
        }
        Ok((read.load(Ordering::Relaxed) - before) as f64 / begun.elapsed().as_secs_f64())
    }
}

fn target(agent: i64, bytes: u64) -> String {
    let (_, path) = static_server::request(HttpWork::Down(bytes));
    format!("/agents/{agent}{path}")
}

/// Returns the same configuration, in which nginx takes any replica.
fn without_asking(block: &str) -> Result<String> {
    let asks = |line: &&str| line.trim_start().starts_with("auth_request ");
    let (asking, others): (Vec<&str>, Vec<&str>) = block.lines().partition(asks);
    let plain = others.join("\n").replace("proxy_pass http://$kas_http;", "proxy_pass http://kas_http;");
    ensure!(asking.len() == 1 && !plain.contains("http://$"), "another block: {block}");
    Ok(plain)
}

/// Requests by the number of hops.
#[derive(Clone, Copy, Debug, Default)]
struct Hops {
    local: f64,
    remote: f64,
}

impl Hops {
    fn since(self, before: Self) -> Self {
        Self { local: self.local - before.local, remote: self.remote - before.remote }
    }

    fn share(self) -> f64 {
        self.local / (self.local + self.remote)
    }
}

/// What was measured.
#[derive(Debug, Default)]
struct Measured {
    asking: Hops,
    any: Hops,
    /// Bytes a second of each round, with and without asking.
    rounds: Vec<[f64; 2]>,
}

/// Measures everything.
pub(super) async fn measure(rounds: u32, quick: bool) -> Result<Part> {
    let world = World::start().await?;
    let mut it = Measured::default();
    let requests = if quick { REQUESTS / 10 } else { REQUESTS };
    let before = world.hops().await?;
    world.requests(&world.asking, requests).await?;
    let between = world.hops().await?;
    world.requests(&world.any, requests).await?;
    it.asking = between.since(before);
    it.any = world.hops().await?.since(between);
    ensure!(it.asking.local + it.asking.remote >= requests as f64, "requests are not counted: {it:?}");
    let span = if quick { Duration::from_secs(1) } else { Duration::from_secs(4) };
    for round in 0..u64::from(rounds) {
        let asking = world.streams(&world.asking, round, span).await?;
        let any = world.streams(&world.any, round, span).await?;
        it.rounds.push([asking, any]);
    }
    Ok(it.part())
}

impl Measured {
    fn part(&self) -> Part {
        let mut part = Part::default();
        part.values.insert(ONE_HOP, self.asking.share());
        let gain = median(self.rounds.iter().map(|[asking, any]| asking / any));
        part.values.extend(gain.map(|gain| (DIRECT_GAIN, gain)));
        let mb =
            |at: usize| short(median(self.rounds.iter().map(|round| round[at] / 1e6)).unwrap_or(f64::NAN));
        part.notes.push(format!(
            "| {REPLICAS} replicas, each agent at two of them | requests | one hop | streams, MB/s |\n\
             | --- | --- | --- | --- |\n\
             | nginx asks for the owner | {} | {} | {} |\n\
             | nginx takes any replica | {} | {} | {} |",
            self.asking.local + self.asking.remote,
            short(self.asking.share()),
            mb(0),
            self.any.local + self.any.remote,
            short(self.any.share()),
            mb(1),
        ));
        part.notes.push(format!(
            "{CLIENTS} clients read answers of {} MiB of {AGENTS} agents; medians of {} rounds, and the gain is the median \
             of the ratios of each round. All processes share the cores of this machine, so the gain is processor time that \
             a hop does not take, divided by all that a byte takes: that of nginx, agentk, the server and the clients \
             too. It is neither bandwidth nor latency between hosts.",
            LONG >> 20,
            self.rounds.len(),
        ));
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gain_is_the_median_of_the_ratios() {
        let hops = |local, remote| Hops { local, remote };
        let measured = Measured {
            asking: hops(99.0, 1.0),
            any: hops(20.0, 80.0),
            rounds: vec![[150.0, 100.0], [120.0, 100.0], [130.0, 100.0]],
        };
        let part = measured.part();
        assert_eq!([part.values[ONE_HOP], part.values[DIRECT_GAIN]], [0.99, 1.3]);
    }

    #[test]
    fn the_other_configuration_does_not_ask() {
        let plain = without_asking(&direct_block(ASKING, REPLICAS).unwrap()).unwrap();
        assert!(!plain.contains("auth_request /kas-owner"), "{plain}");
        assert!(plain.contains("proxy_pass http://kas_http;"), "{plain}");
    }
}
