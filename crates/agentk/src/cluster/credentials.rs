//! The `Authorization` header of requests to the API server.

use std::{
    path::{Path, PathBuf},
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use grpc::BoxError;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use kube::{
    client::{AuthError, ClientBuilder, ConfigExt as _},
    config::Config,
};
use parking_lot::Mutex;
use process::error::chain;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::Instant;
use tower_service::Service;

/// The age at which a token from a file is read again. Kubernetes renews a token when a fifth of its lifetime
/// is left, which is at least some minutes.
pub(super) const TOKEN_AGE: Duration = Duration::from_secs(10);

/// The source of the `Authorization` header.
pub(super) enum Credentials {
    /// No header: a client certificate, or no credentials.
    None,
    Token(HeaderValue),
    File(TokenFile),
    /// A credential plugin or another scheme that kube supports. The client sends its requests only to
    /// [`Echo`].
    Plugin(kube::Client),
}

impl Credentials {
    /// Selects the credentials of the configuration, in kube's order.
    pub(super) fn new(config: &Config) -> anyhow::Result<Self> {
        let auth = &config.auth_info;
        let basic = auth.username.is_some() && auth.password.is_some();
        if auth.auth_provider.is_none() && !basic {
            if let Some(token) = &auth.token {
                return Ok(Self::Token(bearer(token)?));
            }
            if let Some(file) = &auth.token_file {
                return Ok(Self::File(TokenFile::open(file.into())?));
            }
        }
        let layer = config.auth_layer().map_err(|error| match error {
            kube::Error::Auth(error) => anyhow!("{}", without_output(&error)),
            error => anyhow!("{}", chain(&error)),
        })?;
        Ok(match layer {
            None => Self::None,
            Some(layer) => Self::Plugin(ClientBuilder::new(Echo, "").with_layer(&layer).build()),
        })
    }

    pub(super) async fn header(&self) -> Result<Option<HeaderValue>, BoxError> {
        match self {
            Self::None => Ok(None),
            Self::Token(value) => Ok(Some(value.clone())),
            Self::File(file) => Ok(Some(file.header())),
            // Large, and most configurations have none.
            Self::Plugin(client) => Box::pin(of_plugin(client)).await,
        }
    }

    /// Reads a token file again before the next request, because the API server rejected the credentials.
    pub(super) fn invalidate(&self) {
        if let Self::File(file) = self {
            file.token().checked = None;
        }
    }
}

async fn of_plugin(client: &kube::Client) -> Result<Option<HeaderValue>, BoxError> {
    match client.send(Request::new(kube::client::Body::empty())).await {
        Ok(mut answer) => Ok(answer.headers_mut().remove(header::AUTHORIZATION)),
        Err(kube::Error::Service(error)) => Err(match error.downcast_ref::<AuthError>() {
            Some(error) => without_output(error).into(),
            None => error,
        }),
        Err(kube::Error::Auth(error)) => Err(without_output(&error).into()),
        Err(error) => Err(error.into()),
    }
}

/// Describes why there are no credentials, without the plugin's arguments, variables and output, which may
/// contain the credential.
fn without_output(error: &AuthError) -> String {
    match error {
        AuthError::AuthExecRun { out, .. } => format!("the credential plugin failed ({})", out.status),
        AuthError::AuthExecParse(_) | AuthError::ParseTokenKey(_) => {
            "the output of the credential plugin is invalid".to_owned()
        }
        AuthError::AuthExec(_) => "the credential plugin failed".to_owned(),
        error => error.to_string(),
    }
}

fn bearer(token: &SecretString) -> anyhow::Result<HeaderValue> {
    let token = token.expose_secret().trim();
    ensure!(!token.is_empty(), "the bearer token is empty");
    // The cause is omitted: it adds nothing, and the value must not be shown.
    let mut value = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| anyhow!("the bearer token has characters that are not allowed in a header"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// A bearer token in a file, which may be renewed.
pub(super) struct TokenFile {
    path: PathBuf,
    token: Mutex<Token>,
}

struct Token {
    value: HeaderValue,
    /// `None`: read the file before the next use.
    checked: Option<Instant>,
}

impl TokenFile {
    pub(super) fn open(path: PathBuf) -> anyhow::Result<Self> {
        let value = Self::read(&path)?;
        Ok(Self { path, token: Mutex::new(Token { value, checked: Some(Instant::now()) }) })
    }

    fn read(path: &Path) -> anyhow::Result<HeaderValue> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        bearer(&text.into()).with_context(|| format!("{} cannot be used", path.display()))
    }

    fn token(&self) -> parking_lot::MutexGuard<'_, Token> {
        self.token.lock()
    }

    /// Returns the header. It reads the file, about a kilobyte, every [`TOKEN_AGE`].
    fn header(&self) -> HeaderValue {
        let mut token = self.token();
        let now = Instant::now();
        if token.checked.is_none_or(|at| now.duration_since(at) >= TOKEN_AGE) {
            token.checked = Some(now);
            match Self::read(&self.path) {
                Ok(value) => token.value = value,
                // As in client-go: the token remains valid if the file is removed.
                Err(error) => {
                    tracing::warn!(
                        error = format!("{error:#}"),
                        "cannot read the token file; the last token stays in use"
                    );
                }
            }
        }
        token.value.clone()
    }
}

/// A service that returns the `Authorization` header that the layers above have added to the request.
#[derive(Clone)]
struct Echo;

impl Service<Request<kube::client::Body>> for Echo {
    type Response = Response<http_body_util::Empty<bytes::Bytes>>;
    type Error = BoxError;
    type Future = std::future::Ready<Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<kube::client::Body>) -> Self::Future {
        let mut headers = HeaderMap::new();
        if let Some(value) = request.headers_mut().remove(header::AUTHORIZATION) {
            headers.insert(header::AUTHORIZATION, value);
        }
        let mut response = Response::new(http_body_util::Empty::new());
        *response.headers_mut() = headers;
        std::future::ready(Ok(response))
    }
}
