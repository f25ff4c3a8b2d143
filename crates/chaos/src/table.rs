//! The table of scenarios: what each does and asserts, what it needs, and why some do not run here.
//!
//! xtask includes this file, so that `--list` answers before anything is built: it uses no crate of ours.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

/// How replicas find out which of them holds an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tracker {
    /// Gossip over UDP, and streams of tables.
    Gossip,
    /// A Redis that they share.
    Redis,
}

impl Tracker {
    /// Both.
    pub(crate) const ALL: &[Self] = &[Self::Gossip, Self::Redis];

    /// As in the configuration of kas.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Gossip => "gossip",
            Self::Redis => "redis",
        }
    }
}

impl std::str::FromStr for Tracker {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|tracker| tracker.as_str() == text);
        found.copied().ok_or_else(|| "a tracker is gossip or redis".to_owned())
    }
}

/// What a scenario needs of the machine, beside what every one needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A program, and the package of Debian that has it.
    Program(&'static str, &'static str),
    /// A library that steps the wall clock of a process.
    Faketime,
    /// Control groups of version 1, for processor and memory, and to stop single threads.
    Groups,
    /// A real Kubernetes API server, or Go, which builds it.
    ApiServer,
}

const TC: Need = Need::Program("tc", "iproute2");
const IPTABLES: Need = Need::Program("iptables", "iptables");
/// What scenarios of a real cluster need.
const CLUSTER: &[Need] = &[Need::ApiServer];
/// What scenarios of planners need.
const PLANNER: &[Need] = &[Need::ApiServer, Need::Program("git", "git")];

impl Need {
    /// Returns what this machine lacks.
    fn missing(self) -> Option<String> {
        match self {
            Self::Program(program, package) => (!installed(program))
                .then(|| format!("{program} is not installed: on Debian, apt-get install {package}")),
            Self::Faketime => faketime()
                .is_none()
                .then(|| "libfaketime is not installed: on Debian, apt-get install faketime".to_owned()),
            Self::Groups => ["cpu", "memory", "freezer"]
                .into_iter()
                .find(|kind| !Path::new(GROUPS).join(kind).join("cgroup.procs").is_file())
                .map(|kind| format!("there is no control group of version 1 for {kind} at {GROUPS}/{kind}")),
            Self::ApiServer => api_server(std::env::var_os(ASSETS).map(PathBuf::from), installed("go")),
        }
    }
}

/// Why there is no API server. `assets`: the folder that the environment names. `go`: whether Go can build
/// it.
fn api_server(assets: Option<PathBuf>, go: bool) -> Option<String> {
    match assets.filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => ["etcd", "kube-apiserver"]
            .into_iter()
            .find(|program| !folder.join(program).is_file())
            .map(|program| format!("{ASSETS} names a folder without {program}: {}", folder.display())),
        None => (!go).then(|| {
            format!("there is no kube-apiserver: let {ASSETS} name a folder with it and etcd, or install Go, which builds both")
        }),
    }
}

/// Names the folder with etcd and kube-apiserver.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// Where control groups are mounted.
pub(crate) const GROUPS: &str = "/sys/fs/cgroup";
/// Where Debian and others have the library that steps clocks, for programs with threads.
const FAKETIME: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
];

/// Returns where that library is.
pub(crate) fn faketime() -> Option<&'static str> {
    FAKETIME.into_iter().find(|place| Path::new(place).is_file())
}

/// A row of the table of scenarios.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) id: &'static str,
    /// The fault.
    pub(crate) what: &'static str,
    /// What is asserted besides the invariants.
    pub(crate) asserted: &'static str,
    /// Whether it is in the quick set.
    pub(crate) quick: bool,
    /// Whether it takes longer than all others, and runs only when it is asked for.
    pub(crate) slow: bool,
    /// The trackers that it makes sense with.
    pub(crate) trackers: &'static [Tracker],
    /// Whether it needs two builds.
    pub(crate) two_builds: bool,
    pub(crate) needs: &'static [Need],
    /// Why it does not run as real processes, and where it is covered instead.
    pub(crate) elsewhere: Option<&'static str>,
}

impl Scenario {
    /// Of the network between replicas, or of gossip: with Redis there is nothing to strike.
    const fn gossip(self) -> Self {
        Self { trackers: &[Tracker::Gossip], ..self }
    }

    const fn redis(self) -> Self {
        Self { trackers: &[Tracker::Redis], ..self }
    }

    const fn two_builds(self) -> Self {
        Self { two_builds: true, ..self }
    }

    const fn slow(self) -> Self {
        Self { slow: true, ..self }
    }

    const fn needs(self, needs: &'static [Need]) -> Self {
        Self { needs, ..self }
    }

    /// What its results are called: each tracker has its own.
    pub(crate) fn name(&self, tracker: Tracker) -> String {
        if self.trackers.first() == Some(&tracker) {
            self.id.to_owned()
        } else {
            format!("{}-{}", self.id, tracker.as_str())
        }
    }

    /// Why it does not run on this machine with this tracker; `None`: it runs. `other`: there are programs of
    /// another build.
    pub(crate) fn missing(&self, tracker: Tracker, other: bool) -> Option<String> {
        if let Some(why) = self.elsewhere {
            return Some(why.to_owned());
        }
        if !self.trackers.contains(&tracker) {
            let others: Vec<&str> = self.trackers.iter().map(|tracker| tracker.as_str()).collect();
            return Some(format!("it is about --tracker {}", others.join(" and ")));
        }
        if self.two_builds && !other {
            return Some("it needs a build that writes records of other versions, which cargo xtask chaos makes, or --other-programs".to_owned());
        }
        missing(tracker).or_else(|| self.needs.iter().find_map(|need| need.missing()))
    }
}

const fn row(id: &'static str, what: &'static str, asserted: &'static str, quick: bool) -> Scenario {
    let trackers = Tracker::ALL;
    let (slow, two_builds, needs, elsewhere) = (false, false, &[], None);
    Scenario { id, what, asserted, quick, slow, trackers, two_builds, needs, elsewhere }
}

const fn not_here(id: &'static str, what: &'static str, why: &'static str) -> Scenario {
    Scenario { elsewhere: Some(why), ..row(id, what, "", false) }
}

/// Every scenario, in order.
pub(crate) const ALL: &[Scenario] = &[
    row("S00", "no fault at all, and no load, for 10 min (quick: 60 s)", "FP_idle", false),
    row("S01", "SIGKILL one of three replicas, idle", "T_kill, T_purge", false),
    row(
        "S02",
        "SIGKILL one of three replicas every 30 s (quick: 10 s) under 200 requests/s to agents with one connection, 40 to agents with two",
        "success, T_kill, T_purge, T_failover, T_failover_2c; failures are unknown only",
        true,
    ),
    row(
        "S03",
        "SIGKILL the replicas that route, all agents on the third",
        "no request through another replica fails",
        false,
    ),
    row(
        "S04",
        "SIGKILL of the owner in each phase that both ends can see: mid-request, after start, mid-response, before the end (before start: tests/tests/cluster/crashes.rs and crates/sim/src/nemesis.rs)",
        "each ends as unknown within 2 s; no truncated end is clean",
        false,
    ),
    row("S05", "SIGKILL two of three replicas", "the last one serves; T_failover", false),
    row("S06", "SIGKILL all replicas, staggered restart", "agents return; no state on disk is needed", false),
    row(
        "S07",
        "one replica is killed every 2 s",
        "versions do not go back, nothing is resurrected; failures are unknown only",
        false,
    ),
    row(
        "S08",
        "SIGSTOP for 0.5, 5 and 60 s (quick: 0.5 and 5 s)",
        "0.5 s: no death; else back within 1 s, and no request fails from then on; full form: sizes return to within 5 %",
        true,
    ),
    row(
        "S09",
        "20 rolling restarts (--restarts; quick: 1) of all replicas under load with streams, watches and upgraded connections, two connections per agent",
        "0 failed requests, T_drain, watches end in order, upgraded connections live to their grace",
        true,
    ),
    row(
        "S09G",
        "one restart with the default grace of 10 minutes under upgraded connections",
        "as S09; the exit waits for the grace",
        false,
    )
    .slow(),
    row(
        "S10",
        "one pair of replicas is cut, both see the third",
        "no false death; each replica serves its own agents; failures are unknown only; T_heal",
        true,
    ),
    row(
        "S11",
        "one replica is isolated from the others, not from agents and clients",
        "each replica serves its own agents, all of them; what would have to cross ends as not started: T_refuse; clients that try all replicas see unknown failures only; T_heal",
        true,
    ).gossip(),
    row(
        "S12",
        "one replica hears no UDP, then nothing, and the others hear it",
        "it stays ready; each replica serves its own agents, all of them; what would have to cross ends as not started: T_refuse; no false death; clients that try all replicas see unknown failures only; T_heal",
        false,
    ).gossip(),
    row("S13", "five replicas split 3/2, agents move meanwhile", "as S11", false).gossip(),
    row(
        "S14",
        "a link that is down and up each second",
        "at most one change of a route in a second and for each pair of replicas; failures are unknown only; T_heal",
        false,
    )
    .gossip(),
    row(
        "S15",
        "a ring of four replicas",
        "no false death; each replica serves its own agents; failures are unknown only; T_heal",
        false,
    )
    .gossip(),
    row("S16", "a replica joins during a partition", "as S11", false).gossip(),
    row("S17", "two groups that only one replica sees", "no false death; as S11", false).gossip(),
    row(
        "S18",
        "UDP: 30 % lost, 20 % twice, 200 ± 100 ms late and out of order, for 10 min (quick: 60 s)",
        "FP_loss, all requests succeed, T_unblock_remote",
        false,
    )
    .gossip()
    .needs(&[IPTABLES]),
    row("S19", "all UDP dropped, TCP passes", "no false death, all requests succeed", true).gossip(),
    row(
        "S20",
        "UDP packets above 1,400 bytes and fragments dropped, a replica restarts",
        "no replica sends one; no false death, T_heal",
        false,
    )
    .gossip(),
    row(
        "S21",
        "TCP between all: 100 ± 20 ms late and out of order; 1 Mbit/s; reset at random; segments of 60 bytes",
        "no request fails but while connections are reset, bytes are equal, T_heal",
        false,
    )
    .gossip()
    .needs(&[IPTABLES, TC]),
    row(
        "S21b",
        "TCP of agents and clients: latency, 1 Mbit/s, pieces of 1 to 10 bytes, late ends, resets, ends after some bytes",
        "bytes are equal; failures are unknown only; T_heal",
        false,
    ),
    row(
        "S22",
        "agents whose packets are all dropped, without FIN",
        "T_halfopen; streams to them end as unknown; other agents are served",
        true,
    ),
    row(
        "S23",
        "the name server is silent, fails, or names hosts that are gone, or another cluster; replicas restart meanwhile",
        "all requests succeed, no stranger is in a list, no false death, T_heal",
        false,
    )
    .gossip(),
    row(
        "S24",
        "balancers before agents that close connections after 60 s of silence (quick: 30 s), then after 3 s",
        "60 s: none is closed; 3 s: agents come back; failures are unknown only",
        false,
    ),
    row(
        "S25",
        "a request waits for each of 40 absent agents at each replica, then 1,000 of them wait, and the agents connect",
        "T_unblock_local, T_unblock_remote; each is released once",
        true,
    ),
    row(
        "S26",
        "10,000 requests (quick: 2,000) wait for an absent agent, half are cancelled, the agent connects; twice",
        "the others run once; 32 KiB each; memory and descriptors return to within 5 %",
        false,
    ),
    row(
        "S27",
        "agents that disconnect and connect again all the time; one that comes to two replicas and leaves them as fast as that goes, while it has a tunnel at a third one",
        "each replica sees all of them each time, and none after; it sees the latter at the third replica all the time, and nowhere else after",
        false,
    ),
    row(
        "S28",
        "an agent moves from replica to replica and back within one gossip interval",
        "T_prop, T_heal",
        false,
    )
    .gossip(),
    row(
        "S29",
        "agents on all replicas; replicas are killed one by one",
        "clients that try every replica see unknown failures only, until the last one",
        false,
    ),
    row(
        "S30",
        "elastic: every 10 s a random replica is stopped, killed or started, for 20 min, of 1 to 7 (quick: 40 s, of 1 to 4)",
        "equal views after each step; sizes of the replica that stays are back within 5 %",
        false,
    ),
    row(
        "S31",
        "reconnect storm: the agents of a killed replica, all of them over TLS, 300 on all replicas (--agents)",
        "T_storm",
        false,
    ),
    not_here(
        "S32",
        "cold join with 100,000 entries",
        "two cores have no room for so many agents: tests/tests/cluster/join.rs joins a fake owner of them, and crates/bench/src/cluster measures T_join",
    ),
    row(
        "S33",
        "a replica that hears nothing while a table changes 8,000 times, then 1 KB/s of TCP while agents come and go",
        "it gets a snapshot instead of the changes; the others hold no more for it than bounds; requests through them succeed, sizes return to within 5 %, T_heal",
        false,
    )
    .gossip()
    .needs(&[TC]),
    row(
        "S34",
        "agents and clients whose connections carry 64 bytes/s",
        "all other requests succeed, memory returns",
        false,
    ),
    row(
        "S35",
        "the wall clock of one replica is an hour off, jumps, and goes back between two processes",
        "no false death, no request fails, tokens by its clock only; one that begins so is told why it gets no tables; T_heal",
        false,
    )
    .needs(&[Need::Faketime]),
    row(
        "S36",
        "replicas that write the records of the previous, this, the next and a much later version side by side (--other-programs: two builds)",
        "equal views, requests cross in all directions, nothing is malformed, rolling restart",
        false,
    )
    .two_builds(),
    row(
        "S37",
        "rolling upgrade of all from the records of the previous version to those of this and of the next one, then the downgrade (--other-programs: to another build, and back)",
        "0 failed requests, watches end in order, nothing is malformed",
        false,
    )
    .two_builds(),
    row(
        "S38",
        "full disk of the audit log, no descriptors, 64 MiB more memory under a storm of waiters, none at all",
        "open connections are served, refusals in words, sizes return to within 5 %, T_recover",
        false,
    )
    .needs(&[Need::Groups]),
    row(
        "S39",
        "CPU starvation: four busy processes per core for 10 min (quick: 60 s), then 20 % of a core for one replica, or less if it needs less, then a worker thread of each replica stands still for 2 s",
        "FP_cpu, no request fails with the last two",
        false,
    )
    .needs(&[Need::Groups]),
    row(
        "S40",
        "GitLab refuses connections, is silent, fails, or is another page, longer than answers are remembered",
        "all requests succeed, nobody unverified is let in, T_identity",
        false,
    ),
    row(
        "S41",
        "Redis is down, frozen, flushed, slow (1 s), cut, and loses its subscribers",
        "all requests succeed, T_redis after each",
        false,
    )
    .redis(),
    row(
        "S41b",
        "the primary of a Redis with Sentinels is killed",
        "all requests succeed, T_failover of Redis",
        false,
    )
    .redis(),
    row(
        "S42",
        "tokens of agents with tunnels on three replicas are revoked",
        "T_revoke; they stay away; all other requests succeed",
        false,
    ),
    row(
        "S43",
        "secrets of the API and of replicas, certificates and authority of replicas are replaced; one replica is late",
        "all requests succeed, no false death",
        false,
    ),
    row(
        "S44",
        "forged, changed and old datagrams, also of a replica that was killed and restarted: of 10,000 nodes that do not exist, of another cluster, of the last generation, and zstd bombs of 64 KB",
        "they are dropped, at the cost of some microseconds each, and leave nothing; no false death, no resurrection, sizes return to within 5 %",
        false,
    )
    .gossip()
    .needs(&[IPTABLES]),
    row(
        "S45",
        "a replica without the secret, and an agent without a token (certificates: tests/tests/cluster/mtls.rs)",
        "nobody takes it for a replica, its agents are nowhere else",
        false,
    )
    .gossip(),
    row(
        "S46",
        "1,000 connections abuse HTTP/2 on every listener",
        "no request fails, p99 beside that before, sizes return to within 5 %",
        false,
    ),
    not_here(
        "S47",
        "header smuggling, paths",
        "tests/tests/hostile/callers.rs, and the tests of crates/kube-request",
    ),
    row(
        "S48",
        "soak: random faults for --minutes (default: 60) with 2,000 agents (quick: 200)",
        "no slope of memory, descriptors and tasks above 1 % an hour",
        false,
    )
    .slow(),
    row(
        "S49",
        "SIGKILL of the replica through which six clients watch views of a real cluster, 3 times (full: 15), while pods and deployments change",
        "I16 after each, T_view; failures of other requests are unknown only",
        false,
    )
    .needs(CLUSTER),
    row(
        "S50",
        "watches of a real cluster end with 410 after its history is forgotten, are slow, break with the API server, are cut from agentk (full: also agentk from all replicas, and resets)",
        "rows are not called live meanwhile; I16 after each; T_live; all other requests succeed",
        false,
    )
    .needs(CLUSTER),
    row(
        "S51",
        "SIGKILL in each step of a webhook: at the edge, at the home before its copy, when it is copied, while it is delivered, when it is delivered and the other holder is not told; others come meanwhile, also for agents that are away",
        "I17; T_hook; failures of other requests are unknown only",
        false,
    ),
    row(
        "S52",
        "SIGSTOP of the replica that plans for an agent with a real cluster, in the middle of a sync, for 1 and 18 s (full: 1, 5, 18 and 30 s)",
        "I18; the last commit is in the cluster at the end, and nothing else; T_stale",
        false,
    )
    .needs(PLANNER),
    row(
        "S53",
        "a fifth of the fleet hangs: the API servers of three of 25 agents, and the Prometheus of two more, answer nothing",
        "PromQL over all agents and a view of all answer in their time, with exactly the hanging agents named; T_ask; all other requests succeed; sizes return to within 5 %",
        false,
    ),
    row(
        "S54",
        "nginx asks which replica holds an agent, and gets a wrong answer: another replica, always the same one, an address at which nothing listens, no address, an error, the replica that held the agent before, or no answer",
        "all requests succeed, T_heal",
        false,
    )
    .needs(&[Need::Program("nginx", "nginx")]),
    row(
        "S55",
        "SIGKILL of the replica that plans for an agent with a real cluster, 3 times (full: 12), while commits add, change and remove objects",
        "I18; T_sync; the last commit is in the cluster at the end, and nothing else; failures of other requests are unknown only",
        false,
    )
    .needs(PLANNER),
    row(
        "S56",
        "a partition in which two replicas plan for the same agent and its real cluster, while commits arrive",
        "I18; both write; the last commit is in the cluster at the end, and nothing else; T_stale",
        false,
    )
    .gossip()
    .needs(PLANNER),
    row(
        "S57",
        "SIGKILL of the replica that clients watch and exec through, 1,000 watches and 50 execs (quick: 60 and 12)",
        "other requests succeed; bytes are equal",
        false,
    ),
    row(
        "S58",
        "the replica that holds the agents drains under upgraded connections",
        "exit within the grace, bytes are equal",
        false,
    ),
    not_here(
        "S59",
        "GitLab and issuers are away for callers",
        "tests/tests/oidc.rs for issuers, and the tests of crates/callers for GitLab",
    ),
    row(
        "S60",
        "60 clients follow logs without an end and read slowly, or nothing",
        "512 KiB each, no other request fails, sizes return to within 5 %",
        false,
    ),
];

/// Returns the scenario with this id.
///
/// # Errors
/// There is none: in words.
pub(crate) fn find(id: &str) -> Result<&'static Scenario, String> {
    let found = ALL.iter().find(|scenario| scenario.id.eq_ignore_ascii_case(id));
    found.ok_or_else(|| format!("there is no scenario {id}; --list shows all"))
}

/// Returns why no scenario with this tracker can run on this machine.
pub(crate) fn missing(tracker: Tracker) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    let tools =
        [("ip", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux"), ("unshare", "util-linux")];
    let redis = (tracker == Tracker::Redis).then_some(("redis-server", "redis-server"));
    tools
        .into_iter()
        .chain(redis)
        .find(|(program, _)| !installed(program))
        .map(|(program, package)| format!("{program} is not installed: on Debian, apt-get install {package}"))
}

fn installed(program: &str) -> bool {
    let folders: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    folders.iter().any(|folder| folder.join(program).is_file())
}

/// Returns the table in words, for one tracker or for all. `other`: there are programs of another build.
pub(crate) fn list(tracker: Option<Tracker>, other: bool) -> String {
    let mut out = String::new();
    for scenario in ALL {
        let Scenario { id, what, asserted, quick, trackers, .. } = scenario;
        let asked = tracker.as_ref().map_or(*trackers, std::slice::from_ref);
        let missing: Vec<Option<String>> =
            asked.iter().map(|tracker| scenario.missing(*tracker, other)).collect();
        let runs = asked.iter().zip(&missing).filter(|(_, missing)| missing.is_none());
        let runs: Vec<&str> = runs.map(|(tracker, _)| tracker.as_str()).collect();
        let quick = if *quick { "quick" } else { "" };
        // Writing to a string does not fail.
        let _ = match missing.into_iter().flatten().next().filter(|_| runs.is_empty()) {
            None => writeln!(out, "{id:<4}  {:<12}  {quick:<5}  {what}: {asserted}", runs.join(" ")),
            Some(why) => writeln!(out, "{id:<4}  {:<12}  {:<5}  {what}: does not run here: {why}", "-", ""),
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_in_order() {
        assert!(ALL.windows(2).all(|pair| pair[0].id < pair[1].id));
    }

    #[test]
    fn each_says_what_it_asserts_or_why_it_does_not_run() {
        for scenario in ALL {
            assert_eq!(scenario.elsewhere.is_some(), scenario.asserted.is_empty(), "{}", scenario.id);
            assert!(!(scenario.quick && scenario.elsewhere.is_some()), "{}", scenario.id);
        }
        assert!(find("s02").is_ok() && find("S99").is_err());
    }

    /// What is said to cover a scenario that does not run here is a file of the workspace.
    #[test]
    fn pointers_lead_to_files() {
        let root = devkit::workspace::root();
        for scenario in ALL {
            let Some(why) = scenario.elsewhere else { continue };
            let paths = why.split([' ', ',', ';', ':', '(', ')']).filter(|word| word.contains('/'));
            let paths: Vec<&str> = paths.collect();
            assert!(!paths.is_empty(), "{} names no file: {why}", scenario.id);
            for path in paths {
                assert!(root.join(path).exists(), "{}: there is no {path}", scenario.id);
            }
        }
    }

    #[test]
    fn without_an_api_server_the_list_says_how_to_get_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = || Some(folder.path().to_owned());
        assert!(api_server(None, false).is_some_and(|why| why.contains("KUBEBUILDER_ASSETS")));
        assert!(api_server(Some(PathBuf::new()), false).is_some(), "an empty name is none");
        assert_eq!(api_server(None, true), None);
        std::fs::write(folder.path().join("etcd"), "").expect("a file");
        let why = api_server(path(), true).expect("half of it");
        assert!(why.contains("without kube-apiserver"), "{why}");
        std::fs::write(folder.path().join("kube-apiserver"), "").expect("a file");
        assert_eq!(api_server(path(), false), None);
    }

    #[test]
    fn the_list_says_why_a_scenario_does_not_run() {
        let line = |list: &str, id: &str| {
            list.lines().find(|line| line.starts_with(id)).map(str::to_owned).expect("a line")
        };
        let list = list(Some(Tracker::Redis), false);
        assert!(line(&list, "S19").contains("does not run here: it is about --tracker gossip"), "{list}");
        assert!(line(&list, "S47").contains("does not run here: "), "{list}");
        assert_eq!(list.lines().count(), ALL.len());
    }
}
