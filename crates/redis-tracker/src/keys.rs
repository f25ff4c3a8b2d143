//! The names of keys: those of GitLab agent 14.1, and those of this project, which begin with `kas:` after
//! the prefix.
//!
//! Ids in the keys of 14.1 are 8 raw bytes, the least significant first, so keys are not text.

use ids::{AgentId, ReplicaId};

/// The middle of [`Keys::project`].
const PROJECT: &str = ":agent_tracker:conn_by_project_id:";

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
        self.numbered(PROJECT, project)
    }

    /// A pattern of Redis that matches each [`project`](Self::project).
    pub(crate) fn project_pattern(&self) -> Vec<u8> {
        let mut pattern = Vec::new();
        for byte in self.prefix.bytes().chain(PROJECT.bytes()) {
            if matches!(byte, b'*' | b'?' | b'[' | b'\\') {
                pattern.push(b'\\');
            }
            pattern.push(byte);
        }
        // Each matches one byte of the id.
        pattern.extend([b'?'; size_of::<i64>()]);
        pattern
    }

    /// Returns the project of a key; `None` if it is another key.
    pub(crate) fn project_id(&self, key: &[u8]) -> Option<i64> {
        let id = key.strip_prefix(self.prefix.as_bytes())?.strip_prefix(PROJECT.as_bytes())?;
        Some(i64::from_le_bytes(id.try_into().ok()?))
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

    #[test]
    fn projects_are_read_from_their_keys() {
        let keys = Keys::new("a*b");
        assert_eq!(keys.project_pattern(), b"a\\*b:agent_tracker:conn_by_project_id:????????");
        for project in [1, 0x0102, i64::MAX, i64::MIN] {
            assert_eq!(keys.project_id(&keys.project(project)), Some(project));
        }
        let agent = keys.agent(AgentId::new(1).unwrap());
        let long = [keys.project(1), vec![0]].concat();
        for other in [agent, long, Keys::new("c").project(1), Vec::new()] {
            assert_eq!(keys.project_id(&other), None);
        }
    }
}
