//! agentk's direction of a tunnel, decoded into the frames of the state machine.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use grpc::{Code, Status};
use http_body::Body as _;
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;

use super::{Descriptor, info::Unacceptable};
use crate::{
    frame::{Decoder, Event, request},
    state::Frame,
};

/// agentk's direction of a tunnel: the request body of its `Connect` call, decoded.
pub(super) struct AgentStream {
    body: grpc::Body,
    decoder: Decoder,
    pub(super) peeked: Option<Result<Got, Broken>>,
}

pub(super) enum Got {
    Event(Event),
    HalfClose,
}

/// agentk's direction ended in another way than by a half-close.
pub(super) struct Broken {
    /// The reason, for logs.
    pub(super) why: String,
    /// The status of the replica that lent the tunnel.
    pub(super) status: Option<Box<Status>>,
}

pub(super) fn broken(why: impl Into<String>) -> Broken {
    Broken { why: why.into(), status: None }
}

impl AgentStream {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Got, Broken>> {
        if let Some(got) = self.peeked.take() {
            return Poll::Ready(got);
        }
        loop {
            match self.decoder.next() {
                Ok(Some(event)) => return Poll::Ready(Ok(Got::Event(event))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(broken(error.to_string()))),
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // gRPC clients send no trailers. If one does, the end that follows counts.
                    if let Ok(data) = frame.into_data() {
                        self.decoder.push(data);
                    }
                }
                Some(Err(error)) => {
                    return Poll::Ready(Err(match error.downcast::<Status>() {
                        Ok(status) => Broken { why: status.to_string(), status: Some(status) },
                        Err(error) => broken(format!("the agent's stream broke: {error}")),
                    }));
                }
                // Some resets look like an end of the body: only `is_end_stream` tells them apart.
                None if !self.body.is_end_stream() => {
                    return Poll::Ready(Err(broken("the agent's stream was reset")));
                }
                None if self.decoder.is_between() => return Poll::Ready(Ok(Got::HalfClose)),
                None => return Poll::Ready(Err(broken("the agent's stream ended inside a message"))),
            }
        }
    }
}

/// Reads the descriptor, which is the first message of an agent.
///
/// # Errors
/// The status with which the stream ends.
///
/// # Cancel safety
/// Cancel safe: what was received stays in `opening`.
pub async fn read_descriptor(opening: &mut Opening) -> Result<Descriptor, Status> {
    let stream = &mut opening.0;
    let got = std::future::poll_fn(|cx| stream.poll(cx)).await;
    let name = match got {
        Ok(Got::Event(Event::Control { field: request::DESCRIPTOR, body })) => {
            let message = rpc::Descriptor::decode(body).map_err(|error| {
                Status::new(Code::InvalidArgument, format!("the descriptor is malformed: {error}"))
            })?;
            return Descriptor::from_proto(message).map_err(|why| match why {
                // As 14.1 does for a message that breaks its rules.
                Unacceptable::Malformed => Status::new(Code::Unavailable, "unavailable"),
                Unacceptable::TooLong => Status::new(
                    Code::InvalidArgument,
                    format!("a descriptor may list at most {} services", Descriptor::MAX_SERVICES),
                ),
            });
        }
        Ok(Got::Event(Event::Control { field, .. })) => match field {
            request::HEADER => "ConnectRequest_Header",
            request::TRAILER => "ConnectRequest_Trailer",
            _ => "ConnectRequest_Error",
        },
        Ok(Got::Event(_)) => "ConnectRequest_Message",
        Ok(Got::HalfClose) | Err(_) => return Err(Status::new(Code::Unavailable, "unavailable")),
    };
    // The text of 14.1.
    Err(Status::new(Code::InvalidArgument, format!("Invalid oneof value type: *rpc.{name}")))
}

/// agentk's direction until the tunnel exists.
pub struct Opening(pub(super) AgentStream);

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opening")
    }
}

impl Opening {
    /// Wraps the body of a `Connect` call. `gzip`: the call announced `grpc-encoding: gzip`.
    pub fn new(body: grpc::Body, gzip: bool) -> Self {
        Self(AgentStream { body, decoder: Decoder::of_agent(gzip), peeked: None })
    }

    /// Reads on after the descriptor until the tunnel exists. Unread data would pile up in HTTP/2, where a
    /// piece of one byte takes hundreds. Returns once the agent has sent something unasked; nothing more is
    /// read then. Does not return when the stream ends: the tunnel notices that later.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn unasked(&mut self) -> Unasked {
        let stream = &mut self.0;
        let got = std::future::poll_fn(|cx| match ready!(stream.poll(cx)) {
            Ok(Got::Event(event)) => Poll::Ready(event),
            ended => {
                stream.peeked = Some(ended);
                // Nothing after malformed bytes can be used.
                stream.body = grpc::full(Bytes::new());
                Poll::Pending
            }
        });
        let event = got.await;
        self.refuse();
        match event {
            Event::Control { field: request::TRAILER, body } if body.is_empty() => Unasked::Withdrawal,
            _ => Unasked::Violation,
        }
    }

    /// Stops reading: HTTP/2 discards what still arrives.
    pub fn refuse(&mut self) {
        self.0.body = grpc::full(Bytes::new());
    }
}

/// What an agent sent unasked, before its tunnel exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unasked {
    /// A bare trailer: an agent of this project withdraws the tunnel.
    Withdrawal,
    /// Anything else, which only belongs to a request.
    Violation,
}

/// Returns the frame of the state machine.
pub(super) fn frame_of(got: &Got) -> Frame {
    match got {
        Got::HalfClose => Frame::HalfClose,
        Got::Event(Event::Message { .. } | Event::Data(_)) => Frame::Message,
        Got::Event(Event::Control { field, body }) => match *field {
            request::HEADER => Frame::Header,
            request::TRAILER => Frame::Trailer { bare: body.is_empty() },
            request::ERROR => Frame::Error,
            _ => Frame::Descriptor,
        },
    }
}
