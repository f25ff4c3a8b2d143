//! Where kas is, and what is spoken there.

use http::uri::{Authority, PathAndQuery};

/// The most addresses that one agent tries.
const MAX_ADDRESSES: usize = 8;

/// Where kas is, and what is spoken there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KasAddress {
    pub(super) authority: Authority,
    pub(super) tls: bool,
    /// The request for an upgrade goes there; `None`: no WebSocket.
    pub(super) websocket: Option<Box<PathAndQuery>>,
}

/// Why a text is not an address of kas.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Another scheme; in the words of 14.1.
    #[error(
        "unsupported scheme in GitLab Kubernetes Agent Server address: {0:?}; use grpc://host:port, grpcs://host:port, \
         ws://host or wss://host, or https://host to try grpcs and then wss"
    )]
    Scheme(String),
    /// No host, or no port.
    #[error("expected grpc://host:port, grpcs://host:port, ws://host, wss://host or https://host, got {0:?}")]
    Shape(String),
    /// It may hold a password, and is not shown.
    #[error(
        "expected grpc://host:port, grpcs://host:port, ws://host, wss://host or https://host, without a user, got something \
         with an `@` (not shown); use --kas-header for what a proxy asks for"
    )]
    User,
    /// Too many of them.
    #[error("expected at most {MAX_ADDRESSES} addresses, got {0}")]
    Many(usize),
}

impl KasAddress {
    /// Returns the host; an address of IPv6 is without brackets.
    pub fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        // Each address has one since it was read.
        self.authority.port_u16().unwrap_or(if self.tls { 443 } else { 80 })
    }

    /// Returns host and port, as in a URL.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Whether TLS is spoken.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Whether gRPC is spoken inside WebSocket.
    pub fn is_websocket(&self) -> bool {
        self.websocket.is_some()
    }

    /// Whether `HTTPS_PROXY` names its proxy, else `HTTP_PROXY`. Only `ws://` counts as plain HTTP: gRPC in Go takes
    /// the other variable whatever it speaks.
    pub fn is_secure_for_proxies(&self) -> bool {
        self.tls || self.websocket.is_none()
    }
}

impl AddressError {
    /// Takes away what must not be shown of `text`, in which it was found.
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
            // No port is usual for it.
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
        // Only host and port of the others are used, as in 14.1.
        let websocket = websocket
            .then(|| {
                let slash = if path.starts_with('/') { "" } else { "/" };
                // Takes a fragment away, which is no part of a request.
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
            // Without a query: it may hold what logs must not.
            Some(path) if path.path() != "/" => f.write_str(path.path()),
            _ => Ok(()),
        }
    }
}

/// One address, or several: those of one host and port are ways to it, tried in their order until one passes the proxies
/// in between; different hosts or ports are where different replicas of kas may be.
///
/// `https://host/path` stands for `grpcs://host` and `wss://host/path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KasAddresses(Vec<KasAddress>);

impl KasAddresses {
    /// Returns them, one at least.
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
        // The whole text, since a password may hold a comma.
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
                // The text as it was given: the one made of it is nobody's.
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
            // One address stays one: its scheme means what it means in 14.1.
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
        assert!("https://kas".parse::<KasAddress>().is_err(), "one address is one way");
    }

    #[test]
    fn what_may_hold_a_password_is_not_shown() {
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
        assert!("wss://kas/@x".parse::<KasAddresses>().is_ok(), "a path may have one");
    }

    #[test]
    fn several_addresses_are_a_ladder() {
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
    fn variable_for_proxies_is_that_of_programs_in_go() {
        for (text, secure) in
            [("grpc://kas:1", true), ("grpcs://kas", true), ("ws://kas", false), ("wss://kas", true)]
        {
            assert_eq!(text.parse::<KasAddress>().unwrap().is_secure_for_proxies(), secure, "{text}");
        }
    }
}
