//! Views: what a row takes, and how soon a change in the API server is at those that look.
//!
//! kas, agentk, the API server and etcd are processes. The callers are in this process, each with a
//! connection of its own. A change is a patch of a pod that has not changed before, so that each caller gets
//! each of them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use parking_lot::Mutex;
use prost::Message as _;
use proto::kas::api::v1::{WatchViewRequest, WatchViewResponse, watch_view_response::Event};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    caller::Caller,
    kas::{AgentEntry, Kas, Options as KasOptions, token},
    kubernetes::Kubernetes,
    link::{Next, Stream},
    mesh::{Mesh, Options},
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};

use super::Part;
use crate::{
    report::{VIEW_FRESH, VIEW_ROW, VIEW_WATCHES, short},
    times::Times,
};

const WATCH_VIEW: &str = "/kas.api.v1.KasApi/WatchView";
const REPLICAS: usize = 3;
const AGENT: i64 = 1;
/// Callers that look at the same view. The key is for 100.
const VIEWERS: usize = 100;
/// Pods of a namespace.
const PODS: usize = 5_000;
/// Namespaces whose rows are weighed, after those of the first: what kas needs once, such as room for the
/// pages of a list, is there then. In a short run it is one.
const WEIGHED: usize = 2;
/// The names of pods are as long as those of a Deployment.
const NAME: &str = "checkout-service-7c9d8b6f5";
/// Between the beginnings of two changes.
const PACE: Duration = Duration::from_millis(100);
/// Time limit of a step.
const STEP: Duration = Duration::from_secs(120);
/// Memory is settled if it has not become less for so many looks, one each second.
const SETTLED: u32 = 5;

/// What was measured.
#[derive(Debug, Default)]
struct Measured {
    /// From the moment at which a change is sent to the API server until it is at a caller.
    fresh: Times,
    /// The same until the API server has answered.
    answered: Times,
    /// Open watches of each replica.
    watches: Vec<f64>,
    /// Rows that were weighed, the resident memory in KiB before and with them, and what kas says of them.
    rows: usize,
    resident: [u64; 2],
    counted: f64,
}

/// A client that looks at a view.
struct Viewer(Stream);

impl Viewer {
    async fn open(caller: &Caller, namespaces: &[String]) -> Result<Self> {
        let request = WatchViewRequest {
            agents: format!("id={AGENT}"),
            view: "pods".to_owned(),
            namespaces: namespaces.to_vec(),
            ..WatchViewRequest::default()
        };
        let mut stream = caller.open(caller.request(WATCH_VIEW)).await?;
        let reset = |reason| anyhow::anyhow!("the view was reset: {reason:?}");
        stream.send_message(&request).await.map_err(reset)?;
        stream.half_close().map_err(reset)?;
        Ok(Self(stream))
    }

    async fn next(&mut self) -> Result<Event> {
        // Whoever looks may wait long, until all others look, too.
        match self.0.next_unbounded().await {
            Next::Message(message) => {
                WatchViewResponse::decode(message)?.event.context("an event of a later version")
            }
            end => bail!("the view has ended: {end:?}"),
        }
    }

    /// Reads until everything was sent, and returns how many rows that are.
    async fn synced(&mut self) -> Result<usize> {
        let mut rows = 0;
        loop {
            match self.next().await? {
                Event::Upserted(some) => rows += some.rows.len(),
                Event::Synced(_) => return Ok(rows),
                _ => {}
            }
        }
    }

    /// Tells which changes have arrived, and when.
    async fn follow(mut self, arrived: mpsc::Sender<(usize, Instant)>) -> Result<()> {
        loop {
            let Event::Upserted(rows) = self.next().await? else { continue };
            let now = Instant::now();
            for change in rows.rows.iter().flat_map(|row| &row.cells).filter_map(|cell| change_of(cell)) {
                // The receiver is gone once it has everything.
                let _ = arrived.send((change, now)).await;
            }
        }
    }
}

/// The reason that a change gives a pod, which its column `Status` shows.
fn reason(change: usize) -> String {
    format!("Change{change}")
}

fn change_of(cell: &str) -> Option<usize> {
    cell.strip_prefix("Change")?.parse().ok()
}

fn pod(n: usize) -> String {
    format!("{NAME}-{n:05}")
}

/// Opens a view, again if the agent or its rows are not there yet.
async fn open(caller: &Caller, namespaces: &[String], rows: usize) -> Result<Viewer> {
    let opens = async {
        loop {
            let mut viewer = Viewer::open(caller, namespaces).await?;
            if viewer.synced().await? == rows {
                return Ok(viewer);
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(STEP, opens).await.with_context(|| format!("no view with {rows} rows"))?
}

/// Measures everything.
pub(super) async fn measure(changes: usize, quick: bool) -> Result<Part> {
    let kubernetes = Kubernetes::start().await?;
    let count = 1 + if quick { 1 } else { WEIGHED };
    let namespaces: Vec<String> = (0..count).map(|n| format!("bench-{n}")).collect();
    for namespace in &namespaces {
        kubernetes.create_running_pods(namespace, NAME, PODS).await?;
    }
    let mut it = Measured::default();
    it.weigh(&kubernetes, &namespaces).await?;
    let namespace = namespaces.first().context("a namespace")?;
    it.look(&kubernetes, namespace, changes).await?;
    Ok(it.part())
}

impl Measured {
    /// Measures the memory of rows, in a kas that has nothing else to do.
    async fn weigh(&mut self, kubernetes: &Kubernetes, namespaces: &[String]) -> Result<()> {
        let options = KasOptions { agents: vec![AgentEntry::new(AGENT)], ..KasOptions::default() };
        let kas = Kas::start_with(options).await?;
        let kubeconfig = kubernetes.admin_kubeconfig();
        let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &kubeconfig).await?;
        agentk.connected().await?;
        let caller = kas.caller().await?;
        let (first, others) = namespaces.split_at(1);
        // The rows stay for a while when nobody looks any more.
        drop(open(&caller, first, PODS).await?);
        let before = settled(&kas).await?;
        let counted = kas.metric("kas_view_bytes").await?;
        self.rows = PODS * others.len();
        drop(open(&caller, others, self.rows).await?);
        self.resident = [before, settled(&kas).await?];
        self.counted = kas.metric("kas_view_bytes").await? - counted;
        ensure!(self.counted > 0.0, "kas says that {} rows take no memory", self.rows);
        Ok(())
    }

    /// Measures changes, with everybody looking.
    async fn look(&mut self, kubernetes: &Kubernetes, namespace: &str, changes: usize) -> Result<()> {
        ensure!(changes <= PODS, "at most {PODS} changes");
        let options = Options { replicas: REPLICAS, agents: AGENT, ..Options::default() };
        let mesh = Mesh::start_with(options).await?;
        mesh.meshed().await?;
        // Two of three replicas hold the agent, as in a deployment.
        let urls: Vec<String> = (0..2).map(|n| format!("grpc://{}", mesh.agents(n))).collect();
        let kubeconfig = kubernetes.admin_kubeconfig();
        let kubeconfig = kubeconfig.to_str().context("a path in UTF-8")?;
        let agentk =
            Agentk::start_at_urls(&urls.join(","), &token(AGENT), &["--kubeconfig", kubeconfig]).await?;
        agentk.connected().await?;
        let (sender, mut arrived) = mpsc::channel(VIEWERS);
        let mut viewers = JoinSet::new();
        let namespaces = [namespace.to_owned()];
        for n in 0..VIEWERS {
            let caller = mesh.caller(n % REPLICAS).await?;
            viewers.spawn(open(&caller, &namespaces, PODS).await?.follow(sender.clone()));
        }
        drop(sender);
        let writer = kubernetes.writer().await?;
        let begun = Arc::new(Mutex::new(BTreeMap::new()));
        let change = async {
            let (mut pace, mut answered) = (interval(PACE), Vec::new());
            pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
            for n in 0..changes {
                pace.tick().await;
                let path = format!("/api/v1/namespaces/{namespace}/pods/{}/status", pod(n));
                let now = Instant::now();
                begun.lock().insert(n, now);
                writer.merge(&path, &json!({ "status": { "reason": reason(n) } })).await?;
                answered.push(now.elapsed());
            }
            anyhow::Ok(answered)
        };
        let arrive = async {
            let mut times = Vec::with_capacity(changes * VIEWERS);
            while times.len() < changes * VIEWERS {
                let (n, at) = arrived.recv().await.context("nobody looks any more")?;
                let begun = begun.lock().get(&n).copied().context("a change that nobody has made")?;
                times.push(at.saturating_duration_since(begun));
            }
            anyhow::Ok(times)
        };
        let both = async { tokio::try_join!(change, arrive) };
        let (answered, fresh) = tokio::select! {
            both = timeout(STEP + PACE * u32::try_from(changes)?, both) => {
                both.context("changes do not arrive")??
            }
            ended = viewers.join_next() => bail!("somebody does not look any more: {ended:?}"),
        };
        self.answered.extend(answered);
        self.fresh.extend(fresh);
        for n in 0..REPLICAS {
            self.watches.push(mesh.kas(n).metric("kas_view_watches").await?);
        }
        Ok(())
    }

    /// Bytes of a row.
    fn row(&self) -> f64 {
        self.resident[1].saturating_sub(self.resident[0]) as f64 * 1024.0 / self.rows as f64
    }

    fn part(&self) -> Part {
        let mut part = Part::default();
        part.values.insert(VIEW_ROW, self.row());
        part.values.extend(self.watches.iter().copied().reduce(f64::max).map(|most| (VIEW_WATCHES, most)));
        let how = "a patch of a pod is sent to the API server, until it is at one of 100 callers";
        part.times(VIEW_FRESH, "change at a caller", &self.fresh, how);
        part.row("change answered", &self.answered, "the same, until the API server has answered the patch");
        let [before, after] = self.resident;
        part.notes.push(format!(
            "Memory of kas: {before} KiB with {PODS} rows of pods, {after} KiB with {} more: {} bytes for each, of which \
             it counts {} against `views.memory`.",
            self.rows,
            short(self.row()),
            short(self.counted / self.rows as f64),
        ));
        let watches: Vec<String> = self.watches.iter().map(|count| short(*count)).collect();
        part.notes.push(format!(
            "{VIEWERS} callers at {REPLICAS} replicas, two of which hold the agent, look at {PODS} pods. Watches of each \
             replica: {}.",
            watches.join(", ")
        ));
        part
    }
}

/// Returns the resident memory in KiB, once it does not become less.
async fn settled(kas: &Kas) -> Result<u64> {
    let (mut least, mut looks) = (u64::MAX, 0);
    while looks < SETTLED {
        sleep(Duration::from_secs(1)).await;
        let now = kas.process.usage()?.resident_kib;
        looks = if now < least { 0 } else { looks + 1 };
        least = least.min(now);
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_known_by_its_cell() {
        assert_eq!([change_of(&reason(17)), change_of("Pending"), change_of("0/1")], [Some(17), None, None]);
    }

    #[test]
    fn the_memory_of_a_row_is_the_growth_divided_by_their_number() {
        let mut measured = Measured {
            rows: 2_048,
            resident: [1_000, 1_400],
            watches: vec![1.0, 2.0],
            ..Measured::default()
        };
        measured.fresh.push(Duration::from_millis(30));
        let part = measured.part();
        assert_eq!(
            [part.values[VIEW_ROW], part.values[VIEW_WATCHES], part.values[VIEW_FRESH]],
            [200.0, 2.0, 30.0]
        );
    }
}
