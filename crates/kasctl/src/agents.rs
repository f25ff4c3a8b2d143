//! `kasctl agents`: the connected agents, and their replicas.

use std::{collections::BTreeMap, time::Duration};

use process::clock;
use proto::kas::api::v1::{
    ConnectedAgentInfo, KasAddress, UnansweredReplica, WatchConnectedAgentsRequest,
    WatchConnectedAgentsResponse, watch_connected_agents_response::Event,
};
use serde::Serialize;
use tonic::Streaming;

use crate::{
    address::host_port,
    api::{Client, UNARY_TIMEOUT},
    cli::{AgentsArgs, Format},
    duration::humane,
    explain::{Call, CallKind},
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const TITLES: [&str; 8] = ["AGENT", "NAME", "PROJECT", "CONNECTION", "POD", "VERSION", "CONNECTED", "KAS"];
const WATCH_TITLES: [&str; 9] =
    ["EVENT", "AGENT", "NAME", "PROJECT", "CONNECTION", "POD", "VERSION", "CONNECTED", "KAS"];

/// The key of a row: the ids of an agent and of its connection.
type Key = (i64, i64);

/// Lists connections, and with `--watch` every change.
///
/// # Errors
/// The list cannot be read or written. If a replica did not answer, the result is [`Exit::Partial`].
pub(crate) async fn run(
    client: Client,
    mut output: Output,
    args: AgentsArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, (!args.watch).then_some(UNARY_TIMEOUT));
    let question = WatchConnectedAgentsRequest {
        project_id: args.project.unwrap_or_default(),
        agent_id: args.agent.map(ids::AgentId::get).unwrap_or_default(),
    };
    let request = client.request(&call, question)?;
    client
        .within(&call, async {
            let answer = client.kas().watch_connected_agents(request).await;
            let events = answer.map_err(|status| client.explain(&call, &status))?.into_inner();
            let mut events = Events { events, client: &client, call: &call };
            let (agents, unanswered) = events.snapshot().await?;
            warn(&unanswered, PARTIAL);
            if args.watch {
                watch(&mut output, format, agents, unanswered, events).await
            } else {
                list(&mut output, format, agents, &unanswered).await
            }
        })
        .await
}

/// Returns the connections of all agents. If a replica did not answer, a warning names it.
///
/// # Errors
/// The list cannot be read.
pub(crate) async fn connected(client: &Client) -> Result<Vec<ConnectedAgentInfo>, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let request = client.request(&call, WatchConnectedAgentsRequest { project_id: 0, agent_id: 0 })?;
    client
        .within(&call, async {
            let answer = client.kas().watch_connected_agents(request).await;
            let events = answer.map_err(|status| client.explain(&call, &status))?.into_inner();
            let (agents, unanswered) = Events { events, client, call: &call }.snapshot().await?;
            warn(&unanswered, PARTIAL);
            Ok(agents.into_values().collect())
        })
        .await
}

/// What the mark of an unconfirmed connection means.
const UNCONFIRMED: &str = "a connection whose KAS ends with ? is unconfirmed: a replica of GitLab's kas announced it and \
                           gives no sign of life, so it may have ended up to 5 minutes ago";

/// The consequence for a list if a replica did not answer.
pub(crate) const PARTIAL: &str = "the list is partial";

/// Prints a warning for each replica that did not answer, with the consequence.
pub(crate) fn warn<'a>(unanswered: impl IntoIterator<Item = &'a UnansweredReplica>, consequence: &str) {
    for replica in unanswered {
        note(format_args!(
            "warning: kas at {} did not answer ({}): {consequence}",
            printable(&address(replica.address.as_ref())),
            printable(&replica.reason)
        ));
    }
}

/// The stream of changes. Its errors are explained.
struct Events<'a> {
    events: Streaming<WatchConnectedAgentsResponse>,
    client: &'a Client,
    call: &'a Call,
}

impl Events<'_> {
    /// Returns the next event. Events that this version does not know are skipped.
    async fn next(&mut self) -> Result<Event, Failure> {
        loop {
            let message = self.events.message().await;
            match message.map_err(|status| self.client.explain(self.call, &status))? {
                Some(WatchConnectedAgentsResponse { event: Some(event) }) => return Ok(event),
                Some(WatchConnectedAgentsResponse { event: None }) => {}
                None => {
                    return Err(self
                        .call
                        .explain_broken("it ended the watch, which a replica does when it shuts down"));
                }
            }
        }
    }

    async fn snapshot(
        &mut self,
    ) -> Result<(BTreeMap<Key, ConnectedAgentInfo>, Vec<UnansweredReplica>), Failure> {
        let mut agents = BTreeMap::new();
        loop {
            match self.next().await? {
                Event::Connected(agent) => {
                    agents.insert((agent.id, agent.connection_id), agent);
                }
                Event::Disconnected(gone) => {
                    agents.remove(&(gone.id, gone.connection_id));
                }
                Event::SnapshotComplete(complete) => return Ok((agents, complete.unanswered)),
            }
        }
    }
}

async fn list(
    output: &mut Output,
    format: Format,
    agents: BTreeMap<Key, ConnectedAgentInfo>,
    unanswered: &[UnansweredReplica],
) -> Result<Exit, Failure> {
    match format {
        Format::Json => {
            let document = ListJson {
                agents: agents.values().map(AgentJson::from).collect(),
                unanswered: unanswered.iter().map(UnansweredJson::from).collect(),
            };
            output.json_document(&document).await?;
        }
        Format::Table => {
            let now = clock::wall();
            let mut rows = vec![TITLES.map(str::to_owned)];
            rows.extend(agents.values().map(|agent| cells(agent, now)));
            output.write(Table::new(TITLES).rows(&rows).as_bytes()).await?;
            if agents.is_empty() {
                note("no agent is connected");
            }
            if agents.values().any(|agent| agent.unconfirmed) {
                note(UNCONFIRMED);
            }
        }
    }
    Ok(if unanswered.is_empty() { Exit::Ok } else { Exit::Partial })
}

async fn watch(
    output: &mut Output,
    format: Format,
    mut agents: BTreeMap<Key, ConnectedAgentInfo>,
    mut unanswered: Vec<UnansweredReplica>,
    mut events: Events<'_>,
) -> Result<Exit, Failure> {
    let mut table = Table::new(WATCH_TITLES);
    let mut is_explained = agents.values().any(|agent| agent.unconfirmed);
    match format {
        Format::Table => {
            let now = clock::wall();
            let mut rows = vec![WATCH_TITLES.map(str::to_owned)];
            rows.extend(agents.values().map(|agent| event_cells("present", agent, now)));
            output.write(table.rows(&rows).as_bytes()).await?;
            if is_explained {
                note(UNCONFIRMED);
            }
        }
        Format::Json => {
            for agent in agents.values() {
                output.json_line(&EventJson::Connected { agent: agent.into() }).await?;
            }
            output.json_line(&EventJson::complete(&unanswered)).await?;
        }
    }
    loop {
        let (name, agent) = match events.next().await? {
            Event::Connected(agent) => {
                let before = agents.insert((agent.id, agent.connection_id), agent.clone());
                let name = match before {
                    None => "connected",
                    // The same connection, moved to another replica or reported again.
                    Some(before) if before.kas_address != agent.kas_address => "moved",
                    Some(_) => "present",
                };
                (name, agent)
            }
            Event::Disconnected(gone) => {
                let known = agents.remove(&(gone.id, gone.connection_id));
                let bare = || ConnectedAgentInfo {
                    id: gone.id,
                    connection_id: gone.connection_id,
                    ..Default::default()
                };
                ("disconnected", known.unwrap_or_else(bare))
            }
            // Sent again after a replica stopped answering or answers again.
            Event::SnapshotComplete(complete) => {
                if changed(&mut unanswered, complete.unanswered) && format == Format::Json {
                    output.json_line(&EventJson::complete(&unanswered)).await?;
                }
                continue;
            }
        };
        match format {
            Format::Table => {
                let row = event_cells(name, &agent, clock::wall());
                output.write(table.rows([&row]).as_bytes()).await?;
                if agent.unconfirmed && !std::mem::replace(&mut is_explained, true) {
                    note(UNCONFIRMED);
                }
            }
            Format::Json => {
                let agent = AgentJson::from(&agent);
                let event = if name == "disconnected" {
                    EventJson::Disconnected { agent }
                } else {
                    EventJson::Connected { agent }
                };
                output.json_line(&event).await?;
            }
        }
    }
}

/// Stores the replicas that do not answer, and prints the differences. Returns whether there are any.
fn changed(known: &mut Vec<UnansweredReplica>, now: Vec<UnansweredReplica>) -> bool {
    let before = std::mem::replace(known, now);
    let has = |list: &[UnansweredReplica], replica: &UnansweredReplica| {
        list.iter().any(|other| other.address == replica.address)
    };
    warn(known.iter().filter(|replica| !has(&before, replica)), PARTIAL);
    for replica in before.iter().filter(|replica| !has(known, replica)) {
        note(format_args!("kas at {} answers again", printable(&address(replica.address.as_ref()))));
    }
    before != *known
}

fn cells(agent: &ConnectedAgentInfo, now: Duration) -> [String; 8] {
    let known = |number: i64| if number == 0 { String::new() } else { number.to_string() };
    [
        agent.id.to_string(),
        agent.name.clone(),
        known(agent.project_id),
        known(agent.connection_id),
        pod(agent),
        agent.version.clone(),
        age(agent, now).map(humane).unwrap_or_default(),
        replica(agent),
    ]
}

/// Returns the replica of a connection, with a mark if the connection is unconfirmed.
fn replica(agent: &ConnectedAgentInfo) -> String {
    let mut replica = address(agent.kas_address.as_ref());
    if agent.unconfirmed {
        replica.push('?');
    }
    replica
}

fn event_cells(event: &str, agent: &ConnectedAgentInfo, now: Duration) -> [String; 9] {
    let [id, name, project, connection, pod, version, connected, kas] = cells(agent, now);
    [event.to_owned(), id, name, project, connection, pod, version, connected, kas]
}

fn pod(agent: &ConnectedAgentInfo) -> String {
    if agent.pod_namespace.is_empty() {
        agent.pod_name.clone()
    } else {
        format!("{}/{}", agent.pod_namespace, agent.pod_name)
    }
}

/// Returns the time since it connected, or 0 if its clock is ahead of this one.
fn age(agent: &ConnectedAgentInfo, now: Duration) -> Option<Duration> {
    let at = agent.connected_at.as_ref()?;
    let at = Duration::from_secs(at.seconds.try_into().ok()?);
    Some(now.saturating_sub(at))
}

/// Returns the address of a replica. Without a port, it is a name that kas could not parse.
pub(crate) fn address(address: Option<&KasAddress>) -> String {
    match address {
        None => String::new(),
        Some(KasAddress { ip, port: 0 }) => ip.clone(),
        Some(KasAddress { ip, port }) => host_port(ip, port),
    }
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct ListJson<'a> {
    agents: Vec<AgentJson<'a>>,
    unanswered: Vec<UnansweredJson<'a>>,
}

/// One line of `--watch -o json`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum EventJson<'a> {
    Connected { agent: AgentJson<'a> },
    Disconnected { agent: AgentJson<'a> },
    SnapshotComplete { unanswered: Vec<UnansweredJson<'a>> },
}

impl<'a> EventJson<'a> {
    fn complete(unanswered: &'a [UnansweredReplica]) -> Self {
        Self::SnapshotComplete { unanswered: unanswered.iter().map(UnansweredJson::from).collect() }
    }
}

#[derive(Serialize)]
struct AgentJson<'a> {
    id: i64,
    name: &'a str,
    project_id: i64,
    /// A string: it has 63 bits, and many JSON parsers keep only 53.
    connection_id: String,
    version: &'a str,
    commit: &'a str,
    pod_namespace: &'a str,
    pod_name: &'a str,
    /// RFC 3339 in UTC.
    connected_at: Option<String>,
    kas_address: Option<AddressJson<'a>>,
    /// Nothing shows that the replica is alive.
    unconfirmed: bool,
}

/// The address of a replica.
#[derive(Serialize)]
pub(crate) struct AddressJson<'a> {
    ip: &'a str,
    port: u32,
}

/// A replica that did not answer.
#[derive(Serialize)]
pub(crate) struct UnansweredJson<'a> {
    address: Option<AddressJson<'a>>,
    reason: &'a str,
}

impl<'a> From<&'a ConnectedAgentInfo> for AgentJson<'a> {
    fn from(agent: &'a ConnectedAgentInfo) -> Self {
        Self {
            id: agent.id,
            name: &agent.name,
            project_id: agent.project_id,
            connection_id: agent.connection_id.to_string(),
            version: &agent.version,
            commit: &agent.commit,
            pod_namespace: &agent.pod_namespace,
            pod_name: &agent.pod_name,
            connected_at: agent.connected_at.as_ref().map(ToString::to_string),
            kas_address: agent.kas_address.as_ref().map(AddressJson::from),
            unconfirmed: agent.unconfirmed,
        }
    }
}

impl<'a> From<&'a KasAddress> for AddressJson<'a> {
    fn from(address: &'a KasAddress) -> Self {
        Self { ip: &address.ip, port: address.port }
    }
}

impl<'a> From<&'a UnansweredReplica> for UnansweredJson<'a> {
    fn from(replica: &'a UnansweredReplica) -> Self {
        Self { address: replica.address.as_ref().map(AddressJson::from), reason: &replica.reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> ConnectedAgentInfo {
        ConnectedAgentInfo {
            id: 7,
            connection_id: i64::MAX,
            version: "v14.1.0".to_owned(),
            pod_namespace: "gitlab".to_owned(),
            pod_name: "agentk-1".to_owned(),
            connected_at: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            kas_address: Some(KasAddress { ip: "fd00::1".to_owned(), port: 8155 }),
            project_id: 3,
            name: "prod".to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn row_shows_age_pod_and_replica() {
        assert_eq!(
            cells(&agent(), Duration::from_secs(1_700_000_090)),
            [
                "7",
                "prod",
                "3",
                "9223372036854775807",
                "gitlab/agentk-1",
                "v14.1.0",
                "1m30s",
                "[fd00::1]:8155"
            ]
        );
        assert_eq!(cells(&agent(), Duration::from_secs(5))[6], "0s", "this clock is behind that of kas");
        assert_eq!(cells(&ConnectedAgentInfo { id: 1, ..Default::default() }, Duration::ZERO)[6], "");
        let unconfirmed = ConnectedAgentInfo {
            kas_address: Some(KasAddress { ip: "gitlab-kas".to_owned(), port: 0 }),
            unconfirmed: true,
            ..agent()
        };
        assert_eq!(cells(&unconfirmed, Duration::ZERO)[7], "gitlab-kas?");
    }

    #[test]
    fn addresses_without_a_port_are_names() {
        let of = |ip: &str, port| address(Some(&KasAddress { ip: ip.to_owned(), port }));
        assert_eq!(of("10.0.0.1", 8155), "10.0.0.1:8155");
        assert_eq!(of("kas-0.kas:8155", 0), "kas-0.kas:8155", "kas does not split a name");
        assert_eq!(address(None), "");
    }

    #[test]
    fn a_replica_that_stops_or_resumes_answering_is_a_change() {
        let silent = |ip: &str| UnansweredReplica {
            address: Some(KasAddress { ip: ip.to_owned(), port: 1 }),
            reason: "gone".to_owned(),
        };
        let mut known = vec![silent("a")];
        assert!(!changed(&mut known, vec![silent("a")]));
        assert!(changed(&mut known, vec![silent("a"), silent("b")]));
        assert!(changed(&mut known, Vec::new()));
        assert!(!changed(&mut known, Vec::new()));
    }

    #[test]
    fn extreme_timestamps_are_accepted() {
        for seconds in [i64::MIN, -1, i64::MAX] {
            let connected_at = Some(prost_types::Timestamp { seconds, nanos: i32::MIN });
            let agent = ConnectedAgentInfo { connected_at, ..Default::default() };
            cells(&agent, Duration::from_secs(5));
            serde_json::to_string(&AgentJson::from(&agent)).unwrap();
        }
    }

    #[test]
    fn json_keeps_every_bit_of_a_connection_id() {
        let agent = agent();
        let json = serde_json::to_value(EventJson::Connected { agent: (&agent).into() }).unwrap();
        assert_eq!(json["event"], "connected");
        assert_eq!(json["agent"]["connection_id"], "9223372036854775807");
        assert_eq!(json["agent"]["connected_at"], "2023-11-14T22:13:20Z");
        assert_eq!(json["agent"]["kas_address"], serde_json::json!({"ip": "fd00::1", "port": 8155}));
    }
}
