//! [`Host`]: a runtime whose clock follows that of the simulation.
//!
//! To run a runtime in each step although nothing happens on it would take most of the time of a simulation.
//! So a host runs when something has happened to it, and otherwise in every fifth step only. The timers of
//! what runs on it fire in their order and at their times by its own clock; what they send leaves up to
//! [`REST`] late, as from a machine that is busy. Packets are never late.

use std::{future::Future, time::Duration};

use anyhow::Result;
use history::Micros;
use tokio::{
    runtime::Runtime,
    task::JoinHandle,
    time::{Instant, advance, sleep_until},
};

/// How often all hosts run at least. What is recorded of them at regular times is a multiple of it, so that
/// nothing is recorded that is out of date.
const REST: Micros = 5_000;

/// A runtime. Its tasks end when it is dropped.
pub(crate) struct Host {
    runtime: Runtime,
    /// Its clock.
    until: Micros,
    /// How far its clock jumps before it runs again.
    jump: Duration,
    /// It has something to do.
    is_touched: bool,
}

impl Host {
    /// Starts one whose clock stands at `now`.
    ///
    /// # Errors
    /// If the system has no more resources.
    pub(crate) fn new(now: Micros) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
        Ok(Self { runtime, until: now, jump: Duration::ZERO, is_touched: true })
    }

    /// Runs until `now`, unless it may rest. `is_woken`: something has happened to it.
    pub(crate) fn run(&mut self, now: Micros, is_woken: bool) {
        if is_woken || self.is_touched || now.is_multiple_of(REST) {
            self.is_touched = false;
            self.run_until(now);
        }
    }

    fn run_until(&mut self, now: Micros) {
        let time = Duration::from_micros(now.saturating_sub(self.until));
        let jump = std::mem::take(&mut self.jump);
        self.until = now;
        if time.is_zero() && jump.is_zero() {
            return;
        }
        self.runtime.block_on(async {
            let until = Instant::now() + jump + time;
            if !jump.is_zero() {
                advance(jump).await;
            }
            sleep_until(until).await;
        });
    }

    /// Brings its clock to `now` before something is done to it from outside, and lets it run in the next
    /// step.
    pub(crate) fn touch(&mut self, now: Micros) {
        self.run_until(now);
        self.is_touched = true;
    }

    /// It did not run until `now`: the time passes at once when it runs again, and its timers are late.
    pub(crate) fn resume(&mut self, now: Micros) {
        self.jump += Duration::from_micros(now.saturating_sub(self.until));
        (self.until, self.is_touched) = (now, true);
    }

    /// Starts a task.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(task)
    }

    /// Runs something that does not wait.
    pub(crate) fn block_on<T>(&self, task: impl Future<Output = T>) -> T {
        self.runtime.block_on(task)
    }
}
