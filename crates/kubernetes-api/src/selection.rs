//! Which agent a request is for.
//!
//! An agent is named in the path (`<prefix>agents/7/…`), by the host (`agent-7.<suffix>`), or by the
//! credential (`ci:7:…`). All that name one must agree.

use std::fmt;

use ids::AgentId;

use crate::failure::Failure;

/// The part of a path that comes before an agent's number.
const AGENTS: &str = "agents";
/// The path that says whether this replica is ready.
pub(crate) const READY: &str = "/-/ready";
/// The label of a host name that comes before an agent's number.
const AGENT_LABEL: &str = "agent-";

/// The prefix of every path: it begins and ends with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix(Box<str>);

impl Prefix {
    /// Returns a prefix with a slash at both ends, as configured or added.
    pub fn new(text: &str) -> Self {
        let inner = text.trim_matches('/');
        Self(if inner.is_empty() { "/".into() } else { format!("/{inner}/").into() })
    }

    /// Returns the prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a path is for. [`own_paths`](crate::own_paths) lists those that kas answers itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    /// Whether this replica is ready: `/-/ready`.
    Ready,
    /// The list of agents: `<prefix>agents`.
    List,
    /// What kas answers itself: `/fleet/…`.
    Fleet,
    /// The API of an agent's cluster.
    Cluster(InCluster<'a>),
}

/// A path in the API of an agent's cluster.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InCluster<'a> {
    /// The agent, if the path names it.
    pub(crate) agent: Option<AgentId>,
    /// What was cut off, without a slash at its end.
    pub(crate) cut: &'a str,
    /// Path and query of the request to the API server, byte for byte. It may lack the slash at its
    /// beginning, see [`InCluster::target`].
    rest: &'a str,
}

impl InCluster<'_> {
    /// Returns path and query for the API server, which begin with a slash.
    pub(crate) fn target(&self) -> String {
        if self.rest.starts_with('/') { self.rest.to_owned() } else { format!("/{}", self.rest) }
    }
}

/// Reads path and query of a request.
///
/// # Errors
/// If the path does not begin with the prefix, or has something else than a number where an agent's number
/// should be.
pub(crate) fn place<'a>(prefix: &Prefix, path_and_query: &'a str) -> Result<Place<'a>, Failure> {
    let path = path_and_query.split('?').next().unwrap_or_default();
    if path == READY {
        return Ok(Place::Ready);
    }
    if path == "/fleet" || path.starts_with("/fleet/") {
        return Ok(Place::Fleet);
    }
    // Without the slash at its end, so that it stays at the beginning of the rest.
    let outer = prefix.0.trim_end_matches('/');
    let inner = path_and_query
        .strip_prefix(outer)
        .filter(|rest| rest.is_empty() || rest.starts_with(['/', '?']))
        .ok_or_else(|| Failure::malformed(format!("the path must begin with {prefix}")))?;
    let segments = inner.strip_prefix('/').and_then(|rest| rest.strip_prefix(AGENTS));
    match segments.filter(|rest| rest.is_empty() || rest.starts_with(['/', '?'])) {
        None => {
            Ok(Place::Cluster(InCluster { agent: None, cut: &path_and_query[..outer.len()], rest: inner }))
        }
        Some(rest) => match rest.strip_prefix('/') {
            None => Ok(Place::List),
            Some(rest) => {
                let end = rest.find(['/', '?']).unwrap_or(rest.len());
                let agent = number(&rest[..end]).ok_or_else(|| {
                    Failure::malformed(format!("{prefix}agents/ must be followed by the number of an agent"))
                })?;
                let cut = &path_and_query[..path_and_query.len() - rest.len() + end];
                Ok(Place::Cluster(InCluster { agent: Some(agent), cut, rest: &rest[end..] }))
            }
        },
    }
}

/// Returns the agent that path and query of a request to the endpoint name; `None`: they name none, or are
/// not of the endpoint.
pub fn agent_of_uri(prefix: &Prefix, path_and_query: &str) -> Option<AgentId> {
    match place(prefix, path_and_query) {
        Ok(Place::Cluster(at)) => at.agent,
        _ => None,
    }
}

/// Returns the agent that a host name names; `None`: it is not below `suffix`.
///
/// # Errors
/// If it is below `suffix`, and is not the name of an agent.
pub(crate) fn by_host(host: &str, suffix: &str) -> Result<Option<AgentId>, Failure> {
    let host = without_port(host);
    // A name with a dot at its end is the same name.
    let host = host.strip_suffix('.').unwrap_or(host);
    let Some(at) = host.len().checked_sub(suffix.len()) else { return Ok(None) };
    let (label, end) = match (host.get(..at), host.get(at..)) {
        (Some(label), Some(end)) if end.eq_ignore_ascii_case(suffix) => (label, end),
        _ => return Ok(None),
    };
    // The suffix itself, or another name that ends with the same letters.
    let Some(label) = label.strip_suffix('.') else { return Ok(None) };
    let begin = label.get(..AGENT_LABEL.len());
    let digits =
        begin.filter(|begin| begin.eq_ignore_ascii_case(AGENT_LABEL)).map(|begin| &label[begin.len()..]);
    match digits.and_then(number) {
        Some(agent) => Ok(Some(agent)),
        None => Err(Failure::malformed(format!("a host below {end} must be agent-<number>.{end}"))),
    }
}

/// Returns the host of `host[:port]`, also of an address in brackets.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

/// Reads an agent's number: decimal digits without a sign or a leading zero.
fn number(text: &str) -> Option<AgentId> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    is_plain.then(|| text.parse().ok())?
}

/// Returns the agent that a request is for.
///
/// # Errors
/// If none is named, or two different ones are.
pub(crate) fn agreed(named: [Option<AgentId>; 3], prefix: &Prefix) -> Result<AgentId, Failure> {
    let mut named = named.into_iter().flatten();
    let Some(first) = named.next() else {
        return Err(Failure::malformed(format!("no agent is named: use the path {prefix}agents/<number>/")));
    };
    if named.all(|other| other == first) {
        Ok(first)
    } else {
        Err(Failure::malformed("path, host and credential name different agents"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(number: i64) -> AgentId {
        AgentId::new(number).unwrap()
    }

    #[test]
    fn prefixes_have_a_slash_at_both_ends() {
        for (text, expected) in
            [("", "/"), ("/", "/"), ("k8s", "/k8s/"), ("/k8s", "/k8s/"), ("/a/b/", "/a/b/"), ("//", "/")]
        {
            assert_eq!(Prefix::new(text).as_str(), expected);
        }
    }

    #[test]
    fn prefix_and_agent_are_cut_off_byte_for_byte() {
        let cut = |prefix: &str, path: &str| match place(&Prefix::new(prefix), path) {
            Ok(Place::Cluster(at)) => Ok((at.agent, at.cut.to_owned(), at.target())),
            Ok(other) => panic!("{path}: {other:?}"),
            Err(failure) => Err(failure.status.code().as_u16()),
        };
        let at = |agent: Option<i64>, cut: &str, target: &str| {
            Ok((agent.map(id), cut.to_owned(), target.to_owned()))
        };
        for (prefix, path, expected) in [
            ("/", "/api/v1/pods?watch=1", at(None, "", "/api/v1/pods?watch=1")),
            ("/", "/", at(None, "", "/")),
            ("/", "/agents/7/api/v1", at(Some(7), "/agents/7", "/api/v1")),
            ("/", "/agents/7", at(Some(7), "/agents/7", "/")),
            ("/", "/agents/7/", at(Some(7), "/agents/7", "/")),
            ("/", "/agents/7?x=/y", at(Some(7), "/agents/7", "/?x=/y")),
            ("/", "/agents/7//a%2Fb;c/%252F?d=%2f", at(Some(7), "/agents/7", "//a%2Fb;c/%252F?d=%2f")),
            ("/", "/agentsx/7", at(None, "", "/agentsx/7")),
            ("/k8s", "/k8s/api", at(None, "/k8s", "/api")),
            ("/k8s", "/k8s", at(None, "/k8s", "/")),
            ("/k8s", "/k8s?a", at(None, "/k8s", "/?a")),
            ("/k8s", "/k8s/agents/12/a", at(Some(12), "/k8s/agents/12", "/a")),
            ("/k8s", "/k8sx/api", Err(400)),
            ("/k8s", "/api", Err(400)),
            ("/k8s", "/%6b8s/api", Err(400)),
            ("/", "/agents/07/a", Err(400)),
            ("/", "/agents/+7/a", Err(400)),
            ("/", "/agents/0/a", Err(400)),
            ("/", "/agents/%37/a", Err(400)),
            ("/", "/agents//a", Err(400)),
            ("/", "/agents/", Err(400)),
            ("/", "/agents/99999999999999999999/a", Err(400)),
            ("/", "*", Err(400)),
        ] {
            assert_eq!(cut(prefix, path), expected, "{prefix} {path}");
        }
    }

    #[test]
    fn other_paths_have_their_own_place() {
        for (prefix, path, expected) in [
            ("/", "/-/ready", Place::Ready),
            ("/k8s", "/-/ready?x", Place::Ready),
            ("/", "/agents", Place::List),
            ("/k8s", "/k8s/agents?x", Place::List),
            ("/k8s", "/fleet/a", Place::Fleet),
        ] {
            assert_eq!(place(&Prefix::new(prefix), path).unwrap(), expected, "{path}");
        }
    }

    #[test]
    fn hosts_below_the_suffix_name_an_agent() {
        let named = |host| by_host(host, "k8s.example.com").map_err(|failure| failure.status.code().as_u16());
        for (host, expected) in [
            ("agent-7.k8s.example.com", Ok(Some(id(7)))),
            ("AGENT-7.K8S.Example.com:8154", Ok(Some(id(7)))),
            ("agent-7.k8s.example.com.", Ok(Some(id(7)))),
            ("agent-7.k8s.example.com.:8154", Ok(Some(id(7)))),
            ("foo.k8s.example.com.", Err(400)),
            ("k8s.example.com", Ok(None)),
            ("xk8s.example.com", Ok(None)),
            ("other.example.com:443", Ok(None)),
            ("[::1]:8154", Ok(None)),
            ("", Ok(None)),
            ("agent-07.k8s.example.com", Err(400)),
            ("agent-.k8s.example.com", Err(400)),
            ("foo.k8s.example.com", Err(400)),
            ("a.agent-7.k8s.example.com", Err(400)),
            ("ägent-7.k8s.example.com", Err(400)),
        ] {
            assert_eq!(named(host), expected, "{host}");
        }
    }

    #[test]
    fn all_that_name_an_agent_must_agree() {
        let agree = |named: [Option<i64>; 3]| {
            agreed(named.map(|number| number.map(id)), &Prefix::new("/"))
                .map_err(|failure| failure.status.text().to_owned())
        };
        assert_eq!(agree([Some(7), None, None]), Ok(id(7)));
        assert_eq!(agree([Some(7), Some(7), Some(7)]), Ok(id(7)));
        assert!(agree([Some(7), None, Some(8)]).unwrap_err().contains("different"));
        assert!(agree([None; 3]).unwrap_err().contains("no agent is named"));
    }

    proptest! {
        #[test]
        fn any_path_and_host_are_read(path in ".{0,200}", host in ".{0,80}", prefix in "[a-z/]{0,12}") {
            let prefix = Prefix::new(&prefix);
            if let Ok(Place::Cluster(at)) = place(&prefix, &path) {
                prop_assert!(at.target().starts_with('/'));
                prop_assert!(path.ends_with(at.rest));
            }
            let _ = by_host(&host, "example.com");
        }
    }
}
