//! Errors of files.

use std::{io, path::PathBuf};

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}: {}", .path.display(), reason(.cause))]
pub(crate) struct FileError {
    /// The operation: read, create, write, lock.
    pub(crate) verb: &'static str,
    /// The file.
    pub(crate) path: PathBuf,
    /// The cause.
    #[source]
    pub(crate) cause: io::Error,
}

/// Describes an error in lower case and without its number: `io::Error` prints "Connection refused (os error
/// 111)".
pub(crate) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::AlreadyExists => "it exists already".to_owned(),
        io::ErrorKind::Other => error.to_string(),
        kind if kind.to_string() == "uncategorized error" => error.to_string(),
        kind => kind.to_string(),
    }
}
