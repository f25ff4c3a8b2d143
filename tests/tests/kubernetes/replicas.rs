//! Failures under open watches, execs and logs of kubectl, with two replicas of kas: the agent's tunnels are
//! at one, the *owner*, and kubectl calls the other one, the *edge*.

use std::{fs, os::unix::process::ExitStatusExt as _, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    endpoint,
    gitlab::{AUTHORIZE_PROXY_USER, GitLab, Reply},
    kas::{eventually, merge, token},
    kubernetes::{Kubernetes, Tools},
    mesh::{Balancer, Mesh, Options},
    process::{Process, SOON},
};
use tokio::{
    io::AsyncReadExt as _,
    process::Child,
    time::{Instant, MissedTickBehavior, interval_at, timeout},
};

use crate::{
    clients::{
        Client, Endpoint, Files, POD, Talk, Workload, commands_have_ended, commands_have_started, line, lines,
    },
    exec::{JOHN, found_tools, john},
    setup::{AGENT, Exclusive, exclusive},
};

const OWNER: usize = 0;
const EDGE: usize = 1;

/// How many lines, of 1 KiB each, nobody reads. kubectl takes 4 MiB until it waits.
const LINES: usize = 32 << 10;
/// By how many KiB the memory of a process may grow while nobody reads two such logs.
const MOST_MEMORY: u64 = 8 << 10;

/// Two replicas, an agentk that is connected to the owner, and a node with one pod.
struct Setup {
    mesh: Mesh,
    endpoint: Endpoint,
    /// In front of the edge.
    clients: Balancer,
    /// In front of the owner.
    agents: Balancer,
    agentk: Agentk,
    workload: Workload,
    kubernetes: Arc<Kubernetes>,
    _exclusive: Exclusive,
}

impl Setup {
    async fn start(tools: &Tools, namespace: &'static str, over: Value) -> Result<Self> {
        let exclusive = exclusive().await?;
        let kubernetes = Arc::clone(&exclusive.kubernetes);
        let files = Files::new()?;
        let mut config = files.config();
        merge(&mut config, over);
        let mesh = Mesh::start_with(Options { replicas: 2, agents: 1, config, ..Options::default() }).await?;
        let clients = Balancer::start(vec![endpoint::address(mesh.kas(EDGE)).await?]).await?;
        let agents = Balancer::start(vec![mesh.agents(OWNER)]).await?;
        let workload = Workload::start(&kubernetes, tools, namespace).await?;
        let agentk =
            Agentk::start_with_kubeconfig(agents.address, &token(AGENT), &workload.kubeconfig).await?;
        agentk.connected().await?;
        mesh.converged(&[(AGENT, OWNER)]).await?;
        let endpoint = Endpoint { files, address: clients.address, namespace };
        endpoint.is_allowed(&Client::current(tools)).await?;
        Ok(Self { mesh, endpoint, clients, agents, agentk, workload, kubernetes, _exclusive: exclusive })
    }

    /// Starts an exec with each client, and compares what the audit log says of its beginning.
    async fn talks<const N: usize>(&self, clients: &[Client; N]) -> Result<Vec<Talk>> {
        let files = &self.endpoint.files;
        let mut talks = Vec::new();
        for client in clients {
            let before = files.audited("start", "upgrade")?.len();
            let mut talk = Talk::start(&self.endpoint, client).await?;
            talk.says("before").await?;
            talks.push(talk);
            let begun = files.audited_since("start", "upgrade", before, 1).await?;
            ensure!(begun.len() == 1 && begun[0]["upgrade"] == client.upgrade, "{begun:?}");
        }
        Ok(talks)
    }

    /// Starts a `kubectl logs -f`, and waits until it has printed a line.
    async fn follows(&self, client: &Client) -> Result<Child> {
        fs::write(self.workload.node.log_file(self.endpoint.namespace, POD), "first\n")?;
        let mut child = self.endpoint.spawn(client, &["logs", "-f", POD])?;
        let mut first = [0; 6];
        let stdout = child.stdout.as_mut().context("standard output is a pipe")?;
        timeout(SOON, stdout.read_exact(&mut first)).await.context("no line came")??;
        ensure!(&first == b"first\n");
        Ok(child)
    }

    /// Writes the log that nobody reads, and returns it.
    fn write_long_log(&self) -> Result<Vec<u8>> {
        let rest = "x".repeat(1024 - "00000000 \n".len());
        let lines: Vec<String> = (0..LINES).map(|n| format!("{n:08} {rest}\n")).collect();
        let log = lines.concat();
        fs::write(self.workload.node.log_file(self.endpoint.namespace, POD), &log)?;
        Ok(log.into_bytes())
    }

    /// Returns the memory of both replicas and agentk, in KiB.
    fn memory(&self) -> Result<[u64; 3]> {
        let owner = self.mesh.kas(OWNER).process.usage()?.resident_kib;
        let edge = self.mesh.kas(EDGE).process.usage()?.resident_kib;
        Ok([owner, edge, self.agentk.process.usage()?.resident_kib])
    }
}

/// Every kubectl: WebSocket, SPDY, and the old one.
fn all(tools: &Tools) -> [Client; 3] {
    [Client::current(tools), Client::without_websocket(tools), Client::old(tools)]
}

/// Whether a request has ended by itself, as the audit log says. Once a command has ended, kubectl and the
/// API server both close the connection.
fn has_finished(line: &Value) -> bool {
    line["ended_by"] == "upstream" || line["ended_by"] == "client"
}

/// S57. Fails if a client hangs on its lost connection, if a command is repeated or left running, or if
/// kubectl cannot go on with its watch at the other replica.
#[tokio::test]
async fn a_killed_edge_ends_execs_and_lets_watches_go_on_at_another_replica() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "edge", json!({})).await?;
    let Setup { mesh, endpoint, workload, .. } = &setup;
    let current = Client::current(&tools);
    let condition = "--for=jsonpath={.metadata.labels.state}=done";
    let wait = ["wait", condition, "pod", POD, "--timeout=60s"];
    let mut waits = Vec::new();
    for _ in 0..2 {
        waits.push(endpoint.spawn(&current, &wait)?);
    }
    let mut watch = endpoint.spawn(&current, &["get", "pods", "-w", "-o", "name"])?;
    ensure!(line(&mut lines(&mut watch)?).await? == format!("pod/{POD}"));
    let talks = setup.talks(&all(&tools)).await?;
    let files = &endpoint.files;
    let watched = files.audited_since("start", "watch", 0, 3).await?;
    ensure!(watched.len() == 3, "{watched:?}");

    setup.clients.set_targets(vec![endpoint::address(mesh.kas(OWNER)).await?]);
    mesh.kill(EDGE).await?;

    // kubectl with SPDY takes the end of its connection for that of the command: kubernetes/kubernetes does
    // not tell them apart. So only the exec by WebSocket says that it failed.
    let mut by_websocket = true;
    for talk in talks {
        let output = talk.end().await?;
        ensure!(!by_websocket || !output.status.success(), "{output:?}");
        by_websocket = false;
    }
    // This one does not go on by itself, and must not hang.
    timeout(SOON, watch.wait()).await.context("the watch hangs")??;
    commands_have_ended(&workload.node, 3).await?;

    // The others watch again, at the replica that is left.
    let again = files.audited_since("start", "watch", 3, 2).await?;
    let replica = |line: &Value| line["replica"].clone();
    ensure!(again.iter().all(|line| replica(line) != replica(&watched[0])), "{watched:?}, then {again:?}");
    ensure!(waits.iter_mut().all(|wait| matches!(wait.try_wait(), Ok(None))), "one has ended too early");
    let label = ["label", "pod", POD, "state=done"];
    endpoint.output(&current, &label, b"").await?;
    for wait in waits {
        let output = timeout(SOON, wait.wait_with_output()).await.context("it waits in vain")??;
        ensure!(output.status.success(), "{output:?}");
    }

    // No command was started twice, neither by kas nor by agentk or a client.
    commands_have_started(&workload.node, 3)?;
    ensure!(files.audited("start", "upgrade")?.len() == 3);
    Ok(())
}

/// How a replica is told to leave: short requests get little time, upgraded connections `grace`.
fn draining(grace: &str) -> Value {
    json!({ "drain": { "delay": "0s", "timeout": "300ms", "upgrade_grace": grace } })
}

/// S58. Fails if the owner ends an exec of another replica with other requests, or does not end after it.
#[tokio::test]
async fn execs_outlast_the_drain_of_the_owner() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "owner", draining("10m")).await?;
    let Setup { mesh, endpoint, .. } = &setup;
    let files = &endpoint.files;
    let clients = [Client::current(&tools), Client::old(&tools)];
    let mut talks = setup.talks(&clients).await?;
    let follow = setup.follows(&clients[0]).await?;

    // agentk connects to the other replica instead.
    setup.agents.set_targets(vec![mesh.agents(EDGE)]);
    mesh.kas(OWNER).process.terminate();
    // Other requests have only `drain.timeout`, which is over with this one.
    let ended = files.audited_since("end", "follow", 0, 1).await?;
    ensure!(ended[0]["ended_by"] == "tunnel", "{ended:?}");
    let output = timeout(SOON, follow.wait_with_output()).await.context("logs hangs")??;
    ensure!(output.stdout.is_empty(), "{output:?}");

    for talk in &mut talks {
        for _ in 0..3 {
            talk.says("still").await?;
        }
    }
    ensure!(mesh.kas(OWNER).process.is_running());
    // New ones take the new way.
    let mut new = setup.talks(&[Client::current(&tools)]).await?;
    for talk in talks.drain(..) {
        talk.finish().await?;
    }
    let status = mesh.kas(OWNER).process.exited(SOON).await?;
    ensure!(status.success(), "the owner ended with {status}");
    new[0].says("after").await?;
    for talk in new {
        talk.finish().await?;
    }

    let ended = files.audited_since("end", "upgrade", 0, 3).await?;
    let mut routes: Vec<_> = ended.iter().map(|line| line["route"].as_str()).collect();
    routes.sort_unstable();
    ensure!(routes == [Some("local"), Some("peer"), Some("peer")], "{ended:?}");
    for line in &ended {
        ensure!(line["http_status"] == 101 && has_finished(line), "{line}");
    }
    commands_have_started(&setup.workload.node, 3)
}

/// S58, the other half. Fails if the owner waits for longer than the grace, or lets the client hang.
#[tokio::test]
async fn execs_end_with_the_grace_of_the_owner() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "grace", draining("1s")).await?;
    let mut talks = setup.talks(&[Client::current(&tools)]).await?;
    setup.mesh.kas(OWNER).process.terminate();
    let output = talks.remove(0).end().await?;
    ensure!(!output.status.success(), "{output:?}");
    let status = setup.mesh.kas(OWNER).process.exited(SOON).await?;
    ensure!(status.success(), "the owner ended with {status}");
    let ended = setup.endpoint.files.audited_since("end", "upgrade", 0, 1).await?;
    ensure!(ended[0]["ended_by"] == "tunnel", "{ended:?}");
    // The command does not go on without its client.
    commands_have_ended(&setup.workload.node, 1).await
}

/// S59. Fails if open requests end when nobody can say whether they are still allowed, if a new one is let
/// in, or if kubectl is not told to come again.
#[tokio::test]
async fn open_requests_outlast_gitlab_and_new_ones_are_told_to_come_again() -> Result<()> {
    let tools = found_tools().await?;
    let mut gitlab = GitLab::start().await?;
    gitlab.know(&token(AGENT), AGENT, "agent-1", 7);
    gitlab.have_user("glpat-johnjohnjohnjohnjohn", john());
    let mut config = gitlab.config();
    let cached = json!({ "agent": {
        "info_cache_ttl": "200ms",
        "info_cache_error_ttl": "200ms",
        "kubernetes_api": { "allowed_agent_cache_ttl": "200ms" },
    } });
    merge(&mut config, cached);
    let setup = Setup::start(&tools, "source", config).await?;
    let Setup { endpoint, workload, .. } = &setup;
    let files = &endpoint.files;
    let john = Client::current(&tools).of(JOHN);
    let mut talks = setup.talks(&[john.clone(), Client::old(&tools).of(JOHN)]).await?;
    let mut watch = endpoint.spawn(&john, &["get", "pods", "-w", "-o", "name"])?;
    let mut watched = lines(&mut watch)?;
    ensure!(line(&mut watched).await? == format!("pod/{POD}"));

    // First it answers with an error, and open requests are judged again.
    gitlab.reply(Reply::status("503 Service Unavailable"));
    let asked = |gitlab: &GitLab| {
        gitlab.requests().iter().filter(|seen| seen.target.starts_with(AUTHORIZE_PROXY_USER)).count()
    };
    let before = asked(&gitlab);
    eventually("that open requests are judged again", async || {
        let now = asked(&gitlab);
        Ok(if now > before { Ok(()) } else { Err(now) })
    })
    .await?;
    // Then it is away.
    gitlab.down().await;
    let refused = files.audited("end", "short")?.len();
    let get = || endpoint.spawn(&john, &["get", "pod", POD, "-o", "name"]);
    let mut waiting = get()?;
    let told = eventually("that a new request is refused", async || {
        // The last answer of GitLab may still count.
        if waiting.try_wait()?.is_some() {
            waiting = get()?;
        }
        let lines = files.audited("end", "short")?.split_off(refused);
        Ok(lines.iter().find(|line| line["http_status"] == 503).cloned().ok_or(lines))
    })
    .await?;
    ensure!(told["decision"] == "deny" && told["subject"].is_null(), "{told}");
    for talk in &mut talks {
        talk.says("still").await?;
    }
    workload.node.run_pod(&setup.kubernetes, endpoint.namespace, "late").await?;
    ensure!(line(&mut watched).await? == "pod/late");
    ensure!(matches!(waiting.try_wait(), Ok(None)), "kubectl comes again after 2 s");

    // kubectl comes again by itself.
    gitlab.up().await?;
    gitlab.reply(None);
    let output = timeout(SOON, waiting.wait_with_output()).await.context("kubectl waits in vain")??;
    ensure!(output.status.success() && output.stdout == b"pod/pod\n", "{output:?}");
    for talk in talks {
        talk.finish().await?;
    }
    watch.kill().await?;
    for line in files.audited_since("end", "upgrade", 0, 2).await? {
        ensure!(has_finished(&line) && line["subject"] == JOHN.name, "{line}");
    }
    commands_have_started(&workload.node, 2)
}

/// S60. Fails if a log that is followed is cut when its reader pauses, if another response is not, or if
/// anybody keeps in memory what the reader does not read.
#[tokio::test]
async fn a_paused_reader_of_a_followed_log_costs_no_memory_and_loses_nothing() -> Result<()> {
    let tools = found_tools().await?;
    let limits = json!({ "agent": { "kubernetes_api": { "limits": { "stall_timeout": "1s" } } } });
    let setup = Setup::start(&tools, "reader", limits).await?;
    let Setup { endpoint, .. } = &setup;
    let current = Client::current(&tools);
    let log = setup.write_long_log()?;
    let before = setup.memory()?;
    let shorts = endpoint.files.audited("end", "short")?.len();
    let mut follow = endpoint.spawn(&current, &["logs", "-f", POD])?;
    let whole = endpoint.spawn(&current, &["logs", POD])?;

    // The one that is not followed is cut after `stall_timeout`.
    let is_log = |line: &&Value| line["resource"] == "pods/log";
    let cut = eventually("that the log is cut", async || {
        let lines = endpoint.files.audited("end", "short")?.split_off(shorts);
        Ok(lines.iter().find(is_log).cloned().ok_or(lines))
    })
    .await?;
    ensure!(cut["ended_by"] == "limit" && cut["http_status"] == 200, "{cut}");
    let after = setup.memory()?;
    println!("resident KiB of owner, edge and agentk: {before:?}, unread: {after:?}");
    for (before, after) in before.into_iter().zip(after) {
        ensure!(after < before + MOST_MEMORY, "{before} KiB became {after} KiB");
    }
    let output = timeout(SOON, whole.wait_with_output()).await.context("kubectl hangs")??;
    ensure!(!output.status.success() && output.stdout.len() < log.len(), "{}", output.status);

    // The one that is followed was unread for as long, and goes on.
    ensure!(endpoint.files.audited("end", "follow")?.is_empty());
    let mut got = vec![0; log.len()];
    let stdout = follow.stdout.as_mut().context("standard output is a pipe")?;
    timeout(SOON, stdout.read_exact(&mut got)).await.context("the rest does not come")??;
    ensure!(got == log, "the bytes are not those of the log");
    follow.kill().await?;
    ensure!(follow.wait().await?.signal().is_some(), "it had ended by itself");
    let ended = endpoint.files.audited_since("end", "follow", 0, 1).await?;
    ensure!(ended[0]["ended_by"] == "client", "{ended:?}");
    Ok(())
}

/// S60, for a reader that never comes back. Fails if the request is open for longer than `session_max`, or
/// if the kubelet goes on.
#[tokio::test]
async fn a_followed_log_that_nobody_reads_ends_with_its_session() -> Result<()> {
    let tools = found_tools().await?;
    let limits = json!({ "agent": { "kubernetes_api": { "session_max": "1s" } } });
    let setup = Setup::start(&tools, "session", limits).await?;
    let Setup { mesh, endpoint, workload, .. } = &setup;
    setup.write_long_log()?;
    let mut follow = endpoint.spawn(&Client::current(&tools), &["logs", "-f", POD])?;
    let ended = endpoint.files.audited_since("end", "follow", 0, 1).await?;
    ensure!(ended[0]["ended_by"] == "limit" && ended[0]["http_status"] == 200, "{ended:?}");
    // `session_max`, a look each second, and 4 s for a client that does not read: docs/limits.md.
    let took = Duration::from_micros(ended[0]["duration_us"].as_u64().context("a duration")?);
    ensure!(took >= Duration::from_secs(1), "{took:?}");
    mesh.kas(EDGE).metric_is("kas_kubernetes_open{kind=\"follow\"}", 0.0).await?;
    setup.agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
    let left = |line: &Value| (line["message"] == "the client stopped following a log").then_some(());
    workload.node.process.logged("that nobody follows the log", left).await?;
    follow.kill().await?;
    Ok(())
}

/// How often a replica is killed under the informers, and how many times, unless `KAS_INFORMERS_KILLS` says
/// otherwise.
const KILL_EACH: Duration = Duration::from_secs(20);
const KILLS: usize = 6;

fn kills() -> Result<usize> {
    let Ok(text) = std::env::var("KAS_INFORMERS_KILLS") else { return Ok(KILLS) };
    text.parse().with_context(|| format!("KAS_INFORMERS_KILLS={text}: not a number"))
}

/// Fails if an informer of client-go misses a change, stops, or lists all objects again more often than a
/// replica was killed.
#[tokio::test]
#[ignore = "takes two minutes; cargo xtask ci runs it"]
async fn informers_outlast_killed_replicas() -> Result<()> {
    let kills = kills()?;
    let tools = found_tools().await?;
    let mut setup = Setup::start(&tools, "informers", json!({})).await?;
    let Setup { mesh, endpoint, clients, agents, kubernetes, .. } = &mut setup;
    agents.set_targets(vec![mesh.agents(OWNER), mesh.agents(EDGE)]);
    clients.set_targets(vec![
        endpoint::address(mesh.kas(OWNER)).await?,
        endpoint::address(mesh.kas(EDGE)).await?,
    ]);
    let path = |path: &std::path::Path| path.to_str().map(str::to_owned).context("the path is UTF-8");
    let through = path(&endpoint.kubeconfig(&Client::current(&tools))?)?;
    let direct = path(&kubernetes.admin_kubeconfig())?;
    let arguments = ["-direct", &direct, "-through", &through, "-namespace", endpoint.namespace];
    let informers = Process::start("informers", &tools.informers, &arguments, &[]).await?;
    let says = |message: &'static str| move |line: &Value| (line["message"] == message).then(|| line.clone());
    informers.logged("that there is a copy of everything", says("synced")).await?;

    let mut ticks = interval_at(Instant::now() + KILL_EACH, KILL_EACH);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for kill in 0..kills {
        ticks.tick().await;
        ensure!(informers.is_running(), "the informers have ended");
        // Each in turn is the owner, the edge, or both.
        let replica = kill % 2;
        mesh.kill(replica).await?;
        mesh.restart(replica).await?;
        // Its new process listens at another port.
        clients.set_targets(vec![
            endpoint::address(mesh.kas(OWNER)).await?,
            endpoint::address(mesh.kas(EDGE)).await?,
        ]);
    }
    informers.terminate();
    let status = informers.exited(4 * SOON).await?;
    ensure!(status.success(), "the informers ended with {status}");
    let told = informers.logged("what it has seen", says("the copies are equal")).await?;
    println!("{told}");
    // One list each at the beginning.
    let most = told["most_lists"].as_u64().context("a number")?;
    ensure!(most <= 1 + kills as u64, "{told}");
    ensure!(told["writes"].as_u64() > Some(kills as u64 * 100), "{told}");
    Ok(())
}
