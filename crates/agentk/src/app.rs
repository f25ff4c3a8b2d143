//! Starts the agent from its settings, and shuts it down.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use http::HeaderValue;
use net::{admin::Admin, proxy::Proxies, tls};
use process::{
    files::{self, Snapshot},
    lifecycle::{self, Lifecycle, Phase, Signals},
    telemetry::Level,
    version,
};
use prometheus_client::registry::Registry;
use proto::gitlab::agent::modshared::AgentMeta;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

#[cfg(feature = "gitops")]
use crate::module::gitops::Gitops;
use crate::{
    audit::{self, Audit},
    calls::Calls,
    cluster::ClusterAccess,
    dial::{Dialer, KasAddresses, KasHeader, KasHeaders},
    metrics::Metrics,
    module::{
        Context, Module, Modules, Pushed,
        kubernetes_api::{Guard, KubernetesApi},
        logging::Logging,
    },
    observability::Port,
    policy::{PolicyFile, PolicyMetrics},
    session::SessionContext,
    supervisor,
    token::TokenFile,
};

/// How long open requests may continue after the shutdown signal, unless a connection is upgraded. Watches do
/// not: they are ended. A pod's default grace period is 30 s.
const DRAIN: Duration = Duration::from_secs(25);

/// How long the export of the last spans may take.
const SPANS: Duration = Duration::from_secs(2);
/// How long one export may take, and how many spans may wait for it: the defaults of OpenTelemetry.
const EXPORT: (Duration, usize) = (Duration::from_secs(10), 2_048);

/// The settings of the agent.
#[derive(Debug)]
pub struct Settings {
    /// How to reach kas.
    pub kas: KasAccess,
    /// How to reach the cluster.
    pub cluster: ClusterAccess,
    /// The policy file; `None`: kas may do everything that agentk may.
    pub policy_file: Option<PathBuf>,
    /// Where the audit log is written, and whether it has the commands of `exec`; `None`: there is none.
    pub audit: Option<(audit::Output, bool)>,
    /// The address for metrics and probes.
    pub observability_address: String,
    /// The number of kas replicas to be connected to at once.
    pub replicas: usize,
    /// The most tunnels at once, per session.
    pub max_tunnels: usize,
    /// How long upgraded connections may continue after the shutdown signal.
    pub upgrade_grace: Duration,
    /// Whether to serve the benchmark's service too.
    pub bench_module: bool,
    /// Where spans are exported to; `None`: no spans are made.
    pub collector: Option<traces::Collector>,
    /// The namespace and the name of the pod.
    pub pod: (String, String),
}

/// How to reach kas, and how to authenticate.
#[derive(Debug, Clone)]
pub struct KasAccess {
    /// The addresses of kas.
    pub addresses: KasAddresses,
    /// The file with the agent token.
    pub token_file: PathBuf,
    /// CA certificates to trust besides those of the system.
    pub ca_cert_file: Option<PathBuf>,
    /// The name that the certificate of kas must have, instead of the host of its address.
    pub tls_server_name: Option<String>,
    /// Headers for proxies between agentk and kas.
    pub headers: Vec<KasHeader>,
}

impl KasAccess {
    /// Reads files and the environment. Does not connect yet.
    ///
    /// # Errors
    /// When a setting cannot be used. The error names the flag or the variable.
    pub fn dialer(&self) -> anyhow::Result<Dialer> {
        let tls = tls::client(self.ca_cert_file.as_deref()).context("--ca-cert-file")?;
        let dialer = self.dialer_with(tls, Proxies::from_env())?;
        for address in self.addresses.as_slice() {
            dialer.proxy(address)?;
        }
        Ok(dialer)
    }

    /// Like [`dialer`](Self::dialer), with this TLS configuration and without checking the proxies.
    ///
    /// # Errors
    /// See [`dialer`](Self::dialer).
    pub fn dialer_with(&self, tls: Arc<rustls::ClientConfig>, proxies: Proxies) -> anyhow::Result<Dialer> {
        let addresses = self.addresses.as_slice();
        let headers = KasHeaders::new(self.headers.clone(), addresses).context("--kas-header")?;
        Dialer::new(tls, self.tls_server_name.as_deref(), headers, proxies).context("--kas-tls-server-name")
    }
}

#[cfg(feature = "bench")]
fn bench_module() -> anyhow::Result<Arc<dyn Module>> {
    Ok(Arc::new(crate::module::bench::Bench))
}

#[cfg(not(feature = "bench"))]
fn bench_module() -> anyhow::Result<Arc<dyn Module>> {
    anyhow::bail!("--bench-module: this agentk was built without the feature `bench`")
}

/// Runs the agent until a signal, then waits until open requests have ended.
///
/// # Errors
/// When a setting cannot be used.
pub async fn run(settings: Settings, level: Level) -> anyhow::Result<()> {
    process::open_files::raise_limit();
    let mut signals = Signals::new()?;
    let token = TokenFile::new(settings.kas.token_file.clone());
    token.authorization().context("--token-file")?;
    let before = Snapshot::reading(settings.kas.ca_cert_file.iter().cloned().collect());
    let dialer = Arc::new(settings.kas.dialer()?);
    let ca = {
        let (file, dialer) = (settings.kas.ca_cert_file.clone(), Arc::clone(&dialer));
        before.then("--ca-cert-file", move || {
            dialer.trust(
                tls::client(file.as_deref()).map_err(|error| format!("{:#}", anyhow::Error::new(error)))?,
            );
            Ok("reloaded: the next connection to kas uses it".to_owned())
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
                // kas samples: no trace begins in the agent.
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
    let mut followed = vec![ca];
    let mut policy = None;
    match &settings.policy_file {
        Some(path) => {
            let (file, follow) =
                PolicyFile::open(path, PolicyMetrics::new(&mut registry)).context("--policy-file")?;
            followed.push(follow);
            policy = Some(file);
        }
        None => tracing::warn!(
            "no policy: kas may do everything that agentk's credentials allow, see --policy-file"
        ),
    }
    let audit = match &settings.audit {
        Some((output, commands)) => {
            Some(Audit::open(output, *commands, &mut registry).context("--audit-log")?)
        }
        None => None,
    };
    let guard = Guard::new(policy, audit.clone());
    let calls = Arc::new(Calls::default());
    #[cfg(feature = "gitops")]
    let gitops = {
        let pod = (settings.pod.0.as_str(), settings.pod.1.as_str());
        let version = (version::VERSION, version::COMMIT);
        let (calls, api_server, guard) = (Arc::clone(&calls), api_server.clone(), guard.clone());
        Gitops::new(calls, api_server, guard, pod, version, &mut registry)
    };
    let leave = CancellationToken::new();
    let kubernetes = KubernetesApi::new(api_server, version::VERSION, version::COMMIT)
        .guarded(guard)
        .leaving(leave.clone());
    let upgrades = kubernetes.upgrades();
    let mut modules: Vec<Arc<dyn Module>> =
        vec![Arc::new(kubernetes.traced(tracer.clone())), Arc::new(Logging::new(level))];
    #[cfg(feature = "gitops")]
    modules.push(Arc::new(gitops));
    if settings.bench_module {
        modules.push(bench_module()?);
    }
    let modules = Modules::new(modules).traced(tracer);

    let metrics = Arc::new(Metrics::new(&mut registry));
    let port = Port::bind(&settings.observability_address).await?;
    let lifecycle = Lifecycle::default();
    let probed = Arc::clone(&metrics);
    let admin = Admin {
        metrics_path: "/metrics".into(),
        liveness_path: "/liveness".into(),
        readiness_path: "/readiness".into(),
        registry,
        // A tunnel that kas has just accepted counts before the supervisor is notified.
        unready: Box::new(move || {
            let connected =
                probed.replicas_served.get() + probed.tunnels_idle.get() + probed.tunnels_busy.get();
            (connected == 0).then(|| "not connected to kas".to_owned())
        }),
        refresh: Box::new(|| {}),
        site: None,
    };
    let admin = tokio::spawn(port.serve(admin, lifecycle.clone()));

    let tasks = TaskTracker::new();
    let pushed = watch::Sender::new(Pushed::default());
    modules.start(&Context::new(pushed.subscribe(), leave.clone()), &tasks);
    let context = Arc::new(SessionContext {
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
        pushed,
        calls,
    });
    let follow = tokio::spawn(files::follow(followed, || {}));
    let hangups = tokio::spawn(lifecycle::hangups(audit.clone().map(|audit| move || audit.reopen())));
    let supervisor = tokio::spawn(supervisor::run(
        context,
        settings.kas.addresses,
        dialer,
        settings.replicas,
        leave.clone(),
        tasks.clone(),
    ));
    let signal = signals.next().await;
    tracing::info!(signal, requests = metrics.tunnels_busy.get(), "shutting down: waiting for open requests");
    leave.cancel();
    tasks.close();
    let upgrade_grace = settings.upgrade_grace;
    let drained = async {
        let grace = upgrade_grace.saturating_sub(DRAIN);
        tokio::time::sleep(DRAIN).await;
        let open = upgrades.open();
        if open > 0 && !grace.is_zero() {
            tracing::info!(upgrades = open, grace = ?upgrade_grace, "still waiting for upgraded connections");
            let _ = tokio::time::timeout(grace, upgrades.none_open()).await;
        }
    };
    tokio::select! {
        () = tasks.wait() => {}
        () = drained => {
            let requests = metrics.tunnels_busy.get();
            if requests > 0 {
                tracing::warn!(requests, "requests were aborted: they were still open at the end of the drain");
            }
        }
        _ = signals.next() => tracing::warn!("second shutdown signal: exiting now"),
    }
    supervisor.abort();
    follow.abort();
    hangups.abort();
    if let Some(audit) = audit {
        audit.flush().await;
    }
    if let Some(export) = export {
        export.finish(SPANS).await;
    }
    lifecycle.advance(Phase::Stopped);
    let _ = admin.await;
    Ok(())
}
