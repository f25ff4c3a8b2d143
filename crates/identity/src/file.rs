//! The agents of a file.
//!
//! The file holds SHA-256 hashes of tokens, never tokens. It is judged whole: a file with one slip is
//! refused, because half a list of identities is worse than the list of a minute ago.
//!
//! A changed file takes effect within half a second. A file that becomes broken or is deleted keeps the last
//! good list in force, with an error in the log: dropping every agent because of a slip would turn an
//! operator's typing error into an outage. So to revoke an agent, remove it from the file; removing the file
//! revokes nothing.

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

/// How often the file's metadata is looked at.
///
/// A change is read once two looks in a row agree, so that a file that is being written is left
/// alone; two looks and the reading stay well below half a second. A look costs microseconds.
const LOOK: Duration = Duration::from_millis(100);

/// All agents of one version of the file; never changes.
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
    /// [`Problems`] with everything that is wrong; a file without the key `agents` is refused, so
    /// that one which was just truncated does not mean "no agents".
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

    /// Returns the agent that holds `token`.
    pub fn lookup(&self, token: &[u8]) -> Option<Authenticated> {
        // The map is keyed by the hash, whose equality takes constant time; what the lookup's time
        // tells is about a hash, from which no token can be found.
        let hash = TokenHash::of(token);
        let agent = self.by_token.get(&hash)?;
        Some(Authenticated { agent: Arc::clone(agent), token: hash, hold: Hold::default() })
    }

    /// Whether `agent` holds the token with this hash.
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

    /// Whether there is no agent.
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
            s.refuse_as("tokens", found, "one token hash, or two while a token is being exchanged");
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
                    let expected = "a token of its own for every agent";
                    s.refuse_as(&key, format!("a hash that agents[{}] has already", other.get()), expected);
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

/// Why an identity file cannot be used at the start; kas does not start then.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be read. Nothing was changed.
    #[error("cannot read the identity file {path}; set identity.file to a file that this process may read")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is absent and cannot be made.
    #[error(
        "cannot make the identity file {path}; set identity.file, or a state_dir that this process may write"
    )]
    Make {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not a valid list of agents.
    #[error("the identity file {path} is not valid")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Problems,
    },
}

/// What to do when there is no identity file at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfAbsent {
    /// Make one with no agents that explains how to add one: right for the default path.
    Make,
    /// Refuse to start: right for a path that somebody chose.
    Refuse,
}

/// The agents of a file, reloaded when it changes. Dropping it ends the watching.
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
    /// [`OpenError`] when there is no valid file; later changes never fail, see the module.
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
        // The file may have changed between the look and the reading, so that the look only counts
        // as the first of two.
        let mode = before.ok().map(|stamp| stamp.mode);
        let watcher = Watcher { path: path.to_owned(), settled: None, pending: Some(before), digest, mode };
        let watch = tokio::spawn(watcher.run(Arc::clone(&shared)));
        Ok(Self { shared, _watch: AbortOnDropHandle::new(watch) })
    }

    /// Returns the agents as of now.
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
        // An agent that moved to another project must not go on with the rights of the old one.
        self.shared.current.load().by_token.get(&authenticated.token) == Some(&authenticated.agent)
    }

    fn project_of(&self, agent: AgentId) -> Option<i64> {
        self.shared.current.load().project_of(agent)
    }
}

/// What the metadata of a file says; differs whenever its content may differ.
///
/// The change time catches copies that keep the modification time, the inode catches replacement,
/// and following links catches the switched links of a mounted Kubernetes Secret.
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

/// Whether others than the owner could add agents to an identity file with this mode.
pub fn others_may_write(mode: u32) -> bool {
    mode & 0o022 != 0
}

/// Says it of a version of the file. The check of the configuration says it of the first, at the start.
fn warn_if_writable(path: &Path, mode: Option<u32>) {
    if let Some(mode) = mode
        && others_may_write(mode)
    {
        tracing::warn!(
            path = %path.display(),
            mode = %format_args!("{:04o}", mode & 0o7777),
            "others may write the identity file and so add agents, use mode 0600 or 0644"
        );
    }
}

struct Watcher {
    path: PathBuf,
    /// The look whose content has been judged.
    settled: Option<Result<Stamp, io::ErrorKind>>,
    /// A newer look, seen once.
    pending: Option<Result<Stamp, io::ErrorKind>>,
    /// Of the last content that was judged, good or not.
    digest: TokenHash,
    /// Of the file then.
    mode: Option<u32>,
}

impl Watcher {
    async fn run(mut self, shared: Arc<Shared>) {
        let mut ticks = tokio::time::interval(LOOK);
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
        // Written to or replaced meanwhile: what was read may be half of it.
        if look(&self.path).await != seen {
            return;
        }
        self.settled = Some(seen);
        match content {
            Ok(content) => self.judge(content, shared).await,
            Err(kind) => tracing::error!(
                path = %self.path.display(),
                error = %io::Error::from(kind),
                "identity file cannot be read, the last good one stays in force"
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
                // Publish, then wake: whoever wakes finds the new list.
                shared.current.store(Arc::new(identities));
                shared.version.send_modify(|version| *version += 1);
            }
            Ok(Err(problems)) => tracing::error!(
                path = %self.path.display(),
                %problems,
                "identity file is not valid, the last good one stays in force"
            ),
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "identity file was not parsed")
            }
        }
    }
}

/// Parses on a thread for blocking work: 100,000 agents take a second.
async fn parse_aside(content: Vec<u8>) -> io::Result<Result<Identities, Problems>> {
    blocking(move || Ok(Identities::parse(&content))).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // Only when the work panicked or the runtime is going down.
        Err(error) => Err(io::Error::other(error)),
    }
}

/// What a new file says. Its last line is the key, so that appending an entry makes a valid file.
fn template(path: &Path) -> String {
    format!(
        "\
# The agents that kas knows. Changes take effect within half a second, without a restart.
#
# To add an agent, append its entry; the command prints the token once, on standard error:
#
#   kasctl token agent --id 1 --name demo --project 1 >> {}
#
# An entry looks like this. Two tokens are for the time in which one is exchanged.
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
