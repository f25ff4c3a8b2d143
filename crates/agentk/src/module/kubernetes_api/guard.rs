//! What stands between a request and the API server: the policy of the cluster's owner, and the audit log.

use bytes::{Bytes, BytesMut};
use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use http_tunnel::agent_end::ResponseEncoder;
use kube_request::{RequestInfo, Target, Upgrade};

use crate::{
    audit::{Audit, Entry, Seen},
    policy::{Decision, Identity, PolicyFile, Refusal},
};

/// The most characters of a request's id. kas makes ids of 32.
const LONGEST_ID: usize = 128;

/// The policy and the audit log, if there are any. The default has neither.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    policy: Option<PolicyFile>,
    audit: Option<Audit>,
}

/// The request may be sent, or this is the response to it.
pub(in crate::module) type Verdict = Result<Option<Entry>, Refused>;

/// A request that must not be sent.
#[derive(Debug)]
pub(in crate::module) struct Refused {
    /// The line of the audit log, which has the decision already.
    entry: Option<Entry>,
    /// Why, for people.
    #[cfg(feature = "gitops")]
    text: String,
    /// A `Status` of Kubernetes.
    body: Bytes,
}

impl Guard {
    /// Makes a guard.
    pub fn new(policy: Option<PolicyFile>, audit: Option<Audit>) -> Self {
        Self { policy, audit }
    }

    /// Decides about a request, as it would be sent to the API server. `metadata` is that of the gRPC
    /// request, and `upgrade` the protocol to which the request upgrades its connection.
    ///
    /// Every request to the API server passes here first, and nothing of it changes afterwards but agentk's
    /// own credentials. `Ok`: it may be sent; the line of the audit log has to be kept until it has ended.
    pub(in crate::module) fn admit<B>(
        &self,
        metadata: &HeaderMap,
        request: &Request<B>,
        upgrade: Option<Upgrade>,
    ) -> Verdict {
        if self.policy.is_none() && self.audit.is_none() {
            return Ok(None);
        }
        let id = request_id(metadata, request.headers());
        let target = request.uri().path_and_query().map(Target::try_from);
        let Some(Ok(target)) = target else {
            // Does not happen: reading the request has checked the target.
            return Err(Refused::new(None, "the target of the request is not valid", &id));
        };
        let info = RequestInfo::new(request.method().as_str(), &target);
        let identity = Identity::of(request.headers());
        let user = identity.as_ref().ok().and_then(Identity::user);
        let mut entry = self
            .audit
            .as_ref()
            .map(|audit| audit.begin(&Seen { id: &id, user, upgrade, target: &target, info: &info }));
        let Some(file) = &self.policy else { return Ok(entry) };

        let decided = match &identity {
            Ok(identity) => file.current().decide(&info, upgrade, identity),
            Err(error) => Err(Refusal::Identity(error.clone())),
        };
        let (decision, part) = match &decided {
            Ok(rule) => (Decision::Allow, rule.to_string()),
            Err(refusal) => (Decision::Deny, refusal.part().to_owned()),
        };
        file.metrics().decided(decision);
        if let Some(entry) = &mut entry {
            entry.decided(decision == Decision::Allow, part);
        }
        match decided {
            Ok(_) => Ok(entry),
            Err(refusal) => {
                tracing::debug!(request.id = id, reason = %refusal, "the policy refuses a request");
                Err(Refused::new(entry, &refusal.to_string(), &id))
            }
        }
    }
}

impl Refused {
    fn new(entry: Option<Entry>, text: &str, id: &str) -> Self {
        let status = kube_request::Status::new(StatusCode::FORBIDDEN, text);
        Self {
            entry,
            #[cfg(feature = "gitops")]
            text: text.to_owned(),
            body: status.to_json_of("agentk", id).into(),
        }
    }

    /// Ends a request of agentk itself, and returns why it was refused.
    #[cfg(feature = "gitops")]
    pub(in crate::module) fn into_text(mut self) -> String {
        if let Some(entry) = &mut self.entry {
            entry.responded(StatusCode::FORBIDDEN);
            entry.ended(None);
        }
        self.text
    }

    /// Returns the response for kas: an HTTP response with status 403, as the API server would send it.
    pub(super) fn into_response(mut self, max_chunk: usize) -> Result<Response<grpc::Body>, Status> {
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.status = StatusCode::FORBIDDEN;
        parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(self.body.len()));
        let mut encoder = ResponseEncoder::new(&parts, max_chunk)?;
        if let Some(entry) = &mut self.entry {
            entry.responded(parts.status);
            entry.sent(self.body.len());
            entry.ended(None);
        }
        encoder.push(self.body);
        let mut all = BytesMut::new();
        while let Some(data) = encoder.next_chunk() {
            all.extend_from_slice(&data);
        }
        encoder.end();
        all.extend_from_slice(&encoder.flush().unwrap_or_default());

        let mut trailers = HeaderMap::new();
        Status::new(Code::Ok, "").write_to(&mut trailers);
        let body = Full::new(all.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
        let mut response = Response::new(grpc::boxed(body));
        response.headers_mut().insert(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        Ok(response)
    }
}

/// Returns the id of a request, which is in kas' logs too; a new one if kas sends none.
fn request_id(metadata: &HeaderMap, headers: &HeaderMap) -> String {
    let given = metadata.get(grpc::CORRELATION_ID).or_else(|| headers.get("x-request-id"));
    let given = given.and_then(|id| id.to_str().ok()).filter(|id| !id.is_empty());
    match given {
        Some(id) => id.chars().take(LONGEST_ID).collect(),
        None => format!("{:032x}", rand::random::<u128>()),
    }
}
