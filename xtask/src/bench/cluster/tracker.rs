//! `cargo xtask bench tracker`: what each version of the trait `Tracker` costs, and how soon others see what it is told.
//!
//! What replicas do for callers is measured on processes, with gossip and with Redis. What only the trait has (a lookup of
//! what is known, commands of a replica at rest, announcing again) is measured on trackers in this process, which share a
//! real redis-server on loopback.

use std::{
    collections::BTreeMap, fmt::Write as _, hint::black_box, net::SocketAddr, sync::Arc, time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use cluster::{AgentMeta, Connection, InMemoryTracker, Replica, Tracker};
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
    super::{
        TrackerArgs,
        processes::{Binaries, Ground},
        report::{self, Values, median, short},
    },
    loss, speed,
    stage::{self, Stage},
    times::Times,
};

/// Agents whose changes are timed.
const CHANGES: i64 = 500;
/// Lookups of one round, and rounds.
const LOOKUPS: (i64, usize) = (100_000, 20);
/// Kills, each followed by a life of the dead replica's entries.
const KILLS: usize = 5;
/// Agents that are announced again, and how often.
const AGAIN: (i64, usize) = (10_000, 5);
/// Agents of a replica at rest.
const AT_REST: [(i64, &str); 2] = [(10_000, ""), (100_000, "redis_idle_commands_per_s_100k_agents")];
/// What anything may take before something is wrong.
const STEP: Duration = Duration::from_secs(60);
const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

/// What a version of the trait did.
#[derive(Default)]
struct Column {
    rows: Vec<(&'static str, Times, &'static str)>,
}

#[derive(Default)]
struct Report {
    values: Values,
    versions: BTreeMap<&'static str, Column>,
    lookups: Vec<(&'static str, &'static str, f64)>,
    rest: Vec<Rest>,
    notes: Vec<String>,
}

/// A replica at rest.
struct Rest {
    agents: i64,
    commands: f64,
    bytes: f64,
    /// Commands for each transaction.
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
        writeln!(out, "| version | | N | p50 | p99 | max | from, to |")?;
        writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
        for (version, column) in &self.versions {
            for (what, times, how) in &column.rows {
                writeln!(out, "| {version} | {what} | {} | {how} |", times.cells())?;
            }
        }
        writeln!(out, "\n### Lookups\n\nMicroseconds of our own time, medians of {} rounds.\n", LOOKUPS.1)?;
        writeln!(out, "| version | what is looked up | µs |\n| --- | --- | --- |")?;
        for (version, what, micros) in &self.lookups {
            writeln!(out, "| {version} | {what} | {} |", short(*micros))?;
        }
        if !self.rest.is_empty() {
            writeln!(
                out,
                "\n### A replica at rest\n\nOne replica with Redis, an open configuration stream and tunnels of each agent, \
                 each agent in a project of its own (in common projects it is less). Commands are what `INFO commandstats` \
                 of Redis counts, those in transactions and MULTI and EXEC among them, over one refresh of 14.1's 240 s.\n"
            )?;
            writeln!(
                out,
                "| agents | commands/s | of them in one pipeline | KB/s, both directions | the most frequent, per second |"
            )?;
            writeln!(out, "| --- | --- | --- | --- | --- |")?;
            for rest in &self.rest {
                let most: Vec<String> =
                    rest.most.iter().map(|(name, rate)| format!("{name} {}", short(*rate))).collect();
                writeln!(
                    out,
                    "| {} | {} | {} | {} | {} |",
                    rest.agents,
                    short(rest.commands),
                    short(rest.together),
                    short(rest.bytes / 1e3),
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

pub(in super::super) fn run(args: &TrackerArgs) -> anyhow::Result<()> {
    runtime::tls::install();
    runtime::io::raise_file_limit();
    let ground = Ground::new(Binaries::build(args.output.no_build)?)?;
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = tokio.block_on(measure(args, &ground))?;
    let command = format!("cargo xtask bench tracker{}", if args.no_rest { " --no-rest" } else { "" });
    report::finish(&report.values, &report.tables()?, "tracker", &command, &args.output)
}

async fn measure(args: &TrackerArgs, ground: &Ground) -> anyhow::Result<Report> {
    let begin = Instant::now();
    let say = |what: &str| eprintln!("[{:>4.0} s] {what}", begin.elapsed().as_secs_f64());
    let mut report = Report::default();

    say("lookups");
    lookups(&mut report).await?;
    say("agents that come, to replicas in this process that share a Redis");
    visible(&mut report).await?;
    say("agents that come, to processes");
    for version in ["gossip", "redis"] {
        processes(&mut report, ground, version).await?;
    }
    say("replicas are killed");
    let kills = loss::kills(ground, KILLS).await?;
    report.times("gossip", "killed → gone from the lists", kills.purged, PURGED);
    purge(&mut report).await?;
    say("10,000 agents are announced again");
    again(&mut report).await?;
    if !args.no_rest {
        say("replicas at rest: eight minutes");
        for (agents, key) in AT_REST {
            let rest = at_rest(agents).await?;
            if !key.is_empty() {
                report.values.insert(key, rest.commands);
            }
            report.rest.push(rest);
        }
    }
    report.notes.push(
        "What gossip and table streams send at rest, and how that grows, is in [scale.md](scale.md). With `memory` there are \
         no others: what is announced is visible when the call returns."
            .to_owned(),
    );
    Ok(report)
}

const PURGED: &str = "SIGKILL; lists of both survivors are without its agent and miss nobody else";

fn agent(id: i64) -> anyhow::Result<AgentId> {
    Ok(AgentId::new(id)?)
}

fn methods() -> Arc<[Box<str>]> {
    Arc::from([METHOD.into()])
}

fn replica(name: &str) -> Replica {
    Replica { id: ReplicaId::new(name), address: format!("{name}:8155").into() }
}

/// A replica's tracker in this process.
struct Running {
    tracker: Arc<RedisTracker>,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(redis: &Redis, name: &str, run: u64) -> anyhow::Result<Self> {
        let at = redis.address();
        let connect = Connect::to(Target::Server(Address::Tcp(at.ip().to_string(), at.port())));
        let tracker = RedisTracker::new(replica(name), Options::new(connect, run))?;
        let task = tokio::spawn(Arc::clone(&tracker).run());
        let (mut ready, mut health) = (tracker.ready(), tracker.health());
        timeout(STEP, ready.wait_for(|ready| *ready)).await.context("a replica does not become ready")??;
        timeout(STEP, health.wait_for(|health| health.listening)).await.context("no news come in")??;
        Ok(Self { tracker, task })
    }

    /// Waits, by subscription alone, until an agent is located at so many replicas.
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

    /// Waits until everything that it announces is in Redis.
    async fn written(&self) -> anyhow::Result<()> {
        let begin = Instant::now();
        let mut health = self.tracker.health();
        while !health.borrow_and_update().announced || self.tracker.counts().unwritten > 0 {
            ensure!(begin.elapsed() < STEP, "not everything is written after {STEP:?}");
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn look_up(tracker: &dyn Tracker, held: usize) -> anyhow::Result<f64> {
    let mut rounds = Vec::new();
    for _ in 0..LOOKUPS.1 {
        let begin = Instant::now();
        for id in 0..LOOKUPS.0 {
            // Of 1,000 agents in turn.
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
    let (a, b) = (Running::start(&redis, "a", 1).await?, Running::start(&redis, "b", 2).await?);
    let _leases: Vec<_> =
        (1..=1_000).map(|id| Ok(a.tracker.route(agent(id)?, methods()))).collect::<anyhow::Result<_>>()?;
    for id in 1..=1_000 {
        b.located(agent(id)?, 1).await?;
    }
    let known = look_up(&*b.tracker, 1).await?;
    report.values.insert("locate_cached_us", known);
    report.lookups.push(("redis", "1,000 agents of another replica in turn, known", known));
    let mut first = Times::default();
    let _more: Vec<_> = (10_001..=10_000 + CHANGES)
        .map(|id| Ok(a.tracker.route(agent(id)?, methods())))
        .collect::<anyhow::Result<_>>()?;
    a.written().await?;
    for id in 10_001..=10_000 + CHANGES {
        let begin = Instant::now();
        let found = b.tracker.locate(agent(id)?).await?;
        first.push(begin.elapsed());
        ensure!(found.len() == 1, "a first look finds nobody");
    }
    report.times(
        "redis",
        "first look at an agent",
        first,
        "locate, of an agent that nobody has asked for; its answer",
    );
    Ok(())
}

async fn visible(report: &mut Report) -> anyhow::Result<()> {
    let redis = Redis::run().await?;
    let (a, b) = (Running::start(&redis, "a", 1).await?, Running::start(&redis, "b", 2).await?);
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
        "announced → visible elsewhere",
        seen,
        "route; locate of another replica, woken, has it",
    );
    report.times("redis", "withdrawn → seen elsewhere", gone, "the lease drops; the same is without it");
    Ok(())
}

/// What callers of processes see.
async fn processes(report: &mut Report, ground: &Ground, version: &'static str) -> anyhow::Result<()> {
    let redis = if version == "redis" { Some(Redis::run().await?) } else { None };
    let options = stage::Options { redis: redis.as_ref().map(Redis::address), ..stage::Options::default() };
    let name = if version == "redis" { "tracker-redis" } else { "tracker-gossip" };
    let stage = Stage::new(ground, name, 3, options)?.start().await?;
    let times = speed::propagation(&stage, 200).await?;
    let how = "the first tunnel is accepted; calls that wait on both others have arrived in tunnels";
    report.times(version, "agent registered → routable from both others", times, how);
    let times = speed::unblocking(&stage, 200).await?;
    let how = "the agent begins to dial; the call that waits on another replica has arrived in its tunnel";
    report.times(version, "agent connects elsewhere → waiting call starts", times, how);
    Ok(())
}

async fn purge(report: &mut Report) -> anyhow::Result<()> {
    let redis = Redis::run().await?;
    let b = Running::start(&redis, "b", 1).await?;
    let mut times = Times::default();
    for turn in 0..KILLS {
        let a = Running::start(&redis, "a", 2 + turn as u64).await?;
        let id = agent(1)?;
        let lease = a.tracker.route(id, methods());
        b.located(id, 1).await?;
        // At any moment of its beat.
        sleep(Duration::from_secs(4).mul_f64(rand::random::<f64>())).await;
        let begin = Instant::now();
        // As SIGKILL: nothing more is written.
        a.task.abort();
        b.located(id, 0).await?;
        times.push(begin.elapsed());
        drop(lease);
    }
    let how = "its tracker is cut off as by SIGKILL; locate of another replica, woken, is without it (`table.ttl` is 10 s)";
    report.times("redis", "killed → gone", times, how);
    Ok(())
}

async fn again(report: &mut Report) -> anyhow::Result<()> {
    let redis = Redis::run().await?;
    let (a, _b) = (Running::start(&redis, "a", 1).await?, Running::start(&redis, "b", 2).await?);
    let _leases: Vec<_> =
        (1..=AGAIN.0).map(|id| Ok(a.tracker.route(agent(id)?, methods()))).collect::<anyhow::Result<_>>()?;
    a.written().await?;
    let mut times = Times::default();
    for _ in 0..AGAIN.1 {
        redis.stop().await;
        let mut health = a.tracker.health();
        timeout(STEP, health.wait_for(|health| !health.reachable))
            .await
            .context("the loss is not noticed")??;
        redis.start().await?;
        timeout(STEP, health.wait_for(|health| health.reachable))
            .await
            .context("Redis is not found again")??;
        let begin = Instant::now();
        a.written().await?;
        times.push(begin.elapsed());
    }
    if let Some(worst) = times.at(1.0) {
        report.values.insert("redis_reannounce_10k_s", worst / 1e3);
    }
    let how = "an empty Redis answers again; all 10,000 agents are in it; the key is the worst";
    report.times("redis", "10,000 agents announced again", times, how);
    Ok(())
}

/// Announces agents, lets their refreshes spread for one period, and counts for another.
async fn at_rest(agents: i64) -> anyhow::Result<Rest> {
    let redis = Redis::run().await?;
    let a = Running::start(&redis, "a", 1).await?;
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
    Ok(Rest {
        agents,
        commands,
        bytes: (after.bytes - before.bytes) as f64 / seconds,
        together: commands / transactions,
        most,
    })
}

/// What Redis counts.
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
                // This question itself.
                (name != "info").then(|| (name.to_owned(), calls))
            })
            .collect();
        let traffic = info(at, "stats").await?;
        let bytes = ["total_net_input_bytes:", "total_net_output_bytes:"]
            .iter()
            .map(|key| {
                let line = traffic.lines().find_map(|line| line.strip_prefix(key));
                Ok(line.with_context(|| format!("Redis tells no {key}"))?.trim().parse::<u64>()?)
            })
            .sum::<anyhow::Result<u64>>()?;
        Ok(Self { calls, bytes })
    }
}

/// Asks as a person with `nc` would.
async fn info(at: SocketAddr, section: &str) -> anyhow::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect(at).await?);
    stream.get_mut().write_all(format!("INFO {section}\r\n").as_bytes()).await?;
    let mut head = String::new();
    stream.read_line(&mut head).await?;
    let Some(length) = head.trim().strip_prefix('$') else { bail!("Redis answers {head:?}") };
    let mut text = vec![0; length.parse()?];
    stream.read_exact(&mut text).await?;
    Ok(String::from_utf8(text)?)
}
