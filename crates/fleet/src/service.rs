//! [`ServiceAddress`]: a Service of a cluster.

use std::{fmt, str::FromStr};

/// A port of a Service in an agent's own cluster: `monitoring/prometheus:9090`, or `monitoring/https:web:443`
/// for one that speaks TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceAddress {
    namespace: Box<str>,
    is_https: bool,
    name: Box<str>,
    port: Box<str>,
}

/// A text that is no Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a Service as namespace/name:port, such as monitoring/prometheus:9090 or web/https:app:443")]
pub struct InvalidService;

impl ServiceAddress {
    /// Returns the namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the name of the Service.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the port: a number or a name.
    pub fn port(&self) -> &str {
        &self.port
    }

    /// Whether the API server connects by TLS. It does not verify the certificate.
    pub fn is_https(&self) -> bool {
        self.is_https
    }

    /// Returns the name as it stands in the path of the API server's proxy, such as `http:prometheus:9090`.
    /// In RBAC, `resourceNames` of `services/proxy` must have it so.
    pub fn proxied(&self) -> String {
        let scheme = if self.is_https { "https" } else { "http" };
        format!("{scheme}:{}:{}", self.name, self.port)
    }
}

impl FromStr for ServiceAddress {
    type Err = InvalidService;

    fn from_str(text: &str) -> Result<Self, InvalidService> {
        let (namespace, service) = text.split_once('/').ok_or(InvalidService)?;
        let parts: Vec<&str> = service.split(':').collect();
        let (is_https, name, port) = match parts.as_slice() {
            [name, port] | ["http", name, port] => (false, *name, *port),
            ["https", name, port] => (true, *name, *port),
            _ => return Err(InvalidService),
        };
        // The name of a port has at most 15 characters, and the number at most 5.
        let is_port = match port.parse::<u16>() {
            Ok(number) => number != 0 && !port.starts_with(['0', '+']),
            Err(_) => {
                port.len() <= 15 && is_label(port) && port.bytes().any(|byte| byte.is_ascii_lowercase())
            }
        };
        if !is_label(namespace) || !is_label(name) || !is_port {
            return Err(InvalidService);
        }
        Ok(Self { namespace: namespace.into(), is_https, name: name.into(), port: port.into() })
    }
}

impl fmt::Display for ServiceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_https { "https:" } else { "" };
        write!(f, "{}/{scheme}{}:{}", self.namespace, self.name, self.port)
    }
}

/// Whether a text can be the name of a namespace.
pub fn is_namespace(text: &str) -> bool {
    is_label(text)
}

/// Whether a text can be the name of a namespace, a Service or a port: a label of a DNS name.
fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(is_inner)
        && bytes.first() != Some(&b'-')
        && bytes.last() != Some(&b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_a_namespace_and_a_port() {
        let read = |text: &str| text.parse::<ServiceAddress>().map(|it| (it.to_string(), it.proxied()));
        for (text, shown, proxied) in [
            ("monitoring/prometheus:9090", "monitoring/prometheus:9090", "http:prometheus:9090"),
            ("monitoring/http:prometheus:web", "monitoring/prometheus:web", "http:prometheus:web"),
            ("a/https:b:443", "a/https:b:443", "https:b:443"),
        ] {
            assert_eq!(read(text), Ok((shown.to_owned(), proxied.to_owned())), "{text}");
        }
        for wrong in [
            "",
            "prometheus:9090",
            "a/b",
            "a/b:",
            "a/b:0",
            "a/b:65536",
            "a/b:09",
            "a/b:+9",
            "a/b:x_y",
            "a/ftp:b:1",
            "a/b/c:1",
            "A/b:1",
            "a/b.c:1",
            "a/-b:1",
            "a/b:1:2:3",
            "../b:1",
        ] {
            assert_eq!(read(wrong), Err(InvalidService), "{wrong}");
        }
    }
}
