//! Gitaly for tests: [`Small`], a server over the system's Git that can be slowed and scripted, and [`Real`],
//! GitLab's own program.
//!
//! Both serve the bare repositories below a folder, which tests write with Git. [`Small`] answers the calls
//! that a client of kas needs: `FindCommit`, `GetTreeEntries` and `GetBlobs`.

mod build;
mod git;
mod messages;
mod real;
mod small;

pub use self::{
    real::Real,
    small::{Scripted, SeenCall, Small},
};

/// The name of the only storage.
pub const STORAGE: &str = "default";

/// Finds GitLab's own Gitaly, and builds it when this machine has none yet. Blocks for minutes when it must
/// be built.
///
/// # Errors
/// When there is no Go, or the build fails.
pub fn program() -> anyhow::Result<std::path::PathBuf> {
    build::provide()
}
