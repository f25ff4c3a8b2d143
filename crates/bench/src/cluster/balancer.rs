//! A load balancer between agentk and the replicas.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use super::deployment::{Deployment, is_ready};

/// Interval of the readiness probes.
const PROBE: Duration = Duration::from_millis(100);

/// A TCP load balancer: round robin over the replicas that are ready.
pub(super) struct Balancer {
    pub(super) address: SocketAddr,
    ready: Vec<Arc<AtomicBool>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Balancer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Balancer {
    /// Starts a load balancer for the agent listeners.
    pub(super) async fn start(deployment: &Deployment<'_>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let mut tasks = Vec::new();
        let mut ready = Vec::new();
        for replica in &deployment.replicas {
            let flag = Arc::new(AtomicBool::new(true));
            ready.push(Arc::clone(&flag));
            let observability = replica.at.observability;
            tasks.push(tokio::spawn(async move {
                loop {
                    flag.store(is_ready(observability).await, Ordering::Relaxed);
                    sleep(PROBE).await;
                }
            }));
        }
        let backends: Arc<[_]> =
            deployment.replicas.iter().map(|replica| replica.at.agents).zip(ready.clone()).collect();
        tasks.push(tokio::spawn(async move {
            let counter = Arc::new(AtomicUsize::new(0));
            let mut open = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let (backends, counter) = (Arc::clone(&backends), Arc::clone(&counter));
                open.spawn(async move {
                    for _ in 0..2 * backends.len() {
                        let next = counter.fetch_add(1, Ordering::Relaxed) % backends.len();
                        let (backend, ready) = &backends[next];
                        if !ready.load(Ordering::Relaxed) {
                            continue;
                        }
                        if let Ok(mut server) = TcpStream::connect(backend).await {
                            let _ = client.set_nodelay(true);
                            let _ = server.set_nodelay(true);
                            let _ = copy_bidirectional(&mut client, &mut server).await;
                            return;
                        }
                    }
                });
                while open.try_join_next().is_some() {}
            }
        }));
        Ok(Self { address, ready, tasks })
    }

    pub(super) fn is_ready(&self, index: usize) -> bool {
        self.ready.get(index).is_some_and(|ready| ready.load(Ordering::Relaxed))
    }
}
