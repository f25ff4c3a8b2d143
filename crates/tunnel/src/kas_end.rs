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
//! A response body cannot reset its stream while HTTP/2 waits for window (nobody polls it then), so
//! a tunnel is given a function that does.

mod splice;

use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use ids::{AgentId, TokenHash};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;
use tokio::time::{Instant, Sleep};

pub use self::splice::{Lender, Splice};
use crate::{
    frame::{self, Decoder, Event, Splitter, request, response},
    meta::{self, Binary},
    state::{Frame, KasEnd, Mode, Step, Verdict},
};

/// Pieces up to this size are copied together; larger ones pass as they are. Measured: without
/// copying small ones a small call costs 14 % more, with 16 KiB a bulk stream 5 to 11 % more.
const COPY: usize = 1024;
/// How much is gathered before it is handed to HTTP/2.
const GATHER: usize = 16 * 1024;
/// How long and how much of an abandoned answer of a 14.1 agent is read so that its tunnel need
/// not be reset: a reset costs that agent 10 s and more of back-off.
const DISCARD_TIME: Duration = Duration::from_secs(10);
const DISCARD_BYTES: u64 = 1 << 20;
/// How long after a complete answer the asking replica may take to close the request's own direction;
/// then the tunnel is reset rather than kept from the next request.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Which agentk is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// An agent of this project, on a reusable tunnel.
    Ours,
    /// GitLab's, up to 15: cannot cancel a request, and backs off 10 s or more after a reset.
    Old,
    /// GitLab's from 16 on (user agent `gitlab-agent/`): cancels, and comes back at once after
    /// status CANCELLED.
    Recent,
}

impl Peer {
    /// What tunnels of this peer can do.
    pub fn mode(self) -> Mode {
        match self {
            Self::Ours => Mode::Reusable,
            Self::Old | Self::Recent => Mode::OneShot,
        }
    }

    /// How values of binary metadata travel.
    pub fn binary(self) -> Binary {
        match self {
            Self::Ours => Binary::Base64,
            Self::Old | Self::Recent => Binary::Raw,
        }
    }
}

/// Who and what is at the other end of a tunnel.
#[derive(Debug, Clone)]
pub struct Info {
    /// The authenticated agent.
    pub agent: AgentId,
    /// The agentk process: by its instance id, or by the transport connection.
    pub instance: u64,
    /// The token that the stream was opened with.
    pub token: TokenHash,
    /// Which agentk it is.
    pub peer: Peer,
    /// What the agent serves.
    pub descriptor: Arc<Descriptor>,
}

/// What an agent serves: full paths of methods.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    methods: Vec<Box<str>>,
}

impl Descriptor {
    /// Services and methods that one agent may list.
    pub const MAX_SERVICES: usize = 200;

    /// Returns the descriptor in a message; `None`: it lists too much.
    pub fn from_proto(message: rpc::Descriptor) -> Option<Self> {
        let services = message.agent_descriptor.unwrap_or_default().services;
        if services.len() > Self::MAX_SERVICES {
            return None;
        }
        let mut methods: Vec<Box<str>> = services
            .iter()
            .flat_map(|service| {
                service.methods.iter().map(move |m| format!("/{}/{}", service.name, m.name).into())
            })
            .collect();
        methods.sort_unstable();
        methods.dedup();
        Some(Self { methods })
    }

    /// Returns a descriptor of these full paths.
    pub fn of(methods: &[&str]) -> Self {
        let mut methods: Vec<Box<str>> = methods.iter().map(|m| (*m).into()).collect();
        methods.sort_unstable();
        Self { methods }
    }

    /// Whether the agent serves `method`, a full path.
    pub fn serves(&self, method: &str) -> bool {
        self.methods.binary_search_by(|m| (**m).cmp(method)).is_ok()
    }

    /// Returns the full paths, sorted.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.methods.iter().map(|m| &**m)
    }
}

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

/// One tunnel, shared by agentk's stream and, during a request, the caller's.
pub struct Tunnel {
    info: Info,
    /// The stream goes to another replica.
    borrowed: bool,
    /// Such a stream may carry several requests; else it carries one and ends.
    again: bool,
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

/// agentk's direction of a tunnel: its request body, taken apart.
struct AgentStream {
    body: grpc::Body,
    decoder: Decoder,
    peeked: Option<Result<Got, Broken>>,
}

enum Got {
    Event(Event),
    HalfClose,
}

/// agentk's direction ended other than by a clean half-close.
struct Broken {
    /// For logs.
    why: String,
    /// What the replica that lent the tunnel says.
    status: Option<Box<Status>>,
}

fn broken(why: impl Into<String>) -> Broken {
    Broken { why: why.into(), status: None }
}

impl AgentStream {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Got, Broken>> {
        if let Some(got) = self.peeked.take() {
            return Poll::Ready(got);
        }
        loop {
            match self.decoder.next() {
                Ok(Some(event)) => return Poll::Ready(Ok(Got::Event(event))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(broken(error.to_string()))),
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // gRPC clients send no trailers; if one does, the end that follows counts.
                    if let Ok(data) = frame.into_data() {
                        self.decoder.push(data);
                    }
                }
                Some(Err(error)) => {
                    return Poll::Ready(Err(match error.downcast::<Status>() {
                        Ok(status) => Broken { why: status.to_string(), status: Some(status) },
                        Err(error) => broken(format!("the agent's stream broke: {error}")),
                    }));
                }
                // Some resets look like an end: only the stream's state tells them apart.
                None if !self.body.is_end_stream() => {
                    return Poll::Ready(Err(broken("the agent's stream was reset")));
                }
                None if self.decoder.is_between() => return Poll::Ready(Ok(Got::HalfClose)),
                None => return Poll::Ready(Err(broken("the agent's stream ended inside a message"))),
            }
        }
    }
}

/// Reads the descriptor, which an agent sends first.
///
/// # Errors
/// The status with which the stream ends.
///
/// # Cancel safety
/// Not cancel safe: drop the opening with it.
pub async fn read_descriptor(opening: &mut Opening) -> Result<Descriptor, Status> {
    let stream = &mut opening.0;
    let got = std::future::poll_fn(|cx| stream.poll(cx)).await;
    let name = match got {
        Ok(Got::Event(Event::Control { field: request::DESCRIPTOR, body })) => {
            let message = rpc::Descriptor::decode(body).map_err(|error| {
                Status::new(Code::InvalidArgument, format!("the descriptor is malformed: {error}"))
            })?;
            return Descriptor::from_proto(message).ok_or_else(|| {
                Status::new(
                    Code::InvalidArgument,
                    format!("a descriptor may list at most {} services", Descriptor::MAX_SERVICES),
                )
            });
        }
        Ok(Got::Event(Event::Control { field, .. })) => match field {
            request::HEADER => "ConnectRequest_Header",
            request::TRAILER => "ConnectRequest_Trailer",
            _ => "ConnectRequest_Error",
        },
        Ok(Got::Event(_)) => "ConnectRequest_Message",
        Ok(Got::HalfClose) | Err(_) => return Err(Status::new(Code::Unavailable, "unavailable")),
    };
    // The text that 14.1 gives.
    Err(Status::new(Code::InvalidArgument, format!("Invalid oneof value type: *rpc.{name}")))
}

/// agentk's direction before its descriptor has been read.
pub struct Opening(AgentStream);

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opening")
    }
}

impl Opening {
    /// Takes the body of a `Connect` call. `gzip`: it announced `grpc-encoding: gzip`.
    pub fn new(body: grpc::Body, gzip: bool) -> Self {
        Self(AgentStream { body, decoder: Decoder::of_agent(gzip), peeked: None })
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
        Self::make(info, opening, owner, reset, end, (false, false))
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
        Self::make(info, Opening::new(body, false), owner, reset, end, (true, again))
    }

    fn make(
        info: Info,
        opening: Opening,
        owner: Arc<dyn Owner>,
        reset: Box<dyn Fn() + Send + Sync>,
        end: KasEnd,
        (borrowed, again): (bool, bool),
    ) -> (Arc<Self>, TunnelBody) {
        let core = Core {
            end,
            stream: Some(opening.0),
            job: None,
            ending: None,
            retire: None,
            discard: false,
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
        let tunnel = Arc::new(Self { info, borrowed, again, owner, reset, core: Mutex::new(core) });
        let body = TunnelBody {
            tunnel: Arc::clone(&tunnel),
            out: BytesMut::new(),
            big: None,
            caller: None,
            discard: None,
            closing: None,
            ending: None,
            rest: None,
            done: false,
        };
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
        Ok(Exchange {
            tunnel: Arc::clone(self),
            round,
            stream: Some(stream),
            out: BytesMut::new(),
            big: None,
            status: None,
            trailers: HeaderMap::new(),
            sleep: deadline.instant().map(|at| Box::pin(tokio::time::sleep_until(at))),
            ended: None,
            done: false,
        })
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

/// The caller's body, taken apart.
struct CallerStream {
    body: grpc::Body,
    source: Source,
}

/// What the caller's body is made of.
enum Source {
    Messages(Splitter),
    /// Another replica's envelopes.
    Envelopes(Decoder),
}

impl Source {
    fn next(&mut self) -> Result<Option<Event>, frame::Error> {
        match self {
            Self::Messages(splitter) => splitter.next(),
            Self::Envelopes(decoder) => decoder.next(),
        }
    }

    fn push(&mut self, data: Bytes) {
        match self {
            Self::Messages(splitter) => splitter.push(data),
            Self::Envelopes(decoder) => decoder.push(data),
        }
    }
}

enum Pulled {
    Event(Event),
    End,
    Reset,
    Wrong(Status),
}

impl CallerStream {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Pulled> {
        loop {
            match self.source.next() {
                Ok(Some(event)) => return Poll::Ready(Pulled::Event(event)),
                Ok(None) => {}
                Err(error) => {
                    return Poll::Ready(Pulled::Wrong(Status::new(
                        Code::Internal,
                        format!("request stream: {error}"),
                    )));
                }
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.source.push(data);
                    }
                }
                Some(Err(error)) => {
                    // A body adapter of ours says what is wrong with the caller's bytes.
                    return Poll::Ready(match error.downcast::<Status>() {
                        Ok(status) => Pulled::Wrong(*status),
                        Err(_) => Pulled::Reset,
                    });
                }
                None if !self.body.is_end_stream() => return Poll::Ready(Pulled::Reset),
                None => {
                    let Source::Messages(splitter) = &self.source else {
                        // Without `close_send` the end of a replica's stream says nothing about the caller's.
                        return Poll::Ready(Pulled::Wrong(Status::new(
                            Code::Internal,
                            "a replica ended a request without close_send",
                        )));
                    };
                    if splitter.is_between() {
                        return Poll::Ready(Pulled::End);
                    }
                    return Poll::Ready(Pulled::Wrong(Status::new(
                        Code::Internal,
                        "request stream: it ended inside a message",
                    )));
                }
            }
        }
    }
}

/// The response body of agentk's `Connect` call.
pub struct TunnelBody {
    tunnel: Arc<Tunnel>,
    out: BytesMut,
    big: Option<Bytes>,
    caller: Option<CallerStream>,
    discard: Option<Box<Discard>>,
    /// Until when another replica may write `close_send` after a complete answer.
    closing: Option<Pin<Box<Sleep>>>,
    ending: Option<Ending>,
    /// What a lender still has to say when nothing more goes to it.
    rest: Option<AgentStream>,
    done: bool,
}

struct Discard {
    until: Pin<Box<Sleep>>,
    left: u64,
}

enum Turn {
    Again,
    Wait,
    Big(Bytes),
    End(Ending),
    Killed,
}

impl fmt::Debug for TunnelBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelBody").field("tunnel", &self.tunnel).finish_non_exhaustive()
    }
}

impl TunnelBody {
    /// Reads what a lender says after the tunnel was given back to it, so that dropping the stream resets nothing.
    ///
    /// # Cancel safety
    /// Cancel safe. Give it a time.
    pub async fn read_rest(&mut self) {
        let Some(mut rest) = self.rest.take() else { return };
        while let Ok(Got::Event(_)) = std::future::poll_fn(|cx| rest.poll(cx)).await {}
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Turn {
        let tunnel = Arc::clone(&self.tunnel);
        let mut core = tunnel.core();
        core.waiting = false;
        if core.dead {
            return Turn::Killed;
        }
        if core.end.is_ended() {
            return Turn::End(core.ending.take().unwrap_or(Ending::Ok));
        }
        if core.end.is_parked() {
            return self.turn_parked(core, cx);
        }
        let close_sent = core.end.is_close_sent();
        if core.end.is_answered() {
            // The replica that writes the envelopes also writes the last one.
            if !core.spliced || close_sent || core.end.mode() == Mode::OneShot {
                return self.turn_answered(core, cx);
            }
            let closing = self.closing.get_or_insert_with(|| Box::pin(tokio::time::sleep(CLOSE_TIME)));
            if closing.as_mut().poll(cx).is_ready() || self.caller.is_none() {
                tunnel.kill(core);
                return Turn::Killed;
            }
        }
        if core.discard {
            return self.turn_discard(core, cx);
        }
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        drop(core);
        if close_sent {
            // A tunnel that is borrowed for one request has nothing more to say.
            return if tunnel.borrowed && !tunnel.again { Turn::End(Ending::Ok) } else { Turn::Wait };
        }
        let Some(caller) = &mut self.caller else { return Turn::Wait };
        match ready_or!(caller.poll(cx), Turn::Wait) {
            Pulled::Event(Event::Message { len }) => {
                frame::put_message_head(response::MESSAGE, len, &mut self.out);
                Turn::Again
            }
            Pulled::Event(Event::Data(data)) if data.len() <= COPY => {
                self.out.put_slice(&data);
                Turn::Again
            }
            Pulled::Event(Event::Data(data)) => Turn::Big(data),
            // Only envelopes have control fields.
            Pulled::Event(Event::Control { field, body }) => {
                if field == response::CLOSE_SEND {
                    let caller = self.caller.take();
                    frame::put_control(field, &body, &mut self.out);
                    let mut core = tunnel.core();
                    core.end.close_send();
                    if core.keep {
                        core.asker = caller.map(|caller| caller.body);
                    }
                    return Turn::Again;
                }
                self.fault(Status::new(Code::Internal, "a replica sent an envelope out of order"))
            }
            Pulled::End => {
                self.caller = None;
                let mut core = tunnel.core();
                if !core.end.is_answered() {
                    frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
                    core.end.close_send();
                } else {
                    // The answer was complete first: the next turn closes and parks.
                }
                Turn::Again
            }
            // The caller's own stream is being dropped; that decides what happens here.
            Pulled::Reset => {
                self.caller = None;
                // Unless the answer is complete: then only this side is left.
                if tunnel.core().end.is_answered() { Turn::Again } else { Turn::Wait }
            }
            Pulled::Wrong(status) => self.fault(status),
        }
    }

    /// The caller's bytes are wrong: its own stream decides what happens.
    fn fault(&mut self, status: Status) -> Turn {
        self.caller = None;
        let mut core = self.tunnel.core();
        core.fault = Some(status);
        if let Some(waker) = core.exchange_waker.take() {
            waker.wake();
        }
        Turn::Wait
    }

    fn turn_parked(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Turn {
        if let Some(job) = core.job.take() {
            core.end.open();
            self.out.put_slice(&job.request_info);
            let source = if core.spliced {
                let mut decoder = Decoder::of_kas(false);
                decoder.push(std::mem::take(&mut core.ahead));
                Source::Envelopes(decoder)
            } else {
                Source::Messages(Splitter::default())
            };
            self.caller = Some(CallerStream { body: job.body, source });
            return Turn::Again;
        }
        if !core.lent
            && let Some(retire) = core.retire.take()
        {
            if retire == Retire::Notice && core.end.notify_drain() {
                frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
                return Turn::Again;
            }
            core.end.end();
            core.wake_exchange();
            return Turn::End(Ending::Ok);
        }
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        // An exchange that was given back unused returns the stream and wakes this task.
        let Some(stream) = &mut core.stream else { return Turn::Wait };
        let what = match ready_or!(stream.poll(cx), Turn::Wait) {
            Ok(got) => match core.end.agent_sent(kind(&got)) {
                Ok(_) => {
                    core.given_up = !core.end.is_draining();
                    core.wake_exchange();
                    return Turn::End(Ending::Ok);
                }
                Err(_) => "the agent wrote to a parked tunnel".to_owned(),
            },
            Err(Broken { why, .. }) => why,
        };
        self.tunnel.kill(core);
        self.tunnel.owner.violated(&self.tunnel, &what);
        Turn::Killed
    }

    /// The answer is complete: close the request's own direction between two messages, then park.
    fn turn_answered(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Turn {
        if let Some(CallerStream { source: Source::Messages(mut splitter), .. }) = self.caller.take() {
            // A message that is partly written is finished only from bytes already here: waiting
            // for the caller could take for ever, and a close inside it would be swallowed.
            while splitter.left() > 0 {
                match splitter.next() {
                    Ok(Some(Event::Data(data))) => self.out.put_slice(&data),
                    _ => {
                        self.tunnel.kill(core);
                        return Turn::Killed;
                    }
                }
            }
        }
        if !core.end.is_close_sent() && core.end.mode() == Mode::Reusable {
            frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
            core.end.close_send();
        }
        self.closing = None;
        if self.tunnel.again {
            return self.turn_settling(core, cx);
        }
        if self.tunnel.borrowed {
            core.end.end();
            return Turn::End(Ending::Ok);
        }
        let parked = core.end.park();
        core.parked_at = Instant::now();
        let retiring = core.retire.is_some();
        let lent = std::mem::take(&mut core.keep) && parked && !retiring;
        core.lent = lent;
        // A splice waits for this.
        let waker = core.exchange_waker.take();
        drop(core);
        if let Some(waker) = waker {
            waker.wake();
        }
        if !parked {
            return Turn::End(Ending::Ok);
        }
        if !retiring && !lent {
            self.tunnel.owner.parked(&self.tunnel);
        }
        Turn::Again
    }

    /// A borrowed tunnel's request is over on both sides: the lender says whether another may follow.
    fn turn_settling(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Turn {
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        // The exchange returns the stream in the poll in which it finds the answer complete, and wakes this task.
        let Some(stream) = &mut core.stream else { return Turn::Wait };
        let got = ready_or!(stream.poll(cx), Turn::Wait);
        match core.settle(got) {
            Settled::Parked => {
                let retiring = core.retire.is_some();
                drop(core);
                if !retiring {
                    self.tunnel.owner.parked(&self.tunnel);
                }
                Turn::Again
            }
            Settled::Ended => {
                core.end.end();
                Turn::End(Ending::Ok)
            }
            Settled::Broken => {
                self.tunnel.kill(core);
                Turn::Killed
            }
        }
    }

    fn turn_discard(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Turn {
        self.caller = None;
        let discard = self.discard.get_or_insert_with(|| {
            Box::new(Discard { until: Box::pin(tokio::time::sleep(DISCARD_TIME)), left: DISCARD_BYTES })
        });
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        let expired = discard.until.as_mut().poll(cx).is_ready();
        let Some(stream) = &mut core.stream else { return Turn::Wait };
        let got = match stream.poll(cx) {
            Poll::Pending if expired => Err(broken("an abandoned answer did not end in time")),
            Poll::Pending => return Turn::Wait,
            Poll::Ready(got) => got,
        };
        let step = got.ok().and_then(|got| {
            if let Got::Event(Event::Data(data)) = &got {
                discard.left = discard.left.checked_sub(data.len() as u64)?;
                return Some(Step::Pass);
            }
            core.end.agent_sent(kind(&got)).ok()
        });
        match step {
            Some(Step::Complete) => {
                core.end.end();
                Turn::End(Ending::Ok)
            }
            Some(_) => Turn::Again,
            None => {
                self.tunnel.kill(core);
                Turn::Killed
            }
        }
    }

    /// Returns the last frame; `None` where the end needs none.
    fn last(&mut self, ending: &Ending) -> Option<HttpFrame<Bytes>> {
        self.done = true;
        if self.tunnel.borrowed {
            if self.tunnel.again {
                self.rest = self.tunnel.core().stream.take();
            }
            return None;
        }
        let mut trailers = HeaderMap::with_capacity(2);
        match ending {
            Ending::Ok => Status::write_ok(&mut trailers),
            Ending::Status(status) => status.write_to(&mut trailers),
        }
        Some(HttpFrame::trailers(trailers))
    }
}

/// What a frame is for the automaton.
fn kind(got: &Got) -> Frame {
    match got {
        Got::HalfClose => Frame::HalfClose,
        Got::Event(Event::Message { .. } | Event::Data(_)) => Frame::Message,
        Got::Event(Event::Control { field, body }) => match *field {
            request::HEADER => Frame::Header,
            request::TRAILER => Frame::Trailer { bare: body.is_empty() },
            request::ERROR => Frame::Error,
            _ => Frame::Descriptor,
        },
    }
}

macro_rules! ready_or {
    ($poll:expr, $pending:expr) => {
        match $poll {
            Poll::Ready(value) => value,
            Poll::Pending => return $pending,
        }
    };
}
use ready_or;

impl Body for TunnelBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<HttpFrame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        if let Some(big) = this.big.take() {
            return Poll::Ready(Some(Ok(HttpFrame::data(big))));
        }
        loop {
            if let Some(ending) = this.ending.take() {
                return Poll::Ready(this.last(&ending).map(Ok));
            }
            let turn = if this.out.len() >= GATHER { Turn::Wait } else { this.turn(cx) };
            match turn {
                Turn::Again => continue,
                Turn::Big(big) if this.out.is_empty() => return Poll::Ready(Some(Ok(HttpFrame::data(big)))),
                Turn::Big(big) => this.big = Some(big),
                Turn::End(ending) if this.out.is_empty() => return Poll::Ready(this.last(&ending).map(Ok)),
                Turn::End(ending) => this.ending = Some(ending),
                Turn::Wait | Turn::Killed if this.out.is_empty() => return Poll::Pending,
                Turn::Wait | Turn::Killed => {}
            }
            // HTTP/2 asks again at once, or when there is window: not waiting for a wake-up now.
            this.tunnel.core().waiting = false;
            return Poll::Ready(Some(Ok(HttpFrame::data(this.out.split().freeze()))));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.done
    }
}

impl Drop for TunnelBody {
    fn drop(&mut self) {
        let mut core = self.tunnel.core();
        let idle = self.tunnel.again && (core.end.is_parked() || core.end.is_ended());
        if self.tunnel.borrowed && !idle && !core.dead && core.job.is_none() {
            core.mute = true;
            // The request has begun: how it ends is for the answer's own direction to say. The lender may stop reading
            // before everything has been written, when the answer is complete.
            core.tunnel_waker = None;
            return;
        }
        let wasted = core.end.is_parked() && !core.end.is_draining() || core.given_up;
        core.dead = true;
        core.end.end();
        let stream = core.stream.take();
        let waker = core.exchange_waker.take();
        core.tunnel_waker = None;
        drop(core);
        drop(stream);
        if let Some(waker) = waker {
            waker.wake();
        }
        self.tunnel.owner.ended(&self.tunnel, wasted);
    }
}

/// How an answer begins.
#[derive(Debug)]
pub enum Head {
    /// Headers; messages and trailers follow in the [`Exchange`] as a body.
    Headers(HeaderMap),
    /// There are no headers of their own: this is the whole answer.
    Only(HeaderMap, Status),
}

/// A request in a tunnel, as the caller's stream holds it: first [`head`](Self::head), then a body.
///
/// Dropping it before the answer is complete cancels the request, or gives the tunnel back unused
/// when nothing has been written.
pub struct Exchange {
    tunnel: Arc<Tunnel>,
    round: u64,
    stream: Option<AgentStream>,
    out: BytesMut,
    big: Option<Bytes>,
    /// What the agent's `error` said.
    status: Option<Status>,
    trailers: HeaderMap,
    sleep: Option<Pin<Box<Sleep>>>,
    /// The trailers that stand after what has been gathered.
    ended: Option<HeaderMap>,
    done: bool,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("tunnel", &self.tunnel).finish_non_exhaustive()
    }
}

enum Next {
    Headers(HeaderMap),
    Event(Event),
    Complete,
}

/// What came from agentk, and what it means.
enum Came {
    Data(Bytes),
    Got(Got, Step),
}

impl Exchange {
    /// Returns the tunnel.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        &self.tunnel
    }

    /// Waits for the beginning of the answer.
    ///
    /// # Errors
    /// See [`Failure`].
    ///
    /// # Cancel safety
    /// Cancel safe; dropping the exchange cancels the request.
    pub async fn head(&mut self) -> Result<Head, Failure> {
        std::future::poll_fn(|cx| self.poll_head(cx)).await
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<Head, Failure>> {
        Poll::Ready(Ok(match ready!(self.poll_next(cx))? {
            Next::Headers(headers) => Head::Headers(headers),
            Next::Complete => {
                let status = self.status.take().unwrap_or_else(|| Status::new(Code::Ok, ""));
                Head::Only(std::mem::take(&mut self.trailers), status)
            }
            // The automaton lets no message come before the header.
            Next::Event(_) => {
                return Poll::Ready(Err(self.fail(Verdict::Unknown, broken("a message before the header"))));
            }
        }))
    }

    /// Takes the next thing off agentk's direction and through the automaton.
    fn poll_came(&mut self, cx: &mut Context<'_>) -> Poll<Result<Came, Failure>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(Err(Failure::Unknown));
        };
        let got = match stream.poll(cx) {
            Poll::Ready(got) => got,
            Poll::Pending => {
                let mut core = self.tunnel.core();
                if let Some(status) = core.fault.take() {
                    drop(core);
                    self.abandon();
                    return Poll::Ready(Err(Failure::Caller(status)));
                }
                if core.dead || core.end.is_ended() {
                    drop(core);
                    return Poll::Ready(Err(self.fail(Verdict::Unknown, broken(""))));
                }
                set_waker(&mut core.exchange_waker, cx);
                drop(core);
                if let Some(sleep) = &mut self.sleep
                    && sleep.as_mut().poll(cx).is_ready()
                {
                    self.abandon();
                    return Poll::Ready(Err(Failure::Deadline));
                }
                return Poll::Pending;
            }
        };
        let got = match got {
            Ok(Got::Event(Event::Data(data))) => return Poll::Ready(Ok(Came::Data(data))),
            Ok(got) => got,
            Err(why) => return Poll::Ready(Err(self.fail(Verdict::Unknown, why))),
        };
        let step = self.tunnel.core().end.agent_sent(kind(&got));
        match step {
            // The tunnel is still parked: the agent withdrew it before the request was written.
            Ok(Step::End) => {
                let mut core = self.tunnel.core();
                core.given_up = !core.end.is_draining();
                core.stream = self.stream.take();
                core.wake_tunnel();
                let job = core.job.take();
                Poll::Ready(Err(job.map_or(Failure::Unknown, Failure::NotStarted)))
            }
            Ok(step) => Poll::Ready(Ok(Came::Got(got, step))),
            Err(verdict) => Poll::Ready(Err(self.fail(verdict, broken("a frame out of order")))),
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Next, Failure>> {
        loop {
            let (got, step) = match ready!(self.poll_came(cx))? {
                Came::Data(data) => return Poll::Ready(Ok(Next::Event(Event::Data(data)))),
                Came::Got(got, step) => (got, step),
            };
            if let Got::Event(event @ Event::Message { .. }) = got {
                return Poll::Ready(Ok(Next::Event(event)));
            }
            if let Got::Event(Event::Control { field, body }) = got
                && step != Step::Ignore
                && let Err(why) = self.keep(field, body)
            {
                return Poll::Ready(Err(self.fail(Verdict::Unknown, broken(why))));
            }
            match step {
                Step::Pass => return Poll::Ready(Ok(Next::Headers(std::mem::take(&mut self.trailers)))),
                Step::Complete => {
                    self.complete();
                    return Poll::Ready(Ok(Next::Complete));
                }
                Step::Keep | Step::Ignore | Step::End | Step::Park => {}
            }
        }
    }

    /// Keeps what a header, trailer or error says: maps in `trailers`, the status in `status`.
    fn keep(&mut self, field: u32, body: Bytes) -> Result<(), &'static str> {
        let peer = self.tunnel.info.peer;
        if body.is_empty() && field != request::ERROR {
            return Ok(());
        }
        match field {
            // Header and trailer have the same shape.
            request::HEADER | request::TRAILER => {
                let message = rpc::Header::decode(body).map_err(|_| "a malformed header or trailer")?;
                let dropped =
                    meta::read_map(&message.meta, peer.binary(), meta::passes_to_caller, &mut self.trailers);
                if dropped > 0 {
                    self.tunnel.owner.dropped(dropped);
                }
            }
            _ => {
                let message = rpc::Error::decode(body).map_err(|_| "a malformed error")?;
                self.status = Some(Status::from_agent(message.status.unwrap_or_default()));
            }
        }
        Ok(())
    }

    /// The answer is complete: gives agentk's direction back, and parks when that is possible here.
    fn complete(&mut self) {
        self.sleep = None;
        let mut core = self.tunnel.core();
        core.exchange_waker = None;
        if self.tunnel.again && !core.mute && !core.dead {
            core.stream = self.stream.take();
            self.tunnel.settle(core);
            return;
        }
        if self.tunnel.borrowed {
            // The lender's last frames are read here, so that dropping the stream resets nothing.
            if let Some(stream) = &mut self.stream {
                let _ = stream.poll(&mut Context::from_waker(Waker::noop()));
            }
            core.wake_tunnel();
            return;
        }
        core.stream = self.stream.take();
        let can_park = core.end.is_close_sent()
            && core.end.mode() == Mode::Reusable
            && core.retire.is_none()
            && !core.dead;
        if !can_park || !core.end.park() {
            core.wake_tunnel();
            return;
        }
        core.parked_at = Instant::now();
        // Watch agentk's direction for the tunnel's own task, without running it: it has nothing to
        // write until the next request.
        match &mut *core {
            Core { stream: Some(stream), tunnel_waker: Some(waker), .. } => {
                if let Poll::Ready(got) = stream.poll(&mut Context::from_waker(waker)) {
                    stream.peeked = Some(got);
                    core.wake_tunnel();
                }
            }
            _ => core.wake_tunnel(),
        }
        core.lent = std::mem::take(&mut core.keep);
        if core.lent {
            return;
        }
        drop(core);
        self.tunnel.owner.parked(&self.tunnel);
    }

    /// The agent's side failed: resets the tunnel, and says what that means for the request.
    fn fail(&mut self, verdict: Verdict, broken: Broken) -> Failure {
        let Broken { why, status } = broken;
        let mut core = self.tunnel.core();
        let job = core.job.take();
        let dead = core.dead;
        let ending = core.ending.is_some();
        drop(self.stream.take());
        if dead || ending {
            drop(core);
        } else {
            self.tunnel.kill(core);
            if !why.is_empty() {
                self.tunnel.owner.violated(&self.tunnel, &why);
            }
        }
        if job.is_none()
            && let Some(status) = status
        {
            return Failure::Lender(*status);
        }
        match (job, verdict) {
            (Some(job), _) => Failure::NotStarted(job),
            (None, Verdict::NotStarted) => Failure::Refused,
            (None, _) => Failure::Unknown,
        }
    }

    /// The caller does not want the answer any more.
    fn abandon(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        let mut core = self.tunnel.core();
        core.exchange_waker = None;
        if core.dead {
            return;
        }
        if core.end.is_ended() {
            core.wake_tunnel();
            return;
        }
        if self.tunnel.borrowed && !(self.tunnel.again && core.job.is_some()) {
            // After a complete answer the other direction closes by itself. An unused tunnel is put back by its lender.
            drop(stream);
            if !core.end.is_answered() {
                core.job = None;
                self.tunnel.kill(core);
            }
            return;
        }
        if let Some(job) = core.job.take() {
            // Nothing was written: the next request may have it.
            core.stream = Some(stream);
            core.wake_tunnel();
            let retiring = core.retire.is_some();
            drop(core);
            drop(job);
            if !retiring {
                self.tunnel.owner.parked(&self.tunnel);
            }
            return;
        }
        match self.tunnel.info.peer {
            Peer::Recent if core.waiting => {
                core.end.end();
                core.ending = Some(Ending::Status(Status::new(Code::Cancelled, "the caller has gone")));
                core.wake_tunnel();
                drop(core);
                drop(stream);
            }
            Peer::Old if core.end.is_close_sent() => {
                core.stream = Some(stream);
                core.discard = true;
                core.wake_tunnel();
            }
            _ => {
                drop(stream);
                self.tunnel.kill(core);
            }
        }
    }

    /// Returns the status of a failure after the answer's head has been passed on.
    pub fn late_status(&self, failure: &Failure) -> Status {
        let agent = self.tunnel.info.agent;
        match failure {
            Failure::Deadline => Status::new(
                Code::DeadlineExceeded,
                format!("the deadline passed before the answer of agent {agent} was complete"),
            )
            .with_outcome(Outcome::Unknown),
            Failure::Caller(status) | Failure::Lender(status) => status.clone(),
            Failure::NotStarted(_) | Failure::Refused | Failure::Unknown => Status::new(
                Code::Unavailable,
                format!(
                    "the tunnel of agent {agent} was lost before its answer was complete: the request may have run; \
                     repeat it only if that is safe"
                ),
            )
            .with_outcome(Outcome::Unknown),
        }
    }
}

impl Body for Exchange {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<HttpFrame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        if let Some(big) = this.big.take() {
            return Poll::Ready(Some(Ok(HttpFrame::data(big))));
        }
        if let Some(trailers) = this.ended.take() {
            this.done = true;
            return Poll::Ready(Some(Ok(HttpFrame::trailers(trailers))));
        }
        loop {
            if this.out.len() >= GATHER {
                break;
            }
            match this.poll_next(cx) {
                Poll::Pending if this.out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Ok(Next::Event(Event::Message { len }))) => {
                    this.out.put_slice(&grpc::prefix(len))
                }
                Poll::Ready(Ok(Next::Event(Event::Data(data)))) if data.len() <= COPY => {
                    this.out.put_slice(&data)
                }
                Poll::Ready(Ok(Next::Event(Event::Data(data)))) => {
                    if this.out.is_empty() {
                        return Poll::Ready(Some(Ok(HttpFrame::data(data))));
                    }
                    this.big = Some(data);
                    break;
                }
                Poll::Ready(Ok(Next::Complete)) => {
                    let mut trailers = std::mem::take(&mut this.trailers);
                    match this.status.take() {
                        None => Status::write_ok(&mut trailers),
                        Some(status) => status.write_to(&mut trailers),
                    }
                    this.ended = Some(trailers);
                }
                // The automaton lets a header come once, and it has no control events here.
                Poll::Ready(Ok(Next::Headers(_) | Next::Event(Event::Control { .. }))) => continue,
                Poll::Ready(Err(failure)) => {
                    let mut trailers = HeaderMap::new();
                    this.late_status(&failure).write_to(&mut trailers);
                    this.ended = Some(trailers);
                }
            }
            if let Some(trailers) = this.ended.take() {
                if this.out.is_empty() {
                    this.done = true;
                    return Poll::Ready(Some(Ok(HttpFrame::trailers(trailers))));
                }
                this.ended = Some(trailers);
                break;
            }
        }
        Poll::Ready(Some(Ok(HttpFrame::data(this.out.split().freeze()))))
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.abandon();
    }
}
