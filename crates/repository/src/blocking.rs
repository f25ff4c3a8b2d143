//! Runs what blocks on other threads, a few at a time.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::Error;

/// How many calls of one repository block threads at the same time. More would wait for the same disk.
const THREADS: usize = 4;

/// The threads of one repository.
#[derive(Debug)]
pub(crate) struct Blocking(Arc<Semaphore>);

impl Default for Blocking {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(THREADS)))
    }
}

impl Blocking {
    /// Runs `call` on a thread that may block.
    ///
    /// # Cancel safety
    /// A call that has begun runs to its end, and its result is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let Ok(permit) = Arc::clone(&self.0).acquire_owned().await else {
            return Err(Error::io("the threads of a repository have ended"));
        };
        let running = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            call()
        });
        running.await.unwrap_or_else(|_| Err(Error::io("reading a repository panicked")))
    }
}
