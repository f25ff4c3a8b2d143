//! `kasctl replicas`: lists the replicas of kas, as seen by the replica that answers.

use std::time::Duration;

use proto::kas::api::v1::{KasInstanceInfo, ListReplicasRequest, ListReplicasResponse};
use serde::Serialize;

use crate::{
    agents::{AddressJson, UnansweredJson, address, warn},
    api::{Client, UNARY_TIMEOUT},
    cli::Format,
    duration::humane,
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const TITLES: [&str; 10] =
    ["NAME", "ADDRESS", "STATE", "STANDING", "AGENTS", "TUNNELS", "TABLE", "HEARD", "VERSION", "GENERATION"];

/// Prints alarms, then the list of replicas.
///
/// # Errors
/// The list cannot be read or written. If a replica did not answer, the result is [`Exit::Partial`].
pub(crate) async fn run(client: Client, mut output: Output, format: Format) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let request = client.request(&call, ListReplicasRequest {})?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().list_replicas(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    for alarm in &answer.alarms {
        note(format_args!("alarm: {}", printable(alarm)));
    }
    warn(&answer.unanswered, "its row is what other replicas know about it");
    match format {
        Format::Json => output.json_document(&ListJson::from(&answer)).await?,
        Format::Table => {
            let mut rows = vec![TITLES.map(str::to_owned)];
            rows.extend(answer.replicas.iter().map(|replica| cells(replica, is_silent(&answer, replica))));
            output.write(Table::new(TITLES).rows(&rows).as_bytes()).await?;
        }
    }
    Ok(if answer.unanswered.is_empty() { Exit::Ok } else { Exit::Partial })
}

/// Returns whether a replica did not answer.
fn is_silent(answer: &ListReplicasResponse, replica: &KasInstanceInfo) -> bool {
    ["unreachable", "gone"].contains(&replica.standing.as_str())
        || replica.address.is_some()
            && answer.unanswered.iter().any(|silent| silent.address == replica.address)
}

fn cells(replica: &KasInstanceInfo, is_silent: bool) -> [String; 10] {
    let known = |number: u64| if number == 0 { String::new() } else { number.to_string() };
    [
        replica.name.clone(),
        address(replica.address.as_ref()),
        state(replica, is_silent),
        replica.standing.clone(),
        replica.agents.to_string(),
        if is_silent { String::new() } else { replica.tunnels.to_string() },
        table(replica),
        replica.heard_ms.map(heard).unwrap_or_default(),
        replica.version.clone(),
        known(replica.generation),
    ]
}

/// Returns the state that the replica reports. If it does not answer, returns the last known state with a
/// question mark.
fn state(replica: &KasInstanceInfo, is_silent: bool) -> String {
    let over = replica.state.is_empty() || replica.state == "left";
    if is_silent && !over { format!("{}?", replica.state) } else { replica.state.clone() }
}

/// Returns the version of the copy of its table, and whether the copy is complete. Empty without a copy.
fn table(replica: &KasInstanceInfo) -> String {
    match (replica.table_synced, replica.table_version) {
        (true, version) => format!("synced:{version}"),
        (false, 0) => String::new(),
        (false, version) => format!("behind:{version}"),
    }
}

/// Returns the time since it was last heard from, in milliseconds below one second.
fn heard(millis: u64) -> String {
    if millis < 1000 { format!("{millis}ms") } else { humane(Duration::from_millis(millis)) }
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct ListJson<'a> {
    replicas: Vec<ReplicaJson<'a>>,
    unanswered: Vec<UnansweredJson<'a>>,
    alarms: &'a [String],
}

#[derive(Serialize)]
struct ReplicaJson<'a> {
    name: &'a str,
    address: Option<AddressJson<'a>>,
    state: &'a str,
    standing: &'a str,
    agents: u64,
    /// Null if it did not answer.
    tunnels: Option<u64>,
    table: TableJson,
    /// Null for the replica that answers.
    heard_ms: Option<u64>,
    version: &'a str,
    commit: &'a str,
    /// A string: it has 64 bits, and many JSON parsers keep only 53.
    generation: String,
}

#[derive(Serialize)]
struct TableJson {
    synced: bool,
    version: u64,
    /// A string, for the same reason.
    epoch: String,
}

impl<'a> From<&'a ListReplicasResponse> for ListJson<'a> {
    fn from(answer: &'a ListReplicasResponse) -> Self {
        let replica = |replica: &'a KasInstanceInfo| ReplicaJson {
            name: &replica.name,
            address: replica.address.as_ref().map(AddressJson::from),
            state: &replica.state,
            standing: &replica.standing,
            agents: replica.agents,
            tunnels: (!is_silent(answer, replica)).then_some(replica.tunnels),
            table: TableJson {
                synced: replica.table_synced,
                version: replica.table_version,
                epoch: replica.table_epoch.to_string(),
            },
            heard_ms: replica.heard_ms,
            version: &replica.version,
            commit: &replica.commit,
            generation: replica.generation.to_string(),
        };
        Self {
            replicas: answer.replicas.iter().map(replica).collect(),
            unanswered: answer.unanswered.iter().map(UnansweredJson::from).collect(),
            alarms: &answer.alarms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_column_shows_whether_the_copy_is_complete() {
        let of = |table_synced, table_version| {
            table(&KasInstanceInfo { table_synced, table_version, ..Default::default() })
        };
        assert_eq!(of(true, 0), "synced:0", "an empty table can be complete");
        assert_eq!(of(true, 9), "synced:9");
        assert_eq!(of(false, 9), "behind:9");
        assert_eq!(of(false, 0), "");
    }

    #[test]
    fn the_last_known_state_has_a_question_mark() {
        let of = |state: &str, is_silent| state_of(state, is_silent);
        assert_eq!(of("ready", false), "ready");
        assert_eq!(of("ready", true), "ready?");
        assert_eq!(of("left", true), "left", "this state is final");
        assert_eq!(of("", true), "");
        let gone = KasInstanceInfo { standing: "gone".to_owned(), ..Default::default() };
        assert!(is_silent(&ListReplicasResponse::default(), &gone));
    }

    fn state_of(text: &str, is_silent: bool) -> String {
        state(&KasInstanceInfo { state: text.to_owned(), ..Default::default() }, is_silent)
    }

    #[test]
    fn times_below_one_second_are_in_milliseconds() {
        assert_eq!(heard(0), "0ms");
        assert_eq!(heard(999), "999ms");
        assert_eq!(heard(61_500), "1m1s");
        heard(u64::MAX);
    }
}
