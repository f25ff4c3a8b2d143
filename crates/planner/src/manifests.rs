//! Reads the manifests of a project at a commit: lists, filters, reads, decodes.
//!
//! Contents of files are kept for a while, for all projects together, so that a new commit costs what it has
//! changed.

use std::{collections::BTreeSet, num::NonZeroUsize, sync::Arc};

use bytes::Bytes;
use gitops::{
    Set,
    decode::{File, Limits, decode},
    glob::{Glob, is_hidden},
};
use lru::LruCache;
use parking_lot::Mutex;
use repository::{
    Commit, Depth, Entry as Listed, Error, Kind, ObjectId, ReadLimits as RepositoryLimits, RepoPath,
    Repository,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::source::ReadLimits;

/// Contents of files that are kept, in bytes.
const KEPT: usize = 64 << 20;
/// The most files that are kept: each costs about 200 bytes besides its content.
const KEPT_FILES: usize = 50_000;
/// Manifests of all projects that are in work at once, in KiB.
const ROOM: u32 = 64 << 10;
/// Files that are read by one call.
const PER_CALL: usize = 200;
/// How the file of an object begins that is stored elsewhere.
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Why the manifests of a commit are not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// The author has to change them. A line for each flaw.
    Flawed(String),
    /// The commit is gone: resolve the revision anew.
    Gone,
    /// The repository cannot be read at the moment.
    Unavailable(String),
}

impl From<Error> for LoadError {
    fn from(error: Error) -> Self {
        match error {
            Error::User(text) => Self::Flawed(text),
            Error::Gone(_) => Self::Gone,
            Error::Backend { code, message } => Self::Unavailable(format!("{code}: {message}")),
            Error::Denied(text) => Self::Unavailable(text),
        }
    }
}

/// A decoded set. Its bytes count as work until it is dropped.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) set: Set,
    _room: Option<OwnedSemaphorePermit>,
}

/// Reads manifests for all projects of a replica.
#[derive(Debug)]
pub(crate) struct Loader {
    kept: Mutex<Kept>,
    room: Arc<Semaphore>,
}

#[derive(Debug)]
struct Kept {
    files: LruCache<(Arc<str>, ObjectId), Bytes>,
    bytes: usize,
}

impl Default for Loader {
    fn default() -> Self {
        let files = LruCache::new(NonZeroUsize::new(KEPT_FILES).unwrap_or(NonZeroUsize::MIN));
        Self { kept: Mutex::new(Kept { files, bytes: 0 }), room: Arc::new(Semaphore::new(ROOM as usize)) }
    }
}

impl Loader {
    fn get(&self, name: &Arc<str>, id: ObjectId) -> Option<Bytes> {
        self.kept.lock().files.get(&(Arc::clone(name), id)).cloned()
    }

    fn keep(&self, name: &Arc<str>, id: ObjectId, data: Bytes) {
        let mut kept = self.kept.lock();
        kept.bytes += data.len();
        if let Some((_, old)) = kept.files.push((Arc::clone(name), id), data) {
            kept.bytes -= old.len();
        }
        while kept.bytes > KEPT
            && let Some((_, old)) = kept.files.pop_lru()
        {
            kept.bytes -= old.len();
        }
    }

    /// Reads and decodes the manifests of `commit`. `name` is that of the repository. It waits while too many
    /// bytes of other projects are in work.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn load(
        &self,
        name: &Arc<str>,
        repository: &dyn Repository,
        commit: &Commit,
        globs: &[Glob],
        limits: &ReadLimits,
    ) -> Result<Loaded, LoadError> {
        let paths = list(repository, commit, globs, limits).await?;
        let bounds = Limits {
            file: usize::try_from(limits.file).unwrap_or(usize::MAX),
            total: usize::try_from(limits.total).unwrap_or(usize::MAX),
            ..Limits::default()
        };
        // The semaphore is never closed.
        let mut room = Arc::clone(&self.room).acquire_many_owned(kib(bounds.weight())).await.ok();
        let files = self.read(name, repository, commit, &paths, limits).await?;
        let commit = commit.to_string();
        let decoded = tokio::task::spawn_blocking(move || decode(&commit, &files, &bounds)).await;
        match decoded {
            Ok(Ok(set)) => {
                shrink(&mut room, &set);
                Ok(Loaded { set, _room: room })
            }
            Ok(Err(flaws)) => Err(LoadError::Flawed(flaws.to_string())),
            Err(error) => Err(LoadError::Unavailable(format!("decoding the manifests failed: {error}"))),
        }
    }

    /// Decodes files that were not read from a repository, within the same limits.
    ///
    /// # Errors
    /// As of [`load`](Self::load).
    pub(crate) async fn decode(
        &self,
        commit: &str,
        files: Vec<File>,
        limits: &ReadLimits,
    ) -> Result<Loaded, LoadError> {
        let total: usize = files.iter().map(|file| file.content.len()).sum();
        if total as u64 > limits.total {
            let text =
                format!("all files together have {total} bytes; at most {} are accepted", limits.total);
            return Err(LoadError::Flawed(text));
        }
        let bounds = Limits::default();
        let mut room = Arc::clone(&self.room).acquire_many_owned(kib(bounds.weight())).await.ok();
        let commit = commit.to_owned();
        let decoded = tokio::task::spawn_blocking(move || decode(&commit, &files, &bounds)).await;
        match decoded {
            Ok(Ok(set)) => {
                shrink(&mut room, &set);
                Ok(Loaded { set, _room: room })
            }
            Ok(Err(flaws)) => Err(LoadError::Flawed(flaws.to_string())),
            Err(error) => Err(LoadError::Unavailable(format!("decoding the manifests failed: {error}"))),
        }
    }

    /// Returns the files.
    async fn read(
        &self,
        name: &Arc<str>,
        repository: &dyn Repository,
        commit: &Commit,
        listed: &[Listed],
        limits: &ReadLimits,
    ) -> Result<Vec<File>, LoadError> {
        let mut contents: Vec<Option<Bytes>> = listed.iter().map(|entry| self.get(name, entry.id)).collect();
        let missing: Vec<usize> =
            contents.iter().enumerate().filter(|(_, content)| content.is_none()).map(|(at, _)| at).collect();
        let mut total = contents.iter().flatten().map(|content| content.len() as u64).sum::<u64>();
        for part in missing.chunks(PER_CALL) {
            let paths: Vec<RepoPath> = part.iter().map(|at| listed[*at].path.clone()).collect();
            // A limit of zero has another meaning for some servers.
            let left = limits.total.saturating_sub(total).max(1);
            let bounds = RepositoryLimits { file: limits.file.min(left), total: left };
            let read = repository.read(commit, &paths, bounds).await?;
            let count = read.len();
            for (at, content) in part.iter().zip(read) {
                let entry = &listed[*at];
                let data = content.into_data(&entry.path.to_string_lossy())?;
                total += data.len() as u64;
                self.keep(name, entry.id, data.clone());
                contents[*at] = Some(data);
            }
            if count < part.len() {
                return Err(too_large(limits));
            }
        }
        if total > limits.total {
            return Err(too_large(limits));
        }
        let mut files = Vec::with_capacity(listed.len());
        for (entry, content) in listed.iter().zip(contents) {
            // As it is in the repository: where that is on this host is nobody's business.
            let path = entry.path.to_string_lossy().into_owned();
            let Some(content) = content else {
                return Err(LoadError::Unavailable(format!("{path} was not read")));
            };
            if content.starts_with(LFS) {
                return Err(LoadError::Flawed(format!("manifest file: FileIsLfsPointer: {path}")));
            }
            if content.len() as u64 > limits.file {
                return Err(Error::too_big(&path, limits.file).into());
            }
            files.push(File { path: path.into(), content });
        }
        Ok(files)
    }
}

/// Returns how many permits a set needs. Decoded manifests take more memory than their files, but in
/// proportion to their weight.
fn kib(weight: usize) -> u32 {
    u32::try_from(weight.div_ceil(1024)).unwrap_or(ROOM).clamp(1, ROOM)
}

/// Gives back the permits that a decoded set does not need.
fn shrink(room: &mut Option<OwnedSemaphorePermit>, set: &Set) {
    if let Some(room) = room {
        drop(room.split(room.num_permits().saturating_sub(kib(set.weight()) as usize)));
    }
}

fn too_large(limits: &ReadLimits) -> LoadError {
    LoadError::Flawed(format!("the manifests together are larger than {} bytes", limits.total))
}

/// Lists the files of a project, in the order of its globs.
async fn list(
    repository: &dyn Repository,
    commit: &Commit,
    globs: &[Glob],
    limits: &ReadLimits,
) -> Result<Vec<Listed>, LoadError> {
    let flawed = |text: String| LoadError::Flawed(text);
    let mut seen = BTreeSet::new();
    let mut files = Vec::new();
    let mut count = 0;
    for glob in globs {
        let under = match glob.root() {
            "" | "." => None,
            root => Some(RepoPath::new(root).map_err(|error| flawed(format!("paths: {root}: {error}")))?),
        };
        let depth = if glob.is_recursive() { Depth::Below } else { Depth::Here };
        // Folders are listed too, so more entries than files are asked for.
        let listing =
            repository.list(commit, under.as_ref(), depth, limits.files.saturating_mul(4).max(1)).await?;
        let all = listing.entries.into_iter().filter(|entry| entry.kind == Kind::File);
        let too_many = || flawed(format!("maximum number of files limit reached: {}", limits.files));
        if !listing.is_complete {
            return Err(too_many());
        }
        for entry in all {
            count += 1;
            if count > limits.files {
                return Err(too_many());
            }
            let path = entry.path.to_string_lossy().into_owned();
            let matches = glob
                .matches(&path)
                .map_err(|error| flawed(format!("glob {} match failed: {error}", glob.as_str())))?;
            if !matches || is_hidden(&path) {
                continue;
            }
            if !seen.insert(path.clone()) {
                return Err(flawed(format!("path visited more than once: {path}")));
            }
            files.push(entry);
        }
    }
    Ok(files)
}
