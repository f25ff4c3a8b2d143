//! Certificates for servers of tests.

use std::path::{Path, PathBuf};

use anyhow::Result;

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
