//! The rank of a replica for an agent, by which replicas agree on a home without asking each other.

use aws_lc_rs::digest;

use crate::{AgentId, ReplicaId};

/// Returns the rank of a replica for an agent: the SHA-256 of the agent's number, as 8 bytes in big-endian
/// order, and the replica's name. Of some replicas, the one with the highest rank is the home of the agent.
pub fn home_rank(agent: AgentId, replica: &ReplicaId) -> [u8; 32] {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(&agent.get().to_be_bytes());
    context.update(replica.as_str().as_bytes());
    let mut rank = [0; 32];
    rank.copy_from_slice(context.finish().as_ref());
    rank
}
