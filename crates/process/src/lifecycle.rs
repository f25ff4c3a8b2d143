//! The phases of a process: serving, draining, leaving, stopped.

use tokio::sync::watch;

/// The phase of a process. It only advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// All requests are served.
    Serving,
    /// Not ready any more, so that load balancers and peers stop using this process. All requests are still
    /// served.
    Draining,
    /// Connections get GOAWAY and idle tunnels end. Open requests continue.
    Leaving,
    /// No connection is accepted any more, so the requests that are open are the last ones.
    Closing,
    /// Only requests that may outlast the others continue: upgraded connections. Skipped if there are none.
    Lingering,
    /// Everything that is left ends now.
    Stopped,
}

/// Publishes the phase.
#[derive(Debug, Clone)]
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    /// From this phase on, it is [`Phase::Stopped`] for the holder.
    end: Phase,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { phase: watch::Sender::new(Phase::Serving), end: Phase::Stopped }
    }
}

impl Lifecycle {
    /// Returns the same lifecycle for something that stops as soon as `phase` is reached.
    #[must_use]
    pub fn ending_at(&self, phase: Phase) -> Self {
        Self { end: self.end.min(phase), ..self.clone() }
    }

    /// Returns what `phase` of the process means for the holder.
    fn of(&self, phase: Phase) -> Phase {
        if phase >= self.end { Phase::Stopped } else { phase }
    }

    /// Advances to `phase`. An earlier phase has no effect.
    pub fn advance(&self, phase: Phase) {
        self.phase.send_if_modified(|now| {
            let forward = *now < phase;
            *now = (*now).max(phase);
            forward
        });
    }

    /// Returns the current phase.
    pub fn phase(&self) -> Phase {
        self.of(*self.phase.borrow())
    }

    /// Returns a receiver of all later phases of the process.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Waits until the phase is at least `phase`.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn reached(&self, phase: Phase) {
        // The sender lives as long as `self`.
        let _ = self.phase.subscribe().wait_for(|now| self.of(*now) >= phase).await;
    }
}

/// SIGINT and SIGTERM, received from the moment it is created.
///
/// SIGHUP is received too, because it would otherwise end the process without a message; [`hangups`] handles
/// it.
#[derive(Debug)]
pub struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// Never read here: it only keeps SIGHUP from ending the process.
    _hangup: tokio::signal::unix::Signal,
}

impl Signals {
    /// Registers the signals: from now on they do not end the process.
    ///
    /// # Errors
    /// If signals cannot be registered.
    pub fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            _hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal and returns its name.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// Handles SIGHUP forever: calls `reopen`, or logs that there is nothing to do. Several signals at once may
/// count as one.
pub async fn hangups(reopen: Option<impl Fn()>) {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => hangups,
        Err(error) => {
            tracing::warn!(error = %error, "cannot handle SIGHUP");
            return;
        }
    };
    while hangups.recv().await.is_some() {
        match &reopen {
            Some(reopen) => reopen(),
            None => {
                tracing::info!(signal = "SIGHUP", "nothing to reopen: files are read again when they change")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_ends_early_is_stopped_while_the_process_lingers() {
        let process = Lifecycle::default();
        let early = process.ending_at(Phase::Lingering);
        process.advance(Phase::Leaving);
        assert_eq!((process.phase(), early.phase()), (Phase::Leaving, Phase::Leaving));
        process.advance(Phase::Lingering);
        assert_eq!((process.phase(), early.phase()), (Phase::Lingering, Phase::Stopped));
        early.reached(Phase::Stopped).await;
        process.advance(Phase::Stopped);
        assert_eq!(process.phase(), Phase::Stopped);
    }
}
