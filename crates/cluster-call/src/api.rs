//! [`Cluster`] as the engine of GitOps needs it.

use async_trait::async_trait;
use bytes::Bytes;
use gitops::{CallError, ClusterApi};
use grpc::{Code, Outcome, Status};
use http::{HeaderName, HeaderValue};
use kube_request::{Target, headers::canonical};

use crate::{Cluster, Request};

/// Headers of a response that the engine reads. Others may be many, and are not kept.
const KEPT: [&str; 3] = ["content-type", "retry-after", "warning"];

#[async_trait]
impl ClusterApi for Cluster {
    async fn call(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, CallError> {
        let (head, body) = request.into_parts();
        let target = head.uri.path_and_query().map(Target::try_from);
        let target = match target {
            Some(Ok(target)) => target,
            Some(Err(error)) => return Err(CallError::Refused(format!("{}: {error}", head.uri))),
            None => return Err(CallError::Refused("the request has no path".to_owned())),
        };
        let mut headers = Vec::new();
        for (name, value) in &head.headers {
            let Ok(value) = value.to_str() else {
                return Err(CallError::Refused(format!("the header {name} is not text")));
            };
            headers.push((canonical(name.as_str()), value.to_owned()));
        }
        let request = Request { method: head.method, target, headers, body };
        let answer = self.send(request).await.map_err(|status| failure(&status))?;
        let mut response = http::Response::new(answer.body.clone());
        *response.status_mut() = u16::try_from(answer.status)
            .ok()
            .and_then(|code| http::StatusCode::from_u16(code).ok())
            .ok_or_else(|| CallError::Unknown(format!("the API server answered {}", answer.status)))?;
        for (name, values) in &answer.head.header {
            let Ok(name) = HeaderName::try_from(name.to_ascii_lowercase()) else { continue };
            if !KEPT.contains(&name.as_str()) {
                continue;
            }
            for value in values.value.iter().take(100) {
                if let Ok(value) = HeaderValue::from_str(value) {
                    response.headers_mut().append(name.clone(), value);
                }
            }
        }
        Ok(response)
    }
}

/// Tells what is known of a request that has no response.
fn failure(status: &Status) -> CallError {
    let text = status.message().to_owned();
    match (status.outcome(), status.code()) {
        (Some(Outcome::NotStarted), _) => CallError::NotSent(text),
        (Some(Outcome::Unknown), _) => CallError::Unknown(text),
        // The router or the agent has refused it, and another try changes nothing.
        (None, Code::Unimplemented | Code::PermissionDenied | Code::InvalidArgument) => {
            CallError::Refused(text)
        }
        (None, _) => CallError::Unknown(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_surely_was_not_sent_is_not_sent() {
        let of = |code, outcome: Option<Outcome>| {
            let status = Status::new(code, "x");
            failure(&match outcome {
                Some(outcome) => status.with_outcome(outcome),
                None => status,
            })
        };
        let text = || "x".to_owned();
        assert_eq!(of(Code::Unavailable, Some(Outcome::NotStarted)), CallError::NotSent(text()));
        assert_eq!(of(Code::Unavailable, Some(Outcome::Unknown)), CallError::Unknown(text()));
        assert_eq!(of(Code::Unavailable, None), CallError::Unknown(text()));
        assert_eq!(of(Code::Unimplemented, None), CallError::Refused(text()));
        assert_eq!(of(Code::ResourceExhausted, None), CallError::Unknown(text()));
    }
}
