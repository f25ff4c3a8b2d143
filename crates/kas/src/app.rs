//! Builds a replica from a configuration. [`Kas::bind`] binds every port, [`Kas::run`] serves until it is
//! shut down. Implementations of traits are chosen only here.

mod direct;
mod git;
mod hooks;
mod kubernetes;
mod part;
mod reload;
mod sinks;

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, OnceLock, atomic::AtomicU64},
    time::Duration,
};

use agent_config::AgentConfigs;
use cluster::{Doors, InMemoryTracker, Replica, Tracker};
use http::HeaderValue;
use identity::{
    FileIdentity, Identity, IfAbsent, OpenError,
    gitlab::{CacheMetrics, GitLabIdentity, Times},
    jwt::JwtVerifier,
};
use ids::ReplicaId;
use net::{
    admin::Admin,
    http::{AGENT, API, Age, HEADER_LIST, PEER, Protocols, Server},
    io::{Address, Listener},
    tls,
};
use process::{
    files::Snapshot,
    lifecycle::{self, Lifecycle, Phase},
    version,
};
use prometheus_client::{
    metrics::{gauge::Gauge, info::Info},
    registry::Registry,
};
use settings::secret::ApiSecret;
use tokio::{sync::watch, task::JoinHandle, time::Instant};

use self::{
    git::{FromGitLab, Git},
    part::{Part, Parts},
    reload::{Reloader, SecretUsers},
};
use crate::{
    agent_files::AgentFiles,
    certificates::{CertificateMetrics, Certificates},
    direct::DirectMetrics,
    directory::AgentDirectory,
    fleet::{self, Catalog, CatalogParts, FleetMetrics},
    listener::{
        Naming,
        agent::{self, AgentListener, AgentMetrics},
        api::ApiListener,
        gitlab_access::GitlabAccess,
        private::PrivateListener,
        registration::Registration,
    },
    mailbox::MailboxMetrics,
    own_certificate,
    page::{Page, PageMetrics, Source},
    preflight,
    pushes::Pushes,
    registrar::Registrar,
    replicas::{Mesh, MeshError, metrics::ReplicaMetrics},
    sinks::{SinkMetrics, TargetError},
    sync,
    views::{self, Hub, HubParts, HubSettings, Tunnels, ViewMetrics},
};
use kas_config::{self, Attempts, Config, Problems};
use observe::Observer;
use observe::audit::{self, AuditMetrics};
use observe::refusals::Refusals;
use planner::PlannerMetrics;
use routing::{
    metrics::RequestMetrics,
    rate_limit::RateLimit,
    registry::{Limits, TunnelRegistry},
    router::Router,
};

/// GOAWAY is sent at this share of the maximum age of an agent's connection, so that two long calls fit below
/// it, as in 14.1.
const AGENT_AGE_SHARE: f64 = 0.35;
/// The same for the connections of callers.
const API_AGE_SHARE: f64 = 0.8;
/// Pings of another replica that are accepted at once, and the time after which one more is. A replica sends
/// one every 3 s.
const PEER_PINGS: (u32, Duration) = (50, Duration::from_secs(1));
/// How long upgraded connections may take to end after their grace: until a frame ends and its client is
/// told.
const UPGRADES_END: Duration = Duration::from_secs(3);
/// How long a request may take to be counted that came with the last connection.
const LAST_ARRIVALS: Duration = Duration::from_millis(100);
/// How long the last spans may take to be exported.
const SPANS: Duration = Duration::from_secs(2);

/// Why kas could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error("{0}")]
    Config(Problems),
    /// A port cannot be bound.
    #[error("{section}.listen.address: cannot listen on {address}")]
    Bind {
        /// The listener.
        section: &'static str,
        /// Its address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// A certificate or key cannot be used any more, although it has just been checked.
    #[error("{section}.listen: TLS cannot be set up")]
    Tls {
        /// The listener.
        section: &'static str,
        /// Why.
        source: tls::Error,
    },
    /// The certificates of the section `redis` cannot be used any more, although they have just been checked.
    #[error("redis.tls: {0}")]
    Redis(String),
    /// The certificate of the endpoint for kubectl on loopback cannot be made.
    #[error("agent.kubernetes_api: the certificate for TLS on this host cannot be used")]
    OwnCertificate(#[source] own_certificate::Error),
    /// The identity file cannot be used.
    #[error("identity.file cannot be used")]
    Identity(#[source] OpenError),
    /// The sources of callers of the Kubernetes API endpoint cannot be used.
    #[error(transparent)]
    Callers(#[from] callers::OpenError),
    /// A header that must not be passed on. The configuration accepts none.
    #[error("agent.kubernetes_api.extra_allowed_response_headers: {0}")]
    AnswerHeader(kube_request::headers::NeverForwarded),
    /// The client for GitLab cannot be created.
    #[error("cannot create the client for GitLab")]
    GitLab(#[source] gitlab::Error),
    /// The certificates for Gitaly cannot be used any more, although they have just been checked.
    #[error("gitaly.ca_certificate_file cannot be used")]
    Gitaly(#[source] tls::Error),
    /// The secret for GitLab was not loaded.
    #[error("gitlab.authentication_secret_file was not read")]
    NoSecret,
    /// The audit log cannot be opened.
    #[error(transparent)]
    Audit(#[from] audit::OpenError),
    /// The secret of proxies cannot be used any more, although it has just been checked.
    #[error("direct.authentication_secret_file: {0}")]
    Direct(String),
    /// A file with rules of components cannot be used any more, although it has just been checked.
    #[error("components.files[{index}]: {why}")]
    Components {
        /// The index of the file, from 0.
        index: usize,
        /// Why.
        why: String,
    },
    /// A file with views cannot be used any more, although it has just been checked.
    #[error("views.files[{index}]: {why}")]
    Views {
        /// The index of the file, from 0.
        index: usize,
        /// Why.
        why: String,
    },
    /// A file that a sink names cannot be used any more, although it has just been checked.
    #[error("sinks.targets[{index}]")]
    Sink {
        /// The index of the sink, from 0.
        index: usize,
        /// Why.
        source: TargetError,
    },
    /// Spans cannot be exported.
    #[error("observability.tracing: spans cannot be exported")]
    Tracing(#[from] traces::Error),
    /// This replica cannot find the others.
    #[error("cannot find the other replicas")]
    Mesh(#[from] MeshError),
    /// The state folder cannot be created.
    #[error("state_dir: cannot create {path}")]
    State {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The bound addresses; `None` for a Unix socket.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The agent listener.
    pub agent: Option<SocketAddr>,
    /// The API listener, for GitLab and operators.
    pub api: Option<SocketAddr>,
    /// The endpoint for kubectl, if it is enabled.
    pub kubernetes: Option<SocketAddr>,
    /// The listener for webhooks, if it is enabled.
    pub hooks: Option<SocketAddr>,
    /// The listener for proxies, if it is enabled.
    pub direct: Option<SocketAddr>,
    /// The private listener, if there are other replicas.
    pub private: Option<SocketAddr>,
    /// The observability listener.
    pub observability: Option<SocketAddr>,
}

/// Whether this replica is in sync with the others, and the reason reported until then; `None`: there are no
/// others.
type Synced = Option<(watch::Receiver<bool>, &'static str)>;

/// A task that is aborted when its owner is dropped.
struct Background(JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A replica whose ports are bound. Only probes and metrics are served yet.
pub struct Kas {
    config: Config,
    addresses: Addresses,
    parts: Parts,
    /// Serves probes and metrics.
    admin: Background,
    /// Set once everything is served; then readiness depends on it.
    started: Arc<OnceLock<Synced>>,
    synced: Synced,
    requests: Arc<RequestMetrics>,
    lifecycle: Lifecycle,
}

impl std::fmt::Debug for Kas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kas").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

async fn bind(section: &'static str, listen: &kas_config::Listen) -> Result<Listener, StartError> {
    let text = listen.address.clone();
    let address = match listen.network {
        kas_config::Network::Tcp => Address::Tcp(text),
        kas_config::Network::Tcp4 => Address::Tcp4(text),
        kas_config::Network::Tcp6 => Address::Tcp6(text),
        kas_config::Network::Unix => Address::Unix(text.into()),
    };
    Listener::bind(&address).await.map_err(|source| StartError::Bind {
        section,
        address: address.to_string(),
        source,
    })
}

/// Metrics of the process.
#[derive(Debug)]
struct ProcessMetrics {
    /// Tasks of the runtime; set when metrics are scraped.
    tasks: Gauge,
    /// Files this process may open.
    file_limit: Gauge<u64, AtomicU64>,
}

impl ProcessMetrics {
    /// Creates the families and registers them.
    fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { tasks: Gauge::default(), file_limit: Gauge::default() };
        registry.register(
            "tasks",
            "Tasks of this process: connections, streams and background tasks",
            metrics.tasks.clone(),
        );
        registry.register("open_files_limit", "Files this process may open", metrics.file_limit.clone());
        metrics
    }
}

/// Returns why a replica is not ready. `started` is set once everything is served.
fn unready(phase: Phase, started: Option<&Synced>) -> Option<String> {
    let why = match (phase, started) {
        (Phase::Serving, None) => "starting: the address of this replica may not be known yet",
        (Phase::Serving, Some(None)) => return None,
        (Phase::Serving, Some(Some((synced, _)))) if *synced.borrow() => return None,
        (Phase::Serving, Some(Some((_, why)))) => why,
        _ => "draining",
    };
    Some(why.to_owned())
}

async fn open_identity(
    config: &Config,
    secret: Option<&ApiSecret>,
    registry: &mut Registry,
    reloader: &mut Reloader,
) -> Result<(Arc<dyn Identity>, Option<FromGitLab>), StartError> {
    // Registered without GitLab too, so that the families always exist.
    let lookups = Arc::new(gitlab::LookupMetrics::new(registry));
    let cache = Arc::new(CacheMetrics::new(registry));
    match (&config.identity, secret) {
        (kas_config::Identity::File { file, is_default }, _) => {
            let if_absent = if *is_default { IfAbsent::Make } else { IfAbsent::Refuse };
            let identity = FileIdentity::open(file, if_absent).await.map_err(StartError::Identity)?;
            Ok((Arc::new(identity), None))
        }
        (kas_config::Identity::GitLab(gitlab), Some(secret)) => {
            let before = Snapshot::reading(gitlab.ca_certificate.iter().cloned().collect());
            let client =
                gitlab::Client::new(gitlab, secret, &gitlab::Proxies::from_env(), Arc::clone(&lookups))
                    .map_err(StartError::GitLab)?;
            let client = Arc::new(client);
            reloader.gitlab(gitlab, before, Arc::clone(&client));
            let times = Times {
                ttl: gitlab.info_cache_ttl,
                error_ttl: gitlab.info_cache_error_ttl,
                renewal_without_cache: config.agent.configuration.poll_period,
            };
            tracing::info!(address = %gitlab.address, "agents are authenticated by GitLab");
            let identity = GitLabIdentity::new(Arc::clone(&client) as _, times, lookups, cache);
            let identity = Arc::new(identity);
            Ok((Arc::clone(&identity) as _, Some(FromGitLab { client, identity })))
        }
        // Does not happen: secrets were loaded for this configuration.
        (kas_config::Identity::GitLab(_), None) => Err(StartError::NoSecret),
    }
}

impl Kas {
    /// Checks everything that can be checked and binds every port.
    ///
    /// It may take a minute until the address of this replica is known. Probes and metrics are served
    /// meanwhile: the replica is alive, and not ready.
    ///
    /// # Errors
    /// See [`StartError`]. Nothing but probes and metrics was served then.
    pub async fn bind(mut config: Config) -> Result<Self, StartError> {
        if let Some(path) = &config.state_dir
            && (matches!(config.identity, kas_config::Identity::File { is_default: true, .. })
                || matches!(config.api.secrets, kas_config::ApiSecrets::Made(_))
                || config
                    .agent
                    .kubernetes_api
                    .as_ref()
                    .is_some_and(|section| section.users.as_ref().is_some_and(|users| users.is_default)))
        {
            std::fs::create_dir_all(path)
                .map_err(|source| StartError::State { path: path.clone(), source })?;
        }
        let before = Snapshot::reading(config.secret_files());
        let before_redis = match &config.tracker {
            kas_config::Tracker::Redis(shared) => Some(Snapshot::reading(shared.redis.files())),
            _ => None,
        };
        let (secrets, warnings) = preflight::prepare(&config).map_err(StartError::Config)?;
        for warning in warnings {
            tracing::warn!(path = warning.path, "{}", warning.text);
        }
        let before = match &secrets.created {
            None => before,
            Some(path) => {
                tracing::info!(path = %path.display(), "created a secret for the api listener");
                Snapshot::reading(config.secret_files())
            }
        };
        let agent_listener = bind("agent", &config.agent.listen.listen).await?;
        let api_listener = bind("api", &config.api.listen.listen).await?;
        let kubernetes_listener = match &config.agent.kubernetes_api {
            None => None,
            Some(section) => Some(bind("agent.kubernetes_api", &section.listen).await?),
        };
        let hooks_listener = match &config.hooks {
            None => None,
            Some(section) => Some((section.clone(), bind("hooks", &section.listen).await?)),
        };
        let direct_listener = match &config.direct {
            None => None,
            Some(section) => Some((section.clone(), bind("direct", &section.listen).await?)),
        };
        let private_listener = match config.tracker.private_api() {
            None => None,
            Some(private_api) => Some(bind("private_api", &private_api.listen).await?),
        };
        let admin_listener = bind("observability", &config.observability.listen).await?;
        let addresses = Addresses {
            agent: agent_listener.local_addr(),
            api: api_listener.local_addr(),
            kubernetes: kubernetes_listener.as_ref().and_then(Listener::local_addr),
            hooks: hooks_listener.as_ref().and_then(|(_, listener)| listener.local_addr()),
            direct: direct_listener.as_ref().and_then(|(_, listener)| listener.local_addr()),
            private: private_listener.as_ref().and_then(Listener::local_addr),
            observability: admin_listener.local_addr(),
        };

        let mut registry = Registry::default();
        registry.register(
            "gitlab_build",
            "The build of this process",
            Info::new([("version", version::VERSION), ("commit", version::COMMIT)]),
        );
        let process = ProcessMetrics::new(&mut registry);
        let requests = Arc::new(RequestMetrics::new(&mut registry));
        let refusals = Arc::new(Refusals::new(&mut registry));
        let replicas = Arc::new(ReplicaMetrics::new(&mut registry));
        let spans = Arc::new(traces::Counts::new(registry.sub_registry_with_prefix("kas")));
        let files = process::open_files::raise_limit();
        process.file_limit.set(files);
        config.limits.connections = config.limits.connections.with_files(files);
        let certificates = Arc::new(CertificateMetrics::new(&mut registry));
        let mut reloader = Reloader::new(Certificates::new(certificates));
        let (identity, gitlab) =
            open_identity(&config, secrets.gitlab.as_ref(), &mut registry, &mut reloader).await?;
        let git = Git::new(&config, gitlab.as_ref(), &mut registry, &mut reloader)?;
        let gitlab = gitlab.map(|gitlab| gitlab.client);
        let agent_tls =
            reloader.listener("agent", &config.agent.listen.listen, config.agent.listen.websocket)?;
        let api_tls = reloader.listener("api", &config.api.listen.listen, false)?;
        let kubernetes_tls = match &config.agent.kubernetes_api {
            None => kubernetes::EndpointTls::default(),
            Some(section) => kubernetes::tls(section, &mut reloader, addresses.kubernetes)?,
        };
        let hooks = match hooks_listener {
            None => None,
            Some((section, listener)) => {
                let tls = reloader.listener("hooks", &section.listen, true)?;
                Some(hooks::Bound { section, listener, tls })
            }
        };
        let direct = match direct_listener {
            None => None,
            Some((section, listener)) => Some(direct::Bound::new(section, listener, &mut reloader)?),
        };
        let private_tls = match config.tracker.private_api() {
            None => None,
            Some(private_api) => reloader.private(private_api)?,
        };
        let (private_tls, peer_tls) = private_tls.unzip();
        let lifecycle = Lifecycle::default();
        let started = Arc::<OnceLock<Synced>>::default();
        let (phase, synced) = (lifecycle.watch(), Arc::clone(&started));
        let page = config.observability.page.as_ref();
        let viewers = Arc::new(PageMetrics::new(&mut registry));
        let page = page.map(|page| Page::new(page, viewers));
        // Registered without the endpoint too, so that the families always exist.
        let kubernetes_metrics = Arc::new(kubernetes_api::Metrics::new(&mut registry));
        let audit_metrics = Arc::new(AuditMetrics::new(&mut registry, "kas"));
        let agent_metrics = Arc::new(AgentMetrics::new(&mut registry));
        let planner_metrics = Arc::new(PlannerMetrics::new(&mut registry));
        let fleet_metrics = Arc::new(FleetMetrics::new(&mut registry));
        let mailbox_metrics = Arc::new(MailboxMetrics::new(&mut registry));
        let direct_metrics = Arc::new(DirectMetrics::new(&mut registry));
        let view_metrics = Arc::new(ViewMetrics::new(&mut registry));
        let sink_metrics = Arc::new(SinkMetrics::new(&mut registry));
        let admin = Admin {
            metrics_path: config.observability.metrics_path.clone(),
            liveness_path: config.observability.liveness_path.clone(),
            readiness_path: config.observability.readiness_path.clone(),
            registry,
            unready: Box::new(move || unready(*phase.borrow(), synced.get())),
            refresh: Box::new(move || {
                let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
                process.tasks.set(i64::try_from(tasks).unwrap_or(i64::MAX));
            }),
            site: page.clone().map(|page| page as _),
        };
        let admin = Background(tokio::spawn(net::admin::run(admin_listener, admin, lifecycle.clone())));
        let bound_doors = Doors { api: addresses.api, http: addresses.kubernetes };
        let mesh = match (&config.tracker, &private_listener) {
            (kas_config::Tracker::Gossip(section), Some(listener)) => {
                let secrets = &secrets.private;
                Some(Mesh::gossip(section, secrets, peer_tls, listener, bound_doors, &replicas).await?)
            }
            (kas_config::Tracker::Redis(section), Some(listener)) => {
                let passwords = secrets.redis.clone();
                let secrets = &secrets.private;
                let (mesh, backend) =
                    Mesh::redis(section, secrets, passwords, peer_tls, listener, bound_doors, &replicas)
                        .await?;
                if let Some(before) = before_redis {
                    reloader.redis(before, &config, &section.redis, backend)?;
                }
                Some(mesh)
            }
            _ => None,
        };
        let (replica, tracker): (Replica, Arc<dyn Tracker>) = match &mesh {
            Some(mesh) => (mesh.me.clone(), Arc::clone(&mesh.backend) as Arc<dyn Tracker>),
            None => {
                let address =
                    addresses.api.map_or_else(|| config.api.listen.listen.address.clone(), |a| a.to_string());
                let replica = Replica { id: ReplicaId::new(&address), address: address.as_str().into() };
                (replica.clone(), Arc::new(InMemoryTracker::new(replica)))
            }
        };
        let naming = Naming {
            replica: HeaderValue::from_str(replica.id.as_str()).unwrap_or(HeaderValue::from_static("kas")),
            run: HeaderValue::from(rand::random::<u64>()),
            replicas: tracker.live(),
        };
        let tunnels = TunnelRegistry::new(
            Arc::clone(&tracker),
            Arc::clone(&requests),
            Limits {
                waiters_per_agent: config.limits.waiters_per_agent as usize,
                waiters: config.limits.waiters as usize,
                tunnels_per_agent: config.agent.listen.max_tunnels_per_agent as usize,
                endless_per_old_agent: kubernetes::endless_per_old_agent(&config),
            },
        );
        let router = Arc::new(Router::new(
            Arc::clone(&tunnels),
            Arc::clone(&tracker),
            Arc::clone(&refusals),
            config.limits.find_timeout,
            replica.id.clone(),
            mesh.as_ref().map(|mesh| Arc::clone(&mesh.peers)),
        ));
        let reported = gitlab.clone().map(|gitlab| gitlab as Arc<dyn gitlab::AgentConfigurations>);
        let configs = AgentConfigs::new(&config.agent.configuration, &git.repositories, reported);
        let pushes = Pushes::new(Arc::clone(&git.repositories), Arc::clone(&configs));
        let audit = match &config.observability.audit {
            None => None,
            Some(audit) => {
                let replica = replica.id.as_str().to_owned();
                Some(audit::Sink::open(&audit.output, audit.queue as usize, replica, audit_metrics)?)
            }
        };
        let (tracer, export) = match config.observability.tracing.clone() {
            None => (None, None),
            Some(kas_config::Tracing { collector, ratio, timeout, queue }) => {
                let settings = traces::Settings {
                    collector,
                    ratio,
                    timeout,
                    queue: queue as usize,
                    // 14.1's name.
                    service: "gitlab-kas".to_owned(),
                    instance: replica.id.as_str().to_owned(),
                    attributes: Vec::new(),
                };
                let (tracer, export) = traces::start(settings, spans)?;
                (Some(tracer), Some(export))
            }
        };
        let observer = {
            let identity = Arc::clone(&identity);
            Observer::new(
                audit.clone(),
                tracer.clone(),
                Box::new(move |agent| Some(identity.agent(agent)?.project_id)),
            )
        };
        let uses = git::PlannerUses {
            me: replica.id.clone(),
            identity: Arc::clone(&identity),
            tunnels: Arc::clone(&tunnels),
            configs: Arc::clone(&configs),
            tracker: Arc::clone(&tracker),
            router: Arc::clone(&router),
            observer: Arc::clone(&observer),
            metrics: Arc::clone(&planner_metrics),
            peers: mesh.as_ref().map(|mesh| Arc::clone(&mesh.peers)),
        };
        let (planners, sync) = git.planners(&config, uses);
        let files = AgentFiles::new(
            Arc::clone(sync.held()),
            Arc::clone(&tracker),
            replica.id.clone(),
            mesh.as_ref().map(|mesh| Arc::clone(&mesh.peers)),
        );
        let catalog = Catalog::new(CatalogParts {
            router: Arc::clone(&router),
            observer: Arc::clone(&observer),
            directory: AgentDirectory::new(Arc::clone(&identity), Arc::clone(&tracker)),
            files: Arc::clone(&files),
            rules: fleet::rules(&config.components)
                .map_err(|(index, why)| StartError::Components { index, why })?,
            metrics: Arc::clone(&fleet_metrics),
        });
        let hub = Hub::new(HubParts {
            settings: HubSettings {
                memory: usize::try_from(config.views.memory).unwrap_or(usize::MAX),
                linger: config.views.linger,
            },
            definitions: views::definitions(&config.views.files)
                .map_err(|(index, why)| StartError::Views { index, why })?,
            sources: Arc::new(Tunnels {
                task: "views",
                router: Arc::clone(&router),
                observer: Arc::clone(&observer),
                me: replica.id.clone(),
            }),
            tracker: Arc::clone(&tracker),
            identity: Arc::clone(&identity),
            namespaces: {
                let sync = Arc::clone(&sync);
                Box::new(move |agent| sync.namespaces_of(agent))
            },
            files: Arc::clone(&files) as _,
            me: replica.id.clone(),
            metrics: view_metrics,
            phase: lifecycle.watch(),
        });
        let sinks = sinks::part(
            &config.sinks,
            sinks::Uses {
                homes: sinks::HomesUses {
                    me: replica.id.clone(),
                    tracker: Arc::clone(&tracker),
                    sources: Arc::new(Tunnels {
                        task: "sinks",
                        router: Arc::clone(&router),
                        observer: Arc::clone(&observer),
                        me: replica.id.clone(),
                    }),
                    hub: Arc::clone(&hub),
                    files: Arc::clone(&files),
                },
                planners: sync.planners(),
                metrics: sink_metrics,
            },
        )
        .await?;
        let share = |name, limit: RateLimit| match &mesh {
            Some(mesh) => mesh.backend.share_limit(name, limit),
            None => Arc::new(limit),
        };
        let of_tokens = || {
            RateLimit::new(config.agent.listen.connections_per_token_per_minute, config.limits.token_burst)
        };
        let (connections, failures) = (share("connections", of_tokens()), share("failures", of_tokens()));
        let callers = config.agent.kubernetes_api.as_ref().and_then(kubernetes::rate_per_caller);
        let callers = callers.map(|limit| share("callers", limit));
        let mut parts = Parts::default();
        let synced = mesh.as_ref().map(|mesh| mesh.backend.ready());
        let hooks = hooks.map(|bound| {
            let uses = hooks::Uses {
                me: replica.id.clone(),
                tracker: Arc::clone(&tracker),
                peers: mesh.as_ref().map(|mesh| Arc::clone(&mesh.peers)),
                router: Arc::clone(&router),
                observer: Arc::clone(&observer),
                refusals: Arc::clone(&refusals),
                metrics: mailbox_metrics,
                sync: Arc::clone(&sync),
            };
            hooks::part(&config, bound, uses)
        });
        let (hooks_part, hooks_private, queries) = match hooks {
            None => (None, None, None),
            Some((part, private, queries)) => (Some(part), Some(private), Some(queries)),
        };
        let listen = &config.api.listen;
        let jwt = JwtVerifier::new(&secrets.api, &listen.issuers, listen.leeway);
        let api = ApiListener::new(
            jwt,
            Arc::clone(&router),
            Arc::clone(&tracker),
            Arc::clone(&refusals),
            Arc::clone(&pushes),
            git.gitaly.clone(),
            lifecycle.watch(),
            Arc::clone(&observer),
            config.limits.attempts,
            Arc::clone(&sync),
            queries,
            Arc::clone(&hub),
            Arc::clone(&catalog),
        );
        let peers = mesh.as_ref().map(|mesh| Arc::clone(&mesh.peers));
        if let Some(gitlab) = &gitlab {
            parts.add(Part::default().service(Arc::new(GitlabAccess::new(Arc::clone(gitlab)))));
        }
        let (usage, reports) = git::usage(&config, gitlab.as_ref(), planner_metrics).unzip();
        if let Some(reports) = reports {
            parts.add(Part::default().task(reports));
        }
        if let Some(flux) = git.flux(&pushes, lifecycle.watch(), usage.clone()) {
            parts.add(Part::default().service(flux));
        }
        parts.add(
            Part::default()
                .service(git.manifests(&config, lifecycle.watch(), usage.clone()))
                .task(Arc::clone(&git.repositories).run())
                .task(Arc::clone(&pushes).tell(Arc::clone(&tracker), peers)),
        );
        parts.add(sinks);
        // Before the part of the other replicas: hooks are handed over before this one leaves.
        if let Some(part) = hooks_part {
            parts.add(part);
        }
        let owners = direct.map(|bound| {
            let uses = direct::Uses {
                me: replica.id.clone(),
                doors: mesh.as_ref().map(|mesh| mesh.doors).unwrap_or_default(),
                tracker: Arc::clone(&tracker),
                tunnels: Arc::clone(&tunnels),
                metrics: direct_metrics,
                refusals: Arc::clone(&refusals),
            };
            let (part, owners) = direct::part(&config, bound, uses);
            parts.add(part);
            owners
        });
        let mut users = SecretUsers { api: Arc::clone(&api), private: None, gitlab };
        if let (Some(mesh), Some(listener), Some(private_api)) =
            (mesh, private_listener, config.tracker.private_api())
        {
            let mut services =
                Arc::clone(&mesh.backend).services(Arc::clone(&tunnels), Arc::clone(&refusals));
            services.push(sync.for_replicas());
            services.push(files.for_replicas());
            services.push(pushes.service());
            services.extend(hooks_private);
            let service = PrivateListener::new(
                JwtVerifier::for_replicas(&secrets.private),
                mesh.me.id.clone(),
                Arc::clone(&tunnels),
                Arc::clone(&refusals),
                services,
                tracer,
                // The configured limit is for callers. Replicas have their own.
                Attempts { header_list: HEADER_LIST, ..config.limits.attempts },
            );
            let rotated = Arc::clone(&service);
            users.private =
                Some(mesh.rotation(move |secrets| rotated.rotate(JwtVerifier::for_replicas(secrets))));
            parts.add(replicas_part(
                mesh,
                private_server(&config, private_api, listener, private_tls, service),
            ));
        }
        parts.add(planners);
        parts.add(
            Part::default()
                .drain({
                    let (tunnels, router) = (Arc::clone(&tunnels), Arc::clone(&router));
                    move || {
                        tunnels.drain();
                        router.leases().close();
                    }
                })
                .linger({
                    let tunnels = Arc::clone(&tunnels);
                    move || tunnels.refuse_waiters()
                })
                .end({
                    let tunnels = Arc::clone(&tunnels);
                    move || tunnels.refuse_waiters()
                }),
        );
        let mut endpoint = None;
        if let (Some(section), Some(listener)) = (&config.agent.kubernetes_api, kubernetes_listener) {
            let (phase, started) = (lifecycle.watch(), Arc::clone(&started));
            let uses = kubernetes::Uses {
                router: Arc::clone(&router),
                identity: Arc::clone(&identity),
                gitlab: users.gitlab.clone(),
                usage,
                tracker: Arc::clone(&tracker),
                sync: Arc::clone(&sync),
                files,
                fleet_metrics,
                hub: Arc::clone(&hub),
                catalog,
                owners: owners.map(|owners| owners as _),
                rate: callers,
                observer,
                metrics: kubernetes_metrics,
                refusals: Arc::clone(&refusals),
                lifecycle: lifecycle.clone(),
                is_ready: Box::new(move || unready(*phase.borrow(), started.get()).is_none()),
            };
            let (part, service) = kubernetes::part(&config, section, listener, kubernetes_tls, uses).await?;
            parts.add(part);
            endpoint = Some(service);
        }
        if let (Some(page), Some(section)) = (&page, &config.observability.page) {
            page.serve(Source {
                tracker: Arc::clone(&tracker),
                router: Arc::clone(&router),
                metrics: Arc::clone(&requests),
                phase: lifecycle.watch(),
                endpoint,
                callers: section.callers,
                views: section.views.then(|| Arc::clone(&hub)),
                clusters_url: section.clusters_url.clone(),
                sync: Arc::clone(&sync),
            });
        }
        let registrar = Registrar::new(Arc::clone(&tracker), Arc::clone(&tunnels), Arc::clone(&identity));
        parts.add(
            Part::default()
                .service(Arc::new(Registration(Arc::clone(&registrar))))
                .task(Arc::clone(&registrar).run()),
        );
        let agents = AgentListener::new(agent::Parts {
            identity,
            registry: tunnels,
            tracker,
            services: parts.take_services(),
            registrar,
            configs: Arc::clone(&configs),
            applier: sync::applier(&config.agent.gitops),
            metrics: agent_metrics,
            refusals,
            naming,
            proxied_idle: config.agent.listen.proxied_idle_timeout,
            rate_limit: connections,
            failures,
            attempts: config.limits.attempts,
        });
        parts.add(
            Part::default()
                .server(agent_server(&config, agent_listener, agent_tls, Arc::clone(&agents)))
                .task(Arc::clone(&agents).watch_identity())
                .task(configs.run())
                .linger({
                    let agents = Arc::clone(&agents);
                    move || agents.end_short()
                })
                .end(move || agents.end_all()),
        );
        // Its requests never outlast the drain.
        let api = api_server(&config, api_listener, api_tls, api);
        parts.add(Part::default().server_until(Phase::Lingering, api));
        parts.add(observe_part(audit, export));
        reloader.secrets(before, config.clone(), secrets, users);
        reloader.certificates.warn();
        parts.add(Part::default().task(reloader.run()));
        Ok(Self { config, addresses, parts, admin, started, synced, requests, lifecycle })
    }

    /// Returns the bound addresses.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the lifecycle, which can shut the replica down.
    pub fn lifecycle(&self) -> Lifecycle {
        self.lifecycle.clone()
    }

    /// Serves until `leave` resolves, then drains and returns. If `hurry` resolves meanwhile, open requests
    /// end at once.
    pub async fn run(self, leave: impl Future<Output = ()>, hurry: impl Future<Output = ()>) {
        let Self { config, addresses, mut parts, mut admin, started, synced, requests, lifecycle } = self;
        let show = |address: Option<SocketAddr>, listen: &kas_config::Listen| {
            address.map_or_else(|| listen.address.clone(), |address| address.to_string())
        };
        tracing::info!(
            version = version::VERSION,
            commit = version::COMMIT,
            agent = show(addresses.agent, &config.agent.listen.listen),
            api = show(addresses.api, &config.api.listen.listen),
            kubernetes = config
                .agent
                .kubernetes_api
                .as_ref()
                .map(|section| show(addresses.kubernetes, &section.listen)),
            direct = config.direct.as_ref().map(|section| show(addresses.direct, &section.listen)),
            hooks = config.hooks.as_ref().map(|section| show(addresses.hooks, &section.listen)),
            private = addresses.private.map(|address| address.to_string()),
            observability = show(addresses.observability, &config.observability.listen),
            "kas is serving"
        );
        let running = parts.start(&lifecycle);
        // It is set only here.
        let _ = started.set(synced);
        leave.await;
        let drain = async {
            tracing::info!(delay = ?config.drain.delay, "draining: not ready, but still serving");
            lifecycle.advance(Phase::Draining);
            parts.drain();
            tokio::time::sleep(config.drain.delay).await;
            lifecycle.advance(Phase::Leaving);
            tracing::info!(requests = requests.requests_open.get(), "leaving: open requests go on");
            let left = Instant::now();
            // A balancer may send new connections until they are refused. The last of them need time, too.
            none_left(&requests.requests_open, left + config.drain.timeout / 2).await;
            lifecycle.advance(Phase::Closing);
            tokio::time::sleep(LAST_ARRIVALS).await;
            none_left(&requests.requests_open, left + config.drain.timeout).await;
            let long = requests.requests_long.get();
            if long > 0 && config.drain.upgrade_grace > config.drain.timeout {
                let others = requests.requests_open.get() - long;
                tracing::info!(
                    upgraded = long,
                    requests = others,
                    grace = ?config.drain.upgrade_grace,
                    "drain timeout exceeded: upgraded connections go on, other open requests end with UNAVAILABLE"
                );
                parts.linger();
                lifecycle.advance(Phase::Lingering);
                none_left(&requests.requests_long, left + config.drain.upgrade_grace + UPGRADES_END).await;
            }
        };
        let hurried = tokio::select! {
            () = drain => false,
            () = hurry => true,
        };
        let open = requests.requests_open.get();
        if hurried && open > 0 {
            tracing::warn!(requests = open, "second shutdown signal: open requests end with UNAVAILABLE");
        } else if hurried {
            tracing::warn!("second shutdown signal: exiting now");
        } else if open > 0 {
            tracing::warn!(requests = open, "drain timeout exceeded: open requests end with UNAVAILABLE");
        }
        // The other replicas are informed first. Otherwise agents whose streams end could reconnect here
        // meanwhile.
        parts.farewell().await;
        parts.end();
        lifecycle.advance(Phase::Stopped);
        running.servers().await;
        // After the last requests, and before metrics stop, so that lost records and spans are counted.
        parts.finish().await;
        // Probes are answered until the end.
        let _ = (&mut admin.0).await;
        drop(running);
        tracing::info!("kas has stopped");
    }
}

/// Waits until a gauge of requests is 0, or for the given time.
async fn none_left(requests: &Gauge, until: Instant) {
    while requests.get() > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The part for the other replicas.
fn replicas_part(mesh: Mesh, server: Server) -> Part {
    let backend = Arc::clone(&mesh.backend);
    let leaving = Arc::clone(&mesh.backend);
    Part::default()
        .server(server)
        .task(mesh.run())
        .drain(move || backend.drain())
        .farewell(async move { leaving.leave().await })
}

/// The part for the audit log and the export of spans.
fn observe_part(audit: Option<Arc<audit::Sink>>, export: Option<traces::Export>) -> Part {
    let reopened = audit.clone();
    let reopen = reopened.map(|audit| move || audit.reopen());
    let mut part = Part::default().task(lifecycle::hangups(reopen));
    if let Some(audit) = audit {
        part = part.finish(async move { audit.flush().await });
    }
    if let Some(export) = export {
        part = part.finish(export.finish(SPANS));
    }
    part
}

fn agent_server(
    config: &Config,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    service: Arc<AgentListener>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: if config.agent.listen.websocket { Protocols::WebSocket } else { Protocols::Http2 },
        settings: config.limits.agents.of(AGENT),
        limits: config.limits.connections,
        age: Some(Age {
            age: config.agent.listen.max_connection_age.mul_f64(AGENT_AGE_SHARE),
            grace: config.agent.listen.max_connection_age_grace,
        }),
        service,
    }
}

fn api_server(
    config: &Config,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    service: Arc<ApiListener>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: Protocols::Http2,
        settings: config.limits.callers.of(API),
        limits: config.limits.connections,
        age: Some(Age { age: config.api.listen.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
        service,
    }
}

fn private_server(
    config: &Config,
    private_api: &kas_config::PrivateApi,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    service: Arc<PrivateListener>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: Protocols::Http2,
        settings: PEER,
        limits: net::http::Limits {
            pings: PEER_PINGS.0,
            ping_interval: PEER_PINGS.1,
            ..config.limits.connections
        },
        // After GOAWAY, a peer opens another link. Open requests stay on the old one.
        age: Some(Age { age: private_api.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
        service,
    }
}
