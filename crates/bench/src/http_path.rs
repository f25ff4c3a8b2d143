//! `cargo xtask bench http`: HTTP requests through kas and agentk, compared with direct requests to the same
//! server by the same client. All ways alternate within each round.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{bail, ensure};

mod endpoint;
mod report;

use self::{endpoint::ROWS as ENDPOINT_ROWS, report::Report};
use super::{
    child::{Process, machine},
    environment::{AgentOptions, ApiServer, Environment, Kas, KasOptions, StaticServer, free_addresses},
    load_client::LoadClient,
    only,
    protocol::{HttpLoad, HttpServer, HttpTarget, HttpWork, Loaded, Metadata, Span, Tokens},
    report::{Output, finish},
};

#[derive(Debug, clap::Args)]
pub(crate) struct HttpArgs {
    /// Number of rounds; a result is the median of all rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// One short round, to check that everything works; its numbers are not meaningful
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Measure only these rows, by name or by the first words of a name: `get_1k_c64`, `get`, `down`; `k8s`
    /// for those of the Kubernetes API endpoint: `k8s_get_c64`, `k8s_get_c1`, `k8s_watch_events`,
    /// `k8s_watch_delay`, `k8s_exec_rtt`, `k8s_exec_bulk`, `k8s_cp`, `k8s_slow_exec`, `k8s_slow_bulk`,
    /// `k8s_idle_watch`, `k8s_idle_exec`, `k8s_drain`, `k8s_conformance`. The slow ones need root
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure only one hop, and no TLS to the API server
    #[arg(long)]
    one_hop: bool,
    /// Measure kas and agentk of this folder too, an earlier build, and compare the processor time of both
    #[arg(long, value_name = "FOLDER")]
    before: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// A load that is measured in every way.
#[derive(Debug)]
struct Row {
    name: &'static str,
    title: &'static str,
    work: HttpWork,
    connections: usize,
    callers: usize,
}

const fn row(
    name: &'static str,
    title: &'static str,
    work: HttpWork,
    connections: usize,
    callers: usize,
) -> Row {
    Row { name, title, work, connections, callers }
}

const GET: HttpWork = HttpWork::Get(1024);
const DOWN: HttpWork = HttpWork::Down(64 << 20);
const UP: HttpWork = HttpWork::Up(64 << 20);

const ROWS: [Row; 9] = [
    row("get_1k_c1", "1 caller", GET, 1, 1),
    row("get_1k_c10", "10 callers", GET, 4, 10),
    row("get_1k_c64", "64 callers", GET, 4, 64),
    row("down_64m_c1", "down, 1 caller", DOWN, 1, 1),
    row("down_64m_c4", "down, 4 callers", DOWN, 4, 4),
    row("up_64m_c1", "up, 1 caller", UP, 1, 1),
    row("up_64m_c4", "up, 4 callers", UP, 4, 4),
    row("watch_2k", "4 watches, as fast as possible", HttpWork::Events, 4, 4),
    row("watch_2k_paced", "10 watches, 100 events a second each", HttpWork::PacedEvents(100), 4, 10),
];

/// A build of kas and agentk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Build {
    This,
    /// That of `--before`.
    Before,
}

/// The way of a request to the static server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Route {
    Http1,
    Http2,
    /// Through the replica that holds the agent.
    OneHop(Build),
    /// Through another replica.
    TwoHops(Build),
}

/// A route, and whether the client or agentk uses TLS to the static server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    tls: bool,
    route: Route,
}

const fn plain(route: Route) -> Way {
    Way { tls: false, route }
}

/// Returns the ways to measure.
fn ways(before: bool, one_hop: bool) -> Vec<Way> {
    let builds: &[Build] = if before { &[Build::This, Build::Before] } else { &[Build::This] };
    let mut ways = vec![plain(Route::Http1), plain(Route::Http2)];
    // Both builds come next to each other.
    ways.extend(builds.iter().map(|build| plain(Route::OneHop(*build))));
    if !one_hop {
        ways.extend(builds.iter().map(|build| plain(Route::TwoHops(*build))));
        let direct = [Route::Http1, Route::Http2];
        let routes = direct.into_iter().chain(builds.iter().map(|build| Route::OneHop(*build)));
        ways.extend(routes.map(|route| Way { tls: true, route }));
    }
    ways
}

/// The measurement of one way in one round.
#[derive(Clone, Debug, Default)]
struct Sample {
    loaded: Loaded,
    /// Processor time during the measurement.
    client: Duration,
    server: Duration,
    /// Of all replicas.
    kas: Duration,
    agent: Duration,
    /// The share of the machine that other processes used.
    others: f64,
}

impl Sample {
    fn per_second(&self) -> f64 {
        self.loaded.done as f64 / self.loaded.seconds
    }

    /// Returns a processor time for each request, unit of a body or event.
    fn micros(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.loaded.done.max(1) as f64
    }
}

/// The agents: one that calls the static server in plain text, and one that uses TLS.
const AGENTS: [i64; 2] = [1, 2];

/// Two replicas of kas, and both agents, which are connected to the first replica.
struct Tree {
    environment: Environment,
    replicas: [Kas; 2],
    agents: [Process; 2],
}

impl Tree {
    fn new(environment: Environment, server: &StaticServer, ca_file: &Path) -> anyhow::Result<Self> {
        let [one, two]: [_; 2] = free_addresses()?;
        let kas = |name, replicas| {
            environment.kas(name, &KasOptions { replicas: Some(replicas), ..KasOptions::default() })
        };
        let replicas = [kas("kas-1", [one, two])?, kas("kas-2", [two, one])?];
        let agent = |number, api_server| {
            let options = AgentOptions { api_server: Some(api_server), ..AgentOptions::default() };
            environment.agentk(&replicas[0], number, &options)
        };
        let agents = [
            agent(AGENTS[0], ApiServer { address: server.http1, ca_file: None })?,
            agent(AGENTS[1], ApiServer { address: server.tls, ca_file: Some(ca_file.to_owned()) })?,
        ];
        Ok(Self { environment, replicas, agents })
    }

    fn logs(&self) -> String {
        let agents = self.agents.iter().map(Process::tail);
        let logs: Vec<_> = agents.chain(self.replicas.iter().map(|kas| kas.process.tail())).collect();
        format!("logs of both agents and both replicas:\n{}", logs.join("\n\n"))
    }
}

/// The processes, which all rounds use.
struct Setup {
    client: LoadClient,
    server: StaticServer,
    ca_file: PathBuf,
    this: Tree,
    before: Option<Tree>,
}

impl Setup {
    fn new(before: Option<&Path>) -> anyhow::Result<Self> {
        let environment = Environment::new()?;
        let client = environment.client()?;
        let server = environment.static_server()?;
        let ca_file = environment.certificate();
        let this = Tree::new(environment, &server, &ca_file)?;
        let before =
            before.map(|folder| Tree::new(Environment::earlier(folder)?, &server, &ca_file)).transpose()?;
        Ok(Self { client, server, ca_file, this, before })
    }

    fn tree(&self, build: Build) -> &Tree {
        match (build, &self.before) {
            (Build::Before, Some(before)) => before,
            (Build::Before, None) | (Build::This, _) => &self.this,
        }
    }

    /// Waits until requests arrive in this way: the agent is connected, and the other replica knows it.
    fn wait_for(&mut self, way: Way) -> anyhow::Result<()> {
        let row = row("first", "", GET, 1, 1);
        let load = self.load(&row, way, Span::Count { warm: 1, run: 1 });
        let loaded = self.client.http(&load, |_, _| Ok(()))?;
        if loaded.failed > 0 {
            let logs = match way.route {
                Route::OneHop(build) | Route::TwoHops(build) => self.tree(build).logs(),
                Route::Http1 | Route::Http2 => self.server.process.tail(),
            };
            bail!("the first request ({way:?}) failed: {}\n{logs}", loaded.why.unwrap_or_default());
        }
        Ok(())
    }

    fn load(&self, row: &Row, way: Way, span: Span) -> HttpLoad {
        let direct = |http2: bool| HttpTarget::Http {
            server: HttpServer {
                address: match (way.tls, http2) {
                    (true, _) => self.server.tls,
                    (false, true) => self.server.http2,
                    (false, false) => self.server.http1,
                },
                ca_file: way.tls.then(|| self.ca_file.clone()),
                access: None,
            },
            http2,
        };
        let kas = |build, replica: usize| {
            let tree = self.tree(build);
            let metadata = Metadata {
                agent: AGENTS[usize::from(way.tls)],
                secret_file: tree.environment.secret_file(),
                tokens: Tokens::EachSecond,
            };
            HttpTarget::Kas { address: tree.replicas[replica].api, metadata }
        };
        let target = match way.route {
            Route::Http1 => direct(false),
            Route::Http2 => direct(true),
            Route::OneHop(build) => kas(build, 0),
            Route::TwoHops(build) => kas(build, 1),
        };
        HttpLoad { target, work: row.work, connections: row.connections, callers: row.callers, span }
    }

    fn measure(&mut self, row: &Row, way: Way, span: Span) -> anyhow::Result<Sample> {
        let load = self.load(row, way, span);
        let tree = match (way.route, &self.before) {
            (Route::Http1 | Route::Http2, _) => None,
            (Route::OneHop(Build::Before) | Route::TwoHops(Build::Before), Some(before)) => Some(before),
            (Route::OneHop(_) | Route::TwoHops(_), _) => Some(&self.this),
        };
        let mut edges = Vec::with_capacity(2);
        let loaded = self.client.http(&load, |client, _| {
            let (busy, all) = machine()?;
            let (mut kas, mut agent) = (Duration::ZERO, Duration::ZERO);
            if let Some(tree) = tree {
                for replica in &tree.replicas {
                    kas += replica.process.cpu()?;
                }
                agent = tree.agents[usize::from(way.tls)].cpu()?;
            }
            edges.push([client.cpu()?, self.server.process.cpu()?, kas, agent, busy, all]);
            Ok(())
        })?;
        ensure!(
            loaded.failed == 0,
            "{} requests of {} failed ({way:?}): {}\n{}",
            loaded.failed,
            row.name,
            loaded.why.unwrap_or_default(),
            tree.map(Tree::logs).unwrap_or_default()
        );
        ensure!(loaded.done > 0, "no request of {} ended ({way:?})", row.name);
        let [begin, end] = edges[..] else { bail!("the load client did not report begin and end") };
        let used = |at: usize| end[at].saturating_sub(begin[at]);
        let (client, server, kas, agent) = (used(0), used(1), used(2), used(3));
        let own = client + server + kas + agent;
        let others = used(4).saturating_sub(own).as_secs_f64() / used(5).as_secs_f64().max(0.01);
        Ok(Sample { loaded, client, server, kas, agent, others })
    }
}

pub(super) fn run(args: &HttpArgs) -> anyhow::Result<()> {
    let (rounds, span) = if args.quick {
        (1, Span::Time { warm: 100, run: 300 })
    } else {
        (args.rounds, Span::Time { warm: 300, run: 1_200 })
    };
    let names: Vec<_> = ROWS.iter().map(|row| row.name).chain(ENDPOINT_ROWS).collect();
    only::check(&args.only, "row", &names)?;
    let wanted = |name: &str| only::wants(&args.only, &[name]);
    let rows: Vec<&Row> = ROWS.iter().filter(|row| wanted(row.name)).collect();
    if !rows.is_empty() {
        let report = measure(args, &rows, rounds, span)?;
        finish(&report.values(), &report.tables(), "http", &command(args), &args.output)?;
    }
    let rows: Vec<_> = ENDPOINT_ROWS.into_iter().filter(|name| wanted(name)).collect();
    if !rows.is_empty() {
        let report = endpoint::measure(&rows, rounds, args.quick)?;
        finish(&report.values(), &report.tables(), "http k8s", &command(args), &args.output)?;
    }
    Ok(())
}

/// Measures the rows of calls of `KubernetesApi/MakeRequest`.
fn measure(args: &HttpArgs, rows: &[&Row], rounds: u32, span: Span) -> anyhow::Result<Report> {
    let begin = tokio::time::Instant::now();
    let mut setup = Setup::new(args.before.as_deref())?;
    let ways = ways(args.before.is_some(), args.one_hop);
    for way in &ways {
        setup.wait_for(*way)?;
    }
    let mut report = Report { rounds, ..Report::default() };
    if let Some(before) = &setup.before {
        report.versions = Some([setup.this.environment.version()?, before.environment.version()?]);
    }
    for round in 0..rounds as usize {
        for row in rows {
            eprintln!(
                "[{:>4.0} s] round {} of {rounds}: {} ({})",
                begin.elapsed().as_secs_f64(),
                round + 1,
                row.name,
                row.title
            );
            // The order changes, so that no way is always first or always follows the same one.
            let mut order = ways.clone();
            order.rotate_left(round % ways.len());
            if round % 2 == 1 {
                order.reverse();
            }
            for way in order {
                let sample = setup.measure(row, way, span)?;
                report.samples.entry((row.name, way)).or_default().push(sample);
            }
        }
    }
    Ok(report)
}

/// Returns the command line that repeats the benchmark.
fn command(args: &HttpArgs) -> String {
    let mut command = "cargo xtask bench http".to_owned();
    if args.quick {
        command.push_str(" --quick");
    } else {
        command.push_str(&format!(" --rounds {}", args.rounds));
    }
    if args.one_hop {
        command.push_str(" --one-hop");
    }
    command.push_str(&only::argument(&args.only));
    if args.before.is_some() {
        // The folder is one of this machine.
        command.push_str(" --before FOLDER");
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_builds_are_measured_next_to_each_other_in_every_way() {
        let of = |ways: Vec<Way>| ways.into_iter().map(|way| (way.tls, way.route)).collect::<Vec<_>>();
        let (this, before) = (Build::This, Build::Before);
        assert_eq!(
            of(ways(false, true)),
            [(false, Route::Http1), (false, Route::Http2), (false, Route::OneHop(this))]
        );
        assert_eq!(
            of(ways(true, false)),
            [
                (false, Route::Http1),
                (false, Route::Http2),
                (false, Route::OneHop(this)),
                (false, Route::OneHop(before)),
                (false, Route::TwoHops(this)),
                (false, Route::TwoHops(before)),
                (true, Route::Http1),
                (true, Route::Http2),
                (true, Route::OneHop(this)),
                (true, Route::OneHop(before)),
            ]
        );
    }
}
