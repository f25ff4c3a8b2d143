//! The admin listener: metrics, liveness, readiness. HTTP/1.1, no authentication: a network policy
//! or loopback guards it.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::task::AbortHandle;

use crate::{
    io::{AcceptFailures, Listener},
    lifecycle::{Lifecycle, Phase},
};

/// What the admin listener answers with.
pub struct Admin {
    /// Path of the metrics.
    pub metrics_path: String,
    /// Path of the liveness probe.
    pub liveness_path: String,
    /// Path of the readiness probe.
    pub readiness_path: String,
    /// Every metric of the process.
    pub registry: Registry,
    /// Why the process is not ready; `None`: it is.
    pub unready: Box<dyn Fn() -> Option<String> + Send + Sync>,
    /// Called before metrics are written, to set gauges that are read rather than kept.
    pub refresh: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").field("metrics_path", &self.metrics_path).finish_non_exhaustive()
    }
}

impl Admin {
    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let text = |status, body: String| {
            let mut response = Response::new(Full::new(Bytes::from(body)));
            *response.status_mut() = status;
            response
                .headers_mut()
                .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain; charset=utf-8"));
            response
        };
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".into());
        }
        let path = request.uri().path();
        if path == self.metrics_path {
            (self.refresh)();
            let mut out = String::new();
            // Writing to a String cannot fail.
            let _ = prometheus_client::encoding::text::encode(&mut out, &self.registry);
            let mut response = text(StatusCode::OK, out);
            response.headers_mut().insert(
                header::CONTENT_TYPE,
                header::HeaderValue::from_static(
                    "application/openmetrics-text; version=1.0.0; charset=utf-8",
                ),
            );
            response
        } else if path == self.liveness_path {
            text(StatusCode::OK, "alive\n".into())
        } else if path == self.readiness_path {
            match (self.unready)() {
                None => text(StatusCode::OK, "ready\n".into()),
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
            }
        } else {
            text(
                StatusCode::NOT_FOUND,
                format!(
                    "there are {}, {} and {}\n",
                    self.metrics_path, self.liveness_path, self.readiness_path
                ),
            )
        }
    }
}

/// Connections that are open at once.
const MAX_CONNECTIONS: usize = 256;
/// A connection, however it is used, ends after this time: a peer that stops reading must not keep a task for ever.
const LONGEST: Duration = Duration::from_secs(60);

/// Serves until the lifecycle is [`Phase::Stopped`]: probes must be answered to the end.
///
/// Beyond 256 connections the oldest one is closed for the newest: were the newest refused, silent connections could
/// keep probes out, and whoever probes would restart a process that is well.
pub async fn run(listener: Listener, admin: Admin, lifecycle: Lifecycle) {
    let admin = Arc::new(admin);
    let mut connections = VecDeque::<AbortHandle>::new();
    let mut failures = AcceptFailures::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = lifecycle.reached(Phase::Stopped) => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                failures.take(&listener, &error).await;
                continue;
            }
        };
        connections.retain(|connection| !connection.is_finished());
        if connections.len() >= MAX_CONNECTIONS
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        let admin = Arc::clone(&admin);
        let connection = tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                let response = admin.answer(&request);
                async move { Ok::<_, Infallible>(response) }
            });
            let serve = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_secs(10))
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(LONGEST, serve).await;
        });
        connections.push_back(connection.abort_handle());
    }
}
