//! `GitLabFlux/ReconcileProjects`: tells agents with Flux which projects have a new commit.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use git_sources::access::{Access, Refused, VerifyProject};
use gitlab::usage::Usage;
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::StreamBody;
use identity::jwt;
use process::lifecycle::Phase;
use proto::gitlab::agent::flux::rpc::{Project, ReconcileProjectsRequest, ReconcileProjectsResponse};
use secrecy::{ExposeSecret as _, SecretSlice};
use tokio::{
    sync::{broadcast, watch},
    time::Instant,
};

use super::agent::{AgentCall, AgentService, Answered, CallContext, ServiceAnswer};
use crate::pushes::{Push, Pushes};

const RECONCILE: &str = "/gitlab.agent.flux.rpc.GitLabFlux/ReconcileProjects";
/// The most projects of a call.
const MOST: usize = 500;
/// How long a call lasts; up to a twentieth more or less, so that not all agents call again at once.
const POLL: Duration = Duration::from_secs(810);
/// The shortest time between two messages about a project.
const SHORTEST: Duration = Duration::from_secs(1);

/// Tells agents of pushes.
#[derive(Debug)]
pub struct Flux {
    pushes: Arc<Pushes>,
    access: Arc<Access<VerifyProject>>,
    phase: watch::Receiver<Phase>,
    /// `None`: usage is not reported.
    usage: Option<Arc<Usage>>,
}

impl Flux {
    /// Returns a service. Calls end when `phase` says that the process leaves.
    pub fn new(
        pushes: Arc<Pushes>,
        access: Arc<Access<VerifyProject>>,
        phase: watch::Receiver<Phase>,
        usage: Option<Arc<Usage>>,
    ) -> Self {
        Self { pushes, access, phase, usage }
    }

    async fn begin(self: Arc<Self>, call: AgentCall) -> Result<Answered, Status> {
        let token = jwt::bearer(&call.headers)?.to_vec().into();
        let (context, request) = call.message::<ReconcileProjectsRequest>().await?;
        if request.project.len() > MOST {
            let text = format!("at most {MOST} projects are accepted, got {}", request.project.len());
            return Err(Status::new(Code::InvalidArgument, text));
        }
        let projects = request.project.into_iter().map(|project| (project.id, Told::default())).collect();
        let jitter = 0.95 + rand::random::<f64>() / 10.0;
        let call = Call {
            pushes: self.pushes.subscribe(),
            service: self,
            context,
            token,
            projects,
            until: Instant::now() + POLL.mul_f64(jitter),
            is_done: false,
        };
        let frames = stream::unfold(call, |mut call| async move {
            let frame = call.next().await?;
            Some((Ok::<_, BoxError>(frame), call))
        });
        Ok(grpc::boxed(StreamBody::new(frames)).into())
    }
}

impl AgentService for Flux {
    fn paths(&self) -> &'static [&'static str] {
        &[RECONCILE]
    }

    fn call(self: Arc<Self>, _path: &str, call: AgentCall) -> ServiceAnswer {
        Box::pin(self.begin(call))
    }
}

/// What an agent was told of a project.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    at: Option<Instant>,
    /// It is told again at this time, because of a push soon after that.
    due: Option<Instant>,
    /// The id of the project, once a push has told it.
    project: Option<i64>,
}

/// One call of an agent.
struct Call {
    service: Arc<Flux>,
    context: CallContext,
    token: SecretSlice<u8>,
    /// The projects that the agent follows, by their full paths.
    projects: HashMap<String, Told>,
    pushes: broadcast::Receiver<Push>,
    until: Instant,
    is_done: bool,
}

/// Why a wait ended.
enum Event {
    Push(Push),
    /// Pushes were missed: any project may have a new commit.
    Missed,
    Due,
    End(Option<Status>),
}

impl Call {
    async fn next(&mut self) -> Option<Frame<Bytes>> {
        if self.is_done {
            return None;
        }
        loop {
            let now = Instant::now();
            let due = self.projects.iter().find(|(_, told)| told.due.is_some_and(|due| due <= now));
            if let Some((path, project)) = due.map(|(path, told)| (path.clone(), told.project)) {
                self.projects.insert(path.clone(), Told { at: Some(now), due: None, project });
                match self.service.access.check(self.token.expose_secret(), &path).await {
                    Ok(_) => {
                        if let Some(usage) = &self.service.usage {
                            usage.count_push(project);
                        }
                        let message = ReconcileProjectsResponse { project: Some(Project { id: path }) };
                        return Some(Frame::data(grpc::encode(&message)));
                    }
                    Err(Refused::Unauthenticated) => {
                        return Some(self.end(Some(Status::new(Code::Unauthenticated, "unauthenticated"))));
                    }
                    Err(Refused::Forbidden) => {}
                    // Flux checks the project itself some time.
                    Err(Refused::Unavailable(error)) => {
                        tracing::warn!(
                            project = path,
                            error,
                            "an agent is not told of a push: GitLab could not be asked"
                        );
                    }
                }
                continue;
            }
            match self.event().await {
                Event::Push(push) => {
                    if let Some(told) = self.projects.get_mut(&*push.full_path) {
                        told.project = Some(push.project);
                        told.pushed(Instant::now());
                    }
                }
                Event::Missed => {
                    let now = Instant::now();
                    self.projects.values_mut().for_each(|told| told.pushed(now));
                }
                Event::Due => {}
                Event::End(status) => return Some(self.end(status)),
            }
        }
    }

    async fn event(&mut self) -> Event {
        let due = self.projects.values().filter_map(|told| told.due).min();
        let due = async {
            match due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let mut phase = self.service.phase.clone();
        let leaving = async move {
            if phase.wait_for(|phase| *phase >= Phase::Leaving).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            push = self.pushes.recv() => match push {
                Ok(push) => Event::Push(push),
                Err(broadcast::error::RecvError::Lagged(_)) => Event::Missed,
                Err(broadcast::error::RecvError::Closed) => Event::End(None),
            },
            () = due => Event::Due,
            () = tokio::time::sleep_until(self.until) => Event::End(None),
            () = leaving => Event::End(None),
            status = self.context.revoked() => Event::End(Some(status)),
        }
    }

    fn end(&mut self, status: Option<Status>) -> Frame<Bytes> {
        self.is_done = true;
        let mut trailers = HeaderMap::with_capacity(2);
        match status {
            None => Status::write_ok(&mut trailers),
            Some(status) => status.write_to(&mut trailers),
        }
        Frame::trailers(trailers)
    }
}

impl Told {
    fn pushed(&mut self, now: Instant) {
        let soonest = self.at.map_or(now, |at| (at + SHORTEST).max(now));
        self.due.get_or_insert(soonest);
    }
}
