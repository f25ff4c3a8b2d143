//! The agents that a caller can reach: `GET <prefix>agents`.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use callers::{Agents, KnownAgent};
use ids::AgentId;
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::Instant;

/// Knows the agents, and which of them are connected.
#[async_trait]
pub trait Directory: Agents {
    /// Returns every known agent, and whether it is connected.
    ///
    /// # Errors
    /// If the other replicas cannot be asked, with the reason.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn list(&self) -> Result<Vec<ListedAgent>, String>;
}

/// An agent of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedAgent {
    /// The agent.
    pub agent: KnownAgent,
    /// Whether it is connected.
    pub connected: bool,
}

/// Returns the JSON of agents in reach, by their number. `all` says which of them are connected.
pub(crate) fn to_json(mut reach: Vec<KnownAgent>, all: &[ListedAgent]) -> Vec<u8> {
    let connected: HashMap<AgentId, bool> =
        all.iter().map(|listed| (listed.agent.id, listed.connected)).collect();
    reach.sort_by_key(|agent| agent.id);
    let agents: Vec<_> = reach
        .iter()
        .map(|agent| {
            json!({
                "id": agent.id.get(),
                "name": agent.name.as_deref(),
                "project_id": agent.project_id,
                "connected": connected.get(&agent.id).copied().unwrap_or(false),
            })
        })
        .collect();
    let mut json = json!({ "agents": agents }).to_string().into_bytes();
    json.push(b'\n');
    json
}

/// The list of all agents, shared by requests: each query may ask all replicas.
#[derive(Debug, Default)]
pub(crate) struct Listing(tokio::sync::Mutex<Option<(Instant, Listed)>>);

type Listed = Result<Arc<[ListedAgent]>, String>;

impl Listing {
    /// How old the list, or the reason why there is none, may be.
    const FRESH: Duration = Duration::from_secs(1);

    /// Returns the list, which `ask` queries unless there is one. There is one query at a time; meanwhile,
    /// other requests wait for it.
    ///
    /// # Errors
    /// As [`Directory::list`].
    ///
    /// # Cancel safety
    /// Cancel safe: the next request asks again.
    pub(crate) async fn get(&self, ask: impl Future<Output = Result<Vec<ListedAgent>, String>>) -> Listed {
        let mut kept = self.0.lock().await;
        if let Some((at, listed)) = &*kept
            && at.elapsed() < Self::FRESH
        {
            return listed.clone();
        }
        let listed = ask.await.map(Arc::from);
        *kept = Some((Instant::now(), listed.clone()));
        listed
    }
}

/// Agents that were connected a short time ago, so that a request waits longer for them.
#[derive(Debug, Default)]
pub(crate) struct Sightings(Mutex<HashMap<AgentId, Instant>>);

impl Sightings {
    /// How long an agent counts as one that will soon be back.
    pub(crate) const RECENT: Duration = Duration::from_secs(60);
    /// Beyond so many agents, those that were seen earlier are forgotten.
    const MOST: usize = 10_000;

    /// The agent is connected now.
    pub(crate) fn saw(&self, agent: AgentId) {
        let now = Instant::now();
        let mut seen = self.0.lock();
        if seen.len() >= Self::MOST && !seen.contains_key(&agent) {
            seen.retain(|_, at| now.duration_since(*at) < Self::RECENT);
            if seen.len() >= Self::MOST {
                return;
            }
        }
        seen.insert(agent, now);
    }

    /// Whether the agent was seen less than [`Self::RECENT`] ago.
    pub(crate) fn is_recent(&self, agent: AgentId) -> bool {
        self.0.lock().get(&agent).is_some_and(|at| at.elapsed() < Self::RECENT)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn agent(number: i64) -> AgentId {
        AgentId::new(number).unwrap()
    }

    #[test]
    fn agents_are_listed_by_number_with_what_is_known() {
        let known = |number, name: Option<&str>, project_id| KnownAgent {
            id: agent(number),
            name: name.map(Into::into),
            project_id,
        };
        let (seven, two) = (known(7, Some("prod"), Some(3)), known(2, None, None));
        let all = [
            ListedAgent { agent: seven.clone(), connected: true },
            ListedAgent { agent: known(9, None, None), connected: true },
        ];
        assert_eq!(
            String::from_utf8(to_json(vec![seven, two], &all)).unwrap(),
            "{\"agents\":[{\"id\":2,\"name\":null,\"project_id\":null,\"connected\":false},\
             {\"id\":7,\"name\":\"prod\",\"project_id\":3,\"connected\":true}]}\n"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn requests_share_one_query_for_the_list_and_its_answer_for_a_second() {
        let listing = Listing::default();
        let queries = AtomicUsize::new(0);
        let ask = |answer: Result<Vec<ListedAgent>, String>| {
            listing.get(async {
                queries.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(5)).await;
                answer
            })
        };
        let one = || {
            let agent = KnownAgent { id: agent(7), name: None, project_id: None };
            Ok(vec![ListedAgent { agent, connected: true }])
        };
        let (first, second, third) = tokio::join!(ask(one()), ask(Ok(Vec::new())), ask(Err("b".into())));
        assert_eq!((queries.load(Ordering::Relaxed), first.as_deref().map(<[_]>::len)), (1, Ok(1)));
        assert_eq!((&second, &third), (&first, &first));
        tokio::time::sleep(Listing::FRESH).await;
        // A failure is shared too.
        let (first, second) = tokio::join!(ask(Err("a".into())), ask(one()));
        assert_eq!((queries.load(Ordering::Relaxed), &first), (2, &Err("a".into())));
        assert_eq!(second, first);
        tokio::time::sleep(Listing::FRESH).await;
        // Who leaves takes no answer from the others.
        let left = tokio::time::timeout(Duration::from_secs(1), ask(Err("c".into()))).await;
        assert!(left.is_err());
        assert!(ask(one()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn sightings_are_forgotten_after_a_minute_and_bounded() {
        let sightings = Sightings::default();
        sightings.saw(agent(1));
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert!(sightings.is_recent(agent(1)) && !sightings.is_recent(agent(2)));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!sightings.is_recent(agent(1)));
        for number in 1..=(Sightings::MOST as i64 + 5) {
            sightings.saw(agent(number));
        }
        assert_eq!(sightings.0.lock().len(), Sightings::MOST);
        tokio::time::sleep(Sightings::RECENT).await;
        sightings.saw(agent(i64::MAX));
        assert_eq!(sightings.0.lock().len(), 1);
    }
}
