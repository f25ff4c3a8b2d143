//! Section `components`.

use std::path::PathBuf;

use settings::walk::Section;

/// Declares the section. Returns the files with rules; empty: those that kas has.
pub(super) fn read(root: &mut Section<'_, '_>) -> Vec<PathBuf> {
    let doc = "Components: which known software runs in the clusters of agents. kasctl components shows it.";
    root.section("components", doc, |s| {
        let doc =
            "Files with rules instead of those that kas has, see docs/fleet.md. They are read at the start.";
        s.texts("files", &[], doc).into_iter().map(PathBuf::from).collect()
    })
}
