//! Certificates of clients that are users: people and programs, not replicas.

use std::{fmt, path::Path, sync::Arc, time::Duration};

use rustls::{
    CertificateError, DistinguishedName, Error, OtherError, ServerConfig,
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime, pem::PemObject as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{authorities, role::signatures_by, server_with};

/// The user whose certificate it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The only common name of its subject.
    pub common_name: String,
    /// The organizations of its subject, in their order.
    pub organizations: Vec<String>,
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
        Ok(Self { common_name: text(name)?, organizations })
    }
}

/// Verifies certificates of users: a CA has signed them for client authentication, and they are not revoked.
#[derive(Debug, Clone)]
pub struct UserVerifier(Arc<Verifier>);

impl UserVerifier {
    /// Reads the files. With `crl_file`, a certificate must have an issuer with a list of revocations there.
    /// An old list is used until there is another one.
    ///
    /// # Errors
    /// See [`super::Error`].
    pub fn new(ca_file: &Path, crl_file: Option<&Path>) -> Result<Self, super::Error> {
        let mut builder = WebPkiClientVerifier::builder(authorities(ca_file)?).allow_unauthenticated();
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
            builder = builder.with_crls(lists).only_check_end_entity_revocation();
        }
        let inner = builder.build().map_err(|source| super::Error::Authority {
            path: crl_file.unwrap_or(ca_file).to_owned(),
            source,
        })?;
        Ok(Self(Arc::new(Verifier { inner })))
    }

    /// Verifies certificates, that of the user first, as of this time since 1970.
    ///
    /// # Errors
    /// Why they are not accepted.
    pub fn verify(&self, certificates: &[CertificateDer<'_>], at: Duration) -> Result<User, Error> {
        let (own, others) = certificates.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.0.inner.verify_client_cert(own, others, UnixTime::since_unix_epoch(at))?;
        User::of(own).map_err(refused)
    }

    /// Returns the configuration of a server that asks clients for a certificate, and accepts clients without
    /// one. Otherwise as [`super::server`].
    ///
    /// # Errors
    /// See [`super::Error`].
    pub fn server(
        &self,
        certificate_file: &Path,
        key_file: &Path,
    ) -> Result<Arc<ServerConfig>, super::Error> {
        let builder = ServerConfig::builder().with_client_cert_verifier(Arc::clone(&self.0) as _);
        server_with(builder, certificate_file, key_file)
    }
}

fn refused(why: NotUser) -> Error {
    CertificateError::Other(OtherError(Arc::new(why))).into()
}

#[derive(Debug)]
struct Verifier {
    inner: Arc<dyn ClientCertVerifier>,
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
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
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
            [params.signed_by(&key, &self.issuer).unwrap().der().clone()]
        }

        /// Writes a list with these serial numbers.
        fn revoke(&self, serials: &[u64]) {
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
            fs::write(self.folder.path().join("crl"), list.signed_by(&self.issuer).unwrap().pem().unwrap())
                .unwrap();
        }
    }

    #[test]
    fn a_user_is_named_by_the_subject_of_a_certificate_for_clients() {
        let authority = Authority::new();
        let verifier = authority.verifier(None).unwrap();
        let jane = User { common_name: "jane".into(), organizations: vec!["dev".into()] };
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
        authority.revoke(&[8]);
        authority.verifier(Some("crl")).unwrap().verify(&certificate, NOW).unwrap();
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
}
