//! [`Labels`]: the labels of agents, as `kas.yaml` has them, for sinks that select by them.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ids::AgentId;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::board::{Known, LabelsOfAgent};
use crate::agent_files::Files;

/// How often it is looked which agents there are.
const LOOK: Duration = Duration::from_millis(250);
/// How often the labels of an agent are looked at, and those that are not known.
const AGAIN: Duration = Duration::from_secs(60);
const AGAIN_UNKNOWN: Duration = Duration::from_secs(5);
/// For how long the labels of an agent are kept that is away.
const AWAY: Duration = Duration::from_secs(600);
/// For how long the labels of an agent that has just come are waited for.
const AWAITED: Duration = Duration::from_secs(5);
/// Agents that are looked at together.
const TOGETHER: usize = 500;

struct Entry {
    /// The last that was known.
    labels: Option<LabelsOfAgent>,
    /// Since when they are wanted.
    since: Instant,
    /// When they are looked at again.
    next: Instant,
    /// Since when nobody asks for them.
    away: Option<Instant>,
}

/// The labels of the agents that are connected, and of those that were a short time ago.
pub(super) struct Labels {
    /// `None`: no sink needs them.
    files: Option<Arc<dyn Files>>,
    agents: Mutex<HashMap<AgentId, Entry>>,
    /// Increases when labels change.
    version: AtomicU64,
}

impl Labels {
    pub(super) fn new(files: Option<Arc<dyn Files>>) -> Self {
        Self { files, agents: Mutex::default(), version: AtomicU64::new(0) }
    }

    /// Returns a number that changes with the labels of an agent.
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Adds what is known of the labels of an agent.
    pub(super) fn add(&self, agent: Known) -> Known {
        let labels = self.agents.lock().get(&agent.id).and_then(|entry| entry.labels.clone());
        Known { labels, ..agent }
    }

    /// Whether the labels of an agent may become known in a moment.
    pub(super) fn are_awaited(&self, agent: AgentId) -> bool {
        let agents = self.agents.lock();
        let entry = agents.get(&agent);
        entry.is_some_and(|entry| entry.labels.is_none() && entry.since.elapsed() < AWAITED)
    }

    /// Sets the agents whose labels are wanted.
    pub(super) fn want(&self, agents: impl Iterator<Item = AgentId>) {
        if self.files.is_none() {
            return;
        }
        let mut known = self.agents.lock();
        let now = Instant::now();
        for entry in known.values_mut() {
            entry.away.get_or_insert(now);
        }
        for agent in agents {
            let entry =
                known.entry(agent).or_insert(Entry { labels: None, since: now, next: now, away: None });
            entry.away = None;
        }
        known.retain(|_, entry| entry.away.is_none_or(|since| now - since < AWAY));
    }

    /// Looks at labels until dropped.
    pub(super) async fn keep(&self) {
        let Some(files) = &self.files else { return std::future::pending().await };
        loop {
            let due: Vec<AgentId> = {
                let (agents, now) = (self.agents.lock(), Instant::now());
                let due = agents.iter().filter(|(_, entry)| entry.next <= now && entry.away.is_none());
                due.map(|(agent, _)| *agent).take(TOGETHER).collect()
            };
            if due.is_empty() {
                tokio::time::sleep(LOOK).await;
                continue;
            }
            let found = files.of(&due).await;
            let mut agents = self.agents.lock();
            for agent in due {
                let Some(entry) = agents.get_mut(&agent) else { continue };
                let Some(Ok(file)) = found.get(&agent) else {
                    entry.next = Instant::now() + AGAIN_UNKNOWN;
                    continue;
                };
                entry.next = Instant::now() + AGAIN;
                if entry.labels.as_deref() != Some(&file.labels) {
                    entry.labels = Some(Arc::new(file.labels.clone()));
                    self.version.fetch_add(1, Ordering::Release);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::agent_files::{AgentFile, Unknown};

    /// The values of the label `env`.
    #[derive(Default)]
    struct Fake(Mutex<HashMap<AgentId, String>>);

    #[async_trait]
    impl Files for Fake {
        async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>> {
            let known = self.0.lock();
            let file = |agent: &AgentId| match known.get(agent) {
                None => Err("not known".into()),
                Some(env) => Ok(Arc::new(AgentFile {
                    labels: [("env".to_owned(), env.clone())].into(),
                    ..AgentFile::default()
                })),
            };
            agents.iter().map(|agent| (*agent, file(agent))).collect()
        }
    }

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    fn env(labels: &Labels, id: i64) -> Option<String> {
        let known = Known { id: agent(id), project: None, name: "a".into(), labels: None };
        Some(labels.add(known).labels?["env"].clone())
    }

    #[tokio::test(start_paused = true)]
    async fn labels_are_looked_at_and_kept_while_an_agent_is_away() {
        let files = Arc::new(Fake::default());
        files.0.lock().insert(agent(1), "prod".to_owned());
        let labels = Labels::new(Some(Arc::clone(&files) as _));
        let looking = async {
            labels.want([agent(1), agent(2)].into_iter());
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!((env(&labels, 1).as_deref(), env(&labels, 2)), (Some("prod"), None));
            assert_eq!([1, 2, 3].map(|id| labels.are_awaited(agent(id))), [false, true, false]);
            let before = labels.version();
            // Of an agent that has just come, the file is known soon.
            files.0.lock().insert(agent(2), "test".to_owned());
            tokio::time::sleep(AGAIN_UNKNOWN + LOOK).await;
            assert_eq!(env(&labels, 2).as_deref(), Some("test"));
            assert_ne!(labels.version(), before);
            files.0.lock().insert(agent(1), "test".to_owned());
            tokio::time::sleep(AGAIN).await;
            assert_eq!(env(&labels, 1).as_deref(), Some("test"));
            // It leaves, and its file with it.
            files.0.lock().clear();
            labels.want([agent(2)].into_iter());
            tokio::time::sleep(AGAIN * 2).await;
            labels.want([agent(2)].into_iter());
            assert_eq!(
                (env(&labels, 1).as_deref(), env(&labels, 2).as_deref()),
                (Some("test"), Some("test"))
            );
            tokio::time::sleep(AWAY).await;
            labels.want([agent(2)].into_iter());
            assert_eq!((env(&labels, 1), env(&labels, 2).as_deref()), (None, Some("test")));
        };
        tokio::select! {
            () = labels.keep() => panic!("it never ends"),
            () = looking => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_looked_at_if_no_sink_needs_labels() {
        let labels = Labels::new(None);
        labels.want([agent(1)].into_iter());
        assert!(labels.agents.lock().is_empty());
    }
}
