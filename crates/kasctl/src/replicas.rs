//! `kasctl replicas`: the replicas of kas, as the one that is asked knows them.

use std::time::Duration;

use proto::kas::api::v1::{KasInstanceInfo, ListReplicasRequest, ListReplicasResponse};
use serde::Serialize;

use crate::{
    agents::{AddressJson, UnansweredJson, address, warn},
    api::{Client, UNARY_TIMEOUT},
    cli::Format,
    duration::humane,
    explain::Asked,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const TITLES: [&str; 10] =
    ["NAME", "ADDRESS", "STATE", "STANDING", "AGENTS", "TUNNELS", "TABLE", "HEARD", "VERSION", "GENERATION"];

/// Lists the replicas, and above them what is wrong.
///
/// # Errors
/// When the list cannot be had or written. One without what some replica says of itself is [`Exit::Partial`].
pub(crate) async fn run(client: Client, mut output: Output, format: Format) -> Result<Exit, Failure> {
    let call = client.call(Asked::Kas, Some(UNARY_TIMEOUT));
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
    warn(&answer.unanswered, "its row is what others know of it");
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

/// Returns whether a replica did not tell about itself.
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

/// Returns what it says of itself; of one that says nothing now, what it said last, as a question.
fn state(replica: &KasInstanceInfo, is_silent: bool) -> String {
    let over = replica.state.is_empty() || replica.state == "left";
    if is_silent && !over { format!("{}?", replica.state) } else { replica.state.clone() }
}

/// Returns the version of its table, and whether all of it is here; nothing when none has come.
fn table(replica: &KasInstanceInfo) -> String {
    match (replica.table_synced, replica.table_version) {
        (true, version) => format!("synced:{version}"),
        (false, 0) => String::new(),
        (false, version) => format!("behind:{version}"),
    }
}

/// Returns how long ago it was heard; below a second it counts by what.
fn heard(millis: u64) -> String {
    if millis < 1000 { format!("{millis}ms") } else { humane(Duration::from_millis(millis)) }
}

/// One document: what `-o json` prints. Field names are a promise to scripts.
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
    /// Null: it did not tell.
    tunnels: Option<u64>,
    table: TableJson,
    /// Null: the replica that was asked.
    heard_ms: Option<u64>,
    version: &'a str,
    commit: &'a str,
    /// Text: it has 64 bits, and many readers of JSON keep only 53.
    generation: String,
}

#[derive(Serialize)]
struct TableJson {
    synced: bool,
    version: u64,
    /// Text, for the same reason.
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
    fn table_says_whether_it_is_whole() {
        let of = |table_synced, table_version| {
            table(&KasInstanceInfo { table_synced, table_version, ..Default::default() })
        };
        assert_eq!(of(true, 0), "synced:0", "an empty table is known, too");
        assert_eq!(of(true, 9), "synced:9");
        assert_eq!(of(false, 9), "behind:9");
        assert_eq!(of(false, 0), "");
    }

    #[test]
    fn what_a_replica_said_before_it_fell_silent_is_a_question() {
        let of = |state: &str, is_silent| state_of(state, is_silent);
        assert_eq!(of("ready", false), "ready");
        assert_eq!(of("ready", true), "ready?");
        assert_eq!(of("left", true), "left", "nothing is to come after that");
        assert_eq!(of("", true), "");
        let gone = KasInstanceInfo { standing: "gone".to_owned(), ..Default::default() };
        assert!(is_silent(&ListReplicasResponse::default(), &gone));
    }

    fn state_of(text: &str, is_silent: bool) -> String {
        state(&KasInstanceInfo { state: text.to_owned(), ..Default::default() }, is_silent)
    }

    #[test]
    fn heard_keeps_milliseconds_while_they_matter() {
        assert_eq!(heard(0), "0ms");
        assert_eq!(heard(999), "999ms");
        assert_eq!(heard(61_500), "1m1s");
        heard(u64::MAX);
    }
}
