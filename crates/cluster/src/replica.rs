//! A replica of kas: its name, what it announces of itself, and how healthy it looks from here.

use std::{fmt, str::FromStr, sync::Arc};

use ids::ReplicaId;

/// A replica of kas.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Its name.
    pub id: ReplicaId,
    /// `host:port` of its private API, or of its API listener if there is only one replica.
    pub address: Arc<str>,
}

/// What a replica announces of itself. The arrows show which states can follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReplicaState {
    /// Before its first sync. → Ready, Draining
    Starting,
    /// Serving. → Hung, Draining
    Ready,
    /// Its gossip is alive, but its main runtime does not move. It is asked last. → Ready, Draining
    Hung,
    /// Still serving, about to leave. It is asked last. → Left
    Draining,
    /// It has left for good.
    Left,
}

impl ReplicaState {
    /// Returns the word that replicas send to each other and that the APIs show.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Hung => "hung",
            Self::Draining => "draining",
            Self::Left => "left",
        }
    }
}

impl fmt::Display for ReplicaState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is not a [`ReplicaState`]. A later version may have sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected starting, ready, hung, draining or left")]
pub struct UnknownState;

impl FromStr for ReplicaState {
    type Err = UnknownState;

    fn from_str(s: &str) -> Result<Self, UnknownState> {
        [Self::Starting, Self::Ready, Self::Hung, Self::Draining, Self::Left]
            .into_iter()
            .find(|state| state.as_str() == s)
            .ok_or(UnknownState)
    }
}

/// How healthy another replica looks from here, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReplicaHealth {
    /// Nothing indicates a problem.
    Live,
    /// It leaves soon. It is asked after the live ones.
    Draining,
    /// It may be gone. It is asked last, and no request waits for it.
    Suspect,
    /// Nothing listens at its address. It is not asked.
    Unreachable,
    /// It has left or is taken for dead. It is not asked.
    Gone,
}

impl ReplicaHealth {
    /// Whether requests for agents still go there.
    pub const fn is_asked(self) -> bool {
        matches!(self, Self::Live | Self::Draining | Self::Suspect)
    }

    /// Returns the word that the APIs and `kasctl` show.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Suspect => "suspect",
            Self::Unreachable => "unreachable",
            Self::Gone => "gone",
        }
    }
}

impl fmt::Display for ReplicaHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_never_change() {
        use ReplicaState::{Draining, Hung, Left, Ready, Starting};
        let words = [Starting, Ready, Hung, Draining, Left].map(ReplicaState::as_str);
        assert_eq!(words, ["starting", "ready", "hung", "draining", "left"]);
        for state in [Starting, Ready, Hung, Draining, Left] {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        assert_eq!("Ready".parse::<ReplicaState>(), Err(UnknownState));
        use ReplicaHealth::{Gone, Live, Suspect, Unreachable};
        let words = [Live, ReplicaHealth::Draining, Suspect, Unreachable, Gone].map(ReplicaHealth::as_str);
        assert_eq!(words, ["live", "draining", "suspect", "unreachable", "gone"]);
    }
}
