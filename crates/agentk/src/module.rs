//! What agentk does for kas: a set of [`Module`]s. A module serves gRPC services, runs tasks of its own, or
//! both.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use grpc::{Code, Status};
use proto::gitlab::agent::{
    agentcfg::AgentConfiguration,
    reverse_tunnel::info::{self, AgentDescriptor},
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use traces::Tracer;

#[cfg(feature = "bench")]
pub mod bench;
#[cfg(feature = "gitops")]
pub mod gitops;
pub mod kubernetes_api;
pub mod logging;
mod span;

/// The response to a request. Dropping it, or the response's body, cancels the request.
pub type Answer = Pin<Box<dyn Future<Output = http::Response<grpc::Body>> + Send>>;

/// What a module runs beside its requests.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A gRPC service that a module serves to kas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its full name.
    pub name: &'static str,
    /// The names of its methods.
    pub methods: &'static [&'static str],
}

/// A part of the agent. A module implements [`services`](Self::services) and [`call`](Self::call) to serve
/// requests, [`run`](Self::run) to run tasks, or all three.
pub trait Module: Send + Sync + 'static {
    /// Returns the services that the module serves. No other module serves them.
    fn services(&self) -> &'static [Service] {
        &[]
    }

    /// Starts one call of a method of these services.
    ///
    /// The request's path is the full method, its headers are metadata, and its body is gRPC frames. The
    /// response is a normal gRPC one: headers, frames, and trailers with the status; or headers alone.
    fn call(&self, request: http::Request<grpc::Body>) -> Answer {
        unknown_method(request.uri().path())
    }

    /// Runs until the agent shuts down, or until there is nothing more to do.
    ///
    /// The agent starts this once, before it connects to kas. After the shutdown has begun the task has as
    /// long as open requests have to release what it holds.
    fn run(self: Arc<Self>, _context: Context) -> Task {
        Box::pin(std::future::ready(()))
    }
}

/// What a running module gets from the agent.
#[derive(Clone, Debug)]
pub struct Context {
    configuration: watch::Receiver<Pushed>,
    shutdown: CancellationToken,
}

impl Context {
    /// Creates the context of every module. `shutdown` is cancelled when the agent begins to shut down.
    pub fn new(configuration: watch::Receiver<Pushed>, shutdown: CancellationToken) -> Self {
        Self { configuration, shutdown }
    }

    /// Waits for a configuration that this context has not returned yet; the first one may be there already.
    /// Only the latest configuration is returned when several came. `None`: the agent is shutting down.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn next_configuration(&mut self) -> Option<Arc<AgentConfiguration>> {
        loop {
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return None,
                changed = self.configuration.changed() => changed.ok()?,
            }
            let configuration = self.configuration.borrow_and_update().configuration.clone();
            if configuration.is_some() {
                return configuration;
            }
        }
    }
}

/// What kas pushed last.
#[derive(Clone, Debug, Default)]
pub struct Pushed {
    /// The commit of the configuration project; empty before the first configuration.
    pub commit_id: String,
    /// The configuration; `None` before the first one.
    pub configuration: Option<Arc<AgentConfiguration>>,
}

fn unknown_method(path: &str) -> Answer {
    let status = Status::new(Code::Unimplemented, format!("unknown method {path}"));
    Box::pin(std::future::ready(status.into_response()))
}

/// Every module of an agent.
#[derive(Clone, Default)]
pub struct Modules {
    modules: Vec<Arc<dyn Module>>,
    /// Makes a span of each request, if there is one.
    tracer: Option<Tracer>,
}

impl fmt::Debug for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.services().map(|(service, _)| service.name)).finish()
    }
}

impl Modules {
    /// Makes a set of modules.
    pub fn new(modules: Vec<Arc<dyn Module>>) -> Self {
        Self { modules, tracer: None }
    }

    /// Makes a span of each request from now on.
    pub fn traced(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    /// Starts the tasks of the modules.
    pub fn start(&self, context: &Context, tasks: &TaskTracker) {
        for module in &self.modules {
            tasks.spawn(Arc::clone(module).run(context.clone()));
        }
    }

    fn services(&self) -> impl Iterator<Item = (&'static Service, &Arc<dyn Module>)> {
        self.modules.iter().flat_map(|module| module.services().iter().map(move |service| (service, module)))
    }

    /// Returns what agentk tells kas it serves.
    pub fn descriptor(&self) -> AgentDescriptor {
        let method = |name: &&str| info::Method { name: (*name).to_owned() };
        let services = self.services().map(|(service, _)| info::Service {
            name: service.name.to_owned(),
            methods: service.methods.iter().map(method).collect(),
        });
        AgentDescriptor { services: services.collect() }
    }

    /// Begins a request in the module that serves its path; `UNIMPLEMENTED` when none does.
    pub fn call(&self, mut request: http::Request<grpc::Body>) -> Answer {
        match &self.tracer {
            None => self.dispatch(request),
            Some(tracer) => {
                let span = span::begin(tracer, &mut request);
                span::follow(span, self.dispatch(request))
            }
        }
    }

    fn dispatch(&self, request: http::Request<grpc::Body>) -> Answer {
        let path = request.uri().path();
        let found =
            path.strip_prefix('/').and_then(|path| path.split_once('/')).and_then(|(name, method)| {
                self.services().find(|(service, _)| service.name == name && service.methods.contains(&method))
            });
        match found {
            Some((_, module)) => module.call(request),
            None => unknown_method(path),
        }
    }
}

impl tunnel::agent_end::Handler for Modules {
    fn call(&self, request: http::Request<grpc::Body>) -> Answer {
        Self::call(self, request)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    struct Fixed(&'static [Service]);

    impl Module for Fixed {
        fn services(&self) -> &'static [Service] {
            self.0
        }
        fn call(&self, _: http::Request<grpc::Body>) -> Answer {
            Box::pin(std::future::ready(Status::new(Code::Ok, self.0[0].name).into_response()))
        }
    }

    /// Serves nothing, and reports what it receives.
    struct Recorder(tokio::sync::mpsc::Sender<Option<Arc<AgentConfiguration>>>);

    impl Module for Recorder {
        fn run(self: Arc<Self>, mut context: Context) -> Task {
            Box::pin(async move {
                loop {
                    let configuration = context.next_configuration().await;
                    let ends = configuration.is_none();
                    let _ = self.0.send(configuration).await;
                    if ends {
                        return;
                    }
                }
            })
        }
    }

    #[tokio::test]
    async fn module_runs_with_the_pushed_configuration_until_shutdown() {
        let (sender, mut received) = tokio::sync::mpsc::channel(16);
        let modules = Modules::new(vec![Arc::new(Recorder(sender)), Arc::new(Fixed(&[]))]);
        let pushed = watch::Sender::new(Pushed::default());
        let context = Context::new(pushed.subscribe(), CancellationToken::new());
        let push = |gitops: bool| {
            let configuration =
                AgentConfiguration { gitops: gitops.then(Default::default), ..AgentConfiguration::default() };
            pushed.send_modify(|pushed| pushed.configuration = Some(Arc::new(configuration.clone())));
            Some(Arc::new(configuration))
        };
        // The configuration may come before the task runs.
        let first = push(true);
        let tasks = TaskTracker::new();
        modules.start(&context, &tasks);
        tasks.close();
        assert_eq!(received.recv().await, Some(first));
        pushed.send_modify(|pushed| pushed.commit_id.push('x'));
        push(true);
        let last = push(false);
        let mut got = received.recv().await.unwrap();
        while got != last {
            got = received.recv().await.unwrap();
        }
        context.shutdown.cancel();
        assert_eq!(received.recv().await, Some(None));
        tasks.wait().await;
    }

    #[tokio::test]
    async fn requests_go_to_the_module_of_their_path_and_nowhere_else() {
        const A: &[Service] = &[Service { name: "a.A", methods: &["One", "Two"] }];
        const B: &[Service] = &[Service { name: "b.B", methods: &["One"] }];
        let modules = Modules::new(vec![Arc::new(Fixed(A)), Arc::new(Fixed(B))]);
        for (path, code, message) in [
            ("/a.A/One", Code::Ok, "a.A"),
            ("/a.A/Two", Code::Ok, "a.A"),
            ("/b.B/One", Code::Ok, "b.B"),
            ("/b.B/Two", Code::Unimplemented, "unknown method /b.B/Two"),
            ("/a.A/One/", Code::Unimplemented, "unknown method /a.A/One/"),
            ("/a.A", Code::Unimplemented, "unknown method /a.A"),
            ("/", Code::Unimplemented, "unknown method /"),
        ] {
            let request = http::Request::builder().uri(path).body(grpc::full(bytes::Bytes::new())).unwrap();
            let status = Status::from_headers(modules.call(request).await.headers()).unwrap();
            assert_eq!((status.code(), status.message()), (code, message));
        }
    }

    #[test]
    fn descriptor_is_that_of_14_1() {
        const KUBERNETES_API: &[Service] =
            &[Service { name: "gitlab.agent.kubernetes_api.rpc.KubernetesApi", methods: &["MakeRequest"] }];
        let modules = Modules::new(vec![Arc::new(Fixed(KUBERNETES_API))]);
        // The vector of the documented wire, without the envelope around it.
        let expected = "0a3e0a2d6769746c61622e6167656e742e6b756265726e657465735f6170692e7270632e4b756265726e6574657341\
                        7069120d0a0b4d616b6552657175657374";
        let got: String =
            modules.descriptor().encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(got, expected.replace(char::is_whitespace, ""));
    }
}
