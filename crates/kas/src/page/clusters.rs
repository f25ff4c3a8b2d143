//! [`Grid`]: the agents and how many objects their clusters have, as the view `summary` counts them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use grpc::Status;
use proto::kas::api::v1::{
    ViewAgent, ViewRow, WatchViewRequest, WatchViewResponse, watch_view_response::Event,
};
use tokio::time::Instant;

use super::shown::{Cluster, Fleet};
use crate::views::{ApiCaller, Hub, Question, Subscription};

/// Whose subscription it is.
const CALLER: &str = "page";
/// After a view that has ended, it is asked for again.
const AGAIN: Duration = Duration::from_secs(10);
/// Messages that are taken together.
const TOGETHER: usize = 1_000;

/// The agents of the fleet. It is fresh while it is held.
pub(super) struct Grid {
    hub: Arc<Hub>,
    looks: Looks,
    /// The titles of the counts.
    titles: Vec<String>,
    agents: BTreeMap<i64, ViewAgent>,
    counts: BTreeMap<i64, Vec<String>>,
}

enum Looks {
    Now(Box<Subscription>),
    /// It has ended; the next one begins at this time.
    Later(Instant, String),
}

impl Grid {
    pub(super) fn new(hub: Arc<Hub>) -> Self {
        let looks = Self::begin(&hub);
        Self { hub, looks, titles: Vec::new(), agents: BTreeMap::new(), counts: BTreeMap::new() }
    }

    fn begin(hub: &Arc<Hub>) -> Looks {
        let request = WatchViewRequest {
            agents: "all".to_owned(),
            view: views::View::SUMMARY.to_owned(),
            ..WatchViewRequest::default()
        };
        let begun = Question::read(request, hub.definitions(), CALLER)
            .and_then(|question| Subscription::begin(hub, question, CALLER, Arc::new(ApiCaller), false));
        match begun {
            Ok(subscription) => Looks::Now(Box::new(subscription)),
            Err(status) => Self::later(&status),
        }
    }

    fn later(status: &Status) -> Looks {
        Looks::Later(Instant::now() + AGAIN, status.message().to_owned())
    }

    /// Waits for a change.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn changed(&mut self) {
        let message = match &mut self.looks {
            Looks::Now(subscription) => subscription.next().await,
            Looks::Later(at, _) => {
                tokio::time::sleep_until(*at).await;
                self.looks = Self::begin(&self.hub);
                self.agents.clear();
                self.counts.clear();
                return;
            }
        };
        self.take(message);
        for _ in 0..TOGETHER {
            let Looks::Now(subscription) = &mut self.looks else { return };
            let Some(message) = subscription.next().now_or_never() else { return };
            self.take(message);
        }
    }

    fn take(&mut self, message: Option<Result<WatchViewResponse, Status>>) {
        let event = match message {
            Some(Ok(message)) => message.event,
            Some(Err(status)) => {
                tracing::debug!(error = %status, "the clusters cannot be counted for the page");
                self.looks = Self::later(&status);
                return;
            }
            None => {
                self.looks = Looks::Later(Instant::now() + AGAIN, "the view has ended".to_owned());
                return;
            }
        };
        match event {
            Some(Event::Columns(columns)) => {
                self.titles = columns.columns.into_iter().map(|column| column.name).collect();
            }
            Some(Event::Agent(agent)) => {
                self.agents.insert(agent.id, agent);
            }
            Some(Event::Upserted(rows)) => {
                for ViewRow { agent_id, cells, .. } in rows.rows {
                    self.counts.insert(agent_id, cells);
                }
            }
            Some(Event::Removed(keys)) => {
                for key in keys.keys {
                    self.counts.remove(&key.agent_id);
                }
            }
            Some(Event::Reset(_)) => {
                self.agents.clear();
                self.counts.clear();
            }
            Some(Event::Synced(_)) | None => {}
        }
    }

    /// Returns what is shown.
    pub(super) fn shown<'a>(&'a self) -> Fleet<'a> {
        let cluster = |agent: &'a ViewAgent| {
            let counts = self.counts.get(&agent.id).map_or(&[][..], Vec::as_slice);
            let titles = self.titles.iter().map(String::as_str);
            Cluster::new(agent, titles.zip(counts.iter().map(String::as_str)).collect())
        };
        Fleet {
            why: match &self.looks {
                Looks::Now(_) => None,
                Looks::Later(_, why) => Some(why),
            },
            agents: self.agents.values().map(cluster).collect(),
        }
    }
}
