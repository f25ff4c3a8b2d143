//! What is wrong with the token of an issuer.

use std::fmt;

/// Why the token of an issuer is refused. It contains no part of the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenFault {
    /// The index of the issuer in `agent.kubernetes_api.oidc`, from 0; `None`: the token has no such issuer.
    pub issuer: Option<usize>,
    /// What is wrong.
    pub fault: Fault,
}

/// What is wrong with a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not a JSON Web Token.
    #[error("the token is malformed")]
    Malformed,
    /// Its issuer is not in the configuration.
    #[error("the claim iss is no configured issuer")]
    Issuer,
    /// Its header has `crit`: it must not be accepted without knowing what that is about.
    #[error("the header of the token has crit, and kas supports no critical extension")]
    Critical,
    /// Its algorithm is not supported, is not asymmetric, or is not that of its key.
    #[error("the algorithm of the token is not asymmetric, not supported, or does not fit its key")]
    Algorithm,
    /// The issuer has no key of this id.
    #[error("the issuer has no key with the kid of the token")]
    UnknownKey,
    /// It has no key id, and the issuer several keys.
    #[error("the token has no kid, and the issuer has several keys for its algorithm")]
    Ambiguous,
    /// Its signature does not match.
    #[error("the signature of the token is not valid")]
    Signature,
    /// It has no expiry.
    #[error("the token has no claim exp")]
    NoExpiry,
    /// It has expired.
    #[error("the token has expired")]
    Expired,
    /// It is not valid yet.
    #[error("the token is not valid yet (claim nbf); is a clock wrong?")]
    NotYet,
    /// It is for others.
    #[error("the claim aud has none of the configured audiences")]
    Audience,
    /// The address is not verified.
    #[error("the claim email is used, and the claim email_verified is not true")]
    Email,
    /// The claims that `username` names are missing, or are not texts.
    #[error("a claim of username is missing, or is neither a text nor a whole number")]
    Username,
    /// The claims that `groups` name are not texts.
    #[error("a claim of groups is neither a text, nor a whole number, nor a list of those")]
    Groups,
    /// The issuer no longer has the key with which the token of an open request was signed.
    #[error("the issuer has withdrawn the key of the token")]
    Withdrawn,
    /// A claim is not what `require` demands: status 403.
    #[error("a claim is not as the key require of the issuer demands")]
    Required,
    /// A value would make a name with another meaning: status 403.
    #[error("a claim of username or groups contains `:`, which its template does not allow")]
    Colon,
    /// A value is empty, too long, or has a control character or white space at an end: status 403.
    #[error(
        "a claim of username or groups is empty, longer than 1024 bytes, or has a character that names cannot have"
    )]
    Value,
    /// The caller is in too many groups: status 403.
    #[error("the token has more than 64 groups")]
    TooManyGroups,
}

impl Fault {
    /// Whether the issuer vouches for the token, and only its content is not allowed: status 403, not 401.
    pub fn is_forbidden(self) -> bool {
        matches!(self, Self::Required | Self::Colon | Self::Value | Self::TooManyGroups)
    }
}

impl fmt::Display for TokenFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.issuer {
            Some(issuer) => write!(f, "oidc[{issuer}]: {}", self.fault),
            None => write!(f, "oidc: {}", self.fault),
        }
    }
}

impl std::error::Error for TokenFault {}
