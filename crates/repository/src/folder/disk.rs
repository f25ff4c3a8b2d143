//! Reads files of a folder.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs, io,
    io::Read as _,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use aws_lc_rs::digest;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{
    id_of,
    scan::{Item, Scan},
};
use crate::{Commit, Content, Error, File, Fingerprint, Kind, ObjectId, ReadLimits, RepoPath};

/// Larger files are not read for the digest of the folder, which has their metadata instead, and cannot be
/// read at a commit.
pub(super) const MAX_DIGESTED: u64 = 64 << 20;
/// A file is read once more for the digest this long after it was first seen. Until then it may change without
/// a change of its metadata, because file systems keep times in steps of some milliseconds.
const SETTLED: Duration = Duration::from_secs(1);

/// The folder on disk.
#[derive(Debug)]
pub(super) struct Disk {
    root: PathBuf,
    /// The files of the last scan, by their path on disk.
    digests: Mutex<HashMap<PathBuf, Digested>>,
}

/// What a file was when its content was read for the digest.
#[derive(Clone, Debug)]
pub(super) struct Digested {
    stat: Stat,
    id: ObjectId,
    /// When it was read; `None`: long enough after its last change.
    read_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    modified: (i64, i64),
    changed: (i64, i64),
    len: u64,
    inode: u64,
}

impl Stat {
    fn of(meta: &fs::Metadata) -> Self {
        Self {
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            len: meta.len(),
            inode: meta.ino(),
        }
    }
}

impl Disk {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root, digests: Mutex::default() }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns where a file is on disk.
    pub(super) fn path_of(&self, path: &RepoPath) -> PathBuf {
        self.root.join(OsStr::from_bytes(path.as_bytes()))
    }

    /// Returns what the folder holds now.
    pub(super) fn scan(&self) -> Result<Scan, Error> {
        let before = std::mem::take(&mut *self.digests.lock());
        let scanned = Scan::of(&self.root, &before);
        match scanned {
            Ok((scan, digests)) => {
                *self.digests.lock() = digests;
                Ok(scan)
            }
            Err(error) => {
                *self.digests.lock() = before;
                Err(error)
            }
        }
    }

    /// As [`scan`](Self::scan), if the folder still holds what it held at `commit`.
    pub(super) fn scan_at(&self, commit: &Commit) -> Result<Scan, Error> {
        let scan = self.scan()?;
        if scan.commit == *commit { Ok(scan) } else { Err(Error::Gone(*commit)) }
    }

    pub(super) fn read(
        &self,
        commit: &Commit,
        paths: &[RepoPath],
        limits: ReadLimits,
    ) -> Result<Vec<Content>, Error> {
        let scan = self.scan_at(commit)?;
        let mut contents = Vec::with_capacity(paths.len());
        let mut left = limits.total;
        for path in paths {
            let content = match scan.at(path) {
                Some(Item { kind: Kind::File, id, len }) => {
                    let limit = limits.file.min(left).min(MAX_DIGESTED);
                    if *len > limit {
                        contents.push(Content::TooBig { size: *len, limit });
                        if *len <= limits.file.min(MAX_DIGESTED) {
                            return Ok(contents);
                        }
                        continue;
                    }
                    let on_disk = self.path_of(path);
                    let data = read_bounded(&on_disk, limit).map_err(|_| Error::Gone(*commit))?;
                    let data = data.ok_or(Error::Gone(*commit))?;
                    if id_of(&digest::digest(&digest::SHA256, &data))? != *id {
                        // The next scan must not trust its metadata.
                        self.digests.lock().remove(&on_disk);
                        return Err(Error::Gone(*commit));
                    }
                    left -= data.len() as u64;
                    Content::Data { id: *id, data: Bytes::from(data) }
                }
                Some(Item { kind, .. }) => Content::NotAFile(*kind),
                None if scan.is_folder(path) => Content::NotAFile(Kind::Folder),
                None => Content::Absent,
            };
            contents.push(content);
        }
        Ok(contents)
    }

    pub(super) fn fingerprint(&self, path: &RepoPath) -> Result<Fingerprint, Error> {
        let path = self.path_of(path);
        match fs::metadata(&path) {
            Ok(meta) => {
                Ok(Fingerprint::File { modified: meta.modified().ok(), len: meta.len(), inode: meta.ino() })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Fingerprint::Absent),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    pub(super) fn file(&self, path: &RepoPath, limit: u64) -> Result<File, Error> {
        let path = self.path_of(path);
        let (content, digest) = match read_bounded(&path, limit) {
            Ok(Some(data)) => {
                let digest = digest::digest(&digest::SHA256, &data);
                (Content::Data { id: id_of(&digest)?, data: Bytes::from(data) }, digest)
            }
            Ok(None) => {
                let size = fs::metadata(&path).map_or(0, |meta| meta.len()).max(limit.saturating_add(1));
                return Ok(File { version: None, content: Content::TooBig { size, limit } });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                (Content::Absent, digest::digest(&digest::SHA256, b""))
            }
            Err(error) => return Err(failed(&path, &error)),
        };
        Ok(File { version: Some(Commit::new(id_of(&digest)?)), content })
    }
}

impl Digested {
    /// Returns the id of a file, from `before` if its metadata has not changed. `None`: it has gone.
    pub(super) fn of(path: &Path, meta: &fs::Metadata, before: Option<&Self>) -> Result<Option<Self>, Error> {
        let stat = Stat::of(meta);
        let known = before.filter(|before| before.stat == stat);
        let settled = match known {
            Some(known) if known.read_at.is_none_or(|at| at.elapsed() < SETTLED) => {
                return Ok(Some(known.clone()));
            }
            known => known.is_some(),
        };
        let read_at = (!settled).then(Instant::now);
        let mut context = digest::Context::new(&digest::SHA256);
        if stat.len > MAX_DIGESTED {
            context.update(format!("{stat:?}").as_bytes());
            return Ok(Some(Self { stat, id: id_of(&context.finish())?, read_at: None }));
        }
        match read_bounded(path, MAX_DIGESTED) {
            Ok(Some(data)) => context.update(&data),
            // It grows. The next scan finds it larger.
            Ok(None) => context.update(format!("{stat:?}").as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(path, &error)),
        }
        Ok(Some(Self { stat, id: id_of(&context.finish())?, read_at }))
    }

    pub(super) fn id(&self) -> ObjectId {
        self.id
    }
}

pub(super) fn failed(path: &Path, error: &io::Error) -> Error {
    Error::io(format!("{}: {error}", path.display()))
}

/// Returns the content; `None`: it is larger than `limit`.
fn read_bounded(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() && !meta.is_dir() {
        // Opening a pipe would wait for its other end.
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut content = Vec::new();
    fs::File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut content)?;
    Ok((content.len() as u64 <= limit).then_some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails if a file that changed within a step of the file system's clock keeps its old digest.
    #[tokio::test(start_paused = true)]
    async fn a_file_is_read_again_when_its_times_have_settled() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        fs::write(&file, "one").unwrap();
        let disk = Disk::new(folder.path().to_owned());
        let right = disk.scan().unwrap().commit;
        // As if its content had been read before a change that the metadata do not show.
        let id = "0123456789abcdef0123456789abcdef01234567".parse().unwrap();
        disk.digests.lock().get_mut(&file).unwrap().id = id;
        let wrong = disk.scan().unwrap().commit;
        assert_ne!(wrong, right);
        tokio::time::advance(SETTLED).await;
        assert_eq!(disk.scan().unwrap().commit, right);
        // Once is enough.
        disk.digests.lock().get_mut(&file).unwrap().id = id;
        tokio::time::advance(100 * SETTLED).await;
        assert_eq!(disk.scan().unwrap().commit, wrong);
        fs::write(&file, "longer").unwrap();
        assert_ne!(disk.scan().unwrap().commit, wrong);
    }

    /// Fails if what is read can be something else than what was listed.
    #[tokio::test]
    async fn a_file_that_is_not_what_was_listed_is_not_returned() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        fs::write(&file, "one").unwrap();
        let disk = Disk::new(folder.path().to_owned());
        disk.scan().unwrap();
        let id = "0123456789abcdef0123456789abcdef01234567".parse().unwrap();
        disk.digests.lock().get_mut(&file).unwrap().id = id;
        let commit = disk.scan().unwrap().commit;
        let read = || disk.read(&commit, &[RepoPath::new("a").unwrap()], ReadLimits { file: 10, total: 10 });
        assert_eq!(read(), Err(Error::Gone(commit)));
        assert_ne!(disk.scan().unwrap().commit, commit);
    }
}
