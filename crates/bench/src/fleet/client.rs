//! A client of HTTP/1.1 with one connection, which it keeps.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, task::AbortHandle, time::timeout};

/// Time limit of a request.
const REQUEST: Duration = Duration::from_secs(60);

/// A connection. Dropping it closes it.
pub(super) struct Client {
    sender: http1::SendRequest<Empty<Bytes>>,
    address: SocketAddr,
    token: Option<&'static str>,
    driver: AbortHandle,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Client {
    /// Connects; each request has the token.
    pub(super) async fn connect(address: SocketAddr, token: Option<&'static str>) -> Result<Self> {
        let stream =
            TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // What ends the connection fails the next request, too, which reports it.
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self { sender, address, token, driver: driver.abort_handle() })
    }

    /// Sends a request, and returns its answer, whose body comes.
    pub(super) async fn begin(&mut self, target: &str) -> Result<Incoming> {
        let mut request = Request::get(target).header(header::HOST, self.address.to_string());
        if let Some(token) = self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Empty::new())?;
        self.sender.ready().await?;
        let (head, body) = self.sender.send_request(request).await?.into_parts();
        if head.status != StatusCode::OK {
            let said = body.collect().await?.to_bytes();
            bail!("{target}: status {}: {}", head.status, String::from_utf8_lossy(&said));
        }
        Ok(body)
    }

    /// Sends a request, and returns the body of its answer.
    pub(super) async fn get(&mut self, target: &str) -> Result<Bytes> {
        let answer = async { anyhow::Ok(self.begin(target).await?.collect().await?.to_bytes()) };
        timeout(REQUEST, answer).await.with_context(|| format!("no answer to {target}"))?
    }
}
