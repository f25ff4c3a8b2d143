//! The processes of the demonstration: watched while it runs, and stopped in order at its end.

use std::{future::poll_fn, pin::Pin, task::Poll, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use devkit::report::{Style, human, line};
use tempfile::TempDir;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{END_WITHIN, balancer::Balancer, replicas::Replica, service::Service};

/// Everything that must be stopped or removed at the end.
#[derive(Default)]
pub(super) struct Processes {
    pub(super) dir: Option<TempDir>,
    pub(super) demo: Option<Service>,
    pub(super) redis: Option<Service>,
    pub(super) replicas: Vec<Replica>,
    pub(super) balancer: Balancer,
    pub(super) agents: Vec<Service>,
}

/// Waits until a process exits unexpectedly. If it is a replica, returns its index too.
///
/// # Cancel safety
/// Cancel safe.
async fn ended(
    replicas: &mut [Replica],
    agents: &mut [Service],
    demo: &mut Option<Service>,
    redis: &mut Option<Service>,
) -> (Option<usize>, anyhow::Error) {
    type Ended<'a> = Pin<Box<dyn Future<Output = (Option<usize>, anyhow::Error)> + 'a>>;
    async fn one(replica: Option<usize>, service: &mut Service) -> (Option<usize>, anyhow::Error) {
        (replica, service.ended().await)
    }
    let replicas = replicas.iter_mut().enumerate();
    let replicas = replicas.filter_map(|(index, replica)| Some((Some(index), replica.service.as_mut()?)));
    let others = agents.iter_mut().chain(demo).chain(redis).map(|service| (None, service));
    let mut all: Vec<Ended<'_>> =
        replicas.chain(others).map(|(index, service)| Box::pin(one(index, service)) as Ended<'_>).collect();
    poll_fn(|context| {
        let mut ready = all.iter_mut().filter_map(|ended| match ended.as_mut().poll(context) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        });
        ready.next().map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Processes {
    /// Waits until a process exits unexpectedly. If it is a replica, returns its index too.
    pub(super) async fn ended(&mut self) -> (Option<usize>, anyhow::Error) {
        ended(&mut self.replicas, &mut self.agents, &mut self.demo, &mut self.redis).await
    }

    /// Runs `work`; fails when a process exits meanwhile.
    pub(super) async fn guard<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            (_, error) = self.ended() => Err(error),
            done = work => done,
        }
    }

    /// Sleeps; fails when a process exits meanwhile.
    pub(super) async fn pause(&mut self, time: Duration) -> Result<()> {
        self.guard(async {
            sleep(time).await;
            Ok(())
        })
        .await
    }

    /// Runs `work`; fails when a process other than a replica exits meanwhile.
    pub(super) async fn guard_all_but_replicas<T>(
        &mut self,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            (_, error) = ended(&mut [], &mut self.agents, &mut self.demo, &mut self.redis) => Err(error),
            done = work => done,
        }
    }

    /// Stops the processes, clients before servers, and removes the folder.
    pub(super) async fn stop(&mut self) -> Result<()> {
        let style = Style::of_stdout();
        let agents = std::mem::take(&mut self.agents);
        let replicas: Vec<Service> = self.replicas.drain(..).filter_map(|replica| replica.service).collect();
        let demo: Vec<Service> = self.demo.take().into_iter().collect();
        let redis: Vec<Service> = self.redis.take().into_iter().collect();
        let mut has_title = false;
        for (name, services) in [("agentk", agents), ("kas", replicas), ("Redis", redis), ("demo API", demo)]
        {
            if services.is_empty() {
                continue;
            }
            if !std::mem::replace(&mut has_title, true) {
                line(format_args!("\n{}", style.bold("Stopping")));
            }
            let (count, began) = (services.len(), Instant::now());
            let mut problems = Vec::new();
            let mut stops = JoinSet::new();
            for service in services {
                stops.spawn(async { (service.name(), service.stop(END_WITHIN).await) });
            }
            while let Some(stopped) = stops.join_next().await {
                let (name, how) = stopped.map_err(|error| anyhow!(error))?;
                if let Some(problem) = how? {
                    problems.push(format!("; {name} {problem}"));
                }
            }
            let count = if count == 1 { String::new() } else { format!("{count} ") };
            let took = style.dim(human(began.elapsed()));
            line(format_args!("     {} {count}stopped {took}{}", pad(name), problems.concat()));
        }
        self.balancer = Balancer::default();
        if let Some(dir) = self.dir.take() {
            let path = dir.path().to_owned();
            dir.close().with_context(|| format!("cannot remove {}", path.display()))?;
            line(format_args!("     {} removed {}", pad("folder"), style.dim(path.display())));
        }
        Ok(())
    }
}

fn pad(name: &str) -> String {
    format!("{name:<10}")
}
