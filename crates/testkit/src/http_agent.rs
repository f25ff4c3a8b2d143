//! A scripted agent of GitLab that carries out HTTP requests (`KubernetesApi/MakeRequest`) as agentk 14.1 and
//! 16.5 do with Go's client.
//!
//! * Ten tunnels with one request each.
//! * The target is written anew from the decoded `url_path` and `query`: the path as `URL.EscapedPath` writes
//!   it, the query sorted by key.
//! * 14.1 does not read `content_length`: a request without a body has none, any other one is chunked. 16.5
//!   reads it.
//! * The headers of the request are sent as they are, without those of one connection and `Content-Length`;
//!   the user agent is `<client's> via gitlab-agent/…`; without `Accept-Encoding`, Go asks for gzip.
//! * The answer passes with all of its headers but `Transfer-Encoding`, as it comes, in pieces of at most
//!   32 KiB: so a watch is a stream of pieces. A body that is cut ends the request with `Unavailable`.
//! * Nothing cancels a request: it ends with its answer, or when a piece cannot be sent to kas.
//! * If Go has asked for gzip by itself, it unpacks the answer, and drops `Content-Encoding` and
//!   `Content-Length`.
//! * A real API server is reached by TLS, with the token of a service account.
//!
//! Not simulated: upgrades, and the sizes of the pool of 16.5.

use std::{fmt, io::Write as _, net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use flate2::write::GzDecoder;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, HttpResponse, http_request, http_response},
    prototool::{self, Values},
    reverse_tunnel::{
        info::{AgentDescriptor, Method, Service},
        rpc::connect_response,
    },
};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::mpsc,
    task::JoinSet,
};
use tokio_rustls::TlsConnector;

use crate::{
    handler::{self, Wire},
    http1::{Pieces, put_chunk, read_head},
    kubernetes::Kubernetes,
    process::soon,
    raw_agent::{Kind, RawAgent, RawTunnel},
};

/// How many tunnels it keeps.
const TUNNELS: usize = 10;
/// The largest piece of a body in one message.
const PIECE: usize = 32 * 1024;
/// The headers that concern one connection only. Go writes a length of its own.
const OF_CONNECTION: [&str; 10] = [
    "connection",
    "proxy-connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
];

/// The API server of an agent.
#[derive(Clone)]
pub struct ApiServer {
    address: SocketAddr,
    /// TLS, and the token of the agent's service account; `None`: plain HTTP for everybody.
    secure: Option<(TlsConnector, Arc<str>)>,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl From<SocketAddr> for ApiServer {
    /// A server of a test, without TLS.
    fn from(address: SocketAddr) -> Self {
        Self { address, secure: None }
    }
}

impl ApiServer {
    /// A real one, to which the agent authenticates with this token.
    ///
    /// # Errors
    /// If its certificate cannot be read.
    pub fn of(kubernetes: &Kubernetes, token: &str) -> Result<Self> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(kubernetes.ca_pem().as_bytes())?)?;
        // Named rather than taken from the process's default, which belongs to the test.
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let address = kubernetes.server().trim_start_matches("https://").parse()?;
        Ok(Self { address, secure: Some((TlsConnector::from(Arc::new(tls)), token.into())) })
    }

    async fn connect(&self) -> Result<Box<dyn Connection>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.secure {
            None => Box::new(stream),
            Some((tls, _)) => {
                Box::new(tls.connect(ServerName::IpAddress(self.address.ip().into()), stream).await?)
            }
        })
    }
}

/// A connection to an API server.
trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// A running agent. Dropping it closes its connection.
#[derive(Debug)]
pub struct HttpAgent {
    raw: RawAgent,
    _tunnels: JoinSet<()>,
}

impl HttpAgent {
    /// Connects, and returns when its tunnels are open.
    ///
    /// # Errors
    /// If kas cannot be reached or refuses a tunnel, and for an agent of this project, which agentk is for.
    pub async fn start(
        kas: SocketAddr,
        token: &str,
        kind: Kind,
        api_server: impl Into<ApiServer>,
    ) -> Result<Self> {
        ensure!(kind != Kind::Ours, "this agent is one of GitLab");
        let api_server = api_server.into();
        let raw = RawAgent::connect(kas, token, kind).await?;
        let (opened, mut open) = mpsc::channel(TUNNELS);
        let mut tunnels = JoinSet::new();
        for _ in 0..TUNNELS {
            let (raw, api_server, mut opened) = (raw.clone(), api_server.clone(), Some(opened.clone()));
            tunnels.spawn(async move {
                while let Ok(mut tunnel) = raw.tunnel_with(descriptor()).await {
                    if let Some(opened) = opened.take() {
                        // The receiver is gone if another tunnel was refused.
                        let _ = opened.send(()).await;
                    }
                    serve(&mut tunnel, kind, &api_server).await;
                    // kas ends the stream. It is an error if it has done so already.
                    let _ = tunnel.stream().half_close();
                    while Wire::recv(&mut tunnel).await.is_some() {}
                }
            });
        }
        drop(opened);
        for _ in 0..TUNNELS {
            soon("the tunnels open", open.recv()).await.context("a tunnel was refused")?;
        }
        Ok(Self { raw, _tunnels: tunnels })
    }

    /// Returns the agent below.
    pub fn raw(&self) -> &RawAgent {
        &self.raw
    }
}

impl Drop for HttpAgent {
    fn drop(&mut self) {
        self.raw.link().cut();
    }
}

fn descriptor() -> AgentDescriptor {
    let methods = vec![Method { name: "MakeRequest".to_owned() }];
    let name = "gitlab.agent.kubernetes_api.rpc.KubernetesApi".to_owned();
    AgentDescriptor { services: vec![Service { name, methods }] }
}

/// Serves the request of a tunnel, if there is one before its end.
async fn serve(tunnel: &mut RawTunnel, kind: Kind, api_server: &ApiServer) {
    if !matches!(Wire::recv(tunnel).await, Some(connect_response::Msg::RequestInfo(_))) {
        return;
    }
    let end = exchange(tunnel, kind, api_server).await;
    if end.is_err() {
        // Only the log of agentk has the cause.
        tunnel.send(handler::header(&[])).await;
    }
    tunnel.send(handler::trailer(&[])).await;
    if !matches!(end, Ok(End::Complete)) {
        tunnel.send(handler::error_of(14, "unavailable")).await;
    }
}

/// How an answer ended that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Complete,
    /// The API server broke it off, or kas takes no more of it.
    Cut,
}

/// Returns the next message of the request; `None`: it is over.
async fn next(tunnel: &mut RawTunnel) -> Result<Option<http_request::Message>> {
    match Wire::recv(tunnel).await {
        Some(connect_response::Msg::Message(message)) => Ok(HttpRequest::decode(message.data)?.message),
        Some(connect_response::Msg::CloseSend(_)) => Ok(None),
        other => bail!("{other:?} instead of a message"),
    }
}

/// Carries out a request. Returns how the answer ended.
///
/// # Errors
/// If there was no answer.
async fn exchange(tunnel: &mut RawTunnel, kind: Kind, api_server: &ApiServer) -> Result<End> {
    let Some(http_request::Message::Header(header)) = next(tunnel).await? else { bail!("no header") };
    ensure!(header.target.is_empty(), "an agent of GitLab does not know the field target");
    let request = header.request.context("no request")?;
    let mut body = Vec::new();
    loop {
        match next(tunnel).await? {
            Some(http_request::Message::Data(data)) => body.extend_from_slice(&data.data),
            Some(http_request::Message::Trailer(_)) => break,
            other => bail!("{other:?} within a body"),
        }
    }
    let mut stream = BufReader::with_capacity(PIECE, api_server.connect().await?);
    let mut out = head(&request, api_server).into_bytes();
    let announced = header.content_length.filter(|_| kind == Kind::Recent);
    match announced.map(u64::try_from) {
        Some(Ok(length)) => {
            ensure!(body.len() as u64 == length, "{} bytes of {length}", body.len());
            put_length(&mut out, &request.method, body.len());
            out.extend_from_slice(&body);
        }
        // Go reads the first byte of a body whose length it does not know.
        None if body.is_empty() => put_length(&mut out, &request.method, 0),
        None | Some(Err(_)) => {
            out.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
            put_chunk(&mut out, &body);
            out.extend_from_slice(b"0\r\n\r\n");
        }
    }
    stream.write_all(&out).await?;
    stream.flush().await?;
    let answer = read_head(&mut stream).await?.context("the API server did not answer")?;
    let (_, status) = answer.line.split_once(' ').context("no status")?;
    let mut response = prototool::HttpResponse {
        status_code: answer.status()?.into(),
        status: status.to_owned(),
        header: Default::default(),
    };
    let is_unpacked = request.method != "HEAD"
        && answer.get("content-encoding") == Some("gzip")
        && first(&request, "Accept-Encoding").is_none();
    let mut unpacking = is_unpacked.then(|| GzDecoder::new(Vec::new()));
    for (name, value) in &answer.fields {
        let is_of_packed = matches!(&**name, "content-encoding" | "content-length");
        if name != "transfer-encoding" && !(is_unpacked && is_of_packed) {
            let name = canonical(name);
            response
                .header
                .entry(name)
                .or_insert_with(|| Values { value: Vec::new() })
                .value
                .push(value.clone());
        }
    }
    let mut pieces = Pieces::new(answer.framing_of_response(&request.method)?);
    tunnel.send(handler::header(&[])).await;
    let header = http_response::Header { response: Some(response) };
    let mut is_taken = put(tunnel, http_response::Message::Header(header)).await;
    while is_taken {
        let piece = match pieces.next(&mut stream, PIECE).await {
            Ok(Some(piece)) => piece,
            Ok(None) => {
                put(tunnel, http_response::Message::Trailer(http_response::Trailer {})).await;
                return Ok(End::Complete);
            }
            Err(_) => break,
        };
        let data = match &mut unpacking {
            None => piece,
            // What is not gzip ends the answer, as in Go.
            Some(unpacking) => match unpacking.write_all(&piece).and_then(|()| unpacking.flush()) {
                Ok(()) => std::mem::take(unpacking.get_mut()),
                Err(_) => break,
            },
        };
        for data in data.chunks(PIECE) {
            let data = http_response::Data { data: Bytes::copy_from_slice(data) };
            is_taken = is_taken && put(tunnel, http_response::Message::Data(data)).await;
        }
    }
    Ok(End::Cut)
}

/// Returns the first value of a header of the request.
fn first<'a>(request: &'a prototool::HttpRequest, name: &str) -> Option<&'a String> {
    request.header.get(name).and_then(|values| values.value.first())
}

/// Sends a message of the answer. Returns whether kas takes it.
async fn put(tunnel: &mut RawTunnel, message: http_response::Message) -> bool {
    let message = HttpResponse { message: Some(message) };
    tunnel.send(handler::message(message.encode_to_vec())).await
}

/// Returns the head of the request to the API server, without what says how its body ends.
fn head(request: &prototool::HttpRequest, api_server: &ApiServer) -> String {
    let mut query = String::new();
    for (key, values) in &request.query {
        for value in &values.value {
            query.push(if query.is_empty() { '?' } else { '&' });
            query.push_str(&escaped_in_query(key));
            query.push('=');
            query.push_str(&escaped_in_query(value));
        }
    }
    let path = escaped(&request.url_path, b"-_.~$&+,/:;=@");
    let mut out = format!("{} {path}{query} HTTP/1.1\r\nHost: {}\r\n", request.method, api_server.address);
    let value = |name: &str| first(request, name);
    let agent = "gitlab-agent/v16.5.0/abc";
    match value("User-Agent") {
        Some(client) => out.push_str(&format!("User-Agent: {client} via {agent}\r\n")),
        None => out.push_str(&format!("User-Agent: {agent}\r\n")),
    }
    if value("Accept-Encoding").is_none() {
        out.push_str("Accept-Encoding: gzip\r\n");
    }
    if let Some((_, token)) = &api_server.secure
        && value("Authorization").is_none()
    {
        out.push_str(&format!("Authorization: Bearer {token}\r\n"));
    }
    for (name, values) in &request.header {
        let key = name.to_ascii_lowercase();
        if OF_CONNECTION.contains(&key.as_str()) || matches!(&*key, "user-agent" | "host") {
            continue;
        }
        for value in &values.value {
            out.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    out
}

/// Writes the length of a body, where Go does, and ends the head.
fn put_length(out: &mut Vec<u8>, method: &str, length: usize) {
    if length > 0 || matches!(method, "POST" | "PUT" | "PATCH") {
        out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes());
    }
    out.extend_from_slice(b"\r\n");
}

fn escaped_in_query(text: &str) -> String {
    escaped(text, b"-_.~").replace("%20", "+")
}

/// Percent-encodes all bytes but letters, digits and those of `plain`.
fn escaped(text: &str, plain: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Writes the name of a header as Go does.
fn canonical(name: &str) -> String {
    let mut begins = true;
    let letter = |c: char| {
        let letter = if begins { c.to_ascii_uppercase() } else { c };
        begins = c == '-';
        letter
    };
    name.chars().map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_written_as_go_does() {
        let values = |values: &[&str]| Values { value: values.iter().map(|v| (*v).to_owned()).collect() };
        let request = prototool::HttpRequest {
            method: "GET".to_owned(),
            url_path: "/a b%2f;(ü)".to_owned(),
            query: [("k y".to_owned(), values(&["1", ""])), ("a".to_owned(), values(&["+"]))].into(),
            header: [("User-Agent".to_owned(), values(&["kubectl"])), ("Te".to_owned(), values(&["x"]))]
                .into(),
        };
        let head = head(&request, &SocketAddr::from(([127, 0, 0, 1], 1)).into());
        assert_eq!(
            head,
            "GET /a%20b%252f;%28%C3%BC%29?a=%2B&k+y=1&k+y= HTTP/1.1\r\nHost: 127.0.0.1:1\r\nUser-Agent: kubectl via \
             gitlab-agent/v16.5.0/abc\r\nAccept-Encoding: gzip\r\n"
        );
        assert_eq!(canonical("x-kubernetes-pf-uid"), "X-Kubernetes-Pf-Uid");
    }
}
