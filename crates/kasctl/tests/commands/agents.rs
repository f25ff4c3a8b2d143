//! `kasctl agents`.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::fake::Server;
use crate::json_of;

#[tokio::test]
async fn agents_are_a_table() {
    let server = Server::start().await;
    let run = server.run(&["agents"]).await.expect_exit(0);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["AGENT", "NAME", "PROJECT", "CONNECTION", "POD", "VERSION", "CONNECTED", "KAS"]);
    assert_eq!(
        lines[1],
        ["1", "prod", "3", "9223372036854775807", "gitlab/agentk-1", "v14.1.0", "2h", "10.0.0.1:8155"]
    );
    assert_eq!(lines[2][..4], ["2", "stage", "4", "22"]);
    assert_eq!(lines.len(), 3, "{run:?}");
    assert_eq!(run.stderr, "");
}

#[tokio::test]
async fn agents_are_filtered_and_one_json_document() {
    let server = Server::start().await;
    let agents = json_of(&server.run(&["agents", "--project", "3", "-o", "json"]).await.expect_exit(0));
    assert_eq!(
        agents,
        json!({
            "agents": [{
                "id": 1, "name": "prod", "project_id": 3, "connection_id": "9223372036854775807",
                "version": "v14.1.0", "commit": "abc", "pod_namespace": "gitlab", "pod_name": "agentk-1",
                "connected_at": agents["agents"][0]["connected_at"],
                "kas_address": {"ip": "10.0.0.1", "port": 8155},
                "unconfirmed": false,
            }],
            "unanswered": [],
        })
    );
    let agents = json_of(&server.run(&["-o", "json", "agents", "--agent", "2"]).await.expect_exit(0));
    assert_eq!(agents["agents"][0]["name"], "stage");
    let run = server.run(&["agents", "--agent", "1000"]).await.expect_exit(0);
    assert_eq!(run.stderr, "kasctl: no agent is connected\n");
}

#[tokio::test]
async fn partial_list_is_printed_warned_about_and_not_a_success() {
    let server = Server::start().await;
    let run = server.run(&["agents", "--project", "600"]).await.expect_exit(6);
    assert!(run.stdout.contains("partial-agent"), "{run:?}");
    assert_eq!(
        run.stderr,
        "kasctl: warning: kas at 10.0.0.9:8155 did not answer (connection refused): the list is partial\n"
    );
    let run = server.run(&["agents", "--project", "600", "-o", "json"]).await.expect_exit(6);
    assert_eq!(
        json_of(&run)["unanswered"],
        json!([{"address": {"ip": "10.0.0.9", "port": 8155}, "reason": "connection refused"}])
    );
}

/// How the note about unconfirmed connections begins.
const UNCONFIRMED: &str =
    "kasctl: a connection whose KAS ends with ? is unconfirmed: a replica of GitLab's kas";

#[tokio::test]
async fn connections_at_replicas_of_gitlabs_kas_are_marked_as_unconfirmed() {
    let server = Server::start().await;
    let run = server.run(&["agents", "--project", "602"]).await.expect_exit(0);
    let places: Vec<&str> = run.stdout.lines().map(|line| line.split_whitespace().last().unwrap()).collect();
    assert_eq!(places, ["KAS", "gitlab-kas?", "10.0.0.1:8155"]);
    assert!(run.stderr.starts_with(UNCONFIRMED), "{run:?}");
    assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
    let run = server.run(&["agents", "--project", "602", "-o", "json"]).await.expect_exit(0);
    let agents = json_of(&run)["agents"].clone();
    assert_eq!((&agents[0]["unconfirmed"], &agents[1]["unconfirmed"]), (&json!(true), &json!(false)));
    assert_eq!(agents[0]["kas_address"], json!({"ip": "gitlab-kas", "port": 0}));
    assert_eq!(run.stderr, "");
}

#[tokio::test]
async fn watch_explains_the_mark_of_unconfirmed_connections_once() {
    let server = Server::start().await;
    let mut child = server
        .command(&["agents", "--watch", "--agent", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = crate::fake::soon(lines.next_line()).await.unwrap().unwrap();
        line.split_whitespace().last().unwrap().to_owned()
    };
    assert_eq!((next().await, next().await), ("KAS".to_owned(), "10.0.0.1:8155".to_owned()));
    server.connect_unconfirmed(2, 55).await;
    assert_eq!(next().await, "gitlab-kas?");
    server.connect_unconfirmed(2, 56).await;
    assert_eq!(next().await, "gitlab-kas?");
    crate::fake::interrupt(&child);
    let output = crate::fake::soon(child.wait_with_output()).await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with(UNCONFIRMED), "{said}");
    assert_eq!(said.matches("unconfirmed").count(), 1, "{said}");
}

#[tokio::test]
async fn watch_ends_with_an_error_when_kas_ends_it_before_it_was_complete() {
    let server = Server::start().await;
    let run = server.run(&["agents", "--project", "601"]).await.expect_exit(1);
    assert!(run.stderr.contains("it ended the watch"), "{run:?}");
    assert_eq!(run.stdout, "");
}

#[tokio::test]
async fn watch_prints_changes_until_interrupted() {
    let server = Server::start().await;
    let mut child = server.command(&["agents", "--watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = crate::fake::soon(lines.next_line()).await.unwrap().unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(next().await[0], "EVENT");
    assert_eq!(next().await[..3], ["present", "1", "prod"]);
    assert_eq!(next().await[..3], ["present", "2", "stage"]);
    server.connect(5, "late").await;
    assert_eq!(next().await[..3], ["connected", "5", "late"]);
    server.disconnect(1, i64::MAX).await;
    assert_eq!(next().await[..5], ["disconnected", "1", "prod", "3", "9223372036854775807"]);
    crate::fake::interrupt(&child);
    assert_eq!(crate::fake::soon(child.wait()).await.unwrap().code(), Some(130));
}

#[tokio::test]
async fn watch_in_json_is_a_line_per_event() {
    let server = Server::start().await;
    let mut child = server
        .command(&["agents", "--watch", "--agent", "2", "-o", "json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = crate::fake::soon(lines.next_line()).await.unwrap().unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    };
    let first = next().await;
    assert_eq!((&first["event"], &first["agent"]["id"]), (&json!("connected"), &json!(2)));
    assert_eq!(next().await, json!({"event": "snapshot_complete", "unanswered": []}));
    server.disconnect(2, 22).await;
    let last = next().await;
    assert_eq!((&last["event"], &last["agent"]["name"]), (&json!("disconnected"), &json!("stage")));
    child.kill().await.unwrap();
}

#[tokio::test]
async fn watch_of_a_cluster_follows_agents_and_names_silent_replicas() {
    let server = Server::start().await;
    let mut child = server
        .command(&["agents", "--watch", "--project", "600"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut error = async || crate::fake::soon(errors.next_line()).await.unwrap().unwrap();
    assert_eq!(
        error().await,
        "kasctl: warning: kas at 10.0.0.9:8155 did not answer (connection refused): the list is partial"
    );
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = crate::fake::soon(lines.next_line()).await.unwrap().unwrap();
        let cells: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        (cells[0].clone(), cells[1].clone(), cells.last().unwrap().clone())
    };
    let row = |event: &str, agent: &str, kas: &str| (event.to_owned(), agent.to_owned(), kas.to_owned());
    assert_eq!(next().await, row("EVENT", "AGENT", "KAS"));
    assert_eq!(next().await, row("present", "6", "10.0.0.1:8155"));
    // It reconnects with the same connection id, to another replica.
    server.relocate(6, "partial-agent", 600, 66, "10.0.0.2").await;
    assert_eq!(next().await, row("moved", "6", "10.0.0.2:8155"));
    server.relocate(6, "partial-agent", 600, 66, "10.0.0.2").await;
    assert_eq!(next().await, row("present", "6", "10.0.0.2:8155"));
    server.silence(&["10.0.0.9", "10.0.0.8"]).await;
    assert!(error().await.contains("kas at 10.0.0.8:8155 did not answer"));
    server.silence(&["10.0.0.8"]).await;
    assert_eq!(error().await, "kasctl: kas at 10.0.0.9:8155 answers again");
    server.disconnect(6, 66).await;
    assert_eq!(next().await, row("disconnected", "6", "10.0.0.2:8155"));
    child.kill().await.unwrap();
}

#[tokio::test]
async fn watch_in_json_reports_changes_of_unresponsive_replicas() {
    let server = Server::start().await;
    let mut child = server
        .command(&["agents", "--watch", "--agent", "2", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = crate::fake::soon(lines.next_line()).await.unwrap().unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    };
    assert_eq!(next().await["event"], "connected");
    assert_eq!(next().await, json!({"event": "snapshot_complete", "unanswered": []}));
    server.silence(&[]).await;
    server.silence(&["10.0.0.9"]).await;
    let told = next().await;
    assert_eq!(
        (&told["event"], &told["unanswered"][0]["address"]["ip"]),
        (&json!("snapshot_complete"), &json!("10.0.0.9")),
        "an unchanged list is not repeated: {told}"
    );
    server.relocate(2, "stage", 4, 22, "10.0.0.2").await;
    let moved = next().await;
    assert_eq!(
        (&moved["event"], &moved["agent"]["kas_address"]["ip"]),
        (&json!("connected"), &json!("10.0.0.2"))
    );
    child.kill().await.unwrap();
}
