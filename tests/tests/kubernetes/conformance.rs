//! Generated requests through the endpoint, compared with direct ones to the same server: for agentk of this
//! project, and for agents of the forms 16.5 and 14.1.
//!
//! Each test prints its first seed. `KAS_CONFORMANCE_SEED` repeats a run, `KAS_CONFORMANCE_CASES` sets the
//! number of requests of each test.

use std::env;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    conformance::{self, Backend, Cases, Endpoint},
    endpoint::{self, JANE},
    http_agent::HttpAgent,
    kas::token,
    raw_agent::Kind,
};

use crate::setup::AGENT;

/// Takes a few seconds.
const CASES: u64 = 2_000;

/// A kas with the endpoint, and the server of the requests.
struct Stage {
    served: endpoint::Endpoint,
    backend: Backend,
}

impl Stage {
    async fn start() -> Result<Self> {
        let served = endpoint::Endpoint::start(json!({})).await?;
        Ok(Self { served, backend: Backend::start().await? })
    }

    /// Fails with all differences, if there are any.
    async fn conforms(&self, form: Kind) -> Result<()> {
        let number = |name: &str| -> Result<Option<u64>> {
            let Ok(text) = env::var(name) else { return Ok(None) };
            Ok(Some(text.parse().with_context(|| format!("{name}={text}: not a number"))?))
        };
        let first = number("KAS_CONFORMANCE_SEED")?.unwrap_or_else(|| u64::from(rand::random::<u32>()));
        let count = number("KAS_CONFORMANCE_CASES")?.unwrap_or(CASES);
        println!("KAS_CONFORMANCE_SEED={first}, {count} requests");
        let endpoint = Endpoint { address: self.served.address, agent: AGENT, form, token: JANE.to_owned() };
        let differences = conformance::run(&self.backend, &endpoint, Cases { first, count }).await;
        ensure!(
            differences.is_empty(),
            "KAS_CONFORMANCE_SEED={first}: {} differences\n\n{}",
            differences.len(),
            differences.join("\n\n")
        );
        // Nothing is left of all requests.
        self.served.kas.metric_is("kas_kubernetes_open{kind=\"short\"}", 0.0).await?;
        self.served.kas.metric_is("kas_requests_open", 0.0).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_through_our_agentk_are_like_direct_ones() -> Result<()> {
    let stage = Stage::start().await?;
    let url = format!("http://{}", stage.backend.address());
    let agentk = Agentk::start_with(stage.served.kas.agent, &token(AGENT), &url).await?;
    agentk.connected().await?;
    stage.conforms(Kind::Ours).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_through_an_agent_of_16_5_are_like_direct_ones() -> Result<()> {
    let stage = Stage::start().await?;
    let _agent =
        HttpAgent::start(stage.served.kas.agent, &token(AGENT), Kind::Recent, stage.backend.address())
            .await?;
    stage.conforms(Kind::Recent).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_through_an_agent_of_14_1_are_like_direct_ones() -> Result<()> {
    let stage = Stage::start().await?;
    let _agent =
        HttpAgent::start(stage.served.kas.agent, &token(AGENT), Kind::Old, stage.backend.address()).await?;
    stage.conforms(Kind::Old).await
}
