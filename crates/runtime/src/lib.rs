//! What both binaries need around their work: HTTP/2 listeners, TLS, files that change, telemetry, the admin listener,
//! signals. No protocol of kas is known here.

pub mod admin;
pub mod clock;
mod exposition;
pub mod files;
pub mod http2;
pub mod io;
pub mod lifecycle;
pub mod peers;
pub mod proxy;
pub mod telemetry;
pub mod tls;
pub mod version;
mod websocket_door;
