//! Network plumbing for both programs: listeners, TLS, HTTP servers, proxies from the environment, WebSocket
//! connections, the admin listener. It knows nothing of kas' protocol.

pub mod admin;
pub mod admission;
pub mod batch;
pub mod http;
pub mod io;
pub mod peers;
pub mod proxy;
pub mod tls;
