//! A server that answers as Gitaly does, by the system's Git.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use aws_lc_rs::hmac;
use bytes::{Bytes, BytesMut};
use grpc::{Code, Status};
use h2::{Reason, server};
use http::{HeaderMap, HeaderValue, Response};
use parking_lot::Mutex;
use prost::Message;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::watch,
    task::JoinSet,
};

use super::{git, messages::Repository};
use crate::{caller::now, certificates::Certificates};

/// By how many seconds clocks may differ, as for Gitaly.
const SKEW: i64 = 30;

/// An answer in place of the right one, for the next call.
#[derive(Clone, Debug)]
pub enum Scripted {
    /// A status, without messages.
    Status(Code, String),
    /// These messages and the status OK.
    Messages(Vec<Vec<u8>>),
    /// These messages, and then a reset.
    Reset(Vec<Vec<u8>>),
    /// These bytes as the body, and the status OK.
    Bytes(Vec<u8>),
    /// HTTP with this status, and no gRPC.
    Http(u16),
    /// Nothing, until the client gives up.
    Silence,
    /// The connection is closed.
    HangUp,
}

/// A call that came.
#[derive(Clone, Debug)]
pub struct SeenCall {
    /// `FindCommit` and so on.
    pub method: String,
    /// Headers of the request.
    pub headers: HeaderMap,
    /// The repository that the request names.
    pub repository: Option<Repository>,
    /// The number of its connection, from 0.
    pub connection: u64,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    token: Option<String>,
    delay: watch::Sender<Duration>,
    scripts: Mutex<VecDeque<Scripted>>,
    seen: Mutex<Vec<SeenCall>>,
    /// Calls that have not ended, and the most at a time.
    open: AtomicUsize,
    most_open: AtomicUsize,
}

/// The server. Dropping it closes everything.
#[derive(Debug)]
pub struct Small {
    shared: Arc<Shared>,
    address: String,
    tasks: Mutex<JoinSet<()>>,
    connections: Arc<AtomicU64>,
    listen: Listen,
}

#[derive(Clone, Debug)]
enum Listen {
    Tcp(SocketAddr, Option<Arc<rustls::ServerConfig>>),
    Unix(PathBuf),
}

/// An open listener.
enum Listener {
    Tcp(TcpListener, Option<tokio_rustls::TlsAcceptor>),
    Unix(UnixListener),
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

impl Small {
    /// Serves the repositories below `root` at a port of 127.0.0.1. With `token`, calls must have it.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn start(root: &Path, token: Option<&str>) -> Result<Self> {
        Self::listen(root, token, Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)), None)).await
    }

    /// As [`start`](Self::start), with TLS.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn start_tls(root: &Path, token: Option<&str>, certificates: &Certificates) -> Result<Self> {
        let chain =
            CertificateDer::pem_file_iter(&certificates.certificate)?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(&certificates.key)?;
        let mut tls = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let listen = Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)), Some(Arc::new(tls)));
        Self::listen(root, token, listen).await
    }

    /// As [`start`](Self::start), at a socket.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn start_unix(root: &Path, token: Option<&str>, socket: &Path) -> Result<Self> {
        Self::listen(root, token, Listen::Unix(socket.to_owned())).await
    }

    async fn listen(root: &Path, token: Option<&str>, listen: Listen) -> Result<Self> {
        let shared = Arc::new(Shared {
            root: root.to_owned(),
            token: token.map(str::to_owned),
            delay: watch::Sender::new(Duration::ZERO),
            scripts: Mutex::default(),
            seen: Mutex::default(),
            open: AtomicUsize::new(0),
            most_open: AtomicUsize::new(0),
        });
        let mut small = Self {
            shared,
            address: String::new(),
            tasks: Mutex::default(),
            connections: Arc::default(),
            listen,
        };
        let listener = small.bind().await?;
        if let (Listener::Tcp(bound, _), Listen::Tcp(address, tls)) = (&listener, &mut small.listen) {
            *address = bound.local_addr()?;
            let scheme = if tls.is_some() { "tls" } else { "tcp" };
            small.address = format!("{scheme}://{address}");
        }
        if let Listen::Unix(path) = &small.listen {
            small.address = format!("unix:{}", path.display());
        }
        small.serve(listener);
        Ok(small)
    }

    async fn bind(&self) -> Result<Listener> {
        Ok(match &self.listen {
            Listen::Tcp(address, tls) => {
                let acceptor = tls.clone().map(tokio_rustls::TlsAcceptor::from);
                Listener::Tcp(TcpListener::bind(address).await?, acceptor)
            }
            Listen::Unix(path) => {
                let _ = std::fs::remove_file(path);
                Listener::Unix(UnixListener::bind(path)?)
            }
        })
    }

    fn serve(&self, listener: Listener) {
        let (shared, numbers) = (Arc::clone(&self.shared), Arc::clone(&self.connections));
        self.tasks.lock().spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let shared = Arc::clone(&shared);
                match &listener {
                    Listener::Tcp(listener, tls) => {
                        let Ok((stream, _)) = listener.accept().await else { return };
                        let number = numbers.fetch_add(1, Ordering::Relaxed);
                        let tls = tls.clone();
                        connections.spawn(async move {
                            let _ = stream.set_nodelay(true);
                            let stream: Box<dyn Duplex> = match tls {
                                None => Box::new(stream),
                                Some(tls) => match tls.accept(stream).await {
                                    Ok(stream) => Box::new(stream),
                                    Err(_) => return,
                                },
                            };
                            connection(shared, stream, number).await;
                        });
                    }
                    Listener::Unix(listener) => {
                        let Ok((stream, _)) = listener.accept().await else { return };
                        let number = numbers.fetch_add(1, Ordering::Relaxed);
                        connections.spawn(connection(shared, Box::new(stream), number));
                    }
                }
            }
        });
    }

    /// Returns its address, as GitLab writes it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Closes the listener and all connections.
    pub fn stop(&self) {
        *self.tasks.lock() = JoinSet::new();
    }

    /// Listens again where it did.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn restart(&self) -> Result<()> {
        // What was closed may still hold the port for a moment.
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        let listener = loop {
            match self.bind().await {
                Ok(listener) => break listener,
                Err(error) if tokio::time::Instant::now() >= deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        self.serve(listener);
        Ok(())
    }

    /// Lets each call take at least this long, also those that have come.
    pub fn delay(&self, by: Duration) {
        self.shared.delay.send_replace(by);
    }

    /// Answers the next calls so, one each.
    pub fn script(&self, answers: impl IntoIterator<Item = Scripted>) {
        self.shared.scripts.lock().extend(answers);
    }

    /// Returns the calls that have come, also those that were refused.
    pub fn seen(&self) -> Vec<SeenCall> {
        self.shared.seen.lock().clone()
    }

    /// Returns how many connections were accepted.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns how many calls were open at the same time, at most.
    pub fn most_open(&self) -> usize {
        self.shared.most_open.load(Ordering::Relaxed)
    }
}

async fn connection(shared: Arc<Shared>, stream: Box<dyn Duplex>, number: u64) {
    let mut builder = server::Builder::new();
    builder.initial_window_size(1 << 20).initial_connection_window_size(8 << 20);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    let (hang_up, hung_up) = watch::channel(false);
    let mut hung_up_here = hung_up.clone();
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = connection.accept() => accepted,
            _ = hung_up_here.wait_for(|hung_up| *hung_up) => return,
        };
        let Some(Ok((request, respond))) = accepted else { return };
        open.spawn(call(Arc::clone(&shared), request, respond, number, hang_up.clone()));
    }
}

/// A call that has not ended.
struct Open<'a>(&'a Shared);

impl<'a> Open<'a> {
    fn new(shared: &'a Shared) -> Self {
        let open = shared.open.fetch_add(1, Ordering::Relaxed) + 1;
        shared.most_open.fetch_max(open, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn call(
    shared: Arc<Shared>,
    request: http::Request<h2::RecvStream>,
    mut respond: server::SendResponse<Bytes>,
    number: u64,
    hang_up: watch::Sender<bool>,
) {
    let _open = Open::new(&shared);
    let (head, mut body) = request.into_parts();
    let method = head.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
    let mut message = BytesMut::new();
    while let Some(data) = body.data().await {
        let Ok(data) = data else { return };
        let _ = body.flow_control().release_capacity(data.len());
        message.extend_from_slice(&data);
    }
    let message = message.split_off(message.len().min(grpc::PREFIX_LEN)).freeze();
    // All requests have their repository at the same number.
    let repository = super::messages::FindCommitRequest::decode(message.clone())
        .ok()
        .and_then(|request| request.repository);
    shared.seen.lock().push(SeenCall {
        method,
        headers: head.headers.clone(),
        repository,
        connection: number,
    });
    wait(&shared).await;
    let scripted = shared.scripts.lock().pop_front();
    let answer = match scripted {
        None => match check(&shared, &head.headers) {
            Err(status) => Err(status),
            Ok(()) => {
                let (root, path) = (shared.root.clone(), head.uri.path().to_owned());
                let answer = tokio::task::spawn_blocking(move || answer(&root, &path, message)).await;
                answer.unwrap_or_else(|_| Err(Status::new(Code::Internal, "panicked")))
            }
        },
        Some(Scripted::Status(code, message)) => Err(Status::new(code, message)),
        Some(Scripted::Messages(messages)) => Ok(messages),
        Some(Scripted::Silence) => return std::future::pending().await,
        Some(Scripted::HangUp) => {
            hang_up.send_replace(true);
            return;
        }
        Some(Scripted::Http(status)) => {
            let mut response = Response::new(());
            *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
            let _ = respond.send_response(response, true);
            return;
        }
        Some(Scripted::Reset(messages)) => {
            let Ok(mut send) = respond.send_response(headers(), false) else { return };
            for message in messages {
                let _ = send.send_data(framed(&message), false);
            }
            // What was sent must not be overtaken by the reset.
            tokio::time::sleep(Duration::from_millis(50)).await;
            send.send_reset(Reason::INTERNAL_ERROR);
            return;
        }
        Some(Scripted::Bytes(bytes)) => {
            let Ok(mut send) = respond.send_response(headers(), false) else { return };
            let _ = send.send_data(bytes.into(), false);
            let mut trailers = HeaderMap::new();
            Status::write_ok(&mut trailers);
            let _ = send.send_trailers(trailers);
            return;
        }
    };
    let messages = match answer {
        Ok(messages) => messages,
        Err(status) => {
            let _ = respond.send_response(status.into_response(), true);
            return;
        }
    };
    let Ok(mut send) = respond.send_response(headers(), false) else { return };
    for message in messages {
        // The library keeps what the client's window does not permit yet.
        if send.send_data(framed(&message), false).is_err() {
            return;
        }
    }
    let mut trailers = HeaderMap::new();
    Status::write_ok(&mut trailers);
    let _ = send.send_trailers(trailers);
}

/// Waits for the delay, which may be changed meanwhile.
async fn wait(shared: &Shared) {
    let begun = tokio::time::Instant::now();
    let mut delay = shared.delay.subscribe();
    loop {
        let until = begun + *delay.borrow_and_update();
        tokio::select! {
            () = tokio::time::sleep_until(until) => return,
            _ = delay.changed() => {}
        }
    }
}

fn headers() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::new();
    framed
        .extend_from_slice(&grpc::prefix(u32::try_from(message.len()).expect("messages of tests are small")));
    framed.extend_from_slice(message);
    framed.freeze()
}

/// Checks the token as Gitaly does: a MAC of the time, which is close to now.
fn check(shared: &Shared, headers: &HeaderMap) -> Result<(), Status> {
    let Some(token) = &shared.token else { return Ok(()) };
    let denied = |why: &str| Status::new(Code::Unauthenticated, why);
    let value = headers.get("authorization").ok_or_else(|| denied("authentication required"))?;
    let value = value.to_str().map_err(|_| denied("authentication required"))?;
    let mut parts = value.strip_prefix("Bearer ").unwrap_or_default().split('.');
    let (Some("v2"), Some(mac), Some(time), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(denied("authentication required"));
    };
    let mac = hex::decode(mac).map_err(|_| denied("permission denied"))?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, token.as_bytes());
    hmac::verify(&key, time.as_bytes(), &mac).map_err(|_| denied("permission denied"))?;
    let time: i64 = time.parse().map_err(|_| denied("permission denied"))?;
    if (now() - time).abs() > SKEW { Err(denied("permission denied")) } else { Ok(()) }
}

fn answer(root: &Path, path: &str, message: Bytes) -> Result<Vec<Vec<u8>>, Status> {
    let malformed = |error: prost::DecodeError| Status::new(Code::InvalidArgument, error.to_string());
    match path {
        "/gitaly.CommitService/FindCommit" => {
            git::find_commit(root, &Message::decode(message).map_err(malformed)?)
        }
        "/gitaly.CommitService/GetTreeEntries" => {
            git::get_tree_entries(root, &Message::decode(message).map_err(malformed)?)
        }
        "/gitaly.BlobService/GetBlobs" => git::get_blobs(root, &Message::decode(message).map_err(malformed)?),
        _ => Err(Status::new(Code::Unimplemented, format!("unknown method {path}"))),
    }
}
