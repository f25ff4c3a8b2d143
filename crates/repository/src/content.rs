//! What was read.

use bytes::Bytes;

use crate::{Commit, Error, Kind, ObjectId};

/// Limits of one call of `Repository::read`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Largest file.
    pub file: u64,
    /// All files together. It bounds the memory of the call.
    pub total: u64,
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A regular file.
    Data {
        /// The object.
        id: ObjectId,
        /// All of it.
        data: Bytes,
    },
    /// A regular file that is larger than what was permitted.
    TooBig {
        /// Its size in bytes, as far as known: at least `limit` + 1.
        size: u64,
        /// What was permitted: the limit for one file, or what was left of the total.
        limit: u64,
    },
    /// Something else.
    NotAFile(Kind),
    /// Nothing.
    Absent,
}

impl Content {
    /// Returns the data, or the error of GitLab agent 14.1 for what is there instead. `shown` names the file,
    /// see `Repository::shown`.
    ///
    /// # Errors
    /// [`Error::User`].
    pub fn into_data(self, shown: &str) -> Result<Bytes, Error> {
        match self {
            Self::Data { data, .. } => Ok(data),
            Self::TooBig { limit, .. } => Err(Error::too_big(shown, limit)),
            Self::NotAFile(_) => Err(Error::not_a_file(shown)),
            Self::Absent => Err(Error::not_found(shown)),
        }
    }
}

/// One file as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The commit, or the first 20 bytes of the SHA-256 of the content (`Versioning::File`), also of an
    /// absent file, whose content is empty. `None`: there is no commit.
    pub version: Option<Commit>,
    /// What is there.
    pub content: Content,
}
