//! [`Post`]: drives the mailbox of this replica.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use cluster::{Replica, ReplicaHealth, ReplicaState, Tracker};
use ids::{AgentId, ReplicaId};
use mailbox::{
    Accepted, Answer, Batch, Confirmed, Copies, Definition, Delivery, Failure, Limits, Listed, Mailbox,
    Member, MessageId, NewHook, Outcome, Refused, Time,
};
use parking_lot::Mutex;
use proto::kas::internal::v1::ExchangeResponse;
use routing::{peer::Peers, router::Router};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};

use super::{
    convert,
    metrics::{ABSENT, MailboxMetrics},
};
use crate::sync::ask;

const EXCHANGE: &str = "/kas.internal.v1.Mailbox/Exchange";
/// How often the members are looked at.
const LOOK: Duration = Duration::from_millis(250);
/// How long another replica may take for an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// A replica that has no mailbox is no member for this long.
const INCAPABLE: Duration = Duration::from_secs(60);
/// How often it is looked whether an agent is connected, if nothing tells.
const PRESENCE: Duration = Duration::from_secs(5);
/// How long a replica that leaves waits until others have its hooks.
const HAND_OVER: Duration = Duration::from_secs(15);
/// The pause between two looks at that.
const HAND_OVER_LOOK: Duration = Duration::from_millis(20);

/// What came of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It was taken.
    Done,
    /// It is tried again, because of this.
    Again(String),
    /// It is a dead letter, because of this.
    Dead(String),
    /// The agent is not connected.
    Absent,
}

/// Why a hook is a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Died {
    /// What it was delivered to does not want it, or there is nothing to deliver it to.
    Refused,
    /// It was not delivered in time.
    Late,
}

/// Delivers hooks.
#[async_trait]
pub(crate) trait Deliver: Send + Sync + 'static {
    /// Delivers a hook. `hooks` are those of the agent, if they are known.
    async fn deliver(&self, delivery: Delivery, hooks: Option<Definition>) -> Sent;

    /// Records that a hook has become a dead letter at its home.
    fn died(&self, id: MessageId, agent: AgentId, hook: &str, why: Died);
}

/// The mailbox of this replica.
pub(crate) struct Post {
    me: ReplicaId,
    begun: Instant,
    mailbox: Mutex<Mailbox>,
    /// Something is to be done.
    wake: Notify,
    /// More is known of some message.
    known: Notify,
    tracker: Arc<dyn Tracker>,
    /// `None`: there are no other replicas.
    peers: Option<Arc<Peers>>,
    router: Arc<Router>,
    replicas: Mutex<HashMap<ReplicaId, Replica>>,
    /// Replicas without a mailbox, and until when they are left out.
    incapable: Mutex<HashMap<ReplicaId, Instant>>,
    draining: AtomicBool,
    metrics: Arc<MailboxMetrics>,
}

impl std::fmt::Debug for Post {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Post {
    /// Returns an empty mailbox. It does nothing until [`run`](Self::run).
    pub(crate) fn new(
        me: ReplicaId,
        tracker: Arc<dyn Tracker>,
        peers: Option<Arc<Peers>>,
        router: Arc<Router>,
        metrics: Arc<MailboxMetrics>,
    ) -> Arc<Self> {
        let mailbox = Mailbox::new(me.clone(), rand::random(), Limits::default(), Time(0));
        Arc::new(Self {
            me,
            begun: Instant::now(),
            mailbox: Mutex::new(mailbox),
            wake: Notify::new(),
            known: Notify::new(),
            tracker,
            peers,
            router,
            replicas: Mutex::default(),
            incapable: Mutex::default(),
            draining: AtomicBool::new(false),
            metrics,
        })
    }

    fn now(&self) -> Time {
        Time(i64::try_from(self.begun.elapsed().as_millis()).unwrap_or(i64::MAX))
    }

    /// Returns this replica.
    pub(crate) fn me(&self) -> &ReplicaId {
        &self.me
    }

    /// Returns the replicas to ask for an agent, its home first.
    pub(crate) fn order(&self, agent: AgentId) -> Vec<ReplicaId> {
        self.mailbox.lock().order(agent)
    }

    /// Returns the links to other replicas, and a replica by its name; `None`: it is not known.
    pub(crate) fn peer(&self, id: &ReplicaId) -> Option<(Arc<Peers>, Replica)> {
        Some((Arc::clone(self.peers.as_ref()?), self.replicas.lock().get(id)?.clone()))
    }

    /// Whether this replica keeps hooks.
    pub(crate) fn is_open(&self) -> bool {
        !self.draining.load(Ordering::Relaxed) && self.mailbox.lock().is_member()
    }

    /// Whether this replica has been the home of an agent for so long.
    pub(crate) fn was_home_for(&self, agent: AgentId, long: Duration) -> bool {
        self.mailbox.lock().was_home_for(agent, long, self.now())
    }

    /// Returns the hooks of an agent; `None`: they are not known.
    pub(crate) fn definition(&self, agent: AgentId) -> Option<Definition> {
        self.mailbox.lock().definition(agent, self.now())
    }

    /// Notes the hooks of an agent, as a reader of its configuration tells them.
    pub(crate) fn confirm(&self, agent: AgentId, hash: [u8; 32], hooks: Option<Bytes>) -> Confirmed {
        let confirmed = self.mailbox.lock().confirm(agent, hash, hooks, self.now());
        self.wake.notify_one();
        confirmed
    }

    /// Keeps a hook.
    ///
    /// # Errors
    /// See [`Refused`].
    pub(crate) fn accept(&self, hook: NewHook) -> Result<Accepted, Refused> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Refused::NotReady);
        }
        let accepted = self.mailbox.lock().accept(hook, self.now())?;
        self.wake.notify_one();
        Ok(accepted)
    }

    /// Waits until a message is on two replicas, or for the given time.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn copied(&self, id: MessageId, within: Duration) -> Copies {
        let until = Instant::now() + within;
        loop {
            let known = self.known.notified();
            let copies = self.mailbox.lock().copies(id);
            if copies.enough {
                return copies;
            }
            tokio::select! {
                () = known => {}
                () = sleep_until(until) => return self.mailbox.lock().copies(id),
            }
        }
    }

    /// Takes what another replica tells.
    pub(crate) fn receive(&self, from: &ReplicaId, batch: Batch) -> Answer {
        let (answer, known) = self.mailbox.lock().receive(from, batch, self.now());
        self.wake.notify_one();
        if !known.is_empty() {
            self.known.notify_waiters();
        }
        answer
    }

    /// Lists the messages of an agent that are not over.
    pub(crate) fn list(&self, agent: AgentId, most: usize) -> Vec<Listed> {
        self.mailbox.lock().list(agent, most, self.now())
    }

    /// Lets a dead letter be delivered again. Returns whether there is such a one here, and room for it.
    pub(crate) fn replay(&self, id: MessageId) -> bool {
        let replayed = self.mailbox.lock().replay(id, self.now());
        self.wake.notify_one();
        replayed
    }

    /// This replica leaves: others get what it keeps.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    /// Waits until others have what this replica keeps, at most 15 s.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn hand_over(self: Arc<Self>) {
        let until = Instant::now() + HAND_OVER;
        let mut left = self.left();
        while left > 0 && self.peers.is_some() && Instant::now() < until {
            // Without another member nobody takes them.
            if self.mailbox.lock().is_member() {
                self.look().await;
                if self.mailbox.lock().is_member() {
                    break;
                }
            }
            tokio::time::sleep(HAND_OVER_LOOK).await;
            left = self.left();
        }
        // One that is still being delivered here is not lost if another replica has it: that one delivers it
        // again.
        let lost = self.mailbox.lock().only_here();
        if lost > 0 {
            self.metrics.lost(lost);
            tracing::warn!(
                hooks = lost,
                "hooks that were not delivered yet are lost: no other replica has taken them from this one, which stops"
            );
        }
    }

    /// Counts what waits or is a dead letter here.
    fn left(&self) -> usize {
        let totals = self.mailbox.lock().totals(self.now());
        totals.waiting + totals.dead
    }

    /// Looks at the members.
    async fn look(&self) {
        let known = self.tracker.replicas().await.replicas;
        let now = Instant::now();
        let mut incapable = self.incapable.lock();
        incapable.retain(|_, until| *until > now);
        let ready = known.into_iter().filter(|status| {
            let is_live = match status.health {
                // Whoever drains is none of the members that others see, either.
                None => !self.draining.load(Ordering::Relaxed),
                Some(health) => health == ReplicaHealth::Live && !incapable.contains_key(&status.replica.id),
            };
            is_live && status.state == ReplicaState::Ready
        });
        let mut replicas = HashMap::new();
        let mut members: Vec<Member> = Vec::new();
        for status in ready {
            members.push(Member { id: status.replica.id.clone(), epoch: status.mark.epoch });
            replicas.insert(status.replica.id.clone(), status.replica);
        }
        drop(incapable);
        if members.is_empty() && self.draining.load(Ordering::Relaxed) {
            // Nobody else is there: it goes on delivering for as long as it can.
            members.push(Member { id: self.me.clone(), epoch: 0 });
        }
        *self.replicas.lock() = replicas;
        self.mailbox.lock().set_members(members, self.now());
    }

    /// Drives the mailbox until dropped.
    pub(crate) async fn run(self: Arc<Self>, deliver: Arc<dyn Deliver>) {
        let mut tasks = JoinSet::new();
        let watched = Arc::new(Mutex::new(HashSet::new()));
        let mut live = self.tracker.live();
        let mut next_look = Instant::now();
        let mut next_tick = Instant::now();
        loop {
            while tasks.try_join_next().is_some() {}
            let now = Instant::now();
            if now >= next_look {
                self.look().await;
                next_look = now + LOOK;
            }
            if now >= next_tick {
                let (died, dropped) = self.mailbox.lock().tick(self.now());
                let totals = self.mailbox.lock().totals(self.now());
                self.metrics.ticked(died.len(), dropped);
                for late in died.iter().filter(|late| late.is_home) {
                    deliver.died(late.id, late.agent, &late.hook, Died::Late);
                }
                self.metrics.totals(totals);
                next_tick = now + LOOK;
            }
            self.act(&mut tasks, &watched, &deliver);
            let wake = self.mailbox.lock().next_wake(self.now(), LOOK);
            let pause =
                Duration::from_millis(u64::try_from(wake.0.saturating_sub(self.now().0)).unwrap_or(0));
            tokio::select! {
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
                changed = live.changed(), if !live_is_closed(&live) => {
                    if changed.is_ok() {
                        next_look = Instant::now();
                    }
                }
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
            }
        }
    }

    /// Begins everything that is due.
    fn act(
        self: &Arc<Self>,
        tasks: &mut JoinSet<()>,
        watched: &Arc<Mutex<HashSet<AgentId>>>,
        deliver: &Arc<dyn Deliver>,
    ) {
        let mut mailbox = self.mailbox.lock();
        while let Some((to, batch)) = mailbox.next_exchange(self.now()) {
            tasks.spawn(Arc::clone(self).exchange(to, batch));
        }
        while let Some(delivery) = mailbox.next_delivery(self.now()) {
            let hooks = mailbox.definition(delivery.message.agent, self.now());
            tasks.spawn(Arc::clone(self).deliver(Arc::clone(deliver), delivery, hooks));
        }
        let mut watching = watched.lock();
        let news: Vec<AgentId> = mailbox.absent().filter(|agent| watching.insert(*agent)).collect();
        for agent in news {
            tasks.spawn(Arc::clone(self).watch(agent, Arc::clone(watched)));
        }
    }

    async fn exchange(self: Arc<Self>, to: ReplicaId, batch: Batch) {
        let answer = match self.peer(&to) {
            None => Err(tonic::Status::unavailable("it is not known")),
            Some((peers, replica)) => {
                let message = grpc::encode(&convert::batch_to_wire(self.me.as_str(), &batch));
                let asked = ask::<ExchangeResponse>(&peers, &replica, EXCHANGE, message);
                timeout(ANSWER, asked).await.unwrap_or_else(|_| {
                    Err(tonic::Status::deadline_exceeded(format!("no answer within {ANSWER:?}")))
                })
            }
        };
        let answer = answer.map(convert::answer).inspect_err(|status| {
            self.metrics.exchange_failed();
            tracing::debug!(peer.id = %to, %status, "hooks could not be sent to another replica");
            if status.code() == tonic::Code::Unimplemented {
                self.incapable.lock().insert(to.clone(), Instant::now() + INCAPABLE);
            }
        });
        let known = self.mailbox.lock().answered(&to, answer.as_ref().map_err(|_| Failure), self.now());
        if !known.is_empty() {
            self.known.notify_waiters();
        }
        self.wake.notify_one();
    }

    async fn deliver(
        self: Arc<Self>,
        deliver: Arc<dyn Deliver>,
        delivery: Delivery,
        hooks: Option<Definition>,
    ) {
        let (id, agent, hook) =
            (delivery.message.id, delivery.message.agent, Arc::clone(&delivery.message.hook));
        let begun = Instant::now();
        let sent = deliver.deliver(delivery, hooks).await;
        let (word, outcome) = match &sent {
            Sent::Done => ("done", Outcome::Done),
            Sent::Again(why) => ("again", Outcome::Again(why)),
            Sent::Dead(why) => ("dead", Outcome::Dead(why)),
            Sent::Absent => (ABSENT, Outcome::Absent),
        };
        self.metrics.delivered(word, begun.elapsed());
        if let Sent::Dead(why) = &sent {
            self.metrics.died();
            deliver.died(id, agent, &hook, Died::Refused);
            tracing::info!(agent.id = agent.get(), hook = &*hook, %id, why, "a hook is a dead letter");
        }
        self.mailbox.lock().delivered(id, outcome, rand::random(), self.now());
        self.known.notify_waiters();
        self.wake.notify_one();
    }

    /// Waits until an agent is connected, or nothing waits for it any more.
    async fn watch(self: Arc<Self>, agent: AgentId, watched: Arc<Mutex<HashSet<AgentId>>>) {
        let mut changes = self.tracker.changes(agent);
        loop {
            changes.borrow_and_update();
            if self.router.finds(agent).await.unwrap_or(false) {
                self.mailbox.lock().set_present(agent, true);
                break;
            }
            if !self.mailbox.lock().is_awaited(agent) {
                break;
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { tokio::time::sleep(PRESENCE).await },
                () = tokio::time::sleep(PRESENCE) => {}
            }
        }
        watched.lock().remove(&agent);
        self.wake.notify_one();
    }
}

/// Whether a receiver will get nothing more.
fn live_is_closed(live: &tokio::sync::watch::Receiver<usize>) -> bool {
    live.has_changed().is_err()
}
