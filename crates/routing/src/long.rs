//! Requests that may outlast the time in which kas ends other requests: upgraded connections.

use std::sync::Arc;

use tunnel::kas_end::Tunnel;

use crate::metrics::RequestMetrics;

/// Counts such a request and marks its tunnel, until dropped.
#[derive(Debug)]
pub(crate) struct LongRequest {
    tunnel: Arc<Tunnel>,
    metrics: Arc<RequestMetrics>,
}

impl LongRequest {
    /// The request has begun on `tunnel`.
    pub(crate) fn begin(tunnel: &Arc<Tunnel>, metrics: &Arc<RequestMetrics>) -> Self {
        tunnel.set_long(true);
        metrics.requests_long.inc();
        Self { tunnel: Arc::clone(tunnel), metrics: Arc::clone(metrics) }
    }
}

impl Drop for LongRequest {
    fn drop(&mut self) {
        self.tunnel.set_long(false);
        self.metrics.requests_long.dec();
    }
}
