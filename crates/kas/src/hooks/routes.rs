//! The paths of the listener, and who may send there.

/// A path of the listener.
#[derive(Debug)]
pub(crate) struct Route {
    /// The path. A segment `{…}` stands for any one.
    pub(crate) pattern: &'static str,
    /// The method.
    pub(crate) method: &'static str,
    /// Who may send.
    pub(crate) auth: Auth,
}

/// Who may send to a path. There is no class for everybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Auth {
    /// A sender that has the secret or the key of the hook that the path names, which the home of its agent
    /// verifies before anything is kept.
    OfHook,
}

/// Everything that the listener serves.
pub(crate) const ROUTES: &[Route] =
    &[Route { pattern: "/hooks/v1/{agent}/{hook}", method: "POST", auth: Auth::OfHook }];

impl Route {
    /// Returns the route of a path, and what stands in its variable segments, as it was sent.
    pub(super) fn find(path: &str) -> Option<(&'static Self, Vec<&str>)> {
        ROUTES.iter().find_map(|route| Some((route, route.matches(path)?)))
    }

    fn matches<'p>(&self, path: &'p str) -> Option<Vec<&'p str>> {
        let (mut expected, mut sent) = (self.pattern.split('/'), path.split('/'));
        let mut found = Vec::new();
        loop {
            match (expected.next(), sent.next()) {
                (None, None) => return Some(found),
                (Some(pattern), Some(segment)) if pattern.starts_with('{') => found.push(segment),
                (Some(pattern), Some(segment)) if pattern == segment => {}
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_a_class_that_this_table_names() {
        let classes: Vec<_> = ROUTES.iter().map(|route| (route.method, route.pattern, route.auth)).collect();
        // A new path must be added here, with who may send there, and to the process tests of hostile
        // senders.
        assert_eq!(classes, [("POST", "/hooks/v1/{agent}/{hook}", Auth::OfHook)]);
    }

    #[test]
    fn only_a_whole_path_matches() {
        let find = |path| Route::find(path).map(|(_, found)| found);
        assert_eq!(find("/hooks/v1/7/push"), Some(vec!["7", "push"]));
        for other in
            ["", "/", "/hooks/v1/7", "/hooks/v1/7/push/", "/hooks/v1/7/a/b", "/Hooks/v1/7/a", "//7/a"]
        {
            assert_eq!(find(other), None, "{other}");
        }
    }
}
