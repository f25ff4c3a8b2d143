//! Which of several addresses of kas is dialled, without I/O.
//!
//! Addresses of one authority (host and port) are *ways* to the same place: the first that passes the proxies in between
//! is kept. A way is left for the next one when what it met is what a proxy causes that knows no HTTP/2, or no WebSocket.
//! What names, credentials or certificates cause is none of that, and would be the same elsewhere. What has passed is
//! remembered for the life of the process, and left only when it has failed so several times in a row.
//!
//! Addresses of different authorities are different *places*, where different replicas may be. They are dialled in turn:
//! first those where no session is, and of these last those where one was just lost. In a *round* each way is dialled
//! once at most. What a round has not tried yet needs no pause; so nobody waits for the back-off of an address that is
//! dead, and no address is dialled more often than the back-off allows.

use crate::dial::{KasAddress, KasAddresses};

/// An address that has passed before is left after so many failures in a row. Fewer: a proxy that restarts sends the
/// agent elsewhere for good; more: one that was set up anew cuts it off for longer.
const PATIENCE: u32 = 3;

/// The addresses, and what is known of them.
#[derive(Debug)]
pub struct Ladder {
    places: Vec<Place>,
    /// How often an address was chosen.
    turns: u64,
}

/// A host and port.
#[derive(Debug)]
struct Place {
    rungs: Vec<Rung>,
    at: usize,
    /// The present way has passed.
    passed: bool,
    failures: u32,
    /// A session there was lost, and none was made since.
    lost: bool,
    /// When it was chosen last; 0: never.
    turn: u64,
}

/// A way to a place.
#[derive(Debug)]
struct Rung {
    address: KasAddress,
    /// It was dialled in this round.
    tried: bool,
}

impl Place {
    fn current(&self) -> &Rung {
        &self.rungs[self.at]
    }

    fn is_at(&self, address: &KasAddress) -> bool {
        self.current().address == *address
    }
}

impl Ladder {
    /// Begins with the first address of each place, and the first place.
    pub fn new(addresses: &KasAddresses) -> Self {
        let mut places: Vec<Place> = Vec::new();
        for address in addresses.as_slice() {
            let rung = Rung { address: address.clone(), tried: false };
            let known =
                places.iter_mut().find(|place| place.current().address.authority() == address.authority());
            match known {
                Some(place) => place.rungs.push(rung),
                None => places.push(Place {
                    rungs: vec![rung],
                    at: 0,
                    passed: false,
                    failures: 0,
                    lost: false,
                    turn: 0,
                }),
            }
        }
        Self { places, turns: 0 }
    }

    /// Whether there are several places.
    pub fn has_several_places(&self) -> bool {
        self.places.len() > 1
    }

    /// Chooses the address to dial now. `used`: where a session is.
    pub fn choose(&mut self, used: &[KasAddress]) -> KasAddress {
        let place = self.candidate(used).unwrap_or_else(|| {
            for rung in self.places.iter_mut().flat_map(|place| &mut place.rungs) {
                rung.tried = false;
            }
            // A new round has candidates: there is an address at least.
            self.candidate(used).unwrap_or_default()
        });
        self.turns += 1;
        let place = &mut self.places[place];
        place.turn = self.turns;
        let rung = &mut place.rungs[place.at];
        rung.tried = true;
        rung.address.clone()
    }

    /// Returns the address that needs no pause: this round has not tried it, and no session is there.
    pub fn fresh(&self, used: &[KasAddress]) -> Option<&KasAddress> {
        let place = &self.places[self.candidate(used)?];
        (!is_used(place, used)).then_some(&place.current().address)
    }

    /// Returns the place that is next in this round; `None`: the round is over.
    fn candidate(&self, used: &[KasAddress]) -> Option<usize> {
        (0..self.places.len()).filter(|n| !self.places[*n].current().tried).min_by_key(|n| {
            let place = &self.places[*n];
            (is_used(place, used), place.lost, place.turn, *n)
        })
    }

    fn place_at(&mut self, address: &KasAddress) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.is_at(address))
    }

    /// Whether an address is on trial: it has not passed, and there is another.
    pub fn is_trial(&self, address: &KasAddress) -> bool {
        let others = self.places.len() > 1 || self.places.iter().any(|place| place.rungs.len() > 1);
        others && !self.places.iter().any(|place| place.is_at(address) && place.passed)
    }

    /// Notes that kas has answered at an address, by a session that lives; returns whether that is news.
    pub fn passed(&mut self, address: &KasAddress) -> bool {
        let Some(place) = self.place_at(address) else { return false };
        place.failures = 0;
        place.lost = false;
        !std::mem::replace(&mut place.passed, true)
    }

    /// Notes that a session at an address was lost.
    pub fn lost(&mut self, address: &KasAddress) {
        if let Some(place) = self.place_at(address) {
            place.lost = true;
        }
    }

    /// Notes that an address was met with what a proxy causes; returns the way that is taken to its place from now on,
    /// if that is another.
    pub fn failed(&mut self, address: &KasAddress) -> Option<&KasAddress> {
        let place = self.place_at(address).filter(|place| place.rungs.len() > 1)?;
        place.failures += 1;
        if place.passed && place.failures < PATIENCE {
            return None;
        }
        place.at = (place.at + 1) % place.rungs.len();
        place.passed = false;
        place.failures = 0;
        Some(&place.current().address)
    }
}

fn is_used(place: &Place, used: &[KasAddress]) -> bool {
    used.iter().any(|address| address.authority() == place.current().address.authority())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ladder(text: &str) -> Ladder {
        Ladder::new(&text.parse().unwrap())
    }

    fn current(ladder: &Ladder) -> KasAddress {
        ladder.places[0].current().address.clone()
    }

    fn fails(ladder: &mut Ladder) -> String {
        let address = current(ladder);
        ladder.failed(&address);
        current(ladder).to_string()
    }

    fn used(texts: &[&str]) -> Vec<KasAddress> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// Returns the hosts that are dialled before a pause is needed, the first of them after one.
    fn round(ladder: &mut Ladder, at: &[&str]) -> String {
        let at = used(at);
        let mut hosts = vec![ladder.choose(&at).host().to_owned()];
        while ladder.fresh(&at).is_some() {
            hosts.push(ladder.choose(&at).host().to_owned());
        }
        hosts.join(" ")
    }

    #[test]
    fn each_way_is_tried_once_until_one_passes() {
        let mut ladder = ladder("https://kas/path");
        assert!(!ladder.has_several_places());
        let first = ladder.choose(&[]);
        assert_eq!(first.to_string(), "grpcs://kas:443");
        assert!(ladder.is_trial(&first) && ladder.fresh(&[]).is_none());
        assert_eq!(ladder.failed(&first).unwrap().to_string(), "wss://kas:443/path");
        assert_eq!(ladder.fresh(&[]).unwrap().to_string(), "wss://kas:443/path", "without a pause");
        ladder.choose(&[]);
        assert_eq!(fails(&mut ladder), "grpcs://kas:443");
        assert!(ladder.fresh(&[]).is_none(), "both have failed");
        assert_eq!(ladder.choose(&[]), first);
        assert_eq!(fails(&mut ladder), "wss://kas:443/path");
        let passes = ladder.choose(&[]);
        assert!(ladder.passed(&passes));
        assert!(!ladder.passed(&passes), "it is no news");
        assert!(!ladder.is_trial(&passes));
    }

    #[test]
    fn what_has_passed_is_left_after_several_failures_in_a_row() {
        let mut ladder = ladder("https://kas");
        let first = current(&ladder);
        ladder.passed(&first);
        for _ in 0..2 {
            for _ in 1..PATIENCE {
                assert_eq!(fails(&mut ladder), "grpcs://kas:443");
            }
            ladder.passed(&first);
        }
        for _ in 1..PATIENCE {
            fails(&mut ladder);
        }
        assert_eq!(fails(&mut ladder), "wss://kas:443");
        assert!(ladder.is_trial(&current(&ladder)), "the next one has to show that it passes");
    }

    #[test]
    fn one_address_stays_and_always_needs_a_pause() {
        let mut ladder = ladder("grpcs://kas");
        for _ in 0..10 {
            let address = ladder.choose(&[]);
            assert_eq!(address.to_string(), "grpcs://kas:443");
            assert!(!ladder.is_trial(&address) && ladder.failed(&address).is_none());
            assert!(ladder.fresh(&[]).is_none());
        }
    }

    #[test]
    fn late_news_of_another_address_counts_for_nothing() {
        let mut ladder = ladder("https://kas");
        let first = current(&ladder);
        ladder.failed(&first);
        assert!(ladder.failed(&first).is_none() && !ladder.passed(&first));
        assert_eq!(current(&ladder).to_string(), "wss://kas:443");
    }

    #[test]
    fn places_are_dialled_in_turn_and_a_round_of_failures_ends() {
        let mut ladder = ladder("grpc://a:1,grpc://b:1,grpc://c:1");
        assert!(ladder.has_several_places());
        assert_eq!(round(&mut ladder, &[]), "a b c");
        assert_eq!(round(&mut ladder, &[]), "a b c");
    }

    #[test]
    fn another_place_comes_before_one_that_is_used_or_was_lost() {
        let (a, b) = ("grpc://a:1", "grpc://b:1");
        let mut ladder = ladder("grpc://a:1,grpc://b:1,grpc://c:1");
        assert_eq!(ladder.choose(&[]).host(), "a");
        assert_eq!(ladder.choose(&used(&[a])).host(), "b");
        ladder.lost(&a.parse().unwrap());
        assert_eq!(ladder.fresh(&used(&[b])).map(KasAddress::host), Some("c"), "at once");
        assert_eq!(ladder.choose(&used(&[b])).host(), "c");
        // c does not answer: a new round asks who was lost, and at last where a session is.
        assert_eq!(round(&mut ladder, &[b]), "c a");
        assert_eq!(round(&mut ladder, &[b]), "b", "it may be a balancer with more replicas behind it");
        assert_eq!(round(&mut ladder, &[b]), "c a");
        assert!(ladder.passed(&a.parse().unwrap()));
    }

    #[test]
    fn ways_to_a_place_are_not_places() {
        let mut ladder = ladder("https://a,grpc://b:1,wss://a/path");
        assert_eq!(ladder.places.len(), 2);
        let way = ladder.choose(&[]);
        assert_eq!(ladder.fresh(&used(&["wss://a"])).map(KasAddress::host), Some("b"));
        ladder.failed(&way);
        assert_eq!(round(&mut ladder, &[]), "b a");
        assert_eq!(current(&ladder).to_string(), "wss://a:443");
    }
}
