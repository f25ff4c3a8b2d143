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
/// Manifests of all projects that are applied, and of which not all objects are current, in KiB. Where there
/// is no room among them, they stay in work.
const WAITING: u32 = 256 << 10;
/// An agent has at most half of what is in work, and a quarter of what waits.
const SHARES: [u32; 2] = [2, 4];
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

/// A decoded set. Its bytes count as work until its room is dropped or parked.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) set: Set,
    pub(crate) room: Option<Room>,
}

/// The room of a set: permits of all, and of its agent.
#[derive(Debug)]
pub(crate) struct Room {
    permits: [OwnedSemaphorePermit; 2],
    is_parked: bool,
}

impl Room {
    /// Gives back the permits that a decoded set does not need.
    fn shrink(&mut self, needed: u32) {
        for permit in &mut self.permits {
            drop(permit.split(permit.num_permits().saturating_sub(needed as usize)));
        }
    }
}

/// The room for manifests in work, and for those that wait.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    work: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    /// All permits of `work`.
    most: u32,
}

impl Share {
    fn new(work: u32, waiting: u32) -> Self {
        let semaphore = |permits: u32| Arc::new(Semaphore::new(permits as usize));
        Self { work: semaphore(work), waiting: semaphore(waiting), most: work }
    }
}

/// How a load waits for its turn.
pub(crate) struct Queue<'a> {
    /// The share of the agent.
    pub(crate) share: &'a Share,
    /// Is told why it waits.
    pub(crate) waits: &'a (dyn Fn(&str) + Send + Sync),
}

/// Reads manifests for all projects of a replica.
#[derive(Debug)]
pub(crate) struct Loader {
    kept: Mutex<Kept>,
    all: Share,
    waiting: u32,
}

#[derive(Debug)]
struct Kept {
    files: LruCache<(Arc<str>, ObjectId), Bytes>,
    bytes: usize,
}

impl Default for Loader {
    fn default() -> Self {
        Self::new(ROOM, WAITING)
    }
}

impl Loader {
    /// Returns one with room for so many KiB of manifests in work, and for so many that wait.
    fn new(work: u32, waiting: u32) -> Self {
        let files = LruCache::new(NonZeroUsize::new(KEPT_FILES).unwrap_or(NonZeroUsize::MIN));
        Self { kept: Mutex::new(Kept { files, bytes: 0 }), all: Share::new(work, waiting), waiting }
    }

    /// Returns the share of an agent.
    pub(crate) fn share(&self) -> Share {
        Share::new(self.all.most / SHARES[0], self.waiting / SHARES[1])
    }

    /// Returns how many KiB are in work, and how many wait.
    #[cfg(test)]
    pub(crate) fn used(&self) -> (usize, usize) {
        let used = |semaphore: &Semaphore, all: u32| all as usize - semaphore.available_permits();
        (used(&self.all.work, self.all.most), used(&self.all.waiting, self.waiting))
    }

    /// Takes room, at most all that the agent may have.
    async fn room(&self, bytes: u64, queue: &Queue<'_>) -> Option<Room> {
        let most = queue.share.most.min(self.all.most);
        let kib = kib(bytes, most);
        // The share comes first: an agent that waits for its own projects keeps nobody waiting.
        let own = wait(&queue.share.work, kib, || {
            (queue.waits)("waits for other projects of the agent, whose manifests are in work");
        });
        let own = own.await?;
        let all = wait(&self.all.work, kib, || {
            (queue.waits)("waits for projects of other agents, whose manifests are in work");
        });
        Some(Room { permits: [own, all.await?], is_parked: false })
    }

    /// Counts a set as one that waits, if there is room among those.
    pub(crate) fn park(&self, room: &mut Room, share: &Share) {
        if room.is_parked {
            return;
        }
        let [own, all] = &room.permits;
        let count = |permit: &OwnedSemaphorePermit| u32::try_from(permit.num_permits()).unwrap_or(u32::MAX);
        let own = Arc::clone(&share.waiting).try_acquire_many_owned(count(own));
        let all = Arc::clone(&self.all.waiting).try_acquire_many_owned(count(all));
        if let (Ok(own), Ok(all)) = (own, all) {
            *room = Room { permits: [own, all], is_parked: true };
        }
    }

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
    /// bytes of other projects are in work, and tells the queue why.
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
        queue: &Queue<'_>,
    ) -> Result<Loaded, LoadError> {
        let paths = list(repository, commit, globs, limits).await?;
        let bounds = Limits {
            file: usize::try_from(limits.file).unwrap_or(usize::MAX),
            total: usize::try_from(limits.total).unwrap_or(usize::MAX),
            ..Limits::default()
        };
        let mut room = self.room(bounds.weight() as u64, queue).await;
        let files = self.read(name, repository, commit, &paths, limits).await?;
        let commit = commit.to_string();
        let decoded = tokio::task::spawn_blocking(move || decode(&commit, &files, &bounds)).await;
        match decoded {
            Ok(Ok(set)) => {
                if let Some(room) = &mut room {
                    room.shrink(kib(set.weight() as u64, queue.share.most));
                }
                Ok(Loaded { set, room })
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
        queue: &Queue<'_>,
    ) -> Result<Loaded, LoadError> {
        let total: usize = files.iter().map(|file| file.content.len()).sum();
        if total as u64 > limits.total {
            let text =
                format!("all files together have {total} bytes; at most {} are accepted", limits.total);
            return Err(LoadError::Flawed(text));
        }
        let bounds = Limits::default();
        let mut room = self.room(bounds.weight() as u64, queue).await;
        let commit = commit.to_owned();
        let decoded = tokio::task::spawn_blocking(move || decode(&commit, &files, &bounds)).await;
        match decoded {
            Ok(Ok(set)) => {
                if let Some(room) = &mut room {
                    room.shrink(kib(set.weight() as u64, queue.share.most));
                }
                Ok(Loaded { set, room })
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

/// Returns how many permits a set of this weight needs. Decoded manifests take more memory than their files,
/// but in proportion to their weight.
fn kib(bytes: u64, most: u32) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(most).min(most).max(1)
}

/// Takes permits. If there are too few, it says so and waits.
async fn wait(
    semaphore: &Arc<Semaphore>,
    permits: u32,
    waits: impl FnOnce(),
) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(semaphore).try_acquire_many_owned(permits) {
        return Some(permit);
    }
    waits();
    // The semaphore is never closed.
    Arc::clone(semaphore).acquire_many_owned(permits).await.ok()
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use repository::{Revision, folder::Folder};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn what_waits_for_its_objects_does_not_keep_others_from_loading() {
        let dir = tempfile::tempdir().unwrap();
        let content =
            format!("# {}\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a}}\n", "x".repeat(15 << 10));
        std::fs::write(dir.path().join("a.yaml"), content).unwrap();
        let folder = Folder::new(dir.path());
        let head = folder.resolve(&Revision::Head).await.unwrap().unwrap();
        let globs = [Glob::parse("*.yaml").unwrap()];
        let limits = ReadLimits { total: 20 << 10, ..ReadLimits::default() };
        // A thousandth of the real ones.
        let loader = Loader::new(64, 256);
        let name = Arc::from("a");
        let said = Mutex::new(Vec::new());
        let waits = |why: &str| said.lock().push(why.to_owned());
        let shares = [loader.share(), loader.share(), loader.share(), loader.share()];
        let load = |at: usize| {
            let (loader, folder, head, globs, limits, name) =
                (&loader, &folder, &head, &globs, &limits, &name);
            let (share, waits) = (&shares[at], &waits);
            async move { loader.load(name, folder, head, globs, limits, &Queue { share, waits }).await.unwrap() }
        };
        let short = Duration::from_millis(100);
        let mut held = vec![load(0).await, load(1).await, load(2).await];
        assert!(timeout(short, load(3)).await.is_err());
        assert!(said.lock()[0].contains("projects of other agents"), "{said:?}");
        for (at, loaded) in held.iter_mut().enumerate() {
            loader.park(loaded.room.as_mut().unwrap(), &shares[at]);
        }
        let fourth = load(3).await;
        assert_eq!(loader.all.work.available_permits(), 64 - 16);

        // One agent does not take all of it, in work or waiting.
        said.lock().clear();
        drop((held, fourth));
        let mut held = Vec::new();
        for _ in 0..4 {
            let mut loaded = load(0).await;
            loader.park(loaded.room.as_mut().unwrap(), &shares[0]);
            held.push(loaded);
        }
        let mut stays = load(0).await;
        loader.park(stays.room.as_mut().unwrap(), &shares[0]);
        assert!(!stays.room.as_ref().unwrap().is_parked);
        assert!(timeout(short, load(0)).await.is_err());
        assert!(said.lock()[0].contains("other projects of the agent"), "{said:?}");
        load(1).await;
    }
}
