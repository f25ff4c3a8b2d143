//! What names a commit.

use std::{fmt, sync::Arc};

use crate::Commit;

/// The longest name of a ref, in bytes: file names of loose refs are no longer than 255, and nobody needs
/// more than a few levels.
const MAX_REF: usize = 1024;

/// Why a text names no revision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRevision {
    /// `git check-ref-format` would refuse it.
    #[error("{0:?} is not a name that Git permits for a ref")]
    Name(String),
    /// A full name begins with `refs/`.
    #[error("{0:?} does not begin with refs/")]
    NotFull(String),
    /// A name is too long.
    #[error("the name of a ref has at most {MAX_REF} bytes")]
    TooLong,
    /// A commit is named by all of its digits.
    #[error("{0:?} is not a commit: 40 or 64 hexadecimal digits")]
    Commit(String),
}

/// The full name of a ref, such as `refs/heads/main`. Git permits it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefName(Arc<str>);

impl RefName {
    /// Checks a full name, by the rules of `git check-ref-format`.
    ///
    /// # Errors
    /// See [`InvalidRevision`].
    pub fn new(name: &str) -> Result<Self, InvalidRevision> {
        if name.len() > MAX_REF {
            return Err(InvalidRevision::TooLong);
        }
        if !name.starts_with("refs/") {
            return Err(InvalidRevision::NotFull(name.to_owned()));
        }
        if !is_permitted(name) {
            return Err(InvalidRevision::Name(name.to_owned()));
        }
        Ok(Self(name.into()))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RefName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RefName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// The rules of `git check-ref-format`, for a name with at least one slash.
fn is_permitted(name: &str) -> bool {
    let wrong = |c: char| c.is_ascii_control() || " ~^:?*[\\".contains(c);
    name.contains('/')
        && !name.contains("..")
        && !name.contains("@{")
        && !name.contains(wrong)
        && !name.ends_with('.')
        && name.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock"))
}

/// What names a commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Revision {
    /// The default branch: `HEAD`; if that names no commit, the default branch that the repository was opened
    /// with; if there is none, `refs/heads/master`.
    Head,
    /// A ref.
    Ref(RefName),
    /// This commit, if it exists.
    Commit(Commit),
}

impl Revision {
    /// Returns the head of a branch, named without `refs/heads/`.
    ///
    /// # Errors
    /// If Git does not permit the name.
    pub fn branch(name: &str) -> Result<Self, InvalidRevision> {
        Self::below("refs/heads/", name)
    }

    /// Returns the commit of a tag, named without `refs/tags/`.
    ///
    /// # Errors
    /// If Git does not permit the name.
    pub fn tag(name: &str) -> Result<Self, InvalidRevision> {
        Self::below("refs/tags/", name)
    }

    /// Returns the ref with this full name, such as `refs/merge-requests/1/head`.
    ///
    /// # Errors
    /// If it does not begin with `refs/`, or Git does not permit the name.
    pub fn full(name: &str) -> Result<Self, InvalidRevision> {
        RefName::new(name).map(Self::Ref)
    }

    /// Returns the commit with these digits.
    ///
    /// # Errors
    /// If there are not 40 or 64 of them.
    pub fn commit(digits: &str) -> Result<Self, InvalidRevision> {
        digits.parse().map(Self::Commit).map_err(|_| InvalidRevision::Commit(digits.to_owned()))
    }

    fn below(prefix: &str, name: &str) -> Result<Self, InvalidRevision> {
        if name.len() > MAX_REF {
            return Err(InvalidRevision::TooLong);
        }
        RefName::new(&format!("{prefix}{name}"))
            .map(Self::Ref)
            .map_err(|_| InvalidRevision::Name(name.to_owned()))
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Head => f.write_str("HEAD"),
            Self::Ref(name) => name.fmt(f),
            Self::Commit(commit) => commit.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_git_permits() {
        for good in ["main", "review/a-b", "a@b", "@", "ä", "-x", "1.0", "a.lock.b"] {
            assert_eq!(Revision::branch(good).unwrap().to_string(), format!("refs/heads/{good}"));
        }
        for wrong in [
            "", "/a", "a/", "a//b", "a..b", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\b", "a b", "a@{1}",
            "a.", ".a", "a/.b", "a.lock", "a.lock/b", "a\u{7f}", "a\n",
        ] {
            assert_eq!(Revision::branch(wrong), Err(InvalidRevision::Name(wrong.into())), "{wrong:?}");
        }
        assert!(matches!(Revision::full("heads/a"), Err(InvalidRevision::NotFull(_))));
        assert!(Revision::full("refs/merge-requests/1/head").is_ok());
        assert!(matches!(Revision::tag(&"a".repeat(2000)), Err(InvalidRevision::TooLong)));
        assert!(Revision::commit("abc").is_err());
        assert!(Revision::commit(&"ab".repeat(20)).is_ok());
    }
}
