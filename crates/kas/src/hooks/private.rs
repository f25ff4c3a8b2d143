//! What other replicas ask of the mailbox of this one.

use std::sync::Arc;

use grpc::service::{LocalService, local_service};
use ids::{AgentId, ReplicaId};
use proto::kas::{
    api::v1::{ListHooksRequest, ListHooksResponse, ReplayHooksRequest, ReplayHooksResponse},
    internal::v1::{
        AcceptRequest, AcceptResponse, DefineRequest, DefineResponse, ExchangeRequest, ExchangeResponse,
        accept_response::Outcome,
        mailbox_server::{Mailbox, MailboxServer},
    },
};
use tonic::{Request, Response, Status};

use super::{
    desk::{Arrived, Desk, Told},
    query::HookQueries,
};
use crate::mailbox::{self, MAX_MESSAGE};

impl Desk {
    /// Returns the service for other replicas.
    pub(crate) fn for_replicas(self: &Arc<Self>, queries: &Arc<HookQueries>) -> (String, LocalService) {
        let server = MailboxServer::new(Here { desk: Arc::clone(self), queries: Arc::clone(queries) });
        local_service(server.max_decoding_message_size(MAX_MESSAGE))
    }
}

#[derive(Clone)]
struct Here {
    desk: Arc<Desk>,
    queries: Arc<HookQueries>,
}

/// Reads a hook that came to another replica.
fn arrived(request: AcceptRequest, largest: usize) -> Result<Arrived, Status> {
    if request.body.len() > largest {
        return Err(Status::invalid_argument(format!("body: at most {largest} bytes are accepted here")));
    }
    let agent = AgentId::new(request.agent_id)
        .map_err(|error| Status::invalid_argument(format!("agent_id: {error}, got {}", request.agent_id)))?;
    Ok(Arrived {
        id: mailbox::id(&request.id)?,
        agent,
        hook: request.hook,
        headers: mailbox::headers(request.headers)?,
        body: request.body,
        key: request.key,
        // It is only for the audit log.
        peer: request.peer.parse().ok(),
    })
}

#[tonic::async_trait]
impl Mailbox for Here {
    async fn accept(&self, request: Request<AcceptRequest>) -> Result<Response<AcceptResponse>, Status> {
        let arrived = arrived(request.into_inner(), self.desk.largest)?;
        let answer =
            |outcome: Outcome| AcceptResponse { outcome: outcome.into(), ..AcceptResponse::default() };
        Ok(Response::new(match self.desk.accept(arrived).await {
            Told::Accepted { id, copies } => AcceptResponse {
                id: mailbox::id_to_wire(id),
                copies: u32::try_from(copies).unwrap_or(u32::MAX),
                ..answer(Outcome::Accepted)
            },
            Told::Unauthenticated => answer(Outcome::Unauthenticated),
            Told::Busy(why) => AcceptResponse { why, ..answer(Outcome::Busy) },
            Told::TooFast => answer(Outcome::TooFast),
            Told::NotReady => answer(Outcome::NotReady),
        }))
    }

    async fn exchange(
        &self,
        request: Request<ExchangeRequest>,
    ) -> Result<Response<ExchangeResponse>, Status> {
        let request = request.into_inner();
        let from = ReplicaId::new(&request.replica);
        let (batch, was_read) = mailbox::batch(request)?;
        let answer = self.desk.post.receive(&from, batch);
        Ok(Response::new(mailbox::replies(&answer, &was_read)))
    }

    async fn define(&self, request: Request<DefineRequest>) -> Result<Response<DefineResponse>, Status> {
        self.desk.post.define(request.into_inner()).map(Response::new)
    }

    async fn list(&self, request: Request<ListHooksRequest>) -> Result<Response<ListHooksResponse>, Status> {
        self.queries.list_here(request.get_ref()).await.map(Response::new)
    }

    async fn replay(
        &self,
        request: Request<ReplayHooksRequest>,
    ) -> Result<Response<ReplayHooksResponse>, Status> {
        self.queries.replay_here(request.get_ref()).map(Response::new)
    }
}
