//! The simulated network: connections and datagrams between addresses, with delays and faults.
//!
//! Everything that is sent waits in one queue until its time. [`Network::advance`] delivers what is due, in
//! the order of time and sending, and wakes the receivers. A connection delivers its bytes in order. Its
//! packets are not lost but late: while a link is cut, they are held and delivered after it has healed, as
//! TCP sends them again. Datagrams are lost.

mod connection;
mod datagrams;
mod rules;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    task::Waker,
};

use bytes::Bytes;
use history::Micros;
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use self::{
    connection::{Connection, Side},
    datagrams::Inbox,
};
pub(crate) use self::{
    connection::{Connector, Listener, Stream},
    rules::{Rule, Rules},
};

/// How long TCP waits before it sends a lost packet again.
const AGAIN: Micros = 200_000;
/// The most that one lost packet after the other delays a connection.
const MOST_LATE: Micros = 3_000_000;

/// What happened in the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) datagrams: u64,
    pub(crate) datagrams_lost: u64,
    pub(crate) datagrams_doubled: u64,
    pub(crate) connections: u64,
    pub(crate) bytes: u64,
}

/// The network. Clones share it.
#[derive(Clone)]
pub(crate) struct Network(Arc<Mutex<Core>>);

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Network")
    }
}

struct Core {
    now: Micros,
    random: StdRng,
    sent: u64,
    queue: BTreeMap<(Micros, u64), Packet>,
    rules: Rules,
    /// Packets of connections on links that are cut, in the order of sending.
    held: BTreeMap<(IpAddr, IpAddr), VecDeque<Packet>>,
    listeners: BTreeMap<SocketAddr, Backlog>,
    inboxes: BTreeMap<SocketAddr, Inbox>,
    connections: BTreeMap<u64, Connection>,
    connected: u64,
    /// The hosts to which something has happened, see [`Network::take_woken`].
    woken: BTreeSet<IpAddr>,
    sums: Sums,
}

/// Connections that are established and not accepted yet.
#[derive(Default)]
struct Backlog {
    waiting: VecDeque<u64>,
    waker: Option<Waker>,
}

struct Packet {
    from: IpAddr,
    to: IpAddr,
    content: Content,
}

enum Content {
    Syn(u64),
    Accepted(u64),
    Refused(u64),
    /// To one end of a connection.
    Data(u64, Side, Bytes),
    Fin(u64, Side),
    Reset(u64, Side),
    Datagram(SocketAddr, Bytes),
}

impl Network {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Core {
            now: 0,
            random: StdRng::seed_from_u64(seed),
            sent: 0,
            queue: BTreeMap::new(),
            rules: Rules::default(),
            held: BTreeMap::new(),
            listeners: BTreeMap::new(),
            inboxes: BTreeMap::new(),
            connections: BTreeMap::new(),
            connected: 0,
            woken: BTreeSet::new(),
            sums: Sums::default(),
        })))
    }

    /// Does something, and wakes receivers afterwards: a waker may drop what uses the network.
    fn with<T>(&self, act: impl FnOnce(&mut Core, &mut Vec<Waker>) -> T) -> T {
        let mut wakers = Vec::new();
        let mut core = self.0.lock();
        let result = act(&mut core, &mut wakers);
        drop(core);
        wakers.into_iter().for_each(Waker::wake);
        result
    }

    /// Returns the time.
    pub(crate) fn now(&self) -> Micros {
        self.0.lock().now
    }

    pub(crate) fn sums(&self) -> Sums {
        self.0.lock().sums
    }

    /// Advances the time and delivers what is due.
    pub(crate) fn advance(&self, now: Micros) {
        self.with(|core, wakers| {
            core.now = now;
            while let Some(entry) = core.queue.first_entry()
                && entry.key().0 <= now
            {
                let packet = entry.remove();
                core.arrive(packet, wakers);
            }
        });
    }

    /// Returns the hosts to which something has happened since the last call: a packet, or a reset, or the
    /// other end of a connection has read.
    pub(crate) fn take_woken(&self) -> BTreeSet<IpAddr> {
        std::mem::take(&mut self.0.lock().woken)
    }

    /// Replaces the rules of all links.
    pub(crate) fn set_rules(&self, rules: Rules) {
        self.with(|core, _| {
            core.rules = rules;
            let healed: Vec<_> =
                core.held.keys().copied().filter(|(from, to)| !core.rules.of(*from, *to).cut).collect();
            for link in healed {
                for packet in core.held.remove(&link).unwrap_or_default() {
                    core.send(packet);
                }
            }
        });
    }

    /// The process at `host` is dead. `noticed`: the system of the host lives, and tells the other ends of
    /// its connections.
    pub(crate) fn kill(&self, host: IpAddr, noticed: bool) {
        self.with(|core, _| {
            core.listeners.retain(|address, _| address.ip() != host);
            core.inboxes.retain(|address, _| address.ip() != host);
            let ids: Vec<u64> = core.connections.keys().copied().collect();
            for id in ids {
                for side in [Side::Client, Side::Server] {
                    core.abandon(id, side, host, noticed);
                }
            }
            if !noticed {
                core.held.retain(|(from, _), _| *from != host);
            }
        });
    }

    /// Resets some connections between two hosts; returns how many.
    pub(crate) fn reset_between(&self, a: IpAddr, b: IpAddr, share: f64) -> usize {
        self.with(|core, wakers| {
            let pair = BTreeSet::from([a, b]);
            let between: Vec<u64> = core
                .connections
                .iter()
                .filter(|(_, connection)| connection.hosts() == pair)
                .map(|(id, _)| *id)
                .collect();
            let chosen: Vec<u64> = between.into_iter().filter(|_| core.random.random_bool(share)).collect();
            core.woken.extend(pair);
            for id in &chosen {
                for side in [Side::Client, Side::Server] {
                    core.arrive_at(*id, side, wakers, |end| end.reset());
                }
            }
            chosen.len()
        })
    }
}

impl Core {
    /// Sends a packet; returns when it arrives. One on a link that is cut is held or lost.
    fn send(&mut self, packet: Packet) {
        let rule = self.rules.of(packet.from, packet.to);
        let mut at = self.now + self.random.random_range(rule.delay.0..=rule.delay.1);
        let order = match &packet.content {
            Content::Datagram(to, bytes) => {
                self.sums.datagrams += 1;
                if rule.cut || rule.udp_cut || self.random.random_bool(rule.loss) {
                    self.sums.datagrams_lost += 1;
                    return;
                }
                if self.random.random_bool(rule.doubled) {
                    self.sums.datagrams_doubled += 1;
                    let again = at + self.random.random_range(0..=rule.delay.1);
                    let content = Content::Datagram(*to, bytes.clone());
                    self.push(again, Packet { content, ..packet });
                }
                None
            }
            _ if rule.cut => {
                self.held.entry((packet.from, packet.to)).or_default().push_back(packet);
                return;
            }
            Content::Data(id, side, _) | Content::Fin(id, side) | Content::Reset(id, side) => {
                Some((*id, *side))
            }
            Content::Syn(_) | Content::Accepted(_) | Content::Refused(_) => None,
        };
        if !matches!(packet.content, Content::Datagram(..)) && rule.loss > 0.0 {
            let mut late = 0;
            while late < MOST_LATE && self.random.random_bool(rule.loss) {
                // Each wait is twice as long as the one before.
                late = 2 * late + AGAIN;
            }
            at += late;
        }
        if let Some((id, side)) = order
            && let Some(connection) = self.connections.get_mut(&id)
        {
            at = connection.in_order(side, at);
        }
        self.push(at, packet);
    }

    fn push(&mut self, at: Micros, packet: Packet) {
        self.sent += 1;
        self.queue.insert((at, self.sent), packet);
    }

    fn arrive(&mut self, packet: Packet, wakers: &mut Vec<Waker>) {
        let Packet { from, to, content } = packet;
        self.woken.insert(to);
        match content {
            Content::Syn(id) => {
                let Some(address) = self.connections.get(&id).map(Connection::server) else { return };
                let answer = match self.listeners.get_mut(&address) {
                    Some(backlog) => {
                        backlog.waiting.push_back(id);
                        wakers.extend(backlog.waker.take());
                        Content::Accepted(id)
                    }
                    None => Content::Refused(id),
                };
                self.send(Packet { from: to, to: from, content: answer });
            }
            Content::Accepted(id) => self.arrive_at(id, Side::Client, wakers, |end| end.connected(Ok(()))),
            Content::Refused(id) => self.arrive_at(id, Side::Client, wakers, |end| {
                end.connected(Err(io::ErrorKind::ConnectionRefused));
            }),
            Content::Data(id, side, bytes) => {
                let Some(connection) = self.connections.get(&id) else { return };
                if connection.is_gone(side) {
                    // Nobody reads it any more.
                    self.send(Packet { from: to, to: from, content: Content::Reset(id, side.other()) });
                } else {
                    self.sums.bytes += bytes.len() as u64;
                    self.arrive_at(id, side, wakers, |end| end.data(bytes));
                }
            }
            Content::Fin(id, side) => self.arrive_at(id, side, wakers, |end| end.fin()),
            Content::Reset(id, side) => self.arrive_at(id, side, wakers, |end| end.reset()),
            Content::Datagram(address, bytes) => {
                if let Some(inbox) = self.inboxes.get_mut(&address) {
                    wakers.extend(inbox.arrive(bytes));
                } else {
                    self.sums.datagrams_lost += 1;
                }
            }
        }
    }
}
