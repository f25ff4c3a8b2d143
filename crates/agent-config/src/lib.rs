//! The configuration of agents: read from a local folder or repository, and sent when it changes.
//!
//! One task checks the files of the agents that have a stream open. A stream is a body with a slot for the
//! next message and needs no task. Only the newest configuration waits in the slot: an agent that reads
//! slowly skips older ones.
//!
//! `report` tells GitLab the same configurations, so that it knows who may use the agents.

pub mod kas_yaml;
pub mod parse;
mod report;
mod source;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use gitlab::AgentConfigurations;
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::{Body, Frame};
use ids::{Agent, AgentId};
use parking_lot::{Mutex, MutexGuard};
use proto::gitlab::agent::{agent_configuration::rpc::ConfigurationResponse, agentcfg::AgentConfiguration};
use tokio::sync::Notify;

use self::{
    report::{Found, Reports},
    source::{Error, Fingerprint, Source},
};

/// How often files are checked: two checks and reading take less than a second. A check is one `stat` for
/// each agent with an open stream, or one for the whole repository.
const CHECK_INTERVAL: Duration = Duration::from_millis(300);

/// Reads configurations, sends them to open streams and reports them to GitLab.
#[derive(Debug)]
pub struct AgentConfigs {
    source: Arc<Source>,
    watched: Mutex<HashMap<Arc<str>, Watched>>,
    look: Notify,
    reports: Option<Reports>,
}

#[derive(Debug, Default)]
struct Watched {
    fingerprint: Option<Fingerprint>,
    current: Option<Current>,
    /// The last good configuration.
    good: Option<Arc<AgentConfiguration>>,
    streams: Vec<Weak<ConfigStream>>,
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
    /// Returns a reader of the source that the configuration of kas names. `gitlab` is told about
    /// configurations.
    pub fn new(
        config: &kas_config::ConfigurationSource,
        gitlab: Option<Arc<dyn AgentConfigurations>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            source: Arc::new(Source::new(config)),
            watched: Mutex::default(),
            look: Notify::new(),
            reports: gitlab.map(Reports::new),
        })
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<Arc<str>, Watched>> {
        self.watched.lock()
    }

    /// Opens a stream for `agent`, which last received `commit`.
    pub fn subscribe(&self, agent: &Arc<Agent>, commit: &str) -> Arc<ConfigStream> {
        let stream = Arc::new(ConfigStream {
            agent: Arc::clone(agent),
            state: Mutex::new(StreamState { seen: commit.to_owned(), next: None, end: None, waker: None }),
        });
        if matches!(*self.source, Source::None) {
            return stream;
        }
        let mut watched = self.watched();
        let entry = watched.entry(Arc::clone(&agent.name)).or_default();
        match &entry.current {
            Some(current) => {
                stream.show(current);
                if let (Some(reports), Current::Good { .. }) = (&self.reports, current) {
                    reports.known(agent.id, &agent.name);
                }
            }
            None => self.look.notify_one(),
        }
        entry.streams.push(Arc::downgrade(&stream));
        stream
    }

    /// Returns the last good configuration of an agent that has a stream open here. `None`: it is not known.
    pub fn latest(&self, agent: &Agent) -> Option<Arc<AgentConfiguration>> {
        self.watched().get(&agent.name)?.good.clone()
    }

    /// Checks files now instead of at the next interval, because a notice says that they have changed.
    pub fn look_now(&self) {
        self.look.notify_one();
    }

    /// Checks files and reports to GitLab until it is dropped.
    pub async fn run(self: Arc<Self>) {
        if matches!(*self.source, Source::None) {
            return;
        }
        match &self.reports {
            None => self.check_files().await,
            Some(reports) => {
                tokio::join!(self.check_files(), reports.run(|agent, name| self.to_report(agent, name)));
            }
        }
    }

    /// Returns what GitLab must know of an agent.
    fn to_report(&self, agent: AgentId, name: &str) -> Found {
        let watched = self.watched();
        let Some(entry) = watched.get(name) else { return Found::Gone };
        if !entry.streams.iter().filter_map(Weak::upgrade).any(|stream| stream.agent.id == agent) {
            return Found::Gone;
        }
        match &entry.current {
            Some(Current::Good { json: Some(json), .. }) => Found::Good(Arc::clone(json)),
            // GitLab keeps the last good one.
            _ => Found::Bad,
        }
    }

    async fn check_files(&self) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = self.look.notified() => {}
            }
            let names: Vec<(Arc<str>, Option<Fingerprint>)> = {
                let mut watched = self.watched();
                watched.retain(|_, entry| {
                    entry.streams.retain(|stream| stream.strong_count() > 0);
                    !entry.streams.is_empty()
                });
                watched.iter().map(|(name, entry)| (Arc::clone(name), entry.fingerprint.clone())).collect()
            };
            if names.is_empty() {
                continue;
            }
            let (source, reported) = (Arc::clone(&self.source), self.reports.is_some());
            let Ok(changes) = tokio::task::spawn_blocking(move || look(&source, names, reported)).await
            else {
                tracing::error!("checking agent configurations panicked");
                continue;
            };
            for (name, fingerprint, current) in changes {
                self.publish(&name, fingerprint, current);
            }
        }
    }

    fn publish(&self, name: &Arc<str>, fingerprint: Fingerprint, current: Result<Current, String>) {
        let mut watched = self.watched();
        let Some(entry) = watched.get_mut(name) else { return };
        match current {
            Ok(current) => {
                entry.fingerprint = Some(fingerprint);
                if let Current::Bad(status) = &current {
                    tracing::info!(
                        agent.name = &**name,
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
                        agent.name = &**name,
                        path,
                        "agent has no configuration file: it gets the defaults"
                    );
                }
                let before = entry.current.as_ref().and_then(Current::commit);
                let is_new = current.commit().is_some_and(|commit| before != Some(commit));
                for stream in entry.streams.iter().filter_map(Weak::upgrade) {
                    stream.show(&current);
                    if let Some(reports) = self.reports.as_ref().filter(|_| is_new) {
                        reports.changed(stream.agent.id, name);
                    }
                }
                if let Current::Good { configuration, .. } = &current {
                    entry.good = Some(Arc::new((**configuration).clone()));
                }
                entry.current = Some(current);
            }
            // The streams stay open, and the next check tries again. The error is logged once.
            Err(error) => {
                if entry.fingerprint.as_ref() != Some(&Fingerprint::Unknown) {
                    tracing::warn!(agent.name = &**name, error, "agent configuration cannot be read");
                }
                entry.fingerprint = Some(Fingerprint::Unknown);
            }
        }
    }
}

type Change = (Arc<str>, Fingerprint, Result<Current, String>);

/// Reads the files that have changed. `reported`: with their keys as JSON. Blocks.
fn look(source: &Source, names: Vec<(Arc<str>, Option<Fingerprint>)>, reported: bool) -> Vec<Change> {
    let shared = source.is_repository().then(|| source.fingerprint(""));
    let mut changes = Vec::new();
    for (name, before) in names {
        let now = shared.clone().unwrap_or_else(|| source.fingerprint(&name));
        if before.as_ref() == Some(&now) && now != Fingerprint::Unknown {
            continue;
        }
        let current = match source.read(&name) {
            Ok(file) => match parse::parse(&file.content) {
                Ok(parsed) => {
                    for warning in &parsed.warnings {
                        tracing::info!(agent.name = &*name, warning = %warning, "agent configuration");
                    }
                    Ok(Current::Good {
                        commit: file.commit,
                        configuration: Box::new(parsed.configuration),
                        json: reported.then(|| serde_json::Value::Object(parsed.keys).to_string().into()),
                        absent: file.absent,
                    })
                }
                Err(error) => Ok(Current::Bad(Status::new(Code::FailedPrecondition, error.to_string()))),
            },
            Err(Error::User(reason)) => Ok(Current::Bad(Status::new(
                Code::FailedPrecondition,
                format!("Config: agent configuration file: {reason}"),
            ))),
            Err(Error::Backend(reason)) => Err(reason),
        };
        changes.push((name, now, current));
    }
    changes
}

/// One open configuration stream and what remains to be sent.
#[derive(Debug)]
pub struct ConfigStream {
    agent: Arc<Agent>,
    state: Mutex<StreamState>,
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
            Current::Good { commit, .. } if *commit == state.seen => return,
            Current::Good { commit, configuration, .. } => {
                let message = ConfigurationResponse {
                    configuration: Some(AgentConfiguration {
                        agent_id: self.agent.id.get(),
                        project_id: self.agent.project_id,
                        ..(**configuration).clone()
                    }),
                    commit_id: commit.clone(),
                };
                state.seen.clone_from(commit);
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
