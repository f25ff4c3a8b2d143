//! Our agentk with GitLab's kas: one request for each tunnel.

use anyhow::Result;
use bytes::Bytes;
use grpc::{Code, Status};
use prost::Message as _;
use proto::{
    gitlab::agent::reverse_tunnel::rpc::{self, connect_request::Msg, connect_response},
    kas::bench::v1::DownloadRequest,
};
use testkit::{
    agentk::Agentk,
    bench::{DOWNLOAD, ECHO, HOLD, payload},
    handler::meta,
    kas14::{FromAgent, Kas14},
};

/// Waits for everything that agentk sends until it half-closes.
async fn all(tunnel: &mut testkit::kas14::Tunnel) -> Vec<Msg> {
    let mut msgs = Vec::new();
    loop {
        match tunnel.next().await {
            FromAgent::Sent(msg) => msgs.push(msg),
            FromAgent::HalfClose => return msgs,
            FromAgent::Reset(reason) => panic!("{reason:?} after {msgs:?}"),
        }
    }
}

fn kinds(msgs: &[Msg]) -> Vec<&'static str> {
    msgs.iter()
        .map(|msg| match msg {
            Msg::Descriptor(_) => "descriptor",
            Msg::Header(_) => "header",
            Msg::Message(_) => "message",
            Msg::Trailer(_) => "trailer",
            Msg::Error(_) => "error",
        })
        .collect()
}

#[tokio::test]
async fn agentk_offers_reuse_and_waits_for_no_headers() -> Result<()> {
    let mut kas = Kas14::start().await?;
    let _agentk = Agentk::start(kas.address(), "token").await?;
    for _ in 0..2 {
        let tunnel = kas.tunnel().await;
        assert_eq!(tunnel.request_headers()["kas-tunnel"], "reuse");
        assert_eq!(tunnel.request_headers()["authorization"], "Bearer token");
    }
    Ok(())
}

#[tokio::test]
async fn response_on_a_one_shot_tunnel_is_complete_before_its_end() -> Result<()> {
    let mut kas = Kas14::start().await?;
    let _agentk = Agentk::start(kas.address(), "token").await?;
    let echo = payload("hello");
    let download = DownloadRequest { messages: 20, size: 1000 }.encode_to_vec();
    for _ in 0..20 {
        let mut tunnel = kas.tunnel().await;
        tunnel.request(ECHO, &[("x-gitlab-correlation-id", "1")], &[&echo])?;
        let msgs = all(&mut tunnel).await;
        assert_eq!(kinds(&msgs), ["header", "message", "trailer"]);
        assert!(matches!(&msgs[1], Msg::Message(message) if message.data == echo));
        tunnel.end()?;

        let mut tunnel = kas.tunnel().await;
        tunnel.request(DOWNLOAD, &[], &[&download])?;
        let msgs = all(&mut tunnel).await;
        assert_eq!(kinds(&msgs), [&["header"][..], &["message"; 20], &["trailer"]].concat());
        tunnel.end()?;
    }
    Ok(())
}

#[tokio::test]
async fn errors_on_a_one_shot_tunnel_match_14_1() -> Result<()> {
    let mut kas = Kas14::start().await?;
    let _agentk = Agentk::start(kas.address(), "token").await?;
    for (method, message, code) in [
        ("/kas.bench.v1.Bench/Unknown", Vec::new(), 12),
        (DOWNLOAD, DownloadRequest { messages: 1, size: u32::MAX }.encode_to_vec(), 3),
    ] {
        let mut tunnel = kas.tunnel().await;
        // The headers that grpc-go adds to every request must not matter.
        let pairs =
            [(":authority", "kas"), ("content-type", "application/grpc+proto"), ("user-agent", "grpc-go")];
        tunnel.request(method, &pairs, &[&message])?;
        let msgs = all(&mut tunnel).await;
        assert_eq!(kinds(&msgs), ["header", "trailer", "error"]);
        let Some(Msg::Error(rpc::Error { status: Some(status) })) = msgs.last() else { panic!("{msgs:?}") };
        assert_eq!(status.code, code, "{}", status.message);
        tunnel.end()?;
    }
    Ok(())
}

#[tokio::test]
async fn agentk_replaces_a_tunnel_that_was_used_or_ended() -> Result<()> {
    let mut kas = Kas14::start().await?;
    let agentk = Agentk::start(kas.address(), "token").await?;
    for _ in 0..10 {
        let mut idle = kas.tunnel().await;
        idle.end()?;
        assert_eq!(idle.next().await, FromAgent::HalfClose);
    }
    // A long request at the same time as the others.
    let mut hold = kas.tunnel().await;
    hold.send(connect_response::Msg::RequestInfo(rpc::RequestInfo {
        method_name: HOLD.to_owned(),
        meta: meta(&[("grpc-timeout", "100S")]),
    }))?;
    hold.send(connect_response::Msg::Message(rpc::Message { data: Bytes::new() }))?;
    hold.send(connect_response::Msg::CloseSend(rpc::CloseSend {}))?;
    assert!(matches!(hold.next().await, FromAgent::Sent(Msg::Header(_))));
    assert!(matches!(hold.next().await, FromAgent::Sent(Msg::Message(_))));
    let echo = payload("hello");
    for _ in 0..5 {
        let mut tunnel = kas.tunnel().await;
        tunnel.request(ECHO, &[], &[&echo])?;
        assert_eq!(kinds(&all(&mut tunnel).await), ["header", "message", "trailer"]);
        tunnel.end()?;
    }
    agentk.metric_is("agentk_tunnels_busy", 1.0).await?;
    // 14.1 cancels a request by ending the stream.
    drop(hold);
    agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
    Ok(())
}

/// Fails if it keeps two, as at a kas that accepts reuse: the third of several callers then waits until kas
/// looks for a tunnel again, which takes up to 3 s.
#[tokio::test]
async fn agentk_keeps_ten_idle_tunnels_once_a_request_shows_that_kas_does_not_accept_reuse() -> Result<()> {
    let mut kas = Kas14::start().await?;
    let _agentk = Agentk::start(kas.address(), "token").await?;
    let echo = payload("hello");
    let mut first = kas.tunnel().await;
    first.request(ECHO, &[], &[&echo])?;
    assert_eq!(kinds(&all(&mut first).await), ["header", "message", "trailer"]);
    first.end()?;
    for _ in 0..2 {
        let mut idle = Vec::new();
        for _ in 0..10 {
            idle.push(kas.tunnel().await);
        }
        // Ten callers at once; ten other tunnels replace theirs before a response is complete.
        for tunnel in &mut idle {
            tunnel.request(ECHO, &[], &[&echo])?;
        }
        for mut tunnel in idle {
            assert_eq!(kinds(&all(&mut tunnel).await), ["header", "message", "trailer"]);
            tunnel.end()?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn tunnels_that_kas_refuses_by_its_limit_are_logged_once_with_what_to_do() -> Result<()> {
    let mut kas = Kas14::start().await?;
    let agentk = Agentk::start(kas.address(), "token").await?;
    let text = "new connection rate limit exhausted for this agent, try again later";
    for _ in 0..4 {
        kas.tunnel().await.refuse(&Status::new(Code::ResourceExhausted, text))?;
    }
    agentk.metric_is("agentk_streams_refused_total", 4.0).await?;
    let is_warning = |line: &serde_json::Value| {
        let message = line["message"].as_str().unwrap_or_default();
        line["level"] == "WARN" && message.starts_with("kas refuses streams of this agent by its limit: ")
    };
    let line = agentk.process.logged("the refusal", |line| is_warning(line).then(|| line.clone())).await?;
    assert!(line.to_string().contains(text), "{line}");
    assert!(line.to_string().contains("agent.listen.connections_per_token_per_minute"), "{line}");
    let log = agentk.process.log();
    assert_eq!(log.matches("kas refuses streams of this agent by its limit").count(), 1, "{log}");
    // agentk tries again, more and more slowly.
    let mut tunnel = kas.tunnel().await;
    tunnel.request(ECHO, &[], &[&payload("hello")])?;
    assert_eq!(kinds(&all(&mut tunnel).await), ["header", "message", "trailer"]);
    Ok(())
}
