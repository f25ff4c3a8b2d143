use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use cluster::{InMemoryTracker, Replica};
use grpc::Deadline;
use http_body::Body as _;
use ids::TokenHash;
use prometheus_client::registry::Registry;
use tunnel::{
    features::Features,
    frame::{self, response},
    kas_end::{AgentKind, Descriptor, Info, Job, Opening, TunnelBody},
};

use super::{presence::LINGER, *};
use crate::flaw::{Flaw, must_fail_with};

pub(super) const METHOD: &str = "/s/M";

pub(super) struct Lab {
    pub(super) registry: Arc<TunnelRegistry>,
    /// The bodies that HTTP/2 would hold.
    bodies: Vec<TunnelBody>,
}

pub(super) fn agent() -> AgentId {
    AgentId::new(3).unwrap()
}

fn id(connection: i64) -> Option<ConnectionId> {
    Some(ConnectionId::new(connection).unwrap())
}

pub(super) fn lab() -> Lab {
    let me = Replica { id: ReplicaId::new("me"), address: "127.0.0.1:1".into() };
    let metrics = Arc::new(RequestMetrics::new(&mut Registry::default()));
    let limits =
        Limits { waiters_per_agent: 100, waiters: 100, tunnels_per_agent: 100, endless_per_old_agent: 2 };
    let registry = TunnelRegistry::new(Arc::new(InMemoryTracker::new(me)), metrics, limits);
    registry.transport_opened(agent());
    Lab { registry, bodies: Vec::new() }
}

fn info(kind: AgentKind, method: &str, instance: u64) -> Info {
    Info {
        agent: agent(),
        instance,
        token: TokenHash::of(b"t"),
        kind,
        features: Features::IMPERSONATION,
        version: None,
        descriptor: Arc::new(Descriptor::of(&[method])),
    }
}

/// Asks for a tunnel, for a request of this replica or of another one.
pub(super) fn ask(registry: &Arc<TunnelRegistry>, source: Option<&str>) -> Result<Acquired, Refused> {
    let method = Arc::from(METHOD);
    match source {
        None => registry.acquire(agent(), &method, None, Features::NONE),
        Some(replica) => {
            registry.acquire_for(&ReplicaId::new(replica), agent(), &method, None, Features::NONE)
        }
    }
}

impl Lab {
    /// An agent that sends nothing opens a tunnel.
    pub(super) fn tunnel(&mut self) {
        self.tunnel_of(1, None);
    }

    /// The process `instance` opens a tunnel, bound to `connection`.
    fn tunnel_of(&mut self, instance: u64, connection: Option<ConnectionId>) {
        self.tunnel_for(METHOD, instance, connection);
    }

    /// As [`tunnel_of`](Self::tunnel_of), for another method.
    fn tunnel_for(&mut self, method: &str, instance: u64, connection: Option<ConnectionId>) {
        self.open(AgentKind::Ours, method, instance, connection);
    }

    /// A tunnel of an agentk of this version with these features.
    fn tunnel_that_meets(&mut self, features: Features, instance: u64) {
        let version = Some(AgentkVersion { major: u32::try_from(instance).unwrap(), minor: 1 });
        let info = Info { features, version, ..info(AgentKind::Ours, METHOD, instance) };
        self.open_info(info, None);
    }

    fn open(&mut self, kind: AgentKind, method: &str, instance: u64, connection: Option<ConnectionId>) {
        self.open_info(info(kind, method, instance), connection);
    }

    fn open_info(&mut self, info: Info, connection: Option<ConnectionId>) {
        let silent = http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>,
        >());
        let owner = Arc::new(RegistryPool {
            registry: Arc::clone(&self.registry),
            rate_limit: Arc::new(RateLimit::new(100, 1_000)),
        });
        let opening = Opening::new(grpc::boxed(silent), false);
        let (tunnel, body) = Tunnel::new(info, opening, owner, Box::new(|| {}));
        self.registry.insert(&tunnel, connection);
        self.bodies.push(body);
    }

    /// A caller sends a complete request through an idle tunnel, and leaves.
    fn abandon(&mut self) {
        let Ok(Acquired::Now(grant)) = self.ask(None) else { panic!("a tunnel is idle") };
        let mut request_info = BytesMut::new();
        frame::put_control(response::REQUEST_INFO, b"", &mut request_info);
        let job = Job::new(request_info.freeze(), grpc::full(Bytes::new()));
        let exchange = grant.take().begin(job, Deadline::NONE).expect("the tunnel is free");
        for body in &mut self.bodies {
            while let Poll::Ready(frame) =
                Pin::new(&mut *body).poll_frame(&mut Context::from_waker(Waker::noop()))
            {
                assert!(frame.is_some(), "no tunnel has ended");
            }
        }
        drop(exchange);
    }

    fn ask_for(&self, source: Option<&str>, connection: i64) -> Result<Acquired, Refused> {
        let method = Arc::from(METHOD);
        match source {
            None => self.registry.acquire(agent(), &method, id(connection), Features::NONE),
            Some(replica) => self.registry.acquire_for(
                &ReplicaId::new(replica),
                agent(),
                &method,
                id(connection),
                Features::NONE,
            ),
        }
    }

    fn wait_for(&self, source: Option<&str>, connection: i64) -> Waiting {
        match self.ask_for(source, connection) {
            Ok(Acquired::Wait(waiting)) => waiting,
            other => panic!("{other:?}"),
        }
    }

    fn instances(&self) -> usize {
        self.registry.shard(agent()).get(&agent()).map_or(0, |entry| entry.presence.instances())
    }

    fn ask(&self, source: Option<&str>) -> Result<Acquired, Refused> {
        ask(&self.registry, source)
    }

    fn ask_needing(&self, source: Option<&str>, needs: Features) -> Result<Acquired, Refused> {
        let method = Arc::from(METHOD);
        match source {
            None => self.registry.acquire(agent(), &method, None, needs),
            Some(replica) => {
                self.registry.acquire_for(&ReplicaId::new(replica), agent(), &method, None, needs)
            }
        }
    }

    fn wait_needing(&self, source: Option<&str>, needs: Features) -> Waiting {
        match self.ask_needing(source, needs) {
            Ok(Acquired::Wait(waiting)) => waiting,
            other => panic!("{other:?}"),
        }
    }

    fn wait(&self, source: Option<&str>) -> Waiting {
        match self.ask(source) {
            Ok(Acquired::Wait(waiting)) => waiting,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn own_requests_and_each_other_replica_take_turns() {
    let mut lab = lab();
    lab.tunnel();
    let Ok(Acquired::Now(mut grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
    let names = ["own 1", "own 2", "own 3", "a 1", "a 2", "b 1"];
    let sources = [None, None, None, Some("a"), Some("a"), Some("b")];
    let mut waiting: Vec<_> =
        names.iter().zip(sources).map(|(name, source)| (*name, lab.wait(source))).collect();
    let mut order = Vec::new();
    while !waiting.is_empty() {
        drop(grant);
        let (at, next) = {
            let all = waiting.iter_mut().map(|(_, waiting)| Box::pin(waiting.granted()));
            let (granted, at, _) = futures_util::future::select_all(all).await;
            (at, granted.unwrap())
        };
        order.push(waiting.remove(at).0);
        grant = next;
    }
    assert_eq!(order, ["own 1", "a 1", "b 1", "own 2", "a 2", "own 3"]);
}

#[tokio::test]
async fn another_replica_is_refused_immediately_if_the_agent_is_not_here() {
    let lab = lab();
    assert!(matches!(lab.ask(Some("a")), Err(Refused::NotHere(_))));
    // Requests of this replica wait.
    drop(lab.wait(None));
}

#[tokio::test(start_paused = true)]
async fn requests_of_other_replicas_end_when_the_agent_has_gone_and_own_ones_wait_on() {
    let mut lab = lab();
    lab.tunnel();
    let Ok(Acquired::Now(grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
    let (mut own, mut other) = (lab.wait(None), lab.wait(Some("a")));
    let _tunnel = grant.take();
    // HTTP/2 drops the stream.
    lab.bodies.clear();
    // The agent lingers, since tunnels of GitLab's agents end with each request.
    assert!(matches!(lab.ask(Some("b")), Ok(Acquired::Wait(_))));
    assert!(matches!(other.granted().await, Err(Gone::NotHere(_))));
    assert!(matches!(lab.ask(Some("b")), Err(Refused::NotHere(_))));
    lab.tunnel();
    assert!(own.granted().await.is_ok());
}

/// Fails if the end of the connection counts only after the end of the tunnels: the agent then stays for five
/// seconds.
#[tokio::test(start_paused = true)]
async fn an_agent_whose_connection_is_lost_is_gone_immediately_in_either_order_of_events() {
    for connection_first in [true, false] {
        let mut lab = lab();
        lab.tunnel();
        let Ok(Acquired::Now(grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
        let mut other = lab.wait(Some("a"));
        let _tunnel = grant.take();
        if connection_first {
            lab.registry.transport_closed(agent(), 1);
            lab.bodies.clear();
        } else {
            lab.bodies.clear();
            lab.registry.transport_closed(agent(), 1);
        }
        assert!(matches!(lab.ask(Some("b")), Err(Refused::NotHere(_))), "{connection_first}");
        let told = tokio::time::timeout(Duration::ZERO, other.granted()).await;
        assert!(matches!(told, Ok(Err(Gone::NotHere(_)))), "{connection_first}");
    }
}

#[tokio::test]
async fn a_replica_that_drains_lends_idle_tunnels_and_lets_no_other_request_wait() {
    let mut lab = lab();
    lab.tunnel();
    lab.tunnel();
    let Ok(Acquired::Now(_first)) = lab.ask(None) else { panic!("a tunnel is idle") };
    let Ok(Acquired::Now(second)) = lab.ask(Some("a")) else { panic!("a tunnel is idle") };
    let mut waiting = lab.wait(Some("a"));
    lab.registry.drain();
    assert!(matches!(waiting.granted().await, Err(Gone::Leaving)));
    assert_eq!(lab.ask(Some("a")).map(drop), Err(Refused::Draining));
    drop(second);
    assert!(matches!(lab.ask(Some("a")), Ok(Acquired::Now(_))));
}

/// One of two processes replaces its only tunnel, as GitLab's agents do after each request.
#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_connection_between_two_of_its_tunnels() {
    let mut lab = lab();
    lab.tunnel_of(1, id(7));
    lab.tunnel_of(2, id(8));
    for source in [None, Some("a")] {
        // HTTP/2 drops the stream.
        lab.bodies.remove(0);
        let mut waiting = lab.wait_for(source, 7);
        assert_eq!(lab.registry.counts(agent()), (1, 0, 1), "a process without a tunnel is not counted");
        tokio::time::sleep(LINGER - Duration::from_millis(1)).await;
        lab.tunnel_of(1, None);
        assert_eq!(waiting.granted().await.unwrap().tunnel().info().instance, 1);
        // The earlier lingering does not end this one.
        tokio::time::sleep(LINGER).await;
        assert!(matches!(lab.ask_for(source, 7), Ok(Acquired::Now(_))));
        lab.bodies.swap(0, 1);
    }
    assert_eq!(lab.ask_for(None, 9).map(drop), Err(Refused::OtherConnection));
}

/// The wait ends with the lingering, the transport connection, or the binding.
#[tokio::test(start_paused = true)]
async fn a_request_for_a_connection_is_refused_when_that_does_not_come_back() {
    for end in ["linger", "transport", "binding"] {
        let mut lab = lab();
        lab.registry.transport_opened(agent());
        lab.tunnel_of(1, id(7));
        lab.tunnel_of(2, id(8));
        let Ok(Acquired::Now(other)) = lab.ask_for(None, 8) else { panic!("a tunnel is idle") };
        lab.bodies.remove(0);
        let (mut own, mut remote) = (lab.wait_for(None, 7), lab.wait_for(Some("a"), 7));
        let mut any = lab.wait(None);
        match end {
            "linger" => tokio::time::sleep(LINGER + Duration::from_millis(1)).await,
            "transport" => lab.registry.transport_closed(agent(), 1),
            _ => lab.registry.bind_connection(agent(), 1, None),
        }
        // Its process lingers without a binding.
        let refused = if end == "binding" { Refused::Unbound } else { Refused::OtherConnection };
        for waiting in [&mut own, &mut remote] {
            let told = tokio::time::timeout(Duration::ZERO, waiting.granted()).await;
            assert!(matches!(told, Ok(Err(Gone::Refused(why))) if why == refused), "{end}: {told:?}");
        }
        assert_eq!(lab.ask_for(None, 7).map(drop), Err(refused), "{end}");
        assert_eq!(lab.registry.counts(agent()), (0, 1, 1), "{end}");
        drop(other);
        assert!(any.granted().await.is_ok(), "{end}");
    }
}

/// There are pods of two versions, and one is replaced.
#[tokio::test(start_paused = true)]
async fn a_request_for_a_method_is_refused_when_no_process_serves_it_any_more() {
    let mut lab = lab();
    let other: Arc<str> = "/s/Other".into();
    lab.tunnel_for(&other, 1, id(7));
    lab.tunnel_of(2, id(8));
    let ask = |lab: &Lab, connection| lab.registry.acquire(agent(), &other, connection, Features::NONE);
    assert_eq!(ask(&lab, id(8)).map(drop), Err(Refused::Unimplemented), "not by this connection");
    lab.bodies.remove(0);
    for connection in [None, id(7)] {
        let Ok(Acquired::Wait(mut waiting)) = ask(&lab, connection) else { panic!("it may come back") };
        lab.tunnel_for(&other, 1, None);
        assert!(waiting.granted().await.is_ok());
        lab.bodies.pop();
    }
    let Ok(Acquired::Wait(mut waiting)) = ask(&lab, None) else { panic!("it may come back") };
    let told = waiting.granted().await;
    assert!(matches!(told, Err(Gone::Refused(Refused::Unimplemented))), "{told:?}");
    assert_eq!(ask(&lab, None).map(drop), Err(Refused::Unimplemented));
}

/// Fails without the bound.
#[tokio::test(start_paused = true)]
async fn few_former_connections_of_an_agent_are_remembered_and_not_for_long() {
    let mut lab = lab();
    lab.tunnel_of(0, id(1));
    let most = i64::try_from(lab.registry.limits.tunnels_per_agent).unwrap();
    for n in 2..=3 * most {
        lab.tunnel_of(n.unsigned_abs(), id(n));
        lab.bodies.pop();
    }
    assert_eq!(lab.instances(), 1 + most as usize);
    assert_eq!(lab.registry.counts(agent()), (1, 0, 0), "none of them is counted");
    // The ones that ended last are remembered.
    drop(lab.wait_for(None, 3 * most));
    drop(lab.wait_for(None, 2 * most + 1));
    assert_eq!(lab.ask_for(None, 2 * most).map(drop), Err(Refused::OtherConnection));
    tokio::time::sleep(LINGER + Duration::from_millis(1)).await;
    assert_eq!(lab.instances(), 1);
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(tasks, 0, "the sweep has ended");
    // Nothing remains of an agent that has gone.
    lab.bodies.clear();
    lab.registry.transport_closed(agent(), 7);
    assert!(lab.registry.shard(agent()).is_empty());
}

/// Ten such requests took the agent away, and it was reported as not connected.
#[tokio::test(start_paused = true)]
async fn requests_that_occupy_tunnels_without_their_callers_are_reported_until_the_tunnels_end() {
    let mut lab = lab();
    lab.open(AgentKind::Old, METHOD, 1, None);
    lab.open(AgentKind::Old, METHOD, 1, None);
    let seconds = Duration::from_secs;
    lab.abandon();
    tokio::time::advance(seconds(30)).await;
    let one = lab.registry.occupancy(agent());
    let expected = Occupancy {
        idle: 1,
        busy: 1,
        abandoned: Some(Abandoned { tunnels: 1, since: seconds(30) }),
        waiting: 0,
        transports: 1,
    };
    assert_eq!((one, one.all_abandoned()), (expected, None));
    lab.abandon();
    tokio::time::advance(seconds(5)).await;
    // Since the last caller left, the agent has not been reachable.
    let both = Some(Abandoned { tunnels: 2, since: seconds(5) });
    assert_eq!(lab.registry.occupancy(agent()).all_abandoned(), both);
    assert_eq!(lab.registry.metrics.tunnels_abandoned.get(), 2);
    // A tunnel with a request that goes on will be free.
    lab.tunnel();
    let Ok(Acquired::Now(_grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
    let busy = lab.registry.occupancy(agent());
    assert_eq!((busy.busy, busy.abandoned, busy.all_abandoned()), (3, both, None));
    // HTTP/2 drops the streams.
    lab.bodies.remove(0);
    assert_eq!(lab.registry.occupancy(agent()).abandoned.map(|abandoned| abandoned.tunnels), Some(1));
    lab.bodies.clear();
    let none = Occupancy { transports: 1, ..Occupancy::default() };
    assert_eq!(lab.registry.occupancy(agent()), none);
    assert_eq!(lab.registry.metrics.tunnels_abandoned.get(), 0);
}

/// A request of an agent that can cancel it ends with its caller.
#[tokio::test]
async fn only_agents_that_cannot_cancel_requests_have_abandoned_ones() {
    let mut lab = lab();
    lab.tunnel();
    lab.abandon();
    assert_eq!(lab.registry.occupancy(agent()).abandoned, None);
}

impl Lab {
    /// Asks for a tunnel for a watch.
    fn watch(&self, source: Option<&str>) -> Result<Acquired, Refused> {
        let needs = Needs { features: Features::NONE, is_endless: true };
        let method = Arc::from(METHOD);
        match source {
            None => self.registry.acquire(agent(), &method, None, needs),
            Some(replica) => {
                self.registry.acquire_for(&ReplicaId::new(replica), agent(), &method, None, needs)
            }
        }
    }

    fn watch_now(&self, source: Option<&str>) -> Grant {
        match self.watch(source) {
            Ok(Acquired::Now(grant)) => grant,
            other => panic!("{other:?}"),
        }
    }

    fn short_now(&self) -> Grant {
        match self.ask(None) {
            Ok(Acquired::Now(grant)) => grant,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn an_agentk_that_cannot_cancel_has_few_watches_of_all_replicas_together() {
    let mut lab = lab();
    for _ in 0..5 {
        lab.open(AgentKind::Old, METHOD, 1, None);
    }
    let (first, second) = (lab.watch_now(Some("a")), lab.watch_now(None));
    let most = |open, abandoned| Refused::Endless(EndlessRequests { open, abandoned, most: 2 });
    for source in [Some("a"), Some("b"), None] {
        assert_eq!(lab.watch(source).unwrap_err(), most(2, 0));
    }
    let needs = Needs { features: Features::NONE, is_endless: true };
    assert!(lab.registry.take(agent(), METHOD, None, needs).is_none());
    // Requests that end are served.
    drop([lab.short_now(), lab.short_now()]);
    // One was returned unused.
    drop(first);
    let third = lab.watch_now(Some("b"));
    assert_eq!(lab.watch(None).unwrap_err(), most(2, 0));
    // The caller of a request has left, and nothing ends it.
    drop(third);
    lab.abandon();
    assert_eq!(lab.watch(None).unwrap_err(), most(1, 1));
    drop(second);
    let _fourth = lab.watch_now(None);
    assert_eq!(lab.watch(None).unwrap_err(), most(1, 1));
    // A new agentk of the same agent can cancel them.
    lab.tunnel_of(2, None);
    lab.tunnel_of(2, None);
    let _new = [lab.watch_now(None), lab.watch_now(Some("a"))];
    // HTTP/2 drops the streams.
    lab.bodies.clear();
    let shard = lab.registry.shard(agent());
    let room = shard[&agent()].presence.takes_endless(AgentKind::Old, 1);
    assert!(room, "nothing is left of them");
}

#[tokio::test]
async fn a_watch_that_waits_gets_no_tunnel_beyond_the_limit() {
    let mut lab = lab();
    for _ in 0..3 {
        lab.open(AgentKind::Old, METHOD, 1, None);
    }
    let watch = lab.watch_now(None);
    let short = [lab.short_now(), lab.short_now()];
    let waiting = |acquired| match acquired {
        Ok(Acquired::Wait(waiting)) => waiting,
        other => panic!("{other:?}"),
    };
    let (mut first, mut second) = (waiting(lab.watch(None)), waiting(lab.watch(Some("a"))));
    drop(short);
    let _granted = first.granted().await.unwrap();
    {
        let mut granted = Box::pin(second.granted());
        assert!(granted.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    // The tunnel is idle, for others.
    let _short = lab.short_now();
    drop(watch);
    second.granted().await.unwrap();
}

const UPGRADE: Features = Features::UPGRADE;
const TARGET: Features = Features::TARGET;

/// Instance 14 is an old agentk, and 2 a new one of the same agent.
fn mixed() -> Lab {
    let mut lab = lab();
    lab.tunnel_that_meets(Features::NONE, 14);
    lab.tunnel_that_meets(UPGRADE | TARGET, 2);
    lab
}

fn granted_instance(granted: Result<Acquired, Refused>) -> u64 {
    match granted {
        Ok(Acquired::Now(grant)) => grant.take().info().instance,
        other => panic!("{other:?}"),
    }
}

async fn still_waits(waiting: &mut Waiting) {
    let granted = tokio::time::timeout(Duration::ZERO, waiting.granted()).await;
    assert!(granted.is_err(), "{granted:?}");
}

#[tokio::test(start_paused = true)]
async fn idle_tunnels_that_do_not_meet_the_needs_are_passed_over_and_keep_no_request_waiting() {
    for source in [None, Some("a")] {
        let mut lab = mixed();
        lab.tunnel_that_meets(Features::NONE, 14);
        assert_eq!(granted_instance(lab.ask_needing(source, UPGRADE)), 2);
        // The only one that fits is busy. Two are idle, and stay so.
        let mut waiting = lab.wait_needing(source, UPGRADE);
        assert_eq!(lab.registry.counts(agent()), (2, 1, 1));
        lab.tunnel_that_meets(TARGET, 3);
        still_waits(&mut waiting).await;
        // Others do not wait behind it.
        assert_ne!(granted_instance(lab.ask(source)), 2);
        assert_eq!(granted_instance(lab.ask_needing(source, TARGET)), 3);
        lab.tunnel_that_meets(UPGRADE, 4);
        assert_eq!(waiting.granted().await.unwrap().tunnel().info().instance, 4);
    }
}

#[tokio::test]
async fn a_tunnel_goes_to_the_request_that_waits_longest_of_those_whose_needs_it_meets() {
    let mut lab = mixed();
    let (_old, _new) = (lab.ask(None).unwrap(), lab.ask(None).unwrap());
    let wants = [UPGRADE, Features::NONE, UPGRADE | TARGET, Features::NONE, UPGRADE];
    let mut waiting: Vec<_> =
        wants.into_iter().enumerate().map(|(n, needs)| (n, lab.wait_needing(None, needs))).collect();
    let mut order = Vec::new();
    for features in [Features::NONE, UPGRADE, UPGRADE | TARGET, UPGRADE | TARGET, UPGRADE] {
        lab.tunnel_that_meets(features, 20);
        let granted = waiting.iter_mut().map(|(_, waiting)| Box::pin(waiting.granted()));
        let (grant, at, _) = futures_util::future::select_all(granted).await;
        drop(grant.unwrap().take());
        order.push(waiting.remove(at).0);
    }
    assert_eq!(order, [1, 0, 2, 3, 4]);
}

#[tokio::test]
async fn needs_that_no_process_meets_are_refused_at_once_by_the_one_that_lacks_least() {
    let mut lab = mixed();
    let needs = UPGRADE | TARGET | Features::IMPERSONATION;
    let lack = Lack { missing: Features::IMPERSONATION, version: Some(AgentkVersion { major: 2, minor: 1 }) };
    for source in [None, Some("a")] {
        assert_eq!(lab.ask_needing(source, needs).map(drop), Err(Refused::Unsupported(lack)));
    }
    // Each alone is met by one, and no process meets both.
    lab.tunnel_that_meets(Features::IMPERSONATION, 3);
    assert!(matches!(lab.ask_needing(None, needs), Err(Refused::Unsupported(_))));
    // A process that is busy may meet them later.
    lab.tunnel_that_meets(needs, 4);
    assert_eq!(granted_instance(lab.ask_needing(None, needs)), 4);
    drop(lab.wait_needing(None, needs));
}

#[tokio::test(start_paused = true)]
async fn a_request_is_refused_when_the_last_process_that_meets_its_needs_has_gone() {
    let mut lab = mixed();
    let _busy = lab.ask_needing(None, UPGRADE).unwrap();
    let (mut own, mut remote) = (lab.wait_needing(None, UPGRADE), lab.wait_needing(Some("a"), UPGRADE));
    // HTTP/2 drops the stream of the new one.
    lab.bodies.remove(1);
    still_waits(&mut own).await;
    tokio::time::sleep(LINGER + Duration::from_millis(1)).await;
    let lack = Lack { missing: UPGRADE, version: Some(AgentkVersion { major: 14, minor: 1 }) };
    for waiting in [&mut own, &mut remote] {
        let told = tokio::time::timeout(Duration::ZERO, waiting.granted()).await;
        assert!(matches!(told, Ok(Err(Gone::Refused(Refused::Unsupported(why)))) if why == lack), "{told:?}");
    }
}

#[tokio::test]
async fn needs_of_a_later_version_are_refused_where_the_agent_is() {
    let lab = lab();
    assert!(matches!(lab.registry.refuse_unknown(agent()), Refused::NotHere(_)));
    assert_eq!(mixed().registry.refuse_unknown(agent()), Refused::UnknownNeed);
}

/// konnectivity 15: the newest connection of an agent was always chosen, and became the bottleneck.
#[tokio::test]
async fn connections_of_one_agent_are_balanced() {
    fn run() {
        let mut lab = lab();
        // Three processes with four tunnels each.
        for tunnel in 0..12 {
            lab.tunnel_of(1 + tunnel % 3, id(1 + i64::try_from(tunnel % 3).unwrap()));
        }
        let mut held = Vec::new();
        for requests in 1..=4 {
            for _ in 0..3 {
                let Ok(Acquired::Now(grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
                held.push(grant);
            }
            for process in 1..=3 {
                let its = held.iter().filter(|grant| grant.tunnel().info().instance == process).count();
                assert_eq!(its, requests, "of process {process}, with {} requests", held.len());
            }
        }
    }
    run();
    must_fail_with(Flaw::OneProcess, run);
}

/// konnectivity 255 and later ones: abandoned dials leaked goroutines, sockets and memory.
///
/// The bound is in what is left: nothing at all. Requests that wait leave in every order, also after a tunnel
/// was granted to them.
#[tokio::test]
async fn cancelled_requests_leak_nothing() {
    fn run() {
        for of in 1..=3 {
            let mut lab = lab();
            let mut waiting: Vec<_> = (0..90).map(|_| lab.wait(None)).collect();
            assert_eq!(lab.registry.waiters.load(Ordering::Relaxed), 90);
            // Half of them leave while there is no agent.
            for n in 0..45 {
                waiting.remove(n * of % waiting.len());
            }
            assert_eq!(lab.registry.counts(agent()), (0, 0, 45));
            // The agent comes, and each of its tunnels is granted to one of them.
            (0..10).for_each(|_| lab.tunnel());
            let mut n = 0;
            while !waiting.is_empty() {
                n += of;
                waiting.remove(n % waiting.len());
            }
            assert_eq!(lab.registry.counts(agent()), (10, 0, 0));
            assert_eq!(lab.registry.waiters.load(Ordering::Relaxed), 0);
            assert_eq!(lab.registry.metrics.waiters.get(), 0);
            lab.registry.transport_closed(agent(), 1);
            lab.bodies.clear();
            assert!(lab.registry.shard(agent()).is_empty(), "the agent's entry stays");
        }
    }
    run();
    must_fail_with(Flaw::WaiterNeverLeaves, run);
    must_fail_with(Flaw::GrantKeepsTunnel, run);
}
