//! Messages of other versions as bytes: those of earlier versions are decoded, those of later versions are
//! harmless.

use prost::Message;
use proto::kas::internal::v1::{
    Belief, Connection, ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    WatchRequest, WatchResponse, connections_request, watch_response,
};
use table::{Epoch, Summary, Version};

use super::stream::{from_proto, is_later};

const EPOCH: u64 = 1_795_302_841_958_032;

/// Returns the bytes of a message as an earlier version wrote them; see `golden/`.
fn golden(name: &str) -> Vec<u8> {
    let files =
        [include_str!("../../../golden/internal-v1.txt"), include_str!("../../../golden/internal-v2.txt")];
    let lines = files.into_iter().flat_map(str::lines);
    let mut found = lines.filter_map(|line| line.split_once(' ')).filter(|(found, _)| *found == name);
    let (_, hex) = found.next().unwrap_or_else(|| panic!("{name} is there"));
    hex.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[track_caller]
fn is_read_and_written<M: Message + Default + PartialEq + std::fmt::Debug>(name: &str, message: M) {
    let bytes = golden(name);
    assert_eq!(M::decode(&*bytes).unwrap(), message, "{name}");
    assert_eq!(message.encode_to_vec(), bytes, "{name}");
}

fn hello(version: u64, resumed: bool) -> watch_response::Hello {
    watch_response::Hello {
        replica: "10.0.0.7:8155".into(),
        epoch: EPOCH,
        state: "ready".into(),
        address: "10.0.0.7:8155".into(),
        version,
        resumed,
    }
}

fn watch(message: watch_response::Message) -> WatchResponse {
    WatchResponse { message: Some(message) }
}

#[test]
fn messages_of_earlier_versions_are_decoded_and_encoded_in_the_same_way() {
    let replica = "10.0.0.8:8155".to_owned();
    is_read_and_written(
        "watch-request",
        WatchRequest { replica: replica.clone(), epoch: EPOCH, version: 70_001, cluster: String::new() },
    );
    is_read_and_written("watch-request-new", WatchRequest { replica, ..WatchRequest::default() });
    is_read_and_written(
        "watch-request-cluster",
        WatchRequest {
            replica: "10.0.0.8:8155".to_owned(),
            cluster: "kas".to_owned(),
            ..WatchRequest::default()
        },
    );
    is_read_and_written("watch-hello", watch(watch_response::Message::Hello(hello(70_001, true))));
    let header =
        table::ChunkHeader { epoch: Epoch(EPOCH), to: Version(70_004), chunk: 3, last: true, count: 4 };
    let ids = [1, 3, 300, i64::MAX].map(|id| ids::AgentId::new(id).unwrap());
    let mut packed = Vec::new();
    table::codec::encode_ids(&ids, &mut packed);
    let snapshot = watch_response::Snapshot { header: header.encode().into(), ids: packed.into() };
    is_read_and_written("watch-snapshot", watch(watch_response::Message::Snapshot(snapshot)));
    let ops = [table::Op::Add(ids[0]), table::Op::Remove(ids[2]), table::Op::Add(ids[3])];
    let mut packed = Vec::new();
    table::codec::encode_ops(&ops, &mut packed);
    let delta = watch_response::Delta { from: 70_000, to: 70_003, ops: packed.into() };
    is_read_and_written("watch-delta", watch(watch_response::Message::Delta(delta)));
    let digest = table::codec::digest(ids);
    let beat = watch_response::Beat { hello: Some(hello(70_004, false)), count: 4, digest };
    is_read_and_written("watch-beat", watch(watch_response::Message::Beat(beat)));
    is_read_and_written(
        "watch-connections",
        watch(watch_response::Message::Connections(watch_response::Connections {})),
    );
    for (name, query) in [
        ("connections-request-agent", connections_request::Query::AgentId(7)),
        ("connections-request-project", connections_request::Query::ProjectId(9)),
    ] {
        is_read_and_written(name, ConnectionsRequest { query: Some(query) });
    }
    let connection = Connection {
        agent_id: 7,
        connection_id: i64::MAX,
        project_id: 9,
        name: "production".into(),
        version: "v14.1.0".into(),
        commit: "abc123".into(),
        pod_namespace: "gitlab-agent".into(),
        pod_name: "agentk-0".into(),
        connected_at: Some(prost_types::Timestamp { seconds: 1_795_302_841, nanos: 958_032_000 }),
    };
    let other = Connection { agent_id: 8, connection_id: 1, ..Connection::default() };
    is_read_and_written("connections-response", ConnectionsResponse { connections: vec![connection, other] });
    is_read_and_written("explain-request", ExplainRequest { agent_id: 7 });
    let belief = |replica: &str, holds, why: &str| Belief {
        replica: replica.into(),
        holds,
        why: why.into(),
        gitlab: false,
    };
    is_read_and_written(
        "explain-response",
        ExplainResponse {
            idle: 2,
            busy: 1,
            waiting: 10_000,
            beliefs: vec![belief("10.0.0.7:8155", true, "live"), belief("10.0.0.9:8155", false, "")],
            tunnels: 300,
            version: "0.1.0".into(),
            commit: "abc123".into(),
            // Later versions report their requests.
            ..ExplainResponse::default()
        },
    );
}

/// How the table interprets them.
#[test]
fn messages_of_earlier_versions_keep_their_meaning() {
    let read = |name: &str| {
        let message = WatchResponse::decode(&*golden(name)).unwrap().message.unwrap();
        assert!(!is_later(&message), "{name}");
        from_proto(message)
    };
    let (from, message) = read("watch-hello").unwrap();
    let from = from.unwrap();
    assert_eq!(
        (from.replica.as_str(), from.epoch, &*from.address),
        ("10.0.0.7:8155", Epoch(EPOCH), "10.0.0.7:8155")
    );
    assert_eq!(from.state, cluster::ReplicaState::Ready);
    assert_eq!(
        message,
        table::Message::Hello { epoch: Epoch(EPOCH), version: Version(70_001), resumed: true }
    );
    let (_, message) = read("watch-beat").unwrap();
    let digest = 0x89d3_a209_adeb_4e19;
    let summary = Summary { epoch: Epoch(EPOCH), version: Version(70_004), count: 4, digest };
    assert_eq!(message, table::Message::Beat(summary));
    assert!(
        matches!(read("watch-snapshot"), Some((None, table::Message::Chunk { header, .. })) if header.count == 4)
    );
    assert!(matches!(read("watch-delta"), Some((None, table::Message::Delta { ops, .. })) if ops.len() == 3));
}

#[test]
fn added_fields_and_messages_of_a_later_version_are_ignored() {
    // Field 15, a string, in the message and inside the hello.
    let added = [0x7a, 3, b'n', b'e', b'w'];
    let bytes = [golden("watch-request"), added.to_vec()].concat();
    assert_eq!(WatchRequest::decode(&*bytes), WatchRequest::decode(&*golden("watch-request")));
    let mut known = golden("watch-hello");
    known[1] += added.len() as u8;
    let bytes = [known, added.to_vec()].concat();
    assert_eq!(WatchResponse::decode(&*bytes), WatchResponse::decode(&*golden("watch-hello")));
    // A sixth kind of message.
    let bytes = [0x32, 2, 8, 1];
    assert_eq!(WatchResponse::decode(&bytes[..]).unwrap().message, None);
}

#[test]
fn snapshot_in_a_later_format_is_distinguished_from_an_invalid_one() {
    let decode = |format: u8, rest: &[u8]| {
        let header = [&[format], rest].concat();
        let snapshot = watch_response::Snapshot { header: header.into(), ids: Vec::new().into() };
        let message = watch_response::Message::Snapshot(snapshot);
        (is_later(&message), from_proto(message).is_some())
    };
    assert_eq!(decode(2, b"whatever that means"), (true, false));
    assert_eq!(decode(1, b""), (false, false));
    assert_eq!(decode(1, &[1, 1, 0, 1, 0]), (false, true));
    // Bytes that a later version appends are ignored.
    assert_eq!(decode(1, &[1, 1, 0, 1, 0, 7, 7]), (false, true));
}
