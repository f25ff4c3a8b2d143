//! Runs a load of HTTP requests, directly or through kas.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body::Body;
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, http_request, http_response},
    prototool::{self, Values},
};
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tunnel::frame::{Decoder, Event};

use super::{
    agents,
    call::{LoadState, Outgoing, RUN, STOP, Sender, Signer, Upload, handshake, head},
    load::{CALL, measure},
    protocol::{
        Access, ClientCommand, EVENT, HttpLoad, HttpServer, HttpTarget, HttpWork, Loaded, STAMP, Span, UNIT,
    },
    static_server,
};

/// The largest piece of a body in one message: what all versions of kas and agentk accept, and what GitLab
/// sends.
const CHUNK: u64 = 32 * 1024;

/// Field numbers of `HttpResponse`.
const HEADER: u32 = 1;
const DATA: u32 = 2;
const TRAILER: u32 = 3;

/// Headers of all requests.
const HEADERS: [(&str, &str); 2] = [("User-Agent", "bench"), ("Accept", "application/json")];

/// A connection. One of HTTP/1.1 belongs to one caller.
enum Link {
    Http1(Option<http1::SendRequest<Outgoing>>),
    Http2(Sender),
}

/// The requests of a load, which are all the same.
struct Template {
    work: HttpWork,
    address: SocketAddr,
    tls: Option<Arc<rustls::ClientConfig>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Content,
    /// Signs the tokens of requests through kas; `None`: requests are direct.
    signer: Option<Signer>,
    shared: Arc<LoadState>,
}

/// The body of a request.
enum Content {
    Whole(Option<Bytes>),
    Upload(Upload),
}

impl Template {
    fn new(load: &HttpLoad, shared: &Arc<LoadState>) -> anyhow::Result<Self> {
        if let HttpWork::Up(size) = load.work {
            ensure!(size % UNIT == 0, "an upload of {size} bytes is not a multiple of {UNIT}");
        }
        let (method, path) = static_server::request(load.work);
        let shared = Arc::clone(shared);
        match &load.target {
            HttpTarget::Http { server, http2 } => {
                Self::http(load.work, server, *http2, method, &path, shared)
            }
            HttpTarget::Kas { address, metadata } => {
                let (parts, ()) = head(*address, http_tunnel::METHOD)?.body(())?.into_parts();
                let mut headers = parts.headers;
                headers.insert(HeaderName::from_static("kas-agent-id"), metadata.agent.into());
                Ok(Self {
                    work: load.work,
                    address: *address,
                    tls: None,
                    method: parts.method,
                    uri: parts.uri,
                    headers,
                    body: tunnelled(load.work, &method, path, &shared),
                    signer: Some(Signer::start(&metadata.secret_file, metadata.tokens)?),
                    shared,
                })
            }
        }
    }

    fn http(
        work: HttpWork,
        server: &HttpServer,
        http2: bool,
        method: Method,
        path: &str,
        shared: Arc<LoadState>,
    ) -> anyhow::Result<Self> {
        let HttpServer { address, ca_file, access } = server;
        let (address, ca_file) = (*address, ca_file.as_deref());
        let path = format!("{}{path}", Access::prefix(access.as_ref()));
        let mut headers = HeaderMap::new();
        if let Some(access) = access {
            headers.insert(header::AUTHORIZATION, HeaderValue::try_from(access.authorization())?);
        }
        for (name, value) in HEADERS {
            headers.insert(HeaderName::try_from(name)?, HeaderValue::from_static(value));
        }
        let scheme = if ca_file.is_some() { "https" } else { "http" };
        let uri = if http2 {
            format!("{scheme}://{address}{path}")
        } else {
            headers.insert(header::HOST, HeaderValue::try_from(address.to_string())?);
            path
        };
        let body = match work {
            HttpWork::Up(size) => {
                headers.insert(header::CONTENT_LENGTH, size.into());
                Content::Upload(Upload {
                    first: None,
                    piece: vec![b'x'; UNIT as usize].into(),
                    pieces: size / UNIT,
                    payload: UNIT,
                    last: None,
                    shared: Arc::clone(&shared),
                })
            }
            _ => Content::Whole(None),
        };
        let tls = agents::tls(ca_file, if http2 { b"h2" } else { b"http/1.1" })?;
        Ok(Self { work, address, tls, method, uri: uri.try_into()?, headers, body, signer: None, shared })
    }

    async fn connect(&self, http2: bool) -> anyhow::Result<Link> {
        let address = self.address;
        let stream =
            TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => link(stream, http2).await,
            Some(tls) => {
                let tls = tokio_rustls::TlsConnector::from(Arc::clone(tls));
                link(tls.connect(ServerName::from(address.ip()), stream).await?, http2).await
            }
        }
    }

    fn request(&self) -> Request<Outgoing> {
        let mut request = Request::new(match &self.body {
            Content::Whole(data) => Outgoing::Once(data.clone()),
            Content::Upload(upload) => Outgoing::Upload(upload.clone()),
        });
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        if let Some(signer) = &self.signer {
            request.headers_mut().insert(header::AUTHORIZATION, signer.header());
        }
        request
    }
}

async fn link(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    http2: bool,
) -> anyhow::Result<Link> {
    if http2 {
        return Ok(Link::Http2(handshake(stream).await?));
    }
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(Link::Http1(Some(sender)))
}

/// Returns the messages of a request through kas.
fn tunnelled(work: HttpWork, method: &Method, path: String, shared: &Arc<LoadState>) -> Content {
    let message = |message| HttpRequest { message: Some(message) };
    let size = if let HttpWork::Up(size) = work { size } else { 0 };
    let header = http_request::Header {
        request: Some(prototool::HttpRequest {
            method: method.to_string(),
            header: HEADERS
                .map(|(name, value)| (name.to_owned(), Values { value: vec![value.to_owned()] }))
                .into(),
            url_path: path,
            ..prototool::HttpRequest::default()
        }),
        content_length: i64::try_from(size).ok(),
        ..http_request::Header::default()
    };
    let mut first = BytesMut::new();
    grpc::encode_into(&message(http_request::Message::Header(header)), &mut first);
    let last = message(http_request::Message::Trailer(http_request::Trailer {}));
    if size == 0 {
        grpc::encode_into(&last, &mut first);
        return Content::Whole(Some(first.freeze()));
    }
    let data = http_request::Data { data: vec![b'x'; CHUNK as usize].into() };
    Content::Upload(Upload {
        first: Some(first.freeze()),
        piece: grpc::encode(&message(http_request::Message::Data(data))),
        pieces: size / CHUNK,
        payload: CHUNK,
        last: Some(grpc::encode(&last)),
        shared: Arc::clone(shared),
    })
}

/// Reads the body of a response.
struct Reader<B> {
    body: B,
    /// For a response through kas.
    messages: Option<Messages>,
}

/// The messages of a response through kas.
struct Messages {
    decoder: Decoder,
    has_header: bool,
    is_complete: bool,
}

impl Default for Messages {
    fn default() -> Self {
        Self { decoder: Decoder::new(DATA, TRAILER, false), has_header: false, is_complete: false }
    }
}

impl Messages {
    /// Returns the next data of the body; `None`: more messages are needed.
    fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        loop {
            match self.decoder.next()? {
                Some(Event::Control { field: HEADER, body }) if !self.has_header => {
                    let response = http_response::Header::decode(body)?.response.unwrap_or_default();
                    ensure!(response.status_code == 200, "the server answered {}", response.status);
                    self.has_header = true;
                }
                Some(Event::Control { field: TRAILER, .. }) if self.has_header => self.is_complete = true,
                Some(Event::Message { .. }) if self.has_header && !self.is_complete => {}
                Some(Event::Data(data)) => return Ok(Some(data)),
                Some(event) => bail!("unexpected message: {event:?}"),
                None => return Ok(None),
            }
        }
    }
}

impl<B> Reader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    /// Returns the next data; `None` at the end of a complete response.
    async fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        loop {
            if let Some(messages) = &mut self.messages
                && let Some(data) = messages.next()?
            {
                return Ok(Some(data));
            }
            let Some(frame) = self.body.frame().await else {
                ensure!(self.body.is_end_stream(), "the response was reset");
                ensure!(self.messages.is_none(), "the response ended without a status");
                return Ok(None);
            };
            match (
                frame.map_err(|error| anyhow::Error::from_boxed(error.into()))?.into_data(),
                &mut self.messages,
            ) {
                (Ok(data), Some(messages)) => messages.decoder.push(data),
                (Ok(data), None) => return Ok(Some(data)),
                (Err(trailers), Some(messages)) => {
                    let status = trailers.trailers_ref().and_then(grpc::Status::from_headers);
                    let status = status.context("trailers without a status")?;
                    ensure!(status.code() == grpc::Code::Ok, "kas answered {status}");
                    ensure!(messages.is_complete, "the response is not complete");
                    return Ok(None);
                }
                (Err(_), None) => {}
            }
        }
    }
}

/// Finds the beginnings of events in the pieces of a body.
#[derive(Default)]
struct Events {
    /// Bytes of the current event that were read.
    at: usize,
    stamp: Vec<u8>,
}

impl Events {
    /// Reads a piece. Calls `made` with the time of each event of which the whole stamp was read.
    fn read(&mut self, mut data: Bytes, mut made: impl FnMut(Duration)) -> anyhow::Result<()> {
        while !data.is_empty() {
            let until = if self.at < STAMP { STAMP } else { EVENT };
            let len = data.len().min(until - self.at);
            if self.at < STAMP {
                self.stamp.extend_from_slice(&data[..len]);
            }
            data.advance(len);
            self.at += len;
            if self.at == STAMP && !self.stamp.is_empty() {
                let stamp = std::str::from_utf8(&self.stamp).ok().and_then(|stamp| stamp.parse().ok());
                made(Duration::from_nanos(stamp.context("an event does not begin with its time")?));
                self.stamp.clear();
            }
            if self.at == EVENT {
                self.at = 0;
            }
        }
        Ok(())
    }
}

/// A caller of a load.
struct Caller {
    template: Arc<Template>,
    link: Link,
}

impl Caller {
    async fn begin(&mut self) -> anyhow::Result<Reader<Incoming>> {
        let request = self.template.request();
        let response = match &mut self.link {
            Link::Http1(slot) => {
                if slot.as_ref().is_none_or(http1::SendRequest::is_closed)
                    && let Link::Http1(sender) = self.template.connect(false).await?
                {
                    *slot = sender;
                }
                let sender = slot.as_mut().context("no connection")?;
                sender.ready().await?;
                sender.send_request(request).await?
            }
            Link::Http2(sender) => {
                let mut sender = sender.clone();
                sender.ready().await?;
                sender.send_request(request).await?
            }
        };
        let is_tunnelled = self.template.signer.is_some();
        if is_tunnelled && let Some(status) = grpc::Status::from_headers(response.headers()) {
            bail!("kas answered {status}");
        }
        ensure!(response.status() == StatusCode::OK, "answered {}", response.status());
        Ok(Reader { body: response.into_body(), messages: is_tunnelled.then(Messages::default) })
    }

    /// Makes one request, and checks that the response is the whole one.
    async fn exchange(&mut self) -> anyhow::Result<()> {
        let work = self.template.work;
        let mut answer = self.begin().await?;
        let mut size = 0;
        let mut text = Vec::new();
        while let Some(data) = answer.next().await? {
            size += data.len() as u64;
            match work {
                HttpWork::Down(_) => {
                    self.template.shared.bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
                }
                HttpWork::Up(_) => text.extend_from_slice(&data),
                _ => {}
            }
        }
        match work {
            HttpWork::Up(sent) => {
                ensure!(
                    text == sent.to_string().as_bytes(),
                    "the server has read {} bytes of {sent}",
                    String::from_utf8_lossy(&text)
                );
            }
            HttpWork::Get(expected) => {
                ensure!(size == u64::from(expected), "a response of {size} bytes instead of {expected}");
            }
            HttpWork::Down(expected) => {
                ensure!(size == expected, "a response of {size} bytes instead of {expected}");
            }
            HttpWork::Events | HttpWork::PacedEvents(_) | HttpWork::NoEvents => bail!("the events ended"),
        }
        Ok(())
    }

    /// Makes one request after another. Returns the latencies of those that ended during the measurement.
    async fn requests(mut self) -> Vec<Duration> {
        let shared = Arc::clone(&self.template.shared);
        let mut times = Vec::new();
        while shared.phase() != STOP && shared.budget.fetch_sub(1, Ordering::Relaxed) > 0 {
            let begin = Instant::now();
            let result = timeout(CALL, self.exchange()).await;
            match result.unwrap_or_else(|_| Err(anyhow::anyhow!("no response within {CALL:?}"))) {
                Ok(()) if shared.phase() == RUN => times.push(begin.elapsed()),
                Ok(()) => {}
                Err(error) => {
                    shared.fail(&error);
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
        times
    }

    /// Reads events. Returns the delays of those that arrived during the measurement.
    async fn watch(mut self) -> Vec<Duration> {
        let shared = Arc::clone(&self.template.shared);
        let mut delays = Vec::new();
        if let Err(error) = self.events(&mut delays).await {
            shared.fail(&error);
        }
        delays
    }

    async fn events(&mut self, delays: &mut Vec<Duration>) -> anyhow::Result<()> {
        let shared = Arc::clone(&self.template.shared);
        let is_paced = matches!(self.template.work, HttpWork::PacedEvents(_));
        let mut answer = timeout(CALL, self.begin()).await??;
        let mut events = Events::default();
        // Dropping the response at the end cancels the request.
        while shared.phase() != STOP {
            let data = timeout(CALL, answer.next()).await??.context("the events ended")?;
            shared.bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
            let counts = is_paced && shared.phase() == RUN;
            let now = process::clock::wall();
            events.read(data, |made| {
                if counts {
                    delays.push(now.saturating_sub(made));
                }
            })?;
        }
        Ok(())
    }
}

/// Runs a load. Prints [`ClientEvent::Begin`](super::protocol::ClientEvent::Begin) and
/// [`ClientEvent::End`](super::protocol::ClientEvent::End) around its measured part.
pub(super) async fn run(
    load: &HttpLoad,
    commands: &mut mpsc::Receiver<ClientCommand>,
) -> anyhow::Result<Loaded> {
    let is_events = matches!(load.work, HttpWork::Events | HttpWork::PacedEvents(_) | HttpWork::NoEvents);
    ensure!(!is_events || matches!(load.span, Span::Time { .. }), "events do not end");
    let shared = Arc::new(LoadState::default());
    let template = Arc::new(Template::new(load, &shared)?);
    let is_http2 = !matches!(load.target, HttpTarget::Http { http2: false, .. });
    let mut senders = Vec::new();
    for _ in 0..if is_http2 { load.connections } else { 0 } {
        if let Link::Http2(sender) = template.connect(true).await? {
            senders.push(sender);
        }
    }
    let callers = || -> anyhow::Result<JoinSet<Vec<Duration>>> {
        let mut tasks = JoinSet::new();
        for index in 0..load.callers {
            let link = match senders.get(index % senders.len().max(1)) {
                Some(sender) => Link::Http2(sender.clone()),
                None => Link::Http1(None),
            };
            let caller = Caller { template: Arc::clone(&template), link };
            if is_events {
                tasks.spawn(caller.watch());
            } else {
                tasks.spawn(caller.requests());
            }
        }
        Ok(tasks)
    };
    let (mut loaded, times) = measure(load.span, &shared, commands, callers, ()).await?;
    match load.work {
        HttpWork::Get(size) => {
            loaded.done = times.len() as u64;
            loaded.bytes = loaded.done * u64::from(size);
        }
        HttpWork::Down(_) | HttpWork::Up(_) => loaded.done = loaded.bytes / UNIT,
        HttpWork::Events => loaded.done = loaded.bytes / EVENT as u64,
        HttpWork::PacedEvents(_) => loaded.done = times.len() as u64,
        HttpWork::NoEvents => {}
    }
    Ok(loaded)
}

/// A response that is open.
pub(super) struct OpenResponse {
    _reader: Reader<Incoming>,
    /// Its connection.
    _link: Link,
}

/// Opens watches without events over HTTP/2, `each` of them on every connection.
pub(super) async fn open_watches(
    server: &HttpServer,
    count: usize,
    each: usize,
) -> anyhow::Result<Vec<OpenResponse>> {
    let load = HttpLoad {
        target: HttpTarget::Http { server: server.clone(), http2: true },
        work: HttpWork::NoEvents,
        connections: 1,
        callers: 1,
        span: Span::Time { warm: 0, run: 0 },
    };
    let template = Arc::new(Template::new(&load, &Arc::new(LoadState::default()))?);
    let mut open = Vec::with_capacity(count);
    let mut sender = None;
    for number in 0..count {
        if number % each.max(1) == 0 {
            let Link::Http2(new) = template.connect(true).await? else { bail!("it is not HTTP/2") };
            sender = Some(new);
        }
        let link = || anyhow::Ok(Link::Http2(sender.clone().context("no connection")?));
        let mut caller = Caller { template: Arc::clone(&template), link: link()? };
        let reader = timeout(CALL, caller.begin()).await??;
        open.push(OpenResponse { _reader: reader, _link: link()? });
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use http_body::Frame;
    use http_body_util::StreamBody;
    use proto::gitlab::agent::grpctool::HttpResponse;

    use super::*;
    use crate::static_server::tests::start;

    const SIZE: u64 = 3 * UNIT;

    fn server(address: SocketAddr) -> HttpServer {
        HttpServer { address, ca_file: None, access: None }
    }

    #[tokio::test]
    async fn requests_of_both_versions_are_complete() {
        let [first, second] = start().await;
        for (address, http2) in [(first, false), (second, true)] {
            for (work, done) in
                [(HttpWork::Get(1_000), 6), (HttpWork::Down(SIZE), 6 * 3), (HttpWork::Up(SIZE), 6 * 3)]
            {
                let (go, mut commands) = mpsc::channel(1);
                go.send(ClientCommand::Go).await.unwrap();
                let load = HttpLoad {
                    target: HttpTarget::Http { server: server(address), http2 },
                    work,
                    connections: 2,
                    callers: 3,
                    span: Span::Count { warm: 3, run: 6 },
                };
                let loaded = run(&load, &mut commands).await.unwrap();
                assert_eq!((loaded.why, loaded.failed, loaded.done), (None, 0, done), "{work:?} {http2}");
            }
        }
    }

    #[tokio::test]
    async fn response_of_another_size_is_a_failure() {
        let [address, _] = start().await;
        let load = HttpLoad {
            target: HttpTarget::Http { server: server(address), http2: false },
            work: HttpWork::Get(1_000),
            connections: 1,
            callers: 1,
            span: Span::Time { warm: 0, run: 0 },
        };
        let shared = Arc::new(LoadState::default());
        let mut template = Template::new(&load, &shared).unwrap();
        template.uri = Uri::from_static("/files/999");
        let mut caller = Caller { template: Arc::new(template), link: Link::Http1(None) };
        let said = caller.exchange().await.unwrap_err().to_string();
        assert_eq!(said, "a response of 999 bytes instead of 1000");
    }

    fn response(size: usize, trailer: bool) -> Vec<u8> {
        use http_response::Message;
        let mut out = BytesMut::new();
        let mut add = |message| grpc::encode_into(&HttpResponse { message: Some(message) }, &mut out);
        let head = prototool::HttpResponse { status_code: 200, ..Default::default() };
        add(Message::Header(http_response::Header { response: Some(head) }));
        add(Message::Data(http_response::Data { data: vec![b'x'; size].into() }));
        if trailer {
            add(Message::Trailer(http_response::Trailer {}));
        }
        out.to_vec()
    }

    async fn read(bytes: &[u8], split: usize, status: &'static str) -> anyhow::Result<usize> {
        let (one, two) = bytes.split_at(split);
        let trailers = HeaderMap::from_iter([(
            HeaderName::from_static("grpc-status"),
            HeaderValue::from_static(status),
        )]);
        let frames = [
            Frame::data(Bytes::copy_from_slice(one)),
            Frame::data(Bytes::copy_from_slice(two)),
            Frame::trailers(trailers),
        ];
        let body = StreamBody::new(stream::iter(frames.map(Ok::<_, grpc::BoxError>)));
        let mut reader = Reader { body, messages: Some(Messages::default()) };
        let mut size = 0;
        while let Some(data) = reader.next().await? {
            size += data.len();
        }
        Ok(size)
    }

    #[tokio::test]
    async fn response_through_kas_is_read_at_every_split_and_must_be_complete() {
        let whole = response(300, true);
        for split in 0..=whole.len() {
            assert_eq!(read(&whole, split, "0").await.unwrap(), 300);
        }
        let said = read(&response(300, false), 1, "0").await.unwrap_err().to_string();
        assert_eq!(said, "the response is not complete");
        let said = read(&whole, 1, "14").await.unwrap_err().to_string();
        assert!(said.starts_with("kas answered"), "{said}");
    }

    #[tokio::test]
    async fn request_through_kas_is_complete() {
        let shared = Arc::new(LoadState::default());
        let body = tunnelled(HttpWork::Up(SIZE), &Method::PUT, "/uploads".to_owned(), &shared);
        let Content::Upload(upload) = body else { panic!("no upload") };
        let mut reader = grpc::MessageReader::new(Outgoing::Upload(upload), 1 << 20);
        let (mut announced, mut size, mut ends) = (None, 0, 0);
        while let Some(message) = reader.next().await.unwrap() {
            match HttpRequest::decode(message).unwrap().message.unwrap() {
                http_request::Message::Header(header) => announced = header.content_length,
                http_request::Message::Data(data) => size += data.data.len() as u64,
                http_request::Message::Trailer(_) => ends += 1,
                message @ http_request::Message::UpgradeData(_) => panic!("{message:?}"),
            }
        }
        assert_eq!((announced, size, ends), (Some(SIZE as i64), SIZE, 1));
        assert_eq!(shared.bytes.load(Ordering::Relaxed), SIZE);
    }

    #[test]
    fn events_are_found_at_every_split() {
        let mut two = Vec::new();
        for made in [7, 8] {
            two.extend_from_slice(format!("{made:0STAMP$}").as_bytes());
            two.resize(two.len() + EVENT - STAMP, b'x');
        }
        for split in 0..=two.len() {
            let mut events = Events::default();
            let mut times = Vec::new();
            for piece in [&two[..split], &two[split..]] {
                events.read(Bytes::copy_from_slice(piece), |made| times.push(made.as_nanos())).unwrap();
            }
            assert_eq!(times, [7, 8], "{split}");
        }
        let wrong = Bytes::copy_from_slice(&two[1..]);
        Events::default().read(wrong.slice(EVENT - 30..), |_| ()).unwrap_err();
    }
}
