//! Tells the holders of each agent which hooks it has: the replicas that read its configuration do.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use agent_config::KasState;
use aws_lc_rs::digest;
use bytes::Bytes;
use ids::{AgentId, ReplicaId};
use mailbox::Confirmed;
use proto::kas::internal::v1::{DefineRequest, DefineResponse, define_request::Confirmation};
use tokio::time::{Instant, timeout};

use super::post::Post;
use crate::sync::{HeldAgents, ask};

const DEFINE: &str = "/kas.internal.v1.Mailbox/Define";
/// How often changes of the configurations of agents are looked for.
const LOOK: Duration = Duration::from_millis(500);
/// How often everything is confirmed.
const CONFIRM: Duration = Duration::from_secs(30);
/// How long another replica may take for an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Agents in one question, and bytes of their hooks.
const MOST: (usize, usize) = (2_000, 1 << 20);

/// What was told about an agent.
#[derive(Clone, PartialEq, Eq)]
struct Told {
    hash: [u8; 32],
    holders: Vec<ReplicaId>,
}

/// Reads the hooks of the agents of this replica.
pub(crate) struct Readers {
    post: Arc<Post>,
    held: Arc<HeldAgents>,
}

impl Readers {
    pub(crate) fn new(post: Arc<Post>, held: Arc<HeldAgents>) -> Self {
        Self { post, held }
    }

    /// Tells until dropped.
    pub(crate) async fn run(self) {
        let mut told: HashMap<AgentId, Told> = HashMap::new();
        let mut confirm = Instant::now();
        loop {
            let all = Instant::now() >= confirm;
            if all {
                confirm = Instant::now() + CONFIRM;
            }
            let mut news: HashMap<AgentId, Told> = HashMap::new();
            let mut to_tell: BTreeMap<ReplicaId, Vec<(AgentId, [u8; 32], Bytes)>> = BTreeMap::new();
            for (agent, state) in self.held.files() {
                // A wrong file changes nothing, nor does one that cannot be read.
                let Ok(KasState { good: Some(file), .. }) = state else { continue };
                let hooks = Bytes::copy_from_slice(file.hooks.json().as_bytes());
                let mut holders = self.post.order(agent.id);
                holders.truncate(2);
                let it = Told { hash: hash(&hooks), holders };
                let before = told.get(&agent.id);
                for holder in &it.holders {
                    let knows =
                        before.is_some_and(|told| told.hash == it.hash && told.holders.contains(holder));
                    if all || !knows {
                        to_tell.entry(holder.clone()).or_default().push((agent.id, it.hash, hooks.clone()));
                    }
                }
                news.insert(agent.id, it);
            }
            for (holder, agents) in to_tell {
                if !self.tell(&holder, agents.clone()).await {
                    // It is told again at once when it can be.
                    for (agent, ..) in agents {
                        if let Some(it) = news.get_mut(&agent) {
                            it.holders.retain(|known| *known != holder);
                        }
                    }
                }
            }
            told = news;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Tells a holder. Returns whether it knows all now.
    async fn tell(&self, holder: &ReplicaId, agents: Vec<(AgentId, [u8; 32], Bytes)>) -> bool {
        if holder == self.post.me() {
            for (agent, hash, hooks) in agents {
                if self.post.confirm(agent, hash, Some(hooks)) == Confirmed::Full {
                    full(agent);
                }
            }
            return true;
        }
        for part in agents.chunks(MOST.0) {
            let hashes = part.iter().map(|(agent, hash, _)| confirmation(*agent, hash, None)).collect();
            let Some(answer) = self.define(holder, hashes).await else { return false };
            let wanted = part.iter().filter(|(agent, ..)| answer.wanted.contains(&agent.get()));
            let mut confirmations = Vec::new();
            let mut bytes = 0;
            for (agent, hash, hooks) in wanted {
                bytes += hooks.len();
                confirmations.push(confirmation(*agent, hash, Some(hooks.clone())));
                if bytes >= MOST.1 {
                    bytes = 0;
                    if self.define(holder, std::mem::take(&mut confirmations)).await.is_none() {
                        return false;
                    }
                }
            }
            if !confirmations.is_empty() && self.define(holder, confirmations).await.is_none() {
                return false;
            }
        }
        true
    }

    async fn define(&self, holder: &ReplicaId, confirmations: Vec<Confirmation>) -> Option<DefineResponse> {
        let (peers, replica) = self.post.peer(holder)?;
        let message = grpc::encode(&DefineRequest { confirmations });
        match timeout(ANSWER, ask::<DefineResponse>(&peers, &replica, DEFINE, message)).await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(status)) => {
                tracing::debug!(peer.id = %holder, %status, "a replica could not be told of hooks");
                None
            }
            Err(_) => None,
        }
    }
}

impl Post {
    /// Takes what a reader at another replica tells.
    ///
    /// # Errors
    /// If something in it is invalid.
    pub(crate) fn define(&self, request: DefineRequest) -> Result<DefineResponse, tonic::Status> {
        let invalid = |text: &str| tonic::Status::invalid_argument(text);
        if request.confirmations.len() > 2 * MOST.0 {
            return Err(invalid("confirmations: there are too many"));
        }
        let mut wanted = Vec::new();
        for Confirmation { agent_id, hash: told, hooks } in request.confirmations {
            let agent = AgentId::new(agent_id).map_err(|error| invalid(&format!("agent_id: {error}")))?;
            let told = <[u8; 32]>::try_from(&told[..]).map_err(|_| invalid("hash: expected 32 bytes"))?;
            if let Some(hooks) = &hooks
                && (hooks.len() > agent_config::kas_yaml::hooks::MOST_BYTES || hash(hooks) != told)
            {
                return Err(invalid("hooks: too many bytes, or not those of the hash"));
            }
            match self.confirm(agent, told, hooks) {
                Confirmed::Kept => {}
                Confirmed::Wanted => wanted.push(agent_id),
                Confirmed::Full => full(agent),
            }
        }
        Ok(DefineResponse { wanted })
    }
}

fn full(agent: AgentId) {
    tracing::debug!(agent.id = agent.get(), "the hooks of an agent are not kept: there are too many");
}

fn confirmation(agent: AgentId, hash: &[u8; 32], hooks: Option<Bytes>) -> Confirmation {
    Confirmation { agent_id: agent.get(), hash: Bytes::copy_from_slice(hash), hooks }
}

fn hash(hooks: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest::digest(&digest::SHA256, hooks).as_ref());
    hash
}
