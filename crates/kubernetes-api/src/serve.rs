//! The steps of a request.

mod diff;
mod direct;
mod fleet;
mod page;

use std::{net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use callers::{
    Authorized, Credential, CredentialError, Refusal, Refused, RunAs, SourceKind, take_credential,
    take_query_parameters,
};
use grpc::{Code, Deadline, Outcome, Status};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header, request,
};
use http_body::Body as HttpBody;
use ids::{Actor, AgentId};
use kube_request::{
    EventEnds, Kind, RequestInfo, Target, Upgrade,
    headers::{is_impersonation, remove_dropped},
};
use net::http::{Body, StreamReset, StreamSlot, Trust, upgrade as upgrade_connection};
use observe::{
    RequestRecord,
    audit::{EndpointFields, Rule, kubernetes::KubernetesAction},
    refusals::{ListenerName, Reason},
    refused_callers::RefusedCaller,
};
use routing::router::{AgentRequest, ChosenAgentk, RouteTrace};
use tokio::time::Instant;
use tunnel::{features::Features, kas_end::Head};

use crate::{
    ClientStream, KubernetesApi, agents,
    answer::{self, AnswerBody, Reader},
    connect::{self, Connect},
    ended_by::EndedBy,
    failure::{Failure, Presence, is_read_raw},
    form,
    head::{self, AnswerHead},
    message::{HeadParts, RequestHead},
    metrics::{AuthOutcome, Direction, NONE},
    open::{OpenRequest, Verdict},
    origin::{Page, Presented, Visit, is_preflight},
    record::Ending,
    request_id::RequestId,
    revocation::Revocation,
    selection::{self, InCluster, Place},
    upgrade::{Input, Link, Session, Switched},
    upload::{ClientBody, Ends, Upload},
};

pub(crate) use self::diff::DIFFS;
#[cfg(test)]
pub(crate) use self::fleet::routes;
pub use self::{
    diff::{DiffQuestion, Diffs},
    direct::Owners,
    fleet::{
        Fleet, FleetAnswer, FleetBody, FleetCaller, FleetQuestion, FleetRefusal, FleetRoute, NotReached,
        OwnPath, Reachable, StreamEnd, own_paths,
    },
    page::{OwnPage, PageFile},
};

/// How long a request waits for an agent that is not connected, and was not a short time ago.
const ABSENT: Duration = Duration::from_secs(3);
/// How long after the start every agent counts as one that will soon be connected.
const AFTER_START: Duration = Duration::from_secs(60);

/// What becomes known of a request on its way, whether it fails or not.
#[derive(Debug)]
struct About {
    id: RequestId,
    arrived: Instant,
    method: Method,
    page: Page,
    /// The agent that it is for, once that is known.
    agent: Option<AgentId>,
    /// The caller, if its credential was accepted.
    caller: Option<Box<str>>,
    /// The source that its credential belongs to by its form.
    presented: Option<SourceKind>,
    /// Why it was refused, for operators only.
    refused: Option<Refused>,
    /// The source of the caller.
    source: &'static str,
    kind: Option<Kind>,
    record: RequestRecord,
    /// The network that the client connects from, if known.
    network: Option<std::net::IpAddr>,
    /// The end of the request is recorded elsewhere from now on.
    is_allowed: bool,
    /// It is a probe, which is neither counted nor recorded.
    is_probe: bool,
    /// The answer is a file of kas itself, with a policy of its own for browsers.
    is_page: bool,
    /// Its client reads an error as bytes, see [`is_read_raw`].
    is_read_raw: bool,
}

impl KubernetesApi {
    /// Serves a request.
    pub(crate) async fn serve<B>(
        self: &Arc<Self>,
        trust: &Trust,
        peer: Option<SocketAddr>,
        request: Request<B>,
        stream: ClientStream,
    ) -> Response<Body>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let (parts, body) = request.into_parts();
        // No 100 is sent for other expectations, so their clients send the body.
        let expects = parts
            .headers
            .get(header::EXPECT)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let ends = if parts.version >= Version::HTTP_2 { Ends::Marked } else { Ends::Failing { expects } };
        let id = RequestId::random();
        let record =
            self.observer.arrived_at_endpoint(peer, id.as_str(), endpoint_fields(&id, &parts.headers));
        let mut about = About {
            id,
            arrived: Instant::now(),
            method: parts.method.clone(),
            page: Page::default(),
            agent: None,
            caller: None,
            presented: None,
            refused: None,
            source: NONE,
            kind: None,
            record,
            network: peer.map(|peer| net::peers::network(peer.ip())),
            is_allowed: false,
            is_probe: false,
            is_page: false,
            is_read_raw: false,
        };
        let served = self.request(&mut about, trust, parts, ClientBody::new(body, ends), stream).await;
        let mut response = match served {
            Ok(response) => response,
            Err(failure) => {
                if !about.is_allowed && !about.is_probe {
                    let rule = failure.rule.unwrap_or(Rule::Form);
                    let code = failure.status.code().as_u16();
                    about.record.denied_at_endpoint(rule, code, failure.ended_by.as_str());
                    self.remember(&about, rule, &failure);
                }
                failure.respond(&about.method, about.is_read_raw, &about.id)
            }
        };
        if !about.is_probe {
            self.metrics.answered(about.source, about.kind, response.status());
        }
        let headers = response.headers_mut();
        about.page.write_to(headers);
        if !about.is_page {
            head::sandbox(headers);
        }
        head::complete(headers, about.id.to_value(), &self.settings.server);
        response
    }

    /// Remembers for operators why a caller was refused.
    fn remember(&self, about: &About, rule: Rule, failure: &Failure) {
        let Some(agent) = about.agent else { return };
        let rule = match rule {
            Rule::Origin => "origin",
            Rule::Credential => "credential",
            Rule::Access => "access",
            // What is wrong with those, the client is told.
            _ => return,
        };
        self.refusals.callers().add(RefusedCaller {
            agent,
            source: about.presented.map_or(about.source, SourceKind::as_str),
            caller: about.caller.clone(),
            rule,
            why: about.refused.map_or_else(|| failure.status.text().to_owned(), |why| why.to_string()),
            request: about.id.as_str().to_owned(),
            at: Instant::now(),
        });
    }

    async fn request<B>(
        self: &Arc<Self>,
        about: &mut About,
        trust: &Trust,
        mut parts: request::Parts,
        body: ClientBody<B>,
        stream: ClientStream,
    ) -> Result<Response<Body>, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let settings = &self.settings;
        let connect = Connect::take(&mut parts);
        about.method = parts.method.clone();
        let connect = connect?;
        let host = form::check(&parts, settings.head).inspect_err(|failure| {
            if failure.status.code() == StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE {
                self.refusals.refused(ListenerName::Kubernetes, Reason::Headers);
            }
        })?;
        let sent = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        // The API server must not see the credentials of a session, whatever the credential of this request
        // is.
        let (path, parameters) = take_query_parameters(&sent);
        let place = selection::place(&settings.prefix, &path)?;
        if place == Place::Ready {
            about.is_probe = true;
            not_here(connect.as_ref())?;
            return self.readiness(&parts.method);
        }
        let by_host = match &settings.host_suffix {
            None => None,
            Some(suffix) => selection::by_host(&host, suffix)?,
        };
        let upgrade = match &connect {
            Some(connect) => Some(connect.upgrade),
            None if parts.version == Version::HTTP_11 => Upgrade::requested(&parts.headers),
            None => None,
        };
        if upgrade.is_some() && !body.is_empty() {
            return Err(Failure::malformed("a request that asks for an upgrade must not have a body"));
        }
        let credential = take_credential(&mut parts.headers, parameters, upgrade == Some(Upgrade::WebSocket));
        if let Err(error) = &credential
            && error.is_bad_request()
        {
            return Err(Failure::malformed(error.to_string()));
        }
        let credential = match (credential, &stream.certificate) {
            // A browser adds a cookie by itself, so a certificate goes before it.
            (
                Ok(None | Some(Credential::Session(_))) | Err(CredentialError::NoCsrfToken),
                Some(certificate),
            ) => Ok(Some(Credential::Certificate(certificate.clone()))),
            (credential, _) => credential,
        };
        about.presented = match &credential {
            Ok(credential) => credential.as_ref().and_then(Credential::source),
            Err(CredentialError::NoCsrfToken) => Some(SourceKind::Cookie),
            Err(_) => None,
        };
        // A cookie without its CSRF token is no credential, but it came from a browser.
        let presented = match about.presented {
            Some(SourceKind::Cookie) => Presented::Browser,
            Some(SourceKind::Certificate) => Presented::Connection,
            _ => Presented::Request,
        };
        let visit = Visit {
            host: &host,
            credential: presented,
            changes_state: upgrade.is_some() || !is_safe(&parts.method),
        };
        let at = match place {
            Place::Cluster(at) => at,
            Place::List => {
                not_here(connect.as_ref())?;
                about.page = settings.origins.judge(&parts.headers, &visit)?;
                if let Some(response) = about.page.preflight(&parts.method, &parts.headers) {
                    about.is_probe = true;
                    return Ok(response);
                }
                let credential = self.credential(credential, trust)?;
                return Box::pin(self.list(about, trust, &credential, stream.reset)).await;
            }
            Place::Fleet => {
                not_here(connect.as_ref())?;
                let (parts, path) = (&parts, &*path);
                let asked = fleet::Asked { parts, path, body, credential, by_host, stream };
                // Its future would be a large part of that of every request.
                return Box::pin(self.fleet(about, trust, asked, &visit)).await;
            }
            Place::Ready => {
                return Err(Failure::refused(
                    Rule::Form,
                    StatusCode::NOT_FOUND,
                    "there is nothing at this path",
                ));
            }
        };
        let target = Target::parse(at.target()).map_err(|error| Failure::malformed(error.to_string()))?;
        let info = RequestInfo::new(parts.method.as_str(), &target);
        let kind = Kind::of(&info, upgrade);
        about.kind = Some(kind);
        about.is_read_raw = is_read_raw(&info);
        about.record.endpoint(|fields| {
            fields.kind = Some(kind.as_str());
            fields.upgrade = upgrade.map(Upgrade::token);
        });
        let by_credential = credential.as_ref().ok().and_then(|credential| credential.as_ref()?.agent());
        let named = [at.agent, by_host, by_credential];
        // A page cannot add a header that names an agent to a preflight request.
        if !is_preflight(&parts.method, &parts.headers) {
            let agent = selection::agreed(named, &settings.prefix)?;
            if connect.is_none()
                && let Some(response) = self.sent_to_owner(&parts.headers, trust, agent).await
            {
                // Its owner counts and records it.
                about.is_probe = true;
                direct::discard(body);
                return Ok(response);
            }
            about.record.target(agent, None);
            about.agent = Some(agent);
        }

        about.page = settings.origins.judge(&parts.headers, &visit)?;
        if let Some(response) = about.page.preflight(&parts.method, &parts.headers) {
            about.is_probe = true;
            return Ok(response);
        }

        let agent = selection::agreed(named, &settings.prefix)?;
        let credential = self.credential(credential, trust)?;
        let authorized = self.authorize(about, trust, &credential, agent).await?;
        drop(credential);
        let Authorized { caller, run_as, .. } = &authorized;
        if !run_as.allows_impersonate_headers()
            && parts.headers.keys().any(|name| is_impersonation(name.as_str()))
        {
            return Err(Failure::malformed("this credential allows no Impersonate-* headers"));
        }
        remove_dropped(&mut parts.headers).map_err(|error| Failure::malformed(error.to_string()))?;

        let open = self.open.open(kind, caller, agent, stream.reset)?;
        about.record.action(|| {
            KubernetesAction::of_info(parts.method.as_str(), &info, &target, user_of(run_as, &parts.headers))
        });
        let (mut message, needs) = RequestHead::new(HeadParts {
            method: &parts.method,
            target,
            info: &info,
            headers: &parts.headers,
            content_length: body.length(),
            impersonation: run_as.impersonation(),
            upgrade,
            id: &about.id,
        })?;
        about.record.allowed_at_endpoint(parts.method.as_str(), &parts.headers);
        about.is_allowed = true;
        (self.allowed)(&authorized);
        let context = context_of(&parts.headers, &about.record);
        message.replace_context(context.clone());
        let request = Allowed {
            agent,
            kind,
            is_proxy: info.is_proxy(),
            upgrade,
            connect,
            at,
            authorized,
            open,
            message,
            needs,
            context,
            closes: (parts.version < Version::HTTP_11).then_some(stream.slot),
        };
        // Each future that holds this one would have its size, and would be copied with it.
        Box::pin(self.forward(about, body, request)).await
    }

    fn readiness(&self, method: &Method) -> Result<Response<Body>, Failure> {
        if (self.is_ready)() {
            Ok(of_kas(method, "text/plain; charset=utf-8", Bytes::from_static(b"ready\n")))
        } else {
            let text = "this kas is starting or shutting down";
            Err(Failure::refused(Rule::Form, StatusCode::SERVICE_UNAVAILABLE, text))
        }
    }

    fn credential(
        &self,
        credential: Result<Option<Credential>, CredentialError>,
        trust: &Trust,
    ) -> Result<Credential, Failure> {
        let text = match credential {
            Ok(Some(credential)) => return Ok(credential),
            Ok(None) => "there is no credential: send Authorization: Bearer <token>".to_owned(),
            Err(error) => error.to_string(),
        };
        self.unauthenticated(trust, NONE);
        Err(Failure::unauthorized(text))
    }

    /// Counts a request without a valid credential.
    fn unauthenticated(&self, trust: &Trust, source: &'static str) {
        trust.failed();
        self.refusals.refused(ListenerName::Kubernetes, Reason::Unauthenticated);
        self.metrics.authenticated(source, AuthOutcome::Unknown);
    }

    async fn authorize(
        &self,
        about: &mut About,
        trust: &Trust,
        credential: &Credential,
        agent: AgentId,
    ) -> Result<Authorized, Failure> {
        let judged = self.authorizer.authorize(credential, agent, about.network).await;
        match judged {
            Ok(authorized) => {
                trust.passed();
                let Authorized { caller, run_as, rule, .. } = &authorized;
                about.source = caller.source.as_str();
                self.metrics.authenticated(about.source, AuthOutcome::Allowed);
                let (mode, rule) = (run_as.mode().as_str(), *rule);
                self.record_caller(about, caller);
                about.record.endpoint(|fields| (fields.mode, fields.access_rule) = (Some(mode), rule));
                Ok(authorized)
            }
            Err(refusal) => Err(self.refused(about, trust, credential, refusal)),
        }
    }

    fn record_caller(&self, about: &About, caller: &callers::Caller) {
        let source = caller.source.as_str();
        about.record.actor(&Arc::new(Actor { issuer: source.into(), subject: Some((*caller.name).into()) }));
        about.record.endpoint(|fields| fields.source = Some(source));
    }

    /// Counts a refusal, and returns the answer for it.
    fn refused(
        &self,
        about: &mut About,
        trust: &Trust,
        credential: &Credential,
        refusal: Refusal,
    ) -> Failure {
        let Refusal { why, caller } = refusal;
        about.refused = Some(why);
        if let Some(caller) = &caller {
            about.source = caller.source.as_str();
            about.caller = Some((*caller.name).into());
            self.record_caller(about, caller);
        } else {
            about.source = source_of(credential);
        }
        tracing::debug!(request.id = about.id.as_str(), source = about.source, reason = %why, "a request was refused");
        match why.status() {
            StatusCode::UNAUTHORIZED => {
                self.unauthenticated(trust, about.source);
                Failure::unauthorized("the token is not valid")
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                self.refusals.refused(ListenerName::Kubernetes, Reason::Unchecked);
                self.metrics.authenticated(about.source, AuthOutcome::Unavailable);
                Failure::unchecked()
            }
            _ => {
                // The credential is good, but for something else.
                trust.passed();
                self.metrics.authenticated(about.source, AuthOutcome::Forbidden);
                Failure::forbidden(Rule::Access)
            }
        }
    }

    /// Answers with the agents that a credential reaches.
    async fn list(
        &self,
        about: &mut About,
        trust: &Trust,
        credential: &Credential,
        reset: Arc<StreamReset>,
    ) -> Result<Response<Body>, Failure> {
        if about.method != Method::GET && about.method != Method::HEAD {
            return Err(Failure::method(&about.method));
        }
        // The credential is checked before anybody is asked about agents.
        let unlisted = || Failure::unsupported("agents cannot be listed with this kind of credential");
        let caller = match self.authorizer.reach(credential, about.network, Vec::new()).await {
            Err(refusal) => return Err(self.refused(about, trust, credential, refusal)),
            Ok(None) => return Err(unlisted()),
            Ok(Some(reached)) => reached.caller,
        };
        trust.passed();
        about.source = source_of(credential);
        let open = self.open.open_own(Kind::Short, &caller, reset)?;
        let unavailable = |why: String| {
            tracing::debug!(error = why, "the agents cannot be listed");
            let text = "the agents cannot be listed at the moment";
            Failure::refused(Rule::Form, StatusCode::SERVICE_UNAVAILABLE, text)
        };
        let all = self.listing.get(self.directory.list()).await.map_err(unavailable)?;
        let known = all.iter().map(|listed| listed.agent.clone()).collect();
        let reach = match self.authorizer.reach(credential, about.network, known).await {
            Err(refusal) => return Err(self.refused(about, trust, credential, refusal)),
            Ok(None) => return Err(unlisted()),
            Ok(Some(reached)) => reached.agents,
        };
        self.metrics.authenticated(about.source, AuthOutcome::Allowed);
        about.record.allowed_at_endpoint(about.method.as_str(), &HeaderMap::new());
        about.is_allowed = true;
        let ending = Ending::new(about.record.clone(), Arc::clone(&self.metrics), Kind::Short);
        let answer = FleetAnswer {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            body: FleetBody::Whole(agents::to_json(reach, &all).into()),
            held: None,
        };
        fleet::respond(about, Ok(answer), ending, fleet::StreamEnd::default(), open)
    }

    /// Sends an allowed request to its agent, and returns the answer.
    async fn forward<B>(
        self: &Arc<Self>,
        about: &About,
        body: ClientBody<B>,
        request: Allowed<'_>,
    ) -> Result<Response<Body>, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let Allowed {
            agent,
            kind,
            is_proxy,
            upgrade,
            connect,
            at,
            authorized,
            open,
            message,
            needs,
            context,
            closes,
        } = request;
        let mut ending = Ending::new(about.record.clone(), Arc::clone(&self.metrics), kind);
        let shared = Arc::clone(open.shared());
        let chosen = ChosenAgentk::default();
        let link = Link::default();
        let upload = if upgrade.is_some() {
            let passed = self.metrics.upgraded(Direction::Up);
            grpc::boxed(Input::new(message, chosen.clone(), link.clone(), Arc::clone(&shared), passed))
        } else {
            grpc::boxed(Upload::new(message, chosen.clone(), body, Arc::clone(&shared)))
        };
        // The head of the answer has no limit with these, so they may wait for it longer than for anything.
        let revocation =
            (kind != Kind::Short).then(|| Revocation::watch(&self.authorizer, authorized, &shared));
        let wait_until = about.arrived + self.patience(agent);
        shared.request_waits(wait_until);
        let sent = AgentRequest {
            agent,
            connection: None,
            method: Arc::from(http_tunnel::METHOD),
            headers: context,
            correlation: about.id.to_value(),
            deadline: Deadline::NONE,
            wait_until: Some(wait_until),
            body: about.record.request_body(upload),
            needs,
            is_long: kind == Kind::Upgrade,
            is_endless: kind != Kind::Short,
            chosen,
            trace: RouteTrace::default(),
            record: about.record.clone(),
        };
        let answered = {
            let exchange = pin!(self.exchange(sent));
            tokio::select! {
                biased;
                verdict = shared.ended() => Err(self.ended_early(verdict, agent, &about.method, kind)),
                answered = exchange => match answered {
                    Ok(answered) => Ok(answered),
                    Err(status) => Err(self.failed(&status, agent, &about.method, kind).await),
                },
            }
        };
        let answered = answered.map(|(head, reader)| {
            let head = AnswerHead::read(&head, upgrade).and_then(|mut head| match &connect {
                Some(connect) => connect.check(&mut head).map(|()| head),
                None => Ok(head),
            });
            (head, reader)
        });
        if !matches!(&answered, Ok((Ok(AnswerHead { switched: Some(_), .. }), _))) {
            // GitLab's agents end an answer that refuses the upgrade only after the request.
            link.end();
        }
        let answered = answered.and_then(|(head, reader)| match head {
            Ok(head) if head.status == StatusCode::UNAUTHORIZED && !is_proxy => {
                // The rest is short. If it is read, the tunnel serves the next request.
                tokio::spawn(reader.finish());
                Err(Failure::rejected_agentk(agent))
            }
            Ok(head) => Ok((head, reader)),
            Err(what) => Err(Failure::invalid_answer(agent, what)),
        });
        let (head, reader) = match answered {
            Ok(answered) => answered,
            Err(failure) => {
                ending.status(failure.status.code());
                ending.ended_by(failure.ended_by);
                return Err(failure);
            }
        };
        self.sightings.saw(agent);
        shared.answer_begins();
        ending.status(head.status);
        self.metrics.head(kind, about.arrived.elapsed().as_secs_f64());
        let mut headers = head.for_client(&self.settings.answer_headers, at.cut, kind);
        if connect.is_some() {
            connect::remove_headers(&mut headers);
        }
        if let Some(protocol) = head.switched {
            let mut response = Response::new(grpc::full(Bytes::new()));
            *response.status_mut() = head.status;
            *response.headers_mut() = headers;
            let mut reader = reader;
            reader.upgrade();
            let passed = self.metrics.upgraded(Direction::Down);
            let session = Session::new(Switched { protocol, reader, link, open, ending, revocation, passed });
            upgrade_connection(&mut response, |stream| session.run(stream));
            return Ok(response);
        }
        let body = if head.is_bodiless(&about.method) {
            reader.finish().await;
            ending.ended_by(EndedBy::Upstream);
            grpc::full(Bytes::new())
        } else {
            let content_type = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
            let ends = (answer::ends_between_events(kind) && head.status == StatusCode::OK)
                .then(|| EventEnds::new(content_type, head.is_encoded));
            if let Some(connection) = closes.filter(|_| head.length.is_none()) {
                shared.closes(connection);
            }
            grpc::boxed(AnswerBody::new(answer::Answer {
                reader,
                open,
                ending,
                length: head.length,
                ends,
                revocation,
            }))
        };
        let mut response = Response::new(body);
        *response.status_mut() = head.status;
        *response.headers_mut() = headers;
        Ok(response)
    }

    /// Sends a request and reads the head of its answer.
    async fn exchange(&self, request: AgentRequest) -> Result<(Bytes, Reader), Status> {
        let answer = self.router.route(request).await?;
        match answer.head {
            Head::Headers(_) => {
                let mut reader = Reader::new(answer.body);
                let head = reader.head().await?;
                Ok((head, reader))
            }
            Head::Only(_, status) if status.code() != Code::Ok => Err(status),
            Head::Only(..) => Err(http_tunnel::kas_end::incomplete()),
        }
    }

    /// How long a request waits for a tunnel of its agent.
    fn patience(&self, agent: AgentId) -> Duration {
        if self.router.registry().holds(agent) {
            self.sightings.saw(agent);
        }
        let is_expected = self.open.start().elapsed() < AFTER_START
            || self.sightings.is_recent(agent)
            || self.router.registry().has_left_recently(agent);
        if is_expected { self.settings.find_timeout } else { ABSENT.min(self.settings.find_timeout) }
    }

    /// Returns the answer for a request that the endpoint has ended before there was one.
    fn ended_early(&self, verdict: Verdict, agent: AgentId, method: &Method, kind: Kind) -> Failure {
        let limits = self.open.limits();
        match verdict {
            Verdict::SilentUpload => Failure::silent_upload(limits.silent_upload),
            Verdict::Revoked => Failure::revoked(),
            Verdict::BrokenUpload => Failure::broken_upload(),
            Verdict::Session => Failure::session(limits.session),
            Verdict::StalledUpload => Failure::stalled_upload(agent, limits.silent_upload),
            Verdict::Drain | Verdict::DrainOver => Failure::drained(method, kind),
            Verdict::LateAnswer | Verdict::UnreadAnswer => Failure::late(agent, limits.answer_head),
        }
    }

    /// Returns the answer for a request that the router or the agent has failed.
    async fn failed(&self, status: &Status, agent: AgentId, method: &Method, kind: Kind) -> Failure {
        let may_be_away = status.outcome() == Some(Outcome::NotStarted)
            && matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded);
        let presence = if may_be_away { self.presence(agent).await } else { Presence::Held };
        Failure::of_status(status, agent, method, kind, presence)
    }

    /// Returns where an agent is for which no tunnel was found.
    async fn presence(&self, agent: AgentId) -> Presence {
        match self.router.finds(agent).await {
            Ok(true) => Presence::Held,
            _ if self.router.registry().occupancy(agent).transports > 0 => Presence::WithoutTunnel,
            Err(error) => {
                tracing::debug!(error = %error, "it is not known where an agent is connected");
                Presence::Unknown
            }
            Ok(false) if self.router.is_connected(agent).await => Presence::WithoutTunnel,
            Ok(false) => Presence::Away,
        }
    }
}

/// A request that may be sent.
struct Allowed<'a> {
    agent: AgentId,
    kind: Kind,
    /// A pod, service or node answers, also if the request asks for an upgrade.
    is_proxy: bool,
    /// The protocol to which it asks to upgrade.
    upgrade: Option<Upgrade>,
    /// If it does so in HTTP/2.
    connect: Option<Connect>,
    at: InCluster<'a>,
    authorized: Authorized,
    open: OpenRequest,
    message: RequestHead,
    needs: Features,
    /// The context of the request's span.
    context: HeaderMap,
    /// For a client of HTTP/1.0, to which the end of the connection may be that of the answer.
    closes: Option<StreamSlot>,
}

fn endpoint_fields(id: &RequestId, headers: &HeaderMap) -> EndpointFields {
    let user_agent = headers.get(header::USER_AGENT).map(|value| {
        String::from_utf8_lossy(value.as_bytes()).chars().take(EndpointFields::LONGEST_USER_AGENT).collect()
    });
    EndpointFields { audit_id: id.audit_id(), user_agent, ..EndpointFields::default() }
}

/// Refuses extended CONNECT where kas itself answers: to its client, a status of success would mean that the
/// protocol was switched.
fn not_here(connect: Option<&Connect>) -> Result<(), Failure> {
    match connect {
        None => Ok(()),
        Some(_) => Err(Failure::malformed("there is nothing to upgrade to at this path")),
    }
}

/// Returns an answer that kas itself gives.
fn of_kas(method: &Method, content_type: &'static str, bytes: Bytes) -> Response<Body> {
    let length = bytes.len();
    // HTTP/2 would send the body of an answer to HEAD.
    let body = if method == Method::HEAD { Bytes::new() } else { bytes };
    let mut response = Response::new(grpc::full(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CONTENT_LENGTH, length.into());
    response
}

/// Returns the source that a credential belongs to, as a label.
fn source_of(credential: &Credential) -> &'static str {
    credential.source().map_or(NONE, SourceKind::as_str)
}

/// Whether requests with this method change nothing.
fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Returns the user that a request runs as, if not as agentk.
fn user_of(run_as: &RunAs, headers: &HeaderMap) -> Option<String> {
    let by_header = || {
        let value = headers.get(HeaderName::from_static("impersonate-user"))?;
        Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    run_as.impersonation().map(|user| user.username.clone()).or_else(by_header)
}

/// Returns the metadata for agentk: the context of the request's span, or that of the client.
fn context_of(headers: &HeaderMap, record: &RequestRecord) -> HeaderMap {
    let mut context = HeaderMap::new();
    for name in ["traceparent", "tracestate"] {
        if let Some(value) = headers.get(name) {
            context.insert(HeaderName::from_static(name), value.clone());
        }
    }
    record.outgoing(&mut context);
    context
}
