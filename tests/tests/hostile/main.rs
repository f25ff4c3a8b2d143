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
async fn http2_attacks_on_plain_doors_harm_nobody_else() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    http2::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_inside_tls_harm_nobody_else() -> Result<()> {
    let stage = Stage::start(Kind::Tls).await?;
    http2::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_inside_websocket_harm_nobody_else() -> Result<()> {
    let stage = Stage::start(Kind::WebSocket).await?;
    http2::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_that_break_the_protocol_of_tunnels_harm_nobody_else() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    tunnels::all_of_them(&stage).await?;
    Ok(())
}

#[tokio::test]
async fn what_comes_before_the_token_is_known_does_not_pile_up() -> Result<()> {
    tunnels::small_pieces_before_the_token_is_known().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_and_replicas_that_send_anything_are_refused_one_by_one() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    callers::all(&stage).await?;
    gossip::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_get_nowhere_harm_nobody_else() -> Result<()> {
    let stage = Stage::start(Kind::Tls).await?;
    tls::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_that_breaks_its_rules_is_closed_with_the_right_code() -> Result<()> {
    let stage = Stage::start(Kind::WebSocket).await?;
    websocket::all(&stage).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_whatever_else_comes_to_their_port() -> Result<()> {
    let stage = Stage::start(Kind::Plain).await?;
    observability::all(&stage).await?;
    Ok(())
}

#[tokio::test]
async fn kas_without_descriptors_serves_what_is_open_and_accepts_again_later() -> Result<()> {
    files::none_left().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn good_requests_beside_a_thousand_bad_connections_at_plain_doors() -> Result<()> {
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
async fn good_requests_beside_a_thousand_bad_connections_inside_tls() -> Result<()> {
    bench::table(Kind::Tls, &[(Door::AgentTls, Elsewhere)]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn good_requests_beside_a_thousand_bad_connections_inside_websocket() -> Result<()> {
    bench::table(Kind::WebSocket, &[(Door::AgentWebSocket, Elsewhere)]).await
}

/// Not a test: what the measurements start beside themselves.
#[tokio::test]
#[ignore = "the measurements start it"]
async fn attackers_in_a_process_of_their_own() -> Result<()> {
    bench::attack().await
}
