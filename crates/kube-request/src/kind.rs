//! How long a request may last.

use crate::{RequestInfo, Upgrade};

/// The kind of a request: how long it may last, and how it may be ended. A request is of the first kind that
/// fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The connection changes to another protocol. It may last for hours, and it cannot be repeated.
    Upgrade,
    /// A pod, service or node answers, by the subresource `proxy`. Nothing is known about the answer.
    Proxy,
    /// A stream of changes. It may end after any event: the client continues from the last one.
    Watch,
    /// The log of a pod, with `follow`. It may be silent for hours, and its end means that the pod ended.
    Follow,
    /// Everything else. The API server answers within 60 seconds.
    Short,
}

impl Kind {
    /// Every kind, in the order in which they are tried.
    pub const ALL: [Self; 5] = [Self::Upgrade, Self::Proxy, Self::Watch, Self::Follow, Self::Short];

    /// Returns the kind of a request.
    pub fn of(info: &RequestInfo, upgrade: Option<Upgrade>) -> Self {
        if upgrade.is_some() {
            Self::Upgrade
        } else if info.is_proxy() {
            Self::Proxy
        } else if info.is_resource() && info.verb() == "watch" {
            Self::Watch
        } else if info.follows_log() {
            Self::Follow
        } else {
            Self::Short
        }
    }

    /// The name, for metrics and the audit log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Upgrade => "upgrade",
            Self::Proxy => "proxy",
            Self::Watch => "watch",
            Self::Follow => "follow",
            Self::Short => "short",
        }
    }
}
