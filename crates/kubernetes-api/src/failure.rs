//! Errors of kas itself, as Kubernetes clients expect them.
//!
//! client-go repeats a request, whatever its method, on 429 or at least 500 if there is `Retry-After`. So
//! only an error of a request that was not started, or that only reads, has one; and only if the reason is
//! soon over.
//!
//! An error is a `Status` in JSON, with [one exception](is_read_raw).

use std::time::Duration;

use bytes::Bytes;
use grpc::{Code, Outcome, Status as GrpcStatus};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use ids::AgentId;
use kube_request::{Kind, RequestInfo, Status};
use net::http::Body;
use observe::audit::Rule;

use crate::{ended_by::EndedBy, request_id::RequestId};

/// The largest part of an agent's message that is passed on, in characters.
const LONGEST_MESSAGE: usize = 1024;
/// When a request that was not started, or that only reads, may be repeated.
const SOON: Duration = Duration::from_secs(1);
/// When a request whose credential could not be checked may be repeated.
const IDENTITY: Duration = Duration::from_secs(2);

/// Tells old GitLab clients that kas, and not the API server, refused the credential.
const GITLAB_UNAUTHORIZED: HeaderName = HeaderName::from_static("gitlab-unauthorized");

/// Where the agent of a failed request is, as far as replicas know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// A replica holds a tunnel of it.
    Held,
    /// It is connected to a replica, and has no tunnel.
    WithoutTunnel,
    /// It is not connected.
    Away,
    /// That cannot be found out at the moment.
    Unknown,
}

/// Why a request gets no answer of an API server.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    /// The rule that refused the request; `None`: it was allowed.
    pub(crate) rule: Option<Rule>,
    /// What ended the request, if it was allowed.
    pub(crate) ended_by: EndedBy,
    /// Headers of the answer besides those of every error.
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Failure {
    /// A request that is refused by a rule.
    pub(crate) fn refused(rule: Rule, code: StatusCode, text: impl Into<String>) -> Self {
        Self {
            status: Status::new(code, text),
            rule: Some(rule),
            ended_by: EndedBy::Limit,
            headers: Vec::new(),
        }
    }

    /// A request that is malformed.
    pub(crate) fn malformed(text: impl Into<String>) -> Self {
        Self::refused(Rule::Form, StatusCode::BAD_REQUEST, text)
    }

    /// A request that was allowed and has failed.
    pub(crate) fn failed(ended_by: EndedBy, code: StatusCode, text: impl Into<String>) -> Self {
        Self { status: Status::new(code, text), rule: None, ended_by, headers: Vec::new() }
    }

    pub(crate) fn with_retry_after(mut self, wait: Duration) -> Self {
        self.status = self.status.with_retry_after(wait);
        self
    }

    pub(crate) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// A method that is not served.
    pub(crate) fn method(method: &Method) -> Self {
        // RFC 9110 requires the header, and its value may be any list of methods.
        Self::refused(Rule::Form, StatusCode::METHOD_NOT_ALLOWED, format!("{method} is not served"))
            .with_header(
                header::ALLOW,
                HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
            )
    }

    /// The credential is missing, malformed or unknown.
    pub(crate) fn unauthorized(text: impl Into<String>) -> Self {
        Self::refused(Rule::Credential, StatusCode::UNAUTHORIZED, text)
            .with_header(GITLAB_UNAUTHORIZED, HeaderValue::from_static("true"))
            .with_header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
    }

    /// The caller may not do that. Whether the agent exists is not told.
    pub(crate) fn forbidden(rule: Rule) -> Self {
        Self::refused(rule, StatusCode::FORBIDDEN, "this credential gives no access to this agent")
    }

    /// The credential cannot be checked now.
    pub(crate) fn unchecked() -> Self {
        Self::refused(
            Rule::Credential,
            StatusCode::SERVICE_UNAVAILABLE,
            "the credential or its access cannot be checked at the moment",
        )
        .with_retry_after(IDENTITY)
    }

    /// A limit is reached.
    pub(crate) fn too_many(text: impl Into<String>) -> Self {
        Self::refused(Rule::Limit, StatusCode::TOO_MANY_REQUESTS, text).with_retry_after(SOON)
    }

    /// The caller begins too many requests. The next one may begin after `wait`.
    pub(crate) fn too_fast(wait: Duration) -> Self {
        Self::refused(
            Rule::Limit,
            StatusCode::TOO_MANY_REQUESTS,
            "this caller begins more requests than agent.kubernetes_api.limits.per_caller allows",
        )
        .with_retry_after(wait.max(SOON))
    }

    /// This kas does not do that for the agent, or not yet.
    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self::refused(Rule::Needs, StatusCode::NOT_IMPLEMENTED, text)
    }

    /// The agent is not connected, or has no tunnel. Without `Retry-After`: kubectl would repeat the request
    /// for minutes.
    pub(crate) fn away(text: impl Into<String>, method: &Method, kind: Kind) -> Self {
        // client-go continues the watch after 429, and lists everything again after 503.
        let is_watch = kind == Kind::Watch && only_reads(method);
        let code = if is_watch { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::SERVICE_UNAVAILABLE };
        Self::failed(EndedBy::Tunnel, code, text)
    }

    /// The client stopped sending the body.
    pub(crate) fn silent_upload(within: Duration) -> Self {
        Self::failed(
            EndedBy::Limit,
            StatusCode::REQUEST_TIMEOUT,
            format!("nothing of the request's body came for {} s", within.as_secs()),
        )
    }

    /// The body of the request ended early. The client has usually left.
    pub(crate) fn broken_upload() -> Self {
        Self::failed(EndedBy::Client, StatusCode::BAD_REQUEST, "the request's body was not complete")
    }

    /// agentk takes nothing more of the request.
    pub(crate) fn stalled_upload(agent: AgentId, within: Duration) -> Self {
        Self::failed(
            EndedBy::Limit,
            StatusCode::GATEWAY_TIMEOUT,
            format!(
                "agent {agent} took nothing of the request for {} s; the request may have been carried out",
                within.as_secs()
            ),
        )
    }

    /// The request was open for as long as any may be, and has no answer. Nothing is said of its repetition.
    pub(crate) fn session(within: Duration) -> Self {
        Self::failed(
            EndedBy::Limit,
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "the request was open for {} s, the longest time that is allowed; it may have been carried out",
                within.as_secs()
            ),
        )
    }

    /// The API server did not answer in time.
    pub(crate) fn late(agent: AgentId, within: Duration) -> Self {
        Self::failed(
            EndedBy::Limit,
            StatusCode::GATEWAY_TIMEOUT,
            format!("the API server of agent {agent} did not answer within {} s", within.as_secs()),
        )
    }

    /// There is no diff.
    pub(crate) fn of_diff(status: &GrpcStatus) -> Self {
        let text = plain(status.message());
        let upstream = |code| Self::failed(EndedBy::Upstream, code, text.clone());
        match status.code() {
            Code::InvalidArgument => upstream(StatusCode::BAD_REQUEST),
            Code::NotFound => upstream(StatusCode::NOT_FOUND),
            Code::FailedPrecondition | Code::Unimplemented => upstream(StatusCode::UNPROCESSABLE_ENTITY),
            Code::ResourceExhausted => Self::too_many(text),
            Code::DeadlineExceeded => upstream(StatusCode::GATEWAY_TIMEOUT),
            Code::Unavailable => Self::failed(EndedBy::Tunnel, StatusCode::SERVICE_UNAVAILABLE, text),
            _ => upstream(StatusCode::BAD_GATEWAY),
        }
    }

    /// The permission for the request was withdrawn before it had an answer.
    pub(crate) fn revoked() -> Self {
        Self::failed(
            EndedBy::Revoked,
            StatusCode::FORBIDDEN,
            "this credential no longer gives access to this agent",
        )
    }

    /// The API server does not accept the credentials of agentk. The client must not take that for an error
    /// of its own credential.
    pub(crate) fn rejected_agentk(agent: AgentId) -> Self {
        Self::failed(
            EndedBy::Upstream,
            StatusCode::BAD_GATEWAY,
            format!(
                "the API server does not accept the credentials of agent {agent}: check its service account"
            ),
        )
    }

    /// The agent has sent something that is no answer.
    pub(crate) fn invalid_answer(agent: AgentId, what: &str) -> Self {
        Self::failed(
            EndedBy::Upstream,
            StatusCode::BAD_GATEWAY,
            format!(
                "the answer of agent {agent} cannot be used: {what}; the request may have been carried out"
            ),
        )
    }

    /// This kas shuts down before there was an answer.
    pub(crate) fn drained(method: &Method, kind: Kind) -> Self {
        let failure = Self::unknown(method, kind, "this kas is shutting down");
        Self { ended_by: EndedBy::Drain, ..failure }
    }

    /// It is not known whether the request was carried out.
    fn unknown(method: &Method, kind: Kind, text: &str) -> Self {
        let failed = |code| Self::failed(EndedBy::Tunnel, code, text);
        match kind {
            // The deprecated paths of watches have this kind with any method.
            Kind::Watch if only_reads(method) => failed(StatusCode::TOO_MANY_REQUESTS).with_retry_after(SOON),
            Kind::Short | Kind::Follow if only_reads(method) => {
                failed(StatusCode::SERVICE_UNAVAILABLE).with_retry_after(SOON)
            }
            _ => Self::failed(
                EndedBy::Tunnel,
                StatusCode::BAD_GATEWAY,
                format!("{text}: the request may have been carried out"),
            ),
        }
    }

    /// The router found no tunnel, or lost the request, or the agent answered with a status.
    pub(crate) fn of_status(
        status: &GrpcStatus,
        agent: AgentId,
        method: &Method,
        kind: Kind,
        presence: Presence,
    ) -> Self {
        let text = plain(status.message());
        match (status.outcome(), status.code()) {
            (Some(Outcome::NotStarted), Code::ResourceExhausted) => Self::too_many(text),
            (Some(Outcome::NotStarted), Code::FailedPrecondition) | (None, Code::Unimplemented) => {
                Self::unsupported(text)
            }
            (Some(Outcome::NotStarted), _) if presence == Presence::Away => {
                Self::away(format!("agent {agent} is not connected"), method, kind)
            }
            (Some(Outcome::NotStarted), _) if presence == Presence::WithoutTunnel => {
                Self::away(text, method, kind)
            }
            (Some(Outcome::NotStarted), _) => {
                Self::failed(EndedBy::Tunnel, StatusCode::SERVICE_UNAVAILABLE, text).with_retry_after(SOON)
            }
            (Some(Outcome::Unknown), _) => Self::unknown(method, kind, &text),
            // Without an outcome, the status is that of agentk, or of this kas about the request.
            (None, Code::InvalidArgument) => Self::refused(Rule::Form, StatusCode::BAD_REQUEST, text),
            (None, Code::PermissionDenied) => {
                Self::failed(EndedBy::Upstream, StatusCode::FORBIDDEN, format!("agent {agent}: {text}"))
            }
            (None, _) => Self::failed(
                EndedBy::Upstream,
                StatusCode::BAD_GATEWAY,
                format!("agent {agent}: {text}; the request may have been carried out"),
            ),
        }
    }

    /// Returns the answer, without the headers that all answers have. `is_read_raw`: see [`is_read_raw`].
    pub(crate) fn respond(&self, method: &Method, is_read_raw: bool, id: &RequestId) -> Response<Body> {
        // For these codes, client-go shows what it has read. For others, it has sentences of its own.
        let (content_type, bytes) = match self.status.code() {
            StatusCode::INTERNAL_SERVER_ERROR | StatusCode::NOT_IMPLEMENTED | StatusCode::BAD_GATEWAY
                if is_read_raw =>
            {
                (HeaderValue::from_static("text/plain; charset=utf-8"), self.status.to_text(id.as_str()))
            }
            _ => (HeaderValue::from_static("application/json"), self.status.to_json(id.as_str())),
        };
        let length = bytes.len();
        // HTTP/2 would send the body of an answer to HEAD.
        let body = if method == Method::HEAD { Bytes::new() } else { Bytes::from(bytes) };
        let mut response = Response::new(grpc::full(body));
        *response.status_mut() = self.status.code();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, content_type);
        headers.insert(header::CONTENT_LENGTH, length.into());
        self.write_headers(headers);
        response
    }

    fn write_headers(&self, headers: &mut HeaderMap) {
        if let Some(seconds) = self.status.retry_after() {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        for (name, value) in &self.headers {
            headers.insert(name.clone(), value.clone());
        }
    }
}

/// Whether client-go reads the answer of a request as bytes, also that of an error: these are the documents
/// that kubectl reads before anything else. It does not look for a `Status` there, and shows `unknown`
/// instead, unless the error is plain text.
pub(crate) fn is_read_raw(info: &RequestInfo) -> bool {
    let path = info.path();
    let path = path.strip_suffix('/').unwrap_or(path);
    !info.is_resource()
        && (matches!(path, "/api" | "/apis" | "/version" | "/openapi") || path.starts_with("/openapi/"))
}

/// Whether a request with this method changes nothing, so that it may be repeated.
fn only_reads(method: &Method) -> bool {
    method == Method::GET || method == Method::HEAD
}

/// Returns a message of a peer without control characters, and not longer than a client should see.
pub(crate) fn plain(message: &str) -> String {
    message.chars().take(LONGEST_MESSAGE).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> AgentId {
        AgentId::new(7).unwrap()
    }

    /// Code, reason, `Retry-After`.
    fn seen(failure: &Failure) -> (u16, &'static str, Option<u64>) {
        (failure.status.code().as_u16(), failure.status.reason(), failure.status.retry_after())
    }

    fn of(status: GrpcStatus, method: &Method, kind: Kind) -> Failure {
        Failure::of_status(&status, agent(), method, kind, Presence::Held)
    }

    fn unknown() -> GrpcStatus {
        GrpcStatus::new(Code::Unavailable, "lost").with_outcome(Outcome::Unknown)
    }

    #[test]
    fn only_what_was_not_started_or_only_reads_is_repeated() {
        for (method, kind, expected) in [
            (Method::GET, Kind::Short, (503, "ServiceUnavailable", Some(1))),
            (Method::HEAD, Kind::Short, (503, "ServiceUnavailable", Some(1))),
            (Method::GET, Kind::Follow, (503, "ServiceUnavailable", Some(1))),
            (Method::GET, Kind::Watch, (429, "TooManyRequests", Some(1))),
            (Method::GET, Kind::Proxy, (502, "InternalError", None)),
            (Method::GET, Kind::Upgrade, (502, "InternalError", None)),
            (Method::POST, Kind::Short, (502, "InternalError", None)),
            (Method::PATCH, Kind::Short, (502, "InternalError", None)),
            (Method::DELETE, Kind::Short, (502, "InternalError", None)),
            (Method::POST, Kind::Follow, (502, "InternalError", None)),
            // /api/v1/watch/pods
            (Method::HEAD, Kind::Watch, (429, "TooManyRequests", Some(1))),
            (Method::POST, Kind::Watch, (502, "InternalError", None)),
            (Method::DELETE, Kind::Watch, (502, "InternalError", None)),
        ] {
            let failure = of(unknown(), &method, kind);
            assert_eq!(seen(&failure), expected, "{method} {kind:?}");
            let text = failure.status.text();
            assert_eq!(text.contains("may have been carried out"), expected.2.is_none(), "{text}");
        }
        let not_started = |code| GrpcStatus::new(code, "x").with_outcome(Outcome::NotStarted);
        for (code, expected) in [
            (Code::Unavailable, (503, "ServiceUnavailable", Some(1))),
            (Code::DeadlineExceeded, (503, "ServiceUnavailable", Some(1))),
            (Code::ResourceExhausted, (429, "TooManyRequests", Some(1))),
            (Code::FailedPrecondition, (501, "InternalError", None)),
        ] {
            assert_eq!(seen(&of(not_started(code), &Method::POST, Kind::Short)), expected, "{code}");
        }
    }

    #[test]
    fn an_absent_agent_has_no_retry_after_and_does_not_end_the_resumption_of_a_watch() {
        let status = GrpcStatus::new(Code::Unavailable, "long text").with_outcome(Outcome::NotStarted);
        for (method, kind, expected) in [
            (Method::GET, Kind::Short, (503, "ServiceUnavailable", None)),
            (Method::GET, Kind::Follow, (503, "ServiceUnavailable", None)),
            (Method::GET, Kind::Watch, (429, "TooManyRequests", None)),
            (Method::POST, Kind::Watch, (503, "ServiceUnavailable", None)),
        ] {
            let failure = Failure::of_status(&status, agent(), &method, kind, Presence::Away);
            assert_eq!(seen(&failure), expected);
            assert_eq!(failure.status.text(), "agent 7 is not connected");
            let failure = Failure::of_status(&status, agent(), &method, kind, Presence::WithoutTunnel);
            assert_eq!(seen(&failure), expected);
            assert_eq!(failure.status.text(), "long text", "it says where the agent is connected");
            // It may be connected: no watch may take that for the fact that it is not.
            let failure = Failure::of_status(&status, agent(), &Method::GET, kind, Presence::Unknown);
            assert_eq!(seen(&failure), (503, "ServiceUnavailable", Some(1)));
            assert_eq!(failure.status.text(), "long text", "it says what cannot be asked");
        }
    }

    #[test]
    fn a_status_of_agentk_is_never_repeated_and_cannot_break_lines() {
        for (code, expected) in [
            (Code::Unavailable, (502, "InternalError", None)),
            (Code::Internal, (502, "InternalError", None)),
            (Code::InvalidArgument, (400, "BadRequest", None)),
            (Code::PermissionDenied, (403, "Forbidden", None)),
            (Code::Unimplemented, (501, "InternalError", None)),
        ] {
            let status = GrpcStatus::new(code, format!("a\r\nb{}", "x".repeat(5000)));
            let failure = of(status, &Method::GET, Kind::Short);
            assert_eq!(seen(&failure), expected, "{code}");
            assert!(!failure.status.text().contains(['\r', '\n']));
            assert!(failure.status.text().len() < 1200);
        }
    }

    #[test]
    fn a_wrong_credential_is_told_from_one_that_the_api_server_refuses() {
        let id = RequestId::of_bits(1);
        let response = Failure::unauthorized("the token is malformed").respond(&Method::GET, true, &id);
        assert_eq!(response.status(), 401);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.headers()["gitlab-unauthorized"], "true");
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let response = Failure::rejected_agentk(agent()).respond(&Method::GET, false, &id);
        assert_eq!(response.status(), 502);
        assert!(!response.headers().contains_key("www-authenticate"));
    }

    #[test]
    fn errors_of_documents_that_are_read_raw_are_text_if_their_body_is_shown() {
        let info = |target: &str| {
            RequestInfo::new("GET", &kube_request::Target::parse(target.to_owned()).expect("a target"))
        };
        for target in
            ["/api", "/api/", "/apis?timeout=32s", "/version", "/openapi/v2", "/openapi/v3/apis/apps/v1"]
        {
            assert!(is_read_raw(&info(target)), "{target}");
        }
        for target in ["/api/v1", "/apis/apps/v1", "/api/v1/pods", "/apix", "/openapix", "/metrics", "/"] {
            assert!(!is_read_raw(&info(target)), "{target}");
        }
        let id = RequestId::of_bits(1);
        let agentk = of(GrpcStatus::new(Code::Unavailable, "refused"), &Method::GET, Kind::Short);
        for (failure, is_text) in [
            (agentk, true),
            (Failure::unsupported("x"), true),
            (Failure::late(agent(), Duration::from_secs(1)), false),
            (Failure::unchecked(), false),
            (Failure::too_many("x"), false),
            (Failure::forbidden(Rule::Access), false),
        ] {
            let content_type = |is_read_raw| {
                let response = failure.respond(&Method::GET, is_read_raw, &id);
                response.headers()["content-type"].to_str().unwrap().to_owned()
            };
            let expected = if is_text { "text/plain; charset=utf-8" } else { "application/json" };
            assert_eq!(content_type(true), expected, "{}", failure.status.code());
            assert_eq!(content_type(false), "application/json");
        }
    }

    #[test]
    fn an_answer_to_head_has_the_length_but_no_body() {
        use http_body::Body as _;
        let id = RequestId::of_bits(1);
        let full = Failure::malformed("x").respond(&Method::GET, false, &id);
        let head = Failure::malformed("x").respond(&Method::HEAD, false, &id);
        assert_eq!(full.headers(), head.headers());
        assert_eq!(
            full.body().size_hint().exact().map(Into::into),
            Some(HeaderValue::from(full.body().size_hint().exact().unwrap()))
        );
        assert!(head.body().is_end_stream());
    }
}
