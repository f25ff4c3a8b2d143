//! Builds a replica from a configuration. [`Kas::bind`] binds every port, [`Kas::run`] serves until it is
//! shut down. Implementations of traits are chosen only here.

mod direct;
mod error;
mod git;
mod hooks;
mod identity;
mod kubernetes;
mod metrics;
mod part;
mod reload;
mod run;
mod servers;
mod sinks;

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ::identity::jwt::JwtVerifier;
use agent_config::AgentConfigs;
use cluster::{Doors, InMemoryTracker, Replica, Tracker};
use http::HeaderValue;
use ids::ReplicaId;
use net::{
    admin::Admin,
    http::{HEADER_LIST, Server},
    io::Listener,
};
use process::{
    files::Snapshot,
    lifecycle::{self, Lifecycle, Phase},
    version,
};
use prometheus_client::{metrics::info::Info, registry::Registry};
use tokio::{sync::watch, task::JoinHandle};

pub use self::error::StartError;
use self::{
    git::Git,
    metrics::ProcessMetrics,
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
    page::{Page, PageMetrics, Source},
    preflight,
    pushes::Pushes,
    registrar::Registrar,
    replicas::{Mesh, metrics::ReplicaMetrics},
    sinks::SinkMetrics,
    sync,
    views::{self, Buffers, Hub, HubParts, HubSettings, Tunnels, ViewMetrics},
};
use kas_config::{self, Attempts, Config};
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

/// How long the last spans may take to be exported.
const SPANS: Duration = Duration::from_secs(2);

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
        let agent_listener = servers::bind("agent", &config.agent.listen.listen).await?;
        let api_listener = servers::bind("api", &config.api.listen.listen).await?;
        let kubernetes_listener = match &config.agent.kubernetes_api {
            None => None,
            Some(section) => Some(servers::bind("agent.kubernetes_api", &section.listen).await?),
        };
        let hooks_listener = match &config.hooks {
            None => None,
            Some(section) => Some((section.clone(), servers::bind("hooks", &section.listen).await?)),
        };
        let direct_listener = match &config.direct {
            None => None,
            Some(section) => Some((section.clone(), servers::bind("direct", &section.listen).await?)),
        };
        let private_listener = match config.tracker.private_api() {
            None => None,
            Some(private_api) => Some(servers::bind("private_api", &private_api.listen).await?),
        };
        let admin_listener = servers::bind("observability", &config.observability.listen).await?;
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
            identity::open(&config, secrets.gitlab.as_ref(), &mut registry, &mut reloader).await?;
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
        let memory = usize::try_from(config.views.memory).unwrap_or(usize::MAX);
        let buffers = Buffers::new(memory, &view_metrics);
        let hub = Hub::new(HubParts {
            settings: HubSettings { memory, linger: config.views.linger, rights: config.views.rights_period },
            definitions: views::definitions(&config.views.files)
                .map_err(|(index, why)| StartError::Views { index, why })?,
            sources: Arc::new(Tunnels {
                task: "views",
                router: Arc::clone(&router),
                observer: Arc::clone(&observer),
                buffers: Arc::clone(&buffers),
                me: replica.id.clone(),
            }),
            buffers: Arc::clone(&buffers),
            tracker: Arc::clone(&tracker),
            identity: Arc::clone(&identity),
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
                        buffers: Arc::clone(&buffers),
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
            #[cfg(any(test, feature = "flaws"))]
            let services = crate::replicas::records::services(services);
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
                servers::private(&config, private_api, listener, private_tls, service),
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
                .server(servers::agent(&config, agent_listener, agent_tls, Arc::clone(&agents)))
                .task(Arc::clone(&agents).watch_identity())
                .task(configs.run())
                .linger({
                    let agents = Arc::clone(&agents);
                    move || agents.end_short()
                })
                .end(move || agents.end_all()),
        );
        // Its requests never outlast the drain.
        let api = servers::api(&config, api_listener, api_tls, api);
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
