//! `host:port` in configuration files.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::ParseIntError,
    str::FromStr,
};

use hickory_resolver::proto::{ProtoError, rr::Name};

/// An address, or a name that has addresses, and a port other than 0.
///
/// Written as `10.0.0.1:8150`, `[fd00::1]:8150` or `kas-1.example:8150`. A name without a final dot is also
/// tried with the search domains of the system's `resolv.conf`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    pub(crate) host: Host,
    pub(crate) port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Host {
    Ip(IpAddr),
    Name(Name),
}

/// What is wrong with a `host:port`.
#[derive(Debug, thiserror::Error)]
pub enum HostPortError {
    /// There is no port, or an IPv6 address without brackets makes it ambiguous.
    #[error("expected host:port, with an IPv6 address in brackets")]
    Form,
    /// The part after the last colon is not a port.
    #[error("the port is not a number from 1 to 65535")]
    Port(#[source] Option<ParseIntError>),
    /// The part before the port is not a DNS name.
    #[error("the host is not a DNS name")]
    Host(#[source] ProtoError),
}

impl FromStr for HostPort {
    type Err = HostPortError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Self::new(Host::Ip(address.ip()), address.port());
        }
        let (host, port) = text.rsplit_once(':').ok_or(HostPortError::Form)?;
        if host.is_empty() || host == "." || host.contains([':', '[', ']']) {
            return Err(HostPortError::Form);
        }
        let port = port.parse().map_err(|error| HostPortError::Port(Some(error)))?;
        let name = Name::from_str_relaxed(host).map_err(HostPortError::Host)?;
        Self::new(Host::Name(name), port)
    }
}

impl HostPort {
    fn new(host: Host, port: u16) -> Result<Self, HostPortError> {
        if port == 0 {
            return Err(HostPortError::Port(None));
        }
        Ok(Self { host, port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatting_and_parsing_round_trip() {
        for text in ["10.0.0.1:8150", "[fd00::1]:1", "kas-1:65535", "kas.example.:8150", "_gossip.kas_1:8150"]
        {
            assert_eq!(text.parse::<HostPort>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn invalid_host_and_port_texts_are_refused() {
        let bad = |text: &str| text.parse::<HostPort>().expect_err(text);
        for text in ["", "kas", ":8150", "fd00::1:8150", "[fd00::1]", "[kas]:8150", ".:8150"] {
            assert!(matches!(bad(text), HostPortError::Form), "{text}");
        }
        for text in ["kas:", "kas:0", "10.0.0.1:0", "kas:65536", "kas:http", "kas:-1"] {
            assert!(matches!(bad(text), HostPortError::Port(_)), "{text}");
        }
        for text in ["a..b:1", &format!("{}:1", "x".repeat(64))] {
            assert!(matches!(bad(text), HostPortError::Host(_)), "{text}");
        }
    }
}
