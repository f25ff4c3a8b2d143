//! Section `gossip`.

use std::time::Duration;

use settings::walk::{Rule, Section};

use super::{minutes, seconds};

/// Section `gossip`: how replicas find out about each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Gossip {
    /// The name of the group: datagrams of other groups are ignored. 1 to 64 letters, digits, `-`, `_`, `.`.
    pub cluster: String,
    /// Time between two rounds, from 10 ms to 1 min.
    pub interval: Duration,
    /// Threshold of the failure detector, from 1 to 100. Higher means later and more certain.
    pub phi: f64,
    /// How long a dead replica is remembered, from 1 s to 1 d.
    pub dead_grace: Duration,
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>, not_gossip: Option<&'static str>) -> Gossip {
    root.optional(not_gossip, |s| {
        let doc = "How replicas find out about each other: UDP on the address and port of private_api.listen, \
                   encrypted with its secret.";
        s.section("gossip", doc, gossip)
    })
}

fn gossip(s: &mut Section<'_, '_>) -> Gossip {
    let cluster = s.text(
        "cluster",
        "kas",
        "The name of this group of replicas. It is bound into every datagram: groups with different names never \
         mix, even if they share a secret and addresses.",
    );
    if cluster.len() > 64 || !cluster.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
        s.refuse("cluster", "at most 64 letters, digits, `-`, `_` and `.`");
    }
    let interval = s.duration(
        "interval",
        Duration::from_millis(200),
        Rule::Within(Duration::from_millis(10), minutes(1)),
        "Time between two rounds. Shorter: changes and crashes are detected earlier. Longer: fewer datagrams.",
    );
    let phi = s.real(
        "phi",
        8.0,
        "How certain a replica must be before it considers a silent one dead, from 1 to 100. Lower: crashes are \
         detected earlier. Higher: fewer slow replicas are considered dead.",
    );
    if !(1.0..=100.0).contains(&phi) {
        s.refuse("phi", "a number from 1 to 100 (0 means the default)");
    }
    let dead_grace = s.duration(
        "dead_grace",
        minutes(10),
        Rule::Within(seconds(1), minutes(24 * 60)),
        "How long a dead replica is remembered. Each restart adds a replica, so long times cost memory and \
         datagrams.",
    );
    Gossip { cluster, interval, phi, dead_grace }
}
