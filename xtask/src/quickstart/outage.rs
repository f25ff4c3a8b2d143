//! A replica is killed in the middle of traffic, and started again; what that did, and for how long.

use std::{collections::HashSet, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::{Child, ChildStdout},
    time::{Instant, timeout},
};

use super::{
    READY_WITHIN, Stage,
    agents::{AGENTS, PODS, Watch},
    kasctl::Kasctl,
    replicas::{self, NAMES, until},
    story::{Cast, VICTIM, number},
    traffic::{End, PERIOD, Record, Summary, Traffic},
};
use crate::report::{Report, Step, Style, human, line};

/// The replicas that live on: requests go to them.
const SURVIVORS: [usize; 2] = [0, 2];
/// The agent that only the victim holds, as its place in [`AGENTS`].
const AGENT: usize = 2;
/// Traffic before the kill, for comparison, and after everything is well again.
const BEFORE: Duration = Duration::from_secs(2);
const AFTER: Duration = Duration::from_secs(1);

/// What came of it.
#[derive(Debug)]
pub(super) struct Aftermath {
    /// The replica that holds the agent now.
    pub(super) holder: usize,
    /// What should not have been.
    pub(super) problems: Vec<String>,
}

/// Kills the victim, and shows what happens.
pub(super) async fn kill(report: &mut Report, stage: &mut Stage, cast: &Cast) -> Result<Aftermath> {
    let style = report.style();
    let agent = AGENTS[AGENT].0;
    let mut step = report.step("Kill replica 2 in the middle of traffic");
    let (front, name) = (&cast.kasctl[0], &cast.names[VICTIM]);
    let mut agents = Watch::begin(front).await?;
    let stream = stage.guard(Stream::open(front, agent)).await?;
    let traffic = Traffic::begin(&SURVIVORS.map(|index| cast.kasctl[index].clone()));
    let began = Instant::now();
    step.make_room();
    let rate = Duration::from_secs(1).as_millis() / PERIOD.as_millis();
    step.fact("traffic", format_args!("{rate} requests/s for each agent, through each of replicas 1 and 3"));
    if stream.is_some() {
        step.fact("open", format_args!("a watch of agent {agent}'s pods, through replicas 1 and 2"));
    }
    stage.pause(BEFORE).await?;

    let pid = stage.replicas[VICTIM].pid();
    let pid = pid.and_then(|id| Pid::from_raw(id.try_into().ok()?)).context("replica 2 does not run")?;
    let mut victim = stage.replicas[VICTIM].service.take().context("replica 2 does not run")?;
    let (answered, failed) = traffic.count();
    let (mut records, before) = (traffic.records(), began.elapsed());
    let killed = Instant::now();
    kill_process(pid, Signal::KILL).context("cannot kill replica 2")?;

    step.fact("before", format_args!("{answered} answered in {}, {failed} failed", human(before)));
    step.fact("times", "since the kill, as kasctl saw it: each includes the asking");
    line("");
    let tell = |after: Duration, what: &str| tell(style, after, what);
    tell(Duration::ZERO, &format!("SIGKILL for replica 2, pid {pid}"));
    let around = async |index: usize| {
        until(&cast.kasctl[index], "still takes requests to the dead one", async |kasctl| {
            Ok(!kasctl.why(agent).await?.goes_to(name))
        })
        .await?;
        tell(killed.elapsed(), &format!("replica {} takes no request there any more", index + 1));
        anyhow::Ok(())
    };
    let broken = async {
        let Some(stream) = stream else { return Ok(None) };
        let end = stream.ended().await?;
        tell(killed.elapsed(), "the open watch broke, and its caller was told so");
        anyhow::Ok(Some(end))
    };
    let back = async {
        loop {
            let connected = agents.connected().await?;
            if connected.id.to_string() == agent {
                let holder = cast.holder(&connected).context("agent 3 is connected to a stranger")?;
                let what = format!("replica 1 lists agent {agent} again, at replica {}", holder + 1);
                tell(killed.elapsed(), &what);
                return anyhow::Ok(holder);
            }
        }
    };
    let first = async {
        let is_first =
            |record: &&Record| record.agent == AGENT && record.is_answered() && record.sent >= killed;
        let records = records.wait_for(|records| records.iter().any(|record| is_first(&record))).await?;
        let first = records.iter().find(is_first).context("the answer vanished")?;
        let asked = human(first.sent - killed);
        tell(first.ended - killed, &format!("agent {agent} answers a request that was sent after {asked}"));
        anyhow::Ok(())
    };
    let gone = async {
        until(front, "does not take the dead one for dead", async |kasctl| {
            let rows = kasctl.replicas().await?;
            Ok(!rows.iter().any(|row| row.name == *name && row.standing != "gone"))
        })
        .await?;
        tell(killed.elapsed(), cast.shared.tracker.gone());
        anyhow::Ok(())
    };
    let all = Box::pin(async {
        // What is collected is no zombie.
        let reaped = async {
            victim.ended().await;
            anyhow::Ok(())
        };
        tokio::try_join!(around(SURVIVORS[0]), around(SURVIVORS[1]), broken, back, first, gone, reaped)
    });
    let (.., end, holder, (), (), ()) = match stage
        .guard(async { Ok(timeout(READY_WITHIN, all).await) })
        .await?
    {
        Ok(outcome) => outcome?,
        Err(_) => {
            let agentk = &stage.agents[PODS.len() - 1];
            return Err(agentk.explain(&format!("and the replicas did not recover within {READY_WITHIN:?}")));
        }
    };
    stage.pause(AFTER).await?;
    let records = stage.guard(async { Ok(traffic.finish().await) }).await?;
    let problems = account(&step, &records, killed, end);
    Ok(Aftermath { holder, problems })
}

/// Shows an event of the time since the kill.
fn tell(style: Style, after: Duration, what: &str) {
    let after = if after.is_zero() { "0 ms".to_owned() } else { human(after) };
    line(format_args!("     {} {what}", style.bold(format_args!("{after:>8} "))));
}

/// Shows what became of all requests, and returns what should not have been.
fn account(step: &Step, records: &[Record], killed: Instant, stream: Option<End>) -> Vec<String> {
    let (mut problems, mut before, mut all_through) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    line("");
    step.text("AGENT   ANSWERED   FAILED   MEDIAN    SLOWEST   LONGEST TIME WITHOUT ANSWER");
    for (index, (id, _)) in AGENTS.iter().enumerate() {
        let Summary { answered, failed, median, slowest, pause, pause_before } =
            Summary::of(records.iter().filter(|record| record.agent == index), killed);
        if index != AGENT {
            (before, all_through) = (before.max(pause_before), all_through.max(pause));
        }
        let [median, slowest, pause] = [median, slowest, pause].map(human);
        step.text(&format!("{id:<7} {answered:<10} {failed:<8} {median:<9} {slowest:<9} {pause}"));
        if answered == 0 {
            problems.push(format!("agent {id} never answered"));
        }
        if index != AGENT && failed > 0 {
            let failed = number(failed, "request");
            problems.push(format!("{failed} for agent {id} failed, which replica 2 did not hold"));
        }
    }
    line("");
    let failures: Vec<&End> =
        records.iter().map(|record| &record.end).filter(|end| **end != End::Answered).collect();
    let count = |is: fn(&End) -> bool| failures.iter().filter(|end| is(end)).count();
    let not_started = count(|end| matches!(end, End::NotStarted(_)));
    let unknown = count(|end| matches!(end, End::Unknown(_)));
    let untold = failures.len() - not_started - unknown;
    let all = number(records.len(), "request");
    if problems.is_empty() {
        let [before, all_through] = [before, all_through].map(human);
        step.fact("no gap", "for agents 1 and 2: every request was answered, and the longest");
        step.fact(
            "",
            format_args!("time without an answer was {all_through} in all, {before} before the kill"),
        );
    }
    match failures.len() {
        0 => step.fact("failed", format_args!("none of {all}: one for an absent agent waits in kas")),
        failed => {
            let said = format!("{not_started} not started, {unknown} begun, {untold} did not say");
            step.fact("failed", format_args!("{failed} of {all}: {said}"));
        }
    }
    if untold > 0 {
        problems.push(format!("{} failed without telling whether it had begun", number(untold, "request")));
    }
    let said = stream.as_ref().into_iter().chain(failures.iter().copied()).find_map(|end| match end {
        End::Unknown(said) => Some(("it had begun", said)),
        End::NotStarted(said) => Some(("it had not begun", said)),
        _ => None,
    });
    match &stream {
        None | Some(End::Unknown(_) | End::NotStarted(_)) => {}
        Some(End::Answered) => problems.push("the open watch ended as if it were complete".to_owned()),
        Some(End::Untold(said)) => {
            problems.push(format!("the open watch broke without telling whether it had begun: {said}"));
        }
    }
    if let Some((what, said)) = said {
        let whose = if stream.is_some() { "the caller of the watch" } else { "a caller" };
        step.fact("told", format_args!("{whose} that {what}; in kasctl's words:"));
        let said = said.split(" (correlation id").next().unwrap_or(said);
        for words in wrapped(said, 62) {
            step.fact("", words);
        }
    }
    for problem in &problems {
        step.fact("problem", problem);
    }
    problems
}

/// Breaks a text between words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(last) if last.chars().count() + 1 + word.chars().count() <= width => {
                last.push(' ');
                last.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// An answer that never ends by itself.
struct Stream {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Stream {
    /// Opens a watch; `None` when the cluster grants none.
    async fn open(kasctl: &Kasctl, agent: &str) -> Result<Option<Self>> {
        let mut command = kasctl.call(&["request", "--include", agent, "GET", "/api/v1/pods?watch=true"]);
        let mut child = command.stdin(Stdio::null()).spawn().context("cannot run kasctl")?;
        let mut stdout = BufReader::new(child.stdout.take().context("kasctl has no standard output")?);
        let mut status = String::new();
        let opened = timeout(Duration::from_secs(10), stdout.read_line(&mut status)).await;
        let is_open = matches!(opened, Ok(Ok(_))) && status.starts_with("HTTP 200");
        Ok(is_open.then_some(Self { child, stdout }))
    }

    /// Waits until it ends.
    async fn ended(mut self) -> Result<End> {
        let mut stderr = self.child.stderr.take().context("kasctl has no standard error")?;
        let (mut said, mut sink) = (Vec::new(), tokio::io::sink());
        let (_, _, status) = tokio::join!(
            tokio::io::copy(&mut self.stdout, &mut sink),
            stderr.read_to_end(&mut said),
            self.child.wait()
        );
        Ok(End::of(status.context("cannot wait for kasctl")?.code(), &said))
    }
}

/// Starts a replica again, and waits until all know each other; returns how long that took each.
pub(super) async fn revive(
    stage: &mut Stage,
    cast: &Cast,
    index: usize,
) -> Result<(Duration, Duration, Duration)> {
    let began = Instant::now();
    let replica = &mut stage.replicas[index];
    replica.start(&cast.shared)?;
    replica.ready().await.with_context(|| {
        format!("{} did not come back; if another program took its port meanwhile, try again", NAMES[index])
    })?;
    let names: HashSet<String> = cast.names.iter().cloned().collect();
    let found = |index: usize| replicas::found(&cast.kasctl[index], &names, began);
    stage.guard(async { tokio::try_join!(found(0), found(1), found(2)) }).await
}

/// Tells when each agent answers, after a person has killed a replica.
pub(super) async fn follow(style: Style, cast: &Cast, dead: usize, died: Instant) -> Result<()> {
    let Some(kasctl) = cast.kasctl.iter().enumerate().find(|(index, _)| *index != dead) else {
        bail!("no other replica")
    };
    let (index, kasctl) = kasctl;
    let answers = async |agent: &str| {
        let said = match kasctl.answer(&["--timeout", "20s", "request", agent, "GET", "/version"]).await {
            Ok(_) => format!("agent {agent} answers, asked through replica {}", index + 1),
            Err(error) => format!("agent {agent} does not answer: {error:#}"),
        };
        tell(style, died.elapsed(), &said);
    };
    tokio::join!(answers(AGENTS[0].0), answers(AGENTS[1].0), answers(AGENTS[2].0));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_wrapped_and_never_lost() {
        assert_eq!(wrapped("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrapped("longer-than-that a", 4), ["longer-than-that", "a"]);
        assert!(wrapped("", 4).is_empty());
    }
}
