//! The part for webhooks.

use std::sync::Arc;

use cluster::Tracker;
use grpc::service::LocalService;
use ids::ReplicaId;
use kas_config::{Config, Hooks as Section};
use net::{io::Listener, tls};
use observe::{Observer, refusals::Refusals};
use routing::{peer::Peers, router::Router};

use super::{part::Part, servers};
use crate::{
    hooks::{Delivering, Desk, HookListener, HookQueries, Parts, Receivers},
    mailbox::{MailboxMetrics, Post, Readers},
    sync::SyncService,
};

/// Open streams of one connection of a sender.
const STREAMS: u32 = 100;
/// Streams of one connection that kas may have to reset.
const RESETS: u32 = 1_000;

/// The listener of the section, with its TLS.
pub(super) struct Bound {
    pub(super) section: Section,
    pub(super) listener: Listener,
    pub(super) tls: Option<tls::Live<rustls::ServerConfig>>,
}

/// The parts of kas that hooks use.
pub(super) struct Uses {
    pub(super) me: ReplicaId,
    pub(super) tracker: Arc<dyn Tracker>,
    pub(super) peers: Option<Arc<Peers>>,
    pub(super) router: Arc<Router>,
    pub(super) observer: Arc<Observer>,
    pub(super) refusals: Arc<Refusals>,
    pub(super) metrics: Arc<MailboxMetrics>,
    pub(super) sync: Arc<SyncService>,
}

/// Builds the part. Also returns the service for other replicas, and what answers questions.
pub(super) fn part(
    config: &Config,
    bound: Bound,
    uses: Uses,
) -> (Part, (String, LocalService), Arc<HookQueries>) {
    let Uses { me, tracker, peers, router, observer, refusals, metrics, sync } = uses;
    let post = Post::new(me, tracker, peers, Arc::clone(&router), Arc::clone(&metrics));
    let desk = Desk::new(Parts {
        post: Arc::clone(&post),
        config: bound.section.clone(),
        open_files: config.open_secret_files,
        observer: Arc::clone(&observer),
        metrics,
    });
    let queries = HookQueries::new(Arc::clone(&desk));
    let private = desk.for_replicas(&queries);
    let delivering = Delivering::new(Arc::clone(&desk), Receivers { router, observer });
    let readers = Readers::new(Arc::clone(&post), sync.held_agents());
    let service = HookListener::new(desk, refusals, config.limits.attempts);
    let server = servers::http(config, bound.listener, bound.tls, (STREAMS, RESETS), service);
    let (draining, leaving) = (Arc::clone(&post), Arc::clone(&post));
    let part = Part::default()
        .server(server)
        .task(post.run(delivering))
        .task(readers.run())
        .drain(move || draining.drain())
        .farewell(leaving.hand_over());
    (part, private, queries)
}
