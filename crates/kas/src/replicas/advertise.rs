//! The address at which other replicas reach this one.
//!
//! It is in every gossip datagram, and peers dial it. A wrong address would be worse than none, so if it is
//! not known, the result is an error that names the settings, never a guess.

use std::{
    collections::HashSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket},
};

use cluster::Doors;
use kas_config::{Host, HostPort, Network, PrivateApi};

/// Why the address is not known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configured name has no address now; it may have one later.
    #[error("cannot look up {name}, at which other replicas should reach this one")]
    Lookup {
        /// The name, from `private_api.advertise` or `OWN_PRIVATE_API_URL`.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Nothing is configured, the listener has no interface address, and no replica is known whose route
    /// would determine the address. Discovery may find one later.
    #[error(
        "the address of this replica is not known: private_api.listen.address names no interface, and no other replica is \
         known; set private_api.advertise, OWN_PRIVATE_API_URL or POD_IP"
    )]
    Unknown,
    /// As [`Error::Unknown`], but replicas are known and this host has no route to any of them.
    #[error(
        "the address of this replica is not known: there is no route to {seed}; set private_api.advertise, \
         OWN_PRIVATE_API_URL or POD_IP"
    )]
    NoRoute {
        /// The replica that was tried last.
        seed: SocketAddr,
        /// Why there is none.
        source: io::Error,
    },
    /// The address is a loopback address although another replica is on another host.
    #[error(
        "other replicas cannot reach this one at {address}, since {seed} is on another host: set private_api.listen.address \
         or private_api.advertise to an address of this host"
    )]
    Loopback {
        /// The address of this replica.
        address: SocketAddr,
        /// A replica on another host.
        seed: SocketAddr,
    },
}

/// Returns the address at which other replicas reach this one, which listens on `bound`.
///
/// It is the first of: `private_api.advertise`, `OWN_PRIVATE_API_URL`, `POD_IP` with the bound port, the
/// bound address if it belongs to one interface, and the address from which this host would reach a seed.
/// Looking up a name blocks this thread. Nothing is sent to seeds.
///
/// # Errors
/// See [`Error`].
pub fn address(
    config: &PrivateApi,
    bound: SocketAddr,
    seeds: &HashSet<SocketAddr>,
) -> Result<SocketAddr, Error> {
    let settings = &config.advertise;
    let address = if let Some(address) = settings.configured.as_ref().or(settings.own_url.as_ref()) {
        resolve(address, bound.ip(), config.listen.network)?
    } else if let Some(ip) = settings.pod_ip {
        SocketAddr::new(ip, bound.port())
    } else if !bound.ip().to_canonical().is_unspecified() {
        bound
    } else {
        SocketAddr::new(toward(seeds, bound.ip(), config.listen.network)?, bound.port())
    };
    if address.ip().to_canonical().is_loopback()
        && let Some(seed) = in_order(seeds).find(|seed| !seed.ip().to_canonical().is_loopback())
    {
        return Err(Error::Loopback { address, seed });
    }
    Ok(address)
}

/// Returns where callers on other hosts reach the listeners for them, which are bound to `bound`, if other
/// replicas reach this one at `own`. A listener that only this host reaches has no address, unless replicas
/// have such addresses too.
pub fn doors(bound: Doors, own: IpAddr) -> Doors {
    let reached = |bound: SocketAddr| {
        let ip = bound.ip().to_canonical();
        if ip.is_unspecified() {
            return Some(SocketAddr::new(own, bound.port()));
        }
        (!ip.is_loopback() || own.to_canonical().is_loopback()).then_some(bound)
    };
    Doors { api: bound.api.and_then(reached), http: bound.http.and_then(reached) }
}

/// Looks up a name; prefers an address that the listener serves.
fn resolve(address: &HostPort, bound: IpAddr, network: Network) -> Result<SocketAddr, Error> {
    let name = match &address.host {
        Host::Ip(ip) => return Ok(SocketAddr::new(*ip, address.port)),
        Host::Name(name) => name,
    };
    let fail = |source| Error::Lookup { name: name.clone(), source };
    let found: Vec<_> = (name.as_str(), address.port).to_socket_addrs().map_err(fail)?.collect();
    let served = found.iter().find(|found| is_served(found.ip(), bound, network));
    // An address of another family may be translated by the network.
    let first = served.or(found.first()).copied();
    first.ok_or_else(|| fail(io::Error::new(io::ErrorKind::NotFound, "the name has no address")))
}

/// Returns the address from which this host would reach one of `seeds`. Nothing is sent.
fn toward(seeds: &HashSet<SocketAddr>, bound: IpAddr, network: Network) -> Result<IpAddr, Error> {
    let mut failed = Error::Unknown;
    for seed in in_order(seeds).filter(|seed| is_served(seed.ip(), bound, network)) {
        // Connecting a datagram socket only looks up the route.
        let any: IpAddr =
            if seed.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let own = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(seed)?;
            socket.local_addr()
        });
        match own {
            Ok(own) if !own.ip().is_unspecified() => return Ok(own.ip()),
            Ok(_) => {}
            Err(source) => failed = Error::NoRoute { seed, source },
        }
    }
    Err(failed)
}

/// Whether a listener at `bound` accepts connections to an address of this family.
fn is_served(ip: IpAddr, bound: IpAddr, network: Network) -> bool {
    match bound {
        IpAddr::V4(_) => ip.to_canonical().is_ipv4(),
        // By default, a socket of the unspecified IPv6 address accepts IPv4 too.
        IpAddr::V6(_) => ip.is_ipv6() || network == Network::Tcp,
    }
}

/// Returns seeds on other hosts first, then by address, so that the result is deterministic.
fn in_order(seeds: &HashSet<SocketAddr>) -> impl Iterator<Item = SocketAddr> {
    let mut seeds: Vec<_> = seeds.iter().copied().collect();
    seeds.sort_by_key(|seed| (seed.ip().to_canonical().is_loopback(), *seed));
    seeds.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kas_config::{Advertise, Listen};

    fn private_api(advertise: Advertise) -> PrivateApi {
        PrivateApi {
            listen: Listen { network: Network::Tcp, address: "0.0.0.0:8155".into(), tls: None },
            max_connection_age: std::time::Duration::from_secs(1800),
            others: None,
            advertise,
            secrets: vec![],
            all_secrets_listed: false,
        }
    }

    fn decide(advertise: &Advertise, bound: &str, seeds: &[&str]) -> Result<String, String> {
        let seeds = seeds.iter().map(|seed| seed.parse().unwrap()).collect();
        address(&private_api(advertise.clone()), bound.parse().unwrap(), &seeds)
            .map(|address| address.to_string())
            .map_err(|error| error.to_string())
    }

    fn set(configured: &str, own_url: &str, pod_ip: &str) -> Advertise {
        Advertise {
            configured: configured.parse().ok(),
            own_url: own_url.parse().ok(),
            pod_ip: pod_ip.parse().ok(),
        }
    }

    #[test]
    fn the_first_source_in_order_counts() {
        let seeds = ["10.9.9.9:8155"];
        for (set, bound, expected) in [
            (set("10.0.0.1:1", "10.0.0.2:2", "10.0.0.3"), "10.0.0.4:4", "10.0.0.1:1"),
            (set("", "10.0.0.2:2", "10.0.0.3"), "10.0.0.4:4", "10.0.0.2:2"),
            (set("", "", "10.0.0.3"), "0.0.0.0:4", "10.0.0.3:4"),
            (set("", "", "fd00::3"), "[::]:4", "[fd00::3]:4"),
            (set("", "", "10.0.0.3"), "10.0.0.4:4", "10.0.0.3:4"),
            (set("", "", ""), "10.0.0.4:4", "10.0.0.4:4"),
            (set("", "", ""), "[fd00::4]:4", "[fd00::4]:4"),
        ] {
            assert_eq!(decide(&set, bound, &seeds).as_deref(), Ok(expected), "{set:?}");
            assert_eq!(decide(&set, bound, &[]).as_deref(), Ok(expected), "{set:?}");
        }
    }

    #[test]
    fn a_name_is_looked_up_and_an_unknown_one_is_an_error() {
        let name = set("localhost:9", "", "");
        assert_eq!(decide(&name, "127.0.0.1:1", &[]).as_deref(), Ok("127.0.0.1:9"));
        let error = decide(&set("", "nobody.invalid:9", ""), "127.0.0.1:1", &[]).unwrap_err();
        assert_eq!(error, "cannot look up nobody.invalid, at which other replicas should reach this one");
    }

    #[test]
    fn without_settings_the_route_to_a_seed_decides() {
        let nothing = Advertise::default();
        assert_eq!(decide(&nothing, "0.0.0.0:4", &["127.0.0.1:8155"]).as_deref(), Ok("127.0.0.1:4"));
        assert_eq!(decide(&nothing, "[::]:4", &["127.0.0.1:8155"]).as_deref(), Ok("127.0.0.1:4"));
        // The same as the route of the system, whatever the network of this test is.
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let route = socket.connect("192.0.2.1:8155").and_then(|()| socket.local_addr());
        let found = decide(&nothing, "0.0.0.0:4", &["192.0.2.1:8155", "127.0.0.1:8155"]);
        match route {
            Ok(own) if !own.ip().is_loopback() => assert_eq!(found, Ok(format!("{}:4", own.ip()))),
            _ => assert!(found.is_err(), "{found:?}"),
        }
    }

    #[test]
    fn an_unknown_address_is_an_error_that_names_the_settings() {
        let expected = "the address of this replica is not known: private_api.listen.address names no interface, \
                        and no other replica is known; set private_api.advertise, OWN_PRIVATE_API_URL or POD_IP";
        let nothing = Advertise::default();
        assert_eq!(decide(&nothing, "0.0.0.0:4", &[]).unwrap_err(), expected);
        assert_eq!(decide(&nothing, "[::]:4", &[]).unwrap_err(), expected);
        // A seed of a family that is not served is ignored.
        assert_eq!(decide(&nothing, "0.0.0.0:4", &["[fd00::1]:8155"]).unwrap_err(), expected);
    }

    #[test]
    fn a_door_has_the_address_that_others_reach() {
        let of = |api: &str, http: &str, own: &str| {
            let bound = Doors { api: api.parse().ok(), http: http.parse().ok() };
            doors(bound, own.parse().unwrap()).to_string()
        };
        assert_eq!(of("0.0.0.0:1", "[::]:2", "10.0.0.7"), "api=10.0.0.7:1,http=10.0.0.7:2");
        assert_eq!(of("10.0.0.8:1", "127.0.0.1:2", "10.0.0.7"), "api=10.0.0.8:1");
        assert_eq!(of("127.0.0.1:1", "", "127.0.0.1"), "api=127.0.0.1:1");
    }

    #[test]
    fn loopback_is_refused_when_a_replica_is_elsewhere() {
        let expected = "other replicas cannot reach this one at 127.0.0.1:4, since 10.0.0.1:8155 is on another host: \
                        set private_api.listen.address or private_api.advertise to an address of this host";
        let seeds = ["127.0.0.1:8155", "10.0.0.1:8155"];
        let nothing = Advertise::default();
        assert_eq!(decide(&nothing, "127.0.0.1:4", &seeds).unwrap_err(), expected);
        assert_eq!(decide(&set("127.0.0.1:4", "", ""), "0.0.0.0:4", &seeds).unwrap_err(), expected);
        assert_eq!(decide(&set("", "", "127.0.0.1"), "0.0.0.0:4", &seeds).unwrap_err(), expected);
        assert_eq!(decide(&nothing, "127.0.0.1:4", &seeds[..1]).as_deref(), Ok("127.0.0.1:4"));
        assert_eq!(decide(&nothing, "[::1]:4", &["[::1]:8155"]).as_deref(), Ok("[::1]:4"));
    }
}
