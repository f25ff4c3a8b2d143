//! Methods that GitLab calls today and 14.1 did not have: the version of kas, the connections of a list of
//! agents, and push events.
//!
//! **The numbers of some fields are inferred**, and this is the only place that depends on them. Known from
//! GitLab's side (lib/gitlab/kas/client.rb) are the names of services, methods and fields; no definition of
//! the messages was at hand. The guesses follow the pattern of every message that is known, fields numbered
//! from 1 in the order in which they are named:
//!
//! | message | guessed |
//! | --- | --- |
//! | `server_info.rpc.GetServerInfoResponse` | `current_server_info` 1 |
//! | its message there | `version` 1, `git_ref` 2; its name is not on the wire |
//! | `agent_tracker.rpc.GetConnectedAgent(k)sByAgentIDsRequest` | `agent_ids` 1 |
//! | its response | `agents` 1, whose elements are known; their `warnings` are not sent |
//!
//! `notifications.rpc.GitPushEvent` is known from 16.5. A wrong guess shows as an empty answer in GitLab,
//! never as an error: unknown fields are skipped on both sides.

use std::collections::BTreeSet;

use cluster::{Located, Query, Tracker, TrackerError};
use futures_util::future::try_join_all;
use ids::AgentId;
use proto::gitlab::agent::{
    agent_tracker,
    agent_tracker::rpc::{GetConnectedAgentksByAgentIDsResponse, GetConnectedAgentsByAgentIDsResponse},
    modshared,
    notifications::rpc::{GitPushEventRequest, GitPushEventResponse, notifications_server::Notifications},
    server_info::rpc::{
        CurrentServerInfo, GetServerInfoRequest, GetServerInfoResponse, server_info_server::ServerInfo,
    },
};

use super::{Api, connected, invalid};
use crate::pushes::Push;
use crate::timestamp::timestamp;

/// The most agents in one request. GitLab sends those of one page.
const MOST: usize = 10_000;
/// Up to this many agents are looked up one by one. For more, all connections are listed.
const ONE_BY_ONE: usize = 32;

/// Lists the connections of agents. Unknown ids are ignored.
async fn by_agent_ids(
    tracker: &dyn Tracker,
    ids: &[i64],
) -> Result<Vec<agent_tracker::ConnectedAgentInfo>, tonic::Status> {
    if ids.len() > MOST {
        return Err(invalid(format!("at most {MOST} agent_ids are accepted, got {}", ids.len())));
    }
    let ids: BTreeSet<AgentId> = ids.iter().filter_map(|id| AgentId::new(*id).ok()).collect();
    let failed = |error: TrackerError| {
        tracing::warn!(error = %error, "the tracker cannot be asked");
        tonic::Status::unavailable("GetConnectionsByAgentId() failed")
    };
    let located: Vec<Located> = if ids.len() <= ONE_BY_ONE {
        let asked = ids.iter().map(|id| connected(tracker, Query::Agent(*id)));
        let answers = try_join_all(asked).await.map_err(failed)?;
        answers.into_iter().flat_map(|answer| answer.connections).collect()
    } else {
        let mut all = connected(tracker, Query::All).await.map_err(failed)?.connections;
        all.retain(|located| ids.contains(&located.connection.agent));
        all
    };
    Ok(located.iter().map(info).collect())
}

/// Returns a connection in the format of GitLab's `AgentTracker`.
pub(super) fn info(located: &Located) -> agent_tracker::ConnectedAgentInfo {
    let connection = &located.connection;
    agent_tracker::ConnectedAgentInfo {
        agent_meta: Some(modshared::AgentMeta {
            version: connection.meta.version.clone(),
            commit_id: connection.meta.commit.clone(),
            pod_namespace: connection.meta.pod_namespace.clone(),
            pod_name: connection.meta.pod_name.clone(),
        }),
        connected_at: Some(timestamp(connection.connected_at)),
        connection_id: connection.id.get(),
        agent_id: connection.agent.get(),
        project_id: connection.project_id,
    }
}

impl Api {
    /// `GetConnectedAgentsByAgentIDs`.
    pub(super) async fn agents_by_ids(
        &self,
        ids: &[i64],
    ) -> Result<tonic::Response<GetConnectedAgentsByAgentIDsResponse>, tonic::Status> {
        let agents = by_agent_ids(&*self.tracker, ids).await?;
        Ok(tonic::Response::new(GetConnectedAgentsByAgentIDsResponse { agents }))
    }

    /// The same method under its newest name.
    pub(super) async fn agentks_by_ids(
        &self,
        ids: &[i64],
    ) -> Result<tonic::Response<GetConnectedAgentksByAgentIDsResponse>, tonic::Status> {
        let agents = by_agent_ids(&*self.tracker, ids).await?;
        Ok(tonic::Response::new(GetConnectedAgentksByAgentIDsResponse { agents }))
    }
}

#[tonic::async_trait]
impl ServerInfo for Api {
    async fn get_server_info(
        &self,
        _request: tonic::Request<GetServerInfoRequest>,
    ) -> Result<tonic::Response<GetServerInfoResponse>, tonic::Status> {
        let info = CurrentServerInfo {
            version: process::version::VERSION.to_owned(),
            git_ref: process::version::COMMIT.to_owned(),
        };
        Ok(tonic::Response::new(GetServerInfoResponse { current_server_info: Some(info) }))
    }
}

#[tonic::async_trait]
impl Notifications for Api {
    /// Checks the repository of the project, which may have a new commit, here and on the other replicas.
    async fn git_push_event(
        &self,
        request: tonic::Request<GitPushEventRequest>,
    ) -> Result<tonic::Response<GitPushEventResponse>, tonic::Status> {
        let required = |field: &str| invalid(format!("invalid {field}: value is required"));
        let event = request.into_inner().event.ok_or_else(|| required("GitPushEventRequest.Event"))?;
        let project = event.project.ok_or_else(|| required("GitPushEvent.Project"))?;
        if project.id <= 0 {
            return Err(invalid("invalid Project.Id: value must be greater than 0"));
        }
        if project.full_path.is_empty() {
            return Err(invalid("invalid Project.FullPath: value length must be at least 1 bytes"));
        }
        self.pushes.reported(Push { project: project.id, full_path: project.full_path.into() });
        Ok(tonic::Response::new(GitPushEventResponse {}))
    }
}
