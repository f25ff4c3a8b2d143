//! The life of one connection, whatever version of HTTP it speaks: admission, deadlines, age and drain.

use std::{
    future::{pending, poll_fn},
    net::SocketAddr,
    ops::ControlFlow,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use process::lifecycle::{Lifecycle, Phase};
use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior},
};

use super::{
    driver::Driver,
    http1::Http1,
    http2::Http2,
    observed::Observed,
    refusal::Refusal,
    requests::Requests,
    service::{AuthState, Connection, GoAway, Service},
    settings::{Age, Limits, Settings},
    slot::StreamSlot,
    version::Version,
};
use crate::{
    admission::{half_open::Place, scheduler::Permit},
    flaw::{Flaw, flawed},
    io::Stream,
};

/// After the last phase, time for the last bytes to be written.
const FLUSH: Duration = Duration::from_millis(500);

/// What a connection is served by.
pub(super) struct Serve {
    pub(super) peer: Option<SocketAddr>,
    pub(super) settings: Settings,
    pub(super) limits: Limits,
    pub(super) age: Option<Age>,
    pub(super) service: Arc<dyn Service>,
    pub(super) lifecycle: Lifecycle,
    /// When what is served began: the connection, or HTTP inside of what had to be opened first.
    pub(super) since: Instant,
}

impl Serve {
    /// Serves one connection to its end. It keeps its place among the half-open ones until it is
    /// authenticated.
    pub(super) async fn connection(self, version: Version, stream: Stream, place: Place, mut permit: Permit) {
        let asked = Instant::now();
        // What is made here for one connection is little; for a thousand at once it is not.
        tokio::select! {
            biased;
            () = permit.begin() => {}
            () = place.lost() => return,
            () = self.lifecycle.reached(Phase::Stopped) => return,
        }
        // The time it had to wait for admission does not count.
        let born = self.since + asked.elapsed();
        let service = Arc::clone(&self.service);
        let connection = match stream.peer_certificates() {
            Some(certificates) => service.connected_with(self.peer, certificates),
            None => service.connected(self.peer),
        };
        let observed = Arc::<Observed>::default();
        if connection.auth_state() == AuthState::Anonymous {
            observed.admit();
        }
        let slot = StreamSlot::new(Arc::clone(&observed));
        let judged = Arc::<Notify>::default();
        let requests = Requests {
            connection: Arc::clone(&connection),
            judged: Arc::clone(&judged),
            observed: Arc::clone(&observed),
            slot: slot.clone(),
        };
        // Within a tenth of the mean, from the connection's own address: no clock, no lock.
        let age = self.age.filter(|_| !flawed(Flaw::NeverOld));
        let age_at = age.map(|age| born + age.age.mul_f64(0.9 + 0.2 * fraction(self.peer)));
        let state = Loop {
            serve: &self,
            connection: &*connection,
            observed: &observed,
            slot: &slot,
            place: Some(place),
            permit,
            born,
            age_at,
            cut_at: None,
            idle: None,
            leaving: false,
        };
        match version {
            Version::Http2 => {
                let mut driver = Http2::new(stream, &self.settings, &self.limits, requests);
                state.run(&mut driver, &judged).await;
            }
            Version::Http1 => {
                let mut driver = Http1::new(stream, &self.settings, &self.limits, requests);
                state.run(&mut driver, &judged).await;
            }
        }
    }
}

/// The state of one connection's loop.
struct Loop<'a> {
    serve: &'a Serve,
    connection: &'a dyn Connection,
    observed: &'a Observed,
    slot: &'a StreamSlot,
    /// Until the connection is authenticated.
    place: Option<Place>,
    permit: Permit,
    born: Instant,
    /// When the connection is asked to end because of its age.
    age_at: Option<Instant>,
    /// When it ends although it has open requests.
    cut_at: Option<Instant>,
    /// How many streams there ever were when the connection was first seen idle, and when that was.
    idle: Option<(u64, Instant)>,
    /// The peer was asked to end the connection.
    leaving: bool,
}

impl Loop<'_> {
    async fn run<D: Driver>(mut self, driver: &mut D, judged: &Notify) {
        let Serve { limits, lifecycle, .. } = self.serve;
        let mut phase = lifecycle.watch();
        // A connection that came while the process leaves is served, until no other can come.
        let mut told = *phase.borrow_and_update() >= Phase::Leaving;
        if lifecycle.phase() >= Phase::Closing {
            self.leave(driver, GoAway::Leaving);
        }
        // Counted from admission: what came before is still to be read, also after a pause of this process.
        // Moved on once the first frame has come.
        let mut deadline = pin!(tokio::time::sleep(limits.first_frame.min(limits.authentication)));
        let mut has_deadline = true;
        let age = self.serve.age.map_or(limits.idle, |age| age.age.min(limits.idle));
        let period = (age.min(limits.headers) / 8).clamp(Duration::from_millis(50), Duration::from_secs(5));
        let mut ticks = tokio::time::interval_at(self.born + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A connection that came just before the end has missed the change.
        let mut stopped = lifecycle.phase() == Phase::Stopped;
        while !stopped {
            let next = tokio::select! {
                ended = poll_fn(|cx| step(self.observed, &mut self.permit, driver, cx)) => {
                    if let Err(error) = ended {
                        self.failed(&error);
                    }
                    ControlFlow::Break(())
                }
                () = judged.notified() => self.judge(),
                () = lost(self.place.as_ref()) => self.lost(),
                () = deadline.as_mut(), if has_deadline && self.place.is_some() => match self.late() {
                    ControlFlow::Break(()) => ControlFlow::Break(()),
                    ControlFlow::Continue(Some(next)) => {
                        deadline.as_mut().reset(next);
                        ControlFlow::Continue(())
                    }
                    ControlFlow::Continue(None) => {
                        has_deadline = false;
                        ControlFlow::Continue(())
                    }
                },
                _ = ticks.tick() => self.tick(driver),
                // The sender lives as long as the lifecycle this task holds.
                _ = phase.changed() => {
                    phase.mark_unchanged();
                    let now = lifecycle.phase();
                    stopped = now == Phase::Stopped;
                    // One phase may follow another before this is polled.
                    let leaves = now >= Phase::Closing || now >= Phase::Leaving && !told;
                    told |= now >= Phase::Leaving;
                    if leaves && !stopped {
                        self.leave(driver, GoAway::Leaving);
                    }
                    ControlFlow::Continue(())
                }
            };
            if next.is_break() {
                break;
            }
        }
        if stopped {
            self.permit.leave();
            driver.leave();
            // What ends now has its last bytes written before the socket closes.
            let _ = tokio::time::timeout(FLUSH, poll_fn(|cx| driver.poll(cx))).await;
        }
        self.count_unseen();
        self.connection.closed();
    }

    /// The connection has ended with an error.
    fn failed(&self, error: &hyper::Error) {
        let refusal = self.observed.verdict().or_else(|| {
            let why = Refusal::of(error)?;
            Some(if self.observed.says_resets() { Refusal::Resets } else { why })
        });
        if let Some(why) = refusal {
            self.serve.service.refused(why);
        }
        let (peer, why) = (self.serve.peer.map(tracing::field::display), refusal.map(Refusal::as_str));
        tracing::debug!(peer, why, error = %error, "connection ended");
    }

    fn refuse(&self, why: Refusal) -> ControlFlow<()> {
        self.serve.service.refused(why);
        ControlFlow::Break(())
    }

    /// Its state may have changed.
    fn judge(&mut self) -> ControlFlow<()> {
        match self.connection.auth_state() {
            AuthState::Expelled => return self.refuse(Refusal::Unauthenticated),
            AuthState::Authenticated => self.place = None,
            AuthState::New | AuthState::Anonymous => {}
        }
        ControlFlow::Continue(())
    }

    /// Another connection has taken its place.
    fn lost(&mut self) -> ControlFlow<()> {
        match self.connection.auth_state() {
            // Its first answer is still under way.
            AuthState::Authenticated => {
                self.place = None;
                ControlFlow::Continue(())
            }
            AuthState::New | AuthState::Anonymous | AuthState::Expelled => ControlFlow::Break(()),
        }
    }

    /// The deadline for the first frame has passed, or for authentication. Returns the next one.
    fn late(&mut self) -> ControlFlow<(), Option<Instant>> {
        let authenticated_by = self.born + self.serve.limits.authentication;
        let why = match self.connection.auth_state() {
            AuthState::Authenticated => {
                self.place = None;
                return ControlFlow::Continue(None);
            }
            _ if !self.observed.has_spoken() => Refusal::Silent,
            AuthState::Anonymous => return ControlFlow::Continue(None),
            AuthState::New if Instant::now() < authenticated_by => {
                return ControlFlow::Continue(Some(authenticated_by));
            }
            AuthState::New | AuthState::Expelled => Refusal::Unauthenticated,
        };
        self.serve.service.refused(why);
        ControlFlow::Break(())
    }

    /// Checks all that depends on time.
    fn tick<D: Driver>(&mut self, driver: &mut D) -> ControlFlow<()> {
        let Serve { limits, age, .. } = self.serve;
        let now = Instant::now();
        self.count_unseen();
        if self.connection.auth_state() == AuthState::Expelled {
            return self.refuse(Refusal::Unauthenticated);
        }
        if self.observed.head_age().is_some_and(|age| age >= limits.headers) {
            return self.refuse(Refusal::Headers);
        }
        // No stream was opened since an earlier check if their number is the same.
        let opened = self.slot.opened();
        self.idle = match self.idle {
            _ if !self.slot.is_idle() => None,
            Some((before, since)) if opened == before => Some((before, since)),
            _ => Some((opened, now)),
        };
        let is_over = self.idle.is_some_and(|(_, since)| now >= since + limits.idle);
        if !self.leaving && is_over && !flawed(Flaw::IdleStays) {
            self.serve.service.refused(Refusal::Idle);
            self.leave(driver, GoAway::Idle);
            if D::ENDS_WHEN_IDLE {
                self.cut_at = Some(now + FLUSH);
            }
        }
        if !self.leaving && self.age_at.is_some_and(|at| now >= at) {
            self.leave(driver, GoAway::Age);
            self.cut_at = age.and_then(|age| age.grace).map(|grace| now + grace);
        }
        if self.cut_at.is_some_and(|at| now >= at) {
            return ControlFlow::Break(());
        }
        self.connection.tick();
        ControlFlow::Continue(())
    }

    /// Asks the peer to end the connection; once.
    fn leave(&mut self, driver: &mut impl Driver, why: GoAway) {
        if !self.leaving {
            self.leaving = true;
            driver.leave();
            self.connection.going_away(why);
        }
    }

    /// Counts the requests that HTTP/2 has refused without a call of the service.
    fn count_unseen(&self) {
        let service = &self.serve.service;
        (0..self.observed.take_too_large()).for_each(|_| service.refused(Refusal::Headers));
        (0..self.observed.take_refused()).for_each(|_| service.refused(Refusal::Streams));
    }
}

/// Polls a connection. Unless it is admitted for good, it waits for its permit.
fn step(
    observed: &Observed,
    permit: &mut Permit,
    driver: &mut impl Driver,
    cx: &mut Context<'_>,
) -> Poll<hyper::Result<()>> {
    if observed.is_admitted() {
        permit.known();
        driver.poll(cx)
    } else {
        permit.poll(cx, |cx| driver.poll(cx))
    }
}

/// Resolves when a place among the half-open connections is lost; never without one.
async fn lost(place: Option<&Place>) {
    match place {
        Some(place) => place.lost().await,
        None => pending().await,
    }
}

/// Returns a number from 0 to 1 that differs between connections.
fn fraction(peer: Option<SocketAddr>) -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    (RandomState::new().hash_one(peer) % 1024) as f64 / 1023.0
}
