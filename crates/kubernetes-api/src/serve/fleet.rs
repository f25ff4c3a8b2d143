//! Requests that kas answers itself, below `/fleet/`.

pub(crate) mod routes;

use std::{
    any::Any,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use callers::{Authorized, Credential, CredentialError, KnownAgent, Refused, SourceKind};
use grpc::BoxError;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header, request};
use http_body::{Body as HttpBody, Frame, SizeHint};
use ids::{Actor, AgentId};
use kube_request::{Kind, Target, headers::is_impersonation};
use net::http::{Body, Trust};
use observe::audit::{Rule, kubernetes::KubernetesAction};

use self::routes::{Auth, Route, Serves};
pub use self::routes::{FleetRoute, OwnPath, own_paths};
use super::{About, of_kas, page::nothing};
use crate::{
    ClientStream, KubernetesApi, ListedAgent,
    ended_by::EndedBy,
    failure::{Failure, plain},
    open::{OpenRequest, Verdict},
    origin::{Visit, is_preflight},
    record::Ending,
    selection,
    upload::ClientBody,
};

/// Headers of a request that its answer may depend on.
const PASSED: [&str; 5] = ["accept", "content-type", "kas-fleet-require", "last-event-id", "user-agent"];

/// The parts in which a whole body is given to the client's connection, in bytes: what it has taken and the
/// client has not is at most one of them.
const PART: usize = 64 << 10;
/// Why a body ends before its end. The client sees a reset.
const CUT: &str = "the answer was cut";

/// Answers what is asked below `/fleet/`, except diffs.
#[async_trait]
pub trait Fleet: Send + Sync {
    /// Answers a question.
    ///
    /// # Errors A refusal, which the client gets as a `Status` of Kubernetes. Clients that expect errors in
    /// another form get those as an answer.
    ///
    /// # Cancel safety
    /// Cancel safe: the client has left.
    async fn answer(&self, question: FleetQuestion) -> Result<FleetAnswer, FleetRefusal>;
}

/// What [`Fleet`] is asked.
pub struct FleetQuestion {
    /// The path.
    pub route: FleetRoute,
    /// What stands in the variable places of the path: segments decoded, the rest of a path as it was sent.
    pub places: Vec<String>,
    /// The method: one that the route has.
    pub method: http::Method,
    /// Path and query.
    pub target: Target,
    /// Some of the headers: none has a credential.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The id of the request.
    pub request: String,
    /// The caller.
    pub caller: Arc<dyn FleetCaller>,
    /// For an answer that goes on.
    pub end: StreamEnd,
}

/// Why an answer that went on has ended, for metrics and the audit log. Whoever ends it says so before. If
/// nobody does, it was complete, or the client has left.
#[derive(Clone, Debug, Default)]
pub struct StreamEnd(Arc<OnceLock<EndedBy>>);

impl StreamEnd {
    /// The caller may not ask any more.
    pub fn revoked(&self) {
        let _ = self.0.set(EndedBy::Revoked);
    }

    /// Something was exhausted.
    pub fn limited(&self) {
        let _ = self.0.set(EndedBy::Limit);
    }

    fn by(&self) -> EndedBy {
        self.0.get().copied().unwrap_or(EndedBy::Upstream)
    }
}

impl std::fmt::Debug for FleetQuestion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetQuestion").field("route", &self.route).finish_non_exhaustive()
    }
}

/// An answer.
pub struct FleetAnswer {
    /// The status.
    pub status: StatusCode,
    /// Headers besides those of every answer and `Content-Length`.
    pub headers: HeaderMap,
    /// The body.
    pub body: FleetBody,
    /// What is held until the client has taken the body, or has left: such as the memory that it counts as.
    pub held: Option<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for FleetAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetAnswer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// The body of an answer.
pub enum FleetBody {
    /// All of it.
    Whole(Bytes),
    /// One that goes on. Whoever makes it ends it when this replica leaves, and when the caller may no longer
    /// ask.
    Stream(Body),
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetRefusal {
    /// The status: at least 400.
    pub status: StatusCode,
    /// A text for people.
    pub text: String,
    /// When the question may be repeated.
    pub retry_after: Option<Duration>,
}

impl FleetRefusal {
    fn into_failure(self) -> Failure {
        let failure = Failure::failed(EndedBy::Upstream, self.status, plain(&self.text));
        match self.retry_after {
            Some(wait) => failure.with_retry_after(wait),
            None => failure,
        }
    }
}

/// A caller, and the agents that it reaches.
#[async_trait]
pub trait FleetCaller: Send + Sync {
    /// Returns its name, by which its requests are counted.
    fn name(&self) -> Arc<str>;

    /// Returns it as the audit log tells it.
    fn actor(&self) -> Arc<Actor>;

    /// Returns the agent that the path is about, if it is about one, with the permission for it.
    fn agent(&self) -> Option<&Authorized>;

    /// Returns the agents that it may reach.
    ///
    /// # Errors
    /// [`NotReached`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn reachable(&self) -> Result<Reachable, NotReached>;

    /// Returns as whom it may use an agent. Each call decides anew, so a stream can learn of a permission
    /// that was withdrawn.
    ///
    /// # Errors
    /// [`NotReached`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn authorize(&self, agent: AgentId) -> Result<Authorized, NotReached>;
}

/// Agents that a caller may reach, and whether they are connected.
#[derive(Clone, Debug)]
pub struct Reachable {
    /// The agents. Each of them still has to be [authorized](FleetCaller::authorize).
    pub agents: Vec<ListedAgent>,
    /// The source of the caller tells nothing of all agents, so these are simply all that are known, and it
    /// has to be asked about each. The code that asks must bound their number.
    pub is_guess: bool,
}

/// Why an agent, or all, are out of reach.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReached {
    /// The credential is not valid, or no longer: status 401.
    #[error("the token is not valid")]
    Unauthenticated,
    /// The caller may not use the agent. Whether there is such an agent is not told.
    #[error("this credential gives no access to this agent")]
    Forbidden,
    /// That cannot be said now: status 503.
    #[error("{0}")]
    Unavailable(String),
}

/// A request below `/fleet/`, before it is allowed.
pub(super) struct Asked<'a, B>
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
{
    pub(super) parts: &'a request::Parts,
    pub(super) path: &'a str,
    pub(super) body: ClientBody<B>,
    pub(super) credential: Result<Option<Credential>, CredentialError>,
    pub(super) by_host: Option<AgentId>,
    pub(super) stream: ClientStream,
}

/// Reads a whole body of at most `most` bytes. `silent`: how long the client may send nothing.
pub(super) async fn read<B>(mut body: ClientBody<B>, most: usize, silent: Duration) -> Result<Bytes, Failure>
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Send,
{
    let too_large = || {
        let text = format!("the body has more than {most} bytes");
        Failure::refused(Rule::Form, StatusCode::PAYLOAD_TOO_LARGE, text)
    };
    if body.length().is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let mut read = BytesMut::new();
    loop {
        let part = tokio::time::timeout(silent, body.data()).await;
        match part.map_err(|_| Failure::silent_upload(silent))?.map_err(|_| Failure::broken_upload())? {
            None => return Ok(read.freeze()),
            Some(part) if read.len() + part.len() > most => return Err(too_large()),
            Some(part) => read.extend_from_slice(&part),
        }
    }
}

impl KubernetesApi {
    /// Answers a request below `/fleet/`.
    pub(super) async fn fleet<B>(
        self: &Arc<Self>,
        about: &mut About,
        trust: &Trust,
        asked: Asked<'_, B>,
        visit: &Visit<'_>,
    ) -> Result<Response<Body>, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let (method, headers) = (&asked.parts.method, &asked.parts.headers);
        let path = asked.path.split('?').next().unwrap_or_default();
        let (route, places) = Route::find(path).ok_or_else(nothing)?;
        if route.serves == Serves::Page {
            // Whoever links to it, and whatever a browser adds to the request.
            let page = self.settings.page.as_ref().ok_or_else(nothing)?;
            check_method(route, method)?;
            let response = page.answer(method, places.first().map(String::as_str))?;
            (about.is_probe, about.is_page) = (true, true);
            return Ok(response);
        }
        about.page = self.settings.origins.judge(headers, visit)?;
        if is_preflight(method, headers)
            && let Some(response) = about.page.preflight(method, headers)
        {
            about.is_probe = true;
            return Ok(response);
        }
        about.record.action(|| KubernetesAction::of_route(method.as_str(), route.pattern, path));
        check_method(route, method)?;
        if headers.keys().any(|name| is_impersonation(name.as_str())) {
            return Err(Failure::malformed("Impersonate-* headers are not allowed below /fleet/"));
        }
        let kind = kind(route, asked.path);
        about.kind = Some(kind);
        about.record.endpoint(|fields| fields.kind = Some(kind.as_str()));
        match (route.serves, route.auth) {
            (Serves::Diff, _) => self.diff(about, trust, asked).await,
            (Serves::Page, _) | (_, Auth::Everybody) => Err(nothing()),
            (Serves::Fleet(to), Auth::AgentOfPath | Auth::AgentOfQuery) => {
                self.of_agent(about, trust, asked, Found::new(to, route, places)).await
            }
            (Serves::Fleet(to), Auth::EachAgent) => {
                self.of_each(about, trust, asked, Found::new(to, route, places), kind).await
            }
        }
    }

    /// Answers a question about one agent.
    async fn of_agent<B>(
        self: &Arc<Self>,
        about: &mut About,
        trust: &Trust,
        asked: Asked<'_, B>,
        found: Found,
    ) -> Result<Response<Body>, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let Asked { parts, path, body, credential, by_host, stream } = asked;
        let target = target(path)?;
        let by_path = match found.route.auth {
            Auth::AgentOfPath => Some(number(found.places.first().map_or("", String::as_str))?),
            Auth::AgentOfQuery | Auth::EachAgent | Auth::Everybody => {
                target.parameter("agent").map(|agent| number(&agent)).transpose()?
            }
        };
        let by_credential = credential.as_ref().ok().and_then(|credential| credential.as_ref()?.agent());
        let agent = selection::agreed([by_path, by_host, by_credential], &self.settings.prefix)?;
        about.record.target(agent, None);
        about.agent = Some(agent);
        let credential = self.credential(credential, trust)?;
        let authorized = self.authorize(about, trust, &credential, agent).await?;
        let open = self.open.open(Kind::Short, &authorized.caller, agent, stream.reset)?;
        about.record.allowed_at_endpoint(parts.method.as_str(), &HeaderMap::new());
        about.is_allowed = true;
        (self.allowed)(&authorized);
        let ending = Ending::new(about.record.clone(), Arc::clone(&self.metrics), Kind::Short);
        let caller = Caller {
            endpoint: Arc::clone(self),
            name: Arc::clone(&authorized.caller.name),
            source: authorized.caller.source.as_str(),
            network: about.network,
            credential,
            agent: Some(authorized),
        };
        let end = found.end.clone();
        let making = async {
            let body = read(body, found.route.most_body, self.open.limits().silent_upload).await?;
            self.ask(about, parts, target, found, body, Arc::new(caller)).await
        };
        let shared = Arc::clone(open.shared());
        let made = tokio::select! {
            biased;
            verdict = shared.ended() => Err(self.ended_early(verdict, agent, &about.method, Kind::Short)),
            made = making => made,
        };
        respond(about, made, ending, end, open)
    }

    /// Answers a question about the agents that a caller may use.
    async fn of_each<B>(
        self: &Arc<Self>,
        about: &mut About,
        trust: &Trust,
        asked: Asked<'_, B>,
        found: Found,
        kind: Kind,
    ) -> Result<Response<Body>, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let Asked { parts, path, body, credential, stream, .. } = asked;
        let target = target(path)?;
        let credential = self.credential(credential, trust)?;
        // The credential is checked before anybody is asked about agents.
        let name = match self.authorizer.reach(&credential, about.network, Vec::new()).await {
            Err(refusal) => return Err(self.refused(about, trust, &credential, refusal)),
            Ok(Some(reached)) => reached.caller,
            // Its source knows it only together with an agent, and is asked about each one.
            Ok(None) => match credential.agent() {
                Some(agent) => {
                    Arc::clone(&self.authorize(about, trust, &credential, agent).await?.caller.name)
                }
                None => {
                    let network = about.network.map_or_else(String::new, |network| network.to_string());
                    format!("session@{network}").into()
                }
            },
        };
        let source = credential.source().map_or(crate::metrics::NONE, SourceKind::as_str);
        trust.passed();
        about.source = source;
        let open = self.open.open_own(kind, &name, stream.reset)?;
        let caller = Caller {
            endpoint: Arc::clone(self),
            name,
            source,
            network: about.network,
            credential,
            agent: None,
        };
        about.record.actor(&caller.actor());
        about.record.endpoint(|fields| fields.source = Some(source));
        about.record.allowed_at_endpoint(parts.method.as_str(), &HeaderMap::new());
        about.is_allowed = true;
        let ending = Ending::new(about.record.clone(), Arc::clone(&self.metrics), kind);
        let end = found.end.clone();
        let made = match read(body, found.route.most_body, self.open.limits().silent_upload).await {
            Ok(body) => self.ask(about, parts, target, found, body, Arc::new(caller)).await,
            Err(failure) => Err(failure),
        };
        respond(about, made, ending, end, open)
    }

    async fn ask(
        &self,
        about: &About,
        parts: &request::Parts,
        target: Target,
        found: Found,
        body: Bytes,
        caller: Arc<dyn FleetCaller>,
    ) -> Result<FleetAnswer, Failure> {
        let passed = |name: &str| Some((HeaderName::try_from(name).ok()?, parts.headers.get(name)?.clone()));
        let question = FleetQuestion {
            route: found.to,
            places: found.places,
            method: parts.method.clone(),
            target,
            headers: PASSED.into_iter().filter_map(passed).collect(),
            body,
            request: about.id.as_str().to_owned(),
            caller,
            end: found.end,
        };
        self.fleet.answer(question).await.map_err(FleetRefusal::into_failure)
    }
}

/// The route of a request.
struct Found {
    to: FleetRoute,
    route: &'static Route,
    places: Vec<String>,
    end: StreamEnd,
}

impl Found {
    fn new(to: FleetRoute, route: &'static Route, places: Vec<String>) -> Self {
        Self { to, route, places, end: StreamEnd::default() }
    }
}

/// Refuses a method that a route has not.
fn check_method(route: &Route, method: &http::Method) -> Result<(), Failure> {
    if route.methods.contains(&method.as_str()) {
        return Ok(());
    }
    let text = format!("{method} is not served here");
    let failure = Failure::refused(Rule::Form, StatusCode::METHOD_NOT_ALLOWED, text);
    Err(match HeaderValue::try_from(route.allow()) {
        Ok(allow) => failure.with_header(header::ALLOW, allow),
        Err(_) => failure,
    })
}

/// Returns how long the answer lasts: a view that is watched has no end.
fn kind(route: &Route, path: &str) -> Kind {
    let is_watch = |target: Target| target.parameter("watch").is_some_and(|value| is_yes(&value));
    match route.serves {
        Serves::Fleet(FleetRoute::View) if target(path).is_ok_and(is_watch) => Kind::Watch,
        _ => Kind::Short,
    }
}

/// Whether a parameter says yes, as the API server reads it.
fn is_yes(value: &str) -> bool {
    matches!(value, "1" | "true")
}

fn target(path: &str) -> Result<Target, Failure> {
    Target::parse(path.to_owned()).map_err(|error| Failure::malformed(error.to_string()))
}

fn number(text: &str) -> Result<AgentId, Failure> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    let agent = is_plain.then(|| text.parse().ok()).flatten();
    agent.ok_or_else(|| Failure::malformed("the path must have the number of an agent"))
}

/// Makes the response of an answer.
pub(super) fn respond(
    about: &About,
    made: Result<FleetAnswer, Failure>,
    mut ending: Ending,
    end: StreamEnd,
    open: OpenRequest,
) -> Result<Response<Body>, Failure> {
    let FleetAnswer { status, headers, body, held } = match made {
        Ok(answer) => answer,
        Err(failure) => {
            ending.status(failure.status.code());
            ending.ended_by(failure.ended_by);
            return Err(failure);
        }
    };
    ending.status(status);
    let is_empty = matches!(&body, FleetBody::Whole(bytes) if bytes.is_empty());
    if is_empty || about.method == http::Method::HEAD {
        // Nobody asks a body without parts for one.
        ending.ended_by(EndedBy::Upstream);
    }
    let sent = |source| grpc::boxed(Sent { source, ending, end, open, _held: held });
    let mut response = match body {
        FleetBody::Whole(bytes) => {
            let mut response = of_kas(&about.method, "application/json", Bytes::new());
            response.headers_mut().insert(header::CONTENT_LENGTH, bytes.len().into());
            let body = if about.method == http::Method::HEAD { Bytes::new() } else { bytes };
            *response.body_mut() = sent(Source::Whole(body));
            response
        }
        FleetBody::Stream(body) => Response::new(sent(Source::Stream(body))),
    };
    *response.status_mut() = status;
    for (name, value) in headers {
        if let Some(name) = name {
            response.headers_mut().insert(name, value);
        }
    }
    Ok(response)
}

/// Where the parts of an answer come from.
enum Source {
    Whole(Bytes),
    Stream(Body),
}

/// The body of an answer. Until the client has taken it, the request counts as open, and what the answer
/// holds is held.
struct Sent {
    source: Source,
    ending: Ending,
    end: StreamEnd,
    open: OpenRequest,
    _held: Option<Box<dyn Any + Send>>,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Self { source, ending, end, open, .. } = &mut *self;
        let shared = open.shared();
        shared.answer_taken();
        let verdict = shared.poll_verdict(cx).filter(|verdict| *verdict != Verdict::Drain);
        if let Some(verdict) = verdict {
            ending.ended_by(verdict.ended_by());
            return Poll::Ready(match source {
                // What has no length may end after any part.
                Source::Stream(_) if verdict == Verdict::Session => None,
                Source::Stream(_) | Source::Whole(_) => Some(Err(CUT.into())),
            });
        }
        let frame = match source {
            Source::Whole(rest) if rest.is_empty() => None,
            Source::Whole(rest) => Some(Ok(Frame::data(rest.split_to(rest.len().min(PART))))),
            Source::Stream(body) => ready!(Pin::new(body).poll_frame(cx)),
        };
        match &frame {
            Some(Ok(frame)) => {
                ending.passed(frame.data_ref().map_or(0, Bytes::len));
                shared.answer_given();
            }
            Some(Err(_)) | None => ending.ended_by(end.by()),
        }
        if matches!(source, Source::Whole(rest) if rest.is_empty()) {
            ending.ended_by(EndedBy::Upstream);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.source, Source::Whole(rest) if rest.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Whole(rest) => SizeHint::with_exact(rest.len() as u64),
            Source::Stream(_) => SizeHint::default(),
        }
    }
}

/// A caller with its credential.
struct Caller {
    endpoint: Arc<KubernetesApi>,
    name: Arc<str>,
    source: &'static str,
    network: Option<IpAddr>,
    credential: Credential,
    /// The agent that the path is about.
    agent: Option<Authorized>,
}

#[async_trait]
impl FleetCaller for Caller {
    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    fn actor(&self) -> Arc<Actor> {
        Arc::new(Actor { issuer: self.source.into(), subject: Some((*self.name).into()) })
    }

    fn agent(&self) -> Option<&Authorized> {
        self.agent.as_ref()
    }

    async fn reachable(&self) -> Result<Reachable, NotReached> {
        let endpoint = &self.endpoint;
        let all = endpoint.listing.get(endpoint.directory.list()).await.map_err(|error| {
            tracing::debug!(error, "the agents cannot be listed");
            NotReached::Unavailable("the agents cannot be listed at the moment".to_owned())
        })?;
        let known: Vec<KnownAgent> = all.iter().map(|listed| listed.agent.clone()).collect();
        let reached = endpoint.authorizer.reach(&self.credential, self.network, known).await;
        let named = self.credential.agent();
        let is_named = |agent: AgentId| named.is_none_or(|named| named == agent);
        match reached.map_err(|refusal| not_reached(refusal.why))? {
            None => Ok(Reachable {
                agents: all.iter().filter(|listed| is_named(listed.agent.id)).cloned().collect(),
                is_guess: true,
            }),
            Some(reached) => {
                let ids: std::collections::HashSet<AgentId> =
                    reached.agents.iter().map(|agent| agent.id).filter(|id| is_named(*id)).collect();
                let agents = all.iter().filter(|listed| ids.contains(&listed.agent.id)).cloned().collect();
                Ok(Reachable { agents, is_guess: false })
            }
        }
    }

    async fn authorize(&self, agent: AgentId) -> Result<Authorized, NotReached> {
        let judged = self.endpoint.authorizer.authorize(&self.credential, agent, self.network).await;
        let authorized = judged.map_err(|refusal| not_reached(refusal.why))?;
        (self.endpoint.allowed)(&authorized);
        Ok(authorized)
    }
}

fn not_reached(why: Refused) -> NotReached {
    match why.status() {
        StatusCode::UNAUTHORIZED => NotReached::Unauthenticated,
        StatusCode::SERVICE_UNAVAILABLE => {
            let text = "the credential or its access cannot be checked at the moment";
            NotReached::Unavailable(text.to_owned())
        }

        _ => NotReached::Forbidden,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_is_read_up_to_its_limit() {
        let body = |bytes: usize| {
            let body = http_body_util::Full::new(Bytes::from(vec![b'x'; bytes]));
            ClientBody::new(body, crate::upload::Ends::Marked)
        };
        let silent = Duration::from_secs(20);
        assert_eq!(read(body(5), 10, silent).await.unwrap(), "xxxxx");
        let refused = read(body(11), 10, silent).await.unwrap_err();
        assert_eq!(refused.status.code(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}
