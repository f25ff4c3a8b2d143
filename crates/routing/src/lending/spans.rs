//! Spans of the requests that run through a lent tunnel.

use bytes::Bytes;
use http::HeaderMap;
use ids::{AgentId, ReplicaId};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc::{ConnectResponse, RequestInfo, connect_response};
use traces::{Kind, Span, Tracer};
use tunnel::meta::{self, Binary};

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
        let info = match ConnectResponse::decode(message).map(|message| message.msg) {
            Ok(Some(connect_response::Msg::RequestInfo(info))) => info,
            // The agent reports what is wrong with it.
            _ => RequestInfo::default(),
        };
        let mut headers = HeaderMap::new();
        let keep = |key: &str| {
            [&traces::TRACEPARENT, &traces::TRACESTATE, &grpc::CORRELATION_ID].iter().any(|k| *k == key)
        };
        meta::read_map(&info.meta, Binary::Base64, keep, &mut headers);
        let mut span = self.tracer.begin(peer::BORROW.trim_start_matches('/'), Kind::Server, &headers);
        if span.is_recording() {
            span.set("rpc.system", "grpc");
            span.set("kas.agent.id", agent.get());
            span.set("kas.agent.method", info.method_name);
            span.set("kas.from.replica", self.from.as_str().to_owned());
            if let Some(id) = headers.get(grpc::CORRELATION_ID).and_then(|id| id.to_str().ok()) {
                span.set("gitlab.correlation_id", id.to_owned());
            }
        }
        span
    }
}
