//! Behaviour that a real API server does not show on demand: abort, stay silent, respond early, close.

use std::time::Duration;

use agentk::module::Modules;
use grpc::Code;
use proto::gitlab::agent::grpctool::http_response;
use tokio::{
    net::TcpListener,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::support::{
    Caller, NEVER, Peer, Reply, at, call, fetch, get, leaving, listen, modules, request, within,
};

#[tokio::test]
async fn a_get_has_no_body_and_is_prefixed_with_the_path_of_the_server() {
    let (listener, url) = listen().await;
    let modules = modules(&at(format!("{url}/k8s/c-1/"))).await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        let head = peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nset-x: 1\r\nset-x: 2\r\n\r\nhi").await;
        head
    };
    let mut get =
        request("GET", "/api/v1/p ods?b=1&a=x&b=0", &[("Accept", "*/*"), ("Authorization", "Bearer caller")]);
    get.header.insert("Host".into(), get.header["Accept"].clone());
    let (head, answer) = tokio::join!(server, fetch(&modules, get, b""));
    let host = url.trim_start_matches("http://");
    assert_eq!(
        head,
        format!(
            "GET /k8s/c-1/api/v1/p%20ods?a=x&b=1&b=0 HTTP/1.1\r\naccept: */*\r\nuser-agent: gitlab-agent/v1/abc\r\n\
             host: {host}\r\n\r\n"
        )
    );
    let (header, body) = answer.unwrap();
    assert_eq!((header.status.as_str(), &body[..]), ("200 OK", &b"hi"[..]));
    assert_eq!(header.header["Set-X"].value, ["1", "2"]);
    assert_eq!(header.header["Content-Length"].value, ["2"]);
}

#[tokio::test]
async fn errors_and_redirects_of_the_api_server_are_passed_on_and_never_retried() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    for status in [
        "429 Too Many Requests",
        "503 Service Unavailable",
        "504 Gateway Timeout",
        "302 Found",
        "401 Unauthorized",
    ] {
        let server = async {
            let mut peer = Peer::accept(&listener).await;
            peer.head().await;
            peer.write(&format!(
                "HTTP/1.1 {status}\r\nlocation: /x\r\nretry-after: 0\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"
            ))
            .await;
        };
        let ((), answer) = tokio::join!(server, fetch(&modules, request("DELETE", "/p", &[]), b""));
        let (header, body) = answer.unwrap();
        assert_eq!((header.status.as_str(), &body[..]), (status, &b"x"[..]));
        assert!(
            timeout(NEVER / 3, listener.accept()).await.is_err(),
            "{status} was followed by another request"
        );
    }
}

#[tokio::test]
async fn a_connection_that_breaks_before_the_answer_fails_once() {
    let (listener, url) = listen().await;
    let modules = modules(&at(&url)).await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.until("body").await;
    };
    let ((), answer) = tokio::join!(server, fetch(&modules, request("POST", "/p", &[]), b"body"));
    let status = answer.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let host = url.trim_start_matches("http://");
    let start = format!("the connection to the Kubernetes API server at {host} broke before the response: ");
    assert!(status.message().starts_with(&start), "{status}");
    assert!(timeout(NEVER, listener.accept()).await.is_err(), "the request was sent again");
}

#[tokio::test]
async fn each_chunk_of_a_watch_is_sent_at_once_and_a_broken_watch_is_an_error() {
    let (listener, url) = listen().await;
    let modules = modules(&at(&url)).await;
    let (caller, answer) = call(&modules, &[]);
    caller.whole(get("/watch?watch=true"), b"").await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
        peer
    };
    let (mut peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    // Only the head: no byte of the body has arrived yet.
    assert_eq!(reply.header().await.status_code, 200);
    for event in ["one", "two"] {
        peer.write(&format!("3\r\n{event}\r\n")).await;
        assert_eq!(reply.data().await, event);
    }
    peer.write("5\r\nha").await;
    drop(peer);
    let (rest, trailer, status) = reply.rest().await;
    assert_eq!((&rest[..], trailer, status.code()), (&b"ha"[..], false, Code::Unavailable));
    let host = url.trim_start_matches("http://");
    let start = format!("the response of the Kubernetes API server at {host} was aborted: ");
    assert!(status.message().starts_with(&start), "{status}");
}

/// Opens a request, to which the API server answers with this head and the beginning of a body.
async fn opened(
    listener: &TcpListener,
    modules: &Modules,
    target: &str,
    head: &str,
    first: &str,
) -> (Peer, Reply, Caller) {
    let (caller, answer) = call(modules, &[]);
    caller.whole(get(target), b"").await;
    let server = async {
        let mut peer = Peer::accept(listener).await;
        peer.head().await;
        let chunk = format!("{:x}\r\n{first}\r\n", first.len());
        peer.write(&format!("HTTP/1.1 200 OK\r\n{head}\r\ntransfer-encoding: chunked\r\n\r\n{chunk}")).await;
        peer
    };
    let (peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    assert_eq!(reply.header().await.status_code, 200);
    assert_eq!(reply.data().await, first);
    (peer, reply, caller)
}

#[tokio::test]
async fn a_shutdown_ends_watches_between_two_events_and_nothing_else() {
    const JSON: &str = "content-type: application/json";
    let (listener, url) = listen().await;
    let leave = CancellationToken::new();
    let modules = leaving(&at(&url), &leave).await;
    let open = |target, head, first| opened(&listener, &modules, target, head, first);
    let mut quiet = open("/api/v1/pods?watch=1", JSON, "{}\n").await;
    let mut within_event = open("/api/v1/pods?watch=1", JSON, "{}\n{\"type\":").await;
    // A part of an event of protobuf: its length is 2.
    let protobuf = "content-type: application/vnd.kubernetes.protobuf;stream=watch";
    let mut binary = open("/api/v1/pods?watch=true", protobuf, "\0\0\0\u{2}a").await;
    let mut others = Vec::new();
    for (target, head) in [
        ("/api/v1/namespaces/a/pods/b/log?follow=1", "content-type: text/plain"),
        ("/api/v1/namespaces/a/services/b/proxy/c?watch=1", JSON),
        // Nobody sees where its events end.
        ("/api/v1/pods?watch=1", "content-type: application/json\r\ncontent-encoding: gzip"),
    ] {
        others.push(open(target, head, "x\n").await);
    }
    leave.cancel();
    let (rest, trailer, status) = quiet.1.rest().await;
    assert_eq!((&rest[..], trailer, status.code()), (&b""[..], true, Code::Ok));
    // The API server is told, too.
    assert_eq!(quiet.0.end().await, "");
    for (watch, chunk, rest) in
        [(&mut within_event, "3\r\n1}\n\r\n", &b"1}\n"[..]), (&mut binary, "1\r\nb\r\n", &b"b"[..])]
    {
        assert!(timeout(NEVER, watch.1.next()).await.is_err(), "it ends within an event");
        watch.0.write(chunk).await;
        let (got, trailer, status) = watch.1.rest().await;
        assert_eq!((&got[..], trailer, status.code()), (rest, true, Code::Ok));
    }
    // One that begins now is open for a second: client-go would otherwise list everything again.
    let begun = Instant::now();
    let (_peer, mut reply, _caller) = open("/api/v1/pods?watch=1", JSON, "{}\n").await;
    let (_, trailer, status) = reply.rest().await;
    assert_eq!((trailer, status.code()), (true, Code::Ok));
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    for (peer, reply, _) in &mut others {
        peer.write("1\r\ny\r\n").await;
        assert_eq!(reply.data().await, "y");
        peer.write("0\r\n\r\n").await;
        let (rest, trailer, status) = reply.rest().await;
        assert_eq!((rest.len(), trailer, status.code()), (0, true, Code::Ok));
    }
}

#[tokio::test]
async fn chunks_are_at_most_32_kib_and_all_bytes_arrive() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let body: String = (0..300_000).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
    };
    // `rest` checks the size of each chunk.
    let ((), answer) = tokio::join!(server, fetch(&modules, get("/"), b""));
    assert!(answer.unwrap().1 == body.as_bytes());
}

#[tokio::test]
async fn dropping_the_call_ends_the_request_while_the_api_server_is_silent() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;

    // Before the response head.
    let (caller, answer) = call(&modules, &[]);
    caller.whole(get("/"), b"").await;
    let task = tokio::spawn(answer);
    let mut peer = Peer::accept(&listener).await;
    peer.head().await;
    task.abort();
    let before = Instant::now();
    assert_eq!(peer.end().await, "");
    let took = before.elapsed();
    println!("before the head: the connection ended {took:?} after the drop");

    // In the response body.
    let (caller, answer) = call(&modules, &[]);
    caller.whole(get("/"), b"").await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n").await;
        peer
    };
    let (mut peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    reply.header().await;
    assert_eq!(reply.data().await, "x");
    assert!(timeout(NEVER, reply.next()).await.is_err());
    drop(reply);
    let before = Instant::now();
    assert_eq!(peer.end().await, "");
    let took = before.elapsed();
    println!("in the body: the connection ended {took:?} after the drop");
}

#[tokio::test]
async fn a_reset_request_ends_the_upstream_request() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;

    // After the trailer, while the API server works: the caller cancels.
    let (caller, answer) = call(&modules, &[]);
    let server = async {
        caller.header(get("/")).await;
        caller.trailer().await;
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        caller.reset().await;
        assert_eq!(peer.end().await, "");
    };
    let ((), response) = tokio::join!(server, within(answer));
    assert_eq!(Reply::new(response).status.unwrap().code(), Code::Cancelled);

    // While the response is being read.
    let (caller, answer) = call(&modules, &[]);
    let server = async {
        caller.header(get("/")).await;
        caller.trailer().await;
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
        peer
    };
    let (mut peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    reply.header().await;
    caller.reset().await;
    let (_, trailer, status) = reply.rest().await;
    assert_eq!((trailer, status.code()), (false, Code::Cancelled));
    assert_eq!(peer.end().await, "");
}

#[tokio::test]
async fn the_deadline_ends_a_request_before_and_during_its_response() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let server = async {
        let mut silent = Peer::accept(&listener).await;
        silent.head().await;
        assert_eq!(silent.end().await, "");
    };
    let (caller, answer) = call(&modules, &[("grpc-timeout", "200m")]);
    caller.whole(get("/"), b"").await;
    let ((), response) = tokio::join!(server, within(answer));
    assert_eq!(Reply::new(response).status.unwrap().code(), Code::DeadlineExceeded);

    let (caller, answer) = call(&modules, &[("grpc-timeout", "300m")]);
    caller.whole(get("/"), b"").await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx").await;
        peer
    };
    let (mut peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    reply.header().await;
    let (rest, trailer, status) = reply.rest().await;
    assert_eq!((&rest[..], trailer, status.code()), (&b"x"[..], false, Code::DeadlineExceeded));
    assert_eq!(peer.end().await, "");

    // A caller that never sends its header, and one without a deadline.
    let (_caller, answer) = call(&modules, &[("grpc-timeout", "50m")]);
    assert_eq!(Reply::new(within(answer).await).status.unwrap().code(), Code::DeadlineExceeded);
    let (_caller, answer) = call(&modules, &[("grpc-timeout", "soon")]);
    assert_eq!(Reply::new(within(answer).await).status.unwrap().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn uploads_are_streamed_with_their_length_or_chunked() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    const OK: &str = "HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n";

    // Without a length: chunked, each chunk as it arrives.
    for method in ["POST", "GET", "DELETE"] {
        let (caller, answer) = call(&modules, &[]);
        let server = async {
            caller.header(request(method, "/", &[])).await;
            caller.data("first").await;
            let mut peer = Peer::accept(&listener).await;
            let head = peer.head().await;
            assert!(
                head.contains("transfer-encoding: chunked\r\n") && !head.contains("content-length"),
                "{head}"
            );
            peer.until("5\r\nfirst\r\n").await;
            caller.data("second").await;
            peer.until("6\r\nsecond\r\n").await;
            caller.trailer().await;
            caller.end().await;
            peer.until("0\r\n\r\n").await;
            peer.write(&OK.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n")).await;
        };
        let ((), response) = tokio::join!(server, within(answer));
        let mut reply = Reply::new(response);
        assert_eq!(reply.header().await.status_code, 201);
        assert_eq!(reply.rest().await.2.code(), Code::Ok);
    }

    // With a length: it is kept, and the last byte waits for the trailer.
    let (caller, answer) = call(&modules, &[]);
    let server = async {
        caller.header(request("PUT", "/", &[("Content-Length", "11")])).await;
        caller.data("first").await;
        let mut peer = Peer::accept(&listener).await;
        let head = peer.head().await;
        assert!(head.contains("content-length: 11\r\n") && !head.contains("transfer-encoding"), "{head}");
        peer.until("first").await;
        caller.data("second").await;
        assert!(
            timeout(NEVER, peer.until("second")).await.is_err(),
            "the request was complete before its trailer"
        );
        caller.trailer().await;
        caller.end().await;
        peer.until("second").await;
        peer.write(OK).await;
        peer
    };
    let (mut peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    assert_eq!(reply.header().await.status_code, 201);
    assert_eq!(reply.rest().await.2.code(), Code::Ok);

    // A length of 0 needs no trailer, and the connection is reused.
    let (caller, answer) = call(&modules, &[]);
    let server = async {
        caller.header(request("PUT", "/", &[("Content-Length", "0")])).await;
        let head = peer.head().await;
        assert!(!head.contains("transfer-encoding"), "{head}");
        peer.write(OK).await;
        caller.trailer().await;
        caller.end().await;
    };
    let ((), response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    assert_eq!(reply.header().await.status_code, 201);
    assert_eq!(reply.rest().await.2.code(), Code::Ok);
}

#[tokio::test]
async fn uploads_without_their_trailer_close_the_connection() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    // Each: headers, the messages after the data, the code.
    for (length, how, code, text) in [
        (None, "end", Code::InvalidArgument, "expected data or trailer, got the end of the stream"),
        (None, "reset", Code::Cancelled, "cancelled"),
        (None, "header", Code::InvalidArgument, "expected data or trailer, got header"),
        (Some("4"), "end", Code::InvalidArgument, "expected data or trailer, got the end of the stream"),
        (Some("4"), "reset", Code::Cancelled, "cancelled"),
        (Some("4"), "data", Code::InvalidArgument, "the body is longer than its announced length"),
        (Some("9"), "trailer", Code::InvalidArgument, "the body is shorter than its announced length"),
    ] {
        let (caller, answer) = call(&modules, &[]);
        let headers: Vec<_> = length.iter().map(|length| ("Content-Length", *length)).collect();
        let server = async {
            caller.header(request("POST", "/", &headers)).await;
            caller.data("body").await;
            let mut peer = Peer::accept(&listener).await;
            peer.head().await;
            match how {
                "end" => caller.end().await,
                "reset" => caller.reset().await,
                "header" => caller.header(get("/")).await,
                "data" => assert!(caller.data("more").await),
                _ => caller.trailer().await,
            }
            let rest = peer.end().await;
            assert!(!rest.contains("0\r\n\r\n"), "{length:?} {how}: {rest:?}");
            if length == Some("4") {
                assert_eq!(rest, "", "{how}: a request as long as announced is complete");
            }
        };
        let ((), response) = tokio::join!(server, within(answer));
        let status = Reply::new(response).status.expect("trailers only");
        assert_eq!(status.code(), code, "{length:?} {how}: {status}");
        assert!(status.message().contains(text), "{length:?} {how}: {status}");
    }
}

#[tokio::test]
async fn an_early_response_arrives_during_the_upload() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let (caller, answer) = call(&modules, &[]);
    let server = async {
        caller.header(request("POST", "/", &[])).await;
        caller.data("x").await;
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno")
            .await;
        peer
    };
    let (peer, response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    assert_eq!(reply.header().await.status_code, 413);
    let (body, trailer, status) = reply.rest().await;
    assert_eq!((&body[..], trailer, status.code()), (&b"no"[..], true, Code::Ok));
    drop(peer);
}

#[tokio::test]
async fn back_pressure_of_the_api_server_reaches_the_caller() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let (caller, answer) = call(&modules, &[]);
    let task = tokio::spawn(answer);
    caller.header(request("POST", "/", &[])).await;
    let _peer = Peer::accept(&listener).await;
    let mut sent = 0usize;
    while let Ok(read) = timeout(NEVER, caller.data(vec![0; 32 * 1024])).await {
        assert!(read, "somebody reads");
        sent += 32 * 1024;
        assert!(sent < 64 << 20, "64 MiB went into a connection that is not read");
    }
    println!("{} KiB went into a connection that is not read", sent / 1024);
    task.abort();
}

#[tokio::test]
async fn messages_in_the_wrong_order_are_refused_by_name() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let status = async |how: &str| {
        let (caller, answer) = call(&modules, &[]);
        match how {
            "data" => assert!(caller.data("x").await),
            "trailer" => caller.trailer().await,
            "end" => caller.end().await,
            "reset" => caller.reset().await,
            "twice" => {
                caller.header(get("/")).await;
                caller.header(get("/")).await;
            }
            "get without trailer" => {
                caller.header(get("/")).await;
                caller.end().await;
            }
            "data after no length" => {
                caller.header(request("POST", "/", &[("Content-Length", "0")])).await;
                caller.data("x").await;
            }
            "after trailer" => {
                caller.header(get("/")).await;
                caller.trailer().await;
                caller.data("x").await;
            }
            "garbage" => assert!(caller.raw(bytes::Bytes::from_static(b"\0\0\0\0\x02\xff\xff")).await),
            "truncated" => {
                caller.raw(bytes::Bytes::from_static(b"\0\0\0\0\x02\x0a")).await;
                caller.end().await;
            }
            "compressed" => assert!(caller.raw(bytes::Bytes::from_static(b"\x01\0\0\0\0")).await),
            _ => assert!(caller.raw(bytes::Bytes::from_static(b"\0\0\0\0\0")).await),
        }
        let status = Reply::new(within(answer).await).status.expect("trailers only");
        (status.code(), status.message().to_owned())
    };
    for (how, text) in [
        ("data", "expected header, got data"),
        ("trailer", "expected header, got trailer"),
        ("end", "expected header, got the end of the stream"),
        ("twice", "expected data or trailer, got header"),
        ("get without trailer", "expected data or trailer, got the end of the stream"),
        ("data after no length", "expected trailer, got data"),
        ("after trailer", "expected the end of the stream, got data"),
        ("garbage", "malformed request: "),
        ("truncated", "malformed request: the stream ended inside a message"),
        ("compressed", "malformed request: unexpected compressed flag 1"),
        ("empty", "malformed request: an envelope must have exactly one field set, found 0"),
    ] {
        let (code, message) = status(how).await;
        assert_eq!(code, Code::InvalidArgument, "{how}: {message}");
        assert!(message.contains(text), "{how}: {message}");
    }
    assert_eq!(status("reset").await.0, Code::Cancelled);
    drop(listener);
}

#[tokio::test]
async fn an_unreachable_api_server_is_named_with_the_reason() {
    let (listener, url) = listen().await;
    drop(listener);
    let host = url.trim_start_matches("http://").to_owned();
    let status = fetch(&modules(&at(&url)).await, get("/"), b"").await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(
        status.message(),
        format!(
            "cannot reach the Kubernetes API server at {host}: tcp connect error: Connection refused (os error 111)"
        )
    );

    let status =
        fetch(&modules(&at("http://no-such-host.invalid:1")).await, get("/"), b"").await.unwrap_err();
    println!("{status}");
    assert_eq!(status.code(), Code::Unavailable);
    let start = "cannot reach the Kubernetes API server at no-such-host.invalid:1: dns error: ";
    assert!(status.message().starts_with(start), "{status}");

    // TLS with a server that does not speak it.
    let (listener, url) = listen().await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.write("HTTP/1.1 400 Bad Request\r\n\r\n").await;
        peer.end().await;
    };
    let modules = modules(&at(url.replace("http:", "https:"))).await;
    let ((), answer) = tokio::join!(server, fetch(&modules, get("/"), b""));
    let status = answer.unwrap_err();
    println!("{status}");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().starts_with("cannot reach the Kubernetes API server at 127.0.0.1:"), "{status}");
}

#[tokio::test]
async fn a_head_request_ends_after_its_head() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n").await;
        peer
    };
    let (_peer, answer) = tokio::join!(server, fetch(&modules, request("HEAD", "/", &[]), b""));
    let (header, body) = answer.unwrap();
    assert_eq!((header.header["Content-Length"].value[0].as_str(), body.len()), ("1000", 0));
}

#[tokio::test]
async fn headers_larger_than_a_tunnel_allows_are_an_error_and_keep_the_tunnel() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        let large = "x".repeat(70_000);
        peer.write(&format!("HTTP/1.1 200 OK\r\nx: {large}\r\ncontent-length: 0\r\n\r\n")).await;
        peer
    };
    let (mut peer, answer) = tokio::join!(server, fetch(&modules, get("/"), b""));
    assert_eq!(answer.unwrap_err().code(), Code::ResourceExhausted);
    // The next request works, even on the same connection.
    let (caller, answer) = call(&modules, &[]);
    caller.header(get("/")).await;
    caller.trailer().await;
    let server = async {
        peer.head().await;
        peer.write("HTTP/1.1 204 No Content\r\n\r\n").await;
    };
    let ((), response) = tokio::join!(server, within(answer));
    let mut reply = Reply::new(response);
    assert_eq!(reply.header().await.status, "204 No Content");
    assert!(matches!(within(reply.next()).await, Some(http_response::Message::Trailer(_))));
}
