//! Spans of the requests that run through a lent tunnel.

use bytes::Bytes;
use ids::{AgentId, ReplicaId};
use traces::{Kind, Span, Tracer};
use tunnel::{
    frame::response::REQUEST_INFO,
    meta::{self, Binary},
    protobuf::Fields,
};

use crate::peer;

/// Makes a span of each request of one borrow request.
pub(super) struct Spans {
    tracer: Tracer,
    from: ReplicaId,
}

impl Spans {
    pub(super) fn new(tracer: Tracer, from: ReplicaId) -> Self {
        Self { tracer, from }
    }

    /// Begins a span below the one that the request's own metadata names, since a borrow request may carry
    /// several requests. The agent continues the span in the metadata and not this one: what the other
    /// replica wrote is passed on unchanged.
    pub(super) fn begin(&self, agent: AgentId, request_info: &Bytes) -> Span {
        let message = request_info.slice(request_info.len().min(grpc::PREFIX_LEN)..);
        let keep = |key: &str| {
            [&traces::TRACEPARENT, &traces::TRACESTATE, &grpc::CORRELATION_ID].iter().any(|k| *k == key)
        };
        let info = Fields::of(&message).flatten().find(|(field, _)| *field == REQUEST_INFO);
        let info = info.and_then(|(_, info)| info.bytes().ok()).unwrap_or_default();
        // If it is malformed, the agent reports what is wrong with it.
        let (method, headers) = meta::read_request_info(info, Binary::Base64, keep).unwrap_or_default();
        let mut span = self.tracer.begin(peer::BORROW.trim_start_matches('/'), Kind::Server, &headers);
        if span.is_recording() {
            span.set("rpc.system", "grpc");
            span.set("kas.agent.id", agent.get());
            span.set("kas.agent.method", method.to_owned());
            span.set("kas.from.replica", self.from.as_str().to_owned());
            if let Some(id) = headers.get(grpc::CORRELATION_ID).and_then(|id| id.to_str().ok()) {
                span.set("gitlab.correlation_id", id.to_owned());
            }
        }
        span
    }
}
