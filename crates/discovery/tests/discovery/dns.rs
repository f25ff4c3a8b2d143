//! `Dns`: records, times to live, and failing name servers.

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use async_trait::async_trait;
use discovery::{
    Discovery, Dns, FailureKind,
    contract::{self, Source},
};
use hickory_resolver::proto::rr::RecordType;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::{
    INTERVAL, Running, SOON, log,
    name_server::{Mode, NameServer},
};

fn dns(server: &NameServer) -> Dns {
    Dns::addresses("kas.test.", 8150).unwrap().nameserver(server.address).interval(INTERVAL)
}

fn srv(server: &NameServer) -> Dns {
    Dns::srv("_gossip._udp.kas.test.").unwrap().nameserver(server.address).interval(INTERVAL)
}

/// A source for the contract. `failing` is how it fails.
struct Names {
    server: NameServer,
    failing: Mode,
    service: bool,
    no_connections: watch::Sender<usize>,
}

impl Names {
    async fn start(failing: Mode, service: bool) -> Self {
        Self { server: NameServer::start().await, failing, service, no_connections: watch::Sender::default() }
    }
}

#[async_trait]
impl Source for Names {
    async fn discovery(&self) -> Box<dyn Discovery> {
        Box::new(if self.service { srv(&self.server) } else { dns(&self.server) })
    }

    async fn know(&self, seeds: &HashSet<SocketAddr>) {
        let ips: Vec<String> = seeds.iter().map(|seed| seed.ip().to_string()).collect();
        let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
        self.server.set_addresses("kas.test.", &ips);
        if self.service {
            self.server.set_services("_gossip._udp.kas.test.", &[("kas.test.", 8150)]);
        }
    }

    async fn fail(&self) {
        self.server.set_mode(self.failing);
    }

    async fn recover(&self) {
        self.server.set_mode(Mode::Answer);
    }

    fn asked(&self) -> watch::Receiver<u64> {
        self.server.asked()
    }

    fn connections(&self) -> watch::Receiver<usize> {
        self.no_connections.subscribe()
    }
}

#[tokio::test]
async fn keeps_the_contract_while_the_server_fails() {
    contract::check(&Names::start(Mode::ServFail, false).await).await;
}

#[tokio::test]
async fn keeps_the_contract_while_the_server_is_silent() {
    contract::check(&Names::start(Mode::Silent, false).await).await;
}

#[tokio::test]
async fn keeps_the_contract_while_the_name_is_gone() {
    contract::check(&Names::start(Mode::NoNames, false).await).await;
}

#[tokio::test]
async fn srv_keeps_the_contract() {
    contract::check(&Names::start(Mode::ServFail, true).await).await;
}

#[tokio::test]
async fn a_name_without_addresses_keeps_the_last_ones() {
    let server = NameServer::start().await;
    server.set_addresses("kas.test.", &["10.0.0.1", "fd00::1"]);
    let mut running = Running::start(dns(&server));
    running.publishes(&["10.0.0.1:8150", "[fd00::1]:8150"]).await;

    server.set_addresses("kas.test.", &[]);
    running.fails_with("kas.test. has no addresses").await;
    assert_eq!(running.health.borrow().failure.as_ref().unwrap().kind, FailureKind::Empty);
    running.stays().await;

    // One family alone is an answer.
    server.set_addresses("kas.test.", &["fd00::2"]);
    running.publishes(&["[fd00::2]:8150"]).await;
    running.works().await;
}

#[tokio::test]
async fn a_family_that_is_never_answered_does_not_hide_the_other() {
    let server = NameServer::start().await;
    server.set_addresses("kas.test.", &["10.0.0.1", "fd00::1"]);
    let mut running = Running::start(dns(&server));
    running.publishes(&["10.0.0.1:8150", "[fd00::1]:8150"]).await;

    server.never_answer_for_ipv6();
    server.set_addresses("kas.test.", &["10.0.0.2"]);
    running.publishes(&["10.0.0.2:8150", "[fd00::1]:8150"]).await;
    running.works().await;
}

#[tokio::test]
async fn an_answer_too_large_for_udp_comes_over_tcp() {
    let server = NameServer::start().await;
    let many: Vec<String> = (0..1000).map(|i| format!("10.1.{}.{}", i / 250, i % 250)).collect();
    server.set_addresses("kas.test.", &many.iter().map(String::as_str).collect::<Vec<_>>());
    let mut running = Running::start(dns(&server));
    let many: Vec<String> = many.iter().map(|ip| format!("{ip}:8150")).collect();
    running.publishes(&many.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let asked = server.questions();
    assert!(asked.iter().any(|asked| asked.tcp && asked.record_type == RecordType::A), "{asked:?}");
}

#[tokio::test]
async fn an_alias_is_followed() {
    let server = NameServer::start().await;
    server.set_alias("kas.test.", "real.test.");
    server.set_addresses("real.test.", &["10.0.0.1"]);
    Running::start(dns(&server)).publishes(&["10.0.0.1:8150"]).await;
}

#[tokio::test]
async fn names_of_the_hosts_file_need_no_name_server() {
    let server = NameServer::start().await;
    server.set_mode(Mode::Silent);
    let local = || Dns::addresses("localhost", 8150).unwrap();
    // Also with the configuration of the system, whose servers a test must not query.
    for local in [local().nameserver(server.address), local()] {
        let mut running = Running::start(local);
        let here = "127.0.0.1:8150".parse().unwrap();
        let wait = async { running.seeds.wait_for(|seeds| seeds.contains(&here)).await.map(drop) };
        timeout(SOON, wait).await.expect("localhost is found").unwrap();
        running.works().await;
    }
    assert_eq!(server.questions(), []);
}

#[tokio::test]
async fn records_are_looked_up_again_when_their_time_to_live_ends() {
    let server = NameServer::start().await;
    server.set_ttl(1);
    server.set_addresses("kas.test.", &["10.0.0.1"]);
    let began = Instant::now();
    let mut running = Running::start(dns(&server).interval(Duration::from_secs(3600)));
    running.publishes(&["10.0.0.1:8150"]).await;
    server.set_addresses("kas.test.", &["10.0.0.2"]);
    running.publishes(&["10.0.0.2:8150"]).await;
    assert!(began.elapsed() > Duration::from_millis(700), "asked in a loop");
}

#[tokio::test]
async fn the_interval_limits_longer_times_to_live() {
    let server = NameServer::start().await;
    server.set_ttl(3600);
    server.set_addresses("kas.test.", &["10.0.0.1"]);
    let mut running = Running::start(dns(&server));
    running.publishes(&["10.0.0.1:8150"]).await;
    server.set_addresses("kas.test.", &["10.0.0.2"]);
    running.publishes(&["10.0.0.2:8150"]).await;
}

#[tokio::test]
async fn srv_records_contain_the_ports() {
    let server = NameServer::start().await;
    server.set_services("_gossip._udp.kas.test.", &[("a.test.", 8150), ("b.test.", 9000), (".", 1)]);
    server.set_addresses("a.test.", &["10.0.0.1", "fd00::1"]);
    server.set_addresses("b.test.", &["10.0.0.2"]);
    let mut running = Running::start(srv(&server));
    running.publishes(&["10.0.0.1:8150", "[fd00::1]:8150", "10.0.0.2:9000"]).await;

    // A target that is no longer in a record is removed; one in a record without addresses counts as
    // unanswered.
    server.set_services("_gossip._udp.kas.test.", &[("b.test.", 9001), ("c.test.", 7)]);
    running.publishes(&["10.0.0.2:9001"]).await;
    running.fails_with("c.test. has no addresses").await;
    server.set_addresses("c.test.", &["10.0.0.3"]);
    running.publishes(&["10.0.0.2:9001", "10.0.0.3:7"]).await;
    running.works().await;
}

#[tokio::test]
async fn addresses_sent_with_srv_records_are_not_looked_up() {
    let server = NameServer::start().await;
    server.send_addresses_along();
    server.set_services("_gossip._udp.kas.test.", &[("a.test.", 8150)]);
    server.set_addresses("a.test.", &["10.0.0.1", "fd00::1"]);
    let mut running = Running::start(srv(&server));
    running.publishes(&["10.0.0.1:8150", "[fd00::1]:8150"]).await;
    let asked = server.questions();
    assert!(asked.iter().all(|asked| asked.record_type == RecordType::SRV), "{asked:?}");
}

#[tokio::test]
async fn changes_and_failures_are_logged_once() {
    let log = log::collect();
    let server = NameServer::start().await;
    server.set_addresses("kas.test.", &["10.0.0.1"]);
    let mut running = Running::start(dns(&server));
    running.publishes(&["10.0.0.1:8150"]).await;
    server.set_addresses("kas.test.", &["10.0.0.2"]);
    running.publishes(&["10.0.0.2:8150"]).await;
    let changes = log.lines("seeds changed");
    assert_eq!(changes.len(), 2, "{changes:?}");
    assert!(changes[1].contains("added=[10.0.0.2:8150] removed=[10.0.0.1:8150]"), "{changes:?}");

    server.set_mode(Mode::ServFail);
    running.fails_with("Server Failure").await;
    // Several more lookups fail.
    let mut asked = server.asked();
    let until = *asked.borrow_and_update() + 50;
    timeout(SOON, asked.wait_for(|asked| *asked >= until)).await.expect("it is asked again").unwrap();
    let failures = log.lines("lookup failed");
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].contains("could not look up kas.test.: DNS error: error response"), "{failures:?}");
    assert!(failures[0].contains("kept=1"), "{failures:?}");

    server.set_mode(Mode::Answer);
    running.works().await;
    assert_eq!(log.lines("lookups work again").len(), 1);
}

#[test]
fn invalid_names_are_refused() {
    for bad in ["", ".", "a..b", &"x".repeat(64)] {
        assert!(Dns::addresses(bad, 1).is_err(), "{bad:?}");
        assert!(Dns::srv(bad).is_err(), "{bad:?}");
    }
}
