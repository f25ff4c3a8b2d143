//! Who may call: bearer tokens off requests, and JWTs of GitLab and operators.
//!
//! Fails closed: what cannot be checked is refused. The reason goes to the debug log, never to the
//! caller.

use grpc::{Code, Status};
use http::HeaderMap;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde::Deserialize;

use crate::config::secret::ApiSecret;

/// The audience of every JWT that kas accepts.
pub const AUDIENCE: &str = "gitlab-kas";

/// Returns the bearer token of a request.
///
/// # Errors
/// `UNAUTHENTICATED`, in the words of 14.1; several `authorization` headers are refused.
pub fn bearer(headers: &HeaderMap) -> Result<&[u8], Status> {
    let unauthenticated = |text| Status::new(Code::Unauthenticated, text);
    let mut values = headers.get_all(http::header::AUTHORIZATION).iter();
    let value = values.next().ok_or_else(|| unauthenticated("Request unauthenticated with bearer"))?.as_bytes();
    if values.next().is_some() {
        return Err(unauthenticated("Expecting a single authorization header"));
    }
    let space = value.iter().position(|b| *b == b' ').ok_or_else(|| unauthenticated("Bad authorization string"))?;
    if !value[..space].eq_ignore_ascii_case(b"bearer") {
        return Err(unauthenticated("Request unauthenticated with bearer"));
    }
    Ok(&value[space + 1..])
}

/// Checks the JWTs of one listener.
pub struct JwtVerifier {
    keys: Vec<DecodingKey>,
    validation: Validation,
}

impl std::fmt::Debug for JwtVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JwtVerifier({} keys)", self.keys.len())
    }
}

/// Only what `Validation` checks: nothing else of a token is used.
#[derive(Deserialize)]
struct Claims {}

impl JwtVerifier {
    /// Accepts HS256 tokens signed with any of `secrets`, for [`AUDIENCE`], of one of `issuers`,
    /// with an expiry. `leeway` is what clocks may differ by.
    pub fn new(secrets: &[ApiSecret], issuers: &[String], leeway: std::time::Duration) -> Self {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_audience(&[AUDIENCE]);
        validation.set_issuer(issuers);
        validation.set_required_spec_claims(&["exp", "aud", "iss"]);
        validation.validate_exp = true;
        validation.validate_nbf = true;
        validation.leeway = leeway.as_secs();
        Self { keys: secrets.iter().map(|secret| DecodingKey::from_secret(secret.expose())).collect(), validation }
    }

    /// Checks the token of a request.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`.
    pub fn verify(&self, headers: &HeaderMap) -> Result<(), Status> {
        let token = bearer(headers)?;
        let mut reason = None;
        for key in &self.keys {
            match jsonwebtoken::decode::<Claims>(token, key, &self.validation) {
                Ok(_) => return Ok(()),
                Err(error) => reason = Some(error),
            }
        }
        if let Some(error) = reason {
            tracing::debug!(error = %error, "jwt refused");
        }
        Err(Status::new(Code::Unauthenticated, "JWT validation failed"))
    }
}
