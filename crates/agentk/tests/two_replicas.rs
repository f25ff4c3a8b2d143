//! Two replicas for every agent: agentk's supervisor, on real sockets, with several kas behind one address.
//!
//! The kas here are simulated, because a test decides which of them the next connection reaches, its name,
//! and when it drains; they implement only what agentk needs to open tunnels. The clock is paused, so that
//! minutes take no time; it only advances in small steps ([`World::start`]), so that it never jumps over a
//! packet.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use agentk::{
    dial::{Dialer, KasHeaders},
    metrics::Metrics,
    module::Modules,
    session::SessionContext,
    supervisor,
    token::TokenFile,
};
use anyhow::Result;
use bytes::Bytes;
use h2::{RecvStream, SendStream, server::SendResponse};
use http::{HeaderMap, HeaderValue, Request, Response};
use net::proxy::Proxies;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::registry::Registry;
use proto::gitlab::agent::reverse_tunnel::rpc::{CloseSend, ConnectResponse, connect_response::Msg};
use testkit::raw_agent::{CONNECT, GET_CONFIGURATION};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The clock advances by this many milliseconds when all tasks are idle.
const STEP: u64 = 5;
/// The first pause, and some steps of the clock.
const AT_ONCE: Duration = Duration::from_millis(400);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// What a replica has observed of the agent.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// When connections arrived.
    accepted: Vec<Instant>,
    /// Connections that are open.
    connections: usize,
    /// Connections that did not end cleanly.
    broken: usize,
    configurations: usize,
    tunnels: usize,
    /// Maximum number of concurrent tunnels.
    most_tunnels: usize,
    /// Minimum number of concurrent tunnels since there were two.
    least_tunnels: Option<usize>,
}

/// A simulated kas.
#[derive(Clone)]
struct Replica(Arc<Played>);

struct Played {
    /// Its name; `None`: like a kas of GitLab, which sends no headers before its first message.
    name: Option<&'static str>,
    /// How many replicas are live in its view.
    count: AtomicUsize,
    seen: watch::Sender<Seen>,
    /// All connections get a drain notice each time this grows.
    drained: watch::Sender<usize>,
    killed: CancellationToken,
}

impl Replica {
    fn new(name: Option<&'static str>, count: usize) -> Self {
        Self(Arc::new(Played {
            name,
            count: count.into(),
            seen: watch::Sender::default(),
            drained: watch::Sender::default(),
            killed: CancellationToken::new(),
        }))
    }

    /// The same one after a restart.
    fn again(&self) -> Self {
        Self::new(self.0.name, self.0.count.load(Ordering::Relaxed))
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        self.0.seen.send_modify(|seen| {
            change(seen);
            seen.most_tunnels = seen.most_tunnels.max(seen.tunnels);
            if seen.least_tunnels.is_some() || seen.tunnels >= 2 {
                seen.least_tunnels = Some(seen.least_tunnels.unwrap_or(2).min(seen.tunnels));
            }
        });
    }

    fn seen(&self) -> Seen {
        self.0.seen.borrow().clone()
    }

    /// Waits until it has observed this.
    async fn until(&self, what: &str, check: impl Fn(&Seen) -> bool) -> Seen {
        let mut seen = self.0.seen.subscribe();
        match timeout(10 * MINUTE, seen.wait_for(&check)).await {
            Ok(Ok(seen)) => seen.clone(),
            _ => panic!("{:?} does not see that {what}: {:?}", self.0.name, self.seen()),
        }
    }

    async fn serves(&self) -> Seen {
        self.until("it has two tunnels", |seen| (seen.tunnels, seen.configurations) == (2, 1)).await
    }

    async fn is_left(&self) -> Seen {
        self.until("every connection is closed", |seen| seen.connections == 0).await
    }

    /// Sends a drain notice to all connections, as a draining kas does: it still responds.
    fn drain(&self) {
        self.0.drained.send_modify(|times| *times += 1);
    }

    /// Aborts every connection.
    fn kill(&self) {
        self.0.killed.cancel();
    }

    fn set_count(&self, count: usize) {
        self.0.count.store(count, Ordering::Relaxed);
    }

    async fn serve(self, stream: TcpStream) {
        self.note(|seen| {
            seen.accepted.push(Instant::now());
            seen.connections += 1;
        });
        tokio::select! {
            in_order = self.connection(stream) => self.note(|seen| seen.broken += usize::from(!in_order)),
            () = self.0.killed.cancelled() => {}
        }
        self.note(|seen| seen.connections -= 1);
    }

    /// Returns whether the connection ended cleanly.
    async fn connection(&self, stream: TcpStream) -> bool {
        // Waiting for the other end's acknowledgement takes real time, in which the clock would advance.
        let _ = stream.set_nodelay(true);
        let Ok(mut connection) = h2::server::handshake(stream).await else { return false };
        let mut drained = self.0.drained.subscribe();
        let mut streams = JoinSet::new();
        loop {
            tokio::select! {
                accepted = connection.accept() => match accepted {
                    Some(Ok((request, respond))) => {
                        streams.spawn(self.clone().stream(request, respond, self.0.drained.subscribe()));
                    }
                    Some(Err(error)) => {
                        println!("{:?}: {error}", self.0.name);
                        return false;
                    }
                    None => return true,
                },
                Ok(()) = drained.changed() => connection.graceful_shutdown(),
            }
        }
    }

    fn headers(&self) -> Response<()> {
        let mut response = Response::new(());
        let headers = response.headers_mut();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        if let Some(name) = self.0.name {
            headers.insert("kas-tunnel", HeaderValue::from_static("reuse"));
            headers.insert("kas-replica", HeaderValue::from_static(name));
            headers.insert("kas-replicas", self.0.count.load(Ordering::Relaxed).into());
        }
        response
    }

    async fn stream(
        self,
        request: Request<RecvStream>,
        respond: SendResponse<Bytes>,
        drained: watch::Receiver<usize>,
    ) {
        let is_tunnel = match request.uri().path() {
            CONNECT => true,
            GET_CONFIGURATION => false,
            other => panic!("agentk calls {other}"),
        };
        let mut body = request.into_body();
        // The descriptor, or the request; both fit into a frame.
        if !matches!(body.data().await, Some(Ok(_))) {
            return;
        }
        let count = move |seen: &mut Seen, by: isize| {
            let counter = if is_tunnel { &mut seen.tunnels } else { &mut seen.configurations };
            *counter = counter.saturating_add_signed(by);
        };
        self.note(|seen| count(seen, 1));
        // Also if the connection is aborted together with this task.
        let _guard = Guard(Some({
            let replica = self.clone();
            move || replica.note(|seen| count(seen, -1))
        }));
        self.talk(is_tunnel, body, respond, drained).await;
    }

    async fn talk(
        &self,
        is_tunnel: bool,
        mut body: RecvStream,
        mut respond: SendResponse<Bytes>,
        mut drained: watch::Receiver<usize>,
    ) {
        if self.0.name.is_none() {
            let _ = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
            return;
        }
        let Ok(mut send) = respond.send_response(self.headers(), false) else { return };
        if is_tunnel {
            loop {
                tokio::select! {
                    // A bare trailer, or a half-close: the tunnel is to end.
                    data = body.data() => match data {
                        Some(Err(_)) => return,
                        Some(Ok(_)) | None => break,
                    },
                    Ok(()) = drained.changed() => {
                        let notice = ConnectResponse { msg: Some(Msg::CloseSend(CloseSend {})) };
                        let _ = send.send_data(grpc::encode(&notice), false);
                    }
                }
            }
        } else {
            tokio::select! {
                _ = std::future::poll_fn(|cx| send.poll_reset(cx)) => return,
                Ok(()) = drained.changed() => {}
            }
        }
        end(&mut send);
        while let Some(Ok(_)) = body.data().await {}
    }
}

fn end(send: &mut SendStream<Bytes>) {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let _ = send.send_trailers(trailers);
}

struct Guard<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for Guard<F> {
    fn drop(&mut self) {
        if let Some(action) = self.0.take() {
            action();
        }
    }
}

/// The replica of the next connection: first as scripted, then round robin.
#[derive(Default)]
struct Balancer {
    script: VecDeque<Replica>,
    others: VecDeque<Replica>,
}

impl Balancer {
    fn next(&mut self) -> Option<Replica> {
        self.script.pop_front().or_else(|| {
            let next = self.others.pop_front()?;
            self.others.push_back(next.clone());
            Some(next)
        })
    }
}

/// An address with replicas behind it, and an agent that dials it.
struct World {
    balancer: Arc<Mutex<Balancer>>,
    metrics: Arc<Metrics>,
    leave: CancellationToken,
    tasks: TaskTracker,
    /// The step of the clock, in milliseconds.
    step: Arc<AtomicU64>,
    _folder: tempfile::TempDir,
    _running: JoinSet<()>,
}

impl World {
    /// Starts an agent that wants two replicas. Its first connections reach those of `script`.
    async fn start(script: &[&Replica]) -> Result<Self> {
        net::tls::install();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let script = script.iter().copied().cloned().collect();
        let balancer = Arc::new(Mutex::new(Balancer { script, others: VecDeque::new() }));
        let mut running = JoinSet::new();
        // Without this, the paused clock would jump to the next timer while a packet is in transit.
        let step = Arc::new(AtomicU64::new(STEP));
        let steps = Arc::clone(&step);
        running.spawn(async move {
            loop {
                sleep(Duration::from_millis(steps.load(Ordering::Relaxed))).await;
            }
        });
        let picks = Arc::clone(&balancer);
        running.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                // The replica is down: closed at once, as load balancers do.
                let next = lock(&picks).next();
                if let Some(replica) = next {
                    connections.spawn(replica.serve(stream));
                }
            }
        });
        let folder = tempfile::tempdir()?;
        let token = folder.path().join("token");
        std::fs::write(&token, "token")?;
        let metrics = Arc::new(Metrics::new(&mut Registry::default()));
        let (leave, tasks) = (CancellationToken::new(), TaskTracker::new());
        running.spawn(supervisor::run(
            session_context(TokenFile::new(token), &metrics),
            format!("grpc://{address}").parse()?,
            Arc::new(Dialer::new(net::tls::client(None)?, None, KasHeaders::default(), Proxies::default())?),
            2,
            leave.clone(),
            tasks.clone(),
        ));
        Ok(Self { balancer, metrics, leave, tasks, step, _folder: folder, _running: running })
    }

    /// The next connections reach these, in this order.
    fn next(&self, script: &[&Replica]) {
        lock(&self.balancer).script.extend(script.iter().copied().cloned());
    }

    /// Then they reach these, round robin.
    fn others(&self, replicas: &[&Replica]) {
        lock(&self.balancer).others = replicas.iter().copied().cloned().collect();
    }

    /// Waits until this many replicas are served, and this many are wanted.
    async fn is_served(&self, served: i64, wanted: i64) {
        let now = || (self.metrics.replicas_served.get(), self.metrics.replicas_wanted.get());
        let deadline = Instant::now() + AT_ONCE;
        while now() != (served, wanted) {
            assert!(Instant::now() < deadline, "served and wanted are {:?}", now());
            sleep(Duration::from_millis(STEP)).await;
        }
    }
}

fn lock(balancer: &Mutex<Balancer>) -> MutexGuard<'_, Balancer> {
    balancer.lock()
}

fn session_context(token: TokenFile, metrics: &Arc<Metrics>) -> Arc<SessionContext> {
    let modules = Modules::new(Vec::new());
    Arc::new(SessionContext {
        descriptor: modules.descriptor(),
        handler: Arc::new(modules),
        token,
        instance: HeaderValue::from_static("instance"),
        meta: proto::gitlab::agent::modshared::AgentMeta::default(),
        metrics: Arc::clone(metrics),
        max_tunnels: 500,
        pushed: watch::Sender::default(),
        calls: Arc::default(),
    })
}

fn named<const N: usize>(names: [&'static str; N], count: usize) -> [Replica; N] {
    names.map(|name| Replica::new(Some(name), count))
}

#[tokio::test(start_paused = true)]
async fn two_replicas_behind_one_address_get_one_session_each() -> Result<()> {
    let [a, b] = named(["a", "b"], 2);
    let world = World::start(&[&a, &b]).await?;
    let begun = Instant::now();
    a.serves().await;
    b.serves().await;
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    sleep(5 * MINUTE).await;
    for replica in [a, b] {
        let seen = replica.seen();
        assert_eq!((seen.accepted.len(), seen.most_tunnels, seen.least_tunnels), (1, 2, Some(2)), "{seen:?}");
    }
    world.is_served(2, 2).await;
    assert_eq!(world.metrics.connect_failures.get(), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn duplicate_connection_to_a_replica_is_closed_and_another_is_tried_10_to_20_s_later() -> Result<()> {
    let [a, b] = named(["a", "b"], 2);
    let world = World::start(&[&a, &a, &a, &a, &b]).await?;
    b.serves().await;
    let seen = a.until("one connection is left", |seen| seen.connections == 1).await;
    let pauses: Vec<Duration> = seen.accepted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses[0] < AT_ONCE, "{pauses:?}");
    for pause in &pauses[1..] {
        assert!(*pause >= Duration::from_secs(10) && *pause < Duration::from_secs(21), "{pauses:?}");
    }
    // No tunnel was opened twice, no connection broke, and no failure was counted.
    assert_eq!((seen.most_tunnels, seen.least_tunnels, seen.broken), (2, Some(2), 0), "{seen:?}");
    assert_eq!(seen.configurations, 1);
    world.is_served(2, 2).await;
    assert_eq!(world.metrics.connect_failures.get(), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn lost_replica_is_replaced_at_once_while_the_other_serves_without_a_gap() -> Result<()> {
    let [a, b, c] = named(["a", "b", "c"], 3);
    let world = World::start(&[&a, &b]).await?;
    a.serves().await;
    b.serves().await;
    sleep(MINUTE).await;
    world.next(&[&c]);
    let begun = Instant::now();
    b.kill();
    let took = c.serves().await.accepted[0] - begun;
    assert!(took < AT_ONCE, "{took:?}");
    sleep(MINUTE).await;
    world.is_served(2, 2).await;
    let seen = a.seen();
    assert_eq!((seen.accepted.len(), seen.least_tunnels), (1, Some(2)), "{seen:?}");
    assert_eq!(c.seen().accepted.len(), 1);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn draining_replica_is_avoided_until_another_is_found() -> Result<()> {
    let [a, b, c] = named(["a", "b", "c"], 3);
    let world = World::start(&[&a, &b]).await?;
    a.serves().await;
    b.serves().await;
    sleep(MINUTE).await;
    // A load balancer with stale data first connects the agent to the draining replica, then to the one that
    // it has.
    world.next(&[&a, &a, &b, &c]);
    let begun = Instant::now();
    a.drain();
    let seen = a.until("its tunnels are let go", |seen| seen.tunnels == 0).await;
    assert_eq!(seen.most_tunnels, 2, "none was opened again: {seen:?}");
    assert!(seen.accepted[1] - begun < AT_ONCE, "{seen:?}");
    let took = c.serves().await.accepted[0] - begun;
    // Two pauses of the first kind, and one after the replica that is served.
    assert!(took > Duration::from_secs(10) && took < Duration::from_secs(25), "{took:?}");
    a.is_left().await;
    let seen = b.seen();
    assert_eq!((seen.most_tunnels, seen.least_tunnels, seen.broken), (2, Some(2), 0), "{seen:?}");
    sleep(MINUTE).await;
    assert_eq!(a.seen().accepted.len(), 3);
    world.is_served(2, 2).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn single_draining_replica_is_reconnected_without_a_gap() -> Result<()> {
    let [a] = named(["a"], 1);
    let world = World::start(&[]).await?;
    world.others(&[&a]);
    a.serves().await;
    sleep(MINUTE).await;
    for n in 2..5 {
        a.drain();
        let seen = a
            .until("the new connection serves alone", |seen| {
                (seen.accepted.len(), seen.connections, seen.tunnels) == (n, 1, 2)
            })
            .await;
        assert_eq!(seen.least_tunnels, Some(2), "{seen:?}");
        sleep(MINUTE).await;
    }
    assert_eq!(a.seen().accepted.len(), 4);
    world.is_served(1, 1).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn single_replica_is_dialled_once_and_a_second_one_is_found_when_it_starts() -> Result<()> {
    let [a, b] = named(["a", "b"], 1);
    let world = World::start(&[&a]).await?;
    a.serves().await;
    sleep(20 * MINUTE).await;
    assert_eq!(a.seen().accepted.len(), 1);
    world.is_served(1, 1).await;
    world.next(&[&b]);
    let begun = Instant::now();
    a.set_count(2);
    b.set_count(2);
    b.serves().await;
    assert!(begun.elapsed() < Duration::from_secs(125), "{:?}", begun.elapsed());
    world.is_served(2, 2).await;
    // The tunnels of the probe connection are closed again.
    sleep(2 * MINUTE).await;
    let seen = a.seen();
    assert_eq!((seen.accepted.len(), seen.tunnels, seen.least_tunnels), (1, 2, Some(2)), "{seen:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn kas_that_does_not_name_itself_gets_one_session() -> Result<()> {
    let kas = Replica::new(None, 0);
    let world = World::start(&[]).await?;
    world.others(&[&kas]);
    kas.serves().await;
    sleep(HOUR / 4).await;
    let seen = kas.seen();
    // It accepts no reuse either, so agentk keeps as many tunnels there as GitLab's.
    assert_eq!((seen.accepted.len(), seen.tunnels, seen.most_tunnels), (1, 10, 10), "{seen:?}");
    world.is_served(1, 1).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn kas_that_accepts_reuse_after_an_update_gets_two_tunnels_instead_of_ten() -> Result<()> {
    let before = Replica::new(None, 0);
    let [after] = named(["a"], 1);
    let world = World::start(&[&before]).await?;
    before.until("it has ten tunnels", |seen| seen.tunnels == 10).await;
    world.others(&[&after]);
    before.kill();
    after.serves().await;
    sleep(MINUTE).await;
    let seen = after.seen();
    assert_eq!((seen.most_tunnels, seen.least_tunnels), (2, Some(2)), "{seen:?}");
    world.is_served(1, 1).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn second_connection_without_a_response_opens_no_tunnel_and_is_closed() -> Result<()> {
    let [a, b] = named(["a", "b"], 2);
    let silent = Replica::new(None, 0);
    let world = World::start(&[&a, &silent, &b]).await?;
    b.serves().await;
    let seen = silent.is_left().await;
    assert_eq!((seen.accepted.len(), seen.most_tunnels, seen.broken), (1, 0, 0), "{seen:?}");
    world.is_served(2, 2).await;
    assert_eq!(world.metrics.connect_failures.get(), 0);
    Ok(())
}

/// An agent of k3s (discussion 11329) that had been offline for a day never reconnected.
///
/// The real supervisor with a simulated clock. Fails if its pauses grow without a bound.
#[tokio::test(start_paused = true)]
async fn agent_reconnects_after_24h_sim() -> Result<()> {
    let [a, b] = named(["a", "b"], 2);
    let world = World::start(&[&a, &b]).await?;
    a.serves().await;
    b.serves().await;
    sleep(MINUTE).await;
    let attempts = || world.metrics.connect_failures.get();
    let before = attempts();
    // The coarse clock can cause one additional failed attempt.
    world.step.store(500, Ordering::Relaxed);
    a.kill();
    b.kill();
    sleep(24 * HOUR).await;
    world.step.store(STEP, Ordering::Relaxed);
    let failed = attempts() - before;
    println!("{failed} attempts in a day");
    // Full jitter with a bound of 10 s: neither silence nor a storm.
    assert!((2_000..60_000).contains(&failed), "{failed} attempts in a day");
    world.others(&[&a.again(), &b.again()]);
    let begun = Instant::now();
    while world.metrics.replicas_served.get() < 1 {
        assert!(
            begun.elapsed() < Duration::from_secs(21),
            "the pause before the next attempt is at most 10 s"
        );
        sleep(Duration::from_millis(STEP)).await;
    }
    println!("back {:?} after kas was", begun.elapsed());
    while world.metrics.replicas_served.get() < 2 {
        assert!(begun.elapsed() < MINUTE, "the second one as well");
        sleep(Duration::from_millis(STEP)).await;
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn shutdown_closes_the_connections_to_both_replicas() -> Result<()> {
    let [a, b] = named(["a", "b"], 2);
    let world = World::start(&[&a, &b]).await?;
    a.serves().await;
    b.serves().await;
    world.leave.cancel();
    world.tasks.close();
    timeout(MINUTE, world.tasks.wait()).await?;
    for replica in [a, b] {
        let seen = replica.is_left().await;
        assert_eq!((seen.accepted.len(), seen.tunnels, seen.broken), (1, 0, 0), "{seen:?}");
    }
    Ok(())
}
