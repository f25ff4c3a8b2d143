//! [`Sinks`]: takes news, and keeps it for each sink that wants it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cluster::Connection;
use fleet::Candidate;
use ids::{Agent, AgentId};
use parking_lot::Mutex;
use sinks::{Kind, Limits, News, Queue, Record};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::{sync::Notify, time::Instant};

use super::metrics::SinkMetrics;

/// After this time an item is not tried again.
const AGE: Duration = Duration::from_secs(3_600);
/// How often it is looked whether there is room.
const ROOM: Duration = Duration::from_millis(50);

/// The labels of one agent.
pub(super) type LabelsOfAgent = Arc<BTreeMap<String, String>>;

/// An agent, as selectors of sinks know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) id: AgentId,
    /// `None`: not known.
    pub(super) project: Option<i64>,
    /// Empty: not known.
    pub(super) name: Arc<str>,
    /// `None`: not known, or no sink needs them.
    pub(super) labels: Option<LabelsOfAgent>,
}

impl Known {
    /// Whether it has the same name and project as another one.
    pub(super) fn is_named_as(&self, other: &Self) -> bool {
        (self.id, self.project, &self.name) == (other.id, other.project, &other.name)
    }
}

impl From<&Connection> for Known {
    fn from(connection: &Connection) -> Self {
        Self {
            id: connection.agent,
            project: Some(connection.project_id),
            name: Arc::clone(&connection.name),
            labels: None,
        }
    }
}

impl From<&Agent> for Known {
    fn from(agent: &Agent) -> Self {
        Self { id: agent.id, project: Some(agent.project_id), name: (*agent.name).into(), labels: None }
    }
}

/// What waits for one sink.
pub(super) struct Waiting {
    pub(super) config: kas_config::Sink,
    pub(super) queue: Mutex<Queue<Arc<Record>>>,
    /// Something has come.
    pub(super) wake: Notify,
    /// It takes nothing at the moment, so nobody waits for room in its queue.
    pub(super) is_failing: AtomicBool,
    /// Something is being sent.
    pub(super) is_sending: AtomicBool,
}

impl Waiting {
    fn wants(&self, kind: Kind, agent: &Known) -> bool {
        let name = (!agent.name.is_empty()).then_some(&*agent.name);
        let selector = &self.config.agents;
        self.config.news.contains(&kind)
            && selector.matches(Candidate { id: agent.id, name, project: agent.project })
            && (!selector.needs_labels()
                || agent.labels.as_ref().is_some_and(|labels| selector.matches_labels(labels)))
    }
}

/// Which sinks get an item, of those that want it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    All,
    /// Those that select agents by their labels.
    Labelled,
    /// The others.
    Unlabelled,
}

impl To {
    fn has(self, sink: &Waiting) -> bool {
        match self {
            Self::All => true,
            Self::Labelled => sink.config.agents.needs_labels(),
            Self::Unlabelled => !sink.config.agents.needs_labels(),
        }
    }
}

/// All sinks of this replica.
pub(crate) struct Sinks {
    pub(super) all: Vec<Arc<Waiting>>,
    pub(super) metrics: Arc<SinkMetrics>,
    begun: Instant,
}

impl Sinks {
    /// Returns the sinks of the configuration. News waits until they are sent to.
    pub(crate) fn new(config: &kas_config::Sinks, metrics: Arc<SinkMetrics>) -> Arc<Self> {
        let all = config.targets.iter().map(|sink| {
            metrics.declare(&sink.name);
            let limits = Limits { items: sink.items as usize, bytes: sink.bytes as usize, age: AGE };
            Arc::new(Waiting {
                config: sink.clone(),
                queue: Mutex::new(Queue::new(limits)),
                wake: Notify::new(),
                is_failing: AtomicBool::new(false),
                is_sending: AtomicBool::new(false),
            })
        });
        Arc::new(Self { all: all.collect(), metrics, begun: Instant::now() })
    }

    pub(super) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Whether a sink wants news of this kind of some agent.
    pub(super) fn want(&self, kind: Kind) -> bool {
        self.all.iter().any(|sink| sink.config.news.contains(&kind))
    }

    /// Whether a sink that wants news of this kind selects agents by their labels.
    pub(super) fn need_labels(&self, kind: Kind) -> bool {
        let mut sinks = self.all.iter().filter(|sink| sink.config.news.contains(&kind));
        sinks.any(|sink| sink.config.agents.needs_labels())
    }

    /// Returns which of the sinks want news of this kind of an agent.
    pub(super) fn wanting(&self, kind: Kind, agent: &Known) -> Vec<bool> {
        self.all.iter().map(|sink| sink.wants(kind, agent)).collect()
    }

    /// Whether a sink wants news of this kind of an agent.
    pub(super) fn want_of(&self, kind: Kind, agent: &Known) -> bool {
        self.all.iter().any(|sink| sink.wants(kind, agent))
    }

    /// Keeps an item for each sink that wants it.
    pub(super) fn tell(&self, agent: &Known, news: News) {
        self.tell_to(To::All, agent, news);
    }

    /// Keeps an item for each of these sinks that wants it.
    pub(super) fn tell_to(&self, to: To, agent: &Known, news: News) {
        let Some(kind) = news.about.kind() else { return };
        let mut record = None;
        let mut news = Some(news);
        for sink in self.all.iter().filter(|sink| to.has(sink) && sink.wants(kind, agent)) {
            if record.is_none() {
                record = news.take().map(|news| Arc::new(Record::of(news)));
            }
            let Some(record) = &record else { return };
            let bytes = record.json.len();
            let pushed = {
                let mut queue = sink.queue.lock();
                let pushed = queue.push(Arc::clone(record), bytes, self.now());
                self.metrics.waiting(&sink.config.name, queue.len(), queue.bytes());
                pushed
            };
            self.metrics.dropped(&sink.config.name, pushed);
            sink.wake.notify_one();
        }
    }

    /// Waits while the queue of a sink is half full that wants such news, and takes some: the API server
    /// keeps its events meanwhile. Nobody waits for a sink that takes nothing, nor for what one has refused.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn room(&self, kind: Kind, agent: &Known) {
        for sink in self.all.iter().filter(|sink| sink.wants(kind, agent)) {
            while !sink.is_failing.load(Ordering::Relaxed) && !sink.queue.lock().has_room() {
                tokio::time::sleep(ROOM).await;
            }
        }
    }
}

/// Returns the time now, as RFC 3339.
pub(super) fn now() -> String {
    let wall = process::clock::wall();
    let nanos = i128::try_from(wall.as_millis()).unwrap_or(0) * 1_000_000;
    let time = OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    time.format(&Rfc3339).unwrap_or_default()
}

/// Returns an id that nothing else has.
pub(super) fn new_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}
