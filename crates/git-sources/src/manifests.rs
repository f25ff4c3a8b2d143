//! Selects and reads the manifests of a project, with the rules, limits and texts of GitLab agent 14.1.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use gitops::glob::{self, Glob};
use repository::{Commit, Content, Depth, Entry, Error, Kind, ReadLimits, RepoPath, Repository};

use crate::{Repositories, RepositoryId};

/// Files that one call reads, at most.
const BATCH: usize = 100;
/// What one call reads at most, unless a single file may be larger, in bytes. It bounds what a slow agent
/// keeps in memory.
const BATCH_BYTES: u64 = 8 << 20;
/// Entries of a listing that do not count as files, such as folders and symbolic links, at most.
const OTHER_ENTRIES: usize = 10_000;
/// Begins a file that Git LFS replaces by another one.
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";
/// The largest such file, in bytes.
const LARGEST_LFS: usize = 1024;

/// What selects files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// A glob.
    Glob(String),
    /// One file, which must exist.
    File(String),
}

/// Limits of a set of manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest file, in bytes.
    pub file: u64,
    /// All files together, in bytes.
    pub total: u64,
    /// Files that are listed for all paths together.
    pub files: usize,
}

/// Why manifests cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The user has to change the repository or the configuration.
    #[error("manifest file: {0}")]
    User(String),
    /// The repository cannot be read at the moment.
    #[error(transparent)]
    Backend(Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        match error {
            Error::User(reason) => Self::User(reason),
            other => Self::Backend(other),
        }
    }
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path from the root of the repository.
    pub path: String,
    /// Its content.
    pub data: Bytes,
}

/// The files of a commit that were selected, to be read one part after the other.
#[derive(Debug)]
pub struct Selection {
    repositories: Arc<Repositories>,
    id: RepositoryId,
    repository: Arc<dyn Repository>,
    commit: Commit,
    files: VecDeque<Selected>,
    /// Why nothing was selected after these.
    problem: Option<String>,
    /// What is left of the limit of all files.
    left: u64,
    limits: Limits,
    listed: usize,
    read: usize,
}

#[derive(Debug)]
struct Selected {
    path: RepoPath,
    shown: String,
    /// `None`: the file was not listed.
    entry: Option<Entry>,
}

impl Selection {
    /// Selects the files of `commit`, in the order of 14.1: by path of the request, then as listed.
    ///
    /// What a user has to change is reported by [`next`](Self::next), after the files before it.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::Denied`], [`Error::Gone`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn new(
        repositories: &Arc<Repositories>,
        id: RepositoryId,
        repository: Arc<dyn Repository>,
        commit: Commit,
        paths: &[Path],
        limits: Limits,
    ) -> Result<Self, Error> {
        let mut selection = Self {
            repositories: Arc::clone(repositories),
            id,
            repository,
            commit,
            files: VecDeque::new(),
            problem: None,
            left: limits.total,
            limits,
            listed: 0,
            read: 0,
        };
        let mut seen = HashSet::new();
        for path in paths {
            let selected = match path {
                Path::Glob(glob) => selection.glob(glob, &mut seen).await,
                Path::File(path) => selection.file(path, &mut seen),
            };
            match selected {
                Ok(()) => {}
                Err(Problem::User(reason)) => {
                    selection.problem = Some(reason);
                    break;
                }
                Err(Problem::Backend(error)) => return Err(error),
            }
        }
        Ok(selection)
    }

    fn file(&mut self, path: &str, seen: &mut HashSet<RepoPath>) -> Result<(), Problem> {
        let wrong = |error: repository::InvalidPath| Problem::User(format!("file {path:?}: {error}"));
        let path = RepoPath::new(path.strip_prefix('/').unwrap_or(path)).map_err(wrong)?;
        self.count()?;
        self.select(path, None, seen)
    }

    async fn glob(&mut self, text: &str, seen: &mut HashSet<RepoPath>) -> Result<(), Problem> {
        let failed = |why: &dyn std::fmt::Display| Problem::User(format!("glob {text} match failed: {why}"));
        let glob = Glob::parse(text).map_err(|error| failed(&error))?;
        let under = match glob.root() {
            "." | "" => None,
            root => match RepoPath::new(root) {
                Ok(root) => Some(root),
                // Nothing can be there, and Git says so too.
                Err(_) => return Ok(()),
            },
        };
        let depth = if glob.is_recursive() { Depth::Below } else { Depth::Here };
        let most = (self.limits.files - self.listed).saturating_add(1 + OTHER_ENTRIES);
        let listing = self.repository.list(&self.commit, under.as_ref(), depth, most).await?;
        for entry in listing.entries {
            if entry.kind != Kind::File {
                continue;
            }
            self.count()?;
            let text = entry.path.to_string_lossy();
            if !glob.matches(&text).map_err(|error| failed(&error))? || glob::is_hidden(&text) {
                continue;
            }
            self.select(entry.path.clone(), Some(entry), seen)?;
        }
        if listing.is_complete { Ok(()) } else { Err(self.too_many()) }
    }

    fn too_many(&self) -> Problem {
        Problem::User(format!("maximum number of files limit reached: {}", self.limits.files))
    }

    /// Counts a listed file.
    fn count(&mut self) -> Result<(), Problem> {
        if self.listed >= self.limits.files {
            return Err(self.too_many());
        }
        self.listed += 1;
        Ok(())
    }

    fn select(
        &mut self,
        path: RepoPath,
        entry: Option<Entry>,
        seen: &mut HashSet<RepoPath>,
    ) -> Result<(), Problem> {
        let Some(shown) = path.as_str().map(str::to_owned) else {
            return Err(Problem::User(format!("path is not UTF-8: {path}")));
        };
        if !seen.insert(path.clone()) {
            return Err(Problem::User(format!("path visited more than once: {path}")));
        }
        self.files.push_back(Selected { path, shown, entry });
        Ok(())
    }

    /// Returns how many files were listed, and how many of them were returned so far.
    pub fn counts(&self) -> (usize, usize) {
        (self.listed, self.read)
    }

    /// Returns the next files, at least one; `None`: there are no more.
    ///
    /// # Errors
    /// [`Problem`]. Nothing follows after it.
    ///
    /// # Cancel safety
    /// Not cancel safe: files may be lost.
    pub async fn next(&mut self) -> Result<Option<Vec<File>>, Problem> {
        if self.files.is_empty() {
            return match self.problem.take() {
                Some(reason) => Err(Problem::User(reason)),
                None => Ok(None),
            };
        }
        let count = self.files.len().min(BATCH);
        let mut batch: VecDeque<(Selected, Option<Bytes>)> = self
            .files
            .drain(..count)
            .map(|selected| {
                let id = selected.entry.as_ref().map(|entry| entry.id);
                let cached = id.and_then(|id| self.repositories.blobs.get(self.id, id));
                (selected, cached)
            })
            .collect();
        let mut contents = self.contents(&batch).await?.into_iter();
        let mut files = Vec::with_capacity(batch.len());
        while let Some((selected, cached)) = batch.pop_front() {
            let most = self.limits.file.min(self.left);
            let data = match cached {
                Some(data) => data,
                None => match contents.next() {
                    Some(Content::Data { id, data }) if data.len() as u64 <= most => {
                        self.repositories.blobs.insert(self.id, id, &data)
                    }
                    Some(Content::Data { .. }) => return Err(Error::too_big(&selected.shown, most).into()),
                    // Too big for this part, and not for what is left: it is read in the next part. The first
                    // file of a part has at least what it may have.
                    None => {
                        batch.push_front((selected, None));
                        break;
                    }
                    Some(Content::TooBig { limit, .. }) if limit < most && !files.is_empty() => {
                        batch.push_front((selected, None));
                        break;
                    }
                    Some(Content::TooBig { .. }) => return Err(Error::too_big(&selected.shown, most).into()),
                    Some(other) => other.into_data(&selected.shown)?,
                },
            };
            if most == 0 || data.len() as u64 > most {
                return Err(Error::too_big(&selected.shown, most).into());
            }
            if data.len() <= LARGEST_LFS && data.starts_with(LFS) {
                return Err(Problem::User(format!("FileIsLfsPointer: {}", selected.shown)));
            }
            self.left -= data.len() as u64;
            self.read += 1;
            files.push(File { path: selected.shown, data });
        }
        for (selected, _) in batch.into_iter().rev() {
            self.files.push_front(selected);
        }
        if files.is_empty() {
            return Err(Problem::Backend(Error::io(
                "the repository returned fewer files than it was asked for",
            )));
        }
        Ok(Some(files))
    }

    /// Reads those files of a batch that are not cached, as far as they fit in one part.
    async fn contents(&self, batch: &VecDeque<(Selected, Option<Bytes>)>) -> Result<Vec<Content>, Error> {
        let wanted: Vec<RepoPath> = batch
            .iter()
            .filter(|(_, cached)| cached.is_none())
            .map(|(selected, _)| selected.path.clone())
            .collect();
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let total = self.left.min(BATCH_BYTES.max(self.limits.file));
        let limits = ReadLimits { file: self.limits.file.min(total), total };
        // It is never closed.
        let _permit = self.repositories.reading.acquire().await;
        self.repository.read(&self.commit, &wanted, limits).await
    }
}
