//! A client with as many watches as Argo CD may have: 1,500 of one agent, through real processes. And what
//! becomes of watches when their agentk is shut down. The API server is this test.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::future::try_join_all;
use h2::RecvStream;
use http::{Request, StatusCode};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    endpoint::{Endpoint, JANE},
    kas::{eventually, token},
    process::SOON,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};

const WATCHES: usize = 1_500;
/// Watches of each connection of HTTP/2. kas allows 250 streams.
const EACH: usize = 250;
/// As many tunnels as can be configured: four fifths are for the endpoint.
const TUNNELS: usize = 2_000;
/// Time limit for all watches. The processes are not optimised.
const OPENED: Duration = Duration::from_secs(60);

/// A response to a watch, with an event and without an end.
const WATCH: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n";
const SWITCHED: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

/// Reads the head of a message of HTTP.
async fn head(stream: &mut TcpStream) -> Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8(head)?)
}

/// Plays the API server on a connection: watches stay open, and upgraded connections send back what comes.
async fn api_server(mut stream: TcpStream) -> Result<()> {
    let request = head(&mut stream).await?;
    if request.starts_with("POST ") {
        stream.write_all(SWITCHED).await?;
        let (mut read, mut write) = stream.split();
        tokio::io::copy(&mut read, &mut write).await?;
    } else {
        ensure!(request.starts_with("GET /api/v1/"), "{request}");
        stream.write_all(WATCH).await?;
        // Until agentk closes it.
        ensure!(stream.read(&mut [0]).await? == 0, "a watch has no body");
    }
    Ok(())
}

/// Opens watches on a connection of their own, and waits for their first events.
async fn watches(address: SocketAddr, count: usize) -> Result<Vec<RecvStream>> {
    let (sender, connection) = h2::client::handshake(TcpStream::connect(address).await?).await?;
    tokio::spawn(connection);
    // So that requests do not wait for each other in the agent's pool for long.
    let at_once = Arc::new(Semaphore::new(8));
    let watch = |number: usize| {
        let (sender, at_once) = (sender.clone(), Arc::clone(&at_once));
        async move {
            let _permit = at_once.acquire().await?;
            let request = Request::get(format!("http://{address}/agents/1/api/v1/kind-{number}?watch=1"))
                .header("authorization", format!("Bearer {JANE}"))
                .body(())?;
            let (response, _) = sender.ready().await?.send_request(request, true)?;
            let response = response.await?;
            let status = response.status();
            let mut body = response.into_body();
            let first: Bytes = body.data().await.context("no event came")??;
            ensure!(status == StatusCode::OK && first == "{}\n", "{status}: {first:?}");
            anyhow::Ok(body)
        }
    };
    try_join_all((0..count).map(watch)).await
}

/// Opens an upgraded connection, and sends a byte to the API server and back.
async fn exec(address: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!(
        "POST /agents/1/api/v1/namespaces/a/pods/b/exec?command=sh HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer \
         {JANE}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let head = head(&mut stream).await?;
    ensure!(head.starts_with("HTTP/1.1 101 "), "{head}");
    echo(&mut stream).await?;
    Ok(stream)
}

/// Sends a byte over an upgraded connection to the API server and back.
async fn echo(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(b"x").await?;
    ensure!(stream.read_u8().await? == b'x');
    Ok(())
}

/// Starts the API server, and returns its URL.
async fn api() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(api_server(stream));
        }
    });
    Ok(url)
}

#[tokio::test]
async fn exec_opens_beside_1500_watches_of_one_agent() -> Result<()> {
    process::open_files::raise_limit();
    let endpoint = Endpoint::start(json!({ "agent": {
        "listen": { "max_tunnels_per_agent": TUNNELS },
        "kubernetes_api": { "limits": { "per_caller": { "open": WATCHES + 1 } } },
    } }))
    .await?;
    let (kas, address) = (&endpoint.kas, endpoint.address);
    let url = api().await?;
    let most = TUNNELS.to_string();
    let agentk = Agentk::start_with_arguments(kas.agent, &token(1), &url, &["--max-tunnels", &most]).await?;
    agentk.connected().await?;
    drop(timeout(SOON, exec(address)).await.context("exec does not open")??);

    let before = (kas.process.usage()?, agentk.process.usage()?);
    let begin = tokio::time::Instant::now();
    let connections = try_join_all((0..WATCHES / EACH).map(|_| watches(address, EACH)));
    let open: Vec<RecvStream> = timeout(OPENED, connections)
        .await
        .context("the watches do not open")??
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(open.len(), WATCHES);
    println!("{WATCHES} watches are open after {:?}", begin.elapsed());
    let after = (kas.process.usage()?, agentk.process.usage()?);
    for (name, before, after) in [("kas", before.0, after.0), ("agentk", before.1, after.1)] {
        let grown = after.resident_kib.saturating_sub(before.resident_kib) as f64;
        println!("{name}: {:.1} KiB for each watch", grown / WATCHES as f64);
    }
    kas.metric_is("kas_kubernetes_open{kind=\"watch\"}", WATCHES as f64).await?;
    drop(timeout(SOON, exec(address)).await.context("exec does not open beside the watches")??);
    // One more than the caller may have, which no watch of it has to make room for.
    let refused = watches(address, 2).await.unwrap_err().to_string();
    assert!(refused.contains("429") && refused.contains("requests of this caller are open"), "{refused}");
    assert!(!open.iter().any(RecvStream::is_end_stream));
    drop(open);
    eventually("all watches are over", async || {
        let open = kas.metric("kas_kubernetes_open{kind=\"watch\"}").await?;
        Ok(if open == 0.0 { Ok(()) } else { Err(open) })
    })
    .await
}

/// Fails if agentk waits for watches until its grace period is over, cuts one, or ends an exec with them.
#[tokio::test]
async fn an_agentk_that_is_shut_down_ends_watches_in_order_and_no_exec() -> Result<()> {
    let endpoint = Endpoint::start(json!({})).await?;
    let (kas, address) = (&endpoint.kas, endpoint.address);
    let url = api().await?;
    let first = Agentk::start_with(kas.agent, &token(1), &url).await?;
    first.connected().await?;
    let open = timeout(SOON, watches(address, 20)).await.context("the watches do not open")??;
    let mut session = timeout(SOON, exec(address)).await.context("exec does not open")??;
    let second = Agentk::start_with(kas.agent, &token(1), &url).await?;
    second.connected().await?;

    first.process.terminate();
    let begin = tokio::time::Instant::now();
    for mut body in open {
        while let Some(data) = timeout(SOON, body.data()).await.context("a watch goes on")? {
            let data = data.context("a watch was cut")?;
            ensure!(data.is_empty(), "an event that nobody sent: {data:?}");
        }
        ensure!(body.is_end_stream(), "a watch was cut");
    }
    println!("the watches have ended after {:?}", begin.elapsed());
    // Their clients come again, and are served by the other one.
    let again = timeout(SOON, watches(address, 20)).await.context("the watches do not open again")??;
    timeout(SOON, echo(&mut session)).await.context("the session has ended")??;
    ensure!(first.process.is_running(), "agentk did not wait for a session");
    let begin = tokio::time::Instant::now();
    drop(session);
    let status = first.process.exited(SOON).await?;
    ensure!(status.success(), "agentk has ended with {status}");
    println!("agentk has ended {:?} after the session", begin.elapsed());
    ensure!(again.iter().all(|body| !body.is_end_stream()), "watches of another agentk have ended");

    // Without a session, it waits for nothing.
    second.process.terminate();
    let begin = tokio::time::Instant::now();
    let status = second.process.exited(SOON).await?;
    ensure!(status.success(), "agentk has ended with {status}");
    println!("agentk with 20 watches has ended after {:?}", begin.elapsed());
    Ok(())
}
