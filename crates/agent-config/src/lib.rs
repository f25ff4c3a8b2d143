//! The configuration of agents: read from a local folder or repository, pushed when it changes.
//!
//! One task looks at the files of those agents that have a stream open; a stream itself is a body
//! with a slot for the next message and costs no task. Only the newest configuration waits in the
//! slot: an agent that reads slowly skips those between.

pub mod parse;
mod source;

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::{Body, Frame};
use ids::Agent;
use proto::gitlab::agent::{agent_configuration::rpc::ConfigurationResponse, agentcfg::AgentConfiguration};
use tokio::sync::Notify;

use self::source::{Error, Fingerprint, Source};

/// How often files are looked at: two looks and the reading stay below a second. A look is one
/// `stat` for each agent with an open stream, or one for the whole repository.
const LOOK: Duration = Duration::from_millis(300);

/// Reads configurations and pushes them to the streams that wait for them.
#[derive(Debug)]
pub struct AgentConfigs {
    source: Arc<Source>,
    watched: Mutex<HashMap<Arc<str>, Watched>>,
    look: Notify,
}

#[derive(Debug, Default)]
struct Watched {
    fingerprint: Option<Fingerprint>,
    current: Option<Current>,
    streams: Vec<Weak<ConfigStream>>,
}

/// What the file says now.
#[derive(Debug, Clone)]
enum Current {
    Good {
        commit: String,
        configuration: Box<AgentConfiguration>,
        /// Where the file was looked for, when there is none.
        absent: Option<String>,
    },
    Bad(Status),
}

impl Current {
    fn absent(&self) -> Option<&str> {
        match self {
            Self::Good { absent, .. } => absent.as_deref(),
            Self::Bad(_) => None,
        }
    }
}

impl AgentConfigs {
    /// Reads from what the configuration of kas names.
    pub fn new(config: &kas_config::ConfigurationSource) -> Arc<Self> {
        Arc::new(Self {
            source: Arc::new(Source::new(config)),
            watched: Mutex::default(),
            look: Notify::new(),
        })
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<Arc<str>, Watched>> {
        // A panic between two fields cannot leave them torn: the next look mends each.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream for `agent`, which last saw `commit`.
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
            Some(current) => stream.show(current),
            None => self.look.notify_one(),
        }
        entry.streams.push(Arc::downgrade(&stream));
        stream
    }

    /// Looks at files now rather than a moment later: somebody says that they have changed.
    pub fn look_now(&self) {
        self.look.notify_one();
    }

    /// Looks at files until it is dropped.
    pub async fn run(self: Arc<Self>) {
        if matches!(*self.source, Source::None) {
            return;
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
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
            let source = Arc::clone(&self.source);
            let Ok(changes) = tokio::task::spawn_blocking(move || look(&source, names)).await else {
                tracing::error!("looking at agent configurations panicked");
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
                        "agent configuration is wrong"
                    );
                }
                // 14.1 refuses such an agent; here its file may come later, or never. A repository is read
                // anew with each commit, which is no news.
                if let Some(path) = current.absent()
                    && entry.current.as_ref().and_then(Current::absent) != Some(path)
                {
                    tracing::info!(
                        agent.name = &**name,
                        path,
                        "agent has no configuration file: it is given the defaults"
                    );
                }
                for stream in entry.streams.iter().filter_map(Weak::upgrade) {
                    stream.show(&current);
                }
                entry.current = Some(current);
            }
            // The streams stay open, and the next look tries again: once said is enough.
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

/// Reads what has changed. Blocks.
fn look(source: &Source, names: Vec<(Arc<str>, Option<Fingerprint>)>) -> Vec<Change> {
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

/// One open configuration stream: what the agent is still to be sent.
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
    /// How the stream ends; `None` inside: with OK.
    end: Option<Option<Status>>,
    waker: Option<Waker>,
}

impl ConfigStream {
    fn state(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Makes the body of `stream`.
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
