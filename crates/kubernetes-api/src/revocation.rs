//! Looks whether an open request is still allowed.

use std::sync::Arc;

use callers::{Authorized, Authorizer};
use tokio::task::JoinHandle;

use crate::open::{Shared, Verdict};

/// Ends a request when it is no longer allowed, until this is dropped.
#[derive(Debug)]
pub(crate) struct Revocation(JoinHandle<()>);

impl Revocation {
    pub(crate) fn watch(authorizer: &Arc<Authorizer>, authorized: Authorized, shared: &Arc<Shared>) -> Self {
        let (authorizer, shared) = (Arc::clone(authorizer), Arc::clone(shared));
        Self(tokio::spawn(async move {
            let why = authorizer.revoked(&authorized).await;
            tracing::debug!(caller = %authorized.caller.name, reason = %why, "an open request is no longer allowed");
            shared.end(Verdict::Revoked);
        }))
    }
}

impl Drop for Revocation {
    fn drop(&mut self) {
        self.0.abort();
    }
}
