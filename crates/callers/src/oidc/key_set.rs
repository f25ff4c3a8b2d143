//! The public keys of an issuer: a JSON Web Key Set (RFC 7517).

use std::sync::Arc;

use jsonwebtoken::{
    Algorithm, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, ThumbprintHash},
};
use serde::Deserialize;
use serde_json::Value;

/// The most keys of a set.
const MOST: usize = 100;

/// The keys of an issuer that can be used.
pub(super) struct KeySet(Vec<PublicKey>);

pub(super) struct PublicKey {
    id: KeyId,
    kid: Option<String>,
    key: DecodingKey,
}

/// Which key it is, whatever the issuer calls it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KeyId {
    thumbprint: Arc<str>,
    /// What it may be used with.
    algorithms: Vec<Algorithm>,
}

/// Which key signed a token, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Signer {
    thumbprint: Arc<str>,
    algorithm: Algorithm,
}

/// The keys that may have signed a token.
pub(super) enum Found<'a> {
    /// One of these. Not empty.
    Keys(Vec<&'a PublicKey>),
    /// None: the issuer may have a newer one.
    Unknown,
    /// One that is not for this algorithm.
    OtherAlgorithm,
    /// One of several, and the token does not say which.
    Ambiguous,
}

/// Why a set cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidKeySet {
    /// It is no JSON Web Key Set. The text is omitted.
    #[error("it is no JSON Web Key Set (line {line}, column {column})")]
    Json { line: usize, column: usize },
    #[error("it has more than {MOST} keys")]
    TooMany,
    #[error("it has no key for RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384 or EdDSA")]
    NoKey,
}

#[derive(Deserialize)]
struct Document {
    keys: Vec<Value>,
}

impl KeySet {
    /// Parses a set. Keys of other kinds and for other uses are left out, as RFC 7517 demands.
    pub(super) fn parse(json: &[u8]) -> Result<Self, InvalidKeySet> {
        let Document { keys } = serde_json::from_slice(json)
            .map_err(|error| InvalidKeySet::Json { line: error.line(), column: error.column() })?;
        if keys.len() > MOST {
            return Err(InvalidKeySet::TooMany);
        }
        let keys: Vec<_> = keys.into_iter().filter_map(PublicKey::new).collect();
        if keys.is_empty() { Err(InvalidKeySet::NoKey) } else { Ok(Self(keys)) }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the keys for a token with this header.
    pub(super) fn find(&self, kid: Option<&str>, algorithm: Algorithm) -> Found<'_> {
        let named: Vec<_> = match kid {
            Some(_) => self.0.iter().filter(|key| key.kid.as_deref() == kid).collect(),
            None => self.0.iter().filter(|key| key.id.algorithms.contains(&algorithm)).collect(),
        };
        if named.is_empty() {
            return Found::Unknown;
        }
        if kid.is_none() && named.len() > 1 {
            return Found::Ambiguous;
        }
        let fitting: Vec<_> =
            named.into_iter().filter(|key| key.id.algorithms.contains(&algorithm)).collect();
        if fitting.is_empty() { Found::OtherAlgorithm } else { Found::Keys(fitting) }
    }

    /// Whether the set still has a key, under whatever name, and it may still be used like this. What else it
    /// may be used with does not matter.
    pub(super) fn has(&self, Signer { thumbprint, algorithm }: &Signer) -> bool {
        let mut ids = self.0.iter().map(|key| &key.id);
        ids.any(|id| id.thumbprint == *thumbprint && id.algorithms.contains(algorithm))
    }

    /// Whether both sets judge every token alike.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.0.len() == other.0.len()
            && self.0.iter().zip(&other.0).all(|(one, other)| one.id == other.id && one.kid == other.kid)
    }
}

impl PublicKey {
    /// Returns a key if it can be used to verify signatures.
    fn new(json: Value) -> Option<Self> {
        let text = |key: &str| json.get(key).and_then(Value::as_str);
        let is_for_signatures = json.get("use").is_none_or(|_| text("use") == Some("sig"))
            && json.get("key_ops").is_none_or(|operations| {
                operations.as_array().is_some_and(|operations| operations.iter().any(|one| one == "verify"))
            });
        if !is_for_signatures {
            return None;
        }
        // The kind of key decides which algorithms it may have, never the token: otherwise a public key could
        // be used as the secret of HS256.
        let only = json.get("alg").map(|_| text("alg").and_then(|name| name.parse::<Algorithm>().ok()));
        let jwk: Jwk = serde_json::from_value(json).ok()?;
        let by_kind: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => &[
                Algorithm::RS256,
                Algorithm::RS384,
                Algorithm::RS512,
                Algorithm::PS256,
                Algorithm::PS384,
                Algorithm::PS512,
            ],
            AlgorithmParameters::EllipticCurve(key) => match key.curve {
                EllipticCurve::P256 => &[Algorithm::ES256],
                EllipticCurve::P384 => &[Algorithm::ES384],
                _ => return None,
            },
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                &[Algorithm::EdDSA]
            }
            _ => return None,
        };
        let is_allowed = |algorithm: &&Algorithm| only.is_none_or(|only| only == Some(**algorithm));
        let algorithms: Vec<_> = by_kind.iter().filter(is_allowed).copied().collect();
        if algorithms.is_empty() {
            return None;
        }
        let thumbprint = jwk.thumbprint(ThumbprintHash::SHA256).ok()?.into();
        let key = DecodingKey::from_jwk(&jwk).ok()?;
        Some(Self { id: KeyId { thumbprint, algorithms }, kid: jwk.common.key_id, key })
    }

    /// Returns this key as the one that has signed a token.
    pub(super) fn signer(&self, algorithm: Algorithm) -> Signer {
        Signer { thumbprint: Arc::clone(&self.id.thumbprint), algorithm }
    }

    /// Whether the key has signed `message`. `algorithm` is one of this key, see [`KeySet::find`].
    pub(super) fn verifies(&self, message: &str, signature: &str, algorithm: Algorithm) -> bool {
        jsonwebtoken::crypto::verify(signature, message.as_bytes(), &self.key, algorithm).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(keys: &[Value]) -> Result<KeySet, InvalidKeySet> {
        KeySet::parse(json!({ "keys": keys }).to_string().as_bytes())
    }

    fn rsa(kid: &str) -> Value {
        json!({"kty": "RSA", "kid": kid, "n": "AQAB".repeat(86), "e": "AQAB"})
    }

    fn with(mut key: Value, name: &str, value: Value) -> Value {
        key[name] = value;
        key
    }

    #[test]
    fn only_asymmetric_keys_for_signatures_are_used() {
        for useless in [
            json!({"kty": "oct", "k": "c2VjcmV0", "kid": "a"}),
            json!({"kty": "oct", "k": "c2VjcmV0", "kid": "a", "alg": "RS256"}),
            json!({"kty": "EC", "crv": "P-521", "x": "AA", "y": "AA"}),
            json!({"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}),
            json!({"kty": "OKP", "crv": "X25519", "x": "AA"}),
            json!({"kty": "RSA"}),
            json!({"kty": "new", "n": "AQAB", "e": "AQAB"}),
            json!(7),
            with(rsa("a"), "use", json!("enc")),
            with(rsa("a"), "use", json!(1)),
            with(rsa("a"), "key_ops", json!(["encrypt"])),
            with(rsa("a"), "alg", json!("HS256")),
            with(rsa("a"), "alg", json!("ES256")),
            with(rsa("a"), "alg", json!("RSA-OAEP")),
            with(rsa("a"), "alg", json!(7)),
            with(rsa("a"), "n", json!("not base64!")),
        ] {
            assert!(matches!(parse(std::slice::from_ref(&useless)), Err(InvalidKeySet::NoKey)), "{useless}");
            // It hides no other key.
            assert_eq!(parse(&[useless, rsa("b")]).map_err(|_| ()).unwrap().len(), 1);
        }
        let used = with(with(rsa("a"), "use", json!("sig")), "key_ops", json!(["verify"]));
        assert!(parse(&[with(used, "alg", json!("PS384"))]).is_ok());
        for bad in ["", "[]", "{}", "{\"keys\": {}}"] {
            assert!(matches!(KeySet::parse(bad.as_bytes()), Err(InvalidKeySet::Json { .. })), "{bad}");
        }
        assert!(matches!(parse(&vec![rsa("a"); MOST + 1]), Err(InvalidKeySet::TooMany)));
    }

    #[test]
    fn the_key_is_that_of_the_kid_and_must_fit_the_algorithm() {
        let set = parse(&[with(rsa("a"), "alg", json!("RS256")), rsa("b")]).map_err(|_| ()).unwrap();
        let found = |kid, algorithm| match set.find(kid, algorithm) {
            Found::Keys(keys) => {
                format!("{:?}", keys.iter().map(|key| key.kid.as_deref()).collect::<Vec<_>>())
            }
            Found::Unknown => "unknown".to_owned(),
            Found::OtherAlgorithm => "other".to_owned(),
            Found::Ambiguous => "ambiguous".to_owned(),
        };
        for (kid, algorithm, expected) in [
            (Some("a"), Algorithm::RS256, "[Some(\"a\")]"),
            (Some("a"), Algorithm::RS384, "other"),
            (Some("a"), Algorithm::ES256, "other"),
            (Some("a"), Algorithm::HS256, "other"),
            (Some("b"), Algorithm::RS384, "[Some(\"b\")]"),
            (Some("c"), Algorithm::RS256, "unknown"),
            (None, Algorithm::RS256, "ambiguous"),
            (None, Algorithm::RS384, "[Some(\"b\")]"),
            (None, Algorithm::ES256, "unknown"),
        ] {
            assert_eq!(found(kid, algorithm), expected, "{kid:?} {algorithm:?}");
        }
    }

    #[test]
    fn sets_differ_by_keys_their_names_and_their_algorithms() {
        let of = |keys: &[Value]| parse(keys).map_err(|_| ()).unwrap();
        let one = of(&[rsa("a")]);
        assert!(one.is_same(&of(&[rsa("a"), json!({"kty": "oct", "k": "AA"})])));
        for other in [
            vec![rsa("b")],
            vec![rsa("a"), rsa("b")],
            vec![with(rsa("a"), "alg", json!("RS256"))],
            vec![with(rsa("a"), "n", json!("AQAC".repeat(86)))],
        ] {
            assert!(!one.is_same(&of(&other)), "{other:?}");
        }
    }

    #[test]
    fn a_key_is_kept_if_it_may_still_be_used_with_the_algorithm_of_the_token() {
        let of = |keys: &[Value]| parse(keys).map_err(|_| ()).unwrap();
        let signer = of(&[rsa("a")]).0[0].signer(Algorithm::RS256);
        assert!(of(&[rsa("new-name")]).has(&signer));
        // The issuer has begun to say what the key is for.
        assert!(of(&[with(rsa("a"), "alg", json!("RS256"))]).has(&signer));
        assert!(of(&[rsa("b"), with(rsa("a"), "alg", json!("RS256"))]).has(&signer));
        assert!(!of(&[with(rsa("a"), "alg", json!("RS384"))]).has(&signer));
        assert!(!of(&[with(rsa("a"), "n", json!("AQAC".repeat(86)))]).has(&signer));
    }
}
