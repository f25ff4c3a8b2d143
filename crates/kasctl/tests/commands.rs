//! The real `kasctl` binary against a server in this process that implements kas' services from the generated
//! traits: what kasctl sends, prints, and exits with.
//!
//! This server only plays kas. The real kas, with agents behind it, is exercised in the `tests` package.

#![allow(clippy::unwrap_used, reason = "clippy spares test functions, not the helpers of a test target")]

mod fake;

use std::{os::unix::fs::PermissionsExt as _, process::Stdio, time::Duration};

use fake::{Run, Server};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

fn json_of(run: &Run) -> Value {
    serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"))
}

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
        let line = fake::soon(lines.next_line()).await.unwrap().unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(next().await[0], "EVENT");
    assert_eq!(next().await[..3], ["present", "1", "prod"]);
    assert_eq!(next().await[..3], ["present", "2", "stage"]);
    server.connect(5, "late").await;
    assert_eq!(next().await[..3], ["connected", "5", "late"]);
    server.disconnect(1, i64::MAX).await;
    assert_eq!(next().await[..5], ["disconnected", "1", "prod", "3", "9223372036854775807"]);
    fake::interrupt(&child);
    assert_eq!(fake::soon(child.wait()).await.unwrap().code(), Some(130));
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
        let line = fake::soon(lines.next_line()).await.unwrap().unwrap();
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
async fn pods_of_all_pages_are_printed() {
    let server = Server::start().await;
    let run = server.run(&["pods", "7", "--page-size", "2"]).await.expect_exit(0);
    assert_eq!(
        run.stdout,
        "NAMESPACE   NAME\nns          pod-0\nns          pod-1\nns          pod-2\nns          pod-3\nns          pod-4\n"
    );
    let run = server.run(&["pods", "7", "--page-size", "2", "-o", "json"]).await.expect_exit(0);
    assert_eq!(json_of(&run)["pods"].as_array().unwrap().len(), 5);
    let asked = server.pod_questions();
    assert_eq!(asked.len(), 6, "three pages, twice");
    assert_eq!(asked[0].page_size, 2);
    let ids = server.token_ids();
    assert_eq!(ids.len(), 6);
    assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), 6, "each call has its own token");
}

#[tokio::test]
async fn pods_are_selected_by_connection_namespace_and_labels() {
    let server = Server::start().await;
    server
        .run(&["pods", "7", "--connection", "9", "-n", "default", "-l", "app=web,tier!=cache"])
        .await
        .expect_exit(0);
    let asked = server.pod_questions().remove(0);
    assert_eq!(
        (asked.connection_id, asked.namespace.as_str(), asked.label_selector.as_str(), asked.page_size),
        (9, "default", "app=web,tier!=cache", 500)
    );
}

#[tokio::test]
async fn pages_before_a_failure_are_printed_and_json_is_cut_short() {
    let server = Server::start().await;
    let run = server.run(&["pods", "70"]).await.expect_exit(1);
    assert!(run.stdout.contains("pod-0"), "{run:?}");
    let run = server.run(&["pods", "70", "-o", "json"]).await.expect_exit(1);
    assert!(serde_json::from_str::<Value>(&run.stdout).is_err(), "{run:?}");
    let run = server.run(&["pods", "71"]).await.expect_exit(1);
    assert!(run.stderr.contains("the same page twice"), "{run:?}");
}

#[tokio::test]
async fn absent_agent_has_an_exit_code_of_its_own() {
    let server = Server::start().await;
    let run = server.run(&["pods", "404", "--correlation-id", "find-me"]).await.expect_exit(5);
    assert_eq!(
        run.stderr,
        format!(
            "kasctl: kas at {} could not start the request: UNAVAILABLE: agent 404 is not connected; \
             nothing was sent to the agent, so trying again is safe (correlation id find-me)\n",
            server.address
        )
    );
    assert_eq!(server.metadata("x-gitlab-correlation-id"), ["find-me"]);
    assert_eq!(server.metadata("grpc-timeout"), ["30000000u"]);
}

#[tokio::test]
async fn outcome_that_kas_names_decides_the_exit_code() {
    let server = Server::start().await;
    let run = server.run(&["request", "10", "POST", "/"]).await.expect_exit(5);
    assert!(run.stderr.contains("trying again is safe"), "{run:?}");
    let run = server.run(&["request", "8", "POST", "/", "--timeout", "5s"]).await.expect_exit(7);
    assert!(run.stderr.contains("look before you try again"), "{run:?}");
    assert_eq!(run.stdout, "half", "what came before is printed");
    let run = server.run(&["request", "9", "POST", "/"]).await.expect_exit(7);
    assert!(run.stderr.contains("ended before it was complete"), "{run:?}");
    let run = server.run(&["request", "11", "GET", "/"]).await.expect_exit(7);
    assert!(run.stderr.contains("not in the order of the protocol"), "{run:?}");
}

#[tokio::test]
async fn request_carries_method_path_query_headers_and_body() {
    let server = Server::start().await;
    let run = server
        .run(&[
            "request",
            "7",
            "post",
            "/api/v1/a%20b?labelSelector=app%3Dweb&x=1&x=2",
            "-H",
            "x-my-header: one",
            "-H",
            "X-MY-HEADER: two",
            "-d",
            "{\"a\":1}",
            "--connection",
            "12",
        ])
        .await
        .expect_exit(0);
    assert_eq!(
        json_of(&run),
        json!({
            "method": "POST",
            "path": "/api/v1/a b",
            "query": {"labelSelector": ["app=web"], "x": ["1", "2"]},
            "header": {
                "Content-Type": ["application/json"],
                "User-Agent": [format!("kasctl/{}", runtime::version::VERSION)],
                "X-My-Header": ["one", "two"],
            },
            "chunks": [7],
            "body": "{\"a\":1}",
        })
    );
    assert_eq!(server.metadata("kas-agent-id"), ["7"]);
    assert_eq!(server.metadata("kas-connection-id"), ["12"]);
    assert_eq!(server.metadata("grpc-timeout"), [""; 0], "no limit unless one is given");
}

#[tokio::test]
async fn request_body_comes_from_a_file_in_chunks() {
    let server = Server::start().await;
    let file = server.dir.path().join("body");
    std::fs::write(&file, vec![b'x'; 70_000]).unwrap();
    let run = server
        .run(&[
            "request",
            "7",
            "PUT",
            "/",
            "-d",
            &format!("@{}", file.display()),
            "-H",
            "content-type: text/plain",
        ])
        .await
        .expect_exit(0);
    let answer = json_of(&run);
    let chunks: Vec<u64> = answer["chunks"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert!(chunks.iter().all(|n| *n <= 32 * 1024), "{chunks:?}");
    assert_eq!(chunks.iter().sum::<u64>(), 70_000);
    assert_eq!(answer["header"]["Content-Type"], json!(["text/plain"]));
    let run = server.run(&["request", "7", "PUT", "/", "-d", "@/does/not/exist"]).await.expect_exit(1);
    assert_eq!(run.stderr, "kasctl: cannot read /does/not/exist: no such file or directory\n");
    let run = server.run(&["request", "7", "PUT", "/", "-d", "@/"]).await.expect_exit(1);
    assert_eq!(run.stderr, "kasctl: cannot read /: is a directory\n", "half a body never looks complete");
}

#[tokio::test]
async fn standard_input_and_the_answer_are_streamed() {
    let server = Server::start().await;
    let mut child = server
        .command(&["request", "7", "POST", "/echo", "-d", "@-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    for piece in [b"first", b"again"] {
        stdin.write_all(piece).await.unwrap();
        let mut echo = [0; 5];
        fake::soon(stdout.read_exact(&mut echo)).await.unwrap();
        assert_eq!(&echo, piece, "each piece comes back before the next is written");
    }
    drop(stdin);
    assert_eq!(fake::soon(child.wait()).await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn answer_that_ends_early_does_not_wait_for_standard_input() {
    let server = Server::start().await;
    let mut child = server
        .command(&["request", "10", "POST", "/", "-d", "@-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _open = child.stdin.take();
    assert_eq!(fake::soon(child.wait()).await.unwrap().code(), Some(5));
}

#[tokio::test]
async fn interrupt_cancels_the_request() {
    let server = Server::start().await;
    let mut child = server.command(&["request", "7", "GET", "/hang"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut begun = [0; 5];
    fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut begun)).await.unwrap();
    assert_eq!(&begun, b"begun");
    fake::interrupt(&child);
    assert_eq!(fake::soon(child.wait()).await.unwrap().code(), Some(130));
    fake::soon(server.cancelled()).await;
}

#[tokio::test]
async fn http_status_matters_only_with_fail() {
    let server = Server::start().await;
    let run = server.run(&["request", "7", "GET", "/status/404"]).await.expect_exit(0);
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("missing", ""));
    let run = server.run(&["request", "7", "GET", "/status/404", "--fail"]).await.expect_exit(22);
    assert_eq!(run.stdout, "missing");
    assert_eq!(run.stderr, "kasctl: the cluster answered 404 Not Found\n");
    let run = server.run(&["request", "7", "GET", "/status/404", "-i"]).await.expect_exit(0);
    assert_eq!(run.stdout, "HTTP 404 Not Found\nContent-Type: text/plain\n\nmissing");
    server.run(&["request", "7", "GET", "/echo", "--fail"]).await.expect_exit(0);
}

#[tokio::test]
async fn closed_pipe_is_a_quiet_end() {
    let server = Server::start().await;
    let mut child = server
        .command(&["request", "7", "GET", "/endless"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 10];
    fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut some)).await.unwrap();
    drop(child.stdout.take());
    let done = fake::soon(child.wait_with_output()).await.unwrap();
    assert_eq!((done.status.code(), done.stderr.as_slice()), (Some(0), &b""[..]));
}

#[tokio::test]
async fn wrong_secret_is_not_authenticated_and_is_named() {
    let server = Server::start().await;
    let other = server.dir.path().join("other-secret");
    std::fs::write(&other, "b3RoZXI=\n").unwrap();
    let other = other.to_str().unwrap();
    for line in [vec!["agents"], vec!["pods", "7"], vec!["request", "7", "GET", "/"]] {
        let mut line = line.clone();
        line.extend(["--secret-file", other]);
        let run = server.run(&line).await.expect_exit(4);
        assert!(run.stderr.contains(&format!("refused the token signed with {other}")), "{run:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
    }
}

#[tokio::test]
async fn missing_or_broken_secret_is_named() {
    let server = Server::start().await;
    let dir = server.dir.path().to_str().unwrap();
    let missing = |command: &mut tokio::process::Command| {
        command.env_remove("KASCTL_SECRET_FILE").env("KAS_STATE_DIR", dir);
    };
    let run = server.run_with(&["agents"], missing).await.expect_exit(4);
    assert!(
        run.stderr.starts_with(&format!("kasctl: no API secret at {dir}/api-secret: kas makes it")),
        "{run:?}"
    );
    std::fs::copy(server.dir.path().join("secret"), server.dir.path().join("api-secret")).unwrap();
    server.run_with(&["agents"], missing).await.expect_exit(0);
    let broken = format!("{dir}/broken");
    std::fs::write(&broken, "not base64!").unwrap();
    let run = server.run(&["agents", "--secret-file", &broken]).await.expect_exit(4);
    assert!(run.stderr.contains("is not standard base64"), "{run:?}");
}

#[tokio::test]
async fn absent_kas_is_unreachable() {
    let server = Server::start().await;
    // Bound and dropped: nobody listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = format!("grpc://{free}");
    for line in [vec!["agents"], vec!["pods", "7"], vec!["request", "7", "GET", "/"]] {
        let mut line = line.clone();
        line.extend(["--address", &address]);
        let run = server.run(&line).await.expect_exit(3);
        assert!(
            run.stderr.starts_with(&format!(
                "kasctl: cannot reach kas at {address}: connection refused; nothing was sent; is kas running"
            )),
            "{run:?}"
        );
    }
    let run = server.run(&["agents", "--address", "unix:///does/not/exist"]).await.expect_exit(3);
    assert!(run.stderr.contains("does it listen on this socket"), "{run:?}");
}

#[tokio::test]
async fn servers_that_are_not_kas_are_told_apart() {
    let server = Server::start().await;
    for (answer, words) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "speaks HTTP/1"),
        (&[0x15, 3, 3, 0, 2, 2, 40][..], "speaks TLS"),
        (&b"-ERR\r\n"[..], "does not speak gRPC"),
        (&b""[..], "without a word"),
    ] {
        let address = fake::answering(answer, false).await;
        let run = server.run(&["request", "7", "GET", "/", "--address", &address]).await.expect_exit(3);
        assert!(run.stderr.contains(words), "{run:?}");
    }
    let address = fake::answering(b"", true).await;
    let run = server.run(&["pods", "7", "--address", &address, "--timeout", "1s"]).await.expect_exit(3);
    assert!(run.stderr.contains("is silent"), "{run:?}");
}

#[tokio::test]
async fn kas_that_dies_leaves_a_request_unknown_and_a_read_harmless() {
    let server = Server::start().await;
    // An empty SETTINGS frame: this is an HTTP/2 server, and then it is gone.
    let address = fake::answering(&[0, 0, 0, 4, 0, 0, 0, 0, 0], false).await;
    let end = ["--address", &address, "--correlation-id", "find-me"];
    let run = server.run(&[&["request", "7", "POST", "/"][..], &end].concat()).await.expect_exit(7);
    assert!(run.stderr.contains("look before you try again"), "{run:?}");
    assert!(run.stderr.ends_with(" (correlation id find-me)\n"), "{run:?}");
    for line in [["pods", "7"].as_slice(), &["agents"], &["replicas"], &["request", "7", "GET", "/"]] {
        let run = server.run(&[line, &end].concat()).await.expect_exit(3);
        assert!(run.stderr.contains("was lost"), "{run:?}");
        assert!(run.stderr.contains("had no effect"), "{run:?}");
        assert!(run.stderr.ends_with(" (correlation id find-me)\n"), "{run:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
    }
}

#[tokio::test]
async fn kas_that_is_killed_under_an_answer_is_named_with_the_id_that_was_made() {
    let server = Server::start().await;
    let mut child = server
        .command(&["request", "7", "POST", "/hang"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut begun = [0; 5];
    fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut begun)).await.unwrap();
    let id = server.metadata("x-gitlab-correlation-id").remove(0);
    assert_eq!(id.len(), 36, "kasctl made one: {id}");
    server.kill();
    let done = fake::soon(child.wait_with_output()).await.unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(7), "{said}");
    assert!(
        said.contains("its outcome is unknown") && said.contains(&format!("(correlation id {id})")),
        "{said}"
    );
}

#[tokio::test]
async fn refusals_name_who_refused() {
    let server = Server::start().await;
    for (agent, exit, words) in [
        ("52", 1, "the API server of agent 52 refused it (HTTP 403): PERMISSION_DENIED: pods is forbidden"),
        ("53", 1, "the API server of agent 53 refused it (HTTP 500): UNKNOWN: "),
        ("54", 1, "the API server of agent 54 refused it (HTTP 401): FAILED_PRECONDITION: "),
        ("55", 1, "the API server of agent 55 refused it (HTTP 400 or 422): INVALID_ARGUMENT: "),
        ("56", 5, "agent 56 did not send the request to its API server: UNAVAILABLE: "),
        ("57", 1, "agent 57 could not answer: INTERNAL: "),
        ("58", 1, &format!("kas at {} refused the call: INVALID_ARGUMENT: namespace", server.address)),
    ] {
        let run = server.run(&["pods", agent]).await.expect_exit(exit);
        assert!(run.stderr.starts_with(&format!("kasctl: {words}")), "{run:?}");
    }
    for (agent, exit, words) in [
        ("12", 1, "agent 12 refused the request: INVALID_ARGUMENT: malformed header"),
        ("13", 5, "agent 13 did not send the request to its API server: UNAVAILABLE: "),
        ("14", 7, "agent 14 took the request and did not complete it: UNAVAILABLE: "),
        ("15", 1, "agent 15 does not serve this call: UNIMPLEMENTED: "),
        ("16", 1, "agent 16 refused the request: UNAUTHENTICATED: "),
    ] {
        let run = server.run(&["request", agent, "POST", "/"]).await.expect_exit(exit);
        assert!(run.stderr.starts_with(&format!("kasctl: {words}")), "{run:?}");
    }
}

#[tokio::test]
async fn a_request_that_only_reads_never_had_an_effect() {
    let server = Server::start().await;
    for (agent, exit) in [("8", 7), ("9", 7), ("13", 5), ("14", 7)] {
        let run = server.run(&["request", agent, "GET", "/"]).await.expect_exit(exit);
        assert!(run.stderr.contains("it had no effect"), "{run:?}");
        assert!(!run.stderr.contains("may have had"), "{run:?}");
    }
    // What a program in the cluster makes of it, nobody knows.
    let proxied = "/api/v1/namespaces/a/services/b/proxy/";
    let run = server.run(&["request", "14", "GET", proxied]).await.expect_exit(7);
    assert!(run.stderr.contains("it may have had its effect"), "{run:?}");
}

#[tokio::test]
async fn other_ports_are_not_taken_for_an_api_that_refuses() {
    let server = Server::start_as(fake::Other::AgentPort).await;
    for line in [&["agents"][..], &["pods", "7"], &["replicas"], &["why", "7"], &["request", "7", "GET", "/"]]
    {
        let run = server.run(line).await.expect_exit(1);
        assert!(
            run.stderr.contains("is this the agent port? the API listener is :8153 by default"),
            "{run:?}"
        );
    }
    let server = Server::start_as(fake::Other::Web(404)).await;
    let run = server.run(&["request", "7", "POST", "/"]).await.expect_exit(3);
    assert!(run.stderr.contains("it answers HTTP 404 Not Found instead of gRPC"), "{run:?}");
    let server = Server::start_as(fake::Other::Web(504)).await;
    server.run(&["request", "7", "POST", "/"]).await.expect_exit(7);
}

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
async fn tracker_status_says_how_the_table_fares_and_what_failed_last() {
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
         its row is what others know of it\n"
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
async fn why_begins_with_the_verdict() {
    let server = Server::start().await;
    let run = server.run(&["why", "3"]).await.expect_exit(0);
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(
        lines[0],
        "agent 3 is held by 10.0.0.2:8155 (2 idle tunnels); a request here goes: \
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
             a request here goes: wait for a tunnel\n"
        ),
        "{run:?}"
    );
    assert!(run.stdout.contains("kas-0     kas-1         no      -      silent"), "{run:?}");
    assert!(run.stderr.contains("kas at 10.0.0.2:8155 did not answer"), "{run:?}");
    let run = server.run(&["why", "5"]).await.expect_exit(1);
    assert!(run.stderr.contains("refused the call: INVALID_ARGUMENT"), "{run:?}");
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
            "route": ["no tunnel here", "borrow from kas-1 at 10.0.0.2:8155"],
            "replicas": [
                {
                    "name": "kas-0", "address": {"ip": "10.0.0.1", "port": 8155},
                    "idle_tunnels": 0, "busy_tunnels": 0, "waiting": 0,
                    "beliefs": [{
                        "name": "kas-1", "holds": true,
                        "why": "kas-1 is live, has the agent at version 9: asked",
                    }],
                },
                {
                    "name": "kas-1", "address": {"ip": "10.0.0.2", "port": 8155},
                    "idle_tunnels": 2, "busy_tunnels": 0, "waiting": 0,
                    "beliefs": [{
                        "name": "kas-0", "holds": true,
                        "why": "kas-0 is live, has the agent at version 11: asked",
                    }],
                },
            ],
            "unanswered": [],
        })
    );
}

#[tokio::test]
async fn explain_tells_the_way_behind_the_answer() {
    let server = Server::start().await;
    let run = server.run(&["request", "7", "GET", "/status/404", "--explain"]).await.expect_exit(0);
    assert_eq!(run.stdout, "missing", "standard output is the answer and nothing else");
    assert_eq!(server.metadata("kas-explain"), ["1"]);
    let told: Vec<(&str, &str)> = run
        .stderr
        .lines()
        .skip(1)
        .map(|line| {
            let (at, rest) = line.trim_start().split_once(" ms   ").unwrap();
            assert!(at.parse::<f64>().is_ok(), "{line}");
            let (who, what) = rest.split_once("   ").unwrap();
            (who.trim(), what.trim())
        })
        .collect();
    assert_eq!(
        told,
        [
            ("kasctl", &*format!("connected to {}", server.address)),
            ("kasctl", "sent the request"),
            ("kasctl", "first byte of the answer"),
            ("kasctl", "last byte of the answer"),
            ("kas", "arrived at 10.0.0.1:8155"),
            ("kas", "tunnel lent by 10.0.0.2:8155"),
            ("kas", "the answer ended"),
        ],
        "{run:?}"
    );
    assert!(run.stderr.contains(" 12.345 ms   kas      tunnel lent"), "{run:?}");
    let columns: Vec<usize> = run.stderr.lines().skip(1).map(|line| line.find(" ms ").unwrap()).collect();
    assert!(columns.windows(2).all(|two| two[0] == two[1]), "{run:?}");

    server.run(&["request", "7", "GET", "/status/404"]).await.expect_exit(0);
    assert_eq!(server.metadata("kas-explain"), [""; 0], "only when it is asked for");
}

#[tokio::test]
async fn explain_tells_the_way_of_a_failure_too() {
    let server = Server::start().await;
    for (agent, exit) in [("10", 5), ("8", 7)] {
        let run = server.run(&["request", agent, "POST", "/", "--explain"]).await.expect_exit(exit);
        assert!(run.stderr.contains("tunnel lent by 10.0.0.2:8155"), "{run:?}");
        assert!(run.stderr.contains("ended without a complete answer"), "{run:?}");
        assert!(
            run.stderr.lines().last().unwrap().starts_with("kasctl: kas at "),
            "the failure is last: {run:?}"
        );
    }
    // One that hangs is told of when it is interrupted.
    let mut child = server
        .command(&["request", "7", "GET", "/hang", "--explain"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut begun = [0; 5];
    fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut begun)).await.unwrap();
    fake::interrupt(&child);
    let done = fake::soon(child.wait_with_output()).await.unwrap();
    assert_eq!(done.status.code(), Some(130));
    assert!(String::from_utf8(done.stderr).unwrap().contains("tunnel lent by"));
    // An older kas says nothing, and that is said.
    let other = Server::start_as(fake::Other::AgentPort).await;
    let run = other.run(&["request", "7", "GET", "/", "--explain"]).await.expect_exit(1);
    assert!(run.stderr.contains("kas did not tell the way"), "{run:?}");
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
    let mut error = async || fake::soon(errors.next_line()).await.unwrap().unwrap();
    assert_eq!(
        error().await,
        "kasctl: warning: kas at 10.0.0.9:8155 did not answer (connection refused): the list is partial"
    );
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = fake::soon(lines.next_line()).await.unwrap().unwrap();
        let cells: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        (cells[0].clone(), cells[1].clone(), cells.last().unwrap().clone())
    };
    let row = |event: &str, agent: &str, kas: &str| (event.to_owned(), agent.to_owned(), kas.to_owned());
    assert_eq!(next().await, row("EVENT", "AGENT", "KAS"));
    assert_eq!(next().await, row("present", "6", "10.0.0.1:8155"));
    // It comes back under the same connection, on another replica.
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
async fn watch_in_json_tells_when_the_silent_replicas_change() {
    let server = Server::start().await;
    let mut child = server
        .command(&["agents", "--watch", "--agent", "2", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = fake::soon(lines.next_line()).await.unwrap().unwrap();
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
        "what is not new is not told: {told}"
    );
    server.relocate(2, "stage", 4, 22, "10.0.0.2").await;
    let moved = next().await;
    assert_eq!(
        (&moved["event"], &moved["agent"]["kas_address"]["ip"]),
        (&json!("connected"), &json!("10.0.0.2"))
    );
    child.kill().await.unwrap();
}

#[tokio::test]
async fn time_limit_is_told_to_kas_and_kept() {
    let server = Server::start().await;
    let run = server.run(&["pods", "50", "--timeout", "2s"]).await.expect_exit(1);
    assert!(run.stderr.contains("allow more with --timeout"), "{run:?}");
    assert_eq!(server.metadata("grpc-timeout"), ["2000000u"]);
    let run = server.run(&["pods", "51", "--timeout", "100ms"]).await.expect_exit(7);
    assert!(run.stderr.contains("DEADLINE_EXCEEDED"), "{run:?}");
}

#[tokio::test]
async fn unix_socket_is_an_address() {
    let server = Server::start_unix().await;
    let run = server.run(&["agents", "-o", "json"]).await.expect_exit(0);
    assert_eq!(json_of(&run)["agents"][0]["name"], "prod");
}

#[tokio::test]
async fn tls_is_verified() {
    let server = Server::start_tls().await;
    let ca = server.dir.path().join("ca.pem");
    let ca = ca.to_str().unwrap();
    server.run(&["agents", "--ca-file", ca, "--server-name", "kas.test"]).await.expect_exit(0);
    let run = server.run(&["agents", "--ca-file", ca]).await.expect_exit(3);
    assert!(run.stderr.contains("--server-name"), "{run:?}");
    let run = server.run(&["agents", "--server-name", "kas.test"]).await.expect_exit(3);
    assert!(run.stderr.contains("--ca-file"), "{run:?}");
    let run = server.run(&["agents", "--ca-file", "/does/not/exist"]).await.expect_exit(3);
    assert!(run.stderr.contains("cannot read certificates from /does/not/exist: "), "{run:?}");
    assert!(run.stderr.contains("No such file"), "{run:?}");
    let plain = server.address.replace("grpcs", "grpc");
    let run = server.run(&["agents", "--address", &plain]).await.expect_exit(3);
    assert!(run.stderr.contains("grpcs://"), "{run:?}");
    let run = server.run(&["agents", "--address", &plain, "--ca-file", ca]).await.expect_exit(2);
    assert!(run.stderr.contains("need an address that begins with grpcs://"), "{run:?}");

    let plain = Server::start().await;
    let run = plain
        .run(&["agents", "--address", &plain.address.replace("grpc", "grpcs"), "--ca-file", ca])
        .await
        .expect_exit(3);
    assert!(run.stderr.contains("its address begins with grpc://"), "{run:?}");
}

#[tokio::test]
async fn api_token_is_accepted_by_kas() {
    let server = Server::start().await;
    let run = server.run(&["token", "api", "--ttl", "1h", "--issuer", "me"]).await.expect_exit(0);
    let claims = server.verify(run.stdout.trim_end()).unwrap();
    assert_eq!((&claims["iss"], &claims["aud"]), (&json!("me"), &json!("gitlab-kas")));
    let at = |name: &str| claims[name].as_u64().unwrap();
    assert_eq!((at("exp") - at("iat"), at("iat") - at("nbf")), (3600, 5));
}

#[tokio::test]
async fn agent_token_goes_to_a_private_file_that_is_never_overwritten() {
    let server = Server::start().await;
    let file = server.dir.path().join("agent.token");
    let path = file.to_str().unwrap();
    let line = ["token", "agent", "--id", "7", "--name", "demo", "--project", "3", "--token-file", path];
    let run = server.run(&line).await.expect_exit(0);
    let token = std::fs::read(&file).unwrap();
    assert_eq!(token.len(), 43, "256 bits, no newline");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let hash = ids::TokenHash::of(&token).to_hex();
    assert_eq!(
        run.stdout,
        format!("  - id: 7\n    name: demo\n    project_id: 3\n    tokens:\n      - sha256:{hash}\n")
    );
    assert_eq!(run.stderr, "");
    let run = server.run(&line).await.expect_exit(1);
    assert_eq!(
        (run.stdout.as_str(), run.stderr),
        ("", format!("kasctl: cannot create {path}: it exists already\n"))
    );
    assert_eq!(std::fs::read(&file).unwrap(), token);

    let run = server.run(&["token", "hash", path]).await.expect_exit(0);
    assert_eq!((run.stdout, run.stderr.as_str()), (format!("sha256:{hash}\n"), ""));
    std::fs::write(&file, [&token[..], b"\n"].concat()).unwrap();
    let run = server.run(&["token", "hash", path]).await.expect_exit(0);
    assert_eq!(run.stdout, format!("sha256:{hash}\n"));
    assert!(run.stderr.contains("newline"), "{run:?}");
    std::fs::write(&file, "two words").unwrap();
    server.run(&["token", "hash", path]).await.expect_exit(1);
}

#[tokio::test]
async fn agent_token_without_a_file_is_shown_once() {
    let server = Server::start().await;
    let run =
        server.run(&["token", "agent", "--id", "7", "--name", "demo", "--project", "3"]).await.expect_exit(0);
    let (said, token) = run.stderr.trim_end().split_once('\n').unwrap();
    assert!(said.contains("shown once"), "{run:?}");
    assert!(run.stdout.contains(&ids::TokenHash::of(token.as_bytes()).to_hex()), "{run:?}");
    assert!(!run.stdout.contains(token));
}

#[tokio::test]
async fn agents_file_is_made_and_appended_to_and_takes_nobody_twice() {
    let server = Server::start().await;
    let file = server.dir.path().join("agents.yaml");
    let path = file.to_str().unwrap();
    let token_file = server.dir.path().join("token");
    let line = |id: &'static str, name: &'static str| {
        vec!["token", "agent", "--id", id, "--name", name, "--project", "3", "--agents-file", path]
    };
    let item = |id: &str, name: &str, token: &[u8]| {
        let hash = ids::TokenHash::of(token).to_hex();
        format!("  - id: {id}\n    name: {name}\n    project_id: 3\n    tokens:\n      - sha256:{hash}\n")
    };
    let mode = |file| std::fs::metadata(file).unwrap().permissions().mode() & 0o777;

    // Absent: it is made, and the token is all that goes to standard output.
    let run = server.run(&line("7", "demo")).await.expect_exit(0);
    assert_eq!(run.stdout.len(), 43, "the token, without a newline: {run:?}");
    let mut expected = format!("agents:\n{}", item("7", "demo", run.stdout.as_bytes()));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    assert_eq!(mode(&file), 0o600);
    assert_eq!(run.stderr, format!("kasctl: added agent 7, demo, to {path}\n"));

    // There: it is appended, and the mode stays.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    let mut other = line("8", "other");
    other.extend(["--token-file", token_file.to_str().unwrap()]);
    let run = server.run(&other).await.expect_exit(0);
    assert_eq!(run.stdout, "");
    expected += &item("8", "other", &std::fs::read(&token_file).unwrap());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    assert_eq!((mode(&file), mode(&token_file)), (0o640, 0o600));

    // Twice: refused, and nothing is left behind.
    let unused = server.dir.path().join("unused");
    for (id, name, words) in [
        ("7", "fresh", "agent 7 is in it already, as demo: take another id"),
        ("9", "other", "agent 8 has the name other already: take another name"),
    ] {
        let mut again = line(id, name);
        again.extend(["--token-file", unused.to_str().unwrap()]);
        let run = server.run(&again).await.expect_exit(1);
        assert!(
            run.stderr.starts_with(&format!("kasctl: cannot add the agent to {path}: {words}")),
            "{run:?}"
        );
        assert_eq!(run.stdout, "");
        assert!(!unused.exists());
    }
    // A token file that exists already: the agent is not added either.
    let mut taken = line("9", "fresh");
    taken.extend(["--token-file", token_file.to_str().unwrap()]);
    server.run(&taken).await.expect_exit(1);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    let names: Vec<_> =
        std::fs::read_dir(server.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".new")), "{names:?}");
}

#[tokio::test]
async fn agents_file_may_be_a_link_and_must_be_a_list() {
    let server = Server::start().await;
    let at = |name: &str| server.dir.path().join(name).to_str().unwrap().to_owned();
    let line = |path: &str| {
        ["token", "agent", "--id", "7", "--name", "demo", "--project", "3", "--agents-file", path]
            .map(str::to_owned)
    };
    let run = async |path: &str| {
        let line = line(path);
        server.run(&line.each_ref().map(String::as_str)).await
    };
    // What kas leaves there at its first start.
    std::fs::write(at("real"), "# The agents that kas knows.\nagents:\n").unwrap();
    std::os::unix::fs::symlink("real", at("link")).unwrap();
    run(&at("link")).await.expect_exit(0);
    assert!(std::fs::symlink_metadata(at("link")).unwrap().is_symlink());
    let text = std::fs::read_to_string(at("real")).unwrap();
    assert!(text.starts_with("# The agents that kas knows.\nagents:\n  - id: 7\n"), "{text}");

    std::fs::write(at("kas.yaml"), "api:\n  listen: {}\n").unwrap();
    let refused = run(&at("kas.yaml")).await.expect_exit(1);
    assert!(refused.stderr.contains("it is not a list of agents"), "{refused:?}");
    assert_eq!(refused.stdout, "");
    let refused = run(&at("")).await.expect_exit(1);
    assert!(refused.stderr.contains("it is not a regular file"), "{refused:?}");
    let refused = run(&at("none/agents.yaml")).await.expect_exit(1);
    assert!(refused.stderr.contains("none/agents.yaml: no such file or directory"), "{refused:?}");
}

#[tokio::test]
async fn agents_that_are_added_at_once_are_all_there() {
    let server = Server::start().await;
    let file = server.dir.path().join("agents.yaml");
    let path = file.to_str().unwrap();
    let mut children = Vec::new();
    for id in 1..=8 {
        let (id, name) = (id.to_string(), format!("agent-{id}"));
        let line = ["token", "agent", "--id", &id, "--name", &name, "--project", "3", "--agents-file", path];
        children.push(server.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    }
    for mut child in children {
        assert_eq!(fake::soon(child.wait()).await.unwrap().code(), Some(0));
    }
    let text = std::fs::read_to_string(&file).unwrap();
    assert_eq!(text.matches("  - id: ").count(), 8, "{text}");
}

#[tokio::test]
async fn token_that_nobody_read_is_not_made_known_to_kas() {
    let server = Server::start().await;
    let file = server.dir.path().join("agents.yaml");
    let line = [
        "token",
        "agent",
        "--id",
        "7",
        "--name",
        "demo",
        "--project",
        "3",
        "--agents-file",
        file.to_str().unwrap(),
    ];
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = server.command(&line).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let done = fake::soon(child.wait_with_output()).await.unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.starts_with("kasctl: cannot write the output: "), "{said}");
    assert!(!file.exists());
}

#[tokio::test]
async fn command_line_is_checked_before_anything_is_sent() {
    let server = Server::start().await;
    for line in [
        &["pods", "0"][..],
        &["pods", "-5"],
        &["why", "0"],
        &["why"],
        &["replicas", "7"],
        &["pods", "7", "--page-size", "0"],
        &["request", "7", "GET", "no-slash"],
        &["request", "7", "GET", "/", "-H", "no colon"],
        &["agents", "--address", "http://kas"],
        &["agents", "--timeout", "30"],
        &["agents", "--correlation-id", "a b"],
        &["token", "agent", "--id", "1", "--name", "Not Legal", "--project", "1"],
        &["nonsense"],
        &[],
    ] {
        let run = server.run(line).await.expect_exit(2);
        assert_eq!(run.stdout, "", "{run:?}");
    }
    assert_eq!(server.token_ids(), [""; 0]);
}

#[tokio::test]
async fn help_teaches_and_version_names_the_commit() {
    let server = Server::start().await;
    let run = server.run(&["--version"]).await.expect_exit(0);
    assert_eq!(
        run.stdout,
        format!("kasctl {}, commit: {}\n", runtime::version::VERSION, runtime::version::COMMIT)
    );
    for line in [
        &["agents"][..],
        &["pods"],
        &["replicas"],
        &["why"],
        &["request"],
        &["token", "api"],
        &["token", "agent"],
        &["token", "hash"],
        &["completions"],
    ] {
        let run = server.run(&[line, &["--help"]].concat()).await.expect_exit(0);
        assert!(run.stdout.contains("Examples:"), "{run:?}");
    }
    let run = server.run(&["--help"]).await.expect_exit(0);
    for code in [0, 1, 2, 3, 4, 5, 6, 7, 22, 130] {
        assert!(
            run.stdout.lines().any(|line| line.split_whitespace().next() == Some(&code.to_string())),
            "{code}"
        );
    }
}

#[tokio::test]
async fn completions_name_the_commands() {
    let server = Server::start().await;
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = server.run(&["completions", shell]).await.expect_exit(0);
        assert!(
            ["agents", "secret-file", "replicas", "why", "explain", "agents-file"]
                .iter()
                .all(|word| run.stdout.contains(word)),
            "{shell}"
        );
    }
}

#[tokio::test]
async fn slow_reader_does_not_lose_the_connection() {
    // A machine that stands still for some seconds is not to be taken for a kasctl that does not answer.
    let within = Duration::from_secs(6);
    let server = Server::start_with_pings([Duration::from_millis(100), within]).await;
    let mut child = server
        .command(&["request", "7", "GET", "/endless"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Longer than the server waits for its pings: the pipe is full, and kasctl answers nonetheless.
    let longer = within + Duration::from_secs(1);
    assert!(tokio::time::timeout(longer, child.wait()).await.is_err(), "it stays");
    let mut stdout = child.stdout.take().unwrap();
    let mut much = vec![0; 4 * 1024 * 1024];
    fake::soon(stdout.read_exact(&mut much)).await.unwrap();
    child.kill().await.unwrap();
}
