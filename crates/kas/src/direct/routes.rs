//! The paths of the listener, and who may ask.

/// A path of the listener.
#[derive(Debug)]
pub(crate) struct Route {
    /// The path.
    pub(crate) path: &'static str,
    /// The methods.
    pub(crate) methods: &'static [&'static str],
    /// Who may ask.
    pub(crate) auth: Auth,
}

/// Who may ask for a path. There is no class for everybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Auth {
    /// A proxy that has the secret of all proxies. It is checked before the path is looked at.
    Proxy,
}

/// Everything that the listener serves.
pub(crate) const ROUTES: &[Route] =
    &[Route { path: "/fleet/owner", methods: &["GET", "HEAD"], auth: Auth::Proxy }];

impl Route {
    /// Returns the route of a path.
    pub(super) fn find(path: &str) -> Option<&'static Self> {
        ROUTES.iter().find(|route| route.path == path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_a_class_that_this_table_names() {
        let classes: Vec<_> = ROUTES.iter().map(|route| (route.methods, route.path, route.auth)).collect();
        // A new path must be added here, with who may ask for it.
        assert_eq!(classes, [(&["GET", "HEAD"][..], "/fleet/owner", Auth::Proxy)]);
        assert!(Route::find("/fleet/owner").is_some());
        for other in ["", "/", "/fleet/owner/", "/Fleet/owner", "/fleet"] {
            assert!(Route::find(other).is_none(), "{other}");
        }
    }
}
