//! A request between a replica of this project and one of GitLab's kas, 14.1, in the form of that one's private API.
//!
//! ```text
//! asks:     the agent's method, with the caller's metadata; then StartStreaming, message*, half-close
//! answers:  tunnel_ready, [StartStreaming comes] header, message*, trailer, error?, end with OK
//!           or, instead of tunnel_ready, an end with OK: not here, try another
//! ```
//! What asks begins with an empty message and goes on with the caller's as they are. What answers
//! (`GatewayKasResponse`) has the envelopes of 14.1's agents: the same numbers, the same shapes, the same order.
//!
//! [`ready`] and [`Tunnel::of_gateway`] are for who asks, [`Answer`] is for who answers.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready as ready_now},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Outcome, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;

use super::{
    COPY, Exchange, Failure, Form, GATHER, Head, Info, Opening, Owner, Tunnel, TunnelBody, agent_stream::Got,
    exchange::Next,
};
use crate::{
    frame::{self, Event, request},
    meta::{self, Binary, MapWriter},
    state::KasEnd,
};

/// `StartStreaming` as a gRPC message: it has no fields.
pub const START: Bytes = Bytes::from_static(&[0, 0, 0, 0, 0]);
/// `GatewayKasResponse { tunnel_ready }` as a gRPC message.
pub const READY: Bytes = Bytes::from_static(&[0, 0, 0, 0, 2, 0x0a, 0]);
/// The number of `tunnel_ready`.
const TUNNEL_READY: u32 = 1;

/// What a replica of GitLab's kas says to an ask.
#[derive(Debug)]
pub enum Said {
    /// It has taken a tunnel for the request.
    Ready,
    /// It has none for it: another may.
    None,
    /// It refuses.
    Refused(Status),
    /// It says what nobody may, or its stream broke; for a person.
    Broken(String),
}

/// Waits until a replica of GitLab's kas says whether it has a tunnel. 14.1 says nothing until it has one.
///
/// # Cancel safety
/// Cancel safe: what has come stays in the opening.
pub async fn ready(opening: &mut Opening) -> Said {
    let stream = &mut opening.0;
    match std::future::poll_fn(|cx| stream.poll(cx)).await {
        Ok(Got::Event(Event::Control { field: TUNNEL_READY, .. })) => Said::Ready,
        Ok(Got::Event(_)) => Said::Broken("it answers before it has a tunnel".to_owned()),
        Ok(Got::HalfClose) => Said::None,
        Err(broken) => match broken.status {
            Some(status) => Said::Refused(*status),
            None => Said::Broken(broken.why),
        },
    }
}

/// What becomes of a started request whose stream ended with `status`.
pub(super) fn failure(status: &Status) -> Failure {
    match status.code() {
        // What 14.1 says when the tunnel, the agent or a connection is lost: our own words say more.
        Code::Unavailable | Code::Cancelled | Code::Unknown => Failure::Unknown,
        code => Failure::Lender(Status::new(code, status.message()).with_outcome(Outcome::Unknown)),
    }
}

impl Tunnel {
    /// Makes a tunnel for one request from the answer of a replica of GitLab's kas that was [`ready`]. The body
    /// behind `opening` fails with a [`Status`] where that replica ends its stream with another one than OK. The
    /// `request_info` of the request is [`START`].
    pub fn of_gateway(
        info: Info,
        opening: Opening,
        owner: Arc<dyn Owner>,
        reset: Box<dyn Fn() + Send + Sync>,
    ) -> (Arc<Self>, TunnelBody) {
        let end = KasEnd::parked(info.peer.mode());
        Self::make(info, opening, owner, reset, end, Form::Gateway)
    }
}

/// The answer to a replica of GitLab's kas, from the header on.
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
    /// Goes on after `head`, with which the agent's answer began.
    pub fn new(mut exchange: Exchange, head: Head) -> Self {
        match head {
            Head::Headers(headers) => put_map(request::HEADER, &headers, &mut exchange.out),
            Head::Only(trailers, status) => {
                // 14.1 knows no other order.
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
        // What the map cannot hold is left out, as on the way to a caller: the answer's direction is never an error. A
        // key that was refused still counts, so what a map may hold stays bounded.
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
                // The automaton lets a header come once, and it has no control events here.
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
