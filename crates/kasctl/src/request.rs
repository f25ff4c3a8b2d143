//! `kasctl request`: sends an HTTP request to the Kubernetes API of the cluster of an agent, and streams both
//! bodies.

use std::{collections::BTreeMap, path::PathBuf};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream::{self, Stream};
use proto::gitlab::agent::{
    grpctool::{HttpRequest, http_request, http_response},
    prototool::{self, Values},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    sync::oneshot,
};
use tonic::{Status, metadata::MetadataMap};

use crate::{
    api::Client,
    cli::RequestArgs,
    explain::{Call, CallKind},
    failure::{Exit, Failure},
    file_error::FileError,
    link::user_agent,
    output::{Output, note},
    table::printable,
    timeline::Timeline,
};

/// Maximum size of a body message, as in other implementations of this protocol.
const CHUNK: usize = 32 * 1024;

/// The source of a request body.
type Source = Box<dyn AsyncRead + Send + Unpin>;

/// A request whose body is open.
pub(crate) struct Prepared {
    args: RequestArgs,
    /// The name of the body in error messages.
    name: PathBuf,
    body: Option<Source>,
}

impl Prepared {
    /// Opens the body.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) async fn new(args: RequestArgs) -> Result<Self, Failure> {
        let (name, body): (PathBuf, Option<Source>) = match args.data.as_deref() {
            None => (PathBuf::new(), None),
            Some("@-") => ("standard input".into(), Some(Box::new(tokio::io::stdin()))),
            Some(data) => match data.strip_prefix('@') {
                None => ("the data".into(), Some(Box::new(std::io::Cursor::new(data.as_bytes().to_vec())))),
                Some(file) => {
                    let path = PathBuf::from(file);
                    match tokio::fs::File::open(&path).await {
                        Ok(file) => (path, Some(Box::new(file))),
                        Err(cause) => return Err(FileError { verb: "read", path, cause }.into()),
                    }
                }
            },
        };
        Ok(Self { args, name, body })
    }

    /// Sends the request, and prints the response as it arrives.
    ///
    /// # Errors
    /// The response is not complete. The part before has been printed.
    pub(crate) async fn run(self, client: Client, mut output: Output) -> Result<Exit, Failure> {
        let Self { args, name, body } = self;
        let safe = only_reads(&args.method, &args.target.path);
        let mut call = client.call(CallKind::Request { agent: args.agent, safe }, None);
        let mut timeline = args.explain.then(|| Timeline::new(&client));
        let (broken, mut is_broken) = oneshot::channel();
        let messages = messages(head(&args, body.is_some()), body, broken);
        let request = client.agent_request(&call, args.agent, args.connection, args.explain, messages)?;
        let silent = call.clone();
        let exchange = client.within(&silent, async {
            mark(&mut timeline, "sent the request");
            let answer = client.kubernetes().make_request(request).await;
            let answer = answer.map_err(|status| refused(&client, &call, &mut timeline, &status))?;
            mark(&mut timeline, "first byte of the response");
            read_trace(&mut timeline, answer.metadata());
            call.is_answering = true;
            let mut answer = answer.into_inner();
            let mut status = None;
            let mut complete = false;
            while let Some(message) =
                answer.message().await.map_err(|status| refused(&client, &call, &mut timeline, &status))?
            {
                match message.message {
                    Some(http_response::Message::Header(header)) if status.is_none() => {
                        let head = header.response.unwrap_or_default();
                        if args.include {
                            output.write(shown(&head).as_bytes()).await?;
                        }
                        status = Some(head);
                    }
                    Some(http_response::Message::Data(data)) if status.is_some() && !complete => {
                        output.write(&data.data).await?;
                    }
                    Some(http_response::Message::Trailer(_)) if status.is_some() && !complete => {
                        complete = true
                    }
                    _ => {
                        return Err(call.explain_broken(
                            "the messages of the response are not in the order of the protocol",
                        ));
                    }
                }
            }
            if let Ok(Some(trailers)) = answer.trailers().await {
                read_trace(&mut timeline, &trailers);
            }
            match status {
                Some(head) if complete => {
                    if let Some(timeline) = &mut timeline {
                        timeline.complete();
                    }
                    Ok(head)
                }
                _ => Err(call.explain_broken("the response ended before it was complete")),
            }
        });
        let head = tokio::select! {
            biased;
            // Dropping the exchange resets the call, so the agent does not mistake a partial body for a
            // complete one.
            Ok(cause) = &mut is_broken => return Err(FileError { verb: "read", path: name, cause }.into()),
            head = exchange => head?,
        };
        drop(timeline);
        if args.fail && head.status_code >= 400 {
            note(format_args!("the cluster answered {}", status_text(&head)));
            return Ok(Exit::HttpStatus);
        }
        Ok(Exit::Ok)
    }
}

fn mark(timeline: &mut Option<Timeline>, text: &str) {
    if let Some(timeline) = timeline {
        timeline.mark(text);
    }
}

fn read_trace(timeline: &mut Option<Timeline>, metadata: &MetadataMap) {
    if let Some(timeline) = timeline {
        timeline.read(metadata);
    }
}

/// Explains a status, and reads the trace in its metadata.
fn refused(client: &Client, call: &Call, timeline: &mut Option<Timeline>, status: &Status) -> Failure {
    read_trace(timeline, status.metadata());
    client.explain(call, status)
}

/// Returns whether a request has no effect in Kubernetes. A request that is forwarded to a program in the
/// cluster may have an effect, whatever its method is.
pub(crate) fn only_reads(method: &str, path: &str) -> bool {
    matches!(method, "GET" | "HEAD" | "OPTIONS")
        && !path.split('/').any(|part| matches!(part, "proxy" | "exec" | "attach" | "portforward"))
}

fn head(args: &RequestArgs, has_body: bool) -> prototool::HttpRequest {
    let mut header: BTreeMap<String, Values> = BTreeMap::new();
    for given in &args.headers {
        header.entry(given.name.clone()).or_default().value.push(given.value.clone());
    }
    let mut default = |name: &str, value: &str| {
        header.entry(name.to_owned()).or_insert_with(|| Values { value: vec![value.to_owned()] });
    };
    default("User-Agent", &user_agent());
    if has_body {
        default("Content-Type", "application/json");
    }
    prototool::HttpRequest {
        method: args.method.clone(),
        header,
        url_path: args.target.path.clone(),
        query: args.target.query.clone(),
    }
}

/// The next message of a request.
enum Next {
    Head(prototool::HttpRequest, Option<Source>, oneshot::Sender<std::io::Error>),
    Body(Source, oneshot::Sender<std::io::Error>),
    Trailer,
    End,
}

/// Returns the messages of a request: a head, the body in pieces as it is read, and a trailer.
///
/// If the body cannot be read, the error is sent to `broken`, and the stream does not end: its end would look
/// like the end of the body.
fn messages(
    head: prototool::HttpRequest,
    body: Option<Source>,
    broken: oneshot::Sender<std::io::Error>,
) -> impl Stream<Item = HttpRequest> + Send + 'static {
    let message = |message| HttpRequest { message: Some(message) };
    stream::unfold(Next::Head(head, body, broken), move |next| async move {
        match next {
            Next::Head(request, body, broken) => {
                let head = http_request::Header {
                    request: Some(request),
                    extra: None,
                    // The length of a file or pipe is only known after reading it.
                    content_length: body.is_none().then_some(0),
                    ..Default::default()
                };
                let next = body.map_or(Next::Trailer, |body| Next::Body(body, broken));
                Some((message(http_request::Message::Header(head)), next))
            }
            Next::Body(mut body, broken) => match read(&mut body).await {
                Ok(data) if data.is_empty() => {
                    Some((message(http_request::Message::Trailer(http_request::Trailer {})), Next::End))
                }
                Ok(data) => {
                    let data = http_request::Data { data };
                    Some((message(http_request::Message::Data(data)), Next::Body(body, broken)))
                }
                Err(e) => {
                    let _ = broken.send(e);
                    std::future::pending().await
                }
            },
            Next::Trailer => {
                Some((message(http_request::Message::Trailer(http_request::Trailer {})), Next::End))
            }
            Next::End => None,
        }
    })
}

async fn read(body: &mut Source) -> std::io::Result<Bytes> {
    let mut chunk = BytesMut::with_capacity(CHUNK).limit(CHUNK);
    body.read_buf(&mut chunk).await?;
    Ok(chunk.into_inner().freeze())
}

fn status_text(head: &prototool::HttpResponse) -> String {
    if head.status.is_empty() { head.status_code.to_string() } else { printable(&head.status) }
}

/// Returns the status line and the headers as text, with an empty line behind them.
fn shown(head: &prototool::HttpResponse) -> String {
    let mut text = format!("HTTP {}\n", status_text(head));
    for (name, values) in &head.header {
        for value in &values.value {
            text.push_str(&format!("{}: {}\n", printable(name), printable(value)));
        }
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    #[tokio::test]
    async fn body_is_cut_into_chunks_and_ends_with_a_trailer() {
        let body: Source = Box::new(std::io::Cursor::new(vec![7; 2 * CHUNK + 1]));
        let (broken, _is_broken) = oneshot::channel();
        let sent: Vec<_> = messages(prototool::HttpRequest::default(), Some(body), broken).collect().await;
        let sizes: Vec<Option<usize>> = sent
            .iter()
            .map(|message| match message.message.as_ref().unwrap() {
                http_request::Message::Data(data) => Some(data.data.len()),
                _ => None,
            })
            .collect();
        assert_eq!(sizes, [None, Some(CHUNK), Some(CHUNK), Some(1), None]);
        assert!(matches!(sent[0].message, Some(http_request::Message::Header(_))));
        assert!(matches!(sent[4].message, Some(http_request::Message::Trailer(_))));
    }

    #[tokio::test]
    async fn a_broken_body_is_reported_and_never_looks_complete() {
        struct Breaks;
        impl AsyncRead for Breaks {
            fn poll_read(
                self: std::pin::Pin<&mut Self>,
                _: &mut std::task::Context<'_>,
                _: &mut tokio::io::ReadBuf<'_>,
            ) -> std::task::Poll<std::io::Result<()>> {
                std::task::Poll::Ready(Err(std::io::ErrorKind::PermissionDenied.into()))
            }
        }
        let (broken, mut is_broken) = oneshot::channel();
        let mut sent = Box::pin(messages(prototool::HttpRequest::default(), Some(Box::new(Breaks)), broken));
        assert!(matches!(sent.next().await.unwrap().message, Some(http_request::Message::Header(_))));
        tokio::select! {
            biased;
            next = sent.next() => panic!("{next:?}"),
            cause = &mut is_broken => assert_eq!(cause.unwrap().kind(), std::io::ErrorKind::PermissionDenied),
        }
    }

    #[test]
    fn read_only_requests_are_recognized_by_method_and_path() {
        for path in ["/version", "/api/v1/pods", "/api/v1/namespaces/a/pods/b/log"] {
            for method in ["GET", "HEAD", "OPTIONS"] {
                assert!(only_reads(method, path), "{method} {path}");
            }
            for method in ["POST", "PUT", "PATCH", "DELETE", "CONNECT"] {
                assert!(!only_reads(method, path), "{method} {path}");
            }
        }
        for path in ["/api/v1/namespaces/a/services/b/proxy/delete", "/api/v1/namespaces/a/pods/b/exec"] {
            assert!(!only_reads("GET", path), "{path}");
        }
    }

    #[test]
    fn response_headers_cannot_move_the_cursor() {
        let head = prototool::HttpResponse {
            status_code: 200,
            status: "200 OK".to_owned(),
            header: BTreeMap::from([(
                "X-A".to_owned(),
                Values { value: vec!["1".to_owned(), "\u{1b}[2J".to_owned()] },
            )]),
        };
        assert_eq!(shown(&head), "HTTP 200 OK\nX-A: 1\nX-A: \\u{1b}[2J\n\n");
    }
}
