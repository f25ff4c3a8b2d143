//! Where other replicas may be: Kubernetes, DNS, or a list.
//!
//! * [`Kubernetes`]: the EndpointSlices of a headless Service, watched.
//! * [`Dns`]: the addresses behind a name, or its SRV records, asked for again and again.
//! * [`Static`]: a list of `host:port`.
//! * [`Health`]: whether the last lookup worked, for metrics.
//!
//! What is found are *seeds*: places to send a first message to. Whether a replica lives there, and whether
//! it is one of ours, membership finds out; so a seed too many costs a datagram, while a seed too few can
//! leave two halves of a cluster apart for ever. Hence one rule everywhere: what was known stays until an
//! answer replaces it.
//!
//! Not here: membership, and telling which of the seeds is this replica itself.

#[cfg(feature = "testing")]
pub mod contract;
mod dns;
mod fixed;
mod health;
mod host_port;
mod kubernetes;
mod lookup;

use std::{collections::HashSet, net::SocketAddr};

use async_trait::async_trait;
use tokio::sync::watch;

pub use dns::Dns;
pub use fixed::Static;
pub use health::{Failure, FailureKind, Health};
pub use host_port::{HostPort, HostPortError};
/// How to reach an API server when it is not that of the pod's own cluster.
pub use kube::Config as KubeConfig;
pub use kubernetes::{Kubernetes, PortSelector};

/// Publishes the whole seed set on every change and keeps the last one when a lookup fails.
///
/// An empty set that was never anything else means either "nobody" or "not known yet":
/// [`health`](Self::health) tells which, since `last_success` is `None` before the first answer.
#[async_trait]
pub trait Discovery: Send + 'static {
    /// Shows whether lookups work. Subscribe before [`run`](Self::run) takes the discovery.
    ///
    /// Receivers wake when a first answer comes and when lookups begin or cease to fail, not on every
    /// success.
    fn health(&self) -> watch::Receiver<Health>;

    /// Runs until dropped; returns only what no retry can mend.
    ///
    /// # Cancel safety
    ///
    /// Dropping it stops all work and all connections. What was published stays in the watch.
    async fn run(self: Box<Self>, seeds: watch::Sender<HashSet<SocketAddr>>) -> DiscoveryError;
}

/// What no retry can mend: the configuration, or the environment of the process, is wrong.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// Not something that DNS could be asked for. Nothing was looked up.
    #[error("{name:?} is not a DNS name")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        source: hickory_resolver::proto::ProtoError,
    },
    /// Not something that Kubernetes would accept as a name. Nothing was looked up.
    #[error("{name:?} is not the name of a Kubernetes {kind}")]
    ObjectName {
        /// What it should name: a namespace or a service.
        kind: &'static str,
        /// What was given.
        name: String,
    },
    /// The process runs in no pod, or the pod has no ServiceAccount mounted.
    #[error("the pod's ServiceAccount is not mounted")]
    NotInCluster(#[source] kube::config::InClusterError),
    /// The credentials or certificates for the API server cannot be used. Nothing was looked up.
    #[error("could not make a client for the Kubernetes API")]
    Client(#[source] Box<kube::Error>),
}
