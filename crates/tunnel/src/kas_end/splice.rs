//! A request of another replica, at the replica that holds the tunnel: envelopes pass unchanged.

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
    CLOSE_TIME, Exchange, Failure, Job, Lease, Phase, Tunnel, agent_stream::Got, exchange::Came, set_waker,
};
use crate::{
    frame::{self, COPY, Event, GATHER, request},
    state::Step,
};

/// Leases tunnels to another replica.
pub trait Lender: Send + Sync + 'static {
    /// A request of the other replica is complete in both directions, and `tunnel` is parked. Returns whether
    /// the lease is renewed, so that the tunnel is not free. Called without any lock of the tunnel.
    fn renews(&self, tunnel: &Arc<Tunnel>) -> bool;
}

impl Tunnel {
    /// Gives the tunnel a request whose envelopes another replica writes, see [`Job::spliced`]. They are
    /// `message`s and `close_send`, and so is what [`Splice`] returns. `lender`: the other replica can send
    /// further requests on the same stream if the lender renews the lease.
    ///
    /// # Errors
    /// The request, if the tunnel is no longer free.
    pub fn begin_spliced(self: &Arc<Self>, job: Job, lender: Option<Arc<dyn Lender>>) -> Result<Splice, Job> {
        let exchange = self.open(job, Deadline::NONE, lender.is_some().then(Lease::default))?;
        Ok(Splice { exchange, finished: false, lender, renewed: false, unstarted: None, until: None })
    }
}

/// A request in a tunnel, on the stream of another replica: the envelopes of agentk's answer.
///
/// As a body it ends with OK after a complete answer, once the tunnel is free or over. It ends without
/// trailers if the lease is renewed, see [`next_request`](Self::next_request), or if the tunnel ended before
/// the request was written, see [`unstarted`](Self::unstarted). Dropping it before cancels the request. If
/// nothing of the request has been written, the tunnel is free again.
pub struct Splice {
    exchange: Exchange,
    /// The answer is complete.
    finished: bool,
    /// Taken when it is asked.
    lender: Option<Arc<dyn Lender>>,
    /// The lease is renewed.
    renewed: bool,
    /// The request, if the tunnel ended before anything of it was written.
    unstarted: Option<Job>,
    /// Bounds the wait for the tunnel after the answer.
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

    /// After an end without trailers, takes the request if nothing of it was written. Another tunnel may
    /// serve it.
    pub fn unstarted(&mut self) -> Option<Job> {
        self.unstarted.take()
    }

    /// Passes an envelope on unchanged.
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
            // A withdrawal that crossed the request concerns only this replica.
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

    /// Waits until the tunnel is parked again, has ended, or was reset.
    fn poll_released(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut core = self.exchange.tunnel.core();
        let open = core.round == self.exchange.round && !core.end.is_parked();
        if !open || core.end.is_ended() || core.dead {
            return Poll::Ready(());
        }
        set_waker(&mut core.exchange_waker, cx);
        drop(core);
        // The tunnel's own task resets it after this time.
        self.until.get_or_insert_with(|| Box::pin(tokio::time::sleep(CLOSE_TIME))).as_mut().poll(cx)
    }

    /// After an end without trailers, takes the body with the next request if the lease is renewed.
    pub fn next_request(&self) -> Option<grpc::Body> {
        if !self.renewed {
            return None;
        }
        self.exchange.tunnel.core().lease.take().and_then(|lease| lease.next)
    }

    /// The request is over and the tunnel is released: asks whether the lease is renewed, and informs the
    /// other replica.
    fn renew(&mut self) {
        let Some(lender) = self.lender.take() else { return };
        let tunnel = &self.exchange.tunnel;
        let core = tunnel.core();
        let reserved = core.round == self.exchange.round
            && matches!(core.phase, Phase::Reserved)
            && core.lease.as_ref().is_some_and(|lease| lease.next.is_some());
        drop(core);
        if reserved && lender.renews(tunnel) {
            self.renewed = true;
            frame::put_control(request::DESCRIPTOR, &[], &mut self.exchange.out);
        } else {
            tunnel.end_lease(self.exchange.round);
        }
    }

    /// Returns how the stream ends after `failure`.
    fn status(&self, failure: &Failure) -> Status {
        let agent = self.exchange.tunnel.info.agent;
        match failure {
            // The other replica cannot retry, since it does not keep the bytes that it has sent.
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
                        this.unstarted = Some(job);
                        this.exchange.done = true;
                        return Poll::Ready(None);
                    }
                    Poll::Ready(Err(failure)) => {
                        failed = Some(this.status(&failure));
                        break;
                    }
                }
            }
            if this.finished && this.lender.is_some() && this.poll_released(cx).is_ready() {
                this.renew();
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
        if this.renewed {
            this.exchange.done = true;
            return Poll::Ready(None);
        }
        ready!(this.poll_released(cx));
        Poll::Ready(Some(Ok(this.end(None))))
    }
}

impl Drop for Splice {
    fn drop(&mut self) {
        if self.lender.is_some() {
            self.exchange.tunnel.end_lease(self.exchange.round);
        }
    }
}
