//! `kasctl environments`: the environments that agents stand for, and how their manifests fare.

use std::collections::HashMap;

use proto::kas::api::v1::{EnvironmentAgent, ListEnvironmentsRequest, ListEnvironmentsResponse};
use serde::Serialize;

use crate::{
    agents::{PARTIAL, UnansweredJson, warn},
    api::{Client, UNARY_TIMEOUT},
    cli::{EnvironmentsArgs, Format},
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

const TITLES: [&str; 8] =
    ["ENVIRONMENT", "AGENT", "NAME", "CONNECTED", "SYNC", "PROJECTS", "TO PRUNE", "MESSAGE"];

/// Prints environments.
///
/// # Errors
/// The list cannot be read or written. If a replica did not answer, the result is [`Exit::Partial`].
pub(crate) async fn run(
    client: Client,
    mut output: Output,
    args: EnvironmentsArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let question = ListEnvironmentsRequest {
        environment: args.environment.unwrap_or_default(),
        project_id: args.project.unwrap_or_default(),
    };
    let request = client.request(&call, question)?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().list_environments(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    warn(&answer.unanswered, PARTIAL);
    for agent in answer.agents.iter().filter(|agent| !agent.flaw.is_empty()) {
        let EnvironmentAgent { id, name, flaw, .. } = agent;
        let (name, flaw) = (printable(name), printable(flaw));
        note(format_args!("warning: kas.yaml of agent {id} ({name}) is not valid: {flaw}"));
    }
    for agent in answer.agents.iter().filter(|agent| !agent.warning.is_empty()) {
        let EnvironmentAgent { id, name, warning, .. } = agent;
        let (name, warning) = (printable(name), printable(warning));
        note(format_args!("warning: kas.yaml of agent {id} ({name}): {warning}"));
    }
    match format {
        Format::Json => output.json_document(&ListJson::from(&answer)).await?,
        Format::Table => {
            let mut rows = vec![TITLES.map(str::to_owned)];
            rows.extend(rows_of(&answer));
            output.write(Table::new(TITLES).rows(&rows).as_bytes()).await?;
        }
    }
    Ok(if answer.unanswered.is_empty() { Exit::Ok } else { Exit::Partial })
}

/// Returns a row for each agent of each environment.
fn rows_of(answer: &ListEnvironmentsResponse) -> Vec<[String; 8]> {
    let agents: HashMap<i64, &EnvironmentAgent> =
        answer.agents.iter().map(|agent| (agent.id, agent)).collect();
    let mut rows = Vec::new();
    for environment in &answer.environments {
        for agent in environment.agent_ids.iter().filter_map(|id| agents.get(id)) {
            rows.push([
                environment.name.clone(),
                agent.id.to_string(),
                agent.name.clone(),
                match agent.connections {
                    0 => "no".to_owned(),
                    1 => "yes".to_owned(),
                    pods => format!("{pods} pods"),
                },
                agent.sync.clone(),
                match agent.projects {
                    0 => String::new(),
                    projects => format!("{}/{projects}", agent.synced),
                },
                match agent.to_prune {
                    0 => String::new(),
                    objects => objects.to_string(),
                },
                agent.message.clone(),
            ]);
        }
    }
    rows
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct ListJson<'a> {
    environments: Vec<EnvironmentJson<'a>>,
    agents: Vec<AgentJson<'a>>,
    unanswered: Vec<UnansweredJson<'a>>,
}

#[derive(Serialize)]
struct EnvironmentJson<'a> {
    name: &'a str,
    agents: &'a [i64],
}

#[derive(Serialize)]
struct AgentJson<'a> {
    id: i64,
    name: &'a str,
    project_id: i64,
    connections: u32,
    /// Null: the whole cluster.
    namespaces: Option<&'a [String]>,
    /// Why `kas.yaml` is not valid; null if it is.
    flaw: Option<&'a str>,
    /// What in `kas.yaml` has no effect; null: nothing.
    warning: Option<&'a str>,
    /// Null: there are no manifest projects, or no replica plans for the agent.
    sync: Option<&'a str>,
    message: &'a str,
    projects: u32,
    synced: u32,
    to_prune: u64,
}

impl<'a> From<&'a ListEnvironmentsResponse> for ListJson<'a> {
    fn from(answer: &'a ListEnvironmentsResponse) -> Self {
        let environments = answer.environments.iter();
        let agents = answer.agents.iter().map(|agent| AgentJson {
            id: agent.id,
            name: &agent.name,
            project_id: agent.project_id,
            connections: agent.connections,
            namespaces: Some(agent.namespaces.as_slice()).filter(|namespaces| !namespaces.is_empty()),
            flaw: Some(agent.flaw.as_str()).filter(|flaw| !flaw.is_empty()),
            warning: Some(agent.warning.as_str()).filter(|warning| !warning.is_empty()),
            sync: Some(agent.sync.as_str()).filter(|sync| !sync.is_empty()),
            message: &agent.message,
            projects: agent.projects,
            synced: agent.synced,
            to_prune: agent.to_prune,
        });
        Self {
            environments: environments
                .map(|environment| EnvironmentJson {
                    name: &environment.name,
                    agents: &environment.agent_ids,
                })
                .collect(),
            agents: agents.collect(),
            unanswered: answer.unanswered.iter().map(UnansweredJson::from).collect(),
        }
    }
}
