//! What an agentk supports beyond GitLab agent 14.1, and what a request needs of it.

use std::{
    fmt,
    ops::{BitOr, BitOrAssign},
};

/// A set of features.
///
/// Its text is what replicas send each other: the names, sorted and separated by commas.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Features(u8);

/// Sorted by name.
const NAMES: [(Features, &str); 3] = [
    (Features::IMPERSONATION, "impersonation"),
    (Features::TARGET, "target"),
    (Features::UPGRADE, "upgrade"),
];

impl Features {
    /// No feature.
    pub const NONE: Self = Self(0);
    /// `kubernetes_api.rpc.HeaderExtra`. An agentk without it would run a request that impersonates another
    /// user with its own rights.
    pub const IMPERSONATION: Self = Self(1);
    /// `HttpRequest.Header.target`. An agentk without it would ask for the path `/`.
    pub const TARGET: Self = Self(2);
    /// Upgraded connections: exec, attach and port-forward.
    pub const UPGRADE: Self = Self(4);

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// Returns how many features there are.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether all of `other` are in the set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the features of this set that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the set if `included`, else the empty one.
    #[must_use]
    pub fn when(self, included: bool) -> Self {
        if included { self } else { Self::NONE }
    }

    /// Returns the set as a number, for an atomic variable. [`Features::from_bits`] is the reverse.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Returns the set of a number. Bits that stand for no feature are ignored.
    pub fn from_bits(bits: u8) -> Self {
        Self(bits & NAMES.iter().fold(0, |all, (feature, _)| all | feature.0))
    }

    /// Reads the features that another replica needs; `None`: one of them is unknown, so that nothing is
    /// known to have it.
    pub fn needed(text: &[u8]) -> Option<Self> {
        let mut set = Self::NONE;
        for name in names(text) {
            set |= find(name)?;
        }
        Some(set)
    }

    /// Reads the features that another replica reports of an agentk. Unknown ones are ignored: no request of
    /// this replica needs them.
    pub fn met(text: &[u8]) -> Self {
        names(text).filter_map(find).fold(Self::NONE, BitOr::bitor)
    }
}

fn names(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|name| !name.is_empty())
}

fn find(name: &[u8]) -> Option<Features> {
    NAMES.iter().find(|(_, known)| known.as_bytes() == name).map(|(feature, _)| *feature)
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Features {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (feature, name) in NAMES {
            if self.contains(feature) {
                write!(f, "{separator}{name}")?;
                separator = ",";
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Features({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_survives_its_text_and_its_number() {
        for bits in 0..=u8::MAX {
            let set = Features::from_bits(bits);
            let text = set.to_string();
            assert_eq!((Features::needed(text.as_bytes()), Features::met(text.as_bytes())), (Some(set), set));
            assert_eq!(Features::from_bits(set.bits()), set);
        }
        let all = Features::UPGRADE | Features::TARGET | Features::IMPERSONATION;
        assert_eq!(all.to_string(), "impersonation,target,upgrade");
        assert_eq!(Features::NONE.to_string(), "");
    }

    #[test]
    fn unknown_features_are_met_by_nothing() {
        assert_eq!(Features::needed(b"target,teleport"), None);
        assert_eq!(Features::met(b"target, teleport"), Features::TARGET);
        assert_eq!(Features::needed(b" target , ,upgrade"), Some(Features::TARGET | Features::UPGRADE));
        assert_eq!(Features::needed(b"Target"), None, "names are case-sensitive");
    }

    #[test]
    fn needs_are_compared_as_sets() {
        let both = Features::TARGET | Features::UPGRADE;
        assert!(both.contains(Features::TARGET) && both.contains(Features::NONE) && both.contains(both));
        assert!(!Features::TARGET.contains(both) && !Features::NONE.contains(Features::TARGET));
        assert_eq!(both.without(Features::UPGRADE), Features::TARGET);
        assert_eq!((both.when(true), both.when(false)), (both, Features::NONE));
        assert!(Features::NONE.is_empty() && !both.is_empty());
    }
}
