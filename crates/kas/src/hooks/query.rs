//! Answers questions about hooks, at whichever replica they are asked: the holders of the agent know.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ids::{AgentId, ReplicaId};
use mailbox::State;
use prost::Message;
use proto::kas::api::v1::{
    HookInfo, KeptHook, ListHooksRequest, ListHooksResponse, ReplayHooksRequest, ReplayHooksResponse,
};
use tokio::time::timeout;
use tonic::Status;

use super::desk::Desk;
use crate::sync::ask;

const LIST: &str = "/kas.internal.v1.Mailbox/List";
const REPLAY: &str = "/kas.internal.v1.Mailbox/Replay";
/// The most hooks that are listed.
const MOST: usize = 1_000;
/// How long another replica may take for an answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Answers questions about hooks.
pub struct HookQueries(Arc<Desk>);

impl std::fmt::Debug for HookQueries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HookQueries").finish_non_exhaustive()
    }
}

fn agent(id: i64) -> Result<AgentId, Status> {
    AgentId::new(id).map_err(|error| Status::invalid_argument(format!("agent_id: {error}, got {id}")))
}

impl HookQueries {
    pub(crate) fn new(desk: Arc<Desk>) -> Arc<Self> {
        Arc::new(Self(desk))
    }

    /// Lists what is known and kept of an agent.
    ///
    /// # Errors
    /// If the request is invalid, or no replica that keeps hooks of the agent answers.
    pub(crate) async fn list(&self, request: &ListHooksRequest) -> Result<ListHooksResponse, Status> {
        for replica in self.order(agent(request.agent_id)?)? {
            if replica == *self.0.post.me() {
                return self.list_here(request).await;
            }
            if let Some(answer) = self.elsewhere(&replica, LIST, grpc::encode(request)).await? {
                return Ok(answer);
            }
        }
        Err(unanswered())
    }

    /// Lets dead letters be delivered again.
    ///
    /// # Errors
    /// As of [`list`](Self::list), and if there is no such dead letter.
    pub(crate) async fn replay(&self, request: &ReplayHooksRequest) -> Result<ReplayHooksResponse, Status> {
        for replica in self.order(agent(request.agent_id)?)? {
            if replica == *self.0.post.me() {
                return self.replay_here(request);
            }
            if let Some(answer) = self.elsewhere(&replica, REPLAY, grpc::encode(request)).await? {
                return Ok(answer);
            }
        }
        Err(unanswered())
    }

    /// Returns the holders of an agent.
    fn order(&self, agent: AgentId) -> Result<Vec<ReplicaId>, Status> {
        let mut order = self.0.post.order(agent);
        order.truncate(2);
        if order.is_empty() { Err(Status::unavailable("no replica is ready")) } else { Ok(order) }
    }

    /// Asks another replica. `None`: it does not answer, and the next may.
    async fn elsewhere<A: Message + Default>(
        &self,
        replica: &ReplicaId,
        path: &str,
        question: Bytes,
    ) -> Result<Option<A>, Status> {
        let Some((peers, replica)) = self.0.post.peer(replica) else { return Ok(None) };
        match timeout(ANSWER, ask::<A>(&peers, &replica, path, question)).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(status))
                if matches!(status.code(), tonic::Code::Unavailable | tonic::Code::Unimplemented) =>
            {
                Ok(None)
            }
            Ok(Err(status)) => Err(status),
            Err(_) => Ok(None),
        }
    }

    /// Lists what this replica keeps.
    pub(super) async fn list_here(&self, request: &ListHooksRequest) -> Result<ListHooksResponse, Status> {
        let agent = agent(request.agent_id)?;
        let desk = &self.0;
        let hooks = desk.hooks(desk.post.definition(agent));
        let mut flaws = Vec::new();
        let mut infos = Vec::new();
        match &hooks {
            None => {}
            Some(Err(flaw)) => flaws.push(flaw.clone()),
            Some(Ok(hooks)) => {
                for hook in hooks.list() {
                    infos.push(HookInfo {
                        name: hook.name.to_string(),
                        verify: hook.verify.word().to_owned(),
                        deliver: hook.deliver.describe(),
                    });
                    if let Some(secret) = hook.verify.secret()
                        && let Some(flaw) = desk.secrets.flaw(agent, secret).await
                    {
                        flaws.push(format!("hook {}: {flaw}", hook.name));
                    }
                }
            }
        }
        let kept = desk.post.list(agent, MOST).into_iter().map(|listed| KeptHook {
            id: listed.message.id.to_string(),
            hook: listed.message.hook.to_string(),
            dead: listed.message.state == State::Dead,
            age_ms: u64::try_from(listed.message.age.as_millis()).unwrap_or(u64::MAX),
            attempts: listed.message.attempts,
            reason: listed.message.reason.to_string(),
            bytes: listed.message.body.len() as u64,
            copies: u32::try_from(listed.copies).unwrap_or(u32::MAX),
        });
        Ok(ListHooksResponse {
            replica: desk.post.me().as_str().to_owned(),
            known: matches!(hooks, Some(Ok(_))),
            hooks: infos,
            kept: kept.collect(),
            flaw: flaws.join("; "),
        })
    }

    /// Lets dead letters of this replica be delivered again.
    pub(super) fn replay_here(&self, request: &ReplayHooksRequest) -> Result<ReplayHooksResponse, Status> {
        let agent = agent(request.agent_id)?;
        let post = &self.0.post;
        let dead = post.list(agent, usize::MAX).into_iter();
        let dead = dead.map(|listed| listed.message).filter(|message| message.state == State::Dead);
        if request.id.is_empty() {
            let replayed = dead.filter(|message| post.replay(message.id)).count();
            return Ok(ReplayHooksResponse { replayed: replayed as u64 });
        }
        let id = request.id.parse().map_err(|error| Status::invalid_argument(format!("id: {error}")))?;
        let mut dead = dead.filter(|message| message.id == id);
        match dead.next() {
            None => Err(Status::not_found(format!("agent {agent} has no dead letter {id}"))),
            Some(_) if post.replay(id) => Ok(ReplayHooksResponse { replayed: 1 }),
            Some(_) => Err(Status::resource_exhausted("too many hooks wait")),
        }
    }
}

fn unanswered() -> Status {
    Status::unavailable("no replica that keeps the hooks of the agent answers")
}
