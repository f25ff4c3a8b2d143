//! Keys, certificates and tokens of the servers and of the administrator.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// Every key, certificate and token, as files for the servers and in memory for the client.
pub(super) struct Keys {
    pub(super) ca_pem: String,
    pub(super) ca: CertificateDer<'static>,
    pub(super) admin_certificate: CertificateDer<'static>,
    pub(super) admin_key: PrivateKeyDer<'static>,
    pub(super) admin_certificate_pem: String,
    pub(super) admin_key_pem: String,
    pub(super) admin_token: String,
}

impl Keys {
    /// Writes `ca.crt`, `serving.{crt,key}`, `front-proxy-ca.crt`, `front-proxy-client.{crt,key}`,
    /// `kubelet-ca.crt`, `kubelet.{crt,key}`, `kubelet-client.{crt,key}`, `service-account.{key,pub}` and
    /// `tokens.csv`.
    pub(super) fn create(dir: &Path) -> Result<Self> {
        let write = |name: &str, content: &str| {
            fs::write(dir.join(name), content).with_context(|| format!("could not write {name}"))
        };

        let ca = authority("kubernetes-ca")?;
        write("ca.crt", &ca.pem())?;
        // The last is its name for pods, as in every cluster.
        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc"].map(str::to_owned);
        let mut serving = CertificateParams::new(names)?;
        serving.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = issue(serving, &ca)?;
        write("serving.crt", &certificate.pem())?;
        write("serving.key", &key.serialize_pem())?;

        // A separate CA: the API server trusts what a holder of its certificates says about the user.
        let front_proxy = authority("front-proxy-ca")?;
        write("front-proxy-ca.crt", &front_proxy.pem())?;
        let (certificate, key) = issue(client_certificate("front-proxy-client", None), &front_proxy)?;
        write("front-proxy-client.crt", &certificate.pem())?;
        write("front-proxy-client.key", &key.serialize_pem())?;

        // A separate CA again: a kubelet runs any command for a client with a certificate of it.
        let kubelets = authority("kubelet-ca")?;
        write("kubelet-ca.crt", &kubelets.pem())?;
        let mut serving = CertificateParams::new(["127.0.0.1".to_owned()])?;
        serving.distinguished_name.push(DnType::CommonName, "kubelet");
        serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = issue(serving, &kubelets)?;
        write("kubelet.crt", &certificate.pem())?;
        write("kubelet.key", &key.serialize_pem())?;
        let (certificate, key) = issue(client_certificate("kubelet-client", None), &kubelets)?;
        write("kubelet-client.crt", &certificate.pem())?;
        write("kubelet-client.key", &key.serialize_pem())?;

        let service_account = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        write("service-account.key", &service_account.serialize_pem())?;
        // The API server takes the public half from a PKCS#8 private key only when that is an RSA key.
        write("service-account.pub", &service_account.public_key_pem())?;

        let admin_token = hex::encode(rand::random::<[u8; 16]>());
        write("tokens.csv", &format!("{admin_token},admin,admin,\"system:masters\"\n"))?;

        let (certificate, key) = issue(client_certificate("admin", Some("system:masters")), &ca)?;
        Ok(Self {
            ca_pem: ca.pem(),
            ca: ca.der().clone(),
            admin_certificate_pem: certificate.pem(),
            admin_certificate: certificate.into(),
            admin_key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            admin_key_pem: key.serialize_pem(),
            admin_token,
        })
    }
}

fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)?)
}

/// Describes a client certificate: to Kubernetes the common name is the user and the organization is a group.
fn client_certificate(user: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, user);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params
}

fn issue(
    mut params: CertificateParams,
    issuer: &CertifiedIssuer<'_, KeyPair>,
) -> Result<(rcgen::Certificate, KeyPair)> {
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    Ok((params.signed_by(&key, issuer)?, key))
}
