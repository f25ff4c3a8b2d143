//! Events of a view as JSON. The fields are those that `kasctl get -o json` prints.

use std::{collections::BTreeMap, fmt::Write as _};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::StatusCode;
use proto::kas::api::v1::{
    KasAddress, UnansweredReplica, ViewAgent, ViewColumn, ViewKey, ViewRow, ViewSynced,
    watch_view_response::Event,
};
use serde::{Serialize, Serializer};

/// The type of the column whose cells are made of the time of a row.
const AGE: &str = "age";

/// Prints events. Rows are told by the titles of the columns, and with the names of their agents.
#[derive(Debug, Default)]
pub(super) struct Printer {
    columns: Vec<ViewColumn>,
    /// As many as the selector means.
    agents: BTreeMap<i64, ViewAgent>,
    /// A row of the document was printed.
    has_rows: bool,
}

impl Printer {
    /// Prints an event as the next part of a document that begins with `{"rows":[`. Returns whether that was
    /// its end.
    pub(super) fn document(&mut self, event: &Event, into: &mut String) -> bool {
        match event {
            Event::Columns(columns) => self.columns.clone_from(&columns.columns),
            Event::Agent(agent) => {
                self.agents.insert(agent.id, agent.clone());
            }
            Event::Upserted(rows) => {
                for row in &rows.rows {
                    if std::mem::replace(&mut self.has_rows, true) {
                        into.push(',');
                    }
                    into.push_str(&text(&self.row(row)));
                }
            }
            // A question without changes has neither.
            Event::Removed(_) | Event::Reset(_) => {}
            Event::Synced(synced) => {
                let end = End {
                    columns: self.columns.iter().map(Column::from).collect(),
                    agents: self.agents.values().map(AgentState::from).collect(),
                    state: State::from(synced),
                };
                into.push_str("],");
                into.push_str(text(&end).trim_start_matches('{'));
                return true;
            }
        }
        false
    }

    /// Prints a server-sent event.
    pub(super) fn event(&mut self, event: &Event, into: &mut String) {
        match event {
            Event::Columns(columns) => {
                self.columns.clone_from(&columns.columns);
                let columns: Vec<Column<'_>> = columns.columns.iter().map(Column::from).collect();
                sse("columns", &text(&Columns { columns }), into);
            }
            Event::Agent(agent) => {
                self.agents.insert(agent.id, agent.clone());
                sse("agent", &text(&AgentState::from(agent)), into);
            }
            Event::Upserted(rows) => {
                let rows = rows.rows.iter().map(|row| self.row(row)).collect();
                sse("upserted", &text(&Rows { rows }), into);
            }
            Event::Removed(keys) => {
                let rows = keys.keys.iter().map(RowKey::from).collect();
                sse("removed", &text(&Rows { rows }), into);
            }
            Event::Reset(_) => sse("reset", "{}", into),
            Event::Synced(synced) => {
                // An empty one tells the browser that it cannot go on from here.
                into.push_str("id: ");
                BASE64_URL_SAFE_NO_PAD.encode_string(&synced.resume, into);
                into.push('\n');
                sse("synced", &text(&State::from(synced)), into);
            }
        }
    }

    fn row<'a>(&'a self, row: &'a ViewRow) -> Row<'a> {
        Row {
            agent_id: row.agent_id,
            agent: self.agents.get(&row.agent_id).map_or("", |agent| &agent.name),
            resource: &row.resource,
            namespace: &row.namespace,
            name: &row.name,
            uid: &row.uid,
            time: row.time,
            owner: &row.owner,
            cells: Cells { columns: &self.columns, cells: &row.cells },
        }
    }
}

/// Prints the last event of a stream that kas ends: the status that the same question has now, and why.
pub(super) fn ended(status: StatusCode, message: &str, into: &mut String) {
    sse("ended", &text(&Ended { code: status.as_u16(), message }), into);
}

/// Prints JSON, which has no line breaks, as an event.
fn sse(name: &str, data: &str, into: &mut String) {
    // A text can be written to.
    let _ = write!(into, "event: {name}\ndata: {data}\n\n");
}

/// None of these values can fail to be printed: their maps have texts as keys.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[derive(Serialize)]
struct Row<'a> {
    agent_id: i64,
    agent: &'a str,
    resource: &'a str,
    namespace: &'a str,
    name: &'a str,
    uid: &'a str,
    /// Seconds since 1970: when it was created or, of events, seen last.
    time: i64,
    /// What controls the object, such as `StatefulSet/db`.
    owner: &'a str,
    cells: Cells<'a>,
}

/// Cells by the titles of their columns, without ages.
struct Cells<'a> {
    columns: &'a [ViewColumn],
    cells: &'a [String],
}

impl Serialize for Cells<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let columns = self.columns.iter().enumerate().filter(|(_, column)| column.r#type != AGE);
        serializer.collect_map(
            columns.map(|(at, column)| (&column.name, self.cells.get(at).map_or("", String::as_str))),
        )
    }
}

#[derive(Serialize)]
struct RowKey<'a> {
    agent_id: i64,
    resource: &'a str,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> From<&'a ViewKey> for RowKey<'a> {
    fn from(key: &'a ViewKey) -> Self {
        let ViewKey { agent_id, resource, namespace, name } = key;
        Self { agent_id: *agent_id, resource, namespace, name }
    }
}

#[derive(Serialize)]
struct Rows<T> {
    rows: Vec<T>,
}

#[derive(Serialize)]
struct Columns<'a> {
    columns: Vec<Column<'a>>,
}

#[derive(Serialize)]
struct Column<'a> {
    name: &'a str,
    r#type: &'a str,
}

impl<'a> From<&'a ViewColumn> for Column<'a> {
    fn from(column: &'a ViewColumn) -> Self {
        Self { name: &column.name, r#type: &column.r#type }
    }
}

#[derive(Serialize)]
struct AgentState<'a> {
    id: i64,
    name: &'a str,
    state: &'a str,
    reason: &'a str,
}

impl<'a> From<&'a ViewAgent> for AgentState<'a> {
    fn from(agent: &'a ViewAgent) -> Self {
        Self { id: agent.id, name: &agent.name, state: &agent.state, reason: &agent.reason }
    }
}

#[derive(Serialize)]
struct State<'a> {
    unanswered: Vec<Unanswered<'a>>,
    replicas: Vec<Replica<'a>>,
    truncated: bool,
}

#[derive(Serialize)]
struct Unanswered<'a> {
    id: i64,
    name: &'a str,
    reason: &'a str,
}

#[derive(Serialize)]
struct Replica<'a> {
    address: Option<Address<'a>>,
    reason: &'a str,
}

#[derive(Serialize)]
struct Address<'a> {
    ip: &'a str,
    port: u32,
}

impl<'a> From<&'a UnansweredReplica> for Replica<'a> {
    fn from(replica: &'a UnansweredReplica) -> Self {
        let address = replica.address.as_ref().map(|KasAddress { ip, port }| Address { ip, port: *port });
        Self { address, reason: &replica.reason }
    }
}

impl<'a> From<&'a ViewSynced> for State<'a> {
    fn from(synced: &'a ViewSynced) -> Self {
        let of = |agent: &'a proto::kas::api::v1::UnansweredAgent| Unanswered {
            id: agent.id,
            name: &agent.name,
            reason: &agent.reason,
        };
        Self {
            unanswered: synced.unanswered.iter().map(of).collect(),
            replicas: synced.replicas.iter().map(Replica::from).collect(),
            truncated: synced.truncated,
        }
    }
}

/// What follows the rows of a document.
#[derive(Serialize)]
struct End<'a> {
    columns: Vec<Column<'a>>,
    agents: Vec<AgentState<'a>>,
    #[serde(flatten)]
    state: State<'a>,
}

#[derive(Serialize)]
struct Ended<'a> {
    code: u16,
    message: &'a str,
}

#[cfg(test)]
mod tests {
    use proto::kas::api::v1::{ViewColumns, ViewKeys, ViewReset, ViewRows};
    use serde_json::{Value, json};

    use super::*;

    fn events() -> Vec<Event> {
        let column = |name: &str, kind: &str| ViewColumn { name: name.into(), r#type: kind.into() };
        let row = |name: &str, cell: &str| ViewRow {
            agent_id: 7,
            resource: "pods".into(),
            namespace: "shop".into(),
            name: name.into(),
            time: 5,
            cells: vec![cell.into()],
            ..ViewRow::default()
        };
        vec![
            Event::Agent(ViewAgent {
                id: 7,
                name: "prod".into(),
                state: "live".into(),
                ..Default::default()
            }),
            Event::Columns(ViewColumns {
                columns: vec![column("Ready", "string"), column("Age", AGE), column("IP", "string")],
            }),
            Event::Upserted(ViewRows { rows: vec![row("a", "1/1\n\"")] }),
            Event::Upserted(ViewRows { rows: vec![row("b", "0/1")] }),
            Event::Synced(ViewSynced { resume: vec![1, 2].into(), ..ViewSynced::default() }),
        ]
    }

    #[test]
    fn a_document_has_rows_by_titles_and_then_what_is_known_of_them() {
        let (mut printer, mut printed) = (Printer::default(), "{\"rows\":[".to_owned());
        let ends: Vec<bool> = events().iter().map(|event| printer.document(event, &mut printed)).collect();
        assert_eq!(ends, [false, false, false, false, true]);
        let row = |name: &str, ready: &str| {
            json!({
                "agent_id": 7, "agent": "prod", "resource": "pods", "namespace": "shop", "name": name, "uid": "", "time": 5, "owner": "",
                "cells": {"Ready": ready, "IP": ""},
            })
        };
        let expected = json!({
            "rows": [row("a", "1/1\n\""), row("b", "0/1")],
            "columns": [
                {"name": "Ready", "type": "string"}, {"name": "Age", "type": "age"}, {"name": "IP", "type": "string"},
            ],
            "agents": [{"id": 7, "name": "prod", "state": "live", "reason": ""}],
            "unanswered": [], "replicas": [], "truncated": false,
        });
        assert_eq!(serde_json::from_str::<Value>(&printed).unwrap(), expected);
        let mut empty = "{\"rows\":[".to_owned();
        assert!(Printer::default().document(&events()[4], &mut empty));
        assert_eq!(serde_json::from_str::<Value>(&empty).unwrap()["rows"], json!([]));
    }

    #[test]
    fn each_event_is_one_of_the_stream_and_synced_has_the_place_to_go_on() {
        let (mut printer, mut printed) = (Printer::default(), String::new());
        let key =
            ViewKey { agent_id: 7, resource: "pods".into(), namespace: "shop".into(), name: "a".into() };
        let more = [Event::Removed(ViewKeys { keys: vec![key] }), Event::Reset(ViewReset {})];
        for event in events().iter().chain(&more) {
            printer.event(event, &mut printed);
        }
        ended(StatusCode::FORBIDDEN, "a\nb", &mut printed);
        let events: Vec<&str> = printed.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 8, "{printed}");
        assert_eq!(
            events[0],
            r#"event: agent
data: {"id":7,"name":"prod","state":"live","reason":""}"#
        );
        assert!(events[2].contains(r#""cells":{"Ready":"1/1\n\"","IP":""}"#), "{printed}");
        assert!(events[4].starts_with("id: AQI\nevent: synced\ndata: {\"unanswered\":[]"), "{printed}");
        assert!(events[5].starts_with("event: removed\ndata: {\"rows\":[{\"agent_id\":7"), "{printed}");
        assert_eq!(events[6], "event: reset\ndata: {}");
        assert_eq!(events[7], "event: ended\ndata: {\"code\":403,\"message\":\"a\\nb\"}");
    }
}
