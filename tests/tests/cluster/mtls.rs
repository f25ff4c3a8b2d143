//! Certificates between replicas: who has none that the common authority signed is not one of them, whatever
//! else it knows.

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

/// What certificates of replicas are for.
pub(crate) const ROLE: &str = "kas://replica";

/// An authority of a test.
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

    /// Writes `NAME.cert`, `NAME.key` and `NAME.ca`; returns what a replica's listener is told of them, when
    /// it trusts `trusted`.
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

/// Starts `good` replicas with certificates of one authority, and as many with those of another.
async fn start(replicas: usize, good: &[usize]) -> Result<(Mesh, tempfile::TempDir)> {
    net::tls::install();
    let folder = tempfile::tempdir()?;
    let (ours, other) = (Authority::new()?, Authority::new()?);
    // Beside the files of replicas: what the authority of replicas signs for others.
    ours.issue(&ours, folder.path(), "agent", IpAddr::from([127, 0, 0, 1]), "kas://agent")?;
    let mut mesh = Mesh::start_with(Options { replicas, start: false, ..Options::default() }).await?;
    for n in 0..replicas {
        let authority = if good.contains(&n) { &ours } else { &other };
        // Who comes from elsewhere trusts the replicas: it is them who refuse.
        let listen = authority.issue(&ours, folder.path(), &n.to_string(), mesh.private(n).ip(), ROLE)?;
        mesh.add_config(json!({ "private_api": { "listen": listen } }));
        mesh.start_unready(n).await?;
    }
    Ok((mesh, folder))
}

/// Calls a method of the private API over TLS; returns the status, or why there is none.
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

/// The same calls are made with and without a certificate, and with and without each credential: each is
/// needed.
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
    // Certificates of another authority, beside those of the replicas.
    Authority::new()?.issue(&Authority::new()?, folder.path(), "stranger", mesh.private(1).ip(), ROLE)?;
    let api = Jwt::new(mesh.api_secret()).claim("iss", json!("gitlab-kas")).encode();
    let (agent, replica) = (
        token(1),
        Jwt::new(mesh.private_secret()).claim("iss", json!("gitlab-kas")).claim("sub", json!("x")).encode(),
    );
    let explain = "/kas.internal.v1.Replica/Explain";
    for method in ["/kas.internal.v1.Tunnels/Borrow", "/kas.internal.v1.TableSync/Watch", explain] {
        for bearer in [None, Some(&api), Some(&agent), Some(&replica)] {
            let bearer = bearer.map(String::as_str);
            // Without a certificate of theirs no credential is even looked at.
            for identity in [None, Some("stranger"), Some("agent")] {
                let got = call(&mesh, folder.path(), identity, method, bearer).await?;
                assert!(got.is_err(), "{identity:?} {method}: {got:?}");
            }
        }
        // With one, the credentials of agents and of callers are none.
        for bearer in [None, Some(&api), Some(&agent)] {
            let got = call(&mesh, folder.path(), Some("1"), method, bearer.map(String::as_str)).await?;
            assert_eq!(got, Ok(Code::Unauthenticated), "{method}");
        }
    }
    // Both together are what opens it, or the above would show nothing: gRPC's own refusal, or an answer that
    // streams.
    let got = call(&mesh, folder.path(), Some("1"), explain, Some(&replica)).await?;
    assert_ne!(got, Ok(Code::Unauthenticated));
    assert!(got.is_ok() || got == Err("no status at once".to_owned()), "{got:?}");
    assert_eq!(held.raw.requests().list().len(), 3);
    // Who operates kas is told why, if not of each.
    let told = |line: &Value| {
        let refused = line["message"].as_str()?.starts_with("a connection to the private API was refused");
        (refused && line["level"] == "WARN").then(|| line["error"].as_str().map(str::to_owned))?
    };
    mesh.kas(0).process.logged("that a handshake was refused", told).await?;
    drop((held, other));
    Ok(())
}

/// All of one authority, all with the secret: the role alone tells the third from a replica.
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
    // It has the secret, so that gossip hears it; its certificate is refused wherever it calls.
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
    // Nor do the others believe what it says, since nobody can be sure of who it is.
    let caller = mesh.caller(0).await?;
    let end = ledger.echo(&caller, 2, std::time::Duration::from_secs(2)).await;
    assert_eq!(end, End::NotStarted, "{:?}", ledger.texts(end));
    assert_eq!(rogue.raw.requests().list().len(), 0);
    // Who has the secret reads gossip, and of tables what gossip tells of them; a whole table comes with a
    // certificate only.
    for (asked, others) in [(2, [0, 1].as_slice()), (0, &[2]), (1, &[2])] {
        for n in others {
            let row = mesh.row(asked, *n).await?;
            assert!(row.as_ref().is_none_or(|row| !row.table_synced), "replica {asked}: {row:?}");
        }
    }
    // Its own agents it serves.
    echo(&mesh, 2, 2).await.context("what is its own")?;
    drop((held, rogue));
    Ok(())
}

/// From one authority to the next under running replicas: first both are trusted, then certificates of the
/// new one are shown, then the old one is forgotten. Each step is a file, and each file counts at both ends
/// of a link.
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
    let exchanged = async |since: [usize; 2]| -> Result<()> {
        for (n, since) in since.into_iter().enumerate() {
            mesh.kas(n)
                .process
                .logged_since(since, "that the files count", |line| {
                    let what = line["what"] == "private_api.listen.certificate_file";
                    (what && line["message"].as_str()?.starts_with("exchanged")).then_some(())
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
    exchanged(since).await?;
    let since = logged();
    for n in 0..2 {
        let both = std::fs::read(folder.path().join(format!("{n}.ca")))?;
        new.issue(&new, folder.path(), &n.to_string(), mesh.private(n).ip(), ROLE)?;
        std::fs::write(folder.path().join(format!("{n}.ca")), both)?;
    }
    exchanged(since).await?;
    let since = logged();
    for n in 0..2 {
        std::fs::write(folder.path().join(format!("{n}.ca")), &new.1)?;
    }
    exchanged(since).await?;
    // One that knows nothing of the old authority: it is let in, and lets the others in.
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
    // And what the old one signed opens nothing any more.
    old.issue(&new, folder.path(), "stale", mesh.private(1).ip(), ROLE)?;
    let bearer =
        Jwt::new(mesh.private_secret()).claim("iss", json!("gitlab-kas")).claim("sub", json!("x")).encode();
    let got =
        call(&mesh, folder.path(), Some("stale"), "/kas.internal.v1.Replica/Explain", Some(&bearer)).await?;
    assert!(got.is_err_and(|error| error != "no status at once"));
    drop((held, other));
    Ok(())
}
