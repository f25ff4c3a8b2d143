//! `kasctl request --explain`.

use std::process::Stdio;

use tokio::io::AsyncReadExt as _;

use crate::fake::Server;

#[tokio::test]
async fn explain_prints_the_route_after_the_response() {
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
            ("kasctl", "first byte of the response"),
            ("kasctl", "last byte of the response"),
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
async fn explain_prints_the_route_of_a_failure() {
    let server = Server::start().await;
    for (agent, exit) in [("10", 5), ("8", 7)] {
        let run = server.run(&["request", agent, "POST", "/", "--explain"]).await.expect_exit(exit);
        assert!(run.stderr.contains("tunnel lent by 10.0.0.2:8155"), "{run:?}");
        assert!(run.stderr.contains("ended without a complete response"), "{run:?}");
        assert!(
            run.stderr.lines().last().unwrap().starts_with("kasctl: kas at "),
            "the failure is last: {run:?}"
        );
    }
    // A hanging request is explained when it is interrupted.
    let mut child = server
        .command(&["request", "7", "GET", "/hang", "--explain"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut begun = [0; 5];
    crate::fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut begun)).await.unwrap();
    crate::fake::interrupt(&child);
    let done = crate::fake::soon(child.wait_with_output()).await.unwrap();
    assert_eq!(done.status.code(), Some(130));
    assert!(String::from_utf8(done.stderr).unwrap().contains("tunnel lent by"));
    // An older kas reports nothing, and the output says so.
    let other = Server::start_as(crate::fake::Other::AgentPort).await;
    let run = other.run(&["request", "7", "GET", "/", "--explain"]).await.expect_exit(1);
    assert!(run.stderr.contains("no steps of kas"), "{run:?}");
}
