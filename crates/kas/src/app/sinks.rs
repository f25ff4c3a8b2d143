//! The part for sinks.

use std::sync::Arc;

use kas_config::{RedisPasswords, Sinks as Section};
use planner::Planners;

use super::{StartError, part::Part};
use crate::sinks::{Homes, HomesParts, Sender, SinkMetrics, Sinks, Syncs, flush};

/// What sinks use.
pub(super) struct Uses {
    pub(super) homes: HomesUses,
    pub(super) planners: Arc<Planners>,
    pub(super) metrics: Arc<SinkMetrics>,
}

/// What finds the agents and their events.
pub(super) struct HomesUses {
    pub(super) me: ids::ReplicaId,
    pub(super) tracker: Arc<dyn cluster::Tracker>,
    pub(super) sources: Arc<dyn crate::views::Sources>,
    pub(super) hub: Arc<crate::views::Hub>,
    pub(super) files: Arc<crate::agent_files::AgentFiles>,
}

/// Builds the part. Without sinks, it does nothing.
///
/// # Errors
/// If a file that a sink names cannot be used any more, although it has just been checked.
pub(super) async fn part(section: &Section, uses: Uses) -> Result<Part, StartError> {
    let Uses { homes, planners, metrics } = uses;
    if section.targets.is_empty() {
        return Ok(Part::default());
    }
    let passwords = match section.redis.clone() {
        None => RedisPasswords::default(),
        Some(redis) => {
            let read = tokio::task::spawn_blocking(move || redis.read_passwords()).await;
            let read = read.map_err(|error| StartError::Redis(error.to_string()))?;
            read.map_err(|problems| StartError::Redis(problems.to_string()))?
        }
    };
    let sinks = Sinks::new(section, metrics);
    let HomesUses { me, tracker, sources, hub, files } = homes;
    let senders = Sender::all(&sinks, section, &passwords, &tracker.live());
    let senders = senders.map_err(|(index, source)| StartError::Sink { index, source })?;
    let syncs = Syncs::new(Arc::clone(&sinks), planners, Arc::clone(&files));
    let homes = Homes::new(HomesParts { sinks: Arc::clone(&sinks), me, tracker, sources, hub, files });
    let draining = Arc::clone(&homes);
    let part = Part::default().task(homes.run()).task(syncs.run());
    let part = senders.into_iter().fold(part, |part, sender| part.task(sender.run()));
    Ok(part.drain(move || draining.drain()).farewell(flush(sinks)))
}
