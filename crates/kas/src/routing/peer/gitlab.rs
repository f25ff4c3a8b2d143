//! Replicas of GitLab's kas, 14.1, as this one calls them: by the url that they write into Redis.
//!
//! The ask is the request's own method with its metadata, and its answer begins when the replica has a
//! tunnel; see [`tunnel::kas_end::gitlab`]. 14.1 says neither that the agent is not there nor that it is
//! busy: an ask waits until there is a tunnel or the asker goes. Each ask that is taken back costs the agent
//! a tunnel, which it opens again; so who else holds the agent is asked first.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use grpc::{Code, Outcome, Status, format_timeout};
use http::{HeaderMap, HeaderName, HeaderValue};
use ids::AgentId;
use net::tls::Live;
use process::error::chain;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tunnel::kas_end::{
    Opening,
    gitlab::{Said, ready},
};

use super::{
    ASKS, Ask, CONNECT, Credential, Lent, Peers, Refusal, SWEEP,
    link::{CallError, Keepalive, LentBody, Link},
};
use crate::routing::metadata;

/// Names the agent.
pub const AGENT: HeaderName = HeaderName::from_static("kas-hop-routing-agent-id");

/// An ask that is not answered after this time may wait long: another replica is asked too.
pub const HEDGE: Duration = Duration::from_millis(250);
/// 14.1 closes a connection on which a ping comes sooner than 20 s after the one before.
const KEEPALIVE: Keepalive = Keepalive { interval: Duration::from_secs(25), timeout: Duration::from_secs(5) };
/// Replicas whose connections are kept; when there are more, those that carry nothing are closed.
const MOST: usize = 64;
/// What a url may be long.
const LONGEST: usize = 512;

/// The replicas of GitLab's kas that were asked.
#[derive(Default)]
pub(super) struct Gateways(Mutex<HashMap<Arc<str>, Arc<Gateway>>>);

/// Splits the url of a private API; returns whether it asks for TLS, and `host:port`.
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
    /// Returns the replica of GitLab's kas at `url`, which connects when it is needed.
    ///
    /// # Errors
    /// Why it is not asked, for a person: the url is none, or says that this replica's credential, which is
    /// all that keeps others out of the private API, should go in plain text from a replica that has
    /// certificates.
    pub fn gateway(&self, url: &Arc<str>) -> Result<Arc<Gateway>, String> {
        let mut gateways = self.gateways.0.lock().unwrap_or_else(PoisonError::into_inner);
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
            // Whoever uses one goes on with it.
            gateways.retain(|_, gateway| Arc::strong_count(gateway) > 1);
        }
        let gateway = Arc::new(Gateway {
            address: address.into(),
            tls: self.tls.clone().filter(|_| secure),
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

/// What asks stand in one queue for.
type Queue = (AgentId, Arc<str>);

/// A replica of GitLab's kas.
pub struct Gateway {
    address: Arc<str>,
    tls: Option<Live<rustls::ClientConfig>>,
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
        // One dials, the others wait for it.
        let mut kept = self.link.lock().await;
        if let Some(link) = &*kept
            && link.is_open()
        {
            return Ok(link.clone());
        }
        *kept = None;
        let tls = self.tls.as_ref().map(Live::current);
        let link = Link::dial_with(&self.address, tls, CONNECT, KEEPALIVE).await?;
        Ok(kept.insert(link).clone())
    }

    fn queue(&self, ask: &Ask) -> Arc<Semaphore> {
        let key = (ask.agent, Arc::clone(&ask.method));
        let mut asks = self.asks.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Asks for a tunnel, with the caller's `headers`, and waits until the replica has one. At most 16 asks
    /// for one agent and method stand there; the others wait here, first come first served.
    ///
    /// # Errors
    /// See [`Refusal`]; where there is no tunnel the replica says nothing more of it.
    ///
    /// # Cancel safety
    /// Dropping the future takes the ask back.
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
                // Nobody looked at it: the connection had its age, or the replica leaves.
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
        // It tries elsewhere.
        Code::Ok => Refusal::NotThere,
        // It serves only what its own release knows.
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
    fn those_of_gitlab_come_after_ours_that_live_and_before_those_that_may_not() {
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
