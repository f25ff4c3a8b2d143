//! The request's direction, decoded: a caller's messages, or the envelopes of another replica.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use grpc::{Code, Status};
use http_body::Body as _;

use crate::frame::{self, Decoder, Event, Splitter};

/// The request's body, decoded.
pub(super) struct CallerStream {
    pub(super) body: grpc::Body,
    pub(super) source: Source,
}

/// What the request's body consists of.
pub(super) enum Source {
    Messages(Splitter),
    /// Envelopes that another replica wrote.
    Envelopes(Decoder),
}

impl Source {
    fn next(&mut self) -> Result<Option<Event>, frame::Error> {
        match self {
            Self::Messages(splitter) => splitter.next(),
            Self::Envelopes(decoder) => decoder.next(),
        }
    }

    fn push(&mut self, data: Bytes) {
        match self {
            Self::Messages(splitter) => splitter.push(data),
            Self::Envelopes(decoder) => decoder.push(data),
        }
    }
}

pub(super) enum Pulled {
    Event(Event),
    End,
    Reset,
    Wrong(Status),
}

impl CallerStream {
    /// Whether the current message has been passed on completely.
    pub(super) fn is_between(&self) -> bool {
        match &self.source {
            Source::Messages(splitter) => splitter.left() == 0,
            // The other replica writes `close_send` itself.
            Source::Envelopes(_) => false,
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Pulled> {
        loop {
            match self.source.next() {
                Ok(Some(event)) => return Poll::Ready(Pulled::Event(event)),
                Ok(None) => {}
                Err(error) => {
                    return Poll::Ready(Pulled::Wrong(Status::new(
                        Code::Internal,
                        format!("request stream: {error}"),
                    )));
                }
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.source.push(data);
                    }
                }
                Some(Err(error)) => {
                    // A body adapter of this project explains what is wrong with the caller's bytes.
                    return Poll::Ready(match error.downcast::<Status>() {
                        Ok(status) => Pulled::Wrong(*status),
                        Err(_) => Pulled::Reset,
                    });
                }
                None if !self.body.is_end_stream() => return Poll::Ready(Pulled::Reset),
                None => {
                    let Source::Messages(splitter) = &self.source else {
                        // Without `close_send` the request is not complete, although the replica's stream is.
                        return Poll::Ready(Pulled::Wrong(Status::new(
                            Code::Internal,
                            "a replica ended a request without close_send",
                        )));
                    };
                    if splitter.is_between() {
                        return Poll::Ready(Pulled::End);
                    }
                    return Poll::Ready(Pulled::Wrong(Status::new(
                        Code::Internal,
                        "request stream: it ended inside a message",
                    )));
                }
            }
        }
    }
}
