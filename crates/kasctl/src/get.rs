//! `kasctl get`: rows of objects of many clusters, and with `--watch` every change.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use process::clock;
use proto::kas::api::v1::{
    UnansweredAgent, ViewAgent, ViewColumn, ViewKey, ViewRow, ViewSynced, WatchViewRequest,
    WatchViewResponse, watch_view_response::Event,
};
use serde::Serialize;
use serde_json::{Map, Value};
use tonic::Streaming;

use crate::{
    agents::{PARTIAL, UnansweredJson, warn},
    api::{Client, UNARY_TIMEOUT},
    cli::{Format, GetArgs},
    duration::humane,
    explain::{Call, CallKind},
    failure::{Exit, Failure},
    output::{Output, note},
    table::printable,
};

/// What identifies a row: agent, resource, namespace and name.
type Key = (i64, String, String, String);

/// The type of a column whose cells are ages.
const AGE: &str = "age";

/// Prints the rows of a view.
///
/// # Errors
/// The rows cannot be read or written. If an agent did not answer, the result is [`Exit::Partial`].
pub(crate) async fn run(
    client: Client,
    mut output: Output,
    args: GetArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, (!args.watch).then_some(UNARY_TIMEOUT));
    let watch = args.watch;
    let question = WatchViewRequest {
        agents: args.agents,
        view: args.view,
        namespaces: args.namespaces,
        label_selector: args.selector.unwrap_or_default(),
        filter: args.filter.unwrap_or_default(),
        columns: args.columns,
        resume: Vec::new().into(),
        max_rows: args.max_rows.unwrap_or_default(),
    };
    let request = client.request(&call, question)?;
    client
        .within(&call, async {
            let answer = match watch {
                true => client.kas().watch_view(request).await,
                false => client.kas().query_view(request).await,
            };
            let events = answer.map_err(|status| client.explain(&call, &status))?.into_inner();
            let mut seen = Seen::default();
            let events = Events { events, client: &client, call: &call };
            match watch {
                true => seen.watch(events, &mut output, format).await,
                false => seen.list(events, &mut output, format).await,
            }
        })
        .await
}

/// The stream of changes. Its errors are explained.
struct Events<'a> {
    events: Streaming<WatchViewResponse>,
    client: &'a Client,
    call: &'a Call,
}

impl Events<'_> {
    /// Returns the next event. Events that this version does not know are skipped.
    async fn next(&mut self) -> Result<Event, Failure> {
        loop {
            let message = self.events.message().await;
            match message.map_err(|status| self.client.explain(self.call, &status))? {
                Some(WatchViewResponse { event: Some(event) }) => return Ok(event),
                Some(WatchViewResponse { event: None }) => {}
                None => {
                    return Err(self
                        .call
                        .explain_broken("it ended the watch, which a replica does when it shuts down"));
                }
            }
        }
    }
}

/// What was received.
#[derive(Default)]
struct Seen {
    columns: Vec<ViewColumn>,
    rows: BTreeMap<Key, ViewRow>,
    agents: HashMap<i64, String>,
}

impl Seen {
    /// Takes an event.
    fn take(&mut self, event: &Event) {
        match event {
            Event::Columns(columns) => self.columns.clone_from(&columns.columns),
            Event::Upserted(rows) => {
                for row in &rows.rows {
                    self.rows.insert(key_of(row), row.clone());
                }
            }
            Event::Removed(keys) => {
                for key in &keys.keys {
                    self.rows.remove(&key_of_removed(key));
                }
            }
            Event::Reset(_) => self.rows.clear(),
            Event::Agent(agent) => {
                self.agents.insert(agent.id, agent.name.clone());
            }
            Event::Synced(_) => {}
        }
    }

    async fn list(
        &mut self,
        mut events: Events<'_>,
        output: &mut Output,
        format: Format,
    ) -> Result<Exit, Failure> {
        let synced = loop {
            match events.next().await? {
                Event::Synced(synced) => break synced,
                event => self.take(&event),
            }
        };
        self.warn(&synced);
        match format {
            Format::Json => {
                let rows = self.rows.values();
                let document = ListJson {
                    columns: self.columns.iter().map(ColumnJson::from).collect(),
                    rows: rows.map(|row| self.json(row)).collect(),
                    unanswered: synced.unanswered.iter().map(AgentJson::from).collect(),
                    replicas: synced.replicas.iter().map(UnansweredJson::from).collect(),
                    truncated: synced.truncated,
                };
                output.json_document(&document).await?;
            }
            Format::Table if self.rows.is_empty() => note("no rows found"),
            Format::Table => {
                let shape = Shape::of(self, false);
                let mut table = Lines::default();
                let rows: Vec<Vec<String>> =
                    self.rows.values().map(|row| self.cells(row, &shape, None)).collect();
                let titles = self.titles(&shape);
                output.write(table.rows(std::iter::once(&titles).chain(&rows)).as_bytes()).await?;
            }
        }
        let is_whole = synced.unanswered.is_empty() && synced.replicas.is_empty() && !synced.truncated;
        Ok(if is_whole { Exit::Ok } else { Exit::Partial })
    }

    async fn watch(
        &mut self,
        mut events: Events<'_>,
        output: &mut Output,
        format: Format,
    ) -> Result<Exit, Failure> {
        let mut table = Lines::default();
        let mut told: Option<ViewSynced> = None;
        let shape = Shape { resource: true, namespace: true, event: true };
        loop {
            let event = events.next().await?;
            if format == Format::Json {
                self.take(&event);
                for line in self.lines(&event) {
                    output.json_line(&line).await?;
                }
                continue;
            }
            let known: Vec<bool> = match &event {
                Event::Upserted(rows) => {
                    rows.rows.iter().map(|row| self.rows.contains_key(&key_of(row))).collect()
                }
                _ => Vec::new(),
            };
            self.take(&event);
            let rows: Vec<Vec<String>> = match &event {
                Event::Columns(_) => vec![self.titles(&shape)],
                Event::Upserted(rows) => {
                    let what = |known: bool| match (&told, known) {
                        (None, _) => "present",
                        (Some(_), true) => "changed",
                        (Some(_), false) => "added",
                    };
                    let rows = rows.rows.iter().zip(known);
                    rows.map(|(row, known)| self.cells(row, &shape, Some(what(known)))).collect()
                }
                Event::Removed(keys) => {
                    let gone = |key: &ViewKey| {
                        let ViewKey { agent_id, resource, namespace, name } = key.clone();
                        let row = ViewRow { agent_id, resource, namespace, name, ..ViewRow::default() };
                        self.cells(&row, &shape, Some("removed"))
                    };
                    keys.keys.iter().map(gone).collect()
                }
                Event::Reset(_) => {
                    note("kas does not know any more what has changed: all rows follow");
                    told = None;
                    Vec::new()
                }
                Event::Agent(agent) => {
                    if told.is_some() {
                        self.note(agent);
                    }
                    Vec::new()
                }
                Event::Synced(synced) => {
                    let now = ViewSynced { resume: Vec::new().into(), ..synced.clone() };
                    if told.as_ref() != Some(&now) {
                        self.warn(synced);
                    }
                    told = Some(now);
                    Vec::new()
                }
            };
            if !rows.is_empty() {
                output.write(table.rows(&rows).as_bytes()).await?;
            }
        }
    }

    fn note(&self, agent: &ViewAgent) {
        let ViewAgent { id, name, state, reason, .. } = agent;
        let (name, reason) = (printable(name), printable(reason));
        let separator = if reason.is_empty() { "" } else { ": " };
        note(format_args!("agent {id} ({name}) is {state}{separator}{reason}"));
    }

    fn warn(&self, synced: &ViewSynced) {
        warn(&synced.replicas, PARTIAL);
        for UnansweredAgent { id, name, reason } in &synced.unanswered {
            let (name, reason) = (printable(name), printable(reason));
            note(format_args!("warning: agent {id} ({name}) is missing or not up to date: {reason}"));
        }
        if synced.truncated {
            note("warning: there are more rows than --max-rows");
        }
    }

    fn titles(&self, shape: &Shape) -> Vec<String> {
        let fixed = shape.pick(["EVENT", "AGENT", "RESOURCE", "NAMESPACE", "NAME"].map(str::to_owned));
        fixed.into_iter().chain(self.columns.iter().map(|column| column.name.to_uppercase())).collect()
    }

    /// Returns the cells of a row that are shown.
    fn cells(&self, row: &ViewRow, shape: &Shape, event: Option<&str>) -> Vec<String> {
        let agent = self.agents.get(&row.agent_id).filter(|name| !name.is_empty());
        let fixed = shape.pick([
            event.unwrap_or_default().to_owned(),
            agent.cloned().unwrap_or_else(|| row.agent_id.to_string()),
            row.resource.clone(),
            row.namespace.clone(),
            row.name.clone(),
        ]);
        let cell = |(at, column): (usize, &ViewColumn)| match column.r#type.as_str() {
            AGE => age(row.time),
            _ => row.cells.get(at).cloned().unwrap_or_default(),
        };
        fixed.into_iter().chain(self.columns.iter().enumerate().map(cell)).collect()
    }

    fn json<'a>(&self, row: &'a ViewRow) -> RowJson<'a> {
        let cell = |(at, column): (usize, &ViewColumn)| {
            let value = row.cells.get(at).map_or("", String::as_str);
            (column.r#type != AGE).then(|| (column.name.clone(), Value::from(value)))
        };
        RowJson {
            agent_id: row.agent_id,
            agent: self.agents.get(&row.agent_id).cloned().unwrap_or_default(),
            resource: &row.resource,
            namespace: &row.namespace,
            name: &row.name,
            uid: &row.uid,
            time: row.time,
            owner: &row.owner,
            cells: self.columns.iter().enumerate().filter_map(cell).collect(),
        }
    }

    /// Returns the lines of an event.
    fn lines<'a>(&self, event: &'a Event) -> Vec<EventJson<'a>> {
        match event {
            Event::Columns(columns) => {
                vec![EventJson::Columns { columns: columns.columns.iter().map(ColumnJson::from).collect() }]
            }
            Event::Upserted(rows) => {
                rows.rows.iter().map(|row| EventJson::Upserted { row: self.json(row) }).collect()
            }
            Event::Removed(keys) => {
                let key = |key: &'a ViewKey| KeyJson {
                    agent_id: key.agent_id,
                    resource: &key.resource,
                    namespace: &key.namespace,
                    name: &key.name,
                };
                keys.keys.iter().map(|one| EventJson::Removed { row: key(one) }).collect()
            }
            Event::Reset(_) => vec![EventJson::Reset],
            Event::Agent(agent) => vec![EventJson::Agent {
                id: agent.id,
                name: &agent.name,
                state: &agent.state,
                reason: &agent.reason,
            }],
            Event::Synced(synced) => vec![EventJson::Synced {
                unanswered: synced.unanswered.iter().map(AgentJson::from).collect(),
                truncated: synced.truncated,
            }],
        }
    }
}

fn key_of(row: &ViewRow) -> Key {
    (row.agent_id, row.resource.clone(), row.namespace.clone(), row.name.clone())
}

fn key_of_removed(key: &ViewKey) -> Key {
    (key.agent_id, key.resource.clone(), key.namespace.clone(), key.name.clone())
}

/// Returns the age of an object of this time.
fn age(time: i64) -> String {
    match u64::try_from(time) {
        Ok(0) | Err(_) => String::new(),
        Ok(time) => humane(clock::wall().saturating_sub(Duration::from_secs(time))),
    }
}

/// Which of the first columns are shown.
struct Shape {
    resource: bool,
    namespace: bool,
    event: bool,
}

impl Shape {
    /// Leaves out what says nothing.
    fn of(seen: &Seen, event: bool) -> Self {
        let mut resources = seen.rows.keys().map(|(_, resource, ..)| resource);
        let first = resources.next();
        Self {
            resource: resources.any(|resource| Some(resource) != first),
            namespace: seen.rows.keys().any(|(_, _, namespace, _)| !namespace.is_empty()),
            event,
        }
    }

    fn pick(&self, cells: [String; 5]) -> Vec<String> {
        let shown = [self.event, true, self.resource, self.namespace, true];
        cells.into_iter().zip(shown).filter_map(|(cell, shown)| shown.then_some(cell)).collect()
    }
}

/// Aligned columns, whose widths only grow.
#[derive(Default)]
struct Lines {
    widths: Vec<usize>,
}

impl Lines {
    /// Widens the columns for these rows, and returns the rows as lines.
    fn rows<'a>(&mut self, rows: impl IntoIterator<Item = &'a Vec<String>>) -> String {
        let visible = |cell: &String| if cell.is_empty() { "-".to_owned() } else { printable(cell) };
        let rows: Vec<Vec<String>> = rows.into_iter().map(|row| row.iter().map(visible).collect()).collect();
        for row in &rows {
            self.widths.resize(self.widths.len().max(row.len()), 0);
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in &rows {
            let mut line = String::new();
            for (width, cell) in self.widths.iter().zip(row) {
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count()) + 3));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct ListJson<'a> {
    columns: Vec<ColumnJson<'a>>,
    rows: Vec<RowJson<'a>>,
    unanswered: Vec<AgentJson<'a>>,
    replicas: Vec<UnansweredJson<'a>>,
    truncated: bool,
}

#[derive(Serialize)]
struct ColumnJson<'a> {
    name: &'a str,
    r#type: &'a str,
}

impl<'a> From<&'a ViewColumn> for ColumnJson<'a> {
    fn from(column: &'a ViewColumn) -> Self {
        Self { name: &column.name, r#type: &column.r#type }
    }
}

#[derive(Serialize)]
struct RowJson<'a> {
    agent_id: i64,
    agent: String,
    resource: &'a str,
    namespace: &'a str,
    name: &'a str,
    uid: &'a str,
    /// Seconds since 1970: when it was created or, of events, seen last.
    time: i64,
    /// What controls the object, such as `StatefulSet/db`.
    owner: &'a str,
    /// By the titles of the columns, without ages.
    cells: Map<String, Value>,
}

#[derive(Serialize)]
struct KeyJson<'a> {
    agent_id: i64,
    resource: &'a str,
    namespace: &'a str,
    name: &'a str,
}

#[derive(Serialize)]
struct AgentJson<'a> {
    id: i64,
    name: &'a str,
    reason: &'a str,
}

impl<'a> From<&'a UnansweredAgent> for AgentJson<'a> {
    fn from(agent: &'a UnansweredAgent) -> Self {
        Self { id: agent.id, name: &agent.name, reason: &agent.reason }
    }
}

/// One line of `--watch -o json`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum EventJson<'a> {
    Columns { columns: Vec<ColumnJson<'a>> },
    Upserted { row: RowJson<'a> },
    Removed { row: KeyJson<'a> },
    Reset,
    Agent { id: i64, name: &'a str, state: &'a str, reason: &'a str },
    Synced { unanswered: Vec<AgentJson<'a>>, truncated: bool },
}

#[cfg(test)]
mod tests {
    use proto::kas::api::v1::{ViewColumns, ViewKeys, ViewRows};

    use super::*;

    fn seen() -> Seen {
        let mut seen = Seen::default();
        let column = |name: &str, kind: &str| ViewColumn { name: name.to_owned(), r#type: kind.to_owned() };
        seen.take(&Event::Columns(ViewColumns {
            columns: vec![column("Ready", "string"), column("Age", AGE)],
        }));
        seen.take(&Event::Agent(ViewAgent { id: 7, name: "prod".to_owned(), ..ViewAgent::default() }));
        let row = |name: &str, ready: &str| ViewRow {
            agent_id: 7,
            resource: "pods".to_owned(),
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            cells: vec![ready.to_owned()],
            ..ViewRow::default()
        };
        seen.take(&Event::Upserted(ViewRows { rows: vec![row("b", "1/1"), row("a", "0/1\u{1b}")] }));
        seen
    }

    #[test]
    fn rows_are_printed_with_the_columns_of_the_view() {
        let seen = seen();
        let shape = Shape::of(&seen, false);
        let mut table = Lines::default();
        let rows: Vec<Vec<String>> = seen.rows.values().map(|row| seen.cells(row, &shape, None)).collect();
        let titles = seen.titles(&shape);
        assert_eq!(
            table.rows(std::iter::once(&titles).chain(&rows)),
            "AGENT   NAMESPACE   NAME   READY       AGE\n\
             prod    shop        a      0/1\\u{1b}   -\n\
             prod    shop        b      1/1         -\n"
        );
    }

    #[test]
    fn removed_rows_are_gone_and_a_reset_removes_all() {
        let mut seen = seen();
        let key = ViewKey {
            agent_id: 7,
            resource: "pods".to_owned(),
            namespace: "shop".to_owned(),
            name: "a".to_owned(),
        };
        seen.take(&Event::Removed(ViewKeys { keys: vec![key] }));
        assert_eq!(seen.rows.len(), 1);
        seen.take(&Event::Reset(Default::default()));
        assert!(seen.rows.is_empty());
    }

    #[test]
    fn ages_are_left_out_of_json() {
        let seen = seen();
        let row = seen.rows.values().next_back().unwrap();
        assert_eq!(
            serde_json::to_value(seen.json(row)).unwrap(),
            serde_json::json!({"agent_id": 7, "agent": "prod", "resource": "pods", "namespace": "shop", "name": "b",
                "uid": "", "time": 0, "owner": "", "cells": {"Ready": "1/1"}})
        );
    }
}
