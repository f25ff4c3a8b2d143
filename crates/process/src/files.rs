//! Reloads files that change while the process runs: certificates, keys and secrets.
//!
//! Files are polled, because notifications are not reliable: Kubernetes exchanges the symbolic link of a
//! folder, editors rename files, scripts overwrite them, and some file systems send no notifications. A
//! changed file is read only when two checks in a row agree, so that a file that is being written is left
//! alone.

use std::{
    fs::{self, File},
    hash::{BuildHasher as _, Hasher, RandomState},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// How often files are checked. Shorter: changes take effect sooner. Longer: fewer reads of a network file
/// system.
pub const PERIOD: Duration = Duration::from_secs(5);
/// Time between the two checks that must agree.
const SETTLE: Duration = Duration::from_millis(500);
/// As [`PERIOD`], for files with which somebody loses access. Together with [`SETTLE_SOON`] and the time for
/// reading, a change takes effect within a second.
const PERIOD_SOON: Duration = Duration::from_millis(400);
/// As [`SETTLE`], for such files.
const SETTLE_SOON: Duration = Duration::from_millis(200);
/// How many bytes of a file are read at once when it is compared.
const PIECE: usize = 16 * 1024;

/// Reads and applies the content. Returns a log message, or why the previous content stays in use.
type Apply = Box<dyn FnMut() -> Result<String, String> + Send>;

/// Is told whether the content of the files is the one in use.
type Observe = Box<dyn FnMut(bool) + Send>;

/// Files that are followed, with the function that applies their content.
pub struct Followed {
    name: String,
    files: Vec<PathBuf>,
    compared: Compared,
    apply: Apply,
    observe: Option<Observe>,
    keys: RandomState,
    /// Fingerprint of the content in use.
    used: u64,
    /// Fingerprint at the last check.
    seen: u64,
    /// Fingerprint of content that could not be used, which has been logged.
    refused: Option<u64>,
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Followed")
            .field("name", &self.name)
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

/// What is compared to find out whether a file has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compared {
    Content,
    Metadata,
}

/// A fingerprint of files, taken before they are read for use, so that no change in between is missed.
#[derive(Debug)]
pub struct Snapshot {
    files: Vec<PathBuf>,
    compared: Compared,
    keys: RandomState,
    used: u64,
}

impl Snapshot {
    /// Takes a fingerprint of `files`, which may be absent.
    pub fn reading(files: Vec<PathBuf>) -> Self {
        Self::by(Compared::Content, files)
    }

    /// As [`Snapshot::reading`], but compares only the metadata of the files: for [`follow_soon`], which
    /// checks so often that reading large files each time would cost too much. Files that were written again
    /// are applied again, even if their content is the same.
    pub fn looking_at(files: Vec<PathBuf>) -> Self {
        Self::by(Compared::Metadata, files)
    }

    fn by(compared: Compared, files: Vec<PathBuf>) -> Self {
        let keys = RandomState::new();
        let used = fingerprint(&keys, compared, &files);
        Self { files, compared, keys, used }
    }

    /// Calls `apply` whenever the content of the files has changed. `apply` reads and applies it and returns
    /// a log message, or returns why the previous content stays in use. `name` describes the files in the
    /// log.
    pub fn then(
        self,
        name: impl Into<String>,
        apply: impl FnMut() -> Result<String, String> + Send + 'static,
    ) -> Followed {
        let Self { files, compared, keys, used } = self;
        Followed {
            name: name.into(),
            files,
            compared,
            apply: Box::new(apply),
            observe: None,
            keys,
            used,
            seen: used,
            refused: None,
        }
    }
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The content is in use, or was refused before.
    Same,
    /// The content has changed. Check again soon, to see whether it stays the same.
    Changing,
    /// The new content is in use from now on.
    Applied,
    /// The new content cannot be used, and the previous content stays in use.
    Refused,
}

impl Followed {
    /// Calls `observe` when it changes whether the content of the files is the one in use: with `false` when
    /// changed files cannot be used, with `true` when they can be used again, or are what they were.
    #[must_use]
    pub fn observed(mut self, observe: impl FnMut(bool) + Send + 'static) -> Self {
        self.observe = Some(Box::new(observe));
        self
    }

    fn tell(&mut self, is_in_use: bool) {
        if let Some(observe) = &mut self.observe {
            observe(is_in_use);
        }
    }

    /// Checks once and logs the result. Blocks while files are read.
    pub fn check(&mut self) -> Check {
        let now = fingerprint(&self.keys, self.compared, &self.files);
        let before = std::mem::replace(&mut self.seen, now);
        if now == self.used {
            if self.refused.take().is_some() {
                tracing::info!(what = self.name, "the files match the content in use again");
                self.tell(true);
            }
            return Check::Same;
        }
        if self.refused == Some(now) {
            return Check::Same;
        }
        if now != before {
            return Check::Changing;
        }
        match (self.apply)() {
            Ok(message) => {
                self.used = now;
                self.refused = None;
                tracing::info!(what = self.name, "{message}");
                self.tell(true);
                Check::Applied
            }
            Err(error) => {
                self.refused = Some(now);
                self.tell(false);
                tracing::warn!(
                    what = self.name,
                    error,
                    "changed files cannot be used: the previous content stays in use"
                );
                Check::Refused
            }
        }
    }
}

/// Checks the files until dropped. `after` is called after each round.
pub async fn follow(all: Vec<Followed>, after: impl FnMut()) {
    follow_every(PERIOD, SETTLE, all, after).await;
}

/// As [`follow`], but so often that a change takes effect within a second, and independent of other files,
/// of which one may be on a file system that does not answer. Returns at once if there are no files.
pub async fn follow_soon(all: Vec<Followed>) {
    if !all.is_empty() {
        follow_every(PERIOD_SOON, SETTLE_SOON, all, || ()).await;
    }
}

async fn follow_every(period: Duration, settle: Duration, mut all: Vec<Followed>, mut after: impl FnMut()) {
    let mut pause = period;
    loop {
        tokio::time::sleep(pause).await;
        let checked = tokio::task::spawn_blocking(move || {
            let changing =
                all.iter_mut().filter_map(|one| (one.check() == Check::Changing).then_some(())).count();
            (all, changing > 0)
        });
        // This panics only if a check panicked. Without these files ever being checked again, certificates
        // would expire, so it must be noticed.
        let Ok((back, changing)) = checked.await else {
            tracing::error!(
                "the file watcher panicked: changed certificates and secrets take effect only after a restart"
            );
            return;
        };
        all = back;
        pause = if changing { settle } else { period };
        after();
    }
}

fn fingerprint(keys: &RandomState, compared: Compared, files: &[PathBuf]) -> u64 {
    let mut hasher = keys.build_hasher();
    for file in files {
        let added = match compared {
            Compared::Content => add_content(&mut hasher, file),
            Compared::Metadata => add_metadata(&mut hasher, file),
        };
        // After the content, so that two files are never hashed as one.
        match added {
            Ok(length) => {
                hasher.write_u8(1);
                hasher.write_u64(length);
            }
            Err(error) => {
                hasher.write_u8(0);
                hasher.write_i32(error.raw_os_error().unwrap_or(0));
            }
        }
    }
    hasher.finish()
}

/// Adds a file up to its end, however long it is. Returns its length.
fn add_content(hasher: &mut impl Hasher, file: &Path) -> io::Result<u64> {
    let mut file = File::open(file)?;
    let mut piece = vec![0; PIECE];
    let mut length = 0;
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(length),
            Ok(read) => {
                hasher.write(&piece[..read]);
                length += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Adds what differs if the content may differ: the change time also if a copy keeps the modification time,
/// the inode if the file or a link to it was replaced. Returns the length of the file.
fn add_metadata(hasher: &mut impl Hasher, file: &Path) -> io::Result<u64> {
    let metadata = fs::metadata(file)?;
    hasher.write_u64(metadata.dev());
    hasher.write_u64(metadata.ino());
    for time in [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()] {
        hasher.write_i64(time);
    }
    Ok(metadata.size())
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        sync::{Arc, Mutex},
    };

    use super::*;

    /// Follows one file that must contain a number. Returns it with the numbers that were applied.
    fn number(path: &Path) -> (Followed, Arc<Mutex<Vec<u32>>>) {
        let taken = Arc::<Mutex<Vec<u32>>>::default();
        let (to, file) = (Arc::clone(&taken), path.to_owned());
        let followed = Snapshot::reading(vec![path.to_owned()]).then("a number", move || {
            let text = fs::read_to_string(&file).map_err(|error| error.to_string())?;
            to.lock().unwrap().push(text.parse().map_err(|_| "no number".to_owned())?);
            Ok("another number".to_owned())
        });
        (followed, taken)
    }

    #[test]
    fn a_settled_change_is_applied_and_an_invalid_one_is_logged_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n");
        fs::write(&path, "1").unwrap();
        let (mut followed, taken) = number(&path);
        assert_eq!(followed.check(), Check::Same);
        fs::write(&path, "2").unwrap();
        assert_eq!(followed.check(), Check::Changing);
        // Still being written.
        fs::write(&path, "23").unwrap();
        assert_eq!(followed.check(), Check::Changing);
        assert_eq!(followed.check(), Check::Applied);
        assert_eq!(followed.check(), Check::Same);
        assert_eq!(*taken.lock().unwrap(), [23]);
        fs::write(&path, "x").unwrap();
        assert_eq!(
            [followed.check(), followed.check(), followed.check()],
            [Check::Changing, Check::Refused, Check::Same]
        );
        fs::remove_file(&path).unwrap();
        assert_eq!(
            [followed.check(), followed.check(), followed.check()],
            [Check::Changing, Check::Refused, Check::Same]
        );
        // The content in use is back: nothing to apply.
        fs::write(&path, "23").unwrap();
        assert_eq!([followed.check(), followed.check()], [Check::Same, Check::Same]);
        assert_eq!(*taken.lock().unwrap(), [23]);
    }

    #[test]
    fn an_observer_is_told_when_the_files_are_no_longer_the_content_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n");
        fs::write(&path, "1").unwrap();
        let (followed, _) = number(&path);
        let told = Arc::<Mutex<Vec<bool>>>::default();
        let to = Arc::clone(&told);
        let mut followed = followed.observed(move |is_in_use| to.lock().unwrap().push(is_in_use));
        for (content, checks) in [("x", 2), ("1", 1), ("y", 2), ("2", 2)] {
            fs::write(&path, content).unwrap();
            for _ in 0..checks {
                followed.check();
            }
        }
        assert_eq!(*told.lock().unwrap(), [false, true, false, true]);
    }

    #[test]
    fn a_folder_exchanged_by_kubernetes_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (version, content) in [("..1", "1"), ("..2", "2")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("n"), content).unwrap();
        }
        symlink("..1", at("..data")).unwrap();
        symlink("..data/n", at("n")).unwrap();
        let (mut followed, taken) = number(&at("n"));
        symlink("..2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert_eq!([followed.check(), followed.check()], [Check::Changing, Check::Applied]);
        assert_eq!(*taken.lock().unwrap(), [2]);
    }

    #[test]
    fn a_change_behind_the_first_mebibyte_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crl");
        let mut content = vec![b'a'; 3 << 20];
        fs::write(&path, &content).unwrap();
        let mut followed = Snapshot::reading(vec![path.clone()]).then("lists", || Ok("new lists".to_owned()));
        assert_eq!(followed.check(), Check::Same);
        *content.last_mut().unwrap() = b'b';
        fs::write(&path, &content).unwrap();
        assert_eq!([followed.check(), followed.check()], [Check::Changing, Check::Applied]);
    }

    #[test]
    fn a_replaced_file_is_noticed_by_its_metadata() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["crl", "new"] {
            fs::write(at(name), name).unwrap();
        }
        let mut followed = Snapshot::looking_at(vec![at("crl")]).then("lists", || Ok("new lists".to_owned()));
        assert_eq!([followed.check(), followed.check()], [Check::Same, Check::Same]);
        // Both exist at this time, so their inodes differ.
        fs::rename(at("new"), at("crl")).unwrap();
        assert_eq!(
            [followed.check(), followed.check(), followed.check()],
            [Check::Changing, Check::Applied, Check::Same]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn files_that_end_access_are_followed_within_a_second() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crl");
        fs::write(&path, "1").unwrap();
        let (applied, mut seen) = tokio::sync::watch::channel(false);
        let followed = Snapshot::looking_at(vec![path.clone()]).then("lists", move || {
            applied.send_replace(true);
            Ok("new lists".to_owned())
        });
        fs::write(&path, "22").unwrap();
        let begun = tokio::time::Instant::now();
        tokio::select! {
            () = follow_soon(vec![followed]) => panic!("it ends only when it is dropped"),
            changed = seen.changed() => changed.unwrap(),
        }
        // The clock is that of the runtime: it shows the pauses between the checks only.
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        follow_soon(Vec::new()).await;
    }
}
