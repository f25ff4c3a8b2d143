//! The configuration of agents: read from repositories, and sent when it changes. `kas.yaml` beside it is
//! read at the same commit, and is for kas alone.
//!
//! A stream is a body with a slot for the next message and needs no task. Only the newest configuration waits
//! in the slot: an agent that reads slowly skips older ones.
//!
//! `files` checks the files of the agents that have a stream open: a folder or repository on this host.
//! `projects` follows the configuration projects of GitLab instead. `report` tells GitLab the same
//! configurations, so that it knows who may use the agents.

mod files;
mod kas_file;
pub mod kas_yaml;
pub mod parse;
mod projects;
mod report;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use git_sources::Repositories;
use gitlab::AgentConfigurations;
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::{Body, Frame};
use ids::{Agent, AgentId};
use parking_lot::{Mutex, MutexGuard};
use proto::gitlab::agent::{
    agent_configuration::rpc::ConfigurationResponse,
    agentcfg::{AgentConfiguration, ManifestProjectCf},
};
use repository::{
    Commit, Content, Error, Fingerprint, RepoPath, Repository, Revision, bare::Bare, folder::Folder,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

pub use self::kas_file::{KasState, NotKnown};
use self::{
    kas_file::{KasFile, KasRead},
    kas_yaml::KasYaml,
    projects::Projects,
    report::{Found, Reports},
};

/// The version of the configuration of an agent whose repository has no commit.
const NO_COMMIT: &str = "0000000000000000000000000000000000000000";

/// What the version of a configuration ends with whose section `gitops` the agent does not get. It is another
/// version than with that section, so that an agent gets the other one when it is decided anew who applies.
const WITHOUT_GITOPS: &str = "-without-gitops";

/// Reads configurations, sends them to open streams and reports them to GitLab.
#[derive(Debug)]
pub struct AgentConfigs {
    source: Source,
    /// The largest file, in bytes.
    limit: u64,
    watched: Mutex<HashMap<AgentId, Watched>>,
    look: Notify,
    /// Told when something was read of a `kas.yaml` of which nothing was known.
    first_read: watch::Sender<()>,
    reports: Option<Reports>,
}

/// Where the configuration files of agents are.
#[derive(Debug)]
enum Source {
    /// No source is configured: agents get no configuration.
    None,
    /// `agents/<name>/config.yaml` in a folder, or `.gitlab/agents/<name>/config.yaml` at HEAD of a
    /// repository on this host.
    Files { repository: Arc<dyn Repository>, prefix: &'static str },
    /// `.gitlab/agents/<name>/config.yaml` at HEAD of the configuration project of the agent.
    Projects(Projects),
}

/// The path of the file of an agent is this, its name and [`FILE`].
const PREFIX: &str = ".gitlab/agents/";
const PREFIX_OF_FOLDER: &str = "agents/";
const FILE: &str = "/config.yaml";
/// The file beside it that GitLab does not read.
const KAS_FILE: &str = "/kas.yaml";

#[derive(Debug)]
struct Watched {
    name: Arc<str>,
    project: i64,
    fingerprint: Option<Fingerprint>,
    current: Option<Current>,
    /// The last good configuration.
    good: Option<Latest>,
    /// The last attempt to read the file failed.
    is_failing: bool,
    kas: KasFile,
    streams: Vec<Weak<ConfigStream>>,
    /// Streams of agents that have another commit than this replica: it may be a newer one.
    unconfirmed: Vec<Weak<ConfigStream>>,
}

impl Watched {
    /// Whether an agent has a stream open. Forgets those that have ended.
    fn is_open(&mut self) -> bool {
        self.streams.retain(|stream| stream.strong_count() > 0);
        self.unconfirmed.retain(|stream| stream.strong_count() > 0);
        !self.streams.is_empty() || !self.unconfirmed.is_empty()
    }
}

/// The last good configuration of an agent.
#[derive(Debug, Clone)]
pub struct Latest {
    /// The version of its file, as agents get it: of a repository, the commit.
    pub commit: Arc<str>,
    /// What the file says.
    pub configuration: Arc<AgentConfiguration>,
}

/// What of its configuration an agent gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// All of it.
    #[default]
    All,
    /// All but `gitops`: somebody else applies its manifests, or nobody does.
    WithoutGitops,
}

/// The current state of a file.
#[derive(Debug, Clone)]
enum Current {
    Good {
        commit: String,
        configuration: Box<AgentConfiguration>,
        /// The keys of the file as JSON, if they are reported.
        json: Option<Arc<str>>,
        /// Where a missing file was expected.
        absent: Option<String>,
    },
    Bad(Status),
}

impl Current {
    fn commit(&self) -> Option<&str> {
        match self {
            Self::Good { commit, .. } => Some(commit),
            Self::Bad(_) => None,
        }
    }

    fn absent(&self) -> Option<&str> {
        match self {
            Self::Good { absent, .. } => absent.as_deref(),
            Self::Bad(_) => None,
        }
    }
}

impl AgentConfigs {
    /// Returns a reader of the source that the configuration of kas names. Without one, the files are in the
    /// configuration projects of agents, if `repositories` has those of GitLab. `gitlab` is told about
    /// configurations.
    pub fn new(
        config: &kas_config::ConfigurationSource,
        repositories: &Arc<Repositories>,
        gitlab: Option<Arc<dyn AgentConfigurations>>,
    ) -> Arc<Self> {
        let source = match &config.source {
            kas_config::Source::Folder(root) => {
                Source::Files { repository: Arc::new(Folder::new(root)), prefix: PREFIX_OF_FOLDER }
            }
            kas_config::Source::Git(path) => {
                Source::Files { repository: Arc::new(Bare::new(path, None)), prefix: PREFIX }
            }
            kas_config::Source::None if repositories.has_projects() => {
                Source::Projects(Projects::new(Arc::clone(repositories), config.poll_period))
            }
            kas_config::Source::None => Source::None,
        };
        Arc::new(Self {
            source,
            limit: config.max_file_size.into(),
            watched: Mutex::default(),
            look: Notify::new(),
            first_read: watch::Sender::new(()),
            reports: gitlab.map(Reports::new),
        })
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<AgentId, Watched>> {
        self.watched.lock()
    }

    /// Opens a stream for `agent`, which last received `commit`.
    pub fn subscribe(&self, agent: &Arc<Agent>, commit: &str, shown: Shown) -> Arc<ConfigStream> {
        let mut watched = self.watched();
        let ended = match &self.source {
            Source::Projects(projects) => Some(projects.add(agent.project_id, agent.id)),
            Source::None | Source::Files { .. } => None,
        };
        let stream = Arc::new(ConfigStream {
            agent: Arc::clone(agent),
            shown,
            state: Mutex::new(StreamState { seen: commit.to_owned(), next: None, end: None, waker: None }),
            ended,
            since: Instant::now(),
        });
        if matches!(self.source, Source::None) {
            return stream;
        }
        let entry = watched.entry(agent.id).or_insert_with(|| Watched {
            name: Arc::clone(&agent.name),
            project: agent.project_id,
            fingerprint: None,
            current: None,
            good: None,
            is_failing: false,
            kas: KasFile::default(),
            streams: Vec::new(),
            unconfirmed: Vec::new(),
        });
        if entry.name != agent.name || entry.project != agent.project_id {
            // What was read is of another file.
            (entry.fingerprint, entry.current, entry.good) = (None, None, None);
            entry.kas = KasFile::default();
            (entry.name, entry.project) = (Arc::clone(&agent.name), agent.project_id);
        }
        // Another replica may have sent a newer commit than this one knows. The repository is checked first,
        // so that none sends an agent back.
        let known = commit.strip_suffix(WITHOUT_GITOPS).unwrap_or(commit);
        let is_other = entry.current.as_ref().and_then(Current::commit) != Some(known);
        match &entry.current {
            _ if stream.ended.is_some() && !commit.is_empty() && is_other => {
                entry.unconfirmed.push(Arc::downgrade(&stream));
            }
            current => {
                if let Some(current) = current {
                    stream.show(current);
                    if let (Some(reports), Current::Good { .. }) = (&self.reports, current) {
                        reports.known(agent.id);
                    }
                }
                entry.streams.push(Arc::downgrade(&stream));
            }
        }
        drop(watched);
        if let Some(changed) = &stream.ended {
            changed.notify_one();
        }
        self.look.notify_one();
        stream
    }

    /// Returns the last good configuration of an agent that has a stream open here. `None`: it is not known.
    pub fn latest(&self, agent: &Agent) -> Option<Latest> {
        self.watched().get(&agent.id)?.good.clone()
    }

    /// Returns what `kas.yaml` of an agent says that has a stream open here. Of a file that the repository
    /// does not have, the defaults are known.
    ///
    /// # Errors
    /// Why it is not known.
    pub fn kas_yaml(&self, agent: &Agent) -> Result<KasState, NotKnown> {
        let watched = self.watched();
        let Some(entry) = watched.get(&agent.id) else { return Err(NotKnown::NotHere) };
        entry.kas.known().cloned()
    }

    /// Wakes when something was read of a `kas.yaml` that was [`NotKnown::NotYet`], or cannot be read.
    pub fn first_reads(&self) -> watch::Receiver<()> {
        self.first_read.subscribe()
    }

    /// Returns the manifest projects of an agent, and its `kas.yaml`, as far as both are in force. While the
    /// current `kas.yaml` is wrong, the last good one is, for the projects that were there with it: it says
    /// nothing of others, and without it they would have all rights of agentk. `None`: nothing is applied.
    pub fn manifests(&self, agent: &Agent) -> Option<(Vec<ManifestProjectCf>, Arc<KasYaml>)> {
        let watched = self.watched();
        let entry = watched.get(&agent.id)?;
        let (latest, file) = (entry.good.as_ref()?, entry.kas.state.good.clone()?);
        let projects = latest.configuration.gitops.iter().flat_map(|gitops| &gitops.manifest_projects);
        let is_new = |project: &&ManifestProjectCf| !entry.kas.covered.contains(&project.id);
        let is_flawed = entry.kas.state.flaw.is_some();
        Some((projects.filter(|project| !(is_flawed && is_new(project))).cloned().collect(), file))
    }

    /// Reads `kas.yaml` of an agent that has no stream open here. Without a source of configurations, there
    /// is no such file.
    ///
    /// # Errors
    /// [`NotKnown::NotHere`] if it is in a project of GitLab, which is read only for agents with streams;
    /// [`NotKnown::Unreadable`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn read_kas_yaml(&self, agent: &Agent) -> Result<KasState, NotKnown> {
        let (repository, prefix) = match &self.source {
            Source::None => return Ok(KasState::of(Ok(KasYaml::default()))),
            Source::Files { repository, prefix } => (repository, prefix),
            Source::Projects(_) => return Err(NotKnown::NotHere),
        };
        let read = async {
            let path = kas_path_of(prefix, &agent.name)?;
            let file = repository.file(&Revision::Head, &path, self.limit).await?;
            Ok(parsed_kas_yaml(file.content, &repository.shown(&path)))
        };
        read.await.map(KasState::of).map_err(|error: Error| {
            tracing::debug!(agent.id = agent.id.get(), %error, "kas.yaml of an agent cannot be read");
            NotKnown::of(&error)
        })
    }

    /// Checks files on this host now instead of at the next interval, because a notice says that they have
    /// changed.
    pub fn look_now(&self) {
        self.look.notify_one();
    }

    /// Reads files and reports to GitLab until it is dropped.
    pub async fn run(self: Arc<Self>) {
        let this = &self;
        let read = async move {
            match &this.source {
                Source::None => {}
                Source::Files { repository, prefix } => this.check_files(&**repository, prefix).await,
                Source::Projects(projects) => this.follow_projects(projects).await,
            }
        };
        match &self.reports {
            None => read.await,
            Some(reports) => {
                tokio::join!(read, reports.run(|agent| self.to_report(agent)));
            }
        }
    }

    /// Returns what GitLab must know of an agent.
    fn to_report(&self, agent: AgentId) -> Found {
        let mut watched = self.watched();
        let Some(entry) = watched.get_mut(&agent) else { return Found::Gone };
        if !entry.is_open() {
            return Found::Gone;
        }
        match &entry.current {
            Some(Current::Good { json: Some(json), .. }) => Found::Good(Arc::clone(json)),
            // GitLab keeps the last good one.
            _ => Found::Bad,
        }
    }

    /// Shows what was read of the file of an agent: what is there now, or why that is not known.
    fn publish(&self, agent: AgentId, fingerprint: Fingerprint, current: Result<Current, Error>) {
        if let Some(entry) = self.watched().get_mut(&agent) {
            self.show(agent, entry, fingerprint, current);
            entry.kas.cover(agent, entry.good.as_ref());
        }
    }

    /// As [`publish`](Self::publish), together with what was read of `kas.yaml`: what was committed together
    /// becomes effective together.
    fn publish_both(
        &self,
        agent: AgentId,
        kas: KasRead,
        fingerprint: Fingerprint,
        current: Result<Current, Error>,
    ) {
        if let Some(entry) = self.watched().get_mut(&agent) {
            self.note(agent, &mut entry.kas, kas);
            self.show(agent, entry, fingerprint, current);
            entry.kas.cover(agent, entry.good.as_ref());
        }
    }

    /// Keeps what was read of `kas.yaml` of an agent.
    fn publish_kas_yaml(&self, agent: AgentId, kas: KasRead) {
        if let Some(entry) = self.watched().get_mut(&agent) {
            self.note(agent, &mut entry.kas, kas);
            entry.kas.cover(agent, entry.good.as_ref());
        }
    }

    fn note(&self, agent: AgentId, file: &mut KasFile, read: KasRead) {
        let is_first = matches!(file.known(), Err(NotKnown::NotYet));
        file.note(agent, read);
        if is_first {
            self.first_read.send_replace(());
        }
    }

    /// The files of these agents cannot be read, as the log has it already. What is known of them stays.
    fn cannot_read(&self, agents: impl IntoIterator<Item = AgentId>, error: &Error) {
        let mut watched = self.watched();
        for agent in agents {
            if let Some(entry) = watched.get_mut(&agent) {
                entry.kas.cannot_read(error);
            }
        }
        drop(watched);
        self.first_read.send_replace(());
    }

    fn show(
        &self,
        agent: AgentId,
        entry: &mut Watched,
        fingerprint: Fingerprint,
        current: Result<Current, Error>,
    ) {
        match current {
            Ok(current) => {
                (entry.fingerprint, entry.is_failing) = (Some(fingerprint), false);
                if let Current::Bad(status) = &current {
                    tracing::info!(
                        agent.name = &*entry.name,
                        error = status.message(),
                        "agent configuration is invalid"
                    );
                }
                // 14.1 refuses such an agent. Here its file may be added later, or never. A repository is
                // read again with each commit, and the message is not repeated then.
                if let Some(path) = current.absent()
                    && entry.current.as_ref().and_then(Current::absent) != Some(path)
                {
                    tracing::info!(
                        agent.name = &*entry.name,
                        path,
                        "agent has no configuration file: it gets the defaults"
                    );
                }
                let before = entry.current.as_ref().and_then(Current::commit);
                let is_new = current.commit().is_some_and(|commit| before != Some(commit));
                for stream in entry.streams.iter().filter_map(Weak::upgrade) {
                    stream.show(&current);
                }
                if let Some(reports) = self.reports.as_ref().filter(|_| is_new) {
                    reports.changed(agent);
                }
                if let Current::Good { commit, configuration, .. } = &current {
                    let configuration = Arc::new((**configuration).clone());
                    entry.good = Some(Latest { commit: commit.as_str().into(), configuration });
                }
                entry.current = Some(current);
            }
            // The streams stay open, and the next check tries again. The error is logged once.
            Err(error) => {
                if !std::mem::replace(&mut entry.is_failing, true) {
                    tracing::warn!(agent.name = &*entry.name, %error, "agent configuration cannot be read");
                }
                entry.fingerprint = None;
            }
        }
    }

    /// Parses what was read at `path` of a repository in the version `commit`.
    fn parsed(
        &self,
        name: &str,
        commit: String,
        content: Content,
        shown: &str,
        place: impl FnOnce() -> String,
    ) -> Current {
        let mut absent = None;
        let content = match content {
            Content::Absent => {
                absent = Some(place());
                Bytes::new()
            }
            content => match content.into_data(shown) {
                Ok(data) => data,
                Err(error) => {
                    return Current::Bad(Status::new(
                        Code::FailedPrecondition,
                        format!("Config: agent configuration file: {error}"),
                    ));
                }
            },
        };
        match parse::parse(&content) {
            Ok(parsed) => {
                for warning in &parsed.warnings {
                    tracing::info!(agent.name = name, warning = %warning, "agent configuration");
                }
                let json = || serde_json::Value::Object(parsed.keys).to_string().into();
                Current::Good {
                    commit,
                    configuration: Box::new(parsed.configuration),
                    json: self.reports.is_some().then(json),
                    absent,
                }
            }
            Err(error) => Current::Bad(Status::new(Code::FailedPrecondition, error.to_string())),
        }
    }
}

/// Parses what was read of a file; an absent one has the defaults.
fn parsed_kas_yaml(content: Content, shown: &str) -> Result<KasYaml, String> {
    match content {
        Content::Absent => Ok(KasYaml::default()),
        content => kas_yaml::parse(&content.into_data(shown).map_err(|error| error.to_string())?),
    }
}

/// Returns the path of the file of an agent.
fn path_of(prefix: &str, name: &str) -> Result<RepoPath, Error> {
    // Names are checked by the identity: they contain no separators or dots.
    RepoPath::new(format!("{prefix}{name}{FILE}")).map_err(|error| Error::User(error.to_string()))
}

/// Returns the path of `kas.yaml` of an agent.
fn kas_path_of(prefix: &str, name: &str) -> Result<RepoPath, Error> {
    RepoPath::new(format!("{prefix}{name}{KAS_FILE}")).map_err(|error| Error::User(error.to_string()))
}

fn version(commit: Option<Commit>) -> String {
    commit.map_or_else(|| NO_COMMIT.to_owned(), |commit| commit.to_string())
}

/// One open configuration stream and what remains to be sent.
#[derive(Debug)]
pub struct ConfigStream {
    agent: Arc<Agent>,
    shown: Shown,
    state: Mutex<StreamState>,
    /// Told when the stream ends.
    ended: Option<Arc<Notify>>,
    /// When it was opened.
    since: Instant,
}

impl Drop for ConfigStream {
    fn drop(&mut self) {
        if let Some(ended) = &self.ended {
            ended.notify_one();
        }
    }
}

#[derive(Debug)]
struct StreamState {
    /// The commit that the agent has, or will have.
    seen: String,
    next: Option<Bytes>,
    /// How the stream ends; the inner `None` means OK.
    end: Option<Option<Status>>,
    waker: Option<Waker>,
}

impl ConfigStream {
    fn state(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock()
    }

    /// Ends the stream: with OK, which means "call again now", or with a status.
    pub fn end(&self, status: Option<Status>) {
        let mut state = self.state();
        state.end.get_or_insert(status);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }

    fn show(&self, current: &Current) {
        let mut state = self.state();
        match current {
            Current::Good { commit, configuration, .. } => {
                let gitops = configuration.gitops.as_ref();
                let is_cut = self.shown == Shown::WithoutGitops
                    && gitops.is_some_and(|gitops| !gitops.manifest_projects.is_empty());
                let version = format!("{commit}{}", if is_cut { WITHOUT_GITOPS } else { "" });
                if version == state.seen {
                    return;
                }
                let mut configuration = AgentConfiguration {
                    agent_id: self.agent.id.get(),
                    project_id: self.agent.project_id,
                    ..(**configuration).clone()
                };
                if self.shown == Shown::WithoutGitops {
                    configuration.gitops = None;
                }
                let configuration = Some(configuration);
                state.seen.clone_from(&version);
                let message = ConfigurationResponse { configuration, commit_id: version };
                state.next = Some(grpc::encode(&message));
            }
            Current::Bad(status) => {
                state.end.get_or_insert(Some(status.clone()));
            }
        }
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

/// The response body of `GetConfiguration`. `guard` is dropped with it.
#[derive(Debug)]
pub struct ConfigBody<G> {
    stream: Arc<ConfigStream>,
    done: bool,
    _guard: G,
}

impl<G> ConfigBody<G> {
    /// Returns the body of `stream`.
    pub fn new(stream: Arc<ConfigStream>, guard: G) -> Self {
        Self { stream, done: false, _guard: guard }
    }
}

impl<G: Unpin> Body for ConfigBody<G> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.done {
            return Poll::Ready(None);
        }
        let mut state = self.stream.state();
        if let Some(message) = state.next.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        let Some(end) = state.end.take() else {
            state.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        drop(state);
        self.done = true;
        let mut trailers = HeaderMap::with_capacity(2);
        match end {
            None => Status::write_ok(&mut trailers),
            Some(status) => status.write_to(&mut trailers),
        }
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}
