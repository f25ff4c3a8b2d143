//! [`StartError`]: why kas could not start.

use std::{io, path::PathBuf};

use identity::OpenError;
use kas_config::Problems;
use net::tls;
use observe::audit;

use crate::{own_certificate, replicas::MeshError, sinks::TargetError};

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
