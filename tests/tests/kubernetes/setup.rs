//! The setup of every test here: exclusive use of the API server, its own kas and agentk, and kasctl.

use std::{
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use proto::gitlab::agent::{
    grpctool::{HttpRequest, http_request},
    prototool::{self, Values},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::{
    agentk::Agentk,
    kas::{Kas, token},
    kubernetes::{Access, Kubernetes},
    link::Stream,
    process::{SOON, program},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    time::{Instant, sleep, timeout},
};

pub(crate) use testkit::kubernetes::{Exclusive, exclusive};

/// The agent's id: one of the two that every kas in tests knows.
pub(crate) const AGENT: i64 = 1;

/// What agents serve: any request to the API server.
const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

/// Time limit for one kasctl. Lists of 70 MB pass through four processes that are not optimised.
pub(crate) const KASCTL_WITHIN: Duration = Duration::from_secs(60);

/// The limit for "at once".
pub(crate) const AT_ONCE: Duration = Duration::from_secs(12);

/// How long to wait to see that something does not happen.
pub(crate) const NEVER: Duration = Duration::from_millis(500);

/// One kas, and one agentk that is connected to it.
pub(crate) struct Chain {
    pub(crate) kas: Kas,
    pub(crate) agentk: Agentk,
}

impl Chain {
    /// Starts both; agentk has the rights of a new service account of this name in its own namespace.
    pub(crate) async fn start(kubernetes: &Kubernetes, namespace: &str, access: Access) -> Result<Self> {
        let token = kubernetes.service_account(namespace, "agentk", access).await?;
        Self::start_with_token(kubernetes, namespace, &token).await
    }

    /// Starts both; agentk authenticates to the API server with `bearer`. `name` names its kubeconfig.
    pub(crate) async fn start_with_token(kubernetes: &Kubernetes, name: &str, bearer: &str) -> Result<Self> {
        let kubeconfig = kubernetes.kubeconfig_with_token(name, bearer)?;
        let kas = Kas::start().await?;
        let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &kubeconfig).await?;
        agentk.connected().await?;
        Ok(Self { kas, agentk })
    }

    /// Starts kasctl. The agent's id is part of `arguments`.
    pub(crate) async fn kasctl(&self, arguments: &[&str]) -> Result<Kasctl> {
        let kasctl = tokio::task::spawn_blocking(|| program("kasctl")).await??;
        let mut child = Command::new(kasctl)
            .args(arguments)
            .env("KASCTL_ADDRESS", format!("grpc://{}", self.kas.api))
            .env("KASCTL_SECRET_FILE", self.secret_file())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("could not run kasctl")?;
        Ok(Kasctl {
            stdin: child.stdin.take(),
            stdout: child.stdout.take().context("standard output is a pipe")?,
            stderr: child.stderr.take().context("standard error is a pipe")?,
            child,
        })
    }

    /// Runs kasctl to its end, without input.
    pub(crate) async fn run(&self, arguments: &[&str]) -> Result<Finished> {
        self.kasctl(arguments).await?.finish().await
    }

    /// Runs kasctl, which must succeed, and returns what it printed.
    pub(crate) async fn output(&self, arguments: &[&str]) -> Result<String> {
        let finished = self.run(arguments).await?;
        ensure!(finished.code() == Some(0), "kasctl {arguments:?}: {finished:?}");
        Ok(finished.stdout)
    }

    /// Runs kasctl, which must print JSON.
    pub(crate) async fn json(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.output(arguments).await?;
        serde_json::from_str(&output).with_context(|| format!("kasctl {arguments:?} printed {output}"))
    }

    /// Waits until no request is open, neither in kas nor in agentk.
    pub(crate) async fn is_quiet(&self, within: Duration) -> Result<Duration> {
        let since = Instant::now();
        loop {
            let open = self.kas.metric("kas_requests_open").await?;
            let busy = self.agentk.metric("agentk_tunnels_busy").await?;
            if (open, busy) == (0.0, 0.0) {
                return Ok(since.elapsed());
            }
            ensure!(
                since.elapsed() < within,
                "{open} requests open and {busy} tunnels busy after {within:?}"
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Begins a request without kasctl: its head, without the end.
    pub(crate) async fn request(&self, method: &str, path: &str, query: &[(&str, &str)]) -> Result<Stream> {
        let one = |value: &str| Values { value: vec![value.to_owned()] };
        let request = prototool::HttpRequest {
            method: method.to_owned(),
            header: [("Content-Type".to_owned(), one("application/json"))].into(),
            url_path: path.to_owned(),
            query: query.iter().map(|(key, value)| ((*key).to_owned(), one(value))).collect(),
        };
        let header = http_request::Header { request: Some(request), ..Default::default() };
        let caller = self.kas.caller().await?;
        let mut stream = caller.open(caller.to_agent(AGENT, MAKE_REQUEST)).await?;
        send(&mut stream, http_request::Message::Header(header)).await?;
        Ok(stream)
    }

    fn secret_file(&self) -> PathBuf {
        self.kas.dir().join("secret-0")
    }
}

/// Sends the next message of a request.
pub(crate) async fn send(stream: &mut Stream, message: http_request::Message) -> Result<()> {
    let sent = stream.send_message(&HttpRequest { message: Some(message) }).await;
    sent.map_err(|reason| anyhow!("the stream was reset: {reason:?}"))
}

/// A running kasctl. Dropping it kills it.
pub(crate) struct Kasctl {
    pub(crate) child: Child,
    /// Its input, until it is taken to be written.
    pub(crate) stdin: Option<ChildStdin>,
    pub(crate) stdout: ChildStdout,
    pub(crate) stderr: ChildStderr,
}

impl Kasctl {
    /// Ends its input and waits until it has ended.
    pub(crate) async fn finish(mut self) -> Result<Finished> {
        drop(self.stdin.take());
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let end = async {
            tokio::try_join!(self.stdout.read_to_end(&mut stdout), self.stderr.read_to_end(&mut stderr))?;
            anyhow::Ok(self.child.wait().await?)
        };
        let status = timeout(KASCTL_WITHIN, end).await.context("kasctl did not end")??;
        Ok(Finished { status, stdout: String::from_utf8(stdout)?, stderr: String::from_utf8(stderr)? })
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.id()?, signal)?)
    }

    /// Returns its process id.
    pub(crate) fn id(&self) -> Result<Pid> {
        let id = self.child.id().context("kasctl has ended")?;
        i32::try_from(id).ok().and_then(Pid::from_raw).context("a process id is positive")
    }

    /// Returns its output line by line.
    pub(crate) fn lines(self) -> (Lines<BufReader<ChildStdout>>, Child) {
        (BufReader::new(self.stdout).lines(), self.child)
    }
}

/// How a kasctl ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

/// Returns the next line of a watch as JSON.
pub(crate) async fn event<R: tokio::io::AsyncRead + Unpin>(lines: &mut Lines<BufReader<R>>) -> Result<Value> {
    let line =
        timeout(SOON, lines.next_line()).await.context("no event came")??.context("the watch has ended")?;
    serde_json::from_str(&line).with_context(|| format!("a watch's line is JSON: {line}"))
}

/// Returns the part of a list that does not change between reads: the items.
pub(crate) fn items(list: &str) -> &str {
    list.find("\"items\":").map_or("", |at| &list[at..])
}
