//! From a configuration to a running replica: [`Kas::bind`] takes every port, [`Kas::run`] serves
//! until told to leave. The only place that picks implementations.

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use cluster::{InMemoryTracker, Replica, Tracker};
use http::HeaderValue;
use ids::ReplicaId;
use prometheus_client::{metrics::info::Info, registry::Registry};
use runtime::{
    admin::Admin,
    files::{self, Before, Followed},
    http2::{self, Age, Server},
    io::{Address, Listener},
    lifecycle::{self, Lifecycle, Phase},
    tls, version,
};
use tokio::{sync::watch, task::JoinHandle, time::Instant};

use crate::{
    agent_config::AgentConfigs,
    audit,
    auth::JwtVerifier,
    certificates::{Certificates, PrivateTls},
    config::{self, Config, Problems, Secrets, secret::ApiSecret},
    gitlab,
    identity::{
        FileIdentity, Identity, IfAbsent, OpenError,
        gitlab::{GitLabIdentity, Times},
    },
    listener::{
        Attempts, Naming,
        agent::{AgentListener, Parts},
        api::ApiListener,
        private::PrivateListener,
    },
    mesh::{self, Mesh, MeshError, Rotation},
    metrics::Metrics,
    observe::Observer,
    page::{Page, Source},
    peer::kept::Kept,
    rate_limit::RateLimit,
    registrar::Registrar,
    router::Router,
    shared::Shared,
    tunnel_registry::{Limits, TunnelRegistry},
};

/// GOAWAY comes at this share of an agent connection's maximum age, so that two long calls fit
/// below it: 14.1's numbers.
const AGENT_AGE_SHARE: f64 = 0.35;
/// And at this share for callers.
const API_AGE_SHARE: f64 = 0.8;
/// Pings of another replica at once, and one more in each of this time: it asks each 3 s whether this one is there.
const PEER_PINGS: (u32, Duration) = (50, Duration::from_secs(1));
/// How long the last spans may take to be exported.
const SPANS: Duration = Duration::from_secs(2);

/// Why kas could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is wrong.
    #[error("{0}")]
    Config(Problems),
    /// A port cannot be taken.
    #[error("{section}.listen.address: cannot listen on {address}")]
    Bind {
        /// Which listener.
        section: &'static str,
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// A certificate or key cannot be used any more, although it has just been checked.
    #[error("{section}.listen: TLS cannot be set up")]
    Tls {
        /// Which listener.
        section: &'static str,
        /// Why.
        source: tls::Error,
    },
    /// The certificates of the section `redis` cannot be used any more, although they have just been checked.
    #[error("redis.tls: {0}")]
    Redis(String),
    /// The identity file cannot be used.
    #[error("identity.file cannot be used")]
    Identity(#[source] OpenError),
    /// GitLab cannot be asked.
    #[error("GitLab cannot be asked")]
    GitLab(#[source] gitlab::Error),
    /// The secret for GitLab was not loaded.
    #[error("gitlab.authentication_secret_file was not read")]
    NoSecret,
    /// The audit log cannot begin.
    #[error(transparent)]
    Audit(#[from] audit::OpenError),
    /// Spans cannot be exported.
    #[error("observability.tracing: spans cannot be exported")]
    Tracing(#[from] traces::Error),
    /// The other replicas cannot be looked for.
    #[error("the other replicas cannot be looked for")]
    Mesh(#[from] MeshError),
    /// The state folder cannot be made.
    #[error("state_dir: cannot make {path}")]
    State {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Addresses that were taken; `None` for a Unix socket.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Where agents dial.
    pub agent: Option<SocketAddr>,
    /// Where GitLab and operators call.
    pub api: Option<SocketAddr>,
    /// Where other replicas call, if there are any.
    pub private: Option<SocketAddr>,
    /// Metrics and probes.
    pub observability: Option<SocketAddr>,
}

/// Whether other replicas are known well enough, and what is said until then; `None`: there are no others.
type Synced = Option<(watch::Receiver<bool>, &'static str)>;

/// A task that ends with its owner.
struct Background(JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A replica whose ports are taken; only probes and metrics are served yet.
pub struct Kas {
    config: Config,
    addresses: Addresses,
    agent: Server,
    api: Server,
    private: Option<(Server, Mesh, Arc<PrivateListener>)>,
    /// Answers probes since the ports were taken.
    admin: Background,
    /// What readiness waits for, once everything is served.
    started: Arc<OnceLock<Synced>>,
    agents: Arc<AgentListener>,
    tunnels: Arc<TunnelRegistry>,
    kept: Arc<Kept>,
    configs: Arc<AgentConfigs>,
    metrics: Arc<Metrics>,
    audit: Option<Arc<audit::Sink>>,
    export: Option<traces::Export>,
    lifecycle: Lifecycle,
    following: Following,
}

impl std::fmt::Debug for Kas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kas").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

async fn bind(section: &'static str, listen: &config::Listen) -> Result<Listener, StartError> {
    let text = listen.address.clone();
    let address = match listen.network {
        config::Network::Tcp => Address::Tcp(text),
        config::Network::Tcp4 => Address::Tcp4(text),
        config::Network::Tcp6 => Address::Tcp6(text),
        config::Network::Unix => Address::Unix(text.into()),
    };
    Listener::bind(&address).await.map_err(|source| StartError::Bind {
        section,
        address: address.to_string(),
        source,
    })
}

/// What follows its files while kas runs.
struct Following {
    certificates: Arc<Certificates>,
    all: Vec<Followed>,
}

impl Following {
    fn listener(
        &mut self,
        section: &'static str,
        listen: &config::Listen,
        http1: bool,
    ) -> Result<Option<tls::Live<rustls::ServerConfig>>, StartError> {
        let Some(files) = &listen.tls else { return Ok(None) };
        let (live, followed) = self
            .certificates
            .listener(section, files, http1)
            .map_err(|source| StartError::Tls { section, source })?;
        self.all.push(followed);
        Ok(Some(live))
    }

    fn private(&mut self, private: &config::PrivateApi) -> Result<Option<PrivateTls>, StartError> {
        let Some(files) = &private.listen.tls else { return Ok(None) };
        let (live, followed) = self
            .certificates
            .private(private, files)
            .map_err(|source| StartError::Tls { section: "private_api", source })?;
        self.all.push(followed);
        Ok(Some(live))
    }

    /// Keeps an authority of GitLab as its file is.
    fn gitlab(&mut self, gitlab: &config::GitLab, before: Before, client: Arc<gitlab::Client>) {
        let Some(file) = gitlab.ca_certificate.clone() else { return };
        self.all.push(before.then("gitlab.ca_certificate_file", move || {
            client
                .trust(Some(&file), &gitlab::Proxies::from_env())
                .map_err(|error| crate::peer::chain(&error))?;
            Ok("exchanged: GitLab is trusted by it from the next connection on".to_owned())
        }));
    }

    /// Keeps what is shown to Redis, and who is trusted there, as their files are.
    fn redis(
        &mut self,
        before: Before,
        config: &Config,
        section: &config::Redis,
        shared: Arc<Shared>,
    ) -> Result<(), StartError> {
        let note = |certificates: &Certificates, redis: &config::Redis| match &redis.tls {
            Some(tls) => certificates.redis(tls),
            None => Ok(()),
        };
        note(&self.certificates, section).map_err(StartError::Redis)?;
        let (config, redis) = (config.clone(), section.clone());
        let certificates = Arc::clone(&self.certificates);
        self.all.push(before.then("redis", move || {
            let passwords =
                config.check_redis().map_err(|problems| problems.to_string().replace('\n', "; "))?;
            note(&certificates, &redis)?;
            shared.exchange(&redis, passwords).map_err(|error| crate::peer::chain(&error))?;
            Ok("exchanged: new connections to Redis are made with what is in the files, open ones stay"
                .to_owned())
        }));
        Ok(())
    }

    /// Keeps the secrets in use as their files are, by the rules of a start.
    fn secrets(&mut self, before: Before, config: Config, mut used: Secrets, users: SecretUsers) {
        self.all.push(before.then("secrets", move || {
            let new = config.check_secrets().map_err(|problems| problems.to_string().replace('\n', "; "))?;
            if new.api.is_empty() {
                return Err("the secret file of the API is not there".to_owned());
            }
            let mut exchanged = Vec::new();
            // First what may fail.
            if new.private != used.private
                && let Some(rotation) = &users.private
            {
                rotation.exchange(&new.private).map_err(|error| error.to_string())?;
                exchanged.push("the private API");
            }
            if new.api != used.api {
                let listen = &config.api.listen;
                users.api.rotate(JwtVerifier::new(&new.api, &listen.issuers, listen.leeway));
                exchanged.push("the API");
            }
            if new.gitlab != used.gitlab
                && let (Some(client), Some(secret)) = (&users.gitlab, &new.gitlab)
            {
                client.rotate(secret);
                exchanged.push("GitLab");
            }
            used = new;
            Ok(match exchanged.as_slice() {
                [] => "written anew, and the same as before".to_owned(),
                _ => format!("the secrets of {} were exchanged", exchanged.join(" and ")),
            })
        }));
    }
}

/// Who uses secrets.
struct SecretUsers {
    api: Arc<ApiListener>,
    private: Option<Rotation>,
    gitlab: Option<Arc<gitlab::Client>>,
}

/// Says why a replica is not ready; `started`: once everything is served.
fn unready(phase: Phase, started: Option<&Synced>) -> Option<String> {
    let why = match (phase, started) {
        (Phase::Serving, None) => "starting: where other replicas reach this one may not be known yet",
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
    metrics: &Arc<Metrics>,
    following: &mut Following,
) -> Result<(Arc<dyn Identity>, Option<Arc<gitlab::Client>>), StartError> {
    match (&config.identity, secret) {
        (config::Identity::File { file, is_default }, _) => {
            let if_absent = if *is_default { IfAbsent::Make } else { IfAbsent::Refuse };
            let identity = FileIdentity::open(file, if_absent).await.map_err(StartError::Identity)?;
            Ok((Arc::new(identity), None))
        }
        (config::Identity::GitLab(gitlab), Some(secret)) => {
            let before = Before::reading(gitlab.ca_certificate.iter().cloned().collect());
            let client =
                gitlab::Client::new(gitlab, secret, &gitlab::Proxies::from_env(), Arc::clone(metrics))
                    .map_err(StartError::GitLab)?;
            let client = Arc::new(client);
            following.gitlab(gitlab, before, Arc::clone(&client));
            let times = Times {
                ttl: gitlab.info_cache_ttl,
                error_ttl: gitlab.info_cache_error_ttl,
                renewal_without_cache: config.agent.configuration.poll_period,
            };
            tracing::info!(address = %gitlab.address, "agents are known from GitLab");
            let identity = GitLabIdentity::new(Arc::clone(&client) as _, times, Arc::clone(metrics));
            Ok((Arc::new(identity), Some(client)))
        }
        // Secrets were loaded for this configuration.
        (config::Identity::GitLab(_), None) => Err(StartError::NoSecret),
    }
}

impl Kas {
    /// Checks everything that can be checked and takes every port.
    ///
    /// It may take a minute until this replica's own address is known; probes and metrics are served meanwhile: it is
    /// alive, and not ready.
    ///
    /// # Errors
    /// See [`StartError`]; nothing but probes and metrics was served.
    pub async fn bind(config: Config) -> Result<Self, StartError> {
        if let Some(path) = &config.state_dir
            && (matches!(config.identity, config::Identity::File { is_default: true, .. })
                || matches!(config.api.secrets, config::ApiSecrets::Made(_)))
        {
            std::fs::create_dir_all(path)
                .map_err(|source| StartError::State { path: path.clone(), source })?;
        }
        let before = Before::reading(config.secret_files());
        let before_redis = match &config.tracker {
            config::Tracker::Redis(shared) => Some(Before::reading(shared.redis.files())),
            _ => None,
        };
        let (secrets, warnings) = config.prepare().map_err(StartError::Config)?;
        for warning in warnings {
            tracing::warn!(path = warning.path, "{}", warning.text);
        }
        let before = match &secrets.created {
            None => before,
            Some(path) => {
                tracing::info!(path = %path.display(), "made a secret for the api listener");
                Before::reading(config.secret_files())
            }
        };
        let agent_listener = bind("agent", &config.agent.listen.listen).await?;
        let api_listener = bind("api", &config.api.listen.listen).await?;
        let private_listener = match config.tracker.private_api() {
            None => None,
            Some(private_api) => Some(bind("private_api", &private_api.listen).await?),
        };
        let admin_listener = bind("observability", &config.observability.listen).await?;
        let addresses = Addresses {
            agent: agent_listener.local_addr(),
            api: api_listener.local_addr(),
            private: private_listener.as_ref().and_then(Listener::local_addr),
            observability: admin_listener.local_addr(),
        };

        let mut registry = Registry::default();
        registry.register(
            "gitlab_build",
            "Which build this is",
            Info::new([("version", version::VERSION), ("commit", version::COMMIT)]),
        );
        let metrics = Arc::new(Metrics::new(&mut registry));
        let spans = Arc::new(traces::Counts::new(registry.sub_registry_with_prefix("kas")));
        metrics.file_limit.set(runtime::io::raise_file_limit());
        let mut following =
            Following { certificates: Certificates::new(Arc::clone(&metrics)), all: Vec::new() };
        let (identity, gitlab) =
            open_identity(&config, secrets.gitlab.as_ref(), &metrics, &mut following).await?;
        let agent_tls =
            following.listener("agent", &config.agent.listen.listen, config.agent.listen.websocket)?;
        let api_tls = following.listener("api", &config.api.listen.listen, false)?;
        let private_tls = match config.tracker.private_api() {
            None => None,
            Some(private_api) => following.private(private_api)?,
        };
        let (private_tls, peer_tls) = private_tls.unzip();
        let lifecycle = Lifecycle::default();
        let started = Arc::<OnceLock<Synced>>::default();
        let (phase, synced) = (lifecycle.watch(), Arc::clone(&started));
        let page = config.observability.page.as_ref().map(|page| Page::new(page, Arc::clone(&metrics)));
        let admin = Admin {
            metrics_path: config.observability.metrics_path.clone(),
            liveness_path: config.observability.liveness_path.clone(),
            readiness_path: config.observability.readiness_path.clone(),
            registry,
            unready: Box::new(move || unready(*phase.borrow(), synced.get())),
            refresh: {
                let metrics = Arc::clone(&metrics);
                Box::new(move || {
                    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
                    metrics.tasks.set(i64::try_from(tasks).unwrap_or(i64::MAX));
                })
            },
            site: page.clone().map(|page| page as _),
        };
        let admin = Background(tokio::spawn(runtime::admin::run(admin_listener, admin, lifecycle.clone())));
        let mesh = match (&config.tracker, &private_listener) {
            (config::Tracker::Gossip(replication), Some(listener)) => {
                Some(Mesh::bind(replication, &secrets.private, peer_tls, listener, &metrics).await?)
            }
            (config::Tracker::Redis(shared), Some(listener)) => Some(
                Mesh::share(shared, &secrets.private, secrets.redis.clone(), peer_tls, listener, &metrics)
                    .await?,
            ),
            _ => None,
        };
        if let (config::Tracker::Redis(section), Some(before), Some(shared)) =
            (&config.tracker, before_redis, mesh.as_ref().and_then(|mesh| mesh.others.shared()))
        {
            following.redis(before, &config, &section.redis, shared)?;
        }
        let (replica, tracker): (Replica, Arc<dyn Tracker>) = match &mesh {
            Some(mesh) => (mesh.me.clone(), mesh.others.tracker()),
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
            Arc::clone(&metrics),
            Limits {
                waiters_per_agent: config.limits.waiters_per_agent as usize,
                waiters: config.limits.waiters as usize,
                tunnels_per_agent: config.agent.listen.max_tunnels_per_agent as usize,
            },
        );
        let router = Arc::new(Router::new(
            Arc::clone(&tunnels),
            Arc::clone(&tracker),
            Arc::clone(&metrics),
            config.limits.find_timeout,
            replica.id.clone(),
            mesh.as_ref().map(|mesh| Arc::clone(&mesh.peers)),
        ));
        let kept = Arc::clone(router.kept());
        if let Some(page) = &page {
            page.serve(Source {
                tracker: Arc::clone(&tracker),
                router: Arc::clone(&router),
                metrics: Arc::clone(&metrics),
                phase: lifecycle.watch(),
            });
        }
        let configs = AgentConfigs::new(&config.agent.configuration);
        let audit = match &config.observability.audit {
            None => None,
            Some(audit) => {
                let (replica, metrics) = (replica.id.as_str().to_owned(), Arc::clone(&metrics));
                Some(audit::Sink::open(&audit.output, audit.queue as usize, replica, metrics)?)
            }
        };
        let (tracer, export) = match config.observability.tracing.clone() {
            None => (None, None),
            Some(config::Tracing { collector, ratio, timeout, queue }) => {
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
        let observer = Observer::new(audit.clone(), tracer.clone(), Arc::clone(&identity));
        let rate_limit = || {
            let limit = RateLimit::new(
                config.agent.listen.connections_per_token_per_minute,
                config.limits.token_burst,
            );
            Arc::new(match &mesh {
                Some(mesh) => mesh.others.keep_together(limit),
                None => limit,
            })
        };
        let (connections, failures) = (rate_limit(), rate_limit());
        if let Some(mesh) = &mesh {
            mesh.others
                .tell([("connections", Arc::clone(&connections)), ("failures", Arc::clone(&failures))]);
        }
        let registrar = Registrar::new(Arc::clone(&tracker), Arc::clone(&tunnels), Arc::clone(&identity));
        let agents = AgentListener::new(Parts {
            identity,
            registry: Arc::clone(&tunnels),
            tracker: Arc::clone(&tracker),
            registrar,
            configs: Arc::clone(&configs),
            metrics: Arc::clone(&metrics),
            naming,
            proxied_idle: config.agent.listen.proxied_idle_timeout,
            rate_limit: connections,
            failures,
            attempts: config.limits.attempts,
        });
        let listen = &config.api.listen;
        let jwt = JwtVerifier::new(&secrets.api, &listen.issuers, listen.leeway);
        let api = ApiListener::new(
            jwt,
            router,
            tracker,
            Arc::clone(&metrics),
            Arc::clone(&configs),
            lifecycle.watch(),
            observer,
            config.limits.attempts,
        );

        let private = match (mesh, private_listener, config.tracker.private_api()) {
            (Some(mesh), Some(listener), Some(listen)) => {
                mesh.others.serve(Arc::clone(&tunnels));
                let service = PrivateListener::new(
                    mesh::verifier(&secrets.private),
                    mesh.me.id.clone(),
                    Arc::clone(&tunnels),
                    Arc::clone(&metrics),
                    mesh.services(),
                    tracer,
                    // What replicas send each other does not depend on what others may send.
                    Attempts { header_list: http2::HEADER_LIST, ..config.limits.attempts },
                );
                let server = Server {
                    listener,
                    tls: private_tls,
                    websocket: false,
                    settings: http2::PEER,
                    limits: http2::Limits {
                        pings: PEER_PINGS.0,
                        ping_interval: PEER_PINGS.1,
                        ..config.limits.connections
                    },
                    // After GOAWAY a peer opens another link; what is in the old one goes on.
                    age: Some(Age { age: listen.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
                    service: Arc::clone(&service) as _,
                };
                Some((server, mesh, service))
            }
            _ => None,
        };
        let users = SecretUsers {
            api: Arc::clone(&api),
            private: private.as_ref().map(|(_, mesh, service)| mesh.rotation(Arc::clone(service))),
            gitlab,
        };
        following.secrets(before, config.clone(), secrets, users);
        following.certificates.tell();
        Ok(Self {
            following,
            agent: Server {
                listener: agent_listener,
                tls: agent_tls,
                websocket: config.agent.listen.websocket,
                settings: config.limits.agents.of(http2::AGENT),
                limits: config.limits.connections,
                age: Some(Age {
                    age: config.agent.listen.max_connection_age.mul_f64(AGENT_AGE_SHARE),
                    grace: config.agent.listen.max_connection_age_grace,
                }),
                service: Arc::clone(&agents) as _,
            },
            api: Server {
                listener: api_listener,
                tls: api_tls,
                websocket: false,
                settings: config.limits.callers.of(http2::API),
                limits: config.limits.connections,
                age: Some(Age { age: listen.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
                service: api,
            },
            private,
            admin,
            started,
            addresses,
            agents,
            tunnels,
            kept,
            configs,
            metrics,
            audit,
            export,
            lifecycle,
            config,
        })
    }

    /// Returns the addresses that were taken.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the switch that makes the replica leave.
    pub fn lifecycle(&self) -> Lifecycle {
        self.lifecycle.clone()
    }

    /// Serves until `leave` resolves, then drains and returns. A second resolution of `hurry` ends
    /// at once what is still open.
    pub async fn run(self, leave: impl Future<Output = ()>, hurry: impl Future<Output = ()>) {
        let Self {
            config,
            agent,
            api,
            private,
            mut admin,
            started,
            agents,
            tunnels,
            kept,
            configs,
            metrics,
            audit,
            export,
            lifecycle,
            following,
            ..
        } = self;
        let show = |address: Option<SocketAddr>, listen: &config::Listen| {
            address.map_or_else(|| listen.address.clone(), |address| address.to_string())
        };
        tracing::info!(
            version = version::VERSION,
            commit = version::COMMIT,
            agent = show(self.addresses.agent, &config.agent.listen.listen),
            api = show(self.addresses.api, &config.api.listen.listen),
            private = self.addresses.private.map(|address| address.to_string()),
            observability = show(self.addresses.observability, &config.observability.listen),
            "kas is serving"
        );
        let servers = tokio_util::task::TaskTracker::new();
        servers.spawn(agent.run(lifecycle.clone()));
        servers.spawn(api.run(lifecycle.clone()));
        let synced = private.as_ref().map(|(_, mesh, _)| mesh.others.ready());
        // Nobody else sets it.
        let _ = started.set(synced);
        let mut background = vec![
            tokio::spawn(Arc::clone(&agents).watch_identity()),
            tokio::spawn(agents.registrar().run()),
            tokio::spawn(configs.run()),
        ];
        let reopen = audit.clone().map(|audit| move || audit.reopen());
        background.push(tokio::spawn(lifecycle::hangups(reopen)));
        let Following { certificates, all } = following;
        background.push(tokio::spawn(files::follow(all, move || certificates.tell())));
        let mut others = None;
        if let Some((server, mesh, _)) = private {
            servers.spawn(server.run(lifecycle.clone()));
            others = Some(mesh.others.clone());
            background.push(tokio::spawn(mesh.run()));
        }
        servers.close();
        leave.await;
        let drain = async {
            tracing::info!(delay = ?config.drain.delay, "draining: not ready any more, everything is still served");
            lifecycle.advance(Phase::Draining);
            if let Some(others) = &others {
                others.drain();
            }
            tunnels.drain();
            kept.close();
            tokio::time::sleep(config.drain.delay).await;
            lifecycle.advance(Phase::Leaving);
            tracing::info!(requests = metrics.requests_open.get(), "leaving: open requests go on");
            let until = Instant::now() + config.drain.timeout;
            while metrics.requests_open.get() > 0 && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let hurried = tokio::select! {
            () = drain => false,
            () = hurry => true,
        };
        let open = metrics.requests_open.get();
        if hurried && open > 0 {
            tracing::warn!(requests = open, "told again to leave: what is still open ends with UNAVAILABLE");
        } else if hurried {
            tracing::warn!("told again to leave: not waiting any longer");
        } else if open > 0 {
            tracing::warn!(
                requests = open,
                "the drain timeout is over: what is still open ends with UNAVAILABLE"
            );
        }
        // First the last word to the others, which takes a moment: agents whose streams end would come back meanwhile.
        if let Some(others) = &others {
            others.leave().await;
        }
        tunnels.refuse_waiters();
        agents.end_all();
        lifecycle.advance(Phase::Stopped);
        servers.wait().await;
        // After the last requests have ended, and before probes stop: what is lost here is counted.
        let flush = async {
            if let Some(audit) = &audit {
                audit.flush().await;
            }
        };
        let finish = async {
            if let Some(export) = export {
                export.finish(SPANS).await;
            }
        };
        tokio::join!(flush, finish);
        // Probes are answered to the end.
        let _ = (&mut admin.0).await;
        for task in background {
            task.abort();
        }
        tracing::info!("kas has left");
    }
}
