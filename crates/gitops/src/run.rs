//! One run: what all its steps share.

use std::{
    collections::{BTreeSet, HashMap},
    future::Future,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::future::join;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep},
};

use crate::{
    call::{Answer, Call, Caller, Gate, MANAGER, METADATA_LIST},
    discovery::{Api, discover},
    engine::Engine,
    inventory::{COMMIT, FENCE, Inventory, PROJECT, Wanted},
    marks::ID_LABEL,
    object::ObjectId,
    path::segment,
    progress::{
        Action, Head, Health, InventoryRef, ObjectReport, Observer, Outcome, Phase, Progress, Report,
    },
    project::Project,
};

/// How long discovery is kept.
const DISCOVERY_AGE: Duration = Duration::from_secs(600);

/// How often the fence is written again while a run goes on. A planner that was replaced notices within this
/// time.
const FENCE_EVERY: Duration = Duration::from_secs(10);

/// How long after it was written the fence holds. Without a newer one, nothing is applied or deleted: the
/// process may have been paused, and another planner may have taken over meanwhile.
const FENCE_HOLDS: Duration = Duration::from_secs(12);

/// How many inventories of all projects are read at once.
const PAGE: usize = 500;

/// The longest sleep between two looks at whether the run is to end.
const NAP: Duration = Duration::from_secs(2);

/// The shared state of a run.
pub(crate) struct Run<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) caller: Caller,
    pub(crate) project: &'a Project,
    pub(crate) wanted: Wanted,
    head: Option<&'a dyn Head>,
    observer: &'a dyn Observer,
    started: Instant,
    state: Mutex<State>,
    /// When the fence was last written. `None`: there is none yet.
    fence: watch::Sender<Option<Instant>>,
}

#[derive(Default)]
struct State {
    /// Why no further call may be made.
    lost: Option<Outcome>,
    objects: Vec<ObjectReport>,
    places: HashMap<ObjectId, usize>,
    warnings: Vec<String>,
    inventory: Option<InventoryRef>,
    to_prune: usize,
}

/// Warnings that are kept.
const MAX_WARNINGS: usize = 1_000;

impl Gate for Run<'_> {
    type End = Outcome;

    fn check(&self) -> Result<(), Outcome> {
        if let Some(stop) = self.head.and_then(Head::stop) {
            return Err(Outcome::Stopped(stop));
        }
        match &self.state.lock().lost {
            Some(end) => Err(end.clone()),
            None => Ok(()),
        }
    }

    fn holds(&self) -> bool {
        is_fresh(*self.fence.borrow())
    }

    async fn held(&self) {
        let is_over = |at: &Option<Instant>| is_fresh(*at) || self.state.lock().lost.is_some();
        // The sender lives as long as this run.
        let _ = self.fence.subscribe().wait_for(is_over).await;
    }

    fn unreachable(&self, why: String) -> Outcome {
        Outcome::Interrupted(format!("the cluster cannot be reached: {why}"))
    }
}

/// Whether a fence that was written then still holds.
fn is_fresh(written: Option<Instant>) -> bool {
    written.is_none_or(|at| at.elapsed() <= FENCE_HOLDS)
}

impl<'a> Run<'a> {
    /// A new run. Without a head it cannot be stopped.
    pub(crate) fn new(
        engine: &'a Engine,
        project: &'a Project,
        wanted: Wanted,
        head: Option<&'a dyn Head>,
        observer: &'a dyn Observer,
    ) -> Self {
        Self {
            engine,
            caller: Caller::new(engine.api.clone(), engine.budget.clone()),
            project,
            wanted,
            head,
            observer,
            started: Instant::now(),
            state: Mutex::new(State::default()),
            fence: watch::Sender::new(None),
        }
    }

    pub(crate) async fn call(&self, call: Call) -> Result<Answer, Outcome> {
        self.caller.call(self, &call).await
    }

    pub(crate) fn phase(&self, phase: Phase) {
        self.observer.on(Progress::Phase(phase));
    }

    pub(crate) fn warn(&self, warning: String) {
        {
            let warnings = &mut self.state.lock().warnings;
            if warnings.len() == MAX_WARNINGS || warnings.contains(&warning) {
                return;
            }
            warnings.push(warning.clone());
        }
        self.observer.on(Progress::Warning(warning));
    }

    /// Adds to the report, or replaces what it says about the object.
    pub(crate) fn report(&self, report: ObjectReport) {
        {
            let state = &mut *self.state.lock();
            match state.places.get(&report.id) {
                Some(at) => state.objects[*at] = report.clone(),
                None => {
                    state.places.insert(report.id.clone(), state.objects.len());
                    state.objects.push(report.clone());
                }
            }
        }
        self.observer.on(Progress::Object(report));
    }

    /// Reports an object that is no longer in the set.
    pub(crate) fn report_left(&self, id: &ObjectId, action: Action, message: String) {
        self.report(ObjectReport { id: id.clone(), action, health: Health::Unknown, message, file: None });
    }

    /// What was done with an object so far.
    pub(crate) fn action(&self, id: &ObjectId) -> Option<Action> {
        let state = self.state.lock();
        state.places.get(id).map(|at| state.objects[*at].action)
    }

    /// Whether any object has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.lock().objects.iter().any(|object| object.action == Action::Failed)
    }

    pub(crate) fn set_to_prune(&self, count: usize) {
        self.state.lock().to_prune = count;
    }

    pub(crate) fn finish(self, commit: Arc<str>, outcome: Outcome) -> Report {
        let state = self.state.into_inner();
        Report {
            commit,
            outcome,
            objects: state.objects,
            to_prune: state.to_prune,
            warnings: state.warnings,
            inventory: state.inventory,
            took: self.started.elapsed(),
        }
    }

    /// Sleeps, but ends soon after the run is to end.
    pub(crate) async fn sleep(&self, time: Duration) -> Result<(), Outcome> {
        let until = Instant::now() + time;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            sleep(left.min(NAP)).await;
        }
    }

    /// Returns the kinds of the cluster: those that are known, unless they are too old or `anew` is said.
    pub(crate) async fn api(&self, anew: bool) -> Result<Arc<Api>, Outcome> {
        let known = self.engine.discovered.lock().clone();
        if let Some((at, api)) = known
            && !anew
            && at.elapsed() < DISCOVERY_AGE
        {
            return Ok(api);
        }
        let api = Arc::new(discover(&self.caller, self).await?.map_err(Outcome::Interrupted)?);
        *self.engine.discovered.lock() = Some((Instant::now(), api.clone()));
        Ok(api)
    }

    /// Resolves the head again.
    ///
    /// # Errors
    /// It cannot be resolved, or is not this one.
    pub(crate) async fn confirm(&self, commit: Option<&Arc<str>>) -> Result<(), Outcome> {
        self.check()?;
        let Some(head) = self.head else { return Ok(()) };
        match head.resolve().await {
            Err(why) => Err(Outcome::Interrupted(format!("repository cannot be read: {why}"))),
            Ok(now) if now.as_ref() == commit => Ok(()),
            Ok(now) => Err(Outcome::HeadMoved(now)),
        }
    }

    /// Reads the inventories of the project: usually there is one, or none.
    ///
    /// # Errors
    /// Nothing may be written.
    pub(crate) async fn inventories(&self) -> Result<Vec<Inventory>, Outcome> {
        let refused = |why: String| Outcome::Refused(format!("the inventory cannot be read: {why}"));
        let answer = self.call(Call::get(self.wanted.list(), None)).await?;
        if !answer.is_ok() {
            return Err(refused(answer.words()));
        }
        let list = answer.json().map_err(refused)?;
        let inventories = Inventory::read_list(&list, &self.wanted).map_err(refused)?;
        let own = &self.wanted.project;
        let is_other = |it: &&Inventory| it.project.as_ref().is_some_and(|project| project != own);
        if let Some(other) = inventories.iter().find(is_other) {
            let project = other.project.as_deref().unwrap_or_default();
            return Err(Outcome::Refused(format!(
                "the inventory {}/{} with the id {} is that of project {project}: this one would delete its objects; \
                 choose another id in the template, or, if {project} is not applied any more, remove the \
                 annotation {PROJECT} from the inventory",
                self.wanted.namespace, other.name, self.wanted.id
            )));
        }
        Ok(inventories)
    }

    /// Reads the ids of all inventories that the project has written, and the default one.
    pub(crate) async fn inventory_ids(&self) -> Result<BTreeSet<String>, Outcome> {
        let refused = |why: String| Outcome::Refused(format!("the inventories cannot be read: {why}"));
        let mut ids = BTreeSet::new();
        let mut more = String::new();
        loop {
            let target = format!("{}&limit={PAGE}&continue={}", self.wanted.list_all(), segment(&more));
            let answer = self.call(Call::get(target, Some(METADATA_LIST))).await?;
            if !answer.is_ok() {
                return Err(refused(answer.words()));
            }
            let list = answer.json().map_err(refused)?;
            for item in list["items"].as_array().into_iter().flatten() {
                let metadata = &item["metadata"];
                let Some(id) = metadata["labels"][ID_LABEL].as_str() else { continue };
                let own = &*self.wanted.project;
                if metadata["annotations"][PROJECT].as_str().map_or(id == own, |project| project == own) {
                    ids.insert(id.to_owned());
                }
            }
            match list["metadata"]["continue"].as_str() {
                Some(next) if !next.is_empty() && next != more => next.clone_into(&mut more),
                _ => return Ok(ids),
            }
        }
    }

    fn next_fence(&self) -> String {
        format!("{}:{:x}", self.project.replica, self.engine.fences.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes the fence of an inventory that was just read.
    pub(crate) fn fence(&self, inventory: &Inventory) -> Fence {
        self.state.lock().inventory = Some(inventory.reference(&self.wanted.namespace));
        Fence {
            target: format!("{}/{}", self.wanted.collection(), segment(&inventory.name)),
            name: inventory.name.clone(),
            uid: inventory.uid.clone(),
            resource_version: tokio::sync::Mutex::new(inventory.resource_version.clone()),
        }
    }

    /// Creates an inventory.
    pub(crate) async fn create_inventory(&self, keys: &BTreeSet<String>) -> Result<Fence, Outcome> {
        let body = self.wanted.body(keys, &self.next_fence());
        let target = format!("{}?fieldManager={}", self.wanted.collection(), MANAGER);
        let answer = self.call(Call::post(target, &body)).await?;
        let (namespace, name) = (&self.wanted.namespace, &self.wanted.name);
        match answer.status.as_u16() {
            409 => {
                let target = format!("{}/{}", self.wanted.collection(), segment(name));
                let answer = self.call(Call::get(target, None)).await?;
                let existing = answer.json().unwrap_or_default();
                if answer.is_ok() && existing["metadata"]["labels"][ID_LABEL] != self.wanted.id {
                    return Err(Outcome::Refused(format!(
                        "the ConfigMap {namespace}/{name} exists and is not the inventory: it does not have the \
                         label {}: {}",
                        ID_LABEL, self.wanted.id
                    )));
                }
                Err(Outcome::Fenced)
            }
            404 => Err(Outcome::Refused(format!(
                "the inventory cannot be created: {}; the namespace {namespace} must exist or be in the manifests",
                answer.words()
            ))),
            _ if !answer.is_ok() => {
                Err(Outcome::Refused(format!("the inventory cannot be created: {}", answer.words())))
            }
            _ => {
                self.fenced_at(&answer);
                let created = answer.json().and_then(|created| Inventory::read(&created, &self.wanted));
                Ok(self.fence(&created.map_err(Outcome::Interrupted)?))
            }
        }
    }

    /// Notes that the fence was written.
    fn fenced_at(&self, answer: &Answer) {
        // Where each call takes long, half of the time is left for the work in any case.
        let latest = Instant::now().checked_sub(FENCE_EVERY / 2);
        let at = latest.map_or(answer.begun, |latest| answer.begun.max(latest));
        self.fence.send_replace(Some(at));
    }

    /// Does some work while the fence is written again and again.
    pub(crate) async fn fenced<T>(
        &self,
        fence: &Fence,
        work: impl Future<Output = Result<T, Outcome>>,
    ) -> Result<T, Outcome> {
        let done = Notify::new();
        let work = async {
            let result = work.await;
            done.notify_one();
            result
        };
        let keep = async {
            loop {
                // Only the sleep is cut short: a write that has begun is completed, because its result is
                // the next `resourceVersion`.
                tokio::select! {
                    () = done.notified() => return,
                    () = sleep(FENCE_EVERY) => {}
                }
                if let Err(end) = fence.renew(self).await {
                    self.state.lock().lost.get_or_insert(end);
                    // Wakes what waits for the fence.
                    self.fence.send_modify(|_| {});
                    return;
                }
            }
        };
        let (result, ()) = join(work, keep).await;
        let lost = self.state.lock().lost.clone();
        match lost {
            Some(end) => Err(end),
            None => result,
        }
    }
}

/// The inventory that this run writes. Each write must find the `resourceVersion` of the last one.
pub(crate) struct Fence {
    target: String,
    pub(crate) name: String,
    uid: String,
    resource_version: tokio::sync::Mutex<String>,
}

impl Fence {
    /// Writes only the fence.
    pub(crate) async fn renew(&self, run: &Run<'_>) -> Result<(), Outcome> {
        self.write(run, None, Map::new()).await
    }

    /// Writes keys (`null`: removed), and the commit if something is said about it.
    pub(crate) async fn write(
        &self,
        run: &Run<'_>,
        commit: Option<Option<&str>>,
        data: Map<String, Value>,
    ) -> Result<(), Outcome> {
        let mut version = self.resource_version.lock().await;
        let mut annotations = json!({ FENCE: run.next_fence(), PROJECT: run.wanted.project });
        if let Some(commit) = commit {
            annotations[COMMIT] = json!(commit);
        }
        let mut body = json!({ "metadata": {
            "uid": self.uid, "resourceVersion": *version, "annotations": annotations,
        } });
        if !data.is_empty() {
            body["data"] = Value::Object(data);
        }
        let target = format!("{}?fieldManager={}", self.target, MANAGER);
        let answer = run.call(Call::merge(target, &body)).await?;
        match answer.status.as_u16() {
            404 | 409 => return Err(Outcome::Fenced),
            _ if !answer.is_ok() => {
                return Err(Outcome::Interrupted(format!(
                    "the inventory cannot be written: {}",
                    answer.words()
                )));
            }
            _ => {}
        }
        let new = answer.json().map_err(Outcome::Interrupted)?;
        match new["metadata"]["resourceVersion"].as_str() {
            Some(new) if !new.is_empty() => {
                new.clone_into(&mut version);
                run.fenced_at(&answer);
                Ok(())
            }
            _ => Err(Outcome::Interrupted("the inventory has no resourceVersion".to_owned())),
        }
    }

    /// Deletes the inventory.
    pub(crate) async fn delete(self, run: &Run<'_>) -> Result<(), Outcome> {
        let version = self.resource_version.into_inner();
        delete_inventory(run, &self.target, &self.uid, &version).await
    }
}

/// Deletes an inventory that has not changed since it was read.
pub(crate) async fn delete_inventory(
    run: &Run<'_>,
    target: &str,
    uid: &str,
    resource_version: &str,
) -> Result<(), Outcome> {
    let options = json!({
        "apiVersion": "v1", "kind": "DeleteOptions",
        "preconditions": { "uid": uid, "resourceVersion": resource_version },
    });
    let answer = run.call(Call::delete(target.to_owned(), &options)).await?;
    match answer.status.as_u16() {
        409 => Err(Outcome::Fenced),
        404 => Ok(()),
        _ if answer.is_ok() => Ok(()),
        _ => Err(Outcome::Interrupted(format!("an inventory cannot be deleted: {}", answer.words()))),
    }
}
