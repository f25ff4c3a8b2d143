//! What this replica answers when others ask for its connections and for a report.

use cluster::{ClusterView, Connections as _, InMemoryTracker, Query, Wire};
use ids::AgentId;
use proto::kas::internal::v1::{
    Belief, Connection, ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    RefusedCaller, connections_request,
};
use tonic::Status;

use observe::refusals::Refusals;
use routing::registry::TunnelRegistry;

/// Connections in one message of a list.
const PAGE: usize = 500;

fn to_proto(connection: &cluster::Connection) -> Connection {
    Connection {
        agent_id: connection.agent.get(),
        connection_id: connection.id.get(),
        project_id: connection.project_id,
        name: connection.name.to_string(),
        version: connection.meta.version.clone(),
        commit: connection.meta.commit.clone(),
        pod_namespace: connection.meta.pod_namespace.clone(),
        pod_name: connection.meta.pod_name.clone(),
        connected_at: Some(prost_types::Timestamp {
            seconds: i64::try_from(connection.connected_at.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(connection.connected_at.subsec_nanos()).unwrap_or(0),
        }),
    }
}

/// Returns the connections of this replica only, `own`, in messages of bounded size.
pub(super) async fn pages(
    own: &InMemoryTracker,
    request: ConnectionsRequest,
) -> Result<Vec<Result<ConnectionsResponse, Status>>, Status> {
    let query = match request.query {
        None => Query::All,
        Some(connections_request::Query::AgentId(agent)) => {
            Query::Agent(AgentId::new(agent).map_err(|error| Status::invalid_argument(error.to_string()))?)
        }
        Some(connections_request::Query::ProjectId(project)) => Query::Project(project),
    };
    let own = own.connected(query).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let connections: Vec<Connection> =
        own.connections.iter().map(|located| to_proto(&located.connection)).collect();
    Ok(connections.chunks(PAGE).map(|page| Ok(ConnectionsResponse { connections: page.to_vec() })).collect())
}

/// Returns the report of this replica on itself and on an agent.
pub(super) fn explain(
    registry: &TunnelRegistry,
    refusals: &Refusals,
    view: &dyn ClusterView,
    request: ExplainRequest,
) -> ExplainResponse {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let metrics = registry.metrics();
    let load = metrics.load();
    let mut response = ExplainResponse {
        requests_ended: Some(load.ended),
        requests_open: Some(load.open),
        requests_waiting: Some(load.waiting),
        tunnels: u64::try_from(metrics.tunnels.get()).unwrap_or(0),
        version: process::version::VERSION.to_owned(),
        commit: process::version::COMMIT.to_owned(),
        ..ExplainResponse::default()
    };
    if let Ok(agent) = AgentId::new(request.agent_id) {
        let here = registry.occupancy(agent);
        (response.idle, response.busy, response.waiting) =
            (number(here.idle), number(here.busy), number(here.waiting));
        response.transports = number(here.transports);
        if let Some(abandoned) = here.abandoned {
            response.abandoned = abandoned.tunnels;
            response.abandoned_for_ms = u64::try_from(abandoned.since.as_millis()).unwrap_or(u64::MAX);
        }
        response.beliefs = view
            .views(agent)
            .into_iter()
            .map(|view| Belief {
                replica: view.replica.id.as_str().to_owned(),
                holds: view.holds,
                why: view.why,
                gitlab: view.wire == Wire::Gitlab,
            })
            .collect();
        response.refused_callers = refusals
            .callers()
            .of(agent)
            .into_iter()
            .map(|refused| RefusedCaller {
                age_ms: u64::try_from(refused.at.elapsed().as_millis()).unwrap_or(u64::MAX),
                source: refused.source.to_owned(),
                caller: refused.caller.map(Into::into).unwrap_or_default(),
                rule: refused.rule.to_owned(),
                why: refused.why,
                request_id: refused.request,
            })
            .collect();
    }
    response
}
