//! Reloads files that change while the process runs: certificates, keys and secrets.
//!
//! Files are polled, because notifications are not reliable: Kubernetes exchanges the symbolic link of a
//! folder, editors rename files, scripts overwrite them, and some file systems send no notifications. A
//! changed file is read only when two checks in a row agree, so that a file that is being written is left
//! alone.

use std::{
    fs::File,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io::{self, Read as _},
    path::PathBuf,
    time::Duration,
};

/// How often files are checked. Shorter: changes take effect sooner. Longer: fewer reads of a network file
/// system.
pub const PERIOD: Duration = Duration::from_secs(5);
/// Time between the two checks that must agree.
const SETTLE: Duration = Duration::from_millis(500);
/// Maximum number of bytes of a file that are compared; no followed file is larger.
const LARGEST: u64 = 1 << 20;

/// Reads and applies the content. Returns a log message, or why the previous content stays in use.
type Apply = Box<dyn FnMut() -> Result<String, String> + Send>;

/// Is told whether the content of the files is the one in use.
type Observe = Box<dyn FnMut(bool) + Send>;

/// Files that are followed, with the function that applies their content.
pub struct Followed {
    name: String,
    files: Vec<PathBuf>,
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

/// A fingerprint of files, taken before they are read for use, so that no change in between is missed.
#[derive(Debug)]
pub struct Snapshot {
    files: Vec<PathBuf>,
    keys: RandomState,
    used: u64,
}

impl Snapshot {
    /// Takes a fingerprint of `files`, which may be absent.
    pub fn reading(files: Vec<PathBuf>) -> Self {
        let keys = RandomState::new();
        let used = fingerprint(&keys, &files);
        Self { files, keys, used }
    }

    /// Calls `apply` whenever the content of the files has changed. `apply` reads and applies it and returns
    /// a log message, or returns why the previous content stays in use. `name` describes the files in the
    /// log.
    pub fn then(
        self,
        name: impl Into<String>,
        apply: impl FnMut() -> Result<String, String> + Send + 'static,
    ) -> Followed {
        let Self { files, keys, used } = self;
        Followed {
            name: name.into(),
            files,
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
        let now = fingerprint(&self.keys, &self.files);
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
pub async fn follow(mut all: Vec<Followed>, mut after: impl FnMut()) {
    let mut pause = PERIOD;
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
        pause = if changing { SETTLE } else { PERIOD };
        after();
    }
}

fn fingerprint(keys: &RandomState, files: &[PathBuf]) -> u64 {
    let mut hasher = keys.build_hasher();
    for file in files {
        match read(file) {
            Ok(content) => {
                hasher.write_u8(1);
                hasher.write_usize(content.len());
                hasher.write(&content);
            }
            Err(error) => {
                hasher.write_u8(0);
                hasher.write_i32(error.raw_os_error().unwrap_or(0));
            }
        }
    }
    hasher.finish()
}

fn read(file: &PathBuf) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(file)?.take(LARGEST).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::symlink,
        path::Path,
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
}
