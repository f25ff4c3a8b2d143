//! A request that passes two replicas.

use super::*;

/// Two replicas: the one that the caller asked, and the one that holds the tunnel, with the stream between
/// them played by two pipes.
struct Hop {
    gateway: Kas,
    splice: Option<Splice>,
    /// The asking replica's direction of the stream, and the other one.
    asked: Pipe,
    lent: Pipe,
    out: Option<TunnelBody>,
    reset: Arc<AtomicBool>,
    /// The status with which the stream ended.
    ended: Option<Status>,
}

impl Hop {
    fn new(kind: AgentKind, caller: &Pipe) -> (Self, Exchange) {
        let gateway = kas(kind);
        let (asked, lent) = (Pipe::default(), Pipe::default());
        let reset = Arc::<AtomicBool>::default();
        let flag = Arc::clone(&reset);
        let (tunnel, out) = Tunnel::borrowed(
            info(kind),
            lent.body(),
            Arc::<Log>::default(),
            Box::new(move || flag.store(true, Ordering::SeqCst)),
            false,
        );
        let exchange = tunnel.begin(job(caller), Deadline::NONE).expect("it is new");
        (Self { gateway, splice: None, asked, lent, out: Some(out), reset, ended: None }, exchange)
    }

    /// Carries what there is in both directions, once.
    async fn carry(&mut self) {
        while let Some(out) = &mut self.out {
            match std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *out).poll_frame(cx))).await {
                Poll::Ready(Some(frame)) => {
                    let mut data = frame.unwrap().into_data().unwrap();
                    if self.splice.is_none() {
                        // The first envelope starts the request.
                        let first = data.split_to(control(response::REQUEST_INFO, b"").len());
                        let job = Job::spliced(first, Bytes::new(), self.asked.body());
                        self.splice =
                            Some(self.gateway.tunnel.begin_spliced(job, None).expect("the tunnel is free"));
                    }
                    if !data.is_empty() {
                        self.asked.write(data);
                    }
                }
                Poll::Ready(None) => {
                    self.asked.end();
                    self.out = None;
                }
                Poll::Pending => break,
            }
        }
        while let Some(splice) = &mut self.splice {
            match std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *splice).poll_frame(cx))).await {
                Poll::Ready(Some(frame)) => match frame.unwrap().into_data() {
                    Ok(data) => self.lent.write(data),
                    Err(frame) => {
                        let status = Status::from_headers(&frame.into_trailers().unwrap()).unwrap();
                        if status.code() == Code::Ok {
                            self.lent.end();
                        } else {
                            self.lent.fail(status.clone());
                        }
                        self.ended = Some(status);
                        self.splice = None;
                    }
                },
                Poll::Ready(None) => panic!("polled after the end"),
                Poll::Pending => break,
            }
        }
    }
}

#[tokio::test]
async fn across_replicas_the_agent_reads_the_same_bytes_and_the_caller_the_same_answer() {
    let (caller, expected) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    assert_eq!(hop.gateway.wrote().await.unwrap(), expected);
    hop.gateway.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"pong")].concat());
    hop.carry().await;
    assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
    assert_eq!(answered(&mut exchange).await, (message(b"pong").into(), None));
    hop.gateway.agent.write(control(request::TRAILER, b""));
    hop.carry().await;
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert_eq!(hop.ended.as_ref().unwrap().code(), Code::Ok);
    assert_eq!(hop.gateway.parked(), 1, "the tunnel is free for the next request");
    drop(exchange);
    assert!(!hop.gateway.was_reset() && !hop.reset.load(Ordering::SeqCst));
}

#[tokio::test]
async fn across_replicas_a_large_message_and_an_error_pass() {
    let caller = Pipe::default();
    let large = vec![7; 200_000];
    caller.write(message(&large));
    caller.end();
    let (mut hop, mut exchange) = Hop::new(AgentKind::Old, &caller);
    hop.carry().await;
    let wrote = hop.gateway.wrote().await.unwrap();
    assert!(wrote.ends_with(&control(response::CLOSE_SEND, b"")) && wrote.len() > large.len());
    hop.gateway.agent.write(error(Code::NotFound, "no such thing"));
    hop.carry().await;
    let Head::Only(_, status) = exchange.head().await.unwrap() else { panic!("headers before an error") };
    assert_eq!((status.code(), status.message()), (Code::NotFound, "no such thing"));
    assert_eq!(hop.gateway.wrote().await.unwrap_err().code(), Code::Ok, "a one-shot tunnel ends with OK");
}

#[tokio::test]
async fn across_replicas_an_early_answer_closes_between_messages_and_frees_the_tunnel() {
    let caller = Pipe::default();
    caller.write(message(b"first"));
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    hop.gateway.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    hop.carry().await;
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert!(hop.ended.is_none(), "the tunnel is not free before close_send");
    drop(exchange);
    hop.carry().await;
    assert_eq!(hop.gateway.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    hop.carry().await;
    assert_eq!(hop.ended.as_ref().unwrap().code(), Code::Ok);
    assert_eq!(hop.gateway.parked(), 1);
    assert!(!hop.gateway.was_reset());
}

#[tokio::test(start_paused = true)]
async fn across_replicas_a_tunnel_whose_request_stays_open_after_the_answer_is_reset_after_a_second() {
    let caller = Pipe::default();
    let (mut hop, exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    hop.gateway.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    // The asking replica hangs: it neither reads the answer nor closes.
    let splice = hop.splice.as_mut().unwrap();
    for _ in 0..3 {
        let _ = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *splice).poll_frame(cx))).await;
        hop.gateway.wrote().await.unwrap();
    }
    assert!(!hop.gateway.was_reset());
    tokio::time::advance(Duration::from_millis(1001)).await;
    hop.gateway.wrote().await.unwrap();
    assert!(hop.gateway.was_reset());
    drop(exchange);
}

#[tokio::test]
async fn across_replicas_a_caller_that_leaves_resets_both_hops() {
    let (caller, _) = complete_request(b"ping");
    let (mut hop, exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    drop(exchange);
    assert!(hop.reset.load(Ordering::SeqCst), "the stream between the replicas is reset");
    // Which drops what the gateway holds of it.
    hop.asked.reset();
    hop.splice = None;
    assert!(hop.gateway.was_reset());
}

#[tokio::test]
async fn across_replicas_what_the_lender_says_reaches_the_caller() {
    let (caller, _) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    // agentk refuses after `request_info` was written.
    hop.gateway.agent.end();
    hop.carry().await;
    let Err(failure @ Failure::Lender(_)) = exchange.head().await else { panic!("an answer") };
    let status = exchange.late_status(&failure);
    assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::NotStarted)));
}

#[tokio::test]
async fn across_replicas_a_lost_link_has_an_unknown_outcome() {
    let (caller, _) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    hop.lent.reset();
    let Err(failure) = exchange.head().await else { panic!("an answer") };
    assert_eq!(exchange.late_status(&failure).outcome(), Some(Outcome::Unknown));
    // A clean end without a complete answer is no better.
    let (caller, _) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Old, &caller);
    hop.carry().await;
    hop.lent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"pong")].concat());
    hop.lent.end();
    exchange.head().await.unwrap();
    let status = answered(&mut exchange).await.1.unwrap();
    assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
}

#[tokio::test]
async fn across_replicas_an_end_without_close_send_is_not_taken_for_the_end_of_the_request() {
    let mut gateway = kas(AgentKind::Ours);
    let asked = Pipe::default();
    asked.write(payload(response::MESSAGE, b"half of an upload"));
    asked.end();
    let mut splice = gateway
        .tunnel
        .begin_spliced(Job::spliced(control(response::REQUEST_INFO, b""), Bytes::new(), asked.body()), None)
        .unwrap();
    let wrote = gateway.wrote().await.unwrap();
    assert!(!wrote.ends_with(&control(response::CLOSE_SEND, b"")), "a truncated upload would be committed");
    let frame = std::future::poll_fn(|cx| Pin::new(&mut splice).poll_frame(cx)).await.unwrap().unwrap();
    let status = Status::from_headers(frame.trailers_ref().unwrap()).unwrap();
    assert_ne!(status.code(), Code::Ok);
    assert!(gateway.was_reset());
}

#[tokio::test]
async fn across_replicas_an_answer_is_complete_although_the_lender_stops_reading_the_request() {
    let caller = Pipe::default();
    caller.write(message(b"first"));
    let (mut hop, mut exchange) = Hop::new(AgentKind::Old, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    let answer =
        [control(request::HEADER, b""), payload(request::MESSAGE, b"early"), control(request::TRAILER, b"")];
    hop.gateway.agent.write(answer.concat());
    hop.gateway.agent.end();
    // The agent's answer is under way when HTTP/2 tells the asker that nobody reads what it still has to
    // write.
    let splice = hop.splice.as_mut().unwrap();
    let frame = std::future::poll_fn(|cx| Pin::new(&mut *splice).poll_frame(cx)).await.unwrap().unwrap();
    hop.lent.write(frame.into_data().unwrap());
    assert_eq!(hop.gateway.wrote().await.unwrap_err().code(), Code::Ok, "a one-shot tunnel ends");
    let frame = std::future::poll_fn(|cx| Pin::new(&mut *splice).poll_frame(cx)).await.unwrap().unwrap();
    assert_eq!(Status::from_headers(&frame.into_trailers().unwrap()).unwrap().code(), Code::Ok);
    hop.lent.end();
    hop.out = None;
    assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
    let (bytes, status) = answered(&mut exchange).await;
    assert_eq!((bytes, status.unwrap().code()), (message(b"early").into(), Code::Ok));
}
