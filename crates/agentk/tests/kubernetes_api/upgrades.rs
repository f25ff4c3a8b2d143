//! Upgraded connections to scripted API servers: exec, attach and port-forward.

use std::{collections::BTreeMap, sync::Arc};

use agentk::module::{Modules, kubernetes_api::KubernetesApi};
use grpc::Code;
use proto::gitlab::agent::{
    grpctool::http_response,
    prototool::{HttpRequest, Values},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    time::timeout,
};

use crate::support::{Caller, NEVER, Peer, Reply, at, call, fetch, get, listen, modules, request, within};

const SWITCHED: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                        X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";

/// Returns a request that asks for an upgrade.
fn ask(method: &str, protocol: &str) -> HttpRequest {
    let headers = [("Connection", "upgrade"), ("Upgrade", protocol), ("Sec-Websocket-Key", "a2V5")];
    request(method, "/api/v1/namespaces/a/pods/b/exec?command=x", &headers)
}

/// Sends the beginning of a request that asks for an upgrade, as kas does.
async fn begin(caller: &Caller, request: HttpRequest) {
    caller.header_with_length(request, Some(0)).await;
    caller.trailer().await;
}

/// An upgraded connection, with what kas and the API server hold of it.
struct Upgraded {
    caller: Caller,
    reply: Reply,
    peer: Peer,
}

impl Upgraded {
    async fn start(modules: &Modules, listener: &TcpListener) -> Self {
        let (caller, answer) = call(modules, &[]);
        begin(&caller, ask("POST", "SPDY/3.1")).await;
        let server = async {
            let mut peer = Peer::accept(listener).await;
            peer.head().await;
            peer.write(SWITCHED).await;
            peer
        };
        let (peer, response) = tokio::join!(server, within(answer));
        let mut reply = Reply::new(response);
        assert_eq!(reply.header().await.status_code, 101);
        let trailer = within(reply.next()).await;
        assert!(matches!(trailer, Some(http_response::Message::Trailer(_))), "{trailer:?}");
        Self { caller, reply, peer }
    }
}

fn values(map: &BTreeMap<String, Values>, name: &str) -> Vec<String> {
    map.get(name).map(|values| values.value.clone()).unwrap_or_default()
}

#[tokio::test]
async fn the_request_asks_for_one_upgrade_without_a_body_and_the_answer_says_it_was_made() {
    let (listener, url) = listen().await;
    let modules = modules(&at(format!("{url}/prefix"))).await;
    for (method, protocol) in [("GET", "websocket"), ("POST", "SPDY/3.1")] {
        let (caller, answer) = call(&modules, &[]);
        begin(&caller, ask(method, protocol)).await;
        let server = async {
            let mut peer = Peer::accept(&listener).await;
            let head = peer.head().await;
            let answer = SWITCHED.replace("SPDY/3.1", protocol);
            peer.write(&format!("{answer}first bytes")).await;
            (peer, head)
        };
        let ((_peer, head), response) = tokio::join!(server, within(answer));
        assert!(
            head.starts_with(&format!("{method} /prefix/api/v1/namespaces/a/pods/b/exec?command=x ")),
            "{head}"
        );
        assert!(head.contains("connection: Upgrade\r\n"), "{head}");
        assert!(head.contains(&format!("upgrade: {protocol}\r\n")), "{head}");
        assert!(head.contains("sec-websocket-key: a2V5\r\n"), "{head}");
        assert!(!head.contains("transfer-encoding"), "{head}");

        let mut reply = Reply::new(response);
        let header = reply.header().await;
        assert_eq!(header.status_code, 101);
        assert_eq!(values(&header.header, "Upgrade"), [protocol]);
        assert_eq!(values(&header.header, "Connection"), ["Upgrade"]);
        assert_eq!(values(&header.header, "X-Stream-Protocol-Version"), ["v4.channel.k8s.io"]);
        assert!(matches!(within(reply.next()).await, Some(http_response::Message::Trailer(_))));
        // What the API server sent with its answer.
        assert_eq!(reply.upgrade_data().await, "first bytes");
        drop(reply);
    }
}

#[tokio::test]
async fn every_byte_passes_in_both_directions_and_they_are_independent() {
    const PIECES: usize = 1024;
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let Upgraded { caller, mut reply, peer } = Upgraded::start(&modules, &listener).await;
    let piece = |n: usize| -> Vec<u8> { (0..16 * 1024).map(|at| (at * 31 + n * 7) as u8).collect() };
    let (mut from_agent, mut to_agent) = peer.stream.into_split();
    // Nothing of this is read for now, so it stops when the buffers are full.
    let server = tokio::spawn(async move {
        for n in 0..PIECES {
            to_agent.write_all(&piece(n)).await.unwrap();
        }
        to_agent
    });
    let client = async {
        for n in 0..PIECES {
            assert!(caller.upgrade_data(piece(n)).await);
        }
    };
    let read = async {
        let mut got = vec![0; 16 * 1024];
        for n in 0..PIECES {
            from_agent.read_exact(&mut got).await.unwrap();
            assert!(got == piece(n), "piece {n}");
        }
    };
    within(async { tokio::join!(client, read) }).await;
    assert!(!server.is_finished(), "16 MiB are not buffered");
    let mut expected = (0..PIECES).flat_map(piece);
    let mut left = PIECES * 16 * 1024;
    while left > 0 {
        let data = reply.upgrade_data().await;
        assert!((1..=32 * 1024).contains(&data.len()));
        assert!(data.iter().all(|byte| expected.next() == Some(*byte)));
        left -= data.len();
    }
    // The end of the API server's bytes is the end of the request, whatever kas still sends.
    drop((within(server).await.unwrap(), from_agent));
    assert_eq!(reply.end().await.code(), Code::Ok);
}

#[tokio::test]
async fn the_end_of_the_caller_is_passed_on_and_the_rest_of_the_api_server_still_read() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let Upgraded { caller, mut reply, mut peer } = Upgraded::start(&modules, &listener).await;
    caller.upgrade_data("last").await;
    caller.end().await;
    // The head was read by this peer, so this is the end of the connection's direction only.
    let reads = async { (peer.end().await, peer) };
    let ((got, mut peer), ()) = tokio::join!(reads, async {
        // Drives the answer, as the tunnel does.
        let polled = timeout(NEVER, reply.next()).await;
        assert!(polled.is_err(), "{polled:?}");
    });
    assert_eq!(got, "last");
    peer.write("rest").await;
    assert_eq!(reply.upgrade_data().await, "rest");
    drop(peer);
    assert_eq!(reply.end().await.code(), Code::Ok);
}

#[tokio::test]
async fn an_api_server_that_goes_on_after_the_end_of_the_caller_is_left() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let Upgraded { caller, mut reply, mut peer } = Upgraded::start(&modules, &listener).await;
    // From now on, time passes while everything waits.
    tokio::time::pause();
    caller.end().await;
    let started = tokio::time::Instant::now();
    assert_eq!(reply.end().await.code(), Code::Ok);
    assert!(started.elapsed() >= std::time::Duration::from_secs(10));
    assert_eq!(peer.end().await, "");
}

#[tokio::test]
async fn resets_are_passed_on() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    // By kas: its stream is reset, or the tunnel is dropped.
    for by_stream in [true, false] {
        let Upgraded { caller, mut reply, mut peer } = Upgraded::start(&modules, &listener).await;
        caller.upgrade_data("begun").await;
        let mut got = [0; 5];
        let reads = peer.stream.read_exact(&mut got);
        within(reads).await.unwrap();
        if by_stream {
            caller.reset().await;
            assert_eq!(reply.end().await.code(), Code::Cancelled);
        }
        drop(reply);
        let ended = within(peer.stream.read(&mut got)).await;
        assert!(ended.is_err(), "the API server sees a reset, not {ended:?}");
    }
    // By the API server.
    let Upgraded { mut reply, peer, .. } = Upgraded::start(&modules, &listener).await;
    peer.stream.set_zero_linger().unwrap();
    drop(peer);
    let status = reply.end().await;
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("upgraded connection to the Kubernetes API server broke"), "{status}");
}

#[tokio::test]
async fn a_refused_upgrade_is_an_answer_like_any_other_and_its_connection_is_not_kept() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    for sends_data in [false, true] {
        let (caller, answer) = call(&modules, &[]);
        begin(&caller, ask("GET", "websocket")).await;
        let server = async {
            let mut peer = Peer::accept(&listener).await;
            peer.head().await;
            peer.write("HTTP/1.1 403 Forbidden\r\ncontent-length: 4\r\n\r\n").await;
            peer
        };
        let (mut peer, response) = tokio::join!(server, within(answer));
        let mut reply = Reply::new(response);
        let header = reply.header().await;
        assert_eq!(header.status_code, 403);
        assert!(values(&header.header, "Upgrade").is_empty());
        if sends_data {
            // CVE-2018-1002105: the connection must not carry what follows.
            caller.upgrade_data("GET /secret HTTP/1.1\r\n\r\n").await;
            let (rest, trailer, status) = reply.rest().await;
            assert_eq!((rest.len(), trailer, status.code()), (0, false, Code::InvalidArgument));
            assert!(status.message().contains("got upgradeData"), "{status}");
        } else {
            caller.end().await;
            peer.write("nope").await;
            let (rest, trailer, status) = reply.rest().await;
            assert_eq!((&*rest, trailer, status.code()), (&b"nope"[..], true, Code::Ok));
        }
        assert_eq!(peer.end().await, "", "nothing follows, and the connection is closed");
    }
    // The next request has another connection.
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 204 No Content\r\n\r\n").await;
    };
    let ((), answer) = tokio::join!(server, fetch(&modules, get("/version"), b""));
    assert_eq!(answer.unwrap().0.status_code, 204);
}

#[tokio::test]
async fn another_protocol_than_the_one_asked_for_closes_both_sides() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    for head in [
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\r\n",
    ] {
        let (caller, answer) = call(&modules, &[]);
        begin(&caller, ask("POST", "SPDY/3.1")).await;
        let server = async {
            let mut peer = Peer::accept(&listener).await;
            peer.head().await;
            peer.write(head).await;
            peer
        };
        let (mut peer, response) = tokio::join!(server, within(answer));
        let status = Reply::new(response).status.expect("no answer");
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("not to SPDY/3.1"), "{status}");
        assert_eq!(peer.end().await, "");
    }
}

#[tokio::test]
async fn bytes_before_the_upgrade_and_bodies_are_refused() {
    let (listener, url) = listen().await;
    let modules = modules(&at(url)).await;
    let (caller, answer) = call(&modules, &[]);
    begin(&caller, ask("POST", "SPDY/3.1")).await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        caller.upgrade_data("too early").await;
        peer.end().await
    };
    let (sent, response) = tokio::join!(server, within(answer));
    assert!(!sent.contains("too early"), "{sent}");
    let status = Reply::new(response).status.expect("no answer");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");

    let (caller, answer) = call(&modules, &[]);
    caller.header_with_length(ask("POST", "SPDY/3.1"), Some(3)).await;
    let status = Reply::new(within(answer).await).status.expect("no answer");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("has no body"), "{status}");

    // A kas of GitLab before 16.0 announces no length, and this one sends a body after all.
    let (caller, answer) = call(&modules, &[]);
    caller.header(ask("POST", "SPDY/3.1")).await;
    let server = async {
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        caller.data("x").await;
        peer.end().await
    };
    let (_, response) = tokio::join!(server, within(answer));
    let status = Reply::new(response).status.expect("no answer");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("expected trailer, got data"), "{status}");
}

#[tokio::test]
async fn open_upgrades_are_counted_until_they_end() {
    let (listener, url) = listen().await;
    let module = KubernetesApi::new(at(url).connect().await.unwrap(), "v1", "abc");
    let upgrades = module.upgrades();
    let modules = Modules::new(vec![Arc::new(module)]);
    let first = Upgraded::start(&modules, &listener).await;
    let second = Upgraded::start(&modules, &listener).await;
    assert_eq!(upgrades.open(), 2);
    drop(first);
    let Upgraded { mut reply, peer, .. } = second;
    drop(peer);
    assert_eq!(reply.end().await.code(), Code::Ok);
    drop(reply);
    within(upgrades.none_open()).await;
}
