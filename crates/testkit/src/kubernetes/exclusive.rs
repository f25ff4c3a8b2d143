//! One API server for all tests of a program, which use it one after the other.

use std::sync::{Arc, Weak};

use anyhow::Result;
use tokio::sync::{Mutex, MutexGuard};

use super::Kubernetes;

/// Exclusive use of the API server: until it is dropped, no other test of this program has it.
pub struct Exclusive {
    // Dropped before the lock: the last test stops the servers.
    /// The API server.
    pub kubernetes: Arc<Kubernetes>,
    _lock: MutexGuard<'static, ()>,
}

/// Waits for exclusive use. The API server runs as long as any test uses it or waits for it.
///
/// # Errors
///
/// As of [`Kubernetes::start`].
pub async fn exclusive() -> Result<Exclusive> {
    shared(false).await
}

/// As [`exclusive`], with an [audit log](Kubernetes::audit_log). All tests of a program use one of the two.
///
/// # Errors
///
/// As of [`Kubernetes::start`].
pub async fn exclusive_audited() -> Result<Exclusive> {
    shared(true).await
}

async fn shared(is_audited: bool) -> Result<Exclusive> {
    static SHARED: Mutex<Weak<Kubernetes>> = Mutex::const_new(Weak::new());
    static EXCLUSIVE: Mutex<()> = Mutex::const_new(());

    let kubernetes = {
        let mut shared = SHARED.lock().await;
        match shared.upgrade() {
            Some(kubernetes) => kubernetes,
            None => {
                let kubernetes = Arc::new(Kubernetes::start_with(is_audited, None).await?);
                *shared = Arc::downgrade(&kubernetes);
                kubernetes
            }
        }
    };
    let exclusive = EXCLUSIVE.lock().await;
    // A test that stopped it may have failed before it was started again.
    kubernetes.start_api_server().await?;
    Ok(Exclusive { kubernetes, _lock: exclusive })
}
