//! `kasctl request`.

use std::process::Stdio;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::fake::Server;
use crate::json_of;

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
                "User-Agent": [format!("kasctl/{}", process::version::VERSION)],
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
        crate::fake::soon(stdout.read_exact(&mut echo)).await.unwrap();
        assert_eq!(&echo, piece, "each piece comes back before the next is written");
    }
    drop(stdin);
    assert_eq!(crate::fake::soon(child.wait()).await.unwrap().code(), Some(0));
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
    assert_eq!(crate::fake::soon(child.wait()).await.unwrap().code(), Some(5));
}

#[tokio::test]
async fn interrupt_cancels_the_request() {
    let server = Server::start().await;
    let mut child = server.command(&["request", "7", "GET", "/hang"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut begun = [0; 5];
    crate::fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut begun)).await.unwrap();
    assert_eq!(&begun, b"begun");
    crate::fake::interrupt(&child);
    assert_eq!(crate::fake::soon(child.wait()).await.unwrap().code(), Some(130));
    crate::fake::soon(server.cancelled()).await;
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
    crate::fake::soon(child.stdout.as_mut().unwrap().read_exact(&mut some)).await.unwrap();
    drop(child.stdout.take());
    let done = crate::fake::soon(child.wait_with_output()).await.unwrap();
    assert_eq!((done.status.code(), done.stderr.as_slice()), (Some(0), &b""[..]));
}
