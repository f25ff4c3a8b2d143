//! `kasctl gitops`: the manifest projects of an agent, and what can be done with them.

use std::time::Duration;

use ids::AgentId;
use process::clock;
use proto::kas::api::v1::{
    ControlSyncRequest, GetSyncRequest, GetSyncResponse, ProjectSync, SyncedObject,
    control_sync_request::Action,
};
use serde::Serialize;

use crate::{
    api::{Client, UNARY_TIMEOUT},
    cli::{Format, GitopsArgs, GitopsCommand, GitopsListArgs},
    duration::humane,
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const TITLES: [&str; 8] =
    ["PROJECT", "PHASE", "SINCE", "APPLIED", "WANTED", "OBJECTS", "TO PRUNE", "MESSAGE"];
const OBJECT_TITLES: [&str; 5] = ["OBJECT", "ACTION", "STATUS", "FILE", "MESSAGE"];
/// How long a sync, a prune or a removal may take.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(3_600);

/// Runs `kasctl gitops` and its commands.
///
/// # Errors
/// The state cannot be read or written, or the command failed in kas.
pub(crate) async fn run(
    client: Client,
    output: Output,
    args: GitopsArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let GitopsArgs { command, list } = args;
    let (target, action, namespace) = match command {
        None => return Box::pin(show(client, output, list, format)).await,
        Some(GitopsCommand::Sync(target)) => (target, Action::Sync, String::new()),
        Some(GitopsCommand::Prune(args)) => (args.confirmed()?, Action::Prune, String::new()),
        Some(GitopsCommand::Destroy { confirmed, namespace, dry_run: true }) => {
            (confirmed.target, Action::ShowDestroy, namespace)
        }
        Some(GitopsCommand::Destroy { confirmed, namespace, dry_run: false }) => {
            (confirmed.confirmed()?, Action::Destroy, namespace)
        }
    };
    let question = ControlSyncRequest {
        agent_id: target.agent.get(),
        project: target.project,
        action: action.into(),
        namespace,
    };
    Box::pin(control(client, output, question, target.agent)).await
}

async fn control(
    client: Client,
    mut output: Output,
    question: ControlSyncRequest,
    agent: AgentId,
) -> Result<Exit, Failure> {
    let safe = question.action() == Action::ShowDestroy;
    let call = client.call(CallKind::Request { agent, safe }, Some(CONTROL_TIMEOUT));
    let request = client.request(&call, question)?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().control_sync(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    let message = if answer.message.is_empty() { "synced" } else { &answer.message };
    let lines = answer.objects.iter().map(String::as_str).chain([message]);
    let text: String = lines.map(|line| format!("{}\n", printable(line))).collect();
    output.write(text.as_bytes()).await?;
    Ok(Exit::Ok)
}

async fn show(
    client: Client,
    mut output: Output,
    args: GitopsListArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let Some(agent) = args.agent else { return Err(Failure::Usage("the id of an agent is needed")) };
    let question = GetSyncRequest {
        agent_id: agent.get(),
        with_objects: args.project.is_some(),
        project: args.project.unwrap_or_default(),
    };
    let call = client.call(CallKind::Kas, (!args.watch).then_some(UNARY_TIMEOUT));
    let request = client.request(&call, question)?;
    if !args.watch {
        let answer = client
            .within(&call, async {
                let answer = client.kas().get_sync(request).await;
                Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
            })
            .await?;
        print(&mut output, &answer, format).await?;
        return Ok(Exit::Ok);
    }
    client
        .within(&call, async {
            let answer = client.kas().watch_sync(request).await;
            let mut answers = answer.map_err(|status| client.explain(&call, &status))?.into_inner();
            while let Some(answer) =
                answers.message().await.map_err(|status| client.explain(&call, &status))?
            {
                match format {
                    Format::Json => output.json_line(&SyncJson::from(&answer)).await?,
                    Format::Table => print(&mut output, &answer, format).await?,
                }
            }
            Err(call.explain_broken("it ended the watch, which a replica does when it shuts down"))
        })
        .await
}

async fn print(output: &mut Output, answer: &GetSyncResponse, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output.json_document(&SyncJson::from(answer)).await;
    }
    if !answer.waits.is_empty() {
        note(format_args!("kas applies nothing: {}", printable(&answer.waits)));
    }
    let rows: Vec<[String; 8]> = answer.projects.iter().map(row).collect();
    let mut text = Table::new(TITLES).rows(std::iter::once(&TITLES.map(str::to_owned)).chain(&rows));
    for project in &answer.projects {
        for warning in &project.warnings {
            note(format_args!("warning: {}: {}", printable(&project.project), printable(warning)));
        }
        if !project.synced_objects.is_empty() {
            let rows: Vec<[String; 5]> = project.synced_objects.iter().map(object_row).collect();
            text.push('\n');
            let titles = OBJECT_TITLES.map(str::to_owned);
            text.push_str(&Table::new(OBJECT_TITLES).rows(std::iter::once(&titles).chain(&rows)));
        }
    }
    output.write(text.as_bytes()).await
}

/// Returns the first digits of a commit.
fn short(commit: &str) -> String {
    commit.get(..12).unwrap_or(commit).to_owned()
}

fn row(project: &ProjectSync) -> [String; 8] {
    let since = project.since.map(|since| {
        let since = Duration::from_secs(u64::try_from(since.seconds).unwrap_or(0));
        humane(clock::wall().saturating_sub(since))
    });
    let objects = match project.failed {
        0 => format!("{}/{}", project.current, project.objects),
        failed => format!("{}/{} ({failed} failed)", project.current, project.objects),
    };
    [
        project.project.clone(),
        project.phase.clone(),
        since.unwrap_or_default(),
        short(&project.applied_commit),
        short(&project.wanted_commit),
        objects,
        if project.to_prune == 0 { String::new() } else { project.to_prune.to_string() },
        project.message.clone(),
    ]
}

/// Returns how an object is named: `Deployment.apps shop/web`.
pub(crate) fn object_name(group: &str, kind: &str, namespace: &str, name: &str) -> String {
    let group = if group.is_empty() { String::new() } else { format!(".{group}") };
    let namespace = if namespace.is_empty() { String::new() } else { format!("{namespace}/") };
    format!("{kind}{group} {namespace}{name}")
}

fn object_row(object: &SyncedObject) -> [String; 5] {
    let SyncedObject { group, kind, namespace, name, action, status, message, file, line } = object;
    let place = if file.is_empty() { String::new() } else { format!("{file}:{line}") };
    [object_name(group, kind, namespace, name), action.clone(), status.clone(), place, message.clone()]
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct SyncJson<'a> {
    /// The replica that plans; empty if none does.
    replica: &'a str,
    /// Why kas applies nothing; empty if it does.
    waits: &'a str,
    projects: Vec<ProjectJson<'a>>,
}

#[derive(Serialize)]
struct ProjectJson<'a> {
    project: &'a str,
    id: u64,
    wanted_commit: &'a str,
    applied_commit: &'a str,
    phase: &'a str,
    message: &'a str,
    /// Null if nothing is due.
    next_ms: Option<u64>,
    /// How long the last sync took; null before it.
    took_ms: Option<u64>,
    to_prune: u64,
    drift: u64,
    warnings: &'a [String],
    objects: u64,
    current: u64,
    failed: u64,
    /// Only if a project is named.
    synced_objects: Vec<ObjectJson<'a>>,
}

#[derive(Serialize)]
struct ObjectJson<'a> {
    group: &'a str,
    kind: &'a str,
    namespace: &'a str,
    name: &'a str,
    action: &'a str,
    status: &'a str,
    message: &'a str,
    file: &'a str,
    line: u32,
}

impl<'a> From<&'a GetSyncResponse> for SyncJson<'a> {
    fn from(answer: &'a GetSyncResponse) -> Self {
        let projects = answer.projects.iter().map(|project| ProjectJson {
            project: &project.project,
            id: project.id,
            wanted_commit: &project.wanted_commit,
            applied_commit: &project.applied_commit,
            phase: &project.phase,
            message: &project.message,
            next_ms: project.next_ms,
            took_ms: project.took_ms,
            to_prune: project.to_prune,
            drift: project.drift,
            warnings: &project.warnings,
            objects: project.objects,
            current: project.current,
            failed: project.failed,
            synced_objects: project.synced_objects.iter().map(ObjectJson::from).collect(),
        });
        Self { replica: &answer.replica, waits: &answer.waits, projects: projects.collect() }
    }
}

impl<'a> From<&'a SyncedObject> for ObjectJson<'a> {
    fn from(object: &'a SyncedObject) -> Self {
        let SyncedObject { group, kind, namespace, name, action, status, message, file, line } = object;
        Self { group, kind, namespace, name, action, status, message, file, line: *line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_named_as_kas_names_them() {
        assert_eq!(object_name("apps", "Deployment", "shop", "web"), "Deployment.apps shop/web");
        assert_eq!(object_name("", "Namespace", "", "shop"), "Namespace shop");
    }

    #[test]
    fn a_row_shows_what_is_wrong() {
        let project = ProjectSync {
            project: "a/b".into(),
            phase: "failed".into(),
            wanted_commit: "0123456789abcdef0123".into(),
            objects: 3,
            current: 1,
            failed: 2,
            to_prune: 4,
            ..ProjectSync::default()
        };
        let row = row(&project);
        assert_eq!(row[4..7], ["0123456789ab", "1/3 (2 failed)", "4"]);
    }
}
