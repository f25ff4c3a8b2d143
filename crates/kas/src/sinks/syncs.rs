//! [`Syncs`]: tells which syncs fail and recover. A project has one planner, which is at one replica, so it
//! is told there.

use std::{collections::HashMap, sync::Arc, time::Duration};

use planner::{Planners, ProjectStatus};
use serde_json::json;
use sinks::{About, Kind, News, Outcome, Outcomes};

use super::board::{Known, Sinks, new_id, now};

/// Changes within this time are looked at together.
const TOGETHER: Duration = Duration::from_millis(250);
/// The longest message, in characters.
const LONGEST: usize = 1_000;

/// Tells of syncs of the planners of this replica.
pub(crate) struct Syncs {
    sinks: Arc<Sinks>,
    planners: Arc<Planners>,
}

impl Syncs {
    pub(crate) fn new(sinks: Arc<Sinks>, planners: Arc<Planners>) -> Self {
        Self { sinks, planners }
    }

    /// Looks and tells until dropped.
    pub(crate) async fn run(self) {
        let Self { sinks, planners } = self;
        if !sinks.want(Kind::Syncs) {
            return;
        }
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
            for (key, about) in outcomes.observe(now) {
                if let Some((agent, status)) = projects.get(&key) {
                    sinks.tell(&Known::from(&**agent), news(about, agent, status));
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
