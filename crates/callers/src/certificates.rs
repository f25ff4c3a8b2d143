//! Callers with a client certificate.
//!
//! TLS verifies a certificate once, when the connection begins. Connections stay open for a long time, so it
//! is verified again after a change of the authorities or of the lists of revoked certificates, and from time
//! to time, because it expires. As with the tokens of other sources, that it expires ends no open request.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use ids::{AgentId, FILE_USER_PREFIX};
use rustls_pki_types::CertificateDer;
use tokio::time::Instant;

use crate::{
    AuthError, Caller, Changes, Credential, Grant, Hold, Reach, Source, SourceKind,
    client_certificate::{CertificateUser, ClientCertificate},
};

/// The most groups of a caller, as of a user of a file.
const MOST_GROUPS: usize = 64;
/// For how long a verified certificate is not verified again without a change. It may have expired meanwhile.
const FRESH: Duration = Duration::from_secs(10);

/// The name in a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateSubject {
    /// The common name.
    pub common_name: String,
    /// The organizations.
    pub organizations: Vec<String>,
}

/// Verifies client certificates.
pub trait CertificateVerifier: Send + Sync + 'static {
    /// Returns the subject of certificates, that of the client first, if they are accepted as of this time
    /// since 1970.
    fn verify(&self, certificates: &[CertificateDer<'static>], at: Duration) -> Option<CertificateSubject>;

    /// Returns a number that changes whenever [`CertificateVerifier::verify`] may answer differently.
    fn version(&self) -> u64;

    /// Reports such changes to `changes` from now on, after [`CertificateVerifier::version`] has changed.
    fn report_to(&self, changes: &Changes);
}

/// What an open request keeps.
struct Held {
    certificate: ClientCertificate,
    /// When it began, since 1970.
    since: Duration,
}

/// The users whose certificates an authority has signed.
pub struct CertificateUsers(Arc<dyn CertificateVerifier>);

impl fmt::Debug for CertificateUsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateUsers")
    }
}

impl CertificateUsers {
    /// Returns the source. Changes are reported by `changes`.
    pub fn new(verifier: Arc<dyn CertificateVerifier>, changes: &Changes) -> Self {
        verifier.report_to(changes);
        Self(verifier)
    }

    fn identify(&self, credential: &Credential) -> Result<Caller, AuthError> {
        let Credential::Certificate(certificate) = credential else { return Err(AuthError::Unknown) };
        let now = Instant::now();
        // Before it is verified: a change meanwhile makes the result old.
        let version = self.0.version();
        let since = process::clock::wall();
        let user = match certificate.known(version, now) {
            Some(user) => user,
            None => {
                let user = Arc::new(self.verify(certificate, since)?);
                certificate.remember(&user, version, now + FRESH);
                user
            }
        };
        Ok(caller(&user, Held { certificate: certificate.clone(), since }))
    }

    fn verify(&self, certificate: &ClientCertificate, at: Duration) -> Result<CertificateUser, AuthError> {
        let subject = self.0.verify(certificate.certificates(), at).ok_or(AuthError::Unknown)?;
        if subject.organizations.len() > MOST_GROUPS {
            tracing::debug!(
                user = subject.common_name,
                "a certificate has more than {MOST_GROUPS} organizations"
            );
            return Err(AuthError::Forbidden);
        }
        Ok(user(subject))
    }
}

fn user(CertificateSubject { common_name, organizations }: CertificateSubject) -> CertificateUser {
    let prefixed = |name: &str| format!("{FILE_USER_PREFIX}{name}");
    let access_type = vec![SourceKind::Certificate.access_type().to_owned()];
    CertificateUser {
        name: prefixed(&common_name).into(),
        groups: organizations.iter().map(|organization| prefixed(organization)).collect(),
        extra: Arc::new([
            ("agent.gitlab.com/username".to_owned(), vec![common_name]),
            ("agent.gitlab.com/access_type".to_owned(), access_type),
        ]),
    }
}

fn caller(user: &CertificateUser, held: Held) -> Caller {
    Caller {
        source: SourceKind::Certificate,
        name: Arc::clone(&user.name),
        uid: None,
        groups: Arc::clone(&user.groups),
        extra: Arc::clone(&user.extra),
        gitlab_user: None,
        grant: Grant::Rules,
        recheck_at: None,
        hold: Hold::new(Arc::new(held)),
    }
}

#[async_trait]
impl Source for CertificateUsers {
    fn kind(&self) -> SourceKind {
        SourceKind::Certificate
    }

    fn accepts(&self, credential: &Credential) -> bool {
        matches!(credential, Credential::Certificate(_))
    }

    async fn authenticate(
        &self,
        credential: &Credential,
        _agent: AgentId,
        _from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.identify(credential)
    }

    async fn recheck(&self, caller: &Caller, _agent: AgentId) -> Result<Caller, AuthError> {
        let Held { certificate, since } = caller.hold.state::<Held>().ok_or(AuthError::Unknown)?;
        // As of the time when the request began, since it may go on when the certificate has expired.
        let user = self.verify(certificate, *since)?;
        Ok(self::caller(&user, Held { certificate: certificate.clone(), since: *since }))
    }

    async fn reach(&self, credential: &Credential, _from: Option<IpAddr>) -> Result<Reach, AuthError> {
        self.identify(credential).map(Reach::Rules)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use parking_lot::Mutex;

    use super::*;

    /// Accepts certificates whose only byte is not revoked, until a time.
    struct Bytes {
        revoked: Mutex<Vec<u8>>,
        until: Duration,
        version: AtomicU64,
        asked: AtomicU64,
        changes: Mutex<Option<Changes>>,
    }

    impl Bytes {
        fn new(until: Duration) -> Arc<Self> {
            let (revoked, changes) = (Mutex::default(), Mutex::default());
            Arc::new(Self {
                revoked,
                until,
                version: AtomicU64::default(),
                asked: AtomicU64::default(),
                changes,
            })
        }

        fn revoke(&self, byte: u8) {
            self.revoked.lock().push(byte);
            self.version.fetch_add(1, Ordering::SeqCst);
            self.changes.lock().as_ref().unwrap().notify();
        }
    }

    impl CertificateVerifier for Bytes {
        fn verify(
            &self,
            certificates: &[CertificateDer<'static>],
            at: Duration,
        ) -> Option<CertificateSubject> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let [byte] = certificates[0][..] else { return None };
            let is_good = !self.revoked.lock().contains(&byte) && at < self.until;
            is_good.then(|| CertificateSubject {
                common_name: format!("user-{byte}"),
                organizations: vec!["dev".to_owned(); usize::from(byte)],
            })
        }

        fn version(&self) -> u64 {
            self.version.load(Ordering::SeqCst)
        }

        fn report_to(&self, changes: &Changes) {
            *self.changes.lock() = Some(changes.clone());
        }
    }

    fn certificate(byte: u8) -> Credential {
        Credential::Certificate(ClientCertificate::new([CertificateDer::from(vec![byte])].into()))
    }

    fn agent() -> AgentId {
        AgentId::new(7).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_names_a_user_and_is_not_verified_for_each_request() {
        let verifier = Bytes::new(Duration::MAX);
        let users = CertificateUsers::new(Arc::clone(&verifier) as _, &Changes::default());
        let jane = certificate(2);
        assert!(users.accepts(&jane));
        for _ in 0..3 {
            let caller = users.authenticate(&jane, agent(), None).await.unwrap();
            assert_eq!(
                (&*caller.name, &caller.groups[..]),
                ("kas:user-2", &["kas:dev".to_owned(), "kas:dev".to_owned()][..])
            );
            assert_eq!((caller.source, caller.grant), (SourceKind::Certificate, Grant::Rules));
        }
        assert_eq!(verifier.asked.load(Ordering::SeqCst), 1);
        tokio::time::advance(FRESH).await;
        users.authenticate(&jane, agent(), None).await.unwrap();
        assert_eq!(verifier.asked.load(Ordering::SeqCst), 2);
        let many = users.authenticate(&certificate(65), agent(), None).await;
        assert_eq!(many.unwrap_err(), AuthError::Forbidden);
    }

    #[tokio::test]
    async fn a_revoked_certificate_ends_open_requests_and_admits_no_new_ones() {
        let (verifier, changes) = (Bytes::new(Duration::MAX), Changes::default());
        let users = CertificateUsers::new(Arc::clone(&verifier) as _, &changes);
        let (jane, joe) = (certificate(1), certificate(2));
        let open = users.authenticate(&jane, agent(), None).await.unwrap();
        let other = users.authenticate(&joe, agent(), None).await.unwrap();
        let mut told = changes.subscribe();
        verifier.revoke(1);
        told.changed().await.unwrap();
        assert_eq!(users.recheck(&open, agent()).await.unwrap_err(), AuthError::Unknown);
        assert_eq!(users.authenticate(&jane, agent(), None).await.unwrap_err(), AuthError::Unknown);
        users.recheck(&other, agent()).await.unwrap();
        assert!(users.reach(&joe, None).await.is_ok());
    }

    #[tokio::test]
    async fn an_expired_certificate_ends_no_open_request() {
        let verifier = Bytes::new(Duration::ZERO);
        let users = CertificateUsers::new(Arc::clone(&verifier) as _, &Changes::default());
        assert_eq!(users.authenticate(&certificate(1), agent(), None).await.unwrap_err(), AuthError::Unknown);
        let Credential::Certificate(certificate) = certificate(1) else { unreachable!() };
        let since = Duration::ZERO;
        let begun = user(CertificateSubject { common_name: "user-1".into(), organizations: vec![] });
        let caller = caller(&begun, Held { certificate, since });
        assert!(users.recheck(&caller, agent()).await.is_err(), "it was never valid");
        let verifier = Bytes::new(Duration::from_secs(1));
        let users = CertificateUsers::new(verifier as _, &Changes::default());
        assert_eq!(&*users.recheck(&caller, agent()).await.unwrap().name, "kas:user-1");
    }
}
