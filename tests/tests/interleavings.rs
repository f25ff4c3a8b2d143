//! Frames that cross on the wire, and streams that end in every order: a real kas with hand-driven agents and
//! callers.

use anyhow::{Context as _, Result};
use bytes::{BufMut as _, BytesMut};
use grpc::{Code, Outcome};
use h2::Reason;
use proto::{
    gitlab::agent::reverse_tunnel::rpc::connect_request::Msg,
    kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse},
};
use testkit::{
    caller::{Answer, Caller, answer, frame},
    handler::{error_of, header, message, path, trailer},
    kas::{Kas, token},
    link::{Next, Stream},
    mesh::EXPLAIN_AGENT,
    raw_agent::{FromKas, Kind, RawAgent, RawTunnel},
    scenario::Scenario,
};

/// Opens a request to agent 1, sends one message, and waits until the tunnel has both.
async fn begin(caller: &Caller, tunnel: &mut RawTunnel) -> Result<Stream> {
    let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    stream.send(frame(b"hello")).await.ok().context("sent")?;
    tunnel.request().await;
    assert_eq!(tunnel.next().await, FromKas::Message("hello".into()));
    Ok(stream)
}

/// Sends a request to agent 1 through this tunnel and checks the complete response.
async fn works(caller: &Caller, tunnel: &mut RawTunnel) -> Result<()> {
    let mut stream = begin(caller, tunnel).await?;
    stream.half_close().ok().context("sent")?;
    assert_eq!(tunnel.next().await, FromKas::CloseSend);
    tunnel.send_all([header(&[]), message("fine"), trailer(&[])]).await;
    let got = answer(&mut stream).await?;
    assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &["fine".into()][..]));
    Ok(())
}

fn assert_outcome(got: &Answer, code: Code, outcome: Outcome) {
    assert_eq!((got.status.code(), got.status.outcome()), (code, Some(outcome)), "{}", got.status);
    assert!(got.status.message().contains("agent 1"), "{}", got.status);
}

#[tokio::test]
async fn withdrawing_an_idle_tunnel_ends_it_with_ok() -> Result<()> {
    let kas = Kas::start().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let mut tunnel = agent.tunnel().await?;
    tunnel.send_all([trailer(&[])]).await;
    assert_eq!(tunnel.ended().await.code(), Code::Ok);
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let mut tunnel = agent.tunnel().await?;
        tunnel.half_close();
        assert_eq!(tunnel.ended().await.code(), Code::Ok, "{kind:?}");
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn request_that_crossed_a_withdrawal_is_served_and_the_tunnel_ends_afterwards() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    for msgs in [
        vec![header(&[]), message("fine"), trailer(&[])],
        vec![error_of(5, "no"), trailer(&[])],
        vec![header(&[("app", "1")]), message("fine"), error_of(5, "no"), trailer(&[("app", "2")])],
    ] {
        let mut tunnel = agent.tunnel().await?;
        let mut stream = begin(&caller, &mut tunnel).await?;
        stream.half_close().unwrap();
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        let fails = msgs.iter().any(|msg| matches!(msg, Msg::Error(_)));
        tunnel.send_all([trailer(&[])].into_iter().chain(msgs)).await;
        let got = answer(&mut stream).await?;
        assert_eq!(got.status.code(), if fails { Code::NotFound } else { Code::Ok });
        assert_eq!(tunnel.ended().await.code(), Code::Ok);
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn withdrawals_that_race_with_requests_lose_no_request() -> Result<()> {
    let Scenario { kas: _kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let (mut crossed, mut parked) = (0, 0);
    for n in 0..100 {
        let mut tunnel = agent.tunnel().await?;
        let withdraw_first = n % 2 == 0;
        let agent_side = async {
            let mut requests = 0;
            if withdraw_first {
                tunnel.send_all([trailer(&[])]).await;
            } else {
                tokio::task::yield_now().await;
                tunnel.send_all([trailer(&[])]).await;
            }
            loop {
                match tunnel.next().await {
                    FromKas::Request(_) => requests += 1,
                    FromKas::Message(_) => {}
                    FromKas::CloseSend => tunnel.send_all([header(&[]), message("fine"), trailer(&[])]).await,
                    FromKas::Ended(status) => {
                        assert_eq!(status.code(), Code::Ok);
                        break;
                    }
                    other => panic!("{other:?}"),
                }
            }
            if requests == 0 {
                // The request waits until another tunnel is opened.
                let mut other = agent.tunnel().await.unwrap();
                other.request().await;
                assert_eq!(other.next().await, FromKas::Message("x".into()));
                assert_eq!(other.next().await, FromKas::CloseSend);
                other.send_all([header(&[]), message("fine"), trailer(&[]), trailer(&[])]).await;
                assert_eq!(other.ended().await.code(), Code::Ok);
            }
            requests
        };
        let (requests, got) =
            tokio::join!(agent_side, caller.call(caller.to_agent(1, &path("Echo")), &[b"x"]));
        let got = got?;
        assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &["fine".into()][..]));
        if requests == 0 { parked += 1 } else { crossed += 1 }
    }
    println!("{crossed} crossed, {parked} were parked");
    Ok(())
}

#[tokio::test]
async fn anything_but_a_withdrawal_on_an_idle_tunnel_resets_it() -> Result<()> {
    let kas = Kas::start().await?;
    let mut violations = 0.0;
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        for msg in [
            Some(header(&[])),
            Some(message("stray")),
            Some(trailer(&[("not", "bare")])),
            Some(error_of(5, "stray")),
            Some(Msg::Descriptor(Default::default())),
            (!kind.is_reusable()).then(|| trailer(&[])),
        ]
        .into_iter()
        .flatten()
        {
            let mut tunnel = agent.tunnel().await?;
            tunnel.send_all([msg.clone()]).await;
            assert_eq!(tunnel.next().await, FromKas::Reset(Reason::CANCEL), "{kind:?} {msg:?}");
            violations += 1.0;
        }
        // Bytes that are not an envelope.
        let mut tunnel = agent.tunnel().await?;
        tunnel.stream().send(frame(b"\xff\xff\xff")).await.unwrap();
        assert_eq!(tunnel.next().await, FromKas::Reset(Reason::CANCEL), "{kind:?}");
        violations += 1.0;
        // An agent may close its tunnel in any way.
        for reason in [Reason::CANCEL, Reason::NO_ERROR] {
            agent.tunnel().await?.stream().reset(reason);
        }
        kas.metric_is("kas_tunnels_open", 0.0).await?;
        kas.metric_is("kas_tunnel_violations_total", violations).await?;
    }
    Ok(())
}

#[tokio::test]
async fn reusable_tunnel_answered_before_the_caller_closed_serves_the_next_request() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let mut tunnel = agent.tunnel().await?;
    for _ in 0..3 {
        let mut stream = begin(&caller, &mut tunnel).await?;
        tunnel.send_all([header(&[]), message("early"), trailer(&[])]).await;
        let got = answer(&mut stream).await?;
        assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &["early".into()][..]));
        assert_eq!(tunnel.next().await, FromKas::CloseSend, "kas closes the request's direction by itself");
        // Further data of the caller is discarded.
        let _ = stream.send(frame(b"late")).await;
        works(&caller, &mut tunnel).await?;
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn one_shot_tunnel_answered_before_the_caller_closed_ends_with_ok() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in [Kind::Old, Kind::Recent] {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let mut tunnel = agent.tunnel().await?;
        let mut stream = begin(&caller, &mut tunnel).await?;
        tunnel.send_all([header(&[]), message("early"), trailer(&[])]).await;
        tunnel.half_close();
        let got = answer(&mut stream).await?;
        assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &["early".into()][..]));
        assert_eq!(tunnel.ended().await.code(), Code::Ok, "{kind:?}");

        // An error is final at once, without a half-close.
        for msgs in [vec![error_of(7, "no")], vec![header(&[]), trailer(&[]), error_of(7, "no")]] {
            let mut tunnel = agent.tunnel().await?;
            let mut stream = begin(&caller, &mut tunnel).await?;
            tunnel.send_all(msgs).await;
            assert_eq!(answer(&mut stream).await?.status.code(), Code::PermissionDenied);
            assert_eq!(tunnel.ended().await.code(), Code::Ok, "{kind:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn response_during_a_callers_message_resets_the_tunnel_but_is_complete() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let mut tunnel = agent.tunnel().await?;
    let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    stream.send(frame(&[b'x'; 100]).slice(..50)).await.unwrap();
    tunnel.request().await;
    // Half a message has reached the agent.
    let mut received = BytesMut::from(tunnel.stream().buffered());
    while !received.ends_with(b"xxxxx") {
        received.put(tunnel.stream().data().await.unwrap().unwrap());
    }
    tunnel.send_all([header(&[]), message("early"), trailer(&[("app", "1")])]).await;
    let got = answer(&mut stream).await?;
    assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &["early".into()][..]));
    assert_eq!(got.trailers["app"], "1");
    assert_eq!(
        tunnel.stream().data().await,
        Some(Err(Reason::CANCEL)),
        "a close inside a message would be swallowed"
    );
    works(&caller, &mut agent.tunnel().await?).await?;
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn response_during_a_large_message_never_corrupts_the_next_request() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let mut reused = 0;
    for n in 0..40 {
        let mut tunnel = agent.tunnel().await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        let size = 1000 * (n + 1);
        stream.send(frame(&vec![b'x'; size])).await.unwrap();
        tunnel.request().await;
        // The message is not checked: all, a part, or none of it may have been written.
        tunnel.send_all([header(&[]), trailer(&[])]).await;
        assert_eq!(answer(&mut stream).await?.status.code(), Code::Ok);
        match tunnel.next().await {
            FromKas::Message(data) => {
                assert_eq!(data.len(), size);
                assert_eq!(tunnel.next().await, FromKas::CloseSend);
                works(&caller, &mut tunnel).await?;
                reused += 1;
            }
            FromKas::CloseSend => {
                works(&caller, &mut tunnel).await?;
                reused += 1;
            }
            FromKas::Reset(reason) => assert_eq!(reason, Reason::CANCEL),
            other => panic!("{other:?}"),
        }
        drop(tunnel);
        kas.metric_is("kas_tunnels_open", 0.0).await?;
    }
    println!("{reused} of 40 tunnels went on");
    Ok(())
}

#[tokio::test]
async fn trailer_and_then_a_reset_is_an_unknown_outcome_on_one_shot_tunnels_and_complete_on_reusable_ones()
-> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        for reason in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
            let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
            let mut tunnel = agent.tunnel().await?;
            let mut stream = begin(&caller, &mut tunnel).await?;
            stream.half_close().unwrap();
            assert_eq!(tunnel.next().await, FromKas::CloseSend);
            tunnel.send_all([header(&[]), message("part"), trailer(&[])]).await;
            assert_eq!(stream.next().await, Next::Message("part".into()));
            if kind.is_reusable() {
                assert!(
                    matches!(stream.next().await, Next::Trailers(trailers) if trailers["grpc-status"] == "0")
                );
                tunnel.stream().reset(reason);
            } else {
                tunnel.stream().reset(reason);
                let got = answer(&mut stream).await?;
                assert_outcome(&got, Code::Unavailable, Outcome::Unknown);
            }
            kas.metric_is("kas_tunnels_open", 0.0).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn resets_and_early_ends_of_agents_are_never_a_complete_response() -> Result<()> {
    enum End {
        Reset(Reason),
        HalfClose,
        Cut,
        Send(Msg),
        Bytes(&'static [u8]),
    }
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        let mut ends = vec![
            (vec![], End::Reset(Reason::CANCEL)),
            (vec![], End::Reset(Reason::NO_ERROR)),
            (vec![], End::Cut),
            (vec![], End::Send(message("before the header"))),
            (vec![], End::Bytes(b"\xff")),
            (vec![header(&[])], End::Reset(Reason::CANCEL)),
            (vec![header(&[])], End::Reset(Reason::NO_ERROR)),
            (vec![header(&[])], End::HalfClose),
            (vec![header(&[])], End::Cut),
            (vec![header(&[])], End::Send(header(&[]))),
            (vec![header(&[]), message("part")], End::Reset(Reason::CANCEL)),
            (vec![header(&[]), message("part")], End::Reset(Reason::NO_ERROR)),
            (vec![header(&[]), message("part")], End::HalfClose),
            (vec![header(&[]), message("part")], End::Cut),
            (vec![header(&[]), message("part")], End::Send(Msg::Descriptor(Default::default()))),
        ];
        if kind.is_reusable() {
            ends.push((vec![error_of(5, "x")], End::HalfClose));
            ends.push((vec![error_of(5, "x")], End::Reset(Reason::NO_ERROR)));
            ends.push((vec![header(&[]), error_of(5, "x")], End::Send(message("after the error"))));
        } else {
            ends.push((vec![header(&[])], End::Send(error_of(5, "before the trailer"))));
            ends.push((vec![header(&[]), trailer(&[])], End::Send(message("after the trailer"))));
            ends.push((vec![header(&[]), trailer(&[])], End::Cut));
        }
        for (n, (msgs, end)) in ends.into_iter().enumerate() {
            let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
            let mut tunnel = agent.tunnel().await?;
            let mut stream = begin(&caller, &mut tunnel).await?;
            stream.half_close().unwrap();
            assert_eq!(tunnel.next().await, FromKas::CloseSend);
            let parts = msgs.iter().filter(|msg| matches!(msg, Msg::Message(_))).count();
            tunnel.send_all(msgs).await;
            for _ in 0..parts {
                assert_eq!(stream.next().await, Next::Message("part".into()));
            }
            match end {
                End::Reset(reason) => tunnel.stream().reset(reason),
                End::HalfClose => tunnel.half_close(),
                // Earlier data must be on its way: the caller has received it.
                End::Cut => agent.link().cut(),
                End::Send(msg) => tunnel.send_all([msg]).await,
                End::Bytes(bytes) => tunnel.stream().send(frame(bytes)).await.unwrap(),
            }
            let got = answer(&mut stream).await?;
            assert_eq!(got.status.code(), Code::Unavailable, "{kind:?} {n}: {}", got.status);
            assert_outcome(&got, Code::Unavailable, Outcome::Unknown);
            kas.metric_is("kas_tunnels_open", 0.0).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_truncated_message_of_an_agent_is_followed_by_a_status() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let mut tunnel = agent.tunnel().await?;
        let mut stream = begin(&caller, &mut tunnel).await?;
        stream.half_close().unwrap();
        tunnel.send_all([header(&[])]).await;
        let whole = grpc::encode(&testkit::handler::to_kas(message(vec![b'y'; 1000])));
        tunnel.stream().send(whole.slice(..600)).await.unwrap();
        let mut received = 0;
        while received < 500 {
            received += stream.data().await.unwrap().unwrap().len();
        }
        tunnel.half_close();
        assert!(received < 1000);
        // No more bytes: only trailers, with a status.
        assert_eq!(stream.data().await, None);
        let trailers = stream.trailers().await.expect("a status");
        let status = grpc::Status::from_headers(&trailers).expect("a status");
        assert_eq!(
            (status.code(), status.outcome()),
            (Code::Unavailable, Some(Outcome::Unknown)),
            "{kind:?}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn clean_half_close_instead_of_a_response_means_not_started() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        for closed in [false, true] {
            let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
            let mut tunnel = agent.tunnel().await?;
            let mut stream = begin(&caller, &mut tunnel).await?;
            if closed {
                stream.half_close().unwrap();
                assert_eq!(tunnel.next().await, FromKas::CloseSend);
            }
            tunnel.half_close();
            let got = answer(&mut stream).await?;
            assert_outcome(&got, Code::Unavailable, Outcome::NotStarted);
            kas.metric_is("kas_tunnels_open", 0.0).await?;
        }
    }
    Ok(())
}

/// How a caller ends its request.
#[derive(Clone, Copy, Debug)]
enum Leave {
    Reset(Reason),
    Cut,
}

#[tokio::test]
async fn reset_of_a_caller_reaches_the_agent_as_a_reset() -> Result<()> {
    let kas = Kas::start().await?;
    for kind in Kind::ALL {
        for leave in [Leave::Reset(Reason::CANCEL), Leave::Reset(Reason::NO_ERROR), Leave::Cut] {
            for closed in [false, true] {
                for headed in [false, true] {
                    let caller = kas.caller().await?;
                    let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
                    let mut tunnel = agent.tunnel().await?;
                    let mut stream = begin(&caller, &mut tunnel).await?;
                    if closed {
                        stream.half_close().unwrap();
                        assert_eq!(tunnel.next().await, FromKas::CloseSend);
                    }
                    if headed {
                        tunnel.send_all([header(&[]), message("part")]).await;
                        assert_eq!(stream.next().await, Next::Message("part".into()));
                    }
                    match leave {
                        Leave::Reset(reason) => stream.reset(reason),
                        Leave::Cut => caller.link().cut(),
                    }
                    let what = format!("{kind:?} {leave:?} closed: {closed} headed: {headed}");
                    match (kind, closed) {
                        (Kind::Ours, _) | (Kind::Old, false) => {
                            assert_eq!(tunnel.next().await, FromKas::Reset(Reason::CANCEL), "{what}");
                        }
                        (Kind::Recent, _) => match tunnel.next().await {
                            FromKas::Ended(status) => assert_eq!(status.code(), Code::Cancelled, "{what}"),
                            other => panic!("{what}: {other:?}"),
                        },
                        (Kind::Old, true) => {
                            // Its response is read and discarded, so that the agent need not back off.
                            if !headed {
                                tunnel.send_all([header(&[])]).await;
                            }
                            for _ in 0..10 {
                                tunnel.send_all([message("unwanted")]).await;
                            }
                            tunnel.send_all([trailer(&[])]).await;
                            tunnel.half_close();
                            assert_eq!(tunnel.ended().await.code(), Code::Ok, "{what}");
                        }
                    }
                    kas.metric_is("kas_requests_open", 0.0).await?;
                    kas.metric_is("kas_tunnels_open", 0.0).await?;
                }
            }
        }
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn abandoned_response_of_a_one_shot_tunnel_is_drained_up_to_a_mebibyte() -> Result<()> {
    let Scenario { kas: _kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Old).await?;
    let mut tunnel = agent.tunnel().await?;
    let mut stream = begin(&caller, &mut tunnel).await?;
    stream.half_close().unwrap();
    assert_eq!(tunnel.next().await, FromKas::CloseSend);
    stream.reset(Reason::CANCEL);
    assert!(tunnel.send(header(&[])).await);
    let mut sent = 0;
    let part = vec![0; 64 * 1024];
    while sent < 4 << 20 && tunnel.send(message(part.clone())).await {
        sent += part.len();
    }
    assert_eq!(tunnel.next().await, FromKas::Reset(Reason::CANCEL));
    // Data in flight at the reset comes on top: one stream window, and window updates before the reset
    // arrives.
    assert!((1 << 20..2 << 20).contains(&sent), "{sent}");
    Ok(())
}

/// Such requests take an agent of 14.1 away until its API server ends them. Fails if its tunnels are reset
/// although nothing arrives, or if callers and operators are told only that it is not connected, or busy.
#[tokio::test]
async fn silent_abandoned_requests_that_occupy_all_tunnels_are_reported() -> Result<()> {
    let Scenario { kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Old).await?;
    let _configuration = agent.configuration("").await?;
    let refusal = async || {
        let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "200m");
        let got = caller.call(request, &[b"x"]).await?;
        assert_outcome(&got, Code::DeadlineExceeded, Outcome::NotStarted);
        anyhow::Ok(got.status.message().to_owned())
    };
    let why = async || {
        let request = ExplainAgentRequest { agent_id: 1 };
        caller.unary::<ExplainAgentResponse>(EXPLAIN_AGENT, &request).await
    };

    let text = refusal().await?;
    assert!(text.starts_with("agent 1 is connected to this replica, but has no tunnel; waited 0."), "{text}");
    let told = why().await?;
    assert_eq!(told.route[0], "agent 1 is connected here, but has no tunnel: a request waits for one");
    assert_eq!(told.replicas[0].transports, 1);

    let mut occupied = Vec::new();
    for _ in 0..2 {
        let mut tunnel = agent.tunnel().await?;
        let mut stream = begin(&caller, &mut tunnel).await?;
        stream.half_close().unwrap();
        assert_eq!(tunnel.next().await, FromKas::CloseSend);
        stream.reset(Reason::CANCEL);
        occupied.push(tunnel);
    }
    kas.metric_is("kas_tunnels_abandoned", 2.0).await?;
    let text = refusal().await?;
    let all = "agent 1 is connected to this replica, but all its tunnels (2) have been occupied by abandoned requests for ";
    assert!(text.starts_with(all) && text.contains("restart agentk, or update it"), "{text}");
    let told = why().await?;
    let own = &told.replicas[0];
    assert_eq!((own.idle_tunnels, own.busy_tunnels, own.abandoned_tunnels), (0, 2, 2));
    let all = "all tunnels here (2) have been occupied by abandoned requests for ";
    assert!(told.route[0].starts_with(all), "{:?}", told.route);
    assert!(told.route.iter().any(|step| step.contains("restart agentk")), "{:?}", told.route);

    // The API server ends a response: the tunnel ends with OK, and the agent opens another one.
    let mut tunnel = occupied.remove(0);
    tunnel.send_all([header(&[]), message("late"), trailer(&[])]).await;
    tunnel.half_close();
    assert_eq!(tunnel.ended().await.code(), Code::Ok);
    kas.metric_is("kas_tunnels_abandoned", 1.0).await?;
    let mut tunnel = agent.tunnel().await?;
    let mut stream = begin(&caller, &mut tunnel).await?;
    stream.half_close().unwrap();
    assert_eq!(tunnel.next().await, FromKas::CloseSend);
    tunnel.send_all([header(&[]), message("fine"), trailer(&[])]).await;
    tunnel.half_close();
    assert_eq!(answer(&mut stream).await?.status.code(), Code::Ok);
    Ok(())
}

#[tokio::test]
async fn deadline_that_passes_cancels_the_request_at_the_agent() -> Result<()> {
    let Scenario { kas, caller, .. } = Scenario::start().await?;
    for kind in Kind::ALL {
        let agent = RawAgent::connect(kas.agent, &token(1), kind).await?;
        let mut tunnel = agent.tunnel().await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Chat")).header("grpc-timeout", "2S")).await?;
        stream.send(frame(b"x")).await.unwrap();
        tunnel.request().await;
        assert_eq!(tunnel.next().await, FromKas::Message("x".into()));
        let got = answer(&mut stream).await?;
        assert_outcome(&got, Code::DeadlineExceeded, Outcome::Unknown);
        match (kind, tunnel.next().await) {
            (Kind::Recent, FromKas::Ended(status)) => assert_eq!(status.code(), Code::Cancelled),
            (Kind::Ours | Kind::Old, FromKas::Reset(reason)) => assert_eq!(reason, Reason::CANCEL),
            (kind, other) => panic!("{kind:?}: {other:?}"),
        }
        kas.metric_is("kas_tunnels_open", 0.0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn control_messages_are_bounded() -> Result<()> {
    let Scenario { kas: _kas, caller, agent } = Scenario::start().await?.raw_agent(Kind::Ours).await?;
    let mut tunnel = agent.tunnel().await?;
    let mut stream = begin(&caller, &mut tunnel).await?;
    tunnel.send(header(&[("big", &"x".repeat(70_000))])).await;
    let got = answer(&mut stream).await?;
    assert_outcome(&got, Code::Unavailable, Outcome::Unknown);
    assert_eq!(tunnel.next().await, FromKas::Reset(Reason::CANCEL));
    works(&caller, &mut agent.tunnel().await?).await?;
    Ok(())
}

#[tokio::test]
async fn slow_caller_delays_only_its_own_agent_stream() -> Result<()> {
    let kas = Kas::start().await?;
    let slow = kas.caller().await?;
    let fast = kas.caller().await?;
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let mut stalled = agent.tunnel().await?;
    let stream = begin(&slow, &mut stalled).await?;
    stalled.send_all([header(&[])]).await;
    // Until the windows are full: kas buffers no more than those.
    let part = vec![0; 64 * 1024];
    let mut sent = 0;
    while tokio::time::timeout(std::time::Duration::from_millis(500), stalled.send(message(part.clone())))
        .await
        .is_ok_and(|taken| taken)
    {
        sent += part.len();
        assert!(sent < 8 << 20, "kas buffers {sent} bytes for a caller that does not read");
    }
    let mut other = agent.tunnel().await?;
    for _ in 0..20 {
        works(&fast, &mut other).await?;
    }
    drop(stream);
    Ok(())
}
