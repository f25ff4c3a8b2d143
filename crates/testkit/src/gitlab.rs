//! A simulated GitLab with the internal API for agents: it reads requests byte by byte, checks the signature
//! of kas like GitLab, and can be slow, broken or down. A real GitLab would need more memory than all other
//! tests.
//!
//! It can also act as a proxy in front of itself: it accepts requests with a whole URL, and `CONNECT`.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aws_lc_rs::hmac;
use base64::{
    Engine as _,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use parking_lot::{Mutex, MutexGuard};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use crate::{caller::now, process::soon};

/// The path of 14.1.
pub const AGENT_INFO: &str = "/api/v4/internal/kubernetes/agent_info";
/// The path of 14.1 for a project.
pub const PROJECT_INFO: &str = "/api/v4/internal/kubernetes/project_info";
/// The current path.
pub const AGENT_INFO_TODAY: &str = "/api/v4/internal/agents/agentk/agent_info";
/// The path that answers whether an agent may know of a project.
pub const VERIFY_PROJECT_ACCESS: &str = "/api/v4/internal/kubernetes/verify_project_access";
/// The paths of modules of agents begin with this. The answer repeats the body.
pub const MODULES: &str = "/api/v4/internal/kubernetes/modules/";
/// The path that answers whether a user may use an agent.
pub const AUTHORIZE_PROXY_USER: &str = "/api/v4/internal/kubernetes/authorize_proxy_user";
/// The path that answers which agents a CI job may use.
pub const ALLOWED_AGENTS: &str = "/api/v4/job/allowed_agents";
/// The path for usage.
pub const USAGE_METRICS: &str = "/api/v4/internal/kubernetes/usage_metrics";
/// The path for the configuration of an agent.
pub const AGENT_CONFIGURATION: &str = "/api/v4/internal/kubernetes/agent_configuration";
/// The name in its certificate, which only a proxy can reach.
pub const NAME: &str = "gitlab.test";

/// The release of GitLab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// 14.1: the token is in `Authorization`.
    V14,
    /// The current release: the token is in its own header.
    Today,
}

/// A response that overrides its data.
#[derive(Clone, Debug)]
pub enum Reply {
    /// These bytes.
    Bytes(Vec<u8>),
    /// It never responds.
    Silence,
    /// It ends the connection.
    HangUp,
    /// The normal response, after this time.
    Late(Duration),
}

impl Reply {
    /// A whole answer.
    pub fn new(status: &str, content_type: &str, body: &str) -> Self {
        let length = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        Self::Bytes(text.into_bytes())
    }

    /// An error as GitLab writes it.
    pub fn status(status: &str) -> Self {
        Self::new(status, "application/json", &json!({ "message": status }).to_string())
    }
}

/// A received request.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Everything up to the body.
    pub head: String,
    /// The body, which only a POST has.
    pub body: Vec<u8>,
    /// The method.
    pub method: String,
    /// The path, or the whole URL for a proxy.
    pub target: String,
    /// Header fields in their order.
    pub headers: Vec<(String, String)>,
    /// The number of its connection, from 0.
    pub connection: u64,
    /// Whether through TLS.
    pub tls: bool,
    /// When it arrived, in seconds since 1970.
    pub at: i64,
}

impl Seen {
    /// Returns the only value of a header.
    ///
    /// # Panics
    /// When there are several.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(values.next().is_none(), "{name} comes twice: {}", self.head);
        value
    }

    /// Returns the body, which is JSON.
    ///
    /// # Panics
    /// If it is not.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect(&self.head)
    }

    fn path(&self) -> &str {
        self.target
            .strip_prefix("http://")
            .map_or(&self.target, |rest| rest.find('/').map_or("/", |at| &rest[at..]))
    }

    fn token(&self, release: Release) -> Option<&str> {
        match release {
            Release::V14 => self.header("authorization")?.strip_prefix("Bearer "),
            Release::Today => self.header("gitlab-agentk-api-request"),
        }
    }

    /// Checks the signature of kas, and every claim in it.
    ///
    /// # Errors
    /// The error says what GitLab would reject.
    pub fn check_signature(&self, secret: &[u8]) -> Result<()> {
        let jwt = self.header("gitlab-kas-api-request").context("no signature")?;
        let (signed, signature) = jwt.rsplit_once('.').context("no JWT")?;
        let signature = BASE64_URL_SAFE_NO_PAD.decode(signature)?;
        hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, secret), signed.as_bytes(), &signature)
            .ok()
            .context("another secret")?;
        let (header, claims) = signed.split_once('.').context("no claims")?;
        let part = |text: &str| -> Result<Value> {
            Ok(serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(text)?)?)
        };
        ensure!(part(header)? == json!({ "alg": "HS256", "typ": "JWT" }), "header {}", part(header)?);
        let claims = part(claims)?;
        let time =
            |name: &str| claims[name].as_f64().with_context(|| format!("no number {name} in {claims}"));
        let mut names: Vec<_> = claims.as_object().context("no object")?.keys().map(String::as_str).collect();
        names.sort_unstable();
        ensure!(names == ["aud", "exp", "iat", "iss", "nbf"], "{claims}");
        ensure!(claims["aud"] == json!(["gitlab"]) && claims["iss"] == "gitlab-kas", "{claims}");
        let (iat, nbf, exp) = (time("iat")?, time("nbf")?, time("exp")?);
        ensure!((iat - nbf - 5.0).abs() < 1e-5 && (exp - iat - 5.0).abs() < 1e-5, "{claims}");
        ensure!(["exp", "iat", "nbf"].iter().all(|name| claims[name].is_f64()), "without fraction: {claims}");
        // The claims that GitLab checks, with a tolerance of some seconds.
        let then = self.at as f64;
        ensure!(nbf <= then + 1.0 && then <= exp, "not then ({then}): {claims}");
        Ok(())
    }
}

struct Knowledge {
    release: Release,
    agents: HashMap<String, Value>,
    /// By their full paths.
    projects: HashMap<String, i64>,
    forbidden: Vec<String>,
    /// Answers about users, by their access keys.
    users: HashMap<String, Value>,
    /// Answers about CI jobs, by their tokens.
    jobs: HashMap<String, Value>,
    /// What it says of its Gitaly.
    gitaly: Value,
    reply: Option<Reply>,
}

struct Shared {
    secret: [u8; 32],
    knowledge: Mutex<Knowledge>,
    seen: watch::Sender<Vec<Seen>>,
    connections: watch::Sender<u64>,
    tls: Option<TlsAcceptor>,
}

impl Shared {
    fn knowledge(&self) -> MutexGuard<'_, Knowledge> {
        self.knowledge.lock()
    }
}

/// A running GitLab. Dropping it ends it.
pub struct GitLab {
    address: SocketAddr,
    shared: Arc<Shared>,
    ca_file: Option<PathBuf>,
    secret_file: PathBuf,
    server: JoinSet<()>,
    _dir: TempDir,
}

impl std::fmt::Debug for GitLab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GitLab").field("address", &self.address).finish_non_exhaustive()
    }
}

impl GitLab {
    /// Starts one of 14.1 that speaks http and has no agents.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start() -> Result<Self> {
        Self::start_as(Ipv4Addr::LOCALHOST.into(), None, None).await
    }

    /// As [`start`](Self::start), at this address of the machine or of the test's network.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start_at(ip: IpAddr) -> Result<Self> {
        Self::start_as(ip, None, None).await
    }

    /// Starts one that speaks https, with a certificate for `localhost` and [`NAME`] that its own CA signed.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start_tls() -> Result<Self> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let ca_key = rcgen::KeyPair::generate()?;
        let mut ca = rcgen::CertificateParams::default();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = rcgen::CertifiedIssuer::self_signed(ca, ca_key)?;
        let key = rcgen::KeyPair::generate()?;
        let names = vec!["localhost".to_owned(), NAME.to_owned()];
        let certificate = rcgen::CertificateParams::new(names)?.signed_by(&key, &issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)?;
        let tls = TlsAcceptor::from(Arc::new(config));
        Self::start_as(Ipv4Addr::LOCALHOST.into(), Some(tls), Some(issuer.pem())).await
    }

    async fn start_as(ip: IpAddr, tls: Option<TlsAcceptor>, ca_pem: Option<String>) -> Result<Self> {
        // A port that no other process gets while this one is down. Another test may have just taken it.
        let mut tries = 0;
        let listener = loop {
            let [port] = ports::free()?;
            match TcpListener::bind((ip, port)).await {
                Ok(listener) => break listener,
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries < 10 => tries += 1,
                Err(error) => return Err(error.into()),
            }
        };
        let knowledge = Knowledge {
            release: Release::V14,
            agents: HashMap::new(),
            projects: HashMap::new(),
            forbidden: Vec::new(),
            users: HashMap::new(),
            jobs: HashMap::new(),
            gitaly: json!({
                "address": "unix:/gitaly",
                "token": "gitaly-secret",
                "features": { "gitaly-feature-a": "true" },
            }),
            reply: None,
        };
        let shared = Arc::new(Shared {
            secret: rand::random(),
            knowledge: Mutex::new(knowledge),
            seen: watch::Sender::default(),
            connections: watch::Sender::new(0),
            tls,
        });
        let address = listener.local_addr()?;
        let dir = TempDir::with_prefix("gitlab-test-").context("a folder for GitLab")?;
        let secret_file = dir.path().join("secret");
        crate::kas::write_private(&secret_file, &BASE64_STANDARD.encode(shared.secret))?;
        let ca_file = match ca_pem {
            None => None,
            Some(pem) => {
                let file = dir.path().join("ca.pem");
                std::fs::write(&file, pem)?;
                Some(file)
            }
        };
        let mut gitlab = Self { address, shared, ca_file, secret_file, server: JoinSet::new(), _dir: dir };
        gitlab.serve(listener);
        Ok(gitlab)
    }

    fn serve(&mut self, listener: TcpListener) {
        let shared = Arc::clone(&self.shared);
        self.server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(accepted(stream, Arc::clone(&shared)));
            }
        });
    }

    /// Returns where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its URL, for `gitlab.address`.
    pub fn url(&self) -> String {
        let scheme = if self.ca_file.is_some() { "https" } else { "http" };
        if self.address.ip().is_loopback() {
            format!("{scheme}://localhost:{}", self.address.port())
        } else {
            format!("{scheme}://{}", self.address)
        }
    }

    /// Returns the file with the certificate of its CA, if it speaks https.
    pub fn ca_file(&self) -> Option<&Path> {
        self.ca_file.as_deref()
    }

    /// Returns the secret that it shares with kas.
    pub fn secret(&self) -> &[u8; 32] {
        &self.shared.secret
    }

    /// Returns the file with this secret in base64.
    pub fn secret_file(&self) -> &Path {
        &self.secret_file
    }

    /// Returns the configuration with which kas uses it, for [`crate::kas::Options::config`].
    pub fn config(&self) -> Value {
        json!({
            "identity": null,
            "gitlab": {
                "address": self.url(),
                "authentication_secret_file": self.secret_file,
                "ca_certificate_file": self.ca_file,
            },
        })
    }

    /// Switches to this release.
    pub fn be(&self, release: Release) {
        self.shared.knowledge().release = release;
    }

    /// Adds an agent, or replaces that of the token.
    pub fn know(&self, token: &str, id: i64, name: &str, project: i64) {
        // The whole response of GitLab, except what it says of its Gitaly.
        let info = json!({
            "project_id": project,
            "agent_id": id,
            "agent_name": name,
            "gitaly_repository": {
                "storage_name": "default",
                "relative_path": relative_path(project),
                "gl_repository": format!("project-{project}"),
                "gl_project_path": "group/project",
            },
        });
        let mut knowledge = self.shared.knowledge();
        knowledge.forbidden.retain(|other| other != token);
        knowledge.agents.insert(token.to_owned(), info);
    }

    /// Adds a project, for every agent.
    pub fn have_project(&self, path: &str, id: i64) {
        self.shared.knowledge().projects.insert(path.to_owned(), id);
    }

    /// Withdraws a project from every agent.
    pub fn hide_project(&self, path: &str) {
        self.shared.knowledge().projects.remove(path);
    }

    /// Names this Gitaly from now on. The repository of a project is at [`relative_path`].
    pub fn have_gitaly(&self, address: &str, token: &str) {
        let features = json!({ "gitaly-feature-a": "true" });
        self.shared.knowledge().gitaly = json!({ "address": address, "token": token, "features": features });
    }

    /// Adds a user by a personal access token or the value of a session cookie, with GitLab's whole answer
    /// about it.
    pub fn have_user(&self, access_key: &str, answer: Value) {
        self.shared.knowledge().users.insert(access_key.to_owned(), answer);
    }

    /// Adds a CI job by its token, with GitLab's whole answer about it.
    pub fn have_job(&self, token: &str, answer: Value) {
        self.shared.knowledge().jobs.insert(token.to_owned(), answer);
    }

    /// Removes the token.
    pub fn forget(&self, token: &str) {
        self.shared.knowledge().agents.remove(token);
    }

    /// Forbids the agent with this token to connect.
    pub fn forbid(&self, token: &str) {
        self.shared.knowledge().forbidden.push(token.to_owned());
    }

    /// Overrides every response from now on; `None`: normal responses.
    pub fn reply(&self, reply: impl Into<Option<Reply>>) {
        self.shared.knowledge().reply = reply.into();
    }

    /// Stops and closes all of its connections.
    pub async fn down(&mut self) {
        self.server.shutdown().await;
    }

    /// Starts again at the same address.
    ///
    /// # Errors
    /// When the port has been taken.
    pub async fn up(&mut self) -> Result<()> {
        let listener = TcpListener::bind(self.address).await?;
        self.serve(listener);
        Ok(())
    }

    /// Returns every received request.
    pub fn requests(&self) -> Vec<Seen> {
        self.shared.seen.borrow().clone()
    }

    /// Waits until this many requests have arrived in total.
    pub async fn asked(&self, times: usize) -> Vec<Seen> {
        let mut seen = self.shared.seen.subscribe();
        let all =
            soon(&format!("GitLab was asked {times} times"), seen.wait_for(|seen| seen.len() >= times)).await;
        all.expect("the sender lives as long as this").clone()
    }
}

/// Returns where the repository of a project is in the storage `default` of its Gitaly.
pub fn relative_path(project: i64) -> String {
    format!("@hashed/{project}.git")
}

async fn accepted(stream: TcpStream, shared: Arc<Shared>) {
    let mut connection = 0;
    shared.connections.send_modify(|n| {
        connection = *n;
        *n += 1;
    });
    let mut first = [0];
    // A TLS handshake begins with this byte, and no method does.
    let is_tls = matches!(stream.peek(&mut first).await, Ok(1) if first[0] == 0x16);
    // kas notices in any case how a connection ends.
    let _ = if is_tls {
        secured(stream, connection, &shared).await
    } else {
        plain(stream, connection, &shared).await
    };
}

async fn secured(stream: TcpStream, connection: u64, shared: &Shared) -> Result<()> {
    let tls = shared.tls.as_ref().context("no TLS here")?;
    let mut stream = tls.accept(stream).await?;
    while let Some(seen) = request(&mut stream, connection, true).await? {
        answer(&mut stream, seen, shared).await?;
    }
    Ok(())
}

async fn plain(mut stream: TcpStream, connection: u64, shared: &Shared) -> Result<()> {
    while let Some(seen) = request(&mut stream, connection, false).await? {
        if seen.method == "CONNECT" {
            shared.seen.send_modify(|all| all.push(seen));
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
            return secured(stream, connection, shared).await;
        }
        answer(&mut stream, seen, shared).await?;
    }
    Ok(())
}

async fn request(stream: &mut (impl AsyncRead + Unpin), connection: u64, tls: bool) -> Result<Option<Seen>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        // Byte by byte, so that nothing of the next request is consumed.
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) if head.is_empty() => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        ensure!(head.len() < 64 * 1024, "no end of the head");
    }
    let head = String::from_utf8(head)?;
    let mut lines = head.trim_end().split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (method, target) =
        (first.next().unwrap_or_default().to_owned(), first.next().unwrap_or_default().to_owned());
    let headers: Vec<_> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let mut seen = Seen { method, target, headers, connection, tls, head, body: Vec::new(), at: now() };
    if let Some(length) = seen.header("content-length") {
        let length: usize = length.parse()?;
        ensure!(length < 1024 * 1024, "a body of {length} bytes");
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        seen.body = body;
    }
    Ok(Some(seen))
}

async fn answer(stream: &mut (impl AsyncWrite + Unpin), seen: Seen, shared: &Shared) -> Result<()> {
    let (reply, known) = {
        let knowledge = shared.knowledge();
        (knowledge.reply.clone(), knowledge.answer(&seen, &shared.secret))
    };
    shared.seen.send_modify(|all| all.push(seen));
    let bytes = match (reply, known) {
        (Some(Reply::Bytes(bytes)), _) | (None, Reply::Bytes(bytes)) => bytes,
        (Some(Reply::Silence), _) => std::future::pending().await,
        (Some(Reply::Late(time)), Reply::Bytes(bytes)) => {
            tokio::time::sleep(time).await;
            bytes
        }
        _ => anyhow::bail!("hung up"),
    };
    stream.write_all(&bytes).await?;
    Ok(stream.flush().await?)
}

impl Knowledge {
    /// Returns the answer to a POST.
    fn posted(&self, path: &str, seen: &Seen) -> Reply {
        let Ok(Value::Object(body)) = serde_json::from_slice(&seen.body) else {
            return Reply::status("400 Bad Request");
        };
        if seen.method != "POST" || seen.header("content-type") != Some("application/json") {
            return Reply::status("400 Bad Request");
        }
        if path != AUTHORIZE_PROXY_USER {
            return Reply::Bytes(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec());
        }
        let user = self.users.get(body["access_key"].as_str().unwrap_or_default());
        match user {
            Some(user) => Reply::new("201 Created", "application/json", &user.to_string()),
            None => Reply::status("401 Unauthorized"),
        }
    }

    fn answer(&self, seen: &Seen, secret: &[u8]) -> Reply {
        let (path, query) = seen.path().split_once('?').unwrap_or((seen.path(), ""));
        if path == ALLOWED_AGENTS {
            // A job shows its own token, and kas does not sign.
            let job = seen.header("job-token").and_then(|token| self.jobs.get(token));
            return match job {
                Some(job) => Reply::new("200 OK", "application/json", &job.to_string()),
                None => Reply::status("401 Unauthorized"),
            };
        }
        let project = path == PROJECT_INFO;
        let verify = path == VERIFY_PROJECT_ACCESS;
        let module = path.starts_with(MODULES);
        let posts = [AUTHORIZE_PROXY_USER, USAGE_METRICS, AGENT_CONFIGURATION].contains(&path);
        if !posts
            && !project
            && !verify
            && !module
            && path != AGENT_INFO
            && (path != AGENT_INFO_TODAY || self.release == Release::V14)
        {
            return Reply::status("404 Not Found");
        }
        if seen.check_signature(secret).is_err() {
            let body = json!({ "message": "401 KAS JWT authentication invalid" }).to_string();
            return Reply::new("401 Unauthorized", "application/json", &body);
        }
        if posts {
            return self.posted(path, seen);
        }
        let token = seen.token(self.release).unwrap_or_default();
        if self.forbidden.iter().any(|other| other == token) {
            return Reply::status("403 Forbidden");
        }
        match self.agents.get(token) {
            Some(_) if module => {
                Reply::new("201 Created", "text/plain", &String::from_utf8_lossy(&seen.body))
            }
            Some(info) => {
                // No name of a test has anything else that needs an escape.
                let path = query.strip_prefix("id=").unwrap_or_default().replace("%2F", "/");
                let mut info = info.clone();
                if project || verify {
                    let Some(id) = self.projects.get(&path) else { return Reply::status("404 Not Found") };
                    if verify {
                        return Reply::Bytes(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec());
                    }
                    info = json!({
                        "project_id": id,
                        "gitaly_repository": {
                            "storage_name": "default",
                            "relative_path": relative_path(*id),
                            "gl_repository": format!("project-{id}"),
                            "gl_project_path": path,
                        },
                    });
                }
                info["gitaly_info"] = self.gitaly.clone();
                Reply::new("200 OK", "application/json", &info.to_string())
            }
            None => Reply::status("401 Unauthorized"),
        }
    }
}
