//! `Gitops/GetObjectsToSynchronize`: the manifests of a project, for agents that apply them themselves
//! (GitLab's, 14.1 to 16).
//!
//! A call waits until the project has another commit than the agent, and gets the whole set. The body of the
//! answer does all of it, so a call needs no task and ends when the agent leaves.

mod revisions;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream;
use git_sources::{
    Follower, Repositories, RepositoryId,
    access::{Access, ReadProject, Refused},
    code,
    manifests::{File, Limits, Path, Problem, Selection},
};
use gitlab::usage::Usage;
use grpc::{BoxError, Code, Status};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::StreamBody;
use identity::jwt;
use ids::Match;
use planner::{Applier, applier::AgentkVersion};
use process::lifecycle::Phase;
use prost::Message as _;
use proto::gitlab::agent::{
    agentcfg::{GitRefCf, git_ref_cf::Ref},
    gitops::rpc::{
        ObjectsToSynchronizeRequest, ObjectsToSynchronizeResponse,
        objects_to_synchronize_response::{Header, Message, Object, Trailer},
        path_cf,
    },
};
use repository::{Commit, Error, Revision};
use secrecy::{ExposeSecret as _, SecretSlice};
use tokio::{sync::watch, time::Instant};

use self::revisions::{Revisions, Used};
use super::agent::{AgentCall, AgentService, Answered, CallContext, ServiceAnswer};

const GET_OBJECTS: &str = "/gitlab.agent.gitops.rpc.Gitops/GetObjectsToSynchronize";

/// How long a call waits for another commit, as in 14.1; up to a twentieth more or less, so that not all
/// agents call again at once.
const POLL: Duration = Duration::from_secs(810);
/// The largest part of a file in one message, in bytes, as in 14.1.
const PART: usize = 128 * 1024;
/// The first and the longest wait before GitLab is asked again whether the agent may read the project.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));
/// How long a check may take that was asked for by an agent with a commit that is unknown here.
const CHECK: Duration = Duration::from_secs(12);
/// How often the head is looked up anew after its commit was gone.
const GONE: u32 = 3;
/// What an agent is told that must not apply by itself.
const NOT_THE_AGENT: [&str; 2] =
    ["GitOps: kas applies for this agent", "GitOps: nobody applies: agent.gitops.applier of kas is none"];
/// What an agent is told if the cause is not its repository.
const FAILED: &str = "GitOps: failed to get objects to synchronize";

/// Serves manifests.
#[derive(Debug)]
pub struct Manifests {
    repositories: Arc<Repositories>,
    /// `None`: there is no GitLab, only repositories on this host.
    access: Option<Arc<Access<ReadProject>>>,
    config: kas_config::Gitops,
    applier: Applier,
    phase: watch::Receiver<Phase>,
    /// `None`: usage is not reported.
    usage: Option<Arc<Usage>>,
    revisions: Arc<Revisions>,
}

impl Manifests {
    /// Returns a service. Waiting calls end when `phase` says that the process leaves.
    pub fn new(
        repositories: Arc<Repositories>,
        access: Option<Arc<Access<ReadProject>>>,
        config: kas_config::Gitops,
        applier: Applier,
        phase: watch::Receiver<Phase>,
        usage: Option<Arc<Usage>>,
    ) -> Self {
        let revisions = Arc::default();
        Self { repositories, access, config, applier, phase, usage, revisions }
    }

    fn limits(&self) -> Limits {
        Limits {
            file: self.config.max_manifest_file_size.into(),
            total: self.config.max_total_manifest_file_size.into(),
            files: self.config.max_number_of_files as usize,
        }
    }

    async fn begin(self: Arc<Self>, call: AgentCall) -> Result<Answered, Status> {
        let token = jwt::bearer(&call.headers)?.to_vec().into();
        let is_gzip = accepts_gzip(&call.headers);
        // An agentk of this project applies only if the configuration says so.
        let is_ours = call.is_ours();
        let agentk = if is_ours { AgentkVersion::Own } else { AgentkVersion::Unreadable };
        let (context, request) = call.message::<ObjectsToSynchronizeRequest>().await?;
        let request = Request::read(request, self.config.max_number_of_paths)?;
        if self.applier.forbids(agentk) {
            let [kas, nobody] = NOT_THE_AGENT;
            let text = if self.applier == Applier::None { nobody } else { kas };
            return Err(Status::new(Code::FailedPrecondition, text));
        }
        let jitter = 0.95 + rand::random::<f64>() / 10.0;
        let call = Call {
            service: self,
            context,
            token,
            is_gzip,
            is_ours,
            request,
            until: Instant::now() + POLL.mul_f64(jitter),
            state: State::Waiting,
        };
        let frames = stream::unfold(call, |mut call| async move {
            let frame = call.next().await?;
            Some((Ok::<_, BoxError>(frame), call))
        });
        Ok(Answered { body: grpc::boxed(StreamBody::new(frames)), is_gzip })
    }
}

impl AgentService for Manifests {
    fn paths(&self) -> &'static [&'static str] {
        &[GET_OBJECTS]
    }

    fn call(self: Arc<Self>, _path: &str, call: AgentCall) -> ServiceAnswer {
        Box::pin(self.begin(call))
    }
}

/// Whether an agent takes messages that are compressed with gzip.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    headers
        .get_all("grpc-accept-encoding")
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim() == "gzip")
}

/// A request whose fields are valid.
#[derive(Debug)]
struct Request {
    project: String,
    /// The commit that the agent has; may be empty.
    commit: String,
    revision: Revision,
    paths: Vec<Path>,
}

impl Request {
    fn read(request: ObjectsToSynchronizeRequest, most_paths: u32) -> Result<Self, Status> {
        let invalid = |text: String| Status::new(Code::InvalidArgument, text);
        let ObjectsToSynchronizeRequest { project_id: project, commit_id: commit, paths, r#ref } = request;
        if project.is_empty() {
            return Err(invalid(
                "invalid ObjectsToSynchronizeRequest.ProjectId: value length must be at least 1 runes"
                    .to_owned(),
            ));
        }
        if paths.is_empty() {
            return Err(invalid(
                "invalid ObjectsToSynchronizeRequest.Paths: value must contain at least 1 item(s)".to_owned(),
            ));
        }
        if paths.len() > most_paths as usize {
            return Err(invalid(format!(
                "maximum number of GitOps paths per manifest project is {most_paths}, but {} was requested",
                paths.len()
            )));
        }
        let paths = paths
            .into_iter()
            .map(|path| match path.path {
                Some(path_cf::Path::Glob(glob)) if !glob.is_empty() => Ok(Path::Glob(glob)),
                Some(path_cf::Path::File(file)) if !file.is_empty() => Ok(Path::File(file)),
                _ => Err(invalid("invalid PathCF: a glob or a file is required".to_owned())),
            })
            .collect::<Result<_, _>>()?;
        let revision = revision(r#ref).map_err(|error| invalid(format!("invalid GitRefCF: {error}")))?;
        Ok(Self { project, commit, revision, paths })
    }
}

fn revision(given: Option<GitRefCf>) -> Result<Revision, repository::InvalidRevision> {
    match given.and_then(|given| given.r#ref) {
        None => Ok(Revision::Head),
        Some(Ref::Tag(tag)) => Revision::tag(&tag),
        Some(Ref::Branch(branch)) => Revision::branch(&branch),
        Some(Ref::Commit(commit)) => Revision::commit(&commit),
    }
}

/// One call of an agent.
struct Call {
    service: Arc<Manifests>,
    context: CallContext,
    token: SecretSlice<u8>,
    is_gzip: bool,
    /// Whether it is an agentk of this project. It asks for the head, with an empty commit, to know what the
    /// head is now: what it deletes depends on that.
    is_ours: bool,
    request: Request,
    /// When it ends if nothing changes.
    until: Instant,
    state: State,
}

enum State {
    Waiting,
    Sending(Sending),
    /// Everything was sent.
    Sent,
    Done,
}

struct Sending {
    selection: Box<Selection>,
    files: VecDeque<File>,
    /// How much of the first file was sent, in bytes.
    sent: usize,
}

/// A set to be sent.
struct Found {
    project: i64,
    commit: Commit,
    selection: Selection,
}

/// A repository that the agent may read.
struct Permission {
    id: RepositoryId,
    project: i64,
    /// When it has to be checked again; `None`: it does not end.
    until: Option<Instant>,
}

impl Call {
    /// Returns the next frame; `None`: there are no more.
    async fn next(&mut self) -> Option<Frame<Bytes>> {
        match &mut self.state {
            State::Done => None,
            State::Sent => Some(self.end(None)),
            State::Waiting => match self.wait().await {
                Err(status) => Some(self.end(Some(status))),
                Ok(None) => Some(self.end(None)),
                Ok(Some(Found { project, commit, selection })) => {
                    let selection = Box::new(selection);
                    self.state = State::Sending(Sending { selection, files: VecDeque::new(), sent: 0 });
                    Some(self.frame(Message::Header(Header {
                        commit_id: commit.to_string(),
                        project_id: project,
                    })))
                }
            },
            State::Sending(sending) => match sending.next().await {
                Ok(Some(object)) => Some(self.frame(Message::Object(object))),
                Ok(None) => {
                    let (listed, sent) = sending.selection.counts();
                    tracing::debug!(
                        agent.id = self.context.authenticated.agent.id.get(),
                        project = self.request.project,
                        listed,
                        sent,
                        "manifests were sent"
                    );
                    if let Some(usage) = &self.service.usage {
                        usage.count_syncs(1);
                    }
                    self.state = State::Sent;
                    Some(self.frame(Message::Trailer(Trailer {})))
                }
                Err(problem) => {
                    let status = self.failed(&problem);
                    Some(self.end(Some(status)))
                }
            },
        }
    }

    fn end(&mut self, status: Option<Status>) -> Frame<Bytes> {
        self.state = State::Done;
        let mut trailers = HeaderMap::with_capacity(2);
        match status {
            None => Status::write_ok(&mut trailers),
            Some(status) => status.write_to(&mut trailers),
        }
        Frame::trailers(trailers)
    }

    fn frame(&self, message: Message) -> Frame<Bytes> {
        let message = ObjectsToSynchronizeResponse { message: Some(message) };
        if !self.is_gzip {
            return Frame::data(grpc::encode(&message));
        }
        let packed = grpc::gzip::deflate(&message.encode_to_vec());
        let mut framed = BytesMut::with_capacity(grpc::PREFIX_LEN + packed.len());
        framed.put_u8(1);
        framed.put_u32(u32::try_from(packed.len()).unwrap_or(u32::MAX));
        framed.put_slice(&packed);
        Frame::data(framed.freeze())
    }

    fn failed(&self, problem: &Problem) -> Status {
        let agent = self.context.authenticated.agent.id.get();
        let project = &*self.request.project;
        match problem {
            Problem::User(reason) => {
                tracing::info!(agent.id = agent, project, reason, "manifests cannot be used");
                Status::new(Code::FailedPrecondition, format!("{FAILED}: {problem}"))
            }
            Problem::Backend(error) => {
                let code = code(error);
                tracing::warn!(agent.id = agent, project, code, %error, "manifests cannot be read");
                Status::new(Code::Unavailable, FAILED)
            }
        }
    }

    /// Waits until the project has another commit than the agent. `None`: the call ends with OK.
    async fn wait(&self) -> Result<Option<Found>, Status> {
        tokio::select! {
            status = self.context.revoked() => Err(status),
            () = tokio::time::sleep_until(self.until) => Ok(None),
            () = leaving(self.service.phase.clone()) => Ok(None),
            found = self.find() => found.map(Some),
        }
    }

    async fn find(&self) -> Result<Found, Status> {
        let mut followed: Option<(Used, Follower)> = None;
        let mut backoff = BACKOFF.0;
        let begun = Instant::now();
        let mut gone = 0;
        loop {
            let permission = match self.permission().await {
                Ok(permission) => permission,
                Err(Refused::Unauthenticated) => {
                    return Err(Status::new(Code::Unauthenticated, "unauthenticated"));
                }
                Err(Refused::Forbidden) => return Err(Status::new(Code::PermissionDenied, "forbidden")),
                Err(Refused::Unavailable(error)) => {
                    tracing::warn!(
                        agent.id = self.context.authenticated.agent.id.get(),
                        project = self.request.project,
                        error,
                        "GitLab could not be asked about a project"
                    );
                    tokio::time::sleep(backoff.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
                    backoff = (backoff * 2).min(BACKOFF.1);
                    continue;
                }
            };
            backoff = BACKOFF.0;
            let (_, follower) = match followed.take() {
                Some(known) if known.0.is(permission.id) => followed.insert(known),
                _ => {
                    let many = |error: &dyn std::fmt::Display| {
                        Status::new(Code::ResourceExhausted, error.to_string())
                    };
                    let agent = self.context.authenticated.agent.id;
                    let used = self.service.revisions.enter(agent, permission.id, &self.request.revision);
                    let used = used.map_err(|error| many(&error))?;
                    let period = self.service.config.poll_period;
                    let new = self.service.repositories.follow(permission.id, &self.request.revision, period);
                    followed.insert((used, new.map_err(|error| many(&error))?))
                }
            };
            let head = follower.head();
            let other = head.commit.flatten().filter(|commit| commit.to_string() != self.request.commit);
            // Another replica may have sent a newer commit than this one knows.
            let is_unasked = self.request.commit.is_empty() && !self.is_ours;
            let is_newest = other.is_none() || is_unasked || {
                let checked = tokio::time::timeout(CHECK, follower.refresh(begun)).await;
                checked.is_ok() && follower.head().failure.is_none()
            };
            if let Some(commit) = other.filter(|_| is_newest) {
                // The check may have found another one.
                let commit = follower.head().commit.flatten().unwrap_or(commit);
                if commit.to_string() == self.request.commit {
                    continue;
                }
                match self.select(follower, &permission, commit).await {
                    Ok(found) => return Ok(found),
                    Err(Error::Gone(_)) if gone < GONE => {
                        gone += 1;
                        // If it fails, the next round waits.
                        let _ = tokio::time::timeout(CHECK, follower.refresh(Instant::now())).await;
                        continue;
                    }
                    Err(error) => {
                        self.ask_again(permission.id, &error);
                        return Err(self.failed(&Problem::Backend(error)));
                    }
                }
            }
            if let Some(failure) = &head.failure {
                self.ask_again(permission.id, &failure.error);
            }
            let is_denied = head.failure.is_some_and(|failure| matches!(failure.error, Error::Denied(_)));
            // Something may be better soon, and nobody tells.
            let retry = (other.is_some() || is_denied).then(|| Instant::now() + BACKOFF.0);
            let expiry = async {
                match permission.until.into_iter().chain(retry).min() {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = follower.changed() => {}
                () = expiry => {}
            }
        }
    }

    async fn select(
        &self,
        follower: &Follower,
        permission: &Permission,
        commit: Commit,
    ) -> Result<Found, Error> {
        let Manifests { repositories, .. } = &*self.service;
        let (paths, limits) = (&self.request.paths, self.service.limits());
        let repository = follower.repository()?;
        let selection =
            Selection::new(repositories, permission.id, repository, commit, paths, limits).await?;
        Ok(Found { project: permission.project, commit, selection })
    }

    /// If a server refuses its token, GitLab has to be asked before the next try.
    fn ask_again(&self, id: RepositoryId, error: &Error) {
        if let (Error::Denied(_), Some(access)) = (error, &self.service.access) {
            access.forget(self.token.expose_secret(), &self.request.project);
            self.service.repositories.ask_again(id);
        }
    }

    async fn permission(&self) -> Result<Permission, Refused> {
        let Manifests { repositories, access, .. } = &*self.service;
        let project = &*self.request.project;
        if let Some(local) = repositories.local(project) {
            let agent = &self.context.authenticated.agent;
            let may = |agents: &ids::Selector| {
                agents.matches(agent.id, Some(agent.project_id), Some(&agent.name)) == Match::Yes
            };
            return match local.agents.as_ref().is_some_and(may) {
                true => {
                    let id = RepositoryId::Local(local.id);
                    Ok(Permission { id, project: local.id, until: None })
                }
                false => Err(Refused::Forbidden),
            };
        }
        let Some(access) = access else { return Err(Refused::Forbidden) };
        let grant = access.check(self.token.expose_secret(), project).await?;
        let id = RepositoryId::Project(grant.found);
        Ok(Permission { id, project: grant.found, until: Some(grant.until) })
    }
}

impl Sending {
    /// Returns the next part of a file; `None`: there are no more.
    async fn next(&mut self) -> Result<Option<Object>, Problem> {
        let file = loop {
            match self.files.front() {
                Some(file) => break file,
                None => match self.selection.next().await? {
                    Some(files) => self.files.extend(files),
                    None => return Ok(None),
                },
            }
        };
        let end = file.data.len().min(self.sent + PART);
        let object = Object { source: file.path.clone(), data: file.data.slice(self.sent..end) };
        if end == file.data.len() {
            self.files.pop_front();
            self.sent = 0;
        } else {
            self.sent = end;
        }
        Ok(Some(object))
    }
}

/// Waits until the process leaves: the agent calls another replica then.
async fn leaving(mut phase: watch::Receiver<Phase>) {
    if phase.wait_for(|phase| *phase >= Phase::Leaving).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proto::gitlab::agent::gitops::rpc::PathCf;

    use super::*;

    fn request(paths: &[&str], reference: Option<Ref>) -> ObjectsToSynchronizeRequest {
        ObjectsToSynchronizeRequest {
            project_id: "a/b".to_owned(),
            commit_id: String::new(),
            paths: paths
                .iter()
                .map(|glob| PathCf { path: Some(path_cf::Path::Glob((*glob).to_owned())) })
                .collect(),
            r#ref: reference.map(|one| GitRefCf { r#ref: Some(one) }),
        }
    }

    #[test]
    fn invalid_requests_are_refused_with_the_texts_of_14_1() {
        let refused = |request| {
            let status = Request::read(request, 2).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            status.message().to_owned()
        };
        assert_eq!(
            refused(request(&["a", "b", "c"], None)),
            "maximum number of GitOps paths per manifest project is 2, but 3 was requested"
        );
        assert!(refused(request(&[], None)).contains("at least 1 item"));
        assert!(refused(request(&[""], None)).contains("a glob or a file"));
        assert!(refused(request(&["a"], Some(Ref::Branch("a..b".to_owned())))).contains("a..b"));
        let mut unnamed = request(&["a"], None);
        unnamed.project_id.clear();
        assert!(refused(unnamed).contains("ProjectId"));
        let read = Request::read(request(&["a"], Some(Ref::Branch("main".to_owned()))), 2).unwrap();
        assert_eq!(read.revision.to_string(), "refs/heads/main");
    }

    #[test]
    fn gzip_is_used_if_the_agent_offers_it() {
        let offers = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-accept-encoding", HeaderValue::from_static(value));
            accepts_gzip(&headers)
        };
        assert!(offers("gzip") && offers("identity, gzip") && !offers("identity,deflate"));
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
