//! Streams of HTTP/2 that were taken over by extended CONNECT.

use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};

use super::*;

/// A server that announces extended CONNECT.
async fn start(limits: Limits) -> Running {
    Running::start_as(Protocols::Http1And2, limits, None, Settings { extended_connect: true, ..API }, None)
        .await
}

/// Connects a client.
async fn client(server: &Running) -> SendRequest<Bytes> {
    let (send, connection) = h2::client::handshake(server.socket(b"").await).await.unwrap();
    tokio::spawn(connection);
    send
}

/// Makes an ordinary request. Its answer comes after the server's settings.
async fn get(client: &mut SendRequest<Bytes>, path: &str) -> Bytes {
    let request =
        Request::get(format!("http://kas{path}")).header(header::AUTHORIZATION, "x").body(()).unwrap();
    let (answer, _) = client.clone().ready().await.unwrap().send_request(request, true).unwrap();
    let mut body = timeout(SOON, answer).await.expect("an answer").unwrap().into_body();
    let mut got = Vec::new();
    while let Some(bytes) = timeout(SOON, body.data()).await.expect("the rest") {
        got.extend_from_slice(&bytes.unwrap());
    }
    got.into()
}

/// Sends a request for an upgrade.
async fn ask(client: &mut SendRequest<Bytes>, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
    let mut request = Request::builder()
        .method(Method::CONNECT)
        .uri(format!("http://kas{path}"))
        .header(header::AUTHORIZATION, "x")
        .body(())
        .unwrap();
    request.extensions_mut().insert(h2::ext::Protocol::from_static("shout"));
    client.clone().ready().await.unwrap().send_request(request, false).unwrap()
}

/// A stream that was taken over, from the client's side.
struct Upgraded {
    send: SendStream<Bytes>,
    receive: RecvStream,
}

impl Upgraded {
    async fn ask(client: &mut SendRequest<Bytes>, path: &str) -> Self {
        let (answer, send) = ask(client, path).await;
        let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert!(!answer.body().is_end_stream());
        Self { send, receive: answer.into_body() }
    }

    fn write(&mut self, bytes: &'static str) {
        self.send.send_data(Bytes::from_static(bytes.as_bytes()), false).unwrap();
    }

    /// Reads exactly this.
    async fn reads(&mut self, expected: &str) {
        let mut got = Vec::new();
        while got.len() < expected.len() {
            let data = timeout(SOON, self.receive.data()).await.expect(expected).expect(expected).unwrap();
            self.receive.flow_control().release_capacity(data.len()).unwrap();
            got.extend_from_slice(&data);
        }
        assert_eq!(String::from_utf8_lossy(&got), expected);
    }

    /// Reads to the end. `Err`: the stream was reset.
    async fn end(&mut self) -> Result<(), Option<Reason>> {
        loop {
            match timeout(SOON, self.receive.data()).await.expect("an end") {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.reason()),
                None => return Ok(()),
            }
        }
    }
}

#[tokio::test]
async fn extended_connect_is_announced_only_where_it_is_wanted() {
    for (server, announces) in [
        (start(Limits::default()).await, true),
        (Running::start(Protocols::Http1And2, Limits::default()).await, false),
    ] {
        let mut client = client(&server).await;
        assert_eq!(get(&mut client, "/").await, "HTTP/2.0");
        assert_eq!(client.is_extended_connect_protocol_enabled(), announces);
    }
}

#[tokio::test]
async fn request_takes_its_stream_over_and_other_streams_go_on() {
    let server = start(Limits::default()).await;
    // The stream of a connection that was not admitted before has a task of its own.
    for is_first in [false, true] {
        let mut client = client(&server).await;
        if !is_first {
            get(&mut client, "/").await;
        }
        let (answer, mut send) = ask(&mut client, "/shout/on").await;
        // What comes before the answer waits for it.
        send.send_data(Bytes::from_static(b"early "), false).unwrap();
        let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let mut stream = Upgraded { send, receive: answer.into_body() };
        stream.reads("EARLY ").await;
        let mut other = Upgraded::ask(&mut client, "/shout/on").await;
        for _ in 0..100 {
            stream.write("one");
            other.write("two");
            stream.reads("ONE").await;
            other.reads("TWO").await;
            assert_eq!(get(&mut client, "/").await, "HTTP/2.0");
        }
        stream.send.send_data(Bytes::from_static(b"last"), true).unwrap();
        stream.reads("LAST").await;
        assert_eq!(stream.end().await, Ok(()));
        other.write("still");
        other.reads("STILL").await;
    }
}

#[tokio::test]
async fn end_of_a_stream_differs_from_its_reset() {
    let server = start(Limits::default()).await;
    let mut client = client(&server).await;
    get(&mut client, "/").await;
    for (reset, expected) in [
        (None, Ok(())),
        (Some(Reason::CANCEL), Err(())),
        (Some(Reason::NO_ERROR), Err(())),
        (Some(Reason::INTERNAL_ERROR), Err(())),
    ] {
        // Both directions belong to one task, and to different ones.
        for path in ["/end", "/end/elsewhere"] {
            let mut stream = Upgraded::ask(&mut client, path).await;
            stream.write("something");
            stream.reads("read").await;
            match reset {
                None => stream.send.send_data(Bytes::new(), true).unwrap(),
                Some(reason) => stream.send.send_reset(reason),
            }
            let end = server.end_was_read().await;
            assert_eq!(end.map_err(drop), expected, "{path} {reset:?}");
            if reset.is_none() {
                assert_eq!(stream.end().await, Ok(()));
            }
        }
    }
}

/// Also one that has begun before the connection was admitted.
#[tokio::test]
async fn stream_that_was_taken_over_sees_the_end_of_its_connection_but_not_that_of_the_process() {
    for (is_first, path) in [(true, "/held"), (false, "/held"), (true, "/held/late")] {
        let open = async |server: &Running| {
            let mut client = client(server).await;
            if !is_first {
                get(&mut client, "/").await;
            }
            let mut stream = Upgraded::ask(&mut client, path).await;
            stream.reads("held").await;
            (client, stream)
        };
        let server = start(Limits::default()).await;
        drop(open(&server).await);
        let end = server.end_was_read().await;
        assert!(end.is_err_and(|kind| kind != ErrorKind::Interrupted), "{path}: {end:?}");

        let (_client, mut stream) = open(&server).await;
        server.lifecycle.advance(Phase::Stopped);
        assert!(stream.end().await.is_err());
        timeout(SOON, server.task).await.unwrap().unwrap();
        let ends = server.service.ends.lock().clone();
        assert_eq!(ends, [Err(ErrorKind::Interrupted)], "{path}");
    }
}

#[tokio::test]
async fn stream_is_reset_when_that_is_wanted_or_its_future_does_not_end() {
    let server = start(Limits::default()).await;
    let mut client = client(&server).await;
    get(&mut client, "/").await;
    for path in ["/reset", "/panic"] {
        let mut stream = Upgraded::ask(&mut client, path).await;
        stream.write("go");
        assert_eq!(stream.end().await, Err(Some(Reason::CANCEL)), "{path}");
    }
    let mut stream = Upgraded::ask(&mut client, "/shout/armed").await;
    stream.write("a");
    stream.reads("A").await;
    server.service.resets.lock().drain(..).for_each(|reset| reset.reset());
    assert_eq!(stream.end().await, Err(Some(Reason::CANCEL)));
    // The service agreed to nothing.
    let (answer, _send) = ask(&mut client, "/").await;
    let mut body = timeout(SOON, answer).await.expect("an answer").unwrap().into_body();
    let error = timeout(SOON, body.data()).await.expect("an end").expect("a reset").unwrap_err();
    assert_eq!(error.reason(), Some(Reason::CANCEL));
    assert_eq!(get(&mut client, "/").await, "HTTP/2.0");
}

#[tokio::test]
async fn reader_that_stalls_stops_its_own_stream_only() {
    const WINDOW: usize = 64 * 1024 - 1;
    /// The client's window of a stream, and the pieces on the way to it.
    const MOST: usize = WINDOW + 8 * PIECE;
    let server = start(Limits::default()).await;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW as u32).initial_connection_window_size(1 << 20);
    let (mut client, connection) = builder.handshake(server.socket(b"").await).await.unwrap();
    tokio::spawn(connection);
    get(&mut client, "/").await;
    let stalled = Upgraded::ask(&mut client, "/flood").await;
    let mut before = 0;
    loop {
        let written = server.service.flooded.load(Ordering::Relaxed);
        assert!(written <= MOST, "{written} bytes wait");
        if written == before && written >= WINDOW {
            break;
        }
        before = written;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut other = Upgraded::ask(&mut client, "/shout/on").await;
    for _ in 0..10 {
        other.write("one");
        other.reads("ONE").await;
        assert_eq!(get(&mut client, "/").await, "HTTP/2.0");
    }
    drop(stalled);
}

#[tokio::test]
async fn streams_that_were_taken_over_are_asked_to_end_and_waited_for() {
    let limits =
        Limits { headers: Duration::from_millis(400), idle: Duration::from_millis(400), ..Limits::default() };
    let server = start(limits).await;
    let mut client = client(&server).await;
    get(&mut client, "/").await;
    let mut polite = Upgraded::ask(&mut client, "/shout").await;
    let mut deaf = Upgraded::ask(&mut client, "/shout/on").await;
    // Their connection is not idle.
    tokio::time::sleep(Duration::from_secs(1)).await;
    polite.write("late");
    polite.reads("LATE").await;
    server.lifecycle.advance(Phase::Leaving);
    polite.reads("bye").await;
    assert_eq!(polite.end().await, Ok(()));
    // The other one continues until the end, and does not delay it further.
    deaf.write("still");
    deaf.reads("STILL").await;
    assert!(!server.task.is_finished());
    server.lifecycle.advance(Phase::Stopped);
    assert!(deaf.end().await.is_err());
    timeout(SOON, server.task).await.unwrap().unwrap();
}
