//! A webhook for an agent that is away: it is kept on two replicas, of which one is killed.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use devkit::report::human;
use serde::Deserialize;
use serde_json::Value;
use tokio::{
    io::{BufReader, Lines},
    process::ChildStdout,
    time::{Instant, sleep, timeout},
};

use super::{
    LOOK, WITHIN,
    objects::{ANNOTATION, CONFIG_MAP, secret_file},
};
use crate::{
    Processes,
    deployment::Deployment,
    http,
    kasctl::Kasctl,
    replicas,
    report::Report,
    teams::{Teams, name},
};

/// The agent that the webhook is for.
pub(super) const AGENT: usize = 7;
/// What GitLab, GitHub or somebody else would send.
const BODY: &str = r#"{"ref":"refs/heads/main","after":"4f2a9c1"}"#;

/// A webhook that came, as the server of the demonstration prints it.
#[derive(Debug, Deserialize)]
pub(super) struct Came {
    pub(super) to: String,
    pub(super) id: String,
    pub(super) attempt: String,
    pub(super) body: String,
}

/// The webhooks that the server of the demonstration gets.
pub(super) struct Receiver(pub(super) Lines<BufReader<ChildStdout>>);

impl Receiver {
    /// Waits for the next webhook.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Came> {
        let line = self.0.next_line().await?.context("the server of recorded metrics has ended")?;
        serde_json::from_str(&line).context("the server of recorded metrics printed no webhook")
    }
}

/// What `kasctl hooks list -o json` prints.
#[derive(Debug, Deserialize)]
struct Hooks {
    /// The home: the replica that delivers.
    replica: String,
    known: bool,
    kept: Vec<Kept>,
}

#[derive(Debug, Deserialize)]
struct Kept {
    state: String,
}

impl Hooks {
    async fn ask(kasctl: &Kasctl) -> Result<Self> {
        let text = kasctl.answer(&["hooks", "list", &AGENT.to_string(), "-o", "json"]).await?;
        serde_json::from_str(&text).context("kasctl hooks list printed no hooks")
    }

    fn waiting(&self) -> usize {
        self.kept.iter().filter(|kept| kept.state == "waiting").count()
    }

    /// Asks until something holds.
    async fn until(kasctl: &Kasctl, what: &str, holds: impl Fn(&Self) -> bool) -> Result<Self> {
        let deadline = Instant::now() + WITHIN;
        loop {
            let last = match Self::ask(kasctl).await {
                Ok(hooks) if holds(&hooks) => return Ok(hooks),
                Ok(hooks) => format!("{hooks:?}"),
                Err(error) => format!("{error:#}"),
            };
            ensure!(Instant::now() < deadline, "{what} did not happen within {WITHIN:?}: {last}");
            sleep(LOOK).await;
        }
    }
}

/// Waits until no replica holds the agent any more.
async fn is_away(kasctl: &Kasctl) -> Result<()> {
    replicas::until(kasctl, "still lists the agent", async |kasctl| {
        Ok(kasctl.why(&AGENT.to_string()).await?.held_by.is_empty())
    })
    .await
}

/// Sends a webhook to a replica. Returns its id, and on how many replicas it is.
async fn send(port: u16, hook: &str, secret: &str) -> Result<(String, String)> {
    let fields = format!("Authorization: Bearer {secret}\r\n");
    let answer = http::post(port, &format!("/hooks/v1/{AGENT}/{hook}"), &fields, BODY).await?;
    ensure!(
        answer.status == 202,
        "kas did not accept the webhook: status {}, {}",
        answer.status,
        answer.body
    );
    let header = |name: &str| answer.header(name).map(str::to_owned);
    let id = header("kas-hook-id").context("kas told no id of the webhook")?;
    Ok((id, header("kas-mailbox-copies").context("kas did not tell on how many replicas the webhook is")?))
}

/// Returns the annotation of the object in the cluster, asked for through kas.
async fn annotation(kasctl: &Kasctl) -> Result<Option<String>> {
    let path = format!("/api/v1/namespaces/{}/configmaps/{CONFIG_MAP}", name(AGENT));
    let text = kasctl.answer(&["request", "--fail", &AGENT.to_string(), "GET", &path]).await?;
    let object: Value = serde_json::from_str(&text).context("the API server sent no object")?;
    Ok(object["metadata"]["annotations"][ANNOTATION].as_str().map(str::to_owned))
}

/// What has happened.
pub(super) struct Delivered {
    /// The replica that was killed.
    pub(super) dead: usize,
    pub(super) problems: Vec<String>,
}

/// Shows it, in two steps.
pub(super) async fn show(
    report: &mut Report,
    processes: &mut Processes,
    deployment: &Deployment,
    teams: &Teams,
    receiver: &mut Receiver,
) -> Result<Delivered> {
    let (team, mut problems) = (name(AGENT), Vec::new());
    let front = &deployment.kasctl[0];
    let mut step = report.step(&format!("Send two webhooks to {team} while its agent is away"));
    processes.guard(Hooks::until(front, "that kas knows the webhooks", |hooks| hooks.known)).await?;
    let mut agent = processes.agents.remove(AGENT - 1);
    // A clean end would wait for the watches of the view, which kas keeps for a while.
    let pid = agent.kill()?;
    let _ = agent.ended().await;
    processes.guard(is_away(front)).await?;
    let home = Hooks::ask(front).await?.replica;
    let home = deployment.names.iter().position(|name| *name == home);
    let home = home.context("no replica is the home of the webhooks")?;
    // The sender may use any replica. The home is not asked, since it will not answer any more.
    let first = usize::from(home == 0);
    let secret_file = secret_file(&teams.dir, AGENT);
    let secret = std::fs::read_to_string(&secret_file).context("cannot read the secret of the webhook")?;
    let port = processes.replicas[first].ports.hooks;
    let began = Instant::now();
    let (id, copies) = processes.guard(send(port, "push", &secret)).await?;
    let took = began.elapsed();
    let (touch, _) = processes.guard(send(port, "touch", &secret)).await?;
    let other = deployment.kasctl[first].clone();
    let hooks = processes.guard(Hooks::until(&other, "two wait", |hooks| hooks.waiting() == 2)).await?;
    step.took();
    step.fact("killed", format_args!("kill -9 {pid}: the agentk of {team}"));
    step.fact("command", format_args!("curl -i -X POST http://127.0.0.1:{port}/hooks/v1/{AGENT}/push \\"));
    step.fact("", format_args!("  -H \"Authorization: Bearer $(cat {})\" \\", secret_file.display()));
    step.fact("", format_args!("  -d '{BODY}'"));
    step.fact("answered", format_args!("202 after {}; kas-mailbox-copies: {copies}", human(took)));
    step.fact("", format_args!("kas-hook-id: {id}"));
    step.fact("the other", "the same for the webhook touch, which annotates an object");
    step.fact(
        "kept",
        format_args!("by two replicas; replica {} delivers: kasctl hooks list {AGENT}", home + 1),
    );
    if copies != "2" {
        problems.push(format!("the webhook was on {copies} replicas instead of 2"));
    }
    if deployment.names[home] != hooks.replica {
        problems.push("another replica became the home of the webhooks".to_owned());
    }

    let mut step = report.step("Kill the replica that would deliver, then start the agent");
    let mut victim = processes.replicas[home].service.take().context("the home does not run")?;
    let pid = victim.kill()?;
    let killed = Instant::now();
    let _ = victim.ended().await;
    let name_of_dead = &deployment.names[home];
    let moved =
        Hooks::until(&other, "another home", |hooks| hooks.replica != *name_of_dead && hooks.waiting() == 2);
    let moved = processes.guard_all_but_replicas(moved).await?;
    let moved_after = killed.elapsed();
    let started = Instant::now();
    let service = teams.start(AGENT, &processes.replicas)?;
    processes.agents.insert(AGENT - 1, service);
    let came = async {
        timeout(WITHIN, receiver.next())
            .await
            .with_context(|| format!("the webhook did not come within {WITHIN:?}"))?
    };
    let came = processes.guard_all_but_replicas(came).await?;
    let came_after = started.elapsed();
    let touched = async {
        let deadline = Instant::now() + WITHIN;
        loop {
            let now = annotation(&other).await;
            if now.as_ref().is_ok_and(|now| now.as_deref() == Some(&*touch)) {
                return Ok(started.elapsed());
            }
            ensure!(Instant::now() < deadline, "the object has not got {touch} within {WITHIN:?}: {now:?}");
            sleep(LOOK).await;
        }
    };
    let touched_after: Duration = processes.guard_all_but_replicas(touched).await?;
    let left = Hooks::until(&other, "nothing waits", |hooks| hooks.kept.is_empty());
    processes.guard_all_but_replicas(left).await?;
    step.took();
    step.fact("killed", format_args!("kill -9 {}: replica {}", pid, home + 1));
    let new_home = deployment.with_numbers(&format!("replica {}", moved.replica));
    step.fact("kept", format_args!("{new_home} has both webhooks, after {}", human(moved_after)));
    step.fact("started", format_args!("the agentk of {team}; times from here"));
    step.fact(
        "delivered",
        format_args!("{} to the Service {team}/receiver, attempt {}", human(came_after), came.attempt),
    );
    step.fact("", format_args!("{} to {}", came.body, came.to));
    step.fact(
        "annotated",
        format_args!("{} the ConfigMap {team}/{CONFIG_MAP}, {ANNOTATION}", human(touched_after)),
    );
    step.fact("left", "nothing waits, and there is no dead letter");
    if came.id != id || came.body != BODY || came.to != team {
        problems.push(format!("the webhook that came is not the one that was sent: {came:?}"));
    }
    Ok(Delivered { dead: home, problems })
}
