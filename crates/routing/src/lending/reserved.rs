//! A tunnel whose request is still on its way from the borrower.

use std::sync::Arc;

use tunnel::kas_end::Tunnel;

use crate::registry::Grant;

/// A tunnel that does not retire before the borrower's request has begun, or the borrow request was
/// cancelled. A drain notice in between would end a tunnel to which the borrower has already sent a request.
/// Dropped without [`take`](Self::take), the tunnel is returned unused.
#[derive(Debug)]
pub struct ReservedTunnel {
    tunnel: Arc<Tunnel>,
    grant: Option<Grant>,
}

impl ReservedTunnel {
    /// Reserves the tunnel of a grant.
    pub fn new(grant: Grant) -> Self {
        let tunnel = Arc::clone(grant.tunnel());
        tunnel.reserve();
        Self { tunnel, grant: Some(grant) }
    }

    /// Returns the tunnel, which stays reserved.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        &self.tunnel
    }

    /// Takes the tunnel for the request.
    pub fn take(mut self) -> Arc<Tunnel> {
        // From now on the registry counts the tunnel as busy.
        drop(self.grant.take().map(Grant::take));
        Arc::clone(&self.tunnel)
    }
}

impl Drop for ReservedTunnel {
    fn drop(&mut self) {
        if self.grant.is_some() {
            self.tunnel.cancel_reservation();
            // The grant then frees the tunnel.
        }
    }
}
