//! What an API server tells of its events.

use std::sync::Arc;

use ::sinks::{
    Record,
    kubernetes::{KubeEvent, Line, Seen, line, page},
};
use ids::AgentId;

/// A page of a list of events, and lines of a watch. No panic, and the news of what is read is a CloudEvent
/// that is not much larger than what came.
pub fn sink_events(bytes: &[u8]) {
    let mut seen = Seen::default();
    let mut check = |event: KubeEvent| {
        seen.is_new(&event);
        assert!(!seen.is_new(&event), "it is known afterwards");
        let Ok(agent) = AgentId::new(7) else { return };
        let news = event.news(agent, Arc::from("a"));
        assert!(news.id.len() == 32 && news.subject.len() <= 4 * 1024, "{news:?}");
        let record = Record::of(news);
        let read: serde_json::Value = serde_json::from_slice(&record.json).unwrap_or_default();
        assert!(read["specversion"] == "1.0" && read["data"].is_object(), "{read}");
        assert!(record.json.len() <= 128 << 10, "{} bytes", record.json.len());
    };
    if let Ok(page) = page(bytes) {
        assert!(!page.version.is_empty());
        page.events.into_iter().for_each(&mut check);
    }
    for text in bytes.split(|byte| *byte == b'\n') {
        if let Ok(Line::Event(event, version)) = line(text) {
            assert!(!version.is_empty());
            check(event);
        }
    }
}
