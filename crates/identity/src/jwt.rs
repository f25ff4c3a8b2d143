//! Who may call: bearer tokens off requests, and JWTs of GitLab and operators.
//!
//! Fails closed: what cannot be checked is refused. The reason goes to the debug log, never to the
//! caller.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use grpc::{Code, Status};
use http::HeaderMap;
use ids::Actor;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, errors::ErrorKind};
use serde::Deserialize;
use tokio::time::Instant;

use settings::secret::ApiSecret;

/// The audience of every JWT that kas accepts.
pub const AUDIENCE: &str = "gitlab-kas";
/// Who signs the tokens of replicas, in the claim `iss`.
pub const ISSUER: &str = "gitlab-kas";
/// By how much the clocks of replicas may differ.
const REPLICA_LEEWAY: Duration = Duration::from_secs(30);

/// Returns the bearer token of a request.
///
/// # Errors
/// `UNAUTHENTICATED`, in the words of 14.1; several `authorization` headers are refused.
pub fn bearer(headers: &HeaderMap) -> Result<&[u8], Status> {
    let unauthenticated = |text| Status::new(Code::Unauthenticated, text);
    let mut values = headers.get_all(http::header::AUTHORIZATION).iter();
    let value =
        values.next().ok_or_else(|| unauthenticated("Request unauthenticated with bearer"))?.as_bytes();
    if values.next().is_some() {
        return Err(unauthenticated("Expecting a single authorization header"));
    }
    let space =
        value.iter().position(|b| *b == b' ').ok_or_else(|| unauthenticated("Bad authorization string"))?;
    if !value[..space].eq_ignore_ascii_case(b"bearer") {
        return Err(unauthenticated("Request unauthenticated with bearer"));
    }
    Ok(&value[space + 1..])
}

/// Verified tokens that are remembered until they expire.
const REMEMBERED: usize = 1024;
/// A longer token is checked each time: it must not make the memory grow.
const LONGEST_REMEMBERED: usize = 2048;
/// How often the log tells of an issuer that is not accepted.
const TOLD: Duration = Duration::from_secs(60);

/// Checks the JWTs of one listener.
///
/// A token that was verified is remembered with its expiry, which is checked on each use: the
/// signature of the same bytes cannot become wrong, and checking it is 40 % of a small request.
pub struct JwtVerifier {
    keys: Vec<DecodingKey>,
    validation: Validation,
    verified: Mutex<HashMap<Box<[u8]>, Verified>>,
    /// When the log last told of an issuer that is not accepted.
    told: Mutex<Option<Instant>>,
}

/// A token that was verified.
#[derive(Clone, Debug)]
struct Verified {
    exp: f64,
    actor: Arc<Actor>,
}

impl std::fmt::Debug for JwtVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JwtVerifier({} keys)", self.keys.len())
    }
}

/// `Validation` checks the claims; these are used after it.
#[derive(Deserialize)]
struct Claims {
    /// Seconds since 1970; GitLab writes whole ones, kas of GitLab fractions.
    exp: f64,
    /// For the audit log. Of whatever type: what it may be was decided before.
    #[serde(default)]
    iss: serde_json::Value,
    #[serde(default)]
    sub: serde_json::Value,
}

impl Claims {
    fn actor(&self) -> Arc<Actor> {
        /// Characters of a claim that are kept.
        const LONGEST: usize = 128;
        let text = |claim: &serde_json::Value| {
            claim.as_str().map(|text| text.chars().take(LONGEST).collect::<String>())
        };
        Arc::new(Actor { issuer: text(&self.iss).unwrap_or_default(), subject: text(&self.sub) })
    }
}

impl JwtVerifier {
    /// Accepts HS256 tokens signed with any of `secrets`, for [`AUDIENCE`], of one of `issuers`,
    /// with an expiry. `leeway` is what clocks may differ by, in whole seconds.
    pub fn new(secrets: &[ApiSecret], issuers: &[String], leeway: Duration) -> Self {
        let keys = secrets.iter().map(|secret| DecodingKey::from_secret(secret.expose())).collect();
        Self::with_keys(keys, issuers, leeway)
    }

    /// Accepts the tokens of other replicas, signed with any of `secrets`. See [`new`](Self::new).
    pub fn for_replicas(secrets: &[ApiSecret]) -> Self {
        Self::new(secrets, &[ISSUER.to_owned()], REPLICA_LEEWAY)
    }

    fn with_keys(keys: Vec<DecodingKey>, issuers: &[String], leeway: Duration) -> Self {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_audience(&[AUDIENCE]);
        validation.set_issuer(issuers);
        validation.set_required_spec_claims(&["exp", "aud", "iss"]);
        validation.validate_exp = true;
        validation.validate_nbf = true;
        validation.leeway = leeway.as_secs();
        Self { keys, validation, verified: Mutex::default(), told: Mutex::default() }
    }

    /// Checks the token of a request, and returns who asks.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`.
    pub fn verify(&self, headers: &HeaderMap) -> Result<Arc<Actor>, Status> {
        let token = bearer(headers)?;
        let now = process::clock::wall().as_secs_f64();
        if let Some(verified) = self.verified().get(token)
            && now < verified.exp + self.validation.leeway as f64
        {
            return Ok(Arc::clone(&verified.actor));
        }
        let mut reason = None;
        for key in &self.keys {
            match jsonwebtoken::decode::<Claims>(token, key, &self.validation) {
                Ok(decoded) => {
                    if let Some(fault) = unusable(token, &decoded.claims) {
                        tracing::debug!(error = fault, "jwt refused");
                        break;
                    }
                    let actor = decoded.claims.actor();
                    self.remember(
                        token,
                        Verified { exp: decoded.claims.exp, actor: Arc::clone(&actor) },
                        now,
                    );
                    return Ok(actor);
                }
                Err(error) => {
                    if matches!(error.kind(), ErrorKind::InvalidIssuer) {
                        self.tell_of_issuer(token);
                    }
                    reason = Some(error);
                }
            }
        }
        if let Some(error) = reason {
            tracing::debug!(error = %error, "jwt refused");
        }
        Err(Status::new(Code::Unauthenticated, "JWT validation failed"))
    }

    /// Tells of a token with a good signature whose issuer is not in the list: no stranger has made it, and
    /// whoever did is told nothing. Now and then, since it may come with each call.
    fn tell_of_issuer(&self, token: &[u8]) {
        let now = Instant::now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_some_and(|told| now < told + TOLD) {
            return;
        }
        *told = Some(now);
        drop(told);
        let claims = jsonwebtoken::dangerous::insecure_decode::<Claims>(token);
        let issuer = claims.map(|data| data.claims.actor().issuer.clone()).unwrap_or_default();
        tracing::warn!(
            issuer,
            "a token with a good signature is refused: its issuer is not accepted; is it missing in api.listen.issuers?"
        );
    }

    fn verified(&self) -> std::sync::MutexGuard<'_, HashMap<Box<[u8]>, Verified>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, token: &[u8], new: Verified, now: f64) {
        if token.len() > LONGEST_REMEMBERED {
            return;
        }
        let mut verified = self.verified();
        if verified.len() >= REMEMBERED {
            verified.retain(|_, verified| verified.exp > now);
        }
        if verified.len() >= REMEMBERED {
            verified.clear();
        }
        verified.insert(token.into(), new);
    }
}

/// What the library accepts in a token with a good signature, and RFC 7515 and 7519 do not. Asked once for
/// each token: what passed is remembered.
fn unusable(token: &[u8], claims: &Claims) -> Option<&'static str> {
    // The library decodes it and forgets the keys that it does not know.
    let header = token.split(|b| *b == b'.').next().unwrap_or_default();
    let header = BASE64_URL_SAFE_NO_PAD.decode(header).unwrap_or_default();
    let Ok(header) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&header) else {
        return Some("its header is no JSON object");
    };
    // Section 4.1.11: an extension that is not understood is not ignored, and none is understood here.
    if header.contains_key("crit") {
        return Some("its header names critical extensions (crit)");
    }
    // The library takes a list in which an issuer stands.
    (!claims.iss.is_string()).then_some("its issuer is no text")
}

#[cfg(feature = "fuzzing")]
/// Checks `bytes` as a token, and as the claims of a token with a good signature: for a fuzz target.
///
/// # Panics
/// When a token is accepted that should not be.
pub fn fuzz(bytes: &[u8]) {
    use BASE64_URL_SAFE_NO_PAD as BASE64;
    const SECRET: &[u8] = &[b's'; 32];
    let verifier = JwtVerifier::with_keys(
        vec![DecodingKey::from_secret(SECRET)],
        &["gitlab".to_owned()],
        Duration::ZERO,
    );
    let verify = |value: &[u8]| {
        let mut headers = HeaderMap::new();
        let value = http::HeaderValue::from_bytes(value).ok()?;
        headers.insert(http::header::AUTHORIZATION, value);
        verifier.verify(&headers).ok()
    };
    assert!(verify(bytes).is_none(), "what nobody signed was accepted");
    assert!(verify(&[b"Bearer ", bytes].concat()).is_none(), "what nobody signed was accepted");
    let message = format!("{}.{}", BASE64.encode(r#"{"alg":"HS256","typ":"JWT"}"#), BASE64.encode(bytes));
    let key = jsonwebtoken::EncodingKey::from_secret(SECRET);
    let Ok(signature) = jsonwebtoken::crypto::sign(message.as_bytes(), &key, Algorithm::HS256) else {
        return;
    };
    if verify(format!("Bearer {message}.{signature}").as_bytes()).is_some() {
        let claims: serde_json::Value = serde_json::from_slice(bytes).expect("accepted claims are JSON");
        let exp = claims["exp"].as_f64().expect("accepted claims have an expiry");
        assert!(exp >= process::clock::wall().as_secs_f64() - 2.0, "accepted claims have not expired");
        let has = |name: &str, value: &str| {
            claims[name] == value
                || claims[name].as_array().is_some_and(|all| all.iter().any(|one| one == value))
        };
        assert!(claims["iss"] == "gitlab" && has("aud", AUDIENCE), "accepted claims are meant for kas");
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header};

    use super::*;

    fn headers(claims: &serde_json::Value, secret: &[u8]) -> HeaderMap {
        let token =
            jsonwebtoken::encode(&Header::new(Algorithm::HS256), claims, &EncodingKey::from_secret(secret))
                .unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
        headers
    }

    fn verifier(dir: &std::path::Path, leeway: u64) -> JwtVerifier {
        let path = dir.join("secret");
        // Base64 of 32 times the letter s.
        std::fs::write(&path, "c3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3M=").unwrap();
        JwtVerifier::new(
            &[ApiSecret::read(&path).unwrap()],
            &["gitlab".to_owned()],
            Duration::from_secs(leeway),
        )
    }

    #[test]
    fn a_remembered_token_is_refused_once_it_has_expired() {
        let dir = tempfile::tempdir().unwrap();
        let verifier = verifier(dir.path(), 0);
        let exp = process::clock::wall().as_secs() + 60;
        let claims = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": exp});
        let headers = headers(&claims, &[b's'; 32]);
        for _ in 0..2 {
            verifier.verify(&headers).unwrap();
        }
        for verified in verifier.verified().values_mut() {
            verified.exp = 1.0;
        }
        // The signature still holds, so it is checked anew and found unexpired; a token whose own
        // claim has passed is not.
        verifier.verify(&headers).unwrap();
        let old = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": 1});
        assert!(verifier.verify(&self::headers(&old, &[b's'; 32])).is_err());
    }

    #[test]
    fn a_token_says_who_asks_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let verifier = verifier(dir.path(), 5);
        let exp = process::clock::wall().as_secs() + 60;
        for (sub, expected) in [
            (serde_json::json!("jane"), Some("jane".to_owned())),
            (serde_json::Value::Null, None),
            (serde_json::json!("x".repeat(200)), Some("x".repeat(128))),
        ] {
            let claims = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": exp, "sub": sub});
            let headers = headers(&claims, &[b's'; 32]);
            for _ in 0..2 {
                let actor = verifier.verify(&headers).unwrap();
                assert_eq!((actor.issuer.as_str(), &actor.subject), ("gitlab", &expected));
            }
        }
    }

    #[test]
    fn critical_extensions_and_lists_of_issuers_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let verifier = verifier(dir.path(), 0);
        let exp = process::clock::wall().as_secs() + 60;
        let key = EncodingKey::from_secret(&[b's'; 32]);
        let verify = |header: &str, iss: serde_json::Value| {
            let claims = serde_json::json!({"aud": AUDIENCE, "iss": iss, "exp": exp}).to_string();
            let [header, claims] = [header, &claims].map(|part| BASE64_URL_SAFE_NO_PAD.encode(part));
            let message = format!("{header}.{claims}");
            let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &key, Algorithm::HS256).unwrap();
            let mut headers = HeaderMap::new();
            headers.insert("authorization", format!("Bearer {message}.{signature}").parse().unwrap());
            // Again: what was refused is not remembered.
            let verified = [verifier.verify(&headers).is_ok(), verifier.verify(&headers).is_ok()];
            assert_eq!(verified[0], verified[1]);
            verified[0]
        };
        let text = || serde_json::json!("gitlab");
        assert!(verify(r#"{"alg":"HS256","typ":"JWT"}"#, text()));
        assert!(verify(r#"{"alg":"HS256","kid":"1","x-other":[1]}"#, text()));
        for crit in [r#"["b64"]"#, r#"["exp"]"#, "[]", "null", r#""b64""#] {
            assert!(!verify(&format!(r#"{{"alg":"HS256","crit":{crit},"b64":true}}"#), text()), "{crit}");
        }
        for iss in
            [serde_json::json!(["gitlab"]), serde_json::json!(["x", "gitlab"]), serde_json::Value::Null]
        {
            assert!(!verify(r#"{"alg":"HS256"}"#, iss.clone()), "{iss}");
        }
    }

    #[test]
    fn what_is_remembered_is_bounded_and_only_what_was_verified() {
        let dir = tempfile::tempdir().unwrap();
        let verifier = verifier(dir.path(), 5);
        let exp = process::clock::wall().as_secs() + 60;
        for jti in 0..REMEMBERED + 10 {
            let claims = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": exp, "jti": jti});
            verifier.verify(&headers(&claims, &[b's'; 32])).unwrap();
            assert!(verifier.verify(&headers(&claims, &[b'x'; 32])).is_err());
        }
        assert!(verifier.verified().len() <= REMEMBERED);
    }
}
