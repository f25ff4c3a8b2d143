//! [`Sender`]: sends what waits for a sink.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kas_config::RedisPasswords;
use sinks::{Health, Pace, Record, Taken, Verdict, pause};
use tokio::{sync::watch, time::Instant};

use super::{
    board::{Sinks, Waiting, new_id, now},
    target::{Sent, Target, TargetError},
    targets::target,
};

/// Items per second, of all replicas: each sends its part.
const RATE: u32 = 1_000;
/// The least time between two looks when the rate is used up.
const LOOK: Duration = Duration::from_millis(5);
/// How long nothing is done if nothing wakes: nothing waits then.
const IDLE: Duration = Duration::from_secs(60);
/// At most one line about failures of a sink is logged in this time.
const WARN_INTERVAL: Duration = Duration::from_secs(60);
/// How long a replica that leaves waits until sinks have taken what waits.
const FLUSH: Duration = Duration::from_secs(5);

/// Sends what waits for one sink.
pub(crate) struct Sender {
    sinks: Arc<Sinks>,
    waiting: Arc<Waiting>,
    target: Arc<dyn Target>,
    /// How many replicas are alive.
    live: watch::Receiver<usize>,
}

impl Sender {
    /// Returns a sender for each sink.
    ///
    /// # Errors
    /// The index of a sink that cannot be sent to, and why.
    pub(crate) fn all(
        sinks: &Arc<Sinks>,
        config: &kas_config::Sinks,
        passwords: &RedisPasswords,
        live: &watch::Receiver<usize>,
    ) -> Result<Vec<Self>, (usize, TargetError)> {
        let sender = |(index, waiting): (usize, &Arc<Waiting>)| {
            let target = target(&waiting.config, config, passwords).map_err(|error| (index, error))?;
            let (sinks, waiting) = (Arc::clone(sinks), Arc::clone(waiting));
            Ok(Self { sinks, waiting, target, live: live.clone() })
        };
        sinks.all.iter().enumerate().map(sender).collect()
    }

    /// Sends until dropped.
    pub(crate) async fn run(self) {
        let Self { sinks, waiting, target, live } = self;
        let name = waiting.config.name.as_str();
        let mut pace = Pace::new(RATE);
        let mut health = Health::default();
        let mut warned: Option<Instant> = None;
        loop {
            let wake = waiting.wake.notified();
            let now = sinks.now();
            let due = waiting.queue.lock().next_due(now);
            match due {
                Some(due) if due <= now => {}
                due => {
                    let idle = due.map_or(IDLE, |due| due.saturating_sub(now));
                    tokio::select! {
                        () = wake => {}
                        () = tokio::time::sleep(idle) => {}
                    }
                    continue;
                }
            }
            let most = target.at_once().min(waiting.queue.lock().len() + 1);
            pace.set(part(*live.borrow()));
            let allowed = pace.take_now(now, most);
            if allowed == 0 {
                tokio::time::sleep(LOOK).await;
                continue;
            }
            let taken = {
                let mut queue = waiting.queue.lock();
                waiting.is_sending.store(true, Ordering::Relaxed);
                queue.take(now, allowed)
            };
            if taken.is_empty() {
                waiting.is_sending.store(false, Ordering::Relaxed);
                continue;
            }
            let records: Vec<_> = taken.iter().map(|taken| record(taken, name)).collect();
            let sent = target.send(&records).await;
            health.note(
                sent.contains(&Sent::Done),
                sent.iter().any(|it| !matches!(it, Sent::Again { is_reached: false, .. })),
            );
            let why = sent.iter().find_map(|it| match it {
                Sent::Again { why, .. } => Some(why.clone()),
                Sent::Done => None,
            });
            settle(&sinks, &waiting, taken, &sent);
            waiting.is_failing.store(health.is_failing(), Ordering::Relaxed);
            match why {
                Some(why) if warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL) => {
                    warned = Some(Instant::now());
                    tracing::warn!(
                        sink = name,
                        why,
                        "a sink does not take news: it waits, and is tried again for an hour"
                    );
                }
                _ => {}
            }
            if health.unreached() > 0 {
                tokio::time::sleep(pause(health.unreached(), rand::random())).await;
            }
        }
    }
}

/// Returns the part of the rate that one of so many replicas has.
fn part(replicas: usize) -> u32 {
    RATE / u32::try_from(replicas.max(1)).unwrap_or(u32::MAX)
}

fn record(taken: &Taken<Arc<Record>>, sink: &str) -> Arc<Record> {
    match taken {
        Taken::Item(entry) => Arc::clone(&entry.item),
        Taken::Lost(lost) => Arc::new(Record::dropped(new_id(), sink, lost.items, &now())),
    }
}

fn settle(sinks: &Sinks, waiting: &Waiting, taken: Vec<Taken<Arc<Record>>>, sent: &[Sent]) {
    let name = waiting.config.name.as_str();
    let now = sinks.now();
    let (mut done, mut failed) = (0, 0);
    let mut queue = waiting.queue.lock();
    for (at, taken) in taken.into_iter().enumerate() {
        let verdict = match sent.get(at) {
            Some(Sent::Done) => Verdict::Done,
            Some(Sent::Again { is_reached: true, .. }) => Verdict::Refused(rand::random()),
            Some(Sent::Again { is_reached: false, .. }) | None => Verdict::Again(rand::random()),
        };
        let is_done = verdict == Verdict::Done;
        done += u64::from(is_done);
        failed += u64::from(!is_done);
        let dropped = queue.settle(taken, verdict, now);
        sinks.metrics.dropped(name, dropped);
    }
    sinks.metrics.sent(name, done, failed);
    sinks.metrics.waiting(name, queue.len(), queue.bytes());
    waiting.is_sending.store(false, Ordering::Relaxed);
}

/// Waits until all sinks that take something have taken what waits for them, at most 5 s.
///
/// # Cancel safety
/// Cancel safe.
pub(crate) async fn flush(sinks: Arc<Sinks>) {
    let until = Instant::now() + FLUSH;
    for sink in &sinks.all {
        while Instant::now() < until
            && !sink.is_failing.load(Ordering::Relaxed)
            && (sink.is_sending.load(Ordering::Relaxed) || !sink.queue.lock().is_empty())
        {
            tokio::time::sleep(LOOK).await;
        }
    }
    let left: usize = sinks.all.iter().map(|sink| sink.queue.lock().len()).sum();
    if left > 0 {
        tracing::warn!(items = left, "news that sinks have not taken is lost: this replica stops");
    }
}
