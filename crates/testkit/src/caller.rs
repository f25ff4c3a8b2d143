//! A client of the API listener: any metadata, any chunks, cancelled at any moment.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use grpc::Status;
use h2::Reason;
use http::{HeaderMap, Request, request::Builder};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use prost::Message;
use serde_json::{Value, json};

use crate::link::{Link, Next, Stream};

/// A JWT to be signed; every claim can be changed.
#[derive(Clone, Debug)]
pub struct Jwt {
    secret: Vec<u8>,
    /// How it is signed; `None`: `alg` is `none`, and there is no signature.
    pub algorithm: Option<Algorithm>,
    /// Its claims.
    pub claims: Value,
}

impl Jwt {
    /// A token in GitLab's format, valid for a minute.
    pub fn new(secret: &[u8]) -> Self {
        let now = now();
        let claims = json!({
            "iss": "gitlab",
            "aud": "gitlab-kas",
            "iat": now,
            "nbf": now - 5,
            "exp": now + 60,
            "jti": format!("{:032x}", rand::random::<u128>()),
        });
        Self { secret: secret.to_vec(), algorithm: Some(Algorithm::HS256), claims }
    }

    /// Sets a claim; null removes it.
    pub fn claim(mut self, name: &str, value: Value) -> Self {
        if let Some(claims) = self.claims.as_object_mut() {
            claims.insert(name.to_owned(), value);
            claims.retain(|_, value| !value.is_null());
        }
        self
    }

    /// Sets how it is signed.
    pub fn algorithm(mut self, algorithm: Option<Algorithm>) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Returns the token.
    ///
    /// # Panics
    /// If the algorithm uses no secret.
    pub fn encode(&self) -> String {
        match self.algorithm {
            Some(algorithm) => jsonwebtoken::encode(
                &Header::new(algorithm),
                &self.claims,
                &EncodingKey::from_secret(&self.secret),
            )
            .expect("an HMAC takes any secret"),
            None => {
                let part = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
                format!("{}.{}.", part(&json!({ "alg": "none", "typ": "JWT" })), part(&self.claims))
            }
        }
    }
}

/// Returns the time in seconds since 1970.
pub fn now() -> i64 {
    i64::try_from(jsonwebtoken::get_current_timestamp()).expect("the year is before 292 billion")
}

/// A complete response.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The headers; empty if there were only trailers.
    pub headers: HeaderMap,
    /// The messages.
    pub messages: Vec<Bytes>,
    /// How it ended.
    pub status: Status,
    /// The trailers, or the headers if there were only those.
    pub trailers: HeaderMap,
    /// Whether the response was a single header block.
    pub trailers_only: bool,
}

impl Answer {
    /// Returns the only message.
    ///
    /// # Errors
    /// The status unless it is OK; or if there is not exactly one message.
    pub fn one<M: Message + Default>(&self) -> Result<M> {
        anyhow::ensure!(self.status.code() == grpc::Code::Ok, "{}", self.status);
        anyhow::ensure!(self.messages.len() == 1, "{} messages instead of one", self.messages.len());
        Ok(M::decode(self.messages[0].clone())?)
    }
}

/// One connection to the API listener.
#[derive(Clone, Debug)]
pub struct Caller {
    link: Link,
    token: Option<String>,
}

impl Caller {
    /// Connects; every request carries `token`.
    ///
    /// # Errors
    /// When kas cannot be reached.
    pub async fn connect(api: SocketAddr, token: Option<String>) -> Result<Self> {
        Ok(Self { link: Link::connect(api).await?, token })
    }

    /// Returns the connection.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Begins the headers of a request.
    pub fn request(&self, method: &str) -> Builder {
        let request = Request::post(format!("http://{}{method}", self.link.address()))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    /// Begins the headers of a request for an agent.
    pub fn to_agent(&self, agent: i64, method: &str) -> Builder {
        self.request(method).header("kas-agent-id", agent)
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// When the headers are illegal, or the connection is over.
    pub async fn open(&self, request: Builder) -> Result<Stream> {
        self.link.open(request.body(())?).await
    }

    /// Sends a request with these messages and waits for the complete response.
    ///
    /// # Errors
    /// When the stream is reset.
    pub async fn call(&self, request: Builder, messages: &[&[u8]]) -> Result<Answer> {
        let mut stream = self.open(request).await?;
        for message in messages {
            // A response may arrive before the whole request was sent.
            if stream.send(frame(message)).await.is_err() {
                return answer(&mut stream).await;
            }
        }
        let _ = stream.half_close();
        answer(&mut stream).await
    }

    /// Calls a unary method of kas itself.
    ///
    /// # Errors
    /// The status, unless it is OK.
    pub async fn unary<M: Message + Default>(&self, method: &str, message: &impl Message) -> Result<M> {
        self.call(self.request(method), &[&message.encode_to_vec()]).await?.one()
    }
}

/// Returns a message's bytes as one gRPC frame.
pub fn frame(message: &[u8]) -> Bytes {
    let len = u32::try_from(message.len()).expect("messages of tests are small");
    [&grpc::prefix(len)[..], message].concat().into()
}

/// Waits for the complete response on a stream.
///
/// # Errors
/// When the stream is reset, or has no status.
pub async fn answer(stream: &mut Stream) -> Result<Answer> {
    let reset = |reason: Reason| anyhow::anyhow!("the stream was reset: {reason:?}");
    let (_, headers) = stream.head().await.map_err(reset)?.clone();
    if let Some(status) = Status::from_headers(&headers) {
        return Ok(Answer {
            headers: HeaderMap::new(),
            messages: Vec::new(),
            status,
            trailers: headers,
            trailers_only: true,
        });
    }
    let mut messages = Vec::new();
    loop {
        match stream.next().await {
            Next::Message(message) => messages.push(message),
            Next::Trailers(trailers) => {
                let status = Status::from_headers(&trailers).context("trailers without a status")?;
                return Ok(Answer { headers, messages, status, trailers, trailers_only: false });
            }
            Next::End => anyhow::bail!("an end without trailers after {headers:?}"),
            Next::Reset(reason) => return Err(reset(reason)),
        }
    }
}
