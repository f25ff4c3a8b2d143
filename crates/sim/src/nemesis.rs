//! What goes wrong: faults are chosen by the seed.

use std::{net::IpAddr, ops::RangeInclusive};

use history::Micros;
use rand::{RngExt as _, rngs::StdRng, seq::IndexedRandom as _};

use crate::network::Rule;

/// A fault of replicas, by their numbers, or of the links between them.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// SIGKILL, and a new process after some time. `noticed`: its host lives, and closes its connections.
    Kill { replica: usize, noticed: bool, time: Micros },
    /// SIGSTOP and SIGCONT.
    Pause { replica: usize, time: Micros },
    /// SIGTERM, and a new process some time after the old one has left.
    Leave { replica: usize, time: Micros },
    /// A rule for links, from and to. `flaps`: it holds for so long, then not for so long, and so on.
    Links { what: &'static str, pairs: Vec<(usize, usize)>, rule: Rule, time: Micros, flaps: Option<Micros> },
    /// Connections between two replicas are reset.
    Reset { pair: (usize, usize) },
    /// Discovery finds nothing, or only strangers.
    Discovery { replica: usize, strangers: bool, time: Micros },
    /// An agent leaves a replica for another one.
    Move { agent: usize },
    /// An agent closes its connections, and returns after some time.
    Away { agent: usize, time: Micros },
    /// An agent and a replica do not hear each other.
    Vanish { agent: usize, replica: usize, time: Micros },
}

const MILLI: Micros = 1_000;

fn time(random: &mut StdRng, millis: RangeInclusive<u64>) -> Micros {
    random.random_range(millis) * MILLI
}

/// Returns two different replicas.
fn pair(random: &mut StdRng, replicas: usize) -> (usize, usize) {
    let a = random.random_range(0..replicas);
    let b = (a + random.random_range(1..replicas)) % replicas;
    (a, b)
}

fn all_pairs(replicas: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..replicas).flat_map(move |a| (0..replicas).filter(move |b| *b != a).map(move |b| (a, b)))
}

/// Cuts links.
fn cut(what: &'static str, pairs: impl IntoIterator<Item = (usize, usize)>, time: Micros) -> Fault {
    let rule = Rule { cut: true, ..Rule::default() };
    Fault::Links { what, pairs: pairs.into_iter().collect(), rule, time, flaps: None }
}

/// Chooses a fault of replicas.
pub(crate) fn choose(random: &mut StdRng, replicas: usize) -> Fault {
    let replica = random.random_range(0..replicas);
    match random.random_range(0..100) {
        0..20 => {
            let noticed = random.random_bool(0.7);
            Fault::Kill { replica, noticed, time: time(random, 200..=8_000) }
        }
        20..35 => {
            let most = *[500, 5_000, 12_000].choose(random).unwrap_or(&500);
            Fault::Pause { replica, time: time(random, 200..=most) }
        }
        35..45 => Fault::Leave { replica, time: time(random, 0..=5_000) },
        45..51 => {
            let (a, b) = pair(random, replicas);
            cut("pair cut", [(a, b), (b, a)], time(random, 500..=12_000))
        }
        51..57 => cut("one direction cut", [pair(random, replicas)], time(random, 500..=12_000)),
        57..63 => {
            let heard = random.random_bool(0.5);
            let pairs =
                all_pairs(replicas).filter(|(a, b)| if heard { *b == replica } else { *a == replica });
            let what = if heard { "replica is deaf" } else { "replica is mute" };
            cut(what, pairs, time(random, 500..=12_000))
        }
        63..69 => {
            let sides: Vec<bool> = (0..replicas).map(|_| random.random_bool(0.5)).collect();
            let pairs = all_pairs(replicas).filter(|(a, b)| sides[*a] != sides[*b]);
            cut("partition", pairs, time(random, 500..=15_000))
        }
        69..71 => {
            // Nobody is cut off with three of them.
            let is_next = |a: usize, b: usize| (a + 1) % replicas == b || (b + 1) % replicas == a;
            let pairs = all_pairs(replicas).filter(|(a, b)| !is_next(*a, *b));
            cut("ring", pairs, time(random, 500..=15_000))
        }
        71..74 => {
            let sides: Vec<bool> = (0..replicas).map(|_| random.random_bool(0.5)).collect();
            let is_bridge = |at: usize| at == replica;
            let pairs = all_pairs(replicas).filter(|(a, b)| !is_bridge(*a) && !is_bridge(*b));
            cut("bridge", pairs.filter(|(a, b)| sides[*a] != sides[*b]), time(random, 500..=15_000))
        }
        74..80 => {
            let rule = Rule {
                loss: random.random_range(0.05..0.4),
                doubled: random.random_range(0.0..0.3),
                delay: (500, time(random, 2..=300)),
                ..Rule::default()
            };
            let (pairs, time) = (all_pairs(replicas).collect(), time(random, 1_000..=12_000));
            Fault::Links { what: "bad network", pairs, rule, time, flaps: None }
        }
        80..84 => {
            let rule = Rule { udp_cut: true, ..Rule::default() };
            let (pairs, time) = (all_pairs(replicas).collect(), time(random, 1_000..=15_000));
            Fault::Links { what: "UDP blocked", pairs, rule, time, flaps: None }
        }
        84..88 => {
            let (a, b) = pair(random, replicas);
            let delay = time(random, 20..=150);
            let rule = Rule { delay: (delay, delay + 10 * MILLI), ..Rule::default() };
            let (pairs, time) = (vec![(a, b), (b, a)], time(random, 1_000..=15_000));
            Fault::Links { what: "slow link", pairs, rule, time, flaps: None }
        }
        88..90 => {
            let (a, b) = pair(random, replicas);
            let (pairs, rule) = (vec![(a, b), (b, a)], Rule { cut: true, ..Rule::default() });
            let (flaps, time) = (Some(time(random, 100..=1_500)), time(random, 3_000..=20_000));
            Fault::Links { what: "link flaps", pairs, rule, time, flaps }
        }
        90..95 => Fault::Reset { pair: pair(random, replicas) },
        _ => {
            let strangers = random.random_bool(0.5);
            Fault::Discovery { replica, strangers, time: time(random, 1_000..=20_000) }
        }
    }
}

/// Chooses a fault of an agent.
pub(crate) fn choose_agent(random: &mut StdRng, replicas: usize, agents: usize) -> Fault {
    let agent = random.random_range(0..agents);
    match random.random_range(0..10) {
        0..5 => Fault::Move { agent },
        5..9 => Fault::Away { agent, time: time(random, 10..=8_000) },
        _ => {
            let replica = random.random_range(0..replicas);
            Fault::Vanish { agent, replica, time: time(random, 1_000..=30_000) }
        }
    }
}

/// A fault of links that lasts.
#[derive(Clone, Debug)]
pub(crate) struct Lasting {
    pub(crate) until: Micros,
    /// If its links are cut off and on: when they were cut first, and for how long each time.
    pub(crate) flaps: Option<(Micros, Micros)>,
    /// Its number in the history.
    pub(crate) number: usize,
    pub(crate) links: Vec<(IpAddr, IpAddr, Rule)>,
    /// The replica whose discovery is lost.
    pub(crate) discovery: Option<usize>,
}

impl Lasting {
    /// Whether its rules hold.
    pub(crate) fn holds(&self, now: Micros) -> bool {
        self.flaps.is_none_or(|(from, time)| (now.saturating_sub(from) / time.max(1)).is_multiple_of(2))
    }
}
