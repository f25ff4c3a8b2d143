//! Limits of what people ask for.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

/// Diffs of an agent at once.
const AT_ONCE: usize = 2;
/// Diffs of an agent in [`WINDOW`].
const MOST: usize = 10;
/// See [`MOST`].
const WINDOW: Duration = Duration::from_secs(60);

/// Limits the diffs of an agent.
#[derive(Debug)]
pub(crate) struct Asked {
    at: Vec<Instant>,
    open: Arc<Semaphore>,
}

/// A diff that runs.
#[derive(Debug)]
pub(crate) struct Permit(#[expect(dead_code, reason = "freed when it is dropped")] OwnedSemaphorePermit);

impl Default for Asked {
    fn default() -> Self {
        Self { at: Vec::new(), open: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

impl Asked {
    pub(crate) fn admit(&mut self, now: Instant) -> Result<Permit, String> {
        self.at.retain(|at| now.saturating_duration_since(*at) < WINDOW);
        if self.at.len() >= MOST {
            return Err(format!("{MOST} diffs a minute are made for an agent: try again later"));
        }
        let permit = Arc::clone(&self.open).try_acquire_owned();
        let permit =
            permit.map_err(|_| format!("{AT_ONCE} diffs run for the agent already: try again later"))?;
        self.at.push(now);
        Ok(Permit(permit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn two_diffs_at_once_and_ten_a_minute() {
        let mut asked = Asked::default();
        let now = Instant::now();
        let first = asked.admit(now).unwrap();
        let _second = asked.admit(now).unwrap();
        assert!(asked.admit(now).unwrap_err().contains("run"));
        drop(first);
        for _ in 0..8 {
            drop(asked.admit(now).unwrap());
        }
        assert!(asked.admit(now).unwrap_err().contains("a minute"));
        assert!(asked.admit(now + WINDOW).is_ok());
    }
}
