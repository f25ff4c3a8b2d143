//! Connections of agents as the API tells them.

use cluster::{Connected, Query, Tracker, TrackerError, Unanswered};
use proto::kas::api::v1::{KasAddress, UnansweredReplica};

use crate::registrar;

/// Lists connections, each process once.
pub(crate) async fn connected(tracker: &dyn Tracker, query: Query) -> Result<Connected, TrackerError> {
    let mut connected = tracker.connected(query).await?;
    registrar::leave_out_stand_ins(&mut connected.connections);
    Ok(connected)
}

/// Returns the address of a replica.
pub(crate) fn address(text: &str) -> KasAddress {
    match text.parse::<std::net::SocketAddr>() {
        Ok(address) => KasAddress { ip: address.ip().to_string(), port: address.port().into() },
        Err(_) => KasAddress { ip: text.to_owned(), port: 0 },
    }
}

/// Returns a replica that did not answer.
pub(crate) fn unanswered_replica(missing: &Unanswered) -> UnansweredReplica {
    UnansweredReplica { address: Some(address(&missing.replica.address)), reason: missing.reason.clone() }
}
