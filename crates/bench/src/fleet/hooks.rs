//! Webhooks: how long it takes until one is accepted, and until it arrives at an agent that has come back,
//! and whether one is lost while replicas are killed.
//!
//! Replicas are processes. Agents and the API server behind them are in this process: what receives a hook
//! answers at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use proto::kas::api::v1::{ListHooksRequest, ListHooksResponse};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    http_agent::HttpAgent,
    http1,
    kas::{token, write_private},
    mesh::{Mesh, Options},
    raw_agent::Kind,
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::Part;
use crate::{
    report::{HOOK_ACCEPT, HOOK_AFTER_RETURN, HOOK_LOST},
    times::Times,
};

const REPLICAS: usize = 3;
const PORT: u16 = 8156;
/// Agents, and hooks of each: the rate of one hook is limited.
const AGENTS: i64 = 20;
const HOOKS: u32 = 100;
/// Senders at once.
const SENDERS: u32 = 8;
/// Bytes of a body.
const BODY: usize = 2_000;
const SECRET: &str = "secret-of-the-bench";
/// Between two looks.
const LOOK: Duration = Duration::from_millis(1);
/// Time limit of a step.
const STEP: Duration = Duration::from_secs(300);
/// About how long a replica is killed, comes back, and is known again.
const KILL: Duration = Duration::from_secs(10);
/// How long replicas get to agree after one was killed or has come back.
const SETTLE: Duration = Duration::from_secs(8);

/// What was measured.
#[derive(Debug, Default)]
struct Measured {
    /// From the first byte of a hook to its 202: it has two copies, or was delivered before.
    accept: Times,
    /// From the moment at which an agent has its tunnels to the arrival of its hook.
    after_return: Times,
    /// Hooks that were accepted while replicas were killed, and those of them that never arrived.
    accepted: usize,
    lost: usize,
    /// Hooks that arrived more than once.
    twice: usize,
}

impl Measured {
    fn part(&self) -> Part {
        let mut part = Part::default();
        let how = "a hook of 2 KB by one of 8 senders, until its 202: it has two copies, or was delivered";
        part.times(HOOK_ACCEPT, "accepted", &self.accept, how);
        let how = "an agent has its tunnels again, until its hook arrives";
        part.times(HOOK_AFTER_RETURN, "after a return", &self.after_return, how);
        part.values.insert(HOOK_LOST, self.lost as f64);
        let Self { accepted, lost, twice, .. } = self;
        part.notes.push(format!(
            "While each of three replicas is killed and comes back, and agents are away: {accepted} hooks were accepted, \
             {lost} of them never arrived, {twice} arrived more than once."
        ));
        part
    }
}

/// What has arrived, by body: how often, and when first.
type Arrived = Arc<Mutex<BTreeMap<String, (u32, Instant)>>>;

struct World {
    mesh: Mesh,
    agents: BTreeMap<i64, HttpAgent>,
    arrived: Arrived,
    api_server: SocketAddr,
    server: AbortHandle,
    _dir: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Answers every request, and notes the first 24 bytes of its body.
async fn serve(stream: TcpStream, arrived: Arrived) -> Result<()> {
    let mut stream = BufReader::new(stream);
    while let Some(head) = http1::read_head(&mut stream).await? {
        let body = http1::read_body(&mut stream, head.framing_of_request()?).await;
        let name = String::from_utf8_lossy(body.bytes.get(..24).unwrap_or(&body.bytes)).trim().to_owned();
        arrived.lock().entry(name).or_insert((0, Instant::now())).0 += 1;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await?;
    }
    Ok(())
}

fn configure(folder: &Path) -> Result<()> {
    let hook = |n| format!("- {{name: h-{n}, verify: {{gitlab: all}}, deliver: {{service: 'a/b:80'}}}}\n");
    let hooks: String = (0..HOOKS).map(hook).collect();
    for agent in 1..=AGENTS {
        let of_agent = folder.join(format!("config/agents/agent-{agent}"));
        std::fs::create_dir_all(&of_agent)?;
        std::fs::write(of_agent.join("config.yaml"), "")?;
        std::fs::write(of_agent.join("kas.yaml"), format!("hooks:\n{hooks}"))?;
        let secrets = folder.join(format!("secrets/{agent}"));
        std::fs::create_dir_all(&secrets)?;
        write_private(&secrets.join("all"), SECRET)?;
    }
    Ok(())
}

impl World {
    async fn start() -> Result<Self> {
        let dir = TempDir::with_prefix("kas-bench-hooks-")?;
        configure(dir.path())?;
        let config = json!({
            "agent": { "configuration": { "folder": dir.path().join("config") } },
            "hooks": { "secrets_dir": dir.path().join("secrets") },
        });
        let options =
            Options { replicas: REPLICAS, agents: AGENTS, config, start: false, ..Options::default() };
        let mut mesh = Mesh::start_with(options).await?;
        for n in 0..REPLICAS {
            let listen = SocketAddr::new(mesh.private(n).ip(), PORT);
            mesh.add_config_of(n, json!({ "hooks": { "listen": { "address": listen } } }));
        }
        mesh.start_replicas(&(0..REPLICAS).collect::<Vec<_>>()).await?;
        mesh.meshed().await?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (api_server, arrived) = (listener.local_addr()?, Arrived::default());
        let all = Arc::clone(&arrived);
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&all)));
            }
        });
        let server = server.abort_handle();
        let mut it = Self { mesh, agents: BTreeMap::new(), arrived, api_server, server, _dir: dir };
        for agent in 1..=AGENTS {
            it.connect(agent).await?;
        }
        for agent in 1..=AGENTS {
            it.until(agent, |list| list.known).await?;
        }
        Ok(it)
    }

    /// Connects an agent to a replica that runs.
    async fn connect(&mut self, agent: i64) -> Result<()> {
        let running = self.mesh.running();
        let n = running.get(usize::try_from(agent)? % running.len().max(1)).context("no replica runs")?;
        let kas = self.mesh.agents(*n);
        self.agents.insert(agent, HttpAgent::start(kas, &token(agent), Kind::Recent, self.api_server).await?);
        Ok(())
    }

    /// Waits until a replica says something about the hooks of an agent.
    async fn until(&self, agent: i64, is_right: impl Fn(&ListHooksResponse) -> bool) -> Result<()> {
        let look = async {
            loop {
                let n = *self.mesh.running().first().context("no replica runs")?;
                let request = ListHooksRequest { agent_id: agent };
                let caller = self.mesh.caller(n).await?;
                let list: Result<ListHooksResponse> =
                    caller.unary("/kas.api.v1.KasApi/ListHooks", &request).await;
                if list.is_ok_and(|list| is_right(&list)) {
                    return Ok(());
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(STEP, look).await.with_context(|| format!("the hooks of agent {agent}"))?
    }

    fn listen(&self, n: usize) -> SocketAddr {
        SocketAddr::new(self.mesh.private(n).ip(), PORT)
    }
}

/// A connection of a sender.
struct Sender {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
}

impl Sender {
    /// Sends a hook. Returns the status and the number of copies.
    async fn send(&mut self, agent: i64, hook: u32, name: &str) -> Result<(u16, String)> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(self.address).await?;
                stream.set_nodelay(true)?;
                BufReader::new(stream)
            }
        };
        let request = format!(
            "POST /hooks/v1/{agent}/h-{hook} HTTP/1.1\r\nHost: kas\r\nX-Gitlab-Token: {SECRET}\r\nX-Gitlab-Event-UUID: \
             {name}\r\nContent-Length: {BODY}\r\n\r\n{name:BODY$}"
        );
        stream.write_all(request.as_bytes()).await?;
        let head = http1::read_head(&mut stream).await?.context("no answer")?;
        http1::read_body(&mut stream, head.framing_of_response("POST")?).await;
        let copies = head.get("kas-mailbox-copies").unwrap_or("0").to_owned();
        let status = head.status()?;
        self.stream = Some(stream);
        Ok((status, copies))
    }
}

/// Measures everything. `count`: hooks that are sent while replicas are killed.
pub(super) async fn measure(count: u32, accepts: u32, returns: u32) -> Result<Part> {
    let mut it = Measured::default();
    let mut world = World::start().await?;
    it.accept = accept(&world, accepts).await?;
    for round in 0..returns {
        it.after_return.push(after_return(&mut world, round).await?);
    }
    lose(&mut world, count, &mut it).await?;
    Ok(it.part())
}

async fn accept(world: &World, count: u32) -> Result<Times> {
    let next = Arc::new(AtomicU32::new(0));
    let mut senders = JoinSet::new();
    for n in 0..SENDERS {
        let mut sender = Sender { address: world.listen(n as usize % REPLICAS), stream: None };
        let (next, arrived) = (Arc::clone(&next), Arc::clone(&world.arrived));
        senders.spawn(async move {
            let mut times = Vec::new();
            // The first opens the connection.
            sender.send(1, n, &format!("first-{n}")).await?;
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count {
                    return Ok::<_, anyhow::Error>(times);
                }
                let (agent, hook) = (1 + i64::from(n) % AGENTS, n / 20 % HOOKS);
                let begun = Instant::now();
                let name = format!("accept-{n}");
                let (status, copies) = sender.send(agent, hook, &name).await?;
                let took = begun.elapsed();
                // One that is delivered before it was copied needs no copy.
                let is_kept = copies == "2" || arrived.lock().contains_key(&name);
                ensure!(status == 202 && is_kept, "{name}: status {status}, {copies} copies");
                times.push(took);
            }
        });
    }
    let mut times = Times::default();
    while let Some(done) = senders.join_next().await {
        times.extend(done??);
    }
    Ok(times)
}

async fn after_return(world: &mut World, round: u32) -> Result<Duration> {
    let agent = 1 + i64::from(round) % AGENTS;
    world.agents.remove(&agent);
    let gone = async {
        while !world.mesh.connections(0, agent).await?.agents.is_empty()
            || world.mesh.view(0).await?.holders.iter().any(|(id, _)| *id == agent)
        {
            sleep(Duration::from_millis(20)).await;
        }
        Ok::<_, anyhow::Error>(())
    };
    timeout(STEP, gone).await.context("an agent does not go")??;
    let name = format!("return-{round}");
    let mut sender = Sender { address: world.listen(0), stream: None };
    let (status, _) = sender.send(agent, round % HOOKS, &name).await?;
    ensure!(status == 202, "status {status}");
    world.connect(agent).await?;
    let begun = Instant::now();
    let arrives = async {
        loop {
            if let Some((_, at)) = world.arrived.lock().get(&name) {
                return at.saturating_duration_since(begun);
            }
            sleep(LOOK).await;
        }
    };
    timeout(STEP, arrives).await.context("a hook does not arrive")
}

/// Sends at least so many hooks while a replica after the other is killed and comes back, and a part of the
/// agents is away. Hooks are sent until the last one is back.
async fn lose(world: &mut World, count: u32, it: &mut Measured) -> Result<()> {
    let accepted = Arc::new(Mutex::new(BTreeSet::new()));
    let (next, killed) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    // Spread over all of them; at most 2,000 a second, so that each hook stays below its rate.
    let pause = (KILL * u32::try_from(REPLICAS)? * SENDERS / count).max(Duration::from_millis(4));
    let mut senders = JoinSet::new();
    for n in 0..SENDERS {
        let address = world.listen(n as usize % REPLICAS);
        let (accepted, next, killed) = (Arc::clone(&accepted), Arc::clone(&next), Arc::clone(&killed));
        senders.spawn(async move {
            let mut sender = Sender { address, stream: None };
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count && killed.load(Ordering::Relaxed) {
                    return;
                }
                let (agent, hook) = (1 + i64::from(n) % AGENTS, n / 20 % HOOKS);
                let name = format!("lose-{n}");
                match timeout(Duration::from_secs(15), sender.send(agent, hook, &name)).await {
                    Ok(Ok((202, _))) => {
                        accepted.lock().insert(name);
                    }
                    Ok(Ok(_)) => {}
                    // Its replica is away.
                    _ => {
                        sender.stream = None;
                        sleep(Duration::from_millis(20)).await;
                    }
                }
                sleep(pause).await;
            }
        });
    }
    for n in 0..REPLICAS {
        // Hooks of these wait while the replica dies.
        for agent in 1..=AGENTS / 4 {
            world.agents.remove(&agent);
        }
        sleep(Duration::from_millis(300)).await;
        world.mesh.kill(n).await?;
        sleep(Duration::from_millis(500)).await;
        world.mesh.restart(n).await?;
        world.mesh.ready(n).await?;
        for agent in 1..=AGENTS {
            world.connect(agent).await?;
        }
        // One crash at a time.
        sleep(SETTLE).await;
    }
    killed.store(true, Ordering::Relaxed);
    while senders.join_next().await.is_some() {}
    for agent in 1..=AGENTS {
        world.connect(agent).await?;
        world.until(agent, |list| list.kept.is_empty()).await?;
    }
    let arrived = world.arrived.lock();
    let accepted = accepted.lock();
    it.accepted = accepted.len();
    it.lost = accepted.iter().filter(|name| !arrived.contains_key(*name)).count();
    it.twice = arrived.values().filter(|(times, _)| *times > 1).count();
    ensure!(it.accepted > 0, "no hook was accepted");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_keys() {
        let mut measured = Measured { accepted: 10, lost: 1, ..Measured::default() };
        measured.accept.push(Duration::from_millis(5));
        measured.after_return.push(Duration::from_millis(50));
        let part = measured.part();
        let expected = [(HOOK_LOST, 1.0), (HOOK_ACCEPT, 5.0), (HOOK_AFTER_RETURN, 50.0)];
        assert_eq!(part.values, expected.into());
        assert!(part.notes[0].contains("10 hooks were accepted, 1 of them"), "{:?}", part.notes);
    }
}
