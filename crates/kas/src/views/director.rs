//! The director of a subscription: finds its agents, asks what the caller may see of them, and attaches
//! feeds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use grpc::{Code, Status};
use ids::AgentId;
use proto::kas::api::v1::UnansweredReplica;
use tokio::{sync::mpsc, time::Instant};
use views::{AgentState, Resource, View};

use super::{
    Hub, Selected,
    feed::{FeedKey, Look, What},
    question::{MOST_NAMESPACES, Question},
    rights::Rights,
    wake::Wake,
};

/// The most agents of a subscription.
const MOST_AGENTS: usize = 2_000;
/// Agents about which is asked at once.
const AT_ONCE: usize = 64;
/// How long an answer about rights may take.
const WITHIN: Duration = Duration::from_secs(10);
/// How often rights are asked for again, and agents that did not answer.
const AGAIN: Duration = Duration::from_secs(60);
/// Without an answer about rights for this long, the subscription ends.
const SILENT: Duration = Duration::from_secs(300);
/// Agents that come together are looked for together.
const SETTLE: Duration = Duration::from_millis(100);

/// What the director tells the subscription.
pub(super) enum Note {
    /// The rows of a feed belong to it.
    Attach { agent: AgentId, name: String, number: usize, look: Look },
    /// Nothing of an agent can be attached.
    Agent { agent: AgentId, name: String, state: AgentState, reason: String },
    /// All agents that are known have been told of.
    Complete(Vec<UnansweredReplica>),
    /// The subscription ends.
    Ended(Status),
}

/// What the caller may see of an agent, and when that was said.
struct Attached {
    targets: Vec<Target>,
    /// The last time that all of it was allowed.
    asked: Instant,
}

/// A resource, in a namespace or everywhere.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Target {
    /// The index among the resources of the view.
    resource: usize,
    namespace: Option<Arc<str>>,
    /// Rights in the whole cluster are needed, or are known to be there.
    is_everywhere: bool,
}

pub(super) struct Director {
    hub: Arc<Hub>,
    question: Arc<Question>,
    rights: Arc<dyn Rights>,
    resources: Vec<Arc<Resource>>,
    looker: u64,
    wake: Arc<Wake>,
    notes: mpsc::Sender<Note>,
    attached: BTreeMap<AgentId, Attached>,
    /// Agents that were told to be away, forbidden or silent, so that they are told of once.
    told: BTreeMap<AgentId, (AgentState, String)>,
    number: usize,
}

/// What is found out about an agent.
enum Found {
    /// These, and the names of resources of which nothing is allowed.
    Allowed(Vec<Target>, Vec<String>),
    Forbidden,
    Silent(String),
}

impl Director {
    pub(super) fn new(
        hub: Arc<Hub>,
        question: Arc<Question>,
        rights: Arc<dyn Rights>,
        looker: u64,
        wake: Arc<Wake>,
        notes: mpsc::Sender<Note>,
    ) -> Self {
        let resources = match question.view.is_summary() {
            true => View::counted().map(|(_, resource)| Arc::new(resource)).into(),
            false => question.view.resources.iter().cloned().map(Arc::new).collect(),
        };
        Self {
            hub,
            question,
            rights,
            resources,
            looker,
            wake,
            notes,
            attached: BTreeMap::new(),
            told: BTreeMap::new(),
            number: 0,
        }
    }

    /// Runs until the subscription is dropped or ends.
    pub(super) async fn run(mut self) {
        let mut changes = self.hub.tracker.connection_changes();
        let mut again = Instant::now() + AGAIN;
        let mut is_begun = false;
        loop {
            changes.mark_unchanged();
            match self.round().await {
                Ok(unanswered) => {
                    is_begun = true;
                    if !self.tell(Note::Complete(unanswered)).await {
                        return;
                    }
                }
                // The agents that are attached stay, and it is tried again.
                Err(status) if is_begun && status.code() == Code::Unavailable => {}
                Err(status) => {
                    self.tell(Note::Ended(status)).await;
                    return;
                }
            }
            tokio::select! {
                () = self.notes.closed() => return,
                () = tokio::time::sleep_until(again) => {
                    again = Instant::now() + AGAIN;
                    if let Err(status) = self.ask_again().await {
                        self.tell(Note::Ended(status)).await;
                        return;
                    }
                    // Those who did not answer are asked again, too.
                    self.told.clear();
                }
                // The tracker lives as long as the process.
                Ok(()) = changes.changed() => tokio::time::sleep(SETTLE).await,
            }
        }
    }

    /// Returns `false` if the subscription has ended.
    async fn tell(&self, note: Note) -> bool {
        let ends = matches!(note, Note::Ended(_));
        self.notes.send(note).await.is_ok() && !ends
    }

    /// Looks for agents that are new, and attaches them.
    async fn round(&mut self) -> Result<Vec<UnansweredReplica>, Status> {
        let (selected, unanswered) = self.hub.selected(&self.question.agents).await?;
        let selected = self.rights.reach(selected).await?;
        if selected.len() > MOST_AGENTS {
            let text = format!(
                "the selector means {} agents, and at most {MOST_AGENTS} are allowed",
                selected.len()
            );
            return Err(Status::new(Code::InvalidArgument, text));
        }
        let new: Vec<Selected> =
            selected.into_iter().filter(|agent| !self.attached.contains_key(&agent.id)).collect();
        let (here, away): (Vec<_>, Vec<_>) = new.into_iter().partition(|agent| agent.connected);
        for agent in away {
            self.cannot(&agent, AgentState::Absent, "it is not connected".to_owned()).await;
        }
        // A refusal counts until the next look at rights.
        let is_refused =
            |agent: &Selected| matches!(self.told.get(&agent.id), Some((AgentState::Forbidden, _)));
        let here: Vec<Selected> = here.into_iter().filter(|agent| !is_refused(agent)).collect();
        let found: Vec<(Selected, Found)> = {
            let this = &*self;
            let asking = here.into_iter().map(|agent| async move {
                let found = this.ask(agent.id).await;
                (agent, found)
            });
            stream::iter(asking).buffer_unordered(AT_ONCE).collect().await
        };
        for (agent, found) in found {
            match found {
                Found::Allowed(targets, missing) => {
                    self.attach(&agent, targets).await;
                    if !missing.is_empty() {
                        let reason = format!("the caller may not list and watch {}", missing.join(", "));
                        self.cannot(&agent, AgentState::Forbidden, reason).await;
                    }
                }
                Found::Forbidden => {
                    let reason = "the caller may not list and watch this here".to_owned();
                    self.cannot(&agent, AgentState::Forbidden, reason).await;
                }
                Found::Silent(reason) => self.cannot(&agent, AgentState::Absent, reason).await,
            }
        }
        Ok(unanswered)
    }

    async fn cannot(&mut self, agent: &Selected, state: AgentState, reason: String) {
        let told = (state, reason.clone());
        if self.told.get(&agent.id) == Some(&told) {
            return;
        }
        self.told.insert(agent.id, told);
        self.tell(Note::Agent { agent: agent.id, name: agent.name.clone(), state, reason }).await;
    }

    async fn attach(&mut self, agent: &Selected, targets: Vec<Target>) {
        let keys: BTreeSet<(usize, Option<Arc<str>>)> = match self.question.view.is_summary() {
            true => [(0, None)].into(),
            false => targets.iter().map(|target| (target.resource, target.namespace.clone())).collect(),
        };
        self.told.remove(&agent.id);
        self.attached.insert(agent.id, Attached { targets, asked: Instant::now() });
        for (resource, namespace) in keys {
            let what = match (self.question.view.is_summary(), self.resources.get(resource)) {
                (true, _) => What::Summary,
                (false, Some(resource)) => What::Objects(Arc::clone(resource)),
                (false, None) => continue,
            };
            let number = self.number;
            self.number += 1;
            let key = FeedKey { agent: agent.id, what, namespace };
            let look = self.hub.look(key, self.looker, number, &self.wake);
            self.tell(Note::Attach { agent: agent.id, name: agent.name.clone(), number, look }).await;
        }
    }

    /// Asks what the caller may see of an agent.
    async fn ask(&self, agent: AgentId) -> Found {
        let asking = async {
            let (mut targets, mut missing) = (Vec::new(), Vec::new());
            for (index, resource) in self.resources.iter().enumerate() {
                let allowed = self.ask_resource(agent, index, resource).await?;
                if allowed.is_empty() {
                    missing.push(resource.name());
                }
                targets.extend(allowed);
            }
            Ok::<_, Status>((targets, missing))
        };
        match tokio::time::timeout(WITHIN, asking).await {
            Err(_) => Found::Silent(format!("no answer within {WITHIN:?} about what the caller may see")),
            Ok(Err(status)) if status.code() == Code::PermissionDenied => Found::Forbidden,
            Ok(Err(status)) => Found::Silent(status.message().to_owned()),
            Ok(Ok((targets, _))) if targets.is_empty() => Found::Forbidden,
            // A summary is one row: all of it, or nothing.
            Ok(Ok((_, missing))) if self.question.view.is_summary() && !missing.is_empty() => {
                Found::Forbidden
            }
            Ok(Ok((targets, missing))) => Found::Allowed(targets, missing),
        }
    }

    /// Returns the namespaces in which the caller sees a resource.
    async fn ask_resource(
        &self,
        agent: AgentId,
        index: usize,
        resource: &Resource,
    ) -> Result<Vec<Target>, Status> {
        let target = |namespace: Option<&Arc<str>>, is_everywhere| Target {
            resource: index,
            namespace: namespace.cloned(),
            is_everywhere,
        };
        // Those of `kas.yaml` are the only ones that the agent can read.
        let mut namespaces = self.question.namespaces.clone();
        if namespaces.is_empty() && !self.question.view.is_summary() && !is_of_cluster(resource) {
            namespaces = (self.hub.namespaces)(agent).into_iter().map(Into::into).collect();
            // So many watches are more than one of everything, if the agent may have that.
            if namespaces.len() > MOST_NAMESPACES {
                namespaces.clear();
            }
        }
        if self.rights.may(agent, resource, None).await? {
            return Ok(match namespaces.as_slice() {
                [] => vec![target(None, true)],
                some => some.iter().map(|namespace| target(Some(namespace), true)).collect(),
            });
        }
        let mut allowed = Vec::new();
        for namespace in &namespaces {
            if self.rights.may(agent, resource, Some(namespace)).await? {
                allowed.push(target(Some(namespace), false));
            }
        }
        Ok(allowed)
    }

    /// Asks again for everything that is attached.
    ///
    /// # Errors
    /// If something is not allowed any more, or nobody answers for long.
    async fn ask_again(&mut self) -> Result<(), Status> {
        if !self.rights.can_change() {
            return Ok(());
        }
        let asking = self.attached.iter().map(|(agent, attached)| {
            let (agent, targets, rights) = (*agent, attached.targets.clone(), Arc::clone(&self.rights));
            let resources = self.resources.clone();
            async move {
                let all = async {
                    let mut asked = BTreeSet::new();
                    for target in targets {
                        let namespace = (!target.is_everywhere).then(|| target.namespace.clone()).flatten();
                        let Some(resource) = resources.get(target.resource) else { continue };
                        if asked.insert((target.resource, namespace.clone()))
                            && !rights.may(agent, resource, namespace.as_deref()).await?
                        {
                            return Ok(false);
                        }
                    }
                    Ok::<_, Status>(true)
                };
                (agent, tokio::time::timeout(WITHIN, all).await)
            }
        });
        let asking: Vec<_> = asking.collect();
        let answers: Vec<_> = stream::iter(asking).buffer_unordered(AT_ONCE).collect().await;
        for (agent, answer) in answers {
            match answer {
                Ok(Ok(true)) => {
                    if let Some(attached) = self.attached.get_mut(&agent) {
                        attached.asked = Instant::now();
                    }
                }
                Ok(Ok(false)) => {
                    let text = format!("the caller may not list and watch this of agent {agent} any more");
                    return Err(Status::new(Code::PermissionDenied, text));
                }
                Ok(Err(status)) if status.code() == Code::PermissionDenied => return Err(status),
                Ok(Err(_)) | Err(_) => {
                    let silent =
                        self.attached.get(&agent).is_some_and(|known| known.asked.elapsed() > SILENT);
                    if silent {
                        let text =
                            format!("agent {agent} has not said for {SILENT:?} what the caller may see");
                        return Err(Status::new(Code::Unavailable, text));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether the objects of a resource are in no namespace, as far as that is known.
fn is_of_cluster(resource: &Resource) -> bool {
    resource.group.is_empty() && matches!(&*resource.plural, "nodes" | "namespaces" | "persistentvolumes")
}
