//! To which protocols a request may upgrade.

use http::{HeaderMap, header};

use crate::headers::tokens;

/// A protocol to which a request may upgrade its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Upgrade {
    /// `websocket`.
    WebSocket,
    /// `SPDY/3.1`.
    Spdy31,
}

impl Upgrade {
    /// Returns the protocol that the headers of an HTTP/1.1 request ask for: the first one in `Upgrade` that
    /// is known, if `Connection` names `Upgrade`. Other protocols, such as `h2c`, are ignored, as RFC 9110
    /// allows.
    pub fn requested(headers: &HeaderMap) -> Option<Self> {
        let is_named =
            tokens(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case(b"upgrade"));
        is_named.then(|| tokens(headers, &header::UPGRADE).find_map(Self::from_token)).flatten()
    }

    /// Returns the protocol of a name in `Upgrade`, in any case; `None`: it is not supported.
    pub fn from_token(token: &[u8]) -> Option<Self> {
        [Self::WebSocket, Self::Spdy31]
            .into_iter()
            .find(|upgrade| token.eq_ignore_ascii_case(upgrade.token().as_bytes()))
    }

    /// The name in the header `Upgrade`.
    pub fn token(self) -> &'static str {
        match self {
            Self::WebSocket => "websocket",
            Self::Spdy31 => "SPDY/3.1",
        }
    }
}
