//! Callers with a client certificate.
//!
//! TLS verifies a certificate once, when the connection begins. Connections stay open for a long time, so it
//! is verified again after a change of the authorities or of the lists of revoked certificates, and from time
//! to time, because it expires. As with the tokens of other sources, that it expires ends no open request.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use ids::{AgentId, FILE_USER_PREFIX, check_identity_value};
use rustls_pki_types::CertificateDer;
use tokio::time::Instant;

use crate::{
    AuthError, Caller, Changes, Credential, Grant, Hold, Reach, Source, SourceKind,
    client_certificate::{CertificateUser, ClientCertificate},
};

/// The most groups of a caller, as of a user of a file.
const MOST_GROUPS: usize = 64;
/// For how long a verified certificate is not verified again without a change, unless it expires before.
const FRESH: Duration = Duration::from_secs(10);

/// The name in a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateSubject {
    /// The common name.
    pub common_name: String,
    /// The organizations.
    pub organizations: Vec<String>,
    /// When the certificates end, since 1970.
    pub ends: Duration,
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
    /// When the certificate was verified for it, since 1970.
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
        let (user, since) = match certificate.known(version, now) {
            Some(known) => known,
            None => {
                let since = process::clock::wall();
                let (user, ends) = self.verify(certificate, since)?;
                let user = Arc::new(user);
                let fresh = FRESH.min(ends.saturating_sub(since));
                certificate.remember(&user, version, since, now + fresh);
                (user, since)
            }
        };
        Ok(caller(&user, Held { certificate: certificate.clone(), since }))
    }

    /// Returns the user, and when its certificate ends.
    fn verify(
        &self,
        certificate: &ClientCertificate,
        at: Duration,
    ) -> Result<(CertificateUser, Duration), AuthError> {
        let subject = self.0.verify(certificate.certificates(), at).ok_or(AuthError::Unknown)?;
        if subject.organizations.len() > MOST_GROUPS {
            tracing::debug!(
                user = subject.common_name,
                "a certificate has more than {MOST_GROUPS} organizations"
            );
            return Err(AuthError::Forbidden);
        }
        // Without the prefix: with it, nothing would be empty or begin with a space.
        let mut values = std::iter::once(&subject.common_name).chain(&subject.organizations);
        if values.any(|value| check_identity_value(value).is_err()) {
            tracing::debug!(
                user = ?subject.common_name,
                "the common name or an organization of a certificate is empty, too long, or has outer spaces or \
                 control characters"
            );
            return Err(AuthError::Forbidden);
        }
        let ends = subject.ends;
        Ok((user(subject), ends))
    }
}

fn user(CertificateSubject { common_name, organizations, .. }: CertificateSubject) -> CertificateUser {
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
        // As of the time when it was verified for the request, which may go on when it has expired.
        let (user, _) = self.verify(certificate, *since)?;
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
                ends: self.until,
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
        let begun = CertificateSubject {
            common_name: "user-1".into(),
            organizations: vec![],
            ends: Duration::from_secs(1),
        };
        let begun = user(begun);
        let caller = caller(&begun, Held { certificate, since });
        assert!(users.recheck(&caller, agent()).await.is_err(), "it was never valid");
        let verifier = Bytes::new(Duration::from_secs(1));
        let users = CertificateUsers::new(verifier as _, &Changes::default());
        assert_eq!(&*users.recheck(&caller, agent()).await.unwrap().name, "kas:user-1");
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_is_not_remembered_past_its_end() {
        // It ends while it would still be fresh, by the clock of the runtime.
        let left = FRESH / 2;
        let verifier = Bytes::new(process::clock::wall() + left);
        let users = CertificateUsers::new(Arc::clone(&verifier) as _, &Changes::default());
        let jane = certificate(1);
        let first = users.authenticate(&jane, agent(), None).await.unwrap();
        tokio::time::advance(left).await;
        // Not from memory: whether it has ended is a question for the verifier.
        let _ = users.authenticate(&jane, agent(), None).await;
        assert_eq!(verifier.asked.load(Ordering::SeqCst), 2);
        users.recheck(&first, agent()).await.unwrap();
    }

    #[tokio::test]
    async fn a_request_is_checked_again_as_of_the_time_of_the_verification() {
        let verifier = Bytes::new(Duration::MAX);
        let users = CertificateUsers::new(verifier as _, &Changes::default());
        let jane = certificate(1);
        let since = |caller: &Caller| caller.hold.state::<Held>().unwrap().since;
        let first = since(&users.authenticate(&jane, agent(), None).await.unwrap());
        while process::clock::wall() == first {
            std::hint::spin_loop();
        }
        // From memory.
        assert_eq!(since(&users.authenticate(&jane, agent(), None).await.unwrap()), first);
    }

    /// Accepts all certificates, with this subject.
    struct Named(CertificateSubject);

    impl CertificateVerifier for Named {
        fn verify(&self, _: &[CertificateDer<'static>], _: Duration) -> Option<CertificateSubject> {
            Some(self.0.clone())
        }

        fn version(&self) -> u64 {
            0
        }

        fn report_to(&self, _: &Changes) {}
    }

    #[tokio::test]
    async fn names_that_are_no_values_of_an_identity_are_forbidden() {
        for (common_name, organization, is_good) in [
            ("jane", "dev", true),
            ("", "dev", false),
            (" jane", "dev", false),
            ("jane", "", false),
            ("jane", "dev ", false),
            ("jane", "d\nev", false),
        ] {
            let subject = CertificateSubject {
                common_name: common_name.to_owned(),
                organizations: vec!["sre".to_owned(), organization.to_owned()],
                ends: Duration::MAX,
            };
            let users = CertificateUsers::new(Arc::new(Named(subject)), &Changes::default());
            let found = users.authenticate(&certificate(1), agent(), None).await;
            let expected = if is_good { None } else { Some(AuthError::Forbidden) };
            assert_eq!(found.err(), expected, "{common_name:?} {organization:?}");
        }
    }
}
