//! Requests, again and again: through some replicas for every agent. Each is a `kasctl` of its own, so that each says
//! by its exit code what became of it.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, timeout},
};

use super::{agents::AGENTS, kasctl::Kasctl};

/// How often a request is sent for each agent through each replica. Shorter: outages are seen more exactly. Longer:
/// less of a small machine goes into starting `kasctl`.
pub(super) const PERIOD: Duration = Duration::from_millis(200);
/// What is asked: little, of any cluster.
const PATH: &str = "/version";
/// How long a request may take. Longer than kas lets it wait for its agent.
const LIMIT: Duration = Duration::from_secs(30);

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Answered,
    /// It surely had no effect.
    NotStarted(String),
    /// It began, and what became of it is not known.
    Unknown(String),
    /// It failed without telling whether it had begun.
    Untold(String),
}

impl End {
    /// Reads the exit code of kasctl, and what it said.
    pub(super) fn of(code: Option<i32>, stderr: &[u8]) -> Self {
        let said = || String::from_utf8_lossy(stderr).trim().trim_start_matches("kasctl: ").to_owned();
        match code {
            Some(0) => Self::Answered,
            Some(5) => Self::NotStarted(said()),
            Some(7) => Self::Unknown(said()),
            _ => Self::Untold(said()),
        }
    }
}

/// A request that ended.
#[derive(Debug, Clone)]
pub(super) struct Record {
    /// Its place in [`AGENTS`].
    pub(super) agent: usize,
    pub(super) sent: Instant,
    pub(super) ended: Instant,
    pub(super) end: End,
}

impl Record {
    pub(super) fn is_answered(&self) -> bool {
        self.end == End::Answered
    }

    pub(super) fn took(&self) -> Duration {
        self.ended - self.sent
    }
}

/// Requests in flight, and those that ended. Dropping it ends it all.
#[derive(Debug)]
pub(super) struct Traffic {
    records: watch::Sender<Vec<Record>>,
    stop: watch::Sender<bool>,
    lanes: JoinSet<()>,
}

impl Traffic {
    /// Begins, through each of these.
    pub(super) fn begin(through: &[Kasctl]) -> Self {
        let (records, stop) = (watch::Sender::new(Vec::new()), watch::Sender::new(false));
        let mut lanes = JoinSet::new();
        let count = u32::try_from(through.len() * AGENTS.len()).unwrap_or(u32::MAX);
        let mut begin = Instant::now();
        for kasctl in through {
            for agent in 0..AGENTS.len() {
                lanes.spawn(lane(kasctl.clone(), agent, begin, records.clone(), stop.subscribe()));
                // One after the other, not all at once.
                begin += PERIOD / count;
            }
        }
        Self { records, stop, lanes }
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

    /// Sends no more, and waits for what is in flight.
    pub(super) async fn finish(mut self) -> Vec<Record> {
        self.stop.send_replace(true);
        // Each has a limit of its own: this one is for a kasctl that hangs.
        let _ = timeout(LIMIT + Duration::from_secs(5), async {
            while self.lanes.join_next().await.is_some() {}
        })
        .await;
        self.records.borrow().clone()
    }
}

async fn lane(
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
        Ok(output) => End::of(output.status.code(), &output.stderr),
        Err(error) => End::Untold(format!("cannot run kasctl: {error}")),
    };
    records.send_modify(|records| records.push(Record { agent, sent, ended: Instant::now(), end }));
}

/// What a person wants to know of the requests for an agent.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) answered: usize,
    pub(super) failed: usize,
    /// Of those that were answered.
    pub(super) median: Duration,
    pub(super) slowest: Duration,
    /// The longest time between two answers.
    pub(super) pause: Duration,
    /// The same, of those that came before some instant.
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

/// Returns the longest time between two of these, which are in order.
fn longest(instants: &[Instant]) -> Duration {
    instants.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_code_says_whether_a_request_began() {
        assert_eq!(End::of(Some(0), b""), End::Answered);
        assert_eq!(End::of(Some(5), b"kasctl: not here\n"), End::NotStarted("not here".to_owned()));
        assert_eq!(End::of(Some(7), b"lost"), End::Unknown("lost".to_owned()));
        assert_eq!(End::of(Some(3), b""), End::Untold(String::new()));
        assert_eq!(End::of(None, b""), End::Untold(String::new()));
    }

    #[test]
    fn a_pause_is_between_answers_whatever_failed_meanwhile() {
        let begin = Instant::now();
        let record = |sent: u64, ended: u64, end: End| Record {
            agent: 0,
            sent: begin + Duration::from_millis(sent),
            ended: begin + Duration::from_millis(ended),
            end,
        };
        let records = [
            record(0, 5, End::Answered),
            record(30, 35, End::Answered),
            record(100, 400, End::Answered),
            record(110, 115, End::Unknown(String::new())),
            record(200, 401, End::Answered),
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
