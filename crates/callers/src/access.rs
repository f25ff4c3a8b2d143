//! The rules of `agent.kubernetes_api.access`.

use std::sync::Arc;

use ids::{AgentId, Impersonation, Match};
use kas_config::{AccessRule, RequestIdentity};

use crate::{Caller, KnownAgent, Mode, RunAs};

/// The rules, in their order. The first that matches decides.
#[derive(Debug, Clone, Default)]
pub struct Access {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone)]
struct Rule {
    matcher: AccessRule,
    /// What the rule decides; `None`: the caller runs as itself.
    run_as: Option<RunAs>,
}

/// What the first rule that matches has decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The index of the rule, from 0.
    pub rule: usize,
    /// As whom the request runs.
    pub run_as: RunAs,
}

/// Whether a rule decides depends on the name or project of the agent, which is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an access rule for this caller selects agents by a name or project that is not known")]
pub struct UnknownAgent;

impl Access {
    /// Returns the rules of a configuration.
    pub fn new(rules: &[AccessRule]) -> Self {
        let rule = |rule: &AccessRule| {
            let run_as = match &rule.identity {
                // A client with a credential of kas must not choose an identity with the rights of agentk.
                RequestIdentity::Agent => Some(RunAs::Agent { allows_impersonate_headers: false }),
                RequestIdentity::Impersonate(identity) => {
                    Some(RunAs::Identity { mode: Mode::Impersonate, identity: Arc::new(identity.clone()) })
                }
                RequestIdentity::User => None,
            };
            Rule { matcher: rule.clone(), run_as }
        };
        Self { rules: rules.iter().map(rule).collect() }
    }

    /// Returns what the first rule that matches decides; `None`: no rule matches.
    ///
    /// # Errors
    /// [`UnknownAgent`] if the first rule that may match is about a name or project that is not known. A
    /// later rule may give more rights than that one, so none of them decides.
    pub fn decide(&self, caller: &Caller, agent: &KnownAgent) -> Result<Option<Decision>, UnknownAgent> {
        for (rule, found) in self.rules.iter().enumerate() {
            match found.matches(caller, agent) {
                Match::No => {}
                Match::Unknown => return Err(UnknownAgent),
                Match::Yes => {
                    let run_as = found.run_as.clone().unwrap_or_else(|| RunAs::Identity {
                        mode: Mode::User,
                        identity: Arc::new(itself(caller, agent.id)),
                    });
                    return Ok(Some(Decision { rule, run_as }));
                }
            }
        }
        Ok(None)
    }
}

impl Rule {
    fn matches(&self, caller: &Caller, agent: &KnownAgent) -> Match {
        let AccessRule { agents, users, groups, .. } = &self.matcher;
        let is_for_caller = users.iter().any(|user| user.matches(&caller.name))
            || groups.iter().any(|group| caller.groups.iter().any(|name| group.matches(name)));
        if is_for_caller {
            agents.matches(agent.id, agent.project_id, agent.name.as_deref())
        } else {
            Match::No
        }
    }
}

/// Returns the identity of the caller itself, for a request to `agent`.
fn itself(caller: &Caller, agent: AgentId) -> Impersonation {
    let id = ("agent.gitlab.com/id".to_owned(), vec![agent.to_string()]);
    Impersonation {
        username: caller.name.to_string(),
        groups: caller.groups.to_vec(),
        uid: caller.uid.as_deref().map(str::to_owned),
        extra: std::iter::once(id).chain(caller.extra.iter().cloned()).collect(),
    }
}
