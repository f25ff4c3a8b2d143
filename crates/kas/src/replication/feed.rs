//! What this replica tells others: its table, its connections, and what it knows of an agent.

use std::{pin::Pin, sync::Arc};

use cluster::{InMemoryTracker, Query, Tracker};
use futures_util::stream::{self, Stream};
use ids::AgentId;
use proto::kas::internal::v1::{
    Belief, Connection, ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    WatchRequest, WatchResponse, connections_request,
    replica_server::{Replica, ReplicaServer},
    table_sync_server::{TableSync, TableSyncServer},
    watch_response,
};
use table::{Epoch, Feed, Message, Next, Version, codec};
use tokio::{sync::watch, time::Instant};
use tonic::{Request, Response, Status};

use super::Replication;
use crate::{
    listener::{Own, own},
    metrics::Metrics,
    tunnel_registry::TunnelRegistry,
};

/// Connections in one message of a list.
const PAGE: usize = 500;

/// Returns the services that other replicas call.
pub fn services(replication: &Arc<Replication>) -> Vec<(String, Own)> {
    let private = Private(Arc::clone(replication));
    vec![own(TableSyncServer::new(private.clone())), own(ReplicaServer::new(private))]
}

#[derive(Clone)]
struct Private(Arc<Replication>);

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// One subscriber.
struct Subscriber {
    replication: Arc<Replication>,
    feed: Feed,
    news: watch::Receiver<()>,
    own: watch::Receiver<()>,
    begun: bool,
    /// Its keepalives end the connection when it does not answer, so an open one says that it does.
    hold: Option<gossip::Hold>,
    _open: Open,
}

/// Another replica reads this one's table while this lives.
struct Open(Arc<Replication>);

impl Open {
    fn new(replication: &Arc<Replication>) -> Self {
        replication.inner().subscribed(1);
        Self(Arc::clone(replication))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.inner().subscribed(-1);
    }
}

impl Subscriber {
    async fn next(&mut self) -> WatchResponse {
        if self.hold.is_none() {
            self.hold = self.replication.gossip.get().map(gossip::Gossip::hold);
        }
        loop {
            self.news.borrow_and_update();
            let next = {
                let mut inner = self.replication.inner();
                let now = Instant::now();
                match self.feed.next(&mut inner.owner, now) {
                    Next::Message(message) => {
                        self.begun = true;
                        let hello = watch_response::Hello {
                            replica: self.replication.me.id.as_str().to_owned(),
                            epoch: inner.owner.epoch().0,
                            state: inner.state.as_str().to_owned(),
                            address: self.replication.me.address.to_string(),
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
                // Its senders live as long as the replication.
                _ = self.news.changed() => {}
                _ = self.own.changed(), if self.begun => {
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
        let replication = Arc::clone(&self.0);
        let seen = Epoch(request.epoch);
        let resume = (request.epoch != 0).then_some((seen, Version(request.version)));
        let (news, own) = (replication.news.subscribe(), replication.own.connection_changes());
        let feed = {
            let mut inner = replication.inner();
            if inner.owner.outrank(seen) {
                tracing::warn!(
                    "another replica knows a later table of this one: the clock was set back, or two replicas have one \
                     name; a new epoch begins"
                );
            }
            inner.owner.feed(resume)
        };
        let open = Open::new(&replication);
        let subscriber = Subscriber { replication, feed, news, own, begun: false, hold: None, _open: open };
        Ok(Response::new(Box::pin(stream::unfold(subscriber, |mut subscriber| async move {
            let message = subscriber.next().await;
            Some((Ok(message), subscriber))
        }))))
    }
}

/// Returns the connections of a replica alone, as it tells them to others.
pub(crate) async fn pages(
    own: &InMemoryTracker,
    request: ConnectionsRequest,
) -> Result<Vec<Result<ConnectionsResponse, Status>>, Status> {
    let query = match request.query {
        None => Query::All,
        Some(connections_request::Query::AgentId(agent)) => {
            Query::Agent(AgentId::new(agent).map_err(|error| Status::invalid_argument(error.to_string()))?)
        }
        Some(connections_request::Query::ProjectId(project)) => Query::Project(project),
    };
    let own = own.connected(query).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let connections: Vec<Connection> =
        own.connections.iter().map(|located| super::lists::to_proto(&located.connection)).collect();
    Ok(connections.chunks(PAGE).map(|page| Ok(ConnectionsResponse { connections: page.to_vec() })).collect())
}

/// Returns what a replica tells others of itself and of an agent.
pub(crate) fn explain(
    registry: &TunnelRegistry,
    metrics: &Metrics,
    tracker: &dyn Tracker,
    request: ExplainRequest,
) -> ExplainResponse {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let load = metrics.load();
    let mut response = ExplainResponse {
        requests_ended: Some(load.ended),
        requests_open: Some(load.open),
        requests_waiting: Some(load.waiting),
        tunnels: u64::try_from(metrics.tunnels.get()).unwrap_or(0),
        version: runtime::version::VERSION.to_owned(),
        commit: runtime::version::COMMIT.to_owned(),
        ..ExplainResponse::default()
    };
    if let Ok(agent) = AgentId::new(request.agent_id) {
        let (idle, busy, waiting) = registry.counts(agent);
        (response.idle, response.busy, response.waiting) = (number(idle), number(busy), number(waiting));
        response.beliefs = tracker
            .beliefs(agent)
            .into_iter()
            .map(|belief| Belief {
                replica: belief.replica.id.as_str().to_owned(),
                holds: belief.holds,
                why: belief.why,
            })
            .collect();
    }
    response
}

#[tonic::async_trait]
impl Replica for Private {
    type ConnectionsStream = Answers<ConnectionsResponse>;

    async fn connections(
        &self,
        request: Request<ConnectionsRequest>,
    ) -> Result<Response<Self::ConnectionsStream>, Status> {
        let pages = pages(&self.0.own, request.into_inner()).await?;
        Ok(Response::new(Box::pin(stream::iter(pages))))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let registry = self.0.registry.get().ok_or_else(|| Status::unavailable("this replica starts"))?;
        let response = explain(registry, &self.0.metrics, &*self.0, request.into_inner());
        Ok(Response::new(response))
    }
}
