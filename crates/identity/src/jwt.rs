//! Authenticates callers: bearer tokens of requests, and JWTs of GitLab and operators.
//!
//! Fails closed: a token that cannot be checked is refused. The reason is written to the debug log. Only
//! another replica is told it, if its clock differs.

use std::{collections::HashMap, sync::Arc, time::Duration};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use grpc::{Code, Outcome, Status};
use http::HeaderMap;
use ids::Actor;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, errors::ErrorKind};
use parking_lot::{Mutex, MutexGuard};
use serde::Deserialize;
use tokio::time::Instant;

use settings::secret::ApiSecret;

/// The audience of every JWT that kas accepts.
pub const AUDIENCE: &str = "gitlab-kas";
/// The issuer of tokens of replicas, in the claim `iss`.
pub const ISSUER: &str = "gitlab-kas";
/// Maximum difference between the clocks of replicas. Each second of it is one in which a stolen token is
/// valid for longer.
const REPLICA_LEEWAY: Duration = Duration::from_secs(30);

/// Returns the bearer token of a request.
///
/// # Errors
/// `UNAUTHENTICATED`, with the messages of 14.1; several `authorization` headers are refused.
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

/// Maximum number of verified tokens in the cache.
const REMEMBERED: usize = 1024;
/// Longest token in bytes that is cached, so that the cache stays small. Longer ones are verified each time.
const LONGEST_REMEMBERED: usize = 2048;
/// Minimum time between two log messages about an issuer that is not accepted, and about clocks.
const LOGGED: Duration = Duration::from_secs(60);

/// The signatures that are accepted, and the length in bytes that a secret needs for each: that of the hash
/// (RFC 7518, section 3.2). For HS256, it is checked when the secret is read. kas of GitLab, 14.1 and 16.5,
/// accepts the same ones with a secret of any length.
const ALGORITHMS: [(Algorithm, usize); 3] =
    [(Algorithm::HS256, 0), (Algorithm::HS384, 48), (Algorithm::HS512, 64)];

/// Verifies the JWTs of one listener.
///
/// A verified token is cached with its expiry, which is checked on each use: a valid signature stays valid,
/// and verifying it takes 40 % of a small request.
pub struct JwtVerifier {
    /// Each with the rules for its tokens, which differ in the accepted signatures.
    keys: Vec<(DecodingKey, Validation)>,
    /// Maximum clock difference, in seconds.
    leeway: u64,
    verified: Mutex<HashMap<Box<[u8]>, Verified>>,
    /// Whether the tokens are those of other replicas, which are told when the clocks differ.
    of_replicas: bool,
    /// When the last message about an issuer that is not accepted was logged, or about clocks.
    logged: Mutex<Option<Instant>>,
}

/// A token with a valid signature.
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

/// The claims that are used after `Validation` has checked them.
#[derive(Deserialize)]
struct Claims {
    /// Seconds since 1970. GitLab writes integers, and kas of GitLab fractions.
    exp: f64,
    /// For the audit log. Any type: its validity has been decided before.
    #[serde(default)]
    iss: serde_json::Value,
    #[serde(default)]
    sub: serde_json::Value,
    /// By the clock of the signer. Any type: no decision depends on it.
    #[serde(default)]
    iat: serde_json::Value,
}

impl Claims {
    fn actor(&self) -> Arc<Actor> {
        /// Maximum length of a claim in the audit log, in characters.
        const LONGEST: usize = 128;
        let text = |claim: &serde_json::Value| {
            claim.as_str().map(|text| text.chars().take(LONGEST).collect::<String>())
        };
        Arc::new(Actor { issuer: text(&self.iss).unwrap_or_default(), subject: text(&self.sub) })
    }
}

impl JwtVerifier {
    /// Accepts tokens that are signed with any of `secrets`, have the audience [`AUDIENCE`], one of `issuers`
    /// and an expiry. The signature is HS256, or HS384 or HS512 if the secret has at least 48 or 64 bytes.
    /// `leeway` is the maximum clock difference, in whole seconds.
    pub fn new(secrets: &[ApiSecret], issuers: &[String], leeway: Duration) -> Self {
        Self::with_secrets(secrets.iter().map(ApiSecret::expose), issuers, leeway)
    }

    /// Accepts the tokens of other replicas, signed with any of `secrets`. See [`new`](Self::new).
    pub fn for_replicas(secrets: &[ApiSecret]) -> Self {
        let verifier = Self::new(secrets, &[ISSUER.to_owned()], REPLICA_LEEWAY);
        Self { of_replicas: true, ..verifier }
    }

    fn with_secrets<'a>(
        secrets: impl Iterator<Item = &'a [u8]>,
        issuers: &[String],
        leeway: Duration,
    ) -> Self {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_audience(&[AUDIENCE]);
        validation.set_issuer(issuers);
        validation.set_required_spec_claims(&["exp", "aud", "iss"]);
        validation.validate_exp = true;
        validation.validate_nbf = true;
        validation.leeway = leeway.as_secs();
        let keys = secrets.map(|secret| {
            let mut validation = validation.clone();
            let accepted = ALGORITHMS.iter().filter(|(_, bytes)| secret.len() >= *bytes);
            validation.algorithms = accepted.map(|(algorithm, _)| *algorithm).collect();
            (DecodingKey::from_secret(secret), validation)
        });
        Self {
            keys: keys.collect(),
            leeway: leeway.as_secs(),
            verified: Mutex::default(),
            of_replicas: false,
            logged: Mutex::default(),
        }
    }

    /// Checks the token of a request and returns its actor.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`; for a token of another replica that is of another time with the outcome "not
    /// started" and a text for people.
    pub fn verify(&self, headers: &HeaderMap) -> Result<Arc<Actor>, Status> {
        let token = bearer(headers)?;
        let now = process::clock::wall().as_secs_f64();
        if let Some(verified) = self.verified().get(token)
            && now < verified.exp + self.leeway as f64
        {
            return Ok(Arc::clone(&verified.actor));
        }
        let mut reason = None;
        for (key, validation) in &self.keys {
            match jsonwebtoken::decode::<Claims>(token, key, validation) {
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
                    match error.kind() {
                        ErrorKind::InvalidIssuer => self.log_issuer(token),
                        // Times are checked after the signature, so only a caller that knows the secret is
                        // told.
                        ErrorKind::ExpiredSignature | ErrorKind::ImmatureSignature if self.of_replicas => {
                            return Err(self.other_time(token, now));
                        }
                        _ => {}
                    }
                    reason = Some(error);
                }
            }
        }
        if let Some(error) = reason {
            let why = matches!(error.kind(), ErrorKind::InvalidAlgorithm).then_some(
                "expected HS256, or with a secret of at least 48 bytes HS384, of at least 64 bytes HS512",
            );
            tracing::debug!(error = %error, why, "jwt refused");
        }
        Err(Status::new(Code::Unauthenticated, "JWT validation failed"))
    }

    /// Logs that a token with a valid signature has an issuer that is not in the list. Its signer knows the
    /// secret, so this is a configuration error, but the caller gets no reason.
    fn log_issuer(&self, token: &[u8]) {
        if !self.may_log() {
            return;
        }
        let claims = jsonwebtoken::dangerous::insecure_decode::<Claims>(token);
        let issuer = claims.map(|data| data.claims.actor().issuer.clone()).unwrap_or_default();
        tracing::warn!(
            issuer,
            "refused a token with a valid signature: its issuer is not accepted; is it missing in api.listen.issuers?"
        );
    }

    /// Returns the status for a token of another replica with a valid signature that is of another time.
    fn other_time(&self, token: &[u8], now: f64) -> Status {
        let claims = jsonwebtoken::dangerous::insecure_decode::<Claims>(token).map(|data| data.claims);
        let signer =
            claims.as_ref().ok().and_then(|claims| claims.actor().subject.clone()).unwrap_or_default();
        let apart = claims.ok().and_then(|claims| claims.iat.as_f64()).map(|made| made - now);
        // In minutes: a replica that is told logs only what is new, and a token is up to 20 s old.
        let apart_by = apart.map_or_else(
            || "ahead or behind".to_owned(),
            |apart| {
                let minutes = (apart.abs() / 60.0).round().max(1.0);
                format!("about {minutes} min {}", if apart > 0.0 { "ahead" } else { "behind" })
            },
        );
        let leeway = self.leeway;
        if self.may_log() {
            tracing::warn!(
                replica = signer,
                apart_seconds = apart.map(f64::round),
                "refused a call of another replica: its clock and that of this replica differ by more than 30 s; check \
                 the time of both hosts"
            );
        }
        let text = format!(
            "the clock of the replica {signer:?} is {apart_by} of that of this replica, and {leeway} s are allowed: \
             check the time of both hosts"
        );
        // The outcome tells this from a wrong secret, which may be right in a moment: the request of a caller
        // fails at once with this text.
        Status::new(Code::Unauthenticated, text).with_outcome(Outcome::NotStarted)
    }

    /// Whether a message may be logged: at most one in [`LOGGED`], as every call may cause one.
    fn may_log(&self) -> bool {
        let now = Instant::now();
        let mut logged = self.logged.lock();
        let may = logged.is_none_or(|logged| now >= logged + LOGGED);
        if may {
            *logged = Some(now);
        }
        may
    }

    fn verified(&self) -> MutexGuard<'_, HashMap<Box<[u8]>, Verified>> {
        self.verified.lock()
    }

    fn remember(&self, token: &[u8], new: Verified, now: f64) {
        if token.len() > LONGEST_REMEMBERED {
            return;
        }
        let mut verified = self.verified();
        // Before the map would grow: tokens live for seconds, and a full cache of expired ones is 1 MB.
        if verified.len() == verified.capacity() {
            verified.retain(|_, verified| verified.exp > now);
        }
        if verified.len() >= REMEMBERED {
            verified.clear();
        }
        verified.insert(token.into(), new);
    }
}

/// Returns a violation of RFC 7515 or 7519 that the library does not detect in a token with a valid
/// signature. Called once for each token that is accepted, because it is cached then.
fn unusable(token: &[u8], claims: &Claims) -> Option<&'static str> {
    // The library decodes the header but ignores unknown keys.
    let header = token.split(|b| *b == b'.').next().unwrap_or_default();
    let header = BASE64_URL_SAFE_NO_PAD.decode(header).unwrap_or_default();
    let Ok(header) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&header) else {
        return Some("its header is not a JSON object");
    };
    // Section 4.1.11: an unknown critical extension must not be ignored, and none is known here.
    if header.contains_key("crit") {
        return Some("its header names critical extensions (crit)");
    }
    // The library also accepts a list that contains an issuer.
    (!claims.iss.is_string()).then_some("its issuer is not a text")
}

#[cfg(feature = "fuzzing")]
/// Checks `bytes` as a token and as the claims of a token with a valid signature, for a fuzz target.
///
/// # Panics
/// If a token is accepted that should be refused.
pub fn fuzz(bytes: &[u8]) {
    use BASE64_URL_SAFE_NO_PAD as BASE64;
    const SECRET: &[u8] = &[b's'; 32];
    let verifier = JwtVerifier::with_secrets(std::iter::once(SECRET), &["gitlab".to_owned()], Duration::ZERO);
    let verify = |value: &[u8]| {
        let mut headers = HeaderMap::new();
        let value = http::HeaderValue::from_bytes(value).ok()?;
        headers.insert(http::header::AUTHORIZATION, value);
        verifier.verify(&headers).ok()
    };
    assert!(verify(bytes).is_none(), "an unsigned token was accepted");
    assert!(verify(&[b"Bearer ", bytes].concat()).is_none(), "an unsigned token was accepted");
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
        signed(claims, secret, Algorithm::HS256)
    }

    fn signed(claims: &serde_json::Value, secret: &[u8], algorithm: Algorithm) -> HeaderMap {
        let token =
            jsonwebtoken::encode(&Header::new(algorithm), claims, &EncodingKey::from_secret(secret)).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
        headers
    }

    fn verifier(dir: &std::path::Path, leeway: u64) -> JwtVerifier {
        let path = dir.join("secret");
        // Base64 of 32 letters s.
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
        // The signature is still valid, so the token is verified again and found unexpired. A token with an
        // expired claim is refused.
        verifier.verify(&headers).unwrap();
        let old = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": 1});
        assert!(verifier.verify(&self::headers(&old, &[b's'; 32])).is_err());
    }

    #[test]
    fn replicas_are_told_that_their_clocks_differ_and_strangers_are_not() {
        let dir = tempfile::tempdir().unwrap();
        verifier(dir.path(), 0);
        let verifier = JwtVerifier::for_replicas(&[ApiSecret::read(&dir.path().join("secret")).unwrap()]);
        let now = process::clock::wall().as_secs();
        let token = |made: u64, secret: &[u8]| {
            let claims = serde_json::json!({
                "aud": AUDIENCE, "iss": ISSUER, "sub": "a", "iat": made, "nbf": made - 5, "exp": made + 60,
            });
            verifier.verify(&headers(&claims, secret))
        };
        for made in [now - 85, now, now + 30] {
            token(made, &[b's'; 32]).expect("within the leeway");
        }
        for (made, expected) in [(now - 3610, " about 60 min behind "), (now + 3600, " about 60 min ahead ")]
        {
            let status = token(made, &[b's'; 32]).unwrap_err();
            assert_eq!((status.code(), status.outcome()), (Code::Unauthenticated, Some(Outcome::NotStarted)));
            assert!(status.message().contains(expected), "{status}");
            assert_eq!(token(made, &[b'x'; 32]).unwrap_err().message(), "JWT validation failed");
        }
    }

    #[test]
    fn a_token_returns_its_actor_each_time() {
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
    fn longer_hashes_are_accepted_for_secrets_that_are_as_long() {
        let exp = process::clock::wall().as_secs() + 60;
        let claims = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": exp});
        // The second secret is the one that has signed.
        let accepts = |length: usize, algorithm: Algorithm| {
            let secret = vec![b's'; length];
            let secrets = [&[b'x'; 64][..], &secret].into_iter();
            let verifier = JwtVerifier::with_secrets(secrets, &["gitlab".to_owned()], Duration::ZERO);
            let verify = |key: &[u8]| verifier.verify(&signed(&claims, key, algorithm)).is_ok();
            assert!(!verify(&vec![b'y'; length]), "{algorithm:?} with another secret");
            verify(&secret)
        };
        use Algorithm::{HS256, HS384, HS512};
        for (length, expected) in [
            (32, &[HS256][..]),
            (47, &[HS256]),
            (48, &[HS256, HS384]),
            (63, &[HS256, HS384]),
            (64, &[HS256, HS384, HS512]),
            (100, &[HS256, HS384, HS512]),
        ] {
            for algorithm in [HS256, HS384, HS512] {
                assert_eq!(
                    accepts(length, algorithm),
                    expected.contains(&algorithm),
                    "{length} {algorithm:?}"
                );
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
            // The second call shows that a refused token is not cached.
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
    fn the_cache_is_bounded_and_contains_only_verified_tokens() {
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

    #[test]
    fn expired_tokens_are_forgotten_before_the_cache_grows() {
        let dir = tempfile::tempdir().unwrap();
        let verifier = verifier(dir.path(), 5);
        let exp = process::clock::wall().as_secs() + 60;
        for jti in 0..REMEMBERED {
            let claims = serde_json::json!({"aud": AUDIENCE, "iss": "gitlab", "exp": exp, "jti": jti});
            verifier.verify(&headers(&claims, &[b's'; 32])).unwrap();
            for verified in verifier.verified().values_mut() {
                verified.exp = 1.0;
            }
        }
        assert!(verifier.verified().len() < 16);
    }
}
