//! The rows of the museum.

/// One public bug, and the tests that keep it out.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) number: usize,
    /// Where the bug was, and what it was.
    pub(super) bug: &'static str,
    /// The tests of crates: quick, and part of the suite.
    pub(super) exhibits: &'static [Exhibit],
    /// The tests with real processes.
    pub(super) processes: &'static [Process],
    /// For costs, which a flaw does not show alone: the bound that is asserted, in counted work, and the
    /// change that breaks it.
    pub(super) bound: Option<&'static str>,
}

/// A test of a crate that runs without a flaw, in which it must pass, and then with each of its flaws, with
/// which it must fail.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exhibit {
    pub(super) package: &'static str,
    /// The path of the test in its crate.
    pub(super) test: &'static str,
    /// The variants of the crate's `Flaw`.
    pub(super) flaws: &'static [&'static str],
}

/// A test that starts kas. It must pass with the build that has flaws while none is chosen, and fail with its
/// flaw.
#[derive(Debug, Clone, Copy)]
pub(super) struct Process {
    /// The test program of the package `tests`.
    pub(super) program: &'static str,
    pub(super) test: &'static str,
    /// `None`: the test has failed with a change of another crate or of a test's own peer, see its text.
    pub(super) flaw: Option<&'static str>,
    /// It takes longer than the others, and is run on request.
    pub(super) is_slow: bool,
}

const fn exhibit(package: &'static str, test: &'static str, flaws: &'static [&'static str]) -> Exhibit {
    Exhibit { package, test, flaws }
}

const fn process(program: &'static str, test: &'static str, flaw: Option<&'static str>) -> Process {
    Process { program, test, flaw, is_slow: false }
}

const fn slow(program: &'static str, test: &'static str, flaw: Option<&'static str>) -> Process {
    Process { program, test, flaw, is_slow: true }
}

const fn row(
    number: usize,
    bug: &'static str,
    exhibits: &'static [Exhibit],
    processes: &'static [Process],
) -> Row {
    Row { number, bug, exhibits, processes, bound: None }
}

const fn cost(
    number: usize,
    bug: &'static str,
    exhibits: &'static [Exhibit],
    processes: &'static [Process],
    bound: &'static str,
) -> Row {
    Row { number, bug, exhibits, processes, bound: Some(bound) }
}

/// All rows, by number.
pub(super) const ROWS: &[Row] = &[
    row(
        1,
        "Syn: unregistering behind a snapshot left a zombie on a peer",
        &[
            exhibit("table", "tests::known_bugs::zombie_after_snapshot_race", &["OpsLostBySwap"]),
            exhibit("table", "tests::known_bugs::snapshot_never_replaces_a_newer_copy", &["OldSnapshotWins"]),
        ],
        &[],
    ),
    row(
        2,
        "NATS 8233: a race of subscribe and unsubscribe lost a live subscriber",
        &[exhibit("table", "tests::known_bugs::reregister_race_never_loses_live_agent", &["NoCount"])],
        &[],
    ),
    row(
        3,
        "chitchat 94: a restart left both incarnations in the state",
        &[exhibit("gossip", "tests::restarts::restart_replaces_incarnation", &["OldGenerationStays"])],
        &[process("cluster", "membership::restart_replaces_incarnation", None)],
    ),
    row(
        4,
        "chitchat 161: a dead incarnation was gossiped forever",
        &[exhibit("gossip", "tests::restarts::dead_incarnation_not_regossiped", &["DeadRememberedLong"])],
        &[process("cluster", "known_bugs::dead_incarnation_not_regossiped", Some("DeadRememberedLong"))],
    ),
    row(
        5,
        "chitchat PR 155, quickwit 5135: dead nodes came back, because peers collect them at different times",
        &[exhibit("gossip", "tests::restarts::no_resurrection_after_gc", &["HearsayIsLife"])],
        &[process("cluster", "known_bugs::no_resurrection_after_gc", None)],
    ),
    row(
        6,
        "chitchat 119: nodes with the most stale values were gossiped first, and small ones starved",
        &[exhibit("table", "tests::known_bugs::small_replica_visible_while_big_one_syncs", &["OneSnapshot"])],
        &[slow("cluster", "join::small_replica_visible_while_big_one_syncs", Some("OneSnapshot"))],
    ),
    cost(
        7,
        "quickwit 4561: ten megabytes of state, and a start of more than ten seconds",
        &[exhibit("table", "tests::known_bugs::cold_join_100k_entries", &["NoResume"])],
        &[slow("cluster", "join::cold_join_100k_entries", None)],
        "each of 100,000 entries crosses once, in at most 3 bytes and 2 + entries / CHUNK_IDS messages; a stream \
         that is opened again costs one operation for each change. A larger entry in the codec, smaller parts, or a \
         snapshot for each new stream breaks it",
    ),
    row(
        8,
        "quickwit PR 6653: the digest of more than 500 nodes could not be sent",
        &[exhibit("gossip", "seal::tests::crashloop_1000_incarnations", &["SmallMessages"])],
        &[slow("cluster", "known_bugs::crashloop_1000_incarnations", Some("SmallMessages"))],
    ),
    cost(
        9,
        "quickwit 4845, PR 6082: a storm of catch-up requests every minute",
        &[exhibit("table", "tests::known_bugs::no_snapshot_storm", &["NoBackoff"])],
        &[process("cluster", "known_bugs::no_snapshot_storm", None)],
        "at most 12 snapshots in a minute of heartbeats that never match, and at least 5. Resyncs without growing \
         delays break it",
    ),
    row(
        10,
        "konnectivity 152: requests were routed to agents that were gone without a sign",
        &[exhibit("net", "http::tests::known_bugs::half_open_agent_evicted", &["NoKeepalive"])],
        &[],
    ),
    row(
        11,
        "konnectivity 255 and later: abandoned dials leaked goroutines, sockets and memory",
        &[
            exhibit(
                "routing",
                "registry::tests::cancelled_requests_leak_nothing",
                &["WaiterNeverLeaves", "GrantKeepsTunnel"],
            ),
            exhibit(
                "routing",
                "registry::schedules::schedules_of_a_caller_that_leaves",
                &["GrantKeepsTunnel"],
            ),
        ],
        &[slow("leaks", "cancelled_requests_leak_nothing", None)],
    ),
    row(
        12,
        "konnectivity 2025: a stale server count overwrote a newer one",
        &[exhibit("table", "tests::known_bugs::old_view_never_overwrites_new", &["AnyEpoch"])],
        &[],
    ),
    row(
        13,
        "konnectivity 2026: a data race on the response through an agent",
        &[
            exhibit(
                "tunnel",
                "kas_end::schedules::schedules_of_a_response_and_a_lost_agent",
                &["WakerAfterUnlock"],
            ),
            exhibit(
                "tunnel",
                "kas_end::schedules::schedules_of_two_requests_in_one_tunnel",
                &["WakeBeforeWrite"],
            ),
            exhibit(
                "tunnel",
                "kas_end::schedules::schedules_of_a_caller_that_leaves",
                &["LeaverKeepsTunnel"],
            ),
        ],
        &[],
    ),
    row(
        14,
        "konnectivity 2025: graceful shutdown was added, and reverted",
        &[exhibit("table", "tests::known_bugs::sigterm_then_sigkill_still_clean", &["DrainingNeverDies"])],
        &[process("cluster", "crashes::sigterm_then_sigkill_still_clean", Some("DrainingNeverDies"))],
    ),
    row(
        15,
        "konnectivity 15: the newest connection of an agent was always chosen, and became the bottleneck",
        &[exhibit("routing", "registry::tests::connections_of_one_agent_are_balanced", &["OneProcess"])],
        &[],
    ),
    row(
        16,
        "k3s 11329: an agent that was offline for a day never reconnected",
        &[exhibit("agentk", "supervisor::plan::tests::agent_reconnects_after_24h_sim", &["EndlessBackoff"])],
        &[],
    ),
    row(
        17,
        "kas 138: a load balancer reset streams before kas had sent GOAWAY",
        &[exhibit("net", "http::tests::known_bugs::max_age_goaway_before_lb_cut", &["NeverOld"])],
        &[slow("proxies", "agents::max_age_goaway_before_lb_cut", Some("NeverOld"))],
    ),
    row(
        18,
        "kas 16.11.1: built from the wrong branch, it no longer read the configuration of several replicas",
        &[exhibit("kas-config", "tests::previous::config_of_previous_minor_still_boots", &["KeyRenamed"])],
        &[],
    ),
    row(
        19,
        "Phoenix: presences of a crashed node stay for 30 s",
        &[exhibit("table", "tests::known_bugs::sigkill_purges_fast", &["RefusedIsNoVote"])],
        &[process("cluster", "membership::sigkill_purges_fast", None)],
    ),
    row(
        20,
        "Akka: an asymmetric partition can down everything",
        &[exhibit("table", "tests::known_bugs::asymmetric_partition_no_mass_removal", &["OneVoteKills"])],
        &[],
    ),
    row(
        21,
        "Restate: a node that can only send must declare itself dead",
        &[exhibit(
            "gossip",
            "tests::partitions::deaf_replica_is_lonely_and_its_slots_expire_elsewhere",
            &["NeverSilent"],
        )],
        &[],
    ),
    row(
        22,
        "etcd 20418: stale data after a pause of the process",
        &[exhibit("table", "tests::known_bugs::paused_replica_does_not_serve_stale_routes", &["NoExpiry"])],
        &[],
    ),
    row(
        23,
        "tonic, CVE-2024-47609: the accept loop ended with an error",
        &[exhibit(
            "net",
            "http::tests::known_bugs::accept_loop_survives_garbage_and_emfile",
            &["AcceptErrorEnds"],
        )],
        &[process(
            "hostile",
            "kas_without_descriptors_serves_open_connections_and_accepts_again_later",
            Some("AcceptErrorEnds"),
        )],
    ),
    row(
        24,
        "pingora 563: idle connections of HTTP/2 were never closed, until 32 GB were in use",
        &[exhibit("net", "http::tests::known_bugs::idle_connections_reaped", &["IdleStays"])],
        &[process("limits", "idle_connections_get_a_goaway_and_busy_ones_do_not", Some("IdleStays"))],
    ),
    row(
        25,
        "Teleport RFD 69: route updates out of order",
        &[exhibit("table", "tests::known_bugs::nonce_orders_route_updates", &["AnyVersion"])],
        &[],
    ),
];
