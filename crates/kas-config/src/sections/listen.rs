//! What listeners have in common: address, TLS, secret files, maximum age of connections.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    time::Duration,
};

use settings::walk::{Rule, Section};

use super::minutes;

/// The address and TLS of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// The kind of the address.
    pub network: Network,
    /// `host:port` (an empty host means every interface), or the path of a socket.
    pub address: String,
    /// The files of its certificate; `None`: no TLS.
    pub tls: Option<TlsFiles>,
}

/// The kind of a listener's address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Network {
    /// IPv4 or IPv6.
    #[default]
    Tcp,
    /// IPv4 only.
    Tcp4,
    /// IPv6 only.
    Tcp6,
    /// A Unix domain socket.
    Unix,
}

/// The PEM files of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The secret files of a listener, from both keys.
pub(super) struct SecretFiles {
    pub(super) paths: Vec<PathBuf>,
    pub(super) all_listed: bool,
}

/// Declares the list of secret files in addition to `one`.
pub(super) fn secret_files(s: &mut Section<'_, '_>, one: Option<PathBuf>, doc: &str) -> SecretFiles {
    let listed = s.texts("authentication_secret_files", &[], doc);
    SecretFiles {
        all_listed: one.is_none() && !listed.is_empty(),
        paths: one.into_iter().chain(listed.into_iter().map(Into::into)).collect(),
    }
}

/// Declares `network` and `address`, and checks that they match.
pub(super) fn bind_address(s: &mut Section<'_, '_>, default: &str) -> (Network, String) {
    let network = s.one_of(
        "network",
        &[("tcp", Network::Tcp), ("tcp4", Network::Tcp4), ("tcp6", Network::Tcp6), ("unix", Network::Unix)],
        "",
    );
    let address = s.text("address", default, "Host and port, or the path of a socket when network is unix.");
    let fits = match network {
        // The default is not the path of a socket.
        Network::Unix => s.given("address"),
        _ => address.is_empty() && default.is_empty() || is_tcp_address(network, &address),
    };
    if !fits && !s.is_refused("address") {
        s.refuse(
            "address",
            match network {
                Network::Unix => "the path of a socket, because network is unix",
                Network::Tcp => {
                    "a host and a port from 0 to 65535, such as 127.0.0.1:8150, [::1]:8150 or :8150"
                }
                Network::Tcp4 => {
                    "an IPv4 address and a port, such as 127.0.0.1:8150, because network is tcp4"
                }
                Network::Tcp6 => "an IPv6 address and a port, such as [::1]:8150, because network is tcp6",
            },
        );
    }
    (network, address)
}

/// Whether an address has a port and a host that matches the network; an empty host means all interfaces.
fn is_tcp_address(network: Network, address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    if !port.starts_with(|c: char| c.is_ascii_digit()) || port.parse::<u16>().is_err() {
        return false;
    }
    if let Some(inner) = host.strip_prefix('[') {
        let Some(inner) = inner.strip_suffix(']') else { return false };
        let address = inner.split_once('%').map_or(inner, |(address, _zone)| address);
        return network != Network::Tcp4 && address.parse::<Ipv6Addr>().is_ok();
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    host.chars().all(is_name) && (network != Network::Tcp6 || host.parse::<Ipv4Addr>().is_err())
}

pub(super) fn tls(s: &mut Section<'_, '_>) -> Option<TlsFiles> {
    let certificate = s.path("certificate_file", "PEM chain; with key_file it enables TLS. Both or neither.");
    let key = s.path("key_file", "PEM private key of the certificate.");
    match (certificate, key) {
        (Some(certificate), Some(key)) => Some(TlsFiles { certificate, key }),
        (Some(_), None) if !s.is_refused("key_file") => {
            s.refuse("key_file", "the private key of certificate_file: both files or neither");
            None
        }
        (None, Some(_)) if !s.is_refused("certificate_file") => {
            s.refuse("certificate_file", "the certificate of key_file: both files or neither");
            None
        }
        _ => None,
    }
}

pub(super) fn max_connection_age(s: &mut Section<'_, '_>) -> Duration {
    s.duration(
        "max_connection_age",
        minutes(30),
        Rule::Positive,
        "A connection of this age is asked to end, so that load moves to new replicas.",
    )
}
