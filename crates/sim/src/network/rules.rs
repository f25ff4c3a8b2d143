//! What the links between two hosts do to packets.

use std::{collections::BTreeMap, net::IpAddr};

use history::Micros;

/// What one direction of a link does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule {
    /// Nothing passes.
    pub(crate) cut: bool,
    /// No datagram passes.
    pub(crate) udp_cut: bool,
    /// The share of packets that are lost.
    pub(crate) loss: f64,
    /// The share of datagrams that arrive twice.
    pub(crate) doubled: f64,
    /// How long a packet takes: at least, and at most.
    pub(crate) delay: (Micros, Micros),
}

impl Default for Rule {
    fn default() -> Self {
        Self { cut: false, udp_cut: false, loss: 0.0, doubled: 0.0, delay: (200, 900) }
    }
}

impl Rule {
    /// Returns a rule with the effects of both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            cut: self.cut || other.cut,
            udp_cut: self.udp_cut || other.udp_cut,
            loss: self.loss.max(other.loss),
            doubled: self.doubled.max(other.doubled),
            delay: (self.delay.0.max(other.delay.0), self.delay.1.max(other.delay.1)),
        }
    }
}

/// The rules of links that differ from the default, by the hosts that send and receive.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules(BTreeMap<(IpAddr, IpAddr), Rule>);

impl Rules {
    /// Adds a rule to the link between two hosts, in one direction.
    pub(crate) fn add(&mut self, from: IpAddr, to: IpAddr, rule: Rule) {
        let link = self.0.entry((from, to)).or_default();
        *link = link.and(rule);
    }

    pub(crate) fn of(&self, from: IpAddr, to: IpAddr) -> Rule {
        self.0.get(&(from, to)).copied().unwrap_or_default()
    }
}
