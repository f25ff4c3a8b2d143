//! The agent that a request is for.

use std::sync::Arc;

use ids::AgentId;

/// What kas knows of an agent when a request for it arrives. An agent that is not connected may have no name
/// and no project here; rules that name one do not match then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownAgent {
    /// Its id.
    pub id: AgentId,
    /// Its name, if known.
    pub name: Option<Arc<str>>,
    /// Its configuration project, if known.
    pub project_id: Option<i64>,
}
