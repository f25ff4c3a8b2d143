//! Why a repository cannot be read.

use crate::Commit;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The user has to change the repository. The text begins with a code of GitLab agent 14.1, as in
    /// `FileTooBig: TreeEntry: file is too big: <path>`.
    #[error("{0}")]
    User(String),
    /// The operator has to fix the cause, or it is temporary. The last good state stays in use, and the call
    /// is repeated later.
    #[error("{message}")]
    Backend {
        /// A short name of the cause, such as `UNAVAILABLE` or `IO`.
        code: &'static str,
        /// What happened, for the log.
        message: String,
    },
    /// The server refuses the credentials. They must be asked anew before the next call.
    #[error("{0}")]
    Denied(String),
    /// The commit does not exist any more, as after a force-push. Resolve the revision anew.
    #[error("commit {0} does not exist")]
    Gone(Commit),
}

impl Error {
    /// Returns the error for a file of more than `limit` bytes.
    pub fn too_big(shown: &str, limit: u64) -> Self {
        Self::User(format!("FileTooBig: TreeEntry: file is too big: {shown}: the limit is {limit} bytes"))
    }

    /// Returns the error for something that is no regular file.
    pub fn not_a_file(shown: &str) -> Self {
        Self::User(format!("UnexpectedTreeEntryType: TreeEntry: file is not a usual file: {shown}"))
    }

    /// Returns the error for a file that is not there.
    pub fn not_found(shown: &str) -> Self {
        Self::User(format!("FileNotFound: TreeEntry: file/directory/ref not found: {shown}"))
    }

    /// Returns an error of the file system or of what was read from it.
    pub fn io(message: impl Into<String>) -> Self {
        Self::Backend { code: "IO", message: message.into() }
    }

    pub(crate) fn io_from(error: impl std::fmt::Display) -> Self {
        Self::io(error.to_string())
    }
}
