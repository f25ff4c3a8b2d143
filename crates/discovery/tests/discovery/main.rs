//! Every discovery with its source: name servers simulated by the test, and a real Kubernetes API server.

#![allow(clippy::unwrap_used, reason = "clippy spares test functions, not the helpers of a test target")]

mod dns;
mod fixed;
mod kubernetes;
mod log;
mod name_server;
mod proxy;

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use discovery::{Discovery, Health};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};

/// How long an expected event may take.
const SOON: Duration = Duration::from_secs(30);

/// How long a test checks that nothing happens.
const NEVER: Duration = Duration::from_millis(500);

/// The lookup interval in these tests.
const INTERVAL: Duration = Duration::from_millis(50);

/// A discovery that runs until this is dropped.
struct Running {
    task: JoinHandle<()>,
    seeds: watch::Receiver<HashSet<SocketAddr>>,
    health: watch::Receiver<Health>,
}

impl Running {
    fn start(discovery: impl Discovery) -> Self {
        log::init();
        let health = discovery.health();
        let (sender, seeds) = watch::channel(HashSet::new());
        let task = tokio::spawn(async move {
            let error = Box::new(discovery).run(sender).await;
            panic!("it ended: {error:?}");
        });
        Self { task, seeds, health }
    }

    /// Waits until exactly these seeds are published.
    async fn publishes(&mut self, expected: &[&str]) {
        let expected = seeds(expected);
        let wait = async { self.seeds.wait_for(|seeds| *seeds == expected).await.map(drop) };
        match timeout(SOON, wait).await {
            Ok(published) => published.expect("the discovery runs"),
            Err(_) => {
                panic!("published {:?}, not {expected:?}; {:?}", self.seeds.borrow(), self.health.borrow())
            }
        }
    }

    /// Waits until lookups fail with an error that contains `text`.
    async fn fails_with(&mut self, text: &str) {
        let deadline = Instant::now() + SOON;
        loop {
            let failure = self.health.borrow_and_update().failure.clone();
            if failure.is_some_and(|failure| failure.error.contains(text)) {
                return;
            }
            assert!(Instant::now() < deadline, "{text:?} is not what fails: {:?}", self.health.borrow());
            // Another error of the same kind wakes no receiver, so this polls too.
            let _ = timeout(INTERVAL, self.health.changed()).await;
        }
    }

    async fn works(&mut self) {
        let works = |health: &Health| health.failure.is_none() && health.last_success.is_some();
        let wait = async { self.health.wait_for(works).await.map(drop) };
        timeout(SOON, wait).await.expect("lookups work").expect("the discovery runs");
    }

    /// Checks for a while that nothing is published.
    async fn stays(&mut self) {
        self.seeds.mark_unchanged();
        assert!(timeout(NEVER, self.seeds.changed()).await.is_err(), "{:?}", self.seeds.borrow());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn seeds(addresses: &[&str]) -> HashSet<SocketAddr> {
    addresses.iter().map(|address| address.parse().unwrap()).collect()
}
