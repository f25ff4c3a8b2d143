//! Applies manifests by itself, where kas does not: for a kas of GitLab 14.1 to 16.
//!
//! The configuration names the manifest projects, kas sends their files, and the engine of the crate `gitops`
//! applies them. Of several pods, the one that holds the Lease does so. What it may delete is
//! decided by the inventory in the cluster, as where kas applies.
//!
//! Without manifest projects in the configuration, and with a kas that applies by itself, nothing is asked of
//! the API server.

mod api;
mod feed;
mod lease;
mod metrics;
mod project;
mod term;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use ::gitops::{BACKOFF, Budget, Claims, ClusterApi, Engine};
use http::HeaderValue;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use proto::gitlab::agent::agentcfg::{AgentConfiguration, ManifestProjectCf};
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use self::{
    api::GuardedApi,
    feed::{Feed, FeedError},
    lease::{Elector, Holder},
    metrics::GitopsMetrics,
    project::Task as ProjectTask,
    term::{Room, Shared, Term, backoff, until},
};
use super::{Context, Module, Task, kubernetes_api::Guard};
use crate::{calls::Calls, cluster::ApiServer};

/// The most manifest projects of an agent.
const PROJECTS: usize = 100;
/// How long kas may take to say that it does not let agentk apply. A kas that waits for a commit says
/// nothing.
const ASKED: Duration = Duration::from_secs(15);
/// How long projects may take to end before they are aborted.
const ENDING: Duration = Duration::from_secs(3);
/// The pause before kas is asked again whether it lets agentk apply.
const REFUSED: Duration = Duration::from_secs(300);

/// Applies manifests by itself. It serves no requests.
pub struct Gitops {
    shared: Arc<Shared>,
    /// The namespace of the Lease.
    namespace: String,
    /// What kas said last about who applies: it is not logged again.
    said: Mutex<Option<String>>,
}

impl std::fmt::Debug for Gitops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gitops").field("identity", &self.shared.identity).finish_non_exhaustive()
    }
}

/// What the configuration says.
#[derive(Clone, Debug, Default, PartialEq)]
struct Wanted {
    agent: i64,
    /// Those with different names, as in the configuration.
    projects: Vec<ManifestProjectCf>,
}

impl Wanted {
    fn read(configuration: &AgentConfiguration) -> Self {
        let all = configuration.gitops.as_ref().map(|gitops| gitops.manifest_projects.as_slice());
        let all = all.unwrap_or_default();
        if all.len() > PROJECTS {
            tracing::warn!(
                projects = all.len(),
                most = PROJECTS,
                "too many manifest projects: the last ones are ignored"
            );
        }
        let mut names = HashSet::new();
        let projects = all.iter().filter(|entry| !entry.id.is_empty() && names.insert(entry.id.as_str()));
        Self { agent: configuration.agent_id, projects: projects.take(PROJECTS).cloned().collect() }
    }

    /// Whether there is something to apply.
    fn is_empty(&self) -> bool {
        self.projects.is_empty()
    }
}

/// Why the pod does not take part in applying any more.
enum End {
    /// agentk shuts down.
    Shutdown,
    /// There is another configuration.
    Changed(Wanted),
    /// kas does not let agentk apply.
    NotServed(String),
}

impl Gitops {
    /// Creates the module. `pod` is the namespace and the name of the pod, if they are known.
    pub fn new(
        calls: Arc<Calls>,
        api: ApiServer,
        guard: Guard,
        pod: (&str, &str),
        version: (&str, &str),
        registry: &mut Registry,
    ) -> Self {
        let (namespace, name) = pod;
        let namespace = if namespace.is_empty() { api.namespace().to_owned() } else { namespace.to_owned() };
        let name: String =
            name.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')).collect();
        let name = if name.is_empty() { "agentk" } else { &name };
        // A pod that is started again under its name is another one.
        let identity = format!("{name}_{:016x}", rand::random::<u64>());
        let user_agent = format!("agentk/gitops:{identity} gitlab-agent/{}/{}", version.0, version.1);
        let user_agent = HeaderValue::try_from(user_agent);
        let user_agent = user_agent.unwrap_or(HeaderValue::from_static("agentk/gitops"));
        let api: Arc<dyn ClusterApi> = Arc::new(GuardedApi::new(api, guard, user_agent));
        let engine = Engine::new(Arc::clone(&api), Budget::default());
        let metrics = GitopsMetrics::new(registry);
        let shared = Shared { calls, api, engine, room: Room::default(), identity, metrics };
        Self { shared: Arc::new(shared), namespace, said: Mutex::default() }
    }

    async fn work(&self, mut context: Context) {
        let mut wanted = Wanted::default();
        let mut failures = 0;
        loop {
            if wanted.is_empty() {
                let Some(configuration) = context.next_configuration().await else { return };
                wanted = Wanted::read(&configuration);
                continue;
            }
            let asked = tokio::select! {
                configuration = context.next_configuration() => {
                    let Some(configuration) = configuration else { return };
                    wanted = Wanted::read(&configuration);
                    continue;
                }
                asked = self.ask(&wanted) => asked,
            };
            let pause = match asked {
                Ok(()) => {
                    failures = 0;
                    *self.said.lock() = None;
                    match self.take_part(&mut context, wanted.clone()).await {
                        End::Shutdown => return,
                        End::Changed(changed) => {
                            wanted = changed;
                            continue;
                        }
                        End::NotServed(text) => self.not_served(text),
                    }
                }
                Err(FeedError::NotServed(text)) => self.not_served(text),
                Err(error) => {
                    let pause = backoff(failures);
                    failures += 1;
                    tracing::info!(error = %error, retry_in = ?pause, "kas cannot be asked for manifests");
                    pause
                }
            };
            tokio::select! {
                configuration = context.next_configuration() => {
                    let Some(configuration) = configuration else { return };
                    wanted = Wanted::read(&configuration);
                }
                () = sleep(pause) => {}
            }
        }
    }

    /// Logs that this kas does not let agentk apply, unless that was logged. Returns a pause.
    fn not_served(&self, text: String) -> Duration {
        let mut said = self.said.lock();
        if said.as_ref() != Some(&text) {
            tracing::info!(kas = text, "agentk applies no manifests by itself, because kas does not let it");
            *said = Some(text);
        }
        ::gitops::varied(REFUSED)
    }

    /// Asks kas whether it lets agentk apply.
    async fn ask(&self, wanted: &Wanted) -> Result<(), FeedError> {
        let Some(first) = wanted.projects.first() else { return Ok(()) };
        if wanted.agent <= 0 {
            return Err(FeedError::Unavailable("kas does not say which agent this is".to_owned()));
        }
        let feed = Feed::new(Arc::clone(&self.shared.calls), first);
        match timeout(ASKED, feed.head("")).await {
            Ok(Err(error @ (FeedError::NotServed(_) | FeedError::Unavailable(_)))) => Err(error),
            // What is wrong with this project concerns no other one.
            Ok(Ok(_) | Err(FeedError::Wrong(_) | FeedError::Denied(_))) | Err(_) => Ok(()),
        }
    }

    /// Takes, keeps and gives up the Lease, and applies while this pod holds it.
    async fn take_part(&self, context: &mut Context, mut wanted: Wanted) -> End {
        let api = Arc::clone(&self.shared.api);
        let mut elector = Elector::new(api, &self.namespace, wanted.agent, &self.shared.identity);
        let mut leading: Option<Leading> = None;
        let mut said = None;
        let mut next = Instant::now();
        let end = loop {
            let ends = leading.as_ref().map(|leading| leading.term.until());
            let refused = async {
                match &mut leading {
                    Some(leading) => leading.refused.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                configuration = context.next_configuration() => {
                    let Some(configuration) = configuration else { break End::Shutdown };
                    let changed = Wanted::read(&configuration);
                    if changed.is_empty() || changed.agent != wanted.agent {
                        break End::Changed(changed);
                    }
                    wanted = changed;
                    if let Some(leading) = &mut leading {
                        leading.reconcile(&self.shared, &wanted);
                    }
                }
                text = refused => break End::NotServed(text.unwrap_or_default()),
                () = sleep_until(next) => {
                    next = Instant::now() + ::gitops::varied(lease::RETRY);
                    let result = elector.attempt().await;
                    log(&mut said, &elector, &result);
                    match (elector.held_until(), &mut leading) {
                        (Some(held), Some(leading)) => {
                            leading.term.extend(held);
                            leading.reconcile(&self.shared, &wanted);
                        }
                        (Some(held), None) => {
                            tracing::info!(lease = elector.place(), "this pod applies the manifests of the agent");
                            self.shared.metrics.leads.set(1);
                            leading.insert(Leading::new(held)).reconcile(&self.shared, &wanted);
                        }
                        (None, Some(_)) => self.lost(&mut leading),
                        (None, None) => {}
                    }
                }
                () = until(ends) => self.lost(&mut leading),
            }
        };
        if let Some(leading) = leading.take() {
            leading.end().await;
            self.shared.metrics.leads.set(0);
            match elector.release().await {
                Ok(()) => tracing::info!(lease = elector.place(), "this pod applies no manifests any more"),
                Err(error) => tracing::info!(
                    lease = elector.place(),
                    error,
                    "this pod applies no manifests any more, but cannot release its Lease"
                ),
            }
        }
        end
    }

    /// Another pod may apply from now on.
    fn lost(&self, leading: &mut Option<Leading>) {
        if leading.take().is_some() {
            self.shared.metrics.leads.set(0);
            tracing::warn!("this pod could not renew its Lease in time, and stops applying manifests");
        }
    }
}

/// Logs what is new about the Lease.
fn log(said: &mut Option<String>, elector: &Elector, result: &Result<Holder, String>) {
    let text = match result {
        Ok(Holder::Own(_)) => String::new(),
        Ok(Holder::Other(holder)) => holder.clone(),
        Err(error) => error.clone(),
    };
    if said.as_ref() == Some(&text) {
        return;
    }
    match result {
        Ok(Holder::Own(_)) => {}
        Ok(Holder::Other(holder)) => {
            tracing::info!(holder, lease = elector.place(), "another pod applies the manifests of the agent");
        }
        Err(error) => tracing::warn!(
            error,
            lease = elector.place(),
            "the Lease cannot be had, and without it this pod applies no manifests: agentk needs the right to get, create \
             and update leases in its namespace"
        ),
    }
    *said = Some(text);
}

impl Module for Gitops {
    fn run(self: Arc<Self>, context: Context) -> Task {
        Box::pin(async move { self.work(context).await })
    }
}

/// The projects of the pod that applies. Dropping it aborts them.
struct Leading {
    term: Arc<Term>,
    claims: Arc<Claims>,
    projects: HashMap<String, Running>,
    /// Gets the text with which kas does not let agentk apply.
    refusals: mpsc::Sender<String>,
    refused: mpsc::Receiver<String>,
}

/// A project and its task.
struct Running {
    entry: ManifestProjectCf,
    over: CancellationToken,
    task: JoinHandle<()>,
    /// When a task that has ended by a fault is started again.
    restart: Option<Instant>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Leading {
    fn new(held: Instant) -> Self {
        let (refusals, refused) = mpsc::channel(1);
        let (projects, claims) = (HashMap::new(), Arc::default());
        Self { term: Arc::new(Term::new(held)), claims, projects, refusals, refused }
    }

    /// Makes the tasks what the configuration says.
    fn reconcile(&mut self, shared: &Arc<Shared>, wanted: &Wanted) {
        for entry in &wanted.projects {
            let old = self.projects.get_mut(&entry.id);
            if old.is_some_and(|old| old.entry == *entry && old.rests()) {
                continue;
            }
            let old = self.projects.remove(&entry.id);
            let running = self.start(shared, wanted.agent, entry, old);
            self.projects.insert(entry.id.clone(), running);
        }
        let claims = &self.claims;
        self.projects.retain(|name, _| {
            let stays = wanted.projects.iter().any(|entry| entry.id == *name);
            if !stays {
                claims.release(name);
                tracing::info!(
                    project = name,
                    "the configuration does not name the manifest project any more: its objects and its inventory stay"
                );
            }
            stays
        });
    }

    fn start(
        &self,
        shared: &Arc<Shared>,
        agent: i64,
        entry: &ManifestProjectCf,
        old: Option<Running>,
    ) -> Running {
        let over = self.term.over.child_token();
        let task = ProjectTask {
            shared: Arc::clone(shared),
            term: Arc::clone(&self.term),
            claims: Arc::clone(&self.claims),
            agent,
            entry: entry.clone(),
            over: over.clone(),
        };
        let refusals = self.refusals.clone();
        let task = tokio::spawn(async move {
            if let Some(mut old) = old {
                old.task.abort();
                // It has ended or was aborted. Two of them at once would only disturb each other.
                let _ = (&mut old.task).await;
            }
            if let Some(text) = task.run().await {
                // One text is enough.
                let _ = refusals.try_send(text);
            }
        });
        Running { entry: entry.clone(), over, task, restart: None }
    }

    /// Ends the projects between two requests. Those that take long are aborted.
    async fn end(mut self) {
        self.term.over.cancel();
        let ending = async {
            for running in self.projects.values_mut() {
                // It has ended, or was aborted by a fault.
                let _ = (&mut running.task).await;
            }
        };
        let _ = timeout(ENDING, ending).await;
    }
}

impl Running {
    /// Whether the task runs, or ended so shortly ago that it is not started again yet.
    fn rests(&mut self) -> bool {
        if !self.task.is_finished() || self.over.is_cancelled() {
            return true;
        }
        let now = Instant::now();
        match self.restart {
            Some(restart) => now < restart,
            None => {
                tracing::error!(
                    project = self.entry.id,
                    "applying a manifest project has ended by a fault in it: it is started again after a pause"
                );
                self.restart = Some(now + ::gitops::varied(BACKOFF[3]));
                true
            }
        }
    }
}
