//! The search for a tunnel: at this replica and at those that the tracker names, until the deadline.

use std::{collections::HashMap, pin::Pin, sync::Arc};

use cluster::{Abandoned, Candidate, Mark, ReplicaHealth, Wire};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use grpc::{Code, Deadline, Outcome, Status};
use http::{HeaderMap, HeaderValue};
use ids::{AgentId, ConnectionId, ReplicaId};
use tokio::time::{Duration, Instant};

use super::{RouteTrace, Router};
use crate::{
    metrics::{AskAnswer, Side},
    peer::{
        self, Ask, Lent, Refusal, gitlab,
        lease_pool::{LeasedTunnel, PoolWaiter},
    },
    refusal,
    registry::{Acquired, Gone, Grant, Needs, Refused, Waiting},
};
use observe::refusals::{ListenerName, Reason};

/// An owner that could not be asked is asked again after the first time, which doubles up to the second one.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// At the deadline, the owners that were asked answer that no tunnel was idle, and why. Their answers may
/// take this long.
const LAST_ANSWERS: Duration = Duration::from_millis(100);

/// A tunnel for the request.
pub(super) enum Found {
    /// A tunnel of this replica.
    Own(Grant),
    /// A tunnel of another replica.
    Lent(Lent, ReplicaId),
    /// A tunnel of another replica that was leased for an earlier request.
    Leased(LeasedTunnel),
}

/// The request that needs a tunnel.
pub(super) struct Search<'a> {
    pub(super) router: &'a Router,
    pub(super) agent: AgentId,
    pub(super) connection: Option<ConnectionId>,
    pub(super) method: &'a Arc<str>,
    /// The headers of the caller, which a replica of GitLab's kas receives with the borrow request.
    pub(super) headers: &'a HeaderMap,
    pub(super) needs: Needs,
    /// See [`AgentRequest::is_long`](super::AgentRequest::is_long).
    pub(super) is_long: bool,
    pub(super) deadline: Deadline,
    /// See [`AgentRequest`](super::AgentRequest::wait_until).
    pub(super) wait_until: Option<Instant>,
    pub(super) correlation: &'a HeaderValue,
    pub(super) arrived: Instant,
    pub(super) trace: &'a RouteTrace,
}

/// The owners that were asked.
#[derive(Default)]
struct Owners {
    asked: HashMap<ReplicaId, Asked>,
    /// Those whose tunnels are all occupied by abandoned requests.
    abandoned: HashMap<ReplicaId, Abandoned>,
}

/// The state of an owner that was asked.
enum Asked {
    /// It has not answered yet. If it must be asked again, then after this time.
    Now(Duration),
    /// It refused. It is asked again only if the tracker reports a change.
    Refused,
    /// It could not be asked, and is asked again at this time.
    Later(Instant, Duration),
    /// It had no tunnel. It is asked again at this time, or if the tracker reports a change.
    Absent(Instant, Duration),
}

type Asking = Pin<Box<dyn Future<Output = (ReplicaId, Wire, Result<Lent, Refusal>)> + Send>>;

impl Search<'_> {
    /// Looks for an idle tunnel of this replica.
    pub(super) fn own(&self) -> Option<Grant> {
        self.router.registry.take(self.agent, self.method, self.connection, self.needs)
    }

    /// Looks for a leased tunnel of another replica, and notes that a request begins.
    pub(super) async fn leased(&self) -> Option<LeasedTunnel> {
        if !self.uses_leases() {
            return None;
        }
        self.router.leases.take(self.agent, self.method, self.needs.features).await
    }

    /// Whether a tunnel that is leased for several requests may carry this one.
    fn uses_leases(&self) -> bool {
        self.router.peers.is_some() && self.connection.is_none() && !self.is_long
    }

    fn refused(&self, refused: Refused) -> Status {
        if refused == Refused::Full {
            self.router.refusals.refused(ListenerName::Api, Reason::WaitersFull);
        }
        refusal::status(refused, self.agent, self.connection, self.method)
    }

    /// Waits for a tunnel of this replica and asks other replicas, until the deadline. A request without a
    /// deadline waits for the configured time.
    pub(super) async fn anywhere(&self) -> Result<Found, Status> {
        let router = self.router;
        // Before the first lookup, so that no change is missed.
        let mut changes = router.tracker.changes(self.agent);
        let (mut waiting, mut refused) =
            match router.registry.acquire(self.agent, self.method, self.connection, self.needs) {
                Ok(Acquired::Now(grant)) => return Ok(Found::Own(grant)),
                Ok(Acquired::Wait(waiting)) => (Some(waiting), None),
                Err(full @ Refused::Full) => return Err(self.refused(full)),
                // Another replica may know this connection, or an agentk that can serve the request.
                Err(other) => (None, Some(self.refused(other))),
            };
        let mut waiter = None;
        if self.uses_leases() {
            match router.leases.acquire(self.agent, self.method, self.needs.features) {
                Ok(leased) => return Ok(Found::Leased(leased)),
                Err(waiting) => waiter = waiting,
            }
        }
        if waiting.is_some() {
            self.trace.note(|| "no tunnel of this replica is idle: waiting".to_owned());
        }
        let until = self.wait_until.or(self.deadline.instant()).unwrap_or(self.arrived + router.find_timeout);
        let deadline = tokio::time::sleep_until(until);
        tokio::pin!(deadline);
        let mut asking: FuturesUnordered<Asking> = FuturesUnordered::new();
        let mut owners = Owners::default();
        let mut hedge_at: Option<Instant> = None;
        loop {
            changes.borrow_and_update();
            let candidates = self.candidates().await;
            if !self.needs.features.is_empty() {
                self.pass_over_gitlab(&candidates, &mut owners, &mut refused);
            }
            let now = Instant::now();
            let due = |owners: &Owners, candidate: &Candidate| match owners.asked.get(&candidate.replica.id) {
                None => true,
                Some(Asked::Later(at, _) | Asked::Absent(at, _)) => *at <= now,
                Some(Asked::Now(_) | Asked::Refused) => false,
            };
            // A connection may be at any replica, so all of them are asked immediately.
            while asking.is_empty() || self.connection.is_some() || hedge_at.is_none_or(|at| at <= now) {
                let Some(next) = candidates.iter().find(|candidate| due(&owners, candidate)) else { break };
                if !asking.is_empty() && self.connection.is_none() {
                    router.metrics.hedges.inc();
                }
                hedge_at = Some(now + self.ask(next, until, &asking, &mut owners.asked));
            }
            // Every replica that may hold the agent has refused.
            let refuses = |candidate: &Candidate| {
                matches!(owners.asked.get(&candidate.replica.id), Some(Asked::Refused))
            };
            let hopeless = asking.is_empty() && waiting.is_none() && candidates.iter().all(refuses);
            let everyone_refused = asking.is_empty()
                && !candidates.is_empty()
                && candidates.iter().all(refuses)
                && !router.registry.holds(self.agent);
            if (hopeless || everyone_refused)
                && let Some(status) = refused.take()
            {
                return Err(status);
            }
            let again = owners
                .asked
                .values()
                .filter_map(|asked| match asked {
                    Asked::Later(at, _) | Asked::Absent(at, _) => Some(*at),
                    Asked::Now(_) | Asked::Refused => None,
                })
                .min();
            let more = candidates.iter().any(|candidate| due(&owners, candidate));
            let wake = [again.filter(|at| *at > now), hedge_at.filter(|_| more && !asking.is_empty())]
                .into_iter()
                .flatten()
                .min();
            tokio::select! {
                biased;
                granted = granted(&mut waiting) => match granted {
                    Ok(grant) => return Ok(Found::Own(grant)),
                    // Another replica may still serve the request.
                    Err(Gone::Refused(why)) => {
                        waiting = None;
                        refused = Some(self.refused(why));
                    }
                    Err(Gone::Leaving | Gone::NotHere(_)) => {
                        let text = "this kas is shutting down: repeat the request";
                        return Err(Status::new(Code::Unavailable, text).with_outcome(Outcome::NotStarted));
                    }
                },
                leased = handed(&mut waiter) => return Ok(Found::Leased(leased)),
                Some((owner, wire, answer)) = asking.next() => {
                    match answer {
                        Ok(lent) => {
                            self.count(wire, AskAnswer::Ready);
                            return Ok(Found::Lent(lent, owner));
                        }
                        Err(refusal) => self.learn(owner, wire, refusal, &mut owners, &mut refused),
                    }
                    hedge_at = None;
                }
                // The tracker lives as long as the router.
                _ = changes.changed() => {
                    // A replica that refused may have another agentk by now, and an absent agent may have
                    // connected.
                    owners.asked.retain(|_, asked| !matches!(asked, Asked::Refused | Asked::Absent(..)));
                    hedge_at = None;
                }
                () = at(wake) => {}
                () = &mut deadline => break,
            }
        }
        // A tunnel that is lent now comes too late. It is returned unused.
        let last_answers = async {
            while let Some((owner, wire, answer)) = asking.next().await {
                if let Err(refusal) = answer {
                    self.learn(owner, wire, refusal, &mut owners, &mut refused);
                }
            }
        };
        let _ = tokio::time::timeout(LAST_ANSWERS, last_answers).await;
        Err(router.not_found(self.agent, self.deadline, self.arrived, &owners.abandoned).await)
    }

    /// Counts replicas of GitLab's kas as such that refuse a request with needs: they do not tell what their
    /// agentk supports.
    fn pass_over_gitlab(&self, candidates: &[Candidate], owners: &mut Owners, refused: &mut Option<Status>) {
        for candidate in candidates.iter().filter(|candidate| candidate.wire == Wire::Gitlab) {
            let owner = &candidate.replica.id;
            if owners.asked.insert(owner.clone(), Asked::Refused).is_none() {
                self.trace.note(|| format!("{owner} is of GitLab's kas and is not asked"));
            }
            refused.get_or_insert_with(|| refusal::of_gitlab(self.agent, owner, self.needs.features));
        }
    }

    async fn candidates(&self) -> Vec<Candidate> {
        let router = self.router;
        if router.peers.is_none() {
            return Vec::new();
        }
        let mut candidates = match router.tracker.locate(self.agent).await {
            Ok(candidates) => candidates,
            Err(error) => {
                self.trace.note(|| format!("the tracker cannot be asked: {error}"));
                tracing::debug!(error = %error, "the tracker cannot be asked");
                return Vec::new();
            }
        };
        candidates.retain(|candidate| {
            // Replicas of GitLab's kas do not know connections.
            candidate.replica.id != router.me && (candidate.wire == Wire::Own || self.connection.is_none())
        });
        peer::spread(&mut candidates, usize::from(rand::random::<u8>()));
        candidates
    }

    fn count(&self, wire: Wire, answer: AskAnswer) {
        match wire {
            Wire::Own => self.router.metrics.asked(Side::Asked, answer),
            Wire::Gitlab => self.router.metrics.asked_gitlab(Side::Asked, answer),
        }
    }

    /// Asks an owner, which may wait `until` then. Returns the time after which another one should be asked
    /// too.
    fn ask(
        &self,
        candidate: &Candidate,
        until: Instant,
        asking: &FuturesUnordered<Asking>,
        asked: &mut HashMap<ReplicaId, Asked>,
    ) -> Duration {
        let Some(peers) = &self.router.peers else { return Duration::ZERO };
        let owner = candidate.replica.id.clone();
        self.trace.note(|| format!("asking replica {owner}, which is {}", candidate.health));
        let pause = match asked.get(&owner) {
            Some(Asked::Later(_, pause) | Asked::Absent(_, pause)) => (*pause * 2).min(AGAIN.1),
            _ => AGAIN.0,
        };
        asked.insert(owner.clone(), Asked::Now(pause));
        let ask = Ask {
            agent: self.agent,
            connection: self.connection,
            method: Arc::clone(self.method),
            correlation: self.correlation.clone(),
            deadline: self.deadline,
            until,
            again: self.uses_leases() && self.router.leases.is_hot(self.agent, self.method),
            needs: self.needs.features,
            is_long: self.is_long,
            is_endless: self.needs.is_endless,
        };
        let wire = candidate.wire;
        if wire == Wire::Gitlab {
            let headers = self.headers.clone();
            let gateway = peers.gateway(&candidate.replica.address);
            asking.push(Box::pin(async move {
                let answer = match gateway {
                    Ok(gateway) => gateway.ask(ask, headers).await,
                    Err(why) => Err(Refusal::Unavailable(why)),
                };
                (owner, wire, answer)
            }));
            return gitlab::HEDGE;
        }
        let peer = peers.peer(&candidate.replica);
        let (hedge, health) = (peer.hedge(), candidate.health);
        asking.push(Box::pin(async move { (owner, wire, peer.ask(health, ask).await) }));
        if health == ReplicaHealth::Suspect { Duration::ZERO } else { hedge }
    }

    /// Handles the answer of an owner that lends no tunnel.
    fn learn(
        &self,
        owner: ReplicaId,
        wire: Wire,
        refusal: Refusal,
        owners: &mut Owners,
        refused: &mut Option<Status>,
    ) {
        let router = self.router;
        let Owners { asked, abandoned } = owners;
        abandoned.remove(&owner);
        let pause = match asked.get(&owner) {
            Some(Asked::Now(pause)) => *pause,
            _ => AGAIN.0,
        };
        let at = Instant::now() + pause;
        let later = Asked::Later(at, pause);
        match refusal {
            Refusal::NotHere(mark) => {
                self.count(wire, AskAnswer::NotHere);
                self.trace.note(|| format!("replica {owner} has no tunnel of the agent"));
                router.tracker.not_here(&owner, self.agent, mark);
                asked.insert(owner, Asked::Absent(at, pause));
            }
            Refusal::NotThere => {
                self.count(wire, AskAnswer::NotHere);
                self.trace.note(|| format!("{owner} has no tunnel of the agent"));
                router.tracker.not_here(&owner, self.agent, Mark::default());
                asked.insert(owner, Asked::Absent(at, pause));
            }
            Refusal::Busy(all_abandoned) => {
                self.trace
                    .note(|| format!("replica {owner} had no idle tunnel of the agent until the deadline"));
                if let Some(all_abandoned) = all_abandoned {
                    abandoned.insert(owner.clone(), all_abandoned);
                }
                asked.insert(owner, later);
            }
            Refusal::Final(status) => {
                self.count(wire, AskAnswer::Refused);
                self.trace.note(|| format!("replica {owner} refuses: {}", status.message()));
                *refused = Some(status);
                asked.insert(owner, Asked::Refused);
            }
            Refusal::Unavailable(why) => {
                self.count(wire, AskAnswer::Unavailable);
                self.trace.note(|| format!("replica {owner} cannot be asked: {why}"));
                tracing::debug!(replica = %owner, agent.id = self.agent.get(), why, "a replica could not be asked");
                asked.insert(owner, later);
            }
        }
    }
}

async fn granted(waiting: &mut Option<Waiting>) -> Result<Grant, Gone> {
    match waiting {
        Some(waiting) => waiting.granted().await,
        None => std::future::pending().await,
    }
}

async fn handed(waiter: &mut Option<PoolWaiter>) -> LeasedTunnel {
    match waiter {
        Some(waiter) => waiter.handed().await,
        None => std::future::pending().await,
    }
}

async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
