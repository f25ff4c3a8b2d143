//! The address of kas in the command line.

use std::{fmt, path::PathBuf, str::FromStr};

/// The default port: that of the API listener of kas.
const DEFAULT_PORT: u16 = 8153;

/// An address of the API listener of kas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// `grpc://` (plain) or `grpcs://` (TLS).
    Tcp {
        /// Whether the connection is encrypted.
        tls: bool,
        /// A name or an IP address; IPv6 without brackets.
        host: String,
        /// Never 0.
        port: u16,
    },
    /// `unix://` and an absolute path.
    Unix(PathBuf),
}

/// The reason why a text is not an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    /// No scheme, or an unknown one.
    #[error("expected grpc://host:port, grpcs://host:port (TLS) or unix:///path")]
    Scheme,
    /// No host, an invalid port, or anything after it.
    #[error("expected only a host and a port, such as grpc://127.0.0.1:8153")]
    Authority,
    /// A relative path of a socket.
    #[error("expected an absolute path of a socket, such as unix:///run/kas/api.sock")]
    Socket,
}

impl FromStr for Address {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (scheme, rest) = text.split_once("://").ok_or(Invalid::Scheme)?;
        let tls = match scheme {
            "grpc" => false,
            "grpcs" => true,
            "unix" if rest.len() > 1 && rest.starts_with('/') => return Ok(Self::Unix(rest.into())),
            "unix" => return Err(Invalid::Socket),
            _ => return Err(Invalid::Scheme),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#', '@']) {
            return Err(Invalid::Authority);
        }
        let authority: http::uri::Authority = rest.parse().map_err(|_| Invalid::Authority)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let named = rest.len() > authority.host().len();
        let port = if named { authority.port_u16().unwrap_or(0) } else { DEFAULT_PORT };
        if host.is_empty() || port == 0 {
            return Err(Invalid::Authority);
        }
        Ok(Self::Tcp { tls, host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { tls, .. } => write!(f, "grpc{}://{}", if *tls { "s" } else { "" }, self.authority()),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

impl Address {
    /// Returns the value of `:authority`.
    pub(crate) fn authority(&self) -> String {
        match self {
            Self::Tcp { host, port, .. } => host_port(host, *port),
            Self::Unix(_) => "localhost".to_owned(),
        }
    }
}

/// Joins a host and a port, with brackets around an IPv6 address.
pub(crate) fn host_port(host: &str, port: impl fmt::Display) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in [
            "grpc://127.0.0.1:8153",
            "grpcs://kas.example:443",
            "grpc://[::1]:8153",
            "unix:///run/kas/api.sock",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("grpc://kas/".parse::<Address>().unwrap().to_string(), "grpc://kas:8153");
        assert_eq!("grpc://[::1]".parse::<Address>().unwrap().to_string(), "grpc://[::1]:8153");
    }

    #[test]
    fn other_texts_are_refused_with_the_reason() {
        for (text, error) in [
            ("127.0.0.1:8153", Invalid::Scheme),
            ("http://kas:1", Invalid::Scheme),
            ("wss://kas", Invalid::Scheme),
            ("grpc://", Invalid::Authority),
            ("grpc://:8153", Invalid::Authority),
            ("grpc://kas:", Invalid::Authority),
            ("grpc://kas:0", Invalid::Authority),
            ("grpc://kas:65536", Invalid::Authority),
            ("grpc://kas:1/path", Invalid::Authority),
            ("grpc://user@kas:1", Invalid::Authority),
            ("grpc://k s:1", Invalid::Authority),
            ("unix://socket", Invalid::Socket),
            ("unix:///", Invalid::Socket),
        ] {
            assert_eq!(text.parse::<Address>(), Err(error), "{text}");
        }
    }
}
