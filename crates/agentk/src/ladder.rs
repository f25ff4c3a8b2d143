//! Which of several addresses of kas is dialled: the first that passes the proxies in between, without I/O.
//!
//! An address is left for the next one when what it met is what a proxy causes that knows no HTTP/2, or no WebSocket.
//! What names, credentials or certificates cause is none of that, and would be the same elsewhere. What has passed is
//! remembered for the life of the process, and left only when it has failed so several times in a row.

use crate::dial::{KasAddress, KasAddresses};

/// An address that has passed before is left after so many failures in a row. Fewer: a proxy that restarts sends the
/// agent elsewhere for good; more: one that was set up anew cuts it off for longer.
const PATIENCE: u32 = 3;

/// The addresses, and what is known of them.
#[derive(Debug)]
pub struct Ladder {
    rungs: Vec<KasAddress>,
    at: usize,
    /// The present one has passed.
    passed: bool,
    failures: u32,
}

impl Ladder {
    /// Begins with the first address.
    pub fn new(addresses: &KasAddresses) -> Self {
        Self { rungs: addresses.as_slice().to_vec(), at: 0, passed: false, failures: 0 }
    }

    /// Returns the address to dial.
    pub fn current(&self) -> &KasAddress {
        &self.rungs[self.at]
    }

    /// Returns the address after the present one, the first after the last; `None`: there is only one.
    pub fn next(&self) -> Option<&KasAddress> {
        (self.rungs.len() > 1).then(|| &self.rungs[(self.at + 1) % self.rungs.len()])
    }

    /// Whether the present address is on trial: it has not passed, and there is another.
    pub fn is_trial(&self) -> bool {
        !self.passed && self.rungs.len() > 1
    }

    /// Notes that kas has answered at an address; returns whether that is news.
    pub fn passed(&mut self, address: &KasAddress) -> bool {
        if address != self.current() {
            return false;
        }
        self.failures = 0;
        !std::mem::replace(&mut self.passed, true)
    }

    /// Notes that an address was met with what a proxy causes; returns whether another one is to be dialled now.
    pub fn failed(&mut self, address: &KasAddress) -> bool {
        if self.rungs.len() == 1 || address != self.current() {
            return false;
        }
        self.failures += 1;
        if self.passed && self.failures < PATIENCE {
            return false;
        }
        self.at = (self.at + 1) % self.rungs.len();
        self.passed = false;
        self.failures = 0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ladder(text: &str) -> Ladder {
        Ladder::new(&text.parse().unwrap())
    }

    fn fails(ladder: &mut Ladder) -> String {
        let address = ladder.current().clone();
        ladder.failed(&address);
        ladder.current().to_string()
    }

    #[test]
    fn each_address_is_tried_once_until_one_passes() {
        let mut ladder = ladder("https://kas/path");
        assert!(ladder.is_trial());
        assert_eq!(fails(&mut ladder), "wss://kas:443/path");
        assert_eq!(fails(&mut ladder), "grpcs://kas:443");
        assert_eq!(fails(&mut ladder), "wss://kas:443/path");
        let passes = ladder.current().clone();
        assert!(ladder.passed(&passes));
        assert!(!ladder.passed(&passes), "it is no news");
        assert!(!ladder.is_trial());
    }

    #[test]
    fn what_has_passed_is_left_after_several_failures_in_a_row() {
        let mut ladder = ladder("https://kas");
        let first = ladder.current().clone();
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
        assert!(ladder.is_trial(), "the next one has to show that it passes");
    }

    #[test]
    fn one_address_stays() {
        let mut ladder = ladder("grpcs://kas");
        assert!(!ladder.is_trial() && ladder.next().is_none());
        for _ in 0..10 {
            assert_eq!(fails(&mut ladder), "grpcs://kas:443");
        }
    }

    #[test]
    fn late_news_of_another_address_counts_for_nothing() {
        let mut ladder = ladder("https://kas");
        let first = ladder.current().clone();
        ladder.failed(&first);
        assert!(!ladder.failed(&first) && !ladder.passed(&first));
        assert_eq!(ladder.current().to_string(), "wss://kas:443");
    }
}
