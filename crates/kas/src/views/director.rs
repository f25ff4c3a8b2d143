//! The director of a subscription: finds its agents, asks what the caller may see of them, and attaches
//! feeds.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use grpc::{Code, Status};
use ids::AgentId;
use parking_lot::Mutex;
use proto::kas::api::v1::UnansweredReplica;
use tokio::{sync::mpsc, time::Instant};
use views::{AgentState, Resource, View};

use super::{
    Hub, NoFeed, Selected,
    feed::{FeedKey, Look, What},
    question::{MOST_NAMESPACES, Question},
    reviews,
    rights::{May, Rights},
    wake::Wake,
};

/// The most agents of a subscription.
const MOST_AGENTS: usize = 2_000;
/// Agents about which is asked at once.
const AT_ONCE: usize = 64;
/// How long an answer about rights may take.
const WITHIN: Duration = Duration::from_secs(10);
/// How long agents are asked about rights before the caller is told that the others were not asked.
const ALL_WITHIN: Duration = Duration::from_secs(20);
/// Agents that a refusal names.
const MOST_NAMED: usize = 5;
/// How often agents are asked again that did not answer.
const AGAIN: Duration = Duration::from_secs(60);
/// Without an answer about rights for this long, the subscription ends.
const SILENT: Duration = Duration::from_secs(300);
/// After so long without an answer about all that is attached, no rows are told, whatever the reason is. The
/// director may wait for a caller that reads slowly, or for many agents. Rights are asked for again each
/// minute or more often.
pub(super) const STALE: Duration = Duration::from_secs(60 + 300);
/// Agents that come together are looked for together.
const SETTLE: Duration = Duration::from_millis(100);
/// After so long, an agent that the selector does not mean any more, or that nobody knows any more, is let go
/// of. Until then, it may come back.
const GONE: Duration = Duration::from_secs(600);
/// After agents came or went, they are looked for once more: which ones a caller reaches may be known only a
/// second later.
const LATE: Duration = Duration::from_secs(2);

/// What the director tells the subscription.
pub(super) enum Note {
    /// The rows of a feed belong to it.
    Attach { agent: AgentId, name: String, number: usize, look: Look },
    /// There is no such agent any more: its feeds are let go of.
    Gone(AgentId),
    /// Nothing of an agent can be attached.
    Agent { agent: AgentId, name: String, state: AgentState, reason: String },
    /// All agents that are known have been told of.
    Complete(Vec<UnansweredReplica>),
    /// The subscription ends.
    Ended(Status),
}

/// When the caller was last known to be allowed all that is attached, as the director tells the subscription.
#[derive(Debug, Clone)]
pub(super) struct Said(Arc<Mutex<Instant>>);

impl Default for Said {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Said {
    /// Whether that is so long ago that nothing may be told any more.
    pub(super) fn is_stale(&self) -> bool {
        self.0.lock().elapsed() > STALE
    }
}

/// What the caller may see of an agent, and when that was said.
struct Attached {
    targets: Vec<Target>,
    /// The last time that all of it was allowed.
    asked: Instant,
    /// When it is asked for again.
    next: Instant,
    /// Since when there is no such agent.
    gone: Option<Instant>,
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
    asker: Arc<Asker>,
    looker: u64,
    wake: Arc<Wake>,
    notes: mpsc::Sender<Note>,
    said: Said,
    attached: BTreeMap<AgentId, Attached>,
    /// Agents that were told to be away, forbidden or silent, so that they are told of once.
    told: BTreeMap<AgentId, (AgentState, String)>,
    number: usize,
}

/// Asks what the caller may see.
struct Asker {
    hub: Arc<Hub>,
    question: Arc<Question>,
    rights: Arc<dyn Rights>,
    resources: Vec<Arc<Resource>>,
}

/// What is found out about an agent.
enum Found {
    /// These, as was said then, and what is missing besides.
    Allowed(Vec<Target>, Instant, Vec<String>),
    /// Nothing is allowed, or the agentk cannot say.
    Refused(Status),
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
        said: Said,
    ) -> Self {
        let resources = match question.view.is_summary() {
            true => View::counted().map(|(_, resource)| Arc::new(resource)).into(),
            false => question.view.resources.iter().cloned().map(Arc::new).collect(),
        };
        let asker = Arc::new(Asker { hub, question, rights, resources });
        let (attached, told) = (BTreeMap::new(), BTreeMap::new());
        Self { asker, looker, wake, notes, said, attached, told, number: 0 }
    }

    /// Runs until the subscription is dropped or ends.
    pub(super) async fn run(mut self) {
        let mut changes = self.asker.hub.tracker.connection_changes();
        let mut again = Instant::now() + AGAIN;
        let mut late = self.later();
        let mut is_begun = false;
        loop {
            changes.mark_unchanged();
            match self.round(is_begun).await {
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
            loop {
                let due = self.due();
                tokio::select! {
                    () = self.notes.closed() => return,
                    () = tokio::time::sleep_until(due.unwrap_or(again)), if due.is_some() => {
                        if let Err(status) = self.ask_again().await {
                            self.tell(Note::Ended(status)).await;
                            return;
                        }
                    }
                    () = tokio::time::sleep_until(again) => {
                        again = Instant::now() + AGAIN;
                        // Those that did not answer are asked again, too.
                        self.told.clear();
                        break;
                    }
                    () = tokio::time::sleep_until(late.unwrap_or(again)), if late.is_some() => {
                        late = None;
                        break;
                    }
                    // The tracker lives as long as the process.
                    Ok(()) = changes.changed() => {
                        tokio::time::sleep(SETTLE).await;
                        late = self.later();
                        break;
                    }
                }
            }
        }
    }

    /// Returns when rights must be asked for again; `None`: never.
    fn due(&self) -> Option<Instant> {
        let can_change = self.asker.rights.can_change();
        can_change.then(|| self.attached.values().map(|attached| attached.next).min()).flatten()
    }

    /// Returns when agents are looked for once more after a change.
    fn later(&self) -> Option<Instant> {
        self.asker.rights.can_change().then(|| Instant::now() + LATE)
    }

    /// Returns `false` if the subscription has ended.
    async fn tell(&self, note: Note) -> bool {
        let ends = matches!(note, Note::Ended(_));
        self.notes.send(note).await.is_ok() && !ends
    }

    /// Looks for agents that are new, and attaches them. If the caller may see nothing at all in the first
    /// round, that is the answer, before anything else is told.
    async fn round(&mut self, is_begun: bool) -> Result<Vec<UnansweredReplica>, Status> {
        let asker = Arc::clone(&self.asker);
        let selector = &asker.question.agents;
        let (selected, unanswered) = asker.hub.selected(selector).await?;
        let there: HashSet<AgentId> = selected.iter().map(|agent| agent.id).collect();
        let new = selected.into_iter().filter(|agent| !self.attached.contains_key(&agent.id)).collect();
        let reached = asker.rights.reach(asker.hub.labelled(selector, new).await).await?;
        if unanswered.is_empty() {
            self.let_go(&there, MOST_AGENTS.saturating_sub(reached.len())).await;
        }
        let count = self.attached.len() + reached.len();
        if count > MOST_AGENTS {
            let text = format!("the selector means {count} agents, and at most {MOST_AGENTS} are allowed");
            return Err(Status::new(Code::InvalidArgument, text));
        }
        let mut cannot = self.unseen(&reached);
        let mut here = Vec::new();
        for agent in reached {
            match (&agent.gap, agent.connected) {
                (Some(gap), _) => cannot.push((agent.id, agent.name, AgentState::Absent, gap.to_string())),
                (None, false) => {
                    let reason = "it is not connected".to_owned();
                    cannot.push((agent.id, agent.name, AgentState::Absent, reason));
                }
                // A refusal counts until the next look at rights.
                (None, true) if matches!(self.told.get(&agent.id), Some((AgentState::Forbidden, _))) => {}
                (None, true) => here.push(agent),
            }
        }
        if asker.resources.iter().any(|resource| asker.is_limited_by_file(resource)) {
            // Together, the other replicas are asked once instead of for each agent.
            let ids: Vec<AgentId> = here.iter().map(|agent| agent.id).collect();
            asker.hub.files_of(&ids).await;
        }
        let until = Instant::now() + ALL_WITHIN;
        let of = &asker;
        let mut asking = stream::iter(here)
            .map(|agent| async move {
                let found = of.ask(agent.id, until).await;
                (agent, found)
            })
            .buffer_unordered(AT_ONCE);
        let (mut refused, mut has_silent) = (Vec::new(), false);
        while let Some((agent, found)) = asking.next().await {
            match found {
                Found::Allowed(targets, asked, missing) => {
                    if let Some(reason) = self.attach(&agent, targets, asked).await? {
                        cannot.push((agent.id, agent.name, AgentState::Absent, reason));
                    } else if !missing.is_empty() {
                        let reason = may_not(&missing);
                        cannot.push((agent.id, agent.name, AgentState::Forbidden, reason));
                    }
                }
                Found::Refused(status) => refused.push((agent, status)),
                Found::Silent(reason) => {
                    has_silent = true;
                    cannot.push((agent.id, agent.name, AgentState::Absent, reason));
                }
            }
        }
        if !is_begun && !has_silent && self.attached.is_empty() && !refused.is_empty() {
            return Err(refusal(&refused));
        }
        for (agent, status) in refused {
            let reason = status.message().to_owned();
            cannot.push((agent.id, agent.name, AgentState::Forbidden, reason));
        }
        for (agent, name, state, reason) in cannot {
            self.cannot(agent, name, state, reason).await;
        }
        Ok(unanswered)
    }

    /// Lets go of agents that are not there any more: all for which there is no room, and those that are gone
    /// for long.
    async fn let_go(&mut self, there: &HashSet<AgentId>, room: usize) {
        let now = Instant::now();
        for (agent, attached) in &mut self.attached {
            attached.gone = (!there.contains(agent)).then(|| attached.gone.unwrap_or(now));
        }
        let mut gone: Vec<(Instant, AgentId)> =
            self.attached.iter().filter_map(|(agent, attached)| Some((attached.gone?, *agent))).collect();
        gone.sort_unstable();
        for (since, agent) in gone {
            if now - since >= GONE || self.attached.len() > room {
                self.attached.remove(&agent);
                self.tell(Note::Gone(agent)).await;
            }
        }
    }

    /// Returns the agents that the selector names by their ids, and that the caller does not reach. Whether
    /// there are such agents is not told.
    fn unseen(&self, reached: &[Selected]) -> Vec<(AgentId, String, AgentState, String)> {
        let selector = &self.asker.question.agents;
        if selector.has_other_terms_than_ids() {
            return Vec::new();
        }
        let seen: HashSet<AgentId> =
            reached.iter().map(|agent| agent.id).chain(self.attached.keys().copied()).collect();
        let unseen = selector.ids().unwrap_or_default().iter().filter(|agent| !seen.contains(agent));
        unseen
            .map(|agent| {
                let reason = "it is not known here, or this credential gives no access to it";
                (*agent, String::new(), AgentState::Absent, reason.to_owned())
            })
            .collect()
    }

    async fn cannot(&mut self, agent: AgentId, name: String, state: AgentState, reason: String) {
        let told = (state, reason.clone());
        if self.told.get(&agent) == Some(&told) {
            return;
        }
        self.told.insert(agent, told);
        self.tell(Note::Agent { agent, name, state, reason }).await;
    }

    /// Attaches the feeds of an agent, whose rights were asked for at `asked`. Returns why that cannot be
    /// done now.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if there is no memory for them.
    async fn attach(
        &mut self,
        agent: &Selected,
        targets: Vec<Target>,
        asked: Instant,
    ) -> Result<Option<String>, Status> {
        let asker = Arc::clone(&self.asker);
        let is_summary = asker.question.view.is_summary();
        let places: BTreeSet<(usize, Option<Arc<str>>)> = match is_summary {
            true => [(0, None)].into(),
            false => targets.iter().map(|target| (target.resource, target.namespace.clone())).collect(),
        };
        let mut keys = Vec::with_capacity(places.len());
        for (resource, namespace) in places {
            let what = match (is_summary, asker.resources.get(resource)) {
                (true, _) => What::Summary,
                (false, Some(resource)) => What::Objects(Arc::clone(resource)),
                (false, None) => continue,
            };
            keys.push((self.number, FeedKey { agent: agent.id, what, namespace }));
            self.number += 1;
        }
        let looks = match asker.hub.look(agent.id, keys, self.looker, &self.wake) {
            Ok(looks) => looks,
            Err(why @ NoFeed::TooMany) => return Ok(Some(why.to_string())),
            Err(why @ NoFeed::Full(_)) => {
                return Err(Status::new(Code::ResourceExhausted, why.to_string()));
            }
        };
        self.told.remove(&agent.id);
        let next = asked + asker.hub.settings.rights;
        self.attached.insert(agent.id, Attached { targets, asked, next, gone: None });
        for (number, look) in looks {
            self.tell(Note::Attach { agent: agent.id, name: agent.name.clone(), number, look }).await;
        }
        Ok(None)
    }

    /// Asks again for what is due, and for what soon is.
    ///
    /// # Errors
    /// If something is not allowed any more, or nobody answers for long.
    async fn ask_again(&mut self) -> Result<(), Status> {
        // Answers that are due soon are too old to be used again, so these are questions to the API server
        // too.
        let period = self.asker.hub.settings.rights;
        let soon = Instant::now() + period.saturating_sub(reviews::yes(period));
        let due = self.attached.iter().filter(|(_, attached)| attached.next <= soon);
        let asking: Vec<_> = due
            .map(|(agent, attached)| {
                let (agent, targets, asker) = (*agent, attached.targets.clone(), Arc::clone(&self.asker));
                async move { (agent, tokio::time::timeout(WITHIN, asker.still(agent, targets)).await) }
            })
            .collect();
        let answers: Vec<_> = stream::iter(asking).buffer_unordered(AT_ONCE).collect().await;
        for (agent, answer) in answers {
            let Some(attached) = self.attached.get_mut(&agent) else { continue };
            match answer {
                Ok(Ok((May::Yes, asked))) => {
                    attached.asked = asked;
                    attached.next = asked + period;
                }
                Ok(Ok((May::No(missing), _))) => {
                    let text = format!("agent {agent}: {}, any more", may_not(&[missing]));
                    return Err(Status::new(Code::PermissionDenied, text));
                }
                Ok(Err(status)) if is_no(&status) => return Err(status),
                Ok(Err(_)) | Err(_) if attached.asked.elapsed() > SILENT => {
                    let text = format!("agent {agent} has not said for {SILENT:?} what the caller may see");
                    return Err(Status::new(Code::Unavailable, text));
                }
                Ok(Err(_)) | Err(_) => attached.next = Instant::now() + period,
            }
        }
        let oldest = self.attached.values().map(|attached| attached.asked).min();
        *self.said.0.lock() = oldest.unwrap_or_else(Instant::now);
        Ok(())
    }
}

impl Asker {
    /// Asks what the caller may see of an agent, if that begins before `until`.
    async fn ask(&self, agent: AgentId, until: Instant) -> Found {
        if Instant::now() >= until {
            return Found::Silent(format!("not asked what the caller may see: others took {ALL_WITHIN:?}"));
        }
        let asking = async {
            let (mut targets, mut missing, mut since) = (Vec::new(), Vec::new(), Instant::now());
            for (index, resource) in self.resources.iter().enumerate() {
                let (allowed, asked, not) = self.ask_resource(agent, index, resource).await?;
                targets.extend(allowed);
                missing.extend(not);
                since = since.min(asked);
            }
            Ok::<_, Status>((targets, since, missing))
        };
        let denied = |missing: &[String]| Status::new(Code::PermissionDenied, may_not(missing));
        match tokio::time::timeout(WITHIN, asking).await {
            Err(_) => Found::Silent(format!("no answer within {WITHIN:?} about what the caller may see")),
            Ok(Err(status)) if is_no(&status) || status.code() == Code::FailedPrecondition => {
                Found::Refused(status)
            }
            Ok(Err(status)) => Found::Silent(status.message().to_owned()),
            // A summary is one row: all of it, or nothing.
            Ok(Ok((targets, _, missing)))
                if targets.is_empty() || self.question.view.is_summary() && !missing.is_empty() =>
            {
                Found::Refused(denied(&missing))
            }
            Ok(Ok((targets, since, missing))) => Found::Allowed(targets, since, missing),
        }
    }

    /// Whether the namespaces of `kas.yaml` count for a resource, because the caller names none.
    fn is_limited_by_file(&self, resource: &Resource) -> bool {
        self.question.namespaces.is_empty() && !self.question.view.is_summary() && !is_of_cluster(resource)
    }

    /// Returns where the caller sees a resource, since when that is known, and what is missing.
    async fn ask_resource(
        &self,
        agent: AgentId,
        index: usize,
        resource: &Resource,
    ) -> Result<(Vec<Target>, Instant, Vec<String>), Status> {
        let target = |namespace: Option<&Arc<str>>, is_everywhere| Target {
            resource: index,
            namespace: namespace.cloned(),
            is_everywhere,
        };
        // Those of `kas.yaml` are the only ones that the agent can read.
        let mut namespaces = self.question.namespaces.clone();
        if self.is_limited_by_file(resource) {
            namespaces = self.hub.namespaces_of(agent).await?;
            // So many watches are more than one of everything, if the agent may have that.
            if namespaces.len() > MOST_NAMESPACES {
                namespaces.clear();
            }
        }
        let everywhere = match self.rights.may(agent, resource, None).await? {
            (May::Yes, asked) => {
                let targets = match namespaces.as_slice() {
                    [] => vec![target(None, true)],
                    some => some.iter().map(|namespace| target(Some(namespace), true)).collect(),
                };
                return Ok((targets, asked, Vec::new()));
            }
            (May::No(missing), _) => missing,
        };
        let mut since = Instant::now();
        if namespaces.is_empty() {
            return Ok((Vec::new(), since, vec![everywhere]));
        }
        let (mut allowed, mut missing) = (Vec::new(), Vec::new());
        for namespace in &namespaces {
            match self.rights.may(agent, resource, Some(namespace)).await? {
                (May::Yes, asked) => {
                    allowed.push(target(Some(namespace), false));
                    since = since.min(asked);
                }
                (May::No(not), _) => missing.push(not),
            }
        }
        Ok((allowed, since, missing))
    }

    /// Whether the caller may still see all of these, and since when that is known.
    async fn still(&self, agent: AgentId, targets: Vec<Target>) -> Result<(May, Instant), Status> {
        let (mut asked, mut since) = (BTreeSet::new(), Instant::now());
        for target in targets {
            let namespace = (!target.is_everywhere).then(|| target.namespace.clone()).flatten();
            let Some(resource) = self.resources.get(target.resource) else { continue };
            if !asked.insert((target.resource, namespace.clone())) {
                continue;
            }
            match self.rights.may(agent, resource, namespace.as_deref()).await? {
                (May::Yes, asked) => since = since.min(asked),
                no => return Ok(no),
            }
        }
        Ok((May::Yes, since))
    }
}

/// Whether this is a no to everything.
fn is_no(status: &Status) -> bool {
    matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated)
}

fn may_not(missing: &[String]) -> String {
    format!("the caller may not {}", missing.join(", nor "))
}

/// Returns the answer to a caller that may see nothing.
fn refusal(refused: &[(Selected, Status)]) -> Status {
    let no = refused.iter().map(|(_, status)| status.code()).find(|code| *code != Code::FailedPrecondition);
    let named = refused.iter().take(MOST_NAMED).map(|(agent, status)| {
        let name = if agent.name.is_empty() { String::new() } else { format!(" ({})", agent.name) };
        format!("agent {}{name}: {}", agent.id, status.message())
    });
    let mut text = named.collect::<Vec<_>>().join("; ");
    if refused.len() > MOST_NAMED {
        text.push_str(&format!("; and {} agents more", refused.len() - MOST_NAMED));
    }
    Status::new(no.unwrap_or(Code::FailedPrecondition), text)
}

/// Whether the objects of a resource are in no namespace, as far as that is known.
fn is_of_cluster(resource: &Resource) -> bool {
    resource.group.is_empty() && matches!(&*resource.plural, "nodes" | "namespaces" | "persistentvolumes")
}
