//! Reads the messages of a request.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::{HeaderValue, Method, Request};
use http_body::{Body, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use tunnel::frame::{Decoder, Event};

use super::head;
use crate::field::{DATA, HEADER, UPGRADE_DATA};

/// Reads the beginning of a request from its messages. Returns the request to the API server, whose body is
/// the rest of them, and a handle of the stream.
///
/// `user_agent` is added to that of the caller. `impersonates`: agentk itself impersonates a user, so a
/// caller may not.
///
/// If the request asks for an upgrade to a protocol that is supported, it has the headers `Connection` and
/// `Upgrade`, and no body: see `RequestStream::upgrade`.
///
/// # Errors
/// `INVALID_ARGUMENT` when the messages are not a request that may be sent, `CANCELLED` when the caller
/// cancels.
pub async fn read_request(
    body: grpc::Body,
    user_agent: &HeaderValue,
    impersonates: bool,
) -> Result<(Request<grpc::Body>, RequestStream), Status> {
    let mut inbox = Inbox::new(body);
    let header = match poll_fn(|cx| inbox.poll(cx)).await? {
        Item::Header(header) => header,
        item => return Err(inbox.unexpected(&item)),
    };
    let (mut request, length) = head::request(&header, user_agent, impersonates)?;

    // A request with one of these methods rarely has a body and does not announce its absence. The message
    // after the header shows whether there is one.
    let method = request.method();
    let may_wait = [Method::GET, Method::HEAD, Method::DELETE, Method::OPTIONS].contains(method);
    let (first, upload) = match length {
        head::Length::Known(0) => (None, false),
        head::Length::Known(_) | head::Length::Chunked => (None, true),
        head::Length::Unknown => {
            let first = if may_wait {
                Some(poll_fn(|cx| inbox.poll(cx)).await?)
            } else {
                poll_fn(|cx| match inbox.poll(cx) {
                    Poll::Ready(item) => Poll::Ready(item.map(Some)),
                    Poll::Pending => Poll::Ready(Ok(None)),
                })
                .await?
            };
            match first {
                Some(Item::Trailer) => (None, false),
                Some(Item::Data(data)) => (Some(data), true),
                None => (None, true),
                Some(item) => return Err(inbox.unexpected(&item)),
            }
        }
    };
    inbox.uploading = upload;
    inbox.refuses_data = length == head::Length::Known(0);
    let stream = RequestStream::new(inbox);
    if upload {
        let unread = if let head::Length::Known(length) = length { Some(length) } else { None };
        if unread.is_none() {
            // Without this header, hyper does not send a body with a GET.
            let chunked = HeaderValue::from_static("chunked");
            request.headers_mut().insert(http::header::TRANSFER_ENCODING, chunked);
        }
        *request.body_mut() =
            grpc::boxed(Upload { inbox: stream.clone(), first, unread, unsent: unread, done: false });
    }
    Ok((request, stream))
}

/// A message of the caller.
enum Item {
    Header(Bytes),
    /// Not empty.
    Data(Bytes),
    Trailer,
    /// Bytes for the upgraded connection.
    UpgradeData(Bytes),
    End,
}

impl Item {
    fn name(&self) -> &'static str {
        match self {
            Self::Header(_) => "header",
            Self::Data(_) => "data",
            Self::Trailer => "trailer",
            Self::UpgradeData(_) => "upgradeData",
            Self::End => "the end of the stream",
        }
    }
}

/// The position in the stream, which determines what may come next. Each stage leads only to those below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Header,
    Body,
    AfterTrailer,
    Ended,
}

impl Stage {
    fn expects(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Body => "data or trailer",
            Self::AfterTrailer | Self::Ended => "the end of the stream",
        }
    }
}

/// Reads the messages of a request. One side reads at a time: while `uploading`, the [`Upload`], which the
/// connection to the API server polls, or what writes to the upgraded connection; before and after that the
/// response side, which so notices when the caller cancels.
struct Inbox {
    body: grpc::Body,
    decoder: Decoder,
    stage: Stage,
    uploading: bool,
    /// The header says that there is no body.
    refuses_data: bool,
    /// The connection to the API server was upgraded.
    is_upgraded: bool,
    failed: Option<Status>,
    /// The response side, which waits for the end of the upload.
    waker: Option<Waker>,
}

impl Inbox {
    fn new(body: grpc::Body) -> Self {
        Self {
            body,
            decoder: Decoder::of_two([DATA, UPGRADE_DATA], UPGRADE_DATA),
            stage: Stage::Header,
            uploading: false,
            refuses_data: false,
            is_upgraded: false,
            failed: None,
            waker: None,
        }
    }

    /// Returns the next message, and checks the order. A failure is also stored in `failed`.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Item, Status>> {
        if let Some(status) = &self.failed {
            return Poll::Ready(Err(status.clone()));
        }
        let item = match self.poll_any(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(item)) => item,
            Poll::Ready(Err(status)) => return Poll::Ready(Err(self.fail(status))),
        };
        self.stage = match (self.stage, &item) {
            (Stage::Header, Item::Header(_)) => Stage::Body,
            (Stage::Body, Item::Data(_)) if !self.refuses_data => Stage::Body,
            (Stage::Body, Item::Trailer) => Stage::AfterTrailer,
            (Stage::AfterTrailer, Item::UpgradeData(_)) if self.is_upgraded => Stage::AfterTrailer,
            (Stage::AfterTrailer | Stage::Ended, Item::End) => Stage::Ended,
            _ => return Poll::Ready(Err(self.unexpected(&item))),
        };
        Poll::Ready(Ok(item))
    }

    fn unexpected(&mut self, item: &Item) -> Status {
        let expected = match self.stage {
            Stage::Body if self.refuses_data => "trailer",
            Stage::AfterTrailer if self.is_upgraded => "upgradeData or the end of the stream",
            stage => stage.expects(),
        };
        let text = format!("invalid order of messages: expected {expected}, got {}", item.name());
        self.fail(Status::new(Code::InvalidArgument, text))
    }

    fn fail(&mut self, status: Status) -> Status {
        self.failed = Some(status.clone());
        self.wake();
        status
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll_any(&mut self, cx: &mut Context<'_>) -> Poll<Result<Item, Status>> {
        loop {
            match self.decoder.next() {
                Ok(Some(Event::Control { field: HEADER, body })) => {
                    return Poll::Ready(Ok(Item::Header(body)));
                }
                Ok(Some(Event::Control { .. })) => return Poll::Ready(Ok(Item::Trailer)),
                Ok(Some(Event::Data(data))) => return Poll::Ready(Ok(self.item(data))),
                // A message that is not allowed is refused before its payload comes.
                Ok(Some(Event::Message { .. })) if self.takes_message() => continue,
                Ok(Some(Event::Message { .. })) => return Poll::Ready(Ok(self.item(Bytes::new()))),
                Ok(None) => {}
                Err(error) => {
                    let text = format!("malformed request: {error}");
                    return Poll::Ready(Err(Status::new(Code::InvalidArgument, text)));
                }
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.decoder.push(data);
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    let text = format!("the request was cancelled: {error}");
                    return Poll::Ready(Err(Status::new(Code::Cancelled, text)));
                }
                Poll::Ready(None) if !self.body.is_end_stream() => {
                    return Poll::Ready(Err(Status::new(Code::Cancelled, "the request was cancelled")));
                }
                Poll::Ready(None) if !self.decoder.is_between() => {
                    let text = "malformed request: the stream ended inside a message";
                    return Poll::Ready(Err(Status::new(Code::InvalidArgument, text)));
                }
                Poll::Ready(None) => return Poll::Ready(Ok(Item::End)),
            }
        }
    }

    /// Returns the item of payload in the message that began last.
    fn item(&self, data: Bytes) -> Item {
        if self.decoder.message_field() == DATA { Item::Data(data) } else { Item::UpgradeData(data) }
    }

    /// Whether the message that began last is allowed now.
    fn takes_message(&self) -> bool {
        match self.decoder.message_field() {
            DATA => self.stage == Stage::Body && !self.refuses_data,
            _ => self.stage == Stage::AfterTrailer && self.is_upgraded,
        }
    }

    /// For the response side: waits for the end of the request's stream, and reads it unless an upload does.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        loop {
            if let Some(status) = &self.failed {
                return Poll::Ready(Err(status.clone()));
            }
            if self.stage == Stage::Ended {
                return Poll::Ready(Ok(()));
            }
            if self.uploading {
                if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    self.waker = Some(cx.waker().clone());
                }
                return Poll::Pending;
            }
            match self.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(status)) => return Poll::Ready(Err(status)),
                // The API server responded without reading this data.
                Poll::Ready(Ok(_)) => {}
            }
        }
    }
}

/// The stream of a request's messages.
#[derive(Clone)]
pub struct RequestStream(Arc<Mutex<Inbox>>);

impl std::fmt::Debug for RequestStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RequestStream")
    }
}

impl RequestStream {
    fn new(inbox: Inbox) -> Self {
        Self(Arc::new(Mutex::new(inbox)))
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.0.lock()
    }

    /// Returns why the stream failed, if it did.
    pub fn failure(&self) -> Option<Status> {
        self.lock().failed.clone()
    }

    /// Waits until the stream has ended, and reads it unless the body of the request does, or what writes to
    /// an upgraded connection.
    ///
    /// # Errors
    /// As [`read_request`].
    pub fn poll_end(&self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.lock().poll_rest(cx)
    }

    /// The API server has upgraded the connection: from now on, [`poll_upgraded`](Self::poll_upgraded) reads
    /// the stream, until [`release`](Self::release).
    pub(super) fn upgrade(&self) {
        let mut inbox = self.lock();
        inbox.is_upgraded = true;
        inbox.uploading = true;
    }

    /// Returns the next bytes for the upgraded connection; `None`: the caller writes nothing more.
    ///
    /// # Errors
    /// As [`read_request`]. The response side is notified.
    pub(super) fn poll_upgraded(&self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        let mut inbox = self.lock();
        loop {
            if inbox.stage == Stage::Ended {
                return Poll::Ready(Ok(None));
            }
            match std::task::ready!(inbox.poll(cx))? {
                Item::UpgradeData(data) => return Poll::Ready(Ok(Some(data))),
                Item::End => return Poll::Ready(Ok(None)),
                // The trailer, which precedes the upgraded connection.
                _ => {}
            }
        }
    }

    /// Everything was written to the upgraded connection, or it takes nothing more.
    pub(super) fn release(&self) {
        let mut inbox = self.lock();
        inbox.uploading = false;
        inbox.wake();
    }
}

/// The body of the request to the API server.
struct Upload {
    inbox: RequestStream,
    /// A chunk that was read to find out whether there is a body.
    first: Option<Bytes>,
    /// The announced bytes that the caller has not sent yet.
    unread: Option<u64>,
    /// The announced bytes that were not passed on yet.
    unsent: Option<u64>,
    done: bool,
}

impl Upload {
    fn finish(&mut self) {
        self.done = true;
        let mut inbox = self.inbox.lock();
        inbox.uploading = false;
        inbox.wake();
    }

    fn give(&mut self, data: Bytes) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(unsent) = &mut self.unsent {
            *unsent = unsent.saturating_sub(data.len() as u64);
        }
        Poll::Ready(Some(Ok(Frame::data(data))))
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        loop {
            // The last of the announced bytes is held back until the trailer: with it the API server would
            // process the request.
            if this.unread != Some(0)
                && let Some(data) = this.first.take()
            {
                return this.give(data);
            }
            let mut inbox = this.inbox.lock();
            let result = match inbox.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(result) => result,
            };
            let result = match (result, &mut this.unread) {
                (Ok(Item::Data(data)), None) => Ok(Some(data)),
                (Ok(Item::Data(data)), Some(unread)) if data.len() as u64 <= *unread => {
                    *unread -= data.len() as u64;
                    Ok(Some(data))
                }
                (Ok(Item::Data(_)), Some(_)) => Err("the body is longer than its announced length"),
                (Ok(Item::Trailer), Some(1..)) => Err("the body is shorter than its announced length"),
                (Ok(Item::Trailer), _) => Ok(None),
                (Ok(item), _) => {
                    let status = inbox.unexpected(&item);
                    return Poll::Ready(Some(Err(status.into())));
                }
                (Err(status), _) => return Poll::Ready(Some(Err(status.into()))),
            };
            match result {
                Ok(Some(data)) => {
                    drop(inbox);
                    this.first = Some(data);
                }
                Ok(None) => {
                    drop(inbox);
                    this.finish();
                    return match this.first.take() {
                        Some(data) => this.give(data),
                        None => Poll::Ready(None),
                    };
                }
                Err(text) => {
                    let status = inbox.fail(Status::new(Code::InvalidArgument, text));
                    return Poll::Ready(Some(Err(status.into())));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.done && self.first.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.unsent.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.done {
            // The API server does not need the rest, or is gone. The response side continues to read.
            self.finish();
        }
    }
}
