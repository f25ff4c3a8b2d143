//! Failures: their exit codes and messages.

use std::process::Stdio;

use tokio::io::AsyncReadExt as _;

use crate::fake::Server;

#[tokio::test]
async fn a_disconnected_agent_has_its_own_exit_code() {
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
async fn the_outcome_that_kas_reports_determines_the_exit_code() {
    let server = Server::start().await;
    let run = server.run(&["request", "10", "POST", "/"]).await.expect_exit(5);
    assert!(run.stderr.contains("trying again is safe"), "{run:?}");
    let run = server.run(&["request", "8", "POST", "/", "--timeout", "5s"]).await.expect_exit(7);
    assert!(run.stderr.contains("check before you try again"), "{run:?}");
    assert_eq!(run.stdout, "half", "the part before is printed");
    let run = server.run(&["request", "9", "POST", "/"]).await.expect_exit(7);
    assert!(run.stderr.contains("ended before it was complete"), "{run:?}");
    let run = server.run(&["request", "11", "GET", "/"]).await.expect_exit(7);
    assert!(run.stderr.contains("not in the order of the protocol"), "{run:?}");
}

#[tokio::test]
async fn a_wrong_secret_is_named_and_not_authenticated() {
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
async fn a_missing_or_invalid_secret_is_named() {
    let server = Server::start().await;
    let dir = server.dir.path().to_str().unwrap();
    let missing = |command: &mut tokio::process::Command| {
        command.env_remove("KASCTL_SECRET_FILE").env("KAS_STATE_DIR", dir);
    };
    let run = server.run_with(&["agents"], missing).await.expect_exit(4);
    assert!(
        run.stderr.starts_with(&format!("kasctl: no API secret at {dir}/api-secret: kas creates it")),
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
async fn without_kas_the_exit_code_is_unreachable() {
    let server = Server::start().await;
    // Bound and dropped, so no process listens there.
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
async fn other_servers_are_recognized() {
    let server = Server::start().await;
    for (answer, words) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "speaks HTTP/1"),
        (&[0x15, 3, 3, 0, 2, 2, 40][..], "speaks TLS"),
        (&b"-ERR\r\n"[..], "does not speak gRPC"),
        (&b""[..], "without a response"),
    ] {
        let address = crate::fake::answering(answer, false).await;
        let run = server.run(&["request", "7", "GET", "/", "--address", &address]).await.expect_exit(3);
        assert!(run.stderr.contains(words), "{run:?}");
    }
    let address = crate::fake::answering(b"", true).await;
    let run = server.run(&["pods", "7", "--address", &address, "--timeout", "1s"]).await.expect_exit(3);
    assert!(run.stderr.contains("does not respond"), "{run:?}");
}

#[tokio::test]
async fn after_a_crash_of_kas_a_request_is_unknown_and_a_read_is_harmless() {
    let server = Server::start().await;
    // An empty SETTINGS frame, as of an HTTP/2 server, and then the end of the connection.
    let address = crate::fake::answering(&[0, 0, 0, 4, 0, 0, 0, 0, 0], false).await;
    let end = ["--address", &address, "--correlation-id", "find-me"];
    let run = server.run(&[&["request", "7", "POST", "/"][..], &end].concat()).await.expect_exit(7);
    assert!(run.stderr.contains("check before you try again"), "{run:?}");
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
async fn after_a_crash_during_a_response_the_correlation_id_is_printed() {
    let server = Server::start().await;
    let mut child = server
        .command(&["request", "7", "POST", "/hang"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut begun = [0; 5];
    crate::fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut begun)).await.unwrap();
    let id = server.metadata("x-gitlab-correlation-id").remove(0);
    assert_eq!(id.len(), 36, "kasctl made one: {id}");
    server.kill();
    let done = crate::fake::soon(child.wait_with_output()).await.unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(7), "{said}");
    assert!(
        said.contains("its outcome is unknown") && said.contains(&format!("(correlation id {id})")),
        "{said}"
    );
}

#[tokio::test]
async fn a_refusal_names_its_origin() {
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
        ("14", 7, "agent 14 received the request but did not complete it: UNAVAILABLE: "),
        ("15", 1, "agent 15 does not serve this call: UNIMPLEMENTED: "),
        ("16", 1, "agent 16 refused the request: UNAUTHENTICATED: "),
    ] {
        let run = server.run(&["request", agent, "POST", "/"]).await.expect_exit(exit);
        assert!(run.stderr.starts_with(&format!("kasctl: {words}")), "{run:?}");
    }
}

#[tokio::test]
async fn a_request_that_only_reads_has_no_effect() {
    let server = Server::start().await;
    for (agent, exit) in [("8", 7), ("9", 7), ("13", 5), ("14", 7)] {
        let run = server.run(&["request", agent, "GET", "/"]).await.expect_exit(exit);
        assert!(run.stderr.contains("it had no effect"), "{run:?}");
        assert!(!run.stderr.contains("may have had"), "{run:?}");
    }
    // The effect of a request to a program in the cluster is not known.
    let proxied = "/api/v1/namespaces/a/services/b/proxy/";
    let run = server.run(&["request", "14", "GET", proxied]).await.expect_exit(7);
    assert!(run.stderr.contains("it may have had an effect"), "{run:?}");
}

#[tokio::test]
async fn other_ports_are_not_mistaken_for_the_api() {
    let server = Server::start_as(crate::fake::Other::AgentPort).await;
    for line in [&["agents"][..], &["pods", "7"], &["replicas"], &["why", "7"], &["request", "7", "GET", "/"]]
    {
        let run = server.run(line).await.expect_exit(1);
        assert!(
            run.stderr.contains("is this the agent port? the API listener is :8153 by default"),
            "{run:?}"
        );
    }
    let server = Server::start_as(crate::fake::Other::Web(404)).await;
    let run = server.run(&["request", "7", "POST", "/"]).await.expect_exit(3);
    assert!(run.stderr.contains("it responds with HTTP 404 Not Found instead of gRPC"), "{run:?}");
    let server = Server::start_as(crate::fake::Other::Web(504)).await;
    server.run(&["request", "7", "POST", "/"]).await.expect_exit(7);
}
