//! `kasctl probe`.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout},
};

use crate::{
    fake::{Server, interrupt, soon},
    json_of,
};

/// Nothing here depends on how fast this machine is.
const PATIENT: [&str; 4] = ["--timeout", "60s", "--noticed-after", "60s"];

/// A running probe, and the lines that it prints.
struct Probe {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Probe {
    async fn start(server: &Server, args: &[&str]) -> Self {
        let all = [&["probe"], args, &["--for", "10m", "--through", &server.address], &PATIENT].concat();
        let mut child = server.command(&all).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads lines until one contains this text.
    async fn line(&mut self, text: &str) -> String {
        soon(async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("a line with the text");
                if line.contains(text) {
                    return line;
                }
            }
        })
        .await
    }

    /// Returns the exit code.
    async fn code(mut self) -> Option<i32> {
        soon(self.child.wait()).await.unwrap().code()
    }
}

#[tokio::test]
async fn requests_that_are_answered_are_not_noticed() {
    let server = Server::start().await;
    let file = server.dir.path().join("probe.json");
    let args = ["probe", "7", "--for", "1s", "--rate", "50", "--through", &server.address, "-o", "json"];
    let json_file = ["--json", file.to_str().unwrap()];
    let run = server.run(&[&args[..], &PATIENT, &json_file].concat()).await.expect_exit(0);
    let report = json_of(&run);
    assert_eq!(report["verdict"]["noticed"], false);
    assert_eq!(report["verdict"]["reasons"], json!([]));
    let text = report["verdict"]["text"].as_str().unwrap();
    assert!(text.starts_with("Nobody would have noticed: all 50 requests were answered"), "{text}");
    let nothing = json!({"not_started": 0, "unknown": 0, "refused": 0, "cluster": 0, "not_sent": 0});
    assert_eq!(report["failed"], nothing);
    let requests = json!({"due": 50, "answered": 50, "retried": 0, "failed": 0, "late": 0, "unfinished": 0});
    assert_eq!(report["requests"], requests);
    assert_eq!(report["agents"], json!([{"id": 7, "due": 50, "answered": 50, "failed": 0}]));
    assert_eq!(report["entered"], json!([{"address": server.address, "requests": 50, "failed": 0}]));
    assert_eq!(report["through"]["how"], "given");
    assert!(report["latency_ms"]["p50"].as_f64().unwrap() > 0.0);
    assert!(report["latency_ms"]["p99"].as_f64() <= report["latency_ms"]["max"].as_f64());
    assert_eq!(report["slowest"].as_array().unwrap().len(), 10);
    // The lines are beside the document.
    assert!(run.stderr.contains("GET /version of agent 7\n"), "{run:?}");
    assert!(run.stderr.contains("\nNobody would have noticed: "), "{run:?}");
    let saved: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved, report);
    // It only reads, and can be found in the logs.
    assert_eq!(server.metadata("kas-agent-id"), ["7"]);
    assert_eq!(server.metadata("kas-explain"), ["1"]);
    assert!(server.metadata("x-gitlab-correlation-id")[0].ends_with("-49"));
}

#[tokio::test]
async fn an_interrupt_ends_it_with_the_verdict() {
    let server = Server::start().await;
    let mut probe = Probe::start(&server, &["7"]).await;
    probe.line("all agents answer").await;
    let second = probe.line(" ok ").await;
    assert!(second.contains("failed 0 "), "{second}");
    assert!(
        second.contains(&format!("entered {}=", server.address.trim_start_matches("grpc://"))),
        "{second}"
    );
    interrupt(&probe.child);
    let verdict = probe.line("would have noticed").await;
    assert!(verdict.starts_with("Nobody would have noticed: all "), "{verdict}");
    assert_eq!(probe.code().await, Some(0));
}

#[tokio::test]
async fn a_lost_kas_is_noticed() {
    let server = Server::start().await;
    let mut probe = Probe::start(&server, &["7"]).await;
    probe.line(" ok ").await;
    server.kill();
    let what = probe.line(" failed, the first ").await;
    assert!(what.contains("not started") || what.contains("unknown outcome"), "{what}");
    interrupt(&probe.child);
    let verdict = probe.line("would have noticed").await;
    assert!(verdict.starts_with("Somebody would have noticed: of "), "{verdict}");
    assert_eq!(probe.code().await, Some(1));
}

#[tokio::test]
async fn a_reader_that_leaves_ends_it() {
    let server = Server::start().await;
    let mut probe = Probe::start(&server, &["7"]).await;
    probe.line(" ok ").await;
    let Probe { mut child, lines } = probe;
    drop(lines);
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn it_begins_only_while_all_is_well() {
    let server = Server::start().await;
    let through = ["--through", &server.address, "--for", "1s"];
    for (args, says) in [
        (&["10"][..], "could not reach agent 10: UNAVAILABLE: not_started; begin while all is well"),
        (&["7", "--path", "/status/404"], "could not reach agent 7: the API server answered 404 Not Found"),
        (&["9"], "could not reach agent 9: the answer ended before it was complete"),
        (&["name=nobody"], "no connected agent matches"),
        // Two agents are connected that do not serve.
        (&["all"], "could not reach agent "),
    ] {
        let run = server.run(&[&["probe"], args, &through].concat()).await.expect_exit(2);
        assert!(run.stderr.starts_with("kasctl: the probe did not run: "), "{run:?}");
        assert!(run.stderr.contains(says), "{args:?}: {run:?}");
        assert_eq!(run.stdout, "", "{run:?}");
    }
    for (args, says) in [
        (&["--address", "grpc://127.0.0.1:1"][..], "cannot reach kas at grpc://127.0.0.1:1"),
        (&["--secret-file", "/does/not/exist"], "cannot read the API secret"),
        (&["--json", "/does/not/exist"], "cannot write /does/not/exist"),
        (&["--timeout", "0"], "--timeout must not be 0"),
        (&["--path", "/api/v1/namespaces/a/services/b/proxy/delete"], "requests without effects"),
    ] {
        let run = server.run(&[&["probe", "7", "--for", "1s"], args].concat()).await.expect_exit(2);
        assert!(run.stderr.contains(says), "{args:?}: {run:?}");
    }
}

#[tokio::test]
async fn replicas_that_cannot_be_reached_are_named_and_the_address_is_used() {
    let server = Server::start().await;
    // The addresses of the fake's replicas belong to no process.
    let args = ["probe", "7", "--for", "1s", "-o", "json"];
    let run = server.run(&[&args[..], &PATIENT].concat()).await.expect_exit(0);
    let report = json_of(&run);
    assert_eq!(report["through"]["how"], "address");
    let why = report["through"]["why"].as_str().unwrap();
    assert!(why.starts_with("replica kas-0 cannot be reached directly at 10.0.0.1:"), "{why}");
    assert_eq!(report["entered"][0]["address"], json!(server.address));
    assert!(run.stderr.contains(" only: replica kas-0 cannot be reached directly"), "{run:?}");
}
