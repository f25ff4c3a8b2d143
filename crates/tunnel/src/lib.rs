//! The reverse tunnel, both ends: a stream that agentk opens and through which kas sends requests.
//!
//! * [`frame`]: the envelopes' bytes, cut through: a payload passes without being held whole.
//! * [`state`]: who may send what and when, without I/O.
//! * [`kas_end`]: a parked tunnel, and the exchange of bodies when a request meets it.
//! * [`agent_end`]: serves what comes out of a tunnel.
//! * [`meta`]: metadata between HTTP/2 headers and the envelopes' maps.
//!
//! Nothing here knows sockets, tokens or routing: a tunnel is two bodies.

pub mod agent_end;
pub mod frame;
pub mod kas_end;
pub mod meta;
pub mod state;

/// Request metadata in which agentk offers, and response header in which kas accepts, a feature of
/// the tunnel.
pub const TUNNEL_HEADER: http::HeaderName = http::HeaderName::from_static("kas-tunnel");
/// The feature: the stream parks again after each request.
pub const REUSE: http::HeaderValue = http::HeaderValue::from_static("reuse");
/// The random id of the agentk process, on every stream it opens.
pub const INSTANCE_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-instance");
/// agentk's own socket address: when kas sees another one, a proxy stands between.
pub const SOCKET_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-socket");
/// Request metadata of `Connect` in which agentk says that it heeds `kubernetes_api.rpc.HeaderExtra`; value `1`.
pub const IMPERSONATES_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-impersonates");
/// The replica that answers, in response headers.
pub const REPLICA_HEADER: http::HeaderName = http::HeaderName::from_static("kas-replica");
/// How many replicas live, in response headers.
pub const REPLICAS_HEADER: http::HeaderName = http::HeaderName::from_static("kas-replicas");
/// Response header of kas: which process of that name it is. Another value is a replica that has restarted.
pub const RUN_HEADER: http::HeaderName = http::HeaderName::from_static("kas-replica-run");
/// How many seconds a tunnel may be idle, in response headers: kas saw a proxy that would cut it.
/// agentk opens a replacement before it withdraws the old one.
pub const MAX_IDLE_HEADER: http::HeaderName = http::HeaderName::from_static("kas-tunnel-max-idle");
