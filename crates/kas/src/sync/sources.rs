//! The repositories on this host: the key `repositories`.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use ids::{Agent, Match};
use kas_config::{LocalRepository, Place};
use planner::{Source, SourceError, Sources};
use repository::{RefName, Repository, bare::Bare, folder::Folder};

/// How often the head of a repository on this host is looked at. It costs less than a millisecond.
const POLL: Duration = Duration::from_millis(150);
/// The same for a folder, all of whose files are looked at.
const POLL_FOLDER: Duration = Duration::from_secs(1);

/// The repositories on this host.
pub(crate) struct LocalSources(HashMap<String, Local>);

struct Local {
    config: LocalRepository,
    repository: Arc<dyn Repository>,
    poll: Duration,
}

impl LocalSources {
    /// Returns the repositories of the configuration. None of them needs to exist yet.
    pub(crate) fn new(config: &[LocalRepository]) -> Self {
        let all = config.iter().map(|config| {
            let (repository, poll): (Arc<dyn Repository>, _) = match &config.place {
                Place::Bare(path) => {
                    // A name that Git does not permit names no branch.
                    let branch = config.default_branch.as_deref();
                    let branch = branch.and_then(|name| RefName::new(&format!("refs/heads/{name}")).ok());
                    (Arc::new(Bare::new(path, branch)), POLL)
                }
                Place::Folder(path) => (Arc::new(Folder::new(path)), POLL_FOLDER),
            };
            (config.name.clone(), Local { config: config.clone(), repository, poll })
        });
        Self(all.collect())
    }
}

#[async_trait]
impl Sources for LocalSources {
    async fn open(&self, agent: &Agent, name: &str) -> Result<Source, SourceError> {
        // Whether there is a repository of that name must not show to agents that may not read it.
        let denied = || {
            SourceError::Denied(format!(
                "agent {} may read no repository named {name:?}: see the key repositories of kas",
                agent.id
            ))
        };
        let local = self.0.get(name).ok_or_else(denied)?;
        let selector = local.config.agents.as_ref().ok_or_else(denied)?;
        if selector.matches(agent.id, Some(agent.project_id), Some(&agent.name)) != Match::Yes {
            return Err(denied());
        }
        let id = u64::try_from(local.config.id).map_err(|error| SourceError::Denied(error.to_string()))?;
        Ok(Source { id, repository: Arc::clone(&local.repository), poll: local.poll })
    }
}

#[cfg(test)]
mod tests {
    use ids::AgentId;

    use super::*;

    #[tokio::test]
    async fn only_named_agents_may_read_a_repository() {
        let repository = |name: &str, agents: Option<&str>| LocalRepository {
            name: name.to_owned(),
            id: 7,
            place: Place::Folder("/does/not/exist".into()),
            default_branch: None,
            agents: agents.map(|text| text.parse().unwrap()),
        };
        let sources = LocalSources::new(&[
            repository("all", Some("all")),
            repository("three", Some("id=3")),
            repository("nobody", None),
        ]);
        let agent = |id| Agent { id: AgentId::new(id).unwrap(), name: "a".into(), project_id: 1 };
        let opens = async |id, name: &str| sources.open(&agent(id), name).await.map(|source| source.id);
        assert_eq!(opens(2, "all").await, Ok(7));
        assert_eq!(opens(3, "three").await, Ok(7));
        for (id, name) in [(2, "three"), (2, "nobody"), (2, "unknown")] {
            let error = opens(id, name).await.unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("agent {id} may read no repository named {name:?}: see the key repositories of kas")
            );
        }
    }
}
