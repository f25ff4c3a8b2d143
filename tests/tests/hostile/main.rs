//! Hostile peers at every listener of kas, as tables of attacks and expected results.
//!
//! Valid requests continue meanwhile and must all succeed. After each group of attacks, kas must use the same
//! resources as before, and must not have panicked.

#![allow(clippy::unwrap_used)] // a test may panic

mod bench;
mod callers;
mod endpoint;
mod files;
mod gossip;
mod http2;
mod measured;
mod observability;
mod peer;
mod target;
mod tls;
mod tunnels;
mod websocket;

use anyhow::Result;

use crate::{
    bench::Origin::{Callers, Elsewhere, Everywhere},
    target::{Kind, Listener, Target},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_without_tls_do_not_affect_other_requests() -> Result<()> {
    let target = Target::start(Kind::Plain).await?;
    http2::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_inside_tls_do_not_affect_other_requests() -> Result<()> {
    let target = Target::start(Kind::Tls).await?;
    http2::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_attacks_inside_websocket_do_not_affect_other_requests() -> Result<()> {
    let target = Target::start(Kind::WebSocket).await?;
    http2::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnel_protocol_violations_do_not_affect_other_requests() -> Result<()> {
    let target = Target::start(Kind::Plain).await?;
    tunnels::all_of_them(&target).await?;
    Ok(())
}

#[tokio::test]
async fn data_before_the_token_is_verified_is_bounded() -> Result<()> {
    tunnels::small_pieces_before_the_token_is_known().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_requests_of_callers_and_replicas_are_refused_individually() -> Result<()> {
    let target = Target::start(Kind::Plain).await?;
    callers::all(&target).await?;
    gossip::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_handshakes_do_not_affect_other_requests() -> Result<()> {
    let target = Target::start(Kind::Tls).await?;
    tls::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_violations_are_closed_with_the_right_code() -> Result<()> {
    let target = Target::start(Kind::WebSocket).await?;
    websocket::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_during_attacks_on_their_port() -> Result<()> {
    let target = Target::start(Kind::Plain).await?;
    observability::all(&target).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_requests_to_the_endpoint_are_read_in_one_way() -> Result<()> {
    endpoint::by_http1::all().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_requests_to_the_endpoint_become_no_others() -> Result<()> {
    endpoint::by_http2::all().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_the_endpoint_without_a_valid_token_are_closed() -> Result<()> {
    endpoint::connections_without_a_valid_token_are_closed().await
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
        &[
            (Listener::Agent, Elsewhere),
            (Listener::Api, Elsewhere),
            (Listener::Api, Everywhere),
            (Listener::Api, Callers),
        ],
    )
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some seconds and asserts nothing about times: --ignored --nocapture"]
async fn a_thousand_agents_connect_at_once() -> Result<()> {
    bench::storms(Kind::Plain, Listener::Agent).await?;
    bench::storms(Kind::Tls, Listener::AgentTls).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn valid_requests_during_a_thousand_attacks_inside_tls() -> Result<()> {
    bench::table(Kind::Tls, &[(Listener::AgentTls, Elsewhere)]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes and asserts nothing about times: --ignored --nocapture"]
async fn valid_requests_during_a_thousand_attacks_inside_websocket() -> Result<()> {
    bench::table(Kind::WebSocket, &[(Listener::AgentWebSocket, Elsewhere)]).await
}

/// Not a test: the measurements start it as a separate process.
#[tokio::test]
#[ignore = "the measurements start it"]
async fn process_of_the_attackers() -> Result<()> {
    bench::attack().await
}
