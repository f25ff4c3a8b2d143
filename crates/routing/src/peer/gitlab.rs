//! Borrows tunnels from replicas of GitLab's kas 14.1, at the URL that they write into Redis.
//!
//! The borrow request has the method and the metadata of the request itself, and the response begins when the
//! replica has a tunnel, see [`tunnel::kas_end::gitlab`]. 14.1 does not answer that the agent is not there or
//! that it is busy: a borrow request waits until there is a tunnel or it is cancelled. A cancelled one costs
//! the agent a tunnel, which it then opens again. Other replicas that hold the agent are therefore asked
//! first.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use grpc::{Code, Outcome, Status, format_timeout};
use http::{HeaderMap, HeaderName, HeaderValue};
use ids::AgentId;
use net::tls::Live;
use parking_lot::Mutex;
use process::error::chain;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tunnel::kas_end::{
    Opening,
    gitlab::{Said, ready},
};

use super::{
    ASKS, Ask, CONNECT, Credential, Lent, Peers, Refusal, SWEEP,
    link::{CallError, Connector, Keepalive, LentBody, Link},
};
use crate::metadata;

/// Names the agent.
pub const AGENT: HeaderName = HeaderName::from_static("kas-hop-routing-agent-id");

/// After this time without an answer another replica is asked too.
pub const HEDGE: Duration = Duration::from_millis(250);
/// 14.1 closes a connection on which two pings come within 20 s.
const KEEPALIVE: Keepalive = Keepalive { interval: Duration::from_secs(25), timeout: Duration::from_secs(5) };
/// The maximum number of remembered replicas. If there are more, unused connections are closed.
const MOST: usize = 64;
/// The maximum length of a URL in bytes.
const LONGEST: usize = 512;

/// The replicas of GitLab's kas that were called.
#[derive(Default)]
pub(super) struct Gateways(Mutex<HashMap<Arc<str>, Arc<Gateway>>>);

/// Splits the URL of a private API. Returns whether it requires TLS, and `host:port`.
fn split(url: &str) -> Result<(bool, &str), String> {
    let (secure, address) = if let Some(address) = url.strip_prefix("grpc://") {
        (false, address)
    } else if let Some(address) = url.strip_prefix("grpcs://") {
        (true, address)
    } else {
        return Err("its url is neither grpc://host:port nor grpcs://host:port".to_owned());
    };
    let authority: Option<http::uri::Authority> = address.parse().ok();
    let legal = authority.is_some_and(|a| a.port_u16().is_some() && !a.as_str().contains('@'));
    if legal && url.len() <= LONGEST {
        Ok((secure, address))
    } else {
        Err("its url names no host:port".to_owned())
    }
}

impl Peers {
    /// Returns the replica of GitLab's kas at `url`. It connects when it is first used.
    ///
    /// # Errors
    /// Why it is not called, for people: the URL is malformed, or its scheme does not fit the configuration
    /// of this replica. One that has certificates never sends its credential in plain text.
    pub fn gateway(&self, url: &Arc<str>) -> Result<Arc<Gateway>, String> {
        let mut gateways = self.gateways.0.lock();
        if let Some(gateway) = gateways.get(url) {
            return Ok(Arc::clone(gateway));
        }
        let (secure, address) = split(url)?;
        match (secure, &self.tls) {
            (false, Some(_)) => {
                return Err("it listens in plain text, and this replica, which has certificates, would send it a \
                            credential: replicas of GitLab's kas can be asked only where private_api has no certificates"
                    .to_owned());
            }
            (true, None) => {
                return Err(
                    "it wants TLS, and this replica has no certificates for its private API".to_owned()
                );
            }
            _ => {}
        }
        if gateways.len() >= MOST {
            // Callers that use one keep it.
            gateways.retain(|_, gateway| Arc::strong_count(gateway) > 1);
        }
        let gateway = Arc::new(Gateway {
            address: address.into(),
            tls: self.tls.clone().filter(|_| secure),
            connector: Arc::clone(&self.connector),
            credential: Arc::clone(&self.credential),
            link: AsyncMutex::default(),
            asks: Mutex::default(),
            sweep_at: AtomicU64::new(SWEEP as u64),
        });
        if gateways.len() < MOST {
            gateways.insert(Arc::clone(url), Arc::clone(&gateway));
        }
        Ok(gateway)
    }
}

/// The borrow requests of one queue have these in common.
type Queue = (AgentId, Arc<str>);

/// A replica of GitLab's kas.
pub struct Gateway {
    address: Arc<str>,
    tls: Option<Live<rustls::ClientConfig>>,
    connector: Arc<dyn Connector>,
    credential: Arc<Credential>,
    link: AsyncMutex<Option<Link>>,
    asks: Mutex<HashMap<Queue, Weak<Semaphore>>>,
    sweep_at: AtomicU64,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Gateway {
    async fn link(&self) -> Result<Link, super::DialError> {
        // The first caller dials, and the others wait for it.
        let mut slot = self.link.lock().await;
        if let Some(link) = &*slot
            && link.is_open()
        {
            return Ok(link.clone());
        }
        *slot = None;
        let tls = self.tls.as_ref().map(Live::current);
        let link = Link::dial_with(&*self.connector, &self.address, tls, CONNECT, KEEPALIVE).await?;
        Ok(slot.insert(link).clone())
    }

    fn queue(&self, ask: &Ask) -> Arc<Semaphore> {
        let key = (ask.agent, Arc::clone(&ask.method));
        let mut asks = self.asks.lock();
        if let Some(semaphore) = asks.get(&key).and_then(Weak::upgrade) {
            return semaphore;
        }
        if asks.len() as u64 >= self.sweep_at.load(Ordering::Relaxed) {
            asks.retain(|_, semaphore| semaphore.strong_count() > 0);
            self.sweep_at.store((2 * asks.len()).max(SWEEP) as u64, Ordering::Relaxed);
        }
        let semaphore = Arc::new(Semaphore::new(ASKS));
        asks.insert(key, Arc::downgrade(&semaphore));
        semaphore
    }

    /// Borrows a tunnel for a request with `headers`, and waits until the replica has one. At most 16 borrow
    /// requests for the same agent and method are sent there. Further ones wait here, in the order of their
    /// arrival.
    ///
    /// # Errors
    /// See [`Refusal`].
    ///
    /// # Cancel safety
    /// Dropping the future cancels the borrow request.
    pub async fn ask(self: Arc<Self>, ask: Ask, headers: HeaderMap) -> Result<Lent, Refusal> {
        let unavailable = |error: &dyn std::error::Error| Refusal::Unavailable(chain(error));
        let queue = self.queue(&ask);
        let _permit = queue.acquire().await.map_err(|error| unavailable(&error))?;
        let mut again = true;
        let (response, send) = loop {
            let link = self.link().await.map_err(|error| unavailable(&error))?;
            let mut request = link.request(&ask.method, self.credential.authorization_14_1());
            let map = request.headers_mut();
            map.extend(metadata::to_gateway(&headers, &ask.correlation));
            map.insert(AGENT, ask.agent.get().into());
            if let Some(remaining) = ask.deadline.remaining()
                && let Ok(value) = HeaderValue::try_from(format_timeout(remaining))
            {
                map.insert("grpc-timeout", value);
            }
            match link.open(request).await {
                Ok(opened) => break opened,
                // It was not processed: the connection has reached its maximum age, or the replica drains.
                Err(CallError::Refused(_)) if again => again = false,
                Err(error) => return Err(unavailable(&error)),
            }
        };
        if let Some(status) = Status::from_headers(response.headers()) {
            return Err(refusal(&status));
        }
        if response.status() != http::StatusCode::OK {
            return Err(Refusal::Unavailable(format!("it answered with HTTP status {}", response.status())));
        }
        let body = grpc::boxed(LentBody::new(response.into_body()));
        let mut opening = Opening::new(body, false);
        match ready(&mut opening).await {
            Said::Ready => Ok(Lent::of_gateway(opening, send)),
            Said::None => Err(Refusal::NotThere),
            Said::Refused(status) => Err(refusal(&status)),
            Said::Broken(why) => Err(Refusal::Unavailable(why)),
        }
    }
}

fn refusal(status: &Status) -> Refusal {
    match status.code() {
        // In 14.1 this means: ask another replica.
        Code::Ok => Refusal::NotThere,
        // It serves only the methods that its release knows.
        Code::Unimplemented => {
            let text = format!("a replica of GitLab's kas holds the agent: {}", status.message());
            Refusal::Final(Status::new(Code::Unimplemented, text).with_outcome(Outcome::NotStarted))
        }
        code => Refusal::Unavailable(format!("{code}: {}", status.message())),
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Candidate, Replica, ReplicaHealth, Wire};
    use ids::ReplicaId;

    use super::*;

    #[test]
    fn replicas_of_gitlab_come_after_live_ones_of_ours_and_before_suspect_ones() {
        let candidate = |id: &str, health, wire| Candidate {
            replica: Replica { id: ReplicaId::new(id), address: id.into() },
            health,
            wire,
        };
        let all = [
            candidate("s", ReplicaHealth::Suspect, Wire::Own),
            candidate("x", ReplicaHealth::Live, Wire::Gitlab),
            candidate("y", ReplicaHealth::Live, Wire::Gitlab),
            candidate("d", ReplicaHealth::Draining, Wire::Own),
            candidate("a", ReplicaHealth::Live, Wire::Own),
            candidate("b", ReplicaHealth::Live, Wire::Own),
        ];
        for (turn, expected) in [(0, "abdxys"), (1, "badyxs"), (255, "badyxs")] {
            let mut candidates = all.clone();
            super::super::spread(&mut candidates, turn);
            let order: String = candidates.iter().map(|candidate| candidate.replica.id.as_str()).collect();
            assert_eq!(order, expected);
        }
    }

    #[test]
    fn urls_are_those_of_14_1_and_no_others() {
        assert_eq!(split("grpc://10.0.0.1:8155"), Ok((false, "10.0.0.1:8155")));
        assert_eq!(split("grpcs://[fd00::1]:8155"), Ok((true, "[fd00::1]:8155")));
        for wrong in [
            "",
            "10.0.0.1:8155",
            "http://10.0.0.1:8155",
            "grpc://10.0.0.1",
            "grpc://user@10.0.0.1:8155",
            "grpc://10.0.0.1:8155/x",
            "grpc://10.0.0.1:x",
            &format!("grpc://{}:1", "a".repeat(LONGEST)),
        ] {
            assert!(split(wrong).is_err(), "{wrong}");
        }
    }
}
