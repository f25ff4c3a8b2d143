//! What the fleet did: rows of views, and webhooks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Micros;

/// The rows of a view of one agent, as a client that looks has them.
///
/// It is taken when nothing has changed in the cluster for long enough, or while nobody can know what
/// changes there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    /// Who looks.
    pub viewer: String,
    /// The view.
    pub view: String,
    /// The agent.
    pub agent: i64,
    /// When it was taken.
    pub at: Micros,
    /// What the viewer was told of them: `live`, `stale` and so on.
    pub state: String,
    /// The cells of each row, by its resource, namespace and name.
    pub seen: BTreeMap<String, String>,
    /// Those that the API server printed. `None`: the agent could not ask it for so long that its rows must
    /// not be called live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<BTreeMap<String, String>>,
}

/// A webhook that was sent once. A sender that repeats it sends the same name again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// What the sender calls it. It is in the body, and in the header by which repetitions are known.
    pub name: String,
    /// The agent it is for.
    pub agent: i64,
    /// When it was sent.
    pub sent: Micros,
    /// The status of the answer. `None`: there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The id that kas gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// How many replicas had it, as the answer says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u32>,
}

impl Hook {
    /// Whether kas has accepted it.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        self.status == Some(202)
    }
}

/// A webhook that reached a receiver in the cluster of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivery {
    /// The name in its body.
    pub name: String,
    /// The agent of the cluster.
    pub agent: i64,
    /// When it came.
    pub at: Micros,
    /// `kas-hook-id`.
    pub id: String,
    /// `kas-hook-attempt`.
    pub attempt: u32,
    /// The status that the receiver answered. `None`: nobody waited for it any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
}

/// A webhook that kas still has, at the end of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The id that kas gave it.
    pub id: String,
    /// The agent it is for.
    pub agent: i64,
    /// Whether it is a dead letter. Else it waits.
    pub dead: bool,
    /// When kas was asked.
    pub at: Micros,
}
