//! [`Gossip`]: the handle of a running process of the mesh.

use std::{net::SocketAddr, sync::Arc};

use tokio::sync::{oneshot, watch};

use crate::{
    counters::Counters,
    members::{Members, Status},
    publish::{self, MAX_KEYS, PublishError},
    reachability::Reachability,
    state::State,
};

/// One process of the mesh. Dropping it stops its thread without notice to the others.
pub struct Gossip {
    pub(crate) local: SocketAddr,
    pub(crate) state: Arc<State>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) members: watch::Receiver<Arc<Members>>,
    pub(crate) status: watch::Receiver<Status>,
    pub(crate) stop: Option<oneshot::Sender<oneshot::Sender<()>>>,
    #[cfg(test)]
    pub(crate) link: Arc<crate::transport::Link>,
}

impl Gossip {
    /// Returns the bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns the generation of the current incarnation, in microseconds since 1970. It grows when the
    /// gossip task is restarted.
    pub fn generation(&self) -> u64 {
        self.state.generation()
    }

    /// Publishes a value, which replaces an earlier value of the same key. It is sent with the next gossip
    /// round and survives restarts of the gossip task. Never blocks; may be called from any thread.
    ///
    /// # Errors
    /// [`PublishError`] if key or value do not fit.
    pub fn publish(&self, key: &str, value: &str) -> Result<(), PublishError> {
        publish::is_fit(key, value)?;
        {
            let mut published = self.state.published();
            let before = published.values.get(key);
            if before.is_some_and(|before| **before == *value) {
                return Ok(());
            }
            if before.is_none() && published.values.len() >= MAX_KEYS {
                return Err(PublishError::Full);
            }
            published.values.insert(key.into(), value.into());
            published.revision += 1;
        }
        self.state.news.notify_one();
        Ok(())
    }

    /// Returns the other live processes. The value changes when one joins, leaves or restarts, at most once
    /// per interval, and as soon as published values arrive. It does not change when only
    /// [`Member::heard`](crate::Member::heard) advances. The watch closes when the thread stops.
    pub fn members(&self) -> watch::Receiver<Arc<Members>> {
        self.members.clone()
    }

    /// Returns whether any other process is heard.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Returns the heartbeat that the main runtime must send if there is a
    /// [`health_gate`](crate::Builder::health_gate).
    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat(Arc::clone(&self.state))
    }

    /// Notes that another process has just answered this one by other means than gossip; see
    /// [`silence_if_deaf`](crate::Builder::silence_if_deaf). Never blocks; may be called from any thread.
    pub fn reached(&self) {
        self.state.reachability.sign();
    }

    /// As [`reached`](Self::reached), for as long as the returned value lives. Use it for a connection that
    /// ends when the peer does not answer on it.
    pub fn hold(&self) -> Hold {
        self.state.reachability.hold();
        Hold(Arc::clone(&self.state.reachability))
    }

    /// Returns the counters.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Passes on the last published values for one interval, and stops the thread. For the others this looks
    /// like a crash: publish the intent first.
    ///
    /// # Cancel safety
    /// Once polled, the thread stops in any case.
    pub async fn leave(mut self) {
        let (done, left) = oneshot::channel();
        if let Some(stop) = self.stop.take()
            && stop.send(done).is_ok()
        {
            // An error means that the thread has ended already.
            let _ = left.await;
        }
    }
}

impl std::fmt::Debug for Gossip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gossip").field("local", &self.local).finish_non_exhaustive()
    }
}

/// While this lives, a peer reaches this process; see [`Gossip::hold`].
#[derive(Debug)]
pub struct Hold(Arc<Reachability>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Shows the gossip thread that the main runtime makes progress. Cheap to clone and to call.
#[derive(Clone)]
pub struct Heartbeat(Arc<State>);

impl Heartbeat {
    /// Sends one heartbeat. Call it from a task of the main runtime, at least three times per gate duration.
    pub fn beat(&self) {
        self.0.beat();
    }
}

impl std::fmt::Debug for Heartbeat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Heartbeat")
    }
}
