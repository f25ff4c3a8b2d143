//! The API server for the engine: past the policy and the audit log, with agentk's own credentials.

use async_trait::async_trait;
use bytes::Bytes;
use gitops::{CallError, ClusterApi, MAX_RESPONSE};
use grpc::Code;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Limited};
use process::error::chain;

use super::super::kubernetes_api::Guard;
use crate::cluster::{ApiServer, SendError};

/// The API server, as agentk itself uses it.
#[derive(Debug)]
pub(super) struct GuardedApi {
    api: ApiServer,
    guard: Guard,
    user_agent: HeaderValue,
}

impl GuardedApi {
    pub(super) fn new(api: ApiServer, guard: Guard, user_agent: HeaderValue) -> Self {
        Self { api, guard, user_agent }
    }
}

#[async_trait]
impl ClusterApi for GuardedApi {
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        let mut request = request.map(grpc::full);
        request.headers_mut().insert(header::USER_AGENT, self.user_agent.clone());
        let admitted = self.guard.admit(&HeaderMap::new(), &request, None);
        let mut entry = admitted.map_err(|refused| CallError::Refused(refused.into_text()))?;
        if let Some(entry) = &entry {
            request = request.map(|body| entry.counting(body));
        }
        let failed = |entry: Option<crate::audit::Entry>| {
            if let Some(mut entry) = entry {
                entry.ended(Some(Code::Unavailable.name()));
            }
        };
        let response = match self.api.send(request).await {
            Ok(response) => response,
            Err(error) => {
                failed(entry);
                let text = chain(&error);
                return Err(match error {
                    SendError::Broken { .. } | SendError::OtherProtocol { .. } => CallError::Unknown(text),
                    SendError::Credentials { .. } | SendError::Connect { .. } | SendError::Url(_) => {
                        CallError::NotSent(text)
                    }
                });
            }
        };
        let (parts, body) = response.into_parts();
        if let Some(entry) = &mut entry {
            entry.responded(parts.status);
        }
        match Limited::new(body, MAX_RESPONSE).collect().await {
            Ok(body) => {
                let body = body.to_bytes();
                if let Some(mut entry) = entry {
                    entry.sent(body.len());
                    entry.ended(None);
                }
                Ok(Response::from_parts(parts, body))
            }
            Err(error) => {
                failed(entry);
                Err(CallError::Unknown(format!(
                    "the response of the Kubernetes API server is not complete: {error}"
                )))
            }
        }
    }
}
