//! Times and rates that a scenario measured, beside their targets.

use serde::{Deserialize, Serialize};

/// Whether smaller or larger values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Better {
    Smaller,
    Larger,
}

/// The unit of times, milliseconds. How long something takes depends on the machine and on the build, other
/// than what is counted.
pub(crate) const TIME: &str = "ms";

/// Without gates, a time fails only beyond this many times its gate: programs without optimizations, on a
/// machine that does other work too, are slow, but what takes longer hangs.
const SLACK: f64 = 10.0;
/// The least limit of times without gates, in milliseconds.
const LEAST: f64 = 5_000.0;

/// One measured quantity.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// Its symbol in chaos.md: `T_kill`.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    /// What is to be published.
    pub(crate) target: f64,
    /// What fails a run.
    pub(crate) gate: f64,
    /// What others publish.
    pub(crate) reference: &'static str,
    /// From when to when.
    pub(crate) how: &'static str,
    /// Each value.
    pub(crate) values: Vec<f64>,
}

impl Measured {
    /// Returns a quantity without values.
    pub(crate) fn new(row: &Row) -> Self {
        let Row { name, unit, better, target, gate, reference, how } = *row;
        Self { name, unit, better, target, gate, reference, how, values: Vec::new() }
    }

    /// Returns the value below which a share of the values is; `None`: there are none.
    pub(crate) fn at(&self, share: f64) -> Option<f64> {
        percentile(&self.values, share)
    }

    /// The value that is judged: the 99th percentile, or the worst of what should be large.
    pub(crate) fn judged(&self) -> Option<f64> {
        match self.better {
            Better::Smaller => self.at(0.99),
            Better::Larger => self.at(0.0),
        }
    }

    fn within(&self, limit: f64) -> bool {
        self.judged().is_some_and(|value| match self.better {
            Better::Smaller => value <= limit,
            Better::Larger => value >= limit,
        })
    }

    /// Whether it was measured, and keeps the gate. `no_gates`: a time has [`SLACK`].
    pub(crate) fn passes(&self, no_gates: bool) -> bool {
        if no_gates && self.unit == TIME {
            return match self.better {
                Better::Smaller => self.within((self.gate * SLACK).max(LEAST)),
                Better::Larger => !self.values.is_empty(),
            };
        }
        self.within(self.gate)
    }
}

/// Returns the value below which a share of the values is; `None`: there are none.
pub(crate) fn percentile(values: &[f64], share: f64) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index of a few values"
    )]
    let index = ((values.len() as f64 * share).ceil() as usize).clamp(1, values.len().max(1)) - 1;
    values.get(index).copied()
}

/// A row of the table of targets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) target: f64,
    pub(crate) gate: f64,
    pub(crate) reference: &'static str,
    pub(crate) how: &'static str,
}

const fn times(
    name: &'static str,
    target: f64,
    gate: f64,
    reference: &'static str,
    how: &'static str,
) -> Row {
    Row { name, unit: TIME, better: Better::Smaller, target, gate, reference, how }
}

const fn counts(name: &'static str, unit: &'static str, limit: f64, how: &'static str) -> Row {
    Row { name, unit, better: Better::Smaller, target: limit, gate: limit, reference: "", how }
}

const fn share(name: &'static str, target: f64, gate: f64, how: &'static str) -> Row {
    Row { name, unit: "%", better: Better::Larger, target, gate, reference: "", how }
}

/// SIGKILL of a replica to the first list of each survivor without it.
pub(crate) const T_KILL: Row = times(
    "T_kill",
    100.0,
    500.0,
    "kas 5 min; Akka 25 to 45 s; Phoenix, konnectivity 30 s; memberlist 5 s; Restate 1 s",
    "SIGKILL to the first look, each 50 ms, at a survivor's list of replicas that has it neither live nor suspect",
);
/// The same with Redis: the key of a replica lives for two seconds in these runs.
pub(crate) const T_KILL_REDIS: Row = times(
    "T_kill with Redis",
    3_000.0,
    5_000.0,
    "kas 5 min",
    "SIGKILL to the first look, each 50 ms, at a survivor's list of replicas without it; table.ttl is 2 s",
);
pub(crate) const T_PURGE: Row = times(
    "T_purge",
    5_000.0,
    10_000.0,
    "kas 5 min",
    "SIGKILL to the first look, each 0.5 to 1 s, at a survivor's agents without it",
);
pub(crate) const T_FAILOVER: Row = times(
    "T_failover",
    500.0,
    2_000.0,
    "kas 10.4 to 12.2 s; remotedialer 5.05 s; konnectivity 0.03 to 0.58 s",
    "SIGKILL to the end of the first response (of 20 ms of work) to an agent whose only connection it was, asked at once",
);
pub(crate) const T_FAILOVER_2C: Row = times(
    "T_failover_2c",
    150.0,
    1_000.0,
    "Teleport advises more than one connection",
    "SIGKILL to the end of the first response (of 20 ms of work) to an agent with a second connection, asked at once",
);
/// SIGKILL of a planner to the objects of the next commit.
pub(crate) const T_SYNC: Row = times(
    "T_sync",
    5_000.0,
    15_000.0,
    "controllers that are elected by a Lease: 15 s until it ends",
    "SIGKILL of the home to the first look, each 100 ms, at which the cluster has exactly the objects of a commit pushed at once after that",
);
/// How long a planner that was replaced goes on with an older commit.
pub(crate) const T_STALE: Row = times(
    "T_stale",
    12_000.0,
    15_000.0,
    "",
    "the first apply of a newer commit by another planner to the arrival of each apply of an older one, by the API server's clock; 0: none came. A fence is written each 10 s, and holds for 12 s",
);
/// SIGKILL of the replica of a viewer to rows through another one.
pub(crate) const T_VIEW: Row = times(
    "T_view",
    1_000.0,
    5_000.0,
    "",
    "SIGKILL of the replica that clients watch a view through to the first row of each through another one, asked at once",
);
/// The end of a fault to live rows.
pub(crate) const T_LIVE: Row = times(
    "T_live",
    10_000.0,
    35_000.0,
    "",
    "the API server can be reached again to the first look, each 50 ms, at which all viewers are told that rows are live; a watch that broke is tried again after 1 s, doubled up to 30 s",
);
/// How long a question over all agents took while some of them hang.
pub(crate) const T_ASK: Row = times(
    "T_ask",
    500.0,
    2_000.0,
    "",
    "a PromQL question over all agents to its answer, less prometheus.timeout, which hanging agents use up",
);
pub(crate) const T_ASK_VIEW: Row = times(
    "T_ask of a view",
    31_000.0,
    33_000.0,
    "",
    "a question for a view of all agents, whose rows nobody had, to its end; agents that have not answered within 30 s are not waited for",
);
pub(crate) const ASKED_WRONG: Row = counts(
    "wrong answers",
    "questions",
    0.0,
    "PromQL questions over all agents without an answer, with another value than that of the agents that answer, or with other gaps than those that hang",
);
/// SIGKILL of the home of a hook to its delivery by another replica.
pub(crate) const T_HOOK: Row = times(
    "T_hook",
    1_000.0,
    5_000.0,
    "",
    "SIGKILL of the home that delivers a hook to the first look, each 50 ms, at which its new home has delivered it",
);
pub(crate) const T_STORM: Row = times(
    "T_storm",
    10_000.0,
    30_000.0,
    "Teleport warns of thundering herd",
    "SIGKILL to the first response of each agent that was there, asked at once; the target is for 10,000 agents in all, S31 has 300 or as many as --agents says",
);
pub(crate) const T_BLACKHOLE: Row = times(
    "T_blackhole",
    2_000.0,
    3_000.0,
    "as T_kill",
    "all packets to the other replicas dropped to the first look, each 500 ms, at which they do not trust it (gone or suspect)",
);
pub(crate) const T_HEAL: Row = times(
    "T_heal",
    2_000.0,
    5_000.0,
    "Akka tests 45 to 60 s",
    "the network heals to equal views of all replicas, seen each 500 ms",
);
pub(crate) const T_RESUME: Row = times(
    "T_resume",
    1_000.0,
    1_000.0,
    "etcd 20418: stale reads after a pause",
    "SIGCONT to the first look, each 500 ms, at which each other replica trusts it",
);
pub(crate) const T_RESUME_REDIS: Row = times(
    "T_resume with Redis",
    2_000.0,
    5_000.0,
    "etcd 20418: stale reads after a pause",
    "SIGCONT to the first look, each 500 ms, at which each other replica trusts it",
);
pub(crate) const T_REDIS: Row = times(
    "T_redis",
    2_000.0,
    5_000.0,
    "kas: up to 4 min, its refresh",
    "Redis serves again, empty or not, to equal views of all replicas, seen each 500 ms",
);
pub(crate) const T_FAILOVER_REDIS: Row = times(
    "T_failover of Redis",
    8_000.0,
    15_000.0,
    "Sentinel's own share: 1 s of silence, and its election",
    "SIGKILL of the primary to equal views of all replicas through the new one, seen each 500 ms",
);
pub(crate) const T_IDENTITY: Row = times(
    "T_identity",
    15_000.0,
    35_000.0,
    "kas 1 min: its cache of errors",
    "GitLab answers again to the first look, each 500 ms, at which every agent that it was not asked about is there",
);
pub(crate) const T_REVOKE: Row = times(
    "T_revoke",
    1_000.0,
    5_000.0,
    "kas 5 min",
    "the token is removed from the files to the first look, each 100 ms, at each replica without its agents",
);
pub(crate) const T_HALFOPEN: Row = times(
    "T_halfopen",
    30_000.0,
    35_000.0,
    "kas about 70 s; remotedialer 60 s; konnectivity 1 h",
    "all packets of an agent dropped to the first look, each 500 ms, at its replica without it",
);
pub(crate) const T_UNBLOCK_LOCAL: Row = times(
    "T_unblock_local",
    2.0,
    20.0,
    "kas polls up to 1 s",
    "the agent sees its first tunnel to the start of a request that waited on the same replica",
);
pub(crate) const T_UNBLOCK_REMOTE: Row = times(
    "T_unblock_remote",
    30.0,
    150.0,
    "kas polls up to 1 s",
    "the agent sees its first tunnel to the start of a request that waited on another replica",
);
/// Of requests that did not wait alone.
pub(crate) const T_UNBLOCK_EACH: Row = times(
    "T_unblock of 1,000",
    1_000.0,
    5_000.0,
    "",
    "the agent sees its first tunnel to the start of each of 1,000 requests that waited for 40 agents; an agent opens more tunnels when all are busy",
);
/// What a client is told of an agent that cannot be reached from there.
pub(crate) const T_REFUSE: Row = times(
    "T_refuse",
    2_500.0,
    3_000.0,
    "",
    "an attempt at a replica from which no replica that holds the agent can be reached, begun while the network was cut, to its end; its deadline, and limits.find_timeout for what has none, are 2 s in these runs",
);
pub(crate) const T_DRAIN: Row = times(
    "T_drain",
    30_000.0,
    30_000.0,
    "NATS 10 s + 2 min",
    "SIGTERM to the exit of a replica with upgraded connections, without the part of their grace that is longer than drain.timeout",
);
/// What must be 0, and may be a little more on a busy machine.
pub(crate) const DRAIN_BOUND: Row = times(
    "exit after its bound",
    0.0,
    2_000.0,
    "",
    "how much later than drain.delay + drain.timeout a replica exits, or + drain.upgrade_grace where an upgraded connection is open, if that is longer",
);
pub(crate) const FAILED_STREAMS: Row =
    counts("failed streams", "streams", 0.0, "gRPC streams of 2 s that were cut");
pub(crate) const EARLY_EXECS: Row = counts(
    "upgraded connections ended early",
    "connections",
    0.0,
    "upgraded connections that ended before their replica's grace was over",
);
pub(crate) const RUDE_EXECS: Row = counts(
    "upgraded connections ended otherwise",
    "connections",
    0.0,
    "upgraded connections that ended with neither Close 1001 (WebSocket) nor a reset (SPDY)",
);
pub(crate) const EXEC_LIVED: Row = Row {
    name: "T_grace",
    unit: TIME,
    better: Better::Larger,
    target: -100.0,
    gate: -100.0,
    reference: "",
    how: "SIGTERM to the end of an upgraded connection, less drain.delay + drain.upgrade_grace; clocks and timers differ by up to 100 ms",
};
/// The share of requests that succeeded, with the retry of what was not started.
pub(crate) const SUCCESS: Row = share(
    "success",
    99.95,
    99.9,
    "requests with a response; one that certainly did not run is tried once more elsewhere",
);
pub(crate) const SUCCESS_ALL: Row =
    share("success of all", 100.0, 100.0, "requests with a response; nothing may fail");
pub(crate) const SUCCESS_IDEMPOTENT: Row =
    share("success with idempotent retry", 100.0, 100.0, "the same; what may have run is repeated, too");
pub(crate) const SUCCESS_2C: Row =
    share("success, two connections", 99.95, 99.9, "the same, of agents with two connections");
pub(crate) const NOT_UNKNOWN: Row = counts(
    "failures other than unknown",
    "requests",
    0.0,
    "requests that failed, and not because they had been started on what was struck",
);
/// Both sides of a cut network serve what they have.
pub(crate) const OWN_FAILED: Row = counts(
    "failures at the own replica",
    "requests",
    0.0,
    "attempts at a replica that held the agent, begun while the network was cut, without a response",
);
pub(crate) const ACROSS_WRONG: Row = counts(
    "wrong ends across a cut",
    "requests",
    0.0,
    "attempts at a replica from which no replica that holds the agent can be reached, begun while the network was cut, that did not end as not started",
);
pub(crate) const FLAPS: Row = counts(
    "route changes",
    "changes/s",
    1.0,
    "how often in a second a replica trusts another one, or not any more, or sees other agents there: of the pair that changes most, while a link is down and up each second",
);
/// False deaths under a fault that lasts long enough for a rare one to show.
pub(crate) const FP_IDLE: Row = counts(
    "FP_idle",
    "false deaths",
    0.0,
    "replicas that live and leave the list of another one, in 10 min (quick: 60 s) without load or fault",
);
pub(crate) const FP_CPU: Row = counts(
    "FP_cpu",
    "false deaths",
    0.0,
    "the same in 10 min (quick: 60 s) with four busy processes per core, then with a part of a core for one replica, then with a worker thread of one that stands still for 2 s",
);
pub(crate) const FP_LOSS: Row = Row {
    reference: "chitchat: 0 in 30 s at 50 %, 10 nodes",
    ..counts(
        "FP_loss",
        "false deaths",
        0.0,
        "the same in 10 min (quick: 60 s) with 30 % of UDP lost, 20 % doubled, and all of it late",
    )
};
/// What a sender without the key can make a replica do.
pub(crate) const FORGED_COST: Row = Row {
    name: "CPU of a forged datagram",
    unit: "us",
    better: Better::Smaller,
    target: 10.0,
    gate: 250.0,
    reference: "",
    how: "time of processors that all replicas used while they dropped forged datagrams, less what they use at rest, by the number of those that they counted: with the kernel's part of receiving them",
};
/// A replica that reads slowly does not get every change one by one.
pub(crate) const RESYNCED: Row = Row {
    name: "snapshots to a slow replica",
    unit: "snapshots",
    better: Better::Larger,
    target: 1.0,
    gate: 1.0,
    reference: "",
    how: "looks at which its copy of a table is further, since the look before, than a stream that begins again makes up for: 4,096 changes, and a quarter of the agents",
};
pub(crate) const FALSE_DEATHS: Row =
    counts("false deaths", "replicas", 0.0, "replicas that live and leave the list of another one");
pub(crate) const UNCLEAN_WATCHES: Row =
    counts("unclean watches", "watches", 0.0, "watches that did not end in order when their replica left");
pub(crate) const TWICE: Row =
    counts("waiters not released", "requests", 0.0, "requests that waited and did not get a response");
pub(crate) const FAILED: Row = counts(
    "failures",
    "requests",
    0.0,
    "requests that were begun in a phase in which none may fail, and failed",
);
pub(crate) const WRONG_END: Row = counts(
    "wrong ends",
    "requests",
    0.0,
    "requests that were cut after their start and did not end as unknown, or not within 2 s (S22: the gate of T_halfopen)",
);
pub(crate) const RESURRECTED: Row = counts(
    "resurrections",
    "views",
    0.0,
    "views of survivors that have a dead process again after they had dropped it",
);
pub(crate) const T_PROP: Row = times(
    "T_prop",
    25.0,
    100.0,
    "Redis poll 50 ms to 1 s; chitchat p50 518 ms; Serf 1.6 s",
    "an agent's last move to the first look at which each other replica has it there and nowhere else",
);
pub(crate) const T_RECOVER: Row = times(
    "T_recover",
    1_000.0,
    5_000.0,
    "",
    "the resource is there again to the first answer on a new connection",
);
/// What no scenario may have, whatever was struck.
pub(crate) const UNTOLD: Row = counts(
    "failures that say nothing",
    "requests",
    0.0,
    "requests that failed neither as unknown nor as not started",
);
/// As [`UNTOLD`].
pub(crate) const CALM_FAILED: Row = counts(
    "failures without a fault",
    "requests",
    0.0,
    "requests that failed, or got no answer, and of whose time no part was within 10 s after a fault or in one",
);
/// At the end of every scenario.
pub(crate) const DISAGREED: Row = counts(
    "agents that disagree",
    "agents",
    0.0,
    "agents that serve another number of replicas, as they know, than hold them, as the replicas know, 40 s after the last fault",
);
/// How much slower the load was under a fault, by the 99th percentile.
pub(crate) const SLOWER: Row = Row {
    name: "p99 under abuse / before",
    unit: "",
    better: Better::Smaller,
    target: 2.0,
    gate: 8.0,
    reference: "",
    how: "99th percentile of the times of the load; the attackers run on the same two cores",
};

pub(crate) const IDLED: Row =
    counts("connections closed as idle", "connections", 0.0, "what a balancer with a timer of 60 s closed");
pub(crate) const STRANGERS: Row = counts(
    "strangers",
    "views",
    0.0,
    "views that have a replica of another cluster, or one that does not know the secret, or the reverse",
);
pub(crate) const LET_IN: Row = counts(
    "let in unverified",
    "agents",
    0.0,
    "agents with a tunnel although their token could not be verified, or was revoked",
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_limits() {
        let mut kill = Measured::new(&T_KILL);
        assert!(!kill.passes(false), "what was not measured does not pass");
        kill.values = (1..=100).map(f64::from).collect();
        assert_eq!((kill.at(0.5), kill.at(0.99), kill.at(1.0)), (Some(50.0), Some(99.0), Some(100.0)));
        assert!(kill.passes(false));
        kill.values.extend([600.0, 600.0]);
        assert!(!kill.passes(false));
        assert!(kill.passes(true), "a time, without gates");
        kill.values.extend([6_000.0, 6_000.0]);
        assert!(!kill.passes(true), "something hangs");
        let mut success = Measured::new(&SUCCESS);
        success.values = vec![100.0, 99.92];
        assert!(success.passes(false));
        success.values.push(99.8);
        assert!(!success.passes(false), "the worst share counts");
        assert!(!success.passes(true), "a share is no time");
    }
}
