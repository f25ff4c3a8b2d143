//! The API server of an agent, as views need it: lists, and watches.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use cluster_call::{Budget, Cluster, ClusterSettings, Held, Request, Response, Watching};
use grpc::{Code, Status};
use http::Method;
use ids::{Actor, AgentId, Impersonation, ReplicaId};
use kube_request::Target;
use observe::Observer;
use routing::router::Router;
use tokio::sync::Semaphore;

use super::buffers::{AgentBuffers, Buffers};

/// How long a page of a list may take, and a watch until it begins. One that hangs keeps others waiting.
const TIMEOUT: Duration = Duration::from_secs(20);
/// How long a request may wait for a tunnel.
const FIND: Duration = Duration::from_secs(10);
/// The largest page of a list, in bytes, before and after it is unpacked. Larger ones are asked for with half
/// as many objects.
const MAX_PAGE: usize = 4 << 20;
/// Pages that are unpacked at once. Until then, nobody knows how large they are.
static UNPACKED: Semaphore = Semaphore::const_new(16);
/// The most of the words that refuse a watch, in bytes, and how long they may take.
const REFUSAL: (usize, Duration) = (128 << 10, Duration::from_secs(10));
/// Lists of one agent at once.
const AT_ONCE: usize = 8;

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: i32,
    pub(crate) body: Bytes,
    /// Counts the body in the budget of the cluster, if it was unpacked.
    _held: Option<Held>,
    /// Counts all of it among what is being read of the agent.
    _budget: Option<Arc<Budget>>,
}

impl Answer {
    pub(crate) fn new(status: i32, body: Bytes) -> Self {
        Self { status, body, _held: None, _budget: None }
    }
}

/// The API server of one agent.
#[async_trait]
pub(crate) trait Source: Send + Sync {
    /// Asks for a list. `RESOURCE_EXHAUSTED`: the page is too large.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn get(&self, target: &str, accept: &str) -> Result<Answer, Status>;

    /// Opens a watch. `for_old`: the target for an agentk that cannot cancel it.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn watch(&self, target: &str, for_old: &str, accept: &str) -> Result<Box<dyn Watched>, Status>;

    /// Sends an object of JSON.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn post(&self, target: &str, object: Bytes) -> Result<Answer, Status>;
}

/// An open watch.
#[async_trait]
pub(crate) trait Watched: Send {
    fn status(&self) -> i32;

    /// Whether it ends when it is dropped. If not, it occupies a tunnel until the API server ends it.
    fn is_cancellable(&self) -> bool;

    /// Reads the next bytes; `None`: the API server has ended it.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn data(&mut self) -> Result<Option<Bytes>, Status>;
}

/// Returns what an API server says that refuses a watch: as much of it as fits, and comes in time.
///
/// # Cancel safety
/// If it is dropped, what was read is lost.
pub(crate) async fn refusal(watched: &mut dyn Watched) -> BytesMut {
    let (most, within) = REFUSAL;
    let mut body = BytesMut::new();
    let reading = async {
        while let Ok(Some(data)) = watched.data().await {
            if body.len() + data.len() > most {
                break;
            }
            body.extend_from_slice(&data);
        }
    };
    // The status says the most: what is missing of the words is no failure of its own.
    let _ = tokio::time::timeout(within, reading).await;
    body
}

/// The API servers of agents.
pub(crate) trait Sources: Send + Sync {
    /// Returns that of an agent. Requests run as `user`, or with agentk's rights.
    fn open(&self, agent: AgentId, user: Option<User>) -> Arc<dyn Source>;
}

/// As whom a request runs, and for whom.
#[derive(Debug, Clone)]
pub(crate) struct User {
    /// The identity in the cluster.
    pub(crate) identity: Impersonation,
    /// The caller, for the audit log.
    pub(crate) actor: Arc<Actor>,
}

/// Those behind tunnels.
pub(crate) struct Tunnels {
    /// Whose requests these are, for audit logs: one word.
    pub(crate) task: &'static str,
    pub(crate) router: Arc<Router>,
    pub(crate) observer: Arc<Observer>,
    /// Count what is being read.
    pub(crate) buffers: Arc<Buffers>,
    /// This replica.
    pub(crate) me: ReplicaId,
}

impl Sources for Tunnels {
    fn open(&self, agent: AgentId, user: Option<User>) -> Arc<dyn Source> {
        let (impersonation, actor) = user.map(|User { identity, actor }| (identity, actor)).unzip();
        let settings = ClusterSettings {
            agent,
            task: self.task.to_owned(),
            source: self.task,
            // The replica is named, so that the API server's audit log tells watches apart.
            user_agent: format!("kas/{}:{}", self.task, self.me),
            impersonation,
            timeout: TIMEOUT,
            find: FIND,
            at_once: AT_ONCE,
            max_body: MAX_PAGE,
        };
        let cluster = Cluster::new(Arc::clone(&self.router), Arc::clone(&self.observer), settings);
        let cluster = match actor {
            Some(actor) => cluster.with_actor(actor),
            None => cluster,
        };
        Arc::new(Tunnel { cluster, buffers: Some(self.buffers.of(agent)) })
    }
}

/// The API server at the end of a tunnel.
pub(crate) struct Tunnel {
    cluster: Cluster,
    /// `None`: the budget of the cluster counts.
    buffers: Option<AgentBuffers>,
}

impl Tunnel {
    /// Returns the API server that `cluster` calls. A page that is larger than [`MAX_PAGE`] when it is
    /// unpacked is refused.
    pub(crate) fn new(cluster: Cluster) -> Self {
        Self { cluster, buffers: None }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Sends a request. What is read of the response is counted until the budget is dropped.
    async fn send(&self, request: Request) -> Result<(Response, Option<Arc<Budget>>), Status> {
        let Some(buffers) = &self.buffers else { return Ok((self.cluster.send(request).await?, None)) };
        let budget = buffers.budget_of_answer();
        let response = self.cluster.send_within(request, Some(&budget)).await?;
        Ok((response, Some(budget)))
    }
}

fn target(text: &str) -> Result<Target, Status> {
    let parsed = Target::parse(text.to_owned());
    parsed.map_err(|error| Status::new(Code::InvalidArgument, format!("{text}: {error}")))
}

#[async_trait]
impl Source for Tunnel {
    async fn get(&self, path: &str, accept: &str) -> Result<Answer, Status> {
        let request = Request::new(Method::GET, target(path)?)
            .header("Accept", accept)
            .header("Accept-Encoding", "gzip");
        let (answer, budget) = self.send(request).await?;
        let is_gzip =
            answer.header("Content-Encoding").is_some_and(|value| value.eq_ignore_ascii_case("gzip"));
        if !is_gzip {
            return Ok(Answer { _budget: budget, ..Answer::new(answer.status, answer.body) });
        }
        let (status, body) = (answer.status, answer.body);
        // The semaphore is never closed.
        let unpacked = UNPACKED.acquire().await;
        let inflated = tokio::task::spawn_blocking(move || grpc::gzip::inflate(body, MAX_PAGE)).await;
        let body = match inflated {
            Ok(Ok(body)) => body,
            Ok(Err(error @ grpc::gzip::Error::TooLarge(_))) => {
                return Err(Status::new(Code::ResourceExhausted, error.to_string()));
            }
            Ok(Err(error)) => return Err(Status::new(Code::Internal, error.to_string())),
            Err(error) => return Err(Status::new(Code::Internal, error.to_string())),
        };
        if let Some(budget) = &budget {
            budget.take(body.len())?;
        }
        let held = self.cluster.hold(body.len())?;
        drop(unpacked);
        Ok(Answer { _held: held, _budget: budget, ..Answer::new(status, body) })
    }

    async fn watch(&self, path: &str, for_old: &str, accept: &str) -> Result<Box<dyn Watched>, Status> {
        let request = Request::new(Method::GET, target(path)?).header("Accept", accept);
        Ok(Box::new(self.cluster.watch(request, target(for_old)?).await?))
    }

    async fn post(&self, path: &str, object: Bytes) -> Result<Answer, Status> {
        let request = Request {
            body: object,
            ..Request::new(Method::POST, target(path)?)
                .header("Accept", "application/json")
                .header("Content-Type", "application/json")
        };
        let (answer, budget) = self.send(request).await?;
        Ok(Answer { _budget: budget, ..Answer::new(answer.status, answer.body) })
    }
}

#[async_trait]
impl Watched for Watching {
    fn status(&self) -> i32 {
        Watching::status(self)
    }

    fn is_cancellable(&self) -> bool {
        Watching::is_cancellable(self)
    }

    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        Watching::data(self).await
    }
}
