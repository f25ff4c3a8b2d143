//! A fake kas, and a way to run kasctl with it.
//!
//! Its responses depend on the id of the agent or project, so that one server serves every test: see
//! `get_pods`, `make_request`, `explain_agent` and `watch_connected_agents`.

mod gitops;
pub(crate) mod https;
mod services;

use std::{io, path::PathBuf, pin::pin, process::Stdio, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures_util::{Stream, StreamExt as _, stream};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use proto::kas::api::v1::{
    GetPodsRequest, KasAddress,
    watch_connected_agents_response::{Disconnected, Event, SnapshotComplete},
};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, UnixListener},
    process::{Child, Command},
};

use self::services::{Kas, State, agent, silent, unconfirmed};

const SECRET: &[u8] = b"the secret of the API listener..";
/// A generous timeout.
const LIMIT: Duration = Duration::from_secs(30);

/// Waits with a timeout.
pub(crate) async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, work).await.expect("in time")
}

/// Sends the signal of Ctrl-C.
pub(crate) fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

/// Listens, and answers every connection with these bytes; then closes it, or keeps it open silently.
pub(crate) async fn answering(answer: &'static [u8], stay: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut io, _)) = listener.accept().await {
            // Closing with bytes unread would reset the connection, and what was written could be lost.
            let mut preface = [0; 24];
            let _ = io.read_exact(&mut preface).await;
            let _ = io.write_all(answer).await;
            if stay {
                open.push(io);
            } else {
                let _ = io.shutdown().await;
                let _ = io.read_to_end(&mut Vec::new()).await;
            }
        }
    });
    format!("grpc://{address}")
}

/// How a run of kasctl ended.
#[derive(Debug)]
pub(crate) struct Run {
    code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn code(&self) -> Option<i32> {
        self.code
    }

    #[track_caller]
    pub(crate) fn expect_exit(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }
}

/// A server instead of kas' API.
#[derive(Clone, Copy)]
pub(crate) enum Other {
    /// kas' own listener for agents.
    AgentPort,
    /// An HTTP/2 server that responds with this status.
    Web(u16),
}

/// The interval of pings, and the timeout for their responses.
const PINGS: [Duration; 2] = [Duration::from_secs(15); 2];

/// A running server and a directory with its secret.
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) dir: tempfile::TempDir,
    state: Arc<State>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_with_pings(PINGS).await
    }

    /// Pings in the first of these times, and closes a connection that does not answer within the second.
    pub(crate) async fn start_with_pings(pings: [Duration; 2]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("grpc://{}", listener.local_addr().unwrap());
        let incoming = stream::unfold(listener, |listener| async {
            let io = listener.accept().await.map(|(io, _)| io);
            Some((io, listener))
        });
        Self::serve(address, tempfile::tempdir().unwrap(), incoming, pings)
    }

    /// Starts a server that is not the API of kas.
    pub(crate) async fn start_as(other: Other) -> Self {
        let server = Self::start().await;
        *server.state.other.lock() = Some(other);
        server
    }

    /// Aborts every connection.
    pub(crate) fn kill(&self) {
        self.state.killed.send_replace(true);
    }

    /// From now on, a replica does not respond.
    pub(crate) fn lose_a_replica(&self) {
        *self.state.is_partial.lock() = true;
    }

    pub(crate) async fn start_unix() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let incoming = stream::unfold(listener, |listener| async {
            let io = listener.accept().await.map(|(io, _)| io);
            Some((io, listener))
        });
        Self::serve(format!("unix://{}", path.display()), dir, incoming, PINGS)
    }

    /// Has a self-signed certificate for `kas.test` only.
    pub(crate) async fn start_tls() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(["kas.test".to_owned()]).unwrap();
        std::fs::write(dir.path().join("ca.pem"), own.cert.pem()).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
        let mut config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("grpcs://{}", listener.local_addr().unwrap());
        let incoming = stream::unfold((listener, acceptor), |(listener, acceptor)| async {
            loop {
                let (io, _) = listener.accept().await.unwrap();
                // A client that does not trust the certificate does not stop the server.
                if let Ok(io) = acceptor.accept(io).await {
                    return Some((Ok::<_, io::Error>(io), (listener, acceptor)));
                }
            }
        });
        Self::serve(address, dir, incoming, PINGS)
    }

    fn serve<I>(
        address: String,
        dir: tempfile::TempDir,
        incoming: impl Stream<Item = io::Result<I>> + Send + 'static,
        [every, within]: [Duration; 2],
    ) -> Self
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        std::fs::write(dir.path().join("secret"), STANDARD.encode(SECRET) + "\n").unwrap();
        let state = Arc::new(State::new());
        let kas = Kas(Arc::clone(&state));
        let killed = state.killed.subscribe();
        tokio::spawn(async move {
            let mut incoming = pin!(incoming);
            while let Some(Ok(io)) = incoming.next().await {
                let kas = kas.clone();
                let service = hyper::service::service_fn(move |request| kas.clone().dispatch(request));
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .keep_alive_interval(every)
                    .keep_alive_timeout(within)
                    .serve_connection(TokioIo::new(io), service);
                let mut killed = killed.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        _ = connection => {}
                        _ = killed.wait_for(|killed| *killed) => {}
                    }
                });
            }
        });
        Self { address, dir, state }
    }

    /// kasctl with this server's address and secret, and an environment that is otherwise empty.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kasctl"));
        command
            .args(args)
            .env_clear()
            .env("KASCTL_ADDRESS", &self.address)
            .env("KASCTL_SECRET_FILE", self.secret_file())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    pub(crate) async fn run(&self, args: &[&str]) -> Run {
        self.run_with(args, |_| {}).await
    }

    pub(crate) async fn run_with(&self, args: &[&str], change: impl FnOnce(&mut Command)) -> Run {
        let mut command = self.command(args);
        change(&mut command);
        let output = soon(command.output()).await.unwrap();
        Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    fn secret_file(&self) -> PathBuf {
        self.dir.path().join("secret")
    }

    /// Sends a new connection to every watch, once there is one.
    pub(crate) async fn connect(&self, id: i64, name: &str) {
        self.change(Event::Connected(agent(id, name, 3, 55))).await;
    }

    /// Sends a new connection at a replica of GitLab's kas to every watch.
    pub(crate) async fn connect_unconfirmed(&self, id: i64, connection_id: i64) {
        self.change(Event::Connected(unconfirmed(id, "", 3, connection_id))).await;
    }

    /// Sends the end of a connection to every watch.
    pub(crate) async fn disconnect(&self, id: i64, connection_id: i64) {
        self.change(Event::Disconnected(Disconnected { id, connection_id })).await;
    }

    /// Sends every watch the move of a connection to another replica.
    pub(crate) async fn relocate(&self, id: i64, name: &str, project: i64, connection: i64, ip: &str) {
        let mut agent = agent(id, name, project, connection);
        agent.kas_address = Some(KasAddress { ip: ip.to_owned(), port: 8155 });
        self.change(Event::Connected(agent)).await;
    }

    /// Sends every watch the replicas that do not respond.
    pub(crate) async fn silence(&self, ips: &[&str]) {
        let unanswered = ips.iter().map(|ip| silent(ip)).collect();
        self.change(Event::SnapshotComplete(SnapshotComplete { unanswered })).await;
    }

    async fn change(&self, event: Event) {
        let mut watches = self.state.watches.subscribe();
        soon(watches.wait_for(|open| *open > 0)).await.unwrap();
        self.state.changes.send(event).unwrap();
    }

    /// Waits until the caller of a hanging request has cancelled it.
    pub(crate) async fn cancelled(&self) {
        self.state.cancelled.subscribe().wait_for(|cancelled| *cancelled).await.unwrap();
    }

    pub(crate) fn pod_questions(&self) -> Vec<GetPodsRequest> {
        self.state.seen.lock().pods.clone()
    }

    /// The `jti` of each token that was accepted.
    pub(crate) fn token_ids(&self) -> Vec<String> {
        self.state.seen.lock().token_ids.clone()
    }

    /// The values of this key in the last call.
    pub(crate) fn metadata(&self, key: &str) -> Vec<String> {
        let seen = self.state.seen.lock();
        seen.metadata.get_all(key).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
    }

    pub(crate) fn verify(&self, token: &str) -> Result<Value, jsonwebtoken::errors::Error> {
        verify(token)
    }
}

fn verify(token: &str) -> Result<Value, jsonwebtoken::errors::Error> {
    let mut rules = jsonwebtoken::Validation::new(jsonwebtoken::Algorithm::HS256);
    rules.set_audience(&["gitlab-kas"]);
    rules.set_required_spec_claims(&["exp", "nbf", "aud", "iss"]);
    rules.validate_nbf = true;
    rules.leeway = 0;
    let key = jsonwebtoken::DecodingKey::from_secret(SECRET);
    Ok(jsonwebtoken::decode::<Value>(token, &key, &rules)?.claims)
}
