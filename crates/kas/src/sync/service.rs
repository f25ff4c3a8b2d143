//! Answers questions about syncs, at whichever replica they are asked: the home of the agent knows.

use std::{pin::Pin, sync::Arc, time::Duration};

use cluster::{Candidate, Replica, Tracker, Wire};
use futures_util::{Stream, stream};
use grpc::{Code, MessageReader, service::LocalService, service::local_service};
use ids::{AgentId, Impersonation, ReplicaId};
use planner::{Control, Planners, home};
use process::lifecycle::Phase;
use prost::Message;
use proto::kas::{
    api::v1::{
        ControlSyncRequest, ControlSyncResponse, DiffRequest, DiffResponse, GetSyncRequest, GetSyncResponse,
        ListEnvironmentsRequest, control_sync_request::Action,
    },
    internal::v1::{
        DiffForRequest, HeldEnvironments,
        sync_server::{Sync as SyncRpc, SyncServer},
    },
};
use routing::peer::Peers;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::{HeldAgents, convert};

const GET: &str = "/kas.internal.v1.Sync/Get";
const CONTROL: &str = "/kas.internal.v1.Sync/Control";
const DIFF: &str = "/kas.internal.v1.Sync/Diff";
const DIFF_FOR: &str = "/kas.internal.v1.Sync/DiffFor";

/// The largest question, in bytes: 20 MiB of files, and their paths.
pub(crate) const MAX_QUESTION: usize = 24 << 20;
/// The largest answer, in bytes.
pub(super) const MAX_ANSWER: usize = 64 << 20;
/// How long another replica may take to say what it knows.
pub(super) const KNOWN_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to do something.
const DONE_WITHIN: Duration = Duration::from_secs(3_600);
/// How long it may take for a diff.
const DIFF_WITHIN: Duration = Duration::from_secs(130);
/// Changes within this time are sent to a watcher together.
const SETTLE: Duration = Duration::from_millis(50);
/// How often another replica is asked for changes.
const ASK: Duration = Duration::from_secs(1);

/// Answers questions about syncs.
pub struct SyncService {
    pub(super) planners: Arc<Planners>,
    pub(super) tracker: Arc<dyn Tracker>,
    me: ReplicaId,
    /// `None`: there are no other replicas.
    pub(super) peers: Option<Arc<Peers>>,
    pub(super) held: Arc<HeldAgents>,
}

impl std::fmt::Debug for SyncService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SyncService").field("me", &self.me).finish_non_exhaustive()
    }
}

type Watched = Pin<Box<dyn Stream<Item = Result<GetSyncResponse, Status>> + Send>>;

impl SyncService {
    pub(crate) fn new(
        planners: Arc<Planners>,
        tracker: Arc<dyn Tracker>,
        me: ReplicaId,
        peers: Option<Arc<Peers>>,
        held: Arc<HeldAgents>,
    ) -> Arc<Self> {
        Arc::new(Self { planners, tracker, me, peers, held })
    }

    /// Returns the agents of this replica.
    pub(crate) fn held(&self) -> &Arc<HeldAgents> {
        &self.held
    }

    /// Returns the service for other replicas.
    pub(crate) fn for_replicas(self: &Arc<Self>) -> (String, LocalService) {
        let server = SyncServer::new(Here(Arc::clone(self)));
        local_service(server.max_decoding_message_size(MAX_QUESTION).max_encoding_message_size(MAX_ANSWER))
    }

    /// Returns the agents of this replica.
    pub(crate) fn held_agents(&self) -> Arc<HeldAgents> {
        Arc::clone(&self.held)
    }

    /// Returns the planners of this replica.
    pub(crate) fn planners(&self) -> Arc<Planners> {
        Arc::clone(&self.planners)
    }

    /// Counts the projects that this replica plans for: all, degraded, failed, and those of which objects
    /// wait to be pruned.
    pub(crate) fn totals(&self) -> [usize; 4] {
        self.planners.totals()
    }

    /// Returns what the home of the agent knows. If none is known, the answer names no replica.
    pub(crate) async fn get(&self, request: &GetSyncRequest) -> Result<GetSyncResponse, Status> {
        let agent = agent(request.agent_id)?;
        if let Some(answer) = self.here(agent, request) {
            return Ok(answer);
        }
        match self.elsewhere(agent, GET, request, KNOWN_WITHIN).await {
            Err(status) if status.code() == tonic::Code::NotFound => {
                let waits = "no replica plans for this agent: it is not connected, its configuration names no manifest \
                             project, or a replica has just taken over";
                Ok(GetSyncResponse { waits: waits.to_owned(), ..GetSyncResponse::default() })
            }
            answer => answer,
        }
    }

    fn here(&self, agent: AgentId, request: &GetSyncRequest) -> Option<GetSyncResponse> {
        let project = Some(request.project.as_str()).filter(|project| !project.is_empty());
        let known = self.planners.get(agent, project, request.with_objects)?;
        Some(convert::answer(self.me.as_str(), known))
    }

    /// Does something at the home of the agent.
    pub(crate) async fn control(&self, request: ControlSyncRequest) -> Result<ControlSyncResponse, Status> {
        let agent = agent(request.agent_id)?;
        match self.control_here(&request).await {
            Err(status) if status.code() == tonic::Code::NotFound => {
                self.elsewhere(agent, CONTROL, &request, DONE_WITHIN).await
            }
            answer => answer,
        }
    }

    async fn control_here(&self, request: &ControlSyncRequest) -> Result<ControlSyncResponse, Status> {
        let agent = agent(request.agent_id)?;
        if request.project.is_empty() {
            return Err(Status::invalid_argument("project is needed"));
        }
        let text = |message| ControlSyncResponse { message, objects: Vec::new() };
        let done = match request.action() {
            Action::Sync => self.planners.control(agent, &request.project, Control::Sync).await.map(text),
            Action::Prune => self.planners.control(agent, &request.project, Control::Prune).await.map(text),
            action @ (Action::Destroy | Action::ShowDestroy) => {
                let is_dry = action == Action::ShowDestroy;
                let namespace = if request.namespace.is_empty() { "default" } else { &request.namespace };
                let done = self.planners.destroy(agent, &request.project, namespace, is_dry).await;
                done.map(|done| ControlSyncResponse { message: done.message, objects: done.objects })
            }
            Action::Unknown => return Err(Status::invalid_argument("action is needed")),
        };
        done.map_err(|error| convert::status(&error))
    }

    /// Makes a diff at the home of the agent.
    pub(crate) async fn diff(&self, request: DiffRequest) -> Result<DiffResponse, Status> {
        let agent = agent(request.agent_id)?;
        if self.planners.get(agent, Some(&request.project), false).is_some() {
            return self.diff_here(request, None).await;
        }
        self.elsewhere(agent, DIFF, &request, DIFF_WITHIN).await
    }

    /// Makes a diff at the home of the agent, with the rights of an identity.
    pub(super) async fn diff_for(
        &self,
        request: DiffRequest,
        run_as: Impersonation,
    ) -> Result<DiffResponse, Status> {
        let agent = agent(request.agent_id)?;
        if self.planners.get(agent, Some(&request.project), false).is_some() {
            return self.diff_here(request, Some(run_as)).await;
        }
        let run_as = Some(convert::impersonation(run_as));
        let request = DiffForRequest { diff: Some(request), run_as };
        self.elsewhere(agent, DIFF_FOR, &request, DIFF_WITHIN).await
    }

    async fn diff_here(
        &self,
        request: DiffRequest,
        run_as: Option<Impersonation>,
    ) -> Result<DiffResponse, Status> {
        let agent = agent(request.agent_id)?;
        let project = request.project.clone();
        let of = convert::diff_of(request)?;
        let made = self.planners.diff(agent, &project, of, run_as).await;
        Ok(convert::diff(made.map_err(|error| convert::status(&error))?))
    }

    /// Returns the state of an agent's projects, and again after each change.
    pub(crate) fn watch(
        self: &Arc<Self>,
        request: GetSyncRequest,
        phase: watch::Receiver<Phase>,
    ) -> Result<Watched, Status> {
        agent(request.agent_id)?;
        let watcher = Watcher {
            service: Arc::clone(self),
            changes: self.planners.changes(),
            request,
            last: None,
            phase,
            over: false,
        };
        Ok(Box::pin(stream::unfold(watcher, |mut watcher| async move {
            let answer = watcher.next().await?;
            Some((answer, watcher))
        })))
    }

    /// Asks the other replicas that hold the agent, its home first.
    async fn elsewhere<Q: Message, A: Message + Default>(
        &self,
        agent: AgentId,
        path: &str,
        question: &Q,
        within: Duration,
    ) -> Result<A, Status> {
        let not_found = || Status::not_found(format!("no replica plans for agent {agent} at the moment"));
        let Some(peers) = &self.peers else { return Err(not_found()) };
        let known = self.tracker.locate(agent).await;
        let holders = known.map_err(|error| Status::unavailable(error.to_string()))?;
        let home = home::home(agent, &holders).cloned();
        let mut others: Vec<&Candidate> = holders
            .iter()
            .filter(|holder| holder.replica.id != self.me && holder.wire == Wire::Own)
            .collect();
        others.sort_by_key(|holder| Some(&holder.replica.id) != home.as_ref());
        let message = grpc::encode(question);
        let mut failure = None;
        for holder in others {
            let asked = ask(peers, &holder.replica, path, message.clone());
            let answer = tokio::time::timeout(within, asked).await.unwrap_or_else(|_| {
                Err(Status::deadline_exceeded(format!(
                    "replica {} did not answer within {within:?}",
                    holder.replica.id
                )))
            });
            match answer {
                Err(status)
                    if matches!(
                        status.code(),
                        tonic::Code::NotFound | tonic::Code::Unavailable | tonic::Code::Unimplemented
                    ) =>
                {
                    if status.code() != tonic::Code::NotFound {
                        failure = Some(status);
                    }
                }
                answer => return answer,
            }
        }
        Err(failure.unwrap_or_else(not_found))
    }
}

/// Asks another replica.
pub(crate) async fn ask<A: Message + Default>(
    peers: &Arc<Peers>,
    replica: &Replica,
    path: &str,
    message: bytes::Bytes,
) -> Result<A, Status> {
    let unavailable = |text: String| Status::unavailable(format!("replica {}: {text}", replica.id));
    let answer = peers.peer(replica).call(path, message).await;
    let answer = answer.map_err(|error| unavailable(process::error::chain(&error)))?;
    if let Some(status) = grpc::Status::from_headers(answer.headers())
        && status.code() != Code::Ok
    {
        return Err(to_tonic(&status));
    }
    let mut reader = MessageReader::new(answer.into_body(), MAX_ANSWER);
    let first = reader.next().await.map_err(|error| unavailable(process::error::chain(&error)))?;
    let decoded = match first {
        Some(message) => Some(A::decode(message).map_err(|error| unavailable(error.to_string()))?),
        None => None,
    };
    // The status comes after the message.
    while reader.next().await.map_err(|error| unavailable(process::error::chain(&error)))?.is_some() {}
    match (decoded, reader.trailers().and_then(grpc::Status::from_headers)) {
        (Some(answer), Some(status)) if status.code() == Code::Ok => Ok(answer),
        (_, Some(status)) if status.code() != Code::Ok => Err(to_tonic(&status)),
        _ => Err(unavailable("the answer is incomplete".to_owned())),
    }
}

fn to_tonic(status: &grpc::Status) -> Status {
    Status::new(tonic::Code::from_i32(status.code().number().into()), status.message())
}

fn agent(id: i64) -> Result<AgentId, Status> {
    AgentId::new(id).map_err(|error| Status::invalid_argument(format!("agent_id: {error}, got {id}")))
}

/// A watcher of an agent's projects.
struct Watcher {
    service: Arc<SyncService>,
    changes: watch::Receiver<u64>,
    request: GetSyncRequest,
    last: Option<GetSyncResponse>,
    phase: watch::Receiver<Phase>,
    over: bool,
}

impl Watcher {
    async fn next(&mut self) -> Option<Result<GetSyncResponse, Status>> {
        loop {
            if self.over {
                return None;
            }
            if self.last.is_some() {
                let leaving = tokio::select! {
                    _ = self.changes.changed() => false,
                    () = tokio::time::sleep(ASK) => false,
                    _ = self.phase.wait_for(|phase| *phase >= Phase::Leaving) => true,
                };
                if leaving {
                    self.over = true;
                    return Some(Err(Status::unavailable("this kas is shutting down: watch again")));
                }
                tokio::time::sleep(SETTLE).await;
            }
            self.changes.borrow_and_update();
            let answer = match self.service.get(&self.request).await {
                Ok(answer) => answer,
                Err(status) => {
                    self.over = true;
                    return Some(Err(status));
                }
            };
            // The time until the next check changes always.
            let mut compared = answer.clone();
            compared.projects.iter_mut().for_each(|project| project.next_ms = None);
            if self.last.as_ref() != Some(&compared) {
                self.last = Some(compared);
                return Some(Ok(answer));
            }
        }
    }
}

/// Answers other replicas: only what this one knows.
struct Here(Arc<SyncService>);

#[tonic::async_trait]
impl SyncRpc for Here {
    async fn get(&self, request: Request<GetSyncRequest>) -> Result<Response<GetSyncResponse>, Status> {
        let request = request.into_inner();
        let found = self.0.here(agent(request.agent_id)?, &request);
        found.map(Response::new).ok_or_else(|| Status::not_found("this replica does not plan for the agent"))
    }

    async fn control(
        &self,
        request: Request<ControlSyncRequest>,
    ) -> Result<Response<ControlSyncResponse>, Status> {
        self.0.control_here(request.get_ref()).await.map(Response::new)
    }

    async fn diff(&self, request: Request<DiffRequest>) -> Result<Response<DiffResponse>, Status> {
        self.0.diff_here(request.into_inner(), None).await.map(Response::new)
    }

    async fn diff_for(&self, request: Request<DiffForRequest>) -> Result<Response<DiffResponse>, Status> {
        let DiffForRequest { diff, run_as } = request.into_inner();
        let diff = diff.ok_or_else(|| Status::invalid_argument("diff is needed"))?;
        let run_as = run_as.map(convert::identity).transpose()?;
        self.0.diff_here(diff, run_as).await.map(Response::new)
    }

    async fn environments(
        &self,
        request: Request<ListEnvironmentsRequest>,
    ) -> Result<Response<HeldEnvironments>, Status> {
        self.0.environments_here(request.get_ref()).map(Response::new)
    }
}
