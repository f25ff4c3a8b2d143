//! Certificates, keys and secrets of a running kas: they are replaced while it serves, their expiry is
//! reported, and unsafe ones are refused at the start.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    net::SocketAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use grpc::Code;
use serde_json::json;
use testkit::{
    agentk::Agentk,
    caller::{Caller, Jwt},
    gitlab::GitLab,
    kas::{Kas, Options, merge, token, within, write_private},
    process::{program, soon},
    raw_agent::{Kind, RawAgent},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        self, ClientConfig, RootCertStore,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
    },
};

/// Files are checked every 5 s, twice. A busy machine may take longer.
const EXCHANGED: Duration = Duration::from_secs(30);
const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";
const ROLE: &str = "kas://replica";

/// Signs certificates for loopback.
struct Authority(rcgen::Issuer<'static, rcgen::KeyPair>, String);

impl Authority {
    fn new() -> Result<Self> {
        net::tls::install();
        let mut ca = rcgen::CertificateParams::new(vec![])?;
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate()?;
        let pem = ca.self_signed(&key)?.pem();
        Ok(Self(rcgen::Issuer::new(ca, key), pem))
    }

    /// Returns a certificate that is valid for this long, and its key.
    fn sign(&self, valid: Duration) -> Result<(String, String)> {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()])?;
        params.subject_alt_names.push(rcgen::SanType::URI(ROLE.try_into()?));
        params.not_after = (now() + valid).into();
        Ok((params.signed_by(&key, &self.0)?.pem(), key.serialize_pem()))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.1.as_bytes())?)?;
        Ok(roots)
    }
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + process::clock::wall()
}

const YEAR: Duration = Duration::from_secs(365 * 86_400);
const HOUR: Duration = Duration::from_secs(3_600);

/// A folder with the layout of a Kubernetes volume.
struct Volume(PathBuf);

impl Volume {
    fn new(path: PathBuf, (certificate, key): &(String, String)) -> Result<Self> {
        std::fs::create_dir(&path)?;
        let volume = Self(path);
        volume.write(certificate, key)?;
        for name in ["tls.crt", "tls.key"] {
            symlink(Path::new("..data").join(name), volume.0.join(name))?;
        }
        Ok(volume)
    }

    /// Replaces both files atomically.
    fn write(&self, certificate: &str, key: &str) -> Result<()> {
        let version = format!("..{:016x}", rand::random::<u64>());
        std::fs::create_dir(self.0.join(&version))?;
        // The default mode of Kubernetes: only this pod sees the volume.
        std::fs::write(self.0.join(&version).join("tls.crt"), certificate)?;
        std::fs::write(self.0.join(&version).join("tls.key"), key)?;
        symlink(&version, self.0.join("..data_tmp"))?;
        Ok(std::fs::rename(self.0.join("..data_tmp"), self.0.join("..data"))?)
    }

    fn listen(&self) -> serde_json::Value {
        json!({ "certificate_file": self.0.join("tls.crt"), "key_file": self.0.join("tls.key") })
    }
}

fn client(
    authority: &Authority,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> Result<ClientConfig> {
    let mut config = ClientConfig::builder_with_protocol_versions(versions)
        .with_root_certificates(authority.roots()?)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

async fn connect(address: SocketAddr, config: &ClientConfig) -> Result<TlsStream<TcpStream>> {
    let name = ServerName::from(address.ip());
    let shaken = async {
        let stream = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::new(config.clone())).connect(name, stream).await
    };
    Ok(soon("a handshake", shaken).await?)
}

/// Returns the certificate that a listener presents, as DER.
async fn shown(address: SocketAddr, config: &ClientConfig) -> Result<Vec<u8>> {
    let stream = connect(address, config).await?;
    let certificates = stream.get_ref().1.peer_certificates().context("it shows one")?;
    Ok(certificates[0].to_vec())
}

fn der(pem: &str) -> Result<Vec<u8>> {
    Ok(CertificateDer::from_pem_slice(pem.as_bytes())?.to_vec())
}

/// Waits until a listener presents a certificate.
async fn shows(address: SocketAddr, config: &ClientConfig, pem: &str) -> Result<()> {
    let wanted = der(pem)?;
    within(EXCHANGED, "the new certificate is shown", async || {
        Ok(if shown(address, config).await? == wanted { Ok(()) } else { Err("another one") })
    })
    .await
}

/// Checks that a call on an open connection succeeds.
async fn answers(kas: &Kas, client: &mut h2::client::SendRequest<Bytes>) -> Result<()> {
    let request = http::Request::post(format!("https://localhost{BY_ID}"))
        .header("content-type", "application/grpc")
        .header("authorization", format!("Bearer {}", kas.jwt()))
        .header("te", "trailers")
        .body(())?;
    let answered = async {
        let mut ready = client.clone().ready().await?;
        let (response, mut send) = ready.send_request(request, false)?;
        // Agent 1.
        send.send_data(Bytes::from_static(&[0, 0, 0, 0, 2, 8, 1]), true)?;
        response.await
    };
    let response = soon("an answer", answered).await?;
    ensure!(response.status() == 200, "{response:?}");
    Ok(())
}

#[tokio::test]
async fn rotated_certificates_are_used_and_invalid_ones_ignored_while_connections_stay() -> Result<()> {
    let authority = Authority::new()?;
    let folder = tempfile::tempdir()?;
    let first = authority.sign(YEAR)?;
    let volume = Volume::new(folder.path().join("agent"), &first)?;
    // The files of the other listener are replaced in place.
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("api.crt"), &first.0)?;
    write_private(&file("api.key"), &first.1)?;
    let api = json!({ "certificate_file": file("api.crt"), "key_file": file("api.key") });
    let config = json!({ "agent": { "listen": volume.listen() }, "api": { "listen": api } });
    let kas = Kas::start_with_config(config).await?;
    let config = client(&authority, rustls::ALL_VERSIONS)?;
    assert_eq!(shown(kas.agent, &config).await?, der(&first.0)?);
    let (mut open, connection) = h2::client::handshake(connect(kas.api, &config).await?).await?;
    let _connection = tokio::spawn(connection);
    answers(&kas, &mut open).await?;

    let second = authority.sign(YEAR)?;
    volume.write(&second.0, &second.1)?;
    std::fs::write(file("api.crt"), &second.0)?;
    write_private(&file("api.key"), &second.1)?;
    shows(kas.agent, &config, &second.0).await?;
    shows(kas.api, &config, &second.0).await?;
    // As old as the first certificate.
    answers(&kas, &mut open).await?;

    // A certificate without its new key, half a certificate, and an expired one: each is reported, and none
    // is used.
    let third = authority.sign(YEAR)?;
    let ended = {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(vec!["localhost".into()])?;
        params.not_after = (now() - HOUR).into();
        (params.signed_by(&key, &authority.0)?.pem(), key.serialize_pem())
    };
    for (certificate, key, told) in [
        (third.0.as_str(), second.1.as_str(), "certificate and key cannot be used"),
        (&third.0[..third.0.len() / 2], &third.1, "certificates from"),
        (&ended.0, &ended.1, "has expired"),
    ] {
        let since = kas.process.log_len();
        volume.write(certificate, key)?;
        let why = kas
            .process
            .logged_since(since, "that the files cannot be used", |line| {
                (line["level"] == "WARN" && line["what"] == "agent.listen.certificate_file")
                    .then(|| line["error"].as_str().unwrap_or_default().to_owned())
            })
            .await?;
        assert!(why.contains(told), "{told}: {why}");
        assert_eq!(shown(kas.agent, &config).await?, der(&second.0)?, "{told}");
    }
    volume.write(&third.0, &third.1)?;
    shows(kas.agent, &config, &third.0).await?;
    answers(&kas, &mut open).await?;
    Ok(())
}

/// The ClientHello of a client that supports at most TLS 1.1 (version 3.2), with matching ciphers. Only its
/// version is wrong.
fn hello_of_tls_1_1() -> Vec<u8> {
    let mut body = vec![3, 2];
    body.extend([7; 32]);
    // No session, TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA and TLS_RSA_WITH_AES_128_CBC_SHA, no compression.
    body.extend([0, 0, 4, 0xc0, 0x13, 0, 0x2f, 1, 0]);
    // The signature algorithms, which are checked before the version.
    body.extend([0, 12, 0, 13, 0, 8, 0, 6, 4, 3, 8, 4, 4, 1]);
    let mut message = vec![1, 0, 0, u8::try_from(body.len()).unwrap()];
    message.extend(body);
    let mut record = vec![22, 3, 1, 0, u8::try_from(message.len()).unwrap()];
    record.extend(message);
    record
}

#[tokio::test]
async fn every_listener_accepts_only_tls_1_2_and_1_3_with_h2() -> Result<()> {
    let authority = Authority::new()?;
    let folder = tempfile::tempdir()?;
    let pair = authority.sign(YEAR)?;
    let volume = Volume::new(folder.path().join("tls"), &pair)?;
    std::fs::write(folder.path().join("ca"), &authority.1)?;
    write_private(&folder.path().join("private"), &BASE64_STANDARD.encode(rand::random::<[u8; 32]>()))?;
    let mut private = volume.listen();
    private["address"] = json!("127.0.0.1:0");
    private["client_ca_file"] = json!(folder.path().join("ca"));
    private["authentication_secret_file"] = json!(folder.path().join("private"));
    let mut agent = volume.listen();
    agent["websocket"] = json!(true);
    let mut hooks = volume.listen();
    hooks["address"] = json!("127.0.0.1:0");
    let kas = Kas::start_with_config(json!({
        "tracker": "gossip",
        "agent": { "listen": agent },
        "api": { "listen": volume.listen() },
        "private_api": { "listen": private },
        "hooks": { "listen": hooks },
    }))
    .await?;
    let (private, hooks): (SocketAddr, SocketAddr) = kas
        .process
        .logged("where it serves", |line| {
            Some((line["private"].as_str()?.parse().ok()?, line["hooks"].as_str()?.parse().ok()?))
        })
        .await?;
    for (name, address) in [("agent", kas.agent), ("api", kas.api), ("private", private), ("hooks", hooks)] {
        for (version, number) in [
            (&rustls::version::TLS12, rustls::ProtocolVersion::TLSv1_2),
            (&rustls::version::TLS13, rustls::ProtocolVersion::TLSv1_3),
        ] {
            let mut config = client(&authority, &[version])?;
            if name == "private" {
                let certificate = CertificateDer::from_pem_slice(pair.0.as_bytes())?;
                let key = PrivateKeyDer::from_pem_slice(pair.1.as_bytes())?;
                config = ClientConfig::builder_with_protocol_versions(&[version])
                    .with_root_certificates(authority.roots()?)
                    .with_client_auth_cert(vec![certificate], key)?;
                config.alpn_protocols = vec![b"h2".to_vec()];
            }
            let stream = connect(address, &config).await.with_context(|| format!("{name} {number:?}"))?;
            let session = stream.get_ref().1;
            assert_eq!(session.protocol_version(), Some(number), "{name}");
            assert_eq!(session.alpn_protocol(), Some(&b"h2"[..]), "{name}");
            // The settings of kas show that it is HTTP/2.
            let (_client, mut connection) = h2::client::handshake(stream).await?;
            let pinged = async {
                let mut pings = connection.ping_pong().context("a connection pings")?;
                tokio::select! {
                    answered = pings.ping(h2::Ping::opaque()) => Ok(answered.map(drop)?),
                    ended = &mut connection => anyhow::bail!("{name}: it ended: {ended:?}"),
                }
            };
            soon("an answer to a ping", pinged).await?;
        }
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(&hello_of_tls_1_1()).await?;
        let mut alert = [0; 7];
        soon("an alert", stream.read_exact(&mut alert)).await?;
        // An alert, fatal, protocol_version.
        assert_eq!((alert[0], &alert[5..]), (21, &[2, 70][..]), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn certificate_expiry_is_a_metric_and_logged_once_at_each_threshold() -> Result<()> {
    let authority = Authority::new()?;
    let folder = tempfile::tempdir()?;
    let volume = Volume::new(folder.path().join("tls"), &authority.sign(6 * 24 * HOUR)?)?;
    let kas = Kas::start_with_config(json!({ "api": { "listen": volume.listen() } })).await?;
    let file = volume.0.join("tls.crt");
    let metric = format!(
        "kas_certificate_not_after_timestamp_seconds{{section=\"api\",part=\"Leaf\",file=\"{}\"}}",
        file.display()
    );
    let ends_in =
        async || -> Result<f64> { Ok(kas.metric(&metric).await? - process::clock::wall().as_secs_f64()) };
    let left = ends_in().await?;
    assert!((6.0 * 86_400.0 - 120.0..=6.0 * 86_400.0).contains(&left), "{left}");
    let days = |line: &serde_json::Value| {
        line["message"].as_str()?.starts_with("a certificate expires soon").then(|| line["days"].as_u64())?
    };
    assert_eq!(kas.process.logged("that it ends", days).await?, 5);
    let since = kas.process.log_len();
    let (certificate, key) = authority.sign(12 * HOUR)?;
    volume.write(&certificate, &key)?;
    assert_eq!(kas.process.logged_since(since, "that it ends", days).await?, 0);
    let left = ends_in().await?;
    assert!((0.0..=12.0 * 3_600.0).contains(&left), "{left}");
    // A renewed certificate logs nothing, and each threshold was logged once.
    let (certificate, key) = authority.sign(YEAR)?;
    volume.write(&certificate, &key)?;
    within(EXCHANGED, "the last one counts", async || {
        let left = ends_in().await?;
        Ok(if left > 30.0 * 86_400.0 { Ok(()) } else { Err(left) })
    })
    .await?;
    assert_eq!(kas.process.log().matches("a certificate expires soon").count(), 2);
    Ok(())
}

#[tokio::test]
async fn api_secrets_are_rotated_without_a_restart_under_the_rules_of_a_start() -> Result<()> {
    let kas = Kas::start().await?;
    let file = kas.dir().join("secret-0");
    let call = async |secret: &[u8]| -> Result<Code> {
        let caller = Caller::connect(kas.api, Some(Jwt::new(secret).encode())).await?;
        let message =
            prost::Message::encode_to_vec(&proto::kas::api::v1::ConnectedAgentsByIdRequest { agent_id: 1 });
        Ok(caller.call(caller.request(BY_ID), &[&message]).await?.status.code())
    };
    assert_eq!(call(&kas.secrets[0]).await?, Code::Ok);
    let new = rand::random::<[u8; 32]>();
    write_private(&file, &BASE64_STANDARD.encode(new))?;
    within(EXCHANGED, "the new secret counts", async || {
        Ok(match call(&new).await? {
            Code::Ok => Ok(()),
            other => Err(other),
        })
    })
    .await?;
    assert_eq!(call(&kas.secrets[0]).await?, Code::Unauthenticated);
    // A secret with which kas would not start is not used while it runs.
    let since = kas.process.log_len();
    write_private(&file, "aGVsbG8=")?;
    let why = kas
        .process
        .logged_since(since, "that the secret is too short", |line| {
            (line["what"] == "secrets").then(|| line["error"].as_str().map(str::to_owned))?
        })
        .await?;
    assert!(why.contains("a secret of 5 bytes") && !why.contains("aGVsbG8="), "{why}");
    assert_eq!(call(&new).await?, Code::Ok);
    Ok(())
}

/// A start reports the same problems as `config check`, all at once.
#[tokio::test]
async fn kas_does_not_start_with_unsafe_files_and_reports_all_of_them() -> Result<()> {
    let authority = Authority::new()?;
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name);
    let (certificate, key) = authority.sign(YEAR)?;
    std::fs::write(file("crt"), certificate)?;
    std::fs::write(file("key"), key)?;
    std::fs::set_permissions(file("key"), std::fs::Permissions::from_mode(0o644))?;
    write_private(&file("short"), "aGVsbG8=")?;
    let config = json!({
        "agent": { "listen": { "address": "127.0.0.1:0", "certificate_file": file("crt"), "key_file": file("key") } },
        "api": { "listen": { "address": "127.0.0.1:0", "authentication_secret_file": file("short") } },
        "private_api": { "listen": { "address": "127.0.0.1:0", "authentication_secret_file": file("short") } },
        "observability": { "listen": { "address": "127.0.0.1:0" } },
        "state_dir": folder.path(),
    });
    std::fs::write(file("kas.yaml"), serde_json::to_vec(&config)?)?;
    let kas = program("kas")?;
    let run = |arguments: &[&str]| Command::new(&kas).args(arguments).arg(file("kas.yaml")).output();
    let told = [
        "agent.listen.key_file: found a private key that everyone on this host may read (mode 0644",
        "api.listen.authentication_secret_file: found a secret of 5 bytes",
        "private_api.listen.authentication_secret_file: found the same secret as in api.listen",
    ];
    for arguments in [&["--configuration-file"][..], &["config", "check"]] {
        let output = run(arguments)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "{text}");
        for told in told {
            assert!(text.contains(told), "{arguments:?} does not say {told:?}:\n{text}");
        }
        assert!(text.contains("; expected mode 0600") && !text.contains("aGVsbG8="), "{text}");
    }
    Ok(())
}

#[tokio::test]
async fn the_gitlab_secret_is_rotated_without_a_restart() -> Result<()> {
    let gitlab = GitLab::start().await?;
    let kas = Kas::start_with(Options { config: gitlab.config(), ..Options::default() }).await?;
    let since = kas.process.log_len();
    let new = rand::random::<[u8; 32]>();
    write_private(gitlab.secret_file(), &BASE64_STANDARD.encode(new))?;
    let said = kas
        .process
        .logged_since(since, "that the secret was exchanged", |line| {
            (line["what"] == "secrets").then(|| line["message"].as_str().map(str::to_owned))?
        })
        .await?;
    assert_eq!(said, "the secrets of GitLab were exchanged");
    // Whatever the response is: the request has the new signature.
    let agent = RawAgent::connect(kas.agent, "a-token", Kind::Old).await?;
    let (_refused, seen) = tokio::join!(agent.tunnel(), gitlab.asked(1));
    seen[0].check_signature(&new)?;
    Ok(())
}

#[tokio::test]
async fn the_gitlab_ca_is_rotated_without_a_restart() -> Result<()> {
    let gitlab = GitLab::start_tls().await?;
    gitlab.know(&token(1), 1, "agent-1", 7);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, Authority::new()?.1)?;
    let mut config = gitlab.config();
    let over =
        json!({ "gitlab": { "ca_certificate_file": file }, "agent": { "info_cache_error_ttl": "300ms" } });
    merge(&mut config, over);
    let kas = Kas::start_with(Options { config, ..Options::default() }).await?;
    let tunnel = async || RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?.tunnel().await;
    let error = tunnel().await.unwrap_err().downcast::<grpc::Status>()?;
    assert_eq!(error.code(), Code::Unavailable);
    std::fs::copy(gitlab.ca_file().context("it has one")?, &file)?;
    within(EXCHANGED, "GitLab is trusted", async || {
        Ok(tunnel().await.map(drop).map_err(|error| error.to_string()))
    })
    .await
}

#[tokio::test]
async fn agentk_reloads_its_ca_file() -> Result<()> {
    let authority = Authority::new()?;
    let folder = tempfile::tempdir()?;
    let volume = Volume::new(folder.path().join("tls"), &authority.sign(YEAR)?)?;
    let kas = Kas::start_with_config(json!({ "agent": { "listen": volume.listen() } })).await?;
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, Authority::new()?.1)?;
    let agentk = Agentk::start_tls(kas.agent, &token(1), &file).await?;
    agentk
        .process
        .logged("that it does not trust kas", |line| line.to_string().contains("certificate").then_some(()))
        .await?;
    std::fs::write(&file, &authority.1)?;
    within(EXCHANGED, "kas is trusted", async || {
        Ok(if kas.metric("kas_connected_agents").await? >= 1.0 { Ok(()) } else { Err("not connected") })
    })
    .await
}
