//! Network plumbing for both programs: listeners, TLS, HTTP servers, proxies from the environment, WebSocket
//! connections, the admin listener; with the feature `client`, what a client of HTTP/1.1 needs. It knows
//! nothing of kas' protocol.

pub mod admin;
pub mod admission;
pub mod batch;
#[cfg(feature = "client")]
pub mod client;
mod flaw;
pub mod http;
pub mod io;
pub mod peers;
pub mod pinned;
pub mod proxy;
mod sync;
pub mod tls;
