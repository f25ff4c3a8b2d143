//! The file of a kubeconfig: its path, its lock, and its replacement.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use crate::{
    file_error::FileError,
    jwt,
    kubeconfig_text::NotUnderstood,
    new_version::{self, NewVersion},
};

/// The mode of the file: a kubeconfig may contain credentials.
const MODE: u32 = 0o600;
/// The mode of a new directory.
const DIRECTORY_MODE: u32 = 0o700;
/// How long to wait for another program that changes the file. kubectl holds its lock for milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// How often a lock is tried.
const RETRY: Duration = Duration::from_millis(50);

/// Why the file was not changed. It is as it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its content cannot be changed.
    #[error(
        "cannot change {}: {cause}; 'kubectl config view --raw --kubeconfig {}' prints it in the form that can be \
         changed, and another file can be set with --kubeconfig",
        .path.display(),
        .path.display()
    )]
    NotUnderstood {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        cause: NotUnderstood,
    },
    /// Another program changes it.
    #[error(
        "cannot change {}: another program holds its lock {}; if no program changes it, the lock was left over: \
         remove it",
        .path.display(),
        .lock.display()
    )]
    Locked {
        /// The file.
        path: PathBuf,
        /// Its lock.
        lock: PathBuf,
    },
    /// It is a directory or a device.
    #[error("cannot change {}: it is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// No variable defines its path.
    #[error("no kubeconfig: set --kubeconfig (HOME is not set, so there is no default path)")]
    NoPath,
    /// There are no random bytes for the name of the new version.
    #[error(transparent)]
    Random(#[from] jwt::Error),
}

/// Returns the path that kubectl changes: of the files in `KUBECONFIG`, the first that exists or else the
/// last; without them `~/.kube/config`.
///
/// # Errors
/// [`Error::NoPath`].
pub(crate) fn default_path(var: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, Error> {
    let listed = var("KUBECONFIG").unwrap_or_default();
    let files: Vec<PathBuf> = std::env::split_paths(&listed).filter(|path| path != Path::new("")).collect();
    if let Some(last) = files.last() {
        return Ok(files.iter().find(|path| path.exists()).unwrap_or(last).clone());
    }
    let home = var("HOME").filter(|home| !home.is_empty()).ok_or(Error::NoPath)?;
    Ok(PathBuf::from(home).join(".kube/config"))
}

/// A kubeconfig that no other kubectl or kasctl changes until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedFile {
    path: PathBuf,
    /// The file itself if the path is a symbolic link.
    target: PathBuf,
    lock: PathBuf,
    old: Option<Metadata>,
}

impl LockedFile {
    /// Locks a file as kubectl does: by a file of the same name with `.lock`. Its directory is created.
    ///
    /// # Errors
    /// See [`Error`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn lock(path: &Path, patience: Duration) -> Result<Self, Error> {
        let failed = |verb| move |cause| FileError { verb, path: path.to_owned(), cause };
        let directory = new_version::directory(path);
        DirBuilder::new()
            .recursive(true)
            .mode(DIRECTORY_MODE)
            .create(directory)
            .map_err(failed("create the directory of"))?;
        let target = new_version::target(path).map_err(failed("read"))?;
        let mut lock = path.as_os_str().to_owned();
        lock.push(".lock");
        let lock = PathBuf::from(lock);
        let until = Instant::now() + patience;
        loop {
            match OpenOptions::new().write(true).create_new(true).mode(MODE).open(&lock) {
                Ok(_) => return Ok(Self { path: path.to_owned(), target, lock, old: None }),
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(failed("lock")(error).into());
                }
                Err(_) if Instant::now() >= until => {
                    return Err(Error::Locked { path: path.to_owned(), lock });
                }
                Err(_) => sleep(RETRY).await,
            }
        }
    }

    /// Reads it. A missing file is empty.
    ///
    /// # Errors
    /// It cannot be read, or is not a file with text.
    pub(crate) fn read(&mut self) -> Result<String, Error> {
        let failed = |cause| FileError { verb: "read", path: self.path.clone(), cause };
        match fs::metadata(&self.target) {
            Ok(found) if !found.is_file() => Err(Error::NotAFile(self.path.clone())),
            Ok(found) => {
                let text = fs::read_to_string(&self.target).map_err(failed)?;
                self.old = Some(found);
                Ok(text)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
            Err(error) => Err(failed(error).into()),
        }
    }

    /// Replaces its content atomically, with mode 0600.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn write(&self, text: &str) -> Result<(), Error> {
        let unique = jwt::unique_id().map_err(jwt::Error::from)?;
        let written = || -> io::Result<()> {
            let directory = File::open(new_version::directory(&self.target))?;
            NewVersion::write(directory, &self.target, &unique, self.old.as_ref(), MODE, text)?.commit()
        };
        let failed = |cause| FileError { verb: "write", path: self.path.clone(), cause };
        Ok(written().map_err(failed)?)
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.lock);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_path_is_that_of_kubectl() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("b"), "").unwrap();
        let path = |list: &[PathBuf], home: &str| {
            let list = std::env::join_paths(list).unwrap();
            default_path(|name| Some(if name == "HOME" { home.into() } else { list.clone() }))
        };
        assert_eq!(path(&[at("a"), at("b"), at("c")], "").unwrap(), at("b"));
        assert_eq!(path(&["".into(), at("a"), at("c")], "").unwrap(), at("c"));
        assert_eq!(path(&[], "/h").unwrap(), Path::new("/h/.kube/config"));
        assert!(matches!(path(&[], ""), Err(Error::NoPath)));
    }

    #[tokio::test]
    async fn a_file_is_replaced_under_its_lock_with_mode_0600() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/config");
        let mut file = LockedFile::lock(&path, Duration::ZERO).await.unwrap();
        let lock = dir.path().join("new/config.lock");
        assert!(lock.exists());
        let other = LockedFile::lock(&path, Duration::ZERO).await;
        assert!(matches!(other, Err(Error::Locked { lock: held, .. }) if held == lock));
        assert_eq!(file.read().unwrap(), "");
        file.write("one").unwrap();
        drop(file);
        assert!(!lock.exists());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));

        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("new/config", &link).unwrap();
        let mut file = LockedFile::lock(&link, Duration::ZERO).await.unwrap();
        assert_eq!(file.read().unwrap(), "one");
        file.write("two").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!((std::fs::read_to_string(&path).unwrap().as_str(), mode(&path)), ("two", 0o600));
        let mut directory = LockedFile::lock(dir.path(), Duration::ZERO).await.unwrap();
        assert!(matches!(directory.read(), Err(Error::NotAFile(_))));
    }
}
