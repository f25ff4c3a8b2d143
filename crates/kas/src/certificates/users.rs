//! Verifies certificates of users by files that are reloaded.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use callers::{CertificateSubject, CertificateVerifier, Changes};
use net::tls::{User, UserVerifier};
use rustls::pki_types::CertificateDer;

/// A verifier that can be replaced while it is in use.
#[derive(Debug)]
pub struct LiveVerifier {
    current: ArcSwap<UserVerifier>,
    version: AtomicU64,
    changes: OnceLock<Changes>,
}

impl LiveVerifier {
    /// Starts with this one.
    pub(super) fn new(verifier: UserVerifier) -> Self {
        let current = ArcSwap::from_pointee(verifier);
        Self { current, version: AtomicU64::default(), changes: OnceLock::new() }
    }

    /// Returns the verifier that is used now.
    pub(super) fn current(&self) -> Arc<UserVerifier> {
        self.current.load_full()
    }

    /// Replaces the verifier. Open requests are checked again.
    pub(super) fn replace(&self, verifier: UserVerifier) {
        self.current.store(verifier.into());
        self.version.fetch_add(1, Ordering::SeqCst);
        if let Some(changes) = self.changes.get() {
            changes.notify();
        }
    }
}

impl CertificateVerifier for LiveVerifier {
    fn verify(&self, certificates: &[CertificateDer<'static>], at: Duration) -> Option<CertificateSubject> {
        match self.current.load().verify(certificates, at) {
            Ok(User { common_name, organizations, ends }) => {
                Some(CertificateSubject { common_name, organizations, ends })
            }
            Err(error) => {
                tracing::debug!(error = %error, "a certificate of a user was refused");
                None
            }
        }
    }

    fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    fn report_to(&self, changes: &Changes) {
        // There is one endpoint, so this is called once.
        let _ = self.changes.set(changes.clone());
    }
}
