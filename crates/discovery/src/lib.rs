//! Finds addresses of other replicas: with Kubernetes, DNS, or a list.
//!
//! * [`Kubernetes`]: the EndpointSlices of a headless Service, watched.
//! * [`Dns`]: the addresses of a name, or its SRV records, looked up repeatedly.
//! * [`Static`]: a list of `host:port`.
//! * [`Health`]: whether the last lookup worked, for metrics.
//!
//! The results are *seeds*: addresses to which a first message is sent. Membership finds out whether a
//! replica of this cluster runs there. A superfluous seed costs a datagram, but a missing seed can leave two
//! halves of a cluster separated. Therefore known seeds are always kept until an answer replaces them.
//!
//! Not here: membership, and detecting which of the seeds is this replica itself.

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
/// The configuration for an API server other than that of the pod's own cluster.
pub use kube::Config as KubeConfig;
pub use kubernetes::{Kubernetes, PortSelector};

/// Publishes the whole seed set on every change and keeps the last one if a lookup fails.
///
/// If the set has always been empty, it means either that there are no seeds or that they are not known yet:
/// [`health`](Self::health) distinguishes these, since `last_success` is `None` before the first answer.
#[async_trait]
pub trait Discovery: Send + 'static {
    /// Shows whether lookups work. Subscribe before [`run`](Self::run) consumes the discovery.
    ///
    /// Receivers wake on the first answer and when lookups begin or cease to fail, not on every success.
    fn health(&self) -> watch::Receiver<Health>;

    /// Runs until dropped. Returns only if retrying is useless.
    ///
    /// # Cancel safety
    ///
    /// Dropping it stops all work and all connections. The published seeds stay in the watch.
    async fn run(self: Box<Self>, seeds: watch::Sender<HashSet<SocketAddr>>) -> DiscoveryError;
}

/// An error for which retrying is useless: the configuration, or the environment of the process, is wrong.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// Not a valid DNS name. Nothing was looked up.
    #[error("{name:?} is not a DNS name")]
    Name {
        /// The configured name.
        name: String,
        /// What is wrong with it.
        source: hickory_resolver::proto::ProtoError,
    },
    /// Not a valid name in Kubernetes. Nothing was looked up.
    #[error("{name:?} is not the name of a Kubernetes {kind}")]
    ObjectName {
        /// The kind of object: a namespace or a service.
        kind: &'static str,
        /// The configured name.
        name: String,
    },
    /// The process does not run in a pod, or the pod has no ServiceAccount mounted.
    #[error("the pod's ServiceAccount is not mounted")]
    NotInCluster(#[source] kube::config::InClusterError),
    /// The credentials or certificates for the API server cannot be used. Nothing was looked up.
    #[error("could not make a client for the Kubernetes API")]
    Client(#[source] Box<kube::Error>),
}
