//! The router above a registry and tunnels whose agentk the test plays.

use std::task::Waker;

use bytes::{BufMut as _, Bytes, BytesMut};
use cluster::InMemoryTracker;
use grpc::testing::Pipe;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use ids::TokenHash;
use prometheus_client::registry::Registry;
use tokio::task::JoinHandle;
use tunnel::{
    frame::{request, response},
    kas_end::{AgentkVersion, Descriptor, Opening, TunnelBody},
};

use super::*;
use crate::{
    rate_limit::RateLimit,
    registry::{Limits, RegistryPool},
};

const METHOD: &str = "/s/M";

fn agent() -> AgentId {
    AgentId::new(7).unwrap()
}

struct Lab {
    router: Arc<Router>,
}

/// An agentk and its only tunnel.
struct Agentk {
    agent: Pipe,
    to_agent: TunnelBody,
}

impl Agentk {
    /// Returns the bytes that kas has written.
    fn reads(&mut self) -> Bytes {
        let mut read = BytesMut::new();
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut self.to_agent).poll_frame(&mut cx) {
            if let Ok(data) = frame.into_data() {
                read.put_slice(&data);
            }
        }
        read.freeze()
    }

    fn answers(&self) {
        let mut answer = BytesMut::new();
        frame::put_control(request::HEADER, b"", &mut answer);
        frame::put_control(request::TRAILER, b"", &mut answer);
        self.agent.write(answer.freeze());
    }
}

fn lab() -> Lab {
    let me = Replica { id: ReplicaId::new("me"), address: "127.0.0.1:1".into() };
    let metrics = Arc::new(RequestMetrics::new(&mut Registry::default()));
    let limits =
        Limits { waiters_per_agent: 100, waiters: 100, tunnels_per_agent: 100, endless_per_old_agent: 2 };
    let tracker: Arc<dyn Tracker> = Arc::new(InMemoryTracker::new(me.clone()));
    let registry = TunnelRegistry::new(Arc::clone(&tracker), metrics, limits);
    registry.transport_opened(agent());
    let refusals = Arc::new(Refusals::new(&mut Registry::default()));
    let router = Router::new(registry, tracker, refusals, Duration::from_secs(20), me.id, None);
    Lab { router: Arc::new(router) }
}

impl Lab {
    /// An agentk of this version with these features opens a tunnel.
    fn agentk(&self, version: (u32, u32), features: Features) -> Agentk {
        let info = Info {
            agent: agent(),
            instance: u64::from(version.0),
            token: TokenHash::of(b"t"),
            kind: AgentKind::Ours,
            features,
            version: Some(AgentkVersion { major: version.0, minor: version.1 }),
            descriptor: Arc::new(Descriptor::of(&[METHOD])),
        };
        let pool = Arc::new(RegistryPool {
            registry: Arc::clone(self.router.registry()),
            rate_limit: Arc::new(RateLimit::new(100, 1_000)),
        });
        let agent = Pipe::default();
        let opening = Opening::new(agent.body(), false);
        let (tunnel, to_agent) = Tunnel::new(info, opening, pool, Box::new(|| {}));
        self.router.registry().insert(&tunnel, None);
        Agentk { agent, to_agent }
    }

    /// Sends a request, up to where it waits.
    async fn send(&self, needs: Features, is_long: bool) -> JoinHandle<Result<AgentAnswer, Status>> {
        let request = AgentRequest {
            agent: agent(),
            connection: None,
            method: METHOD.into(),
            headers: HeaderMap::new(),
            correlation: HeaderValue::from_static("c"),
            deadline: Deadline::NONE,
            wait_until: None,
            body: grpc::full(Bytes::new()),
            needs,
            is_long,
            is_endless: false,
            chosen: ChosenAgentk::default(),
            trace: RouteTrace::default(),
            record: RequestRecord::default(),
        };
        let router = Arc::clone(&self.router);
        let sent = tokio::spawn(async move { router.route(request).await });
        tokio::task::yield_now().await;
        sent
    }
}

/// Reads an answer to its end.
async fn is_answered(answer: Result<AgentAnswer, Status>) {
    let rest = answer.expect("an answer").body.collect().await.expect("the rest of it");
    let status = rest.trailers().and_then(Status::from_headers).expect("a status");
    assert_eq!(status.code(), Code::Ok);
}

/// What an agentk reads: a complete request without messages.
fn is_request(read: &Bytes) -> bool {
    let mut end = BytesMut::new();
    frame::put_control(response::CLOSE_SEND, b"", &mut end);
    !read.is_empty() && read.ends_with(&end)
}

#[tokio::test(start_paused = true)]
async fn a_request_goes_to_the_agentk_that_meets_its_needs() {
    let lab = lab();
    let mut new = lab.agentk((2, 0), Features::UPGRADE | Features::TARGET);
    let mut old = lab.agentk((14, 1), Features::NONE);
    for needs in [Features::UPGRADE, Features::TARGET] {
        let sent = lab.send(needs, false).await;
        assert_eq!(old.reads(), "");
        assert!(is_request(&new.reads()), "{needs:?}");
        new.answers();
        is_answered(sent.await.unwrap()).await;
        // It parks again.
        assert_eq!(new.reads(), "");
    }
}

#[tokio::test(start_paused = true)]
async fn needs_that_no_agentk_meets_are_refused_before_any_time_has_passed() {
    let lab = lab();
    let mut old = lab.agentk((14, 1), Features::NONE);
    let begun = Instant::now();
    let status = lab.send(Features::UPGRADE, true).await.await.unwrap().expect_err("a refusal");
    assert_eq!((status.code(), status.outcome()), (Code::FailedPrecondition, Some(Outcome::NotStarted)));
    assert!(
        status.message().starts_with("agent 7 runs agentk 14.1, which cannot serve upgraded"),
        "{status}"
    );
    assert_eq!((begun.elapsed(), old.reads()), (Duration::ZERO, Bytes::new()));
    // One that has not connected yet may meet them.
    let (sent, mut new) = {
        drop(old);
        (lab.send(Features::UPGRADE, false).await, lab.agentk((2, 0), Features::UPGRADE))
    };
    tokio::task::yield_now().await;
    assert!(is_request(&new.reads()));
    new.answers();
    is_answered(sent.await.unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn a_long_request_is_counted_until_its_answer_is_over() {
    let lab = lab();
    let mut new = lab.agentk((2, 0), Features::UPGRADE);
    let long = || lab.router.metrics.requests_long.get();
    for is_long in [true, false] {
        let sent = lab.send(Features::UPGRADE, is_long).await;
        assert_eq!(long(), i64::from(is_long));
        assert!(is_request(&new.reads()));
        new.answers();
        let answer = sent.await.unwrap();
        assert_eq!(long(), i64::from(is_long));
        is_answered(answer).await;
        assert_eq!(long(), 0);
        new.reads();
    }
}
