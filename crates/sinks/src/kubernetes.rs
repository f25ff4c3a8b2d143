//! Reads events from what an API server answers to a list or a watch of `events` (`v1`).

use std::{
    collections::HashSet,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use ids::{AgentId, TokenHash};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{About, News};

/// The largest event that is passed on whole, in bytes of JSON. Of a larger one, only some fields are.
const LARGEST: usize = 64 << 10;
/// The longest text of such a field, in characters.
const LONGEST: usize = 1_024;
/// The longest uid, version, time or token, in bytes.
const LONGEST_TOKEN: usize = 64 << 10;
const LONGEST_ID: usize = 256;
/// Events that are known of one agent.
const MOST_SEEN: usize = 200_000;

/// An answer that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not the JSON that is expected.
    #[error("the answer of the API server cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// Something in it is wrong.
    #[error("the answer of the API server has {0}")]
    Wrong(&'static str),
}

/// A version of an event.
#[derive(Clone, Debug, PartialEq)]
pub struct KubeEvent {
    uid: String,
    version: String,
    time: String,
    subject: String,
    data: Value,
}

/// A page of a list.
#[derive(Debug, PartialEq)]
pub struct Page {
    /// The events.
    pub events: Vec<KubeEvent>,
    /// From where on to watch.
    pub version: String,
    /// Where the next page begins; empty: this is the last one.
    pub next: String,
}

/// A line of a watch.
#[derive(Debug, PartialEq)]
pub enum Line {
    /// A new event, or a new version of one; also from where on to watch.
    Event(KubeEvent, String),
    /// Nothing of interest. From where on to watch.
    Passed(String),
    /// The API server has ended the watch: a status, and why.
    Failed(i64, String),
}

#[derive(Deserialize)]
struct ListMeta {
    #[serde(rename = "resourceVersion", default)]
    version: String,
    #[serde(rename = "continue", default)]
    next: String,
}

#[derive(Deserialize)]
struct List {
    metadata: ListMeta,
    #[serde(default)]
    items: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct Watched {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

/// Reads a page of a list.
///
/// # Errors
/// See [`Error`].
pub fn page(bytes: &[u8]) -> Result<Page, Error> {
    let list: List = serde_json::from_slice(bytes)?;
    let ListMeta { version, next } = list.metadata;
    if version.is_empty() || version.len() > LONGEST_ID || next.len() > LONGEST_TOKEN {
        return Err(Error::Wrong("no version, or one that is too long"));
    }
    let events = list.items.unwrap_or_default().into_iter().map(event).collect::<Result<_, _>>()?;
    Ok(Page { events, version, next })
}

/// Reads a line of a watch.
///
/// # Errors
/// See [`Error`].
pub fn line(bytes: &[u8]) -> Result<Line, Error> {
    let Watched { kind, object } = serde_json::from_slice(bytes)?;
    match kind.as_str() {
        "ADDED" | "MODIFIED" => {
            let event = event(object)?;
            let version = event.version.clone();
            Ok(Line::Event(event, version))
        }
        // Those that expire.
        "DELETED" | "BOOKMARK" => {
            let version = text(&object["metadata"]["resourceVersion"], LONGEST_ID);
            Ok(Line::Passed(version.ok_or(Error::Wrong("an object without a version"))?))
        }
        "ERROR" => {
            let message = object["message"].as_str().unwrap_or_default();
            let message = message.chars().take(LONGEST).collect();
            Ok(Line::Failed(object["code"].as_i64().unwrap_or(0), message))
        }
        _ => Err(Error::Wrong("an event of an unknown type")),
    }
}

/// Returns a text that is neither empty nor too long.
fn text(value: &Value, longest: usize) -> Option<String> {
    value.as_str().filter(|text| (1..=longest).contains(&text.len())).map(str::to_owned)
}

fn event(mut object: Value) -> Result<KubeEvent, Error> {
    let metadata =
        object.get_mut("metadata").and_then(Value::as_object_mut).ok_or(Error::Wrong("no metadata"))?;
    metadata.remove("managedFields");
    let of = |key: &str| metadata.get(key).and_then(|value| text(value, LONGEST_ID));
    let uid = of("uid").ok_or(Error::Wrong("an event without a uid"))?;
    let version = of("resourceVersion").ok_or(Error::Wrong("an event without a version"))?;
    let created = of("creationTimestamp");
    let series = &object["series"]["lastObservedTime"];
    let times = [series, &object["lastTimestamp"], &object["eventTime"]];
    let time = times.into_iter().find_map(|time| text(time, LONGEST_ID)).or(created).unwrap_or_default();
    let about = &object["involvedObject"];
    let of = |key: &str| about[key].as_str().unwrap_or_default().chars().take(LONGEST_ID).collect::<String>();
    let (kind, namespace, name) = (of("kind"), of("namespace"), of("name"));
    let subject = match (kind.is_empty(), namespace.is_empty()) {
        (true, _) => String::new(),
        (false, true) => format!("{kind} {name}"),
        (false, false) => format!("{kind} {namespace}/{name}"),
    };
    let is_large = object.to_string().len() > LARGEST;
    let data = if is_large { shortened(&object) } else { object };
    Ok(KubeEvent { uid, version, time, subject, data })
}

/// Returns the fields of an event that say most.
fn shortened(object: &Value) -> Value {
    let cut = |value: &Value, keys: &[&str]| {
        let mut kept = Map::new();
        for &key in keys {
            match &value[key] {
                Value::String(text) => {
                    kept.insert(key.to_owned(), text.chars().take(LONGEST).collect::<String>().into());
                }
                other @ (Value::Number(_) | Value::Bool(_)) => {
                    kept.insert(key.to_owned(), other.clone());
                }
                _ => {}
            }
        }
        kept
    };
    const NAMED: [&str; 3] = ["namespace", "name", "uid"];
    let metadata = [&NAMED[..], &["resourceVersion", "creationTimestamp"]].concat();
    let about = [&NAMED[..], &["apiVersion", "kind", "fieldPath"]].concat();
    let own = [
        "reason",
        "message",
        "type",
        "count",
        "firstTimestamp",
        "lastTimestamp",
        "eventTime",
        "reportingComponent",
    ];
    let mut event = cut(object, &own);
    event.insert("metadata".to_owned(), cut(&object["metadata"], &metadata).into());
    event.insert("involvedObject".to_owned(), cut(&object["involvedObject"], &about).into());
    event.insert("shortened".to_owned(), true.into());
    Value::Object(event)
}

impl KubeEvent {
    /// Returns the news that it is.
    pub fn news(self, agent: AgentId, agent_name: Arc<str>) -> News {
        let Self { uid, version, time, subject, data } = self;
        let hash = TokenHash::of(format!("{agent}\0{uid}\0{version}").as_bytes()).to_hex();
        let id = hash.chars().take(32).collect();
        News { id, about: About::KubernetesEvent, agent, agent_name, subject, time, data }
    }
}

/// The versions of events of an agent that were passed on, so that a list that is read again repeats none.
/// At most 200,000; beyond that, some come again.
#[derive(Debug, Default)]
pub struct Seen {
    hasher: RandomState,
    known: HashSet<u64>,
    /// What the list has that is being read.
    listed: HashSet<u64>,
}

impl Seen {
    /// Notes a version. Returns whether it is new.
    pub fn is_new(&mut self, event: &KubeEvent) -> bool {
        if self.known.len() >= MOST_SEEN {
            self.known.clear();
        }
        let hash = self.hasher.hash_one((&event.uid, &event.version));
        if self.listed.len() < MOST_SEEN {
            self.listed.insert(hash);
        }
        self.known.insert(hash)
    }

    /// A list begins.
    pub fn list_begins(&mut self) {
        self.listed = HashSet::new();
    }

    /// A list is complete: what it does not have has expired.
    pub fn list_ends(&mut self) {
        self.known = std::mem::take(&mut self.listed);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(name: &str, version: &str) -> Value {
        json!({
            "metadata": {
                "namespace": "shop", "name": name, "uid": format!("u-{name}"), "resourceVersion": version,
                "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{ "manager": "kubelet" }],
            },
            "involvedObject": { "kind": "Pod", "namespace": "shop", "name": "web-1" },
            "reason": "BackOff", "message": "Back-off", "type": "Warning",
            "lastTimestamp": "2026-01-01T00:00:05Z",
        })
    }

    fn watched(kind: &str, object: &Value) -> Result<Line, Error> {
        line(json!({ "type": kind, "object": object }).to_string().as_bytes())
    }

    #[test]
    fn a_list_and_a_watch_tell_the_same_of_an_event() {
        let list =
            json!({ "metadata": { "resourceVersion": "9", "continue": "c" }, "items": [event("a", "5")] });
        let Page { events, version, next } = page(list.to_string().as_bytes()).unwrap();
        assert_eq!((version.as_str(), next.as_str()), ("9", "c"));
        let Line::Event(same, at) = watched("ADDED", &event("a", "5")).unwrap() else { panic!() };
        assert_eq!((&events[0], at.as_str()), (&same, "5"));
        let agent = AgentId::new(7).unwrap();
        let news = same.news(agent, "prod".into());
        assert_eq!((news.time.as_str(), news.subject.as_str()), ("2026-01-01T00:00:05Z", "Pod shop/web-1"));
        assert!(news.data["metadata"].get("managedFields").is_none(), "{news:?}");
        assert_eq!(news.id.len(), 32);
        let other = |agent: i64, version: &str| {
            let Line::Event(event, _) = watched("MODIFIED", &event("a", version)).unwrap() else { panic!() };
            event.news(AgentId::new(agent).unwrap(), "".into()).id
        };
        assert_eq!(other(7, "5"), news.id);
        assert_ne!(other(7, "6"), news.id);
        assert_ne!(other(8, "5"), news.id);
    }

    #[test]
    fn other_lines_only_move_the_watch() {
        assert_eq!(watched("DELETED", &event("a", "6")).unwrap(), Line::Passed("6".to_owned()));
        let bookmark = json!({ "metadata": { "resourceVersion": "8" } });
        assert_eq!(watched("BOOKMARK", &bookmark).unwrap(), Line::Passed("8".to_owned()));
        let gone = json!({ "kind": "Status", "code": 410, "message": "too old" });
        assert_eq!(watched("ERROR", &gone).unwrap(), Line::Failed(410, "too old".to_owned()));
    }

    #[test]
    fn what_is_no_event_is_refused() {
        for wrong in ["", "{", "[]", "{}", "{\"metadata\":{}}", "{\"metadata\":{\"resourceVersion\":\"\"}}"] {
            assert!(page(wrong.as_bytes()).is_err(), "{wrong}");
        }
        assert!(page(br#"{"metadata":{"resourceVersion":"1"},"items":[1]}"#).is_err());
        assert!(page(br#"{"metadata":{"resourceVersion":"1"},"items":null}"#).unwrap().events.is_empty());
        assert!(watched("ADDED", &json!({ "metadata": { "uid": "u" } })).is_err());
        assert!(watched("ADDED", &json!(null)).is_err());
        assert!(watched("OTHER", &event("a", "1")).is_err());
        assert!(watched("BOOKMARK", &json!({})).is_err());
    }

    #[test]
    fn a_huge_event_is_shortened() {
        let mut huge = event("a", "5");
        huge["message"] = "ä".repeat(100_000).into();
        huge["count"] = 3.into();
        huge["action"] = "x".into();
        let Line::Event(event, _) = watched("ADDED", &huge).unwrap() else { panic!() };
        let data = &event.data;
        assert_eq!(data["message"].as_str().unwrap().chars().count(), LONGEST);
        assert_eq!((&data["count"], &data["shortened"], data.get("action")), (&3.into(), &true.into(), None));
        assert_eq!(data["metadata"]["uid"], "u-a");
    }

    #[test]
    fn a_list_that_is_read_again_repeats_nothing_and_forgets_what_expired() {
        let of = |name: &str, version: &str| super::event(event(name, version)).unwrap();
        let mut seen = Seen::default();
        seen.list_begins();
        assert!(seen.is_new(&of("a", "1")) && seen.is_new(&of("b", "2")));
        seen.list_ends();
        assert!(seen.is_new(&of("a", "3")) && !seen.is_new(&of("a", "3")));
        seen.list_begins();
        assert!(!seen.is_new(&of("a", "3")) && seen.is_new(&of("c", "4")));
        seen.list_ends();
        assert_eq!(seen.known.len(), 2);
    }
}
