//! The lender's end of a request of another replica: envelopes pass as they are.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{BufMut as _, Bytes};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http::HeaderMap;
use http_body::{Body, Frame as HttpFrame};
use tokio::time::Sleep;

use super::{
    CLOSE_TIME, COPY, Exchange, Failure, GATHER, Job, Tunnel, agent_stream::Got, exchange::Came, set_waker,
};
use crate::{
    frame::{self, Event, request},
    state::Step,
};

/// Who lends tunnels to another replica.
pub trait Lender: Send + Sync + 'static {
    /// A request of the other replica is over on both sides and `tunnel` is parked. Returns whether it stays lent, and
    /// so is not offered to its owner. Called without any lock of the tunnel.
    fn stays(&self, tunnel: &Arc<Tunnel>) -> bool;
}

impl Tunnel {
    /// Gives the tunnel a request whose envelopes another replica writes: `ahead` and then the body of `job` hold
    /// `message`s and `close_send`, and so does what [`Splice`] returns. `lender`: the other replica knows how to
    /// send another request on the same stream, if the lender lets it.
    ///
    /// # Errors
    /// The request, when the tunnel is no longer free.
    pub fn begin_spliced(
        self: &Arc<Self>,
        job: Job,
        ahead: Bytes,
        lender: Option<Arc<dyn Lender>>,
    ) -> Result<Splice, Job> {
        let exchange = self.open_as(job, Deadline::NONE, Some((ahead, lender.is_some())))?;
        Ok(Splice { exchange, finished: false, lender, kept: false, unstarted: None, until: None })
    }

    /// The request `round` has no splice any more that would ask whether the tunnel stays lent.
    fn do_not_keep(self: &Arc<Self>, round: u64) {
        let mut core = self.core();
        if core.round != round {
            return;
        }
        core.keep = false;
        core.asker = None;
        if !std::mem::take(&mut core.lent) {
            return;
        }
        let retiring = core.retire.is_some();
        if retiring {
            core.wake_tunnel();
        }
        drop(core);
        if !retiring {
            self.owner.parked(self);
        }
    }
}

/// A request in a tunnel, as the stream of another replica holds it: what agentk answers, in its own envelopes.
///
/// As a body it ends with OK only after a complete answer, and when the tunnel has been let go; or it ends without
/// trailers, when the tunnel stays lent ([`asker`](Self::asker)), or when it ended before the request was written
/// ([`unstarted`](Self::unstarted)). Dropping it before cancels the request, or gives the
/// tunnel back unused when nothing has been written.
pub struct Splice {
    exchange: Exchange,
    /// The answer is complete.
    finished: bool,
    /// Until it has been asked.
    lender: Option<Arc<dyn Lender>>,
    /// The tunnel stays lent.
    kept: bool,
    /// The request, when the tunnel ended before anything of it was written.
    unstarted: Option<(Job, Bytes)>,
    /// Until when the tunnel may take to be let go then, if it is not at once.
    until: Option<Pin<Box<Sleep>>>,
}

impl fmt::Debug for Splice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Splice").field("exchange", &self.exchange).finish_non_exhaustive()
    }
}

impl Splice {
    /// Returns the tunnel.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        &self.exchange.tunnel
    }

    /// Takes the request after this has ended without trailers, if nothing of it was written: another tunnel may serve
    /// it, with what had been read after `request_info`.
    pub fn unstarted(&mut self) -> Option<(Job, Bytes)> {
        self.unstarted.take()
    }

    /// Writes what came as it was.
    fn pass(&mut self, came: Came) {
        let exchange = &mut self.exchange;
        let (got, step) = match came {
            Came::Data(data) if data.len() <= COPY => {
                exchange.out.put_slice(&data);
                return;
            }
            Came::Data(data) => {
                exchange.big = Some(data);
                return;
            }
            Came::Got(got, step) => (got, step),
        };
        match got {
            Got::Event(Event::Message { len }) => {
                frame::put_message_head(request::MESSAGE, len, &mut exchange.out);
            }
            // A withdrawal that crossed the request concerns this replica alone.
            Got::Event(Event::Control { field, body }) if step != Step::Ignore => {
                frame::put_control(field, &body, &mut exchange.out);
            }
            Got::Event(_) | Got::HalfClose => {}
        }
        if step == Step::Complete {
            exchange.complete();
            self.finished = true;
        }
    }

    /// Waits until the tunnel has been let go: parked again, ended, or reset.
    fn poll_let_go(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut core = self.exchange.tunnel.core();
        let open = core.round == self.exchange.round && !core.end.is_parked();
        if !open || core.end.is_ended() || core.dead {
            return Poll::Ready(());
        }
        set_waker(&mut core.exchange_waker, cx);
        drop(core);
        // The tunnel's own stream resets it at that time.
        self.until.get_or_insert_with(|| Box::pin(tokio::time::sleep(CLOSE_TIME))).as_mut().poll(cx)
    }

    /// Where the next request comes from, when the tunnel stays lent after this one has ended without trailers.
    pub fn asker(&self) -> Option<grpc::Body> {
        if !self.kept {
            return None;
        }
        self.exchange.tunnel.core().asker.take()
    }

    /// The request is over and the tunnel let go: asks whether it stays lent, and tells the other replica.
    fn ask(&mut self) {
        let Some(lender) = self.lender.take() else { return };
        let tunnel = &self.exchange.tunnel;
        let core = tunnel.core();
        let lent = core.round == self.exchange.round && core.lent && core.asker.is_some();
        drop(core);
        if lent && lender.stays(tunnel) {
            self.kept = true;
            frame::put_control(request::DESCRIPTOR, &[], &mut self.exchange.out);
        } else {
            tunnel.do_not_keep(self.exchange.round);
        }
    }

    /// Returns how the stream ends after `failure`.
    fn status(&self, failure: &Failure) -> Status {
        let agent = self.exchange.tunnel.info.agent;
        match failure {
            // The first bytes were read from the other replica: it may not try again.
            Failure::NotStarted(_) | Failure::Refused => Status::new(
                Code::Unavailable,
                format!("agent {agent} closed its tunnel before it started the request: repeat it"),
            )
            .with_outcome(Outcome::NotStarted),
            failure => self.exchange.late_status(failure),
        }
    }

    fn end(&mut self, status: Option<&Status>) -> HttpFrame<Bytes> {
        self.exchange.done = true;
        let mut trailers = HeaderMap::with_capacity(3);
        match status {
            None => Status::write_ok(&mut trailers),
            Some(status) => status.write_to(&mut trailers),
        }
        HttpFrame::trailers(trailers)
    }
}

impl Body for Splice {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<HttpFrame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.exchange.done {
            return Poll::Ready(None);
        }
        let mut failed = None;
        if this.exchange.big.is_none() {
            while !this.finished && this.exchange.out.len() < GATHER {
                match this.exchange.poll_came(cx) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(came)) => {
                        this.pass(came);
                        if this.exchange.big.is_some() {
                            break;
                        }
                    }
                    Poll::Ready(Err(Failure::NotStarted(job))) => {
                        let ahead = std::mem::take(&mut this.exchange.tunnel.core().ahead);
                        this.unstarted = Some((job, ahead));
                        this.exchange.done = true;
                        return Poll::Ready(None);
                    }
                    Poll::Ready(Err(failure)) => {
                        failed = Some(this.status(&failure));
                        break;
                    }
                }
            }
            if this.finished && this.lender.is_some() && this.poll_let_go(cx).is_ready() {
                this.ask();
            }
        }
        if !this.exchange.out.is_empty() {
            this.exchange.ended = failed.map(|status| {
                let mut trailers = HeaderMap::with_capacity(3);
                status.write_to(&mut trailers);
                trailers
            });
            return Poll::Ready(Some(Ok(HttpFrame::data(this.exchange.out.split().freeze()))));
        }
        if let Some(big) = this.exchange.big.take() {
            return Poll::Ready(Some(Ok(HttpFrame::data(big))));
        }
        if let Some(trailers) = this.exchange.ended.take() {
            this.exchange.done = true;
            return Poll::Ready(Some(Ok(HttpFrame::trailers(trailers))));
        }
        if let Some(status) = failed {
            return Poll::Ready(Some(Ok(this.end(Some(&status)))));
        }
        if !this.finished {
            return Poll::Pending;
        }
        if this.kept {
            this.exchange.done = true;
            return Poll::Ready(None);
        }
        ready!(this.poll_let_go(cx));
        Poll::Ready(Some(Ok(this.end(None))))
    }
}

impl Drop for Splice {
    fn drop(&mut self) {
        if self.lender.is_some() {
            self.exchange.tunnel.do_not_keep(self.exchange.round);
        }
    }
}
