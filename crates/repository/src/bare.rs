//! A bare Git repository on disk. One on another host is mirrored with `git fetch`.
//!
//! The repository is opened anew for each call: it may be replaced, packed or fetched into at any time.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;
use gix::{bstr::ByteSlice as _, object::tree::EntryKind};
use tokio::sync::watch;

use crate::{
    Changes, Commit, Content, Depth, Entry, Error, Kind, Listing, ObjectId, ReadLimits, RefName, RepoPath,
    Repository, Revision, Versioning, blocking::Blocking,
};

/// The largest list of entries of a folder and those that contain it, in bytes: about a million entries.
const MAX_TREE: u64 = 64 << 20;
/// The most folders that one listing visits: a few small objects can describe more folders than there are
/// atoms.
const MAX_FOLDERS: usize = 100_000;

/// A bare Git repository.
#[derive(Debug)]
pub struct Bare {
    git: Arc<Git>,
    changes: Changes,
    blocking: Blocking,
}

#[derive(Debug)]
struct Git {
    path: PathBuf,
    default_branch: Option<RefName>,
}

impl Bare {
    /// Returns the repository in the folder `path`, which need not exist yet. `default_branch` is read if
    /// `HEAD` names no commit.
    pub fn new(path: impl Into<PathBuf>, default_branch: Option<RefName>) -> Self {
        Self {
            git: Arc::new(Git { path: path.into(), default_branch }),
            changes: Changes::default(),
            blocking: Blocking::default(),
        }
    }

    /// Returns its folder.
    pub fn path(&self) -> &Path {
        &self.git.path
    }
}

#[async_trait]
impl Repository for Bare {
    async fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, Error> {
        let (git, revision) = (Arc::clone(&self.git), revision.clone());
        self.blocking.run(move || git.resolve(&revision)).await
    }

    async fn list(
        &self,
        commit: &Commit,
        under: Option<&RepoPath>,
        depth: Depth,
        most: usize,
    ) -> Result<Listing, Error> {
        let (git, commit, under) = (Arc::clone(&self.git), *commit, under.cloned());
        self.blocking.run(move || git.list(&commit, under.as_ref(), depth, most)).await
    }

    async fn read(
        &self,
        commit: &Commit,
        paths: &[RepoPath],
        limits: ReadLimits,
    ) -> Result<Vec<Content>, Error> {
        let (git, commit, paths) = (Arc::clone(&self.git), *commit, paths.to_vec());
        self.blocking.run(move || git.read(&commit, &paths, limits)).await
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
        format!("{path} at {revision} of {}", self.git.path.display())
    }
}

impl Git {
    fn failed(&self, error: impl fmt::Display) -> Error {
        Error::io(format!("{}: {error}", self.path.display()))
    }

    fn open(&self) -> Result<gix::Repository, Error> {
        gix::open(&self.path).map_err(|error| self.failed(error))
    }

    fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, Error> {
        let repository = self.open()?;
        match revision {
            Revision::Commit(commit) => self.peel(&repository, oid(commit.id())),
            Revision::Ref(name) => self.follow(&repository, name.as_str()),
            Revision::Head => {
                let mut head = repository.head().map_err(|error| self.failed(error))?;
                if let Some(id) = head.try_peel_to_id().map_err(|error| self.failed(error))? {
                    return self.peel(&repository, Some(id.detach()));
                }
                if let Some(branch) = &self.default_branch
                    && let Some(commit) = self.follow(&repository, branch.as_str())?
                {
                    return Ok(Some(commit));
                }
                self.follow(&repository, "refs/heads/master")
            }
        }
    }

    /// Returns the commit of a ref.
    fn follow(&self, repository: &gix::Repository, name: &str) -> Result<Option<Commit>, Error> {
        let found = repository.try_find_reference(name).map_err(|error| self.failed(error))?;
        // Git looks for a short name in several places. This one is a full name.
        let Some(mut found) = found.filter(|found| found.name().as_bstr() == name.as_bytes()) else {
            return Ok(None);
        };
        let id = found.peel_to_id().map_err(|error| self.failed(error))?;
        self.peel(repository, Some(id.detach()))
    }

    /// Returns the commit that an object is, or a tag points to.
    fn peel(&self, repository: &gix::Repository, id: Option<gix::ObjectId>) -> Result<Option<Commit>, Error> {
        let Some(id) = id else { return Ok(None) };
        let Some(header) = repository.try_find_header(id).map_err(|error| self.failed(error))? else {
            return Ok(None);
        };
        let id = match header.kind() {
            gix::object::Kind::Commit => id,
            gix::object::Kind::Tag => {
                let tag = repository.find_object(id).map_err(|error| self.failed(error))?;
                let end = tag.peel_tags_to_end().map_err(|error| self.failed(error))?;
                if end.kind != gix::object::Kind::Commit {
                    return Ok(None);
                }
                end.id
            }
            _ => return Ok(None),
        };
        Ok(Some(Commit::new(own(&id)?)))
    }

    /// Returns the root folder of a commit.
    fn root<'r>(&self, repository: &'r gix::Repository, commit: &Commit) -> Result<gix::Tree<'r>, Error> {
        let gone = || Error::Gone(*commit);
        let id = oid(commit.id()).ok_or_else(gone)?;
        let found = repository.try_find_object(id).map_err(|error| self.failed(error))?;
        let found = found.filter(|object| object.kind == gix::object::Kind::Commit).ok_or_else(gone)?;
        let tree = found.into_commit().tree_id().map_err(|error| self.failed(error))?;
        self.tree(repository, tree.detach())
    }

    fn tree<'r>(&self, repository: &'r gix::Repository, id: gix::ObjectId) -> Result<gix::Tree<'r>, Error> {
        let header = repository.find_header(id).map_err(|error| self.failed(error))?;
        if header.size() > MAX_TREE {
            return Err(too_large());
        }
        repository.find_tree(id).map_err(|error| self.failed(error))
    }

    /// Returns what is at a path.
    fn lookup<'r>(
        &self,
        repository: &'r gix::Repository,
        root: &gix::Tree<'r>,
        path: &RepoPath,
    ) -> Result<Option<(EntryKind, gix::ObjectId)>, Error> {
        let mut names = path.as_bytes().split_str(b"/").peekable();
        let mut folder: Option<gix::Tree<'r>> = None;
        while let Some(name) = names.next() {
            let entry = folder.as_ref().unwrap_or(root).find_entry(name);
            let Some(entry) = entry else { return Ok(None) };
            let (kind, id) = (entry.mode().kind(), entry.object_id());
            if names.peek().is_none() {
                return Ok(Some((kind, id)));
            }
            if kind != EntryKind::Tree {
                return Ok(None);
            }
            folder = Some(self.tree(repository, id)?);
        }
        Ok(None)
    }

    fn list(
        &self,
        commit: &Commit,
        under: Option<&RepoPath>,
        depth: Depth,
        most: usize,
    ) -> Result<Listing, Error> {
        let repository = self.open()?;
        let mut folder = self.root(&repository, commit)?;
        let mut prefix = Vec::new();
        if let Some(under) = under {
            match self.lookup(&repository, &folder, under)? {
                Some((EntryKind::Tree, id)) => folder = self.tree(&repository, id)?,
                _ => return Ok(Listing { entries: Vec::new(), is_complete: true }),
            }
            prefix.extend_from_slice(under.as_bytes());
            prefix.push(b'/');
        }
        let mut listing = Listing { entries: Vec::new(), is_complete: true };
        // The entries that are still to be visited, the next one last.
        let mut held = folder.data.len() as u64;
        let mut open = vec![Open { prefix, entries: self.entries(&folder)?, size: held }];
        let mut folders = 1;
        while let Some(last) = open.last_mut() {
            let Some(found) = last.entries.pop() else {
                held -= open.pop().map_or(0, |done| done.size);
                continue;
            };
            let path = [&last.prefix[..], &found.name[..]].concat();
            let path = RepoPath::new(&path).map_err(|why| invalid(&path, &why))?;
            if found.kind == EntryKind::Tree && depth == Depth::Below {
                folders += 1;
                if folders > MAX_FOLDERS {
                    return Err(Error::User(format!(
                        "UnknownErr: GetTreeEntries: there are more than {MAX_FOLDERS} folders"
                    )));
                }
                let prefix = [path.as_bytes(), b"/"].concat();
                let folder = self.tree(&repository, found.id)?;
                let size = folder.data.len() as u64;
                held += size;
                if held > MAX_TREE {
                    return Err(too_large());
                }
                open.push(Open { prefix, entries: self.entries(&folder)?, size });
                continue;
            }
            if listing.entries.len() >= most {
                listing.is_complete = false;
                break;
            }
            listing.entries.push(Entry { path, kind: kind(found.kind), id: own(&found.id)? });
        }
        Ok(listing)
    }

    /// Returns the entries of a folder, the first one last.
    fn entries(&self, folder: &gix::Tree<'_>) -> Result<Vec<Found>, Error> {
        let mut entries = Vec::new();
        for entry in folder.iter() {
            let entry = entry.map_err(|error| self.failed(error))?;
            let (name, id) = (entry.filename().as_bytes().into(), entry.object_id());
            entries.push(Found { name, kind: entry.mode().kind(), id });
        }
        entries.reverse();
        Ok(entries)
    }

    fn read(&self, commit: &Commit, paths: &[RepoPath], limits: ReadLimits) -> Result<Vec<Content>, Error> {
        let repository = self.open()?;
        let root = self.root(&repository, commit)?;
        let mut contents = Vec::with_capacity(paths.len());
        let mut left = limits.total;
        for path in paths {
            let content = match self.lookup(&repository, &root, path)? {
                None => Content::Absent,
                Some((EntryKind::Blob | EntryKind::BlobExecutable, id)) => {
                    let header = repository.find_header(id).map_err(|error| self.failed(error))?;
                    let (size, limit) = (header.size(), limits.file.min(left));
                    if size > limit {
                        contents.push(Content::TooBig { size, limit });
                        if size <= limits.file {
                            return Ok(contents);
                        }
                        continue;
                    }
                    left -= size;
                    let mut object = repository.find_object(id).map_err(|error| self.failed(error))?;
                    Content::Data { id: own(&id)?, data: Bytes::from(std::mem::take(&mut object.data)) }
                }
                Some((other, _)) => Content::NotAFile(kind(other)),
            };
            contents.push(content);
        }
        Ok(contents)
    }
}

/// A folder that is being listed.
struct Open {
    /// Its path with a slash; empty for the root.
    prefix: Vec<u8>,
    entries: Vec<Found>,
    /// Of its list of entries, in bytes.
    size: u64,
}

struct Found {
    name: Box<[u8]>,
    kind: EntryKind,
    id: gix::ObjectId,
}

fn too_large() -> Error {
    Error::User(format!("UnknownErr: GetTreeEntries: folders have more than {MAX_TREE} bytes of entries"))
}

fn invalid(path: &[u8], why: &crate::InvalidPath) -> Error {
    let path: String = String::from_utf8_lossy(path).chars().take(256).collect();
    Error::User(format!("ProtocolError: GetTreeEntries: {why}: {path}"))
}

fn kind(kind: EntryKind) -> Kind {
    match kind {
        EntryKind::Blob | EntryKind::BlobExecutable => Kind::File,
        EntryKind::Link => Kind::Symlink,
        EntryKind::Tree => Kind::Folder,
        EntryKind::Commit => Kind::Submodule,
    }
}

fn own(id: &gix::ObjectId) -> Result<ObjectId, Error> {
    ObjectId::from_bytes(id.as_bytes()).map_err(Error::io_from)
}

fn oid(id: &ObjectId) -> Option<gix::ObjectId> {
    gix::ObjectId::try_from(id.as_bytes()).ok()
}
