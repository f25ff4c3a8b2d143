//! Both ends of a request through a balancer: the client, and the API server that the test plays. So the test
//! decides when each part is sent, and sees when it arrives.

use std::{convert::Infallible, fmt::Write as _, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::{FutureExt as _, stream};
use http::{Method, Request, StatusCode, header, response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::{
    endpoint::JANE,
    http1::{Head, put_chunk, read_head},
    process::SOON,
    proxy::Proxy,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::timeout,
};
use tungstenite::handshake::derive_accept_key;

/// The key of every handshake of WebSocket here: the example of RFC 6455.
const WEBSOCKET_KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";

/// Waits for `future`, but not longer than anything takes.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    within_time(what, SOON, future).await
}

/// Waits for `future`, but not longer than this.
pub(crate) async fn within_time<T>(
    what: &str,
    limit: Duration,
    future: impl Future<Output = T>,
) -> Result<T> {
    timeout(limit, future).await.with_context(|| format!("{what}: not within {limit:?}"))
}

/// The protocol between client and balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    pub(crate) const BOTH: [Self; 2] = [Self::Http1, Self::Http2];

    /// Where a proxy accepts it.
    fn address(self, proxy: &Proxy) -> SocketAddr {
        match self {
            Self::Http1 => proxy.address,
            Self::Http2 => proxy.http2,
        }
    }
}

/// A request that a client sends.
pub(crate) struct Asked {
    method: Method,
    target: String,
    headers: Vec<(header::HeaderName, String)>,
    body: UnsyncBoxBody<Bytes, Infallible>,
}

impl Asked {
    /// A GET of a path of agent 1, with its query.
    pub(crate) fn get(target: &str) -> Self {
        Self {
            method: Method::GET,
            target: format!("/agents/1{target}"),
            headers: Vec::new(),
            body: Empty::new().boxed_unsync(),
        }
    }

    /// A POST with a body of this length, which is sent through the channel.
    pub(crate) fn post(target: &str, length: usize) -> (Self, mpsc::Sender<Bytes>) {
        let (parts, body) = mpsc::channel(1);
        let body = stream::unfold(body, |mut body| async {
            body.recv().await.map(|part| (Ok(Frame::data(part)), body))
        });
        let asked = Self {
            method: Method::POST,
            headers: vec![(header::CONTENT_LENGTH, length.to_string())],
            body: StreamBody::new(body).boxed_unsync(),
            ..Self::get(target)
        };
        (asked, parts)
    }

    /// Says that it comes from a page of the host that it is sent to, as some libraries do.
    pub(crate) fn with_own_origin(mut self, proxy: &Proxy, protocol: Protocol) -> Self {
        self.headers.push((header::ORIGIN, format!("http://{}", protocol.address(proxy))));
        self
    }

    /// Sends it on a new connection.
    pub(crate) fn send(self, proxy: &Proxy, protocol: Protocol) -> Pending {
        let mut exchange = JoinSet::new();
        exchange.spawn(self.exchange(protocol.address(proxy), protocol));
        Pending { exchange }
    }

    async fn exchange(self, address: SocketAddr, protocol: Protocol) -> Result<Answer> {
        let stream = TokioIo::new(TcpStream::connect(address).await?);
        let mut request = Request::builder().method(self.method);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        let request = request.header(header::AUTHORIZATION, format!("Bearer {JANE}"));
        let mut connection = JoinSet::new();
        let response = match protocol {
            Protocol::Http1 => {
                let (mut sender, driver) = http1::handshake(stream).await?;
                connection.spawn(driver);
                let request = request.uri(self.target).header(header::HOST, address.to_string());
                sender.send_request(request.body(self.body)?).await?
            }
            Protocol::Http2 => {
                let (mut sender, driver) = http2::handshake(TokioExecutor::new(), stream).await?;
                connection.spawn(driver);
                let request = request.uri(format!("http://{address}{}", self.target));
                sender.send_request(request.body(self.body)?).await?
            }
        };
        let (head, body) = response.into_parts();
        Ok(Answer { head, body, read: Vec::new(), _connection: connection })
    }
}

/// A request whose response has not begun. Dropping it closes its connection.
pub(crate) struct Pending {
    exchange: JoinSet<Result<Answer>>,
}

impl Pending {
    /// Waits for the head of the response.
    pub(crate) async fn answer(mut self) -> Result<Answer> {
        within("the head of a response", self.exchange.join_next()).await?.context("it was sent")??
    }

    /// Returns the response if its head has come.
    pub(crate) fn answer_now(&mut self) -> Result<Option<Answer>> {
        self.exchange.join_next().now_or_never().flatten().map(|joined| joined?).transpose()
    }
}

/// A response whose head has come. Dropping it closes its connection.
pub(crate) struct Answer {
    pub(crate) head: response::Parts,
    body: Incoming,
    /// What has come of the body and was not read yet.
    read: Vec<u8>,
    _connection: JoinSet<hyper::Result<()>>,
}

impl Answer {
    pub(crate) fn status(&self) -> StatusCode {
        self.head.status
    }

    /// Reads these bytes, which come next.
    pub(crate) async fn reads(&mut self, expected: &[u8]) -> Result<()> {
        while self.read.len() < expected.len() {
            let what = format!("{:?}", String::from_utf8_lossy(expected));
            let frame = within(&what, self.body.frame()).await?;
            let frame = frame.with_context(|| format!("it ended before {what}"))??;
            self.read.extend_from_slice(&frame.into_data().unwrap_or_default());
        }
        let rest = self.read.split_off(expected.len());
        let got = std::mem::replace(&mut self.read, rest);
        ensure!(got == expected, "{:?}", String::from_utf8_lossy(&got));
        Ok(())
    }

    /// Whether something of the body, or its end, has come.
    pub(crate) fn has_come(&mut self) -> bool {
        !self.read.is_empty() || self.body.frame().now_or_never().is_some()
    }

    /// Reads to the regular end of the body.
    ///
    /// # Errors
    /// If it was cut.
    pub(crate) async fn rest(mut self) -> Result<Vec<u8>> {
        while let Some(frame) = within("the end of a body", self.body.frame()).await? {
            self.read.extend_from_slice(&frame?.into_data().unwrap_or_default());
        }
        Ok(self.read)
    }

    /// Reads to the end of a body that is not complete, and returns whether the client can see that.
    pub(crate) async fn shows_cut(mut self, limit: Duration) -> Result<bool> {
        loop {
            match within_time("the cut of a body", limit, self.body.frame()).await? {
                Some(Ok(_)) => {}
                Some(Err(_)) => return Ok(true),
                None => return Ok(false),
            }
        }
    }
}

/// The API server of agentk: each request comes on a connection of its own.
pub(crate) struct ApiServer {
    listener: TcpListener,
}

impl ApiServer {
    pub(crate) async fn start() -> Result<Self> {
        Ok(Self { listener: TcpListener::bind("127.0.0.1:0").await? })
    }

    pub(crate) fn url(&self) -> Result<String> {
        Ok(format!("http://{}", self.listener.local_addr()?))
    }

    /// Waits for the next request, which must be this one.
    pub(crate) async fn next(&self, method: &str, target: &str) -> Result<Served> {
        let next = async {
            let mut stream = BufReader::new(self.listener.accept().await?.0);
            let head = read_head(&mut stream).await?.context("the connection has no request")?;
            anyhow::Ok(Served { head, stream })
        };
        let served = within(target, next).await??;
        let expected = format!("{method} {target} HTTP/1.1");
        ensure!(served.head.line == expected, "{:?} instead of {expected:?}", served.head.line);
        Ok(served)
    }
}

/// A request at the API server.
pub(crate) struct Served {
    pub(crate) head: Head,
    stream: BufReader<TcpStream>,
}

impl Served {
    /// Reads so many bytes of the body.
    pub(crate) async fn upload(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut body = vec![0; length];
        within("the body of a request", self.stream.read_exact(&mut body)).await??;
        Ok(body)
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(within("the API server writes", self.stream.write_all(bytes)).await??)
    }

    /// Begins a response whose body comes later.
    pub(crate) async fn begin(&mut self, content_type: &str) -> Result<()> {
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        );
        self.write(head.as_bytes()).await
    }

    /// Sends a part of the body.
    pub(crate) async fn part(&mut self, data: &[u8]) -> Result<()> {
        let mut chunk = Vec::new();
        put_chunk(&mut chunk, data);
        self.write(&chunk).await
    }

    /// Ends the response. Dropping it breaks it off.
    pub(crate) async fn end(mut self) -> Result<()> {
        self.write(b"0\r\n\r\n").await
    }

    /// Sends a whole response.
    pub(crate) async fn whole(mut self, status: &str, body: &str) -> Result<()> {
        let response = format!(
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.write(response.as_bytes()).await
    }

    /// Sends parts of a response that begins here, until nobody takes them any more.
    pub(crate) async fn pour(mut self) {
        let mut chunk = Vec::new();
        put_chunk(&mut chunk, &[b'x'; 32 * 1024]);
        while self.stream.write_all(&chunk).await.is_ok() {}
    }
}

/// Opens a connection and asks for an upgrade to WebSocket (by GET) or SPDY (by POST), as kubectl does.
pub(crate) async fn ask_for_upgrade(
    proxy: &Proxy,
    token: &str,
    target: &str,
) -> Result<BufReader<TcpStream>> {
    let (method, headers) = if token == "websocket" {
        let headers = format!(
            "Sec-WebSocket-Key: {WEBSOCKET_KEY}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: \
             v5.channel.k8s.io\r\n"
        );
        ("GET", headers)
    } else {
        ("POST", "X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n".to_owned())
    };
    let request = format!(
        "{method} /agents/1{target} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {JANE}\r\nConnection: Upgrade\r\nUpgrade: \
         {token}\r\n{headers}\r\n",
        proxy.address
    );
    let mut client = TcpStream::connect(proxy.address).await?;
    client.write_all(request.as_bytes()).await?;
    Ok(BufReader::new(client))
}

/// Reads the head of the response to that.
pub(crate) async fn head_of(client: &mut BufReader<TcpStream>) -> Result<Head> {
    let head = within("the head of a response", read_head(client)).await??;
    head.context("the balancer has closed the connection without a response")
}

/// Both ends of an upgraded connection.
pub(crate) struct Upgraded {
    client: BufReader<TcpStream>,
    api_server: BufReader<TcpStream>,
}

impl Upgraded {
    /// Opens one through a proxy.
    pub(crate) async fn open(proxy: &Proxy, api_server: &ApiServer, token: &str) -> Result<Self> {
        let target = "/api/v1/namespaces/a/pods/b/exec?command=sh&stdin=true";
        let mut client = ask_for_upgrade(proxy, token, target).await?;
        let is_websocket = token == "websocket";
        let mut served = api_server.next(if is_websocket { "GET" } else { "POST" }, target).await?;
        ensure!(served.head.tokens("upgrade") == [token.to_ascii_lowercase()], "{:?}", served.head);
        let (header, subprotocol) = if is_websocket {
            ("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        } else {
            ("X-Stream-Protocol-Version", "v4.channel.k8s.io")
        };
        let mut response = format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {token}\r\n{header}: {subprotocol}\r\n"
        );
        if is_websocket {
            let key = served.head.get("sec-websocket-key").context("the handshake has no key")?;
            write!(response, "Sec-WebSocket-Accept: {}\r\n", derive_accept_key(key.as_bytes()))?;
        }
        response.push_str("\r\n");
        served.write(response.as_bytes()).await?;
        let head = head_of(&mut client).await?;
        ensure!(head.status()? == 101, "{head:?}");
        ensure!(head.tokens("upgrade") == [token.to_ascii_lowercase()], "{head:?}");
        ensure!(head.get(&header.to_ascii_lowercase()) == Some(subprotocol), "{head:?}");
        if is_websocket {
            let accept = derive_accept_key(WEBSOCKET_KEY.as_bytes());
            ensure!(head.get("sec-websocket-accept") == Some(&*accept), "{head:?}");
        }
        Ok(Self { client, api_server: served.stream })
    }

    /// Sends bytes from each end to the other.
    pub(crate) async fn passes(&mut self, bytes: &[u8]) -> Result<()> {
        pass(&mut self.client, &mut self.api_server, bytes).await?;
        pass(&mut self.api_server, &mut self.client, bytes).await
    }

    /// The API server sends its last bytes and ends: the client gets them and the end.
    pub(crate) async fn ends_at_api_server(mut self) -> Result<()> {
        self.api_server.write_all(b"last").await?;
        self.api_server.shutdown().await?;
        let mut rest = Vec::new();
        within("the end of an upgraded connection", self.client.read_to_end(&mut rest)).await??;
        ensure!(rest == b"last", "{rest:?}");
        Ok(())
    }

    /// The client goes away: the API server sees an end.
    pub(crate) async fn ends_at_client(self) -> Result<()> {
        let Self { client, mut api_server } = self;
        drop(client);
        let mut rest = Vec::new();
        // How it ends depends on the balancer: regularly, or with a reset.
        let _ = within("the end of an upgraded connection", api_server.read_to_end(&mut rest)).await?;
        ensure!(rest.is_empty(), "{rest:?}");
        Ok(())
    }

    /// Waits until something between both ends has cut it.
    pub(crate) async fn ends_early(mut self, limit: Duration) -> Result<()> {
        let mut rest = Vec::new();
        let _ = within_time("the cut of an upgraded connection", limit, self.client.read_to_end(&mut rest))
            .await?;
        ensure!(rest.is_empty(), "{rest:?}");
        Ok(())
    }
}

/// Sends bytes from one end to the other.
async fn pass(from: &mut BufReader<TcpStream>, to: &mut BufReader<TcpStream>, bytes: &[u8]) -> Result<()> {
    let mut got = vec![0; bytes.len()];
    let both = async { tokio::try_join!(from.write_all(bytes), to.read_exact(&mut got)) };
    within("the bytes of an upgraded connection", both).await??;
    ensure!(got == bytes, "{} bytes are not equal", bytes.len());
    Ok(())
}

/// A client with HTTP/2 that asks for upgrades by extended CONNECT.
pub(crate) struct Connecting {
    send: h2::client::SendRequest<Bytes>,
    _connection: JoinSet<Result<(), h2::Error>>,
}

impl Connecting {
    /// Connects, and waits for the settings of the balancer, which come before an answer.
    pub(crate) async fn start(proxy: &Proxy) -> Result<Self> {
        let stream = TcpStream::connect(Protocol::Http2.address(proxy)).await?;
        let (send, connection) = h2::client::handshake(stream).await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        let mut send = send.ready().await?;
        let (ready, _) = send.send_request(Request::get("http://kas/-/ready").body(())?, true)?;
        let ready = within("the answer to a probe", ready).await??;
        ensure!(ready.status() == StatusCode::OK, "{ready:?}");
        Ok(Self { send, _connection: tasks })
    }

    /// Whether the balancer announces extended CONNECT.
    pub(crate) fn is_offered(&self) -> bool {
        self.send.is_extended_connect_protocol_enabled()
    }

    async fn ask(
        &self,
        protocol: &'static str,
        target: &str,
    ) -> Result<(h2::client::ResponseFuture, h2::SendStream<Bytes>)> {
        let mut request = Request::builder()
            .method(Method::CONNECT)
            .uri(format!("http://kas/agents/1{target}"))
            .header(header::AUTHORIZATION, format!("Bearer {JANE}"))
            .header(header::SEC_WEBSOCKET_PROTOCOL, "v5.channel.k8s.io")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .body(())?;
        request.extensions_mut().insert(h2::ext::Protocol::from_static(protocol));
        Ok(self.send.clone().ready().await?.send_request(request, false)?)
    }

    /// Opens a stream as WebSocket, through which bytes pass in both directions until it ends.
    pub(crate) async fn passes_websocket(&mut self, api_server: &ApiServer) -> Result<()> {
        let target = "/api/v1/namespaces/a/pods/b/exec?command=sh&stdin=true";
        let (answer, mut send) = self.ask("websocket", target).await?;
        let mut served = api_server.next("GET", target).await?;
        ensure!(served.head.tokens("upgrade") == ["websocket"], "{:?}", served.head);
        let key = served.head.get("sec-websocket-key").context("the handshake has no key")?;
        let response = format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Protocol: v5.channel.k8s.io\r\nSec-WebSocket-Accept: {}\r\n\r\n",
            derive_accept_key(key.as_bytes())
        );
        served.write(response.as_bytes()).await?;
        let answer = within("the head of a response", answer).await??;
        ensure!(answer.status() == StatusCode::OK, "{answer:?}");
        ensure!(answer.headers()["sec-websocket-protocol"] == "v5.channel.k8s.io", "{answer:?}");
        let mut receive = answer.into_body();
        for n in 1..20 {
            let bytes: Vec<u8> = (0..n).collect();
            send.send_data(bytes.clone().into(), false)?;
            ensure!(served.upload(bytes.len()).await? == bytes);
            served.write(&bytes).await?;
            let mut got = Vec::new();
            while got.len() < bytes.len() {
                let data = within("bytes of the API server", receive.data()).await?;
                let data = data.context("the stream has ended")??;
                receive.flow_control().release_capacity(data.len())?;
                got.extend_from_slice(&data);
            }
            ensure!(got == bytes, "{got:?}");
        }
        // The API server ends, and so does the stream.
        drop(served);
        while let Some(data) = within("the end of the stream", receive.data()).await? {
            ensure!(data.map_or(true, |data| data.is_empty()), "more bytes than were sent");
        }
        Ok(())
    }

    /// Asks for SPDY, which reaches the API server as a GET of HTTP/1.1. It refuses, and the client is told.
    pub(crate) async fn asks_for_spdy_by_get(&self, api_server: &ApiServer) -> Result<()> {
        let target = "/api/v1/namespaces/a/pods/b/exec?command=sh";
        let (answer, _send) = self.ask("spdy/3.1", target).await?;
        let served = api_server.next("GET", target).await?;
        ensure!(served.head.tokens("upgrade") == ["spdy/3.1"], "{:?}", served.head);
        served.whole("403 Forbidden", "{}").await?;
        let answer = within("the head of a response", answer).await??;
        ensure!(answer.status() == StatusCode::FORBIDDEN, "{answer:?}");
        Ok(())
    }
}
