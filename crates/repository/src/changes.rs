//! The watch behind `Repository::changes`.

use tokio::sync::watch;

/// Counts what an implementation was told about changes. Clones of the receiver share it.
#[derive(Debug)]
pub struct Changes(watch::Sender<u64>);

impl Default for Changes {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Changes {
    /// Wakes all receivers.
    pub fn tell(&self) {
        self.0.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Returns a receiver that has seen all changes so far.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}
