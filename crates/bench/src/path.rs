//! `cargo xtask bench path`: compares direct calls with calls through kas. They alternate within each round.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{bail, ensure};

mod report;

use self::report::{Pair, Report};
use super::{
    child::{Process, machine},
    environment::{AGENTS, AgentOptions, Environment, Kas, KasOptions},
    load_client::LoadClient,
    only,
    protocol::{
        Agents, ClientCommand, ClientEvent, Load, Loaded, Metadata, Span, Target, Tokens, Waiters, Work,
    },
    report::Output,
};

#[derive(Debug, clap::Args)]
pub(crate) struct PathArgs {
    /// Number of rounds; a result is the median of all rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// One short round, to check that everything works; its numbers are not meaningful
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Measure only these rows, by name or by the first words of a name: `unary_100b_c64`, `unary`, `memory`
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Send direct calls without the metadata (token and agent id) of calls through kas
    #[arg(long)]
    bare_direct: bool,
    #[command(flatten)]
    output: Output,
}

/// The agent without a limit of tunnels.
const UNLIMITED: i64 = 1;
/// Agents with few tunnels: id and limit.
const FEW: [(i64, usize); 3] = [(2, 2), (3, 8), (4, 32)];
/// The agent that connects over WebSocket, without a limit of tunnels.
const INSIDE: i64 = 5;
/// The first id of the idle agents, and of the agents that calls wait for.
const FIRST_IDLE: i64 = 101;
const FIRST_AWAITED: i64 = 1_500;

/// A load that is measured both directly and through kas.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) work: Work,
    connections: usize,
    callers: usize,
    stalled: bool,
    tokens: Tokens,
    /// The agent connects over WebSocket.
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

/// The row that shows the cost of checking a signature.
const NEW_TOKENS: &str = "unary_100b_c10_new_tokens";
/// The two rows whose ratio is the factor of a stalled reader.
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

/// The measurement of one variant of a row in one round.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) loaded: Loaded,
    /// Processor time during the measurement.
    pub(super) client: Duration,
    /// Of kas, or of the process that serves direct calls.
    pub(super) server: Duration,
    pub(super) agent: Duration,
    /// The share of the machine that other processes used.
    pub(super) others: f64,
}

impl Sample {
    pub(super) fn per_second(&self) -> f64 {
        self.loaded.done as f64 / self.loaded.seconds
    }

    pub(super) fn megabytes_per_second(&self) -> f64 {
        self.loaded.bytes as f64 / self.loaded.seconds / 1e6
    }

    /// Returns the processor time of all processes for one call, or one message of a stream.
    pub(super) fn all_micros(&self) -> f64 {
        self.micros(self.client + self.server + self.agent)
    }

    pub(super) fn micros(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.loaded.done.max(1) as f64
    }
}

/// The processes, which all rounds use.
struct Setup {
    client: LoadClient,
    direct: (Process, SocketAddr),
    kas: Kas,
    agent: Process,
    few: Vec<Process>,
    inside: Process,
    secret_file: PathBuf,
    span: Span,
    bare_direct: bool,
}

impl Setup {
    fn new(environment: &Environment, span: Span, bare_direct: bool) -> anyhow::Result<Self> {
        let kas = environment.kas("kas", &KasOptions { websocket: true, ..KasOptions::default() })?;
        let mut setup = Self {
            client: environment.client()?,
            direct: environment.direct()?,
            agent: environment.agentk(&kas, UNLIMITED, &AgentOptions::default())?,
            few: FEW
                .iter()
                .map(|(agent, max)| {
                    let options = AgentOptions { max_tunnels: Some(*max), ..AgentOptions::default() };
                    environment.agentk(&kas, *agent, &options)
                })
                .collect::<Result<_, _>>()?,
            inside: environment.agentk_over_websocket(&kas, INSIDE)?,
            kas,
            secret_file: environment.secret_file(),
            span,
            bare_direct,
        };
        // The first calls wait until the agents are connected.
        for agent in [UNLIMITED, INSIDE].into_iter().chain(FEW.map(|(agent, _)| agent)) {
            let span = Span::Count { warm: 1, run: 1 };
            let load = Load { span, ..setup.load(&row("first", "", Work::Unary(SMALL), 1, 1), Some(agent)) };
            let loaded = setup.client.load(&load, |_, _| Ok(()))?;
            if loaded.failed > 0 {
                bail!(
                    "a call to agent {agent} failed: {}\nlog of agentk:\n{}\nlog of kas:\n{}",
                    loaded.why.unwrap_or_default(),
                    setup.agent.tail(),
                    setup.kas.process.tail()
                );
            }
        }
        Ok(setup)
    }

    fn load(&self, row: &Row, through: Option<i64>) -> Load {
        let address = if through.is_some() { self.kas.api } else { self.direct.1 };
        // A direct call has the same metadata, which its server ignores.
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

    /// Measures a row. `through` is the agent; `None` measures direct calls.
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
        let [begin, end] = edges[..] else { bail!("the load client did not report begin and end") };
        let used = |at: usize| end[at].saturating_sub(begin[at]);
        let (client, server, agent) = (used(0), used(1), used(2));
        let others =
            used(3).saturating_sub(client + server + agent).as_secs_f64() / used(4).as_secs_f64().max(0.01);
        Ok(Sample { loaded, client, server, agent, others })
    }
}

/// The size of the benchmark.
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
    only::check(&args.only, "row", &names().collect::<Vec<_>>())?;
    let wanted = |name: &str| only::wants(&args.only, &[name]);
    let environment = Environment::new()?;
    let begin = tokio::time::Instant::now();
    let mut setup = Setup::new(&environment, scale.span, args.bare_direct)?;
    let mut report = Report::default();
    for round in 1..=scale.rounds {
        let progress = |what: &str| {
            eprintln!("[{:>4.0} s] round {round} of {}: {what}", begin.elapsed().as_secs_f64(), scale.rounds);
        };
        for row in ROWS.iter().filter(|row| wanted(row.name)) {
            progress(&format!("{} ({})", row.name, row.title));
            // The order alternates too, so that neither variant is always first.
            let mut samples = BTreeMap::new();
            let variants = [None, Some(if row.websocket { INSIDE } else { UNLIMITED })];
            for at in [round % 2, (round + 1) % 2] {
                let variant = variants[at as usize];
                samples.insert(variant.is_some(), setup.measure(row, variant)?);
            }
            if let (Some(direct), Some(kas)) = (samples.remove(&false), samples.remove(&true)) {
                report.rows.entry(row.name).or_default().push(Pair { direct, kas });
            }
        }
        if wanted("tunnels") {
            let row = row("tunnels", "", Work::Unary(SMALL), 4, 16);
            let direct = setup.measure(&row, None)?;
            for (agent, tunnels) in FEW {
                progress(&format!("at most {tunnels} tunnels, 16 callers"));
                let kas = setup.measure(&row, Some(agent))?;
                report.few.entry(tunnels).or_default().push(Pair { direct: direct.clone(), kas });
            }
        }
        if wanted("waiter_wake") {
            progress("calls that wait for an agent");
            let kas = environment.kas("kas-waiters", &KasOptions::default())?;
            let waiters = Waiters {
                agents: kas.agents,
                api: kas.api,
                secret_file: environment.secret_file(),
                first: FIRST_AWAITED,
                count: scale.waiters,
            };
            match environment.client()?.ask(&ClientCommand::Waiters(waiters))? {
                ClientEvent::Woken(woken) => report.woken.push(woken),
                event => bail!("unexpected event of the load client: {event:?}"),
            }
        }
        if wanted("memory") {
            for (tunnels, tls) in [(2, false), (10, false), (2, true), (10, true)] {
                let kind = if tls { "TLS" } else { "plain" };
                progress(&format!(
                    "memory of {} idle agents with {tunnels} tunnels, {kind}",
                    scale.idle_agents
                ));
                let kib = memory(&environment, scale.idle_agents, tunnels, tls)?;
                report.memory.entry((tls, tunnels)).or_default().push(kib);
            }
        }
    }
    let scale = (scale.rounds, scale.idle_agents, scale.waiters);
    super::report::finish(&report.values(), &report.tables(scale), "path", &command(args), &args.output)
}

/// Returns the names of everything that can be measured.
fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.name).chain(["tunnels", "waiter_wake", "memory"])
}

/// Returns the command line that repeats the benchmark.
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
    command + &only::argument(&args.only)
}

/// Returns the memory of kas for each idle agent, in KiB.
fn memory(environment: &Environment, count: i64, tunnels: usize, tls: bool) -> anyhow::Result<f64> {
    ensure!(FIRST_IDLE + count <= AGENTS.min(FIRST_AWAITED), "more agents than the identity file contains");
    let kas = environment.kas("kas-memory", &KasOptions { tls, ..KasOptions::default() })?;
    let mut client = environment.client()?;
    let mut connect = |first, count| {
        let ca_file = tls.then(|| environment.certificate());
        client.ask(&ClientCommand::Agents(Agents { address: kas.agents, ca_file, first, count, tunnels }))
    };
    // A few agents first, so that memory which is allocated once is not counted.
    connect(FIRST_IDLE - 8, 8)?;
    std::thread::sleep(Duration::from_millis(300));
    let before = kas.process.rss()?;
    connect(FIRST_IDLE, count)?;
    std::thread::sleep(Duration::from_millis(1_500));
    let after = kas.process.rss()?;
    Ok(after.saturating_sub(before) as f64 / count as f64)
}
