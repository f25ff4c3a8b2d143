//! [`Allowed`]: which addresses a sink may dial.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// A range of addresses, such as `10.0.0.0/8`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

/// A text that is no range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no address and no range such as 10.0.0.0/8 or fd00::/8, without bits beyond its prefix")]
pub struct InvalidNetwork;

impl Network {
    /// Whether an address is in this range. It counts as what it stands for, whatever that may be.
    fn contains(&self, address: IpAddr) -> bool {
        plain(address).any(|plain| self.has(plain))
    }

    /// Whether everything that an address may stand for is in this range.
    fn contains_all(&self, address: IpAddr) -> bool {
        plain(address).all(|plain| self.has(plain))
    }

    fn has(&self, address: IpAddr) -> bool {
        let (ours, theirs, width) = match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                (u128::from(ours.to_bits()), u128::from(theirs.to_bits()), 32)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => (ours.to_bits(), theirs.to_bits(), 128),
            _ => return false,
        };
        let rest = width - u32::from(self.prefix);
        ours.checked_shr(rest).unwrap_or(0) == theirs.checked_shr(rest).unwrap_or(0)
    }
}

impl FromStr for Network {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| InvalidNetwork)?;
        let width: u8 = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => width,
            Some(prefix) if prefix.len() <= 3 && prefix.bytes().all(|byte| byte.is_ascii_digit()) => {
                prefix.parse().map_err(|_| InvalidNetwork)?
            }
            Some(_) => return Err(InvalidNetwork),
        };
        let bits = match address {
            IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
            IpAddr::V6(address) => address.to_bits(),
        };
        let beyond = bits.checked_shl(u32::from(prefix)).unwrap_or(0);
        // An address that only stands for one of IPv4 is compared as that one, so it would match nothing.
        let is_mapped = matches!(address, IpAddr::V6(address) if address.to_ipv4_mapped().is_some());
        if prefix > width || beyond != 0 || is_mapped {
            return Err(InvalidNetwork);
        }
        Ok(Self { address, prefix })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Returns the addresses of IPv4 that an address of IPv6 may stand for (mapped, or by NAT64, SIIT, 6to4 or
/// Teredo), else the address itself. There are several if that depends on the network.
fn plain(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let v4 = match address {
        IpAddr::V4(_) => [None; 4],
        IpAddr::V6(v6) => embedded(v6),
    };
    let itself = v4.iter().all(Option::is_none).then_some(address);
    itself.into_iter().chain(v4.into_iter().flatten().map(IpAddr::V4))
}

fn embedded(address: Ipv6Addr) -> [Option<Ipv4Addr>; 4] {
    let bits = address.to_bits();
    let from = |bit: u32| Ipv4Addr::from_bits((bits >> (96 - bit)) as u32);
    let one = |address| [Some(address), None, None, None];
    let [a, b, c, d, e, f, g, _] = address.segments();
    match (a, b, c, d, e, f) {
        (0, 0, 0, 0, 0, 0xffff) | (0x64, 0xff9b, 0, 0, 0, 0) => one(from(96)),
        // SIIT: `::ffff:0:a.b.c.d`.
        (0, 0, 0, 0, 0xffff, 0) => one(from(96)),
        // Local prefixes of NAT64 have 48, 56, 64 or 96 bits, and the address is behind them, without the
        // bits from 64 to 71 (RFC 6052). What begins with 0 is none: these bits are those of another form.
        (0x64, 0xff9b, 1, ..) => {
            let without = (bits >> 64 << 64) | (bits << 72 >> 64);
            let at = |bit: u32| Ipv4Addr::from_bits((without >> (96 - bit)) as u32);
            let all = [at(48), at(56), at(64), from(96)];
            match all.map(|v4| (v4.octets()[0] != 0).then_some(v4)) {
                [None, None, None, None] => one(from(96)),
                some => some,
            }
        }
        (0x2002, ..) => one(from(16)),
        // Teredo: the server, and behind the inverted bits the client.
        (0x2001, 0, ..) => [Some(from(32)), Some(Ipv4Addr::from_bits(!(bits as u32))), None, None],
        // The old form `::a.b.c.d`; `::` and `::1` are none.
        (0, 0, 0, 0, 0, 0) if g != 0 => one(from(96)),
        _ => [None; 4],
    }
}

/// Why an address is not dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It leads to this host.
    #[error("it is an address of this host")]
    Loopback,
    /// It leads to a neighbour, such as the metadata service of a cloud.
    #[error("it is link-local")]
    LinkLocal,
    /// It is not that of one host.
    #[error("it is not the address of one host")]
    NoHost,
    /// The configuration denies it.
    #[error("sinks.deny has it")]
    Denied,
}

/// Which addresses may be dialled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// These may not.
    pub deny: Vec<Network>,
    /// These may, also if they are on loopback, link-local or denied.
    pub allow: Vec<Network>,
}

impl Allowed {
    /// Checks an address.
    ///
    /// # Errors
    /// Why it must not be dialled.
    pub fn check(&self, address: IpAddr) -> Result<(), Refused> {
        if self.allow.iter().any(|network| network.contains_all(address)) {
            return Ok(());
        }
        let refused = plain(address).find_map(|plain| match plain {
            IpAddr::V4(v4) => of_v4(v4),
            IpAddr::V6(v6) => of_v6(v6),
        });
        // As it was written, too: a range of IPv6 may be denied whose addresses stand for those of IPv4.
        let is_denied = |network: &Network| network.contains(address) || network.has_exactly(address);
        match refused {
            Some(refused) => Err(refused),
            None if self.deny.iter().any(is_denied) => Err(Refused::Denied),
            None => Ok(()),
        }
    }
}

impl Network {
    /// Whether an address is in this range as it is written, not as what it stands for.
    fn has_exactly(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => {
                let rest = 128 - u32::from(self.prefix);
                let bits = |address: Ipv6Addr| address.to_bits().checked_shr(rest).unwrap_or(0);
                bits(ours) == bits(theirs)
            }
            _ => false,
        }
    }
}

fn of_v4(address: Ipv4Addr) -> Option<Refused> {
    match address.octets() {
        [0, ..] => Some(Refused::NoHost),
        _ if address.is_loopback() => Some(Refused::Loopback),
        _ if address.is_link_local() => Some(Refused::LinkLocal),
        _ if address.is_multicast() || address.is_broadcast() => Some(Refused::NoHost),
        _ => None,
    }
}

fn of_v6(address: Ipv6Addr) -> Option<Refused> {
    match address {
        _ if address.is_loopback() => Some(Refused::Loopback),
        _ if address.is_unspecified() || address.is_multicast() => Some(Refused::NoHost),
        _ if address.is_unicast_link_local() => Some(Refused::LinkLocal),
        // The metadata service of AWS.
        _ if address.segments() == [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254] => Some(Refused::LinkLocal),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(allowed: &Allowed, address: &str) -> Result<(), Refused> {
        allowed.check(address.parse().unwrap())
    }

    #[test]
    fn loopback_and_neighbours_are_refused_however_they_are_written() {
        let default = Allowed::default();
        for (address, refused) in [
            ("127.0.0.1", Refused::Loopback),
            ("127.9.9.9", Refused::Loopback),
            ("::1", Refused::Loopback),
            ("::ffff:127.0.0.1", Refused::Loopback),
            ("64:ff9b::127.0.0.1", Refused::Loopback),
            ("2002:7f00:1::", Refused::Loopback),
            ("::127.0.0.1", Refused::Loopback),
            // Local prefixes of NAT64 with 48, 56, 64 and 96 bits.
            ("64:ff9b:1:7f00:0:100::", Refused::Loopback),
            ("64:ff9b:1:aa7f:0:1::", Refused::Loopback),
            ("64:ff9b:1:aaaa:7f:0:100:0", Refused::Loopback),
            ("64:ff9b:1::127.0.0.1", Refused::Loopback),
            ("64:ff9b:1::", Refused::NoHost),
            // SIIT, and Teredo with this client and with this server.
            ("::ffff:0:127.0.0.1", Refused::Loopback),
            ("2001:0:c000:201::80ff:fffe", Refused::Loopback),
            ("2001:0:7f00:1::3fff:fdfe", Refused::Loopback),
            ("64:ff9b:1:a9fe:a9:fe00::", Refused::LinkLocal),
            ("::ffff:0:169.254.169.254", Refused::LinkLocal),
            ("2001:0:c000:201::5601:5601", Refused::LinkLocal),
            ("169.254.169.254", Refused::LinkLocal),
            ("::ffff:169.254.169.254", Refused::LinkLocal),
            ("fe80::1", Refused::LinkLocal),
            ("fd00:ec2::254", Refused::LinkLocal),
            ("0.0.0.0", Refused::NoHost),
            ("0.1.2.3", Refused::NoHost),
            ("::", Refused::NoHost),
            ("224.0.0.1", Refused::NoHost),
            ("255.255.255.255", Refused::NoHost),
            ("ff02::1", Refused::NoHost),
        ] {
            assert_eq!(check(&default, address), Err(refused), "{address}");
        }
        for address in [
            "10.0.0.1",
            "192.0.2.1",
            "2001:db8::1",
            "fd00::1",
            "::ffff:10.0.0.1",
            "64:ff9b:1::192.0.2.1",
            "64:ff9b:1:c000:2:100::",
            "::ffff:0:192.0.2.1",
            "2001:0:c000:201::3fff:fdfe",
            "2001:1::1",
        ] {
            assert_eq!(check(&default, address), Ok(()), "{address}");
        }
    }

    #[test]
    fn networks_are_denied_and_allowed() {
        let allowed = Allowed {
            deny: vec!["10.0.0.0/8".parse().unwrap(), "64:ff9b::/96".parse().unwrap()],
            allow: vec!["127.0.0.2".parse().unwrap(), "10.1.0.0/16".parse().unwrap()],
        };
        for (address, expected) in [
            ("127.0.0.2", Ok(())),
            ("127.0.0.1", Err(Refused::Loopback)),
            ("10.1.2.3", Ok(())),
            ("::ffff:10.1.2.3", Ok(())),
            ("10.2.0.1", Err(Refused::Denied)),
            ("::ffff:10.2.0.1", Err(Refused::Denied)),
            ("64:ff9b::192.0.2.1", Err(Refused::Denied)),
            ("192.0.2.1", Ok(())),
            ("64:ff9b:1::10.1.2.3", Ok(())),
            ("64:ff9b:1::10.2.0.1", Err(Refused::Denied)),
            // It may stand for one that is allowed, and for one that is not.
            ("64:ff9b:1:a01:2:300:7f00:1", Err(Refused::Loopback)),
            ("::ffff:0:10.2.0.1", Err(Refused::Denied)),
        ] {
            assert_eq!(check(&allowed, address), expected, "{address}");
        }
        let all =
            Allowed { deny: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()], allow: vec![] };
        for address in ["192.0.2.1", "2001:db8::1"] {
            assert_eq!(check(&all, address), Err(Refused::Denied), "{address}");
        }
    }

    #[test]
    fn a_network_is_written_in_one_way() {
        for right in ["10.0.0.0/8", "192.0.2.1/32", "fd00::/8", "::/0", "0.0.0.0/0"] {
            assert_eq!(right.parse::<Network>().unwrap().to_string(), right);
        }
        assert_eq!("192.0.2.1".parse::<Network>().unwrap().to_string(), "192.0.2.1/32");
        for wrong in [
            "",
            "a",
            "10.0.0.0/33",
            "10.0.0.1/8",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0/8",
            "::/129",
            "::ffff:10.0.0.0/104",
        ] {
            assert_eq!(wrong.parse::<Network>(), Err(InvalidNetwork), "{wrong}");
        }
    }
}
