//! The way of a planner to the API server, and what every test does with it.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use gitops::{
    CallError, ClusterApi, Engine, Head, Memory, Progress, Project, Propagation, PruneWhen, Report, Scope,
    Set, Stop, Sync, Unresolved,
    decode::{File, Limits, decode},
};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use serde_json::{Value, json};
use testkit::kubernetes::Kubernetes;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// One HTTP/2 connection to the API server.
#[derive(Clone)]
pub(crate) struct Wire {
    sender: http2::SendRequest<Full<Bytes>>,
    server: String,
    token: String,
    user_agent: String,
}

impl Wire {
    /// Connects. The audit log shows the planner as `kas/gitops:<name>`.
    pub(crate) async fn connect(kubernetes: &Kubernetes, name: &str) -> Result<Arc<Self>> {
        let server = kubernetes.server();
        let address: SocketAddr = server.strip_prefix("https://").context("no https")?.parse()?;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(kubernetes.ca_pem().as_bytes())?)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let tcp = TcpStream::connect(address).await?;
        let tls = TlsConnector::from(Arc::new(tls))
            .connect(ServerName::IpAddress(address.ip().into()), tcp)
            .await?;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await?;
        tokio::spawn(async move {
            let _ = connection.await;
        });
        let token = kubernetes.admin_token().to_owned();
        Ok(Arc::new(Self { sender, server, token, user_agent: format!("kas/gitops:{name}") }))
    }

    /// The same connection under another name.
    pub(crate) fn named(&self, name: &str) -> Arc<Self> {
        Arc::new(Self { user_agent: format!("kas/gitops:{name}"), ..self.clone() })
    }

    /// Reads an object; `None`: there is none.
    pub(crate) async fn get(&self, path: &str) -> Result<Option<Value>> {
        let answer = self.call(Request::get(path).body(Bytes::new())?).await?;
        match answer.status() {
            StatusCode::NOT_FOUND => Ok(None),
            StatusCode::OK => Ok(Some(serde_json::from_slice(answer.body())?)),
            status => bail!("{path}: {status}: {}", String::from_utf8_lossy(answer.body())),
        }
    }

    /// Sends a body, and returns the answer.
    pub(crate) async fn send(&self, method: Method, target: &str, body: &Value) -> Result<Value> {
        let kind = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let request = Request::builder().method(method).uri(target).header(header::CONTENT_TYPE, kind);
        let answer = self.call(request.body(body.to_string().into())?).await?;
        let text = String::from_utf8_lossy(answer.body());
        ensure!(answer.status().is_success(), "{target}: {}: {text}", answer.status());
        Ok(serde_json::from_slice(answer.body())?)
    }

    /// Creates a namespace, and its service account, for which there is no controller.
    pub(crate) async fn create_namespace(&self, name: &str) -> Result<()> {
        let body = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
        self.send(Method::POST, "/api/v1/namespaces", &body).await?;
        let body = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default" } });
        self.send(Method::POST, &format!("/api/v1/namespaces/{name}/serviceaccounts"), &body).await.map(drop)
    }

    /// Returns the keys of an inventory; `None`: there is none.
    pub(crate) async fn inventory(&self, namespace: &str, id: &str) -> Result<Option<BTreeSet<String>>> {
        let found = self.get(&format!("/api/v1/namespaces/{namespace}/configmaps/inventory-{id}")).await?;
        let keys = |inventory: Value| {
            inventory["data"].as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
        };
        Ok(found.map(keys))
    }
}

#[async_trait]
impl ClusterApi for Wire {
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        let lost = |error: hyper::Error| CallError::Unknown(error.to_string());
        let (mut head, body) = request.into_parts();
        head.uri = format!("{}{}", self.server, head.uri).parse().expect("a target of the engine is a URI");
        let token = format!("Bearer {}", self.token).parse().expect("a token is a header");
        head.headers.insert(header::AUTHORIZATION, token);
        head.headers.insert(header::USER_AGENT, self.user_agent.parse().expect("a name is a header"));
        let mut sender = self.sender.clone();
        sender.ready().await.map_err(lost)?;
        let response = sender.send_request(Request::from_parts(head, Full::new(body))).await.map_err(lost)?;
        let (head, body) = response.into_parts();
        Ok(Response::from_parts(head, body.collect().await.map_err(lost)?.to_bytes()))
    }
}

/// A head that never moves.
pub(crate) struct Fixed(pub(crate) Option<Arc<str>>);

#[async_trait]
impl Head for Fixed {
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved> {
        Ok(self.0.clone())
    }

    fn stop(&self) -> Option<Stop> {
        None
    }
}

/// Decodes a file.
///
/// # Panics
/// If it has a flaw.
pub(crate) fn set(commit: &str, content: &str) -> Set {
    decoded(commit, content).unwrap_or_else(|flaws| panic!("{flaws}"))
}

/// Decodes a file. The error names its flaws.
pub(crate) fn decoded(commit: &str, content: &str) -> Result<Set, String> {
    let file = File { path: "m.yaml".into(), content: Bytes::copy_from_slice(content.as_bytes()) };
    decode(commit, &[file], &Limits::default()).map_err(|flaws| flaws.to_string())
}

/// A project that waits for nothing.
pub(crate) fn project(agent: u64, namespace: &str) -> Project {
    Project {
        // There is no controller manager, which would remove the finalizer of a foreground deletion.
        propagation: Propagation::Background,
        reconcile_timeout: Duration::ZERO,
        prune_timeout: Duration::from_secs(30),
        ..Project::new(agent, 1, namespace, "replica")
    }
}

/// Syncs a set that is the head.
pub(crate) async fn sync(
    engine: &Engine,
    project: &Project,
    set: &Set,
    scope: Scope,
    memory: &mut Memory,
) -> Report {
    let head = Fixed(Some(set.commit().into()));
    let observer = |_: Progress| {};
    let prune = PruneWhen::Current;
    engine.sync(Sync { project, set, head: &head, scope, prune, observer: &observer }, memory).await
}
