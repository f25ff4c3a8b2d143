//! The history of a chaos run or of a simulation, and one checker of its invariants.
//!
//! A history holds what clients asked and got, what agents ran, what each replica believed, and what was done
//! to them. All times are microseconds of one monotonic clock, which the writers share. Nothing here reads a
//! clock or does I/O, except a reader and a writer of JSON lines on a given stream.

mod check;
mod fleet;
mod lines;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use self::{
    check::{Breach, Invariant, Report, Verdict, check},
    fleet::{Delivery, Hook, Kept, Rows},
    lines::{Error, read, write},
};

/// Microseconds of a monotonic clock that all writers of a history share.
pub type Micros = u64;

/// One second in [`Micros`].
pub const SECOND: Micros = 1_000_000;

/// Everything that was recorded. The order within each list does not matter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// What was run, and how long the invariants may take to hold.
    pub header: Header,
    /// What clients sent.
    pub requests: Vec<Request>,
    /// What agents ran.
    pub runs: Vec<Run>,
    /// Which agent was present where.
    pub presences: Vec<Presence>,
    /// When each process of a replica lived.
    pub lives: Vec<Life>,
    /// What replicas believed.
    pub views: Vec<View>,
    /// Moments at which nothing had changed for long enough that all views must be equal.
    pub truths: Vec<Truth>,
    /// What the nemesis did.
    pub faults: Vec<Fault>,
    /// Sizes that must stay below a cap.
    pub gauges: Vec<Gauge>,
    /// Sizes that must return to what they were.
    pub recoveries: Vec<Recovery>,
    /// Metrics of a replica beside what is true.
    pub metrics: Vec<Metric>,
    /// Lines of audit logs.
    pub audits: Vec<Audit>,
    /// Places that were searched for credentials.
    pub searches: Vec<Search>,
    /// What planners wrote to clusters.
    pub planned: Vec<Planned>,
    /// The rows of views, beside those of API servers.
    pub rows: Vec<Rows>,
    /// Webhooks that were sent.
    pub hooks: Vec<Hook>,
    /// Webhooks that receivers got.
    pub deliveries: Vec<Delivery>,
    /// Webhooks that kas had at the end.
    pub kept: Vec<Kept>,
}

/// What was run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The scenario, such as `S02`.
    pub scenario: String,
    /// What repeats the run.
    pub seed: u64,
    /// The commit of the programs.
    pub commit: String,
    /// When recording ended. A request whose deadline is later is not judged if it is still open.
    pub end: Micros,
    /// Whether `runs` contains every run of every agent. Without that, a response without a run is no breach.
    pub runs_complete: bool,
    /// Times within which the invariants must hold.
    pub bounds: Bounds,
}

/// Times within which the invariants must hold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bounds {
    /// I2: how long after its deadline a request may end.
    pub late: Micros,
    /// I8: how long a view may hold an agent that is gone, or a replica that is dead.
    pub stale: Micros,
    /// How long before its recorded start and end an agent may already be present (I8) and absent (I9): they
    /// are recorded later than replicas know of them.
    pub early: Micros,
    /// I8: the same while the owner cannot be reached by the observer, or one of them is paused.
    pub stale_unreachable: Micros,
    /// I9: how long a view may miss an agent that is present on a live, reachable replica.
    pub missing: Micros,
    /// I11: how long after a credential became invalid it may still be accepted.
    pub revoke: Micros,
    /// I14: how long after its cancellation a request may still reach an agent that was just chosen for it.
    pub cancel: Micros,
    /// I20: how long after the end of the rule that allowed it something may run.
    pub expire: Micros,
    /// I10: how far from its first value a size may be after recovery, as a share.
    pub recovery: f64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            late: SECOND,
            stale: 10 * SECOND,
            early: SECOND,
            stale_unreachable: 60 * SECOND,
            missing: 5 * SECOND,
            revoke: 90 * SECOND,
            cancel: SECOND,
            expire: 5 * SECOND,
            recovery: 0.05,
        }
    }
}

/// What kind of request it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A gRPC request with one message and one response.
    Unary,
    /// A gRPC stream.
    Stream,
    /// An HTTP request through the Kubernetes endpoint.
    Http,
    /// A watch through the Kubernetes endpoint.
    Watch,
    /// An upgraded connection: exec, attach, port-forward.
    Upgrade,
    /// A request for an agent that is not there yet.
    Waiter,
}

/// How a request, or one attempt of it, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// With the whole response of the agent.
    Ok,
    /// With an error of the application behind the agent: also a whole response.
    Error,
    /// It certainly never reached an agent.
    NotStarted,
    /// It may have run.
    Unknown,
    /// Credential, rule or limit refused it, before it reached an agent.
    Refused,
    /// The client gave it up.
    Cancelled,
}

impl Outcome {
    /// Whether the request certainly never ran, so that it may be tried again.
    #[must_use]
    pub fn certainly_not_run(self) -> bool {
        matches!(self, Self::NotStarted | Self::Refused)
    }

    /// The outcome in words.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::NotStarted => "not started",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
        }
    }
}

/// One request of a client.
///
/// A client that repeats a request although it may have run gives the repetition its own id and names the
/// first one in `retry_of`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Unique in the history, and told to the agent.
    pub id: u64,
    /// The agent it is for.
    pub agent: i64,
    /// What kind it is.
    pub kind: Kind,
    /// When the client began.
    pub begun: Micros,
    /// When it must have ended; `None` for those that may stay open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Micros>,
    /// Steps on its way (`sent`, `waiting`, `headers`, `first byte`), in the order of their times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<(String, Micros)>,
    /// Where it was tried, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Micros>,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// The message of a failure.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// The connection of the agent that served it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<i64>,
    /// The replicas it passed, from the client to the agent, if the replicas told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<String>,
    /// What the client sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent: Option<Bytes>,
    /// What the client received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<Bytes>,
    /// The request that this one repeats although that may have run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_of: Option<u64>,
    /// Since when the client's credential was not valid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_since: Option<Micros>,
    /// When the rule that allowed the request ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_until: Option<Micros>,
}

impl Request {
    /// Returns a request that has just begun.
    #[must_use]
    pub fn new(id: u64, agent: i64, kind: Kind, begun: Micros) -> Self {
        Self {
            id,
            agent,
            kind,
            begun,
            deadline: None,
            phases: Vec::new(),
            attempts: Vec::new(),
            ended: None,
            outcome: None,
            detail: String::new(),
            connection: None,
            path: Vec::new(),
            sent: None,
            received: None,
            retry_of: None,
            invalid_since: None,
            allowed_until: None,
        }
    }

    /// Returns the request with its end.
    #[must_use]
    pub fn ended(mut self, at: Micros, outcome: Outcome) -> Self {
        (self.ended, self.outcome) = (Some(at), Some(outcome));
        self
    }
}

/// One attempt of a request, at one replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// The replica that was asked.
    pub replica: String,
    /// When it began.
    pub begun: Micros,
    /// When it ended.
    pub ended: Micros,
    /// How it ended.
    pub outcome: Outcome,
}

/// Bytes that one side sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// How many.
    pub count: u64,
    /// A hash of them, the same function on both sides.
    pub hash: u64,
    /// Whether they ended cleanly, as opposed to a reset.
    pub clean: bool,
    /// Where the first byte was that differed from what was expected, if the receiver knows what to expect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wrong_at: Option<u64>,
}

/// A request that reached a handler of an agent, as the agent recorded it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The id that the agent was told.
    pub request: u64,
    /// The agent that ran it.
    pub agent: i64,
    /// The connection it came through, if the agent knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<i64>,
    /// The replica it came from, if the agent knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<String>,
    /// When it started.
    pub started: Micros,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Micros>,
    /// What the agent received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<Bytes>,
    /// What the agent sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent: Option<Bytes>,
}

impl Run {
    /// Returns a run that has just started.
    #[must_use]
    pub fn new(request: u64, agent: i64, started: Micros) -> Self {
        Self {
            request,
            agent,
            connection: None,
            replica: None,
            started,
            ended: None,
            received: None,
            sent: None,
        }
    }
}

/// A time in which an agent had a tunnel on a replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Presence {
    /// The agent.
    pub agent: i64,
    /// The replica; empty if it is not known, so that views are not compared with this.
    pub replica: String,
    /// The connection, authenticated as `agent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<i64>,
    /// When it was certainly there.
    pub from: Micros,
    /// When it was certainly gone; `None`: still there when recording ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Micros>,
    /// Since when the agent's credential was not valid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_since: Option<Micros>,
}

/// A process of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// The replica.
    pub replica: String,
    /// Grows with each process of the replica; `None` if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// Those that it took later, each above the one before: its gossip starts anew when others know a higher
    /// one of the same replica, as after its clock was set back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later: Vec<u64>,
    /// When it was ready.
    pub from: Micros,
    /// When it ended; `None`: it lived when recording ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Micros>,
    /// Whether it was killed, so that it could not finish anything.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub killed: bool,
}

impl Life {
    /// Whether the process ever had this epoch.
    pub fn had(&self, epoch: u64) -> bool {
        self.epoch == Some(epoch) || self.later.contains(&epoch)
    }
}

/// The state of the table of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Grows with each process of the replica; `None` if the observer does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// Grows with each change within an epoch; `None` if the observer does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
}

/// What one replica believed. Each look from `at` to `until` saw the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// The replica that was asked.
    pub observer: String,
    /// Which process of it: versions are compared within one process only.
    pub process: u64,
    /// The first look.
    pub at: Micros,
    /// The last look.
    pub until: Micros,
    /// The replicas that it takes for alive, with the state of their tables. It may contain itself.
    pub live: BTreeMap<String, Version>,
    /// The replicas that hold each agent. `None`: not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents: Option<BTreeMap<i64, BTreeSet<String>>>,
    /// The connections of each agent. `None`: not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<BTreeMap<i64, BTreeSet<i64>>>,
}

/// What is true at a moment at which all views must agree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Truth {
    /// The moment. The last view of each live replica that began before it is compared.
    pub at: Micros,
    /// The replicas that live.
    pub live: BTreeSet<String>,
    /// The replicas that hold each agent. `None`: not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents: Option<BTreeMap<i64, BTreeSet<String>>>,
    /// The connections of each agent. `None`: not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<BTreeMap<i64, BTreeSet<i64>>>,
}

/// Something that the nemesis did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// When it began.
    pub from: Micros,
    /// When it ended; `None`: it lasted until the end. Equal to `from` for a moment, such as a signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Micros>,
    /// What it was, in words.
    pub what: String,
    /// What it did to replicas.
    #[serde(default)]
    pub effect: Effect,
}

/// What a fault means for invariants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Nothing that would excuse a view.
    #[default]
    None,
    /// The replicas are killed, paused or starved.
    Disabled(BTreeSet<String>),
    /// Messages between these pairs are lost, in the direction given, at least in part.
    Cut(BTreeSet<(String, String)>),
    /// Connections between these pairs deliver late: of replicas, or of an agent (`agent 7`) and a replica.
    /// It excuses no view.
    Slow(BTreeSet<(String, String)>),
    /// All replicas are affected: a broken Redis, for example.
    All,
}

/// A size at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gauge {
    /// When it was read.
    pub at: Micros,
    /// The process.
    pub process: String,
    /// What is counted.
    pub name: String,
    /// How many.
    pub value: f64,
    /// The largest value that is allowed.
    pub cap: f64,
}

/// A size before a fault, and after recovery.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// The process.
    pub process: String,
    /// What is counted.
    pub name: String,
    /// Before.
    pub before: f64,
    /// After.
    pub after: f64,
    /// A difference that does not count, in the same unit: the resolution of the measurement.
    pub slack: f64,
}

/// A metric beside what is true, when nothing changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// When it was read.
    pub at: Micros,
    /// The replica.
    pub replica: String,
    /// Its name.
    pub name: String,
    /// What the replica says.
    pub value: f64,
    /// What is true.
    pub truth: f64,
}

/// A line of an audit log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// The request.
    pub request: u64,
    /// The replica that wrote it.
    pub replica: String,
    /// Whether it is the record of the end; otherwise of the start.
    pub end: bool,
}

/// A place that was searched for credentials.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Search {
    /// What was searched.
    pub place: String,
    /// How many bytes.
    pub bytes: u64,
    /// What was found, without the credential itself.
    pub found: Vec<String>,
}

/// What planners wrote to a cluster, judged by a rule from outside: by the audit log of its API server and
/// the commits of the repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// The rule.
    pub rule: String,
    /// How many writes were judged.
    pub checked: u64,
    /// Those that break it, in words.
    pub wrong: Vec<String>,
}

impl History {
    /// Returns a number that is equal for equal histories: FNV-1a of the JSON lines.
    ///
    /// # Errors
    /// A value that JSON cannot express, which no type here has.
    pub fn digest(&self) -> Result<u64, Error> {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        write(self, &mut hash)?;
        Ok(hash.0)
    }
}

/// FNV-1a, 64 bits.
struct Fnv(u64);

impl std::io::Write for Fnv {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
