//! The certificate of a client, and what is known of it.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rustls_pki_types::CertificateDer;
use tokio::time::Instant;

/// A client certificate of one connection, which TLS has verified. Clones share what is known of it.
#[derive(Clone)]
pub struct ClientCertificate(Arc<Shared>);

struct Shared {
    certificates: Arc<[CertificateDer<'static>]>,
    verified: Mutex<Option<Verified>>,
}

/// Whose it is, and how long that counts.
struct Verified {
    version: u64,
    /// When it was verified, since 1970.
    since: Duration,
    until: Instant,
    user: Arc<CertificateUser>,
}

/// A user, by its certificate. Names have the prefix of the source.
pub(crate) struct CertificateUser {
    pub(crate) name: Arc<str>,
    pub(crate) groups: Arc<[String]>,
    pub(crate) extra: Arc<[(String, Vec<String>)]>,
}

impl ClientCertificate {
    /// Returns the certificate of a connection: these certificates, that of the client first.
    pub fn new(certificates: Arc<[CertificateDer<'static>]>) -> Self {
        Self(Arc::new(Shared { certificates, verified: Mutex::default() }))
    }

    /// Returns the certificates.
    pub(crate) fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.0.certificates
    }

    /// Returns the user that was remembered, if it is still known in this version and at this time, and when
    /// the certificate was verified, since 1970.
    pub(crate) fn known(&self, version: u64, now: Instant) -> Option<(Arc<CertificateUser>, Duration)> {
        let verified = self.0.verified.lock();
        let known = verified.as_ref().filter(|known| known.version == version && now < known.until);
        known.map(|known| (Arc::clone(&known.user), known.since))
    }

    /// Remembers the user for [`ClientCertificate::known`]. `since` is when the certificate was verified,
    /// since 1970.
    pub(crate) fn remember(
        &self,
        user: &Arc<CertificateUser>,
        version: u64,
        since: Duration,
        until: Instant,
    ) {
        *self.0.verified.lock() = Some(Verified { version, since, until, user: Arc::clone(user) });
    }
}

impl fmt::Debug for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCertificate").finish_non_exhaustive()
    }
}
