//! A simulated issuer of OpenID Connect, with https, and keys that sign its tokens.

use std::{
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, Result, anyhow};
use aws_lc_rs::{
    rand::SystemRandom,
    rsa::KeySize,
    signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256,
        RsaKeyPair,
    },
};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use crate::{caller::now, certificates::Certificates, process::soon};

const DISCOVERY: &str = "/.well-known/openid-configuration";
const KEYS: &str = "/keys";
/// The endpoints of the device flow.
const DEVICE: &str = "/oauth/authorize_device";
const TOKEN: &str = "/oauth/token";

/// A key of an issuer.
pub struct SigningKey {
    kid: Option<String>,
    pair: Pair,
}

enum Pair {
    Ec(EcdsaKeyPair),
    Rsa(RsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SigningKey").field("kid", &self.kid).finish_non_exhaustive()
    }
}

impl SigningKey {
    /// Creates a key for ES256.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn ec(kid: &str) -> Result<Self> {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).map_err(|_| anyhow!("a key"))?;
        Ok(Self { kid: Some(kid.to_owned()), pair: Pair::Ec(pair) })
    }

    /// Creates a key for RS256, which takes some tenths of a second.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn rsa(kid: &str) -> Result<Self> {
        let pair = RsaKeyPair::generate(KeySize::Rsa2048).map_err(|_| anyhow!("a key"))?;
        Ok(Self { kid: Some(kid.to_owned()), pair: Pair::Rsa(pair) })
    }

    /// Creates a key for EdDSA.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn ed(kid: &str) -> Result<Self> {
        let pair = Ed25519KeyPair::generate().map_err(|_| anyhow!("a key"))?;
        Ok(Self { kid: Some(kid.to_owned()), pair: Pair::Ed(pair) })
    }

    /// Removes its name: an issuer with one key need not have one.
    #[must_use]
    pub fn unnamed(mut self) -> Self {
        self.kid = None;
        self
    }

    /// Returns the public key as in a key set.
    pub fn jwk(&self) -> Value {
        let encoded = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
        let mut key = match &self.pair {
            Pair::Ec(pair) => {
                // 4, x, y.
                let point = pair.public_key().as_ref();
                json!({"kty": "EC", "crv": "P-256", "x": encoded(&point[1..33]), "y": encoded(&point[33..])})
            }
            Pair::Rsa(pair) => {
                // SEQUENCE { INTEGER of 256 bytes and a leading zero, INTEGER of 3 bytes }.
                let der = pair.public_key().as_ref();
                assert_eq!(der.len(), 270, "a key of 2048 bits");
                json!({"kty": "RSA", "n": encoded(&der[9..265]), "e": encoded(&der[267..])})
            }
            Pair::Ed(pair) => {
                json!({"kty": "OKP", "crv": "Ed25519", "x": encoded(pair.public_key().as_ref())})
            }
        };
        key["use"] = json!("sig");
        key["alg"] = json!(self.algorithm());
        if let Some(kid) = &self.kid {
            key["kid"] = json!(kid);
        }
        key
    }

    /// Returns the public key in DER, as an attacker has it.
    pub fn public(&self) -> Vec<u8> {
        match &self.pair {
            Pair::Ec(pair) => pair.public_key().as_ref().to_vec(),
            Pair::Rsa(pair) => pair.public_key().as_ref().to_vec(),
            Pair::Ed(pair) => pair.public_key().as_ref().to_vec(),
        }
    }

    /// Returns its algorithm.
    pub fn algorithm(&self) -> &'static str {
        match &self.pair {
            Pair::Ec(_) => "ES256",
            Pair::Rsa(_) => "RS256",
            Pair::Ed(_) => "EdDSA",
        }
    }

    /// Returns a token with these claims.
    pub fn token(&self, claims: &Value) -> String {
        let mut head = json!({"typ": "JWT", "alg": self.algorithm()});
        if let Some(kid) = &self.kid {
            head["kid"] = json!(kid);
        }
        self.token_with(&head, claims)
    }

    /// Returns a token with these claims and this header, whatever it says.
    pub fn token_with(&self, head: &Value, claims: &Value) -> String {
        let message = unsigned(head, claims);
        let random = SystemRandom::new();
        let signature = match &self.pair {
            Pair::Ec(pair) => pair
                .sign(&random, message.as_bytes())
                .expect("a key that was generated signs")
                .as_ref()
                .to_vec(),
            Pair::Rsa(pair) => {
                let mut signature = vec![0; 256];
                pair.sign(&RSA_PKCS1_SHA256, &random, message.as_bytes(), &mut signature)
                    .expect("a key that was generated signs");
                signature
            }
            Pair::Ed(pair) => pair.sign(message.as_bytes()).as_ref().to_vec(),
        };
        format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature))
    }
}

/// Returns the first two parts of a token.
pub fn unsigned(head: &Value, claims: &Value) -> String {
    let encoded = |part: &Value| BASE64_URL_SAFE_NO_PAD.encode(part.to_string());
    format!("{}.{}", encoded(head), encoded(claims))
}

/// A running issuer. Dropping it ends its connections.
#[derive(Debug)]
pub struct Issuer {
    address: SocketAddr,
    certificates: Certificates,
    shared: Arc<Shared>,
    _server: JoinSet<()>,
    _dir: TempDir,
}

#[derive(Debug)]
struct Shared {
    url: String,
    answers: Mutex<Answers>,
    /// How often each of the two documents was asked for.
    asked: watch::Sender<(usize, usize)>,
}

#[derive(Debug, Default)]
struct Answers {
    keys: Vec<Value>,
    /// Instead of its own.
    issuer: Option<String>,
    /// Instead of its own.
    keys_uri: Option<String>,
    /// Instead of any document.
    status: Option<StatusCode>,
    /// The user that may log in.
    login: Option<Login>,
}

#[derive(Debug)]
struct Login {
    id_token: String,
    /// The user has not entered the code yet.
    is_pending: bool,
}

impl Issuer {
    /// Starts one without keys.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start() -> Result<Self> {
        net::tls::install();
        let dir = TempDir::with_prefix("issuer-test-").context("a folder for an issuer")?;
        let certificates = Certificates::new(dir.path(), &["127.0.0.1"])?;
        let tls = net::tls::server(&certificates.certificate, &certificates.key)?;
        let tls = net::tls::or_http1(&tls);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            url: format!("https://{address}/realm"),
            answers: Mutex::default(),
            asked: watch::Sender::new((0, 0)),
        });
        let mut server = JoinSet::new();
        server.spawn(serve(listener, TlsAcceptor::from(tls), Arc::clone(&shared)));
        Ok(Self { address, certificates, shared, _server: server, _dir: dir })
    }

    /// Returns where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its URL, which is the claim `iss` of its tokens.
    pub fn url(&self) -> &str {
        &self.shared.url
    }

    /// Returns the file with the certificate of its CA.
    pub fn ca_file(&self) -> PathBuf {
        self.certificates.ca.clone()
    }

    /// Publishes these keys and no others.
    pub fn publish<'a>(&self, keys: impl IntoIterator<Item = &'a SigningKey>) {
        self.shared.answers.lock().keys = keys.into_iter().map(SigningKey::jwk).collect();
    }

    /// Answers with this status instead of any document; `None`: no longer.
    pub fn fail(&self, status: Option<StatusCode>) {
        self.shared.answers.lock().status = status;
    }

    /// Offers the device flow (RFC 8628), in which one user logs in: the first question for tokens is told to
    /// come again, and each later one gets this ID token.
    pub fn let_log_in(&self, id_token: String) {
        self.shared.answers.lock().login = Some(Login { id_token, is_pending: true });
    }

    /// Calls itself otherwise in its discovery document.
    pub fn call_itself(&self, issuer: &str) {
        self.shared.answers.lock().issuer = Some(issuer.to_owned());
    }

    /// Names another place of its keys.
    pub fn keep_keys_at(&self, uri: &str) {
        self.shared.answers.lock().keys_uri = Some(uri.to_owned());
    }

    /// Returns how often its keys were asked for.
    pub fn keys_asked(&self) -> usize {
        self.shared.asked.borrow().1
    }

    /// Waits until its discovery document was asked for that often.
    pub async fn discovered(&self, times: usize) {
        let mut asked = self.shared.asked.subscribe();
        let all = asked.wait_for(|(discovery, _)| *discovery >= times);
        let all = soon(&format!("an issuer was asked {times} times"), all).await;
        all.map(drop).expect("the sender lives as long as this");
    }

    /// Returns the claims of a token that is valid for an hour; `more` is added.
    pub fn claims(&self, audience: &str, more: Value) -> Value {
        let mut claims = json!({"iss": self.url(), "aud": audience, "iat": now(), "exp": now() + 3600});
        crate::kas::merge(&mut claims, more);
        claims
    }
}

async fn serve(listener: TcpListener, tls: TlsAcceptor, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { return };
                connections.spawn(connection(stream, tls.clone(), Arc::clone(&shared)));
            }
        }
    }
}

async fn connection(stream: TcpStream, tls: TlsAcceptor, shared: Arc<Shared>) {
    // The client notices in any case how a connection ends.
    let Ok(stream) = tls.accept(stream).await else { return };
    let service = service_fn(move |request| {
        let answer = shared.answer(&request);
        async { Ok::<_, Infallible>(answer) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

impl Shared {
    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let place = request.uri().path().strip_prefix("/realm");
        let is_discovery = place == Some(DISCOVERY);
        let is_keys = place == Some(KEYS);
        let mut answers = self.answers.lock();
        let (own, document) = match (place, &mut answers.login) {
            (Some(DEVICE), Some(_)) => {
                let code = json!({
                    "device_code": "device-code",
                    "user_code": "ABCD-EFGH",
                    "verification_uri": format!("{}/oauth/device", self.url),
                    "expires_in": 600,
                    "interval": 0,
                });
                (StatusCode::OK, code)
            }
            (Some(TOKEN), Some(login)) if login.is_pending => {
                login.is_pending = false;
                (StatusCode::BAD_REQUEST, json!({ "error": "authorization_pending" }))
            }
            (Some(TOKEN), Some(login)) => {
                let tokens = json!({
                    "id_token": login.id_token,
                    "access_token": "access-token",
                    "refresh_token": "refresh-token",
                    "token_type": "Bearer",
                });
                (StatusCode::OK, tokens)
            }
            (Some(DISCOVERY), login) => {
                let offers_login = login.is_some();
                let own = format!("{}{KEYS}", self.url);
                let mut document = json!({
                    "issuer": answers.issuer.as_ref().unwrap_or(&self.url),
                    "jwks_uri": answers.keys_uri.as_ref().unwrap_or(&own),
                });
                if offers_login {
                    document["device_authorization_endpoint"] = json!(format!("{}{DEVICE}", self.url));
                    document["token_endpoint"] = json!(format!("{}{TOKEN}", self.url));
                }
                (StatusCode::OK, document)
            }
            _ => {
                let known = if is_keys { StatusCode::OK } else { StatusCode::NOT_FOUND };
                (known, json!({ "keys": answers.keys }))
            }
        };
        let status = answers.status.unwrap_or(own);
        drop(answers);
        self.asked.send_modify(|(discovery, keys)| {
            *discovery += usize::from(is_discovery);
            *keys += usize::from(is_keys);
        });
        let mut response = Response::new(Full::from(document.to_string()));
        *response.status_mut() = status;
        if status.is_redirection() {
            // A client that follows it gets the document.
            let place = self.url.parse().expect("a URL is a value of a header");
            response.headers_mut().insert(header::LOCATION, place);
        }
        response
    }
}
