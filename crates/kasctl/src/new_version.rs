//! Replaces a file atomically: a new version is written next to it, and renamed.

use std::{
    fs::{self, File, Metadata, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

/// Returns the file that a path means: the target of a symbolic link, so that the link is kept.
///
/// # Errors
/// The link has no target.
pub(crate) fn target(path: &Path) -> io::Result<PathBuf> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => fs::canonicalize(path),
        _ => Ok(path.to_owned()),
    }
}

/// Returns the directory of a file.
pub(crate) fn directory(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// A complete new version of a file, on disk next to the old one. If it is dropped, the old version stays.
#[derive(Debug)]
pub(crate) struct NewVersion {
    target: PathBuf,
    /// `None` after it has replaced the old version.
    new: Option<PathBuf>,
    /// Open until the end, because a caller may hold a lock on it.
    directory: File,
}

impl NewVersion {
    /// Writes a new version of `target`. `unique` is a part of its temporary name. It gets the owner of the
    /// old version, if there is one.
    ///
    /// # Errors
    /// The new version cannot be written. Nothing of it is left.
    pub(crate) fn write(
        directory: File,
        target: &Path,
        unique: &str,
        old: Option<&Metadata>,
        mode: u32,
        text: &str,
    ) -> io::Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let new = self::directory(target).join(format!(".{name}.{unique}.new"));
        // Nobody else may read it before it has its final mode.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode & 0o600).open(&new)?;
        // From here on, dropping it removes the new file.
        let version = Self { target: target.to_owned(), new: Some(new), directory };
        if let Some(old) = old {
            let own = file.metadata()?;
            // So that a program that runs as the owner can still read it.
            if (own.uid(), own.gid()) != (old.uid(), old.gid()) {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
            }
        }
        file.set_permissions(Permissions::from_mode(mode))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        Ok(version)
    }

    /// Replaces the old version atomically.
    ///
    /// # Errors
    /// The old version cannot be replaced, and stays.
    pub(crate) fn commit(mut self) -> io::Result<()> {
        if let Some(new) = &self.new {
            fs::rename(new, &self.target)?;
        }
        self.new = None;
        // The replacement is done. This only makes it durable if the machine crashes.
        let _ = self.directory.sync_all();
        Ok(())
    }
}

impl Drop for NewVersion {
    fn drop(&mut self) {
        if let Some(new) = &self.new {
            let _ = fs::remove_file(new);
        }
    }
}
