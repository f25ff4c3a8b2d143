//! The part for the endpoint for kubectl.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use callers::{Authorized, Authorizer, SourceKind};
use cluster::Tracker;
use gitlab::usage::{Access, Usage};
use http::HeaderValue;
use identity::Identity;
use kas_config::{Config, KubernetesApi as Section, Listen, PerCaller};
use kube_request::headers::AnswerHeaders;
use kubernetes_api::{
    HeadLimits, KubernetesApi, Metrics, OpenLimits, Origins, Owners, Parts, Prefix, Settings,
};
use net::{
    http::{Age, Limits, Protocols, Server},
    io::Listener,
    proxy::Proxies,
    tls,
};
use observe::{Observer, refusals::Refusals};
use process::{lifecycle::Lifecycle, version};
use routing::{rate_limit::RateLimit, router::Router};

use super::{StartError, part::Part, reload::Reloader};
use crate::{
    agent_files::AgentFiles,
    certificates::LiveVerifier,
    directory::AgentDirectory,
    fleet::{Catalog, FleetMetrics, FleetParts, FleetService},
    own_certificate::{self, Outcome},
    sync::SyncService,
    views::{HttpViews, Hub},
};

/// Open streams of one connection of a client.
const STREAMS: u32 = 250;
/// Streams of one connection that kas may have to reset: a client may end as many watches as it likes.
const RESETS: u32 = 10_000;
/// This share of the tunnels of an agent can be used by this endpoint. The rest stays for the API listener.
const TUNNEL_SHARE: (u32, u32) = (4, 5);

/// The parts of kas that the endpoint uses.
pub(super) struct Uses {
    pub(super) router: Arc<Router>,
    pub(super) identity: Arc<dyn Identity>,
    /// Knows CI jobs and users; `None`: agents come from a file.
    pub(super) gitlab: Option<Arc<gitlab::Client>>,
    /// `None`: usage is not reported.
    pub(super) usage: Option<Arc<Usage>>,
    pub(super) tracker: Arc<dyn Tracker>,
    pub(super) sync: Arc<SyncService>,
    pub(super) files: Arc<AgentFiles>,
    pub(super) fleet_metrics: Arc<FleetMetrics>,
    pub(super) hub: Arc<Hub>,
    pub(super) catalog: Arc<Catalog>,
    /// `None`: proxies are not told which replica holds an agent.
    pub(super) owners: Option<Arc<dyn Owners>>,
    /// How many requests each caller may begin at all replicas together; `None`: as many as it likes.
    pub(super) rate: Option<Arc<RateLimit>>,
    pub(super) observer: Arc<Observer>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) refusals: Arc<Refusals>,
    pub(super) lifecycle: Lifecycle,
    pub(super) is_ready: Box<dyn Fn() -> bool + Send + Sync>,
}

/// The TLS of the endpoint.
#[derive(Default)]
pub(super) struct EndpointTls {
    /// The configuration of the listener; `None`: it has no TLS.
    config: Option<tls::Live<rustls::ServerConfig>>,
    /// Verifies certificates of users; `None`: none is accepted.
    users: Option<Arc<LiveVerifier>>,
}

/// Returns the TLS of the endpoint. On loopback, kas makes the certificate itself unless the configuration
/// names one. `address` is where the endpoint listens.
///
/// # Errors
/// If a file cannot be used, or kas would make a certificate for an address that is not on loopback.
pub(super) fn tls(
    section: &Section,
    reloader: &mut Reloader,
    address: Option<SocketAddr>,
) -> Result<EndpointTls, StartError> {
    const SECTION: &str = "agent.kubernetes_api";
    if let (Some(files), Some(clients)) = (&section.listen.tls, &section.client_certificates) {
        let (config, users) = reloader.listener_for_users(SECTION, files, clients)?;
        return Ok(EndpointTls { config: Some(config), users: Some(users) });
    }
    let Some(own) = &section.own_certificate else {
        return Ok(EndpointTls { config: reloader.listener(SECTION, &section.listen, true)?, users: None });
    };
    own_certificate::check_bound(&section.listen.address, address).map_err(StartError::OwnCertificate)?;
    let outcome = own_certificate::ensure(own, process::clock::wall()).map_err(StartError::OwnCertificate)?;
    let (ca_file, users_file) = (own.ca.display(), section.users.as_ref().map(|users| users.file.display()));
    match outcome {
        Outcome::Kept => {}
        Outcome::Created => tracing::info!(%ca_file, "made a certificate for kubectl on this host"),
        Outcome::Replaced(why) => tracing::warn!(
            %ca_file,
            why,
            "made a new certificate for kubectl on this host: write kubeconfigs again with kasctl kubeconfig"
        ),
    }
    let address = address.map_or_else(|| section.listen.address.clone(), |address| address.to_string());
    tracing::info!(
        url = format!("https://{address}{}", section.url_path_prefix),
        %ca_file,
        users_file = users_file.map(tracing::field::display),
        "kubectl can be used on this host: add users with kasctl token user --users-file, and give the URL and the \
         CA file to kasctl kubeconfig --url --certificate-authority"
    );
    let listen = Listen { tls: Some(own_certificate::listener_files(own)), ..section.listen.clone() };
    Ok(EndpointTls { config: reloader.listener(SECTION, &listen, true)?, users: None })
}

/// Builds the part, and returns it with its service.
///
/// # Errors
/// If the users file or the CA certificates of an issuer cannot be used.
pub(super) async fn part(
    config: &Config,
    section: &Section,
    listener: Listener,
    tls: EndpointTls,
    uses: Uses,
) -> Result<(Part, Arc<KubernetesApi>), StartError> {
    let Uses {
        router,
        identity,
        gitlab,
        usage,
        tracker,
        sync,
        files,
        fleet_metrics,
        hub,
        catalog,
        owners,
        rate,
        observer,
        metrics,
        refusals,
        lifecycle,
        is_ready,
    } = uses;
    let directory = AgentDirectory::new(identity, tracker);
    let authorizer = Authorizer::open(
        section,
        gitlab,
        tls.users.map(|users| users as _),
        &Proxies::from_env(),
        Arc::clone(&directory) as _,
    )
    .await?;
    let fleet = FleetService::new(FleetParts {
        router: Arc::clone(&router),
        observer: Arc::clone(&observer),
        directory: Arc::clone(&directory),
        files,
        metrics: fleet_metrics,
        settings: (&config.prometheus).into(),
        views: HttpViews::new(hub),
        catalog,
    });
    let service = KubernetesApi::new(Parts {
        settings: settings(config, section)?,
        authorizer,
        router,
        directory,
        observer,
        metrics,
        refusals,
        is_ready,
        diffs: sync,
        fleet,
        owners,
        rate,
        allowed: Box::new(move |authorized| {
            if let Some(usage) = &usage {
                count(usage, authorized);
            }
        }),
    });
    let limits = Limits { idle: section.limits.idle_timeout, ..config.limits.connections };
    let server = Server {
        listener,
        tls: tls.config,
        protocols: match section.own_certificate {
            Some(_) => Protocols::Http1And2MaybeTls,
            None => Protocols::Http1And2,
        },
        settings: net::http::Settings {
            header_list: u32::try_from(HeadLimits::default().bytes).unwrap_or(u32::MAX),
            keepalive_interval: config.limits.callers.keepalive_interval,
            keepalive_timeout: config.limits.callers.keepalive_timeout,
            extended_connect: true,
            ..net::http::API.with_streams(STREAMS, RESETS)
        },
        limits,
        age: Some(Age {
            age: config.api.listen.max_connection_age.mul_f64(super::servers::API_AGE_SHARE),
            grace: None,
        }),
        service: Arc::clone(&service) as _,
    };
    // The other half is for requests that end by themselves.
    let drain: Duration = config.drain.timeout / 2;
    let part = Part::default().server(server).task(Arc::clone(&service).run(
        lifecycle,
        drain,
        config.drain.upgrade_grace,
    ));
    Ok((part, service))
}

/// How many watches and other endless requests an agentk gets that cannot cancel a request. Other replicas
/// may have the endpoint if this one has not.
pub(super) fn endless_per_old_agent(config: &Config) -> usize {
    const DEFAULT: u32 = 8;
    config.agent.kubernetes_api.as_ref().map_or(DEFAULT, |api| api.limits.long_per_old_agent) as usize
}

/// Counts a request for GitLab.
fn count(usage: &Usage, Authorized { caller, agent, .. }: &Authorized) {
    let access = match caller.source {
        SourceKind::Ci => Some(Access::Ci),
        SourceKind::Pat => Some(Access::Pat),
        SourceKind::Cookie => Some(Access::User),
        SourceKind::Oidc | SourceKind::File | SourceKind::Certificate => None,
    };
    usage.count_request(*agent, access.map(|access| (access, caller.gitlab_user)));
}

/// Returns the origins of the pages that may make requests: those that are configured, and GitLab's.
fn origins(config: &Config, section: &Section) -> Origins {
    let gitlab = match &config.identity {
        kas_config::Identity::GitLab(gitlab) => gitlab.external_origin(),
        kas_config::Identity::File { .. } => None,
    };
    Origins::new(section.allowed_origins.iter().cloned().chain(gitlab).collect())
}

/// Returns how many requests a caller may begin, before it is made a limit of all replicas; `None`: as many
/// as it likes.
pub(super) fn rate_per_caller(section: &Section) -> Option<RateLimit> {
    let PerCaller { requests_per_second, burst, .. } = section.limits.per_caller;
    // At most a million.
    let per_minute = requests_per_second.saturating_mul(60);
    (per_minute > 0).then(|| RateLimit::new(per_minute, burst.max(1)).steady())
}

fn settings(config: &Config, section: &Section) -> Result<Settings, StartError> {
    let kas_config::KubernetesLimits {
        per_caller: PerCaller { open, upgrades, .. },
        head_timeout,
        stall_timeout,
        ..
    } = section.limits;
    let tunnels = u64::from(config.agent.listen.max_tunnels_per_agent);
    let share = tunnels * u64::from(TUNNEL_SHARE.0) / u64::from(TUNNEL_SHARE.1);
    let server = format!("gitlab-kas/{}/{}", version::VERSION, version::COMMIT);
    Ok(Settings {
        prefix: Prefix::new(&section.url_path_prefix),
        host_suffix: section.host_suffix.clone(),
        origins: origins(config, section),
        answer_headers: AnswerHeaders::new(section.extra_allowed_response_headers.iter().cloned())
            .map_err(StartError::AnswerHeader)?,
        head: HeadLimits::default(),
        open: OpenLimits {
            per_caller: open as usize,
            upgrades_per_caller: upgrades as usize,
            per_agent: usize::try_from(share.max(1)).unwrap_or(usize::MAX),
            answer_head: head_timeout,
            silent_upload: stall_timeout,
            unread_answer: stall_timeout,
            session: section.session_max,
        },
        failures: config.limits.attempts.failures,
        find_timeout: config.limits.find_timeout,
        page: section.page.then(crate::page::of_clusters),
        server: HeaderValue::try_from(server).unwrap_or(HeaderValue::from_static("gitlab-kas")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_gitlab_and_of_configured_origins_may_make_requests() {
        let of = |identity: &str| {
            let kubernetes = "agent: {kubernetes_api: {allowed_origins: ['https://a'], users: {file: /u}}}";
            let env = kas_config::Environment { kas_state_dir: Some("/state".into()), ..Default::default() };
            let config = kas_config::load(&format!("{kubernetes}\n{identity}"), &env).unwrap().config;
            let section = config.agent.kubernetes_api.clone().unwrap();
            format!("{:?}", origins(&config, &section))
        };
        let gitlab = "gitlab: {address: 'http://internal', authentication_secret_file: /s, external_url: 'https://G/x'}";
        assert_eq!(of(gitlab), r#"Origins(["https://a", "https://g"])"#);
        assert_eq!(of(""), r#"Origins(["https://a"])"#);
        // Agents are known from the file, and GitLab is not asked about anybody.
        assert_eq!(of(&format!("{gitlab}\nidentity: {{file: /i}}")), r#"Origins(["https://a"])"#);
    }
}
