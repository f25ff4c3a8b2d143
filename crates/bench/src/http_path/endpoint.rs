//! The rows of the Kubernetes API endpoint: clients like kubectl and controllers, directly and through kas
//! and agentk. Both ways alternate within each round.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail, ensure};
use testkit::{
    conformance::{self, Backend, Cases},
    raw_agent::Kind,
};
use tokio::time::Instant;

use crate::{
    child::{Process, READY},
    environment::{
        AgentOptions, ApiServer, Environment, Kas, KasOptions, KubernetesOptions, StaticServer,
        free_addresses, user_token,
    },
    load_client::LoadClient,
    protocol::{
        Access, ClientCommand, ClientEvent, HttpLoad, HttpServer, HttpTarget, HttpWork, Idle, IdleWhat,
        LeavingLoad, Loaded, Span, UpgradeLoad,
    },
};

mod report;
mod slow_link;

pub(super) use self::report::{Measured, Report};
use self::slow_link::{Server, SlowLink};

pub(super) const GET_C64: &str = "k8s_get_c64";
pub(super) const GET_C1: &str = "k8s_get_c1";
pub(super) const WATCH_EVENTS: &str = "k8s_watch_events";
pub(super) const WATCH_DELAY: &str = "k8s_watch_delay";
pub(super) const EXEC_RTT: &str = "k8s_exec_rtt";
pub(super) const EXEC_BULK: &str = "k8s_exec_bulk";
pub(super) const CP: &str = "k8s_cp";
pub(super) const SLOW_EXEC: &str = "k8s_slow_exec";
pub(super) const SLOW_BULK: &str = "k8s_slow_bulk";
pub(super) const IDLE_WATCH: &str = "k8s_idle_watch";
pub(super) const IDLE_EXEC: &str = "k8s_idle_exec";
pub(super) const DRAIN: &str = "k8s_drain";
pub(super) const CONFORMANCE: &str = "k8s_conformance";

/// The names of all rows.
pub(super) const ROWS: [&str; 13] = [
    GET_C64,
    GET_C1,
    WATCH_EVENTS,
    WATCH_DELAY,
    EXEC_RTT,
    EXEC_BULK,
    CP,
    SLOW_EXEC,
    SLOW_BULK,
    IDLE_WATCH,
    IDLE_EXEC,
    DRAIN,
    CONFORMANCE,
];

/// The agent of all rows.
const AGENT: i64 = 1;
/// Idle requests that are open before memory is read, so that what is allocated once is not counted.
const FIRST: usize = 8;
/// Watches of one connection: a controller with a few informers.
const WATCHES_EACH: usize = 4;
/// The pause until memory is read: the allocator of kas returns pages with a delay.
const SETTLE: Duration = Duration::from_millis(1_000);
/// Replicas leave within this: the drain is short, so that a round is.
const DRAIN_SECTION: &str = "{delay: 300ms, timeout: 1s, upgrade_grace: 1s}";
/// The time of a round in which a replica leaves, in milliseconds.
const LEAVING: u64 = 3_000;
/// Clients while a replica leaves.
const REQUESTING: usize = 8;
const WATCHING: usize = 16;
/// Generated requests of a round. The tests compare more of them.
const CASES: u64 = 500;

/// What is measured directly and through kas.
#[derive(Clone, Copy, Debug)]
enum Work {
    /// HTTP/2 requests: work, connections, callers.
    Http(HttpWork, usize, usize),
    /// Upgraded connections: terminals and copies.
    Upgrades(usize, usize),
}

/// Returns what a row measures in both ways; `None`: it has another form.
fn work(row: &str) -> Option<Work> {
    Some(match row {
        GET_C64 => Work::Http(HttpWork::Get(1024), 4, 64),
        GET_C1 => Work::Http(HttpWork::Get(1024), 1, 1),
        WATCH_EVENTS => Work::Http(HttpWork::Events, 4, 64),
        WATCH_DELAY => Work::Http(HttpWork::PacedEvents(100), 4, 64),
        EXEC_RTT | SLOW_EXEC => Work::Upgrades(1, 0),
        EXEC_BULK | SLOW_BULK => Work::Upgrades(1, 1),
        CP => Work::Upgrades(0, 1),
        _ => return None,
    })
}

/// The processes that all rounds use.
struct Setup {
    environment: Environment,
    /// That of direct requests.
    server: StaticServer,
    /// That of agentk, if it is another one.
    _own: Option<StaticServer>,
    client: LoadClient,
    kas: Kas,
    agent: Process,
}

impl Setup {
    /// `link`: is between the cluster and both kas and the client.
    fn new(link: Option<&SlowLink>) -> anyhow::Result<Self> {
        let environment = Environment::new()?;
        let server = environment.static_server()?;
        // agentk is in the cluster, too, so its requests to the API server do not pass the link.
        let own = link.map(|_| environment.static_server()).transpose()?;
        let client = environment.client()?;
        let kas = environment.kas(
            "kas",
            &KasOptions { kubernetes: Some(KubernetesOptions::default()), ..KasOptions::default() },
        )?;
        if let Some(link) = link {
            link.slow_down(Server::Inside, server.http1)?;
            link.slow_down(Server::Inside, server.http2)?;
            link.slow_down(Server::Outside, kas.agents)?;
        }
        let api_server = own.as_ref().unwrap_or(&server).http1;
        let agent = environment.agentk(&kas, AGENT, &agent_options(api_server))?;
        let mut setup = Self { environment, server, _own: own, client, kas, agent };
        // The first request waits until the agent is connected.
        let first = Work::Http(HttpWork::Get(1024), 1, 1);
        setup.load(first, true, Span::Count { warm: 1, run: 1 }).context("the first request")?;
        Ok(setup)
    }

    fn logs(&self) -> String {
        format!("log of agentk:\n{}\n\nlog of kas:\n{}", self.agent.tail(), self.kas.process.tail())
    }

    /// Runs a load directly, or through kas.
    fn load(&mut self, work: Work, through: bool, span: Span) -> anyhow::Result<Loaded> {
        let server = |direct: SocketAddr| -> anyhow::Result<HttpServer> {
            if through {
                endpoint(&self.kas, None)
            } else {
                Ok(HttpServer { address: direct, ca_file: None, access: None })
            }
        };
        let loaded = match work {
            Work::Http(work, connections, callers) => {
                let target = HttpTarget::Http { server: server(self.server.http2)?, http2: true };
                let load = HttpLoad { target, work, connections, callers, span };
                self.client.http(&load, |_, _| Ok(()))?
            }
            Work::Upgrades(terminals, copies) => {
                let load = UpgradeLoad { server: server(self.server.http1)?, terminals, copies, span };
                self.client.upgrades(&load, |_, _| Ok(()))?
            }
        };
        let how = if through { "through kas" } else { "direct" };
        ensure!(
            loaded.failed == 0,
            "{} requests failed ({work:?}, {how}): {}\n{}",
            loaded.failed,
            loaded.why.unwrap_or_default(),
            self.logs()
        );
        ensure!(loaded.done > 0 || loaded.bytes > 0, "nothing was done ({work:?}, {how})");
        Ok(loaded)
    }

    /// Measures a row directly, and through kas.
    fn both_ways(&mut self, row: &'static str, round: usize, span: Span) -> anyhow::Result<Measured> {
        let work = work(row).with_context(|| format!("{row} is no row"))?;
        // The order alternates too, so that neither way is always first.
        let mut measure = |through| self.load(work, through, span).with_context(|| row);
        Ok(Measured::Pair(if round.is_multiple_of(2) {
            let direct = measure(false)?;
            [direct, measure(true)?]
        } else {
            let through = measure(true)?;
            [measure(false)?, through]
        }))
    }

    /// Returns the memory of kas for each idle request, in KiB.
    fn idle(&self, what: IdleWhat, count: usize) -> anyhow::Result<f64> {
        // Processes of their own: memory that others have used before is used again without being counted.
        let tls = matches!(what, IdleWhat::Upgrades);
        let options = KasOptions {
            kubernetes: Some(KubernetesOptions { tls, ..KubernetesOptions::default() }),
            ..KasOptions::default()
        };
        let kas = self.environment.kas("kas-idle", &options)?;
        let agent = self.environment.agentk(&kas, AGENT, &agent_options(self.server.http1))?;
        let mut client = self.environment.client()?;
        let server = endpoint(&kas, tls.then(|| self.environment.certificate()))?;
        let mut open = |count| -> anyhow::Result<()> {
            let idle = Idle { server: server.clone(), what, count };
            match client.ask(&ClientCommand::Idle(idle)).with_context(|| agent.tail())? {
                ClientEvent::Connected => Ok(()),
                event => bail!("unexpected event of the load client: {event:?}"),
            }
        };
        open(FIRST)?;
        std::thread::sleep(SETTLE);
        let before = kas.process.rss()?;
        open(count)?;
        std::thread::sleep(SETTLE);
        let after = kas.process.rss()?;
        Ok(after.saturating_sub(before) as f64 / count as f64)
    }

    /// Lets one of two replicas leave while clients go on.
    fn leave(&mut self, round: usize, span: Span) -> anyhow::Result<Loaded> {
        let [one, two]: [_; 2] = free_addresses()?;
        let kas = |name, replicas| {
            let options = KasOptions {
                replicas: Some(replicas),
                kubernetes: Some(KubernetesOptions::default()),
                drain: Some(DRAIN_SECTION),
                ..KasOptions::default()
            };
            self.environment.kas(name, &options)
        };
        let mut replicas = [kas("kas-leaving-1", [one, two])?, kas("kas-leaving-2", [two, one])?];
        // Connected to both, so that the one that leaves holds tunnels, too.
        let options = AgentOptions { replicas: 2, ..agent_options(self.server.http1) };
        let agent = self.environment.agentk_of_all(&replicas, AGENT, &options)?;
        for kas in &replicas {
            let target = HttpTarget::Http { server: endpoint(kas, None)?, http2: true };
            let span = Span::Count { warm: 1, run: 1 };
            let load = HttpLoad { target, work: HttpWork::Get(1024), connections: 1, callers: 1, span };
            let loaded = self.client.http(&load, |_, _| Ok(()))?;
            ensure!(loaded.failed == 0, "the first request: {}", loaded.why.unwrap_or_default());
        }
        let servers = replicas.iter().map(|kas| kas.kubernetes.context("the endpoint is on"));
        let load = LeavingLoad {
            servers: servers.collect::<anyhow::Result<_>>()?,
            access: access(),
            requests: REQUESTING,
            watches: WATCHING,
            span,
        };
        let leaving = &mut replicas[round % 2].process;
        let loaded =
            self.client.leaving(&load, |_, is_end| if is_end { Ok(()) } else { leaving.terminate() })?;
        let deadline = Instant::now() + READY;
        while leaving.ended()?.is_none() {
            ensure!(Instant::now() < deadline, "the replica does not exit:\n{}", leaving.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
        ensure!(loaded.done > 0, "no request ended: {}\n{}", loaded.why.unwrap_or_default(), agent.tail());
        Ok(loaded)
    }

    /// Returns how many generated requests differ from direct ones, and prints the first difference.
    fn differences(&self, first: u64) -> anyhow::Result<u64> {
        let kas = self.environment.kas(
            "kas-conformance",
            &KasOptions { kubernetes: Some(KubernetesOptions::default()), ..KasOptions::default() },
        )?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let backend = Backend::start().await?;
            let _agent = self.environment.agentk(&kas, AGENT, &agent_options(backend.address()))?;
            let endpoint = conformance::Endpoint {
                address: kas.kubernetes.context("the endpoint is on")?,
                agent: AGENT,
                form: Kind::Ours,
                token: user_token(),
            };
            let differences = conformance::run(&backend, &endpoint, Cases { first, count: CASES }).await;
            if let Some(difference) = differences.first() {
                eprintln!("{difference}");
            }
            Ok(differences.len() as u64)
        })
    }
}

fn agent_options(api_server: SocketAddr) -> AgentOptions {
    let api_server = Some(ApiServer { address: api_server, ca_file: None });
    AgentOptions { api_server, ..AgentOptions::default() }
}

fn access() -> Access {
    Access { agent: AGENT, token: user_token() }
}

/// Returns the endpoint of a kas as a server.
fn endpoint(kas: &Kas, ca_file: Option<PathBuf>) -> anyhow::Result<HttpServer> {
    let address = kas.kubernetes.context("the endpoint is on")?;
    Ok(HttpServer { address, ca_file, access: Some(access()) })
}

/// Measures these rows.
pub(super) fn measure(rows: &[&'static str], rounds: u32, is_quick: bool) -> anyhow::Result<Report> {
    let begin = Instant::now();
    let (span, idle) = if is_quick {
        (Span::Time { warm: 100, run: 300 }, 40)
    } else {
        (Span::Time { warm: 300, run: 1_200 }, 200)
    };
    let mut report = Report { rounds, idle, ..Report::default() };
    let is_slow = |row: &&str| matches!(*row, SLOW_EXEC | SLOW_BULK);
    let (slow, others): (Vec<_>, Vec<_>) = rows.iter().copied().partition(is_slow);
    if !slow.is_empty() {
        measure_slow(&slow, rounds, is_quick, &mut report)?;
    }
    if others.is_empty() {
        return Ok(report);
    }
    let mut setup = Setup::new(None)?;
    for round in 0..rounds as usize {
        for row in others.iter().copied() {
            eprintln!("[{:>4.0} s] round {} of {rounds}: {row}", begin.elapsed().as_secs_f64(), round + 1);
            let measured = match row {
                IDLE_WATCH => Measured::Kib(setup.idle(IdleWhat::Watches(WATCHES_EACH), idle)?),
                IDLE_EXEC => Measured::Kib(setup.idle(IdleWhat::Upgrades, idle)?),
                DRAIN => Measured::Left(setup.leave(round, Span::Time { warm: 300, run: LEAVING })?),
                CONFORMANCE => Measured::Differences(setup.differences(round as u64 * CASES)?),
                _ => setup.both_ways(row, round, span)?,
            };
            report.measured.entry(row).or_default().push(measured);
        }
    }
    Ok(report)
}

/// Measures rows with a slow link between the cluster and everybody else.
fn measure_slow(
    rows: &[&'static str],
    rounds: u32,
    is_quick: bool,
    report: &mut Report,
) -> anyhow::Result<()> {
    if let Some(why) = SlowLink::missing() {
        eprintln!("not measured: {}: {why}", rows.join(", "));
        return Ok(());
    }
    // A round trip beside a copy takes a tenth of a second or more.
    let span =
        if is_quick { Span::Time { warm: 500, run: 1_000 } } else { Span::Time { warm: 2_000, run: 8_000 } };
    let begin = Instant::now();
    let link = SlowLink::enter()?;
    let mut setup = Setup::new(Some(&link))?;
    for round in 0..rounds as usize {
        for row in rows.iter().copied() {
            eprintln!("[{:>4.0} s] round {} of {rounds}: {row}", begin.elapsed().as_secs_f64(), round + 1);
            let measured = setup.both_ways(row, round, span)?;
            report.measured.entry(row).or_default().push(measured);
        }
    }
    Ok(())
}

/// Results by row.
type ByRow = BTreeMap<&'static str, Vec<Measured>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_form() {
        let others = [IDLE_WATCH, IDLE_EXEC, DRAIN, CONFORMANCE];
        for row in ROWS {
            assert!(row.starts_with("k8s_"), "{row}");
            assert_ne!(work(row).is_some(), others.contains(&row), "{row}");
        }
    }
}
