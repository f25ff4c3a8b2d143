//! Agents that are listed in a file.
//!
//! The file contains SHA-256 hashes of tokens, never tokens. A file with any problem is refused as a whole,
//! because a partial list of identities is worse than the previous one.
//!
//! A changed file takes effect within half a second (see [`process::reload`]). If a file becomes invalid or
//! is deleted, the last valid list stays in use and an error is logged: a typing error must not disconnect
//! every agent. To revoke an agent, remove it from the file; deleting the file revokes nothing.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt, io,
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use ids::{Agent, AgentId, TokenHash, is_agent_name};
pub use process::reload::others_may_write;
use process::reload::{self, Content, MakeFile, ReloadedFile};
use settings::{
    Problems,
    secret::create_private,
    walk::{self, Section, Unknown},
    yaml,
};
use tokio::sync::watch;

use crate::{Authenticated, Hold, Identity, IdentityError};

/// All agents of one version of the file. Immutable.
#[derive(Default)]
pub struct Identities {
    by_token: HashMap<TokenHash, Arc<Agent>>,
    by_id: HashMap<AgentId, Arc<Agent>>,
    agents: usize,
}

impl Identities {
    /// Parses an identity file.
    ///
    /// # Errors
    /// [`Problems`] with everything that is wrong. A file without the key `agents` is refused, so that a file
    /// that was just truncated does not mean "no agents".
    pub fn parse(file: &[u8]) -> Result<Self, Problems> {
        let text = std::str::from_utf8(file).map_err(|_| yaml::not_utf8())?;
        let root = yaml::parse(text, yaml::Size::Large)?;
        let (identities, report) = walk::walk(&root, Unknown::Fails, |root| {
            let has_key = root.is_declared("agents");
            if !has_key {
                root.refuse("agents", "the key `agents:` with a list, which may be empty");
            }
            agents(root)
        });
        match Problems::new(report.problems) {
            Some(problems) => Err(problems),
            None => Ok(identities),
        }
    }

    /// Returns the agent with the token `token`.
    pub fn lookup(&self, token: &[u8]) -> Option<Authenticated> {
        // The keys of the map are hashes, whose comparison takes constant time. The time of the lookup
        // depends only on a hash, from which no token can be derived.
        let hash = TokenHash::of(token);
        let agent = self.by_token.get(&hash)?;
        Some(Authenticated { agent: Arc::clone(agent), token: hash, hold: Hold::default() })
    }

    /// Whether the token with this hash belongs to `agent`.
    pub fn holds(&self, agent: AgentId, hash: TokenHash) -> bool {
        self.by_token.get(&hash).is_some_and(|holder| holder.id == agent)
    }

    /// Returns the agent with this id.
    pub fn agent(&self, agent: AgentId) -> Option<&Arc<Agent>> {
        self.by_id.get(&agent)
    }

    /// Returns every agent, in any order.
    pub fn agents(&self) -> impl Iterator<Item = &Arc<Agent>> {
        self.by_id.values()
    }

    /// Returns the number of agents.
    pub fn len(&self) -> usize {
        self.agents
    }

    /// Whether there are no agents.
    pub fn is_empty(&self) -> bool {
        self.agents == 0
    }
}

impl fmt::Debug for Identities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identities").field("agents", &self.agents).finish_non_exhaustive()
    }
}

impl Content for Identities {
    type Error = Problems;
    const NAME: &'static str = "identity file";
    const RISK: &'static str = "add agents";

    fn parse(file: &[u8]) -> Result<Self, Problems> {
        Self::parse(file)
    }

    fn entries(&self) -> usize {
        self.agents
    }
}

fn agents(root: &mut Section<'_, '_>) -> Identities {
    let mut numbers = HashMap::new();
    let mut holders = TokenHolders::new("agents", "agent");
    let mut by_token = HashMap::new();
    let mut by_id = HashMap::new();
    let list = root.items("agents", "", |s, i| {
        let id = s.id("id", 1..=i64::MAX).and_then(|id| AgentId::new(id).ok());
        if let Some(id) = id {
            match numbers.entry(id) {
                Entry::Vacant(free) => drop(free.insert(i)),
                Entry::Occupied(other) => {
                    s.refuse("id", format!("an id that agents[{}] does not have", other.get()))
                }
            }
        }
        let rule = "a name of a-z, 0-9 and inner `-`, at most 63 characters";
        let name = s.required("name", "", rule, "");
        if !name.is_empty() && !is_agent_name(&name) {
            s.refuse("name", rule);
        }
        let project_id = s.id("project_id", 1..=i64::MAX);
        let tokens = holders.read(s, i, 1..=2);
        let (id, project_id) = (id?, project_id?);
        let agent = Arc::new(Agent { id, name: name.into(), project_id });
        by_id.insert(id, Arc::clone(&agent));
        by_token.extend(tokens.into_iter().map(|token| (token, Arc::clone(&agent))));
        Some(())
    });
    Identities { by_token, by_id, agents: list.len() }
}

/// The token hashes of all entries of a list, each of which belongs to one entry.
#[derive(Debug)]
pub struct TokenHolders {
    list: &'static str,
    entry: &'static str,
    holders: HashMap<TokenHash, usize>,
}

impl TokenHolders {
    /// For the list `list`, each entry of which is called `entry`.
    pub fn new(list: &'static str, entry: &'static str) -> Self {
        Self { list, entry, holders: HashMap::new() }
    }

    /// Declares the key `tokens` of the entry with the index `i` and returns its hashes. `count` says how
    /// many are allowed; a problem shows no part of a token.
    pub fn read(
        &mut self,
        s: &mut Section<'_, '_>,
        i: usize,
        count: RangeInclusive<usize>,
    ) -> Vec<TokenHash> {
        let texts = s.texts("tokens", &[], "");
        if !s.is_refused("tokens") && !count.contains(&texts.len()) {
            let found =
                if texts.is_empty() { "nothing".to_owned() } else { format!("{} tokens", texts.len()) };
            s.refuse_as("tokens", found, "one token hash, or two while a token is being rotated");
        }
        let mut tokens = Vec::with_capacity(texts.len().min(*count.end()));
        for (n, text) in texts.iter().enumerate() {
            let key = format!("tokens[{n}]");
            let Some(hash) = text.strip_prefix("sha256:").and_then(|hex| hex.parse::<TokenHash>().ok())
            else {
                s.refuse_as(&key, "something else (not shown)", "sha256: and 64 hexadecimal digits");
                continue;
            };
            match self.holders.entry(hash) {
                Entry::Vacant(free) => {
                    free.insert(i);
                    tokens.push(hash);
                }
                Entry::Occupied(other) => {
                    let found = format!("a hash that {}[{}] already has", self.list, other.get());
                    s.refuse_as(&key, found, format!("a different token for each {}", self.entry));
                }
            }
        }
        tokens
    }
}

/// Why an identity file cannot be used at the start. kas does not start then.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be read. It was not changed.
    #[error("cannot read the identity file {path}; set identity.file to a file that this process may read")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is absent and cannot be created.
    #[error(
        "cannot create the identity file {path}; set identity.file, or a state_dir that this process may write"
    )]
    Make {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is not a valid list of agents.
    #[error("the identity file {path} is not valid")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problems.
        source: Problems,
    },
}

/// What to do if there is no identity file at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfAbsent {
    /// Create one without agents and with instructions: for the default path.
    Make,
    /// Refuse to start: for a configured path.
    Refuse,
}

/// The agents of a file, which is reloaded when it changes. Dropping it stops the watcher.
#[derive(Debug)]
pub struct FileIdentity(ReloadedFile<Identities>);

impl FileIdentity {
    /// Reads the file and watches it from then on.
    ///
    /// # Errors
    /// [`OpenError`] if there is no valid file. Later problems are only logged, see the module.
    pub async fn open(path: &Path, if_absent: IfAbsent) -> Result<Self, OpenError> {
        let make = (if_absent == IfAbsent::Make).then(|| -> MakeFile {
            let (file, text) = (path.to_owned(), template(path));
            Box::new(move || create_private(&file, text.as_bytes()).map(drop))
        });
        let opened = ReloadedFile::open(path, make, watch::Sender::new(0)).await;
        let path = || path.to_owned();
        opened.map(Self).map_err(|error| match error {
            reload::OpenError::Make(source) => OpenError::Make { path: path(), source },
            reload::OpenError::Read(source) => OpenError::Read { path: path(), source },
            reload::OpenError::Invalid(source) => OpenError::Invalid { path: path(), source },
        })
    }

    /// Returns the current agents.
    pub fn current(&self) -> Arc<Identities> {
        self.0.current()
    }
}

#[async_trait]
impl Identity for FileIdentity {
    async fn authenticate(
        &self,
        token: &[u8],
        _from: Option<IpAddr>,
    ) -> Result<Authenticated, IdentityError> {
        self.0.load().lookup(token).ok_or(IdentityError::Unknown)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes()
    }

    async fn still_valid(&self, authenticated: &Authenticated) -> bool {
        // An agent that moved to another project must not keep the rights of the old one.
        self.0.load().by_token.get(&authenticated.token) == Some(&authenticated.agent)
    }

    fn agent(&self, agent: AgentId) -> Option<Arc<Agent>> {
        self.0.load().agent(agent).cloned()
    }

    fn agents(&self) -> Vec<Arc<Agent>> {
        self.0.load().agents().cloned().collect()
    }
}

/// Returns the content of a new file. Its last line is the key, so that appending an entry makes a valid
/// file.
fn template(path: &Path) -> String {
    format!(
        "\
# The agents that kas knows. Changes take effect within half a second, without a restart.
#
# To add an agent, append its entry; the command prints the token once, on standard error:
#
#   kasctl token agent --id 1 --name demo --project 1 >> {}
#
# An entry looks like this. A second token is for the time in which tokens are rotated.
#
#   - id: 1
#     name: demo
#     project_id: 1
#     tokens:
#       - sha256:<64 hexadecimal digits: the SHA-256 of the token>
#
# To revoke an agent, remove its entry. Deleting this file revokes nothing.
agents:
",
        path.display()
    )
}

#[cfg(test)]
mod tests;
