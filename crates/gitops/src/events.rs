//! Events in the cluster, about the inventory: `Synced`, `Degraded`, `Failed`, `Pruned`.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use serde_json::json;
use tokio::time::Instant;

use crate::{cluster::ClusterApi, progress::InventoryRef};

/// The most Events of a project in [`WINDOW`].
const MOST: usize = 10;
/// See [`MOST`].
const WINDOW: Duration = Duration::from_secs(60);
/// The longest message that the API server accepts, in bytes.
const LONGEST: usize = 1_024;

/// Writes the Events of one project.
#[derive(Debug)]
pub struct Events {
    /// The program that writes them.
    component: &'static str,
    /// When the last ones were written, the oldest first.
    written: Vec<Instant>,
    /// The last reason and message: the same one is not repeated.
    last: Option<(&'static str, String)>,
    /// Whether the last one could not be written.
    failed: bool,
}

/// An Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// One word.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Whether something is wrong.
    pub warning: bool,
}

impl Events {
    /// Returns one for a project. `component` is the program that writes.
    pub fn new(component: &'static str) -> Self {
        Self { component, written: Vec::new(), last: None, failed: false }
    }

    /// Returns whether an Event may be written now.
    fn admit(&mut self, event: &Event, now: Instant) -> bool {
        let is_last = self
            .last
            .as_ref()
            .is_some_and(|(reason, text)| *reason == event.reason && *text == event.message);
        self.written.retain(|at| now.saturating_duration_since(*at) < WINDOW);
        if is_last || self.written.len() >= MOST {
            return false;
        }
        self.written.push(now);
        self.last = Some((event.reason, event.message.clone()));
        true
    }

    /// Writes an Event about the inventory, unless it was the last one or there are too many. `time` is the
    /// present time as in RFC 3339, in seconds.
    ///
    /// # Errors
    /// Why it could not be written, unless the one before could not be written either: Events are for
    /// people, and agentk may lack the right.
    pub async fn write(
        &mut self,
        api: &dyn ClusterApi,
        inventory: &InventoryRef,
        event: &Event,
        time: &str,
    ) -> Result<(), String> {
        if !self.admit(event, Instant::now()) {
            return Ok(());
        }
        let Some(request) = request(self.component, inventory, event, time) else { return Ok(()) };
        let failure = match api.call(request).await {
            Ok(response) if response.status().is_success() => {
                self.failed = false;
                return Ok(());
            }
            Ok(response) => format!("the API server answered {}", response.status()),
            Err(error) => error.to_string(),
        };
        if std::mem::replace(&mut self.failed, true) { Ok(()) } else { Err(failure) }
    }
}

fn request(component: &str, inventory: &InventoryRef, event: &Event, time: &str) -> Option<Request<Bytes>> {
    let InventoryRef { namespace, name, uid } = inventory;
    let mut end = event.message.len().min(LONGEST);
    while !event.message.is_char_boundary(end) {
        end -= 1;
    }
    let body = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "generateName": format!("{}.", cut(name)), "namespace": namespace },
        "involvedObject": {
            "apiVersion": "v1", "kind": "ConfigMap", "namespace": namespace, "name": name, "uid": uid,
        },
        "reason": event.reason,
        "message": &event.message[..end],
        "type": if event.warning { "Warning" } else { "Normal" },
        "source": { "component": component },
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    });
    Request::builder()
        .method("POST")
        .uri(format!("/api/v1/namespaces/{namespace}/events?fieldManager={component}"))
        .header(header::ACCEPT, "application/json")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Bytes::from(body.to_string()))
        .ok()
}

/// Returns the beginning of a name that leaves room for what the API server appends.
fn cut(name: &str) -> &str {
    name.get(..name.len().min(200)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn events_are_not_repeated_and_are_ten_a_minute() {
        let mut events = Events::new("kas");
        let event = |message: usize| Event { reason: "Synced", message: message.to_string(), warning: false };
        let now = Instant::now();
        assert!(events.admit(&event(0), now));
        assert!(!events.admit(&event(0), now));
        assert_eq!((1..20).filter(|n| events.admit(&event(*n), now)).count(), 9);
        assert!(events.admit(&event(20), now + WINDOW));
    }

    #[test]
    fn an_event_is_about_the_inventory() {
        let inventory =
            InventoryRef { namespace: "shop".into(), name: "inventory-1-2".into(), uid: "u".into() };
        let event = Event { reason: "Failed", message: "ä".repeat(LONGEST), warning: true };
        let request = request("kas", &inventory, &event, "2023-11-14T22:13:20Z").unwrap();
        assert_eq!(request.uri(), "/api/v1/namespaces/shop/events?fieldManager=kas");
        let body: serde_json::Value = serde_json::from_slice(request.body()).unwrap();
        assert_eq!(body["involvedObject"]["uid"], "u");
        assert_eq!(body["type"], "Warning");
        assert_eq!(body["firstTimestamp"], "2023-11-14T22:13:20Z");
        assert_eq!(body["message"].as_str().unwrap().len(), LONGEST);
    }
}
