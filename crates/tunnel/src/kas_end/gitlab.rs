//! Requests between a replica of this project and one of GitLab's kas 14.1, in the form of the latter's
//! private API.
//!
//! ```text
//! asker:    the agent's method, with the caller's metadata; then StartStreaming, message*, half-close
//! owner:    tunnel_ready, [StartStreaming arrives] header, message*, trailer, error?, end with OK
//!           or, instead of tunnel_ready, an end with OK: not here, try another replica
//! ```
//! The asker sends an empty message and then the messages of its caller. The owner's answer
//! (`GatewayKasResponse`) has the envelopes of 14.1's agents: the same numbers, fields and order.
//!
//! [`ready`] and [`Tunnel::of_gitlab`] are for the asker, [`Answer`] is for the owner.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready as ready_now},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;

use super::{
    Exchange, FarEnd, Head, Info, Opening, Tunnel, TunnelBody, TunnelPool, agent_stream::Got, exchange::Next,
};
use crate::{
    frame::{self, COPY, Event, GATHER, request},
    meta::{self, Binary, MapWriter},
};

/// `StartStreaming` as a gRPC message: it has no fields.
pub const START: Bytes = Bytes::from_static(&[0, 0, 0, 0, 0]);
/// `GatewayKasResponse { tunnel_ready }` as a gRPC message.
pub const READY: Bytes = Bytes::from_static(&[0, 0, 0, 0, 2, 0x0a, 0]);
/// The number of `tunnel_ready`.
const TUNNEL_READY: u32 = 1;

/// How a replica of GitLab's kas answers an ask.
#[derive(Debug)]
pub enum Said {
    /// It has a tunnel for the request.
    Ready,
    /// It has no tunnel for the request. Another replica may have one.
    None,
    /// It refuses.
    Refused(Status),
    /// It broke the protocol, or its stream broke. The text is for logs.
    Broken(String),
}

/// Waits until a replica of GitLab's kas says whether it has a tunnel. 14.1 sends nothing until it has one.
///
/// # Cancel safety
/// Cancel safe: what was received stays in `opening`.
pub async fn ready(opening: &mut Opening) -> Said {
    let stream = &mut opening.0;
    match std::future::poll_fn(|cx| stream.poll(cx)).await {
        Ok(Got::Event(Event::Control { field: TUNNEL_READY, .. })) => Said::Ready,
        Ok(Got::Event(_)) => Said::Broken("it sent an answer before it had a tunnel".to_owned()),
        Ok(Got::HalfClose) => Said::None,
        Err(broken) => match broken.status {
            Some(status) => Said::Refused(*status),
            None => Said::Broken(broken.why),
        },
    }
}

impl Tunnel {
    /// Creates a tunnel for one request from the response of a replica of GitLab's kas that was [`ready`].
    /// The body behind `opening` fails with a [`Status`] if that replica ends its stream with another status
    /// than OK. The `request_info` of the request is [`START`].
    pub fn of_gitlab(
        info: Info,
        opening: Opening,
        pool: Arc<dyn TunnelPool>,
        reset: Box<dyn Fn() + Send + Sync>,
    ) -> (Arc<Self>, TunnelBody) {
        Self::make(info, opening, pool, reset, FarEnd::GitlabReplica)
    }
}

/// The body of the response to a replica of GitLab's kas, from the header on.
///
/// Dropping it before its end cancels the request, as dropping the [`Exchange`] does.
pub struct Answer {
    exchange: Exchange,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("exchange", &self.exchange).finish()
    }
}

impl Answer {
    /// Continues after `head`, the beginning of the agent's answer.
    pub fn new(mut exchange: Exchange, head: Head) -> Self {
        match head {
            Head::Headers(headers) => put_map(request::HEADER, &headers, &mut exchange.out),
            Head::Only(trailers, status) => {
                // 14.1 accepts no other order.
                put_map(request::HEADER, &HeaderMap::new(), &mut exchange.out);
                let status = (status.code() != Code::Ok).then_some(status);
                put_end(&trailers, status.as_ref(), &mut exchange.out);
                exchange.ended = Some(ok());
            }
        }
        Self { exchange }
    }
}

fn ok() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    Status::write_ok(&mut trailers);
    trailers
}

fn put_map(field: u32, headers: &HeaderMap, out: &mut BytesMut) {
    let mut writer = MapWriter::meta(Binary::Raw);
    for key in headers.keys().filter(|key| meta::passes_to_tunnel(key.as_str())) {
        // What does not fit into the map is left out, as in the answer to a caller: an answer never fails
        // because of its metadata. Keys that were refused count too, so the size of the map stays bounded.
        let _ = writer.add_all(key, headers);
    }
    writer.put_control(field, out);
}

fn put_end(trailers: &HeaderMap, status: Option<&Status>, out: &mut BytesMut) {
    put_map(request::TRAILER, trailers, out);
    if let Some(status) = status {
        let error = rpc::Error { status: Some(status.to_proto()) };
        frame::put_control(request::ERROR, &error.encode_to_vec(), out);
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<HttpFrame<Bytes>, BoxError>>> {
        let exchange = &mut self.get_mut().exchange;
        if exchange.done {
            return Poll::Ready(None);
        }
        if let Some(big) = exchange.big.take() {
            return Poll::Ready(Some(Ok(HttpFrame::data(big))));
        }
        while exchange.ended.is_none() && exchange.out.len() < GATHER {
            let next = if exchange.out.is_empty() {
                ready_now!(exchange.poll_next(cx))
            } else {
                match exchange.poll_next(cx) {
                    Poll::Pending => break,
                    Poll::Ready(next) => next,
                }
            };
            match next {
                Ok(Next::Event(Event::Message { len })) => {
                    frame::put_message_head(request::MESSAGE, len, &mut exchange.out);
                }
                Ok(Next::Event(Event::Data(data))) if data.len() <= COPY => exchange.out.put_slice(&data),
                Ok(Next::Event(Event::Data(data))) => {
                    if exchange.out.is_empty() {
                        return Poll::Ready(Some(Ok(HttpFrame::data(data))));
                    }
                    exchange.big = Some(data);
                    break;
                }
                // The state machine allows one header, and control events do not get here.
                Ok(Next::Headers(_) | Next::Event(Event::Control { .. })) => {}
                Ok(Next::Complete) => {
                    let (trailers, status) = (std::mem::take(&mut exchange.trailers), exchange.status.take());
                    put_end(&trailers, status.as_ref(), &mut exchange.out);
                    exchange.ended = Some(ok());
                }
                Err(failure) => {
                    let mut trailers = HeaderMap::new();
                    exchange.late_status(&failure).write_to(&mut trailers);
                    exchange.ended = Some(trailers);
                }
            }
        }
        if !exchange.out.is_empty() {
            return Poll::Ready(Some(Ok(HttpFrame::data(exchange.out.split().freeze()))));
        }
        exchange.done = true;
        Poll::Ready(exchange.ended.take().map(|trailers| Ok(HttpFrame::trailers(trailers))))
    }
}
