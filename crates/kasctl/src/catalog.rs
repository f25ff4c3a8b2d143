//! `kasctl components` and `kasctl apps`: what runs in the clusters of many agents.

use std::time::Duration;

use proto::kas::api::v1::{
    AgentApplications, AgentComponents, InstalledApplication, ListApplicationsRequest, ListComponentsRequest,
    RunningComponent, UnansweredAgent,
};
use serde::Serialize;

use crate::{
    api::Client,
    cli::{CatalogArgs, Format},
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::{Table, printable},
};

/// How long an answer may take: kas gives agents 90 s.
const TIMEOUT: Duration = Duration::from_secs(100);
const COMPONENT_TITLES: [&str; 7] = ["AGENT", "NAME", "COMPONENT", "NAMESPACE", "VERSION", "FROM", "SERVICE"];
const APPLICATION_TITLES: [&str; 8] =
    ["AGENT", "NAME", "NAMESPACE", "INSTANCE", "APPLICATION", "VERSION", "TOLD-BY", "STATUS"];

/// Prints known software of clusters.
///
/// # Errors
/// It cannot be read or written. If something is missing, the result is [`Exit::Partial`].
pub(crate) async fn components(
    client: Client,
    mut output: Output,
    args: CatalogArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, Some(TIMEOUT));
    let CatalogArgs { agents, namespaces } = args;
    let request = client.request(&call, ListComponentsRequest { agents, namespaces })?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().list_components(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    let gaps = answer.agents.iter().map(|agent| (agent.agent_id, agent.agent_name.as_str(), &agent.missing));
    let exit = warn(gaps, &answer.unanswered);
    let agents = answer.agents.iter().map(AgentJson::of_components).collect();
    let rows = || {
        let agents = answer.agents.iter();
        agents.flat_map(|agent| agent.components.iter().map(move |it| component(agent, it))).collect()
    };
    let none = "no components found";
    print(&mut output, format, Json::new(agents, &answer.unanswered), COMPONENT_TITLES, rows, none).await?;
    Ok(exit)
}

fn component(agent: &AgentComponents, it: &RunningComponent) -> [String; 7] {
    [
        agent.agent_id.to_string(),
        agent.agent_name.clone(),
        it.name.clone(),
        it.namespace.clone(),
        it.version.clone(),
        // Without a workload, the version is not known, but that of the API is.
        if it.version_from.is_empty() { it.apis.join(",") } else { it.version_from.clone() },
        it.service.clone(),
    ]
}

/// Prints installed applications of clusters.
///
/// # Errors
/// As of [`components`].
pub(crate) async fn applications(
    client: Client,
    mut output: Output,
    args: CatalogArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Kas, Some(TIMEOUT));
    let CatalogArgs { agents, namespaces } = args;
    let request = client.request(&call, ListApplicationsRequest { agents, namespaces })?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().list_applications(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    let gaps = answer.agents.iter().map(|agent| (agent.agent_id, agent.agent_name.as_str(), &agent.missing));
    let exit = warn(gaps, &answer.unanswered);
    let agents = answer.agents.iter().map(AgentJson::of_applications).collect();
    let rows = || {
        let agents = answer.agents.iter();
        agents.flat_map(|agent| agent.applications.iter().map(move |it| application(agent, it))).collect()
    };
    let none = "no applications found";
    print(&mut output, format, Json::new(agents, &answer.unanswered), APPLICATION_TITLES, rows, none).await?;
    Ok(exit)
}

fn application(agent: &AgentApplications, it: &InstalledApplication) -> [String; 8] {
    [
        agent.agent_id.to_string(),
        agent.agent_name.clone(),
        it.namespace.clone(),
        it.instance.clone(),
        it.name.clone(),
        it.version.clone(),
        it.by.join(","),
        it.status.clone(),
    ]
}

/// Prints an answer: `rows` under `titles`, or the document.
async fn print<const N: usize>(
    output: &mut Output,
    format: Format,
    document: Json<'_>,
    titles: [&str; N],
    rows: impl FnOnce() -> Vec<[String; N]>,
    none: &str,
) -> Result<(), Failure> {
    if format == Format::Json {
        return output.json_document(&document).await;
    }
    let rows = rows();
    if rows.is_empty() {
        note(none);
        return Ok(());
    }
    let all: Vec<[String; N]> = std::iter::once(titles.map(str::to_owned)).chain(rows).collect();
    output.write(Table::new(titles).rows(&all).as_bytes()).await
}

/// Names what is missing.
fn warn<'a>(
    gaps: impl Iterator<Item = (i64, &'a str, &'a Vec<String>)>,
    unanswered: &[UnansweredAgent],
) -> Exit {
    let mut exit = if unanswered.is_empty() { Exit::Ok } else { Exit::Partial };
    for (id, name, missing) in gaps {
        for text in missing {
            note(format_args!("warning: agent {id} ({}): {}", printable(name), printable(text)));
            exit = Exit::Partial;
        }
    }
    for UnansweredAgent { id, name, reason } in unanswered {
        note(format_args!("warning: agent {id} ({}) is missing: {}", printable(name), printable(reason)));
    }
    exit
}

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct Json<'a> {
    agents: Vec<AgentJson<'a>>,
    unanswered: Vec<UnansweredJson<'a>>,
}

impl<'a> Json<'a> {
    fn new(agents: Vec<AgentJson<'a>>, unanswered: &'a [UnansweredAgent]) -> Self {
        Self { agents, unanswered: unanswered.iter().map(UnansweredJson::from).collect() }
    }
}

#[derive(Serialize)]
struct AgentJson<'a> {
    id: i64,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    components: Option<Vec<ComponentJson<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    applications: Option<Vec<ApplicationJson<'a>>>,
    missing: &'a [String],
}

#[derive(Serialize)]
struct ComponentJson<'a> {
    name: &'a str,
    namespace: &'a str,
    version: &'a str,
    version_from: &'a str,
    workloads: &'a [String],
    apis: &'a [String],
    service: &'a str,
}

#[derive(Serialize)]
struct ApplicationJson<'a> {
    namespace: &'a str,
    instance: &'a str,
    name: &'a str,
    version: &'a str,
    version_by: &'a str,
    by: &'a [String],
    status: &'a str,
}

#[derive(Serialize)]
struct UnansweredJson<'a> {
    id: i64,
    name: &'a str,
    reason: &'a str,
}

impl<'a> From<&'a UnansweredAgent> for UnansweredJson<'a> {
    fn from(UnansweredAgent { id, name, reason }: &'a UnansweredAgent) -> Self {
        Self { id: *id, name, reason }
    }
}

impl<'a> AgentJson<'a> {
    fn of_components(agent: &'a AgentComponents) -> Self {
        let component = |it: &'a RunningComponent| ComponentJson {
            name: &it.name,
            namespace: &it.namespace,
            version: &it.version,
            version_from: &it.version_from,
            workloads: &it.workloads,
            apis: &it.apis,
            service: &it.service,
        };
        Self {
            id: agent.agent_id,
            name: &agent.agent_name,
            components: Some(agent.components.iter().map(component).collect()),
            applications: None,
            missing: &agent.missing,
        }
    }

    fn of_applications(agent: &'a AgentApplications) -> Self {
        let application = |it: &'a InstalledApplication| ApplicationJson {
            namespace: &it.namespace,
            instance: &it.instance,
            name: &it.name,
            version: &it.version,
            version_by: &it.version_by,
            by: &it.by,
            status: &it.status,
        };
        Self {
            id: agent.agent_id,
            name: &agent.agent_name,
            components: None,
            applications: Some(agent.applications.iter().map(application).collect()),
            missing: &agent.missing,
        }
    }
}
