//! A peer at the level of bytes: HTTP/2 frames that no library sends, on a connection of any kind.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use testkit::process::soon;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, WriteHalf},
    net::{TcpSocket, TcpStream},
    sync::watch,
    task::AbortHandle,
};
use tokio_rustls::{TlsConnector, rustls::ClientConfig};

/// The connection preface of an HTTP/2 client.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PUSH_PROMISE: u8 = 5;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const ACK: u8 = 0x1;
pub(crate) const END_STREAM: u8 = 0x1;
pub(crate) const END_HEADERS: u8 = 0x4;
pub(crate) const PADDED: u8 = 0x8;

/// The upgrade request of an agent.
pub(crate) const UPGRADE: &str = "GET /-/kubernetes-agent/ HTTP/1.1\r\nHost: kas\r\nConnection: Upgrade\r\n\
     Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
     Sec-WebSocket-Protocol: ws-tunnel\r\n\r\n";

/// A frame with the length of its payload.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("frames of tests are small").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A setting of SETTINGS.
pub(crate) fn setting(key: u16, value: u32) -> Vec<u8> {
    [&key.to_be_bytes()[..], &value.to_be_bytes()].concat()
}

/// A whole SETTINGS frame.
pub(crate) fn settings(key: u16, value: u32) -> Vec<u8> {
    frame(SETTINGS, 0, 0, &setting(key, value))
}

/// An HPACK integer, after the bits in `first`.
pub(crate) fn number(first: u8, bits: u8, value: usize) -> Vec<u8> {
    let most = (1 << bits) - 1;
    if value < most {
        return vec![first | u8::try_from(value).expect("just checked")];
    }
    let mut out = vec![first | u8::try_from(most).expect("at most seven bits")];
    let mut rest = value - most;
    while rest >= 0x80 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
    out
}

/// A literal header field that is not indexed, without Huffman code.
pub(crate) fn field(name: &str, value: &[u8]) -> Vec<u8> {
    [&[0][..], &text(name.as_bytes()), &text(value)].concat()
}

/// A literal header field that is added to the dynamic table.
pub(crate) fn indexed(name: &str, value: &[u8]) -> Vec<u8> {
    [&[0x40][..], &text(name.as_bytes()), &text(value)].concat()
}

fn text(value: &[u8]) -> Vec<u8> {
    [&number(0, 7, value.len())[..], value].concat()
}

type Io = Box<dyn Bytes>;

trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// How to connect to a listener.
#[derive(Clone)]
pub(crate) enum Way {
    /// TCP.
    Plain,
    /// TLS, with its configuration.
    Tls(Arc<ClientConfig>),
    /// Inside WebSocket.
    WebSocket,
}

/// What kas has sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard {
    /// The code of the latest GOAWAY.
    pub(crate) goaway: Option<u32>,
    /// Streams that were reset, and the codes.
    pub(crate) resets: BTreeMap<u32, u32>,
    /// Streams with response headers.
    pub(crate) answered: Vec<u32>,
    /// Those of them whose status is 200.
    pub(crate) succeeded: Vec<u32>,
    /// Payloads of acknowledged PINGs.
    pub(crate) pongs: Vec<[u8; 8]>,
    /// SETTINGS arrived.
    pub(crate) is_http2: bool,
    /// Bytes that are not HTTP/2.
    pub(crate) other: Vec<u8>,
    /// The connection has ended.
    pub(crate) over: bool,
}

/// One connection whose every byte the test sends.
pub(crate) struct Peer {
    write: WriteHalf<Io>,
    /// Inside WebSocket.
    inside: bool,
    heard: watch::Receiver<Heard>,
    reader: AbortHandle,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// How many bytes that are not HTTP/2 are kept.
const OTHER: usize = 64 * 1024;

impl Peer {
    /// Connects, up to the start of HTTP/2, and reads from then on.
    pub(crate) async fn connect(address: SocketAddr, way: &Way) -> Result<Self> {
        Self::over(soon("a connection", TcpStream::connect(address)).await?, way).await
    }

    /// The same, from this address of loopback.
    pub(crate) async fn connect_from(from: Ipv4Addr, address: SocketAddr, way: &Way) -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        Self::over(soon("a connection", socket.connect(address)).await?, way).await
    }

    async fn over(stream: TcpStream, way: &Way) -> Result<Self> {
        let (mut read, write) = tokio::io::split(Self::opened(stream, way).await?);
        let (tell, heard) = watch::channel(Heard::default());
        let inside = matches!(way, Way::WebSocket);
        let reader = tokio::spawn(async move {
            let (mut buffer, mut piece) = (Vec::new(), vec![0; 16 * 1024]);
            let mut frames = Frames::default();
            while let Ok(n @ 1..) = read.read(&mut piece).await {
                if inside {
                    frames.unwrap(&piece[..n], &mut buffer);
                } else {
                    buffer.extend_from_slice(&piece[..n]);
                }
                tell.send_modify(|heard| understand(&mut buffer, heard));
            }
            tell.send_modify(|heard| heard.over = true);
        });
        Ok(Self { write, inside, heard, reader: reader.abort_handle() })
    }

    async fn opened(mut stream: TcpStream, way: &Way) -> Result<Io> {
        stream.set_nodelay(true)?;
        Ok(match way {
            Way::Plain => Box::new(stream),
            Way::Tls(config) => {
                let name = stream.peer_addr()?.ip().into();
                let connector = TlsConnector::from(Arc::clone(config));
                Box::new(soon("a TLS handshake", connector.connect(name, stream)).await?)
            }
            Way::WebSocket => {
                stream.write_all(UPGRADE.as_bytes()).await?;
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(soon("the upgrade is answered", stream.read_u8()).await?);
                }
                ensure!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
                Box::new(stream)
            }
        })
    }

    /// Sends bytes; returns whether kas accepted them before it ended the connection or `time` was over.
    pub(crate) async fn send(&mut self, bytes: &[u8], time: Duration) -> bool {
        let sent = async {
            if self.inside {
                self.write.write_all(&binary(bytes)).await?;
            } else {
                self.write.write_all(bytes).await?;
            }
            self.write.flush().await
        };
        matches!(tokio::time::timeout(time, sent).await, Ok(Ok(())))
    }

    /// Returns what was received so far.
    pub(crate) fn heard(&self) -> Heard {
        self.heard.borrow().clone()
    }

    /// Waits until something was received.
    pub(crate) async fn hears(&mut self, time: Duration, pick: impl FnMut(&Heard) -> bool) -> Result<Heard> {
        let waited = tokio::time::timeout(time, self.heard.wait_for(pick)).await;
        match waited.map(|heard| heard.map(|heard| heard.clone())) {
            Ok(heard) => heard.context("the connection is no longer read"),
            Err(_) => anyhow::bail!("not within {time:?}, but {:?}", self.heard()),
        }
    }

    /// Checks that the connection works: kas answers a PING.
    pub(crate) async fn answers_ping(&mut self, time: Duration) -> Result<()> {
        let payload = rand::random::<[u8; 8]>();
        ensure!(self.send(&frame(PING, 0, 0, &payload), time).await, "no PING is taken: {:?}", self.heard());
        let heard = self
            .hears(time, |heard| heard.over || heard.pongs.contains(&payload))
            .await
            .context("no answer to PING")?;
        ensure!(heard.pongs.contains(&payload), "no answer to PING: {heard:?}");
        Ok(())
    }
}

/// A masked binary message.
pub(crate) fn binary(payload: &[u8]) -> Vec<u8> {
    let length = match payload.len() {
        short @ 0..126 => vec![0x80 | short as u8],
        middle @ 126..0x1_0000 => [&[0x80 | 126][..], &(middle as u16).to_be_bytes()].concat(),
        long => [&[0x80 | 127][..], &(long as u64).to_be_bytes()].concat(),
    };
    // A mask of zeros leaves the payload as it is.
    [&[0x82][..], &length, &[0; 4], payload].concat()
}

/// Parses messages of a server.
#[derive(Default)]
struct Frames {
    raw: Vec<u8>,
}

impl Frames {
    /// Appends the payload of complete messages.
    fn unwrap(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        self.raw.extend_from_slice(bytes);
        loop {
            let (head, length) = match *self.raw {
                [_, 126, a, b, ..] => (4, usize::from(u16::from_be_bytes([a, b]))),
                [_, 127, _, _, _, _, a, b, c, d, ..] => (10, u32::from_be_bytes([a, b, c, d]) as usize),
                [_, short @ 0..126, ..] => (2, usize::from(short)),
                _ => return,
            };
            if self.raw.len() < head + length {
                return;
            }
            if self.raw[0] & 0xf == 2 {
                out.extend_from_slice(&self.raw[head..head + length]);
            }
            self.raw.drain(..head + length);
        }
    }
}

/// Removes complete frames from `buffer`.
fn understand(buffer: &mut Vec<u8>, heard: &mut Heard) {
    // An HTTP/2 server sends SETTINGS first.
    if !heard.other.is_empty() || (buffer.len() > 3 && is_other(buffer, heard)) {
        let room = OTHER - heard.other.len();
        heard.other.extend_from_slice(&buffer[..buffer.len().min(room)]);
        buffer.clear();
        return;
    }
    let mut at = 0;
    while let Some(&[a, b, c, kind, flags, w, x, y, z]) = buffer[at..].first_chunk::<9>() {
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let Some(payload) = buffer.get(at + 9..at + 9 + length) else { break };
        let stream = u32::from_be_bytes([w & 0x7f, x, y, z]);
        let code = |at: usize| {
            payload.get(at..at + 4).map(|four| u32::from_be_bytes([four[0], four[1], four[2], four[3]]))
        };
        match kind {
            GOAWAY => heard.goaway = code(4),
            RST_STREAM => {
                heard.resets.insert(stream, code(0).unwrap_or_default());
            }
            HEADERS => {
                heard.answered.push(stream);
                // The field of the static table that is `:status: 200`.
                if payload.first() == Some(&0x88) {
                    heard.succeeded.push(stream);
                }
            }
            PING if flags & ACK != 0 => heard.pongs.extend(payload.first_chunk::<8>().copied()),
            SETTINGS if flags & ACK == 0 => heard.is_http2 = true,
            _ => {}
        }
        at += 9 + length;
    }
    buffer.drain(..at);
}

/// Whether the first bytes are not HTTP/2.
fn is_other(buffer: &[u8], heard: &Heard) -> bool {
    !heard.is_http2 && (buffer[0] != 0 || buffer[3] != SETTINGS)
}
