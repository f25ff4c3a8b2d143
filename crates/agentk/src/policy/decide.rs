//! The decision about a request, without I/O.

use std::fmt::{self, Write as _};

use kube_request::{CONNECT, RequestInfo, Upgrade};

use super::{Identity, InvalidIdentity, PathPattern, ResourceName, SubjectPattern};

/// The most characters of a name of the request in a message.
const LONGEST: usize = 256;

/// A policy. What no rule allows is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// The rules for requests with agentk's own credentials.
    pub agent: Vec<Rule>,
    /// Who may be impersonated, and the rules for such requests; `None`: nobody.
    pub impersonated: Option<Subjects>,
}

/// Who may be impersonated, and the rules for such requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subjects {
    /// The user must match one of these.
    pub users: Vec<SubjectPattern>,
    /// Every group of the request must match one of these.
    pub groups: Vec<SubjectPattern>,
    /// One of these must match.
    pub rules: Vec<Rule>,
}

/// A rule: these verbs, there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The verbs; `*`: all but `connect`.
    pub verbs: Vec<String>,
    /// What they are allowed for.
    pub what: What,
}

/// What a rule allows verbs for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Resources of the API.
    Resources {
        /// `None`: all, with their subresources.
        resources: Option<Vec<ResourceName>>,
        /// `None`: in all namespaces, and outside of any.
        namespaces: Option<Vec<String>>,
    },
    /// Paths that are not those of resources.
    Paths(Vec<PathPattern>),
}

/// What allowed a request. Displays as the path in the policy file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleName {
    /// It is for discovery, the version or the OpenAPI description, which everybody may read.
    Discovery,
    /// A rule for agentk's own credentials, by its index.
    Agent(usize),
    /// A rule for impersonated users, by its index.
    Impersonated(usize),
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Discovery => f.write_str("discovery"),
            Self::Agent(index) => write!(f, "agent[{index}]"),
            Self::Impersonated(index) => write!(f, "impersonated.rules[{index}]"),
        }
    }
}

/// Why a request is refused. Displays as the message for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It cannot be said as whom it runs.
    Identity(InvalidIdentity),
    /// This user may not be impersonated.
    User(String),
    /// This group may not be impersonated.
    Group(String),
    /// No rule matches.
    NoRule {
        /// The impersonated user; `None`: agentk itself.
        user: Option<String>,
        /// Verb and object, such as `list pods in namespace "a"`.
        action: String,
    },
}

impl Refusal {
    /// The part of the policy file that allows nothing of the kind.
    pub fn part(&self) -> &'static str {
        match self {
            Self::Identity(_) => "impersonated",
            Self::User(_) => "impersonated.users",
            Self::Group(_) => "impersonated.groups",
            Self::NoRule { user: None, .. } => "agent",
            Self::NoRule { user: Some(_), .. } => "impersonated.rules",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity(error) => write!(f, "{error}"),
            Self::User(name) => write!(f, "the policy of this agent does not allow requests as user {name}"),
            Self::Group(name) => {
                write!(f, "the policy of this agent does not allow requests as group {name}")
            }
            Self::NoRule { user: None, action } => {
                write!(f, "the policy of this agent does not allow its own account to {action}")
            }
            Self::NoRule { user: Some(user), action } => {
                write!(f, "the policy of this agent does not allow user {user} to {action}")
            }
        }
    }
}

impl Policy {
    /// Decides about a request. `upgrade`: the protocol that it upgrades to, if any.
    ///
    /// # Errors
    /// [`Refusal`]. The request must not be sent.
    pub fn decide(
        &self,
        info: &RequestInfo,
        upgrade: Option<Upgrade>,
        identity: &Identity<'_>,
    ) -> Result<RuleName, Refusal> {
        let verb = info.access_verb(upgrade);
        let (rules, name): (&[Rule], fn(usize) -> RuleName) = match identity {
            Identity::Agent => (&self.agent, RuleName::Agent),
            Identity::Impersonated { user, groups } => {
                let subjects = self.impersonated.as_ref();
                let matches = |patterns: Option<&Vec<SubjectPattern>>, name: &str| {
                    patterns.is_some_and(|patterns| patterns.iter().any(|pattern| pattern.matches(name)))
                };
                if !matches(subjects.map(|subjects| &subjects.users), user) {
                    return Err(Refusal::User(quoted(user)));
                }
                let allowed = subjects.map(|subjects| &subjects.groups);
                if let Some(group) = groups.iter().find(|group| !matches(allowed, group)) {
                    return Err(Refusal::Group(quoted(group)));
                }
                (subjects.map_or(&[][..], |subjects| &subjects.rules), RuleName::Impersonated)
            }
        };
        if is_discovery(info, verb) {
            return Ok(RuleName::Discovery);
        }
        match rules.iter().position(|rule| rule.allows(info, verb)) {
            Some(index) => Ok(name(index)),
            None => Err(Refusal::NoRule { user: identity.user().map(quoted), action: described(info, verb) }),
        }
    }

    /// The number of rules.
    pub fn rules(&self) -> usize {
        self.agent.len() + self.impersonated.as_ref().map_or(0, |subjects| subjects.rules.len())
    }
}

impl Rule {
    fn allows(&self, info: &RequestInfo, verb: &str) -> bool {
        let is_allowed =
            self.verbs.iter().any(|allowed| allowed == verb || allowed == "*" && verb != CONNECT);
        is_allowed
            && match &self.what {
                What::Resources { resources, namespaces } => {
                    info.is_resource()
                        && !info.is_subresource_skipped()
                        && resources.as_ref().is_none_or(|all| all.iter().any(|one| one.matches(info)))
                        && namespaces.as_ref().is_none_or(|all| all.iter().any(|one| one == info.namespace()))
                }
                What::Paths(paths) => {
                    !info.is_resource() && paths.iter().any(|path| path.matches(info.path()))
                }
            }
    }
}

/// Whether a request reads what clients need to know before anything else: which resources and versions there
/// are. Kubernetes lets every account read it.
fn is_discovery(info: &RequestInfo, verb: &str) -> bool {
    let path = info.path();
    !info.is_resource()
        && matches!(verb, "get" | "head")
        // Longer paths below /api and /apis are those of resources.
        && ["/api", "/apis", "/openapi", "/version"].iter().any(|free| {
            path.strip_prefix(free).is_some_and(|rest| {
                rest.is_empty() || rest == "/" || (rest.starts_with('/') && *free != "/version")
            })
        })
}

/// Says what a request does, for a message.
fn described(info: &RequestInfo, verb: &str) -> String {
    // The verb of other methods is empty for a resource.
    let mut text = if verb.is_empty() { "send this method to".to_owned() } else { shortened(verb) };
    text.push_str(if verb == CONNECT { " to " } else { " " });
    if !info.is_resource() {
        text.push_str(&quoted(info.path()));
        return text;
    }
    text.push_str(&shortened(info.resource()));
    for (separator, part) in [('.', info.api_group()), ('/', info.subresource())] {
        if !part.is_empty() {
            text.push(separator);
            text.push_str(&shortened(part));
        }
    }
    // Writing to a string does not fail.
    let _ = match info.namespace() {
        "" => write!(text, " in all namespaces or outside of any"),
        namespace => write!(text, " in namespace {}", quoted(namespace)),
    };
    if info.is_subresource_skipped() {
        text.push_str(", by a path with an empty segment before the subresource");
    }
    text
}

fn quoted(text: &str) -> String {
    format!("{:?}", shortened(text))
}

fn shortened(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}
