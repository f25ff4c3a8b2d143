//! Certificates of clients that are users: people and programs, not replicas.

use std::{fmt, path::Path, slice, sync::Arc, time::Duration};

use rustls::{
    CertificateError, DistinguishedName, Error, OtherError, ServerConfig,
    server::{
        ClientCertVerifierBuilder, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime, pem::PemObject as _};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

use super::{Validity, authorities, role::signatures_by};

/// The user whose certificate it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The only common name of its subject.
    pub common_name: String,
    /// The organizations of its subject, in their order.
    pub organizations: Vec<String>,
    /// When the first of the certificates expires, since 1970.
    pub ends: Duration,
}

/// Why a certificate is not one of a user.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum NotUser {
    #[error("it is no X.509 certificate")]
    Malformed,
    #[error("it lacks the extended key usage clientAuth")]
    Usage,
    #[error("its subject has not exactly one common name (CN)")]
    CommonName,
}

/// The library prints other causes with `Debug`, so that has to be readable too.
impl fmt::Debug for NotUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl User {
    fn of(certificate: &CertificateDer<'_>) -> Result<Self, NotUser> {
        let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| NotUser::Malformed)?;
        let usage = parsed.extended_key_usage().map_err(|_| NotUser::Malformed)?;
        // TLS itself accepts a certificate without this extension, such as one that only signs e-mail.
        if !usage.is_some_and(|usage| usage.value.client_auth) {
            return Err(NotUser::Usage);
        }
        let text = |value: &x509_parser::x509::AttributeTypeAndValue<'_>| {
            value.as_str().map(str::to_owned).map_err(|_| NotUser::Malformed)
        };
        let mut names = parsed.subject().iter_common_name();
        let (Some(name), None) = (names.next(), names.next()) else { return Err(NotUser::CommonName) };
        let organizations = parsed.subject().iter_organization().map(text).collect::<Result<_, _>>()?;
        let ends = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
        Ok(Self { common_name: text(name)?, organizations, ends: Duration::from_secs(ends) })
    }
}

/// Verifies certificates of users: a CA has signed them for client authentication, and they are not revoked.
#[derive(Debug, Clone)]
pub struct UserVerifier(Arc<Verifier>);

impl UserVerifier {
    /// Reads the files. With `crl_file`, the issuer of a user's certificate must have a list of revocations
    /// there. The authorities between it and one of `ca_file` must not be revoked either, but their issuers
    /// need no lists. An old list is used until there is another one.
    ///
    /// # Errors
    /// See [`super::Error`].
    pub fn new(ca_file: &Path, crl_file: Option<&Path>) -> Result<Self, super::Error> {
        let roots = authorities(ca_file)?;
        let builder = || WebPkiClientVerifier::builder(Arc::clone(&roots)).allow_unauthenticated();
        let build = |builder: ClientCertVerifierBuilder| {
            let path = crl_file.unwrap_or(ca_file).to_owned();
            builder.build().map_err(|source| super::Error::Authority { path, source })
        };
        let (mut of_user, mut of_chain, mut lists_due) = (builder(), None, None);
        if let Some(path) = crl_file {
            let what = "a list of revoked certificates (CRL)";
            let error = |source| super::Error::Pem { what, path: path.to_owned(), source };
            let lists: Vec<_> = CertificateRevocationListDer::pem_file_iter(path)
                .map_err(error)?
                .collect::<Result<_, _>>()
                .map_err(error)?;
            if lists.is_empty() {
                return Err(super::Error::Pem {
                    what,
                    path: path.to_owned(),
                    source: rustls_pki_types::pem::Error::NoItemsFound,
                });
            }
            lists_due = lists.iter().filter_map(next_update).min();
            // One verifier cannot demand a list for the user's certificate only, and still look at the
            // others.
            of_chain = Some(build(builder().with_crls(lists.clone()).allow_unknown_revocation_status())?);
            of_user = of_user.with_crls(lists).only_check_end_entity_revocation();
        }
        Ok(Self(Arc::new(Verifier { inner: build(of_user)?, of_chain, lists_due })))
    }

    /// Returns when the first of the lists of revocations should have been replaced, since 1970; `None`: no
    /// list says so, or there is none. A list is used after that too, but what was revoked since is not in
    /// it.
    pub fn lists_due(&self) -> Option<Duration> {
        self.0.lists_due
    }

    /// Verifies certificates, that of the user first, as of this time since 1970.
    ///
    /// # Errors
    /// Why they are not accepted.
    pub fn verify(&self, certificates: &[CertificateDer<'_>], at: Duration) -> Result<User, Error> {
        let (own, others) = certificates.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.0.check(own, others, UnixTime::since_unix_epoch(at))?;
        let mut user = User::of(own).map_err(refused)?;
        for other in others {
            // What cannot be read was not needed.
            if let Ok(Some(validity)) = Validity::of(slice::from_ref(other)) {
                user.ends = user.ends.min(validity.first);
            }
        }
        Ok(user)
    }

    /// Returns the configuration of a server that asks clients for a certificate, and accepts clients without
    /// one. Otherwise it is as `server`: it has the same certificate and the same protocols.
    pub fn server_as(&self, server: &ServerConfig) -> Arc<ServerConfig> {
        let mut config = ServerConfig::builder()
            .with_client_cert_verifier(Arc::clone(&self.0) as _)
            .with_cert_resolver(Arc::clone(&server.cert_resolver));
        config.alpn_protocols.clone_from(&server.alpn_protocols);
        config.session_storage = Arc::clone(&server.session_storage);
        Arc::new(config)
    }
}

/// Returns when the issuer of a list promises the next one.
fn next_update(list: &CertificateRevocationListDer<'_>) -> Option<Duration> {
    let (_, list) = CertificateRevocationList::from_der(list).ok()?;
    Some(Duration::from_secs(u64::try_from(list.next_update()?.timestamp()).unwrap_or(0)))
}

fn refused(why: NotUser) -> Error {
    CertificateError::Other(OtherError(Arc::new(why))).into()
}

#[derive(Debug)]
struct Verifier {
    /// Refuses a certificate whose issuer has no list, if there are lists.
    inner: Arc<dyn ClientCertVerifier>,
    /// Refuses a chain with a revoked authority; `None`: there are no lists.
    of_chain: Option<Arc<dyn ClientCertVerifier>>,
    /// See [`UserVerifier::lists_due`].
    lists_due: Option<Duration>,
}

impl Verifier {
    fn check(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if let Some(of_chain) = &self.of_chain {
            of_chain.verify_client_cert(end_entity, intermediates, now)?;
        }
        self.inner.verify_client_cert(end_entity, intermediates, now)
    }
}

impl ClientCertVerifier for Verifier {
    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.check(end_entity, intermediates, now)?;
        User::of(end_entity).map_err(refused)?;
        Ok(verified)
    }

    signatures_by!(inner);
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{
        CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
        KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
    };

    use super::*;

    /// 2030-01-01.
    const NOW: Duration = Duration::from_secs(1_893_456_000);
    /// The serial number of an intermediate authority.
    const INTERMEDIATE: u64 = 70;

    struct Authority {
        folder: tempfile::TempDir,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        fn new() -> Self {
            super::super::install();
            let folder = tempfile::tempdir().unwrap();
            let mut ca = CertificateParams::new(vec![]).unwrap();
            ca.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let key = KeyPair::generate().unwrap();
            fs::write(folder.path().join("ca"), ca.self_signed(&key).unwrap().pem()).unwrap();
            Self { folder, issuer: Issuer::new(ca, key) }
        }

        fn verifier(&self, crl: Option<&str>) -> Result<UserVerifier, super::super::Error> {
            let at = |name| self.folder.path().join(name);
            UserVerifier::new(&at("ca"), crl.map(at).as_deref())
        }

        fn certificate(&self, change: impl FnOnce(&mut CertificateParams)) -> [CertificateDer<'static>; 1] {
            [Self::certificate_of(&self.issuer, change)]
        }

        fn certificate_of(
            issuer: &Issuer<'static, KeyPair>,
            change: impl FnOnce(&mut CertificateParams),
        ) -> CertificateDer<'static> {
            let mut params = CertificateParams::new(vec![]).unwrap();
            params.not_before = date_time_ymd(2029, 1, 1);
            params.not_after = date_time_ymd(2031, 1, 1);
            params.serial_number = Some(SerialNumber::from(7));
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            params.distinguished_name = rcgen::DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, "jane");
            params.distinguished_name.push(DnType::OrganizationName, "dev");
            change(&mut params);
            let key = KeyPair::generate().unwrap();
            params.signed_by(&key, issuer).unwrap().der().clone()
        }

        /// Writes a list with these serial numbers.
        fn revoke(&self, serials: &[u64]) {
            fs::write(self.folder.path().join("crl"), Self::list(&self.issuer, serials)).unwrap();
        }

        /// Returns an authority below this one, with its certificate.
        fn intermediate(&self) -> (Issuer<'static, KeyPair>, CertificateDer<'static>) {
            let mut ca = CertificateParams::new(vec![]).unwrap();
            ca.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            ca.serial_number = Some(SerialNumber::from(INTERMEDIATE));
            ca.distinguished_name = rcgen::DistinguishedName::new();
            ca.distinguished_name.push(DnType::CommonName, "intermediate");
            ca.not_after = date_time_ymd(2030, 6, 1);
            let key = KeyPair::generate().unwrap();
            let certificate = ca.signed_by(&key, &self.issuer).unwrap().der().clone();
            (Issuer::new(ca, key), certificate)
        }

        /// Returns a list of an issuer with these serial numbers.
        fn list(issuer: &Issuer<'static, KeyPair>, serials: &[u64]) -> String {
            let revoked = serials.iter().map(|&serial| RevokedCertParams {
                serial_number: SerialNumber::from(serial),
                revocation_time: date_time_ymd(2029, 6, 1),
                reason_code: None,
                invalidity_date: None,
            });
            let list = CertificateRevocationListParams {
                this_update: date_time_ymd(2029, 6, 1),
                next_update: date_time_ymd(2029, 7, 1),
                crl_number: SerialNumber::from(1),
                issuing_distribution_point: None,
                revoked_certs: revoked.collect(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            list.signed_by(issuer).unwrap().pem().unwrap()
        }
    }

    #[test]
    fn a_user_is_named_by_the_subject_of_a_certificate_for_clients() {
        let authority = Authority::new();
        let verifier = authority.verifier(None).unwrap();
        // 2031-01-01.
        let ends = Duration::from_secs(1_924_992_000);
        let jane = User { common_name: "jane".into(), organizations: vec!["dev".into()], ends };
        assert_eq!(verifier.verify(&authority.certificate(|_| {}), NOW).unwrap(), jane);
        let refused = |change: fn(&mut CertificateParams)| {
            verifier.verify(&authority.certificate(change), NOW).unwrap_err().to_string()
        };
        assert!(refused(|params| params.extended_key_usages.clear()).contains("clientAuth"));
        let server = refused(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]);
        assert!(server.contains("certificate"), "{server}");
        let nameless = refused(|params| params.distinguished_name = rcgen::DistinguishedName::new());
        assert!(nameless.contains("(CN)"), "{nameless}");
        assert!(refused(|params| params.not_after = date_time_ymd(2029, 12, 31)).contains("expired"));
        let other = Authority::new();
        assert!(verifier.verify(&other.certificate(|_| {}), NOW).is_err(), "another authority");
        assert!(verifier.verify(&[], NOW).is_err());
        assert!(verifier.verify(&[CertificateDer::from(vec![1, 2, 3])], NOW).is_err());
    }

    #[test]
    fn revoked_certificates_are_refused_also_by_an_old_list() {
        let authority = Authority::new();
        let certificate = authority.certificate(|_| {});
        assert_eq!(authority.verifier(None).unwrap().lists_due(), None);
        authority.revoke(&[8]);
        let verifier = authority.verifier(Some("crl")).unwrap();
        verifier.verify(&certificate, NOW).unwrap();
        // 2029-07-01: it is overdue.
        assert_eq!(verifier.lists_due(), Some(Duration::from_secs(1_877_558_400)));
        authority.revoke(&[8, 7]);
        let error = authority.verifier(Some("crl")).unwrap().verify(&certificate, NOW).unwrap_err();
        assert_eq!(error, CertificateError::Revoked.into());
        // A list of another authority says nothing about it.
        let other = Authority::new();
        other.revoke(&[]);
        fs::copy(other.folder.path().join("crl"), authority.folder.path().join("other")).unwrap();
        assert!(authority.verifier(Some("other")).unwrap().verify(&certificate, NOW).is_err());
        for bad in ["ca", "missing"] {
            let error = authority.verifier(Some(bad)).unwrap_err().to_string();
            assert!(error.contains("revoked"), "{error}");
        }
    }

    #[test]
    fn a_revoked_authority_ends_all_certificates_below_it() {
        let authority = Authority::new();
        let (issuer, intermediate) = authority.intermediate();
        let chain = [Authority::certificate_of(&issuer, |_| {}), intermediate];
        let own = Authority::list(&issuer, &[8]);
        let judged = |lists: &[&str]| {
            fs::write(authority.folder.path().join("crl"), lists.concat()).unwrap();
            authority.verifier(Some("crl")).unwrap().verify(&chain, NOW)
        };
        // The root needs no list.
        let user = judged(&[&own]).unwrap();
        // 2030-06-01, before the user's own certificate.
        assert_eq!(user.ends, Duration::from_secs(1_906_502_400));
        let of_root = |serials: &[u64]| Authority::list(&authority.issuer, serials);
        judged(&[&own, &of_root(&[7])]).unwrap();
        let error = judged(&[&own, &of_root(&[INTERMEDIATE])]).unwrap_err();
        assert_eq!(error, CertificateError::Revoked.into());
        // The issuer of the user's certificate does.
        assert!(judged(&[&of_root(&[])]).is_err());
    }
}
