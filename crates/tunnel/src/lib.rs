//! Both ends of the reverse tunnel: a stream that agentk opens and through which kas sends requests.
//!
//! * [`frame`]: encodes and decodes the envelopes. Payload passes without being buffered whole.
//! * [`state`]: the protocol as a state machine without I/O: which end may send what, and when.
//! * [`kas_end`]: a parked tunnel, and the request and the response that pass through it.
//! * [`agent_end`]: serves the requests that come out of a tunnel.
//! * [`features`]: what an agentk supports beyond GitLab agent 14.1.
//! * [`meta`]: converts metadata between HTTP/2 headers and the maps in envelopes.
//!
//! The crate knows neither sockets nor tokens nor routing: a tunnel is two HTTP bodies.

pub mod agent_end;
pub mod features;
mod flaw;
pub mod frame;
pub mod kas_end;
pub mod meta;
pub mod protobuf;
pub mod state;
mod sync;

/// The header in which agentk offers a feature of the tunnel (request metadata), and in which kas accepts it
/// (response headers).
pub const TUNNEL_HEADER: http::HeaderName = http::HeaderName::from_static("kas-tunnel");
/// The feature: the stream parks again after each request, for the next one.
pub const REUSE: http::HeaderValue = http::HeaderValue::from_static("reuse");
/// The random id of the agentk process, in the metadata of every stream that it opens.
pub const INSTANCE_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-instance");
/// The socket address of agentk. If kas sees another one, there is a proxy between them.
pub const SOCKET_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-socket");
/// Request metadata of `Connect`, with the value `1`: agentk supports `kubernetes_api.rpc.HeaderExtra`.
pub const IMPERSONATES_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-impersonates");
/// Request metadata of `Connect`, with the value `1`: agentk supports `HttpRequest.Header.target`.
pub const TARGET_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-target");
/// Request metadata of `Connect`, with the value `1`: agentk supports upgraded connections.
pub const UPGRADES_HEADER: http::HeaderName = http::HeaderName::from_static("kas-agentk-upgrades");
/// Response header: the replica that answers.
pub const REPLICA_HEADER: http::HeaderName = http::HeaderName::from_static("kas-replica");
/// Response header: how many replicas are alive.
pub const REPLICAS_HEADER: http::HeaderName = http::HeaderName::from_static("kas-replicas");
/// Response header: the run of the replica's process. Another value means that the replica has restarted.
pub const RUN_HEADER: http::HeaderName = http::HeaderName::from_static("kas-replica-run");
/// Response header: how many seconds a tunnel may be idle, since kas detected a proxy that closes idle
/// streams. agentk opens a replacement before it withdraws such a tunnel.
pub const MAX_IDLE_HEADER: http::HeaderName = http::HeaderName::from_static("kas-tunnel-max-idle");
