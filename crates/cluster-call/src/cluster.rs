//! [`Cluster`]: the API server of one agent, for a task that makes many requests.

use std::{sync::Arc, time::Duration};

use grpc::{Deadline, Status};
use http::{HeaderMap, HeaderValue};
use ids::{Actor, AgentId, Impersonation};
use kube_request::RequestInfo;
use observe::{
    Observer,
    audit::{EndpointFields, kubernetes::KubernetesAction},
};
use routing::router::Router;
use tokio::{sync::Semaphore, time::Instant};

use crate::{Budget, Call, Request, Response, send};

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
        Self { router, observer, settings, actor: Arc::new(actor), permits, budget: None }
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

    /// Returns the same API server for another task, which shares the limit of requests at once.
    #[must_use]
    pub fn with_task(&self, task: String, impersonation: Option<Impersonation>) -> Self {
        let permits = Arc::clone(&self.permits);
        let settings = ClusterSettings { task, impersonation, ..self.settings.clone() };
        Self { permits, ..Self::new(Arc::clone(&self.router), Arc::clone(&self.observer), settings) }
    }

    /// Sends a request, and reads its complete response. It waits while too many others are open.
    ///
    /// # Errors
    /// As of [`send`].
    ///
    /// # Cancel safety
    /// As of [`send`].
    pub async fn send(&self, request: Request) -> Result<Response, Status> {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        let ClusterSettings { agent, source, impersonation, timeout, find, max_body, .. } =
            &self.settings;
        let id = format!("{:032x}", rand::random::<u128>());
        let audit_id = format!("kas-{id}");
        let fields = EndpointFields {
            source: Some(source),
            mode: Some(if impersonation.is_some() { "impersonate" } else { "agent" }),
            access_rule: None,
            kind: Some("short"),
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
        let mut ending = Ending { record: record.clone(), end: None };
        let correlation = HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("kas"));
        let call = Call {
            agent: *agent,
            connection: None,
            impersonation: impersonation.as_ref(),
            correlation: &correlation,
            deadline: Deadline::after(*timeout),
            wait_until: Instant::now().checked_add(*find),
            record: &record,
            max_body: *max_body,
            budget: self.budget.as_deref(),
        };
        let request = request
            .header("Audit-Id", audit_id)
            .header("X-Request-Id", id.clone())
            .header("User-Agent", self.settings.user_agent.clone());
        let answer = send(&self.router, request, call).await;
        ending.end = Some(match &answer {
            Ok(response) => (u16::try_from(response.status).ok(), "upstream", response.body.len() as u64),
            Err(_) => (None, "tunnel", 0),
        });
        answer
    }
}

/// Writes the line `end` of a request. One that is dropped earlier was given up.
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
