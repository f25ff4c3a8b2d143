//! The credential that replicas show each other.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use http::HeaderValue;
use identity::jwt::{AUDIENCE, ISSUER};
use ids::ReplicaId;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use parking_lot::Mutex;
use settings::secret::ApiSecret;
use tokio::time::Instant;

/// How long a token of this replica is valid. The other replica allows its clock to differ by 30 s more.
const TOKEN_LIFE: Duration = Duration::from_secs(60);
/// How long a token is used.
const TOKEN_USE: Duration = Duration::from_secs(20);
/// How many seconds before and after now a token for a replica of GitLab's kas is valid, as in 14.1.
const TOKEN_14_1: f64 = 5.0;

/// Signs the calls of this replica with the first of the shared secrets.
pub struct Credential {
    key: ArcSwap<EncodingKey>,
    name: ReplicaId,
    current: Mutex<Option<(Instant, HeaderValue)>>,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Credential {
    /// Signs as `name` with `secret`.
    pub fn new(name: ReplicaId, secret: &ApiSecret) -> Self {
        Self {
            key: ArcSwap::from_pointee(EncodingKey::from_secret(secret.expose())),
            name,
            current: Mutex::default(),
        }
    }

    /// Replaces the secret.
    pub fn rotate(&self, secret: &ApiSecret) {
        self.key.store(Arc::new(EncodingKey::from_secret(secret.expose())));
        *self.current.lock() = None;
    }

    /// Returns a value for `authorization`.
    pub fn authorization(&self) -> HeaderValue {
        let mut current = self.current.lock();
        if let Some((made, value)) = &*current
            && made.elapsed() < TOKEN_USE
        {
            return value.clone();
        }
        let now = process::clock::wall().as_secs();
        let claims = serde_json::json!({
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": self.name.as_str(),
            "iat": now,
            // Clocks may differ by a few seconds.
            "nbf": now.saturating_sub(5),
            "exp": now + TOKEN_LIFE.as_secs(),
        });
        let value = self.sign(&claims);
        *current = Some((Instant::now(), value.clone()));
        value
    }

    /// Returns a value for `authorization` of one call to a replica of GitLab's kas. Its address comes from
    /// Redis. The token is valid for a short time only, since any process that can write there may get it.
    pub fn authorization_14_1(&self) -> HeaderValue {
        let now = process::clock::wall().as_secs_f64();
        self.sign(&serde_json::json!({
            "iss": ISSUER,
            "aud": [AUDIENCE],
            "iat": now,
            "nbf": now - TOKEN_14_1,
            "exp": now + TOKEN_14_1,
        }))
    }

    fn sign(&self, claims: &serde_json::Value) -> HeaderValue {
        let token = jsonwebtoken::encode(&Header::new(Algorithm::HS256), claims, &self.key.load())
            .expect("an HMAC of a small object cannot fail");
        HeaderValue::try_from(format!("Bearer {token}")).expect("a JWT is ASCII")
    }
}
