//! Certificates of replicas, which are issued again while they run.

use std::{net::IpAddr, path::Path};

use anyhow::Result;
use serde_json::{Value, json};

/// What the certificate of a replica says beside its address.
const ROLE: &str = "kas://replica";

/// The authority of the replicas of a run.
pub(crate) struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    pem: String,
}

impl Authority {
    pub(crate) fn new() -> Result<Self> {
        let mut ca = rcgen::CertificateParams::new(vec![])?;
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        ca.distinguished_name.push(rcgen::DnType::CommonName, "replicas of a run");
        let key = rcgen::KeyPair::generate()?;
        let pem = ca.self_signed(&key)?.pem();
        Ok(Self { issuer: rcgen::Issuer::new(ca, key), pem })
    }

    /// The certificate of the authority itself.
    pub(crate) fn pem(&self) -> &str {
        &self.pem
    }

    /// Writes a new certificate and key for a replica at this address. Returns the configuration that names
    /// the files; that of the authorities is written by [`trust`].
    pub(crate) fn issue(&self, folder: &Path, name: &str, at: IpAddr) -> Result<Value> {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(vec![at.to_string()])?;
        params.subject_alt_names.push(rcgen::SanType::URI(ROLE.try_into()?));
        let certificate = params.signed_by(&key, &self.issuer)?;
        let file = |end: &str| folder.join(format!("{name}.{end}"));
        std::fs::write(file("cert"), certificate.pem())?;
        testkit::kas::write_private(&file("key"), &key.serialize_pem())?;
        Ok(json!({
            "certificate_file": file("cert"),
            "key_file": file("key"),
            "client_ca_file": file("ca"),
        }))
    }
}

/// Writes which authorities a replica trusts.
pub(crate) fn trust(folder: &Path, name: &str, authorities: &[&Authority]) -> Result<()> {
    let pem: String = authorities.iter().map(|authority| authority.pem()).collect();
    Ok(std::fs::write(folder.join(format!("{name}.ca")), pem)?)
}
