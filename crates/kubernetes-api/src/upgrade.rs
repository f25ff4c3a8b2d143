//! Upgraded connections: exec, attach and port-forward, by WebSocket or SPDY/3.1, over HTTP/1.1 or a stream
//! of HTTP/2.
//!
//! Until the API server has switched protocols, nothing of the client is read. Then [`Input`] reads from the
//! client and writes messages for the agent, as the body of the request, and [`Session`] writes to the client
//! what the agent sends, in the task of the client's connection. The directions are independent, and bytes
//! pass unchanged, whatever the protocol is.
//!
//! What happens at each end, where a stream of HTTP/2 is a connection of its own:
//!
//! * The client finishes writing: the agent gets the rest and the end of the request. If the answer is not
//!   over within 15 s, the request is cancelled.
//! * The client resets its connection: the request is cancelled.
//! * The API server closes: the client gets the rest, and its connection is closed.
//! * The API server resets its connection, or the tunnel is lost: the client's connection is reset.
//! * This replica shuts down, or the permission is withdrawn: the request is cancelled. With WebSocket, the
//!   client gets a Close frame between two frames, else its connection is reset.

mod frames;
mod input;
mod link;
mod session;

pub(crate) use self::{
    input::Input,
    link::Link,
    session::{Session, Switched},
};
