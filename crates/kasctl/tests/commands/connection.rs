//! The connection to kas: time limit, sockets, TLS and keepalive.

use std::{process::Stdio, time::Duration};

use tokio::io::AsyncReadExt as _;

use crate::fake::Server;
use crate::json_of;

#[tokio::test]
async fn time_limit_is_sent_to_kas_and_enforced() {
    let server = Server::start().await;
    let run = server.run(&["pods", "50", "--timeout", "2s"]).await.expect_exit(1);
    assert!(run.stderr.contains("set a longer limit with --timeout"), "{run:?}");
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
    assert!(run.stderr.contains("need an address that starts with grpcs://"), "{run:?}");

    let plain = Server::start().await;
    let run = plain
        .run(&["agents", "--address", &plain.address.replace("grpc", "grpcs"), "--ca-file", ca])
        .await
        .expect_exit(3);
    assert!(run.stderr.contains("use an address that starts with grpc://"), "{run:?}");
}

#[tokio::test]
async fn slow_reader_does_not_lose_the_connection() {
    // A machine that stalls for some seconds must not look like a kasctl that does not respond.
    let within = Duration::from_secs(6);
    let server = Server::start_with_pings([Duration::from_millis(100), within]).await;
    let mut child = server
        .command(&["request", "7", "GET", "/endless"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Longer than the server waits for its pings: the pipe is full, and kasctl responds nonetheless.
    let longer = within + Duration::from_secs(1);
    assert!(tokio::time::timeout(longer, child.wait()).await.is_err(), "it stays");
    let mut stdout = child.stdout.take().unwrap();
    let mut much = vec![0; 4 * 1024 * 1024];
    crate::fake::soon(stdout.read_exact(&mut much)).await.unwrap();
    child.kill().await.unwrap();
}
