//! Section `identity`.

use std::path::PathBuf;

use settings::walk::Section;

use super::gitlab::GitLab;

/// Where agents and their tokens are known.
#[derive(Debug, Clone, PartialEq)]
pub enum Identity {
    /// Section `identity`: in a file.
    File {
        /// The file that lists the agents.
        file: PathBuf,
        /// Whether the file name is the default; kas then creates an empty file with instructions.
        is_default: bool,
    },
    /// Section `gitlab`: in GitLab.
    GitLab(Box<GitLab>),
}

/// Whether GitLab knows the agents. A file that is named takes precedence, also in a configuration made for
/// GitLab.
pub(super) fn is_gitlab(root: &Section<'_, '_>) -> bool {
    root.has("gitlab") && !root.given_in("identity", "file")
}

/// Declares the section, and returns the file if it names one.
pub(super) fn file(root: &mut Section<'_, '_>) -> Option<PathBuf> {
    root.section(
        "identity",
        "The agents and their tokens. Without `file`, GitLab is asked, if there is a section gitlab.",
        |s| {
            s.path(
                "file",
                "A YAML list of agents with the SHA-256 of their tokens, reloaded on change. Empty: agents.yaml in \
                 state_dir.",
            )
        },
    )
}
