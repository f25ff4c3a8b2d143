//! Direct routes: tells proxies which replica holds an agent, so that they send its requests there.
//!
//! An answer is only a hint. Whichever replica gets a request routes it, so a wrong answer costs a hop and
//! nothing else.

mod listener;
mod metrics;
mod routes;

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use cluster::{Door, Doors, Tracker, Wire};
use ids::{AgentId, ReplicaId};
use parking_lot::RwLock;
use routing::registry::TunnelRegistry;
use secrecy::{ExposeSecret as _, SecretString};

pub(crate) use self::listener::DirectListener;
#[cfg(feature = "fuzzing")]
pub use self::listener::fuzz;
pub use self::metrics::DirectMetrics;
use self::metrics::{By, Owner};
pub(crate) use self::routes::{Auth, ROUTES};

/// The fewest bytes of the secret of proxies.
const SHORTEST: usize = 16;
/// How long the tracker may take. With Redis it asks there about agents that it does not remember.
const LOOKUP: Duration = Duration::from_millis(100);

/// Reads the secret of proxies.
///
/// # Errors
/// Returns what was found instead, without any of the content.
pub(crate) fn read_secret(path: &Path) -> Result<SecretString, String> {
    let secret = settings::secret::read_password(path)?;
    let text = secret.expose_secret();
    if text.len() < SHORTEST || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let shown = path.display();
        return Err(format!("not one line of {SHORTEST} or more visible characters of ASCII ({shown})"));
    }
    Ok(secret)
}

/// The secret of proxies, which can be replaced.
pub(crate) struct ProxySecret(RwLock<SecretString>);

impl ProxySecret {
    pub(crate) fn new(secret: SecretString) -> Arc<Self> {
        Arc::new(Self(RwLock::new(secret)))
    }

    pub(crate) fn replace(&self, secret: SecretString) {
        *self.0.write() = secret;
    }

    /// Whether `given` is the secret, in constant time.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        settings::secret::is_same(&self.0.read(), given)
    }
}

/// Knows which replica holds an agent.
pub(crate) struct Owners {
    pub(crate) me: ReplicaId,
    /// Where callers reach this replica.
    pub(crate) doors: Doors,
    pub(crate) tracker: Arc<dyn Tracker>,
    pub(crate) tunnels: Arc<TunnelRegistry>,
    pub(crate) secret: Arc<ProxySecret>,
    pub(crate) metrics: Arc<DirectMetrics>,
}

impl Owners {
    /// Returns the door of a ready replica that holds the agent, else that of this replica. `None`: this
    /// replica has no such door.
    async fn door(&self, agent: Option<AgentId>, door: Door) -> Option<SocketAddr> {
        let (owner, address) = match agent {
            None => (Owner::Unknown, None),
            Some(agent) if self.tunnels.may_serve(agent) => (Owner::Here, None),
            Some(agent) => match self.other(agent, door).await {
                Some(address) => (Owner::Other, Some(address)),
                None => (Owner::Unknown, None),
            },
        };
        self.metrics.told(By::Lookup, owner);
        address.or_else(|| self.doors.get(door))
    }

    /// Returns the door of another ready replica that holds the agent: of any of them, so that each gets its
    /// part.
    async fn other(&self, agent: AgentId, door: Door) -> Option<SocketAddr> {
        let located = tokio::time::timeout(LOOKUP, self.tracker.locate(agent)).await.ok()?.ok()?;
        let doors: Vec<SocketAddr> = located
            .iter()
            .filter(|candidate| candidate.wire == Wire::Own && candidate.replica.id != self.me)
            .filter_map(|candidate| self.tracker.doors(&candidate.replica.id).get(door))
            .collect();
        if doors.is_empty() { None } else { doors.get(rand::random_range(0..doors.len())).copied() }
    }
}

#[async_trait]
impl kubernetes_api::Owners for Owners {
    fn is_proxy(&self, secret: &[u8]) -> bool {
        self.secret.is(secret)
    }

    async fn elsewhere(&self, agent: AgentId) -> Option<SocketAddr> {
        let (owner, address) = if self.tunnels.may_serve(agent) {
            (Owner::Here, None)
        } else {
            match self.other(agent, Door::Http).await {
                Some(address) => (Owner::Other, Some(address)),
                None => (Owner::Unknown, None),
            }
        };
        self.metrics.told(By::Accel, owner);
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_secret_is_a_line_that_a_header_can_have() {
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            let path = dir.path().join("secret");
            std::fs::write(&path, text).unwrap();
            read_secret(&path).map(|secret| secret.expose_secret().to_owned())
        };
        assert_eq!(read("0123456789abcdef\n"), Ok("0123456789abcdef".to_owned()));
        for bad in
            ["0123456789abcde\n", "0123456789 abcdef\n", "0123456789abcdef\nx\n", "", "0123456789abcdéé"]
        {
            let why = read(bad).unwrap_err();
            assert!(!why.contains("0123"), "{why}");
        }
    }

    #[test]
    fn only_the_whole_secret_is_the_secret() {
        let secret = ProxySecret::new("0123456789abcdef".into());
        assert!(secret.is(b"0123456789abcdef"));
        for bad in [&b""[..], b"0123456789abcde", b"0123456789abcdefx", b"0123456789abcdeF"] {
            assert!(!secret.is(bad));
        }
        secret.replace("fedcba9876543210".into());
        assert!(!secret.is(b"0123456789abcdef") && secret.is(b"fedcba9876543210"));
    }
}
