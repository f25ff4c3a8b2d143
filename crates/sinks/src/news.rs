//! [`News`], and its form: CloudEvents 1.0, structured mode, JSON.

use std::sync::Arc;

use bytes::Bytes;
use ids::AgentId;
use serde_json::{Map, Value, json};

/// The media type of a [`Record`].
const DATA: &str = "application/json";

/// What a sink can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Events of the Kubernetes API.
    Events,
    /// Agents that come and go.
    Agents,
    /// Syncs that fail and recover.
    Syncs,
}

impl Kind {
    /// All of them, with their names in the configuration.
    pub const ALL: [(&'static str, Self); 3] =
        [("events", Self::Events), ("agents", Self::Agents), ("syncs", Self::Syncs)];
}

/// What an item of news is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum About {
    /// An event of the Kubernetes API, or a new version of one.
    KubernetesEvent,
    /// An agent is connected.
    AgentConnected,
    /// An agent is not connected any more.
    AgentDisconnected,
    /// A sync has failed.
    SyncFailed,
    /// A sync that had failed has succeeded.
    SyncRecovered,
    /// The first sync of a project since a replica became its home has succeeded: whatever was told before is
    /// over.
    SyncSucceeded,
    /// Items were dropped.
    Dropped,
}

impl About {
    /// Returns the attribute `type`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::KubernetesEvent => "kas.kubernetes.event",
            Self::AgentConnected => "kas.agent.connected",
            Self::AgentDisconnected => "kas.agent.disconnected",
            Self::SyncFailed => "kas.sync.failed",
            Self::SyncRecovered => "kas.sync.recovered",
            Self::SyncSucceeded => "kas.sync.succeeded",
            Self::Dropped => "kas.sink.dropped",
        }
    }

    /// Returns which sinks want it; `None`: it is for one sink only.
    pub const fn kind(self) -> Option<Kind> {
        match self {
            Self::KubernetesEvent => Some(Kind::Events),
            Self::AgentConnected | Self::AgentDisconnected => Some(Kind::Agents),
            Self::SyncFailed | Self::SyncRecovered | Self::SyncSucceeded => Some(Kind::Syncs),
            Self::Dropped => None,
        }
    }
}

/// An item of news.
#[derive(Clone, Debug, PartialEq)]
pub struct News {
    /// Tells a repetition of the same item.
    pub id: String,
    /// What it is about.
    pub about: About,
    /// The agent.
    pub agent: AgentId,
    /// Its name; empty: not known.
    pub agent_name: Arc<str>,
    /// What of the agent it is about, such as a project or an object; empty: the agent itself.
    pub subject: String,
    /// When it happened, as RFC 3339; empty: not known.
    pub time: String,
    /// The rest.
    pub data: Value,
}

/// An item in the form in which it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Tells a repetition of the same item.
    pub id: String,
    /// What it is about.
    pub about: About,
    /// The agent; `None`: it is about the sink itself.
    pub agent: Option<AgentId>,
    /// A CloudEvent.
    pub json: Bytes,
}

impl Record {
    /// Returns the form of an item.
    pub fn of(news: News) -> Self {
        let News { id, about, agent, agent_name, subject, time, data } = news;
        let mut event = Map::new();
        event.insert("specversion".to_owned(), "1.0".into());
        event.insert("id".to_owned(), id.clone().into());
        event.insert("source".to_owned(), format!("/kas/agents/{agent}").into());
        event.insert("type".to_owned(), about.as_str().into());
        if !subject.is_empty() {
            event.insert("subject".to_owned(), subject.into());
        }
        if !time.is_empty() {
            event.insert("time".to_owned(), time.into());
        }
        event.insert("datacontenttype".to_owned(), DATA.into());
        // Integers of CloudEvents have 32 bits.
        event.insert("agentid".to_owned(), agent.to_string().into());
        if !agent_name.is_empty() {
            event.insert("agentname".to_owned(), (*agent_name).into());
        }
        event.insert("data".to_owned(), data);
        Self { id, about, agent: Some(agent), json: Bytes::from(Value::Object(event).to_string()) }
    }

    /// Returns the record that so many items for a sink were dropped. `time` is RFC 3339.
    pub fn dropped(id: String, sink: &str, items: u64, time: &str) -> Self {
        let event = json!({
            "specversion": "1.0",
            "id": id,
            "source": format!("/kas/sinks/{sink}"),
            "type": About::Dropped.as_str(),
            "time": time,
            "datacontenttype": DATA,
            "data": { "items": items },
        });
        Self { id, about: About::Dropped, agent: None, json: Bytes::from(event.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_is_a_cloud_event() {
        let news = News {
            id: "abc".to_owned(),
            about: About::SyncFailed,
            agent: AgentId::new(i64::MAX).unwrap(),
            agent_name: "prod \"1\"".into(),
            subject: "group/project".to_owned(),
            time: "2026-01-02T03:04:05Z".to_owned(),
            data: json!({ "message": "x" }),
        };
        let record = Record::of(news.clone());
        let event: Value = serde_json::from_slice(&record.json).unwrap();
        assert_eq!(
            event,
            json!({
                "specversion": "1.0",
                "id": "abc",
                "source": "/kas/agents/9223372036854775807",
                "type": "kas.sync.failed",
                "subject": "group/project",
                "time": "2026-01-02T03:04:05Z",
                "datacontenttype": "application/json",
                "agentid": "9223372036854775807",
                "agentname": "prod \"1\"",
                "data": { "message": "x" },
            })
        );
        // Names of attributes have lower-case letters and digits only.
        let keys = event.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert!(keys.iter().all(|key| key.bytes().all(|byte| byte.is_ascii_lowercase())), "{keys:?}");
        // An attribute that is not known is left out: empty texts are not allowed.
        let bare = News { subject: String::new(), time: String::new(), agent_name: "".into(), ..news };
        let event: Value = serde_json::from_slice(&Record::of(bare).json).unwrap();
        assert!(!["subject", "time", "agentname"].iter().any(|key| event.get(key).is_some()), "{event}");
    }

    #[test]
    fn drops_are_told_of_the_sink() {
        let record = Record::dropped("1".to_owned(), "rails", 7, "2026-01-02T03:04:05Z");
        let event: Value = serde_json::from_slice(&record.json).unwrap();
        assert_eq!((&event["source"], &event["data"]["items"]), (&json!("/kas/sinks/rails"), &json!(7)));
        assert_eq!((record.agent, record.about.kind()), (None, None));
    }
}
