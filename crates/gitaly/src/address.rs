//! Where a Gitaly is.

use std::{fmt, path::PathBuf, str::FromStr};

/// The longest address, in bytes.
const MAX_ADDRESS: usize = 1024;

/// Why a text is no address of a Gitaly.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAddress {
    /// The scheme is not one of those that are supported.
    #[error("the address of a Gitaly begins with tcp://, tls://, dns: or unix:, not as {0:?} does")]
    Scheme(String),
    /// Host and port are expected.
    #[error("{0:?} does not name a host and a port")]
    HostPort(String),
    /// A DNS server in the address is not supported.
    #[error("{0:?} names a DNS server: only dns:///host:port is supported")]
    DnsServer(String),
    /// The path of a socket is expected.
    #[error("{0:?} does not name the absolute path of a socket")]
    Path(String),
    /// It is too long.
    #[error("the address of a Gitaly has at most {MAX_ADDRESS} bytes")]
    TooLong,
}

/// The address of a Gitaly or Praefect, as GitLab writes it: `tcp://host:port`, `tls://host:port`,
/// `dns:host:port`, `dns:///host:port`, `unix:/path` or `unix:///path`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Address {
    pub(crate) target: Target,
    text: Box<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    Tcp {
        /// Without the brackets of IPv6.
        host: Box<str>,
        port: u16,
        tls: bool,
        /// Each connection is to another address of the name.
        spread: bool,
    },
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        if text.len() > MAX_ADDRESS {
            return Err(InvalidAddress::TooLong);
        }
        let target = if let Some(rest) = text.strip_prefix("tcp://") {
            tcp(text, rest, false, false)?
        } else if let Some(rest) = text.strip_prefix("tls://") {
            tcp(text, rest, true, false)?
        } else if let Some(rest) = text.strip_prefix("dns:") {
            let name = match rest.strip_prefix("//") {
                None => rest,
                Some(rest) => match rest.split_once('/') {
                    Some(("", name)) => name,
                    _ => return Err(InvalidAddress::DnsServer(text.to_owned())),
                },
            };
            tcp(text, name, false, true)?
        } else if let Some(rest) = text.strip_prefix("unix:") {
            let path = rest.strip_prefix("//").unwrap_or(rest);
            if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') {
                return Err(InvalidAddress::Path(text.to_owned()));
            }
            Target::Unix(path.into())
        } else {
            return Err(InvalidAddress::Scheme(text.to_owned()));
        };
        Ok(Self { target, text: text.into() })
    }
}

fn tcp(text: &str, rest: &str, tls: bool, spread: bool) -> Result<Target, InvalidAddress> {
    let wrong = || InvalidAddress::HostPort(text.to_owned());
    let authority: http::uri::Authority = rest.parse().map_err(|_| wrong())?;
    let port = authority.port_u16().filter(|port| *port > 0).ok_or_else(wrong)?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() || authority.as_str().contains('@') {
        return Err(wrong());
    }
    Ok(Target::Tcp { host: host.into(), port, tls, spread })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.text, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Result<Target, InvalidAddress> {
        text.parse::<Address>().map(|address| address.target)
    }

    #[test]
    fn addresses_of_all_schemes_are_read() {
        let tcp = |host: &str, port, tls, spread| Target::Tcp { host: host.into(), port, tls, spread };
        for (text, expected) in [
            ("tcp://gitaly:8075", tcp("gitaly", 8075, false, false)),
            ("tcp://[::1]:8075", tcp("::1", 8075, false, false)),
            ("tls://gitaly.example.com:9999", tcp("gitaly.example.com", 9999, true, false)),
            ("dns:praefect:2305", tcp("praefect", 2305, false, true)),
            ("dns:///praefect:2305", tcp("praefect", 2305, false, true)),
            ("unix:/run/gitaly.socket", Target::Unix("/run/gitaly.socket".into())),
            ("unix:///run/gitaly.socket", Target::Unix("/run/gitaly.socket".into())),
        ] {
            assert_eq!(target(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn other_addresses_are_refused_with_the_reason() {
        for text in ["http://gitaly:80", "gitaly:8075", "", "tcp:gitaly:8075", "dns+tls:///a:1"] {
            assert!(matches!(target(text), Err(InvalidAddress::Scheme(_))), "{text}");
        }
        for text in
            ["tcp://", "tcp://gitaly", "tcp://gitaly:0", "tcp://:1", "tcp://a:1/b", "tls://u@a:1", "dns:a"]
        {
            assert!(matches!(target(text), Err(InvalidAddress::HostPort(_))), "{text}");
        }
        assert!(matches!(target("dns://8.8.8.8/a:1"), Err(InvalidAddress::DnsServer(_))));
        assert!(matches!(target("dns://a:1"), Err(InvalidAddress::DnsServer(_))));
        for text in ["unix:", "unix:a", "unix://a", "unix:/a/", "unix:/"] {
            assert!(matches!(target(text), Err(InvalidAddress::Path(_))), "{text}");
        }
        assert_eq!(target(&format!("unix:/{}", "a".repeat(2000))), Err(InvalidAddress::TooLong));
    }
}
