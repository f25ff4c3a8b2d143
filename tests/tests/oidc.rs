//! Callers of the Kubernetes API endpoint with tokens of OpenID Connect issuers: a real kas and agentk,
//! issuers with https, and an API server that tells which headers it got.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aws_lc_rs::hmac;
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response, StatusCode, header, response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    endpoint,
    issuer::{Issuer, SigningKey, unsigned},
    kas::{Kas, eventually, replace, token},
    mesh::{self, Mesh},
    process::{program, soon},
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

const AGENT: i64 = 1;
const AUDIENCE: &str = "https://kas.example.com";

/// An open request ends within this time after the keys of its issuer have changed.
const AT_ONCE: Duration = Duration::from_secs(12);

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// An API server that answers with the headers of the request. A watch sends one event and stays open.
struct Echo {
    address: SocketAddr,
    _server: JoinSet<()>,
}

impl Echo {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let service = service_fn(|request| async move { Ok::<_, Infallible>(echo(&request)) });
                connections.spawn(async move {
                    // agentk notices how a connection ends.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Ok(Self { address, _server: server })
    }
}

fn echo(request: &Request<Incoming>) -> Response<Body> {
    let mut headers: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, value) in request.headers() {
        headers
            .entry(name.as_str())
            .or_default()
            .push(String::from_utf8_lossy(value.as_bytes()).into_owned());
    }
    let text = Bytes::from(json!(headers).to_string() + "\n");
    let is_watch = request.uri().query().is_some_and(|query| query.contains("watch="));
    let body = if is_watch {
        let event = stream::once(async move { Ok(Frame::data(text)) });
        StreamBody::new(futures_util::StreamExt::chain(event, stream::pending())).boxed_unsync()
    } else {
        Full::new(text).boxed_unsync()
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    for name in ["x-cluster", "x-internal"] {
        headers.insert(name, header::HeaderValue::from_static("c1"));
    }
    response
}

/// A kas with issuers, and an agentk that is connected to it.
struct Endpoint {
    kas: Kas,
    address: SocketAddr,
    _agentk: Agentk,
    _server: Echo,
}

impl Endpoint {
    async fn start(oidc: Value, access: Value) -> Result<Self> {
        let section = section(oidc, access);
        let kas = Kas::start_with_config(json!({ "agent": { "kubernetes_api": section } })).await?;
        let address = endpoint::address(&kas).await?;
        let server = Echo::start().await?;
        let agentk =
            Agentk::start_with(kas.agent, &token(AGENT), &format!("http://{}", server.address)).await?;
        agentk.connected().await?;
        Ok(Self { kas, address, _agentk: agentk, _server: server })
    }

    /// Sends a request with a token, and returns the head of its answer and the rest.
    async fn send(&self, query: &str, token: &str) -> Result<(response::Parts, Incoming)> {
        send(self.address, query, token).await
    }

    async fn get(&self, token: &str) -> Result<(StatusCode, Value)> {
        let (head, body) = self.send("", token).await?;
        let body = soon("an answer", body.collect()).await?.to_bytes();
        Ok((head.status, serde_json::from_slice(&body)?))
    }

    async fn status(&self, token: &str) -> Result<StatusCode> {
        Ok(self.get(token).await?.0)
    }

    /// Returns the output of `kasctl why`.
    async fn why(&self) -> Result<String> {
        let output = tokio::process::Command::new(program("kasctl")?)
            .args(["why", &AGENT.to_string()])
            .env("KASCTL_ADDRESS", format!("grpc://{}", self.kas.api))
            .env("KASCTL_SECRET_FILE", self.kas.dir().join("secret-0"))
            .output()
            .await?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The section of the endpoint.
fn section(oidc: Value, access: Value) -> Value {
    json!({
        "listen": { "address": "127.0.0.1:0" },
        "oidc": oidc,
        "access": access,
        "extra_allowed_response_headers": ["X-Cluster"],
    })
}

/// Sends a request with a token, and returns the head of its answer and the rest.
async fn send(address: SocketAddr, query: &str, token: &str) -> Result<(response::Parts, Incoming)> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer.
    tokio::spawn(connection);
    let request = Request::get(format!("/agents/{AGENT}/api/v1/pods{query}"))
        .header(header::HOST, "kas.example.com")
        .header(header::AUTHORIZATION, format!("Bearer {token}"))
        .body(Empty::<Bytes>::new())?;
    Ok(soon("the head of an answer", sender.send_request(request)).await?.into_parts())
}

fn of(issuer: &Issuer, more: Value) -> Value {
    let mut section = json!({ "issuer": issuer.url(), "audiences": [AUDIENCE], "ca_file": issuer.ca_file() });
    testkit::kas::merge(&mut section, more);
    section
}

#[tokio::test]
async fn jobs_of_gitlab_and_users_of_dex_are_users_of_the_cluster() -> Result<()> {
    let (gitlab, dex) = (Issuer::start().await?, Issuer::start().await?);
    let (gitlab_key, dex_key) = (SigningKey::rsa("gitlab-1")?, SigningKey::ec("dex-1")?);
    gitlab.publish([&gitlab_key]);
    dex.publish([&dex_key]);
    let oidc = json!([
        of(
            &gitlab,
            json!({
                "username": "gl:{project_path}",
                "groups": ["gl:ref:{ref}"],
                "require": { "ref_protected": "true", "namespace_path": ["acme", "acme/**"] },
            })
        ),
        of(&dex, json!({ "username": "corp:{email}", "groups": "corp:{groups}" })),
    ]);
    let access = json!([
        { "agents": "all", "groups": ["corp:dev"], "as": "user" },
        { "agents": "all", "users": ["gl:acme/*"], "as": { "impersonate": { "username": "deployer", "groups": ["ci"] } } },
    ]);
    let endpoint = Endpoint::start(oidc, access).await?;

    // As GitLab makes `id_tokens`.
    let job = |namespace: &str, protected: &str| {
        gitlab_key.token(&gitlab.claims(AUDIENCE, json!({
            "sub": format!("project_path:{namespace}/web:ref_type:branch:ref:main"),
            "jti": "7f1a", "nbf": testkit::caller::now() - 5,
            "namespace_id": "72", "namespace_path": namespace,
            "project_id": "20", "project_path": format!("{namespace}/web"),
            "user_id": "1", "user_login": "jane", "user_email": "jane@example.com",
            "pipeline_id": "574", "pipeline_source": "push", "job_id": "302",
            "ref": "main", "ref_type": "branch", "ref_path": "refs/heads/main", "ref_protected": protected,
            "environment_protected": "false", "runner_environment": "self-hosted",
        })))
    };
    let (status, seen) = endpoint.get(&job("acme", "true")).await?;
    assert_eq!(status, StatusCode::OK, "{seen}");
    assert_eq!(seen["impersonate-user"], json!(["deployer"]));
    assert_eq!(seen["impersonate-group"], json!(["ci"]));
    assert_eq!(seen["authorization"], json!(null), "no credential reaches the API server");
    // Of the headers that are not Kubernetes' own, those that the configuration names come back.
    let (head, _) = endpoint.send("", &job("acme", "true")).await?;
    assert_eq!(head.headers.get("x-cluster").map(|value| value.as_bytes()), Some(&b"c1"[..]), "{head:?}");
    assert!(!head.headers.contains_key("x-internal"), "{head:?}");
    // A branch that is not protected, a namespace that is not ours, and one whose rule is missing.
    for (namespace, protected) in [("acme", "false"), ("acme-evil", "true"), ("evil/acme", "true")] {
        assert_eq!(endpoint.status(&job(namespace, protected)).await?, StatusCode::FORBIDDEN, "{namespace}");
    }

    let jane = |groups: Value, verified: bool| {
        dex_key.token(&dex.claims(AUDIENCE, json!({
            "sub": "CgRqYW5lEgVsb2NhbA", "at_hash": "x", "email": "jane@example.com", "email_verified": verified,
            "groups": groups, "name": "jane",
        })))
    };
    let (status, seen) = endpoint.get(&jane(json!(["dev", "sre"]), true)).await?;
    assert_eq!(status, StatusCode::OK, "{seen}");
    assert_eq!(seen["impersonate-user"], json!(["corp:jane@example.com"]));
    assert_eq!(seen["impersonate-group"], json!(["corp:dev", "corp:sre"]));
    let extra = |key: &str| {
        let name = format!("impersonate-extra-agent.gitlab.com%2f{key}");
        seen.as_object()
            .and_then(|all| all.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name)))
            .map(|(_, value)| value.clone())
    };
    assert_eq!(extra("username"), Some(json!(["jane@example.com"])), "{seen}");
    assert_eq!(extra("access_type"), Some(json!(["oidc"])));
    assert_eq!(extra("id"), Some(json!(["1"])));
    assert_eq!(endpoint.status(&jane(json!(["sre"]), true)).await?, StatusCode::FORBIDDEN);
    assert_eq!(endpoint.status(&jane(json!(["dev"]), false)).await?, StatusCode::UNAUTHORIZED);
    assert_eq!((gitlab.keys_asked(), dex.keys_asked()), (1, 1));
    // Each issuer vouches for its own users only.
    let claims =
        dex.claims(AUDIENCE, json!({"email": "jane@example.com", "email_verified": true, "groups": ["dev"]}));
    assert_eq!(endpoint.status(&gitlab_key.token(&claims)).await?, StatusCode::UNAUTHORIZED);
    Ok(())
}

#[tokio::test]
async fn attacks_are_refused_and_operators_learn_why() -> Result<()> {
    let issuer = Issuer::start().await?;
    let (key, other) = (SigningKey::rsa("a")?, SigningKey::ec("a")?);
    issuer.publish([&key]);
    let oidc = json!([of(&issuer, json!({ "username": "corp:{sub}" }))]);
    let access = json!([{ "agents": "all", "users": ["corp:*"], "as": "agent" }]);
    let endpoint = Endpoint::start(oidc, access).await?;
    let claims = |more: Value| {
        let mut all = json!({ "sub": "jane" });
        testkit::kas::merge(&mut all, more);
        issuer.claims(AUDIENCE, all)
    };
    let good = claims(json!({}));
    assert_eq!(endpoint.status(&key.token(&good)).await?, StatusCode::OK);

    let by_public_key = {
        let message = unsigned(&json!({"alg": "HS256", "kid": "a"}), &good);
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key.public()), message.as_bytes());
        format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(tag))
    };
    let expired = testkit::caller::now() - 3600;
    for (what, token, why) in [
        ("none", format!("{}.AA", unsigned(&json!({"alg": "none"}), &good)), "is not asymmetric"),
        ("HS256 by the public key", by_public_key, "is not asymmetric"),
        ("another kind of key", other.token(&good), "does not fit its key"),
        ("crit", key.token_with(&json!({"alg": "RS256", "kid": "a", "crit": ["x"]}), &good), "has crit"),
        ("foreign aud", key.token(&issuer.claims("vault", json!({"sub": "jane"}))), "oidc[0]: the claim aud"),
        ("foreign iss", key.token(&claims(json!({"iss": "https://x"}))), "oidc: the claim iss"),
        ("expired", key.token(&claims(json!({"exp": expired}))), "the token has expired"),
    ] {
        let (status, body) = endpoint.get(&token).await?;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{what}: {body}");
        let told = body["message"].as_str().context("a status has a message")?;
        assert!(told.contains("the token is not valid") && !told.contains(why), "{what}: {told}");
        let shown = endpoint.why().await?;
        assert!(shown.contains("oidc") && shown.contains(why), "{what}: {shown}");
        for text in [&shown, &endpoint.kas.process.log()] {
            assert!(!token.split('.').any(|part| part.len() > 9 && text.contains(part)), "{what}");
        }
    }

    // Unknown keys: the issuer is asked at most once in half a minute.
    for n in 0..100 {
        let token = other.token_with(&json!({"alg": "ES256", "kid": format!("k{n}")}), &good);
        assert_eq!(endpoint.status(&token).await?, StatusCode::UNAUTHORIZED);
    }
    assert!(issuer.keys_asked() <= 3, "{}", issuer.keys_asked());
    assert_eq!(endpoint.status(&key.token(&good)).await?, StatusCode::OK);
    Ok(())
}

/// Makes kas read the keys again: the CA file has other bytes with the same meaning.
fn touch(issuer: &Issuer) -> Result<()> {
    let file = issuer.ca_file();
    let mut content = std::fs::read(&file)?;
    content.push(b'\n');
    replace(&file, &content)
}

#[tokio::test]
async fn a_withdrawn_key_ends_a_watch_and_an_absent_issuer_ends_none() -> Result<()> {
    let issuer = Issuer::start().await?;
    let (old, new) = (SigningKey::ec("old")?, SigningKey::ed("new")?);
    issuer.publish([&old]);
    let oidc = json!([of(&issuer, json!({ "username": "corp:{sub}" }))]);
    let access = json!([{ "agents": "all", "users": ["corp:*"], "as": "user" }]);
    let endpoint = Endpoint::start(oidc, access).await?;
    let claims = issuer.claims(AUDIENCE, json!({ "sub": "jane" }));
    let (head, mut watch) = endpoint.send("?watch=1", &old.token(&claims)).await?;
    assert_eq!(head.status, StatusCode::OK);
    let event = soon("an event", watch.frame()).await.context("an event")??;
    let seen: Value = serde_json::from_slice(event.data_ref().context("data")?)?;
    assert_eq!(seen["impersonate-user"], json!(["corp:jane"]));

    // The issuer is away, then has a second key: neither ends the watch.
    let asked = endpoint.kas.process.log_len();
    issuer.fail(Some(StatusCode::BAD_GATEWAY));
    touch(&issuer)?;
    endpoint
        .kas
        .process
        .logged_since(asked, "that the issuer is away", |line| {
            line["message"].as_str()?.starts_with("the keys of an issuer cannot be read").then_some(())
        })
        .await?;
    assert_eq!(endpoint.status(&old.token(&claims)).await?, StatusCode::OK);
    let unknown = endpoint.status(&new.token(&claims)).await?;
    assert_eq!(unknown, StatusCode::SERVICE_UNAVAILABLE, "its key may be a new one");
    issuer.fail(None);
    issuer.publish([&old, &new]);
    touch(&issuer)?;
    read(&endpoint.kas, 2).await?;
    assert_eq!(endpoint.status(&new.token(&claims)).await?, StatusCode::OK);
    assert!(futures_util::poll!(std::pin::pin!(watch.frame())).is_pending());

    issuer.publish([&new]);
    touch(&issuer)?;
    let ended = tokio::time::timeout(AT_ONCE, watch.frame()).await.context("the watch has not ended")?;
    ensure!(ended.is_none(), "the end of a watch is a clean one: {ended:?}");
    assert_eq!(endpoint.status(&old.token(&claims)).await?, StatusCode::UNAUTHORIZED);
    assert_eq!(endpoint.status(&new.token(&claims)).await?, StatusCode::OK);
    Ok(())
}

/// S59, with an issuer. Fails if open requests end while nobody can read the keys, if a replica forgets those
/// that it has, if it takes a token with an unknown key for a wrong one, or if it does not recover.
#[tokio::test]
async fn two_replicas_go_on_with_their_keys_while_the_issuer_is_away() -> Result<()> {
    const OWNER: usize = 0;
    const EDGE: usize = 1;
    let issuer = Issuer::start().await?;
    let (old, new) = (SigningKey::ec("old")?, SigningKey::ed("new")?);
    issuer.publish([&old]);
    let oidc = json!([of(&issuer, json!({ "username": "corp:{sub}" }))]);
    let access = json!([{ "agents": "all", "users": ["corp:*"], "as": "user" }]);
    let config = json!({ "agent": { "kubernetes_api": section(oidc, access) } });
    let options = mesh::Options { replicas: 2, agents: 1, config, ..mesh::Options::default() };
    let mesh = &mut Mesh::start_with(options).await?;
    let server = Echo::start().await?;
    let api_server = format!("http://{}", server.address);
    let agentk = Agentk::start_with(mesh.agents(OWNER), &token(AGENT), &api_server).await?;
    agentk.connected().await?;
    mesh.converged(&[(AGENT, OWNER)]).await?;
    let mut addresses = Vec::new();
    for replica in [OWNER, EDGE] {
        addresses.push(endpoint::address(mesh.kas(replica)).await?);
    }
    // Each has another name, so that no judgement of before counts.
    let mut users = 0;
    let mut of_a_new_user = |key: &SigningKey| {
        users += 1;
        key.token(&issuer.claims(AUDIENCE, json!({ "sub": format!("user-{users}") })))
    };
    let status = async |at: SocketAddr, token: String| anyhow::Ok(send(at, "", &token).await?.0.status);

    let mut watches = Vec::new();
    for &at in &addresses {
        let (head, mut watch) = send(at, "?watch=1", &of_a_new_user(&old)).await?;
        assert_eq!(head.status, StatusCode::OK);
        soon("an event", watch.frame()).await.context("an event")??;
        watches.push(watch);
    }
    let asked = [mesh.kas(OWNER).process.log_len(), mesh.kas(EDGE).process.log_len()];
    issuer.fail(Some(StatusCode::BAD_GATEWAY));
    touch(&issuer)?;
    for (replica, before) in [OWNER, EDGE].into_iter().zip(asked) {
        let is_away = |line: &Value| {
            line["message"].as_str()?.starts_with("the keys of an issuer cannot be read").then_some(())
        };
        mesh.kas(replica).process.logged_since(before, "that the issuer is away", is_away).await?;
        let at = addresses[replica];
        assert_eq!(status(at, of_a_new_user(&old)).await?, StatusCode::OK, "replica {replica}");
        let (head, _) = send(at, "", &of_a_new_user(&new)).await?;
        assert_eq!(head.status, StatusCode::SERVICE_UNAVAILABLE, "its key may be a new one");
        assert_eq!(head.headers[header::RETRY_AFTER], "2");
    }
    for watch in &mut watches {
        assert!(futures_util::poll!(std::pin::pin!(watch.frame())).is_pending(), "a watch has ended");
    }

    // A replica that starts now has no keys. It lets nobody in, and calls no token wrong. The other goes on.
    mesh.kill(EDGE).await?;
    mesh.restart(EDGE).await?;
    mesh.converged(&[(AGENT, OWNER)]).await?;
    addresses[EDGE] = endpoint::address(mesh.kas(EDGE)).await?;
    let (head, _) = send(addresses[EDGE], "", &of_a_new_user(&old)).await?;
    assert_eq!(head.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(head.headers[header::RETRY_AFTER], "2");
    assert_eq!(status(addresses[OWNER], of_a_new_user(&old)).await?, StatusCode::OK);
    assert!(futures_util::poll!(std::pin::pin!(watches[OWNER].frame())).is_pending(), "a watch has ended");

    // It is back, with another key beside the one before.
    issuer.fail(None);
    issuer.publish([&old, &new]);
    touch(&issuer)?;
    for (replica, at) in addresses.into_iter().enumerate() {
        for key in [&old, &new] {
            eventually(&format!("that replica {replica} knows the keys"), async || {
                let status = status(at, of_a_new_user(key)).await?;
                Ok(if status == StatusCode::OK { Ok(()) } else { Err(status) })
            })
            .await?;
        }
    }
    assert!(futures_util::poll!(std::pin::pin!(watches[OWNER].frame())).is_pending(), "a watch has ended");
    Ok(())
}

/// Waits until kas has read that many keys.
async fn read(kas: &Kas, keys: u64) -> Result<()> {
    kas.process
        .logged("that the keys were read", |line| {
            let is_read = line["message"] == "the keys of an issuer have been read";
            (is_read && line["keys"] == json!(keys)).then_some(())
        })
        .await
}

#[tokio::test]
async fn an_issuer_that_is_not_the_configured_one_identifies_nobody() -> Result<()> {
    for (what, change, logged) in [
        ("another issuer", Change::Name("https://evil.example.com"), "expected exactly the configured one"),
        ("keys without TLS", Change::Keys("http://127.0.0.1:1/keys"), "is no https URL"),
        ("keys elsewhere", Change::Keys("https://127.0.0.1:1/keys"), "cannot be reached"),
        ("a redirect", Change::Status(StatusCode::FOUND), "redirects are not followed"),
        ("no trust", Change::NoCa, "cannot be reached"),
    ] {
        let issuer = Issuer::start().await?;
        let key = SigningKey::ec("a")?;
        issuer.publish([&key]);
        let mut section = of(&issuer, json!({ "username": "corp:{sub}" }));
        match change {
            Change::Name(name) => issuer.call_itself(name),
            Change::Keys(uri) => issuer.keep_keys_at(uri),
            Change::Status(status) => issuer.fail(Some(status)),
            Change::NoCa => section["ca_file"] = json!(null),
        }
        let access = json!([{ "agents": "all", "users": ["corp:*"], "as": "user" }]);
        let endpoint = Endpoint::start(json!([section]), access).await?;
        let token = key.token(&issuer.claims(AUDIENCE, json!({ "sub": "jane" })));
        assert_eq!(endpoint.status(&token).await?, StatusCode::SERVICE_UNAVAILABLE, "{what}");
        let is_logged = |line: &Value| line.to_string().contains(logged).then_some(());
        endpoint.kas.process.logged(what, is_logged).await.with_context(|| format!("expected {logged:?}"))?;
    }
    Ok(())
}

enum Change {
    Name(&'static str),
    Keys(&'static str),
    Status(StatusCode),
    NoCa,
}

/// Runs `kas config check` with these issuers, and returns what it printed if it refuses them.
async fn check(folder: &Path, oidc: Value) -> Result<Option<String>> {
    let file = folder.join("kas.yaml");
    let config =
        json!({ "agent": { "kubernetes_api": { "listen": { "address": "127.0.0.1:8154" }, "oidc": oidc } } });
    std::fs::write(&file, serde_json::to_vec(&config)?)?;
    let output = tokio::process::Command::new(program("kas")?)
        .args(["config", "check"])
        .arg(&file)
        .env("KAS_STATE_DIR", folder)
        .output()
        .await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((!output.status.success()).then(|| text(&output.stdout) + &text(&output.stderr)))
}

#[tokio::test]
async fn all_problems_of_issuers_are_reported_before_kas_starts() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let no_pem = folder.path().join("no.pem");
    std::fs::write(&no_pem, "no certificate")?;
    let issuer = |url: &str, name: &str, ca: &Path| json!({ "issuer": url, "audiences": ["kas"], "username": name, "ca_file": ca });
    let good = Issuer::start().await?;
    let refused = check(
        folder.path(),
        json!([
            issuer("http://dex.example.com", "corp:{email}", &good.ca_file()),
            issuer("https://a.example.com", "kas:{email}", &no_pem),
            issuer("https://b.example.com", "b:{a}{b}", &folder.path().join("missing.pem")),
        ]),
    )
    .await?
    .context("kas accepts them")?;
    for problem in [
        "oidc[0].issuer: found \"http://dex.example.com\"; expected an https URL",
        "oidc[1].username: found the prefix \"kas:\"",
        "oidc[1].ca_file: ",
        "oidc[2].username: found \"b:{a}{b}\"",
        "oidc[2].ca_file: ",
    ] {
        assert!(refused.contains(problem), "{problem} is not in {refused}");
    }
    let accepted = check(folder.path(), json!([issuer(good.url(), "corp:{email}", &good.ca_file())])).await?;
    assert_eq!(accepted, None);
    Ok(())
}

#[test]
fn the_guide_shows_a_valid_configuration() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide.md");
    let guide = std::fs::read_to_string(guide).expect("the guide can be read");
    let (_, section) = guide.split_once("## kubectl for a team").expect("the guide has the section");
    let (_, block) = section.split_once("```yaml\n").expect("the section has a configuration");
    let (yaml, _) = block.split_once("```").expect("the configuration has an end");
    let env = kas_config::Environment { kas_state_dir: Some("/state".into()), ..Default::default() };
    let loaded = kas_config::load(yaml, &env).expect("the configuration is valid");
    assert_eq!(loaded.warnings, []);
    let api = loaded.config.agent.kubernetes_api.expect("it has the endpoint");
    assert_eq!((api.oidc.len(), api.access.len()), (2, 3));
    assert_eq!(api.oidc[0].prefix, "corp:");
}
