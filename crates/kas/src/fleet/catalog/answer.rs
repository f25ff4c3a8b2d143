//! The entries of an answer, as JSON and for the API.

use ::fleet::{Unanswered, applications::Application, components::Component};
use proto::kas::api::v1::{
    AgentApplications, AgentComponents, InstalledApplication, ListApplicationsResponse,
    ListComponentsResponse, RunningComponent, UnansweredAgent,
};
use serde::Serialize;

use super::CatalogAnswer;
use crate::fleet::select::Member;

/// What runs in the cluster of one agent.
#[derive(Debug, Serialize)]
pub(crate) struct AgentCatalog {
    agent: i64,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    components: Option<Vec<Component>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    applications: Option<Vec<Application>>,
    /// What could not be read, for people.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing: Vec<String>,
}

impl AgentCatalog {
    pub(super) fn of_components(member: &Member, components: Vec<Component>, missing: Vec<String>) -> Self {
        Self { components: Some(components), applications: None, ..Self::of(member, missing) }
    }

    pub(super) fn of_applications(
        member: &Member,
        applications: Vec<Application>,
        missing: Vec<String>,
    ) -> Self {
        Self { components: None, applications: Some(applications), ..Self::of(member, missing) }
    }

    fn of(member: &Member, missing: Vec<String>) -> Self {
        let name = member.name.to_string();
        Self { agent: member.id.get(), name, components: None, applications: None, missing }
    }
}

/// The document that HTTP clients get.
#[derive(Serialize)]
struct Document<'a> {
    agents: &'a [AgentCatalog],
    unanswered: &'a [Unanswered],
}

fn missing_agents(unanswered: Vec<Unanswered>) -> Vec<UnansweredAgent> {
    let one = |it: Unanswered| UnansweredAgent { id: it.agent.get(), name: it.name, reason: it.reason };
    unanswered.into_iter().map(one).collect()
}

impl CatalogAnswer {
    /// Returns it as JSON.
    pub(super) fn json(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&Document { agents: &self.agents, unanswered: &self.unanswered })
    }

    pub(super) fn into_components(self) -> ListComponentsResponse {
        let component = |it: Component| RunningComponent {
            version_from: it.version_from.map_or_else(String::new, |from| from.as_str().to_owned()),
            name: it.name,
            namespace: it.namespace,
            version: it.version,
            workloads: it.workloads,
            apis: it.apis,
            service: it.service,
        };
        let agent = |it: AgentCatalog| AgentComponents {
            agent_id: it.agent,
            agent_name: it.name,
            components: it.components.into_iter().flatten().map(component).collect(),
            missing: it.missing,
        };
        ListComponentsResponse {
            agents: self.agents.into_iter().map(agent).collect(),
            unanswered: missing_agents(self.unanswered),
        }
    }

    pub(super) fn into_applications(self) -> ListApplicationsResponse {
        let application = |it: Application| InstalledApplication {
            version_by: it.version_by.map_or_else(String::new, |by| by.as_str().to_owned()),
            by: it.by.iter().map(|by| by.as_str().to_owned()).collect(),
            namespace: it.namespace,
            instance: it.instance,
            name: it.name,
            version: it.version,
            status: it.status,
        };
        let agent = |it: AgentCatalog| AgentApplications {
            agent_id: it.agent,
            agent_name: it.name,
            applications: it.applications.into_iter().flatten().map(application).collect(),
            missing: it.missing,
        };
        ListApplicationsResponse {
            agents: self.agents.into_iter().map(agent).collect(),
            unanswered: missing_agents(self.unanswered),
        }
    }
}
