//! What all credentials have in common: their size, how they name an agent, and what is wrong with them.

use ids::AgentId;

/// The longest token, in bytes. ID tokens of GitLab have up to 12 kB.
pub(crate) const LONGEST: usize = 16 * 1024;

/// Reads the number of an agent, which has no sign and no leading zero.
pub(crate) fn number(text: &str) -> Option<AgentId> {
    if text.starts_with('0') { None } else { text.parse().ok() }
}

/// Why a request has no usable credential. No text contains a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    /// There are several headers `Authorization`: status 401.
    #[error("expected one Authorization header")]
    Several,
    /// `Authorization` is not of the scheme `Bearer`: status 401.
    #[error("expected an Authorization header with a Bearer token")]
    Scheme,
    /// The token is not valid: status 401.
    #[error("the token is malformed")]
    Malformed,
    /// The token has more than 16,384 bytes: status 401.
    #[error("the token is too long")]
    TooLong,
    /// A token is in a WebSocket subprotocol and in `Authorization`, or in two subprotocols: status 400.
    #[error("expected one bearer token, either in Authorization or in one WebSocket subprotocol")]
    Twice,
    /// There is a session cookie, and no CSRF token: status 401.
    #[error("expected X-Csrf-Token or gitlab-csrf-token beside the session cookie")]
    NoCsrfToken,
    /// There is no other WebSocket subprotocol than the one with the token: status 400.
    #[error("expected a WebSocket subprotocol beside the one with the bearer token")]
    Alone,
}

impl CredentialError {
    /// Whether the status is 400; otherwise it is 401.
    pub fn is_bad_request(self) -> bool {
        match self {
            Self::Several | Self::Scheme | Self::Malformed | Self::TooLong | Self::NoCsrfToken => false,
            Self::Twice | Self::Alone => true,
        }
    }
}
