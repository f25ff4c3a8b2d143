//! Tokens for the API listener of kas.

use std::time::Duration;

use jsonwebtoken::{EncodingKey, Header};
use rand::{TryRng as _, rngs::SysRng};
use serde::Serialize;

/// The audience of the token.
const AUDIENCE: &str = "gitlab-kas";
/// How many seconds `nbf` is before `iat`: clocks of two machines differ, and kas allows no leeway.
const BACKDATED: u64 = 5;

/// Validity of the token of a call: long enough for clocks that differ by less than a minute.
pub(crate) const CALL_TTL: Duration = Duration::from_secs(60);
/// The issuer that API clients of kas use.
pub(crate) const DEFAULT_ISSUER: &str = "gitlab";

/// The reason why a token cannot be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The operating system returned no random bytes.
    #[error("the operating system returned no random bytes")]
    Random(#[from] rand::rngs::SysError),
    /// The library could not sign.
    #[error("cannot sign a token")]
    Sign(#[from] jsonwebtoken::errors::Error),
}

/// The claims of a token. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Claims {
    iss: String,
    aud: &'static str,
    iat: u64,
    nbf: u64,
    exp: u64,
    jti: String,
}

impl Claims {
    fn new(issuer: &str, now: Duration, ttl: Duration, jti: String) -> Self {
        let iat = now.as_secs();
        Self {
            iss: issuer.to_owned(),
            aud: AUDIENCE,
            iat,
            nbf: iat.saturating_sub(BACKDATED),
            exp: iat.saturating_add(ttl.as_secs()),
            jti,
        }
    }
}

/// Signs a new token. Every token has a different `jti`.
///
/// # Errors
/// There are no random bytes, or signing failed.
pub(crate) fn mint(secret: &[u8], issuer: &str, ttl: Duration) -> Result<String, Error> {
    let claims = Claims::new(issuer, process::clock::wall(), ttl, unique_id()?);
    Ok(jsonwebtoken::encode(&Header::default(), &claims, &EncodingKey::from_secret(secret))?)
}

/// Returns a random UUID (version 4).
///
/// # Errors
/// The operating system returned no random bytes.
pub(crate) fn unique_id() -> Result<String, rand::rngs::SysError> {
    let mut bytes = [0; 16];
    SysRng.try_fill_bytes(&mut bytes)?;
    let n = u128::from_be_bytes(bytes) & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    Ok(format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        n >> 96,
        (n >> 80) & 0xffff,
        (n >> 64) & 0xffff,
        (n >> 48) & 0xffff,
        n & 0xffff_ffff_ffff
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;

    #[test]
    fn claims_are_complete() {
        let claims =
            Claims::new("gitlab", Duration::from_millis(1_700_000_000_900), CALL_TTL, "id".to_owned());
        assert_eq!(
            serde_json::to_value(&claims).unwrap(),
            serde_json::json!({
                "iss": "gitlab", "aud": "gitlab-kas", "iat": 1_700_000_000, "nbf": 1_699_999_995,
                "exp": 1_700_000_060, "jti": "id",
            })
        );
    }

    #[test]
    fn token_is_hs256_and_verifies_only_with_its_secret() {
        let token = mint(b"secret", "gitlab", CALL_TTL).unwrap();
        let header = base64::engine::general_purpose::URL_SAFE_NO_PAD
            .decode(token.split('.').next().unwrap())
            .unwrap();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&header).unwrap(),
            serde_json::json!({"alg": "HS256", "typ": "JWT"})
        );
        let mut rules = jsonwebtoken::Validation::new(jsonwebtoken::Algorithm::HS256);
        rules.set_audience(&["gitlab-kas"]);
        rules.validate_nbf = true;
        rules.leeway = 0;
        let check = |key: &[u8]| {
            jsonwebtoken::decode::<serde_json::Value>(
                &token,
                &jsonwebtoken::DecodingKey::from_secret(key),
                &rules,
            )
        };
        assert!(check(b"secret").is_ok());
        assert!(check(b"other").is_err());
    }

    #[test]
    fn unique_ids_are_version_4_and_differ() {
        let (a, b) = (unique_id().unwrap(), unique_id().unwrap());
        assert_ne!(a, b);
        assert_eq!(a.len(), 36);
        assert_eq!(a.as_bytes()[14], b'4');
        assert!(matches!(a.as_bytes()[19], b'8' | b'9' | b'a' | b'b'), "{a}");
    }
}
