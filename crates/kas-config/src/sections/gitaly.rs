//! Section `gitaly`, which has no effect in this version.

use settings::walk::Section;

use super::gitlab::bucket;

const NOT_GITALY: &str = "configuration comes from agent.configuration.folder or .git, not from Gitaly";

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) {
    root.inert(NOT_GITALY, |s| {
        s.section("gitaly", "Limits on calls to Gitaly.", |s| {
            s.section("global_api_rate_limit", "For all servers together.", |s| bucket(s, 10.0, 50));
            s.section("per_server_api_rate_limit", "For each server.", |s| bucket(s, 5.0, 10));
        });
    });
}
