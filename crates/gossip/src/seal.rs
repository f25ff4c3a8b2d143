//! The sealed datagram: key ring, frame, replay window, reassembly. It uses no sockets and no clock, so that
//! a fuzz target can call [`Opener::accept`] with any bytes.
//!
//! # Frame, version 1 (numbers are big-endian)
//!
//! ```text
//!  0  version     1
//!  1  kind        0 data, 1 hello
//!  2  cluster     4 B of SHA-256 of the cluster name
//!  6  key id      4 B derived from the key and the cluster
//! 10  salt       16 B random, per process
//! 26  echo        8 B the first bytes of the receiver's salt; zeros while it is unknown
//! 34  generation  u64, microseconds since 1970 when the incarnation started
//! 42  counter     u64, starts at 1, incremented with each datagram of the process
//! 50  index       u8, which part of the message
//! 51  count       u8, how many parts
//! 52  port        u16 of the sender
//! 54  address     16 B of the sender; IPv4 is written as mapped IPv6
//! 70  length      u8 of the node id
//! 71  node id     1 to 128 printable ASCII bytes
//! ..  ciphertext and a tag of 16 B: AES-256-GCM, nonce = counter, everything before it authenticated
//! ```
//!
//! The key of a frame is `HKDF-SHA256(ring key; "seal", cluster, salt, generation, node id)`. No two
//! incarnations share a key, so a counter is a safe nonce. Cluster, sender, generation and address are bound
//! twice, by the key and as associated data. Nothing is decoded or decompressed before the seal is verified.
//!
//! A message longer than a frame is sent in parts, so that no datagram exceeds [`MAX_DATAGRAM`]. It passes
//! networks that drop IP fragments, and every part is authenticated before it takes memory.
//!
//! # Recordings
//!
//! An attacker without the key can record datagrams and send them again, to any process, at any time:
//!
//! - To the same process again: the replay window of the sender has seen the counter (`replayed`).
//! - To another process, or to the same one after a restart: `echo` is not its salt (`unproven`). It answers
//!   with an empty, sealed, rate-limited hello to the *authenticated* address of the sender. So there is no
//!   amplification, and no reflection to a victim that the attacker chooses.
//! - Back to its sender: `from_self`.
//!
//! What remains possible: datagrams that were *held back* (their originals never arrived) can be delivered
//! late, once each and within 1,984 counters of the newest. A crashed sender can look alive as long as its
//! last datagrams suffice. An attacker who can do that can also drop every datagram. More than 4,096
//! authenticated senders during one run of the receiver evict the sender that was not heard for longest,
//! whose datagrams could then be replayed once more.
//!
//! The key is the whole trust boundary: a process that has it is a member and may claim anything, including
//! the id and the values of another node.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use aws_lc_rs::{
    aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey},
    digest, hkdf,
};
use tokio::time::Instant;

use crate::{
    counters::Reason,
    flaw::{Flaw, flawed},
};

/// The longest datagram, in bytes. The smallest IPv6 link (1,280 bytes) carries it in one piece. Larger
/// datagrams save headers, but are lost wherever IP fragments are dropped.
pub const MAX_DATAGRAM: usize = 1_232;
/// The longest message that chitchat can write, in bytes.
pub const MAX_MESSAGE: usize = 65_507;
/// The longest node id, in bytes.
pub const MAX_NODE_ID: usize = 128;
/// How many senders are remembered with their replay windows. A sender takes about 1 KiB, and only processes
/// with the key are remembered.
pub const MAX_SENDERS: usize = 4_096;
/// Messages that are reassembled at a time, of all senders: at most 64 × 64 KiB. If more arrive interleaved,
/// the oldest is dropped, and gossip repeats it in a later round.
const MAX_PARTIAL: usize = 64;
/// How long a message waits for its missing parts, which were sent together. Without it, messages with a lost
/// part would fill the 4 MiB above and stay there.
const PARTIAL_LIFE: Duration = Duration::from_secs(5);
/// The shortest secret, in bytes: the strength of AES-256.
pub const MIN_SECRET: usize = 32;

/// Why HKDF cannot fail here.
const HKDF_LIMIT: &str = "32 bytes are below the limit of HKDF";
const VERSION: u8 = 1;
const DATA: u8 = 0;
const HELLO: u8 = 1;
const HEADER: usize = 71;
const TAG: usize = 16;
/// Parts of a message: 65,507 B in parts of at least 1,017 B are 65 parts; the bitmap has room for 128.
const MAX_PARTS: u8 = 128;

/// The random name of a process.
pub type Salt = [u8; 16];
/// The part of a salt that its peers send back.
pub type Echo = [u8; 8];

/// Returns the echo that peers send to the process with this salt.
fn echo_of(salt: &Salt) -> Echo {
    let mut echo = [0; 8];
    echo.copy_from_slice(&salt[..8]);
    echo
}

/// Why the secrets make no key ring. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The list is empty.
    #[error("no secret was given")]
    Empty,
    /// A secret that is short enough to be guessed.
    #[error("secret {index} has {len} bytes, fewer than {MIN_SECRET}")]
    Short {
        /// Its position in the list, from 0.
        index: usize,
        /// Its length in bytes.
        len: usize,
    },
}

/// Keys that are derived from shared secrets. The first key seals, all keys open.
///
/// To rotate without losing a member: append the new secret to the list on every process, then move it to the
/// front on every process, then remove the old one.
#[derive(Clone)]
pub struct KeyRing(Vec<hkdf::Prk>);

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyRing({} keys)", self.0.len())
    }
}

impl KeyRing {
    /// Derives a key from each secret by HKDF-SHA256.
    ///
    /// # Errors
    /// [`KeyError`] if there is no secret, or one of fewer than 32 bytes.
    pub fn derive<S: AsRef<[u8]>>(secrets: &[S]) -> Result<Self, KeyError> {
        if secrets.is_empty() {
            return Err(KeyError::Empty);
        }
        // The salt separates these keys from other keys that are derived from the same secret.
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"gossip datagram seal v1");
        let mut keys = Vec::with_capacity(secrets.len());
        for (index, secret) in secrets.iter().map(AsRef::as_ref).enumerate() {
            if secret.len() < MIN_SECRET {
                return Err(KeyError::Short { index, len: secret.len() });
            }
            // Expanded once more, because otherwise the library keeps the secret and repeats the first half
            // of HKDF for each derived key.
            let mut key = [0; 32];
            salt.extract(secret)
                .expand(&[b"ring key"], hkdf::HKDF_SHA256)
                .and_then(|okm| okm.fill(&mut key))
                .expect(HKDF_LIMIT);
            keys.push(hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &key));
        }
        Ok(Self(keys))
    }
}

/// A key ring within one cluster.
struct Keys {
    cluster: Vec<u8>,
    tag: [u8; 4],
    keys: Vec<([u8; 4], hkdf::Prk)>,
}

impl Keys {
    fn new(ring: &KeyRing, cluster: &str) -> Self {
        // With its length in front, so that no two (cluster, rest) pairs have the same bytes.
        let mut prefixed = (cluster.len() as u64).to_be_bytes().to_vec();
        prefixed.extend_from_slice(cluster.as_bytes());
        let mut tag = [0; 4];
        tag.copy_from_slice(&digest::digest(&digest::SHA256, &prefixed).as_ref()[..4]);
        let keys = ring.0.iter().map(|key| (key_id(key, &prefixed), key.clone())).collect();
        Self { cluster: prefixed, tag, keys }
    }

    /// Returns the key of one incarnation.
    fn subkey(&self, key: &hkdf::Prk, header: &Header<'_>) -> LessSafeKey {
        let generation = header.generation.to_be_bytes();
        let info: [&[u8]; 5] = [b"seal", &self.cluster, &header.salt, &generation, header.node_id.as_bytes()];
        let okm = key.expand(&info, &AES_256_GCM).expect(HKDF_LIMIT);
        LessSafeKey::new(UnboundKey::from(okm))
    }
}

fn key_id(key: &hkdf::Prk, cluster: &[u8]) -> [u8; 4] {
    let info: [&[u8]; 2] = [b"key id", cluster];
    let mut whole = [0; 32];
    key.expand(&info, hkdf::HKDF_SHA256).and_then(|okm| okm.fill(&mut whole)).expect(HKDF_LIMIT);
    let mut id = [0; 4];
    id.copy_from_slice(&whole[..4]);
    id
}

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// What precedes the ciphertext. It is not trusted before the seal is verified.
#[derive(Debug, Clone, Copy)]
struct Header<'a> {
    kind: u8,
    cluster: [u8; 4],
    key_id: [u8; 4],
    salt: Salt,
    echo: Echo,
    generation: u64,
    counter: u64,
    index: u8,
    count: u8,
    address: SocketAddr,
    node_id: &'a str,
}

impl<'a> Header<'a> {
    fn write(&self, out: &mut Vec<u8>) {
        let ip = match self.address.ip() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            std::net::IpAddr::V6(v6) => v6,
        };
        out.extend_from_slice(&[VERSION, self.kind]);
        out.extend_from_slice(&self.cluster);
        out.extend_from_slice(&self.key_id);
        out.extend_from_slice(&self.salt);
        out.extend_from_slice(&self.echo);
        out.extend_from_slice(&self.generation.to_be_bytes());
        out.extend_from_slice(&self.counter.to_be_bytes());
        out.extend_from_slice(&[self.index, self.count]);
        out.extend_from_slice(&self.address.port().to_be_bytes());
        out.extend_from_slice(&ip.octets());
        out.push(self.node_id.len() as u8);
        out.extend_from_slice(self.node_id.as_bytes());
    }

    /// Returns where the ciphertext begins.
    fn end(datagram: &[u8]) -> Result<usize, Reason> {
        // The version first: the rest of another version may be shorter or longer.
        match datagram.first() {
            None => return Err(Reason::Truncated),
            Some(&VERSION) => {}
            Some(_) => return Err(Reason::Foreign),
        }
        let len = datagram.get(HEADER - 1).map(|len| usize::from(*len)).ok_or(Reason::Truncated)?;
        if datagram.len() < HEADER + len + TAG { Err(Reason::Truncated) } else { Ok(HEADER + len) }
    }

    /// Reads what stands before [`Self::end`].
    fn read(head: &'a [u8]) -> Result<Self, Reason> {
        let (fixed, node_id) = head.split_at_checked(HEADER).ok_or(Reason::Truncated)?;
        let node_id = std::str::from_utf8(node_id).ok().filter(|id| valid_node_id(id));
        let header = Self {
            kind: fixed[1],
            cluster: array(fixed, 2),
            key_id: array(fixed, 6),
            salt: array(fixed, 10),
            echo: array(fixed, 26),
            generation: u64::from_be_bytes(array(fixed, 34)),
            counter: u64::from_be_bytes(array(fixed, 42)),
            index: fixed[50],
            count: fixed[51],
            address: SocketAddr::new(
                Ipv6Addr::from(array::<16>(fixed, 54)).to_canonical(),
                u16::from_be_bytes(array(fixed, 52)),
            ),
            node_id: node_id.ok_or(Reason::Truncated)?,
        };
        let sound = header.kind <= HELLO
            && header.index < header.count
            && header.count <= MAX_PARTS
            && header.counter > u64::from(header.index)
            && header.address.port() != 0;
        if sound { Ok(header) } else { Err(Reason::Truncated) }
    }
}

/// Copies `N` bytes; `bytes` is the fixed part of a header, whose length was checked.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// Whether this may name a node: 1 to 128 printable ASCII bytes without spaces.
pub(crate) fn valid_node_id(id: &str) -> bool {
    (1..=MAX_NODE_ID).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
}

/// The replay window of one sender (RFC 6479): 1,984 counters up to the newest, in a ring of 2,048 bits.
#[derive(Debug, Clone)]
struct Window {
    newest: u64,
    bits: [u64; Self::WORDS as usize],
}

impl Window {
    const WORDS: u64 = 32;
    /// One word less than the ring, because the word of the newest counter is cleared as a whole.
    const REACH: u64 = (Self::WORDS - 1) * 64;

    const fn new() -> Self {
        Self { newest: 0, bits: [0; Self::WORDS as usize] }
    }

    fn place(counter: u64) -> (usize, u64) {
        ((counter / 64 % Self::WORDS) as usize, 1 << (counter % 64))
    }

    fn is_fresh(&self, counter: u64) -> bool {
        if counter > self.newest {
            return true;
        }
        let (word, bit) = Self::place(counter);
        self.newest - counter < Self::REACH && self.bits[word] & bit == 0
    }

    fn mark(&mut self, counter: u64) {
        if counter > self.newest {
            let skipped = (counter / 64 - self.newest / 64).min(Self::WORDS);
            for word in 0..skipped {
                self.bits[((counter / 64 - word) % Self::WORDS) as usize] = 0;
            }
            self.newest = counter;
        }
        let (word, bit) = Self::place(counter);
        self.bits[word] |= bit;
    }
}

/// How a process identifies itself to its peers.
#[derive(Debug, Clone)]
pub struct Identity {
    /// 1 to 128 printable ASCII bytes.
    pub node_id: Arc<str>,
    /// Microseconds since 1970 when the incarnation started.
    pub generation: u64,
    /// The address at which peers reach it.
    pub address: SocketAddr,
    /// Random, once per process.
    pub salt: Salt,
}

/// Seals the messages of one process.
pub struct Sealer {
    identity: Identity,
    keys: Keys,
    key: LessSafeKey,
    /// Counter of the newest datagram. It continues after a change of key or generation, so that replay
    /// windows stay valid.
    counter: u64,
}

impl Sealer {
    /// Returns a sealer. Two sealers with the same identity, including the salt, must never exist.
    pub fn new(ring: &KeyRing, cluster: &str, identity: Identity) -> Self {
        let keys = Keys::new(ring, cluster);
        let key = Self::own_key(&keys, &identity);
        Self { identity, keys, key, counter: 0 }
    }

    fn own_key(keys: &Keys, identity: &Identity) -> LessSafeKey {
        keys.subkey(&keys.keys[0].1, &Self::header(keys, identity))
    }

    fn header<'a>(keys: &Keys, identity: &'a Identity) -> Header<'a> {
        Header {
            kind: DATA,
            cluster: keys.tag,
            key_id: keys.keys[0].0,
            salt: identity.salt,
            echo: Echo::default(),
            generation: identity.generation,
            counter: 0,
            index: 0,
            count: 1,
            address: identity.address,
            node_id: &identity.node_id,
        }
    }

    /// Seals with the first key of `ring` from now on.
    pub fn rekey(&mut self, ring: &KeyRing, cluster: &str) {
        self.keys = Keys::new(ring, cluster);
        self.key = Self::own_key(&self.keys, &self.identity);
    }

    /// Seals for the incarnation with this generation from now on.
    pub fn restart(&mut self, generation: u64) {
        self.identity.generation = generation;
        self.key = Self::own_key(&self.keys, &self.identity);
    }

    /// Seals one message into one or more datagrams for the peer with this echo (zeros if it is not known
    /// yet). Returns none if the message is longer than [`MAX_MESSAGE`].
    pub fn seal(&mut self, message: &[u8], echo: Echo) -> Vec<Vec<u8>> {
        let room = MAX_DATAGRAM - HEADER - self.identity.node_id.len() - TAG;
        let count = message.len().div_ceil(room).max(1);
        let most = if flawed(Flaw::SmallMessages) { 8 } else { MAX_PARTS };
        if message.len() > MAX_MESSAGE || count > usize::from(most) {
            return Vec::new();
        }
        let parts = (0..count).map(|index| {
            let start = index * room;
            let part = &message[start..message.len().min(start + room)];
            self.frame(DATA, part, echo, index as u8, count as u8)
        });
        parts.collect()
    }

    /// Seals an empty frame that sends our salt to the peer with this echo.
    pub fn hello(&mut self, echo: Echo) -> Vec<u8> {
        self.frame(HELLO, &[], echo, 0, 1)
    }

    fn frame(&mut self, kind: u8, part: &[u8], echo: Echo, index: u8, count: u8) -> Vec<u8> {
        self.counter += 1;
        let mut out = Vec::with_capacity(HEADER + self.identity.node_id.len() + part.len() + TAG);
        let header = Self::header(&self.keys, &self.identity);
        Header { kind, echo, counter: self.counter, index, count, ..header }.write(&mut out);
        let body = out.len();
        out.extend_from_slice(part);
        let (aad, plain) = out.split_at_mut(body);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce(self.counter), Aad::from(&*aad), plain)
            .expect("a part is far below the limit of AES-GCM");
        out.extend_from_slice(tag.as_ref());
        out
    }
}

/// The content of an accepted datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accepted {
    /// A whole message.
    Message {
        /// The address of its sender, which is authenticated, unlike the source address of the datagram.
        from: SocketAddr,
        /// The message.
        bytes: Vec<u8>,
    },
    /// A part of a message of which other parts are missing.
    Part,
    /// A peer has sent its salt: datagrams that are sent to it from now on are proven.
    Hello {
        /// The address of the peer.
        from: SocketAddr,
    },
}

/// Why a datagram was not accepted. Nothing of it is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// The reason, for the counters.
    pub reason: Reason,
    /// The process that should be sent a hello, and its echo; only for [`Reason::Unproven`].
    pub greet: Option<(SocketAddr, Echo)>,
}

impl From<Reason> for Refused {
    fn from(reason: Reason) -> Self {
        Self { reason, greet: None }
    }
}

struct Sender {
    node_id: Arc<str>,
    generation: u64,
    address: SocketAddr,
    key_id: [u8; 4],
    key: LessSafeKey,
    window: Window,
    heard: Instant,
}

impl Sender {
    /// Whether the key of this sender is the key of this header.
    fn is(&self, header: &Header<'_>) -> bool {
        self.generation == header.generation
            && self.key_id == header.key_id
            && *self.node_id == *header.node_id
    }
}

struct Partial {
    salt: Salt,
    /// The counter of part 0.
    base: u64,
    begun: Instant,
    parts: Vec<Vec<u8>>,
    missing: u128,
}

/// Opens the datagrams that one process receives. It remembers a bounded number of senders, and only those
/// that have the key.
pub struct Opener {
    keys: Keys,
    salt: Salt,
    /// Later generations are refused.
    newest_generation: u64,
    senders: HashMap<Salt, Sender>,
    by_address: HashMap<SocketAddr, Salt>,
    partial: VecDeque<Partial>,
}

impl Opener {
    /// Returns an opener for the process with this salt.
    pub fn new(ring: &KeyRing, cluster: &str, salt: Salt) -> Self {
        Self {
            keys: Keys::new(ring, cluster),
            salt,
            newest_generation: u64::MAX,
            senders: HashMap::new(),
            by_address: HashMap::new(),
            partial: VecDeque::new(),
        }
    }

    /// Opens only with the keys of `ring` from now on.
    pub fn rekey(&mut self, ring: &KeyRing, cluster: &str) {
        self.keys = Keys::new(ring, cluster);
    }

    /// Refuses generations after `newest` (microseconds since 1970) from now on.
    pub fn limit_generation(&mut self, newest: u64) {
        self.newest_generation = newest;
    }

    /// Returns the echo that the peer at this address expects; zeros if it was not heard yet.
    pub fn echo(&self, address: SocketAddr) -> Echo {
        self.by_address.get(&address).map(echo_of).unwrap_or_default()
    }

    /// Returns how many senders are remembered.
    pub fn senders(&self) -> usize {
        self.senders.len()
    }

    /// Opens one datagram in place. `now` is only used to forget, and to order evictions.
    ///
    /// # Errors
    /// [`Refused`], with the reason to count. Cheap checks come first. A datagram from a sender without the
    /// key costs at most one key derivation and one pass over at most 1,232 bytes.
    pub fn accept(&mut self, datagram: &mut [u8], now: Instant) -> Result<Accepted, Refused> {
        if datagram.len() > MAX_DATAGRAM {
            return Err(Reason::Oversize.into());
        }
        let (head, body) = datagram.split_at_mut(Header::end(datagram)?);
        let head = &*head;
        // These checks need no key.
        let cluster: [u8; 4] = array(head, 2);
        if cluster != self.keys.tag {
            return Err(Reason::Foreign.into());
        }
        let header = Header::read(head)?;
        let ring_key = self.keys.keys.iter().find(|(id, _)| *id == header.key_id);
        let ring_key = &ring_key.ok_or(Reason::UnknownKey)?.1;
        if header.salt == self.salt {
            return Err(Reason::FromSelf.into());
        }
        if header.generation > self.newest_generation {
            return Err(Reason::Future.into());
        }
        let sender = self.senders.get(&header.salt);
        if let Some(sender) = sender {
            if header.generation < sender.generation {
                return Err(Reason::Stale.into());
            }
            // Checked before the seal, so that a flood of replays costs no decryption.
            if !sender.window.is_fresh(header.counter) {
                return Err(Reason::Replayed.into());
            }
        }
        let known = sender.filter(|s| s.is(&header));
        let derived = if known.is_none() { Some(self.keys.subkey(ring_key, &header)) } else { None };
        let Some(key) = derived.as_ref().or(known.map(|s| &s.key)) else {
            return Err(Reason::UnknownKey.into());
        };
        let plain =
            key.open_in_place(nonce(header.counter), Aad::from(head), body).map_err(|_| Reason::Forged)?;
        if header.echo != echo_of(&self.salt) {
            let greet = (header.kind == DATA).then(|| (header.address, echo_of(&header.salt)));
            return Err(Refused { reason: Reason::Unproven, greet });
        }
        self.remember(&header, derived, now);
        if header.kind == HELLO {
            return Ok(Accepted::Hello { from: header.address });
        }
        Ok(match self.assemble(&header, plain, now) {
            Some(bytes) => Accepted::Message { from: header.address, bytes },
            None => Accepted::Part,
        })
    }

    /// Notes an authenticated and proven datagram of its sender. `key` is given if the sender is not known,
    /// or not with this key, generation and node id.
    fn remember(&mut self, header: &Header<'_>, key: Option<LessSafeKey>, now: Instant) {
        if let Some(key) = key {
            let known = self.senders.remove(&header.salt);
            if known.is_none() && self.senders.len() >= MAX_SENDERS {
                self.evict();
            }
            // The counter continues when a process changes its key or generation, and so does its replay
            // window.
            let (window, address) = known.map_or((Window::new(), header.address), |s| (s.window, s.address));
            let sender = Sender {
                node_id: header.node_id.into(),
                generation: header.generation,
                address,
                key_id: header.key_id,
                key,
                window,
                heard: now,
            };
            self.senders.insert(header.salt, sender);
        }
        let Some(sender) = self.senders.get_mut(&header.salt) else { return };
        sender.heard = now;
        sender.window.mark(header.counter);
        let before = std::mem::replace(&mut sender.address, header.address);
        if before != header.address && self.by_address.get(&before) == Some(&header.salt) {
            self.by_address.remove(&before);
        }
        // The process that was heard there last: after a restart, the new one.
        self.by_address.insert(header.address, header.salt);
    }

    fn evict(&mut self) {
        let Some(oldest) = self.senders.iter().min_by_key(|(_, s)| s.heard).map(|(salt, _)| *salt) else {
            return;
        };
        if let Some(sender) = self.senders.remove(&oldest)
            && self.by_address.get(&sender.address) == Some(&oldest)
        {
            self.by_address.remove(&sender.address);
        }
    }

    /// Returns the message once all its parts have arrived.
    fn assemble(&mut self, header: &Header<'_>, part: &[u8], now: Instant) -> Option<Vec<u8>> {
        while self.partial.front().is_some_and(|oldest| now >= oldest.begun + PARTIAL_LIFE) {
            self.partial.pop_front();
        }
        if header.count == 1 {
            return Some(part.to_vec());
        }
        let base = header.counter - u64::from(header.index);
        let count = usize::from(header.count);
        let known = |p: &Partial| p.salt == header.salt && p.base == base && p.parts.len() == count;
        let at = self.partial.iter().position(known).unwrap_or_else(|| {
            if self.partial.len() >= MAX_PARTIAL {
                self.partial.pop_front();
            }
            let missing = u128::MAX >> (128 - count);
            self.partial.push_back(Partial {
                salt: header.salt,
                base,
                begun: now,
                parts: vec![Vec::new(); count],
                missing,
            });
            self.partial.len() - 1
        });
        let partial = &mut self.partial[at];
        partial.parts[usize::from(header.index)] = part.to_vec();
        partial.missing &= !(1 << header.index);
        if partial.missing != 0 {
            return None;
        }
        let bytes = self.partial.remove(at)?.parts.concat();
        // A longer message cannot come from chitchat, and would not pass the loopback socket.
        (bytes.len() <= MAX_MESSAGE).then_some(bytes)
    }
}

#[cfg(test)]
mod tests;
