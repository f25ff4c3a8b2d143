//! `kasctl get pods --agents all --watch`: rows as they come and go.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout},
    time::{Instant, timeout},
};

use super::WITHIN;
use crate::kasctl::Kasctl;

/// What identifies a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(super) struct Row {
    #[serde(default)]
    pub(super) agent_id: usize,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// An agent of which something is missing.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Missing {
    pub(super) name: String,
    pub(super) reason: String,
}

/// A line of `-o json`.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    Upserted {
        row: Row,
    },
    Removed {
        row: Row,
    },
    Reset,
    Synced {
        unanswered: Vec<Missing>,
    },
    #[serde(other)]
    Other,
}

/// The open view.
#[derive(Debug)]
pub(super) struct View {
    /// Killed when this is dropped.
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    pub(super) rows: BTreeSet<Row>,
}

impl View {
    /// Opens it, and waits until the rows of all agents are there.
    pub(super) async fn open(kasctl: &Kasctl) -> Result<Self> {
        let command = ["get", "pods", "--agents", "all", "--watch", "-o", "json"];
        let mut child = kasctl.call(&command).spawn().context("cannot run kasctl")?;
        let lines = BufReader::new(child.stdout.take().context("kasctl has no standard output")?).lines();
        let mut view = Self { child, lines, rows: BTreeSet::new() };
        let mut missing = Vec::new();
        let complete = async {
            loop {
                match view.next().await? {
                    Event::Synced { unanswered } if unanswered.is_empty() => return anyhow::Ok(()),
                    Event::Synced { unanswered } => missing = unanswered,
                    _ => {}
                }
            }
        };
        let outcome = timeout(WITHIN, complete).await;
        outcome.with_context(|| format!("the view lacks agents after {WITHIN:?}: {missing:?}"))??;
        Ok(view)
    }

    async fn next(&mut self) -> Result<Event> {
        let Some(line) = self.lines.next_line().await? else {
            let mut said = String::new();
            if let Some(stderr) = self.child.stderr.take() {
                said = BufReader::new(stderr).lines().next_line().await?.unwrap_or_default();
            }
            bail!("kasctl get --watch ended: {said}")
        };
        let event = serde_json::from_str(&line).context("kasctl printed no event")?;
        match &event {
            Event::Upserted { row } => {
                self.rows.insert(row.clone());
            }
            Event::Removed { row } => {
                self.rows.remove(row);
            }
            Event::Reset => self.rows.clear(),
            _ => {}
        }
        Ok(event)
    }

    /// Waits until a row is there, or gone. Returns when it was.
    pub(super) async fn until(&mut self, row: &Row, is_there: bool) -> Result<Instant> {
        let found = async {
            while self.rows.contains(row) != is_there {
                self.next().await?;
            }
            anyhow::Ok(Instant::now())
        };
        let what = if is_there { "come" } else { "gone" };
        let outcome = timeout(WITHIN, found).await;
        outcome.with_context(|| format!("the row {}/{} has not {what}", row.namespace, row.name))?
    }
}

/// What `kasctl get -o json` prints.
#[derive(Debug, Deserialize)]
struct Document {
    rows: Vec<Row>,
    unanswered: Vec<Missing>,
}

/// Asks once for the pods of all agents, until none is missing. Returns them, and how long the last question
/// took.
pub(super) async fn ask(kasctl: &Kasctl) -> Result<(Vec<Row>, Duration)> {
    let deadline = Instant::now() + WITHIN;
    loop {
        let began = Instant::now();
        let text = kasctl.partial(&["get", "pods", "--agents", "all", "-o", "json"]).await?;
        let Document { rows, unanswered } = serde_json::from_str(&text).context("kasctl printed no rows")?;
        if unanswered.is_empty() {
            return Ok((rows, began.elapsed()));
        }
        ensure!(Instant::now() < deadline, "the view lacks agents after {WITHIN:?}: {unanswered:?}");
    }
}
