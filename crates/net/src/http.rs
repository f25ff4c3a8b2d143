//! HTTP servers: HTTP/1.1 and HTTP/2 behind one accept loop, with every limit set explicitly.
//!
//! A [`Server`] accepts connections, does their TLS handshakes and chooses the protocol. A [`Service`]
//! answers their requests, whatever the version. Each connection has one loop for its deadlines, its age and
//! the drain; a connection of HTTP/1.1 or a stream of HTTP/2 that was [taken over](upgrade()) stays in it.
//! [`Protocols::WebSocket`] serves HTTP/2 inside WebSocket.
//!
//! `admission` bounds connections that are not authenticated yet, and how many of them are served at once;
//! `frame_limiter` bounds the frames of HTTP/2 that carry nothing.
//!
//! Rule behind the windows of HTTP/2: the connection's window is at least the number of streams times the
//! stream's window, else one reader that stalls freezes all others. Measured with the library's
//! defaults (both 1 MiB): one caller that stopped reading stopped its agent for all callers.

mod connect;
mod connection;
mod driver;
mod executor;
mod frame_limiter;
mod http1;
mod http2;
mod observed;
mod refusal;
mod requests;
mod server;
mod service;
mod settings;
mod slot;
mod streams;
#[cfg(test)]
mod tests;
mod upgrade;
mod version;
mod websocket;

pub use crate::admission::half_open::Patience;

pub use self::{
    refusal::Refusal,
    server::Server,
    service::{Answer, AuthState, Body, Connection, GoAway, Service, Trust},
    settings::{
        AGENT, API, Age, FRAME, HALF_OPEN_GROWTH, HEADER_LIST, HEADER_LIST_ROOM, Limits, PEER, Protocols,
        STREAM_WINDOW, Settings, UNLIMITED_WINDOW,
    },
    slot::{StreamReset, StreamSlot},
    upgrade::upgrade,
};
