//! Reads commits, listings and files of a repository.
//!
//! [`Repository`] is the trait. [`bare`] reads a bare Git repository on disk and [`folder`] a plain folder;
//! the crate `gitaly` reads GitLab's repositories. All of them pass the same suite, `contract` (feature
//! `testing`).
//!
//! Nothing is written, and nothing is cached here except what tells whether a folder has changed.

pub mod bare;
mod blocking;
mod changes;
mod content;
#[cfg(feature = "testing")]
pub mod contract;
mod error;
pub mod folder;
mod id;
mod path;
mod revision;

use std::{fmt, time::SystemTime};

use async_trait::async_trait;
use tokio::sync::watch;

pub use self::{
    changes::Changes,
    content::{Content, File, ReadLimits},
    error::Error,
    id::{Commit, InvalidId, ObjectId},
    path::{InvalidPath, MAX_PATH, RepoPath},
    revision::{InvalidRevision, RefName, Revision},
};

/// A repository that can be read.
///
/// The calls of one caller see commits as they were: what was read at a commit never changes. A call fails
/// with [`Error::Gone`] if the commit does not exist any more; the caller then resolves the revision anew.
///
/// Implementations bound what they hold by the limits of the call. Calls that block run on other threads.
#[async_trait]
pub trait Repository: fmt::Debug + Send + Sync + 'static {
    /// Returns the commit that `revision` names now. `None`: there is none, because the repository is empty
    /// or has no such ref or commit. A tag gives the commit that it points to.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::Denied`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, Error>;

    /// Lists what the folder `under` holds at `commit`; `None`: the root. A folder that does not exist, or is
    /// no folder, holds nothing.
    ///
    /// Entries are in the order of Git: bytewise by path, folders with a slash at their end. With
    /// [`Depth::Below`] the folders themselves are not listed.
    ///
    /// At most `most` entries are returned, the first ones. [`Listing::is_complete`] tells whether there are
    /// more.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Backend`], [`Error::Denied`]. [`Error::User`]: a path in the repository is
    /// not a [`RepoPath`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn list(
        &self,
        commit: &Commit,
        under: Option<&RepoPath>,
        depth: Depth,
        most: usize,
    ) -> Result<Listing, Error>;

    /// Reads files at `commit`. The result has the order of `paths`, and one item for each.
    ///
    /// It is shorter if the files together are larger than [`ReadLimits::total`]: the last item is then
    /// [`Content::TooBig`], for the first file that was too big for what was left.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Backend`], [`Error::Denied`]. A file that is absent, too big or no regular
    /// file is no error but [`Content`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn read(
        &self,
        commit: &Commit,
        paths: &[RepoPath],
        limits: ReadLimits,
    ) -> Result<Vec<Content>, Error>;

    /// Wakes when [`resolve`](Self::resolve) or [`fingerprint`](Self::fingerprint) may answer differently.
    /// Subscribe first, then resolve: nothing is missed. The value is a count and means nothing.
    ///
    /// Changes of which nobody tells (see [`tell_changed`](Self::tell_changed)) may not wake anybody: callers
    /// also poll.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Says that the repository may have changed. Wakes all who wait for [`changes`](Self::changes).
    fn tell_changed(&self);

    /// Returns what a version is the version of.
    fn versioning(&self) -> Versioning;

    /// Returns what shows without reading whether the file at `path` may have changed: equal values mean that
    /// it has not. With [`Versioning::Commit`] it is the same for all paths.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::Denied`]: the file must be read.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn fingerprint(&self, revision: &Revision, path: &RepoPath) -> Result<Fingerprint, Error> {
        let _ = path;
        Ok(self.resolve(revision).await?.map_or(Fingerprint::Absent, Fingerprint::Commit))
    }

    /// As [`fingerprint`](Self::fingerprint) for several files. The result has the order of `paths`.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn fingerprints(&self, revision: &Revision, paths: &[RepoPath]) -> Vec<Result<Fingerprint, Error>> {
        let mut fingerprints = Vec::with_capacity(paths.len());
        for path in paths {
            fingerprints.push(self.fingerprint(revision, path).await);
        }
        fingerprints
    }

    /// Reads one file as it is now at `revision`, of at most `limit` bytes.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve) and [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn file(&self, revision: &Revision, path: &RepoPath, limit: u64) -> Result<File, Error> {
        let Some(commit) = self.resolve(revision).await? else {
            return Ok(File { version: None, content: Content::Absent });
        };
        let limits = ReadLimits { file: limit, total: limit };
        let mut contents = self.read(&commit, std::slice::from_ref(path), limits).await?;
        Ok(File { version: Some(commit), content: contents.pop().unwrap_or(Content::Absent) })
    }

    /// Returns where the file at `path` is expected, for people: `<path> at HEAD of <repository>`.
    fn place(&self, revision: &Revision, path: &RepoPath) -> String;

    /// Returns `path` as error messages name it, for people: as it is, or with the name of the folder.
    fn shown(&self, path: &RepoPath) -> String {
        path.to_string()
    }
}

/// What a version is the version of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versioning {
    /// A commit: one version for all files of a revision.
    Commit,
    /// A file: [`File::version`] is made of its content, and other files do not change it.
    File,
}

/// How deep a listing goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The entries of the folder itself, folders included.
    Here,
    /// All files below it, without the folders.
    Below,
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file, executable or not.
    File,
    /// A symbolic link. It is not followed: reading it gives [`Content::NotAFile`].
    Symlink,
    /// A folder.
    Folder,
    /// A commit of another repository.
    Submodule,
}

/// One entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The whole path, from the root of the repository.
    pub path: RepoPath,
    /// What it is.
    pub kind: Kind,
    /// The object: equal ids of files mean equal contents, in the same repository.
    pub id: ObjectId,
}

/// The entries of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// In the order of Git.
    pub entries: Vec<Entry>,
    /// Whether these are all.
    pub is_complete: bool,
}

/// What shows without reading whether a file may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fingerprint {
    /// There is no such file, or no commit.
    Absent,
    /// The commit of the revision.
    Commit(Commit),
    /// Of a file on disk.
    File {
        /// When its content was changed last, if the file system knows it.
        modified: Option<SystemTime>,
        /// Its size in bytes.
        len: u64,
        /// Its number in the file system: a file that was replaced has another one.
        inode: u64,
    },
}
