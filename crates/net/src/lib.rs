//! Network plumbing for both programs: listeners, TLS, HTTP/2, proxies from the environment, WebSocket
//! connections, the admin listener. It knows nothing of kas' protocol.

pub mod admin;
pub mod admission;
pub mod http2;
pub mod io;
pub mod peers;
pub mod proxy;
pub mod tls;
mod websocket_door;
