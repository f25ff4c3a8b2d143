//! The values of the hashes, as written by this project and by GitLab agent 14.1, and the published events.
//!
//! Bytes from Redis come from other processes and may be anything. Values that cannot be decoded are skipped,
//! as in 14.1.

use std::{sync::Arc, time::Duration};

use cluster::{AgentMeta, Connection, Replica, ReplicaState};
use ids::{AgentId, ConnectionId, ReplicaId};
use prost::Message;
use prost_types::{Any, Timestamp};
use proto::{
    gitlab::agent::{
        agent_tracker::ConnectedAgentInfo,
        modshared,
        reverse_tunnel::{
            info::{AgentDescriptor, Method, Service},
            tracker::TunnelInfo,
        },
    },
    kas::internal::v1::{EntryOwner, SharedEntry},
};
use serde::{Deserialize, Serialize};

/// The `type.googleapis.com` names of 14.1.
const TUNNEL: &str = "type.googleapis.com/gitlab.agent.reverse_tunnel.tracker.TunnelInfo";
const CONNECTED: &str = "type.googleapis.com/gitlab.agent.agent_tracker.ConnectedAgentInfo";

/// The process that wrote an entry, and the version of the entry in the count of that process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) replica: ReplicaId,
    pub(crate) run: u64,
    pub(crate) version: u64,
}

/// A decoded entry.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry<T> {
    /// By the clock of its writer; `None` if it does not expire.
    pub(crate) expires_at: Option<Duration>,
    /// `None` for an entry of a replica of GitLab's kas.
    pub(crate) owner: Option<Owner>,
    pub(crate) value: T,
}

/// A holder of tunnels of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Its URL for requests in the protocol of 14.1; empty if it has none.
    pub(crate) url: String,
}

fn stamp(time: Duration) -> Timestamp {
    Timestamp {
        seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(time.subsec_nanos()).unwrap_or(0),
    }
}

/// Returns the time. Times before 1970 and malformed ones count as long expired.
fn time(stamp: &Timestamp) -> Duration {
    match (u64::try_from(stamp.seconds), u32::try_from(stamp.nanos)) {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => Duration::new(seconds, nanos),
        _ => Duration::ZERO,
    }
}

fn entry(expires_at: Duration, type_url: &str, value: Vec<u8>, owner: EntryOwner) -> Vec<u8> {
    let entry = SharedEntry {
        expires_at: Some(stamp(expires_at)),
        value: Some(Any { type_url: type_url.to_owned(), value }),
        owner: Some(owner),
    };
    encode(&entry)
}

/// Returns the bytes of a message for others.
pub(crate) fn encode(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    #[cfg(any(test, feature = "flaws"))]
    let bytes = crate::records::message(bytes);
    bytes
}

fn owner(owner: &Owner, agent_name: &str) -> EntryOwner {
    EntryOwner {
        replica: owner.replica.as_str().to_owned(),
        run: owner.run,
        version: owner.version,
        agent_name: agent_name.to_owned(),
    }
}

/// Returns the descriptor for paths of the form `/service/Method`.
fn descriptor(methods: &[Box<str>]) -> AgentDescriptor {
    let mut services: Vec<Service> = Vec::new();
    for path in methods {
        let Some((service, method)) = path.trim_start_matches('/').split_once('/') else { continue };
        let method = Method { name: method.to_owned() };
        match services.iter_mut().find(|known| known.name == service) {
            Some(known) => known.methods.push(method),
            None => services.push(Service { name: service.to_owned(), methods: vec![method] }),
        }
    }
    AgentDescriptor { services }
}

/// Returns the name of the one field that a replica has in the hash of an agent's tunnels. 14.1 uses
/// connection ids there. A replica that restarts under its old name replaces the entry.
pub(crate) fn route_field(agent: AgentId, replica: &ReplicaId) -> i64 {
    ConnectionId::of_instance(agent, replica.as_str().as_bytes()).get()
}

/// Returns the name of the field of a connection. An agentk process has the same connection id on all
/// replicas, so with the id alone a replica could remove the entry of another.
pub(crate) fn connection_field(agent: AgentId, connection: ConnectionId, replica: &ReplicaId) -> i64 {
    let mut instance = connection.get().to_be_bytes().to_vec();
    instance.extend_from_slice(replica.as_str().as_bytes());
    ConnectionId::of_instance(agent, &instance).get()
}

/// Encodes that this replica holds tunnels of the agent.
pub(crate) fn encode_route(
    agent: AgentId,
    methods: &[Box<str>],
    url: &str,
    by: &Owner,
    expires_at: Duration,
) -> Vec<u8> {
    let info = TunnelInfo {
        agent_descriptor: Some(descriptor(methods)),
        connection_id: route_field(agent, &by.replica),
        agent_id: agent.get(),
        kas_url: url.to_owned(),
    };
    entry(expires_at, TUNNEL, info.encode_to_vec(), owner(by, ""))
}

/// Encodes an open configuration stream.
pub(crate) fn encode_connection(connection: &Connection, by: &Owner, expires_at: Duration) -> Vec<u8> {
    let info = ConnectedAgentInfo {
        agent_meta: Some(modshared::AgentMeta {
            version: connection.meta.version.clone(),
            commit_id: connection.meta.commit.clone(),
            pod_namespace: connection.meta.pod_namespace.clone(),
            pod_name: connection.meta.pod_name.clone(),
        }),
        connected_at: Some(stamp(connection.connected_at)),
        connection_id: connection.id.get(),
        agent_id: connection.agent.get(),
        project_id: connection.project_id,
    };
    entry(expires_at, CONNECTED, info.encode_to_vec(), owner(by, &connection.name))
}

fn open(bytes: &[u8], type_url: &str) -> Option<(Entry<Vec<u8>>, String)> {
    let shared = SharedEntry::decode(bytes).ok()?;
    let any = shared.value.filter(|any| any.type_url == type_url)?;
    let mut name = String::new();
    let owner = shared.owner.map(|owner| {
        name = owner.agent_name;
        Owner { replica: ReplicaId::new(&owner.replica), run: owner.run, version: owner.version }
    });
    Some((Entry { expires_at: shared.expires_at.as_ref().map(time), owner, value: any.value }, name))
}

/// Decodes an entry of the hash of an agent's tunnels; `None` if it is something else.
pub(crate) fn decode_route(bytes: &[u8]) -> Option<Entry<Route>> {
    let (entry, _) = open(bytes, TUNNEL)?;
    let info = TunnelInfo::decode(&*entry.value).ok()?;
    Some(Entry { expires_at: entry.expires_at, owner: entry.owner, value: Route { url: info.kas_url } })
}

/// Decodes an entry of one of the hashes of connections; `None` if it is something else.
pub(crate) fn decode_connection(bytes: &[u8]) -> Option<Entry<Arc<Connection>>> {
    let (entry, name) = open(bytes, CONNECTED)?;
    let info = ConnectedAgentInfo::decode(&*entry.value).ok()?;
    let meta = info.agent_meta.unwrap_or_default();
    let connection = Connection {
        agent: AgentId::new(info.agent_id).ok()?,
        name: name.into(),
        project_id: info.project_id,
        id: ConnectionId::new(info.connection_id).ok()?,
        meta: AgentMeta {
            version: meta.version,
            commit: meta.commit_id,
            pod_namespace: meta.pod_namespace,
            pod_name: meta.pod_name,
        },
        connected_at: info.connected_at.as_ref().map(time).unwrap_or_default(),
    };
    Some(Entry { expires_at: entry.expires_at, owner: entry.owner, value: Arc::new(connection) })
}

/// The value of a replica's liveness key. Later versions may add fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Liveness {
    /// Drawn once per process; a later process has a higher one.
    pub(crate) run: u64,
    /// `host:port` of its private API.
    pub(crate) address: String,
    /// `starting`, `ready`, `draining` or `left`.
    pub(crate) state: String,
    #[serde(default)]
    pub(crate) version: String,
    #[serde(default)]
    pub(crate) commit: String,
    /// Agents whose tunnels it holds.
    #[serde(default)]
    pub(crate) agents: u64,
    /// It has recently seen entries of replicas of 14.1.
    #[serde(default)]
    pub(crate) gitlab: bool,
    /// Where callers reach it, as the text of [`cluster::Doors`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) doors: String,
}

impl Liveness {
    pub(crate) fn encode(&self) -> Vec<u8> {
        #[cfg(not(any(test, feature = "flaws")))]
        let written = serde_json::to_vec(self);
        #[cfg(any(test, feature = "flaws"))]
        let written = serde_json::to_value(self).map(crate::records::life);
        written.expect("texts and numbers are JSON")
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Returns the state. A word of a later version counts as ready.
    pub(crate) fn state(&self) -> ReplicaState {
        self.state.parse().unwrap_or(ReplicaState::Ready)
    }

    pub(crate) fn replica(&self, id: &ReplicaId) -> Replica {
        Replica { id: id.clone(), address: self.address.as_str().into() }
    }
}

/// Decodes `bytes` as each kind of value in Redis. The entry for fuzz targets.
///
/// # Panics
/// If a decoded value changes when it is encoded and decoded again.
#[cfg(any(test, feature = "fuzzing"))]
pub fn decode_all(bytes: &[u8]) {
    if let Some(Entry { expires_at: Some(at), owner: Some(owner), value }) = decode_route(bytes) {
        let agent = AgentId::new(1).expect("it is above zero");
        let again = decode_route(&encode_route(agent, &[], &value.url, &owner, at));
        let read = Entry { expires_at: Some(at), owner: Some(owner), value };
        assert_eq!(again, Some(read), "a route is decoded as it was encoded");
    }
    if let Some(Entry { expires_at: Some(at), owner: Some(owner), value }) = decode_connection(bytes) {
        let again = decode_connection(&encode_connection(&value, &owner, at));
        let read = Entry { expires_at: Some(at), owner: Some(owner), value };
        assert_eq!(again, Some(read), "a connection is decoded as it was encoded");
    }
    if let Some(life) = Liveness::decode(bytes) {
        assert_eq!(
            Liveness::decode(&life.encode()),
            Some(life),
            "a liveness value is decoded as it was encoded"
        );
    }
    let _ = proto::kas::internal::v1::SharedEvent::decode(bytes);
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::redistool::ExpiringValue;

    use super::*;

    fn agent() -> AgentId {
        AgentId::new(123).unwrap()
    }

    fn by() -> Owner {
        Owner { replica: ReplicaId::new("10.0.0.1:8155"), run: 7, version: 9 }
    }

    /// A value that a kas 14.1 has written.
    const OF_14_1: &str = "0a0c08a0c1fa87061080cab5ee0112a6010a42747970652e676f6f676c65617069732e636f6d2f6769746c61622e6167\
        656e742e726576657273655f74756e6e656c2e747261636b65722e54756e6e656c496e666f12600a400a3e0a2d6769746c61622e61676\
        56e742e6b756265726e657465735f6170692e7270632e4b756265726e65746573417069120d0a0b4d616b655265717565737410f997e1\
        f104187b2214677270633a2f2f31302e302e302e313a38313535";

    #[test]
    fn an_entry_of_14_1_is_decoded() {
        let entry = decode_route(&hex::decode(OF_14_1).unwrap()).unwrap();
        assert_eq!(entry.owner, None);
        assert_eq!(entry.expires_at, Some(Duration::new(1_627_300_000, 500_000_000)));
        assert_eq!(entry.value.url, "grpc://10.0.0.1:8155");
    }

    #[test]
    fn a_kas_14_1_can_decode_our_entries() {
        let methods = ["/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest".into()];
        let at = Duration::new(1_627_300_000, 500_000_000);
        let ours = encode_route(agent(), &methods, "grpc://10.0.0.1:8155", &by(), at);
        // Go's decoder skips the owner, as prost does here.
        let theirs = ExpiringValue::decode(&*ours).unwrap();
        let expected = ExpiringValue::decode(&*hex::decode(OF_14_1).unwrap()).unwrap();
        assert_eq!(theirs.expires_at, expected.expires_at);
        let (any, expected) = (theirs.value.unwrap(), expected.value.unwrap());
        assert_eq!(any.type_url, expected.type_url);
        let mut info = TunnelInfo::decode(&*any.value).unwrap();
        assert_eq!(info.connection_id, route_field(agent(), &by().replica));
        info.connection_id = 1_312_312_313;
        assert_eq!(info.encode_to_vec(), expected.value);
        // The bytes before the owner are exactly those of 14.1.
        let plain = ExpiringValue { expires_at: theirs.expires_at, value: Some(any) }.encode_to_vec();
        assert!(ours.starts_with(&plain));
    }

    #[test]
    fn connections_are_decoded_as_encoded() {
        let connection = Connection {
            agent: agent(),
            name: "name".into(),
            project_id: 10,
            id: ConnectionId::new(5).unwrap(),
            meta: AgentMeta {
                version: "v".into(),
                commit: "c".into(),
                pod_namespace: "n".into(),
                pod_name: "p".into(),
            },
            connected_at: Duration::new(5, 6),
        };
        let bytes = encode_connection(&connection, &by(), Duration::from_secs(9));
        let entry = decode_connection(&bytes).unwrap();
        assert_eq!(*entry.value, connection);
        assert_eq!((entry.owner, entry.expires_at), (Some(by()), Some(Duration::from_secs(9))));
        assert_eq!(decode_route(&bytes), None);
    }

    #[test]
    fn each_replica_has_its_own_field_for_a_connection() {
        let (a, b) = (ReplicaId::new("a"), ReplicaId::new("b"));
        let id = ConnectionId::new(5).unwrap();
        assert_ne!(connection_field(agent(), id, &a), connection_field(agent(), id, &b));
        assert_ne!(route_field(agent(), &a), route_field(agent(), &b));
        assert!(connection_field(agent(), id, &a) >= 0);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_decoded_or_skipped(bytes: Vec<u8>) {
            decode_all(&bytes);
        }
    }
}
