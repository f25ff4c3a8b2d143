//! kas' end of a tunnel: a response body that is parked until a request arrives.
//!
//! A [`Tunnel`] is shared by two HTTP/2 streams. The stream that agentk opened has [`TunnelBody`] as its
//! response body, which writes `request_info` and then the caller's request body in envelopes. The caller's
//! stream holds an [`Exchange`], which reads agentk's request body and removes the envelopes. The task of
//! each stream polls its own side, so there is no task, channel or copy between them, and HTTP/2 does the
//! flow control.
//!
//! While a tunnel is parked its [`TunnelBody`] also polls agentk's direction. That detects withdrawals, lost
//! agents and bytes that the protocol does not allow.
//!
//! Across replicas the two halves are in two processes. The replica that a caller asked holds a *borrowed*
//! tunnel ([`Tunnel::borrowed`]): it writes envelopes into a stream to the replica that holds the tunnel of
//! the agent. That one *splices* them ([`Tunnel::begin_spliced`]): it follows the state machine and passes
//! envelopes on without decoding their contents. The stream between the replicas carries one
//! request, or several if the holder *leases* the tunnel: after each request it says whether the lease goes
//! on ([`Lender`]). In between, the tunnel is parked at both ends and free at neither.
//!
//! Requests between replicas of this project and of GitLab's kas 14.1 have another form, see [`gitlab`]: the
//! answer has the same envelopes, but the request has the caller's messages without envelopes.
//!
//! A response body is not polled while HTTP/2 waits for window, so it cannot reset its stream then. A tunnel
//! is therefore given a function that does.

mod agent_stream;
mod caller_stream;
mod exchange;
pub mod gitlab;
mod info;
#[cfg(test)]
mod schedules;
mod splice;
mod tunnel_body;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use grpc::{Deadline, Status};
use tokio::time::Instant;

use self::agent_stream::{AgentStream, Broken, Got, frame_of};
pub use self::{
    agent_stream::{Opening, Unasked, read_descriptor},
    exchange::{Exchange, Head},
    info::{AgentKind, AgentkVersion, Descriptor, Info, Unacceptable},
    splice::{Lender, Splice},
    tunnel_body::TunnelBody,
};
use crate::{
    flaw::{Flaw, flawed},
    frame::{Event, request},
    state::{KasEnd, Step},
    sync::{Mutex, MutexGuard},
};

/// How long after a complete answer the replica that borrowed the tunnel may take to close the request's
/// direction. The tunnel is reset after that, since it blocks the next request.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Manages free tunnels. Called without any lock of the tunnel.
pub trait TunnelPool: Send + Sync + 'static {
    /// The tunnel is free for a request.
    fn parked(&self, tunnel: &Arc<Tunnel>);
    /// The tunnel is over. `wasted`: the agent ended it or was lost while the tunnel was parked.
    fn ended(&self, tunnel: &Arc<Tunnel>, wasted: bool);
    /// The caller has left, and the agent cannot cancel the request: it occupies the tunnel until the agent
    /// ends the answer. If that is already over, [`Tunnel::abandoned_since`] is `None`.
    fn abandoned(&self, _tunnel: &Arc<Tunnel>) {}
    /// The agent broke the protocol, and the tunnel is being reset.
    fn violated(&self, _tunnel: &Arc<Tunnel>, _what: &str) {}
    /// Illegal metadata values in an agent's answer were dropped.
    fn dropped(&self, _count: usize) {}
}

/// A request for a tunnel.
pub struct Job {
    /// The `request_info` envelope with its prefix.
    request_info: Bytes,
    body: grpc::Body,
    /// `Some`: the body has the envelopes of another replica, and these bytes precede it.
    ahead: Option<Bytes>,
}

impl Job {
    /// Creates the request of a caller. `request_info` is the envelope with its prefix. `body` has gRPC
    /// frames that are not compressed.
    pub fn new(request_info: Bytes, body: grpc::Body) -> Self {
        Self { request_info, body, ahead: None }
    }

    /// Creates the request of another replica, for [`Tunnel::begin_spliced`]. The envelopes after
    /// `request_info` are in `ahead`, and then in `body`.
    pub fn spliced(request_info: Bytes, ahead: Bytes, body: grpc::Body) -> Self {
        Self { request_info, body, ahead: Some(ahead) }
    }

    /// Returns the `request_info` envelope with its prefix.
    pub fn request_info(&self) -> &Bytes {
        &self.request_info
    }

    /// Returns the body that the request was created with.
    pub fn into_body(self) -> grpc::Body {
        self.body
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({} bytes)", self.request_info.len())
    }
}

/// Why a request had no complete answer.
#[derive(Debug)]
pub enum Failure {
    /// Nothing was written to the agent. The request is returned unchanged.
    NotStarted(Job),
    /// The agent certainly did not start the request, but its body may be partly consumed.
    Refused,
    /// The request was started, and its outcome is unknown.
    Unknown,
    /// The deadline passed after the request was started.
    Deadline,
    /// The caller sent malformed bytes, as the status explains.
    Caller(Status),
    /// The status of the replica that lent the tunnel.
    Lender(Status),
}

/// How agentk's stream ends.
#[derive(Debug, Clone, PartialEq)]
enum Ending {
    Ok,
    Status(Status),
}

/// How to take a tunnel out of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retire {
    /// By a drain notice if the agent understands it, else as [`Ok`](Self::Ok).
    Notice,
    /// By ending the stream with OK.
    Ok,
}

/// What is at the other end of a tunnel's stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FarEnd {
    /// agentk.
    Agent,
    /// Another replica that lends a tunnel of the agent. The stream carries one request and ends.
    Replica,
    /// Another replica that leases a tunnel of the agent. It says after each request whether another may
    /// follow.
    LeasingReplica,
    /// A replica of GitLab's kas that has a tunnel of the agent. As [`Replica`](Self::Replica), but the
    /// request's messages go there without envelopes.
    GitlabReplica,
}

/// What a tunnel does with requests. The protocol's own states are those of [`KasEnd`].
enum Phase {
    /// There is no request.
    Idle,
    /// There is no request yet, but one of another replica is on its way. The tunnel retires after that.
    Reserved,
    /// A request has been accepted, and nothing of it has been written.
    Accepted(Job),
    /// A request is open.
    Open,
    /// The caller left the request of a 14.1 agent at this time: the rest of the answer is read and
    /// discarded.
    Discarding(Instant),
    /// The answer's trailer has arrived, but the far end ends its stream only after this one:
    /// [`FarEnd::GitlabReplica`].
    Finishing,
}

/// The lease of a tunnel by another replica. After the open request the tunnel is reserved for the next one.
#[derive(Default)]
struct Lease {
    /// The body with the next request, once the open one is complete.
    next: Option<grpc::Body>,
}

/// A tunnel, shared by agentk's stream and, during a request, the caller's stream.
pub struct Tunnel {
    info: Info,
    far_end: FarEnd,
    pool: Arc<dyn TunnelPool>,
    reset: Box<dyn Fn() + Send + Sync>,
    /// See [`Tunnel::is_long`].
    is_long: AtomicBool,
    core: Mutex<Core>,
}

struct Core {
    end: KasEnd,
    phase: Phase,
    /// agentk's direction. The [`Exchange`] has it while a request is open.
    stream: Option<AgentStream>,
    ending: Option<Ending>,
    retire: Option<Retire>,
    /// What is wrong with the bytes of the caller.
    fault: Option<Status>,
    /// The lease to which the open request belongs, if its [`Splice`] can ask for the renewal.
    lease: Option<Lease>,
    /// [`TunnelBody`] ended during a request, so no other request can be written.
    write_closed: bool,
    /// The number of the current request, so that the end of one is not taken for the end of the next.
    round: u64,
    /// The stream was reset or dropped.
    dead: bool,
    /// The agent withdrew the parked tunnel, or half-closed it without a drain notice.
    given_up: bool,
    /// [`TunnelBody`] waits for a wake-up, so it will be polled after one. False while HTTP/2 waits for
    /// window.
    waiting: bool,
    parked_at: Instant,
    tunnel_waker: Option<Waker>,
    exchange_waker: Option<Waker>,
}

impl Core {
    /// Whether a request may begin, if the tunnel is not to retire.
    fn is_free(&self) -> bool {
        self.end.is_free() && matches!(self.phase, Phase::Idle | Phase::Reserved) && !self.dead
    }

    /// Takes back the request if nothing of it has been written.
    fn take_accepted(&mut self) -> Option<Job> {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Accepted(job) => Some(job),
            phase => {
                self.phase = phase;
                None
            }
        }
    }

    /// Takes what a lender sent after a request that is complete in both directions.
    fn settle(&mut self, got: Result<Got, Broken>) -> Settled {
        let step = got.ok().and_then(|got| self.end.agent_sent(frame_of(&got)).ok());
        match step {
            Some(Step::Park) if self.end.park() => {
                self.phase = Phase::Idle;
                self.parked_at = Instant::now();
                Settled::Parked
            }
            Some(Step::Park | Step::End) => Settled::Ended,
            _ => Settled::Broken,
        }
    }

    fn wake_tunnel(&mut self) {
        if let Some(waker) = &self.tunnel_waker {
            waker.wake_by_ref();
        }
    }

    fn wake_exchange(&mut self) {
        if let Some(waker) = self.exchange_waker.take() {
            waker.wake();
        }
    }
}

/// What became of a leased tunnel after its request.
enum Settled {
    Parked,
    Ended,
    Broken,
}

fn set_waker(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnel").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Tunnel {
    /// Creates a parked tunnel and the response body of its `Connect` call. `reset` resets the stream with
    /// CANCEL, whatever it waits for.
    pub fn new(
        info: Info,
        opening: Opening,
        pool: Arc<dyn TunnelPool>,
        reset: Box<dyn Fn() + Send + Sync>,
    ) -> (Arc<Self>, TunnelBody) {
        Self::make(info, opening, pool, reset, FarEnd::Agent)
    }

    /// Creates a tunnel that another replica lends. `body` is the response of that replica, which fails with
    /// a [`Status`] if that replica ends a request with one. [`TunnelBody`] is sent there. `leased`: that
    /// replica may lend the tunnel for further requests, and `pool` is notified each time. Else it carries
    /// one request.
    pub fn borrowed(
        info: Info,
        body: grpc::Body,
        pool: Arc<dyn TunnelPool>,
        reset: Box<dyn Fn() + Send + Sync>,
        leased: bool,
    ) -> (Arc<Self>, TunnelBody) {
        let far_end = if leased { FarEnd::LeasingReplica } else { FarEnd::Replica };
        Self::make(info, Opening::new(body, false), pool, reset, far_end)
    }

    fn make(
        info: Info,
        opening: Opening,
        pool: Arc<dyn TunnelPool>,
        reset: Box<dyn Fn() + Send + Sync>,
        far_end: FarEnd,
    ) -> (Arc<Self>, TunnelBody) {
        let end = match far_end {
            FarEnd::LeasingReplica => KasEnd::leased(),
            FarEnd::Agent | FarEnd::Replica | FarEnd::GitlabReplica => KasEnd::parked(info.kind.mode()),
        };
        let core = Core {
            end,
            phase: Phase::Idle,
            stream: Some(opening.0),
            ending: None,
            retire: None,
            fault: None,
            lease: None,
            write_closed: false,
            round: 0,
            dead: false,
            given_up: false,
            waiting: false,
            parked_at: Instant::now(),
            tunnel_waker: None,
            exchange_waker: None,
        };
        let tunnel = Arc::new(Self {
            info,
            far_end,
            pool,
            reset,
            is_long: AtomicBool::new(false),
            core: Mutex::new(core),
        });
        let body = TunnelBody::new(Arc::clone(&tunnel));
        (tunnel, body)
    }

    /// Describes the other end.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Returns since when the tunnel has been parked. `None`: it carries a request, takes no more of them, or
    /// is over.
    pub fn idle_since(&self) -> Option<Instant> {
        let core = self.core();
        (core.is_free() && core.retire.is_none()).then_some(core.parked_at)
    }

    /// Ready once the tunnel is over. Only for the task that has reserved it.
    pub fn poll_over(&self, cx: &Context<'_>) -> Poll<()> {
        let mut core = self.core();
        if core.dead || core.end.is_ended() {
            return Poll::Ready(());
        }
        set_waker(&mut core.exchange_waker, cx);
        Poll::Pending
    }

    /// Reserves the parked tunnel for a request that is still on its way. The tunnel retires only after that
    /// request has begun, or after [`cancel_reservation`](Self::cancel_reservation). No effect if the tunnel
    /// is not free.
    pub fn reserve(&self) {
        let mut core = self.core();
        if core.is_free() && core.retire.is_none() {
            core.phase = Phase::Reserved;
        }
    }

    /// Cancels the reservation: a tunnel that is to retire does so now. No effect without a reservation.
    pub fn cancel_reservation(&self) {
        let mut core = self.core();
        if matches!(core.phase, Phase::Reserved) {
            core.phase = Phase::Idle;
            core.lease = None;
            core.exchange_waker = None;
            if core.retire.is_some() {
                core.wake_tunnel();
            }
        }
    }

    /// Whether the tunnel carries a request.
    pub fn carries_request(&self) -> bool {
        let core = self.core();
        !core.dead
            && (matches!(core.phase, Phase::Accepted(_)) || !core.end.is_parked() && !core.end.is_ended())
    }

    /// Notes whether the request of the tunnel may outlast the time in which kas ends other requests.
    pub fn set_long(&self, is_long: bool) {
        self.is_long.store(is_long, Ordering::Relaxed);
    }

    /// Whether the request of the tunnel may outlast the time in which kas ends other requests.
    pub fn is_long(&self) -> bool {
        self.is_long.load(Ordering::Relaxed)
    }

    /// Returns since when the tunnel has been occupied by a request whose caller has left, see
    /// [`TunnelPool::abandoned`]. `None`: it carries no such request, or is over.
    pub fn abandoned_since(&self) -> Option<Instant> {
        let core = self.core();
        match core.phase {
            Phase::Discarding(since) if !core.dead && !core.end.is_ended() => Some(since),
            _ => None,
        }
    }

    /// Gives the tunnel a request. The task of the tunnel's stream writes it.
    ///
    /// # Errors
    /// The request, if the tunnel is no longer free.
    pub fn begin(self: &Arc<Self>, job: Job, deadline: Deadline) -> Result<Exchange, Job> {
        self.open(job, deadline, None)
    }

    fn open(self: &Arc<Self>, job: Job, deadline: Deadline, lease: Option<Lease>) -> Result<Exchange, Job> {
        let mut core = self.core();
        let retires = core.retire.is_some() && !matches!(core.phase, Phase::Reserved);
        if !core.is_free() || core.ending.is_some() || retires {
            return Err(job);
        }
        let Some(stream) = core.stream.take() else { return Err(job) };
        if flawed(Flaw::WakeBeforeWrite) {
            core.wake_tunnel();
            drop(core);
            core = self.core();
        }
        core.phase = Phase::Accepted(job);
        core.lease = lease;
        // An earlier request may have failed after its answer was complete.
        core.fault = None;
        core.round += 1;
        let round = core.round;
        if !flawed(Flaw::WakeBeforeWrite) {
            core.wake_tunnel();
        }
        drop(core);
        Ok(Exchange::new(Arc::clone(self), round, stream, deadline))
    }

    /// Takes the tunnel out of use: immediately if it is parked, else after its request.
    pub fn retire(&self, how: Retire) {
        let mut core = self.core();
        // A later notice does not replace an end.
        if core.retire != Some(Retire::Ok) {
            core.retire = Some(how);
        }
        core.wake_tunnel();
    }

    /// Ends the tunnel with `status`, even during a request.
    pub fn end(&self, status: Status) {
        let mut core = self.core();
        if core.dead || core.end.is_ended() {
            return;
        }
        if core.waiting {
            core.end.end();
            core.ending = Some(Ending::Status(status));
            core.stream = None;
            core.wake_tunnel();
            if let Some(waker) = core.exchange_waker.take() {
                waker.wake();
            }
        } else {
            self.kill(core);
        }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Whether another replica lends the tunnel.
    fn is_borrowed(&self) -> bool {
        self.far_end != FarEnd::Agent
    }

    /// The answer on a leased tunnel is complete, and agentk's direction is back: takes what the lender says
    /// next, if that has arrived, without running the tunnel's own task.
    fn settle(self: &Arc<Self>, mut core: MutexGuard<'_, Core>) {
        let waker = match (&core.tunnel_waker, core.end.is_close_sent()) {
            (Some(waker), true) => waker.clone(),
            _ => return core.wake_tunnel(),
        };
        let mut cx = Context::from_waker(&waker);
        let Some(stream) = &mut core.stream else { return };
        let Poll::Ready(got) = stream.poll(&mut cx) else { return };
        if !matches!(got, Ok(Got::Event(Event::Control { field: request::DESCRIPTOR, .. }))) {
            stream.peeked = Some(got);
            return core.wake_tunnel();
        }
        match core.settle(got) {
            Settled::Parked => {}
            Settled::Ended => {
                core.end.end();
                return core.wake_tunnel();
            }
            Settled::Broken => return self.kill(core),
        }
        // Registers the tunnel's task for agentk's direction.
        if let Some(stream) = &mut core.stream
            && let Poll::Ready(got) = stream.poll(&mut cx)
        {
            stream.peeked = Some(got);
            core.wake_tunnel();
        }
        if core.retire.is_some() {
            return core.wake_tunnel();
        }
        drop(core);
        self.pool.parked(self);
    }

    /// Ends the lease to which the request `round` belongs: the tunnel is free if it was reserved for the
    /// next one.
    fn end_lease(self: &Arc<Self>, round: u64) {
        let mut core = self.core();
        if core.round != round {
            return;
        }
        core.lease = None;
        if !matches!(core.phase, Phase::Reserved) {
            return;
        }
        core.phase = Phase::Idle;
        let retiring = core.retire.is_some();
        if retiring {
            core.wake_tunnel();
        }
        drop(core);
        if !retiring {
            self.pool.parked(self);
        }
    }

    /// Whether another replica leases the tunnel.
    fn is_leased(&self) -> bool {
        self.far_end == FarEnd::LeasingReplica
    }

    /// Resets agentk's stream.
    fn kill(&self, mut core: MutexGuard<'_, Core>) {
        core.dead = true;
        core.end.end();
        let stream = core.stream.take();
        let waker = core.exchange_waker.take();
        drop(core);
        drop(stream);
        (self.reset)();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
