//! A byte stream inside WebSocket, which GitLab's agents use to carry gRPC through ingresses without HTTP/2.
//!
//! * [`upgrade`]: both ends of the handshake, from an HTTP/1.1 request to an upgraded connection, without
//!   I/O.
//! * [`ByteStream`]: the concatenated bytes of binary messages.
//! * [`Authorities`]: replaces the invalid `:authority` of those agents before an HTTP/2 server sees it.
//! * [`Rewind`]: a stream that first returns bytes that have already been read from it.
//! * [`write_through!`] and [`read_through!`]: pass-through methods for wrappers of streams.
//!
//! No complete message is ever buffered: message boundaries have no meaning here.

pub mod authority;
mod rewind;
mod stream;
mod through;
pub mod upgrade;

pub use authority::Authorities;
pub use rewind::Rewind;
pub use stream::{ByteStream, MAX_MESSAGE, Role};
