//! One table stream: dialled because the table wants it, read until it ends.

use std::sync::Arc;

use cluster::Replica;
use grpc::MessageReader;
use ids::ReplicaId;
use prost::Message as _;
use proto::kas::internal::v1::{WatchRequest, WatchResponse, watch_response};
use table::{ChunkHeader, Epoch, Failure, Identity, Message, StreamId, Summary, Version, codec, record};
use tokio::time::Instant;

use super::Replication;
use crate::{
    metrics::PeerRecord,
    peer::{
        self, CallFailure,
        link::{Link, RecvBody},
    },
};

const WATCH: &str = "/kas.internal.v1.TableSync/Watch";
/// The largest message: a snapshot's chunk of 64k ids of ten bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// Dials and reads until the stream ends, then says how.
pub(super) async fn follow(
    replication: Arc<Replication>,
    stream: StreamId,
    replica: Option<ReplicaId>,
    address: Arc<str>,
    resume: Option<(Epoch, Version)>,
) {
    let failure = match open(&replication, replica.clone(), &address, resume).await {
        Ok((response, link)) => {
            let failure = read(&replication, stream, &address, response).await;
            drop(link);
            failure
        }
        Err(error) => {
            let why = peer::chain(&error);
            let is_tls = matches!(error, CallFailure::Dial(peer::link::DialError::Tls { .. }));
            // Tried again and again: told of once, until it is something else.
            if is_tls
                && replication.inner().refusals.insert(Arc::clone(&address), why.clone()).as_ref()
                    != Some(&why)
            {
                tracing::warn!(
                    peer = &*address,
                    error = why,
                    "what answers there does not prove to be a replica, or takes this one for none: check the \
                     certificates of both, and client_ca_file and role in private_api.listen"
                );
            } else {
                tracing::debug!(peer = &*address, error = why, "no table stream");
            }
            match error {
                CallFailure::Dial(peer::link::DialError::Refused(_)) => Failure::Refused,
                CallFailure::Dial(_) => Failure::Unanswered,
                CallFailure::Call(_) => Failure::Ended,
            }
        }
    };
    replication.ended(stream, failure);
}

async fn open(
    replication: &Replication,
    replica: Option<ReplicaId>,
    address: &Arc<str>,
    resume: Option<(Epoch, Version)>,
) -> Result<(http::Response<RecvBody>, Option<Link>), CallFailure> {
    let (epoch, version) = resume.unwrap_or((Epoch(0), Version(0)));
    let request =
        WatchRequest { replica: replication.me.id.as_str().to_owned(), epoch: epoch.0, version: version.0 };
    let message = grpc::encode(&request);
    let peers = &replication.peers;
    match replica {
        // Whoever answers there says who it is: the table judges that, not a header.
        Some(id) => {
            let peer = peers.peer(&Replica { id, address: Arc::clone(address) });
            Ok((peer.call_whoever(WATCH, message).await?, None))
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
    replication: &Arc<Replication>,
    stream: StreamId,
    address: &Arc<str>,
    response: http::Response<RecvBody>,
) -> Failure {
    if let Some(status) = grpc::Status::from_headers(response.headers()) {
        let why = status.to_string();
        if is_news(replication, address, &why) {
            tracing::warn!(
                peer = &**address,
                status = why,
                "what answers there does not show its table: check that it is a replica of this cluster, with the same \
                 private_api.listen.authentication_secret_file"
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
                tracing::debug!(error = %error, "a table stream broke");
                return Failure::Ended;
            }
        };
        replication.reached();
        let message = match WatchResponse::decode(message).map(|response| response.message) {
            Ok(Some(message)) => message,
            // A later version's message.
            Ok(None) => {
                replication.metrics.unread(PeerRecord::Message, 1);
                continue;
            }
            Err(error) => {
                tracing::warn!(error = %error, "a table stream cannot be read");
                return Failure::Ended;
            }
        };
        if let watch_response::Message::Connections(_) = message {
            replication.connection_changes.send_replace(());
            continue;
        }
        if is_later(&message) {
            let why = "it is in the form of a later version: this replica asks for each request until it runs that one too";
            if is_news(replication, address, why) {
                tracing::warn!(peer = &**address, why, "the table of a replica cannot be read");
            }
            replication.metrics.unread(PeerRecord::Snapshot, 1);
            replication.inner().table.unreadable(stream, Instant::now());
            replication.act();
            replication.work.notify_one();
            return Failure::Ended;
        }
        let Some((from, message)) = of_proto(message) else {
            tracing::warn!("a table stream holds what is no table");
            return Failure::Ended;
        };
        let mut inner = replication.inner();
        if !matches!(message, Message::Hello { resumed: false, .. }) {
            inner.refusals.remove(address);
        }
        inner.table.message(stream, from, message, Instant::now());
        drop(inner);
        replication.act();
        // The next deadline may be another.
        replication.work.notify_one();
    }
}

/// Notes why an address does not show its table, for the alarms; returns whether that was not known yet.
fn is_news(replication: &Replication, address: &Arc<str>, why: &str) -> bool {
    let before = replication.inner().refusals.insert(Arc::clone(address), why.to_owned());
    before.as_deref() != Some(why)
}

/// Whether a message is in a form that only a later version reads.
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
        // A word of a later version: it serves, or it would not answer.
        state: hello.state.parse().unwrap_or(table::State::Ready),
        address: hello.address.into(),
    })
}

/// Reads a message; hostile bytes are `None`.
pub(super) fn of_proto(message: watch_response::Message) -> Option<(Option<Identity>, Message)> {
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

/// Asks whoever listens at `address` who it is.
///
/// # Errors
/// Why nobody said it, for a person.
pub(super) async fn identify(replication: &Replication, address: &Arc<str>) -> Result<Identity, String> {
    let (response, _link) =
        open(replication, None, address, None).await.map_err(|error| peer::chain(&error))?;
    if let Some(status) = grpc::Status::from_headers(response.headers()) {
        return Err(status.to_string());
    }
    let mut reader = MessageReader::new(response.into_body(), MAX_MESSAGE);
    let message = reader.next().await.map_err(|error| peer::chain(&error))?;
    message
        .and_then(|message| WatchResponse::decode(message).ok()?.message)
        .and_then(of_proto)
        .and_then(|(from, _)| from)
        .ok_or_else(|| "it does not say who it is".to_owned())
}

/// Reads hostile bytes as each message of the private API, and applies table streams to an empty table: for a fuzz
/// target.
pub fn fuzz(bytes: &[u8]) {
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
    // A stream of length-prefixed messages, as many as there are.
    let mut rest = bytes;
    while let Ok(response) = WatchResponse::decode_length_delimited(&mut rest) {
        if let Some((from, message)) = response.message.and_then(of_proto) {
            table.message(stream, from, message, now);
            table.actions();
        }
        if rest.is_empty() {
            break;
        }
    }
}
