//! The agents that a selector names, among those that a caller reaches.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ::fleet::{AT_ONCE, Candidate, MOST_AGENTS, Selector, Unanswered};
use callers::RunAs;
use futures_util::{StreamExt as _, stream};
use ids::{AgentId, Impersonation};
use kubernetes_api::{Directory, FleetCaller, ListedAgent, NotReached};

use crate::agent_files::{AgentFile, Files};

/// The most agents that GitLab is asked about for one question of a caller whose source cannot list them.
const MOST_GUESSED: usize = 50;

/// The caller.
#[derive(Clone)]
pub(crate) enum Who {
    /// A caller of the API, who reaches every agent with agentk's own rights.
    Api,
    /// A caller of the HTTP endpoint.
    Caller(Arc<dyn FleetCaller>),
}

/// A selected agent that is connected.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) id: AgentId,
    /// Empty: not known.
    pub(crate) name: Arc<str>,
    /// As whom it is asked; `None`: with agentk's own rights.
    pub(crate) run_as: Option<Arc<Impersonation>>,
    /// Its file; `None`: it was not asked for.
    pub(crate) file: Option<Arc<AgentFile>>,
}

/// What a selector names.
#[derive(Debug, Default)]
pub(crate) struct Selected {
    /// The agents that can be asked, by their ids.
    pub(crate) members: Vec<Member>,
    /// Those that cannot, and why.
    pub(crate) unanswered: Vec<Unanswered>,
}

/// Why nobody is selected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SelectError {
    /// The caller does not reach any agent, or that cannot be said now.
    #[error(transparent)]
    NotReached(#[from] NotReached),
    /// Too many: status 422.
    #[error("{0}")]
    TooMany(String),
}

/// What is wanted of a selection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// The file of each agent. One whose file is not known cannot be asked.
    pub(crate) files: bool,
    /// The most agents.
    pub(crate) most: usize,
}

/// Returns the agents that a selector names and the caller reaches.
///
/// # Errors
/// [`SelectError`].
///
/// # Cancel safety
/// Cancel safe.
pub(super) async fn select(
    directory: &dyn Directory,
    files: &dyn Files,
    who: &Who,
    selector: &Selector,
    want: Want,
) -> Result<Selected, SelectError> {
    let (agents, is_guess) = match who {
        Who::Api => {
            let listed = directory.list().await;
            (listed.map_err(NotReached::Unavailable)?, false)
        }
        Who::Caller(caller) => {
            let reachable = caller.reachable().await?;
            (reachable.agents, reachable.is_guess)
        }
    };
    let is_selected = |listed: &ListedAgent| {
        selector.matches(Candidate {
            id: listed.agent.id,
            name: listed.agent.name.as_deref(),
            project: listed.agent.project_id,
        })
    };
    let mut chosen: Vec<ListedAgent> = agents.into_iter().filter(is_selected).collect();
    let most = want.most.min(MOST_AGENTS);
    let mut selected = Selected::default();
    let mut known = HashMap::new();
    if selector.needs_labels() || want.files {
        let ids: Vec<AgentId> = chosen.iter().map(|listed| listed.agent.id).collect();
        for part in ids.chunks(MOST_AGENTS) {
            known.extend(files.of(part).await);
        }
    }
    let mut missing = Vec::new();
    if selector.needs_labels() {
        chosen.retain(|listed| match known.get(&listed.agent.id) {
            Some(Ok(file)) => selector.matches_labels(&file.labels),
            Some(Err(why)) if listed.connected => {
                missing.push((listed.clone(), why.clone()));
                false
            }
            _ => false,
        });
    }
    if is_guess && chosen.len() + missing.len() > MOST_GUESSED {
        return Err(SelectError::TooMany(format!(
            "the selector names {} agents, and GitLab must be asked about each with this kind of credential: name \
             at most {MOST_GUESSED}, such as id=7|9",
            chosen.len() + missing.len()
        )));
    }
    if chosen.len() > most {
        let text = format!("the selector names {} agents; at most {most}", chosen.len());
        return Err(SelectError::TooMany(text));
    }
    let named: HashSet<AgentId> = match selector.ids() {
        Some(ids) => ids.iter().copied().collect(),
        None => HashSet::new(),
    };
    let mut seen: HashSet<AgentId> = HashSet::new();
    let mut unsaid = Unsaid::default();
    for (listed, why) in missing {
        if unsaid.of(listed.agent.id, permitted(who, listed.agent.id).await)?.is_some() {
            seen.insert(listed.agent.id);
            selected.unanswered.push(Unanswered::new(listed.agent.id, listed.agent.name.as_deref(), &why));
        }
    }
    let mut judged = stream::iter(chosen)
        .map(|listed| async move { (permitted(who, listed.agent.id).await, listed) })
        .buffer_unordered(AT_ONCE);
    while let Some((run_as, listed)) = judged.next().await {
        let Some(run_as) = unsaid.of(listed.agent.id, run_as)? else { continue };
        let (id, name) = (listed.agent.id, listed.agent.name.clone());
        seen.insert(id);
        let mut gap = |why: &str| selected.unanswered.push(Unanswered::new(id, name.as_deref(), why));
        if !listed.connected {
            gap("it is not connected");
            continue;
        }
        let file = match known.get(&id) {
            None => None,
            Some(Ok(file)) => Some(Arc::clone(file)),
            Some(Err(why)) if want.files => {
                gap(why);
                continue;
            }
            Some(Err(_)) => None,
        };
        selected.members.push(Member { id, name: name.unwrap_or_else(|| "".into()), run_as, file });
    }
    if let Some((_, why)) = unsaid.0.first()
        && seen.is_empty()
    {
        // That is all that is known.
        return Err(NotReached::Unavailable(why.clone()).into());
    }
    for (id, why) in unsaid.0 {
        seen.insert(id);
        // Its name is only for those who may use it.
        selected.unanswered.push(Unanswered::new(id, None, &why));
    }
    // Whether such an agent exists is not told.
    let mut unseen: Vec<AgentId> = named.difference(&seen).copied().collect();
    if !selector.has_other_terms_than_ids() {
        unseen.sort_unstable();
        for id in unseen {
            let why = "it is not known here, or this credential gives no access to it";
            selected.unanswered.push(Unanswered::new(id, None, why));
        }
    }
    selected.members.sort_by_key(|member| member.id);
    selected.unanswered.sort_by_key(|missing| missing.agent);
    Ok(selected)
}

/// Agents of which it cannot be said now whether the caller may use them, and why.
#[derive(Debug, Default)]
struct Unsaid(Vec<(AgentId, String)>);

impl Unsaid {
    /// Takes what was said of an agent; `None`: the caller may not use it, or that cannot be said.
    fn of<T>(
        &mut self,
        agent: AgentId,
        said: Result<Option<T>, NotReached>,
    ) -> Result<Option<T>, NotReached> {
        match said {
            Err(NotReached::Unavailable(why)) => {
                self.0.push((agent, why));
                Ok(None)
            }
            said => said,
        }
    }
}

/// Returns as whom an agent is asked. `None`: the caller may not use it.
async fn permitted(who: &Who, agent: AgentId) -> Result<Option<Option<Arc<Impersonation>>>, NotReached> {
    let caller = match who {
        Who::Api => return Ok(Some(None)),
        Who::Caller(caller) => caller,
    };
    match caller.authorize(agent).await {
        Ok(authorized) => Ok(Some(impersonated(authorized.run_as))),
        Err(NotReached::Forbidden) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Returns the identity to impersonate.
pub(super) fn impersonated(run_as: RunAs) -> Option<Arc<Impersonation>> {
    match run_as {
        RunAs::Agent { .. } => None,
        RunAs::Identity { identity, .. } => Some(identity),
    }
}

#[cfg(test)]
mod tests;
