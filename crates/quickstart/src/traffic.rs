//! A constant load: requests to every agent, through some of the replicas. Each request is one run of
//! `kasctl`, whose exit code is the outcome.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, timeout},
};

use super::{agents::AGENTS, kasctl::Kasctl};

/// Interval between requests for one agent through one replica. A shorter one measures outages more exactly;
/// a longer one spends less processor time on starting `kasctl`.
pub(super) const PERIOD: Duration = Duration::from_millis(200);
/// The path of the requests: small, and served by every cluster.
const PATH: &str = "/version";
/// Time limit of a request. Longer than kas lets it wait for its agent.
const LIMIT: Duration = Duration::from_secs(30);

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Answered,
    /// It had no effect.
    NotStarted(String),
    /// It had started, and its outcome is unknown.
    Unknown(String),
    /// It failed, and kasctl did not say whether it had started.
    Unclear(String),
}

impl Outcome {
    /// Interprets the exit code and the standard error of kasctl.
    pub(super) fn of(code: Option<i32>, stderr: &[u8]) -> Self {
        let said = || String::from_utf8_lossy(stderr).trim().trim_start_matches("kasctl: ").to_owned();
        match code {
            Some(0) => Self::Answered,
            Some(5) => Self::NotStarted(said()),
            Some(7) => Self::Unknown(said()),
            _ => Self::Unclear(said()),
        }
    }
}

/// A request that ended.
#[derive(Debug, Clone)]
pub(super) struct Record {
    /// Its index in [`AGENTS`].
    pub(super) agent: usize,
    pub(super) sent: Instant,
    pub(super) ended: Instant,
    pub(super) end: Outcome,
}

impl Record {
    pub(super) fn is_answered(&self) -> bool {
        self.end == Outcome::Answered
    }

    pub(super) fn took(&self) -> Duration {
        self.ended - self.sent
    }
}

/// Requests in flight, and those that ended. Dropping it cancels all of them.
#[derive(Debug)]
pub(super) struct Traffic {
    records: watch::Sender<Vec<Record>>,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Traffic {
    /// Starts requests through each of these replicas.
    pub(super) fn begin(through: &[Kasctl]) -> Self {
        let (records, stop) = (watch::Sender::new(Vec::new()), watch::Sender::new(false));
        let mut tasks = JoinSet::new();
        let count = u32::try_from(through.len() * AGENTS.len()).unwrap_or(u32::MAX);
        let mut begin = Instant::now();
        for kasctl in through {
            for agent in 0..AGENTS.len() {
                tasks.spawn(send_periodically(
                    kasctl.clone(),
                    agent,
                    begin,
                    records.clone(),
                    stop.subscribe(),
                ));
                // Spread over the period, not all at once.
                begin += PERIOD / count;
            }
        }
        Self { records, stop, tasks }
    }

    /// Returns how many were answered so far, and how many were not.
    pub(super) fn count(&self) -> (usize, usize) {
        let records = self.records.borrow();
        let answered = records.iter().filter(|record| record.is_answered()).count();
        (answered, records.len() - answered)
    }

    /// Returns what tells the requests that end.
    pub(super) fn records(&self) -> watch::Receiver<Vec<Record>> {
        self.records.subscribe()
    }

    /// Sends no more requests, and waits for those in flight.
    pub(super) async fn finish(mut self) -> Vec<Record> {
        self.stop.send_replace(true);
        // Each request has its own limit; this one is for a kasctl that hangs.
        let _ = timeout(LIMIT + Duration::from_secs(5), async {
            while self.tasks.join_next().await.is_some() {}
        })
        .await;
        self.records.borrow().clone()
    }
}

async fn send_periodically(
    kasctl: Kasctl,
    agent: usize,
    begin: Instant,
    records: watch::Sender<Vec<Record>>,
    mut stop: watch::Receiver<bool>,
) {
    let mut ticks = interval_at(begin, PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = stop.changed() => break,
            Some(_) = open.join_next() => {}
            _ = ticks.tick() => {
                open.spawn(send(kasctl.clone(), agent, records.clone()));
            }
        }
    }
    while open.join_next().await.is_some() {}
}

async fn send(kasctl: Kasctl, agent: usize, records: watch::Sender<Vec<Record>>) {
    let limit = format!("{}s", LIMIT.as_secs());
    let sent = Instant::now();
    let output = kasctl.call(&["--timeout", &limit, "request", AGENTS[agent].0, "GET", PATH]).output().await;
    let end = match output {
        Ok(output) => Outcome::of(output.status.code(), &output.stderr),
        Err(error) => Outcome::Unclear(format!("cannot run kasctl: {error}")),
    };
    records.send_modify(|records| records.push(Record { agent, sent, ended: Instant::now(), end }));
}

/// Statistics of the requests for an agent.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) answered: usize,
    pub(super) failed: usize,
    /// Of the answered requests.
    pub(super) median: Duration,
    pub(super) slowest: Duration,
    /// The longest time between two answers.
    pub(super) pause: Duration,
    /// The same, of the answers before some instant.
    pub(super) pause_before: Duration,
}

impl Summary {
    pub(super) fn of<'a>(records: impl Iterator<Item = &'a Record>, instant: Instant) -> Self {
        let (answered, failed): (Vec<_>, Vec<_>) = records.partition(|record| record.is_answered());
        let mut took: Vec<Duration> = answered.iter().map(|record| record.took()).collect();
        let mut ended: Vec<Instant> = answered.iter().map(|record| record.ended).collect();
        took.sort_unstable();
        ended.sort_unstable();
        Self {
            answered: answered.len(),
            failed: failed.len(),
            median: took.get(took.len() / 2).copied().unwrap_or_default(),
            slowest: took.last().copied().unwrap_or_default(),
            pause: longest(&ended),
            pause_before: longest(&ended[..ended.partition_point(|ended| *ended < instant)]),
        }
    }
}

/// Returns the longest time between two consecutive instants. They must be sorted.
fn longest(instants: &[Instant]) -> Duration {
    instants.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_tells_whether_a_request_started() {
        assert_eq!(Outcome::of(Some(0), b""), Outcome::Answered);
        assert_eq!(Outcome::of(Some(5), b"kasctl: not here\n"), Outcome::NotStarted("not here".to_owned()));
        assert_eq!(Outcome::of(Some(7), b"lost"), Outcome::Unknown("lost".to_owned()));
        assert_eq!(Outcome::of(Some(3), b""), Outcome::Unclear(String::new()));
        assert_eq!(Outcome::of(None, b""), Outcome::Unclear(String::new()));
    }

    #[test]
    fn a_pause_is_the_time_between_two_answers() {
        let begin = Instant::now();
        let record = |sent: u64, ended: u64, end: Outcome| Record {
            agent: 0,
            sent: begin + Duration::from_millis(sent),
            ended: begin + Duration::from_millis(ended),
            end,
        };
        let records = [
            record(0, 5, Outcome::Answered),
            record(30, 35, Outcome::Answered),
            record(100, 400, Outcome::Answered),
            record(110, 115, Outcome::Unknown(String::new())),
            record(200, 401, Outcome::Answered),
        ];
        let millis = Duration::from_millis;
        assert_eq!(
            Summary::of(records.iter(), begin + millis(200)),
            Summary {
                answered: 4,
                failed: 1,
                median: millis(201),
                slowest: millis(300),
                pause: millis(365),
                pause_before: millis(30),
            }
        );
        assert_eq!(Summary::of([].iter(), begin), Summary::default());
    }
}
