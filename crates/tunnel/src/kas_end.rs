//! kas' end of a tunnel: parked as a response body, swapped with a caller's bodies on a match.
//!
//! A [`Tunnel`] is shared by two HTTP/2 streams. The stream that agentk opened has [`TunnelBody`]
//! as its response body: it writes `request_info`, pulls the caller's request body and envelopes
//! it. The caller's stream holds an [`Exchange`]: it pulls agentk's request body and takes the
//! envelopes off. Each side is polled by its own stream's task, so there is no task, channel or
//! copy of our own between them, and back-pressure is HTTP/2's.
//!
//! While a tunnel is parked its [`TunnelBody`] also polls agentk's direction, so that a withdrawal,
//! a vanished agent or stray bytes are noticed.
//!
//! Across replicas the same two halves stand in two processes. The replica that a caller asked holds a
//! *borrowed* tunnel ([`Tunnel::borrowed`]): it writes the envelopes into a stream to the replica that
//! holds the real one, which *splices* them ([`Tunnel::begin_spliced`]): it follows the automaton,
//! and passes envelopes on without decoding what is in them. Where both sides know how, the stream carries
//! several requests: after each the holder says whether the tunnel stays lent ([`Lender`]), and in between it is
//! parked at both ends and free at neither.
//!
//! Between this project's replicas and GitLab's, of 14.1, a request has another form, which [`gateway`] is for: the same
//! envelopes come back, but what goes there are the caller's messages as they are.
//!
//! A response body cannot reset its stream while HTTP/2 waits for window (nobody polls it then), so
//! a tunnel is given a function that does.

mod agent_stream;
mod caller_stream;
mod exchange;
pub mod gateway;
mod info;
mod splice;
mod tunnel_body;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use grpc::{Deadline, Status};
use tokio::time::Instant;

use self::agent_stream::{AgentStream, Broken, Got, kind};
pub use self::{
    agent_stream::{Opening, Unasked, read_descriptor},
    exchange::{Exchange, Head},
    info::{Descriptor, Info, Peer, Unacceptable},
    splice::{Lender, Splice},
    tunnel_body::TunnelBody,
};
use crate::{
    frame::{Event, request},
    state::{KasEnd, Step},
};

/// Pieces up to this size are copied together; larger ones pass as they are. Measured: without
/// copying small ones a small call costs 14 % more, with 16 KiB a bulk stream 5 to 11 % more.
const COPY: usize = 1024;
/// How much is gathered before it is handed to HTTP/2.
const GATHER: usize = 16 * 1024;
/// How long after a complete answer the asking replica may take to close the request's own direction;
/// then the tunnel is reset rather than kept from the next request.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Who hands tunnels out. Called without any lock of the tunnel.
pub trait Owner: Send + Sync + 'static {
    /// The tunnel is free: for the first time, or again.
    fn parked(&self, tunnel: &Arc<Tunnel>);
    /// The tunnel is over. `wasted`: the agent ended it, or vanished, while it was parked.
    fn ended(&self, tunnel: &Arc<Tunnel>, wasted: bool);
    /// The agent did what the protocol does not allow; the tunnel is being reset.
    fn violated(&self, _tunnel: &Arc<Tunnel>, _what: &str) {}
    /// Values of an agent's answer were dropped as illegal.
    fn dropped(&self, _count: usize) {}
}

/// A request for a tunnel.
pub struct Job {
    /// The `request_info` envelope with its prefix.
    pub request_info: Bytes,
    /// The caller's body: gRPC frames, not compressed.
    pub body: grpc::Body,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({} bytes)", self.request_info.len())
    }
}

/// Why a request had no complete answer.
#[derive(Debug)]
pub enum Failure {
    /// Nothing was written to the agent; the request is as it was.
    NotStarted(Job),
    /// The agent surely did not start it, but the body may be partly consumed.
    Refused,
    /// It was started and its outcome is unknown.
    Unknown,
    /// The deadline passed after it was started.
    Deadline,
    /// The caller's own bytes were wrong; the status says how.
    Caller(Status),
    /// The replica that lent the tunnel says what became of the request.
    Lender(Status),
}

/// How agentk's stream ends.
#[derive(Debug, Clone, PartialEq)]
enum Ending {
    Ok,
    Status(Status),
}

/// What happens to a tunnel that should not take further requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retire {
    /// Drain notice where the agent understands it, else OK.
    Notice,
    /// The stream ends with OK.
    Ok,
}

/// What is at the other end of a tunnel's stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// agentk itself.
    Own,
    /// Another replica that has the agent, for one request or, `again`, for several.
    Lent { again: bool },
    /// A replica of GitLab's kas that has the agent.
    Gateway,
}

/// One tunnel, shared by agentk's stream and, during a request, the caller's.
pub struct Tunnel {
    info: Info,
    /// The stream goes to another replica.
    borrowed: bool,
    /// Such a stream may carry several requests; else it carries one and ends.
    again: bool,
    /// The other replica is GitLab's: it takes messages without envelopes.
    plain: bool,
    owner: Arc<dyn Owner>,
    reset: Box<dyn Fn() + Send + Sync>,
    core: Mutex<Core>,
}

struct Core {
    end: KasEnd,
    /// agentk's direction; the [`Exchange`] has it while a request is open.
    stream: Option<AgentStream>,
    job: Option<Job>,
    ending: Option<Ending>,
    retire: Option<Retire>,
    /// The caller left a 14.1 agent's request: read the rest of its answer.
    discard: bool,
    /// The answer's trailer has come, and the other replica ends its stream only after this side has: [`Tunnel::plain`].
    finishing: bool,
    /// What was wrong with the caller's bytes.
    fault: Option<Status>,
    /// The open request's envelopes come from another replica.
    spliced: bool,
    /// What that replica wrote after `request_info` and was read with it.
    ahead: Bytes,
    /// After the open request the tunnel is not free: its [`Splice`] asks whether it stays lent.
    keep: bool,
    /// Parked, and lent to another replica: what retires it waits until it comes back.
    lent: bool,
    /// Where the other replica's next request will come from.
    asker: Option<grpc::Body>,
    /// [`TunnelBody`] has ended during a request: nothing more can be written.
    mute: bool,
    /// Counts requests, so that the end of one is not taken for the next one's.
    round: u64,
    dead: bool,
    /// The agent withdrew the parked tunnel, or half-closed it without being asked.
    given_up: bool,
    /// Whether [`TunnelBody`] waits for a wake-up, and so will be polled after one. It is false
    /// while HTTP/2 waits for window.
    waiting: bool,
    parked_at: Instant,
    tunnel_waker: Option<Waker>,
    exchange_waker: Option<Waker>,
}

impl Core {
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

    /// Takes what a lender said after a request that is over on both sides.
    fn settle(&mut self, got: Result<Got, Broken>) -> Settled {
        let step = got.ok().and_then(|got| self.end.agent_sent(kind(&got)).ok());
        match step {
            Some(Step::Park) if self.end.park() => {
                self.parked_at = Instant::now();
                Settled::Parked
            }
            Some(Step::Park | Step::End) => Settled::Ended,
            _ => Settled::Broken,
        }
    }
}

/// What became of a borrowed tunnel after its request.
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
    /// Makes a parked tunnel, and the response body of its `Connect` call. `reset` resets the
    /// stream with CANCEL, whatever it waits for.
    pub fn new(
        info: Info,
        opening: Opening,
        owner: Arc<dyn Owner>,
        reset: Box<dyn Fn() + Send + Sync>,
    ) -> (Arc<Self>, TunnelBody) {
        let end = KasEnd::parked(info.peer.mode());
        Self::make(info, opening, owner, reset, end, Form::Own)
    }

    /// Makes a tunnel that another replica lends: `body` is its answer, which fails with a [`Status`] where that
    /// replica says what became of the request, and [`TunnelBody`] is what goes there. `again`: that replica may
    /// lend it for further requests, and `owner` is told each time; else it carries one request.
    pub fn borrowed(
        info: Info,
        body: grpc::Body,
        owner: Arc<dyn Owner>,
        reset: Box<dyn Fn() + Send + Sync>,
        again: bool,
    ) -> (Arc<Self>, TunnelBody) {
        let end = if again { KasEnd::lent() } else { KasEnd::parked(info.peer.mode()) };
        Self::make(info, Opening::new(body, false), owner, reset, end, Form::Lent { again })
    }

    fn make(
        info: Info,
        opening: Opening,
        owner: Arc<dyn Owner>,
        reset: Box<dyn Fn() + Send + Sync>,
        end: KasEnd,
        form: Form,
    ) -> (Arc<Self>, TunnelBody) {
        let (borrowed, plain) = (form != Form::Own, form == Form::Gateway);
        let again = form == Form::Lent { again: true };
        let core = Core {
            end,
            stream: Some(opening.0),
            job: None,
            ending: None,
            retire: None,
            discard: false,
            finishing: false,
            fault: None,
            spliced: false,
            ahead: Bytes::new(),
            keep: false,
            lent: false,
            asker: None,
            mute: false,
            round: 0,
            dead: false,
            given_up: false,
            waiting: false,
            parked_at: Instant::now(),
            tunnel_waker: None,
            exchange_waker: None,
        };
        let tunnel = Arc::new(Self { info, borrowed, again, plain, owner, reset, core: Mutex::new(core) });
        let body = TunnelBody::new(Arc::clone(&tunnel));
        (tunnel, body)
    }

    /// Returns who and what is at the other end.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Returns since when the tunnel has been parked; `None`: it carries a request, takes none any more, or is over.
    pub fn idle_since(&self) -> Option<Instant> {
        let core = self.core();
        let free = core.end.is_free() && core.job.is_none() && core.retire.is_none() && !core.dead;
        free.then_some(core.parked_at)
    }

    /// Ready once the tunnel is over. For the one who holds it parked.
    pub fn poll_over(&self, cx: &Context<'_>) -> Poll<()> {
        let mut core = self.core();
        if core.dead || core.end.is_ended() {
            return Poll::Ready(());
        }
        set_waker(&mut core.exchange_waker, cx);
        Poll::Pending
    }

    /// Lends the parked tunnel for a request that is still on its way: what retires it waits until the request has
    /// begun, or until [`take_back`](Self::take_back). Without effect on a tunnel that takes no request.
    pub fn lend(&self) {
        let mut core = self.core();
        if core.end.is_free() && core.job.is_none() && core.retire.is_none() && !core.dead {
            core.lent = true;
        }
    }

    /// The tunnel is not lent any more: what was to retire it does so now. Without effect unless it was lent.
    pub fn take_back(&self) {
        let mut core = self.core();
        if std::mem::take(&mut core.lent) {
            core.asker = None;
            core.exchange_waker = None;
            if core.retire.is_some() {
                core.wake_tunnel();
            }
        }
    }

    /// Whether the tunnel carries a request now.
    pub fn carries_request(&self) -> bool {
        let core = self.core();
        !core.dead && (core.job.is_some() || !core.end.is_parked() && !core.end.is_ended())
    }

    /// Gives the tunnel a request. Nothing is written before the stream's own task runs.
    ///
    /// # Errors
    /// The request, when the tunnel is no longer free.
    pub fn begin(self: &Arc<Self>, job: Job, deadline: Deadline) -> Result<Exchange, Job> {
        self.open(job, deadline)
    }

    fn open(self: &Arc<Self>, job: Job, deadline: Deadline) -> Result<Exchange, Job> {
        self.open_as(job, deadline, None)
    }

    /// `spliced`: what was read after `request_info`, and whether the tunnel may stay lent afterwards.
    fn open_as(
        self: &Arc<Self>,
        job: Job,
        deadline: Deadline,
        spliced: Option<(Bytes, bool)>,
    ) -> Result<Exchange, Job> {
        let mut core = self.core();
        if core.dead
            || !core.end.is_free()
            || core.job.is_some()
            || core.ending.is_some()
            // What is lent is asked back; the request that crossed the question is the last.
            || core.retire.is_some() && !core.lent
        {
            return Err(job);
        }
        let Some(stream) = core.stream.take() else { return Err(job) };
        core.job = Some(job);
        core.spliced = spliced.is_some();
        (core.ahead, core.keep) = spliced.unwrap_or_default();
        core.lent = false;
        core.asker = None;
        // Of an earlier request, whose answer was complete before its bytes were wrong.
        core.fault = None;
        core.round += 1;
        let round = core.round;
        core.wake_tunnel();
        drop(core);
        Ok(Exchange::new(Arc::clone(self), round, stream, deadline))
    }

    /// Takes the tunnel out of use: at once when it is parked, else after its request.
    pub fn retire(&self, how: Retire) {
        let mut core = self.core();
        // An end is never taken back by a notice that comes after it.
        if core.retire != Some(Retire::Ok) {
            core.retire = Some(how);
        }
        core.wake_tunnel();
    }

    /// Ends the tunnel with `status`, whatever it carries.
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
        // A panic between two fields cannot leave them torn: every change is a few assignments.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A borrowed tunnel's answer is complete and its stream is back: takes what the lender says next if it is here,
    /// without running the tunnel's own task.
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
        // From now on the tunnel's task watches.
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
        self.owner.parked(self);
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
