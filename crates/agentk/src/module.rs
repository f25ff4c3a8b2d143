//! What agentk serves to kas: gRPC services, each a [`Module`], found by the method's path.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use grpc::{Code, Status};
use proto::gitlab::agent::reverse_tunnel::info::{AgentDescriptor, Method, Service};
use traces::Tracer;

pub mod bench;
pub mod kubernetes_api;
mod span;

/// What a module returns; dropping it, or the response's body, cancels the request.
pub type Answer = Pin<Box<dyn Future<Output = http::Response<grpc::Body>> + Send>>;

/// What agentk serves to kas: one gRPC service.
pub trait Module: Send + Sync + 'static {
    /// Returns the service's full name.
    fn service(&self) -> &'static str;

    /// Returns the names of the service's methods.
    fn methods(&self) -> &'static [&'static str];

    /// Begins one call of one of these methods.
    ///
    /// `request`: the path is the full method, headers are metadata, the body is gRPC frames. The response is a
    /// normal gRPC one: headers, frames, trailers with the status; or headers alone.
    fn call(&self, request: http::Request<grpc::Body>) -> Answer;
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
        f.debug_list().entries(self.modules.iter().map(|module| module.service())).finish()
    }
}

impl Modules {
    /// Makes a set of modules, each with a service of its own.
    pub fn new(modules: Vec<Arc<dyn Module>>) -> Self {
        Self { modules, tracer: None }
    }

    /// Makes a span of each request from now on.
    pub fn traced(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    /// Returns what agentk tells kas it serves.
    pub fn descriptor(&self) -> AgentDescriptor {
        let service = |module: &Arc<dyn Module>| Service {
            name: module.service().to_owned(),
            methods: module.methods().iter().map(|name| Method { name: (*name).to_owned() }).collect(),
        };
        AgentDescriptor { services: self.modules.iter().map(service).collect() }
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
            path.strip_prefix('/').and_then(|path| path.split_once('/')).and_then(|(service, method)| {
                self.modules
                    .iter()
                    .find(|module| module.service() == service && module.methods().contains(&method))
            });
        match found {
            Some(module) => module.call(request),
            None => {
                let status = Status::new(Code::Unimplemented, format!("unknown method {path}"));
                Box::pin(std::future::ready(status.into_response()))
            }
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

    struct Fixed(&'static str, &'static [&'static str]);

    impl Module for Fixed {
        fn service(&self) -> &'static str {
            self.0
        }
        fn methods(&self) -> &'static [&'static str] {
            self.1
        }
        fn call(&self, _: http::Request<grpc::Body>) -> Answer {
            Box::pin(std::future::ready(Status::new(Code::Ok, self.0).into_response()))
        }
    }

    #[tokio::test]
    async fn requests_go_to_the_module_of_their_path_and_nowhere_else() {
        let modules =
            Modules::new(vec![Arc::new(Fixed("a.A", &["One", "Two"])), Arc::new(Fixed("b.B", &["One"]))]);
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
        let modules = Modules::new(vec![Arc::new(Fixed(
            "gitlab.agent.kubernetes_api.rpc.KubernetesApi",
            &["MakeRequest"],
        ))]);
        // The vector of the documented wire, without the envelope around it.
        let expected = "0a3e0a2d6769746c61622e6167656e742e6b756265726e657465735f6170692e7270632e4b756265726e6574657341\
                        7069120d0a0b4d616b6552657175657374";
        let got: String =
            modules.descriptor().encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(got, expected.replace(char::is_whitespace, ""));
    }
}
