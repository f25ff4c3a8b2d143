//! A plain folder, such as a mounted ConfigMap or what another program keeps up to date.
//!
//! A folder has no commits. Its commit is a digest of the paths and contents of all its files, so that
//! replicas with equal folders name equal commits. A file is read again for the digest only if its metadata
//! has changed. [`Error::Gone`] says that the folder is not what it was at a commit.
//!
//! Symbolic links are followed as far as they stay in the folder: Kubernetes mounts files as such links.
//! Names that begin with two dots are Kubernetes' own and are skipped, as are `.git` and empty folders.

mod digested;
mod disk;
mod scan;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use aws_lc_rs::digest;
use tokio::sync::watch;

use self::disk::Disk;
use crate::{
    Changes, Commit, Content, Depth, Error, File, Fingerprint, Listing, ObjectId, ReadLimits, RepoPath,
    Repository, Revision, Versioning, blocking::Blocking,
};

/// A folder.
#[derive(Debug)]
pub struct Folder {
    disk: Arc<Disk>,
    changes: Changes,
    blocking: Blocking,
}

impl Folder {
    /// Returns the folder at `path`, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            disk: Arc::new(Disk::new(path.into())),
            changes: Changes::default(),
            blocking: Blocking::default(),
        }
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.disk.root()
    }
}

#[async_trait]
impl Repository for Folder {
    /// [`Revision::Head`] is what the folder holds now. It has no refs.
    async fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, Error> {
        let (disk, revision) = (Arc::clone(&self.disk), revision.clone());
        self.blocking
            .run(move || match revision {
                Revision::Head => Ok(Some(disk.scan()?.commit)),
                Revision::Ref(_) => Ok(None),
                Revision::Commit(commit) => Ok(Some(disk.scan()?.commit).filter(|now| *now == commit)),
            })
            .await
    }

    async fn list(
        &self,
        commit: &Commit,
        under: Option<&RepoPath>,
        depth: Depth,
        most: usize,
    ) -> Result<Listing, Error> {
        let (disk, commit, under) = (Arc::clone(&self.disk), *commit, under.cloned());
        self.blocking.run(move || Ok(disk.scan_at(&commit)?.list(under.as_ref(), depth, most))).await
    }

    async fn read(
        &self,
        commit: &Commit,
        paths: &[RepoPath],
        limits: ReadLimits,
    ) -> Result<Vec<Content>, Error> {
        let (disk, commit, paths) = (Arc::clone(&self.disk), *commit, paths.to_vec());
        self.blocking.run(move || disk.read(&commit, &paths, limits)).await
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell_changed(&self) {
        self.changes.tell();
    }

    fn versioning(&self) -> Versioning {
        Versioning::File
    }

    async fn fingerprint(&self, revision: &Revision, path: &RepoPath) -> Result<Fingerprint, Error> {
        if *revision != Revision::Head {
            return Ok(Fingerprint::Absent);
        }
        let (disk, path) = (Arc::clone(&self.disk), path.clone());
        self.blocking.run(move || disk.fingerprint(&path)).await
    }

    /// Thousands of files are checked several times a second: on one thread, one after the other.
    async fn fingerprints(&self, revision: &Revision, paths: &[RepoPath]) -> Vec<Result<Fingerprint, Error>> {
        if *revision != Revision::Head {
            return vec![Ok(Fingerprint::Absent); paths.len()];
        }
        let (disk, of) = (Arc::clone(&self.disk), paths.to_vec());
        let all = self.blocking.run(move || Ok(of.iter().map(|path| disk.fingerprint(path)).collect()));
        all.await.unwrap_or_else(|error| vec![Err(error); paths.len()])
    }

    /// Reads only this file, not the whole folder. Symbolic links are followed wherever they lead.
    async fn file(&self, revision: &Revision, path: &RepoPath, limit: u64) -> Result<File, Error> {
        if *revision != Revision::Head {
            return Ok(File { version: None, content: Content::Absent });
        }
        let (disk, path) = (Arc::clone(&self.disk), path.clone());
        self.blocking.run(move || disk.file(&path, limit)).await
    }

    fn place(&self, _: &Revision, path: &RepoPath) -> String {
        self.shown(path)
    }

    fn shown(&self, path: &RepoPath) -> String {
        self.disk.path_of(path).display().to_string()
    }
}

/// Returns the id of a content: the first 20 bytes of its SHA-256.
fn id_of(digest: &digest::Digest) -> Result<ObjectId, Error> {
    ObjectId::from_bytes(&digest.as_ref()[..20]).map_err(Error::io_from)
}
