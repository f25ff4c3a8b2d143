//! The end of kas against a scripted agentk.

use super::*;

#[tokio::test]
async fn reusable_tunnel_carries_requests_one_after_the_other() {
    let mut kas = kas(AgentKind::Ours);
    for round in 1..=3 {
        let (caller, expected) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        assert_eq!(kas.wrote().await.unwrap(), expected);
        kas.agent.write(control(request::HEADER, b""));
        assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
        kas.agent.write([payload(request::MESSAGE, b"pong"), control(request::TRAILER, b"")].concat());
        let (bytes, status) = answered(&mut exchange).await;
        assert_eq!(bytes, message(b"pong"));
        assert_eq!(status.unwrap().code(), Code::Ok);
        drop(exchange);
        assert_eq!(kas.wrote().await.unwrap(), "");
        assert_eq!(kas.parked(), round);
    }
    assert!(!kas.was_reset());
}

#[tokio::test]
async fn one_shot_tunnel_ends_with_ok_after_its_request() {
    for kind in [AgentKind::Old, AgentKind::Recent] {
        let mut kas = kas(kind);
        let (caller, _) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        kas.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"pong")].concat());
        kas.agent.write(control(request::TRAILER, b""));
        assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
        assert_eq!(answered(&mut exchange).await, (message(b"pong").into(), None), "OK is not sure yet");
        kas.agent.end();
        assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
        assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
        assert_eq!(kas.parked(), 0);
    }
}

#[tokio::test]
async fn one_shot_trailer_then_reset_has_an_unknown_outcome() {
    let mut kas = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    kas.agent.reset();
    exchange.head().await.unwrap();
    let status = answered(&mut exchange).await.1.unwrap();
    assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
}

#[tokio::test]
async fn error_is_final_at_once_on_one_shot_and_waits_for_the_trailer_on_reusable() {
    let mut old = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"");
    let mut exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    old.agent.write(error(Code::NotFound, "no such thing"));
    let Head::Only(_, status) = exchange.head().await.unwrap() else { panic!("headers before an error") };
    assert_eq!((status.code(), status.message()), (Code::NotFound, "no such thing"));

    let mut ours = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"");
    let mut exchange = ours.begin(&caller);
    ours.wrote().await.unwrap();
    ours.agent.write(error(Code::NotFound, "no such thing"));
    let waiting = tokio::time::timeout(Duration::from_millis(1), exchange.head()).await;
    assert!(waiting.is_err(), "the trailer has not come");
    ours.agent.write(control(request::TRAILER, b""));
    assert!(matches!(exchange.head().await.unwrap(), Head::Only(_, s) if s.code() == Code::NotFound));
    assert_eq!(ours.parked(), 1, "an application's error parks the tunnel");
}

#[tokio::test]
async fn half_close_before_any_answer_is_not_started() {
    for kind in [AgentKind::Ours, AgentKind::Old] {
        let mut kas = kas(kind);
        let (caller, _) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        kas.agent.end();
        assert!(matches!(exchange.head().await, Err(Failure::Refused)));
        assert!(kas.was_reset());
    }
}

#[tokio::test]
async fn a_tunnel_that_dies_before_anything_was_written_gives_the_request_back() {
    let kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    // HTTP/2 drops the stream before its task wrote anything.
    let Kas { out, agent, .. } = kas;
    agent.reset();
    drop(out);
    let Err(Failure::NotStarted(job)) = exchange.head().await else { panic!("the request is lost") };
    assert_eq!(job.into_body().collect().await.unwrap().to_bytes(), message(b"ping"));
}

#[tokio::test]
async fn a_caller_that_leaves_before_anything_was_written_gives_the_tunnel_back() {
    let mut kas = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    drop(kas.begin(&caller));
    assert_eq!(kas.parked(), 1);
    assert!(caller.is_dropped() && !kas.was_reset());
    let (caller, expected) = complete_request(b"next");
    let _exchange = kas.begin(&caller);
    assert_eq!(kas.wrote().await.unwrap(), expected);
}

#[tokio::test]
async fn withdrawal_ends_a_parked_tunnel_with_ok() {
    let mut kas = kas(AgentKind::Ours);
    kas.agent.write(control(request::TRAILER, b""));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
    let (caller, _) = complete_request(b"");
    assert!(kas.tunnel.begin(job(&caller), Deadline::NONE).is_err());
}

#[tokio::test]
async fn withdrawal_that_comes_before_a_request_was_written_gives_the_request_back() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.agent.write(control(request::TRAILER, b""));
    let Err(Failure::NotStarted(job)) = exchange.head().await else { panic!("the request is lost") };
    assert_eq!(job.into_body().collect().await.unwrap().to_bytes(), message(b"ping"));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
    assert!(!kas.was_reset());
}

#[tokio::test]
async fn withdrawal_that_crosses_a_request_is_ignored_and_the_tunnel_ends_after_it() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, expected) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    assert_eq!(kas.wrote().await.unwrap(), expected);
    kas.agent.write([control(request::TRAILER, b""), control(request::HEADER, b"")].concat());
    exchange.head().await.unwrap();
    kas.agent.write([payload(request::MESSAGE, b"pong"), control(request::TRAILER, b"")].concat());
    let (bytes, status) = answered(&mut exchange).await;
    assert_eq!((bytes, status.unwrap().code()), (message(b"pong").into(), Code::Ok));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
    assert_eq!(kas.parked(), 0);
}

#[tokio::test]
async fn drain_notice_goes_to_parked_reusable_tunnels_and_ok_to_one_shot_ones() {
    let mut ours = kas(AgentKind::Ours);
    ours.tunnel.retire(Retire::Notice);
    assert_eq!(ours.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    let (caller, _) = complete_request(b"");
    assert!(ours.tunnel.begin(job(&caller), Deadline::NONE).is_err(), "no request after the notice");
    ours.agent.end();
    assert_eq!(ours.wrote().await.unwrap_err().code(), Code::Ok);

    let mut old = kas(AgentKind::Old);
    old.tunnel.retire(Retire::Notice);
    assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);
}

#[tokio::test]
async fn a_busy_tunnel_gets_its_notice_when_it_finishes() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    kas.tunnel.retire(Retire::Notice);
    assert_eq!(kas.wrote().await.unwrap(), "");
    kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert_eq!(kas.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    assert_eq!(kas.parked(), 0, "a retired tunnel is not offered again");
}

#[tokio::test]
async fn stray_bytes_on_a_parked_tunnel_reset_it() {
    for stray in
        [payload(request::MESSAGE, b"x"), control(request::HEADER, b""), Bytes::from_static(b"\x07\0\0\0\0")]
    {
        let mut kas = kas(AgentKind::Ours);
        assert_eq!(kas.wrote().await.unwrap(), "");
        kas.agent.write(stray);
        assert_eq!(kas.wrote().await.unwrap(), "");
        assert!(kas.was_reset());
        assert_eq!(kas.log.violations.lock().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn an_answer_before_close_send_closes_between_messages_and_parks() {
    let mut kas = kas(AgentKind::Ours);
    let caller = Pipe::default();
    caller.write(message(b"one"));
    let mut exchange = kas.begin(&caller);
    let expected = [control(response::REQUEST_INFO, b""), payload(response::MESSAGE, b"one")].concat();
    assert_eq!(kas.wrote().await.unwrap(), expected);
    kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert_eq!(kas.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    assert_eq!(kas.parked(), 1);
    assert!(caller.is_dropped(), "what the caller still sends is not read");
}

#[tokio::test]
async fn an_answer_inside_a_message_resets_unless_the_rest_is_already_here() {
    for (rest, reset) in [(&b""[..], true), (b"cdef", false)] {
        let mut kas = kas(AgentKind::Ours);
        let caller = Pipe::default();
        let mut first = grpc::prefix(6).to_vec();
        first.extend_from_slice(b"ab");
        caller.write(first);
        let mut exchange = kas.begin(&caller);
        let mut expected = BytesMut::new();
        expected.put_slice(&control(response::REQUEST_INFO, b""));
        frame::put_message_head(response::MESSAGE, 6, &mut expected);
        expected.put_slice(b"ab");
        assert_eq!(kas.wrote().await.unwrap(), expected);
        if !rest.is_empty() {
            caller.write(rest);
            assert_eq!(kas.wrote().await.unwrap(), rest);
        }
        kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
        exchange.head().await.unwrap();
        assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
        let wrote = kas.wrote().await.unwrap();
        assert_eq!(kas.was_reset(), reset);
        assert_eq!(wrote, if reset { Bytes::new() } else { control(response::CLOSE_SEND, b"") });
        assert_eq!(kas.parked(), usize::from(!reset));
    }
}

#[tokio::test]
async fn a_callers_reset_is_never_passed_on_as_close_send() {
    for kind in [AgentKind::Ours, AgentKind::Old, AgentKind::Recent] {
        let mut kas = kas(kind);
        let caller = Pipe::default();
        caller.write(message(b"one"));
        let exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        caller.reset();
        assert_eq!(kas.wrote().await.unwrap(), "", "{kind:?}");
        drop(exchange);
        match kind {
            AgentKind::Recent => assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Cancelled),
            _ => assert!(kas.was_reset(), "{kind:?}"),
        }
    }
}

#[tokio::test]
async fn a_caller_that_leaves_cancels_at_once_or_lets_an_old_agent_finish() {
    // Reusable: reset, also after close_send and before any answer.
    let mut ours = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let exchange = ours.begin(&caller);
    ours.wrote().await.unwrap();
    drop(exchange);
    assert!(ours.was_reset());

    // 14.1 after close_send: its answer is read and dropped, and the tunnel ends with OK.
    let mut old = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    let exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    drop(exchange);
    assert_eq!(old.wrote().await.unwrap(), "");
    old.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"late")].concat());
    old.agent.write(control(request::TRAILER, b""));
    old.agent.end();
    assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);
    assert!(!old.was_reset());

    // 14.1 before close_send: an early one would commit a truncated upload.
    let mut old = kas(AgentKind::Old);
    let caller = Pipe::default();
    caller.write(message(b"part"));
    let exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    drop(exchange);
    assert!(old.was_reset());
}

/// A 14.1 agent whose caller has left after the whole request was written.
async fn abandoned() -> Kas {
    let mut old = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    let exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    drop(exchange);
    assert_eq!(old.wrote().await.unwrap(), "");
    old
}

#[tokio::test(start_paused = true)]
async fn an_old_agents_abandoned_answer_is_read_up_to_a_mebibyte() {
    let mut old = abandoned().await;
    old.agent.write(control(request::HEADER, b""));
    old.agent.write(payload(request::MESSAGE, &vec![0; 1 << 20]));
    old.wrote().await.unwrap();
    assert!(!old.was_reset());
    old.agent.write(payload(request::MESSAGE, b"x"));
    old.wrote().await.unwrap();
    assert!(old.was_reset());
}

/// The reset would free nothing: the agent's handler goes on until it sends something, and only then begins
/// the agent's back-off. This failed when the tunnel was reset ten seconds after the caller had left.
#[tokio::test(start_paused = true)]
async fn a_silent_old_agent_is_not_reset_and_its_late_answer_ends_the_tunnel_with_ok() {
    for headed in [false, true] {
        let mut old = abandoned().await;
        if headed {
            old.agent.write(control(request::HEADER, b""));
            old.wrote().await.unwrap();
        }
        let since = old.tunnel.abandoned_since().expect("it is occupied");
        for _ in 0..60 {
            tokio::time::advance(Duration::from_secs(60)).await;
            assert_eq!(old.wrote().await.unwrap(), "");
            assert!(!old.was_reset());
        }
        assert_eq!(old.tunnel.abandoned_since(), Some(since));
        // The pieces of an answer do not arrive in the same moment.
        if !headed {
            old.agent.write(control(request::HEADER, b""));
            old.wrote().await.unwrap();
        }
        tokio::time::advance(Duration::from_millis(500)).await;
        old.agent.write(payload(request::MESSAGE, b"late"));
        old.wrote().await.unwrap();
        old.agent.write(control(request::TRAILER, b""));
        old.agent.end();
        assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);
        assert!(!old.was_reset());
        assert_eq!(old.tunnel.abandoned_since(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn an_old_agents_abandoned_answer_that_goes_on_after_ten_seconds_resets_the_tunnel() {
    for early in [false, true] {
        let mut old = abandoned().await;
        if early {
            old.agent.write(control(request::HEADER, b""));
            old.wrote().await.unwrap();
        }
        tokio::time::advance(Duration::from_secs(9)).await;
        old.wrote().await.unwrap();
        tokio::time::advance(Duration::from_secs(2)).await;
        if early {
            old.agent.write(payload(request::MESSAGE, b"event"));
        } else {
            old.agent.write(control(request::HEADER, b""));
        }
        old.wrote().await.unwrap();
        assert!(!old.was_reset(), "the answer may be complete in a moment");
        tokio::time::advance(Duration::from_millis(1001)).await;
        old.wrote().await.unwrap();
        assert!(old.was_reset());
    }
}

#[tokio::test]
async fn the_pool_is_told_of_a_request_that_occupies_a_tunnel_without_its_caller() {
    let mut old = abandoned().await;
    assert_eq!(old.log.abandoned.load(Ordering::SeqCst), 1);
    old.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    old.agent.end();
    assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);

    // A reset frees the tunnel of an agent that can cancel, and that of a request that is not complete.
    for kind in [AgentKind::Ours, AgentKind::Recent, AgentKind::Old] {
        let mut kas = kas(kind);
        let caller = Pipe::default();
        caller.write(message(b"part"));
        let exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        drop(exchange);
        assert_eq!(kas.log.abandoned.load(Ordering::SeqCst), 0, "{kind:?}");
        assert_eq!(kas.tunnel.abandoned_since(), None, "{kind:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_deadline_counts_over_the_whole_answer() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.tunnel.begin(job(&caller), Deadline::after(Duration::from_millis(300))).unwrap();
    kas.wrote().await.unwrap();
    kas.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"one")].concat());
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await, (message(b"one").into(), None));
    tokio::time::advance(Duration::from_millis(301)).await;
    let status = answered(&mut exchange).await.1.unwrap();
    assert_eq!((status.code(), status.outcome()), (Code::DeadlineExceeded, Some(Outcome::Unknown)));
    assert!(kas.was_reset());
}

#[tokio::test]
async fn wrong_bytes_of_a_caller_are_the_callers_fault() {
    let mut kas = kas(AgentKind::Ours);
    let caller = Pipe::default();
    caller.write(&b"\x01\0\0\0\x01x"[..]);
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    let Err(Failure::Caller(status)) = exchange.head().await else { panic!("not the caller's fault") };
    assert_eq!(status.code(), Code::Internal);
    assert!(kas.was_reset(), "the agent must not take what came for a whole request");
}

#[tokio::test]
async fn ending_a_tunnel_ends_its_request_with_an_unknown_outcome() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    let failed = tokio::spawn(async move { exchange.head().await.map(drop) });
    tokio::task::yield_now().await;
    kas.tunnel.end(Status::new(Code::Unauthenticated, "revoked"));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Unauthenticated);
    assert!(matches!(failed.await.unwrap(), Err(Failure::Unknown)));
}
