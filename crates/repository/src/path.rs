//! Paths inside a repository.

use std::{borrow::Cow, fmt, sync::Arc};

/// The longest path, in bytes: `PATH_MAX` of Linux, beyond which no checkout works.
pub const MAX_PATH: usize = 4096;

/// Why bytes are no path inside a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPath {
    /// It has no bytes.
    #[error("a path must not be empty")]
    Empty,
    /// It is longer than [`MAX_PATH`].
    #[error("a path has at most {MAX_PATH} bytes")]
    TooLong,
    /// It begins or ends with a slash, or has two in a row.
    #[error("a path is relative, and has no slash at its end or two in a row")]
    Slash,
    /// It has a name `.` or `..`.
    #[error("a path must not have . or .. as a name")]
    Dots,
    /// It has a NUL.
    #[error("a path must not have a NUL byte")]
    Nul,
}

/// A path from the root of a repository: names with slashes between them. It is not empty, and no name is
/// empty, `.` or `..`. It may have bytes that are not UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepoPath(Arc<[u8]>);

impl RepoPath {
    /// Checks `path`.
    ///
    /// # Errors
    /// See [`InvalidPath`].
    pub fn new(path: impl AsRef<[u8]>) -> Result<Self, InvalidPath> {
        let path = path.as_ref();
        if path.is_empty() {
            return Err(InvalidPath::Empty);
        }
        if path.len() > MAX_PATH {
            return Err(InvalidPath::TooLong);
        }
        if path.contains(&0) {
            return Err(InvalidPath::Nul);
        }
        for name in path.split(|byte| *byte == b'/') {
            match name {
                b"" => return Err(InvalidPath::Slash),
                b"." | b".." => return Err(InvalidPath::Dots),
                _ => {}
            }
        }
        Ok(Self(path.into()))
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the path as text, if it is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }

    /// Returns the path as text, with U+FFFD for what is not UTF-8.
    pub fn to_string_lossy(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.0)
    }
}

impl fmt::Display for RepoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_string_lossy())
    }
}

impl fmt::Debug for RepoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.to_string_lossy(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_relative_and_stays_inside() {
        for good in ["a", "a/b", ".gitlab/agents/x/config.yaml", "..a/b..", "a b", "…/ä"] {
            assert_eq!(RepoPath::new(good).unwrap().to_string(), good);
        }
        assert_eq!(RepoPath::new(b"a\xff").unwrap().as_str(), None);
        for (wrong, why) in [
            ("", InvalidPath::Empty),
            ("/", InvalidPath::Slash),
            ("/a", InvalidPath::Slash),
            ("a/", InvalidPath::Slash),
            ("a//b", InvalidPath::Slash),
            ("..", InvalidPath::Dots),
            ("a/../b", InvalidPath::Dots),
            ("./a", InvalidPath::Dots),
            ("a\0", InvalidPath::Nul),
        ] {
            assert_eq!(RepoPath::new(wrong), Err(why), "{wrong:?}");
        }
        assert!(RepoPath::new("a".repeat(MAX_PATH)).is_ok());
        assert_eq!(RepoPath::new("a".repeat(MAX_PATH + 1)), Err(InvalidPath::TooLong));
    }
}
