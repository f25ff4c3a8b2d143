//! A byte stream inside WebSocket, as GitLab's agents use it to carry gRPC through ingresses that
//! know no HTTP/2.
//!
//! * [`upgrade`]: from an HTTP/1.1 request to a connection that belongs to both ends, without I/O.
//! * [`ByteStream`]: the bytes that binary messages carry, one after the other.
//! * [`Authorities`]: what those agents write into `:authority`, made legal before an HTTP/2 server
//!   sees it.
//! * [`Rewind`]: a stream of which somebody has already read the beginning.
//! * [`write_through!`] and [`read_through!`]: for streams around streams, such as these.
//!
//! No message is ever held whole: borders between messages mean nothing here.

pub mod authority;
mod rewind;
mod stream;
mod through;
pub mod upgrade;

pub use authority::Authorities;
pub use rewind::Rewind;
pub use stream::{ByteStream, MAX_MESSAGE, Role};
