//! The tunnels of one agent that other replicas lease: they keep them between two requests, as long as no
//! other request waits for them. If a request begins to wait, a lease is revoked: the borrower is asked to
//! return the tunnel, which is never taken away.

use std::{
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
};

use ids::{ConnectionId, ReplicaId};
use tunnel::{features::Features, kas_end::Tunnel};

use super::{Grant, queue::QueueKey};
use crate::{
    flaw::{Flaw, flawed},
    sync::{AtomicBool, AtomicWaker},
};

/// The replica that leases a tunnel, and what for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Borrower {
    /// The other replica.
    pub replica: ReplicaId,
    /// The method of its requests.
    pub method: Arc<str>,
}

/// The way to ask a borrower to return its tunnel.
struct RevokeRequest {
    tunnel: Arc<Tunnel>,
    borrower: Borrower,
    revoked: AtomicBool,
    waker: AtomicWaker,
}

impl RevokeRequest {
    /// Asks for the tunnel. Returns false if that was done before.
    fn send(&self) -> bool {
        if self.revoked.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.waker.wake();
        true
    }
}

/// The leases of an agent, the oldest first.
#[derive(Default)]
pub(super) struct Leases(Vec<Arc<RevokeRequest>>);

impl Leases {
    /// Leases the tunnel of a grant.
    pub(super) fn add(&mut self, grant: Grant, borrower: Borrower) -> TunnelLease {
        let revoke = Arc::new(RevokeRequest {
            tunnel: Arc::clone(grant.tunnel()),
            borrower,
            revoked: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        self.0.push(Arc::clone(&revoke));
        TunnelLease { grant, revoke }
    }

    fn remove(&mut self, revoke: &Arc<RevokeRequest>) {
        if let Some(at) = self.0.iter().position(|lease| Arc::ptr_eq(lease, revoke)) {
            self.0.remove(at);
        }
    }

    /// Revokes one lease whose tunnel can serve the requests of a queue. `connection_of`: to which connection
    /// the tunnels of an instance are bound.
    pub(super) fn revoke_for(&self, key: &QueueKey, connection_of: impl Fn(u64) -> Option<ConnectionId>) {
        for lease in &self.0 {
            // A borrower uses its leased tunnel for its own requests of the same kind first. The one that
            // waits here was sent before the borrower had the lease. An upgrade needs another tunnel.
            let own = key.source.as_ref() == Some(&lease.borrower.replica)
                && key.method == lease.borrower.method
                && key.connection.is_none()
                && !key.needs.features.contains(Features::UPGRADE);
            // A tunnel that has ended is being returned already, and would serve no request.
            let lives = lease.tunnel.idle_since().is_some();
            let info = lease.tunnel.info();
            if !own && lives && key.accepts(info, || connection_of(info.instance)) && lease.send() {
                return;
            }
        }
    }

    /// Revokes the lease of a tunnel, if there is one.
    pub(super) fn revoke(&self, tunnel: &Arc<Tunnel>) {
        if let Some(lease) = self.0.iter().find(|lease| Arc::ptr_eq(&lease.tunnel, tunnel)) {
            lease.send();
        }
    }

    pub(super) fn revoke_all(&self) {
        for lease in &self.0 {
            lease.send();
        }
    }
}

/// A tunnel that another replica keeps between two requests. If it is dropped, the tunnel goes to a request
/// that waits, or is idle again.
pub struct TunnelLease {
    grant: Grant,
    revoke: Arc<RevokeRequest>,
}

impl std::fmt::Debug for TunnelLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("TunnelLease").field(&self.grant).finish()
    }
}

impl TunnelLease {
    /// Returns the tunnel, which stays leased.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        &self.revoke.tunnel
    }

    /// Ready once the borrower should be asked to return the tunnel. Only one task may poll it.
    pub fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        let revoked = flawed(Flaw::RevokedBeforeRegister) && self.revoke.revoked.load(Ordering::Acquire);
        self.revoke.waker.register(cx.waker());
        if flawed(Flaw::RevokedBeforeRegister) {
            return if revoked { Poll::Ready(()) } else { Poll::Pending };
        }
        if self.revoke.revoked.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Takes the tunnel for the borrower's next request. It comes back by parking, or is leased again.
    pub fn take(mut self) -> Arc<Tunnel> {
        self.end();
        // What is left of the grant is empty.
        match self.grant.tunnel.take() {
            Some(tunnel) => tunnel,
            None => Arc::clone(&self.revoke.tunnel),
        }
    }

    fn end(&self) {
        let agent = self.revoke.tunnel.info().agent;
        if let Some(entry) = self.grant.registry.shard(agent).get_mut(&agent) {
            entry.leases.remove(&self.revoke);
        }
    }
}

impl Drop for TunnelLease {
    fn drop(&mut self) {
        // Nothing is left to do if the tunnel was taken.
        if self.grant.tunnel.is_some() {
            self.end();
            self.revoke.tunnel.cancel_reservation();
            // The grant then frees the tunnel.
        }
    }
}
