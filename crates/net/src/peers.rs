//! What is known of peers before authentication: their source network, and whether a peer from there was
//! authenticated before.

use std::{
    collections::HashSet,
    hash::Hash,
    mem,
    net::{IpAddr, Ipv6Addr},
};

/// At least this many of the latest values are remembered, and at most twice as many. An address takes 40
/// bytes.
const REMEMBERED: usize = 32 * 1024;

/// Remembers the latest 32,768 values that were added, and up to as many before them.
#[derive(Debug)]
pub struct Recent<T> {
    recent: HashSet<T>,
    /// The previous generation of `recent`.
    before: HashSet<T>,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        let (recent, before) = Default::default();
        Self { recent, before }
    }
}

impl<T: Eq + Hash> Recent<T> {
    /// Remembers `value`. One that is remembered already takes no more memory.
    pub fn add(&mut self, value: T) {
        if self.recent.len() >= REMEMBERED && !self.recent.contains(&value) {
            self.before = mem::take(&mut self.recent);
        }
        self.recent.insert(value);
    }

    /// Whether `value` is remembered.
    pub fn has(&self, value: &T) -> bool {
        self.recent.contains(value) || self.before.contains(value)
    }
}

/// Returns the network that a provider assigns to one customer: for IPv6 the /64, for IPv4 the address. An
/// IPv4-mapped address is converted to IPv4.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_remembered_and_no_more_than_twice_as_many() {
        let mut remembered = Recent::default();
        for n in 0..5 * REMEMBERED {
            remembered.add(n);
            // Adding it again takes no more memory.
            remembered.add(n);
            assert!(remembered.recent.len() + remembered.before.len() <= 2 * REMEMBERED);
            assert!(remembered.has(&n) && remembered.has(&n.saturating_sub(REMEMBERED - 1)));
        }
        assert!(!remembered.has(&0));
    }

    #[test]
    fn addresses_of_an_ipv6_network_are_one_source() {
        let same = |a: &str, b: &str| network(a.parse().unwrap()) == network(b.parse().unwrap());
        assert!(same("2001:db8::1", "2001:db8::ffff:0:2") && !same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:192.0.2.1", "192.0.2.1") && !same("192.0.2.1", "192.0.2.2"));
    }
}
