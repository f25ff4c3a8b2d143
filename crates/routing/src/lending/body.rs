//! The response to a borrow request.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use grpc::{BoxError, Code, Outcome, Status};
use http::HeaderMap;
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep};
use traces::Span;
use tunnel::{
    features::Features,
    frame,
    kas_end::{AgentKind, Info, Job, Lender, Splice, Tunnel},
};

use super::{
    BorrowRequest, Next, RequestStream, TunnelSource, UNUSED, reserved::ReservedTunnel, spans::Spans,
};
use crate::{
    long::LongRequest,
    metrics::RequestMetrics,
    registry::{Acquired, Borrower, Gone, Grant, TunnelLease},
    sync::Mutex,
};

/// How long one stream may renew its lease. The credential is checked only when the stream begins, and a link
/// that has reached its maximum age must come to an end.
const LONGEST_LEASE: Duration = Duration::from_secs(60);
/// Why a request was not started.
const ENDED: &str = "the lent tunnel has ended";

/// The response to a borrow request: the agent's response to the request that the borrower sends, and after
/// it the end of the stream. If the tunnel stays leased, the response to the next request follows instead.
pub struct LendBody<S> {
    source: Arc<dyn TunnelSource>,
    request: BorrowRequest,
    promised: Promised,
    state: State<S>,
    /// Until when the request must begin, or find another tunnel.
    until: Pin<Box<Sleep>>,
    /// `None`: the tunnel is lent for one request.
    renewal: Option<Arc<Renewal>>,
    metrics: Arc<RequestMetrics>,
    spans: Option<Spans>,
}

#[expect(clippy::large_enum_variant, reason = "one per stream, and its body is boxed as a whole")]
enum State<S> {
    Lent(Lent<S>),
    Open(Open),
    Rerouting(Rerouting),
    Over,
}

/// A tunnel that is lent and carries no request.
struct Lent<S> {
    tunnel: LentTunnel,
    requests: S,
    /// The borrower has been asked to return it.
    revoked: bool,
}

enum LentTunnel {
    /// For the first request.
    Reserved(ReservedTunnel),
    /// For a further request.
    Leased(TunnelLease),
}

impl LentTunnel {
    fn tunnel(&self) -> &Arc<Tunnel> {
        match self {
            Self::Reserved(reserved) => reserved.tunnel(),
            Self::Leased(lease) => lease.tunnel(),
        }
    }

    fn take(self) -> Arc<Tunnel> {
        match self {
            Self::Reserved(reserved) => reserved.take(),
            Self::Leased(lease) => lease.take(),
        }
    }

    fn poll_revoked(&self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Self::Reserved(_) => Poll::Pending,
            Self::Leased(lease) => lease.poll_revoked(cx),
        }
    }
}

/// A request whose tunnel ended before anything of the request was written to the agent. It waits for
/// another tunnel.
struct Rerouting {
    job: Job,
    granted: Pin<Box<dyn Future<Output = Result<Grant, Gone>> + Send>>,
}

/// What the borrower knows of the agentk, for which it writes its requests. Another tunnel serves them if
/// this is true for it too.
struct Promised {
    kind: AgentKind,
    /// What the agentk is known to support.
    features: Features,
}

impl Promised {
    fn of(info: &Info) -> Self {
        Self { kind: info.kind, features: info.features }
    }

    fn fits(&self, grant: &Grant) -> bool {
        let info = grant.tunnel().info();
        info.kind == self.kind && info.features.contains(self.features)
    }
}

/// Decides after each request whether the borrower keeps the tunnel.
struct Renewal {
    source: Arc<dyn TunnelSource>,
    borrower: Borrower,
    since: Instant,
    /// The new lease, until [`LendBody`] takes it.
    lease: Mutex<Option<TunnelLease>>,
}

impl Renewal {
    fn new(source: Arc<dyn TunnelSource>, borrower: Borrower) -> Arc<Self> {
        Arc::new(Self { source, borrower, since: Instant::now(), lease: Mutex::default() })
    }
}

impl Lender for Renewal {
    fn renews(&self, tunnel: &Arc<Tunnel>) -> bool {
        if self.since.elapsed() >= LONGEST_LEASE {
            return false;
        }
        let lease = Arc::clone(&self.source).renew_lease(tunnel, &self.borrower);
        let renewed = lease.is_some();
        *self.lease.lock() = lease;
        renewed
    }
}

/// A request of another replica that runs through a tunnel of this one.
struct Open {
    splice: Splice,
    metrics: Arc<RequestMetrics>,
    /// Taken when the end of the request is known.
    span: Option<Span>,
    _long: Option<LongRequest>,
}

impl Open {
    /// Looks for the status of the request in what the stream returns.
    fn observe(&mut self, frame: &Result<Frame<Bytes>, BoxError>) {
        let code = match frame {
            Err(_) => Code::Unknown,
            Ok(frame) => match frame.trailers_ref().and_then(Status::from_headers) {
                Some(status) => status.code(),
                None => return,
            },
        };
        self.end(code);
    }

    fn end(&mut self, code: Code) {
        if let Some(mut span) = self.span.take() {
            span.set("rpc.grpc.status_code", i64::from(code.number()));
            if code != Code::Ok {
                span.failed(code.name());
            }
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
        self.metrics.requests_open.dec();
    }
}

impl<S> std::fmt::Debug for LendBody<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LendBody").field("request", &self.request).finish_non_exhaustive()
    }
}

impl<S: RequestStream> LendBody<S> {
    pub(super) fn new(
        source: Arc<dyn TunnelSource>,
        request: BorrowRequest,
        grant: Grant,
        requests: S,
        leases: bool,
        metrics: Arc<RequestMetrics>,
        spans: Option<Spans>,
    ) -> Self {
        let promised = Promised::of(grant.tunnel().info());
        // The request is written for this agentk. Another tunnel must meet the same.
        let request = BorrowRequest { needs: request.needs | promised.features, ..request };
        let tunnel = LentTunnel::Reserved(ReservedTunnel::new(grant));
        let renewal = leases.then(|| Renewal::new(Arc::clone(&source), request.borrower.clone()));
        Self {
            source,
            request,
            promised,
            state: State::Lent(Lent { tunnel, requests, revoked: false }),
            until: Box::pin(tokio::time::sleep(UNUSED)),
            renewal,
            metrics,
            spans,
        }
    }

    /// Takes another idle tunnel, or a place in the queue.
    fn acquire(&self) -> Option<Acquired> {
        let acquired = Arc::clone(&self.source).borrow_or_wait(&self.request).ok();
        acquired.filter(|acquired| match acquired {
            Acquired::Now(grant) => self.promised.fits(grant),
            Acquired::Wait(_) => true,
        })
    }

    /// Takes another tunnel if one is idle.
    fn take_idle(&self) -> Option<Grant> {
        Arc::clone(&self.source).borrow_idle(&self.request).filter(|grant| self.promised.fits(grant))
    }

    fn not_started(&mut self, code: Code, why: &str) -> Frame<Bytes> {
        self.state = State::Over;
        let mut trailers = HeaderMap::with_capacity(3);
        Status::new(code, format!("{why}: no request of agent {} was started", self.request.agent))
            .with_outcome(Outcome::NotStarted)
            .write_to(&mut trailers);
        Frame::trailers(trailers)
    }

    /// Waits for the next request, and begins it.
    fn poll_lent(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let State::Lent(lent) = &mut self.state else { return Poll::Ready(None) };
        if let Poll::Ready(next) = lent.requests.poll_request(cx) {
            return Poll::Ready(self.take(next));
        }
        let mut revoked = false;
        if lent.tunnel.tunnel().poll_over(cx).is_ready() {
            match &lent.tunnel {
                // A request is on its way, and any other tunnel will do. If none is idle, the borrower goes
                // elsewhere, unless it has begun the request.
                LentTunnel::Reserved(_) => match self.take_idle() {
                    Some(grant) => {
                        if let State::Lent(lent) = &mut self.state {
                            lent.tunnel = LentTunnel::Reserved(ReservedTunnel::new(grant));
                        }
                        self.metrics.borrows_moved.inc();
                        return self.poll_lent(cx);
                    }
                    None => return Poll::Ready(Some(self.not_started(Code::Unavailable, ENDED))),
                },
                // Revoked as any other lease: a request that crosses this goes to another tunnel.
                LentTunnel::Leased(_) if self.source.may_lend(self.request.agent) => revoked = true,
                LentTunnel::Leased(_) => {
                    return Poll::Ready(Some(self.not_started(Code::Unavailable, ENDED)));
                }
            }
        }
        let State::Lent(lent) = &mut self.state else { return Poll::Ready(None) };
        if !lent.revoked && (revoked || lent.tunnel.poll_revoked(cx).is_ready()) {
            lent.revoked = true;
            // If it crosses a request, that request is served.
            let mut revoke = BytesMut::new();
            frame::put_control(frame::request::TRAILER, &[], &mut revoke);
            return Poll::Ready(Some(Frame::data(revoke.freeze())));
        }
        ready!(self.until.as_mut().poll(cx));
        let why = "the lent tunnel was not used for 2 s";
        Poll::Ready(Some(self.not_started(Code::Unavailable, why)))
    }

    /// Takes what the borrower sent while it had a tunnel.
    fn take(&mut self, next: Next) -> Option<Frame<Bytes>> {
        match next {
            Next::Request(job) => {
                let State::Lent(lent) = std::mem::replace(&mut self.state, State::Over) else { return None };
                match self.start(&lent.tunnel.take(), job) {
                    Ok(()) => None,
                    Err(job) => self.reroute(job),
                }
            }
            Next::HalfClose
                if matches!(&self.state, State::Lent(Lent { tunnel: LentTunnel::Leased(_), .. })) =>
            {
                self.state = State::Over;
                let mut trailers = HeaderMap::with_capacity(1);
                Status::write_ok(&mut trailers);
                Some(Frame::trailers(trailers))
            }
            Next::HalfClose | Next::Broken => {
                Some(self.not_started(Code::Unavailable, "the borrow request was cancelled"))
            }
            Next::Malformed(why) => Some(self.not_started(Code::Internal, why)),
        }
    }

    /// Gives a tunnel the request. `Err`: the tunnel accepts no request any more.
    fn start(&mut self, tunnel: &Arc<Tunnel>, job: Job) -> Result<(), Job> {
        let lender = self.renewal.clone().map(|renewal| renewal as Arc<dyn Lender>);
        // A request that is given to several tunnels has a span for each.
        let span = self.spans.as_ref().map(|spans| spans.begin(self.request.agent, job.request_info()));
        let long = self.request.is_long.then(|| LongRequest::begin(tunnel, &self.metrics));
        let splice = tunnel.begin_spliced(job, lender)?;
        self.metrics.requests_open.inc();
        let metrics = Arc::clone(&self.metrics);
        self.state = State::Open(Open { splice, metrics, span, _long: long });
        Ok(())
    }

    /// The tunnel ended before anything of the request was written: another tunnel of this replica may serve
    /// it. The borrower cannot send the request elsewhere, since it does not keep what it has written.
    fn reroute(&mut self, mut job: Job) -> Option<Frame<Bytes>> {
        loop {
            match self.acquire() {
                Some(Acquired::Now(grant)) => match self.start(&grant.take(), job) {
                    Ok(()) => {
                        self.metrics.borrows_moved.inc();
                        return None;
                    }
                    // That tunnel had ended as well, and is no longer idle.
                    Err(back) => job = back,
                },
                Some(Acquired::Wait(mut waiting)) => {
                    self.until.as_mut().reset(Instant::now() + UNUSED);
                    let granted = Box::pin(async move { waiting.granted().await });
                    self.state = State::Rerouting(Rerouting { job, granted });
                    return None;
                }
                None => return Some(self.not_started(Code::Unavailable, ENDED)),
            }
        }
    }

    /// Waits for another tunnel for the request.
    fn poll_rerouting(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let State::Rerouting(rerouting) = &mut self.state else { return Poll::Ready(None) };
        let Poll::Ready(granted) = rerouting.granted.as_mut().poll(cx) else {
            ready!(self.until.as_mut().poll(cx));
            let why = "the lent tunnel has ended, and no other was idle for 2 s";
            return Poll::Ready(Some(self.not_started(Code::Unavailable, why)));
        };
        let State::Rerouting(Rerouting { job, .. }) = std::mem::replace(&mut self.state, State::Over) else {
            return Poll::Ready(None);
        };
        Poll::Ready(match granted.ok().filter(|grant| self.promised.fits(grant)) {
            Some(grant) => match self.start(&grant.take(), job) {
                Ok(()) => {
                    self.metrics.borrows_moved.inc();
                    None
                }
                Err(job) => self.reroute(job),
            },
            None => Some(self.not_started(Code::Unavailable, ENDED)),
        })
    }

    /// The splice ended without trailers: its request was not started, or is over and the tunnel stays
    /// leased.
    fn go_on(&mut self) -> Option<Frame<Bytes>> {
        let State::Open(open) = &mut self.state else { return None };
        if let Some(job) = open.splice.unstarted() {
            open.end(Code::Unavailable);
            self.state = State::Over;
            return self.reroute(job);
        }
        self.lend_again();
        None
    }

    /// The request is over, and the tunnel stays leased for the next one.
    fn lend_again(&mut self) {
        let State::Open(mut open) = std::mem::replace(&mut self.state, State::Over) else { return };
        open.end(Code::Ok);
        let lease = self.renewal.as_ref().and_then(|renewal| renewal.lease.lock().take());
        if let (Some(lease), Some(body)) = (lease, open.splice.next_request()) {
            self.until.as_mut().reset(Instant::now() + UNUSED);
            let tunnel = LentTunnel::Leased(lease);
            self.state = State::Lent(Lent { tunnel, requests: S::new(body), revoked: false });
        }
    }
}

impl<S: RequestStream> Body for LendBody<S> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.state {
                State::Lent(_) => {
                    if let Some(frame) = ready!(self.poll_lent(cx)) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                State::Open(open) => {
                    let frame = ready!(Pin::new(&mut open.splice).poll_frame(cx));
                    match frame {
                        Some(frame) => {
                            open.observe(&frame);
                            return Poll::Ready(Some(frame));
                        }
                        None => {
                            if let Some(frame) = self.go_on() {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                        }
                    }
                }
                State::Rerouting(_) => {
                    if let Some(frame) = ready!(self.poll_rerouting(cx)) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                State::Over => return Poll::Ready(None),
            }
        }
    }
}
