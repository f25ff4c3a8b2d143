//! Asks other replicas for their connections and for reports.

use std::{sync::Arc, time::Duration};

use cluster::{
    Abandoned, AgentMeta, AgentView, Connection, Load, PeerReport, Query, RefusedCaller, Replica, Unanswered,
    Wire,
};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use grpc::MessageReader;
use ids::{AgentId, ConnectionId, ReplicaId};
use process::error::chain;
use prost::Message as _;
use proto::kas::internal::v1::{
    self as wire, ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    connections_request,
};

use routing::peer::{Peers, link::RecvBody};

const CONNECTIONS: &str = "/kas.internal.v1.Replica/Connections";
const EXPLAIN: &str = "/kas.internal.v1.Replica/Explain";
/// How long a replica may take for its part of a list.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The same for a suspect replica.
const TIMEOUT_SUSPECT: Duration = Duration::from_millis(500);
const MAX_MESSAGE: usize = 4 << 20;

/// Returns how long a replica may take for an answer.
pub(super) fn timeout(suspect: bool) -> Duration {
    if suspect { TIMEOUT_SUSPECT } else { TIMEOUT }
}

fn from_proto(connection: wire::Connection) -> Option<Connection> {
    let at = connection.connected_at.unwrap_or_default();
    Some(Connection {
        agent: AgentId::new(connection.agent_id).ok()?,
        name: connection.name.into(),
        project_id: connection.project_id,
        id: ConnectionId::new(connection.connection_id).ok()?,
        meta: AgentMeta {
            version: connection.version,
            commit: connection.commit,
            pod_namespace: connection.pod_namespace,
            pod_name: connection.pod_name,
        },
        connected_at: Duration::new(
            u64::try_from(at.seconds).unwrap_or(0),
            u32::try_from(at.nanos).unwrap_or(0).min(999_999_999),
        ),
    })
}

/// Asks a replica for its own connections.
///
/// # Errors
/// Why there is no answer, for a person.
pub(super) async fn connections(
    peers: &Arc<Peers>,
    replica: &Replica,
    query: Query,
) -> Result<Vec<Connection>, String> {
    let request = ConnectionsRequest {
        query: match query {
            Query::All => None,
            Query::Agent(agent) => Some(connections_request::Query::AgentId(agent.get())),
            Query::Project(project) => Some(connections_request::Query::ProjectId(project)),
        },
    };
    let mut reader = call(peers, replica, CONNECTIONS, grpc::encode(&request)).await?;
    let mut connections = Vec::new();
    while let Some(message) = reader.next().await.map_err(|error| chain(&error))? {
        let page = ConnectionsResponse::decode(message).map_err(|error| error.to_string())?;
        connections.extend(page.connections.into_iter().filter_map(from_proto));
    }
    check_status(&reader)?;
    Ok(connections)
}

/// Asks replicas, each with a timeout, for reports on themselves and on an agent.
pub(super) async fn peer_reports(
    peers: &Arc<Peers>,
    replicas: Vec<(Replica, Duration)>,
    agent: Option<AgentId>,
) -> (Vec<PeerReport>, Vec<Unanswered>) {
    let mut asking: FuturesUnordered<_> = replicas
        .into_iter()
        .map(|(replica, within)| async move {
            let answer = tokio::time::timeout(within, peer_report(peers, &replica, agent)).await;
            (replica, answer.unwrap_or_else(|_| Err(format!("no answer within {within:?}"))))
        })
        .collect();
    let (mut reports, mut unanswered) = (Vec::new(), Vec::new());
    while let Some((replica, answer)) = asking.next().await {
        match answer {
            Ok(report) => reports.push(report),
            Err(reason) => unanswered.push(Unanswered { replica, reason, given_up: false }),
        }
    }
    reports.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
    unanswered.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
    (reports, unanswered)
}

async fn peer_report(
    peers: &Arc<Peers>,
    replica: &Replica,
    agent: Option<AgentId>,
) -> Result<PeerReport, String> {
    let request = ExplainRequest { agent_id: agent.map_or(0, AgentId::get) };
    let mut reader = call(peers, replica, EXPLAIN, grpc::encode(&request)).await?;
    let Some(message) = reader.next().await.map_err(|error| chain(&error))? else {
        check_status(&reader)?;
        return Err("the answer is empty".to_owned());
    };
    let answer = ExplainResponse::decode(message).map_err(|error| error.to_string())?;
    let view = |belief: wire::Belief| AgentView {
        // The address that the other replica knows does not matter here.
        replica: Replica { id: ReplicaId::new(&belief.replica), address: Arc::default() },
        holds: belief.holds,
        why: belief.why,
        wire: if belief.gitlab { Wire::Gitlab } else { Wire::Own },
    };
    Ok(PeerReport {
        replica: replica.clone(),
        tunnels: answer.tunnels,
        load: answer.requests_ended.map(|ended| Load {
            ended,
            open: answer.requests_open.unwrap_or(0),
            waiting: answer.requests_waiting.unwrap_or(0),
        }),
        idle: answer.idle,
        busy: answer.busy,
        abandoned: (answer.abandoned > 0).then(|| Abandoned {
            tunnels: answer.abandoned,
            since: Duration::from_millis(answer.abandoned_for_ms),
        }),
        transports: answer.transports,
        waiting: answer.waiting,
        views: answer.beliefs.into_iter().map(view).collect(),
        refused_callers: answer.refused_callers.into_iter().map(refused_caller).collect(),
    })
}

fn refused_caller(refused: wire::RefusedCaller) -> RefusedCaller {
    let wire::RefusedCaller { source, caller, rule, why, request_id, age_ms } = refused;
    RefusedCaller { source, caller, rule, why, request: request_id, age: Duration::from_millis(age_ms) }
}

async fn call(
    peers: &Arc<Peers>,
    replica: &Replica,
    path: &str,
    message: bytes::Bytes,
) -> Result<MessageReader<RecvBody>, String> {
    let answer = peers.peer(replica).call(path, message).await.map_err(|error| chain(&error))?;
    match grpc::Status::from_headers(answer.headers()) {
        Some(status) if status.code() != grpc::Code::Ok => Err(status.to_string()),
        _ => Ok(MessageReader::new(answer.into_body(), MAX_MESSAGE)),
    }
}

/// Returns an error unless the answer is complete and its status is `OK`.
fn check_status(reader: &MessageReader<RecvBody>) -> Result<(), String> {
    match reader.trailers().and_then(grpc::Status::from_headers) {
        Some(status) if status.code() == grpc::Code::Ok => Ok(()),
        Some(status) => Err(status.to_string()),
        None => Err("the answer is incomplete".to_owned()),
    }
}
