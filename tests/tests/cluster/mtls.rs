//! Certificates between replicas: a peer without a certificate of the common CA is refused, whatever else it
//! knows.

use std::{net::IpAddr, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use grpc::{Code, Status};
use serde_json::{Value, json};
use testkit::{
    caller::Jwt,
    kas::{metric_is_at_least, token, within, write_private},
    mesh::{Mesh, Options},
    process::{SOON, soon},
    raw_agent::Kind,
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

use crate::ledger::{End, Ledger, echo};

/// Key usages of replica certificates.
pub(crate) const ROLE: &str = "kas://replica";

/// A CA for tests.
pub(crate) struct Authority(rcgen::Issuer<'static, rcgen::KeyPair>, String);

impl Authority {
    pub(crate) fn new() -> Result<Self> {
        let mut ca = rcgen::CertificateParams::new(vec![])?;
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        ca.distinguished_name.push(rcgen::DnType::CommonName, "replicas of a test");
        let key = rcgen::KeyPair::generate()?;
        let pem = ca.self_signed(&key)?.pem();
        Ok(Self(rcgen::Issuer::new(ca, key), pem))
    }

    /// Writes `NAME.cert`, `NAME.key` and `NAME.ca`. Returns the listener configuration that uses them and
    /// trusts `trusted`.
    pub(crate) fn issue(
        &self,
        trusted: &Self,
        folder: &Path,
        name: &str,
        at: IpAddr,
        role: &str,
    ) -> Result<Value> {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(vec![at.to_string()])?;
        params.subject_alt_names.push(rcgen::SanType::URI(role.try_into()?));
        let certificate = params.signed_by(&key, &self.0)?;
        let file = |end: &str| folder.join(format!("{name}.{end}"));
        std::fs::write(file("cert"), certificate.pem())?;
        write_private(&file("key"), &key.serialize_pem())?;
        std::fs::write(file("ca"), &trusted.1)?;
        Ok(json!({
            "certificate_file": file("cert"), "key_file": file("key"), "client_ca_file": file("ca"), "role": role,
        }))
    }
}

/// Starts replicas: those in `good` with certificates of one CA, the others with those of another.
async fn start(replicas: usize, good: &[usize]) -> Result<(Mesh, tempfile::TempDir)> {
    net::tls::install();
    let folder = tempfile::tempdir()?;
    let (ours, other) = (Authority::new()?, Authority::new()?);
    // In addition to the files of replicas: certificates that their CA signed for other services.
    ours.issue(&ours, folder.path(), "agent", IpAddr::from([127, 0, 0, 1]), "kas://agent")?;
    let mut mesh = Mesh::start_with(Options { replicas, start: false, ..Options::default() }).await?;
    for n in 0..replicas {
        let authority = if good.contains(&n) { &ours } else { &other };
        // A client with another CA trusts the replicas: the replicas refuse it.
        let listen = authority.issue(&ours, folder.path(), &n.to_string(), mesh.private(n).ip(), ROLE)?;
        mesh.add_config(json!({ "private_api": { "listen": listen } }));
        mesh.start_unready(n).await?;
    }
    Ok((mesh, folder))
}

/// Calls a method of the private API over TLS. Returns the status, or why there is none.
async fn call(
    mesh: &Mesh,
    folder: &Path,
    identity: Option<&str>,
    method: &str,
    bearer: Option<&str>,
) -> Result<Result<Code, String>> {
    let file = |name: &str| folder.join(name);
    let files = identity.map(|name| (file(&format!("{name}.cert")), file(&format!("{name}.key"))));
    let identity = files.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
    let config = net::tls::client_of(&file("0.ca"), identity, None)?;
    let address = mesh.private(0);
    let asked = async {
        let tcp = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let name = ServerName::from(address.ip());
        let tls = TlsConnector::from(Arc::clone(&config)).connect(name, tcp).await;
        let tls = tls.map_err(|error| error.to_string())?;
        let (client, connection) = h2::client::handshake(tls).await.map_err(|error| error.to_string())?;
        let mut connection = tokio::spawn(connection);
        let mut request = http::Request::post(format!("https://{address}{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(bearer) = bearer {
            request = request.header("authorization", format!("Bearer {bearer}"));
        }
        let request = request.body(()).map_err(|error| error.to_string())?;
        let answered = async {
            let mut client = client.ready().await.map_err(|error| error.to_string())?;
            let (response, mut send) =
                client.send_request(request, false).map_err(|error| error.to_string())?;
            send.send_data(Bytes::from_static(&[0; 5]), true).map_err(|error| error.to_string())?;
            let response = response.await.map_err(|error| error.to_string())?;
            let status = Status::from_headers(response.headers()).ok_or("no status at once")?;
            Ok(status.code())
        };
        tokio::select! {
            answer = answered => { connection.abort(); answer }
            ended = &mut connection => Err(format!("{ended:?}")),
        }
    };
    Ok(soon("an answer or none", asked).await)
}

/// The same calls with and without a certificate and with and without each credential: each is required.
#[tokio::test]
async fn replicas_with_certificates_form_a_cluster_and_refuse_all_others() -> Result<()> {
    let (mesh, folder) = start(3, &[0, 1, 2]).await?;
    for n in 0..3 {
        mesh.ready(n).await?;
    }
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let other = mesh.agent(2, 2, Kind::Old, 2).await?;
    mesh.converged(&[(1, 0), (2, 2)]).await?;
    for n in 0..3 {
        echo(&mesh, n, 1).await?;
        echo(&mesh, n, 2).await?;
    }
    // Certificates of another CA, next to those of the replicas.
    Authority::new()?.issue(&Authority::new()?, folder.path(), "other-ca", mesh.private(1).ip(), ROLE)?;
    let api = Jwt::new(mesh.api_secret()).claim("iss", json!("gitlab-kas")).encode();
    let (agent, replica) = (
        token(1),
        Jwt::new(mesh.private_secret()).claim("iss", json!("gitlab-kas")).claim("sub", json!("x")).encode(),
    );
    let explain = "/kas.internal.v1.Replica/Explain";
    for method in ["/kas.internal.v1.Tunnels/Borrow", "/kas.internal.v1.TableSync/Watch", explain] {
        for bearer in [None, Some(&api), Some(&agent), Some(&replica)] {
            let bearer = bearer.map(String::as_str);
            // Without a replica certificate, no credential is checked.
            for identity in [None, Some("other-ca"), Some("agent")] {
                let got = call(&mesh, folder.path(), identity, method, bearer).await?;
                assert!(got.is_err(), "{identity:?} {method}: {got:?}");
            }
        }
        // With one, credentials of agents and callers are refused.
        for bearer in [None, Some(&api), Some(&agent)] {
            let got = call(&mesh, folder.path(), Some("1"), method, bearer.map(String::as_str)).await?;
            assert_eq!(got, Ok(Code::Unauthenticated), "{method}");
        }
    }
    // Both together are accepted, which validates the checks above: gRPC's own refusal, or a response that
    // streams.
    let got = call(&mesh, folder.path(), Some("1"), explain, Some(&replica)).await?;
    assert_ne!(got, Ok(Code::Unauthenticated));
    assert!(got.is_ok() || got == Err("no status at once".to_owned()), "{got:?}");
    assert_eq!(held.raw.requests().list().len(), 3);
    // The reason is logged, though not for each connection.
    let told = |line: &Value| {
        let refused = line["message"].as_str()?.starts_with("a connection to the private API was refused");
        (refused && line["level"] == "WARN").then(|| line["error"].as_str().map(str::to_owned))?
    };
    mesh.kas(0).process.logged("that a handshake was refused", told).await?;
    drop((held, other));
    Ok(())
}

/// All have certificates of the same CA, and the secret: only the role distinguishes the third.
#[tokio::test]
async fn a_certificate_with_another_role_is_refused_in_both_directions() -> Result<()> {
    net::tls::install();
    let folder = tempfile::tempdir()?;
    let ours = Authority::new()?;
    let mut mesh = Mesh::start_with(Options { replicas: 3, start: false, ..Options::default() }).await?;
    for n in 0..3 {
        let role = if n == 2 { "kas://agent" } else { ROLE };
        let listen = ours.issue(&ours, folder.path(), &n.to_string(), mesh.private(n).ip(), role)?;
        mesh.add_config(json!({ "private_api": { "listen": listen } }));
        mesh.start_unready(n).await?;
    }
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let rogue = mesh.agent(2, 2, Kind::Ours, 2).await?;
    for n in [0, 1] {
        mesh.ready(n).await?;
    }
    echo(&mesh, 1, 1).await?;
    let refused = "kas_refusals_total{listener=\"Private\",reason=\"Handshake\"}";
    for n in 0..3 {
        metric_is_at_least(mesh.kas(n).observability, refused, 1.0).await?;
    }
    let ledger = Ledger::default();
    for (replica, agent) in [(2, 1), (0, 2), (1, 2)] {
        let caller = mesh.caller(replica).await?;
        let end = ledger.echo(&caller, agent, std::time::Duration::from_secs(2)).await;
        assert_eq!(end, End::NotStarted, "{:?}", ledger.texts(end));
    }
    assert_eq!(rogue.raw.requests().list().len(), 0);
    drop((held, rogue));
    Ok(())
}

#[tokio::test]
async fn replica_with_a_certificate_of_another_ca_gets_no_table_and_no_tunnel() -> Result<()> {
    let (mesh, _folder) = start(3, &[0, 1]).await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let rogue = mesh.agent(2, 2, Kind::Ours, 2).await?;
    for n in [0, 1] {
        mesh.ready(n).await?;
    }
    // It has the secret, so gossip hears it; its certificate is refused wherever it connects.
    within(SOON, "the good ones know each other's tables", async || {
        let rows = [mesh.row(0, 1).await?, mesh.row(1, 0).await?];
        let known = rows.iter().flatten().filter(|row| row.table_synced).count();
        Ok(if known == 2 { Ok(()) } else { Err(rows) })
    })
    .await?;
    echo(&mesh, 1, 1).await?;
    let refused = "kas_refusals_total{listener=\"Private\",reason=\"Handshake\"}";
    metric_is_at_least(mesh.kas(0).observability, refused, 1.0).await?;
    let ledger = Ledger::default();
    let caller = mesh.caller(2).await?;
    let end = ledger.echo(&caller, 1, std::time::Duration::from_secs(2)).await;
    assert_eq!(end, End::NotStarted, "{:?}", ledger.texts(end));
    // The others do not trust its table either, because they cannot verify its identity.
    let caller = mesh.caller(0).await?;
    let end = ledger.echo(&caller, 2, std::time::Duration::from_secs(2)).await;
    assert_eq!(end, End::NotStarted, "{:?}", ledger.texts(end));
    assert_eq!(rogue.raw.requests().list().len(), 0);
    // The secret is enough to read gossip and the changes in it; a whole table requires a certificate.
    for (asked, others) in [(2, [0, 1].as_slice()), (0, &[2]), (1, &[2])] {
        for n in others {
            let row = mesh.row(asked, *n).await?;
            assert!(row.as_ref().is_none_or(|row| !row.table_synced), "replica {asked}: {row:?}");
        }
    }
    // It serves its own agents.
    echo(&mesh, 2, 2).await.context("what is its own")?;
    drop((held, rogue));
    Ok(())
}

/// Replaces the CA of running replicas: first both are trusted, then certificates of the new one are
/// presented, then the old one is removed. Each step replaces a file, which takes effect at both ends of a
/// connection.
#[tokio::test]
async fn ca_of_replicas_is_rotated_without_a_restart() -> Result<()> {
    net::tls::install();
    let folder = tempfile::tempdir()?;
    let (old, new) = (Authority::new()?, Authority::new()?);
    let mut mesh = Mesh::start_with(Options { replicas: 3, start: false, ..Options::default() }).await?;
    for n in 0..2 {
        let listen = old.issue(&old, folder.path(), &n.to_string(), mesh.private(n).ip(), ROLE)?;
        mesh.add_config(json!({ "private_api": { "listen": listen } }));
        mesh.start_unready(n).await?;
    }
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    for n in [0, 1] {
        mesh.ready(n).await?;
    }
    echo(&mesh, 1, 1).await?;
    let reloaded = async |since: [usize; 2]| -> Result<()> {
        for (n, since) in since.into_iter().enumerate() {
            mesh.kas(n)
                .process
                .logged_since(since, "that the files count", |line| {
                    let what = line["what"] == "private_api.listen.certificate_file";
                    (what && line["message"].as_str()?.starts_with("reloaded")).then_some(())
                })
                .await?;
        }
        Ok(())
    };
    let logged = || [0, 1].map(|n| mesh.kas(n).process.log_len());
    let since = logged();
    for n in 0..2 {
        std::fs::write(folder.path().join(format!("{n}.ca")), format!("{}{}", old.1, new.1))?;
    }
    reloaded(since).await?;
    let since = logged();
    for n in 0..2 {
        let both = std::fs::read(folder.path().join(format!("{n}.ca")))?;
        new.issue(&new, folder.path(), &n.to_string(), mesh.private(n).ip(), ROLE)?;
        std::fs::write(folder.path().join(format!("{n}.ca")), both)?;
    }
    reloaded(since).await?;
    let since = logged();
    for n in 0..2 {
        std::fs::write(folder.path().join(format!("{n}.ca")), &new.1)?;
    }
    reloaded(since).await?;
    // A replica that only knows the new CA: it is accepted, and accepts the others.
    let listen = new.issue(&new, folder.path(), "2", mesh.private(2).ip(), ROLE)?;
    mesh.add_config(json!({ "private_api": { "listen": listen } }));
    mesh.start_unready(2).await?;
    mesh.ready(2).await?;
    let other = mesh.agent(2, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (2, 2)]).await?;
    for n in 0..3 {
        echo(&mesh, n, 1).await?;
        echo(&mesh, n, 2).await?;
    }
    // Certificates of the old CA are no longer accepted.
    old.issue(&new, folder.path(), "stale", mesh.private(1).ip(), ROLE)?;
    let bearer =
        Jwt::new(mesh.private_secret()).claim("iss", json!("gitlab-kas")).claim("sub", json!("x")).encode();
    let got =
        call(&mesh, folder.path(), Some("stale"), "/kas.internal.v1.Replica/Explain", Some(&bearer)).await?;
    assert!(got.is_err_and(|error| error != "no status at once"));
    drop((held, other));
    Ok(())
}
