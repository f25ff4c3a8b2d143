//! A gRPC service that this process answers itself, with the type of the generated server hidden.

use std::{convert::Infallible, pin::Pin, sync::Arc};

use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderValue, Request, Response};
use tonic::server::NamedService;

use crate::{Body, Code, Status};

/// The answer to one call.
pub type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// A service of this process: answers one call.
pub type LocalService = Arc<dyn Fn(Request<Body>) -> Answer + Send + Sync>;

/// Hides the type of a generated server. Returns it with the prefix of its paths, `/package.Service/`.
pub fn local_service<S>(server: S) -> (String, LocalService)
where
    S: tower_service::Service<Request<Body>, Response = Response<tonic::body::Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let call: LocalService = Arc::new(move |request| {
        let path = request.uri().clone();
        let answer = server.clone().call(request);
        Box::pin(answer.map(move |answered| match answered {
            Ok(mut response) => {
                explain_unimplemented(path.path(), response.headers_mut());
                response.map(crate::boxed)
            }
            Err(never) => match never {},
        }))
    });
    (format!("/{}/", S::NAME), call)
}

/// Names the unknown method: generated servers answer it with the bare code.
fn explain_unimplemented(path: &str, headers: &mut HeaderMap) {
    let bare = headers.get("grpc-message").is_none_or(HeaderValue::is_empty);
    let unimplemented =
        Status::from_headers(headers).is_some_and(|status| status.code() == Code::Unimplemented);
    if bare && unimplemented {
        let (service, _) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
        let text = format!("unknown method {path}: service {service} of this kas does not have it");
        Status::new(Code::Unimplemented, text).write_to(headers);
    }
}
