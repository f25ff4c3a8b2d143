//! Delivers hooks: as a request to a Service, or as an annotation of an object.

use std::{sync::Arc, time::Duration};

use agent_config::kas_yaml::hooks::{Annotate, Deliver as Way, Hook, Service};
use async_trait::async_trait;
use cluster_call::{Cluster, ClusterSettings, Request, ServiceRequest};
use grpc::{Code, Outcome, Status};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use ids::{Actor, AgentId};
use kube_request::Target;
use mailbox::{Definition, Delivery, Message, MessageId};
use observe::{Observer, audit::Rule};
use routing::router::Router;
use serde_json::json;

use super::desk::Desk;
use crate::mailbox::{Deliver, Died, Sent};

/// How long a receiver may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a delivery may wait for a tunnel.
const FIND: Duration = Duration::from_secs(5);
/// How much of an answer is read, in bytes. The status says what it means, and the rest is discarded.
const ANSWER: usize = 1 << 20;
/// How much of an error is kept, in characters.
const REASON: usize = 200;
/// The method of the lines in the audit log about a dead letter.
const DEAD: &str = "/kas.hooks.v1.Hooks/Dead";
/// Who changes annotations.
const MANAGER: &str = "kas-hooks";

/// The clusters of agents.
pub(crate) struct Receivers {
    pub(crate) router: Arc<Router>,
    pub(crate) observer: Arc<Observer>,
}

/// Delivers hooks.
pub(crate) struct Delivering {
    desk: Arc<Desk>,
    receivers: Receivers,
}

impl Delivering {
    pub(crate) fn new(desk: Arc<Desk>, receivers: Receivers) -> Arc<Self> {
        Arc::new(Self { desk, receivers })
    }
}

#[async_trait]
impl Deliver for Delivering {
    async fn deliver(&self, delivery: Delivery, hooks: Option<Definition>) -> Sent {
        let Delivery { message, attempt } = delivery;
        let hooks = match self.desk.hooks(hooks) {
            Some(Ok(hooks)) => hooks,
            Some(Err(flaw)) => return Sent::Again(flaw),
            None => return Sent::Again("the hooks of the agent are not known".to_owned()),
        };
        let Some(hook) = hooks.find(&message.hook) else {
            return Sent::Dead("kas.yaml has no such hook any more".to_owned());
        };
        let user_agent = message.headers.iter().find(|(name, _)| &**name == "user-agent");
        let user_agent = user_agent.and_then(|(_, value)| std::str::from_utf8(value).ok());
        let settings = ClusterSettings {
            agent: message.agent,
            task: task(&message.hook, message.id),
            source: "hooks",
            user_agent: user_agent.unwrap_or("kas/hooks").to_owned(),
            impersonation: None,
            timeout: TIMEOUT,
            find: FIND,
            at_once: 1,
            max_body: ANSWER,
        };
        let Receivers { router, observer } = &self.receivers;
        let cluster = Cluster::new(Arc::clone(router), Arc::clone(observer), settings).for_status();
        match send(&cluster, hook, &message, attempt).await {
            Ok(sent) => sent,
            Err(status) => match failure(&status) {
                Failed::NotSent(why) if router.finds(message.agent).await.unwrap_or(true) => Sent::Again(why),
                Failed::NotSent(_) => Sent::Absent,
                Failed::Unknown(why) => Sent::Again(why),
                Failed::Refused(why) => Sent::Dead(why),
            },
        }
    }

    fn died(&self, id: MessageId, agent: AgentId, hook: &str, why: Died) {
        let name = HeaderValue::from_str(&id.to_string()).unwrap_or(HeaderValue::from_static("hook"));
        let record = self.receivers.observer.arrived_by(Rule::Credential, DEAD, None, &name);
        let actor = Actor { issuer: "kas".to_owned(), subject: Some(task(hook, id)) };
        record.actor(&Arc::new(actor));
        record.target(agent, None);
        record.happened(
            match why {
                Died::Refused => Code::Aborted,
                Died::Late => Code::DeadlineExceeded,
            },
            "dead",
        );
    }
}

/// Returns what the audit log calls the deliveries of a hook.
fn task(hook: &str, id: MessageId) -> String {
    format!("hook:{hook}/{id}")
}

/// Sends a hook, and returns what the answer means.
async fn send(cluster: &Cluster, hook: &Hook, message: &Message, attempt: u32) -> Result<Sent, Status> {
    match &hook.deliver {
        Way::Service(Service { address, path }) => {
            let headers = headers(message, attempt);
            let (service, body) = (address, message.body.clone());
            let request = ServiceRequest { service, method: Method::POST, path, headers: &headers, body };
            let answer = cluster.call_service(request).await?;
            // What a receiver says may repeat the hook.
            Ok(judge(answer.status.as_u16(), answer.refused.as_deref(), "of the receiver"))
        }
        Way::Annotate(annotate) => {
            let answer = cluster.send(patch(annotate, message)?).await?;
            let status = u16::try_from(answer.status).unwrap_or_default();
            Ok(judge(status, refusal(&answer.body).as_deref(), "of the API server"))
        }
    }
}

/// Returns the message of a `Status` of Kubernetes.
fn refusal(body: &[u8]) -> Option<String> {
    let read: serde_json::Value = serde_json::from_slice(body).ok()?;
    (read["kind"] == "Status").then(|| read["message"].as_str().map(str::to_owned))?
}

/// For fuzzing: an answer of an API server to the patch of a hook. No panic, and the reason is short.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    for status in [200, 403, 503] {
        if let Sent::Again(why) | Sent::Dead(why) =
            judge(status, refusal(bytes).as_deref(), "of the API server")
        {
            assert!(why.chars().count() <= REASON + 5, "{why}");
        }
    }
}

/// Returns what an answer means. `refused` is what the API server says.
fn judge(status: u16, refused: Option<&str>, of: &str) -> Sent {
    let why = || match refused {
        Some(message) => format!("{status}: {}", message.chars().take(REASON).collect::<String>()),
        None => format!("{status} {of}"),
    };
    match status {
        200..=299 => Sent::Done,
        408 | 429 | 500..=599 => Sent::Again(why()),
        _ => Sent::Dead(why()),
    }
}

/// Why there is no answer.
enum Failed {
    NotSent(String),
    Unknown(String),
    Refused(String),
}

fn failure(status: &Status) -> Failed {
    let text = status.message().chars().take(REASON).collect();
    match (status.outcome(), status.code()) {
        (Some(Outcome::NotStarted), _) => Failed::NotSent(text),
        (Some(Outcome::Unknown), _) => Failed::Unknown(text),
        (None, Code::Unimplemented | Code::PermissionDenied | Code::InvalidArgument) => Failed::Refused(text),
        (None, _) => Failed::Unknown(text),
    }
}

/// Returns the headers of a hook for its Service.
fn headers(message: &Message, attempt: u32) -> HeaderMap {
    let mut headers = HeaderMap::new();
    // The user agent is that of the request.
    for (name, value) in message.headers.iter().filter(|(name, _)| &**name != "user-agent") {
        // Others than text cannot pass a tunnel.
        let is_text = value.iter().all(|byte| matches!(byte, b'\t' | b' '..=b'~'));
        if let (Ok(name), Ok(value), true) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value), is_text)
        {
            headers.append(name, value);
        }
    }
    if let Ok(id) = HeaderValue::from_str(&message.id.to_string()) {
        headers.insert(HeaderName::from_static("kas-hook-id"), id);
    }
    headers.insert(HeaderName::from_static("kas-hook-attempt"), HeaderValue::from(attempt));
    headers
}

/// Returns the request that annotates an object.
///
/// # Errors
/// If its path cannot be sent.
fn patch(annotate: &Annotate, message: &Message) -> Result<Request, Status> {
    let Annotate { group, version, plural, namespace, name, annotation } = annotate;
    let root = if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
    let space = namespace.as_ref().map_or_else(String::new, |it| format!("/namespaces/{it}"));
    let path = format!("{root}{space}/{plural}/{name}?fieldManager={MANAGER}");
    let target = Target::parse(path)
        .map_err(|error| Status::new(Code::InvalidArgument, format!("the path: {error}")))?;
    let patch = json!({ "metadata": { "annotations": { annotation: message.id.to_string() } } });
    let mut request = Request::new(Method::PATCH, target);
    request.body = patch.to_string().into();
    Ok(request.header("Content-Type", "application/merge-patch+json"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use mailbox::State;

    use super::*;

    fn message() -> Message {
        Message {
            id: MessageId(1),
            agent: AgentId::new(7).unwrap(),
            hook: "push".into(),
            dedup: None,
            headers: Arc::new([
                ("content-type".into(), Bytes::from_static(b"application/json")),
                ("user-agent".into(), Bytes::from_static(b"GitHub-Hookshot/1")),
                ("x-github-event".into(), Bytes::from_static(b"push")),
                ("x-hub-odd".into(), Bytes::from_static(b"\xff")),
            ]),
            body: Bytes::from_static(b"{}"),
            version: 1,
            state: State::Waiting,
            attempts: 0,
            age: Duration::ZERO,
            state_age: Duration::ZERO,
            reason: "".into(),
            steady: true,
        }
    }

    fn of(deliver: &str) -> Hook {
        let yaml = format!("hooks: [{{name: push, verify: {{github: a}}, deliver: {deliver}}}]");
        agent_config::kas_yaml::parse(yaml.as_bytes()).unwrap().hooks.list()[0].clone()
    }

    #[test]
    fn a_service_gets_the_hook_as_it_came() {
        let headers = headers(&message(), 3);
        let mut headers: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        headers.sort_unstable();
        assert_eq!(
            headers,
            [
                ("content-type", "application/json"),
                ("kas-hook-attempt", "3"),
                ("kas-hook-id", "00000000000000000000000000000001"),
                ("x-github-event", "push"),
            ]
        );
    }

    #[test]
    fn an_object_gets_the_id_and_nothing_of_the_body() {
        let hook = of(
            "{annotate: {resource: source.toolkit.fluxcd.io/v1/gitrepositories, namespace: apps, name: app, \
                       annotation: reconcile.fluxcd.io/requestedAt}}",
        );
        let Way::Annotate(annotate) = &hook.deliver else { panic!("{hook:?}") };
        let request = patch(annotate, &message()).unwrap();
        assert_eq!(request.method, Method::PATCH);
        assert_eq!(
            request.target.path(),
            "/apis/source.toolkit.fluxcd.io/v1/namespaces/apps/gitrepositories/app"
        );
        let patch: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
        let id = "00000000000000000000000000000001";
        assert_eq!(patch, json!({"metadata": {"annotations": {"reconcile.fluxcd.io/requestedAt": id}}}));
    }

    #[test]
    fn only_what_may_succeed_later_is_tried_again() {
        let of = "of the receiver";
        assert_eq!(judge(204, None, of), Sent::Done);
        for status in [408, 429, 500, 503] {
            assert!(matches!(judge(status, None, of), Sent::Again(_)), "{status}");
        }
        for status in [301, 400, 401, 403, 404, 100, 0] {
            assert!(matches!(judge(status, None, of), Sent::Dead(_)), "{status}");
        }
        let refused = Some("services \"a\" is forbidden");
        assert_eq!(judge(403, refused, of), Sent::Dead("403: services \"a\" is forbidden".to_owned()));
        assert_eq!(judge(400, None, of), Sent::Dead("400 of the receiver".to_owned()));
        let of = |code, outcome: Option<Outcome>| {
            let status = Status::new(code, "x");
            failure(&match outcome {
                Some(outcome) => status.with_outcome(outcome),
                None => status,
            })
        };
        assert!(matches!(of(Code::Unavailable, Some(Outcome::NotStarted)), Failed::NotSent(_)));
        assert!(matches!(of(Code::Unavailable, Some(Outcome::Unknown)), Failed::Unknown(_)));
        assert!(matches!(of(Code::PermissionDenied, None), Failed::Refused(_)));
    }
}
