//! `Gitops/GetObjectsToSynchronize`: asks kas for the manifests of a project.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use gitops::{
    decode::{File, Limits},
    glob::Glob,
};
use grpc::{Code, Status};
use prost::Message as _;
use proto::gitlab::agent::{
    agentcfg::ManifestProjectCf,
    gitops::rpc::{
        ObjectsToSynchronizeRequest, ObjectsToSynchronizeResponse, PathCf,
        objects_to_synchronize_response::{Header, Message},
        path_cf,
    },
};
use tokio::time::timeout;

use crate::calls::{Call, Calls};

const GET_OBJECTS: &str = "/gitlab.agent.gitops.rpc.Gitops/GetObjectsToSynchronize";
/// How the message begins with which kas says that the manifests are wrong. With any other text of the same
/// status it says that it applies them itself.
const WRONG: &str = "GitOps: failed to get objects to synchronize";
/// How long a call may be open before kas says that there is a commit. kas ends it after about 14 minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(20 * 60);
/// How long kas may take for the next message of a set.
const MESSAGE: Duration = Duration::from_secs(60);
/// The most files of a set. kas sends at most 1,000, unless it is configured otherwise.
const MOST_FILES: usize = 20_000;
/// The longest text of a status that is kept, in characters.
const LONGEST: usize = 1_000;

/// Why there is no set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FeedError {
    /// This kas does not let agentk apply.
    #[error("{0}")]
    NotServed(String),
    /// The manifests are wrong. Their author has to change them.
    #[error("{0}")]
    Wrong(String),
    /// The agent may not read the project.
    #[error("{0}")]
    Denied(String),
    /// kas cannot be asked, or cannot read the repository.
    #[error("{0}")]
    Unavailable(String),
}

impl FeedError {
    fn of(status: &Status) -> Self {
        let text: String = status.message().chars().filter(|c| !c.is_control()).take(LONGEST).collect();
        match status.code() {
            Code::Unimplemented => Self::NotServed("kas serves no manifests".to_owned()),
            Code::FailedPrecondition if !text.starts_with(WRONG) => Self::NotServed(text),
            Code::FailedPrecondition | Code::InvalidArgument => Self::Wrong(text),
            Code::PermissionDenied | Code::NotFound | Code::Unauthenticated => {
                Self::Denied(format!("kas does not let the agent read the project: {text}"))
            }
            code => Self::Unavailable(format!("{}: {text}", code.name())),
        }
    }

    fn broken(error: impl std::fmt::Display) -> Self {
        Self::Unavailable(format!("kas' answer is not complete: {error}"))
    }
}

/// Asks kas for the manifests of one project.
#[derive(Debug)]
pub(super) struct Feed {
    calls: Arc<Calls>,
    request: ObjectsToSynchronizeRequest,
}

/// A set as kas sends it.
#[derive(Debug)]
pub(super) struct Sent {
    /// Its commit.
    pub(super) commit: Arc<str>,
    /// The number of the project.
    pub(super) project: u64,
    pub(super) files: Vec<File>,
}

/// A set that kas has begun to send.
struct Begun {
    commit: Arc<str>,
    project: u64,
    call: Call,
}

impl Feed {
    /// Returns the feed of a project.
    pub(super) fn new(calls: Arc<Calls>, project: &ManifestProjectCf) -> Self {
        let given = project.paths.iter().map(|path| path.glob.as_str());
        let default = project.paths.is_empty().then_some(Glob::DEFAULT);
        let path = |glob: &str| PathCf { path: Some(path_cf::Path::Glob(glob.to_owned())) };
        let request = ObjectsToSynchronizeRequest {
            project_id: project.id.clone(),
            commit_id: String::new(),
            paths: given.chain(default).map(path).collect(),
            r#ref: project.r#ref.clone(),
        };
        Self { calls, request }
    }

    /// Waits until the project has another commit than `known`, and returns that; empty: until it has one.
    /// `None`: kas has ended the call, and is to be called again.
    ///
    /// The set that follows is not read: it would wait on the connection that all requests to the agent use.
    ///
    /// # Errors
    /// See [`FeedError`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn head(&self, known: &str) -> Result<Option<Arc<str>>, FeedError> {
        match timeout(LONGEST_WAIT, self.begin(known)).await {
            Ok(begun) => Ok(begun?.map(|begun| begun.commit)),
            Err(_) => Err(FeedError::Unavailable("kas is silent".to_owned())),
        }
    }

    /// Returns the set of the present head, as soon as there is one.
    ///
    /// # Errors
    /// See [`FeedError`]. Without its end a set does not count.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn set(&self, limits: &Limits) -> Result<Sent, FeedError> {
        match timeout(MESSAGE, self.begin("")).await {
            Ok(Ok(Some(Begun { commit, project, call }))) => {
                Ok(Sent { commit, project, files: files(call, limits).await? })
            }
            Ok(Ok(None)) => Err(FeedError::Unavailable("kas sends no manifests".to_owned())),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(FeedError::Unavailable(format!("kas sends no manifests within {MESSAGE:?}"))),
        }
    }

    async fn begin(&self, known: &str) -> Result<Option<Begun>, FeedError> {
        let request = ObjectsToSynchronizeRequest { commit_id: known.to_owned(), ..self.request.clone() };
        let opened = self.calls.open(GET_OBJECTS, grpc::encode(&request)).await;
        let mut call = opened.map_err(|status| FeedError::of(&status))?;
        match message(&mut call).await? {
            None => Ok(None),
            Some(Message::Header(Header { commit_id, project_id })) => {
                let is_commit = (1..=64).contains(&commit_id.len())
                    && commit_id.bytes().all(|byte| byte.is_ascii_hexdigit());
                match u64::try_from(project_id) {
                    Ok(project @ 1..) if is_commit => {
                        Ok(Some(Begun { commit: commit_id.into(), project, call }))
                    }
                    _ => Err(FeedError::broken("it has no commit, or no number of the project")),
                }
            }
            Some(_) => Err(FeedError::broken("it does not begin with a commit")),
        }
    }
}

/// Reads the files of a set.
async fn files(mut call: Call, limits: &Limits) -> Result<Vec<File>, FeedError> {
    let mut files: Vec<(String, BytesMut)> = Vec::new();
    let mut total = 0_usize;
    loop {
        let next = timeout(MESSAGE, message(&mut call)).await;
        let next = next.map_err(|_| FeedError::broken(format!("nothing came for {MESSAGE:?}")))??;
        match next {
            Some(Message::Object(object)) => {
                total = total.saturating_add(object.data.len());
                if total > limits.total {
                    let text = format!("the manifests together are larger than {} bytes", limits.total);
                    return Err(FeedError::Wrong(text));
                }
                let is_part = files.last().is_some_and(|(path, _)| *path == object.source);
                if !is_part {
                    if files.len() == MOST_FILES {
                        return Err(FeedError::Wrong(format!("there are more than {MOST_FILES} files")));
                    }
                    files.push((object.source, BytesMut::new()));
                }
                if let Some((path, content)) = files.last_mut() {
                    content.extend_from_slice(&object.data);
                    if content.len() > limits.file {
                        let text = format!("{path} is larger than {} bytes", limits.file);
                        return Err(FeedError::Wrong(text));
                    }
                }
            }
            Some(Message::Trailer(_)) => break,
            Some(Message::Header(_)) => return Err(FeedError::broken("it has a second commit")),
            None => return Err(FeedError::broken("its end is missing")),
        }
    }
    let file = |(path, content): (String, BytesMut)| File { path: path.into(), content: content.freeze() };
    Ok(files.into_iter().map(file).collect())
}

/// Returns the next message; `None`: the call has ended well.
async fn message(call: &mut Call) -> Result<Option<Message>, FeedError> {
    let bytes: Option<Bytes> = call.messages.next().await.map_err(FeedError::broken)?;
    let Some(bytes) = bytes else {
        return match call.messages.trailers().and_then(Status::from_headers) {
            Some(status) if status.code() == Code::Ok => Ok(None),
            Some(status) => Err(FeedError::of(&status)),
            None => Err(FeedError::broken("its status is missing")),
        };
    };
    let response = ObjectsToSynchronizeResponse::decode(bytes).map_err(FeedError::broken)?;
    match response.message {
        Some(message) => Ok(Some(message)),
        None => Err(FeedError::broken("a message is empty")),
    }
}
