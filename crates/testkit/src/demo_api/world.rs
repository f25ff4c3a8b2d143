//! The objects, and how they change.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Value, json};

use super::{
    dates::{now, rfc3339},
    shape::Kind,
};

/// How many past events a watch can begin at. Older ones are answered with 410, as by a cluster.
pub(super) const REMEMBERED: usize = 256;

/// Namespace, name, `app`, `tier`, image and a line for its log.
pub(super) const PODS: [(&str, &str, &str, &str, &str, &str); 12] = [
    ("default", "web-1", "web", "frontend", "demo.invalid/web:1.4", "hello from web-1"),
    ("default", "web-2", "web", "frontend", "demo.invalid/web:1.4", "hello from web-2"),
    ("garden", "bees-1", "bees", "backend", "demo.invalid/bees:7", "buzzing"),
    ("garden", "sprinkler-1", "sprinkler", "backend", "demo.invalid/sprinkler:2.0", "the lawn is watered"),
    (
        "garden",
        "sunshine-1",
        "sunshine",
        "frontend",
        "demo.invalid/sunshine:1.0",
        "24 degrees, a light breeze",
    ),
    (
        "library",
        "catalog-1",
        "catalog",
        "backend",
        "demo.invalid/catalog:3.1",
        "1204 books are on the shelves",
    ),
    (
        "library",
        "catalog-2",
        "catalog",
        "backend",
        "demo.invalid/catalog:3.1",
        "1204 books are on the shelves",
    ),
    ("library", "reading-room-1", "reading-room", "frontend", "demo.invalid/reading-room:2", "quiet, please"),
    ("shop", "cart-1", "cart", "backend", "demo.invalid/cart:5.2", "a teapot was put into a cart"),
    ("shop", "orders-db-0", "orders-db", "data", "demo.invalid/orders-db:16", "checkpoint complete"),
    ("shop", "storefront-1", "storefront", "frontend", "demo.invalid/storefront:8.0", "the doors are open"),
    ("shop", "storefront-2", "storefront", "frontend", "demo.invalid/storefront:8.0", "the doors are open"),
];

/// The namespace of visitor pods.
const VISITED: &str = "default";

pub(super) struct World {
    pub(super) version: u64,
    /// By namespace and name.
    pub(super) pods: BTreeMap<(String, String), Value>,
    pub(super) namespaces: BTreeMap<String, Value>,
    pub(super) events: VecDeque<Event>,
    pub(super) turns: u64,
}

#[derive(Clone)]
pub(super) struct Event {
    pub(super) version: u64,
    pub(super) kind: &'static str,
    pub(super) pod: Value,
}

impl World {
    pub(super) fn next(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    pub(super) fn objects(&self, kind: Kind) -> Box<dyn Iterator<Item = &Value> + '_> {
        match kind {
            Kind::Pod => Box::new(self.pods.values()),
            Kind::Namespace => Box::new(self.namespaces.values()),
        }
    }

    /// Makes the next change: a visitor pod is added, starts, ends and is deleted, then the next one is
    /// added.
    pub(super) fn turn(&mut self) -> u64 {
        let (visitor, step) = (self.turns / 4 + 1, self.turns % 4);
        self.turns += 1;
        let version = self.next();
        let key = (VISITED.to_owned(), format!("visitor-{visitor}"));
        let kind = match step {
            0 => "ADDED",
            3 => "DELETED",
            _ => "MODIFIED",
        };
        let pod = if step == 0 {
            let about = ("visitor", "frontend", "demo.invalid/visitor:1.0");
            made_up_pod(VISITED, &key.1, about, PODS.len() + visitor as usize, "Pending", version)
        } else {
            let mut pod = self.pods.remove(&key).unwrap_or_default();
            pod["metadata"]["resourceVersion"] = version.to_string().into();
            if step < 3 {
                let phase = if step == 1 { "Running" } else { "Succeeded" };
                pod["status"] = made_up_status(&pod, phase);
            }
            pod
        };
        if step < 3 {
            self.pods.insert(key, pod.clone());
        }
        if self.events.len() == REMEMBERED {
            self.events.pop_front();
        }
        self.events.push_back(Event { version, kind, pod });
        version
    }
}

pub(super) fn made_up_namespace(name: &str, version: u64) -> Value {
    json!({
        "metadata": {
            "name": name,
            "uid": uid(version),
            "resourceVersion": version.to_string(),
            "creationTimestamp": rfc3339(now()),
            "labels": { "kubernetes.io/metadata.name": name, "demo": "not-a-cluster" },
        },
        "status": { "phase": "Active" },
    })
}

/// `about`: its `app`, `tier` and image. `index` makes its address.
pub(super) fn made_up_pod(
    namespace: &str,
    name: &str,
    about: (&str, &str, &str),
    index: usize,
    phase: &str,
    version: u64,
) -> Value {
    let (app, tier, image) = about;
    let mut pod = json!({
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid(version),
            "resourceVersion": version.to_string(),
            "creationTimestamp": rfc3339(now()),
            "labels": { "app": app, "tier": tier, "demo": "not-a-cluster" },
        },
        "spec": {
            "nodeName": format!("made-up-node-{}", index % 3 + 1),
            "containers": [{ "name": app, "image": image }],
            "restartPolicy": "Always",
        },
    });
    // An address of the range that RFC 5737 sets apart for examples.
    pod["status"] = json!({ "podIP": format!("192.0.2.{}", index % 250 + 1) });
    pod["status"] = made_up_status(&pod, phase);
    pod
}

fn made_up_status(pod: &Value, phase: &str) -> Value {
    let started = &pod["metadata"]["creationTimestamp"];
    let running = phase == "Running";
    let state = match phase {
        "Running" => json!({ "running": { "startedAt": started } }),
        "Succeeded" => {
            json!({ "terminated": { "exitCode": 0, "reason": "Completed", "startedAt": started } })
        }
        _ => json!({ "waiting": { "reason": "ContainerCreating" } }),
    };
    let container = &pod["spec"]["containers"][0];
    json!({
        "phase": phase,
        "podIP": pod["status"]["podIP"],
        "startTime": started,
        "conditions": [{ "type": "Ready", "status": if running { "True" } else { "False" } }],
        "containerStatuses": [{
            "name": container["name"],
            "image": container["image"],
            "ready": running,
            "started": running,
            "restartCount": 0,
            "state": state,
        }],
    })
}

fn uid(version: u64) -> String {
    format!("00000000-0000-4000-8000-{version:012}")
}
