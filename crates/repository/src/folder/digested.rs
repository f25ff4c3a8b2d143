//! The digest of a file, and when it has to be made again.

use std::{fs, io, io::Read as _, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use aws_lc_rs::digest;
use tokio::time::Instant;

use super::id_of;
use crate::{Error, ObjectId};

/// Larger files are not read for the digest of the folder, which has their metadata instead, and cannot be
/// read at a commit.
pub(super) const MAX_DIGESTED: u64 = 64 << 20;
/// A file is read once more for the digest this long after it was first seen. Until then it may change
/// without a change of its metadata, because file systems keep times in steps of some milliseconds.
pub(super) const SETTLED: Duration = Duration::from_secs(1);

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

    /// Replaces the id, as if the content had been another one when it was read.
    #[cfg(test)]
    pub(super) fn forge(&mut self, id: ObjectId) {
        self.id = id;
    }

    pub(super) fn id(&self) -> ObjectId {
        self.id
    }
}

pub(super) fn failed(path: &Path, error: &io::Error) -> Error {
    Error::io(format!("{}: {error}", path.display()))
}

/// Returns the content; `None`: it is larger than `limit`.
pub(super) fn read_bounded(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() && !meta.is_dir() {
        // Opening a pipe would wait for its other end.
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut content = Vec::new();
    fs::File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut content)?;
    Ok((content.len() as u64 <= limit).then_some(content))
}
