//! The bytes between agentk and the next hop.

use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use websocket::{ByteStream, Rewind};

/// A connection to kas, or to a proxy before it.
pub enum Stream {
    /// A TCP connection.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<TlsStream<Stream>>),
    /// Through a proxy that tunnels bytes.
    Proxied(Box<Rewind<Stream>>),
    /// Inside WebSocket. A variant here and not a type of its own, so that the HTTP/2 code is instantiated
    /// only once.
    WebSocket(Box<ByteStream<Rewind<Stream>>>),
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain",
            Self::Tls(_) => "Tls",
            Self::Proxied(_) => "Proxied",
            Self::WebSocket(_) => "WebSocket",
        })
    }
}

websocket::read_through!(
    [] Stream, stream in
    Self::Plain(stream), Self::Tls(stream), Self::Proxied(stream), Self::WebSocket(stream)
);
websocket::write_through!(
    [] Stream, stream in
    Self::Plain(stream), Self::Tls(stream), Self::Proxied(stream), Self::WebSocket(stream)
);
