//! Kills a replica under load, restarts it, and measures what failed and for how long.

use std::{collections::HashSet, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::{Child, ChildStdout},
    time::{Instant, timeout},
};

use super::{
    Processes, READY_WITHIN,
    agents::{AGENTS, PODS, Watch},
    deployment::{Deployment, VICTIM},
    kasctl::Kasctl,
    kubectl::Watching,
    replicas::{self, NAMES, until},
    report::{Report, Step},
    traffic::{Outcome, PERIOD, Record, Summary, Traffic},
};
use devkit::report::{Style, human, line};

/// The other replicas: requests are sent to them.
const SURVIVORS: [usize; 2] = [0, 2];
/// The index in [`AGENTS`] of the agent that is connected to the victim only.
const AGENT: usize = 2;
/// Duration of the load before the kill, for comparison, and after the recovery.
const BEFORE: Duration = Duration::from_secs(2);
const AFTER: Duration = Duration::from_secs(1);

/// The result of a kill.
#[derive(Debug)]
pub(super) struct Aftermath {
    /// The replica that holds the agent now.
    pub(super) holder: usize,
    /// Failed checks.
    pub(super) problems: Vec<String>,
}

/// Kills the victim and prints what happens. `watching` is a `kubectl get --watch` through it.
pub(super) async fn kill(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
    watching: Option<Watching>,
) -> Result<Aftermath> {
    let style = report.style();
    let agent = AGENTS[AGENT].0;
    let mut step = report.step("Kill replica 2 while requests run");
    let (front, name) = (&deployment.kasctl[0], &deployment.names[VICTIM]);
    let mut agents = Watch::begin(front).await?;
    let stream = processes.guard(Stream::open(front, agent)).await?;
    let traffic = Traffic::begin(&SURVIVORS.map(|index| deployment.kasctl[index].clone()));
    let began = Instant::now();
    step.make_room();
    let rate = Duration::from_secs(1).as_millis() / PERIOD.as_millis();
    step.fact("traffic", format_args!("{rate} requests/s for each agent, through each of replicas 1 and 3"));
    if stream.is_some() {
        step.fact("open", format_args!("a watch of agent {agent}'s pods, through replicas 1 and 2"));
    }
    if watching.is_some() {
        step.fact("kubectl", "get pods --watch of agent 1, connected to replica 2");
    }
    processes.pause(BEFORE).await?;

    let mut victim = processes.replicas[VICTIM].service.take().context("replica 2 does not run")?;
    let (answered, failed) = traffic.count();
    let (mut records, before) = (traffic.records(), began.elapsed());
    let killed = Instant::now();
    let pid = victim.kill()?;

    step.fact("before", format_args!("{answered} answered in {}, {failed} failed", human(before)));
    step.fact("times", "since the kill, as seen by kasctl; each includes the query");
    line("");
    let event = |after: Duration, what: &str| event(style, after, what);
    event(Duration::ZERO, &format!("SIGKILL sent to replica 2, pid {pid}"));
    let around = async |index: usize| {
        until(&deployment.kasctl[index], "still routes requests to the killed replica", async |kasctl| {
            Ok(!kasctl.why(agent).await?.goes_to(name))
        })
        .await?;
        event(killed.elapsed(), &format!("replica {} no longer routes requests to it", index + 1));
        anyhow::Ok(())
    };
    let broken = async {
        let Some(stream) = stream else { return Ok(None) };
        let end = stream.ended().await?;
        event(killed.elapsed(), "the open watch failed, and its client got an error");
        anyhow::Ok(Some(end))
    };
    let back = async {
        loop {
            let connected = agents.connected().await?;
            if connected.id.to_string() == agent {
                let holder =
                    deployment.holder(&connected).context("agent 3 is connected to an unknown replica")?;
                let what = format!("replica 1 lists agent {agent} again, at replica {}", holder + 1);
                event(killed.elapsed(), &what);
                return anyhow::Ok(holder);
            }
        }
    };
    let first = async {
        let is_first =
            |record: &&Record| record.agent == AGENT && record.is_answered() && record.sent >= killed;
        let records = records.wait_for(|records| records.iter().any(|record| is_first(&record))).await?;
        let first = records.iter().find(is_first).context("the record is gone")?;
        let asked = human(first.sent - killed);
        event(first.ended - killed, &format!("agent {agent} answered a request that was sent after {asked}"));
        anyhow::Ok(())
    };
    let gone = async {
        until(front, "still lists the killed replica", async |kasctl| {
            let rows = kasctl.replicas().await?;
            Ok(!rows.iter().any(|row| row.name == *name && row.standing != "gone"))
        })
        .await?;
        event(killed.elapsed(), deployment.setup.tracker.gone());
        anyhow::Ok(())
    };
    let kubectl = async {
        let Some(watching) = &watching else { return Ok(()) };
        // kubectl ends with its watch. A controller watches again by itself.
        let (ended, how) = watching.ended_after(killed).await?;
        event(ended - killed, &format!("kubectl get pods --watch ended ({how}), and is run again"));
        let shown = watching.shown_after(ended).await?;
        event(shown - killed, "kubectl shows pods, through another replica");
        anyhow::Ok(())
    };
    let all = Box::pin(async {
        // A process that was waited for leaves no zombie.
        let reaped = async {
            victim.ended().await;
            anyhow::Ok(())
        };
        tokio::try_join!(
            around(SURVIVORS[0]),
            around(SURVIVORS[1]),
            broken,
            back,
            first,
            gone,
            reaped,
            kubectl
        )
    });
    let (.., end, holder, (), (), (), ()) = match processes
        .guard(async { Ok(timeout(READY_WITHIN, all).await) })
        .await?
    {
        Ok(outcome) => outcome?,
        Err(_) => {
            let agentk = &processes.agents[PODS.len() - 1];
            return Err(agentk.explain(&format!("and the replicas did not recover within {READY_WITHIN:?}")));
        }
    };
    processes.pause(AFTER).await?;
    let records = processes.guard(async { Ok(traffic.finish().await) }).await?;
    let problems = summarize(&step, &records, killed, end);
    Ok(Aftermath { holder, problems })
}

/// Prints an event and the time since the kill.
fn event(style: Style, after: Duration, what: &str) {
    let after = if after.is_zero() { "0 ms".to_owned() } else { human(after) };
    line(format_args!("     {} {what}", style.bold(format_args!("{after:>8} "))));
}

/// Prints the outcome of all requests, and returns the failed checks.
fn summarize(step: &Step, records: &[Record], killed: Instant, stream: Option<Outcome>) -> Vec<String> {
    let (mut problems, mut before, mut all_through) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    line("");
    step.text("AGENT   ANSWERED   FAILED   MEDIAN    SLOWEST   LONGEST GAP BETWEEN ANSWERS");
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
            problems.push(format!("{failed} failed for agent {id}, which was not connected to replica 2"));
        }
    }
    line("");
    let failures: Vec<&Outcome> =
        records.iter().map(|record| &record.end).filter(|end| **end != Outcome::Answered).collect();
    let count = |is: fn(&Outcome) -> bool| failures.iter().filter(|end| is(end)).count();
    let not_started = count(|end| matches!(end, Outcome::NotStarted(_)));
    let unknown = count(|end| matches!(end, Outcome::Unknown(_)));
    let unclear = failures.len() - not_started - unknown;
    let all = number(records.len(), "request");
    if problems.is_empty() {
        let [before, all_through] = [before, all_through].map(human);
        step.fact("no gap", "for agents 1 and 2: every request was answered; the longest gap");
        step.fact("", format_args!("between answers was {all_through}, and {before} before the kill"));
    }
    match failures.len() {
        0 => step.fact("failed", format_args!("none of {all}: requests wait in kas for their agent")),
        failed => {
            let said = format!("{not_started} not started, {unknown} started, {unclear} not known");
            step.fact("failed", format_args!("{failed} of {all}: {said}"));
        }
    }
    if unclear > 0 {
        problems.push(format!(
            "{} failed, and kasctl did not say whether it had started",
            number(unclear, "request")
        ));
    }
    let said = stream.as_ref().into_iter().chain(failures.iter().copied()).find_map(|end| match end {
        Outcome::Unknown(said) => Some(("had started", said)),
        Outcome::NotStarted(said) => Some(("had not started", said)),
        _ => None,
    });
    match &stream {
        None | Some(Outcome::Unknown(_) | Outcome::NotStarted(_)) => {}
        Some(Outcome::Answered) => problems.push("the open watch ended as if it were complete".to_owned()),
        Some(Outcome::Unclear(said)) => {
            problems.push(format!(
                "the open watch failed, and kasctl did not say whether it had started: {said}"
            ));
        }
    }
    if let Some((what, said)) = said {
        let of = if stream.is_some() { "the watch" } else { "a request" };
        step.fact("error", format_args!("of kasctl for {of}, which {what}:"));
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

/// Returns a count with its noun in the right number.
fn number(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Breaks a text into lines between words.
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

/// A response that does not end, such as a watch.
struct Stream {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Stream {
    /// Opens a watch; `None` when the cluster does not permit it.
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
    async fn ended(mut self) -> Result<Outcome> {
        let mut stderr = self.child.stderr.take().context("kasctl has no standard error")?;
        let (mut said, mut sink) = (Vec::new(), tokio::io::sink());
        let (_, _, status) = tokio::join!(
            tokio::io::copy(&mut self.stdout, &mut sink),
            stderr.read_to_end(&mut said),
            self.child.wait()
        );
        Ok(Outcome::of(status.context("cannot wait for kasctl")?.code(), &said))
    }
}

/// Restarts a replica, and waits until all replicas know each other; returns how long that took for each.
pub(super) async fn restart(
    processes: &mut Processes,
    deployment: &Deployment,
    index: usize,
) -> Result<(Duration, Duration, Duration)> {
    let began = Instant::now();
    let replica = &mut processes.replicas[index];
    replica.start(&deployment.setup)?;
    replica.ready().await.with_context(|| {
        format!(
            "{} did not become ready; if another program took its port meanwhile, try again",
            NAMES[index]
        )
    })?;
    let names: HashSet<String> = deployment.names.iter().cloned().collect();
    let found = |index: usize| replicas::found(&deployment.kasctl[index], &names, began);
    processes.guard(async { tokio::try_join!(found(0), found(1), found(2)) }).await
}

/// Prints when each agent answers again, after the user has killed a replica.
pub(super) async fn follow(style: Style, deployment: &Deployment, dead: usize, died: Instant) -> Result<()> {
    let Some(kasctl) = deployment.kasctl.iter().enumerate().find(|(index, _)| *index != dead) else {
        bail!("no other replica")
    };
    let (index, kasctl) = kasctl;
    let answers = async |agent: &str| {
        let said = match kasctl.answer(&["--timeout", "20s", "request", agent, "GET", "/version"]).await {
            Ok(_) => format!("agent {agent} answers through replica {}", index + 1),
            Err(error) => format!("agent {agent} does not answer: {error:#}"),
        };
        event(style, died.elapsed(), &said);
    };
    tokio::join!(answers(AGENTS[0].0), answers(AGENTS[1].0), answers(AGENTS[2].0));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrapped("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrapped("longer-than-that a", 4), ["longer-than-that", "a"]);
        assert!(wrapped("", 4).is_empty());
    }
}
