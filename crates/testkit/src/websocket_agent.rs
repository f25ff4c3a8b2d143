//! An agent of GitLab 14.1 that dials `ws://`, written at the level of HTTP/2 bytes, because no HTTP/2
//! library for Rust sends its `:authority`.
//!
//! It blocks, and uses another WebSocket library than kas: run it on a separate thread.

use std::{
    collections::{HashMap, VecDeque},
    net::{SocketAddr, TcpStream},
};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Buf as _, Bytes, BytesMut};
use http::HeaderValue;
use prost::Message as _;
use proto::gitlab::agent::{
    agent_configuration::rpc::ConfigurationRequest,
    modshared::AgentMeta,
    reverse_tunnel::rpc::{ConnectResponse, Descriptor, connect_request, connect_response},
};
use tungstenite::{Message, WebSocket, client::IntoClientRequest as _};

use crate::{
    handler,
    process::SOON,
    raw_agent::{CONNECT, GET_CONFIGURATION, Kind},
};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

/// An agent with one connection.
#[derive(Debug)]
pub struct WebSocketAgent {
    socket: WebSocket<TcpStream>,
    authority: String,
    token: String,
    /// The dynamic table of HPACK, latest entry first. It never becomes full here.
    fields: VecDeque<(String, String)>,
    received: BytesMut,
    /// Bytes of incomplete messages.
    messages: HashMap<u32, BytesMut>,
    next_stream: u32,
}

/// What kas sends on a stream.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Message(u32, Bytes),
    /// The clean end of the stream.
    Ended(u32),
}

impl WebSocketAgent {
    /// Connects; every request has this `authority`.
    ///
    /// # Errors
    /// When the upgrade is refused.
    pub fn connect(address: SocketAddr, token: &str, authority: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(SOON))?;
        let mut request = format!("ws://{address}/-/kubernetes-agent").into_client_request()?;
        let headers = request.headers_mut();
        headers.insert("sec-websocket-protocol", HeaderValue::from_static("ws-tunnel"));
        // kas may decline it.
        let deflate = "permessage-deflate; client_no_context_takeover; server_no_context_takeover";
        headers.insert("sec-websocket-extensions", HeaderValue::from_static(deflate));
        headers.insert("user-agent", HeaderValue::from_static("agentk/v14.1.1/abc"));
        let (socket, _) = tungstenite::client(request, stream).context("the upgrade")?;
        let mut agent = Self {
            socket,
            authority: authority.to_owned(),
            token: token.to_owned(),
            fields: VecDeque::new(),
            received: BytesMut::new(),
            messages: HashMap::new(),
            next_stream: 1,
        };
        agent.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")?;
        agent.frame(SETTINGS, 0, 0, b"")?;
        Ok(agent)
    }

    /// Opens the configuration stream; returns its number.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn configuration(&mut self) -> Result<u32> {
        let stream = self.open(GET_CONFIGURATION)?;
        let meta = AgentMeta {
            version: "v14.1.1".to_owned(),
            commit_id: "abc".to_owned(),
            pod_namespace: "test-ns".to_owned(),
            pod_name: "test-pod".to_owned(),
        };
        let request =
            ConfigurationRequest { commit_id: String::new(), agent_meta: Some(meta), skip_register: false };
        self.frame(DATA, END_STREAM, stream, &grpc::encode(&request))?;
        Ok(stream)
    }

    /// Opens a tunnel that serves [`handler::descriptor`]; returns its number.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn tunnel(&mut self) -> Result<u32> {
        let stream = self.open(CONNECT)?;
        let descriptor = Descriptor { agent_descriptor: Some(handler::descriptor()) };
        self.send(stream, connect_request::Msg::Descriptor(descriptor))?;
        Ok(stream)
    }

    /// Waits for a request, sends back the messages that it has, and waits for the end of its tunnel.
    ///
    /// # Errors
    /// If anything else arrives.
    pub fn serve_one(&mut self) -> Result<()> {
        let mut tunnel = None;
        loop {
            match self.next()? {
                Event::Message(stream, message) if tunnel.is_none_or(|tunnel| tunnel == stream) => {
                    // A configuration decodes as an envelope without a message.
                    let Ok(ConnectResponse { msg: Some(msg) }) = ConnectResponse::decode(message) else {
                        continue;
                    };
                    match msg {
                        connect_response::Msg::RequestInfo(_) => {
                            tunnel = Some(stream);
                            self.send(stream, handler::header(&[]))?;
                        }
                        connect_response::Msg::Message(message) => {
                            self.send(stream, handler::message(message.data))?;
                        }
                        connect_response::Msg::CloseSend(_) => {
                            self.send(stream, handler::trailer(&[]))?;
                            self.frame(DATA, END_STREAM, stream, b"")?;
                        }
                    }
                }
                Event::Ended(stream) if tunnel == Some(stream) => return Ok(()),
                other => bail!("{other:?} while {tunnel:?} is open"),
            }
        }
    }

    /// Sends a close frame and waits for kas'.
    ///
    /// # Errors
    /// If it does not arrive.
    pub fn close(mut self) -> Result<()> {
        self.socket.close(None)?;
        loop {
            match self.socket.read() {
                Ok(_) => {}
                Err(tungstenite::Error::ConnectionClosed) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn send(&mut self, stream: u32, msg: connect_request::Msg) -> Result<()> {
        self.frame(DATA, 0, stream, &grpc::encode(&handler::to_kas(msg)))
    }

    /// Opens a stream with the fields of grpc-go, in its order.
    fn open(&mut self, path: &str) -> Result<u32> {
        let stream = self.next_stream;
        self.next_stream += 2;
        // POST and http.
        let mut block = vec![0x83, 0x86];
        let (authority, authorization) = (self.authority.clone(), format!("Bearer {}", self.token));
        for (index, name, value) in [
            (4, ":path", path),
            (1, ":authority", &authority),
            (31, "content-type", "application/grpc"),
            (58, "user-agent", Kind::Old.user_agent()),
            (0, "te", "trailers"),
            (0, "grpc-encoding", "gzip"),
            (23, "authorization", &authorization),
        ] {
            self.field(&mut block, index, name, value);
        }
        self.frame(HEADERS, END_HEADERS, stream, &block)?;
        Ok(stream)
    }

    /// Encodes a field like Go's encoder: by its index if it is in the table, else literally with Huffman
    /// code, and adds it to the table.
    fn field(&mut self, block: &mut Vec<u8>, index: u8, name: &str, value: &str) {
        if let Some(at) = self.fields.iter().position(|(n, v)| n == name && v == value) {
            block.push(0x80 | (62 + u8::try_from(at).expect("fields are few")));
            return;
        }
        self.fields.push_front((name.to_owned(), value.to_owned()));
        block.push(0x40 | index);
        let mut text = |text: &str| {
            let mut coded = Vec::new();
            httlib_huffman::encode(text.as_bytes(), &mut coded).expect("any byte has a code");
            let length = coded.len();
            if length < 0x7f {
                block.push(0x80 | u8::try_from(length).expect("just checked"));
            } else {
                block.extend([0xff, u8::try_from(length - 0x7f).expect("values are short")]);
            }
            block.extend(coded);
        };
        if index == 0 {
            text(name);
        }
        text(value);
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Result<()> {
        let length = u32::try_from(payload.len())?.to_be_bytes();
        let frame = [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat();
        self.write(&frame)
    }

    /// Sends bytes in two messages, whose boundary has no meaning.
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (one, two) = bytes.split_at(bytes.len() / 3);
        self.socket.send(Message::Binary(Bytes::copy_from_slice(one)))?;
        self.socket.send(Message::Binary(Bytes::copy_from_slice(two)))?;
        Ok(())
    }

    /// Waits for the next event on a stream, and acknowledges frames of the connection.
    fn next(&mut self) -> Result<Event> {
        loop {
            for (&stream, bytes) in &mut self.messages {
                if let Some(prefix) = bytes.first_chunk::<5>() {
                    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
                    ensure!(prefix[0] == 0, "kas sends identity only");
                    if bytes.len() >= 5 + length {
                        bytes.advance(5);
                        return Ok(Event::Message(stream, bytes.split_to(length).freeze()));
                    }
                }
            }
            let (kind, flags, stream, payload) = self.read_frame()?;
            match kind {
                SETTINGS if flags & ACK == 0 => self.frame(SETTINGS, ACK, 0, b"")?,
                PING if flags & ACK == 0 => self.frame(PING, ACK, 0, &payload)?,
                DATA => self.messages.entry(stream).or_default().extend_from_slice(&payload),
                RST_STREAM | GOAWAY => bail!("frame {kind} on stream {stream}: {payload:?}"),
                _ => {}
            }
            if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
                return Ok(Event::Ended(stream));
            }
        }
    }

    fn read_frame(&mut self) -> Result<(u8, u8, u32, Bytes)> {
        loop {
            if let Some(&[a, b, c, kind, flags, w, x, y, z]) = self.received.first_chunk::<9>() {
                let length = u32::from_be_bytes([0, a, b, c]) as usize;
                if self.received.len() >= 9 + length {
                    self.received.advance(9);
                    let payload = self.received.split_to(length).freeze();
                    return Ok((kind, flags, u32::from_be_bytes([w & 0x7f, x, y, z]), payload));
                }
            }
            match self.socket.read()? {
                Message::Binary(bytes) => self.received.extend_from_slice(&bytes),
                Message::Ping(_) | Message::Pong(_) => {}
                other => bail!("{other:?}"),
            }
        }
    }
}
