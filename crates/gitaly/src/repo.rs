//! One repository of a Gitaly.

use std::sync::Arc;

use async_trait::async_trait;
use grpc::Code;
use http::HeaderValue;
use repository::{
    Changes, Commit, Content, Depth, Error, Listing, ReadLimits, RefName, RepoPath, Repository, Revision,
    Versioning,
};
use tokio::sync::watch;

use crate::{
    Client, Location, Priority, Server,
    answers::{Answer, Blobs, Entries, FoundCommit},
    client::{Call, Failure},
    messages,
    metrics::Rpc,
};

/// How many files one call of `GetBlobs` reads.
const PATHS: usize = 200;

/// A repository of a Gitaly. Clones are the same repository: whoever tells one of them that it has changed
/// wakes those that wait at any of them.
#[derive(Clone, Debug)]
pub struct GitalyRepository {
    client: Arc<Client>,
    server: Arc<Server>,
    location: Arc<Location>,
    changes: Arc<Changes>,
    priority: Priority,
    correlation: Option<HeaderValue>,
}

impl Client {
    /// Returns a repository of a server. Nothing is called yet.
    pub fn repository(self: &Arc<Self>, server: Arc<Server>, location: Location) -> GitalyRepository {
        GitalyRepository::new(Arc::clone(self), server, location)
    }
}

impl GitalyRepository {
    fn new(client: Arc<Client>, server: Arc<Server>, location: Location) -> Self {
        Self {
            client,
            server,
            location: Arc::new(location),
            changes: Arc::default(),
            priority: Priority::default(),
            correlation: None,
        }
    }

    /// Returns the same repository, whose calls have this priority.
    #[must_use]
    pub fn with_priority(&self, priority: Priority) -> Self {
        Self { priority, ..self.clone() }
    }

    /// Returns the same repository, whose calls have this `x-gitlab-correlation-id`. Without, each call gets
    /// one of its own.
    #[must_use]
    pub fn with_correlation(&self, id: HeaderValue) -> Self {
        Self { correlation: Some(id), ..self.clone() }
    }

    /// Returns the same repository, called as GitLab says now: its address, token or flags have changed.
    #[must_use]
    pub fn with_server(&self, server: Arc<Server>) -> Self {
        Self { server, ..self.clone() }
    }

    /// Returns how the server is called.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Returns which repository it is.
    pub fn location(&self) -> &Location {
        &self.location
    }

    fn repository(&self) -> Option<messages::Repository> {
        let location = &*self.location;
        Some(messages::Repository {
            storage_name: location.storage_name.clone(),
            relative_path: location.relative_path.clone(),
            git_object_directory: location.git_object_directory.clone(),
            git_alternate_object_directories: location.git_alternate_object_directories.clone(),
            gl_repository: location.gl_repository.clone(),
            gl_project_path: location.gl_project_path.clone(),
        })
    }

    async fn call<A: Answer>(
        &self,
        rpc: Rpc,
        message: &impl prost::Message,
        answer: impl Fn() -> A + Send,
    ) -> Result<A::Output, Failure> {
        let made;
        let correlation = match &self.correlation {
            Some(id) => id,
            None => {
                made = HeaderValue::try_from(format!("{:032x}", rand::random::<u128>()))
                    .unwrap_or(HeaderValue::from_static("0"));
                &made
            }
        };
        let call = Call { rpc, server: &self.server, priority: self.priority, correlation };
        self.client.call(&call, grpc::encode(message), answer).await
    }

    fn failed(&self, rpc: Rpc) -> impl Fn(Failure) -> Error {
        move |failure| failure.into_error(rpc, &self.server)
    }

    async fn find(&self, revision: &str) -> Result<Option<Commit>, Error> {
        let request = messages::FindCommitRequest {
            repository: self.repository(),
            revision: revision.as_bytes().to_vec(),
        };
        self.call(Rpc::FindCommit, &request, FoundCommit::default).await.map_err(self.failed(Rpc::FindCommit))
    }

    /// Fails if the commit does not exist.
    async fn check(&self, commit: &Commit) -> Result<(), Error> {
        match self.find(&commit.to_string()).await? {
            Some(_) => Ok(()),
            None => Err(Error::Gone(*commit)),
        }
    }
}

#[async_trait]
impl Repository for GitalyRepository {
    async fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, Error> {
        match revision {
            Revision::Ref(name) => self.find(name.as_str()).await,
            Revision::Commit(commit) => self.find(&commit.to_string()).await,
            Revision::Head => {
                if let Some(commit) = self.find("HEAD").await? {
                    return Ok(Some(commit));
                }
                if let Some(branch) = &self.location.default_branch
                    && let Ok(branch) = RefName::new(&format!("refs/heads/{branch}"))
                    && let Some(commit) = self.find(branch.as_str()).await?
                {
                    return Ok(Some(commit));
                }
                self.find("refs/heads/master").await
            }
        }
    }

    async fn list(
        &self,
        commit: &Commit,
        under: Option<&RepoPath>,
        depth: Depth,
        most: usize,
    ) -> Result<Listing, Error> {
        let request = messages::GetTreeEntriesRequest {
            repository: self.repository(),
            revision: commit.to_string().into_bytes(),
            path: under.map_or(&b"."[..], RepoPath::as_bytes).to_vec(),
            recursive: depth == Depth::Below,
            skip_flat_paths: true,
        };
        let listed = self.call(Rpc::GetTreeEntries, &request, || Entries::new(under, depth, most)).await;
        let listing = match listed {
            Ok(listing) => listing,
            Err(Failure::Status(status)) if is_absent(&status) => {
                Listing { entries: Vec::new(), is_complete: true }
            }
            Err(failure) => return Err(failure.into_error(Rpc::GetTreeEntries, &self.server)),
        };
        // Of a commit that does not exist, Gitaly lists nothing, or says that there is no such tree.
        if listing.entries.is_empty() && listing.is_complete {
            self.check(commit).await?;
        }
        Ok(listing)
    }

    async fn read(
        &self,
        commit: &Commit,
        paths: &[RepoPath],
        limits: ReadLimits,
    ) -> Result<Vec<Content>, Error> {
        let mut contents = Vec::with_capacity(paths.len());
        let mut left = limits.total;
        let mut is_checked = false;
        for some in paths.chunks(PATHS) {
            let revision = commit.to_string();
            let request = messages::GetBlobsRequest {
                repository: self.repository(),
                revision_paths: some
                    .iter()
                    .map(|path| messages::RevisionPath {
                        revision: revision.clone(),
                        path: path.as_bytes().to_vec(),
                    })
                    .collect(),
                limit: i64::try_from(limits.file).unwrap_or(i64::MAX),
            };
            let of_call = ReadLimits { file: limits.file.min(i64::MAX as u64), total: left };
            let read = self
                .call(Rpc::GetBlobs, &request, || Blobs::new(some, of_call))
                .await
                .map_err(self.failed(Rpc::GetBlobs))?;
            // Nothing is where the commit is not, either.
            if !is_checked && read.iter().all(|content| *content == Content::Absent) {
                self.check(commit).await?;
                is_checked = true;
            }
            let is_short = read.len() < some.len();
            for content in &read {
                if let Content::Data { data, .. } = content {
                    left = left.saturating_sub(data.len() as u64);
                }
            }
            let stopped = is_short
                || matches!(
                    read.last(),
                    Some(Content::TooBig { size, .. }) if *size <= limits.file
                );
            contents.extend(read);
            if stopped {
                break;
            }
        }
        Ok(contents)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell_changed(&self) {
        self.changes.tell();
    }

    fn versioning(&self) -> Versioning {
        Versioning::Commit
    }

    fn place(&self, revision: &Revision, path: &RepoPath) -> String {
        format!("{path} at {revision} of {}", self.location.gl_project_path)
    }
}

/// Whether a status of `GetTreeEntries` says that there is no such folder, or that it is a file.
fn is_absent(status: &grpc::Status) -> bool {
    match status.code() {
        Code::NotFound => true,
        Code::InvalidArgument => {
            let message = status.message().to_ascii_lowercase();
            message.contains("tree") || message.contains("path")
        }
        _ => false,
    }
}
