//! The part for direct routes.

use std::sync::Arc;

use cluster::{Doors, Tracker};
use ids::ReplicaId;
use kas_config::{Config, Direct as Section};
use kubernetes_api::Prefix;
use net::{io::Listener, tls};
use observe::refusals::Refusals;
use routing::registry::TunnelRegistry;

use super::{StartError, part::Part, reload::Reloader, servers};
use crate::direct::{self, DirectListener, DirectMetrics, Owners, ProxySecret};

/// Open streams of one connection of a proxy.
const STREAMS: u32 = 1_000;
/// Streams of one connection that kas may have to reset.
const RESETS: u32 = 1_000;

/// The listener of the section, with its TLS and the secret of proxies.
pub(super) struct Bound {
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    secret: Arc<ProxySecret>,
}

impl Bound {
    /// Reads the secret, and follows its file.
    ///
    /// # Errors
    /// If a file cannot be used any more.
    pub(super) fn new(
        section: Section,
        listener: Listener,
        reloader: &mut Reloader,
    ) -> Result<Self, StartError> {
        let tls = reloader.listener("direct", &section.listen, true)?;
        let secret = reloader.proxies(section.secret).map_err(StartError::Direct)?;
        Ok(Self { listener, tls, secret })
    }
}

/// The parts of kas that direct routes use.
pub(super) struct Uses {
    pub(super) me: ReplicaId,
    pub(super) doors: Doors,
    pub(super) tracker: Arc<dyn Tracker>,
    pub(super) tunnels: Arc<TunnelRegistry>,
    pub(super) metrics: Arc<DirectMetrics>,
    pub(super) refusals: Arc<Refusals>,
}

/// Builds the part. Also returns what knows the owners.
pub(super) fn part(config: &Config, bound: Bound, uses: Uses) -> (Part, Arc<Owners>) {
    let Uses { me, doors, tracker, tunnels, metrics, refusals } = uses;
    let owners = Arc::new(direct::Owners { me, doors, tracker, tunnels, secret: bound.secret, metrics });
    let prefix = config.agent.kubernetes_api.as_ref().map(|section| Prefix::new(&section.url_path_prefix));
    let service = DirectListener::new(Arc::clone(&owners), prefix, refusals, config.limits.attempts);
    let server = servers::http(config, bound.listener, bound.tls, (STREAMS, RESETS), service);
    (Part::default().server(server), owners)
}
