//! Starts the streams of a connection of HTTP/2.

use std::sync::Arc;

use super::{connect::Connect, slot::StreamSlot};

/// Starts streams for hyper. hyper calls the service for a stream, clones the executor for it, and starts it
/// with the original. The clone starts what the stream itself begins, which is its sending direction after
/// extended CONNECT.
pub(super) struct Executor {
    slot: StreamSlot,
    connect: Option<Arc<Connect>>,
}

impl Executor {
    pub(super) fn new(slot: StreamSlot) -> Self {
        Self { slot, connect: None }
    }
}

impl Clone for Executor {
    fn clone(&self) -> Self {
        Self { slot: self.slot.clone(), connect: self.slot.connecting() }
    }
}

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        match &self.connect {
            Some(connect) => connect.sends(Box::pin(future)),
            None => self.slot.execute(future),
        }
    }
}
