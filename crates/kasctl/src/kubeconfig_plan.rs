//! Which entries of a kubeconfig belong to an endpoint of kas, and what they become.

use std::collections::{HashMap, HashSet};

use ids::AgentId;
use serde_json::{Map, Value, json};

use crate::{
    kas_url::KasUrl,
    kubeconfig_text::{CURRENT, Changes, ListChange, NotUnderstood},
};

/// The name of the extension that marks entries of kas.
const EXTENSION: &str = "kas";

/// An agent that gets a cluster and a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WantedAgent {
    /// Its id.
    pub(crate) id: AgentId,
    /// Its name, if it is known.
    pub(crate) name: Option<String>,
}

/// What the kubeconfig should have.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    /// The endpoint.
    pub(crate) url: &'a KasUrl,
    /// The agents, each once.
    pub(crate) agents: Vec<WantedAgent>,
    /// Whether these are all agents within reach, so that entries of others are removed.
    pub(crate) is_all: bool,
    /// The certificate authorities, as base64.
    pub(crate) authorities: Option<String>,
    /// The name that the certificate must have.
    pub(crate) server_name: Option<&'a str>,
    /// The credential of the user: the keys of the kubeconfig and their values.
    pub(crate) credential: Map<String, Value>,
    /// Whether the context of the only agent becomes the current one.
    pub(crate) is_used: bool,
}

/// A context in the new kubeconfig.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedContext {
    /// Its agent.
    pub(crate) agent: AgentId,
    /// Its name, which is that of the cluster as well.
    pub(crate) name: String,
}

/// What is to be changed.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The changes.
    pub(crate) changes: Changes,
    /// The contexts of the wanted agents.
    pub(crate) contexts: Vec<PlannedContext>,
    /// The names of contexts that are removed.
    pub(crate) removed: Vec<String>,
    /// The name of the user.
    pub(crate) user: String,
    /// The current context afterwards, if there is one.
    pub(crate) current: Option<String>,
}

/// A kind of entries: the key of their list, and the key of their content.
#[derive(Clone, Copy)]
struct Kind {
    list: &'static str,
    content: &'static str,
}

const CLUSTERS: Kind = Kind { list: "clusters", content: "cluster" };
const CONTEXTS: Kind = Kind { list: "contexts", content: "context" };
const USERS: Kind = Kind { list: "users", content: "user" };

/// An entry of a list.
struct Existing<'a> {
    name: &'a str,
    /// Its content; `None`: it has none.
    content: Option<&'a Map<String, Value>>,
    is_ours: bool,
    agent: Option<AgentId>,
}

/// Returns the changes of a kubeconfig.
///
/// # Errors
/// A list has something else than entries.
pub(crate) fn plan(root: &Value, wanted: &Wanted<'_>) -> Result<Plan, NotUnderstood> {
    let url = wanted.url.to_string();
    let clusters = existing(root, CLUSTERS, &url)?;
    let contexts = existing(root, CONTEXTS, &url)?;
    let users = existing(root, USERS, &url)?;
    let ids: HashSet<AgentId> = wanted.agents.iter().map(|agent| agent.id).collect();
    let (clusters_at, contexts_at) = (first_of(&clusters), first_of(&contexts));

    // Names of entries that stay as they are.
    let mut taken: HashSet<&str> = HashSet::new();
    for (list, at) in [(&clusters, &clusters_at), (&contexts, &contexts_at)] {
        for (index, entry) in list.iter().enumerate() {
            let managed = entry.agent.filter(|agent| at.get(agent) == Some(&index));
            if !managed.is_some_and(|agent| wanted.is_all || ids.contains(&agent)) {
                taken.insert(entry.name);
            }
        }
    }
    let known = |agent: AgentId| contexts_at.get(&agent).map(|&index| contexts[index].name.to_owned());
    let names = names(&wanted.agents, &taken, known);

    let user_at = users.iter().position(|user| user.is_ours);
    let user = match user_at {
        Some(index) => users[index].name.to_owned(),
        None => {
            let mut name = wanted.url.user_name();
            while users.iter().any(|user| user.name == name) {
                name.push_str("-kas");
            }
            name
        }
    };

    let cluster = |agent: AgentId, old: Option<&Map<String, Value>>, name: &str| {
        let mut new =
            kept(old, &["certificate-authority", "certificate-authority-data", "server", "tls-server-name"]);
        if let Some(authorities) = &wanted.authorities {
            new.insert("certificate-authority-data".to_owned(), authorities.as_str().into());
        }
        if let Some(server_name) = wanted.server_name {
            new.insert("tls-server-name".to_owned(), server_name.into());
        }
        new.insert("server".to_owned(), wanted.url.server(agent).into());
        entry(CLUSTERS, name, new, json!({ "agent": agent, "url": url }))
    };
    let context = |agent: AgentId, old: Option<&Map<String, Value>>, name: &str| {
        let mut new = kept(old, &["cluster", "user"]);
        new.insert("cluster".to_owned(), name.into());
        new.insert("user".to_owned(), user.as_str().into());
        entry(CONTEXTS, name, new, json!({ "agent": agent, "url": url }))
    };

    let mut lists = vec![
        list_change(CLUSTERS, &clusters, &clusters_at, &names, wanted.is_all, cluster),
        list_change(CONTEXTS, &contexts, &contexts_at, &names, wanted.is_all, context),
    ];
    let old = user_at.and_then(|index| users[index].content);
    let mut new = kept(old, &CREDENTIALS);
    new.extend(wanted.credential.clone());
    let new = entry(USERS, &user, new, json!({ "url": url }));
    lists.push(ListChange {
        key: USERS.list,
        replaced: user_at.map(|index| (index, Some(new.clone()))).into_iter().collect(),
        added: if user_at.is_none() { vec![new] } else { Vec::new() },
    });

    let removed: Vec<String> = contexts_at
        .iter()
        .filter(|(agent, _)| wanted.is_all && !ids.contains(agent))
        .map(|(_, &index)| contexts[index].name.to_owned())
        .collect();
    let before = root.get(CURRENT).and_then(Value::as_str).filter(|current| !current.is_empty());
    // The current context of the user stays the current one if it is renamed.
    let renamed = names.iter().find(|planned| {
        let old = contexts_at.get(&planned.agent).map(|&index| contexts[index].name);
        old.is_some() && old == before
    });
    let current = match &names[..] {
        [only] if wanted.is_used => Some(only.name.clone()),
        _ => renamed.map(|planned| planned.name.clone()),
    }
    .filter(|name| Some(name.as_str()) != before);
    Ok(Plan {
        current: current.clone().or_else(|| before.map(str::to_owned)),
        changes: Changes { lists, current },
        contexts: names,
        removed,
        user,
    })
}

/// The keys of a user that are credentials. Others, such as `as`, are kept.
const CREDENTIALS: [&str; 10] = [
    "auth-provider",
    "client-certificate",
    "client-certificate-data",
    "client-key",
    "client-key-data",
    "exec",
    "password",
    "token",
    "tokenFile",
    "username",
];

fn existing<'a>(root: &'a Value, kind: Kind, url: &str) -> Result<Vec<Existing<'a>>, NotUnderstood> {
    let not = || NotUnderstood(format!("{} is not a list of entries with names", kind.list));
    let list = match root.get(kind.list) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(not()),
    };
    let entry = |entry: &'a Value| {
        let name = entry.get("name").and_then(Value::as_str).ok_or_else(not)?;
        let content = entry.get(kind.content).and_then(Value::as_object);
        let mark = content.and_then(mark).filter(|mark| mark.get("url").is_some_and(|found| found == url));
        let agent = mark.and_then(|mark| AgentId::new(mark.get("agent")?.as_i64()?).ok());
        Ok(Existing { name, content, is_ours: mark.is_some(), agent })
    };
    list.iter().map(entry).collect()
}

/// Returns the extension of kas.
fn mark(content: &Map<String, Value>) -> Option<&Value> {
    let extensions = content.get("extensions")?.as_array()?;
    extensions.iter().find(|extension| is_mark(extension))?.get("extension")
}

fn is_mark(extension: &Value) -> bool {
    extension.get("name").is_some_and(|name| name == EXTENSION)
}

/// Returns the index of the entry of each agent. A copy that the user made is not the first, and stays.
fn first_of(entries: &[Existing<'_>]) -> HashMap<AgentId, usize> {
    let mut first = HashMap::new();
    for (index, entry) in entries.iter().enumerate() {
        if let Some(agent) = entry.agent {
            first.entry(agent).or_insert(index);
        }
    }
    first
}

/// Chooses the name of each agent: its own, or `<name>-<id>` if that is not unique.
fn names(
    agents: &[WantedAgent],
    taken: &HashSet<&str>,
    known: impl Fn(AgentId) -> Option<String>,
) -> Vec<PlannedContext> {
    let base = |agent: &WantedAgent| match &agent.name {
        Some(name) if ids::is_agent_name(name) => name.clone(),
        Some(_) => format!("agent-{}", agent.id),
        None => known(agent.id).unwrap_or_else(|| format!("agent-{}", agent.id)),
    };
    let bases: Vec<String> = agents.iter().map(base).collect();
    let mut count: HashMap<&str, usize> = HashMap::new();
    for base in &bases {
        *count.entry(base).or_default() += 1;
    }
    let is_free = |base: &str| count.get(base) == Some(&1) && !taken.contains(base);
    let mut used: HashSet<String> = bases.iter().filter(|base| is_free(base)).cloned().collect();
    let mut planned = Vec::with_capacity(agents.len());
    for (agent, base) in agents.iter().zip(&bases) {
        let mut name = base.clone();
        if !is_free(base) {
            // Another name may look like this one. It ends, because each name is longer than the one before.
            loop {
                name = format!("{name}-{}", agent.id);
                if !taken.contains(name.as_str()) && used.insert(name.clone()) {
                    break;
                }
            }
        }
        planned.push(PlannedContext { agent: agent.id, name });
    }
    planned
}

fn list_change(
    kind: Kind,
    entries: &[Existing<'_>],
    at: &HashMap<AgentId, usize>,
    names: &[PlannedContext],
    is_all: bool,
    new: impl Fn(AgentId, Option<&Map<String, Value>>, &str) -> Value,
) -> ListChange {
    let mut change = ListChange { key: kind.list, replaced: Vec::new(), added: Vec::new() };
    let mut wanted = HashSet::new();
    for PlannedContext { agent, name } in names {
        wanted.insert(*agent);
        match at.get(agent) {
            Some(&index) => {
                change.replaced.push((index, Some(new(*agent, entries[index].content, name))));
            }
            None => change.added.push(new(*agent, None, name)),
        }
    }
    if is_all {
        let gone = at.iter().filter(|(agent, _)| !wanted.contains(agent));
        change.replaced.extend(gone.map(|(_, &index)| (index, None)));
    }
    change.replaced.sort_by_key(|(index, _)| *index);
    change
}

/// Returns the keys of an entry that kasctl does not write, such as the namespace of a context.
fn kept(old: Option<&Map<String, Value>>, own: &[&str]) -> Map<String, Value> {
    let mut kept = old.cloned().unwrap_or_default();
    kept.retain(|key, _| !own.contains(&key.as_str()));
    kept
}

fn entry(kind: Kind, name: &str, mut content: Map<String, Value>, mark: Value) -> Value {
    let mut extensions = match content.remove("extensions") {
        Some(Value::Array(extensions)) => extensions,
        _ => Vec::new(),
    };
    extensions.retain(|extension| !is_mark(extension));
    extensions.push(json!({ "extension": mark, "name": EXTENSION }));
    content.insert("extensions".to_owned(), extensions.into());
    let mut entry = Map::new();
    entry.insert("name".to_owned(), name.into());
    entry.insert(kind.content.to_owned(), content.into());
    entry.into()
}

#[cfg(test)]
mod tests;
