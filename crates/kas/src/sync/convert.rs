//! Messages of the API and what they stand for.

use std::{sync::Arc, time::Duration};

use gitops::{Diff, decode::File};
use ids::Impersonation;
use planner::{AgentSync, ControlError, DiffOf, ProjectStatus};
use proto::{
    gitlab::agent::kubernetes_api::rpc::{ExtraKeyVal, ImpersonationConfig},
    kas::api::v1::{
        DiffChange, DiffRequest, DiffResponse, GetSyncResponse, ProjectSync, SyncedObject, diff_request::Of,
    },
};
use tokio::time::Instant;

use crate::timestamp::timestamp;

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn answer(replica: &str, sync: AgentSync) -> GetSyncResponse {
    let projects = sync.projects.into_iter().map(project).collect();
    GetSyncResponse { replica: replica.to_owned(), waits: sync.waits, projects }
}

fn project(status: ProjectStatus) -> ProjectSync {
    let counts = status.counts;
    let synced_objects = status.objects.into_iter().map(|(id, object)| {
        let (file, line) = object.file.map_or_else(Default::default, |(file, line)| (file.to_string(), line));
        SyncedObject {
            group: id.group.to_string(),
            kind: id.kind.to_string(),
            namespace: id.namespace.to_string(),
            name: id.name.to_string(),
            action: object.action.as_str().to_owned(),
            status: object.health.as_str().to_owned(),
            message: object.message.into_string(),
            file,
            line,
        }
    });
    ProjectSync {
        project: status.project.to_string(),
        id: status.id,
        wanted_commit: status.wanted.unwrap_or_default(),
        applied_commit: status.applied.unwrap_or_default(),
        phase: status.phase.to_owned(),
        message: status.message,
        since: Some(timestamp(status.since)),
        next_ms: status.next.map(|at| milliseconds(at.saturating_duration_since(Instant::now()))),
        took_ms: status.took.map(milliseconds),
        synced_at: status.synced_at.map(timestamp),
        to_prune: status.to_prune as u64,
        drift: status.drift,
        warnings: status.warnings,
        objects: counts.objects as u64,
        current: counts.current as u64,
        failed: counts.failed as u64,
        synced_objects: synced_objects.collect(),
    }
}

pub(super) fn diff_of(request: DiffRequest) -> Result<DiffOf, tonic::Status> {
    match request.of {
        Some(Of::Ref(name)) if !name.is_empty() => Ok(DiffOf::Ref(name)),
        Some(Of::Live(true)) => Ok(DiffOf::Live),
        Some(Of::Files(files)) => {
            let files = files.files.into_iter();
            let files = files.map(|file| File { path: Arc::from(file.path.as_str()), content: file.content });
            Ok(DiffOf::Files(files.collect()))
        }
        _ => Err(tonic::Status::invalid_argument("one of ref, files and live is needed")),
    }
}

pub(super) fn diff(diff: Diff) -> DiffResponse {
    let change = |change: gitops::Change| DiffChange {
        action: change.action.as_str().to_owned(),
        group: change.object.group.to_string(),
        kind: change.object.kind.to_string(),
        namespace: change.object.namespace.to_string(),
        name: change.object.name.to_string(),
        file: change.file.unwrap_or_default(),
        diff: change.diff,
        error: change.error,
    };
    DiffResponse {
        changes: diff.changes.into_iter().map(change).collect(),
        unchanged: diff.unchanged as u64,
        warnings: diff.warnings,
    }
}

pub(super) fn status(error: &ControlError) -> tonic::Status {
    let text = error.to_string();
    match error {
        ControlError::NotHome => tonic::Status::not_found(text),
        ControlError::Wrong(_) => tonic::Status::failed_precondition(text),
        ControlError::Busy(_) => tonic::Status::resource_exhausted(text),
        ControlError::Failed(_) => tonic::Status::aborted(text),
    }
}

/// Returns an identity for another replica.
pub(super) fn impersonation(identity: Impersonation) -> ImpersonationConfig {
    let Impersonation { username, groups, uid, extra } = identity;
    let extra = extra.into_iter().map(|(key, val)| ExtraKeyVal { key, val });
    ImpersonationConfig { username, groups, uid: uid.unwrap_or_default(), extra: extra.collect() }
}

/// Reads an identity of another replica.
pub(super) fn identity(config: ImpersonationConfig) -> Result<Impersonation, tonic::Status> {
    let ImpersonationConfig { username, groups, uid, extra } = config;
    let extra = extra.into_iter().map(|ExtraKeyVal { key, val }| (key, val));
    let uid = Some(uid).filter(|uid| !uid.is_empty());
    let identity = Impersonation { username, groups, uid, extra: extra.collect() };
    // A configuration may name a service account.
    identity.check(true).map_err(|error| tonic::Status::invalid_argument(format!("run_as: {error}")))?;
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_survive_the_way_to_another_replica() {
        let full = Impersonation {
            username: "kas:jane".to_owned(),
            groups: vec!["kas:dev".to_owned()],
            uid: Some("u".to_owned()),
            extra: vec![("agent.gitlab.com/id".to_owned(), vec!["7".to_owned()])],
        };
        assert_eq!(identity(impersonation(full.clone())).unwrap(), full);
        let bare = Impersonation { username: "gitlab:ci_job:1".to_owned(), ..Impersonation::default() };
        assert_eq!(identity(impersonation(bare.clone())).unwrap(), bare);
        let nobody = identity(ImpersonationConfig::default()).unwrap_err();
        assert_eq!(nobody.code(), tonic::Code::InvalidArgument);
    }
}
