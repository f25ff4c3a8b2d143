//! Finds listeners that want the same address.
//!
//! Host names are not resolved, so they are only compared as text.

use std::net::IpAddr;

use super::{Config, Listen, Network, Problem};

/// What a listener binds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place<'a> {
    Socket(&'a str),
    Port { hosts: Hosts, port: u16 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    /// Every interface, for IPv4, IPv6 or both.
    All {
        v4: bool,
        v6: bool,
    },
    One(IpAddr),
    Name(String),
}

impl Hosts {
    fn of(network: Network, host: &str) -> Self {
        let inner = host.trim_start_matches('[').trim_end_matches(']');
        match inner.parse::<IpAddr>() {
            Ok(ip) if ip.is_unspecified() => Self::All { v4: ip.is_ipv4(), v6: ip.is_ipv6() },
            Ok(ip) => Self::One(ip.to_canonical()),
            Err(_) if inner.is_empty() => {
                Self::All { v4: network != Network::Tcp6, v6: network != Network::Tcp4 }
            }
            Err(_) => Self::Name(inner.to_ascii_lowercase()),
        }
    }

    fn overlap(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::All { v4, v6 }, Self::All { v4: other_v4, v6: other_v6 }) => {
                v4 & other_v4 || v6 & other_v6
            }
            (Self::All { v4, v6 }, Self::One(ip)) | (Self::One(ip), Self::All { v4, v6 }) => {
                if ip.is_ipv4() {
                    *v4
                } else {
                    *v6
                }
            }
            // Every interface of both kinds includes the address, whatever it is.
            (Self::All { v4, v6 }, Self::Name(_)) | (Self::Name(_), Self::All { v4, v6 }) => *v4 && *v6,
            (one, other) => one == other,
        }
    }
}

impl<'a> Place<'a> {
    /// Returns what a listener binds; `None`: a port that the system chooses.
    fn of(listen: &'a Listen) -> Option<Self> {
        if listen.network == Network::Unix {
            return Some(Self::Socket(&listen.address));
        }
        let (host, port) = listen.address.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        Some(Self::Port { hosts: Hosts::of(listen.network, host), port })
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Socket(one), Self::Socket(other)) => one == other,
            (Self::Port { hosts, port }, Self::Port { hosts: others, port: other }) => {
                port == other && hosts.overlap(others)
            }
            _ => false,
        }
    }
}

/// Returns a problem for each listener whose address an earlier one uses.
pub(super) fn find(config: &Config) -> Vec<Problem> {
    let private = config.tracker.private_api().map(|private| ("private_api", &private.listen));
    let listeners = [
        ("agent", &config.agent.listen.listen),
        ("api", &config.api.listen.listen),
        ("observability", &config.observability.listen),
    ];
    let kubernetes = config.agent.kubernetes_api.as_ref().map(|api| ("agent.kubernetes_api", &api.listen));
    let hooks = config.hooks.as_ref().map(|hooks| ("hooks", &hooks.listen));
    let direct = config.direct.as_ref().map(|direct| ("direct", &direct.listen));
    let listeners: Vec<_> =
        listeners.into_iter().chain(private).chain(kubernetes).chain(hooks).chain(direct).collect();
    let mut problems = Vec::new();
    for (i, (section, listen)) in listeners.iter().enumerate() {
        let Some(place) = Place::of(listen) else { continue };
        let earlier = listeners[..i]
            .iter()
            .find(|(_, earlier)| Place::of(earlier).is_some_and(|earlier| earlier.overlaps(&place)));
        if let Some((other, earlier)) = earlier {
            problems.push(Problem::rule(
                format!("{section}.listen.address"),
                format!(
                    "{:?}, which {other}.listen.address ({:?}) already uses",
                    listen.address, earlier.address
                ),
                "a different address or port for each listener",
            ));
        }
    }
    problems
}
