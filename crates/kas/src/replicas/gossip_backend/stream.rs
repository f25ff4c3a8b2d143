//! One table stream: dialled on request of the table, and read until it ends.

use std::sync::Arc;

use cluster::{Replica, ReplicaState};
use grpc::MessageReader;
use ids::ReplicaId;
use prost::Message as _;
use proto::kas::internal::v1::{WatchRequest, WatchResponse, watch_response};
use table::{ChunkHeader, Epoch, Failure, Identity, Message, StreamId, Summary, Version, codec, record};
use tokio::time::Instant;

use super::GossipBackend;
use crate::replicas::metrics::PeerRecord;
use routing::peer::{
    self, CallFailure,
    link::{Link, RecvBody},
};

const WATCH: &str = "/kas.internal.v1.TableSync/Watch";
/// The largest message: a chunk of a snapshot with 64k ids of ten bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// Dials and reads until the stream ends, then reports how it ended.
pub(super) async fn follow(
    backend: Arc<GossipBackend>,
    stream: StreamId,
    replica: Option<ReplicaId>,
    address: Arc<str>,
    resume: Option<(Epoch, Version)>,
) {
    let failure = match open(&backend, replica.clone(), &address, resume).await {
        Ok((response, link)) => {
            let failure = read(&backend, stream, &address, response).await;
            drop(link);
            failure
        }
        Err(error) => {
            let why = process::error::chain(&error);
            let is_tls = matches!(error, CallFailure::Dial(peer::link::DialError::Tls { .. }));
            // It is tried again and again. The reason is logged once, until it changes.
            if is_tls
                && backend.inner().refusals.insert(Arc::clone(&address), why.clone()).as_ref() != Some(&why)
            {
                tracing::warn!(
                    peer = &*address,
                    error = why,
                    "TLS with another replica failed: check the certificates of both, and client_ca_file and role in \
                     private_api.listen"
                );
            } else {
                tracing::debug!(peer = &*address, error = why, "cannot open a table stream");
            }
            match error {
                CallFailure::Dial(peer::link::DialError::Refused(_)) => Failure::Refused,
                CallFailure::Dial(_) => Failure::Unanswered,
                CallFailure::Call(_) => Failure::Ended,
            }
        }
    };
    backend.ended(stream, failure);
}

async fn open(
    backend: &GossipBackend,
    replica: Option<ReplicaId>,
    address: &Arc<str>,
    resume: Option<(Epoch, Version)>,
) -> Result<(http::Response<RecvBody>, Option<Link>), CallFailure> {
    let (epoch, version) = resume.unwrap_or((Epoch(0), Version(0)));
    let request = WatchRequest {
        replica: backend.me.id.as_str().to_owned(),
        epoch: epoch.0,
        version: version.0,
        cluster: backend.cluster.clone(),
    };
    let message = grpc::encode(&request);
    let peers = &backend.peers;
    match replica {
        // The table checks which replica answers there, so the header is not checked.
        Some(id) => {
            let peer = peers.peer(&Replica { id, address: Arc::clone(address) });
            Ok((peer.call_any(WATCH, message).await?, None))
        }
        None => {
            let link = peers.dial(address).await?;
            let mut request = link.request(WATCH, peers.authorization());
            request.headers_mut().insert(peer::FROM, peers.from());
            Ok((link.call(request, message).await?, Some(link)))
        }
    }
}

async fn read(
    backend: &Arc<GossipBackend>,
    stream: StreamId,
    address: &Arc<str>,
    response: http::Response<RecvBody>,
) -> Failure {
    if let Some(status) = grpc::Status::from_headers(response.headers()) {
        let why = status.to_string();
        if is_news(backend, address, &why) {
            tracing::warn!(
                peer = &**address,
                status = why,
                "another replica refuses to send its table: check that it is a replica of this cluster, with the same \
                 gossip.cluster and private_api.listen.authentication_secret_file"
            );
        }
        return Failure::Ended;
    }
    let mut reader = MessageReader::new(response.into_body(), MAX_MESSAGE);
    loop {
        let message = match reader.next().await {
            Ok(Some(message)) => message,
            Ok(None) => return Failure::Ended,
            Err(error) => {
                tracing::debug!(error = %error, "a table stream failed");
                return Failure::Ended;
            }
        };
        backend.gossip.reached();
        let message = match WatchResponse::decode(message).map(|response| response.message) {
            Ok(Some(message)) => message,
            // A message of a later version.
            Ok(None) => {
                backend.metrics.unread(PeerRecord::Message, 1);
                continue;
            }
            Err(error) => {
                tracing::warn!(error = %error, "a table stream has a malformed message");
                return Failure::Ended;
            }
        };
        if let watch_response::Message::Connections(_) = message {
            backend.connection_changes.send_replace(());
            continue;
        }
        if is_later(&message) {
            let why = "its format is that of a later version: until this replica runs that version too, it asks for each request";
            if is_news(backend, address, why) {
                tracing::warn!(peer = &**address, why, "the table of another replica cannot be read");
            }
            backend.metrics.unread(PeerRecord::Snapshot, 1);
            backend.inner().table.unreadable(stream, Instant::now());
            backend.act();
            backend.work.notify_one();
            return Failure::Ended;
        }
        let Some((from, message)) = from_proto(message) else {
            tracing::warn!("a table stream has an invalid message");
            return Failure::Ended;
        };
        let mut inner = backend.inner();
        if !matches!(message, Message::Hello { resumed: false, .. }) {
            inner.refusals.remove(address);
        }
        inner.table.message(stream, from, message, Instant::now());
        drop(inner);
        backend.act();
        // The next deadline may have changed.
        backend.work.notify_one();
    }
}

/// Notes why there is no table from an address, for the alarms. Returns whether the reason is new.
fn is_news(backend: &GossipBackend, address: &Arc<str>, why: &str) -> bool {
    let before = backend.inner().refusals.insert(Arc::clone(address), why.to_owned());
    before.as_deref() != Some(why)
}

/// Whether a message has a format that only a later version reads.
pub(super) fn is_later(message: &watch_response::Message) -> bool {
    match message {
        watch_response::Message::Snapshot(snapshot) => {
            ChunkHeader::decode(&snapshot.header) == Err(record::Error::UnknownFormat)
        }
        _ => false,
    }
}

fn identity(hello: watch_response::Hello) -> Option<Identity> {
    Some(Identity {
        replica: ReplicaId::new(&hello.replica),
        epoch: Epoch(hello.epoch),
        // For an unknown state of a later version: the replica answers, so it serves.
        state: hello.state.parse().unwrap_or(ReplicaState::Ready),
        address: hello.address.into(),
    })
}

/// Decodes a message; `None` if it is invalid.
pub(super) fn from_proto(message: watch_response::Message) -> Option<(Option<Identity>, Message)> {
    Some(match message {
        watch_response::Message::Hello(hello) => {
            let (version, resumed) = (Version(hello.version), hello.resumed);
            let from = identity(hello)?;
            let epoch = from.epoch;
            (Some(from), Message::Hello { epoch, version, resumed })
        }
        watch_response::Message::Snapshot(snapshot) => {
            let header = ChunkHeader::decode(&snapshot.header).ok()?;
            (None, Message::Chunk { header, ids: snapshot.ids.into() })
        }
        watch_response::Message::Delta(delta) => {
            let max = usize::try_from(delta.to.checked_sub(delta.from)?).ok()?.min(table::limits::DELTA_OPS);
            let ops = codec::decode_ops(&delta.ops, max).ok()?;
            (None, Message::Delta { from: Version(delta.from), to: Version(delta.to), ops })
        }
        watch_response::Message::Beat(beat) => {
            let hello = beat.hello?;
            let summary = Summary {
                epoch: Epoch(hello.epoch),
                version: Version(hello.version),
                count: beat.count,
                digest: beat.digest,
            };
            (Some(identity(hello)?), Message::Beat(summary))
        }
        watch_response::Message::Connections(_) => return None,
    })
}

/// Asks the process at `address` for its identity.
///
/// # Errors
/// Why there is no answer, for a person.
pub(super) async fn identify(backend: &GossipBackend, address: &Arc<str>) -> Result<Identity, String> {
    let (response, _link) =
        open(backend, None, address, None).await.map_err(|error| process::error::chain(&error))?;
    if let Some(status) = grpc::Status::from_headers(response.headers()) {
        return Err(status.to_string());
    }
    let mut reader = MessageReader::new(response.into_body(), MAX_MESSAGE);
    let message = reader.next().await.map_err(|error| process::error::chain(&error))?;
    message
        .and_then(|message| WatchResponse::decode(message).ok()?.message)
        .and_then(from_proto)
        .and_then(|(from, _)| from)
        .ok_or_else(|| "the answer has no identity".to_owned())
}

/// Decodes bytes as each message of the private API, and applies table streams to an empty table. The entry
/// for fuzz targets.
#[cfg(feature = "fuzzing")]
pub fn decode_all(bytes: &[u8]) {
    use proto::kas::internal::v1::{
        ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    };
    let _ = WatchRequest::decode(bytes);
    let _ = ConnectionsRequest::decode(bytes);
    let _ = ConnectionsResponse::decode(bytes);
    let _ = ExplainRequest::decode(bytes);
    let _ = ExplainResponse::decode(bytes);
    let now = Instant::now();
    let mut table = table::Table::new(ReplicaId::new("me"), table::Limits::default(), now);
    table.seeds([Arc::from("127.0.0.1:1")], now);
    let Some(stream) = table.actions().into_iter().find_map(|action| match action {
        table::Action::Dial { stream, .. } => Some(stream),
        _ => None,
    }) else {
        return;
    };
    // A stream of length-prefixed messages.
    let mut rest = bytes;
    while let Ok(response) = WatchResponse::decode_length_delimited(&mut rest) {
        if let Some((from, message)) = response.message.and_then(from_proto) {
            table.message(stream, from, message, now);
            table.actions();
        }
        if rest.is_empty() {
            break;
        }
    }
}
