//! Calls of modules to kas, on the connections of the sessions.
//!
//! A session lends its connection as soon as it may open tunnels, until it takes no more streams. A module
//! does not choose: a call goes over a connection through which requests arrive, if there is one.

use std::{collections::BTreeMap, fmt, pin::Pin, sync::Arc};

use bytes::Bytes;
use grpc::{Code, MessageReader, Status};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Calls that are open at once, over all connections: each of 100 manifest projects has two. Further ones
/// wait.
pub const MOST: usize = 256;

/// Opens a call of a method with one message, which is framed already, and returns the messages of the
/// answer. The status: kas has refused it, or the connection is broken.
pub type Opener = Arc<dyn Fn(&'static str, Bytes) -> Opening + Send + Sync>;
/// See [`Opener`].
pub type Opening = Pin<Box<dyn Future<Output = Result<MessageReader<grpc::Body>, Status>> + Send>>;

/// The connections that calls can use.
pub struct Calls {
    lines: Mutex<Lines>,
    /// Changes when there is another connection.
    changed: watch::Sender<()>,
    permits: Arc<Semaphore>,
}

#[derive(Default)]
struct Lines {
    next: u64,
    by_serial: BTreeMap<u64, Line>,
}

struct Line {
    opener: Opener,
    /// Whether requests can arrive through its session.
    is_serving: bool,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            lines: Mutex::default(),
            changed: watch::Sender::new(()),
            permits: Arc::new(Semaphore::new(MOST)),
        }
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls")
            .field("connections", &self.lines.lock().by_serial.len())
            .finish_non_exhaustive()
    }
}

/// An open call.
#[derive(Debug)]
pub struct Call {
    /// The messages of the answer.
    pub messages: MessageReader<grpc::Body>,
    _permit: OwnedSemaphorePermit,
}

/// A connection that calls may use until this is dropped.
#[derive(Debug)]
pub struct Lent {
    calls: Arc<Calls>,
    serial: u64,
}

impl Calls {
    /// Lets calls use a connection.
    pub fn lend(self: &Arc<Self>, opener: Opener) -> Lent {
        let serial = {
            let mut lines = self.lines.lock();
            let serial = lines.next;
            lines.next += 1;
            lines.by_serial.insert(serial, Line { opener, is_serving: false });
            serial
        };
        self.changed.send_replace(());
        Lent { calls: Arc::clone(self), serial }
    }

    /// Opens a call of a method with one message, which is framed already. It waits while there is no
    /// connection, and while too many calls are open.
    ///
    /// # Errors
    /// kas has refused the call, or the connection broke.
    ///
    /// # Cancel safety
    /// Dropping the future, or what it returns, cancels the call.
    pub async fn open(&self, method: &'static str, message: Bytes) -> Result<Call, Status> {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|error| Status::new(Code::Unavailable, error.to_string()))?;
        let opener = self.opener().await;
        let messages = opener(method, message).await?;
        Ok(Call { messages, _permit: permit })
    }

    /// Returns the opener of the connection that has been serving for longest, or of any.
    async fn opener(&self) -> Opener {
        let mut changed = self.changed.subscribe();
        loop {
            {
                let lines = self.lines.lock();
                let all = &lines.by_serial;
                let line = all.values().find(|line| line.is_serving).or_else(|| all.values().next());
                if let Some(line) = line {
                    return Arc::clone(&line.opener);
                }
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Lent {
    /// Requests can arrive through the session now.
    pub fn serves(&self) {
        if let Some(line) = self.calls.lines.lock().by_serial.get_mut(&self.serial) {
            line.is_serving = true;
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.calls.lines.lock().by_serial.remove(&self.serial);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    /// A connection whose calls end with this text.
    fn line(text: &'static str) -> Opener {
        Arc::new(move |_, _| Box::pin(async move { Err(Status::new(Code::Aborted, text)) }))
    }

    /// A connection whose answers have no messages.
    fn empty() -> Opener {
        Arc::new(|_, _| Box::pin(async { Ok(MessageReader::new(grpc::full(Bytes::new()), 1)) }))
    }

    async fn who(calls: &Calls) -> String {
        calls.open("/a.A/B", Bytes::new()).await.unwrap_err().message().to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_waits_for_a_connection_and_prefers_one_that_serves() {
        let calls = Arc::new(Calls::default());
        let waiting = tokio::spawn({
            let calls = Arc::clone(&calls);
            async move { who(&calls).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        let first = calls.lend(line("first"));
        assert_eq!(waiting.await.unwrap(), "first");
        let second = calls.lend(line("second"));
        assert_eq!(who(&calls).await, "first");
        second.serves();
        assert_eq!(who(&calls).await, "second");
        first.serves();
        drop(second);
        assert_eq!(who(&calls).await, "first");
        drop(first);
        assert!(timeout(Duration::from_secs(1), who(&calls)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn open_calls_are_limited() {
        let calls = Arc::new(Calls::default());
        let _lent = calls.lend(empty());
        let mut open = Vec::new();
        for _ in 0..MOST {
            open.push(calls.open("/a.A/B", Bytes::new()).await.unwrap());
        }
        let one_more = || timeout(Duration::from_secs(1), calls.open("/a.A/B", Bytes::new()));
        assert!(one_more().await.is_err());
        open.pop();
        assert!(one_more().await.is_ok());
    }
}
