//! `Static`: addresses and names in one list.

use std::{collections::HashSet, net::SocketAddr};

use async_trait::async_trait;
use discovery::{
    Discovery, HostPort, Static,
    contract::{self, Source},
};
use tokio::sync::watch;

use crate::{
    INTERVAL, Running,
    name_server::{Mode, NameServer},
};

fn list(server: &NameServer, entries: &[&str]) -> Static {
    let entries = entries.iter().map(|entry| entry.parse::<HostPort>().unwrap());
    Static::new(entries).nameserver(server.address).interval(INTERVAL)
}

struct Names {
    server: NameServer,
    no_connections: watch::Sender<usize>,
}

#[async_trait]
impl Source for Names {
    async fn discovery(&self) -> Box<dyn Discovery> {
        Box::new(list(&self.server, &["kas.test.:8150"]))
    }

    async fn know(&self, seeds: &HashSet<SocketAddr>) {
        let ips: Vec<String> = seeds.iter().map(|seed| seed.ip().to_string()).collect();
        self.server.set_addresses("kas.test.", &ips.iter().map(String::as_str).collect::<Vec<_>>());
    }

    async fn fail(&self) {
        self.server.set_mode(Mode::ServFail);
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
async fn keeps_the_contract() {
    contract::check(&Names { server: NameServer::start().await, no_connections: watch::Sender::default() })
        .await;
}

#[tokio::test]
async fn addresses_need_no_name_server() {
    let server = NameServer::start().await;
    let mut running = Running::start(list(&server, &["10.0.0.1:1", "[fd00::1]:2", "10.0.0.1:1"]));
    running.publishes(&["10.0.0.1:1", "[fd00::1]:2"]).await;
    running.works().await;
    running.stays().await;
    assert_eq!(server.questions(), []);
}

#[tokio::test]
async fn an_empty_list_is_an_answer() {
    let mut running = Running::start(Static::new([]));
    running.works().await;
    assert!(running.seeds.borrow().is_empty());
}

#[tokio::test]
async fn a_name_that_fails_neither_hides_addresses_nor_other_names() {
    let server = NameServer::start().await;
    server.set_addresses("a.test.", &["10.0.0.2"]);
    let mut running = Running::start(list(&server, &["10.0.0.1:1", "a.test.:2", "b.test.:3", "a.test.:4"]));
    running.publishes(&["10.0.0.1:1", "10.0.0.2:2", "10.0.0.2:4"]).await;
    running.fails_with("b.test. has no addresses").await;

    server.set_addresses("a.test.", &["10.0.0.3"]);
    running.publishes(&["10.0.0.1:1", "10.0.0.3:2", "10.0.0.3:4"]).await;
    server.set_addresses("b.test.", &["10.0.0.9"]);
    running.publishes(&["10.0.0.1:1", "10.0.0.3:2", "10.0.0.3:4", "10.0.0.9:3"]).await;
    running.works().await;
}
