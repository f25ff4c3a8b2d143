//! [`Syncs`]: tells which syncs fail and recover. A project has one planner, which is at one replica, so it
//! is told there.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ids::AgentId;
use planner::{Planners, ProjectStatus};
use serde_json::json;
use sinks::{About, Kind, News, Outcome, Outcomes};

use super::{
    board::{Known, Sinks, To, new_id, now},
    homes::no_labels,
};
use crate::agent_files::AgentFiles;

/// Changes within this time are looked at together.
const TOGETHER: Duration = Duration::from_millis(250);
/// The longest message, in characters.
const LONGEST: usize = 1_000;

/// Tells of syncs of the planners of this replica.
pub(crate) struct Syncs {
    sinks: Arc<Sinks>,
    planners: Arc<Planners>,
    files: Arc<AgentFiles>,
}

impl Syncs {
    pub(crate) fn new(sinks: Arc<Sinks>, planners: Arc<Planners>, files: Arc<AgentFiles>) -> Self {
        Self { sinks, planners, files }
    }

    /// Looks and tells until dropped.
    pub(crate) async fn run(self) {
        let Self { sinks, planners, files } = self;
        if !sinks.want(Kind::Syncs) {
            return;
        }
        let need_labels = sinks.need_labels(Kind::Syncs);
        let mut changes = planners.changes();
        let mut outcomes = Outcomes::default();
        loop {
            changes.mark_unchanged();
            let projects: HashMap<_, _> = planners
                .all()
                .into_iter()
                .map(|(agent, status)| ((agent.id, Arc::clone(&status.project)), (agent, status)))
                .collect();
            let now = projects.iter().map(|(key, (_, status))| (key.clone(), outcome(status.phase)));
            let told: Vec<_> = outcomes.observe(now).into_iter().collect();
            let mut labels = HashMap::new();
            if need_labels && !told.is_empty() {
                let agents: Vec<AgentId> = told.iter().map(|((agent, _), _)| *agent).collect();
                for part in agents.chunks(::fleet::MOST_AGENTS) {
                    labels.extend(files.of(part).await);
                }
            }
            for (key, about) in told {
                let Some((agent, status)) = projects.get(&key) else { continue };
                let (known, news) = (Known::from(&**agent), news(about, agent, status));
                match labels.get(&agent.id) {
                    Some(Ok(file)) => {
                        let labels = Some(Arc::new(file.labels.clone()));
                        sinks.tell(&Known { labels, ..known }, news);
                    }
                    Some(Err(why)) => {
                        no_labels(agent.id, why);
                        sinks.tell_to(To::Unlabelled, &known, news);
                    }
                    None => sinks.tell(&known, news),
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
            tokio::time::sleep(TOGETHER).await;
        }
    }
}

/// Returns how a sync ended; `None`: it runs, or there was none.
fn outcome(phase: &str) -> Option<Outcome> {
    match phase {
        "synced" => Some(Outcome::Good),
        "degraded" | "failed" => Some(Outcome::Failed),
        _ => None,
    }
}

fn news(about: About, agent: &ids::Agent, status: &ProjectStatus) -> News {
    let message: String = status.message.chars().take(LONGEST).collect();
    News {
        id: new_id(),
        about,
        agent: agent.id,
        agent_name: (*agent.name).into(),
        subject: (*status.project).to_owned(),
        time: now(),
        data: json!({
            "project": &*status.project,
            "phase": status.phase,
            "message": message,
            "wanted": status.wanted,
            "applied": status.applied,
            "objects": status.counts.objects,
            "failed": status.counts.failed,
        }),
    }
}
