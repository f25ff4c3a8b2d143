//! Certificates for servers and users of tests.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rcgen::{
    CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// The files of a server, and of the CA that has signed its certificate.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The CA, for clients.
    pub ca: PathBuf,
    /// The certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

impl Certificates {
    /// Writes them into a folder, for a server of these names.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn new(dir: &Path, names: &[&str]) -> Result<Self> {
        Self::with(dir, names, |_| {})
    }

    /// As [`new`](Self::new), of a server whose certificate is long over.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn expired(dir: &Path, names: &[&str]) -> Result<Self> {
        Self::with(dir, names, |certificate| {
            certificate.not_before = rcgen::date_time_ymd(2001, 1, 1);
            certificate.not_after = rcgen::date_time_ymd(2002, 1, 1);
        })
    }

    fn with(dir: &Path, names: &[&str], change: impl FnOnce(&mut rcgen::CertificateParams)) -> Result<Self> {
        let mut ca = rcgen::CertificateParams::new(vec![])?;
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        ca.distinguished_name.push(rcgen::DnType::CommonName, "CA of a test");
        let ca_key = rcgen::KeyPair::generate()?;
        let ca_certificate = ca.self_signed(&ca_key)?;
        let issuer = rcgen::Issuer::new(ca, ca_key);
        let key = rcgen::KeyPair::generate()?;
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut certificate = rcgen::CertificateParams::new(names)?;
        change(&mut certificate);
        let certificate = certificate.signed_by(&key, &issuer)?;
        let files =
            Self { ca: dir.join("ca.pem"), certificate: dir.join("cert.pem"), key: dir.join("key.pem") };
        std::fs::write(&files.ca, ca_certificate.pem())?;
        std::fs::write(&files.certificate, certificate.pem())?;
        crate::kas::write_private(&files.key, &key.serialize_pem())?;
        Ok(files)
    }
}

/// An authority for certificates of users.
#[derive(Debug)]
pub struct UserAuthority {
    issuer: Issuer<'static, KeyPair>,
    folder: PathBuf,
}

impl UserAuthority {
    /// Writes `users-ca.pem`, and `users-crl.pem` without an entry.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn new(folder: &Path) -> Result<Self> {
        let mut ca = CertificateParams::new(vec![])?;
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        ca.distinguished_name.push(DnType::CommonName, "users of a test");
        let key = KeyPair::generate()?;
        std::fs::write(folder.join("users-ca.pem"), ca.self_signed(&key)?.pem())?;
        let authority = Self { issuer: Issuer::new(ca, key), folder: folder.to_owned() };
        authority.revoke(&[])?;
        Ok(authority)
    }

    /// Writes the certificate and the key of a user, who may have a group. Returns both files.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn user(&self, name: &str, group: Option<&str>, serial: u64) -> Result<(PathBuf, PathBuf)> {
        let mut user = CertificateParams::new(vec![])?;
        user.serial_number = Some(SerialNumber::from(serial));
        user.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        user.distinguished_name = DistinguishedName::new();
        user.distinguished_name.push(DnType::CommonName, name);
        if let Some(group) = group {
            user.distinguished_name.push(DnType::OrganizationName, group);
        }
        let key = KeyPair::generate()?;
        let [certificate, file] = ["crt", "key"].map(|end| self.folder.join(format!("{name}.{end}")));
        std::fs::write(&certificate, user.signed_by(&key, &self.issuer)?.pem())?;
        crate::kas::write_private(&file, &key.serialize_pem())?;
        Ok((certificate, file))
    }

    /// Revokes the certificates with these numbers, and no others.
    ///
    /// # Errors
    /// When the list cannot be written.
    pub fn revoke(&self, serials: &[u64]) -> Result<()> {
        let revoked = serials.iter().map(|&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let pem = list.signed_by(&self.issuer)?.pem()?;
        crate::kas::replace(&self.folder.join("users-crl.pem"), pem.as_bytes())
    }
}
