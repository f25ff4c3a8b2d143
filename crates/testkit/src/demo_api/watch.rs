//! A watch.

use std::collections::VecDeque;

use http::StatusCode;
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    Demo,
    answer::Problem,
    selector::Filter,
    shape::{Kind, Shape},
    world::REMEMBERED,
};

/// A watch, line by line.
pub(super) struct Watch {
    pub(super) demo: Demo,
    pub(super) changes: watch::Receiver<u64>,
    pub(super) shape: Shape,
    pub(super) filter: Filter,
    /// Events up to this version have been sent.
    pub(super) seen: u64,
    pub(super) lines: VecDeque<String>,
    /// The next table has to name its columns.
    pub(super) columns: bool,
    pub(super) over: bool,
}

impl Watch {
    pub(super) async fn next(&mut self, deadline: Option<Instant>) -> Option<String> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.over {
                return None;
            }
            // Marked before the check: a later change wakes the wait below.
            self.changes.mark_unchanged();
            self.collect();
            if !self.lines.is_empty() {
                continue;
            }
            let end = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.changes.changed() => changed.ok()?,
                () = end => return None,
            }
        }
    }

    fn collect(&mut self) {
        let demo = self.demo.clone();
        let world = demo.world();
        if self.filter.kind == Kind::Namespace {
            self.seen = world.version;
            return;
        }
        // Of versions that no event has, such as those of the first pods, nothing was forgotten.
        let forgotten = world.turns > REMEMBERED as u64;
        if forgotten && world.events.front().is_some_and(|first| self.seen + 1 < first.version) {
            let problem = Problem::new(
                StatusCode::GONE,
                "Expired",
                "too old resource version: this demo remembers its last 256 events",
            );
            self.lines.push_back(format!("{}\n", json!({ "type": "ERROR", "object": problem.status() })));
            self.over = true;
            return;
        }
        for event in world.events.iter().filter(|event| event.version > self.seen) {
            if self.filter.takes(&event.pod) {
                self.lines.push_back(self.shape.event(event.kind, Kind::Pod, &event.pod, &mut self.columns));
            }
        }
        self.seen = self.seen.max(world.version);
    }
}
