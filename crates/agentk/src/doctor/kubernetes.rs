//! The check of the Kubernetes API server.

use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use process::error::chain;
use tokio::time::{Instant, timeout};

use super::{Check, Finding, Outcome};
use crate::cluster::ClusterAccess;

/// How long the API server may take to answer. It is close to the agent.
const API_SERVER: Duration = Duration::from_secs(10);
/// The most bytes that are read of the API server's response.
const MAX_ANSWER: usize = 64 * 1024;

/// Requests the version of the API server.
pub(super) async fn check(access: &ClusterAccess) -> Finding {
    let since = Instant::now();
    let found = |outcome, message: String, advice: &[&str]| Finding {
        check: Check::Kubernetes,
        outcome,
        message,
        advice: advice.iter().map(|&line| line.to_owned()).collect(),
        seconds: (since.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    };
    let api = match access.connect().await {
        Ok(api) => api,
        Err(error) => return found(Outcome::Failed, format!("{error:#}"), &[]),
    };
    let target = format!("{} ({})", api.target(), api.target().source());
    let mut request = Request::new(grpc::full(bytes::Bytes::new()));
    *request.uri_mut() = http::Uri::from_static("/version");
    let response = match timeout(API_SERVER, api.send(request)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return found(Outcome::Failed, chain(&error), &[]),
        Err(_) => {
            return found(Outcome::Failed, format!("{target} did not answer within {API_SERVER:?}"), &[]);
        }
    };
    match response.status() {
        StatusCode::OK => {
            let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect();
            let body = timeout(API_SERVER, body).await.ok().and_then(Result::ok).map(|body| body.to_bytes());
            let version = body.and_then(|body| {
                let value: serde_json::Value = serde_json::from_slice(&body).ok()?;
                Some(
                    value["gitVersion"]
                        .as_str()?
                        .chars()
                        .filter(|c| !c.is_control())
                        .take(80)
                        .collect::<String>(),
                )
            });
            match version {
                Some(version) => found(Outcome::Ok, format!("{target} answers: Kubernetes {version}"), &[]),
                None => found(
                    Outcome::Warning,
                    format!("{target} answers, but not like a Kubernetes API server"),
                    &[],
                ),
            }
        }
        StatusCode::UNAUTHORIZED => {
            let advice = "the credentials may have expired; in a cluster, check the pod's service account";
            found(Outcome::Failed, format!("{target} rejects agentk's credentials (HTTP 401)"), &[advice])
        }
        StatusCode::FORBIDDEN => {
            let advice = "in most clusters every user may read /version: a role is missing (system:public-info-viewer)";
            found(
                Outcome::Warning,
                format!("{target} answers, but denies access to /version (HTTP 403)"),
                &[advice],
            )
        }
        status => found(Outcome::Failed, format!("{target} answers HTTP {status}"), &[]),
    }
}
