//! A JSON Web Token (RFC 7519) as a client sends it.

use std::str::FromStr as _;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, AlgorithmFamily};
use serde_json::{Map, Value};

use super::key_set::{Found, KeySet, Signer};
use crate::Fault;

/// The claims of a token.
pub(super) type Claims = Map<String, Value>;

/// A token whose signature may not have been verified yet.
pub(super) struct Token<'a> {
    message: &'a str,
    signature: &'a str,
    algorithm: Algorithm,
    kid: Option<String>,
    claims: Claims,
}

/// What keys say about a token.
pub(super) enum Verdict {
    /// It was signed with this key.
    Signed(Signer),
    /// It was signed with none of them, so that the issuer may have a newer one.
    UnknownKey,
    /// It must be refused.
    Refused(Fault),
}

impl<'a> Token<'a> {
    /// Parses a token, and refuses what no key can make valid.
    pub(super) fn parse(token: &'a str) -> Result<Self, Fault> {
        let (message, signature) = token.rsplit_once('.').ok_or(Fault::Malformed)?;
        let (head, claims) = message.split_once('.').ok_or(Fault::Malformed)?;
        let head = object(head)?;
        if head.contains_key("crit") {
            return Err(Fault::Critical);
        }
        let algorithm = head.get("alg").and_then(Value::as_str).ok_or(Fault::Malformed)?;
        // `none` is no algorithm here.
        let algorithm = Algorithm::from_str(algorithm).map_err(|_| Fault::Algorithm)?;
        if AlgorithmFamily::Hmac.algorithms().contains(&algorithm) {
            return Err(Fault::Algorithm);
        }
        let kid = match head.get("kid") {
            None => None,
            Some(Value::String(kid)) => Some(kid.clone()),
            Some(_) => return Err(Fault::Malformed),
        };
        Ok(Self { message, signature, algorithm, kid, claims: object(claims)? })
    }

    /// Returns the issuer that it names, which may not have signed it.
    pub(super) fn issuer(&self) -> Option<&str> {
        self.claims.get("iss").and_then(Value::as_str)
    }

    /// Returns its claims, which its issuer may not have made.
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Verifies its signature.
    pub(super) fn verify(&self, keys: &KeySet) -> Verdict {
        let kid = self.kid.as_deref();
        match keys.find(kid, self.algorithm) {
            Found::Unknown => Verdict::UnknownKey,
            Found::OtherAlgorithm => Verdict::Refused(Fault::Algorithm),
            Found::Ambiguous => Verdict::Refused(Fault::Ambiguous),
            Found::Keys(keys) => {
                let signer =
                    keys.iter().find(|key| key.verifies(self.message, self.signature, self.algorithm));
                match signer {
                    Some(key) => Verdict::Signed(key.signer(self.algorithm)),
                    // An issuer without names of keys may have replaced its key.
                    None if kid.is_none() => Verdict::UnknownKey,
                    None => Verdict::Refused(Fault::Signature),
                }
            }
        }
    }
}

/// Decodes a part of the token.
fn object(part: &str) -> Result<Map<String, Value>, Fault> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(part).map_err(|_| Fault::Malformed)?;
    serde_json::from_slice(&bytes).map_err(|_| Fault::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(head: &str, claims: &str) -> String {
        let encoded = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
        format!("{}.{}.AA", encoded(head), encoded(claims))
    }

    #[test]
    fn what_no_key_can_make_valid_is_refused() {
        for (head, fault) in [
            (r#"{"alg":"none"}"#, Fault::Algorithm),
            (r#"{"alg":"None"}"#, Fault::Algorithm),
            (r#"{"alg":""}"#, Fault::Algorithm),
            (r#"{"alg":"HS256","kid":"a"}"#, Fault::Algorithm),
            (r#"{"alg":"HS384"}"#, Fault::Algorithm),
            (r#"{"alg":"HS512"}"#, Fault::Algorithm),
            (r#"{"alg":"ES512"}"#, Fault::Algorithm),
            (r#"{"alg":["RS256"]}"#, Fault::Malformed),
            (r#"{"alg":"RS256","kid":7}"#, Fault::Malformed),
            (r#"{"alg":"RS256","crit":["b64"]}"#, Fault::Critical),
            (r#"{"alg":"RS256","crit":[]}"#, Fault::Critical),
            (r#"{"alg":"RS256","crit":null}"#, Fault::Critical),
            ("{}", Fault::Malformed),
            ("[]", Fault::Malformed),
            ("", Fault::Malformed),
            ("{", Fault::Malformed),
        ] {
            assert_eq!(Token::parse(&token(head, "{}")).map(|_| ()), Err(fault), "{head}");
        }
        let good = r#"{"alg":"RS256"}"#;
        for claims in ["", "[]", "7", "{", &"[".repeat(10_000)] {
            assert_eq!(Token::parse(&token(good, claims)).map(|_| ()), Err(Fault::Malformed), "{claims:.9}");
        }
        for bad in ["", "a", "a.b", "e30.e30.AA=", "e30=.e30.AA", "e3 0.e30.AA"] {
            assert_eq!(Token::parse(bad).map(|_| ()), Err(Fault::Malformed), "{bad}");
        }
        assert_eq!(Token::parse(&token(good, r#"{"iss":"a"}"#)).unwrap().issuer(), Some("a"));
        assert_eq!(Token::parse(&token(good, r#"{"iss":["a"]}"#)).unwrap().issuer(), None);
    }
}
