//! kubectl with a client certificate, which kas verifies.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use rcgen::{
    CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    certificates::Certificates,
    endpoint,
    kas::{Kas, replace, token},
    kubernetes::Access,
    process::SOON,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

use crate::setup::{AGENT, exclusive};

/// An authority for certificates of users.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    folder: PathBuf,
}

impl Authority {
    /// Writes `users-ca.pem`, and `users-crl.pem` without an entry.
    fn new(folder: &Path) -> Result<Self> {
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

    /// Writes the certificate of a user, and returns a kubeconfig that uses it.
    fn kubeconfig(&self, name: &str, serial: u64, server: &str, ca: &Path) -> Result<PathBuf> {
        let mut user = CertificateParams::new(vec![])?;
        user.serial_number = Some(SerialNumber::from(serial));
        user.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        user.distinguished_name = DistinguishedName::new();
        user.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate()?;
        let at = |end: &str| self.folder.join(format!("{name}.{end}"));
        std::fs::write(at("crt"), user.signed_by(&key, &self.issuer)?.pem())?;
        std::fs::write(at("key"), key.serialize_pem())?;
        let user = json!({ "client-certificate": at("crt"), "client-key": at("key") });
        endpoint::write_kubeconfig(&at("config"), server, ca, user, None)?;
        Ok(at("config"))
    }

    fn revoke(&self, serials: &[u64]) -> Result<()> {
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
        replace(&self.folder.join("users-crl.pem"), pem.as_bytes())?;
        Ok(())
    }
}

#[tokio::test]
async fn kubectl_uses_a_client_certificate_until_it_is_revoked() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("certificates", "web", 1).await?;
    let files = tempfile::TempDir::with_prefix("certificates-test-")?;
    let server = Certificates::new(files.path(), &["127.0.0.1"])?;
    let authority = Authority::new(files.path())?;
    let kas = Kas::start_with_config(json!({
        "agent": { "kubernetes_api": {
            "listen": {
                "address": "127.0.0.1:0",
                "certificate_file": server.certificate,
                "key_file": server.key,
                "client_ca_file": files.path().join("users-ca.pem"),
                "crl_file": files.path().join("users-crl.pem"),
            },
            "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
        } },
    }))
    .await?;
    let url = format!("https://{}/agents/{AGENT}", endpoint::address(&kas).await?);
    let bearer = kubernetes.service_account("certificates", "agentk", Access::Admin).await?;
    let kubeconfig = kubernetes.kubeconfig_with_token("certificates", &bearer)?;
    let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &kubeconfig).await?;
    agentk.connected().await?;

    let jane = authority.kubeconfig("jane", 7, &url, &server.ca)?;
    let joe = authority.kubeconfig("joe", 8, &url, &server.ca)?;
    let pods = ["get", "pods", "-n", "certificates", "-o", "json"];
    assert_eq!(kubernetes.kubectl_as(&jane, &pods).await?, kubernetes.kubectl(&pods).await?);
    let refused = kubernetes.kubectl_as(&joe, &pods).await.err().context("joe may not")?.to_string();
    ensure!(refused.contains("gives no access to this agent"), "{refused}");

    let mut watch = Command::new("kubectl")
        .args(["get", "pods", "-n", "certificates", "-w", "--no-headers", "-o", "name", "--kubeconfig"])
        .arg(&jane)
        .env("HOME", files.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("could not run kubectl")?;
    let mut lines = BufReader::new(watch.stdout.take().context("standard output is a pipe")?).lines();
    let line = timeout(SOON, lines.next_line()).await.context("no line came")??;
    ensure!(
        line.ok_or_else(|| anyhow!("the watch has ended"))?.starts_with("pod/web-"),
        "the pod that exists"
    );
    authority.revoke(&[7])?;
    timeout(SOON, watch.wait()).await.context("the watch has not ended")??;
    ensure!(kubernetes.kubectl_as(&jane, &pods).await.is_err(), "and there is no new one");
    Ok(())
}
