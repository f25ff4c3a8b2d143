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
    lifecycle::{Lifecycle, Phase, Signals},
    telemetry::Level,
    tls, version,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cluster::ClusterAccess,
    dial::KasAddress,
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
    /// Where kas is.
    pub kas_address: KasAddress,
    /// The file with the agent token.
    pub token_file: PathBuf,
    /// Further roots for TLS with kas.
    pub ca_cert_file: Option<PathBuf>,
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

/// Runs until a signal, then lets open requests finish.
///
/// # Errors
/// When something of the settings cannot be used.
pub async fn run(settings: Settings, level: Level) -> anyhow::Result<()> {
    runtime::io::raise_file_limit();
    let mut signals = Signals::new()?;
    let token = TokenFile::new(settings.token_file);
    token.authorization().context("--token-file")?;
    let before = Before::reading(settings.ca_cert_file.iter().cloned().collect());
    let tls = tls::Live::from(tls::client(settings.ca_cert_file.as_deref()).context("--ca-cert-file")?);
    let ca = {
        let (file, tls) = (settings.ca_cert_file, tls.clone());
        before.then("--ca-cert-file", move || {
            tls.replace(
                tls::client(file.as_deref()).map_err(|error| format!("{:#}", anyhow::Error::new(error)))?,
            );
            Ok("exchanged: kas is trusted by it from the next connection on".to_owned())
        })
    };
    let api_server = settings.cluster.connect().await?;
    tracing::info!(
        version = version::VERSION,
        commit = version::COMMIT,
        kas = %settings.kas_address,
        cluster = api_server.target().host(),
        "agentk is starting"
    );
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
    let tasks = TaskTracker::new();
    let supervisor = tokio::spawn(supervisor::run(
        shared,
        settings.kas_address,
        tls,
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
    if let Some(export) = export {
        export.finish(SPANS).await;
    }
    lifecycle.advance(Phase::Stopped);
    let _ = admin.await;
    Ok(())
}
