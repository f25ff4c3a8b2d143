//! HTTP/1.1 connections to the API server.
//!
//! A connection has no task of its own: the task that sends a request and reads its response also drives the
//! connection. A request so needs no switch between tasks. Measured with 64 callers that get 1 KiB each,
//! against a client with a task for each connection: see `docs/decisions/connections-without-tasks.md`.
//!
//! A connection whose response is complete is kept for the next request. Nothing drives it meanwhile; whether
//! the API server has closed it is checked when it is taken, and a sweeper closes what was kept too long.
//!
//! A request that asks for an upgrade has a connection of its own, which is never kept.

use std::{
    collections::VecDeque,
    fmt,
    pin::{Pin, pin},
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use grpc::BoxError;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::{
        TrySendError,
        http1::{self, Parts, SendRequest},
    },
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout};

use super::dial::{ApiStream, Dialer, UpgradedConnection};

/// How long connecting may take, including TLS. Within a cluster it takes milliseconds. A shorter time fails
/// while a control plane moves; a longer one only delays the error.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an unused connection is kept. The API server closes such connections after 90 s, and a request
/// that is sent at that moment fails. So this is well below 90 s.
const IDLE: Duration = Duration::from_secs(45);

/// How many unused connections are kept. More connections save handshakes after a burst, but cost memory on
/// the API server.
const MAX_IDLE: usize = 64;

type ApiRequest = Request<grpc::Body>;

/// Why there is no response.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no connection. Nothing was sent.
    Connect(BoxError),
    /// The connection ended before the head of the response.
    Broken(BoxError),
}

/// The answer to a request that asks for an upgrade.
#[derive(Debug)]
pub enum UpgradeAnswer {
    /// The API server has switched protocols.
    Switched(Response<()>, UpgradedConnection),
    /// Any other answer.
    Refused(Response<ResponseBody>),
}

/// The connections to one API server.
pub(super) struct Connections {
    dialer: Dialer,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// The unused connections, and when each has to be closed. The one that was used last is at the back.
    connections: VecDeque<(Connection, Instant)>,
    /// The sweeper runs.
    swept: bool,
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").field("kept", &self.kept.lock().connections.len()).finish()
    }
}

impl Connections {
    /// Opens connections with `dialer`.
    pub(super) fn new(dialer: Dialer) -> Arc<Self> {
        Arc::new(Self { dialer, kept: Mutex::default() })
    }

    /// Sends a request, whose URI is a path and a query and which has a `Host`. Returns when the head of the
    /// response has arrived.
    ///
    /// The request is repeated only if its connection had ended before its first byte, over a new connection.
    ///
    /// # Cancel safety
    /// Dropping the future, or the body of the response, closes the connection.
    pub(super) async fn send(
        self: &Arc<Self>,
        mut request: ApiRequest,
    ) -> Result<Response<ResponseBody>, Failure> {
        loop {
            let (mut connection, used) = match self.take() {
                Some(connection) => (connection, true),
                // Rare, and large, so it must not be a part of every request's future.
                None => (Box::pin(self.open()).await?, false),
            };
            match connection.send(request).await {
                Ok(response) => {
                    return Ok(response.map(|body| {
                        let pool = Some(Arc::clone(self));
                        let mut body = ResponseBody { body, connection: Some(connection), pool };
                        if body.is_end_stream() {
                            body.complete();
                        }
                        body
                    }));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if used => request = unsent,
                    _ => return Err(Failure::Broken(error.into_error().into())),
                },
            }
        }
    }

    /// Sends a request that asks for an upgrade, as [`send`](Self::send), over a connection of its own.
    pub(super) async fn upgrade(&self, request: ApiRequest) -> Result<UpgradeAnswer, Failure> {
        let mut connection = self.open().await?;
        let broken = |error: hyper::Error| Failure::Broken(error.into());
        let response = connection.send_for_upgrade(request).await.map_err(broken)?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(UpgradeAnswer::Refused(response.map(|body| ResponseBody {
                body,
                connection: Some(connection),
                pool: None,
            })));
        }
        match connection.into_upgraded().await.map_err(broken)? {
            Some(upgraded) => Ok(UpgradeAnswer::Switched(response.map(drop), upgraded)),
            None => Err(Failure::Broken("it ended with the head of the answer".into())),
        }
    }

    async fn open(&self) -> Result<Connection, Failure> {
        let stream = match timeout(CONNECT_TIMEOUT, self.dialer.connect()).await {
            Ok(connected) => connected,
            Err(_) => Err(format!("no connection within {CONNECT_TIMEOUT:?}").into()),
        };
        let io = TokioIo::new(stream.map_err(Failure::Connect)?);
        let (sender, driver) =
            http1::Builder::new().handshake(io).await.map_err(|error| Failure::Connect(error.into()))?;
        Ok(Connection { sender, driver: Some(Box::new(driver)) })
    }

    /// Returns a kept connection that the API server has not closed.
    fn take(&self) -> Option<Connection> {
        let now = Instant::now();
        loop {
            let (mut connection, until) = self.kept.lock().connections.pop_back()?;
            if until > now && connection.is_usable() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next request.
    fn keep(self: &Arc<Self>, mut connection: Connection) {
        // Also replaces the waker, which would keep the memory of a task.
        if !connection.is_usable() {
            return;
        }
        let mut kept = self.kept.lock();
        let oldest = if kept.connections.len() >= MAX_IDLE { kept.connections.pop_front() } else { None };
        kept.connections.push_back((connection, Instant::now() + IDLE));
        if !kept.swept {
            kept.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
        drop(kept);
        drop(oldest);
    }
}

/// Closes connections that were kept too long, until none is left.
async fn sweep(connections: Weak<Connections>) {
    loop {
        let next = {
            let Some(connections) = connections.upgrade() else { return };
            let mut kept = connections.kept.lock();
            let now = Instant::now();
            let expired = kept.connections.iter().take_while(|(_, until)| *until <= now).count();
            let closed: Vec<_> = kept.connections.drain(..expired).collect();
            let next = kept.connections.front().map(|(_, until)| *until);
            kept.swept = next.is_some();
            drop(kept);
            drop(closed);
            next
        };
        let Some(next) = next else { return };
        sleep_until(next).await;
    }
}

struct Connection {
    sender: SendRequest<grpc::Body>,
    /// `None`: the connection has ended.
    driver: Option<Box<http1::Connection<TokioIo<ApiStream>, grpc::Body>>>,
}

impl Connection {
    /// Reads and writes as much as possible, for the task of `cx`.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver
            && Pin::new(driver).poll(cx).is_ready()
        {
            // An error of the connection is also the error of its request.
            self.driver = None;
        }
    }

    /// Whether the connection can take a request now.
    fn is_usable(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.driver.is_some() && self.sender.is_ready()
    }

    async fn send(&mut self, request: ApiRequest) -> Result<Response<Incoming>, TrySendError<ApiRequest>> {
        let mut response = pin!(self.sender.try_send_request(request));
        let driver = &mut self.driver;
        std::future::poll_fn(|cx| {
            if let Some(connection) = driver
                && Pin::new(connection).poll(cx).is_ready()
            {
                *driver = None;
            }
            response.as_mut().poll(cx)
        })
        .await
    }
}

impl Connection {
    /// As [`send`](Self::send), without closing the stream when HTTP has ended on it.
    async fn send_for_upgrade(&mut self, request: ApiRequest) -> hyper::Result<Response<Incoming>> {
        let mut response = pin!(self.sender.send_request(request));
        let driver = &mut self.driver;
        let mut is_http = true;
        std::future::poll_fn(|cx| {
            if is_http && let Some(connection) = driver {
                is_http = connection.poll_without_shutdown(cx).is_pending();
            }
            let polled = response.as_mut().poll(cx);
            if polled.is_pending() && !is_http && driver.take().is_some() {
                // There will be no answer. Without the connection, that is an error.
                return response.as_mut().poll(cx);
            }
            polled
        })
        .await
    }

    /// Returns the stream after an answer with status 101; `None`: it has ended.
    async fn into_upgraded(mut self) -> hyper::Result<Option<UpgradedConnection>> {
        let Some(mut driver) = self.driver.take() else { return Ok(None) };
        // Nothing is left of HTTP, so this does not wait.
        std::future::poll_fn(|cx| driver.poll_without_shutdown(cx)).await?;
        let Parts { io, read_buf, .. } = driver.into_parts();
        Ok(Some(UpgradedConnection::new(io.into_inner(), read_buf)))
    }
}

/// The body of a response. It drives the connection while it is read.
///
/// Dropping it before its end closes the connection.
pub struct ResponseBody {
    body: Incoming,
    /// `None`: the response is complete.
    connection: Option<Connection>,
    /// Where the connection is kept; `None`: it is not.
    pool: Option<Arc<Connections>>,
}

impl fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").field("body", &self.body).finish_non_exhaustive()
    }
}

impl ResponseBody {
    /// The response is complete: keeps the connection, if its request is complete too.
    fn complete(&mut self) {
        if let Some(connection) = self.connection.take()
            && let Some(pool) = &self.pool
        {
            pool.keep(connection);
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let mut polled = Pin::new(&mut this.body).poll_frame(cx);
        if polled.is_pending()
            && let Some(connection) = &mut this.connection
        {
            // The connection reads only what this body has asked for, which it has now.
            connection.drive(cx);
            polled = Pin::new(&mut this.body).poll_frame(cx);
        }
        match &polled {
            Poll::Ready(None) => this.complete(),
            Poll::Ready(Some(Ok(_))) if this.body.is_end_stream() => this.complete(),
            Poll::Ready(Some(Err(_))) => this.connection = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
