//! `cargo xtask bench path`: rounds in which direct calls and calls through kas alternate.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{bail, ensure};

use super::{
    PathArgs,
    orders::{Agents, Load, Loaded, Metadata, Note, Order, Span, Target, Tokens, Waiters, Work},
    processes::{AGENTS, Binaries, Client, Ground, Kas, KasOptions, Process, machine},
    report::{self, Pair, Report},
};

/// The agents of the load; tunnels without limit first.
const UNLIMITED: i64 = 1;
/// Agents with few tunnels: number and limit.
const FEW: [(i64, usize); 3] = [(2, 2), (3, 8), (4, 32)];
/// An agent inside WebSocket, tunnels without limit.
const INSIDE: i64 = 5;
/// Where idle agents begin, and where those that are waited for do.
const IDLE_FROM: i64 = 101;
const WAITED_FROM: i64 = 1_500;

/// One thing that is done both ways.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) work: Work,
    connections: usize,
    callers: usize,
    stalled: bool,
    tokens: Tokens,
    /// The agent is inside WebSocket.
    websocket: bool,
}

const SMALL: u32 = 100;
const LARGE: u32 = 64 * 1024;

pub(super) const ROWS: [Row; 14] = [
    row("unary_100b_c1", "100 B, 1 caller", Work::Unary(SMALL), 1, 1),
    row("unary_100b_c10", "100 B, 10 callers, 4 connections", Work::Unary(SMALL), 4, 10),
    Row {
        tokens: Tokens::EachCall,
        ..row(NEW_TOKENS, "the same, each call with a new token", Work::Unary(SMALL), 4, 10)
    },
    row("unary_100b_c64", "100 B, 64 callers, 4 connections", Work::Unary(SMALL), 4, 64),
    row("unary_64k_c1", "64 KiB, 1 caller", Work::Unary(LARGE), 1, 1),
    row("unary_64k_c64", "64 KiB, 64 callers, 4 connections", Work::Unary(LARGE), 4, 64),
    row("stream_down_64k", "64 KiB messages down, 4 streams, 2 connections", Work::Down(LARGE), 2, 4),
    row("stream_up_64k", "64 KiB messages up, 4 streams, 2 connections", Work::Up(LARGE), 2, 4),
    row("unary_100b_c16", "100 B, 16 callers, 4 connections", Work::Unary(SMALL), 4, 16),
    row(ALONE, "100 B, 8 callers, 4 connections", Work::Unary(SMALL), 4, 8),
    Row { stalled: true, ..row(BESIDE, "the same beside a stalled download", Work::Unary(SMALL), 4, 8) },
    inside(row(
        "websocket_100b_c64",
        "WebSocket: 100 B, 64 callers, 4 connections",
        Work::Unary(SMALL),
        4,
        64,
    )),
    inside(row("websocket_down_64k", "WebSocket: 64 KiB messages down, 4 streams", Work::Down(LARGE), 2, 4)),
    inside(row("websocket_up_64k", "WebSocket: 64 KiB messages up, 4 streams", Work::Up(LARGE), 2, 4)),
];

const fn inside(row: Row) -> Row {
    Row { websocket: true, ..row }
}

/// The row that says what checking a signature costs.
const NEW_TOKENS: &str = "unary_100b_c10_new_tokens";
/// The two rows of which the stalled reader's factor is made.
pub(super) const ALONE: &str = "fast_alone";
pub(super) const BESIDE: &str = "fast_beside_stalled";

const fn row(name: &'static str, title: &'static str, work: Work, connections: usize, callers: usize) -> Row {
    Row {
        name,
        title,
        work,
        connections,
        callers,
        stalled: false,
        tokens: Tokens::EachSecond,
        websocket: false,
    }
}

/// What one variant of a row did in one round.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) loaded: Loaded,
    /// Processor time in the measured part.
    pub(super) client: Duration,
    /// Of kas, or of the process that answers directly.
    pub(super) server: Duration,
    pub(super) agent: Duration,
    /// The part of the machine that processes of others took.
    pub(super) others: f64,
}

impl Sample {
    pub(super) fn per_second(&self) -> f64 {
        self.loaded.done as f64 / self.loaded.seconds
    }

    pub(super) fn megabytes_per_second(&self) -> f64 {
        self.loaded.bytes as f64 / self.loaded.seconds / 1e6
    }

    /// What one call, or one message, takes of all processes together.
    pub(super) fn all_micros(&self) -> f64 {
        self.micros(self.client + self.server + self.agent)
    }

    pub(super) fn micros(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.loaded.done.max(1) as f64
    }
}

/// The processes that all rounds share.
struct Stage {
    client: Client,
    direct: (Process, SocketAddr),
    kas: Kas,
    agent: Process,
    few: Vec<Process>,
    inside: Process,
    secret_file: PathBuf,
    span: Span,
    bare_direct: bool,
}

impl Stage {
    fn new(ground: &Ground, span: Span, bare_direct: bool) -> anyhow::Result<Self> {
        let kas = ground.kas("kas", &KasOptions { websocket: true, ..KasOptions::default() })?;
        let mut stage = Self {
            client: ground.client()?,
            direct: ground.direct()?,
            agent: ground.agentk(&kas, UNLIMITED, None)?,
            few: FEW
                .iter()
                .map(|(agent, max)| ground.agentk(&kas, *agent, Some(*max)))
                .collect::<Result<_, _>>()?,
            inside: ground.agentk_inside(&kas, INSIDE)?,
            kas,
            secret_file: ground.secret_file(),
            span,
            bare_direct,
        };
        // The first calls wait until the agents are connected.
        for agent in [UNLIMITED, INSIDE].into_iter().chain(FEW.map(|(agent, _)| agent)) {
            let span = Span::Count { warm: 1, run: 1 };
            let load = Load { span, ..stage.load(&row("first", "", Work::Unary(SMALL), 1, 1), Some(agent)) };
            let loaded = stage.client.load(&load, |_, _| Ok(()))?;
            if loaded.failed > 0 {
                bail!(
                    "agent {agent} cannot be called: {}\nlog of agentk:\n{}\nlog of kas:\n{}",
                    loaded.why.unwrap_or_default(),
                    stage.agent.tail(),
                    stage.kas.process.tail()
                );
            }
        }
        Ok(stage)
    }

    fn load(&self, row: &Row, through: Option<i64>) -> Load {
        let address = if through.is_some() { self.kas.api } else { self.direct.1 };
        // A direct call says the same, and nobody looks at it.
        let agent = if self.bare_direct { through } else { through.or(Some(UNLIMITED)) };
        let metadata =
            agent.map(|agent| Metadata { agent, secret_file: self.secret_file.clone(), tokens: row.tokens });
        Load {
            target: Target { address, metadata },
            work: row.work,
            connections: row.connections,
            callers: row.callers,
            span: self.span,
            stalled: row.stalled,
        }
    }

    /// Measures a row; `through`: the agent, unless called directly.
    fn measure(&mut self, row: &Row, through: Option<i64>) -> anyhow::Result<Sample> {
        let load = self.load(row, through);
        let server = if through.is_some() { &self.kas.process } else { &self.direct.0 };
        let agent = match through {
            Some(UNLIMITED) => Some(&self.agent),
            Some(INSIDE) => Some(&self.inside),
            Some(number) => {
                FEW.iter().position(|(agent, _)| *agent == number).and_then(|at| self.few.get(at))
            }
            None => None,
        };
        let mut edges = Vec::with_capacity(2);
        let loaded = self.client.load(&load, |client, _| {
            let (busy, all) = machine()?;
            let agent = agent.map_or(Ok(Duration::ZERO), Process::cpu)?;
            edges.push([client.cpu()?, server.cpu()?, agent, busy, all]);
            Ok(())
        })?;
        ensure!(
            loaded.failed == 0,
            "{} calls of {} failed ({}): {}",
            loaded.failed,
            row.name,
            if through.is_some() { "through kas" } else { "direct" },
            loaded.why.unwrap_or_default()
        );
        let [begin, end] = edges[..] else { bail!("the load client did not say when it began and ended") };
        let used = |at: usize| end[at].saturating_sub(begin[at]);
        let (client, server, agent) = (used(0), used(1), used(2));
        let others =
            used(3).saturating_sub(client + server + agent).as_secs_f64() / used(4).as_secs_f64().max(0.01);
        Ok(Sample { loaded, client, server, agent, others })
    }
}

/// How long and how much.
struct Scale {
    rounds: u32,
    span: Span,
    idle_agents: i64,
    waiters: i64,
}

pub(super) fn run(args: &PathArgs) -> anyhow::Result<()> {
    let scale = if args.quick {
        Scale { rounds: 1, span: Span::Time { warm: 200, run: 500 }, idle_agents: 200, waiters: 50 }
    } else {
        Scale {
            rounds: args.rounds,
            span: Span::Time { warm: 500, run: 1_500 },
            idle_agents: 1_000,
            waiters: 200,
        }
    };
    for only in &args.only {
        ensure!(
            names().any(|name| is_meant(name, only)),
            "--only {only}: there is no such row; there are {}",
            names().collect::<Vec<_>>().join(", ")
        );
    }
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| is_meant(name, only));
    let ground = Ground::new(Binaries::build(args.output.no_build)?)?;
    let begin = tokio::time::Instant::now();
    let mut stage = Stage::new(&ground, scale.span, args.bare_direct)?;
    let mut report = Report::default();
    for round in 1..=scale.rounds {
        let progress = |what: &str| {
            eprintln!("[{:>4.0} s] round {round} of {}: {what}", begin.elapsed().as_secs_f64(), scale.rounds);
        };
        for row in ROWS.iter().filter(|row| wanted(row.name)) {
            progress(&format!("{} ({})", row.name, row.title));
            // The order alternates too, so that neither way is always first.
            let mut samples = BTreeMap::new();
            let ways = [None, Some(if row.websocket { INSIDE } else { UNLIMITED })];
            for at in [round % 2, (round + 1) % 2] {
                let way = ways[at as usize];
                samples.insert(way.is_some(), stage.measure(row, way)?);
            }
            if let (Some(direct), Some(kas)) = (samples.remove(&false), samples.remove(&true)) {
                report.rows.entry(row.name).or_default().push(Pair { direct, kas });
            }
        }
        if wanted("tunnels") {
            let row = row("tunnels", "", Work::Unary(SMALL), 4, 16);
            let direct = stage.measure(&row, None)?;
            for (agent, tunnels) in FEW {
                progress(&format!("at most {tunnels} tunnels, 16 callers"));
                let kas = stage.measure(&row, Some(agent))?;
                report.few.entry(tunnels).or_default().push(Pair { direct: direct.clone(), kas });
            }
        }
        if wanted("waiter_wake") {
            progress("calls that wait for an agent");
            let kas = ground.kas("kas-waiters", &KasOptions::default())?;
            let order = Waiters {
                agents: kas.agents,
                api: kas.api,
                secret_file: ground.secret_file(),
                first: WAITED_FROM,
                count: scale.waiters,
            };
            match ground.client()?.ask(&Order::Waiters(order))? {
                Note::Woken(woken) => report.woken.push(woken),
                note => bail!("the load client said {note:?}"),
            }
        }
        if wanted("memory") {
            for (tunnels, tls) in [(2, false), (10, false), (2, true), (10, true)] {
                let kind = if tls { "TLS" } else { "plain" };
                progress(&format!(
                    "memory of {} idle agents with {tunnels} tunnels, {kind}",
                    scale.idle_agents
                ));
                let kib = memory(&ground, scale.idle_agents, tunnels, tls)?;
                report.memory.entry((tls, tunnels)).or_default().push(kib);
            }
        }
    }
    let scale = (scale.rounds, scale.idle_agents, scale.waiters);
    report::finish(&report.values(), &report.tables(scale), "path", &command(args), &args.output)
}

/// Names all that can be measured.
fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.name).chain(["tunnels", "waiter_wake", "memory"])
}

/// Whether `only` is a row's name or the beginning of it: `unary` means all of `unary_…`.
pub(super) fn is_meant(name: &str, only: &str) -> bool {
    name.strip_prefix(only).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

/// What a person types to repeat it.
fn command(args: &PathArgs) -> String {
    let mut command = "cargo xtask bench path".to_owned();
    if args.quick {
        command.push_str(" --quick");
    } else {
        command.push_str(&format!(" --rounds {}", args.rounds));
    }
    if args.bare_direct {
        command.push_str(" --bare-direct");
    }
    if !args.only.is_empty() {
        command.push_str(&format!(" --only {}", args.only.join(",")));
    }
    command
}

/// Returns by how many KiB kas grows with each idle agent.
fn memory(ground: &Ground, count: i64, tunnels: usize, tls: bool) -> anyhow::Result<f64> {
    ensure!(IDLE_FROM + count <= AGENTS.min(WAITED_FROM), "more agents than the identity file has");
    let kas = ground.kas("kas-memory", &KasOptions { tls, ..KasOptions::default() })?;
    let mut client = ground.client()?;
    let mut connect = |first, count| {
        let ca_file = tls.then(|| ground.certificate());
        client.ask(&Order::Agents(Agents { address: kas.agents, ca_file, first, count, tunnels }))
    };
    // The first few agents pay for what there is only once.
    connect(IDLE_FROM - 8, 8)?;
    std::thread::sleep(Duration::from_millis(300));
    let before = kas.process.rss()?;
    connect(IDLE_FROM, count)?;
    std::thread::sleep(Duration::from_millis(1_500));
    let after = kas.process.rss()?;
    Ok(after.saturating_sub(before) as f64 / count as f64)
}
