//! The audit log: one JSON line when a request of the API listener begins and one when it ends.
//!
//! The lines have the caller, the agent, the action on its Kubernetes API, the decision and the outcome. They
//! never have a body, a token or a path. They have a hash of the path, by which a known path can be found.
//!
//! Requests never wait for the log: a record that the [`Sink`] cannot take is dropped and counted.

pub mod kubernetes;
mod sink;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ids::{Actor, AgentId, ConnectionId};
pub use process::audit_log::AuditMetrics;
use process::audit_log::{push_json, timestamp};
use serde::Serialize;

pub use self::sink::{OpenError, Sink, is_open_to_others};

/// What was decided about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    /// The request was allowed.
    Allow,
    /// The request was refused.
    Deny,
}

/// The rule that decided about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The token: its signature, audience, issuer and times.
    Jwt,
    /// The request is not gRPC.
    NotGrpc,
    /// `grpc-timeout` cannot be read.
    GrpcTimeout,
    /// `grpc-encoding` is not supported.
    GrpcEncoding,
    /// Metadata that begins with `kas-` is invalid or reserved, or the headers are too large.
    Metadata,
    /// kas has no such method, and no agent is named; or the path is not that of a method.
    Method,
    /// Of the endpoint for kubectl, like all below: the request is malformed, too large, or names no agent.
    Form,
    /// The page of a browser from which the request comes.
    Origin,
    /// The credential: missing, malformed, unknown, or it cannot be checked.
    Credential,
    /// The rules of `agent.kubernetes_api.access`, or what GitLab has decided.
    Access,
    /// The number of open requests.
    Limit,
    /// What the request needs, and this kas or the agentk does not support.
    Needs,
}

/// What is recorded of a request of the endpoint for kubectl in addition.
#[derive(Clone, Debug, Default)]
pub struct EndpointFields {
    /// Where the caller is known.
    pub source: Option<&'static str>,
    /// How the identity of the request was chosen.
    pub mode: Option<&'static str>,
    /// The index of the access rule that decided, from 0.
    pub access_rule: Option<usize>,
    /// The kind of request: `short`, `watch`, `follow`, `proxy` or `upgrade`.
    pub kind: Option<&'static str>,
    /// The id in the API server's audit log.
    pub audit_id: String,
    /// What the client calls itself, cut to [`EndpointFields::LONGEST_USER_AGENT`] characters.
    pub user_agent: Option<String>,
    /// The protocol that the client asks for.
    pub upgrade: Option<&'static str>,
}

impl EndpointFields {
    /// The longest user agent that is recorded, in characters.
    pub const LONGEST_USER_AGENT: usize = 128;
}

/// What both lines of a request have in common.
#[derive(Clone, Debug)]
pub struct AuditFields {
    /// The request id: `x-gitlab-correlation-id`.
    pub request_id: String,
    /// The id of the trace, if there is one.
    pub trace_id: Option<String>,
    /// The address of the caller.
    pub peer: Option<SocketAddr>,
    /// The caller, if its token is valid.
    pub actor: Option<Arc<Actor>>,
    /// The agent.
    pub agent: Option<AgentId>,
    /// The agent's configuration project, if this replica knows it.
    pub project: Option<i64>,
    /// The connection of the agent; `None`: any.
    pub connection: Option<ConnectionId>,
    /// The gRPC method.
    pub method: String,
    /// The action on the agent's Kubernetes API, if the request is for that.
    pub kubernetes: Option<kubernetes::KubernetesAction>,
    /// The decision.
    pub decision: Decision,
    /// The rule that decided.
    pub rule: Rule,
    /// For the endpoint for kubectl.
    pub endpoint: Option<EndpointFields>,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct End {
    /// Whose tunnel the request took; `None`: it had no tunnel.
    pub route: Option<Route>,
    /// Bytes of gRPC messages from the caller, uncompressed.
    pub bytes_in: u64,
    /// Bytes of gRPC messages to the caller.
    pub bytes_out: u64,
    /// The status that was sent to the caller.
    pub status: EndStatus,
    /// The outcome, if it is not a normal answer.
    pub outcome: Option<&'static str>,
    /// Time since the request arrived.
    pub duration: Duration,
}

/// The status that a caller got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndStatus {
    /// Of gRPC: the name of the code.
    Grpc(&'static str),
    /// Of the endpoint for kubectl.
    Http {
        /// The status code; `None`: the client left before the answer.
        code: Option<u16>,
        /// What ended the request: `client`, `upstream`, `drain`, `revoked`, `limit` or `tunnel`.
        ended_by: &'static str,
    },
}

/// The replica whose tunnel a request took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The replica that was called.
    Local,
    /// Another replica.
    Peer(ids::ReplicaId),
}

/// A record, which becomes one line.
#[derive(Debug)]
pub struct Record {
    /// Time since 1970-01-01 00:00 UTC.
    pub at: Duration,
    /// The fields of the request.
    pub fields: Arc<AuditFields>,
    /// How the request ended; `None` for the line `start`.
    pub end: Option<End>,
}

/// A line; `docs/operations.md` describes each key.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    event: &'static str,
    replica: &'a str,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actor: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_behalf_of: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_id: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    project_id: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection_id: Option<i64>,
    method: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    verb: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hash: Option<&'a str>,
    decision: Decision,
    rule: Rule,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    access_rule: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    audit_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_agent: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upgrade: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    route_replica: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_in: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_out: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    http_status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_by: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_us: Option<u64>,
}

impl Record {
    /// Appends the line to `out`.
    fn write_to(&self, replica: &str, out: &mut Vec<u8>) {
        let AuditFields { request_id, trace_id, peer, actor, agent, project, connection, method, .. } =
            &*self.fields;
        let kubernetes = self.fields.kubernetes.as_ref();
        let end = self.end.as_ref();
        let route = end.and_then(|end| end.route.as_ref());
        let endpoint = self.fields.endpoint.as_ref();
        let (mut status, mut http_status, mut ended_by) = (None, None, None);
        match end.map(|end| end.status) {
            None => {}
            Some(EndStatus::Grpc(name)) => status = Some(name),
            Some(EndStatus::Http { code, ended_by: by }) => (http_status, ended_by) = (code, Some(by)),
        }
        let line = Line {
            time: timestamp(self.at),
            event: if end.is_some() { "end" } else { "start" },
            replica,
            request_id,
            trace_id: trace_id.as_deref(),
            peer: *peer,
            actor: actor.as_ref().map(|actor| &*actor.issuer),
            subject: actor.as_ref().and_then(|actor| actor.subject.as_deref()),
            on_behalf_of: kubernetes.and_then(|action| action.on_behalf_of.as_deref()),
            agent_id: agent.map(AgentId::get),
            project_id: *project,
            connection_id: connection.map(ConnectionId::get),
            method,
            verb: kubernetes.map(|action| &*action.verb),
            resource: kubernetes.map(|action| &*action.resource),
            path_hash: kubernetes.map(|action| &*action.path_hash),
            decision: self.fields.decision,
            rule: self.fields.rule,
            source: endpoint.and_then(|endpoint| endpoint.source),
            mode: endpoint.and_then(|endpoint| endpoint.mode),
            access_rule: endpoint.and_then(|endpoint| endpoint.access_rule),
            kind: endpoint.and_then(|endpoint| endpoint.kind),
            audit_id: endpoint.map(|endpoint| &*endpoint.audit_id),
            user_agent: endpoint.and_then(|endpoint| endpoint.user_agent.as_deref()),
            upgrade: endpoint.and_then(|endpoint| endpoint.upgrade),
            route: route.map(|route| match route {
                Route::Local => "local",
                Route::Peer(_) => "peer",
            }),
            route_replica: route.and_then(|route| match route {
                Route::Local => None,
                Route::Peer(replica) => Some(replica.as_str()),
            }),
            bytes_in: end.map(|end| end.bytes_in),
            bytes_out: end.map(|end| end.bytes_out),
            status,
            http_status,
            ended_by,
            outcome: end.and_then(|end| end.outcome),
            duration_us: end.map(|end| u64::try_from(end.duration.as_micros()).unwrap_or(u64::MAX)),
        };
        push_json(out, &line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_omits_unknown_fields() {
        let fields = Arc::new(AuditFields {
            request_id: "r\n1".into(),
            trace_id: None,
            peer: None,
            actor: Some(Arc::new(Actor { issuer: "gitlab".into(), subject: None })),
            agent: Some(AgentId::new(3).unwrap()),
            project: None,
            connection: None,
            method: "/s/M".into(),
            kubernetes: None,
            decision: Decision::Allow,
            rule: Rule::Jwt,
            endpoint: None,
        });
        let at = Duration::new(1_700_000_000, 123_456_789);
        let mut out = Vec::new();
        Record { at, fields: Arc::clone(&fields), end: None }.write_to("kas-1", &mut out);
        assert_eq!(
            std::str::from_utf8(&out).unwrap(),
            "{\"time\":\"2023-11-14T22:13:20.123456Z\",\"event\":\"start\",\"replica\":\"kas-1\",\
             \"request_id\":\"r\\n1\",\"actor\":\"gitlab\",\"agent_id\":3,\"method\":\"/s/M\",\
             \"decision\":\"allow\",\"rule\":\"jwt\"}\n"
        );
        let end = End {
            route: Some(Route::Peer(ids::ReplicaId::new("kas-2"))),
            bytes_in: 5,
            bytes_out: 7,
            status: EndStatus::Grpc("OK"),
            outcome: None,
            duration: Duration::from_micros(1500),
        };
        out.clear();
        Record { at, fields: Arc::clone(&fields), end: Some(end.clone()) }.write_to("kas-1", &mut out);
        let line: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            line["event"].as_str().zip(line["route"].as_str()).zip(line["route_replica"].as_str()),
            Some((("end", "peer"), "kas-2"))
        );
        assert_eq!((&line["bytes_in"], &line["duration_us"]), (&5.into(), &1500.into()));
        assert!(line.get("outcome").is_none() && line.get("http_status").is_none());

        let endpoint = EndpointFields {
            source: Some("file"),
            mode: Some("agent"),
            access_rule: Some(0),
            kind: Some("watch"),
            audit_id: "kas-1".into(),
            user_agent: Some("kubectl".into()),
            upgrade: None,
        };
        let fields = AuditFields { endpoint: Some(endpoint), ..(*fields).clone() };
        let end = End { status: EndStatus::Http { code: Some(200), ended_by: "drain" }, ..end };
        out.clear();
        Record { at, fields: Arc::new(fields), end: Some(end) }.write_to("kas-1", &mut out);
        let line: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!((&line["http_status"], &line["ended_by"]), (&200.into(), &"drain".into()));
        assert_eq!((&line["source"], &line["access_rule"]), (&"file".into(), &0.into()));
        assert_eq!((&line["audit_id"], &line["kind"]), (&"kas-1".into(), &"watch".into()));
        assert!(line.get("status").is_none() && line.get("upgrade").is_none());
    }

    #[test]
    fn rules_have_the_names_in_the_manual() {
        let name = |rule: Rule| serde_json::to_value(rule).unwrap();
        assert_eq!(name(Rule::NotGrpc), "not-grpc");
        assert_eq!(name(Rule::GrpcTimeout), "grpc-timeout");
        assert_eq!(name(Rule::Credential), "credential");
        assert_eq!(serde_json::to_value(Decision::Deny).unwrap(), "deny");
    }
}
