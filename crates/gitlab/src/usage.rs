//! How much the Kubernetes API endpoint, GitOps and Flux are used, as GitLab counts it.

use std::{collections::BTreeSet, mem, sync::Arc, time::Duration};

use ids::AgentId;
use parking_lot::Mutex;
use process::error::chain;
use serde_json::{Map, Value, json};
use tokio::time::MissedTickBehavior;

use crate::{Client, Failure, GitLabApi, LookupError};

/// The path of every version.
const USAGE_METRICS: &str = "/api/v4/internal/kubernetes/usage_metrics";
/// The next report after GitLab said that it does not take them.
const REFUSED: Duration = Duration::from_secs(3600);
/// The most users, agents, and projects, of one kind of access that are remembered until the next report.
/// Others are not reported.
const MOST_IDS: usize = 100_000;

/// A kind of credential that GitLab counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A CI job token.
    Ci,
    /// The session of a browser.
    User,
    /// A personal access token.
    Pat,
}

impl Access {
    const ALL: [Self; 3] = [Self::Ci, Self::User, Self::Pat];

    /// Returns the name in GitLab's counters.
    fn as_str(self) -> &'static str {
        match self {
            Self::Ci => "ci",
            Self::User => "user",
            Self::Pat => "pat",
        }
    }
}

/// Counts what has not been reported yet.
#[derive(Debug, Default)]
pub struct Usage(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    requests: u64,
    /// In the order of [`Access::ALL`].
    by_access: [CountsOfAccess; 3],
    /// Sets of manifests that were applied, or sent to agents that apply them.
    syncs: u64,
    /// Pushes that agents with Flux were told of, and the projects.
    pushes: u64,
    pushed: BTreeSet<i64>,
}

#[derive(Debug, Default)]
struct CountsOfAccess {
    requests: u64,
    users: BTreeSet<i64>,
    agents: BTreeSet<i64>,
}

impl Usage {
    /// Counts an authorized request to an agent. `by`: the kind of its credential if it is one of GitLab, and
    /// the id of its user if that is known.
    pub fn count_request(&self, agent: AgentId, by: Option<(Access, Option<i64>)>) {
        let mut counts = self.0.lock();
        counts.requests = counts.requests.saturating_add(1);
        if let Some((access, user)) = by {
            let counts = &mut counts.by_access[access as usize];
            counts.requests = counts.requests.saturating_add(1);
            counts.users.extend(user.filter(|_| counts.users.len() < MOST_IDS));
            if counts.agents.len() < MOST_IDS {
                counts.agents.insert(agent.get());
            }
        }
    }

    /// Counts sets of manifests that were applied, or sent to an agent that applies them.
    pub fn count_syncs(&self, syncs: u64) {
        let mut counts = self.0.lock();
        counts.syncs = counts.syncs.saturating_add(syncs);
    }

    /// Counts a push that an agent with Flux was told of, and the id of its project if that is known.
    pub fn count_push(&self, project: Option<i64>) {
        let mut counts = self.0.lock();
        let counts = &mut *counts;
        counts.pushes = counts.pushes.saturating_add(1);
        counts.pushed.extend(project.filter(|_| counts.pushed.len() < MOST_IDS));
    }

    /// Reports to GitLab every `period`, which is above zero; an hour later if GitLab takes no reports. Runs
    /// forever. `before` is called before each report, to count what others have counted.
    pub async fn report(self: Arc<Self>, client: Arc<Client>, period: Duration, before: impl Fn(&Self)) {
        let mut ticks = tokio::time::interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            before(&self);
            match self.report_once(&client).await {
                Ok(()) => {}
                Err(error @ LookupError::Failed(Failure::Status(status)))
                    if [400, 404].contains(&status.as_u16()) =>
                {
                    let error = chain(&error);
                    tracing::warn!(error, "GitLab takes no reports of usage: the next one in an hour");
                    ticks.reset_after(REFUSED);
                }
                Err(error) => {
                    tracing::warn!(
                        error = chain(&error),
                        "usage could not be reported to GitLab: kept for the next report"
                    );
                }
            }
        }
    }

    /// Reports once, if there is something to report. After a failure, the counts are kept.
    pub(crate) async fn report_once(&self, client: &Client) -> Result<(), LookupError> {
        let counts = mem::take(&mut *self.0.lock());
        let json = counts.to_json(client.api);
        if json.is_empty() {
            return Ok(());
        }
        let sent = client.report(USAGE_METRICS, Value::Object(json).to_string()).await;
        if sent.is_err() {
            self.0.lock().add(counts);
        }
        sent
    }
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.syncs = self.syncs.saturating_add(other.syncs);
        self.pushes = self.pushes.saturating_add(other.pushes);
        add(&mut self.pushed, other.pushed);
        for (own, other) in self.by_access.iter_mut().zip(other.by_access) {
            own.requests = own.requests.saturating_add(other.requests);
            add(&mut own.users, other.users);
            add(&mut own.agents, other.agents);
        }
    }

    /// Returns the counters above zero, for a version of GitLab.
    fn to_json(&self, api: GitLabApi) -> Map<String, Value> {
        let mut json = Map::new();
        // A version ignores the counters of the others.
        if api != GitLabApi::Today {
            for (name, count) in
                [("gitops_sync_count", self.syncs), ("k8s_api_proxy_request_count", self.requests)]
            {
                if count > 0 {
                    json.insert(name.to_owned(), count.into());
                }
            }
        }
        if api == GitLabApi::V14 {
            return json;
        }
        let mut counters = Map::new();
        for (name, count) in
            [("k8s_api_proxy_request", self.requests), ("flux_git_push_notifications_total", self.pushes)]
        {
            if count > 0 {
                counters.insert(name.to_owned(), count.into());
            }
        }
        let mut unique = Map::new();
        for (access, counts) in Access::ALL.into_iter().zip(&self.by_access) {
            let access = access.as_str();
            if counts.requests > 0 {
                counters
                    .insert(format!("k8s_api_proxy_requests_via_{access}_access"), counts.requests.into());
            }
            for (what, ids) in [("users", &counts.users), ("agents", &counts.agents)] {
                if !ids.is_empty() {
                    unique.insert(
                        format!("k8s_api_proxy_requests_unique_{what}_via_{access}_access"),
                        json!(ids),
                    );
                }
            }
        }
        if !self.pushed.is_empty() {
            unique.insert("flux_git_push_notified_unique_projects".to_owned(), json!(self.pushed));
        }
        if !counters.is_empty() {
            json.insert("counters".to_owned(), counters.into());
        }
        if !unique.is_empty() {
            json.insert("unique_counters".to_owned(), unique.into());
        }
        json
    }
}

fn add(ids: &mut BTreeSet<i64>, more: BTreeSet<i64>) {
    let free = MOST_IDS.saturating_sub(ids.len());
    ids.extend(more.into_iter().take(free));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    #[test]
    fn each_version_gets_its_counters() {
        let usage = Usage::default();
        assert!(usage.0.lock().to_json(GitLabApi::Any).is_empty());
        usage.count_request(agent(7), None);
        usage.count_request(agent(7), Some((Access::Ci, Some(1))));
        usage.count_request(agent(8), Some((Access::Ci, Some(1))));
        usage.count_request(agent(7), Some((Access::Pat, None)));
        usage.count_request(agent(7), Some((Access::User, Some(2))));
        let today = json!({
            "counters": {
                "k8s_api_proxy_request": 5,
                "k8s_api_proxy_requests_via_ci_access": 2,
                "k8s_api_proxy_requests_via_user_access": 1,
                "k8s_api_proxy_requests_via_pat_access": 1,
            },
            "unique_counters": {
                "k8s_api_proxy_requests_unique_users_via_ci_access": [1],
                "k8s_api_proxy_requests_unique_agents_via_ci_access": [7, 8],
                "k8s_api_proxy_requests_unique_users_via_user_access": [2],
                "k8s_api_proxy_requests_unique_agents_via_user_access": [7],
                "k8s_api_proxy_requests_unique_agents_via_pat_access": [7],
            },
        });
        let old = json!({ "k8s_api_proxy_request_count": 5 });
        let of = |api| Value::Object(usage.0.lock().to_json(api));
        assert_eq!((of(GitLabApi::V14), of(GitLabApi::Today)), (old.clone(), today.clone()));
        let mut both = today;
        both.as_object_mut().unwrap().extend(old.as_object().unwrap().clone());
        assert_eq!(of(GitLabApi::Any), both);
    }

    #[test]
    fn syncs_and_pushes_are_counted_without_requests() {
        let usage = Usage::default();
        usage.count_syncs(2);
        usage.count_push(Some(5));
        usage.count_push(Some(5));
        usage.count_push(Some(3));
        usage.count_push(None);
        let of = |api| Value::Object(usage.0.lock().to_json(api));
        assert_eq!(of(GitLabApi::V14), json!({ "gitops_sync_count": 2 }));
        let today = json!({
            "counters": { "flux_git_push_notifications_total": 4 },
            "unique_counters": { "flux_git_push_notified_unique_projects": [3, 5] },
        });
        assert_eq!(of(GitLabApi::Today), today);
        let usage = Usage::default();
        usage.count_syncs(1);
        // GitLab of today counts no syncs, so there is nothing to report.
        assert!(usage.0.lock().to_json(GitLabApi::Today).is_empty());
    }

    #[test]
    fn ids_are_bounded() {
        let usage = Usage::default();
        for id in 1..=i64::try_from(MOST_IDS).unwrap() + 5 {
            usage.count_request(agent(id), Some((Access::User, Some(id))));
        }
        let mut counts = mem::take(&mut *usage.0.lock());
        usage.count_request(agent(i64::MAX), Some((Access::User, Some(i64::MAX))));
        counts.add(mem::take(&mut *usage.0.lock()));
        let by_user = &counts.by_access[Access::User as usize];
        assert_eq!((by_user.users.len(), by_user.agents.len()), (MOST_IDS, MOST_IDS));
        assert_eq!(by_user.requests, MOST_IDS as u64 + 6);
    }
}
