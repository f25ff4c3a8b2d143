//! Reports to GitLab: each good new configuration of an agent with an open stream, and again every hour.
//!
//! The repetition matters if replicas report different versions at the same time, or GitLab loses one: else
//! access that the file has withdrawn could stay. Only the newest version is reported. One report is sent at
//! a time.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use gitlab::{AgentConfigurations, Failure, LookupError};
use ids::AgentId;
use parking_lot::Mutex;
use process::error::chain;
use tokio::{sync::Notify, time::Instant};

/// How often a configuration is reported that does not change.
const INTERVAL: Duration = Duration::from_secs(3600);
/// The wait after the first failure. It doubles with each further one.
const BACKOFF: Duration = Duration::from_secs(10);
/// The longest wait after a failure.
const LONGEST_BACKOFF: Duration = Duration::from_secs(300);

/// What there is to report of an agent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This configuration, as JSON.
    Good(Arc<str>),
    /// Its file is invalid at the moment.
    Bad,
    /// It has no open stream here.
    Gone,
}

/// The reports, by agents. There are never more than agents with open streams, and those that have left
/// within the last hour.
pub(crate) struct Reports {
    gitlab: Arc<dyn AgentConfigurations>,
    schedule: Mutex<Schedule>,
    woken: Notify,
}

impl std::fmt::Debug for Reports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reports").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Schedule {
    agents: HashMap<AgentId, Report>,
    /// When agents are next looked at, except the one whose report is being sent.
    due: BTreeSet<(Instant, AgentId)>,
}

struct Report {
    due: Instant,
    /// Counts changes, so that one that comes while a report is being sent is noticed.
    version: u64,
    /// Failures since the last success or change.
    failures: u32,
    /// GitLab has refused this version for good.
    is_refused: bool,
}

impl Schedule {
    fn set_due(&mut self, agent: AgentId, at: Instant) {
        if let Some(report) = self.agents.get_mut(&agent) {
            self.due.remove(&(report.due, agent));
            report.due = at;
            self.due.insert((at, agent));
        }
    }

    fn add(&mut self, agent: AgentId) -> &mut Report {
        let new = || Report { due: Instant::now(), version: 0, failures: 0, is_refused: false };
        self.agents.entry(agent).or_insert_with(new)
    }
}

/// An agent that is due.
struct Due {
    agent: AgentId,
    version: u64,
    is_refused: bool,
}

impl Reports {
    pub(crate) fn new(gitlab: Arc<dyn AgentConfigurations>) -> Self {
        Self { gitlab, schedule: Mutex::default(), woken: Notify::new() }
    }

    /// An agent has a good configuration, which has perhaps been reported.
    pub(crate) fn known(&self, agent: AgentId) {
        let is_known = self.schedule.lock().agents.contains_key(&agent);
        if !is_known {
            self.changed(agent);
        }
    }

    /// An agent has a new good configuration.
    pub(crate) fn changed(&self, agent: AgentId) {
        let mut schedule = self.schedule.lock();
        let report = schedule.add(agent);
        report.version += 1;
        (report.failures, report.is_refused) = (0, false);
        schedule.set_due(agent, Instant::now());
        drop(schedule);
        self.woken.notify_one();
    }

    /// Sends reports forever. `find` says what there is to report of an agent.
    pub(crate) async fn run(&self, find: impl Fn(AgentId) -> Found) {
        loop {
            let first = self.schedule.lock().due.first().map(|(at, _)| *at);
            let due = async {
                match first {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.woken.notified() => continue,
            }
            let Some(due) = self.take_due() else { continue };
            match find(due.agent) {
                Found::Good(json) if !due.is_refused => {
                    let sent = self.gitlab.configure_agent(due.agent, &json).await;
                    self.sent(&due, sent.err().as_ref());
                }
                Found::Good(_) | Found::Bad => self.sent(&due, None),
                Found::Gone => self.forget(&due),
            }
        }
    }

    /// Takes the first agent that is due off the schedule.
    fn take_due(&self) -> Option<Due> {
        let mut schedule = self.schedule.lock();
        let (at, agent) = schedule.due.first().copied().filter(|(at, _)| *at <= Instant::now())?;
        schedule.due.remove(&(at, agent));
        let report = schedule.agents.get(&agent)?;
        let Report { version, is_refused, .. } = report;
        Some(Due { agent, version: *version, is_refused: *is_refused })
    }

    /// Whether no agent is known.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.schedule.lock().agents.is_empty()
    }

    /// The agent has left. If it comes back, it is reported again.
    fn forget(&self, due: &Due) {
        let mut schedule = self.schedule.lock();
        // It may have come back meanwhile.
        if schedule.agents.get(&due.agent).is_some_and(|report| report.version == due.version) {
            schedule.agents.remove(&due.agent);
        }
    }

    /// A report has been sent, or there was nothing to send.
    fn sent(&self, due: &Due, error: Option<&LookupError>) {
        let mut schedule = self.schedule.lock();
        // After a change, the agent is on the schedule again.
        let Some(report) = schedule.agents.get_mut(&due.agent).filter(|report| report.version == due.version)
        else {
            return;
        };
        let id = due.agent.get();
        let wait = match error {
            None => {
                report.failures = 0;
                INTERVAL
            }
            Some(LookupError::Failed(Failure::Status(status))) if status.as_u16() == 400 => {
                tracing::warn!(
                    agent.id = id,
                    "GitLab refuses the configuration of an agent: not reported until it changes"
                );
                report.is_refused = true;
                INTERVAL
            }
            Some(LookupError::Failed(Failure::Status(status))) if status.as_u16() == 404 => {
                tracing::warn!(
                    agent.id = id,
                    "GitLab does not know an agent, or is too old to store its configuration: reported again in an hour"
                );
                INTERVAL
            }
            Some(error) => {
                if report.failures == 0 {
                    let error = chain(error);
                    tracing::warn!(
                        agent.id = id,
                        error,
                        "the configuration of an agent could not be reported to GitLab"
                    );
                }
                let wait = BACKOFF.saturating_mul(1 << report.failures.min(10)).min(LONGEST_BACKOFF);
                report.failures = report.failures.saturating_add(1);
                wait
            }
        };
        // Spread, so that not all agents are due at once.
        let wait = wait.mul_f64(1.0 - rand::random::<f64>() / 10.0);
        schedule.set_due(due.agent, Instant::now() + wait);
    }
}
