//! Counts the objects of an agent, for the view `summary`.

use std::{sync::Arc, time::Duration};

use views::{AgentState, Form, Listing, NewRow, Page, Uid, View, table};

use super::{Hub, buffers::AgentBuffers, feed::Feed, source::Source, tries::Tries};

/// How often objects are counted while somebody looks.
const EACH: Duration = Duration::from_secs(60);
const ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

/// Counts until dropped.
pub(super) async fn run(hub: Arc<Hub>, feed: Arc<Feed>, source: Arc<dyn Source>) {
    let columns = || views::Columns::new(View::counted().map(|(title, _)| (title, "integer")));
    let mut tries = Tries::new(&feed);
    loop {
        if feed.idle_since().is_some() {
            // Whoever looks next gets a new count, not one of minutes ago.
            feed.is(AgentState::Listing, "");
        }
        feed.watched().await;
        tries.begin();
        let counted = count(&hub, &*source, &hub.kind_of(feed.key.agent).buffers).await;
        let (cells, failed): (Vec<String>, Vec<String>) = counted
            .into_iter()
            .map(|count| match count {
                Ok(count) => (count.to_string(), String::new()),
                Err(why) => ("?".to_owned(), why),
            })
            .unzip();
        let reason = failed.iter().find(|why| !why.is_empty()).cloned().unwrap_or_default();
        if failed.iter().all(|why| !why.is_empty()) {
            tries.failed(reason);
            tries.pause(EACH).await;
        } else {
            let row = NewRow {
                namespace: String::new(),
                name: feed.key.agent.to_string(),
                uid: Uid::Other("".into()),
                resource_version: 0,
                time: 0,
                labels: String::new(),
                owner: String::new(),
                cells,
            };
            let page = Page { columns: columns(), rows: vec![row], ..Page::default() };
            // One row never needs a second page.
            let fits = feed.change(|store| {
                let _ = store.page(page, &mut Listing::default(), &hub.versions);
            });
            if !fits {
                return;
            }
            feed.is(AgentState::Live, reason);
            tokio::time::sleep(EACH).await;
        }
    }
}

/// Counts each resource: one object is listed, and the API server says how many more there are.
async fn count(hub: &Hub, source: &dyn Source, buffers: &AgentBuffers) -> Vec<Result<u64, String>> {
    let mut counts = Vec::new();
    for (_, resource) in View::counted() {
        hub.summaries.wait().await;
        let path = match resource.group.as_str() {
            "" => format!("/api/{}/{}", resource.version, resource.plural),
            group => format!("/apis/{group}/{}/{}", resource.version, resource.plural),
        };
        let answer = source.get(&format!("{path}?limit=1"), ACCEPT).await;
        let bytes = answer.as_ref().map_or(0, |answer| answer.body.len());
        let _parsing = buffers.parsing(bytes).await;
        counts.push(match answer {
            // An agent that is away would keep each of them waiting.
            Err(status) if counts.iter().all(Result::is_err) => {
                return vec![Err(status.message().to_owned()); View::counted().len()];
            }
            Err(status) => Err(status.message().to_owned()),
            Ok(answer) if answer.status == 200 => table::page(Form::Metadata, &answer.body)
                .map(|page| page.rows.len() as u64 + page.remaining.unwrap_or(0))
                .map_err(|error| error.to_string()),
            Ok(answer) => Err(format!(
                "the API server answered {} for {}: {}",
                answer.status,
                resource.plural,
                table::message(&answer.body)
            )),
        });
    }
    counts
}

/// Spreads requests over time: one per interval.
#[derive(Debug)]
pub(super) struct Pace {
    each: Duration,
    next: tokio::sync::Mutex<tokio::time::Instant>,
}

impl Pace {
    /// At most so many per second.
    pub(super) fn new(per_second: u32) -> Self {
        Self {
            each: Duration::from_secs(1) / per_second.max(1),
            next: tokio::sync::Mutex::new(tokio::time::Instant::now()),
        }
    }

    /// Waits for the next turn. Cancel safe.
    pub(super) async fn wait(&self) {
        let mut next = self.next.lock().await;
        tokio::time::sleep_until(*next).await;
        *next = tokio::time::Instant::now() + self.each;
    }
}
