//! `host:port`: the address of a replica in a configuration file.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// The expected text, for a problem.
pub const EXPECTED: &str = "a host and a port from 1 to 65535, such as 10.0.0.1:8155, [fd00::1]:8155 or \
                                   kas-1.example.com:8155";

/// An IP address that can be dialled, or a DNS name, with a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// The host.
    pub host: Host,
    /// From 1 to 65535.
    pub port: u16,
}

/// The host of a [`HostPort`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// An IP address; never the unspecified one, which cannot be dialled.
    Ip(IpAddr),
    /// A DNS name.
    Name(String),
}

/// The text is not a host and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a host and a port")]
pub struct NotHostPort;

impl FromStr for HostPort {
    type Err = NotHostPort;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            let dialled = !address.ip().is_unspecified() && address.port() > 0;
            return dialled.then(|| address.into()).ok_or(NotHostPort);
        }
        let (host, port) = text.rsplit_once(':').ok_or(NotHostPort)?;
        match port.parse::<u16>() {
            Ok(number) if number > 0 && port.starts_with(|c: char| c.is_ascii_digit()) && is_name(host) => {
                Ok(Self { host: Host::Name(host.to_owned()), port: number })
            }
            _ => Err(NotHostPort),
        }
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Ip(address.ip()), port: address.port() }
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

/// Whether `name` can be looked up in DNS, with or without its final dot.
///
/// A last label of digits only is refused: no such name exists, and `10.0.0.256` is a typing error.
pub fn is_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253
        && name.split('.').all(is_label)
        && name.rsplit('.').next().is_some_and(|last| !last.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatting_and_parsing_round_trip() {
        for text in
            ["10.0.0.1:8155", "[fd00::1]:1", "kas-1:65535", "kas.example.com.:8155", "_x.kas_1:8155", "1a:1"]
        {
            assert_eq!(text.parse::<HostPort>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn addresses_that_cannot_be_dialled_are_refused() {
        let long = format!("{}:1", "x".repeat(64));
        for text in [
            "",
            ":",
            "kas",
            "kas:",
            ":8155",
            "kas:0",
            "kas:+1",
            "kas:65536",
            "kas:http",
            "10.0.0.1:0",
            "0.0.0.0:8155",
            "[::]:8155",
            "fd00::1:8155",
            "[kas]:8155",
            "10.0.0.256:8155",
            "a..b:1",
            "-a:1",
            "a b:1",
            "é:1",
            ".:1",
            &long,
        ] {
            assert_eq!(text.parse::<HostPort>(), Err(NotHostPort), "{text}");
        }
    }
}
