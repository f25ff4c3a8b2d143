//! Questions to many agents, and what of them the endpoint for kubectl serves below `/fleet/`.
//!
//! `FleetService` knows which agents a selector names (`select`), what their `kas.yaml` says (`agent_files`),
//! and asks them (`fan_out`). Each question goes to each agent through the router, as any request: there is
//! no further protocol, and an agent that does not answer is named.

mod callers;
mod catalog;
mod fan_out;
mod metrics;
mod prometheus;
mod select;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use cluster_call::{Budget, Cluster, ClusterSettings};
use http::StatusCode;
use ids::{Actor, AgentId, Impersonation};
use kubernetes_api::{Fleet, FleetAnswer, FleetQuestion, FleetRefusal, FleetRoute, NotReached};
use observe::Observer;
use routing::router::Router;

pub use self::catalog::Catalog;
pub(crate) use self::catalog::{CatalogParts, rules};
pub use self::metrics::FleetMetrics;
use self::{
    callers::Callers,
    catalog::Wanted,
    select::{SelectError, Selected, Want, Who},
};
#[cfg(feature = "fuzzing")]
pub use self::{catalog::fuzz as fuzz_catalog, prometheus::fuzzing::fuzz as fuzz_prometheus};
use crate::{agent_files::AgentFiles, directory::AgentDirectory};
#[cfg(feature = "fuzzing")]
pub use cluster_call::fuzz as fuzz_service;

/// How long a request may wait for a tunnel of an agent that is said to be connected.
const FIND: Duration = Duration::from_secs(3);

/// Asks agents for callers.
pub(crate) struct FleetService {
    router: Arc<Router>,
    observer: Arc<Observer>,
    directory: Arc<AgentDirectory>,
    files: Arc<AgentFiles>,
    metrics: Arc<FleetMetrics>,
    settings: prometheus::Settings,
    /// What all answers together may hold.
    memory: Arc<Budget>,
    callers: Arc<Callers>,
    /// Answers questions to views.
    views: Arc<dyn Fleet>,
    catalog: Arc<Catalog>,
}

/// What a [`FleetService`] is made of.
pub(crate) struct FleetParts {
    pub(crate) router: Arc<Router>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) directory: Arc<AgentDirectory>,
    pub(crate) files: Arc<AgentFiles>,
    pub(crate) metrics: Arc<FleetMetrics>,
    pub(crate) settings: prometheus::Settings,
    /// Answers questions to views.
    pub(crate) views: Arc<dyn Fleet>,
    pub(crate) catalog: Arc<Catalog>,
}

impl FleetService {
    pub(crate) fn new(parts: FleetParts) -> Arc<Self> {
        let FleetParts { router, observer, directory, files, metrics, settings, views, catalog } = parts;
        let memory =
            Budget::told("the answers to all questions to Prometheus", settings.memory, metrics.held());
        let callers = Callers::new(settings.per_caller);
        Arc::new(Self {
            router,
            observer,
            directory,
            files,
            metrics,
            settings,
            memory,
            callers,
            views,
            catalog,
        })
    }

    /// Returns the agents that a selector names and the caller reaches.
    ///
    /// # Errors
    /// [`SelectError`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn select(
        &self,
        who: &Who,
        selector: &::fleet::Selector,
        want: Want,
    ) -> Result<Selected, SelectError> {
        select::select(&*self.directory, &*self.files, who, selector, want).await
    }

    /// Returns the API server of an agent, for requests of a caller.
    fn cluster(&self, call: CallSettings<'_>) -> Cluster {
        let CallSettings { agent, task, actor, run_as, timeout, max_body, budget } = call;
        let settings = ClusterSettings {
            agent,
            task: task.to_owned(),
            source: "fleet",
            user_agent: format!("kas/{task}"),
            impersonation: run_as.map(|run_as| (*run_as).clone()),
            timeout,
            find: FIND.min(timeout),
            at_once: 4,
            max_body,
        };
        let (router, observer) = (Arc::clone(&self.router), Arc::clone(&self.observer));
        Cluster::new(router, observer, settings).with_actor(actor).with_budget(budget)
    }
}

/// What the requests to one agent have in common.
struct CallSettings<'a> {
    agent: AgentId,
    task: &'a str,
    actor: Arc<Actor>,
    run_as: Option<Arc<Impersonation>>,
    timeout: Duration,
    max_body: usize,
    budget: Arc<Budget>,
}

#[async_trait]
impl Fleet for FleetService {
    async fn answer(&self, question: FleetQuestion) -> Result<FleetAnswer, FleetRefusal> {
        match question.route {
            FleetRoute::PrometheusOfAgent | FleetRoute::PrometheusOfFleet => {
                self.ask_prometheus(question).await
            }
            FleetRoute::View => self.views.answer(question).await,
            FleetRoute::Components => self.catalog.answer(Wanted::Components, question).await,
            FleetRoute::Applications => self.catalog.answer(Wanted::Applications, question).await,
        }
    }
}

/// Returns the refusal of a caller that reaches nothing.
fn refusal(error: &SelectError) -> FleetRefusal {
    let (status, retry_after) = match error {
        SelectError::TooMany(_) => (StatusCode::UNPROCESSABLE_ENTITY, None),
        SelectError::NotReached(NotReached::Unauthenticated) => (StatusCode::UNAUTHORIZED, None),
        SelectError::NotReached(NotReached::Forbidden) => (StatusCode::FORBIDDEN, None),
        SelectError::NotReached(NotReached::Unavailable(_)) => {
            (StatusCode::SERVICE_UNAVAILABLE, Some(Duration::from_secs(2)))
        }
    };
    FleetRefusal { status, text: error.to_string(), retry_after }
}
