//! Requests for absent agents, shutdown, and reconnecting: real kas and real agentk.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::future::join_all;
use grpc::{Code, Outcome};
use http::StatusCode;
use prost::Message as _;
use proto::kas::bench::v1::DownloadRequest;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use testkit::{
    agent14::{Agent14, Version},
    agentk::Agentk,
    bench::{DOWNLOAD, ECHO, HOLD, UPLOAD, echo, hold, payload, upload, uploaded},
    caller::{Answer, Caller, answer, frame},
    handler::{header, message, path, trailer},
    kas::{Kas, eventually, token},
    link::{Next, Stream},
    process::soon,
    raw_agent::{FromKas, Kind, RawAgent},
    scenario::Scenario,
};
use tokio::time::Instant;

/// A process with nothing to wait for exits within this time.
const PROMPTLY: Duration = Duration::from_secs(10);

/// Opens a stream of the test's own agents that answers each message.
async fn chat(caller: &Caller, agent: i64) -> Result<Stream> {
    let mut stream = caller.open(caller.to_agent(agent, &path("Chat"))).await?;
    says(&mut stream, "hello").await;
    Ok(stream)
}

async fn says(stream: &mut Stream, text: &str) {
    stream.send(frame(text.as_bytes())).await.expect("the stream is open");
    assert_eq!(stream.next().await, Next::Message(text.to_owned().into()));
}

fn assert_not_started(got: &Answer, code: Code) {
    assert_eq!(
        (got.status.code(), got.status.outcome()),
        (code, Some(Outcome::NotStarted)),
        "{}",
        got.status
    );
    assert!(got.status.message().contains("agent 1"), "{}", got.status);
}

#[tokio::test]
async fn thousand_waiting_requests_are_each_served_once_when_their_agent_connects() -> Result<()> {
    let kas = Kas::start().await?;
    for (agent, kind) in [(1, Kind::Ours), (2, Kind::Old)] {
        // A connection carries 200 streams.
        let mut callers = Vec::new();
        for _ in 0..5 {
            callers.push(kas.caller().await?);
        }
        let calls = (0..1000).map(|n: usize| {
            let caller = callers[n % callers.len()].clone();
            tokio::spawn(async move {
                let text = format!("request {n}");
                let got = caller.call(caller.to_agent(agent, &path("Echo")), &[text.as_bytes()]).await?;
                ensure!(got.status.code() == Code::Ok, "{}", got.status);
                ensure!(got.messages == [text]);
                Ok(())
            })
        });
        let calls: Vec<_> = calls.collect();
        kas.metric_is("kas_requests_waiting", 1000.0).await?;
        let process = RawAgent::connect(kas.agent, &token(agent), kind).await?;
        let _serving = process.serve(10).await?;
        for result in soon("all are served", join_all(calls)).await {
            result??;
        }
        assert_eq!(process.requests().list().len(), 1000, "{kind:?}");
        assert_eq!(kas.metric("kas_requests_waiting").await?, 0.0);
        kas.metric_is("kas_requests_open", 0.0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn requests_beyond_the_waiter_limit_are_refused_at_once() -> Result<()> {
    let Scenario { kas, caller, .. } =
        Scenario::start_with_config(json!({ "limits": { "waiters_per_agent": 3, "waiters": 5 } })).await?;
    let open = async |agent: i64| -> Result<Stream> {
        let mut stream = caller.open(caller.to_agent(agent, &path("Echo"))).await?;
        stream.send(frame(b"x")).await.ok().context("sent")?;
        stream.half_close().ok().context("sent")?;
        Ok(stream)
    };
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(open(1).await?);
    }
    kas.metric_is("kas_requests_waiting", 3.0).await?;
    assert_not_started(&answer(&mut open(1).await?).await?, Code::ResourceExhausted);
    for _ in 0..2 {
        waiting.push(open(2).await?);
    }
    kas.metric_is("kas_requests_waiting", 5.0).await?;
    let got = answer(&mut open(2).await?).await?;
    assert_eq!(
        got.status.code(),
        Code::ResourceExhausted,
        "the limit of all agents together: {}",
        got.status
    );
    // A cancelled request makes room.
    waiting.remove(0).reset(h2::Reason::CANCEL);
    kas.metric_is("kas_requests_waiting", 4.0).await?;
    waiting.push(open(1).await?);
    kas.metric_is("kas_requests_waiting", 5.0).await?;
    for agent in [1, 2] {
        let process = RawAgent::connect(kas.agent, &token(agent), Kind::Ours).await?;
        let _serving = process.serve(1).await?;
        let served = if agent == 1 { 3 } else { 2 };
        eventually("the waiters are served", async || {
            let requests = process.requests().list().len();
            Ok(if requests == served { Ok(()) } else { Err(requests) })
        })
        .await?;
    }
    for mut stream in waiting {
        assert_eq!(answer(&mut stream).await?.status.code(), Code::Ok);
    }
    assert_eq!(kas.metric("kas_refusals_total{listener=\"Api\",reason=\"WaitersFull\"}").await?, 2.0);
    Ok(())
}

#[tokio::test]
async fn request_for_an_absent_agent_ends_as_not_started() -> Result<()> {
    let Scenario { kas, caller, .. } =
        Scenario::start_with_config(json!({ "limits": { "find_timeout": "500ms" } })).await?;
    let begun = Instant::now();
    let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "200m");
    let got = caller.call(request, &[b"x"]).await?;
    assert_not_started(&got, Code::DeadlineExceeded);
    assert!((200..10_000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());

    let begun = Instant::now();
    let got = caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?;
    assert_not_started(&got, Code::Unavailable);
    assert!(got.status.message().contains("not connected"), "{}", got.status);
    assert!((500..10_000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());

    // The caller may set a longer deadline than the configured time.
    let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "900m");
    let begun = Instant::now();
    assert_not_started(&caller.call(request, &[b"x"]).await?, Code::DeadlineExceeded);
    assert!(begun.elapsed().as_millis() >= 900);

    // For a connected agent without an idle tunnel, the message is different.
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _serving = agent.serve(1).await?;
    let _busy = chat(&caller, 1).await?;
    let got = caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?;
    assert_not_started(&got, Code::Unavailable);
    assert!(got.status.message().contains("no idle tunnel"), "{}", got.status);

    for (wrong, code) in
        [("1", Code::InvalidArgument), ("x", Code::InvalidArgument), ("0n", Code::DeadlineExceeded)]
    {
        let request = caller.to_agent(2, &path("Echo")).header("grpc-timeout", wrong);
        assert_eq!(caller.call(request, &[b"x"]).await?.status.code(), code, "{wrong}");
    }
    Ok(())
}

#[tokio::test]
async fn drain_lets_open_streams_finish_and_notifies_agents_and_clients() -> Result<()> {
    let Scenario { kas, caller, agent: ours } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let old = RawAgent::connect(kas.agent, &token(2), Kind::Old).await?;
    let mut configurations = [ours.configuration("").await?, old.configuration("").await?];
    let mut busy = ours.tunnel().await?;
    let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    stream.send(frame(b"before")).await.unwrap();
    busy.request().await;
    assert_eq!(busy.next().await, FromKas::Message("before".into()));
    let (mut parked, mut idle) = (ours.tunnel().await?, old.tunnel().await?);
    // On a busy machine, the heartbeat of kas may have come late.
    eventually("kas is ready", async || {
        let (status, why) = kas.get("/readiness").await?;
        Ok(if status == StatusCode::OK { Ok(()) } else { Err(why) })
    })
    .await?;

    kas.process.terminate();
    assert_eq!(parked.next().await, FromKas::CloseSend, "a drain notice");
    assert_eq!(idle.ended().await.code(), Code::Ok);
    for configuration in &mut configurations {
        assert_eq!(configuration.next().await.unwrap_err().code(), Code::Ok, "reconnect, to another replica");
    }
    assert_eq!(kas.get("/readiness").await?.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(kas.get("/liveness").await?.0, StatusCode::OK);
    parked.half_close();
    assert_eq!(parked.ended().await.code(), Code::Ok);

    // A new agent is served, and so is a caller that uses it.
    let late_caller = kas.caller().await?;
    let late = RawAgent::connect(kas.agent, &token(2), Kind::Ours).await?;
    let _serving = late.serve(1).await?;
    let mut late_stream = chat(&late_caller, 2).await?;
    let health = late_caller.call(late_caller.request("/grpc.health.v1.Health/Check"), &[b""]).await?;
    assert_eq!(&health.messages[0][..], [8, 2], "NOT_SERVING");

    // Open streams continue in both directions and end normally.
    stream.send(frame(b"during")).await.unwrap();
    assert_eq!(busy.next().await, FromKas::Message("during".into()));
    busy.send_all([header(&[]), message("answer")]).await;
    assert_eq!(stream.next().await, Next::Message("answer".into()));
    stream.half_close().unwrap();
    assert_eq!(busy.next().await, FromKas::CloseSend);
    busy.send_all([trailer(&[("app", "1")])]).await;
    assert!(matches!(stream.next().await, Next::Trailers(trailers) if trailers["grpc-status"] == "0"));
    assert_eq!(busy.next().await, FromKas::CloseSend, "its drain notice, once it is free");

    assert!(kas.process.is_running(), "one stream is still open");
    says(&mut late_stream, "still").await;
    late_stream.half_close().unwrap();
    assert!(matches!(late_stream.next().await, Next::Trailers(trailers) if trailers["grpc-status"] == "0"));
    // Two tunnels are still open; neither delays the exit.
    assert!(kas.process.exited(PROMPTLY).await?.success());
    assert_eq!(busy.ended().await.code(), Code::Ok);
    Ok(())
}

#[tokio::test]
async fn kas_serves_everything_during_the_drain_delay() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start_with_config(json!({ "drain": { "delay": "10s" } }))
        .await?
        .raw_agent(Kind::Ours)
        .await?;
    let _configuration = agent.configuration("").await?;
    let _serving = agent.serve(1).await?;
    let since = Instant::now();
    kas.process.terminate();
    eventually("it is not ready any more", async || {
        let status = kas.get("/readiness").await?.0;
        Ok(if status == StatusCode::SERVICE_UNAVAILABLE { Ok(()) } else { Err(status) })
    })
    .await?;
    // On existing connections, through the existing tunnel.
    let mut served = 0;
    while since.elapsed() < Duration::from_millis(2_500) {
        assert_eq!(caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]).await?.messages, ["x"]);
        served += 1;
    }
    assert!(served > 0);
    assert!(kas.process.exited(2 * PROMPTLY).await?.success());
    assert!(since.elapsed() >= Duration::from_secs(10));
    Ok(())
}

#[tokio::test]
async fn idle_tunnels_of_every_kind_do_not_delay_the_exit() -> Result<()> {
    let kas = Kas::start().await?;
    let mut tunnels = Vec::new();
    let mut agents = Vec::new();
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        for _ in 0..20 {
            tunnels.push(agent.tunnel().await?);
        }
        agents.push((agent.configuration("").await?, agent));
    }
    assert!(kas.leave(PROMPTLY).await?.success());
    for mut tunnel in tunnels {
        let mut next = tunnel.next().await;
        if next == FromKas::CloseSend {
            next = tunnel.next().await;
        }
        assert!(matches!(&next, FromKas::Ended(status) if status.code() == Code::Ok), "{next:?}");
    }
    Ok(())
}

#[tokio::test]
async fn connections_during_shutdown_do_not_delay_the_exit() -> Result<()> {
    for _ in 0..10 {
        let kas = Kas::start().await?;
        let mut dialers = tokio::task::JoinSet::new();
        for address in [kas.agent, kas.api] {
            dialers.spawn(async move {
                let mut open = Vec::new();
                // Until the port is closed; accepted connections stay open.
                while let Ok(stream) = tokio::net::TcpStream::connect(address).await {
                    open.push(stream);
                    if open.len() == 1000 {
                        open.clear();
                    }
                }
                std::future::pending::<()>().await;
            });
        }
        kas.get("/readiness").await?;
        assert!(kas.leave(PROMPTLY).await?.success());
    }
    Ok(())
}

#[tokio::test]
async fn signal_right_after_the_start_is_a_clean_shutdown() -> Result<()> {
    for _ in 0..10 {
        let kas = Kas::start().await?;
        let status = kas.leave(PROMPTLY).await?;
        assert!(status.success(), "{status}");
    }
    Ok(())
}

#[tokio::test]
async fn waiting_requests_end_as_not_started_when_kas_exits() -> Result<()> {
    let Scenario { kas, caller, .. } =
        Scenario::start_with_config(json!({ "drain": { "timeout": "500ms" } })).await?;
    let mut stream = caller.open(caller.to_agent(1, &path("Echo"))).await?;
    kas.metric_is("kas_requests_waiting", 1.0).await?;
    kas.process.terminate();
    let got = answer(&mut stream).await?;
    assert_eq!((got.status.code(), got.status.outcome()), (Code::Unavailable, Some(Outcome::NotStarted)));
    assert!(kas.process.exited(PROMPTLY).await?.success());
    Ok(())
}

#[tokio::test]
async fn requests_longer_than_the_drain_timeout_end_with_an_unknown_outcome() -> Result<()> {
    let Scenario { kas, caller, .. } =
        Scenario::start_with_config(json!({ "drain": { "timeout": "700ms" } })).await?;
    let _old = Agent14::start(kas.agent, &token(2), Version::Old).await?;
    let ours = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _serving = ours.serve(3).await?;
    let mut headed = [chat(&caller, 1).await?, chat(&caller, 2).await?];
    let mut silent = caller.open(caller.to_agent(1, &path("Hang"))).await?;
    kas.metric_is("kas_requests_open", 3.0).await?;
    let begun = Instant::now();
    kas.process.terminate();
    for stream in headed.iter_mut().chain([&mut silent]) {
        let got = answer(stream).await?;
        assert_eq!(
            (got.status.code(), got.status.outcome()),
            (Code::Unavailable, Some(Outcome::Unknown)),
            "{}",
            got.status
        );
    }
    assert!(begun.elapsed() >= Duration::from_millis(700));
    assert!(kas.process.exited(PROMPTLY).await?.success());
    Ok(())
}

#[tokio::test]
async fn second_signal_ends_kas_at_once_but_sends_trailers() -> Result<()> {
    for delay in ["0s", "20s"] {
        let Scenario { kas, caller, agent: _agent } =
            Scenario::start_with_config(json!({ "drain": { "delay": delay, "timeout": "60s" } }))
                .await?
                .serving_agent(Kind::Ours, 2)
                .await?;
        let mut stream = chat(&caller, 1).await?;
        kas.process.terminate();
        kas.process
            .logged("that it shuts down", |line| {
                (line["message"] == "shutdown signal received").then_some(())
            })
            .await?;
        says(&mut stream, "still").await;
        kas.process.terminate();
        let got = answer(&mut stream).await?;
        assert_eq!((got.status.code(), got.status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
        assert!(kas.process.exited(PROMPTLY).await?.success());
    }
    Ok(())
}

#[tokio::test]
async fn agentk_reconnects_within_seconds_of_a_restart() -> Result<()> {
    let mut kas = Kas::start().await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    echo(&kas.caller().await?, 1, "before").await?;
    for orderly in [true, false, true, false] {
        if orderly {
            assert!(kas.leave(PROMPTLY).await?.success());
        } else {
            kas.process.kill();
            kas.process.exited(PROMPTLY).await?;
        }
        kas.restart().await?;
        let begun = Instant::now();
        // It waits for the agent.
        echo(&kas.caller().await?, 1, "after").await?;
        let took = begun.elapsed();
        println!("orderly: {orderly}: served {took:?} after the start");
        // The pause before an attempt is at most 10 s, and usually below 2 s.
        assert!(took < Duration::from_secs(20), "{took:?}");
        agentk.connected().await?;
    }
    Ok(())
}

#[tokio::test]
async fn open_stream_of_agentk_survives_the_drain_of_its_kas() -> Result<()> {
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    let mut upload = upload(&caller, 1, "one").await?;
    agentk.metric_is("agentk_tunnels_busy", 1.0).await?;
    kas.process.terminate();
    eventually("it is not ready any more", async || {
        let status = kas.get("/readiness").await?.0;
        Ok(if status == StatusCode::SERVICE_UNAVAILABLE { Ok(()) } else { Err(status) })
    })
    .await?;
    // There is no other replica: the agent reconnects to this one, and new requests reach it.
    echo(&kas.caller().await?, 1, "during").await?;
    upload.send(frame(&payload("two"))).await.unwrap();
    assert_eq!(uploaded(&mut upload).await?, 2);
    assert!(kas.process.exited(PROMPTLY).await?.success());
    Ok(())
}

#[tokio::test]
async fn agentk_finishes_its_requests_during_shutdown_and_accepts_no_more() -> Result<()> {
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    let mut upload = upload(&caller, 1, "one").await?;
    agentk.metric_is("agentk_tunnels_busy", 1.0).await?;
    agentk.process.terminate();
    // Its idle tunnels are withdrawn; the busy one stays.
    kas.metric_is("kas_tunnels_open", 1.0).await?;
    let request = caller.to_agent(1, ECHO).header("grpc-timeout", "300m");
    let got = caller.call(request, &[b""]).await?;
    assert_not_started(&got, Code::DeadlineExceeded);
    upload.send(frame(&payload("two"))).await.unwrap();
    assert_eq!(uploaded(&mut upload).await?, 2);
    assert!(agentk.process.exited(PROMPTLY).await?.success());
    kas.metric_is("kas_tunnels_open", 0.0).await?;
    kas.metric_is("kas_connected_agents", 0.0).await?;
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn second_signal_ends_agentk_at_once() -> Result<()> {
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    let mut stream = hold(&caller, 1).await?;
    agentk.process.terminate();
    kas.metric_is("kas_tunnels_open", 1.0).await?;
    agentk.process.terminate();
    let got = answer(&mut stream).await?;
    assert_eq!((got.status.code(), got.status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
    assert!(agentk.process.exited(PROMPTLY).await?.success());
    Ok(())
}

#[tokio::test]
async fn lost_agentk_ends_its_requests_with_an_unknown_outcome() -> Result<()> {
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    let mut stream = hold(&caller, 1).await?;
    agentk.process.kill();
    let got = answer(&mut stream).await?;
    assert_eq!((got.status.code(), got.status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
    kas.metric_is("kas_tunnels_open", 0.0).await?;
    kas.metric_is("kas_connected_agents", 0.0).await?;
    kas.metric_is("kas_agent_transports", 0.0).await?;
    Ok(())
}

#[tokio::test]
async fn cancelled_call_cancels_the_handler_in_agentk() -> Result<()> {
    let Scenario { kas: _kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    for _ in 0..5 {
        let mut silent = hold(&caller, 1).await?;
        let mut uploading = caller.open(caller.to_agent(1, UPLOAD)).await?;
        agentk.metric_is("agentk_tunnels_busy", 2.0).await?;
        silent.reset(h2::Reason::CANCEL);
        uploading.reset(h2::Reason::NO_ERROR);
        agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
    }
    // A deadline does the same.
    let request = caller.to_agent(1, HOLD).header("grpc-timeout", "200m");
    assert_eq!(caller.call(request, &[b""]).await?.status.code(), Code::DeadlineExceeded);
    agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
    echo(&caller, 1, "afterwards").await?;
    Ok(())
}

#[tokio::test]
async fn changed_token_file_is_used_for_the_next_stream() -> Result<()> {
    use testkit::kas::AgentEntry;
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    // As an operator would do it: add the new token, replace the file, remove the old token.
    let new = "new-token-of-1".to_owned();
    kas.set_agents(&[AgentEntry { tokens: vec![token(1), new.clone()], ..AgentEntry::new(1) }])?;
    eventually("the new token is known", async || {
        let agent = RawAgent::connect(kas.agent, &new, Kind::Ours).await?;
        Ok(agent.tunnel().await.map(drop))
    })
    .await?;
    agentk.set_token(&new)?;
    let since = kas.process.log_len();
    kas.set_agents(&[AgentEntry { tokens: vec![new], ..AgentEntry::new(1) }])?;
    // Streams of the old token are closed.
    kas.process
        .logged_since(since, "that the agent is cut", |line| {
            (line["message"] == "agent disconnected").then_some(())
        })
        .await?;
    let begun = Instant::now();
    echo(&caller, 1, "with the new token").await?;
    println!("back after {:?}", begun.elapsed());
    // The first pause after a refusal would be 10 s; it did not happen.
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    agentk.connected().await?;
    // No tunnel is orphaned: kas and agentk count the same number.
    eventually("kas and agentk count the same", async || {
        let counts = (agentk.metric("agentk_tunnels_idle").await?, kas.metric("kas_tunnels_open").await?);
        Ok(if counts.0 == counts.1 { Ok(()) } else { Err(counts) })
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn agentk_with_a_wrong_token_retries_rarely_and_logs_what_to_do() -> Result<()> {
    let kas = Kas::start().await?;
    let agentk = Agentk::start(kas.agent, "wrong").await?;
    let text = agentk
        .process
        .logged("what to do", |line| {
            (line["level"] == "ERROR").then(|| line["message"].as_str().map(str::to_owned))?
        })
        .await?;
    assert!(text.contains("--token-file"), "{text}");
    assert_eq!(agentk.get("/readiness").await?.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(agentk.get("/liveness").await?.0, StatusCode::OK);
    // Only a few attempts within seconds.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let refused = kas.metric("kas_refusals_total{listener=\"Agent\",reason=\"Unauthenticated\"}").await?;
    println!("{refused} streams were refused");
    assert!((1.0..=15.0).contains(&refused), "{refused}");
    assert!(!agentk.process.log().contains("wrong\""), "a token is never logged");
    Ok(())
}

#[tokio::test]
async fn agentk_waits_for_kas_to_start() -> Result<()> {
    let mut kas = Kas::start().await?;
    kas.process.kill();
    kas.process.exited(PROMPTLY).await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk
        .process
        .logged("that it cannot reach kas", |line| (line["message"] == "cannot reach kas").then_some(()))
        .await?;
    assert!(agentk.process.is_running());
    kas.restart().await?;
    echo(&kas.caller().await?, 1, "at last").await?;
    agentk.connected().await?;
    assert_eq!(agentk.get("/readiness").await?.0, StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn pool_of_agentk_grows_under_load() -> Result<()> {
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    let streams =
        join_all((0..100).map(|_| hold(&caller, 1))).await.into_iter().collect::<Result<Vec<_>>>()?;
    assert_eq!(agentk.metric("agentk_tunnels_busy").await?, 100.0);
    echo(&caller, 1, "beside a hundred").await?;
    drop(streams);
    agentk.metric_is("agentk_tunnels_busy", 0.0).await?;
    // The tunnels of cancelled requests are closed; the two idle ones stay.
    let got = caller
        .call(
            caller.to_agent(1, DOWNLOAD),
            &[&DownloadRequest { messages: 100, size: 10_000 }.encode_to_vec()],
        )
        .await?;
    assert_eq!((got.status.code(), got.messages.len()), (Code::Ok, 100));
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn sighup_is_logged_and_ends_neither_kas_nor_agentk() -> Result<()> {
    let Scenario { kas, caller, agent: agentk } = Scenario::start().await?.agentk().await?;
    let mut upload = upload(&caller, 1, "one").await?;
    agentk.metric_is("agentk_tunnels_busy", 1.0).await?;
    for process in [&kas.process, &agentk.process] {
        kill_process(Pid::from_raw(process.id()).context("an id")?, Signal::HUP)?;
        let noted = |line: &serde_json::Value| {
            let text = line["message"].as_str()?;
            text.starts_with("nothing to reopen").then(|| line["level"].clone())
        };
        assert_eq!(process.logged("that there is nothing to reopen", noted).await?, "INFO");
    }
    // Open streams continue, and new ones are accepted.
    assert_eq!(uploaded(&mut upload).await?, 1);
    echo(&caller, 1, "after").await?;
    assert!(kas.process.is_running() && agentk.process.is_running());
    Ok(())
}
