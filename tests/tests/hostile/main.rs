//! Hostile peers at every door of kas, as tables: what each attack is, and what must become of it.
//!
//! Good requests go on all the time and must all be answered; after each group of attacks kas holds what it
//! held before, and has not panicked.

#![allow(clippy::unwrap_used)] // a test may panic

mod bench;
mod callers;
mod files;
mod gossip;
mod http2;
mod measured;
mod observability;
mod peer;
mod stage;
mod tls;
mod tunnels;
mod websocket;

use anyhow::Result;

use crate::{
    bench::Origin::{Callers, Elsewhere, Everywhere},
    stage::{Door, Kind, Stage},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_without_tls_do_not_affect_other_requests() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    http2::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_inside_tls_do_not_affect_other_requests() -> Result<()> {
    let stage = Stage::start(Kind::Tls).await?;
    http2::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_inside_websocket_do_not_affect_other_requests() -> Result<()> {
    let stage = Stage::start(Kind::WebSocket).await?;
    http2::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnel_protocol_violations_do_not_affect_other_requests() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    tunnels::all_of_them(&stage).await?;
    Ok(())
}

#[tokio::test]
async fn data_before_the_token_is_verified_is_bounded() -> Result<()> {
    tunnels::small_pieces_before_the_token_is_known().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_requests_of_callers_and_replicas_are_refused_individually() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    callers::all(&stage).await?;
    gossip::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_handshakes_do_not_affect_other_requests() -> Result<()> {
    let stage = Stage::start(Kind::Tls).await?;
    tls::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_violations_are_closed_with_the_right_code() -> Result<()> {
    let stage = Stage::start(Kind::WebSocket).await?;
    websocket::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_during_attacks_on_their_port() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    observability::all(&stage).await?;
    Ok(())
}

#[tokio::test]
async fn kas_without_descriptors_serves_open_connections_and_accepts_again_later() -> Result<()> {
    files::none_left().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn valid_requests_during_a_thousand_attacks_without_tls() -> Result<()> {
    bench::table(
        Kind::Plain,
        &[(Door::Agent, Elsewhere), (Door::Api, Elsewhere), (Door::Api, Everywhere), (Door::Api, Callers)],
    )
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some seconds and asserts nothing about times: --ignored --nocapture"]
async fn a_thousand_agents_connect_at_once() -> Result<()> {
    bench::storms(Kind::Plain, Door::Agent).await?;
    bench::storms(Kind::Tls, Door::AgentTls).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn valid_requests_during_a_thousand_attacks_inside_tls() -> Result<()> {
    bench::table(Kind::Tls, &[(Door::AgentTls, Elsewhere)]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn valid_requests_during_a_thousand_attacks_inside_websocket() -> Result<()> {
    bench::table(Kind::WebSocket, &[(Door::AgentWebSocket, Elsewhere)]).await
}

/// Not a test: what the measurements start beside themselves.
#[tokio::test]
#[ignore = "the measurements start it"]
async fn process_of_the_attackers() -> Result<()> {
    bench::attack().await
}
