//! Lists over all replicas: each is asked about its own, and who does not answer is named.

use std::{sync::Arc, time::Duration};

use cluster::{Account, AgentMeta, Belief, Connected, Connection, Load, Located, Query, Replica, Unanswered};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use grpc::MessageReader;
use ids::{AgentId, ConnectionId, ReplicaId};
use prost::Message as _;
use proto::kas::internal::v1::{
    self as wire, ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    connections_request,
};
use table::{GossipVote, StreamVote};
use tokio::time::Instant;

use super::{DIALS, Replication, UNREAD};
use crate::peer::{self, Peers};

const CONNECTIONS: &str = "/kas.internal.v1.Replica/Connections";
const EXPLAIN: &str = "/kas.internal.v1.Replica/Explain";
/// How long a replica may take for its part of a list.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// The same for one that seems dead.
pub(crate) const PATIENCE_SUSPECT: Duration = Duration::from_millis(500);
const MAX_MESSAGE: usize = 4 << 20;

pub(super) fn to_proto(connection: &Connection) -> wire::Connection {
    wire::Connection {
        agent_id: connection.agent.get(),
        connection_id: connection.id.get(),
        project_id: connection.project_id,
        name: connection.name.to_string(),
        version: connection.meta.version.clone(),
        commit: connection.meta.commit.clone(),
        pod_namespace: connection.meta.pod_namespace.clone(),
        pod_name: connection.meta.pod_name.clone(),
        connected_at: Some(prost_types::Timestamp {
            seconds: i64::try_from(connection.connected_at.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(connection.connected_at.subsec_nanos()).unwrap_or(0),
        }),
    }
}

fn of_proto(connection: wire::Connection) -> Option<Connection> {
    let at = connection.connected_at.unwrap_or_default();
    Some(Connection {
        agent: AgentId::new(connection.agent_id).ok()?,
        name: connection.name.into(),
        project_id: connection.project_id,
        id: ConnectionId::new(connection.connection_id).ok()?,
        meta: AgentMeta {
            version: connection.version,
            commit: connection.commit,
            pod_namespace: connection.pod_namespace,
            pod_name: connection.pod_name,
        },
        connected_at: Duration::new(
            u64::try_from(at.seconds).unwrap_or(0),
            u32::try_from(at.nanos).unwrap_or(0).min(999_999_999),
        ),
    })
}

impl Replication {
    /// Returns the others that may be alive, and how patient to be with each; and those that nobody can ask.
    ///
    /// Also for a list of one agent: the table tells who holds its tunnels, and an agent of 16.5 behind a balancer of calls
    /// registers wherever that leads it. To ask everybody costs a small call to each replica at once, and a list waits for
    /// nothing; to ask the rest only where the owners show nothing would hide the second process of an agent.
    fn to_ask(&self) -> (Vec<(Replica, Duration)>, Vec<Unanswered>) {
        let now = Instant::now();
        let inner = self.inner();
        let views = inner.table.replicas(now);
        // After a pause of ours nobody counts until they are heard again.
        let unsynced = inner.table.unsynced(now);
        drop(inner);
        let counts = |view: &&table::ReplicaView| view.standing <= table::Standing::Suspect;
        let known = views.iter().filter(counts).map(|view| table::Candidate {
            replica: view.replica.clone(),
            address: view.address.clone(),
            standing: view.standing,
        });
        let mut asked: Vec<(Replica, Duration)> = Vec::new();
        for candidate in known.chain(unsynced) {
            let replica = Replica { id: candidate.replica, address: candidate.address };
            if !asked.iter().any(|(known, _)| *known == replica) {
                let suspect = candidate.standing == table::Standing::Suspect;
                asked.push((replica, if suspect { PATIENCE_SUSPECT } else { PATIENCE }));
            }
        }
        let mute = views.iter().filter_map(|view| {
            let lives_there = |(other, _): &(Replica, Duration)| other.address == view.address;
            let replaced = view.address == self.me.address || asked.iter().any(lives_there);
            let reason = why_mute(view).filter(|_| !replaced)?;
            let replica = Replica { id: view.replica.clone(), address: view.address.clone() };
            Some(Unanswered { replica, reason, given_up: true })
        });
        let mute = mute.collect();
        (asked, mute)
    }

    /// Adds to this replica's own connections those of the others.
    pub(super) async fn gather(&self, query: Query, own: Connected) -> Connected {
        let mut all = own;
        let (to_ask, mute) = self.to_ask();
        all.unanswered.extend(mute);
        let mut asking: FuturesUnordered<_> = to_ask
            .into_iter()
            .map(|(replica, patience)| async move {
                let answer = tokio::time::timeout(patience, self.list(&replica, query)).await;
                (replica, answer.unwrap_or_else(|_| Err(format!("no answer within {patience:?}"))))
            })
            .collect();
        while let Some((replica, answer)) = asking.next().await {
            match answer {
                Ok(connections) => all.connections.extend(connections.into_iter().map(|connection| {
                    Located { connection: Arc::new(connection), replica: replica.clone() }
                })),
                Err(reason) => {
                    all.unanswered.push(Unanswered { replica, reason, given_up: false });
                }
            }
        }
        all.connections.sort_by(|a, b| {
            let key = |located: &Located| (located.connection.agent, located.connection.id);
            key(a).cmp(&key(b)).then_with(|| a.replica.id.cmp(&b.replica.id))
        });
        // An agentk that keeps two replicas is one connection: that of the replica which it reached first.
        all.connections.dedup_by(|later, first| {
            let key = |located: &Located| (located.connection.agent, located.connection.id);
            if key(later) != key(first) {
                return false;
            }
            if later.connection.connected_at < first.connection.connected_at {
                std::mem::swap(later, first);
            }
            true
        });
        all.unanswered.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        all
    }

    async fn list(&self, replica: &Replica, query: Query) -> Result<Vec<Connection>, String> {
        let request = ConnectionsRequest {
            query: match query {
                Query::All => None,
                Query::Agent(agent) => Some(connections_request::Query::AgentId(agent.get())),
                Query::Project(project) => Some(connections_request::Query::ProjectId(project)),
            },
        };
        let mut reader = ask(&self.peers, replica, CONNECTIONS, grpc::encode(&request)).await?;
        let mut connections = Vec::new();
        while let Some(message) = reader.next().await.map_err(|error| peer::chain(&error))? {
            let page = ConnectionsResponse::decode(message).map_err(|error| error.to_string())?;
            connections.extend(page.connections.into_iter().filter_map(of_proto));
        }
        complete(&reader)?;
        Ok(connections)
    }

    /// Asks the others about themselves and an agent.
    pub(super) async fn ask_about(&self, agent: Option<AgentId>) -> (Vec<Account>, Vec<Unanswered>) {
        let (to_ask, mute) = self.to_ask();
        let (accounts, mut unanswered) = accounts(&self.peers, to_ask, agent).await;
        unanswered.extend(mute);
        unanswered.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        (accounts, unanswered)
    }

    /// Names the replicas that are heard and cannot be dialled: they stay suspect, and nothing else says why.
    fn unreachable(&self) -> Vec<String> {
        let views = self.inner().table.replicas(Instant::now());
        let unreachable = views.into_iter().filter(|view| {
            let unanswered = matches!(view.stream, StreamVote::Unanswered | StreamVote::Refused);
            view.gossip == GossipVote::Live && unanswered && view.failures >= DIALS
        });
        unreachable
            .map(|view| {
                format!(
                    "replica {} is heard by gossip, and does not answer at {}: requests that come here do not reach its \
                     agents; check that TCP passes there",
                    view.replica, view.address
                )
            })
            .collect()
    }

    /// What is wrong with how replicas find each other, for a person.
    pub(super) fn alarms(&self) -> Vec<String> {
        let Some(gossip) = self.gossip.get() else { return vec!["gossip has not started".to_owned()] };
        let live = *self.live.borrow() - 1;
        let mut alarms = Vec::new();
        match *gossip.status().borrow() {
            gossip::Status::Lonely { since } if live > 0 => alarms.push(format!(
                "gossip has heard nobody for {:.0?} although {live} other replicas answer over TCP: UDP does not pass on \
                 the port of the private API",
                since.elapsed()
            )),
            gossip::Status::Lonely { since } => alarms.push(format!(
                "this replica has heard nobody for {:.0?} although discovery names others",
                since.elapsed()
            )),
            gossip::Status::Alone | gossip::Status::Seeking | gossip::Status::Meshed { .. } => {}
        }
        let (misplaced, refusals, unread) = {
            let inner = self.inner();
            let unread = (inner.subscribers == 0 && live > 0).then(|| inner.unread.elapsed());
            (inner.misplaced.clone(), inner.refusals.clone(), unread)
        };
        alarms.extend(misplaced);
        if let Some(since) = unread.filter(|since| *since >= UNREAD) {
            alarms.push(format!(
                "no other replica has reached this one for {since:.0?} although {live} answer it: requests that come to them \
                 do not reach its agents; check that TCP passes to {}",
                self.me.address
            ));
        }
        alarms.extend(self.unreachable());
        let mut refusals: Vec<String> = refusals
            .into_iter()
            .map(|(address, why)| format!("{address} does not show its table: {why}"))
            .collect();
        refusals.sort_unstable();
        alarms.extend(refusals);
        alarms
    }
}

/// Why a replica is not asked that may hold agents all the same: agents reach it by another way than this replica does.
/// One that said that it left holds none.
fn why_mute(view: &table::ReplicaView) -> Option<String> {
    if view.state == table::State::Left {
        return None;
    }
    let heard = view.proof_age.as_secs();
    match view.standing {
        table::Standing::Unreachable => Some(format!("nobody listens there; it was heard {heard} s ago")),
        table::Standing::Gone => {
            Some(format!("gone without a word that it leaves; it was heard {heard} s ago"))
        }
        table::Standing::Live | table::Standing::Draining | table::Standing::Suspect => None,
    }
}

/// Asks replicas about themselves and an agent, each with its patience.
pub(crate) async fn accounts(
    peers: &Arc<Peers>,
    to_ask: Vec<(Replica, Duration)>,
    agent: Option<AgentId>,
) -> (Vec<Account>, Vec<Unanswered>) {
    let mut asking: FuturesUnordered<_> = to_ask
        .into_iter()
        .map(|(replica, patience)| async move {
            let answer = tokio::time::timeout(patience, account(peers, &replica, agent)).await;
            (replica, answer.unwrap_or_else(|_| Err(format!("no answer within {patience:?}"))))
        })
        .collect();
    let (mut accounts, mut unanswered) = (Vec::new(), Vec::new());
    while let Some((replica, answer)) = asking.next().await {
        match answer {
            Ok(account) => accounts.push(account),
            Err(reason) => unanswered.push(Unanswered { replica, reason, given_up: false }),
        }
    }
    accounts.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
    unanswered.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
    (accounts, unanswered)
}

/// Asks a replica about itself and an agent.
pub(crate) async fn account(
    peers: &Arc<Peers>,
    replica: &Replica,
    agent: Option<AgentId>,
) -> Result<Account, String> {
    let request = ExplainRequest { agent_id: agent.map_or(0, AgentId::get) };
    let mut reader = ask(peers, replica, EXPLAIN, grpc::encode(&request)).await?;
    let Some(message) = reader.next().await.map_err(|error| peer::chain(&error))? else {
        complete(&reader)?;
        return Err("it answered nothing".to_owned());
    };
    let told = ExplainResponse::decode(message).map_err(|error| error.to_string())?;
    let belief = |belief: wire::Belief| Belief {
        // Its address as the other believes it does not matter here.
        replica: Replica { id: ReplicaId::new(&belief.replica), address: Arc::default() },
        holds: belief.holds,
        why: belief.why,
    };
    Ok(Account {
        replica: replica.clone(),
        tunnels: told.tunnels,
        load: told.requests_ended.map(|ended| Load {
            ended,
            open: told.requests_open.unwrap_or(0),
            waiting: told.requests_waiting.unwrap_or(0),
        }),
        idle: told.idle,
        busy: told.busy,
        waiting: told.waiting,
        beliefs: told.beliefs.into_iter().map(belief).collect(),
    })
}

async fn ask(
    peers: &Arc<Peers>,
    replica: &Replica,
    path: &str,
    message: bytes::Bytes,
) -> Result<MessageReader<peer::link::RecvBody>, String> {
    let answer = peers.peer(replica).call(path, message).await.map_err(|error| peer::chain(&error))?;
    match grpc::Status::from_headers(answer.headers()) {
        Some(status) if status.code() != grpc::Code::Ok => Err(status.to_string()),
        _ => Ok(MessageReader::new(answer.into_body(), MAX_MESSAGE)),
    }
}

/// Whether an answer came to its end.
fn complete(reader: &MessageReader<peer::link::RecvBody>) -> Result<(), String> {
    match reader.trailers().and_then(grpc::Status::from_headers) {
        Some(status) if status.code() == grpc::Code::Ok => Ok(()),
        Some(status) => Err(status.to_string()),
        None => Err("the answer was cut".to_owned()),
    }
}
