//! Simulated agents. Their end of each tunnel is that of agentk; what dials is simpler than agentk.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use grpc::{Code, Status};
use history::Run;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt as _;
use ids::{AgentId, ConnectionId};
use parking_lot::Mutex;
use proto::gitlab::agent::reverse_tunnel::info::{AgentDescriptor, Method, Service};
use rand::{Rng as _, RngExt as _, seq::IndexedRandom as _};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{Notify, mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tunnel::agent_end::{self, Answer, Control, Handler, Observer, Progress};

use crate::{
    bodies::{Messages, ReadBody, Sent},
    listener::{ACCEPTED, Hello, LEAVES, PING},
    network::{Network, Stream},
    record::{Counted, Recorder},
};

/// The service that agents serve.
const SERVICE: &str = "sim.Sim";
/// Its method.
pub(crate) const METHOD: &str = "/sim.Sim/Run";
/// The id of a request.
pub(crate) const ID: &str = "x-sim-request";
/// What the agent does: milliseconds of work, milliseconds between messages, and the lengths of messages.
pub(crate) const WORK: &str = "x-sim-work";

/// Tunnels that are idle.
const IDLE: usize = 2;
/// The most tunnels of a connection.
const MOST: usize = 20;
/// How long an agent waits for a connection, and for a replica to accept it.
const CONNECT: Duration = Duration::from_secs(5);
/// An agent gives a connection up if it hears nothing for this long: replicas ping every 15 s.
const SILENCE: Duration = Duration::from_secs(25);
/// The delay after a failure doubles from the first to the second.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// How soon an idle tunnel is closed after a drain notice.
const REPLACED: Duration = Duration::from_millis(500);
/// How long an agent that has fewer connections than it wants waits before it looks again.
const LOOK: Duration = Duration::from_secs(10);

/// What the nemesis makes an agent do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// Leave one of its replicas for another one.
    Move,
    /// Close everything and come back after this time.
    Away(Duration),
}

/// An agent.
pub(crate) struct Agent {
    pub(crate) id: AgentId,
    pub(crate) host: IpAddr,
    /// To how many replicas it wants to be connected.
    pub(crate) wanted: usize,
    pub(crate) replicas: Arc<[SocketAddr]>,
    pub(crate) network: Network,
    pub(crate) recorder: Recorder,
    /// It ends its tunnels cleanly when it leaves.
    pub(crate) ends_cleanly: bool,
}

/// Makes numbers of connections unique over all agents.
fn connection_number() -> u64 {
    rand::rng().next_u64() >> 1
}

impl Agent {
    /// Keeps connections until it is dropped.
    pub(crate) async fn run(self: Arc<Self>, mut orders: mpsc::Receiver<Order>) {
        let mut connections: JoinSet<(SocketAddr, bool)> = JoinSet::new();
        let mut connected: BTreeSet<SocketAddr> = BTreeSet::new();
        // Told to leave: a replacement is wanted.
        let mut leaving: BTreeSet<SocketAddr> = BTreeSet::new();
        let (told, mut tells) = mpsc::channel::<SocketAddr>(16);
        let mut delay = BACKOFF.0;
        let mut next = Instant::now();
        let mut avoided = None;
        loop {
            while connected.len() - leaving.len() < self.wanted && Instant::now() >= next {
                let free: Vec<SocketAddr> = self
                    .replicas
                    .iter()
                    .filter(|replica| !connected.contains(replica) && avoided != Some(**replica))
                    .copied()
                    .collect();
                let Some(replica) = free.choose(&mut rand::rng()).copied() else {
                    avoided = None;
                    next = Instant::now() + LOOK.mul_f64(rand::rng().random_range(0.05..0.2));
                    break;
                };
                avoided = None;
                connected.insert(replica);
                let (this, told) = (Arc::clone(&self), told.clone());
                connections.spawn(async move { (replica, this.connect(replica, told).await) });
            }
            tokio::select! {
                biased;
                Some(ended) = connections.join_next() => {
                    let Ok((replica, was_accepted)) = ended else { continue };
                    connected.remove(&replica);
                    leaving.remove(&replica);
                    delay = if was_accepted { BACKOFF.0 } else { (delay * 2).min(BACKOFF.1) };
                    next = Instant::now() + delay.mul_f64(rand::rng().random_range(0.0..1.0));
                }
                Some(replica) = tells.recv() => {
                    if connected.contains(&replica) {
                        leaving.insert(replica);
                        avoided = Some(replica);
                        next = Instant::now();
                    }
                }
                Some(order) = orders.recv() => {
                    connections.abort_all();
                    while connections.join_next().await.is_some() {}
                    avoided = connected.iter().next().copied().filter(|_| matches!(order, Order::Move));
                    connected.clear();
                    leaving.clear();
                    if let Order::Away(time) = order {
                        sleep(time).await;
                    }
                    next = Instant::now();
                }
                () = sleep_until(next), if connected.len() - leaving.len() < self.wanted => {}
            }
        }
    }

    /// Keeps one connection; returns whether the replica accepted it.
    async fn connect(self: Arc<Self>, replica: SocketAddr, told: mpsc::Sender<SocketAddr>) -> bool {
        let connection = connection_number();
        let hello = Hello { is_tunnel: false, agent: self.id.get(), connection };
        let accepted = timeout(CONNECT, async {
            let mut control = self.network.connect(self.host, replica).await.ok()?;
            control.write_all(&hello.encode()).await.ok()?;
            (control.read_u8().await.ok()? == ACCEPTED).then_some(control)
        });
        let Ok(Some(mut control)) = accepted.await else { return false };
        let pool = Arc::new(Pool::default());
        let mut tunnels = JoinSet::new();
        let mut heard = Instant::now();
        let mut is_leaving = false;
        loop {
            while !is_leaving && pool.lacks() {
                pool.edit(|counts| counts.opening += 1);
                tunnels.spawn(Arc::clone(&self).tunnel(replica, connection, Arc::clone(&pool)));
            }
            tokio::select! {
                biased;
                byte = control.read_u8() => match byte {
                    Ok(PING) => {
                        heard = Instant::now();
                        if control.write_all(&[PING]).await.is_err() {
                            return true;
                        }
                    }
                    Ok(LEAVES) if !is_leaving => {
                        is_leaving = true;
                        // If the agent is busy, the end of the connection tells it the same.
                        let _ = told.try_send(replica);
                    }
                    _ => return true,
                },
                Some(_) = tunnels.join_next() => {}
                () = pool.changed.notified() => {}
                () = sleep_until(heard + SILENCE) => return true,
            }
            if is_leaving && tunnels.is_empty() {
                return true;
            }
        }
    }

    async fn tunnel(self: Arc<Self>, replica: SocketAddr, connection: u64, pool: Arc<Pool>) {
        let opening = Opening::new(&pool);
        let hello = Hello { is_tunnel: true, agent: self.id.get(), connection };
        let connected = timeout(CONNECT, async {
            let mut stream = self.network.connect(self.host, replica).await?;
            stream.write_all(&hello.encode()).await?;
            std::io::Result::Ok(stream)
        });
        let Ok(Ok(stream)) = connected.await else {
            // The connection is about to end, or the network is slow.
            sleep(Duration::from_millis(500)).await;
            return;
        };
        self.serve(stream, replica, connection, pool, opening).await;
    }

    async fn serve(
        &self,
        stream: Stream,
        replica: SocketAddr,
        connection: u64,
        pool: Arc<Pool>,
        opening: Opening,
    ) {
        if !self.ends_cleanly {
            stream.reset_on_drop();
        }
        let (read, mut write) = tokio::io::split(stream);
        let handler = Arc::new(Runner {
            agent: self.id,
            connection: ConnectionId::of_instance(self.id, &connection.to_be_bytes()),
            replica: replica_name(replica),
            recorder: self.recorder.clone(),
        });
        let watcher = TunnelWatch {
            pool,
            recorder: self.recorder.clone(),
            replica: replica_name(replica),
            state: Mutex::new((State::Opening, Some(opening))),
            notice: watch::Sender::new(false),
        };
        let mut notice = watcher.notice.subscribe();
        let (mut body, control): (_, Control) = agent_end::open(&descriptor(), handler, Box::new(watcher));
        control.accepted(grpc::boxed(ReadBody::new(read)), true, false);
        let pump = async {
            while let Some(frame) = body.frame().await {
                match frame.map(http_body::Frame::into_data) {
                    Ok(Ok(data)) => write.write_all(&data).await?,
                    Ok(Err(_)) => break,
                    Err(error) => return Err(std::io::Error::other(error)),
                }
            }
            write.shutdown().await
        };
        let leave = async {
            let _ = notice.wait_for(|notice| *notice).await;
            sleep(REPLACED).await;
            control.half_close();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            // An error is one of the connection, which is reset then.
            _ = pump => {}
            () = leave => {}
        }
    }
}

/// Returns the name of the replica whose agent listener has this address.
fn replica_name(listener: SocketAddr) -> String {
    crate::replica::name(listener.ip())
}

fn descriptor() -> AgentDescriptor {
    let method = Method { name: METHOD.rsplit('/').next().unwrap_or_default().to_owned() };
    AgentDescriptor { services: vec![Service { name: SERVICE.to_owned(), methods: vec![method] }] }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    opening: usize,
    idle: usize,
    busy: usize,
}

/// The tunnels of one connection.
#[derive(Default)]
struct Pool {
    counts: Mutex<Counts>,
    changed: Notify,
}

impl Pool {
    fn edit(&self, edit: impl FnOnce(&mut Counts)) {
        edit(&mut self.counts.lock());
        self.changed.notify_one();
    }

    /// Whether another tunnel should be opened.
    fn lacks(&self) -> bool {
        let Counts { opening, idle, busy } = *self.counts.lock();
        opening + idle < IDLE && opening + idle + busy < MOST
    }
}

/// A tunnel that is being opened, until it is dropped.
struct Opening(Arc<Pool>);

impl Opening {
    /// Takes over one that was counted before.
    fn new(pool: &Arc<Pool>) -> Self {
        Self(Arc::clone(pool))
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.edit(|counts| counts.opening -= 1);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Opening,
    Idle,
    Busy,
    Ended,
}

/// Counts a tunnel.
struct TunnelWatch {
    pool: Arc<Pool>,
    recorder: Recorder,
    replica: String,
    state: Mutex<(State, Option<Opening>)>,
    notice: watch::Sender<bool>,
}

impl Observer for TunnelWatch {
    fn progress(&self, progress: Progress) {
        let after = match progress {
            Progress::Parked => State::Idle,
            Progress::Busy => State::Busy,
            Progress::Ended => State::Ended,
            Progress::DrainNotice => {
                self.notice.send_replace(true);
                return;
            }
        };
        let (before, opening) = {
            let mut state = self.state.lock();
            (std::mem::replace(&mut state.0, after), state.1.take())
        };
        let is_open = |state: State| matches!(state, State::Idle | State::Busy);
        match (is_open(before), is_open(after)) {
            (false, true) => self.recorder.tunnel(&self.replica, 1),
            (true, false) => self.recorder.tunnel(&self.replica, -1),
            _ => {}
        }
        self.pool.edit(|counts| {
            match before {
                State::Idle => counts.idle -= 1,
                State::Busy => counts.busy -= 1,
                State::Opening | State::Ended => {}
            }
            match after {
                State::Idle => counts.idle += 1,
                State::Busy => counts.busy += 1,
                State::Opening | State::Ended => {}
            }
        });
        drop(opening);
    }
}

/// Runs requests, and records what it runs.
struct Runner {
    agent: AgentId,
    connection: ConnectionId,
    replica: String,
    recorder: Recorder,
}

/// What a request asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Work {
    pub(crate) millis: u64,
    pub(crate) gap: u64,
    pub(crate) lengths: Vec<usize>,
}

impl Work {
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let lengths: Vec<String> = self.lengths.iter().map(usize::to_string).collect();
        HeaderValue::try_from(format!("{} {} {}", self.millis, self.gap, lengths.join(","))).ok()
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let mut number = || words.next()?.parse().ok();
        let (millis, gap) = (number()?, number()?);
        let lengths = words.next()?.split(',').filter_map(|length| length.parse().ok()).collect();
        Some(Self { millis, gap, lengths })
    }
}

/// Records the end of a run when it is dropped.
struct Running {
    recorder: Recorder,
    number: usize,
    received: Counted,
    sent: Sent,
}

impl Drop for Running {
    fn drop(&mut self) {
        let (now, received, sent) = (self.recorder.now(), self.received.bytes(), self.sent.lock().bytes());
        self.recorder.edit_run(self.number, |run| {
            (run.ended, run.received, run.sent) = (Some(now), Some(received), Some(sent));
        });
    }
}

impl Handler for Runner {
    fn call(&self, request: Request<grpc::Body>) -> Answer {
        let text = |key| request.headers().get(key).and_then(|value| value.to_str().ok());
        let id: u64 = text(ID).and_then(|id| id.parse().ok()).unwrap_or_default();
        let work = text(WORK).and_then(Work::read).unwrap_or_default();
        let mut run = Run::new(id, self.agent.get(), self.recorder.now());
        (run.connection, run.replica) = (Some(self.connection.get()), Some(self.replica.clone()));
        let number = self.recorder.run(run);
        let (recorder, sent) = (self.recorder.clone(), Sent::default());
        let mut running = Running { recorder, number, received: Counted::default(), sent: Arc::clone(&sent) };
        Box::pin(async move {
            let mut body = request.into_body();
            while let Some(frame) = body.frame().await {
                match frame.map(http_body::Frame::into_data) {
                    Ok(Ok(data)) => running.received.add(&data),
                    Ok(Err(_)) => {}
                    Err(_) => return Status::new(Code::Cancelled, "cancelled").into_response(),
                }
            }
            running.received.end();
            sleep(Duration::from_millis(work.millis)).await;
            let gap = Duration::from_millis(work.gap);
            let answer = Messages::new(id, work.lengths, gap, sent).with_status();
            // The run lasts as long as the body of the answer.
            let answer = answer.map_frame(move |frame: http_body::Frame<Bytes>| {
                let _running = &running;
                frame
            });
            let mut response = Response::new(grpc::boxed(answer));
            response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
            response
        })
    }
}
