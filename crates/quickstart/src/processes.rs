//! The processes of the demonstration: watched while it runs, and stopped in order at its end.

use std::{future::poll_fn, path::PathBuf, pin::Pin, task::Poll, time::Duration};

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
    /// What serves recorded metrics.
    pub(super) recorded: Option<Service>,
    pub(super) replicas: Vec<Replica>,
    pub(super) balancer: Balancer,
    pub(super) agents: Vec<Service>,
    /// Whether agents that end are started again, so that their end is no error.
    pub(super) agents_may_end: bool,
}

/// Which process has exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The replica with this index.
    Replica(usize),
    /// The agent with this index.
    Agent(usize),
    Other,
}

/// Waits until one of these processes exits unexpectedly.
///
/// # Cancel safety
/// Cancel safe.
async fn first<'a>(services: impl Iterator<Item = (Ended, &'a mut Service)>) -> (Ended, anyhow::Error) {
    type Ends<'a> = Pin<Box<dyn Future<Output = (Ended, anyhow::Error)> + 'a>>;
    fn end<'a>((which, service): (Ended, &'a mut Service)) -> Ends<'a> {
        Box::pin(async move { (which, service.ended().await) })
    }
    let mut all: Vec<Ends<'a>> = services.map(end).collect();
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
    /// Makes the folder of the demonstration.
    pub(super) fn make_dir(&mut self) -> Result<PathBuf> {
        let dir = tempfile::Builder::new().prefix("kas-quickstart-").tempdir();
        Ok(self.dir.insert(dir.context("cannot make a folder")?).path().to_owned())
    }

    /// Waits until a process exits unexpectedly.
    pub(super) async fn ended(&mut self) -> (Ended, anyhow::Error) {
        let replicas = self.replicas.iter_mut().enumerate();
        let replicas =
            replicas.filter_map(|(index, replica)| Some((Ended::Replica(index), replica.service.as_mut()?)));
        let agents = self.agents.iter_mut().enumerate();
        let agents = agents.map(|(index, agent)| (Ended::Agent(index), agent));
        let others = self.demo.iter_mut().chain(&mut self.redis).chain(&mut self.recorded);
        first(replicas.chain(agents).chain(others.map(|service| (Ended::Other, service)))).await
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

    /// Waits until a process exits unexpectedly, other than a replica, or an agent that is started again.
    async fn ended_but_replicas(&mut self) -> anyhow::Error {
        let agents = self.agents.iter_mut().filter(|_| !self.agents_may_end);
        let all = agents.chain(&mut self.demo).chain(&mut self.redis).chain(&mut self.recorded);
        let (_, error) = first(all.map(|service| (Ended::Other, service))).await;
        error
    }

    /// Runs `work`; fails when a process other than a replica exits meanwhile. Agents that are started again
    /// may exit, too.
    pub(super) async fn guard_all_but_replicas<T>(
        &mut self,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            error = self.ended_but_replicas() => Err(error),
            done = work => done,
        }
    }

    /// Stops the processes, and removes the folder. kas is the first: its own watches go through agentk,
    /// which would wait for their end.
    pub(super) async fn stop(&mut self) -> Result<()> {
        let style = Style::of_stdout();
        let agents = std::mem::take(&mut self.agents);
        let replicas: Vec<Service> = self.replicas.drain(..).filter_map(|replica| replica.service).collect();
        let demo: Vec<Service> = self.demo.take().into_iter().collect();
        let redis: Vec<Service> = self.redis.take().into_iter().collect();
        let recorded: Vec<Service> = self.recorded.take().into_iter().collect();
        let mut has_title = false;
        for (name, services) in [
            ("kas", replicas),
            ("agentk", agents),
            ("Redis", redis),
            ("demo API", demo),
            ("recording", recorded),
        ] {
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
