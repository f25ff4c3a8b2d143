//! Names of agents, connections, replicas and requests: newtypes without I/O.
//!
//! There are no secrets: a token is never an id. A [`TokenHash`] may be kept, compared and (shortened)
//! logged.

mod home;
mod impersonation;
mod selector;

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

pub use self::{
    home::home_rank,
    impersonation::{
        FILE_USER_PREFIX, Impersonation, InvalidIdentity, check_identity_name, check_identity_value,
    },
    selector::{InvalidPattern, InvalidSelector, Match, Pattern, Selector},
};

/// A configured identity in a configuration project, which callers name. Always positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct AgentId(i64);

/// A text or number that is not an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a whole number from 1 to 9223372036854775807")]
pub struct InvalidId;

impl AgentId {
    /// Returns the id, unless it is zero or negative.
    ///
    /// # Errors
    /// [`InvalidId`] for a number below 1.
    pub const fn new(id: i64) -> Result<Self, InvalidId> {
        if id > 0 { Ok(Self(id)) } else { Err(InvalidId) }
    }

    /// Returns the number on the wire.
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Debug for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "agent {}", self.0)
    }
}

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for AgentId {
    type Err = InvalidId;

    fn from_str(s: &str) -> Result<Self, InvalidId> {
        // `i64::from_str` accepts a leading plus, which no peer of this project writes.
        if !s.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(InvalidId);
        }
        Self::new(s.parse().map_err(|_| InvalidId)?)
    }
}

impl<'de> Deserialize<'de> for AgentId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Self::new(i64::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

/// One connection of one agentk process: 63 bits, never negative.
///
/// Agents of this project send an instance id. Every replica derives the same connection id from it, so that
/// lists can be merged by it and an agent cannot claim the connection of another one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(i64);

impl ConnectionId {
    /// Returns the id of `instance` of `agent`, which is the same on every replica: 63 bits of SHA-256 over
    /// the agent's id (8 bytes, big-endian) and the instance id.
    pub fn of_instance(agent: AgentId, instance: &[u8]) -> Self {
        let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
        context.update(&agent.0.to_be_bytes());
        context.update(instance);
        let mut first = [0; 8];
        first.copy_from_slice(&context.finish().as_ref()[..8]);
        Self(i64::from_be_bytes(first) & i64::MAX)
    }

    /// The smallest id, as a bound of ranges.
    pub const MIN: Self = Self(0);
    /// The largest id, as a bound of ranges.
    pub const MAX: Self = Self(i64::MAX);

    /// Returns a random id, for agents that send no instance id.
    pub fn random() -> Self {
        Self(rand::random::<i64>() & i64::MAX)
    }

    /// Returns the id, unless it is zero (which callers use for "any") or negative.
    ///
    /// # Errors
    /// [`InvalidId`] for a number below 1.
    pub const fn new(id: i64) -> Result<Self, InvalidId> {
        if id > 0 { Ok(Self(id)) } else { Err(InvalidId) }
    }

    /// Returns the number on the wire.
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "connection {}", self.0)
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for ConnectionId {
    type Err = InvalidId;

    fn from_str(s: &str) -> Result<Self, InvalidId> {
        AgentId::from_str(s).map(|id| Self(id.0))
    }
}

/// The name of a kas process: a pod's uid, or the host and port of its private API.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(std::sync::Arc<str>);

impl ReplicaId {
    /// Returns a name as given.
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// SHA-256 of an agent token, which the server keeps instead of the token.
///
/// A token has 256 random bits, so a plain hash cannot be reversed by guessing.
#[derive(Clone, Copy, PartialOrd, Ord)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Hashes a token without trimming it.
    pub fn of(token: &[u8]) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, token).as_ref());
        Self(hash)
    }

    /// Returns all 64 hexadecimal digits, as in an identity file.
    pub fn to_hex(&self) -> String {
        hex::encode(self.0)
    }
}

/// Takes constant time, so that a comparison does not reveal where two hashes differ.
impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}
impl Eq for TokenHash {}
impl std::hash::Hash for TokenHash {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

/// Shows 8 digits: enough to find the line of an identity file, but useless to an attacker.
impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}…", hex::encode(&self.0[..4]))
    }
}

/// A text that is not a token hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected the 64 hexadecimal digits of a SHA-256")]
pub struct InvalidTokenHash;

impl FromStr for TokenHash {
    type Err = InvalidTokenHash;

    fn from_str(s: &str) -> Result<Self, InvalidTokenHash> {
        let mut hash = [0; 32];
        hex::decode_to_slice(s.strip_prefix("sha256:").unwrap_or(s), &mut hash)
            .map_err(|_| InvalidTokenHash)?;
        Ok(Self(hash))
    }
}

/// A configured agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// Its id.
    pub id: AgentId,
    /// Its name: a DNS label, see [`is_agent_name`].
    pub name: Arc<str>,
    /// The id of its configuration project; always positive.
    pub project_id: i64,
}

/// Whether a text is a DNS label, or empty. The name of an agent is a part of paths of configuration files.
pub fn is_agent_name(name: &str) -> bool {
    /// As long as a DNS label, and as in GitLab.
    const LONGEST: usize = 63;
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= LONGEST && name.chars().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

/// The client that sends a request, as its token says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actor {
    /// The claim `iss`.
    pub issuer: String,
    /// The claim `sub`.
    pub subject: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_id_refuses_zero_negative_sign_and_overflow() {
        for bad in ["0", "-1", "+1", "", " 1", "1 ", "9223372036854775808", "0x1"] {
            assert_eq!(bad.parse::<AgentId>(), Err(InvalidId), "{bad:?}");
        }
        assert_eq!("9223372036854775807".parse::<AgentId>().unwrap().get(), i64::MAX);
    }

    #[test]
    fn connection_id_depends_on_agent_and_instance_and_is_never_negative() {
        let (one, two) = (AgentId::new(1).unwrap(), AgentId::new(2).unwrap());
        assert_eq!(ConnectionId::of_instance(one, b"i"), ConnectionId::of_instance(one, b"i"));
        assert_ne!(ConnectionId::of_instance(one, b"i"), ConnectionId::of_instance(two, b"i"));
        assert_ne!(ConnectionId::of_instance(one, b"i"), ConnectionId::of_instance(one, b"j"));
        for i in 0..1000u32 {
            assert!(ConnectionId::of_instance(one, &i.to_be_bytes()).get() >= 0);
            assert!(ConnectionId::random().get() >= 0);
        }
    }

    #[test]
    fn token_hash_round_trips_and_its_debug_is_short() {
        let hash = TokenHash::of(b"secret");
        assert_eq!(hash.to_hex().parse::<TokenHash>().unwrap(), hash);
        assert_eq!(format!("{hash:?}").len(), "sha256:".len() + 8 + "…".len());
        assert_eq!("zz".parse::<TokenHash>(), Err(InvalidTokenHash));
    }
}
