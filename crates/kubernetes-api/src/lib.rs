//! The HTTP endpoint for kubectl and other clients of Kubernetes: requests to the APIs of agents' clusters,
//! through their tunnels.
//!
//! [`KubernetesApi`] is a service of [`net::http`]. A request passes these steps, and nothing of its body is
//! requested from the client before the last one:
//!
//! 1. Its form: method, host, sizes, target (`form`, [`kube_request`]).
//! 2. The agent that path, host or credential name (`selection`).
//! 3. The page of a browser that makes it (`origin`).
//! 4. Who sends it, and as whom it may run ([`callers`]).
//! 5. Limits on open requests (`open`).
//! 6. A tunnel, by the [router](routing::router). `message` and `upload` write the request into it.
//!
//! `answer` passes the answer on, part by part as it comes. An answer that is not complete never looks like
//! one that is: the connection or the stream breaks. Only a watch ends regularly instead, after an event, and
//! its client continues it at another replica. If the API server upgrades the connection, `upgrade` passes
//! bytes in both directions. `connect` makes of the extended CONNECT of HTTP/2 an upgrade as in HTTP/1.1.
//!
//! Errors of kas are a `Status` of Kubernetes (`failure`).

mod agents;
mod answer;
mod connect;
mod ended_by;
mod failure;
mod form;
mod head;
mod message;
mod metrics;
mod open;
mod origin;
mod record;
mod request_id;
mod revocation;
mod selection;
mod serve;
#[cfg(test)]
mod tests;
mod upgrade;
mod upload;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use callers::{Authorized, Authorizer, ClientCertificate};
use http::{HeaderValue, Request};
use hyper::body::Incoming;
use kube_request::headers::AnswerHeaders;
use net::http::{Answer, AuthState, Connection, GoAway, Refusal, Service, StreamReset, StreamSlot, Trust};
use observe::{
    Observer,
    refusals::{ListenerName, Refusals},
};
use process::lifecycle::{Lifecycle, Phase};
use routing::{rate_limit::RateLimit, router::Router};
use rustls_pki_types::CertificateDer;
use tokio::sync::Semaphore;

pub use self::{
    agents::{Directory, ListedAgent},
    form::HeadLimits,
    metrics::Metrics,
    open::{LongCaller, LongCount, LongRequests, OpenLimits},
    origin::Origins,
    selection::{Prefix, agent_of_uri},
    serve::{
        DiffQuestion, Diffs, Fleet, FleetAnswer, FleetBody, FleetCaller, FleetQuestion, FleetRefusal,
        FleetRoute, NotReached, OwnPage, OwnPath, Owners, PageFile, Reachable, StreamEnd, own_paths,
    },
};
use self::{
    agents::{Listing, Sightings},
    open::OpenRequests,
};

/// The settings of the endpoint.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The prefix of all paths.
    pub prefix: Prefix,
    /// What follows `agent-7.` in the name of a host, in lower case; `None`: agents have no host names.
    pub host_suffix: Option<String>,
    /// The pages of browsers that may make requests.
    pub origins: Origins,
    /// The headers of answers that are passed on.
    pub answer_headers: AnswerHeaders,
    /// Limits of the head of a request.
    pub head: HeadLimits,
    /// Limits of open requests.
    pub open: OpenLimits,
    /// Requests without a valid credential after which a connection that has never had one is closed.
    pub failures: u32,
    /// How long a request waits for an agent that is connected, or was a short time ago.
    pub find_timeout: Duration,
    /// The page at `/fleet/page/`; `None`: there is none.
    pub page: Option<OwnPage>,
    /// The header `Server` of every answer.
    pub server: HeaderValue,
}

/// The parts of kas that the endpoint uses.
pub struct Parts {
    /// The settings.
    pub settings: Settings,
    /// Decides who may do what.
    pub authorizer: Authorizer,
    /// Finds tunnels.
    pub router: Arc<Router>,
    /// Knows the agents.
    pub directory: Arc<dyn Directory>,
    /// Records requests.
    pub observer: Arc<Observer>,
    /// The metrics of the endpoint.
    pub metrics: Arc<Metrics>,
    /// Counts connections that are refused.
    pub refusals: Arc<Refusals>,
    /// Whether this replica is ready.
    pub is_ready: Box<dyn Fn() -> bool + Send + Sync>,
    /// Makes diffs of manifests.
    pub diffs: Arc<dyn Diffs>,
    /// Answers questions to many agents, and others below `/fleet/`.
    pub fleet: Arc<dyn Fleet>,
    /// Knows which replica holds an agent; `None`: proxies are not told.
    pub owners: Option<Arc<dyn Owners>>,
    /// How many requests each caller may begin at all replicas together; `None`: as many as it likes.
    pub rate: Option<Arc<RateLimit>>,
    /// Called for each request that is allowed, before it is sent to its agent.
    pub allowed: Box<dyn Fn(&Authorized) + Send + Sync>,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// The service of the endpoint.
pub struct KubernetesApi {
    settings: Settings,
    authorizer: Arc<Authorizer>,
    router: Arc<Router>,
    directory: Arc<dyn Directory>,
    observer: Arc<Observer>,
    metrics: Arc<Metrics>,
    refusals: Arc<Refusals>,
    is_ready: Box<dyn Fn() -> bool + Send + Sync>,
    allowed: Box<dyn Fn(&Authorized) + Send + Sync>,
    diffs: Arc<dyn Diffs>,
    fleet: Arc<dyn Fleet>,
    owners: Option<Arc<dyn Owners>>,
    /// Diffs of files that may be made at once.
    diffs_open: Semaphore,
    open: Arc<OpenRequests>,
    sightings: Arc<Sightings>,
    listing: Listing,
}

impl std::fmt::Debug for KubernetesApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesApi").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl KubernetesApi {
    /// Creates the service.
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts {
            settings,
            authorizer,
            router,
            directory,
            observer,
            metrics,
            refusals,
            is_ready,
            diffs,
            fleet,
            owners,
            rate,
            allowed,
        } = parts;
        let open = OpenRequests::new(settings.open, rate, Arc::clone(&metrics));
        Arc::new(Self {
            settings,
            authorizer: Arc::new(authorizer),
            router,
            directory,
            observer,
            metrics,
            refusals,
            is_ready,
            allowed,
            diffs,
            fleet,
            owners,
            diffs_open: Semaphore::new(serve::DIFFS),
            open,
            sightings: Arc::default(),
            listing: Listing::default(),
        })
    }

    /// Returns the open requests that have no end of their own, with at most `callers` entries about their
    /// callers; `None`: with nothing about them.
    pub fn long_requests(&self, callers: Option<usize>) -> LongRequests {
        self.open.long(callers)
    }

    /// Applies the limits of open requests that depend on time, and ends what has no end of its own once this
    /// replica leaves: watches one after the other within `drain`, upgraded connections after
    /// `upgrade_grace`. If upgraded connections outlast the drain, all other requests end at its end. Runs
    /// forever.
    pub async fn run(self: Arc<Self>, lifecycle: Lifecycle, drain: Duration, upgrade_grace: Duration) {
        let upgrades = async {
            lifecycle.reached(Phase::Leaving).await;
            tokio::time::sleep(upgrade_grace).await;
            Arc::clone(&self.open).end_upgrades().await;
        };
        let leaving = async {
            lifecycle.reached(Phase::Leaving).await;
            Arc::clone(&self.open).drain(drain).await;
        };
        let lingering = async {
            lifecycle.reached(Phase::Lingering).await;
            self.open.end_others();
        };
        tokio::join!(Arc::clone(&self.open).sweep(), leaving, upgrades, lingering);
    }
}

impl Service for KubernetesApi {
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Client {
            trust: Trust::new(self.settings.failures),
            endpoint: self,
            peer,
            certificate: None,
        })
    }

    fn connected_with(
        self: Arc<Self>,
        peer: Option<SocketAddr>,
        certificates: Arc<[CertificateDer<'static>]>,
    ) -> Arc<dyn Connection> {
        let certificate = Some(ClientCertificate::new(certificates));
        Arc::new(Client { trust: Trust::new(self.settings.failures), endpoint: self, peer, certificate })
    }

    fn refused(&self, why: Refusal) {
        self.refusals.connection(ListenerName::Kubernetes, why);
    }
}

/// How the endpoint ends the stream of a request.
#[derive(Debug)]
struct ClientStream {
    /// Resets it, whatever it waits for.
    reset: Arc<StreamReset>,
    slot: StreamSlot,
    /// What the client has presented in the TLS handshake.
    certificate: Option<ClientCertificate>,
}

/// One connection of a client.
struct Client {
    endpoint: Arc<KubernetesApi>,
    trust: Trust,
    peer: Option<SocketAddr>,
    certificate: Option<ClientCertificate>,
}

impl Connection for Client {
    fn call(self: Arc<Self>, request: Request<Incoming>, slot: &StreamSlot) -> Answer {
        let stream =
            ClientStream { reset: slot.arm(), slot: slot.clone(), certificate: self.certificate.clone() };
        Box::pin(async move { self.endpoint.serve(&self.trust, self.peer, request, stream).await })
    }

    fn auth_state(&self) -> AuthState {
        self.trust.auth_state()
    }

    fn going_away(&self, _reason: GoAway) {
        // Clients open new connections, and open requests continue, also those that were upgraded. When the
        // process leaves, `run` ends watches and upgrades.
    }
}
