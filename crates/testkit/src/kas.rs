//! A real kas process with its own configuration, on ports that the system chose.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::StatusCode;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{net::TcpStream, time::Instant};

use crate::{
    caller::{Caller, Jwt},
    process::{Process, SOON, program_of_replica, soon},
};

/// Returns a test token of an agent; it contains the number.
pub fn token(agent: i64) -> String {
    format!("agent-{agent}-token-{agent:032x}")
}

/// One agent of the identity file.
#[derive(Clone, Debug)]
pub struct AgentEntry {
    /// Its id; its name is `agent-<id>`.
    pub id: i64,
    /// Its project.
    pub project: i64,
    /// Its tokens, one or two.
    pub tokens: Vec<String>,
}

impl AgentEntry {
    /// An agent in project 1 with one token: that of [`token`].
    pub fn new(id: i64) -> Self {
        Self { id, project: 1, tokens: vec![token(id)] }
    }
}

/// How a kas is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// The agents in its identity file.
    pub agents: Vec<AgentEntry>,
    /// The secrets that callers' tokens may be signed with: one file each.
    pub secrets: Vec<Vec<u8>>,
    /// Configuration merged over the defaults.
    pub config: Value,
    /// The network namespace that it runs in, unless it is that of the tests.
    pub namespace: Option<PathBuf>,
    /// Additional environment variables.
    pub env: Vec<(String, String)>,
    /// Its number in its cluster: it selects the build that runs, see [`program_of_replica`].
    pub replica: usize,
}

impl Default for Options {
    /// Agents 1 and 2, one secret, no drain delay.
    fn default() -> Self {
        Self {
            agents: vec![AgentEntry::new(1), AgentEntry::new(2)],
            secrets: vec![rand::random::<[u8; 32]>().to_vec()],
            config: json!({}),
            namespace: None,
            env: Vec::new(),
            replica: 0,
        }
    }
}

/// A running kas.
#[derive(Debug)]
pub struct Kas {
    /// The process.
    pub process: Process,
    /// Where agents dial.
    pub agent: SocketAddr,
    /// Where callers call.
    pub api: SocketAddr,
    /// Metrics and probes.
    pub observability: SocketAddr,
    /// What callers' tokens are signed with.
    pub secrets: Vec<Vec<u8>>,
    namespace: Option<PathBuf>,
    env: Vec<(String, String)>,
    replica: usize,
    dir: TempDir,
}

impl Kas {
    /// Starts one with agents 1 and 2.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start() -> Result<Self> {
        Self::start_with(Options::default()).await
    }

    /// Starts one with `config` merged over the defaults of [`Options`].
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_with_config(config: Value) -> Result<Self> {
        Self::start_with(Options { config, ..Options::default() }).await
    }

    /// Starts one.
    ///
    /// # Errors
    /// When it does not start: with the end of its log.
    pub async fn start_with(options: Options) -> Result<Self> {
        let dir = TempDir::with_prefix("kas-test-").context("a folder for kas")?;
        let mut files = Vec::new();
        for (n, secret) in options.secrets.iter().enumerate() {
            let file = dir.path().join(format!("secret-{n}"));
            write_private(&file, &BASE64_STANDARD.encode(secret))?;
            files.push(file);
        }
        write_agents(&dir.path().join("agents.yaml"), &options.agents)?;
        // Ports that no other process gets while this one is down.
        let [agent, api, observability] = ports::free()?.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let mut config = json!({
            "identity": { "file": dir.path().join("agents.yaml") },
            "agent": { "listen": { "address": agent } },
            "api": { "listen": { "address": api, "authentication_secret_files": files } },
            "observability": { "listen": { "address": observability } },
            // The delay is for load balancers and peers, which are absent here.
            "drain": { "delay": "0s" },
        });
        merge(&mut config, options.config);
        // JSON is YAML.
        std::fs::write(dir.path().join("kas.yaml"), serde_json::to_vec_pretty(&config)?)?;
        let Options { secrets, namespace, env, replica, .. } = options;
        let (process, [agent, api, observability]) =
            spawn(dir.path(), namespace.as_deref(), &env, replica).await?;
        Ok(Self { process, agent, api, observability, secrets, namespace, env, replica, dir })
    }

    /// Starts a new process with the same files on the same ports; the one before must have ended.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn restart(&mut self) -> Result<()> {
        let path = self.dir.path().join("kas.yaml");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        merge(
            &mut config,
            json!({
                "agent": { "listen": { "address": self.agent } },
                "api": { "listen": { "address": self.api } },
                "observability": { "listen": { "address": self.observability } },
            }),
        );
        std::fs::write(&path, serde_json::to_vec_pretty(&config)?)?;
        self.process = spawn(self.dir.path(), self.namespace.as_deref(), &self.env, self.replica).await?.0;
        Ok(())
    }

    /// Runs another build from the next start on: see [`program_of_replica`].
    pub fn set_build(&mut self, build: usize) {
        self.replica = build;
    }

    /// Sets an environment variable from the next start on.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Replaces the identity file atomically.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_agents(&self, agents: &[AgentEntry]) -> Result<()> {
        write_agents(&self.dir.path().join("agents.yaml"), agents)
    }

    /// Returns the folder of this kas, for further files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a token that this kas accepts.
    pub fn jwt(&self) -> String {
        Jwt::new(&self.secrets[0]).encode()
    }

    /// Connects a caller with such a token.
    ///
    /// # Errors
    /// When kas cannot be reached.
    pub async fn caller(&self) -> Result<Caller> {
        Caller::connect(self.api, Some(self.jwt())).await
    }

    /// Sends a request to the observability listener; returns status and body.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn get(&self, path: &str) -> Result<(StatusCode, String)> {
        get(self.observability, path).await
    }

    /// Returns the value of a metric; 0 when there is no such line.
    ///
    /// # Errors
    /// When the metrics cannot be had.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        metric(self.observability, name).await
    }

    /// Waits until a metric has this value.
    ///
    /// # Errors
    /// If it does not within [`SOON`]: says what it has instead.
    pub async fn metric_is(&self, name: &str, value: f64) -> Result<()> {
        metric_is(self.observability, name, value).await
    }

    /// Shuts the process down cleanly and waits until it has exited.
    ///
    /// # Errors
    /// When it does not `within`.
    pub async fn leave(&self, within: Duration) -> Result<ExitStatus> {
        self.process.terminate();
        self.process.exited(within).await
    }
}

async fn spawn(
    dir: &Path,
    namespace: Option<&Path>,
    env: &[(String, String)],
    replica: usize,
) -> Result<(Process, [SocketAddr; 3])> {
    let kas = tokio::task::spawn_blocking(move || program_of_replica("kas", replica)).await??;
    let config = dir.join("kas.yaml");
    let config = config.to_str().context("the folder's name is UTF-8")?;
    let log = std::env::var("KAS_TEST_LOG").unwrap_or_default();
    let log = (!log.is_empty()).then_some(("RUST_LOG", log.as_str()));
    let env: Vec<_> = env.iter().map(|(name, value)| (name.as_str(), value.as_str())).chain(log).collect();
    let arguments = ["--configuration-file", config, "--log-format", "json"];
    let process = Process::start_in(namespace, "kas", &kas, &arguments, &env).await?;
    let addresses = process
        .logged("that it serves", |line| {
            let address = |key: &str| line[key].as_str()?.parse().ok();
            (line["message"] == "kas is serving")
                .then(|| Some([address("agent")?, address("api")?, address("observability")?]))?
        })
        .await?;
    Ok((process, addresses))
}

fn write_agents(path: &Path, agents: &[AgentEntry]) -> Result<()> {
    let agents: Vec<Value> = agents
        .iter()
        .map(|agent| {
            let hash = |token: &String| format!("sha256:{}", ids::TokenHash::of(token.as_bytes()).to_hex());
            json!({
                "id": agent.id,
                "name": format!("agent-{}", agent.id),
                "project_id": agent.project,
                "tokens": agent.tokens.iter().map(hash).collect::<Vec<_>>(),
            })
        })
        .collect();
    replace(path, &serde_json::to_vec_pretty(&json!({ "agents": agents }))?)
}

/// Replaces a file atomically.
///
/// # Errors
/// Those of the system.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    std::fs::write(&partial, content)?;
    std::fs::rename(&partial, path)?;
    Ok(())
}

/// Writes a secret or a key, which only its owner may read: kas refuses others.
///
/// # Errors
/// Those of the system.
pub fn write_private(path: &Path, content: &str) -> Result<()> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let mut options = std::fs::File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    Ok(file.write_all(content.as_bytes())?)
}

/// Merges `over` into `config`: objects key by key, other values replace.
pub fn merge(config: &mut Value, over: Value) {
    match (config, over) {
        (Value::Object(config), Value::Object(over)) => {
            for (key, value) in over {
                merge(config.entry(key).or_insert(Value::Null), value);
            }
        }
        (config, over) => *config = over,
    }
}

/// Sends a GET request over HTTP/1.1, and returns status and body.
///
/// # Errors
/// When there is no answer.
pub async fn get(address: SocketAddr, path: &str) -> Result<(StatusCode, String)> {
    let (head, body) = get_accepting(address, path, None).await?;
    Ok((head.status, body))
}

/// As [`get`], with a header `accept`; returns the answer's head and body.
///
/// # Errors
/// When there is no answer.
pub async fn get_accepting(
    address: SocketAddr,
    path: &str,
    accept: Option<&str>,
) -> Result<(http::response::Parts, String)> {
    soon("an answer to GET", async {
        let stream = TcpStream::connect(address).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let mut request =
            http::Request::get(path).header("host", "localhost").body(Empty::<bytes::Bytes>::new())?;
        if let Some(accept) = accept {
            request.headers_mut().insert(http::header::ACCEPT, accept.parse()?);
        }
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        connection.abort();
        Ok((head, String::from_utf8_lossy(&body).into_owned()))
    })
    .await
}

/// Returns the value of a metric of the listener at `address`; 0 when there is no such line.
///
/// # Errors
/// When the metrics cannot be had.
pub async fn metric(address: SocketAddr, name: &str) -> Result<f64> {
    let (_, text) = get(address, "/metrics").await?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(value.map_or(Ok(0.0), str::parse)?)
}

/// Waits until a metric of the listener at `address` has this value.
///
/// # Errors
/// If it does not within [`SOON`]: says what it has instead.
pub async fn metric_is(address: SocketAddr, name: &str, value: f64) -> Result<()> {
    eventually(&format!("{name} is {value}"), async || {
        let now = metric(address, name).await?;
        Ok(if now == value { Ok(()) } else { Err(now) })
    })
    .await
}

/// Waits until a gauge or counter at this address is at least `value`.
///
/// # Errors
/// When it is not soon.
pub async fn metric_is_at_least(address: SocketAddr, name: &str, value: f64) -> Result<()> {
    eventually(&format!("{name} is at least {value}"), async || {
        let now = metric(address, name).await?;
        Ok(if now >= value { Ok(()) } else { Err(now) })
    })
    .await
}

/// Polls until a condition holds that no event reports. `Err` describes the present state.
///
/// # Errors
/// When it is not there within [`SOON`].
pub async fn eventually<T, E: std::fmt::Debug>(
    what: &str,
    look: impl AsyncFnMut() -> Result<Result<T, E>>,
) -> Result<T> {
    within(SOON, what, look).await
}

/// As [`eventually`], with another bound.
///
/// # Errors
/// When it is not there within `time`.
pub async fn within<T, E: std::fmt::Debug>(
    time: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Result<Result<T, E>>,
) -> Result<T> {
    let deadline = Instant::now() + time;
    loop {
        match look().await? {
            Ok(there) => return Ok(there),
            Err(instead) if Instant::now() >= deadline => {
                anyhow::bail!("{what}: not within {time:?}, but {instead:?}")
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}
