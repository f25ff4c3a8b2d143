//! The planners of a replica: one for each agent whose home it is, with a task for each of its projects.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cluster::{Query, Tracker};
use gitops::{BACKOFF, Budget, Claims};
use ids::{Agent, AgentId, Impersonation, ReplicaId};
use parking_lot::{Mutex, MutexGuard};
use proto::gitlab::agent::agentcfg::ManifestProjectCf;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

use crate::{
    applier::{AgentkVersion, Applier, Judge, Verdict},
    asked::{Asked, Permit},
    context::{Clusters, Context, Timing},
    home::Homes,
    manifests::{Loader, Share},
    metrics::PlannerMetrics,
    source::{Bounds, ReadLimits, Sources},
    status::{ProjectStatus, Status},
    task::{Command, Spec, Task},
};

/// How often homes and configurations are looked at: a replica that is no longer the home stops this soon.
const TICK: Duration = Duration::from_millis(250);
/// How often the connections of an agent are listed to know who applies.
const LIST: Duration = Duration::from_secs(60);
/// The same while it is not clear who applies.
const LIST_SOON: Duration = Duration::from_secs(2);
/// Lists that may be open at once.
const LISTS: usize = 32;
/// How often metrics of all projects are counted.
const COUNT: Duration = Duration::from_secs(5);
/// How long a person waits until it is clear who applies for an agent.
const CLEAR_WITHIN: Duration = Duration::from_secs(15);
/// Commands that wait for a task.
const COMMANDS: usize = 4;
/// The most projects of an agent.
const PROJECTS: usize = 100;

/// The agents of this replica.
pub trait Agents: Send + Sync + 'static {
    /// Returns the agents of which this replica holds tunnels.
    fn held(&self) -> Vec<Arc<Agent>>;

    /// Returns the last good configuration of an agent. `None`: it is not known here yet.
    fn configuration(&self, agent: &Agent) -> Option<Configuration>;
}

/// What of an agent's configuration concerns the planner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// `gitops.manifest_projects`.
    pub projects: Arc<[ManifestProjectCf]>,
    /// What applies to all of them.
    pub bounds: Bounds,
    /// As whom a project is applied, by its name.
    pub identities: BTreeMap<String, Impersonation>,
}

/// What planners are made of.
pub struct Parts {
    /// This replica.
    pub me: ReplicaId,
    /// The other replicas.
    pub tracker: Arc<dyn Tracker>,
    /// The agents of this replica.
    pub agents: Arc<dyn Agents>,
    /// The repositories.
    pub sources: Arc<dyn Sources>,
    /// The clusters.
    pub clusters: Arc<dyn Clusters>,
    /// The metrics.
    pub metrics: Arc<PlannerMetrics>,
    /// Who applies.
    pub applier: Applier,
    /// What is read of repositories.
    pub limits: ReadLimits,
    /// How often something is done.
    pub timing: Timing,
}

/// The planners of a replica.
pub struct Planners {
    pub(crate) context: Arc<Context>,
    me: ReplicaId,
    tracker: Arc<dyn Tracker>,
    pub(crate) agents: Arc<dyn Agents>,
    applier: Applier,
    plans: Mutex<HashMap<AgentId, AgentPlan>>,
    /// Agents for which a person asks for something that needs a plan.
    asked_for: Mutex<HashSet<AgentId>>,
    draining: AtomicBool,
    changed: Arc<watch::Sender<u64>>,
    lists: Arc<tokio::sync::Semaphore>,
}

impl std::fmt::Debug for Planners {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Planners").field("me", &self.me).finish_non_exhaustive()
    }
}

/// The planner of one agent.
struct AgentPlan {
    agent: Arc<Agent>,
    judge: Judge,
    verdict: Verdict,
    listed: Listed,
    budget: Budget,
    claims: Arc<Claims>,
    share: Share,
    projects: HashMap<Arc<str>, ProjectPlan>,
    asked: Asked,
}

/// The versions of the connections of an agent, and why the list is not complete.
type Versions = (Vec<String>, Option<String>);

/// The versions of the agent's connections, asked for by a task of its own.
struct Listed {
    /// `None`: there is no answer yet.
    answer: Arc<Mutex<Option<Versions>>>,
    asking: Option<JoinHandle<()>>,
    /// When they are asked for again.
    next: Instant,
}

/// A project and its task.
struct ProjectPlan {
    spec: Spec,
    status: Arc<Status>,
    commands: mpsc::Sender<Command>,
    task: JoinHandle<()>,
    abort: AbortHandle,
    started: Instant,
    /// How often in a row the task has ended by itself, which only a fault in it does.
    faults: usize,
    /// When such a task is started again.
    restart: Option<Instant>,
}

impl ProjectPlan {
    /// Whether the task runs, or ended so shortly ago that it is not started again yet.
    fn rests(&mut self) -> bool {
        if !self.task.is_finished() {
            return true;
        }
        let now = Instant::now();
        if let Some(restart) = self.restart {
            return now < restart;
        }
        if now.saturating_duration_since(self.started) > BACKOFF[BACKOFF.len() - 1] {
            self.faults = 0;
        }
        let restart = now + crate::follow::jittered(BACKOFF[self.faults.min(BACKOFF.len() - 1)]);
        self.faults += 1;
        self.restart = Some(restart);
        tracing::error!(
            agent.id = self.spec.agent.id.get(),
            project = self.spec.entry.id,
            "the planner of a manifest project has ended by a fault in it: it is started again after a pause"
        );
        self.status.phase("failed", "the planner of the project has ended by a fault: it is started again");
        self.status.update(|state| state.next = Some(restart));
        true
    }
}

impl Drop for ProjectPlan {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if let Some(asking) = &self.asking {
            asking.abort();
        }
    }
}

/// What is known of an agent at its home.
#[derive(Clone, Debug)]
pub struct AgentSync {
    /// Why kas applies nothing; empty if it does.
    pub waits: String,
    /// The projects, by name.
    pub projects: Vec<ProjectStatus>,
}

/// What a person asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Sync now.
    Sync,
    /// Delete now what waits to be pruned.
    Prune,
}

/// Why something that was asked for is not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// This replica is not the home of the agent.
    #[error("this replica does not plan for the agent")]
    NotHome,
    /// No configuration names the project, or some configuration does.
    #[error("{0}")]
    Wrong(String),
    /// Too much is asked for at once.
    #[error("{0}")]
    Busy(String),
    /// It was tried, and failed.
    #[error("{0}")]
    Failed(String),
}

impl Planners {
    /// Returns planners that do nothing until [`run`](Self::run).
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts { me, tracker, agents, sources, clusters, metrics, applier, limits, timing } = parts;
        let replica = me.as_str().to_owned();
        let loader = Loader::default();
        let context = Context { sources, clusters, loader, metrics, replica, limits, timing };
        Arc::new(Self {
            context: Arc::new(context),
            me,
            tracker,
            agents,
            applier,
            plans: Mutex::default(),
            asked_for: Mutex::default(),
            draining: AtomicBool::new(false),
            changed: Arc::new(watch::Sender::new(0)),
            lists: Arc::new(tokio::sync::Semaphore::new(LISTS)),
        })
    }

    fn plans(&self) -> MutexGuard<'_, HashMap<AgentId, AgentPlan>> {
        self.plans.lock()
    }

    /// Stops planning: this replica leaves.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.plans().clear();
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Plans until dropped.
    pub async fn run(self: Arc<Self>) {
        let mut homes = Homes::new(self.me.clone());
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut counted = Instant::now();
        loop {
            ticks.tick().await;
            self.tick(&mut homes).await;
            if counted.elapsed() >= COUNT {
                counted = Instant::now();
                self.count();
            }
        }
    }

    async fn tick(&self, homes: &mut Homes) {
        if self.draining.load(Ordering::Relaxed) {
            return;
        }
        let held = self.agents.held();
        let asked_for = self.asked_for.lock().clone();
        let mut seen = HashSet::with_capacity(held.len());
        for agent in held {
            // Without streams here, the configuration may be unknown for a moment: the planner keeps its own.
            let configuration = self.agents.configuration(&agent);
            let is_planned = asked_for.contains(&agent.id) || self.plans().contains_key(&agent.id);
            let has_projects = configuration.as_ref().is_some_and(|it| !it.projects.is_empty());
            if !has_projects && !is_planned {
                continue;
            }
            seen.insert(agent.id);
            // If the tracker fails, the home is what it was.
            let Ok(holders) = self.tracker.locate(agent.id).await else { continue };
            let is_home = homes.observe(agent.id, &holders, Instant::now());
            let mut plans = self.plans();
            if !is_home || self.draining.load(Ordering::Relaxed) {
                if plans.remove(&agent.id).is_some() {
                    tracing::info!(agent.id = agent.id.get(), "another replica plans for the agent now");
                }
                continue;
            }
            let plan = plans.entry(agent.id).or_insert_with(|| {
                tracing::debug!(agent.id = agent.id.get(), "this replica plans for the agent");
                AgentPlan::new(Arc::clone(&agent), self.context.loader.share())
            });
            plan.agent = agent;
            self.judge(plan);
            if let Some(configuration) = configuration {
                self.reconcile(plan, &configuration);
            }
            let concurrent = self.context.clusters.concurrent(plan.agent.id, plan.is_elastic());
            plan.budget.set_concurrent(concurrent.min(Budget::CONCURRENT));
        }
        let mut plans = self.plans();
        plans.retain(|agent, _| seen.contains(agent));
        self.asked_for.lock().retain(|agent| seen.contains(agent) && !plans.contains_key(agent));
        drop(plans);
        homes.retain(|agent| seen.contains(&agent));
    }

    /// Decides whether kas applies for the agent.
    fn judge(&self, plan: &mut AgentPlan) {
        let now = Instant::now();
        let listed = &mut plan.listed;
        if listed.asking.as_ref().is_none_or(JoinHandle::is_finished) && listed.next <= now {
            let pause = if matches!(plan.verdict, Verdict::Wait(_)) { LIST_SOON } else { LIST };
            listed.next = now + crate::follow::jittered(pause);
            let (tracker, agent) = (Arc::clone(&self.tracker), plan.agent.id);
            let (answer, lists) = (Arc::clone(&listed.answer), Arc::clone(&self.lists));
            listed.asking = Some(tokio::spawn(async move {
                // The semaphore is never closed.
                let _permit = lists.acquire().await;
                *answer.lock() = Some(versions(&*tracker, agent).await);
            }));
        }
        let answer = listed.answer.lock().clone();
        plan.verdict = match answer {
            None if self.applier == Applier::Auto => {
                Verdict::Wait("the connections of the agent are not known yet".to_owned())
            }
            None => plan.judge.decide(self.applier, [], None, now),
            Some((versions, missing)) => {
                let versions = versions.iter().map(String::as_str);
                plan.judge.decide(self.applier, versions, missing.as_deref(), now)
            }
        };
    }

    /// Makes the tasks of an agent what its configuration says.
    fn reconcile(&self, plan: &mut AgentPlan, configuration: &Configuration) {
        let applies = match plan.verdict {
            Verdict::Kas => true,
            // A replica that is silent for a moment changes nothing.
            Verdict::Wait(_) => !plan.projects.is_empty(),
            Verdict::Not(_) => false,
        };
        let mut wanted = HashSet::new();
        for entry in configuration.projects.iter().take(PROJECTS).filter(|_| applies) {
            let name: Arc<str> = entry.id.as_str().into();
            // agentk of 14.1 takes the first one, too.
            if !wanted.insert(Arc::clone(&name)) {
                continue;
            }
            let spec = Spec {
                agent: Arc::clone(&plan.agent),
                entry: entry.clone(),
                bounds: configuration.bounds.clone(),
                impersonation: configuration.identities.get(&entry.id).cloned(),
            };
            let old = plan.projects.get_mut(&name);
            if old.is_some_and(|old| old.spec == spec && old.rests()) {
                continue;
            }
            let old = plan.projects.remove(&name);
            let project = self.start(spec, &name, plan, old);
            plan.projects.insert(name, project);
        }
        plan.projects.retain(|name, project| {
            let stays = wanted.contains(name);
            if !stays && applies {
                tracing::info!(
                    agent.id = project.spec.agent.id.get(),
                    project = &**name,
                    "the configuration does not name the manifest project any more: its objects and its inventory stay"
                );
            }
            if !stays {
                plan.claims.release(name);
            }
            stays
        });
    }

    fn start(&self, spec: Spec, name: &Arc<str>, plan: &AgentPlan, old: Option<ProjectPlan>) -> ProjectPlan {
        let faults = old.as_ref().map_or(0, |old| old.faults);
        let (commands, received) = mpsc::channel(COMMANDS);
        let status = Arc::new(Status::new(Arc::clone(name), Arc::clone(&self.changed)));
        let task = Task {
            context: Arc::clone(&self.context),
            spec: spec.clone(),
            budget: plan.budget.clone(),
            claims: Arc::clone(&plan.claims),
            share: plan.share.clone(),
            is_new: old.is_none(),
            status: Arc::clone(&status),
            commands: received,
        };
        let task = tokio::spawn(async move {
            if let Some(mut old) = old {
                old.abort.abort();
                // It has ended or was aborted. Two of them at once would only disturb each other.
                let _ = (&mut old.task).await;
            }
            task.run().await;
        });
        let abort = task.abort_handle();
        ProjectPlan { spec, status, commands, task, abort, started: Instant::now(), faults, restart: None }
    }

    /// Counts objects and projects for the metrics.
    fn count(&self) {
        let (mut current, mut failed, mut other, mut to_prune) = (0, 0, 0, 0);
        let (mut synced, mut degraded, mut failing, mut rest) = (0, 0, 0, 0);
        for project in self.plans().values().flat_map(|plan| plan.projects.values()) {
            let counts = project.status.counts();
            current += counts.current;
            failed += counts.failed;
            other += counts.objects.saturating_sub(counts.current + counts.failed);
            let status = project.status.get(false);
            to_prune += status.to_prune;
            match status.phase {
                "synced" => synced += 1,
                "degraded" => degraded += 1,
                "failed" => failing += 1,
                _ => rest += 1,
            }
        }
        self.context.metrics.count(
            [("current", current), ("failed", failed), ("other", other), ("to_prune", to_prune)],
            [("synced", synced), ("degraded", degraded), ("failed", failing), ("busy", rest)],
        );
    }

    /// Wakes when [`get`](Self::get) may return something else.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Returns the state of an agent's projects; of one, if it is named. `None`: this replica does not plan
    /// for the agent.
    pub fn get(&self, agent: AgentId, project: Option<&str>, objects: bool) -> Option<AgentSync> {
        let plans = self.plans();
        let plan = plans.get(&agent)?;
        let waits = match &plan.verdict {
            Verdict::Kas => String::new(),
            Verdict::Wait(why) | Verdict::Not(why) => why.clone(),
        };
        let mut projects: Vec<_> = plan
            .projects
            .iter()
            .filter(|(name, _)| project.is_none_or(|project| &***name == project))
            .map(|(_, project)| project.status.get(objects))
            .collect();
        projects.sort_by(|a, b| a.project.cmp(&b.project));
        Some(AgentSync { waits, projects })
    }

    /// Returns the projects that this replica plans for, each with its agent and without its objects.
    pub fn all(&self) -> Vec<(Arc<Agent>, ProjectStatus)> {
        let plans = self.plans();
        let of_agent = |plan: &AgentPlan| {
            let statuses: Vec<_> = plan.projects.values().map(|project| project.status.get(false)).collect();
            (Arc::clone(&plan.agent), statuses)
        };
        plans
            .values()
            .map(of_agent)
            .flat_map(|(agent, statuses)| {
                statuses.into_iter().map(move |status| (Arc::clone(&agent), status))
            })
            .collect()
    }

    /// Counts the projects that this replica plans for: all, degraded, failed, and those of which objects
    /// wait to be pruned.
    pub fn totals(&self) -> [usize; 4] {
        let mut totals = [0; 4];
        for project in self.plans().values().flat_map(|plan| plan.projects.values()) {
            let status = project.status.get(false);
            totals[0] += 1;
            totals[1] += usize::from(status.phase == "degraded");
            totals[2] += usize::from(status.phase == "failed");
            totals[3] += usize::from(status.to_prune > 0);
        }
        totals
    }

    /// Does what a person asks for, and returns a text for that person.
    ///
    /// # Errors
    /// See [`ControlError`].
    ///
    /// # Cancel safety
    /// If it is dropped, the work goes on.
    pub async fn control(
        &self,
        agent: AgentId,
        project: &str,
        control: Control,
    ) -> Result<String, ControlError> {
        let commands = {
            let plans = self.plans();
            let plan = plans.get(&agent).ok_or(ControlError::NotHome)?;
            let found = plan.projects.get(project);
            let found = found.ok_or_else(|| ControlError::Wrong(unknown(plan, project)))?;
            found.commands.clone()
        };
        let (reply, answer) = oneshot::channel();
        let command = match control {
            Control::Sync => Command::Sync(reply),
            Control::Prune => Command::Prune(reply),
        };
        commands.try_send(command).map_err(|_| {
            ControlError::Busy("a sync is running, and others wait: try again later".to_owned())
        })?;
        match answer.await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(text)) => Err(ControlError::Failed(text)),
            Err(_) => {
                Err(ControlError::Failed("the configuration changed, or this replica leaves".to_owned()))
            }
        }
    }

    /// Returns what a task of a project is made of, and what the tasks of its agent share.
    pub(crate) fn spec(
        &self,
        agent: AgentId,
        project: &str,
    ) -> Result<(Spec, Budget, Arc<Claims>, Share), ControlError> {
        let plans = self.plans();
        let plan = plans.get(&agent).ok_or(ControlError::NotHome)?;
        let found = plan.projects.get(project).map(|found| found.spec.clone());
        let spec = found.ok_or_else(|| ControlError::Wrong(unknown(plan, project)))?;
        Ok((spec, plan.budget.clone(), Arc::clone(&plan.claims), plan.share.clone()))
    }

    /// Waits until this replica plans for an agent whose configuration may name no project, and knows who
    /// applies. If that takes long, what follows says what is missing.
    ///
    /// # Errors
    /// This replica is not the home of the agent.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn plan_for(&self, agent: AgentId) -> Result<(), ControlError> {
        let is_held = self.agents.held().iter().any(|held| held.id == agent);
        let holders = self.tracker.locate(agent).await;
        let holders = holders.map_err(|error| ControlError::Failed(error.to_string()))?;
        if !is_held || crate::home::home(agent, &holders) != Some(&self.me) {
            return Err(ControlError::NotHome);
        }
        let is_clear = || {
            self.plans().get(&agent).is_some_and(|plan| {
                let is_known = self.agents.configuration(&plan.agent).is_some();
                is_known && !matches!(plan.verdict, Verdict::Wait(_))
            })
        };
        let end = Instant::now() + CLEAR_WITHIN;
        while !is_clear() && Instant::now() < end && !self.draining.load(Ordering::Relaxed) {
            // Each tick plans for what is asked for.
            self.asked_for.lock().insert(agent);
            tokio::time::sleep(TICK).await;
        }
        Ok(())
    }

    /// Returns the agent, its budget and its configuration, if that does not name the project. `id`: the
    /// number of the project, if it is known.
    pub(crate) fn unnamed(
        &self,
        agent: AgentId,
        project: &str,
        id: Option<u64>,
    ) -> Result<(Arc<Agent>, Budget, Configuration), ControlError> {
        let plans = self.plans();
        let plan = plans.get(&agent).ok_or(ControlError::NotHome)?;
        let Some(configuration) = self.agents.configuration(&plan.agent) else {
            return Err(ControlError::Failed("the configuration of the agent is not known yet".to_owned()));
        };
        let is_it = |planned: &ProjectPlan| id.is_some_and(|id| planned.status.get(false).id == id);
        let planned = plan.projects.iter().find(|(name, planned)| &***name == project || is_it(planned));
        if let Some((name, _)) = planned {
            return Err(named(name));
        }
        if configuration.projects.iter().any(|entry| entry.id == project) {
            return Err(named(project));
        }
        match &plan.verdict {
            Verdict::Kas => Ok((Arc::clone(&plan.agent), plan.budget.clone(), configuration)),
            _ => Err(ControlError::Wrong(unknown(plan, project))),
        }
    }

    /// Admits a diff for an agent.
    pub(crate) fn admit(&self, agent: AgentId) -> Result<Permit, ControlError> {
        let mut plans = self.plans();
        let plan = plans.get_mut(&agent).ok_or(ControlError::NotHome)?;
        plan.asked.admit(Instant::now()).map_err(ControlError::Busy)
    }

    /// Returns the status of a project.
    pub(crate) fn status(&self, agent: AgentId, project: &str) -> Option<ProjectStatus> {
        let plans = self.plans();
        Some(plans.get(&agent)?.projects.get(project)?.status.get(false))
    }
}

impl AgentPlan {
    fn new(agent: Arc<Agent>, share: Share) -> Self {
        Self {
            agent,
            judge: Judge::default(),
            verdict: Verdict::Wait("the connections of the agent are not known yet".to_owned()),
            listed: Listed { answer: Arc::default(), asking: None, next: Instant::now() },
            budget: Budget::default(),
            claims: Arc::default(),
            share,
            projects: HashMap::new(),
            asked: Asked::default(),
        }
    }

    /// Whether every connected agentk opens tunnels when they are needed.
    fn is_elastic(&self) -> bool {
        let answer = self.listed.answer.lock();
        let versions = answer.as_ref().map(|(versions, _)| versions.as_slice()).unwrap_or_default();
        versions.iter().all(|version| AgentkVersion::of(version) == AgentkVersion::Own)
    }
}

/// The error for a project that the configuration names.
pub(crate) fn named(project: &str) -> ControlError {
    ControlError::Wrong(format!("the configuration of the agent names {project}: take it out first"))
}

fn unknown(plan: &AgentPlan, project: &str) -> String {
    match &plan.verdict {
        Verdict::Kas => {
            format!("the configuration of agent {} names no manifest project {project:?}", plan.agent.id)
        }
        Verdict::Wait(why) | Verdict::Not(why) => format!("kas does not apply for this agent: {why}"),
    }
}

/// Returns the versions of an agent's connections, and why they may not be all.
async fn versions(tracker: &dyn Tracker, agent: AgentId) -> (Vec<String>, Option<String>) {
    match tracker.connected(Query::Agent(agent)).await {
        Err(error) => (Vec::new(), Some(error.to_string())),
        Ok(connected) => {
            let missing = connected.unanswered.iter().find(|missing| !missing.given_up);
            let missing =
                missing.map(|missing| format!("{} did not answer: {}", missing.replica.id, missing.reason));
            let versions = connected
                .connections
                .iter()
                .filter(|located| !located.unconfirmed)
                .map(|located| located.connection.meta.version.clone());
            (versions.collect(), missing)
        }
    }
}
