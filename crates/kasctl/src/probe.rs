//! `kasctl probe`: sends requests to agents at a fixed rate, and judges whether a user would have noticed
//! what was done to kas meanwhile.

mod attempt;
mod entrance;
mod entrances;
mod latency;
mod outcome;
mod replica_list;
mod report;
mod screen;
mod tally;
mod text;
mod verdict;

use std::{
    path::{Path, PathBuf},
    pin::Pin,
    rc::Rc,
    time::Duration,
};

use futures_util::{
    StreamExt as _,
    stream::{self, FuturesUnordered},
};
use ids::{AgentId, Match, Selector};
use tokio::{
    fs::File,
    io::AsyncWriteExt as _,
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, MissedTickBehavior, interval_at, sleep_until},
};

use self::{
    attempt::{Manner, Order, send},
    entrances::{Entrances, How, News},
    report::{Report, Run, summary},
    screen::{Screen, Stream},
    tally::Tally,
    text::count,
    verdict::verdict,
};
use crate::{
    agents,
    api::{Client, Connector, Settings},
    cli::{Format, ProbeArgs, Probed},
    failure::{Exit, Failure},
    file_error::FileError,
    output::Output,
    request::only_reads,
    table::printable,
};

/// Time limit of a request without `--timeout`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of open requests. Further ones are not sent, and count as failed.
const MAX_OPEN: usize = 2_000;
/// How often the list of replicas is read.
const REFRESH: Duration = Duration::from_secs(2);
/// How many agents are asked at once before the start.
const CHECKED_AT_ONCE: usize = 20;
/// How long open requests are awaited after Ctrl-C.
const LINGER: Duration = Duration::from_secs(1);
/// How many addresses the first lines name.
const NAMED: usize = 8;

/// Everything that a run needs. Each agent has answered through kas.
struct Prepared {
    agents: Vec<AgentId>,
    entrances: Entrances,
    manner: Manner,
    timeout: Duration,
    json: Option<(PathBuf, File)>,
}

/// Runs the probe, and prints its report.
///
/// # Errors
/// [`Failure::Probe`] if it cannot run; the report cannot be written. If somebody would have noticed, the
/// result is [`Exit::Failure`], and if the probe did not see enough, [`Exit::NotJudged`].
pub(crate) async fn run(
    settings: Settings,
    output: Output,
    args: ProbeArgs,
    format: Format,
) -> Result<Exit, Failure> {
    // One handler from the start, so that no Ctrl-C is lost.
    let mut interrupts = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
    let prepared = tokio::select! {
        prepared = Box::pin(prepare(settings, &args)) => prepared.map_err(could_not_run)?,
        _ = interrupts.recv() => return Err(Failure::Interrupted),
    };
    Box::pin(probe(prepared, output, &args, format, interrupts)).await
}

fn could_not_run(failure: Failure) -> Failure {
    match failure {
        // Its own exit code is that of a wrong command line.
        Failure::Usage(text) => Failure::Usage(text),
        failure => Failure::Probe(Box::new(failure)),
    }
}

async fn prepare(settings: Settings, args: &ProbeArgs) -> Result<Prepared, Failure> {
    let path = &args.path.path;
    if !only_reads("GET", path) {
        return Err(Failure::Usage(
            "--path leads to a program in the cluster: the probe only sends requests without effects",
        ));
    }
    let timeout = settings.timeout.unwrap_or(REQUEST_TIMEOUT);
    if timeout.is_zero() {
        return Err(Failure::Usage("the probe needs a time limit: --timeout must not be 0"));
    }
    let address = settings.address.clone();
    let addresses = if args.through.is_empty() { std::slice::from_ref(&address) } else { &args.through };
    let connector = Connector::new(settings, addresses)?;
    let json = match &args.json {
        None => None,
        Some(path) => {
            Some((path.clone(), File::create(path).await.map_err(|cause| write_error(path, cause))?))
        }
    };
    let (entrances, client) = Entrances::find(&connector, &address, &args.through).await?;
    let agents = match &args.agents {
        Probed::Agent(agent) => vec![*agent],
        Probed::Selected(selector) => selected(&client, selector).await?,
    };
    let manner = Manner { target: args.path.clone(), repeat_unknown: args.repeat_unknown };
    check(&agents, &entrances, &manner, timeout).await?;
    Ok(Prepared { agents, entrances, manner, timeout, json })
}

fn write_error(path: &Path, cause: std::io::Error) -> FileError {
    FileError { verb: "write", path: path.to_owned(), cause }
}

/// Returns the connected agents that match, in the order of their ids.
async fn selected(client: &Client, selector: &Selector) -> Result<Vec<AgentId>, Failure> {
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let mut found: Vec<AgentId> = agents::connected(client)
        .await?
        .into_iter()
        .filter_map(|agent| {
            let id = AgentId::new(agent.id).ok()?;
            let project = (agent.project_id > 0).then_some(agent.project_id);
            let is_match = selector.matches(id, project, known(&agent.name).as_deref()) == Match::Yes;
            is_match.then_some(id)
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    if found.is_empty() { Err(Failure::NoConnectedAgent) } else { Ok(found) }
}

/// Sends one request to each agent, and through each address: the probe begins while all is well. A request
/// that has to be sent again enters at the same address, as another one would hide that this one is dead.
async fn check(
    agents: &[AgentId],
    entrances: &Entrances,
    manner: &Manner,
    timeout: Duration,
) -> Result<(), Failure> {
    let checks = (0..agents.len().max(entrances.len())).map(|turn| async move {
        let (first, agent) = (entrances.in_turn(turn), agents[turn % agents.len()]);
        let through = first.url.to_string();
        let (second, deadline) = (Rc::clone(&first), Instant::now() + timeout);
        match send(manner, Order { number: turn as u64, agent, deadline, first, second }).await.miss {
            None => Ok(()),
            Some(miss) => Err(Failure::NotWell { through, agent, why: miss.text }),
        }
    });
    let mut checks = Box::pin(stream::iter(checks).buffer_unordered(CHECKED_AT_ONCE));
    while let Some(checked) = checks.next().await {
        checked?;
    }
    Ok(())
}

/// Returns a request.
fn order(number: u64, agents: &[AgentId], entrances: &Entrances, deadline: Instant) -> Order {
    let turn = usize::try_from(number % agents.len() as u64).unwrap_or(0);
    let (first, second) = entrances.pick(number, turn, agents.len());
    Order { number, agent: agents[turn], deadline, first, second }
}

/// Sends requests until the end or Ctrl-C, prints what it sees, and then the report.
async fn probe(
    prepared: Prepared,
    mut output: Output,
    args: &ProbeArgs,
    format: Format,
    mut interrupts: Signal,
) -> Result<Exit, Failure> {
    let Prepared { agents, mut entrances, manner, timeout, json } = prepared;
    let stream = if format == Format::Json { Stream::Error } else { Stream::Output };
    let mut screen = Screen::new(stream);
    let mut tally = Tally::new(&agents, args.rate, args.noticed_after);
    let path = printable(&args.path.path);
    let entered = entrances.urls();
    let started = process::clock::wall();
    let is_read = introduce(&mut screen, &agents, &entrances, args, &path).is_ok();

    let start = Instant::now();
    let end = start + args.duration;
    let mut open = FuturesUnordered::new();
    let mut seconds = interval_at(start + Duration::from_secs(1), Duration::from_secs(1));
    seconds.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut refresh = Refresh::Waiting(start + REFRESH);
    let mut number = 0_u64;
    let mut is_interrupted = !is_read;
    while !is_interrupted {
        let due = start + since(number, args.rate);
        tokio::select! {
            biased;
            _ = interrupts.recv() => is_interrupted = true,
            () = sleep_until(due), if due < end => {
                let now = Instant::now();
                let order = order(number, &agents, &entrances, now + timeout);
                if open.len() < MAX_OPEN {
                    tally.sent(number, order.agent, now - start, now - due);
                    open.push(send(&manner, order));
                } else {
                    let text = format!("{MAX_OPEN} requests were without an answer already");
                    tally.not_sent(order.agent, now - start, text);
                }
                number += 1;
            }
            Some(done) = open.next(), if !open.is_empty() => tally.ended(start.elapsed(), done),
            _ = seconds.tick() => {
                let second = tally.take_second();
                let at = start.elapsed();
                let shown = screen.second(at, &second, args.noticed_after, &entrances, tally.oldest_open());
                is_interrupted |= shown.is_err();
            }
            news = refresh.next(&entrances) => {
                refresh = Refresh::Waiting(Instant::now() + REFRESH);
                for change in news.map(|news| entrances.apply(news)).unwrap_or_default() {
                    is_interrupted |= screen.keep(&format!("{:>9}   {change}", text::since_start(start.elapsed()))).is_err();
                }
            }
            () = sleep_until(end), if due >= end => break,
        }
    }
    drop(refresh);
    let duration = start.elapsed().min(args.duration);
    // Requests end by themselves at their time limit.
    let patience = if is_interrupted { LINGER } else { timeout * 2 + LINGER };
    let wait = tokio::time::sleep(patience);
    tokio::pin!(wait);
    while !open.is_empty() {
        tokio::select! {
            biased;
            _ = interrupts.recv() => break,
            Some(done) = open.next() => tally.ended(start.elapsed(), done),
            () = &mut wait => break,
        }
    }
    tally.finish(duration);
    drop(open);

    let ended = start.elapsed();
    let Some(verdict) = verdict(&tally, args.noticed_after, ended, &entered) else {
        screen.end("").await?;
        return Err(Failure::NoOutcome);
    };
    let noticed_after = args.noticed_after;
    let run = Run {
        rate: args.rate,
        path: &path,
        timeout,
        noticed_after,
        started,
        duration,
        ended,
        is_interrupted,
    };
    unless_closed(screen.end(&summary(&run, &tally, &entrances, &verdict)).await)?;
    let report = Report::new(&run, &tally, &entrances, &verdict);
    if let Some((path, file)) = json {
        save(&report, file).await.map_err(|cause| {
            let failure = write_error(&path, cause);
            Failure::Probe(Box::new(failure.into()))
        })?;
    }
    if format == Format::Json {
        unless_closed(output.json_document(&report).await)?;
    }
    Ok(verdict.exit())
}

/// Ignores that the reader of the output has left: the file and the exit code may still be wanted.
fn unless_closed(written: Result<(), Failure>) -> Result<(), Failure> {
    if let Err(Failure::PipeClosed) = written { Ok(()) } else { written }
}

/// The next reading of the list of replicas.
enum Refresh {
    Waiting(Instant),
    Asking(Pin<Box<dyn Future<Output = Option<News>>>>),
}

impl Refresh {
    /// Waits for it.
    ///
    /// # Cancel safety
    /// Cancel safe: the next call goes on.
    async fn next(&mut self, entrances: &Entrances) -> Option<News> {
        if let Self::Waiting(at) = self {
            sleep_until(*at).await;
            *self = Self::Asking(entrances.refresh());
        }
        match self {
            Self::Asking(asking) => asking.as_mut().await,
            Self::Waiting(_) => None,
        }
    }
}

/// Returns when a request is due, after the start.
fn since(number: u64, rate: u32) -> Duration {
    let rate = u64::from(rate);
    let part = u32::try_from(number % rate * 1_000_000_000 / rate).unwrap_or(0);
    Duration::new(number / rate, part)
}

/// Says what will be done.
fn introduce(
    screen: &mut Screen,
    agents: &[AgentId],
    entrances: &Entrances,
    args: &ProbeArgs,
    path: &str,
) -> Result<(), screen::Closed> {
    let named: Vec<String> = agents.iter().take(NAMED).map(ToString::to_string).collect();
    let more = |all: usize| if all > NAMED { format!(" and {} more", all - NAMED) } else { String::new() };
    let who = if agents.len() == 1 { "agent" } else { "agents" };
    let each = match agents.len() as u64 / u64::from(args.rate) {
        0 => String::new(),
        seconds => format!(
            ", so each agent is asked once in {}",
            crate::duration::humane(Duration::from_secs(seconds))
        ),
    };
    screen.keep(&format!(
        "{} a second for {}: GET {path} of {who} {}{}{each}",
        count(args.rate.into(), "request"),
        crate::duration::humane(args.duration),
        named.join(", "),
        more(agents.len())
    ))?;
    let mut places = entrances.places();
    let all = places.len();
    places.truncate(NAMED);
    let line = format!("entering at {}{}", places.join(", "), more(all));
    match entrances.how {
        How::Given | How::Listed => screen.keep(&format!("{line}: {}", entrances.why))?,
        How::Address => {
            screen.keep(&format!("{line} only: {}", entrances.why))?;
            screen.keep(
                "  so a replica behind a balancer is seen only if it chooses that one; run this where the replicas can \
                 be reached, or set --through",
            )?;
        }
    }
    screen.keep("all agents answer; now do what you want to try (Ctrl-C ends the probe with its verdict)")
}

async fn save(report: &Report<'_>, mut file: File) -> std::io::Result<()> {
    let mut text = serde_json::to_vec_pretty(report)?;
    text.push(b'\n');
    file.write_all(&text).await?;
    file.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_due_at_equal_intervals_without_drift() {
        assert_eq!(since(0, 3), Duration::ZERO);
        assert_eq!(since(1, 3), Duration::new(0, 333_333_333));
        assert_eq!(since(3, 3), Duration::from_secs(1));
        assert_eq!(since(600_000_000, 1000), Duration::from_secs(600_000));
        assert_eq!(since(7, 1), Duration::from_secs(7));
    }
}
