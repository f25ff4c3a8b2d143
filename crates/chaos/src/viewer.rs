//! Clients that look at a view, each through one replica after the other: the next one when a stream ends.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use history::{Micros, Rows};
use parking_lot::Mutex;
use prost::Message as _;
use proto::kas::api::v1::{WatchViewRequest, WatchViewResponse, watch_view_response::Event};
use serde_json::Value;
use testkit::{caller::Caller, link::Next};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{client::Client, clock};

const WATCH_VIEW: &str = "/kas.api.v1.KasApi/WatchView";
/// A replica that is not reached within this is not there.
const DIAL: Duration = Duration::from_secs(1);
/// The pause before the next replica is asked.
const PAUSE: Duration = Duration::from_millis(20);
/// The columns of a table that are compared otherwise, or depend on the time.
const NAME: &str = "Name";
const AGE: &str = "Age";

/// What a viewer has.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    /// Titles, and whether the cells are ages.
    columns: Vec<(String, bool)>,
    /// The cells of each row, by resource, namespace and name.
    rows: BTreeMap<String, Vec<String>>,
    /// What it was told of the agent last.
    pub(crate) state: String,
    /// The replica of the stream that is open.
    pub(crate) replica: Option<usize>,
    /// When the first row came over this stream.
    pub(crate) first_row: Option<Micros>,
    /// How many rows came over all streams, and how often all were to be forgotten.
    pub(crate) received: u64,
    pub(crate) resets: u64,
    resume: Bytes,
}

impl Screen {
    /// Returns the rows as they are compared.
    fn cells(&self) -> BTreeMap<String, String> {
        let titled = |cells: &Vec<String>| {
            let named = self.columns.iter().zip(cells).filter(|((_, is_age), _)| !is_age);
            words(named.map(|((title, _), cell)| (title.as_str(), cell.clone())))
        };
        self.rows.iter().map(|(name, cells)| (name.clone(), titled(cells))).collect()
    }

    fn event(&mut self, event: Event, agent: i64) {
        match event {
            Event::Columns(columns) => {
                self.columns =
                    columns.columns.into_iter().map(|column| (column.name, column.r#type == "age")).collect();
            }
            Event::Upserted(rows) => {
                self.first_row.get_or_insert_with(clock::now);
                for row in rows.rows {
                    self.received += 1;
                    self.rows.insert(name(&row.resource, &row.namespace, &row.name), row.cells);
                }
            }
            Event::Removed(keys) => {
                for key in keys.keys {
                    self.rows.remove(&name(&key.resource, &key.namespace, &key.name));
                }
            }
            Event::Reset(_) => {
                self.resets += 1;
                self.rows.clear();
            }
            Event::Agent(told) => {
                if told.id == agent {
                    self.state = told.state;
                }
            }
            Event::Synced(synced) => self.resume = synced.resume,
        }
    }
}

fn name(resource: &str, namespace: &str, name: &str) -> String {
    format!("{resource} {namespace}/{name}")
}

/// Returns the cells that are not empty, with their titles.
fn words<'a>(cells: impl Iterator<Item = (&'a str, String)>) -> String {
    let cells = cells.filter(|(_, cell)| !cell.is_empty());
    cells.map(|(title, cell)| format!("{title}: {cell}")).collect::<Vec<_>>().join(", ")
}

/// Reads the table of a resource as the API server prints it.
pub(crate) fn table(resource: &str, table: &Value) -> Result<BTreeMap<String, String>> {
    ensure!(table["kind"] == "Table", "the API server prints no table of {resource}");
    let titles: Vec<(&str, bool)> = table["columnDefinitions"]
        .as_array()
        .context("a table has columns")?
        .iter()
        .map(|column| {
            let title = column["name"].as_str().unwrap_or_default();
            // Others than these are shown by `-o wide` only.
            (title, column["priority"] == 0 && title != NAME && title != AGE)
        })
        .collect();
    let mut rows = BTreeMap::new();
    for row in table["rows"].as_array().into_iter().flatten() {
        let metadata = &row["object"]["metadata"];
        let text = |key: &str| metadata[key].as_str().unwrap_or_default();
        let cells = row["cells"].as_array().map(Vec::as_slice).unwrap_or_default();
        let shown = titles.iter().zip(cells).filter(|((_, is_shown), _)| *is_shown);
        let cell = |cell: &Value| match cell {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let words = words(shown.map(|((title, _), value)| (*title, cell(value))));
        rows.insert(name(resource, text("namespace"), text("name")), words);
    }
    Ok(rows)
}

/// A client that looks at a view of one agent, until dropped.
#[derive(Debug)]
pub(crate) struct Viewer {
    name: String,
    pub(crate) view: &'static str,
    agent: i64,
    pub(crate) screen: Arc<Mutex<Screen>>,
    _task: JoinSet<()>,
}

impl Viewer {
    /// Begins to look, through this replica.
    pub(crate) fn start(
        number: usize,
        view: &'static str,
        agent: i64,
        client: &Arc<Client>,
        doors: Vec<SocketAddr>,
        first: usize,
    ) -> Self {
        let screen = Arc::<Mutex<Screen>>::default();
        let (shown, client) = (Arc::clone(&screen), Arc::clone(client));
        let mut task = JoinSet::new();
        task.spawn(async move {
            for time in 0.. {
                let replica = (first + time) % doors.len();
                // It ended, for whatever reason: the next one is asked.
                let _ = look(view, agent, &client, replica, doors[replica], &shown).await;
                shown.lock().replica = None;
                sleep(PAUSE).await;
            }
        });
        Self { name: format!("viewer {number}"), view, agent, screen, _task: task }
    }

    /// What it has now, beside what is true.
    pub(crate) fn rows(&self, truth: Option<BTreeMap<String, String>>) -> Rows {
        let screen = self.screen.lock();
        Rows {
            viewer: self.name.clone(),
            view: self.view.to_owned(),
            agent: self.agent,
            at: clock::now(),
            state: screen.state.clone(),
            seen: screen.cells(),
            truth,
        }
    }
}

/// Looks through one replica, until the stream ends.
async fn look(
    view: &str,
    agent: i64,
    client: &Client,
    replica: usize,
    door: SocketAddr,
    screen: &Mutex<Screen>,
) -> Result<()> {
    let caller = timeout(DIAL, Caller::connect(door, Some(client.token()))).await??;
    let request = WatchViewRequest {
        agents: format!("id={agent}"),
        view: view.to_owned(),
        resume: screen.lock().resume.clone(),
        ..WatchViewRequest::default()
    };
    let reset = |reason| anyhow::anyhow!("reset: {reason:?}");
    let mut stream = timeout(DIAL, caller.open(caller.request(WATCH_VIEW))).await??;
    stream.send_message(&request).await.map_err(reset)?;
    stream.half_close().map_err(reset)?;
    {
        let mut screen = screen.lock();
        (screen.replica, screen.first_row) = (Some(replica), None);
    }
    loop {
        match stream.next_unbounded().await {
            Next::Message(message) => {
                let event = WatchViewResponse::decode(message)?.event.context("an empty event")?;
                screen.lock().event(event, agent);
            }
            end => bail!("the view has ended: {end:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::kas::api::v1::{ViewColumn, ViewColumns, ViewRow, ViewRows};
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_and_tables_are_compared_by_the_titles_of_their_cells() {
        let printed = json!({
            "kind": "Table",
            "columnDefinitions": [
                { "name": "Name", "priority": 0 }, { "name": "Ready", "priority": 0 },
                { "name": "Up-to-date", "priority": 0 }, { "name": "Age", "priority": 0 },
                { "name": "Images", "priority": 1 },
            ],
            "rows": [
                { "cells": ["web", "0/3", 0, "5s", "none"],
                  "object": { "metadata": { "name": "web", "namespace": "shop" } } },
            ],
        });
        let truth = table("deployments.apps", &printed).expect("a table");
        let columns = ["Ready", "Status", "Up-to-date", "Age"].map(|name| ViewColumn {
            name: name.to_owned(),
            r#type: if name == "Age" { "age" } else { "string" }.to_owned(),
        });
        let row = ViewRow {
            agent_id: 7,
            resource: "deployments.apps".to_owned(),
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            cells: ["0/3", "", "0"].map(str::to_owned).to_vec(),
            ..ViewRow::default()
        };
        let mut screen = Screen::default();
        screen.event(Event::Columns(ViewColumns { columns: columns.to_vec() }), 7);
        screen.event(Event::Upserted(ViewRows { rows: vec![row] }), 7);
        assert_eq!(screen.cells(), truth);
        assert_eq!(truth["deployments.apps shop/web"], "Ready: 0/3, Up-to-date: 0");
        assert!(table("pods", &json!({ "kind": "PodList" })).is_err());
    }
}
