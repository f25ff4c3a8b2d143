//! A part of a replica: its servers, services and tasks, and its steps at shutdown.

use std::{mem, pin::Pin, sync::Arc};

use net::http::Server;
use process::lifecycle::{Lifecycle, Phase};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use crate::listener::agent::AgentService;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;
type Step = Box<dyn FnOnce() + Send>;

/// A part of a replica, for [`Parts`].
///
/// Each method adds something, and may be called several times.
#[derive(Default)]
pub(super) struct Part {
    /// Each with the phase in which it stops.
    servers: Vec<(Server, Phase)>,
    services: Vec<Arc<dyn AgentService>>,
    tasks: Vec<Task>,
    drain: Vec<Step>,
    linger: Vec<Step>,
    farewell: Vec<Task>,
    end: Vec<Step>,
    finish: Vec<Task>,
}

impl Part {
    /// Adds a server.
    pub(super) fn server(self, server: Server) -> Self {
        self.server_until(Phase::Stopped, server)
    }

    /// Adds a server that stops in this phase.
    pub(super) fn server_until(mut self, phase: Phase, server: Server) -> Self {
        self.servers.push((server, phase));
        self
    }

    /// Adds a service for the agent listener.
    pub(super) fn service(mut self, service: Arc<dyn AgentService>) -> Self {
        self.services.push(service);
        self
    }

    /// Adds a task, which is aborted at the end.
    pub(super) fn task(mut self, task: impl Future<Output = ()> + Send + 'static) -> Self {
        self.tasks.push(Box::pin(task));
        self
    }

    /// Adds a step for the beginning of the drain: new requests go to other replicas, open ones continue.
    pub(super) fn drain(mut self, step: impl FnOnce() + Send + 'static) -> Self {
        self.drain.push(Box::new(step));
        self
    }

    /// Adds a step for the end of the drain if there are requests that outlast it: all others end.
    pub(super) fn linger(mut self, step: impl FnOnce() + Send + 'static) -> Self {
        self.linger.push(Box::new(step));
        self
    }

    /// Adds a task for the time after the drain and before streams end, such as to inform the other replicas.
    pub(super) fn farewell(mut self, task: impl Future<Output = ()> + Send + 'static) -> Self {
        self.farewell.push(Box::pin(task));
        self
    }

    /// Adds a step that ends open streams.
    pub(super) fn end(mut self, step: impl FnOnce() + Send + 'static) -> Self {
        self.end.push(Box::new(step));
        self
    }

    /// Adds a task for the time after the last request. Those of all parts run at the same time.
    pub(super) fn finish(mut self, task: impl Future<Output = ()> + Send + 'static) -> Self {
        self.finish.push(Box::pin(task));
        self
    }
}

/// The parts of a replica. The steps of each phase run in the order in which the parts were added.
#[derive(Default)]
pub(super) struct Parts(Vec<Part>);

impl Parts {
    /// Adds a part after the others.
    pub(super) fn add(&mut self, part: Part) {
        self.0.push(part);
    }

    /// Takes the services for agents out of the parts.
    pub(super) fn take_services(&mut self) -> Vec<Arc<dyn AgentService>> {
        self.all(|part| &mut part.services)
    }

    /// Starts every server and task.
    pub(super) fn start(&mut self, lifecycle: &Lifecycle) -> Running {
        let servers = TaskTracker::new();
        for (server, phase) in self.all(|part| &mut part.servers) {
            servers.spawn(server.run(lifecycle.ending_at(phase)));
        }
        servers.close();
        let tasks = self.all(|part| &mut part.tasks).into_iter().map(tokio::spawn).collect();
        Running { servers, tasks }
    }

    /// Begins the drain of every part.
    pub(super) fn drain(&mut self) {
        self.all(|part| &mut part.drain).into_iter().for_each(|step| step());
    }

    /// Ends the requests that do not outlast the drain.
    pub(super) fn linger(&mut self) {
        self.all(|part| &mut part.linger).into_iter().for_each(|step| step());
    }

    /// Runs the tasks that come before streams end, one after the other.
    pub(super) async fn farewell(&mut self) {
        for task in self.all(|part| &mut part.farewell) {
            task.await;
        }
    }

    /// Ends open streams.
    pub(super) fn end(&mut self) {
        self.all(|part| &mut part.end).into_iter().for_each(|step| step());
    }

    /// Runs the tasks that come after the last request, all at the same time.
    pub(super) async fn finish(&mut self) {
        futures_util::future::join_all(self.all(|part| &mut part.finish)).await;
    }

    fn all<T>(&mut self, field: impl Fn(&mut Part) -> &mut Vec<T>) -> Vec<T> {
        self.0.iter_mut().flat_map(|part| mem::take(field(part))).collect()
    }
}

/// The running servers and tasks.
pub(super) struct Running {
    servers: TaskTracker,
    tasks: Vec<JoinHandle<()>>,
}

impl Running {
    /// Waits until every connection of every server has ended.
    pub(super) async fn servers(&self) {
        self.servers.wait().await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn steps_run_in_the_order_of_the_parts_and_once() {
        let steps = Arc::new(Mutex::new(Vec::new()));
        let step = |what: &'static str| {
            let steps = Arc::clone(&steps);
            move || steps.lock().unwrap().push(what)
        };
        let later = |what: &'static str| {
            let step = step(what);
            async move { step() }
        };
        let mut parts = Parts::default();
        parts.add(
            Part::default()
                .drain(step("a drains"))
                .linger(step("a lingers"))
                .farewell(later("a says goodbye"))
                .end(step("a ends")),
        );
        parts.add(Part::default().drain(step("b drains")).end(step("b ends")).finish(later("b finishes")));
        let running = parts.start(&Lifecycle::default());
        for _ in 0..2 {
            parts.drain();
            parts.linger();
            parts.farewell().await;
            parts.end();
            parts.finish().await;
        }
        running.servers().await;
        let expected =
            ["a drains", "b drains", "a lingers", "a says goodbye", "a ends", "b ends", "b finishes"];
        assert_eq!(*steps.lock().unwrap(), expected);
    }

    #[tokio::test]
    async fn tasks_are_aborted_with_their_owner() {
        let (alive, dropped) = tokio::sync::oneshot::channel::<()>();
        let mut parts = Parts::default();
        parts.add(Part::default().task(async move {
            let _alive = alive;
            std::future::pending::<()>().await;
        }));
        drop(parts.start(&Lifecycle::default()));
        assert!(dropped.await.is_err());
    }
}
