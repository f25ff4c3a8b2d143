//! [`Pinned`]: an HTTP/1.1 client on a connection to an address that its user has chosen. No name is looked
//! up, no proxy is used, and no redirect is followed.

use std::{io, net::SocketAddr};

use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, task::AbortHandle};
use tokio_rustls::TlsConnector;

/// The largest headers of an answer, in bytes.
const LARGEST_HEAD: usize = 64 << 10;
/// How much of an answer is read so that the connection can be used again, in bytes.
const LARGEST_BODY: usize = 64 << 10;

/// Why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be reached.
    #[error("it cannot be reached")]
    Connect(#[source] io::Error),
    /// TLS failed: its certificate is not trusted, or not for this host.
    #[error("TLS failed")]
    Tls(#[source] io::Error),
    /// The URL has no host that a certificate could be for.
    #[error("the URL has no valid host")]
    Host,
    /// The connection broke, or what came is not HTTP.
    #[error("there was no complete answer")]
    Http(#[from] hyper::Error),
}

/// A connection. Dropping it closes it.
#[derive(Debug)]
pub struct Pinned {
    sender: SendRequest<Full<Bytes>>,
    driver: AbortHandle,
    is_usable: bool,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Pinned {
    /// Connects to `address`, for requests to `url`: with TLS if its scheme is https, and then the server
    /// must have a certificate for its host.
    ///
    /// # Errors
    /// See [`Error`].
    ///
    /// # Cancel safety
    /// Cancel safe. There is no timeout.
    pub async fn open(address: SocketAddr, url: &Uri, tls: &ClientConfig) -> Result<Self, Error> {
        let stream = TcpStream::connect(address).await.map_err(Error::Connect)?;
        stream.set_nodelay(true).map_err(Error::Connect)?;
        if url.scheme_str() != Some("https") {
            return Self::over(stream).await;
        }
        let host = url.host().ok_or(Error::Host)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let name = ServerName::try_from(bare.to_owned()).map_err(|_| Error::Host)?;
        let connector = TlsConnector::from(crate::tls::http1_only(tls));
        Self::over(connector.connect(name, stream).await.map_err(Error::Tls)?).await
    }

    async fn over<S>(stream: S) -> Result<Self, Error>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) =
            http1::Builder::new().max_buf_size(LARGEST_HEAD).handshake(TokioIo::new(stream)).await?;
        // Its errors are those of the requests.
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        let driver = driver.abort_handle();
        Ok(Self { sender, driver, is_usable: true })
    }

    /// Whether another request can be sent.
    pub fn is_usable(&self) -> bool {
        self.is_usable && !self.sender.is_closed()
    }

    /// Sends a request, and returns the status of the answer. Its body is not kept.
    ///
    /// # Errors
    /// See [`Error`]. The request may have arrived.
    ///
    /// # Cancel safety
    /// If it is dropped, the connection cannot be used any more.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<StatusCode, Error> {
        self.is_usable = false;
        self.sender.ready().await?;
        let answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let mut body = answer.into_body();
        let mut read = 0;
        while let Some(frame) = body.frame().await {
            read += frame?.data_ref().map_or(0, Bytes::len);
            if read > LARGEST_BODY {
                return Ok(status);
            }
        }
        self.is_usable = true;
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    async fn answered(answers: &'static [&'static str]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            for answer in answers {
                let mut read = [0; 4096];
                let _ = stream.read(&mut read).await.unwrap();
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        address
    }

    fn request() -> Request<Full<Bytes>> {
        Request::post("/").header("host", "name.invalid").body(Full::new(Bytes::from_static(b"{}"))).unwrap()
    }

    #[tokio::test]
    async fn a_connection_goes_to_the_address_and_follows_no_redirect() {
        crate::tls::install();
        let tls = crate::tls::client(None).unwrap();
        let address = answered(&[
            "HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 2\r\n\r\nok",
            "HTTP/1.1 204 X\r\nconnection: close\r\n\r\n",
        ])
        .await;
        // Nobody could look this name up.
        let url = "http://name.invalid/".parse().unwrap();
        let mut pinned = Pinned::open(address, &url, &tls).await.unwrap();
        assert_eq!(pinned.send(request()).await.unwrap(), 307);
        assert!(pinned.is_usable());
        assert_eq!(pinned.send(request()).await.unwrap(), 204);
        let url = "https://name.invalid/".parse().unwrap();
        let plain = answered(&["HTTP/1.1 200 X\r\n\r\n"]).await;
        assert!(matches!(Pinned::open(plain, &url, &tls).await, Err(Error::Tls(_))));
    }
}
