//! The client of both ways.

use std::{convert::Infallible, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Method, Request, Uri};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

use super::{
    Endpoint,
    case::{CASE, Case, Form, Payload},
};
use crate::http1::{self, Framing, read_head};

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The answer that a client has.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// Names in lower case.
    pub(super) fields: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    /// Whether the body ended as announced.
    pub(super) complete: bool,
}

/// A client of the server, or of kas. It keeps its connections.
pub(super) struct Client {
    address: SocketAddr,
    /// What targets begin with, and the token; `None`: it is a client of the server.
    endpoint: Option<(String, String)>,
    http1: Option<TcpStream>,
    http2: Option<http2::SendRequest<Body>>,
}

impl Client {
    pub(super) fn direct(address: SocketAddr) -> Self {
        Self { address, endpoint: None, http1: None, http2: None }
    }

    pub(super) fn through(endpoint: &Endpoint) -> Self {
        let parts = (endpoint.prefix(), endpoint.token.clone());
        Self { address: endpoint.address, endpoint: Some(parts), http1: None, http2: None }
    }

    /// Sends a request, and returns its answer.
    ///
    /// # Errors
    /// If there is no head of an answer.
    pub(super) async fn send(&mut self, case: &Case) -> Result<Answer> {
        let (prefix, token) = self.endpoint.clone().unwrap_or_default();
        match case.form {
            Form::Http2 if self.endpoint.is_some() => self.over_http2(case, &prefix, &token).await,
            _ => self.over_http1(case, &prefix, &token).await,
        }
    }

    async fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Sends a request on the connection of the one before, and again on a new one if that has ended: a
    /// server may end it after an answer that came before the whole request was read.
    async fn over_http1(&mut self, case: &Case, prefix: &str, token: &str) -> Result<Answer> {
        let is_reused = self.http1.is_some();
        match self.once_over_http1(case, prefix, token).await {
            Err(_) if is_reused => self.once_over_http1(case, prefix, token).await,
            answer => answer,
        }
    }

    async fn once_over_http1(&mut self, case: &Case, prefix: &str, token: &str) -> Result<Answer> {
        let address = self.address;
        let is_absolute = case.form == Form::Absolute && self.endpoint.is_some();
        let origin = if is_absolute { format!("http://{address}") } else { String::new() };
        let mut out = format!("{} {origin}{prefix}{} HTTP/1.1\r\n", case.method, case.target).into_bytes();
        out.extend_from_slice(format!("Host: {address}\r\n{CASE}: {}\r\n", case.seed).as_bytes());
        if self.endpoint.is_some() {
            out.extend_from_slice(format!("Authorization: Bearer {token}\r\n").as_bytes());
        }
        for (name, value) in case.headers.iter().chain(&case.of_connection) {
            out.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        case.body.put(&mut out, case.trailers);

        let mut stream = match self.http1.take() {
            Some(stream) => stream,
            None => self.connect().await?,
        };
        let (read, mut write) = stream.split();
        let mut read = BufReader::new(read);
        let answering = async {
            loop {
                let head = read_head(&mut read).await?.context("the connection ended without an answer")?;
                // Such as 100 Continue.
                if head.status()? >= 200 {
                    let framing = head.framing_of_response(&case.method)?;
                    let body = http1::read_body(&mut read, framing).await;
                    return anyhow::Ok((head, framing, body));
                }
            }
        };
        // An answer may come before the whole request is sent.
        let (sent, answered) = tokio::join!(write.write_all(&out), answering);
        let (head, framing, body) = answered?;
        ensure!(read.buffer().is_empty(), "something follows the answer: {}", read.buffer().escape_ascii());
        let is_over = sent.is_err()
            || !body.complete
            || framing == Framing::Close
            || head.tokens("connection").iter().any(|token| token == "close");
        drop(read);
        if !is_over {
            self.http1 = Some(stream);
        } else if framing != Framing::Close && body.complete {
            // Whatever follows the answer.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            ensure!(rest.is_empty(), "something follows the answer: {}", rest.escape_ascii());
        }
        Ok(Answer { status: head.status()?, fields: head.fields, body: body.bytes, complete: body.complete })
    }

    async fn over_http2(&mut self, case: &Case, prefix: &str, token: &str) -> Result<Answer> {
        let mut sender = match self.http2.take().filter(|sender| !sender.is_closed()) {
            Some(sender) => sender,
            None => {
                let io = TokioIo::new(self.connect().await?);
                let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
                tokio::spawn(connection);
                sender
            }
        };
        let uri = Uri::try_from(format!("http://{}{prefix}{}", self.address, case.target))?;
        let mut request = Request::builder()
            .method(Method::from_bytes(case.method.as_bytes())?)
            .uri(uri)
            .header(CASE, case.seed)
            .header("authorization", format!("Bearer {token}"));
        for (name, value) in &case.headers {
            request = request.header(name.to_ascii_lowercase(), value.as_bytes());
        }
        if let Payload::Length(bytes) = &case.body {
            request = request.header("content-length", bytes.len());
        }
        let body = match &case.body {
            Payload::None => Empty::new().boxed_unsync(),
            Payload::Length(bytes) => Full::new(Bytes::from(bytes.clone())).boxed_unsync(),
            // Without a size that is known, so that the end is marked after the head.
            Payload::Chunked(chunks) => {
                let frames: Vec<_> =
                    chunks.iter().map(|chunk| Ok(Frame::data(Bytes::from(chunk.clone())))).collect();
                StreamBody::new(stream::iter(frames).boxed()).boxed_unsync()
            }
        };
        sender.ready().await?;
        let (parts, mut incoming) = sender.send_request(request.body(body)?).await?.into_parts();
        self.http2 = Some(sender);
        let mut body = Vec::new();
        let complete = loop {
            match incoming.frame().await {
                None => break true,
                Some(Err(_)) => break false,
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        body.extend_from_slice(data);
                    }
                }
            }
        };
        let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
            (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let fields = parts.headers.iter().map(field).collect();
        Ok(Answer { status: parts.status.as_u16(), fields, body, complete })
    }
}
