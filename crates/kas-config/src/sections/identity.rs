//! Section `identity`.

use std::path::PathBuf;

use settings::walk::Section;

use super::gitlab::GitLab;

/// Who knows the agents.
#[derive(Debug, Clone, PartialEq)]
pub enum Identity {
    /// Section `identity`.
    File {
        /// The file that lists the agents.
        file: PathBuf,
        /// Whether the file was left to kas, which then makes an empty one that explains itself.
        is_default: bool,
    },
    /// Section `gitlab`.
    GitLab(Box<GitLab>),
}

/// Whether GitLab knows the agents. A file that was named is what its author wants, also in a configuration
/// that was GitLab's.
pub(super) fn is_gitlab(root: &Section<'_, '_>) -> bool {
    root.has("gitlab") && !root.given_in("identity", "file")
}

/// Declares the section, and returns the file if it names one.
pub(super) fn file(root: &mut Section<'_, '_>) -> Option<PathBuf> {
    root.section(
        "identity",
        "Which agents there are and what their tokens are. Without `file` GitLab knows, if there is a section gitlab.",
        |s| {
            s.path(
                "file",
                "A YAML list of agents with the SHA-256 of their tokens, reloaded on change. Empty: agents.yaml in \
                 state_dir.",
            )
        },
    )
}
