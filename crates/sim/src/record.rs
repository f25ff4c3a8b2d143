//! [`Recorder`]: writes the history of a simulation.

use std::{collections::BTreeMap, sync::Arc};

use crc32fast::Hasher;
use history::{Attempt, Fault, History, Life, Micros, Outcome, Presence, Request, Run, View};
use parking_lot::Mutex;

use crate::network::Network;

/// Bytes that were sent or received so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    count: u64,
    hash: u32,
    clean: bool,
}

impl Counted {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.count += bytes.len() as u64;
        let mut hash = Hasher::new_with_initial(self.hash);
        hash.update(bytes);
        self.hash = hash.finalize();
    }

    /// They have ended cleanly.
    pub(crate) fn end(&mut self) {
        self.clean = true;
    }

    pub(crate) fn bytes(self) -> history::Bytes {
        history::Bytes { count: self.count, hash: self.hash.into(), clean: self.clean, wrong_at: None }
    }
}

/// Returns the last moment at which what has ended now was certainly there: a look in the same step may see
/// either.
fn before(now: Micros) -> Micros {
    now.saturating_sub(1)
}

/// The end of a request, or of one attempt.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) detail: String,
    /// The replicas it passed.
    pub(crate) path: Vec<String>,
    pub(crate) received: Counted,
}

impl Ended {
    pub(crate) fn of(outcome: Outcome, detail: impl Into<String>) -> Self {
        Self { outcome, detail: detail.into(), path: Vec::new(), received: Counted::default() }
    }
}

#[derive(Default)]
struct Recorded {
    history: History,
    requests: BTreeMap<u64, usize>,
    /// Those that are there now, by agent, replica and connection, with the numbers of their tunnels.
    present: BTreeMap<(i64, String, i64), (usize, usize)>,
    /// The last view of each observer.
    views: BTreeMap<String, usize>,
    /// Tunnels that agents have open, by replica.
    tunnels: BTreeMap<String, i64>,
}

impl Recorded {
    /// No agent is present at a replica any more.
    fn withdraw(&mut self, replica: &str, now: Micros) {
        let Self { history, present, .. } = self;
        present.retain(|(_, of, _), (at, _)| {
            if of == replica {
                history.presences[*at].to = Some(before(now));
            }
            of != replica
        });
    }
}

/// Writes the history. Clones share it.
#[derive(Clone)]
pub(crate) struct Recorder {
    recorded: Arc<Mutex<Recorded>>,
    network: Network,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

impl Recorder {
    pub(crate) fn new(network: Network) -> Self {
        Self { recorded: Arc::default(), network }
    }

    /// Returns the time.
    pub(crate) fn now(&self) -> Micros {
        self.network.now()
    }

    fn with<T>(&self, act: impl FnOnce(&mut Recorded) -> T) -> T {
        act(&mut self.recorded.lock())
    }

    /// Returns the history so far.
    pub(crate) fn history(&self) -> History {
        self.with(|recorded| recorded.history.clone())
    }

    pub(crate) fn edit(&self, edit: impl FnOnce(&mut History)) {
        self.with(|recorded| edit(&mut recorded.history));
    }

    pub(crate) fn request(&self, request: Request) {
        self.with(|recorded| {
            recorded.requests.insert(request.id, recorded.history.requests.len());
            recorded.history.requests.push(request);
        });
    }

    fn edit_request(&self, id: u64, edit: impl FnOnce(&mut Request)) {
        self.with(|recorded| {
            if let Some(request) =
                recorded.requests.get(&id).and_then(|at| recorded.history.requests.get_mut(*at))
            {
                edit(request);
            }
        });
    }

    /// Adds an attempt that has ended.
    pub(crate) fn attempted(&self, id: u64, replica: &str, begun: Micros, outcome: Outcome) {
        let attempt = Attempt { replica: replica.to_owned(), begun, ended: self.now(), outcome };
        self.edit_request(id, |request| request.attempts.push(attempt));
    }

    /// Notes how a request ended.
    pub(crate) fn ended(&self, id: u64, ended: Ended, sent: Counted) {
        let now = self.now();
        self.edit_request(id, |request| {
            (request.ended, request.outcome) = (Some(now), Some(ended.outcome));
            request.detail = ended.detail;
            request.path = ended.path;
            request.sent = Some(sent.bytes());
            request.received = Some(ended.received.bytes());
        });
    }

    /// An agent begins to run a request; returns the number of the run.
    pub(crate) fn run(&self, run: Run) -> usize {
        self.with(|recorded| {
            recorded.history.runs.push(run);
            recorded.history.runs.len() - 1
        })
    }

    pub(crate) fn edit_run(&self, number: usize, edit: impl FnOnce(&mut Run)) {
        self.with(|recorded| recorded.history.runs.get_mut(number).map(edit));
    }

    /// A replica has a tunnel of a connection.
    fn present(&self, key: &(i64, String, i64)) {
        let from = self.now();
        self.with(|recorded| {
            if let Some((_, tunnels)) = recorded.present.get_mut(key) {
                *tunnels += 1;
                return;
            }
            recorded.present.insert(key.clone(), (recorded.history.presences.len(), 1));
            recorded.history.presences.push(Presence {
                agent: key.0,
                replica: key.1.clone(),
                connection: Some(key.2),
                from,
                to: None,
                invalid_since: None,
            });
        });
    }

    /// A replica has lost a tunnel of a connection.
    fn gone(&self, key: &(i64, String, i64)) {
        let now = self.now();
        self.with(|recorded| {
            let Some((at, tunnels)) = recorded.present.get_mut(key) else { return };
            *tunnels -= 1;
            if *tunnels == 0 {
                recorded.history.presences[*at].to = Some(before(now));
                recorded.present.remove(key);
            }
        });
    }

    /// A replica says that it has left: nobody needs to see its agents there any more.
    pub(crate) fn withdrawn(&self, replica: &str) {
        let now = self.now();
        self.with(|recorded| recorded.withdraw(replica, now));
    }

    pub(crate) fn born(&self, replica: &str, epoch: u64) {
        let from = self.now();
        let life = Life {
            replica: replica.to_owned(),
            epoch: Some(epoch),
            later: Vec::new(),
            from,
            to: None,
            killed: false,
        };
        self.edit(|history| history.lives.push(life));
    }

    /// The process of a replica has ended, and with it all its connections.
    pub(crate) fn died(&self, replica: &str) {
        let now = self.now();
        self.with(|recorded| {
            let lives = recorded.history.lives.iter_mut();
            for life in lives.filter(|life| life.replica == replica && life.to.is_none()) {
                life.to = Some(now);
            }
            recorded.withdraw(replica, now);
            recorded.views.remove(replica);
        });
    }

    /// Adds a view, or prolongs the last one of this observer if it is the same.
    pub(crate) fn view(&self, mut view: View) {
        self.with(|recorded| {
            let Recorded { history, views, .. } = recorded;
            if let Some(last) = views.get(&view.observer).and_then(|at| history.views.get_mut(*at)) {
                let (at, until) = (view.at, view.until);
                (view.at, view.until) = (last.at, last.until);
                if *last == view {
                    last.until = until;
                    return;
                }
                (view.at, view.until) = (at, until);
            }
            views.insert(view.observer.clone(), history.views.len());
            history.views.push(view);
        });
    }

    /// Adds a fault; returns its number.
    pub(crate) fn fault(&self, fault: Fault) -> usize {
        self.with(|recorded| {
            recorded.history.faults.push(fault);
            recorded.history.faults.len() - 1
        })
    }

    /// A fault is over.
    pub(crate) fn mended(&self, number: usize) {
        let now = self.now();
        self.with(|recorded| {
            if let Some(fault) = recorded.history.faults.get_mut(number) {
                fault.to = Some(now);
            }
        });
    }

    /// An agent has opened (1) or lost (-1) a tunnel.
    pub(crate) fn tunnel(&self, replica: &str, change: i64) {
        self.with(|recorded| *recorded.tunnels.entry(replica.to_owned()).or_default() += change);
    }

    /// Returns how many tunnels agents have open to a replica.
    pub(crate) fn tunnels(&self, replica: &str) -> i64 {
        self.with(|recorded| recorded.tunnels.get(replica).copied().unwrap_or_default())
    }
}

/// While it lives, a replica has a tunnel of a connection.
pub(crate) struct Present {
    recorder: Recorder,
    key: (i64, String, i64),
}

impl Present {
    pub(crate) fn new(recorder: &Recorder, agent: i64, replica: &str, connection: i64) -> Self {
        let key = (agent, replica.to_owned(), connection);
        recorder.present(&key);
        Self { recorder: recorder.clone(), key }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.recorder.gone(&self.key);
    }
}
