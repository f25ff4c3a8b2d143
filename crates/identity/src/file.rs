//! Agents that are listed in a file.
//!
//! The file contains SHA-256 hashes of tokens, never tokens. A file with any problem is refused as a whole,
//! because a partial list of identities is worse than the previous one.
//!
//! A changed file takes effect within half a second. If a file becomes invalid or is deleted, the last valid
//! list stays in use and an error is logged: a typing error must not disconnect every agent. To revoke an
//! agent, remove it from the file; deleting the file revokes nothing.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt, io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use ids::{Agent, AgentId, TokenHash, is_agent_name};
use settings::{
    Problems,
    secret::create_private,
    walk::{self, Section, Unknown},
    yaml,
};
use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;

use crate::{Authenticated, Hold, Identity, IdentityError};

/// How often the file's metadata is checked.
///
/// A change is read once two checks in a row agree, so that a file that is being written is left alone. Two
/// checks and reading take well below half a second. A check costs microseconds.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// All agents of one version of the file. Immutable.
#[derive(Default)]
pub struct Identities {
    by_token: HashMap<TokenHash, Arc<Agent>>,
    projects: HashMap<AgentId, i64>,
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

    /// Returns the configuration project of `agent`.
    pub fn project_of(&self, agent: AgentId) -> Option<i64> {
        self.projects.get(&agent).copied()
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

fn agents(root: &mut Section<'_, '_>) -> Identities {
    let mut by_id = HashMap::new();
    let mut holders: HashMap<TokenHash, usize> = HashMap::new();
    let mut by_token = HashMap::new();
    let mut projects = HashMap::new();
    let list = root.items("agents", "", |s, i| {
        let id = s.id("id", 1..=i64::MAX).and_then(|id| AgentId::new(id).ok());
        if let Some(id) = id {
            match by_id.entry(id) {
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
        let texts = s.texts("tokens", &[], "");
        if !s.is_refused("tokens") && !(1..=2).contains(&texts.len()) {
            let found =
                if texts.is_empty() { "nothing".to_owned() } else { format!("{} tokens", texts.len()) };
            s.refuse_as("tokens", found, "one token hash, or two while a token is being rotated");
        }
        let mut tokens = Vec::with_capacity(2);
        for (n, text) in texts.iter().enumerate() {
            let key = format!("tokens[{n}]");
            let Some(hash) = text.strip_prefix("sha256:").and_then(|hex| hex.parse::<TokenHash>().ok())
            else {
                s.refuse_as(&key, "something else (not shown)", "sha256: and 64 hexadecimal digits");
                continue;
            };
            match holders.entry(hash) {
                Entry::Vacant(free) => {
                    free.insert(i);
                    tokens.push(hash);
                }
                Entry::Occupied(other) => {
                    let expected = "a different token for each agent";
                    s.refuse_as(&key, format!("a hash that agents[{}] already has", other.get()), expected);
                }
            }
        }
        let (id, project_id) = (id?, project_id?);
        projects.insert(id, project_id);
        let agent = Arc::new(Agent { id, name: name.into(), project_id });
        by_token.extend(tokens.into_iter().map(|token| (token, Arc::clone(&agent))));
        Some(())
    });
    Identities { by_token, projects, agents: list.len() }
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
pub struct FileIdentity {
    shared: Arc<Shared>,
    _watch: AbortOnDropHandle<()>,
}

struct Shared {
    current: ArcSwap<Identities>,
    version: watch::Sender<u64>,
}

impl FileIdentity {
    /// Reads the file and watches it from then on.
    ///
    /// # Errors
    /// [`OpenError`] if there is no valid file. Later problems are only logged, see the module.
    pub async fn open(path: &Path, if_absent: IfAbsent) -> Result<Self, OpenError> {
        let read_error = |source| OpenError::Read { path: path.to_owned(), source };
        let before = match look(path).await {
            Err(io::ErrorKind::NotFound) if if_absent == IfAbsent::Make => {
                let (file, text) = (path.to_owned(), template(path));
                let made = blocking(move || create_private(&file, text.as_bytes())).await;
                made.map_err(|source| OpenError::Make { path: path.to_owned(), source })?;
                look(path).await
            }
            look => look,
        };
        let file = path.to_owned();
        let content = blocking(move || std::fs::read(file)).await.map_err(read_error)?;
        let digest = TokenHash::of(&content);
        let identities = parse_aside(content)
            .await
            .map_err(read_error)?
            .map_err(|source| OpenError::Invalid { path: path.to_owned(), source })?;
        tracing::info!(path = %path.display(), agents = identities.len(), "identity file read");
        let shared =
            Arc::new(Shared { current: ArcSwap::from_pointee(identities), version: watch::Sender::new(0) });
        // The file may have changed between the check and the reading, so the check counts only as the first
        // of two.
        let mode = before.ok().map(|stamp| stamp.mode);
        let watcher = Watcher { path: path.to_owned(), settled: None, pending: Some(before), digest, mode };
        let watch = tokio::spawn(watcher.run(Arc::clone(&shared)));
        Ok(Self { shared, _watch: AbortOnDropHandle::new(watch) })
    }

    /// Returns the current agents.
    pub fn current(&self) -> Arc<Identities> {
        self.shared.current.load_full()
    }
}

impl fmt::Debug for FileIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FileIdentity").field(&self.shared.current.load()).finish()
    }
}

#[async_trait]
impl Identity for FileIdentity {
    async fn authenticate(
        &self,
        token: &[u8],
        _from: Option<IpAddr>,
    ) -> Result<Authenticated, IdentityError> {
        self.shared.current.load().lookup(token).ok_or(IdentityError::Unknown)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.version.subscribe()
    }

    async fn still_valid(&self, authenticated: &Authenticated) -> bool {
        // An agent that moved to another project must not keep the rights of the old one.
        self.shared.current.load().by_token.get(&authenticated.token) == Some(&authenticated.agent)
    }

    fn project_of(&self, agent: AgentId) -> Option<i64> {
        self.shared.current.load().project_of(agent)
    }
}

/// Metadata of a file that differs if its content may differ.
///
/// The change time detects copies that keep the modification time, and the inode detects replacement. Links
/// are followed, which detects a replaced link of a mounted Kubernetes Secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    mode: u32,
    modified: (i64, i64),
    changed: (i64, i64),
}

async fn look(path: &Path) -> Result<Stamp, io::ErrorKind> {
    let metadata = tokio::fs::metadata(path).await.map_err(|error| error.kind())?;
    Ok(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        mode: metadata.mode(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// Whether users other than the owner could add agents to an identity file with this mode.
pub fn others_may_write(mode: u32) -> bool {
    mode & 0o022 != 0
}

/// Logs a warning for a version of the file. At the start, the check of the configuration warns instead.
fn warn_if_writable(path: &Path, mode: Option<u32>) {
    if let Some(mode) = mode
        && others_may_write(mode)
    {
        tracing::warn!(
            path = %path.display(),
            mode = %format_args!("{:04o}", mode & 0o7777),
            "the identity file is writable by others, who could add agents: use mode 0600 or 0644"
        );
    }
}

struct Watcher {
    path: PathBuf,
    /// The metadata of the content that was parsed last.
    settled: Option<Result<Stamp, io::ErrorKind>>,
    /// Newer metadata that has been seen once.
    pending: Option<Result<Stamp, io::ErrorKind>>,
    /// The hash of the content that was parsed last, valid or not.
    digest: TokenHash,
    /// The mode of the file at that time.
    mode: Option<u32>,
}

impl Watcher {
    async fn run(mut self, shared: Arc<Shared>) {
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.tick(&shared).await;
        }
    }

    async fn tick(&mut self, shared: &Shared) {
        let seen = look(&self.path).await;
        if self.settled == Some(seen) {
            self.pending = None;
            return;
        }
        if self.pending.replace(seen) != Some(seen) {
            return;
        }
        let path = self.path.clone();
        let content = match seen {
            Ok(_) => blocking(move || std::fs::read(path)).await.map_err(|error| error.kind()),
            Err(kind) => Err(kind),
        };
        // The file was written or replaced meanwhile, so the content may be incomplete.
        if look(&self.path).await != seen {
            return;
        }
        self.settled = Some(seen);
        match content {
            Ok(content) => self.judge(content, shared).await,
            Err(kind) => tracing::error!(
                path = %self.path.display(),
                error = %io::Error::from(kind),
                "cannot read the identity file; the last valid version stays in use"
            ),
        }
    }

    async fn judge(&mut self, content: Vec<u8>, shared: &Shared) {
        let digest = TokenHash::of(&content);
        let is_same = std::mem::replace(&mut self.digest, digest) == digest;
        let mode = self.settled.and_then(Result::ok).map(|stamp| stamp.mode);
        if std::mem::replace(&mut self.mode, mode) != mode || !is_same {
            warn_if_writable(&self.path, mode);
        }
        if is_same {
            return;
        }
        match parse_aside(content).await {
            Ok(Ok(identities)) => {
                tracing::info!(path = %self.path.display(), agents = identities.len(), "identity file changed");
                // Publish, then wake: a subscriber that wakes must find the new list.
                shared.current.store(Arc::new(identities));
                shared.version.send_modify(|version| *version += 1);
            }
            Ok(Err(problems)) => tracing::error!(
                path = %self.path.display(),
                %problems,
                "the identity file is invalid; the last valid version stays in use"
            ),
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "identity file was not parsed")
            }
        }
    }
}

/// Parses on a thread for blocking work, as 100,000 agents take a second.
async fn parse_aside(content: Vec<u8>) -> io::Result<Result<Identities, Problems>> {
    blocking(move || Ok(Identities::parse(&content))).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // Only if the parser panicked or the runtime is shutting down.
        Err(error) => Err(io::Error::other(error)),
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
