//! The names of keys: those of GitLab agent 14.1, and beside them, below `kas:`, those of this project.
//!
//! Ids in 14.1's keys are 8 raw bytes, the least significant first, so keys are no text.

use ids::{AgentId, ReplicaId};

/// Makes keys below one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: Box<str>,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into() }
    }

    fn numbered(&self, middle: &str, id: i64) -> Vec<u8> {
        let mut key = Vec::with_capacity(self.prefix.len() + middle.len() + 8);
        key.extend_from_slice(self.prefix.as_bytes());
        key.extend_from_slice(middle.as_bytes());
        key.extend_from_slice(&id.to_le_bytes());
        key
    }

    fn named(&self, middle: &str, replica: &ReplicaId) -> Vec<u8> {
        format!("{}:kas:{middle}:{replica}", self.prefix).into_bytes()
    }

    /// Connections of the agents of a configuration project, a hash.
    pub(crate) fn project(&self, project: i64) -> Vec<u8> {
        self.numbered(":agent_tracker:conn_by_project_id:", project)
    }

    /// Connections of an agent, a hash.
    pub(crate) fn agent(&self, agent: AgentId) -> Vec<u8> {
        self.numbered(":agent_tracker:conn_by_agent_id:", agent.get())
    }

    /// Who holds tunnels of an agent, a hash: an entry per idle tunnel of 14.1, one per replica of ours.
    pub(crate) fn tunnels(&self, agent: AgentId) -> Vec<u8> {
        self.numbered(":tunnel_tracker:conn_by_agent_id:", agent.get())
    }

    /// A replica lives: JSON, with an expiry.
    pub(crate) fn life(&self, replica: &ReplicaId) -> Vec<u8> {
        self.named("replica", replica)
    }

    /// The configuration projects of which a replica has connections, a set.
    pub(crate) fn projects(&self, replica: &ReplicaId) -> Vec<u8> {
        self.named("projects", replica)
    }

    /// How often something was counted in a window, a number.
    pub(crate) fn count(&self, name: &str, what: &str, window: u64) -> Vec<u8> {
        format!("{}:kas:count:{name}:{window}:{what}", self.prefix).into_bytes()
    }

    /// The names of replicas that live or lived shortly before, a hash: there is no cheap way to list keys.
    pub(crate) fn replicas(&self) -> Vec<u8> {
        format!("{}:kas:replicas", self.prefix).into_bytes()
    }

    /// The channel of [`SharedEvent`](proto::kas::internal::v1::SharedEvent).
    pub(crate) fn events(&self) -> Vec<u8> {
        format!("{}:kas:events", self.prefix).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_14_1() {
        let keys = Keys::new("gitlab-kas");
        let hex = "6769746c61622d6b61733a74756e6e656c5f747261636b65723a636f6e6e5f62795f6167656e745f69643a7b00000000000000";
        assert_eq!(hex::encode(keys.tunnels(AgentId::new(123).unwrap())), hex);
        assert_eq!(keys.project(0x0102), b"gitlab-kas:agent_tracker:conn_by_project_id:\x02\x01\0\0\0\0\0\0");
        assert_eq!(
            Keys::new("p").agent(AgentId::new(1).unwrap()),
            b"p:agent_tracker:conn_by_agent_id:\x01\0\0\0\0\0\0\0"
        );
    }
}
