//! agentk's direction of a tunnel, taken apart into what the automaton knows.

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

/// agentk's direction of a tunnel: its request body, taken apart.
pub(super) struct AgentStream {
    body: grpc::Body,
    decoder: Decoder,
    pub(super) peeked: Option<Result<Got, Broken>>,
}

pub(super) enum Got {
    Event(Event),
    HalfClose,
}

/// agentk's direction ended other than by a clean half-close.
pub(super) struct Broken {
    /// For logs.
    pub(super) why: String,
    /// What the replica that lent the tunnel says.
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
                    // gRPC clients send no trailers; if one does, the end that follows counts.
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
                // Some resets look like an end: only the stream's state tells them apart.
                None if !self.body.is_end_stream() => {
                    return Poll::Ready(Err(broken("the agent's stream was reset")));
                }
                None if self.decoder.is_between() => return Poll::Ready(Ok(Got::HalfClose)),
                None => return Poll::Ready(Err(broken("the agent's stream ended inside a message"))),
            }
        }
    }
}

/// Reads the descriptor, which an agent sends first.
///
/// # Errors
/// The status with which the stream ends.
///
/// # Cancel safety
/// Cancel safe: what has come stays in the opening.
pub async fn read_descriptor(opening: &mut Opening) -> Result<Descriptor, Status> {
    let stream = &mut opening.0;
    let got = std::future::poll_fn(|cx| stream.poll(cx)).await;
    let name = match got {
        Ok(Got::Event(Event::Control { field: request::DESCRIPTOR, body })) => {
            let message = rpc::Descriptor::decode(body).map_err(|error| {
                Status::new(Code::InvalidArgument, format!("the descriptor is malformed: {error}"))
            })?;
            return Descriptor::from_proto(message).map_err(|why| match why {
                // As 14.1 ends a stream whose message does not pass its rules.
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
    // The text that 14.1 gives.
    Err(Status::new(Code::InvalidArgument, format!("Invalid oneof value type: *rpc.{name}")))
}

/// agentk's direction before its descriptor has been read.
pub struct Opening(pub(super) AgentStream);

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opening")
    }
}

impl Opening {
    /// Takes the body of a `Connect` call. `gzip`: it announced `grpc-encoding: gzip`.
    pub fn new(body: grpc::Body, gzip: bool) -> Self {
        Self(AgentStream { body, decoder: Decoder::of_agent(gzip), peeked: None })
    }

    /// Reads on after the descriptor, as long as the tunnel does not exist: what nobody reads piles up in HTTP/2, where
    /// a piece of one byte costs hundreds. Returns once the agent has said something that it had not been asked for;
    /// from then on nothing of it is taken. Does not return when the stream ends: the tunnel will see that.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn unasked(&mut self) -> Unasked {
        let stream = &mut self.0;
        let got = std::future::poll_fn(|cx| match ready!(stream.poll(cx)) {
            Ok(Got::Event(event)) => Poll::Ready(event),
            ended => {
                stream.peeked = Some(ended);
                // What follows bytes that are no envelope is of no use either.
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

    /// Takes nothing more: HTTP/2 forgets what still comes.
    pub fn refuse(&mut self) {
        self.0.body = grpc::full(Bytes::new());
    }
}

/// What an agent says before its tunnel exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unasked {
    /// A bare trailer: an agent of this project needs the tunnel no more.
    Withdrawal,
    /// What belongs to a request.
    Violation,
}

/// What a frame is for the automaton.
pub(super) fn kind(got: &Got) -> Frame {
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
