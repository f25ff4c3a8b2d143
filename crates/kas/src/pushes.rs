//! Push events of GitLab: which repositories to check now. GitLab tells one replica, which tells the others.

use std::{sync::Arc, time::Duration};

use agent_config::AgentConfigs;
use cluster::{Replica, Tracker};
use git_sources::Repositories;
use grpc::service::{LocalService, local_service};
use parking_lot::Mutex;
use proto::kas::internal::v1::{
    PushedRequest, PushedResponse,
    git_events_server::{GitEvents, GitEventsServer},
};
use routing::peer::Peers;
use tokio::{
    sync::{broadcast, mpsc},
    task::JoinSet,
};
use tonic::{Request, Response, Status};

const PUSHED: &str = "/kas.internal.v1.GitEvents/Pushed";
/// Events that wait to be passed on, at most. What is lost is found by the next check of the repository.
const MOST_WAITING: usize = 4096;
/// Calls of other replicas at the same time.
const MOST_CALLS: usize = 64;
/// How long such a call may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Events that a slow listener may miss before it is told that it missed some.
const LISTENERS: usize = 1024;

/// A push to a project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The id of the project, above zero.
    pub project: i64,
    /// Its full path.
    pub full_path: Arc<str>,
}

/// Handles push events.
#[derive(Debug)]
pub struct Pushes {
    repositories: Arc<Repositories>,
    configs: Arc<AgentConfigs>,
    send: mpsc::Sender<Push>,
    /// Until it runs.
    waiting: Mutex<Option<mpsc::Receiver<Push>>>,
    listeners: broadcast::Sender<Push>,
}

impl Pushes {
    /// Returns a handler that tells `repositories` and `configs`.
    pub fn new(repositories: Arc<Repositories>, configs: Arc<AgentConfigs>) -> Arc<Self> {
        let (send, waiting) = mpsc::channel(MOST_WAITING);
        let listeners = broadcast::Sender::new(LISTENERS);
        Arc::new(Self { repositories, configs, send, waiting: Mutex::new(Some(waiting)), listeners })
    }

    /// Returns every push from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Push> {
        self.listeners.subscribe()
    }

    /// GitLab reports a push: checks repositories here, and tells the other replicas soon.
    pub fn reported(&self, push: Push) {
        self.happened(&push);
        if let Err(error) = self.send.try_send(push) {
            tracing::warn!(%error, "a push event is not passed on to the other replicas: there are too many");
        }
    }

    fn happened(&self, push: &Push) {
        self.repositories.pushed(push.project, &push.full_path);
        self.repositories.look_now();
        self.configs.look_now();
        // An error means that nobody listens.
        let _ = self.listeners.send(push.clone());
    }

    /// Returns the service by which other replicas tell this one.
    pub fn service(self: &Arc<Self>) -> (String, LocalService) {
        local_service(GitEventsServer::new(Private(Arc::clone(self))))
    }

    /// Tells the other replicas, once each, until dropped.
    pub async fn tell(self: Arc<Self>, tracker: Arc<dyn Tracker>, peers: Option<Arc<Peers>>) {
        let Some(mut waiting) = self.waiting.lock().take() else { return };
        let mut calls = JoinSet::new();
        loop {
            let push = tokio::select! {
                push = waiting.recv() => push,
                Some(_) = calls.join_next(), if !calls.is_empty() => continue,
            };
            let (Some(push), Some(peers)) = (push, &peers) else { continue };
            for status in tracker.replicas().await.replicas {
                // This replica knows already.
                if status.health.is_none() {
                    continue;
                }
                while calls.len() >= MOST_CALLS {
                    calls.join_next().await;
                }
                calls.spawn(tell(Arc::clone(peers), status.replica, push.clone()));
            }
        }
    }
}

async fn tell(peers: Arc<Peers>, replica: Replica, push: Push) {
    let message = PushedRequest { project_id: push.project, full_path: push.full_path.to_string() };
    let peer = peers.peer(&replica);
    let called = tokio::time::timeout(TIMEOUT, peer.call(PUSHED, grpc::encode(&message))).await;
    let error = match called {
        Ok(Ok(answer)) => match grpc::Status::from_headers(answer.headers()) {
            Some(status) if status.code() != grpc::Code::Ok => status.to_string(),
            _ => return,
        },
        Ok(Err(error)) => process::error::chain(&error),
        Err(_) => format!("no answer within {TIMEOUT:?}"),
    };
    // It finds the commit with its next check.
    tracing::debug!(peer.id = %replica.id, error, "a push event could not be passed on");
}

#[derive(Clone)]
struct Private(Arc<Pushes>);

#[tonic::async_trait]
impl GitEvents for Private {
    async fn pushed(&self, request: Request<PushedRequest>) -> Result<Response<PushedResponse>, Status> {
        let PushedRequest { project_id: project, full_path } = request.into_inner();
        self.0.happened(&Push { project, full_path: full_path.into() });
        Ok(Response::new(PushedResponse {}))
    }
}
