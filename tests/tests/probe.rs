//! `kasctl probe` with real replicas and real agentks: what it reports when replicas are restarted or killed.
//!
//! Nothing is judged by time here: the probe is patient, and only failures count.

#![allow(clippy::unwrap_used)] // a test may panic

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    demo_api::DemoApi,
    kas::{token, write_private},
    mesh::Mesh,
    process::{SOON, program, soon},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines},
    process::{Child, ChildStderr, Command},
};

const PATIENT: [&str; 4] = ["--timeout", "60s", "--noticed-after", "60s"];

/// A cluster, and pods of agent 1: one at each of some replicas.
struct Stage {
    mesh: Mesh,
    agents: Vec<Agentk>,
    api: DemoApi,
    dir: TempDir,
}

impl Stage {
    async fn start(replicas: usize, connected_to: &[usize]) -> Result<Self> {
        let mesh = Mesh::start(replicas).await?;
        let api = DemoApi::start(([127, 0, 0, 1], 0).into()).await?;
        let mut agents = Vec::new();
        for n in connected_to {
            let agent = Agentk::start_with(mesh.agents(*n), &token(1), &api.url()).await?;
            agent.connected().await?;
            agents.push(agent);
        }
        mesh.meshed().await?;
        let dir = TempDir::with_prefix("probe-test-")?;
        write_private(&dir.path().join("secret"), &BASE64_STANDARD.encode(mesh.api_secret()))?;
        Ok(Self { mesh, agents, api, dir })
    }

    /// Starts a probe at this replica. Its report is JSON; returns when it has begun.
    async fn probe(&self, n: usize, args: &[&str]) -> Result<Probe> {
        self.probe_at(n, &[&["--for", "10m", "--rate", "50"], args].concat()).await
    }

    /// Starts a probe with this rate and time.
    async fn probe_at(&self, n: usize, args: &[&str]) -> Result<Probe> {
        let kasctl = tokio::task::spawn_blocking(|| program("kasctl")).await??;
        let mut child = Command::new(kasctl)
            .args(["probe", "-o", "json"])
            .args(args)
            .env("KASCTL_ADDRESS", format!("grpc://{}", self.mesh.kas(n).api))
            .env("KASCTL_SECRET_FILE", self.dir.path().join("secret"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let lines = BufReader::new(child.stderr.take().context("a pipe")?).lines();
        let mut probe = Probe { child, lines, seen: Vec::new() };
        probe.line("all agents answer").await?;
        Ok(probe)
    }
}

struct Probe {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    seen: Vec<String>,
}

impl Probe {
    /// Reads lines until one contains this text.
    async fn line(&mut self, text: &str) -> Result<()> {
        let found = tokio::time::timeout(SOON * 2, async {
            loop {
                let Some(line) = self.lines.next_line().await? else { break anyhow::Ok(false) };
                let is_it = line.contains(text);
                self.seen.push(line);
                if is_it {
                    break Ok(true);
                }
            }
        })
        .await;
        ensure!(matches!(found, Ok(Ok(true))), "no line with {text:?} ({found:?}): {:#?}", self.seen);
        Ok(())
    }

    /// Reads the lines of this many seconds, which begin now.
    async fn seconds(&mut self, number: usize) -> Result<()> {
        // The first of them may have begun earlier.
        for _ in 0..=number {
            self.line(" slowest ").await?;
        }
        Ok(())
    }

    /// Sends the signal of Ctrl-C, and returns the exit code and the report.
    async fn end(self) -> Result<(Option<i32>, Value)> {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("it runs")?;
        kill_process(pid, Signal::INT)?;
        self.report().await
    }

    /// Waits for its end, and returns the exit code and the report.
    async fn report(mut self) -> Result<(Option<i32>, Value)> {
        let mut text = String::new();
        let mut stdout = self.child.stdout.take().context("a pipe")?;
        // Both pipes are read, so that neither fills up.
        let rest = async {
            while let Ok(Some(line)) = self.lines.next_line().await {
                self.seen.push(line);
            }
        };
        let (read, ()) =
            soon("the report", async { tokio::join!(stdout.read_to_string(&mut text), rest) }).await;
        read?;
        let status = soon("the end", self.child.wait()).await?;
        println!("{}", self.seen.join("\n"));
        let report = serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))?;
        Ok((status.code(), report))
    }
}

fn number(report: &Value, pointer: &str) -> u64 {
    report.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer} of {report:#}"))
}

#[tokio::test]
async fn clean_restarts_of_all_replicas_are_not_noticed() -> Result<()> {
    let mut stage = Stage::start(3, &[0, 1]).await?;
    let mut probe = stage.probe(2, &[&["all"], &PATIENT[..]].concat()).await?;
    probe.seconds(1).await?;
    for n in 0..3 {
        stage.mesh.leave(n, SOON).await?;
        stage.mesh.restart(n).await?;
        // Its agentk is back before the next one leaves.
        if let Some(agent) = stage.agents.get(n) {
            agent.connected().await?;
        }
        stage.mesh.meshed().await?;
        probe.seconds(1).await?;
    }
    let (code, report) = probe.end().await?;
    assert_eq!((code, &report["verdict"]["noticed"]), (Some(0), &Value::Bool(false)), "{report:#}");
    assert_eq!(number(&report, "/requests/failed"), 0);
    assert_eq!(number(&report, "/requests/due"), number(&report, "/requests/answered"));
    // Requests entered at every replica, and both that hold the agent served.
    assert_eq!(report["through"]["how"], "listed");
    for n in 0..3 {
        let address = format!("grpc://{}", stage.mesh.kas(n).api);
        let entered = report["entered"].as_array().context("a list")?;
        assert!(entered.iter().any(|row| row["address"] == *address), "{address}: {entered:#?}");
    }
    let served: Vec<_> =
        report["served"].as_array().context("a list")?.iter().map(|row| row["replica"].clone()).collect();
    for n in [0, 1] {
        assert!(served.contains(&stage.mesh.private(n).to_string().into()), "{served:?}");
    }
    Ok(())
}

#[tokio::test]
async fn killed_replicas_are_not_noticed_by_clients_that_repeat_reads() -> Result<()> {
    let mut stage = Stage::start(3, &[0, 1]).await?;
    let mut probe = stage.probe(1, &[&["1", "--repeat-unknown"], &PATIENT[..]].concat()).await?;
    probe.seconds(1).await?;
    // One without a tunnel of the agent, then one with.
    for n in [2, 0] {
        stage.mesh.kill(n).await?;
        probe.seconds(2).await?;
        stage.mesh.restart(n).await?;
        probe.seconds(1).await?;
    }
    let (code, report) = probe.end().await?;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(number(&report, "/requests/failed"), 0);
    Ok(())
}

#[tokio::test]
async fn an_agent_that_is_lost_for_a_while_is_noticed_as_a_gap() -> Result<()> {
    let mut stage = Stage::start(2, &[0]).await?;
    // Through the other replica alone, so that kas itself says what happened to each request.
    let through = format!("grpc://{}", stage.mesh.kas(1).api);
    let args = ["name=agent-1", "--through", &through, "--timeout", "2s", "--noticed-after", "1s"];
    let mut probe = stage.probe(1, &args).await?;
    probe.seconds(1).await?;
    stage.mesh.kill(0).await?;
    // Requests that had started are unknown at once. Those that wait for the agent reach their deadline.
    probe.line(" failed, the first not started: ").await?;
    stage.mesh.restart(0).await?;
    probe.line("agent 1 had not answered for ").await?;
    let (code, report) = probe.end().await?;
    assert_eq!((code, &report["verdict"]["noticed"]), (Some(1), &Value::Bool(true)), "{report:#}");
    assert!(number(&report, "/failed/not_started") > 0, "{report:#}");
    assert_eq!(number(&report, "/failed/refused") + number(&report, "/failed/cluster"), 0, "{report:#}");
    let gaps = report["gaps"].as_array().context("a list")?;
    let longest = gaps.iter().max_by_key(|gap| gap["duration_ms"].as_f64().map(f64::to_bits));
    let longest = longest.context("a gap")?;
    assert_eq!((&longest["agent_id"], &longest["open"]), (&1.into(), &false.into()));
    assert!(longest["duration_ms"].as_f64().is_some_and(|ms| ms >= 2000.0), "{longest}");
    assert!(longest["failed"].as_u64().is_some_and(|failed| failed > 0), "{longest}");
    let text = report["verdict"]["text"].as_str().context("a text")?;
    assert!(text.contains("without an answer of an agent"), "{text}");
    Ok(())
}

#[tokio::test]
async fn agents_that_were_never_asked_are_not_judged() -> Result<()> {
    let mut stage = Stage::start(1, &[0]).await?;
    let second = Agentk::start_with(stage.mesh.agents(0), &token(2), &stage.api.url()).await?;
    second.connected().await?;
    stage.agents.push(second);
    // The second request is due at the end, so it is not sent.
    let args = [&["all", "--for", "1s", "--rate", "1"], &PATIENT[..]].concat();
    let (code, report) = stage.probe_at(0, &args).await?.report().await?;
    assert_eq!((code, &report["verdict"]["noticed"]), (Some(8), &Value::Null), "{report:#}");
    assert_eq!(
        report["verdict"]["reasons"],
        serde_json::json!(["1 agent was never asked: raise --rate or --for"])
    );
    assert_eq!(number(&report, "/agents/1/due"), 0, "{report:#}");
    Ok(())
}
