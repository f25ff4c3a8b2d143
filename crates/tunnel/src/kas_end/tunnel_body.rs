//! agentk's side of a tunnel: the response body of its `Connect` call, polled by the task of that stream.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use tokio::time::{Instant, Sleep};

use super::{
    CLOSE_TIME, Core, Ending, FarEnd, Job, Phase, Retire, Settled, Tunnel,
    agent_stream::{AgentStream, Broken, Got, broken, frame_of},
    caller_stream::{CallerStream, Pulled, Source},
    set_waker,
};
use crate::{
    frame::{self, COPY, Decoder, Event, GATHER, Splitter, response},
    state::{Mode, Step},
    sync::MutexGuard,
};

/// For this long after the caller has left, the answer of a 14.1 agent is read instead of resetting its
/// tunnel: after a reset that agent backs off for 10 s or more. If something arrives later, the answer must
/// end within [`LATE_TIME`], else the tunnel is reset. An agent that sends nothing is not reset: its handler
/// would only notice when it sends something, and until then the reset frees nothing.
const DISCARD_TIME: Duration = Duration::from_secs(10);
/// How long an answer may take that begins or goes on after [`DISCARD_TIME`]. A short one is complete within
/// this time, and one that goes on, such as a watch, costs no more of it.
const LATE_TIME: Duration = Duration::from_secs(1);
/// How many bytes of such an answer are read.
const DISCARD_BYTES: u64 = 1 << 20;

/// The response body of agentk's `Connect` call.
pub struct TunnelBody {
    tunnel: Arc<Tunnel>,
    out: BytesMut,
    big: Option<Bytes>,
    caller: Option<CallerStream>,
    /// The open request has the envelopes of another replica.
    spliced: bool,
    discard: Option<Box<Discard>>,
    /// Bounds the wait for `close_send` of another replica after a complete answer.
    closing: Option<Pin<Box<Sleep>>>,
    ending: Option<Ending>,
    /// What a lender still has to send when nothing more is sent there.
    rest: Option<AgentStream>,
    done: bool,
}

struct Discard {
    /// How many more bytes are read.
    left: u64,
    /// Until when the answer must end. `None`: nothing has arrived after [`DISCARD_TIME`].
    until: Option<Pin<Box<Sleep>>>,
}

enum Action {
    Continue,
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
    pub(super) fn new(tunnel: Arc<Tunnel>) -> Self {
        Self {
            tunnel,
            out: BytesMut::new(),
            big: None,
            caller: None,
            spliced: false,
            discard: None,
            closing: None,
            ending: None,
            rest: None,
            done: false,
        }
    }

    /// Reads what a lender sends after the lease has ended, so that dropping the stream resets nothing.
    ///
    /// # Cancel safety
    /// Cancel safe. Bound it by a timeout.
    pub async fn read_rest(&mut self) {
        let Some(mut rest) = self.rest.take() else { return };
        while let Ok(Got::Event(_)) = std::future::poll_fn(|cx| rest.poll(cx)).await {}
    }

    fn advance(&mut self, cx: &mut Context<'_>) -> Action {
        let tunnel = Arc::clone(&self.tunnel);
        let mut core = tunnel.core();
        core.waiting = false;
        if core.dead {
            return Action::Killed;
        }
        if core.end.is_ended() {
            return Action::End(core.ending.take().unwrap_or(Ending::Ok));
        }
        if core.end.is_parked() {
            return self.advance_parked(core, cx);
        }
        let close_sent = core.end.is_close_sent();
        if core.end.is_answered() {
            // The replica that writes the envelopes also writes `close_send`.
            if !self.spliced || close_sent || core.end.mode() == Mode::OneShot {
                return self.finish_request(core, cx);
            }
            let closing = self.closing.get_or_insert_with(|| Box::pin(tokio::time::sleep(CLOSE_TIME)));
            if closing.as_mut().poll(cx).is_ready() || self.caller.is_none() {
                tunnel.kill(core);
                return Action::Killed;
            }
        }
        if let Phase::Discarding(since) = core.phase {
            return self.discard_answer(core, since, cx);
        }
        if matches!(core.phase, Phase::Finishing) && self.caller.as_ref().is_none_or(CallerStream::is_between)
        {
            // That replica ends the answer only after the end of the request.
            self.caller = None;
            core.end.close_send();
            return Action::End(Ending::Ok);
        }
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        drop(core);
        if close_sent {
            // A borrowed tunnel ends with its request, unless it is leased.
            return if tunnel.is_borrowed() && !tunnel.is_leased() {
                Action::End(Ending::Ok)
            } else {
                Action::Wait
            };
        }
        let Some(caller) = &mut self.caller else { return Action::Wait };
        match ready_or!(caller.poll(cx), Action::Wait) {
            Pulled::Event(Event::Message { len }) if tunnel.far_end == FarEnd::GitlabReplica => {
                self.out.put_slice(&grpc::prefix(len));
                Action::Continue
            }
            Pulled::Event(Event::Message { len }) => {
                frame::put_message_head(response::MESSAGE, len, &mut self.out);
                Action::Continue
            }
            Pulled::Event(Event::Data(data)) if data.len() <= COPY => {
                self.out.put_slice(&data);
                Action::Continue
            }
            Pulled::Event(Event::Data(data)) => Action::Big(data),
            // Only envelopes have control fields.
            Pulled::Event(Event::Control { field, body }) => {
                if field == response::CLOSE_SEND {
                    let caller = self.caller.take();
                    frame::put_control(field, &body, &mut self.out);
                    let mut core = tunnel.core();
                    core.end.close_send();
                    if let Some(lease) = &mut core.lease {
                        lease.next = caller.map(|caller| caller.body);
                    }
                    return Action::Continue;
                }
                self.fault(Status::new(Code::Internal, "a replica sent an envelope out of order"))
            }
            Pulled::End => {
                self.caller = None;
                let mut core = tunnel.core();
                // Else the next poll closes the request and parks.
                if !core.end.is_answered() {
                    // Without envelopes the end of the stream has that meaning.
                    if tunnel.far_end != FarEnd::GitlabReplica {
                        frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
                    }
                    core.end.close_send();
                }
                Action::Continue
            }
            // The caller's stream is being dropped, which decides what happens here.
            Pulled::Reset => {
                self.caller = None;
                // After a complete answer only this side is left.
                if tunnel.core().end.is_answered() { Action::Continue } else { Action::Wait }
            }
            Pulled::Wrong(status) => self.fault(status),
        }
    }

    /// The caller's bytes are malformed: the caller's stream decides what happens.
    fn fault(&mut self, status: Status) -> Action {
        self.caller = None;
        let mut core = self.tunnel.core();
        core.fault = Some(status);
        if let Some(waker) = core.exchange_waker.take() {
            waker.wake();
        }
        Action::Wait
    }

    fn advance_parked(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Action {
        if let Some(Job { request_info, body, ahead }) = core.take_accepted() {
            core.phase = Phase::Open;
            core.end.open();
            self.out.put_slice(&request_info);
            self.spliced = ahead.is_some();
            let source = match ahead {
                Some(ahead) => {
                    let mut decoder = Decoder::of_kas(false);
                    decoder.push(ahead);
                    Source::Envelopes(decoder)
                }
                None => Source::Messages(Splitter::default()),
            };
            self.caller = Some(CallerStream { body, source });
            return Action::Continue;
        }
        if !matches!(core.phase, Phase::Reserved)
            && let Some(retire) = core.retire.take()
        {
            if retire == Retire::Notice && core.end.notify_drain() {
                frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
                return Action::Continue;
            }
            core.end.end();
            core.wake_exchange();
            return Action::End(Ending::Ok);
        }
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        // An exchange that was dropped unused returns the stream and wakes this task.
        let Some(stream) = &mut core.stream else { return Action::Wait };
        let what = match ready_or!(stream.poll(cx), Action::Wait) {
            Ok(got) => match core.end.agent_sent(frame_of(&got)) {
                Ok(_) => {
                    core.given_up = !core.end.is_draining();
                    core.wake_exchange();
                    return Action::End(Ending::Ok);
                }
                Err(_) => "the agent wrote to a parked tunnel".to_owned(),
            },
            Err(Broken { why, .. }) => why,
        };
        self.tunnel.kill(core);
        self.tunnel.pool.violated(&self.tunnel, &what);
        Action::Killed
    }

    /// The answer is complete: closes the request's direction between two messages, then parks.
    fn finish_request(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Action {
        if let Some(CallerStream { source: Source::Messages(mut splitter), .. }) = self.caller.take() {
            // A message that is partly written is completed only from bytes that are already here. The caller
            // might never send the rest, and agentk would not see a close inside a message.
            while splitter.left() > 0 {
                match splitter.next() {
                    Ok(Some(Event::Data(data))) => self.out.put_slice(&data),
                    _ => {
                        self.tunnel.kill(core);
                        return Action::Killed;
                    }
                }
            }
        }
        if !core.end.is_close_sent() && core.end.mode() == Mode::Reusable {
            frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
            core.end.close_send();
        }
        self.closing = None;
        if self.tunnel.is_leased() {
            return self.await_renewal(core, cx);
        }
        if self.tunnel.is_borrowed() {
            core.end.end();
            return Action::End(Ending::Ok);
        }
        let parked = core.end.park();
        core.parked_at = Instant::now();
        let retiring = core.retire.is_some();
        if !parked || retiring {
            core.lease = None;
        }
        let leased = core.lease.is_some();
        core.phase = if leased { Phase::Reserved } else { Phase::Idle };
        // A splice waits for that.
        let waker = core.exchange_waker.take();
        drop(core);
        if let Some(waker) = waker {
            waker.wake();
        }
        if !parked {
            return Action::End(Ending::Ok);
        }
        if !retiring && !leased {
            self.tunnel.pool.parked(&self.tunnel);
        }
        Action::Continue
    }

    /// The request on a leased tunnel is complete in both directions: the lender says whether another may
    /// follow.
    fn await_renewal(&mut self, mut core: MutexGuard<'_, Core>, cx: &mut Context<'_>) -> Action {
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        // The exchange returns the stream when it finds the answer complete, and wakes this task.
        let Some(stream) = &mut core.stream else { return Action::Wait };
        let got = ready_or!(stream.poll(cx), Action::Wait);
        match core.settle(got) {
            Settled::Parked => {
                let retiring = core.retire.is_some();
                drop(core);
                if !retiring {
                    self.tunnel.pool.parked(&self.tunnel);
                }
                Action::Continue
            }
            Settled::Ended => {
                core.end.end();
                Action::End(Ending::Ok)
            }
            Settled::Broken => {
                self.tunnel.kill(core);
                Action::Killed
            }
        }
    }

    /// The caller left at `since`: reads the rest of the answer.
    fn discard_answer(
        &mut self,
        mut core: MutexGuard<'_, Core>,
        since: Instant,
        cx: &mut Context<'_>,
    ) -> Action {
        self.caller = None;
        let discard =
            self.discard.get_or_insert_with(|| Box::new(Discard { left: DISCARD_BYTES, until: None }));
        set_waker(&mut core.tunnel_waker, cx);
        core.waiting = true;
        let Some(stream) = &mut core.stream else { return Action::Wait };
        let polled = stream.poll(cx);
        if polled.is_ready() && discard.until.is_none() && since.elapsed() >= DISCARD_TIME {
            discard.until = Some(Box::pin(tokio::time::sleep(LATE_TIME)));
        }
        let expired = discard.until.as_mut().is_some_and(|until| until.as_mut().poll(cx).is_ready());
        let got = match polled {
            Poll::Pending if expired => Err(broken("an abandoned answer did not end in time")),
            Poll::Pending => return Action::Wait,
            Poll::Ready(got) => got,
        };
        let step = got.ok().and_then(|got| {
            if let Got::Event(Event::Data(data)) = &got {
                discard.left = discard.left.checked_sub(data.len() as u64)?;
                return Some(Step::Pass);
            }
            core.end.agent_sent(frame_of(&got)).ok()
        });
        match step {
            Some(Step::Complete) => {
                core.end.end();
                Action::End(Ending::Ok)
            }
            Some(_) if !expired => Action::Continue,
            Some(_) | None => {
                self.tunnel.kill(core);
                Action::Killed
            }
        }
    }

    /// Returns the last frame. `None`: the stream ends without one.
    fn last(&mut self, ending: &Ending) -> Option<HttpFrame<Bytes>> {
        self.done = true;
        if self.tunnel.is_borrowed() {
            if self.tunnel.is_leased() {
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
            let action = if this.out.len() >= GATHER { Action::Wait } else { this.advance(cx) };
            match action {
                Action::Continue => continue,
                Action::Big(big) if this.out.is_empty() => {
                    return Poll::Ready(Some(Ok(HttpFrame::data(big))));
                }
                Action::Big(big) => this.big = Some(big),
                Action::End(ending) if this.out.is_empty() => return Poll::Ready(this.last(&ending).map(Ok)),
                Action::End(ending) => this.ending = Some(ending),
                Action::Wait | Action::Killed if this.out.is_empty() => return Poll::Pending,
                Action::Wait | Action::Killed => {}
            }
            // HTTP/2 polls again immediately, or once there is window: no wake-up is needed now.
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
        let idle = self.tunnel.is_leased() && (core.end.is_parked() || core.end.is_ended());
        if self.tunnel.is_borrowed() && !idle && !core.dead && !matches!(core.phase, Phase::Accepted(_)) {
            core.write_closed = true;
            // The request has begun, and the answer's direction decides how it ends. The replica that lends
            // the tunnel may stop reading after a complete answer, before the request has been written
            // completely.
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
        self.tunnel.pool.ended(&self.tunnel, wasted);
    }
}
