//! What most tests begin with: one kas, a caller that is connected to it, and perhaps one agent.
//!
//! A test takes it apart: `let Scenario { kas, caller, agent } = Scenario::start().await?.agentk().await?;`.
//! For several replicas see [`mesh`](crate::mesh).

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::time::Instant;

use crate::{
    agentk::Agentk,
    bench,
    caller::Caller,
    kas::{Kas, Options, token},
    process::SOON,
    raw_agent::{Kind, RawAgent, ServingAgent},
};

/// One kas, one caller, and an agent with id 1 of the kind that the test asked for.
#[derive(Debug)]
pub struct Scenario<A = ()> {
    /// The process.
    pub kas: Kas,
    /// A connection to its API listener.
    pub caller: Caller,
    /// The agent.
    pub agent: A,
}

impl Scenario {
    /// Starts kas with agents 1 and 2 in its identity file, and connects a caller.
    ///
    /// # Errors
    /// When kas does not start.
    pub async fn start() -> Result<Self> {
        Self::start_with(Options::default()).await
    }

    /// Like [`start`](Self::start), with `config` merged over the defaults of [`Options`].
    ///
    /// # Errors
    /// When kas does not start.
    pub async fn start_with_config(config: Value) -> Result<Self> {
        Self::start_with(Options { config, ..Options::default() }).await
    }

    /// Starts kas with these options, and connects a caller.
    ///
    /// # Errors
    /// When kas does not start.
    pub async fn start_with(options: Options) -> Result<Self> {
        let kas = Kas::start_with(options).await?;
        let caller = kas.caller().await?;
        Ok(Self { kas, caller, agent: () })
    }

    /// Adds a real agentk, and waits until it is connected.
    ///
    /// # Errors
    /// When it does not connect.
    pub async fn agentk(self) -> Result<Scenario<Agentk>> {
        let agentk = Agentk::start(self.kas.agent, &token(1)).await?;
        agentk.connected().await?;
        Ok(self.with(agentk))
    }

    /// Adds an agent without tunnels, which the test controls.
    ///
    /// # Errors
    /// When kas cannot be reached.
    pub async fn raw_agent(self, kind: Kind) -> Result<Scenario<RawAgent>> {
        let agent = RawAgent::connect(self.kas.agent, &token(1), kind).await?;
        Ok(self.with(agent))
    }

    /// Adds an agent of the test with this many tunnels that [serve](crate::handler).
    ///
    /// # Errors
    /// When kas refuses it.
    pub async fn serving_agent(self, kind: Kind, tunnels: usize) -> Result<Scenario<ServingAgent>> {
        let agent = ServingAgent::connect(self.kas.agent, &token(1), kind, tunnels).await?;
        Ok(self.with(agent))
    }

    fn with<A>(self, agent: A) -> Scenario<A> {
        Scenario { kas: self.kas, caller: self.caller, agent }
    }
}

/// Sends requests to agent 1 for at least 4 s, until it has connected three times, while a stream through it
/// stays open.
///
/// # Errors
/// When a request fails, the agent connects less often, or the stream ends.
pub async fn requests_while_the_agent_moves(caller: &Caller, connections: impl Fn() -> usize) -> Result<()> {
    let mut open = bench::hold(caller, 1).await?;
    let begun = Instant::now();
    let mut served = 0;
    // Longer on a slow machine.
    while begun.elapsed() < Duration::from_secs(4) || connections() < 3 && begun.elapsed() < SOON {
        bench::echo(caller, 1, "x").await.with_context(|| format!("after {:?}", begun.elapsed()))?;
        served += 1;
    }
    let connections = connections();
    println!("{served} requests, {connections} connections");
    ensure!(connections >= 3, "the agent connected {connections} times");
    let still_open = tokio::time::timeout(Duration::from_millis(50), open.next()).await.is_err();
    ensure!(still_open, "a busy stream was cut because of its connection's age");
    Ok(())
}
