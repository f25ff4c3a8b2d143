//! What is served below `/fleet/`, and who may ask for it.

use percent_encoding::percent_decode_str;

use crate::selection::READY;

/// A path below `/fleet/`.
#[derive(Debug)]
pub(crate) struct Route {
    /// The path. A segment `{…}` stands for any one, and `{*}` at the end for all that follow.
    pub(crate) pattern: &'static str,
    /// The methods besides `OPTIONS`.
    pub(crate) methods: &'static [&'static str],
    /// Who may ask.
    pub(crate) auth: Auth,
    /// The largest body of a request, in bytes.
    pub(crate) most_body: usize,
    pub(crate) serves: Serves,
}

/// Who may ask for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Auth {
    /// Who may use the agent that query, host or credential name.
    AgentOfQuery,
    /// Who may use the agent in the first variable segment of the path.
    AgentOfPath,
    /// Any valid credential. The answer concerns only the agents that it may use, and each of them
    /// is asked as whom the rules say.
    EachAgent,
    /// Everybody: the same bytes for all, which are in the program. Only for [`Serves::Page`].
    Everybody,
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Serves {
    /// This crate.
    Diff,
    /// This crate: the files of [`OwnPage`](crate::OwnPage).
    Page,
    /// [`Fleet`](super::Fleet).
    Fleet(FleetRoute),
}

/// A path that [`Fleet`](super::Fleet) answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FleetRoute {
    /// `/fleet/prometheus/agent/{id}/api/v1/…`: the Prometheus of one agent.
    PrometheusOfAgent,
    /// `/fleet/prometheus/select/{selector}/api/v1/…`: those of many as if they were one.
    PrometheusOfFleet,
    /// `/fleet/views/{view}`: rows of objects of many agents.
    View,
    /// `/fleet/components/{selector}`: known software in the clusters of many agents.
    Components,
    /// `/fleet/applications/{selector}`: installed applications there.
    Applications,
}

/// Reading, and questions in a form.
const ASK: &[&str] = &["GET", "HEAD", "POST"];
/// Reading.
const READ: &[&str] = &["GET", "HEAD"];
/// The largest body of a diff, in bytes: 20 MiB of files, their paths, and what JSON adds.
pub(crate) const FILES: usize = 24 << 20;
/// The largest form of a question to Prometheus.
const FORM: usize = 64 << 10;

/// Everything below `/fleet/`.
pub(crate) const ROUTES: &[Route] = &[
    Route {
        pattern: "/fleet/diff",
        methods: &["POST"],
        auth: Auth::AgentOfQuery,
        most_body: FILES,
        serves: Serves::Diff,
    },
    Route {
        pattern: "/fleet/prometheus/agent/{id}/api/v1/{*}",
        methods: ASK,
        auth: Auth::AgentOfPath,
        most_body: FORM,
        serves: Serves::Fleet(FleetRoute::PrometheusOfAgent),
    },
    Route {
        pattern: "/fleet/prometheus/select/{selector}/api/v1/{*}",
        methods: ASK,
        auth: Auth::EachAgent,
        most_body: FORM,
        serves: Serves::Fleet(FleetRoute::PrometheusOfFleet),
    },
    Route {
        pattern: "/fleet/views/{view}",
        methods: &["GET"],
        auth: Auth::EachAgent,
        most_body: 0,
        serves: Serves::Fleet(FleetRoute::View),
    },
    Route {
        pattern: "/fleet/components/{selector}",
        methods: READ,
        auth: Auth::EachAgent,
        most_body: 0,
        serves: Serves::Fleet(FleetRoute::Components),
    },
    Route {
        pattern: "/fleet/applications/{selector}",
        methods: READ,
        auth: Auth::EachAgent,
        most_body: 0,
        serves: Serves::Fleet(FleetRoute::Applications),
    },
    Route {
        pattern: "/fleet/page",
        methods: READ,
        auth: Auth::Everybody,
        most_body: 0,
        serves: Serves::Page,
    },
    Route {
        pattern: "/fleet/page/{*}",
        methods: READ,
        auth: Auth::Everybody,
        most_body: 0,
        serves: Serves::Page,
    },
];

/// A path that kas itself answers at the endpoint, as others see it.
#[derive(Clone, Copy, Debug)]
pub struct OwnPath {
    /// The path. A segment `{…}` stands for any one, and `{*}` at the end for all that follow.
    pub pattern: &'static str,
    /// The methods besides `OPTIONS`.
    pub methods: &'static [&'static str],
    /// Whether everybody may ask, without a credential.
    pub is_for_everybody: bool,
}

/// Returns everything that kas itself answers at the endpoint. The list of agents is below
/// `url_path_prefix`. All else goes to the API servers of agents, for callers with a credential.
pub fn own_paths() -> impl Iterator<Item = OwnPath> {
    let others = [
        OwnPath { pattern: READY, methods: READ, is_for_everybody: true },
        OwnPath { pattern: "/agents", methods: READ, is_for_everybody: false },
    ];
    let routes = ROUTES.iter().map(|route| OwnPath {
        pattern: route.pattern,
        methods: route.methods,
        is_for_everybody: route.auth == Auth::Everybody,
    });
    others.into_iter().chain(routes)
}

impl Route {
    /// Returns the route of a path, and what stands in its variable places: segments decoded, the rest as it
    /// was sent. `None`: there is nothing, or a segment is not text.
    pub(crate) fn find(path: &str) -> Option<(&'static Self, Vec<String>)> {
        ROUTES.iter().find_map(|route| Some((route, route.matches(path)?)))
    }

    fn matches(&self, path: &str) -> Option<Vec<String>> {
        let mut found = Vec::new();
        let mut rest = Some(path);
        for expected in self.pattern.split('/') {
            let here = rest?;
            if expected == "{*}" {
                found.push(here.to_owned());
                return Some(found);
            }
            let (segment, after) = match here.split_once('/') {
                Some((segment, after)) => (segment, Some(after)),
                None => (here, None),
            };
            if expected.starts_with('{') {
                found.push(percent_decode_str(segment).decode_utf8().ok()?.into_owned());
            } else if expected != segment {
                return None;
            }
            rest = after;
        }
        rest.is_none().then_some(found)
    }

    /// Returns the value of `Allow`.
    pub(crate) fn allow(&self) -> String {
        format!("{}, OPTIONS", self.methods.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_one_route_and_its_variable_parts() {
        let find = |path: &str| Route::find(path).map(|(route, found)| (route.serves, found.join(" ")));
        let agent = Serves::Fleet(FleetRoute::PrometheusOfAgent);
        let fleet = Serves::Fleet(FleetRoute::PrometheusOfFleet);
        for (path, expected) in [
            ("/fleet/diff", Some((Serves::Diff, ""))),
            ("/fleet/diff/", None),
            ("/fleet/diffs", None),
            ("/fleet", None),
            ("/fleet/", None),
            ("/fleet/prometheus/agent/7/api/v1/query", Some((agent, "7 query"))),
            ("/fleet/prometheus/agent/7/api/v1/label/a%2Fb/values", Some((agent, "7 label/a%2Fb/values"))),
            ("/fleet/prometheus/agent/7/api/v1", None),
            ("/fleet/prometheus/select/id=7%7C9,a=b/api/v1/query", Some((fleet, "id=7|9,a=b query"))),
            ("/fleet/components/all", Some((Serves::Fleet(FleetRoute::Components), "all"))),
            ("/fleet/applications/id=7%7C9", Some((Serves::Fleet(FleetRoute::Applications), "id=7|9"))),
            ("/fleet/applications", None),
            ("/fleet/prometheus/select/%ff/api/v1/query", None),
            ("/fleet/views/pods", Some((Serves::Fleet(FleetRoute::View), "pods"))),
            ("/fleet/views/", Some((Serves::Fleet(FleetRoute::View), ""))),
            ("/fleet/views/pods/x", None),
            ("/fleet/page", Some((Serves::Page, ""))),
            ("/fleet/page/", Some((Serves::Page, ""))),
            ("/fleet/page/a/b", Some((Serves::Page, "a/b"))),
        ] {
            let expected = expected.map(|(serves, found)| (serves, found.to_owned()));
            assert_eq!(find(path), expected, "{path}");
        }
    }

    #[test]
    fn no_two_routes_have_the_same_pattern_and_all_are_below_fleet() {
        for (n, route) in ROUTES.iter().enumerate() {
            assert!(route.pattern.starts_with("/fleet/") && !route.methods.is_empty(), "{route:?}");
            assert!(!ROUTES[..n].iter().any(|other| other.pattern == route.pattern), "{route:?}");
            let has_agent = route.pattern.contains("{id}");
            assert_eq!(has_agent, route.auth == Auth::AgentOfPath, "{route:?}");
            assert_eq!(route.auth == Auth::Everybody, route.serves == Serves::Page, "{route:?}");
        }
    }
}
