//! Chooses which address of kas to connect to, without I/O.
//!
//! Addresses with the same host and port are *routes* to one *endpoint*. A route is blocked when connecting
//! fails as it does behind a proxy that does not support HTTP/2, or WebSocket; then the next route of the
//! endpoint is taken. Names, credentials and certificates are not such reasons: they would fail on every
//! route. A route is confirmed when kas has answered on it. A confirmed route is kept for the life of the
//! process, unless it is blocked several times in a row.
//!
//! Different endpoints may lead to different replicas of kas. They are dialled in turn: first those without a
//! session, and of these last those whose session was just lost. In a *round* each route is dialled at most
//! once. An address that the round has not tried yet needs no pause. So a dead address delays no other one,
//! and no address is dialled more often than the backoff allows.

use crate::dial::{KasAddress, KasAddresses};

/// A confirmed route is left after this many failures in a row. With fewer, a proxy that restarts moves the
/// agent to another route for good; with more, a proxy that was reconfigured cuts the agent off for longer.
const MAX_FAILURES: u32 = 3;

/// The addresses, and what is known about them.
#[derive(Debug)]
pub struct AddressSelector {
    endpoints: Vec<Endpoint>,
    /// How many times an address was chosen.
    choices: u64,
}

/// A host and a port, with the routes to it.
#[derive(Debug)]
struct Endpoint {
    routes: Vec<Route>,
    /// The index of the current route.
    current: usize,
    /// kas has answered on the current route.
    confirmed: bool,
    failures: u32,
    /// A session there was lost, and no other was made since.
    lost: bool,
    /// The number of the choice when this was last chosen; 0: never.
    last_chosen: u64,
}

/// One address of an endpoint.
#[derive(Debug)]
struct Route {
    address: KasAddress,
    /// It was dialled in this round.
    tried: bool,
}

impl Endpoint {
    fn current(&self) -> &Route {
        &self.routes[self.current]
    }

    fn is_current(&self, address: &KasAddress) -> bool {
        self.current().address == *address
    }
}

impl AddressSelector {
    /// Starts with the first endpoint, and with the first route of each.
    pub fn new(addresses: &KasAddresses) -> Self {
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for address in addresses.as_slice() {
            let route = Route { address: address.clone(), tried: false };
            let known = endpoints
                .iter_mut()
                .find(|endpoint| endpoint.current().address.authority() == address.authority());
            match known {
                Some(endpoint) => endpoint.routes.push(route),
                None => endpoints.push(Endpoint {
                    routes: vec![route],
                    current: 0,
                    confirmed: false,
                    failures: 0,
                    lost: false,
                    last_chosen: 0,
                }),
            }
        }
        Self { endpoints, choices: 0 }
    }

    /// Whether there is more than one endpoint.
    pub fn has_several_endpoints(&self) -> bool {
        self.endpoints.len() > 1
    }

    /// Chooses the address to dial now. `used`: the addresses that have a session.
    pub fn choose(&mut self, used: &[KasAddress]) -> KasAddress {
        let endpoint = self.candidate(used).unwrap_or_else(|| {
            for route in self.endpoints.iter_mut().flat_map(|endpoint| &mut endpoint.routes) {
                route.tried = false;
            }
            // A new round has a candidate: there is at least one address.
            self.candidate(used).unwrap_or_default()
        });
        self.choices += 1;
        let endpoint = &mut self.endpoints[endpoint];
        endpoint.last_chosen = self.choices;
        let route = &mut endpoint.routes[endpoint.current];
        route.tried = true;
        route.address.clone()
    }

    /// Returns an address that can be dialled without a pause: this round has not tried it, and it has no
    /// session.
    pub fn untried(&self, used: &[KasAddress]) -> Option<&KasAddress> {
        let endpoint = &self.endpoints[self.candidate(used)?];
        (!is_used(endpoint, used)).then_some(&endpoint.current().address)
    }

    /// Returns the next endpoint of this round; `None`: the round is over.
    fn candidate(&self, used: &[KasAddress]) -> Option<usize> {
        (0..self.endpoints.len()).filter(|n| !self.endpoints[*n].current().tried).min_by_key(|n| {
            let endpoint = &self.endpoints[*n];
            (is_used(endpoint, used), endpoint.lost, endpoint.last_chosen, *n)
        })
    }

    fn endpoint_with(&mut self, address: &KasAddress) -> Option<&mut Endpoint> {
        self.endpoints.iter_mut().find(|endpoint| endpoint.is_current(address))
    }

    /// Whether an address is on trial: it is not confirmed, and there is another address.
    pub fn is_trial(&self, address: &KasAddress) -> bool {
        let others =
            self.endpoints.len() > 1 || self.endpoints.iter().any(|endpoint| endpoint.routes.len() > 1);
        others && !self.endpoints.iter().any(|endpoint| endpoint.is_current(address) && endpoint.confirmed)
    }

    /// Records that kas has answered at an address, in a session that is still open. Returns whether the
    /// address was not confirmed before.
    pub fn confirm(&mut self, address: &KasAddress) -> bool {
        let Some(endpoint) = self.endpoint_with(address) else { return false };
        endpoint.failures = 0;
        endpoint.lost = false;
        !std::mem::replace(&mut endpoint.confirmed, true)
    }

    /// Records that a session at an address was lost.
    pub fn mark_lost(&mut self, address: &KasAddress) {
        if let Some(endpoint) = self.endpoint_with(address) {
            endpoint.lost = true;
        }
    }

    /// Records a failure that a proxy may have caused. Returns the route that its endpoint uses from now on,
    /// if that is another.
    pub fn mark_blocked(&mut self, address: &KasAddress) -> Option<&KasAddress> {
        let endpoint = self.endpoint_with(address).filter(|endpoint| endpoint.routes.len() > 1)?;
        endpoint.failures += 1;
        if endpoint.confirmed && endpoint.failures < MAX_FAILURES {
            return None;
        }
        endpoint.current = (endpoint.current + 1) % endpoint.routes.len();
        endpoint.confirmed = false;
        endpoint.failures = 0;
        Some(&endpoint.current().address)
    }
}

fn is_used(endpoint: &Endpoint, used: &[KasAddress]) -> bool {
    used.iter().any(|address| address.authority() == endpoint.current().address.authority())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(text: &str) -> AddressSelector {
        AddressSelector::new(&text.parse().unwrap())
    }

    fn current(selector: &AddressSelector) -> KasAddress {
        selector.endpoints[0].current().address.clone()
    }

    fn fails(selector: &mut AddressSelector) -> String {
        let address = current(selector);
        selector.mark_blocked(&address);
        current(selector).to_string()
    }

    fn used(texts: &[&str]) -> Vec<KasAddress> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// Returns the hosts that are dialled until a pause is needed. The first is dialled after a pause.
    fn round(selector: &mut AddressSelector, at: &[&str]) -> String {
        let at = used(at);
        let mut hosts = vec![selector.choose(&at).host().to_owned()];
        while selector.untried(&at).is_some() {
            hosts.push(selector.choose(&at).host().to_owned());
        }
        hosts.join(" ")
    }

    #[test]
    fn each_route_is_tried_once_until_one_is_confirmed() {
        let mut selector = selector("https://kas/path");
        assert!(!selector.has_several_endpoints());
        let first = selector.choose(&[]);
        assert_eq!(first.to_string(), "grpcs://kas:443");
        assert!(selector.is_trial(&first) && selector.untried(&[]).is_none());
        assert_eq!(selector.mark_blocked(&first).unwrap().to_string(), "wss://kas:443/path");
        assert_eq!(selector.untried(&[]).unwrap().to_string(), "wss://kas:443/path", "it needs no pause");
        selector.choose(&[]);
        assert_eq!(fails(&mut selector), "grpcs://kas:443");
        assert!(selector.untried(&[]).is_none(), "both have failed");
        assert_eq!(selector.choose(&[]), first);
        assert_eq!(fails(&mut selector), "wss://kas:443/path");
        let confirmed = selector.choose(&[]);
        assert!(selector.confirm(&confirmed));
        assert!(!selector.confirm(&confirmed), "it is confirmed already");
        assert!(!selector.is_trial(&confirmed));
    }

    #[test]
    fn confirmed_route_is_left_after_several_failures_in_a_row() {
        let mut selector = selector("https://kas");
        let first = current(&selector);
        selector.confirm(&first);
        for _ in 0..2 {
            for _ in 1..MAX_FAILURES {
                assert_eq!(fails(&mut selector), "grpcs://kas:443");
            }
            selector.confirm(&first);
        }
        for _ in 1..MAX_FAILURES {
            fails(&mut selector);
        }
        assert_eq!(fails(&mut selector), "wss://kas:443");
        assert!(selector.is_trial(&current(&selector)), "the next one is not confirmed yet");
    }

    #[test]
    fn one_address_stays_and_always_needs_a_pause() {
        let mut selector = selector("grpcs://kas");
        for _ in 0..10 {
            let address = selector.choose(&[]);
            assert_eq!(address.to_string(), "grpcs://kas:443");
            assert!(!selector.is_trial(&address) && selector.mark_blocked(&address).is_none());
            assert!(selector.untried(&[]).is_none());
        }
    }

    #[test]
    fn late_result_of_another_route_changes_nothing() {
        let mut selector = selector("https://kas");
        let first = current(&selector);
        selector.mark_blocked(&first);
        assert!(selector.mark_blocked(&first).is_none() && !selector.confirm(&first));
        assert_eq!(current(&selector).to_string(), "wss://kas:443");
    }

    #[test]
    fn endpoints_are_dialled_in_turn_and_a_round_of_failures_ends() {
        let mut selector = selector("grpc://a:1,grpc://b:1,grpc://c:1");
        assert!(selector.has_several_endpoints());
        assert_eq!(round(&mut selector, &[]), "a b c");
        assert_eq!(round(&mut selector, &[]), "a b c");
    }

    #[test]
    fn free_endpoint_comes_before_one_that_is_used_or_was_lost() {
        let (a, b) = ("grpc://a:1", "grpc://b:1");
        let mut selector = selector("grpc://a:1,grpc://b:1,grpc://c:1");
        assert_eq!(selector.choose(&[]).host(), "a");
        assert_eq!(selector.choose(&used(&[a])).host(), "b");
        selector.mark_lost(&a.parse().unwrap());
        assert_eq!(selector.untried(&used(&[b])).map(KasAddress::host), Some("c"), "at once");
        assert_eq!(selector.choose(&used(&[b])).host(), "c");
        // c does not answer. A new round tries the lost endpoint, and then the one with a session.
        assert_eq!(round(&mut selector, &[b]), "c a");
        assert_eq!(round(&mut selector, &[b]), "b", "it may be a balancer with more replicas behind it");
        assert_eq!(round(&mut selector, &[b]), "c a");
        assert!(selector.confirm(&a.parse().unwrap()));
    }

    #[test]
    fn routes_to_one_endpoint_are_not_several_endpoints() {
        let mut selector = selector("https://a,grpc://b:1,wss://a/path");
        assert_eq!(selector.endpoints.len(), 2);
        let route = selector.choose(&[]);
        assert_eq!(selector.untried(&used(&["wss://a"])).map(KasAddress::host), Some("b"));
        selector.mark_blocked(&route);
        assert_eq!(round(&mut selector, &[]), "b a");
        assert_eq!(current(&selector).to_string(), "wss://a:443");
    }
}
