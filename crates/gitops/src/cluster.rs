//! How the engine reaches a cluster: a trait that kas implements over tunnels, and the pace of all calls.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};

/// The longest response body that an implementation must be able to return, in bytes. A page of 500 objects
/// of metadata has at most 128 MiB in theory, and 1 MiB in practice.
pub const MAX_RESPONSE: usize = 64 << 20;

/// The API of a cluster.
///
/// A request has an origin-form target (`/api/v1/…?…`), `Accept`, `Content-Type` if it has a body, and the
/// whole body. Credentials, impersonation, `User-Agent` and audit are the implementation's.
#[async_trait]
pub trait ClusterApi: Send + Sync + 'static {
    /// Sends a request and returns the response with its whole body, of whichever status.
    ///
    /// # Errors
    /// There is no whole response, see [`CallError`]. An implementation never sends a request twice after it
    /// may have reached the API server; the engine decides that.
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError>;
}

#[async_trait]
impl<T: ClusterApi + ?Sized> ClusterApi for Arc<T> {
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        (**self).call(request).await
    }
}

/// A request without a whole response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The request surely has not reached the API server: no agent is connected, or it cannot connect.
    #[error("{0}")]
    NotSent(String),
    /// The request may have been carried out: the connection was lost, or the response is cut or too large.
    #[error("{0}")]
    Unknown(String),
    /// The request is refused, for example by the agent's policy. Repeating it is of no use.
    #[error("{0}")]
    Refused(String),
}

/// How many calls of all projects of an agent may be in flight and begin each second. Cheap to clone; clones
/// share the budget.
#[derive(Debug, Clone)]
pub struct Budget {
    pub(crate) pace: Arc<crate::pace::Pace>,
}

impl Budget {
    /// The calls that are in flight at once, unless the agent has few tunnels.
    pub const CONCURRENT: usize = 32;
    /// The calls that begin each second.
    pub const PER_SECOND: u32 = 100;

    /// Returns a budget of its own. `concurrent` is at least 1.
    pub fn new(concurrent: usize, per_second: u32) -> Self {
        Self { pace: Arc::new(crate::pace::Pace::new(concurrent, per_second)) }
    }

    /// Changes how many calls may be in flight: half of the agent's tunnels, at most
    /// [`CONCURRENT`](Self::CONCURRENT). It is at least 1. Calls in flight are not ended.
    pub fn set_concurrent(&self, concurrent: usize) {
        self.pace.set_concurrent(concurrent);
    }

    /// Pauses all calls, for a `Retry-After`. A shorter pause than the present one changes nothing.
    pub fn pause(&self, pause: Duration) {
        self.pace.pause(pause);
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(Self::CONCURRENT, Self::PER_SECOND)
    }
}
