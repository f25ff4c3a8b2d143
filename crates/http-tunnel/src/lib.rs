//! HTTP requests through the tunnel: both ends of `KubernetesApi/MakeRequest`, which carries an HTTP request
//! to the API server and its response as gRPC messages.
//!
//! * [`agent_end`]: turns the messages into a request, and the response into messages.
//! * [`kas_end`]: reads the first message of a caller's request, and makes requests of its own.
//!
//! A body is streamed in both directions: at most one chunk is buffered. A request is complete only at its
//! `trailer`. If its stream ends earlier, the body of the request to the API server ends with an error, so
//! that a partial request is not processed.
//!
//! A connection that was upgraded (exec, attach, port-forward) continues in the same messages, with a field
//! of its own: after the `trailer`, the bytes of each direction are `upgradeData`.
//!
//! This crate knows neither connections nor routing: a request is a body of gRPC frames.

pub mod agent_end;
pub mod halves;
pub mod kas_end;

/// The full name of the gRPC service.
pub const SERVICE: &str = "gitlab.agent.kubernetes_api.rpc.KubernetesApi";

/// The full method.
pub const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

/// The type of the field `extra` in the first message of a request.
pub const HEADER_EXTRA: &str = "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra";

/// The largest part of a body in one message, in bytes, that every version expects.
pub const MAX_CHUNK: usize = 32 * 1024;

/// The largest part of a body in one message, in bytes, between a kas and an agentk of this project. With the
/// heads of its message and of its envelope, it fits into an HTTP/2 frame of 64 KiB. Larger parts need fewer
/// messages, but more frames for each.
pub const LARGE_CHUNK: usize = 64 * 1024 - 64;

/// Field numbers of `grpctool.HttpRequest` and `grpctool.HttpResponse`.
pub mod field {
    /// The head.
    pub const HEADER: u32 = 1;
    /// A part of the body.
    pub const DATA: u32 = 2;
    /// The end of the body.
    pub const TRAILER: u32 = 3;
    /// Bytes of an upgraded connection.
    pub const UPGRADE_DATA: u32 = 4;
}
