//! How a replica serves, drains and stops.

use std::{net::SocketAddr, time::Duration};

use process::{lifecycle::Phase, version};
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use super::Kas;

/// How long upgraded connections may take to end after their grace: until a frame ends and its client is
/// told.
const UPGRADES_END: Duration = Duration::from_secs(3);
/// How long a request may take to be counted that came with the last connection.
const LAST_ARRIVALS: Duration = Duration::from_millis(100);

impl Kas {
    /// Serves until `leave` resolves, then drains and returns. If `hurry` resolves meanwhile, open requests
    /// end at once.
    pub async fn run(self, leave: impl Future<Output = ()>, hurry: impl Future<Output = ()>) {
        let Self { config, addresses, mut parts, mut admin, started, synced, requests, lifecycle } = self;
        let show = |address: Option<SocketAddr>, listen: &kas_config::Listen| {
            address.map_or_else(|| listen.address.clone(), |address| address.to_string())
        };
        tracing::info!(
            version = version::VERSION,
            commit = version::COMMIT,
            agent = show(addresses.agent, &config.agent.listen.listen),
            api = show(addresses.api, &config.api.listen.listen),
            kubernetes = config
                .agent
                .kubernetes_api
                .as_ref()
                .map(|section| show(addresses.kubernetes, &section.listen)),
            direct = config.direct.as_ref().map(|section| show(addresses.direct, &section.listen)),
            hooks = config.hooks.as_ref().map(|section| show(addresses.hooks, &section.listen)),
            private = addresses.private.map(|address| address.to_string()),
            observability = show(addresses.observability, &config.observability.listen),
            "kas is serving"
        );
        let running = parts.start(&lifecycle);
        // It is set only here.
        let _ = started.set(synced);
        leave.await;
        let drain = async {
            tracing::info!(delay = ?config.drain.delay, "draining: not ready, but still serving");
            lifecycle.advance(Phase::Draining);
            parts.drain();
            tokio::time::sleep(config.drain.delay).await;
            lifecycle.advance(Phase::Leaving);
            tracing::info!(requests = requests.requests_open.get(), "leaving: open requests go on");
            let left = Instant::now();
            // A balancer may send new connections until they are refused. The last of them need time, too.
            none_left(&requests.requests_open, left + config.drain.timeout / 2).await;
            lifecycle.advance(Phase::Closing);
            tokio::time::sleep(LAST_ARRIVALS).await;
            none_left(&requests.requests_open, left + config.drain.timeout).await;
            let long = requests.requests_long.get();
            if long > 0 && config.drain.upgrade_grace > config.drain.timeout {
                let others = requests.requests_open.get() - long;
                tracing::info!(
                    upgraded = long,
                    requests = others,
                    grace = ?config.drain.upgrade_grace,
                    "drain timeout exceeded: upgraded connections go on, other open requests end with UNAVAILABLE"
                );
                parts.linger();
                lifecycle.advance(Phase::Lingering);
                none_left(&requests.requests_long, left + config.drain.upgrade_grace + UPGRADES_END).await;
            }
        };
        let hurried = tokio::select! {
            () = drain => false,
            () = hurry => true,
        };
        let open = requests.requests_open.get();
        if hurried && open > 0 {
            tracing::warn!(requests = open, "second shutdown signal: open requests end with UNAVAILABLE");
        } else if hurried {
            tracing::warn!("second shutdown signal: exiting now");
        } else if open > 0 {
            tracing::warn!(requests = open, "drain timeout exceeded: open requests end with UNAVAILABLE");
        }
        // The other replicas are informed first. Otherwise agents whose streams end could reconnect here
        // meanwhile.
        parts.farewell().await;
        parts.end();
        lifecycle.advance(Phase::Stopped);
        running.servers().await;
        // After the last requests, and before metrics stop, so that lost records and spans are counted.
        parts.finish().await;
        // Probes are answered until the end.
        let _ = (&mut admin.0).await;
        drop(running);
        tracing::info!("kas has stopped");
    }
}

/// Waits until a gauge of requests is 0, or for the given time.
async fn none_left(requests: &Gauge, until: Instant) {
    while requests.get() > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
