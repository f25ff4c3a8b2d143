//! Addresses of kas.

use http::uri::{Authority, PathAndQuery};

/// The most addresses that can be configured.
const MAX_ADDRESSES: usize = 8;

/// An address of kas: host, port and protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KasAddress {
    pub(super) authority: Authority,
    pub(super) tls: bool,
    /// The path of the WebSocket handshake; `None`: no WebSocket.
    pub(super) websocket: Option<Box<PathAndQuery>>,
}

/// Why a text is not an address of kas.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Another scheme. The error starts like that of 14.1.
    #[error(
        "unsupported scheme in GitLab Kubernetes Agent Server address: {0:?}; use grpc://host:port, grpcs://host:port, \
         ws://host or wss://host, or https://host to try grpcs and then wss"
    )]
    Scheme(String),
    /// The host or the port is missing.
    #[error("expected grpc://host:port, grpcs://host:port, ws://host, wss://host or https://host, got {0:?}")]
    Shape(String),
    /// The text may contain a password, so it is not shown.
    #[error(
        "expected grpc://host:port, grpcs://host:port, ws://host, wss://host or https://host, without a user, got a text \
         with an `@` (not shown); use --kas-header for credentials of a proxy"
    )]
    User,
    /// Too many addresses.
    #[error("expected at most {MAX_ADDRESSES} addresses, got {0}")]
    Many(usize),
}

impl KasAddress {
    /// Returns the host; an IPv6 address has no brackets.
    pub fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        // Parsing has added a port where there was none.
        self.authority.port_u16().unwrap_or(if self.tls { 443 } else { 80 })
    }

    /// Returns host and port, as in a URL.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Whether the connection uses TLS.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Whether gRPC is carried inside WebSocket.
    pub fn is_websocket(&self) -> bool {
        self.websocket.is_some()
    }

    /// Whether `HTTPS_PROXY` applies, and not `HTTP_PROXY`. Only `ws://` counts as plain HTTP: gRPC in Go
    /// always uses `HTTPS_PROXY`.
    pub fn is_secure_for_proxies(&self) -> bool {
        self.tls || self.websocket.is_none()
    }
}

impl AddressError {
    /// Removes what must not be shown of `text`, the text with the error.
    fn without_user(self, text: &str) -> Self {
        if text.contains('@') { Self::User } else { self }
    }
}

impl std::str::FromStr for KasAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        Self::read(text).map_err(|error| error.without_user(text))
    }
}

impl KasAddress {
    fn read(text: &str) -> Result<Self, AddressError> {
        let shape = || AddressError::Shape(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(shape)?;
        let (tls, websocket) = match scheme {
            "grpc" => (false, false),
            "grpcs" => (true, false),
            "ws" => (false, true),
            "wss" => (true, true),
            other => return Err(AddressError::Scheme(other.to_owned())),
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let authority: Authority = authority.parse().map_err(|_| shape())?;
        let port = match (tls, websocket) {
            (true, _) => Some(443),
            (false, true) => Some(80),
            // There is no default port.
            (false, false) => None,
        };
        let authority = match (authority.port_u16(), port) {
            (Some(_), _) => authority,
            (None, Some(port)) => format!("{authority}:{port}").parse().map_err(|_| shape())?,
            (None, None) => return Err(shape()),
        };
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(shape());
        }
        // The other schemes use only host and port, as in 14.1.
        let websocket = websocket
            .then(|| {
                let slash = if path.starts_with('/') { "" } else { "/" };
                // Parsing removes a fragment, which is not part of a request.
                format!("{slash}{path}").parse().map(Box::new).map_err(|_| shape())
            })
            .transpose()?;
        Ok(Self { authority, tls, websocket })
    }
}

impl std::fmt::Display for KasAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = match (&self.websocket, self.tls) {
            (None, false) => "grpc",
            (None, true) => "grpcs",
            (Some(_), false) => "ws",
            (Some(_), true) => "wss",
        };
        write!(f, "{scheme}://{}", self.authority)?;
        match &self.websocket {
            // Without the query, which may contain a secret.
            Some(path) if path.path() != "/" => f.write_str(path.path()),
            _ => Ok(()),
        }
    }
}

/// One or several addresses. Those with the same host and port are alternative routes, tried in this order.
/// Different hosts or ports are different endpoints, possibly of different replicas of kas.
///
/// `https://host/path` means `grpcs://host` and `wss://host/path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KasAddresses(Vec<KasAddress>);

impl KasAddresses {
    /// Returns the addresses; there is at least one.
    pub fn as_slice(&self) -> &[KasAddress] {
        &self.0
    }
}

impl From<KasAddress> for KasAddresses {
    fn from(address: KasAddress) -> Self {
        Self(vec![address])
    }
}

impl std::str::FromStr for KasAddresses {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        // Check the whole text, because a password may contain a comma.
        Self::read(text).map_err(|error| error.without_user(text))
    }
}

impl KasAddresses {
    fn read(text: &str) -> Result<Self, AddressError> {
        let mut addresses: Vec<KasAddress> = Vec::new();
        for one in text.split(',').map(str::trim) {
            let both = match one.strip_prefix("https://") {
                Some(rest) => vec![format!("grpcs://{rest}"), format!("wss://{rest}")],
                None => vec![one.to_owned()],
            };
            for address in both {
                // Show the text as it was given, and not the one that was made of it.
                let address = address.parse().map_err(|error| match error {
                    AddressError::Shape(_) => AddressError::Shape(one.to_owned()),
                    other => other,
                })?;
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
        }
        if addresses.len() > MAX_ADDRESSES {
            return Err(AddressError::Many(addresses.len()));
        }
        Ok(Self(addresses))
    }
}

impl std::fmt::Display for KasAddresses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, address) in self.0.iter().enumerate() {
            write!(f, "{}{address}", if n == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_14_1_are_read() {
        for (text, shown) in [
            ("grpc://127.0.0.1:8150", "grpc://127.0.0.1:8150"),
            ("grpcs://kas.example.com", "grpcs://kas.example.com:443"),
            ("grpcs://kas.example.com:8150/ignored", "grpcs://kas.example.com:8150"),
            ("grpc://[::1]:8150", "grpc://[::1]:8150"),
            ("ws://127.0.0.1:8150", "ws://127.0.0.1:8150"),
            ("ws://kas", "ws://kas:80"),
            ("wss://kas.example.com", "wss://kas.example.com:443"),
            ("wss://gitlab:444/-/kubernetes-agent/#x", "wss://gitlab:444/-/kubernetes-agent/"),
            ("wss://kas?token=secret", "wss://kas:443"),
        ] {
            assert_eq!(text.parse::<KasAddress>().unwrap().to_string(), shown);
            // A single address stays single: its scheme has the meaning it has in 14.1.
            assert_eq!(text.parse::<KasAddresses>().unwrap().to_string(), shown);
        }
        for (text, part) in [
            ("http://kas", "unsupported scheme in GitLab Kubernetes Agent Server address: \"http\""),
            ("kas:8150", "expected grpc://host:port"),
            ("grpc://kas", "expected grpc://host:port"),
            ("grpc://", "expected grpc://host:port"),
            ("grpc://user@kas:1", "expected grpc://host:port"),
            ("wss://user@kas", "without a user"),
            ("wss:///path", "expected grpc://host:port"),
            ("https://", "got \"https://\""),
            ("grpcs://kas,", "got \"\""),
        ] {
            assert!(text.parse::<KasAddresses>().unwrap_err().to_string().contains(part), "{text}");
        }
        assert!("https://kas".parse::<KasAddress>().is_err(), "it is two addresses");
    }

    #[test]
    fn values_that_may_contain_a_password_are_not_shown() {
        for text in [
            "grpc://user:s3cr3t@kas:1",
            "grpc://user:s3cr3t@kas",
            "https://user:s3cr3t@kas",
            "http://user:s3cr3t@kas",
            "user:s3cr3t@kas://x",
            "grpc://user:s3/cr3t@kas:1",
            "grpc://user:s3,cr3t@kas:1",
            "grpc://user:s3,x://cr3t@kas:1",
        ] {
            assert_eq!(text.parse::<KasAddresses>(), Err(AddressError::User), "{text}");
            assert_eq!(text.parse::<KasAddress>(), Err(AddressError::User), "{text}");
        }
        assert!("wss://kas/@x".parse::<KasAddresses>().is_ok(), "an @ in a path is not a user");
    }

    #[test]
    fn several_addresses_are_kept_in_order() {
        for (text, shown) in [
            ("https://kas.example.com", "grpcs://kas.example.com:443, wss://kas.example.com:443"),
            ("https://gitlab:444/-/kas/", "grpcs://gitlab:444, wss://gitlab:444/-/kas/"),
            ("grpc://kas:8150, ws://kas/x", "grpc://kas:8150, ws://kas:80/x"),
            ("wss://kas,https://kas", "wss://kas:443, grpcs://kas:443"),
        ] {
            assert_eq!(text.parse::<KasAddresses>().unwrap().to_string(), shown);
        }
        let many = (0..9).map(|n| format!("grpc://kas:{n}")).collect::<Vec<_>>().join(",");
        assert_eq!(many.parse::<KasAddresses>(), Err(AddressError::Many(9)));
    }

    #[test]
    fn variable_for_proxies_is_the_same_as_in_go_programs() {
        for (text, secure) in
            [("grpc://kas:1", true), ("grpcs://kas", true), ("ws://kas", false), ("wss://kas", true)]
        {
            assert_eq!(text.parse::<KasAddress>().unwrap().is_secure_for_proxies(), secure, "{text}");
        }
    }
}
