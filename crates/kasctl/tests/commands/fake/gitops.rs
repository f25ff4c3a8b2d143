//! What the fake kas knows of manifests.
//!
//! Agent 7 has two projects, one of which is degraded; nothing plans for agent 8; other agents are not known.
//! What is asked to be done fails for agent 8. A diff of `main` has no changes; of `feature` it has two; the
//! live one fails for an object; one of files has a change for each of them.

use proto::kas::api::v1::{
    ControlSyncRequest, ControlSyncResponse, DiffChange, DiffRequest, DiffResponse, Environment,
    EnvironmentAgent, GetSyncRequest, GetSyncResponse, ListEnvironmentsRequest, ListEnvironmentsResponse,
    ProjectSync, SyncedObject, control_sync_request::Action, diff_request::Of,
};
use tonic::Status;

use super::services::silent;

pub(super) fn sync(asked: &GetSyncRequest, phase: &str) -> Result<GetSyncResponse, Status> {
    match asked.agent_id {
        7 => {}
        8 => {
            let waits = "no replica plans for this agent".to_owned();
            return Ok(GetSyncResponse { waits, ..GetSyncResponse::default() });
        }
        id => return Err(Status::invalid_argument(format!("agent_id: no agent {id}"))),
    }
    let object = |kind: &str, name: &str, action: &str, status: &str, message: &str| SyncedObject {
        group: if kind == "Deployment" { "apps".to_owned() } else { String::new() },
        kind: kind.to_owned(),
        namespace: "shop".to_owned(),
        name: name.to_owned(),
        action: action.to_owned(),
        status: status.to_owned(),
        message: message.to_owned(),
        file: "web.yaml".to_owned(),
        line: 3,
    };
    let degraded = ProjectSync {
        project: "group/web".to_owned(),
        id: 42,
        wanted_commit: "8d1f3c5e9a02b7d4".to_owned(),
        applied_commit: "11112222333344445555".to_owned(),
        phase: phase.to_owned(),
        message: "Deployment.apps shop/web is in progress".to_owned(),
        next_ms: Some(10_000),
        to_prune: 1,
        warnings: vec!["web.yaml:9: namespace dropped\u{1b}[2J".to_owned()],
        objects: 2,
        current: 1,
        synced_objects: vec![
            object("Deployment", "web", "changed", "in progress", "1 of 2 replicas"),
            object("ConfigMap", "web", "unchanged", "current", ""),
        ],
        ..ProjectSync::default()
    };
    let synced = ProjectSync {
        project: "group/db".to_owned(),
        phase: "synced".to_owned(),
        objects: 3,
        current: 3,
        ..ProjectSync::default()
    };
    let mut projects = vec![synced, degraded];
    projects.retain(|project| asked.project.is_empty() || asked.project == project.project);
    if !asked.with_objects {
        projects.iter_mut().for_each(|project| project.synced_objects.clear());
    }
    Ok(GetSyncResponse { replica: "kas-0".to_owned(), waits: String::new(), projects })
}

pub(super) fn control(asked: &ControlSyncRequest) -> Result<ControlSyncResponse, Status> {
    if asked.agent_id == 8 {
        return Err(Status::failed_precondition("a configuration names the project"));
    }
    let message = match asked.action() {
        Action::Sync => String::new(),
        Action::Prune => format!("1 object of {} pruned", asked.project),
        Action::Destroy => format!("{} in {} destroyed", asked.project, asked.namespace),
        Action::ShowDestroy => {
            let objects =
                vec!["delete ConfigMap shop/a".to_owned(), "leave ConfigMap shop/b: no mark".to_owned()];
            return Ok(ControlSyncResponse { message: format!("would destroy {}", asked.project), objects });
        }
        Action::Unknown => return Err(Status::invalid_argument("action is needed")),
    };
    Ok(ControlSyncResponse { message, objects: Vec::new() })
}

pub(super) fn diff(asked: &DiffRequest) -> Result<DiffResponse, Status> {
    if asked.agent_id != 7 || asked.project != "group/web" {
        return Err(Status::failed_precondition("no configuration names the project"));
    }
    let change = |action: &str, file: &str, diff: &str, error: &str| DiffChange {
        action: action.to_owned(),
        group: "apps".to_owned(),
        kind: "Deployment".to_owned(),
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        file: file.to_owned(),
        diff: diff.to_owned(),
        error: error.to_owned(),
    };
    let changes = match &asked.of {
        Some(Of::Ref(name)) if name == "main" => Vec::new(),
        Some(Of::Ref(name)) if name == "feature" => vec![
            change("update", "web.yaml", "--- live\n+++ set\n-  replicas: 1\n+  replicas: 2\n", ""),
            change("prune", "", "", ""),
        ],
        Some(Of::Ref(name)) => return Err(Status::failed_precondition(format!("no revision {name}"))),
        Some(Of::Files(files)) => {
            let files = files.files.iter();
            files
                .map(|file| change("create", &file.path, &String::from_utf8_lossy(&file.content), ""))
                .collect()
        }
        Some(Of::Live(_)) => vec![change("error", "web.yaml", "", "the webhook \u{1b} has side effects")],
        None => return Err(Status::invalid_argument("one of ref, files and live is needed")),
    };
    let warnings = vec!["web.yaml:9: namespace dropped".to_owned()];
    Ok(DiffResponse { changes, unchanged: 5, warnings })
}

/// Agent 1 stands for two environments, and is degraded; `kas.yaml` of agent 2 is wrong.
pub(super) fn environments(
    asked: &ListEnvironmentsRequest,
    is_partial: bool,
) -> Result<ListEnvironmentsResponse, Status> {
    if asked.project_id < 0 {
        return Err(Status::invalid_argument("project_id must be positive"));
    }
    let names = ["production", "review/*"].into_iter();
    let names = names.filter(|name| {
        let wanted = asked.environment.as_str();
        wanted.is_empty() || wanted == *name || name.trim_end_matches('*').starts_with(wanted)
    });
    let agent = EnvironmentAgent {
        id: 1,
        name: "prod".to_owned(),
        project_id: 3,
        connections: 2,
        namespaces: vec!["shop".to_owned()],
        sync: "degraded".to_owned(),
        message: "group/web: Deployment.apps shop/web is in progress".to_owned(),
        projects: 2,
        synced: 1,
        to_prune: 4,
        ..EnvironmentAgent::default()
    };
    let wrong = EnvironmentAgent {
        id: 2,
        name: "stage".to_owned(),
        project_id: 4,
        flaw: "environment: unknown key".to_owned(),
        ..EnvironmentAgent::default()
    };
    let away =
        EnvironmentAgent { id: 3, name: "away".to_owned(), project_id: 4, ..EnvironmentAgent::default() };
    Ok(ListEnvironmentsResponse {
        environments: names
            .map(|name| Environment {
                name: name.to_owned(),
                agent_ids: if name == "production" { vec![1, 3] } else { vec![1] },
            })
            .collect(),
        agents: vec![agent, wrong, away],
        unanswered: is_partial.then(|| silent("10.0.0.2")).into_iter().collect(),
    })
}
