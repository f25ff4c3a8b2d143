//! agentk's side: the response body of its `Connect` call, polled by the task of that stream.

use std::{
    fmt,
    pin::Pin,
    sync::{Arc, MutexGuard},
    task::{Context, Poll},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use tokio::time::{Instant, Sleep};

use super::{
    CLOSE_TIME, COPY, Core, Ending, GATHER, Retire, Settled, Tunnel,
    agent_stream::{AgentStream, Broken, Got, broken, kind},
    caller_stream::{CallerStream, Pulled, Source},
    set_waker,
};
use crate::{
    frame::{self, Decoder, Event, Splitter, response},
    state::{Mode, Step},
};

/// How long and how much of an abandoned answer of a 14.1 agent is read so that its tunnel need
/// not be reset: a reset costs that agent 10 s and more of back-off.
const DISCARD_TIME: Duration = Duration::from_secs(10);
const DISCARD_BYTES: u64 = 1 << 20;

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
    pub(super) fn new(tunnel: Arc<Tunnel>) -> Self {
        Self {
            tunnel,
            out: BytesMut::new(),
            big: None,
            caller: None,
            discard: None,
            closing: None,
            ending: None,
            rest: None,
            done: false,
        }
    }

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
        if core.finishing && self.caller.as_ref().is_none_or(CallerStream::is_between) {
            // It holds the answer's end back until it has the request's.
            self.caller = None;
            core.end.close_send();
            return Turn::End(Ending::Ok);
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
            Pulled::Event(Event::Message { len }) if tunnel.plain => {
                self.out.put_slice(&grpc::prefix(len));
                Turn::Again
            }
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
                    // The end of the stream says the same where there are no envelopes.
                    if !tunnel.plain {
                        frame::put_control(response::CLOSE_SEND, &[], &mut self.out);
                    }
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
