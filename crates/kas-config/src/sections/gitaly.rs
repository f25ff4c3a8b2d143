//! Section `gitaly`.

use std::path::PathBuf;

use settings::walk::Section;

use super::gitlab::bucket;

const NOT_GITALY: &str = "agents are known from identity.file, and GitLab names no Gitaly";

/// Section `gitaly`: how GitLab's Git servers are called.
#[derive(Debug, Clone, PartialEq)]
pub struct Gitaly {
    /// Calls to all servers together: per second in the long run (above zero), and at once.
    pub all: (f64, u32),
    /// Calls to each server: per second in the long run (above zero), and at once.
    pub per_server: (f64, u32),
    /// The authority that signed the certificates of servers, in addition to the system's roots.
    pub ca_certificate: Option<PathBuf>,
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>, by_gitlab: bool) -> Gitaly {
    root.optional((!by_gitlab).then_some(NOT_GITALY), |s| {
        let doc = "GitLab's Git servers, from which the configuration and the manifests of agents are read. GitLab names \
                   their addresses and tokens.";
        s.section("gitaly", doc, |s| {
            let all = s.section(
                "global_api_rate_limit",
                "How often this replica may call all servers together. Further calls wait. Checks for changes get half of \
                 this.",
                |s| bucket(s, 200.0, 400),
            );
            let per_server = s.section(
                "per_server_api_rate_limit",
                "How often this replica may call one server.",
                |s| bucket(s, 100.0, 200),
            );
            let ca_certificate = s.path(
                "ca_certificate_file",
                "PEM of the authority that signed the certificates of servers with tls://, in addition to the system's \
                 roots.",
            );
            Gitaly { all, per_server, ca_certificate }
        })
    })
}
