//! The pool of tunnels of one session.
//!
//! A tunnel reports its state ([`Observer`]) from its own task. The session is woken only when there is
//! something to do, such as opening tunnels, and not for each request.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::Notify, time::Instant};
use tunnel::agent_end::{Control, Observer, Progress};

use crate::{metrics::Metrics, replica::Replica};

/// The number of reusable tunnels that should be idle at any time.
pub const IDLE: usize = 2;
/// The same for a kas that does not accept reuse, such as GitLab's: as many as GitLab's agentk has. Each
/// request uses up a tunnel there, and a request that finds none waits for up to 3 s until kas looks again.
pub const IDLE_ONE_SHOT: usize = 10;
/// If kas has not answered a tunnel for this long, it does not accept reuse: GitLab's answers only with the
/// first request. A kas of this project answers at once, or after at most 20 s if it has to ask GitLab. If
/// this time is too short, an overloaded kas gets more tunnels; if it is too long, there are few after a
/// start.
const SILENT: Duration = Duration::from_secs(30);
/// A tunnel that kas ends unused before it was open for this long counts as refused, so that another one is
/// not opened at once.
const BRIEF: Duration = Duration::from_secs(1);
/// A tunnel counts as idle only if it was not used within a period of this length. Short requests end before
/// the session runs, so all tunnels looked idle to it while callers were waiting for each of them in kas. If
/// the period is too short, tunnels of a busy agent count as idle; if it is too long, consecutive bursts
/// count as one.
const PERIOD: Duration = Duration::from_millis(1);
/// A tunnel that was idle for this long is closed if more tunnels are idle than necessary.
const SHRINK_AFTER: Duration = Duration::from_secs(60);

/// The tunnels of one session.
#[derive(Debug)]
pub struct Pool {
    state: Mutex<State>,
    notify: Notify,
    metrics: Arc<Metrics>,
    limit: usize,
    /// Periods are counted from this time.
    begun: Instant,
}

#[derive(Debug, Default)]
struct State {
    slots: HashMap<u64, Slot>,
    serial: u64,
    idle: usize,
    busy: usize,
    opening: usize,
    /// Whether kas does not accept reuse, as far as its last answer shows. `None`: it has answered no tunnel.
    one_shot: Option<bool>,
    usage: Usage,
    /// Idle tunnels that have reached their maximum idle time. They are withdrawn when others have replaced
    /// them, or at the next tick.
    outgoing: Vec<Control>,
    /// The number of tunnels that ended before kas accepted them, since the last call of [`Pool::wants`].
    failed: usize,
    /// kas has sent a drain notice.
    drained: bool,
    /// The replica that sent the notice, if it named itself.
    drained_by: Option<Replica>,
    /// No more tunnels are opened.
    closed: bool,
}

/// How many tunnels were in use in the current period.
#[derive(Debug, Default)]
struct Usage {
    period: u64,
    /// Tunnels that got or finished a request in the period.
    touched: usize,
    /// Tunnels that have been busy since before the period.
    carried: usize,
    /// The number of tunnels in use when fewer others than necessary were left. 0: that has not happened
    /// since the last call of [`Pool::wants`].
    scarce: usize,
}

impl State {
    /// Returns how many tunnels should be idle.
    fn floor(&self) -> usize {
        if self.one_shot == Some(true) { IDLE_ONE_SHOT } else { IDLE }
    }
}

#[derive(Debug)]
struct Slot {
    control: Option<Control>,
    stage: Stage,
    /// The last period in which the tunnel got or finished a request.
    touched: Option<u64>,
    /// The time since which the tunnel has been idle, or is being opened.
    since: Instant,
    /// Replace the tunnel when it was idle for this long, because a proxy would cut it.
    max_idle: Option<Duration>,
    /// The replica that the tunnel ends at. A load balancer may send each stream of a connection to another
    /// replica.
    replica: Option<Replica>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Opening,
    Idle,
    Busy,
    /// Being closed: it does not count as idle.
    Leaving,
}

/// What the session should do now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Open this many tunnels.
    pub open: usize,
    /// The number of attempts that have failed since the last call.
    pub failed: usize,
    /// kas wants the agent to connect to another replica.
    pub drained: bool,
}

impl Pool {
    /// Creates an empty pool of at most `limit` tunnels.
    pub fn new(metrics: Arc<Metrics>, limit: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            notify: Notify::new(),
            metrics,
            limit: limit.max(1),
            begun: Instant::now(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic between two counter updates would be a bug in this file. The process continues.
        self.state.lock()
    }

    /// Waits until [`wants`](Self::wants) may return something else.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }

    /// Returns what the session should do now.
    pub fn wants(&self) -> Wants {
        let mut state = self.state();
        let floor = state.floor();
        let replaced = if state.idle >= floor { std::mem::take(&mut state.outgoing) } else { Vec::new() };
        let have = state.idle + state.opening;
        let scarce = std::mem::take(&mut state.usage.scarce);
        // Open several at once when many are busy: the next burst is probably as large as this one.
        let open = if state.closed {
            0
        } else if have < floor {
            (floor - have).max(state.busy / 2)
        } else if scarce > 0 && state.opening == 0 {
            (scarce / 2).max(1)
        } else {
            0
        };
        let wants = Wants {
            open: open.min(self.limit.saturating_sub(state.slots.len())),
            failed: std::mem::take(&mut state.failed),
            drained: state.drained,
        };
        drop(state);
        for control in replaced {
            control.withdraw();
        }
        wants
    }

    /// Adds a tunnel that is about to be opened. Returns its observer and its number.
    pub fn begin(self: &Arc<Self>) -> (Box<dyn Observer>, u64) {
        let mut state = self.state();
        state.serial += 1;
        state.opening += 1;
        let serial = state.serial;
        let slot = Slot {
            control: None,
            stage: Stage::Opening,
            touched: None,
            since: Instant::now(),
            max_idle: None,
            replica: None,
        };
        state.slots.insert(serial, slot);
        drop(state);
        (Box::new(TunnelObserver { pool: Arc::clone(self), serial }), serial)
    }

    /// Sets the handle of a tunnel.
    pub fn control(&self, serial: u64, control: Control) {
        if let Some(slot) = self.state().slots.get_mut(&serial) {
            slot.control = Some(control);
        }
    }

    /// Records kas' answer for a tunnel: the replica it ends at, how long it may be idle, and whether kas
    /// accepts reuse.
    pub fn answered(
        &self,
        serial: u64,
        replica: Option<Replica>,
        max_idle: Option<Duration>,
        reusable: bool,
    ) {
        let mut state = self.state();
        if let Some(slot) = state.slots.get_mut(&serial) {
            slot.replica = replica;
            slot.max_idle = max_idle;
        }
        self.expect(&mut state, !reusable);
    }

    /// Notes that kas has not named itself on this connection, as every kas that accepts reuse does.
    /// `answered`: it has answered the configuration stream. Call this every few seconds: as long as kas has
    /// answered no tunnel, this shows whether it accepts reuse.
    pub fn unnamed(&self, answered: bool) {
        let mut state = self.state();
        let silent = |slot: &Slot| slot.stage == Stage::Opening && slot.since.elapsed() >= SILENT;
        if state.one_shot.is_none() && (answered || state.slots.values().any(silent)) {
            self.expect(&mut state, true);
        }
    }

    fn expect(&self, state: &mut State, one_shot: bool) {
        if state.one_shot.replace(one_shot) != Some(one_shot) {
            self.notify.notify_one();
        }
    }

    /// Records that kas ended a tunnel that carried no request, as it does from time to time. If it was open
    /// for a while, that is no failure, and another one is opened at once.
    pub fn ended_unused(&self, serial: u64) {
        let mut state = self.state();
        let Some(slot) = state.slots.get_mut(&serial) else { return };
        if slot.stage == Stage::Opening && slot.since.elapsed() >= BRIEF {
            slot.stage = Stage::Leaving;
            state.opening -= 1;
        }
    }

    /// Returns the replicas with an idle or busy tunnel of this session, sorted.
    pub fn replicas(&self) -> Vec<Replica> {
        let state = self.state();
        let present = state.slots.values().filter(|slot| matches!(slot.stage, Stage::Idle | Stage::Busy));
        let mut replicas: Vec<Replica> = present.filter_map(|slot| slot.replica.clone()).collect();
        replicas.sort_unstable();
        replicas.dedup();
        replicas
    }

    /// Returns the replica that sent a drain notice, if it named itself.
    pub fn drained_by(&self) -> Option<Replica> {
        self.state().drained_by.clone()
    }

    /// Whether one more tunnel may be opened.
    pub fn has_room(&self) -> bool {
        let state = self.state();
        !state.closed && state.slots.len() < self.limit
    }

    /// Whether a tunnel is idle or busy, so that requests can arrive through the session.
    pub fn is_serving(&self) -> bool {
        let state = self.state();
        state.idle + state.busy > 0
    }

    /// Whether every tunnel has ended.
    pub fn is_empty(&self) -> bool {
        self.state().slots.is_empty()
    }

    /// Opens no more tunnels.
    pub fn close(&self) {
        self.state().closed = true;
    }

    /// Withdraws all tunnels: idle ones now, busy ones after their request.
    pub fn withdraw_all(&self) {
        self.each(Control::withdraw);
    }

    /// Half-closes all tunnels: idle ones now, busy ones after their request.
    pub fn half_close_all(&self) {
        self.each(Control::half_close);
    }

    fn each(&self, act: impl Fn(&Control)) {
        let controls: Vec<Control> =
            self.state().slots.values().filter_map(|slot| slot.control.clone()).collect();
        for control in controls {
            act(&control);
        }
    }

    /// Closes tunnels that are not needed. Tunnels that a proxy would soon cut are closed when others have
    /// replaced them. Call this every few seconds.
    pub fn tick(&self) {
        let mut leaving = Vec::new();
        {
            let mut state = self.state();
            let state = &mut *state;
            // These were not replaced, because the pool is full or kas does not answer. Having one tunnel
            // less is better than one that is cut.
            leaving.append(&mut state.outgoing);
            let mut spare = state.idle.saturating_sub(state.floor());
            for slot in state.slots.values_mut().filter(|slot| slot.stage == Stage::Idle) {
                let idle = slot.since.elapsed();
                let unused = idle >= SHRINK_AFTER && spare > 0;
                let expired = slot.max_idle.is_some_and(|max| idle >= max);
                if !unused && !expired {
                    continue;
                }
                if unused {
                    spare -= 1;
                }
                slot.stage = Stage::Leaving;
                state.idle -= 1;
                self.metrics.tunnels_idle.dec();
                if unused { &mut leaving } else { &mut state.outgoing }.extend(slot.control.clone());
            }
        }
        // The session opens replacements if they are needed.
        self.notify.notify_one();
        for control in leaving {
            control.withdraw();
        }
    }
}

struct TunnelObserver {
    pool: Arc<Pool>,
    serial: u64,
}

impl Observer for TunnelObserver {
    fn progress(&self, progress: Progress) {
        let pool = &self.pool;
        let mut state = pool.state();
        let state = &mut *state;
        let Some(slot) = state.slots.get_mut(&self.serial) else { return };
        let before = slot.stage;
        let now = Instant::now();
        if progress == Progress::Busy || before == Stage::Busy {
            let period = (now.duration_since(pool.begun).as_nanos() / PERIOD.as_nanos()) as u64;
            if state.usage.period != period {
                state.usage = Usage { period, touched: 0, carried: state.busy, scarce: state.usage.scarce };
            }
            if slot.touched.replace(period) != Some(period) {
                state.usage.touched += 1;
                let carried = usize::from(before == Stage::Busy);
                state.usage.carried = state.usage.carried.saturating_sub(carried);
            }
        }
        let after = match progress {
            Progress::Parked if before != Stage::Leaving => Some(Stage::Idle),
            Progress::Busy => Some(Stage::Busy),
            Progress::Parked | Progress::DrainNotice => Some(Stage::Leaving),
            Progress::Ended => None,
        };
        match before {
            Stage::Opening => state.opening -= 1,
            Stage::Idle => {
                state.idle -= 1;
                pool.metrics.tunnels_idle.dec();
            }
            Stage::Busy => {
                state.busy -= 1;
                pool.metrics.tunnels_busy.dec();
            }
            Stage::Leaving => {}
        }
        match after {
            Some(stage) => {
                slot.stage = stage;
                match stage {
                    Stage::Idle => {
                        slot.since = now;
                        state.idle += 1;
                        pool.metrics.tunnels_idle.inc();
                    }
                    Stage::Busy => {
                        state.busy += 1;
                        pool.metrics.tunnels_busy.inc();
                        pool.metrics.requests.inc();
                    }
                    Stage::Opening | Stage::Leaving => {}
                }
            }
            None => {
                state.slots.remove(&self.serial);
                if before == Stage::Opening {
                    state.failed += 1;
                }
            }
        }
        let in_use = state.usage.touched + state.usage.carried;
        let spare = (state.idle + state.busy + state.opening).saturating_sub(in_use);
        let room = !state.closed && state.slots.len() < pool.limit;
        if progress == Progress::Busy && spare < state.floor() && room {
            state.usage.scarce = in_use;
        }
        if progress == Progress::DrainNotice {
            state.drained = true;
            state.drained_by = state.slots.get(&self.serial).and_then(|slot| slot.replica.clone());
        }
        let first = before == Stage::Opening && after == Some(Stage::Idle);
        if first
            || state.drained
            || after.is_none()
            || state.idle + state.opening < state.floor()
            || state.usage.scarce > 0
        {
            pool.notify.notify_one();
        }
    }

    fn panicked(&self) {
        self.pool.metrics.panics.inc();
        tracing::error!("a request handler panicked; the request ended with INTERNAL");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(limit: usize) -> Arc<Pool> {
        Pool::new(Arc::default(), limit)
    }

    fn open(pool: &Arc<Pool>) -> Vec<Box<dyn Observer>> {
        (0..pool.wants().open).map(|_| pool.begin().0).collect()
    }

    #[test]
    fn pool_starts_with_two_and_grows_by_half_of_the_busy_ones() {
        let pool = pool(500);
        let mut tunnels = open(&pool);
        assert_eq!(tunnels.len(), IDLE);
        for tunnel in &tunnels {
            tunnel.progress(Progress::Parked);
        }
        assert_eq!(pool.wants().open, 0);
        for round in 0..6 {
            for tunnel in &tunnels {
                tunnel.progress(Progress::Busy);
            }
            let busy = tunnels.len();
            let more = open(&pool);
            assert_eq!(more.len(), (busy / 2).max(IDLE), "round {round}");
            for tunnel in &more {
                tunnel.progress(Progress::Parked);
            }
            tunnels.extend(more);
        }
    }

    /// This failed without periods: every request had ended before the session ran, so no tunnel was ever
    /// opened.
    #[tokio::test(start_paused = true)]
    async fn pool_grows_for_requests_that_end_at_once() {
        let pool = pool(500);
        let mut tunnels = open(&pool);
        for tunnel in &tunnels {
            tunnel.progress(Progress::Parked);
        }
        const CALLERS: usize = 21;
        for _ in 0..20 {
            // kas does the same: it uses only the first tunnels.
            for tunnel in tunnels.iter().take(CALLERS) {
                tunnel.progress(Progress::Busy);
                tunnel.progress(Progress::Parked);
            }
            let more = open(&pool);
            for tunnel in &more {
                tunnel.progress(Progress::Parked);
            }
            tunnels.extend(more);
            tokio::time::advance(PERIOD).await;
        }
        assert!((CALLERS + IDLE..CALLERS * 2).contains(&tunnels.len()), "{}", tunnels.len());
        // One caller at a time needs no more tunnels than there are.
        let count = tunnels.len();
        for _ in 0..100 {
            tunnels[0].progress(Progress::Busy);
            tunnels[0].progress(Progress::Parked);
            tokio::time::advance(PERIOD / 7).await;
        }
        assert_eq!(open(&pool).len(), 0, "{count}");
    }

    #[tokio::test(start_paused = true)]
    async fn request_of_many_periods_counts_as_one_tunnel_in_use() {
        let pool = pool(500);
        let tunnels: Vec<_> = (0..6).map(|_| pool.begin().0).collect();
        for tunnel in &tunnels {
            tunnel.progress(Progress::Parked);
        }
        for tunnel in &tunnels[..3] {
            tunnel.progress(Progress::Busy);
        }
        tokio::time::advance(PERIOD * 3).await;
        tunnels[3].progress(Progress::Busy);
        assert_eq!(pool.wants().open, 0, "two are idle");
        for tunnel in &tunnels[..4] {
            tunnel.progress(Progress::Parked);
        }
        tokio::time::advance(PERIOD).await;
        tunnels[0].progress(Progress::Busy);
        assert_eq!(pool.wants().open, 0);
        let state = pool.state();
        assert_eq!((state.usage.touched, state.usage.carried), (1, 0));
    }

    #[test]
    fn pool_never_exceeds_its_limit() {
        let pool = pool(3);
        let first = open(&pool);
        for tunnel in &first {
            tunnel.progress(Progress::Parked);
            tunnel.progress(Progress::Busy);
        }
        assert_eq!(pool.wants().open, 1);
        let _last = open(&pool);
        assert_eq!(pool.wants().open, 0);
    }

    #[test]
    fn failures_and_drain_notices_reach_the_session() {
        let pool = pool(10);
        let tunnels = open(&pool);
        tunnels[0].progress(Progress::Ended);
        assert_eq!(pool.wants(), Wants { open: 1, failed: 1, drained: false });
        tunnels[1].progress(Progress::Parked);
        tunnels[1].progress(Progress::DrainNotice);
        assert!(pool.wants().drained);
        tunnels[1].progress(Progress::Ended);
        assert_eq!(pool.wants().failed, 0);
        assert!(pool.is_empty());
    }

    #[test]
    fn replicas_are_those_of_tunnels_that_are_idle_or_busy() {
        let pool = pool(10);
        let tunnels: Vec<_> = ["b", "a", "b"]
            .map(|name| {
                let (tunnel, serial) = pool.begin();
                pool.answered(serial, Some(Replica::new(name)), None, true);
                tunnel
            })
            .into();
        assert_eq!(pool.replicas(), []);
        for tunnel in &tunnels {
            tunnel.progress(Progress::Parked);
        }
        tunnels[0].progress(Progress::Busy);
        assert_eq!(pool.replicas(), ["a", "b"].map(Replica::new));
        assert_eq!(pool.drained_by(), None);
        tunnels[1].progress(Progress::DrainNotice);
        assert_eq!(pool.replicas(), [Replica::new("b")]);
        assert_eq!(pool.drained_by(), Some(Replica::new("a")));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_tunnels_beyond_two_are_closed_after_a_minute() {
        let pool = pool(100);
        let tunnels: Vec<_> = (0..10).map(|_| pool.begin().0).collect();
        for tunnel in &tunnels {
            tunnel.progress(Progress::Parked);
        }
        pool.tick();
        assert_eq!(pool.state().idle, 10);
        tokio::time::advance(SHRINK_AFTER).await;
        pool.tick();
        assert_eq!(pool.state().idle, IDLE);
    }

    /// Uses a tunnel for one request, which begins with kas' answer, as at a kas of GitLab.
    fn use_up(pool: &Arc<Pool>, tunnel: &dyn Observer, serial: u64) {
        pool.answered(serial, None, None, false);
        for progress in [Progress::Parked, Progress::Busy, Progress::Ended] {
            tunnel.progress(progress);
        }
    }

    /// With two idle tunnels, the third of several callers waited until a kas of GitLab looked for a tunnel
    /// again.
    #[tokio::test(start_paused = true)]
    async fn ten_tunnels_are_idle_at_a_kas_that_does_not_accept_reuse() {
        let pool = pool(500);
        let open = |pool: &Arc<Pool>| (0..pool.wants().open).map(|_| pool.begin()).collect::<Vec<_>>();
        let mut tunnels = open(&pool);
        assert_eq!(tunnels.len(), IDLE, "it may accept reuse");
        for _ in 0..50 {
            let (tunnel, serial) = tunnels.remove(0);
            use_up(&pool, &*tunnel, serial);
            tunnels.extend(open(&pool));
            assert_eq!(tunnels.len(), IDLE_ONE_SHOT);
        }
        // Ten callers at once.
        let busy = std::mem::take(&mut tunnels);
        for (tunnel, serial) in &busy {
            pool.answered(*serial, None, None, false);
            tunnel.progress(Progress::Parked);
            tunnel.progress(Progress::Busy);
        }
        tunnels.extend(open(&pool));
        assert_eq!(tunnels.len(), IDLE_ONE_SHOT);
        for (tunnel, _) in &busy {
            tunnel.progress(Progress::Ended);
        }
        assert_eq!(open(&pool).len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_kas_that_does_not_name_itself_is_taken_for_one_without_reuse_until_it_answers_a_tunnel() {
        for answered in [true, false] {
            let pool = pool(500);
            let (first, serial) = pool.begin();
            if !answered {
                pool.unnamed(false);
                assert_eq!(pool.wants().open, IDLE - 1, "it may be slow");
                tokio::time::advance(SILENT).await;
            }
            pool.unnamed(answered);
            assert_eq!(pool.wants().open, IDLE_ONE_SHOT - 1);
            // Another replica may answer the tunnels of this connection.
            pool.answered(serial, Some(Replica::new("a")), None, true);
            first.progress(Progress::Parked);
            pool.unnamed(answered);
            assert_eq!(pool.wants().open, IDLE - 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tunnels_become_few_again_when_kas_begins_to_accept_reuse() {
        let pool = pool(500);
        let (tunnel, serial) = pool.begin();
        use_up(&pool, &*tunnel, serial);
        let open = |pool: &Arc<Pool>| (0..pool.wants().open).map(|_| pool.begin()).collect::<Vec<_>>();
        let tunnels = open(&pool);
        assert_eq!(tunnels.len(), IDLE_ONE_SHOT);
        for (tunnel, serial) in &tunnels {
            pool.answered(*serial, Some(Replica::new("a")), None, true);
            tunnel.progress(Progress::Parked);
        }
        tokio::time::advance(SHRINK_AFTER).await;
        pool.tick();
        assert_eq!(pool.state().idle, IDLE);
        assert_eq!(pool.wants().open, 0);
    }

    /// A kas of GitLab ends idle tunnels with OK from time to time, all ten of them within a minute.
    #[tokio::test(start_paused = true)]
    async fn a_tunnel_that_kas_ends_unused_after_a_while_is_no_failure() {
        let pool = pool(500);
        for (open_for, failed) in [(BRIEF, 0), (Duration::ZERO, 1)] {
            let (tunnel, serial) = pool.begin();
            tokio::time::advance(open_for).await;
            pool.ended_unused(serial);
            tunnel.progress(Progress::Ended);
            assert_eq!(pool.wants(), Wants { open: IDLE, failed, drained: false });
        }
        assert!(pool.is_empty());
    }
}
