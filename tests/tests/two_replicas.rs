//! Replicas behind one address: real kas, real agentk, and a round-robin load balancer.
//!
//! The behaviour over minutes is tested with a paused clock in `crates/agentk/tests/two_replicas.rs`.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use testkit::{
    agentk::Agentk,
    bench::echo,
    kas::{Kas, Options, token},
    raw_agent::{Kind, RawAgent},
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::Instant,
};

/// Forwards each connection to the next of several addresses.
struct Balancer {
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Balancer {
    async fn start(to: Vec<SocketAddr>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut agent, _)) = listener.accept().await {
                let to = to[count.fetch_add(1, Ordering::Relaxed) % to.len()];
                connections.spawn(async move {
                    if let Ok(mut kas) = TcpStream::connect(to).await {
                        let _ = (agent.set_nodelay(true), kas.set_nodelay(true));
                        let _ = tokio::io::copy_bidirectional(&mut agent, &mut kas).await;
                    }
                });
            }
        });
        Ok(Self { address, accepted, _tasks: tasks })
    }
}

#[tokio::test]
async fn agentk_keeps_one_connection_to_a_single_replica_and_connects_to_the_next_at_once() -> Result<()> {
    // Two replicas that do not know each other: each reports a single replica.
    let options = Options::default();
    let kas = [Kas::start_with(options.clone()).await?, Kas::start_with(options).await?];
    let balancer = Balancer::start(kas.iter().map(|kas| kas.agent).collect()).await?;
    let agentk = Agentk::start(balancer.address, &token(1)).await?;
    agentk.connected().await?;
    echo(&kas[0].caller().await?, 1, "hello").await?;
    for (name, value) in [
        ("agentk_replicas_served", 1.0),
        ("agentk_replicas_wanted", 1.0),
        ("agentk_connections{state=\"Serving\"}", 1.0),
    ] {
        agentk.metric_is(name, value).await?;
    }
    // The absence cannot be observed directly: a second connection would have been dialled within 100 ms.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(balancer.accepted.load(Ordering::Relaxed), 1);
    let since = Instant::now();
    kas[0].process.kill();
    echo(&kas[1].caller().await?, 1, "hello").await?;
    // Before a waiting request without a deadline fails, which would be after 20 s.
    println!("it was reached {:?} after the other was killed", since.elapsed());
    assert_eq!(balancer.accepted.load(Ordering::Relaxed), 2);
    agentk.metric_is("agentk_replicas_served", 1.0).await
}

#[tokio::test]
async fn probe_connections_leave_no_agent_or_tunnel_in_kas() -> Result<()> {
    let kas = Kas::start().await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    let mut names = Vec::new();
    for _ in 0..50 {
        let asks = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
        let mut configuration = asks.configuration("").await?;
        let (_, headers) = configuration.stream().head().await.expect("a response");
        assert!(!headers["kas-replicas"].is_empty());
        names.push(headers["kas-replica"].clone());
        configuration.stream().reset(h2::Reason::CANCEL);
    }
    names.dedup();
    assert_eq!(names.len(), 1, "a replica has one name: {names:?}");
    kas.metric_is("kas_agent_transports", 1.0).await?;
    kas.metric_is("kas_connected_agents", 1.0).await?;
    echo(&kas.caller().await?, 1, "hello").await?;
    let (_, metrics) = kas.get("/metrics").await?;
    for line in metrics.lines().filter(|line| line.starts_with("kas_refusals_total")) {
        assert!(line.ends_with(" 0"), "{line}");
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}
