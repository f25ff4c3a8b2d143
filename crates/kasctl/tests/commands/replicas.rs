//! `kasctl replicas`, `tracker status` and `why`.

use serde_json::{Value, json};

use crate::fake::Server;
use crate::json_of;

#[tokio::test]
async fn replicas_are_a_table() {
    let server = Server::start().await;
    let run = server.run(&["replicas"]).await.expect_exit(0);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines,
        [
            [
                "NAME",
                "ADDRESS",
                "STATE",
                "STANDING",
                "AGENTS",
                "TUNNELS",
                "TABLE",
                "HEARD",
                "VERSION",
                "GENERATION"
            ],
            [
                "kas-0",
                "10.0.0.1:8155",
                "ready",
                "self",
                "2",
                "5",
                "synced:12",
                "-",
                "v1.0.0",
                "18446744073709551615"
            ],
            ["kas-1", "10.0.0.2:8155", "ready", "live", "2", "3", "synced:9", "250ms", "v1.0.0", "7"],
        ]
    );
    assert_eq!(run.stderr, "");
}

#[tokio::test]
async fn tracker_status_shows_the_state_and_the_last_error() {
    let server = Server::start().await;
    let run = server.run(&["tracker", "status"]).await.expect_exit(0);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines,
        [
            ["REPLICA", "BACKEND", "LATENCY", "AGENTS", "ENTRIES", "UNWRITTEN", "LAG", "REMEMBERED"],
            ["kas-0", "redis", "800us", "2", "5", "1", "2s", "9"],
        ]
    );
    assert_eq!(run.stderr, "");
    server.lose_a_replica();
    let run = server.run(&["tracker", "status", "-o", "json"]).await.expect_exit(0);
    assert!(
        run.stderr.starts_with("kasctl: alarm: Redis cannot be asked\nkasctl: last error, 1m1s ago: no "),
        "{run:?}"
    );
    assert!(!run.stderr.contains('\x1b'), "{run:?}");
    assert_eq!(
        json_of(&run),
        json!({
            "replica": "kas-0", "backend": "redis", "alarms": ["Redis cannot be asked"], "latency_us": 800,
            "agents": 2, "entries": 5, "unwritten": 1, "lag_ms": 2_000, "remembered": 9,
            "last_error": {"text": "no \u{1b} route", "age_ms": 61_000},
        })
    );
}

#[tokio::test]
async fn silent_replica_is_named_and_alarms_come_first() {
    let server = Server::start().await;
    server.lose_a_replica();
    let run = server.run(&["replicas"]).await.expect_exit(6);
    let last: Vec<&str> = run.stdout.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(
        last,
        ["kas-1", "10.0.0.2:8155", "ready?", "suspect", "2", "-", "behind:9", "1m1s", "v1.0.0", "7"]
    );
    assert_eq!(
        run.stderr,
        "kasctl: alarm: kas-1 is suspect for 1 minute\n\
         kasctl: warning: kas at 10.0.0.2:8155 did not answer (connection refused): \
         its row is what other replicas know about it\n"
    );
    let run = server.run(&["replicas", "-o", "json"]).await.expect_exit(6);
    let document = json_of(&run);
    assert_eq!(
        document["replicas"][0],
        json!({
            "name": "kas-0", "address": {"ip": "10.0.0.1", "port": 8155}, "state": "ready", "standing": "self",
            "agents": 2, "tunnels": 5,
            "table": {"synced": true, "version": 12, "epoch": "18446744073709551614"},
            "heard_ms": null, "version": "v1.0.0", "commit": "abc", "generation": "18446744073709551615",
        })
    );
    assert_eq!(document["replicas"][1]["tunnels"], Value::Null, "it did not tell");
    assert_eq!(
        (&document["unanswered"][0]["reason"], &document["alarms"]),
        (&json!("connection refused"), &json!(["kas-1 is suspect for 1 minute"]))
    );
}

#[tokio::test]
async fn why_begins_with_the_summary() {
    let server = Server::start().await;
    let run = server.run(&["why", "3"]).await.expect_exit(0);
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(
        lines[0],
        "agent 3 is held by 10.0.0.2:8155 (2 idle tunnels); route of a request: \
         no tunnel here -> borrow from kas-1 at 10.0.0.2:8155"
    );
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(cells(lines[2]), ["REPLICA", "ADDRESS", "IDLE", "BUSY", "WAITING"]);
    assert_eq!(cells(lines[4]), ["kas-1", "10.0.0.2:8155", "2", "0", "0"]);
    assert_eq!(cells(lines[6]), ["REPLICA", "BELIEVES-OF", "HOLDS", "TRUE", "WHY"]);
    assert_eq!(cells(lines[7])[..4], ["kas-0", "kas-1", "yes", "yes"]);
    assert_eq!(cells(lines[8])[..4], ["kas-1", "kas-0", "yes", "no"]);
    assert!(lines[8].ends_with("kas-0 is live, has the agent at version 11: asked"));
    assert_eq!(run.stderr, "");

    let run = server.run(&["why", "4"]).await.expect_exit(6);
    assert!(
        run.stdout.starts_with(
            "agent 4 is held by no replica that answered (1 did not); 2 requests wait for it; \
             route of a request: wait for a tunnel\n"
        ),
        "{run:?}"
    );
    assert!(run.stdout.contains("kas-0     kas-1         no      -      silent"), "{run:?}");
    assert!(run.stderr.contains("kas at 10.0.0.2:8155 did not answer"), "{run:?}");
    let run = server.run(&["why", "5"]).await.expect_exit(1);
    assert!(run.stderr.contains("refused the call: INVALID_ARGUMENT"), "{run:?}");
}

#[tokio::test]
async fn why_does_not_wait_for_an_answer_of_a_replica_of_gitlabs_kas() {
    let server = Server::start().await;
    let run = server.run(&["why", "14"]).await.expect_exit(0);
    assert!(
        run.stdout.starts_with(
            "agent 14 is held by no replica of this kas; according to Redis it is held by grpc://10.0.0.9:8155: a replica of \
             GitLab's kas, which cannot explain itself, but it is asked for tunnels; route of a request: ask it\n"
        ),
        "{run:?}"
    );
    assert!(!run.stdout.contains("did not answer"), "{run:?}");
    assert_eq!(run.stderr, "");
    let document = json_of(&server.run(&["why", "14", "-o", "json"]).await.expect_exit(0));
    assert_eq!(
        (&document["held_by"], &document["held_by_gitlab"], &document["replicas"][0]["beliefs"][0]["gitlab"]),
        (&json!([]), &json!(["grpc://10.0.0.9:8155"]), &json!(true))
    );
}

#[tokio::test]
async fn why_is_one_json_document() {
    let server = Server::start().await;
    let document = json_of(&server.run(&["why", "3", "-o", "json"]).await.expect_exit(0));
    assert_eq!(
        document,
        json!({
            "agent_id": 3,
            "held_by": ["kas-1"],
            "held_by_gitlab": [],
            "route": ["no tunnel here", "borrow from kas-1 at 10.0.0.2:8155"],
            "replicas": [
                {
                    "name": "kas-0", "address": {"ip": "10.0.0.1", "port": 8155},
                    "idle_tunnels": 0, "busy_tunnels": 0, "waiting": 0,
                    "beliefs": [{
                        "name": "kas-1", "holds": true,
                        "why": "kas-1 is live, has the agent at version 9: asked", "gitlab": false,
                    }],
                },
                {
                    "name": "kas-1", "address": {"ip": "10.0.0.2", "port": 8155},
                    "idle_tunnels": 2, "busy_tunnels": 0, "waiting": 0,
                    "beliefs": [{
                        "name": "kas-0", "holds": true,
                        "why": "kas-0 is live, has the agent at version 11: asked", "gitlab": false,
                    }],
                },
            ],
            "unanswered": [],
        })
    );
}
