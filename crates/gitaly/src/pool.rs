//! Connections and what is known of servers, as long as they are used.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use grpc::Status;
use parking_lot::Mutex;
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use crate::{
    Address, Limits, Server,
    connection::{Connection, DialError},
    limits::{Buckets, InFlight},
};

/// The most connections. A replica of a large GitLab calls some tens of servers.
const MOST: usize = 256;
/// Pauses after failed calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    /// The longest after the first failure. It is doubled after each further one…
    pub(crate) first: Duration,
    /// …up to this.
    pub(crate) longest: Duration,
}

impl Pause {
    /// Short enough for a Gitaly that restarts, and long enough for one that is overloaded.
    pub(crate) const USUAL: Self = Self { first: Duration::from_secs(1), longest: Duration::from_secs(60) };
}

/// All connections and servers.
#[derive(Debug)]
pub(crate) struct Pool {
    connections: Mutex<HashMap<(Address, [u8; 32]), Kept<Slot>>>,
    servers: Mutex<HashMap<Address, Kept<ServerState>>>,
}

#[derive(Debug)]
struct Kept<T> {
    value: Arc<T>,
    used: Instant,
}

/// One connection, made when it is needed and again after it has ended.
#[derive(Debug, Default)]
pub(crate) struct Slot(AsyncMutex<Option<Connection>>);

/// All connections are in use.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("all {MOST} connections to Gitaly servers are in use")]
pub(crate) struct Full;

impl Pool {
    pub(crate) fn new() -> Self {
        Self { connections: Mutex::default(), servers: Mutex::default() }
    }

    /// Returns the place of the connection for this address and token.
    pub(crate) fn slot(&self, server: &Server) -> Result<Arc<Slot>, Full> {
        let key = (server.address.clone(), server.token_digest());
        let mut connections = self.connections.lock();
        get(&mut connections, key, Slot::is_unused, Slot::default).ok_or(Full)
    }

    /// Returns what is known of the server at an address. Those that are not used are forgotten if there are
    /// too many.
    pub(crate) fn server(
        &self,
        address: &Address,
        limits: &Limits,
        pause: Pause,
    ) -> Result<Arc<ServerState>, Full> {
        let new = || ServerState::new(limits, pause);
        get(&mut self.servers.lock(), address.clone(), |_| true, new).ok_or(Full)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.connections.lock().len()
    }
}

/// Returns the value of `key`, which is made if there is none. `None`: there are [`MOST`] others, and all of
/// them are in use.
fn get<K: Hash + Eq + Clone, T>(
    map: &mut HashMap<K, Kept<T>>,
    key: K,
    is_unused: impl Fn(&T) -> bool,
    new: impl FnOnce() -> T,
) -> Option<Arc<T>> {
    let used = Instant::now();
    if let Some(kept) = map.get_mut(&key) {
        kept.used = used;
        return Some(Arc::clone(&kept.value));
    }
    if map.len() >= MOST {
        let unused = |kept: &Kept<T>| Arc::strong_count(&kept.value) == 1 && is_unused(&kept.value);
        let oldest = map.iter().filter(|(_, kept)| unused(kept)).min_by_key(|(_, kept)| kept.used)?.0.clone();
        map.remove(&oldest);
    }
    let value = Arc::new(new());
    map.insert(key, Kept { value: Arc::clone(&value), used });
    Some(value)
}

impl Slot {
    /// Returns the connection. The first caller dials, and the others wait for it.
    ///
    /// # Cancel safety
    /// Cancel safe: another caller dials.
    pub(crate) async fn connection(
        &self,
        address: &Address,
        tls: &net::tls::Live<rustls::ClientConfig>,
    ) -> Result<(Connection, crate::connection::Using), DialError> {
        let mut slot = self.0.lock().await;
        if let Some(connection) = &*slot
            && let Some(using) = connection.begin()
        {
            return Ok((connection.clone(), using));
        }
        *slot = None;
        let connection = slot.insert(Connection::dial(address, tls.current()).await?);
        let using = connection.begin().ok_or_else(|| DialError::Closed(address.clone()))?;
        Ok((connection.clone(), using))
    }

    fn is_unused(&self) -> bool {
        self.0.try_lock().is_ok_and(|slot| slot.as_ref().is_none_or(Connection::is_unused))
    }
}

/// What is known of a server.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) rate: Buckets,
    pub(crate) in_flight: InFlight,
    pause: Pause,
    failures: Mutex<Failures>,
}

#[derive(Debug, Default)]
struct Failures {
    /// In a row.
    count: u32,
    /// When the last one ended.
    at: Option<Instant>,
    /// No call begins before, and what the last one was.
    closed: Option<(Instant, Status)>,
}

impl ServerState {
    fn new(limits: &Limits, pause: Pause) -> Self {
        Self {
            rate: Buckets::new(limits.per_server),
            in_flight: InFlight::new(limits.in_flight_per_server),
            pause,
            failures: Mutex::default(),
        }
    }

    /// Returns when the next call may begin, and why not now. `None`: now.
    pub(crate) fn closed_until(&self) -> Option<(Instant, Status)> {
        let now = Instant::now();
        self.failures.lock().closed.clone().filter(|(until, _)| *until > now)
    }

    /// A call was answered, by something that says nothing against the server.
    pub(crate) fn answered(&self) {
        *self.failures.lock() = Failures::default();
    }

    /// A call that began at `begun` failed. The calls of a server pause together, for up to twice as long after
    /// each failure.
    pub(crate) fn failed(&self, begun: Instant, status: &Status) {
        let now = Instant::now();
        let mut failures = self.failures.lock();
        // Calls that were in flight together fail together, and count once.
        if failures.at.is_none_or(|at| begun >= at) {
            let most = self.pause.first.saturating_mul(1 << failures.count.min(16)).min(self.pause.longest);
            failures.count = failures.count.saturating_add(1);
            failures.at = Some(now);
            failures.closed = Some((now + most.mul_f64(rand::random()), status.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(port: usize, token: &str) -> Server {
        Server {
            address: format!("tcp://127.0.0.1:{port}").parse().unwrap(),
            token: token.to_owned().into(),
            features: crate::Features::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn connections_are_told_apart_by_address_and_token() {
        let pool = Pool::new();
        let slot = |port, token| pool.slot(&server(port, token)).unwrap();
        let first = slot(1, "a");
        assert!(Arc::ptr_eq(&first, &slot(1, "a")));
        assert!(!Arc::ptr_eq(&first, &slot(1, "b")));
        assert!(!Arc::ptr_eq(&first, &slot(2, "a")));
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_unused_connection_makes_room() {
        let pool = Pool::new();
        let held: Vec<_> = (0..MOST).map(|port| pool.slot(&server(port + 1, "")).unwrap()).collect();
        assert!(pool.slot(&server(1_000, "")).is_err());
        drop(held);
        tokio::time::advance(Duration::from_secs(1)).await;
        pool.slot(&server(1, "")).unwrap();
        pool.slot(&server(1_000, "")).unwrap();
        assert_eq!(pool.len(), MOST);
        let connections = pool.connections.lock();
        assert!(connections.contains_key(&(server(1, "").address, server(1, "").token_digest())));
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_with_failures_in_a_row_and_end_with_an_answer() {
        let state = ServerState::new(&Limits::default(), Pause::USUAL);
        let status = Status::new(grpc::Code::Unavailable, "down");
        let until = || state.failures.lock().closed.as_ref().map(|(until, _)| *until);
        let mut most = Pause::USUAL.first;
        let mut longest = Duration::ZERO;
        for _ in 0..50 {
            let begun = Instant::now();
            state.failed(begun, &status);
            let first = until().unwrap();
            // One that was in flight with it.
            tokio::time::advance(Duration::from_millis(1)).await;
            state.failed(begun, &status);
            assert_eq!(until(), Some(first));
            assert!(first <= begun + most, "{first:?}");
            longest = longest.max(first - begun);
            most = (2 * most).min(Pause::USUAL.longest);
        }
        // Fails with a probability of 1 in 10^13.
        assert!(longest > Pause::USUAL.longest / 2, "{longest:?}");
        state.answered();
        assert_eq!(until(), None);
    }
}
