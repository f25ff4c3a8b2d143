//! The contract of [`Discovery`]: each implementation runs this suite in its own tests.

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use async_trait::async_trait;
use tokio::{sync::watch, task::JoinHandle, time::timeout};

use crate::{Discovery, DiscoveryError, Health};

/// How long a change may take to become visible, including the backoff after a failure. A test waits for the
/// event, not for this time.
const SEEN: Duration = Duration::from_secs(30);

/// How long a test checks that nothing happens.
const QUIET: Duration = Duration::from_millis(500);

/// How long a source must receive no query until a discovery counts as stopped: longer than any of them waits
/// after a first failure.
const STOPPED: Duration = Duration::from_secs(2);

/// The source that a discovery queries, controlled by the test.
#[async_trait]
pub trait Source: Sync {
    /// Returns a discovery of this source that does not run yet. Every seed has the port 8150.
    async fn discovery(&self) -> Box<dyn Discovery>;
    /// Sets the seeds that the source knows. Seeds of one address family change at once.
    async fn know(&self, seeds: &HashSet<SocketAddr>);
    /// Makes every query fail from now on.
    async fn fail(&self);
    /// Ends [`fail`](Self::fail).
    async fn recover(&self);
    /// Shows how many queries, or connections, have arrived in total.
    fn asked(&self) -> watch::Receiver<u64>;
    /// Shows how many connections are open now; 0 if queries need none.
    fn connections(&self) -> watch::Receiver<usize>;
}

/// A running discovery and what it publishes.
struct Running {
    task: JoinHandle<DiscoveryError>,
    seeds: watch::Receiver<HashSet<SocketAddr>>,
    health: watch::Receiver<Health>,
}

impl Running {
    async fn start(source: &dyn Source) -> Self {
        let discovery = source.discovery().await;
        let health = discovery.health();
        let (sender, seeds) = watch::channel(HashSet::new());
        Self { task: tokio::spawn(discovery.run(sender)), seeds, health }
    }

    /// Waits for this set, and returns every set that was published until then.
    async fn publishes(&mut self, expected: &HashSet<SocketAddr>) -> Vec<HashSet<SocketAddr>> {
        let mut seen = Vec::new();
        let wait = async {
            loop {
                let now = self.seeds.borrow_and_update().clone();
                seen.push(now.clone());
                if now == *expected {
                    return;
                }
                self.seeds.changed().await.expect("the discovery runs");
            }
        };
        if timeout(SEEN, wait).await.is_err() {
            panic!("{expected:?} is not published, but {seen:?}; {:?}", *self.health.borrow());
        }
        seen
    }

    async fn is_failing(&mut self, failing: bool) {
        let wait = self.health.wait_for(|health| health.failure.is_some() == failing);
        timeout(SEEN, wait).await.expect("the health changes").expect("the discovery runs");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn seeds(addresses: &[&str]) -> HashSet<SocketAddr> {
    addresses.iter().map(|address| address.parse().expect("test addresses are valid")).collect()
}

/// Runs the whole suite.
///
/// # Panics
/// If the discovery breaks the contract.
pub async fn check(source: &dyn Source) {
    a_change_replaces_the_whole_set(source).await;
    a_failure_keeps_the_last_set_until_it_is_over(source).await;
    a_source_that_fails_at_first_is_asked_again(source).await;
    dropping_stops_all_work(source).await;
    dropping_while_the_source_fails_stops_all_work(source).await;
}

async fn a_change_replaces_the_whole_set(source: &dyn Source) {
    let first = seeds(&["10.0.0.1:8150", "10.0.0.2:8150", "10.0.0.3:8150", "[fd00::1]:8150"]);
    let second = seeds(&["10.0.0.2:8150", "10.0.0.4:8150", "[fd00::1]:8150"]);
    source.know(&first).await;
    let mut running = Running::start(source).await;
    assert!(running.health.borrow().last_success.is_none());
    running.publishes(&first).await;
    running.is_failing(false).await;
    assert!(running.health.borrow().last_success.is_some());

    source.know(&second).await;
    for seen in running.publishes(&second).await {
        assert!(seen == first || seen == second, "{seen:?} is half of a change");
    }

    // The same set again is not a change.
    source.know(&second).await;
    let asked = timeout(QUIET, running.seeds.changed()).await;
    assert!(asked.is_err(), "{asked:?}");
}

async fn a_failure_keeps_the_last_set_until_it_is_over(source: &dyn Source) {
    let before = seeds(&["10.0.0.1:8150", "[fd00::1]:8150"]);
    let after = seeds(&["10.0.0.7:8150"]);
    source.know(&before).await;
    let mut running = Running::start(source).await;
    running.publishes(&before).await;

    source.fail().await;
    running.is_failing(true).await;
    source.know(&after).await;
    assert!(timeout(QUIET, running.seeds.changed()).await.is_err());
    assert_eq!(*running.seeds.borrow(), before);
    let failure = running.health.borrow().failure.clone().expect("it fails");
    assert!(!failure.error.is_empty());

    source.recover().await;
    running.publishes(&after).await;
    running.is_failing(false).await;
}

async fn a_source_that_fails_at_first_is_asked_again(source: &dyn Source) {
    let known = seeds(&["10.0.0.5:8150"]);
    source.know(&known).await;
    source.fail().await;
    let mut running = Running::start(source).await;
    running.is_failing(true).await;
    assert!(running.health.borrow().last_success.is_none());
    source.recover().await;
    running.publishes(&known).await;
    running.is_failing(false).await;
}

async fn dropping_stops_all_work(source: &dyn Source) {
    let known = seeds(&["10.0.0.6:8150"]);
    source.know(&known).await;
    let mut running = Running::start(source).await;
    running.publishes(&known).await;
    stops(running, source).await;
}

async fn dropping_while_the_source_fails_stops_all_work(source: &dyn Source) {
    source.fail().await;
    let mut running = Running::start(source).await;
    running.is_failing(true).await;
    stops(running, source).await;
    source.recover().await;
}

async fn stops(mut running: Running, source: &dyn Source) {
    running.task.abort();
    let wait = async { while running.seeds.changed().await.is_ok() {} };
    timeout(SEEN, wait).await.expect("the watch closes");
    let mut connections = source.connections();
    let closed = connections.wait_for(|open| *open == 0);
    timeout(SEEN, closed).await.expect("connections close").expect("the source lives");
    // A query that was on its way may still arrive.
    let mut asked = source.asked();
    let quiet = async { while timeout(STOPPED, asked.changed()).await.is_ok() {} };
    timeout(SEEN, quiet).await.expect("the source is no longer asked");
}
