//! Limits for unauthenticated, silent, idle and noisy peers of a real kas, and the metric of each.
//! docs/limits.md lists all of them.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use grpc::Code;
use serde_json::{Value, json};
use testkit::{
    caller::{Caller, answer, frame},
    certificates::Certificates,
    handler::path,
    kas::{Kas, eventually, metric_is_at_least, token},
    process::soon,
    raw_agent::{CONNECT, GET_CONFIGURATION, Kind, RawAgent},
    scenario::Scenario,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::Instant,
};

const BY_ID: &str = "/kas.api.v1.KasApi/ConnectedAgentsById";
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Empty settings.
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
/// The start of a header block that never ends.
const OPEN_HEADERS: &[u8] = &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x83];

async fn kas(limits: Value) -> Result<Kas> {
    Kas::start_with_config(json!({ "limits": limits })).await
}

async fn refused(kas: &Kas, listener: &str, reason: &str) -> Result<()> {
    let name = format!("kas_refusals_total{{listener=\"{listener}\",reason=\"{reason}\"}}");
    metric_is_at_least(kas.observability, &name, 1.0).await
}

/// Opens a connection and sends only these bytes.
async fn says(address: SocketAddr, bytes: &[&[u8]]) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(&bytes.concat()).await?;
    Ok(stream)
}

/// Waits until kas closes a connection.
async fn closed(mut stream: TcpStream) {
    let mut rest = Vec::new();
    // A reset is an end, too.
    let _ = soon("kas closes the connection", stream.read_to_end(&mut rest)).await;
}

/// Fails unless kas closes a connection that sends only these bytes, well before any limit that is not
/// configured. The margin is for a machine that stalls.
async fn closes_early(address: SocketAddr, bytes: &[&[u8]]) -> Result<()> {
    for _ in 0..3 {
        let begun = Instant::now();
        closed(says(address, bytes).await?).await;
        if begun.elapsed() < Duration::from_secs(4) {
            return Ok(());
        }
    }
    bail!("{address} closes a connection too late, three times")
}

#[tokio::test]
async fn silent_connections_are_replaced_by_new_ones() -> Result<()> {
    let kas = kas(json!({
        "half_open_connections": 4, "first_frame_timeout": "1m", "authentication_timeout": "1m"
    }))
    .await?;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(TcpStream::connect(kas.api).await?);
    }
    let caller = kas.caller().await?;
    let message = [8, 1];
    let got = soon("an answer in spite of them", caller.call(caller.request(BY_ID), &[&message])).await?;
    assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
    // The oldest loses its place to a newcomer once it has been silent for a second.
    let is_evicted = async || -> Result<bool> {
        let name = "kas_refusals_total{listener=\"Api\",reason=\"HalfOpen\"}";
        Ok(kas.metric(name).await? >= 1.0)
    };
    eventually("a newcomer replaces the oldest", async || {
        let caller = kas.caller().await?;
        let got = caller.call(caller.request(BY_ID), &[&message]).await?;
        assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
        Ok(if is_evicted().await? { Ok(()) } else { Err("none is evicted") })
    })
    .await?;
    closed(silent.remove(0)).await;
    // An authenticated connection occupies no place.
    for _ in 0..8 {
        let caller = kas.caller().await?;
        let got = caller.call(caller.request(BY_ID), &[&message]).await?;
        assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
    }
    assert_eq!(caller.call(caller.request(BY_ID), &[&message]).await?.status.code(), Code::Ok);
    Ok(())
}

#[tokio::test]
async fn a_connection_must_send_a_frame_its_headers_and_a_credential_in_time() -> Result<()> {
    let silent = kas(json!({ "first_frame_timeout": "1s" })).await?;
    let unknown = kas(json!({ "authentication_timeout": "1s" })).await?;
    let slow = kas(json!({ "header_timeout": "1s" })).await?;
    for (kas, bytes, reason) in [
        (&silent, &[][..], "Silent"),
        (&silent, &[PREFACE], "Silent"),
        (&unknown, &[PREFACE, SETTINGS], "Unauthenticated"),
        (&slow, &[PREFACE, SETTINGS, OPEN_HEADERS], "Headers"),
    ] {
        for (listener, address) in [("Agent", kas.agent), ("Api", kas.api)] {
            closes_early(address, bytes).await?;
            refused(kas, listener, reason).await?;
        }
    }
    // A connection that does all of that in time stays open.
    for kas in [&silent, &unknown, &slow] {
        let caller = kas.caller().await?;
        assert_eq!(caller.call(caller.request(BY_ID), &[&[8, 1]]).await?.status.code(), Code::Ok);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(caller.call(caller.request(BY_ID), &[&[8, 1]]).await?.status.code(), Code::Ok);
    }
    Ok(())
}

#[tokio::test]
async fn a_tls_or_websocket_handshake_must_finish_in_time() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let files = Certificates::new(folder.path(), &["127.0.0.1"])?;
    let tls = json!({ "certificate_file": files.certificate, "key_file": files.key });
    let limits = json!({ "handshake_timeout": "300ms" });
    for (listen, bytes) in [
        // The start of a TLS record, and half of an upgrade request.
        (tls, &[0x16, 3, 1, 2, 0][..]),
        (json!({ "websocket": true }), b"GET / HTTP/1.1\r\nHost: kas\r\nUpgr"),
    ] {
        let kas = Kas::start_with_config(json!({ "limits": limits, "agent": { "listen": listen } })).await?;
        closes_early(kas.agent, &[bytes]).await?;
        refused(&kas, "Agent", "Handshake").await?;
    }
    Ok(())
}

#[tokio::test]
async fn idle_connections_get_a_goaway_and_busy_ones_do_not() -> Result<()> {
    let kas = kas(json!({ "idle_connection_timeout": "1s" })).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _tunnel = agent.tunnel().await?;
    let _configuration = agent.configuration("").await?;
    let caller = kas.caller().await?;
    assert_eq!(caller.call(caller.request(BY_ID), &[&[8, 1]]).await?.status.code(), Code::Ok);
    caller.link().closed().await;
    refused(&kas, "Api", "Idle").await?;
    assert_eq!(kas.metric("kas_refusals_total{listener=\"Agent\",reason=\"Idle\"}").await?, 0.0);
    assert_eq!(kas.metric("kas_tunnels_open").await?, 1.0);
    Ok(())
}

#[tokio::test]
async fn pings_beyond_the_burst_end_the_connection_except_after_responses() -> Result<()> {
    let kas = kas(json!({ "ping_interval": "1m" })).await?;
    let connect = async || -> Result<_> {
        let (client, mut connection) = h2::client::handshake(TcpStream::connect(kas.api).await?).await?;
        let pings = connection.ping_pong().context("a connection pings")?;
        let ended = tokio::spawn(async move { drop(connection.await) });
        Ok((client, pings, ended))
    };
    let call = |client: &mut h2::client::SendRequest<Bytes>| -> Result<_> {
        let request = http::Request::post(format!("http://localhost{BY_ID}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {}", kas.jwt()))
            .body(())?;
        let (response, mut send) = client.send_request(request, false)?;
        send.send_data(Bytes::from_static(&[0, 0, 0, 0, 2, 8, 1]), true)?;
        Ok(response)
    };
    let (client, mut pings, mut ended) = connect().await?;
    let mut client = client.ready().await?;
    // Pings that measure bandwidth, as grpc-go sends them.
    for _ in 0..50 {
        let response = call(&mut client)?;
        let mut body = soon("an answer", response).await?.into_body();
        while let Some(data) = soon("data", body.data()).await {
            body.flow_control().release_capacity(data?.len())?;
        }
        soon("a pong", pings.ping(h2::Ping::opaque())).await?;
    }
    assert!(!ended.is_finished());
    let mut answered = 0;
    while soon("a pong or the end", pings.ping(h2::Ping::opaque())).await.is_ok() {
        answered += 1;
        assert!(answered <= 5);
    }
    soon("the end", &mut ended).await?;
    refused(&kas, "Api", "Pings").await?;
    Ok(())
}

#[tokio::test]
async fn floods_of_empty_frames_end_the_connection() -> Result<()> {
    let kas = Kas::start().await?;
    let flood = SETTINGS.repeat(200);
    closed(says(kas.agent, &[PREFACE, &flood]).await?).await;
    refused(&kas, "Agent", "IdleFrames").await?;
    Ok(())
}

/// A gRPC request without a token, with a field of `size` bytes.
fn request(stream: u8, size: usize) -> Vec<u8> {
    // POST, http, /, and the content type.
    let mut block = vec![0x83, 0x86, 0x84, 0x0f, 16, 16];
    block.extend_from_slice(b"application/grpc");
    if size > 0 {
        block.extend_from_slice(&[0, 1, b'x', 0x7f]);
        // An HPACK integer: a prefix of seven bits, then groups of seven.
        let rest = size - 0x7f;
        block.extend_from_slice(&[
            0x80 | (rest & 0x7f) as u8,
            0x80 | (rest >> 7 & 0x7f) as u8,
            (rest >> 14) as u8,
        ]);
        block.resize(block.len() + size, b'x');
    }
    let length = u32::try_from(block.len()).unwrap().to_be_bytes();
    [&length[1..], &[1, 4, 0, 0, 0, stream], &block].concat()
}

/// A stream that the client resets.
fn reset(stream: u8) -> Vec<u8> {
    vec![0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, 8]
}

/// A window update beyond the maximum window, which makes kas reset the stream.
fn overflow(stream: u8) -> Vec<u8> {
    vec![0, 0, 4, 8, 0, 0, 0, 0, stream, 0x7f, 0xff, 0xff, 0xff]
}

/// The stream ids of a client, which are odd.
fn streams(count: u8) -> impl Iterator<Item = u8> {
    (0..count).map(|n| 2 * n + 1)
}

#[tokio::test]
async fn an_unauthenticated_connection_is_not_read_beyond_its_stream_limit() -> Result<()> {
    let kas = kas(json!({ "streams_before_authentication": 3, "authentication_timeout": "1s" })).await?;
    // Each is longer than one scheduling step.
    let bytes: Vec<u8> = streams(12).flat_map(|stream| request(stream, 2_000)).collect();
    closed(says(kas.api, &[PREFACE, SETTINGS, &bytes]).await?).await;
    let name = "kas_refusals_total{listener=\"Api\",reason=\"Unauthenticated\"}";
    // Its three requests, and finally the connection itself.
    kas.metric_is(name, 4.0).await?;
    // After authentication kas reads on: all of these are open at the same time.
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let mut tunnels = Vec::new();
    for tunnel in futures_util::future::join_all((0..50).map(|_| agent.tunnel())).await {
        tunnels.push(tunnel?);
    }
    assert_eq!(kas.metric("kas_tunnels_open").await?, 50.0);
    Ok(())
}

#[tokio::test]
async fn unauthenticated_connections_may_reset_few_streams() -> Result<()> {
    let kas = kas(json!({ "streams_before_authentication": 8, "failed_requests": 1_000 })).await?;
    for then in [reset, overflow] {
        let bytes: Vec<u8> =
            streams(8).flat_map(|stream| [request(stream, 0), then(stream)].concat()).collect();
        let begun = Instant::now();
        closed(says(kas.agent, &[PREFACE, SETTINGS, &bytes]).await?).await;
        assert!(begun.elapsed() < Duration::from_secs(5), "not by any timer: {:?}", begun.elapsed());
    }
    metric_is_at_least(kas.observability, "kas_refusals_total{listener=\"Agent\",reason=\"Resets\"}", 2.0)
        .await
}

#[tokio::test]
async fn failed_requests_and_header_fields_have_configured_limits() -> Result<()> {
    let kas = kas(json!({ "failed_requests": 2, "header_fields": 16 })).await?;
    let bytes: Vec<u8> = streams(3).flat_map(|stream| request(stream, 2_000)).collect();
    let begun = Instant::now();
    closed(says(kas.api, &[PREFACE, SETTINGS, &bytes]).await?).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    refused(&kas, "Api", "Unauthenticated").await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let mut request = agent.request(CONNECT);
    for n in 0..16 {
        request = request.header(format!("x-field-{n}"), "x");
    }
    let got = answer(&mut agent.link().open(request.body(())?).await?).await?;
    assert_eq!(got.status.code(), Code::ResourceExhausted, "{}", got.status);
    assert!(got.status.message().contains("at most 16 are accepted"), "{}", got.status);
    Ok(())
}

/// Reads frames until the settings of kas, and returns their values by their numbers.
async fn settings(address: SocketAddr) -> Result<std::collections::BTreeMap<u16, u32>> {
    let mut stream = says(address, &[PREFACE, SETTINGS]).await?;
    let mut head = [0; 9];
    soon("settings", stream.read_exact(&mut head)).await?;
    assert_eq!(head[3], 4, "the first frame is SETTINGS");
    let mut payload = vec![0; usize::from(head[2])];
    soon("their values", stream.read_exact(&mut payload)).await?;
    let values = payload.chunks_exact(6).map(|six| {
        (u16::from_be_bytes([six[0], six[1]]), u32::from_be_bytes([six[2], six[3], six[4], six[5]]))
    });
    Ok(values.collect())
}

#[tokio::test]
async fn streams_resets_and_header_lists_have_configured_limits() -> Result<()> {
    const MAX_CONCURRENT_STREAMS: u16 = 3;
    const MAX_HEADER_LIST_SIZE: u16 = 6;
    let kas = kas(json!({
        "streams_per_agent_connection": 7, "resets_per_agent_connection": 2,
        "streams_per_caller_connection": 5, "resets_per_caller_connection": 3,
        "header_list_bytes": 5_000,
    }))
    .await?;
    let (agents, callers) = (settings(kas.agent).await?, settings(kas.api).await?);
    assert_eq!([agents[&MAX_CONCURRENT_STREAMS], callers[&MAX_CONCURRENT_STREAMS]], [7, 5]);
    assert_eq!([agents[&MAX_HEADER_LIST_SIZE], callers[&MAX_HEADER_LIST_SIZE]], [10_000; 2]);
    // One reset more than a peer may cause.
    for (address, listener, resets) in [(kas.agent, "Agent", 2), (kas.api, "Api", 3)] {
        let each = |stream| [request(stream, 0), overflow(stream)].concat();
        let bytes: Vec<u8> = streams(resets + 1).flat_map(each).collect();
        closed(says(address, &[PREFACE, SETTINGS, &bytes]).await?).await;
        refused(&kas, listener, "Resets").await?;
        // Refused by HTTP/2 and counted; the connection would stay open.
        let large = request(1, 11_000);
        let stream = says(address, &[PREFACE, SETTINGS, &large]).await?;
        refused(&kas, listener, "Headers").await?;
        drop(stream);
    }
    Ok(())
}

/// The types of the frames in bytes that kas has sent.
fn kinds(mut bytes: &[u8]) -> Vec<u8> {
    let mut kinds = Vec::new();
    while let [a, b, c, kind, ..] = *bytes {
        kinds.push(kind);
        let end = 9 + u32::from_be_bytes([0, a, b, c]) as usize;
        bytes = bytes.get(end..).unwrap_or_default();
    }
    kinds
}

#[tokio::test]
async fn a_connection_that_answers_no_ping_is_lost_after_the_configured_time() -> Result<()> {
    const PING: u8 = 6;
    let kas = kas(json!({
        "keepalive_interval": "200ms",
        // Longer than a busy machine stalls: valid peers have to answer, too.
        "keepalive_timeout": "5s",
        "authentication_timeout": "1m",
    }))
    .await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _tunnel = agent.tunnel().await?;
    let caller = kas.caller().await?;
    assert_eq!(caller.call(caller.request(BY_ID), &[&[8, 1]]).await?.status.code(), Code::Ok);
    for address in [kas.agent, kas.api] {
        let begun = Instant::now();
        let mut stream = says(address, &[PREFACE, SETTINGS]).await?;
        let mut said = Vec::new();
        let _ = soon("kas closes the connection", stream.read_to_end(&mut said)).await;
        assert!(kinds(&said).contains(&PING), "{said:?}");
        // The defaults are 15 s and 10 s more.
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    }
    // A peer that answers pings stays, although it was silent for longer.
    assert_eq!(caller.call(caller.request(BY_ID), &[&[8, 1]]).await?.status.code(), Code::Ok);
    assert_eq!(kas.metric("kas_tunnels_open").await?, 1.0);
    Ok(())
}

/// A literal header field that is not in a table.
fn field(name: &str, value: &str) -> Vec<u8> {
    let mut length = vec![value.len().min(0x7f) as u8];
    if let Some(mut rest) = value.len().checked_sub(0x7f) {
        while rest > 0x7f {
            length.push(0x80 | (rest & 0x7f) as u8);
            rest >>= 7;
        }
        length.push(rest as u8);
    }
    [&[0, name.len() as u8], name.as_bytes(), &length, value.as_bytes()].concat()
}

/// A call of a method of kas whose message never arrives.
fn held(stream: u8, jwt: &str) -> Vec<u8> {
    let bearer = format!("Bearer {jwt}");
    let fields = [(":path", BY_ID), ("content-type", "application/grpc"), ("authorization", &bearer)];
    let fields = fields.iter().flat_map(|(name, value)| field(name, value));
    let block: Vec<u8> = [0x83, 0x86].into_iter().chain(fields).collect();
    let length = u32::try_from(block.len()).unwrap().to_be_bytes();
    [&length[1..], &[1, 4, 0, 0, 0, stream], &block].concat()
}

#[tokio::test]
async fn oversized_requests_are_counted_by_reason() -> Result<()> {
    let kas = kas(json!({ "streams_per_caller_connection": 5 })).await?;
    let refusals = async |listener: &str, reason: &str, times: f64| {
        kas.metric_is(&format!("kas_refusals_total{{listener=\"{listener}\",reason=\"{reason}\"}}"), times)
            .await
    };
    let caller = kas.caller().await?;
    // The maximum number of GitLab's feature flags, one more, and the same with metadata that would be
    // forwarded.
    let with = |mut request: http::request::Builder, key: &str, count: usize| {
        for n in 0..count {
            request = request.header(format!("{key}-{n}"), "true");
        }
        request
    };
    let flagged = |count| with(caller.request(BY_ID), "kas-feature", count);
    assert_eq!(caller.call(flagged(64), &[&[8, 1]]).await?.status.code(), Code::Ok);
    for request in [
        flagged(65),
        with(caller.to_agent(1, &path("Echo")), "kas-feature", 65),
        with(caller.to_agent(1, &path("Echo")), "x-key", 65),
    ] {
        assert_eq!(caller.call(request, &[&[8, 1]]).await?.status.code(), Code::InvalidArgument);
    }
    refusals("Api", "Headers", 3.0).await?;

    // A compression bomb for an agent, and a first message that would be buffered until it is complete.
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _serving = agent.serve(2).await?;
    let bomb = grpc::gzip::deflate(&vec![0; 8 << 20]);
    let length = u32::try_from(bomb.len())?.to_be_bytes();
    let bomb = [&[1], &length[..], &bomb].concat();
    let request = caller.to_agent(1, &path("Echo")).header("grpc-encoding", "gzip");
    let make = caller.to_agent(1, "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest");
    for (request, bytes) in [(request, bomb), (make, vec![0, 0, 8, 0, 0, 1])] {
        let mut stream = caller.open(request).await?;
        stream.send(bytes).await.ok().context("sent")?;
        let got = answer(&mut stream).await?;
        assert_eq!(got.status.code(), Code::ResourceExhausted, "{}", got.status);
    }
    refusals("Api", "Message", 2.0).await?;

    // Invalid first messages of agents.
    for method in [CONNECT, GET_CONFIGURATION] {
        let mut stream = agent.link().open(agent.request(method).body(())?).await?;
        stream.send(frame(&[0xff; 20])).await.ok().context("sent")?;
        let _ = stream.half_close();
        assert_ne!(answer(&mut stream).await?.status.code(), Code::Ok, "{method}");
    }
    refusals("Agent", "Message", 2.0).await?;

    // Streams beyond those that may be open; the connection stays.
    let jwt = kas.jwt();
    let bytes: Vec<u8> = streams(7).flat_map(|stream| held(stream, &jwt)).collect();
    let open = says(kas.api, &[PREFACE, SETTINGS, &bytes]).await?;
    refusals("Api", "Streams", 2.0).await?;
    drop(open);
    refusals("Api", "Unauthenticated", 0.0).await
}

#[tokio::test]
async fn requests_with_excessive_headers_get_a_status_that_grpc_clients_show() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let mut request = agent.request(CONNECT);
    for n in 0..70 {
        request = request.header(format!("x-field-{n}"), "x");
    }
    let mut stream = agent.link().open(request.body(())?).await?;
    let got = answer(&mut stream).await?;
    assert_eq!(got.status.code(), Code::ResourceExhausted, "{}", got.status);
    assert!(got.status.message().contains("at most 64 are accepted"), "{}", got.status);
    refused(&kas, "Agent", "Headers").await?;
    let large = agent.request(CONNECT).header("x-large", "x".repeat(17 * 1024)).body(())?;
    let got = answer(&mut agent.link().open(large).await?).await?;
    assert_eq!(got.status.code(), Code::ResourceExhausted, "{}", got.status);
    assert!(got.status.message().contains("at most 16384 are accepted"), "{}", got.status);
    // Above 32 KiB, HTTP/2 itself responds without a gRPC status, and clients create one.
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", kas.api))?.connect().await?;
    let mut client = tonic::client::Grpc::new(channel);
    for (size, code, words) in [
        (17 * 1024, tonic::Code::ResourceExhausted, "at most 16384 are accepted"),
        (33 * 1024, tonic::Code::Unknown, "431"),
    ] {
        client.ready().await?;
        let mut request =
            tonic::Request::new(proto::kas::api::v1::ConnectedAgentsByIdRequest { agent_id: 1 });
        request.metadata_mut().insert("authorization", format!("Bearer {}", kas.jwt()).parse()?);
        request.metadata_mut().insert("x-large", "x".repeat(size).parse()?);
        let codec = tonic_prost::ProstCodec::<_, proto::kas::api::v1::ConnectedAgentsByIdResponse>::default();
        let path = http::uri::PathAndQuery::from_static(BY_ID);
        let status = client.unary(request, path, codec).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(words), "{status:?}");
    }
    refused(&kas, "Api", "Headers").await?;
    // The connection stays open.
    let caller = Caller::connect(kas.api, Some(kas.jwt())).await?;
    assert_eq!(caller.call(caller.request(BY_ID), &[&[8, 1]]).await?.status.code(), Code::Ok);
    Ok(())
}

#[tokio::test]
async fn a_tunnel_above_the_limit_gets_the_next_free_slot_or_ends_with_ok() -> Result<()> {
    const FULL: &str = "kas_refusals_total{listener=\"Agent\",reason=\"TunnelsFull\"}";
    let config = json!({ "agent": { "listen": { "max_tunnels_per_agent": 2 } } });
    let kas = Kas::start_with_config(config).await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let (first, _second) = (agent.tunnel().await?, agent.tunnel().await?);
    let mut third = std::pin::pin!(agent.tunnel());
    let waits = tokio::time::timeout(Duration::from_millis(500), &mut third).await;
    assert!(waits.is_err(), "it has a slot");
    assert_eq!(kas.metric("kas_tunnels_open").await?, 2.0);
    // Other agents have their own limit.
    let other = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let _others = other.tunnel().await?;
    drop(first);
    let _third = soon("the place that is free", third).await?;
    kas.metric_is("kas_tunnels_open", 3.0).await?;
    assert_eq!(kas.metric(FULL).await?, 0.0);

    // A refusal would make an agent of 14.1 pause for minutes.
    let begun = Instant::now();
    let mut fourth = tokio::time::timeout(Duration::from_secs(20), agent.tunnel()).await??;
    assert_eq!(fourth.ended().await.code(), Code::Ok);
    assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
    assert_eq!(kas.metric(FULL).await?, 1.0);
    assert_eq!(kas.metric("kas_tunnels_open").await?, 3.0);
    Ok(())
}

#[tokio::test]
async fn a_token_that_connects_too_often_is_delayed_and_others_are_not() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start_with_config(json!({
        "limits": { "token_burst": 4 },
        "agent": { "listen": { "connections_per_token_per_minute": 1 } },
    }))
    .await?;
    let mut connections = Vec::new();
    for _ in 0..3 {
        let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
        let serving = agent.serve(1).await?;
        connections.push((agent, serving));
    }
    // Tunnels that carry requests are not counted, however often they are opened.
    for _ in 0..50 {
        assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
    }
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    let mut stream = agent.link().open(agent.request(GET_CONFIGURATION).body(())?).await?;
    stream.send(frame(b"")).await.ok().context("sent")?;
    let _ = stream.half_close();
    let got = answer(&mut stream).await?;
    // With the message of 14.1.
    let told = "new connection rate limit exhausted for this agent, try again later";
    assert_eq!((got.status.code(), got.status.message()), (Code::ResourceExhausted, told));
    refused(&kas, "Agent", "RateLimit").await?;
    // Its tunnels are held, like those above the limit; those of another token are not.
    assert!(tokio::time::timeout(Duration::from_secs(2), agent.tunnel()).await.is_err(), "it was accepted");
    let other = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    soon("a tunnel of another token", other.tunnel()).await?;
    Ok(())
}

#[tokio::test]
async fn a_repeatedly_failing_token_is_no_longer_looked_up() -> Result<()> {
    let kas = kas(json!({ "token_burst": 3 })).await?;
    let wrong = RawAgent::connect(kas.agent, "wrong", Kind::Old).await?;
    for _ in 0..10 {
        let error = wrong.tunnel().await.unwrap_err().downcast::<grpc::Status>()?;
        assert_eq!(error.code(), Code::Unauthenticated);
    }
    refused(&kas, "Agent", "RateLimit").await?;
    let right = RawAgent::connect(kas.agent, &token(1), Kind::Old).await?;
    right.tunnel().await?;
    Ok(())
}
