//! The servers of the listeners: their protocols, limits and the age of their connections.

use std::{sync::Arc, time::Duration};

use kas_config::Config;
use net::{
    http::{AGENT, API, Age, PEER, Protocols, Server, Service},
    io::{Address, Listener},
    tls,
};

use super::StartError;
use crate::listener::{agent::AgentListener, api::ApiListener, private::PrivateListener};

/// GOAWAY is sent at this share of the maximum age of an agent's connection, so that two long calls fit below
/// it, as in 14.1.
const AGENT_AGE_SHARE: f64 = 0.35;
/// The same for the connections of callers.
pub(super) const API_AGE_SHARE: f64 = 0.8;
/// Pings of another replica that are accepted at once, and the time after which one more is. A replica sends
/// one every 3 s.
const PEER_PINGS: (u32, Duration) = (50, Duration::from_secs(1));

/// Binds the port of a listener.
///
/// # Errors
/// If that fails.
pub(super) async fn bind(section: &'static str, listen: &kas_config::Listen) -> Result<Listener, StartError> {
    let text = listen.address.clone();
    let address = match listen.network {
        kas_config::Network::Tcp => Address::Tcp(text),
        kas_config::Network::Tcp4 => Address::Tcp4(text),
        kas_config::Network::Tcp6 => Address::Tcp6(text),
        kas_config::Network::Unix => Address::Unix(text.into()),
    };
    Listener::bind(&address).await.map_err(|source| StartError::Bind {
        section,
        address: address.to_string(),
        source,
    })
}

pub(super) fn agent(
    config: &Config,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    service: Arc<AgentListener>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: if config.agent.listen.websocket { Protocols::WebSocket } else { Protocols::Http2 },
        settings: config.limits.agents.of(AGENT),
        limits: config.limits.connections,
        age: Some(Age {
            age: config.agent.listen.max_connection_age.mul_f64(AGENT_AGE_SHARE),
            grace: config.agent.listen.max_connection_age_grace,
        }),
        service,
    }
}

pub(super) fn api(
    config: &Config,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    service: Arc<ApiListener>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: Protocols::Http2,
        settings: config.limits.callers.of(API),
        limits: config.limits.connections,
        age: Some(Age { age: config.api.listen.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
        service,
    }
}

pub(super) fn private(
    config: &Config,
    private_api: &kas_config::PrivateApi,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    service: Arc<PrivateListener>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: Protocols::Http2,
        settings: PEER,
        limits: net::http::Limits {
            pings: PEER_PINGS.0,
            ping_interval: PEER_PINGS.1,
            ..config.limits.connections
        },
        // After GOAWAY, a peer opens another link. Open requests stay on the old one.
        age: Some(Age { age: private_api.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
        service,
    }
}

/// A server for HTTP clients that ask kas itself: senders of webhooks, and proxies. `streams`: the open
/// streams of one connection, and those that kas may have to reset.
pub(super) fn http(
    config: &Config,
    listener: Listener,
    tls: Option<tls::Live<rustls::ServerConfig>>,
    streams: (u32, u32),
    service: Arc<dyn Service>,
) -> Server {
    Server {
        listener,
        tls,
        protocols: Protocols::Http1And2,
        settings: API.with_streams(streams.0, streams.1),
        limits: config.limits.connections,
        age: Some(Age { age: config.api.listen.max_connection_age.mul_f64(API_AGE_SHARE), grace: None }),
        service,
    }
}
