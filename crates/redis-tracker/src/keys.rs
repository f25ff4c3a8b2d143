//! The names of keys: those of GitLab agent 14.1, and those of this project, which begin with `kas:` after
//! the prefix.
//!
//! Ids in the keys of 14.1 are 8 raw bytes, the least significant first, so keys are not text.

use ids::{AgentId, ReplicaId};

/// Makes keys with one prefix.
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

    /// A hash: the connections of the agents of a configuration project.
    pub(crate) fn project(&self, project: i64) -> Vec<u8> {
        self.numbered(":agent_tracker:conn_by_project_id:", project)
    }

    /// A hash: the connections of an agent.
    pub(crate) fn agent(&self, agent: AgentId) -> Vec<u8> {
        self.numbered(":agent_tracker:conn_by_agent_id:", agent.get())
    }

    /// A hash: the holders of tunnels of an agent. 14.1 has one entry per idle tunnel, this project one per
    /// replica.
    pub(crate) fn tunnels(&self, agent: AgentId) -> Vec<u8> {
        self.numbered(":tunnel_tracker:conn_by_agent_id:", agent.get())
    }

    /// A string with an expiry: the liveness of a replica, as JSON.
    pub(crate) fn liveness(&self, replica: &ReplicaId) -> Vec<u8> {
        self.named("replica", replica)
    }

    /// A set: the configuration projects of which a replica has connections.
    pub(crate) fn projects(&self, replica: &ReplicaId) -> Vec<u8> {
        self.named("projects", replica)
    }

    /// A number: a count within a window.
    pub(crate) fn count(&self, name: &str, what: &str, window: u64) -> Vec<u8> {
        format!("{}:kas:count:{name}:{window}:{what}", self.prefix).into_bytes()
    }

    /// A hash: the names of the replicas that are alive or were recently. It exists because there is no cheap
    /// way to list keys.
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
