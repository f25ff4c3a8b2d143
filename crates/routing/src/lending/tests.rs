//! A tunnel that stays leased between requests: interleavings of the borrower, the holder of the tunnel, and
//! the agent. The order of each test decides, not time. The streams between them are pipes.

mod needs;
mod schedules;
mod withdrawn;

use std::{pin::Pin, sync::Weak, task::Waker};

use bytes::{BufMut as _, Bytes, BytesMut};
use cluster::{InMemoryTracker, Lease, Locator as _};
use grpc::{BoxError, Code, Outcome, Status, testing::Pipe};
use http::HeaderMap;
use ids::{ReplicaId, TokenHash};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tunnel::{
    features::Features,
    frame::{self, request, response},
    kas_end::{AgentKind, Descriptor, Exchange, Failure, Head, Info, Opening, Retire, TunnelBody},
};

use super::*;
use crate::{
    peer::lease_pool::{LeasePool, LeasedTunnel},
    rate_limit::RateLimit,
    registry::{Gone, Limits, RegistryPool, Waiting},
};

const METHOD: &str = "/s/M";
const OTHER: &str = "/s/Other";

fn agent() -> AgentId {
    AgentId::new(3).unwrap()
}

fn info() -> Info {
    Info {
        agent: agent(),
        instance: 1,
        token: TokenHash::of(b"t"),
        kind: AgentKind::Ours,
        features: Features::IMPERSONATION,
        version: None,
        descriptor: Arc::new(Descriptor::of(&[METHOD, OTHER])),
    }
}

fn control(field: u32) -> Bytes {
    let mut out = BytesMut::new();
    frame::put_control(field, b"", &mut out);
    out.freeze()
}

fn message(field: u32, data: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    frame::put_message_head(field, data.len() as u32, &mut out);
    out.put_slice(data);
    out.freeze()
}

fn plain(data: &[u8]) -> Bytes {
    [&grpc::prefix(data.len() as u32)[..], data].concat().into()
}

/// What the agent reads: a complete request.
fn whole(data: &[u8]) -> Bytes {
    let parts =
        [control(response::REQUEST_INFO), message(response::MESSAGE, data), control(response::CLOSE_SEND)];
    parts.concat().into()
}

/// What the agent writes: a complete response.
fn answer(data: &[u8]) -> Bytes {
    let parts = [control(request::HEADER), message(request::MESSAGE, data), control(request::TRAILER)];
    parts.concat().into()
}

/// The result of polling a body: the bytes, the trailers, and whether it has ended.
#[derive(Debug, Default)]
struct Wrote {
    bytes: Bytes,
    trailers: Option<HeaderMap>,
    over: bool,
}

fn poll(body: &mut (impl http_body::Body<Data = Bytes, Error = BoxError> + Unpin)) -> Wrote {
    let mut cx = Context::from_waker(Waker::noop());
    let mut wrote = Wrote::default();
    let mut bytes = BytesMut::new();
    while let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(&mut cx) {
        let Some(frame) = frame else {
            wrote.over = true;
            break;
        };
        match frame.unwrap().into_data() {
            Ok(data) => bytes.put_slice(&data),
            Err(frame) => {
                wrote.trailers = frame.into_trailers().ok();
                wrote.over = true;
                break;
            }
        }
    }
    wrote.bytes = bytes.freeze();
    wrote
}

/// One tunnel of the agent at its holder, and another replica that borrows it.
struct Lab {
    registry: Arc<TunnelRegistry>,
    metrics: Arc<RequestMetrics>,
    /// The two directions of the tunnel: from the agent, and to it.
    agent: Pipe,
    to_agent: Option<TunnelBody>,
    agent_reset: Arc<Mutex<bool>>,
    held: Weak<Tunnel>,

    leases: Arc<LeasePool>,
    /// The borrower knows the holder of the agent.
    known: Option<Lease>,
    /// The stream between the replicas: its two ends, and the bytes in transit.
    lend: Option<LendBody<Envelopes>>,
    pump: Option<TunnelBody>,
    asked: Pipe,
    lent: Pipe,
    /// How the holder ended the stream.
    ended: Option<Option<Status>>,
    borrower_reset: Arc<Mutex<bool>>,
}

/// A request, as the caller of the borrower sees it.
struct Call(Exchange);

impl Call {
    /// Returns the response so far, and its status if it is complete.
    async fn answered(&mut self) -> Result<(Bytes, Option<Status>), Failure> {
        if let Head::Only(_, status) = self.0.head().await? {
            return Ok((Bytes::new(), Some(status)));
        }
        let wrote = poll(&mut self.0);
        Ok((wrote.bytes, wrote.trailers.and_then(|trailers| Status::from_headers(&trailers))))
    }

    async fn expect(mut self, data: &[u8]) {
        let (bytes, status) = self.answered().await.unwrap();
        assert_eq!(bytes, plain(data));
        assert_eq!(status.map(|status| status.code()), Some(Code::Ok));
    }
}

/// Opens a tunnel of the agent.
fn open(
    registry: &Arc<TunnelRegistry>,
    info: Info,
    pipe: &Pipe,
    reset: &Arc<Mutex<bool>>,
) -> (Arc<Tunnel>, TunnelBody) {
    let pool = Arc::new(RegistryPool {
        registry: Arc::clone(registry),
        rate_limit: Arc::new(RateLimit::new(100, 1_000)),
    });
    let flag = Arc::clone(reset);
    let opening = Opening::new(pipe.body(), false);
    let (tunnel, body) = Tunnel::new(info, opening, pool, Box::new(move || *flag.lock() = true));
    registry.insert(&tunnel, None);
    (tunnel, body)
}

/// A further tunnel of the agent at its replica.
struct Other {
    agent: Pipe,
    to_agent: TunnelBody,
}

impl Other {
    fn reads(&mut self) -> Bytes {
        poll(&mut self.to_agent).bytes
    }
}

impl Lab {
    /// The agent opens another tunnel.
    fn another(&self, kind: AgentKind) -> Other {
        let agent = Pipe::default();
        let (_, to_agent) = open(&self.registry, Info { kind, ..info() }, &agent, &Arc::default());
        Other { agent, to_agent }
    }

    fn new() -> Self {
        let me = |name: &str| cluster::Replica { id: ReplicaId::new(name), address: "127.0.0.1:1".into() };
        let metrics = Arc::new(RequestMetrics::new(&mut Registry::default()));
        let limits =
            Limits { waiters_per_agent: 100, waiters: 100, tunnels_per_agent: 100, endless_per_old_agent: 2 };
        let tracker = Arc::new(InMemoryTracker::new(me("holder")));
        let registry = TunnelRegistry::new(tracker, Arc::clone(&metrics), limits);
        registry.transport_opened(agent());
        let pipe = Pipe::default();
        let agent_reset = Arc::<Mutex<bool>>::default();
        let (tunnel, to_agent) = open(&registry, info(), &pipe, &agent_reset);
        let view = InMemoryTracker::new(me("holder"));
        let known = view.route(agent(), Arc::default());
        Self {
            registry,
            metrics,
            agent: pipe,
            to_agent: Some(to_agent),
            agent_reset,
            held: Arc::downgrade(&tunnel),
            leases: LeasePool::new(Arc::new(view)),
            known: Some(known),
            lend: None,
            pump: None,
            asked: Pipe::default(),
            lent: Pipe::default(),
            ended: None,
            borrower_reset: Arc::default(),
        }
    }

    /// The borrower has a lease, after the first of many requests.
    async fn lent() -> Self {
        let mut lab = Self::new();
        // Two requests begin together, so a lease is worthwhile.
        assert!(lab.leases.take(agent(), &METHOD.into(), Features::NONE).await.is_none());
        assert!(lab.leases.take(agent(), &METHOD.into(), Features::NONE).await.is_none());
        let call = lab.borrow();
        lab.carry();
        assert_eq!(lab.agent_reads(), whole(b"first"));
        lab.agent.write(answer(b"first"));
        lab.carry();
        call.expect(b"first").await;
        lab
    }

    /// Borrows the tunnel and begins a request.
    fn borrow(&mut self) -> Call {
        let method = Arc::from(METHOD);
        let replica = ReplicaId::new("borrower");
        let Ok(Acquired::Now(grant)) =
            self.registry.acquire_for(&replica, agent(), &method, None, Features::NONE)
        else {
            panic!("the tunnel is idle")
        };
        let borrower = Borrower { replica, method: Arc::clone(&method) };
        let source = Arc::clone(&self.registry) as Arc<dyn TunnelSource>;
        let lender = TunnelLender::new(source, Arc::clone(&self.metrics), None);
        let request = BorrowRequest {
            borrower,
            agent: agent(),
            connection: None,
            needs: Features::NONE,
            is_long: false,
            is_endless: false,
        };
        self.lend = Some(lender.lend(request, grant, Envelopes::new(self.asked.body()), true));
        let pool = self.leases.pool_of(agent(), &method, &ReplicaId::new("holder"));
        let flag = Arc::clone(&self.borrower_reset);
        let reset = Box::new(move || *flag.lock() = true);
        let (tunnel, pump) = Tunnel::borrowed(info(), self.lent.body(), pool, reset, true);
        self.pump = Some(pump);
        Self::begin(&tunnel, b"first").expect("it is new")
    }

    fn begin(tunnel: &Arc<Tunnel>, data: &[u8]) -> Result<Call, Job> {
        let caller = Pipe::default();
        caller.write(plain(data));
        caller.end();
        let job = Job::new(control(response::REQUEST_INFO), caller.body());
        tunnel.begin(job, Deadline::NONE).map(Call)
    }

    async fn take(&self) -> Option<LeasedTunnel> {
        self.leases.take(agent(), &METHOD.into(), Features::NONE).await
    }

    /// Begins another request on the leased tunnel.
    async fn again(&self, data: &[u8]) -> Call {
        let leased = self.take().await.expect("one is leased");
        Self::begin(&leased.take().unwrap(), data).expect("it is free")
    }

    /// The borrower writes.
    fn borrower_writes(&mut self) {
        if let Some(pump) = &mut self.pump {
            let wrote = poll(pump);
            if !wrote.bytes.is_empty() {
                self.asked.write(wrote.bytes);
            }
            if wrote.over {
                self.asked.end();
            }
            if wrote.over || *self.borrower_reset.lock() {
                self.pump = None;
            }
        }
    }

    /// The holder writes.
    fn holder_writes(&mut self) {
        if let Some(lend) = &mut self.lend {
            let wrote = poll(lend);
            if !wrote.bytes.is_empty() {
                self.lent.write(wrote.bytes);
            }
            if wrote.over {
                let status = wrote.trailers.and_then(|trailers| Status::from_headers(&trailers));
                match &status {
                    Some(status) if status.code() == Code::Ok => self.lent.end(),
                    Some(status) => self.lent.fail(status.clone()),
                    None => self.lent.reset(),
                }
                self.ended = Some(status);
                self.lend = None;
            }
        }
    }

    /// What is written to the agent.
    fn agent_reads(&mut self) -> Bytes {
        let Some(out) = &mut self.to_agent else { return Bytes::new() };
        let wrote = poll(out);
        if wrote.over {
            self.to_agent = None;
        }
        wrote.bytes
    }

    /// Everything in transit arrives.
    fn carry(&mut self) {
        for _ in 0..3 {
            self.borrower_writes();
            self.holder_writes();
        }
    }

    /// HTTP/2 passes the reset of the borrower on.
    fn pass_reset(&mut self) {
        assert!(*self.borrower_reset.lock(), "the borrower has not reset the stream");
        self.asked.reset();
        self.pump = None;
        self.lend = None;
    }

    fn wait(&self, source: Option<&str>, method: &str) -> Waiting {
        let method = Arc::from(method);
        let acquired = match source {
            None => self.registry.acquire(agent(), &method, None, Features::NONE),
            Some(name) => {
                self.registry.acquire_for(&ReplicaId::new(name), agent(), &method, None, Features::NONE)
            }
        };
        match acquired {
            Ok(Acquired::Wait(waiting)) => waiting,
            other => panic!("{other:?}"),
        }
    }

    /// Idle and busy tunnels of the agent at its replica.
    fn counts(&self) -> (usize, usize) {
        let (idle, busy, _) = self.registry.counts(agent());
        (idle, busy)
    }

    fn ended_ok(&self) -> bool {
        matches!(&self.ended, Some(Some(status)) if status.code() == Code::Ok)
    }

    fn ended_not_started(&self) -> bool {
        matches!(&self.ended, Some(Some(status)) if status.outcome() == Some(Outcome::NotStarted))
    }
}

async fn granted(mut waiting: Waiting) -> Result<Grant, Gone> {
    tokio::time::timeout(Duration::ZERO, waiting.granted()).await.expect("a grant at once")
}

async fn still_waits(waiting: &mut Waiting) {
    assert!(tokio::time::timeout(Duration::ZERO, waiting.granted()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn several_requests_use_one_stream() {
    let mut lab = Lab::lent().await;
    for n in 0..5_u8 {
        assert_eq!(lab.counts(), (0, 1), "a leased tunnel counts as busy");
        assert_eq!(lab.metrics.requests_open.get(), 0, "and carries no request");
        let call = lab.again(&[n]).await;
        lab.carry();
        assert_eq!(lab.agent_reads(), whole(&[n]));
        assert_eq!(lab.metrics.requests_open.get(), 1);
        lab.agent.write(answer(&[n]));
        lab.carry();
        call.expect(&[n]).await;
    }
    assert!(lab.ended.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_answer_before_the_end_of_the_request_closes_it_and_the_tunnel_stays_leased() {
    let mut lab = Lab::lent().await;
    let caller = Pipe::default();
    let leased = lab.take().await.unwrap();
    let job = Job::new(control(response::REQUEST_INFO), caller.body());
    let call = Call(leased.take().unwrap().begin(job, Deadline::NONE).unwrap());
    lab.carry();
    lab.agent_reads();
    lab.agent.write(answer(b"early"));
    lab.carry();
    call.expect(b"early").await;
    assert!(lab.take().await.is_none(), "not before both directions have ended");
    lab.carry();
    assert_eq!(lab.agent_reads(), control(response::CLOSE_SEND));
    lab.carry();
    assert!(lab.take().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn after_many_requests_another_owner_may_be_asked() {
    let mut lab = Lab::lent().await;
    let mut requests = 1;
    while lab.ended.is_none() {
        let call = lab.again(b"x").await;
        lab.carry();
        lab.agent_reads();
        lab.agent.write(answer(b"x"));
        lab.carry();
        call.expect(b"x").await;
        requests += 1;
        assert!(requests < 200);
        lab.carry();
    }
    assert!(lab.ended_ok());
    assert_eq!((requests, lab.counts()), (128, (1, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_leased_tunnel_that_no_request_takes_is_returned() {
    let mut lab = Lab::lent().await;
    tokio::time::sleep(Duration::from_millis(310)).await;
    assert!(lab.take().await.is_none());
    lab.carry();
    assert!(lab.ended_ok());
    assert_eq!(lab.counts(), (1, 0));
    assert!(!*lab.agent_reset.lock() && !*lab.borrower_reset.lock());
}

#[tokio::test(start_paused = true)]
async fn a_single_request_leases_nothing() {
    let mut lab = Lab::new();
    assert!(lab.take().await.is_none());
    assert!(!lab.leases.is_hot(agent(), &METHOD.into()));
    tokio::time::sleep(Duration::from_millis(101)).await;
    assert!(lab.take().await.is_none());
    let call = lab.borrow();
    lab.carry();
    lab.agent_reads();
    lab.agent.write(answer(b"x"));
    lab.carry();
    call.expect(b"x").await;
    lab.carry();
    assert!(lab.take().await.is_none() && lab.ended_ok());
    assert_eq!(lab.counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_at_the_holder_gets_the_tunnel_after_the_current_one() {
    for source in [None, Some("third")] {
        let mut lab = Lab::lent().await;
        let call = lab.again(b"x").await;
        lab.carry();
        lab.agent_reads();
        let mut waiting = lab.wait(source, METHOD);
        still_waits(&mut waiting).await;
        lab.agent.write(answer(b"x"));
        lab.carry();
        call.expect(b"x").await;
        assert!(granted(waiting).await.is_ok(), "{source:?}");
        assert!(lab.ended_ok() && lab.take().await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_begins_to_wait_at_the_holder_revokes_the_lease_of_an_idle_tunnel() {
    for (source, method) in [(None, METHOD), (Some("third"), METHOD), (Some("borrower"), OTHER)] {
        let mut lab = Lab::lent().await;
        let mut waiting = lab.wait(source, method);
        still_waits(&mut waiting).await;
        assert!(lab.ended.is_none(), "it is asked for, not taken");
        lab.carry();
        assert!(granted(waiting).await.is_ok(), "{source:?} {method}");
        assert!(lab.ended_ok() && lab.take().await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_borrow_request_of_the_borrower_that_waits_is_answered_and_the_lease_is_not_renewed() {
    let mut lab = Lab::lent().await;
    let call = lab.again(b"x").await;
    // No tunnel was idle.
    let waiting = lab.wait(Some("borrower"), METHOD);
    lab.carry();
    lab.agent_reads();
    lab.agent.write(answer(b"x"));
    lab.carry();
    call.expect(b"x").await;
    assert!(granted(waiting).await.is_ok() && lab.ended_ok());
}

#[tokio::test(start_paused = true)]
async fn a_borrow_request_of_the_borrower_that_crosses_its_lease_revokes_nothing() {
    let mut lab = Lab::lent().await;
    let mut waiting = lab.wait(Some("borrower"), METHOD);
    lab.carry();
    still_waits(&mut waiting).await;
    assert!(lab.ended.is_none() && lab.take().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_at_the_borrower_gets_the_tunnel_that_becomes_free() {
    let mut lab = Lab::lent().await;
    let call = lab.again(b"x").await;
    let Err(Some(mut waiter)) = lab.leases.acquire(agent(), &METHOD.into(), Features::NONE) else {
        panic!("one is idle")
    };
    lab.carry();
    lab.agent_reads();
    lab.agent.write(answer(b"x"));
    lab.carry();
    call.expect(b"x").await;
    let leased = tokio::time::timeout(Duration::ZERO, waiter.handed()).await.expect("at once");
    // It does not use the tunnel after all, which is kept.
    drop(leased);
    assert!(lab.take().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_crosses_the_revocation_is_served_and_is_the_last() {
    let mut lab = Lab::lent().await;
    let call = lab.again(b"crossing").await;
    let mut waiting = lab.wait(None, METHOD);
    // The revocation is sent before the request arrives, and is read after the request was sent.
    lab.holder_writes();
    lab.borrower_writes();
    lab.holder_writes();
    still_waits(&mut waiting).await;
    assert_eq!(lab.agent_reads(), whole(b"crossing"));
    lab.agent.write(answer(b"crossing"));
    lab.carry();
    call.expect(b"crossing").await;
    assert!(granted(waiting).await.is_ok());
    assert!(lab.ended_ok() && lab.take().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_revocation_that_is_read_before_a_request_was_written_returns_the_request() {
    let mut lab = Lab::lent().await;
    let mut call = lab.again(b"x").await;
    let waiting = lab.wait(None, METHOD);
    lab.holder_writes();
    assert!(matches!(call.answered().await, Err(Failure::NotStarted(_))));
    lab.carry();
    assert!(granted(waiting).await.is_ok());
    assert_eq!(lab.agent_reads(), "");
    assert!(lab.ended_ok());
}

#[tokio::test(start_paused = true)]
async fn a_lost_link_ends_the_lease_and_frees_the_tunnel_at_its_holder() {
    let mut lab = Lab::lent().await;
    lab.lent.reset();
    lab.borrower_writes();
    assert!(*lab.borrower_reset.lock());
    lab.pass_reset();
    assert!(lab.take().await.is_none());
    assert_eq!(lab.counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_lost_link_in_a_later_request_has_an_unknown_outcome() {
    let mut lab = Lab::lent().await;
    let mut call = lab.again(b"x").await;
    lab.carry();
    lab.agent_reads();
    lab.lent.reset();
    let Err(failure) = call.answered().await else { panic!("an answer") };
    assert_eq!(call.0.late_status(&failure).outcome(), Some(Outcome::Unknown));
    lab.pass_reset();
    assert!(*lab.agent_reset.lock());
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_a_later_request_resets_both_hops() {
    let mut lab = Lab::lent().await;
    let call = lab.again(b"x").await;
    lab.carry();
    lab.agent_reads();
    assert!(!*lab.agent_reset.lock());
    drop(call);
    lab.pass_reset();
    assert!(*lab.agent_reset.lock());
    assert!(lab.take().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_that_is_reset_in_a_later_request_has_an_unknown_outcome() {
    let mut lab = Lab::lent().await;
    let mut call = lab.again(b"x").await;
    lab.carry();
    lab.agent_reads();
    lab.agent.reset();
    lab.carry();
    let Err(Failure::Lender(status)) = call.answered().await else { panic!("an answer") };
    assert_eq!(status.outcome(), Some(Outcome::Unknown));
    assert!(lab.take().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_before_its_request_was_written_does_not_end_the_lease() {
    let mut lab = Lab::lent().await;
    drop(lab.again(b"x").await);
    lab.carry();
    assert_eq!(lab.agent_reads(), "");
    let call = lab.again(b"y").await;
    lab.carry();
    assert_eq!(lab.agent_reads(), whole(b"y"));
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_drains_revokes_leases_and_renews_none() {
    let mut lab = Lab::lent().await;
    lab.registry.drain();
    lab.carry();
    assert!(lab.ended_ok() && lab.take().await.is_none());
    assert_eq!(lab.counts(), (1, 0));

    let mut lab = Lab::lent().await;
    let call = lab.again(b"x").await;
    lab.carry();
    lab.agent_reads();
    lab.registry.drain();
    lab.agent.write(answer(b"x"));
    lab.carry();
    call.expect(b"x").await;
    assert!(lab.ended_ok() && lab.take().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_borrower_that_drains_returns_all_tunnels_and_keeps_none() {
    let mut lab = Lab::lent().await;
    lab.leases.close();
    lab.carry();
    assert!(lab.ended_ok() && lab.take().await.is_none());
    assert_eq!(lab.counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_tunnel_that_retires_is_revoked_first() {
    // Idle.
    let mut lab = Lab::lent().await;
    lab.registry.retire(&lab.held.upgrade().unwrap(), Retire::Notice);
    assert_eq!(lab.agent_reads(), "", "it may cross a request");
    lab.carry();
    assert!(lab.ended_ok());
    assert_eq!(lab.agent_reads(), control(response::CLOSE_SEND), "the notice");
    assert_eq!(lab.counts(), (0, 1), "a tunnel that retires is not handed out");

    // With a request that crosses.
    let mut lab = Lab::lent().await;
    let call = lab.again(b"x").await;
    lab.borrower_writes();
    lab.registry.retire(&lab.held.upgrade().unwrap(), Retire::Notice);
    lab.carry();
    assert_eq!(lab.agent_reads(), whole(b"x"));
    lab.agent.write(answer(b"x"));
    lab.carry();
    call.expect(b"x").await;
    assert_eq!(lab.agent_reads(), control(response::CLOSE_SEND), "the notice");
    lab.carry();
    assert!(lab.ended_ok() && lab.take().await.is_none());
}

/// Without this, a rolling restart failed one request in thousands: the notice ended a tunnel for which a
/// request was on its way.
#[tokio::test(start_paused = true)]
async fn a_tunnel_that_is_lent_is_not_retired_before_its_first_request() {
    let mut lab = Lab::new();
    let call = lab.borrow();
    lab.registry.retire(&lab.held.upgrade().unwrap(), Retire::Notice);
    assert_eq!(lab.agent_reads(), "", "a request is on its way");
    lab.carry();
    assert_eq!(lab.agent_reads(), whole(b"first"));
    lab.agent.write(answer(b"first"));
    lab.carry();
    call.expect(b"first").await;
    assert_eq!(lab.agent_reads(), control(response::CLOSE_SEND), "the notice");

    // The borrow request is cancelled.
    let mut lab = Lab::new();
    let _call = lab.borrow();
    lab.registry.retire(&lab.held.upgrade().unwrap(), Retire::Notice);
    assert_eq!(lab.agent_reads(), "");
    lab.lend = None;
    assert_eq!(lab.agent_reads(), control(response::CLOSE_SEND), "the notice");
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_exits_does_not_wait_for_leases() {
    let mut lab = Lab::lent().await;
    let held = lab.held.upgrade().unwrap();
    assert!(!held.carries_request());
    held.cancel_reservation();
    lab.registry.retire(&held, Retire::Ok);
    lab.agent_reads();
    assert!(lab.to_agent.is_none(), "the tunnel has ended");
    lab.holder_writes();
    assert!(lab.ended_not_started());
}

#[tokio::test(start_paused = true)]
async fn a_borrower_that_hangs_loses_the_tunnel_after_two_seconds() {
    let mut lab = Lab::lent().await;
    lab.holder_writes();
    tokio::time::sleep(Duration::from_millis(1_990)).await;
    lab.holder_writes();
    assert!(lab.ended.is_none());
    tokio::time::sleep(Duration::from_millis(20)).await;
    lab.holder_writes();
    assert!(lab.ended_not_started());
    assert_eq!(lab.counts(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_after_a_minute() {
    let mut lab = Lab::lent().await;
    let mut rounds = 0;
    while lab.ended.is_none() {
        let call = lab.again(b"x").await;
        lab.carry();
        lab.agent_reads();
        tokio::time::sleep(Duration::from_secs(7)).await;
        // Other requests keep the lease worthwhile.
        assert!(lab.take().await.is_none() && lab.take().await.is_none());
        lab.agent.write(answer(b"x"));
        lab.carry();
        call.expect(b"x").await;
        rounds += 1;
        assert!(rounds < 20);
    }
    assert!(lab.ended_ok());
    assert_eq!(rounds, 9);
}

#[tokio::test(start_paused = true)]
async fn tunnels_of_a_replica_that_is_not_healthy_are_returned() {
    // Detected by the next request, or by the sweep.
    for request in [true, false] {
        let mut lab = Lab::lent().await;
        drop(lab.take().await.expect("one is leased"));
        lab.known = None;
        if request {
            assert!(lab.take().await.is_none());
        } else {
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        lab.carry();
        assert!(lab.ended_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_that_are_no_request_end_the_lease() {
    let mut lab = Lab::lent().await;
    lab.asked.write(control(response::CLOSE_SEND));
    lab.holder_writes();
    assert!(lab.ended_not_started());
    assert_eq!(lab.agent_reads(), "");
    assert_eq!(lab.counts(), (1, 0));
}
