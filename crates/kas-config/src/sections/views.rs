//! Section `views`.

use std::{path::PathBuf, time::Duration};

use settings::walk::{Rule, Section};

use super::minutes;

/// The least memory of views: a page of a list must fit.
const LEAST_MEMORY: u32 = 1 << 20;
/// The range of the time after which rights are asked for again.
const LEAST_RIGHTS: Duration = Duration::from_secs(1);
const MOST_RIGHTS: Duration = Duration::from_secs(60);

/// Section `views`: rows of objects of agents' clusters, for those who look at them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Views {
    /// The memory of the rows of all views, in bytes.
    pub memory: u32,
    /// How long rows are kept fresh that nobody looks at any more.
    pub linger: Duration,
    /// How long it takes until it is asked again what a caller may see.
    pub rights_period: Duration,
    /// Files with further views.
    pub files: Vec<PathBuf>,
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) -> Views {
    let doc = "Views: rows of objects of many clusters, kept fresh by a watch while somebody looks at them. kasctl get \
               shows them.";
    root.section("views", doc, |s| Views {
        memory: s.number_within(
            "memory",
            256 << 20,
            LEAST_MEMORY..=u32::MAX,
            "The memory of the rows of all views, in bytes. If it is full, rows that nobody looks at are dropped, then \
             views end with RESOURCE_EXHAUSTED.",
        ),
        linger: s.duration(
            "linger",
            minutes(5),
            Rule::NotNegative,
            "How long rows are kept fresh after the last caller that looked at them has left.",
        ),
        rights_period: s.duration(
            "rights_period",
            MOST_RIGHTS,
            Rule::Within(LEAST_RIGHTS, MOST_RIGHTS),
            "While a user of the Kubernetes API endpoint looks at a view, the API servers are asked again after this time \
             whether it still may. A shorter one ends its streams sooner, and costs more requests: two for each agent and \
             resource.",
        ),
        files: {
            let doc = "Files with further views: views: [{name, resources: [{group, version, resource, labels, fields}], \
                       columns}]. They are read at the start.";
            s.texts("files", &[], doc).into_iter().map(PathBuf::from).collect()
        },
    })
}
