//! The URL of the Kubernetes API endpoint of kas.

use std::{fmt, str::FromStr};

use ids::AgentId;

use crate::address::host_port;

/// What follows the URL in the path of a cluster.
const AGENTS: &str = "agents";

/// An https URL whose path ends with a slash. It is normalised, so that equal endpoints have equal texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KasUrl {
    /// Without brackets around an IPv6 address.
    host: String,
    port: u16,
    /// Starts and ends with a slash.
    path: String,
}

/// The reason why a text is not such a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    /// Another scheme.
    #[error("expected https://: kubectl sends no credential to a server without TLS")]
    Scheme,
    /// No host, an invalid port, a user, a query or a fragment.
    #[error("expected a URL such as https://kas.example.com/ or https://example.com:8154/k8s/")]
    Form,
    /// The URL of an agent.
    #[error("expected the URL of kas, without agents/ and the number of an agent at its end")]
    Agent,
}

impl FromStr for KasUrl {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        if text.contains(['@', '#', '?', '%']) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Invalid::Form);
        }
        let uri: http::Uri = text.parse().map_err(|_| Invalid::Form)?;
        if uri.scheme() != Some(&http::uri::Scheme::HTTPS) {
            return Err(Invalid::Scheme);
        }
        let authority = uri.authority().ok_or(Invalid::Form)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        let has_port = authority.as_str().len() > authority.host().len();
        let port = if has_port { authority.port_u16().unwrap_or(0) } else { 443 };
        if host.is_empty() || port == 0 {
            return Err(Invalid::Form);
        }
        let inner = uri.path().trim_matches('/');
        if agent_in_path(inner).is_some() {
            return Err(Invalid::Agent);
        }
        let path = if inner.is_empty() { "/".to_owned() } else { format!("/{inner}/") };
        Ok(Self { host, port, path })
    }
}

impl fmt::Display for KasUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}{}", self.authority(), self.path)
    }
}

impl KasUrl {
    /// Returns the host, and the port unless it is 443.
    fn authority(&self) -> String {
        match self.port {
            443 if self.host.contains(':') => format!("[{}]", self.host),
            443 => self.host.clone(),
            port => host_port(&self.host, port),
        }
    }

    /// Returns the URL of the list of agents.
    pub(crate) fn list(&self) -> String {
        format!("{self}{AGENTS}")
    }

    /// Returns the URL of what kas answers itself, below `/fleet/`. The prefix is not part of it.
    pub(crate) fn fleet(&self, rest: &str) -> String {
        format!("https://{}/fleet/{rest}", self.authority())
    }

    /// Returns the server of an agent's cluster.
    pub(crate) fn server(&self, agent: AgentId) -> String {
        format!("{self}{AGENTS}/{agent}")
    }

    /// Returns the name of the user in a kubeconfig.
    pub(crate) fn user_name(&self) -> String {
        let place = format!("{}{}", self.authority(), self.path);
        format!("kas-{}", place.trim_end_matches('/').replace('/', "-"))
    }

    /// Whether a server is a cluster of this endpoint.
    pub(crate) fn serves(&self, server: &str) -> bool {
        agent_of(server).is_some_and(|agent| {
            let own = self.server(agent);
            let server = server.trim_end_matches('/');
            server == own || server.parse::<http::Uri>().is_ok_and(|uri| same(&uri, &own))
        })
    }
}

/// Whether two URLs differ only in the case of the host, or in a port that is the default one.
fn same(uri: &http::Uri, own: &str) -> bool {
    let Ok(own) = own.parse::<http::Uri>() else { return false };
    let host = |uri: &http::Uri| uri.host().map(str::to_ascii_lowercase);
    let port = |uri: &http::Uri| uri.port_u16().unwrap_or(443);
    uri.scheme() == own.scheme()
        && host(uri) == host(&own)
        && port(uri) == port(&own)
        && uri.path_and_query() == own.path_and_query()
}

/// Returns the agent whose cluster a server is: its path ends with `agents/` and a number.
pub(crate) fn agent_of(server: &str) -> Option<AgentId> {
    let uri: http::Uri = server.parse().ok()?;
    agent_in_path(uri.path().trim_matches('/')).filter(|_| uri.query().is_none())
}

fn agent_in_path(path: &str) -> Option<AgentId> {
    let mut segments = path.rsplit('/');
    let number = segments.next().filter(|number| !number.starts_with('0'))?;
    let is_agent = segments.next() == Some(AGENTS);
    is_agent.then(|| number.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> KasUrl {
        text.parse().unwrap()
    }

    #[test]
    fn urls_are_normalised() {
        let seven = AgentId::new(7).unwrap();
        for (given, server) in [
            ("https://KAS.test", "https://kas.test/agents/7"),
            ("https://kas.test:443/", "https://kas.test/agents/7"),
            ("https://kas.test:8154/k8s", "https://kas.test:8154/k8s/agents/7"),
            ("https://[fd00::1]:1/a/b/", "https://[fd00::1]:1/a/b/agents/7"),
        ] {
            let url = url(given);
            assert_eq!(url.server(seven), server);
            assert_eq!(url.to_string().parse(), Ok(url.clone()));
            assert_eq!(agent_of(server), Some(seven));
            assert!(url.serves(server) && url.serves(&format!("{server}/")));
        }
        assert_eq!(url("https://kas.test:8154/k8s").user_name(), "kas-kas.test:8154-k8s");
        assert_eq!(url("https://kas.test").user_name(), "kas-kas.test");
    }

    #[test]
    fn other_urls_are_refused() {
        for (text, error) in [
            ("http://kas.test", Invalid::Scheme),
            ("kas.test", Invalid::Scheme),
            ("https://user@kas.test", Invalid::Form),
            ("https://kas.test:0", Invalid::Form),
            ("https://kas.test:x", Invalid::Form),
            ("https://kas.test/?a", Invalid::Form),
            ("https://kas.test/#a", Invalid::Form),
            ("https://k as.test/", Invalid::Form),
            ("https://kas.test/agents/7", Invalid::Agent),
        ] {
            assert_eq!(text.parse::<KasUrl>(), Err(error), "{text}");
        }
    }

    #[test]
    fn servers_of_others_are_not_served() {
        let kas = url("https://kas.test/k8s/");
        for other in [
            "https://other.test/k8s/agents/7",
            "https://kas.test/agents/7",
            "https://kas.test.evil/k8s/agents/7",
            "http://kas.test/k8s/agents/7",
            "https://kas.test:444/k8s/agents/7",
            "https://kas.test/k8s/agents/07",
            "https://kas.test/k8s/agents/7?x",
            "https://kas.test/k8s/agents/x",
            "",
        ] {
            assert!(!kas.serves(other), "{other}");
        }
        assert!(kas.serves("https://KAS.test:443/k8s/agents/7"));
    }
}
