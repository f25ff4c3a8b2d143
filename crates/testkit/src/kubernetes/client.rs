//! A client of the API server, with the rights of the administrator.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsConnector;

use super::{POLL, REQUEST_WITHIN, keys::Keys};

const JSON: &str = "application/json";
const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";

/// Talks to the API server as administrator.
pub(super) struct Client {
    pub(super) address: SocketAddr,
    tls: TlsConnector,
}

impl Client {
    pub(super) fn new(port: u16, keys: &Keys) -> Result<Self> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(keys.ca.clone())?;
        // Named rather than taken from the process's default, which belongs to the test.
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![keys.admin_certificate.clone()], keys.admin_key.clone_key())?;
        tls.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { address: (Ipv4Addr::LOCALHOST, port).into(), tls: TlsConnector::from(Arc::new(tls)) })
    }

    pub(super) async fn connect(&self) -> Result<Connection> {
        let connect = async {
            let tcp = TcpStream::connect(self.address).await?;
            tcp.set_nodelay(true)?;
            let tls = self.tls.connect(ServerName::IpAddress(self.address.ip().into()), tcp).await?;
            let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await?;
            // What ends the connection also fails the requests on it, which report it.
            let driver = tokio::spawn(async move {
                let _ = connection.await;
            });
            anyhow::Ok(Connection { sender, driver, server: format!("https://{}", self.address) })
        };
        timeout(REQUEST_WITHIN, connect)
            .await
            .context("connecting to the API server took too long")?
            .context("could not connect to the API server")
    }

    pub(super) async fn is_ready(&self) -> bool {
        let ask = async {
            let connection = self.connect().await?;
            connection.send(Method::GET, "/readyz", Bytes::new()).await
        };
        matches!(ask.await, Ok((StatusCode::OK, _)))
    }
}

/// One HTTP/2 connection, for any number of requests at once.
pub(super) struct Connection {
    sender: http2::SendRequest<Full<Bytes>>,
    driver: tokio::task::JoinHandle<()>,
    server: String,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Reads objects as administrator, over one connection.
pub struct Reader(Connection);

impl Reader {
    /// Reads what is at a path.
    ///
    /// # Errors
    ///
    /// When the API server cannot be reached, or answers with another status than 200.
    pub async fn get(&self, path: &str) -> Result<Value> {
        Ok(serde_json::from_slice(&self.bytes(path).await?)?)
    }

    /// Reads what is at a path, and returns it as it is.
    ///
    /// # Errors
    ///
    /// As of [`get`](Self::get).
    pub async fn bytes(&self, path: &str) -> Result<Bytes> {
        self.get_as(path, JSON).await
    }

    /// Reads a list as the table that `kubectl get` shows.
    ///
    /// # Errors
    ///
    /// As of [`get`](Self::get).
    pub async fn table(&self, path: &str) -> Result<Value> {
        Ok(serde_json::from_slice(&self.get_as(path, TABLE).await?)?)
    }

    async fn get_as(&self, path: &str, wanted: &str) -> Result<Bytes> {
        let (status, body) = self.0.send_as(Method::GET, path, Bytes::new(), (JSON, wanted)).await?;
        ensure!(status == StatusCode::OK, "GET {path}: {status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    }
}

/// Writes objects as administrator, over one connection.
pub struct Writer(Connection);

impl Writer {
    /// Creates an object.
    ///
    /// # Errors
    ///
    /// When the API server cannot be reached, or refuses it.
    pub async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.0.create(path, object).await
    }

    /// Changes these fields of an object, or of its status if the path ends so.
    ///
    /// # Errors
    ///
    /// As of [`create`](Self::create).
    pub async fn merge(&self, path: &str, fields: &Value) -> Result<()> {
        const PATCH: &str = "application/merge-patch+json";
        let body = fields.to_string().into();
        let (status, body) = self.0.send_as(Method::PATCH, path, body, (PATCH, JSON)).await?;
        ensure!(status.is_success(), "PATCH {path}: {status}: {}", String::from_utf8_lossy(&body));
        Ok(())
    }

    /// Deletes an object at once. There may be none.
    ///
    /// # Errors
    ///
    /// As of [`create`](Self::create).
    pub async fn delete(&self, path: &str) -> Result<()> {
        let body = Bytes::from_static(br#"{"gracePeriodSeconds":0,"propagationPolicy":"Background"}"#);
        let (status, body) = self.0.send(Method::DELETE, path, body).await?;
        let is_gone = status.is_success() || status == StatusCode::NOT_FOUND;
        ensure!(is_gone, "DELETE {path}: {status}: {}", String::from_utf8_lossy(&body));
        Ok(())
    }
}

impl super::Kubernetes {
    /// Connects a client that only reads.
    ///
    /// # Errors
    ///
    /// When the API server cannot be reached.
    pub async fn reader(&self) -> Result<Reader> {
        self.client.connect().await.map(Reader)
    }

    /// Connects a client that writes.
    ///
    /// # Errors
    ///
    /// When the API server cannot be reached.
    pub async fn writer(&self) -> Result<Writer> {
        self.client.connect().await.map(Writer)
    }
}

impl Connection {
    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
        self.send_as(method, path, body, (JSON, JSON)).await
    }

    /// Sends a request whose body is of the first type. The answer is to be of the second.
    async fn send_as(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        (sent, wanted): (&str, &str),
    ) -> Result<(StatusCode, Bytes)> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.server))
            .header(http::header::CONTENT_TYPE, sent)
            .header(http::header::ACCEPT, wanted)
            .body(Full::new(body))?;
        let mut sender = self.sender.clone();
        let exchange = async {
            sender.ready().await?;
            let response = sender.send_request(request).await?;
            let status = response.status();
            anyhow::Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        timeout(REQUEST_WITHIN, exchange)
            .await
            .with_context(|| format!("a request to {path} took longer than {REQUEST_WITHIN:?}"))?
            .with_context(|| format!("a request to {path} failed"))
    }

    async fn post(&self, path: &str, object: &Value) -> Result<(StatusCode, Value)> {
        let (status, body) = self.send(Method::POST, path, object.to_string().into()).await?;
        let body = serde_json::from_slice(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into());
        Ok((status, body))
    }

    /// Creates an object that must not exist yet, and returns it as the API server has stored it.
    pub(super) async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        let (status, answer) = self.post(path, object).await?;
        ensure!(status.is_success(), "the API server refused POST {path} ({status}): {}", reason(&answer));
        Ok(answer)
    }

    /// Creates an object with a status, which the API server ignores in the first of the two requests.
    pub(super) async fn create_with_status(&self, path: &str, object: &Value, status: Value) -> Result<()> {
        let mut object = self.create(path, object).await?;
        let name = object["metadata"]["name"].as_str().context("a created object has a name")?;
        let path = format!("{path}/{name}/status");
        object["status"] = status;
        let (status, body) = self.send(Method::PUT, &path, object.to_string().into()).await?;
        ensure!(
            status.is_success(),
            "the API server refused PUT {path} ({status}): {}",
            String::from_utf8_lossy(&body)
        );
        Ok(())
    }

    /// Creates an object unless it exists.
    pub(super) async fn ensure(&self, path: &str, object: &Value) -> Result<()> {
        let (status, answer) = self.post(path, object).await?;
        ensure!(
            status.is_success() || status == StatusCode::CONFLICT,
            "the API server refused POST {path} ({status}): {}",
            reason(&answer)
        );
        Ok(())
    }

    pub(super) async fn wait_until_may_list_pods(&self, namespace: &str, name: &str) -> Result<()> {
        let review = json!({
            "spec": {
                "user": format!("system:serviceaccount:{namespace}:{name}"),
                "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{namespace}")],
                "resourceAttributes": { "namespace": namespace, "resource": "pods", "verb": "list" },
            },
        });
        let deadline = Instant::now() + REQUEST_WITHIN;
        loop {
            let (status, answer) =
                self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await?;
            ensure!(
                status.is_success(),
                "the API server refused an access review ({status}): {}",
                reason(&answer)
            );
            if answer["status"]["allowed"] == true {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{namespace}/{name} may not list pods after {REQUEST_WITHIN:?}"
            );
            sleep(POLL).await;
        }
    }
}

/// Returns the sentence in the API server's Status object, or the whole answer when it is something else.
fn reason(answer: &Value) -> String {
    answer["message"].as_str().map_or_else(|| answer.to_string(), str::to_owned)
}
