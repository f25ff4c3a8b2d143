//! What a report says to people.

use std::collections::BTreeSet;

use crate::{
    events::Event,
    object::ObjectId,
    progress::{Action, Health, ObjectReport, Outcome, Report},
};

/// How many objects a message names.
const NAMED: usize = 3;
/// The longest message, in bytes.
const LONGEST: usize = 4_000;

/// Cuts a text for people at 4,000 bytes.
pub fn cut(mut text: String) -> String {
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

fn is_wrong(object: &ObjectReport) -> bool {
    object.action == Action::Failed
        || object.file.is_some() && !matches!(object.health, Health::Current | Health::Unknown)
}

impl Report {
    /// Returns what is wrong, and what waits; empty if all is well.
    pub fn message(&self) -> String {
        let mut parts = Vec::new();
        match &self.outcome {
            Outcome::Synced => {}
            Outcome::Degraded | Outcome::Incomplete => {
                let wrong: Vec<&ObjectReport> =
                    self.objects.iter().filter(|object| is_wrong(object)).collect();
                for object in wrong.iter().take(NAMED) {
                    let why =
                        if object.message.is_empty() { object.health.as_str() } else { &object.message };
                    parts.push(format!("{}: {why}", object.id));
                }
                if wrong.len() > NAMED {
                    parts.push(format!("and {} more", wrong.len() - NAMED));
                }
                if wrong.is_empty() {
                    parts.push(self.outcome.to_string());
                }
            }
            other => parts.push(other.to_string()),
        }
        if self.to_prune > 0 {
            parts.push(format!("{} objects wait to be pruned", self.to_prune));
        }
        cut(parts.join("; "))
    }

    /// Returns how many objects were deleted.
    pub fn pruned(&self) -> usize {
        self.objects.iter().filter(|object| object.action == Action::Pruned).count()
    }

    /// Returns the Events about the inventory. `text` is the [`message`](Self::message), or what says more.
    pub fn events(&self, commit: &str, text: &str) -> Vec<Event> {
        let short = commit.get(..8).unwrap_or(commit);
        let mut events = Vec::new();
        let pruned: BTreeSet<&ObjectId> = self
            .objects
            .iter()
            .filter(|object| object.action == Action::Pruned)
            .map(|object| &object.id)
            .collect();
        if !pruned.is_empty() {
            let named: Vec<String> = pruned.iter().take(NAMED).map(ToString::to_string).collect();
            let more = pruned.len().saturating_sub(NAMED);
            let rest = if more == 0 { String::new() } else { format!(" and {more} more") };
            let message = format!("commit {short}: deleted {}{rest}", named.join(", "));
            events.push(Event { reason: "Pruned", message, warning: false });
        }
        let (reason, warning) = match self.outcome {
            Outcome::Synced => ("Synced", false),
            Outcome::Degraded => ("Degraded", true),
            Outcome::Incomplete | Outcome::Refused(_) | Outcome::Interrupted(_) => ("Failed", true),
            Outcome::Fenced | Outcome::HeadMoved(_) | Outcome::Stopped(_) => return events,
        };
        let message = match text {
            "" => format!("commit {short}: {} objects", self.objects.len()),
            text => format!("commit {short}: {text}"),
        };
        events.push(Event { reason, message, warning });
        events
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn report(outcome: Outcome, objects: &[(&str, Action, Health, &str)], to_prune: usize) -> Report {
        let objects = objects
            .iter()
            .map(|(name, action, health, message)| ObjectReport {
                id: ObjectId::new("", "ConfigMap", "shop", name),
                action: *action,
                health: *health,
                message: (*message).to_owned(),
                file: Some(("a.yaml".into(), 1)),
            })
            .collect();
        Report {
            commit: "c".into(),
            outcome,
            objects,
            to_prune,
            warnings: Vec::new(),
            inventory: None,
            took: Duration::ZERO,
        }
    }

    #[test]
    fn messages_name_what_is_wrong() {
        let wrong = ("a", Action::Failed, Health::Unknown, "no");
        let good = ("b", Action::Unchanged, Health::Current, "");
        let slow = ("c", Action::Changed, Health::InProgress, "");
        assert_eq!(report(Outcome::Synced, &[good], 0).message(), "");
        assert_eq!(report(Outcome::Synced, &[good], 2).message(), "2 objects wait to be pruned");
        assert_eq!(
            report(Outcome::Incomplete, &[wrong, good, slow], 1).message(),
            "ConfigMap shop/a: no; ConfigMap shop/c: in progress; 1 objects wait to be pruned"
        );
        let many = report(Outcome::Incomplete, &[wrong; 9], 0).message();
        assert!(many.ends_with("; and 6 more"), "{many}");
        assert_eq!(report(Outcome::Refused("no set".into()), &[], 0).message(), "no set");
    }

    #[test]
    fn events_say_what_was_deleted_and_how_it_ended() {
        let gone = ("a", Action::Pruned, Health::Unknown, "");
        let reasons = |report: &Report| -> Vec<&str> {
            report.events("0123456789", &report.message()).iter().map(|event| event.reason).collect()
        };
        assert_eq!(reasons(&report(Outcome::Synced, &[gone], 0)), ["Pruned", "Synced"]);
        assert_eq!(reasons(&report(Outcome::Fenced, &[gone], 0)), ["Pruned"]);
        let failed = report(Outcome::Refused("no set".into()), &[], 0);
        let events = failed.events("0123456789", &failed.message());
        assert!(events[0].warning && events[0].message == "commit 01234567: no set", "{events:?}");
    }
}
