//! Files that are read again while the process runs: certificates, keys and secrets.
//!
//! They are looked at, not waited for: Kubernetes replaces a folder by exchanging a symbolic link, editors
//! rename, scripts write in place, and some file systems tell nobody. What is being written is left alone
//! until two looks agree.

use std::{
    fs::File,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io::{self, Read as _},
    path::PathBuf,
    time::Duration,
};

/// How often files are looked at. Shorter: exchanged files count sooner. Longer: fewer reads of a network's
/// file system.
pub const PERIOD: Duration = Duration::from_secs(5);
/// Between the two looks that must agree.
const SETTLE: Duration = Duration::from_millis(500);
/// Bytes of a file that count: nothing that is followed is larger.
const LARGEST: u64 = 1 << 20;

/// Uses what the files hold now, or says why it stays with what it has.
type Take = Box<dyn FnMut() -> Result<String, String> + Send>;

/// Files and what is made of them.
pub struct Followed {
    name: String,
    files: Vec<PathBuf>,
    take: Take,
    keys: RandomState,
    /// Of what is in use.
    used: u64,
    /// Of what was there at the last look.
    seen: u64,
    /// Of what could not be used, which has been said.
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

/// What files are now, taken before they are read for use: then no change between the two is missed.
#[derive(Debug)]
pub struct Before {
    files: Vec<PathBuf>,
    keys: RandomState,
    used: u64,
}

impl Before {
    /// Looks at `files`, which may be absent.
    pub fn reading(files: Vec<PathBuf>) -> Self {
        let keys = RandomState::new();
        let used = fingerprint(&keys, &files);
        Self { files, keys, used }
    }

    /// Calls `take` whenever the files have become others. It reads them and uses what they hold, and returns
    /// what there is to say about that; or it keeps what is in use, and returns why. `name` says in the log
    /// what they are.
    pub fn then(
        self,
        name: impl Into<String>,
        take: impl FnMut() -> Result<String, String> + Send + 'static,
    ) -> Followed {
        let Self { files, keys, used } = self;
        Followed { name: name.into(), files, take: Box::new(take), keys, used, seen: used, refused: None }
    }
}

/// What a look has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// What is in use, or what was refused before.
    Same,
    /// Something else: looked at again soon, to see whether it stays.
    Changing,
    /// What is there is used from now on.
    Taken,
    /// What is there cannot be used, and what was used stays.
    Refused,
}

impl Followed {
    /// Looks once, and logs what comes of it. Blocks while files are read.
    pub fn look(&mut self) -> Look {
        let now = fingerprint(&self.keys, &self.files);
        let before = std::mem::replace(&mut self.seen, now);
        if now == self.used {
            if self.refused.take().is_some() {
                tracing::info!(what = self.name, "the files hold again what is in use");
            }
            return Look::Same;
        }
        if self.refused == Some(now) {
            return Look::Same;
        }
        if now != before {
            return Look::Changing;
        }
        match (self.take)() {
            Ok(said) => {
                self.used = now;
                self.refused = None;
                tracing::info!(what = self.name, "{said}");
                Look::Taken
            }
            Err(error) => {
                self.refused = Some(now);
                tracing::warn!(
                    what = self.name,
                    error,
                    "changed files cannot be used: what was read before stays in use"
                );
                Look::Refused
            }
        }
    }
}

/// Follows until dropped; `after` is called after each round.
pub async fn follow(mut all: Vec<Followed>, mut after: impl FnMut()) {
    let mut pause = PERIOD;
    loop {
        tokio::time::sleep(pause).await;
        let looked = tokio::task::spawn_blocking(move || {
            let changing =
                all.iter_mut().filter_map(|one| (one.look() == Look::Changing).then_some(())).count();
            (all, changing > 0)
        });
        // It panics only if one of them does, which would then never be followed again: that must not go
        // unnoticed.
        let Ok((back, changing)) = looked.await else {
            tracing::error!(
                "following files has ended by a panic: changed certificates and secrets need a restart"
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

    /// Follows one file that must hold a number; returns it with what was taken.
    fn number(path: &Path) -> (Followed, Arc<Mutex<Vec<u32>>>) {
        let taken = Arc::<Mutex<Vec<u32>>>::default();
        let (to, file) = (Arc::clone(&taken), path.to_owned());
        let followed = Before::reading(vec![path.to_owned()]).then("a number", move || {
            let text = fs::read_to_string(&file).map_err(|error| error.to_string())?;
            to.lock().unwrap().push(text.parse().map_err(|_| "no number".to_owned())?);
            Ok("another number".to_owned())
        });
        (followed, taken)
    }

    #[test]
    fn a_change_counts_once_it_stays_and_what_cannot_be_used_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n");
        fs::write(&path, "1").unwrap();
        let (mut followed, taken) = number(&path);
        assert_eq!(followed.look(), Look::Same);
        fs::write(&path, "2").unwrap();
        assert_eq!(followed.look(), Look::Changing);
        // Still being written.
        fs::write(&path, "23").unwrap();
        assert_eq!(followed.look(), Look::Changing);
        assert_eq!(followed.look(), Look::Taken);
        assert_eq!(followed.look(), Look::Same);
        assert_eq!(*taken.lock().unwrap(), [23]);
        fs::write(&path, "x").unwrap();
        assert_eq!(
            [followed.look(), followed.look(), followed.look()],
            [Look::Changing, Look::Refused, Look::Same]
        );
        fs::remove_file(&path).unwrap();
        assert_eq!(
            [followed.look(), followed.look(), followed.look()],
            [Look::Changing, Look::Refused, Look::Same]
        );
        // Back to what is in use: nothing to take.
        fs::write(&path, "23").unwrap();
        assert_eq!([followed.look(), followed.look()], [Look::Same, Look::Same]);
        assert_eq!(*taken.lock().unwrap(), [23]);
    }

    #[test]
    fn the_exchange_of_a_folder_by_kubernetes_is_seen() {
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
        assert_eq!([followed.look(), followed.look()], [Look::Changing, Look::Taken]);
        assert_eq!(*taken.lock().unwrap(), [2]);
    }
}
