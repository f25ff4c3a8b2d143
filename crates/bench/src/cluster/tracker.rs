//! `cargo xtask bench tracker`: measures each implementation of the trait `Tracker`: its cost, and how soon
//! other replicas see a change.
//!
//! What API clients see is measured on processes, with gossip and with Redis. What only the trait has
//! (lookups, the commands of an idle replica, a new announcement) is measured on trackers in this process,
//! which share a redis-server on loopback.

use std::{
    collections::BTreeMap, fmt::Write as _, hint::black_box, net::SocketAddr, sync::Arc, time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use cluster::{AgentMeta, Connection, Connections as _, InMemoryTracker, Locator as _, Replica, Tracker};
use ids::{AgentId, ConnectionId, ReplicaId};
use redis_tracker::{Address, Connect, Options, RedisTracker, Target};
use testkit::redis::Redis;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    deployment::{self, Deployment},
    failover, latency,
};
use crate::{
    environment::Environment,
    report::{self, Output, Values, median, short},
    runtime,
    times::Times,
};

#[derive(Debug, clap::Args)]
pub(crate) struct TrackerArgs {
    /// Leave out the idle replicas, which take sixteen minutes
    #[arg(long)]
    no_rest: bool,
    #[command(flatten)]
    output: Output,
}

/// Number of agents whose changes are measured.
const CHANGES: i64 = 500;
/// Lookups per round, and rounds.
const LOOKUPS: (i64, usize) = (100_000, 20);
/// Number of kills. The entries of the killed replica then last for their TTL.
const KILLS: usize = 5;
/// Agents that are announced again, and how often that is measured.
const REANNOUNCED: (i64, usize) = (10_000, 5);
/// Agents of an idle replica.
const IDLE: [(i64, &str); 2] = [(10_000, ""), (100_000, "redis_idle_commands_per_s_100k_agents")];
/// Time limit of each step.
const STEP: Duration = Duration::from_secs(60);
const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

/// The results of one implementation.
#[derive(Default)]
struct Column {
    rows: Vec<(&'static str, Times, &'static str)>,
}

#[derive(Default)]
struct Report {
    values: Values,
    versions: BTreeMap<&'static str, Column>,
    lookups: Vec<(&'static str, &'static str, f64)>,
    idle: Vec<Idle>,
    notes: Vec<String>,
}

/// An idle replica.
struct Idle {
    agents: i64,
    commands: f64,
    bytes: f64,
    /// Commands per transaction.
    together: f64,
    most: Vec<(String, f64)>,
}

impl Report {
    fn times(&mut self, version: &'static str, what: &'static str, times: Times, how: &'static str) {
        self.versions.entry(version).or_default().rows.push((what, times, how));
    }

    fn tables(&self) -> anyhow::Result<String> {
        let mut out = String::new();
        writeln!(out, "### Changes\n\nMilliseconds.\n")?;
        writeln!(out, "| implementation | | N | p50 | p99 | max | from, to |")?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
        for (version, column) in &self.versions {
            for (what, times, how) in &column.rows {
                writeln!(out, "| {version} | {what} | {} | {how} |", times.cells())?;
            }
        }
        writeln!(out, "\n### Lookups\n\nMicroseconds, medians of {} rounds.\n", LOOKUPS.1)?;
        writeln!(out, "| implementation | lookup | µs |\n| --- | --- | --- |")?;
        for (version, what, micros) in &self.lookups {
            writeln!(out, "| {version} | {what} | {} |", short(*micros))?;
        }
        if !self.idle.is_empty() {
            writeln!(
                out,
                "\n### An idle replica\n\nOne replica with Redis. Each agent has an open configuration stream, tunnels, and a project of its own \
                 (with shared projects there are fewer commands). Commands are counted by `INFO commandstats` of Redis, \
                 including those in transactions and MULTI and EXEC, over one refresh period of 14.1 (240 s).\n"
            )?;
            writeln!(
                out,
                "| agents | commands/s | commands per transaction | KB/s, both directions | most frequent, per second |"
            )?;
            writeln!(out, "| --- | --- | --- | --- | --- |")?;
            for idle in &self.idle {
                let most: Vec<String> =
                    idle.most.iter().map(|(name, rate)| format!("{name} {}", short(*rate))).collect();
                writeln!(
                    out,
                    "| {} | {} | {} | {} | {} |",
                    idle.agents,
                    short(idle.commands),
                    short(idle.together),
                    short(idle.bytes / 1e3),
                    most.join(", ")
                )?;
            }
        }
        for note in &self.notes {
            writeln!(out, "\n{note}")?;
        }
        Ok(out)
    }
}

pub(crate) fn run(args: &TrackerArgs) -> anyhow::Result<()> {
    let tokio = runtime()?;
    let environment = Environment::new()?;
    let report = tokio.block_on(measure(args, &environment))?;
    let command = format!("cargo xtask bench tracker{}", if args.no_rest { " --no-rest" } else { "" });
    report::finish(&report.values, &report.tables()?, "tracker", &command, &args.output)
}

async fn measure(args: &TrackerArgs, environment: &Environment) -> anyhow::Result<Report> {
    let begin = Instant::now();
    let say = |what: &str| eprintln!("[{:>4.0} s] {what}", begin.elapsed().as_secs_f64());
    let mut report = Report::default();

    say("lookups");
    lookups(&mut report).await?;
    say("propagation between trackers in this process that share a Redis");
    propagation(&mut report).await?;
    say("propagation between processes");
    for version in ["gossip", "redis"] {
        propagation_between_processes(&mut report, environment, version).await?;
    }
    say("replicas that are killed");
    let kills = failover::kills(environment, KILLS).await?;
    report.times("gossip", "killed → gone from the lists", kills.purged, PURGED);
    purge(&mut report).await?;
    say("10,000 agents that are announced again");
    reannounce(&mut report).await?;
    if !args.no_rest {
        say("idle replicas: eight minutes each");
        for (agents, key) in IDLE {
            let idle = idle_replica(agents).await?;
            if !key.is_empty() {
                report.values.insert(key, idle.commands);
            }
            report.idle.push(idle);
        }
    }
    report.notes.push(
        "The idle traffic of gossip and table streams, and how it grows, is in [scale.md](scale.md). `memory` is for one \
         replica: a change is visible when the call returns."
            .to_owned(),
    );
    Ok(report)
}

const PURGED: &str = "SIGKILL; the lists of both other replicas are complete without its agent";

fn agent(id: i64) -> anyhow::Result<AgentId> {
    Ok(AgentId::new(id)?)
}

fn methods() -> Arc<[Box<str>]> {
    Arc::from([METHOD.into()])
}

fn replica(name: &str) -> Replica {
    Replica { id: ReplicaId::new(name), address: format!("{name}:8155").into() }
}

/// The tracker of a replica, in this process.
struct TestReplica {
    tracker: Arc<RedisTracker>,
    task: JoinHandle<()>,
}

impl TestReplica {
    async fn start(redis: &Redis, name: &str, run: u64) -> anyhow::Result<Self> {
        let at = redis.address();
        let connect = Connect::to(Target::Server(Address::Tcp(at.ip().to_string(), at.port())));
        let tracker = RedisTracker::new(replica(name), Options::new(connect, run))?;
        let task = tokio::spawn(Arc::clone(&tracker).run());
        let (mut ready, mut health) = (tracker.ready(), tracker.health());
        timeout(STEP, ready.wait_for(|ready| *ready))
            .await
            .context("the tracker does not become ready")??;
        timeout(STEP, health.wait_for(|health| health.listening))
            .await
            .context("the tracker does not receive changes")??;
        Ok(Self { tracker, task })
    }

    /// Waits, by subscription only, until an agent is located at this number of replicas.
    async fn located(&self, id: AgentId, count: usize) -> anyhow::Result<()> {
        let mut changes = self.tracker.changes(id);
        let wait = async {
            while self.tracker.locate(id).await?.len() != count {
                changes.changed().await?;
            }
            anyhow::Ok(())
        };
        timeout(STEP, wait).await.context("a change is not seen")?
    }

    /// Waits until all announcements are in Redis.
    async fn written(&self) -> anyhow::Result<()> {
        let begin = Instant::now();
        let mut health = self.tracker.health();
        while !health.borrow_and_update().announced || self.tracker.counts().unwritten > 0 {
            ensure!(begin.elapsed() < STEP, "some announcements are not written after {STEP:?}");
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}

impl Drop for TestReplica {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn look_up(tracker: &dyn Tracker, held: usize) -> anyhow::Result<f64> {
    let mut rounds = Vec::new();
    for _ in 0..LOOKUPS.1 {
        let begin = Instant::now();
        for id in 0..LOOKUPS.0 {
            let found = black_box(tracker.locate(agent(1 + id % 1_000)?).await?);
            ensure!(found.len() == held, "{} replicas hold an agent that {held} hold", found.len());
        }
        rounds.push(begin.elapsed().as_secs_f64() * 1e6 / LOOKUPS.0 as f64);
    }
    median(rounds).context("there are rounds")
}

async fn lookups(report: &mut Report) -> anyhow::Result<()> {
    let memory = InMemoryTracker::new(replica("a"));
    let leases: Vec<_> =
        (1..=1_000).map(|id| Ok(memory.route(agent(id)?, methods()))).collect::<anyhow::Result<_>>()?;
    report.lookups.push(("memory", "1,000 agents in turn", look_up(&memory, 1).await?));
    drop(leases);
    let redis = Redis::run().await?;
    let (a, b) = (TestReplica::start(&redis, "a", 1).await?, TestReplica::start(&redis, "b", 2).await?);
    let _leases: Vec<_> =
        (1..=1_000).map(|id| Ok(a.tracker.route(agent(id)?, methods()))).collect::<anyhow::Result<_>>()?;
    for id in 1..=1_000 {
        b.located(agent(id)?, 1).await?;
    }
    let known = look_up(&*b.tracker, 1).await?;
    report.values.insert("locate_cached_us", known);
    report.lookups.push(("redis", "1,000 agents of another replica in turn, cached", known));
    let mut first = Times::default();
    let _more: Vec<_> = (10_001..=10_000 + CHANGES)
        .map(|id| Ok(a.tracker.route(agent(id)?, methods())))
        .collect::<anyhow::Result<_>>()?;
    a.written().await?;
    for id in 10_001..=10_000 + CHANGES {
        let begin = Instant::now();
        let found = b.tracker.locate(agent(id)?).await?;
        first.push(begin.elapsed());
        ensure!(found.len() == 1, "the first lookup finds no replica");
    }
    report.times(
        "redis",
        "first lookup of an agent",
        first,
        "locate of an agent that is not cached; its result",
    );
    Ok(())
}

async fn propagation(report: &mut Report) -> anyhow::Result<()> {
    let redis = Redis::run().await?;
    let (a, b) = (TestReplica::start(&redis, "a", 1).await?, TestReplica::start(&redis, "b", 2).await?);
    let (mut seen, mut gone) = (Times::default(), Times::default());
    for id in 1..=CHANGES {
        let id = agent(id)?;
        b.located(id, 0).await?;
        let begin = Instant::now();
        let lease = a.tracker.route(id, methods());
        b.located(id, 1).await?;
        seen.push(begin.elapsed());
        let begin = Instant::now();
        drop(lease);
        b.located(id, 0).await?;
        gone.push(begin.elapsed());
    }
    if let Some(p99) = seen.at(0.99) {
        report.values.insert("redis_visible_p99_ms", p99);
    }
    report.times(
        "redis",
        "announced → visible to another replica",
        seen,
        "route; the notified locate of another replica has it",
    );
    report.times(
        "redis",
        "withdrawn → invisible to another replica",
        gone,
        "the lease is dropped; the notified locate of another replica does not have it",
    );
    Ok(())
}

/// Measures propagation between processes.
async fn propagation_between_processes(
    report: &mut Report,
    environment: &Environment,
    version: &'static str,
) -> anyhow::Result<()> {
    let redis = if version == "redis" { Some(Redis::run().await?) } else { None };
    let options =
        deployment::Options { redis: redis.as_ref().map(Redis::address), ..deployment::Options::default() };
    let name = if version == "redis" { "tracker-redis" } else { "tracker-gossip" };
    let deployment = Deployment::new(environment, name, 3, options)?.start().await?;
    let times = latency::propagation(&deployment, 200).await?;
    let how = "the first tunnel is accepted; calls that wait on both other replicas have arrived in tunnels";
    report.times(version, "agent registered → routable from both other replicas", times, how);
    let times = latency::unblocking(&deployment, 200).await?;
    let how = "the agent starts to connect; the call that waits on another replica has arrived in its tunnel";
    report.times(version, "agent connects elsewhere → waiting call starts", times, how);
    Ok(())
}

async fn purge(report: &mut Report) -> anyhow::Result<()> {
    let redis = Redis::run().await?;
    let b = TestReplica::start(&redis, "b", 1).await?;
    let mut times = Times::default();
    for turn in 0..KILLS {
        let a = TestReplica::start(&redis, "a", 2 + turn as u64).await?;
        let id = agent(1)?;
        let lease = a.tracker.route(id, methods());
        b.located(id, 1).await?;
        // At a random point between two heartbeats.
        sleep(Duration::from_secs(4).mul_f64(rand::random::<f64>())).await;
        let begin = Instant::now();
        // Like SIGKILL: nothing more is written.
        a.task.abort();
        b.located(id, 0).await?;
        times.push(begin.elapsed());
        drop(lease);
    }
    let how = "its tracker is stopped as by SIGKILL; the notified locate of another replica does not have it (`table.ttl` is 10 s)";
    report.times("redis", "killed → gone", times, how);
    Ok(())
}

async fn reannounce(report: &mut Report) -> anyhow::Result<()> {
    let redis = Redis::run().await?;
    let (a, _b) = (TestReplica::start(&redis, "a", 1).await?, TestReplica::start(&redis, "b", 2).await?);
    let _leases: Vec<_> = (1..=REANNOUNCED.0)
        .map(|id| Ok(a.tracker.route(agent(id)?, methods())))
        .collect::<anyhow::Result<_>>()?;
    a.written().await?;
    let mut times = Times::default();
    for _ in 0..REANNOUNCED.1 {
        redis.stop().await;
        let mut health = a.tracker.health();
        timeout(STEP, health.wait_for(|health| !health.reachable))
            .await
            .context("the loss of Redis is not noticed")??;
        redis.start().await?;
        timeout(STEP, health.wait_for(|health| health.reachable))
            .await
            .context("the tracker does not reconnect to Redis")??;
        let begin = Instant::now();
        a.written().await?;
        times.push(begin.elapsed());
    }
    if let Some(worst) = times.at(1.0) {
        report.values.insert("redis_reannounce_10k_s", worst / 1e3);
    }
    let how = "an empty Redis is reachable again; all 10,000 agents are in it; the key is the maximum";
    report.times("redis", "10,000 agents announced again", times, how);
    Ok(())
}

/// Announces agents, waits for one refresh period so that their refreshes spread, and counts during another.
async fn idle_replica(agents: i64) -> anyhow::Result<Idle> {
    let redis = Redis::run().await?;
    let a = TestReplica::start(&redis, "a", 1).await?;
    let mut leases = Vec::new();
    for id in 1..=agents {
        let id = agent(id)?;
        leases.push(a.tracker.route(id, methods()));
        leases.push(a.tracker.connection(Connection {
            agent: id,
            name: "agent".into(),
            project_id: id.get(),
            id: ConnectionId::new(id.get())?,
            meta: AgentMeta {
                version: "v14.1.0".into(),
                commit: "abcdef0".into(),
                pod_namespace: "gitlab-agent".into(),
                pod_name: "gitlab-agent-5d8f7c9b6d-x2x7q".into(),
            },
            connected_at: Duration::from_secs(1_700_000_000),
        }));
    }
    a.written().await?;
    let period = Options::new(Connect::to(Target::Server(Address::Unix("/none".into()))), 0).entry_refresh;
    sleep(period).await;
    let before = Stats::of(redis.address()).await?;
    let begin = Instant::now();
    sleep(period).await;
    let after = Stats::of(redis.address()).await?;
    let seconds = begin.elapsed().as_secs_f64();
    let mut most: Vec<(String, f64)> = after
        .calls
        .iter()
        .map(|(name, calls)| {
            let during = calls - before.calls.get(name).copied().unwrap_or(0);
            (name.clone(), during as f64 / seconds)
        })
        .collect();
    most.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let commands = most.iter().map(|(_, rate)| rate).sum();
    let transactions = most.iter().find(|(name, _)| name == "exec").map_or(0.0, |(_, rate)| *rate);
    most.truncate(4);
    drop(leases);
    Ok(Idle {
        agents,
        commands,
        bytes: (after.bytes - before.bytes) as f64 / seconds,
        together: commands / transactions,
        most,
    })
}

/// Counters of Redis.
struct Stats {
    calls: BTreeMap<String, u64>,
    bytes: u64,
}

impl Stats {
    async fn of(at: SocketAddr) -> anyhow::Result<Self> {
        let commands = info(at, "commandstats").await?;
        let calls = commands
            .lines()
            .filter_map(|line| {
                let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
                let calls = rest.split(',').next()?.parse().ok()?;
                // INFO is the query itself.
                (name != "info").then(|| (name.to_owned(), calls))
            })
            .collect();
        let traffic = info(at, "stats").await?;
        let bytes = ["total_net_input_bytes:", "total_net_output_bytes:"]
            .iter()
            .map(|key| {
                let line = traffic.lines().find_map(|line| line.strip_prefix(key));
                Ok(line.with_context(|| format!("INFO has no {key}"))?.trim().parse::<u64>()?)
            })
            .sum::<anyhow::Result<u64>>()?;
        Ok(Self { calls, bytes })
    }
}

/// Sends an INFO command over a plain connection.
async fn info(at: SocketAddr, section: &str) -> anyhow::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect(at).await?);
    stream.get_mut().write_all(format!("INFO {section}\r\n").as_bytes()).await?;
    let mut head = String::new();
    stream.read_line(&mut head).await?;
    let Some(length) = head.trim().strip_prefix('$') else { bail!("unexpected response of Redis: {head:?}") };
    let mut text = vec![0; length.parse()?];
    stream.read_exact(&mut text).await?;
    Ok(String::from_utf8(text)?)
}
