//! The caller's side of a request in a tunnel, polled by the task of the caller's stream.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;
use tokio::time::{Instant, Sleep};

use super::{
    AgentKind, Core, Ending, Failure, FarEnd, Phase, Tunnel,
    agent_stream::{AgentStream, Broken, Got, broken, frame_of},
    set_waker,
};
use crate::{
    flaw::{Flaw, flawed},
    frame::{COPY, Event, GATHER, request},
    meta,
    state::{Mode, Step, Verdict},
};

/// How an answer begins.
#[derive(Debug)]
pub enum Head {
    /// With headers. The messages and trailers follow, with the [`Exchange`] as a body.
    Headers(HeaderMap),
    /// Without headers: this is the whole answer.
    Only(HeaderMap, Status),
}

/// A request in a tunnel, on the caller's side. Call [`head`](Self::head) first, then use it as a body.
///
/// Dropping it before the answer is complete cancels the request. If nothing of the request has been written,
/// the tunnel is free again.
pub struct Exchange {
    pub(super) tunnel: Arc<Tunnel>,
    pub(super) round: u64,
    stream: Option<AgentStream>,
    pub(super) out: BytesMut,
    pub(super) big: Option<Bytes>,
    /// The status in the agent's `error`.
    pub(super) status: Option<Status>,
    pub(super) trailers: HeaderMap,
    sleep: Option<Pin<Box<Sleep>>>,
    /// The trailers that follow the gathered bytes.
    pub(super) ended: Option<HeaderMap>,
    pub(super) done: bool,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("tunnel", &self.tunnel).finish_non_exhaustive()
    }
}

pub(super) enum Next {
    Headers(HeaderMap),
    Event(Event),
    Complete,
}

/// What arrived from agentk, and what to do with it.
pub(super) enum Came {
    Data(Bytes),
    Got(Got, Step),
}

impl Exchange {
    pub(super) fn new(tunnel: Arc<Tunnel>, round: u64, stream: AgentStream, deadline: Deadline) -> Self {
        Self {
            tunnel,
            round,
            stream: Some(stream),
            out: BytesMut::new(),
            big: None,
            status: None,
            trailers: HeaderMap::new(),
            sleep: deadline.instant().map(|at| Box::pin(tokio::time::sleep_until(at))),
            ended: None,
            done: false,
        }
    }

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
            // The state machine allows no message before the header.
            Next::Event(_) => {
                return Poll::Ready(Err(self.fail(Verdict::Unknown, broken("a message before the header"))));
            }
        }))
    }

    /// Reads the next frame of agentk's direction, and gives it to the state machine.
    pub(super) fn poll_came(&mut self, cx: &mut Context<'_>) -> Poll<Result<Came, Failure>> {
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
                if flawed(Flaw::WakerAfterUnlock) {
                    drop(core);
                    core = self.tunnel.core();
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
        let step = self.tunnel.core().end.agent_sent(frame_of(&got));
        match step {
            // The tunnel is still parked: the agent withdrew it before the request was written.
            Ok(Step::End) => {
                let mut core = self.tunnel.core();
                core.given_up = !core.end.is_draining();
                core.stream = self.stream.take();
                core.wake_tunnel();
                let job = core.take_accepted();
                Poll::Ready(Err(job.map_or(Failure::Unknown, Failure::NotStarted)))
            }
            Ok(step) => Poll::Ready(Ok(Came::Got(got, step))),
            Err(verdict) => Poll::Ready(Err(self.fail(verdict, broken("a frame out of order")))),
        }
    }

    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Next, Failure>> {
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
                Step::Keep if self.tunnel.far_end == FarEnd::GitlabReplica => {
                    let mut core = self.tunnel.core();
                    core.phase = Phase::Finishing;
                    core.wake_tunnel();
                }
                Step::Keep | Step::Ignore | Step::End | Step::Park => {}
            }
        }
    }

    /// Keeps the contents of a header, trailer or error: maps in `trailers`, the status in `status`.
    fn keep(&mut self, field: u32, body: Bytes) -> Result<(), &'static str> {
        let kind = self.tunnel.info.kind;
        if body.is_empty() && field != request::ERROR {
            return Ok(());
        }
        match field {
            // A header and a trailer have the same fields.
            request::HEADER | request::TRAILER => {
                let dropped =
                    meta::read_map(&body, kind.binary(), meta::passes_to_caller, &mut self.trailers)
                        .map_err(|_| "a malformed header or trailer")?;
                if dropped > 0 {
                    self.tunnel.pool.dropped(dropped);
                }
            }
            _ => {
                let message = rpc::Error::decode(body).map_err(|_| "a malformed error")?;
                self.status = Some(Status::from_agent(message.status.unwrap_or_default()));
            }
        }
        Ok(())
    }

    /// The answer is complete: gives agentk's direction back, and parks the tunnel if that is possible here.
    pub(super) fn complete(&mut self) {
        self.sleep = None;
        let mut core = self.tunnel.core();
        core.exchange_waker = None;
        if self.tunnel.is_leased() && !core.write_closed && !core.dead {
            core.stream = self.stream.take();
            self.tunnel.settle(core);
            return;
        }
        if self.tunnel.is_borrowed() {
            // Reads the last frames of the replica that lent the tunnel, so that dropping the stream resets
            // nothing.
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
        let leased = core.lease.is_some();
        core.phase = if leased { Phase::Reserved } else { Phase::Idle };
        core.parked_at = Instant::now();
        // Registers the tunnel's task for agentk's direction without running it, since it has nothing to
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
        drop(core);
        if !leased {
            self.tunnel.pool.parked(&self.tunnel);
        }
    }

    /// The agent's side failed: resets the tunnel, and returns what that means for the request.
    fn fail(&mut self, verdict: Verdict, broken: Broken) -> Failure {
        let Broken { why, status } = broken;
        let mut core = self.tunnel.core();
        let job = core.take_accepted();
        let dead = core.dead;
        let ending = core.ending.is_some();
        drop(self.stream.take());
        if dead || ending {
            drop(core);
        } else {
            self.tunnel.kill(core);
            if !why.is_empty() {
                self.tunnel.pool.violated(&self.tunnel, &why);
            }
        }
        if job.is_none()
            && let Some(status) = status
        {
            return match self.tunnel.far_end {
                FarEnd::GitlabReplica => gitlab_failure(&status),
                FarEnd::Agent | FarEnd::Replica | FarEnd::LeasingReplica => Failure::Lender(*status),
            };
        }
        match (job, verdict) {
            (Some(job), _) => Failure::NotStarted(job),
            // The replica says nothing of the agent, which may have started the request.
            (None, _) if self.tunnel.far_end == FarEnd::GitlabReplica => Failure::Unknown,
            (None, Verdict::NotStarted) => Failure::Refused,
            (None, _) => Failure::Unknown,
        }
    }

    /// The caller no longer needs the answer.
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
        if self.tunnel.is_borrowed() && !(self.tunnel.is_leased() && matches!(core.phase, Phase::Accepted(_)))
        {
            // After a complete answer the other direction closes by itself. The replica that lends an unused
            // tunnel frees it.
            drop(stream);
            if !core.end.is_answered() {
                drop(core.take_accepted());
                self.tunnel.kill(core);
            }
            return;
        }
        if let Some(job) = core.take_accepted() {
            // Nothing was written: the tunnel is free for the next request.
            core.stream = Some(stream);
            core.wake_tunnel();
            let retiring = core.retire.is_some();
            drop(core);
            drop(job);
            if !retiring && !flawed(Flaw::LeaverKeepsTunnel) {
                self.tunnel.pool.parked(&self.tunnel);
            }
            return;
        }
        match self.tunnel.info.kind {
            AgentKind::Recent if core.waiting => {
                core.end.end();
                core.ending = Some(Ending::Status(Status::new(Code::Cancelled, "the caller has gone")));
                core.wake_tunnel();
                drop(core);
                drop(stream);
            }
            AgentKind::Old if core.end.is_close_sent() => {
                core.stream = Some(stream);
                core.phase = Phase::Discarding(Instant::now());
                core.wake_tunnel();
                drop(core);
                self.tunnel.pool.abandoned(&self.tunnel);
            }
            _ => {
                drop(stream);
                self.tunnel.kill(core);
            }
        }
    }

    /// Returns the status for a failure after the answer's head has been passed on.
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

/// Returns the failure of a started request whose stream to a replica of GitLab's kas ended with `status`.
fn gitlab_failure(status: &Status) -> Failure {
    match status.code() {
        // 14.1 uses these codes for a lost tunnel, agent or connection. Our own text explains more.
        Code::Unavailable | Code::Cancelled | Code::Unknown => Failure::Unknown,
        code => Failure::Lender(Status::new(code, status.message()).with_outcome(Outcome::Unknown)),
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
                // The state machine allows one header, and control events do not get here.
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
