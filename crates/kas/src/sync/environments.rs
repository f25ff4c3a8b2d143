//! The environments that agents stand for: `kas.yaml` names them, and each replica knows that file of the
//! agents that it holds.

use std::collections::{BTreeMap, BTreeSet};

use agent_config::{KasState, NotKnown};
use cluster::{Query, Replica, Unanswered};
use futures_util::{StreamExt as _, stream};
use grpc::encode;
use ids::{Agent, AgentId};
use planner::{AgentSync, ProjectStatus};
use proto::kas::{
    api::v1::{Environment, EnvironmentAgent, ListEnvironmentsRequest, ListEnvironmentsResponse},
    internal::v1::{AgentEnvironments, HeldEnvironments},
};
use tonic::Status;

use super::{
    SyncService,
    service::{KNOWN_WITHIN, MAX_ANSWER, ask},
};
use crate::connected::{connected, unanswered_replica};

pub(super) const ENVIRONMENTS: &str = "/kas.internal.v1.Sync/Environments";

/// The longest name of an environment in a question, in bytes.
const LONGEST_NAME: usize = 255;
/// Replicas that are asked at once.
const AT_ONCE: usize = 16;
/// What one answer may have of names, in bytes. An answer has other fields, too.
const MOST_BYTES: usize = MAX_ANSWER / 2;

/// What is known of an agent, and the names of its environments that were asked for.
type Found = BTreeMap<i64, AgentEnvironments>;

/// A checked question.
struct Wanted<'a> {
    environment: &'a str,
    /// 0: of all.
    project: i64,
}

impl<'a> Wanted<'a> {
    fn of(request: &'a ListEnvironmentsRequest) -> Result<Self, Status> {
        let ListEnvironmentsRequest { environment, project_id } = request;
        if environment.len() > LONGEST_NAME {
            let text = format!("environment has {} bytes; at most {LONGEST_NAME}", environment.len());
            return Err(Status::invalid_argument(text));
        }
        if *project_id < 0 {
            return Err(Status::invalid_argument(format!(
                "project_id must be positive, or 0 for all projects, got {project_id}"
            )));
        }
        Ok(Self { environment, project: *project_id })
    }

    fn is_of_project(&self, agent: &Agent) -> bool {
        self.project == 0 || self.project == agent.project_id
    }

    /// Returns what `kas.yaml` of an agent says. `None`: nothing that was asked for. A file that cannot be
    /// read may say something.
    fn take(&self, agent: &Agent, state: &Result<KasState, NotKnown>) -> Option<AgentEnvironments> {
        let unread = match state {
            Ok(_) => None,
            Err(why @ NotKnown::Unreadable(_)) => {
                Some(KasState { flaw: Some(why.to_string()), ..KasState::default() })
            }
            // It is read in a moment, or another replica tells it.
            Err(NotKnown::NotYet | NotKnown::NotHere) => return None,
        };
        let state = unread.as_ref().or(state.as_ref().ok())?;
        let good = state.good.as_deref();
        let environments: Vec<String> = good
            .iter()
            .flat_map(|file| &file.environments)
            .filter(|pattern| {
                let name = self.environment;
                name.is_empty() || pattern.matches(name) || pattern.to_string() == name
            })
            .map(ToString::to_string)
            .collect();
        if environments.is_empty() && state.flaw.is_none() && state.warning.is_none() {
            return None;
        }
        let namespaces = good.and_then(|file| file.namespaces.as_ref());
        let agent = EnvironmentAgent {
            id: agent.id.get(),
            name: agent.name.to_string(),
            project_id: agent.project_id,
            namespaces: namespaces.into_iter().flatten().cloned().collect(),
            flaw: state.flaw.clone().unwrap_or_default(),
            warning: state.warning.clone().unwrap_or_default(),
            ..EnvironmentAgent::default()
        };
        Some(AgentEnvironments { agent: Some(agent), environments })
    }
}

/// How bad the phase of a project is, and its name in an answer.
fn rank(status: &ProjectStatus) -> (u8, &'static str) {
    match status.phase {
        "failed" => (4, "failed"),
        "degraded" => (3, "degraded"),
        "synced" => (0, "synced"),
        _ => (1, "syncing"),
    }
}

/// Adds how the manifest projects of an agent fare.
fn summarize(agent: &mut EnvironmentAgent, known: &AgentSync) {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let worst = known.projects.iter().max_by_key(|project| rank(project).0);
    agent.projects = number(known.projects.len());
    agent.synced = number(known.projects.iter().filter(|project| rank(project).0 == 0).count());
    agent.to_prune = known.projects.iter().map(|project| project.to_prune as u64).sum();
    if !known.waits.is_empty() {
        (agent.sync, agent.message) = ("waiting".to_owned(), known.waits.clone());
    } else if let Some(worst) = worst {
        rank(worst).1.clone_into(&mut agent.sync);
        if !worst.message.is_empty() {
            agent.message = format!("{}: {}", worst.project, worst.message);
        }
    }
}

/// Adds what a replica told to what is known.
fn merge(found: &mut Found, told: Vec<AgentEnvironments>) {
    for told in told {
        let Some(agent) = &told.agent else { continue };
        let Some(known) = found.get_mut(&agent.id) else {
            found.insert(agent.id, told);
            continue;
        };
        // Two replicas may have read the file at different times. Only the home knows of syncs.
        let Some(known_agent) = &mut known.agent else { continue };
        if known_agent.sync.is_empty() && !agent.sync.is_empty() {
            let EnvironmentAgent { sync, message, projects, synced, to_prune, .. } = agent.clone();
            *known_agent =
                EnvironmentAgent { sync, message, projects, synced, to_prune, ..known_agent.clone() };
        }
        if known.environments.is_empty() {
            known.environments.clone_from(&told.environments);
        }
    }
}

fn size(found: &Found) -> usize {
    found.values().flat_map(|agent| &agent.environments).map(String::len).sum()
}

fn too_many() -> Status {
    Status::resource_exhausted(format!(
        "the names of the environments have more than {MOST_BYTES} bytes: ask for one environment, or for one project"
    ))
}

impl SyncService {
    /// Returns what this replica knows of the agents that it holds.
    pub(super) fn environments_here(
        &self,
        request: &ListEnvironmentsRequest,
    ) -> Result<HeldEnvironments, Status> {
        let wanted = Wanted::of(request)?;
        let mut found = Found::new();
        for (agent, state) in self.held.files() {
            if !wanted.is_of_project(&agent) {
                continue;
            }
            let Some(mut taken) = wanted.take(&agent, &state) else { continue };
            if let (Some(told), Some(known)) = (&mut taken.agent, self.planners.get(agent.id, None, false)) {
                summarize(told, &known);
            }
            found.insert(agent.id.get(), taken);
        }
        if size(&found) > MOST_BYTES {
            return Err(too_many());
        }
        Ok(HeldEnvironments { agents: found.into_values().collect() })
    }

    /// Returns the environments of all agents, as all replicas know them. Of agents that are not connected,
    /// those are known whose files are on this host.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn environments(
        &self,
        request: &ListEnvironmentsRequest,
    ) -> Result<ListEnvironmentsResponse, Status> {
        let wanted = Wanted::of(request)?;
        let mut found = Found::new();
        merge(&mut found, self.environments_here(request)?.agents);
        let (told, silent) = self.environments_elsewhere(request).await;
        for told in told {
            merge(&mut found, told.agents);
        }
        let reading = self
            .held
            .files_of_others(|agent| wanted.is_of_project(agent) && !found.contains_key(&agent.id.get()));
        let others = tokio::time::timeout(KNOWN_WITHIN, reading).await.map_err(|_| {
            Status::deadline_exceeded(
                "the files of agents that are not connected could not be read in time: ask for one project",
            )
        })?;
        merge(&mut found, others.iter().filter_map(|(agent, state)| wanted.take(agent, state)).collect());
        if size(&found) > MOST_BYTES {
            return Err(too_many());
        }

        let query = if wanted.project == 0 { Query::All } else { Query::Project(wanted.project) };
        let connected = connected(&*self.tracker, query).await;
        let connected = connected.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut connections: BTreeMap<AgentId, u32> = BTreeMap::new();
        for located in &connected.connections {
            let count = connections.entry(located.connection.agent).or_default();
            *count = count.saturating_add(1);
        }
        let mut silent: Vec<Unanswered> = silent;
        for missing in connected.unanswered {
            if !silent.iter().any(|known| known.replica == missing.replica) {
                silent.push(missing);
            }
        }

        let mut environments: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
        let mut agents = Vec::with_capacity(found.len());
        for (id, known) in found {
            for name in known.environments {
                environments.entry(name).or_default().insert(id);
            }
            let Some(mut agent) = known.agent else { continue };
            agent.connections =
                AgentId::new(id).ok().and_then(|id| connections.get(&id)).copied().unwrap_or_default();
            agents.push(agent);
        }
        Ok(ListEnvironmentsResponse {
            environments: environments
                .into_iter()
                .map(|(name, ids)| Environment { name, agent_ids: ids.into_iter().collect() })
                .collect(),
            agents,
            unanswered: silent.iter().map(unanswered_replica).collect(),
        })
    }

    /// Asks all other replicas. Returns what they told, and those that did not.
    async fn environments_elsewhere(
        &self,
        request: &ListEnvironmentsRequest,
    ) -> (Vec<HeldEnvironments>, Vec<Unanswered>) {
        let Some(peers) = &self.peers else { return Default::default() };
        let known = self.tracker.replicas().await;
        let others = known.replicas.into_iter().filter(|status| status.health.is_some() && !status.is_lost());
        let message = encode(request);
        let mut answers = stream::iter(others)
            .map(|status| {
                let message = message.clone();
                async move {
                    let replica: Replica = status.replica;
                    let asked = ask::<HeldEnvironments>(peers, &replica, ENVIRONMENTS, message);
                    let answer = tokio::time::timeout(KNOWN_WITHIN, asked).await;
                    (replica, answer)
                }
            })
            .buffer_unordered(AT_ONCE);
        let (mut told, mut silent) = (Vec::new(), Vec::new());
        while let Some((replica, answer)) = answers.next().await {
            let reason = match answer {
                Ok(Ok(answer)) => {
                    told.push(answer);
                    continue;
                }
                Ok(Err(status)) => status.message().to_owned(),
                Err(_) => format!("no answer within {KNOWN_WITHIN:?}"),
            };
            silent.push(Unanswered { replica, reason, given_up: false });
        }
        (told, silent)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use agent_config::kas_yaml;

    use super::*;

    fn agent(id: i64) -> Agent {
        Agent { id: AgentId::new(id).unwrap(), name: format!("a{id}").into(), project_id: 3 }
    }

    fn state(file: &str) -> Result<KasState, NotKnown> {
        Ok(match kas_yaml::parse(file.as_bytes()) {
            Ok(parsed) => KasState { good: Some(Arc::new(parsed)), flaw: None, warning: None },
            Err(flaw) => KasState { good: None, flaw: Some(flaw), warning: None },
        })
    }

    #[test]
    fn a_name_finds_itself_and_the_patterns_that_match_it() {
        let file = state("environments: [production, 'review/*']\nnamespaces: [shop]");
        let take = |environment: &str| {
            let request = ListEnvironmentsRequest { environment: environment.to_owned(), project_id: 0 };
            let taken = Wanted::of(&request).unwrap().take(&agent(1), &file);
            taken.map(|taken| taken.environments)
        };
        assert_eq!(take("").unwrap(), ["production", "review/*"]);
        assert_eq!(take("review/x").unwrap(), ["review/*"]);
        assert_eq!(take("review/*").unwrap(), ["review/*"]);
        assert_eq!(take("production").unwrap(), ["production"]);
        assert_eq!(take("staging"), None);
        let wrong = ListEnvironmentsRequest { environment: "x".repeat(256), project_id: 0 };
        assert_eq!(Wanted::of(&wrong).err().unwrap().code(), tonic::Code::InvalidArgument);
    }

    #[test]
    fn a_wrong_file_is_told_whatever_was_asked() {
        let request = ListEnvironmentsRequest { environment: "production".to_owned(), project_id: 0 };
        let taken = Wanted::of(&request).unwrap().take(&agent(1), &state("environment: [a]")).unwrap();
        assert!(taken.environments.is_empty());
        assert!(taken.agent.unwrap().flaw.starts_with("environment"));
        let unread = Wanted::of(&request).unwrap().take(&agent(1), &Err(NotKnown::Unreadable("IO".into())));
        assert!(unread.unwrap().agent.unwrap().flaw.contains("cannot be read: IO"));
        assert!(Wanted::of(&request).unwrap().take(&agent(1), &Err(NotKnown::NotYet)).is_none());
    }

    #[test]
    fn the_worst_project_is_told_and_only_the_home_knows_it() {
        let project = |name: &str, phase, message: &str| ProjectStatus {
            project: name.into(),
            phase,
            message: message.to_owned(),
            to_prune: 2,
            ..ProjectStatus::default()
        };
        let projects = vec![
            project("a/b", "synced", ""),
            project("c/d", "degraded", "Deployment.apps shop/web is in progress"),
            project("e/f", "applying", ""),
        ];
        let mut told = EnvironmentAgent { id: 1, ..EnvironmentAgent::default() };
        summarize(&mut told, &AgentSync { waits: String::new(), projects });
        assert_eq!((told.sync.as_str(), told.projects, told.synced, told.to_prune), ("degraded", 3, 1, 6));
        assert_eq!(told.message, "c/d: Deployment.apps shop/web is in progress");

        let of = |agent: EnvironmentAgent| AgentEnvironments {
            agent: Some(agent),
            environments: vec!["production".to_owned()],
        };
        let elsewhere = EnvironmentAgent { id: 1, connections: 0, ..EnvironmentAgent::default() };
        let mut found = Found::new();
        merge(&mut found, vec![of(elsewhere.clone())]);
        merge(&mut found, vec![of(told.clone())]);
        merge(&mut found, vec![of(elsewhere)]);
        assert_eq!(found[&1].agent.as_ref(), Some(&told));

        let mut waiting = EnvironmentAgent::default();
        let waits = "agentk applies itself".to_owned();
        summarize(&mut waiting, &AgentSync { waits: waits.clone(), projects: Vec::new() });
        assert_eq!((waiting.sync.as_str(), waiting.message), ("waiting", waits));
    }
}
