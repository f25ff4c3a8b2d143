//! [`Cluster`]: the API server of one agent, for a task that makes many requests.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use grpc::{Deadline, Status};
use http::{HeaderMap, HeaderValue};
use ids::{Actor, AgentId, Impersonation};
use kube_request::{RequestInfo, Target};
use observe::{
    Observer,
    audit::{EndpointFields, kubernetes::KubernetesAction},
};
use routing::router::Router;
use tokio::{sync::Semaphore, time::Instant};

use crate::{Budget, Call, Held, Opened, Request, Response, cancels, open, send, send_for_status};

/// What the requests of a [`Cluster`] have in common.
#[derive(Clone, Debug)]
pub struct ClusterSettings {
    /// The agent.
    pub agent: AgentId,
    /// The name of the task in the audit log, such as `gitops:group/project`.
    pub task: String,
    /// Where the task comes from, for the audit log: one word.
    pub source: &'static str,
    /// What requests call themselves, for the audit log of the API server.
    pub user_agent: String,
    /// As whom requests run; `None`: with the agent's own rights.
    pub impersonation: Option<Impersonation>,
    /// How long one request may take.
    pub timeout: Duration,
    /// How long a request may wait for a tunnel.
    pub find: Duration,
    /// The most requests at once.
    pub at_once: usize,
    /// The largest body of a response, in bytes.
    pub max_body: usize,
}

/// The API server of one agent.
///
/// Each request has its own record in the audit log, whose actor has the issuer `kas` and the task as its
/// subject, unless another one is [given](Self::with_actor).
pub struct Cluster {
    router: Arc<Router>,
    observer: Arc<Observer>,
    settings: ClusterSettings,
    actor: Arc<Actor>,
    permits: Arc<Semaphore>,
    /// What responses may hold together; `None`: there is no such limit.
    budget: Option<Arc<Budget>>,
    /// Whether only the status of a response matters.
    for_status: bool,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Returns the API server of an agent.
    pub fn new(router: Arc<Router>, observer: Arc<Observer>, settings: ClusterSettings) -> Self {
        let actor = Actor { issuer: "kas".to_owned(), subject: Some(settings.task.clone()) };
        let permits = Arc::new(Semaphore::new(settings.at_once.max(1)));
        Self { router, observer, settings, actor: Arc::new(actor), permits, budget: None, for_status: false }
    }

    /// Names who asked for the task, for the audit log.
    #[must_use]
    pub fn with_actor(self, actor: Arc<Actor>) -> Self {
        Self { actor, ..self }
    }

    /// Counts what responses hold, also with those of other agents.
    #[must_use]
    pub fn with_budget(self, budget: Arc<Budget>) -> Self {
        Self { budget: Some(budget), ..self }
    }

    /// Counts what is made of responses, in the budget if there is one, until the returned value is dropped.
    ///
    /// # Errors
    /// As of [`Budget::take`].
    pub fn hold(&self, bytes: usize) -> Result<Option<Held>, Status> {
        self.budget.as_ref().map(|budget| budget.hold(bytes)).transpose()
    }

    /// Counts what is kept of responses, in the budget if there is one.
    ///
    /// # Errors
    /// As of [`Budget::take`].
    pub fn take(&self, bytes: usize) -> Result<(), Status> {
        self.budget.as_ref().map_or(Ok(()), |budget| budget.take(bytes))
    }

    /// Says that only the status of each response matters, see [`send_for_status`].
    #[must_use]
    pub fn for_status(self) -> Self {
        Self { for_status: true, ..self }
    }

    /// Returns the same API server for another task, which shares the limit of requests at once.
    #[must_use]
    pub fn with_task(&self, task: String, impersonation: Option<Impersonation>) -> Self {
        let permits = Arc::clone(&self.permits);
        let settings = ClusterSettings { task, impersonation, ..self.settings.clone() };
        let cluster = Self::new(Arc::clone(&self.router), Arc::clone(&self.observer), settings);
        Self { permits, budget: self.budget.clone(), for_status: self.for_status, ..cluster }
    }

    /// Sends a request, and reads its complete response. It waits while too many others are open.
    ///
    /// # Errors
    /// As of [`send`].
    ///
    /// # Cancel safety
    /// As of [`send`].
    pub async fn send(&self, request: Request) -> Result<Response, Status> {
        self.send_within(request, self.budget.as_deref()).await
    }

    /// As [`send`](Self::send). `budget` counts the response instead of that of all requests.
    ///
    /// # Errors
    /// As of [`send`](fn@crate::send).
    ///
    /// # Cancel safety
    /// As of [`send`](fn@crate::send).
    pub async fn send_within(&self, request: Request, budget: Option<&Budget>) -> Result<Response, Status> {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        let begun = self.begin("short", &request);
        let mut ending = Ending { record: begun.record.clone(), end: None };
        let request = begun.named(request, &self.settings);
        let call = begun.call(&self.settings, budget);
        let answer = match self.for_status {
            true => send_for_status(&self.router, request, call).await,
            false => send(&self.router, request, call).await,
        };
        ending.end = Some(match &answer {
            Ok(response) => (u16::try_from(response.status).ok(), "upstream", response.body.len() as u64),
            Err(_) => (None, "tunnel", 0),
        });
        answer
    }

    /// Opens a watch, see [`open`]. It does not count among the requests at once.
    ///
    /// # Errors
    /// As of [`open`].
    ///
    /// # Cancel safety
    /// As of [`open`].
    pub async fn watch(&self, request: Request, for_old: Target) -> Result<Watching, Status> {
        let begun = self.begin("watch", &request);
        let mut ending = Ending { record: begun.record.clone(), end: None };
        let request = begun.named(request, &self.settings);
        match open(&self.router, request, for_old, begun.call(&self.settings, self.budget.as_deref())).await {
            Ok(opened) => {
                ending.end = Some((u16::try_from(opened.status).ok(), "client", 0));
                Ok(Watching { opened, ending })
            }
            Err(status) => {
                ending.end = Some((None, "tunnel", 0));
                Err(status)
            }
        }
    }

    /// Begins the record of a request.
    fn begin(&self, kind: &'static str, request: &Request) -> Begun {
        let ClusterSettings { agent, source, impersonation, .. } = &self.settings;
        let id = format!("{:032x}", rand::random::<u128>());
        let audit_id = format!("kas-{id}");
        let fields = EndpointFields {
            source: Some(source),
            mode: Some(if impersonation.is_some() { "impersonate" } else { "agent" }),
            access_rule: None,
            kind: Some(kind),
            audit_id: audit_id.clone(),
            user_agent: None,
            upgrade: None,
        };
        let record = self.observer.arrived_at_endpoint(None, &id, fields);
        record.actor(&self.actor);
        record.target(*agent, None);
        let method = request.method.as_str();
        record.action(|| {
            let info = RequestInfo::new(method, &request.target);
            let user = impersonation.as_ref().map(|user| user.username.clone());
            KubernetesAction::of_info(method, &info, &request.target, user)
        });
        record.allowed_at_endpoint(method, &HeaderMap::new());
        let correlation = HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("kas"));
        Begun { id, audit_id, correlation, record }
    }
}

/// A request whose record has begun.
struct Begun {
    id: String,
    audit_id: String,
    correlation: HeaderValue,
    record: observe::RequestRecord,
}

impl Begun {
    fn named(&self, request: Request, settings: &ClusterSettings) -> Request {
        request
            .header("Audit-Id", self.audit_id.clone())
            .header("X-Request-Id", self.id.clone())
            .header("User-Agent", settings.user_agent.clone())
    }

    fn call<'a>(&'a self, settings: &'a ClusterSettings, budget: Option<&'a Budget>) -> Call<'a> {
        Call {
            agent: settings.agent,
            connection: None,
            impersonation: settings.impersonation.as_ref(),
            correlation: &self.correlation,
            deadline: Deadline::after(settings.timeout),
            wait_until: Instant::now().checked_add(settings.find),
            record: &self.record,
            max_body: settings.max_body,
            budget,
        }
    }
}

/// An open watch. Dropping it cancels the request, if the agentk can do that.
#[derive(Debug)]
pub struct Watching {
    opened: Opened,
    ending: Ending,
}

impl Watching {
    /// Returns the status code.
    pub fn status(&self) -> i32 {
        self.opened.status
    }

    /// Whether the agentk can cancel it.
    pub fn is_cancellable(&self) -> bool {
        cancels(self.opened.features)
    }

    /// Reads the next part of the body; `None`: the API server has ended the watch.
    ///
    /// # Errors
    /// Errors of the agent, and `INTERNAL` if the response is incomplete.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        let read = self.opened.data().await;
        if let Some((_, by, bytes)) = &mut self.ending.end {
            match &read {
                Ok(Some(data)) => *bytes += data.len() as u64,
                Ok(None) => *by = "upstream",
                Err(_) => *by = "tunnel",
            }
        }
        read
    }
}

/// Writes the line `end` of a request. One that is dropped earlier was given up.
#[derive(Debug)]
struct Ending {
    record: observe::RequestRecord,
    end: Option<(Option<u16>, &'static str, u64)>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        let (status, by, bytes) = self.end.unwrap_or((None, "client", 0));
        self.record.ended_at_endpoint(status, by, bytes);
    }
}
