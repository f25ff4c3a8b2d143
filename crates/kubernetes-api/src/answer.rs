//! The messages of an agent as an answer.
//!
//! [`Reader`] reads the head; then [`AnswerBody`] passes the body on. Each part goes on as it comes: nothing
//! is gathered here, and nothing of it is changed.
//!
//! A client must never take a part of an answer for the whole. So an answer that is not complete ends with an
//! error, which closes the connection or resets the stream. Only a watch may end regularly instead, after an
//! event. If the length of the body was announced, its last part is held back until the answer is complete:
//! with it, the client would consider the answer complete.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use grpc::{BoxError, Code, Outcome, Status};
use http_body::{Body, Frame, SizeHint};
use http_tunnel::field;
use kube_request::{EventEnds, Kind};
use routing::router::Answering;
use tokio::time::{Instant, Sleep};
use tunnel::frame::{Decoder, Event};

use crate::{
    ended_by::EndedBy,
    open::{OpenRequest, Shared, Verdict},
    record::Ending,
    revocation::Revocation,
};

/// client-go takes a watch that ends within a second without an event for a failure, and lists everything
/// again. The rest is for the way of the head to the client.
const SHORTEST_WATCH: Duration = Duration::from_millis(1_100);
/// How much of an answer that is not passed on is read, in bytes…
const SHORT_REST: usize = 64 * 1024;
/// …and for how long.
const REST_TIME: Duration = Duration::from_secs(1);

/// Reads the messages of an agent.
pub(crate) struct Reader {
    /// Dropping it before the end cancels the request.
    body: Answering,
    decoder: Decoder,
    /// The message that ends the answer has come.
    has_trailer: bool,
    /// The connection was upgraded: its bytes follow the message that ends the answer.
    is_upgraded: bool,
}

/// What comes next.
enum Next {
    Head(Bytes),
    Data(Bytes),
    /// The answer is complete.
    Complete,
}

impl Reader {
    pub(crate) fn new(body: Answering) -> Self {
        let decoder = Decoder::of_two([field::DATA, field::UPGRADE_DATA], field::UPGRADE_DATA);
        Self { body, decoder, has_trailer: false, is_upgraded: false }
    }

    /// Reads the head of the answer, an encoded `grpctool.HttpResponse.Header`.
    ///
    /// # Errors
    /// The status of the request, or that of a broken protocol.
    ///
    /// # Cancel safety
    /// Cancel safe; dropping the reader cancels the request.
    pub(crate) async fn head(&mut self) -> Result<Bytes, Status> {
        match std::future::poll_fn(|cx| self.poll(cx)).await? {
            Next::Head(head) => Ok(head),
            Next::Data(_) | Next::Complete => Err(broken("it has no head")),
        }
    }

    /// The head of the answer has status 101: what follows are the bytes of the upgraded connection, for
    /// [`poll_upgraded`](Self::poll_upgraded).
    pub(crate) fn upgrade(&mut self) {
        self.is_upgraded = true;
    }

    /// Returns the next bytes of the upgraded connection; `None`: the API server has finished.
    ///
    /// # Errors
    /// As [`head`](Self::head).
    pub(crate) fn poll_upgraded(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        Poll::Ready(match ready!(self.poll(cx))? {
            Next::Data(data) => Ok(Some(data)),
            Next::Complete => Ok(None),
            Next::Head(_) => Err(broken("it has a second head")),
        })
    }

    /// Reads the end of an answer whose body is not passed on, so that its tunnel serves the next request. If
    /// the rest is long, or does not come soon, the tunnel is given up.
    pub(crate) async fn finish(mut self) {
        let mut read = 0;
        let end = std::future::poll_fn(|cx| {
            loop {
                match ready!(self.poll(cx)) {
                    Ok(Next::Data(data)) if read + data.len() <= SHORT_REST => read += data.len(),
                    _ => return Poll::Ready(()),
                }
            }
        });
        let _ = tokio::time::timeout(REST_TIME, end).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Next, Status>> {
        loop {
            match self.decoder.next().map_err(|error| broken(&error.to_string()))? {
                Some(Event::Control { .. }) if self.has_trailer => {
                    return Poll::Ready(Err(broken("something follows its end")));
                }
                Some(Event::Control { field: field::HEADER, body }) => {
                    return Poll::Ready(Ok(Next::Head(body)));
                }
                Some(Event::Control { .. }) => {
                    self.has_trailer = true;
                    continue;
                }
                Some(Event::Message { .. }) => {
                    self.check_message()?;
                    continue;
                }
                Some(Event::Data(data)) => return Poll::Ready(Ok(Next::Data(data))),
                None => {}
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.decoder.push(data),
                    Err(frame) => {
                        let status = frame.trailers_ref().and_then(Status::from_headers);
                        return Poll::Ready(match status {
                            Some(status) if status.code() != Code::Ok => Err(status),
                            _ if self.has_trailer && self.decoder.is_between() => Ok(Next::Complete),
                            _ => Err(broken("it ends early")),
                        });
                    }
                },
                Some(Err(_)) | None => {
                    return Poll::Ready(Err(Status::new(
                        Code::Unavailable,
                        "the tunnel was lost before the answer was complete",
                    )
                    .with_outcome(Outcome::Unknown)));
                }
            }
        }
    }
}

impl Reader {
    /// Checks whether a message of the body, or of the upgraded connection, may begin now.
    fn check_message(&self) -> Result<(), Status> {
        match (self.decoder.message_field(), self.has_trailer) {
            (field::UPGRADE_DATA, _) if !self.is_upgraded => Err(broken("its connection was not upgraded")),
            (field::UPGRADE_DATA, false) => Err(broken("bytes of the upgraded connection precede its end")),
            (field::UPGRADE_DATA, true) => Ok(()),
            (_, true) => Err(broken("something follows its end")),
            (_, false) if self.is_upgraded => Err(broken("it has a body and an upgraded connection")),
            (_, false) => Ok(()),
        }
    }
}

/// The status of an answer that breaks the protocol.
fn broken(what: &str) -> Status {
    Status::new(Code::Internal, format!("its answer is malformed: {what}"))
}

/// An answer was not complete.
#[derive(Debug, thiserror::Error)]
#[error("the answer was not complete")]
struct Incomplete;

/// The body of an answer.
pub(crate) struct AnswerBody {
    /// `None`: no more is read.
    reader: Option<Reader>,
    /// The request is open until the answer ends.
    open: OpenRequest,
    ending: Ending,
    /// The announced length, and how much of it has come.
    length: Option<u64>,
    come: u64,
    /// The last part of the announced length.
    held: Option<Bytes>,
    /// For a watch.
    ends: Option<EventEnds>,
    begun: Instant,
    /// The end that was decided, until it may be told.
    end: Option<End>,
    /// Looks whether the request is still allowed.
    _revocation: Option<Revocation>,
    is_over: bool,
}

/// How the body ends.
enum End {
    /// Regularly.
    Clean,
    /// Regularly, but not before this.
    CleanAt(Pin<Box<Sleep>>),
    /// With an error. What was passed on before is written first.
    Abort { is_written: bool },
}

/// What [`AnswerBody`] needs to know of an answer.
pub(crate) struct Answer {
    pub(crate) reader: Reader,
    pub(crate) open: OpenRequest,
    pub(crate) ending: Ending,
    /// The announced length of the body.
    pub(crate) length: Option<u64>,
    /// For a watch: where its events end.
    pub(crate) ends: Option<EventEnds>,
    /// Looks whether the request is still allowed.
    pub(crate) revocation: Option<Revocation>,
}

impl AnswerBody {
    pub(crate) fn new(answer: Answer) -> Self {
        let Answer { reader, open, ending, length, ends, revocation } = answer;
        Self {
            reader: Some(reader),
            open,
            ending,
            length,
            come: 0,
            held: None,
            ends,
            begun: Instant::now(),
            end: None,
            _revocation: revocation,
            is_over: false,
        }
    }

    fn shared(&self) -> &Arc<Shared> {
        self.open.shared()
    }

    /// Decides how the answer ends, because its rest does not come. Returns whether it may end now.
    fn stop(&mut self, by: EndedBy) {
        self.ending.ended_by(by);
        self.reader = None;
        self.held = None;
        self.end = Some(match &self.ends {
            Some(ends) if ends.is_between() => {
                let at = self.begun + SHORTEST_WATCH;
                if ends.has_event() || Instant::now() >= at {
                    End::Clean
                } else {
                    End::CleanAt(Box::pin(tokio::time::sleep_until(at)))
                }
            }
            _ => End::Abort { is_written: false },
        });
    }

    /// Applies the verdict, if there is one.
    fn heed(&mut self, cx: &Context<'_>) {
        let Some(verdict) = self.shared().poll_verdict(cx) else { return };
        let ends_later = self.ends.is_some_and(|ends| ends.is_known() && !ends.is_between());
        match verdict {
            // A watch whose events cannot be seen goes on like any other request.
            Verdict::Drain if !self.ends.is_some_and(|ends| ends.is_known()) => {}
            // A shutdown has an end of its own.
            Verdict::Drain if ends_later => {}
            Verdict::Revoked | Verdict::Session if ends_later && !self.shared().is_overdue() => {}
            _ => self.stop(verdict.ended_by()),
        }
    }

    /// Takes a part of the body. Returns it unless it is held back.
    fn take(&mut self, data: Bytes) -> Option<Bytes> {
        self.come += data.len() as u64;
        if let Some(ends) = &mut self.ends {
            ends.follow(&data);
        }
        match self.length {
            Some(length) if self.come > length => {
                self.stop(EndedBy::Upstream);
                None
            }
            Some(length) if self.come == length => {
                self.held = Some(data);
                None
            }
            _ => Some(data),
        }
    }

    /// Ends the body as decided.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.end {
            Some(End::CleanAt(at)) => ready!(at.as_mut().poll(cx)),
            Some(End::Abort { is_written }) if !*is_written => {
                // The connection writes what it has while this body is pending, and discards it after an
                // error.
                *is_written = true;
                self.open.shared().break_connection();
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Some(End::Abort { .. }) => {
                self.is_over = true;
                return Poll::Ready(Some(Err(Incomplete.into())));
            }
            Some(End::Clean) | None => {}
        }
        self.is_over = true;
        Poll::Ready(None)
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        this.shared().answer_taken();
        loop {
            if this.end.is_none() {
                this.heed(cx);
            }
            if this.end.is_some() {
                return this.poll_end(cx);
            }
            let Some(reader) = &mut this.reader else { return Poll::Ready(None) };
            match ready!(reader.poll(cx)) {
                Ok(Next::Data(data)) => {
                    if let Some(data) = this.take(data) {
                        this.ending.passed(data.len());
                        this.shared().answer_given();
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                }
                Ok(Next::Complete) if this.length.is_none_or(|length| length == this.come) => {
                    this.ending.ended_by(EndedBy::Upstream);
                    this.reader = None;
                    this.end = Some(End::Clean);
                    if let Some(data) = this.held.take() {
                        this.ending.passed(data.len());
                        this.is_over = true;
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                }
                Ok(Next::Complete | Next::Head(_)) => this.stop(EndedBy::Upstream),
                Err(status) => {
                    let by = match status.outcome() {
                        Some(_) => EndedBy::Tunnel,
                        None => EndedBy::Upstream,
                    };
                    this.stop(by);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_over && !matches!(self.end, Some(End::Abort { .. }))
    }

    fn size_hint(&self) -> SizeHint {
        match self.length {
            Some(length) if !self.is_over => {
                let passed = self.held.as_ref().map_or(self.come, |held| self.come - held.len() as u64);
                SizeHint::with_exact(length.saturating_sub(passed))
            }
            _ => SizeHint::default(),
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        // The stream was reset, because the client did not read the end.
        if let Some(verdict) = self.shared().verdict()
            && verdict != Verdict::Drain
        {
            self.ending.ended_by(verdict.ended_by());
        }
    }
}

/// Whether requests of a kind may end regularly before the API server's answer does.
pub(crate) fn ends_between_events(kind: Kind) -> bool {
    kind == Kind::Watch
}
