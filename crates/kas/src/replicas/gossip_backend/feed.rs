//! The services of this replica: its table, its connections, and its report.

use std::{pin::Pin, sync::Arc};

use cluster::Connections as _;
use futures_util::stream::{self, Stream};
use grpc::service::{LocalService, local_service};
use proto::kas::internal::v1::{
    ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse, WatchRequest, WatchResponse,
    replica_server::{Replica, ReplicaServer},
    table_sync_server::{TableSync, TableSyncServer},
    watch_response,
};
use table::{Epoch, Feed, Message, Next, Version, codec};
use tokio::{sync::watch, time::Instant};
use tonic::{Request, Response, Status};

use super::GossipBackend;
use crate::replicas::answer;
use observe::refusals::Refusals;
use routing::registry::TunnelRegistry;

/// Returns the services that other replicas call.
pub(super) fn services(
    backend: Arc<GossipBackend>,
    registry: Arc<TunnelRegistry>,
    refusals: Arc<Refusals>,
) -> Vec<(String, LocalService)> {
    let private = Private { backend, registry, refusals };
    vec![local_service(TableSyncServer::new(private.clone())), local_service(ReplicaServer::new(private))]
}

#[derive(Clone)]
struct Private {
    backend: Arc<GossipBackend>,
    registry: Arc<TunnelRegistry>,
    refusals: Arc<Refusals>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// One subscriber.
struct Subscriber {
    backend: Arc<GossipBackend>,
    feed: Feed,
    news: watch::Receiver<()>,
    connections: watch::Receiver<()>,
    /// A message of the feed was sent.
    begun: bool,
    /// The connection has keepalives, so while it is open the subscriber answers.
    _hold: gossip::Hold,
    _open: Open,
}

/// Counts as a subscriber while it lives.
struct Open(Arc<GossipBackend>);

impl Open {
    fn new(backend: &Arc<GossipBackend>) -> Self {
        backend.inner().subscribed(1);
        Self(Arc::clone(backend))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.inner().subscribed(-1);
    }
}

impl Subscriber {
    async fn next(&mut self) -> WatchResponse {
        loop {
            self.news.borrow_and_update();
            let next = {
                let mut inner = self.backend.inner();
                let now = Instant::now();
                match self.feed.next(&mut inner.owner, now) {
                    Next::Message(message) => {
                        self.begun = true;
                        let hello = watch_response::Hello {
                            replica: self.backend.me.id.as_str().to_owned(),
                            epoch: inner.owner.epoch().0,
                            state: inner.state.as_str().to_owned(),
                            address: self.backend.me.address.to_string(),
                            version: 0,
                            resumed: false,
                        };
                        drop(inner);
                        return WatchResponse { message: Some(to_proto(message, hello)) };
                    }
                    Next::WaitUntil(at) => at,
                }
            };
            tokio::select! {
                // Its senders live as long as the backend.
                _ = self.news.changed() => {}
                _ = self.connections.changed(), if self.begun => {
                    return WatchResponse {
                        message: Some(watch_response::Message::Connections(watch_response::Connections {})),
                    };
                }
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }
}

fn to_proto(message: Message, mut hello: watch_response::Hello) -> watch_response::Message {
    match message {
        Message::Hello { epoch, version, resumed } => {
            hello.epoch = epoch.0;
            hello.version = version.0;
            hello.resumed = resumed;
            watch_response::Message::Hello(hello)
        }
        Message::Chunk { header, ids } => watch_response::Message::Snapshot(watch_response::Snapshot {
            header: header.encode().into(),
            ids: ids.into(),
        }),
        Message::Delta { from, to, ops } => {
            let mut bytes = Vec::new();
            codec::encode_ops(&ops, &mut bytes);
            watch_response::Message::Delta(watch_response::Delta {
                from: from.0,
                to: to.0,
                ops: bytes.into(),
            })
        }
        Message::Beat(summary) => {
            hello.epoch = summary.epoch.0;
            hello.version = summary.version.0;
            watch_response::Message::Beat(watch_response::Beat {
                hello: Some(hello),
                count: summary.count,
                digest: summary.digest,
            })
        }
    }
}

#[tonic::async_trait]
impl TableSync for Private {
    type WatchStream = Answers<WatchResponse>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let backend = Arc::clone(&self.backend);
        // Datagrams of other groups are dropped. A stream would merge the groups nevertheless if they share
        // the secret, and requests would go to agents of another group.
        if !request.cluster.is_empty() && request.cluster != backend.cluster {
            return Err(Status::failed_precondition(format!(
                "the replica {:?} belongs to the group {:?} and this one to {:?}: gossip.cluster differs",
                request.replica, request.cluster, backend.cluster
            )));
        }
        let seen = Epoch(request.epoch);
        let resume = (request.epoch != 0).then_some((seen, Version(request.version)));
        let (news, connections) = (backend.news.subscribe(), backend.own.connection_changes());
        let feed = {
            let mut inner = backend.inner();
            if inner.owner.raise_epoch(seen) {
                tracing::warn!(
                    "another replica knows a later table of this one: the clock was set back, or two replicas have the \
                     same name; a new epoch begins"
                );
            }
            inner.owner.feed(resume)
        };
        let (open, hold) = (Open::new(&backend), backend.gossip.hold());
        let subscriber =
            Subscriber { backend, feed, news, connections, begun: false, _hold: hold, _open: open };
        Ok(Response::new(Box::pin(stream::unfold(subscriber, |mut subscriber| async move {
            let message = subscriber.next().await;
            Some((Ok(message), subscriber))
        }))))
    }
}

#[tonic::async_trait]
impl Replica for Private {
    type ConnectionsStream = Answers<ConnectionsResponse>;

    async fn connections(
        &self,
        request: Request<ConnectionsRequest>,
    ) -> Result<Response<Self::ConnectionsStream>, Status> {
        let pages = answer::pages(&self.backend.own, request.into_inner()).await?;
        Ok(Response::new(Box::pin(stream::iter(pages))))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        Ok(Response::new(answer::explain(
            &self.registry,
            &self.refusals,
            &*self.backend,
            request.into_inner(),
        )))
    }
}
