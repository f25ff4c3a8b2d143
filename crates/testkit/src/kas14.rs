//! A kas that behaves towards agentk like GitLab's 14.1: tunnels that carry one request each, and response
//! headers that arrive with the first message.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use bytes::{Buf as _, Bytes, BytesMut};
use h2::{
    Reason, RecvStream, SendStream,
    server::{self, SendResponse},
};
use http::{HeaderMap, HeaderValue, Response};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc::{
    CloseSend, ConnectRequest, ConnectResponse, Message, RequestInfo, connect_request, connect_response,
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};

use crate::{handler::meta, process::soon, raw_agent::CONNECT};

/// A listening kas. Dropping it closes everything.
#[derive(Debug)]
pub struct Kas14 {
    address: SocketAddr,
    tunnels: mpsc::Receiver<Tunnel>,
    _tasks: JoinSet<()>,
}

impl Kas14 {
    /// Listens on a port that the system chose, and accepts every token.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (sender, tunnels) = mpsc::channel(100);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                connections.spawn(serve(stream, sender.clone()));
            }
        });
        Ok(Self { address, tunnels, _tasks: tasks })
    }

    /// Returns where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for a tunnel that has not been used.
    ///
    /// # Panics
    /// When none is opened.
    pub async fn tunnel(&mut self) -> Tunnel {
        soon("agentk opens a tunnel", self.tunnels.recv()).await.expect("the listener lives")
    }
}

async fn serve(stream: tokio::net::TcpStream, tunnels: mpsc::Sender<Tunnel>) {
    let Ok(mut connection) = server::handshake(stream).await else { return };
    let mut open = JoinSet::new();
    while let Some(Ok((request, respond))) = connection.accept().await {
        let tunnels = tunnels.clone();
        open.spawn(async move {
            let (head, body) = request.into_parts();
            let mut tunnel =
                Tunnel { respond, send: None, recv: body, buffer: BytesMut::new(), request: head.headers };
            if head.uri.path() == CONNECT {
                // The descriptor.
                if matches!(tunnel.next().await, FromAgent::Sent(connect_request::Msg::Descriptor(_))) {
                    let _ = tunnels.send(tunnel).await;
                }
            } else {
                // A configuration stream without a message.
                while tunnel.recv.data().await.is_some() {}
                std::future::pending::<()>().await;
            }
        });
    }
}

/// What agentk sends in a tunnel.
#[derive(Clone, Debug, PartialEq)]
pub enum FromAgent {
    /// An envelope.
    Sent(connect_request::Msg),
    /// A clean end.
    HalfClose,
    /// A reset.
    Reset(Reason),
}

/// A tunnel, whose descriptor has been read.
#[derive(Debug)]
pub struct Tunnel {
    respond: SendResponse<Bytes>,
    send: Option<SendStream<Bytes>>,
    recv: RecvStream,
    buffer: BytesMut,
    request: HeaderMap,
}

impl Tunnel {
    /// Returns the headers with which agentk opened it.
    pub fn request_headers(&self) -> &HeaderMap {
        &self.request
    }

    fn stream(&mut self) -> Result<&mut SendStream<Bytes>> {
        if self.send.is_none() {
            let mut response = Response::new(());
            response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
            self.send = Some(self.respond.send_response(response, false)?);
        }
        self.send.as_mut().context("it was just put there")
    }

    /// Sends an envelope.
    ///
    /// # Errors
    /// When the stream is over.
    pub fn send(&mut self, msg: connect_response::Msg) -> Result<()> {
        let bytes = grpc::encode(&ConnectResponse { msg: Some(msg) });
        // The library buffers data without window: messages of tests are small.
        self.stream()?.send_data(bytes, false)?;
        Ok(())
    }

    /// Sends a whole request.
    ///
    /// # Errors
    /// When the stream is over.
    pub fn request(&mut self, method: &str, pairs: &[(&str, &str)], messages: &[&[u8]]) -> Result<()> {
        self.send(connect_response::Msg::RequestInfo(RequestInfo {
            method_name: method.to_owned(),
            meta: meta(pairs),
        }))?;
        for data in messages {
            self.send(connect_response::Msg::Message(Message { data: Bytes::copy_from_slice(data) }))?;
        }
        self.send(connect_response::Msg::CloseSend(CloseSend {}))
    }

    /// Refuses the tunnel: ends it with this status before anything else was sent.
    ///
    /// # Errors
    /// When it is over already.
    pub fn refuse(&mut self, status: &grpc::Status) -> Result<()> {
        let mut response = Response::new(());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        status.write_to(response.headers_mut());
        self.respond.send_response(response, true)?;
        Ok(())
    }

    /// Ends the stream with OK.
    ///
    /// # Errors
    /// When it is over already.
    pub fn end(&mut self) -> Result<()> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        self.stream()?.send_trailers(trailers)?;
        Ok(())
    }

    /// Waits for the next event from agentk.
    ///
    /// # Panics
    /// If nothing arrives, or not an envelope.
    pub async fn next(&mut self) -> FromAgent {
        loop {
            if self.buffer.len() >= grpc::PREFIX_LEN {
                let len = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]])
                    as usize;
                if self.buffer.len() >= grpc::PREFIX_LEN + len {
                    self.buffer.advance(grpc::PREFIX_LEN);
                    let message =
                        ConnectRequest::decode(self.buffer.split_to(len)).expect("agentk sends envelopes");
                    return FromAgent::Sent(message.msg.expect("an envelope has a message"));
                }
            }
            match soon("agentk sends something", self.recv.data()).await {
                Some(Ok(data)) => {
                    let _ = self.recv.flow_control().release_capacity(data.len());
                    self.buffer.extend_from_slice(&data);
                }
                Some(Err(error)) => {
                    return FromAgent::Reset(error.reason().unwrap_or(Reason::INTERNAL_ERROR));
                }
                None => {
                    assert!(self.buffer.is_empty(), "the end comes inside a message");
                    return FromAgent::HalfClose;
                }
            }
        }
    }
}
