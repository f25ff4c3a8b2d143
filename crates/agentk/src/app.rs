//! From arguments to a running agent.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use http::HeaderValue;
use prometheus_client::registry::Registry;
use proto::gitlab::agent::{agentcfg::LoggingLevelEnum, modshared::AgentMeta};
use runtime::{
    admin::{self, Admin},
    files::{self, Before},
    io::{Address, Listener},
    lifecycle::{self, Lifecycle, Phase, Signals},
    proxy::Proxies,
    telemetry::Level,
    tls, version,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cluster::ClusterAccess,
    dial::{Dialer, KasAddresses, KasHeader, KasHeaders},
    metrics::Metrics,
    module::{Module, Modules, bench::Bench, kubernetes_api::KubernetesApi},
    session::Shared,
    supervisor,
    token::TokenFile,
};

/// How long open requests go on after a signal to leave; a pod's usual grace is 30 s.
const DRAIN: Duration = Duration::from_secs(25);

/// How long the last spans may take to be exported.
const SPANS: Duration = Duration::from_secs(2);
/// How long one export may take, and how many spans may wait for it: OpenTelemetry's own numbers.
const EXPORT: (Duration, usize) = (Duration::from_secs(10), 2_048);

/// What the agent is told.
#[derive(Debug)]
pub struct Settings {
    /// How to reach kas.
    pub kas: KasAccess,
    /// How to reach the cluster.
    pub cluster: ClusterAccess,
    /// Metrics and probes.
    pub observability_address: String,
    /// Replicas of kas to be connected to at once.
    pub replicas: usize,
    /// The most tunnels at once.
    pub max_tunnels: usize,
    /// Serves the benchmark's service too.
    pub bench_module: bool,
    /// Who takes spans; `None`: none are made.
    pub collector: Option<traces::Collector>,
    /// Namespace and name of the pod.
    pub pod: (String, String),
}

/// How to reach kas, and what to show there.
#[derive(Debug, Clone)]
pub struct KasAccess {
    /// Where it is: ways of which the first that passes is kept, and places that are dialled in turn.
    pub addresses: KasAddresses,
    /// The file with the agent token.
    pub token_file: PathBuf,
    /// Further roots for TLS.
    pub ca_cert_file: Option<PathBuf>,
    /// The name that its certificate must have, instead of the host of its address.
    pub tls_server_name: Option<String>,
    /// Headers for proxies in between.
    pub headers: Vec<KasHeader>,
}

impl KasAccess {
    /// Reads files and the environment; connects to nobody yet.
    ///
    /// # Errors
    /// When something cannot be used: says which flag or variable.
    pub fn dialer(&self) -> anyhow::Result<Dialer> {
        let tls = tls::client(self.ca_cert_file.as_deref()).context("--ca-cert-file")?;
        let dialer = self.dialer_with(tls, Proxies::from_env())?;
        for address in self.addresses.as_slice() {
            dialer.proxy(address)?;
        }
        Ok(dialer)
    }

    /// As [`dialer`](Self::dialer), with this TLS; a proxy that cannot be used is not looked for.
    ///
    /// # Errors
    /// As of [`dialer`](Self::dialer).
    pub fn dialer_with(&self, tls: Arc<rustls::ClientConfig>, proxies: Proxies) -> anyhow::Result<Dialer> {
        let addresses = self.addresses.as_slice();
        let headers = KasHeaders::new(self.headers.clone(), addresses).context("--kas-header")?;
        Dialer::new(tls, self.tls_server_name.as_deref(), headers, proxies).context("--kas-tls-server-name")
    }
}

/// Runs until a signal, then lets open requests finish.
///
/// # Errors
/// When something of the settings cannot be used.
pub async fn run(settings: Settings, level: Level) -> anyhow::Result<()> {
    runtime::io::raise_file_limit();
    let mut signals = Signals::new()?;
    let token = TokenFile::new(settings.kas.token_file.clone());
    token.authorization().context("--token-file")?;
    let before = Before::reading(settings.kas.ca_cert_file.iter().cloned().collect());
    let dialer = Arc::new(settings.kas.dialer()?);
    let ca = {
        let (file, dialer) = (settings.kas.ca_cert_file.clone(), Arc::clone(&dialer));
        before.then("--ca-cert-file", move || {
            dialer.trust(
                tls::client(file.as_deref()).map_err(|error| format!("{:#}", anyhow::Error::new(error)))?,
            );
            Ok("exchanged: kas is trusted by it from the next connection on".to_owned())
        })
    };
    let api_server = settings.cluster.connect().await?;
    tracing::info!(
        version = version::VERSION,
        commit = version::COMMIT,
        kas = %settings.kas.addresses,
        cluster = api_server.target().host(),
        "agentk is starting"
    );
    for address in settings.kas.addresses.as_slice() {
        if let Some(proxy) = dialer.proxy(address)? {
            tracing::info!(address = %address, %proxy, variable = proxy.variable(), "kas is reached through a proxy");
        }
    }
    let mut registry = Registry::default();
    let spans = Arc::new(traces::Counts::new(registry.sub_registry_with_prefix("agentk")));
    let instance = format!("{:032x}", rand::random::<u128>());
    let (tracer, export) = match settings.collector {
        None => (None, None),
        Some(collector) => {
            let (namespace, pod) = &settings.pod;
            let attributes = [("k8s.namespace.name", namespace), ("k8s.pod.name", pod)]
                .into_iter()
                .filter(|(_, value)| !value.is_empty())
                .map(|(key, value)| (key.to_owned(), value.clone()));
            let settings = traces::Settings {
                collector,
                // kas has decided about what comes from it, and nothing begins here.
                ratio: 1.0,
                timeout: EXPORT.0,
                queue: EXPORT.1,
                service: "gitlab-agent".to_owned(),
                instance: instance.clone(),
                attributes: attributes.collect(),
            };
            let (tracer, export) = traces::start(settings, spans).context("spans cannot be exported")?;
            (Some(tracer), Some(export))
        }
    };
    let kubernetes = KubernetesApi::new(api_server, version::VERSION, version::COMMIT);
    let mut modules: Vec<Arc<dyn Module>> = vec![Arc::new(kubernetes.traced(tracer.clone()))];
    if settings.bench_module {
        modules.push(Arc::new(Bench));
    }
    let modules = Modules::new(modules).traced(tracer);

    let metrics = Arc::new(Metrics::new(&mut registry));
    let listener =
        Listener::bind(&Address::Tcp(settings.observability_address.clone())).await.with_context(|| {
            format!("--observability-address: cannot listen on {}", settings.observability_address)
        })?;
    if let Some(address) = listener.local_addr() {
        tracing::info!(address = %address, "metrics and probes");
    }
    let lifecycle = Lifecycle::default();
    let probed = Arc::clone(&metrics);
    let admin = Admin {
        metrics_path: "/metrics".into(),
        liveness_path: "/liveness".into(),
        readiness_path: "/readiness".into(),
        registry,
        // A tunnel that was just answered counts before the supervisor has heard of it.
        unready: Box::new(move || {
            let serves = probed.replicas_served.get() + probed.tunnels_idle.get() + probed.tunnels_busy.get();
            (serves == 0).then(|| "not connected to kas".to_owned())
        }),
        refresh: Box::new(|| {}),
        site: None,
    };
    let admin = tokio::spawn(admin::run(listener, admin, lifecycle.clone()));

    let shared = Arc::new(Shared {
        descriptor: modules.descriptor(),
        handler: Arc::new(modules),
        token,
        instance: HeaderValue::try_from(instance)?,
        meta: AgentMeta {
            version: version::VERSION.into(),
            commit_id: version::COMMIT.into(),
            pod_namespace: settings.pod.0,
            pod_name: settings.pod.1,
        },
        metrics: Arc::clone(&metrics),
        max_tunnels: settings.max_tunnels,
        applied: tokio::sync::watch::Sender::new(String::new()),
        apply: Box::new(move |response| {
            let Some(configuration) = &response.configuration else { return };
            let logging = configuration.observability.as_ref().and_then(|o| o.logging.as_ref());
            let wanted = match logging.map_or(LoggingLevelEnum::Info, |l| l.level()) {
                LoggingLevelEnum::Info => "info",
                LoggingLevelEnum::Debug => "debug",
                LoggingLevelEnum::Warn => "warn",
                LoggingLevelEnum::Error => "error",
            };
            level.set(wanted);
        }),
    });
    let leave = CancellationToken::new();
    let follow = tokio::spawn(files::follow(vec![ca], || {}));
    let hangups = tokio::spawn(lifecycle::hangups(None::<fn()>));
    let tasks = TaskTracker::new();
    let supervisor = tokio::spawn(supervisor::run(
        shared,
        settings.kas.addresses,
        dialer,
        settings.replicas,
        leave.clone(),
        tasks.clone(),
    ));
    let signal = signals.next().await;
    tracing::info!(signal, requests = metrics.tunnels_busy.get(), "leaving: open requests go on");
    leave.cancel();
    tasks.close();
    tokio::select! {
        () = tasks.wait() => {}
        () = tokio::time::sleep(DRAIN) => {
            let requests = metrics.tunnels_busy.get();
            if requests > 0 {
                tracing::warn!(requests, "requests were cut: they took longer than the time to leave");
            }
        }
        _ = signals.next() => tracing::warn!("told again to leave: not waiting any longer"),
    }
    supervisor.abort();
    follow.abort();
    hangups.abort();
    if let Some(export) = export {
        export.finish(SPANS).await;
    }
    lifecycle.advance(Phase::Stopped);
    let _ = admin.await;
    Ok(())
}
