//! The life of a process: serving, draining, leaving, stopped.

use tokio::sync::watch;

/// How far a process is. Only ever goes forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Everything is served.
    Serving,
    /// Not ready any more, so that balancers and peers turn away; everything is still served.
    Draining,
    /// Connections get GOAWAY, idle tunnels end; open requests go on.
    Leaving,
    /// What is left ends now.
    Stopped,
}

/// Publishes the phase.
#[derive(Debug, Clone)]
pub struct Lifecycle(watch::Sender<Phase>);

impl Default for Lifecycle {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Serving))
    }
}

impl Lifecycle {
    /// Goes on to `phase`; never back.
    pub fn advance(&self, phase: Phase) {
        self.0.send_if_modified(|now| {
            let forward = *now < phase;
            *now = (*now).max(phase);
            forward
        });
    }

    /// Returns the phase now.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Returns a receiver of every later phase.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.0.subscribe()
    }

    /// Waits until the phase is at least `phase`.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn reached(&self, phase: Phase) {
        // The sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(|now| *now >= phase).await;
    }
}

/// SIGINT and SIGTERM, from the moment it is made.
///
/// SIGHUP is taken over too, since the system would end the process without a word: [`hangups`] says what
/// comes of it.
#[derive(Debug)]
pub struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// Never received here: that it is there keeps SIGHUP from ending the process.
    _hangup: tokio::signal::unix::Signal,
}

impl Signals {
    /// Takes the signals over: from now on they do not end the process.
    ///
    /// # Errors
    /// When signals cannot be watched.
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

/// Obeys SIGHUP for ever: calls `reopen`, or says that there is nothing to do. Many that come at once may
/// count as one.
pub async fn hangups(reopen: Option<impl Fn()>) {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => hangups,
        Err(error) => {
            tracing::warn!(error = %error, "SIGHUP cannot be watched");
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
