//! `GET /fleet/views/{view}`: the rows once, as JSON, or with `watch=1` and then every change, as server-sent
//! events.

mod form;
mod json;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream;
use grpc::{BoxError, Code, Status};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use http_body::Frame;
use http_body_util::StreamBody;
use kubernetes_api::{Fleet, FleetAnswer, FleetBody, FleetQuestion, FleetRefusal, StreamEnd};
use proto::kas::api::v1::watch_view_response::Event;

use self::{form::Form, json::Printer};
use super::{Hub, Question, Subscription, caller::HttpCaller, messages::Messages};

/// An answer up to this size is made before it is sent, so that an error can still be its status.
const WHOLE: usize = 1 << 20;
/// How often a comment is sent while nothing changes: proxies close connections that are silent.
const BEAT: Duration = Duration::from_secs(15);
/// When a browser whose stream has ended asks again.
const RETRY: &str = "retry: 2000\n\n";
/// How long a caller should wait that has too many subscriptions.
const FULL: Duration = Duration::from_secs(5);
/// How long a caller should wait after any other failure that passes.
const LATER: Duration = Duration::from_secs(2);

/// Answers questions to views on the HTTP endpoint.
pub(crate) struct HttpViews {
    hub: Arc<Hub>,
}

impl HttpViews {
    pub(crate) fn new(hub: Arc<Hub>) -> Arc<Self> {
        Arc::new(Self { hub })
    }
}

#[async_trait]
impl Fleet for HttpViews {
    async fn answer(&self, question: FleetQuestion) -> Result<FleetAnswer, FleetRefusal> {
        let Form { request, watch } = Form::read(&question).map_err(|text| FleetRefusal {
            status: StatusCode::BAD_REQUEST,
            text,
            retry_after: None,
        })?;
        // Not that of a caller of the API listener.
        let name = format!("http/{}", question.caller.name());
        let rights = HttpCaller { caller: question.caller, hub: Arc::clone(&self.hub) };
        let begin = || {
            let question = Question::read(request, self.hub.definitions(), &name)?;
            Subscription::begin(&self.hub, question, &name, Arc::new(rights), !watch)
        };
        let messages = Messages::of(begin().map_err(|status| refusal(&status))?);
        let end = question.end;
        let answer = if watch { events(messages, end).await } else { document(messages, end).await };
        answer.map_err(|status| refusal(&status))
    }
}

/// Returns the next event; `None`: there is none any more.
///
/// # Cancel safety
/// Cancel safe.
async fn next(messages: &mut Messages) -> Result<Option<Event>, Status> {
    match messages.next().await {
        None => Ok(None),
        Some(Err(status)) => Err(status),
        Some(Ok(message)) => Ok(message.event),
    }
}

/// Notes for the audit log why an answer that went on ends.
fn note(end: &StreamEnd, status: &Status) {
    match status.code() {
        Code::PermissionDenied | Code::Unauthenticated => end.revoked(),
        Code::ResourceExhausted => end.limited(),
        _ => {}
    }
}

/// Answers with all rows, as one document.
async fn document(mut messages: Messages, end: StreamEnd) -> Result<FleetAnswer, Status> {
    let mut printer = Printer::default();
    let mut begun = String::from("{\"rows\":[");
    while begun.len() < WHOLE {
        let Some(event) = next(&mut messages).await? else {
            return Err(Status::new(Code::Unavailable, "the view has ended before all rows were there"));
        };
        if printer.document(&event, &mut begun) {
            return Ok(answer("application/json", FleetBody::Whole(begun.into())));
        }
    }
    struct Going {
        messages: Messages,
        end: StreamEnd,
        printer: Printer,
        is_over: bool,
    }
    let going = Going { messages, end, printer, is_over: false };
    let rest = stream::try_unfold((Some(begun), going), |(begun, mut going)| async move {
        if let Some(begun) = begun {
            return Ok(Some((Frame::data(Bytes::from(begun)), (None, going))));
        }
        if going.is_over {
            return Ok(None);
        }
        let mut part = String::new();
        // The client sees that the document has no end.
        let next = next(&mut going.messages).await.inspect_err(|status| note(&going.end, status));
        let Some(event) = next.map_err(error)? else {
            return Err(error(Status::new(Code::Unavailable, "the view has ended")));
        };
        going.is_over = going.printer.document(&event, &mut part);
        Ok::<_, BoxError>(Some((Frame::data(Bytes::from(part)), (None, going))))
    });
    Ok(answer("application/json", FleetBody::Stream(grpc::boxed(StreamBody::new(rest)))))
}

fn error(status: Status) -> BoxError {
    status.message().to_owned().into()
}

/// Answers with rows and every change, as server-sent events. Nothing is queued: an event is made when the
/// client has taken the one before.
async fn events(mut messages: Messages, end: StreamEnd) -> Result<FleetAnswer, Status> {
    let mut printer = Printer::default();
    let mut begun = RETRY.to_owned();
    loop {
        let Some(event) = next(&mut messages).await? else {
            return Err(Status::new(Code::Unavailable, "the view has ended"));
        };
        printer.event(&event, &mut begun);
        // That comes before anybody has been asked what the caller may see.
        if !matches!(event, Event::Reset(_)) {
            break;
        }
    }
    let state = (Some(begun), Some((messages, printer, end)));
    let rest = stream::unfold(state, |(begun, going)| async move {
        if let Some(begun) = begun {
            return Some((begun, (None, going)));
        }
        let (mut messages, mut printer, end) = going?;
        let mut part = String::new();
        let going = match tokio::time::timeout(BEAT, next(&mut messages)).await {
            Err(_) => {
                part.push_str(":\n\n");
                Some((messages, printer, end))
            }
            Ok(Ok(None)) => return None,
            Ok(Ok(Some(event))) => {
                printer.event(&event, &mut part);
                Some((messages, printer, end))
            }
            Ok(Err(status)) => {
                note(&end, &status);
                json::ended(code(&status), status.message(), &mut part);
                None
            }
        };
        Some((part, (None, going)))
    });
    let rest = futures_util::StreamExt::map(rest, |part| Ok::<_, BoxError>(Frame::data(Bytes::from(part))));
    Ok(answer("text/event-stream", FleetBody::Stream(grpc::boxed(StreamBody::new(rest)))))
}

fn answer(kind: &'static str, body: FleetBody) -> FleetAnswer {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if let FleetBody::Stream(_) = body {
        // Otherwise nginx would keep events back.
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    }
    FleetAnswer { status: StatusCode::OK, headers, body, held: None }
}

/// Returns the status of HTTP for one of gRPC.
fn code(status: &Status) -> StatusCode {
    match status.code() {
        Code::InvalidArgument => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::FailedPrecondition | Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Internal => StatusCode::BAD_GATEWAY,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn refusal(status: &Status) -> FleetRefusal {
    let code = code(status);
    let retry_after = match code {
        StatusCode::TOO_MANY_REQUESTS => Some(FULL),
        StatusCode::SERVICE_UNAVAILABLE => Some(LATER),
        _ => None,
    };
    FleetRefusal { status: code, text: status.message().to_owned(), retry_after }
}
